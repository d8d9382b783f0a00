"""Measure an experiment's speed on this machine for every method, every oracle and every number of workers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from fedloom.choose import Uniform
from fedloom.data.federation import Federation, Split
from fedloom.engine.job import Job
from fedloom.engine.setting import Setting
from fedloom.engine.setup import check, make_job
from fedloom.errors import Refused
from fedloom.lab.experiment.execute import Plan
from fedloom.lab.experiment.measure.cost import RoundCost, RunCost, measure_rounds, run_cost
from fedloom.lab.experiment.schema import Experiment, Method
from fedloom.lab.experiment.units.shares import decide_share
from fedloom.local.oracles import ORACLES
from fedloom.processes.costs import MeasuredWorkers, MethodCosts
from fedloom.processes.machine_load import MAX_FOREIGN_CORES, wait_for_quiet, watch_others
from fedloom.processes.pool import WorkerPool, Workers, usable_cores
from fedloom.values import choose

START_TIMEOUT_SECONDS = 60.0
"""Number of seconds that a process waits for the other processes before a round."""

CROWD_SIZE, CROWD_BYTES = 200_000, 1 << 30
"""Number of clients in the federation used to measure the cost per client, and maximum size of their rows in bytes."""


class ComputeWay(NamedTuple):
    """A way to compute gradients (an oracle) together with a number of workers.

    ``is_chosen`` is True if the experiment itself would use this combination.
    """

    oracle: str
    workers: int
    is_chosen: bool


class MeasuredSpeed(NamedTuple):
    """Measured speed of a method with an oracle and a number of workers.

    Attributes:
        seconds: median time per round in seconds, excluding the first round.
        samples: number of sample gradients computed per second, excluding the first round.
        other_cores: number of cores that other processes used during the measurement.
    """

    method: str
    way: ComputeWay
    seconds: float
    samples: float
    other_cores: float

    @property
    def is_disturbed(self) -> bool:
        """True if other processes used more than `MAX_FOREIGN_CORES` cores."""
        return self.other_cores > MAX_FOREIGN_CORES


class Bench:
    """Speed measurements of an experiment on the federation of its first seed.

    Args:
        experiment: experiment to measure.
        data_dir: folder of data sets.
        rounds: number of rounds to measure, after one unmeasured round.
        oracles: names of the oracles to measure in addition to the experiment's own. If empty, all oracles that support
            the model are measured.
        workers: numbers of workers to measure in addition to the experiment's own, or ``auto``. If empty, one worker
            and one worker per core are measured.

    Raises:
        DataError: the data cannot be read.
        ConfigError: the experiment is invalid, or one of the named oracles does not support the model (Refused).
    """

    def __init__(
        self,
        experiment: Experiment,
        data_dir: Path | None = None,
        *,
        rounds: int = 5,
        oracles: Sequence[str] = (),
        workers: Sequence[int | str] = (),
    ) -> None:
        for name in oracles:
            choose("gradient engine", {**ORACLES}, name)
        self.experiment, self.rounds = experiment, rounds
        seed = experiment.head.seeds[0]
        self.federation: Federation = experiment.partition(experiment.source.read(data_dir), seed)
        self.share = decide_share(experiment, {seed: self.federation})
        counts = workers or (1, usable_cores() if experiment.common.engine.device == "cpu" else 1)
        self.ways = {m.label: self._supported_ways(m, oracles, counts) for m in experiment.methods}

    def measure(self, patience: float = 0.0) -> Iterator[MeasuredSpeed]:
        """Measure each method with each oracle and number of workers, and yield the speeds.

        Before each measurement, wait for up to ``patience`` seconds until the machine is idle.
        """
        for method in self.experiment.methods:
            for way in self.ways[method.label]:
                wait_for_quiet(patience)
                with watch_others() as other_processes:
                    rounds_measured = measure_rounds(
                        self._setting(method, way.oracle, way.workers), self.federation, self.rounds + 1
                    )
                times = [_cost_seconds(cost) for cost in rounds_measured.rounds[1:]]
                samples = sum(cost.samples for cost in rounds_measured.rounds[1:]) / sum(times)
                yield MeasuredSpeed(method.label, way, statistics.median(times), samples, other_processes.cores)

    def minutes(self, speeds: Sequence[MeasuredSpeed]) -> float:
        """Estimate the whole experiment's time in minutes, excluding evaluation, from the ``picked`` speeds."""
        return (
            sum(s.seconds * self.experiment.rounds[s.method] for s in speeds if s.way.is_chosen) / self.share.runs / 60
        )

    def costs(self, method: Method) -> MethodCosts:
        """Measure the cost constants of a method on this federation (see `measure_costs`)."""
        return measure_costs(
            self._setting(method, method.setting.engine.gradient_engine, 1), self.federation, self.rounds
        )

    def _setting(self, method: Method, oracle: str, workers: int | str) -> Setting:
        engine = method.setting.engine.with_(gradient_engine=oracle, workers=workers)
        return method.setting.with_(engine=engine)

    def _supported_ways(self, method: Method, oracles: Sequence[str], workers: Sequence[int | str]) -> list[ComputeWay]:
        def job_of(wanted: int | str) -> Job:
            return make_job(self._setting(method, method.setting.engine.gradient_engine, wanted), self.federation)[0]

        job = job_of(self.experiment.common.engine.workers if self.share.runs == 1 else self.share.workers)
        picked = ComputeWay(job.oracle.name, job.workers, is_chosen=True)
        able = [picked.oracle, *(name for name in oracles or ORACLES if self._fits(method, name, named=bool(oracles)))]
        counts = dict.fromkeys([picked.workers, *(job_of(n).workers for n in workers)])
        alternatives = [
            ComputeWay(oracle, count, is_chosen=False) for oracle in dict.fromkeys(able) for count in counts
        ]
        return [picked, *(way for way in alternatives if way[:2] != picked[:2])]

    def _fits(self, method: Method, oracle: str, *, named: bool) -> bool:
        try:
            check(self._setting(method, oracle, 1), self.federation)
        except Refused:
            if named:
                raise
            return False
        return True


def measure_costs(setting: Setting, fed: Federation, rounds: int) -> MethodCosts:
    """Measure a setting's cost constants with one worker in this process, after one unmeasured round."""
    job, _ = make_job(setting, fed)
    measured = _measured_rounds(setting, fed, rounds)
    row = sum(t.numel() * t.element_size() for store in job.stores.values() for t in store.template)
    cohort = round(statistics.fmean(w.clients for _, w in measured))
    client = _seconds_per_client(setting, fed, rounds, cohort, row)
    share = statistics.median(w.work / w.clients for _, w in measured)
    crowded = usable_cores() > 1 and setting.engine.device == "cpu"
    return MethodCosts(
        share=share,
        result=statistics.median(w.passing_seconds / w.chunks for _, w in measured),
        client=client,
        fixed=max(0.0, statistics.median(rest for rest, _ in measured) - client * fed.n),
        message=sum(w.bytes for _, w in measured) / sum(w.chunks for _, w in measured),
        row=row,
        chunk=job.chunk,
        cohort=cohort,
        crowd=max(1.0, _busy_seconds_per_client(setting, fed, rounds) / share) if crowded else 1.0,
        cores=usable_cores(),
    )


def _busy_seconds_per_client(setting: Setting, fed: Federation, rounds: int) -> float:
    """Return the seconds of local work per client when all cores compute the same rounds simultaneously.

    In each round, the time of the slowest process is used.
    """
    together = get_context("fork").Barrier(usable_cores())

    def wait() -> None:
        together.wait(timeout=START_TIMEOUT_SECONDS)

    def shares(_shared: None, _task: int) -> list[float]:
        return [w.work / w.clients for _, w in _measured_rounds(setting, fed, rounds, wait)]

    with WorkerPool([shares], usable_cores()) as pool:
        shares_by_core: list[list[float]] = list(pool.map(shares, None, range(usable_cores())))
    slowest: list[float] = [max(each) for each in zip(*shares_by_core, strict=True)]
    return statistics.median(slowest)


def _measured_rounds(
    setting: Setting, fed: Federation, rounds: int, before: Callable[[], None] = lambda: None
) -> list[tuple[float, MeasuredWorkers]]:
    """Measure several rounds, excluding the first.

    Return each round's time outside chunks, and the workers' measurements. ``before`` is called at the start of every
    round.
    """
    by_worker: list[MeasuredWorkers] = []

    def record_workers(workers: Workers) -> Workers:
        before()
        by_worker.append(MeasuredWorkers(workers))
        return by_worker[-1]

    measured = measure_rounds(setting, fed, rounds + 1, through=record_workers)
    return [
        (_cost_seconds(r) - w.work - w.passing_seconds, w) for r, w in zip(measured.rounds, by_worker, strict=True)
    ][1:]


def _cost_seconds(cost: RoundCost) -> float:
    return cost.seconds or 0.0


def _seconds_per_client(setting: Setting, fed: Federation, rounds: int, cohort: int, row: int) -> float:
    """Return the number of seconds that each client of a federation adds to a round, even outside the cohort.

    This time is the slope between two federations of different sizes in which each client has one sample.
    """
    many = min(CROWD_SIZE, CROWD_BYTES // max(1, row))
    setting, few = setting.with_(sampler=Uniform(clients=cohort)), max(cohort, many // 10)
    if many < 2 * few:
        return 0.0
    small, large = (
        statistics.median(rest for rest, _ in _measured_rounds(setting, _single_sample_clients(fed, n), rounds))
        for n in (few, many)
    )
    return max(0.0, (large - small) / (many - few))


def _single_sample_clients(fed: Federation, n: int) -> Federation:
    """Return ``n`` clients with one training sample each, cycling through all training samples."""
    index = fed.parts["train"].index
    train = Split(index[torch.arange(n) % len(index)], torch.arange(n + 1))
    none = Split(index[:0], torch.zeros(n + 1, dtype=torch.long))
    return Federation(fed.data, {"train": train, "validation": none, "test": none}, tuple(map(str, range(n))))


def estimate_costs(plan: Plan) -> Iterator[tuple[str, RunCost]]:
    """Yield every method's label and its estimated cost on the federation of the first seed.

    Nothing is written to the run directory.

    Raises:
        CodeError: the code of a method failed.
    """
    fed, share = plan.federations[plan.experiment.head.seeds[0]], plan.share
    for method in plan.experiment.methods:
        setting = method.setting
        if share.runs > 1:
            setting = setting.with_(engine=setting.engine.with_(workers=share.workers))
        yield method.label, run_cost(setting, fed)


def total_minutes(plan: Plan, costs: Mapping[str, RunCost]) -> float | None:
    """Estimate the time in minutes of all runs of a plan, given the cost of one run of each method.

    Return None if any method's time per round is unknown.
    """
    seconds = {label: cost.seconds for label, cost in costs.items()}
    if any(whole is None for whole in seconds.values()):
        return None
    of_rounds = ((whole or 0.0) / costs[label].rounds * plan.rounds[label] for label, whole in seconds.items())
    return sum(of_rounds) / plan.share.runs / 60
