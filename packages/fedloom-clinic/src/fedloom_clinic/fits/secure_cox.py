"""Cox regression from secure sums of integers, so that masks cancel exactly, with agreed time bins and minimum counts.

Each site rounds its sums to multiples of a step and sends them as numbers modulo 2^64, so the secure sum is exact.
The server never receives the sums of individual sites. Columns are scaled to [-1, 1] by agreed ranges, so no statistics
of a site are needed for scaling, and all weights are at most 1. A stratified fit needs no bins. Each site sends the
likelihood for its own baseline hazard, with its gradient and information.

References: sums over sites as in C.-L. Lu et al., "WebDISCO", JAMIA 2015. Masks modulo a power of two are used as in K.
Bonawitz et al., CCS 2017. The error bound uses the pseudo self-concordance of exponential weights, F. Bach, Electron.
J. Stat. 2010, Proposition 1.

    Bach    here      meaning
    R       reach     largest distance of two rows
    lambda  least     smallest eigenvalue of the information
    nu      gradient  length of the gradient
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedloom.errors import ConfigError, DataError, Refused
from fedloom_clinic.fits.cox import CoxFit, NotConvergedError, RiskSums, SurvivalSite, event_gains, maximize_likelihood
from fedloom_clinic.fits.cox_vectors import BinningLoss, CoxAgreement, OpenedCoxSums, Ring, SiteVectors, open_sum
from fedloom_clinic.fits.penalty import (
    Floats,
    FoldSums,
    Likelihood,
    PenaltyKind,
    Ridge,
    add_firth_penalty,
    add_ridge_penalty,
    find_ridge_by_sums,
    impossible_likelihood,
    tilt_error,
)
from fedloom_clinic.fits.separation import MIN_SUPPORT_SHARE, no_finite_fit_error

SecureSum = Callable[[Sequence[Ring]], Ring]
"""Function that receives one vector per site and returns the sum of the vectors modulo 2^64, so that masks cancel."""


MAX_LOSS_SHARE = 0.3
"""Maximum share of negative gains among all gains for rows to count as separated. At the fit of rows that are not
separated, this share is 0.5."""
MIN_SPREAD = 0.05
"""Standard deviation of a column, divided by half of its agreed range, below which the range counts as too wide."""
ROUNDED_AWAY_REASON = "until the step of the sums rounds the rows at risk away"
"""Last part of a message about separation that was detected from sums alone."""


class SecureCoxFit(NamedTuple):
    """Fit of a Cox regression, a bound on its distance from the exact fit of the same binned rows, and its losses.

    Attributes:
        fit: coefficients and standard errors for the original (unscaled) columns.
        bound: largest distance, due to rounding and to stopping, between a coefficient and the coefficient of the fit
            to the pooled binned rows, ``[p]``.
        losses: losses of all sites together (see `BinningLoss`).
    """

    fit: CoxFit
    bound: Floats
    losses: BinningLoss


def ring_sum(vectors: Sequence[Ring]) -> Ring:
    """Return the sum of vectors modulo 2^64, as secure aggregation does."""
    total: Ring = np.sum(np.stack(vectors), 0, dtype=np.uint64)
    return total


def fit_secure_cox(
    sites: Sequence[SurvivalSite], terms: CoxAgreement, names: Sequence[str] = (), total: SecureSum = ring_sum
) -> SecureCoxFit:
    """Return the Cox regression of the binned rows of all sites, fitted from secure sums.

    Either all sites share one baseline hazard, or each site has its own.

    Args:
        sites: rows of every site.
        terms: agreed terms.
        names: names of the columns for messages.
        total: function that computes the secure sum.

    Raises:
        ConfigError: the ends of the bins are not ascending, or a range is empty.
        DataError: values are outside the agreed ranges, no event may be sent, or no finite fit exists.
    """
    names = list(names) or [f"column {k}" for k in range(len(terms.low))]
    for place, site in enumerate(sites):
        beyond = ((site.x < terms.low) | (site.x > terms.high)).sum(0)
        if beyond.any():
            k = int(beyond.argmax())
            raise DataError(
                f"site {place}: {names[k]} has {beyond[k]} values outside the agreed range from {terms.low[k]:g} to "
                f"{terms.high[k]:g}. Repair these values, or agree on a different range"
            )
    check_terms(terms)
    vectors = [SiteVectors(site, terms) for site in sites]
    return fit_from_sums(
        lambda beta, metric: total([site.encode(beta, metric) for site in vectors]), terms, names, len(sites)
    )


def check_terms(terms: CoxAgreement) -> None:
    """Raise an error if the ends of the bins are not ascending, or if a range is empty.

    Raises:
        ConfigError: the ends of the bins are not ascending, or a range is empty.
    """
    if not terms.stratify and (not len(terms.ends) or not (np.diff(terms.ends) > 0).all()):
        raise ConfigError("the ends of the time bins must be in increasing order")
    if not (terms.high > terms.low).all():
        raise ConfigError("the lower end of every agreed range must be below its upper end")


def fit_from_sums(
    total: Callable[[Floats, Floats | None], Ring | None],
    terms: CoxAgreement,
    names: Sequence[str],
    sites: int,
    paths: Callable[[Floats], FoldSums | None] | None = None,
) -> SecureCoxFit:
    """Return the Cox regression that is fitted from the sums of the sites' vectors. Each sum is requested only once.

    Args:
        total: function that takes the coefficients ``[p]`` (for columns scaled to [-1, 1]) and a metric for Firth's
            penalty. The function returns the sum of the vectors, or None if sites cannot answer, which must not happen
            if all coefficients are 0. If the result is None, Newton's step is halved.
        terms: agreed terms.
        names: names of the columns for messages.
        sites: number of sites in a sum.
        paths: function that returns the sums of a cross-validation for the coefficients of all its fits, ``[K, p]``. If
            None, the ridge strength in the terms is used.

    Raises:
        DataError: no event may be sent, no finite fit exists, or the steps do not converge.
        ConfigError: no rows can produce one of the sums.
    """
    zero = np.zeros(len(names))
    none = np.zeros((len(names), len(names))) if terms.firth else None
    start = total(zero, none)
    assert start is not None
    last, here, rounded_away = zero, open_sum(start, terms, zero, sites, none), False
    first = here
    losses, events = here.losses, first.losses.events - first.losses.uncovered - first.losses.rare
    if not events:
        outside = f"; {losses.uncovered} of {losses.events} events are after the last bin" if losses.uncovered else ""
        what, wider = ("site has", "") if terms.stratify else ("bin of a site has", "wider bins or on ")
        raise DataError(f"no {what} {terms.least} events{outside}. Agree on {wider}a smaller min_events")
    spread = np.sqrt(np.maximum(first.likelihood.information.diagonal(), 0) / events)  # per column
    if not (spread > sites * terms.step).all():
        raise DataError(f"{names[int(spread.argmin())]} has the same value in every row at risk. Omit this column")

    def evaluate(gamma: Floats) -> Likelihood:
        """Return the likelihood at the coefficients of columns with unit spread."""
        nonlocal last, here, rounded_away
        beta = gamma / spread
        if not np.array_equal(beta, last):
            vectors = total(beta, none)
            if vectors is None:
                return impossible_likelihood(len(beta))
            opened = open_sum(vectors, terms, beta, sites, none)
            if opened.losses != losses or opened.rows != first.rows:
                raise Refused(
                    "the rows of a site have changed between two steps of the Cox regression. Start the "
                    "regression again"
                )
            if opened.likelihood.value == -np.inf:
                rounded_away = True
                return opened.likelihood
            last, here = beta, opened
        value, gradient, information = here.likelihood
        return Likelihood(value, gradient / spread, information / np.outer(spread, spread))

    def slope(gamma: Floats, inverse: Floats) -> Floats | None:
        metric = inverse / np.outer(spread, spread)
        vectors = total(gamma / spread, metric)
        if vectors is None:
            return None
        tilt = open_sum(vectors, terms, gamma / spread, sites, metric).slope
        assert tilt is not None
        return tilt / spread

    def unit_paths(gammas: Floats) -> FoldSums | None:
        assert paths is not None
        sums = paths(gammas / spread)
        if sums is None:
            return None
        units = np.outer(spread, spread)
        return sums._replace(gradients=sums.gradients / spread, informations=sums.informations / units)

    error = sites * terms.step / 2
    squares = np.zeros(len(names)) if first.squares is None else first.squares
    ridge = None if terms.ridge is None else Ridge(terms.ridge)
    if paths is not None:
        ridge, gamma, _, plain = find_ridge_by_sums(unit_paths, squares / first.rows / spread**2)
        units = np.outer(spread, spread)
        here = here._replace(likelihood=Likelihood(plain.value, plain.gradient * spread, plain.information * units))
        weights = ridge.strength * squares
    else:
        weights = (terms.ridge or 0.0) * squares
        penalized = evaluate if ridge is None else add_ridge_penalty(evaluate, weights / spread**2)
        penalized = add_firth_penalty(evaluate, slope) if terms.firth else penalized
        penalty: PenaltyKind = "firth" if terms.firth else "none" if ridge is None else "ridge"
        try:
            gamma, tilted = maximize_likelihood(penalized, names, penalty=penalty)
        except DataError as stalled:
            coarse = rounded_away or isinstance(stalled, NotConvergedError)
            if penalty != "none" or here.sums is None or not coarse:
                raise
            raise _explain_coarse_sums(here.sums, terms.ties, error, last, spread, names) from None
    beta, information = gamma / spread, here.likelihood.information + np.diag(weights)
    if terms.firth:  # the gradient includes the penalty
        units = np.outer(spread, spread)
        score = Likelihood(tilted.value, tilted.gradient * spread, tilted.information * units)
        slack = (np.full(len(beta), error), len(beta) * error)
        if here.sums is not None:
            slack = _rounding_error_bounds(here.sums, error, efron=terms.ties == "efron")
        bound = tilt_error(score, *slack, np.full(len(beta), 2.0))
    else:
        bound = _coefficient_error_bound(here, error, terms._replace(ridge=ridge and ridge.strength), beta, weights)
    if rounded_away and here.sums is not None and not np.isfinite(bound).all():
        raise _explain_coarse_sums(here.sums, terms.ties, error, last, spread, names)
    half, se = (terms.high - terms.low) / 2, np.sqrt(np.linalg.inv(information).diagonal())
    fit = CoxFit(beta / half, se / half, here.likelihood.value, events, here.rows, ridge)
    return SecureCoxFit(fit, bound / half, losses)


def _explain_coarse_sums(
    sums: RiskSums, ties: str, error: float, beta: Floats, spread: Floats, names: Sequence[str]
) -> DataError:
    """Return the error for a fit whose steps leave the coefficients at which the sums have enough digits.

    Either the rows are separated, or nearly, in the direction of the coefficients ``beta [p]``, or the agreed ranges
    are far wider than the columns. If rows are separated, no event time has a negative gain. Bins make a few gains
    negative, because they contain several event times.
    """
    size = np.abs(beta * spread)
    named = size > MIN_SUPPORT_SHARE * size.max()
    direction = np.where(named, beta, 0.0)
    gains = event_gains(sums, ties, error) @ direction
    wide = bool((spread[named] < MIN_SPREAD).any())
    if not wide and -np.minimum(gains, 0).sum() <= MAX_LOSS_SHARE * np.abs(gains).sum() > 0:
        return no_finite_fit_error(direction * spread, names, limit=ROUNDED_AWAY_REASON)
    return DataError(
        "the sums of the Cox regression have too few digits for these coefficients: the agreed ranges of "
        f"{', '.join(names)} are much wider than most values, or a column nearly separates the rows. Agree on narrower "
        "ranges, or choose the penalty 'ridge'"
    )


def _coefficient_error_bound(
    here: OpenedCoxSums, error: float, terms: CoxAgreement, beta: Floats, weights: Floats
) -> float:
    """Return a bound on the distance between the coefficients and the fit that exact sums would give.

    Each sum is assumed to differ from the exact sum by at most `error`.

    Let g be the gradient and I the information at the fit, both computed from exact sums. If rows are in [-1, 1]^p, two
    of them are at most R = 2 sqrt(p) apart. The distance of the exact fit is then at most -log(1 - R |g| / lambda) / R,
    where lambda is the smallest eigenvalue of I. A ridge with ``weights [p]`` at coefficients ``beta [p]`` contributes
    to g and I, and its third derivative is 0.
    """
    value, information = here.likelihood.gradient - weights * beta, here.likelihood.information + np.diag(weights)
    columns = len(value)
    if here.sums is None:
        slack, matrix = np.full(columns, error), columns * error
    else:
        slack, matrix = _rounding_error_bounds(here.sums, error, efron=terms.ties == "efron")
    if terms.ridge is not None:  # its weights come from rounded sums
        slack, matrix = slack + 4 * terms.ridge * error * np.abs(beta), matrix + 4 * terms.ridge * error
    least = float(np.linalg.eigvalsh(information)[0]) - matrix
    gradient, reach = float(np.linalg.norm(np.abs(value) + slack)), 2 * np.sqrt(columns)
    if least <= 0 or reach * gradient >= least:
        return float("inf")
    return float(-np.log1p(-reach * gradient / least) / reach)


def _rounding_error_bounds(sums: RiskSums, error: float, *, efron: bool) -> tuple[Floats, float]:
    """Return bounds on the errors that rounded sums cause in the gradient ``[p]`` and in the information."""
    columns = sums.total.shape[1]
    slack, matrix = np.full(columns, len(sums.deaths) * error), 0.0
    for k in range(int(sums.deaths.max(initial=0))):
        some = sums.deaths > k
        share = k / sums.deaths[some] if efron else np.zeros(int(some.sum()))
        size = sums.risk[0][some] - share * sums.tied[0][some]
        wrong = (1 + share) * error
        if (size <= 2 * wrong).any():
            return slack, float("inf")
        relative = wrong / (size - wrong)  # error of S1 / S0, whose entries are at most 1
        slack += 2 * relative.sum()
        matrix += columns * float((2 * relative + 4 * relative + 4 * relative**2).sum())
    return slack, matrix
