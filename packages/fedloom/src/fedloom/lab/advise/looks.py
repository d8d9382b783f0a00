"""Looks (interim analyses of a race): paired differences between two methods, and the significance level of each look.

The difference between two methods is a table with one value for each seed and client. Seeds and clients are random
effects: some clients gain more than others, and a seed may favor one method at all clients. The standard error accounts
for the variance across seeds and across clients (two-way random effects), and its degrees of freedom follow
Satterthwaite's approximation. Therefore, one lucky seed cannot decide a race with many clients, and one unusual client
cannot decide a race with many seeds. Because a pair of methods has few seeds, its variance across seeds is taken to be
at least the variance estimated from all methods in the race.

A race has several interim analyses, called looks. The significance levels of the looks add up to the level of the race
(using the Pocock-type spending function of Lan and DeMets), and each look divides its level among the rivals of a
method. By Bonferroni's inequality, the best method is eliminated with a probability of at most the level of the race,
no matter how the looks depend on each other.

References: F. E. Satterthwaite, Biometrics Bulletin 2, 1946; S. L. Hillis, Statistics in Medicine 26, 2007 (its readers
and cases correspond to clients and seeds here); K. K. G. Lan and D. L. DeMets, Biometrika 70, 1983.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RACE_ERROR_LEVEL = 0.05
"""Maximum probability that the best method is eliminated from a race."""
INTERVAL_LEVEL = 0.03
"""One minus the coverage of the printed intervals. Such an interval may also show that a method is better than local
training.

In simulated races between six equally good methods, local training was eliminated, or the interval was above 0, in at
most 5 % of the races. At a level of 0.05, this happened in up to 7 % of the races, because the leading method is also
the luckiest one.
"""

Values = NDArray[np.float64]


class SeedPool(NamedTuple):
    """Effect of seeds on the difference between any two methods of a race.

    Attributes:
        variance: variance across seeds of the mean difference across clients.
        degrees: degrees of freedom of ``variance``.
    """

    variance: float
    degrees: int


class PairedDifference(NamedTuple):
    """Mean difference between two methods across clients and seeds, with its variance components.

    Attributes:
        mean: mean across all clients and seeds.
        client_mean_square: mean square between the clients' means.
        seed_mean_square: mean square between the seeds' means, which is at least the value implied by the pooled effect
            of seeds. NaN if there is only one seed.
        residual_mean_square: mean square of the residuals. NaN if there is only one seed.
        clients: number of clients.
        seeds: number of seeds.
        seed_degrees: degrees of freedom of ``seed_mean_square``.
    """

    mean: float
    client_mean_square: float
    seed_mean_square: float
    residual_mean_square: float
    clients: int
    seeds: int
    seed_degrees: int

    @property
    def error(self) -> float:
        """Standard error of the mean. NaN if there are fewer than two clients."""
        return self._error(self.seeds)

    @property
    def degrees(self) -> float:
        """Degrees of freedom of the standard error."""
        extra = max(0.0, self.seed_mean_square - self.residual_mean_square) if self.seeds > 1 else 0.0
        parts = [(self.client_mean_square, self.clients - 1), (extra, self.seed_degrees)]
        below = sum(square**2 / free for square, free in parts if square)
        return (self.client_mean_square + extra) ** 2 / below if below else float(max(1, self.clients - 1))

    def _error(self, seeds: int) -> float:
        """Return the standard error that the mean would have with the given number of seeds."""
        if self.clients < 2:
            return math.nan
        if self.seeds < 2:
            return math.sqrt(self.client_mean_square / self.clients)
        extra = max(0.0, self.seed_mean_square - self.residual_mean_square)
        lasting = max(0.0, self.client_mean_square - self.residual_mean_square) / self.seeds
        passing = (self.residual_mean_square if lasting else self.client_mean_square) + extra
        return math.sqrt((lasting + passing / seeds) / self.clients)

    def p_above(self) -> float:
        """Return the one-sided p-value for the alternative that the mean is above 0, or 1 if no test is possible."""
        if not self.error > 0:
            return 0.0 if self.error == 0 and self.mean > 0 else 1.0
        from scipy.stats import t  # slow to import

        return float(t.sf(self.mean / self.error, self.degrees))

    def half_width(self, level: float = INTERVAL_LEVEL) -> float:
        """Return the half-width of the two-sided confidence interval of the mean.

        NaN if there are fewer than two clients.
        """
        from scipy.stats import t  # slow to import

        return float(t.isf(level / 2, self.degrees) * self.error) if math.isfinite(self.error) else math.nan

    def seeds_needed(self, level: float, most: int = 1000) -> int | None:
        """Return the number of seeds needed for a mean of this size to differ significantly from 0.

        The result is None if no number up to ``most`` is sufficient.

        Args:
            level: one-sided significance level.
            most: maximum number of seeds to consider.
        """
        from scipy.stats import t  # slow to import

        quantile = float(t.isf(level, max(1, self.clients - 1)))
        errors = ((seeds, self._error(seeds)) for seeds in range(self.seeds + 1, most + 1))
        return next((seeds for seeds, error in errors if abs(self.mean) >= quantile * error), None)


def pool_seeds(values: Values) -> SeedPool | None:
    """Estimate, from all methods, the effect of seeds on differences, as the interaction of methods and seeds.

    Args:
        values: scores ``[methods, seeds, clients]``. Clients with a non-finite value are omitted.

    Returns:
        The effect of seeds. None if there is only one seed, only one method, or no client.
    """
    values = values[:, :, np.isfinite(values).all((0, 1))]
    methods, seeds, clients = values.shape
    if methods < 2 or seeds < 2 or not clients:
        return None
    means = values.mean(2)
    rest = means - means.mean(0) - means.mean(1, keepdims=True) + means.mean()
    degrees = (methods - 1) * (seeds - 1)
    return SeedPool(2 * float((rest**2).sum()) / degrees, degrees)


def pair_differences(values: Values, pool: SeedPool | None = None) -> PairedDifference:
    """Summarize a table of differences for each seed and client.

    Args:
        values: differences ``[seeds, clients]``. Clients with any value that is not finite are omitted.
        pool: effect of seeds, estimated from all methods. None if the effect is unknown.
    """
    values = values[:, np.isfinite(values).all(0)]
    seeds, clients = values.shape
    if not clients or not seeds:
        return PairedDifference(math.nan, math.nan, math.nan, math.nan, 0, seeds, 0)
    mean, by_client, by_seed = float(values.mean()), values.mean(0), values.mean(1)
    rest = values - by_client - by_seed[:, None] + mean
    free = (seeds - 1) * (clients - 1)
    of_pair = float(((by_seed - mean) ** 2).sum()) / (seeds - 1) if seeds > 1 else math.nan
    return PairedDifference(
        mean,
        seeds * float(((by_client - mean) ** 2).sum()) / (clients - 1) if clients > 1 else math.nan,
        clients * max(of_pair, 0.0 if pool is None else pool.variance),
        float((rest**2).sum()) / free if free else math.nan,
        clients,
        seeds,
        max(seeds - 1, 0 if pool is None else pool.degrees),
    )


def shrink_gains(values: Values) -> Values:
    """Predict the difference for each client, ``[clients]``: the client's mean, shrunk toward the mean of all clients.

    This is the best linear unbiased prediction in the two-way model, which retains only the share of the between-client
    variance that persists across seeds. Clients with a non-finite value are assigned the mean of the other clients.

    Args:
        values: differences ``[seeds, clients]``.
    """
    summary, finite = pair_differences(values), np.isfinite(values).all(0)
    share = 1.0
    if summary.seeds > 1 and summary.clients > 1:
        lasting = max(0.0, summary.client_mean_square - summary.residual_mean_square)
        share = lasting / summary.client_mean_square if summary.client_mean_square > 0 else 0.0
    gains = np.full(values.shape[1], summary.mean)
    gains[finite] += share * (values[:, finite].mean(0) - summary.mean)
    return gains


def spend_level(looks: int, level: float = RACE_ERROR_LEVEL) -> list[float]:
    """Return the significance level of each look of a race, in order.

    Args:
        looks: number of looks, which must be fixed before the first look.
        level: significance level of all looks combined.

    >>> levels = spend_level(3)
    >>> levels[0] > levels[1] > levels[2], round(sum(levels), 12)
    (True, 0.05)
    """
    spent = [level * math.log1p((math.e - 1) * look / looks) for look in range(looks + 1)]
    return [later - earlier for earlier, later in pairwise(spent)]
