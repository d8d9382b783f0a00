"""Splits by subject: all rows of a subject are in the same part (training, validation or test) at all clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.data.subjects.design import Design, Ints
from fedloom.errors import PartitionError

TRAIN_CODE, VALIDATION_CODE, TEST_CODE, UNUSED_CODE = range(4)
"""Codes of the parts of a split. The last part marks samples that are omitted."""


class PartSizes(NamedTuple):
    """Sizes of the parts of a client's data.

    Attributes:
        test: fraction of the samples in the test set, which may be 0.
        validation: fraction of the samples in the validation set, which may be 0.
        keep: maximum number of training samples per client (or of subjects, if they are known). None to keep all of
            them.
        folds: number of cross-validation folds, which replace the share `test`.
        fold: index of the fold that is the test set.
    """

    test: float
    validation: float
    keep: int | None = None
    folds: int | None = None
    fold: int | None = None


class SubjectUnits(NamedTuple):
    """Units to be divided into parts, with one unit per subject.

    Attributes:
        owner: client of each unit ``[k]``, in ascending order.
        label: class of each unit ``[k]``, which is 0 if there are no classes.
        stratum: stratum of each unit ``[k]``. None if there are no strata.
        n: number of clients.
    """

    owner: Ints
    label: Ints
    stratum: Ints | None
    n: int


def whole_subjects(design: Design, index: Ints, offsets: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Replace each assigned row by all rows of its subject, and return the rows of all clients.

    Args:
        design: design of the data set.
        index: assigned rows ``[k]``, one for each subject of a client.
        offsets: boundaries between clients ``[n + 1]``.
        rows: rows ``[p]`` that may be assigned.

    Returns:
        The rows, ordered so that the rows of a subject are next to each other, and the boundaries.
    """
    units = design.units
    grouped = rows[np.argsort(units[rows], kind="stable")]
    sizes = np.bincount(units[rows], minlength=len(units))
    starts = np.cumsum(sizes) - sizes
    each = sizes[units[index]]
    ends = np.concatenate([[0], np.cumsum(each)])
    place = np.arange(ends[-1]) - np.repeat(ends[:-1] - starts[units[index]], each)
    return grouped[place], ends[offsets]


def parts_by_subject(
    design: Design, index: Ints, owner: Ints, n: int, y: Ints | None, quota: PartSizes, rng: np.random.Generator
) -> Ints:
    """Return a code for the part of each row ``[k]``. Each subject is in the same part at all clients.

    If a subject belongs to several clients, its part is chosen at the client that has the fewest subjects. The test set
    contains the latest subjects if rows have an order, or the marked subjects if there are any. Otherwise, it is a
    random sample that preserves the proportions of the strata. Fractions and numbers in the quota refer to subjects,
    not samples.

    Args:
        design: design of the data set.
        index: rows ``[k]`` of all clients.
        owner: number of the client that owns each row ``[k]``, in ascending order.
        n: number of clients.
        y: classes of the whole data set. None if the data have no classes.
        quota: sizes of the training, validation and test sets.
        rng: random generator for the order of subjects.

    Raises:
        PartitionError: no training samples remain for a client.
    """
    units, total = design.units[index], len(design.units)
    client, who = np.divmod(np.unique(owner * total + units), total)
    by_subject = np.lexsort((client, np.bincount(client, minlength=n)[client], who))
    first = np.ones(len(by_subject), bool)
    first[1:] = np.diff(who[by_subject]) != 0
    homes = np.sort(by_subject[first])
    last = np.zeros(total, np.int64)
    rows = design.last_rows(index)
    last[design.units[rows]] = rows
    place, home, counted = last[who[homes]], client[homes], who[homes]
    label = np.zeros(len(place), np.int64) if y is None else y[place]
    cells = SubjectUnits(home, label, None if design.strata is None else design.strata.numpy()[place], n)
    draw = rng.random(len(place))
    if design.tested is not None and quota.test > 0:
        marked = design.tested[place]
        code = np.full(len(place), TEST_CODE)
        rest = np.flatnonzero(~marked)
        kept = SubjectUnits(home[rest], label[rest], None if cells.stratum is None else cells.stratum[rest], n)
        code[rest] = _subject_part_codes(design, kept, place[rest], quota._replace(test=0.0, folds=None), draw[rest])
    else:
        code = _subject_part_codes(design, cells, place, quota, draw)
    part = np.full(total, UNUSED_CODE)
    part[counted] = code
    parts: Ints = part[units]
    if bare := np.flatnonzero(np.bincount(owner[parts == TRAIN_CODE], minlength=n) == 0).tolist():
        why = "is earlier than the test rows" if design.order is not None else "belongs to a training subject"
        raise PartitionError(
            f"clients {bare[:8]} have no training samples, because none of their rows {why}. A subject "
            f"({design.subject_name!r}) is in the same part at all clients. Use fewer clients, a smaller test set, or "
            "more data"
        )
    return parts


def _subject_part_codes(
    design: Design, cells: SubjectUnits, place: Ints, quota: PartSizes, draw: NDArray[np.float64]
) -> Ints:
    """Return the part of each subject ``[k]``.

    ``place`` contains the last row of each subject, and ``draw`` contains a random number for each subject.
    """
    if design.order is not None:
        return codes_in_order(cells, design.order.numpy()[place], quota, draw)
    return codes_at_random(cells, quota, draw)


def codes_in_order(
    cells: SubjectUnits, times: NDArray[np.float64], quota: PartSizes, draw: NDArray[np.float64]
) -> Ints:
    """Return the part of each subject. A client's earliest subjects are for training, and its latest for testing.

    With folds, a client's subjects are divided into one more block than the number of folds. Fold f uses block f + 1 as
    the test set and all earlier blocks for training. Later blocks are omitted.
    """
    sizes = np.bincount(cells.owner, minlength=cells.n)
    rank = ranks_within(cells.owner, np.lexsort((draw, times, cells.owner)), sizes)
    if quota.folds is None or quota.fold is None:
        end = sizes
        tests = np.minimum(round_share_of_sizes(sizes, quota.test, 2), np.maximum(sizes - 1, 0))
    else:
        start, end = (np.maximum(sizes * (quota.fold + k) // (quota.folds + 1), 1) for k in (1, 2))
        end = np.minimum(end, sizes)
        tests = np.maximum(end - start, 0)
    left = end - tests
    validations = np.minimum(round_share_of_sizes(left, quota.validation, 2), np.maximum(left - 1, 0))
    trained = (left - validations)[cells.owner]
    code = np.where(rank < trained, TRAIN_CODE, np.where(rank < left[cells.owner], VALIDATION_CODE, TEST_CODE))
    code[rank >= end[cells.owner]] = UNUSED_CODE
    if quota.keep is not None:
        code[(code == TRAIN_CODE) & (rank < trained - quota.keep)] = UNUSED_CODE
    return code.astype(np.int64)


def codes_at_random(cells: SubjectUnits, quota: PartSizes, draw: NDArray[np.float64]) -> Ints:
    """Assign each unit to a random part in a way that preserves the proportions of the strata.

    One unit of each class stays in the training set.
    """
    owner, label, stratum, n = cells
    classes = int(label.max(initial=0)) + 1
    sizes = np.bincount(owner, minlength=n)
    strata = np.zeros_like(owner) if stratum is None else stratum
    in_test = np.zeros(len(owner), bool)
    if quota.folds is not None and quota.fold is not None:
        turn = ranks_within(owner, np.lexsort((draw, label, strata, owner)), sizes)
        alone = np.bincount(owner * classes + label)[owner * classes + label] == 1
        in_test = (turn % quota.folds == quota.fold) & ~alone
        tests = np.zeros_like(sizes)
    else:
        tests = round_share_of_sizes(sizes, quota.test, 2)
    rest = np.flatnonzero(~in_test)
    by_class = rest[np.lexsort((draw[rest], label[rest], owner[rest]))]
    first = np.ones(len(by_class), bool)
    first[1:] = np.diff(owner[by_class] * classes + label[by_class]) != 0
    fixed = np.zeros(len(owner), bool)
    fixed[by_class[first]] = True
    free = rest[~fixed[rest]]
    room = np.bincount(owner[free], minlength=n)
    tests = np.minimum(tests, room)
    validations = np.minimum(round_share_of_sizes(sizes, quota.validation, 3), room - tests)
    code = np.where(in_test, TEST_CODE, TRAIN_CODE)
    for part, number in ((TEST_CODE, tests), (VALIDATION_CODE, validations)):
        free = free[code[free] == TRAIN_CODE]
        spread = free[np.lexsort((draw[free], strata[free], owner[free]))]
        count = np.bincount(owner[spread], minlength=n)
        turn = ranks_within(owner[spread], np.arange(len(spread)), count)
        take, of = number[owner[spread]], np.maximum(count[owner[spread]], 1)
        start = (draw[spread][np.cumsum(count)[owner[spread]] - 1] * of).astype(np.int64)  # one draw per client
        code[spread[((turn + 1) * take + start) // of > (turn * take + start) // of]] = part
    if quota.keep is not None:
        trained = np.flatnonzero(code == TRAIN_CODE)
        kept = trained[np.lexsort((draw[trained], ~fixed[trained], owner[trained]))]
        turn = ranks_within(owner[kept], np.arange(len(kept)), np.bincount(owner[kept], minlength=n))
        code[kept[turn >= quota.keep]] = UNUSED_CODE
    return code.astype(np.int64)


def ranks_within(owner: Ints, order: Ints, sizes: Ints) -> Ints:
    """Return the rank ``[k]`` of each unit within its client, given their ``order``, grouped by client."""
    starts = np.cumsum(sizes) - sizes
    rank = np.empty_like(owner)
    rank[order] = np.arange(len(owner)) - starts[owner[order]]
    return rank


def round_share_of_sizes(sizes: Ints, fraction: float, from_size: int) -> Ints:
    """Return ``sizes * fraction``, rounded, but at least 1 for clients that have at least `from_size` units."""
    number = np.rint(sizes * fraction).astype(np.int64)
    least = np.asarray(sizes >= from_size if fraction > 0 else sizes < 0, np.int64)
    return np.asarray(np.maximum(number, least))


def find_shared_subject(design: Design, parts: Mapping[str, Ints]) -> tuple[str, str, int] | None:
    """Return two parts that contain the same subject, and a row of this subject.

    Return None if every subject is in only one part.

    Args:
        design: design of the data set.
        parts: rows of each part, at all clients.
    """
    part_of = np.full(len(design.units), -1)
    names = list(parts)
    for k, name in enumerate(names):
        units = design.units[parts[name]]
        if (both := np.flatnonzero(part_of[units] >= 0)).size:
            return names[part_of[units[both[0]]]], name, int(parts[name][both[0]])
        part_of[units] = k
    return None
