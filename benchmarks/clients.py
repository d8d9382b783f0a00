"""What grows with the number of clients: time and memory of rounds, evaluation, checkpoints and resuming.

    python benchmarks/clients.py --clients 10000 --clients 1000000 --method fedavg --method scaffold --method flame

Softmax regression on 60 features (`--features`) and 10 classes, 10 samples a client, cohorts of 1,000; 1,000 clients
are scored. The features are a file that stays on disk (`--in-memory` reads it), and so are the clients' rows beyond
16 MiB. A line per method and number of
clients: seconds to load and cut the data, to begin, of a round (median of all but the first), of an evaluation, of the
last checkpoint and of resuming from it; and the peak of anonymous memory. Seconds are of the processor, so that other
processes count little; `--wall` takes the clock's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np
from memory import Peak

from fedloom.algorithms import REGISTRY
from fedloom.choose import Uniform
from fedloom.data import Dataset, load
from fedloom.data.federation import Federation
from fedloom.data.partition import Iid
from fedloom.engine.setting import Engine, Evaluate
from fedloom.engine.simulate import simulate
from fedloom.engine.state import State
from fedloom.local import LocalSGD

CLASSES, SAMPLES = 10, 10
BLOCK = 6_000_000
"""Values that are made at a time."""

Clock = Callable[[], float]


def make(folder: Path, samples: int, features: int) -> Path:
    """A folder of ``x.npy`` and ``y.npy``: normal features, labels by a linear model with noise."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    w = rng.standard_normal((features, CLASSES), np.float32)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (samples, features))
    y, block = np.empty(samples, np.uint8), BLOCK // features
    for start in range(0, samples, block):
        some = rng.standard_normal((min(block, samples - start), features), np.float32)
        x[start : start + len(some)] = some
        noise = 3 * rng.standard_normal((len(some), CLASSES), np.float32)
        y[start : start + len(some)] = (some @ w + noise).argmax(1)
    x.flush()
    np.save(folder / "y.npy", y)
    return folder


def read(folder: Path, in_memory: bool) -> Dataset:
    """The features of `make`, on disk or in memory."""
    return Dataset.of(np.load(folder / "x.npy"), np.load(folder / "y.npy")) if in_memory else load(folder)


class Watch:
    """A callback of `simulate` that keeps when rounds ended, by a clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.ends = clock, list[float]()

    def __call__(self, state: State) -> None:
        """After a round."""
        self.ends.append(self._clock())


def measure(method: str, fed: Federation, given: argparse.Namespace, place: Path, clock: Clock) -> list[float]:
    """Seconds to begin, of a round, an evaluation, the last checkpoint and resuming; GB on disk and of memory."""
    settings = {
        "local": LocalSGD(lr=0.1, batch_size=10),
        "sampler": Uniform(clients=min(1000, fed.n)),
        "evaluate": Evaluate(every=given.rounds, clients=1000, parts=("train", "test")),
        "engine": Engine(store_budget=16, workers=given.workers),
    }
    with Peak() as peak, tempfile.TemporaryDirectory(dir=place) as folder:
        watch, start = Watch(clock), clock()
        simulate(REGISTRY[method](), fed, rounds=given.rounds, folder=folder, progress=[watch], **settings)
        ended, rounds = clock(), np.diff(watch.ends)
        simulate(REGISTRY[method](), fed, rounds=given.rounds, folder=folder, **settings)
        resumed = clock()
        disk = sum(file.stat().st_blocks * 512 for file in Path(folder).rglob("*") if file.is_file())
    begin, round = watch.ends[0] - start - rounds[0], statistics.median(rounds[:-1])
    last = [rounds[-1] - round, ended - watch.ends[-1], resumed - ended]
    return [begin, round, *last, disk / 1e9, peak.most / 1e9]


def main() -> int:
    """Measure and print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--clients", type=int, action="append")
    options.add_argument("--method", action="append", choices=[*REGISTRY])
    options.add_argument("--features", type=int, default=60)
    options.add_argument("--in-memory", action="store_true", help="read the features before the clients are cut")
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--wall", action="store_true", help="seconds of the clock")
    options.add_argument("--folder", type=Path, help="for data and rows; a temporary one by default")
    given = options.parse_args()
    clock = time.perf_counter if given.wall else time.process_time
    print("| method | clients | load, cut | begin | round | evaluation | last save | resume | disk GB | memory GB |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        for clients in given.clients or (10_000, 1_000_000):
            data, start = make(Path(place) / f"{clients}", clients * SAMPLES, given.features), clock()
            fed = Iid(clients=clients)(read(data, given.in_memory), seed=0)
            loaded = clock() - start
            for method in given.method or ("fedavg", "scaffold", "flame"):
                cells = " | ".join(f"{v:.3g}" for v in [loaded, *measure(method, fed, given, Path(place), clock)])
                print(f"| {method} | {clients:,} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
