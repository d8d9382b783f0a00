"""Columns of a table that control splits: subjects, time order, strata, and test rows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from fedloom.data.sources._base import FileSource
from fedloom.data.sources.archive import GrowingRows
from fedloom.data.sources.table.cells import ColumnPiece, short_cell
from fedloom.data.subjects.design import Design
from fedloom.data.survey.facts import infer_time_unit
from fedloom.data.tables import level_name, parse_number
from fedloom.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fedloom.data.sources.table.checks import Coded

TEST_LEVELS = ("1", "1.0", "true", "yes", "test")
"""Default values, in lower case, that mark rows of the test set."""
TRAINING_LEVELS = ("0", "0.0", "false", "no", "train", "training")
"""Levels, in lower case, that mark rows of the training set."""
TRAINING_NAME_PATTERN = re.compile(r"(?<![a-z])(is_?)?(train(ing)?|dev|derivation|learn)(?![a-z])", re.IGNORECASE)
"""Pattern of column names whose values 1 and yes mark training rows."""
YEAR_PATTERN, MONTH_PATTERN = re.compile(r"\d{4}"), re.compile(r"\d{4}-\d{2}")
ZONE_PATTERN = re.compile(r"(Z|[+-]\d{2}:?\d{2})$", re.IGNORECASE)
DOTTED_DATE_PATTERN = re.compile(r"(\d{1,2})\.(\d{1,2})\.(\d{4})")
"""Pattern of a date as day.month.year. Dates with slashes are not read, because either the day or the month may come
first."""
SORTED_DATE_FORMAT = "%Y%m%d", 8
"""Format of dates that are numbers in the order of time, with its number of characters."""
UNSORTED_DATE_FORMATS = ("%d%m%Y", 8), ("%m%d%Y", 8), ("%m.%Y", 7)
"""Formats of dates that are numbers but not in the order of time, because the year comes last."""
FIRST_YEAR, LAST_YEAR = 1900, 2100
MIN_DISTINCT_TIMES = 5
"""Minimum number of distinct times for judging their form or distance."""
FAR_TIME_RATIO = 5.0
"""A repeated first or last time may mark a missing time if its distance from all other times is at least this multiple
of their span."""
ORDER_HINT = (
    "write numbers, or dates as 2024-09-01 or 1.9.2024, in every row. To leave rows without a time out, add their "
    "cells to missing and set unlabelled = 'drop'"
)


class DesignOptions(FileSource):
    """Options of a table that control how the table is split."""

    subject: str | None = Field(
        default=None,
        description="column that identifies the subject of each row, such as a patient. It is not used as a feature, "
        "and each split keeps all rows of a subject together",
    )
    order: str | None = Field(
        default=None,
        description="column of numbers or dates that orders the rows: earlier rows are used for training, later rows "
        "for testing. The column is not used as a feature",
    )
    strata: tuple[str, ...] = Field(
        default=(),
        description="columns by which splits and folds are stratified. They can be features or the target",
    )
    test_column: str | None = Field(
        default=None,
        description="column that marks test rows (with 1, true, yes or test). It is not used as a feature",
    )
    test_levels: tuple[str, ...] = Field(
        default=(), description="values of test_column that mark test rows, such as a hospital name or a year"
    )
    test_since: float | str | None = Field(
        default=None,
        description="first number or date of the `order` column in the test set, such as 2024-09-01",
    )

    @field_validator("test_since", mode="before")
    @classmethod
    def _as_text(cls, since: object) -> object:
        """Return a date from a TOML file as text."""
        return since.isoformat() if isinstance(since, date) else since

    @field_validator("strata", "test_levels", mode="before")
    @classmethod
    def _one_or_more(cls, names: object) -> object:
        """Return a single name as a tuple, and integers (such as years) as text."""
        several = names if isinstance(names, list | tuple) else (names,)
        return tuple(level_name(name) if isinstance(name, int) else name for name in several)

    @model_validator(mode="after")
    def _design_fits(self) -> DesignOptions:
        if self.test_levels and self.test_column is None:
            raise ValueError("test_levels lists levels of test_column, but test_column is not set. Set test_column")
        if self.test_since is not None and self.order is None and getattr(self, "agreement", None) is None:
            raise ValueError("`test_since` needs `order`, the column with the time of each row. Set `order`")
        if self.test_since is not None and self.test_column is not None:
            raise ValueError("test_since and test_column both choose the test set. Omit one of them")
        check_roles({name: getattr(self, name, None) for name in ("subject", "order", "test_column", "client_column")})
        return self

    @property
    def chosen(self) -> dict[str, Any]:
        """Options that are set, including options of an agreement.

        The options of an agreement take precedence over other options.
        """
        agreed = getattr(self, "agreement", None)
        values = {name: getattr(self, name) for name in DesignOptions.option_names()}
        if agreed is not None:
            values |= {name: value for name in values if (value := getattr(agreed, name)) is not None}
        return {name: value for name, value in values.items() if value is not None and value != ()}

    def absent(self, names: Sequence[str]) -> dict[str, Any]:
        """Return options for a new table, excluding columns that are not among the given names.

        Test rows are no longer marked, because they exist only in the old table.
        """
        unset: dict[str, Any] = {"test_column": None, "test_levels": (), "test_since": None}
        unset |= {role: None for role in ("subject", "order") if getattr(self, role) not in names}
        return unset | {"strata": tuple(column for column in self.strata if column in names)}

    @staticmethod
    def option_names() -> tuple[str, ...]:
        """Return the names of these options."""
        return tuple(name for name in DesignOptions.model_fields if name not in FileSource.model_fields)


def check_roles(columns: Mapping[str, str | None]) -> None:
    """Raise an error if a column has two roles.

    Raises:
        ValueError: two options name the same column.
    """
    role_of = dict[str, str]()
    for role, column in columns.items():
        if column is not None and column in role_of:
            raise ValueError(
                f"{role_of[column]} and {role} are both {column!r}, but a column can have only one "
                "role. Name a different column, or omit one of them"
            )
        if column is not None:
            role_of[column] = role


class OrderTimes(NamedTuple):
    """Times of the rows, both as plain numbers and as seconds since 1970.

    A cell is NaN if it cannot be read as a number (for the seconds: as a date).
    """

    numbers: GrowingRows
    seconds: GrowingRows


class DesignReading:
    """Collector of the columns that control splits, which become a `Design` after all cells have been read.

    Args:
        options: options that are set (see `DesignOptions.chosen`).

    Attributes:
        columns: columns that must exist.
        complete: columns in which missing cells are not allowed.
        coded: columns that are read as levels.
        strata: columns that define the strata.
        no_features: columns that are not used as features.
        marked: column that marks the rows of the test set, or None.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self.subject, self.order, self.marked = (options.get(k) for k in ("subject", "order", "test_column"))
        self.strata: tuple[str, ...] = tuple(options.get("strata", ()))
        self.complete = [c for c in (self.subject, self.order, self.marked) if c is not None]
        self.columns = [*self.complete, *self.strata]
        self.coded = [c for c in self.columns if c != self.order or c in self.strata]
        self.no_features = {*self.complete} - {*self.strata}
        self._moments = OrderTimes(GrowingRows((), np.float64), GrowingRows((), np.float64))
        self._odd: tuple[int, object] | None = None
        self._zones = set[bool]()

    def add(self, piece: ColumnPiece, missing: NDArray[np.bool_]) -> None:
        """Add a piece of the column that orders the rows."""
        if piece.column != self.order:
            return
        rooms = [cast("NDArray[np.float64]", rows.reserve(piece.start, len(missing))) for rows in self._moments]
        for room in rooms:
            room[:] = np.nan
        for k in np.flatnonzero(~missing).tolist():
            number, second = parse_number(piece.cells[k]), parse_seconds(piece.cells[k])
            if number is None and second is not None and (shown := str(piece.cells[k]).strip()):
                self._zones |= {ZONE_PATTERN.search(shown) is not None} if ":" in shown else set()
            rooms[0][k], rooms[1][k] = (np.nan if v is None else v for v in (number, second))
            if number is None and second is None and self._odd is None:
                self._odd = piece.start + k, piece.cells[k]

    def wrong(self, first: int) -> Iterator[str]:
        """Yield an error for each kind of invalid cell in the column that orders the rows.

        ``first`` is the number of the first row in messages.
        """
        if self.order is None:
            return
        if self._odd is not None:
            row, cell = self._odd
            where = f"row {first + row}, column {self.order!r}"
            yield f"{where}: expected a number or a date, got {short_cell(cell)}; {ORDER_HINT}"
            return
        numbers, seconds = (np.isnan(cast("NDArray[np.float64]", rows.trim())) for rows in self._moments)
        if (numbers & ~seconds).any() and (seconds & ~numbers).any():
            row = int(np.flatnonzero(seconds & ~numbers)[0])
            yield f"row {first + row}, column {self.order!r}: a number, but other rows contain dates; {ORDER_HINT}"

    def design(self, coded: Mapping[str, Coded], keep: Tensor) -> Design | None:
        """Return the design restricted to the rows ``keep [N]``. If no option is set, return None.

        Raises:
            ConfigError: a level in the column that marks test rows means neither yes nor no.
            DataError: none or all of the rows are marked as test rows.
        """
        if not self._options:
            return None
        subject = None if self.subject is None else torch.from_numpy(coded[self.subject][0])[keep].long()
        order = next((torch.from_numpy(times)[keep] for times in self.times()), None)
        strata = None
        for column in self.strata:
            codes, names = coded[column]
            levels = torch.from_numpy(np.nan_to_num(codes, nan=len(names)))[keep].long()
            strata = levels if strata is None else strata * (len(names) + 1) + levels
        if strata is not None:
            strata = strata.unique(return_inverse=True)[1]
        held_out = self._mark_held_out(coded, keep, order)
        roles = {"subject": self.subject, "order": self.order, "strata": ", ".join(self.strata)}
        return Design(
            subject, order, strata, held_out, {role: name for role, name in roles.items() if name is not None}
        )

    @property
    def _dates(self) -> bool:
        """True if the order of rows is given by dates rather than numbers."""
        numbers, seconds = (cast("NDArray[np.float64]", rows.trim()) for rows in self._moments)
        return bool((np.isnan(numbers) & ~np.isnan(seconds)).any())

    def times(self) -> Iterator[NDArray[np.float64]]:
        """Yield the time ``[N]`` of each row, which is NaN for missing cells.

        If rows have no times, nothing is yielded.
        """
        if self.order is not None:
            yield cast("NDArray[np.float64]", self._moments[self._dates].trim())

    def notes(self) -> Iterator[str]:
        """Yield notes on times that cannot be used to order rows."""
        for times in self.times():
            valid = times[~np.isnan(times)]
            first, last = (float(valid.min()), float(valid.max())) if len(valid) else (0.0, 0.0)
            if len(valid) > 1 and first == last:
                yield f"{self.order!r} is the same in every row, so it does not order the rows. Omit order"
            elif (
                not self._dates
                and len(units := {infer_time_unit("", np.array([time])) for time in (first, last)}) > 1
                and "" not in units
            ):
                yield f"{self.order!r} contains both seconds and milliseconds since 1970. Write all times in one unit"
            else:
                yield from self._notes_on_values(valid)
        if self._zones == {True, False}:
            yield f"{self.order!r}: times without a time zone are read as UTC, but other rows have a zone"

    def _notes_on_values(self, valid: NDArray[np.float64]) -> Iterator[str]:
        """Yield notes on numbers that look like dates in another format, and on times that may mean "missing"."""
        levels, rows = np.unique(valid, return_counts=True)
        if len(levels) < MIN_DISTINCT_TIMES:
            return
        if (
            not self._dates
            and not _parse_dates(levels, *SORTED_DATE_FORMAT)
            and any(days != sorted(days) for days in (_parse_dates(levels, *form) for form in UNSORTED_DATE_FORMATS))
        ):
            yield (
                f"{self.order!r} seems to contain dates that begin with the day or the month, so its numbers are not "
                "in the order of time. Write dates as 2024-09-01"
            )
        ends = (0, slice(1, None), "before"), (-1, slice(None, -1), "after")
        for end, rest, where in ends:
            span = float(np.ptp(levels[rest]))
            distance = float(np.abs(levels[rest] - levels[end]).min())
            if rows[end] > 1 and len(levels) > MIN_DISTINCT_TIMES and distance > FAR_TIME_RATIO * span:
                shown = np.datetime64(int(levels[end]), "s").item().date() if self._dates else f"{levels[end]:.15g}"
                yield (
                    f"{self.order!r} is {shown} in {rows[end]} rows, far {where} all other times. If this value marks "
                    "a missing time, empty these cells or add the value to missing, and set unlabelled = 'drop'"
                )

    def _mark_held_out(self, coded: Mapping[str, Coded], keep: Tensor, order: Tensor | None) -> Tensor | None:
        since, dates = self._options.get("test_since"), self._dates
        if since is not None and order is not None:
            value = parse_seconds(since) if dates else parse_number(since)
            if value is None:
                kind = "a date as 2024-09-01" if dates else "a number"
                raise ConfigError(f"test_since must be {kind}, like the values of {self.order!r}, got {since!r}")
            held_out, what = order >= value, f"test_since = {since!r}"
        elif self.marked is not None:
            codes, names = coded[self.marked]
            marks = self._find_test_levels(names)
            flags = torch.tensor([name in marks for name in names] + [False])
            held_out = flags[torch.from_numpy(np.nan_to_num(codes, nan=len(names)))[keep].long()]
            what = f"test_column = {self.marked!r}"
        else:
            return None
        if not bool(held_out.any()) or bool(held_out.all()):
            some = "every row is a test row" if bool(held_out.any()) else "no row is a test row"
            raise DataError(f"{what}: {some}. Choose a value that splits the rows, or omit the option")
        return held_out

    def _find_test_levels(self, names: Sequence[str]) -> set[str]:
        """Return the levels that mark rows of the test set.

        Raises:
            ConfigError: a given level does not exist, or a level means neither yes nor no.
        """
        named = self._options.get("test_levels", ())
        shown = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
        if absent := [level for level in named if level not in names]:
            raise ConfigError(f"test_levels: {self.marked!r} has no level {absent[0]!r}. Its levels: {shown}")
        if not named and (odd := [name for name in names if name.lower() not in (*TEST_LEVELS, *TRAINING_LEVELS)]):
            raise ConfigError(
                f"test_column: {self.marked!r} contains {odd[0]!r}, which means neither yes nor no. "
                f"List the levels that mark test rows in test_levels. The column has {shown}"
            )
        if not named and TRAINING_NAME_PATTERN.search(self.marked or ""):
            raise ConfigError(
                f"test_column: {self.marked!r} has a name that suggests training rows. List the "
                f"levels of test rows in test_levels. The column has {shown}"
            )
        return {*named} or {name for name in names if name.lower() in TEST_LEVELS}


def _parse_dates(values: NDArray[np.float64], form: str, length: int) -> list[datetime]:
    """Read numbers as dates in a format, and return the dates. If a number is not a date, return [].

    Args:
        values: numbers.
        form: format of dates.
        length: padded length of each number's text, in characters.
    """
    days = list[datetime]()
    for value in values.tolist():
        text = f"{value:.{4 if '.' in form else 0}f}".zfill(length)
        try:
            day = datetime.strptime(text, form)  # a date without a time zone
        except ValueError:
            return []
        if float(text) != value or not FIRST_YEAR <= day.year <= LAST_YEAR:
            return []
        days.append(day)
    return days


def parse_seconds(cell: object) -> float | None:
    """Return the number of seconds since 1970 for a date or time, or for text that contains one.

    Text must have a form of ISO 8601, or be a date as day.month.year.

    For any other cell, return None.

    >>> parse_seconds("1970-01-02"), parse_seconds("1970-01-01T00:01"), parse_seconds("1971"), parse_seconds("2.1.1970")
    (86400.0, 60.0, 31536000.0, 86400.0)
    """
    if isinstance(cell, str):
        text = cell.strip()
        if dotted := DOTTED_DATE_PATTERN.fullmatch(text):
            text = "{2}-{1:0>2}-{0:0>2}".format(*dotted.groups())
        text = (
            f"{text}-01-01" if YEAR_PATTERN.fullmatch(text) else f"{text}-01" if MONTH_PATTERN.fullmatch(text) else text
        )
        try:
            cell = datetime.fromisoformat(text)
        except ValueError:
            return None
    if isinstance(cell, date) and not isinstance(cell, datetime):
        cell = datetime(cell.year, cell.month, cell.day)  # converted to UTC below
    if not isinstance(cell, datetime):
        return None
    return (cell if cell.tzinfo else cell.replace(tzinfo=UTC)).timestamp()
