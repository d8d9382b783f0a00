"""Penalties for regressions: Firth's penalty, and ridge with a strength chosen by cross-validated likelihood.

References: A. E. Hoerl and R. W. Kennard, Technometrics 1970. P. J. M. Verweij and H. C. van Houwelingen,
"Cross-validation in survival analysis", Stat. Med. 1993. D. Firth, "Bias reduction of maximum likelihood estimates",
Biometrika 1993. G. Heinze and M. Schemper, Biometrics 2001 (Cox) and Stat. Med. 2002 (logistic).

A ridge of strength s maximizes the log-likelihood of N rows minus N s / 2 times the sum of the squared coefficients.
Columns must have a standard deviation of 1 over all rows. Intercepts are not penalized. For such columns, these
settings of other libraries are equivalent:

    lifelines      CoxPHFitter(penalizer=s), which divides columns, also in its penalty, by the deviation with N - 1
    statsmodels    GLM.fit_regularized(alpha=s, L1_wt=0), with 0 in alpha for intercepts
    scikit-learn   LogisticRegression(C=1 / (N s)), Ridge(alpha=N s), PoissonRegressor(alpha=s)
    glmnet         lambda = s

Firth's penalty is half of the log determinant of the information. It has neither a strength nor a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import ConfigError, DataError
from fedloom.hints import unknown_name_error

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
PenaltyKind = Literal["none", "ridge", "firth"]
PENALTY_NAMES = ("none", "ridge", "firth")
RIDGE_STRENGTHS = tuple(10.0 ** (k / 2) for k in range(2, -9, -1))
"""Strengths that are compared in the cross-validation. The strengths range from 10, where coefficients are near 0, to
1e-4, which is almost no penalty."""
CV_FOLDS = 5
MAX_PATH_STEPS, MAX_PATH_DECREMENT = 50, 1e-14
"""Maximum total number of steps of a cross-validation's fits, and gain below which a step is a fit's last."""
MAX_REFUSALS = 3
"""Number of times that the steps are halved before the weakest strength is dropped."""


class Likelihood(NamedTuple):
    """Log-likelihood, its gradient ``[p]``, and the information ``[p, p]``."""

    value: float
    gradient: Floats
    information: Floats


LikelihoodFunction = Callable[[Floats], Likelihood]
"""Function that returns the likelihood of all rows, given coefficients ``[p]``."""


class Ridge(NamedTuple):
    """Strength of a ridge, with the held-out log-likelihood of each strength that was tried.

    ``held_out`` is empty if the strength was given by the user.
    """

    strength: float
    held_out: tuple[tuple[float, float], ...] = ()

    @property
    def words(self) -> str:
        """Text that describes the ridge and how its strength was chosen."""
        if not self.held_out:
            return f"ridge of strength {self.strength:g}"
        low, high = min(s for s, _ in self.held_out), max(s for s, _ in self.held_out)
        edge = ", the end of that range" if self.strength in (low, high) else ""
        return (
            f"ridge of strength {self.strength:.3g}: the largest held-out likelihood in {CV_FOLDS} folds, of strengths "
            f"from {low:.3g} to {high:.3g}{edge}"
        )


def impossible_likelihood(columns: int) -> Likelihood:
    """Return the value that represents coefficients without a likelihood.

    This value is so small that `newton` halves its step.
    """
    return Likelihood(-np.inf, np.zeros(columns), np.zeros((columns, columns)))


def check_penalty(penalty: str, strength: float | Literal["cv"] | None) -> None:
    """Raise an error if a penalty is unknown, or if a strength is out of range or given for a penalty that has none.

    Raises:
        ConfigError: the penalty is unknown, it has no strength, or the strength is invalid.
    """
    if penalty not in PENALTY_NAMES:
        raise unknown_name_error("penalty", penalty, PENALTY_NAMES)
    if penalty != "ridge" and strength is not None:
        raise ConfigError(
            f"penalty = {penalty!r} has no strength, got {strength!r}",
            rule="penalty-strength",
            fix="omit `strength`, or use a ridge penalty",
        )
    wrong = isinstance(strength, str) and strength != "cv"
    if wrong or (isinstance(strength, float | int) and not 0 < strength < np.inf):
        raise ConfigError(
            f"the strength of a ridge penalty must be a finite number greater than 0, or 'cv', got {strength!r}",
            rule="penalty-strength",
            fix="use a number such as 0.1, or 'cv'",
        )


def add_ridge_penalty(at: LikelihoodFunction, weights: Floats) -> LikelihoodFunction:
    """Return the likelihood function minus half the sum of ``weights [p]`` times squared coefficients."""

    def penalized(beta: Floats) -> Likelihood:
        here = at(beta)
        value = here.value - float(weights @ beta**2) / 2
        return Likelihood(value, here.gradient - weights * beta, here.information + np.diag(weights))

    return penalized


def add_firth_penalty(at: LikelihoodFunction, slope: Callable[[Floats, Floats], Floats | None]) -> LikelihoodFunction:
    """Return the likelihood function that includes Firth's penalty.

    Args:
        at: function that returns the likelihood without the penalty.
        slope: function that takes the coefficients and the inverse V of the information matrix. The function returns
            the vector ``[p]`` of tr(V dI / d beta_r), or None if this vector cannot be obtained at these coefficients.
    """

    def penalized(beta: Floats) -> Likelihood:
        here = at(beta)
        sign, size = np.linalg.slogdet(here.information) if np.isfinite(here.information).all() else (0, 0)
        if sign <= 0:
            return impossible_likelihood(len(beta))
        inverse: Floats = np.linalg.inv(here.information).astype(float)
        tilt = slope(beta, inverse)
        if tilt is None:
            return impossible_likelihood(len(beta))
        return Likelihood(here.value + float(size) / 2, here.gradient + tilt / 2, here.information)

    return penalized


def tilt_error(here: Likelihood, slack: Floats, matrix: float, reach: Floats) -> float:
    """Return the largest effect of rounding on the coefficients of a fit with Firth's penalty, to first order.

    An error in the information changes the inverse by at most this error divided by the square of the smallest
    eigenvalue. Third moments are at most ``reach`` times the second moments. The factor 2 is necessary because the
    matrix in Newton's step does not contain the penalty.

    Args:
        here: likelihood at the fitted coefficients.
        slack: error of the gradient, including the gradient of the penalty, ``[q]``.
        matrix: error of the information, as a matrix norm.
        reach: largest distance of a row from the mean of all rows in each coordinate, ``[q]``.
    """
    least = float(np.linalg.eigvalsh(here.information)[0]) - matrix
    if least <= 0:
        return float("inf")
    score = np.abs(here.gradient) + slack + (slack + reach * len(reach) * matrix / least) / 2
    return 2 * float(np.linalg.norm(score)) / least


def fold_masks(sizes: Sequence[int]) -> list[list[Mask]]:
    """Return masks ``[N]`` of each site's rows, one for each fold.

    Each fold contains about the same number of a site's rows.
    """
    drawn = [np.random.default_rng([size, place]).permutation(size) % CV_FOLDS for place, size in enumerate(sizes)]
    return [[folds == k for folds in drawn] for k in range(CV_FOLDS)]


def find_ridge(
    strength: float | Literal["cv"] | None,
    part: Callable[[Sequence[Mask]], LikelihoodFunction],
    sizes: Sequence[int],
    weights: Floats,
    fit: Callable[[LikelihoodFunction, Floats | None], Floats],
) -> Ridge:
    """Return the given strength, or the strength with the largest held-out likelihood.

    The held-out likelihood of a fold is the likelihood of all rows minus the likelihood of the fitted rows. For a
    partial likelihood, this is the definition of Verweij and van Houwelingen. For a regression, it equals the
    likelihood of the held-out rows.

    Args:
        strength: a number, or "cv" or None to choose the strength.
        part: function that returns the likelihood of some of each site's rows ``[N]``.
        sizes: number of rows at each site.
        weights: 1 for columns and 0 for intercepts, ``[p]``.
        fit: function that maximizes a likelihood, starting from given coefficients, and returns the coefficients.
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
            fit(add_ridge_penalty(at, count * tried * weights), start)
            for at, count, start in zip(parts, counts, starts, strict=True)
        ]
        value = sum(whole(beta).value - at(beta).value for beta, at in zip(fits, parts, strict=True))
        held_out.append((tried, float(value)))
        starts = [*fits]
    return Ridge(max(held_out, key=lambda pair: pair[1])[0], tuple(held_out))


class FoldSums(NamedTuple):
    """Sums for K = S (F + 1) fits.

    For each of S strengths, there is a fit without each of the F folds, and then a fit of all rows.

    Attributes:
        row_counts: number of rows in each of these row sets, ``[F + 1]``.
        values: log-likelihood of the rows that a fit uses, ``[K]``.
        everywhere: log-likelihood of all rows at the coefficients of a fit, ``[K]``.
        gradients: gradients for the rows that a fit uses, ``[K, q]``.
        informations: information matrices for these rows, ``[K, q, q]``.
    """

    row_counts: Floats
    values: Floats
    everywhere: Floats
    gradients: Floats
    informations: Floats


def find_ridge_by_sums(
    ask: Callable[[Floats], FoldSums | None], weights: Floats
) -> tuple[Ridge, Floats, Likelihood, Likelihood]:
    """Return the strength with the largest held-out likelihood, and its fit of all rows with and without the ridge.

    The fits for all strengths take their Newton steps together, so one sum serves them all. `find_ridge`
    chooses the same strength. If clients cannot answer, strengths are dropped one by one, starting with the weakest.

    Args:
        ask: function that returns the sums for the coefficients of all fits ``[K, q]``, or None if clients cannot
            answer.
        weights: penalty on each squared coefficient per row for strength 1, which is 0 for intercepts, ``[q]``.

    Raises:
        DataError: clients cannot answer, or the fits do not converge.
    """
    sets = CV_FOLDS + 1
    beta = np.zeros((len(RIDGE_STRENGTHS) * sets, len(weights)))
    here = ask(beta)
    if here is None:
        raise DataError("clients cannot answer the first step of the cross-validation. Set a strength")
    penalty = np.outer(np.repeat(RIDGE_STRENGTHS, sets) * np.tile(here.row_counts, len(RIDGE_STRENGTHS)), weights)
    score = here.values
    step, rise = _penalized_steps(here, beta, penalty)
    compared, refused, left = len(RIDGE_STRENGTHS), 0, True
    for _ in range(MAX_PATH_STEPS):
        ahead = ask(beta + step)
        if ahead is None:  # the step is too long, or a row would be revealed
            refused += 1
            step = step / 2
            if refused > MAX_REFUSALS:
                compared, refused = compared - 1, 0
                step[compared * sets :] = 0
                if not compared:
                    raise DataError("clients cannot answer the steps of the cross-validation. Set a strength")
            continue
        refused = 0
        value = ahead.values - (penalty * (beta + step) ** 2).sum(1) / 2
        better = value >= score - 1e-12 * np.abs(score)
        beta = np.where(better[:, None], beta + step, beta)
        score, here = np.where(better, value, score), _merge_accepted_steps(better, ahead, here)
        if not left:
            break
        newton, rise = _penalized_steps(here, beta, penalty)
        step = np.where(better[:, None], newton, step / 2)
        step[compared * sets :] = 0
        left = bool((rise[: compared * sets] >= MAX_PATH_DECREMENT).any())
    else:
        raise DataError(f"cross-validation has not converged after {MAX_PATH_STEPS} steps. Set a strength")
    gains = (here.everywhere - here.values).reshape(-1, sets)[:compared, :CV_FOLDS].sum(1)
    best = int(gains.argmax())
    at = best * sets + CV_FOLDS
    plain = Likelihood(float(here.values[at]), here.gradients[at], here.informations[at])
    held_out = tuple(zip(RIDGE_STRENGTHS, gains.tolist(), strict=False))
    return (
        Ridge(RIDGE_STRENGTHS[best], held_out),
        beta[at],
        add_ridge_penalty(lambda _: plain, penalty[at])(beta[at]),
        plain,
    )


def _penalized_steps(here: FoldSums, beta: Floats, penalty: Floats) -> tuple[Floats, Floats]:
    """Return the Newton steps of all fits, ``[K, q]``, and the gain expected from each, ``[K]``."""
    gradients = here.gradients - penalty * beta
    informations = here.informations + penalty[:, :, None] * np.eye(penalty.shape[1])
    steps: Floats = np.linalg.solve(informations, gradients[:, :, None])[:, :, 0].astype(float)
    return steps, (gradients * steps).sum(1)


def _merge_accepted_steps(better: Mask, ahead: FoldSums, here: FoldSums) -> FoldSums:
    """Return the new sums for fits whose step is accepted, and the old sums for the others."""
    parts = (
        np.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old)
        for new, old in zip(ahead[1:], here[1:], strict=True)
    )
    return FoldSums(here.row_counts, *parts)
