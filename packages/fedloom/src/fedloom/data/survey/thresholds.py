"""Detection of binary targets that were computed from columns with a threshold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from fedloom.data.survey.facts import MAX_FEW_LEVELS, MIN_ROWS_PER_LEVEL

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

MIN_SEPARATED_ROWS = 100
"""Minimum number of rows with classes that are separated without an error.

If neither column predicts the target almost perfectly, noise does not separate that many rows.
"""
PROBE_ROWS = 32, 1000
"""Maximum numbers of rows of each class in the first two comparisons, which exclude nearly all pairs of columns."""
MAX_PAIRED_COLUMNS = 200
MAX_SEPARATING_PAIRS = 3
"""Maximum number of pairs of columns that separate the classes. If more do, the classes differ widely by themselves."""
NEAR_SHARE, FAR_SHARE, MAX_NEAR_DISTANCE = 0.2, 0.6, 0.5
"""Shares of the rows nearest to a threshold, in the order of their distances, whose last distances are compared, and
maximum ratio of these distances. The ratio is 1/3 if the density is even. It is higher if rows are rare there."""
PAIR_FORMULAS: Mapping[str, Callable[[Floats, Floats], Floats]] = {
    "{0} - {1}": lambda a, b: a - b,
    "{0} + {1}": lambda a, b: a + b,
    "{0} * {1}": lambda a, b: a * b,
    "{0} / {1}": lambda a, b: a / b,
    "{0} / {1}^2": lambda a, b: a / b**2,
    "{1} / {0}^2": lambda a, b: b / a**2,
    "{0} * {1}^2": lambda a, b: a * b**2,
    "{1} * {0}^2": lambda a, b: b * a**2,
}
"""Formulas of two columns that are compared with a threshold, such as the one of the body mass index."""


def find_threshold(numbers: Mapping[str, Floats], y: Floats) -> tuple[tuple[str, str], str] | None:
    """Return two columns and a formula whose values, compared with a threshold, give the class of every row.

    Args:
        numbers: numbers ``[N]`` of each numeric feature that does not predict the target alone. Missing numbers are
            NaN.
        y: class of each row ``[N]``, 0 or 1. Missing classes are NaN.
    """
    columns = {name: x for name, x in numbers.items() if len(np.unique(x[~np.isnan(x)])) > MAX_FEW_LEVELS}
    names = [*islice(columns, MAX_PAIRED_COLUMNS)]
    if len(names) < 2:
        return None
    labelled = ~np.isnan(y)
    x, event = np.stack([columns[name] for name in names], 1)[labelled], y[labelled] == 1
    if min(event.sum(), (~event).sum()) < MIN_ROWS_PER_LEVEL:
        return None
    threshold, pairs = None, set[tuple[int, int]]()
    with np.errstate(all="ignore"):
        for pair, text, values in _find_separations(x, event):
            pairs.add(pair)
            if len(pairs) > MAX_SEPARATING_PAIRS or any(set(pair).isdisjoint(other) for other in pairs):
                return None
            if threshold is None and is_dense(values, event):
                first, second = (names[k] for k in pair)
                threshold = (first, second), text.format(first, second)
    return threshold


def _find_separations(x: Floats, event: Flags) -> Iterator[tuple[tuple[int, int], str, Floats]]:
    """Yield each pair of columns of ``[N, p]`` with a formula that separates the classes, and the formula's values."""
    classes = np.flatnonzero(event), np.flatnonzero(~event)
    (few, few_event), (more, more_event) = (
        (x[probe], event[probe]) for count in PROBE_ROWS for probe in [np.concatenate([c[:count] for c in classes])]
    )
    for k in range(x.shape[1] - 1):
        for text, formula in PAIR_FORMULAS.items():
            likely = is_separated(formula(few[:, k, None], few[:, k + 1 :]), few_event)
            for other in (np.flatnonzero(likely) + k + 1).tolist():
                if is_separated(formula(more[:, k], more[:, other]), more_event):
                    values = formula(x[:, k], x[:, other])
                    if is_threshold(values, event):
                        yield (k, other), text, values


def is_threshold(values: Floats, event: Flags) -> bool:
    """Return True if a threshold on values ``[N]`` gives the class in every row, and there are enough rows."""
    here = ~np.isnan(values)
    rare = min(int(event[here].sum()), int((~event[here]).sum()))
    return bool(
        here.sum() >= MIN_SEPARATED_ROWS and rare >= MIN_ROWS_PER_LEVEL and is_separated(values[here], event[here])
    )


def is_dense(values: Floats, event: Flags) -> bool:
    """Return True if both classes have many rows near the threshold that separates values ``[N]``.

    A threshold in a definition usually cuts one distribution. Classes that differ by themselves have few rows there.
    """
    lower, upper = values[~event], values[event]
    if np.nanmin(upper) < np.nanmin(lower):
        lower, upper = upper, lower
    cut = (np.nanmax(lower) + np.nanmin(upper)) / 2
    distances = [np.sort(np.abs(part[~np.isnan(part)] - cut)) for part in (lower, upper)]
    count = min(map(len, distances))
    near, far = int(NEAR_SHARE * count), int(FAR_SHARE * count)
    return all(part[near] <= MAX_NEAR_DISTANCE * part[far] for part in distances)


def is_separated(values: Floats, event: Flags) -> Flags:
    """Return True for each column of values ``[N, ...]`` whose classes do not overlap. NaN is ignored."""
    if event.all() or not event.any():
        return np.zeros(values.shape[1:], bool)
    ends = [(np.fmin.reduce(part), np.fmax.reduce(part)) for part in (values[~event], values[event])]
    return np.asarray((ends[0][1] < ends[1][0]) | (ends[1][1] < ends[0][0]))
