"""Moderated t tests for few seeds and many comparisons. Their variances are shrunk towards a common variance.

With five seeds, a variance has four degrees of freedom, and Holm's first step over 56 methods needs a t value of 12.
The variances of all methods in a setup together show how large such a variance typically is: s0^2, worth d0 degrees of
freedom. The variance of a comparison becomes (d0 s0^2 + d s^2) / (d0 + d), and its t test uses d0 + d degrees of
freedom.

Reference: G. K. Smyth, "Linear Models and Empirical Bayes Methods for Assessing Differential Expression in Microarray
Experiments", Stat. Appl. Genet. Mol. Biol. 3, 2004, Sections 3 and 6.2, as implemented by limma's ``squeezeVar``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST_SHARE = 1e-5
"""Smallest variance used in the fit, as a share of the median variance, as in limma. Otherwise a logarithm of 0 would
dominate the fit."""
MOST_SEEDS = 10_000
"""Largest number of seeds in a plan."""


class Prior(NamedTuple):
    """Common prior of variances.

    Attributes:
        variance: s0^2, in the squared units of the values, above 0.
        degrees: d0, from 0 to infinity: number of degrees of freedom that the prior is worth.
        most: residual degrees of freedom of all variances together. The degrees of freedom of a variance cannot exceed
            this number.
    """

    variance: float
    degrees: float
    most: float

    def posterior(self, variance: float, degrees: float) -> tuple[float, float]:
        """Return the shrunken variance of one comparison and its degrees of freedom."""
        if math.isinf(self.degrees):
            return self.variance, self.most
        together = self.degrees + degrees
        return (self.degrees * self.variance + degrees * variance) / together, min(together, self.most)


def fit_prior(variances: Sequence[float], degrees: Sequence[int]) -> Prior | None:
    """Return the prior of variances by the moments of their logarithms (Smyth, Section 6.2).

    None for fewer than three variances.

    Args:
        variances: s^2 of every comparison, at least one above 0.
        degrees: d of each comparison.
    """
    if len(variances) < 3 or not any(variances):  # the spread of two logarithms is no estimate
        return None
    from scipy.special import digamma, polygamma

    s2, d = np.array(variances, float), np.array(degrees, float)
    s2 = np.maximum(s2, LEAST_SHARE * np.median(s2[s2 > 0]))
    e = np.log(s2) - digamma(d / 2) + np.log(d / 2)
    excess = float(e.var(ddof=1) - polygamma(1, d / 2).mean())
    if excess <= 0:  # the variances differ by no more than chance
        return Prior(float(np.exp(e.mean())), math.inf, float(d.sum()))
    d0 = 2 * _inverse_trigamma(excess)
    return Prior(float(np.exp(e.mean() + digamma(d0 / 2) - math.log(d0 / 2))), d0, float(d.sum()))


def _inverse_trigamma(y: float) -> float:
    """Return x with trigamma(x) = y > 0, computed by Newton's method on 1 / trigamma (Smyth, Appendix)."""
    from scipy.special import polygamma

    x = 0.5 + 1 / y
    for _ in range(50):
        trigamma = float(polygamma(1, x))
        step = trigamma * (1 - trigamma / y) / float(polygamma(2, x))
        x += step
        if -step / x < 1e-8:
            break
    return x


def seeds_for(difference: float, prior: Prior, level: float, power: float) -> int:
    """Return the number of seeds needed to show a difference with a given probability.

    The spread is assumed to be the common spread. The number is at most `MOST_SEEDS`.

    Args:
        difference: difference to show, above 0.
        prior: prior of the variances. No observed difference is used in the plan.
        level: level of the two-sided test.
        power: probability of showing the difference, below 1.
    """
    low, high = 2, MOST_SEEDS
    while low < high:
        n = (low + high) // 2
        low, high = (low, n) if _power(difference, prior, level, n) >= power else (n + 1, high)
    return low


def _power(difference: float, prior: Prior, level: float, n: int) -> float:
    from scipy.special import nctdtr, stdtrit

    degrees = min(n - 1 + prior.degrees, max(prior.most, n - 1))
    shift, quantile = difference / math.sqrt(prior.variance / n), float(stdtrit(degrees, 1 - level / 2))
    if shift > 10 * quantile:  # where SciPy's function has no value
        return 1.0
    return 1 - float(nctdtr(degrees, shift, quantile))
