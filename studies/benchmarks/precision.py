"""Does training in bfloat16 cost accuracy? Two runs per seed that differ in the precision alone.

    python studies/benchmarks/precision.py --data-dir DATA                   # MNIST, 10 seeds
    python studies/benchmarks/precision.py --data-dir DATA --on cifar-10     # 5 seeds

20 clients with Dirichlet 0.5 labels and 100 training samples each. A row per method and model: mean test accuracy of
the clients after the last round in float32, and the difference of bfloat16 to it, with the 95 % t interval over seeds,
in points.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import fedloom as fl
from fedloom.lab.report.numbers import half_width
from fedloom.local.oracles import Precision
from fedloom.models import ModelSpec

MODELS = ("global", "personal")
METHODS = ("fedavg", "flame", "fedslr")


class Case(NamedTuple):
    """A data set, its network, and how long and how often it is trained."""

    model: ModelSpec
    rounds: int
    seeds: int
    lr: float


CASES = {
    "mnist": Case(fl.models.CNN(), 40, 10, 0.05),
    "cifar-10": Case(fl.models.CNN(kernel=3, pool=(False, True), hidden=(128,)), 40, 5, 0.02),
}


def accuracies(name: str, method: str, seed: int, precision: Precision, folder: Path | None) -> dict[str, float]:
    """Mean over clients by model."""
    case = CASES[name]
    fed = fl.partitions.dirichlet(clients=20, alpha=0.5, min_size=100, max_train_per_client=100)(
        fl.load(name, data_dir=folder), seed=seed
    )
    result = fl.simulate(
        fl.algorithms.ALGORITHMS[method](), fed, case.model, rounds=case.rounds, seed=seed,
        local=fl.LocalSGD(lr=case.lr, batch_size=20), evaluate=fl.Evaluate(every=case.rounds),
        engine=fl.Engine(precision=precision),
    )  # fmt: skip
    return {model: float(result.final(model).mean()) for model in MODELS if model in result.models.kinds()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=CASES, default="mnist")
    parser.add_argument("--method", action="append", help="may be repeated")
    parser.add_argument("--seeds", type=int, help="where the case's own leave a difference undecided")
    parser.add_argument("--data-dir", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = options.seeds or CASES[options.on].seeds
    print(f"{options.on}, {CASES[options.on]}, {seeds} seeds")
    both: tuple[Precision, ...] = ("full", "bf16")
    for method in options.method or METHODS:
        pairs = [
            [accuracies(options.on, method, seed, precision, options.data_dir) for precision in both]
            for seed in range(seeds)
        ]
        for model in pairs[0][0]:
            full, low = 100 * np.array([[one[model] for one in pair] for pair in pairs]).T
            off = low - full
            print(
                f"{method:<8} {model:<9} {full.mean():6.2f}   {off.mean():+.2f} ± {half_width(off.tolist()):.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
