"""Rounds in virtual time, which end with the last reply, at a deadline, or once enough clients have replied."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.engine.job import Job
from fedloom.engine.round import draw_cohort, run_round
from fedloom.engine.state import State
from fedloom.engine.virtual.clock import CLIENT_COLUMN, END_COLUMN, FATE_COLUMN, Clock, FlightPiece, ReplyOutcome, Rows
from fedloom.engine.virtual.dispatch import compute_results, log_rows, step_server
from fedloom.errors import RunStopped, Stop
from fedloom.processes.clients import (
    Answers,
    AskRequest,
    ChunkResult,
    LocalClients,
    ScoreRequest,
    Scores,
    TrainRequest,
    TrainResult,
)
from fedloom.schedule import Deadline, OverSelection

T = TypeVar("T")


def run_whole_round(job: Job, clients: LocalClients, state: State) -> tuple[State, tuple[str, ...]]:
    """Run a round that ends with the last reply.

    Results are the same as without a clock.
    """
    assert state.clock is not None
    assert job.fleet is not None
    observed, t = ObservedClients(clients), state.round + 1
    new, events = run_round(job, observed, state)
    start, log = observed.answered(job, state)
    now = start
    for result in observed.trained:
        rows = log_rows(job.fleet, result.ids.numpy(), result.counts, state.round, t, start)
        rows[~result.accepted.numpy(), FATE_COLUMN] = ReplyOutcome.UNUSABLE
        now = max(now, float(rows[:, END_COLUMN].max()))
        log.append(rows)
    if math.isinf(now):
        silent = [int(row[CLIENT_COLUMN]) for rows in log for row in rows if math.isinf(row[END_COLUMN])]
        raise RunStopped(Stop.UNUSABLE, f"round {t}: clients {silent[:8]} never answer. Set a deadline in [schedule]")
    clock = state.clock
    return new.with_(clock=Clock(now, clock.queue, log=clock.logged(np.concatenate(log)))), events


def run_deadline_round(job: Job, clients: LocalClients, state: State) -> tuple[State, tuple[str, ...]]:
    """Run a round that ends at its deadline or once enough clients have replied."""
    assert state.clock is not None
    assert job.fleet is not None
    t, clock, schedule, observed = state.round + 1, state.clock, job.setting.schedule, ObservedClients(clients)
    drawn, sampler, query_counts = draw_cohort(job, observed, state, t)
    start, asking = observed.answered(job, state)
    cohort, times = drawn.unique(return_counts=True)
    steps = None
    if isinstance(schedule, Deadline) and schedule.partial:
        steps = _affordable_steps(job, cohort, schedule.seconds)
    flights = compute_results(job, clients, state, cohort, times, steps)
    logs = [log_rows(job.fleet, f.ids, f.fields["counts"], state.round, t, start) for f in flights]
    log = np.concatenate(logs)
    if isinstance(schedule, Deadline):
        end = start + schedule.seconds
        if steps is not None:
            log[(steps == 0)[_cohort_positions(cohort, log[:, CLIENT_COLUMN])].numpy(), END_COLUMN] = math.inf
        in_time = log[:, END_COLUMN] <= end
        now = float(log[:, END_COLUMN].max()) if in_time.all() else end
    else:
        assert isinstance(schedule, OverSelection)
        first = np.lexsort((np.arange(len(log)), log[:, END_COLUMN]))[: schedule.enough(len(log))]
        in_time = np.isin(np.arange(len(log)), first)
        now = float(log[first, END_COLUMN].max())
        if math.isinf(now):
            raise RunStopped(Stop.UNUSABLE, f"round {t}: fewer than {len(first)} of {len(log)} clients will ever reply")
    overdue = ~in_time
    log[overdue, FATE_COLUMN], log[overdue, END_COLUMN] = ReplyOutcome.LATE, now
    log[overdue, 5] = [job.fleet.presence_seconds(int(client), start, now) for client in log[overdue, CLIENT_COLUMN]]
    lost = torch.from_numpy(log[overdue, CLIENT_COLUMN].astype(np.int64))
    before = state.with_(tally=state.tally.plus(lost))
    events: tuple[str, ...] = ()
    if overdue.any():
        events = (f"round {t}: {int(overdue.sum())} of {len(log)} clients were late, including {lost[:8].tolist()}",)
    pieces, first_row = list[FlightPiece](), 0
    for flight in flights:
        used_rows = in_time[first_row : first_row + len(flight.ids)]
        first_row += len(flight.ids)
        if used_rows.any():
            pieces.append((flight, np.flatnonzero(used_rows)))
    if not pieces:
        waited = clock.logged(np.concatenate([*asking, log]))
        counts = torch.cat([query_counts, torch.zeros(1, dtype=torch.long)])
        new = before.with_(
            round=t, sampler=sampler, totals=state.totals + counts, clock=Clock(now, clock.queue, log=waited)
        )
        return new, events
    new, more, used = step_server(job, clients, before, t, pieces, sampler, query_counts)
    log[in_time & ~np.isin(log[:, CLIENT_COLUMN], used), FATE_COLUMN] = ReplyOutcome.UNUSABLE
    done = Clock(now, clock.queue, log=clock.logged(np.concatenate([*asking, log])))
    return new.with_(clock=done), (*events, *more)


def _cohort_positions(cohort: Tensor, clients: NDArray[np.float64]) -> Tensor:
    """Return the positions of clients in a cohort in ascending order."""
    return torch.searchsorted(cohort, torch.from_numpy(clients.astype(np.int64)))


def _affordable_steps(job: Job, ids: Tensor, seconds: float) -> Tensor:
    """Return the number of local steps ``[m]`` that fit in the time left after receiving and sending a model."""
    assert job.fleet is not None
    model = torch.zeros(1, job.oracle.layout.d, dtype=job.oracle.dtype)
    length = int(job.messages.vector("x", model).lengths()[0].max()) + 64
    traffic = np.tile([0, 0, 0, length, length], (len(ids), 1))
    left = seconds - job.fleet.busy(ids.numpy(), traffic)
    samples = (torch.from_numpy(left) / job.fleet.seconds[ids]).clamp(min=0)[:, None]
    work = job.work(1, ids)
    return job.algorithm.affordable(samples.to(work.steps.device), work)[:, 0].cpu()


class ObservedClients:
    """A run's clients, with a record of how each client's work in a round ended."""

    def __init__(self, clients: LocalClients) -> None:
        self._clients = clients
        self.queries: list[tuple[Tensor, Tensor]] = []
        self.trained: list[ChunkResult] = []

    def train(self, request: TrainRequest) -> Iterator[TrainResult]:
        for result in self._clients.train(request):
            self._note(result)
            yield result

    def ask(self, request: AskRequest) -> Iterator[Answers]:
        answers = list(self._clients.ask(request))
        self.queries.append((request.ids, torch.cat([answer.counts for answer in answers])))
        return iter(answers)

    def score(self, request: ScoreRequest) -> Iterator[Scores]:
        return self._clients.score(request)

    def call_once(self, ids: Tensor, call: Callable[[], T]) -> T:
        result = self._clients.call_once(ids, call)
        self._note(result)
        return result

    def _note(self, result: object) -> None:
        if isinstance(result, ChunkResult):
            self.trained.append(result)

    def answered(self, job: Job, state: State) -> tuple[float, list[Rows]]:
        """Return the time of the queried clients' last answer, and the log rows of their answers."""
        assert state.clock is not None
        assert job.fleet is not None
        now, log = state.clock.now, list[Rows]()
        for ids, counts in self.queries:
            rows = log_rows(job.fleet, ids.numpy(), counts, state.round, state.round + 1, now)
            rows[:, FATE_COLUMN] = ReplyOutcome.QUERIED
            now = max(now, float(rows[:, END_COLUMN].max()))
            log.append(rows)
        return now, log
