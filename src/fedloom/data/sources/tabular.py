"""Tables of the user's own: CSV and Parquet, columns given roles by name."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedloom.data.dataset import Dataset, Task, refuse
from fedloom.data.sources._base import FileSource, lies_at, locate
from fedloom.data.sources.archive import Entry, Rows, check_size, entries
from fedloom.data.tables import Column, Table
from fedloom.errors import ConfigError, DataError, NoSamples, nearest

BATCH = 512
LEVELS = 6
"""Levels of a column that an error shows."""
ROLES = "repair the cell, or say what the column is: label, users (whose row it is), categorical or drop"
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
            rows, problems = csv_rows(entry, self.separator), Problems(entry.where)
            names = next(rows, [])
            data = read_table(self, place.stem, names, pieces(rows, names, problems), problems)
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
                return read_table(self, place.stem, names, _columns(file, names, self.drop), Problems(str(place)))
        except (ArrowException, OSError) as error:
            raise DataError(f"{place}: not a readable Parquet file ({error}); write it again") from error


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
            if len(row) != width:
                what = f"row {number} has {len(row)} cells, expected {width}"
                problems.add("width", "", what, [None], "truncated or another file, repair the row")
        line, block = line + len(block), [row for row in block if len(row) == width]
        yield from map(Piece, repeat(start), names, zip(*block, strict=True))
        start += len(block)


def _columns(file: Any, names: list[str], drop: tuple[str, ...]) -> Iterator[Piece]:
    for name in names:
        start = 0
        for batch in file.iter_batches(BATCH, columns=[name], use_threads=False) if name not in drop else ():
            yield Piece(start, name, batch.column(name).to_pylist())
            start += len(batch)


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


def numbers(piece: Piece, missing: NDArray[np.bool_], problems: Problems, cure: str = ROLES) -> NDArray[np.float64]:
    """The cells as numbers, NaN where missing; any other cell is a problem."""
    start, column, cells = piece
    out = np.full(len(cells), np.nan)
    with suppress(ValueError, TypeError, OverflowError):
        out[~missing] = np.array([cell for cell, gone in zip(cells, missing, strict=True) if not gone], np.float64)
    if not np.isfinite(out[~missing]).all():
        bad = [k for k, gone in enumerate(missing.tolist()) if not gone and not _is_number(cells[k])]
        what = f"row {problems.first + start + bad[0]}, column {column!r}: expected a finite number, got "
        problems.add("number", column, what + repr(cells[bad[0]]), [cells[k] for k in bad], cure)
    return out


def _is_number(cell: Any) -> bool:
    try:
        return bool(np.isfinite(float(cell)))
    except (ValueError, TypeError, OverflowError):
        return False


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
    coded = {column: _Codes() for column in {label, *spec.categorical, *special}}
    features = [c for c in names if c not in {label, spec.users, *spec.drop}]
    if not features:
        raise ConfigError(
            f"{where}: no column is left as a feature, the header has {', '.join(map(repr, names))}; check separator, "
            "label and drop"
        )
    numeric = [c for c in features if c not in spec.categorical]
    x, measured = Rows((len(features),), np.float64), Rows((), np.float64)
    for piece in cells:
        start, column, block = piece
        if column in spec.drop and column not in coded:
            continue
        rows, gone = x.at(start, len(block)), np.array([c is None or c in spec.missing or c != c for c in block])
        if gone.any() and column not in spec.drop and (not spec.impute or column not in features):
            what = f"row {problems.first + start + int(gone.argmax())}, column {column!r}: missing value"
            cure = "repair it, name the column in drop, or set impute = true for a feature"
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
    values = torch.from_numpy(x.done())
    for column in spec.categorical:
        if column in features:
            values[:, features.index(column)] = torch.from_numpy(done[column][0])
    flags = [bool(column.isnan().any()) for column in values.T]
    table = Table(
        columns=tuple(
            Column(name=c, levels=len(levels), names=levels, flag=flag, scale=spec.scale)
            for c, flag in zip(features, flags, strict=True)
            for levels in [done[c][1] if c in spec.categorical else ()]
        )
    )
    regression = task == "regression"
    y = torch.from_numpy(measured.done())[:, None] if regression else torch.from_numpy(done[label][0]).long()
    with lies_at(Path(where)):
        return Dataset(
            name,
            values,
            y,
            task,
            () if regression else done[label][1],
            columns={c: torch.from_numpy(done[c][0]).long() for c in special},
            levels={c: done[c][1] for c in special},
            users=torch.from_numpy(done[spec.users][0]).long() if spec.users else None,
            user_names=done[spec.users][1] if spec.users else (),
            prepare=table,
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
    if spec.task == "auto" and any(np.isfinite(v := _natural(level)[0]) and v != np.floor(v) for level in levels):
        wrong.append("the label has fractions; set task = 'regression', or 'classification' if they are names")
    if spec.task == "binary" and len(levels) != 2:
        wrong.append(f"task = 'binary', but the label has {len(levels)} values; use classification")
    return "binary" if spec.task != "classification" and len(levels) == 2 else "classification", wrong
