"""Combinations of opened sums: which sites a server can isolate by adding and subtracting sums."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

Row = Mapping[tuple[str, int], float]
"""Coefficient of each unknown in a sum, where an unknown is everything of one kind that one site sends in all
rounds."""


def find_isolated(rows: Sequence[Row], threshold: int) -> set[tuple[tuple[str, int], ...]]:
    """Return the smallest sets of fewer than ``threshold`` unknowns that some combination of the sums isolates.

    A combination isolates a set if it is zero outside the set and nonzero within it. It exists if and only if removing
    the set lowers the rank of the sums.

    Args:
        rows: the sums.
        threshold: minimum number of sites in a sum.
    """
    isolated = set[tuple[tuple[str, int], ...]]()
    for kind in {kind for row in rows for kind, _ in row}:
        counted = [row for row in rows if any(k == kind for k, _ in row)]
        unknowns = sorted({u for row in counted for u in row})
        matrix = np.array([[row.get(u, 0.0) for u in unknowns] for row in counted])
        rank = np.linalg.matrix_rank(matrix)
        for size in range(1, min(threshold, len(unknowns) + 1)):
            for few in itertools.combinations(range(len(unknowns)), size):
                chosen = tuple(unknowns[k] for k in few)
                if not any({*smaller} < {*chosen} for smaller in isolated):
                    rest = np.delete(matrix, few, axis=1)
                    if rank > (np.linalg.matrix_rank(rest) if rest.size else 0):
                        isolated.add(chosen)
    return isolated
