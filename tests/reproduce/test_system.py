"""The table of the system: every combination in it is one that runs."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from fedloom.engine.setup import check
from fedloom.experiment import parse
from fedloom_studies.reproduce.choices import candidates, first

SCRIPT = Path(__file__).parents[2] / "studies" / "scripts" / "system"


@pytest.fixture(scope="module")
def system() -> Any:
    loader = SourceFileLoader("system_table", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_every_row_of_the_table_runs_after_equal_trials(system: Any) -> None:
    recipe = system.federation_recipes()["groups"]
    assert [*recipe.variants] == ["groups", "groups, sign flip", "groups, label poisoning"]
    for document in recipe.at("smoke").values():
        experiment = parse(first(document), "system")
        fed = experiment.partition(experiment.source.read(None), 0)
        for method in experiment.methods:
            check(method.setting, fed)
        assert {len(candidates(method)) for method in document["method"]} == {8}
