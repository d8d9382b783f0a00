"""Parts of a run beside a method: each has a neutral setting, which is the method itself, and others, which are not.

`test_matrix` plays every pair of a method and a part by name. Here every method has every kind of part, neutral and
not, and combinations of more parts are run, or refused because two of them are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from fedloom.algorithms import REGISTRY, PresetMethod, upload_fields
from fedloom.data.federation import Federation
from fedloom.engine.setting import Setting
from fedloom.engine.setup import check
from fedloom.engine.simulate import simulate
from fedloom.errors import Refused, Stop
from fedloom.local import LocalSGD
from fedloom.models import MLP

NEUTRAL: dict[str, dict[str, Any]] = {
    "sampler": {"sampler": {"kind": "round-robin", "clients": 3}},
    "weigher": {"aggregation_weights": {"kind": "equitable", "clusters": 1}},
    "mixer": {"personalized_aggregation": {"kind": "attention", "mixing_weight": 0.0}},
    "aggregator": {"aggregator": {"kind": "trimmed-mean", "f": 0}},
    "channel": {"upload_transform": {"kind": "top-k", "fraction": 1.0}},
    "attack": {"attack": {"kind": "same-value", "fraction": 0.0}},
    "weights": {"client_weights": "clusters-1"},
    "clusters": {"client_weights": "clusters-1 every 1"},
    "deadline": {"devices": "equal", "schedule": {"kind": "deadline", "seconds": 1e9}},
    "over-selection": {"devices": "lognormal", "schedule": {"kind": "over-selection", "factor": 1.0}},
    "buffered": {"devices": "equal", "schedule": {"kind": "buffered", "buffer": 3}},
}
EXACT = {"sampler", "mixer", "attack", "weights", "clusters", "deadline", "over-selection", "buffered"}
"""Parts whose neutral setting changes no bit; the others gather rows, or add what they had taken away."""
OTHER: dict[str, dict[str, Any]] = {
    "sampler": {"sampler": {"kind": "uniform", "clients": 2}},
    "weigher": {"aggregation_weights": {"kind": "equitable", "clusters": 2}},
    "mixer": {"personalized_aggregation": {"kind": "angles"}},
    "aggregator": {"aggregator": "median"},
    "channel": {"upload_transform": {"kind": "top-k", "fraction": 0.1, "error_feedback": False}},
    "attack": {"attack": {"kind": "same-value", "fraction": 0.34, "variance": 1.0}},
    "weights": {"client_weights": (1.0, 2.0, 5.0)},
    "clusters": {"client_weights": "clusters-2 every 1"},
    "deadline": {"devices": {"kind": "lognormal", "spread": 10.0}, "schedule": {"kind": "deadline", "seconds": 5.0}},
    "over-selection": {"devices": "lognormal", "schedule": {"kind": "over-selection", "factor": 1.5}},
    "buffered": {"devices": "lognormal", "schedule": {"kind": "buffered", "buffer": 1}},
    "asynchronous": {"devices": "equal", "schedule": {"kind": "asynchronous"}},
}
QUICK = {"fedavg", "flame", "fedslr", "fiaelt"}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedbn": {"layers": ("head.bias",)},
    "fedrep": {"head_epochs": 1},
    "fiaelt": {"beta": 2.0, "smooth": 0.4},
    "ifca": {"clusters": 2},
    "lp-proj": {"dim": 4},
    "admm-lp-proj": {"dim": 4},
}
BY_SHARES = {"weights", "clusters"}
UNMOVED = {
    "fedproto": {"attack"},  # prototypes of one value are as far from all features
    **dict.fromkeys(("fedfomo", "fedskip", "fedacs", "fedamp", "heurfedamp"), BY_SHARES),  # no mean by shares
    **dict.fromkeys(("equitable-fl", "fairfed"), BY_SHARES),  # their weighers take the place of shares
    **dict.fromkeys(("clustered-sampling", "power-of-choice"), BY_SHARES),  # cohorts drawn by samples count alike
    "local": {"sampler", "attack", "weights"},  # nothing is sent
}
"""Parts that change no model of a method, with the reason."""


@pytest.fixture(scope="module")
def fed() -> Federation:
    clients = []
    for k in range(3):
        x = torch.randn(16, 4, generator=Generator().manual_seed(k))
        y = ((x[:, k] > 0).long() + (x[:, 3] > 0)).long()
        clients.append(((x[:12], y[:12]), (x[12:], y[12:])))
    return Federation.create(clients)


COMMON: dict[str, Any] = {
    "model": MLP(hidden=(3,)),
    "rounds": 2,
    "client_weights": "uniform",
    "sampler": {"kind": "uniform", "fraction": 1.0},
    "local": LocalSGD(lr=0.2, steps=2, batch_size=4),
    "evaluate": {"every": 2, "parts": ("validation",)},
    "engine": {"dtype": "float64"},
}


@cache
def method(name: str) -> Any:
    return REGISTRY[name](**OPTIONS.get(name, {}))


def models(fed: Federation, name: str, parts: Mapping[str, Any]) -> list[Tensor]:
    """The server's state, what clients keep and what the server keeps of them, after two rounds."""
    result = simulate(method(name), fed, **{**COMMON, **parts})
    assert result.stop is Stop.DONE, result.detail
    everyone = torch.arange(result.job.n)
    return [*result.state.server, *result.job.clients.read(everyone), *result.job.kept.read(everyone)]


def refused(fed: Federation, name: str, parts: Mapping[str, Any]) -> bool:
    try:
        check(Setting.create(method(name), **{**COMMON, **parts}), fed)
    except Refused:
        return True
    return False


def same(a: list[Tensor], b: list[Tensor], within: float) -> bool:
    return all(torch.allclose(v, w, rtol=0, atol=within, equal_nan=True) for v, w in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in REGISTRY if n != "centralized"]
)
def test_every_part_has_a_neutral_setting_and_others_that_act(fed: Federation, name: str) -> None:
    bare, made = models(fed, name, {}), method(name)
    brought = {p for p in ("sampler", "weigher") if isinstance(made, PresetMethod) and getattr(made, p) is not None}
    if getattr(made, "mixes", False) or "weigher" in brought:
        brought.add("aggregator")  # mixtures and a weigher's mean are weighed, what is left of them by a rule is not
    for part in OTHER.keys() - brought:
        if part in NEUTRAL and not refused(fed, name, NEUTRAL[part]):
            neutral = models(fed, name, NEUTRAL[part])
            assert same(neutral, bare, 0.0 if part in EXACT else 1e-9), part
        if not refused(fed, name, OTHER[part]) and part not in UNMOVED.get(name, set()):
            assert not same(models(fed, name, OTHER[part]), bare, 1e-9), part


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in REGISTRY if n != "centralized"]
)
def test_a_part_that_is_what_a_method_does_anyway_changes_no_bit(fed: Federation, name: str) -> None:
    bare, made = models(fed, name, {}), method(name)
    parts: list[dict[str, Any]] = [{"aggregator": "mean"}, {"upload_transform": {"kind": "top-k", "fraction": 1.0}}]
    if not isinstance(made, PresetMethod) or made.weigher is None:
        parts.append({"aggregation_weights": "shares"})
    for part in parts:
        if not refused(fed, name, part):
            within = 1e-9 if "upload_transform" in part and uploads_models(made) else 0.0
            assert same(models(fed, name, part), bare, within), part


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in REGISTRY if n != "centralized"]
)
def test_all_neutral_parts_together_change_no_bit(fed: Federation, name: str) -> None:
    bare, made, parts = models(fed, name, {}), method(name), dict[str, Any]()
    for part in sorted(EXACT - {"over-selection", "buffered"}):
        if getattr(made, part, None) is None and not refused(fed, name, parts | NEUTRAL[part]):
            parts |= NEUTRAL[part]
    assert same(models(fed, name, parts), bare, 0.0), parts


def uploads_models(made: Any) -> bool:
    """Whether a channel takes what the client received from the upload, and adds it again, which rounds."""
    algorithm = made.algorithm if isinstance(made, PresetMethod) else made
    return any(field.primary and field.base == "zero" for field in upload_fields(type(algorithm)).values())


LEVELS: dict[str, list[dict[str, Any]]] = {
    "sampler": [{}, {"sampler": {"kind": "clustered"}}, {"sampler": {"kind": "power-of-choice", "clients": 2}}],
    "aggregation_weights": [
        {},
        {"aggregation_weights": {"kind": "fairfed"}},
        {"aggregation_weights": {"kind": "equitable", "clusters": 2}},
    ],
    "personalized_aggregation": [
        {},
        {"personalized_aggregation": {"kind": "attention", "among": "all"}},
        {"personalized_aggregation": {"kind": "clusters", "clusters": 2}},
    ],
    "aggregator": [{}, {"aggregator": "median"}, {"aggregator": {"kind": "private-mean", "sigma": 0.1}}],
    "upload_transform": [
        {},
        {"upload_transform": "top-k"},
        {"upload_transform": {"kind": "gaussian-noise", "sigma": 0.01}},
    ],
    "attack": [{}, {"attack": {"kind": "sign-flip", "fraction": 0.34}}, {"attack": {"kind": "flipped-labels"}}],
    "client_weights": [{}, {"client_weights": "clusters-2"}, {"client_weights": "clusters-2 every 1"}],
    "schedule": [
        {},
        {"devices": "equal", "schedule": {"kind": "deadline", "seconds": 1e9}},
        {"devices": "equal", "schedule": {"kind": "buffered", "buffer": 3, "concurrency": 3}},
    ],
}


def covering(factors: list[int], strength: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Rows of levels in which every choice of so many factors has every combination: greedily, the best of 20 draws."""
    places = list(itertools.combinations(range(len(factors)), strength))
    left = {(p, levels) for p in places for levels in itertools.product(*(range(factors[i]) for i in p))}
    rows = list[tuple[int, ...]]()

    def gained(row: tuple[int, ...]) -> set[Any]:
        return {(p, tuple(row[i] for i in p)) for p in places} & left

    while left:
        p, levels = next(iter(left))
        draws = rng.integers(0, factors, (20, len(factors)))
        draws[:, list(p)] = levels
        row = max((tuple(draw.tolist()) for draw in draws), key=lambda row: len(gained(row)))
        left -= gained(row)
        rows.append(row)
    return rows


def test_a_covering_array_covers() -> None:
    rows = covering([4, 3, 2, 3], 3, np.random.default_rng(0))
    for places in itertools.combinations(range(4), 3):
        assert len({tuple(row[i] for i in places) for row in rows}) == np.prod([[4, 3, 2, 3][i] for i in places])


@pytest.mark.slow
def test_every_three_choices_run_or_two_of_them_are_refused(fed: Federation) -> None:
    """Triples of method, parts and shares: none fails, and none is refused for what two of them are not."""
    names = [
        *sorted(QUICK),
        "ditto",
        "fedacs",
        "scaffold",
        "ifca",
        "local",
        "fedrep",
        "lp-proj",
        "fedfomo",
        "pfedfda",
        "cfl",
    ]  # one of every kind
    for row in covering([len(names), *map(len, LEVELS.values())], 3, np.random.default_rng(0)):
        name, chosen = names[row[0]], [LEVELS[part][k] for part, k in zip(LEVELS, row[1:], strict=True)]
        parts = [part for part in chosen if part]
        try:
            models(fed, name, {key: value for part in parts for key, value in part.items()})
        except Refused:
            pairs = itertools.chain(([a] for a in parts), itertools.combinations(parts, 2))
            assert any(refused(fed, name, {k: v for part in pair for k, v in part.items()}) for pair in pairs), row
