"""Ranks, i.e. processes that compute a run together.

Each rank executes the complete program. Usually, there is only one rank.

The state of a run is the same on all ranks: random numbers are derived from the seed, and a value that is computed by
one rank is sent to the others before any rank continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from fedloom.storage.memory import Memory

Move = tuple[list[Tensor], int, int]
"""Tensors to be sent, with the numbers of the rank that sends them and the rank that receives them. One of the two is
this rank."""


class Ranks(Protocol):
    """Operations that let the processes of a run work together. All ranks must call each method, in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process, beginning with 0. Only rank 0 writes files and prints output."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def machines(self) -> list[int]:
        """Number of the machine of each rank ``[size]``, counted from 0.

        The ranks on a machine have consecutive numbers and share the rows that are stored there.
        """
        ...

    @property
    def memory(self) -> Memory | None:
        """Memory that is shared by the ranks on this machine, or None if this process does not share memory."""
        ...

    def combine_flags(self, *flags: bool) -> list[bool]:
        """Return, for each flag, whether it is set on at least one rank.

        The method returns once all ranks have called it.
        """
        ...

    def share(self, value: object) -> Any:
        """Return the value of rank 0 on all ranks."""
        ...

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks.

        The allowed types of values are described in `fedloom.processes.rank_messages`.
        """
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Send all tensors at the same time. The receiving ranks provide tensors of the same shapes for them."""
        ...

    def wait(self) -> None:
        """Wait until all ranks on this machine have called this method.

        After that, they can read shared rows written by other ranks.
        """
        ...


class SingleProcess:
    """Single process, which does not communicate with other processes."""

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


SINGLE_RANK = SingleProcess()
