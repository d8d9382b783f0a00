"""Time of a round for any number of ranks, machines and clients, computed from measurements of one process.

round = fixed + n client + cohort/ranks share crowding + chunks result + trips + bytes/rate
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from torch import Tensor

from fedloom.local.oracles import chunk_count
from fedloom.processes import rank_messages as parcel
from fedloom.processes.clients import ChunkResult
from fedloom.processes.pool import Workers
from fedloom.processes.rank_pool import owner

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

LINK_TRIPS, TRIPS_OF_ROWS = 3, 1
"""Number of round trips per round on a link: a question, the sizes of the results, and their contents. There is one
more round trip if rows move between machines, which all happens at once."""


@dataclass
class MeasuredWorkers:
    """Workers of one process, with measured time in chunks and the traffic of their results between ranks.

    Attributes:
        workers: workers that compute.
        work: time for local work in seconds.
        passing: time in seconds to write results for other ranks and to read theirs.
        bytes: number of bytes in these results.
        clients: number of clients that were trained.
        chunks: number of chunks.
    """

    workers: Workers
    work: float = field(default=0.0, init=False)
    passing: float = field(default=0.0, init=False)
    bytes: int = field(default=0, init=False)
    clients: int = field(default=0, init=False)
    chunks: int = field(default=0, init=False)

    def map(self, handler: Callable[[S, T], R], shared: S, tasks: Sequence[T]) -> Iterator[R]:
        """See `fedloom.processes.pool.Workers`."""
        for task in tasks:
            start = time.perf_counter()
            (result,) = self.workers.map(handler, shared, [task])
            done = time.perf_counter()
            text, tensors = parcel.encode_value(result)
            packed = parcel.pack(text, tensors)
            for text, data in parcel.unpack(packed):
                parcel.decode_value(text, parcel.cut(data.clone(), parcel.forms(text)))
            self.passing += time.perf_counter() - done
            self.work += done - start
            self.bytes += len(packed)
            self.clients += len(result.ids) if isinstance(result, ChunkResult) else 0  # asking is in the work only
            self.chunks += 1
            yield result

    def call_once(self, ids: Tensor, call: Callable[[], R]) -> R:
        """See `fedloom.processes.pool.Workers`."""
        return self.workers.call_once(ids, call)


class Link(NamedTuple):
    """Link between machines: bytes per second, and seconds per round trip."""

    rate: float
    trip: float


class Place(NamedTuple):
    """Machines of a round: ranks per machine, number of machines, and the links between them."""

    ranks: int
    machines: int
    link: Link


class Parts(NamedTuple):
    """Time of a round in seconds by cause, and the number of bytes that the busiest machine receives.

    Attributes:
        work: local work of the busiest rank, including the slowdown caused by other ranks on the same machine.
        results: reading the results of every chunk, at every rank.
        link: waiting for the link between machines.
        clients: work for every client of the federation.
        fixed: all else.
        bytes: number of bytes that a machine receives.
        idle: number of ranks without a chunk.
    """

    work: float
    results: float
    link: float
    clients: float
    fixed: float
    bytes: float
    idle: int

    @property
    def seconds(self) -> float:
        """Total seconds of a round."""
        return self.work + self.results + self.link + self.clients + self.fixed


class Costs(NamedTuple):
    """Constants of a method, a model and data, measured with one process.

    Attributes:
        share: time for local work per client of the cohort, in seconds.
        result: time to pass a chunk's result to other ranks, in seconds.
        client: time per client of the federation, in seconds, whatever the cohort.
        fixed: time that does not depend on any of these numbers, in seconds.
        message: number of bytes in a chunk's result.
        row: number of bytes stored per client.
        chunk: largest number of clients per chunk.
        cohort: number of clients in the measured round.
        crowd: time for local work while every core of the machine computes, until the last core is done, relative to a
            single process, >= 1.
        cores: number of cores of the machine.
    """

    share: float
    result: float
    client: float
    fixed: float
    message: float
    row: float
    chunk: int
    cohort: int
    crowd: float
    cores: int

    def slowed(self, busy: int) -> float:
        """Return the slowdown of local work if ``busy`` processes of a machine compute at the same time.

        They share caches and memory in proportion to the used cores, and share the cores if there are more processes
        than cores.
        """
        beside = min(busy, self.cores) - 1
        return (1 + (self.crowd - 1) * beside / max(1, self.cores - 1)) * max(1.0, busy / self.cores)

    def round(self, n: int, cohort: int, place: Place) -> Parts:
        """Count the traffic of a round with ``cohort`` of ``n`` clients.

        Each machine is equally likely to store a row.
        """
        count, size, machines = chunk_count(cohort, self.chunk), place.ranks * place.machines, place.machines
        most = [0] * size
        for k in range(count):
            most[owner(k, size)] += cohort // count + (k < cohort % count)
        elsewhere = 1 - 1 / machines
        rows = cohort * self.row * elsewhere / machines if cohort < n else 0.0
        received = count * self.message * elsewhere + rows
        trips = (LINK_TRIPS + TRIPS_OF_ROWS * (rows > 0)) * (machines > 1)
        idle = most.count(0)
        busy = min(place.ranks, math.ceil((size - idle) / machines))
        return Parts(
            work=self.share * max(most) * self.slowed(busy),
            results=self.result * count * (size > 1),
            link=trips * place.link.trip + received / place.link.rate,
            clients=self.client * n,
            fixed=self.fixed,
            bytes=received,
            idle=idle,
        )
