"""Looks at a claim: tests of paired differences after 5, 10 and 20 seeds, each at a level of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy.special import nctdtrinc, stdtr, stdtrit

from fedloom.report import LEVEL, holm
from fedloom_studies.reproduce.recipe import Claim

LOOKS = ((5, 0.01), (10, 0.015), (20, 0.025))
"""Seeds at which a claim is looked at, and the level of each look, two-sided; with fewer seeds nothing is decided."""
POWER = 0.8
"""With this probability a difference of the size called detectable would have been decided."""
ROUNDING = 1e-9
"""What equal means may differ by."""


class ClaimVerdict(StrEnum):
    """Name every outcome of a claim of a paper; a claim that is not tested has a reason, one of `Untested`."""

    HOLDS = "holds"
    PARTLY = "holds in part"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    UNTESTED = "not tested"


HOLDS, PARTLY, FAILS, UNDECIDED, UNTESTED = ClaimVerdict


class Untested(StrEnum):
    """Name every reason why a claim is not tested.

    Attributes:
        UNASKED: no recipe asks for it.
        NOT_RUN: the recipe, as it is now, has not been run.
        LOST: every run of a method that it needs diverged or failed.
        REGIME: what was run is in another regime than the paper's run, by figures that both have.
        GPU: what was run is so much smaller than the paper's run that more seeds change nothing.
    """

    UNASKED = "not asked"
    NOT_RUN = "not run"
    LOST = "without a result"
    REGIME = "another regime"
    GPU = "needs a GPU"



@dataclass(frozen=True)
class Look:
    """A test of paired differences in the claimed direction; no margin is part of them.

    Attributes:
        n: seeds that were used.
        difference: their mean.
        level: of the look.
        half: half width of the difference's interval at 1 - level.
        p: two-sided p of the nearer of claim and contradiction, in the claim's own test.
        verdict: holds, does not hold or undecided, at the level.
        detectable: the smallest difference that would have been decided with probability `POWER`, if the spread over
            seeds is that of these.
    """

    n: int
    difference: float
    level: float
    half: float
    p: float
    verdict: ClaimVerdict
    detectable: float


def first_look(claim: Claim, order: Sequence[str], lead: Mapping[str, float]) -> Look:
    """The first look that decides, else the last that there are seeds for, else what fewer seeds give."""
    values = [lead[seed] for seed in order]
    look = look_at(claim, values, math.nan)
    for n, level in LOOKS:
        if len(values) < n or look.verdict != UNDECIDED:
            break
        look = look_at(claim, values[:n], level)
    return look


def look_at(claim: Claim, values: list[float], level: float) -> Look:
    """Test differences by seed at a level; nan: without a test."""
    n, mean = len(values), float(np.mean(values)) if values else math.nan
    if math.isnan(level) or claim.construction:
        return Look(n, mean, math.nan, math.nan, math.nan, UNDECIDED, math.nan)
    error = float(np.std(values, ddof=1)) / math.sqrt(n)
    m = claim.margin
    right, wrong = _one_sided(mean + m, error, n), _one_sided(-m - mean, error, n)
    if error == 0:  # equal in every seed is not more
        wrong = 1.0 - right
    if claim.equivalent:
        right, wrong = max(right, _one_sided(m - mean, error, n)), min(wrong, _one_sided(mean - m, error, n))
    p = min(1.0, 2 * min(right, wrong))
    verdict = UNDECIDED if p > level else HOLDS if right < wrong else FAILS
    width = float(stdtrit(n - 1, 1 - level / 2))
    detectable = float(nctdtrinc(n - 1, 1 - POWER, width)) * error
    return Look(n, mean, level, width * error, p, verdict, detectable)


def _one_sided(lead: float, error: float, n: int) -> float:
    """p of a t test that the mean is above, by which it is by ``lead``."""
    if error == 0:
        return 0.0 if lead > 0 else 1.0
    return float(stdtr(n - 1, -lead / error))


def clear_looks(looks: Sequence[Look]) -> list[bool]:
    """Decide which are clear by Holm's procedure, each p as a share of the level of its own look."""
    return [p <= LEVEL for p in holm([min(1.0, LEVEL * look.p / look.level) for look in looks])]
