"""Looks at a claim: tests of paired differences after 5, 10 and 20 seeds, each at its own level."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from scipy.special import nctdtrinc, stdtr, stdtrit

from fedloom.lab.report import FAMILY_ERROR_LEVEL, holm
from fedloom_studies.reproduce.recipe import Claim

LOOK_LEVELS = ((5, 0.01), (10, 0.015), (20, 0.025))
"""Numbers of seeds at which a claim is examined, and the two-sided level of each look. No claim is decided with fewer
seeds."""
DETECTION_PROBABILITY = 0.8
"""Probability with which a difference of the detectable size would have been decided, which is the usual power of a
study (J. Cohen, "Statistical Power Analysis for the Behavioral Sciences", 2nd ed., 1988, Section 2.4)."""
EQUAL_MEANS_TOLERANCE = 1e-9
"""Rounding difference that is allowed between equal means."""


class ClaimVerdict(StrEnum):
    """Possible outcomes for a paper's claim.

    A claim that is not tested has a reason, which is a member of `Untested`.
    """

    HOLDS = "holds"
    PARTLY = "holds in part"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    UNTESTED = "not tested"


HOLDS, PARTLY, FAILS, UNDECIDED, UNTESTED = ClaimVerdict


class Untested(StrEnum):
    """Reasons why a claim is not tested.

    Attributes:
        UNASKED: no recipe tests the claim.
        NOT_RUN: the current version of the recipe has not been run.
        LOST: every run of a required method diverged or failed.
        REGIME: the run is in a different regime from the paper's run, judging by values that both contain.
        STAND_IN: the recipe replaces the paper's data, features or network. Its own page has its verdicts.
        GPU: the run is so much smaller than the paper's run that more seeds would change nothing.
    """

    UNASKED = "not covered"
    NOT_RUN = "not run"
    LOST = "no result"
    REGIME = "not comparable"
    STAND_IN = "stand-in"
    GPU = "needs a GPU"


@dataclass(frozen=True)
class Look:
    """Test of paired differences in the claimed direction. The differences do not include the margin.

    Attributes:
        n: number of seeds in the test.
        difference: mean of the differences.
        level: level of the decision, i.e. that of the look and, if there are several rivals, of the step in Holm's
            procedure. NaN if there is no test.
        error: standard error of the difference. NaN if there is no test.
        p: two-sided p-value of the nearer of claim and contradiction, in the claim's test.
        verdict: holds, does not hold or undecided, at the level of the look.
    """

    n: int
    difference: float
    level: float
    error: float
    p: float
    verdict: ClaimVerdict

    @property
    def half(self) -> float:
        """Half the width of the interval on which the decision is based. NaN without a test."""
        return self._quantile * self.error

    @property
    def detectable(self) -> float:
        """Difference that this number of seeds would have decided with a probability of `DETECTION_PROBABILITY`."""
        return float(nctdtrinc(self.n - 1, 1 - DETECTION_PROBABILITY, self._quantile)) * self.error

    @property
    def _quantile(self) -> float:
        return float(stdtrit(self.n - 1, 1 - self.level / 2)) if math.isfinite(self.level) else math.nan


def first_look(claim: Claim, order: Sequence[str], lead: Mapping[str, float]) -> Look:
    """Return the first look that decides, or the last look with enough seeds, or the result of fewer seeds."""
    values = [lead[seed] for seed in order]
    look = look_at(claim, values, math.nan)
    for n, level in LOOK_LEVELS:
        if len(values) < n or look.verdict != UNDECIDED:
            break
        look = look_at(claim, values[:n], level)
    return look


def look_at(claim: Claim, values: list[float], level: float) -> Look:
    """Return the test of differences by seed at a given level. If the level is NaN, there is no test."""
    n, mean = len(values), float(np.mean(values)) if values else math.nan
    if math.isnan(level) or claim.construction:
        return Look(n, mean, math.nan, math.nan, math.nan, UNDECIDED)
    error = _error(values)
    m = claim.margin
    right, wrong = _one_sided(mean + m, error, n), _one_sided(-m - mean, error, n)
    if error == 0:  # equal in every seed is not more
        wrong = 1.0 - right
    if claim.equivalent:
        right, wrong = max(right, _one_sided(m - mean, error, n)), min(wrong, _one_sided(mean - m, error, n))
    p = min(1.0, 2 * min(right, wrong))
    verdict = UNDECIDED if p > level else HOLDS if right < wrong else FAILS
    return Look(n, mean, level, error, p, verdict)


def _error(values: Sequence[float]) -> float:
    """Return the standard error of a mean, or 0 if all values are the same infinity."""
    if not all(map(math.isfinite, values)):
        return 0.0 if len(set(values)) == 1 else math.inf
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _one_sided(lead: float, error: float, n: int) -> float:
    """Return the p-value of a t-test that the mean is above the bound, which it exceeds by ``lead``."""
    if error == 0:
        return 0.0 if lead > 0 else 1.0
    return float(stdtr(n - 1, -lead / error))


def decided_looks(looks: Sequence[Look]) -> list[tuple[Look, bool]]:
    """Return every look at the level of its step in Holm's procedure, and True if it is clear at this level.

    Each p-value counts as a share of the level of its look.
    """
    shares = [min(1.0, FAMILY_ERROR_LEVEL * look.p / look.level) for look in looks]
    clear = [p <= FAMILY_ERROR_LEVEL for p in holm(shares)]
    order = sorted(range(len(looks)), key=shares.__getitem__)
    left = {place: len(looks) - min(rank, sum(clear)) for rank, place in enumerate(order)}
    return [(replace(look, level=look.level / left[k]), clear[k]) for k, look in enumerate(looks)]


def claim_words(verdict: ClaimVerdict, reason: Untested | None = None) -> str:
    """Render a verdict, with the reason if a claim was not tested.

    >>> claim_words(HOLDS), claim_words(UNTESTED, Untested.GPU)
    ('holds', 'not tested (needs a GPU)')
    """
    return f"{verdict} ({reason})" if reason else str(verdict)
