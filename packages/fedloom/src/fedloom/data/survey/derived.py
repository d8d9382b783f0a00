"""Columns that are computed from an outcome: formulas, means by group, ranks in groups, and outcomes of other rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from fedloom.data.survey.facts import MAX_FEW_LEVELS, MIN_ROWS_PER_LEVEL, SCORE_BINS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MIN_COMPARED_ROWS = 20
"""Minimum number of rows for comparing a column with an outcome."""
MAX_COMPARED_COLUMNS = 200
"""Maximum number of numeric columns in the search for formulas and ranks in groups."""
MIN_PRESENT_SHARE = 0.8
"""A column can be part of a formula only if at least this share of its rows contains a number."""
FORMULA_TOLERANCE = 5e-3
"""Maximum standard deviation, relative to that of the target, of its difference from a formula. Formulas of rounded
numbers reach it, whereas a measurement error of one percent does not."""
MAX_FACTOR_ERROR = 0.1
"""Maximum error of factors in a formula for a rounded target, which must be simple."""
MAX_DIGITS, ROUNDING_MARGIN, MAX_ROUNDING_ERROR = 7, 1.1, 0.15
"""Maximum number of decimals of a rounded target, maximum distance from a formula as a multiple of the rounding error,
and maximum rounding error, relative to the target's standard deviation."""
MIN_TERM_SHARE = 0.02
"""Minimum standard deviation of a term of a formula, relative to that of the target."""
MAX_SHOWN_TERMS = 6
LATER_END = ", so it may be recorded after the outcome. Unless it is known beforehand, add it to drop"
MEAN_END = ", including test rows, so scores are too good. Compute it only from training rows, or add it to drop"
"""Ends of notes on columns that contain the target, and on columns that contain its means."""
MIN_MEAN_LEVELS, MIN_SCALED_LEVELS = 4, 8
"""Minimum number of groups for recognizing means of the target by group, and minimum number if the means may also be in
another unit or standardized."""
MAX_MISFIT = 0.005
"""Maximum mean squared distance between a column and the mean target of its groups, in squared standard errors.

Rounded means reach it. A feature whose value is an honest forecast of the target has a distance of about 1.
"""
MIN_EQUAL_LEVELS, MAX_EQUAL_ERROR = 0.5, 1e-6
"""Minimum share of levels that equal a smoothed mean, and maximum error. Two groups whose smoothed means are equal
appear as one group."""
MAX_GROUPINGS, MAX_GROUPS, MAX_GROUP_ROWS = 20, 300, 30
"""Maximum number of grouping columns, of groups per column, and of rows per group."""
MIN_LINEAR_GROUP_ROWS, MIN_LINEAR_GROUPS = 4, 3
"""Minimum number of rows in a group, and minimum number of groups where a column is exactly linear in the target.

A column that only increases with the target within groups, such as the height of a child with its age, is not a leak.
"""
MAX_LAG_ROWS, LAG_PROBES, MAX_TRIED_LAGS = 31, 64, 3
"""Maximum row offset of an outcome that a column may contain, number of rows in the first comparison, and maximum
number of offsets with a comparison of all rows."""
MIN_LAG_AGREEMENT, MIN_MEASURED_AGREEMENT = 0.95, 0.5
"""Minimum agreement, corrected for chance, of a column with the outcome of another row, and minimum if the outcome is a
measurement, whose values rarely agree. In a table of visits, each last visit of a patient has no later outcome."""
MAX_UNSHIFTED_AGREEMENT = 0.25
MAX_ERROR_RATIO = 0.1
"""Maximum number of rows that differ from the usual value for their outcome, relative to the number of rows without
the most common value. A symptom of a rare class may be as rare as the class."""


def find_formula(numbers: Mapping[str, Floats], y: Floats) -> tuple[list[str], str]:
    """Return the columns whose weighted sum, or product of powers, equals the target, and the formula.

    Without such a formula, both are empty.

    Args:
        numbers: numbers ``[N]`` of each numeric feature. Missing numbers are NaN.
        y: numbers of the target ``[N]``.
    """
    if not 2 <= len(numbers) <= MAX_COMPARED_COLUMNS:
        return [], ""
    whole = y[~np.isnan(y)]
    step = next((10.0**-digits for digits in range(MAX_DIGITS) if np.array_equal(whole.round(digits), whole)), 0.0)
    every = np.stack([*numbers.values()], 1)
    names = np.array([*numbers], object)
    for product in (False, True):
        with np.errstate(divide="ignore"):
            x, goal = (np.log(np.abs(v)) if product else v for v in (every, y))
        x, goal = x[np.isfinite(goal)], goal[np.isfinite(goal)]
        if len(goal) < MIN_COMPARED_ROWS:
            continue
        used = np.isfinite(x).mean(0) >= MIN_PRESENT_SHARE
        here = np.isfinite(x[:, used]).all(1)
        x, goal = x[here][:, used], goal[here]
        if len(goal) < MIN_COMPARED_ROWS + x.shape[1] or x.shape[1] < 2 or goal.std() == 0:
            continue
        error = step * float(np.sqrt(np.mean(np.exp(-2 * goal)) / 12)) if product else step / np.sqrt(12)
        limit = max(FORMULA_TOLERANCE, min(error / goal.std(), MAX_ROUNDING_ERROR) * ROUNDING_MARGIN)
        spread = x.std(0)
        x = (x - x.mean(0)) / np.where(spread > 0, spread, np.inf)
        weights = np.linalg.lstsq(x, (goal - goal.mean()) / goal.std())[0]
        if (x @ weights - (goal - goal.mean()) / goal.std()).std() > limit:
            continue
        large = np.abs(weights) >= MIN_TERM_SHARE
        if large.sum() < 2:  # one column has a note of its own
            continue
        factors = weights[large] * goal.std() / spread[large]
        if limit > FORMULA_TOLERANCE and not _are_simple(factors, 0.5 if product else 0.05):
            continue
        terms = names[used][large].tolist()
        return terms, _formula_text(terms, factors, product) if len(terms) <= MAX_SHOWN_TERMS else ""
    return [], ""


def _are_simple(factors: Floats, step: float) -> bool:
    """Return True if all factors are nearly multiples of a step, or nearly equal apart from their signs."""
    sizes = np.abs(factors)
    multiples = np.abs(sizes / step - np.round(sizes / step)) <= MAX_FACTOR_ERROR
    return bool((multiples & (sizes >= step / 2)).all()) or bool(np.ptp(sizes) <= MAX_FACTOR_ERROR * sizes.max())


def _formula_text(names: Sequence[str], factors: Floats, product: bool) -> str:
    """Return a weighted sum, or a product of powers, as text."""
    text = ""
    for name, factor in zip(names, np.round(factors, 2).tolist(), strict=True):
        size = "" if abs(factor) == 1 else f"^{abs(factor):g}" if product else f"{abs(factor):g} * "
        term = f"{name}{size}" if product else f"{size}{name}"
        sign = (" / " if factor < 0 else " * ") if product else (" - " if factor < 0 else " + ")
        first = {" / ": "1 / ", " - ": "-"}.get(sign, "")
        text += (sign if text else first) + term
    return text


def describe_level_means(levels: Floats, codes: Ints, y: Floats) -> str:
    """Return "mean" or "sum" if each group's value is the mean or sum of the target over the group, otherwise "".

    The mean may be drawn toward the mean of all rows, as it is by smoothing.

    Args:
        levels: value of each group ``[L]``.
        codes: group of each row ``[N]``.
        y: targets ``[N]``.
    """
    count = len(levels)
    if not MIN_MEAN_LEVELS <= count <= len(y) / 2:
        return ""
    rows, total = np.bincount(codes, minlength=count), np.bincount(codes, y, minlength=count)
    mean, center = total / rows, y.mean()
    squares = np.bincount(codes, (y - mean[codes]) ** 2, minlength=count)
    within = squares.sum() / (len(y) - count)
    if within <= 0 or np.ptp(mean) == 0 or np.ptp(levels) == 0:
        return ""

    def is_close(expected: Floats, means: Floats = mean) -> bool:
        return bool((rows * (expected - means) ** 2).sum() <= MAX_MISFIT * count * within)

    if is_close(levels) or is_close(levels / 100):
        return "mean"
    away = levels - np.average(levels, weights=rows)
    slope = (rows * away * mean).sum() / (rows * away**2).sum()
    steps = np.diff(np.sort(levels))  # equal steps are those of a counter, such as the cycle of a machine
    if count >= MIN_SCALED_LEVELS and np.ptp(steps) > MAX_EQUAL_ERROR * steps.max() and is_close(center + slope * away):
        return "mean"
    if is_close(levels / rows):
        return "sum"
    drawn = np.abs(levels - center) > MAX_EQUAL_ERROR * np.ptp(levels)
    if count <= MIN_MEAN_LEVELS or not drawn.any():
        return ""
    prior = float(np.median((total - levels * rows)[drawn] / (levels - center)[drawn]))
    trust = y.var() * rows / (y.var() * rows + squares / rows)  # of sklearn's TargetEncoder
    smoothed = [trust * mean + (1 - trust) * center]
    smoothed += [(total + prior * center) / (rows + prior)] if prior > 0 else []
    equal = any(
        (np.abs(one - levels) <= MAX_EQUAL_ERROR * np.ptp(levels)).mean() >= MIN_EQUAL_LEVELS for one in smoothed
    )
    return "mean" if equal or any(is_close(one, levels) for one in smoothed) else ""


def find_group_leaks(
    of: str, numbers: Mapping[str, Floats], groupings: Mapping[str, Floats], outcomes: Sequence[Floats]
) -> Iterator[tuple[str, str]]:
    """Yield columns that are computed from an outcome by group, with the end of a sentence about each.

    Args:
        of: name of the outcome.
        numbers: numbers ``[N]`` of each numeric feature. Missing numbers are NaN.
        groupings: codes or numbers ``[N]`` that may group the rows, keyed by column name.
        outcomes: target ``[N]``, or one indicator for each class. Missing targets are NaN.
    """
    noted = set[str]()
    complete = ~np.isnan(outcomes[0])
    for name, x in numbers.items():  # the groups themselves may have been left out
        here = complete & ~np.isnan(x)
        levels, codes = np.unique(x[here], return_inverse=True)
        is_counter = np.array_equal(levels, np.arange(len(levels)) + levels[:1])  # or a score, but no mean
        for y in outcomes if len(levels) <= here.sum() / 2 and not is_counter else ():
            if how := describe_level_means(levels, codes, y[here]):
                noted.add(name)
                yield name, f"is the {how} of {of!r} in groups of rows{MEAN_END}"
                break
    for grouping, groups in islice(groupings.items(), MAX_GROUPINGS):
        left = [name for name in numbers if name not in noted and name != grouping]
        here = complete & ~np.isnan(groups)
        if not 1 <= len(left) <= MAX_COMPARED_COLUMNS or here.sum() < MIN_COMPARED_ROWS:
            continue
        some, starts = _draw_groups(np.unique(groups[here], return_inverse=True)[1])
        some = np.flatnonzero(here)[some]
        x = np.stack([numbers[name][some] for name in left], 1)
        fixed = (np.fmax.reduceat(x, starts) == np.fmin.reduceat(x, starts)).all(0)
        for y in outcomes:
            linear = _is_linear_by_group(x, y[some], starts)
            for k in np.flatnonzero(linear | fixed).tolist():
                how = f"alone predicts {of!r} exactly among rows with the same {grouping!r}{LATER_END}"
                if fixed[k]:
                    what = _describe_fixed(numbers[left[k]][here], groups[here], y[here])
                    how = f"is the {what} of {of!r} by {grouping!r}{MEAN_END}" if what else ""
                if how and left[k] not in noted:
                    noted.add(left[k])
                    yield left[k], how


def _draw_groups(codes: Ints) -> tuple[Ints, Ints]:
    """Return the rows of the largest groups, sorted by group, and the position of each group's first row."""
    counts = np.bincount(codes)
    order = np.argsort(codes, kind="stable")
    place = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    largest = np.zeros(len(counts), bool)
    largest[np.argsort(-counts, kind="stable")[:MAX_GROUPS]] = True
    order = order[(place < MAX_GROUP_ROWS) & largest[codes[order]]]
    return order, np.unique(codes[order], return_index=True)[1]


def _is_linear_by_group(x: Floats, y: Floats, starts: Ints) -> NDArray[np.bool_]:
    """Return a mask of the columns ``[N, k]`` that are exactly linear in the target ``[N]`` within most groups."""
    sizes = np.diff(np.r_[starts, len(y)])

    def center(values: Floats) -> Floats:
        means = np.add.reduceat(values, starts) / (sizes if values.ndim == 1 else sizes[:, None])
        return np.asarray(values - np.repeat(means, sizes, axis=0))

    a, b = center(x), center(y)
    x_squares, y_squares = np.add.reduceat(a**2, starts), np.add.reduceat(b**2, starts)[:, None]
    used = (y_squares > 0) & (sizes >= MIN_LINEAR_GROUP_ROWS)[:, None]
    rest = x_squares - np.add.reduceat(a * b[:, None], starts) ** 2 / np.where(used, y_squares, 1)
    moved = used & (x_squares > 1e-12 * np.nanmax(x**2, axis=0, initial=1e-300))
    enough = (np.where(moved, sizes[:, None] - 2, 0).sum(0) >= MIN_COMPARED_ROWS) & (moved.sum(0) >= MIN_LINEAR_GROUPS)
    exact = np.where(used, rest, 0).sum(0) <= FORMULA_TOLERANCE**2 * np.where(used, x_squares, 0).sum(0)
    return np.asarray(enough & exact & (2 * moved.sum(0) >= used.sum()))


def _describe_fixed(x: Floats, groups: Floats, y: Floats) -> str:
    """Describe how a column that is constant within groups depends on the target, or return ""."""
    x, groups, y = (values[~np.isnan(x)] for values in (x, groups, y))
    codes = np.unique(groups, return_inverse=True)[1]
    levels = np.zeros(int(codes.max(initial=0)) + 1)
    levels[codes] = x
    return describe_level_means(levels, codes, y) if np.array_equal(levels[codes], x) else ""


def find_lag(x: Floats, y: Floats) -> int:
    """Return the row offset of the outcomes that a column contains (negative for rows above), or 0 if there is none.

    Args:
        x: column ``[N]``, with NaN for missing cells.
        y: outcome ``[N]`` in the units or codes of the column.
    """
    count, lags = len(y), np.r_[1 : MAX_LAG_ROWS + 1, -1 : -MAX_LAG_ROWS - 1 : -1]
    if count < 4 * MAX_LAG_ROWS:
        lags = np.array([1, -1])
    reach = int(np.abs(lags).max())
    if count < 2 * MIN_COMPARED_ROWS:
        return 0
    changes = np.diff(x[reach : count - reach])
    moved = np.flatnonzero((changes != 0) & ~np.isnan(changes)) + reach + 1
    if not len(moved):
        return 0
    moved = moved[np.unique(np.linspace(0, len(moved) - 1, LAG_PROBES // 2).astype(int))]
    probes = np.r_[moved - 1, moved]  # only changes tell the distances apart if neighboring rows are mostly equal
    near = np.isclose(x[probes, None], y[probes[:, None] + lags], rtol=1e-9, atol=0).mean(0)
    likely = lags[np.argsort(-near, kind="stable")[: (near >= MIN_MEASURED_AGREEMENT / 2).sum()]][:MAX_TRIED_LAGS]
    measured = len(likely) > 0 and len(np.unique(y[~np.isnan(y)])) > SCORE_BINS
    least = MIN_MEASURED_AGREEMENT if measured else MIN_LAG_AGREEMENT
    for lag in likely.tolist():
        cells, targets = (x[:-lag], y[lag:]) if lag > 0 else (x[-lag:], y[:lag])
        agreement = _corrected_agreement(cells, targets, least)
        if agreement >= least:
            unshifted = _corrected_agreement(x, y)
            limit = MAX_UNSHIFTED_AGREEMENT if agreement < MIN_LAG_AGREEMENT else 2 * agreement - 1
            if unshifted <= limit:  # at least half of the errors are gone
                return int(lag)
    return 0


def _corrected_agreement(a: Floats, b: Floats, least: float = -np.inf) -> float:
    """Return Cohen's kappa of two columns: 1 if they agree in every row, and 0 if only by chance.

    If it is certainly smaller than ``least``, return 0.
    """
    here = ~(np.isnan(a) | np.isnan(b))
    a, b = a[here], b[here]
    same = float(np.isclose(a, b, rtol=1e-9, atol=0).mean()) if len(a) else 0.0
    if len(a) < MIN_COMPARED_ROWS or same < least:
        return 0.0
    levels, codes = np.unique(np.concatenate([a, b]), return_inverse=True)
    one, other = (np.bincount(part, minlength=len(levels)) / len(a) for part in (codes[: len(a)], codes[len(a) :]))
    chance = float((one * other).sum())
    few = (1 - max(one.max(), other.max())) * len(a) < MIN_ROWS_PER_LEVEL
    return 0.0 if few or chance >= 1 else (same - chance) / (1 - chance)


def is_function_of(x: Floats, y: Floats, least: float) -> bool:
    """Return True if the outcome alone determines a column with fewer values than the outcome, except in few rows.

    Such columns merge classes, or mark one of them.

    Args:
        x: column ``[N]``, with NaN for missing cells.
        y: outcome ``[N]``.
        least: minimum share of rows whose value is the most common value for their outcome.
    """
    here = ~np.isnan(x) & ~np.isnan(y)
    levels, values = np.unique(x[here], return_inverse=True)
    classes, codes = np.unique(y[here], return_inverse=True)
    if not 2 <= len(levels) < len(classes) <= SCORE_BINS or len(levels) > MAX_FEW_LEVELS:
        return False
    table = np.bincount(codes * len(levels) + values, minlength=len(classes) * len(levels))
    table = table.reshape(len(classes), len(levels))
    frequent = table.sum(1) >= MIN_ROWS_PER_LEVEL
    usual = {*table[frequent].argmax(1).tolist()}
    errors, rare = table.sum() - table.max(1).sum(), table.sum() - table.sum(0).max()
    return len(usual) > 1 and bool(errors <= min((1 - least) * table.sum(), MAX_ERROR_RATIO * rare))
