"""Ranks: the processes that compute a run together, each of which goes through the whole program; usually there is one.

The state of a run is the same on every rank: whatever is random is derived from the seed, and what is computed in one
place only is exchanged before any continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from fedloom.storage.memory import Memory

Move = tuple[list[Tensor], int, int]
"""Tensors, and the ranks that give and take them; this rank is one of the two."""


class Ranks(Protocol):
    """The operations of a run on its processes; each method is called by all of them, in the same order."""

    @property
    def rank(self) -> int:
        """This process, from 0; rank 0 alone writes and prints."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def machines(self) -> list[int]:
        """``[size]`` the machine of every rank, from 0; ranks of a machine are neighbours and share its rows."""
        ...

    @property
    def memory(self) -> Memory | None:
        """What the ranks of this machine share; None where this process needs to share nothing."""
        ...

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether some rank has it set; returns when all have come here."""
        ...

    def share(self, value: object) -> Any:
        """The value of rank 0."""
        ...

    def gather(self, value: object) -> list[Any]:
        """The values of all ranks, in their order; see `fedloom.processes.rank_messages` for what travels."""
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


ALONE = Alone()
