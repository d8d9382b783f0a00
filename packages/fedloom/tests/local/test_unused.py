"""Parameters that no gradient reaches, or that a forward pass writes: as a training loop of torch has them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedloom as fl
from fedloom.seeds import as_global, generator

STEPS = 4


class Lazy(nn.Module):
    """A layer, a scale and one half of a pair are never used in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.unused = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


class Detached(Lazy):
    """The unused layer is called, but its output is cut off from the loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * self.unused(x[:, :3]).detach()


class Now(Lazy):
    """A layer that one sample of many calls, so that a probe on a single sample would miss it."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.unused(x[:, :3]) if bool((x > 1.5).any()) else out


def begun(made: Any) -> Any:
    """A module with the same initial parameters in every test."""
    with as_global(generator(0, purpose="model"), torch.device("cpu")):
        return made()


def samples() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=g)
    return x, torch.arange(40) % 3


def federation() -> fl.Federation:
    return fl.Federation.create([(samples(), samples())], task="classification", validation=0)


def by_torch(module: nn.Module, make: Any) -> dict[str, Tensor]:
    module = copy.deepcopy(module).double()
    optimizer, (x, y) = make(module.parameters()), samples()
    for _ in range(STEPS):
        optimizer.zero_grad()
        functional.cross_entropy(module(x.double()), y).backward()
        optimizer.step()
    return module.state_dict()


def by_fedloom(module: nn.Module, oracle: str, local: dict[str, Any], method: str = "fedavg") -> dict[str, Tensor]:
    local = {"lr": 0.1, "batch_size": "full", "steps": STEPS, **local}
    engine = {"gradient_engine": oracle, "dtype": "float64"}
    result = fl.simulate(method, federation(), module, rounds=1, local=local, engine=engine)
    return result.models.ready("global").module().state_dict()


CASES: list[tuple[dict[str, Any], Any]] = [
    ({"weight_decay": 0.1}, lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1)),
    ({"weight_decay": 0.1, "momentum": 0.9}, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1)),
    ({"weight_decay": 0.1, "clip": 1e9}, lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1)),
    ({"weight_decay": 0.1, "optimizer": "torch.optim:SGD"}, lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1)),
    ({"weight_decay": 0.1, "optimizer": "adam"}, lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1)),
    ({"optimizer": "adamw"}, lambda p: torch.optim.AdamW(p, 0.1)),
    ({"weight_decay": 0.3, "optimizer": "adamw"}, lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.3)),
    ({"optimizer": "torch.optim:ASGD"}, lambda p: torch.optim.ASGD(p, 0.1)),  # it decays by itself
]


@pytest.mark.parametrize("oracle", ["loop", "vmap"])
@pytest.mark.parametrize("made", [Lazy, Detached])
@pytest.mark.parametrize(("local", "make"), CASES, ids=[str(local) for local, _ in CASES])
def test_unused_parameters_stay_as_torch_leaves_them(made: Any, oracle: str, local: dict[str, Any], make: Any) -> None:
    module = begun(made)
    want, got = by_torch(module, make), by_fedloom(module, oracle, local)
    assert want.keys() == got.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, atol=1e-7, rtol=0)
    assert torch.equal(got["unused.0.weight"], module.unused[0].weight.double())


@pytest.mark.parametrize(("local", "make"), CASES, ids=[str(local) for local, _ in CASES])
def test_a_layer_that_some_samples_call_is_trained_and_decays(local: dict[str, Any], make: Any) -> None:
    module = begun(Now)
    want, got = by_torch(module, make), by_fedloom(module, "loop", local)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, atol=1e-7, rtol=0)
    assert not torch.equal(got["unused.0.weight"], module.unused[0].weight.double())


@pytest.mark.parametrize("method", ["apfl", "ditto", "perfedavg", "pfedme", "fedprox", "scaffold", "dbe", "fedrod"])
def test_no_method_lets_unused_parameters_of_the_server_decay(method: str) -> None:
    module = begun(Lazy)
    got = by_fedloom(module, "loop", {"weight_decay": 0.1}, method)
    for name in ("unused.0.weight", "unused.0.bias", "unused.1.weight", "scale"):
        torch.testing.assert_close(got[name], module.state_dict()[name].double(), atol=1e-12, rtol=0)


class Bounded(nn.Module):
    def __init__(self, max_norm: float | None = 0.5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4, max_norm=max_norm)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embedding(x).mean(1))


class WritesByHand(Bounded):
    """The same kind of change without a class that is known for it."""

    def __init__(self) -> None:
        super().__init__(None)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.clamp_(-0.4, 0.4)
        return super().forward(x)


def tokens() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randint(1, 9, (40, 5), generator=g), torch.arange(40) % 3


@pytest.mark.parametrize(("module", "name"), [(Bounded, "embedding.weight"), (WritesByHand, "last.weight")])
def test_parameters_that_a_forward_pass_changes_are_noted_and_trained_as_by_torch(module: Any, name: str) -> None:
    net = begun(module)
    x, y = tokens()
    data = fl.Dataset("tokens", x, y, classes=tuple("abc"), vocabulary=tuple("_ABCDEFGH"))
    fed = fl.partitions.iid(clients=1, test=0, validation=0)(data)
    local = {"lr": 0.5, "batch_size": "full", "steps": STEPS}
    engine = {"gradient_engine": "loop", "dtype": "float64"}
    result = fl.simulate("fedavg", fed, net, rounds=1, local=local, engine=engine)
    assert [note for note in result.notes if f"changes parameters of the model ({name})" in note]
    plain = copy.deepcopy(net).double()
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    for key, value in result.models.ready("global").module().state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key], atol=1e-6, rtol=0)


def test_a_model_that_changes_nothing_has_no_note() -> None:
    fed = federation()
    result = fl.simulate("fedavg", fed, Lazy(), rounds=1, local={"lr": 0.1}, engine={"gradient_engine": "loop"})
    assert not [note for note in result.notes if "changes parameters" in note]
