"""Split of each client's samples into training, validation and test sets."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.partitions.deal import Dealt, Floats, Ints, compute_offsets, count_distinct, find_owners, sort_by_key
from fedloom.data.subjects.cut import PartSizes, parts_by_subject, round_share_of_sizes
from fedloom.data.subjects.design import Design


def cut_parts(
    dealt: Dealt, y: Ints | None, quota: PartSizes, rng: np.random.Generator, design: Design | None = None
) -> dict[str, Dealt]:
    """Split each client's samples into training, validation and test sets.

    At least one sample remains for training. If there are at least 2 samples, at least one is used for testing, and if
    there are at least 3, at least one is used for validation. Fractions of samples are rounded. One sample of each of
    the client's classes stays in the training set; in survival data, one event and one censored time. If a client has
    the same sample several times, all copies are in one part.

    Args:
        dealt: samples of each client.
        y: classes of the whole data set [N], events for survival data, or None for a regression.
        quota: sizes of the training, validation and test sets.
        rng: random generator for the order of samples.
        design: groups of samples that belong together, or None. If it is given, subjects are divided instead of
            samples (see `parts_by_subject`).
    """
    owner, sizes = find_owners(dealt), np.diff(dealt.offsets)
    if design is not None:
        code = parts_by_subject(design, dealt.index, owner, len(sizes), y, quota, rng)
    else:
        code = _part_codes(dealt, owner, sizes, y, quota, rng.random(len(owner)))
    if len(code) and count_distinct(dealt.index, int(dealt.index.max()) + 1) < len(code):
        code = _join_copies(code, owner, dealt.index, quota.keep is not None)
    return {
        part: Dealt(dealt.index[code == k], compute_offsets(np.bincount(owner[code == k], minlength=len(sizes))))
        for k, part in enumerate(("train", "validation", "test"))
    }


def _part_codes(dealt: Dealt, owner: Ints, sizes: Ints, y: Ints | None, quota: PartSizes, order: Floats) -> Ints:
    """Return a code for the part of each sample. The samples are independent of each other."""
    label = np.zeros_like(owner) if y is None else y[dealt.index]
    if quota.folds is None or quota.fold is None:
        in_test = np.zeros(len(owner), bool)
        tests_wanted = round_share_of_sizes(sizes, quota.test, 2)
    else:
        in_test = _fold_mask(owner, label, order, quota.folds, quota.fold, dealt.offsets)
        tests_wanted = np.zeros_like(sizes)
    rest = np.flatnonzero(~in_test)
    rank, firsts = _ranks_by_class(owner[rest], label[rest], order[rest], len(sizes))
    left = np.bincount(owner[rest], minlength=len(sizes))
    tests = np.minimum(tests_wanted, left - firsts)
    validations = np.minimum(round_share_of_sizes(sizes, quota.validation, 3), left - firsts - tests)
    code = np.full(len(owner), 2)
    place = rank + (tests + validations - left)[owner[rest]]  # < 0: training
    code[rest] = np.where(place < 0, 0, np.where(place < validations[owner[rest]], 1, 2))
    if quota.keep is not None:
        code[rest[(place < 0) & (rank >= quota.keep)]] = 3
    return code


def _join_copies(code: Ints, owner: Ints, index: Ints, is_capped: bool) -> Ints:
    """Return codes that put all copies of a client's sample in the first of their parts.

    If training sets are capped, copies that would move to the training set are omitted (code 3).
    """
    _, sample = np.unique(owner * (int(index.max()) + 1) + index, return_inverse=True)
    first = np.full(len(index), 3)
    np.minimum.at(first, sample, code)
    left_out = (code == 3) | (is_capped & (first[sample] == 0) & (code > 0))
    return np.where(left_out, 3, first[sample])


def _ranks_by_class(owner: Ints, label: Ints, order: Floats, n: int) -> tuple[Ints, Ints]:
    """Return each sample's rank at its client (first one sample per class), and each client's number of classes."""
    cell, drawn = owner * (int(label.max(initial=0)) + 1) + label, np.argsort(order, kind="stable")
    by_class = sort_by_key(cell, drawn)
    first = np.ones(len(owner), bool)
    first[by_class[1:]] = np.diff(cell[by_class]) != 0
    sorted_ = sort_by_key(2 * owner + ~first, drawn)
    starts = compute_offsets(np.bincount(owner, minlength=n))
    rank = np.empty_like(owner)
    rank[sorted_] = np.arange(len(owner)) - starts[owner[sorted_]]
    return rank, np.bincount(owner[first], minlength=n)


def _fold_mask(owner: Ints, label: Ints, order: Floats, folds: int, fold: int, offsets: Ints) -> NDArray[np.bool_]:
    """Return a mask of the test samples in one stratified fold: samples, ordered by class, are dealt to folds in turn.

    If a client has only one sample of a class, this sample is never used for testing.
    """
    cell = owner * (int(label.max(initial=0)) + 1) + label
    by_class = sort_by_key(cell, np.argsort(order, kind="stable"))
    turn = np.empty_like(owner)
    turn[by_class] = np.arange(len(owner)) - offsets[owner[by_class]]
    _, inverse, count = np.unique(cell, return_inverse=True, return_counts=True)
    return np.asarray((turn % folds == fold) & (count[inverse] > 1))


def check_draw(draw: Any, samples: int, classes: int) -> None:
    """Raise an error for fields with a wrong type or shape, invalid positions, or test samples used for training.

    Args:
        draw: draw of a partition (see `fedloom.data.partitions.Draw`).
        samples: number of samples in the data set.
        classes: number of classes in the data set.

    Raises:
        ValueError: the code of the partition returned invalid values. The message names the field.
    """
    for name in ("dealt", "test") if draw.test is not None else ("dealt",):
        _check_lists(name, getattr(draw, name), samples)
    n = len(draw.dealt.offsets) - 1
    if draw.common is not None:
        _check_positions("common", draw.common, samples)
        values, counts = np.unique(draw.common, return_counts=True)
        if (counts > 1).any():
            raise ValueError(
                f"`common` lists {int((counts > 1).sum())} samples twice (first: sample "
                f"{values[counts > 1][0]}). List each sample once"
            )
        if len(both := np.intersect1d(draw.dealt.index, draw.common)):
            raise ValueError(
                f"{len(both)} samples of `common` also belong to a client (first: sample {both[0]}). "
                "Remove these samples from `dealt`"
            )
    for name, (kinds, shape) in {
        "noise": ("fiu", (n, None)), "anew": ("b", (n,)), "relabel": ("iu", (n, classes)),
        "views": ("iu", (n, 2)), "groups": ("iu", (n,)),
    }.items():  # fmt: skip
        values = getattr(draw, name)
        if values is not None and (
            getattr(getattr(values, "dtype", None), "kind", "") not in (*kinds,)
            or len(values.shape) != len(shape)
            or any(want not in (None, got) for got, want in zip(values.shape, shape, strict=True))
        ):
            shown = ", ".join("c" if size is None else str(size) for size in shape)
            what = {"f": "numbers", "b": "booleans", "i": "integers"}[kinds[0]]
            raise ValueError(
                f"{name} must be a numpy array of {what} with shape [{shown}], got {_describe_type(values)}"
            )
    if draw.noise is not None and not (np.isfinite(draw.noise) & (draw.noise >= 0)).all():
        raise ValueError("`noise` must contain standard deviations of at least 0")
    if draw.relabel is not None and not ((draw.relabel >= 0) & (draw.relabel < classes)).all():
        raise ValueError(f"`relabel` must contain classes from 0 to {classes - 1}")
    names = draw.names
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) and name.strip() for name in names):
        raise ValueError(f"names must be a tuple of non-empty texts, got {names!r:.80}")
    if names and not len(names) == len({*names}) == n:
        raise ValueError(f"names must be {n} different names, one per client, got {names!r:.80}")
    if not isinstance(draw.notes, tuple | list) or not all(isinstance(note, str) for note in draw.notes):
        raise ValueError(f"notes must be a tuple of sentences, got {draw.notes!r:.80}")
    if draw.test is None:
        return
    if (tested := len(draw.test.offsets) - 1) != n:
        raise ValueError(
            f"`test` covers {tested} clients, but `dealt` covers {n}. Provide a test set, which may "
            "be empty, for every client"
        )
    trains, tests = (find_owners(lists) * samples + lists.index for lists in (draw.dealt, draw.test))
    if len(both := np.intersect1d(trains, tests)):
        client, sample = divmod(int(both[0]), samples)
        raise ValueError(
            f"{len(both)} test samples are also training samples of the same client (first: sample "
            f"{sample} of client {client}). Remove these samples from `dealt`"
        )


def _check_lists(name: str, lists: Any, samples: int) -> None:
    """Raise an error if the samples of the clients are not valid positions."""
    if not isinstance(lists, Dealt):
        raise ValueError(
            f"{name} must be a result of fl.partitions.group_by_owner(index, owner, n), got {_describe_type(lists)}"
        )
    index, offsets = lists
    _check_positions(f"{name}: index", index, samples)
    if not _holds_integers(offsets):
        raise ValueError(
            f"{name}: offsets must be an integer numpy array of shape [n + 1], got {_describe_type(offsets)}"
        )
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(index) or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"{name}: offsets [n + 1] must increase from 0 to the {len(index)} entries of index, got {offsets}"
        )


def _check_positions(name: str, index: Any, samples: int) -> None:
    """Raise an error if positions are not integers within the data set."""
    if not _holds_integers(index):
        raise ValueError(f"{name} must be an integer numpy array of shape [k], got {_describe_type(index)}")
    if len(index) and (index.min() < 0 or index.max() >= samples):
        raise ValueError(f"{name} must contain positions from 0 to {samples - 1}, got {index.min()} to {index.max()}")


def _holds_integers(values: Any) -> bool:
    return isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu"


def _describe_type(values: Any) -> str:
    kind = type(values).__name__
    return f"{kind} of {values.dtype} {[*values.shape]}" if hasattr(values, "dtype") else kind
