"""Every method with its defaults on three small federations, and the law that a default must obey.

    python tests/algorithms/as_it_comes.py docs/defaults.json      # all methods; names after the file: these only

The federations are small on purpose: what a default does wrong shows in seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.algorithms import REGISTRY, Preset
from fedloom.data.federation import Federation
from fedloom.data.sources import load
from fedloom.engine.result import Result
from fedloom.errors import DataError, Stop
from fedloom.metrics import leading
from fedloom.models import MLP, ModelSpec

ROUNDS, POINTS, FAIR_POINTS, GRADIENTS = 60, 0.05, 0.08, 6
LOCAL = {"lr": 0.05, "batch_size": 20, "epochs": 1}
MODELS = ("global", "personal")


class OneStart(MLP):
    """A network that starts the same with every seed, so that two seeds differ by their batches only."""

    def build(self, shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
        return super().build(shape, outputs, 0)


class Normed(ModelSpec):
    """A small network with batch normalisation, which starts the same with every seed."""

    def build(self, shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
        return super().build(shape, outputs, 0)

    def module(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        width = int(np.prod(shape))
        return nn.Sequential(nn.Flatten(), nn.Linear(width, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, outputs))


@dataclass(frozen=True)
class Case:
    """A federation and the hidden widths of its network."""

    title: str
    make: Callable[[], Federation]
    hidden: tuple[int, ...]

    def run(self, method: Any, seed: int = 0, normed: bool = False) -> Result:
        model = Normed() if normed else OneStart(hidden=self.hidden)
        return fl.simulate(
            method, self.make(), model, rounds=ROUNDS, seed=seed, local=LOCAL, evaluate={"every": ROUNDS}
        )


@cache
def digits() -> Federation:
    return fl.partition.dirichlet(clients=12, beta=0.3, min_size=10)(load("digits"), seed=0)


@cache
def clothes() -> Federation:
    """1,200 pictures of 28 by 28 bytes in ten classes, two classes per client; drawn where Fashion-MNIST is missing."""
    rng = np.random.default_rng(0)
    try:
        data = load("fashion-mnist")
        chosen = torch.from_numpy(np.sort(rng.permutation(len(data))[:1200]))
        x, y = data.x[chosen], data.y[chosen]
    except DataError:
        y = torch.from_numpy(rng.integers(0, 10, 1200))
        centre = rng.uniform(0, 255, (10, 1, 7, 7)).repeat(4, 2).repeat(4, 3)
        x = torch.from_numpy((centre[y.numpy()] + rng.normal(0, 60, (1200, 1, 28, 28))).clip(0, 255).astype(np.uint8))
    return fl.partition.shards(clients=12, labels_per_client=2)(fl.Dataset.of(x.numpy(), y.numpy()), seed=0)


@cache
def hospitals() -> Federation:
    return fl.partition.column(column="hospital", validation=0.2)(load("heart"), seed=0)


CASES = {
    "digits": Case("digits, Dirichlet 0.3, 12 clients", digits, (32,)),
    "clothes": Case("bytes of 28 x 28, two labels per client, 12 clients", clothes, (32,)),
    "hospitals": Case("heart disease, 4 hospitals", hospitals, (16,)),
}


def models(result: Result) -> dict[str, Tensor]:
    """Final models ``[n, d]`` by kind."""
    job, state = result.job, result.state
    shared = job.algorithm.global_model(state.server)
    found = {} if shared is None else {"global": shared.expand(job.n, -1).double()}
    if job.has_personal:
        found["personal"] = result.models._source.own(torch.arange(job.n))[0].double()
    return found


def apart(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance."""
    return float((a - b).norm() / b.norm())


def figures(result: Result) -> dict[str, dict[str, float]]:
    """The mean over clients and the worst tenth of the leading metric, and the variance of the loss, by model."""
    records, found = result.state.records, {}
    for model in MODELS:
        measured = {r.metric for r in records.items if r.model == model and not r.total}
        values = records.last(model, "test", leading(measured)) if measured else None
        if values is None:
            continue
        loss = records.last(model, "test", "loss")
        assert loss is not None
        tenth = np.sort(values[~np.isnan(values)])[: max(1, round(len(values) / 10))]
        found[model] = {
            "mean": float(np.nanmean(values)),
            "worst": float(tenth.mean()),
            "loss_variance": float(np.nanvar(loss)),
        }
    return found


def measure(name: str, case: str) -> dict[str, Any]:
    """What a method does with its defaults on a federation, beside FedAvg and Local there."""
    method, normed = REGISTRY[name](), name == "fedbn"
    fedavg, local, other = references(case, normed)
    result = CASES[case].run(method, normed=normed)
    own, spread = models(result), apart(models(other)["global"], models(fedavg)["global"])
    chief = own.get("personal", own.get("global"))
    if name == "centralized":  # one client, whose model is everyone's
        chief = own["global"].expand(fedavg.job.n, -1)
    moved = {"fedavg": apart(chief, models(fedavg)["global"]), "local": apart(chief, models(local)["personal"])}
    return {
        "method": name,
        "case": case,
        "stop": result.stop.value if result.stop is not Stop.DONE else "done",
        "models": figures(result),
        "gradients": cost(result) / cost(fedavg),
        "zeros": {k: float((w == 0).double().mean()) for k, w in own.items()},
        "moved": moved,
        "seeds": spread,
        "notes": list(result.job.notes),
        "fedavg": figures(fedavg)["global"],
        "local": figures(local)["personal"],
    }


def cost(result: Result) -> float:
    records = result.state.records.items
    return sum(float(np.sum(r.values)) for r in records if r.metric == "samples_backward")


@cache
def references(case: str, normed: bool) -> tuple[Result, Result, Result]:
    run = CASES[case].run
    return run("fedavg", normed=normed), run("local", normed=normed), run("fedavg", seed=1, normed=normed)


def broken(found: dict[str, Any]) -> list[str]:
    """What of the law a measured default breaks, in words; empty where it obeys."""
    name, case, wrong = found["method"], found["case"], []
    family = family_of(name)
    if found["stop"] != "done":
        wrong.append(f"ends by {found['stop']!r}")
    mean = {model: figure["mean"] for model, figure in found["models"].items()}
    floor = min(found["fedavg"]["mean"], found["local"]["mean"]) - (FAIR_POINTS if family == "fair" else POINTS)
    if max(mean.values()) < floor and not found["notes"]:
        wrong.append(f"its better model has {max(mean.values()):.3f}, the least is {floor:.3f}")
    if found["gradients"] > GRADIENTS:
        wrong.append(f"it takes {found['gradients']:.1f} times FedAvg's gradients")
    if found["notes"] or name in ("fedavg", "local", "centralized"):
        return wrong
    if min(found["moved"].values()) < found["seeds"]:
        wrong.append(f"no more apart from FedAvg or Local than two seeds: {found['moved']}, {found['seeds']:.3f}")
    if family == "fair":
        own, plain = found["models"]["global"], found["fedavg"]
        if own["worst"] < plain["worst"] and own["loss_variance"] > plain["loss_variance"]:
            wrong.append(f"{case}: neither the worst tenth nor the variance of the loss is better than FedAvg's")
    if family == "personalised" and "global" in mean and mean["personal"] < mean["global"]:
        wrong.append(f"its personal models have {mean['personal']:.3f}, its global model {mean['global']:.3f}")
    return wrong


def family_of(name: str) -> str:
    entry = REGISTRY[name]
    return {"equitable-fl": "fair"}.get(name, "preset") if isinstance(entry, Preset) else entry.family


def main(out: Path, names: list[str]) -> None:
    """Measure, and write what was measured."""
    torch.set_num_threads(1)
    kept = json.loads(out.read_text())["rows"] if out.exists() else []
    rows = {(row["method"], row["case"]): row for row in kept}
    head = {"command": f"python tests/algorithms/{Path(__file__).name} {out}", "rounds": ROUNDS, "local": LOCAL}
    head |= {"cases": {key: case.title for key, case in CASES.items()}}
    for case in CASES:
        for name in names or REGISTRY:
            found = measure(name, case)
            rows[name, case] = {**found, "broken": broken(found)}
            print(case, name, rows[name, case]["broken"] or "holds", flush=True)
            order = [rows[name, case] for name in REGISTRY for case in CASES if (name, case) in rows]
            out.write_text(json.dumps({**head, "rows": order}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
