"""Rows of Table 1: means, deviations, quantiles, levels, and p-values, computed from sums by group.

The references are in `fedloom_clinic.table_one`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from fedloom_clinic.cells import MISSING_LEVEL, MergedCells, range_widths

Floats = NDArray[np.float64]
TABLE_QUANTILES = {"q25": 0.25, "median": 0.5, "q75": 0.75}
UNIT_FACTORS = {
    18.02: "glucose in mmol/l and mg/dl", 88.4: "creatinine in mg/dl and umol/l", 38.67: "cholesterol in mmol/l and "
    "mg/dl", 2.205: "kg and pounds", 2.54: "inches and cm", 100.0: "a hundredfold unit", 10.0: "a tenfold unit",
    1000.0: "a thousandfold unit", 365.25: "days and years", 30.44: "days and months",
}  # fmt: skip
"""Ratios between two units of the same quantity that are common in clinics."""
UNIT_TOLERANCE = 0.15
"""Relative tolerance between the ratio of clients' medians and the ratio of units."""
MIN_NOTED_DISTANCE = 1.0
"""Distance between a client's mean and the others' mean, in the others' standard deviations, that triggers a note.

For comparison, Cohen calls an effect of 0.8 large.
"""
TABLE_FIGURES = (
    "rows", "share", "missing", "beyond", "mean", "deviation", *TABLE_QUANTILES, "bin", "standardized_difference",
        "p_groups",
    "p_clients", "bound",
)  # fmt: skip
TABLE_SCHEMA = pa.schema([
    *((name, pa.string()) for name in ("column", "level", "group")), *((name, pa.float64()) for name in TABLE_FIGURES),
    ("edges", pa.list_(pa.float64())), ("counts", pa.list_(pa.float64())), ("note", pa.string()),
])  # fmt: skip


@dataclass(frozen=True, eq=False)
class SummaryColumn:
    """Column with its cells: bins of a numeric column or levels of a coded column, followed by missing cells.

    Args:
        name: name of the column.
        place: the column's position in the rows.
        edges: edges of the bins of a numeric column, ``[bins + 1]``. None if the column is coded.
        cells: cells of a coded column.
        levels: number of levels of a coded column before cells were merged.
        merged_bins: merged bin of each original bin, ``[bins]``.
    """

    name: str
    place: int
    edges: Tensor | None
    cells: MergedCells
    levels: int
    merged_bins: Tensor

    @property
    def cell_count(self) -> int:
        """Number of cells, excluding the cell for missing values."""
        return len(self.cells.names) - (self.cells.names[-1] == MISSING_LEVEL)

    @property
    def size(self) -> int:
        """Number of values for the column per group in the first answer.

        There is one value for each cell. A numeric column also has the numbers of missing rows and of rows outside the
        range, and a sum.
        """
        return len(self.cells.names) if self.edges is None else int(self.merged_bins.max()) + 4

    @property
    def flags(self) -> int:
        """Number of the column's cells for which clients state whether they have enough subjects."""
        bins = len(self.merged_bins)
        return len(self.cells.names) if self.edges is None else sum(-(-bins // width) for width in range_widths(bins))


class GroupMoments(NamedTuple):
    """Moments of a number by group: rows ``[G]``, means ``[G + 1]``, squares on [-1, 1], and conversion to its unit.

    ``error`` is the largest effect of rounding on a sum.
    """

    rows: Floats
    centre: Floats
    squares: Floats
    half: float
    middle: float
    error: float


def describe_number(
    column: SummaryColumn, groups: MergedCells, counted: list[Floats], of: GroupMoments, between: float, clients: int
) -> Iterator[dict[str, object]]:
    """Yield the table's rows for a numeric column, one for each group with rows."""
    assert column.edges is not None
    edges, some = column.edges.numpy(), [g for g, block in enumerate(counted) if block[:-1].any()]
    n, mean = of.rows, of.centre[:-1] * of.half + of.middle
    deviation = np.sqrt(of.squares / np.maximum(n - 1, 1)) * of.half
    tested = [g for g in some if n[g] > 0 and g < groups.named]  # rows without a group are not tested
    full = [g for g in tested if n[g] > 1]
    pairs = list(combinations(full, 2))
    gaps = [abs(mean[a] - mean[b]) / np.sqrt((deviation[a] ** 2 + deviation[b] ** 2) / 2) for a, b in pairs
            if deviation[a] + deviation[b] > 0]  # fmt: skip
    squares = float((of.squares + n * (of.centre[:-1] - of.centre[-1]) ** 2).sum())
    p = None
    if len(tested) > 2:  # a group with one row has a mean but no deviation
        counts, centre = n[tested], of.centre[tested]
        apart = float(counts @ (centre - counts @ centre / counts.sum()) ** 2)
        p = _f_test(apart, apart + float(of.squares[tested].sum()), len(tested), counts.sum())
    elif len(full) == 2:
        a, b = full
        p = stats.ttest_ind_from_stats(mean[a], deviation[a], n[a], mean[b], deviation[b], n[b], equal_var=False).pvalue
    for g in some:
        counts = counted[g][:-3]
        middle = {name: _quantile(edges, counts, level) for name, level in TABLE_QUANTILES.items()}
        yield {
            "column": column.name, "group": groups.names[g], "rows": n[g], "missing": counted[g][-3],
            "beyond": counted[g][-2], "mean": mean[g] if n[g] else None,
            "deviation": deviation[g] if n[g] > 1 else None,
            **middle, "bin": float(np.diff(edges).max()), "standardized_difference": max(gaps, default=None),
            "p_groups": _p_value_number(p), "p_clients": _p_value_number(_f_test(between, squares, clients, n.sum())),
            "edges": edges.tolist(), "counts": counts.tolist(), "bound": _rounding_bound(of, g),
        }  # fmt: skip


def _rounding_bound(of: GroupMoments, group: int) -> float | None:
    """Return the largest effect of rounding on a group's mean or deviation.

    Return None for fewer than two rows.
    """
    n, squares = of.rows[group], of.squares[group]
    if n < 2:
        return None
    mean = of.error / n
    spread = np.sqrt(squares / (n - 1))
    wrong = (of.error + n * mean**2) / (n - 1)  # includes the rounding of the mean
    deviation = wrong / spread if spread**2 > 2 * wrong else np.sqrt(2 * wrong) + spread
    return float(of.half * max(mean, deviation))


def describe_code(
    column: SummaryColumn, groups: MergedCells, counted: Floats, statistic: float, clients: int
) -> Iterator[dict[str, object]]:
    """Yield the table's rows for a coded column, one for each level and each group with rows."""
    shown = counted[:, : column.cell_count]
    some = [g for g in range(len(counted)) if counted[g].any()]
    full = [g for g in some if shown[g].any() and g < groups.named]  # rows without a group are not tested
    used, levels = shown[full][:, shown[full].any(0)], int(shown.any(0).sum())
    p = stats.chi2_contingency(used).pvalue if min(used.shape) > 1 else None
    between = stats.chi2.sf(statistic, (clients - 1) * (levels - 1)) if clients > 1 < levels else None
    gaps = [_difference(shown[a], shown[b]) for a, b in combinations(full, 2)]
    for g in some:
        for k, level in enumerate(column.cells.names):
            if k >= column.cell_count and not counted[:, k].any():
                continue  # there are no missing cells
            yield {
                "column": column.name, "level": level, "group": groups.names[g], "rows": counted[g, k],
                "share": counted[g, k] / max(shown[g].sum(), 1) if k < column.cell_count else None,
                "missing": counted[g, column.cell_count :].sum() if column.cell_count < counted.shape[1] else None,
                "standardized_difference": max(gaps, default=None),
                "p_groups": _p_value_number(p), "p_clients": _p_value_number(between),
            }  # fmt: skip


def _f_test(between: float, total: float, groups: int, rows: float) -> float | None:
    """Return the p-value of a one-way analysis of variance.

    If there are fewer than two groups or no spread, return None.
    """
    within = total - between
    if groups < 2 or rows <= groups or within <= 0:
        return None
    return float(stats.f.sf(between / (groups - 1) / (within / (rows - groups)), groups - 1, rows - groups))


def _difference(first: Floats, second: Floats) -> float:
    """Return Yang and Dalton's standardized difference between level proportions, ``[L]``."""
    one, two = first / first.sum(), second / second.sum()
    gap = (one - two)[1:]
    covariance = (np.diag(one) - np.outer(one, one) + np.diag(two) - np.outer(two, two))[1:, 1:] / 2
    return float(np.sqrt(max(gap @ np.linalg.pinv(covariance) @ gap, 0.0)))


def _quantile(edges: Floats, counts: Floats, level: float) -> float | None:
    """Return a quantile computed from bin counts, assuming a uniform distribution within each bin.

    Return None if there are no rows, or only one bin, which does not determine a quantile.
    """
    if not counts.any() or len(counts) == 1:
        return None
    below = np.append(0.0, counts.cumsum())
    return float(np.interp(level * below[-1], below, edges))


def _p_value_number(p: float | None) -> float | None:
    return None if p is None or not np.isfinite(p) else float(p)


def note_clients(rows: list[dict[str, object]]) -> None:
    """Add notes about clients with unusual numbers, and suggest a different unit as a possible reason.

    The unit is only a guess and is never applied.
    """
    numbers = [row for row in rows if row.get("counts") is not None]
    for row in numbers:
        rest = [o for o in numbers if o["column"] == row["column"] and o is not row and o.get("deviation") is not None]
        if row.get("deviation") is None or len(rest) < 2:
            continue
        n, mean, spread = (np.array([o[key] for o in rest], float) for key in ("rows", "mean", "deviation"))
        centre = float((n * mean).sum() / n.sum())
        deviation = float(np.sqrt(((n - 1) * spread**2 + n * (mean - centre) ** 2).sum() / (n.sum() - 1)))
        gap = (float(str(row["mean"])) - centre) / deviation if deviation > 0 else 0.0
        if abs(gap) <= MIN_NOTED_DISTANCE:
            continue
        note = f"is unusual: its mean differs from the others' mean by {gap:+.1f} of their standard deviations"
        if row["median"] is None:  # for example, because all rows are in one bin
            row["note"] = note
            continue
        here, elsewhere = float(str(row["median"])), float(np.median([float(str(o["median"])) for o in rest]))
        ratio = max(here / elsewhere, elsewhere / here) if here * elsewhere > 0 else 0.0
        for factor, units in UNIT_FACTORS.items():
            if abs(ratio / factor - 1) <= UNIT_TOLERANCE:
                note += (
                    f". The ratio of medians, {ratio:.3g}, is close to the ratio of {units} "
                    f"({factor:g}). Is the unit different?"
                )
                break
        row["note"] = note
