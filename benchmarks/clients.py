"""Measure how time and memory grow with the number of clients: rounds, evaluation, checkpoints, resuming, the report.

    python benchmarks/clients.py --clients 10000 --clients 1000000 --method fedavg --method scaffold --method flame
    python benchmarks/clients.py --clients 100000 --method flame --evaluate-all    # everyone's personal model
    python benchmarks/clients.py --clients 10000 --clients 1000000 --report
    python benchmarks/clients.py --clients 170000 --features 3000 --method fedavg --cold --memory 4

The model is a softmax regression with 60 features (`--features`) and 10 classes. Every client has 10 samples, each
cohort has 1,000 clients, and 1,000 clients are scored. The features stay in a file on disk unless `--in-memory` is
given. Client rows beyond 16 MiB also stay on disk.

The output has a line for each method and number of clients. It shows the time to load and split the data, to start
the run, and to compute a round (median without the first round), an evaluation and the last checkpoint, and the time to
resume from this checkpoint. It also shows the disk space and the peak anonymous memory. Times are processor times,
which other processes hardly affect, unless `--wall` selects wall-clock times. A line ends with `disturbed` if other
processes used more than 0.1 core during its measurement.

`--report` measures the report of a FedAvg run instead. `--memory` limits the private data of the process to this number
of GB. `--cold` drops the features from the page cache before they are read, so that they are read from disk.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np
from memory import PeakMemory

from fedloom.algorithms import REGISTRY
from fedloom.choose import Uniform
from fedloom.data import Dataset, load
from fedloom.data.federation import Federation
from fedloom.data.partitions import Iid
from fedloom.engine.setting import Engine, Evaluate
from fedloom.engine.simulate import simulate
from fedloom.engine.state import State
from fedloom.lab.experiment import Plan, parse
from fedloom.lab.report import write_report
from fedloom.local import LocalSGD
from fedloom.processes.machine_load import MAX_FOREIGN_CORES, watch_others

CLASSES, SAMPLES = 10, 10
BLOCK = 6_000_000
"""Number of values that are generated at a time."""

Clock = Callable[[], float]


def make_data(folder: Path, samples: int, features: int) -> Path:
    """Write ``x.npy`` and ``y.npy``: normally distributed features, and labels from a linear model with noise."""
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


def read_data(folder: Path, in_memory: bool) -> Dataset:
    """Return the data set that `make_data` wrote, with its features on disk or in memory."""
    return Dataset.create(np.load(folder / "x.npy"), np.load(folder / "y.npy")) if in_memory else load(folder)


def drop_from_page_cache(folder: Path) -> None:
    """Drop the features from the page cache of the operating system."""
    with (folder / "x.npy").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class RoundTimes:
    """Callback for `simulate` that records the time at the end of every round."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.ends = clock, list[float]()

    def __call__(self, state: State) -> None:
        """Record the current time."""
        self.ends.append(self._clock())


def measure(method: str, fed: Federation, given: argparse.Namespace, place: Path, clock: Clock) -> list[float]:
    """Return the times of start, round, evaluation, last checkpoint and resuming, and the GB of disk and memory."""
    scored = None if given.evaluate_all else 1000
    settings = {
        "local": LocalSGD(lr=0.1, batch_size=10),
        "sampler": Uniform(clients=min(1000, fed.n)),
        "evaluate": Evaluate(every=given.rounds, clients=scored, parts=("train", "test")),
        "engine": Engine(state_memory_mib=16, workers=given.workers),
    }
    with PeakMemory() as peak, tempfile.TemporaryDirectory(dir=place) as folder:
        watch, start = RoundTimes(clock), clock()
        simulate(REGISTRY[method](), fed, rounds=given.rounds, folder=folder, callbacks=[watch], **settings)
        ended, rounds = clock(), np.diff(watch.ends)
        simulate(REGISTRY[method](), fed, rounds=given.rounds, folder=folder, **settings)
        resumed = clock()
        disk = sum(file.stat().st_blocks * 512 for file in Path(folder).rglob("*") if file.is_file())
    begin, round = watch.ends[0] - start - rounds[0], statistics.median(rounds[:-1])
    last = [rounds[-1] - round, ended - watch.ends[-1], resumed - ended]
    return [begin, round, *last, disk / 1e9, peak.most / 1e9]


def measure_report(data: Path, clients: int, given: argparse.Namespace, place: Path, clock: Clock) -> list[float]:
    """Return the time to write the report of a FedAvg run, MB of its page, kB of summary.json, and GB of memory."""
    document = {
        "name": "clients",
        "rounds": 2,
        "data": {"source": "npy", "path": str(data)},
        "partition": {"kind": "iid", "clients": clients},
        "sampler": {"kind": "uniform", "clients": min(1000, clients)},
        "evaluate": {"every": 1} | ({} if given.evaluate_all else {"clients": 1000}),
        "method": [{"algorithm": "fedavg"}],
    }
    with tempfile.TemporaryDirectory(dir=place) as folder:
        out = Path(folder)
        Plan(parse(document), out).run(page=False)
        with PeakMemory() as peak:
            start = clock()
            page = write_report([out], out / "report.html", charts=False)
            seconds = clock() - start
        return [seconds, page.stat().st_size / 1e6, (out / "summary.json").stat().st_size / 1e3, peak.most / 1e9]


def table_lines(clients: int, given: argparse.Namespace, place: Path, clock: Clock) -> Iterator[str]:
    """Yield the lines of the table for a number of clients."""
    data = make_data(place / f"{clients}", clients * SAMPLES, given.features)
    if given.report:
        with watch_others() as others:
            found = measure_report(data, clients, given, place, clock)
        yield format_row("fedavg", clients, found, others.cores)
        return
    if given.cold:
        drop_from_page_cache(data)
    start = clock()
    fed = Iid(clients=clients)(read_data(data, given.in_memory), seed=0)
    loaded = clock() - start
    for method in given.method or ("fedavg", "scaffold", "flame"):
        if given.cold:
            drop_from_page_cache(data)
        with watch_others() as others:
            found = [loaded, *measure(method, fed, given, place, clock)]
        yield format_row(method, clients, found, others.cores)


def format_row(method: str, clients: int, found: list[float], others: float) -> str:
    """Format a line of the table."""
    cells = [method, f"{clients:,}", *(f"{value:.3g}" for value in found)]
    return f"| {' | '.join(cells)} |{' disturbed' if others > MAX_FOREIGN_CORES else ''}"


def main() -> int:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--clients", type=int, action="append")
    options.add_argument("--method", action="append", choices=[*REGISTRY])
    options.add_argument("--features", type=int, default=60)
    options.add_argument("--in-memory", action="store_true", help="read the features into memory first")
    options.add_argument("--evaluate-all", action="store_true", help="score every client")
    options.add_argument("--report", action="store_true", help="measure the report of a FedAvg run instead")
    options.add_argument("--memory", type=float, help="limit on the process's private data, in GB")
    options.add_argument("--cold", action="store_true", help="drop the features from the page cache first")
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--wall", action="store_true", help="measure wall-clock time, not processor time")
    options.add_argument("--folder", type=Path, help="folder for data and rows (default: a temporary one)")
    given = options.parse_args()
    if given.memory:
        resource.setrlimit(resource.RLIMIT_DATA, (int(given.memory * 1e9),) * 2)
    clock = time.perf_counter if given.wall else time.process_time
    measured = "load, cut | begin | round | evaluation | last save | resume | disk GB | memory GB"
    columns = "method | clients | " + ("report | page MB | summary kB | memory GB" if given.report else measured)
    print(f"| {columns} |\n|{'---|' * len(columns.split('|'))}")
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        for clients in given.clients or (10_000, 1_000_000):
            for line in table_lines(clients, given, Path(place), clock):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
