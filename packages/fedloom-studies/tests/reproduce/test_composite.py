"""The benchmark of composite methods, and the pages of it and of the costs per gradient."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.data.problems import LowRank, SparseLogistic
from fedloom.rows.layout import Layout
from fedloom.rows.proxes import L1, Nuclear

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "studies" / "pages" / "composite.md"


@pytest.fixture(scope="module")
def composite() -> Any:
    return load_module(ROOT / "studies" / "benchmarks" / "composite.py")


def load_module(path: Path) -> Any:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "penalty", "components"), [(SparseLogistic(penalty=0.02), L1, "s+s"), (LowRank(), Nuclear, "lr+lr")]
)
def test_one_round_takes_no_method_to_the_optimum(
    composite: Any, source: Any, penalty: Any, components: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composite, "STEPS", (0.1,))
    fed = fl.partitions.natural(validation=0.0, test=0.0)(source.load(), seed=0)
    rows = composite.rows_of(fed, penalty, source.penalty, components, rounds=1)
    assert len({row.method for row in rows}) == len(rows) == 9
    assert all(row.kkt > composite.REACHED and 0 < row.distance < 2 for row in rows)
    assert composite.finding("x", rows).startswith("No methods reach the optimum of x (KKT residual below 1e-8).")


def test_the_optimum_is_a_fixed_point_of_every_proximal_step(composite: Any) -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).double()
    layout = Layout.create(torch.nn.Linear(3, 1, bias=False))
    problem = composite.Composite(x, (x[:, :1] > 0.1).double(), L1, 0.1, layout)
    optimum = problem.optimum(0.5)
    assert all(problem.kkt(optimum, step) < 1e-8 for step in (0.1, 1.0, 3.0))
    assert problem.kkt(optimum + 0.01) > 1e-3


def test_the_sentences_of_the_page_are_true_of_its_tables() -> None:
    text = PAGE.read_text()
    tables = text.split("\n## ")[1:]
    sentences = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(sentences) == len(tables) == 2
    for sentence, table in zip(sentences, tables, strict=True):
        cells = [
            [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")
        ]
        there = [row[0] for row in cells[1:] if float(row[4]) < 1e-8]
        away = [f"{row[0]} ({float(row[2]):.2g} after {row[5]} passes)" for row in cells[1:] if row[0] not in there]
        reached, _, left = sentence.partition(" The other methods end at a relative distance from the optimum: ")
        assert reached.startswith(f"- {', '.join(there)} reach the optimum of ")
        assert left == f"{', '.join(away)}."


def test_the_page_of_costs_names_the_operations_of_exactly_the_methods_above_the_limit() -> None:
    methods = load_module(ROOT / "benchmarks" / "methods.py")
    found = json.loads(methods.RESULTS_FILE.read_text())
    text = methods.PAGE_FILE.read_text()
    assert text == methods.render_page(found)
    ratios = {
        name: max(row["ratio"] - row["forward"] / 3 for rows in found.values() for row in rows if row["method"] == name)
        for name in {row["method"] for rows in found.values() for row in rows if not row.get("reason")}
    }
    table = text.split("| method | additional arithmetic |")[1].split("##")[0].splitlines()[2:]
    terms = dict(line.strip("| ").split(" | ") for line in table if line)
    assert terms.keys() == {name for name, ratio in ratios.items() if ratio > 1.3}
    assert all(ratios[name] < 1.56 for name, term in terms.items() if term == methods.NOISE_TERM)  # 20 % of noise
