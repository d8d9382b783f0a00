"""Tables of the user's own: CSV and Parquet, columns given roles by name."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedloom.data.dataset import Dataset, Task
from fedloom.data.sources._base import FileSource, lies_at, locate
from fedloom.data.sources.archive import Rows, check_size, entries
from fedloom.data.tables import Column, Table
from fedloom.errors import ConfigError, DataError, NoSamples, nearest

BATCH = 512
CELL = np.dtype(np.float64).itemsize
"""Bytes of a cell in memory, however few a file has for it."""
Cells = Sequence[Any]


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
        default=("", "?", "NA", "NaN", "nan", "null"), description="cells that mean missing"
    )
    impute: bool = Field(default=False, description="allow missing cells: filled per client from its training part")
    scale: bool = Field(default=True, description="centre and scale numbers, per client on its training part")


class Csv(TableSource):
    """A CSV file with a header row; plain, gz, xz, or the one such file of a zip or tar."""

    separator: str = Field(default=",", min_length=1, max_length=1, description="character between cells")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """All rows."""
        place = locate("CSV", self.path, data_dir, (), lambda p: True)
        files = entries(place, lambda name: name.endswith((".csv", ".tsv", ".data", ".txt")))
        for entry in files:
            text = io.TextIOWrapper(cast("io.BufferedReader", entry.stream), "utf-8-sig", newline="")
            try:
                rows = csv.reader(text, delimiter=self.separator, skipinitialspace=True, strict=True)
                names = next(rows, [])
                data = _read(self, place.stem, entry.where, names, _batches(rows, names, entry.where))
            except (csv.Error, UnicodeDecodeError) as error:
                raise DataError(
                    f"{entry.where}: not a CSV file in UTF-8 ({error}); check separator and encoding"
                ) from error
            text.detach()
            if (other := next(files, None)) is not None:
                raise DataError(f"{place}: more than one table, {entry.name} and {other.name}; give the path of one")
            return data
        raise DataError(f"{place}: no .csv file there; give its path")


class Parquet(TableSource):
    """A Parquet file."""

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """All rows, read column by column: a page of every column at a time would be as much as the features.

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
                return _read(self, place.stem, str(place), names, _columns(file, names, self.drop))
        except (ArrowException, OSError) as error:
            raise DataError(f"{place}: not a readable Parquet file ({error}); write it again") from error


class _Piece(NamedTuple):
    """Cells of a column, from a row on, counted from 0."""

    start: int
    column: str
    cells: Cells


def _columns(file: Any, names: list[str], drop: tuple[str, ...]) -> Iterator[_Piece]:
    for name in names:
        start = 0
        for batch in file.iter_batches(BATCH, columns=[name], use_threads=False) if name not in drop else ():
            yield _Piece(start, name, batch.column(name).to_pylist())
            start += len(batch)


def _batches(rows: Iterator[list[str]], names: list[str], where: str) -> Iterator[_Piece]:
    line = 1
    while block := list(islice(rows, BATCH)):
        start = line - 1
        for row in block:
            line += 1
            if len(row) != len(names):
                raise DataError(
                    f"{where}: row {line} has {len(row)} cells, the header has {len(names)}; repair the row"
                )
        yield from map(_Piece, repeat(start), names, zip(*block, strict=True))


class _Codes:
    """Levels of a column in the order of their first row, sorted at the end."""

    def __init__(self) -> None:
        self.levels: dict[str, int] = {}
        self.rows: list[NDArray[np.int32]] = []

    def add(self, cells: Cells, missing: NDArray[np.bool_]) -> None:
        codes = [
            -1 if gone else self.levels.setdefault(str(cell), len(self.levels))
            for cell, gone in zip(cells, missing.tolist(), strict=True)
        ]
        self.rows.append(np.array(codes, np.int32))

    def done(self) -> tuple[NDArray[np.float64], tuple[str, ...]]:
        names = sorted(self.levels, key=_natural)
        place = np.empty(len(names) + 1)
        place[[self.levels[name] for name in names]] = np.arange(len(names))
        place[-1] = np.nan  # of missing cells, whose code is -1
        return place[np.concatenate(self.rows)], tuple(names)


def _natural(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return np.inf, text


def _numbers(cells: Cells, missing: NDArray[np.bool_], where: str, column: str, first: int) -> NDArray[np.float64]:
    out = np.full(len(cells), np.nan)
    with suppress(ValueError, TypeError, OverflowError):
        out[~missing] = np.array([cell for cell, gone in zip(cells, missing, strict=True) if not gone], np.float64)
    if not np.isfinite(out[~missing]).all():
        row = next(k for k, gone in enumerate(missing.tolist()) if not gone and not _is_number(cells[k]))
        raise DataError(
            f"{where}: row {first + row}, column {column!r}: expected a finite number, got {cells[row]!r}; repair the "
            "cell, or say what the column is: label, users (whose row it is), categorical or drop"
        )
    return out


def _is_number(cell: Any) -> bool:
    try:
        return bool(np.isfinite(float(cell)))
    except (ValueError, TypeError, OverflowError):
        return False


def _read(spec: TableSource, name: str, where: str, names: list[str], pieces: Iterator[_Piece]) -> Dataset:
    """The rows of a table as a data set."""
    if not names:
        raise NoSamples(f"{where}: empty; a table needs a header row and rows below it")
    label = spec.label if spec.label is not None else (names[-1] if names else "")
    asked = {label, *spec.categorical, *spec.drop, *spec.columns, *([spec.users] if spec.users else [])}
    for column in sorted(asked):
        if column not in names:
            raise ConfigError(f"{where}: no column {column!r}; {nearest(column, names)}")
    if len(set(names)) != len(names):
        raise DataError(f"{where}: two columns have the same name; rename one")
    coded = {c: _Codes() for c in {label, *spec.categorical, *spec.columns, *([spec.users] if spec.users else [])}}
    features = [c for c in names if c not in {label, spec.users, *spec.drop}]
    if not features:
        raise ConfigError(
            f"{where}: no column is left as a feature, the header has {', '.join(map(repr, names))}; check separator, "
            "label and drop"
        )
    numbers = [c for c in features if c not in spec.categorical]
    x, label_numbers = Rows((len(features),), np.float64), Rows((), np.float64)
    for start, column, cells in pieces:
        rows, first = x.at(start, len(cells)), start + 2
        gone = np.array([cell is None or cell in spec.missing or cell != cell for cell in cells])
        if gone.any() and column not in spec.drop and (not spec.impute or column not in features):
            raise DataError(
                f"{where}: row {first + int(gone.argmax())}, column {column!r}: missing value; repair it, name the "
                "column in drop, or set impute = true for a feature"
            )
        if column in coded:
            coded[column].add(cells, gone)
        if column in numbers:
            rows[:, features.index(column)] = _numbers(cells, gone, where, column, first)
        if column == label and spec.task == "regression":
            label_numbers.at(start, len(cells))[:] = _numbers(cells, gone, where, column, first)
    if x.size == 0:
        raise NoSamples(f"{where}: no rows below the header; an empty table")
    values = torch.from_numpy(x.done())
    done = {column: codes.done() for column, codes in coded.items()}
    for column in spec.categorical:
        if column in features:
            values[:, features.index(column)] = torch.from_numpy(done[column][0])
    flags = [bool(column.isnan().any()) for column in values.T]
    table = Table(
        columns=tuple(
            Column(name=c, levels=len(names), names=names, flag=flag, scale=spec.scale)
            for c, flag in zip(features, flags, strict=True)
            for names in [done[c][1] if c in spec.categorical else ()]
        )
    )
    y, task, classes = _target(spec, where, done[label], torch.from_numpy(label_numbers.done()))
    extra = [*spec.columns, *([spec.users] if spec.users else [])]
    with lies_at(Path(where)):
        return Dataset(
            name,
            values,
            y,
            task,
            classes,
            columns={c: torch.from_numpy(done[c][0]).long() for c in extra},
            levels={c: done[c][1] for c in extra},
            users=torch.from_numpy(done[spec.users][0]).long() if spec.users else None,
            user_names=done[spec.users][1] if spec.users else (),
            prepare=table,
        )


def _target(
    spec: TableSource, where: str, coded: tuple[NDArray[np.float64], tuple[str, ...]], numbers: torch.Tensor
) -> tuple[torch.Tensor, Task, tuple[str, ...]]:
    codes, levels = coded
    if spec.task == "regression":
        return numbers[:, None], "regression", ()
    if spec.task == "auto" and any(np.isfinite(v := _natural(level)[0]) and v != np.floor(v) for level in levels):
        raise ConfigError(
            f"{where}: the label has fractions; set task = 'regression', or 'classification' if they are names"
        )
    task: Task = "binary" if spec.task != "classification" and len(levels) == 2 else "classification"
    if spec.task == "binary" and task != "binary":
        raise ConfigError(f"{where}: task = 'binary', but the label has {len(levels)} values; use classification")
    return torch.from_numpy(codes).long(), task, levels
