"""Verdicts on the map's records, from values by seed and from gains over the better of local training and FedAvg.

In each setup, every method is compared with the better of local training and FedAvg. All comparisons in a setup form
one family of moderated tests (`fedloom.lab.report.comparison.family`). Each seed splits the same samples in a new way.
A verdict applies to these samples only, but extends to other splits, cohorts and initial models. Across setups, methods
are compared by Friedman's test on the ranks of their means, followed by Nemenyi's test for every pair
(scikit-posthocs). Only setups and methods without missing results are used. Setups without tuning are excluded from
these tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.lab.report import (
    FAMILY_ERROR_LEVEL,
    MODERATED_LEVEL,
    TARGET_SHARE,
    DifferenceTest,
    Estimate,
    PairVerdict,
    fit_common_prior,
    pair_verdict,
    required_seeds,
    run_family_tests,
    seed_differences,
)
from fedloom.metrics import variance, worst
from fedloom_studies.map.records import DONE_STATUS, CellRecord, Series
from fedloom_studies.map.setups import POOLED_METHOD, REFERENCE_METHODS, Setup

MIN_SETUPS = 3
"""Minimum number of setups, and minimum number of methods, for a statement about all setups together."""
Table = NDArray[np.float64]
Groups = list[tuple[int, int]]
"""First and last positions of every group of adjacent methods that the test does not distinguish."""
DETECTABLE_GAIN = 0.03
"""Gain that a setup should be able to detect. A smaller gain would not justify a different method's work and
traffic."""
DETECTION_PROBABILITY = 0.8
"""Required probability of detecting this gain in a setup. Studies usually aim for this statistical power."""


@dataclass(frozen=True)
class MethodStanding:
    """A method's result in a setup.

    Attributes:
        figures: values keyed by name and seed. ``mean``, ``worst10`` and ``variance`` are statistics of the metric over
            clients after the last round. ``gain_local`` and ``gain_fedavg`` are the mean differences over clients from
            the models of local training and FedAvg. ``gainers_local`` and ``gainers_fedavg`` are the fractions of
            clients with positive differences. ``mean_at_fedavg_work`` is the mean in the last evaluated round within
            FedAvg's total number of gradients, or NaN if there is no such round. ``gradients`` (of samples) and
            ``bytes`` are totals of the whole run. ``rounds_to_95`` is the first evaluated round that reaches 95 % of
            the best mean in the setup, or NaN if none does.
        gain: gain in ``mean`` over the better of local training and FedAvg. None if the method is this baseline itself,
            or if either of the two has no result.
        confirmed: True if the gain is also significant, with the same sign, for the seeds of a second run. None if
            there was no second run.
    """

    method: str
    record: CellRecord
    figures: dict[str, Estimate]
    gain: DifferenceTest | None
    confirmed: bool | None

    @property
    def verdict(self) -> PairVerdict:
        """Verdict on the method compared with the better of local training and FedAvg."""
        return pair_verdict(self.gain, higher=True)

    @property
    def better(self) -> bool:
        """True if the method is better than the better of local training and FedAvg."""
        return self.verdict == PairVerdict.BETTER

    @property
    def worse(self) -> bool:
        """True if the method is worse than the better of local training and FedAvg."""
        return self.verdict == PairVerdict.WORSE


@dataclass(frozen=True)
class SetupVerdict:
    """Verdicts on all methods in a setup, with their records.

    Attributes:
        reference: the better of local training and FedAvg, by the mean over seeds. The name is empty if one of the two
            has no result.
        spread: standard deviation of gains over seeds that all methods are assumed to share, from the prior of the
            moderated test. NaN if too few gains were tested.
        needed: number of seeds needed to detect a gain of `DETECTABLE_GAIN` with probability `DETECTION_PROBABILITY`,
            given ``spread`` and the first step of Holm's correction. This number does not depend on the observed gains,
            and is 0 if ``spread`` is unknown.
        standings: results of the methods that have finished, best mean first.
        records: record of every method, keyed by method.
    """

    setup: Setup
    reference: str
    spread: float
    needed: int
    standings: tuple[MethodStanding, ...]
    records: dict[str, CellRecord]
    seeds: tuple[int, ...]

    def find(self, method: str) -> MethodStanding | None:
        """Return a method's result, or None if it has none."""
        return next((s for s in self.standings if s.method == method), None)

    @property
    def rivals(self) -> list[MethodStanding]:
        """Results of all methods except training on pooled data, best mean first."""
        return [s for s in self.standings if s.method != POOLED_METHOD]

    @property
    def decides(self) -> bool:
        """True if enough seeds were run to detect a gain of `DETECTABLE_GAIN`."""
        return 0 < self.needed <= len(self.seeds)


def judge_setup(setup: Setup, records: Mapping[tuple[str, str], CellRecord]) -> SetupVerdict:
    """Judge the records of a setup. All differences stated on the pages form one family of tests."""
    cells = {method: record for (name, method), record in records.items() if name == setup.name}
    done = {method: record for method, record in cells.items() if record.status == DONE_STATUS}
    whole = (
        stage for stage in reversed(setup.stages) if all({*map(str, stage)} <= r.seeds.keys() for r in done.values())
    )
    seeds = next(whole, setup.seeds)
    later = {str(seed) for seed in setup.further if seed not in seeds}
    cells = {m: replace(r, seeds={s: one for s, one in r.seeds.items() if s not in later}) for m, r in cells.items()}
    done = {method: cells[method] for method in done}
    means = {method: last_means(record.seeds) for method, record in done.items()}
    order = sorted(done, key=lambda method: -means[method].mean)
    reference = (
        next((m for m in order if m in REFERENCE_METHODS[:2]), "") if {*REFERENCE_METHODS[:2]} <= done.keys() else ""
    )
    members = {m: seed_differences(means[m], means[reference]) for m in order if reference and m != reference}
    tests = run_family_tests(members, moderate=True)
    again = {m: last_means(record.again) for m, record in done.items()}
    look = run_family_tests(
        {m: seed_differences(again[m], again[reference]) for m in order if reference and again[m].by_seed}
    )

    def confirmed(method: str) -> bool | None:
        if method not in look or method == reference:
            return None
        return look[method].significant and look[method].mean * tests[method].mean > 0

    best = means[order[0]].mean if order else math.nan
    standings = tuple(
        MethodStanding(m, cells[m], _standing_figures(cells[m], done, best), tests.get(m), confirmed(m)) for m in order
    )
    tested = [m for m, test in tests.items() if test.is_testable]
    prior = fit_common_prior([_as_array([*members[m].values()]) for m in tested])
    needed = (
        required_seeds(DETECTABLE_GAIN, prior, MODERATED_LEVEL / len(tested), DETECTION_PROBABILITY) if prior else 0
    )
    return SetupVerdict(
        setup, reference, math.sqrt(prior.variance) if prior else math.nan, needed, standings, cells, seeds
    )


def last_means(seeds: Mapping[str, Series]) -> Estimate:
    """Return the mean over clients after the last round, for each seed."""
    return Estimate({int(seed): float(np.nanmean(_as_array(one.clients))) for seed, one in seeds.items()})


def _as_array(values: object) -> Table:
    return np.array(values, np.float64)


def _standing_figures(record: CellRecord, done: Mapping[str, CellRecord], best: float) -> dict[str, Estimate]:
    figures: dict[str, dict[int, float]] = {}
    for seed, one in record.seeds.items():
        clients, mean = _as_array(one.clients), _as_array(one.mean)
        row = {
            "mean": float(np.nanmean(clients)),
            "worst10": worst(clients, low=True),
            "variance": variance(clients),
            "gradients": one.gradients[-1],
            "bytes": one.bytes[-1],
        }
        near = np.flatnonzero(mean >= TARGET_SHARE * best)
        row["rounds_to_95"] = one.rounds[near[0]] if len(near) else math.nan
        for mark in REFERENCE_METHODS[:2]:
            of_mark = done[mark].seeds.get(seed) if mark in done else None
            if of_mark is None:
                continue
            if mark == "fedavg":
                within = mean[_as_array(one.gradients) <= of_mark.gradients[-1]]
                row["mean_at_fedavg_work"] = float(within[-1]) if len(within) else math.nan
            difference = clients - _as_array(of_mark.clients)
            difference = difference[np.isfinite(difference)]
            row |= {f"gain_{mark}": float(difference.mean()), f"gainers_{mark}": float((difference > 0).mean())}
        for name, value in row.items():
            figures.setdefault(name, {})[int(seed)] = value
    return {name: Estimate(by_seed) for name, by_seed in figures.items()}


def indistinct_groups(count: int, apart: Callable[[int, int], bool]) -> Groups:
    """Return the longest ranges of positions in which the first method does not differ from the other methods.

    >>> indistinct_groups(4, lambda i, k: k - i > 1), indistinct_groups(3, lambda i, k: True)
    ([(0, 1), (1, 2), (2, 3)], [(0, 0), (1, 1), (2, 2)])
    """
    longest: Groups = []
    for i in range(count):
        end = next((k for k in range(i + 1, count) if apart(i, k)), count) - 1
        if not longest or end > longest[-1][1]:
            longest.append((i, end))
    return longest


class OverallComparison(NamedTuple):
    """Comparison of methods over all setups.

    Attributes:
        methods: methods in order of their mean ranks, best first.
        ranks: each method's mean rank over the setups, where 1 is the best.
        setups: setups with a result for each of these methods.
        p: p-value of Friedman's test, for the hypothesis that all methods are equally good.
        groups: groups of methods that Nemenyi's test does not distinguish.
    """

    methods: tuple[str, ...]
    ranks: tuple[float, ...]
    setups: tuple[str, ...]
    p: float
    groups: Groups


def compare_overall(verdicts: list[SetupVerdict]) -> OverallComparison | None:
    """Apply Friedman's and Nemenyi's tests to the largest block of setups and methods without missing results.

    Return None if the set is too small.

    Raises:
        ModuleNotFoundError: scikit-posthocs is not installed.
    """
    from scipy.stats import friedmanchisquare

    setups, methods, table, ranks = largest_complete_block(verdicts)
    if not methods:
        return None
    from scikit_posthocs import posthoc_nemenyi_friedman

    p = posthoc_nemenyi_friedman(table).to_numpy()
    pair = friedmanchisquare(*table.T).pvalue
    return OverallComparison(
        methods,
        ranks,
        setups,
        float(pair),
        indistinct_groups(len(methods), lambda i, k: bool(p[i, k] < FAMILY_ERROR_LEVEL)),
    )


def largest_complete_block(
    verdicts: list[SetupVerdict],
) -> tuple[tuple[str, ...], tuple[str, ...], Table, tuple[float, ...]]:
    """Return the setups and methods of the largest block without missing results, its means, and the mean ranks.

    All results are empty if the block has fewer than `MIN_SETUPS` setups or methods. The methods are sorted by rank.
    The block contains only setups whose `Setup.ranks` is true.
    """
    from scipy.stats import rankdata

    means = {j.setup.name: {s.method: s.figures["mean"].mean for s in j.standings} for j in verdicts if j.setup.ranks}
    order = sorted(means, key=lambda name: -len(means[name]))
    blocks = [
        (order[:k], set.intersection(*(set(means[n]) for n in order[:k]))) for k in range(MIN_SETUPS, len(order) + 1)
    ]
    setups, methods = max(blocks, key=lambda block: len(block[0]) * len(block[1]), default=([], set[str]()))
    names = sorted(methods) if len(methods) >= MIN_SETUPS else []
    table = np.array([[means[setup][method] for method in names] for setup in setups]).reshape(len(setups), len(names))
    ranks = rankdata(-table, axis=1).mean(0) if names else np.zeros(0)
    places = np.argsort(ranks, kind="stable")
    return tuple(setups), tuple(names[k] for k in places), table[:, places], tuple(ranks[places].tolist())
