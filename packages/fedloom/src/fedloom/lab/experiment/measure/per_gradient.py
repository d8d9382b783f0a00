"""Measure each method's cost per gradient at clients and at the server, relative to FedAvg in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, TypeVar

from torch import Tensor

from fedloom.data.federation import Federation
from fedloom.engine.setting import Setting
from fedloom.errors import FedloomError
from fedloom.lab.experiment.measure.cost import MeasuredRound, play_rounds
from fedloom.processes.clients import CLIENT_COUNTS
from fedloom.processes.pool import Workers

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
PAIR_COUNT = 5
"""Number of measured pairs per method. A pair consists of a block of FedAvg rounds and a block of the method's
rounds."""


class GradientCost(NamedTuple):
    """Processor time per sample gradient of a method, excluding the first round and evaluation.

    Attributes:
        method: label of the method.
        seconds: processor time in seconds per gradient.
        clients: time spent at the clients, in units of FedAvg's time per gradient.
        server: all other time (for the server's step, messages, and the stored rows of the clients), in the same units.
        forward: number of samples per gradient used only in forward passes.
        oracle: name of the oracle that computed the gradients. PyTorch is used for terms that the compiled kernels do
            not support.
        reason: reason why the measurements are missing. Empty if they exist.
    """

    method: str
    seconds: float = float("nan")
    clients: float = float("nan")
    server: float = float("nan")
    forward: float = float("nan")
    oracle: str = ""
    reason: str = ""

    @property
    def ratio(self) -> float:
        """Time per gradient, relative to FedAvg."""
        return self.clients + self.server


@dataclass
class TimedWorkers:
    """Workers of this process, including a measurement of their processor time."""

    workers: Workers
    seconds: float = field(default=0.0, init=False)

    def map(self, handler: Callable[[S, T], R], shared: S, tasks: Sequence[T]) -> Iterator[R]:
        """Compute tasks like `fedloom.processes.pool.Workers.map`, and add their processor time."""
        results = iter(self.workers.map(handler, shared, tasks))
        while True:
            start = time.process_time()
            try:
                result = next(results)
            except StopIteration:
                return
            finally:
                self.seconds += time.process_time() - start
            yield result

    def call_once(self, ids: Tensor, call: Callable[[], R]) -> R:
        """Call a function like `fedloom.processes.pool.Workers.call_once`."""
        return self.workers.call_once(ids, call)


class _CostBlock(NamedTuple):
    """Mean cost per gradient over several rounds: seconds at clients and elsewhere, and samples in forward passes."""

    clients: float
    server: float
    forward: float
    oracle: str

    @property
    def seconds(self) -> float:
        """Total processor time in seconds per gradient."""
        return self.clients + self.server


def measure_per_gradient(
    settings: Sequence[tuple[str, Setting]], fed: Federation, fedavg: Setting, rounds: int
) -> list[GradientCost]:
    """Measure the cost per gradient of each method in this process, with one worker.

    Args:
        settings: labels and settings of the methods.
        fed: the clients and their data.
        fedavg: setting of FedAvg, the reference for all methods.
        rounds: number of measured rounds per block, after one unmeasured round.

    Returns:
        One row per method, from the pair of blocks with the median ratio. The two blocks of a pair are measured back to
        back, so a slow phase of the machine affects both.
    """
    pairs: dict[str, list[tuple[_CostBlock, _CostBlock]]] = {label: [] for label, _ in settings}
    reasons = dict[str, str]()
    for _ in range(PAIR_COUNT):
        for label, setting in settings:
            if label in reasons:
                continue
            base = _measure_block(fedavg, fed, rounds)
            try:
                block = _measure_block(setting, fed, rounds)
            except FedloomError as error:
                reasons[label] = str(error)
                continue
            if base is None or block is None:
                reasons[label] = "no gradient in these rounds"
            else:
                pairs[label].append((block, base))
    costs = list[GradientCost]()
    for label, _ in settings:
        if label in reasons:
            costs.append(GradientCost(label, reason=reasons[label]))
            continue
        ordered = sorted(pairs[label], key=lambda pair: pair[0].seconds / pair[1].seconds)
        block, base = ordered[len(ordered) // 2]
        parts = (block.clients / base.seconds, block.server / base.seconds)
        costs.append(GradientCost(label, block.seconds, *parts, block.forward, block.oracle))
    return costs


def _measure_block(setting: Setting, fed: Federation, rounds: int) -> _CostBlock | None:
    """Run one unmeasured round, then measure several more rounds, and return their mean cost per gradient.

    Return None if these rounds compute no gradients.
    """
    timed: list[TimedWorkers] = []

    def time_workers(workers: Workers) -> Workers:
        timed.append(TimedWorkers(workers))
        return timed[-1]

    alone = setting.with_(engine=setting.engine.with_(workers=1))
    with closing(play_rounds(alone, fed, time.process_time, time_workers)) as game:
        measured_rounds: list[MeasuredRound] = [*islice(game, rounds + 1)]
    totals = measured_rounds[-1].state.totals - measured_rounds[0].state.totals
    counts = dict(zip(CLIENT_COUNTS, totals.tolist(), strict=False))
    gradients = counts["samples_backward"]
    if not gradients:
        return None
    whole = sum(one.cost.seconds or 0.0 for one in measured_rounds[1:])
    clients = sum(one.seconds for one in timed[1:])
    forward = counts["samples_forward"] / gradients
    return _CostBlock(clients / gradients, (whole - clients) / gradients, forward, measured_rounds[0].job.oracle.name)
