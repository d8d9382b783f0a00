"""Cells of tables: they are read in pieces of columns, checked, and converted to numbers or codes of levels."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import date, timedelta
from itertools import islice, repeat
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fedloom.data.sources.archive import ArchiveEntry
from fedloom.data.tables import MISSING_MARKERS, is_number, markers_of, parse_number
from fedloom.errors import DataError, capitalize
from fedloom.formats import shorten_list

BATCH_ROWS = 512
"""Number of rows that are read at a time. For a table with 1,000 columns, this means that memory holds 512,000 cells as
text."""
csv.field_size_limit(2**24)  # long texts are allowed, but an unclosed quote must not fill memory
MAX_ROW_CHARACTERS = 2**26
"""Maximum number of characters in a row, and in all rows that are buffered before they are split into columns."""
MAX_SHOWN_LEVELS = 6
"""Maximum number of a column's levels that are listed in a message."""
CELL_HINT = (
    "repair the cell, add it to missing, or give the column a role: target, client_column (client of a row), "
    "categorical or drop"
)
DECIMAL_COMMA_PATTERN = re.compile(r"[-+]?(\d{1,3}(\.\d{3})+|\d+)(,\d+)?([eE][-+]?\d+)?")
"""Pattern of a number with a decimal comma and, optionally, periods as thousands separators."""
GROUPED_NUMBER_PATTERN = re.compile(r"[-+]?\d{1,3}(,\d{3})+")
"""Pattern of an integer with thousands separators (commas) that could also be a number with a decimal comma."""
QUANTITY_PATTERN = re.compile(
    r"(?P<limit>[<>~≤≥]?)\s?[€$£]?\s?[-+\u2212\u2013(]?(\d{1,3}([,'\u2019\s]\d{3})+|\d+(_\d+)*)([.,]\d+)?\s?"
    r"(?P<unit>[-%€$£)]?|[^\W\d_][\w/^.·* µμ°%]{0,15})"
)
"""Pattern of a number with a unit or with signs that Python cannot parse."""
DATE_TEXT_PATTERN = re.compile(r"\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}.*)?|\d{1,2}\.\d{1,2}\.\d{4}")
DETECTION_BYTES = 2**18
"""Number of bytes at the start of a CSV file that are used to detect its separators."""
MAX_NUMBER = float(np.finfo(np.float32).max)
"""Largest number that models accept."""
Cells = Sequence[Any]


class ColumnPiece(NamedTuple):
    """Consecutive cells of a column, with the index of their first row (from 0)."""

    start: int
    column: str
    cells: Cells


def decode_cells(cells: Cells) -> Cells:
    """Return cells in which bytes, such as those of SAS, ARFF and older Parquet files, are UTF-8 text."""
    if not any(isinstance(cell, bytes) for cell in cells):
        return cells
    return [cell.decode("utf-8", "backslashreplace") if isinstance(cell, bytes) else cell for cell in cells]


class CsvSigns(NamedTuple):
    """Separator between cells and decimal sign of numbers in a CSV file."""

    separator: str
    decimal: Literal[".", ","]


def detect_csv_signs(head: bytes, where: object, encoding: str | None = None, skip: int = 0) -> CsvSigns:
    """Detect the separator and the decimal sign of a CSV file from the first bytes of the file.

    The separator must divide most of the first rows into the same number of cells, and this number must be at least
    two. The decimal sign is a comma if there are columns that contain only numbers when commas are read in this way.

    Raises:
        DataError: the file is not UTF-8 text.
    """
    if encoding is None and (at := head[:2].find(0)) >= 0:
        raise _encoding_error(where, at, 1, head[at:])
    try:
        text = head.decode(encoding or "utf-8-sig")
    except UnicodeDecodeError as error:
        at = len(head) - len(error.object) + error.start
        if len(head) < DETECTION_BYTES or at < len(head) - 4:  # otherwise the last letter may be cut off
            raise _encoding_error(where, at, 1 + head[:at].count(b"\n"), head[at:], encoding) from None
        text = head[:at].decode(encoding or "utf-8-sig")
    lines = text.splitlines(keepends=True)[skip:]
    if len(head) >= DETECTION_BYTES:
        lines = lines[:-1] or lines  # the last line may be cut off
    best, most, table = ",", 1, list[list[str]]()
    with suppress(csv.Error):
        for sign in (",", ";", "\t", "|"):
            rows = [row for row in csv.reader(lines, delimiter=sign, skipinitialspace=True) if row]
            widths = [len(row) for row in rows[:200]]
            common = max(set(widths), key=widths.count, default=1)
            if common > most and widths.count(common) >= 0.8 * len(widths) and widths[0] == common:
                best, most, table = sign, common, rows[1:]
    columns = list(zip(*(row for row in table if len(row) == most), strict=True))
    return CsvSigns(best, "," if _has_decimal_commas(columns, best) else ".")


def header_names(cells: Sequence[object] | None, width: int) -> list[str]:
    """Return the names of ``width`` columns from the cells of the header, or column1, column2, ... if it is missing."""
    if cells is None:
        return [f"column{k}" for k in range(1, width + 1)]
    return ["" if cell is None else str(cell).strip() for cell in cells]


def _encoding_error(where: object, at: int, line: int, rest: bytes, stated: str | None = None) -> DataError:
    """Return the error for a byte at offset `at` (from 0) that is invalid in the encoding.

    `rest` starts with this byte.
    """
    if stated is not None:
        return DataError(
            f"{where} is not encoded in {stated} (byte 0x{rest[0]:02X} at offset {at:,}, line "
            f"{line:,}). Set encoding to the encoding of the file"
        )
    encoding = "WINDOWS-1252"
    if rest[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) and at == 0:
        encoding = "UTF-16"
    elif rest[0] == 0:  # one byte of a 16-bit letter
        encoding = "UTF-16LE" if at else "UTF-16BE"
    return DataError(
        f"{where} is not encoded in UTF-8 (byte 0x{rest[0]:02X} at offset {at:,}, line {line:,}). "
        f"Save the file as UTF-8, set encoding = {encoding.lower()!r}, or convert the file: iconv -f "
        f"{encoding} -t UTF-8 {Path(str(where)).name} > utf8.csv"
    )


def _has_decimal_commas(columns: Sequence[Sequence[str]], separator: str) -> bool:
    """Return True if numbers have a decimal comma, which is assumed if some columns then contain only numbers.

    Commas before three digits, as in 1,000, are not treated as decimal commas if cells are separated by commas or if
    other numbers contain a period.
    """
    filled = [[c for c in column if c != ""] for column in columns]
    pairs = [(cells, [c for c in cells if "," in c and is_number(replace_decimal_comma(c))]) for cells in filled]
    split = [part for cells, part in pairs if len(part) > len(cells) / 2]
    if all(GROUPED_NUMBER_PATTERN.fullmatch(c.strip()) for part in split for c in part):
        points = (c for cells in filled for c in cells if "." in c and replace_decimal_comma(c) == c and is_number(c))
        return bool(split) and separator != "," and next(points, None) is None
    return True


class Problems:
    """Problems of a table for a single message: the first problem of each kind, and their number.

    Args:
        where: file that is named in messages.
        first: number of the first row below the header.
    """

    def __init__(self, where: str, first: int = 2) -> None:
        self.where, self.first = where, first
        self._cells_of: dict[tuple[str, str], tuple[str, list[Any], str]] = {}

    def add(self, kind: str, column: str, what: str, cells: Sequence[object], cure: str) -> None:
        """Add cells of a column that have the same problem. `what` describes the first of these cells."""
        self._cells_of.setdefault((kind, column), (what, [], cure))[1].extend(cells)

    def add_gaps(self, piece: ColumnPiece, missing: NDArray[np.bool_], cure: str) -> None:
        """Add the missing cells in a piece of a column, if there are any."""
        if missing.any():
            what = f"row {self.first + piece.start + int(missing.argmax())}, column {piece.column!r}: missing value"
            self.add("missing", piece.column, what, [None] * int(missing.sum()), cure)

    def has(self, kind: str, column: str) -> bool:
        """Return True if a column has a problem of the given kind."""
        return (kind, column) in self._cells_of

    def forget(self, column: str) -> None:
        """Remove all problems of a column, because the column is not used as a feature."""
        self._cells_of = {key: fault for key, fault in self._cells_of.items() if key[1] != column}

    def sentences(self) -> list[str]:
        """Return one sentence per column and kind of problem."""
        lines: list[str] = []
        for what, cells, cure in self._cells_of.values():
            levels = list(dict.fromkeys(str(cell) for cell in cells if cell is not None))
            names = f", values {shorten_list([*map(short_cell, levels)], MAX_SHOWN_LEVELS)}" if len(levels) > 1 else ""
            lines.append(f"{what}{f' ({len(cells)} such{names})' if len(cells) > 1 else ''}; {cure}")
        return lines


def csv_rows(
    entry: ArchiveEntry, separator: str, comment: str | None = None, encoding: str | None = None, skip: int = 0
) -> Iterator[list[str]]:
    """Yield the rows of a CSV file.

    If a comment mark is given, empty rows and rows that start with this mark are skipped.

    Raises:
        DataError: the file is not a CSV file in the expected encoding.
    """
    stream = _CountingStream(entry.stream)
    text = io.TextIOWrapper(cast("io.BufferedReader", stream), encoding or "utf-8-sig", newline="")
    lines = _CsvLines(text, entry.location)
    try:
        for _ in islice(lines, skip):
            lines.length = 0
        for row in csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True):
            lines.length = 0
            if comment is None or (row and not row[0].startswith(comment)):
                yield row
    except UnicodeDecodeError as error:
        rest = error.object[error.start :]
        line = 1 + stream.lines - rest.count(b"\n")
        raise _encoding_error(entry.location, stream.size - len(rest), line, rest, encoding) from None
    except csv.Error as error:
        raise DataError(f"{entry.location} is not a CSV file ({error}). Check separator and quotes") from error
    text.detach()


class _CountingStream(io.BufferedIOBase):
    """Stream that counts the bytes and lines read from it.

    Attributes:
        size: number of bytes read so far.
        lines: number of line ends read so far.
    """

    def __init__(self, inner: BinaryIO) -> None:
        self.size, self.lines, self._inner = 0, 0, cast("io.BufferedReader", inner)

    def readable(self) -> bool:
        return True

    def read1(self, size: int = -1) -> bytes:
        block = self._inner.read1(size)
        self.size, self.lines = self.size + len(block), self.lines + block.count(b"\n")
        return block


class _CsvLines:
    """Lines of a CSV file, with a limit on the length of a row.

    Attributes:
        length: number of characters read so far in the current row.
    """

    def __init__(self, text: io.TextIOWrapper, where: str) -> None:
        self.length, self._text, self._where, self._count = 0, text, where, 0

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line = self._text.readline(MAX_ROW_CHARACTERS)
        self.length, self._count = self.length + len(line), self._count + 1
        if "\0" in line:
            raise DataError(
                f"{self._where}: line {self._count:,} contains a null byte, which does not occur in "
                "text. The file is damaged, or is not a text file. Export it again"
            )
        if self.length >= MAX_ROW_CHARACTERS:
            raise DataError(
                f"{self._where} contains a row with at least {MAX_ROW_CHARACTERS:,} characters. Check "
                "separator and quotes, or remove the row"
            )
        if not line:
            raise StopIteration
        return line


def _iterate_row_blocks(rows: Iterator[list[str]]) -> Iterator[list[list[str]]]:
    """Yield the rows in blocks. If rows are long, a block contains a smaller number of rows."""
    block, size = [], 0
    for row in rows:
        block.append(row)
        size += sum(map(len, row))
        if len(block) == BATCH_ROWS or size >= MAX_ROW_CHARACTERS:
            yield block
            block, size = [], 0
    if block:
        yield block


def iterate_column_pieces(rows: Iterator[list[str]], names: Sequence[str], problems: Problems) -> Iterator[ColumnPiece]:
    """Convert rows to pieces of columns, and yield these pieces.

    A row that has the wrong number of cells is reported as a problem and skipped.
    """
    start, line, width = 0, problems.first, len(names)
    for block in _iterate_row_blocks(rows):
        if not start and (texts := _find_second_header(block, names)):
            shown = ", ".join(f"{cell!r} in {name!r}" for name, cell in texts[:MAX_SHOWN_LEVELS])
            what = f"row {line} contains text where all other rows contain numbers ({shown})"
            problems.add("header", "", what, [None], "delete it if it is a second header line or a line of units")
            block, line = block[1:], line + 1
        for number, row in enumerate(block, line):
            if row and len(row) != width:  # skip blank lines
                what = f"row {number} has {len(row)} cells, expected {width}"
                above = "if the header is below this row, set skip to the number of lines above the header"
                cure = "repair the row" if number > problems.first else above
                problems.add("width", "", what, [None], f"the file may be truncated. {capitalize(cure)}")
            elif width > 1 and row == names:
                problems.add(
                    "header", "", f"row {number} repeats the header", [None], "delete it, because it is not a sample"
                )
        line, block = line + len(block), [row for row in block if len(row) == width and (width == 1 or row != names)]
        yield from map(ColumnPiece, repeat(start), names, zip(*block, strict=True))
        start += len(block)


def _find_second_header(block: Sequence[Sequence[str]], names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the columns and texts of a second header row above the numbers, or [] if there is none.

    A row is a second header if it contains text in at least two columns of numbers, contains no number in any of these
    columns, and is followed by at least three rows.
    """
    table = [row for row in block if len(row) == len(names)]
    if len(table) < 4 or table[0] is not block[0]:
        return []
    texts, hold = list[tuple[str, str]](), markers_of(MISSING_MARKERS).hold
    for name, cell, *below in zip(names, *table, strict=True):
        filled = [replace_decimal_comma(text) for text in below if not hold(text)]
        if filled and all(map(is_number, filled)) and not hold(cell):
            if is_number(replace_decimal_comma(cell)):
                return []
            texts.append((name, cell))
    return texts if len(texts) > 1 else []


def replace_commas(cells: Iterator[ColumnPiece]) -> Iterator[ColumnPiece]:
    """Replace decimal commas in numbers so that Python can parse the numbers. All other cells remain unchanged."""
    for piece in cells:
        yield piece._replace(cells=[replace_decimal_comma(cell) for cell in piece.cells])


def replace_decimal_comma(cell: str) -> str:
    """Convert a number with a decimal comma to Python's notation. Other text is returned unchanged.

    >>> [replace_decimal_comma(cell) for cell in ("1.234,5", "0,5", "12.03.2020", "a,b")]
    ['1234.5', '0.5', '12.03.2020', 'a,b']
    """
    return cell.replace(".", "").replace(",", ".") if DECIMAL_COMMA_PATTERN.fullmatch(cell.strip()) else cell


def is_missing(cells: Cells, missing: tuple[str, ...]) -> NDArray[np.bool_]:
    """Return a bool mask ``[k]`` of the missing cells, which are None, NaN or a marker."""
    hold = markers_of(missing).hold
    return np.array([cell is None or cell != cell or hold(cell) for cell in cells], bool)


def short_cell(cell: object) -> str:
    """Return a cell as text that can be used in a message. The text is shortened if it is long."""
    text = repr(cell)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"


def convert_to_numbers(
    piece: ColumnPiece, missing: NDArray[np.bool_], problems: Problems, cure: str = CELL_HINT
) -> NDArray[np.float64]:
    """Convert cells to numbers, with NaN for missing cells.

    Cells that are not numbers, or that exceed the range that models accept, are reported as problems.
    """
    start, column, cells = piece
    out = np.full(len(cells), np.nan)
    some = [cell for cell, is_missing in zip(cells, missing, strict=True) if not is_missing]
    text = "".join(cell for cell in some if isinstance(cell, str))
    if text.isascii() and "_" not in text:  # numpy accepts more texts than `number_of`
        with suppress(ValueError, TypeError, OverflowError):
            out[~missing] = np.array(some, np.float64)
    if not (np.abs(out[~missing]) <= MAX_NUMBER).all():
        values = [parse_number(cell) for cell in some]
        out[~missing] = [np.nan if value is None else value for value in values]
    if not (np.abs(out[~missing]) <= MAX_NUMBER).all():
        bad = [
            k for k, is_missing in enumerate(missing.tolist()) if not is_missing and not _is_readable_number(cells[k])
        ]
        wanted = f"a number of at most {MAX_NUMBER:.3g}" if is_number(cells[bad[0]]) else "a finite number"
        what = f"row {problems.first + start + bad[0]}, column {column!r}: expected {wanted}, got "
        if isinstance(cells[bad[0]], str) and QUANTITY_PATTERN.fullmatch(cells[bad[0]].strip()):
            cure = f"write only numbers, in one unit; otherwise {cure}"
        if isinstance(cells[bad[0]], timedelta):
            cure = "add the column to drop, or write the durations as numbers"
        elif isinstance(cells[bad[0]], date) or DATE_TEXT_PATTERN.fullmatch(str(cells[bad[0]]).strip()):
            cure = f"add the column to drop, or convert it to days: days_since = {{ {column} = 'COLUMN OR DATE' }}"
        problems.add("number", column, what + short_cell(cells[bad[0]]), [cells[k] for k in bad], cure)
    return out


def _is_readable_number(cell: Any) -> bool:
    """Return True if a cell is a number in the range that models accept."""
    value = parse_number(cell)
    return value is not None and abs(value) <= MAX_NUMBER
