"""Asynchronous schedules at real sites, which may send uploads at any time (see `fedloom.engine.virtual.stream`).

While a site trains, its `Event` has no end time, and its `Flight` contains the download, so that a restarted server can
send the same message again.
"""

from __future__ import annotations

import math
from bisect import insort
from typing import Final

import torch
from torch import Tensor

from fedloom.algorithms._messages import download_type
from fedloom.engine.clients.chunk import count_chunk_output
from fedloom.engine.clients.remote import StreamedClients
from fedloom.engine.job import Job
from fedloom.engine.round import sort_by_samples
from fedloom.engine.state import State
from fedloom.engine.virtual.clock import Event, Flight, flatten_results
from fedloom.engine.virtual.stream import MAX_VERSION_DRAWS, Version
from fedloom.errors import RunStopped, Stop
from fedloom.local.rows import Fields, name_tensors, rows_of, select_group
from fedloom.schedule import Stream

END_INDEX: Final = 0
CLIENT_INDEX: Final = 2
FLIGHT_INDEX: Final = 3


class RealVersion(Version):
    """Interval between two server steps at real sites (see `Version`)."""

    _clients: StreamedClients

    def __init__(self, job: Job, clients: StreamedClients, state: State, schedule: Stream) -> None:
        super().__init__(job, clients, state, schedule)
        clients.begin_at(self._now)
        self._longest = self._timeout = min(schedule.timeout or clients.longest, clients.longest)
        self._present, self._unusable, self._stuck = clients.present(), set[int](), math.inf
        for event in [e for e in self._queue if math.isinf(e[END_INDEX]) and not clients.is_asked(e[CLIENT_INDEX])]:
            self._queue.remove(event)  # requested by an earlier server process
            self._ask(event)

    def _is_present(self, client: int) -> bool:
        return client in self._present and client not in self._unusable

    def _compute(self, ids: Tensor, times: Tensor) -> None:
        job, state = self._job, self._state
        order = sort_by_samples(job, ids)
        ids, times = ids[order], times[order]
        down = job.down(state.server, state.round + 1, ids)
        for place in range(len(ids)):
            one, number = slice(place, place + 1), self._next_flight_serial()
            received = rows_of(down, one)
            self._flights[number] = Flight.create(
                state.round, ids[one], times[one], name_tensors({"received": received})
            )
            self._ready[int(ids[place])] = number, 0, 0.0

    def _dispatch(self, client: int) -> None:
        number, place, _ = self._ready.pop(client)
        self._ask((math.inf, self._serial, client, number, place, 0.0, 0.0, False))
        self._away.add(client)
        self._serial += 1

    def _ask(self, event: Event) -> None:
        """Send a client the download that its `Flight` contains."""
        flight = self._flights[event[FLIGHT_INDEX]]
        server = self._state.server if flight.version == self._state.round else None
        self._clients.ask_to_train(event[CLIENT_INDEX], flight.version + 1, self._read_downloads(flight), server)
        end, serial, client, number, place, *_ = event
        insort(self._queue, (end, serial, client, number, place, self._clients.seconds(), 0.0, False), lo=self._next)

    def _read_downloads(self, flight: Flight) -> Fields:
        received: Fields = download_type(type(self._job.algorithm))(**select_group(flight.fields, "received"))
        return received

    def _wait(self) -> None:
        clients, before = self._clients, self._present
        outputs, failed = clients.arrived()
        now, self._present = clients.seconds(), clients.present()
        for event in [e for e in self._queue[self._next :] if math.isinf(e[END_INDEX])]:
            _, serial, client, number, place, start, _, _ = event
            flight = self._flights[number]
            if client in outputs:
                received = self._read_downloads(flight)
                output = clients.add_model(outputs[client], received)
                server = self._state.server if flight.version == self._state.round else None
                fields = flatten_results(
                    count_chunk_output(self._job, server, torch.from_numpy(flight.ids), received, output)
                )
                self._flights[number] = flight._replace(fields=fields)
            elif client in failed:
                self._unusable.add(client)
            elif now - start >= self._longest:
                clients.give_up(client)
            else:
                continue
            self._queue.remove(event)
            ended = (now, serial, client, number, place, start, now - start, client not in outputs)
            insort(self._queue, ended, lo=self._next)
        if self._next < len(self._queue) and math.isfinite(self._queue[self._next][END_INDEX]):
            return
        if self._present - before:
            self._left = MAX_VERSION_DRAWS
            self._refill()
        if self._under_way():
            self._stuck = math.inf
        elif math.isinf(self._stuck):
            self._stuck = now
        elif now - self._stuck > clients.patience:
            t = self._state.round + 1
            raise RunStopped(
                Stop.TOO_FEW,
                f"round {t}: {len(self._waiting)} of {self._size} uploads have arrived, and no other "
                "site is free. The state before this round is saved. Run the command again to continue",
            )
        clients.pause()
