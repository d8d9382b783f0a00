"""Survey of a table before its columns are assigned roles: kinds of columns, problems and notes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data import source
from fedloom.data.sources.table.cells import is_missing
from fedloom.data.sources.table.checks import rename_hint
from fedloom.data.sources.table.levels import TRUTH_WORDS
from fedloom.data.sources.table.reading import TableSource
from fedloom.data.sources.tabular import Csv
from fedloom.data.survey.facts import (
    MAX_DISTINCT_SHARE,
    MAX_FEW_LEVELS,
    MIN_ROWS_PER_LEVEL,
    ColumnProfile,
    is_repeated_unit,
)
from fedloom.data.survey.people import IDENTITY_KINDS, NEUTRAL_WORDS, names_person, split_name, words
from fedloom.errors import ConfigError, DataError, NoSamples
from fedloom.hints import suggest_nearest

SITE_WORDS = words(
    "site sites hospital hospitals center centers centre centres clinic clinics institution institute inst facility "
    "practice trust provider client branch bank school store shop company firm plant factory station device sensor "
    "machine writer speaker user klinik klinikum krankenhaus standort praxis zentrum hopital clinique ospedale clinica "
    "centro filiale agence agency agentur sucursal schule ecole escuela colegio ziekenhuis szpital sjukhus 医院 "
    "больница"
)
"""Words for organizations that collect rows. A ward, region, country or group is a property of a row, so the survey
mentions it only as a possible site."""
PLACE_WORDS = words("ward region country county state city province district town group department careunit")
"""Words for properties of a row that may also identify the row's site."""
AMBIGUOUS_WORDS = words("school schule ecole escuela colegio practice trust bank branch")
"""Words in `SITE_WORDS` that may also refer to years of schooling, exercise, confidence, or a bank account."""
NUMBERED_WORDS = words("id ids name names code codes no nr num number key")
"""Words that, next to a word in `AMBIGUOUS_WORDS`, show that it refers to an organization."""
COUNT_OF_PATTERN = re.compile(r"(no|nr|num|number)s?[_\W]?of", re.IGNORECASE)
"""Pattern that matches the names of columns that contain a count, such as the number of sites."""


class TableSurvey:
    """Survey of a table.

    Args:
        path: file with the table. For a CSV file, the separator and the decimal sign are detected.
        options: options for reading the file, such as ``skip`` or ``sheet``.

    Raises:
        DataError: the file does not exist or is not a table, its rows differ in length, or several columns have the
            same name.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        if path.is_dir():
            raise DataError(f"{path} is a folder. Name the file of a table")
        self.path = path
        self.options: dict[str, Any] = {**options}
        kind = source(path, **options)
        if not isinstance(kind, TableSource):
            raise DataError(f"{path} is not a table but {type(kind).__name__.lower()}. Name the file of a table")
        if isinstance(kind, Csv):
            signs = kind.signs()
            kind = kind.with_(**signs._asdict())
            self.options |= {"separator": signs.separator} | ({"decimal": ","} if signs.decimal == "," else {})
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
        blocked += [f"more than one column is called {name!r}; {rename_hint([name])}" for name in twice]
        if blocked:
            raise DataError(
                f"{path}: fedloom cannot draft an experiment until these problems are repaired:"
                + "".join(f"\n  - {b}" for b in blocked)
            )
        if not raw.names:
            raise NoSamples(f"{path} is empty. A table needs a header row and rows below it")
        if not cells[raw.names[0]]:
            raise NoSamples(f"{path} has no rows below the header, so the table is empty")
        self.columns = {name: ColumnProfile(name, np.array(column, object)) for name, column in cells.items()}
        self.rows = len(next(iter(cells.values())))

    def column(self, name: str, what: str) -> ColumnProfile:
        """Return the column with the given name.

        Raises:
            ConfigError: the table has no column with this name.
        """
        if name not in self.columns:
            raise ConfigError(f"{self.path}: {what}: no column {name!r}; {suggest_nearest(name, self.names)}")
        return self.columns[name]

    def sites(self, excluded: Collection[str]) -> tuple[list[str], list[str]]:
        """Return the columns that identify a row's site, and the columns that may identify it.

        Args:
            excluded: the target and its event column, which cannot be the site column.
        """
        fit = [
            c for c in self.columns.values() if c.name not in excluded and (c.kind == "text" or c.is_integer)
            and 2 <= len(c.levels) <= self.rows / MIN_ROWS_PER_LEVEL
        ]  # fmt: skip
        sure, doubtful = list[str](), list[str]()
        for column in fit:
            parts = {*split_name(column.name)}
            if COUNT_OF_PATTERN.search(column.name):
                continue
            if parts & SITE_WORDS and parts <= SITE_WORDS | NEUTRAL_WORDS:
                trait = {level.strip().lower() for level in column.levels} <= TRUTH_WORDS.keys()
                trait |= bool(parts & AMBIGUOUS_WORDS) and not parts & NUMBERED_WORDS
                (doubtful if trait else sure).append(column.name)
            elif parts & (SITE_WORDS | PLACE_WORDS) and parts <= SITE_WORDS | PLACE_WORDS | NEUTRAL_WORDS:
                doubtful.append(column.name)
        return sure, doubtful

    def subjects(self, excluded: Collection[str]) -> tuple[list[str], list[str]]:
        """Return the column that identifies the subject of a row, and other columns that may identify it.

        If a table has both patients and stays, the subject is the patient, because one patient can have several stays.

        Args:
            excluded: the target, its event, and the column that names each row's site.
        """
        fit = [
            c for c in self.columns.values() if c.name not in excluded and (c.kind == "text" or c.is_integer)
            and MAX_FEW_LEVELS < len(c.levels) <= MAX_DISTINCT_SHARE * len(c.present)
            and (c.personal in IDENTITY_KINDS if c.personal else is_repeated_unit(c.name, c.levels, len(c.present)))
        ]  # fmt: skip
        whole = [c for c in fit if all(c is other or _determines_level(c, other) for other in fit)]
        first = sorted(whole or fit, key=lambda c: (not names_person(c.name), len(c.levels)))
        sure = [c.name for c in first if names_person(c.name) and (whole or len(fit) == 1)][:1]
        return sure, [c.name for c in first if c.name not in sure]

    def find_duplicates(self, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield pairs of columns with equal cells. Each later column is paired with the first one."""
        first_names: dict[bytes, str] = {}
        for name in names:
            key = "\0".join(self.columns[name].cells.tolist()).encode()
            if key in first_names:
                yield name, first_names[key]
            first_names.setdefault(key, name)


def _determines_level(one: ColumnProfile, other: ColumnProfile) -> bool:
    """Return True if rows with the same level of the other column always have the same level of this column."""
    pairs = {*zip(other.cells.tolist(), one.cells.tolist(), strict=True)}
    return len({level for level, _ in pairs}) == len(pairs)
