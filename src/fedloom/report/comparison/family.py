"""A family of paired tests: differences over common seeds, Holm's correction, and intervals that agree with it.

Every comparison that one page, card or table states at once belongs to one family. A difference is tested by the paired
t test (`scipy.stats.ttest_1samp` of the differences by seed); Holm's step-down procedure (`holm`) keeps the
chance of any false claim in the family at 5 % or less. The interval of a difference has the level of the step at which
Holm's procedure decides it, so it leaves out 0 exactly where the difference is significant; its own coverage is 95 % or
more. A comparison with fewer than five common seeds is not tested and is no member of the family; seeds with which
the runs of both methods only repeat those of another count once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from fedloom.report.numbers import ENOUGH, Estimate, half_width

Name = TypeVar("Name", bound=Hashable)

LEVEL = 0.05
"""Chance of any false claim in a family."""


class TestedDifference(NamedTuple):
    """One difference of a family.

    Attributes:
        mean: mean over the common seeds; nan without one.
        half: half width of its interval, at the family's level; of the plain 95 % interval where it is not tested; nan
            with fewer than two seeds.
        p: two-sided p of the paired t test; nan where it is not tested.
        holm: the same, adjusted by Holm for the family.
        significant: whether Holm's procedure rejects that there is no difference.
        seeds: number of common seeds.
    """

    mean: float
    half: float
    p: float
    holm: float
    significant: bool
    seeds: int

    @property
    def testable(self) -> bool:
        """Whether there are seeds enough for a test."""
        return self.seeds >= ENOUGH

    def __neg__(self) -> TestedDifference:
        """The comparison seen from its other side."""
        return self._replace(mean=-self.mean)


def differences(one: Estimate, other: Estimate) -> dict[int, float]:
    """One minus the other by common seed; of seeds that both repeat, the first.

    >>> differences(Estimate({0: 3.0, 1: 4.0}), Estimate({1: 1.0, 2: 9.0}))
    {1: 3.0}
    """
    seeds = sorted(one.finite.keys() & other.finite.keys(), reverse=True)
    first = {(one.repeats.get(seed, seed), other.repeats.get(seed, seed)): seed for seed in seeds}
    return {seed: one.finite[seed] - other.finite[seed] for seed in sorted(first.values())}


def family(members: Mapping[Name, Mapping[int, float]]) -> dict[Name, TestedDifference]:
    """Test every difference of a family.

    Args:
        members: differences by seed, by a name of the comparison.
    """
    values = {name: [*by_seed.values()] for name, by_seed in members.items()}
    p = {name: _paired_p(one) for name, one in values.items() if len(one) >= ENOUGH}
    corrected = dict(zip(p, holm(list(p.values())), strict=True))
    rejections = {name: value <= LEVEL for name, value in corrected.items()}
    step = {name: min(place, sum(rejections.values())) for place, name in enumerate(sorted(p, key=p.__getitem__))}
    return {
        name: TestedDifference(
            sum(one) / len(one) if one else math.nan,
            half_width(one, LEVEL / (len(p) - step[name]) if name in p else LEVEL),
            p.get(name, math.nan),
            corrected.get(name, math.nan),
            rejections.get(name, False),
            len(one),
        )
        for name, one in values.items()
    }


def _paired_p(values: Sequence[float]) -> float:
    """Two-sided p of the paired t test of differences ``[k]``; equal ones are certain, unless they are all 0."""
    if max(values) == min(values):
        return 0.0 if values[0] else 1.0
    from scipy.stats import ttest_1samp  # slow to import, needed with seeds enough only

    with warnings.catch_warnings():  # scipy warns of differences that are nearly equal
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(ttest_1samp(values, 0.0).pvalue)


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p-values ``[m]`` by Holm's step-down procedure (Holm, Scand. J. Statist. 1979).

    The k-th smallest becomes the largest of (m - j + 1) p_j over j <= k, at most 1. A hypothesis is rejected where its
    adjusted p is at most the level of the family.
    """
    order = sorted(range(len(p)), key=p.__getitem__)
    adjusted, largest = [0.0] * len(p), 0.0
    for step, place in enumerate(order):
        largest = max(largest, (len(p) - step) * p[place])
        adjusted[place] = min(1.0, largest)
    return adjusted
