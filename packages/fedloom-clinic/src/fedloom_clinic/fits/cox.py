"""Cox regression computed from sums over sites.

The fit is equivalent to the fit to the pooled rows, but patients' rows stay at their sites.

References: D. R. Cox, "Regression models and life-tables", JRSS B 1972. Ties by N. Breslow, Biometrics 1974, and B.
Efron, JASA 1977. The sums over sites are computed as in C.-L. Lu et al., "WebDISCO", JAMIA 2015.

    paper     here     meaning
    beta      beta     coefficients
    R(t)      at risk  rows whose time is at least t
    d         deaths   events at a time
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from fedloom.errors import DataError
from fedloom.hints import unknown_name_error
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
from fedloom_clinic.fits.separation import (
    MAX_CONDITION_NUMBER,
    MIN_SUPPORT_SHARE,
    ROUNDING_CONFLICT_REASON,
    check_columns,
    find_recession_direction,
    find_separating_direction,
    is_suspect,
    no_finite_fit_error,
)

TIES_METHODS = ("efron", "breslow")
MIN_NEWTON_DECREMENT, MIN_FIRTH_DECREMENT = 1e-12, 1e-18
"""Newton decrement below which a step is the last one. The steps with Firth's penalty converge only linearly, so the
limit on the last step's decrement is smaller."""
MIN_COLUMN_WIDTH = 1e-140
"""Minimum span of a column, and the inverse of its maximum span. Within these limits, the squares of the numbers,
summed over 1e9 rows, neither vanish nor overflow in double precision."""
MAX_STALLED_DECREMENT = 1e-9
"""The fit ends if a step does not increase the likelihood and the Newton decrement, relative to the likelihood, is
below this limit. Rounding errors in the sums then hide the gain, so more steps would not help."""
MAX_NEWTON_STEPS, MAX_HALVINGS = 50, 30
RATIO_ERRORS = 4
"""Error of a mean over the rows at risk, in errors of a sum divided by their weight: with ties, both sums of the ratio
are differences of two sums."""
MAX_GAIN_ERROR = 1e-3
"""Error of the mean at an event time, relative to the agreed range of a column, above which the time is left out."""


class SurvivalSite(NamedTuple):
    """Rows of one site: columns ``x [N, p]``, ``time [N]`` of at least 0, and ``event [N]``, 0 for a censored time."""

    x: Floats
    time: Floats
    event: Floats


class RiskSums(NamedTuple):
    """Sums that a site sends in one step, for J event times, over the rows at risk and over the rows with the event.

    Attributes:
        risk: sums of w, w x and w x x' over the rows at risk, ``[J]``, ``[J, p]`` and ``[J, p, p]``, where w = exp(x
            beta). If a metric V is given, also the sums of w q and w q x, ``[J]`` and ``[J, p]``, where q = x' V x.
        tied: the same sums over the rows with an event at each time.
        deaths: number of events at each time, ``[J]``.
        total: sum of x over the rows with an event at each time, ``[J, p]``.
    """

    risk: tuple[Floats, ...]
    tied: tuple[Floats, ...]
    deaths: Floats
    total: Floats

    def __add__(self, other: object) -> RiskSums:
        assert isinstance(other, RiskSums)
        risk, tied = (
            tuple(one + two for one, two in zip(left, right, strict=True))
            for left, right in ((self.risk, other.risk), (self.tied, other.tied))
        )
        return RiskSums(risk, tied, self.deaths + other.deaths, self.total + other.total)


class NotConvergedError(DataError):
    """Error: the steps of a fit ended without a maximum, and no separation of the rows was found."""


class Wald:
    """Confidence intervals and tests of coefficients, computed from their standard errors."""

    beta: Floats
    se: Floats

    @property
    def degrees(self) -> float:
        """Degrees of freedom of the t distribution that the tests use. Infinite for the normal distribution."""
        return math.inf

    def interval(self, level: float = 0.95) -> tuple[Floats, Floats]:
        """Return the lower and upper ends of the Wald interval of each coefficient."""
        from scipy.special import stdtrit  # slow to import

        reach = stdtrit(self.degrees, 0.5 + level / 2) * self.se
        return self.beta - reach, self.beta + reach

    @property
    def p_values(self) -> Floats:
        """P values of two-sided Wald tests of beta = 0, ``[p]``."""
        from scipy.special import stdtr

        values: Floats = 2 * stdtr(self.degrees, -np.abs(self.beta / self.se))
        return values


@dataclass(frozen=True)
class CoxFit(Wald):
    """Fit of a Cox regression, with coefficients for the original (unscaled) columns.

    Attributes:
        beta: log hazard ratios per unit, ``[p]``.
        se: standard errors of beta, ``[p]``.
        likelihood: log partial likelihood at beta.
        events: number of events.
        row_count: number of rows.
        ridge: ridge penalty, or None if the fit has no penalty. With a ridge, standard errors are computed from the
            penalized information.
    """

    beta: Floats
    se: Floats
    likelihood: float
    events: int
    row_count: int
    ridge: Ridge | None = None


def risk_sums(
    site: SurvivalSite, beta: Floats, times: Floats, shift: float = 0.0, metric: Floats | None = None
) -> RiskSums:
    """Return the sums that a site sends in a step.

    Args:
        site: the site's rows, whose columns are centered and scaled in the same way at all sites.
        beta: coefficients, ``[p]``.
        times: event times in ascending order, ``[J]``.
        shift: number subtracted from x beta in each row. This shift leaves the ratios of sums unchanged.
        metric: matrix V ``[p, p]`` for the sums that Firth's penalty needs. If None, the sums for the metric are
            omitted.
    """
    weight = np.exp(site.x @ beta - shift)
    products = site.x[:, :, None] * site.x[:, None, :]
    summed = [weight, weight[:, None] * site.x, weight[:, None, None] * products]
    if metric is not None:
        lengths = weight * ((site.x @ metric) * site.x).sum(1)
        summed += [lengths, lengths[:, None] * site.x]
    last = np.searchsorted(times, site.time, side="right")  # a row is at risk at the first `last` times
    here = (site.event == 1) & (last > 0)
    place = last[here] - 1
    risk, tied = [], []
    for values in summed:
        ends = np.zeros((len(times) + 1, *values.shape[1:]))
        np.add.at(ends, last, values)
        risk.append(ends[::-1].cumsum(0)[::-1][1:])
        sums = np.zeros((len(times), *values.shape[1:]))
        np.add.at(sums, place, values[here])
        tied.append(sums)
    total = np.zeros((len(times), site.x.shape[1]))
    np.add.at(total, place, site.x[here])
    deaths = np.bincount(place, minlength=len(times)).astype(float)
    return RiskSums(tuple(risk), tuple(tied), deaths, total)


def likelihood(sums: RiskSums, beta: Floats, ties: str) -> Likelihood:
    """Return the partial likelihood of the rows covered by the sums."""
    value, gradient = float((sums.total @ beta).sum()), sums.total.sum(0)
    information = np.zeros((len(beta), len(beta)))
    for zero, one, two in _iterate_event_sums(sums, ties):
        value -= float(np.log(zero).sum())
        gradient = gradient - one.sum(0)
        information += (two - one[:, :, None] * one[:, None, :]).sum(0)
    return Likelihood(value, gradient, information)


def _iterate_event_sums(sums: RiskSums, ties: str) -> Iterator[tuple[Floats, ...]]:
    """Yield the sum of the weights at risk, and then the weighted means of the other quantities.

    Values are yielded for the first event at every time, then for the second event at every time, and so on.
    """
    for k in range(int(sums.deaths.max(initial=0))):
        some = sums.deaths > k
        share = k / sums.deaths[some] if ties == "efron" else np.zeros(int(some.sum()))
        zero, *further = (
            risk[some] - share.reshape(-1, *[1] * (risk.ndim - 1)) * tied[some]
            for risk, tied in zip(sums.risk, sums.tied, strict=True)
        )
        yield zero, *(other / zero.reshape(-1, *[1] * (other.ndim - 1)) for other in further)


def event_gains(sums: RiskSums, ties: str, error: float) -> Floats:
    """Return the gradient at each event time, ``[K, p]``, in which entries below the error of rounded sums are 0.

    If the rows are separated in a direction, the rows with an event have the largest x b among the rows at risk. The
    gain at every event time is then at least 0 in this direction, at any coefficients.

    Args:
        sums: sums of all rows.
        ties: method for tied event times.
        error: largest error of a sum. Event times at which the rows at risk have little more weight are left out.
    """
    gains, noise = sums.total.copy(), np.zeros(len(sums.deaths))
    for k, (zero, one, *_) in enumerate(_iterate_event_sums(sums, ties)):
        some = sums.deaths > k
        gains[some] -= one
        noise[some] += RATIO_ERRORS * error / zero
    kept = (sums.deaths > 0) & (noise < MAX_GAIN_ERROR * sums.deaths)
    return np.where(np.abs(gains) <= noise[:, None], 0.0, gains)[kept]


def firth_slope(sums: RiskSums, ties: str, metric: Floats) -> Floats:
    """Return the vector ``[p]`` of tr(V dI / d beta_r), computed from the sums for the metric V.

    At an event, the derivative of the information is the third central moment of x over the rows at risk, contracted
    with V. With q = x' V x, the mean m of x and its covariance Cov, this is E (x - m)' V (x - m) (x - m) = E[q x] -
    E[q] m - 2 Cov V m.
    """
    slope: Floats = np.zeros(len(metric))
    for _, one, two, length, product in _iterate_event_sums(sums, ties):
        spread = two - one[:, :, None] * one[:, None, :]
        turned = np.einsum("jab,jb->ja", spread, one @ metric)
        slope = slope + (product - length[:, None] * one - 2 * turned).sum(0)
    return slope


def fit_cox(
    sites: Sequence[SurvivalSite],
    ties: str = "efron",
    *,
    stratify: bool = False,
    names: Sequence[str] = (),
    penalty: PenaltyKind = "none",
    strength: float | Literal["cv"] | None = None,
) -> CoxFit:
    """Return the Cox regression over the rows of all sites, fitted from sums that the sites send.

    Each site first sends counts, the sums of its columns and of their squares, and its event times. With these sums,
    the columns are centered and scaled in the same way at all sites. In each Newton step, a site then sends the sums
    that `risk_sums` returns. With `stratify`, each site has its own baseline hazard, and sends only the gradient and
    the information of its own likelihood. The result equals the pooled fit or the stratified pooled fit.

    Args:
        sites: rows of every site.
        ties: method for tied event times.
        stratify: True to give every site its own baseline hazard.
        names: names of the columns for messages.
        penalty: "ridge" or "firth". The module `fedloom_clinic.fits.penalty` defines how the penalties are scaled.
        strength: strength of a ridge, above 0. If "cv" or None, the strength with the largest cross-validated
            likelihood is used.

    Raises:
        ConfigError: the method for ties or the penalty is unknown.
        DataError: times are below 0, no row has an event, a column does not vary, or no finite fit exists.
    """
    if ties not in TIES_METHODS:
        raise unknown_name_error("treatment of ties", ties, TIES_METHODS)
    check_penalty(penalty, strength)
    names = names or [f"column {k}" for k in range(sites[0].x.shape[1])]
    _check_sites(sites)
    count = sum(len(site.x) for site in sites)
    check_varying([site.x for site in sites], names)
    centre = sum((site.x.sum(0) for site in sites), np.zeros(len(names))) / count
    spread = np.sqrt(sum(((site.x - centre) ** 2).sum(0) for site in sites) / count)
    scaled = [site._replace(x=(site.x - centre) / spread) for site in sites]
    ridge, weights, sizes = None, np.ones(len(names)), [len(site.x) for site in scaled]

    def part(rows: Sequence[Mask]) -> LikelihoodFunction:
        return _sum_likelihoods(scaled, rows, ties, stratify=stratify)

    at = penalized = part([np.ones(size, bool) for size in sizes])
    if penalty == "ridge":
        ridge = find_ridge(
            strength,
            part,
            sizes,
            weights,
            lambda at, start: maximize_likelihood(at, names, penalty="ridge", start=start)[0],
        )
        penalized = add_ridge_penalty(at, count * ridge.strength * weights)
    elif penalty == "firth":
        penalized = add_firth_penalty(at, lambda beta, metric: _penalty_gradient(scaled, ties, stratify, beta, metric))
    beta, here = maximize_likelihood(
        penalized,
        names,
        lambda: find_separating_direction(*_row_differences(scaled, stratify=stratify)),
        penalty=penalty,
    )
    se = np.sqrt(np.linalg.inv(here.information).diagonal())
    events = int(sum(site.event.sum() for site in sites))
    return CoxFit(beta / spread, se / spread, at(beta).value, events, count, ridge)


def _iterate_strata(sites: Sequence[SurvivalSite], *, stratify: bool) -> Iterator[tuple[list[SurvivalSite], Floats]]:
    """Yield each group of sites with a common baseline hazard, together with the event times of the group."""
    for group in [[site] for site in sites] if stratify else [list(sites)]:
        yield group, np.unique(np.concatenate([site.time[site.event == 1] for site in group]))


def _sum_likelihoods(
    sites: Sequence[SurvivalSite], rows: Sequence[Mask], ties: str, *, stratify: bool
) -> LikelihoodFunction:
    """Return the likelihood of some rows of each site."""
    chosen = [SurvivalSite(*(part[some] for part in site)) for site, some in zip(sites, rows, strict=True)]
    strata = list(_iterate_strata(chosen, stratify=stratify))

    def evaluate(beta: Floats) -> Likelihood:
        parts = []
        for group, times in strata:
            first_sums, *other_sums = (risk_sums(site, beta, times) for site in group)
            parts.append(likelihood(sum(other_sums, first_sums), beta, ties))
        values, gradients, informations = zip(*parts, strict=True)
        return Likelihood(sum(values), np.sum(gradients, 0), np.sum(informations, 0))

    return evaluate


def _penalty_gradient(sites: Sequence[SurvivalSite], ties: str, stratify: bool, beta: Floats, metric: Floats) -> Floats:
    """Return the gradient of Firth's penalty over the rows of all sites."""
    total: Floats = np.zeros(len(beta))
    for group, times in _iterate_strata(sites, stratify=stratify):
        first_sums, *other_sums = (risk_sums(site, beta, times, metric=metric) for site in group)
        total = total + firth_slope(sum(other_sums, first_sums), ties, metric)
    return total


def maximize_likelihood(
    at: LikelihoodFunction,
    names: Sequence[str],
    separation: Callable[[], Floats | None] | None = None,
    *,
    intercepts: int = 0,
    penalty: PenaltyKind = "none",
    start: Floats | None = None,
) -> tuple[Floats, Likelihood]:
    """Return the coefficients ``[p]`` that maximize the likelihood, and the likelihood at these coefficients.

    All columns must have unit spread. To check for linearly dependent columns, all coefficients are set to 0, where
    every row has weight. Whether rows are separated is checked after the last step, because the information vanishes
    only then. This check uses the rows if they are available, and otherwise the sums.

    Args:
        at: function that returns the likelihood of all rows at the given coefficients.
        names: the columns' names.
        separation: function that searches the rows for a direction of separation. None if the rows are not available.
        intercepts: number of leading columns that are intercepts.
        penalty: penalty that the likelihood contains. If there is a ridge, columns may be linearly dependent. With
            either penalty, the rows may be separated.
        start: initial coefficients. If None, they start at 0.

    Raises:
        DataError: no finite fit exists, or columns are linearly dependent.
        NotConvergedError: the steps do not converge.
    """
    beta: Floats = np.zeros(len(names)) if start is None else start
    here = first = at(beta)
    if penalty != "ridge":
        check_columns(first.information, names)
    steps, rise, ended = (beta, beta), np.inf, False
    least = MIN_FIRTH_DECREMENT if penalty == "firth" else MIN_NEWTON_DECREMENT
    for _ in range(MAX_NEWTON_STEPS):
        if not np.isfinite(here.information).all() or np.linalg.cond(here.information) > MAX_CONDITION_NUMBER:
            break
        step: Floats = np.linalg.solve(here.information, here.gradient).astype(float)
        steps, rise = (steps[1], step), float(here.gradient @ step)
        if rise < least:
            ahead = at(beta + step)
            if ahead.value != -np.inf:  # otherwise, the fit ends before this step
                beta, here = beta + step, ahead
            ended = True
            break
        before, wanted = beta, beta + step
        beta, here = _halved_newton_step(at, beta, step, here)
        if rise < MAX_STALLED_DECREMENT * max(1.0, abs(here.value)) and not np.array_equal(beta, wanted):
            ended = True
            break
        if np.array_equal(beta, before):
            break  # no shorter step increases the likelihood, so additional steps would repeat this one
    if penalty == "none" and (not ended or is_suspect(first.information, here.information)):
        direction = separation() if separation else None
        if direction is not None:
            raise no_finite_fit_error(direction, names, intercepts, 0.0)
        # if no direction is found, extreme values may contradict the separation by less than the rounding error
        direction = find_recession_direction(first.information, here.information, steps, rise)
        if direction is not None:
            limit = {} if separation is None else {"limit": ROUNDING_CONFLICT_REASON}
            raise no_finite_fit_error(direction, names, intercepts, MIN_SUPPORT_SHARE, **limit)
    if not ended:
        raise NotConvergedError(
            f"the fit has not converged after {MAX_NEWTON_STEPS} steps. Check the columns {', '.join(names)}"
        )
    return beta, here


def _halved_newton_step(
    at: LikelihoodFunction, beta: Floats, step: Floats, here: Likelihood
) -> tuple[Floats, Likelihood]:
    """Return the coefficients after a Newton step, which is halved until the likelihood does not decrease."""
    for _ in range(MAX_HALVINGS):
        with np.errstate(all="ignore"):  # too long a step overflows
            ahead = at(beta + step)
        if ahead.value >= here.value - 1e-12 * abs(here.value):
            return beta + step, ahead
        step = step / 2
    return beta, here


def check_varying(parts: Sequence[Floats], names: Sequence[str]) -> None:
    """Raise an error if a column has the same value in every row.

    The values themselves are compared, because rounding may leave a spread.

    Raises:
        DataError: a column has the same value in every row, is not finite, or contains numbers too large or too small
            to be squared.
    """
    rows = np.concatenate(parts)
    if not np.isfinite(rows).all():
        broken = names[int((~np.isfinite(rows)).any(0).argmax())]
        raise DataError(f"{broken} contains missing or infinite values. Repair them, or omit these rows")
    same = (rows == rows[:1]).all(0)
    if same.any():
        raise DataError(f"{names[int(same.argmax())]} has the same value in every row. Omit this column")
    width = np.ptp(rows, 0)
    if not ((width > MIN_COLUMN_WIDTH) & (width < 1 / MIN_COLUMN_WIDTH)).all():
        odd = int((~((width > MIN_COLUMN_WIDTH) & (width < 1 / MIN_COLUMN_WIDTH))).argmax())
        raise DataError(
            f"{names[odd]} spans {width[odd]:.3g}, and double precision cannot represent the squares "
            "of such numbers accurately. Give it in a different unit"
        )


def _row_differences(sites: Sequence[SurvivalSite], *, stratify: bool) -> tuple[Floats, Floats]:
    """Return the differences between rows that determine whether the rows are separated.

    The partial likelihood has no maximum if, in some direction, the first differences are not negative and the second
    differences are 0.

    The likelihood increases without limit in a direction b if, at each event time, the rows with the event have the
    largest x b among all rows at risk. Rows that are at risk at a later time were also at risk earlier, so one row per
    event time is enough to represent them.
    """
    gains, equal = list[Floats](), list[Floats]()
    for group in [[site] for site in sites] if stratify else [sites]:
        x, time, event = (np.concatenate(part) for part in zip(*group, strict=True))
        times = np.unique(time[event == 1])
        if not len(times):
            continue
        last = np.searchsorted(times, time, side="right") - 1  # the last event time at which a row is at risk
        dead = event == 1
        lead = np.zeros(len(times), int)
        lead[last[dead]] = np.flatnonzero(dead)
        tied, alive = dead & (lead[last] != np.arange(len(x))), ~dead & (last >= 0)
        gains += [x[lead[last[alive]]] - x[alive], x[lead[:-1]] - x[lead[1:]]]
        equal.append(x[lead[last[tied]]] - x[tied])
    return np.concatenate(gains), np.concatenate(equal)


def _check_sites(sites: Sequence[SurvivalSite]) -> None:
    for k, site in enumerate(sites):
        wrong = ~((site.time >= 0) & np.isfinite(site.time))
        if wrong.any():
            raise DataError(f"site {k}: {int(wrong.sum())} times are negative or not finite. Repair these times")
        if not np.isin(site.event, (0, 1)).all():
            raise DataError(f"site {k}: events must be 0 or 1, got {np.unique(site.event)[:5].tolist()}")
    if not any(site.event.any() for site in sites):
        raise DataError("no row contains an event, so nothing can be fitted")
