"""Cells of tables: read in pieces of columns, checked, and turned into numbers or codes of levels."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import date, timedelta
from itertools import islice, repeat
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fedloom.data.sources.archive import Entry
from fedloom.errors import DataError

BATCH = 512
csv.field_size_limit(2**24)  # characters of a cell: a text may be long, a quote that nothing closes may not fill memory
LEVELS = 6
"""Levels of a column that an error shows."""
ROLES = "repair the cell, or say what the column is: label, users (whose row it is), categorical or drop"
COMMA = re.compile(r"[-+]?(\d{1,3}(\.\d{3})+|\d+)(,\d+)?([eE][-+]?\d+)?")
"""A number with a decimal comma, perhaps with points between thousands."""
Cells = Sequence[Any]


class Piece(NamedTuple):
    """Cells of a column, from a row on, counted from 0."""

    start: int
    column: str
    cells: Cells


class Problems:
    """What is wrong with a table, gathered so that all of it is said at once: the first of each kind, and how many.

    Args:
        where: the file.
        first: number of the first row below the header.
    """

    def __init__(self, where: str, first: int = 2) -> None:
        self.where, self.first = where, first
        self._found: dict[tuple[str, str], tuple[str, list[Any], str]] = {}

    def add(self, kind: str, column: str, what: str, cells: Sequence[Any], cure: str) -> None:
        """Cells of a column that are wrong in the same way; `what` describes the first."""
        self._found.setdefault((kind, column), (what, [], cure))[1].extend(cells)

    def sentences(self) -> list[str]:
        """One for each column and kind."""
        said: list[str] = []
        for what, cells, cure in self._found.values():
            levels = list(dict.fromkeys(str(cell) for cell in cells if cell is not None))
            more = f" and {len(levels) - LEVELS} more" if len(levels) > LEVELS else ""
            names = f", values {', '.join(map(repr, levels[:LEVELS]))}{more}" if len(levels) > 1 else ""
            said.append(f"{what}{f' ({len(cells)} such{names})' if len(cells) > 1 else ''}; {cure}")
        return said


def csv_rows(entry: Entry, separator: str, comment: str | None = None) -> Iterator[list[str]]:
    """Rows of a CSV file in UTF-8; with a comment mark, blank and marked rows are left out.

    Raises:
        DataError: it is no such file.
    """
    text = io.TextIOWrapper(cast("io.BufferedReader", entry.stream), "utf-8-sig", newline="")
    try:
        for row in csv.reader(text, delimiter=separator, skipinitialspace=True, strict=True):
            if comment is None or (row and not row[0].startswith(comment)):
                yield row
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{entry.where}: not a CSV file in UTF-8 ({error}); check separator and encoding") from error
    text.detach()


def pieces(rows: Iterator[list[str]], names: Sequence[str], problems: Problems) -> Iterator[Piece]:
    """Rows as pieces of columns; a row of another length is a problem and left out."""
    start, line, width = 0, problems.first, len(names)
    while block := list(islice(rows, BATCH)):
        for number, row in enumerate(block, line):
            if row and len(row) != width:  # a blank line is no row
                what = f"row {number} has {len(row)} cells, expected {width}"
                problems.add("width", "", what, [None], "truncated or another file, repair the row")
        line, block = line + len(block), [row for row in block if len(row) == width]
        yield from map(Piece, repeat(start), names, zip(*block, strict=True))
        start += len(block)


def with_points(cells: Iterator[Piece]) -> Iterator[Piece]:
    """Numbers with a decimal comma as Python writes them; every other cell stays."""
    for piece in cells:
        yield piece._replace(cells=[pointed(cell) for cell in piece.cells])


def pointed(cell: str) -> str:
    """A number with a decimal comma as Python writes it; any other text as it is.

    >>> [pointed(cell) for cell in ("1.234,5", "0,5", "12.03.2020", "a,b")]
    ['1234.5', '0.5', '12.03.2020', 'a,b']
    """
    return cell.replace(".", "").replace(",", ".") if COMMA.fullmatch(cell.strip()) else cell


def is_missing(cells: Cells, missing: Sequence[str]) -> NDArray[np.bool_]:
    """Which cells are missing: None, NaN, or a text that means it; bool ``[k]``."""
    return np.array([cell is None or cell in missing or cell != cell for cell in cells], bool)


class Codes:
    """Levels of a column in the order of their first row, sorted at the end."""

    def __init__(self) -> None:
        self.levels: dict[str, int] = {}
        self.rows: list[NDArray[np.int32]] = []

    def add(self, cells: Cells, missing: NDArray[np.bool_]) -> None:
        """More rows."""
        codes = [
            -1 if gone else self.levels.setdefault(str(cell), len(self.levels))
            for cell, gone in zip(cells, missing.tolist(), strict=True)
        ]
        self.rows.append(np.array(codes, np.int32))

    def done(self) -> tuple[NDArray[np.float64], tuple[str, ...]]:
        """Codes of all rows ``[N]``, NaN where missing, and the levels."""
        names = sorted(self.levels, key=natural)
        place = np.empty(len(names) + 1)
        place[[self.levels[name] for name in names]] = np.arange(len(names))
        place[-1] = np.nan  # of missing cells, whose code is -1
        return place[np.concatenate(self.rows)], tuple(names)


def natural(text: str) -> tuple[float, str]:
    """Key that sorts numbers by value, before all other texts."""
    try:
        return float(text), text
    except ValueError:
        return np.inf, text


def numbers(piece: Piece, missing: NDArray[np.bool_], problems: Problems, cure: str = ROLES) -> NDArray[np.float64]:
    """The cells as numbers, NaN where missing; any other cell is a problem."""
    start, column, cells = piece
    out = np.full(len(cells), np.nan)
    with suppress(ValueError, TypeError, OverflowError):
        out[~missing] = np.array([cell for cell, gone in zip(cells, missing, strict=True) if not gone], np.float64)
    if not np.isfinite(out[~missing]).all():
        bad = [k for k, gone in enumerate(missing.tolist()) if not gone and not is_number(cells[k])]
        what = f"row {problems.first + start + bad[0]}, column {column!r}: expected a finite number, got "
        if isinstance(cells[bad[0]], date | timedelta):
            cure = "drop the column, or give a number, such as days since a date"
        problems.add("number", column, what + repr(cells[bad[0]]), [cells[k] for k in bad], cure)
    return out


def is_number(cell: Any) -> bool:
    """Whether a cell is a finite number."""
    try:
        return bool(np.isfinite(float(cell)))
    except (ValueError, TypeError, OverflowError):
        return False
