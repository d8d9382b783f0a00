"""Time of a round with any number of ranks, machines and clients, from measurements of one process.

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
"""Round trips per round on a link: a question, the sizes of the results, and their contents. One more if rows move
between machines, all at once."""


@dataclass
class MeasuredWorkers:
    """Workers of one process, with measured seconds in chunks and the traffic of their results between ranks.

    Attributes:
        workers: the workers that compute.
        work: seconds of local work.
        passing: seconds to write results for other ranks, and to read theirs.
        bytes: bytes of these results.
        clients: number of clients trained.
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
    """Machines of a round: ranks of every machine, machines, and the links between them."""

    ranks: int
    machines: int
    link: Link


class Parts(NamedTuple):
    """Seconds of a round by cause, and the bytes that the busiest machine receives.

    Attributes:
        work: local work of the busiest rank, including the slowdown by ranks beside it.
        results: reading the results of every chunk, at every rank.
        link: waiting for the link between machines.
        clients: work for every client of the federation.
        fixed: all else.
        bytes: bytes received by a machine.
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
        share: seconds of local work per client of the cohort.
        result: seconds to pass a chunk's result to other ranks.
        client: seconds per client of the federation, whatever the cohort.
        fixed: seconds that do not depend on any of these numbers.
        message: bytes of a chunk's result.
        row: bytes stored per client.
        chunk: largest number of clients per chunk.
        cohort: number of clients of the measured round.
        crowd: time of local work while every core of the machine computes, until the last one is done, relative to a
            single process. >= 1.
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
        """Return the slowdown of local work if ``busy`` processes of a machine compute at once.

        They share caches and memory, in proportion to the used cores, and share the cores if there are more processes
        than cores.
        """
        beside = min(busy, self.cores) - 1
        return (1 + (self.crowd - 1) * beside / max(1, self.cores - 1)) * max(1.0, busy / self.cores)

    def round(self, n: int, cohort: int, place: Place) -> Parts:
        """Count the traffic of a round of ``cohort`` of ``n`` clients.

        Rows are on each machine with equal probability.
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
