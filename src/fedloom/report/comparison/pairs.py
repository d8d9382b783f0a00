"""Every method against one of them: differences, intervals and p values, as CSV, as LaTeX and as HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from fedloom import formats
from fedloom.errors import unknown
from fedloom.formats import DASH, interval, p_value
from fedloom.report.comparison.contenders import Models, contenders, distinct, reference
from fedloom.report.comparison.criteria import tasks
from fedloom.report.comparison.family import TestedDifference, differences, family
from fedloom.report.csv_files import csv_of
from fedloom.report.naming import figure, titled
from fedloom.report.numbers import ENOUGH, Row, leading_metric
from fedloom.report.run import Run
from fedloom.report.tables import BOOKTABS, cell, decimals, marked, scrolling, tabular, tex

HEADS = ("Method", "Model", "Mean", "Against", "Difference", "p", "Holm p", "Verdict")


class Pair(NamedTuple):
    """A method beside the reference.

    Attributes:
        row: of the method.
        reference: the row that it is compared with.
        figure: name in ``Row.figures`` of what is compared.
        comparison: method minus reference, one of the family of all methods; None where both are the same models.
    """

    row: Row
    reference: Row
    figure: str
    comparison: TestedDifference | None

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, ``level``, ``same models`` or ``not decidable``."""
        if self.comparison is None:
            return "same models"
        if not self.comparison.testable:
            return "not decidable"
        if not self.comparison.significant:
            return "level"
        return "better" if (self.comparison.mean > 0) == figure(self.figure).higher else "worse"

    def record(self) -> dict[str, Any]:
        """The pair as plain values, unrounded and unscaled; None where there is nothing."""
        comparison = self.comparison
        numbers = {
            "difference": comparison and comparison.mean, "half_width": comparison and comparison.half,
            "p": comparison and comparison.p, "p_holm": comparison and comparison.holm,
        }  # fmt: skip
        return {
            "run": self.row.run, "method": self.row.method, "model": self.row.model,
            "reference": self.reference.method, "reference_model": self.reference.model, "figure": self.figure,
            "seeds": comparison.seeds if comparison else len(self.row.figures[self.figure].finite),
            "mean": self.row.figures[self.figure].mean, "reference_mean": self.reference.figures[self.figure].mean,
            **{key: value if value is not None and math.isfinite(value) else None for key, value in numbers.items()},
            "verdict": self.verdict,
        }  # fmt: skip


def pairs(
    runs: list[Run], rows: list[Row], against: str | None, models: Models = "used", name: str | None = None
) -> list[Pair]:
    """Every method against a reference, the best first; runs of other data or attacks are families of their own.

    Args:
        runs: of the rows.
        rows: every model of every method.
        against: label of the reference, such as ``local``; of several runs it may be that of one, as ``local · run``.
            None: that of `reference` for each family, of which some may have none.
        models: which rows of a method are compared.
        name: figure that is compared, such as ``accuracy`` or ``accuracy/worst10``; the leading metric when None.

    Raises:
        ConfigError: there is no such method, or it has no such figure.
    """
    lead = name or leading_metric(runs)
    comparisons: list[Pair] = []
    everyone: list[Row] = []
    for _, own_runs, task_rows in tasks(runs, rows):
        shown = [row for row in contenders(own_runs, task_rows, models) if lead in row.figures]
        everyone += shown
        label = against or reference(shown)
        row = next((row for row in shown if label in (row.method, row.name)), None)
        comparisons += _family(shown, row, lead) if row else []
    if not everyone and name is not None:
        raise unknown("figure", lead, {shown: None for row in rows for shown in row.figures})
    if against is not None and not any(against in (row.method, row.name) for row in everyone):
        raise unknown("method to compare with", against, dict.fromkeys(row.name for row in everyone))
    sign = -1 if figure(lead).higher else 1
    return sorted(comparisons, key=lambda pair: (pair.reference.run, sign * pair.row.figures[lead].mean))


def _family(shown: list[Row], base: Row, lead: str) -> list[Pair]:
    place = shown.index(base)
    rivals = [k for k in range(len(shown)) if k != place]
    first = distinct(shown, [place, *rivals])
    tests = family({k: differences(shown[k].figures[lead], base.figures[lead]) for k in rivals if first[k] == k})
    return [Pair(shown[k], base, lead, tests.get(first[k])) for k in rivals]


def pairs_csv(comparisons: Sequence[Pair]) -> str:
    """The pairs as CSV; empty cells where nothing is known."""
    records = [pair.record() for pair in comparisons]
    return csv_of(list(records[0]), records) if records else ""


def pairs_latex(comparisons: Sequence[Pair], caption: str) -> str:
    """The pairs as LaTeX; needs the package booktabs. Bold is significantly better, a dagger marks what is level."""
    lead = comparisons[0].figure if comparisons else ""
    against = ", ".join(dict.fromkeys(pair.reference.name for pair in comparisons))
    unit = "points" if figure(lead).scale == 100 else ""
    heads = ["Method", "Model", titled(figure(lead)), f"Difference{f' ({unit})' if unit else ''}", "p", "Holm p"]
    words = (
        f"{tex(caption)}: every method against {tex(against)}, paired over seeds. Bold: significantly better; "
        "$^{\\dagger}$: no significant difference (paired t test, Holm, 5\\,\\%). Intervals have the level of their "
        "Holm step."
    )
    lines = []
    for pair in comparisons:
        mean, difference, p, holm = _numbers(pair, unit)
        cells = [
            tex(f"{pair.row.name} ({pair.row.remark})" if pair.row.remark else pair.row.name),
            tex(pair.row.model),
            marked(*mean, best=pair.verdict == "better", level=pair.verdict == "level"),
            marked(*difference) if pair.comparison else tex(pair.verdict),
            *(f"${text}$" if text != DASH else "--" for text in (p, holm)),
        ]
        lines.append(" & ".join(cells) + " \\\\")
    return "\n".join([BOOKTABS, *tabular(words, "llrrrr", heads, lines), ""])


def pairs_html(comparisons: Sequence[Pair]) -> str:
    """The pairs as a table of the page."""
    lines = []
    for pair in comparisons:
        mean, difference, p, holm = _numbers(pair, "points")
        shown = [formats.pair(*mean), pair.reference.name, formats.pair(*difference)]
        words = [pair.row.name, pair.row.model, *shown, p, holm, in_words(pair.verdict, pair.row)]
        lines.append([escape(word) for word in words])
    against = ", ".join(dict.fromkeys(pair.reference.name for pair in comparisons))
    return scrolling(f"Every method against {against}", HEADS, lines, text=(1, 3, 7))


def in_words(verdict: str, row: Row) -> str:
    """Write a verdict, and what became of the runs where one diverged or failed, or had nothing to be tested on."""
    return ", ".join(filter(None, (verdict, row.remark)))


def reasoned(pair: Pair | None) -> str:
    """Write a verdict, and why there is none where the seeds are too few."""
    if pair is None:
        return ""
    one = pair.comparison
    if one is None or one.testable or not one.seeds:
        return pair.verdict
    return f"{pair.verdict}: a test needs {ENOUGH} seeds that both methods have, and there are {one.seeds}"


def _numbers(pair: Pair, unit: str) -> tuple[tuple[str, str], tuple[str, str], str, str]:
    """Mean and difference, each with the half width of its interval, p, and p by Holm."""
    one, scale = pair.comparison, figure(pair.figure).scale
    mean = cell(pair.figure, pair.row.figures[pair.figure])
    if one is None:
        return mean, (DASH, ""), DASH, DASH
    difference = interval(one.mean * scale, one.half * scale, decimals(pair.figure), signed=True)
    return mean, difference, p_value(one.p), p_value(one.holm)
