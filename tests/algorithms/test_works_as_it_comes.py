"""Every method works with its defaults on small federations: it learns, at a fair price, as its card says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from as_it_comes import ALL, CASES, EXCUSED, HELD_OUT, KNOWN, ROUNDS, judged, measure

from fedloom.algorithms import REGISTRY
from fedloom.errors import DataError
from fedloom.experiment.cards import text

DATA = Path(__file__).resolve().parents[2] / "studies" / "data"


def test_the_held_out_runs_are_judged_as_recorded() -> None:
    """Every method on every federation; a break is known with its reason."""
    found = json.loads((DATA / "held-out.json").read_text())
    rows = {(row["method"], row["case"]): row for row in found["rows"]}
    assert list(rows) == [(m, case) for m in REGISTRY for case in HELD_OUT]
    assert {key for key, row in rows.items() if row["broken"]} == set(KNOWN)
    assert found["rows"] == [judged(row) for row in found["rows"]]


def test_the_recorded_runs_are_whole_and_keep_the_law() -> None:
    """Every method on every federation, all of them at one commit; judged anew, not as the file says."""
    found = json.loads((DATA / "defaults.json").read_text())
    commits = {name: {row["commit"] for row in found["rows"] if row["method"] == name} for name in REGISTRY}
    assert all(len(at) == 1 and re.fullmatch(r"[0-9a-f]{12}", *at) for at in commits.values()), commits
    assert found["rounds"] == ROUNDS
    assert [(row["method"], row["case"]) for row in found["rows"]] == [(m, case) for m in REGISTRY for case in CASES]
    assert {(row["method"], row["case"]): row["broken"] for row in found["rows"] if row["broken"]} == {}
    assert found["rows"] == [judged(row) for row in found["rows"]]


@pytest.mark.parametrize("name", EXCUSED)
def test_what_excuses_a_method_stands_on_its_card(name: str) -> None:
    assert "of which a run warns" in text(REGISTRY[name]).replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("name", REGISTRY)
def test_default_obeys_the_law(name: str, case: str) -> None:
    try:
        ALL[case].make()
    except DataError as error:
        pytest.skip(f"its data are not here: {error}")
    found = judged(measure(name, case))["broken"]
    assert bool(found) == ((name, case) in KNOWN), found
