"""One column of a table as it is found: what kind of cells it has, and what they would do as a feature."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedloom.data.sources.table.cells import QUANTITY
from fedloom.data.tables import is_number

Kind = Literal["number", "text", "date", "empty"]

DAY = r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))"
DATE = re.compile(rf"{DAY}([ T]\d{{1,2}}:\d{{2}}.*)?|\d{{1,2}}:\d{{2}}(:\d{{2}})?")
TOKENS = frozenset(
    {"n/a", "n.a.", "k.a.", "none", "null", "nil", "-", "--", "---", ".", "..", "unknown", "unk", "missing"}
    | {"#n/a", "#value!", "#div/0!", "#null!", "inf", "-inf"}
)
"""Cells that mean missing in tables of the world, in lower case, beside those of a source."""
ODD = 0.05
"""Share of cells that may be no numbers in a column of numbers, where they are few different ones."""
IDS = re.compile(r"(^|[_\W])(id|uuid|guid|key|index|idx|mrn|nr|no|number|row)([_\W]|$)|^unnamed|^$", re.IGNORECASE)
UNITS = 3
"""Units that the cells of one column may have."""
FEW = 20
"""Classes that whole numbers may be, rows of a small site, and levels of text that need no count."""
PER_LEVEL = 10
"""Rows per level of a text column with many levels, on average."""
BINS = 50
"""Groups of equal size into which a number is cut to measure how well it predicts the target."""
SENTINEL = re.compile(r"-?9+|-1|-?8+|-?7+|1e\+?\d+")
"""Numbers that people write for what is not known."""
RECURS = 0.004
"""Share of a column's numbers from which an extreme one recurs."""
LATER = re.compile(
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
        extremes: numbers that recur and lie far from all others, as -9 and 999 do; they count as missing.
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
        numeric = sum(count for level, count in self.levels.items() if is_number(level))
        strange = [level for level in self.levels if not is_number(level)]
        tokens = all(level.strip().lower() in TOKENS for level in strange)
        share = 1 - numeric / len(self.present)
        if not share or (numeric and (tokens or (share <= ODD and len(strange) <= FEW / 4))):
            self.kind, self.odd = "number", strange
            self.extremes = self._extremes()
        elif all(DATE.fullmatch(level.strip()) for level in islice(self.levels, 1000)):
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
        """``[N]`` numbers, NaN where there is none, and where one means missing."""
        missing = {"", *self.extremes}
        return np.array([float(c) if c not in missing and is_number(c) else np.nan for c in self.cells])

    @cached_property
    def numbers(self) -> NDArray[np.float64]:
        """The values that are there, where the column is of numbers."""
        return self.values[~np.isnan(self.values)] if self.kind == "number" else np.empty(0)

    def _extremes(self) -> dict[str, int]:
        """Cells that recur at one end of the numbers, as people write what is not known, and their counts.

        Such a number lies beyond the others by more than their whole middle half, twice, and is alone on its side.
        """
        numbers = {level: float(level) for level in self.levels if level not in self.odd}
        total, extremes = sum(self.levels[level] for level in numbers), dict[str, int]()
        for level, value in numbers.items():
            count = self.levels[level]
            whole = level.strip().removesuffix(".0")
            if count < max(3, RECURS * total) or not SENTINEL.fullmatch(whole):
                continue
            rest = {v: self.levels[k] for k, v in numbers.items() if v != value and k not in extremes}
            other_numbers = np.repeat(np.array(list(rest)), np.array(list(rest.values()), int))
            if len(np.unique(other_numbers)) < 3 or len(other_numbers) < total / 2:
                continue
            low, high = np.quantile(other_numbers, (0.25, 0.75))
            gap = max(float(other_numbers.min()) - value, value - float(other_numbers.max()))
            signs = value < 0 <= other_numbers.min()
            if gap > 2 * (high - low) or (signs and gap > 0):
                extremes[level] = count
        return extremes

    @property
    def missing(self) -> int:
        """Missing cells, those among numbers that are none, or mean missing, counted."""
        missing_levels = [*self.odd, *self.extremes]
        return len(self.cells) - len(self.present) + sum(self.levels[level] for level in missing_levels)

    @property
    def constant(self) -> bool:
        """Whether all cells that are there are the same."""
        return len(self.levels) - len([*self.odd, *self.extremes] if self.kind == "number" else ()) <= 1

    @property
    def whole(self) -> bool:
        """Whether all numbers are whole."""
        return self.kind == "number" and bool((self.numbers == np.floor(self.numbers)).all())

    @property
    def quantity(self) -> str:
        """What keeps texts from being numbers: signs, or a unit of many; empty where they are none."""
        if self.kind != "text":
            return ""
        matches = [QUANTITY.fullmatch(level.strip()) for level in islice(self.levels, 10_000)]
        units = {(match["limit"] or match["unit"]).lower() for match in matches if match is not None} - {*"%€$£", ""}
        if None in matches or (units and (len(units) > UNITS or len(self.levels) <= FEW)):
            return ""
        example = next(level for level in self.levels if not is_number(level))
        return f"{'units or limits' if units else 'signs'} among the digits, as {example!r}"

    @property
    def identifies(self) -> bool:
        """Whether it names rows: texts that are nearly all different, or whole numbers in a row or by that name."""
        n, different = len(self.present), len(self.levels)
        if n < FEW or different < 0.9 * n:
            return False
        if self.kind == "text":
            return True
        ordered = np.sort(self.numbers)
        steady = len(ordered) > 1 and bool((np.diff(ordered) == 1).all())
        return self.whole and different == n and (steady or bool(IDS.search(self.name)))

    @cached_property
    def groups(self) -> NDArray[np.int64]:
        """``[N]`` group of every row: its level, or one of `BINS` of equal size; missing cells are a group."""
        if self.kind == "number" and len(self.levels) > BINS:
            bins = min(BINS, max(len(self.present) // PER_LEVEL, 1))
            cuts = np.nanquantile(self.values, np.linspace(0, 1, bins + 1)[1:-1])
            return np.where(np.isnan(self.values), len(cuts) + 1, np.searchsorted(cuts, self.values, side="right"))
        return np.unique(self.cells.astype(str), return_inverse=True)[1].astype(np.int64)
