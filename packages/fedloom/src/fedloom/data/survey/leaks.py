"""Columns that leak an outcome: by their values, by their order, for one class, at one client, or by missing cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.data.survey.facts import MAX_FEW_LEVELS, MIN_ROWS_PER_LEVEL, SCORE_BINS, group_equal_sizes

LEAK_SHARE = 0.995
"""Minimum AUROC or R2 at which a single column is considered to leak the target, like a fact recorded after it."""
MIN_CLIENT_ROWS = 20
"""Minimum number of rows at a client for which missing cells are compared with classes."""
MAX_CHECKED_CLIENTS = 50
MIN_ORDERED_ROWS = 100
"""Minimum number of rows at which groups whose targets do not overlap are considered a leak. If there are fewer rows,
they may be due to the design of an experiment, such as load steps in a test of a few parts."""
MIN_EQUAL_CLIENTS = 4
"""Minimum number of clients for which equal means cannot be due to chance."""
MAX_PAIRED_COLUMNS, PAIRED_ROWS = 200, 64
"""Maximum number of numeric columns whose pairs are compared with a target, and number of rows in the first comparison.
"""
PAIR_TOLERANCE = 5e-3
"""Maximum standard deviation, relative to that of the target, of its difference from the sum of two columns. Sums of
rounded numbers reach it, whereas a measurement error of a part in a hundred does not."""
EQUAL_SHARE = 1 - 1e-9
"""Squared correlation above which two numbers per client are considered equal up to their unit: means of float64
numbers have relative differences of about 1e-15, whereas columns that are merely similar differ by much more than
1e-9."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class ReadColumn(NamedTuple):
    """Column of a table as it was read, without conversion.

    Attributes:
        values: numbers ``[N]``, or codes of the levels. Missing values are NaN.
        names: names of the levels. It is empty if the column is numeric.
    """

    values: Floats
    names: tuple[str, ...] = ()

    def scored(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], Floats | None]:
        """Return the groups and the numbers of some rows, as arguments for `fedloom.data.by_site.score_groups`."""
        part = self.values[rows]
        if self.names:
            return np.nan_to_num(part, nan=len(self.names)).astype(np.int64), None
        if len(np.unique(part)) > SCORE_BINS:
            return group_equal_sizes(part), part
        return np.unique(part, return_inverse=True)[1].astype(np.int64), part

    def counts(self) -> dict[str, int]:
        """Return the number of rows for each level that occurs."""
        rows = np.bincount(self.values[~np.isnan(self.values)].astype(int), minlength=len(self.names))
        return {name: int(k) for name, k in zip(self.names, rows, strict=True) if k}


def find_leaks(
    features: Mapping[str, ReadColumn], of: str, target: ReadColumn, task: str, users: ReadColumn | None, rows: Ints
) -> Iterator[str]:
    """Yield notes on features that leak an outcome.

    Args:
        features: features, keyed by name.
        of: name of the outcome.
        target: column of the outcome.
        task: "classification" or "regression".
        users: client of each row. None if no column identifies the clients.
        rows: indices of the rows to check.
    """
    from fedloom.data.by_site import score_groups  # which imports scipy.stats, slowly

    y = target.values[rows]
    if task == "regression":
        yield from _find_sums(features, of, y, rows)
    for name, column in features.items():
        figure = score_groups(*column.scored(rows), y, task, LEAK_SHARE)
        how = figure.text if figure.value >= LEAK_SHARE else ""
        if not how and task == "regression":
            how = _describe_step_function(column, y, rows)
        if not how and task == "classification" and len(target.names) > 2:
            how = _describe_marked_class(column.values[rows], y, target.names)
        if how:
            yield (
                f"column {name!r} alone predicts {of!r} almost perfectly ({how}), like facts recorded "
                "afterwards. Unless it is known beforehand, name it in drop"
            )
        elif users is not None:
            yield from _find_client_leaks(name, column, of, target, task, users, rows)
    if users is not None and task == "classification":
        figure = score_groups(*users.scored(rows), y, task, LEAK_SHARE)
        if figure.value >= LEAK_SHARE:
            yield (
                f"the client alone predicts {of!r} almost perfectly ({figure.text}), because nearly every "
                "client has only one class"
            )


def _find_sums(features: Mapping[str, ReadColumn], of: str, y: Floats, rows: Ints) -> Iterator[str]:
    """Yield a note on each pair of columns whose sum or difference is the target, apart from rounding."""
    numeric = {n: c.values[rows] for n, c in features.items() if not c.names}
    names = [n for n, x in numeric.items() if 2 * np.isnan(x).sum() < len(x) and np.nanstd(x) > 0]
    if not 2 <= len(names) <= MAX_PAIRED_COLUMNS:
        return
    x = np.stack([numeric[n] for n in names], 1)
    here = ~np.isnan(x).any(1) & ~np.isnan(y)
    x, y = x[here], y[here]
    if len(y) < MIN_CLIENT_ROWS or y.std() == 0:
        return
    some = np.unique(np.linspace(0, len(y) - 1, PAIRED_ROWS).astype(int))
    limit = PAIR_TOLERANCE * y.std()
    alone = np.abs(np.stack([y - x.T, y + x.T])).std(2).min(0) <= limit  # has its own note
    for first in np.flatnonzero(~alone).tolist():
        for sign, other in ((1, "+"), (-1, "-")):
            rest = y[some, None] - x[some, first, None] - sign * x[some]
            for second in np.flatnonzero((rest.std(0) <= 2 * limit) & ~alone).tolist():
                if second == first or (sign > 0 and second < first):
                    continue
                if (y - x[:, first] - sign * x[:, second]).std() <= limit:
                    yield (
                        f"columns {names[first]!r} and {names[second]!r} together give {of!r} "
                        f"({names[first]} {other} {names[second]}), like facts recorded afterwards. Unless both are "
                        "known beforehand, name them in drop"
                    )


def _describe_step_function(column: ReadColumn, y: Floats, rows: Ints) -> str:
    """Return a description of how a column determines the target as a step function, or "" if it does not."""
    x = column.values[rows]
    here = ~np.isnan(x) & ~np.isnan(y)
    x, y = x[here], y[here]
    codes, counts = np.unique(x, return_inverse=True, return_counts=True)[1:]
    if (
        len(counts) < 2
        or len(x) < max(MIN_ORDERED_ROWS, MIN_ROWS_PER_LEVEL * len(counts))
        or len(np.unique(y)) < MAX_FEW_LEVELS
    ):
        return ""
    order = np.argsort([y[codes == k].mean() for k in range(len(counts))])
    ends = [(y[codes == k].min(), y[codes == k].max()) for k in order.tolist()]
    apart = all(before[1] <= after[0] for before, after in pairwise(ends))
    return (
        "its groups follow each other without an overlap" if apart and np.sort(counts)[-2] >= MIN_ROWS_PER_LEVEL else ""
    )


def _describe_marked_class(x: Floats, y: Floats, names: tuple[str, ...]) -> str:
    """Return a description of how a column with two levels exactly identifies one class, or "" if it does not."""
    here = ~np.isnan(x) & ~np.isnan(y)
    levels = np.unique(x[here])
    if len(levels) != 2:
        return ""
    one = x[here] == levels[1]
    for code, name in enumerate(names):
        inside = y[here] == code
        if MIN_ROWS_PER_LEVEL <= inside.sum() < len(inside) and ((one == inside).all() or (one != inside).all()):
            return f"it is {'' if (one == inside).all() else 'not '}{levels[1]:g} exactly where that is {name!r}"
    return ""


def _find_client_leaks(
    name: str, column: ReadColumn, of: str, target: ReadColumn, task: str, users: ReadColumn, rows: Ints
) -> Iterator[str]:
    """Yield notes on a feature that leaks an outcome at a single client, or equals each client's mean outcome."""
    x, y, owner = column.values[rows], target.values[rows], users.values[rows]
    clients = np.unique(owner[~np.isnan(owner)])
    if not 2 <= len(clients) <= MAX_CHECKED_CLIENTS:
        return
    missing = np.isnan(x)
    if task == "classification" and missing.any():
        for client in clients.tolist():
            here = (owner == client) & ~np.isnan(y)
            few = np.unique(y[here], return_counts=True)[1]
            if len(few) > 1 and here.sum() >= MIN_CLIENT_ROWS and np.sort(few)[0] >= MIN_ROWS_PER_LEVEL / 2:
                for code in np.unique(y[here]).tolist():
                    if (missing[here] == (y[here] == code)).all():
                        yield (
                            f"column {name!r} is missing at {users.names[int(client)]!r} exactly if "
                            f"{of!r} is {target.names[int(code)]!r}, and a missing cell is a feature. "
                            "Name it in drop"
                        )
                        return
    if len(clients) < MIN_EQUAL_CLIENTS or column.names or missing.any():
        return
    first = np.array([x[owner == client][0] for client in clients])
    if not all((x[owner == c] == v).all() for c, v in zip(clients, first, strict=True)) or not np.ptp(first) > 0:
        return
    whole = ~np.isnan(target.values)
    for code in range(len(target.names)) if target.names else [None]:
        numbers = target.values if code is None else (target.values == code).astype(float)
        means = np.array([numbers[whole & (users.values == c)].mean() for c in clients])
        if np.ptp(means) > 0 and np.corrcoef(first, means)[0, 1] ** 2 >= EQUAL_SHARE:
            yield (
                f"column {name!r} is the mean of {of!r} by client, including test rows, so scores are "
                "too good. Name it in drop"
            )
            return
