"""Linear, logistic and Poisson regression over sites by sums: the pooled fit with its intervals.

References: P. McCullagh and J. A. Nelder, "Generalized Linear Models", 2nd ed., Chapter 2 (canonical links, for which
Newton's method is Fisher scoring); sums over sites as in Y. Wu et al., "GLORE", JAMIA 2012.

    paper    here     meaning
    beta     beta     coefficients, intercepts first
    mu       mean     expected target
    phi      scale    variance of a linear regression's residuals; 1 of the others
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from fedloom.errors import DataError
from fedloom.hints import unknown
from fedloom.tasks.cox import Floats, Likelihood, Wald, check_varying, newton
from fedloom.tasks.separation import separating

Link = Callable[[Floats], Floats]
FAMILIES: dict[str, tuple[Link, Link, Link]] = {
    "linear": (lambda eta: eta**2 / 2, lambda eta: eta, np.ones_like),
    "logistic": (lambda eta: np.logaddexp(0, eta), expit, lambda eta: expit(eta) * expit(-eta)),
    "poisson": (np.exp, np.exp, np.exp),
}
"""Cumulant, mean and variance by the linear predictor eta."""


class GlmSite(NamedTuple):
    """The rows of one site: columns ``x [N, p]`` and targets ``y [N]``."""

    x: Floats
    y: Floats


@dataclass(frozen=True)
class GlmFit(Wald):
    """Coefficients of the columns as they are measured.

    Attributes:
        names: of the coefficients, ``[q]``: an intercept (with `by_site` one per site), then the columns.
        beta: ``[q]``.
        se: ``[q]`` their standard errors.
        rows: number of rows.
    """

    names: list[str]
    beta: Floats
    se: Floats
    rows: int


def glm_sums(site: GlmSite, beta: Floats, family: str) -> Likelihood:
    """What a site sends in a step: its log-likelihood but for a constant, the gradient and the information."""
    cumulant, mean, variance = FAMILIES[family]
    eta = site.x @ beta
    value = float((site.y * eta - cumulant(eta)).sum())
    return Likelihood(value, site.x.T @ (site.y - mean(eta)), (site.x * variance(eta)[:, None]).T @ site.x)


def fit_glm(
    sites: Sequence[GlmSite], family: str, names: Sequence[str] = (), by_site: Sequence[str] | None = None
) -> GlmFit:
    """The regression of all sites' rows together, from sums that sites send; it equals the pooled fit.

    Every site sends first counts and sums of columns, targets and their squares, which centre and scale all sites'
    alike, then in every Newton step its `glm_sums`.

    Args:
        sites: their rows.
        family: one of `FAMILIES`; targets of logistic are 0 and 1, of poisson at least 0.
        names: of the columns.
        by_site: names of the sites, each of which then has an intercept of its own.

    Raises:
        ConfigError: an unknown family.
        DataError: targets that do not fit it or do not vary, columns that do not vary or depend on each other, or no
            finite fit.
    """
    if family not in FAMILIES:
        raise unknown("regression", family, FAMILIES)
    names = list(names) or [f"column {k}" for k in range(sites[0].x.shape[1])]
    count = sum(len(site.y) for site in sites)
    centre, spread = _moments([site.x for site in sites])
    check_varying([site.x for site in sites], names)
    _check(sites, family)
    middle, unit = (float(m[0]) for m in _moments([site.y[:, None] for site in sites]))
    middle, unit = (middle, unit) if family == "linear" else (0.0, 1.0)
    labels = [f"intercept {name}" for name in by_site] if by_site is not None else ["intercept"]
    first = len(labels)
    scaled = []
    for place, site in enumerate(sites):
        ones = np.zeros((len(site.y), first))
        ones[:, place if by_site is not None else 0] = 1
        scaled.append(GlmSite(np.hstack([ones, (site.x - centre) / spread]), (site.y - middle) / unit))

    def at(beta: Floats) -> Likelihood:
        values, gradients, informations = zip(*(glm_sums(site, beta, family) for site in scaled), strict=True)
        return Likelihood(sum(values), np.sum(gradients, 0), np.sum(informations, 0))

    beta, here = newton(at, [*labels, *names], lambda: _separation(scaled, family, first), intercepts=first)
    scale = 1.0
    if family == "linear":
        squares = sum(
            float(site.y @ site.y) for site in scaled
        )  # residuals: y'y - 2 (value), as value is y'eta - eta^2/2
        if count <= len(beta):
            raise DataError(f"{count} rows for {len(beta)} coefficients leave no residual; leave columns out")
        scale = (squares - 2 * here.value) / (count - len(beta))
    back = np.eye(len(beta))  # coefficients as they are measured are linear in these
    back[first:, first:] = np.diag(1 / spread)
    back[:first, first:] = -(centre / spread)
    covariance = back @ np.linalg.inv(here.information) @ back.T * scale * unit**2
    beta = back @ beta * unit
    beta[:first] += middle
    return GlmFit([*labels, *names], beta, np.sqrt(covariance.diagonal()), count)


def _separation(sites: Sequence[GlmSite], family: str, intercepts: int) -> Floats | None:
    """A direction in which the likelihood has no maximum; see `fedloom.tasks.separation`.

    It is one of a logistic regression if no row with 1 has a negative x b and no row with 0 a positive one; of a
    Poisson regression if x b is 0 in every row with a count and not above 0 in any other.
    """
    x, y = (np.concatenate(part) for part in zip(*sites, strict=True))
    if family == "logistic":
        return separating(np.where(y == 1, 1.0, -1.0)[:, None] * x, x[:0], intercepts)
    if family == "poisson":
        return separating(-x[y == 0], x[y > 0], intercepts)
    return None


def _moments(parts: Sequence[Floats]) -> tuple[Floats, Floats]:
    count = sum(len(part) for part in parts)
    centre = np.sum([part.sum(0) for part in parts], 0) / count
    spread = np.sqrt(np.sum([((part - centre) ** 2).sum(0) for part in parts], 0) / count)
    return centre, spread


def _check(sites: Sequence[GlmSite], family: str) -> None:
    y = np.concatenate([site.y for site in sites])
    if family == "logistic" and not np.isin(y, (0, 1)).all():
        raise DataError(f"targets must be 0 or 1, got {np.unique(y)[:5].tolist()}")
    if family == "poisson" and (y < 0).any():
        raise DataError(f"counts must be at least 0, got {y.min():g}")
    if (y == y[0]).all():
        raise DataError(f"the target is {y[0]:g} in every row; nothing can be fitted")
