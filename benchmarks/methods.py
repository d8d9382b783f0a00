"""Measure the time per gradient of every method, relative to FedAvg in the same run, for three models.

    python benchmarks/methods.py          # write studies/data/method-costs.json (takes a few minutes on one processor)
    python benchmarks/methods.py --page   # write studies/pages/method-costs.md from the stored measurements

Every block of rounds of a method follows a block of FedAvg. The result is the pair of blocks with the median ratio of
processor times, so other processes affect it little. Samples are random, because their values do not affect the cost of
a gradient.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fedloom as fl
from fedloom.algorithms import REGISTRY
from fedloom.engine.setup import check
from fedloom.errors import FedloomError
from fedloom.formats import UNKNOWN_DASH, format_fixed
from fedloom.lab.experiment.measure.per_gradient import measure_per_gradient
from fedloom_studies.map.setups import POOLED_METHOD, list_network_parts

STUDIES = Path(__file__).resolve().parents[1] / "studies"
RESULTS_FILE, PAGE_FILE = STUDIES / "data" / "method-costs.json", STUDIES / "pages" / "method-costs.md"
WORKLOADS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "digits, MLP 64": ((64,), 10, {"kind": "mlp", "hidden": [64]}),
    "images, CNN 8-16": ((1, 14, 14), 10, {"kind": "cnn", "channels": [8, 16], "kernel": 3, "hidden": [32]}),
    "table, softmax": ((20,), 2, {"kind": "softmax"}),
}
"""Shape of a sample, classes, and model."""
CLIENTS, SAMPLES = 10, 100
FORWARD_SHARE = 1 / 3
"""Time of a forward pass relative to a gradient."""
TERMS = {
    "admm-lp-proj": "two products with a random k x d matrix per step: 4 k d",
    "clustered-sampling": "distances of all pairs of m updates, and their clusters, at the server: 2 m^2 d per round",
    "dbe": "a forward pass for the mean representation of every batch, and a term on it: one forward and one backward "
    "pass of the body by autograd per step",
    "equitable-fl": "k-means and silhouettes of the clients at the server: independent of d, milliseconds per round",
    "fedacs": "cosine similarities of all pairs of m models, at the server: 2 m^2 d per round",
    "fedamp": "distances of all pairs of m models, at the server: 2 m^2 d per round",
    "fedas": "alignment of the body to prototypes, and Fisher information: a second forward and backward pass by "
    "autograd in the steps of the alignment",
    "fedem": "a mixture: gradients of three networks per step, and forward passes of all three for responsibilities",
    "fedfomo": "losses of the models of peers on validation data: a forward pass per peer and sample",
    "fedpac": "a term on representations (a second forward and backward pass of the body by autograd per step), and a "
    "quadratic program over m heads per round: up to 2000 steps of 2 m^3",
    "fedproto": "a term on representations and prototypes: a second forward and backward pass of the body by autograd "
    "per step",
    "fedspa": "a gradient of all parameters, and a sort of them, per round for the search for the mask",
    "gpfl": "a larger network, and two terms on class embeddings: two k x k layers and c k similarities per sample",
    "heurfedamp": "similarities of all pairs of m models, at the server: 2 m^2 d per round",
    "knn-per": "a model with a memory, for which the compiled kernels have no form: distances of all pairs of samples "
    "of a client",
    "lp-proj": "two products with a random k x d matrix per step: 4 k d",
    "lpgd": "a singular value decomposition of every r x c matrix per step: about 14 r c min(r, c), nine times the "
    "gradients of 20 samples of the MLP",
    "moon": "two more forward passes per step, and a term on representations: a third forward and backward pass by "
    "autograd",
    "pfedfda": "11 mixtures of Gaussians of k features in two folds: 22 solutions of k x k systems per client and "
    "round, 2/3 k^3 each, and an eigendecomposition",
    "power-of-choice": "losses of candidates before every round: a forward pass per sample",
    "q-ffl": "the loss of the received model on the training part: a forward pass per sample",
}
"""Term that explains the time of each method above the limit, according to its paper. If there is a simple formula, it
gives the floating-point operations per client, with d parameters, k features, c classes, and m clients in a cohort."""
NOISE_TERM = "none that is known: within the noise"
"""Text for a method above the limit whose paper does not require additional arithmetic."""
LIMIT = 1.3
"""Ratio above which the page explains the time of a method."""


def measure(rounds: int, titles: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Measure all methods on the workloads with the given titles, and return the measurements, keyed by title."""
    found = {}
    for title in titles:
        shape, classes, model = WORKLOADS[title]
        rng = np.random.default_rng(0)
        x = rng.normal(0, 1, (CLIENTS * SAMPLES, *shape)).astype(np.float32)
        data = fl.Dataset.create((x, rng.integers(0, classes, len(x))))
        fed = fl.partitions.iid(clients=CLIENTS)(data, seed=0)
        common = fl.Setting.create("fedavg", model=model, local={"lr": 0.05, "batch_size": 20, "epochs": 1})
        runs, refused = [], {}
        for name in REGISTRY:
            parts = list_network_parts().get(name)
            try:
                own = {**model, **parts} if parts else model
                setting = fl.Setting.create(name, model=own, local={"lr": 0.05, "batch_size": 20, "epochs": 1})
                check(setting, fed)
                runs += [(name, setting)] if name != POOLED_METHOD else []
            except FedloomError as error:
                refused[name] = str(error)
        costs = measure_per_gradient(runs, fed, common, rounds)
        found[title] = [cost._asdict() | {"ratio": cost.ratio} for cost in costs]
        found[title] += [{"method": name, "reason": why} for name, why in refused.items()]
    return found


def render_page(found: dict[str, list[dict[str, Any]]]) -> str:
    """Render the page about the measurements in Markdown."""
    rows = {title: {row["method"]: row for row in each} for title, each in found.items()}
    names = sorted(REGISTRY.keys() - {POOLED_METHOD}, key=lambda name: (-largest_ratio(rows, name), name))
    lines = [
        "# Costs of methods in addition to gradients",
        "",
        "Methods with the same number of gradients can take different amounts of time. This page shows every method's "
        f"CPU time per gradient, relative to FedAvg in the same run. There are {CLIENTS} clients with {SAMPLES} "
        "samples each, and batches of 20. `python benchmarks/methods.py` measures the values in the table. To measure "
        "your own experiment, use `fedloom bench FILE --per-gradient`.",
        "",
        "For each model, the columns show the time relative to FedAvg and the part of this time that the server takes. "
        "`forward` is the number of samples per gradient that need only a forward pass. Such a sample takes about a "
        "third of a gradient's time. The last column is the gradient engine. Clients spend their remaining time on "
        "arithmetic with parameters, prototypes and statistics.",
        "",
        "For small dense networks, FedAvg's steps run in compiled kernels (`fused`) and take microseconds. Loss terms "
        "that depend on representations, prototypes or class statistics are functions of PyTorch tensors, so autograd "
        "computes their gradients, client by client. For such small networks, these calls take longer than the "
        "arithmetic. With the convolutional network, FedAvg uses PyTorch, too, and these methods are almost as fast. "
        "The machine was busy during the measurement. The row `fedavg` compares FedAvg with itself and shows "
        "the noise.",
        "",
        f"| method | {' | '.join(f'{title}: time | server | forward | engine' for title in rows)} |",
        f"|---|{'---|---|---|---|' * len(rows)}",
    ]
    for name in names:
        cells = [cell for each in rows.values() for cell in cells_of(each.get(name))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Above the limit",
        "",
        f"A method is within the limit if its time per gradient, without its forward passes, is at most {LIMIT} times "
        "FedAvg's time.",
        "",
    ]
    over = set[str]()
    for title, each in rows.items():
        above = [name for name in names if ratio_without_forward(each.get(name)) > LIMIT]
        lines.append(f"- **{title}**, {len(above)} methods: {', '.join(above) or 'none'}")
        over |= {*above}
    lines += ["", "| method | additional arithmetic |", "|---|---|"]
    lines += [f"| {name} | {TERMS.get(name, NOISE_TERM)} |" for name in sorted(over)]
    reasons = {n: row["reason"] for each in rows.values() for n, row in each.items() if row.get("reason")}
    lines += ["", "## Methods without a measurement", "", "| method | reason |", "|---|---|"]
    lines += [f"| {name} | {reason.splitlines()[0]} |" for name, reason in sorted(reasons.items())]
    return "\n".join([*lines, ""])


def largest_ratio(rows: dict[str, dict[str, dict[str, Any]]], name: str) -> float:
    """Return the largest ratio of a method over all models, or 0 if the method was not measured."""
    ratios = [each[name].get("ratio", math.nan) for each in rows.values() if name in each]
    return max((ratio for ratio in ratios if math.isfinite(ratio)), default=0.0)


def ratio_without_forward(row: dict[str, Any] | None) -> float:
    """Return the time per gradient relative to FedAvg without the forward passes, or 0 if it was not measured."""
    return 0.0 if row is None or row.get("reason") else row["ratio"] - FORWARD_SHARE * row["forward"]


def cells_of(row: dict[str, Any] | None) -> list[str]:
    """Return the cells of the table for one method and one model."""
    if row is None or row.get("reason"):
        return [UNKNOWN_DASH] * 4
    return [
        format_fixed(row["ratio"], 2),
        format_fixed(row["server"], 2),
        format_fixed(row["forward"], 1),
        row["oracle"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", choices=[*WORKLOADS], nargs="+", default=[*WORKLOADS], help="workloads to measure")
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    if asked.page:
        PAGE_FILE.write_text(render_page(json.loads(RESULTS_FILE.read_text())))
        print(PAGE_FILE)
        return
    found = {**json.loads(RESULTS_FILE.read_text()), **measure(asked.rounds, asked.only)}
    RESULTS_FILE.write_text(json.dumps(found, indent=1) + "\n")
    print(RESULTS_FILE)


if __name__ == "__main__":
    main()
