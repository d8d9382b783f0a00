"""Measure the time per round of local training, and compare it with a plain PyTorch loop in the same run.

    OMP_NUM_THREADS=1 python benchmarks/engine.py --workload W1 --workload W2 --blocks 9
    OMP_NUM_THREADS=1 python benchmarks/engine.py --workload W1 --method ditto --variant plain --variant fused

The blocks of all variants are interleaved, so that noise of the machine affects all variants equally. The first round
of each variant is dropped. Blocks during which other processes used more than 0.1 core are ignored unless all blocks of
a variant are affected. In that case, its row is marked `disturbed`. The columns show the median time per round in
seconds, the distance between the quartiles, the median ratio to the plain loop in the same block, the ratio of the
fastest blocks, and the number of cores that other processes used.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import torch
from direct import DirectRounds
from plain import RATE, PlainLoop
from torch import Tensor
from workloads import WORKLOADS, Workload

from fedloom.algorithms import ALGORITHMS
from fedloom.choose import Uniform
from fedloom.data.federation import Federation
from fedloom.engine.setting import Engine, Evaluate
from fedloom.engine.simulate import simulate
from fedloom.local import LocalSGD
from fedloom.local.oracles.precision import has_bf16
from fedloom.models import MLP, Softmax
from fedloom.processes.machine_load import MAX_FOREIGN_CORES, wait_for_quiet, watch_others

WORKERS = {"auto": 1, "auto x2": 2, "bf16": 1, "bf16 x2": 2}
"""Number of processes of each variant that runs `fedloom.simulate`, in which the engine chooses the oracle."""

VARIANTS = ("plain", "compiled", "vmap", "loop", *WORKERS)
METHODS = ("fedavg", "ditto", "flame", "scaffold")


Clock = Callable[[], float]
Run = Callable[[int, int, Clock], float]
"""Function that takes (number of the first round, number of rounds, clock) and returns the seconds per round."""


class Block(NamedTuple):
    """Measured seconds per round, and the number of cores that other processes used during the measurement."""

    seconds: float
    others: float


def measure(run: Run, first: int, rounds: int, clock: Clock) -> Block:
    """Measure one block of ``rounds`` rounds, numbered from ``first``."""
    with watch_others() as others:
        seconds = run(first, rounds, clock)
    return Block(seconds, others.cores)


class Rounds:
    """Rounds that are computed in this process, with one call for each round."""

    def __init__(self, play: Callable[[int], object]) -> None:
        self.play = play

    def __call__(self, first: int, rounds: int, clock: Clock) -> float:
        """Compute the rounds, and return the seconds per round."""
        start = clock()
        for r in range(first, first + rounds):
            self.play(r)
        return (clock() - start) / rounds


class Simulation:
    """Separate run of `fedloom.simulate` for every block, whose first round is dropped."""

    def __init__(self, workload: Workload, fed: Federation, method: str, variant: str, chunk: int | None) -> None:
        precision = "bf16" if variant.startswith("bf16") else "full"
        self.arguments: dict[str, Any] = {
            "algorithm": ALGORITHMS[method](),
            "fed": fed,
            "model": workload.model,
            "local": LocalSGD(lr=RATE, batch_size=workload.batch),
            "sampler": Uniform(fraction=workload.cohort / workload.clients),
            "evaluate": Evaluate(every=1_000_000, parts=("validation",)),  # no client has such a part
            "engine": Engine(workers=WORKERS[variant], clients_per_batch=chunk, precision=precision),
        }

    def __call__(self, first: int, rounds: int, clock: Clock) -> float:
        """Run the rounds, and return the wall-clock seconds per round."""
        result = simulate(**self.arguments, rounds=rounds + 1, seed=first)
        return statistics.fmean(result.seconds[1:])


def matrix_rate(seconds: float = 0.5) -> float:
    """Return the highest measured number of multiply-adds per second in a large float32 matrix product.

    Both of PyTorch's libraries are tried, because on some processors the product of two tensors takes twice as long as
    the product by oneDNN, which PyTorch uses for convolutions.
    """
    a, b = torch.rand(1024, 1024), torch.rand(1024, 1024)
    ways: list[Callable[[], Tensor]] = [lambda: a @ b]
    if torch.backends.mkldnn.is_available():
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        for way in ways:
            start = time.perf_counter()
            way()
            best = max(best, 1024**3 / (time.perf_counter() - start))
    return best


def is_supported(variant: str, workload: Workload) -> bool:
    """Return True if the oracle supports the model, and the processor supports the precision."""
    convolves = not isinstance(workload.model, MLP | Softmax)
    if variant.startswith("bf16"):
        return convolves and has_bf16(torch.device("cpu"))
    return variant != "compiled" or not convolves


def make_run(variant: str, workload: Workload, fed: Federation, method: str, chunk: int | None) -> Run:
    """Return the function that runs the rounds of a variant."""
    if variant == "plain":
        return Rounds(PlainLoop(workload, fed, method))
    if variant in WORKERS:
        return Simulation(workload, fed, method, variant, chunk)
    return Rounds(DirectRounds(workload, fed, method, variant, chunk))


def compare(name: str, variants: list[str], given: argparse.Namespace) -> None:
    """Measure the variants on one workload and print the table."""
    workload, method, blocks = WORKLOADS[name], given.method, given.blocks
    fed = workload.federation()
    runs = {v: make_run(v, workload, fed, method, given.chunk) for v in variants if is_supported(v, workload)}
    found: dict[str, list[Block]] = {v: [] for v in runs}
    clock = time.perf_counter if given.clock == "wall" else time.process_time
    for run in runs.values():
        run(1, 1, clock)
    for b in range(blocks):
        wait_for_quiet(given.patience)
        for v, run in runs.items():
            found[v].append(measure(run, 2 + b * workload.rounds, workload.rounds, clock))
    print(f"\n{name} {workload.title}; {method}; {blocks} blocks of {workload.rounds} rounds; {given.clock} time")
    print(f"{'variant':<12}{'s/round':>10}{'spread':>8}{'ratio':>8}{'best':>8}{'others':>8}")
    ratios = {v: [b.seconds / p.seconds for b, p in zip(found[v], found["plain"], strict=True)] for v in runs}
    for v, measured in found.items():
        quiet = [
            k
            for k, b in enumerate(measured)
            if b.others <= MAX_FOREIGN_CORES and found["plain"][k].others <= MAX_FOREIGN_CORES
        ]
        used = quiet or range(len(measured))
        seconds = sorted(measured[k].seconds for k in used)
        middle = statistics.median(seconds)
        spread = (seconds[(3 * len(seconds)) // 4] - seconds[len(seconds) // 4]) / middle
        ratio = statistics.median(ratios[v][k] for k in used)
        best = seconds[0] / min(found["plain"][k].seconds for k in used)
        others = statistics.median(measured[k].others for k in used)
        mark = "" if quiet else "  disturbed"
        print(f"{v:<12}{middle:>10.4f}{spread:>8.0%}{ratio:>8.3f}{best:>8.3f}{others:>8.2f}{mark}")
    floor = workload.multiply_adds() * (2 if method == "ditto" else 1) / matrix_rate()
    plain = statistics.median(b.seconds for b in found["plain"])
    print(f"{'floor':<12}{floor:>10.4f}{'':>8}{floor / plain:>8.3f}")


def main() -> None:
    """Compare the variants on the workloads that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=[*WORKLOADS], help="default: all")
    parser.add_argument("--method", default="fedavg", choices=METHODS)
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="default: all (plain is always measured)")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--chunk", type=int, help="clients per chunk (default: as the engine chooses)")
    parser.add_argument("--patience", type=float, default=0, help="maximum wait for an idle machine, in seconds")
    parser.add_argument(
        "--clock", default="wall", choices=("wall", "cpu"), help="cpu: processor time, for a busy machine"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = given.variant or list(VARIANTS)
    variants = ["plain", *(v for v in VARIANTS if v in chosen and v != "plain")]
    for name in given.workload or WORKLOADS:
        compare(name, variants, given)


if __name__ == "__main__":
    main()
