"""Every method works with its defaults on three small federations: it learns, at a fair price, as its card says."""

from __future__ import annotations

import pytest
from as_it_comes import CASES, broken, family_of, measure, models

from fedloom.algorithms import REGISTRY
from fedloom.data.sources import load
from fedloom.errors import DataError
from fedloom.rows.prox import L1


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", REGISTRY)
def test_default_obeys_the_law(name: str, case: str) -> None:
    if case == "hospitals":
        try:
            load("heart")
        except DataError:
            pytest.skip("the hospitals' table is not here")
    assert broken(measure(name, case)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in REGISTRY if family_of(name) == "composite"])
def test_a_regulariser_makes_a_composite_method_sparse(name: str) -> None:
    method = REGISTRY[name](regulariser=L1(c=0.01))
    sparse, dense = (models(CASES["digits"].run(m))["global"] for m in (method, REGISTRY[name]()))
    assert (sparse == 0).sum() > (dense == 0).sum() + 0.05 * sparse.numel()
