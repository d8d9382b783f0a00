"""The factors of derived defaults, on the validation parts of federations that no test judges.

    python studies/benchmarks/factors.py studies/data/factors.json flame.lam feddr.eta  # all when none are named

Every derived option is tried at 1/4, 1/2, 1, 2 and 4 times what theory gives for it. The clients' test parts are taken
out before anything runs; each figure is the validation score of a model, less that of the worse of FedAvg and Local
there. Two derived options are not among them: ADMM-Lp-Proj's lam acts in 10 of thousands of directions, so that its
models are Local's whatever the factor; q-FFL's L is no free factor, but what makes a round a step of its own length.
A factor other than 1 was taken only where 1 is more than 2 points below the best at the worst of the federations
(FedProx, FedOpt, FIAELT, FedSLR), or where personal models fall below the global one (FLAME). FedDyn's iterates are
those of FedADMM here; FedPD's are too by default, and with an eta that is given, as here, composite FedADMM's.
The data are read from FEDLOOM_DATA.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import fedloom as fl
from fedloom.algorithms import REGISTRY
from fedloom.data.federation import Federation
from fedloom.data.sources import load
from fedloom.engine.result import Result
from fedloom.engine.setting import Setting
from fedloom.engine.setup import make_job
from fedloom.errors import Stop
from fedloom.lab.tune.trial import TRIAL_PART, make_scored_setting, remove_test
from fedloom.metrics import leading
from fedloom.models import MLP

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
OPTIONS = {
    "fedprox": ("mu",),
    "fedadmm": ("rho",),
    "fedadmm-inexact": ("r0",),
    "fedpd": ("eta",),
    "feddr": ("eta",),
    "fedopt": ("server_lr",),
    "fiaelt": ("beta",),
    "fedslr": ("eta_g",),
    "flame": ("lam",),
    "pfedme": ("lam",),
    "fedamp": ("alpha", "sigma"),
    "lp-proj": ("lam", "eta"),
}
UNITS = {"fedprox.mu": 3.0, "fedpd.eta": 4.0, "fedslr.eta_g": 0.25, "fiaelt.beta": 2.0, "flame.lam": 0.5}
"""What is tried as the factor 1, over the default, where a factor was chosen since."""


class Case(NamedTuple):
    """A federation without its test parts, and how it is trained."""

    make: Callable[[], Federation]
    hidden: tuple[int, ...]
    lr: float
    rounds: int


def users() -> Federation:
    """15 users with linear models of their own (FedProx's synthetic data)."""
    data = load("synthetic", alpha=1.0, beta=1.0, clients=15, seed=3)
    return fl.partitions.natural(validation=0.25)(data, seed=3)


def figures() -> Federation:
    """1,500 digits of MNIST at 15 clients, Dirichlet 0.2."""
    data = load("mnist")
    chosen = torch.from_numpy(np.random.default_rng(3).permutation(len(data))[:1500])
    part = fl.Dataset.create(data.x[chosen].numpy(), data.y[chosen].numpy())
    return fl.partitions.dirichlet(clients=15, alpha=0.2, min_size=15, validation=0.25)(part, seed=3)


def table() -> Federation:
    """A table of 20 features and 3 classes at 8 clients whose features are turned and moved."""
    from sklearn.datasets import make_classification

    x, y = make_classification(1600, 20, n_informative=8, n_classes=3, class_sep=1.0, random_state=3)
    rng, owner = np.random.default_rng(3), np.random.default_rng(4).choice(8, 1600, p=np.arange(1, 9) / 36)
    x = x + rng.normal(0, 1, (8, 20))[owner]
    x = (x - x.mean(0)) / x.std(0)
    data = fl.Dataset.create(x.astype(np.float32), y, clients=owner)
    return fl.partitions.natural(validation=0.25)(data, seed=3)


def schooling() -> Federation:
    """Adult's census by education: 16 clients of at most 100 training samples."""
    return fl.partitions.by_column(column="education", max_train_per_client=100, validation=0.25)(load("adult"), seed=3)


CASES = {
    "users": Case(users, (), 0.05, 30),
    "figures": Case(figures, (48,), 0.05, 60),
    "table": Case(table, (16,), 0.1, 40),
    "schooling": Case(schooling, (32,), 0.1, 40),
    "slow": Case(figures, (32,), 0.01, 30),
}


@cache
def federation(make: Callable[[], Federation]) -> Federation:
    return remove_test(make())


def setting(case: Case, method: Any) -> Setting:
    local = {"lr": case.lr, "batch_size": 20}
    model = MLP(hidden=case.hidden) if case.hidden else "softmax"
    made = Setting(algorithm=method, model=model, rounds=case.rounds, local=local, client_weights="uniform")
    return make_scored_setting(made, 3, every=case.rounds)


def score(result: Result) -> dict[str, float]:
    """The mean over clients of the leading metric on validation, by model."""
    records, found = result.state.records, {}
    for model in ("global", "personal", "hybrid"):
        names = {r.metric for r in records.items if r.model == model and not r.total}
        values = records.last(model, TRIAL_PART, leading(names)) if names else None
        if values is not None:
            found[model] = float(np.nanmean(values))
    return found if result.stop is Stop.DONE else {}


@cache
def least(case: str) -> float:
    """The worse of FedAvg and Local."""
    fed = federation(CASES[case].make)
    return min(max(score(fl.simulate(setting(CASES[case], m), fed)).values()) for m in ("fedavg", "local"))


def measure(name: str, option: str, case: str) -> list[Any]:
    """Score by factor, less the reference's."""
    one, fed = CASES[case], federation(CASES[case].make)
    derived = getattr(make_job(setting(one, REGISTRY[name]()), fed)[0].algorithm, option)
    rule, rows = derived * UNITS.get(f"{name}.{option}", 1.0), []
    for factor in FACTORS:
        got = score(fl.simulate(setting(one, REGISTRY[name](**{option: factor * rule})), fed))
        rows.append({model: round(value - least(case), 4) for model, value in got.items()})
    return rows


def main(out: Path, names: list[str]) -> None:
    """Measure, and write what was measured."""
    torch.set_num_threads(1)
    found = json.loads(out.read_text()) if out.exists() else {}
    for name in names or [f"{method}.{option}" for method, options in OPTIONS.items() for option in options]:
        found[name] = {case: measure(*name.split("."), case) for case in CASES}
        print(name, json.dumps(found[name]), flush=True)
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
