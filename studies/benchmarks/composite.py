"""Composite methods where they are meant to be used: a nonsmooth regulariser, and an optimum that is known.

    python studies/benchmarks/composite.py                                      # prints the tables
    python studies/benchmarks/composite.py --page studies/pages/composite.md    # writes the page

Both problems, sparse logistic regression and low-rank regression, come from `fedloom.data.problems`. All clients take
part in every round, and each local step uses a full gradient. The reference optimum is computed with accelerated
proximal gradient descent to 1e-10. All methods solve the same problem, so FIAELT's sum uses n times the weight. For
each method, the table shows the step size with the smallest KKT residual. GPGD (FedAvg, then the proximal operator) and
LPGD (the proximal operator in every local step) are alternatives from the FedSLR paper. Their limits differ from the
optimum. With L1, both components of FedSLR are sparse. Gradients are counted as passes over the training samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fedloom as fl
from fedloom.algorithms import FIAELT, LPGD, Algorithm, FedADMMComposite, FedDR, FedDualAvg, FedMiD, FedSLR
from fedloom.data.federation import Federation
from fedloom.data.problems import LowRank, SparseLogistic
from fedloom.rows.layout import Layout
from fedloom.rows.proxes import L1, Nuclear

Penalty = type[L1] | type[Nuclear]
STEPS = 0.03, 0.1, 0.3, 1.0
REACHED = 1e-8
"""Largest KKT residual of a method that has reached the optimum."""


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
        "FIAELT by gradient descent": FIAELT(regulariser=g(n * weight), solver="gd", iterations=50),
        "FIAELT by local steps": FIAELT(regulariser=g(n * weight), solver="sgd", passes=1),
        "FedDR": FedDR(regulariser=g(weight)),
        "FedADMM (composite)": FedADMMComposite(regulariser=g(weight)),
        "FedMiD": FedMiD(regulariser=g(weight)),
        "FedDualAvg": FedDualAvg(regulariser=g(weight)),
        "FedSLR's common model": FedSLR(lam=weight, components=shared, personal_epochs=0),  # type: ignore[arg-type]
        "GPGD": FedSLR(method="gpgd", lam=weight, components=shared, personal_epochs=0),  # type: ignore[arg-type]
        "LPGD": LPGD(lam=weight, components=shared, personal_epochs=0),  # type: ignore[arg-type]
    }


class Row(NamedTuple):
    """A method at the best of its steps.

    Attributes:
        method: its name in the tables.
        step: of local gradient steps.
        distance: of its model to the optimum, as a share of the optimum's norm.
        support: the zeros and non-zeros that it shares with the optimum, or its rank beside the optimum's.
        kkt: norm of the proximal gradient step over its size.
        passes: over all training samples, of gradients.
        sent: megabytes up, of all clients.
    """

    method: str
    step: float
    distance: float
    support: str
    kkt: float
    passes: float
    sent: float

    def line(self) -> str:
        """The row of a table."""
        return (
            f"| {self.method} | {self.step} | {self.distance:.1e} | {self.support} | {self.kkt:.1e} | "
            f"{self.passes:,.0f} | {self.sent:.2f} |"
        )


def finding(problem: str, rows: Sequence[Row]) -> str:
    """Say which methods reach the optimum of a problem, and how far away the others end."""
    there = [row.method for row in rows if row.kkt < REACHED]
    away = [
        f"{row.method} ({row.distance:.2g} after {row.passes:,.0f} passes)" for row in rows if not row.kkt < REACHED
    ]
    verb = "reaches" if len(there) == 1 else "reach"
    reached = f"{', '.join(there) or 'No methods'} {verb} the optimum of {problem} (KKT residual below 1e-8)."
    return (
        f"{reached} The other methods end at a relative distance from the optimum: {', '.join(away)}."
        if away
        else reached
    )


def table(rows: Sequence[Row]) -> list[str]:
    """A table of a problem as lines of Markdown."""
    head = ["| method | step | distance | support or rank | KKT | passes | MB up |", "|---|---|---|---|---|---|---|"]
    return head + [row.line() for row in rows]


def page(problems: Mapping[str, Sequence[Row]], rounds: int, clients: int) -> str:
    """The page of all problems, as Markdown."""
    lines = ["# Composite problems with a known optimum", ""]
    lines += [f"- {finding(problem, rows)}" for problem, rows in problems.items()]
    lines += [
        "",
        f"`studies/benchmarks/composite.py --rounds {rounds} --page` generates this page, with {clients} clients and "
        f"{rounds} rounds.",
    ]
    lines += ["", (__doc__ or "").rpartition("\n\n")[2].strip(), ""]
    for problem, rows in problems.items():
        lines += [f"## {problem[0].upper()}{problem[1:]}", "", *table(rows), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--page", type=Path, help="write the page to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    problems, clients = {}, 0
    for problem, source, penalty, shared in (
        ("sparse logistic regression", SparseLogistic(penalty=0.02), L1, "s+s"),
        ("low-rank regression", LowRank(), Nuclear, "lr+lr"),
    ):
        fed = fl.partitions.natural(validation=0.0, test=0.0)(source.load(), seed=0)
        clients = fed.n
        problems[problem] = rows_of(fed, penalty, source.penalty, shared, options.rounds)
        print("\n".join(["", finding(problem, problems[problem]), "", *table(problems[problem])]))
    if options.page:
        options.page.write_text(page(problems, options.rounds, clients))


def linear(fed: Federation) -> torch.nn.Linear:
    """A linear model without a bias, at 0."""
    outputs = fed.data.y.shape[1] if fed.data.task == "regression" else 1
    model = torch.nn.Linear(fed.data.x.shape[1], outputs, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def rows_of(fed: Federation, penalty: Penalty, weight: float, shared: str, rounds: int) -> list[Row]:
    """The methods on a problem, each with the step of the smallest KKT residual."""
    composite = optimum = None
    rows = []
    for name in methods(lambda c: penalty(c=c), fed.n, 0.1, weight, shared):
        tried = []
        for lr in STEPS:
            method = methods(lambda c: penalty(c=c), fed.n, lr, weight, shared)[name]
            local = fl.LocalSGD(lr=lr, batch_size="full", steps=5)
            run = fl.simulate(method, fed, linear(fed), rounds=rounds, local=local, client_weights="uniform",
                              evaluate=fl.Evaluate(every=rounds), engine=fl.Engine(dtype="float64"))  # fmt: skip
            if composite is None:
                layout, x, y = run.job.oracle.layout, fed.data.x.double(), fed.data.y.double()
                composite = Composite(x, y.reshape(len(y), -1), penalty, weight, layout)
                optimum = composite.optimum(0.5)
            assert optimum is not None
            w = composite.matrix(method.global_model(run.state.server))
            totals = run.state.totals.tolist()
            if penalty is L1:
                support = f"{float(((w != 0) == (optimum != 0)).double().mean()):.0%} of the support"
            else:
                ranks = [int(torch.linalg.matrix_rank(matrix, tol=1e-6)) for matrix in (w, optimum)]
                support = f"rank {ranks[0]} of {ranks[1]}"
            distance = float((w - optimum).norm() / optimum.norm())
            passes, sent = totals[0] / len(fed.data.x), totals[3] / 1e6
            tried.append(Row(name, lr, distance, support, composite.kkt(w), passes, sent))
        rows.append(min(tried, key=lambda row: row.kkt if row.kkt == row.kkt else float("inf")))
    return rows


if __name__ == "__main__":
    main()
