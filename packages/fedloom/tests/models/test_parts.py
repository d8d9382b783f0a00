"""Head and penultimate layer; augmentation against a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.models import CNN, MLP, Augment, ModelSpec, ResNet18, Softmax, head_prefixes, penultimate_layer


def seen_by_head(module: nn.Module, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = module.get_submodule(head_prefixes(module)[0].removesuffix(".")).register_forward_pre_hook(
        lambda _, a: seen.append(a[0])
    )
    module(x)
    handle.remove()
    return seen[0]


def output_of(module: nn.Module, name: str, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = module.get_submodule(name).register_forward_hook(lambda _, __, out: seen.append(out))
    module(x)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize(
    "spec",
    [
        Softmax(),
        MLP(hidden=(7, 5)),
        MLP(hidden=(7,), dropout=0.3),
        CNN(channels=(4,), hidden=(9,), dropout=0.5, dropout_hidden=0.5),
        CNN(channels=(4,), hidden=(), dropout=0.2),
        ResNet18(),
    ],
    ids=repr,
)
def test_penultimate_is_what_the_head_sees(spec: ModelSpec) -> None:
    module = spec.build((3, 16, 16), 4).eval()
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(output_of(module, penultimate_layer(module), x), seen_by_head(module, x))


@pytest.mark.parametrize("spec", [Softmax(), MLP(), CNN(kernel=3), ResNet18()], ids=repr)
def test_head_prefixes_name_the_last_linear_layer(spec: ModelSpec) -> None:
    module = spec.build((3, 16, 16), 4)
    named = [name for name, _ in module.named_parameters() if name.startswith(head_prefixes(module))]
    weight = module.get_parameter(named[0])
    assert weight.shape[0] == 4
    assert named[-1] == [name for name, _ in module.named_parameters()][-1]


class Own(nn.Module):
    head = "out"
    penultimate = "mid"

    def __init__(self) -> None:
        super().__init__()
        self.out, self.mid = nn.Linear(3, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.mid(x))
        return out


def test_a_module_may_name_its_parts() -> None:
    assert (head_prefixes(Own()), penultimate_layer(Own())) == (("out.",), "mid")
    wrong = Own()
    wrong.penultimate = "midd"
    with pytest.raises(ConfigError, match="did you mean 'mid'"):
        penultimate_layer(wrong)


def test_modules_without_such_parts_are_refused() -> None:
    with pytest.raises(ConfigError, match="no linear layer"):
        head_prefixes(nn.Sequential(nn.Conv2d(1, 2, 3)))
    with pytest.raises(ConfigError, match="no layer before"):
        penultimate_layer(nn.Sequential(nn.Linear(2, 2)))


def by_hand(x: Tensor, drawn: Tensor, crop: int) -> Tensor:
    out = []
    for image, (flip, top, left) in zip(x, drawn.tolist(), strict=True):
        c, h, w = image.shape
        large = torch.zeros(c, h + 2 * crop, w + 2 * crop)
        large[:, crop : crop + h, crop : crop + w] = image
        cut = large[:, top : top + h, left : left + w]
        out.append(cut.flip(-1) if flip else cut)
    return torch.stack(out)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    crop=st.integers(0, 3),
    flip=st.sampled_from([0.0, 0.5, 1.0]),
    p=st.sampled_from([0.5, 1.0]),
)
def test_augmentation_is_flip_and_padded_crop(seed: int, crop: int, flip: float, p: float) -> None:
    augment = Augment(flip=flip, crop=crop, crop_probability=p)
    x = torch.randn(6, 2, 5, 4, generator=torch.Generator().manual_seed(seed))
    before = x.clone()
    drawn = augment.draw(6, torch.Generator().manual_seed(seed))
    assert torch.equal(augment.apply(x, drawn), by_hand(x, drawn, crop))
    assert torch.equal(augment.apply(x.view(2, 3, 2, 5, 4), drawn.view(2, 3, 3)).view_as(x), augment.apply(x, drawn))
    assert torch.equal(x, before)


def test_augmentation_is_off_by_default_and_as_frequent_as_asked() -> None:
    x = torch.randn(4, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    off = Augment()
    assert torch.equal(off.apply(x, off.draw(4, torch.Generator().manual_seed(0))), x)
    drawn = Augment(flip=0.5, crop=4, crop_probability=0.5).draw(4000, torch.Generator().manual_seed(0))
    assert abs(drawn[:, 0].double().mean().item() - 0.5) < 4 * (0.25 / 4000) ** 0.5
    moved = (drawn[:, 1:] != 4).any(1).double().mean().item()
    assert abs(moved - 0.5 * 80 / 81) < 4 * (0.25 / 4000) ** 0.5
    assert (drawn[:, 1:].amin().item(), drawn[:, 1:].amax().item()) == (0, 8)
