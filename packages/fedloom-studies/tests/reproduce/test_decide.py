"""The frozen list of open claims, and adding seeds to a record with the settings that it chose."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from small_recipe import TINY, tiny

from fedloom_studies import decide
from fedloom_studies.reproduce import read_recipes, reproduce
from fedloom_studies.reproduce import summary as summaries
from fedloom_studies.reproduce.looks import LOOK_LEVELS
from fedloom_studies.reproduce.papers import read_paper_sections
from fedloom_studies.reproduce.recipe import make_recipe, merge_tables

CELLS = {
    f"{sheet.name} | {row.text} | {protocol}": getattr(row, protocol)
    for sheet in read_paper_sections()
    for row in sheet.row
    for protocol in ("published", "fair")
}


def test_every_claim_of_the_list_is_a_headline_claim_and_stands_in_it_once() -> None:
    experiments, left = decide.read_decisions()
    named = [claim for one in (*experiments, *left) for claim in one.claims]
    assert len(named) == len(set(named)) == 51
    assert set(named) <= CELLS.keys()
    for one in experiments:
        assert one.recipe in read_recipes()
        assert {*one.looks} <= {n for n, _ in LOOK_LEVELS}
        assert max(one.looks) == one.seeds
        for claim in one.claims:
            assert one.recipe in CELLS[claim], claim
    assert [one.price for one in experiments] == sorted(one.price for one in experiments)
    assert len([claim for one in left for claim in one.claims]) == 30


def run_again(folder: Path, out: Path, seeds: list[int], recipe: object = None) -> summaries.RecipeSummary:
    record = summaries.read_summary(folder, "tiny", "full")
    assert record is not None
    done = decide.add_seeds(recipe or tiny(), record, seeds, out, show=lambda _: nullcontext(lambda _e: None))  # type: ignore[arg-type]
    assert done is not None
    return done


def test_added_seeds_are_those_of_a_whole_run_without_its_search(tmp_path: Path) -> None:
    whole = reproduce(tiny(), "full", tmp_path / "whole", seeds=[3, 4, 0])
    first = reproduce(tiny(), "full", tmp_path / "first", results=tmp_path / "results", seeds=[3, 4])
    assert whole is not None
    assert first is not None
    assert first.choices == whole.choices  # chosen with the first seed alone
    done = run_again(tmp_path / "results", tmp_path / "more", decide.seeds_to_run(tiny(), first, 3))
    assert done.seeds == [3, 4, 0]
    assert {v: {r: dict(s) for r, s in by.items()} for v, by in done.numbers.items()} == {
        v: {r: dict(s) for r, s in by.items()} for v, by in whole.numbers.items()
    }
    assert not (tmp_path / "more" / "choose").exists()
    assert done.minutes >= first.minutes
    assert done.protocol == first.protocol


def test_a_figure_that_is_newly_asked_is_measured_for_every_seed(tmp_path: Path) -> None:
    first = reproduce(tiny(), "full", tmp_path / "first", results=tmp_path / "results", seeds=[3, 4])
    assert first is not None
    assert decide.seeds_to_run(tiny(), first, 2) == []
    assert decide.seeds_to_run(tiny(), first, 4) == [0, 1]
    asked = {"text": "t", "lower": "flame: personal: loss/variance", "than": ["fedavg: global: loss/variance"]}
    now = make_recipe("tiny", merge_tables(TINY, {"paper": {"claims": [asked]}}))
    assert decide.seeds_to_run(now, first, 2) == [3, 4]
    done = run_again(tmp_path / "results", tmp_path / "more", [3, 4], now)
    assert decide.seeds_to_run(now, done, 2) == []
    for variant, by_reference in first.numbers.items():
        for reference, by_seed in by_reference.items():
            assert done.numbers[variant][reference] == by_seed, reference


@pytest.mark.parametrize("change", [{"complete": False}, {"protocol": "another"}])
def test_a_record_that_is_not_of_the_recipe_is_not_extended(tmp_path: Path, change: dict[str, object]) -> None:
    first = reproduce(tiny(), "full", tmp_path, seeds=[3, 4])
    assert first is not None
    assert decide.can_extend(tiny(), first)
    assert not decide.can_extend(tiny(), replace(first, **change))
    assert not decide.can_extend(tiny(), None)


def test_the_command_works_through_the_list_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from fedloom.lab.cli import app

    plain = make_recipe("tiny", {**TINY, "scale": {"laptop": {}}})
    one = decide.Decision(
        recipe="tiny", seeds=3, hours=0.1, how="adds a seed", scale="points", looks=(5,), claims=("a",)
    )
    monkeypatch.setattr("fedloom_studies.reproduce.read_recipes", lambda: {"tiny": plain})
    monkeypatch.setattr(decide, "read_decisions", lambda: ((one,), ()))
    where = ["reproduce", "--decide", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "out")]

    def call(*more: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*where, *more])
        return done.exit_code, done.output

    code, text = call("--budget", "1e-9s")
    assert code == 130
    assert "stopped at tiny" in text
    assert call()[0] == 0  # runs the recipe as it stands
    first = summaries.read_summary(tmp_path / "results", "tiny", "laptop")
    assert first is not None
    assert first.seeds == [3, 4]
    assert call()[0] == 0  # adds the seed that is missing
    second = summaries.read_summary(tmp_path / "results", "tiny", "laptop")
    assert second is not None
    assert second.seeds == [3, 4, 0]
    code, text = call()
    assert code == 0
    assert "adds a seed" not in text.partition("done")[2]
