"""Models, federations and rows for the tests of local training; by the engine and by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import handwritten
import torch
from torch import Tensor, nn

from fedloom.data.federation import Federation
from fedloom.local import LocalSGD, Work, descend
from fedloom.local.oracles import Network, find_chains, make_oracle
from fedloom.models import CNN, MLP, ModelSpec, Softmax
from fedloom.tasks import make_task

M = len(handwritten.SIZES)
IMAGE = (2, 10, 10)
TOLERANCE = {"rtol": 0.0, "atol": 1e-10}


class Case(NamedTuple):
    """A model, the shape of its samples, and the features that pass its dropout layers."""

    spec: ModelSpec
    shape: tuple[int, ...] = (6,)
    features: dict[str, tuple[int, ...]] = {}  # noqa: RUF012


CASES = {
    "softmax": Case(Softmax()),
    "mlp": Case(MLP(hidden=(5, 3))),
    "mlp tanh": Case(MLP(hidden=(5,), activation="tanh")),
    "mlp sigmoid": Case(MLP(hidden=(5,), activation="sigmoid")),
    "mlp gelu": Case(MLP(hidden=(5,), activation="gelu")),
    "mlp dropout": Case(MLP(hidden=(5, 3), dropout=0.4), features={"fc1_drop": (5,), "fc2_drop": (3,)}),
    "mixture": Case(
        MLP(hidden=(5,), dropout=0.4, mixture=3), features={f"components.{m}.fc1_drop": (5,) for m in range(3)}
    ),
    "guided": Case(MLP(hidden=(5,), guided=True)),
    "memory": Case(MLP(hidden=(5, 3), activation="tanh", memory=7)),
    "cnn": Case(CNN(channels=(4, 2), kernel=3, pool=(True, False), norm="group", hidden=(5,)), IMAGE),
    "cnn dropout": Case(
        CNN(channels=(4,), kernel=3, hidden=(5,), dropout=0.25, dropout_hidden=0.5),
        IMAGE,
        {"drop": (64,), "fc1_drop": (5,)},
    ),
}


class Setting(NamedTuple):
    """Local settings and the arguments of `descend`; rows of m clients."""

    local: dict[str, Any]
    round: int = 1
    lr: float | None = None
    pulls: tuple[tuple[str, str], ...] = ()
    shift: str = ""
    mask: str = ""
    soft: str = ""


class Soft:
    """0.3 ||x||_1, the prox of a function that needs no layout."""

    convex = True

    def f(self, x: Tensor, layout: object = None) -> Tensor:
        return 0.3 * x.abs().sum(-1, keepdim=True)

    def prox(self, v: Tensor, t: float | Tensor, layout: object = None) -> Tensor:
        return v.sign() * (v.abs() - 0.3 * t).clamp(min=0)


class Problem:
    """One case with all its data: rows to pull to, shifts and masks."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float64, task: str = "classification") -> None:
        self.case, self.task = case, task
        self.fed: Federation = handwritten.federation(shape=case.shape, task=task, dtype=dtype)
        self.module: nn.Module = case.spec.build(case.shape, self.fed.data.outputs, seed=3)
        self.d = sum(p.numel() for p in self.module.parameters())
        g = torch.Generator().manual_seed(9)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

        self.start, self.x, self.rows = 0.5 * draw(M, self.d), draw(self.d), draw(M, self.d)
        self.mu = torch.rand(M, 1, generator=g, dtype=torch.float64).to(dtype)
        self.strengths = {"d": self.x.abs(), "md": self.rows.abs()}
        self.masks = {"d": draw(self.d) > 0, "md": draw(M, self.d) > 0}

    def oracle(self, name: str) -> Network:
        return make_oracle(self.module, make_task(self.fed.data), self.fed, name)

    def vector(self, kind: str) -> Tensor | None:
        return {"": None, "none": None, "d": self.x, "md": self.rows}[kind]

    def by_engine(self, oracle: Network, setting: Setting, ids: list[int] | None = None) -> Tensor:
        """Rows after `descend`, of some clients in the order given."""
        chosen = torch.arange(M) if ids is None else torch.tensor(ids)
        local = LocalSGD(**setting.local)
        work = Work(oracle, chosen, torch.full((len(chosen), 1), 1 / M), local, seed=4, round=setting.round)

        def some(v: Tensor | None) -> Tensor | None:
            return v if v is None or v.dim() == 1 else v[chosen]

        mus: dict[str, Any] = {"number": 0.7, "rows": self.mu[chosen], "zero": 0.0}
        mus |= {name: some(mu) for name, mu in self.strengths.items()}
        return descend(
            self.start[chosen],
            work,
            pull=tuple((mus[mu], some(self.vector(x))) for mu, x in setting.pulls),  # type: ignore[misc]
            shift=some(self.vector(setting.shift)),
            prox=(Soft(), some(self.vector(setting.soft))) if setting.soft else None,
            mask=some(self.masks[setting.mask]) if setting.mask else None,
            lr=setting.lr,
        )

    def by_hand(self, setting: Setting) -> Tensor:
        """The same by the hand-written loop."""
        options = dict(setting.local)
        rate, schedule, decay = options.pop("lr"), options.pop("schedule", ""), options.pop("decay", 1.0)
        if schedule:
            rate *= decay ** (setting.round - 1)
        mus: dict[str, Any] = {"number": [0.7] * M, "rows": self.mu[:, 0].tolist(), "zero": [0.0] * M}
        mus |= {name: list(mu.expand(M, -1)) for name, mu in self.strengths.items()}

        def row(v: Tensor | None, i: int) -> Tensor:
            return torch.zeros_like(self.x) if v is None else v.expand(M, -1)[i]

        return torch.stack(
            [
                handwritten.sgd(
                    self.module,
                    self.fed,
                    i,
                    self.start[i],
                    lr=rate if setting.lr is None else setting.lr,
                    pulls=[(mus[mu][i], row(self.vector(x), i)) for mu, x in setting.pulls],
                    shift=row(self.vector(setting.shift), i) if setting.shift else None,
                    mask=self.masks[setting.mask].expand(M, -1)[i] if setting.mask else None,
                    soft=(0.3, row(self.vector(setting.soft), i)) if setting.soft else None,
                    seed=4,
                    round=setting.round,
                    task=self.task,
                    features=self.case.features,
                    **options,
                )
                for i in range(M)
            ]
        )


def oracles_of(problem: Problem) -> list[str]:
    return [*(["compiled"] if find_chains(problem.module) is not None else []), "vmap", "loop"]


def make_work(oracle: Any, local: LocalSGD, ids: list[int] | None = None, **options: Any) -> Work:
    """Work of some clients (all four when None) with uniform weights."""
    chosen = torch.arange(M) if ids is None else torch.tensor(ids)
    return Work(oracle, chosen, torch.full((len(chosen), 1), 1 / M, dtype=torch.float64), local, **options)
