"""User-supplied tables: CSV and Parquet files, with roles for named columns."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator

from fedloom.data.dataset import Dataset
from fedloom.data.sources._base import locate
from fedloom.data.sources.archive import check_regular, check_size, iterate_entries
from fedloom.data.sources.table.cells import (
    BATCH_ROWS,
    DETECTION_BYTES,
    ColumnPiece,
    CsvSigns,
    Problems,
    csv_rows,
    decode_cells,
    detect_csv_signs,
    header_names,
    iterate_column_pieces,
    replace_commas,
    replace_decimal_comma,
)
from fedloom.data.sources.table.designs import DesignReading
from fedloom.data.sources.table.reading import RawTable, TableSource
from fedloom.errors import DataError

CELL_BYTES = np.dtype(np.float64).itemsize
"""Number of bytes that a cell uses in memory, which may be larger than in a file."""


class Csv(TableSource):
    """CSV file (.csv, .tsv, .txt, .dat). The file may be plain, gz or xz, or the only such file in a zip or tar.

    Without a header, the columns are named column1, column2, and so on.
    """

    separator: str | None = Field(
        default=None, min_length=1, max_length=1, description="character that separates cells (default: detected)"
    )
    decimal: Literal[".", ","] | None = Field(
        default=None, description="decimal separator in numbers (default: detected)"
    )
    header: bool = Field(default=True, description="whether the first row contains the column names")
    skip: int = Field(default=0, ge=0, description="number of lines to skip above the header")
    encoding: str | None = Field(default=None, description="text encoding, such as latin-1 (default: UTF-8)")

    @field_validator("encoding")
    @classmethod
    def _check_encoding(cls, encoding: str | None) -> str | None:
        """Raise an error if Python does not recognize the encoding as a text encoding."""
        try:
            "".encode(encoding or "utf-8")
        except LookupError:
            raise ValueError(
                f"unknown encoding {encoding!r}. Use, for example, utf-8, latin-1, windows-1252 or utf-16"
            ) from None
        return encoding

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that mark missing cells.

        If numbers have decimal commas, a missing-value code may also be written with a comma.
        """
        markers = super().markers
        return markers if self.decimal == "." else tuple(replace_decimal_comma(m) if "," in m else m for m in markers)

    def signs(self, data_dir: str | Path | None = None) -> CsvSigns:
        """Return the separator and the decimal sign. They are detected in the file unless they are set by options.

        Raises:
            DataError: the file does not exist, or is not UTF-8 text.
        """
        place = locate("CSV", self.path, data_dir, (), lambda p: True)
        if self.separator is not None and self.decimal is not None:
            return CsvSigns(self.separator, self.decimal)
        for entry in iterate_entries(place, _is_csv):
            separator, decimal = detect_csv_signs(
                entry.stream.read(DETECTION_BYTES), entry.location, self.encoding, self.skip
            )
            return CsvSigns(self.separator or separator, self.decimal or decimal)
        raise DataError(f"{place} contains no .csv file. Pass the path to a .csv file")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load all rows with the separator and decimal sign of the file.

        Both must be known first, because a marker of missing cells may contain the decimal sign.
        """
        return super(Csv, self.with_(**self.signs(data_dir)._asdict())).load(data_dir)

    @contextmanager
    def open_file(self, data_dir: str | Path | None = None) -> Iterator[RawTable]:
        """Open the only table in the file or archive."""
        place, signs = locate("CSV", self.path, data_dir, (), lambda p: True), self.signs(data_dir)
        files = iterate_entries(place, _is_csv)
        for entry in files:
            rows = csv_rows(entry, signs.separator, encoding=self.encoding, skip=self.skip)
            problems, first = Problems(entry.location, 1 + self.skip + self.header), next(rows, [])
            names = first if self.header else header_names(None, len(first))
            cells = iterate_column_pieces(rows if self.header or not first else chain([first], rows), names, problems)
            yield RawTable(place.stem, names, replace_commas(cells) if signs.decimal == "," else cells, problems)
            if (other := next(files, None)) is not None:
                raise DataError(
                    f"{place} contains more than one table, {entry.name} and {other.name}. Pass the path to one table"
                )


def _is_csv(name: str) -> bool:
    return name.lower().endswith((".csv", ".tsv", ".data", ".txt", ".dat"))


class Parquet(TableSource):
    """Parquet file."""

    @property
    def unread(self) -> set[str]:
        """Columns that are dropped and have no other role, so that they do not need to be read."""
        return (
            {*self.drop}
            - {*self.days_since, *self.days_since.values()}
            - {*self.group_columns, *self.outcomes, *(c for c in (self.client_column, self.event) if c is not None)}
            - {*DesignReading(self.chosen).columns}
        )

    @contextmanager
    def open_file(self, data_dir: str | Path | None = None) -> Iterator[RawTable]:
        """Open the file and read its columns one after another.

        Reading one page of every column at the same time could use as much memory as the features.

        Before that, the number and size of the columns in the footer are checked against the size of the file.
        """
        from pyarrow import ArrowException, parquet, types  # slow to import

        place = locate("Parquet", self.path, data_dir, (), lambda p: p.is_file())
        check_regular(place)
        try:
            schema = parquet.read_schema(place)
            if nested := [f.name for f in schema if types.is_nested(f.type) and f.name not in self.unread]:
                raise DataError(f"{place}: column {nested[0]!r} contains lists or tables. Drop it")
            texts = [f.name for f in schema if _is_text(f.type)]
            options: dict[str, Any] = {"buffer_size": 2**18, "pre_buffer": False}  # to save memory
            with parquet.ParquetFile(place, read_dictionary=texts, **options) as file:
                groups = range(file.metadata.num_row_groups)
                names = list(file.schema_arrow.names)
                unpacked = sum(file.metadata.row_group(i).total_byte_size for i in groups)
                cells = file.metadata.num_rows * sum(name not in self.unread for name in names)
                check_size(str(place), max(unpacked, cells * CELL_BYTES), place.stat().st_size)
                yield RawTable(
                    place.stem, names, _iterate_file_columns(file, names, self.unread, place), Problems(str(place))
                )
        except (ArrowException, OSError) as error:
            raise DataError(f"{place} is not a readable Parquet file ({error}). Write the file again") from error


def _is_text(kind: object) -> bool:
    from pyarrow import types

    return any(test(kind) for test in (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary))


def _iterate_file_columns(file: Any, names: list[str], drop: Collection[str], place: Path) -> Iterator[ColumnPiece]:
    """Yield the columns of a file, piece by piece.

    Equal texts are stored only once in memory, but every occurrence is counted.

    Raises:
        DataError: the total length of the texts is implausible for the size of the file.
    """
    from pyarrow import DictionaryArray, compute, int64

    packed, length = place.stat().st_size, 0
    for name in names:
        start = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=[name], use_threads=False) if name not in drop else ():
            column = batch.column(name)
            if isinstance(column, DictionaryArray) and _is_text(column.type.value_type):
                lengths = compute.cast(compute.binary_length(column.dictionary), int64())
                length += compute.sum(lengths.take(column.indices)).as_py() or 0
                check_size(f"{place}: column {name!r}", length, packed)
                texts = column.dictionary.to_pylist()
                cells = [None if code is None else texts[code] for code in column.indices.to_pylist()]
            else:
                cells = column.to_pylist()
            yield ColumnPiece(start, name, decode_cells(cells))
            start += len(batch)
