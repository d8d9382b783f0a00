"""Large linear layers of looped networks: the gradients of plain ones, and whose they are not."""

from __future__ import annotations

from typing import Any

import handwritten
import pytest
import torch
from test_oracles import seeded
from torch import Tensor, nn

from fedloom.local import LocalSGD, Work, descend
from fedloom.local.oracles import linear, make_oracle, precision
from fedloom.local.oracles.linear import replace_linear_layers
from fedloom.local.oracles.looped import Looped
from fedloom.rows.layout import Layout
from fedloom.tasks import make_task

WIDTH = 6


class Last(nn.Module):
    """Sequences to their last outputs; code of a user's own."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


def twice() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(WIDTH, handwritten.CLASSES))


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, handwritten.CLASSES))
    module[0].requires_grad_(False)
    return module


MODULES: dict[str, tuple[Any, tuple[int, ...], int]] = {
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(27, handwritten.CLASSES)),
        (1, 4, 4),
        1,
    ),
    "chain": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 5, bias=False), nn.ELU(), nn.Linear(5, handwritten.CLASSES)),
        (WIDTH,),
        2,
    ),
    "one layer twice": (twice, (WIDTH,), 2),
    "frozen": (frozen, (WIDTH,), 1),
    "sequences": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.GELU(), nn.Flatten(), nn.Linear(12, handwritten.CLASSES)),
        (3, WIDTH),
        2,
    ),
}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "LARGE_LAYER_WEIGHTS", 1)


def looped(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, low: precision.Precision = "full") -> Looped:
    fed = handwritten.federation(shape=shape, dtype=dtype)
    oracle = make_oracle(module, make_task(fed.data), fed, "loop", precision=low)
    assert isinstance(oracle, Looped)
    return oracle


def trained(oracle: Looped, module: nn.Module, **options: Any) -> tuple[Tensor, Tensor]:
    """Rows after some steps, and the gradient over all samples there."""
    local = LocalSGD(lr=0.1, batch_size=4, steps=5, **options)
    work = Work(oracle, torch.arange(4), torch.full((4, 1), 1 / 4), local, seed=1)
    rows = descend(oracle.layout.vector(module, oracle.dtype), work)
    return rows, work.full_grad(rows)


def replaced(module: nn.Module) -> int:
    return sum(isinstance(m, linear._PassLinear) for m in module.modules())


@pytest.mark.parametrize("options", [{}, {"momentum": 0.5, "weight_decay": 0.1}, {"clip": 0.3}], ids=str)
@pytest.mark.parametrize("case", MODULES)
def test_steps_are_those_of_plain_layers(case: str, options: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape, count = MODULES[case]
    module = seeded(make)
    plain = looped(module, shape, torch.float64)
    monkeypatch.setattr(linear, "LARGE_LAYER_WEIGHTS", 1)
    compiled = looped(module, shape, torch.float64)
    assert (replaced(plain.module), replaced(compiled.module)) == (0, count)
    for got, want in zip(trained(compiled, module, **options), trained(plain, module, **options), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("large")
def test_the_gradient_of_a_large_weight_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    module, found, real = MODULES["chain"][0](), list[tuple[Tensor | None, ...]](), torch.autograd.grad

    def watched(*given: Any, **options: Any) -> tuple[Tensor | None, ...]:
        found.append(real(*given, **options))
        return found[-1]

    monkeypatch.setattr(torch.autograd, "grad", watched)
    trained(looped(module, (WIDTH,), torch.float64), module)
    assert found
    assert all(g is None for grads in found for g in grads)


@pytest.mark.usefixtures("large")
def test_layers_beside_code_of_others_and_tied_or_half_frozen_ones_stay_what_they_are() -> None:
    tied = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    tied[1].weight = tied[0].weight
    half = nn.Sequential(nn.Linear(4, 3))
    half[0].bias.requires_grad_(False)
    for module in (nn.Sequential(Last(), nn.Linear(4, 3)), tied, half):
        replace_linear_layers(module, Layout.create(module))
        assert not replaced(module)


@pytest.mark.usefixtures("large")
def test_more_inputs_than_the_loops_are_good_for_are_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape, _ = MODULES["sequences"]
    module = make()
    oracle = looped(module, shape, torch.float64)
    want = trained(oracle, module)
    monkeypatch.setattr(linear, "MAX_LOOP_INPUTS", 0)
    for got, rows in zip(trained(oracle, module), want, strict=True):
        torch.testing.assert_close(got, rows, rtol=0, atol=1e-12)


def test_bfloat16_is_as_near_as_with_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "has_bf16", lambda device: True)
    make, shape, _ = MODULES["convolution"]
    module = seeded(make)
    exact, _ = trained(looped(module, shape, torch.float32), module)
    monkeypatch.setattr(linear, "LARGE_LAYER_WEIGHTS", 1)
    oracle = looped(module, shape, torch.float32, "bf16")
    assert replaced(oracle.module) == 1
    rows, _ = trained(oracle, module)
    moved = (exact - oracle.layout.vector(module, torch.float32)).norm(dim=1)
    error = (rows - exact).norm(dim=1)
    assert bool((error > 0).all())
    assert bool((error < 0.05 * moved).all())
