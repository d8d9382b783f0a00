"""Columns that leak an outcome: by their values, by their order, for one class, at one client, or by missing cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.data.survey.derived import (
    LATER_END,
    MAX_SHOWN_TERMS,
    find_formula,
    find_group_leaks,
    find_lag,
    is_function_of,
)
from fedloom.data.survey.facts import MAX_FEW_LEVELS, MIN_ROWS_PER_LEVEL, SCORE_BINS, group_equal_sizes
from fedloom.data.survey.thresholds import find_threshold, is_threshold
from fedloom.data.tables import is_number
from fedloom.formats import shorten_list

LEAK_SHARE = 0.995
"""A single column leaks the target (like a fact recorded after it) if its AUROC or R2 is at least this high."""
MIN_CLIENT_ROWS = 20
"""Minimum number of rows at a client for comparing missing cells with classes."""
MAX_CHECKED_CLIENTS = 50
MIN_ORDERED_ROWS = 100
"""Minimum number of rows before groups with separate targets count as a leak.

With fewer rows, such groups may be due to the design of an experiment, such as load steps in a test of a few parts.
"""
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
    features: Mapping[str, ReadColumn], of: str, target: ReadColumn, task: str, users: ReadColumn | None, rows: Ints,
    ordered: bool = False,
) -> Iterator[str]:  # fmt: skip
    """Yield notes on features that leak an outcome.

    Args:
        features: features, keyed by name.
        of: name of the outcome.
        target: column of the outcome.
        task: "classification" or "regression".
        users: client of each row. None if no column identifies the clients.
        rows: indices of the rows to check.
        ordered: True if later rows are test rows, so that features may contain earlier outcomes.
    """
    from fedloom.data.by_site import score_groups  # imports scipy.stats, which is slow

    y = target.values[rows]
    numbers = {name: c.values for name, c in features.items() if not c.names}
    if task == "regression":
        terms, formula = find_formula({name: values[rows] for name, values in numbers.items()}, y)
        if terms:
            yield (
                f"columns {shorten_list([*map(repr, terms)], MAX_SHOWN_TERMS)} together give {of!r}"
                f"{f' ({formula})' if formula else ''}, so they may be recorded after the outcome. Unless all of them "
                "are known beforehand, add them to drop"
            )
        numbers = {name: values for name, values in numbers.items() if name not in terms}
    binary, labelled = task == "classification" and len(target.names) == 2, ~np.isnan(y)
    for name, column in features.items():
        figure = score_groups(*column.scored(rows), y, task, LEAK_SHARE)
        how = figure.text if figure.value >= LEAK_SHARE else ""
        if not how and task == "regression":
            how = _describe_step_function(column, y, rows)
        if not how and binary and not column.names and is_threshold(column.values[rows][labelled], y[labelled] == 1):
            how = "a threshold gives the class of every row with a value"
        if how:
            numbers.pop(name, None)
            yield f"column {name!r} alone predicts {of!r} almost perfectly ({how}){LATER_END}"
        elif is_function_of(column.values[rows], y, LEAK_SHARE):
            numbers.pop(name, None)
            yield f"column {name!r} follows from {of!r}: rows with the same {of!r} have the same {name!r}{LATER_END}"
        elif lag := find_lag(column.values, _convert_target(column, target)):
            numbers.pop(name, None)
            where = f"{abs(lag)} rows {'below' if lag > 0 else 'above'}"
            where = {1: "next row", -1: "previous row"}.get(lag, f"row {where}")
            if lag > 0:
                yield f"column {name!r} contains {of!r} of the {where}{LATER_END}"
            elif not ordered:
                yield (
                    f"column {name!r} contains {of!r} of the {where}, so training rows contain the outcomes of test "
                    "rows. To test on later rows, set order to a column of dates. Otherwise, add it to drop"
                )
        elif users is not None:
            yield from _find_client_leaks(name, column, of, target, task, users, rows)
    if binary and (threshold := find_threshold({name: values[rows] for name, values in numbers.items()}, y)):
        names, formula = threshold
        numbers = {name: values for name, values in numbers.items() if name not in names}
        every, has = ("both", "both are") if len(names) == 2 else ("all of them", "all of them are")
        yield (
            f"columns {', '.join(map(repr, names[:-1]))} and {names[-1]!r} together give the class {of!r} of every row "
            f"that has {every} (a threshold on {formula}), so they may be recorded after the outcome. Unless {has} "
            "known beforehand, add them to drop"
        )
    whole = target.values
    codes = range(len(target.names))[-1 if len(target.names) == 2 else 0 :][:MAX_FEW_LEVELS]
    marks = [np.where(np.isnan(whole), np.nan, whole == code) for code in codes] if target.names else [whole]
    for name, how in find_group_leaks(of, numbers, _groupings(features, users), marks):
        yield f"column {name!r} {how}"
    if users is not None and task == "classification":
        figure = score_groups(*users.scored(rows), y, task, LEAK_SHARE)
        if figure.value >= LEAK_SHARE:
            yield (
                f"the client alone predicts {of!r} almost perfectly ({figure.text}), because nearly every "
                "client has only one class"
            )


def _convert_target(column: ReadColumn, target: ReadColumn) -> Floats:
    """Return a target in the numbers of a column, or in the codes of its levels. Other values are NaN."""
    if not target.names:
        return np.full(len(target.values), np.nan) if column.names else target.values
    levels = {name: float(k) for k, name in enumerate(column.names)}
    codes = [
        levels.get(name, np.nan) if column.names else float(name) if is_number(name) else np.nan
        for name in target.names
    ]
    places = np.nan_to_num(target.values, nan=len(codes)).astype(int)
    numbers: Floats = np.array([*codes, np.nan])[places]
    return numbers


def _groupings(features: Mapping[str, ReadColumn], users: ReadColumn | None) -> dict[str, Floats]:
    """Return the columns that may group the rows: the client, texts, and integers that repeat."""
    groups = {"client": users.values} if users is not None else {}
    groups |= {name: c.values for name, c in features.items() if c.names}
    for name, column in features.items():
        here = column.values[~np.isnan(column.values)]
        if not column.names and (here == np.floor(here)).all() and 2 < len(np.unique(here)) <= len(here) / 3:
            groups[name] = column.values
    return groups


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


def _find_client_leaks(
    name: str, column: ReadColumn, of: str, target: ReadColumn, task: str, users: ReadColumn, rows: Ints
) -> Iterator[str]:
    """Yield a note on a feature whose missing cells mark a class at a single client."""
    missing, y, owner = np.isnan(column.values[rows]), target.values[rows], users.values[rows]
    clients = np.unique(owner[~np.isnan(owner)])
    if task != "classification" or not missing.any() or not 2 <= len(clients) <= MAX_CHECKED_CLIENTS:
        return
    for client in clients.tolist():
        here = (owner == client) & ~np.isnan(y)
        few = np.unique(y[here], return_counts=True)[1]
        if len(few) > 1 and here.sum() >= MIN_CLIENT_ROWS and np.sort(few)[0] >= MIN_ROWS_PER_LEVEL / 2:
            for code in np.unique(y[here]).tolist():
                if (missing[here] == (y[here] == code)).all():
                    yield (
                        f"column {name!r} is missing at {users.names[int(client)]!r} exactly if {of!r} is "
                        f"{target.names[int(code)]!r}, and models see which cells are missing. Add it to drop"
                    )
                    return
