"""Measure the latency of a low-rank model for several ranks, as in FedSLR's Table 9.

    python benchmarks/factorised.py [--model resnet18] [--batch 20] [--ranks 4,16,64]

For each rank, the program prints the number of parameters, and the median and minimum time of a forward pass on one
thread in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from fedloom.models import factorize, make_spec


def time_forward_passes(module: nn.Module, x: Tensor, repeats: int) -> list[float]:
    """Return the times of forward passes in milliseconds, after three passes that are not measured."""
    times = []
    with torch.inference_mode():
        for k in range(repeats + 3):
            start = time.perf_counter()
            module(x)
            if k >= 3:
                times.append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--ranks", default="4,16,64,128")
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape = (3, 32, 32)
    module = make_spec(given.model).build(shape, 10, seed=0).eval()
    x = torch.randn(given.batch, *shape, generator=torch.Generator().manual_seed(0))
    print(f"{given.model}, batch {given.batch}, {torch.get_num_threads()} thread")
    print(f"{'rank':>6} {'parameters':>12} {'median ms':>10} {'least ms':>10}")
    for rank in [None, *map(int, given.ranks.split(","))]:
        found, count = module, sum(p.numel() for p in module.parameters())
        if rank is not None:
            thin = factorize(module, rank=rank)
            found, count = thin.module, thin.parameters
        times = time_forward_passes(found, x, given.repeats)
        print(f"{rank or 'dense':>6} {count:12,} {statistics.median(times):10.2f} {min(times):10.2f}", flush=True)


if __name__ == "__main__":
    main()
