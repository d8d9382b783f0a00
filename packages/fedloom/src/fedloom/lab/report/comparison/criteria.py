"""Criteria of a comparison: which method wins by each criterion, and how certain this is.

Methods are compared seed by seed, with the same seed and data split. The leader is compared with the rows of all other
methods in one family of tests (`fedloom.lab.report.comparison.family`). With fewer than five common seeds, differences
are not tested, because so few values do not reveal their variance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedloom.formats import format_significant
from fedloom.lab.report.comparison.contenders import (
    Models,
    are_same_models,
    first_positions_of_models,
    select_one_per_method,
)
from fedloom.lab.report.comparison.family import run_family_tests, seed_differences
from fedloom.lab.report.naming import COST_FIGURES, MEGABYTE_BYTES, describe_figure, is_ratio, lowercase_title, metric
from fedloom.lab.report.numbers import EMPTY_CURVE, Curve, Estimate, Row, benign_curve, find_run
from fedloom.lab.report.run import Key, Run

TARGET_SHARE = 0.95
"""Fraction of the best result that is the common target when costs are compared."""


@dataclass(frozen=True)
class Criterion:
    """Criterion that selects one of the rows as the winner.

    Attributes:
        figure: name of the metric, e.g. ``accuracy/worst10``.
        values: metric of each row that has one, keyed by row index.
        higher_is_better: True if higher values are better.
    """

    figure: str
    title: str
    unit: str
    scale: float
    higher_is_better: bool
    values: dict[int, Estimate]


@dataclass(frozen=True)
class Winner:
    """Winner by one criterion.

    Attributes:
        row: index of the winner. None if no rows could be compared.
        rivals: indices of rows of other methods that are not significantly worse, closest first.
        equals: indices of rows of other methods with the same models, which are not rivals.
        runner_up: index of the best row of a different method.
        lead: mean difference from the runner-up over common seeds. It is positive, in the criterion's unscaled units.
            For metrics that are compared as ratios (`is_ratio`), the lead is the logarithm of the ratio.
        half: half-width of the confidence interval that decides the test. NaN if there are fewer than two common
            seeds.
        provisional: True if some runs have not finished.
        seeds: number of common seeds of the winner and the runner-up.
        decidable: True if there were enough common seeds for a test.
        excluded: True if some methods could not be compared because of missing results.
    """

    criterion: Criterion
    row: int | None
    rivals: tuple[int, ...] = ()
    equals: tuple[int, ...] = ()
    runner_up: int | None = None
    lead: float = math.nan
    half: float = math.nan
    provisional: bool = False
    seeds: int = 0
    decidable: bool = False
    excluded: bool = False


def group_comparable_runs(runs: list[Run], rows: list[Row]) -> list[tuple[str, list[Run], list[Row]]]:
    """Group comparable runs (same data, partition and attack), and return each group's label, runs and rows."""
    groups: dict[str, tuple[list[Run], list[Row]]] = {}
    for run in runs:
        options = run.options
        attack = options.get("attack", {})
        same = repr([options.get("data"), options.get("partition"), attack if attack.get("fraction") else {}])
        group = groups.setdefault(same, ([], []))
        group[0].append(run)
        group[1].extend(row for row in rows if find_run(runs, row) is run)
    return [(", ".join(run.label for run in task_runs), task_runs, shown) for task_runs, shown in groups.values()]


def find_winners(runs: list[Run], rows: list[Row], lead: str) -> list[Winner]:
    """Return the winner by each criterion whose metrics are recorded."""
    ratio = max((run.ratio for run in runs), default=0.0)
    return [find_winner(criterion, rows, ratio) for criterion in _make_criteria(runs, rows, lead) if criterion.values]


class HighlightedRows(NamedTuple):
    """Rows to highlight in one column of a table: the best rows, and rows that are not significantly worse."""

    best: frozenset[int] = frozenset()
    not_worse: frozenset[int] = frozenset()

    def shift(self, by: int) -> HighlightedRows:
        """Return the same marks, shifted down by a number of rows."""
        return HighlightedRows(*(frozenset(place + by for place in places) for places in self))

    @staticmethod
    def union(several: Iterable[HighlightedRows]) -> HighlightedRows:
        """Combine the marks of several parts of a table."""
        return HighlightedRows(*(frozenset().union(*places) for places in zip(*several, strict=True)))


def find_highlighted_rows(rows: list[Row], columns: Iterable[str], ratio: float = 0.0) -> dict[str, HighlightedRows]:
    """Return the marks for each column in which higher or lower values are better, except costs.

    Each column forms one family of tests.

    ``ratio`` corrects the tests as described in `run_family_tests`.
    """
    marks_of_columns: dict[str, HighlightedRows] = {}
    for name in columns:
        shown = describe_figure(name)
        values = _row_results(rows, name)
        if name in COST_FIGURES or not shown.rated or len(values) < 2:
            continue
        first = find_winner(Criterion(name, "", "", 1.0, shown.higher_is_better, values), rows, ratio)
        if first.row is not None:
            beside = first.rivals if first.decidable else ()
            alike = [k for i in beside for k in values if are_same_models(rows[k], rows[i])]
            marks_of_columns[name] = HighlightedRows(frozenset((first.row, *first.equals)), frozenset(alike))
    return marks_of_columns


def _row_results(rows: list[Row], name: str) -> dict[int, Estimate]:
    """Return a metric of each row that has it, keyed by row index."""
    return {i: estimate for i, row in enumerate(rows) if (estimate := row.result(name)) is not None}


def _make_criteria(runs: list[Run], rows: list[Row], lead: str) -> list[Criterion]:
    shown = metric(lead)
    worst = f"Worst 10 % of clients, {lowercase_title(shown.title)}"

    target = common_target(runs, rows, lead)
    costs = {name: cost_to_reach(runs, rows, lead, target, name) for name in ("bytes", "samples_backward")}
    clocked = any(key.metric == "simulated_seconds" for run in runs for key in run.totals)
    time = [("simulated_seconds", "Simulated hours", "", 1 / 3600)] if clocked else []
    goal = f"until {lowercase_title(shown.title)} {target_text(lead, target)}"
    return [
        Criterion(
            lead,
            f"{shown.title}, mean over clients",
            shown.unit,
            shown.scale,
            shown.higher_is_better,
            _row_results(rows, lead),
        ),
        Criterion(
            f"{lead}/worst10",
            worst,
            shown.unit,
            shown.scale,
            shown.higher_is_better,
            _row_results(rows, f"{lead}/worst10"),
        ),
        Criterion(
            "loss/variance",
            "Fairness: variance of clients' test losses",
            "",
            1.0,
            False,
            _row_results(rows, "loss/variance"),
        ),
        Criterion("bytes", f"Traffic {goal}", "MB", 1 / MEGABYTE_BYTES, False, costs["bytes"]),
        Criterion("samples_backward", f"Sample gradients {goal}", "", 1.0, False, costs["samples_backward"]),
        *(
            Criterion(name, f"{title} {goal}", unit, scale, False, cost_to_reach(runs, rows, lead, target, name))
            for name, title, unit, scale in time
        ),
    ]


def common_target(runs: list[Run], rows: list[Row], lead: str, models: Models = "best-on-validation") -> float:
    """Return the target: 95 % of the best mean result or, if smaller values are better, that result divided by 0.95.

    Only one row per method is used, regardless of which rows are shown. If no method has finished, running methods are
    used. Rows that do not belong to a method are not used, because their costs are unknown. The target is NaN if no
    rows remain or the best result is not positive.

    Args:
        runs: runs with equal data, partition and attack.
        rows: rows of these runs.
        lead: metric of the target.
        models: which row of each method to use.
    """
    methods = [
        row for row in select_one_per_method(runs, rows, models) if row.algorithm and row.sound and row.result(lead)
    ]
    means = [row.figures[lead].mean for row in [row for row in methods if row.is_complete] or methods]
    best = (max if metric(lead).higher_is_better else min)(means, default=0.0)
    if best <= 0:
        return math.nan
    return TARGET_SHARE * best if metric(lead).higher_is_better else best / TARGET_SHARE


def target_text(lead: str, target: float) -> str:
    """Return a metric's target as text with its unit."""
    shown = metric(lead)
    return f"{format_significant(target * shown.scale)} {shown.unit}".rstrip()


def find_run_target(
    run: Run, runs: list[Run], rows: list[Row], lead: str, models: Models = "best-on-validation"
) -> float:
    """Return a run's target, which is the same for all comparable runs."""
    own_runs, own_rows = next(
        (group, shown) for _, group, shown in group_comparable_runs(runs, rows) if any(r is run for r in group)
    )
    return common_target(own_runs, own_rows, lead, models)


def cost_to_reach(runs: list[Run], rows: list[Row], lead: str, target: float, cost: str) -> dict[int, Estimate]:
    """Return the traffic (``bytes``), work (``samples_backward``) or ``simulated_seconds`` needed to reach a target.

    The target is reached as soon as the mean over clients reaches it. Rows that do not reach the target with every seed
    are omitted. The result is empty if any model meets the target before the first round.
    """
    spent_by_row: dict[int, Estimate] = {}
    for i, row in enumerate(rows):
        spent: dict[int, float] = {}
        seeds = row.figures[lead].by_seed if lead in row.figures else {}
        for seed in seeds:
            run = find_run(runs, row)
            result = benign_curve(run, Key(row.method, seed, row.model, "test", lead), "mean")
            reached = find_target_round(result, target, metric(lead).higher_is_better)
            if reached == 0:
                return {}
            total = accumulate_cost(run, row.method, seed, cost)
            if reached is not None and len(total.round):
                spent[seed] = total_up_to_round(total, reached)
        if spent and len(spent) == len(seeds):
            spent_by_row[i] = Estimate(spent, row.repeats)
    return spent_by_row


def accumulate_cost(run: Run, method: str, seed: int, cost: str) -> Curve:
    """Return the cumulative work, traffic or time at each recorded round.

    ``bytes`` is the traffic in both directions, and ``seconds`` is the duration of the rounds.
    """
    if cost == "seconds":
        spent = run.seconds.get((method, seed))
        return Curve(spent.round, np.cumsum(spent.value)) if spent else EMPTY_CURVE
    names = ("bytes_up", "bytes_down") if cost == "bytes" else (cost,)
    parts = [run.totals.get(Key(method, seed, "", "", name)) for name in names]
    curves = [part for part in parts if part is not None]
    if len(curves) < len(names) or any(not np.array_equal(curves[0].round, part.round) for part in curves):
        return EMPTY_CURVE
    return Curve(curves[0].round, np.sum([part.value for part in curves], axis=0))


def find_target_round(result: Curve, target: float, higher: bool) -> int | None:
    """Return the first recorded round in which a result reaches the target, or None if there is no such round."""
    reached = result.value >= target if higher else result.value <= target
    return int(result.round[np.argmax(reached)]) if reached.any() else None


def total_up_to_round(total: Curve, round: int) -> float:
    """Return the total spent by the end of a given round."""
    before = np.flatnonzero(total.round <= round)
    return float(total.value[before[-1]]) if len(before) else 0.0


def find_winner(criterion: Criterion, rows: list[Row], ratio: float = 0.0) -> Winner:
    """Return the best row by a criterion among rows whose runs ended well or, provisionally, are still running.

    ``ratio`` corrects the tests as described in `run_family_tests`.
    """
    sound = {i: estimate for i, estimate in criterion.values.items() if rows[i].sound}
    if not sound:
        return Winner(criterion, None)
    seeds = max(len(estimate.finite) for estimate in sound.values())
    fair = {i: estimate for i, estimate in sound.items() if len(estimate.finite) == seeds}
    sign = 1 if criterion.higher_is_better else -1
    order = sorted(fair, key=lambda i: -sign * fair[i].mean)
    best = order[0]
    provisional = any(rows[i].running for i in criterion.values)
    rivals = [i for i in order if rows[i].name != rows[best].name]
    equals: tuple[int, ...] = ()
    if criterion.figure not in COST_FIGURES:  # identical models may differ in cost
        first = first_positions_of_models(rows, [best, *rivals])
        equals = tuple(i for i in rivals if first[i] == best)
        rivals = [i for i in rivals if first[i] == i]
    if not rivals:
        return Winner(criterion, best, equals=equals, provisional=provisional)
    log = is_ratio(criterion.figure)
    leads = run_family_tests({i: seed_differences(fair[best], fair[i], log=log) for i in rivals}, ratio=ratio)
    nearest = leads[rivals[0]] if criterion.higher_is_better else -leads[rivals[0]]
    return Winner(
        criterion,
        best,
        tuple(i for i in rivals if not (leads[i].significant and sign * leads[i].mean > 0)),
        equals,
        rivals[0],
        nearest.mean,
        nearest.half,
        provisional,
        nearest.seeds,
        any(lead.is_testable for lead in leads.values()),
        any(row.name not in {rows[i].name for i in fair} for row in rows),
    )
