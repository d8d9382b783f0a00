"""Penalties of regressions by sums: ridge, with its strength by cross-validated likelihood, and Firth's.

References: A. E. Hoerl and R. W. Kennard, Technometrics 1970. P. J. M. Verweij and H. C. van Houwelingen,
"Cross-validation in survival analysis", Stat. Med. 1993. D. Firth, "Bias reduction of maximum likelihood estimates",
Biometrika 1993. G. Heinze and M. Schemper, Biometrics 2001 (Cox) and Stat. Med. 2002 (logistic).

A ridge of strength s maximizes the log-likelihood of N rows less N s / 2 times the sum of squared coefficients, of
columns with a standard deviation of 1 over all rows. Intercepts are free. Other libraries on such columns:

    lifelines      CoxPHFitter(penalizer=s). It divides columns by the deviation with N - 1, and so does its penalty
    statsmodels    GLM.fit_regularized(alpha=s, L1_wt=0), with 0 in alpha for intercepts
    scikit-learn   LogisticRegression(C=1 / (N s)), Ridge(alpha=N s), PoissonRegressor(alpha=s)
    glmnet         lambda = s

Firth's penalty is half the log determinant of the information, which has no strength and no scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import ConfigError
from fedloom.hints import unknown

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
PenaltyKind = Literal["none", "ridge", "firth"]
PENALTY_NAMES = ("none", "ridge", "firth")
RIDGE_STRENGTHS = tuple(10.0 ** (k / 2) for k in range(2, -9, -1))
"""Strengths that cross-validation compares, from 10 to 1e-4: from a fit of nearly nothing to nearly no penalty."""
CV_FOLDS = 5


class Likelihood(NamedTuple):
    """Log-likelihood, its gradient ``[p]``, and the information ``[p, p]``."""

    value: float
    gradient: Floats
    information: Floats


At = Callable[[Floats], Likelihood]
"""The likelihood of all rows at coefficients ``[p]``."""


class Ridge(NamedTuple):
    """A strength, and the held-out log-likelihood of each strength that it was chosen from. None if it was given."""

    strength: float
    held_out: tuple[tuple[float, float], ...] = ()

    @property
    def words(self) -> str:
        """Describe how the strength was found."""
        if not self.held_out:
            return f"ridge of strength {self.strength:g}"
        low, high = min(s for s, _ in self.held_out), max(s for s, _ in self.held_out)
        edge = ", the end of that range" if self.strength in (low, high) else ""
        return (
            f"ridge of strength {self.strength:.3g}: the largest held-out likelihood in {CV_FOLDS} folds, of strengths "
            f"from {low:.3g} to {high:.3g}{edge}"
        )


def impossible(columns: int) -> Likelihood:
    """Return a likelihood so small that `newton` halves its step, for coefficients without a likelihood."""
    return Likelihood(-np.inf, np.zeros(columns), np.zeros((columns, columns)))


def check_penalty(penalty: str, strength: float | Literal["cv"] | None) -> None:
    """Refuse an unknown penalty, or a strength that does not belong to it.

    Raises:
        ConfigError: there is one.
    """
    if penalty not in PENALTY_NAMES:
        raise unknown("penalty", penalty, PENALTY_NAMES)
    if penalty != "ridge" and strength is not None:
        raise ConfigError(f"penalty = {penalty!r} has no strength, got {strength!r}; leave it out, or take a ridge")
    if isinstance(strength, str) and strength != "cv":
        raise ConfigError(f"the strength of a ridge is a number above 0, or 'cv', got {strength!r}")
    if isinstance(strength, float | int) and not 0 < strength < np.inf:
        raise ConfigError(f"the strength of a ridge must be above 0, got {strength!r}; give 0.1, or 'cv'")


def ridged(at: At, weights: Floats) -> At:
    """Subtract half the sum of ``weights [p]`` times squared coefficients from the likelihood."""

    def penalized(beta: Floats) -> Likelihood:
        here = at(beta)
        value = here.value - float(weights @ beta**2) / 2
        return Likelihood(value, here.gradient - weights * beta, here.information + np.diag(weights))

    return penalized


def jeffreys(at: At, slope: Callable[[Floats, Floats], Floats]) -> At:
    """Add Firth's penalty to the likelihood.

    Args:
        at: the likelihood.
        slope: of coefficients and the inverse V of the information there, the vector ``[p]`` of tr(V dI / d beta_r).
    """

    def penalized(beta: Floats) -> Likelihood:
        here = at(beta)
        sign, size = np.linalg.slogdet(here.information) if np.isfinite(here.information).all() else (0, 0)
        if sign <= 0:
            return impossible(len(beta))
        inverse: Floats = np.linalg.inv(here.information).astype(float)
        tilt = slope(beta, inverse) / 2
        return Likelihood(here.value + float(size) / 2, here.gradient + tilt, here.information)

    return penalized


def fold_masks(sizes: Sequence[int]) -> list[list[Mask]]:
    """Rows ``[N]`` of every site that are in each fold. Every site has about as many of its rows in each."""
    drawn = [np.random.default_rng([size, place]).permutation(size) % CV_FOLDS for place, size in enumerate(sizes)]
    return [[folds == k for folds in drawn] for k in range(CV_FOLDS)]


def find_ridge(
    strength: float | Literal["cv"] | None,
    part: Callable[[Sequence[Mask]], At],
    sizes: Sequence[int],
    weights: Floats,
    fit: Callable[[At, Floats | None], Floats],
) -> Ridge:
    """Return the given strength, or the strength with the largest held-out likelihood.

    The held-out likelihood of a fold is the likelihood of all rows, less the likelihood of the rows that coefficients
    are of: Verweij and van Houwelingen's for a partial likelihood, and for a regression the rows' that are held out.

    Args:
        strength: a number, or "cv" or None to choose it.
        part: the likelihood of some rows ``[N]`` of every site.
        sizes: rows of every site.
        weights: ``[p]`` 1 for columns, 0 for intercepts.
        fit: coefficients of the largest likelihood, from coefficients on.
    """
    if isinstance(strength, float | int):
        return Ridge(float(strength))
    kept = [[~mask for mask in fold] for fold in fold_masks(sizes)]
    whole, parts = part([np.ones(size, bool) for size in sizes]), [part(rows) for rows in kept]
    counts = [sum(int(rows.sum()) for rows in fold) for fold in kept]
    starts: list[Floats | None] = [None] * len(parts)
    held_out = []
    for tried in RIDGE_STRENGTHS:
        fits = [
            fit(ridged(at, count * tried * weights), start)
            for at, count, start in zip(parts, counts, starts, strict=True)
        ]
        value = sum(whole(beta).value - at(beta).value for beta, at in zip(fits, parts, strict=True))
        held_out.append((tried, float(value)))
        starts = [*fits]
    return Ridge(max(held_out, key=lambda pair: pair[1])[0], tuple(held_out))
