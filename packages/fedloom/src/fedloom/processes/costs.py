"""Estimates of a round's duration for any number of ranks, machines and clients, from measurements with one process.

The estimate is ``fixed + n client + (cohort / ranks) share slowed + chunks result + trips trip + bytes / rate``, where
``fixed``, ``client``, ``share`` and ``result`` are fields of `MethodCosts`, and ``trip`` and ``rate`` are fields of
`MachineLink`.
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
from fedloom.processes.rank_pool import rank_of_task

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

LINK_TRIPS, TRIPS_OF_ROWS = 3, 1
"""Number of round trips on a link per round: one for a question, one for the sizes of the results, and one for
their contents. If rows move between machines, one additional round trip is necessary, because all of these rows move at
the same time."""


@dataclass
class MeasuredWorkers:
    """Workers of one process that measure the duration of each chunk and the size of the results that ranks exchange.

    Attributes:
        workers: workers that compute the chunks.
        work: time of the local work, in seconds.
        passing_seconds: time in seconds to write results for other ranks and to read their results.
        bytes: number of bytes of these results.
        clients: number of clients that were trained.
        chunks: number of chunks.
    """

    workers: Workers
    work: float = field(default=0.0, init=False)
    passing_seconds: float = field(default=0.0, init=False)
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
            packed = parcel.pack_tensors(text, tensors)
            for text, data in parcel.unpack_tensors(packed):
                parcel.decode_value(text, parcel.cut_tensors(data.clone(), parcel.tensor_forms(text)))
            self.passing_seconds += time.perf_counter() - done
            self.work += done - start
            self.bytes += len(packed)
            self.clients += len(result.ids) if isinstance(result, ChunkResult) else 0  # queries only add to `work`
            self.chunks += 1
            yield result

    def call_once(self, ids: Tensor, call: Callable[[], R]) -> R:
        """See `fedloom.processes.pool.Workers`."""
        return self.workers.call_once(ids, call)


class MachineLink(NamedTuple):
    """Link between machines: bytes per second, and seconds for each round trip."""

    bytes_per_second: float
    seconds_per_trip: float


class ClusterShape(NamedTuple):
    """Machines that compute a round: number of ranks on each machine, number of machines, and the link between them."""

    ranks: int
    machines: int
    link: MachineLink


class RoundTimeParts(NamedTuple):
    """Time of a round in seconds, by cause, and number of bytes that the busiest machine receives.

    Attributes:
        work: local work of the busiest rank, including the slowdown due to the other ranks on its machine.
        results: time in which each rank reads the results of all chunks.
        link: time that machines spend waiting for data from other machines.
        clients: time that is proportional to the number of clients in the federation.
        fixed: time of everything else.
        bytes: number of bytes that a machine receives.
        idle: number of ranks that have no chunk to compute.
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
        """Total time of a round, in seconds."""
        return self.work + self.results + self.link + self.clients + self.fixed


class MethodCosts(NamedTuple):
    """Costs of a method for a model and a data set, measured with one process.

    Attributes:
        share: time of the local work for each client of the cohort, in seconds.
        result: time in seconds to pass the result of a chunk to other ranks.
        client: time in seconds for each client of the federation, which does not depend on the cohort.
        fixed: time that does not depend on any of these numbers, in seconds.
        message: size of a chunk's result in bytes.
        row: number of bytes that are stored for each client.
        chunk: maximum number of clients in a chunk.
        cohort: number of clients in the cohort of the measured round.
        crowd: factor >= 1 by which local work is slower than with a single process if all cores of the machine are busy
            until the last core is done.
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
        """Return the slowdown factor of local work if ``busy`` processes on a machine compute in parallel.

        The slowdown due to shared caches and memory is proportional to the number of busy cores. If there are more
        processes than cores, processes share the cores.
        """
        beside = min(busy, self.cores) - 1
        return (1 + (self.crowd - 1) * beside / max(1, self.cores - 1)) * max(1.0, busy / self.cores)

    def round(self, n: int, cohort: int, place: ClusterShape) -> RoundTimeParts:
        """Estimate the time and traffic of a round in which ``cohort`` of ``n`` clients train.

        Each machine stores a given row with the same probability.
        """
        count, size, machines = chunk_count(cohort, self.chunk), place.ranks * place.machines, place.machines
        most = [0] * size
        for k in range(count):
            most[rank_of_task(k, size)] += cohort // count + (k < cohort % count)
        elsewhere = 1 - 1 / machines
        rows = cohort * self.row * elsewhere / machines if cohort < n else 0.0
        received = count * self.message * elsewhere + rows
        trips = (LINK_TRIPS + TRIPS_OF_ROWS * (rows > 0)) * (machines > 1)
        idle = most.count(0)
        busy = min(place.ranks, math.ceil((size - idle) / machines))
        return RoundTimeParts(
            work=self.share * max(most) * self.slowed(busy),
            results=self.result * count * (size > 1),
            link=trips * place.link.seconds_per_trip + received / place.link.bytes_per_second,
            clients=self.client * n,
            fixed=self.fixed,
            bytes=received,
            idle=idle,
        )
