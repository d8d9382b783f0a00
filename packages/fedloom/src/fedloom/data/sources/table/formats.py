"""Tables of other programs, read by their libraries: spreadsheets, SPSS, Stata, SAS, JSON lines and Feather."""

from __future__ import annotations

import zipfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from fedloom.data.sources._base import locate
from fedloom.data.sources.archive import DAMAGED_FILE_ERRORS, check_regular, check_size, open_unpacked
from fedloom.data.sources.table.cells import ColumnPiece, Problems, header_names
from fedloom.data.sources.table.frames import coded_columns, frame_cells, frame_names
from fedloom.data.sources.table.reading import RawTable, TableSource
from fedloom.errors import ConfigError, DataError
from fedloom.hints import suggest_nearest

STATISTICS_READERS = {
    ".sav": "read_sav", ".zsav": "read_sav", ".por": "read_por", ".dta": "read_dta", ".sas7bdat": "read_sas7bdat",
    ".xpt": "read_xport",
}  # fmt: skip
"""Functions of pyreadstat, keyed by file extension."""
MAX_SHOWN_CODES = 4
"""Maximum number of missing-value codes that a note lists."""


class LoadedTable(NamedTuple):
    """Table that was read by a library.

    Attributes:
        names: names of the columns.
        pieces: cells of the columns, piece by piece.
        coded: columns whose type defines their levels.
        notes: notes for the report.
        first_row: number of the first row below the header, from which the row numbers in messages are counted.
    """

    names: list[str]
    pieces: Iterator[ColumnPiece]
    coded: Sequence[str] = ()
    notes: Sequence[str] = ()
    first_row: int = 2


class LibraryTable(TableSource):
    """Table that is read by a library."""

    @abstractmethod
    def read_file(self, place: Path) -> LoadedTable:
        """Read the table in a file.

        Raises:
            DataError: the file is damaged or contains no table.
            ConfigError: the library is not installed.
        """
        ...

    @contextmanager
    def open_file(self, data_dir: str | Path | None = None) -> Iterator[RawTable]:
        """Open the table in the file."""
        place = locate(type(self).__name__, self.path, data_dir, (), lambda p: p.is_file())
        if place.is_dir():
            raise DataError(f"{place} is a folder. Name the file of the table")
        check_regular(place)
        try:
            table = self.read_file(place)
        except (ConfigError, DataError):
            raise
        except Exception as error:  # libraries raise their own errors
            detail = f"{type(error).__name__}: {error}".rstrip(".")
            raise DataError(f"{place} is not a readable {place.suffix} file ({detail}). Export it again") from error
        yield RawTable(
            place.stem, table.names, table.pieces, Problems(str(place), table.first_row), table.coded, table.notes
        )


def import_table_library(place: Path, name: str) -> Any:
    """Import the library that reads a file, and return the library.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"{place}: needs {name}. Run: pip install 'fedloom[formats]'") from error


class Excel(LibraryTable):
    """Sheet of an Excel file (.xlsx, .xlsm) with a header row."""

    sheet: str | int | None = Field(
        default=None, description="name of the sheet, or its number, starting at 1 (default: the only sheet)"
    )
    header: bool = Field(default=True, description="whether the first row contains the column names")
    skip: int = Field(default=0, ge=0, description="number of rows to skip above the header")

    def read_file(self, place: Path) -> LoadedTable:
        """Read the table in a sheet. If a cell contains a formula, its value is the one that is stored in the file."""
        openpyxl = import_table_library(place, "openpyxl")
        try:
            with zipfile.ZipFile(place) as archive:
                check_size(str(place), sum(info.file_size for info in archive.infolist()), place.stat().st_size)
        except DAMAGED_FILE_ERRORS as error:
            raise DataError(f"{place} is not a readable .xlsx file ({error}). Save it again as .xlsx") from error
        book = openpyxl.load_workbook(place, read_only=True, data_only=True)
        try:
            rows = [list(row) for row in islice(self._sheet(book, place).iter_rows(values_only=True), self.skip, None)]
        finally:
            book.close()
        while rows and not any(cell is not None for cell in rows[-1]):
            rows.pop()
        width = max((k + 1 for row in rows for k, cell in enumerate(row) if cell is not None), default=0)
        rows = [[*row[:width], *[None] * (width - len(row))] for row in rows]
        names = header_names(rows.pop(0) if rows and self.header else None, width)
        columns = zip(*rows, strict=True) if rows else ([] for _ in names)
        pieces = (ColumnPiece(0, name, cells) for name, cells in zip(names, columns, strict=True))
        return LoadedTable(names, pieces, first_row=1 + self.skip + self.header)

    def _sheet(self, book: Any, place: Path) -> Any:
        names: list[str] = [sheet.title for sheet in book.worksheets]
        shown = ", ".join(map(repr, names))
        if self.sheet is None and len(names) != 1:
            raise DataError(f"{place} contains {len(names)} sheets: {shown}. Choose one, such as sheet = {names[0]!r}")
        if isinstance(self.sheet, int) and not 1 <= self.sheet <= len(names):
            raise ConfigError(f"{place}: sheet = {self.sheet}, but the file contains {len(names)} sheets: {shown}")
        if isinstance(self.sheet, str) and self.sheet not in names:
            raise ConfigError(f"{place} has no sheet {self.sheet!r}; {suggest_nearest(self.sheet, names)}")
        place_of = names.index(self.sheet) if isinstance(self.sheet, str) else (self.sheet or 1) - 1
        return book.worksheets[place_of]


class Statistics(LibraryTable):
    """SPSS (.sav, .zsav, .por), Stata (.dta) or SAS (.sas7bdat, .xpt) file, with labels and codes for missing values.

    If all values of a column have labels, the labels become the levels of the column. Values that the file declares as
    missing become missing cells, and their number is stated in a note.
    """

    labels: bool = Field(default=True, description="use the file's value labels as levels")
    catalog: str | None = Field(default=None, description="file with the value labels (.sas7bcat) for a .sas7bdat file")
    encoding: str | None = Field(default=None, description="text encoding (default: the encoding stated in the file)")

    def read_file(self, place: Path) -> LoadedTable:
        """Read the table in a file, with its labels and declared missing values."""
        library = import_table_library(place, "pyreadstat")
        reader = STATISTICS_READERS.get(place.suffix.lower())
        if reader is None:
            raise DataError(f"{place}: unknown file extension. Known: {', '.join(STATISTICS_READERS)}")
        options: dict[str, Any] = {"output_format": "dict"}
        options |= {} if self.encoding is None else {"encoding": self.encoding}
        options |= {"user_missing": True} if reader not in ("read_xport", "read_por") else {}
        if self.catalog is not None and reader != "read_sas7bdat":
            raise ConfigError(f"{place}: `catalog` can be used only with a .sas7bdat file. Omit `catalog`")
        columns, facts = getattr(library, reader)(str(place), **options)
        value_labels = facts.variable_value_labels
        numeric = {
            self.event,
            *(self.outcomes if self.task in ("multilabel", "regression", "survival", "count") else ()),
        }
        coded, notes, pieces = list[str](), list[str](), list[ColumnPiece]()
        if self.catalog is not None:
            formats = _read_catalog(library, self.catalog)
            used = facts.variable_to_label
            value_labels = {name: formats[used[name]] for name in columns if used.get(name) in formats}
            if not value_labels:
                notes.append(
                    f"catalog {self.catalog} has formats {', '.join(formats) or 'none'}, but the columns of {place} "
                    f"use {', '.join(sorted(set(used.values()))) or 'none'}, so no column has value labels"
                )
        for name, cells in columns.items():
            codes = _missing_codes(facts, name, cells)
            present: list[Any] = [None if cell == "" or cell in codes else cell for cell in cells]
            labels: Mapping[Any, str] = value_labels.get(name, {}) if self.labels else {}
            if counts := {code: cells.count(code) for code in sorted(codes, key=str)}:
                notes.append(_missing_values_note(name, counts, value_labels.get(name, {})))
            if labels and name not in numeric and {cell for cell in present if cell is not None} <= labels.keys():
                present = [None if cell is None else labels[cell] for cell in present]
                coded.append(name)
            pieces.append(ColumnPiece(0, name, present))
        return LoadedTable([*columns], iter(pieces), coded, notes, first_row=1)


def _read_catalog(library: Any, path: str) -> Mapping[str, Mapping[Any, str]]:
    """Return the value labels in a SAS catalog, by format.

    Raises:
        DataError: the file is not a SAS catalog.
    """
    place = locate("SAS catalog", path, None, (), lambda p: p.is_file())
    try:
        formats: Mapping[str, Mapping[Any, str]] = library.read_sas7bcat(str(place), output_format="dict")[
            1
        ].value_labels
    except Exception as error:  # any error of the library
        raise DataError(
            f"{place} is not a readable SAS catalog ({type(error).__name__}: {error}). Write it again"
        ) from error
    return formats


def _missing_codes(facts: Any, name: str, cells: Sequence[Any]) -> set[Any]:
    """Return the values of a column that the file declares as missing."""
    ranges = [(part["lo"], part["hi"]) for part in facts.missing_ranges.get(name, [])]
    named = {*facts.missing_user_values.get(name, [])}
    return {
        cell
        for cell in {*cells} - {None}
        if cell in named or any(type(cell) is type(lo) and lo <= cell <= hi for lo, hi in ranges)
    }


def _missing_values_note(name: str, counts: Mapping[Any, int], labels: Mapping[Any, str]) -> str:
    """Return the note on the values that a column declares as missing."""
    shown = [
        f"{f'{code:g}' if isinstance(code, float) else code}{f' ({labels[code]})' if code in labels else ''} in {rows}"
        for code, rows in islice(counts.items(), MAX_SHOWN_CODES)
    ]
    return f"column {name!r}: the file declares values as missing: {', '.join(shown)} of its rows"


class JsonLines(LibraryTable):
    """File with one JSON object per line (.jsonl, .ndjson), plain, gz or xz."""

    def read_file(self, place: Path) -> LoadedTable:
        """Read the table that consists of all lines in the file.

        If a line does not contain a key, the cell is missing.
        """
        from pyarrow import json as arrow_json  # slow to import

        with open_unpacked(place) as stream:
            return _arrow_table(arrow_json.read_json(stream), place)


class Feather(LibraryTable):
    """Feather or Arrow file."""

    def read_file(self, place: Path) -> LoadedTable:
        """Read the table with all columns."""
        from pyarrow import feather  # slow to import

        return _arrow_table(feather.read_table(place, memory_map=False), place)


def _arrow_table(table: Any, place: Path) -> LoadedTable:
    from pyarrow import types  # slow to import

    check_size(str(place), table.nbytes, place.stat().st_size)
    if nested := [field.name for field in table.schema if types.is_nested(field.type)]:
        raise DataError(f"{place}: column {nested[0]!r} contains lists or objects. Write one column per value")
    return LoadedTable(frame_names(table), frame_cells(table), coded_columns(table))
