"""The survey of a table before its columns have roles: kinds of columns, faults and notes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.sources import source
from fedloom.data.sources.table.cells import is_missing
from fedloom.data.sources.table.checks import rename
from fedloom.data.sources.table.reading import TableSource
from fedloom.data.sources.tabular import Csv
from fedloom.data.survey.facts import FEW, LATER, PER_LEVEL, ColumnProfile
from fedloom.errors import ConfigError, DataError, NoSamples, nearest

TARGETS = (
    "target", "label", "class", "outcome", "y", "response", "diagnosis", "result", "died", "dead", "death", "survived",
    "default", "churn", "churned", "disease", "readmitted", "ill", "sick", "price", "income",
)  # fmt: skip
SITES = (
    "site", "hospital", "center", "centre", "clinic", "client", "user", "institution", "facility", "ward", "station",
    "branch", "bank", "school", "store", "shop", "region", "country", "county", "state", "city", "device", "sensor",
    "machine", "plant", "group", "klinik", "standort", "writer", "speaker", "subject",
)  # fmt: skip


class Survey:
    """A table as it is found.

    Args:
        path: a CSV or Parquet file; a CSV file's separator and decimal sign are found out.

    Raises:
        DataError: no such file, no table, rows of another length, or columns of the same name.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise DataError(f"{path}: is a folder; give a CSV or Parquet file")
        self.path = path
        self.options: dict[str, Any] = {}
        kind = source(path)
        if not isinstance(kind, TableSource):
            raise DataError(f"{path}: is no table but {type(kind).__name__.lower()}; give a CSV or Parquet file")
        if isinstance(kind, Csv):
            signs = kind.signs()
            kind = kind.with_(**signs._asdict())
            self.options = {"separator": signs.separator} | ({"decimal": ","} if signs.decimal == "," else {})
        self.markers = kind.markers
        cells: dict[str, list[str]] = {}
        with kind.open() as raw:
            self.names = raw.names
            twice = sorted({name for name in raw.names if raw.names.count(name) > 1})
            for name in raw.names:
                cells[name] = []
            for piece in raw.cells if not twice else ():
                missing = is_missing(piece.cells, self.markers)
                cells[piece.column] += ["" if g else str(c).strip() for c, g in zip(piece.cells, missing, strict=True)]
            blocked = raw.problems.sentences()
        blocked += [f"more than one column is called {name!r}; {rename([name])}" for name in twice]
        if blocked:
            raise DataError(f"{path}: no draft runs until this is repaired:" + "".join(f"\n  - {b}" for b in blocked))
        if not raw.names:
            raise NoSamples(f"{path}: empty; a table needs a header row and rows below it")
        if not cells[raw.names[0]]:
            raise NoSamples(f"{path}: no rows below the header; an empty table")
        self.columns = {name: ColumnProfile(name, np.array(column, object)) for name, column in cells.items()}
        self.rows = len(next(iter(cells.values())))

    def column(self, name: str, what: str) -> ColumnProfile:
        """A column by name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self.columns:
            raise ConfigError(f"{self.path}: {what}: no column {name!r}; {nearest(name, self.names)}")
        return self.columns[name]

    def targets(self) -> list[str]:
        """Columns that may be the target, the likeliest first: by name, then those with few classes, from the right."""
        most = max(FEW, self.rows // (5 * PER_LEVEL))
        fit = [
            c for c in self.columns.values() if c.kind in ("number", "text") and not c.constant and not c.identifies
            and (c.kind == "number" or len(c.levels) <= most)
            and (c.name.lower() in TARGETS or len(c.levels) <= FEW or not LATER.search(c.name))
        ]  # fmt: skip
        whole = [c for c in fit if c.name.lower() in TARGETS]
        last = [c for c in fit if c.name == self.names[-1] and not _words(c.name) & set(SITES)]
        few = [c for c in reversed(fit) if len(c.levels) <= FEW and not _words(c.name) & set(SITES)]
        return list(dict.fromkeys(c.name for c in [*whole, *_named(fit, TARGETS), *last, *few]))

    def sites(self, target: str) -> list[str]:
        """Columns that may name the site of a row, the likeliest first."""
        fit = [
            c for c in self.columns.values() if c.name != target and (c.kind == "text" or c.whole)
            and 2 <= len(c.levels) <= self.rows / PER_LEVEL
        ]  # fmt: skip
        return [c.name for c in _named(fit, SITES)]

    def twins(self, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Columns with the same cells: a later one, and the first."""
        first_names: dict[bytes, str] = {}
        for name in names:
            key = "\0".join(self.columns[name].cells.tolist()).encode()
            if key in first_names:
                yield name, first_names[key]
            first_names.setdefault(key, name)


def _words(name: str) -> set[str]:
    """The words of a name, as of ``hospital_id`` and ``hospitalId``, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


def _named(columns: Sequence[ColumnProfile], words: Sequence[str]) -> list[ColumnProfile]:
    """The columns with one of the words in their name, in the order of the words."""
    hits_by_column = [(min(map(words.index, hits)), c) for c in columns if (hits := _words(c.name) & set(words))]
    return [c for _, c in sorted(hits_by_column, key=lambda pair: pair[0])]
