"""Ranks: processes that compute a run together. Each rank runs the whole program. Usually, there is one rank.

The state of a run is the same on every rank: random numbers are derived from the seed, and a value that one rank
computes is exchanged before any rank continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from fedloom.storage.memory import Memory

Move = tuple[list[Tensor], int, int]
"""Tensors, and the ranks that send and receive them. This rank is one of them."""


class Ranks(Protocol):
    """Operations that a run performs on its processes. All ranks call each method, in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0. Only rank 0 writes files and prints."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def machines(self) -> list[int]:
        """Machine of each rank ``[size]``, counted from 0.

        The ranks of a machine have consecutive numbers and share the machine's rows.
        """
        ...

    @property
    def memory(self) -> Memory | None:
        """Memory that the ranks of this machine share, or None if this process shares nothing."""
        ...

    def combine_flags(self, *flags: bool) -> list[bool]:
        """Return for each flag whether some rank has set it. Return after all ranks have called this method."""
        ...

    def share(self, value: object) -> Any:
        """Return rank 0's value on every rank."""
        ...

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks, in order. `fedloom.processes.rank_messages` lists the allowed values."""
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Send the tensors of each source to its target at the same time, into tensors that the target provides."""
        ...

    def wait(self) -> None:
        """Return after all ranks of this machine have called this method.

        They can then read shared rows that other ranks have written.
        """
        ...


class Alone:
    """One process."""

    rank, size, memory = 0, 1, None
    machines = [0]  # noqa: RUF012 (never written)

    def combine_flags(self, *flags: bool) -> list[bool]:
        return list(flags)

    def share(self, value: object) -> Any:
        return value

    def gather(self, value: object) -> list[Any]:
        return [value]

    def move(self, moves: Sequence[Move]) -> None:
        raise AssertionError("there is only one rank")

    def wait(self) -> None:
        pass


SINGLE_RANK = Alone()
