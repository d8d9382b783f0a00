"""Profile of a column in a table: the type of its cells, and whether it is suitable as a feature."""

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
from fedloom.data.survey.people import names_subject, personal_information_kind
from fedloom.data.tables import is_number, parse_number

Kind = Literal["number", "text", "date", "empty"]

DAY_PATTERN = r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))"
DATE_PATTERN = re.compile(rf"{DAY_PATTERN}([ T]\d{{1,2}}:\d{{2}}.*)?|\d{{1,2}}:\d{{2}}(:\d{{2}})?")
MISSING_TOKENS = frozenset(
    {"n/a", "n.a.", "k.a.", "none", "null", "nil", "-", "--", "---", ".", "..", "unknown", "unk", "missing"}
    | {"nk", "n.k.", "nd", "n.d.", "not known", "not available", "not done", "not reported", "na_na", "unbekannt"}
    | {"inconnu", "desconocido", "sconosciuto", "onbekend", "неизвестно", "不明"}
    | {"#n/a", "#value!", "#div/0!", "#null!", "#ref!", "#num!", "#name?", "inf", "-inf"}
)
"""Common missing-value codes, in lower case, in addition to the codes that a source defines."""
POSSIBLE_LEVEL_TOKENS = frozenset({"none", "nil", "null"})
"""Members of `MISSING_TOKENS` that are ordinary levels in many tables. Only 'fedloom init' reports these findings."""
MAX_ODD_SHARE = 0.2
"""Maximum fraction of non-numeric cells in a numeric column, provided that these cells have few distinct values. In
other words, at least four of five cells are numbers, and the other cells have at most `MAX_ODD_VALUES` distinct
values."""
MAX_ODD_VALUES = 4
"""Maximum number of distinct non-numeric cells in a numeric column. A column with more of them is assumed to contain
levels or texts."""
CLEAR_ZERO_SHARE = 0.05
"""A zero cannot be a small measurement if the ratio of the column's smallest nonzero number to its median is at least
this large. For insulin, this ratio is 14/125, or 0.11."""
MIN_ZERO_STEPS = 5
"""Minimum distance between 0 and the smallest nonzero number, as a multiple of the smallest difference between numbers.

In a column of counts, this distance is a single step.
"""
MAX_ZERO_SHARE = 0.6
"""Maximum fraction of zeros or codes in a column if they may represent missing values. If codes are more frequent, they
are treated as regular values."""
NO_ANSWER_CODES = (-1, 9, 99, 999, -9, -99, 88, 77)
"""Questionnaire codes for "no answer"."""
MIN_CODE_DISTANCE = 3
"""Minimum distance between such a code and the last regular answer."""
MAX_ANSWER_CODES = 7
"""Maximum number of different regular answers to a question if 9, 99 or -1 may mean "no answer"."""
ID_NAME_PATTERN = re.compile(
    r"(^|[_\W])(id|uuid|guid|key|index|idx|mrn|nr|no|number|row|rownames|rownum|obs|observation)([_\W]|$)|"
    r"(^|[_\W])(num|numero|numéro|record|seq|sequence|serial|counter|line|zeile|ligne|fila|linha|riga)$|"
    r"^(rn|pk|sn|s\.?no\.?|column1|spalte1|v1|#|№|n[°º]|序号|编号|番号|번호)$|(?-i:[a-z]I[dD]$|[a-z](N[or]|Number|Num)$)|"
    r"[a-z](?<!wave)(nummer|nr|number)$|barcode$",
    re.IGNORECASE,
)
"""Pattern for names of columns that contain row numbers and other identifiers."""
NAMELESS_PATTERN = re.compile(
    r"|unnamed(: ?\d+(\.\d+)*)?(_level_\d+)?|index|level_\d+|\.\.\.1|row\.?_?names?|(?-i:X(\.\d+)*)", re.IGNORECASE
)
"""Pattern of headers that pandas and R write for row names."""
BIRTH_NAME_PATTERN = re.compile(r"birth|dob|born|geb|naissance|nacimiento|nascita|death|dod\b|died", re.IGNORECASE)
"""Pattern for names of dates of a person (such as birth) that do not indicate when a row was recorded."""
MAX_DISTINCT_SHARE = 0.9
"""Patients have several rows each if the ratio of distinct patients to rows is at most this large. If the ratio is
larger, the few repeated rows are considered duplicates."""
MAX_INDEX_SPARSITY = 20
"""Maximum ratio of the largest number in a column to the number of rows if the column may number the rows.

The ratio is larger than 1 if rows have been removed from the original table.
"""
MIN_CONSECUTIVE_SHARE = 0.8
"""Minimum fraction of rows whose number is the previous number plus one, if row numbers come from several files."""
MAX_UNITS = 3
"""Maximum number of different units in the cells of one column."""
MAX_FEW_LEVELS = 20
"""Maximum number of levels, classes or rows that counts as few."""
MIN_ROWS_PER_LEVEL = 10
"""Minimum average number of rows per level or group."""
SCORE_BINS = 50
"""Number of equal-sized groups of a numeric column, used to measure how well the column predicts a target."""
SENTINEL_PATTERN = re.compile(r"-?9+|-1|-?8+|-?7+|1e\+?\d+")
"""Pattern of numbers that often represent unknown values."""
MIN_SENTINEL_SHARE = 0.004
"""An extreme number is recurrent if at least this fraction of a column's numbers equals it."""
LATER_NAME_PATTERN = re.compile(
    r"follow.?up|fu_|(days|hours|time|months|weeks|years)_?(to|until|of|from)_|surviv|discharge|length_of_stay|\blos\b"
    r"|readmi|death|died|\bdod\b|relapse|outcome|recurrence",
    re.IGNORECASE,
)
"""Pattern for names of columns that contain facts that become known only after the target."""


SECONDS_RANGE = 946_684_800, 2_051_222_400
"""Range of seconds since 1970 that corresponds to the years 2000 to 2034."""
DAYS_RANGE = 10_000, 60_000
"""Range of days in a spreadsheet, counted from 1900, that corresponds to the years 1927 to 2064."""
DATE_NAME_PATTERN = re.compile(
    r"(?<![a-z])(date|datum|dat|day|adm|admi\w+|visit\w*|disch\w*|dob|dod|birth\w*|geb\w*|fecha)(?![a-z])",
    re.IGNORECASE,
)
"""Pattern for names of columns that contain dates."""


@dataclass(eq=False)
class ColumnProfile:
    """Profile of a single column.

    Attributes:
        name: name in the header.
        cells: cells ``[N]`` as text, which is "" for missing cells.
        kind: type of most cells.
        odd: non-numeric cells of a numeric column, with the most frequent ones first.
        extremes: recurrent numbers that are far from all other numbers, such as -9 and 999. A draft of an experiment
            treats these values as missing.
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
        strange = [level for level in self.levels if parse_number(level) is None]
        odd = sum(self.levels[level] for level in strange)
        tokens = all(level.strip().lower() in MISSING_TOKENS for level in strange)
        numeric, share = odd < len(self.present), odd / len(self.present)
        if numeric and (tokens or (share <= MAX_ODD_SHARE and len(strange) <= MAX_ODD_VALUES)):
            self.kind, self.odd = "number", strange
            self.extremes = self._count_cells(
                {code for code in find_extreme_codes(*self._counts()) if is_missing_code(code)}
            )
            self.__dict__.pop("values")  # computed again without the codes
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
        """Number of rows for each distinct cell, with the most frequent first."""
        names, counts = np.unique(self.present.astype(str), return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return {str(names[k]): int(counts[k]) for k in order}

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """Numbers ``[N]``, in which missing cells and missing-value codes are NaN."""
        missing = {"", *self.extremes}
        numbers = {c: np.nan if c in missing or (v := parse_number(c)) is None else v for c in {*self.cells.tolist()}}
        return np.array([numbers[c] for c in self.cells.tolist()])

    @cached_property
    def numbers(self) -> NDArray[np.float64]:
        """All values of a numeric column that are not missing."""
        return self.values[~np.isnan(self.values)] if self.kind == "number" else np.empty(0)

    def _count_cells(self, codes: Collection[float]) -> dict[str, int]:
        """Return the given numbers as they are written in cells, with their counts."""
        return {level: self.levels[level] for level in self.levels if parse_number(level) in codes}

    def _counts(self) -> Counts:
        values, counts = np.unique(self.values[~np.isnan(self.values)], return_counts=True)
        return values, counts

    @property
    def missing(self) -> int:
        """Number of missing cells, including non-numeric cells in numeric columns and codes for missing values."""
        missing_levels = [*self.odd, *self.extremes]
        return len(self.cells) - len(self.present) + sum(self.levels[level] for level in missing_levels)

    @property
    def constant(self) -> bool:
        """True if all cells are equal, apart from missing cells."""
        return len(np.unique(self.numbers) if self.kind == "number" else self.levels) <= 1

    @property
    def is_integer(self) -> bool:
        """True if all numbers are integers."""
        return self.kind == "number" and bool((self.numbers == np.floor(self.numbers)).all())

    @property
    def quantity(self) -> str:
        """Why text cells that contain numbers are not numeric (signs or units), or "" if they contain other text."""
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
        """Non-numeric cells that are not common missing-value codes, but may be numbers, limits or levels."""
        return [level for level in self.odd if level.strip().lower() not in MISSING_TOKENS]

    @cached_property
    def personal(self) -> str:
        """Kind of personal information that the column contains, or "" if it contains none."""
        return (
            personal_information_kind(self.name, self.levels, len(self.present))
            if self.kind in ("text", "number")
            else ""
        )

    @property
    def identifies(self) -> bool:
        """True if the column identifies rows: texts are mostly distinct, or it contains row numbers or identifiers."""
        n, different = len(self.present), len(self.levels)
        if self.kind == "number" and is_row_number(self.name, self.values):
            return True
        if n < MAX_FEW_LEVELS or different < 0.9 * n:
            return False
        if self.kind == "text":
            return True
        counts = n == len(self.values) and self.values.min() in (0, 1) and is_permutation(self.values)
        return self.is_integer and different == n and (counts or names_rows(self.name))

    @cached_property
    def groups(self) -> NDArray[np.int64]:
        """Group of each row ``[N]``. It is the row's level or, for numbers, one of `SCORE_BINS` groups of equal size.

        Rows with missing cells form a separate group.
        """
        if self.kind == "number" and len(self.levels) > SCORE_BINS:
            return group_equal_sizes(self.values)
        return np.unique(self.cells.astype(str), return_inverse=True)[1].astype(np.int64)


Counts = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Distinct numbers in ascending order, and the count of each."""


def group_equal_sizes(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the group ``[N]`` of each number. There are at most `SCORE_BINS` groups of equal size.

    Rows with missing values form a separate group.
    """
    here = int((~np.isnan(values)).sum())
    bins = min(SCORE_BINS, max(here // MIN_ROWS_PER_LEVEL, 1))
    cuts = np.nanquantile(values, np.linspace(0, 1, bins + 1)[1:-1]) if here else np.empty(0)
    return np.where(np.isnan(values), len(cuts) + 1, np.searchsorted(cuts, values, side="right"))


def is_missing_code(code: float) -> bool:
    """Return True if an outlying number is probably not a count or a time (as 8 siblings or the hour -1 would be)."""
    return code <= -7 or code >= 77


def find_extreme_codes(values: NDArray[np.float64], counts: NDArray[np.int64]) -> dict[float, int]:
    """Return recurrent numbers at either end of a column that may represent unknown values, with their counts.

    The distance between such a number and all other numbers is more than twice the interquartile range of the other
    numbers.
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


def find_answer_codes(values: NDArray[np.float64], counts: NDArray[np.int64]) -> dict[float, int]:
    """Return numbers that may represent missing values although they are close to other numbers, with their counts.

    A zero is treated as a missing-value code if no other measurement is close to zero. A value of 9, 99 or -1 is
    treated as a missing-value code if all other values form a short run of consecutive codes.
    """
    total, marks = int(counts.sum()), dict[float, int]()
    likely = (
        np.isin(values, (0, *NO_ANSWER_CODES))
        & (counts >= max(3, MIN_SENTINEL_SHARE * total))
        & (counts <= MAX_ZERO_SHARE * total)
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
    """Return True if numbers ``[N]`` are consecutive integers in any order, each of which occurs once."""
    ordered = np.sort(values)  # NaN is sorted last
    return len(ordered) > 1 and bool((np.diff(ordered) == 1).all()) and bool(ordered[0] == np.floor(ordered[0]))


def names_rows(name: str) -> bool:
    """Return True if the name of a column means a row number or another identifier.

    >>> [names_rows(n) for n in ("id", "PolicyNumber", "patientid", "Fallnr", "amount_paid", "wavenumber")]
    [True, True, True, True, False, False]
    """
    return bool(ID_NAME_PATTERN.search(name)) or names_subject(name)


def is_row_number(name: str, values: NDArray[np.float64]) -> bool:
    """Return True if a column only numbers the rows, so that a model could learn only the order of the rows from it.

    Both the name and the numbers of the column must suggest this. For example, a year that increases by one is not a
    row number.

    Args:
        name: name in the header.
        values: values ``[N]``, which are NaN for missing cells.
    """
    n, unnamed = len(values), NAMELESS_PATTERN.fullmatch(name) is not None
    if n < 3 or not (unnamed or names_rows(name)) or not (values == np.floor(values)).all():
        return False
    if values.min() in (0, 1) and is_permutation(values):
        return n >= 10 or (unnamed and bool((np.diff(values) == 1).all()))
    steps = np.diff(values)
    if n < MAX_FEW_LEVELS or values.min() < 0:
        return False
    if (steps > 0).all():
        return unnamed or values.max() < MAX_INDEX_SPARSITY * n
    return unnamed and (
        bool((steps == 1).mean() >= MIN_CONSECUTIVE_SHARE)
        or (len(np.unique(values)) == n and bool(values.max() < MAX_INDEX_SPARSITY * n))
    )


def is_repeated_unit(name: str, levels: Collection[object], rows: int) -> bool:
    """Return True if a column identifies patients or similar units, most of which have several rows.

    Args:
        name: name in the header.
        levels: distinct cells.
        rows: number of rows whose cell is not missing.
    """
    return names_subject(name) and MAX_FEW_LEVELS < len(levels) <= MAX_DISTINCT_SHARE * rows


def infer_time_unit(name: str, levels: NDArray[np.float64]) -> str:
    """Return the unit and the origin of integers that may be points in time, or "" if they cannot be."""
    for factor, unit in ((1, "seconds since 1970"), (1000, "milliseconds since 1970")):
        if SECONDS_RANGE[0] * factor <= levels[0] and levels[-1] <= SECONDS_RANGE[1] * factor:
            return unit
    spreadsheet = DATE_NAME_PATTERN.search(name) and DAYS_RANGE[0] <= levels[0] and levels[-1] <= DAYS_RANGE[1]
    return "days of a spreadsheet" if spreadsheet else ""
