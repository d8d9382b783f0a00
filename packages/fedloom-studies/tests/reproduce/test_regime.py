"""Anchors: how far runs are from the papers', and what is judged of those that are far; rivals of another record."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from small_recipe import tiny

from fedloom_studies.reproduce import looks, papers, read_recipes
from fedloom_studies.reproduce.page import last_summary
from fedloom_studies.reproduce.papers import papers_overview, read_paper_sections
from fedloom_studies.reproduce.recipe import Recipe
from fedloom_studies.reproduce.regime import MAX_ANCHOR_DISTANCE, farthest_anchors, is_different_regime
from fedloom_studies.reproduce.summary import RecipeSummary, add_rivals
from fedloom_studies.store import CHECKOUT_FOLDER

RESULTS = Path(__file__).parents[4] / CHECKOUT_FOLDER
KNOWN = read_recipes()
RECORDED = {name: last_summary(recipe, RESULTS) for name, recipe in KNOWN.items()}


def summary_of(recipe: Recipe, personal: float) -> RecipeSummary:
    """A record of five seeds, in which personal models are a point around a mean."""
    some = RECORDED["fedacs-table1"]
    assert some is not None
    values: dict[str, float | None] = {str(k): personal + 0.01 * (k - 2) for k in range(5)}
    numbers = {"few": {"flame: personal: accuracy": values}}
    return replace(some, recipe="tiny", scale="full", protocol=recipe.protocol("full"), numbers=numbers)


@pytest.mark.parametrize(("ours", "far"), [(0.9, False), (0.81, False), (0.99, False), (0.79, True), (0.3, True)])
def test_a_run_is_in_another_regime_where_an_anchor_is_more_than_ten_points_off(ours: float, far: bool) -> None:
    """The recipe's own cell is 0.9."""
    one = tiny()
    (anchor,) = found = farthest_anchors(["flame: personal"], "tiny", {"tiny": one}, {"tiny": summary_of(one, ours)})
    assert anchor.gap == pytest.approx(ours - 0.9)
    assert is_different_regime(found) == far
    assert not farthest_anchors(
        ["fedavg: global"], "tiny", {"tiny": one}, {"tiny": summary_of(one, ours)}
    )  # none is printed
    assert not farthest_anchors(["flame: personal"], "tiny", {"tiny": one}, {})
    assert not is_different_regime([])


def test_fedacs_and_fedslr_are_judged_by_the_same_rule() -> None:
    judged: dict[str, set[object]] = {}
    for sheet in read_paper_sections():
        for row in sheet.row:
            for names in (row.published, row.fair):
                cell = papers._claim_cell(KNOWN, RECORDED, sheet, row, names)
                far = [n for n in names if is_different_regime(papers._paper_anchors(KNOWN, RECORDED, sheet, n))]
                assert (cell.reason == looks.UntestedReason.REGIME) == (bool(names) and len(far) == len(names)), (
                    row.text
                )
                if far:
                    judged.setdefault(sheet.name, set()).update(far)
                    assert cell.recipe not in far or cell.number == ""
    assert "fedacs-figure1-cifar-10-500-clients" in judged["FedACS"]
    assert "fedslr-table1-published-reduced" in judged["FedSLR"]
    assert MAX_ANCHOR_DISTANCE == 0.1


def test_every_row_states_its_anchors_or_that_none_is_printed() -> None:
    text = papers_overview(KNOWN, RECORDED, {})
    for sheet in read_paper_sections():
        printed = any(
            cell is not None
            for name in {n for row in sheet.row for n in (*row.published, *row.fair)}
            for row_of in KNOWN[sheet.anchored.get(name, name)].paper.cells.values()
            for reference, cell in zip(
                KNOWN[sheet.anchored.get(name, name)].paper.columns.values(), row_of, strict=False
            )
            if reference in sheet.anchor
        )
        rows = [next(line for line in text.splitlines() if line.startswith(f"| {row.text} |")) for row in sheet.row]
        titles = {title for one in KNOWN.values() for title, of in one.paper.columns.items() if of in sheet.anchor}
        stated = [bool(re.search(rf"({'|'.join(titles)}) [+-]\d", row.split(" | ")[1])) for row in rows if titles]
        assert all(one or papers.NO_ANCHOR_TEXT in row.split(" | ")[1] for one, row in zip(stated, rows, strict=False))
        assert printed == any(stated), sheet.name


def test_rivals_come_from_the_record_of_the_same_experiment_alone() -> None:
    lent = {name: one for name, one in KNOWN.items() if one.paper.rivals}
    assert len(lent) > 2
    for name, one in lent.items():
        other = KNOWN[one.paper.rivals]
        for scale in ("laptop", "full"):
            for variant, document in one.make_documents(scale).items():
                beside = other.make_documents(scale)[variant]
                assert {k: v for k, v in document.items() if k not in ("method", "name", "choose")} == {
                    k: v for k, v in beside.items() if k not in ("method", "name", "choose")
                }, name
    name = "fiaelt-femnist-server-start-reduced"
    full = RECORDED[name]
    assert full is not None
    own = {key: by for key, by in full.numbers["FEMNIST"].items() if key.startswith("fiaelt, beta 1, server start")}
    bare = replace(full, numbers={"FEMNIST": own})
    assert add_rivals(KNOWN[name], bare, RESULTS).numbers == full.numbers
    assert "fedavg: global: accuracy/weighted" in full.numbers["FEMNIST"]
    changed = replace(KNOWN[name], document=KNOWN[name].document | {"rounds": 7})
    assert add_rivals(changed, bare, RESULTS).numbers == bare.numbers
    assert add_rivals(KNOWN["fedacs-table1"], bare, RESULTS) is bare
