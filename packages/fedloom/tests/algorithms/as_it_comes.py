"""Every method with its defaults on small federations, and the law that a default must obey.

    python packages/fedloom/tests/algorithms/as_it_comes.py studies/data/defaults.json  # then methods, federations
    python packages/fedloom/tests/algorithms/as_it_comes.py studies/data/held-out.json  # federations of no rule

The federations are small on purpose: what a default does wrong shows in seconds. Those held out have no test parts, so
that a rule that they break may be looked into.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from fedloom.lab.tune.trial import remove_test
from fedloom.metrics import leading
from fedloom.models import CNN, MLP, ModelSpec, Softmax
from fedloom.rows.proxes import L1
from fedloom.seeds import generator

ROUNDS, POINTS, FAIR_POINTS, GRADIENTS, ZEROS = 60, 0.05, 0.08, 6, 0.05
LOCAL = {"lr": 0.05, "batch_size": 20, "epochs": 1}
MODELS = ("global", "personal")
PARTS: dict[str, dict[str, Any]] = {"gpfl": {"guided": True}, "knn-per": {"memory": 400}}
"""What the models of methods have that work on them alone, as the keys of ``[model]``."""
_LOOKS_FOR_CLUSTERS = tuple(
    f"{key} 'equitable' looks for clusters of clients" for key in ("aggregation_weights", "weigher")
)
"""The note of a run today, and as the records have it."""
EXCUSED = {
    "fedmid": ({"apart"}, ("FedMiD without a regularizer is FedAvg", "FedMiD without a regulariser is FedAvg")),
    "feddualavg": (
        {"apart"},
        ("FedDualAvg without a regularizer is FedAvg", "FedDualAvg without a regulariser is FedAvg"),
    ),
    "admm-lp-proj": ({"apart"}, ("ADMMLpProj couples the models in only ", "ADMMLpProj ties the models in ")),
    "fedprox": ({"apart"}, "FedProx with one local step"),
    "fedadmm": ({"mean"}, "FedADMM counts absent clients"),
    "fedpd": ({"mean"}, "FedPD counts absent clients"),
    "fedadmm-composite": ({"mean"}, "FedADMMComposite counts absent clients"),
    "feddr": ({"mean"}, "FedDR counts absent clients"),
    "fedsplit": ({"mean"}, "FedSplit counts absent clients"),
    "fedskip": ({"mean"}, "FedSkip counts absent clients"),
    "flame": ({"apart"}, "FLAME counts absent clients"),
    "moon": ({"apart"}, ("MOON on a model that consists only of the head", "MOON on a model that is all head")),
    "fedproto": (
        {"apart"},
        ("FedProto on a model that consists only of the head", "FedProto on a model that is all head"),
    ),
    "fednova": (
        {"apart"},
        ("FedNova equals FedAvg if all clients take equally many", "FedNova on clients with equally many steps"),
    ),
    "cfl": ({"apart"}, ("CFL splits clients that form groups", "CFL parts clients that fall into groups")),
    "fedem": (
        {"apart"},
        ("FedEM on a model without a mixture equals FedAvg", "FedEM on a model without a mixture is FedAvg"),
    ),
    "fedas": ({"apart"}, ("FedAS on a model that consists only of the head", "FedAS on a model that is all head")),
    "fedper": ({"apart"}, ("FedPer on a model that consists only of the head", "FedPer on a model that is all head")),
    "lg-fedavg": (
        {"apart"},
        ("LGFedAvg on a model that consists only of the head", "LGFedAvg on a model that is all head"),
    ),
    "knn-per": (
        {"personal"},
        ("kNN-Per chooses some clients' weights on only", "kNN-Per chooses a client's weight on as few as"),
    ),
    "equitable-fl": ({"fair"}, _LOOKS_FOR_CLUSTERS),
    "clustered-sampling": ({"apart"}, "sampler 'clustered' draws no client"),
    "power-of-choice": ({"apart"}, "sampler 'power-of-choice' has no choice"),
}
"""The parts of the law that a method cannot keep by itself, and the note by which a run says so before round 1.

A second note is that of the recorded runs.
"""
_FEW_SAMPLES = "by one or two samples of the 300 that judge"
_ONE_PATH = "steps this small leave one path to all methods of FedAvg's speed: their drift is of second order"
_COHORTS = "two seeds have other cohorts of 10 of 100, which is more than the methods differ by"
_SAME_COHORTS = "two seeds have other cohorts of 10 of 50; with the same cohorts they differ by less than the method"
_PLATEAU = "the network leaves its plateau by round 20 to 40 of 60: who starts slower is in mid-descent"
_LEVEL = "after 160 rounds it is within 5 points of FedAvg or above"
_NEAR = "it is 0 to 4 points below the floor"
_ONE_DESCENT = "two seeds of FedAvg leave the plateau rounds apart, which moves models more"
_HALF_STEP = "it diverges at lr 0.2 and learns at 0.1"
_SIX_TURNS = "a client of 9 samples has six steps in the run: what it keeps for itself hardly leaves the start"
_BODY_AS_DRAWN = "its body stays as it was drawn, 16 or 32 random features: its card asks for a trained one"
FROZEN = ("analytic-fl", "fed3r", "fedhip")
"""Methods that fit the head only, once, on the features of the network that the run begins with; here a random one."""
KNOWN = {
    **dict.fromkeys([(m, case) for m in FROZEN for case in ("digits", "fast", "few")], _BODY_AS_DRAWN),
    **dict.fromkeys([(m, "clothes") for m in ("analytic-fl", "fed3r")], _BODY_AS_DRAWN),
    **dict.fromkeys([(m, "hospitals") for m in ("analytic-fl", "fed3r")], f"{_BODY_AS_DRAWN}; 0.1 points below"),
    ("fedhip", "hospitals"): "better at three of four; at the one of 25 test rows AUROC falls, its loss does not rise",
    ("fed3r", "many"): _BODY_AS_DRAWN,
    ("fedhip", "pictures"): f"{_BODY_AS_DRAWN}; they are small beside ridge = 1, and with 0.01 it is 28 points better",
    ("fedhip", "hundred"): "two of the 300 rows that judge: a client has nine to choose its share from",
    ("ditto", "users"): "48 samples a client: FedAvg is better than Local, and its model the best",
    ("pfedme", "users"): "as Ditto's; theta takes five steps on each batch of 20",
    ("perfedavg", "pairs"): "its step halves the validation loss, 1.78 to 0.90, which it is for; accuracy falls",
    ("apfl", "slow"): "on a steady gradient the mixture has alpha^2 + 1 - alpha = 3/4 of FedAvg's speed, which decides",
    ("apfl", "fast"): "FedAvg is 11 points better than Local here: half a local model costs more than it brings",
    ("ditto", "fast"): "FedAvg is 11 points better than Local here: a personal model has little to add",
    ("fedper", "slow"): "the run is the start of training: heads of their own learn from 60 samples each",
    ("fedas", "slow"): "as FedPer's; its alignment holds bodies near their start, too",
    ("fairfed", "few"): "the clients' accuracies are within 3 points, and the weights follow them",
    ("fairfed", "slow"): "as on five clients",
    ("fairfed", "fast"): "as on five clients",
    ("fairfed", "hundred"): "as on five clients",
    ("equitable-fl", "fast"): "0.041 from FedAvg, two seeds 0.051: it weighs alike where it sees no clear clusters",
    ("fedprox", "fast"): "with mu = 1/(3 reach) a round has 0.85 of FedAvg's drift: less than other batches change",
    ("centralized", "hundred"): "it takes the data of all clients in a round, FedAvg those of a tenth",
    (
        "fiaelt",
        "hundred",
    ): "it sums over all clients, absent ones as they were; its card asks for few that all take part",
    ("fedavg-ft", "users"): "48 samples a client: FedAvg is better than Local, and steps on one's own data lead away",
    ("moon", "fast"): "0.048 from FedAvg, two seeds 0.051: in a network this small half of mu = 1 changes little",
    ("fedfomo", "slow"): "the run is the start of training, and a fifth of few samples is held out",
    ("fedfomo", "fast"): "FedAvg is 11 points better than Local here: a client receives five of 14 models",
    **dict.fromkeys([("dbe", "cancer"), ("dbe", "users")], "its memories are level with none by one or two samples"),
    ("fedavg-ft", "fast"): "FedAvg is 11 points better than Local here: steps on one's own data lead away",
    ("fedala", "fast"): "FedAvg is 11 points better than Local here: half a local head costs more than it brings",
    **dict.fromkeys([(m, "pictures") for m in ("fedala", "ifca", "moon")], _PLATEAU),
    ("fedrod", "slow"): "the run is the start of training, of which balanced losses see less per class",
    ("ifca", "slow"): "the run is the start of training, of which each of two models sees a part",
    **dict.fromkeys([(m, "many") for m in ("fedavg-ft", "fedala", "fedproto", "moon")], _COHORTS.replace("100", "50")),
    ("fedproto", "hundred"): _SIX_TURNS,
    ("ditto", "hundred"): _FEW_SAMPLES,
    **dict.fromkeys(
        [(m, "pictures") for m in ("fedprox", "feddyn", "fedskip", "fedacs")],
        f"{_PLATEAU}; {_LEVEL}",
    ),
    **dict.fromkeys(
        [(m, "pictures") for m in ("fedpd", "fedadmm", "fedadmm-composite")],
        f"{_PLATEAU}; with every client in every round it has FedDyn's iterates",
    ),
    **dict.fromkeys(
        [(m, "pictures") for m in ("fednova", "gifair-fl", "equitable-fl", "clustered-sampling")],
        f"{_PLATEAU}; {_NEAR}",
    ),
    **dict.fromkeys([(m, "pictures") for m in ("ditto", "afl")], _ONE_DESCENT),
    ("feddr", "pictures"): f"{_PLATEAU}; relaxed by 1.95, a round goes nearly twice as far",
    ("perfedavg", "pictures"): f"{_HALF_STEP}: its gradient is taken after a step of that size",
    ("apfl", "many"): "FedAvg is 15 points better than Local here: half a local model costs more than it brings",
    (
        "fedamp",
        "many",
    ): "a client has two steps in each of 12 rounds: models that barely moved attract each other little",
    (
        "gifair-fl",
        "many",
    ): "its worst tenth is 7 points better than FedAvg's with the same cohorts, in a model as close",
    **dict.fromkeys([(m, "many") for m in ("fedprox", "scaffold", "feddyn", "fedbn", "afl")], _SAME_COHORTS),
    **dict.fromkeys([(m, "many") for m in ("fednova", "q-ffl", "equitable-fl", "fairfed")], _SAME_COHORTS),
    ("fedslr", "pictures"): "an epoch of phase II at this step size leads a few samples away from a good average",
    **dict.fromkeys([("apfl", "few"), ("pfedme", "slow")], _FEW_SAMPLES),
    **dict.fromkeys([("fedskip", "slow"), ("q-ffl", "slow")], _ONE_PATH),
    **dict.fromkeys(
        [(m, "hundred") for m in ("scaffold", "feddyn", "fedbn", "gifair-fl", "q-ffl", "equitable-fl")], _COHORTS
    ),
    **dict.fromkeys([(m, "hundred") for m in ("fedacs", "fedamp", "heurfedamp", "dbe")], _SIX_TURNS),
}
"""Rows that break the law, and why: held-out ones, and those of `FROZEN`, which train no body."""


class OneStart(ModelSpec):
    """A network that starts the same with every seed, so that two seeds differ by their batches only."""

    def build(
        self, shape: tuple[int, ...], outputs: int, seed: int = 0, tokens: tuple[int, bool] | None = None
    ) -> nn.Module:
        return super().build(shape, outputs, 0, tokens)


class Linear(OneStart, Softmax):
    """Softmax regression."""


class Layers(OneStart, MLP):
    """Linear layers."""


class Convolutions(OneStart, CNN):
    """Two small convolutions."""


class Normed(OneStart):
    """A small network with batch normalisation."""

    def module(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        width = int(np.prod(shape))
        return nn.Sequential(nn.Flatten(), nn.Linear(width, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, outputs))


@dataclass(frozen=True)
class Case:
    """A federation, its network, the part that judges, and what differs from `LOCAL` and from full participation."""

    title: str
    make: Callable[[], Federation]
    model: ModelSpec
    part: str = "test"
    lr: float = LOCAL["lr"]
    fraction: float = 1.0

    def run(self, method: Any, seed: int = 0, network: str = "") -> Result:
        model = Normed() if network == "fedbn" else self.model.with_(**PARTS.get(network, {}))
        return fl.simulate(
            method, self.make(), model, rounds=ROUNDS, seed=seed,
            local={**LOCAL, "lr": self.lr}, sampler={"kind": "uniform", "fraction": self.fraction},
            evaluate={"every": ROUNDS, "parts": ("train", self.part)}, client_weights="uniform",
        )  # fmt: skip


@cache
def digits() -> Federation:
    return fl.partitions.dirichlet(clients=12, alpha=0.3, min_size=10)(load("digits"), seed=0)


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
    return fl.partitions.shards(clients=12, labels_per_client=2)(fl.Dataset.create(x.numpy(), y.numpy()), seed=0)


@cache
def hospitals() -> Federation:
    return fl.partitions.by_column(column="hospital", validation=0.2)(load("heart"), seed=0)


def drawn(source: str, samples: int, seed: int) -> fl.Dataset:
    """Some of the samples of a data set of bytes."""
    data = load(source)
    chosen = torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(len(data))[:samples]))
    return fl.Dataset.create(data.x[chosen].numpy(), data.y[chosen].numpy())


@cache
def cancer() -> Federation:
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    data = fl.Dataset.create(((x - x.mean(0)) / x.std(0)).astype(np.float32), y)
    return remove_test(fl.partitions.dirichlet(clients=10, alpha=0.3, min_size=12, validation=0.25)(data, seed=21))


@cache
def users() -> Federation:
    return remove_test(
        fl.partitions.natural(validation=0.25, max_train_per_client=80)(load("synthetic", alpha=1.0, beta=1.0, seed=21))
    )


@cache
def pairs() -> Federation:
    return remove_test(fl.partitions.shards(clients=30, labels_per_client=2, validation=0.25)(load("digits"), seed=21))


@cache
def many() -> Federation:
    made = fl.partitions.dirichlet(clients=50, alpha=0.3, min_size=10, validation=0.25)
    return remove_test(made(drawn("mnist", 2500, 21), seed=21))


@cache
def pictures() -> Federation:
    made = fl.partitions.dirichlet(clients=8, alpha=0.5, min_size=20, validation=0.25)
    data, chosen = load("digits"), torch.randperm(1797, generator=generator(22))[:700].sort().values
    return remove_test(made(replace(data, x=data.x[chosen], y=data.y[chosen]), seed=22))


@cache
def figures_of(clients: int) -> Federation:
    made = fl.partitions.dirichlet(clients=clients, alpha=0.4, by="client", validation=0.25)
    return remove_test(made(drawn("mnist", 1200, 23), seed=23))


CASES = {
    "digits": Case("digits, Dirichlet 0.3, 12 clients", digits, Layers(hidden=(32,))),
    "clothes": Case("bytes of 28 x 28, two labels per client, 12 clients", clothes, Layers(hidden=(32,))),
    "hospitals": Case("heart disease, 4 hospitals", hospitals, Layers(hidden=(16,))),
}

_SMALL, _WIDE, VALIDATION = Layers(hidden=(16,)), Layers(hidden=(32,)), "validation"
_CNN = Convolutions(channels=(4, 8), kernel=3, padding=1, hidden=(32,))
HELD_OUT = {
    "cancer": Case("breast cancer, Dirichlet 0.3, 10 clients", cancer, _SMALL, VALIDATION),
    "users": Case("synthetic(1, 1), 30 users, softmax regression", users, Linear(), VALIDATION),
    "pairs": Case("digits, two labels per client, 30 clients", pairs, _WIDE, VALIDATION),
    "many": Case("MNIST, Dirichlet 0.3, 10 of 50 clients a round", many, _WIDE, VALIDATION, fraction=0.2),
    "pictures": Case("digits, Dirichlet 0.5, 8 clients, two convolutions, lr 0.2", pictures, _CNN, VALIDATION, lr=0.2),
    "slow": Case("MNIST, Dirichlet 0.4, 15 clients, lr 0.01", lambda: figures_of(15), _WIDE, VALIDATION, lr=0.01),
    "fast": Case("MNIST, Dirichlet 0.4, 15 clients, lr 0.1", lambda: figures_of(15), _WIDE, VALIDATION, lr=0.1),
    "few": Case("MNIST, Dirichlet 0.4, 5 clients", lambda: figures_of(5), _WIDE, VALIDATION),
    "hundred": Case(
        "MNIST, Dirichlet 0.4, 10 of 100 clients", lambda: figures_of(100), _WIDE, VALIDATION, fraction=0.1
    ),
}
"""Federations that no rule was made on; from "slow" on other step sizes and numbers of clients."""
ALL = CASES | HELD_OUT


def models(result: Result) -> dict[str, Tensor]:
    """Final models ``[n, d]`` by kind."""
    job, state = result.job, result.state
    shared = job.algorithm.global_model(state.server)
    found = {} if shared is None else {"global": shared.expand(job.n, -1).double()}
    if job.has_personal:
        found["personal"] = result.models._source.personal(torch.arange(job.n))[0].double()
    return found


def apart(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance."""
    return float((a - b).norm() / b.norm())


def figures(result: Result, part: str) -> dict[str, dict[str, float]]:
    """Of the leading metric on a part the mean over clients and the worst tenth; the variance of the losses on
    training parts, which is what methods can see; by model."""
    records, found = result.state.records, {}
    for model in MODELS:
        measured = {r.metric for r in records.items if r.model == model and not r.total}
        values = records.last(model, part, leading(measured)) if measured else None
        if values is None:
            continue
        loss = records.last(model, "train", "loss")
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
    method, network = REGISTRY[name](), name if name == "fedbn" or name in PARTS else ""
    fedavg, local, other = references(case, network)
    result, part = ALL[case].run(method, network=network), ALL[case].part
    own, spread = models(result), apart(models(other)["global"], models(fedavg)["global"])
    chief = own.get("personal", own.get("global"))
    if name == "centralized":  # one client, whose model is everyone's
        chief = own["global"].expand(fedavg.job.n, -1)
    moved = {"fedavg": apart(chief, models(fedavg)["global"]), "local": apart(chief, models(local)["personal"])}
    return {
        "method": name,
        "case": case,
        "stop": result.stop.value if result.stop is not Stop.DONE else "done",
        "models": figures(result, part),
        "metric": leading({r.metric for r in result.state.records.items if r.part == part}),
        "gradients": cost(result) / cost(fedavg),
        "zeros": {k: float((w == 0).double().mean()) for k, w in own.items()},
        "moved": moved,
        "seeds": spread,
        "sparse": sparse(name, case) if family_of(name) == "composite" else None,
        "gaps": gaps(result),
        "notes": list(result.job.notes),
        "fedavg": figures(fedavg, part)["global"],
        "local": figures(local, part)["personal"],
    }


def gaps(result: Result) -> list[float]:
    """FairFed's figure: the mean gap of the clients' accuracy, by its weights and by samples; else nothing."""
    omega = getattr(result.state.weigher, "omega", None)
    accuracy = result.state.records.last("global", "train", "accuracy")
    if omega is None or accuracy is None:
        return []
    n = result.job.fed.sizes("train").double().numpy()
    gap = np.abs(accuracy - (n * accuracy).sum() / n.sum())
    return [float((w * gap).sum() / w.sum()) for w in (omega.double().numpy(), n)]


def sparse(name: str, case: str) -> float:
    """The share of zeros in the model of a composite method with the L1 norm that its card names: 0.01 in a mean."""
    entry = REGISTRY[name]
    assert not isinstance(entry, Preset)
    made = entry(regulariser=L1(c=0.01 * (ALL[case].make().n if name == "fiaelt" else 1)))
    return float((models(ALL[case].run(made))["global"] == 0).double().mean())


def cost(result: Result) -> float:
    taken = result.state.records.last("", "", "samples_backward")
    assert taken is not None
    return float(taken[0])


@cache
def references(case: str, network: str) -> tuple[Result, Result, Result]:
    run = ALL[case].run
    return run("fedavg", network=network), run("local", network=network), run("fedavg", seed=1, network=network)


def broken(found: dict[str, Any]) -> list[str]:
    """What of the law a measured default breaks, in words; empty where it obeys or a note of its own excuses it."""
    parts = EXCUSED[found["method"]][0] if excused(found) else set()
    return [sentence for part, sentence in broken_parts(found) if part not in parts]


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """A row with what it breaks, by what it is excused, and why it breaks what it breaks."""
    known = KNOWN.get((found["method"], found["case"]), "")
    return {**found, "broken": broken(found), "excused": excused(found), "known": known}


def excused(found: dict[str, Any]) -> list[str]:
    """The notes of the run that excuse a part of the law."""
    note = EXCUSED.get(found["method"], (set(), None))[1]
    return [said for said in found["notes"] if note and said.startswith(note)]


def broken_parts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a measured default breaks, by part of the law."""
    name, family, plain = found["method"], family_of(found["method"]), found["fedavg"]
    if found["stop"] != "done":
        yield "stop", f"ends by {found['stop']!r}"
    mean = {model: figure["mean"] for model, figure in found["models"].items()}
    floor = min(plain["mean"], found["local"]["mean"]) - (FAIR_POINTS if family == "fair" else POINTS)
    if max(mean.values()) < floor:
        yield "mean", f"its better model has {max(mean.values()):.3f}, the least is {floor:.3f}"
    if found["gradients"] > GRADIENTS:
        yield "cost", f"it takes {found['gradients']:.1f} times FedAvg's gradients"
    if name in ("fedavg", "local", "centralized"):
        return
    if min(found["moved"].values()) < found["seeds"]:
        yield "apart", f"no more apart from FedAvg or Local than two seeds: {found['moved']}, {found['seeds']:.3f}"
    if family == "fair":
        own = found["models"]["global"]
        if found["gaps"]:
            if found["gaps"][0] >= found["gaps"][1]:
                yield "fair", f"the mean gap of the metric by its weights and by samples: {found['gaps']}"
        elif own["worst"] <= plain["worst"] and own["loss_variance"] >= plain["loss_variance"]:
            yield "fair", "neither the worst tenth nor the variance of the training losses is better than FedAvg's"
    if family == "personalised" and "global" in mean and mean["personal"] < mean["global"]:
        yield "personal", f"its personal models have {mean['personal']:.3f}, its global model {mean['global']:.3f}"
    if family == "composite" and found["sparse"] < ZEROS:
        yield "sparse", f"with the regulariser of its card {found['sparse']:.3f} of the model is zero"


def family_of(name: str) -> str:
    entry = REGISTRY[name]
    return (
        {"equitable-fl": "fair", "fairfed": "fair"}.get(name, "preset") if isinstance(entry, Preset) else entry.family
    )


def commit() -> str:
    """The commit of the checkout, with a + where files differ from it."""
    said = [
        ("rev-parse", "--short=12", "HEAD"),
        ("status", "--porcelain", "--untracked-files=no", "--", "packages"),
    ]
    hash, changed = (
        subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout for words in said
    )
    return hash.strip() + "+" * bool(changed)


def main(out: Path, names: list[str]) -> None:
    """Measure, and write what was measured, every row with its commit."""
    torch.set_num_threads(1)
    cases = HELD_OUT if out.stem == "held-out" else CASES
    here, kept = commit(), json.loads(out.read_text())["rows"] if out.exists() else []
    rows = {(row["method"], row["case"]): row for row in kept}
    command = f"python packages/fedloom/tests/algorithms/{Path(__file__).name} {out}"
    head = {"command": command, "rounds": ROUNDS, "local": LOCAL}
    head |= {"part": next(iter(cases.values())).part}
    head |= {"cases": {key: case.title for key, case in cases.items()}}
    for case in [case for case in cases if case in names] or cases:
        for name in [name for name in names if name in REGISTRY] or REGISTRY:
            rows[name, case] = {**measure(name, case), "commit": here}
            print(case, name, broken(rows[name, case]) or "holds", flush=True)
            order = [judged(rows[name, case]) for name in REGISTRY for case in cases if (name, case) in rows]
            out.write_text(json.dumps({**head, "rows": order}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
