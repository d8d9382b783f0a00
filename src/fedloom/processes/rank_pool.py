"""RankPool: chunks of a round computed by all ranks; every rank gets every result, in the order of the chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.processes.chunks import Trained
from fedloom.processes.pool import Handler
from fedloom.processes.ranks import Ranks
from fedloom.processes.row_locations import Homes

T = TypeVar("T")

ROOM = 1 << 28
"""Bytes of results that a rank holds before they are exchanged."""


def owner(k: int, ranks: int) -> int:
    """The rank of task ``k``: to and fro over the ranks, since tasks get shorter.

    >>> [owner(k, 3) for k in range(8)]
    [0, 1, 2, 2, 1, 0, 0, 1]
    """
    lap, place = divmod(k, ranks)
    return place if lap % 2 == 0 else ranks - 1 - place


class RankPool:
    """Runs handlers on chunks, as `Pool` does; every rank makes the same calls.

    Args:
        handlers: by name; ``handler(shared, task)``. A task has ``ids``, the clients whose rows it may read and write.
        ranks: the processes.
        homes: of the rows.
        up_bytes: what one chunk sends back.
    """

    def __init__(self, handlers: dict[str, Handler], ranks: Ranks, homes: Homes, up_bytes: int) -> None:
        self._handlers, self._ranks, self._homes = handlers, ranks, homes
        self._wave = ranks.size * max(1, ROOM // up_bytes)

    def map(self, name: str, shared: Any, tasks: Sequence[Any]) -> Iterator[Any]:
        """Results of ``name`` on every task, in the order of the tasks.

        Raises:
            FedloomError: of a handler on any rank, or because a rank died.
        """
        machines, size = self._ranks.machines, self._ranks.size
        at: dict[int, list[Tensor]] = {}
        for k, task in enumerate(tasks):
            at.setdefault(machines[owner(k, size)], []).append(task.ids)
        self._homes.bring({machine: torch.cat(ids) for machine, ids in at.items()})
        self._ranks.wait()
        for first in range(0, len(tasks), self._wave):
            wave = range(first, min(first + self._wave, len(tasks)))
            mine = [k for k in wave if owner(k, size) == self._ranks.rank]
            results = self._ranks.gather([_outcome(self._handlers[name], shared, tasks[k]) for k in mine])
            turns = [iter(r) for r in results]
            for k in wave:
                yield self._taken(tasks[k].ids, next(turns[owner(k, size)]), machines[owner(k, size)])

    def once(self, ids: Tensor, call: Callable[[], T]) -> T:
        """What a call gives that may read and write the rows of some clients; rank 0 makes it."""
        self._homes.bring({0: ids})
        made = _outcome(lambda _shared, _task: call(), None, None) if self._ranks.rank == 0 else None
        result: T = self._taken(ids, self._ranks.share(made), 0)
        return result

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _taken(self, ids: Tensor, result: Any, machine: int) -> Any:
        if isinstance(result, FedloomError):
            raise result
        if isinstance(result, Trained):
            self._homes.wrote(ids[result.accepted], machine)
        return result


def _outcome(handler: Handler, shared: Any, task: Any) -> Any:
    """The result, or the error for all to raise."""
    try:
        return handler(shared, task)
    except FedloomError as error:
        return error
