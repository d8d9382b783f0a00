"""Notes on identical rows in two parts of a split, levels found only in test rows, and parts with one class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.data.subjects.copies import MAX_COMPARED_BYTES
from fedloom.data.subjects.design import Ints
from fedloom.data.tables import Table
from fedloom.errors import Note
from fedloom.formats import shorten_list

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

MAX_SHOWN_LEVELS = 4
MIN_EQUAL_ROWS = 3
"""Minimum number of identical rows for a note."""
CHANCE_RATIO = 10
"""Minimum ratio of the number of identical rows to the number expected by chance for a note."""
MIN_FINE_SHARE = 0.2
"""Number of distinct values per row above which a column is considered to identify rows."""
HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Digests(NamedTuple):
    """Digests of samples. Two digests are equal if both the samples and their targets are equal.

    Attributes:
        values: digest of each sample ``[N]``.
        chance: probability that two samples are equal by chance. For a table, this is the product of the probabilities
            of its columns, as if the columns were independent. For other samples, it is 0.
        is_distinctive: True if a column has so many distinct values that identical rows cannot be explained by
            dependence between columns.
    """

    values: NDArray[np.uint64]
    chance: float
    is_distinctive: bool


def digest_samples(data: Dataset) -> Digests:
    """Return a digest of each sample and its target."""
    flat = data.x.reshape(len(data), -1).numpy()
    targets = data.y.reshape(len(data), -1).numpy().astype(np.float64)
    digest, chance, fine = np.zeros(len(data), np.uint64), 0.0, False
    if data.x.ndim == 2 and not data.vocabulary:
        chance = 1.0
        for column in (*flat.T, *targets.T):
            if is_row_numbering(column):
                continue
            codes, rows = np.unique(column, return_inverse=True, return_counts=True)[1:]
            chance *= float(((rows / len(data)) ** 2).sum())
            fine = fine or len(rows) >= MIN_FINE_SHARE * len(data)
            digest = _mix_digests(digest, codes.astype(np.uint64))
        return Digests(digest, chance, fine)
    wide = np.ascontiguousarray(flat).view(np.uint8)
    padded = -wide.shape[1] % 8
    if padded:
        wide = np.pad(wide, ((0, 0), (0, padded)))
    for word in wide.view(np.uint64).T:
        digest = _mix_digests(digest, word)
    for column in targets.T:
        digest = _mix_digests(digest, np.ascontiguousarray(column).view(np.uint64))
    return Digests(digest, 0.0, is_distinctive=True)


def is_row_numbering(column: NDArray[Any]) -> bool:
    """Return True if a column has consecutive integers in any order, which do not help to recognize copies."""
    whole = len(column) > 0 and bool((column == np.floor(column)).all()) and len(np.unique(column)) == len(column)
    return whole and float(column.max()) - float(column.min()) == len(column) - 1


def _mix_digests(digest: NDArray[np.uint64], values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    digest = (digest ^ values) * HASH_MULTIPLIER
    return digest ^ (digest >> np.uint64(29))


def note_equal_rows(data: Dataset, parts: Mapping[str, Ints], common: Ints | None) -> list[str]:
    """Return a note if two parts (such as training and test) share more identical samples than expected by chance.

    Args:
        data: data set as it was read.
        parts: samples in each part at all clients.
        common: samples of a common test set, or None.
    """
    if data.x.nbytes > MAX_COMPARED_BYTES or data.x.device.type != "cpu":
        return []
    tested = parts["test"] if common is None else np.concatenate([parts["test"], common])
    held = {"training": parts["train"], "validation": parts["validation"], "test": tested}
    held = {name: np.unique(rows) for name, rows in held.items() if len(rows)}
    if len(held) < 2:
        return []
    return list(_equal_row_notes(digest_samples(data), held))


def note_untrained_levels(data: Dataset, parts: Mapping[str, Ints], common: Ints | None) -> list[str]:
    """Return notes on levels of a table's columns that occur in a test set but not in any training set.

    Args:
        data: data set as it was read, with codes for levels.
        parts: samples in each part at all clients.
        common: samples of a common test set, or None.
    """
    if not isinstance(data.prepare, Table) or not len(parts["train"]):
        return []
    tested = parts["test"] if common is None else np.concatenate([parts["test"], common])
    notes = []
    for place, column in enumerate(data.prepare.columns):
        if column.levels and column.names:
            trained, new = (
                set(np.unique(data.x[rows, place].cpu().numpy()).tolist()) for rows in (parts["train"], tested)
            )
            names = [column.names[int(code)] for code in sorted(new - trained) if code == code]
            if names:
                notes.append(
                    f"column {column.name!r}: {shorten_list([*map(repr, names)], MAX_SHOWN_LEVELS)} occurs in test "
                    "rows but in no training row, so models cannot learn its effect. Merge rare levels"
                )
    return notes


def note_single_classes(data: Dataset, parts: Mapping[str, Ints], common: Ints | None) -> list[str]:
    """Return notes on parts that contain only one class, or only censored times, across all clients.

    Args:
        data: data set for classification or survival. For other data, no notes are returned.
        parts: samples in each part at all clients.
        common: samples of a common test set, or None.
    """
    strata, is_survival = data.outcome_strata, data.task == "survival"
    if strata is None or (len(data.classes) < 2 and not is_survival):
        return []
    held = dict(parts) if common is None else {**parts, "test": np.concatenate([parts["test"], common])}
    notes = []
    for name, rows in held.items():
        codes = np.unique(strata[rows]).tolist() if len(rows) > 1 else []
        if len(codes) == 1 and not (is_survival and codes[0]):
            metric = "the concordance index" if is_survival else "AUROC"
            effect = "a model cannot learn from it" if name == "train" else f"{metric} is not defined for it"
            part = {"train": "training"}.get(name, name)
            what = "censored" if is_survival else f"of class {data.classes[codes[0]]!r}"
            notes.append(f"all {len(rows):,} rows of the {part} set are {what}: {effect}")
    return notes


def _equal_row_notes(digests: Digests, held: Mapping[str, Ints]) -> Iterator[str]:
    digest = digests.values
    names = list(held)
    for k, name in enumerate(names[1:], 1):
        before = np.concatenate([held[other] for other in names[:k]])
        rows = held[name][~np.isin(held[name], before)]
        before_values, counts = np.unique(digest[before], return_counts=True)
        place = np.searchsorted(before_values, digest[rows]).clip(max=len(before_values) - 1)
        twice = before_values[place] == digest[rows]
        pairs, chance = float(counts[place[twice]].sum()), digests.chance * len(rows) * len(before)
        limit = CHANCE_RATIO * chance if digests.is_distinctive else CHANCE_RATIO**2 * max(chance, 1)
        if twice.sum() >= MIN_EQUAL_ROWS and pairs > limit:
            where = " or ".join(f"the {other} set" for other in names[:k])
            yield Note.create(
                f"{int(twice.sum()):,} of {len(rows):,} rows of the {name} set are exact copies of "
                f"rows of {where}, so scores are too good. Remove the copies, or set subject to the "
                "column that identifies the patient or person",
                "parts-share-rows",
            )
