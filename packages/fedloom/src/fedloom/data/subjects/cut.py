"""Splits by subject: whole subjects are assigned to clients, and each subject is in the same part everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.data.subjects.design import Design, Ints
from fedloom.errors import PartitionError

TRAIN_CODE, VALIDATION_CODE, TEST_CODE, UNUSED_CODE = range(4)
"""Codes of the parts. The last code marks samples that are left out."""


class Quota(NamedTuple):
    """Sizes of a client's parts.

    Attributes:
        test: fraction of samples in the test part. 0: no test part.
        validation: fraction of samples in the validation part. 0: no validation part.
        keep: largest number of training samples per client, or of subjects if subjects are known. None: all.
        folds: number of cross-validation folds, used instead of `test`.
        fold: number of the fold that is the test part.
    """

    test: float
    validation: float
    keep: int | None = None
    folds: int | None = None
    fold: int | None = None


class Cells(NamedTuple):
    """Entries to split, one per subject and client.

    Attributes:
        owner: client of each entry ``[k]``, in increasing order.
        label: class of each entry ``[k]``, 0 without classes.
        stratum: stratum of each entry ``[k]``. None without strata.
        n: number of clients.
    """

    owner: Ints
    label: Ints
    stratum: Ints | None
    n: int


def whole_subjects(design: Design, index: Ints, offsets: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return the clients' rows after each assigned row has been replaced by all rows of its subject.

    Args:
        design: design of the data set.
        index: assigned rows ``[k]``, one for each subject of a client.
        offsets: offsets of the clients ``[n + 1]``.
        rows: rows ``[p]`` that may be assigned.

    Returns:
        The rows and offsets in the same form, with the rows of each subject next to each other.
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
    design: Design, index: Ints, owner: Ints, n: int, y: Ints | None, quota: Quota, rng: np.random.Generator
) -> Ints:
    """Return the part of each row ``[k]`` as a code. Each subject is in the same part at all clients.

    A subject with several clients is assigned at the client with the fewest subjects, and is in the resulting part
    everywhere. The test part contains the latest subjects if their order is known, or the marked subjects if some are
    marked. Otherwise, it is a random share that preserves the shares of the strata. Fractions and numbers refer to
    subjects.

    Args:
        design: design of the data set.
        index: rows ``[k]``.
        owner: client of each row ``[k]``, in increasing order.
        n: number of clients.
        y: classes of the whole data set. None: there are no classes.
        quota: sizes of the parts.
        rng: source of the random order.

    Raises:
        PartitionError: a client has no training samples left.
    """
    units, total = design.units[index], len(design.units)
    client, who = np.divmod(np.unique(owner * total + units), total)
    subjects = np.bincount(client, minlength=n)
    by_subject = np.lexsort((client, subjects[client], who))
    first = np.ones(len(by_subject), bool)
    first[1:] = np.diff(who[by_subject]) != 0
    homes = np.sort(by_subject[first])
    last = np.zeros(total, np.int64)
    rows = design.last_rows(index)
    last[design.units[rows]] = rows
    place, home, counted = last[who[homes]], client[homes], who[homes]
    label = np.zeros(len(place), np.int64) if y is None else y[place]
    cells = Cells(home, label, None if design.strata is None else design.strata.numpy()[place], n)
    draw = rng.random(len(place))
    if design.tested is not None and quota.test > 0:
        marked = design.tested[place]
        code = np.full(len(place), TEST_CODE)
        rest = np.flatnonzero(~marked)
        kept = Cells(home[rest], label[rest], None if cells.stratum is None else cells.stratum[rest], n)
        code[rest] = _codes(design, kept, place[rest], quota._replace(test=0.0, folds=None), draw[rest])
    else:
        code = _codes(design, cells, place, quota, draw)
    part = np.full(total, UNUSED_CODE)
    part[counted] = code
    parts: Ints = part[units]
    if bare := np.flatnonzero(np.bincount(owner[parts == TRAIN_CODE], minlength=n) == 0).tolist():
        why = "are earlier" if design.order is not None else "belong to a training subject"
        raise PartitionError(
            f"clients {bare[:8]} have no training sample: none of their rows {why}, because a subject "
            f"({design.subject_name!r}) is in the same part at all clients. Use fewer clients, a "
            "smaller test part, or more data"
        )
    return parts


def _codes(design: Design, cells: Cells, place: Ints, quota: Quota, draw: NDArray[np.float64]) -> Ints:
    """Return the part of each subject ``[k]``.

    ``place`` contains the last row of each subject, and ``draw`` a random number for each.
    """
    if design.order is not None:
        return codes_in_order(cells, design.order.numpy()[place], quota, draw)
    return codes_at_random(cells, quota, draw)


def codes_in_order(cells: Cells, times: NDArray[np.float64], quota: Quota, draw: NDArray[np.float64]) -> Ints:
    """Return the part of each subject: a client's earliest subjects are for training, then validation, then test.

    With folds, a client's subjects are split into one more block than there are folds: fold f tests on block f + 1 and
    trains on the blocks before it. Later blocks are left out.
    """
    sizes = np.bincount(cells.owner, minlength=cells.n)
    rank = ranks_within(cells.owner, np.lexsort((draw, times, cells.owner)), sizes)
    if quota.folds is None or quota.fold is None:
        end = sizes
        tests = np.minimum(wanted(sizes, quota.test, 2), np.maximum(sizes - 1, 0))
    else:
        start, end = (np.maximum(sizes * (quota.fold + k) // (quota.folds + 1), 1) for k in (1, 2))
        end = np.minimum(end, sizes)
        tests = np.maximum(end - start, 0)
    left = end - tests
    validations = np.minimum(wanted(left, quota.validation, 2), np.maximum(left - 1, 0))
    trained = (left - validations)[cells.owner]
    code = np.where(rank < trained, TRAIN_CODE, np.where(rank < left[cells.owner], VALIDATION_CODE, TEST_CODE))
    code[rank >= end[cells.owner]] = UNUSED_CODE
    if quota.keep is not None:
        code[(code == TRAIN_CODE) & (rank < trained - quota.keep)] = UNUSED_CODE
    return code.astype(np.int64)


def codes_at_random(cells: Cells, quota: Quota, draw: NDArray[np.float64]) -> Ints:
    """Return a random part for each entry, preserving the shares of strata.

    One entry of each class stays in training.
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
        tests = wanted(sizes, quota.test, 2)
    rest = np.flatnonzero(~in_test)
    by_class = rest[np.lexsort((draw[rest], label[rest], owner[rest]))]
    first = np.ones(len(by_class), bool)
    first[1:] = np.diff(owner[by_class] * classes + label[by_class]) != 0
    fixed = np.zeros(len(owner), bool)
    fixed[by_class[first]] = True
    free = rest[~fixed[rest]]
    room = np.bincount(owner[free], minlength=n)
    tests = np.minimum(tests, room)
    validations = np.minimum(wanted(sizes, quota.validation, 3), room - tests)
    code = np.where(in_test, TEST_CODE, TRAIN_CODE)
    for part, number in ((TEST_CODE, tests), (VALIDATION_CODE, validations)):
        free = free[code[free] == TRAIN_CODE]
        spread = free[np.lexsort((draw[free], strata[free], owner[free]))]
        count = np.bincount(owner[spread], minlength=n)
        turn = ranks_within(owner[spread], np.arange(len(spread)), count)
        take, of = number[owner[spread]], np.maximum(count[owner[spread]], 1)
        start = (draw[spread][np.cumsum(count)[owner[spread]] - 1] * of).astype(np.int64)  # one of each client
        code[spread[((turn + 1) * take + start) // of > (turn * take + start) // of]] = part
    if quota.keep is not None:
        trained = np.flatnonzero(code == TRAIN_CODE)
        kept = trained[np.lexsort((draw[trained], ~fixed[trained], owner[trained]))]
        turn = ranks_within(owner[kept], np.arange(len(kept)), np.bincount(owner[kept], minlength=n))
        code[kept[turn >= quota.keep]] = UNUSED_CODE
    return code.astype(np.int64)


def ranks_within(owner: Ints, order: Ints, sizes: Ints) -> Ints:
    """Return the rank ``[k]`` of each entry at its client, where ``order`` lists entries grouped by client."""
    starts = np.cumsum(sizes) - sizes
    rank = np.empty_like(owner)
    rank[order] = np.arange(len(owner)) - starts[owner[order]]
    return rank


def wanted(sizes: Ints, fraction: float, from_size: int) -> Ints:
    """Return the rounded fraction of sizes, which is at least 1 for clients with `from_size` or more."""
    number = np.rint(sizes * fraction).astype(np.int64)
    least = np.asarray(sizes >= from_size if fraction > 0 else sizes < 0, np.int64)
    return np.asarray(np.maximum(number, least))


def mixed_subjects(design: Design, parts: Mapping[str, Ints]) -> tuple[str, str, int] | None:
    """Return two parts that have a subject in common, and one row of this subject.

    None if every subject is in a single part.

    Args:
        design: design of the data set.
        parts: rows of each part, for all clients together.
    """
    part_of = np.full(len(design.units), -1)
    names = list(parts)
    for k, name in enumerate(names):
        units = design.units[parts[name]]
        if (both := np.flatnonzero(part_of[units] >= 0)).size:
            return names[part_of[units[both[0]]]], name, int(parts[name][both[0]])
        part_of[units] = k
    return None
