"""Profile one column of a table: its kind of cells, and its use as a feature."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedloom.data.sources.table.cells import QUANTITY_PATTERN
from fedloom.data.survey.people import personal
from fedloom.data.tables import is_number, number_of

Kind = Literal["number", "text", "date", "empty"]

DAY_PATTERN = r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))"
DATE_PATTERN = re.compile(rf"{DAY_PATTERN}([ T]\d{{1,2}}:\d{{2}}.*)?|\d{{1,2}}:\d{{2}}(:\d{{2}})?")
MISSING_TOKENS = frozenset(
    {"n/a", "n.a.", "k.a.", "none", "null", "nil", "-", "--", "---", ".", "..", "unknown", "unk", "missing"}
    | {"nk", "n.k.", "nd", "n.d.", "not known", "not available", "not done", "not reported", "na_na", "unbekannt"}
    | {"inconnu", "desconocido", "sconosciuto", "onbekend", "неизвестно", "不明"}
    | {"#n/a", "#value!", "#div/0!", "#null!", "inf", "-inf"}
)
"""Markers of missing cells in tables of the world, in lower case, beside a source's own markers."""
LEVELS_TOO = frozenset({"none", "nil", "null"})
"""Members of `MISSING_TOKENS` that are also levels in many tables: only 'fedloom init' reports them."""
MAX_ODD_SHARE = 0.2
"""Share of cells that may be no numbers in a column of numbers. Where they are few different ones."""
MOST_ODD = 4
"""Different cells that may be no numbers in a column of numbers. More are levels or texts."""
CLEAR_ZERO_SHARE = 0.05
"""Least number of a column, by its median, from which a zero beside it is no small one: 14 of 125 in insulin."""
MIN_ZERO_STEPS = 5
"""Steps of a column's numbers that lie between 0 and the least other. A count has one."""
MOST_ZERO = 0.6
"""Share of a column's numbers up to which zeros or codes may mean missing. More is what the column is about."""
NO_ANSWER_CODES = (-1, 9, 99, 999, -9, -99, 88, 77)
"""Codes that questionnaires have for no answer."""
MIN_CODE_DISTANCE = 3
"""Steps between such a code and the last answer."""
MAX_ANSWER_CODES = 7
"""Codes of a question beside which 9, 99 or -1 means that there is no answer."""
ID_NAME_PATTERN = re.compile(
    r"(^|[_\W])(id|uuid|guid|key|index|idx|mrn|nr|no|number|row|rownames|rownum|obs|observation)([_\W]|$)|^rn$|[a-z]I[dD]$|[a-z](nummer|nr)$",
    re.IGNORECASE,
)
"""Names of numbers of rows, and of what is known by a number."""
NAMELESS_PATTERN = re.compile(
    r"|unnamed(: ?\d+)?(_level_\d+)?|index|level_\d+|row\.?_?names?|(?-i:X(\.\d+)?)", re.IGNORECASE
)
"""Headers that pandas and R write for the names of rows."""
PERSON_NAME_PATTERN = re.compile(
    r"(^|[_\W])(patient|pat|subject|subj|person|individual|participant|case|proband|member|family|household|couple|litter|twin|pid|mrn|uid|id|user|animal|pig"
    r"|patid|hadm|stay)s?([_\W]|\d*$|(id|nr|no)$)",
    re.IGNORECASE,
)
"""Names of numbers of patients and the like, whose rows belong together."""
ID_NAMES = re.compile(r"(^|[_\W])(id|uuid|guid|key|mrn)([_\W]|$)|[a-z]I[dD]$", re.IGNORECASE)
"""Names of identifiers. Other numbers are counts as often."""
BIRTH_NAME_PATTERN = re.compile(r"birth|dob|born|geb|naissance|nacimiento|nascita|death|dod\b|died", re.IGNORECASE)
"""Names of dates of a person, not of when a row came."""
MOST_ALONE = 0.9
"""Different numbers per row up to which rows of a patient come again. Above, a few are entered twice."""
MAX_INDEX_SPARSITY = 20
"""Rows of the table that an index comes from, per row that is left of it, at most."""
IN_STEP = 0.8
"""Share of rows that count on by one, as the numbers of rows of several files that were joined do."""
MAX_UNITS = 3
"""Units that the cells of one column may have."""
MAX_FEW_LEVELS = 20
"""Classes that whole numbers may be, rows of a small site, and levels of text that need no count."""
PER_LEVEL = 10
"""Rows per level of a text column with many levels, on average."""
SCORE_BINS = 50
"""Groups of equal size into which a number is cut to measure how well it predicts the target."""
SENTINEL_PATTERN = re.compile(r"-?9+|-1|-?8+|-?7+|1e\+?\d+")
"""Numbers that people write for what is not known."""
MIN_SENTINEL_SHARE = 0.004
"""Share of a column's numbers from which an extreme one recurs."""
LATER_NAME_PATTERN = re.compile(
    r"follow.?up|fu_|(days|hours|time|months|weeks|years)_?(to|until|of|from)_|surviv|discharge|length_of_stay|\blos\b"
    r"|readmi|death|died|\bdod\b|relapse|outcome|recurrence",
    re.IGNORECASE,
)
"""Names of what is known only after the target."""


@dataclass(eq=False)
class ColumnProfile:
    """One column.

    Attributes:
        name: in the header.
        cells: ``[N]`` as text, "" where missing.
        kind: what most cells are.
        odd: cells that are no numbers in a column of numbers, most frequent first.
        extremes: numbers that recur and lie far from all others, as -9 and 999 do. A draft counts them as missing.
    """

    name: str
    cells: NDArray[np.object_]
    kind: Kind = field(init=False)
    odd: list[str] = field(init=False, default_factory=list)
    extremes: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.kind = "empty"
        if not len(self.present):
            return
        strange = [level for level in self.levels if number_of(level) is None]
        odd = sum(self.levels[level] for level in strange)
        tokens = all(level.strip().lower() in MISSING_TOKENS for level in strange)
        numeric, share = odd < len(self.present), odd / len(self.present)
        if numeric and (tokens or (share <= MAX_ODD_SHARE and len(strange) <= MOST_ODD)):
            self.kind, self.odd = "number", strange
            self.extremes = self._named({code for code in extremes(*self._counts()) if is_no_measurement(code)})
            self.__dict__.pop("values")  # without them
        elif all(DATE_PATTERN.fullmatch(level.strip()) for level in islice(self.levels, 1000)):
            self.kind = "date"
        else:
            self.kind = "text"

    @cached_property
    def present(self) -> NDArray[np.object_]:
        """Cells that are not missing."""
        cells: NDArray[np.object_] = self.cells[self.cells != ""]
        return cells

    @cached_property
    def levels(self) -> dict[str, int]:
        """Rows of every different cell, the most frequent first."""
        names, counts = np.unique(self.present.astype(str), return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return {str(names[k]): int(counts[k]) for k in order}

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """Numbers ``[N]``, NaN if missing or if a number means missing."""
        missing = {"", *self.extremes}
        numbers = {c: np.nan if c in missing or (v := number_of(c)) is None else v for c in {*self.cells.tolist()}}
        return np.array([numbers[c] for c in self.cells.tolist()])

    @cached_property
    def numbers(self) -> NDArray[np.float64]:
        """The values that are there, where the column is of numbers."""
        return self.values[~np.isnan(self.values)] if self.kind == "number" else np.empty(0)

    def _named(self, codes: Collection[float]) -> dict[str, int]:
        """Numbers as the cells that have them, and their counts."""
        return {level: self.levels[level] for level in self.levels if number_of(level) in codes}

    def _counts(self) -> Counts:
        values, counts = np.unique(self.values[~np.isnan(self.values)], return_counts=True)
        return values, counts

    @property
    def missing(self) -> int:
        """Missing cells, those among numbers that are none, or mean missing, counted."""
        missing_levels = [*self.odd, *self.extremes]
        return len(self.cells) - len(self.present) + sum(self.levels[level] for level in missing_levels)

    @property
    def constant(self) -> bool:
        """True if all cells that are there are the same."""
        return len(np.unique(self.numbers) if self.kind == "number" else self.levels) <= 1

    @property
    def whole(self) -> bool:
        """True if all numbers are whole."""
        return self.kind == "number" and bool((self.numbers == np.floor(self.numbers)).all())

    @property
    def quantity(self) -> str:
        """Name the signs or the unit that keep texts from being numbers, or "" if they are no numbers."""
        if self.kind != "text":
            return ""
        matches = [QUANTITY_PATTERN.fullmatch(level.strip()) for level in islice(self.levels, 10_000)]
        units = {(match["limit"] or match["unit"]).lower() for match in matches if match is not None} - {*"%€$£", ""}
        if None in matches or (units and (len(units) > MAX_UNITS or len(self.levels) <= MAX_FEW_LEVELS)):
            return ""
        example = next(level for level in self.levels if not is_number(level))
        return f"{'units or limits' if units else 'signs'} among the digits, as {example!r}"

    @property
    def doubts(self) -> list[str]:
        """The odd cells that are no usual word for missing: they may be numbers, limits, or levels."""
        return [level for level in self.odd if level.strip().lower() not in MISSING_TOKENS]

    @cached_property
    def personal(self) -> str:
        """Kind of personal information in the column, or "" for other columns."""
        return personal(self.name, self.levels, len(self.present)) if self.kind in ("text", "number") else ""

    @property
    def identifies(self) -> bool:
        """True if it names rows: texts that are nearly all different, or whole numbers in a row or by that name."""
        n, different = len(self.present), len(self.levels)
        if self.kind == "number" and row_number(self.name, self.values):
            return True
        if n < MAX_FEW_LEVELS or different < 0.9 * n:
            return False
        if self.kind == "text":
            return True
        counts = n == len(self.values) and self.values.min() in (0, 1) and is_permutation(self.values)
        return self.whole and different == n and (counts or bool(ID_NAME_PATTERN.search(self.name)))

    @cached_property
    def groups(self) -> NDArray[np.int64]:
        """``[N]`` group of every row: its level, or one of `SCORE_BINS` of equal size. Missing cells are a group."""
        if self.kind == "number" and len(self.levels) > SCORE_BINS:
            return binned(self.values)
        return np.unique(self.cells.astype(str), return_inverse=True)[1].astype(np.int64)


Counts = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Different numbers, rising, and how often each is there."""


def binned(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the group ``[N]`` of every number, one of `SCORE_BINS` of equal size. Missing ones are a group."""
    here = int((~np.isnan(values)).sum())
    bins = min(SCORE_BINS, max(here // PER_LEVEL, 1))
    cuts = np.nanquantile(values, np.linspace(0, 1, bins + 1)[1:-1]) if here else np.empty(0)
    return np.where(np.isnan(values), len(cuts) + 1, np.searchsorted(cuts, values, side="right"))


def is_no_measurement(code: float) -> bool:
    """Return whether a far number is hardly a count or a time, as 8 siblings or the hour -1 are."""
    return code <= -7 or code >= 77


def extremes(values: NDArray[np.float64], counts: NDArray[np.int64]) -> dict[float, int]:
    """Return the numbers that recur at one end of a column, as people write what is not known, and their counts.

    Such a number lies beyond the others by more than their whole middle half, twice, and is alone on its side.
    """
    total, marks = int(counts.sum()), dict[float, int]()
    often = np.nonzero(counts >= max(3, MIN_SENTINEL_SHARE * total))[0]
    for k in often[np.argsort(-counts[often], kind="stable")].tolist():
        value, count = float(values[k]), int(counts[k])
        if not value.is_integer() or not SENTINEL_PATTERN.fullmatch(str(int(value))):
            continue
        other = ~np.isin(values, [value, *marks])
        rest = int(counts[other].sum())
        if other.sum() < 3 or rest < total / 2:
            continue
        low, high = np.quantile(np.repeat(values[other], counts[other]), (0.25, 0.75))
        least, most = float(values[other].min()), float(values[other].max())
        gap = max(least - value, value - most)
        if gap > 2 * (high - low) or (value < 0 <= least and gap > 0):
            marks[value] = count
    return marks


def answers(values: NDArray[np.float64], counts: NDArray[np.int64]) -> dict[float, int]:
    """Return the numbers that may mean missing though they are not far from the others, and their counts.

    A zero is named beside measurements that never come near it. A 9, 99 or -1 beside a few codes in a row.
    """
    total, marks = int(counts.sum()), dict[float, int]()
    likely = (
        np.isin(values, (0, *NO_ANSWER_CODES))
        & (counts >= max(3, MIN_SENTINEL_SHARE * total))
        & (counts <= MOST_ZERO * total)
    )
    for k in np.nonzero(likely)[0].tolist():
        value, rest = float(values[k]), np.delete(values, k)
        if len(rest) < 2:
            continue
        least, codes = (
            float(rest[0]),
            len(rest) <= MAX_ANSWER_CODES and rest[0] in (0, 1) and bool((np.diff(rest) == 1).all()),
        )
        if value == 0:
            clear = len(rest) >= MAX_FEW_LEVELS and least >= CLEAR_ZERO_SHARE * float(np.median(rest))
            apart = clear and least > MIN_ZERO_STEPS * float(np.diff(rest).min())
        elif value == -1:
            apart = codes and least == 0 and len(rest) > 2
        else:
            apart = codes and abs(value - float(rest[-1])) >= MIN_CODE_DISTANCE
        if apart:
            marks[value] = int(counts[k])
    return marks


def is_permutation(values: NDArray[np.float64]) -> bool:
    """Return whether numbers ``[N]`` are whole numbers in a row, each once, in any order."""
    ordered = np.sort(values)  # NaN last
    return len(ordered) > 1 and bool((np.diff(ordered) == 1).all()) and bool(ordered[0] == np.floor(ordered[0]))


def row_number(name: str, values: NDArray[np.float64]) -> bool:
    """Return whether a column numbers the rows, so that a model learns nothing from it but how rows were ordered.

    Both the name and the numbers must say so: a year that rises by one is no row number.

    Args:
        name: in the header.
        values: ``[N]``, NaN where missing.
    """
    n, unnamed = len(values), NAMELESS_PATTERN.fullmatch(name) is not None
    if n < 3 or not (unnamed or ID_NAME_PATTERN.search(name)) or not (values == np.floor(values)).all():
        return False
    if values.min() in (0, 1) and is_permutation(values):
        return n >= 10 or (unnamed and bool((np.diff(values) == 1).all()))
    steps = np.diff(values)
    if n < MAX_FEW_LEVELS or values.min() < 0:
        return False
    if (steps > 0).all():
        return unnamed or values.max() < MAX_INDEX_SPARSITY * n
    return unnamed and (
        bool((steps == 1).mean() >= IN_STEP)
        or (len(np.unique(values)) == n and bool(values.max() < MAX_INDEX_SPARSITY * n))
    )


def repeats(name: str, levels: Collection[object], rows: int) -> bool:
    """Return whether a column identifies patients or the like, of whom most have several rows.

    Args:
        name: in the header.
        levels: different cells.
        rows: whose cell is not missing.
    """
    named = PERSON_NAME_PATTERN.search(name) or ID_NAMES.search(name)
    return bool(named) and MAX_FEW_LEVELS < len(levels) <= MOST_ALONE * rows
