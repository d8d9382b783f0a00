"""Cox regression over sites by sums: the pooled fit, and no row of a patient leaves a site.

References: D. R. Cox, "Regression models and life-tables", JRSS B 1972; ties by N. Breslow, Biometrics 1974, and
B. Efron, JASA 1977; sums over sites as in C.-L. Lu et al., "WebDISCO", JAMIA 2015.

    paper     here     meaning
    beta      beta     coefficients
    R(t)      at risk  rows whose time is at least t
    d         deaths   events at a time
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from fedloom.errors import DataError
from fedloom.hints import unknown
from fedloom.tasks.separation import SINGULAR, SUPPORT, check_columns, is_suspect, no_finite_fit, recession, separating

Floats = NDArray[np.float64]
TIES = ("efron", "breslow")
TOLERANCE = 1e-12
"""Newton decrement below which a step is the last."""
STEPS, HALVINGS = 50, 30


class SurvivalSite(NamedTuple):
    """The rows of one site: columns ``x [N, p]``, ``time [N]`` > 0, and ``event [N]``, 0 where the time is censored."""

    x: Floats
    time: Floats
    event: Floats


class RiskSums(NamedTuple):
    """What a site sends in a step, for J event times: sums over its rows at risk, and over those with the event.

    Attributes:
        risk: ``[J]``, ``[J, p]`` and ``[J, p, p]`` sums of w, w x and w x x' over rows at risk, w = exp(x beta).
        tied: the same over rows with the event at each time.
        deaths: ``[J]`` events.
        total: ``[J, p]`` sum of x over events.
    """

    risk: tuple[Floats, Floats, Floats]
    tied: tuple[Floats, Floats, Floats]
    deaths: Floats
    total: Floats

    def __add__(self, other: object) -> RiskSums:
        assert isinstance(other, RiskSums)
        risk, tied = (
            (left[0] + right[0], left[1] + right[1], left[2] + right[2])
            for left, right in ((self.risk, other.risk), (self.tied, other.tied))
        )
        return RiskSums(risk, tied, self.deaths + other.deaths, self.total + other.total)


class Likelihood(NamedTuple):
    """Log partial likelihood, its gradient ``[p]``, and the information ``[p, p]``."""

    value: float
    gradient: Floats
    information: Floats


class Wald:
    """Intervals and tests of coefficients from their standard errors."""

    beta: Floats
    se: Floats

    def interval(self, level: float = 0.95) -> tuple[Floats, Floats]:
        """Wald interval of every coefficient."""
        reach = norm.ppf(0.5 + level / 2) * self.se
        return self.beta - reach, self.beta + reach

    @property
    def p_values(self) -> Floats:
        """Two-sided Wald tests of beta = 0, ``[p]``."""
        values: Floats = 2 * norm.sf(np.abs(self.beta / self.se))
        return values


@dataclass(frozen=True)
class CoxFit(Wald):
    """Coefficients of the columns as they are measured.

    Attributes:
        beta: ``[p]`` log hazard ratios per unit.
        se: ``[p]`` their standard errors.
        likelihood: log partial likelihood at beta.
        events: number of events.
        rows: number of rows.
    """

    beta: Floats
    se: Floats
    likelihood: float
    events: int
    rows: int


def risk_sums(site: SurvivalSite, beta: Floats, times: Floats, shift: float = 0.0) -> RiskSums:
    """What a site sends.

    Args:
        site: its rows, columns centred and scaled as all sites' are.
        beta: ``[p]`` coefficients.
        times: ``[J]`` event times, rising.
        shift: subtracted from every row's x beta; it changes no ratio of sums.
    """
    weight = np.exp(site.x @ beta - shift)
    products = site.x[:, :, None] * site.x[:, None, :]
    last = np.searchsorted(times, site.time, side="right")  # a row is at risk at the first `last` times
    here = (site.event == 1) & (last > 0)
    place = last[here] - 1
    risk, tied = [], []
    for values in (weight, weight[:, None] * site.x, weight[:, None, None] * products):
        ends = np.zeros((len(times) + 1, *values.shape[1:]))
        np.add.at(ends, last, values)
        risk.append(ends[::-1].cumsum(0)[::-1][1:])
        sums = np.zeros((len(times), *values.shape[1:]))
        np.add.at(sums, place, values[here])
        tied.append(sums)
    total = np.zeros((len(times), site.x.shape[1]))
    np.add.at(total, place, site.x[here])
    deaths = np.bincount(place, minlength=len(times)).astype(float)
    return RiskSums((risk[0], risk[1], risk[2]), (tied[0], tied[1], tied[2]), deaths, total)


def likelihood(sums: RiskSums, beta: Floats, ties: str) -> Likelihood:
    """Partial likelihood of the rows that sums are over."""
    value, gradient = float((sums.total @ beta).sum()), sums.total.sum(0)
    information = np.zeros((len(beta), len(beta)))
    for k in range(int(sums.deaths.max(initial=0))):
        some = sums.deaths > k
        deaths = sums.deaths[some]
        share = k / deaths if ties == "efron" else np.zeros(len(deaths))
        zero = sums.risk[0][some] - share * sums.tied[0][some]
        one = (sums.risk[1][some] - share[:, None] * sums.tied[1][some]) / zero[:, None]
        two = (sums.risk[2][some] - share[:, None, None] * sums.tied[2][some]) / zero[:, None, None]
        value -= float(np.log(zero).sum())
        gradient = gradient - one.sum(0)
        information += (two - one[:, :, None] * one[:, None, :]).sum(0)
    return Likelihood(value, gradient, information)


def fit_cox(
    sites: Sequence[SurvivalSite], ties: str = "efron", *, stratify: bool = False, names: Sequence[str] = ()
) -> CoxFit:
    """The Cox regression of all sites' rows together, from sums that sites send.

    Every site sends first counts and sums of its columns and their squares, which centre and scale all sites' alike,
    and its event times; then in every Newton step its `risk_sums`, or with `stratify` only the gradient and information
    of its own likelihood, whose baseline hazard is then its own. The result equals the pooled (or stratified) fit.

    Args:
        sites: their rows.
        ties: how tied event times are treated.
        stratify: every site has a baseline hazard of its own.
        names: of the columns, for messages.

    Raises:
        ConfigError: an unknown treatment of ties.
        DataError: times that are not above 0, no event, a column that does not vary, or no finite fit.
    """
    if ties not in TIES:
        raise unknown("treatment of ties", ties, TIES)
    names = names or [f"column {k}" for k in range(sites[0].x.shape[1])]
    _check(sites)
    count = sum(len(site.x) for site in sites)
    centre = sum((site.x.sum(0) for site in sites), np.zeros(len(names))) / count
    spread = np.sqrt(sum(((site.x - centre) ** 2).sum(0) for site in sites) / count)
    check_varying([site.x for site in sites], names)
    scaled = [site._replace(x=(site.x - centre) / spread) for site in sites]
    groups = [[site] for site in scaled] if stratify else [scaled]
    times = [np.unique(np.concatenate([site.time[site.event == 1] for site in group])) for group in groups]

    def at(beta: Floats) -> Likelihood:
        parts = []
        for group, grid in zip(groups, times, strict=True):
            first_sums, *other_sums = (risk_sums(site, beta, grid) for site in group)
            parts.append(likelihood(sum(other_sums, first_sums), beta, ties))
        values, gradients, informations = zip(*parts, strict=True)
        return Likelihood(sum(values), np.sum(gradients, 0), np.sum(informations, 0))

    beta, here = newton(at, names, lambda: separating(*_orders(scaled, stratify=stratify)))
    se = np.sqrt(np.linalg.inv(here.information).diagonal())
    events = int(sum(site.event.sum() for site in sites))
    return CoxFit(beta / spread, se / spread, here.value, events, count)


def newton(
    at: Callable[[Floats], Likelihood],
    names: Sequence[str],
    separation: Callable[[], Floats | None] | None = None,
    *,
    intercepts: int = 0,
) -> tuple[Floats, Likelihood]:
    """Return the coefficients ``[p]`` of the largest likelihood, and the likelihood there.

    Columns are of unit spread. Whether they depend on each other is judged at 0, where every row counts. Separation is
    judged where the steps end, since information goes only then: by the rows where they are in hand, else by the sums.

    Args:
        at: the likelihood of all rows at some coefficients.
        names: of the columns.
        separation: finds a direction of separation by the rows; None: rows are not in hand.
        intercepts: the first so many columns are intercepts.

    Raises:
        DataError: there is no finite fit, columns depend on each other, or steps do not converge.
    """
    beta = np.zeros(len(names))
    here = first = at(beta)
    check_columns(first.information, names)
    steps, rise, ended = (beta, beta), np.inf, False
    for _ in range(STEPS):
        if not np.isfinite(here.information).all() or np.linalg.cond(here.information) > SINGULAR:
            break
        step: Floats = np.linalg.solve(here.information, here.gradient).astype(float)
        steps, rise = (steps[1], step), float(here.gradient @ step)
        if rise < TOLERANCE:
            ahead = at(beta + step)
            if ahead.value != -np.inf:  # else the last step has no answer, and the fit stays where it is
                beta, here = beta + step, ahead
            ended = True
            break
        beta, here = _stepped(at, beta, step, here)
    if not ended or is_suspect(first.information, here.information):
        direction = separation() if separation else recession(first.information, here.information, steps, rise)
        if direction is not None:
            raise no_finite_fit(direction, names, intercepts, SUPPORT if separation is None else 0.0)
    if not ended:
        raise DataError(f"the fit has not converged after {STEPS} steps; look at the columns {', '.join(names)}")
    return beta, here


def impossible(columns: int) -> Likelihood:
    """A likelihood so small that `newton` halves the step to it: of coefficients at which there is none."""
    return Likelihood(-np.inf, np.zeros(columns), np.zeros((columns, columns)))


def _stepped(
    at: Callable[[Floats], Likelihood], beta: Floats, step: Floats, here: Likelihood
) -> tuple[Floats, Likelihood]:
    """Newton's step, halved until the likelihood does not fall."""
    for _ in range(HALVINGS):
        with np.errstate(all="ignore"):  # too long a step overflows, and is halved
            ahead = at(beta + step)
        if ahead.value >= here.value - 1e-12 * abs(here.value):
            return beta + step, ahead
        step = step / 2
    return beta, here


def check_varying(parts: Sequence[Floats], names: Sequence[str]) -> None:
    """Refuse a column that is the same in every row, by its values: rounding may leave it a spread.

    Raises:
        DataError: there is one.
    """
    rows = np.concatenate(parts)
    same = (rows == rows[:1]).all(0)
    if same.any():
        raise DataError(f"{names[int(same.argmax())]} is the same in every row; leave it out")


def _orders(sites: Sequence[SurvivalSite], *, stratify: bool) -> tuple[Floats, Floats]:
    """Differences of rows that must not be negative, and that must be 0, where the partial likelihood has no maximum.

    The likelihood rises without limit in a direction b if at every event time the rows with the event have the largest
    x b of those at risk. Rows at risk later are at risk earlier, so one row per event time stands for them.
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


def _check(sites: Sequence[SurvivalSite]) -> None:
    for k, site in enumerate(sites):
        if not (site.time > 0).all() or not np.isfinite(site.time).all():
            raise DataError(f"site {k}: {int((~(site.time > 0)).sum())} times are not above 0; repair them")
        if not np.isin(site.event, (0, 1)).all():
            raise DataError(f"site {k}: events must be 0 or 1, got {np.unique(site.event)[:5].tolist()}")
    if not any(site.event.any() for site in sites):
        raise DataError("no row has an event; nothing can be fitted")
