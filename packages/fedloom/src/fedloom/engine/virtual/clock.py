"""Clock of a run in virtual time: the current time, the pending uploads, and a log of the finished ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.algorithms._messages import download_type
from fedloom.engine.clients.chunk import ClientOutput, ClientState, ComputedChunk
from fedloom.engine.job import Job
from fedloom.local.rows import name_tensors, select_group
from fedloom.schedule import Fleet

Rows = NDArray[np.float64]
Ids = NDArray[np.int64]


class ReplyOutcome(IntEnum):
    """Outcome of a client's work."""

    USED = 0
    """The upload was used in a server step."""
    UNUSABLE = 1
    """The upload contained values that were not finite or out of bounds."""
    LATE = 2
    """The round ended before the client replied."""
    LOST = 3
    """The server stopped waiting after the timeout."""
    QUERIED = 4
    """The client answered a query of the sampler but did not train."""


LOG_COLUMNS = ("client", "version", "round", "start", "end", "busy", "fate")
"""Columns of the log: the client, the number of server steps before its dispatch, the server step that used its upload
(or during which the task was abandoned), the dispatch and end times in seconds, the client's busy time in seconds, and
its `ReplyOutcome`."""
CLIENT_COLUMN, VERSION_COLUMN, ROUND_COLUMN, START_COLUMN, END_COLUMN, BUSY_COLUMN, FATE_COLUMN = range(7)

Event = tuple[float, int, int, int, int, float, float, bool]
"""A client's reply, or the end of its abandoned task. The fields are the event's time, the serial number of the
dispatch, the client, the number of its `Flight` and its position in the flight, the dispatch time, the busy time in
seconds, and True if the task was abandoned. Events are sorted by time and then by serial number."""


class Flight(NamedTuple):
    """Results of clients that were dispatched together and whose uploads are still pending.

    Attributes:
        version: number of steps that the server had taken before the dispatch.
        ids: ids of the clients ``[m]``.
        times: number of times that each client was drawn ``[m]``.
        places: positions of the clients whose results are still stored ``[k]``, ascending. The tensors in `fields`
            contain rows only for these clients.
        fields: named tensors: uploads, new client states, answers ``[k, .]``, counts ``[k, 7]``, and received
            downloads.
    """

    version: int
    ids: Ids
    times: Ids
    places: Ids
    fields: dict[str, Tensor]

    @classmethod
    def create(cls, version: int, ids: Tensor, times: Tensor, fields: dict[str, Tensor]) -> Flight:
        """Return the `Flight` of a chunk whose uploads are all pending."""
        return cls(version, ids.numpy(), times.numpy(), np.arange(len(ids)), fields)

    def rows(self, places: Ids) -> Ids:
        """Return the row indices, in the flight's tensors, of the clients at the given positions."""
        return np.searchsorted(self.places, places)

    def drop_landed(self, places: Ids) -> Flight:
        """Return the flight without the clients at these positions."""
        stays = np.ones(len(self.places), dtype=bool)
        stays[self.rows(places)] = False
        left, index = self.places[stays], torch.from_numpy(stays.nonzero()[0])

        def select_rows(name: str, t: Tensor) -> Tensor:
            return t if name.startswith("received.") and t.dim() == 1 else t[index]

        return self._replace(places=left, fields={name: select_rows(name, t) for name, t in self.fields.items()})


def flatten_results(computed: ComputedChunk) -> dict[str, Tensor]:
    """Return a chunk's results in the format of `Flight.fields`."""
    output = computed.output
    groups = {"upload": output.upload, "received": computed.down, **output.state._asdict()}
    answers = {"weigher": output.weigher_answer, "sampler": output.sampler_report, "model": output.model}
    answers["trained"] = output.trained
    return name_tensors({"counts": computed.counts, "work": output.work, **groups, **answers})


FlightPiece = tuple[Flight, Ids]
"""`Flight`, and the positions of its clients whose uploads arrive."""


def combine_pieces(job: Job, pieces: Sequence[FlightPiece]) -> ComputedChunk:
    """Combine the results of several pieces into one.

    A single piece is not copied.
    """
    columns = [_select_tensors(flight, places, spread=len(pieces) > 1) for flight, places in pieces]
    device, fields = job.oracle.device, dict[str, Tensor]()
    for name in columns[0]:
        home = "cpu" if name in ("counts", "work") else device
        parts = [column[name].to(home) for column in columns]
        fields[name] = parts[0] if len(parts) == 1 else torch.cat(parts)

    def group(name: str, kind: Any) -> Any:
        return kind(**select_group(fields, name))

    has_optimizer = any(name.startswith("optimizer.") for name in fields)
    state = ClientState(
        group("rows", type(job.clients.template)),
        group("residue", type(job.residue.template)) if job.setting.upload_transform is not None else None,
        group("optimizer", type(job.optimizer.template)) if has_optimizer else None,
    )
    weigher, sampler, model = (fields.get(name) for name in ("weigher", "sampler", "model"))
    output = ClientOutput(group("upload", job.upload), state, fields["work"], weigher, sampler, model)
    return ComputedChunk(group("received", download_type(type(job.algorithm))), output, fields["counts"])


def _select_tensors(flight: Flight, places: Ids, *, spread: bool) -> dict[str, Tensor]:
    """Return the tensors of some of a flight's clients.

    If ``spread`` is True, a download that all clients share is repeated for each client.
    """
    if len(places) == len(flight.places):
        index: slice | Tensor = slice(None)
    else:
        rows = flight.rows(places).tolist()
        index = slice(rows[0], rows[0] + 1) if len(rows) == 1 else torch.tensor(rows)
    fields = dict[str, Tensor]()
    for name, t in flight.fields.items():
        alike = name.startswith("received.") and t.dim() == 1
        fields[name] = t[index] if not alike else t.expand(len(places), -1) if spread else t
    return fields


@dataclass(frozen=True)
class Clock:
    """State of virtual time between two server steps. Its collections are never modified in place.

    Attributes:
        now: seconds since the start of the run.
        queue: events of the pending clients, in order.
        flights: results of these clients, keyed by the number of the flight.
        back: for each flight, positions of clients that have returned but whose rows are still stored.
        serial: serial number of the next dispatch.
        log: parts of the log ``[u, 7]`` (see `LOG_COLUMNS`). Each part is at least twice as long as the next one.
        pool: drawn clients that wait for dispatch, and how often each was drawn. Only the entries from ``pool_start``
            on still wait.
        pool_start: number of clients at the start of the pool that no longer wait.
        away_sets: empty, or a list with the set of all clients in the queue, for use by the next step.
    """

    now: float = 0.0
    queue: Sequence[Event] = ()
    flights: Mapping[int, Flight] = field(default_factory=dict)
    back: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    serial: int = 0
    log: tuple[Rows, ...] = ()
    pool: Sequence[tuple[int, int]] = ()
    pool_start: int = 0
    away_sets: list[set[int]] = field(default_factory=list, compare=False)

    def away(self) -> set[int]:
        """Return the set of clients in the queue, which the caller may modify."""
        return self.away_sets.pop() if self.away_sets else {event[2] for event in self.queue}

    def logged(self, rows: Rows) -> tuple[Rows, ...]:
        """Return the parts of the log with rows added at the end."""
        pieces = [*self.log, rows]
        while len(pieces) > 1 and len(pieces[-2]) < 2 * len(pieces[-1]):
            newest = pieces.pop()
            pieces[-1] = np.concatenate([pieces[-1], newest])
        return tuple(pieces)

    def history(self) -> Rows:
        """Return the complete log ``[u, 7]`` as one array."""
        return np.concatenate([np.zeros((0, len(LOG_COLUMNS))), *self.log])

    def used_in(self, round: int) -> Rows:
        """Return the log rows ``[k, 7]`` of the uploads used in the most recent server step, number ``round``."""
        newest: Rows = self.log[-1]
        chosen: Rows = newest[(newest[:, ROUND_COLUMN] == round) & (newest[:, FATE_COLUMN] == ReplyOutcome.USED)]
        return chosen

    def tensors(self) -> dict[str, Tensor]:
        """Return all fields as named tensors, for a checkpoint.

        A tensor that several flights share is stored once.
        """
        named = {
            "now": torch.tensor(self.now, dtype=torch.float64), "serial": torch.tensor(self.serial),
            "queue": torch.tensor(list(self.queue), dtype=torch.float64).reshape(-1, 8),
            "pool": torch.tensor(list(self.pool[self.pool_start :]), dtype=torch.long).reshape(-1, 2),
            "log": torch.from_numpy(self.history()),
        }  # fmt: skip
        once = dict[int, int]()
        for number, flight in self.flights.items():
            facts = {
                "version": torch.tensor(flight.version),
                "ids": torch.from_numpy(flight.ids), "times": torch.from_numpy(flight.times),
                "places": torch.from_numpy(flight.places),
                "back": torch.tensor(self.back.get(number, ()), dtype=torch.long),
            }  # fmt: skip
            named |= {f"{number}.{name}": t for name, t in facts.items()}
            for name, t in flight.fields.items():
                first = once.setdefault(id(t), number)
                alike = first != number
                named[f"{number}.{'alike' if alike else 'fields'}.{name}"] = torch.tensor(first) if alike else t
        return named

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Read a clock from the tensors returned by `tensors`."""
        flights, back = dict[int, Flight](), dict[int, tuple[int, ...]]()
        for number in sorted({int(name.partition(".")[0]) for name in tensors if name[0].isdigit()}):
            fields = select_group(tensors, f"{number}.fields")
            for name, first in select_group(tensors, f"{number}.alike").items():
                fields[name] = flights[int(first)].fields[name]
            version, ids, times, places, landed_places = (
                tensors[f"{number}.{name}"] for name in ("version", "ids", "times", "places", "back")
            )
            flights[number] = Flight(int(version), ids.numpy(), times.numpy(), places.numpy(), fields)
            if len(landed_places):
                back[number] = tuple(landed_places.tolist())
        log = tensors["log"].numpy()
        pieces = (log,) if len(log) else ()
        queue = tuple(
            (end, int(serial), int(client), int(flight), int(place), start, busy, bool(lost))
            for end, serial, client, flight, place, start, busy, lost in tensors["queue"].tolist()
        )
        pool = tuple((i, times) for i, times in tensors["pool"].tolist())
        return cls(float(tensors["now"]), queue, flights, back, int(tensors["serial"]), pieces, pool)

    def landed(
        self, number: int, places: list[int], flights: dict[int, Flight], back: dict[int, tuple[int, ...]]
    ) -> None:
        """Record in ``flights`` and ``back`` that the results of some of a flight's clients are no longer needed."""
        landed_places, held = (*back.pop(number, ()), *places), len(flights[number].places)
        if len(landed_places) == held:
            del flights[number]
        elif 2 * len(landed_places) < held:
            back[number] = landed_places
        else:
            flights[number] = flights[number].drop_landed(np.array(sorted(landed_places)))


class UploadCounts(NamedTuple):
    """Numbers of each client's used and unused uploads.

    Attributes:
        used: number of uploads that were used in a server step ``[n]``.
        staleness: mean staleness of these uploads ``[n]``, or NaN if none was used.
        unheard: number of uploads that no server step used ``[n]``.
    """

    used: Tensor
    staleness: Tensor
    unheard: Tensor


def upload_counts(clock: Clock, n: int) -> UploadCounts:
    """Count each client's uploads in the log."""
    log = clock.history()
    merged, lost = (
        log[log[:, FATE_COLUMN] == ReplyOutcome.USED],
        log[(log[:, FATE_COLUMN] >= ReplyOutcome.UNUSABLE) & (log[:, FATE_COLUMN] <= ReplyOutcome.LOST)],
    )
    used, unheard = (np.bincount(some[:, CLIENT_COLUMN].astype(int), minlength=n) for some in (merged, lost))
    stale = np.bincount(
        merged[:, CLIENT_COLUMN].astype(int), merged[:, ROUND_COLUMN] - merged[:, VERSION_COLUMN] - 1, n
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = stale / np.where(used, used, np.nan)
    return UploadCounts(*(torch.from_numpy(some).double() for some in (used, mean, unheard)))


class TimeUse(NamedTuple):
    """Busy, absent and idle time of each client. Their sum is the elapsed time.

    Attributes:
        busy: seconds for training and messages ``[n]``.
        absent: seconds during which the client was absent ``[n]``.
        idle: remaining seconds ``[n]``.
    """

    busy: Tensor
    absent: Tensor
    idle: Tensor


def divide_client_time(clock: Clock, fleet: Fleet) -> TimeUse:
    """Return each client's busy, absent and idle time, based on the log and the pending clients."""
    log, n = clock.history(), fleet.n
    busy = np.bincount(log[:, CLIENT_COLUMN].astype(int), log[:, BUSY_COLUMN], n)
    for end, _, client, _, _, start, whole, _ in clock.queue:
        so_far = fleet.presence_seconds(client, start, min(end, clock.now)) if clock.now > start else 0.0
        busy[client] += min(so_far, whole) if math.isfinite(whole) else so_far
    absent, work = fleet.absent(clock.now), torch.from_numpy(busy)
    return TimeUse(work, absent, clock.now - work - absent)
