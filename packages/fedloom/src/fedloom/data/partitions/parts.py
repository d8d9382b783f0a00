"""Division of the samples of all clients into training, validation and test parts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedloom.data.partitions.deal import Dealt, Floats, Ints, offsets_of, owners, sort_by_key
from fedloom.data.subjects.cut import Quota, parts_by_subject, wanted
from fedloom.data.subjects.design import Design


def cut_parts(
    dealt: Dealt, y: Ints | None, quota: Quota, rng: np.random.Generator, design: Design | None = None
) -> dict[str, Dealt]:
    """Divide each client's samples into parts.

    At least one sample is used for training. If there are at least 2 samples, at least one is used for test, and if
    there are at least 3, at least one for validation. Fractions of samples are rounded. One sample of each of the
    client's classes stays in the training part.

    Args:
        dealt: samples of each client.
        y: classes of the whole data set [N], or None for a regression.
        quota: sizes of the parts.
        rng: random generator for the order of samples.
        design: description of which samples belong together, or None. If it is given, subjects are divided instead of
            samples (see `parts_by_subject`).
    """
    owner, sizes = owners(dealt), np.diff(dealt.offsets)
    if design is not None:
        code = parts_by_subject(design, dealt.index, owner, len(sizes), y, quota, rng)
    else:
        code = _codes(dealt, owner, sizes, y, quota, rng.random(len(owner)))
    return {
        part: Dealt(dealt.index[code == k], offsets_of(np.bincount(owner[code == k], minlength=len(sizes))))
        for k, part in enumerate(("train", "validation", "test"))
    }


def _codes(dealt: Dealt, owner: Ints, sizes: Ints, y: Ints | None, quota: Quota, order: Floats) -> Ints:
    """Return a code for the part of each sample, for samples that are independent."""
    label = np.zeros_like(owner) if y is None else y[dealt.index]
    if quota.folds is None or quota.fold is None:
        in_test = np.zeros(len(owner), bool)
        tests_wanted = wanted(sizes, quota.test, 2)
    else:
        in_test = _fold_mask(owner, label, order, quota.folds, quota.fold, dealt.offsets)
        tests_wanted = np.zeros_like(sizes)
    rest = np.flatnonzero(~in_test)
    rank, firsts = _ranks(owner[rest], label[rest], order[rest], len(sizes))
    left = np.bincount(owner[rest], minlength=len(sizes))
    tests = np.minimum(tests_wanted, left - firsts)
    validations = np.minimum(wanted(sizes, quota.validation, 3), left - firsts - tests)
    code = np.full(len(owner), 2)
    place = rank + (tests + validations - left)[owner[rest]]  # < 0: training
    code[rest] = np.where(place < 0, 0, np.where(place < validations[owner[rest]], 1, 2))
    if quota.keep is not None:
        code[rest[(place < 0) & (rank >= quota.keep)]] = 3
    return code


def _ranks(owner: Ints, label: Ints, order: Floats, n: int) -> tuple[Ints, Ints]:
    """Return each sample's rank at its client, with one sample per class first, and each client's number of classes."""
    cell, drawn = owner * (int(label.max(initial=0)) + 1) + label, np.argsort(order, kind="stable")
    by_class = sort_by_key(cell, drawn)
    first = np.ones(len(owner), bool)
    first[by_class[1:]] = np.diff(cell[by_class]) != 0
    sorted_ = sort_by_key(2 * owner + ~first, drawn)
    starts = offsets_of(np.bincount(owner, minlength=n))
    rank = np.empty_like(owner)
    rank[sorted_] = np.arange(len(owner)) - starts[owner[sorted_]]
    return rank, np.bincount(owner[first], minlength=n)


def _fold_mask(owner: Ints, label: Ints, order: Floats, folds: int, fold: int, offsets: Ints) -> NDArray[np.bool_]:
    """Return a mask of the test samples in one stratified fold: samples in class order go to the folds in turn.

    If a client has a single sample of a class, this sample is never tested.
    """
    cell = owner * (int(label.max(initial=0)) + 1) + label
    by_class = sort_by_key(cell, np.argsort(order, kind="stable"))
    turn = np.empty_like(owner)
    turn[by_class] = np.arange(len(owner)) - offsets[owner[by_class]]
    _, inverse, count = np.unique(cell, return_inverse=True, return_counts=True)
    return np.asarray((turn % folds == fold) & (count[inverse] > 1))


def check_dealt(dealt: Dealt, test: Dealt | None, common: Ints | None, samples: int) -> None:
    """Raise an error for invalid positions or offsets, and for test samples that the client also trains on.

    Args:
        dealt: samples of each client.
        test: samples in each client's test part, if the partition chooses them.
        common: samples of a common test set, if the partition chooses one.
        samples: number of samples in the data set.

    Raises:
        ValueError: the code of the partition returned invalid values. The message names the field.
    """
    for name, lists in (("dealt", dealt), ("test", test)):
        if lists is None:
            continue
        index, offsets = lists
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(index) or (np.diff(offsets) < 0).any():
            raise ValueError(
                f"{name}: offsets [n + 1] must increase from 0 to the {len(index)} entries of index, got {offsets}"
            )
        if len(index) and (index.min() < 0 or index.max() >= samples):
            raise ValueError(
                f"{name}: index must be positions from 0 to {samples - 1}, got {index.min()} to {index.max()}"
            )
    if common is not None:
        strange = common[(common < 0) | (common >= samples)]
        if len(strange):
            raise ValueError(f"common: must be positions from 0 to {samples - 1}, got {strange[0]}")
        if len(both := np.intersect1d(dealt.index, common)):
            raise ValueError(
                f"{len(both)} samples of common also belong to a client (first: sample {both[0]}). "
                "Leave these samples out of dealt"
            )
    if test is None:
        return
    n, tested = len(dealt.offsets) - 1, len(test.offsets) - 1
    if tested != n:
        raise ValueError(
            f"test has {tested} clients, but dealt has {n}. Provide a test part for every client, which may be empty"
        )
    trained, tests = (owners(lists) * samples + lists.index for lists in (dealt, test))
    if len(both := np.intersect1d(trained, tests)):
        client, sample = divmod(int(both[0]), samples)
        raise ValueError(
            f"{len(both)} test samples are also training samples of the same client (first: sample "
            f"{sample} of client {client}). Leave these samples out of dealt"
        )
