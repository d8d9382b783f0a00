"""``settings = "paper"`` takes the papers' constants, transcribed by hand with the place; others may be derived."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
from annotated_types import Ge, Gt, Interval, Le, Lt
from method_rows import PAPERS
from pydantic.fields import FieldInfo

from fedloom.algorithms import FIAELT, FLAME, REGISTRY, FedSLR, Preset
from fedloom.errors import ConfigError
from fedloom.lab.experiment import parse
from fedloom.local import Ctx, LocalSGD
from fedloom.rows.layout import Layout


def options_of(name: str) -> dict[str, FieldInfo]:
    entry = REGISTRY[name]
    return entry.options if isinstance(entry, Preset) else dict(entry.model_fields)


def default_of(name: str, option: str) -> Any:
    made = REGISTRY[name](defaults="paper")
    parts = [part for part in made[:3] if part] if isinstance(made, tuple) else [made]
    return next(getattr(part, option) for part in parts if option in type(part).model_fields)


def test_the_table_has_every_method() -> None:
    assert sorted(PAPERS) == sorted(REGISTRY)


@pytest.mark.parametrize("name", REGISTRY)
def test_paper_settings_are_the_papers(name: str) -> None:
    want = {option: value for option, (value, _) in PAPERS[name].items()}
    assert {option: default_of(name, option) for option in options_of(name)} == want


def contexts() -> list[Ctx]:
    """Runs of other lengths, step sizes and federations, down to one client with one sample."""
    layout = Layout.create_from_shapes({"w": (7,)})
    runs = [(0.05, 1, 60, [80, 40, 20]), (0.5, 5, 3, [7]), (1e-3, 1, 1000, [1]), (0.1, 0, 1, [300, 2])]
    return [
        Ctx(
            0, len(sizes), len(sizes), torch.arange(len(sizes)), layout, torch.full((len(sizes), 1), 1 / len(sizes)),
            torch.tensor(sizes)[:, None], None, LocalSGD(lr=lr, epochs=epochs), 0, rounds,
        )
        for lr, epochs, rounds, sizes in runs
    ]  # fmt: skip


@pytest.mark.parametrize("name", REGISTRY)
def test_what_is_derived_is_in_range_and_given_values_stay(name: str) -> None:
    made = REGISTRY[name]()
    method = made.algorithm if isinstance(made, tuple) else made
    for ctx in contexts():
        derived = method.derived(ctx)
        settled = method.derive_options(ctx)
        assert {key: getattr(settled, key) for key in derived} == derived
        assert settled.derive_options(ctx) == settled
        given = method.with_(**{key: value if isinstance(value, str) else 0.7 for key, value in derived.items()})
        assert given.derive_options(ctx) == given


@pytest.mark.parametrize("name", REGISTRY)
def test_pulls_follow_the_length_of_a_round(name: str) -> None:
    """Twice the step size, or twice the epochs, is twice the reach: what is derived sees no other difference."""
    made = REGISTRY[name]()
    method = made.algorithm if isinstance(made, tuple) else made
    ctx = contexts()[0]
    twice = [ctx._replace(local=LocalSGD(lr=0.1, epochs=1)), ctx._replace(local=LocalSGD(lr=0.05, epochs=2))]
    assert [c.reach for c in twice] == pytest.approx([2 * ctx.reach] * 2)
    if name not in ("fedadmm-inexact", "perfedavg", "fedbabu"):  # full gradients; a step, no pull; epochs
        both = [{k: v for k, v in method.derived(c).items() if not isinstance(v, str)} for c in twice]
        assert both[0] == pytest.approx(both[1])


@pytest.mark.parametrize(
    ("local", "optimiser"),
    [(LocalSGD(lr=0.05, epochs=3, momentum=m), partial(torch.optim.SGD, momentum=m)) for m in (0.0, 0.5, 0.9)]
    + [
        (LocalSGD(lr=0.05, epochs=3, optimizer="torch.optim:SGD", optimizer_options=o), partial(torch.optim.SGD, **o))
        for o in (
            {"momentum": 0.9},
            {"momentum": 0.9, "dampening": 0.3},
            {"momentum": 0.9, "dampening": 1.0},
            {"momentum": 0.9, "nesterov": True},
            {"dampening": 0.5},
        )
    ]
    + [
        (LocalSGD(lr=0.05, epochs=3, optimizer="adam", optimizer_options=o), partial(torch.optim.Adam, **o))
        for o in ({}, {"betas": (0.5, 0.99)}, {"betas": (0.0, 0.9), "amsgrad": True})
    ],
)
def test_the_length_of_a_round_is_how_far_it_goes_on_a_steady_gradient_of_norm_one(
    local: LocalSGD, optimiser: Callable[..., torch.optim.Optimizer]
) -> None:
    ctx, times = contexts()[0]._replace(local=local), []
    d = ctx.layout.d
    for size in ctx.sizes[:, 0].tolist():
        x = torch.zeros(d, requires_grad=True)
        x.grad = torch.full((d,), d**-0.5)
        steps = optimiser([x], lr=local.lr)
        for _ in range(3 * local.batches(size)):
            steps.step()
        times.append(float(x.detach().norm() / x.grad.norm()))
    assert ctx.reach == pytest.approx(sum(times) / len(times), rel=1e-5)


@pytest.mark.parametrize("name", REGISTRY)
def test_momentum_derives_the_same_defaults_by_both_spellings(name: str) -> None:
    made = REGISTRY[name]()
    method = made.algorithm if isinstance(made, tuple) else made
    ctx = contexts()[0]
    key = LocalSGD(lr=0.05, epochs=3, momentum=0.9)
    option = LocalSGD(lr=0.05, epochs=3, optimizer="torch.optim:SGD", optimizer_options={"momentum": 0.9})
    derived = [method.derived(ctx._replace(local=local)) for local in (key, option)]
    assert derived[0] == derived[1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"momentum": 1.0}, "momentum must be a number from 0 to less than 1, got 1.0"),
        ({"momentum": "0.9"}, "momentum must be a number from 0 to less than 1, got '0.9'"),
        ({"momentum": 0.5, "dampening": 1.5}, "dampening must be a number from 0 to 1, got 1.5"),
    ],
)
def test_momentum_among_the_options_has_its_range(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LocalSGD(optimizer="torch.optim:SGD", optimizer_options=options)


@pytest.mark.parametrize("name", REGISTRY)
def test_a_multiple_is_one_of_what_is_derived(name: str) -> None:
    made = REGISTRY[name]()
    method = made.algorithm if isinstance(made, tuple) else made
    ctx = contexts()[0]
    for option, rule in method.derived(ctx).items():
        if isinstance(rule, str):
            continue
        twice = method.with_(**{option: "2x"})
        assert getattr(twice.derive_options(ctx), option) == pytest.approx(2 * rule)
        words = {key: word for key, word in method.derived(ctx).items() if isinstance(word, str)}
        assert twice.derive_options(ctx) == method.with_(**{option: 2 * rule}, **words).derive_options(
            ctx
        )  # what follows follows
        assert type(twice).model_validate(twice.model_dump()) == twice
        assert method.with_(**{option: "1x"}) == method
        for wrong in ("0x", "-1x", "x", "2"):
            with pytest.raises(ConfigError, match="must be a number, or a multiple"):
                method.with_(**{option: wrong})


def test_a_multiple_of_what_is_not_derived_is_refused() -> None:
    with pytest.raises(ConfigError, match="with these options, beta has no derived value"):
        FIAELT(solver="svrg", beta="2x").derive_options(contexts()[0])


def test_released_settings_are_those_of_the_public_codes() -> None:
    """With the place in the code: zsk66/FLAME 215a04b2, huangtiansheng/fedslr 35dc740c, Peiran225/FIAELT 4ea7069b."""
    flame = FLAME(lam=1.0, rho=0.1, centre="received", dual="epoch")  # options.py:26-27, update.py:98, 171-175
    assert FLAME(defaults="released") == flame
    assert FLAME(defaults="released", dual="round") == flame.with_(dual="round")
    fedslr = FedSLR(eta_g=10.0, personal_start="model", personal_decay="component")  # mask_component_bi.py:27
    assert FedSLR(defaults="released") == fedslr
    assert FIAELT(defaults="released") == FIAELT(solver="released")
    for name in ("fedacs", "fedavg", "fairfed"):
        with pytest.raises(ValueError, match="this method has no released code, so"):
            REGISTRY[name](defaults="released")


def test_settings_are_default_paper_or_released() -> None:
    assert FLAME(defaults="paper") == FLAME(lam=1.0, rho=0.1)
    assert FLAME(defaults="paper", lam=2.0) == FLAME(lam=2.0, rho=0.1)
    assert FLAME(defaults="default") == FLAME()
    for entry in (FLAME, REGISTRY["fairfed"]):
        with pytest.raises(ValueError, match="defaults must be 'default', 'paper' or 'released'"):
            entry(defaults="papers")


def test_one_word_takes_the_papers_constants_of_every_method_of_a_file() -> None:
    methods = [
        {"algorithm": "flame"},
        {"algorithm": "feddr", "defaults": "default"},
        {"algorithm": "fedprox", "mu": 3.0},
    ]
    read = parse({"data": {"source": "digits"}, "defaults": "paper", "method": methods}).methods
    made = [method.setting.algorithm for method in read]
    assert made == [FLAME(defaults="paper"), REGISTRY["feddr"](), REGISTRY["fedprox"](mu=3.0)]


@pytest.mark.parametrize("name", REGISTRY)
def test_every_option_says_what_it_is(name: str) -> None:
    for option, field in options_of(name).items():
        assert field.description, f"{name}.{option} has no description"
        assert field.description.strip() == field.description


@pytest.mark.parametrize("name", REGISTRY)
def test_every_number_has_a_range(name: str) -> None:
    """A number below its range, infinity and NaN are refused; so is an option that does not exist."""
    for option, field in options_of(name).items():
        kinds = {field.annotation, *get_args(field.annotation)}
        if kinds & {int, float}:
            bounds = (Ge, Gt, Le, Lt, Interval)
            inner = [m for a in kinds for m in getattr(a, "__metadata__", ())]
            assert any(isinstance(m, bounds) for m in (*field.metadata, *inner)), f"{name}.{option} has no range"
            for wrong in (-1e9, float("inf"), float("nan")):
                with pytest.raises(ConfigError):
                    REGISTRY[name](**{option: wrong})
    with pytest.raises(ValueError, match="no_such_option"):
        REGISTRY[name](no_such_option=1)
