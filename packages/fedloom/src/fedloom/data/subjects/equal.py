"""Rows that stand in training and in the test alike: equal ones, and copies of images with small changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.subjects.design import Ints

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

MOST_COMPARED_BYTES = 1 << 29
"""Bytes of samples that are compared: above, it takes seconds, and samples may lie on disk."""
LEAST_EQUAL_ROWS = 3
"""Fewest equal rows that are noted."""
CHANCE_RATIO = 10
"""Times as many equal rows as chance makes from which they are noted."""
PRIME = np.uint64(0x9E3779B97F4A7C15)


def digests_of(data: Dataset) -> tuple[NDArray[np.uint64], float]:
    """Return a digest ``[N]`` of every sample with its target, and how probably two samples are equal by chance.

    That probability is the product over the columns of a table, as if these were independent; 0 of other samples.
    """
    flat = data.x.reshape(len(data), -1).numpy()
    targets = data.y.reshape(len(data), -1).numpy().astype(np.float64)
    digest, chance = np.zeros(len(data), np.uint64), 0.0
    if data.x.ndim == 2 and not data.vocabulary:
        chance = 1.0
        for column in (*flat.T, *targets.T):
            codes, rows = np.unique(column, return_inverse=True, return_counts=True)[1:]
            chance *= float(((rows / len(data)) ** 2).sum())
            digest = _mixed(digest, codes.astype(np.uint64))
        return digest, chance
    wide = np.ascontiguousarray(flat).view(np.uint8)
    padded = -wide.shape[1] % 8
    if padded:
        wide = np.pad(wide, ((0, 0), (0, padded)))
    for word in wide.view(np.uint64).T:
        digest = _mixed(digest, word)
    for column in targets.T:
        digest = _mixed(digest, np.ascontiguousarray(column).view(np.uint64))
    return digest, chance


def _mixed(digest: NDArray[np.uint64], values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    digest = (digest ^ values) * PRIME
    return digest ^ (digest >> np.uint64(29))


def equal_rows(data: Dataset, parts: Mapping[str, Ints], common: Ints | None) -> list[str]:
    """Return the note on samples of one part that are equal to samples of another, more of them than chance makes.

    Args:
        data: as it was read.
        parts: samples of each part, all clients together.
        common: samples of a common test set.
    """
    if data.x.numel() * data.x.element_size() > MOST_COMPARED_BYTES or data.x.device.type != "cpu":
        return []
    tested = parts["test"] if common is None else np.concatenate([parts["test"], common])
    held = {"training": parts["train"], "validation": parts["validation"], "test": tested}
    held = {name: np.unique(rows) for name, rows in held.items() if len(rows)}
    if len(held) < 2:
        return []
    digest, chance = digests_of(data)
    return list(_notes(digest, chance, held))


def _notes(digest: NDArray[np.uint64], chance: float, held: Mapping[str, Ints]) -> Iterator[str]:
    names = list(held)
    for k, name in enumerate(names[1:], 1):
        before = np.concatenate([held[other] for other in names[:k]])
        rows = held[name][~np.isin(held[name], before)]
        others, counts = np.unique(digest[before], return_counts=True)
        place = np.searchsorted(others, digest[rows]).clip(max=len(others) - 1)
        twice = others[place] == digest[rows]
        pairs = float(counts[place[twice]].sum())
        if twice.sum() >= LEAST_EQUAL_ROWS and pairs > CHANCE_RATIO * chance * len(rows) * len(before):
            where = " or ".join(f"the {other} part" for other in names[:k])
            yield (
                f"{int(twice.sum()):,} of {len(rows):,} rows of the {name} part are equal to rows of {where} in every "
                "value, so scores are too good: leave copies out, or name the column of whom a row is as subject"
            )


def near_copies_of_images(x: torch.Tensor) -> int:
    """Return how many images ``[N, C, H, W]`` are copies of another with small changes, as augmentation makes them."""
    raise NotImplementedError
