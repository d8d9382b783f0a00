"""Detection of binary targets that were computed from columns with a threshold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, islice

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
MAX_PAIRED_COLUMNS, MAX_TRIPLED_COLUMNS = 200, 30
"""Maximum numbers of columns in the searches for formulas of two and of three columns."""
MAX_SEPARATING_SETS = 3
"""Maximum number of sets of columns that separate the classes. If more do, the classes differ widely by themselves."""
TERM_COUNTS = range(4, 7)
"""Numbers of terms of long sums and products."""
MIN_ROWS_PER_COLUMN = 5
"""Minimum number of rows per column for choosing the terms of a long sum or product."""
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
TRIPLE_FORMULAS: Mapping[str, Callable[[Floats, Floats, Floats], Floats]] = {
    "{0} + {1} + {2}": lambda a, b, c: a + b + c,
    "{0} + {1} - {2}": lambda a, b, c: a + b - c,
    "{0} - {1} + {2}": lambda a, b, c: a - b + c,
    "{1} + {2} - {0}": lambda a, b, c: b + c - a,
    "{0} * {1} * {2}": lambda a, b, c: a * b * c,
    "{0} * {1} / {2}": lambda a, b, c: a * b / c,
    "{0} * {2} / {1}": lambda a, b, c: a * c / b,
    "{1} * {2} / {0}": lambda a, b, c: b * c / a,
}
"""Formulas of three columns that are compared with a threshold."""


def find_threshold(numbers: Mapping[str, Floats], y: Floats) -> tuple[tuple[str, ...], str] | None:
    """Return columns and a formula whose values, compared with a threshold, give the class of every row.

    Formulas of two and of three columns are compared first, and then sums and products of more columns. The factors of
    sums are 1 or -1.

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
    with np.errstate(all="ignore"):
        for search in (_find_pairs, _find_triples, _find_long_formulas):
            threshold, sets = None, set[tuple[int, ...]]()
            for places, text, values in search(x, event):
                sets.add(places)
                if len(sets) > MAX_SEPARATING_SETS or any(set(places).isdisjoint(other) for other in sets):
                    return None
                if threshold is None and is_dense(values, event):
                    terms = tuple(names[k] for k in places)
                    threshold = terms, text.format(*terms)
            if sets:
                return threshold
    return None


Separation = tuple[tuple[int, ...], str, Floats]
"""Places of columns that separate the classes, their formula, and its values ``[N]``."""


def _find_pairs(x: Floats, event: Flags) -> Iterator[Separation]:
    """Yield each pair of columns of ``[N, p]`` with a formula that separates the classes."""
    return _find_separations(x, event, [(k,) for k in range(x.shape[1] - 1)], PAIR_FORMULAS)


def _find_triples(x: Floats, event: Flags) -> Iterator[Separation]:
    """Yield three columns of ``[N, p]`` with a formula that separates the classes."""
    some = range(min(x.shape[1], MAX_TRIPLED_COLUMNS) - 1)
    return _find_separations(x[:, :MAX_TRIPLED_COLUMNS], event, [*combinations(some, 2)], TRIPLE_FORMULAS)


def _find_separations(
    x: Floats, event: Flags, firsts: Sequence[tuple[int, ...]], formulas: Mapping[str, Callable[..., Floats]]
) -> Iterator[Separation]:
    """Yield formulas that separate the classes, of the first columns and of any later column of ``[N, p]``."""
    classes = np.flatnonzero(event), np.flatnonzero(~event)
    (few, few_event), (more, more_event) = (
        (x[probe], event[probe]) for count in PROBE_ROWS for probe in [np.concatenate([c[:count] for c in classes])]
    )
    for first in firsts:
        start = first[-1] + 1
        for text, formula in formulas.items():
            likely = is_separated(formula(*(few[:, k, None] for k in first), few[:, start:]), few_event)
            for other in (np.flatnonzero(likely) + start).tolist():
                places = (*first, other)
                if is_separated(formula(*more.T[[*places]]), more_event):
                    values = formula(*x.T[[*places]])
                    if is_threshold(values, event):
                        yield places, text, values


def _find_long_formulas(x: Floats, event: Flags) -> Iterator[Separation]:
    """Yield a sum or product of many columns of ``[N, p]`` that separates the classes.

    The terms are the columns with the largest coefficients in a linear regression of the class, after logarithms if
    the formula is a product.
    """
    for sign, values in (("+-", x), ("*/", np.where(x > 0, np.log(x), np.nan))):
        used = np.flatnonzero(np.isfinite(values).all(0) & (values.std(0) > 0))
        if len(used) < TERM_COUNTS.start or len(x) < MIN_ROWS_PER_COLUMN * len(used):
            continue
        spread = values[:, used].std(0)
        scaled = (values[:, used] - values[:, used].mean(0)) / spread
        weights = np.linalg.lstsq(scaled, event - event.mean())[0]
        order = np.argsort(-np.abs(weights))
        for count in (count for count in TERM_COUNTS if count <= len(used)):
            places = np.sort(order[:count])
            signs = np.sign(weights[places]) * np.sign(weights[places[0]])
            total = values[:, used[places]] @ signs
            if is_threshold(total, event):
                terms = [f" {sign[int(one < 0)]} {{{k}}}" for k, one in enumerate(signs)]
                yield tuple(used[places].tolist()), "".join(terms)[3:], total
                break


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
