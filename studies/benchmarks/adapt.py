"""Personal models for clients that no round has seen, against the global model: held-out digit clients, skewed labels.

    python studies/benchmarks/adapt.py

A federation of 30 clients is cut; 20 of them train, ten are held out. For each of these the method adapts on the
client's training part with the server's state fixed, and is scored on its test part.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import torch

import fedloom as fl
from fedloom.algorithms import FLAME, Algorithm, Ditto, FedSLR, LocalOnly
from fedloom.data.dataset import Dataset
from fedloom.data.federation import Federation, Split

METHODS: dict[str, Algorithm] = {
    "flame": FLAME(lam=1.0, rho=0.1),
    "ditto": Ditto(lam=1.0),
    "fedslr": FedSLR(lam=1e-3, mu=1e-3),
    "local": LocalOnly(),
}
SPLITS = {
    "two labels per client": fl.partitions.shards(clients=30, labels_per_client=2),
    "Dirichlet 0.5": fl.partitions.dirichlet(clients=30, alpha=0.5, min_size=20),
}
HELD_OUT = 10
ADAPTED = (1, 5, 20)


def without_last(fed: Federation, count: int) -> Federation:
    """The federation without its last clients."""
    n = fed.n - count
    parts = {p: Split(s.index[: int(s.offsets[n])], s.offsets[: n + 1]) for p, s in fed.parts.items()}
    return replace(fed, parts=parts, names=fed.names[:n], groups=None)


def part(fed: Federation, client: int, name: str) -> Dataset:
    """A client's part as data of its own."""
    index = fed.indices(name, client)
    return replace(fed.data, x=fed.data.x[index], y=fed.data.y[index])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, local = fl.load("digits"), fl.LocalSGD(lr=0.05, batch_size=20)
    for title, split in SPLITS.items():
        print(f"\n{title}: test accuracy in % of {HELD_OUT} unseen clients, mean over {options.seeds} seeds")
        print("method   global   " + "  ".join(f"{k:>2} rounds (better, worse)" for k in ADAPTED))
        for name, method in METHODS.items():
            shared: list[float] = []
            own: dict[int, list[float]] = {k: [] for k in ADAPTED}
            for seed in range(options.seeds):
                fed = split(data, seed)
                seen = without_last(fed, HELD_OUT)
                result = fl.simulate(
                    method, seen, fl.models.MLP(hidden=(64,)), rounds=options.rounds, seed=seed, local=local,
                    evaluate=fl.Evaluate(every=options.rounds),
                )  # fmt: skip
                for client in range(seen.n, fed.n):
                    train, test = part(fed, client, "train"), part(fed, client, "test")
                    if "global" in result.models.kinds():
                        shared.append(result.models.model("global").score(test)["accuracy"])
                    for k in ADAPTED:
                        own[k].append(result.models.adapt(train, rounds=k).score(test)["accuracy"])
            line = f"{name:<8} {100 * statistics.mean(shared):6.1f}   " if shared else f"{name:<8}      -   "
            for values in own.values():
                better = sum(a > b for a, b in zip(values, shared, strict=False))
                worse = sum(a < b for a, b in zip(values, shared, strict=False))
                counts = f"({better}, {worse})" if shared else ""
                line += f"{100 * statistics.mean(values):9.1f} {counts:<15}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
