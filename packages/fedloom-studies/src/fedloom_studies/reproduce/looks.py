"""Looks at a claim: tests of paired differences after 5, 10 and 20 seeds, each at its own significance level."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from scipy.special import nctdtrinc, stdtr, stdtrit

from fedloom.lab.report import FAMILY_ERROR_LEVEL, adjust_by_holm
from fedloom_studies.reproduce.recipe import Claim

LOOK_LEVELS = ((5, 0.01), (10, 0.015), (20, 0.025))
"""Numbers of seeds at the interim tests (looks) of a claim, and their two-sided significance levels.
With fewer seeds, no claims are tested."""
DETECTION_PROBABILITY = 0.8
"""Probability that a difference of the detectable size is significant. This is the usual power of a study (J. Cohen,
"Statistical Power Analysis for the Behavioral Sciences", 2nd ed., 1988, Section 2.4)."""
EQUAL_MEANS_TOLERANCE = 1e-9
"""Permitted rounding error between means that should be equal."""


class ClaimVerdict(StrEnum):
    """Possible verdicts on a claim of a paper.

    If a claim is not tested, a member of `UntestedReason` states the reason.
    """

    HOLDS = "holds"
    PARTLY = "holds in part"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    UNTESTED = "not tested"


HOLDS, PARTLY, FAILS, UNDECIDED, UNTESTED = ClaimVerdict


class UntestedReason(StrEnum):
    """Reasons why a claim was not tested.

    Attributes:
        UNASKED: no recipe contains a test of the claim.
        NOT_RUN: the current version of the recipe has not been run.
        LOST: every run of a required method diverged or failed.
        REGIME: the run is not comparable to the paper's run, as shown by values that both report.
        STAND_IN: the recipe uses other data, features or networks than the paper. The verdicts on it are shown on its
            own page.
        GPU: the run is too much smaller than the paper's run for more seeds to help.
    """

    UNASKED = "not covered"
    NOT_RUN = "not run"
    LOST = "no result"
    REGIME = "not comparable"
    STAND_IN = "stand-in"
    GPU = "needs a GPU"


@dataclass(frozen=True)
class InterimTest:
    """Test of paired differences in the claimed direction, after a number of seeds.

    The differences do not include the margin of the claim.

    Attributes:
        n: number of seeds in the test.
        difference: mean difference over the seeds.
        level: significance level of the test. This level is the level of the interim look or, with
            several rivals, the level of the step in Holm's procedure. NaN if no test was performed.
        standard_error: standard error of ``difference``. NaN if no test was performed.
        p: two-sided p-value of either the claim or its opposite, whichever is closer.
        verdict: "holds", "does not hold" or "undecided", at the level of the interim look.
    """

    n: int
    difference: float
    level: float
    standard_error: float
    p: float
    verdict: ClaimVerdict

    @property
    def half(self) -> float:
        """Half-width of the interval that decides the test. NaN if no test was performed."""
        return self._quantile * self.standard_error

    @property
    def detectable(self) -> float:
        """Smallest difference that this number of seeds would detect with a probability of `DETECTION_PROBABILITY`."""
        return float(nctdtrinc(self.n - 1, 1 - DETECTION_PROBABILITY, self._quantile)) * self.standard_error

    @property
    def _quantile(self) -> float:
        return float(stdtrit(self.n - 1, 1 - self.level / 2)) if math.isfinite(self.level) else math.nan


def first_deciding_look(claim: Claim, order: Sequence[str], lead: Mapping[str, float]) -> InterimTest:
    """Return the first interim test that settles a claim, the last one with enough seeds, or a mean of fewer seeds."""
    values = [lead[seed] for seed in order]
    look = look_at(claim, values, math.nan)
    for n, level in LOOK_LEVELS:
        if len(values) < n or look.verdict != UNDECIDED:
            break
        look = look_at(claim, values[:n], level)
    return look


def look_at(claim: Claim, values: list[float], level: float) -> InterimTest:
    """Test a claim's differences, one per seed, at the given significance level.

    No test is performed if the level is NaN.
    """
    n, mean = len(values), float(np.mean(values)) if values else math.nan
    if math.isnan(level) or claim.construction:
        return InterimTest(n, mean, math.nan, math.nan, math.nan, UNDECIDED)
    error = _standard_error(values)
    m = claim.margin
    right, wrong = _one_sided_p_value(mean + m, error, n), _one_sided_p_value(-m - mean, error, n)
    if error == 0:  # if all differences are equal, the two p-values must not both be small
        wrong = 1.0 - right
    if claim.equivalent:
        right, wrong = (
            max(right, _one_sided_p_value(m - mean, error, n)),
            min(wrong, _one_sided_p_value(mean - m, error, n)),
        )
    p = min(1.0, 2 * min(right, wrong))
    verdict = UNDECIDED if p > level else HOLDS if right < wrong else FAILS
    return InterimTest(n, mean, level, error, p, verdict)


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean. The error is 0 if all values are the same infinity."""
    if not all(map(math.isfinite, values)):
        return 0.0 if len(set(values)) == 1 else math.inf
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _one_sided_p_value(lead: float, error: float, n: int) -> float:
    """Return the p-value of a one-sided t-test that the mean is above a bound, which it exceeds by ``lead``."""
    if error == 0:
        return 0.0 if lead > 0 else 1.0
    return float(stdtr(n - 1, -lead / error))


def decide_looks(looks: Sequence[InterimTest]) -> list[tuple[InterimTest, bool]]:
    """Return each test at the level of its step in Holm's procedure, and whether it is significant at this level.

    Because the tests may have different levels, each p-value is divided by the level of its test.
    """
    shares = [min(1.0, FAMILY_ERROR_LEVEL * look.p / look.level) for look in looks]
    clear = [p <= FAMILY_ERROR_LEVEL for p in adjust_by_holm(shares)]
    order = sorted(range(len(looks)), key=shares.__getitem__)
    left = {place: len(looks) - min(rank, sum(clear)) for rank, place in enumerate(order)}
    return [(replace(look, level=look.level / left[k]), clear[k]) for k, look in enumerate(looks)]


def claim_words(verdict: ClaimVerdict, reason: UntestedReason | None = None) -> str:
    """Return a verdict as text, with the reason if a claim was not tested.

    >>> claim_words(HOLDS), claim_words(UNTESTED, UntestedReason.GPU)
    ('holds', 'not tested (needs a GPU)')
    """
    return f"{verdict} ({reason})" if reason else str(verdict)
