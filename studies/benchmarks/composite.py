"""Composite methods where they are meant to be used: a nonsmooth regulariser, and an optimum that is known.

    python studies/benchmarks/composite.py

Sparse logistic regression and low-rank regression (`fedloom.data.problems`), all clients in every round, one full
gradient a local step. The optimum is that of accelerated proximal gradients, to 1e-10. Every method solves the same
problem, FIAELT's sum with n times the weight; its step is the one of those given with the smallest KKT residual. GPGD
(FedAvg, then the prox) and LPGD (a prox in every local step) are FedSLR's alternatives, whose limits are others than
the optimum; with L1, FedSLR's components are its S+S. Gradients are counted in passes over the training samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fedloom as fl
from fedloom.algorithms import FIAELT, LPGD, Algorithm, FedADMMComposite, FedDR, FedDualAvg, FedMiD, FedSLR
from fedloom.data.federation import Federation
from fedloom.data.problems import LowRank, SparseLogistic
from fedloom.rows.layout import Layout
from fedloom.rows.prox import L1, Nuclear

Penalty = type[L1] | type[Nuclear]


class Composite(NamedTuple):
    """Mean loss of features ``[N, d]`` and targets, and the weight of the penalty on the rows ``[k, d]`` of a model."""

    x: Tensor
    y: Tensor
    penalty: Penalty
    weight: float
    layout: Layout

    def matrix(self, row: Tensor) -> Tensor:
        """Weights ``[k, d]`` of a model, which has no other parameters."""
        return self.layout.tree(row)["weight"]

    def gradient(self, w: Tensor) -> Tensor:
        """Of the mean loss, ``[k, d]``."""
        if self.penalty is L1:
            return (torch.sigmoid(self.x @ w.T) - self.y).T @ self.x / len(self.x)
        return 2 * (self.x @ w.T - self.y).T @ self.x / self.y.numel()

    def prox(self, w: Tensor, step: float) -> Tensor:
        """Of step times the penalty."""
        if self.penalty is L1:
            return w.sign() * (w.abs() - step * self.weight).clamp_min(0)
        u, s, v = torch.linalg.svd(w, full_matrices=False)
        return u @ torch.diag((s - step * self.weight).clamp_min(0)) @ v

    def kkt(self, w: Tensor, step: float = 1.0) -> float:
        """Norm of the proximal gradient step over its size: 0 at the optimum alone."""
        return float((w - self.prox(w - step * self.gradient(w), step)).norm() / step)

    def optimum(self, step: float, tolerance: float = 1e-10) -> Tensor:
        """By accelerated proximal gradients with restarts."""
        w = self.matrix(torch.zeros(self.layout.d, dtype=self.x.dtype))
        ahead, t = w, 1.0
        for _ in range(200_000):
            new = self.prox(ahead - step * self.gradient(ahead), step)
            if ((ahead - new) * (new - w)).sum() > 0:
                t = 1.0
            t, before = (1 + (1 + 4 * t * t) ** 0.5) / 2, t
            w, ahead = new, new + (before - 1) / t * (new - w)
            if self.kkt(w) < tolerance:
                return w
        raise AssertionError(f"no optimum: {self.kkt(w):g} is left")


def methods(g: Callable[[float], Any], n: int, lr: float, weight: float, shared: str) -> dict[str, Algorithm]:
    """The methods, with one step for all of them."""
    return {
        "FIAELT, gradient descent until (9)": FIAELT(regulariser=g(n * weight), solver="gd", iterations=50),
        "FIAELT, local steps": FIAELT(regulariser=g(n * weight), solver="sgd", passes=1),
        "FedDR": FedDR(regulariser=g(weight)),
        "FedADMM (composite)": FedADMMComposite(regulariser=g(weight)),
        "FedMiD": FedMiD(regulariser=g(weight)),
        "FedDualAvg": FedDualAvg(regulariser=g(weight)),
        "FedSLR, its common model": FedSLR(lam=weight, components=shared, personal_epochs=0),  # type: ignore[arg-type]
        "GPGD": FedSLR(method="gpgd", lam=weight, components=shared, personal_epochs=0),  # type: ignore[arg-type]
        "LPGD": LPGD(lam=weight, components=shared, personal_epochs=0),  # type: ignore[arg-type]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for title, source, penalty, shared in (
        ("sparse logistic regression", SparseLogistic(penalty=0.02), L1, "s+s"),
        ("low-rank regression", LowRank(), Nuclear, "lr+lr"),
    ):
        data = source.load()
        fed = fl.partition.writers(validation=0.0, test=0.0)(data, seed=0)
        rows(title, fed, penalty, source.penalty, shared, options.rounds)


def linear(fed: Federation) -> torch.nn.Linear:
    """A linear model without a bias, at 0."""
    outputs = fed.data.y.shape[1] if fed.data.task == "regression" else 1
    model = torch.nn.Linear(fed.data.x.shape[1], outputs, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def rows(title: str, fed: Federation, penalty: Penalty, weight: float, shared: str, rounds: int) -> None:
    """Print a table of a problem."""
    print(f"\n{title}, {fed.n} clients, {rounds} rounds\n")
    print("| method | step | distance | support or rank | KKT | passes | MB up |\n|---|---|---|---|---|---|---|")
    problem = best = None
    for name in methods(lambda c: penalty(c=c), fed.n, 0.1, weight, shared):
        found = []
        for lr in (0.03, 0.1, 0.3, 1.0):
            method = methods(lambda c: penalty(c=c), fed.n, lr, weight, shared)[name]
            local = fl.LocalSGD(lr=lr, batch_size="full", steps=5)
            run = fl.simulate(method, fed, linear(fed), rounds=rounds, local=local, weights="uniform",
                              evaluate=fl.Evaluate(every=rounds), engine=fl.Engine(dtype="float64"))  # fmt: skip
            if problem is None:
                layout, x, y = run.job.oracle.layout, fed.data.x.double(), fed.data.y.double()
                problem = Composite(x, y.reshape(len(y), -1), penalty, weight, layout)
                best = problem.optimum(0.5)
            assert best is not None
            w = problem.matrix(method.global_model(run.state.server))
            totals = run.state.totals.tolist()
            found.append((problem.kkt(w), lr, w, totals[0] / len(fed.data.x), totals[3] / 1e6))
        kkt, lr, w, passes, sent = min(found, key=lambda f: f[0] if f[0] == f[0] else float("inf"))
        distance = float((w - best).norm() / best.norm())
        if penalty is L1:
            shape = f"{float(((w != 0) == (best != 0)).double().mean()):.0%} of the support"
        else:
            shape = (
                f"rank {int(torch.linalg.matrix_rank(w, tol=1e-6))} of {int(torch.linalg.matrix_rank(best, tol=1e-6))}"
            )
        print(f"| {name} | {lr} | {distance:.1e} | {shape} | {kkt:.1e} | {passes:,.0f} | {sent:.2f} |")


if __name__ == "__main__":
    main()
