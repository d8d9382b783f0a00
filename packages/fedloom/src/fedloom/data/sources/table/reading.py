"""Sources that read a table by the roles of its columns, or by an agreement."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fedloom.data.dataset import Dataset
from fedloom.data.sources.table.cells import ColumnPiece, Problems
from fedloom.data.sources.table.conversion import read_table
from fedloom.data.sources.table.dates import check_dates, replace_dates
from fedloom.data.sources.table.roles import TableRoles


class RawTable(NamedTuple):
    """Table as defined by its file: name, column names, cells, and a collector of problems.

    ``coded`` lists columns whose type defines levels, and ``notes`` are notes on the file for the report.
    """

    name: str
    names: list[str]
    cells: Iterator[ColumnPiece]
    problems: Problems
    coded: Sequence[str] = ()
    notes: Sequence[str] = ()


class TableSource(TableRoles):
    """Roles of the columns in a table: a label, and features, which are all columns without another role."""

    @abstractmethod
    def open_file(self, data_dir: str | Path | None = None) -> AbstractContextManager[RawTable]:
        """Open the table in the file, leaving dates as they are."""
        ...

    @contextmanager
    def open(self, data_dir: str | Path | None = None) -> Iterator[RawTable]:
        """Open a table before roles are assigned to its columns. Its cells can be read inside the block.

        Raises:
            DataError: the file does not exist or is not a table.
            ConfigError: a column named in ``days_since`` does not exist.
        """
        with self.open_file(data_dir) as raw:
            yield raw._replace(cells=self.convert_dates(raw.names, raw.cells, raw.problems))

    def convert_dates(
        self, names: Sequence[str], cells: Iterator[ColumnPiece], problems: Problems
    ) -> Iterator[ColumnPiece]:
        """Replace dates in the columns of ``days_since`` by days, and yield all cells."""
        if not self.days_since:
            return cells
        check_dates(self.days_since, names, problems.where)
        return replace_dates(cells, self.days_since, self.markers, problems)

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load all rows."""
        with self.open(data_dir) as raw:
            spec = self.with_(categorical=tuple(dict.fromkeys((*self.categorical, *raw.coded)))) if raw.coded else self
            data = read_table(spec, raw.name, raw.names, raw.cells, raw.problems)
        return replace(data, notes=(*data.notes, *raw.notes)) if raw.notes else data
