"""Optimisers beside plain SGD: step by step those of torch, fresh in every round or kept by every client."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import handwritten
import pytest
import torch
from engine_cases import CASES, M, Problem, Setting, oracles_of
from torch import Tensor, nn

import fedloom as fl
from fedloom.algorithms import REGISTRY, Algorithm
from fedloom.data.federation import Federation
from fedloom.engine.state import State
from fedloom.errors import ConfigError, Refused
from fedloom.local import LocalSGD, Work, descend
from fedloom.local.optimizer import OptimizerStates, find_slots
from fedloom.rows.layout import Layout

EXACT = {"rtol": 0.0, "atol": 1e-12}
OPTIMISERS: dict[str, tuple[dict[str, Any], Any]] = {
    "adam": ({"optimizer": "adam"}, torch.optim.Adam),
    "adam, amsgrad": (
        {"optimizer": "adam", "optimizer_options": {"amsgrad": True, "betas": [0.5, 0.8]}, "weight_decay": 0.1},
        partial(torch.optim.Adam, amsgrad=True, betas=(0.5, 0.8)),
    ),
    "adamw": ({"optimizer": "adamw", "weight_decay": 0.2}, torch.optim.AdamW),
    "rmsprop": (
        {"optimizer": "torch.optim:RMSprop", "optimizer_options": {"momentum": 0.5, "centered": True}},
        partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    ),
    "adafactor": ({"optimizer": torch.optim.Adafactor, "clip": 0.5}, torch.optim.Adafactor),
    "nesterov": (
        {"optimizer": torch.optim.SGD, "optimizer_options": {"momentum": 0.9, "nesterov": True}},
        partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    ),
}
PULLED = {"pulls": (("number", "d"), ("rows", "md")), "shift": "md", "mask": "md"}


@pytest.mark.parametrize("extras", [{}, PULLED, {"mask": "d"}], ids=["plain", "pulled", "masked"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_steps_are_those_of_torch(name: str, extras: dict[str, Any]) -> None:
    if name == "adafactor" and extras:
        return  # it mixes the coordinates of a matrix, so a mask is no mask of its steps
    options, make = OPTIMISERS[name]
    local = {"lr": 0.03, "batch_size": 6, "epochs": 2, **options}
    problem = Problem(CASES["mlp"])
    by_hand = {k: v for k, v in local.items() if not k.startswith("optimizer")} | {"make": make}
    wanted = problem.by_hand(Setting(by_hand, **extras))
    for oracle in oracles_of(problem):
        found = problem.by_engine(problem.oracle(oracle), Setting(local, **extras))
        torch.testing.assert_close(found, wanted, **EXACT)
        some = problem.by_engine(problem.oracle(oracle), Setting(local, **extras), ids=[3, 0])
        torch.testing.assert_close(some, wanted[[3, 0]], **EXACT)


def test_plain_sgd_by_torch_s_class_is_plain_sgd() -> None:
    problem = Problem(CASES["mlp"])
    local = {"lr": 0.05, "batch_size": 7, "weight_decay": 0.1}
    plain, other = (
        problem.by_engine(problem.oracle("compiled"), Setting({**local, **more}, **PULLED))
        for more in ({"momentum": 0.9}, {"optimizer": "torch.optim:SGD", "optimizer_options": {"momentum": 0.9}})
    )
    torch.testing.assert_close(plain, other, **EXACT)


def of_one_client(rounds: int, kept: bool) -> tuple[Tensor, Tensor]:
    """FedAvg with one client, and the same written with torch alone."""
    data = fl.load("digits")
    fed = fl.partitions.iid(clients=1, max_train_per_client=90)(data, seed=0)
    state = "persistent" if kept else "fresh"
    local = LocalSGD(lr=0.01, batch_size=16, epochs=2, optimizer="adam", optimizer_state=state)
    found = fl.simulate("fedavg", fed, "mlp", rounds=rounds, local=local, engine={"dtype": "float64"})
    module = found.job.setting.model.build(fed.data.shape, 10, 0).double()
    fed = fed.to(dtype=torch.float64)
    index = fed.indices("train", 0)
    optimiser = torch.optim.Adam(module.parameters(), lr=0.01)
    for t in range(1, rounds + 1):
        if not kept:
            optimiser = torch.optim.Adam(module.parameters(), lr=0.01)
        steps = 2 * -(-len(index) // 16)
        for batch in handwritten.positions(len(index), 16, steps, 0, seed=0, round=t):
            optimiser.zero_grad()
            x, y = fed.fetch(index[batch]), fed.targets(index[batch])
            nn.functional.cross_entropy(module(x), y).backward()
            optimiser.step()
    return found.models.rows("global"), torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("kept", [False, True])
def test_fedavg_with_one_client_is_torch_with_one_optimiser_per_round_or_for_the_whole_run(kept: bool) -> None:
    found, wanted = of_one_client(3, kept)
    torch.testing.assert_close(found, wanted, **EXACT)
    assert (of_one_client(3, not kept)[0] - found).abs().max() > 1e-3


ALL = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor")


@pytest.mark.parametrize("name", ALL)
def test_kept_states_go_on_where_they_stopped(name: str) -> None:
    """Two calls with a memory between them take the steps of one optimiser, whatever its state consists of."""
    problem = Problem(CASES["softmax"])
    oracle = problem.oracle("compiled")
    local = LocalSGD(lr=0.02, batch_size="full", steps=3, optimizer=f"torch.optim:{name}")
    like = oracle.layout.vector(oracle.module)
    memory = OptimizerStates(like.new_zeros(M, 0), find_slots(local, oracle.layout, like))
    w = problem.start
    for _ in range(2):
        work = Work(oracle, torch.arange(M), torch.full((M, 1), 1 / M), local, memory=memory)
        w = descend(w, work)
        memory = memory.replace_rows(memory.rows)
    share = torch.full((M, 1), 1 / M)
    whole = descend(problem.start, Work(oracle, torch.arange(M), share, local.with_(steps=6)))
    torch.testing.assert_close(w, whole, rtol=0.0, atol=1e-12)


@pytest.fixture(scope="module")
def fed() -> Federation:
    return fl.partitions.dirichlet(clients=5, alpha=0.5, max_train_per_client=200)(fl.load("digits"), seed=0)


KEPT = {"lr": 0.01, "optimizer": "adam", "optimizer_state": "persistent"}


class Crash(BaseException):
    """The machine fails."""


def crash(state: State) -> None:
    if state.round == 3:
        raise Crash


def test_kept_states_resume_bit_for_bit_on_disk_in_memory_and_by_workers(fed: Federation, tmp_path: Path) -> None:
    """Ditto's two branches have states of their own; clients that sit a round out keep theirs."""
    options = {"local": KEPT, "sampler": {"kind": "uniform", "clients": 3}, "rounds": 4}
    whole = fl.simulate("ditto", fed, **options)
    others = [fl.simulate("ditto", fed, **options, engine={"workers": 2})]
    for budget in (0, 1024):
        often, folder = {"checkpoint_every": 1e-9, "state_memory_mib": budget}, tmp_path / str(budget)
        with pytest.raises(Crash):
            fl.simulate("ditto", fed, **options, engine=often, folder=folder, callbacks=[crash])
        others.append(fl.simulate("ditto", fed, **options, engine=often, folder=folder))
    for other in others:
        assert other.table().equals(whole.table())
        assert torch.equal(other.models.rows("personal"), whole.models.rows("personal"))
        assert torch.equal(other.job.optimizer.read(torch.arange(5)).s, whole.job.optimizer.read(torch.arange(5)).s)
    assert whole.job.optimizer.template.s.shape == (2 * (1 + 1 + 2 * 650),)  # present; steps; two moments
    assert whole.job.memory is not None
    assert whole.job.memory.streams == ["local", "local 2"]
    fresh = fl.simulate("ditto", fed, **options | {"local": {**KEPT, "optimizer_state": "fresh"}})
    assert not fresh.table().equals(whole.table())
    assert not fresh.job.optimizer.template


def test_every_method_takes_adam_or_says_why_not(fed: Federation) -> None:
    refused = set()
    for name in REGISTRY:
        try:
            method: Algorithm = fl.simulate(name, fed, rounds=1, local={"lr": 0.01, "optimizer": "adam"}).job.algorithm
            assert method.plain_sgd is method.needs_sgd is None
        except Refused:
            refused.add(name)
    assert refused == {
        "scaffold", "fedadmm-inexact", "fedadmm-composite", "fedmid", "feddualavg", "fedslr", "lpgd", "pfedme",
        "perfedavg", "apfl", "fedbn", "lp-proj", "admm-lp-proj", "fednova", "gifair-fl", "fedrod",
        "dbe", "analytic-fl", "fed3r", "fedhip",
    }  # fmt: skip
    with pytest.raises(Refused, match="implements its own local steps"):
        fl.simulate(fl.algorithms.FLAME(dual="epoch"), fed, rounds=1, local=KEPT)
    with pytest.raises(Refused, match="plain full gradients"):
        fl.simulate(fl.algorithms.FLAME(eps0=0.1), fed, rounds=1, local=KEPT)


class Odd(torch.optim.SGD):
    """Keeps what no row can hold."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["said"] = "hello"


@pytest.mark.parametrize(
    ("local", "sentence"),
    [
        ({"optimizer": "adma"}, "did you mean 'adam'"),
        ({"optimizer": "torch.optim:Adm"}, "did you mean 'Adam'"),
        ({"optimizer": nn.Linear}, "must be a subclass of torch.optim.*Optimizer"),
        ({"optimizer": "adam", "momentum": 0.9}, "only with plain sgd, not with 'adam'. Omit `momentum`"),
        ({"optimizer": "torch.optim:RMSprop", "momentum": 0.9}, "Set momentum in optimizer_options"),
        ({"optimizer_state": "persistent"}, "can be used only with optimizers other than plain sgd. Name"),
        ({"optimizer_options": {"nesterov": True}}, "can be used only with optimizers other than plain sgd. Name"),
        ({"optimizer": "adam", "optimizer_options": {"lr": 1.0}}, r"lr is a key of \[local\]"),
        ({"optimizer": "adam", "optimizer_options": {"beta": 3}}, "cannot train this model: .*'beta'"),
        ({"optimizer": "adam", "optimizer_options": {"eps": -1}}, "cannot train this model: Invalid epsilon"),
        ({"optimizer": "torch.optim:LBFGS"}, "missing 1 required positional argument: 'closure'"),
        ({"optimizer": "torch.optim:Muon"}, "only supports 2D parameters"),
    ],
)
def test_what_cannot_work_is_a_sentence_before_work_starts(
    fed: Federation, local: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        fl.simulate("fedavg", fed, rounds=1, local=local)


def test_what_no_row_can_hold_is_not_kept() -> None:
    layout = Layout.create_from_shapes({"w": (2, 2)})
    local = LocalSGD(optimizer=Odd, optimizer_state="persistent")
    with pytest.raises(ConfigError, match="'said' of .*Odd' is a str"):
        find_slots(local, layout, torch.zeros(4))


def test_adamw_decays_as_in_torch_unless_told_otherwise() -> None:
    assert LocalSGD(optimizer="adamw").weight_decay == 0.01
    assert LocalSGD(optimizer="adamw", weight_decay=0.0).weight_decay == 0
    assert LocalSGD(optimizer="adam").weight_decay == LocalSGD().weight_decay == 0
    written = fl.Setting.create("fedavg", local={"optimizer": torch.optim.AdamW}).document()["local"]
    assert written["weight_decay"] == 0.01
    assert LocalSGD(**written) == LocalSGD(optimizer="torch.optim.adamw:AdamW")
