"""Comparison of each method with a baseline: differences, confidence intervals and p-values, as CSV, LaTeX and HTML."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedloom import formats
from fedloom.errors import ConfigError
from fedloom.formats import UNKNOWN_DASH, format_p_value
from fedloom.hints import unknown_name_error
from fedloom.lab.report.comparison.contenders import (
    Models,
    default_baseline,
    first_positions_of_models,
    select_contenders,
)
from fedloom.lab.report.comparison.criteria import group_comparable_runs
from fedloom.lab.report.comparison.family import (
    DifferenceTest,
    PairVerdict,
    pair_verdict,
    run_family_tests,
    scope_sentence,
    seed_differences,
    untested_reason,
)
from fedloom.lab.report.csv_files import render_csv
from fedloom.lab.report.markup import render_scrolling_table
from fedloom.lab.report.naming import describe_figure, is_ratio, titled
from fedloom.lab.report.numbers import Row, find_run, leading_metric
from fedloom.lab.report.run import Run
from fedloom.lab.report.tables import BOOKTABS_LINE, escape_tex, latex_tabular, mark_cell, render_cell, write_difference

PAIR_HEADINGS = ("Method", "Model", "Mean", "Against", "Difference", "p", "Holm p", "Verdict")


class Pair(NamedTuple):
    """Comparison of a method with the baseline.

    Attributes:
        row: row of the method.
        reference: row of the baseline.
        figure: name of the compared metric, a key of ``Row.figures``.
        comparison: the method's metric minus the baseline's metric. For metrics that are compared as ratios
            (`is_ratio`), the logarithm of the ratio. All methods form one family of tests. None if both rows describe
            the same models.
        margin: largest difference that does not matter in practice, in the units of the comparison. None if a margin
            was not given.
        ratio: number of test samples per training sample, which is used to correct the test (see `run_family_tests`).
    """

    row: Row
    reference: Row
    figure: str
    comparison: DifferenceTest | None
    margin: float | None = None
    ratio: float = 0.0

    @property
    def verdict(self) -> PairVerdict:
        """Verdict on the method in comparison with the baseline."""
        return pair_verdict(
            self.comparison, higher=bool(describe_figure(self.figure).higher_is_better), margin=self.margin
        )

    @property
    def reason(self) -> str:
        """Reason why the difference is not tested. If the difference is tested, the reason is empty."""
        return untested_reason(self.comparison)

    @property
    def words(self) -> str:
        """Verdict, followed by the reason if the difference was not tested and a remark if runs have no result."""
        reason = f" ({self.reason})" if self.reason else ""
        return ", ".join(filter(None, (f"{self.verdict}{reason}", self.row.remark)))

    def record(self) -> dict[str, Any]:
        """Return the comparison as plain values, neither rounded nor scaled. Missing values become None."""
        comparison = self.comparison
        half = comparison.half if comparison and math.isfinite(comparison.mean) else math.nan  # NaN for a ratio to 0
        numbers = {
            "difference": comparison and comparison.mean, "half_width": half,
            "p": comparison and comparison.p, "p_holm": comparison and comparison.holm,
        }  # fmt: skip
        return {
            "run": self.row.run, "method": self.row.method, "model": self.row.model,
            "reference": self.reference.method, "reference_model": self.reference.model, "figure": self.figure,
            "seeds": comparison.seeds if comparison else len(self.row.figures[self.figure].finite),
            "mean": self.row.figures[self.figure].mean, "reference_mean": self.reference.figures[self.figure].mean,
            **{key: value if value is not None and math.isfinite(value) else None for key, value in numbers.items()},
            "scale": "log ratio" if is_ratio(self.figure) else "difference", "margin": self.margin,
            "verdict": str(self.verdict), "reason": self.reason,
        }  # fmt: skip


def compare_pairs(
    runs: list[Run], rows: list[Row], baseline: str | None, models: Models = "best-on-validation",
    name: str | None = None, margin: float | None = None,
) -> list[Pair]:  # fmt: skip
    """Compare each method with a baseline, and return the comparisons, best method first.

    Runs with different data or attacks form separate families of tests.

    Args:
        runs: runs that contain the rows.
        rows: rows of the results table, one for each model of each method.
        baseline: label of the baseline, such as ``local``. If there are several runs, it may also name a method of one
            run, such as ``local · run``. If None, the default baseline of each group of runs is used (see `reference`),
            and groups without a default baseline are omitted.
        models: which model of each method to compare.
        name: name of the metric to compare, such as ``accuracy`` or ``accuracy/worst10``. If None, this is the primary
            metric.
        margin: largest difference that does not matter in practice, in the metric's units (0.01 is one percentage point
            of accuracy). For metrics that are compared as ratios, the logarithm of the largest such ratio. If None,
            equivalence is not tested.

    Raises:
        ConfigError: the method or the metric does not exist.
    """
    lead = name or leading_metric(runs)
    comparisons: list[Pair] = []
    everyone: list[Row] = []
    for _, own_runs, task_rows in group_comparable_runs(runs, rows):
        shown = [row for row in select_contenders(own_runs, task_rows, models) if lead in row.figures]
        everyone += shown
        label = baseline or default_baseline(shown)
        row = next((row for row in shown if label in (row.method, row.name)), None)
        comparisons += _test_pair_family(shown, row, lead, own_runs, margin) if row else []
    if not everyone and name is not None:
        raise unknown_name_error("figure", lead, {shown: None for row in rows for shown in row.figures})
    if baseline is not None and not any(baseline in (row.method, row.name) for row in everyone):
        raise unknown_name_error("method to compare with", baseline, dict.fromkeys(row.name for row in everyone))
    sign = -1 if describe_figure(lead).higher_is_better else 1
    return sorted(comparisons, key=lambda pair: (pair.reference.run, sign * pair.row.figures[lead].mean))


def _test_pair_family(shown: list[Row], base: Row, lead: str, runs: list[Run], margin: float | None) -> list[Pair]:
    place = shown.index(base)
    rivals = [k for k in range(len(shown)) if k != place]
    first = first_positions_of_models(shown, [place, *rivals])
    log, ratio = is_ratio(lead), find_run(runs, base).ratio
    tests = run_family_tests(
        {k: seed_differences(shown[k].figures[lead], base.figures[lead], log=log) for k in rivals if first[k] == k},
        ratio=ratio,
    )
    return [Pair(shown[k], base, lead, tests.get(first[k]), margin, ratio) for k in rivals]


def check_margin(margin: object) -> float | None:
    """Check a margin and return it as a number, or None if no margin is given.

    Raises:
        ConfigError: the margin is not a number above 0.
    """
    if margin is None:
        return None
    if isinstance(margin, int | float) and not isinstance(margin, bool) and 0 < margin <= sys.float_info.max:
        return float(margin)
    raise ConfigError(
        f"margin must be a number greater than 0, in the metric's units (0.01 is one percentage point), got {margin!r}"
    )


def pairs_csv(comparisons: Sequence[Pair]) -> str:
    """Render the comparisons as CSV. Unknown values are left empty."""
    records = [pair.record() for pair in comparisons]
    return render_csv(list(records[0]), records) if records else ""


def pairs_latex(comparisons: Sequence[Pair], caption: str) -> str:
    """Render the comparisons as LaTeX (package booktabs).

    Methods that are better than the baseline are printed in bold.
    """
    lead = comparisons[0].figure if comparisons else ""
    baseline = ", ".join(dict.fromkeys(pair.reference.name for pair in comparisons))
    unit = "points" if describe_figure(lead).scale == 100 and not is_ratio(lead) else ""
    gap_head = "Ratio" if is_ratio(lead) else f"Difference{f' ({unit})' if unit else ''}"
    heads = ["Method", "Model", titled(describe_figure(lead)), gap_head, "p", "Holm p", "Verdict"]
    about = scope_sentence(max((pair.ratio for pair in comparisons), default=0.0))
    words = (
        f"{escape_tex(caption)}: every method compared with {escape_tex(baseline)}, paired over seeds. Bold: better "
        f"(paired t test, Holm, 5\\,\\%). The interval of a difference decides the verdict. {escape_tex(about)}"
    )
    lines = []
    for pair in comparisons:
        mean, gap, p, holm = _pair_cells(pair)
        cells = [
            escape_tex(f"{pair.row.name} ({pair.row.remark})" if pair.row.remark else pair.row.name),
            escape_tex(pair.row.model),
            mark_cell(*mean, best=pair.verdict == PairVerdict.BETTER),
            mark_cell(*gap),
            *(f"${text}$" if text != UNKNOWN_DASH else "--" for text in (p, holm)),
            escape_tex(pair.words),
        ]
        lines.append(" & ".join(cells) + " \\\\")
    return "\n".join([BOOKTABS_LINE, *latex_tabular(words, "llrrrrl", heads, lines), ""])


def pairs_html(comparisons: Sequence[Pair]) -> str:
    """Render the comparisons as an HTML table."""
    lines = []
    for pair in comparisons:
        mean, gap, p, holm = _pair_cells(pair)
        shown = [formats.format_pair(*mean), pair.reference.name, formats.format_pair(*gap)]
        lines.append([pair.row.name, pair.row.model, *shown, p, holm, pair.words])
    against = ", ".join(dict.fromkeys(pair.reference.name for pair in comparisons))
    return render_scrolling_table(f"Every method compared with {against}", PAIR_HEADINGS, lines, text=(1, 3, 7))


def _pair_cells(pair: Pair) -> tuple[tuple[str, str], tuple[str, str], str, str]:
    """Format the mean and the difference, each with its interval's half-width, the p-value, and Holm's p-value."""
    one = pair.comparison
    mean = render_cell(pair.figure, pair.row.figures[pair.figure])
    if one is None:
        return mean, (UNKNOWN_DASH, ""), UNKNOWN_DASH, UNKNOWN_DASH
    return mean, write_difference(pair.figure, one.mean, one.half), format_p_value(one.p), format_p_value(one.holm)
