"""A listing is made once, and anew where code, records or data have changed; recipes are listed without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom import cache
from fedloom_studies.listing import read_listing
from fedloom_studies.reproduce.recipe import read_recipes


def test_rows_are_made_anew_when_what_they_depend_on_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    records, data = tmp_path / "records", tmp_path / "data"
    made: list[int] = []

    def rows() -> list[list[object]]:
        made.append(len(made))
        return [["a", len(made)]]

    def ask(question: str = "full") -> list[object]:
        return read_listing("table", question, rows, records, None)

    assert ask() == ask() == [["a", 1]]
    records.mkdir()
    (records / "papers.jsonl").write_text("{}")
    assert ask() == ask() == [["a", 2]]
    monkeypatch.setenv("FEDLOOM_DATA", str(data))
    assert ask() == ask() == [["a", 3]]
    data.mkdir()
    (data / "mnist").mkdir()
    (data / "mnist" / "train").write_bytes(b"0")
    assert ask() == ask() == [["a", 4]]
    assert ask("smoke") == [["a", 5]]
    (records / "runs" / "deep").mkdir(parents=True)
    (records / "runs" / "deep" / "metrics").write_text("")  # no folder is walked to its end
    assert ask("smoke") == [["a", 5]]
    monkeypatch.setattr(cache, "fingerprint_sources", lambda _places: "another version")
    assert ask() == [["a", 6]]


def test_a_recorded_recipe_shows_the_time_that_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom_studies.reproduce import estimate
    from fedloom_studies.reproduce.estimate import recipe_rows
    from fedloom_studies.store import CHECKOUT_FOLDER

    root = Path(__file__).parents[4]
    name = "fedacs-table2"
    recorded, unrecorded = (
        next(iter(recipe_rows({name: read_recipes()[name]}, "laptop", folder, tmp_path, estimated=True)))
        for folder in (root / CHECKOUT_FOLDER, tmp_path)
    )
    assert recorded[:3] == unrecorded[:3]
    assert recorded[3].startswith("run, laptop scale, ")
    assert recorded[-1].startswith("took ")
    assert recorded[-1].endswith(" seeds")
    assert unrecorded[3] == "not run"
    assert unrecorded[-1].startswith("about ")
    monkeypatch.setattr(estimate, "measure_rounds", lambda *_: pytest.fail("a model was timed"))
    (row,) = recipe_rows({name: read_recipes()[name]}, "laptop", tmp_path, tmp_path)
    assert row == (*unrecorded[:-1], "-")
