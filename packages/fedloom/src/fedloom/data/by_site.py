"""Statistics of a table: how well each individual column predicts the target, and how sites differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from fedloom.data.survey.conversions import find_conversion, is_fahrenheit
from fedloom.data.survey.facts import MAX_FEW_LEVELS, ColumnProfile
from fedloom.formats import shorten_list
from fedloom.seeds import numpy_generator

MIN_CLASS_ROWS = 5
"""Minimum number of rows inside and outside a class for measuring how well a column predicts this class."""
MIN_NOTED_UNIT_RATIO = 4.0
"""Minimum ratio between medians at two sites that is reported even if no known unit conversion explains it."""
SAME_UNIT_RATIO = 1.5
"""Maximum ratio between medians at two sites that use the same unit. The factors of all
known unit conversions are larger."""
MAX_SPREAD_RATIO_GAP = 2.5
"""Maximum factor between the ratio of two sites' medians and the ratio of their spreads if the sites use different
units."""
ABSENT_COLUMN_SHARE = 0.98
"""A site lacks a column if at least this fraction of its cells is missing."""
MISSING_SHARE_DIFFERENCE = 0.3
"""Minimum difference between the fractions of missing cells at two sites that is reported."""

Rows = Mapping[str, NDArray[np.bool_]]
"""Masks ``[N]`` of the rows at each site, keyed by site name."""


class SingleColumnScore(NamedTuple):
    """Predictive value of a single column: a value in [0, 1], and a text that names the measure and the value."""

    value: float
    text: str


def score_column(column: ColumnProfile, target: ColumnProfile, task: str) -> SingleColumnScore:
    """Return how well a single column predicts the target (see `score_groups`)."""
    y = target.values
    if task != "regression":
        present = np.isin(target.cells, [*target.odd, ""], invert=True)
        y = np.where(present, np.unique(target.cells.astype(str), return_inverse=True)[1], np.nan)
    return score_groups(column.groups, column.values if column.kind == "number" else None, y, task)


def score_groups(
    groups: NDArray[np.int64],
    numbers: NDArray[np.float64] | None,
    y: NDArray[np.float64],
    task: str,
    least: float = 0.0,
) -> SingleColumnScore:
    """Return the AUROC of a column for the target's classes (averaged over classes with enough rows), or R2.

    For a numeric column, the rows are ranked directly by their numbers. In addition, a column of any type can rank rows
    by the mean target of their groups. The means are computed on one half of the rows and applied to the other half.
    The value is 0 if there are too few rows.

    Args:
        groups: group of each row ``[N]``. Rows with missing cells form a separate group.
        numbers: values of a numeric column ``[N]``, which are NaN for missing cells. None if the column consists of
            levels.
        y: targets ``[N]``, which are numbers for a "regression" and class codes otherwise. Missing targets are NaN.
        task: "regression" or "classification".
        least: value below which the function may return 0 instead, in order to save time.
    """
    present = ~np.isnan(y)
    if present.sum() < MAX_FEW_LEVELS:
        return SingleColumnScore(0.0, "")
    y, groups = y[present], groups[present]
    x = np.full(len(y), np.nan) if numbers is None else numbers[present]
    observed = ~np.isnan(x)
    if task == "regression":
        if y.std() == 0:
            return SingleColumnScore(0.0, "")
        value = float(1 - ((y - _cross_fitted_means(groups, y)) ** 2).mean() / y.var())
        if observed.sum() > len(y) / 2 and np.ptp(x[observed]) > 0 and np.ptp(y[observed]) > 0:
            value = max(value, float(np.corrcoef(x[observed], y[observed])[0, 1] ** 2))
            ranks = float(np.corrcoef(rankdata(x[observed]), rankdata(y[observed]))[0, 1] ** 2)
            value = max(value, ranks)  # high for a logarithm of the target, for example
        return SingleColumnScore(max(0.0, value), f"R2 {value:.3f} alone")
    ranks, values = rankdata(x[observed]), list[float]()
    codes, counts = np.unique(y, return_counts=True)
    enough = [
        code for code, count in zip(codes, counts, strict=True) if MIN_CLASS_ROWS <= count <= len(y) - MIN_CLASS_ROWS
    ]
    enough = enough[-1:] if len(codes) == 2 else enough
    for code in enough:
        here = y == code
        best = _auroc(rankdata(_cross_fitted_means(groups, here.astype(float))), here)
        if MIN_CLASS_ROWS <= here[observed].sum() <= observed.sum() - MIN_CLASS_ROWS:
            one, share = _auroc(ranks, here[observed]), float(observed.mean())
            best = max(best, share * max(one, 1 - one) + (1 - share) / 2)
        values.append(best)
        if (sum(values) + len(enough) - len(values)) / len(enough) < least:
            return SingleColumnScore(0.0, "")
    value = float(np.mean(values)) if values else 0.0
    return SingleColumnScore(value, f"AUROC {value:.3f} alone")


def _auroc(ranks: NDArray[np.float64], positive: NDArray[np.bool_]) -> float:
    """Return the AUROC, computed from the ranks of the scores by means of the rank-sum statistic.

    Ties must have average ranks.
    """
    count = int(positive.sum())
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(ranks) - count)))


def _cross_fitted_means(groups: NDArray[np.int64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for each row, the mean target of its group over the half of the rows that does not contain the row."""
    codes = np.unique(groups, return_inverse=True)[1]
    order = numpy_generator(0, purpose="halves").permutation(len(y))
    half, out = np.zeros(len(y), bool), np.empty(len(y))
    half[order[: len(y) // 2]] = True
    for here in (half, ~half):
        count = np.bincount(codes[~here], minlength=codes.max() + 1)
        total = np.bincount(codes[~here], y[~here], minlength=codes.max() + 1)
        out[here] = ((total + y[~here].mean()) / (count + 1))[codes[here]]
    return out


def count_classes_by_site(target: ColumnProfile, rows: Rows) -> dict[str, dict[str, int]]:
    """Return the number of rows of each class at each site, as ``{site: {class: rows}}``."""
    classes = [name for name in target.levels if name not in target.odd]
    return {site: {name: int((target.cells[here] == name).sum()) for name in classes} for site, here in rows.items()}


def note_site_differences(column: ColumnProfile, rows: Rows) -> Iterator[str]:
    """Yield a sentence for each difference in a column between sites."""
    missing = np.isnan(column.values) if column.kind == "number" else column.cells == ""
    shares = {site: float(missing[here].mean()) for site, here in rows.items()}
    present = [site for site, share in shares.items() if share < ABSENT_COLUMN_SHARE]
    if len(present) > 1 or len(rows) == 1:
        least, most = min(shares, key=lambda s: shares[s]), max(shares, key=lambda s: shares[s])
        if len(present) < len(rows):
            absent = [site for site in rows if site not in present]
            yield f"is missing at {shorten_list([*map(repr, absent)], 8)}"
        elif shares[most] - shares[least] >= MISSING_SHARE_DIFFERENCE:
            yield f"missing in {shares[least]:.0%} of the rows at {least!r}, but in {shares[most]:.0%} at {most!r}"
    if column.kind == "number":
        yield from note_unit_differences(column, rows)


def single_site_with_values(column: ColumnProfile, rows: Rows) -> str | None:
    """Return the only site with values in this column, or None if several sites or none have values."""
    present = [s for s, here in rows.items() if float((column.cells[here] == "").mean()) < ABSENT_COLUMN_SHARE]
    return present[0] if len(present) == 1 and len(rows) > 1 else None


class Shift(NamedTuple):
    """Site whose numbers differ from the numbers at other sites as if the site used a different unit.

    Attributes:
        median: median of the column at this site.
        other_median: median at the other sites.
        factor: known conversion factor that would correct the site's numbers. None if the ratio is
            not close to any known conversion.
        units: units between which the factor converts.
    """

    median: float
    other_median: float
    factor: float | None
    units: str


def find_site_shifts(column: ColumnProfile, rows: Rows) -> dict[str, Shift]:
    """Return the sites whose median and spread both differ from those at other sites by the same factor.

    Columns that contain numbers of 0 or less are skipped, because no factor can explain the differences between them.
    Such columns contain standardized values, logarithms or changes, so that the ratio of medians is meaningless. Row
    numbers, patient numbers and codes are skipped, because they have no units.
    """
    figures = _medians_and_ranges(column, rows)
    if len(figures) < 2 or not (column.numbers > 0).all() or column.identifies or len(column.levels) <= MAX_FEW_LEVELS:
        return {}
    middle, spread = _typical_median_and_range(figures)
    shifted = {}
    for site, (median, width) in figures.items():
        ratio = middle / median
        near = find_conversion(column.name, ratio)
        if min(width, spread) <= 0 or not 1 / MAX_SPREAD_RATIO_GAP <= ratio * width / spread <= MAX_SPREAD_RATIO_GAP:
            continue
        if is_fahrenheit(column.name, median, middle) or is_fahrenheit(column.name, middle, median):
            shifted[site] = Shift(median, middle, None, "degrees Fahrenheit and Celsius")
        elif near is not None and max(ratio, 1 / ratio) > SAME_UNIT_RATIO:
            shifted[site] = Shift(median, middle, *near)
        elif max(ratio, 1 / ratio) >= MIN_NOTED_UNIT_RATIO:
            shifted[site] = Shift(median, middle, None, "")
    return shifted


def _medians_and_ranges(column: ColumnProfile, rows: Rows) -> dict[str, tuple[float, float]]:
    """Return the median and interquartile range of a column at each site that has enough numbers."""
    figures = {}
    for site, here in rows.items():
        numbers = column.values[here & ~np.isnan(column.values)]
        if column.kind == "number" and len(numbers) >= max(MIN_CLASS_ROWS, (1 - ABSENT_COLUMN_SHARE) * here.sum()):
            low, middle, high = np.quantile(numbers, (0.25, 0.5, 0.75))
            figures[site] = (float(middle), float(high - low))
    return figures


def _typical_median_and_range(figures: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    """Return the median and range that are considered typical because they are similar to those at most sites."""
    return max(figures.values(), key=lambda one: sum(_are_same_unit(one[0], other[0]) for other in figures.values()))


def note_unit_differences(column: ColumnProfile, rows: Rows) -> Iterator[str]:
    """Yield a sentence about sites that seem to use a different unit than the other sites."""
    if not (shifted := find_site_shifts(column, rows)):
        return
    first = next(iter(shifted.values()))
    shown = ", ".join(f"{shift.median:.4g} at {site!r}" for site, shift in shifted.items())
    fold = np.median(
        [max(shift.other_median / shift.median, shift.median / shift.other_median) for shift in shifted.values()]
    )
    sentence = (
        f"medians differ by a factor of {fold:.3g} between sites ({shown}, {first.other_median:.4g} at the others)"
    )
    if units := {shift.units for shift in shifted.values() if shift.factor is not None}:
        unit_names = shorten_list(sorted(units), 3)
        yield f"{sentence}, as if the unit were different ({unit_names}). The draft proposes factors in a comment"
    elif first.units:
        yield f"{sentence}, like {first.units}. No factor converts between these, so convert the cells in the table"
    else:
        yield f"{sentence}. Check the units. The ratio is close to no known conversion, so the draft proposes no factor"


def _are_same_unit(a: float, b: float) -> bool:
    """Return True if two positive medians are similar enough to be in the same unit."""
    return max(a, b) < SAME_UNIT_RATIO * min(a, b)
