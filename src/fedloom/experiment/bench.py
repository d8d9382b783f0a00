"""How fast an experiment runs here: every method with every oracle that can, and several numbers of workers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.data.federation import Federation
from fedloom.engine.setup import make_job
from fedloom.engine.timing import QUIET, played, wait_for_quiet, watched
from fedloom.errors import Refused
from fedloom.experiment.execute import side_by_side
from fedloom.experiment.schema import Experiment, Method
from fedloom.local.oracles import ORACLES
from fedloom.processes.pool import cores
from fedloom.values import choose


class Way(NamedTuple):
    """An oracle and a number of workers; ``picked`` if a run of the experiment takes them."""

    oracle: str
    workers: int
    picked: bool


class Speed(NamedTuple):
    """What was measured of one method in one way.

    Attributes:
        seconds: median over rounds, the first left out.
        samples: samples per second whose gradient was taken, the first round left out.
        others: cores that other processes used meanwhile.
    """

    method: str
    way: Way
    seconds: float
    samples: float
    others: float

    @property
    def disturbed(self) -> bool:
        """Whether other processes used more than `fedloom.engine.timing.QUIET` cores."""
        return self.others > QUIET


class Bench:
    """The measurements of an experiment, with the federation of its first seed.

    Args:
        experiment: what to measure.
        data_dir: folder of data sets.
        rounds: rounds that are counted, of one more that is played.
        oracles: names to measure beside the one that is picked; all that can compute the model when empty.
        workers: numbers to measure beside the one that is picked; 1 and the number of cores when empty.

    Raises:
        DataError: the data cannot be read.
        ConfigError: the experiment cannot work, or (Refused) an oracle that was named cannot compute the model.
    """

    def __init__(
        self,
        experiment: Experiment,
        data_dir: Path | None = None,
        *,
        rounds: int = 5,
        oracles: Sequence[str] = (),
        workers: Sequence[int] = (),
    ) -> None:
        for name in oracles:
            choose("oracle", {**ORACLES}, name)
        self.experiment, self.rounds = experiment, rounds
        seed = experiment.head.seeds[0]
        self.federation: Federation = experiment.partition(experiment.source.read(data_dir), seed)
        self.processes = side_by_side(experiment, [self.federation])
        counts = workers or (1, cores() if experiment.engine.device == "cpu" else 1)
        self.ways = {m.label: self._ways(m, oracles, counts) for m in experiment.methods}

    def measure(self, patience: float = 0.0) -> Iterator[Speed]:
        """One row after another, what is picked first; waits up to ``patience`` seconds for a quiet machine."""
        for method in self.experiment.methods:
            for way in self.ways[method.label]:
                wait_for_quiet(patience)
                with watched() as others:
                    found = played(self.rounds + 1, **self._arguments(method, way.oracle, way.workers))
                counted = found.rounds[1:]
                seconds = statistics.median(r.seconds for r in counted)
                samples = sum(r.samples for r in counted) / sum(r.seconds for r in counted)
                yield Speed(method.label, way, seconds, samples, others.cores)

    def minutes(self, speeds: Sequence[Speed]) -> float:
        """Minutes for all methods, rounds and seeds, as measured in the way that is picked, without evaluation."""
        rounds = {m.label: m.rounds * len(self.experiment.head.seeds) for m in self.experiment.methods}
        return sum(s.seconds * rounds[s.method] for s in speeds if s.way.picked) / self.processes / 60

    def _arguments(self, method: Method, oracle: str, workers: int | str) -> dict[str, Any]:
        given = self.experiment.arguments(method, self.federation, self.experiment.head.seeds[0])
        return given | {"engine": self.experiment.engine.with_(oracle=oracle, workers=workers)}

    def _ways(self, method: Method, oracles: Sequence[str], workers: Sequence[int]) -> list[Way]:
        asked = self.experiment.engine.workers if self.processes == 1 else 1
        job, _ = make_job(**self._arguments(method, self.experiment.engine.oracle, asked))
        mine = Way(job.oracle.name, job.workers, picked=True)
        able = [mine.oracle, *(name for name in oracles or ORACLES if self._can(method, name, named=bool(oracles)))]
        counts = dict.fromkeys([mine.workers, *workers])
        others = [Way(oracle, count, picked=False) for oracle in dict.fromkeys(able) for count in counts]
        return [mine, *(way for way in others if way[:2] != mine[:2])]

    def _can(self, method: Method, oracle: str, *, named: bool) -> bool:
        try:
            make_job(**self._arguments(method, oracle, 1))
        except Refused:
            if named:
                raise
            return False
        return True


def duration(minutes: float) -> str:
    """Minutes, hours or days, for people.

    >>> duration(3.2), duration(0.2), duration(200), duration(5000)
    ('3 min', '12 s', '3 h', '3 days')
    """
    for unit, size in (("days", 60 * 24), ("h", 60), ("min", 1)):
        if minutes >= (2 * size if size > 1 else 1):
            return f"{minutes / size:.0f} {unit}"
    return f"{minutes * 60:.0f} s"
