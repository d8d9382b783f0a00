"""Every method of the registry obeys every law and ends where its paper says: `method_rows.ROWS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from method_rows import ROWS, Models, Row, Weights

from fedloom.algorithms import REGISTRY, PresetMethod
from fedloom.testing import METHOD_LAWS, Problem, check_law, federate, laws_of, personal_models
from fedloom.testing.federate import ReferenceFederation
from fedloom.testing.laws import check_network
from fedloom.testing.network import Classifier


def composition(name: str, options: Mapping[str, Any]) -> PresetMethod:
    made = REGISTRY[name](**options)
    return made if isinstance(made, PresetMethod) else PresetMethod(made)


def end_of(c: PresetMethod, row: Row, weights: Weights) -> tuple[Problem, Models]:
    p = row.problem(weights)
    played = p.pooled() if c.pooled else p
    run = federate(c.algorithm, played, row.rounds, local=row.local, solve=row.solve, weigher=c.weigher)
    x = c.algorithm.global_model(run[-1].server)
    v = personal_models(c.algorithm, ReferenceFederation(played.oracle(), played.alpha, row.local), run[-1])
    return p, {name: model for name, model in (("global", x), ("personal", v)) if model is not None}


def test_every_method_has_a_row() -> None:
    assert sorted(ROWS) == sorted(REGISTRY)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("name", REGISTRY)
def test_fixed_point(name: str, weights: Weights) -> None:
    row = ROWS[name]
    p, end = end_of(composition(name, row.options), row, weights)
    want = row.limit(p, end)
    assert want.keys() == end.keys()
    for which, model in want.items():
        torch.testing.assert_close(end[which], model, rtol=0, atol=1e-9)


CASES = [(name, o) for name in REGISTRY for o in ((ROWS[name].lean, *ROWS[name].variants) if name in ROWS else ({},))]


@pytest.mark.parametrize("law", METHOD_LAWS)
@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{n}{dict(o) or ''}" for n, o in CASES])
def test_law(name: str, options: Mapping[str, Any], law: str) -> None:
    made = composition(name, options)
    if law in laws_of(made, ROWS[name].without if name in ROWS else ()):
        check_law(law, made)


NETWORK = Classifier.create()
ROUGH = {"fiaelt": "its curvature is a difference of gradients, which float32 rounds"}


@pytest.mark.parametrize("name", REGISTRY)
def test_laws_on_a_network(name: str) -> None:
    row = ROWS.get(name)
    without = {*(row.without if row else ()), *(("precision",) if name in ROUGH else ())}
    check_network(composition(name, row.lean if row else {}), None, without, NETWORK)
