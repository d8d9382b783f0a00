"""Moderated t-tests for many comparisons, each with few seeds.

Each variance is shrunk toward a variance common to all comparisons.

With five seeds, a variance has four degrees of freedom, and the first step of Holm's procedure over 56 methods requires
a t value of 12. Taken together, all methods' variances in a setup show how large such a variance typically is. The
typical variance s0^2 is given the weight of d0 degrees of freedom. The variance s^2 of a comparison with d degrees of
freedom is replaced by (d0 s0^2 + d s^2) / (d0 + d), and its t-test uses d0 + d degrees of freedom.

Reference: G. K. Smyth, "Linear Models and Empirical Bayes Methods for Assessing Differential Expression in Microarray
Experiments", Stat. Appl. Genet. Mol. Biol. 3, 2004, Sections 3 and 6.2, as implemented by limma's ``squeezeVar``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MIN_VARIANCE_SHARE = 1e-5
"""Minimum variance used in the fit, as a fraction of the median variance, as in limma. Without this minimum, the
logarithm of a variance near 0 would dominate the fit."""
MAX_SEEDS = 10_000
"""Maximum number of seeds considered in a plan."""


class Prior(NamedTuple):
    """Prior distribution shared by the variances of all comparisons.

    Attributes:
        variance: s0^2, in the squared units of the values, above 0.
        degrees: d0, the equivalent number of degrees of freedom of the prior, from 0 to infinity.
        max_freedom: sum of all variances' residual degrees of freedom. The degrees of freedom of a shrunken variance
            cannot exceed this number.
    """

    variance: float
    degrees: float
    max_freedom: float

    def posterior(self, variance: float, degrees: float) -> tuple[float, float]:
        """Return one comparison's shrunken variance and its degrees of freedom."""
        if math.isinf(self.degrees):
            return self.variance, self.max_freedom
        together = self.degrees + degrees
        return (self.degrees * self.variance + degrees * variance) / together, min(together, self.max_freedom)


def fit_prior(variances: Sequence[float], degrees: Sequence[int]) -> Prior | None:
    """Fit the prior of the variances by the moments of their logarithms (Smyth, Section 6.2).

    Return None if there are fewer than three variances, or if all of them are 0.

    Args:
        variances: variance s^2 of every comparison.
        degrees: degrees of freedom d of every comparison.
    """
    if len(variances) < 3 or not any(variances):  # too few for an estimate of their spread
        return None
    from scipy.special import digamma, polygamma

    s2, d = np.array(variances, float), np.array(degrees, float)
    s2 = np.maximum(s2, MIN_VARIANCE_SHARE * np.median(s2[s2 > 0]))
    e = np.log(s2) - digamma(d / 2) + np.log(d / 2)
    excess = float(e.var(ddof=1) - polygamma(1, d / 2).mean())
    if excess <= 0:  # chance alone explains the differences between the variances
        return Prior(float(np.exp(e.mean())), math.inf, float(d.sum()))
    d0 = 2 * _inverse_trigamma(excess)
    return Prior(float(np.exp(e.mean() + digamma(d0 / 2) - math.log(d0 / 2))), d0, float(d.sum()))


def _inverse_trigamma(y: float) -> float:
    """Solve trigamma(x) = y for x, where y > 0, by Newton's method on 1 / trigamma (Smyth, Appendix)."""
    from scipy.special import polygamma

    x = 0.5 + 1 / y
    for _ in range(50):
        trigamma = float(polygamma(1, x))
        step = trigamma * (1 - trigamma / y) / float(polygamma(2, x))
        x += step
        if -step / x < 1e-8:
            break
    return x


def required_seeds(difference: float, prior: Prior, level: float, power: float) -> int:
    """Return the number of seeds needed to detect a difference with the given probability.

    The variance over seeds is assumed to equal the prior's variance. The result is at most `MAX_SEEDS`.

    Args:
        difference: size of the difference to detect, above 0.
        prior: prior of the variances. The plan does not depend on any observed difference.
        level: significance level of the two-sided test.
        power: required probability of detecting the difference, below 1.
    """
    low, high = 2, MAX_SEEDS
    while low < high:
        n = (low + high) // 2
        low, high = (low, n) if _test_power(difference, prior, level, n) >= power else (n + 1, high)
    return low


def _test_power(difference: float, prior: Prior, level: float, n: int) -> float:
    from scipy.special import nctdtr, stdtrit

    degrees = min(n - 1 + prior.degrees, max(prior.max_freedom, n - 1))
    shift, quantile = difference / math.sqrt(prior.variance / n), float(stdtrit(degrees, 1 - level / 2))
    if shift > 10 * quantile:  # SciPy's function fails for such values
        return 1.0
    return 1 - float(nctdtr(degrees, shift, quantile))
