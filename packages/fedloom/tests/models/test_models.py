"""Parameter counts of the papers, determinism, shapes, and what is refused."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fedloom.errors import ConfigError
from fedloom.models import (
    CNN,
    MLP,
    MODELS,
    PAPER_NETWORKS,
    Dropout,
    Import,
    ModelSpec,
    ResNet18,
    Softmax,
    Transformer,
    make_spec,
)

MNIST, CIFAR, TINY = (1, 28, 28), (3, 32, 32), (3, 64, 64)

COUNTS: list[tuple[str, ModelSpec, tuple[int, ...], int, int]] = [
    ("softmax", Softmax(), MNIST, 10, 7_850),
    ("flame-mlp", PAPER_NETWORKS["flame-mlp"], MNIST, 10, 109_386),
    ("equitable-mnist", PAPER_NETWORKS["equitable-mnist"], MNIST, 10, 199_210),
    ("flame-cifar10", PAPER_NETWORKS["flame-cifar10"], CIFAR, 10, 268_650),
    ("flame-mmnist", PAPER_NETWORKS["flame-mmnist"], TINY, 6, 206_678),
    ("flame-femnist", PAPER_NETWORKS["flame-femnist"], MNIST, 62, 214_590),
    ("lenet", PAPER_NETWORKS["lenet"], CIFAR, 10, 62_006),
    ("equitable-femnist", PAPER_NETWORKS["equitable-femnist"], MNIST, 62, 608_702),
    ("fiaelt-synthetic", PAPER_NETWORKS["fiaelt-synthetic"], (60,), 10, 2_282),
    ("fiaelt-femnist", PAPER_NETWORKS["fiaelt-femnist"], MNIST, 26, 103_834),
    ("fedslr-resnet18", PAPER_NETWORKS["fedslr-resnet18"], CIFAR, 10, 11_173_952),
    # the sizes below are added up by hand: kernels, biases, normalisation pairs, linear layers
    ("w3", CNN(), MNIST, 10, 25 * 32 + 32 + 32 * 64 * 25 + 64 + 1024 * 512 + 512 + 5130),
    (
        "w4",
        CNN(kernel=3, pool=(False, True), dropout=0.25, hidden=(128,), dropout_hidden=0.5),
        CIFAR,
        10,
        (27 + 1) * 32 + (288 + 1) * 64 + (12_544 + 1) * 128 + 1290,
    ),
    ("resnet18-tiny", ResNet18(), TINY, 200, 11_173_952 - 27 * 64 + 147 * 64 + 512 * 190),
    ("resnet18-bias", ResNet18(head_bias=True), MNIST, 10, 11_173_952 - 18 * 64 + 10),
]


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("spec", "shape", "outputs", "count"), [c[1:] for c in COUNTS], ids=[c[0] for c in COUNTS])
def test_parameter_counts(spec: ModelSpec, shape: tuple[int, ...], outputs: int, count: int) -> None:
    assert size(spec.build(shape, outputs)) == count


def test_parameter_counts_of_models_of_tokens() -> None:
    lstm = 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2)
    assert (
        size(PAPER_NETWORKS["leaf-shakespeare"].build((80,), 80, 0, (82, False))) == 82 * 8 + lstm + 257 * 80 == 819_936
    )
    block = 4 * (8 + 1) * 8 + (8 + 1) * 32 + (32 + 1) * 8 + 2 * 16
    assert size(Transformer(width=8, heads=2, layers=3).build((5,), 4, 0, (9, True))) == 9 * 8 + 3 * block + 16 + 36


def test_equitable_cifar100_has_the_layers_of_its_description() -> None:
    module = PAPER_NETWORKS["equitable-cifar100"].build(CIFAR, 100)
    kinds = [type(part) for part in module]
    assert (kinds.count(nn.Conv2d), kinds.count(nn.MaxPool2d), kinds.count(nn.Linear)) == (5, 3, 2)
    assert module.get_submodule("head").weight.shape == (100, 512)


SMALL = [
    Softmax(),
    MLP(hidden=[16, 8], activation="tanh"),
    MLP(hidden=()),
    MLP(hidden=[8], dropout=0.5),
    *[
        CNN(channels=(4, 6), kernel=3, hidden=(7,), norm=norm, dropout=0.1)
        for norm in ("none", "group", "batch", "layer")
    ],
]


@pytest.mark.parametrize("spec", [*SMALL, ResNet18()], ids=repr)
def test_build_depends_on_the_seed_only_and_leaves_the_global_generator(spec: ModelSpec) -> None:
    before = torch.get_rng_state()
    one, same, other = spec.build(CIFAR, 3, seed=5), spec.build(CIFAR, 3, seed=5), spec.build(CIFAR, 3, seed=6)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert one(torch.zeros(2, *CIFAR)).shape == (2, 3)


@pytest.mark.parametrize("spec", [Softmax(), MLP(hidden=(5, 4), activation="sigmoid")])
def test_softmax_and_mlp_are_chains_of_flatten_linear_and_pointwise(spec: ModelSpec) -> None:
    module = spec.build((3, 4), 2)
    assert type(module) is nn.Sequential
    assert {type(part) for part in module} <= {nn.Flatten, nn.Linear, nn.Sigmoid}


@pytest.mark.parametrize("spec", SMALL[:4] + SMALL[4:6] + SMALL[7:] + [ResNet18()], ids=repr)
def test_models_without_batch_statistics_stack_under_vmap(spec: ModelSpec) -> None:
    shape = CIFAR
    models = [spec.build(shape, 3, seed=s).eval() for s in range(2)]
    params, buffers = torch.func.stack_module_state(models)
    x = torch.randn(2, 2, *shape, generator=torch.Generator().manual_seed(0))
    skeleton = copy.deepcopy(models[0])
    stacked = torch.vmap(lambda p, b, v: torch.func.functional_call(skeleton, (p, b), (v,)))(params, buffers, x)
    for i, model in enumerate(models):
        torch.testing.assert_close(stacked[i], model(x[i]), rtol=1e-3, atol=1e-4)


def test_registries_are_usable_from_settings() -> None:
    assert {*MODELS} == {"softmax", "mlp", "cnn", "resnet18", "lstm", "transformer", "hub", "import"}
    assert not {*MODELS} & {*PAPER_NETWORKS}
    assert make_spec("cnn", channels=[8], kernel=3) == CNN(channels=(8,), kernel=3)
    assert make_spec("lenet", dropout=0.1) == CNN(channels=(6, 16), kernel=5, hidden=(120, 84), dropout=0.1)
    with pytest.raises(ConfigError, match="did you mean 'lenet'"):
        make_spec("lennet")


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("mlp", {"hiden": [3]}, "hiden"),
        ("mlp", {"hidden": [0]}, "greater than 0"),
        ("mlp", {"dropout": 1.0}, "less than 1"),
        ("cnn", {"channels": []}, "at least 1"),
        ("cnn", {"channels": [4, 4], "kernel": [3]}, "kernel needs one value, or 2"),
        ("cnn", {"padding": -1}, "padding must be >= 0"),
        ("cnn", {"channels": [3], "norm": "group"}, "must divide"),
        ("resnet18", {"groups": 3}, "must divide 64"),
        ("import", {"path": "os.system"}, "pattern"),
    ],
)
def test_values_out_of_range_are_refused(kind: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_spec(kind, **options)


@pytest.mark.parametrize(
    ("spec", "shape", "said"),
    [
        (CNN(), (784,), "channels, height, width"),
        (CNN(), (1, 8, 8), "no pixels left after convolution 2"),
        (ResNet18(), (1, 4, 4), "at least 8x8"),
        (Softmax(), (), "sample shape"),
        (Softmax(), (2**62,), "the model does not fit in memory"),
        (Softmax(), (2**62, 8), "the model does not fit in memory"),
    ],
)
def test_samples_that_do_not_fit_are_refused(spec: ModelSpec, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        spec.build(shape, 10)


USER = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, outputs, width=4):
        super().__init__()
        self.one = nn.Linear(shape[0], width)
        self.two = nn.Linear(width, outputs)
    def forward(self, x):
        return self.two(torch.relu(self.one(x)))

class Blind(nn.Module):
    def forward(self, x):
        return x

def fixed():
    return nn.Linear(6, 3)

number = 3
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_net.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("user_net", None)


@pytest.mark.usefixtures("user")
def test_a_users_module_by_import_path() -> None:
    assert size(Import(path="user_net:Net", options={"width": 5}).build((6,), 2)) == 6 * 5 + 5 + 5 * 2 + 2
    fixed = Import(path="user_net:fixed").build((6,), 3, seed=1)
    assert torch.equal(fixed.weight, Import(path="user_net:fixed").build((6,), 3, seed=1).weight)
    assert fixed.training


@pytest.mark.usefixtures("user")
@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("user_net:Nett", {}, "did you mean 'Net'"),
        ("user_nett:Net", {}, "cannot import 'user_nett'"),
        ("user_net:number", {}, "class or a function"),
        ("user_net:Net", {"depth": 3}, "could not be created"),
        ("user_net:Blind", {}, "with parameters"),
        ("user_net:fixed", {}, r"must return \[b, 2\]"),
    ],
)
def test_a_users_module_that_cannot_work_is_refused(path: str, options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Import(path=path, options=options).build((6,), 2)


@pytest.mark.usefixtures("user")
def test_a_users_module_for_other_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="fails on samples of shape"):
        Import(path="user_net:fixed").build((5,), 3)


def test_dropout_takes_its_mask_from_outside() -> None:
    drop = Dropout(0.25)
    x = torch.ones(4000, 5)
    assert torch.equal(drop(x), x)
    mask = drop.draw((4000, 5), torch.Generator().manual_seed(0))
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(mask.mean().item() - 1) < 4 * (0.25 / 0.75 / 20_000) ** 0.5
    assert torch.equal(torch.func.functional_call(drop, {"mask": mask}, (x,)), mask)
    assert torch.equal(torch.func.functional_call(drop.eval(), {"mask": mask}, (x,)), x)
    assert not drop.state_dict()
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\)"):
        Dropout(1.0)
