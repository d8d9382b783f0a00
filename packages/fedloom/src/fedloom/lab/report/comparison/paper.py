"""Table of results for a paper, with at most one row per method.

The best rows, and rows that are not significantly worse, are marked.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.lab.report.comparison.contenders import Models, select_contenders
from fedloom.lab.report.comparison.criteria import HighlightedRows, find_highlighted_rows, group_comparable_runs
from fedloom.lab.report.numbers import Row
from fedloom.lab.report.run import Run
from fedloom.lab.report.tables import latex_columns, render_latex_table


def results_latex(
    runs: list[Run], rows: list[Row], columns: Sequence[str] | None = None, models: Models = "best-on-validation"
) -> str:
    """Render the table of results as LaTeX (see `render_latex_table`).

    The table contains at most one row per method unless ``models`` is "all".
    """
    shown: list[Row] = []
    places: dict[str, list[HighlightedRows]] = {}
    for _, own_runs, task_rows in group_comparable_runs(runs, rows):
        part, ratio = select_contenders(own_runs, task_rows, models), max(run.ratio for run in own_runs)
        for name, column_marks in find_highlighted_rows(part, latex_columns(rows, columns), ratio).items():
            places.setdefault(name, []).append(column_marks.shift(len(shown)))
        shown += part
    joint = {name: HighlightedRows.union(column_marks) for name, column_marks in places.items()}
    return render_latex_table(shown, experiment_names(runs), columns, joint)


def experiment_names(runs: list[Run]) -> str:
    """Return the names of the experiments, separated by commas."""
    names = dict.fromkeys(run.summary.name or str(run.options.get("name", run.label)) for run in runs)
    return ", ".join(names)
