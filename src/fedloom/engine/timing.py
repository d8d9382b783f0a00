"""Measured time: of rounds, and of the other processes that disturb it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fedloom.data.federation import Federation
from fedloom.engine.round import play
from fedloom.engine.scoring import COST, scores_of
from fedloom.engine.setting import Setting
from fedloom.engine.setup import make_job
from fedloom.engine.simulate import one_thread, pool_of
from fedloom.engine.state import initial_state
from fedloom.processes.chunks import COUNTS
from fedloom.processes.pool import Crew

BACKWARD = COUNTS.index("samples_backward")
"""Place of the samples whose gradient was taken in the totals of a state."""
QUIET = 0.1
"""Cores that other processes may use while something is measured."""

_STAT = Path("/proc/stat")


class Round(NamedTuple):
    """Seconds of a round, and samples whose gradient it took, over its cohort."""

    seconds: float
    samples: int


class Played(NamedTuple):
    """Rounds that were played in memory, without evaluation, and what the engine chose for them."""

    rounds: list[Round]
    oracle: str
    workers: int


def played(
    setting: Setting,
    fed: Federation,
    count: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    crew: Callable[[Crew], Crew] = lambda pool: pool,
) -> Played:
    """Play the first rounds of a run.

    Args:
        setting: the run.
        fed: the clients and their data.
        count: rounds to play, >= 1.
        clock: tells the seconds.
        crew: who computes in place of the pool, which it may use.

    Raises:
        ConfigError: values that cannot work, or (Refused) do not work together.
        RunStopped: too few uploads of a round are usable, or it diverged.
        ClientError: code of the method failed.
    """
    job, server = make_job(setting, fed)
    rounds, before = [], 0
    with one_thread(), pool_of(job) as pool:
        state = initial_state(job, server)
        for _ in range(count):
            start = clock()
            state = play(job, crew(pool), state)
            seconds, samples = clock() - start, int(state.totals[BACKWARD])
            rounds.append(Round(seconds, samples - before))
            before = samples
    return Played(rounds, job.oracle.name, job.workers)


def spending(setting: Setting, fed: Federation) -> Generator[tuple[int, Callable[[], int]]]:
    """Play a run in memory, without evaluation, as long as it is asked for a further round.

    Yields:
        Samples whose gradient all rounds so far took, and a function that gives those that the personal models after
        this round would take.

    Raises:
        ConfigError, RunStopped, ClientError: as `played`.
    """
    job, server = make_job(setting, fed)
    with one_thread(), pool_of(job) as pool:
        state = initial_state(job, server)

        def personal() -> int:
            cost = scores_of(job, pool, state).get(COST, {})
            return round(float(cost[COUNTS[BACKWARD]].nansum()) * job.n / len(job.judged)) if cost else 0

        while True:
            state = play(job, pool, state)
            yield int(state.totals[BACKWARD]), personal


def samples_per_round(setting: Setting, fed: Federation) -> int:
    """Samples whose gradient the first round takes, over its cohort; see `played`."""
    return played(setting, fed).rounds[0].samples


def busy() -> float:
    """Core seconds used by all processes of the machine since it started; those of this one where it does not tell."""
    try:
        user, nice, system = map(int, _STAT.read_text().split(maxsplit=4)[1:4])
    except OSError:
        return own()
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def own() -> float:
    """Core seconds used by this process and by its children that have ended."""
    return sum(os.times()[:4])


class Others:
    """Cores that other processes use, as ``cores``, once `watched` has ended."""

    cores = 0.0


@contextmanager
def watched() -> Iterator[Others]:
    """Watch other processes; children that work meanwhile must end in it."""
    gc.collect()
    found = Others()
    before, mine, start = busy(), own(), time.perf_counter()
    yield found
    found.cores = max(0.0, (busy() - before) - (own() - mine)) / (time.perf_counter() - start)


def wait_for_quiet(patience: float) -> None:
    """Return when the machine has been quiet for a fifth of a second, or after ``patience`` seconds."""
    end = time.perf_counter() + patience
    while time.perf_counter() < end:
        before = busy()
        time.sleep(0.2)
        if busy() - before <= 0.2 * QUIET:
            return
