"""Measure the time per step of local SGD on a GPU: stacked or looped clients, captured graphs, and lower precision.

    python benchmarks/gpu.py                                  # everything, in float32
    python benchmarks/gpu.py --precision float32 --precision tf32 --precision bf16
    python benchmarks/gpu.py --workload cnn --clients 100 --chunk 25

The output is a Markdown table. A value above 1 in the column looped / stacked means that stacking is faster. The column
`captured` shows a stacked step as a CUDA graph, which the engine does not use. If a graph cannot be captured, the
program prints the reason. The precisions float32, tf32 and bf16 are the values "full", "tf32" and "bf16" of the
engine's option `precision`. A row ends with `disturbed` if other processes used more than 0.1 core during its
measurement. With `--device cpu`, the program only shows that it runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import torch
from torch import Tensor
from workloads import CLASSES, Workload

from fedloom.errors import FedloomError, Refused
from fedloom.local import LocalSGD, Work, descend
from fedloom.local.oracles import Precision, chunk_count, chunk_limit, make_oracle
from fedloom.local.oracles.precision import make_repeatable
from fedloom.models import CNN, MLP, ResNet18, Softmax
from fedloom.processes.machine_load import MAX_FOREIGN_CORES, watch_others
from fedloom.tasks import Classification

IMAGE, COLOR = (1, 28, 28), (3, 32, 32)
BATCH, STEPS = 20, 5

MODELS = {
    "softmax": (Softmax(), IMAGE),
    "mlp": (MLP(hidden=(200, 200)), IMAGE),
    "cnn": (CNN(), IMAGE),
    "resnet18-gn": (ResNet18(), COLOR),
}
PRECISIONS: dict[str, Precision] = {"float32": "full", "tf32": "tf32", "bf16": "bf16"}
CLIENTS = (10, 100, 1000)


class LocalTraining:
    """Local SGD of all clients with one oracle."""

    def __init__(self, name: str, clients: int, oracle: str, precision: str, given: argparse.Namespace) -> None:
        spec, shape = MODELS[name]
        samples = BATCH * given.steps
        work = Workload(name, spec, shape, clients, clients, samples, BATCH, 1)
        fed = work.federation().to(given.device)
        module = spec.build(shape, CLASSES)
        self.oracle = make_oracle(module, Classification(classes=CLASSES), fed, oracle, precision=PRECISIONS[precision])
        self.row = self.oracle.layout.vector(module, torch.float32).to(given.device)
        self.local = LocalSGD(lr=0.01, batch_size=BATCH, steps=given.steps)
        limit = given.chunk or chunk_limit(self.oracle)
        self.chunks = torch.arange(clients).tensor_split(chunk_count(clients, limit))
        self.share = torch.full((clients, 1), 1 / clients, device=given.device)
        self.cuda, self.steps = self.oracle.device.type == "cuda", given.steps

    def __call__(self, round: int) -> float:
        """Run the steps of a round, and return the seconds per step of all clients."""
        self._settle()
        start = time.perf_counter()
        for k, ids in enumerate(self.chunks):
            self.train(k, Work(self.oracle, ids, self.share[ids], self.local, round=round))
        self._settle()
        return (time.perf_counter() - start) / self.steps

    def train(self, k: int, work: Work) -> None:
        """Run the steps of chunk ``k``."""
        descend(self.row.repeat(work.m, 1), work)

    def _settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


class CapturedTraining(LocalTraining):
    """Local SGD in which every step of a chunk replays a graph that was captured once."""

    def __init__(self, name: str, clients: int, oracle: str, precision: str, given: argparse.Namespace) -> None:
        super().__init__(name, clients, oracle, precision, given)
        if not self.cuda:
            raise Refused("graphs are captured on CUDA devices only")
        self.graphs = [self._capture(ids) for ids in self.chunks]

    def _capture(self, ids: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """Capture a step, and return the graph, the rows that it changes, and the indices of its samples."""
        work = Work(self.oracle, ids, self.share[ids], self.local)
        drawn = work.plan("local", work.counted_steps()).batch(0)
        rows, where = self.row.repeat(len(ids), 1), drawn.where.to(self.oracle.device, copy=True)
        total, there = drawn.total.to(self.oracle.device), ids.to(self.oracle.device)  # a capture allows no copies
        batch = drawn._replace(where=where, total=total, ids=there)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.oracle.addgrad_(rows, rows, batch, 1.0, -self.local.lr)
        torch.cuda.current_stream().wait_stream(side)
        try:
            with torch.cuda.graph(graph):
                self.oracle.addgrad_(rows, rows, batch, 1.0, -self.local.lr)
        except RuntimeError as error:
            raise Refused(f"a step cannot be captured as a graph ({str(error).splitlines()[0]})") from error
        return graph, rows, where

    def train(self, k: int, work: Work) -> None:
        graph, rows, where = self.graphs[k]
        rows.copy_(self.row.expand_as(rows))
        plan = work.plan("local", work.counted_steps())
        for step in range(self.steps):
            where.copy_(plan.where[step])
            graph.replay()


VARIANTS = {"compiled": LocalTraining, "vmap": LocalTraining, "captured": CapturedTraining, "loop": LocalTraining}


def measure(name: str, clients: int, way: str, precision: str, given: argparse.Namespace) -> tuple[float, float]:
    """Return the median seconds per step of all clients, and the peak memory in GB. Both are NaN if the step fails."""
    if given.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        with make_repeatable(torch.device(given.device), PRECISIONS[precision]):
            measured = VARIANTS[way](name, clients, "vmap" if way == "captured" else way, precision, given)
            found = statistics.median([measured(round) for round in range(given.rounds + 1)][1:])
    except (torch.OutOfMemoryError, FedloomError) as error:
        print(f"{name}, {clients} clients, {way}, {precision}: {str(error).splitlines()[0]}", file=sys.stderr)
        return float("nan"), float("nan")
    return found, torch.cuda.max_memory_allocated() / 1e9 if measured.cuda else float("nan")


def main() -> str | int:
    """Print the table for the workloads that the command line names."""
    options: dict[str, Any] = {"action": "append", "help": "default: all"}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*MODELS], **options)
    parser.add_argument("--clients", type=int, action="append", help="default: 10, 100 and 1,000")
    parser.add_argument("--precision", choices=[*PRECISIONS], action="append", help="default: float32")
    parser.add_argument("--chunk", type=int, help="clients per stack (default: as the engine chooses)")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps per round")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one unmeasured round")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.device != "cpu" and not torch.cuda.is_available():
        return "benchmarks/gpu.py needs a CUDA device, and torch finds none; nothing was measured"
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if given.device != 'cpu' else 'cpu'}\n")
    columns = ("model", "clients", "precision", *(f"{way} ms" for way in VARIANTS), "stacked GB", "looped / stacked")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in given.workload or MODELS:
        for clients in given.clients or CLIENTS:
            for precision in given.precision or ("float32",):
                ways = [way for way in VARIANTS if way != "compiled" or name in ("softmax", "mlp")]
                with watch_others() as others:
                    found = {way: measure(name, clients, way, precision, given) for way in ways}
                cells = [f"{found[way][0] * 1e3:.2f}" if way in found else "-" for way in VARIANTS]
                cells += [f"{found['vmap'][1]:.2f}", f"{found['loop'][0] / found['vmap'][0]:.2f}"]
                mark = " disturbed" if others.cores > MAX_FOREIGN_CORES else ""
                print(f"| {name} | {clients} | {precision} | {' | '.join(cells)} |{mark}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
