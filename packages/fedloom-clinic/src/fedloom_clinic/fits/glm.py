"""Linear, logistic and Poisson regression computed from sums over sites.

The results and their confidence intervals are the same as for the pooled fit.

References: P. McCullagh and J. A. Nelder, "Generalized Linear Models", 2nd ed., Chapter 2 (canonical links, for which
Newton's method equals Fisher scoring). Sums over sites as in Y. Wu et al., "GLORE", JAMIA 2012.

    paper    here     meaning
    beta     beta     coefficients, intercepts first
    mu       mean     expected target
    phi      scale    variance of a linear regression's residuals. 1 of the others
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from scipy.special import expit

from fedloom.errors import DataError
from fedloom.hints import unknown_name_error
from fedloom_clinic.fits.cox import Wald, check_varying, maximize_likelihood
from fedloom_clinic.fits.penalty import (
    Floats,
    Likelihood,
    LikelihoodFunction,
    Mask,
    PenaltyKind,
    Ridge,
    add_firth_penalty,
    add_ridge_penalty,
    check_penalty,
    find_ridge,
)
from fedloom_clinic.fits.separation import find_separating_direction

Link = Callable[[Floats], Floats]
GLM_FAMILIES: dict[str, tuple[Link, Link, Link, Link]] = {
    "linear": (lambda eta: eta**2 / 2, lambda eta: eta, np.ones_like, np.zeros_like),
    "logistic": (
        lambda eta: np.logaddexp(0, eta),
        expit,
        lambda eta: expit(eta) * expit(-eta),
        lambda eta: -expit(eta) * expit(-eta) * np.tanh(eta / 2),
    ),
    "poisson": (np.exp, np.exp, np.exp, np.exp),
}
"""Cumulant as a function of the linear predictor eta, together with its derivatives: mean, variance and third central
moment."""


class GlmSite(NamedTuple):
    """Rows of one site: columns ``x [N, p]`` and targets ``y [N]``."""

    x: Floats
    y: Floats


@dataclass(frozen=True)
class GlmFit(Wald):
    """Fit of a regression, with coefficients for the original (unscaled) columns.

    Attributes:
        names: names of the coefficients ``[q]``: an intercept (with `by_site`, one intercept for each site), followed
            by the columns.
        beta: coefficients, ``[q]``.
        se: standard errors of the coefficients, ``[q]``.
        row_count: number of rows.
        ridge: ridge penalty, or None if the fit has no penalty. With a ridge, standard errors are computed from the
            penalized information.
        residual_degrees: residual degrees of freedom of a linear regression, which its intervals and tests use. None if
            the regression is not linear.
    """

    names: list[str]
    beta: Floats
    se: Floats
    row_count: int
    ridge: Ridge | None = None
    residual_degrees: float | None = None

    @property
    def degrees(self) -> float:
        return super().degrees if self.residual_degrees is None else self.residual_degrees


def glm_sums(site: GlmSite, beta: Floats, family: str) -> Likelihood:
    """Return a site's contribution to a step: log-likelihood (up to a constant), gradient and information."""
    cumulant, mean, variance, _ = GLM_FAMILIES[family]
    eta = site.x @ beta
    value = float((site.y * eta - cumulant(eta)).sum())
    return Likelihood(value, site.x.T @ (site.y - mean(eta)), (site.x * variance(eta)[:, None]).T @ site.x)


def firth_slope(site: GlmSite, beta: Floats, family: str, metric: Floats) -> Floats:
    """Return a site's contribution to Firth's penalty: tr(V dI / d beta_r) ``[q]``, where V is the metric."""
    lengths = ((site.x @ metric) * site.x).sum(1)
    slope: Floats = site.x.T @ (GLM_FAMILIES[family][3](site.x @ beta) * lengths)
    return slope


def fit_glm(
    sites: Sequence[GlmSite],
    family: str,
    names: Sequence[str] = (),
    by_site: Sequence[str] | None = None,
    *,
    penalty: PenaltyKind = "none",
    strength: float | Literal["cv"] | None = None,
) -> GlmFit:
    """Return the regression of the rows of all sites together, fitted from sums that the sites send.

    The result is equivalent to the pooled fit. Each site first sends counts and the sums of its columns, of its targets
    and of their squares. With these sums, the columns are centered and scaled in the same way at all sites. In each
    Newton step, a site then sends the sums that `glm_sums` returns.

    Args:
        sites: rows of every site.
        family: name of the regression's family, which is a key of `GLM_FAMILIES`. Targets must be 0 or 1 for
            "logistic", and at least 0 for "poisson".
        names: the columns' names.
        by_site: names of the sites. If given, each site has its own intercept.
        penalty: "ridge" or "firth". The module `fedloom_clinic.fits.penalty` defines how the penalties are scaled.
        strength: strength of a ridge, above 0. If "cv" or None, the strength with the largest cross-validated
            likelihood is used.

    Raises:
        ConfigError: the family or the penalty is unknown.
        DataError: targets do not fit the family or do not vary, columns do not vary or are linearly dependent, or no
            finite fit exists.
    """
    if family not in GLM_FAMILIES:
        raise unknown_name_error("regression", family, GLM_FAMILIES)
    check_penalty(penalty, strength)
    names = list(names) or [f"column {k}" for k in range(sites[0].x.shape[1])]
    count = sum(len(site.y) for site in sites)
    check_varying([site.x for site in sites], names)
    centre, spread = _sum_moments([site.x for site in sites])
    _check_sites(sites, family)
    middle, unit = (float(m[0]) for m in _sum_moments([site.y[:, None] for site in sites]))
    middle, unit = (middle, unit) if family == "linear" else (0.0, 1.0)
    labels = [f"intercept {name}" for name in by_site] if by_site is not None else ["intercept"]
    first, labels = len(labels), [*labels, *names]
    scaled = []
    for place, site in enumerate(sites):
        ones = np.zeros((len(site.y), first))
        ones[:, place if by_site is not None else 0] = 1
        scaled.append(GlmSite(np.hstack([ones, (site.x - centre) / spread]), (site.y - middle) / unit))

    ridge, weights = None, np.concatenate([np.zeros(first), np.ones(len(names))])
    sizes = [len(site.y) for site in scaled]

    def part(rows: Sequence[Mask]) -> LikelihoodFunction:
        return _likelihood_of([GlmSite(s.x[some], s.y[some]) for s, some in zip(scaled, rows, strict=True)], family)

    at = penalized = part([np.ones(size, bool) for size in sizes])
    if penalty == "ridge":
        _check_intercepts(sites, family, by_site)
        ridge = find_ridge(
            strength,
            part,
            sizes,
            weights,
            lambda at, start: maximize_likelihood(at, labels, penalty="ridge", start=start)[0],
        )
        penalized = add_ridge_penalty(at, count * ridge.strength * weights)
    elif penalty == "firth":
        penalized = add_firth_penalty(
            at, lambda beta, metric: np.sum([firth_slope(s, beta, family, metric) for s in scaled], 0)
        )
    beta, here = maximize_likelihood(
        penalized, labels, lambda: _find_separation(scaled, family, first), intercepts=first, penalty=penalty
    )
    inverse, scale, degrees = np.linalg.inv(here.information), 1.0, None
    if family == "linear":  # squared residuals: y'y - 2 value, with value = y'eta - eta^2/2
        exact = at(beta)
        spent = len(beta) if ridge is None else float(np.trace(inverse @ exact.information))
        if count <= spent:
            raise DataError(
                f"{count} rows for {len(beta)} coefficients leave no degrees of freedom for the residuals. Omit columns"
            )
        residual = sum(float(site.y @ site.y) for site in scaled) - 2 * exact.value
        degrees = count - spent
        scale = max(residual, 0.0) / degrees  # rounding may put a perfect fit below 0
    back = np.eye(len(beta))  # matrix that converts beta to the original units
    back[first:, first:] = np.diag(1 / spread)
    back[:first, first:] = -(centre / spread)
    covariance = back @ inverse @ back.T * scale * unit**2
    beta = back @ beta * unit
    beta[:first] += middle
    return GlmFit(labels, beta, np.sqrt(covariance.diagonal()), count, ridge, degrees)


def _likelihood_of(sites: Sequence[GlmSite], family: str) -> LikelihoodFunction:
    def evaluate(beta: Floats) -> Likelihood:
        values, gradients, informations = zip(*(glm_sums(site, beta, family) for site in sites), strict=True)
        return Likelihood(sum(values), np.sum(gradients, 0), np.sum(informations, 0))

    return evaluate


def _find_separation(sites: Sequence[GlmSite], family: str, intercepts: int) -> Floats | None:
    """Return a direction along which the likelihood has no maximum, or None if there is no such direction.

    See `fedloom_clinic.fits.separation`.

    In a logistic regression, this is a direction b such that x b is not negative in any row with target 1 and not
    positive in any row with target 0. In a Poisson regression, this is a direction b such that x b is 0 in every row
    with a positive count and not positive in any other row.
    """
    x, y = (np.concatenate(part) for part in zip(*sites, strict=True))
    if family == "logistic":
        return find_separating_direction(np.where(y == 1, 1.0, -1.0)[:, None] * x, x[:0], intercepts)
    if family == "poisson":
        return find_separating_direction(-x[y == 0], x[y > 0], intercepts)
    return None


def _sum_moments(parts: Sequence[Floats]) -> tuple[Floats, Floats]:
    count = sum(len(part) for part in parts)
    centre = np.sum([part.sum(0) for part in parts], 0) / count
    spread = np.sqrt(np.sum([((part - centre) ** 2).sum(0) for part in parts], 0) / count)
    return centre, spread


def _check_sites(sites: Sequence[GlmSite], family: str) -> None:
    y = np.concatenate([site.y for site in sites])
    if not np.isfinite(y).all():
        raise DataError("targets are missing or infinite in some rows. Repair them, or omit these rows")
    if family == "logistic" and not np.isin(y, (0, 1)).all():
        raise DataError(f"targets must be 0 or 1, got {np.unique(y)[:5].tolist()}")
    if family == "poisson" and (y < 0).any():
        raise DataError(f"counts must be at least 0, got {y.min():g}")
    if (y == y[0]).all():
        raise DataError(f"the target is {y[0]:g} in every row, so nothing can be fitted")


def _check_intercepts(sites: Sequence[GlmSite], family: str, by_site: Sequence[str] | None) -> None:
    """Raise an error if an intercept has no finite value.

    An unpenalized intercept has no finite value if either all rows or no rows of its site have the outcome.
    """
    for name, site in zip(by_site or (), sites, strict=False):
        ends = {"logistic": (0.0, 1.0), "poisson": (0.0,)}.get(family, ())
        if any((site.y == end).all() for end in ends):
            raise DataError(
                f"site {name}: the target is {site.y[0]:g} in every row, so its intercept has no "
                "finite value. Use one intercept for all sites, or omit the site"
            )
