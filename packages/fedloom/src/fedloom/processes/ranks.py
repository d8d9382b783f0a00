"""Ranks: the processes that compute a run together, each of which goes through the whole program. Usually there is one.

The state of a run is the same on every rank: whatever is random is derived from the seed, and what is computed in one
place only is exchanged before any continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from fedloom.storage.memory import Memory

Move = tuple[list[Tensor], int, int]
"""Tensors, and the ranks that give and take them. This rank is one of the two."""


class Ranks(Protocol):
    """The operations of a run on its processes. Each method is called by all of them, in the same order."""

    @property
    def rank(self) -> int:
        """This process, from 0. Rank 0 alone writes and prints."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def machines(self) -> list[int]:
        """``[size]`` the machine of every rank, from 0. Ranks of a machine are neighbours and share its rows."""
        ...

    @property
    def memory(self) -> Memory | None:
        """Memory that the ranks of this machine share, or None if this process needs to share nothing."""
        ...

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether some rank has it set. Returns when all have come here."""
        ...

    def share(self, value: object) -> Any:
        """Return rank 0's value on every rank."""
        ...

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks in order. `fedloom.processes.rank_messages` lists what travels."""
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """All at once, tensors of a source to a target, into tensors of the same shapes that the target gives."""
        ...

    def wait(self) -> None:
        """Return when all ranks of this machine have come here: rows that they share and wrote can be read."""
        ...


class Alone:
    """One process."""

    rank, size, memory = 0, 1, None
    machines = [0]  # noqa: RUF012 (never written)

    def any(self, *flags: bool) -> list[bool]:
        return list(flags)

    def share(self, value: object) -> Any:
        return value

    def gather(self, value: object) -> list[Any]:
        return [value]

    def move(self, moves: Sequence[Move]) -> None:
        raise AssertionError("there is one rank")

    def wait(self) -> None:
        pass


SINGLE_RANK = Alone()
