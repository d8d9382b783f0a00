"""Tables of the user's own: CSV and Parquet, columns given roles by name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field

from fedloom.data.dataset import Dataset, Task, refuse
from fedloom.data.sources._base import FileSource, lies_at, locate
from fedloom.data.sources.archive import Rows, check_size, entries
from fedloom.data.sources.cells import (
    BATCH,
    HEAD,
    Codes,
    Piece,
    Problems,
    Signs,
    csv_rows,
    is_missing,
    natural,
    numbers,
    pieces,
    pointed,
    signs_of,
    with_points,
)
from fedloom.data.tables import MARKERS, Column, Table, markers_of
from fedloom.errors import ConfigError, DataError, NoSamples, nearest

CELL = np.dtype(np.float64).itemsize
"""Bytes of a cell in memory, however few a file has for it."""


class Raw(NamedTuple):
    """A table as its file has it: a name, the names of its columns, their cells, and what is found wrong meanwhile."""

    name: str
    names: list[str]
    cells: Iterator[Piece]
    problems: Problems


class TableSource(FileSource):
    """Roles of the columns: one label, the others features unless named below."""

    label: str | None = Field(default=None, description="name of the target column; None: the last one")
    task: Literal["auto", "binary", "classification", "regression"] = Field(
        default="auto", description="auto: classification if the label has text or whole numbers, binary if two of them"
    )
    categorical: tuple[str, ...] = Field(default=(), description="columns of codes or text: one feature per level")
    drop: tuple[str, ...] = Field(default=(), description="columns to leave out")
    users: str | None = Field(default=None, description="column that names the client of a row; no feature")
    columns: tuple[str, ...] = Field(default=(), description="columns a partition may split by; features all the same")
    missing: tuple[str, ...] = Field(
        default=(), description=f"cells that mean missing, by value, beside empty ones and {', '.join(MARKERS[1:])}"
    )
    impute: bool = Field(default=False, description="allow missing cells: filled per client from its training part")
    unlabelled: Literal["refuse", "drop"] = Field(
        default="refuse", description="rows whose label or user is missing: refuse the table, or leave them out"
    )
    scale: bool = Field(default=True, description="centre and scale numbers, per client on its training part")
    centre: float = Field(default=0.0, description="subtracted from the label of a regression")
    unit: float = Field(default=1.0, gt=0, description="divides the label of a regression after that; errors are in it")

    @property
    def markers(self) -> tuple[str, ...]:
        """All cells that mean missing: those of every table, then this one's."""
        return tuple(dict.fromkeys((*MARKERS, *self.missing)))

    @abstractmethod
    def open(self, data_dir: str | Path | None = None) -> AbstractContextManager[Raw]:
        """The table before its columns have roles; its cells are read within the context.

        Raises:
            DataError: no such file, or no table.
        """
        ...

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """All rows."""
        with self.open(data_dir) as raw:
            return read_table(self, *raw)


class Csv(TableSource):
    """A CSV file with a header row; plain, gz, xz, or the one such file of a zip or tar."""

    separator: str | None = Field(
        default=None, min_length=1, max_length=1, description="character between cells; None: found out"
    )
    decimal: Literal[".", ","] | None = Field(default=None, description="decimal sign of numbers; None: found out")

    @property
    def markers(self) -> tuple[str, ...]:
        """All cells that mean missing; those of a file with decimal commas may be written with one."""
        markers = super().markers
        return markers if self.decimal == "." else tuple(pointed(m) if "," in m else m for m in markers)

    def signs(self, data_dir: str | Path | None = None) -> Signs:
        """The signs that the file is read with: those of the fields, else found out.

        Raises:
            DataError: no such file, or not text in UTF-8.
        """
        place = locate("CSV", self.path, data_dir, (), lambda p: True)
        if self.separator is not None and self.decimal is not None:
            return Signs(self.separator, self.decimal)
        for entry in entries(place, _is_csv):
            separator, decimal = signs_of(entry.stream.read(HEAD), entry.where)
            return Signs(self.separator or separator, self.decimal or decimal)
        raise DataError(f"{place}: no .csv file there; give its path")

    @contextmanager
    def open(self, data_dir: str | Path | None = None) -> Iterator[Raw]:
        """The one table that is there."""
        place, signs = locate("CSV", self.path, data_dir, (), lambda p: True), self.signs(data_dir)
        files = entries(place, _is_csv)
        for entry in files:
            rows, problems = csv_rows(entry, signs.separator), Problems(entry.where)
            names = next(rows, [])
            cells = pieces(rows, names, problems)
            yield Raw(place.stem, names, with_points(cells) if signs.decimal == "," else cells, problems)
            if (other := next(files, None)) is not None:
                raise DataError(f"{place}: more than one table, {entry.name} and {other.name}; give the path of one")


def _is_csv(name: str) -> bool:
    return name.endswith((".csv", ".tsv", ".data", ".txt"))


class Parquet(TableSource):
    """A Parquet file."""

    @contextmanager
    def open(self, data_dir: str | Path | None = None) -> Iterator[Raw]:
        """Columns one after the other: a page of every column at a time would be as much as the features.

        Their number and size in the footer are compared with the file's size first.
        """
        from pyarrow import ArrowException, parquet  # slow to import

        place = locate("Parquet", self.path, data_dir, (), lambda p: p.is_file())
        try:
            with parquet.ParquetFile(place, buffer_size=2**18, pre_buffer=False) as file:  # else a group is held whole
                groups = range(file.metadata.num_row_groups)
                names = list(file.schema_arrow.names)
                unpacked = sum(file.metadata.row_group(i).total_byte_size for i in groups)
                cells = file.metadata.num_rows * sum(name not in self.drop for name in names)
                check_size(str(place), max(unpacked, cells * CELL), place.stat().st_size)
                yield Raw(place.stem, names, _columns(file, names, self.drop), Problems(str(place)))
        except (ArrowException, OSError) as error:
            raise DataError(f"{place}: not a readable Parquet file ({error}); write it again") from error


def _columns(file: Any, names: list[str], drop: tuple[str, ...]) -> Iterator[Piece]:
    for name in names:
        start = 0
        for batch in file.iter_batches(BATCH, columns=[name], use_threads=False) if name not in drop else ():
            yield Piece(start, name, batch.column(name).to_pylist())
            start += len(batch)


def read_table(spec: TableSource, name: str, names: list[str], cells: Iterable[Piece], problems: Problems) -> Dataset:
    """The columns of a table as a data set.

    Args:
        spec: roles of the columns.
        name: of the data set.
        names: of the columns.
        cells: all of them, by pieces of columns.
        problems: what was or will be found wrong.

    Raises:
        ConfigError: columns that are not there, or none that is a feature.
        DataError: missing values, text in numbers, rows of another length, a label that does not fit the task: all of
            it at once.
    """
    where = problems.where
    if not names:
        raise NoSamples(f"{where}: empty; a table needs a header row and rows below it")
    label = spec.label if spec.label is not None else names[-1]
    special = [*spec.columns, *([spec.users] if spec.users else [])]
    absent = sorted({label, *spec.categorical, *spec.drop, *special} - set(names))
    if absent:
        raise ConfigError(
            f"{where}: " + "; ".join(f"no column {column!r}; {nearest(column, names)}" for column in absent)
        )
    if twice := sorted({column for column in names if names.count(column) > 1}):
        raise DataError(f"{where}: two columns have the same name, {', '.join(map(repr, twice))}; rename one")
    coded = {column: Codes() for column in {label, *spec.categorical, *special}}
    features = [c for c in names if c not in {label, spec.users, *spec.drop}]
    if not features:
        raise ConfigError(
            f"{where}: no column is left as a feature, the header has {', '.join(map(repr, names))}; check separator, "
            "label and drop"
        )
    numeric = [c for c in features if c not in spec.categorical]
    plain = [c for c in features if c not in special]
    x, measured = Rows((len(features),), np.float64), Rows((), np.float64)
    markers, unmatched = spec.markers, [text for text in spec.missing if text not in MARKERS]
    for piece in cells:
        start, column, block = piece
        if column in spec.drop and column not in coded:
            continue
        rows, gone = x.at(start, len(block)), is_missing(block, markers)
        if unmatched and gone.any():
            holes = [cell for cell, hole in zip(block, gone, strict=True) if hole]
            unmatched = [text for text in unmatched if not any(map(markers_of((text,)).hold, holes))]
        if (
            gone.any()
            and column not in spec.drop
            and not (spec.impute if column in plain else spec.unlabelled == "drop")
        ):
            what = f"row {problems.first + start + int(gone.argmax())}, column {column!r}: missing value"
            cure = "repair it, name the column in drop, or set impute = true for a feature"
            if column not in plain:
                cure = "repair it, or set unlabelled = 'drop' to leave such rows out"
            problems.add("missing", column, what, [None] * int(gone.sum()), cure)
        if column in coded:
            coded[column].add(block, gone)
        if column in numeric:
            rows[:, features.index(column)] = numbers(piece, gone, problems)
        if column == label and spec.task == "regression":
            measured.at(start, len(block))[:] = numbers(piece, gone, problems)
    found = problems.sentences()
    if x.size == 0 and not found:
        raise NoSamples(f"{where}: no rows below the header; an empty table")
    done = {column: codes.done() if codes.rows else (np.empty(0), ()) for column, codes in coded.items()}
    task, wrong = _task(spec, label, done[label][1], bool(found))
    if found := [*found, *wrong]:
        refuse(where, found)
    regression = task == "regression"
    target = measured.done() if regression else done[label][0]
    keep = torch.from_numpy(~np.isnan([target, *(done[c][0] for c in special)]).any(0))
    values = torch.from_numpy(x.done())
    for column in spec.categorical:
        if column in features:
            values[:, features.index(column)] = torch.from_numpy(done[column][0])
    values = values if bool(keep.all()) else values[keep]
    flags = [bool(column.isnan().any()) for column in values.T]
    table = Table(
        columns=tuple(
            Column(name=c, levels=len(levels), names=levels, flag=flag, scale=spec.scale)
            for c, flag in zip(features, flags, strict=True)
            for levels in [done[c][1] if c in spec.categorical else ()]
        ),
        missing=markers,
        impute=spec.impute,
    )
    y = torch.from_numpy(target)[keep]
    codes = {c: torch.from_numpy(done[c][0])[keep].long() for c in special}
    with lies_at(Path(where)):
        return Dataset(
            name,
            values,
            ((y - spec.centre) / spec.unit)[:, None] if regression else y.long(),
            task,
            () if regression else done[label][1],
            columns=codes,
            levels={c: done[c][1] for c in special},
            users=codes[spec.users] if spec.users else None,
            user_names=done[spec.users][1] if spec.users else (),
            prepare=table,
            centre=spec.centre if regression else 0.0,
            unit=spec.unit if regression else 1.0,
            notes=tuple(f"missing: no cell of {name} is {text!r}" for text in unmatched),
        )


def _task(spec: TableSource, label: str, levels: tuple[str, ...], doubtful: bool) -> tuple[Task, list[str]]:
    """The task that the label's levels make, and what is wrong with them.

    One level alone is no error, since a trained model may be tried on such a table; of a `doubtful` one it is told.
    """
    wrong: list[str] = []
    if doubtful and len(levels) == 1:
        wrong.append(
            f"the label {label!r} is {levels[0]!r} in every row that can be read; nothing can be learned from it"
        )
    if spec.task == "regression":
        return "regression", wrong
    if spec.task == "auto" and any(np.isfinite(v := natural(level)[0]) and v != np.floor(v) for level in levels):
        wrong.append("the label has fractions; set task = 'regression', or 'classification' if they are names")
    if spec.task == "binary" and len(levels) != 2:
        wrong.append(f"task = 'binary', but the label has {len(levels)} values; use classification")
    return "binary" if spec.task != "classification" and len(levels) == 2 else "classification", wrong
