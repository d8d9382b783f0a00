"""Streams: clients train all the time, and the server steps on the first uploads that arrive."""

from __future__ import annotations

import heapq
import math

import numpy as np
import torch

from fedloom.engine.job import Job
from fedloom.engine.round import checked_ids
from fedloom.engine.state import State
from fedloom.engine.virtual.clock import Clock, Fate
from fedloom.engine.virtual.dispatch import compute, step_on
from fedloom.errors import RunStopped, Stop, blamed
from fedloom.processes.clients import (
    COUNTS,
    LocalClients,
)
from fedloom.schedule import Stream
from fedloom.seeds import derive, generator

DRAWS = 16
"""Draws of the sampler at one version before a place stays free until the next event."""

WAITS = 1000
"""Times that all places are free and nobody who is drawn is there, in a row, before a run ends."""


class Version:
    """The time from one step of the server to the next, in which its state is one version.

    Args:
        job: the run.
        clients: those who compute.
        state: the state after the last step.
        schedule: how many train, and how many uploads make a step.
    """

    def __init__(self, job: Job, clients: LocalClients, state: State, schedule: Stream) -> None:
        assert state.clock is not None
        assert job.fleet is not None
        self._job, self._clients, self._state, self._fleet = job, clients, state, job.fleet
        self._most = schedule.concurrency or job.setting.sampler.smallest(job.n) or job.n
        self._size, self._timeout = schedule.size, schedule.timeout
        clock = state.clock
        self._flights, self._back = dict(clock.flights), dict(clock.back)
        self._serial, self._now = clock.serial, clock.now
        self._old, self._next = clock.queue.tolist(), 0
        self._new: list[tuple[float, ...]] = []
        self._away = {int(row[2]) for row in self._old}
        self._pool: list[tuple[int, int]] = []
        self._ready: dict[int, tuple[int, int]] = {}
        self._sampler, self._draws, self._left, self._waits = state.sampler, 0, DRAWS, 0
        self._waiting: list[tuple[float, ...]] = []
        self._lost: list[tuple[float, ...]] = []

    def run(self) -> tuple[State, tuple[str, ...]]:
        """Dispatch and wait until enough uploads are there; step the server."""
        free = self._most - len(self._away)
        self._fill(free, free)
        while len(self._waiting) < self._size:
            event = self._pop()
            if event is None:
                self._wait()
                continue
            self._now = event[0]
            if event[7]:
                self._lost.append(event)
                self._away.discard(int(event[2]))
            else:
                self._waiting.append(event)  # it stays away: until the step it would get the same model again
                if len(self._waiting) == self._size:
                    break
            if self._peek() != self._now:
                self._refill()
        return self._finish()

    def _peek(self) -> float:
        """When the next client answers or is given up."""
        old = self._old[self._next][0] if self._next < len(self._old) else math.inf
        return min(old, self._new[0][0] if self._new else math.inf)

    def _pop(self) -> tuple[float, ...] | None:
        """The next event, in the order of time and then of dispatch; None where nothing ever happens."""
        if math.isinf(self._peek()):
            return None
        old = self._old[self._next] if self._next < len(self._old) else None
        if old is not None and (not self._new or tuple(old[:2]) < self._new[0][:2]):
            self._next += 1
            return tuple(old)
        return heapq.heappop(self._new)

    def _under_way(self) -> int:
        return len(self._old) - self._next + len(self._new)

    def _refill(self) -> None:
        left = self._size - len(self._waiting) - 1
        free = self._most - self._under_way()
        self._fill(free, free + left)

    def _wait(self) -> None:
        """Let the time pass until somebody is there."""
        t = self._state.round + 1
        times = [self._fleet.next(i, self._now) for i in range(self._job.n) if i not in self._away]
        soonest = min(times, default=math.inf)
        before = self._under_way()
        self._waits, self._left = self._waits + 1, DRAWS
        if self._waits <= WAITS and math.isfinite(soonest) and before < self._most:
            self._now = max(self._now, soonest)
            self._refill()
            if self._under_way() > before:
                return
            later = min((time for time in times if time > self._now), default=math.inf)
            if math.isfinite(later):
                self._now = later
                return
        detail = f"round {t}: {len(self._waiting)} of {self._size} uploads have arrived and no more ever will"
        raise RunStopped(Stop.UNUSABLE, f"{detail}; give [schedule] a timeout, or fewer uploads of a step")

    def _fill(self, free: int, ahead: int) -> None:
        """Dispatch clients now, as many as places are free; compute those that may follow at this version with them."""
        if free <= 0:
            return
        chosen = self._choose(free)
        if not chosen:
            return
        missing = [(i, times) for i, times in chosen if i not in self._ready]
        if missing:
            names = {i for i, _ in chosen}
            further = [
                (i, times) for i, times in self._pool if i not in names and i not in self._ready and self._is_free(i)
            ]
            self._compute([*missing, *further[: max(ahead - len(chosen), 0)]])
        self._dispatch([i for i, _ in chosen])

    def _is_free(self, client: int) -> bool:
        return client not in self._away and self._fleet.next(client, self._now) <= self._now

    def _choose(self, count: int) -> list[tuple[int, int]]:
        """The next clients that are free and there, with how often they were drawn; fewer where there are no more."""
        job = self._job
        while True:
            chosen = list[tuple[int, int]]()
            for i, times in self._pool:
                if len(chosen) == count:
                    break
                if self._is_free(i):
                    chosen.append((i, times))
            everybody = len(self._away) + len(chosen) >= job.n
            if len(chosen) == count or everybody or not self._left:
                self._pool = [pair for pair in self._pool if pair[0] not in self._away]
                return chosen
            self._draw()

    def _draw(self) -> None:
        """Draw another cohort; its clients queue up in an order drawn for it."""
        job, t, k = self._job, self._state.round + 1, self._draws
        ctx = job.ctx(t)
        if k:
            ctx = ctx._replace(seed=derive(ctx.seed, t, purpose=("cohort", k)))
        with blamed("sampler", job.setting.sampler, f"round {t}"):
            drawn, self._sampler = job.setting.sampler.apply(self._sampler, None, ctx)
        ids, times = checked_ids(drawn, job.n).unique(return_counts=True)
        order = torch.randperm(len(ids), generator=generator(job.setting.seed, t, purpose=("dispatch", k)))
        queued = {i for i, _ in self._pool}
        pairs = zip(ids[order].tolist(), times[order].tolist(), strict=True)
        self._pool += [pair for pair in pairs if pair[0] not in queued]
        self._draws, self._left = self._draws + 1, self._left - 1

    def _compute(self, pairs: list[tuple[int, int]]) -> None:
        pairs = sorted(pairs)
        ids, times = (torch.tensor(column) for column in zip(*pairs, strict=True))
        for flight in compute(self._job, self._clients, self._state, ids, times):
            number = max(self._flights, default=-1) + 1
            self._flights[number] = flight
            for place, client in enumerate(flight.ids.tolist()):
                self._ready[client] = (number, place)

    def _dispatch(self, chosen: list[int]) -> None:
        """Send clients off now."""
        homes = [self._ready.pop(i) for i in chosen]
        counts = torch.stack([self._flights[number].fields["counts"][place] for number, place in homes])
        ids = torch.tensor(chosen)
        busy = self._fleet.busy(ids, counts)
        ends = self._fleet.ends(ids, self._now, busy)
        for client, (number, place), work, end in zip(chosen, homes, busy.tolist(), ends.tolist(), strict=True):
            lost = self._timeout is not None and end > self._now + self._timeout
            if lost:
                assert self._timeout is not None
                end = self._now + self._timeout
                work = self._fleet.worked(client, self._now, end)
            row = (end, self._serial, client, number, place, self._now, work, float(lost))
            heapq.heappush(self._new, row)
            self._away.add(client)
            self._serial += 1

    def _finish(self) -> tuple[State, tuple[str, ...]]:
        """Step the server on the uploads that wait."""
        job, state, t = self._job, self._state, self._state.round + 1
        assert state.clock is not None
        by_flight: dict[int, list[int]] = {}
        for event in self._waiting:
            by_flight.setdefault(int(event[3]), []).append(int(event[4]))
        pieces = [(self._flights[number], np.array(sorted(by_flight[number]))) for number in sorted(by_flight)]
        lost = torch.tensor([int(event[2]) for event in self._lost], dtype=torch.long)
        before = state.with_(uploads=state.uploads.index_add(0, lost, torch.ones_like(lost))) if len(lost) else state
        asked = torch.zeros(len(COUNTS), dtype=torch.long)
        new, events, used = step_on(job, self._clients, before, t, pieces, self._sampler, asked)
        return new.with_(clock=self._clock(set(used.tolist()))), events

    def _clock(self, used: set[int]) -> Clock:
        state, t = self._state, self._state.round + 1
        assert state.clock is not None
        log = list[tuple[float, ...]]()
        for events, gone in ((self._waiting, False), (self._lost, True)):
            for end, _, client, number, _, start, busy, _ in events:
                fate = Fate.LOST if gone else Fate.TAKEN if int(client) in used else Fate.UNUSABLE
                log.append((client, self._flights[int(number)].version, t, start, end, busy, fate))
        places: dict[int, list[int]] = {}
        for event in (*self._waiting, *self._lost):
            places.setdefault(int(event[3]), []).append(int(event[4]))
        for number, place in self._ready.values():  # computed, and never dispatched
            places.setdefault(number, []).append(place)
        for number, some in places.items():
            state.clock.landed(number, np.array(some), self._flights, self._back)
        rows = sorted([*map(tuple, self._old[self._next :]), *self._new])
        queue = np.array(rows, dtype=np.float64).reshape(-1, 8)
        return Clock(self._now, queue, self._flights, self._back, self._serial, state.clock.logged(np.array(log)))
