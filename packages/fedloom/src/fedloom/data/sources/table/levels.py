"""Conversion of a column's cells to codes of levels, which are classes, clients or categories."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedloom.data.sources.table.cells import (
    MAX_SHOWN_LEVELS,
    Cells,
    ColumnPiece,
    Problems,
    convert_to_numbers,
    short_cell,
)
from fedloom.data.tables import Table, TableColumn, is_number, level_name, parse_number
from fedloom.errors import DataError
from fedloom.formats import shorten_list

MAX_LEVEL_CHARACTERS = 1000
"""Maximum number of characters in the name of a level. Cells with more characters are considered free text."""
TRUTH_WORDS = {
    **dict.fromkeys(("true", "yes", "t", "y", "1"), "true"),
    **dict.fromkeys(("false", "no", "f", "n", "0"), "false"),
}
"""Common ways to write true and false, in lower case."""
MAX_SHOWN_GROUPS = 4
"""Maximum number of groups of levels that a sentence lists."""
NUMBER_PATTERN = re.compile(r"(?=.{1,15}$)[-+]?[0-9]+([.,][0-9]+)?(e[-+]?[0-9]{1,2})?")
"""Pattern of a number in any common notation. It has at most 15 characters, because double precision represents every
number with up to 15 digits exactly."""


def similar_levels_text(counts: Mapping[str, int]) -> str:
    """Return levels that probably have the same meaning, as ``'0' (3) = 'FALSE' (4)``, or "" if none have.

    Levels probably have the same meaning if they differ only in capitals, spaces or the encoding of a letter, if they
    are notations of the same number, or if they are ways to write true and false in a column without other levels.

    Args:
        counts: number of rows for each level.

    >>> similar_levels_text({"TRUE": 2, "true": 1, "1": 4, "0": 5})
    "'TRUE' (2) = 'true' (1) = '1' (4)"
    >>> similar_levels_text({"f": 2, "m": 3, "F ": 1}), similar_levels_text({"n": 2, "f": 3})
    ("'f' (2) = 'F ' (1)", '')
    >>> similar_levels_text({"0": 2, "1": 3, "no": 4, "2": 5})
    ''
    >>> similar_levels_text({"7": 2, "007": 1, "7,0": 1, "a7": 1}), similar_levels_text({"1.2.3": 1, "1.23": 1})
    ("'7' (2) = '007' (1) = '7,0' (1)", '')
    """
    plain = {name: _normalize_level(name) for name in counts}
    texts = set(plain.values())
    truths = {TRUTH_WORDS[text] for text in texts} if texts <= TRUTH_WORDS.keys() else set[str]()
    if len(truths) > 1 or (truths and any(len(text) > 1 for text in texts)):
        plain = {name: TRUTH_WORDS[text] for name, text in plain.items()}
    groups: dict[str, list[str]] = {}
    for name, text in plain.items():
        groups.setdefault(text, []).append(f"{short_cell(name)} ({counts[name]})")
    several = [" = ".join(names[:MAX_SHOWN_LEVELS]) for names in groups.values() if len(names) > 1]
    return shorten_list(several, MAX_SHOWN_GROUPS)


def _normalize_level(name: str) -> str:
    """Return a level in lower case without redundant spaces, or a number without leading and trailing zeros."""
    text = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
    number = NUMBER_PATTERN.fullmatch(text)
    return np.format_float_positional(float(text.replace(",", ".")), trim="-") if number is not None else text


Factors = Mapping[str, float | Mapping[str, float]]
"""Factors of columns. Each factor is one number, or one number per client."""


def get_factor(factors: Factors, column: str) -> float:
    """Return the factor that applies to a whole column.

    The value is 1 if the column has no factor, or one factor per client.
    """
    factor = factors.get(column, 1.0)
    return 1.0 if isinstance(factor, Mapping) else factor


def factors_by_client(factors: Factors, clients: Sequence[str]) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield each column with one factor per client, and the factors ``[k]`` of the given clients (1 by default)."""
    for column, factor in factors.items():
        if isinstance(factor, Mapping):
            yield column, np.array([factor.get(client, 1.0) for client in clients])


def unapplied_factor_notes(factors: Factors, users: str | None, clients: Collection[str] | None) -> list[str]:
    """Return a sentence for each factor of a client that does not apply to any row.

    Args:
        factors: factors of columns.
        users: name of the column that contains the client of each row.
        clients: clients that have at least one row each. None if the column does not exist.
    """
    absent = {c: [k for k in f if k not in (clients or ())] for c, f in factors.items() if isinstance(f, Mapping)}
    if absent and clients is None:
        return [f"no column {users!r}, so no factor by client is applied"]
    return [f"factors of {column!r}: no row of {client!r}" for column, names in absent.items() for client in names]


class LevelCodeCollector:
    """Collector of a column's levels, which are numbered by first occurrence and sorted at the end."""

    def __init__(self) -> None:
        self.levels: dict[str, int] = {}
        self.rows: list[NDArray[np.int32]] = []

    def add(self, cells: Cells, missing: NDArray[np.bool_]) -> None:
        """Add the cells of further rows.

        Raises:
            DataError: a cell contains free text instead of the name of a level.
        """
        longest = max((len(cell) for cell in cells if isinstance(cell, str | bytes)), default=0)
        if longest > MAX_LEVEL_CHARACTERS:
            raise DataError(
                f"a cell of {longest:,} characters is too long for the name of a class, client or "
                f"category (at most {MAX_LEVEL_CHARACTERS:,}). Drop the column, or read it as text"
            )
        codes = [
            -1 if is_missing else self.levels.setdefault(level_name(cell), len(self.levels))
            for cell, is_missing in zip(cells, missing.tolist(), strict=True)
        ]
        self.rows.append(np.array(codes, np.int32))

    def build_codes(self) -> tuple[NDArray[np.float64], tuple[str, ...]]:
        """Return the codes of all rows ``[N]``, which are NaN for missing cells, and the levels."""
        names = sorted(self.levels, key=natural_sort_key)
        place = np.empty(len(names) + 1)
        place[[self.levels[name] for name in names]] = np.arange(len(names))
        place[-1] = np.nan  # for missing cells, whose code is -1
        return place[np.concatenate(self.rows)], tuple(names)


class AgreedColumnConverter:
    """Converter of the cells in an agreed column to numbers, or to codes of the column's levels.

    Attributes:
        column: agreed column.
        filled: number of cells read so far that will be filled, because they are missing or have an unknown level.
        unknown: unknown levels, with the number of cells for each.

    Args:
        column: agreed column.
        impute: True if missing cells and unknown levels are to be filled instead of reported.
        cure: advice on how to handle the reported cells.
        factor: factor for numbers.
    """

    def __init__(self, column: TableColumn, impute: bool, cure: str, factor: float = 1.0) -> None:
        self.column, self.filled, self._impute, self._cure, self._factor = column, 0, impute, cure, factor
        self._codes = {name: code for code, name in enumerate(column.names)}
        self.unknown = Counter[str]()

    @property
    def listed_levels(self) -> str:
        """Most frequent unknown levels and the agreed levels, which are listed in messages."""
        unknown = ", ".join(short_cell(name) for name, _ in self.unknown.most_common(4))
        return f"{unknown}; agreed are {', '.join(self.column.names[:20])}"

    def read(self, piece: ColumnPiece, missing: NDArray[np.bool_], problems: Problems) -> NDArray[np.float64]:
        """Return the values of the cells in a piece of the column.

        Missing cells and cells with unknown levels become NaN.

        Args:
            piece: consecutive cells of the column.
            missing: mask of the missing cells ``[k]``.
            problems: collector for cells that are not numbers or codes, and for missing cells and unknown levels that
                are not filled.
        """
        column, name = self.column, self.column.name
        if not self._impute:
            problems.add_gaps(piece, missing, self._cure)
        self.filled += int(missing.sum())
        if not column.names:
            out = convert_to_numbers(piece, missing, problems, "repair the cell, or add it to missing")
            if column.levels and (wrong := ~np.isnan(out) & ~np.isin(out, np.arange(column.levels))).any():
                what = f"column {name!r}: {out[wrong][0]:g} is not a code from 0 to {column.levels - 1}"
                problems.add("code", name, what, out[wrong].tolist(), "repair the cell")
            return out if self._factor == 1 else out * self._factor
        codes = (
            -1 if hole else self._codes.get(level_name(c), -2) for c, hole in zip(piece.cells, missing, strict=True)
        )
        out = np.fromiter(codes, np.float64, len(piece.cells))
        strange = out == -2
        if strange.any() and not self._impute:
            what = (
                f"row {problems.first + piece.start + int(strange.argmax())}, column {name!r}: unknown level "
                f"{short_cell(str(piece.cells[int(strange.argmax())]))}, allowed are {', '.join(column.names[:20])}"
            )
            cells = [cell for cell, odd in zip(piece.cells, strange, strict=True) if odd]
            problems.add("level", name, what, cells, self._cure)
        self.filled += int(strange.sum())
        self.unknown.update(level_name(cell) for cell, odd in zip(piece.cells, strange, strict=True) if odd)
        return np.where(out < 0, np.nan, out)


def agreed_columns(table: Table, cure: str, factors: Factors) -> dict[str, AgreedColumnConverter]:
    """Return converters of all columns of an agreed table, keyed by column name (see `AgreedColumnConverter`)."""
    return {c.name: AgreedColumnConverter(c, table.impute, cure, get_factor(factors, c.name)) for c in table.columns}


def natural_sort_key(text: str) -> tuple[float, str]:
    """Return a sort key that puts numbers first, ordered by value, and then all other texts."""
    value = parse_number(text) if is_number(text) else None
    return (np.inf, text) if value is None else (value, text)
