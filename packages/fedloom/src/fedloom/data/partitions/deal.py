"""Assignment of samples to clients by index arithmetic, without loops over the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import PartitionError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MAX_DEAL_ATTEMPTS = 100


class Dealt(NamedTuple):
    """Samples of n clients, where client i has ``index[offsets[i]:offsets[i + 1]]``.

    Attributes:
        index: positions in the data set ``[k]`` (int64), ordered by client.
        offsets: boundaries between clients ``[n + 1]`` (int64), which increase from 0 to k.
    """

    index: Ints  # type: ignore[assignment]
    offsets: Ints


def compute_offsets(sizes: Ints) -> Ints:
    """Return the offsets [n + 1] for clients with these sizes [n]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def find_owners(dealt: Dealt) -> Ints:
    """Return the client of each entry in ``dealt.index``."""
    return np.repeat(np.arange(len(dealt.offsets) - 1), np.diff(dealt.offsets))


def concatenate_dealt(first: Dealt, second: Dealt) -> Dealt:
    """Return the entries of both arguments by client. Within a client, the entries of the first argument come first."""
    owner = np.concatenate([find_owners(first), find_owners(second)])
    return group_by_owner(np.concatenate([first.index, second.index]), owner, len(first.offsets) - 1)


def split_evenly(total: int, n: int) -> Ints:
    """Return n sizes that add up to `total` and differ by at most 1. The larger sizes come first."""
    return np.full(n, total // n, np.int64) + (np.arange(n) < total % n)


def sort_by_key(keys: Ints, start: Ints) -> Ints:
    """Return positions sorted by nonnegative keys, in linear time.

    Positions with equal keys are kept in the order of ``start``.

    NumPy uses radix sort for 16-bit numbers, so the keys are sorted 16 bits at a time, from the lowest bits to the
    highest.
    """
    for shift in range(0, int(keys.max(initial=0)).bit_length(), 16):
        start = start[np.argsort((keys >> shift).astype(np.uint16)[start], kind="stable")]
    return start


def count_distinct(index: Ints, total: int) -> int:
    """Return the number of distinct entries in ``index``. All of them must be from 0 to ``total`` - 1."""
    is_dealt = np.zeros(total, bool)
    is_dealt[index] = True
    return int(is_dealt.sum())


def group_by_owner(index: Ints, owner: Ints, n: int) -> Dealt:
    """Group samples by client. The samples of each client keep their order.

    Args:
        index: positions in the data set ``[k]``.
        owner: client of each sample ``[k]``, from 0 to n - 1.
        n: number of clients. A client without an entry has no samples.

    >>> group_by_owner(np.array([5, 6, 9]), np.array([1, 0, 1]), 2)
    Dealt(index=array([6, 5, 9]), offsets=array([0, 1, 3]))
    """
    return Dealt(index[sort_by_key(owner, np.arange(len(owner)))], compute_offsets(np.bincount(owner, minlength=n)))


def deal(lists: list[Ints], counts: Ints) -> Dealt:
    """For each list c, assign the next ``counts[i, c]`` entries to each client i. No entry is assigned twice.

    Args:
        lists: positions of each class's samples, in random order.
        counts: number of samples for each client and class [n, C], where the sum of column c is at most
            ``len(lists[c])``.
    """
    dealt = [samples[:total] for samples, total in zip(lists, counts.sum(0), strict=True)]
    owner = [np.repeat(np.arange(len(counts)), column) for column in counts.T]
    return group_by_owner(np.concatenate(dealt), np.concatenate(owner), len(counts))


def choose_each(lists: list[Ints], counts: Ints, rng: np.random.Generator) -> Dealt:
    """For each list c, assign ``counts[i, c]`` random entries to each client i.

    The entries of one client are distinct, but each client draws independently of the others, so clients may overlap.
    """
    chosen = [
        lists[c][rng.choice(len(lists[c]), counts[i, c], replace=False, shuffle=False)]
        for i, c in np.argwhere(counts).tolist()
    ]
    return Dealt(np.concatenate(chosen), compute_offsets(counts.sum(1)))


def counts_from_shares(shares: Floats, totals: Ints) -> Ints:
    """Convert shares ``[n, C]`` (with columns that sum to 1) to counts by floored cumulative sums, as in NIID-Bench."""
    ends = np.floor(np.cumsum(shares, 0) * totals + 1e-9).astype(np.int64)
    ends[-1] = totals
    return np.diff(ends, axis=0, prepend=0)


def round_to_total(shares: Floats, total: int) -> Ints:
    """Return integers close to ``shares * total`` whose rows sum to `total`, by the largest remainder method."""
    exact = shares * total
    whole: Ints = np.floor(exact).astype(np.int64)
    rank = np.argsort(np.argsort(whole - exact, axis=1, kind="stable"), axis=1, kind="stable")
    return np.asarray(whole + (rank < total - whole.sum(1, keepdims=True)), np.int64)


def redraw_until_min_size(counts: Callable[[], Ints], min_size: int, what: str, cure: str) -> Ints:
    """Repeat the draw of the counts [n, C] until each client has at least `min_size` samples.

    Raises:
        PartitionError: in each of `MAX_DEAL_ATTEMPTS` draws, some client had too few samples.
    """
    best = -1
    for _ in range(MAX_DEAL_ATTEMPTS):
        drawn = counts()
        smallest = int(drawn.sum(1).min())
        if smallest >= min_size:
            return drawn
        best = max(best, smallest)
    raise PartitionError(
        f"{what}: the smallest client had at most {best} samples in {MAX_DEAL_ATTEMPTS} draws, but "
        f"min_size is {min_size}; {cure}"
    )
