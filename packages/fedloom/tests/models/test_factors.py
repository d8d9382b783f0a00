"""Factorised inference: the same predictions from fewer parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.models import CNN, MLP, ModelSpec, factorize


def low_rank(module: nn.Module, rank: int) -> nn.Module:
    """The module with every matrix cut to a rank, convolutions as FedSLR's matrices."""
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                w = layer.weight
                m = w if w.dim() == 2 else w.transpose(1, 2).reshape(w.shape[0] * w.shape[2], -1)
                u, s, vh = torch.linalg.svd(m.double(), full_matrices=False)
                m = ((u[:, :rank] * s[:rank]) @ vh[:rank]).to(w)
                back = (w.shape[0], w.shape[2], w.shape[1], w.shape[3]) if w.dim() == 4 else w.shape
                w.copy_(m.reshape(back).transpose(1, 2) if w.dim() == 4 else m)
    return module.eval()


def images(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))


SPECS = [
    MLP(hidden=(40, 30)),
    CNN(channels=(8, 16), kernel=3, hidden=(32,)),
    CNN(channels=(6, 8), kernel=3, norm="group", hidden=()),
]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_predictions_are_equal_where_the_matrices_are_of_that_rank(spec: ModelSpec) -> None:
    module = low_rank(spec.build((3, 16, 16), 10, seed=1), 4)
    before = [p.clone() for p in module.parameters()]
    found = factorize(module, tolerance=1e-5)
    x = images((3, 16, 16))
    with torch.no_grad():
        torch.testing.assert_close(found.module(x), module(x), rtol=0, atol=1e-5)
    assert set(found.ranks.values()) <= {3, 4}
    assert found.parameters == sum(p.numel() for p in found.module.parameters())
    assert found.parameters < 0.8 * found.original_parameters
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_full_rank_replaces_only_where_smaller(spec: ModelSpec) -> None:
    module = spec.build((3, 16, 16), 10, seed=1).eval()
    found = factorize(module, tolerance=0)
    assert (found.ranks, found.parameters) == ({}, found.original_parameters)
    assert torch.equal(found.module(images((3, 16, 16))), module(images((3, 16, 16))))


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(2, 1, 1), ((1, 2), (0, 2), (2, 1)), (1, 0, 2)])
def test_strides_padding_and_dilation(stride: object, padding: object, dilation: object) -> None:
    layer = nn.Conv2d(8, 12, (3, 2), stride=stride, padding=padding, dilation=dilation)  # type: ignore[arg-type]
    module = low_rank(nn.Sequential(layer), 3)
    found = factorize(module, tolerance=1e-5)
    assert found.ranks == {"0": 3}
    torch.testing.assert_close(found.module(images((8, 9, 11))), module(images((8, 9, 11))), rtol=0, atol=1e-5)


def test_a_smaller_rank_is_the_best_approximation() -> None:
    module = nn.Sequential(nn.Linear(20, 20, bias=False))
    found = factorize(module, rank=2)
    weight = module.get_parameter("0.weight").detach()
    thin = found.module(torch.eye(20)).detach().T
    tail = torch.linalg.svdvals(weight)[2:]
    assert found.parameters == 80
    torch.testing.assert_close(torch.linalg.norm(weight - thin), tail.norm(), rtol=1e-4, atol=0)


def test_grouped_convolutions_stay() -> None:
    module = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"))
    assert factorize(module, rank=1).ranks == {}


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank must be at least 1, got 0"):
        factorize(nn.Linear(2, 2), rank=0)
    with pytest.raises(ConfigError, match=r"tolerance must be in \[0, 1\), got 1"):
        factorize(nn.Linear(2, 2), tolerance=1)
