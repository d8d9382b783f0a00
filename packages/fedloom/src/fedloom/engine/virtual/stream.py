"""Asynchronous schedules: clients train continuously, and the server steps with the uploads that arrive first."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import insort
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fedloom.engine.job import Job
from fedloom.engine.round import check_client_ids
from fedloom.engine.state import State
from fedloom.engine.virtual.clock import LOG_COLUMNS, Clock, Event, ReplyOutcome
from fedloom.engine.virtual.dispatch import compute_results, step_server
from fedloom.errors import RunStopped, Stop, attribute_error
from fedloom.processes.clients import CLIENT_COUNTS, Clients, LocalClients
from fedloom.schedule import Stream
from fedloom.seeds import derive, generator

MAX_VERSION_DRAWS = 16
"""Maximum number of cohorts drawn between two server steps. After that, free slots stay empty until the next event."""

MAX_IDLE_ATTEMPTS = 1000
"""Maximum number of consecutive times that no drawn client is present while all slots are free, or that a task is
abandoned. After that, the run ends. For abandoned tasks, the number of clients is added to this limit."""


LOST_FATE, USED_FATE, UNUSABLE_FATE = (
    float(fate) for fate in (ReplyOutcome.LOST, ReplyOutcome.USED, ReplyOutcome.UNUSABLE)
)

NO_QUERIES = torch.zeros(len(CLIENT_COUNTS), dtype=torch.long)
"""Query cost if no candidates are queried."""


class Version(ABC):
    """Interval between two server steps. The server's state does not change during this interval.

    Subclasses define which clients are present (`_is_present`), how training is prepared and started (`_compute`,
    `_dispatch`), and how the run waits for an upload (`_wait`).

    Args:
        job: the run.
        clients: object that trains the clients.
        state: state after the last server step.
        schedule: schedule with the number of clients that train at the same time and the number of uploads per server
            step.
    """

    def __init__(self, job: Job, clients: Clients, state: State, schedule: Stream) -> None:
        assert state.clock is not None
        self._job, self._clients, self._state = job, clients, state
        self._most = schedule.concurrency or job.setting.sampler.smallest(job.n) or job.n
        self._size, self._timeout = schedule.size, schedule.timeout
        clock = self._clock = state.clock
        self._flights, self._back = dict(clock.flights), dict(clock.back)
        self._serial, self._now = clock.serial, clock.now
        self._queue, self._next = list(clock.queue), 0
        self._away = clock.away()
        self._pool, self._pool_start = clock.pool, clock.pool_start
        self._ready: dict[int, tuple[int, int, float]] = {}
        self._sampler, self._draws, self._left = state.sampler, 0, MAX_VERSION_DRAWS
        self._waiting: list[Event] = []
        self._lost: list[Event] = []
        self._silent = 0

    def run(self) -> tuple[State, tuple[str, ...]]:
        """Dispatch clients, wait until enough uploads have arrived, and take a server step.

        Return the new state and sentences about events.
        """
        free = self._most - len(self._away)
        self._fill(free, free + self._size - 1)
        while len(self._waiting) < self._size:
            if self._next == len(self._queue) or math.isinf(self._queue[self._next][0]):
                self._wait()
                continue
            event = self._queue[self._next]
            self._next += 1
            self._now = event[0]
            if event[7]:
                self._give_up(event)
            else:
                self._silent = 0
                self._waiting.append(event)  # not dispatched again before the step, because the model has not changed
                if len(self._waiting) == self._size:
                    break
            if self._next == len(self._queue) or self._queue[self._next][0] != self._now:
                self._refill()
        return self._finish()

    def _give_up(self, event: Event) -> None:
        """Record that a client did not reply in time, so it can be dispatched again."""
        self._lost.append(event)
        self._away.discard(event[2])
        self._silent += 1
        if self._silent >= MAX_IDLE_ATTEMPTS + self._job.n:
            t = self._state.round + 1
            detail = f"round {t}: the last {self._silent} clients all timed out after {self._timeout:g} s"
            raise RunStopped(Stop.UNUSABLE, f"{detail}. Raise schedule.timeout")

    def _under_way(self) -> int:
        return len(self._queue) - self._next

    def _refill(self) -> None:
        free = self._most - self._under_way()
        self._fill(free, free + self._size - len(self._waiting) - 1)

    @abstractmethod
    def _wait(self) -> None:
        """Advance the time to the next possible arrival of an upload.

        Raises:
            RunStopped: no further upload can arrive.
        """

    def _fill(self, free: int, ahead: int) -> None:
        """Dispatch a client for each free slot.

        Also compute up to ``ahead`` clients in total that may be dispatched before the next server step.
        """
        if free <= 0:
            return
        chosen = self._choose(free)
        missing = [pair for pair in chosen if pair[0] not in self._ready]
        if missing:
            waiting = (self._pool[place] for place in range(self._pool_start, len(self._pool)))
            further = (pair for pair in waiting if pair[0] not in self._ready and self._is_free(pair[0]))
            pairs = sorted([*missing, *islice(further, max(ahead - len(chosen), 0))])
            self._compute(*(torch.tensor(column) for column in zip(*pairs, strict=True)))
        for i, _ in chosen:
            self._dispatch(i)

    @abstractmethod
    def _is_present(self, client: int) -> bool:
        """Return True if a client that is not training can be dispatched now."""

    def _is_free(self, client: int) -> bool:
        return client not in self._away and self._is_present(client)

    def _choose(self, count: int) -> list[tuple[int, int]]:
        """Return the next clients in the pool that can be dispatched, and how often each was drawn.

        Clients that are already training are removed from the pool. Absent clients keep their positions.
        """
        chosen, absent, away = list[tuple[int, int]](), list[tuple[int, int]](), self._away
        while len(chosen) < count:
            if self._pool_start < len(self._pool):
                pair = self._pool[self._pool_start]
                self._pool_start += 1
                if pair[0] not in away:
                    (chosen if self._is_present(pair[0]) else absent).append(pair)
                continue
            if not self._left or len(away) + len(chosen) >= self._job.n:
                break
            self._draw({i for i, _ in (*chosen, *absent)})
        if absent:
            self._pool, self._pool_start = [*absent, *self._pool[self._pool_start :]], 0
        return chosen

    def _draw(self, excluded: set[int]) -> None:
        """Draw another cohort, and add its clients to the pool in random order.

        Clients in ``excluded`` are omitted.
        """
        job, t, k = self._job, self._state.round + 1, self._draws
        ctx = job.ctx(t)
        if k:
            ctx = ctx._replace(seed=derive(ctx.seed, t, purpose=("cohort", k)))
        with attribute_error("sampler", job.setting.sampler, f"round {t}"):
            drawn, self._sampler = job.setting.sampler.apply(self._sampler, None, ctx)
        ids, times = check_client_ids(drawn, job.n).unique(return_counts=True)
        order = torch.randperm(len(ids), generator=generator(job.setting.seed, t, purpose=("dispatch", k)))
        pairs = zip(ids[order].tolist(), times[order].tolist(), strict=True)
        self._pool, self._pool_start = [pair for pair in pairs if pair[0] not in excluded], 0
        self._draws, self._left = k + 1, self._left - 1

    @abstractmethod
    def _compute(self, ids: Tensor, times: Tensor) -> None:
        """Prepare clients ``ids [m]`` (ascending, each drawn ``times [m]`` times) for dispatch before the next step."""

    def _next_flight_serial(self) -> int:
        return next(reversed(self._flights), -1) + 1

    @abstractmethod
    def _dispatch(self, client: int) -> None:
        """Start a client's training."""

    def _finish(self) -> tuple[State, tuple[str, ...]]:
        """Take a server step with the arrived uploads. Return the new state and sentences about events."""
        job, state, t = self._job, self._state, self._state.round + 1
        places: dict[int, list[int]] = {}
        for event in self._waiting:
            places.setdefault(event[3], []).append(event[4])
        pieces = [(self._flights[number], np.array(sorted(places[number]))) for number in sorted(places)]
        before = state
        if self._lost:
            lost = torch.tensor([event[2] for event in self._lost])
            before = state.with_(tally=state.tally.plus(lost))
        new, events, used = step_server(job, self._clients, before, t, pieces, self._sampler, NO_QUERIES)
        return new.with_(clock=self._advance_clock(set(used.tolist()), places)), events

    def _advance_clock(self, used: set[int], places: dict[int, list[int]]) -> Clock:
        """Return the clock as it is after a server step."""
        t, log, flights = self._state.round + 1, list[float](), self._flights
        for end, _, client, number, _, start, busy, lost in (*self._waiting, *self._lost):
            fate = LOST_FATE if lost else USED_FATE if client in used else UNUSABLE_FATE
            log += (client, flights[number].version, t, start, end, busy, fate)
        for event in self._lost:
            places.setdefault(event[3], []).append(event[4])
        for number, place, _ in self._ready.values():  # computed but not dispatched from this version
            places.setdefault(number, []).append(place)
        for number, some in places.items():
            self._clock.landed(number, some, self._flights, self._back)
        rows = np.array(log).reshape(-1, len(LOG_COLUMNS))
        self._away.difference_update([event[2] for event in self._waiting])
        del self._queue[: self._next]
        return Clock(
            self._now, self._queue, self._flights, self._back, self._serial, self._clock.logged(rows),
            self._pool, self._pool_start, [self._away],
        )  # fmt: skip


class VirtualVersion(Version):
    """Interval between two server steps in virtual time, where devices determine how long clients take."""

    _clients: LocalClients

    def __init__(self, job: Job, clients: LocalClients, state: State, schedule: Stream) -> None:
        super().__init__(job, clients, state, schedule)
        assert job.fleet is not None
        self._fleet, self._waits = job.fleet, 0

    def _is_present(self, client: int) -> bool:
        return self._fleet.presence is None or self._fleet.next(client, self._now) <= self._now

    def _wait(self) -> None:
        """Advance the time until a client that can be dispatched is present."""
        t, before = self._state.round + 1, self._under_way()
        times = [self._fleet.next(i, self._now) for i in range(self._job.n) if i not in self._away]
        soonest = min(times, default=math.inf)
        self._waits, self._left = self._waits + 1, MAX_VERSION_DRAWS
        if self._waits <= MAX_IDLE_ATTEMPTS and math.isfinite(soonest) and before < self._most:
            self._now = max(self._now, soonest)
            self._refill()
            if self._under_way() > before:
                return
            later = min((time for time in times if time > self._now), default=math.inf)
            if math.isfinite(later):
                self._now = later
                return
        detail = f"round {t}: {len(self._waiting)} of {self._size} uploads have arrived, and no more can arrive"
        raise RunStopped(Stop.UNUSABLE, f"{detail}. Set a timeout in [schedule], or require fewer uploads per step")

    def _compute(self, ids: Tensor, times: Tensor) -> None:
        for flight in compute_results(self._job, self._clients, self._state, ids, times):
            number = self._next_flight_serial()
            self._flights[number] = flight
            busy = self._fleet.busy(flight.ids, flight.fields["counts"].numpy())
            for place, (client, work) in enumerate(zip(flight.ids.tolist(), busy.tolist(), strict=True)):
                self._ready[client] = number, place, work

    def _dispatch(self, client: int) -> None:
        """Start a client's training in virtual time."""
        number, place, busy = self._ready.pop(client)
        presence, end, lost = self._fleet.presence, self._now + busy, False
        if presence is not None:
            end = presence.end(client, self._now, busy)
        if self._timeout is not None and end > self._now + self._timeout:
            end, lost = self._now + self._timeout, True
            busy = self._fleet.presence_seconds(client, self._now, end)
        insort(self._queue, (end, self._serial, client, number, place, self._now, busy, lost), lo=self._next)
        self._away.add(client)
        self._serial += 1
