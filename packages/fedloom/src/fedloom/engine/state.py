"""State of a run between rounds: everything that a checkpoint contains except the clients' rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.engine.clients.uploads import first_sums
from fedloom.engine.job import Job
from fedloom.engine.records import Records
from fedloom.engine.virtual.clock import Clock
from fedloom.local.rows import F, Fields, group_of, name_tensors, remade
from fedloom.processes.clients import CLIENT_COUNTS
from fedloom.schedule import Stream

START_UP_BASELINE_ROUNDS = 5
"""Number of later rounds with which a process's first round is compared to determine its one-off costs."""
PACE_WINDOW_ROUNDS = 10
"""Number of newest rounds and evaluations whose median is the pace."""
MOST_LATEST = 64
"""Number of cohorts that a tally holds before it adds them up, because a round must not cost a copy of all clients'
counts."""


class Tally(NamedTuple):
    """Counts of all clients.

    Attributes:
        before: counts without the latest cohorts ``[n]``.
        latest: ids ``[m]`` of the cohorts that were counted since then.
    """

    before: Tensor
    latest: tuple[Tensor, ...] = ()

    def plus(self, ids: Tensor) -> Tally:
        """Return the tally with one more cohort counted."""
        longer = Tally(self.before, (*self.latest, ids))
        return longer if len(longer.latest) < MOST_LATEST else Tally(longer.counts())

    def counts(self) -> Tensor:
        """Return the counts of all clients ``[n]``."""
        if not self.latest:
            return self.before
        ids = torch.cat(self.latest)
        return self.before.index_add(0, ids, torch.ones_like(ids))


@dataclass(frozen=True)
class Times:
    """Measured times of a run in seconds.

    A process's first round also includes the time for compilation, forks and page faults. These one-off costs are
    reported
    separately:
    they are the time by which the round exceeds the median of the rounds after it. A process with only one round is
    compared with the
    rounds of the other processes. The only round of a run cannot be compared, so it has no one-off costs.

    Attributes:
        rounds: duration of each round in seconds, without evaluation, with all costs included.
        process_starts: positions in `rounds` at which a process started.
        evaluations: duration of this process's evaluations in seconds.
    """

    rounds: tuple[float, ...] = ()
    process_starts: tuple[int, ...] = (0,)
    evaluations: tuple[float, ...] = ()

    @classmethod
    def resumed(cls, rounds: Sequence[float], process_starts: Sequence[int]) -> Times:
        """Return the times of earlier processes, continued by a new process."""
        return cls(tuple(rounds), tuple(dict.fromkeys([*process_starts, len(rounds)])))

    def add_round(self, seconds: float) -> Times:
        """Return the times with the duration of one more round."""
        return replace(self, rounds=(*self.rounds, seconds))

    def add_evaluation(self, seconds: float) -> Times:
        """Return the times with the duration of one more evaluation."""
        return replace(self, evaluations=(*self.evaluations, seconds))

    def startup(self) -> list[float]:
        """Return the one-off costs of each round, at least 0. They are part of `rounds`."""
        costs = [0.0] * len(self.rounds)
        usual = [s for k, s in enumerate(self.rounds) if k not in self.process_starts]
        for first, end in zip(self.process_starts, [*self.process_starts[1:], len(self.rounds)], strict=True):
            near = self.rounds[first + 1 : end][:START_UP_BASELINE_ROUNDS] or usual
            if first < end and near:
                costs[first] = max(0.0, self.rounds[first] - median(near))
        return costs

    def steady_seconds(self) -> list[float]:
        """Return the duration of each round in seconds, without one-off costs."""
        return [s - cost for s, cost in zip(self.rounds, self.startup(), strict=True)]

    def pace(self, every: int) -> float | None:
        """Return the recent time per round in seconds, including its part of an evaluation every ``every`` rounds.

        None before this process's third round. Also None before the process's second evaluation if evaluations take a
        fifth of the time or more, because the first evaluation has one-off costs too.
        """
        rounds = self.rounds[self.process_starts[-1] + 1 :][-PACE_WINDOW_ROUNDS:]
        if len(rounds) < 2:
            return None
        warm = self.evaluations[1:][-PACE_WINDOW_ROUNDS:]
        share = median(warm or self.evaluations or [0.0]) / every
        return median(rounds) + share if warm or share < median(rounds) / 5 else None


@dataclass(frozen=True)
class State:
    """State of a run after a round.

    Attributes:
        round: number of completed rounds.
        server: server state of the method.
        sampler: state of the sampler.
        weigher: state of the weigher.
        aggregator: state of the aggregator.
        sums: sums of the rows that the server stores, over all clients, float64 by field.
        totals: `CLIENT_COUNTS` and the number of dropped uploads, over all rounds ``[8]``.
        tally: number of rounds in which each client sent an upload or an answer.
        cohort: clients of the last round ``[m]``.
        trained: newest round that changed the server's state. It is earlier than `round` if a round was given up.
        records: measurements so far.
        notes: sentences about events such as dropped clients.
        times: durations of the rounds in seconds. No result depends on them.
        clock: time, virtual or at real sites, and the work under way. None without devices and without a stream.
        shares: clients' shares in the objective ``[n, 1]``. They are given only if the run recomputes the shares. None:
            `Job.alpha`.
    """

    round: int
    server: Fields
    sampler: Fields
    weigher: Fields
    aggregator: dict[str, Tensor]
    sums: dict[str, Tensor]
    totals: Tensor
    tally: Tally
    cohort: Tensor
    trained: int = 0
    records: Records = field(default_factory=Records)
    notes: tuple[str, ...] = ()
    times: Times = field(default_factory=Times)
    clock: Clock | None = None
    shares: Tensor | None = None

    @property
    def uploads(self) -> Tensor:
        """Number of rounds in which each client sent an upload or an answer ``[n]``."""
        return self.tally.counts()

    @property
    def is_scored(self) -> bool:
        """True if the records contain the scores of the current models."""
        return self.records.round >= self.trained

    def with_(self, **changes: Any) -> State:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def tensors(self) -> dict[str, Tensor]:
        """Return all fields by name, for a checkpoint."""
        parts = {name: getattr(self, name) for name in ("server", "sampler", "weigher", "aggregator", "sums")}
        numbers = {"totals": self.totals, "uploads": self.uploads, "cohort": self.cohort, "shares": self.shares}
        clock = None if self.clock is None else self.clock.tensors()
        trained = torch.tensor(self.trained)
        return name_tensors({**parts, **numbers, "trained": trained, "clock": clock, "records": self.records.tensors()})

    def restored(self, round: int, tensors: dict[str, Tensor], notes: Sequence[str], times: Times) -> State:
        """Return the state of this run after a different round, restored from the result of `tensors`.

        ``self`` provides the types.
        """

        def like(value: F, name: str) -> F:
            saved = group_of(tensors, name)
            return remade(value, [saved[f].to(t.device) for f, t in zip(value._fields, value, strict=True)])

        return State(
            round,
            like(self.server, "server"),
            like(self.sampler, "sampler"),
            like(self.weigher, "weigher"),
            group_of(tensors, "aggregator"),
            group_of(tensors, "sums"),
            tensors["totals"],
            Tally(tensors["uploads"]),
            tensors["cohort"],
            int(tensors.get("trained", round)),
            Records.read_tensors(group_of(tensors, "records")),
            tuple(notes),
            times,
            None if self.clock is None else Clock.restored(group_of(tensors, "clock")),
            tensors.get("shares"),
        )


def initial_state(job: Job, server: Fields) -> State:
    """Return the state before the first round."""
    ctx = job.ctx(0)
    totals = torch.zeros(len(CLIENT_COUNTS) + 1, dtype=torch.long)
    if job.spent is not None:
        totals[:-1] += job.spent
    aggregator = {} if job.setting.aggregator is None else job.setting.aggregator.init(ctx)
    records = Records(ids=job.scored_ids if len(job.scored_ids) < job.eval_fed.n else None)
    return State(
        0,
        server,
        job.setting.sampler.init(ctx),
        job.setting.aggregation_weights.init(ctx),
        aggregator,
        first_sums(job),
        totals,
        Tally(torch.zeros(job.n, dtype=torch.long)),
        ctx.ids,
        records=records,
        notes=job.notes,
        clock=Clock() if job.setting.devices is not None or isinstance(job.setting.schedule, Stream) else None,
        shares=job.alpha if job.regroups else None,
    )
