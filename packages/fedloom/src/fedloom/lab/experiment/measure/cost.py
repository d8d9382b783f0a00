"""Measure the cost of a run: the time, the gradients and the bytes of its rounds, which are played in memory.

Every estimate is based on a `RoundCost`: `fedloom run --dry-run`, `fedloom bench`, the plans with equal compute budgets
in `fedloom tune`, and the estimates of the studies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from fedloom.choose.shares import period_of
from fedloom.data.federation import Federation
from fedloom.engine.clients.scores import WORK_KEY
from fedloom.engine.job import Job
from fedloom.engine.round import run_round
from fedloom.engine.scoring import scores_of
from fedloom.engine.setting import Setting
from fedloom.engine.setup import make_job
from fedloom.engine.simulate import arithmetic, clients_of, simulate
from fedloom.engine.state import State, initial_state
from fedloom.processes.clients import CLIENT_COUNTS, Clients
from fedloom.processes.pool import Workers

ESTIMATE_ROUNDS = 3
"""Number of rounds that are played, with evaluation, for an estimate."""


class RoundCost(NamedTuple):
    """Cost of a round, summed over its clients.

    Attributes:
        seconds: duration of the round in seconds. None after too few rounds.
        clients: number of clients that sent a message.
        steps: local steps.
        samples: number of samples whose gradient is computed.
        bytes_up: bytes of the uploads.
        bytes_down: bytes of the downloads.
        simulated: duration in virtual time in seconds. None without devices.
    """

    seconds: float | None
    clients: float
    steps: float
    samples: float
    bytes_up: float
    bytes_down: float
    simulated: float | None = None

    @classmethod
    def measure(cls, before: State, after: State, seconds: float | None) -> RoundCost:
        """Return the mean cost of a round between two states of a run."""
        rounds = max(1, after.round - before.round)
        counts = dict(
            zip(CLIENT_COUNTS, ((after.totals - before.totals)[: len(CLIENT_COUNTS)] / rounds).tolist(), strict=True)
        )
        clients = float(after.uploads.sum() - before.uploads.sum()) / rounds
        steps, samples, up, down = (counts[name] for name in ("steps", "samples_backward", "bytes_up", "bytes_down"))
        then, now = (0.0 if state.clock is None else state.clock.now for state in (before, after))
        simulated = None if after.clock is None else (now - then) / rounds
        return cls(seconds, clients, steps, samples, up, down, simulated)


@dataclass(frozen=True)
class Round:
    """Round played in memory.

    Attributes:
        cost: cost of this round.
        state: after it.
        job: the run.
        clients: clients that computed the round.
    """

    cost: RoundCost
    state: State
    job: Job
    clients: Clients

    @property
    def samples(self) -> int:
        """Number of samples whose gradient was computed in all rounds so far."""
        return int(self.state.totals[CLIENT_COUNTS.index("samples_backward")])

    def personal_samples(self) -> int:
        """Return the number of samples whose gradient the personal models after this round would need."""
        cost = scores_of(self.job, self.clients, self.state).get(WORK_KEY, {})
        if not cost:
            return 0
        return round(float(cost["samples_backward"].nansum()) * self.job.n / len(self.job.scored_ids))


class Measured(NamedTuple):
    """Rounds played in memory, without evaluation, and the engine's choices for them."""

    rounds: list[RoundCost]
    oracle: str
    workers: int


class OtherCost(NamedTuple):
    """Cost of a run outside its rounds: finding clusters, and training personal models for the last evaluation.

    Attributes:
        samples: number of samples whose gradient is computed.
        bytes_up: bytes of activations.
        bytes_down: bytes of the models with which clients describe themselves.
    """

    samples: float = 0.0
    bytes_up: float = 0.0
    bytes_down: float = 0.0


class RunCost(NamedTuple):
    """Cost of a run, estimated from its first rounds.

    Attributes:
        rounds: number of rounds of the run.
        round: cost of a round, including its share of evaluation.
        parameters: number of parameters of the model.
        other: cost outside the rounds.
    """

    rounds: int
    round: RoundCost
    parameters: int
    other: OtherCost = OtherCost()

    @property
    def seconds(self) -> float | None:
        """Estimated seconds of the run.

        The time for finding clusters is estimated from its share of the gradients. None after too few rounds.
        """
        if self.round.seconds is None:
            return None
        rounds = self.rounds + (self.other.samples / self.round.samples if self.round.samples else 0.0)
        return self.round.seconds * rounds


def play(
    setting: Setting,
    fed: Federation,
    clock: Callable[[], float] = time.perf_counter,
    through: Callable[[Workers], Workers] = lambda workers: workers,
) -> Generator[Round]:
    """Play a run in memory, without evaluation, and yield its rounds for as long as the caller asks for more.

    Args:
        setting: the run.
        fed: clients and their data.
        clock: function that returns the time in seconds.
        through: function called before every round with the workers. It returns the workers that compute the round,
            which may use the given workers.

    Raises:
        ConfigError: values are impossible, or (Refused) do not work together.
        RunStopped: too few uploads of a round are usable, or the run diverged.
        ClientError: code of the method failed.
    """
    job, server = make_job(setting, fed)
    with arithmetic(job), clients_of(job) as clients:
        state = initial_state(job, server)
        while True:
            before, start = state, clock()
            state, _ = run_round(job, clients.wrap_workers(through), before)
            yield Round(RoundCost.measure(before, state, clock() - start), state, job, clients)


def measure_rounds(
    setting: Setting,
    fed: Federation,
    count: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    through: Callable[[Workers], Workers] = lambda workers: workers,
) -> Measured:
    """Play the first ``count`` >= 1 rounds of a setting and return their costs (see `play`).

    Returns:
        The cost of each round, the oracle, and the number of workers.
    """
    game = play(setting, fed, clock, through)
    try:
        rounds = [*islice(game, count)]
    finally:
        game.close()
    job = rounds[0].job
    return Measured([one.cost for one in rounds], job.oracle.name, job.workers)


def samples_per_round(setting: Setting, fed: Federation) -> int:
    """Return the number of samples whose gradient the first round computes, over its cohort, see `play`."""
    return round(measure_rounds(setting, fed).rounds[0].samples)


def run_cost(setting: Setting, fed: Federation) -> RunCost:
    """Return the cost of a run, estimated from its first `ESTIMATE_ROUNDS` rounds and their evaluations.

    Nothing is written.

    Raises:
        CodeError: code of a method failed.
    """
    period = period_of(setting.client_weights)
    finds = 1 if period is None else 1 + (setting.rounds - 1) // period
    once = setting if period is None else setting.with_(client_weights=str(setting.client_weights).partition(" ")[0])
    result = simulate(once, fed, callbacks=[_is_tried])
    start, pace = initial_state(result.job, result.state.server), result.state.times.pace(setting.evaluate.every)
    searches = dict(zip(CLIENT_COUNTS, (finds * start.totals[: len(CLIENT_COUNTS)]).tolist(), strict=True))
    recorded = result.state.records.last("", "", "samples_backward")
    personal = (
        0.0 if recorded is None else float(recorded[0] - result.state.totals[CLIENT_COUNTS.index("samples_backward")])
    )
    other = OtherCost(searches["samples_backward"] + personal, searches["bytes_up"], searches["bytes_down"])
    return RunCost(setting.rounds, RoundCost.measure(start, result.state, pace), result.job.oracle.layout.d, other)


def _is_tried(state: State) -> str | None:
    return "enough rounds are measured" if state.round == ESTIMATE_ROUNDS else None
