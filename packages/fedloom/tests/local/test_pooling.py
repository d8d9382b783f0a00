"""A rectifier and the pooling after it, computed together: the values and gradients of the two layers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import handwritten
import pytest
import torch
from engine_cases import make_work
from hypothesis import given, settings
from hypothesis import strategies as st
from test_oracles import oracle_of, seeded
from torch import Tensor, nn

from fedloom.local import LocalSGD, descend
from fedloom.local.oracles.pooling import join_relu_and_pooling

LAST = torch.channels_last


def pair(**options: object) -> nn.Sequential:
    return nn.Sequential(nn.ReLU(), nn.MaxPool2d(**({"kernel_size": 2} | options)))  # type: ignore[arg-type]


def joined(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    join_relu_and_pooling(twin)
    return twin


def outcome(module: nn.Module, x: Tensor, slope: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs and the gradient of the inputs."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    out = module(x)
    (g,) = torch.autograd.grad(out, x, torch.ones_like(out) if slope is None else slope)
    return out.detach(), g


@settings(max_examples=80, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(2, 9), st.integers(2, 9)),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.sampled_from([LAST, torch.contiguous_format]),
    st.sampled_from(["normal", "ties", "negative", "special"]),
    st.integers(0, 2**32 - 1),
)
def test_values_and_gradients_are_those_of_the_two_layers(
    shape: tuple[int, int, int, int], dtype: torch.dtype, order: torch.memory_format, kind: str, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=dtype)
    if kind == "ties":
        x = x.round()
    elif kind == "negative":
        x = -x.abs()
    elif kind == "special":
        odd = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan], dtype=dtype)[seed % 4]
        x = x.where(torch.rand(shape, generator=g) > 0.2, odd)
    x, plain = x.contiguous(memory_format=order), pair()
    slope = torch.randn(shape[0], shape[1], shape[2] // 2, shape[3] // 2, generator=g, dtype=dtype)
    for got, wanted in zip(outcome(joined(plain), x, slope), outcome(plain, x, slope), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_less_than_a_square_is_refused_as_by_the_layers() -> None:
    for module in (pair(), joined(pair())):
        with pytest.raises(RuntimeError, match="too small"):
            module(torch.ones(2, 3, 1, 4))


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "in place": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2)),
    "overlapping": lambda: pair(kernel_size=3, stride=2),
    "larger": lambda: pair(kernel_size=3),
    "padded": lambda: pair(padding=1),
    "dilated": lambda: pair(dilation=2),
    "rounded up": lambda: pair(ceil_mode=True),
    "oblong": lambda: pair(kernel_size=(2, 1)),
    "mean": lambda: nn.Sequential(nn.ReLU(), nn.AvgPool2d(2)),
    "another activation": lambda: nn.Sequential(nn.GELU(), nn.MaxPool2d(2)),
    "something between": lambda: nn.Sequential(nn.ReLU(), nn.Identity(), nn.MaxPool2d(2)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_layers_stay_what_they_are(case: str) -> None:
    plain = OTHERS[case]()
    assert list(map(type, joined(plain).modules())) == list(map(type, plain.modules()))


def test_a_layer_that_somebody_looks_at_stays_what_it_is() -> None:
    for place in (0, 1):
        plain = pair()
        plain[place].register_forward_hook(lambda _m, _x, out: out * 2)
        assert list(map(type, joined(plain).modules())) == list(map(type, plain.modules()))


def test_who_looks_at_the_rectifier_later_sees_it_rectified() -> None:
    module, seen = joined(pair()), []
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).contiguous(memory_format=LAST)
    unseen = module(x)
    next(module.children()).register_forward_hook(lambda _m, _x, out: seen.append(out))
    assert torch.equal(module(x), unseen)
    assert torch.equal(seen[0], x.relu())


def test_a_pair_within_vmap_computes_as_its_layers_do() -> None:
    plain, x = pair(), torch.randn(5, 2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.vmap(joined(plain))(x), torch.vmap(plain)(x))


class OwnForward(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        h = self[0](x)
        return self[1](h) - h.mean()  # type: ignore[no-any-return]


def test_a_chain_with_a_forward_of_its_own_stays_what_it_is() -> None:
    plain = OwnForward(*pair())
    assert list(map(type, joined(plain).modules())) == list(map(type, plain.modules()))


def test_a_looped_network_has_its_pairs_joined_and_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = handwritten.federation(shape=(2, 10, 10), dtype=torch.float32)
    block = seeded(lambda: nn.Sequential(nn.Conv2d(2, 6, 3), *pair()))
    module = nn.Sequential(block, nn.Flatten(), seeded(lambda: nn.Linear(6 * 16, handwritten.CLASSES)))
    together = oracle_of(module, fed)
    monkeypatch.setattr("fedloom.local.oracles.looped.join_relu_and_pooling", lambda _: None)
    apart = oracle_of(module, fed)
    kinds = [[type(m) for m in oracle.module.modules()] for oracle in (together, apart)]
    assert nn.MaxPool2d not in kinds[0]
    assert nn.MaxPool2d in kinds[1]
    row, index = together.layout.vector(module), torch.arange(20)
    for name in ("0.0", "0.1", "0.2", "penultimate"):
        seen = [oracle.representations(row, index, name) for oracle in (together, apart)]
        assert torch.equal(*seen)
    assert torch.equal(*[torch.cat(list(oracle.outputs(row, index))) for oracle in (together, apart)])
    assert torch.equal(*[descend(row, make_work(oracle, LocalSGD(lr=0.1, epochs=2))) for oracle in (together, apart)])
