"""Conclusions of a comparison in a few sentences: the winner, the differences, the compared models and their costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.formats import format_pair as with_half
from fedloom.formats import format_significant, write_total
from fedloom.lab.report.comparison.contenders import Models, best_row, default_baseline, select_contenders
from fedloom.lab.report.comparison.criteria import group_comparable_runs
from fedloom.lab.report.comparison.family import PairVerdict
from fedloom.lab.report.comparison.pairs import Pair, compare_pairs
from fedloom.lab.report.naming import MEGABYTE_BYTES, describe_figure, lowercase_title, titled
from fedloom.lab.report.numbers import MIN_SEEDS, Row, leading_metric, method_rows
from fedloom.lab.report.reading import read_runs
from fedloom.lab.report.run import Run
from fedloom.lab.report.tables import cell_text, make_arrow_table, write_difference

MAX_SHOWN_PAIRS = 3
"""Maximum number of differences shown in a terminal and at the top of a report. The report's table of pairs contains
all differences."""


class Conclusion(NamedTuple):
    """Result of a comparison, in words.

    Attributes:
        task: labels of the compared runs, if there are several groups of comparable runs. Empty if there is only one
            group.
        answer: sentence that names the winner, or states that there is no winner.
        pairs: one line for each compared method, with its mean, its difference from the baseline and the verdict.
        compared: sentence that states which models are compared. Empty if there is nothing to compare.
        cost: sentence that states the gradients and the traffic of the best method and of the baseline. Empty if these
            costs were not recorded.
        tests: comparisons with the baseline, which determine ``pairs``. Empty if there is no baseline.
    """

    task: str
    answer: str
    pairs: tuple[str, ...]
    compared: str
    cost: str
    tests: tuple[Pair, ...] = ()

    def lines(self, shown: int | None = MAX_SHOWN_PAIRS) -> list[str]:
        """Return the conclusion as a list of lines.

        Args:
            shown: maximum number of pairs to include. If None, all pairs are included.
        """
        rest = len(self.pairs[shown:]) if shown is not None else 0
        head = f"{self.task}: {self.answer}" if self.task else self.answer
        more = [f"  {rest} more in the report"] if rest else []
        pair_lines = [f"  {line}" for line in self.pairs[:shown]]
        return [line for line in (head, *pair_lines, *more, self.compared, self.cost) if line]


def conclude_groups(
    runs: list[Run],
    rows: list[Row],
    baseline: str | None = None,
    compare_model: Models = "best-on-validation",
    margin: float | None = None,
) -> list[Conclusion]:
    """Return a conclusion for each group of comparable runs.

    Args:
        runs: runs that contain the rows.
        rows: rows of the results table, one for each model of each method.
        baseline: label of the baseline. If None, this is local training, else FedAvg, else the first method if there is
            only one run.
        compare_model: which model of each method is compared.
        margin: largest difference that does not matter in practice, in the primary metric's units. If None, equivalence
            is not tested.
    """
    lead, conclusions = leading_metric(runs), []
    several = group_comparable_runs(runs, rows)
    for label, own_runs, task_rows in several:
        shown = [row for row in select_contenders(own_runs, task_rows, compare_model) if row.result(lead) is not None]
        if not shown:
            continue
        base = baseline if baseline is not None and any(baseline in (r.method, r.name) for r in shown) else None
        name = base or default_baseline(shown) or (shown[0].name if len(runs) == 1 else None)
        compared = [] if name is None else compare_pairs(own_runs, task_rows, name, compare_model, margin=margin)
        conclusions.append(_conclude_task(label if len(several) > 1 else "", lead, shown, compared, compare_model))
    return conclusions


def conclude_runs(
    run_dirs: Sequence[Path],
    baseline: str | None = None,
    compare_model: Models = "best-on-validation",
    margin: float | None = None,
) -> list[Conclusion]:
    """Return the conclusions for recorded runs, given by their directories (see `conclude_groups`).

    Raises:
        RunDirError: a folder is not a run directory, or cannot be read.
    """
    runs = read_runs(run_dirs)
    return conclude_groups(runs, method_rows(runs), baseline, compare_model, margin)


def comparison_record(
    run_dirs: Sequence[Path],
    baseline: str | None = None,
    compare_model: Models = "best-on-validation",
    margin: float | None = None,
) -> dict[str, Any]:
    """Return the results, comparisons and conclusions of run directories as unrounded, unscaled values.

    Raises:
        RunDirError: a folder is not a run directory, or cannot be read.
    """
    runs = read_runs(run_dirs)
    rows = method_rows(runs)
    record = conclude_groups(runs, rows, baseline, compare_model, margin)
    texts = ("task", "answer", "pairs", "compared", "cost")
    return {
        "runs": [str(folder) for folder in run_dirs],
        "results": make_arrow_table(rows).to_pylist(),
        "comparisons": [pair.record() for one in record for pair in one.tests],
        "conclusions": [{name: getattr(one, name) for name in texts} for one in record],
    }


def _conclude_task(task: str, lead: str, shown: list[Row], compared: list[Pair], compare_model: Models) -> Conclusion:
    best = best_row([row for row in shown if row.algorithm], lead)
    if not compared or best is None:
        means = [f"{_row_title(row)}: {cell_text(lead, row.figures.get(lead))}" for row in shown]
        alone = "There is nothing to compare" if len(shown) == 1 else "There is no baseline (local or fedavg)"
        answer = f"{alone}. Test {lowercase_title(titled(describe_figure(lead)))}:"
        return Conclusion(task, answer, tuple(means), "", _cost_sentence([best] if best else []))
    reference = compared[0].reference
    lines = tuple(_pair_line(pair) for pair in compared)
    cost = _cost_sentence([best] if best is reference else [best, reference])
    answer = f"Answer: {_answer_sentence(compared, reference)}."
    return Conclusion(task, answer, lines, _compared_models_sentence(shown, compare_model), cost, tuple(compared))


def _answer_sentence(compared: list[Pair], reference: Row) -> str:
    """Return the sentence that names the winner, or states that there is no winner."""
    of_methods = [pair for pair in compared if pair.row.algorithm]
    better, tested = ([p for p in of_methods if test(p)] for test in (_is_better, lambda p: not p.reason))
    seeds = max((p.comparison.seeds for p in compared if p.comparison), default=0)
    shown, name = describe_figure(compared[0].figure), compared[0].figure
    unit = f" {shown.unit}" if shown.unit else ""
    mean = f"{lowercase_title(shown.title)} {cell_text(name, reference.figures[name])}{unit}"
    beside = f"{reference.name} (test {mean}, {seeds} seeds)"
    if better:
        verb = "is" if len(better) == 1 else "are"
        names = _join_names([p.row.name for p in better])
        first = f", and {better[0].row.name} has the best mean" if len(better) > 1 else ""
        return f"{names} {verb} better than {beside}{first}"
    if not tested and of_methods and seeds < MIN_SEEDS:
        return f"not tested, because a test needs at least {MIN_SEEDS} seeds"
    same = [p.row.name for p in of_methods if p.verdict == PairVerdict.EQUIVALENT]
    equal = f", equivalent within the margin: {_join_names(same)}" if same else ""
    return f"no method is better than {beside}{equal}"


def _is_better(pair: Pair) -> bool:
    return pair.verdict == PairVerdict.BETTER


def _pair_line(pair: Pair) -> str:
    one = pair.comparison
    gap = ""
    if one and math.isfinite(one.mean):
        gap = f", {with_half(*write_difference(pair.figure, one.mean, one.half))} to {pair.reference.name}"
    return f"{_row_title(pair.row)}: {cell_text(pair.figure, pair.row.figures[pair.figure])}{gap}, {pair.words}"


def _row_title(row: Row) -> str:
    return f"{row.name} ({row.model})" if row.model and row.algorithm else row.name


def _compared_models_sentence(shown: list[Row], compare_model: Models) -> str:
    """Return the sentence that states which models are compared."""
    if compare_model == "all":
        return "Compared models: all models of every method."
    if compare_model == "personal":
        return "Compared models: personal, or global if a method has no personal models."
    if any(row.model == "hybrid" for row in shown):
        return "Compared models: hybrid (each client's better model on validation data)."
    return "Compared models: the only model of each method."


def _cost_sentence(rows: list[Row]) -> str:
    """Return a sentence that states the number of gradients and the traffic of the given rows."""
    parts = []
    for row in rows:
        work, up, down = (row.figures.get(name) for name in ("samples_backward", "bytes_up", "bytes_down"))
        if work is not None and work.finite:
            traffic = sum(estimate.mean for estimate in (up, down) if estimate is not None and estimate.finite)
            parts.append(
                f"{row.name} {write_total(work.mean)} gradients + {format_significant(traffic / MEGABYTE_BYTES, 3)} MB"
            )
    return f"Cost per run: {', '.join(parts)}." if parts else ""


def _join_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
