"""Seconds per step of local SGD on a GPU: stacked against looped clients, and what lower precision gives.

    python benchmarks/gpu.py                                  # everything, in float32
    python benchmarks/gpu.py --precision float32 --precision tf32 --precision bf16
    python benchmarks/gpu.py --workload cnn --clients 100 --chunk 25

The lines are those of a Markdown table. A cell of the last column is looped / stacked: above 1, stacking is faster. The
engine itself computes in float32 or float64; tf32 lets its products round to TF32, bf16 holds models and samples in
bfloat16, to see what it would give. `--device cpu` shows that the program runs, no more.
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
from workloads import CLASSES, Workload

from fedloom.errors import FedloomError
from fedloom.local import LocalSGD, Work, descend
from fedloom.local.oracles import chunk_count, chunk_limit, make_oracle
from fedloom.models import CNN, MLP, ResNet18, Softmax
from fedloom.tasks import Classification

IMAGE, COLOUR = (1, 28, 28), (3, 32, 32)
BATCH, STEPS = 20, 5

MODELS = {
    "softmax": (Softmax(), IMAGE),
    "mlp": (MLP(hidden=(200, 200)), IMAGE),
    "cnn": (CNN(), IMAGE),
    "resnet18-gn": (ResNet18(), COLOUR),
}
PRECISIONS = {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


class Measured:
    """Local SGD of all clients on one oracle."""

    def __init__(self, name: str, clients: int, oracle: str, precision: str, given: argparse.Namespace) -> None:
        spec, shape = MODELS[name]
        samples = BATCH * given.steps
        work = Workload(name, spec, shape, clients, clients, samples, BATCH, 1)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        self.fed = work.federation().to(given.device, PRECISIONS[precision])
        module = spec.build(shape, CLASSES)
        self.oracle = make_oracle(module, Classification(classes=CLASSES), self.fed, oracle)
        self.row = self.oracle.layout.vector(module, PRECISIONS[precision]).to(given.device)
        self.local = LocalSGD(lr=0.01, batch_size=BATCH, steps=given.steps)
        limit = given.chunk or chunk_limit(self.oracle)
        self.chunks = torch.arange(clients).tensor_split(chunk_count(clients, limit))
        self.share = torch.full((clients, 1), 1 / clients, device=given.device, dtype=PRECISIONS[precision])
        self.cuda, self.steps = self.oracle.device.type == "cuda", given.steps

    def __call__(self, round: int) -> float:
        """Seconds per step of all clients."""
        self._settle()
        start = time.perf_counter()
        for ids in self.chunks:
            work = Work(self.oracle, ids, self.share[ids], self.local, round=round)
            descend(self.row.repeat(len(ids), 1), work)
        self._settle()
        return (time.perf_counter() - start) / self.steps

    def _settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def seconds(name: str, clients: int, oracle: str, precision: str, given: argparse.Namespace) -> tuple[float, float]:
    """Median seconds per step of all clients, and the most memory in GB; not a number where it does not fit or run."""
    if given.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        measured = Measured(name, clients, oracle, precision, given)
        found = statistics.median([measured(round) for round in range(given.rounds + 1)][1:])
    except (torch.OutOfMemoryError, FedloomError) as error:
        print(f"{name}, {clients} clients, {oracle}, {precision}: {str(error).splitlines()[0]}", file=sys.stderr)
        return float("nan"), float("nan")
    return found, torch.cuda.max_memory_allocated() / 1e9 if measured.cuda else float("nan")


def main() -> str | int:
    """Command line."""
    options: dict[str, Any] = {"action": "append", "help": "default: all"}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*MODELS], **options)
    parser.add_argument("--clients", type=int, action="append", help="default: 10 and 100")
    parser.add_argument("--precision", choices=[*PRECISIONS], action="append", help="default: float32")
    parser.add_argument("--chunk", type=int, help="clients stacked together; default: the engine's rule")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds measured, after one that is not")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.device != "cpu" and not torch.cuda.is_available():
        return "benchmarks/gpu.py needs a CUDA device, and torch finds none; nothing was measured"
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if given.device != 'cpu' else 'cpu'}\n")
    print("| model | clients | precision | fused ms | stacked ms | looped ms | stacked GB | looped / stacked |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.workload or MODELS:
        for clients in given.clients or (10, 100):
            for precision in given.precision or ("float32",):
                both = {o: seconds(name, clients, o, precision, given) for o in ("stacked", "looped")}
                fused = seconds(name, clients, "fused", precision, given)[0] if name in ("softmax", "mlp") else None
                (stacked, memory), (looped, _) = both["stacked"], both["looped"]
                cells = ["-" if fused is None else f"{fused * 1e3:.2f}", f"{stacked * 1e3:.2f}", f"{looped * 1e3:.2f}"]
                cells += [f"{memory:.2f}", f"{looped / stacked:.2f}"]
                print(f"| {name} | {clients} | {precision} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
