"""Page about all papers. Each paper has a row with its headline claims, as published and in a fair test.

The file ``papers.toml`` lists the headline claims. For each of them, it contains the first words of the corresponding
claim in the recipes, and the recipes that judge it. The module `reasons` inserts measured numbers into the papers'
sentences about the reasons for verdicts. Everything else is generated from the recipes' summaries.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TypeGuard

from pydantic import Field

from fedloom.errors import ConfigError
from fedloom.formats import format_option
from fedloom.values import Value
from fedloom_studies.reproduce import facts, judge, looks, marks
from fedloom_studies.reproduce.figures import Reference, get_unit
from fedloom_studies.reproduce.looks import UNTESTED, UntestedReason
from fedloom_studies.reproduce.marks import ClaimCell, combine_verdicts, count_sentences, show_mark
from fedloom_studies.reproduce.page import (
    draw_figure,
    duration_text,
    figure_link,
    has_plot,
    is_earlier_version,
    last_summary,
    not_run_reason,
    recipe_page,
    recipe_state_phrase,
)
from fedloom_studies.reproduce.reasons import PAPERS_FOLDER, fill_numbers
from fedloom_studies.reproduce.recipe import REDUCED_PHRASE, Claim, Recipe
from fedloom_studies.reproduce.regime import PaperAnchor, farthest_anchors, is_different_regime
from fedloom_studies.reproduce.summary import RecipeNeed, RecipeSummary, read_needs

VERDICT_ORDER = (looks.FAILS, looks.UNDECIDED, looks.PARTLY, looks.HOLDS)
"""Verdicts, from the least to the most favorable."""
PAPERS_TEXT = """# Paper reproductions

This page tests five papers, first **as published**, with the papers' settings, and then **in a fair test**, with tuning
grids of the same size for every method. See also [how claims are judged](#how-claims-are-judged) and \
[results from other programs](others.md).
"""
CLOSING_TEXT = """\
This page is generated from recorded runs. You can reproduce a table with one command:

<!-- not run: takes minutes, and needs the data set -->
```sh
fedloom reproduce fedacs-table2 \\
  --data-dir DATA
```
"""
CORRECTED_TEXT = (
    "Earlier versions of this page contained the following verdicts, which have since been corrected. This list is "
    "written by hand."
)
NO_ANCHOR_TEXT = "no anchor"
"""Text for a claim whose recipe has no anchor, because the paper prints no value that could serve as one."""
RULES_FILE = files("fedloom_studies.reproduce").joinpath("rules.md")
"""File with the rules for judging claims, which is inserted at the end of the page."""


class HeadlineClaim(Value):
    """Headline claim of a paper."""

    text: str = Field(description="the claim, in at most nine words")
    claim: str = Field(description="first words of the corresponding claim in the recipes")
    published: tuple[str, ...] = Field((), description="names of recipes that follow the published protocol")
    fair: tuple[str, ...] = Field((), description="names of recipes of the fair test")
    full: str = Field("", description="name of a full-size recipe, if no smaller recipe can decide the claim")


class CorrectedVerdict(Value):
    """Verdict that the published page stated and that has since changed."""

    text: str = Field(description="the claim")
    was: str = Field(description="verdict that the page stated before")
    why: str = Field(description="error in the earlier verdict")
    recipe: str = Field("", description="recipe that now judges the claim. It may still be waiting to run")


class PaperSection(Value):
    """Section about a paper: its name as in the titles of recipes, a description, and its headline claims."""

    name: str
    title: str
    claims: str = Field("", description="the paper's idea, in one line of plain words")
    number: str = Field("", description="first words of the headline claim with the most informative number")
    why: str = Field("", description="explanation of the results, with placeholders in braces for measured differences")
    objection: str = Field(
        "", description="objection that the authors might raise, with placeholders in braces for measured numbers"
    )
    beside: str = Field("", description="other pages with measurements of the paper's methods, as Markdown")
    changed: str = Field("", description="changes that were made after a table of results was first seen")
    anchor: tuple[str, ...] = Field((), description="columns that show how much a run deviates from the paper's run")
    anchored: dict[str, str] = Field(
        default_factory=dict,
        description="for each recipe without printed results: the most similar recipe with printed results",
    )
    row: tuple[HeadlineClaim, ...] = ()
    corrected: tuple[CorrectedVerdict, ...] = ()


Summaries = Mapping[str, RecipeSummary | None]


def read_paper_sections() -> tuple[PaperSection, ...]:
    """Return the papers in the order of the page."""
    document = tomllib.loads(files("fedloom_studies.reproduce").joinpath("papers.toml").read_text())
    return tuple(PaperSection(**one) for one in document["paper"])


def select_papers(recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Return all recipes except those for tables of other programs, which have their own page."""
    return {name: one for name, one in recipes.items() if not one.paper.table}


def paper_pages(recipes: Mapping[str, Recipe], results: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of all files: the page about all papers (named ""), marks, and recipe pages.

    Raises:
        RunDirError: a file in ``results`` is not a recipe's summary.
        ConfigError: a sentence in ``papers.toml`` states a difference that is not significant.
    """
    recipes = select_papers(recipes)
    summaries, needed = {name: last_summary(recipe, results) for name, recipe in recipes.items()}, read_needs(results)
    yield "", papers_overview(recipes, summaries, needed)
    yield from marks.draw_marks().items()
    yield f"{facts.FACTS_PAGE}.md", facts.facts_page(recipes)
    by_name = {sheet.name: sheet for sheet in read_paper_sections()}
    for name, recipe in recipes.items():
        sheet = by_name[recipe.paper.title.partition(",")[0]]
        yield (
            f"{name}.md",
            recipe_page(recipe, summaries[name], needed.get(name), _regime_sentence(recipes, summaries, sheet, name)),
        )
        figure = draw_figure(recipe, summaries[name])
        if figure:
            yield f"{name}.svg", figure


def papers_overview(recipes: Mapping[str, Recipe], summaries: Summaries, needed: Mapping[str, RecipeNeed]) -> str:
    """Render the page about all papers."""
    recipes = select_papers(recipes)
    papers = [
        (sheet, [_claim_cells(recipes, summaries, sheet, row) for row in sheet.row]) for sheet in read_paper_sections()
    ]
    lines = [PAPERS_TEXT, '<div class="narrow" markdown="1">', ""]
    lines += ["| paper and claim | as published | fair test | most informative number |", "|---|---|---|---|"]
    for sheet, cells in papers:
        published, fair = (combine_verdicts(side) for side in zip(*cells, strict=True)) if cells else ("", "")
        number = _render_most_telling(sheet, cells)
        lines.append(
            f"| [{sheet.name}](#{_heading_anchor(sheet.name)}): {sheet.claims} | {published} | {fair} | {number} |"
        )
    lines += ["", "</div>", "", CLOSING_TEXT]
    for sheet, cells in papers:
        lines += _paper_section_lines(sheet, cells, recipes, summaries, needed)
    lines += [
        *_corrections_table(recipes, summaries),
        *_open_claim_commands(papers, recipes, summaries, needed),
        RULES_FILE.read_text(),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _paper_section_lines(
    sheet: PaperSection,
    cells: list[tuple[ClaimCell, ClaimCell]],
    recipes: Mapping[str, Recipe],
    summaries: Summaries,
    needed: Mapping[str, RecipeNeed],
) -> Iterator[str]:
    """Yield the section about a paper: counts, a row for each claim, the reason, a picture, and its recipes."""
    yield from (
        f"## {sheet.name}",
        "",
        sheet.title,
        "",
        count_sentences(cells),
        "",
        '<div class="narrow" markdown="1">',
        "",
    )
    yield from ("| claim | paper's margin, anchors | published | fair |", "|---|---|---|---|")
    for row, (published, fair) in zip(sheet.row, cells, strict=True):
        margin = _printed_margin(recipes, row, published, fair)
        distances = _anchor_distances(recipes, summaries, sheet, published, fair)
        beside = distances if margin == "-" else f"{margin}, {distances}"
        yield f"| {row.text} | {beside} | {show_mark(published)} | {show_mark(fair)} |"
    yield from ("", "</div>", "")
    reason = fill_numbers(sheet.why, recipes, summaries)
    for paragraph in (reason, _objections_text(sheet, cells, recipes, summaries), sheet.beside):
        if paragraph:
            yield from (paragraph, "")
    yield from _reduced_runs_sentence(cells, recipes, summaries)
    named = sorted((cell for pair in cells for cell in pair if cell.recipe), key=lambda cell: not cell.number)
    drawn = [cell.recipe for cell in named if has_plot(recipes[cell.recipe], summaries[cell.recipe])]
    for name in drawn[:1]:
        summary = summaries[name]
        assert summary is not None
        yield from (
            figure_link(recipes[name], summary, f"{PAPERS_FOLDER}/"),
            "",
            f"[{recipes[name].paper.title}]({PAPERS_FOLDER}/{name}.md)",
            "",
        )
    yield from ('<details markdown="1"><summary>All experiments for this paper</summary>', "")
    if sheet.changed:
        yield from (f"**Changes made after results were known.** {sheet.changed}", "")
    of_paper = [(name, one) for name, one in recipes.items() if one.paper.title.startswith(f"{sheet.name},")]
    yield from (
        f"[Facts about the public code]({PAPERS_FOLDER}/{facts.FACTS_PAGE}.md#{_heading_anchor(sheet.name)})",
        "",
    )
    yield from ("| experiment (laptop scale) | protocol and state |", "|---|---|")
    for name, one in of_paper:
        summary = summaries[name]
        status = (
            recipe_state_phrase(one, summary).removeprefix("run, laptop scale, ")
            if summary
            else not_run_reason(one, needed.get(name))
        )
        far = is_different_regime(_paper_anchors(recipes, summaries, sheet, name))
        came_out = ", not comparable" if far else _verdict_sentence(one, summary)
        title = one.paper.title.removeprefix(f"{sheet.name}, ")
        yield f"| [{title}]({PAPERS_FOLDER}/{name}.md) | {one.paper.kind}: {status}{came_out} |"
    yield from ("", "</details>", "")


def _objections_text(
    sheet: PaperSection, cells: list[tuple[ClaimCell, ClaimCell]], recipes: Mapping[str, Recipe], summaries: Summaries
) -> str:
    """Render objections that the authors might raise, with the number of claims that are still open."""
    if not sheet.objection:
        return ""
    candidates = [cell for pair in cells for cell in pair if cell.is_asked]
    undecided = [cell for cell in candidates if cell.verdict not in (looks.HOLDS, looks.FAILS)]
    count = f"{len(undecided)} of the {len(candidates)} verdicts {'is' if len(undecided) == 1 else 'are'} open."
    text = fill_numbers(sheet.objection, recipes, summaries)
    return f"**Possible objections from the authors.** {text} {count}"


def _reduced_runs_sentence(
    cells: list[tuple[ClaimCell, ClaimCell]], recipes: Mapping[str, Recipe], summaries: Summaries
) -> Iterator[str]:
    """Yield a sentence that names the recipes whose runs have fewer rounds or less data than the papers' runs."""
    notes = []
    for name in dict.fromkeys(cell.recipe for pair in cells for cell in pair if cell.number):
        recipe, summary = recipes[name], summaries[name]
        if summary is not None and not _is_full_length(recipe, summary):
            size = recipe.paper.reduced if summary.says == REDUCED_PHRASE else summary.says
            notes.append(f"[{name}]({PAPERS_FOLDER}/{name}.md) ({size})")
    if notes:
        yield from (f"The following experiments are smaller than the paper's: {', '.join(notes)}.", "")


def _paper_anchors(
    recipes: Mapping[str, Recipe], summaries: Summaries, sheet: PaperSection, name: str
) -> list[PaperAnchor]:
    return farthest_anchors(sheet.anchor, sheet.anchored.get(name, name), recipes, summaries)


def _regime_sentence(recipes: Mapping[str, Recipe], summaries: Summaries, sheet: PaperSection, name: str) -> str:
    """Return a sentence about a recipe whose run is not comparable to the paper's, or "" for any other recipe."""
    distances = _paper_anchors(recipes, summaries, sheet, name)
    far = ", ".join(f"{one.words} in [{one.recipe}]({one.recipe}.md) ({one.variant})" for one in distances)
    return (
        f"The run is not comparable to the paper's, so no claim is judged. Differences from the paper: {far}."
        if is_different_regime(distances)
        else ""
    )


def _anchor_distances(
    recipes: Mapping[str, Recipe], summaries: Summaries, sheet: PaperSection, *cells: ClaimCell
) -> str:
    """Return the distances of the anchors from the paper's values, for the recipes that provide the verdicts."""
    words = {}
    for mode, cell in zip(("published", "fair"), cells, strict=True):
        distances = _paper_anchors(recipes, summaries, sheet, cell.recipe) if cell.recipe else []
        words[mode] = ", ".join(one.words for one in distances)
    different = {text: mode for mode, text in words.items() if text}
    if len(different) == 2:
        return ", ".join(f"{text} ({mode})" for text, mode in different.items())
    return next(iter(different), NO_ANCHOR_TEXT)


def _claim_cells(
    recipes: Mapping[str, Recipe], summaries: Summaries, sheet: PaperSection, row: HeadlineClaim
) -> tuple[ClaimCell, ClaimCell]:
    published = _claim_cell(recipes, summaries, sheet, row, row.published)
    if row.full and not row.published:
        published = ClaimCell(UNTESTED, UntestedReason.GPU)
    return published, _claim_cell(recipes, summaries, sheet, row, row.fair)


def _claim_cell(
    recipes: Mapping[str, Recipe], summaries: Summaries, sheet: PaperSection, row: HeadlineClaim, names: tuple[str, ...]
) -> ClaimCell:
    """Return the verdict on a headline claim under the given protocol.

    The verdict comes from a recipe that is up to date and complete, at full length if possible. Among several, the
    least favorable verdict is used.

    A recipe whose run is not comparable to the paper's yields no verdict, and the verdict of a stand-in appears only on
    its own page.
    """
    if not names:
        return ClaimCell(UNTESTED, UntestedReason.UNASKED)
    far = [name for name in names if is_different_regime(_paper_anchors(recipes, summaries, sheet, name))]
    names = tuple(name for name in names if name not in far)
    if not names:
        return ClaimCell(UNTESTED, UntestedReason.REGIME, recipe=far[0])
    if all(recipes[name].paper.stand_in for name in names):
        return ClaimCell(UNTESTED, UntestedReason.STAND_IN, recipe=names[0])
    names = tuple(name for name in names if not recipes[name].paper.stand_in)
    if row.full and all(recipes[name].paper.reduced for name in names):
        return ClaimCell(UNTESTED, UntestedReason.GPU, recipe=names[0])
    measured, missing = [], ClaimCell(UNTESTED, UntestedReason.NOT_RUN, recipe=names[0])
    for name in names:
        recipe, summary = recipes[name], summaries.get(name)
        if not _is_current(summary, recipe):
            continue
        one = _verdict_on(recipe, summary, row.claim)
        if one is not None and one.measured:
            favour = VERDICT_ORDER.index(one.verdict), one.closest_rival.look.difference
            measured.append((not _is_full_length(recipe, summary), favour, name, one))
        elif one is not None:
            missing = ClaimCell(one.verdict, one.reason, recipe=name)
    if not measured:
        return missing
    *_, name, one = min(measured, key=lambda m: m[:2])
    return ClaimCell(one.verdict, None, _closest_rival_number(one), name)


def _closest_rival_number(one: judge.JudgedClaim) -> str:
    """Render the difference from the closest rival or, if this rival is a number, the subject's own value."""
    of, look, rival = get_unit(one.figure), one.closest_rival.look, one.closest_rival.name
    if not re.fullmatch(r"-?[\d.e-]+", rival):
        return of.lead(look.difference, look.half)
    sign = 1 if one.claim.higher is not None else -1
    return f"{of.value(float(rival) + sign * look.difference, look.half)}, threshold {rival}"


def _is_current(summary: RecipeSummary | None, recipe: Recipe) -> TypeGuard[RecipeSummary]:
    """Return True if a summary is complete and was created with the current version of the recipe."""
    return summary is not None and summary.complete and not is_earlier_version(recipe, summary)


def _is_full_length(recipe: Recipe, summary: RecipeSummary) -> bool:
    """Return True if a run has as many rounds and as much data as the paper's."""
    return recipe.paper.reduced is None and {d["rounds"] for d in recipe.make_documents("full").values()} == {
        summary.rounds
    }


def _verdict_on(recipe: Recipe, summary: RecipeSummary, start: str) -> judge.JudgedClaim | None:
    verdicts = judge.judge_claims(recipe, summary.numbers)
    return next((one for one in verdicts if one.claim.text.startswith(start)), None)


def _render_most_telling(sheet: PaperSection, cells: list[tuple[ClaimCell, ClaimCell]]) -> str:
    """Render a paper's most telling number, from the fair test if possible, otherwise as published."""
    for row, (published, fair) in zip(sheet.row, cells, strict=True):
        if row.text.startswith(sheet.number):
            cell, mode = (fair, "fair") if fair.number else (published, "published")
            return (
                f"[{cell.number}]({PAPERS_FOLDER}/{cell.recipe}.md), {mode}: {row.text}" if cell.number else cell.word
            )
    raise ConfigError(f"papers.toml, {sheet.name}: no claim begins with {sheet.number!r}")


def _verdict_sentence(recipe: Recipe, summary: RecipeSummary | None) -> str:
    """Return a sentence with the verdicts on a recipe's claims, or "" if its current version has no result."""
    if not _is_current(summary, recipe):
        return ""
    verdicts = [one for one in judge.judge_claims(recipe, summary.numbers) if not one.claim.construction]
    words = [one.words for one in verdicts]
    possible = (*looks.ClaimVerdict, *(looks.claim_words(UNTESTED, reason) for reason in UntestedReason))
    shown = marks.join_counts([marks.count_claims(words.count(w), w) for w in possible if w in words])
    several = "s" if len(words) > 1 else ""
    return f". Of {len(words)} claim{several}, {shown}" if shown else ""


def _printed_margin(recipes: Mapping[str, Recipe], row: HeadlineClaim, *cells: ClaimCell) -> str:
    """Render the lead over the closest rival that the paper reports, from the first recipe that contains it."""
    for name in (*(cell.recipe for cell in cells if cell.recipe), *row.published, *row.fair):
        claim = _find_claim(recipes[name], row.claim)
        if claim is not None and math.isfinite(lead := judge.smallest_printed_lead(recipes[name], claim)):
            return get_unit(Reference.create(claim.subject, recipes[name].paper.figure).figure).lead(lead)
    return "-"


def _find_claim(recipe: Recipe, start: str) -> Claim | None:
    return next((claim for claim in recipe.paper.claims if claim.text.startswith(start)), None)


def _corrections_table(recipes: Mapping[str, Recipe], summaries: Summaries) -> Iterator[str]:
    """Yield a table of published verdicts that have since changed, with the reasons."""
    yield from ("## Corrections", "", CORRECTED_TEXT, "")
    yield from ("| claim | earlier verdict | reason |", "|---|---|---|")
    for sheet in read_paper_sections():
        for one in sheet.corrected:
            waits = one.recipe and not _is_current(summaries.get(one.recipe), recipes[one.recipe])
            note = f" [{one.recipe}]({PAPERS_FOLDER}/{one.recipe}.md) has not been run since." if waits else ""
            yield f"| {sheet.name}, {one.text} | {one.was} | {one.why}{note} |"
    yield ""


def _open_claim_commands(
    papers: list[tuple[PaperSection, list[tuple[ClaimCell, ClaimCell]]]], recipes: Mapping[str, Recipe],
    summaries: Summaries, needed: Mapping[str, RecipeNeed],
) -> Iterator[str]:  # fmt: skip
    """Yield commands and time estimates for claims that are open because they need a GPU, a run, or more seeds."""
    large = dict.fromkeys(
        row.full for sheet, cells in papers for row, pair in zip(sheet.row, cells, strict=True)
        if row.full and {UntestedReason.GPU, UntestedReason.REGIME} & {cell.reason for cell in pair}
    )  # fmt: skip
    yield from ("## Open claims", "")
    for name in large:
        need = needed.get(name)
        time = f" (about {duration_text(need.minutes)})" if need else ""
        wants = f" and the data set {', '.join(need.missing)}" if need and need.missing else ""
        yield f"- This experiment requires a GPU{wants}: `fedloom reproduce {name} --scale full --device cuda`{time}."
    waiting = dict.fromkeys(
        name for sheet, cells in papers for row, pair in zip(sheet.row, cells, strict=True)
        for names, cell in zip((row.published, row.fair), pair, strict=True)
        if cell.reason not in (UntestedReason.GPU, UntestedReason.REGIME)
        for name in names
        if cell.reason == UntestedReason.NOT_RUN or not _is_current(summaries.get(name), recipes[name])
    )  # fmt: skip
    for name in waiting:
        budget = recipes[name].budget("laptop")
        if budget is not None:
            yield f"- Not run yet: `fedloom reproduce {name}` (up to {format_option(budget)} core-minutes)."
    short = dict.fromkeys(
        cell.recipe for _, cells in papers for pair in cells for cell in pair
        if cell.verdict in (looks.UNDECIDED, looks.PARTLY)
        and (summary := summaries[cell.recipe]) and len(summary.seeds) < looks.LOOK_LEVELS[-1][0]
    )  # fmt: skip
    if short:
        named = ", ".join(f"[{name}]({PAPERS_FOLDER}/{name}.md)" for name in short)
        yield (
            "- With 10 or 20 seeds (`--seeds`), these experiments may settle claims that are undecided or hold only in "
            f"part: {named}."
        )
    yield from (
        "",
        "You can stop and resume each of these commands. `fedloom reproduce --all --budget 8h` runs all unfinished",
        "experiments.",
        "",
    )


def _heading_anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
