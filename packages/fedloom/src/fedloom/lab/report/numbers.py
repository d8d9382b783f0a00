"""Values computed from recorded metrics: curves, results by seed, and intervals over seeds.

Every interval is the two-sided 95 % Student t interval for the mean over seeds. A recorded statistic over clients is
used unchanged. A statistic that was not recorded is computed from the clients' values. If a seed's run failed, or
diverged before its end, the seed has no result. The costs of runs that ended early are not combined with the costs of
complete runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fedloom.formats import round_significant
from fedloom.lab.report.naming import METRICS, metric
from fedloom.lab.report.run import Integers, Key, Numbers, Points, Run
from fedloom.metrics import leading, worst
from fedloom.rundir import ROLES_BY_NAME, RunRecord

BASELINE_ROLES = ("alone", "average")
"""Roles of methods that can serve as the baseline, in order of preference.

The first of these roles with a run is used.
"""
MODEL_KINDS = ("global", "personal", "hybrid")
WORK_FIGURES = (
    "steps", "samples_backward", "samples_forward", "bytes_up", "bytes_down", "bytes_up_paper", "bytes_down_paper",
    "simulated_seconds",
)  # fmt: skip
COUNTED_FIGURES = (*WORK_FIGURES, "seconds")
"""Cost metrics, which are recorded even if the run of a seed ends early. These metrics are used if no seed has been
completed."""
LOST_STATUSES = ("diverged", "failed")
"""Statuses of runs that have no result."""
UNTESTED_REASON = "trained, but not evaluated because there is no test row"
"""Status of a method without any metric (not even the loss) on test sets."""
MIN_SEEDS = 5
"""Minimum number of seeds for a test. If there are fewer seeds, charts show the individual seeds instead of an
interval."""
EQUALITY_TOLERANCE = 1e-9
"""Two values are considered equal up to this relative difference."""


class Curve(NamedTuple):
    """Statistic over rounds, as two arrays ``[k]``."""

    round: Integers
    value: Numbers

    @property
    def last(self) -> float:
        """Value in the last recorded round, or NaN if there are no rounds."""
        return float(self.value[-1]) if len(self.value) else math.nan

    def read_round(self, round: int) -> float:
        """Return the value in a round, or NaN if it was not recorded."""
        hit = np.flatnonzero(self.round == round)
        return float(self.value[hit[0]]) if len(hit) else math.nan


EMPTY_CURVE = Curve(np.empty(0, np.int64), np.empty(0))


def benign_curve(run: Run, key: Key, statistic: str) -> Curve:
    """Return the ``mean``, ``worst10`` or ``variance`` of ``key.metric`` over the benign clients in each round.

    A run with secure sums records only the mean weighted by samples, so this mean is returned for ``mean``.
    """
    points = run.benign(key)
    for name in (statistic, "weighted") if statistic == "mean" and points is None else (statistic,):
        recorded = run.totals.get(key._replace(metric=f"{key.metric}/{name}"))
        if recorded is not None:
            return Curve(recorded.round, recorded.value)
    return EMPTY_CURVE if points is None else aggregate_clients(points, statistic, metric(key.metric).higher_is_better)


def aggregate_clients(points: Points, statistic: str, higher: bool) -> Curve:
    """Return the ``mean``, ``worst10`` or ``variance`` of the clients' values in each round.

    Clients without a value are omitted.
    """
    rounds, starts = np.unique(points.round, return_index=True)
    return Curve(
        rounds, np.array([_client_statistic(v, statistic, higher) for v in np.split(points.value, starts[1:])])
    )


def _client_statistic(values: Numbers, statistic: str, higher: bool) -> float:
    values = values[~np.isnan(values)]
    if not len(values):
        return math.nan
    if statistic == "worst10":
        return worst(values, low=higher)
    with np.errstate(invalid="ignore", over="ignore"):
        if statistic == "variance":
            return float(values.var(ddof=1)) if len(values) > 1 else math.nan
        return float(values.mean())


@dataclass(frozen=True)
class Estimate:
    """Metric for each seed, and its mean over the seeds with a finite value (see `equal_seeds` for ``repeats``)."""

    by_seed: dict[int, float]
    repeats: Mapping[int, int] = field(default_factory=dict[int, int])

    @property
    def finite(self) -> dict[int, float]:
        """Finite values, keyed by seed."""
        return {seed: value for seed, value in self.by_seed.items() if math.isfinite(value)}

    @property
    def mean(self) -> float:
        """Mean over seeds, or NaN if there are no finite values."""
        values = list(self.finite.values())
        return sum(values) / len(values) if values else math.nan

    @property
    def half(self) -> float:
        """Half-width of the 95 % t interval of the mean. NaN if there are fewer than two seeds."""
        return half_width(list(self.finite.values()))

    def points(self, scale: float = 1.0) -> list[dict[str, float | int | None]]:
        """Return rows for a chart, starting with the mean and its interval (a row whose ``seed`` is None).

        If there are only a few seeds, there is no interval, and the row is followed by a row for each seed.
        """
        count = len(self.finite)
        half = self.half if count >= MIN_SEEDS else math.nan
        ends = {"value": self.mean, "low": self.mean - half, "high": self.mean + half}
        first: dict[str, float | int | None] = {
            "seed": None,
            **{k: round_significant(v * scale) for k, v in ends.items()},
        }
        few = self.finite.items() if 1 < count < MIN_SEEDS else ()
        return [first | {"seeds": count}, *({"seed": seed, "value": round_significant(v * scale)} for seed, v in few)]


def half_width(values: Sequence[float], level: float = 0.05) -> float:
    """Return the half-width of the t interval for the mean of ``values``, with coverage 1 - ``level``.

    NaN if there are fewer than two values.
    """
    if len(values) < 2:
        return math.nan
    from scipy.special import stdtrit  # slow to import, needed with two seeds and more

    spread = float(np.std(values, ddof=1))
    return float(stdtrit(len(values) - 1, 1 - level / 2)) * spread / math.sqrt(len(values))


def equal_seeds(figures: Mapping[str, Mapping[int, float]]) -> dict[int, int]:
    """Return the seeds whose runs only repeat an earlier seed's runs, mapped to this earlier seed.

    All their metrics except costs equal the earlier run's metrics, because nothing random affects them. Such seeds
    count as one result.
    """
    results = [values for name, values in figures.items() if name not in COUNTED_FIGURES]
    first: dict[int, int] = {}
    for seed in sorted({seed for values in results for seed in values}):
        first[seed] = next((k for k in first.values() if _is_same_run(results, k, seed)), seed)
    return {seed: earlier for seed, earlier in first.items() if earlier != seed}


def _is_same_run(results: list[Mapping[int, float]], one: int, other: int) -> bool:
    """Return True if all metrics are equal for two seeds, and at least one of the metrics is finite."""
    pairs = [(values.get(one, math.nan), values.get(other, math.nan)) for values in results]
    return all(are_close(*pair) for pair in pairs) and any(math.isfinite(figure) for figure, _ in pairs)


def are_close(one: float, other: float) -> bool:
    """Return True if two values differ by no more than `EQUALITY_TOLERANCE` allows.

    Two missing values are also considered equal.
    """
    return math.isclose(one, other, rel_tol=EQUALITY_TOLERANCE) or (math.isnan(one) and math.isnan(other))


@dataclass(frozen=True)
class Row:
    """Row of the results table: one model of a method in a run, across all seeds.

    For each metric on the clients' test sets, ``figures`` contains ``metric`` (the mean over clients in the last round)
    and ``metric/worst10`` and, if they were recorded, ``metric/weighted``, ``metric/sigma`` and ``metric/jain``.
    ``figures`` also contains ``loss/variance``, ``metric@validation`` (in the round with the best validation result),
    ``metric@common`` (on the common test set), and the totals of work and traffic.
    """

    run: str
    method: str
    algorithm: str
    model: str
    records: tuple[RunRecord, ...]
    figures: dict[str, Estimate]

    @property
    def role(self) -> str:
        """Role of the method in a comparison: "alone", "average", "pooled" or ""."""
        stated = next((record.role for record in self.records if record.role is not None), None)
        return ROLES_BY_NAME.get(self.algorithm, "") if stated is None else stated

    @property
    def name(self) -> str:
        """Name that identifies the method and the run."""
        return f"{self.method} · {self.run}" if self.run else self.method

    @property
    def title(self) -> str:
        """Name that identifies the method, the run and the kind of model."""
        return f"{self.name} · {self.model}" if self.model else self.name

    def result(self, name: str) -> Estimate | None:
        """Return a metric, or None if it has no finite value for any seed."""
        estimate = self.figures.get(name)
        return estimate if estimate is not None and estimate.finite else None

    @property
    def repeats(self) -> Mapping[int, int]:
        """Seeds that only repeat an earlier seed, mapped to this earlier seed."""
        return next((estimate.repeats for estimate in self.figures.values()), {})

    @property
    def measured(self) -> int:
        """Number of seeds that have a result."""
        return max((len(e.finite) for name, e in self.figures.items() if name not in COUNTED_FIGURES), default=0)

    @property
    def sound(self) -> bool:
        """True if none of the runs diverged or failed."""
        return not any(record.status in LOST_STATUSES for record in self.records)

    @property
    def remark(self) -> str:
        """Status of the runs if at least one diverged or failed, or if no client was tested.

        Empty if all runs ended well.
        """
        return UNTESTED_REASON if self.untested else "" if self.sound else self.status

    @property
    def untested(self) -> bool:
        """True if every seed ran to its last round, but all metrics on the clients' test sets are missing."""
        tested = [e for name, e in self.figures.items() if name not in COUNTED_FIGURES and "@" not in name]
        return self.is_complete and bool(tested) and not any(e.finite for e in tested)

    @property
    def lost_seeds(self) -> frozenset[int]:
        """Seeds whose runs produced no result."""
        return frozenset(record.seed for record in self.records if record.lost)

    @property
    def is_complete(self) -> bool:
        """True if every seed ran to its last round."""
        return bool(self.records) and all(record.status == "done" for record in self.records)

    @property
    def running(self) -> bool:
        """True if the run of at least one seed has not ended."""
        return not self.records or any(record.status == "interrupted" for record in self.records)

    @property
    def status(self) -> str:
        """Short description of the status of the runs, e.g. ``diverged by round 7 (seed 2)``."""
        seeds: dict[str, list[int]] = {}
        for record in self.records:
            if record.status != "done":
                seeds.setdefault(_failure_phrase(record), []).append(record.seed)
        if self.untested:
            return UNTESTED_REASON
        if not seeds:
            return "done" if self.records else "unfinished"
        shown = [phrase + self._share(some) for phrase, some in seeds.items()]
        more = sum(map(len, seeds.values())) - sum(map(len, [*seeds.values()][:2]))
        return "; ".join(shown[:2]) + (f" and {more} more" if more else "")

    def _share(self, seeds: list[int]) -> str:
        """Return text that names the seed, or the number of seeds if there are several. Return "" for all seeds."""
        if len(seeds) == 1:
            return f" (seed {seeds[0]})"
        return "" if len(seeds) == len(self.records) else f" ({len(seeds)} of {len(self.records)} seeds)"


def _failure_phrase(record: RunRecord) -> str:
    if record.diverged is not None:
        return f"{record.status} by round {record.diverged}"
    return f"{record.status} after round {record.rounds}"


def method_rows(runs: list[Run]) -> list[Row]:
    """Return a row for every model of every method in the runs, in the order of the experiments."""
    rows = []
    for run in runs:
        label = run.label if len(runs) > 1 else ""
        for method in run.methods:
            records = tuple(record for record in run.summary.runs if record.method == method)
            algorithm = records[0].algorithm if records else ""
            for model in _recorded_models(run, method):
                rows.append(Row(label, method, algorithm, model, records, _row_figures(run, method, model)))
    return rows


def find_run(runs: list[Run], row: Row) -> Run:
    """Return the run that a row belongs to."""
    return next(run for run in runs if run.label == row.run or len(runs) == 1)


def _recorded_models(run: Run, method: str) -> list[str]:
    models = {key.model for key in [*run.series, *run.totals] if key.method == method and key.model}
    return [model for model in MODEL_KINDS if model in models] + sorted(models - set(MODEL_KINDS)) or [""]


def test_metrics(run: Run, method: str, model: str) -> list[str]:
    """Return the names of the metrics recorded on the clients' test sets."""
    about = (method, model, "test")
    names = {key.metric for key in run.series if (key.method, key.model, key.part) == about}
    totals = {key.metric for key in run.totals if (key.method, key.model, key.part) == about}
    names |= {name.partition("/")[0] for name in totals if name in METRICS or "/" in name}
    return [name for name in METRICS if name in names] + sorted(names - set(METRICS))


def leading_metric(runs: list[Run]) -> str:
    """Return the primary metric of the report."""
    names = {
        name
        for run in runs
        for method in run.methods
        for m in _recorded_models(run, method)
        for name in test_metrics(run, method, m)
    }
    return leading(names)


def find_seeds(run: Run, method: str) -> list[int]:
    """Return the seeds of a method, sorted in ascending order."""
    named = {record.seed for record in run.summary.runs if record.method == method}
    return sorted(named | {key.seed for key in [*run.series, *run.totals] if key.method == method})


def is_other_figure(key: Key) -> bool:
    """Return True if a series of the federation is neither a cost nor a statistic of a client metric."""
    plain = "/" not in key.metric and key.metric not in METRICS and key.metric not in WORK_FIGURES
    return plain and key.part in ("", "test")


def _row_figures(run: Run, method: str, model: str) -> dict[str, Estimate]:
    records = [record for record in run.summary.runs if record.method == method]
    lost = {record.seed for record in records if record.lost}
    early = lost | {record.seed for record in records if record.status == "interrupted"}
    by_name: dict[str, dict[int, float]] = {}
    for seed in find_seeds(run, method):
        for name in test_metrics(run, method, model):
            key = Key(method, seed, model, "test", name)
            test = benign_curve(run, key, "mean")
            by_name.setdefault(name, {})[seed] = test.last
            by_name.setdefault(f"{name}/worst10", {})[seed] = benign_curve(run, key, "worst10").last
            for statistic in ("weighted", "sigma", "jain"):
                total = run.totals.get(key._replace(metric=f"{name}/{statistic}"))
                if total is not None:
                    by_name.setdefault(f"{name}/{statistic}", {})[seed] = float(total.value[-1])
            by_name.setdefault(f"{name}@validation", {})[seed] = _test_value_at_best(
                benign_curve(run, key._replace(part="validation"), "mean"), test, name
            )
            common = run.totals.get(key._replace(part="common")) or run.totals.get(
                key._replace(part="common", metric=f"{name}/mean")
            )
            if common is not None:
                by_name.setdefault(f"{name}@common", {})[seed] = float(common.value[-1])
        loss = Key(method, seed, model, "test", "loss")
        by_name.setdefault("loss/variance", {})[seed] = benign_curve(run, loss, "variance").last
        for name in WORK_FIGURES:
            total = run.totals.get(Key(method, seed, "", "", name))
            if total is not None:
                by_name.setdefault(name, {})[seed] = float(total.value[-1])
        for key, points in run.totals.items():
            if (key.method, key.seed, key.model) == (method, seed, model) and is_other_figure(key):
                by_name.setdefault(key.metric, {})[seed] = float(points.value[-1])
        spent = run.seconds.get((method, seed))
        if spent is not None:
            by_name.setdefault("seconds", {})[seed] = float(spent.value.sum())
    for name, values in by_name.items():
        out = lost if name not in COUNTED_FIGURES else early if values.keys() - early else set[int]()
        values.update(dict.fromkeys(out & values.keys(), math.nan))
    repeats = equal_seeds(by_name)
    figures = {name: Estimate(values, repeats) for name, values in by_name.items()}
    return {name: e for name, e in figures.items() if e.finite or ("@" not in name and "/" not in name)}


def _test_value_at_best(validation: Curve, test: Curve, name: str) -> float:
    """Return the test value in the round with the best validation value (the earliest, in case of a tie).

    Return NaN if there are no validation values.
    """
    finite = np.isfinite(validation.value)
    if not finite.any():
        return math.nan
    sign = 1 if metric(name).higher_is_better else -1
    best = np.argmax(np.where(finite, sign * validation.value, -np.inf))
    return test.read_round(int(validation.round[best]))
