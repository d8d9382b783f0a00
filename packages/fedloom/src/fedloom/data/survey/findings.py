"""Notes on tables: leaks, copies, numbers of rows and patients, and missing-value codes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedloom.data.subjects.copies import count_near_copies
from fedloom.data.subjects.equal import is_row_numbering
from fedloom.data.survey.conversions import find_conversion, is_fahrenheit
from fedloom.data.survey.facts import (
    MAX_FEW_LEVELS,
    MISSING_TOKENS,
    NAMELESS_PATTERN,
    POSSIBLE_LEVEL_TOKENS,
    find_answer_codes,
    find_extreme_codes,
    infer_time_unit,
    is_permutation,
    is_repeated_unit,
    is_row_number,
    names_rows,
)
from fedloom.data.survey.leaks import ReadColumn, find_leaks
from fedloom.data.survey.people import personal_information_kind, words
from fedloom.data.tables import is_number
from fedloom.formats import shorten_list
from fedloom.seeds import numpy_generator

MAX_SAMPLED_CELLS = 2_000_000
"""Approximate maximum number of a table's cells that are searched for leaks, in a random sample of rows."""
MOST_SAMPLED, LEAST_SAMPLED = 5_000, 200
"""Maximum and minimum number of rows in the sample. The maximum is sufficient to measure a value with three digits, and
the minimum is sufficient to recognize a perfect value."""
CHANCE_MULTIPLE = 10
"""Minimum ratio of the number of identical rows to the number expected by chance for a note.

It is larger than 1, because columns that depend on each other lead to a larger number of identical rows.
"""
MIN_COPIES = 3
"""Minimum number of identical rows for a note."""
MAX_TIED_SHARE = 0.05
"""Maximum share of rows with the same number in a column whose distances are used to find noisy copies."""
MIN_NAMING_SHARE = 0.9
"""A text column identifies rows if it contains at least this many different texts per row."""
MIN_DISTINCT_SHARE = 0.2
"""A column identifies rows if it contains at least this many distinct values per row."""
MIN_UNIT_ROWS, MIN_UNIT_SHARE, MIN_UNIT_LEVELS = 10, 0.05, 8
"""Minimum number and share of rows in each of two units, and minimum number of different values in each unit."""
MAX_UNIT_SPREAD = 2.0
"""Maximum ratio of the standard deviations of the numbers in two units after the conversion."""
MIN_UNIT_GAP, ENOUGH_UNIT_GAP = 0.5, 1.0
"""Minimum gap between the numbers in two units on a logarithmic scale, as a share of the conversion factor, and gap
that is sufficient for a large factor. Species and other groups also differ, but rarely with so large a gap."""
NEAR_COPIES_NOTE = (
    "{} of {} have a neighbor that is much closer than all others, like copies with noise. If both come from one "
    "sample, this sample is in the training set and in the test set. Remove such rows, or set subject to the column "
    "that identifies the patient or person"
)
"""Text of the note on near-duplicates."""
ROW_NAMES = ("numbers the rows", "names the rows")
"""Reasons to omit a column that identifies rows. All other reasons describe what a column contains."""
MAX_SHOWN_FINDINGS = 6
MAX_EXACT_NUMBER = 2**53
"""Double precision represents every integer up to this number exactly."""
NEGATIVE_WORDS = words("no n false f 0 negative absent control healthy normal alive none nein non nej nie ne")
"""Common names, in lower case, for a class that consists of the rows without the outcome."""

Floats = NDArray[np.float64]


def exclusion_reason(name: str, column: ReadColumn, rows: int) -> str:
    """Return the reason why a column must not be a feature, as part of a note, or "" if it may be a feature.

    This applies only to columns that cannot serve any purpose but leak: row numbers, names of people, and contact
    details.
    """
    if not column.names:
        if is_row_number(name, column.values):
            return ROW_NAMES[0]
        whole = column.values[~np.isnan(column.values)]
        if len(whole) < MAX_FEW_LEVELS or not (whole == np.floor(whole)).all() or whole.max() < 1e3:
            return ""  # too few or too small to identify a person
        levels, counts = np.unique(whole, return_counts=True)
        return personal_information_kind(
            name, dict(zip((f"{v:.0f}" for v in levels), counts.tolist(), strict=True)), len(whole)
        )
    return text_exclusion_reason(name, column.counts(), rows)


def text_exclusion_reason(name: str, counts: Mapping[str, int], rows: int) -> str:
    """Return the reason why a text column must not be a feature, or "", given the number of rows for each cell."""
    present = sum(counts.values())
    if not present:
        return ""
    if NAMELESS_PATTERN.fullmatch(name) and len(counts) == rows >= MAX_FEW_LEVELS:
        return ROW_NAMES[1]
    return personal_information_kind(name, counts, present)


def table_findings(
    features: Mapping[str, ReadColumn], outcome: Mapping[str, tuple[ReadColumn, str]], users: ReadColumn | None,
    ranged: Collection[str] = (), units: NDArray[np.int64] | None = None, ordered: bool = False,
) -> Iterator[str]:  # fmt: skip
    """Yield the notes on a table.

    Args:
        features: features, keyed by name.
        outcome: columns of the label and of its event, keyed by name, each with "classification" or "regression".
        users: client of each row. None if no column identifies the clients.
        ranged: columns with an agreed range. Missing-value codes in these columns are already detected by the range.
        units: subject of each row ``[N]``. Rows of the same subject are allowed to be similar. None if no column
            identifies the subjects.
        ordered: True if later rows are test rows.
    """
    count = len(next(iter(features.values())).values)
    if count < MAX_FEW_LEVELS:
        return
    every = {**features, **{name: column for name, (column, _) in outcome.items()}}
    equal = [*_note_equal_rows(every if units is None else {**every, "": ReadColumn(units.astype(np.float64))})]
    yield from equal
    if not equal and units is None and len(features) > 1 and all(t == "classification" for _, t in outcome.values()):
        yield from _note_equal_rows(features, " in all features, although the outcome differs")
    yield from note_near_copies([c.values for c in features.values() if not c.names], units)
    rows = _sample_rows(count, len(features))
    for name, column in features.items():
        yield from _note_numbering(name, column, count)
        if name not in ranged:
            yield from _note_missing_markers(name, column)
            yield from _note_mixed_units(name, column)
    for of, (target, task) in outcome.items():
        if task == "classification" and target.names:
            yield from _note_doubtful_classes(of, target)
        yield from find_leaks(features, of, target, task, users, rows, ordered)


def _sample_rows(count: int, columns: int) -> NDArray[np.int64]:
    """Return a random sample of rows for a detailed check, in their original order."""
    size = min(count, MOST_SAMPLED, max(LEAST_SAMPLED, MAX_SAMPLED_CELLS // max(columns, 1)))
    drawn = numpy_generator(0, purpose="survey").permutation(count)[:size] if size < count else np.arange(count)
    return np.sort(drawn)


def _note_numbering(name: str, column: ReadColumn, count: int) -> Iterator[str]:
    """Yield a note if a column numbers rows or patients, or contains dates as numbers."""
    values = column.values[~np.isnan(column.values)]
    levels = np.unique(values)
    if not column.names and len(levels) and np.abs(levels).max() > MAX_EXACT_NUMBER:
        yield (
            f"column {name!r} contains numbers beyond {MAX_EXACT_NUMBER:,}, whose last digits are lost. They probably "
            "identify rows. Add the column to drop, or set it as subject"
        )
        return
    if not column.names and len(levels) >= MAX_FEW_LEVELS and _are_days(levels):
        yield (
            f"column {name!r} contains dates as numbers, such as {levels[0]:.0f}. Add it to drop, or set it as order "
            "to test on later rows"
        )
        return
    whole = bool(column.names) or bool((levels == np.floor(levels)).all())
    if not column.names and whole and len(levels) >= MAX_FEW_LEVELS and (unit := infer_time_unit(name, levels)):
        yield f"column {name!r} may contain dates as {unit}. Add it to drop, or set it as order to test on later rows"
        return
    if whole and is_repeated_unit(name, levels.tolist(), len(values)):
        yield (
            f"column {name!r}: {len(levels):,} different values in {len(values):,} rows, so rows with the same value "
            "are in both training and test sets, and scores are too good. Set it as subject, which keeps such rows "
            "together, or add it to drop"
        )
    elif not column.names and len(values) == count and whole and len(levels) == count:
        if values.min() in (0, 1) and is_permutation(values):
            span = f"{values.min():g} to {values.max():g}"
            yield f"column {name!r} counts from {span}, one value per row. If it numbers rows, add it to drop"
        elif names_rows(name):
            yield f"column {name!r} differs in every row and has the name of a row number. Add it to drop"
    elif column.names and len(levels) >= MIN_NAMING_SHARE * count:
        yield (
            f"column {name!r} has {len(levels):,} different texts in {count:,} rows, so each level is rare. "
            "Add it to drop, or group its levels"
        )


def _are_days(levels: Floats) -> bool:
    """Return True if all numbers are dates with eight digits (year, month and day)."""
    if not ((levels == np.floor(levels)) & (levels >= 19000101) & (levels <= 21001231)).all():
        return False
    month, day = levels // 100 % 100, levels % 100
    return bool(((month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)).all())


def _note_missing_markers(name: str, column: ReadColumn) -> Iterator[str]:
    """Yield a note on cells that may represent missing values."""
    if column.names:
        counts = column.counts()
        marks = {repr(k): n for k, n in counts.items() if k.lower() in MISSING_TOKENS - POSSIBLE_LEVEL_TOKENS}
        marks = marks if len(marks) < len(counts) else {}
    else:
        levels = np.unique(column.values[~np.isnan(column.values)], return_counts=True)
        far = find_extreme_codes(*levels)
        beside = ~np.isin(levels[0], [*far])
        marks = {f"{v:g}": n for v, n in (far | find_answer_codes(levels[0][beside], levels[1][beside])).items()}
    if marks:
        shown = shorten_list(
            [f"{cell} in {rows:,} of {len(column.values):,} rows" for cell, rows in marks.items()], MAX_SHOWN_FINDINGS
        )
        yield f"column {name!r}: {shown} may mean missing. If so, add such cells to missing and set impute = true"


def _note_mixed_units(name: str, column: ReadColumn) -> Iterator[str]:
    """Yield a note if a column's numbers form two groups of the same shape that differ by a known conversion."""
    values = np.sort(column.values[~np.isnan(column.values)])
    least = max(MIN_UNIT_ROWS, int(MIN_UNIT_SHARE * len(values)))
    if column.names or len(values) < 2 * least or values[0] <= 0:
        return
    logs = np.log(values)
    cut = least + int(np.diff(logs[least - 1 : len(logs) - least + 1]).argmax())
    low, high = values[:cut], values[cut:]
    if min(len(np.unique(low)), len(np.unique(high))) < MIN_UNIT_LEVELS:
        return
    small, large = float(np.median(low)), float(np.median(high))
    conversion, factor, spread = (
        find_conversion(name, large / small),
        large / small,
        logs[cut:].std() / logs[:cut].std(),
    )
    if is_fahrenheit(name, large, small):
        conversion, spread = (1.8, "Celsius to Fahrenheit"), high.std() / low.std() / 1.8
    if conversion is None or logs[cut] - logs[cut - 1] < min(MIN_UNIT_GAP * np.log(factor), ENOUGH_UNIT_GAP):
        return
    units = conversion[1]
    if 1 / MAX_UNIT_SPREAD <= spread <= MAX_UNIT_SPREAD:
        few, shown = (low, "below") if len(low) <= len(high) else (high, "above")
        yield (
            f"column {name!r}: {len(few):,} of {len(values):,} numbers are far {shown} the others, as if in another "
            f"unit (medians {small:g} and {large:g}: {units}). If so, convert them to one unit"
        )


def _note_doubtful_classes(name: str, column: ReadColumn) -> Iterator[str]:
    """Yield notes on a class that may mean "missing", and on two classes whose second class is not the outcome."""
    counts = column.counts()
    numbers = {float(k): k for k in counts if is_number(k)}
    if len(numbers) == len(counts) > 2:
        ordered = np.array(sorted(numbers))
        far = find_answer_codes(ordered, np.array([counts[numbers[v]] for v in ordered.tolist()]))
        if far:
            shown = ", ".join(f"{numbers[v]} in {counts[numbers[v]]:,} rows" for v in far)
            yield (
                f"the label {name!r}: {shown} may mean missing, but is read as a class. If so, add it to "
                "missing and set unlabelled = 'drop'"
            )
    if len(counts) == 2:
        one, other = counts
        first, second = one.lower(), other.lower()
        if (first, second) == ("1", "2") or (second in NEGATIVE_WORDS and first not in NEGATIVE_WORDS):
            yield (
                f"the label {name!r}: F1, AUPRC, coefficients and other values for one class describe {other!r}, the "
                f"second class. If the outcome is {one!r}, write 1 for {one!r} and 0 for {other!r}"
            )


def _note_equal_rows(columns: Mapping[str, ReadColumn], where: str = "") -> Iterator[str]:
    """Yield a note on rows that are identical in all columns, if there are more than expected by chance.

    Args:
        columns: compared columns, keyed by name.
        where: text for the note if the columns do not include the outcome. Such rows are noted only if a column has
            many different numbers. Equal rows of a few levels may well have different outcomes.
    """
    count = len(next(iter(columns.values())).values)
    digest = np.zeros(count, np.uint64)
    columns = {n: c for n, c in columns.items() if not (is_row_numbering(c.values) or is_row_number(n, c.values))}
    for column in columns.values():
        bits = (np.where(np.isnan(column.values), np.inf, column.values) + 0.0).view(np.uint64)
        digest = (digest ^ bits) * np.uint64(0x9E3779B97F4A7C15)
        digest ^= digest >> np.uint64(29)
    each = np.unique(digest, return_counts=True)[1]
    pairs, copies = float((each * (each - 1.0) / 2).sum()), int((each - 1).sum())
    if copies < MIN_COPIES:
        return
    chance, fine = count * (count - 1) / 2, False
    for column in columns.values():
        held = np.unique(np.where(np.isnan(column.values), np.inf, column.values), return_counts=True)[1]
        chance *= float(((held / count) ** 2).sum())
        fine = fine or len(held) >= MIN_DISTINCT_SHARE * count
    coarse = not where and pairs > CHANCE_MULTIPLE**2 * max(chance, 1)
    if pairs > CHANCE_MULTIPLE * chance and (fine or coarse):
        yield (
            f"{copies:,} of {count:,} rows are exact copies of others{where}. If the copies come from one "
            "sample, this sample is in the training set and in the test set. Remove the copies"
        )


def note_near_copies(numbers: Sequence[Floats], units: NDArray[np.int64] | None) -> Iterator[str]:
    """Yield a note on rows that are much closer to each other than to other rows, such as augmented copies."""
    fine = [v for v in numbers if not np.isnan(v).any() and _is_fine(v) and np.ptp(v) > 0 and not is_row_numbering(v)][
        :8
    ]
    if len(fine) > 1 and (close := count_near_copies(np.stack([(v - v.mean()) / v.std() for v in fine], 1), units)):
        yield NEAR_COPIES_NOTE.format(f"{close:,}", f"{len(fine[0]):,} rows")


def _is_fine(values: Floats) -> bool:
    """Return True if few rows share a number. Rows can be close because they share a zero or a limit of detection."""
    each = np.unique(values, return_counts=True)[1]
    return len(each) >= 0.5 * len(values) and int(each.max()) <= max(MIN_COPIES, MAX_TIED_SHARE * len(values))
