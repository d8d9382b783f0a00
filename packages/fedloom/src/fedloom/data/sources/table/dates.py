"""Conversion of dates to features: days since another date in the same row, or since a fixed date."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from fedloom.data.sources.table.cells import Cells, ColumnPiece, Problems, is_missing
from fedloom.data.sources.table.designs import ZONE_PATTERN, parse_seconds
from fedloom.errors import ConfigError
from fedloom.hints import suggest_nearest

SECONDS_PER_DAY = 86400.0
MIDNIGHT_PATTERN = re.compile(r"[ T]00:00(:00(\.0+)?)?$")
"""Pattern of the time of a date in pandas and other libraries, whose dates always have a time."""
DATE_HINT = "write dates as 2024-09-01 or 1.9.2024, or add the cell to missing"


def parse_days(cell: object) -> float | None:
    """Return the number of days since 1970 for a date or time, or for text that contains one.

    For any other cell, return None.

    >>> from datetime import date
    >>> parse_days("1970-01-02"), parse_days("3.1.1970"), parse_days(date(1970, 1, 2)), parse_days("1/2/1970")
    (1.0, 2.0, 1.0, None)
    """
    seconds = parse_seconds(cell)
    return None if seconds is None else seconds / SECONDS_PER_DAY


def check_dates(days_since: Mapping[str, str], names: Sequence[str], where: str) -> None:
    """Raise an error if a date column does not exist, or if its start is neither a column nor a date.

    Raises:
        ConfigError: a date column does not exist, or its start is invalid.
    """
    for column, start in days_since.items():
        if column not in names:
            raise ConfigError(f"{where}: days_since: no column {column!r}; {suggest_nearest(column, names)}")
        if start not in names and parse_days(start) is None:
            raise ConfigError(
                f"{where}: days_since: {start!r} is neither a column nor a date such as 2024-09-01; "
                f"{suggest_nearest(start, names)}"
            )


def replace_dates(
    cells: Iterator[ColumnPiece], days_since: Mapping[str, str], markers: tuple[str, ...], problems: Problems
) -> Iterator[ColumnPiece]:
    """Yield pieces of columns with numbers of days in place of dates.

    Date columns are converted last, because their start may be in a column that comes later in the file.

    Args:
        cells: pieces of all columns.
        days_since: start of the days of each date column, which is another column or a date.
        markers: texts that mark missing cells.
        problems: collector for cells that are not dates.

    Yields:
        The pieces. If the date or its start is missing, the cell is missing.
    """
    held: dict[str, list[object]] = {name: [] for pair in days_since.items() for name in pair}
    for piece in cells:
        if piece.column in held:
            held[piece.column] += piece.cells
        if piece.column not in days_since:
            yield piece
    zones = {name: _has_zone(column) for name, column in held.items()}
    for column, start in days_since.items():
        if {*zones[column], *zones.get(start, ())} == {True, False}:
            what = f"column {column!r}: some of its times and of their start {start!r} have a time zone, others do not"
            problems.add("zone", column, what, [None], "use one time zone for all, or dates without times")
    days = {name: _parse_day_column(name, column, markers, problems) for name, column in held.items() if column}
    for column, start in days_since.items():
        begin = days.get(start) or [parse_days(start)] * len(held[column])
        pairs = zip(days.get(column, ()), begin, strict=True)
        yield ColumnPiece(0, column, [None if day is None or first is None else day - first for day, first in pairs])


def _has_zone(cells: Cells) -> set[bool]:
    """Return a set: True if some times in a column have a time zone, False if some have none.

    Plain dates do not count.
    """
    texts = (str(cell).strip() for cell in cells if cell is not None)
    times = (text for text in texts if ":" in text and not MIDNIGHT_PATTERN.search(text))
    return {ZONE_PATTERN.search(text) is not None for text in times}


def _parse_day_column(name: str, cells: Cells, markers: tuple[str, ...], problems: Problems) -> list[float | None]:
    """Return the number of days since 1970 for each cell of a column.

    Cells that are not dates are reported as problems.
    """
    days = [parse_days(cell) for cell in cells]
    missing = is_missing(cells, markers).tolist()
    odd = [k for k, day in enumerate(days) if day is None and not missing[k]]
    if odd:
        what = f"row {problems.first + odd[0]}, column {name!r}: expected a date, got {cells[odd[0]]!r:.60}"
        problems.add("date", name, what, [cells[k] for k in odd], DATE_HINT)
    return [None if gap else day for day, gap in zip(days, missing, strict=True)]
