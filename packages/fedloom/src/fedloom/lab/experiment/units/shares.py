"""Choose the number of parallel runs, and the number of processes for each run."""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedloom.choose import Uniform
from fedloom.data.federation import Federation
from fedloom.engine.setting import Setting
from fedloom.engine.setup import make_problem
from fedloom.errors import FedloomError
from fedloom.lab.experiment.measure.cost import measure_rounds
from fedloom.lab.experiment.schema import Experiment
from fedloom.local.oracles import chunk_count
from fedloom.processes.costs import MeasuredWorkers
from fedloom.processes.pool import Workers, usable_cores, useful_processes

TRIED_CLIENTS = 8
"""Number of clients in each of the two rounds used to measure a run's cost."""
SYNCHRONY_COST = 1.1
"""Slowdown factor of a run with several processes, relative to ideal scaling. The processes wait for each other at the
end of every round."""


class RunLoad(NamedTuple):
    """Estimated cost of a run.

    Attributes:
        undivided_seconds: seconds of work that cannot be divided into chunks. This time does not depend on the number
            of processes.
        divided_seconds: seconds of local work that can be divided into chunks.
        chunks: number of chunks into which a cohort is divided. Additional processes would be idle.
    """

    undivided_seconds: float
    divided_seconds: float
    chunks: int

    def seconds(self, workers: int) -> float:
        """Return the run's duration in seconds with the given number of processes."""
        if workers == 1:
            return self.undivided_seconds + self.divided_seconds
        turns = math.ceil(self.chunks / min(workers, self.chunks))
        return self.undivided_seconds + self.divided_seconds * turns / self.chunks * SYNCHRONY_COST


class ProcessShare(NamedTuple):
    """Number of simultaneous runs, and number of processes per run."""

    runs: int
    workers: int


def choose_share(loads: Sequence[RunLoad], processes: int, most: int | None = None) -> ProcessShare:
    """Return the division of processes that finishes a queue of runs first.

    Ties go to the largest number of simultaneous runs.

    Args:
        loads: costs of the runs, in starting order.
        processes: number of processes that may run simultaneously, at least 1.
        most: maximum number of simultaneous runs that fit in memory. If None, there is no limit.
    """
    sizes = range(1, max(1, min(processes, len(loads), most or processes)) + 1)
    shares = [ProcessShare(runs, processes // runs) for runs in sizes]
    return min(
        shares,
        key=lambda share: (_last_end_seconds([load.seconds(share.workers) for load in loads], share.runs), -share.runs),
    )


def _last_end_seconds(seconds: Sequence[float], places: int) -> float:
    """Return the end time of the last run if each run starts as soon as a slot is free."""
    free = [0.0] * places
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def decide_share(
    experiment: Experiment, federations: Mapping[int, Federation], units: Sequence[int] | None = None
) -> ProcessShare:
    """Divide an experiment's processes among its runs.

    If every cohort is a single chunk, each run uses only one process. If cohorts have several chunks, rounds with a few
    clients are measured, and the division with the shortest estimated total time is chosen.

    Args:
        experiment: experiment to run, with the requested number of processes in ``engine.workers``.
        federations: federations, keyed by seed.
        units: method index of every remaining run. If None, all methods are run with all seeds.

    Returns:
        Number of simultaneous runs, and number of processes per run. On an accelerator, runs are computed one at a time
        with all processes, because forked processes cannot share the accelerator.
    """
    engine, fed = experiment.common.engine, next(iter(federations.values()))
    wanted = usable_cores() if engine.workers == "auto" else engine.workers
    methods = range(len(experiment.compared))
    queue = [k for k in methods for _ in experiment.head.seeds] if units is None else units
    processes = useful_processes(wanted, max(len(queue), fed.n))
    if processes == 1 or engine.device != "cpu" or len(queue) <= 1:
        return ProcessShare(1, wanted)
    settings = [method.setting for method in experiment.compared]
    shapes = {k: _chunks_and_state_bytes(settings[k], fed) for k in dict.fromkeys(queue)}
    most = max(1, _usable_memory_bytes() // max(1, max(rows for _, rows in shapes.values())))
    if all(chunks == 1 for chunks, _ in shapes.values()):
        return ProcessShare(useful_processes(min(processes, most), len(queue)), 1)
    loads = {k: _estimate_load(settings[k], fed, chunks) for k, (chunks, _) in shapes.items()}
    return choose_share([loads[k] for k in queue], processes, most)


def _chunks_and_state_bytes(setting: Setting, fed: Federation) -> tuple[int, int]:
    """Return the number of chunks in a cohort, and the size in bytes of the in-memory client rows."""
    problem, start = make_problem(setting, fed, finds=False)
    cohort = problem.setting.sampler.smallest(problem.n) or problem.n
    rows = problem.n * sum(t.numel() * t.element_size() for fields in start.templates.values() for t in fields)
    return chunk_count(cohort, problem.chunk), min(rows, setting.engine.state_memory_mib << 20)


def _estimate_load(setting: Setting, fed: Federation, chunks: int) -> RunLoad:
    """Estimate a run's cost from its second round. If this round cannot be run, return a nominal cost."""
    by_round: list[MeasuredWorkers] = []

    def record_workers(workers: Workers) -> Workers:
        by_round.append(MeasuredWorkers(workers))
        return by_round[-1]

    problem, _ = make_problem(setting, fed, finds=False)
    cohort = problem.setting.sampler.smallest(problem.n) or problem.n
    alone = setting.with_(engine=setting.engine.with_(workers=1))
    few = alone.with_(sampler=Uniform(clients=min(TRIED_CLIENTS, cohort)))
    try:
        seconds = measure_rounds(few, fed, 2, through=record_workers).rounds[1].seconds or 0.0
    except FedloomError:  # the method needs all clients, or its first round fails
        return RunLoad(0.0, float(setting.rounds), chunks)
    work, clients = by_round[-1].work, max(1, by_round[-1].clients)
    rest = max(0.0, seconds - work - by_round[-1].passing_seconds)
    return RunLoad(setting.rounds * rest, setting.rounds * work / clients * cohort, chunks)


def _usable_memory_bytes() -> int:
    """Return the number of bytes that all runs together may use: half of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
