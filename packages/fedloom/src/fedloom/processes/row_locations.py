"""Locations of rows: which machines have the latest row of each client, and how rows are moved to other machines.

The ranks on a machine share its rows, so no rows are moved between these ranks. A row is moved to
another machine if that machine trains or evaluates the client, if all machines need the rows that the server stores,
or, to the first machine, when a checkpoint is written. The table of locations is the same on all ranks, because all
ranks change it in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fedloom.processes.ranks import Ranks
from fedloom.storage.store import Store

MOVED_BYTES = 1 << 26
"""Maximum number of bytes of rows that are moved at a time."""
SERVER_STORES = {"kept", "models", "summed"}
"""Names of the stores that contain rows of the server."""


class RowLocations:
    """Table of the machines that have the latest rows of each store.

    Args:
        ranks: processes of the run. All of these processes must make the same calls.
        stores: stores, keyed by name.
    """

    def __init__(self, ranks: Ranks, stores: Mapping[str, Store[Any]]) -> None:
        self._ranks = ranks
        used = {name: store for name, store in stores.items() if name == "clients" or len(store.template)}
        self._stores = used  # even an empty row shows that a client has participated
        self.machines = max(ranks.machines) + 1
        n = next(iter(stores.values())).n
        self._latest = {name: torch.ones(self.machines, n, dtype=torch.bool) for name in self._stores}

    def begin(self) -> None:
        """Record that the first machine has all of the rows."""
        if self.machines > 1:
            for name, written_rows in self._ranks.share(
                {name: store.occupied for name, store in self._stores.items()}
            ).items():
                self._latest[name][1:] = ~written_rows

    def mark_written(self, ids: Tensor, machine: int) -> None:
        """Record that only one machine has the latest rows of some clients."""
        for latest in self._latest.values():
            latest[:, ids] = False
            latest[machine, ids] = True

    def fetch(self, wanted: Mapping[int, Tensor]) -> None:
        """Move rows of clients to the machines that need them. For each machine, ``wanted`` contains the ids."""
        for name in self._stores:
            self._fetch(name, wanted)

    def replicate(self, ids: Tensor) -> None:
        """Move the client rows that the server stores to all machines."""
        for name in self._stores:
            if name in SERVER_STORES:
                self._fetch(name, dict.fromkeys(range(self.machines), ids))

    def collect(self) -> None:
        """Move all rows to the first machine."""
        for name, latest in self._latest.items():
            self._fetch(name, {0: (~latest[0]).nonzero()[:, 0]})

    def _fetch(self, name: str, wanted: Mapping[int, Tensor]) -> None:
        """Move rows of one store.

        All machines send and receive at the same time, because waiting for a link takes time.
        """
        latest, store, moves = self._latest[name], self._stores[name], []
        for target, ids in wanted.items():
            missing = ids[~latest[target, ids]].sort().values
            homes = latest[:, missing].int().argmax(0)
            moves += [(missing[homes == source], source, target) for source in homes.unique().tolist()]
        for ids, _, target in moves:
            latest[target, ids] = True
        if moves:
            for wave in zip_longest(*([(some, *way) for some in _row_pieces(store, ids)] for ids, *way in moves)):
                self._move(store, [move for move in wave if move is not None])
            self._ranks.wait()

    def _move(self, store: Store[Any], moves: list[tuple[Tensor, int, int]]) -> None:
        """Move client rows from the first rank on one machine to the first rank on another machine."""
        first = {machine: self._ranks.machines.index(machine) for _, *way in moves for machine in way}
        own_rows = [
            (ids, store.read(ids), first[source], first[target])
            for ids, source, target in moves
            if self._ranks.rank in (first[source], first[target])
        ]
        self._ranks.move([(list(rows), source, target) for _, rows, source, target in own_rows])
        for ids, rows, _, target in own_rows:
            if self._ranks.rank == target:
                store.write(ids, rows)


def _row_pieces(store: Store[Any], ids: Tensor) -> Iterator[Tensor]:
    width = sum(t.numel() * t.element_size() for t in store.template)
    yield from ids.split(max(1, MOVED_BYTES // max(1, width)))
