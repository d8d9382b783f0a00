"""State of a run between two rounds: everything in a checkpoint except the clients' states."""

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
from fedloom.local.rows import F, Fields, name_tensors, rebuild_rows, select_group
from fedloom.processes.clients import CLIENT_COUNTS
from fedloom.schedule import Stream

START_UP_BASELINE_ROUNDS = 5
"""Number of later rounds with which a process's first round is compared to determine its one-time costs."""
PACE_WINDOW_ROUNDS = 10
"""Number of recent rounds and evaluations whose median determines the time per round."""
MAX_TALLY_COHORTS = 64
"""Maximum number of cohorts that a tally collects before adding them up. This avoids copying all clients' counts in
each round."""


class ParticipationTally(NamedTuple):
    """Number of times that each client has participated.

    Attributes:
        before: counts ``[n]`` without the latest cohorts.
        latest: ids ``[m]`` of the cohorts that are not counted yet.
    """

    before: Tensor
    latest: tuple[Tensor, ...] = ()

    def plus(self, ids: Tensor) -> ParticipationTally:
        """Return the tally with one more cohort."""
        longer = ParticipationTally(self.before, (*self.latest, ids))
        return longer if len(longer.latest) < MAX_TALLY_COHORTS else ParticipationTally(longer.counts())

    def counts(self) -> Tensor:
        """Return all clients' counts ``[n]``."""
        if not self.latest:
            return self.before
        ids = torch.cat(self.latest)
        return self.before.index_add(0, ids, torch.ones_like(ids))


@dataclass(frozen=True)
class Times:
    """Durations measured in a run, in seconds.

    A process's first round also includes the time for compilation, forks and page faults. These one-time costs are
    reported separately, as the time by which this round exceeds the median of later rounds. If a process has only one
    round, this round is compared to the rounds of other processes. If a run has only one round, its one-time costs are
    unknown and reported as 0.

    Attributes:
        rounds: duration of each round in seconds, excluding evaluation but including one-time costs.
        process_starts: indices in `rounds` of the first round of each process.
        evaluations: durations of this process's evaluations in seconds.
    """

    rounds: tuple[float, ...] = ()
    process_starts: tuple[int, ...] = (0,)
    evaluations: tuple[float, ...] = ()

    @classmethod
    def resumed(cls, rounds: Sequence[float], process_starts: Sequence[int]) -> Times:
        """Return the durations of earlier processes, to which a new process will add its rounds."""
        return cls(tuple(rounds), tuple(dict.fromkeys([*process_starts, len(rounds)])))

    def add_round(self, seconds: float) -> Times:
        """Return the durations with one more round."""
        return replace(self, rounds=(*self.rounds, seconds))

    def add_evaluation(self, seconds: float) -> Times:
        """Return the durations with one more evaluation."""
        return replace(self, evaluations=(*self.evaluations, seconds))

    def startup(self) -> list[float]:
        """Return the one-time costs of each round in seconds, which are at least 0.

        The durations in `rounds` include these costs.
        """
        costs = [0.0] * len(self.rounds)
        usual = [s for k, s in enumerate(self.rounds) if k not in self.process_starts]
        for first, end in zip(self.process_starts, [*self.process_starts[1:], len(self.rounds)], strict=True):
            near = self.rounds[first + 1 : end][:START_UP_BASELINE_ROUNDS] or usual
            if first < end and near:
                costs[first] = max(0.0, self.rounds[first] - median(near))
        return costs

    def steady_seconds(self) -> list[float]:
        """Return the duration of each round in seconds, without one-time costs."""
        return [s - cost for s, cost in zip(self.rounds, self.startup(), strict=True)]

    def pace(self, every: int) -> float | None:
        """Return the recent seconds per round, including a share of the evaluation every ``every`` rounds.

        Return None before this process's third round. If evaluations take at least a fifth of the time, also return
        None before its second evaluation, because the first one includes one-time costs.
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
        server: the method's server state.
        sampler: state of the sampler.
        weigher: state of the weigher.
        aggregator: state of the aggregator.
        sums: sums of the rows that the server stores for all clients, float64, keyed by field.
        totals: values of `CLIENT_COUNTS` and number of dropped uploads, summed over all rounds ``[8]``.
        tally: number of rounds in which each client sent an upload or an answer.
        cohort: clients of the last round ``[m]``.
        trained: last round that changed the server state. Earlier than `round` if a round was abandoned.
        records: records of everything measured so far.
        notes: notes about events, such as dropped clients.
        times: durations of rounds and evaluations in seconds. Results do not depend on them.
        clock: current time (simulated, or real at real sites) and the pending uploads. None if the run has neither
            simulated devices nor an asynchronous schedule.
        shares: clients' weights ``[n, 1]`` in the objective, if the run recomputes them between rounds. None if
            `Job.alpha` always applies.
    """

    round: int
    server: Fields
    sampler: Fields
    weigher: Fields
    aggregator: dict[str, Tensor]
    sums: dict[str, Tensor]
    totals: Tensor
    tally: ParticipationTally
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
        """True if the records contain the current models' scores."""
        return self.records.round >= self.trained

    def with_(self, **changes: Any) -> State:
        """Return a copy of the state with some fields changed."""
        return replace(self, **changes)

    def tensors(self) -> dict[str, Tensor]:
        """Return all fields as named tensors, for a checkpoint."""
        parts = {name: getattr(self, name) for name in ("server", "sampler", "weigher", "aggregator", "sums")}
        numbers = {"totals": self.totals, "uploads": self.uploads, "cohort": self.cohort, "shares": self.shares}
        clock = None if self.clock is None else self.clock.tensors()
        trained = torch.tensor(self.trained)
        return name_tensors({**parts, **numbers, "trained": trained, "clock": clock, "records": self.records.tensors()})

    def restored(self, round: int, tensors: dict[str, Tensor], notes: Sequence[str], times: Times) -> State:
        """Read the state after the given round of this run from the tensors returned by `tensors`.

        ``self`` provides the field types.
        """

        def like(value: F, name: str) -> F:
            saved = select_group(tensors, name)
            return rebuild_rows(value, [saved[f].to(t.device) for f, t in zip(value._fields, value, strict=True)])

        return State(
            round,
            like(self.server, "server"),
            like(self.sampler, "sampler"),
            like(self.weigher, "weigher"),
            select_group(tensors, "aggregator"),
            select_group(tensors, "sums"),
            tensors["totals"],
            ParticipationTally(tensors["uploads"]),
            tensors["cohort"],
            int(tensors.get("trained", round)),
            Records.read_tensors(select_group(tensors, "records")),
            tuple(notes),
            times,
            None if self.clock is None else Clock.restored(select_group(tensors, "clock")),
            tensors.get("shares"),
        )


def initial_state(job: Job, server: Fields) -> State:
    """Return a run's state before the first round."""
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
        ParticipationTally(torch.zeros(job.n, dtype=torch.long)),
        ctx.ids,
        records=records,
        notes=job.notes,
        clock=Clock() if job.setting.devices is not None or isinstance(job.setting.schedule, Stream) else None,
        shares=job.alpha if job.reclusters else None,
    )
