"""Figures of the whole federation, from the figures of its clients (definitions: see each function).

Arguments ``values`` are float64 ``[n]`` with nan for clients without samples in the part; those are left out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


def mean(values: Values) -> float:
    """Mean over clients."""
    return float(np.mean(_known(values))) if len(_known(values)) else float("nan")


def weighted(values: Values, sizes: Values) -> float:
    """Mean over clients, weighted by their samples."""
    there = np.isfinite(values) & (sizes > 0)
    return float(np.average(values[there], weights=sizes[there])) if there.any() else float("nan")


def worst(values: Values, share: float = 0.1, *, low: bool = True) -> float:
    """Mean over the worst ``share`` of the clients (at least one); ``low``: small values are bad."""
    found = np.sort(_known(values))
    if not len(found):
        return float("nan")
    count = max(1, round(share * len(found)))
    return float(np.mean(found[:count] if low else found[-count:]))


def deciles(values: Values) -> Values:
    """The nine deciles over clients."""
    found = _known(values)
    return np.quantile(found, np.arange(1, 10) / 10) if len(found) else np.full(9, np.nan)


def spread(values: Values, centre: float) -> float:
    """sigma_Acc: root mean square distance of the clients' accuracies from the global one (Equitable-FL, Sec. 5)."""
    found = _known(values)
    return float(np.sqrt(np.mean((found - centre) ** 2))) if len(found) else float("nan")


def variance(values: Values) -> float:
    """Sample variance over clients, divisor n - 1 (FLAME's fairness of test losses)."""
    found = _known(values)
    return float(np.var(found, ddof=1)) if len(found) > 1 else float("nan")


def jain(values: Values) -> float:
    """Jain's fairness index (sum x)^2 / (n sum x^2), in [1/n, 1]."""
    found = _known(values)
    total = float(np.sum(found**2))
    return float(np.sum(found) ** 2 / (len(found) * total)) if total > 0 else float("nan")


def disagreement(values: Values) -> float:
    """Client disagreement CD (Equitable-FL, Eq. 9): sum over ordered pairs of |l_i - l_j| over binom(r, 2).

    It is twice the mean absolute difference of a pair. The paper sums over the participants of a round; records have it
    over all clients, whoever took part, so that rounds and methods compare.
    """
    found = np.sort(_known(values))
    r = len(found)
    if r < 2:
        return float("nan")
    pairs = float(np.sum((2 * np.arange(r) - r + 1) * found))
    return 2 * pairs / (r * (r - 1) / 2)


def mutual_information(planted: NDArray[np.int64], found: NDArray[np.int64]) -> float:
    """Normalised mutual information of two labelings, in [0, 1] (Equitable-FL, Fig. 2); 1 if equal up to names."""
    from sklearn.metrics import normalized_mutual_info_score

    return float(normalized_mutual_info_score(planted, found))


def _known(values: Values) -> Values:
    return values[np.isfinite(values)]
