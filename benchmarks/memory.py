"""Measure the anonymous memory of large federations whose client state is on disk.

    python benchmarks/memory.py               # 1,000 clients, MLP 784-200-200-10
    python benchmarks/memory.py --case softmax  # 10,000 clients
    python benchmarks/memory.py --case cnn      # 1,000 clients, CNN 5x5 32-64-512

The method is FLAME, which stores three state rows and one row at the server for every client. The program prints the
peak of the anonymous memory of all processes of the run. If the peak is above 4 GB, the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import torch

from fedloom.algorithms import FLAME
from fedloom.choose import Uniform
from fedloom.data.dataset import Dataset
from fedloom.data.federation import Federation
from fedloom.data.partitions import Iid
from fedloom.engine.setting import Engine, Evaluate
from fedloom.engine.simulate import simulate
from fedloom.local import LocalSGD
from fedloom.models import CNN, MLP, ModelSpec, Softmax


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process and its children in bytes, or 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        own = next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, StopIteration):
        return 0
    return own + sum(anonymous_bytes(int(child)) for child in children)


MAX_BYTES = 4e9
"""Maximum anonymous memory in bytes."""


class Case(NamedTuple):
    """Federation with many clients, each of which has few samples."""

    model: ModelSpec
    clients: int
    samples: int


CASES = {
    "mlp": Case(MLP(hidden=(200, 200)), 1000, 20),
    "softmax": Case(Softmax(), 10_000, 10),
    "cnn": Case(CNN(), 1000, 10),
}


class PeakMemory:
    """Context manager that measures the peak anonymous memory of this process and its children."""

    def __init__(self) -> None:
        self.before = self.most = anonymous_bytes(os.getpid())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self.most = max(self.most, anonymous_bytes(os.getpid()))

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def make_federation(clients: int, samples: int) -> Federation:
    """Return clients with random images, each with the same number of samples."""
    generator = torch.Generator().manual_seed(0)
    count = clients * samples
    x = torch.randint(0, 256, (count, 1, 28, 28), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 10, (count,), generator=generator)
    data = Dataset(name="noise", x=x, y=y, task="classification", classes=tuple(str(c) for c in range(10)))
    return Iid(clients=clients)(data, seed=0)


def main() -> int:
    """Run the case, print its memory, and return 1 if the peak is above the limit."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--case", choices=[*CASES], default="mlp")
    options.add_argument("--clients", type=int)
    options.add_argument("--samples", type=int)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--folder", type=Path, help="folder for the rows (default: a temporary one)")
    given = options.parse_args()
    case = CASES[given.case]
    clients, samples = given.clients or case.clients, given.samples or case.samples
    fed, begin = make_federation(clients, samples), time.perf_counter()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, PeakMemory() as peak:
        result = simulate(
            FLAME(),
            fed,
            case.model,
            rounds=given.rounds,
            local=LocalSGD(lr=0.01, batch_size=10),
            sampler=Uniform(),
            evaluate=Evaluate(every=given.rounds, parts=("validation", "test")),
            engine=Engine(state_memory_mib=64, workers=given.workers),
            folder=folder,
        )
        assert result.job.clients.in_files
        size = sum(file.stat().st_size for file in Path(folder).rglob("*.rows"))
        result.models.save(Path(folder) / "models")
    seconds, d = time.perf_counter() - begin, result.job.oracle.layout.d
    print(f"{given.case}: {clients} clients, {d} parameters, {given.rounds} rounds, {given.workers} workers")
    print(
        f"{seconds:.0f} s; client rows on disk {size / 1e9:.2f} GB; limit of anonymous memory {MAX_BYTES / 1e9:.0f} GB"
    )
    print(f"anonymous memory {peak.before / 1e9:.2f} GB before, {peak.most / 1e9:.2f} GB at its peak")
    return int(peak.most > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main())
