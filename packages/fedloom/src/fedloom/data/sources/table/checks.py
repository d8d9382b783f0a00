"""Checks of a table that are made after all its cells have been read, and yield errors and notes."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.sources.table.cells import MAX_SHOWN_LEVELS, Cells, short_cell
from fedloom.data.sources.table.levels import AgreedColumnConverter, natural_sort_key, similar_levels_text
from fedloom.data.survey.facts import MISSING_TOKENS, SENTINEL_PATTERN
from fedloom.data.tables import Table, is_number
from fedloom.errors import DataError, capitalize
from fedloom.formats import shorten_list

MAX_CLASS_NUMBERS = 30
"""Number of distinct integers in a label above which a note suggests that the task may be a regression."""
MIN_CHECKED_ROWS = 10
"""Minimum number of rows in a table for notes on constant columns and outliers."""
MAX_NOTED_NEGATIVE_SHARE = 0.05
"""A note is added if at most this fraction of a column's numbers is negative."""
OUTLIER_WIDTHS = 1000
"""Minimum distance of an outlier from the interquartile range of its column, in units of that range."""
THREE_DIGITS_PATTERN, SHORT_FRACTION_PATTERN = re.compile(r"[-+]?[1-9]\d{0,2}\.\d{3}"), re.compile(r"[-+]?\d{1,3}")
CODE_PATTERN = re.compile(r"0\d+|\d+[eE]\d+")
"""Pattern of digits that are probably a code: with a leading zero, or with an exponent but no sign or period."""
ENTRY_NAME_PATTERN = re.compile(
    r"t?start(_?time)?|time_?[01]|entry(_?(time|age))?|t_?entry|(left_?)?trunc\w*", re.IGNORECASE
)
"""Pattern of column names for the time when a subject enters a study."""
Coded = tuple[NDArray[np.float64], tuple[str, ...]]
"""Codes of all rows ``[N]``, which are NaN for missing cells, and the levels."""


def rename_hint(twice: Sequence[str]) -> str:
    """Return advice on how to handle columns that have the same name."""
    if all(map(is_number, twice)):
        return "if the first row is not a header, set header = false. Otherwise rename one"
    return "set skip to the number of lines above the header, or name every column" if "" in twice else "rename one"


def check_duplicate_columns(where: str, names: Sequence[str]) -> None:
    """Raise an error if a header contains the same name twice.

    Raises:
        DataError: two columns have the same name.
    """
    plain = [" ".join(unicodedata.normalize("NFKC", name).split()) for name in names]
    counts = Counter(plain)
    if twice := sorted(name for name, same in zip(names, plain, strict=True) if counts[same] > 1 and name != same):
        raise DataError(
            f"{where}: columns {', '.join(map(repr, twice))} differ from other columns only in "
            "whitespace. Rename one of them"
        )
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise DataError(
            f"{where}: two columns have the same name: {', '.join(map(repr, twice))}. {capitalize(rename_hint(twice))}"
        )


class SuspectSpellings:
    """Cells in text columns that are read as numbers, although the author of the table may have meant something else.

    Numbers that all have three decimals may contain periods as thousands separators (7.123 for 7,123). Cells such as
    ``007`` and ``1E5`` may be codes.
    """

    def __init__(self) -> None:
        self._codes: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}
        self._examples: dict[str, str] = {}
        self._sound = set[str]()

    def add(self, column: str, cells: Cells) -> None:
        """Add cells of a column in which numbers contain a decimal point."""
        examples = self._codes.setdefault(column, [])
        if len(examples) < MIN_CHECKED_ROWS:
            likely = (c for c in cells if isinstance(c, str) and ("e" in c or "E" in c or c.lstrip()[:1] == "0"))
            examples += [c.strip() for c in likely if CODE_PATTERN.fullmatch(c.strip())]
        if column in self._sound:
            return
        for cell in cells:
            if not isinstance(cell, str):
                self._sound.add(column)
                return
            text = cell.strip()
            if THREE_DIGITS_PATTERN.fullmatch(text):
                self._counts[column] = self._counts.get(column, 0) + 1
                self._examples.setdefault(column, text)
            elif not SHORT_FRACTION_PATTERN.fullmatch(text) and is_number(text):
                self._sound.add(column)  # the periods in this column are decimal points
                return

    def notes(self) -> Iterator[str]:
        """Yield notes on columns with such cells."""
        for column, examples in self._codes.items():
            if len(examples) >= MIN_CHECKED_ROWS:
                yield (
                    f"column {column!r}: cells such as {examples[0]} are read as numbers "
                    f"({float(examples[0]):g}). If they are codes, add the column to categorical, or to drop"
                )
        columns = [c for c, count in self._counts.items() if count >= MIN_CHECKED_ROWS and c not in self._sound]
        if columns:
            example = self._examples[columns[0]]
            yield (
                f"{_join_column_names(columns)}: every fraction has three digits, like {example}. If that means "
                f"{example.replace('.', '')}, write the numbers without the dot"
            )


def coded_numbers(values: NDArray[np.float64]) -> Coded:
    """Return numbers ``[N]`` as codes of levels. NaN has no level."""
    has_value = ~np.isnan(values)
    distinct, places = np.unique(values[has_value], return_inverse=True)
    codes = np.full(len(values), np.nan)
    codes[has_value] = places
    return codes, tuple(np.format_float_positional(number, trim="-") for number in distinct)


def count_rows_by_level(column: Coded) -> dict[str, int]:
    """Return the number of rows for each level."""
    codes, levels = column
    counts = np.bincount(codes[~np.isnan(codes)].astype(int), minlength=len(levels))
    return dict(zip(levels, counts.tolist(), strict=True))


def survival_time_errors(
    times: tuple[str, NDArray[np.float64]], events: tuple[str, NDArray[np.float64]], first: int
) -> Iterator[str]:
    """Yield errors for invalid times and events.

    Args:
        times: name of the time column and its numbers ``[N]``, which are NaN for missing cells.
        events: name and numbers of the event column, in the same representation.
        first: number of the first row in messages.
    """
    for (column, values), wrong, allowed in (
        (times, times[1] < 0, "times must be at least 0"),
        (events, ~np.isin(events[1], (0, 1)), "events must be 1, or 0 if the time is censored"),
    ):
        rows = np.nonzero(~np.isnan(values) & wrong)[0]
        if len(rows):
            value = f"{values[rows[0]]:g}"
            cure = "repair them, or add their marker to missing and set unlabelled = 'drop'"
            if column == events[0]:
                cure = (
                    f"if these numbers are causes, event_levels = ['{value}'] counts this cause and censors the "
                    "others. Otherwise, " + cure
                )
            yield (
                f"row {first + int(rows[0])}, column {column!r}: {allowed}, got {value} ({len(rows)} such rows); {cure}"
            )


def find_odd_labels(labels: Mapping[str, NDArray[np.float64]], first: int) -> Iterator[str]:
    """Yield errors for label columns that contain numbers other than 0, 1 and NaN (which marks a missing cell)."""
    for column, values in labels.items():
        rows = np.nonzero(~np.isnan(values) & ~np.isin(values, (0, 1)))[0]
        if len(rows):
            yield (
                f"row {first + int(rows[0])}, column {column!r}: a label must be 1 (present) or 0 (absent), got "
                f"{values[rows[0]]:g} ({len(rows)} such rows). Repair them, or add their marker to missing "
                "and set unlabelled = 'keep' (or 'drop')"
            )


def note_late_entry(
    columns: Mapping[str, NDArray[np.float64]], times: tuple[str, NDArray[np.float64]]
) -> Iterator[str]:
    """Yield notes on columns that may contain the start of the time at risk, which survival tasks assume to be 0.

    Args:
        columns: numbers ``[N]``, which are NaN for missing cells, keyed by column name.
        times: name of the time column and its numbers ``[N]``, which are NaN for missing cells.
    """
    for name, values in columns.items():
        rows = ~np.isnan(values) & ~np.isnan(times[1])
        if not ENTRY_NAME_PATTERN.fullmatch(name) or not rows.any():
            continue
        if bool((values[rows] < times[1][rows]).all()) and bool((values[rows] >= 0).all()) and bool((values > 0).any()):
            yield (
                f"column {name!r} seems to be the start of the time at risk (late entry), but survival tasks count "
                f"every time from 0. Give the time since entry, {times[0]!r} minus {name!r}, as the label. Or add "
                f"{name!r} to drop to count from 0, or to include if it means something else"
            )


def agreed_range_errors(table: Table, x: NDArray[np.float64]) -> list[str]:
    """Return errors for columns whose rows ``[N, p]`` are outside the agreed range, for example in a different unit."""
    if not x.size:
        return []
    nothing = torch.full((len(table.columns), 1), torch.nan, dtype=torch.float64)
    cure = " Convert it with factors = { NAME = FACTOR }, add its marker to missing, or agree on another range"
    return [sentence + cure for sentence in table.note_outliers(torch.from_numpy(x), nothing)]


def unknown_level_errors(agreed: Mapping[str, AgreedColumnConverter], rows: int) -> list[str]:
    """Return errors for agreed columns in which most cells have an unknown level, e.g. due to different spelling."""
    return [
        f"column {name!r}: {column.unknown.total()} of {rows} cells contain no agreed level "
        f"({column.listed_levels}). Correct them, or agree on these levels too"
        for name, column in agreed.items()
        if column.unknown.total() > rows / 2
    ]


def note_filled_cells(agreed: Mapping[str, AgreedColumnConverter]) -> Iterator[str]:
    """Yield notes on filled cells if the agreement expects no missing cells or unknown levels."""
    for name, column in agreed.items():
        unknown = column.unknown.total()
        if unknown:
            yield (
                f"column {name!r}: {unknown} cells with levels outside the agreement are filled: {column.listed_levels}"
            )
        if column.filled > unknown and not column.column.flag:
            yield (
                f"column {name!r}: {column.filled - unknown} cells are missing and filled, although the "
                "agreement allows no missing cells"
            )


def note_range_excess(
    agreed: Mapping[str, AgreedColumnConverter], columns: Mapping[str, NDArray[np.float64]]
) -> Iterator[str]:
    """Yield notes on numbers outside the agreed range, such as an undeclared missing-value code."""
    for name, column in agreed.items():
        if column.column.range is not None:
            (low, high), values = column.column.range, columns[name]
            outside = values[(values < low) | (values > high)]
            if len(outside):
                yield (
                    f"column {name!r}: {len(outside)} of {len(values)} numbers are outside {low:g} to "
                    f"{high:g}, for example {outside[0]:g}. If they mean missing, add them to missing"
                )


def note_doubtful_columns(
    columns: Mapping[str, NDArray[np.float64]], measured: Collection[str], first: int, *, arrays: bool = False
) -> Iterator[str]:
    """Yield notes on columns that are empty or constant, and on extreme outliers.

    Args:
        columns: numbers or codes ``[N]``, which are NaN for missing cells, keyed by column name.
        measured: names of the columns that are searched for outliers.
        first: number of the first row in messages.
        arrays: True if the columns come from an array and therefore do not have their own options. In arrays, negative
            numbers are not reported, even if they are rare.
    """
    useless, wrong = ("leave it out", "leave its row out") if arrays else ("add it to drop", "add it to missing")
    empty, constant, notes = list[str](), list[str](), list[str]()
    for name, values in columns.items():
        ordered = np.sort(values)  # NaN is sorted last
        count = len(ordered) - int(np.isnan(ordered).sum())
        if len(ordered) < MIN_CHECKED_ROWS:
            return
        if not count:
            empty.append(name)
        elif ordered[0] == ordered[-1]:
            constant.append(name)
        elif name in measured and count >= MIN_CHECKED_ROWS:
            low, high = ordered[count // 4], ordered[count - 1 - count // 4]
            below = int((ordered[:count] < 0).sum())
            if not arrays and 0 < below <= MAX_NOTED_NEGATIVE_SHARE * count and ordered[below] > 0:
                row = int(np.nonzero(values < 0)[0][0])
                notes.append(
                    f"row {first + row}, column {name!r}: {values[row]:g} is negative ({below} of "
                    f"{count} numbers are), but all others are positive. Repair it, or {wrong}"
                )
                continue
            limits = low - OUTLIER_WIDTHS * (high - low), high + OUTLIER_WIDTHS * (high - low)
            if low < high and not limits[0] <= ordered[0] <= ordered[count - 1] <= limits[1]:
                rows = np.nonzero((values < limits[0]) | (values > limits[1]))[0]
                more = f" ({len(rows)} such)" if len(rows) > 1 else ""
                notes.append(
                    f"row {first + int(rows[0])}, column {name!r}: {values[rows[0]]:g} is extremely far from the "
                    f"other numbers. Half of them are within {low:g} to {high:g}{more}. Repair it, or {wrong}"
                )
    for what, names in (("every cell is missing", empty), ("the same in every row", constant)):
        if names:
            yield f"{_join_column_names(names)}: {what}, so a model cannot learn from it; {useless}"
    yield from notes


def note_doubtful_levels(coded: Mapping[str, Coded], label: str, subject: str | None = None) -> Iterator[str]:
    """Yield notes on similar levels, on a label with a single class, and on classes without rows.

    Args:
        coded: columns of levels, keyed by column name.
        label: name of the label, which is contained in `coded` if it has classes.
        subject: name of the column of the subjects, or None.
    """
    for name, column in coded.items():
        counts = count_rows_by_level(column)
        if name == subject and (unknown := _unknown_subjects(counts)):
            shown = ", ".join(f"{short_cell(level)} ({counts[level]} rows)" for level in unknown[:MAX_SHOWN_LEVELS])
            yield (
                f"column {name!r}: {shown} may mean that the subject is unknown, but is read as one subject. If so, "
                "remove such rows, or, if no other column contains the value, add it to missing and set unlabelled = "
                "'drop'"
            )
        if same := similar_levels_text(counts):
            yield (
                f"column {name!r} has levels that are written differently but seem the same: {same}. "
                "Write them in one way"
            )
        absent = [level for level, count in counts.items() if not count] if name == label else []
        numbers = [level for level, count in counts.items() if count and np.isfinite(natural_sort_key(level)[0])]
        if name == label and len(numbers) > MAX_CLASS_NUMBERS:
            yield (
                f"the label {name!r} has {len(numbers)} different numbers, and each is read as a class. Set task = "
                "'regression' if they are measurements"
            )
        if name == label and len(counts) - len(absent) == 1:
            here = max(counts, key=lambda level: counts[level])
            yield (
                f"the label {name!r} is {short_cell(here)} in every row, so a model cannot learn from these rows alone"
            )
        elif absent:
            more = " and more" if len(absent) > MAX_SHOWN_LEVELS else ""
            yield f"no row has the label {name!r} = {', '.join(map(short_cell, absent[:MAX_SHOWN_LEVELS]))}{more}"


def _unknown_subjects(counts: Mapping[str, int]) -> list[str]:
    """Return the names of subjects that are common markers of missing cells.

    A number such as -1 or 999, or a marker of at most three letters, which may be initials, must have more than twice
    as many rows as any subject with another name.
    """
    marked = [name for name in counts if name.lower() in MISSING_TOKENS]
    sure = [name for name in marked if len(name) > 3 or not any(map(str.isalnum, name))]
    likely = {*marked} - {*sure} | {name for name in counts if name == "0" or SENTINEL_PATTERN.fullmatch(name)}
    most = max((rows for name, rows in counts.items() if name not in likely and name not in sure), default=0)
    return [*sure, *(name for name in counts if name in likely and counts[name] > 2 * most > 0)]


def _join_column_names(names: Sequence[str]) -> str:
    return f"column{'s'[: len(names) > 1]} {shorten_list([*map(short_cell, names)], MAX_SHOWN_LEVELS)}"
