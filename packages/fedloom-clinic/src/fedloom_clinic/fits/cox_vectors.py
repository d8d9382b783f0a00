"""Vectors that sites send in a Cox regression: sums in agreed-upon time bins, encoded as integers so that masks cancel.

Minimum counts protect small groups: a site sends nothing for a bin with too few of its events. Bins are merged
until each one contains events of enough sites. Two sums then never differ only by the rows of fewer sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import ConfigError, DataError, Refused
from fedloom_clinic.fits.cox import RiskSums, SurvivalSite, firth_slope, likelihood, risk_sums
from fedloom_clinic.fits.penalty import Floats, Likelihood, Mask, impossible_likelihood

Ring = NDArray[np.uint64]
"""Numbers modulo 2^64."""

MAX_COX_BINS = 10_000

MAX_SITE_SUM = 2**56
"""Maximum value of a site's sum, in multiples of the step. Within this limit, the sum over 100 sites fits into 63
bits."""
VECTOR_COUNTS = 6
"""Number of counts at the end of a vector: the fields of `BinningLoss`, and the number of rows in the fit."""


class CoxAgreement(NamedTuple):
    """Terms that all sites agree on before any site sends a sum.

    Attributes:
        ends: upper edges of the time bins in ascending order, ``[J]``. A time is treated as if it were its bin's upper
            edge. Empty if the fit is stratified.
        low: smallest plausible value of each column, ``[p]``.
        high: largest plausible value of each column, ``[p]``.
        least: minimum number of events that a site must have in a bin, and of rows at risk there, before it sends them.
        step: rounding step. Sums are rounded to multiples of this value.
        ties: method for events in the same bin or at the same time.
        stratify: True if each site has its own baseline hazard, with exact times.
        ridge: strength of the ridge (see `fedloom_clinic.fits.penalty`). If this strength is given, sites also send the
            sums of the columns and of their squares.
        firth: True if sites also send the sums that Firth's penalty needs for a given metric.
    """

    ends: Floats
    low: Floats
    high: Floats
    least: int = 5
    step: float = 2.0**-36
    ties: str = "efron"
    stratify: bool = False
    ridge: float | None = None
    firth: bool = False

    @property
    def length(self) -> int:
        """Number of values in a site's vector."""
        bins, p = len(self.ends), len(self.low)
        moments = 1 + p + p * (p + 1) // 2
        scales = 0 if self.ridge is None else 2 * p
        tilts = 0 if not self.firth else p if self.stratify else 2 * bins * (1 + p)
        return (moments if self.stratify else bins * (2 * moments + 1 + p)) + scales + tilts + VECTOR_COUNTS

    def scaled(self, x: Floats) -> Floats:
        """Return the columns ``[N, p]`` after scaling them to [-1, 1]."""
        scaled: Floats = (x - (self.high + self.low) / 2) / ((self.high - self.low) / 2)
        return scaled


class BinningLoss(NamedTuple):
    """Rows and events lost to bins and minimum counts, summed over sites.

    Attributes:
        rows: number of rows at all sites.
        events: number of events at all sites.
        uncovered: number of events after the last bin, or at times when a site has too few rows at risk.
        rare: number of events in bins where a site has too few events, or at sites with too few events if the fit is
            stratified.
        left_out: number of rows that were excluded because of a missing cell or a number outside the agreed range.
    """

    rows: int
    events: int
    uncovered: int
    rare: int
    left_out: int = 0


def simulated_agreement(
    sites: Sequence[SurvivalSite], width: float, least: int, ties: str, ridge: float | None = None
) -> CoxAgreement:
    """Return terms for simulations, with bins of equal width up to the last time.

    The range of a column covers the column's values at all sites.

    Raises:
        ConfigError: the width is not above 0, or it would give too many bins.
    """
    last = max(float(site.time.max()) for site in sites)
    low, high = ranges_of(sites)
    return CoxAgreement(bin_ends(width, last), low, high, least, ties=ties, ridge=ridge)


def ranges_of(sites: Sequence[SurvivalSite]) -> tuple[Floats, Floats]:
    """Return each column's smallest and largest values over all sites, which are at least 1e-9 apart, ``[p]``."""
    x = np.concatenate([site.x for site in sites])
    low, high = x.min(0), x.max(0)
    return low, np.maximum(high, low + 1e-9)


def bin_ends(width: float, last: float) -> Floats:
    """Return the upper edges ``[J]`` of bins of equal width. The last edge is not before `last`.

    Raises:
        ConfigError: the width is not above 0, or it would give too many bins.
    """
    if not 0 < width < float("inf") or last / width > MAX_COX_BINS:
        raise ConfigError(
            f"a bin width of {width:g} gives more than {MAX_COX_BINS} bins for times up to {last:g}. Set a larger width"
        )
    ends: Floats = width * np.arange(1, np.ceil(last / width) + 1)
    return ends


def bin_site(site: SurvivalSite, terms: CoxAgreement) -> tuple[SurvivalSite, BinningLoss]:
    """Return a site's rows with times moved to the upper edges of their bins, and with rare events treated as censored.

    Rows after the site's last bin with `least` rows at risk are treated as censored in this bin. If a site
    has no such bin, it keeps no rows.
    """
    place = np.searchsorted(terms.ends, site.time)
    at_risk = np.bincount(place, minlength=len(terms.ends) + 1)[::-1].cumsum()[::-1][: len(terms.ends)]
    enough = np.nonzero(at_risk >= max(terms.least, 1))[0]
    rows, events = len(site.time), int(site.event.sum())
    if not len(enough):
        return SurvivalSite(site.x[:0], site.time[:0], site.event[:0]), BinningLoss(rows, events, events, 0)
    last = int(enough[-1])
    inside = place <= last
    event, place = np.where(inside, site.event, 0.0), np.minimum(place, last)
    counts = np.bincount(place, event, minlength=last + 1)
    kept = np.where(counts[place] >= terms.least, event, 0.0)
    uncovered, rare = events - int(event.sum()), int(event.sum() - kept.sum())
    return SurvivalSite(site.x, terms.ends[place], kept), BinningLoss(rows, events, uncovered, rare)


def select_stratum(site: SurvivalSite, terms: CoxAgreement) -> tuple[SurvivalSite, BinningLoss]:
    """Return the rows that a site uses in a stratified fit: all rows, or no rows if it has too few events."""
    rows, events = len(site.time), int(site.event.sum())
    if events < terms.least:
        return SurvivalSite(site.x[:0], site.time[:0], site.event[:0]), BinningLoss(rows, events, 0, events)
    return site, BinningLoss(rows, events, 0, 0)


def bins_with_events(site: SurvivalSite, terms: CoxAgreement) -> NDArray[np.bool_]:
    """Return flags ``[J]`` of the bins whose events a site may send.

    In a stratified fit, return a single flag ``[1]``, which is True if the site has enough events.
    """
    if terms.stratify:
        return np.array([int(site.event.sum()) >= terms.least])
    used, _ = bin_site(site, terms)
    return np.isin(terms.ends, used.time[used.event == 1])


def merge_bin_ends(terms: CoxAgreement, filled: NDArray[np.bool_], missing: int, fewest: int) -> CoxAgreement:
    """Return wider bins with events from `fewest` sites, even if any `missing` sites are absent.

    Every site computes the same bins. The bins that follow the last wider bin are added to it.

    Args:
        terms: agreed terms.
        filled: flags of the bins with events at each site ``[n, J]``, as returned by `bins_with_events`.
        missing: number of sites that may drop out.
        fewest: minimum number of sites in a sum.

    Raises:
        ConfigError: no bin contains events from enough sites.
    """
    ends, inside = [], np.zeros(len(filled), bool)
    for place in range(filled.shape[1]):
        inside |= filled[:, place]
        if inside.sum() - missing >= fewest:
            ends.append(place)
            inside = np.zeros(len(filled), bool)
    if not ends:
        raise Refused(
            f"only {int(filled.any(1).sum())} of {len(filled)} sites have {terms.least} events in a "
            f"bin, but {fewest} sites must have at least this many even if {missing} sites are missing",
            rule="small-cells",
            fix="agree on wider bins or on a smaller minimum count",
        )
    if terms.stratify:
        return terms
    return terms._replace(ends=np.append(terms.ends[ends[:-1]], terms.ends[-1]))


class SiteVectors:
    """Vectors that a site sends in the steps of a fit.

    Args:
        site: the site's rows that are within the agreed ranges.
        terms: agreed terms.
        left_out: number of rows excluded by the site.

    Attributes:
        losses: the site's losses (see `BinningLoss`).
        rows: number of the site's rows in the fit.
    """

    def __init__(self, site: SurvivalSite, terms: CoxAgreement, left_out: int = 0) -> None:
        used, losses = (select_stratum if terms.stratify else bin_site)(site, terms)
        self.losses, self._terms = losses._replace(left_out=left_out), terms
        self._site, self.rows = used._replace(x=terms.scaled(used.x)), len(used.x)
        self._times = np.unique(used.time[used.event == 1])

    def largest_share(self, beta: Floats, rows: Mask | slice = slice(None), metric: Floats | None = None) -> float:
        """Return the heaviest row's share of the total weight of some rows. If there are no rows, return 0.

        If a metric is given, also consider the weights times the lengths of rows in this metric, and return the larger
        share.
        """
        x = self._site.x[rows] if len(self._site.x) else self._site.x
        if not len(x):
            return 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            eta = x @ beta
            weight = np.exp(eta - eta.max())
            shares = [weight.max() / weight.sum()]
            if metric is not None and metric.any():
                lengths = weight * np.abs(((x @ metric) * x).sum(1))
                shares.append(lengths.max() / lengths.sum())
        return float(np.max(shares))

    def compute_likelihood(self, beta: Floats, rows: Mask) -> Likelihood:
        """Return the likelihood of the given `rows` in a stratified fit, at coefficients ``[p]``."""
        some = SurvivalSite(*(part[rows] for part in self._site))
        return likelihood(risk_sums(some, beta, np.unique(some.time[some.event == 1])), beta, self._terms.ties)

    def encode(self, beta: Floats, metric: Floats | None = None) -> Ring:
        """Return the vector at coefficients ``[p]`` for columns in [-1, 1], and a metric ``[p, p]`` of Firth's penalty.

        Raises:
            DataError: a sum is not finite or too large for the step.
        """
        with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
            parts = self._parts(beta, metric)
        multiples = np.rint(np.concatenate(parts) / self._terms.step)
        if not np.isfinite(multiples).all():
            raise DataError("a sum in the Cox regression is not finite: the coefficients are too large for these data")
        if np.abs(multiples).max(initial=0) >= MAX_SITE_SUM:
            raise DataError(
                f"a sum in the Cox regression, {np.abs(multiples).max() * self._terms.step:g}, is too "
                f"large for step {self._terms.step:g}. Use a larger step"
            )
        counts = np.array([*self.losses, len(self._site.x)])
        return np.concatenate([multiples, counts]).astype(np.int64).view(np.uint64)

    def _parts(self, beta: Floats, metric: Floats | None) -> list[Floats]:
        """Return the unrounded sums at coefficients ``[p]``."""
        terms, site = self._terms, self._site
        shift = float(np.abs(beta).sum())  # with this shift, no weight exceeds 1
        upper = np.triu_indices(len(beta))
        scales = [] if terms.ridge is None else [site.x.sum(0), (site.x**2).sum(0)]
        if terms.stratify:
            here = likelihood(risk_sums(site, beta, self._times, shift), beta, terms.ties)
            value = np.array([here.value - float(site.event.sum()) * shift])
            tilts = [] if metric is None else [firth_slope(
                risk_sums(site, beta, self._times, shift, metric), terms.ties, metric)]  # fmt: skip
            return [value, here.gradient, here.information[upper], *scales, *tilts]
        sums = risk_sums(site, beta, terms.ends, shift, metric)
        parts = [
            part
            for of in (sums.risk, sums.tied)
            for part in (of[0], of[1].ravel(), of[2][:, upper[0], upper[1]].ravel())
        ]
        tilts = [part.ravel() for of in (sums.risk, sums.tied) for part in of[3:]]
        return [*parts, sums.deaths, sums.total.ravel(), *scales, *tilts]


class OpenedCoxSums(NamedTuple):
    """Contents of the sum of the sites' vectors.

    Attributes:
        likelihood: likelihood at these coefficients. If the rows at risk have so little weight that the step rounds it
            away, this is `impossible_likelihood`.
        sums: sums over the rows at risk. None if the fit is stratified.
        losses: losses of all sites together (see `BinningLoss`).
        rows: number of rows in the fit.
        squares: squared distances of each column from its mean, summed over the rows, ``[p]``. None if there is no
            ridge.
        slope: gradient ``[p]`` of Firth's penalty for the metric used to compute the vectors. None if this
            penalty is not used.
    """

    likelihood: Likelihood
    sums: RiskSums | None
    losses: BinningLoss
    rows: int
    squares: Floats | None = None
    slope: Floats | None = None


def open_sum(
    vector: Ring, terms: CoxAgreement, beta: Floats, sites: int, metric: Floats | None = None
) -> OpenedCoxSums:
    """Return the contents of the sum of the sites' vectors, after checking that rows can produce such a sum.

    Args:
        vector: sum of the vectors modulo 2^64.
        terms: agreed terms.
        beta: coefficients used to compute the vectors, ``[p]``.
        sites: number of sites in the sum.
        metric: metric of Firth's penalty, ``[p, p]``. None if this penalty is not used.

    Raises:
        ConfigError: the sum cannot come from any rows of this number of sites.
    """
    if len(vector) != terms.length:
        raise Refused(f"a sum of a Cox regression must have {terms.length} numbers, got {len(vector)}")
    numbers, p, bins = vector.view(np.int64), len(terms.low), len(terms.ends)
    counts = [int(count) for count in numbers[-VECTOR_COUNTS:]]
    losses, rows = BinningLoss(*counts[:-1]), counts[-1]
    events = losses.events - losses.uncovered - losses.rare
    if min(counts) < 0 or not events <= losses.events <= losses.rows or not events <= rows <= losses.rows:
        raise Refused("the counts of a Cox regression contradict each other: a site sent a wrong vector")
    values: Floats = (numbers[:-VECTOR_COUNTS] * terms.step).astype(np.float64)
    error, squares = sites * terms.step, None
    values, tilts = np.split(
        values, [len(values) - (0 if metric is None else p if terms.stratify else 2 * bins * (1 + p))]
    )
    if terms.ridge is not None:
        values, first, second = np.split(values, [-2 * p, -p])
        if np.abs(first).max() > rows + error or second.min() < -error or second.max() > rows + error:
            raise Refused("the column sums of a Cox regression are out of range: a site sent a wrong vector")
        squares = second - first**2 / max(rows, 1)
    upper = np.triu_indices(p)

    def full(halves: Floats) -> Floats:
        matrix = np.zeros((*halves.shape[:-1], p, p))
        matrix[..., upper[0], upper[1]] = matrix[..., upper[1], upper[0]] = halves
        return matrix

    if terms.stratify:
        value, gradient, information = float(values[0]), values[1 : p + 1], full(values[p + 1 :])
        largest = events + error
        if value > error or np.abs(gradient).max() > 2 * largest or np.abs(information).max() > largest:
            raise Refused("the likelihood of a Cox regression is out of range: a site sent a wrong vector")
        return OpenedCoxSums(
            Likelihood(value, gradient, information), None, losses, rows, squares, None if metric is None else tilts
        )
    triangle = len(upper[0])
    parts = np.split(values, np.cumsum([bins, bins * p, bins * triangle] * 2 + [bins]))
    risk, tied = (
        (zero, one.reshape(bins, p), full(two.reshape(bins, triangle))) for zero, one, two in (parts[:3], parts[3:6])
    )
    sums = RiskSums(risk, tied, np.rint(parts[6]), parts[7].reshape(bins, p))
    if not _are_plausible_sums(sums, events, rows, error):
        raise Refused("the sums of a Cox regression are out of range: a site sent a wrong vector")
    shift = float(np.abs(beta).sum())
    if (risk[0][sums.deaths > 0] <= 2 * error).any():
        if not beta.any():  # every row at risk has the weight 1
            raise Refused("no row is at risk at an event of a Cox regression: a site sent a wrong vector")
        return OpenedCoxSums(impossible_likelihood(p), sums, losses, rows, squares)
    here = likelihood(sums, beta, terms.ties)
    slope = None
    if metric is not None:
        first, one, second, other = np.split(tilts, np.cumsum([bins, bins * p, bins]))
        longer = sums._replace(risk=(*risk, first, one.reshape(bins, p)), tied=(*tied, second, other.reshape(bins, p)))
        slope = firth_slope(longer, terms.ties, metric)
    return OpenedCoxSums(here._replace(value=here.value - events * shift), sums, losses, rows, squares, slope)


def _are_plausible_sums(sums: RiskSums, events: int, rows: int, error: float) -> bool:
    """Return True if rows in [-1, 1] with weights of at most 1 can give these sums, up to an error in each."""
    bounded = all(
        bool((np.abs(one) <= zero[:, None] + error).all() and (np.abs(two) <= zero[:, None, None] + error).all())
        for zero, one, two in (sums.risk, sums.tied)
    )
    zero, tied = sums.risk[0], sums.tied[0]
    ordered = bool((np.diff(zero) <= error).all() and (tied <= zero + error).all() and (tied >= -error).all())
    counted = bool((sums.deaths >= 0).all() and sums.deaths.sum() == events and (zero <= rows + error).all())
    died = bool((tied <= sums.deaths + error).all() and (np.abs(sums.total) <= sums.deaths[:, None] + error).all())
    return bounded and ordered and counted and died
