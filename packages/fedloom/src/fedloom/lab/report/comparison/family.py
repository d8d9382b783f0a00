"""Family of paired tests: differences over common seeds, Holm's correction, verdicts and matching intervals.

All comparisons on one page, model card or table form one family. Each difference is tested with a paired t-test over
seeds. Holm's step-down procedure (`holm`) limits the probability of any false claim in the family to 5 %. Each interval
is computed at the significance level that Holm's procedure applies to the difference, so it excludes 0 if and only if
the difference is significant. A comparison with fewer than five common seeds is not tested and is not part of the
family. If the runs of both methods are identical for several seeds, these seeds count as one. If every seed splits the
same samples differently, the results of different seeds are not independent. If the ratio of test to training samples
is given, the variance is corrected by the method of Nadeau and Bengio, and the verdict applies to new samples from the
same source. Without this ratio, the verdict applies only to the same samples with other seeds.

Reference: C. Nadeau, Y. Bengio, "Inference for the Generalization Error", Machine Learning 52, 2003, Section 4.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar

import numpy as np

from fedloom.lab.report.comparison.moderated import Prior, fit_prior
from fedloom.lab.report.numbers import MIN_SEEDS, Estimate, half_width

Name = TypeVar("Name", bound=Hashable)

FAMILY_ERROR_LEVEL = 0.05
"""Family-wise error rate: maximum probability of any false claim in a family."""
MODERATED_LEVEL = 0.025
"""Nominal level for a family of moderated tests. At a nominal level of 5 %, moderated tests reject 7.0 % of the true
null hypotheses that were created by flipping signs in the recorded map (19 of 270). If methods collapse with some
seeds, the distribution has heavier tails than the prior assumes. At a nominal level of 2.5 %, they reject 2.6 % of all
these null hypotheses. In the four setups with collapsing methods, they reject 3 of 60."""


class PairVerdict(StrEnum):
    """Verdicts on the comparison of two methods.

    `untested_reason` returns the reason why a comparison is not tested.
    """

    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"
    UNTESTED = "not tested"


class DifferenceTest(NamedTuple):
    """Difference between two methods, tested as part of a family.

    Attributes:
        mean: mean difference over the common seeds. NaN if there are no common seeds.
        half: half-width of the confidence interval that decides the verdict, or of the 95 % interval if the
            difference is not tested. NaN if there are fewer than two seeds.
        p: two-sided p-value of the t-test. NaN if the difference is not tested.
        holm: p-value adjusted by Holm's procedure within the family.
        significant: True if Holm's procedure rejects the null hypothesis of no difference.
        seeds: number of common seeds.
    """

    mean: float
    half: float
    p: float
    holm: float
    significant: bool
    seeds: int

    @property
    def is_testable(self) -> bool:
        """True if the number of seeds is sufficient for a test."""
        return self.seeds >= MIN_SEEDS

    def __neg__(self) -> DifferenceTest:
        """Return the same comparison with the two methods exchanged."""
        return self._replace(mean=-self.mean)


def pair_verdict(comparison: DifferenceTest | None, *, higher: bool, margin: float | None = None) -> PairVerdict:
    """Return the verdict on a comparison, based on the printed interval.

    Args:
        comparison: difference of the first value minus the second value. None if both rows describe the same models.
        higher: True if higher values are better.
        margin: largest difference that does not matter in practice, in the units of the comparison, above 0. If None,
            equivalence is not tested.

    >>> pair_verdict(DifferenceTest(0.5, 1.0, 0.4, 0.4, False, 5), higher=True, margin=2.0)
    <PairVerdict.EQUIVALENT: 'equivalent'>
    >>> pair_verdict(DifferenceTest(0.5, 1.0, 0.4, 0.4, False, 5), higher=True)
    <PairVerdict.INCONCLUSIVE: 'inconclusive'>
    """
    if comparison is None or not comparison.is_testable:
        return PairVerdict.UNTESTED
    if comparison.significant:
        return PairVerdict.BETTER if (comparison.mean > 0) == higher else PairVerdict.WORSE
    within = margin is not None and abs(comparison.mean) + comparison.half <= margin
    return PairVerdict.EQUIVALENT if within else PairVerdict.INCONCLUSIVE


def untested_reason(comparison: DifferenceTest | None) -> str:
    """Return the reason why a comparison is not tested, or "" if it is tested."""
    if comparison is None:
        return "same models"
    return "" if comparison.is_testable else "fewer than five seeds"


def scope_sentence(ratio: float) -> str:
    """Return the sentence about the samples to which a verdict applies. ``ratio`` is as in `run_family_tests`."""
    if ratio:
        return "Verdicts apply to new samples from the same source (Nadeau-Bengio correction)."
    return "Verdicts apply to these samples with other seeds."


def seed_differences(one: Estimate, other: Estimate, *, log: bool = False) -> dict[int, float]:
    """Return the difference between two metrics for each common seed.

    If both metrics are identical for several seeds, only the first of these seeds is included.

    Args:
        one: first metric of the difference.
        other: metric to subtract.
        log: True to return the logarithm of the ratio instead of the difference. It is 0 if both values are 0, and
            infinite if only one is 0.

    >>> seed_differences(Estimate({0: 3.0, 1: 4.0}), Estimate({1: 1.0, 2: 9.0}))
    {1: 3.0}
    """
    seeds = sorted(one.finite.keys() & other.finite.keys(), reverse=True)
    first = {(one.repeats.get(seed, seed), other.repeats.get(seed, seed)): seed for seed in seeds}
    subtract = log_ratio if log else float.__sub__
    return {seed: subtract(float(one.finite[seed]), float(other.finite[seed])) for seed in sorted(first.values())}


def log_ratio(one: float, other: float) -> float:
    """Return the logarithm of ``one / other``: 0 if both values are equal, and infinite if one of them is 0 or less."""
    if one == other:
        return 0.0
    if one <= 0 or other <= 0:
        return math.copysign(math.inf, one - other)
    return math.log(one / other)


def run_family_tests(
    members: Mapping[Name, Mapping[int, float]], *, ratio: float | Mapping[Name, float] = 0.0, moderate: bool = False
) -> dict[Name, DifferenceTest]:
    """Test all differences of a family.

    Args:
        members: differences per seed, grouped by the name of the comparison.
        ratio: number of test samples per training sample, for all members or keyed by name, if every seed splits the
            same samples anew. If 0, no correction is applied, and the verdicts apply to these samples.
        moderate: True to shrink the variances of the members toward a common variance (`fit_prior`) and test at
            `MODERATED_LEVEL`.
    """
    values = {name: np.array([*by_seed.values()]) for name, by_seed in members.items()}
    tested = [name for name, one in values.items() if len(one) >= MIN_SEEDS]
    prior = fit_common_prior([values[name] for name in tested]) if moderate else None
    level = FAMILY_ERROR_LEVEL if prior is None else MODERATED_LEVEL
    # the mean of n dependent results has the same variance as the mean of n / (1 + n ratio) independent results
    shares = {name: ratio if isinstance(ratio, float | int) else ratio.get(name, 0.0) for name in values}
    wider = {name: math.sqrt(1 + len(one) * shares[name]) for name, one in values.items()}
    p = {name: _p_value(values[name], wider[name], prior) for name in tested}
    corrected = dict(zip(p, adjust_by_holm(list(p.values())), strict=True))
    rejections = {name: value <= level for name, value in corrected.items()}
    step = {name: min(place, sum(rejections.values())) for place, name in enumerate(sorted(p, key=p.__getitem__))}
    return {
        name: DifferenceTest(
            sum(one.tolist()) / len(one) if len(one) else math.nan,
            wider[name]
            * (
                _half_width(one, level / (len(p) - step[name]), prior)
                if name in p
                else _half_width(one, FAMILY_ERROR_LEVEL, None)
            ),
            p.get(name, math.nan),
            corrected.get(name, math.nan),
            rejections.get(name, False),
            len(one),
        )
        for name, one in values.items()
    }


def fit_common_prior(members: Sequence[np.ndarray]) -> Prior | None:
    """Fit the common prior for the variances of differences over seeds.

    Return None if too few members contain nonzero differences.
    """
    varied = [one for one in members if np.any(one) and np.isfinite(one).all()]
    return fit_prior([float(one.var(ddof=1)) for one in varied], [len(one) - 1 for one in varied])


def _p_value(values: np.ndarray, wider: float, prior: Prior | None) -> float:
    """Return the two-sided p-value for the mean of ``values [k]``.

    Without a prior, p is 0 if all values are equal, or 1 if they are all 0.
    """
    if values.max() == values.min() and (prior is None or not values[0] or math.isinf(values[0])):
        return 0.0 if values[0] else 1.0
    if not np.isfinite(values).all():
        return 1.0
    from scipy.special import stdtr  # slow to import, needed only with enough seeds

    error, degrees = _standard_error(values, prior)
    return float(2 * stdtr(degrees, -abs(values.mean()) / (wider * error)))


def _half_width(values: np.ndarray, level: float, prior: Prior | None) -> float:
    """Return the half-width of the confidence interval for the mean of ``values [k]``, with coverage ``1 - level``."""
    if not np.isfinite(values).all():
        return 0.0 if values.max() == values.min() else math.inf
    if prior is None:
        return half_width(values.tolist(), level)
    from scipy.special import stdtrit

    error, degrees = _standard_error(values, prior)
    return float(stdtrit(degrees, 1 - level / 2)) * error


def _standard_error(values: np.ndarray, prior: Prior | None) -> tuple[float, float]:
    """Return the standard error of the mean of ``values [k]``, and its degrees of freedom."""
    variance, degrees = float(values.var(ddof=1)), float(len(values) - 1)
    if prior is not None:
        variance, degrees = prior.posterior(variance, degrees)
    return math.sqrt(variance / len(values)), degrees


def adjust_by_holm(p: Sequence[float]) -> list[float]:
    """Adjust p-values ``[m]`` by Holm's step-down procedure (Holm, Scand. J. Statist. 1979).

    The k-th smallest p-value is adjusted to the maximum of (m - j + 1) p_j over j <= k, capped at 1. A hypothesis is
    rejected if its adjusted p-value does not exceed the family's level.
    """
    order = sorted(range(len(p)), key=p.__getitem__)
    adjusted, largest = [0.0] * len(p), 0.0
    for step, place in enumerate(order):
        largest = max(largest, (len(p) - step) * p[place])
        adjusted[place] = min(1.0, largest)
    return adjusted
