"""Penalties of regressions by sums: ridge, with its strength by cross-validated likelihood, and Firth's.

References: A. E. Hoerl and R. W. Kennard, Technometrics 1970. P. J. M. Verweij and H. C. van Houwelingen,
"Cross-validation in survival analysis", Stat. Med. 1993. D. Firth, "Bias reduction of maximum likelihood estimates",
Biometrika 1993. G. Heinze and M. Schemper, Biometrics 2001 (Cox) and Stat. Med. 2002 (logistic).

A ridge of strength s maximizes the log-likelihood of N rows minus N s / 2 times the sum of squared coefficients, for
columns with a standard deviation of 1 over all rows. Intercepts are free. Other libraries on such columns:

    lifelines      CoxPHFitter(penalizer=s). It divides columns by the deviation with N - 1, and so does its penalty
    statsmodels    GLM.fit_regularized(alpha=s, L1_wt=0), with 0 in alpha for intercepts
    scikit-learn   LogisticRegression(C=1 / (N s)), Ridge(alpha=N s), PoissonRegressor(alpha=s)
    glmnet         lambda = s

Firth's penalty is half the log determinant of the information. It has no strength and no scale.
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
"""Strengths that cross-validation compares, from 10 to 1e-4: from coefficients near 0 to nearly no penalty."""
CV_FOLDS = 5


class Likelihood(NamedTuple):
    """Log-likelihood, its gradient ``[p]``, and the information ``[p, p]``."""

    value: float
    gradient: Floats
    information: Floats


At = Callable[[Floats], Likelihood]
"""Function that returns the likelihood of all rows at coefficients ``[p]``."""


class Ridge(NamedTuple):
    """Strength of a ridge, and the held-out log-likelihood of each compared strength.

    None if the strength was given.
    """

    strength: float
    held_out: tuple[tuple[float, float], ...] = ()

    @property
    def words(self) -> str:
        """Sentence on the choice of the strength."""
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
    """Raise if a penalty is unknown, or a strength does not belong to the penalty.

    Raises:
        ConfigError: the penalty is unknown, or the strength does not belong to it.
    """
    if penalty not in PENALTY_NAMES:
        raise unknown("penalty", penalty, PENALTY_NAMES)
    if penalty != "ridge" and strength is not None:
        raise ConfigError(f"penalty = {penalty!r} has no strength, got {strength!r}. Leave it out, or use a ridge")
    if isinstance(strength, str) and strength != "cv":
        raise ConfigError(f"the strength of a ridge must be a number greater than 0, or 'cv', got {strength!r}")
    if isinstance(strength, float | int) and not 0 < strength < np.inf:
        raise ConfigError(f"the strength of a ridge must be greater than 0, got {strength!r}. Give 0.1, or 'cv'")


def ridged(at: At, weights: Floats) -> At:
    """Return the likelihood minus half the sum of ``weights [p]`` times squared coefficients."""

    def penalized(beta: Floats) -> Likelihood:
        here = at(beta)
        value = here.value - float(weights @ beta**2) / 2
        return Likelihood(value, here.gradient - weights * beta, here.information + np.diag(weights))

    return penalized


def jeffreys(at: At, slope: Callable[[Floats, Floats], Floats]) -> At:
    """Return the likelihood with Firth's penalty.

    Args:
        at: function that returns the likelihood.
        slope: function of coefficients and the inverse V of their information, which returns the vector ``[p]`` of tr(V
            dI / d beta_r).
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
    """Return the rows ``[N]`` of every site that are in each fold.

    Every site has about the same number of rows in each fold.
    """
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

    The held-out likelihood of a fold is the likelihood of all rows minus the likelihood of the rows that the
    coefficients
    were fitted to: for a partial likelihood this is Verweij and van Houwelingen's, for a regression it is the
        likelihood of the held-out rows.

    Args:
        strength: number, or "cv" or None to choose the strength.
        part: function that returns the likelihood of some rows ``[N]`` of every site.
        sizes: numbers of rows of every site.
        weights: ``[p]`` 1 for columns, 0 for intercepts.
        fit: function that returns the coefficients of the largest likelihood from start coefficients.
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
