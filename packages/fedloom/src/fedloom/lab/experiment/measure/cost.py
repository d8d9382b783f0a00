"""Measure the cost of a run: the time, gradients and bytes of a few in-memory rounds.

Every estimate is based on a `RoundCost`: `fedloom run --dry-run`, `fedloom bench`, the equal compute budgets of
`fedloom tune`, and the estimates of the studies.
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
from fedloom.engine.scoring import score_models
from fedloom.engine.setting import Setting
from fedloom.engine.setup import make_job
from fedloom.engine.simulate import clients_of, fix_arithmetic, simulate
from fedloom.engine.state import State, initial_state
from fedloom.processes.clients import CLIENT_COUNTS, Clients
from fedloom.processes.pool import Workers

ESTIMATE_ROUNDS = 3
"""Number of rounds, with evaluation, that are run for an estimate."""


class RoundCost(NamedTuple):
    """Cost of one round, summed over its clients.

    Attributes:
        seconds: duration of the round in seconds. None if too few rounds were run for a measurement.
        clients: number of clients that uploaded a message.
        steps: number of local steps.
        samples: number of samples whose gradients are computed.
        bytes_up: number of bytes uploaded.
        bytes_down: number of bytes downloaded.
        simulated: duration of the round in virtual seconds. None if no devices are simulated.
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
        """Return the mean cost per round between two states of a run."""
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
class MeasuredRound:
    """A round run in memory.

    Attributes:
        cost: cost of this round.
        state: state of the run after this round.
        job: job of the run.
        clients: clients that computed the round.
    """

    cost: RoundCost
    state: State
    job: Job
    clients: Clients

    @property
    def samples(self) -> int:
        """Number of sample gradients computed in all rounds so far."""
        return int(self.state.totals[CLIENT_COUNTS.index("samples_backward")])

    def personal_samples(self) -> int:
        """Return the number of sample gradients needed to train the personal models after this round."""
        cost = score_models(self.job, self.clients, self.state).get(WORK_KEY, {})
        if not cost:
            return 0
        return round(float(cost["samples_backward"].nansum()) * self.job.n / len(self.job.scored_ids))


class MeasuredRounds(NamedTuple):
    """Costs of rounds run in memory without evaluation, and the oracle and number of workers used."""

    rounds: list[RoundCost]
    oracle: str
    workers: int


class OtherCost(NamedTuple):
    """Cost of a run outside its rounds: clustering the clients, and training personal models for the last evaluation.

    Attributes:
        samples: number of samples whose gradients are computed.
        bytes_up: number of bytes of uploaded activations.
        bytes_down: number of bytes of the models that clients download to compute the activations.
    """

    samples: float = 0.0
    bytes_up: float = 0.0
    bytes_down: float = 0.0


class RunCost(NamedTuple):
    """Cost of a run, estimated from its first rounds.

    Attributes:
        rounds: number of rounds of the run.
        round: cost of a round, including a proportional share of the evaluation.
        parameters: number of model parameters.
        other: cost of the run outside its rounds.
    """

    rounds: int
    round: RoundCost
    parameters: int
    other: OtherCost = OtherCost()

    @property
    def seconds(self) -> float | None:
        """Estimated duration of the run in seconds.

        The time for clustering the clients is estimated from its share of the gradients. None if too few rounds were
        run for an estimate.
        """
        if self.round.seconds is None:
            return None
        rounds = self.rounds + (self.other.samples / self.round.samples if self.round.samples else 0.0)
        return self.round.seconds * rounds


def play_rounds(
    setting: Setting,
    fed: Federation,
    clock: Callable[[], float] = time.perf_counter,
    through: Callable[[Workers], Workers] = lambda workers: workers,
) -> Generator[MeasuredRound]:
    """Run a setting in memory without evaluation, and yield its rounds one at a time.

    Args:
        setting: setting of the run.
        fed: the clients and their data.
        clock: function that returns the time in seconds.
        through: function that is called with the workers before every round and returns the workers that compute the
            round. The returned workers may wrap the given workers.

    Raises:
        ConfigError: a value is invalid, or values are incompatible (Refused).
        RunStopped: too few of a round's uploads were usable, or the run diverged.
        ClientError: the code of the method failed.
    """
    job, server = make_job(setting, fed)
    with fix_arithmetic(job), clients_of(job) as clients:
        state = initial_state(job, server)
        while True:
            before, start = state, clock()
            state, _ = run_round(job, clients.wrap_workers(through), before)
            yield MeasuredRound(RoundCost.measure(before, state, clock() - start), state, job, clients)


def measure_rounds(
    setting: Setting,
    fed: Federation,
    count: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    through: Callable[[Workers], Workers] = lambda workers: workers,
) -> MeasuredRounds:
    """Run the first ``count`` >= 1 rounds of a setting in memory, and return their costs (see `play_rounds`).

    Returns:
        The cost of each round, the oracle, and the number of workers.
    """
    game = play_rounds(setting, fed, clock, through)
    try:
        rounds = [*islice(game, count)]
    finally:
        game.close()
    job = rounds[0].job
    return MeasuredRounds([one.cost for one in rounds], job.oracle.name, job.workers)


def samples_per_round(setting: Setting, fed: Federation) -> int:
    """Return the number of sample gradients computed in the first round, summed over its cohort."""
    return round(measure_rounds(setting, fed).rounds[0].samples)


def run_cost(setting: Setting, fed: Federation) -> RunCost:
    """Estimate the cost of a run from its first `ESTIMATE_ROUNDS` rounds and their evaluations.

    Nothing is written to disk.

    Raises:
        CodeError: the code of a method failed.
    """
    period = period_of(setting.client_weights)
    finds = 1 if period is None else 1 + (setting.rounds - 1) // period
    once = setting if period is None else setting.with_(client_weights=str(setting.client_weights).partition(" ")[0])
    result = simulate(once, fed, callbacks=[_stop_reason])
    start, pace = initial_state(result.job, result.state.server), result.state.times.pace(setting.evaluate.every)
    searches = dict(zip(CLIENT_COUNTS, (finds * start.totals[: len(CLIENT_COUNTS)]).tolist(), strict=True))
    recorded = result.state.records.last("", "", "samples_backward")
    personal = (
        0.0 if recorded is None else float(recorded[0] - result.state.totals[CLIENT_COUNTS.index("samples_backward")])
    )
    other = OtherCost(searches["samples_backward"] + personal, searches["bytes_up"], searches["bytes_down"])
    return RunCost(setting.rounds, RoundCost.measure(start, result.state, pace), result.job.oracle.layout.d, other)


def _stop_reason(state: State) -> str | None:
    return "enough rounds are measured" if state.round == ESTIMATE_ROUNDS else None
