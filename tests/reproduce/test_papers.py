"""The pages against the summaries: what was run, what decides it, and how it is shown."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_recipe import FAR, NEAR, TINY, tiny, with_claim

from fedloom_studies.reproduce import papers, recipes
from fedloom_studies.reproduce import summary as summaries
from fedloom_studies.reproduce.charts import WORDS, WORDS_DARK
from fedloom_studies.reproduce.estimate import keep
from fedloom_studies.reproduce.figures import Reference, unit
from fedloom_studies.reproduce.judge import between, claims
from fedloom_studies.reproduce.page import last, not_run, page, plot
from fedloom_studies.reproduce.papers import overview, pages, sheets
from fedloom_studies.reproduce.recipe import Recipe, label_of, make_recipe, merged
from fedloom_studies.reproduce.summary import Need, Summary, needs
from fedloom_studies.store import CHECKOUT

ROOT = Path(__file__).parent.parent.parent


def test_a_page_says_what_was_run_and_what_was_not(finished: Path) -> None:
    done = summaries.read(finished / "results", "tiny", "full")
    assert done is not None
    text = page(tiny(), done)
    assert "| few | a |" in text
    assert f"commit {done.commit[:12]}" in text or not done.commit
    assert done.samples == {"digits": 1797}
    assert "Not run" in page(tiny(), None)
    assert plot(tiny(), done).startswith("<svg")
    assert plot(tiny(), None) == ""


def test_results_of_an_earlier_version_of_a_recipe_are_said_to_be_so(finished: Path) -> None:
    done = summaries.read(finished / "results", "tiny", "full")
    now = tiny()
    assert "earlier version" not in page(now, done)
    assert "earlier version" in page(replace(now, document=now.document | {"rounds": 5}), done)


def test_cells_are_compared_only_where_the_data_have_the_papers_size(finished: Path) -> None:
    done = summaries.read(finished / "results", "tiny", "full")
    assert done is not None
    assert "within" in page(tiny(), done) or "below" in page(tiny(), done) or "above" in page(tiny(), done)
    assert "verdict |\n|---|---|---|---|---|---|\n" in page(tiny(), done)
    unknown = page(tiny(), replace(done, samples={}))
    assert "The size of the data was not recorded, so no cell is compared." in unknown
    assert not tiny().as_the_paper("full", {"digits": 1796})


def test_the_pages_in_the_documentation_are_the_generated_ones() -> None:
    there = {file.name for file in (ROOT / "docs" / "papers").iterdir()}
    made = dict(pages(recipes(), ROOT / CHECKOUT))
    assert {name for name in made if name} == there
    for name, text in made.items():
        assert len(text) < 60_000 or name.endswith(".svg"), name
        if not name.endswith(".svg"):
            file = ROOT / "docs" / ("papers/" + name if name else "papers.md")
            assert file.read_text() == text, name


def test_headline_claims_are_claims_of_the_recipes_they_name() -> None:
    known = recipes()
    rows = [row for sheet in sheets() for row in sheet.row]
    assert 0 < len(rows) <= 25
    for row in rows:
        for name in (*row.published, *row.fair):
            assert any(c.text.startswith(row.claim) for c in known[name].paper.claims), (name, row.claim)
        for held in re.findall(r"\{(.+?)\}", row.why):
            sides = [side.split(" | ") for side in held.split(" - ")]
            assert len({side[0] for side in sides}) == 1, held  # paired: of one recipe, and so of equal draws
            assert sides[0][0] in known
            for name, variant, text in (side for side in sides if len(side) > 1):
                assert variant in known[name].variants
                assert Reference.of(text, "accuracy").method in {label_of(m) for m in known[name].document["method"]}
    assert {sheet.name for sheet in sheets()} == {one.paper.title.split(",")[0] for one in known.values()}
    for one in known.values():
        assert not one.paper.nearest or one.paper.nearest in known, one.name


def test_every_sentence_on_why_links_what_shows_it_and_types_no_number() -> None:
    for row in (row for sheet in sheets() for row in sheet.row):
        assert row.why, row.text
        for sentence in re.split(r"(?<=\.)\s+(?=[A-Z])", re.sub(r"\{(.+?)\}", "{}", row.why)):
            assert "{}" in sentence, sentence
            names_only = re.sub(r"Corollary 2|\(0, 0\)|Dir\(0\.5\)|label \d|alpha [\d.]+", "", sentence)
            assert not re.search(r"\d", names_only), sentence


def test_the_page_of_all_papers_counts_a_claim_once_per_table_data_and_mode_and_construction_never() -> None:
    known = recipes()
    start = f"Of {len(known)} recipes {{}} were run. Claims of recipes that came to their end, each counted once per "

    def totals(*names: str) -> str:
        found = {name: last(one, ROOT / CHECKOUT) if name in names else None for name, one in known.items()}
        (line,) = [line for line in overview(known, found, {}).splitlines() if line.startswith("Of ")]
        assert line.startswith(start.format(len(names)))
        return line

    alike = totals("flame-table3-mnist", "flame-table3-mnist-mlp")
    assert "*published*, 0 claims; *fair*, 0 claims; *near*, 6 claims:" in alike
    assert "1 more hold by construction and count nowhere" in alike
    data = totals("flame-table3-mnist", "flame-table3-fashion-mnist")
    assert "*near*, 12 claims" in data
    assert "2 more hold" in data
    modes = totals("equitable-table2-mnist-published", "equitable-table2-mnist-fair")
    assert "*published*, 3 claims: *undecided* 3; *fair*, 3 claims: *undecided* 3; *near*, 0 claims;" in modes


def test_the_page_of_all_papers_is_a_screen_a_paper() -> None:
    text = overview(recipes(), {name: last(one, ROOT / CHECKOUT) for name, one in recipes().items()}, {})
    for part in text.split("\n## ")[1:]:
        figures = re.findall(r"^!\[(.+)\]\(papers/(.+)\.svg\)$", part, re.MULTILINE)
        assert 0 < len(figures) <= 2
        for words, name in figures:
            assert words.endswith(".")
            assert recipes()[name].paper.title in words


def as_run(recipe: Recipe, **changes: object) -> Summary:
    known = {"few": {"flame: personal: accuracy": dict(zip("01234", FAR, strict=True)),
                     "fedavg: global: accuracy": dict(zip("01234", NEAR, strict=True))}}  # fmt: skip
    plain = Summary("tiny", "laptop", recipe.protocol("laptop"), "2 of the 4 rounds, batches of 9", "c", "d", "m",
                    {"torch": "2"}, True, [0, 1, 2, 3, 4], 2, 1.0, {}, [], known)  # fmt: skip
    return replace(plain, **changes)


def headline(monkeypatch: pytest.MonkeyPatch, one: Recipe, summary: Summary | None, need: Need | None = None) -> str:
    """The row of a claim on the page of all papers."""
    row = papers.Row(
        text="row", claim="t", fair=("tiny",), why="{tiny | few | flame: personal - tiny | few | fedavg: global}"
    )
    monkeypatch.setattr(papers, "sheets", lambda: (papers.Sheet(name="FLAME", title="t", row=(row,)),))
    text = overview({"tiny": one}, {"tiny": summary}, {} if need is None else {"tiny": need})
    return next(line for line in text.splitlines() if line.startswith("| row"))


def test_a_headline_says_what_was_reduced_and_of_which_version_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    one = with_claim()
    now = headline(monkeypatch, one, as_run(one))
    assert "near: full data; 2 of 4 rounds; batches of 9; 5 seeds |" in now
    assert "earlier version" not in now
    assert "an earlier version of the recipe](papers/tiny.md)" in headline(monkeypatch, one, as_run(one, protocol="o"))
    assert "4 rounds; batches of 9; 5 seeds; unfinished |" in headline(
        monkeypatch, one, as_run(one, rounds=4, complete=False)
    )
    less = make_recipe("tiny", merged(TINY, {"paper": {"claims": [{"text": "t", "higher": "flame: personal",
                                                                "than": ["fedavg: global"]}],
                                                   "reduced": "a tenth, a half; less"}}))  # fmt: skip
    assert "near: a tenth; a half; 2 of 4 rounds" in headline(monkeypatch, less, as_run(less))


def test_why_and_claim_say_the_same_difference_with_the_same_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    one = with_claim()
    summary = as_run(one)
    look = claims(one, summary.numbers)[0].pooled
    assert between(one, *summary.numbers["few"].values()) == look
    both = unit("accuracy").difference(look.difference, look.half)
    line = headline(monkeypatch, one, summary)
    assert f"near: [{both} (99 %, n = 5), **holds**" in line
    assert f"[{both.removeprefix('+')} above](papers/tiny.md) |" in line
    assert "[not run](papers/tiny.md) |" in headline(monkeypatch, one, None)


def test_what_was_not_run_says_why_and_what_it_would_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not_run(tiny(), None) == "not run (up to 1 core-minutes)"
    large = make_recipe("tiny", {k: v for k, v in merged(TINY, {}).items() if k != "scale"})
    assert not_run(large, None) == "not run: no laptop scale"
    assert not_run(large, Need(4320, [])) == "not run: no laptop scale (about 3 core-days at full scale)"
    assert not_run(large, Need(60, ["x"])) == "not run: x is not there (about 60 core-minutes at full scale)"
    for text in (headline(monkeypatch, large, None, Need(60, ["x"])), page(large, None, Need(60, ["x"])).lower()):
        assert "not run: x is not there (about 60 core-minutes at full scale)" in text
    keep({"tiny": tiny(), "large": large}, tmp_path, None)
    ((name, need),) = needs(tmp_path).items()
    assert (name, need.missing) == ("large", [])
    assert need.minutes > 0
    assert needs(tmp_path / "nowhere") == {}


def test_a_page_says_what_the_reported_round_decides() -> None:
    one, summary = with_claim(), as_run(with_claim())
    known = summary.numbers["few"]
    turned = {f"{name}@validation": value for name, value in zip(known, reversed(known.values()), strict=True)}
    said = "The reported round decides 1 of 1 comparisons: t: against few | fedavg: global: accuracy +20.2 points in"
    assert said.replace("20.2", "20.20") in page(one, replace(summary, numbers={"few": known | turned}))
    assert "The reported round decides" not in page(one, summary)


def luminance(colour: str) -> float:
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))


def test_a_figure_can_be_read_on_both_grounds_and_names_only_marks_that_it_has(finished: Path) -> None:
    done = summaries.read(finished / "results", "tiny", "full")
    assert done is not None
    for ground, words in (("#ffffff", WORDS), ("#22272e", WORDS_DARK)):
        light, dark = sorted((luminance(ground), luminance(words)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5
    figure = plot(tiny(), done)
    assert (
        f"<style>text{{fill:{WORDS}}}@media(prefers-color-scheme:dark){{text{{fill:{WORDS_DARK}}}}}</style>" in figure
    )
    assert "diamond: the paper" in figure
    assert "few (%)" in figure
    bare = make_recipe("tiny", merged(TINY, {"paper": {"cells": {"few": [[], []]}}}))
    assert "diamond" not in plot(bare, done)
    assert "95 % interval" in plot(bare, done)
    single = {v: {r: {"3": by["3"]} for r, by in known.items()} for v, known in done.numbers.items()}
    assert "interval" not in plot(bare, replace(done, numbers=single))
