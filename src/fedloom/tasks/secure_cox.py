"""Cox regression from secure sums: agreed time bins, least counts, whole numbers that masks cancel in.

Every site rounds its sums to multiples of a step and sends them as numbers modulo 2^64, so that a secure sum of them is
exact; the server receives no site's. Columns are put on [-1, 1] by agreed ranges, so no moment of a site is needed, and
all weights are at most 1.

References: sums over sites as in C.-L. Lu et al., "WebDISCO", JAMIA 2015; masks modulo a power of two as in K. Bonawitz
et al., CCS 2017; the bound by the pseudo self-concordance of exponential weights, F. Bach, Electron. J. Stat. 2010,
Proposition 1.

    Bach    here      meaning
    R       reach     largest distance of two rows
    lambda  least     smallest eigenvalue of the information
    nu      gradient  length of the gradient
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import ConfigError, DataError
from fedloom.tasks.cox import CoxFit, Floats, Likelihood, RiskSums, SurvivalSite, likelihood, newton, risk_sums

Ring = NDArray[np.uint64]
"""Numbers modulo 2^64."""

SecureSum = Callable[[Sequence[Ring]], Ring]
"""(a vector of every site) -> their sum modulo 2^64, in which masks cancel."""

MOST_BINS = 10_000

ROOM = 2**62
"""Multiples of the step that a sum may have."""


class CoxAgreement(NamedTuple):
    """What sites agree on before any of them sends a sum.

    Attributes:
        ends: ``[J]`` rising ends of the time bins; a time counts as the end of its bin.
        low: ``[p]`` smallest plausible value of every column.
        high: ``[p]`` largest.
        least: events of a site in a bin, and its rows at risk there, below which it sends none.
        step: to multiples of which sums are rounded.
        ties: how events of one bin are treated.
    """

    ends: Floats
    low: Floats
    high: Floats
    least: int = 5
    step: float = 2.0**-40
    ties: str = "efron"


class BinningLoss(NamedTuple):
    """What bins and least counts cost, summed over sites.

    Attributes:
        rows: of all sites.
        events: of all sites.
        uncovered: events after the last bin, or where a site has too few rows at risk.
        rare: events in bins where a site has too few.
    """

    rows: int
    events: int
    uncovered: int
    rare: int


class SecureCoxFit(NamedTuple):
    """A fit, how far it may be from that of the same binned rows, and what is lost before.

    Attributes:
        fit: coefficients and standard errors of the columns as they are measured.
        bound: ``[p]`` largest distance of a coefficient to that of the pooled binned rows, by rounding and stopping.
        losses: see `BinningLoss`.
    """

    fit: CoxFit
    bound: Floats
    losses: BinningLoss


def agreement_on(sites: Sequence[SurvivalSite], width: float, least: int, ties: str) -> CoxAgreement:
    """Bins of one width up to the last time, and ranges as wide as the columns of all sites: for simulations.

    Raises:
        ConfigError: the width is not above 0, or makes too many bins.
    """
    last = max(float(site.time.max()) for site in sites)
    if not 0 < width < float("inf") or last / width > MOST_BINS:
        raise ConfigError(f"bins of {width:g} for times up to {last:g}: give a width for at most {MOST_BINS} bins")
    x = np.concatenate([site.x for site in sites])
    low, high = x.min(0), x.max(0)
    return CoxAgreement(
        width * np.arange(1, np.ceil(last / width) + 1), low, np.maximum(high, low + 1e-9), least, ties=ties
    )


def binned(site: SurvivalSite, terms: CoxAgreement) -> tuple[SurvivalSite, BinningLoss]:
    """The rows as a site uses them: times at the ends of bins, and events censored where they are too few.

    Rows beyond the last bin in which the site has `least` rows at risk are censored in that bin; a site that has so
    many nowhere has no rows.
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


def rounded(sums: RiskSums, step: float) -> Ring:
    """A site's sums as one vector of multiples of the step modulo 2^64; of a symmetric matrix its upper half.

    Raises:
        DataError: a sum that is too large for the step.
    """
    upper = np.triu_indices(sums.total.shape[1])
    parts = [
        part for of in (sums.risk, sums.tied) for part in (of[0], of[1].ravel(), of[2][:, upper[0], upper[1]].ravel())
    ]
    multiples = np.rint(np.concatenate([*parts, sums.deaths, sums.total.ravel()]) / step)
    if np.abs(multiples).max(initial=0) >= ROOM:
        raise DataError(f"a sum of {np.abs(multiples).max() * step:g} has no room at step {step:g}; take a larger one")
    return multiples.astype(np.int64).view(np.uint64)


def restored(vector: Ring, bins: int, columns: int, step: float) -> RiskSums:
    """Sums of all sites from their vector modulo 2^64."""
    values, upper = vector.view(np.int64) * step, np.triu_indices(columns)
    triangle = len(upper[0])
    sizes = [bins, bins * columns, bins * triangle] * 2 + [bins]
    parts = np.split(values, np.cumsum(sizes))

    def moments(zero: Floats, one: Floats, two: Floats) -> tuple[Floats, Floats, Floats]:
        full = np.zeros((bins, columns, columns))
        full[:, upper[0], upper[1]] = full[:, upper[1], upper[0]] = two.reshape(bins, triangle)
        return zero, one.reshape(bins, columns), full

    return RiskSums(moments(*parts[:3]), moments(*parts[3:6]), np.rint(parts[6]), parts[7].reshape(bins, columns))


def ring_sum(vectors: Sequence[Ring]) -> Ring:
    """The sum modulo 2^64 as a secure sum gives it."""
    total: Ring = np.sum(np.stack(vectors), 0, dtype=np.uint64)
    return total


def fit_secure_cox(
    sites: Sequence[SurvivalSite], terms: CoxAgreement, names: Sequence[str] = (), total: SecureSum = ring_sum
) -> SecureCoxFit:
    """The Cox regression of all sites' binned rows from secure sums alone, with one baseline hazard.

    Args:
        sites: their rows.
        terms: what they agreed on.
        names: of the columns, for messages.
        total: the secure sum.

    Raises:
        ConfigError: bins that do not rise, or ranges that are empty.
        DataError: values outside the agreed ranges, no event that may be sent, or no finite fit.
    """
    names = list(names) or [f"column {k}" for k in range(len(terms.low))]
    if not len(terms.ends) or not (np.diff(terms.ends) > 0).all() or not (terms.high > terms.low).all():
        raise ConfigError("time bins must rise, and every agreed range too")
    middle, half = (terms.high + terms.low) / 2, (terms.high - terms.low) / 2
    scaled, losses = [], []
    for place, site in enumerate(sites):
        beyond = ((site.x < terms.low) | (site.x > terms.high)).sum(0)
        if beyond.any():
            k = int(beyond.argmax())
            raise DataError(
                f"site {place}: {names[k]} has {beyond[k]} values outside the agreed {terms.low[k]:g} to "
                f"{terms.high[k]:g}; repair them, or agree on another range"
            )
        used, lost = binned(site, terms)
        scaled.append(used._replace(x=(used.x - middle) / half))
        losses.append(lost)
    counts = total(
        [np.array([*lost, len(site.x)], np.int64).view(np.uint64) for lost, site in zip(losses, scaled, strict=True)]
    )
    cost = BinningLoss(*map(int, counts[:4]))
    if cost.events == cost.uncovered + cost.rare:
        raise DataError(f"no bin has {terms.least} events at a site; agree on wider bins or on a smaller least count")

    def at(beta: Floats) -> tuple[Likelihood, RiskSums]:
        shift = float(np.abs(beta).sum())  # then no weight is above 1
        vectors = [rounded(risk_sums(site, beta, terms.ends, shift), terms.step) for site in scaled]
        sums = restored(total(vectors), len(terms.ends), len(names), terms.step)
        here = likelihood(sums, beta, terms.ties)
        return here._replace(value=here.value - float(sums.deaths.sum()) * shift), sums

    beta, here = newton(lambda b: at(b)[0], names)
    bound = _bound(here, at(beta)[1], len(sites) * terms.step / 2, terms.ties)
    se = np.sqrt(np.linalg.inv(here.information).diagonal())
    fit = CoxFit(beta / half, se / half, here.value, cost.events - cost.uncovered - cost.rare, int(counts[4]))
    return SecureCoxFit(fit, bound / half, cost)


def _bound(here: Likelihood, sums: RiskSums, error: float, ties: str) -> float:
    """Largest distance of the coefficients to those of exact sums, each of which is within `error` of its own.

    Exact sums have a gradient g and an information I at the fit. With rows in [-1, 1]^p, so that two are at most
    R = 2 sqrt(p) apart, the exact fit is within -log(1 - R |g| / lambda) / R, lambda the smallest eigenvalue of I.
    """
    columns = sums.total.shape[1]
    slack, matrix = np.full(columns, len(sums.deaths) * error), 0.0
    for k in range(int(sums.deaths.max(initial=0))):
        some = sums.deaths > k
        share = k / sums.deaths[some] if ties == "efron" else np.zeros(int(some.sum()))
        size = sums.risk[0][some] - share * sums.tied[0][some]
        wrong = (1 + share) * error
        if (size <= 2 * wrong).any():
            return float("inf")
        relative = wrong / (size - wrong)  # of S1 / S0, whose entries are at most 1
        slack += 2 * relative.sum()
        matrix += columns * float((2 * relative + 4 * relative + 4 * relative**2).sum())
    least = float(np.linalg.eigvalsh(here.information)[0]) - matrix
    gradient, reach = float(np.linalg.norm(np.abs(here.gradient) + slack)), 2 * np.sqrt(columns)
    if least <= 0 or reach * gradient >= least:
        return float("inf")
    return float(-np.log1p(-reach * gradient / least) / reach)
