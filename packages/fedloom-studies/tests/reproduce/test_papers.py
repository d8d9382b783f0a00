"""The pages against the summaries: what was run, what decides it, and how it is shown."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_recipe import FAR, NEAR, TINY, tiny, with_claim

from fedloom.errors import ConfigError
from fedloom.lab.report.charts.look import INK_COLORS
from fedloom.rundir import get_label
from fedloom_studies.appendices import write_pages
from fedloom_studies.others import page as others
from fedloom_studies.reproduce import looks, papers, read_recipes, reproduce
from fedloom_studies.reproduce import summary as summaries
from fedloom_studies.reproduce.estimate import store_estimates
from fedloom_studies.reproduce.execute import verify_seed
from fedloom_studies.reproduce.figures import Reference
from fedloom_studies.reproduce.judge import compare_references, judge_claims
from fedloom_studies.reproduce.marks import draw_marks
from fedloom_studies.reproduce.page import draw_figure, last_summary, not_run_reason, recipe_page
from fedloom_studies.reproduce.papers import paper_pages, papers_overview, read_paper_sections
from fedloom_studies.reproduce.reasons import PAPERS_FOLDER
from fedloom_studies.reproduce.recipe import Recipe, make_recipe, merge_tables
from fedloom_studies.reproduce.summary import RecipeNeed, RecipeSummary, read_needs
from fedloom_studies.store import CHECKOUT_FOLDER

ROOT = Path(__file__).parents[4]


def test_a_page_says_what_was_run_and_what_was_not(finished: Path) -> None:
    done = summaries.read_summary(finished / "results", "tiny", "full")
    assert done is not None
    text = recipe_page(tiny(), done)
    assert "| few | a |" in text
    assert f"commit {done.commit[:12]}" in text or not done.commit
    assert done.samples == {"digits": 1797}
    assert "Not run" in recipe_page(tiny(), None)
    assert draw_figure(tiny(), done).startswith("<svg")
    assert draw_figure(tiny(), None) == ""


def test_a_seed_without_a_result_changes_no_mean_of_the_work(finished: Path) -> None:
    done = summaries.read_summary(finished / "results", "tiny", "full")
    assert done is not None
    failed = {
        variant: {reference: by_seed | {"5": None} for reference, by_seed in of_methods.items()}
        for variant, of_methods in done.numbers.items()
    }
    (work,) = re.findall(r"^\| work per run .*\n(?:\|.*\n)+", recipe_page(tiny(), done), re.MULTILINE)
    assert work in recipe_page(tiny(), replace(done, numbers=failed))


def test_results_of_an_earlier_version_of_a_recipe_are_said_to_be_so(finished: Path) -> None:
    done = summaries.read_summary(finished / "results", "tiny", "full")
    now = tiny()
    assert "earlier version" not in recipe_page(now, done)
    assert "earlier version" in recipe_page(replace(now, document=now.document | {"rounds": 5}), done)


def test_cells_are_compared_only_where_the_data_have_the_papers_size(finished: Path) -> None:
    done = summaries.read_summary(finished / "results", "tiny", "full")
    assert done is not None
    assert (
        "within" in recipe_page(tiny(), done)
        or "below" in recipe_page(tiny(), done)
        or "above" in recipe_page(tiny(), done)
    )
    assert "verdict |\n|---|---|---|---|---|---|\n" in recipe_page(tiny(), done)
    unknown = recipe_page(tiny(), replace(done, samples={}))
    assert "The record does not contain the data's size, so no value is compared." in unknown
    assert not tiny().follows_paper("full", {"digits": 1796})


def test_the_pages_in_the_documentation_are_the_generated_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("docs", "studies/pages"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    write_pages(Path("docs/papers.md"), PAPERS_FOLDER, paper_pages(read_recipes(), ROOT / CHECKOUT_FOLDER))
    write_pages(Path("docs/others.md"), PAPERS_FOLDER, others.render_pages(read_recipes(), ROOT / CHECKOUT_FOLDER))
    fresh = {file.relative_to(tmp_path) for file in tmp_path.rglob("*.*")}
    kept = (ROOT / "studies" / "pages" / PAPERS_FOLDER).iterdir()
    assert fresh == {Path("docs/papers.md"), Path("docs/others.md"), *(file.relative_to(ROOT) for file in kept)}
    for file in fresh:
        if file.suffix == ".md":
            text = (tmp_path / file).read_text()
            assert len(text) < 60_000, file
            assert (ROOT / file).read_text() == text, file


def test_a_corrected_verdict_waits_for_its_recipe_until_that_was_run() -> None:
    known = read_recipes()
    waiting = {one.recipe for sheet in read_paper_sections() for one in sheet.corrected if one.recipe}
    assert waiting <= known.keys()
    recorded = {name: last_summary(recipe, ROOT / CHECKOUT_FOLDER) for name, recipe in known.items()}
    run = {n: replace(s, protocol=known[n].protocol(s.scale), complete=True) for n in waiting if (s := recorded[n])}
    assert run
    for other, notes in ((dict.fromkeys(waiting), waiting), (run, waiting - run.keys())):
        text = papers_overview(known, recorded | other, {})
        for name in waiting:
            assert (f"{name}.md) has not been run since." in text) == (name in notes)


def test_a_page_elsewhere_has_its_appendices_beside_it(tmp_path: Path) -> None:
    contents = [("", "[a](all/a.md) ![b](all/b.svg)"), ("a.md", "[back](../page.md), [b](b.svg)"), ("b.svg", b"<svg/>")]
    write_pages(tmp_path / "page.md", "all", contents)
    assert (tmp_path / "page.md").read_text() == contents[0][1]
    assert (tmp_path / "all" / "a.md").read_text() == contents[1][1]
    assert (tmp_path / "all" / "b.svg").read_bytes() == b"<svg/>"
    (tmp_path / "other.md").write_text("= mine")
    with pytest.raises(ConfigError, match=r"is not a page that this command wrote that fedloom wrote\. Choose another"):
        write_pages(tmp_path / "other.md", "all", contents)


def test_headline_claims_are_claims_of_the_recipes_they_name() -> None:
    known = read_recipes()
    rows = [row for sheet in read_paper_sections() for row in sheet.row]
    assert 0 < len(rows) <= 36
    for row in rows:
        assert len(row.text.split()) <= 9, row.text
        for mode, names in (("published", row.published), ("fair", row.fair)):
            for name in names:
                assert known[name].paper.mode == mode, name
                assert any(c.text.startswith(row.claim) for c in known[name].paper.claims), (name, row.claim)
        assert not row.full or known[row.full].paper.reduced is None
    for sheet in read_paper_sections():
        assert any(row.text.startswith(sheet.number) for row in sheet.row)
        for held in re.findall(r"\{(.+?)\}", sheet.why):
            sides = [side.split(" | ") for side in held.split(" - ")]
            assert len({side[0] for side in sides}) == 1, held  # paired: of one recipe, and so of equal draws
            assert sides[0][0] in known
            for name, variant, text in (side for side in sides if len(side) > 1):
                assert variant in known[name].variants
                assert Reference.create(text, "accuracy").method in {
                    get_label(m) for m in known[name].document["method"]
                }
    of_papers = papers.select_papers(known)
    assert {sheet.name for sheet in read_paper_sections()} == {
        one.paper.title.split(",")[0] for one in of_papers.values()
    }
    assert len(of_papers) < len(known)
    for one in known.values():
        assert not one.paper.nearest or one.paper.nearest in known, one.name


def generated() -> str:
    return papers_overview(
        read_recipes(), {name: last_summary(one, ROOT / CHECKOUT_FOLDER) for name, one in read_recipes().items()}, {}
    )


def test_the_page_opens_with_a_row_per_paper_and_ends_with_the_rules() -> None:
    first, *parts = generated().split("\n## ")
    rows = [line for line in first.splitlines() if line.startswith("| [")]
    assert [row.split("](")[0].removeprefix("| [") for row in rows] == [sheet.name for sheet in read_paper_sections()]
    assert len(first.splitlines()) < 25
    assert parts[-1].startswith("How claims are judged")
    assert [part.splitlines()[0] for part in parts[-3:-1]] == ["Corrections", "Open claims"]
    for part in parts[:-3]:
        figures = re.findall(r"^!\[(.+)\]\(papers/(.+)\.svg\)$", part, re.MULTILINE)
        ((words, name),) = figures
        assert words.endswith(".")
        assert read_recipes()[name].paper.title in words


def test_every_verdict_has_a_mark_and_a_word_and_every_cell_is_short() -> None:
    text = generated()
    cells = [
        cell.strip() for line in text.splitlines() if line.startswith("| ") for cell in line.strip("| ").split(" | ")
    ]
    marked = [cell for cell in cells if cell.startswith("![](papers/mark-")]
    assert len(marked) >= 2 * len([row for sheet in read_paper_sections() for row in sheet.row])
    for cell in marked:
        words = re.sub(r"!\[\]\(.+?\)|\[|\]\(.+?\)", "", cell)
        assert re.search(r"[a-z]{4}", words), cell
        assert len(words.split()) <= 9, cell
    assert {f"papers/{name}" for name in draw_marks()} >= set(re.findall(r"papers/mark-[a-z]+\.svg", text))
    assert all(line.count("|") <= 5 for line in text.splitlines() if line.startswith("|"))


def test_near_recipes_are_in_the_appendix_only() -> None:
    near = [name for name, one in read_recipes().items() if one.paper.mode == "near"]
    headlines = re.sub(r"<details.+?</details>|## Open claims.+", "", generated(), flags=re.DOTALL)
    reasons = {
        held.split(" | ")[0]
        for sheet in read_paper_sections()
        for held in re.findall(r"\{(.+?)\}", sheet.why + sheet.objection)
    }
    shown = [name for name in near if f"papers/{name}.md" in headlines]
    assert set(shown) <= reasons  # a sentence on why may say what one shows; no verdict rests on it


def test_no_sentence_on_why_types_a_number() -> None:
    names = (
        r"\((?:0, 0|1, 1)\)|Dir\(0\.5\)|beta = (?:1|5 L)\b|Corollary 2|Proposition 3|Algorithm 1|tau = 1|"
        r"the L1 norm|alpha [\d.]+|500 clients|CIFAR-100?\b"
    )
    for sheet in read_paper_sections():
        for text in (sheet.why, sheet.objection):
            assert text
            assert not re.search(r"\d", re.sub(names, "", re.sub(r"\{.+?\}", "", text))), sheet.name


def test_every_paper_has_what_its_author_could_object_to_with_the_count_of_its_open_claims() -> None:
    text = generated()
    for sheet, part in zip(read_paper_sections(), text.split("\n## ")[1:], strict=False):
        (line,) = [line for line in part.splitlines() if line.startswith("**Possible objections from the authors.**")]
        (count, asked) = map(int, re.findall(r"(\d+) of the (\d+) verdicts (?:is|are) open\.$", line)[0])
        cells = re.findall(
            r"papers/mark-([a-z]+)\.svg\) (?!not tested \(not covered\))", part.split("| claim |")[1].split("</div>")[0]
        )
        assert len(cells) == asked, sheet.name
        assert len([mark for mark in cells if mark not in ("holds", "fails")]) == count, sheet.name


def as_run(recipe: Recipe, **changes: object) -> RecipeSummary:
    known = {"few": {"flame: personal: accuracy": dict(zip("01234", FAR, strict=True)),
                     "fedavg: global: accuracy": dict(zip("01234", NEAR, strict=True))}}  # fmt: skip
    plain = RecipeSummary("tiny", "laptop", recipe.protocol("laptop"), "2 of the 4 rounds, batches of 9", "c", "d", "m",
                    {"torch": "2"}, True, [0, 1, 2, 3, 4], 2, 1.0, {}, [], known)  # fmt: skip
    return replace(plain, **changes)


def only(
    monkeypatch: pytest.MonkeyPatch, one: Recipe, summary: RecipeSummary | None, why: str = "", full: str = ""
) -> str:
    """The page of all papers with one claim."""
    row = papers.HeadlineClaim(text="row", claim="t", fair=("tiny",), full=full)
    sheet = papers.PaperSection(name="FLAME", title="t", number="row", why=why, row=(row,))
    monkeypatch.setattr(papers, "read_paper_sections", lambda: (sheet,))
    return papers_overview({"tiny": one}, {"tiny": summary}, {"tiny": RecipeNeed(4320, [])})


def headline(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("| row"))


def test_results_of_an_earlier_version_or_unfinished_ones_give_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    one = with_claim()
    assert "[holds: +20.2 ± " in headline(only(monkeypatch, one, as_run(one)))
    for summary in (None, as_run(one, protocol="o"), as_run(one, complete=False)):
        text = only(monkeypatch, one, summary)
        assert "[not tested (not run)](papers/tiny.md)" in headline(text)
        assert "Not run yet: `fedloom reproduce tiny` (up to 1 core-minutes)" in text
    assert "not covered" in headline(only(monkeypatch, one, as_run(one)))  # as published


def test_where_more_seeds_change_nothing_a_gpu_is_named_in_place_of_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"reduced": "a tenth", "claims": [{"text": "t", "higher": "flame: personal", "than": ["fedavg: global"]}]}
    less = make_recipe("tiny", merge_tables(TINY, {"paper": table}))
    text = only(monkeypatch, less, as_run(less), full="tiny")
    assert "[not tested (needs a GPU)](papers/tiny.md)" in headline(text)
    assert "holds" not in headline(text)
    assert (
        "This experiment requires a GPU: `fedloom reproduce tiny --scale full --device cuda` (about 3 core-days)."
        in text
    )
    absent = papers_overview({"tiny": less}, {"tiny": as_run(less)}, {"tiny": RecipeNeed(4320, ["x"])})
    assert "requires a GPU and the data set x: `fedloom reproduce tiny" in absent


def test_a_stand_in_decides_no_headline_and_is_never_called_published(monkeypatch: pytest.MonkeyPatch) -> None:
    one = with_claim()
    other = replace(one, paper=one.paper.with_(stand_in="two convolutions replace ResNet-18", mode="published"))
    text = only(monkeypatch, other, as_run(other))
    assert "[not tested (stand-in)](papers/tiny.md)" in headline(text)
    assert "| stand-in: " in text
    page = recipe_page(other, as_run(other))
    assert (
        "This experiment is a stand-in: two convolutions replace ResNet-18. Its verdicts apply to the stand-in" in page
    )
    assert "holds" in page
    for name, recipe in papers.select_papers(read_recipes()).items():
        another = re.search(
            r"LeNet|instead of ResNet|network with one hidden|two convolutions", recipe.paper.reduced or ""
        )
        assert bool(another) == bool(recipe.paper.stand_in), name
        if recipe.paper.stand_in:
            assert "as published" not in recipe.paper.title
            assert recipe.paper.kind.startswith("stand-in")


def test_a_recipe_at_full_length_comes_before_a_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one = with_claim()
    short, whole = replace(one, name="short"), replace(one, name="whole")
    row = papers.HeadlineClaim(text="row", claim="t", fair=("short", "whole"))
    sheet = papers.PaperSection(name="FLAME", title="t", number="row", row=(row,))
    monkeypatch.setattr(papers, "read_paper_sections", lambda: (sheet,))
    found = {"short": as_run(short), "whole": as_run(whole, rounds=4)}
    text = papers_overview({"short": short, "whole": whole}, found, {})
    assert "papers/whole.md" in headline(text)
    assert "papers/short.md" not in headline(text)


def test_a_verdict_on_less_than_the_paper_ran_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    one = with_claim()
    note = "experiments are smaller than the paper's: [tiny](papers/tiny.md) (2 of the 4 rounds, batches of 9)."
    assert note in only(monkeypatch, one, as_run(one))
    assert "experiments are smaller" not in only(monkeypatch, one, as_run(one, rounds=4))
    less = replace(one, paper=one.paper.with_(reduced="a tenth"))
    assert "[tiny](papers/tiny.md) (a tenth)." in only(monkeypatch, less, as_run(less, says="as reduced", rounds=4))


def test_what_more_seeds_may_decide_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    one = with_claim()
    level = numbers_of(list(as_run(one).numbers["few"]), [0.5, 0.7, 0.4, 0.6, 0.5], NEAR)
    assert "may settle claims" not in only(monkeypatch, one, as_run(one))
    text = only(monkeypatch, one, as_run(one, numbers=level))
    assert "undecided or hold only in part: [tiny](papers/tiny.md)." in text
    assert "may settle claims" not in only(monkeypatch, one, as_run(one, numbers=level, seeds=list(range(20))))


def test_of_recipes_at_full_length_the_one_least_favourable_to_the_claim_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = with_claim()
    ahead, behind, level = (replace(one, name=name) for name in ("ahead", "behind", "level"))
    names = list(as_run(one).numbers["few"])
    found = {"ahead": as_run(ahead, rounds=4), "behind": as_run(behind, rounds=4, numbers=numbers_of(names, NEAR, FAR)),
             "level": as_run(level, rounds=4, numbers=numbers_of(names, [0.5, 0.7, 0.4, 0.6, 0.5], NEAR))}  # fmt: skip
    for order, counts, word in (
        (("ahead", "behind", "level"), "behind", "does not hold"), (("ahead", "level"), "level", "undecided"),
        (("level", "ahead"), "level", "undecided"),
    ):  # fmt: skip
        row = papers.HeadlineClaim(text="row", claim="t", fair=order)
        sheet = papers.PaperSection(name="FLAME", title="t", number="row", row=(row,))
        monkeypatch.setattr(papers, "read_paper_sections", lambda sheet=sheet: (sheet,))
        text = papers_overview({"ahead": ahead, "behind": behind, "level": level}, found, {})
        assert re.search(rf"\[{word}: .+?\]\(papers/{counts}\.md\)", headline(text))


def numbers_of(names: list[str], *values: list[float]) -> dict[str, dict[str, dict[str, float]]]:
    return {"few": {name: dict(zip("01234", v, strict=True)) for name, v in zip(names, values, strict=True)}}


def test_a_protocol_is_summed_up_once_half_of_its_claims_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    one = with_claim()
    other = replace(one, name="other")
    for missing, word in ((1, "holds so far: 1 of 2 holds"), (2, "not tested (not run): 2 of 3 claims")):
        rows = [papers.HeadlineClaim(text="row", claim="t", fair=("tiny",))]
        rows += [papers.HeadlineClaim(text=f"more {k}", claim="t", fair=("other",)) for k in range(missing)]
        sheet = papers.PaperSection(name="FLAME", title="t", number="row", row=tuple(rows))
        monkeypatch.setattr(papers, "read_paper_sections", lambda sheet=sheet: (sheet,))
        text = papers_overview({"tiny": one, "other": other}, {"tiny": as_run(one), "other": None}, {})
        first = next(line for line in text.splitlines() if line.startswith("| [FLAME]"))
        assert f") {word} |" in first
        assert ") not tested (not covered) |" in first
        counted = f"{missing} {'is' if missing == 1 else 'are'} not tested (not run)"
        covered = f"{1 + missing} of {1 + missing} claims are covered"
        assert f"In a fair test, {covered}: 1 holds and {counted}." in text


def test_a_claim_of_the_full_size_only_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    row = papers.HeadlineClaim(text="row", claim="t", full="tiny")
    monkeypatch.setattr(
        papers, "read_paper_sections", lambda: (papers.PaperSection(name="FLAME", title="t", number="row", row=(row,)),)
    )
    text = papers_overview({"tiny": tiny()}, {"tiny": None}, {"tiny": RecipeNeed(4320, [])})
    assert re.search(r"not tested \(needs a GPU\) \| !\[\]\(.+?\) not tested \(not covered\) \|$", headline(text))
    assert "This experiment requires a GPU: `fedloom reproduce tiny --scale full --device cuda`" in text


def test_the_appendix_counts_claims_that_a_run_has_no_figures_of(monkeypatch: pytest.MonkeyPatch) -> None:
    one = with_claim()
    (claim,) = one.paper.claims
    newer = claim.with_(text="newer", higher="flame: personal: loss/variance", than=("fedavg: global: loss/variance",))
    both = replace(one, paper=one.paper.with_(claims=(claim, newer), title="FLAME, t"))
    assert ". Of 2 claims, 1 holds and 1 is not tested (not run) |" in only(monkeypatch, both, as_run(both))


def test_a_claim_on_a_method_that_diverged_is_without_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = [{"algorithm": "fedavg", "local": {"lr": 1e38}}, {"algorithm": "flame", "lam": 1.0}]
    claim = {"text": "t", "higher": "flame: personal", "than": ["fedavg: global", 0.0]}
    one = make_recipe("tiny", merge_tables(TINY, {"method": methods, "paper": {"claims": [claim]}}))
    summary = reproduce(one, "full", tmp_path, results=tmp_path / "results")
    assert summary.complete
    assert len(summary.failures) == 4
    (of_both,) = judge_claims(one, summary.numbers)
    assert of_both.count.endswith(", 2 no result")
    text = recipe_page(one, summary)
    assert "| few | b | no result | - | - |" in text
    assert "| work per run (few) | sample gradients | traffic |\n|---|---|---|\n| flame |" in text
    again = {d.reference: d.size for d in verify_seed(one, summary, tmp_path / "again")}
    assert again["fedavg: global: accuracy"] == again["flame: personal: accuracy"] == 0
    of_one = one.paper.claims[0].with_(than=("fedavg: global",))
    one = replace(one, paper=one.paper.with_(claims=(of_one,)))
    assert f"| {of_one.text} | not tested (no result) |" in recipe_page(one, summary)
    text = only(monkeypatch, one, replace(summary, scale="full"))
    assert "[not tested (no result)](papers/tiny.md)" in headline(text)
    assert ". Of 1 claim, 1 is not tested (no result) |" in text
    assert "Not measured yet" not in text


def test_a_reason_whose_difference_is_not_clear_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one, pair = with_claim(), "{tiny | few | flame: personal - tiny | few | fedavg: global}"
    summary = as_run(one)
    assert "It lies [20.2 ± " in only(monkeypatch, one, summary, f"It lies {pair} it.")
    level = ([0.5, 0.7, 0.4, 0.6, 0.5], NEAR)
    both = {n: dict(zip("01234", v, strict=True)) for n, v in zip(summary.numbers["few"], level, strict=True)}
    few = {name: {seed: v for seed, v in by.items() if seed in "012"} for name, by in summary.numbers["few"].items()}
    for numbers in (both, few):  # an interval that contains zero; too few seeds for one
        with pytest.raises(ConfigError, match="is not clear"):
            only(monkeypatch, one, replace(summary, numbers={"few": numbers}), f"It lies {pair} it.")
    single = "{tiny | few | flame: personal}"
    same = {name: dict(zip("01234", NEAR, strict=True)) for name in summary.numbers["few"]}
    other = "{tiny | few | fedavg: global}"
    with pytest.raises(ConfigError, match="but they are equal"):
        only(monkeypatch, one, replace(summary, numbers={"few": same}), f"It has {single} against {other}.")
    old = as_run(one, protocol="o")
    assert "It lies" not in only(monkeypatch, one, old, f"It lies {pair} it.")


def test_why_and_claim_say_the_same_difference_with_the_same_interval() -> None:
    one = with_claim()
    summary = as_run(one)
    assert (
        compare_references(one, *summary.numbers["few"].values())
        == judge_claims(one, summary.numbers)[0].closest_rival.look
    )


def test_what_was_not_run_says_why_and_what_it_would_take(tmp_path: Path) -> None:
    assert not_run_reason(tiny(), None) == "not run (up to 1 core-minutes)"
    large = make_recipe("tiny", {k: v for k, v in merge_tables(TINY, {}).items() if k != "scale"})
    assert not_run_reason(large, None) == "not run: no laptop scale"
    assert not_run_reason(large, RecipeNeed(4320, [])) == "not run: no laptop scale (about 3 core-days at full scale)"
    assert not_run_reason(large, RecipeNeed(60, ["x"])) == "not run: x is missing (about 60 core-minutes at full scale)"
    text = recipe_page(large, None, RecipeNeed(60, ["x"])).lower()
    assert "not run: x is missing (about 60 core-minutes at full scale)" in text
    store_estimates({"tiny": tiny(), "large": large}, tmp_path, None)
    ((name, need),) = read_needs(tmp_path).items()
    assert (name, need.missing) == ("large", [])
    assert need.minutes > 0
    assert read_needs(tmp_path / "nowhere") == {}


def test_a_page_says_what_the_reported_round_decides() -> None:
    one, summary = with_claim(), as_run(with_claim())
    known = summary.numbers["few"]
    turned = {f"{name}@validation": value for name, value in zip(known, reversed(known.values()), strict=True)}
    said = r"| t | 1 of 1 | few \| fedavg: global: accuracy | +20.20 points |"
    assert said in recipe_page(one, replace(summary, numbers={"few": known | turned}))
    assert "change direction" not in recipe_page(one, summary)


def luminance(colour: str) -> float:
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))


def test_no_table_of_a_recipe_has_an_empty_column() -> None:
    """A phone has room for few."""
    tables = 0
    for name, recipe in read_recipes().items():
        for block in re.findall(
            r"(?:^\|.*\n)+", recipe_page(recipe, last_summary(recipe, ROOT / CHECKOUT_FOLDER)), re.MULTILINE
        ):
            head, _, *rows = (re.split(r" (?<!\\)\|", line.strip("|")) for line in block.splitlines())
            tables += 1
            for title, *column in zip(head, *rows, strict=True):
                assert {cell.strip() for cell in column} != {"-"}, (name, title)
    assert tables > 100


def test_a_comparison_stands_once_on_its_page() -> None:
    """Two rows of the same words with two differences would contradict each other, as means and spreads did."""
    for appendix in sorted((ROOT / "studies" / "pages" / "papers").glob("*.md")):
        _, _, table = appendix.read_text().partition("| comparison | difference | verdict (Holm) |\n")
        pairs = [re.split(r"(?<!\\)\|", row)[1] for row in table.partition("\n\n")[0].splitlines()[1:]]
        assert len(pairs) == len(set(pairs)), appendix.name


def test_a_figure_can_be_read_on_both_grounds_and_names_only_marks_that_it_has(finished: Path) -> None:
    done = summaries.read_summary(finished / "results", "tiny", "full")
    assert done is not None
    for ground, words in zip(("#ffffff", "#22272e"), INK_COLORS, strict=True):
        light, dark = sorted((luminance(ground), luminance(words)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5
    figure = draw_figure(tiny(), done)
    assert (
        f"<style>text{{fill:{INK_COLORS[0]}}}@media(prefers-color-scheme:dark){{text{{fill:{INK_COLORS[1]}}}}}</style>"
        in figure
    )
    assert "diamond: the paper" in figure
    assert "few (%)" in figure
    bare = make_recipe("tiny", merge_tables(TINY, {"paper": {"cells": {"few": [[], []]}}}))
    assert "diamond" not in draw_figure(bare, done)
    assert "95 % interval" in draw_figure(bare, done)
    single = {v: {r: {"3": by["3"]} for r, by in known.items()} for v, known in done.numbers.items()}
    assert "interval" not in draw_figure(bare, replace(done, numbers=single))


def test_rivals_of_fiaelt_were_given_no_fewer_gradients_on_synthetic_data() -> None:
    """What the page says was changed after a table had been seen."""
    (sheet,) = [sheet for sheet in read_paper_sections() if sheet.name == "FIAELT"]
    assert "In the *near* and *fair* experiments on synthetic data" in sheet.changed
    for name in ("fiaelt-synthetic", "fiaelt-synthetic-fair"):
        summary = summaries.read_summary(ROOT / CHECKOUT_FOLDER, name, "laptop")
        assert summary is not None
        for numbers in summary.numbers.values():
            spent = {
                key.partition(":")[0]: np.mean([*values.values()])
                for key, values in numbers.items()
                if key.endswith(": : samples_backward")
            }
            own = max(value for method, value in spent.items() if method.startswith("fiaelt"))
            assert len(spent) > 6
            assert all(value >= own for method, value in spent.items() if not method.startswith("fiaelt")), name


def test_fairfed_alone_is_clearly_behind_equitable_fl() -> None:
    """What the page says of its claims on MNIST."""
    (sheet,) = [sheet for sheet in read_paper_sections() if sheet.name == "Equitable-FL"]
    assert sheet.why.startswith("Of five rivals, only FairFed is clearly behind in every figure that is judged")
    assert (
        "the other four rivals are behind on average, but these differences are not clear. In the last round, some"
        in sheet.why
    )
    for name in ("equitable-table2-mnist-published", "equitable-table2-mnist-fair"):
        summary = summaries.read_summary(ROOT / CHECKOUT_FOLDER, name, "laptop")
        assert summary is not None
        judged = judge_claims(read_recipes()[name], summary.numbers)
        assert len(judged) == 6
        leads = list[float]()
        for one in judged:
            assert len(one.rivals) == 5
            behind = [rival.name.partition(":")[0] for rival in one.rivals if rival.verdict == looks.HOLDS]
            assert "fairfed" in behind
            if "as plotted" in one.claim.text:
                assert behind == ["fairfed"]
                assert all(rival.look.difference > 0 for rival in one.rivals)
            else:
                assert looks.FAILS not in [rival.verdict for rival in one.rivals]
                leads += [rival.look.difference for rival in one.rivals]
        assert min(leads) < 0


def test_a_recipe_that_judges_a_headline_claim_at_full_length_on_the_data_of_a_row_is_in_a_row() -> None:
    """Else the one least favourable to a claim might not be among those that count."""
    known = read_recipes()

    def sources(name: str) -> set[str]:
        return {document["data"]["source"] for document in known[name].make_documents("full").values()}

    left_out = []
    for sheet in read_paper_sections():
        for row in sheet.row:
            for mode in ("published", "fair"):
                own, shown = (
                    getattr(row, mode),
                    {n for r in sheet.row if r.claim == row.claim for n in getattr(r, mode)},
                )
                for name, recipe in known.items():
                    summary, paper = last_summary(recipe, ROOT / CHECKOUT_FOLDER), recipe.paper
                    full = (
                        summary
                        and len(summary.seeds) >= looks.LOOK_LEVELS[0][0]
                        and papers._is_full_length(recipe, summary)
                    )
                    same = any(sources(name) <= sources(one) for one in own) and paper.title.startswith(
                        f"{sheet.name},"
                    )
                    asks = any(claim.text.startswith(row.claim) for claim in paper.claims)
                    if full and same and asks and paper.mode == mode and name not in shown:
                        left_out.append((row.text, name))
    assert not left_out


def test_grids_of_a_fair_test_are_of_equal_size_and_go_on_to_twice_that_at_most() -> None:
    """What the page states of searches."""
    assert "with tuning\ngrids of the same size for every method" in papers.PAPERS_TEXT
    assert "the search continues beyond the edge, up to twice the size" in papers.RULES_FILE.read_text()
    searched, beyond = 0, 0.0
    for name, recipe in read_recipes().items():
        summary = last_summary(recipe, ROOT / CHECKOUT_FOLDER)
        for choices in summary.choices.values() if summary and recipe.paper.mode == "fair" else ():
            trials = [choice["trials"] for choice in choices.values()]
            assert len({one["grid"] for one in trials}) == 1, name
            searched, beyond = searched + 1, max(beyond, *(one["beyond"] / one["grid"] for one in trials))
    assert searched > 5
    assert 0 < beyond <= 1


def test_no_claim_rests_on_a_choice_by_test_data_and_only_tables_show_one() -> None:
    sentence = "The tables show FLAME-HM as in the paper, which selects its models on test data"
    assert sentence in papers.RULES_FILE.read_text()
    columns = set[str]()
    for name, recipe in read_recipes().items():
        chosen = [d for d in recipe.make_documents("full").values() if d.get("evaluate", {}).get("select_on") == "test"]
        if chosen:
            paper = recipe.paper
            tested = [side for c in paper.claims if not c.construction for side in (c.subject, *c.than)]
            models = [Reference.create(side, paper.figure).model for side in tested if isinstance(side, str)]
            assert "hybrid" not in models, name
            columns |= {
                t for t, text in paper.columns.items() if Reference.create(text, paper.figure).model == "hybrid"
            }
    assert {title.partition(",")[0] for title in columns} == {"FLAME-HM"}
