"""The table of the system: every combination in it is one that runs."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from fedloom.engine.setup import check
from fedloom.experiment import parse

SCRIPT = Path(__file__).parents[2] / "studies" / "scripts" / "system"


@pytest.fixture(scope="module")
def system() -> Any:
    loader = SourceFileLoader("system_table", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_every_combination_of_the_table_runs(system: Any) -> None:
    recipe = system.table_recipe("groups")
    assert [*recipe.variants] == ["groups", "groups, sign flip", "groups, label poisoning"]
    document = recipe.at("full")["groups, sign flip"]
    methods = [{k: v for k, v in method.items() if k != "choose"} for method in document["method"]]
    experiment = parse({k: v for k, v in document.items() if k != "choose"} | {"method": methods}, "system")
    fed = experiment.partition(experiment.source.read(None), 0)
    for method in experiment.methods:
        check(method.setting, fed)
    assert {len(method["choose"]["local.lr"]) for method in document["method"]} == {4}  # equal trials


@pytest.mark.slow
def test_the_table_is_made_at_smoke_scale(system: Any, tmp_path: Path) -> None:
    text = system.main(["--smoke"], tmp_path)
    rows = [line for line in text.splitlines() if line.startswith("| flame")]
    assert len(rows) == 5
    assert all(float(row.split("|")[2]) >= 0 for row in rows)
    assert (tmp_path / "table.md").read_text() == text
