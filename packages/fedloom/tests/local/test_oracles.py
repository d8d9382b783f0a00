"""Which oracle computes which model, and what is special about each."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import handwritten
import pytest
import torch
from engine_cases import CASES, IMAGE, TOLERANCE, M, Problem, make_work, oracles_of
from hypothesis import given
from hypothesis import strategies as st
from test_work import first_batch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.data.federation import Federation
from fedloom.errors import ConfigError, Refused
from fedloom.local import LocalSGD, descend, oracles
from fedloom.local.oracles import Network, chunk_count, chunk_limit, find_chains, make_oracle
from fedloom.models import CNN, MLP, Dropout, Guided, Mixture, ResNet18
from fedloom.seeds import generator
from fedloom.tasks import make_task

CLASSES = handwritten.CLASSES


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(1)  # noqa: TID251 (forked)
        return make()


def oracle_of(module: nn.Module, fed: Federation, name: str = "auto") -> Network:
    return make_oracle(module, make_task(fed.data), fed, name)


def trained(oracle: Network, local: LocalSGD, module: nn.Module, ids: list[int] | None = None) -> Tensor:
    return descend(oracle.layout.vector(module, torch.float64), make_work(oracle, local, ids, seed=2, round=3))


def by_hand(module: nn.Module, fed: Federation, **options: object) -> Tensor:
    start = torch.cat([p.detach().reshape(-1) for p in module.parameters()]).double()
    return torch.stack([handwritten.sgd(module, fed, i, start, seed=2, round=3, **options) for i in range(fed.n)])  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- the fixed rule


class OwnForward(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.dropout(self.inner(x).relu(), 0.5, self.training))


def shared_layer() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(6, CLASSES))


def shared_dropout() -> nn.Module:
    drop = Dropout(0.5)
    return nn.Sequential(nn.Linear(6, 6), drop, nn.Linear(6, 6), drop, nn.Linear(6, CLASSES))


def tied_weights() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, CLASSES))
    module[2].weight = module[0].weight
    return module


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, CLASSES))
    module[0].register_forward_hook(lambda _m, _x, out: 3 * out)
    return module


def replaced_forward() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, CLASSES))
    module[1].forward = torch.tanh
    return module


def hooked_mixture() -> nn.Module:
    module = Mixture([MLP(hidden=(5,)).build((6,), CLASSES, seed) for seed in (0, 1)])
    module.logits.register_forward_hook(lambda _m, _x, out: 3 * out)
    return module


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrised() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, CLASSES))
    nn.utils.parametrize.register_parametrization(module[0], "weight", Doubled())
    return module


UNFUSED: dict[str, Callable[[], nn.Module]] = {
    "shared layer": shared_layer,
    "tied weights": tied_weights,
    "own forward": lambda: OwnForward(nn.Linear(6, CLASSES)),
    "hook": hooked,
    "replaced forward": replaced_forward,
    "parametrised": parametrised,
    "layer norm": lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, CLASSES)),
    "activation first": lambda: nn.Sequential(nn.ReLU(), nn.Linear(6, CLASSES)),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), nn.Linear(5, CLASSES)),
    "no sequence": lambda: nn.Linear(6, CLASSES),
    "mixture of one network twice": lambda: Mixture([MLP(hidden=(5,)).build((6,), CLASSES, 0)] * 2),
    "hook in a mixture": hooked_mixture,
    "mixture of others": lambda: Mixture([UNFUSED["layer norm"](), MLP(hidden=(5,)).build((6,), CLASSES, 0)]),
    "guided without a body": lambda: Guided(nn.Sequential(nn.Linear(6, CLASSES))),
}

FUSED: dict[str, Callable[[], nn.Module]] = {
    "no bias": lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, CLASSES, bias=False)),
    "in place": lambda: nn.Sequential(
        nn.Linear(6, 5), nn.SiLU(inplace=True), nn.Linear(5, 5), nn.ELU(0.7, inplace=True), nn.Linear(5, CLASSES)
    ),
    "gelu tanh": lambda: nn.Sequential(nn.Linear(6, 5), nn.GELU(approximate="tanh"), nn.Linear(5, CLASSES)),
    "relu in place": lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, CLASSES)),
    "wide": lambda: nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 35), nn.Sigmoid(), nn.Linear(35, CLASSES)),
    "two linear": lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, CLASSES)),
}


TWICE = ("shared layer", "mixture of one network twice")
"""Networks with one layer under two names."""


@pytest.mark.parametrize("case", UNFUSED)
def test_what_fused_cannot_compute_is_left_to_others(case: str) -> None:
    fed, module = handwritten.federation(), seeded(UNFUSED[case])
    assert find_chains(module) is None
    assert oracle_of(module, fed).name == "loop"
    with pytest.raises(Refused, match="gradient engine 'compiled' requires a sequence of linear layers"):
        oracle_of(module, fed, "compiled")
    expected = by_hand(module, fed, lr=0.3, epochs=2)
    if case in TWICE:  # vmap leaves its tensors in such a layer, so that no score can be computed
        with pytest.raises(Refused, match="vmap reports"):
            oracle_of(module, fed, "vmap")
    for name in ("loop",) if case in TWICE else ("vmap", "loop"):
        got = trained(oracle_of(module, fed, name), LocalSGD(lr=0.3, epochs=2), module)
        torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize("case", FUSED)
def test_fused_computes_linear_layers_and_pointwise_activations(case: str) -> None:
    fed, module = handwritten.federation(), seeded(FUSED[case])
    oracle = oracle_of(module, fed)
    assert oracle.name == "compiled"
    expected = by_hand(module, fed, lr=0.3, epochs=2)
    torch.testing.assert_close(trained(oracle, LocalSGD(lr=0.3, epochs=2), module), expected, **TOLERANCE)


def test_a_dropout_layer_used_twice_is_left_to_others() -> None:
    assert find_chains(shared_dropout()) is None


def test_dropout_of_the_inputs() -> None:
    layers = OrderedDict(drop=Dropout(0.3), head=nn.Linear(6, CLASSES))
    fed, module = handwritten.federation(), seeded(lambda: nn.Sequential(layers))
    expected = by_hand(module, fed, lr=0.3, epochs=2, features={"drop": (6,)})
    for name in ("compiled", "vmap", "loop"):
        got = trained(oracle_of(module, fed, name), LocalSGD(lr=0.3, epochs=2), module)
        torch.testing.assert_close(got, expected, **TOLERANCE)


def test_the_rule_for_other_models() -> None:
    flat, images = handwritten.federation(), handwritten.federation(shape=IMAGE)
    for spec in (CNN(channels=(4,), kernel=3), CNN(channels=(4,), kernel=3, norm="batch")):
        assert oracle_of(spec.build(IMAGE, CLASSES), images).name == "loop"
    for dropout in (0.0, 0.5):
        assert oracle_of(MLP(dropout=dropout).build((6,), CLASSES), flat).name == "compiled"
    assert oracle_of(nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, CLASSES)), flat).name == "loop"


@pytest.mark.parametrize(
    ("draws", "moved", "rejection", "chosen"),
    [
        (False, [], "", "vmap"),
        (True, [], "", "loop"),
        (False, ["calls"], "", "loop"),
        (False, [], "no .item()", "loop"),
    ],
)
def test_the_rule_on_an_accelerator(
    draws: bool, moved: list[str], rejection: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracles, "fails_stacked", lambda _module, _fed: rejection)
    monkeypatch.setattr(oracles, "draws_globally", lambda _module, _fed: draws)
    monkeypatch.setattr(oracles, "find_changed_values", lambda _module, _fed: moved)
    fed: Any = SimpleNamespace(device=torch.device("cuda"), data=SimpleNamespace(each=False))
    assert oracles._choose_oracle(MLP().build((6,), CLASSES), fed) == "compiled"
    assert oracles._choose_oracle(CNN(channels=(4,), kernel=3).build(IMAGE, CLASSES), fed) == chosen
    assert oracles._choose_oracle(CNN(channels=(4,), kernel=3, norm="batch").build(IMAGE, CLASSES), fed) == "loop"


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)),
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.1), nn.Linear(5, CLASSES)),
        lambda: nn.Sequential(nn.Linear(6, 5), nn.RReLU(), nn.Linear(5, CLASSES)),
        FunctionalDropout,
    ],
)
def test_stacked_refuses_batch_statistics_and_own_randomness(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(Refused, match="'vmap' does not support .* Set engine="):
        oracle_of(seeded(make), handwritten.federation(), "vmap")


def test_unknown_names_are_refused() -> None:
    fed, module = handwritten.federation(), seeded(lambda: nn.Sequential(nn.Linear(6, CLASSES)))
    with pytest.raises(
        ConfigError, match="engine.gradient_engine: unknown gradient engine 'compild'; did you mean 'compiled'"
    ):
        oracle_of(module, fed, "compild")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) if float(x.sum()) > 0 else 2 * self.head(x)


def test_a_model_that_vmap_refuses_names_the_way_out() -> None:
    fed, module = handwritten.federation(), seeded(Branches)
    with pytest.raises(Refused, match=r"vmap reports .*item.*engine=\{\"gradient_engine\": 'loop'\}") as refused:
        oracle_of(module, fed, "vmap")
    assert refused.value.rule == "oracle-stacked"
    expected = by_hand(module, fed, lr=0.3)
    torch.testing.assert_close(trained(oracle_of(module, fed), LocalSGD(lr=0.3), module), expected, **TOLERANCE)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.spare = nn.Linear(6, CLASSES), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


@pytest.mark.parametrize("name", ["vmap", "loop"])
def test_a_parameter_that_is_not_used_has_gradient_zero(name: str) -> None:
    fed, module = handwritten.federation(), seeded(Unused)
    got = trained(oracle_of(module, fed, name), LocalSGD(lr=0.5), module)
    start = torch.cat([p.detach().reshape(-1) for p in module.parameters()]).double()
    assert torch.equal(got[:, -12:], start[-12:].expand(M, -1))
    assert (got[:, :-12] != start[:-12]).any(1).all()


class Viewing(nn.Module):
    """Takes its images in rows only: `Tensor.view` refuses channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, 3), nn.Linear(3 * 64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).relu()
        return self.head(h.view(len(h), -1))


@pytest.mark.parametrize("name", ["vmap", "loop"])
def test_a_model_that_depends_on_the_order_in_memory(name: str) -> None:
    fed, module = handwritten.federation(shape=IMAGE), seeded(Viewing)
    expected = by_hand(module, fed, lr=0.3, epochs=2)
    got = trained(oracle_of(module, fed, name), LocalSGD(lr=0.3, epochs=2), module)
    torch.testing.assert_close(got, expected, **TOLERANCE)


# ---------------------------------------------------------------------------------------------------------- the product


@pytest.mark.parametrize("case", ["mlp", "cnn"])
@pytest.mark.parametrize("beta", [0.0, 1.0, -0.7, "rows"])
def test_addgrad_scales_and_adds(case: str, beta: float | str) -> None:
    problem = Problem(CASES[case])
    for name in oracles_of(problem):
        work = make_work(problem.oracle(name), LocalSGD(batch_size=6))
        batch = first_batch(work, 2)
        g = work.grad(problem.start, batch)
        factor = problem.mu if beta == "rows" else torch.full((M, 1), float(beta), dtype=torch.float64)
        room = torch.full((M, problem.d + 3), torch.nan, dtype=torch.float64)
        out = room[:, 1:-2]  # rows that are not contiguous
        if beta != 0:
            out.copy_(problem.rows)
        expected = -0.3 * g if beta == 0 else factor * problem.rows - 0.3 * g
        work.oracle.addgrad_(out, problem.start, batch, factor if beta == "rows" else float(beta), -0.3)
        torch.testing.assert_close(out, expected, **TOLERANCE)
        assert room[:, :1].isnan().all()
        assert room[:, -2:].isnan().all()
        inside = problem.start.clone()
        work.oracle.addgrad_(inside, inside, batch, factor if beta == "rows" else float(beta), -0.3, problem.rows)
        torch.testing.assert_close(inside, factor * problem.start - 0.3 * g + problem.rows, **TOLERANCE)


# ---------------------------------------------------------------------------------------------------- batch statistics


def normalised() -> nn.Module:
    return nn.Sequential(
        OrderedDict(fc=nn.Linear(6, 5), norm=nn.BatchNorm1d(5), act=nn.ReLU(), head=nn.Linear(5, CLASSES))
    )


def test_batch_normalisation_uses_the_batch() -> None:
    fed, module = handwritten.federation((7, 20, 53, 40)), seeded(normalised)
    oracle = oracle_of(module, fed)
    assert oracle.name == "loop"
    expected = by_hand(module, fed, lr=0.3, epochs=2)
    torch.testing.assert_close(trained(oracle, LocalSGD(lr=0.3, epochs=2), module), expected, **TOLERANCE)


def test_batch_normalisation_of_a_single_sample() -> None:
    """As if the sample were there twice; the last batch of 41 samples has one too."""
    fed, module = handwritten.federation((1, 41, 7)), seeded(normalised)
    oracle = oracle_of(module, fed)
    got = trained(oracle, LocalSGD(lr=0.3), module, [0, 1, 2])
    assert got.isfinite().all()
    x, y = handwritten.samples(fed, 0)
    start = torch.cat([p.detach().reshape(-1) for p in module.parameters()]).double()
    g = handwritten.gradient_at(module, x.repeat(2, 1), y.repeat(2), start)
    torch.testing.assert_close(got[0], start - 0.3 * g, **TOLERANCE)


def test_training_leaves_the_statistics_alone() -> None:
    fed, module = handwritten.federation(), seeded(normalised)
    oracle = oracle_of(module, fed)
    row = oracle.layout.vector(module, torch.float64)
    oracle.set_statistics(row, torch.arange(M))
    before = next(oracle.outputs(row, torch.arange(5)))
    trained(oracle, LocalSGD(lr=0.3, epochs=2), module)
    assert torch.equal(next(oracle.outputs(row, torch.arange(5))), before)


def test_samples_evaluated_together_fill_the_room_of_the_widest_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 4 x 8 x 8 sample becomes 6 x 8 x 8 after the convolution, in float64: 3,072 bytes."""
    fed = handwritten.federation((7, 20, 50), shape=(4, 8, 8))
    module = seeded(lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.Flatten(), nn.Linear(6 * 64, CLASSES)))
    row, index = oracle_of(module, fed).layout.vector(module, torch.float64), torch.arange(77)
    whole = list(oracle_of(module, fed).outputs(row, index))
    assert [len(piece) for piece in whole] == [77]
    monkeypatch.setattr("fedloom.local.oracles.forward.CPU_ACTIVATION", 10 * 3072 + 3071)
    pieces = list(oracle_of(module, fed).outputs(row, index))
    assert [len(piece) for piece in pieces] == [10] * 7 + [7]
    torch.testing.assert_close(torch.cat(pieces), whole[0])


@pytest.mark.parametrize("together", [4096, 6])
@pytest.mark.parametrize("case", CASES)
def test_many_models_are_evaluated_as_one_by_one(case: str, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also clients without samples or with more than fit together; any split of the clients gives the same bits."""
    monkeypatch.setattr("fedloom.local.oracles.forward.FORWARD_SAMPLES", together)
    fed = handwritten.federation((3, 9, 1, 20, 6), shape=CASES[case].shape).to(dtype=torch.float32)
    oracle = oracle_of(seeded(lambda: CASES[case].spec.build(CASES[case].shape, CLASSES, 0)), fed)
    rows = torch.randn(fed.n, oracle.layout.d, generator=torch.Generator().manual_seed(0)) / 4
    rows = rows.abs() if case == "memory" else rows  # a weight below 0 makes no probabilities
    sizes = torch.tensor([3, 0, 1, 20, 6])
    index = torch.cat([fed.indices("train", i)[:size] for i, size in enumerate(sizes.tolist())])
    got = oracle.outputs_of(rows, index, sizes)
    pieces = zip(rows, index.split(sizes.tolist()), strict=True)
    alone = [torch.cat([*oracle.outputs(row, piece)]) for row, piece in pieces if len(piece)]
    torch.testing.assert_close(got, torch.cat(alone))
    for k, own in enumerate(got.split(sizes.tolist())):
        mine = index.split(sizes.tolist())[k]
        assert torch.equal(oracle.outputs_of(rows[k : k + 1], mine, sizes[k : k + 1]), own)


def convolving(width: int = 3, pool: Callable[[], nn.Module] = nn.Identity) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, width, 3), pool(), nn.Flatten(), nn.LazyLinear(4))


FIRST, LAST = torch.contiguous_format, torch.channels_last
ORDERS: dict[str, tuple[Callable[[], nn.Module], torch.memory_format]] = {
    "a view of an activation": (Viewing, FIRST),
    "no pooling": (convolving, FIRST),
    "max pooling": (lambda: convolving(pool=lambda: nn.MaxPool2d(2)), LAST),
    "average pooling": (lambda: convolving(pool=lambda: nn.AvgPool2d(2)), LAST),
    "more weights than a batch is pooled": (
        lambda: nn.Sequential(nn.MaxPool2d(2), convolving(width=240, pool=lambda: nn.AdaptiveAvgPool2d(1))),
        FIRST,
    ),
}


@pytest.mark.parametrize("case", ORDERS)
@pytest.mark.parametrize("name", ["vmap", "loop"])
def test_outputs_do_not_depend_on_the_order_in_memory(name: str, case: str) -> None:
    make, order = ORDERS[case]
    fed, module = handwritten.federation(shape=IMAGE), seeded(make).double()
    module(fed.fetch(torch.arange(1)))  # lazy layers
    oracle, index = oracle_of(module, fed, name), torch.arange(9)
    assert oracle.memory_format is order
    got = next(oracle.outputs(oracle.layout.vector(module, torch.float64), index))
    torch.testing.assert_close(got, module(fed.fetch(index)))


@pytest.mark.parametrize("piece", [4096, 10])
def test_statistics_of_a_row_are_those_of_the_training_parts(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.local.oracles.network.FORWARD_SAMPLES", piece)
    sizes, ids = (7, 20, 50, 1), [2, 0, 3]
    fed, module = handwritten.federation(sizes), seeded(normalised)
    oracle = oracle_of(module, fed)
    row = torch.randn(oracle.layout.d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    oracle.set_statistics(row, torch.tensor(ids))
    part = oracle.layout.tree(row)
    mean, var, total = torch.zeros(5).double(), torch.zeros(5).double(), sum(sizes[i] for i in ids)
    for i in ids:
        for x in handwritten.samples(fed, i)[0].split(piece):
            h = functional.linear(x, part["fc.weight"], part["fc.bias"])
            mean += len(x) / total * h.mean(0)
            var += len(x) / total * (h.var(0) if len(x) > 1 else 0.0)
    some = handwritten.samples(fed, 1)[0]
    h = functional.linear(some, part["fc.weight"], part["fc.bias"])
    h = (h - mean) / (var + 1e-5).sqrt() * part["norm.weight"] + part["norm.bias"]
    expected = functional.linear(h.relu(), part["head.weight"], part["head.bias"])
    got = torch.cat(list(oracle.outputs(row, fed.indices("train", 1))))
    torch.testing.assert_close(got, expected, **TOLERANCE)


def test_a_resnet_with_batch_normalisation_trains() -> None:
    fed = handwritten.federation((3, 2), shape=(3, 8, 8), dtype=torch.float32)
    module = ResNet18().build((3, 8, 8), CLASSES)
    oracle = oracle_of(module, fed)
    row = oracle.layout.vector(module)
    assert descend(row, make_work(oracle, LocalSGD(lr=0.01), [0, 1])).isfinite().all()


# --------------------------------------------------------------------------------------------------------- randomness


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES)),
        lambda: nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, CLASSES)),
        FunctionalDropout,
    ],
)
def test_a_modules_own_randomness_comes_from_the_clients_seed(make: Callable[[], nn.Module]) -> None:
    fed, module = handwritten.federation(), seeded(make)
    oracle = oracle_of(module, fed)
    assert oracle.name == "loop"
    local = LocalSGD(lr=0.3, epochs=2)
    with torch.random.fork_rng():
        runs = []
        for poison in (1, 2):
            torch.default_generator.manual_seed(poison)  # noqa: TID251 (forked)
            before = torch.get_rng_state()
            runs.append(trained(oracle, local, module))
            assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(runs[0], runs[1])
    for i in range(M):
        alone = trained(oracle, local, module, [i])
        torch.testing.assert_close(alone[0], runs[0][i], **TOLERANCE)
    start = torch.cat([p.detach().reshape(-1) for p in module.parameters()]).double()
    twin = copy.deepcopy(module).double().train()
    torch.nn.utils.vector_to_parameters(start.clone(), twin.parameters())
    for i in range(M):  # one step, by hand
        x, y = handwritten.samples(fed, i)
        where = handwritten.positions(len(x), 20, 1, i, seed=2, round=3)[0]
        with torch.random.fork_rng():
            torch.set_rng_state(generator(2, 3, i, ("local", 0, "module")).get_state())
            g = torch.autograd.grad(handwritten.mean_loss(twin(x[where]), y[where]), list(twin.parameters()))
        one = trained(oracle, LocalSGD(lr=0.3, steps=1), module, [i])
        torch.testing.assert_close(one[0], start - 0.3 * torch.cat([v.reshape(-1) for v in g]), **TOLERANCE)


@pytest.mark.parametrize("case", ["mlp dropout", "cnn dropout"])
def test_no_oracle_touches_the_global_generator(case: str) -> None:
    problem = Problem(CASES[case])
    with torch.random.fork_rng():
        results = []
        for poison in (1, 2):
            torch.default_generator.manual_seed(poison)  # noqa: TID251 (forked)
            before = torch.get_rng_state()
            for name in oracles_of(problem):
                oracle = problem.oracle(name)
                work = make_work(oracle, LocalSGD(epochs=2))
                results.append((poison, name, descend(problem.start, work), work.full_grad(problem.x)))
            assert torch.equal(torch.get_rng_state(), before)
    half = len(results) // 2
    for (_, _, w, g), (_, _, w2, g2) in zip(results[:half], results[half:], strict=True):
        assert torch.equal(w, w2)
        assert torch.equal(g, g2)


def test_dropout_differs_between_clients_steps_streams_and_rounds() -> None:
    problem = Problem(CASES["mlp dropout"])
    oracle = problem.oracle("compiled")
    start = problem.x.expand(M, -1)
    base = make_work(oracle, LocalSGD(steps=1, batch_size="full"))

    def change(**options: object) -> Tensor:
        steps = options.pop("steps", 1)
        work = make_work(
            oracle, LocalSGD(steps=steps, batch_size="full"), **{k: v for k, v in options.items() if k != "stream"}
        )  # type: ignore[arg-type]
        return descend(start, work, stream=str(options.get("stream", "local")))

    one = descend(start, base)
    assert torch.equal(change(), one)
    for other in ({"stream": "other"}, {"seed": 7}, {"round": 2}):
        assert not torch.allclose(change(**other), one)
    twice = descend(one, base)
    assert not torch.allclose(change(steps=2), twice)


# -------------------------------------------------------------------------------------------------------------- chunks


@given(m=st.integers(1, 3000), limit=st.integers(1, 400))
def test_chunks_fit_and_come_in_fours_where_there_is_work(m: int, limit: int) -> None:
    k = chunk_count(m, limit)
    assert 1 <= k <= m
    longest = max(len(part) for part in torch.arange(m).tensor_split(k))
    assert longest <= limit
    if 4 * m <= limit:
        assert k == 1
    elif m < 16:
        assert k == 1 or -(-m // (k - 1)) > limit
    elif k < m:
        assert k % 4 == 0
        assert k == 4 or m / (k - 4) > limit


def test_the_limit_of_a_chunk_depends_on_model_and_dtype_only() -> None:
    narrow, wide = handwritten.federation(dtype=torch.float32), handwritten.federation()
    module = MLP(hidden=(200, 200)).build((6,), CLASSES)
    limit = chunk_limit(oracle_of(module, narrow))
    assert limit == chunk_limit(oracle_of(module, narrow, "vmap"))
    assert limit // 2 == chunk_limit(oracle_of(module, wide))
    assert chunk_limit(oracle_of(module, narrow, "loop")) == 1
