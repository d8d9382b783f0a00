"""Selection of the rows to compare: one row per method, and a fair rival for models chosen by clients.

In practice, each client would use whichever of the global and the personal model is better on its validation set (the
hybrid model), or the method's only model. If hybrid models are compared, a rival is shown next to them: for each
client, the better of local training and FedAvg, chosen on validation data by the same rule. This requires no additional
runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from fedloom.lab.report.numbers import (
    BASELINE_ROLES,
    COUNTED_FIGURES,
    Estimate,
    Row,
    aggregate_clients,
    are_close,
    equal_seeds,
    find_run,
    find_seeds,
    test_metrics,
)
from fedloom.lab.report.run import Key, Points, Run
from fedloom.metrics import leading, metric

Models = Literal["best-on-validation", "personal", "all"]
"""Rows of a method to compare. ``best-on-validation`` is the model that a client would use. ``personal`` is the
personal model that the papers report, or the global model if there is none. ``all`` means every model."""
COMPARED_MODELS: tuple[Models, ...] = ("best-on-validation", "personal", "all")
MODEL_ORDER = {"best-on-validation": ("hybrid", "personal", "global"), "personal": ("personal", "global", "hybrid")}


def select_contenders(runs: Sequence[Run], rows: Sequence[Row], models: Models = "best-on-validation") -> list[Row]:
    """Select the rows of the results table to compare.

    Args:
        runs: runs that contain the rows.
        rows: rows of the results table, one for each model of each method.
        models: which rows of each method to select.
    """
    if models == "all":
        return list(rows)
    chosen: dict[tuple[str, str], Row] = {}
    for row in rows:
        place = row.run, row.method
        if place not in chosen or _model_rank(row, models) < _model_rank(chosen[place], models):
            chosen[place] = row
    shown = list(chosen.values())
    for run in runs:
        run_rows = [row for row in shown if find_run(list(runs), row) is run]
        if any(row.model == "hybrid" for row in run_rows):
            shown += [rival for rival in [make_best_reference_row(run, run_rows)] if rival is not None]
    return shown


def select_one_per_method(runs: Sequence[Run], rows: Sequence[Row], models: Models = "best-on-validation") -> list[Row]:
    """Select the rows to compare: at most one per method, even if ``models`` is "all"."""
    return select_contenders(runs, rows, "best-on-validation" if models == "all" else models)


def select_run_contenders(run: Run, runs: list[Run], rows: Sequence[Row], lead: str) -> list[Row]:
    """Select one run's compared rows that have a result for the metric ``lead``."""
    return [
        row for row in select_contenders([run], [r for r in rows if find_run(runs, r) is run]) if lead in row.figures
    ]


def best_row(rows: Sequence[Row], lead: str) -> Row | None:
    """Return the row with the best mean, or None if there is no suitable row.

    Rows with a diverged or failed run, or with fewer seeds than others, are omitted.
    """
    sound = [row for row in rows if row.sound and row.result(lead)]
    seeds = {row.title: len(row.figures[lead].finite) for row in sound}
    sign = 1 if metric(lead).higher_is_better else -1
    fair = [row for row in sound if seeds[row.title] == max(seeds.values())]
    return max(fair, key=lambda row: sign * row.figures[lead].mean, default=None)


def default_baseline(rows: Sequence[Row]) -> str | None:
    """Return the default baseline: the first method without federation, or else FedAvg.

    Return None if neither was run.
    """
    first = [row.name for role in BASELINE_ROLES for row in rows if row.role == role]
    return next(iter(first), None)


def _model_rank(row: Row, models: Models) -> int:
    order = MODEL_ORDER[models]
    return order.index(row.model) if row.model in order else len(order)


def make_best_reference_row(run: Run, rows: Sequence[Row]) -> Row | None:
    """Return a row with the better of local training and FedAvg for each client, chosen on validation data.

    Return None unless both were run.

    Args:
        run: run that contains both methods.
        rows: rows of this run.
    """
    local = next((row for row in rows if (row.role, row.model) == ("alone", "personal")), None)
    shared = next((row for row in rows if (row.role, row.model) == ("average", "global")), None)
    if local is None or shared is None:
        return None
    figures: dict[str, dict[int, float]] = {}
    for seed in find_seeds(run, local.method):
        takes = _prefers_shared_mask(run, local, shared, seed)
        if takes is None:
            continue
        for name in test_metrics(run, local.method, local.model):
            local_points, shared_points = (last_points(run, row, seed, "test", name) for row in (local, shared))
            if local_points is None or shared_points is None or local_points.client.shape != shared_points.client.shape:
                continue
            mixed = local_points._replace(value=np.where(takes, shared_points.value, local_points.value))
            higher = metric(name).higher_is_better
            figures.setdefault(name, {})[seed] = aggregate_clients(mixed, "mean", higher).last
            figures.setdefault(f"{name}/worst10", {})[seed] = aggregate_clients(mixed, "worst10", higher).last
            if name == "loss":
                figures.setdefault("loss/variance", {})[seed] = aggregate_clients(mixed, "variance", higher).last
    lost = local.lost_seeds | shared.lost_seeds
    by_seed = {name: values | dict.fromkeys(lost & values.keys(), math.nan) for name, values in figures.items()}
    if not by_seed:
        return None
    repeats = equal_seeds(by_seed)
    estimates = {name: Estimate(values, repeats) for name, values in by_seed.items()}
    return Row(local.run, f"{local.method} or {shared.method}", "", "hybrid", local.records + shared.records, estimates)


def _prefers_shared_mask(
    run: Run, local: Row, shared: Row, seed: int
) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
    """Return a mask ``[n]`` of the clients whose shared model is strictly better on the data used to choose.

    Return None if these scores were not recorded.
    """
    part = run.summary.select_on
    names = {key.metric for key in run.series if (key.method, key.seed, key.part) == (local.method, seed, part)}
    if not names:
        return None
    name = leading(names, "client")
    local_points, shared_points = (last_points(run, row, seed, part, name) for row in (local, shared))
    if local_points is None or shared_points is None or local_points.client.shape != shared_points.client.shape:
        return None
    sign = 1.0 if metric(name).higher_is_better else -1.0
    takes: np.ndarray[tuple[int], np.dtype[np.bool_]] = sign * shared_points.value > sign * local_points.value
    return takes


def last_points(run: Run, row: Row, seed: int, part: str, name: str) -> Points | None:
    """Return the clients' values after the last evaluated round, or None if there are none."""
    points = run.benign(Key(row.method, seed, row.model, part, name))
    return None if points is None or not len(points.round) else points.select(points.round == points.round[-1])


def are_same_models(one: Row, other: Row) -> bool:
    """Return True if two rows describe the same models: their common metrics, except costs, agree for every seed."""
    names = one.figures.keys() & other.figures.keys() - set(COUNTED_FIGURES)
    results = any(row.figures[name].finite for row in (one, other) for name in names)
    return results and all(_have_equal_figures(one.figures[name], other.figures[name]) for name in names)


def _have_equal_figures(one: Estimate, other: Estimate) -> bool:
    return one.finite.keys() == other.finite.keys() and all(
        are_close(value, other.finite[seed]) for seed, value in one.finite.items()
    )


def first_positions_of_models(rows: Sequence[Row], places: Sequence[int]) -> dict[int, int]:
    """Map each position to the first position whose row describes the same models."""
    first: dict[int, int] = {}
    for place in places:
        first[place] = next((k for k in first.values() if are_same_models(rows[k], rows[place])), place)
    return first
