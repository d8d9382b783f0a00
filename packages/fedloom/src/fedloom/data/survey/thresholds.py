"""Columns from which a target of two classes was computed with a threshold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from fedloom.data.survey.facts import MAX_FEW_LEVELS, MIN_ROWS_PER_LEVEL

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

MIN_SEPARATED_ROWS = 100
"""Minimum number of rows in which classes must be separated without an error.

If neither column predicts the target almost perfectly, noise does not separate that many rows.
"""
PROBE_ROWS = 32
"""Maximum number of rows of each class in the first comparison, which excludes nearly all pairs of columns."""
MAX_PAIRED_COLUMNS = 200
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
    """Return two columns from which a formula and a threshold give the class in every row, and the formula.

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
    probe = np.sort(np.concatenate([np.flatnonzero(event)[:PROBE_ROWS], np.flatnonzero(~event)[:PROBE_ROWS]]))
    with np.errstate(all="ignore"):
        for k, name in enumerate(names[:-1]):
            for text, formula in PAIR_FORMULAS.items():
                likely = is_separated(formula(x[probe, k, None], x[probe, k + 1 :]), event[probe])
                for other in (np.flatnonzero(likely) + k + 1).tolist():
                    if is_threshold(formula(x[:, k], x[:, other]), event):
                        return (name, names[other]), text.format(name, names[other])
    return None


def is_threshold(values: Floats, event: Flags) -> bool:
    """Return True if a threshold on values ``[N]`` gives the class in every row, and there are enough rows."""
    here = ~np.isnan(values)
    rare = min(int(event[here].sum()), int((~event[here]).sum()))
    return bool(
        here.sum() >= MIN_SEPARATED_ROWS and rare >= MIN_ROWS_PER_LEVEL and is_separated(values[here], event[here])
    )


def is_separated(values: Floats, event: Flags) -> Flags:
    """Return True for each column of values ``[N, ...]`` in which the classes do not overlap. NaN is ignored."""
    if event.all() or not event.any():
        return np.zeros(values.shape[1:], bool)
    ends = [(np.fmin.reduce(part), np.fmax.reduce(part)) for part in (values[~event], values[event])]
    return np.asarray((ends[0][1] < ends[1][0]) | (ends[1][1] < ends[0][0]))
