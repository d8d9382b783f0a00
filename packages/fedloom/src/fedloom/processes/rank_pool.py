"""Computation of the chunks of a round by all ranks. Each rank receives all results, in the order of the chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.processes.clients import ChunkResult
from fedloom.processes.ranks import Ranks
from fedloom.processes.row_locations import RowLocations

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

MAX_HELD_BYTES = 1 << 28
"""Maximum number of bytes of the results that a rank collects before the ranks exchange them."""


def rank_of_task(k: int, ranks: int) -> int:
    """Return the rank that computes task ``k``: ranks take turns, forward and backward, because tasks get shorter.

    >>> [rank_of_task(k, 3) for k in range(8)]
    [0, 1, 2, 2, 1, 0, 0, 1]
    """
    lap, place = divmod(k, ranks)
    return place if lap % 2 == 0 else ranks - 1 - place


class RankPool:
    """Pool that applies handlers to chunks in the same way as `WorkerPool`. All ranks must make the same calls.

    Args:
        ranks: processes that compute the chunks.
        locations: machines that store the rows of clients.
        up_bytes: size of one chunk's result in bytes.
    """

    def __init__(self, ranks: Ranks, locations: RowLocations, up_bytes: int) -> None:
        self._ranks, self._locations = ranks, locations
        self._wave = ranks.size * max(1, MAX_HELD_BYTES // up_bytes)

    def map(self, handler: Callable[[S, T], R], shared: S, tasks: Sequence[T]) -> Iterator[R]:
        """Yield a handler's result for each task, in the order of the tasks.

        Each task has an attribute ``ids [m]``: the clients whose rows the handler may read and write.

        Raises:
            FedloomError: a handler has raised an error on one of the ranks, or a rank has died.
        """
        machines, size = self._ranks.machines, self._ranks.size
        at: dict[int, list[Tensor]] = {}
        clients = [_task_ids(task) for task in tasks]
        for k, ids in enumerate(clients):
            at.setdefault(machines[rank_of_task(k, size)], []).append(ids)
        self._locations.fetch({machine: torch.cat(ids) for machine, ids in at.items()})
        self._ranks.wait()
        for first in range(0, len(tasks), self._wave):
            wave = range(first, min(first + self._wave, len(tasks)))
            own_tasks = [k for k in wave if rank_of_task(k, size) == self._ranks.rank]
            results = self._ranks.gather([_run_handler(handler, shared, tasks[k]) for k in own_tasks])
            turns = [iter(r) for r in results]
            for k in wave:
                yield self._unwrap(next(turns[rank_of_task(k, size)]), machines[rank_of_task(k, size)])

    def call_once(self, ids: Tensor, call: Callable[[], R]) -> R:
        """Return the result of a function that is called only on rank 0.

        The function may read and write rows of the given clients.
        """
        self._locations.fetch({0: ids})
        outcome = _run_handler(lambda _shared, _task: call(), None, None) if self._ranks.rank == 0 else None
        value: R = self._unwrap(self._ranks.share(outcome), 0)
        return value

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _unwrap(self, outcome: R | FedloomError, machine: int) -> R:
        if isinstance(outcome, FedloomError):
            raise outcome
        if isinstance(outcome, ChunkResult):
            self._locations.mark_written(outcome.ids[outcome.accepted], machine)
        return outcome


def _run_handler(handler: Callable[[S, T], R], shared: S, task: T) -> R | FedloomError:
    """Return the result of a handler or its error, which is then raised on all ranks."""
    try:
        return handler(shared, task)
    except FedloomError as error:
        return error


def _task_ids(task: Any) -> Tensor:
    ids: Tensor = task.ids
    return ids
