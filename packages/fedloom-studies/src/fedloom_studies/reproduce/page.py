"""Markdown page about one recipe, generated from the recipe's summary. The recipe may not have been run yet."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.formats import format_fixed, format_option, round_significant, write_total
from fedloom.lab.report import WORK_FIGURES
from fedloom.rundir import get_label
from fedloom_studies.reproduce import judge, looks
from fedloom_studies.reproduce.cells import finite_by_seed, make_table_cells
from fedloom_studies.reproduce.charts import alternative_text, draw_table, drawable_cells
from fedloom_studies.reproduce.choices import count_beyond_edges, edge_keys, method_candidates
from fedloom_studies.reproduce.figures import Reference, get_unit
from fedloom_studies.reproduce.recipe import (
    FOLLOWS_PROTOCOL_PHRASE,
    RECIPE_SCALES,
    REDUCED_PHRASE,
    Paper,
    Recipe,
    Scale,
)
from fedloom_studies.reproduce.summary import RecipeNeed, RecipeSummary, add_rivals, read_summary, write_seeds

MODE_TEXTS = {
    "published": (
        "This experiment uses the paper's settings and the variants in its public code, and selects settings and "
        "models as the paper does."
    ),
    "fair": "In this experiment, every method is tuned on validation data, with a grid of the same size.",
    "near": (
        "This experiment follows the stated protocol. For details that the paper does not state, all methods use the "
        "same choices."
    ),
}

EMPTY_CELL = "-"
"""Text shown in an empty cell of a table."""


def _describe_mode(paper: Paper) -> str:
    if not paper.stand_in:
        return MODE_TEXTS[paper.mode]
    settings = "It uses the published settings." if paper.mode == "published" else MODE_TEXTS[paper.mode]
    return (
        f"This experiment is a stand-in: {paper.stand_in}. Its verdicts apply to the stand-in only, and not to the "
        f"paper's experiment. {settings}"
    )


def last_summary(recipe: Recipe, results: Path) -> RecipeSummary | None:
    """Return the summary at the largest scale that was run, with rivals' values added, or None if nothing was run.

    Runs at smoke scale are ignored.
    """
    scales: list[Scale] = [scale for scale in reversed(RECIPE_SCALES) if scale != "smoke"]
    summary = next((s for scale in scales if (s := read_summary(results, recipe.name, scale))), None)
    return None if summary is None else add_rivals(recipe, summary, results)


def recipe_state_phrase(recipe: Recipe, summary: RecipeSummary | None) -> str:
    """Return a phrase for the state of a recipe: not run, unfinished or run, with scale and date.

    The phrase also states if the summary comes from an earlier version of the recipe.
    """
    if summary is None:
        return "not run"
    done = "run" if summary.complete else "unfinished"
    old = " (earlier version of the recipe)" if is_earlier_version(recipe, summary) else ""
    return f"{done}, {summary.scale} scale, {summary.date}{old}"


def is_earlier_version(recipe: Recipe, summary: RecipeSummary) -> bool:
    """Return True if a summary was created with an earlier version of the recipe."""
    return summary.protocol != recipe.protocol(summary.scale)


def not_run_reason(recipe: Recipe, need: RecipeNeed | None) -> str:
    """Return the reason why a recipe has no summary, with the time that it needs, if known."""
    budget = recipe.budget("laptop")
    if budget is not None:
        return f"not run (up to {format_option(budget)} core-minutes)"
    why = f"{', '.join(need.missing)} is missing" if need and need.missing else "no laptop scale"
    return f"not run: {why}{f' (about {duration_text(need.minutes)} at full scale)' if need else ''}"


def duration_text(minutes: float) -> str:
    """Return a duration as text, in minutes or days of a single processor core."""
    if minutes < 600:
        return f"{format_fixed(minutes, 0)} core-minutes"
    return f"{write_total(round_significant(minutes / 1440, 2) or 0.0)} core-days"


def draw_figure(recipe: Recipe, summary: RecipeSummary | None) -> str:
    """Draw the figure of a recipe's table as SVG. Return "" if no cell was run or the recipe has no table."""
    return "" if summary is None else draw_table(make_table_cells(recipe, summary.numbers, compare=False))


def has_plot(recipe: Recipe, summary: RecipeSummary | None) -> bool:
    """Return True if `draw_figure` would return a figure. This check is fast, whereas drawing the figure is slow."""
    return summary is not None and bool(drawable_cells(make_table_cells(recipe, summary.numbers, compare=False)))


def figure_link(recipe: Recipe, summary: RecipeSummary, folder: str) -> str:
    """Return the Markdown of an image link to the figure of a recipe, with an alternative text."""
    shown = make_table_cells(recipe, summary.numbers, compare=False)
    return f"![{alternative_text(recipe.paper.title, shown)}]({folder}{recipe.name}.svg)"


def recipe_page(recipe: Recipe, summary: RecipeSummary | None, need: RecipeNeed | None = None, regime: str = "") -> str:
    """Render the page about a recipe in Markdown.

    ``regime`` is a sentence about a recipe whose run is not comparable to the paper's.
    """
    return "\n".join(_recipe_page_lines(recipe, summary, need, regime)).rstrip() + "\n"


def _recipe_page_lines(
    recipe: Recipe, summary: RecipeSummary | None, need: RecipeNeed | None, regime: str
) -> Iterator[str]:
    paper = recipe.paper
    yield from (
        f"# {recipe.name}",
        "",
        f"{paper.title}. {_describe_mode(paper)}",
        "",
        f"Protocol: {paper.protocol}",
        "",
    )
    yield from ("[Tables from other programs](../others.md)" if paper.table else "[All papers](../papers.md)", "")
    if paper.reduced:
        yield from (
            f"The run is smaller than the paper's: {paper.reduced}. Claims are judged, but individual values are not "
            "compared.",
            "",
        )
    if regime:
        yield from (regime, "")
    if paper.open:
        yield from ("| not stated in the paper | our choice | reason |", "|---|---|---|")
        yield from (f"| {u.what} | {u.choice} | {u.reason} |".replace("||", "\\|\\|") for u in paper.open)
    yield from search_lines(recipe, summary)
    old = summary is not None and is_earlier_version(recipe, summary)
    verdicts = judge.judge_claims(recipe, summary.numbers) if summary else []
    moved = (
        {one.claim.text: judge.judge_at_validation(recipe, one, summary.numbers) for one in verdicts} if summary else {}
    )
    if paper.open:
        yield ""
    yield from ([] if regime else _turning_comparisons_table(verdicts, moved))
    if summary is None:
        not_run_note = not_run_reason(recipe, need)
        yield f"{not_run_note[0].upper()}{not_run_note[1:]}. To run it, use `fedloom reproduce {recipe.name}`."
        return
    budget = recipe.budget(summary.scale)
    code = f", commit {summary.commit[:12]}{'-dirty' * summary.commit.endswith('-dirty')}" if summary.commit else ""
    yield (
        f"The command `{_plain_command(summary.command)}` produced these "
        f"{'results' if summary.complete else 'unfinished results'} with {summary.rounds} rounds and seeds "
        f"{write_seeds(summary.seeds)}. {_scale_sentence(summary.says)} It took {format_fixed(summary.minutes, 1)} "
        f"core-minutes{f' of a budget of {format_option(budget)}' if budget else ''} ({summary.date}{code}, torch "
        f"{summary.versions['torch']}, {summary.machine})."
    )
    if old:
        yield from (
            "",
            "The recipe has changed since then. These results come from an earlier version and decide no claim.",
        )
    claim_lines = () if regime else _claims_table(recipe, verdicts, moved, old=old)
    yield from ("", *_recipe_table(recipe, summary), *claim_lines, *_remaining_lines(recipe, summary))


def _scale_sentence(says: str) -> str:
    """Return a sentence about how a run differs from the paper's protocol, given the recorded phrase."""
    if says.startswith(FOLLOWS_PROTOCOL_PHRASE):
        rest = says.removeprefix(FOLLOWS_PROTOCOL_PHRASE).removeprefix(", ")
        return f"The run follows the protocol{f' ({rest})' if rest else ''}."
    return "The run is reduced as described above." if says == REDUCED_PHRASE else f"Size of the run: {says}."


def _plain_command(command: str) -> str:
    """Return a command without its list of seeds, which the page states in words."""
    return re.sub(r" --seeds [\d,]+", "", command)


SINGLE_COMPARISON_TEXT = (
    "The next table tests every comparison separately, with Holm's correction across all of the experiment's "
    "comparisons. The verdict on a claim is corrected only for this claim's rivals. A claim can therefore be decided "
    "even if no individual comparison is significant."
)
ESCAPED_BAR = "\\|"
"""Escaped vertical bar, which can be used inside a table cell."""
TURNS_TEXT = (
    "Some comparisons have one direction in the last round, which is reported, and the opposite direction in the best "
    "round on validation data:",
    "",
)
MAX_SHOWN_COMPARISONS = 3
"""Maximum number of comparisons listed for a claim if their direction depends on the reported round."""
Moved = Mapping[str, judge.JudgedClaim | None]
"""Verdicts at the round with the best validation result, keyed by the text of the claim."""


def _turning_comparisons_table(verdicts: list[judge.JudgedClaim], moved: Moved) -> list[str]:
    """Return a table of comparisons whose direction depends on the round that is reported."""
    lines = []
    for one in verdicts:
        at, of = moved[one.claim.text], get_unit(one.figure)
        pairs = zip(one.comparisons, at.comparisons, strict=True) if at and not one.claim.construction else ()
        turned = [
            f"{c.right.replace('|', ESCAPED_BAR)} | {of.lead(c.look.difference)} | {of.lead(then.look.difference)}"
            for c, then in pairs
            if c.look.n
            and then.look.n
            and len({judge.has_claimed_direction(one.claim, look.difference) for look in (c.look, then.look)}) > 1
        ]
        shown = turned[:MAX_SHOWN_COMPARISONS]
        counts = [f"{len(turned)} of {len(one.measured)}", *[""] * (len(shown) - 1)]
        lines += [f"| {one.claim.text} | {n} | {turn} |" for n, turn in zip(counts, shown, strict=False)]
    head = ("claim", "reversed comparisons", "example rival", "last round", "best validation round")
    return [*TURNS_TEXT, f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines, ""] if lines else []


def _recipe_table(recipe: Recipe, summary: RecipeSummary) -> Iterator[str]:
    compare = recipe.follows_paper(summary.scale, summary.samples)
    table_cells = make_table_cells(recipe, summary.numbers, compare=compare)
    if not table_cells:
        return
    if any(c.n for c in table_cells):
        yield from (figure_link(recipe, summary, ""), "")
    rows = []
    for cell in table_cells:
        of = get_unit(cell.figure)
        few = f" (n = {cell.n})" if cell.n < len(summary.seeds) else ""
        measured = cell.verdict if not cell.n else of.value(cell.mean, cell.std) + few
        paper = EMPTY_CELL if cell.paper is None else of.value(cell.paper, cell.paper_std)
        rows.append(
            [cell.variant, cell.column, measured, of.value(cell.chosen), paper, cell.verdict if compare else EMPTY_CELL]
        )
    yield from _nonempty_columns_table(
        ["clients", "model", "ours (mean ± std)", "best validation round", "paper", "verdict"], rows
    )
    if compare and recipe.paper.nearest:
        nearest = f"[{recipe.paper.nearest}]({recipe.paper.nearest}.md)"
        yield f"\n{nearest} is closer to the paper, so its values count instead of these."
    elif not compare and recipe.paper.reduced is None and not summary.samples:
        yield "\nThe record does not contain the data's size, so no value is compared."
    yield ""


def _nonempty_columns_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """To save space on phones, yield the lines of a table without the columns that are empty in every row."""
    places = [place for place in range(len(titles)) if any(row[place] != EMPTY_CELL for row in rows)]
    yield "|" + "".join(f" {titles[place]} |".replace("  ", " ") for place in places)
    yield f"|{'---|' * len(places)}"
    yield from (f"| {' | '.join(row[place] for place in places)} |" for row in rows)


def _claims_table(recipe: Recipe, verdicts: list[judge.JudgedClaim], moved: Moved, *, old: bool) -> Iterator[str]:
    if not verdicts:
        return
    titles = ["claim", "verdict", "smallest difference from a rival", "in the best validation round", "in the paper"]
    rows = []
    for one in verdicts:
        papers_margin = get_unit(one.figure).lead(judge.smallest_printed_lead(recipe, one.claim))
        if old or not one.measured:
            rows.append(
                [
                    one.claim.text,
                    looks.claim_words(looks.UNTESTED, looks.UntestedReason.NOT_RUN) if old else one.words,
                    EMPTY_CELL,
                    EMPTY_CELL,
                    papers_margin,
                ]
            )
            continue
        verdict = (
            f"{one.verdict} by construction"
            if one.claim.construction
            else f"{one.verdict}{detectable_difference_text(one)}"
        )
        at = moved[one.claim.text]
        then = closest_difference(at) if at else EMPTY_CELL
        rows.append([one.claim.text, f"{verdict}: {one.count}", closest_difference(one), then, papers_margin])
    yield from (*_nonempty_columns_table(titles, rows), "")
    if old:
        return
    several = [one for one in verdicts if len(one.measured) > 1 and not one.claim.construction]
    if several:
        yield from (SINGLE_COMPARISON_TEXT, "", "| comparison | difference | verdict (Holm) |", "|---|---|---|")
    pairs: dict[str, str] = {}
    for one in several:
        statistic = "standard deviations across seeds, " if one.claim.spread else ""
        for c in sorted(one.measured, key=lambda c: c.look.difference):
            pair = f"{statistic}{c.left} versus {c.right}".replace("|", "\\|")
            pairs.setdefault(pair, f"| {pair} | {interval_text(c.look, one.figure)} | {c.look.verdict} |")
    yield from pairs.values()
    if several:
        yield ""


def closest_difference(verdict: judge.JudgedClaim) -> str:
    """Render the difference from the rival that comes closest to contradicting the claim, and the claim's margin."""
    least, of = verdict.closest_rival, get_unit(verdict.figure)
    margin = of.value(verdict.claim.margin).replace("%", of.gap)
    within = "" if not verdict.claim.margin else f", margin {'±' if verdict.claim.equivalent else '-'}{margin}"
    return f"{interval_text(least.look, verdict.figure)} compared with {least.name}{within}".replace("|", "\\|")


def interval_text(look: looks.InterimTest, figure: str) -> str:
    """Render a difference with its interval, the level of the interval, and the number of seeds."""
    level = f"{format_option(100 * (1 - look.level))} %, " if math.isfinite(look.level) else ""
    return f"{get_unit(figure).lead(look.difference, look.half)} ({level}n = {look.n})"


def detectable_difference_text(verdict: judge.JudgedClaim) -> str:
    """Render the smallest difference that the seeds can detect for an undecided claim, or "" for other claims."""
    look = verdict.closest_rival.look
    if verdict.verdict != looks.UNDECIDED or not math.isfinite(look.detectable):
        return ""
    shown = get_unit(verdict.figure).lead(look.detectable).removeprefix("+")
    return f" ({look.n} seeds can detect {shown} or more)"


def _remaining_lines(recipe: Recipe, summary: RecipeSummary) -> Iterator[str]:
    """Yield lines about the work of a run, the chosen settings, failures, and attempts to explain a verdict."""
    first = next(iter(summary.numbers))
    methods = dict.fromkeys(
        Reference.create(text, "").method for text, by in summary.numbers[first].items() if finite_by_seed(by)
    )
    yield from (f"| work per run ({first}) | sample gradients | traffic |", "|---|---|---|")
    for method in methods:
        means = {
            n: _mean_over_seeds(summary.numbers[first].get(str(Reference("", method, "", n)), {})) for n in WORK_FIGURES
        }
        traffic = get_unit("bytes_up").value(means["bytes_up"] + means["bytes_down"])
        yield f"| {method} | {get_unit('samples_backward').value(means['samples_backward'])} | {traffic} |"
    chosen = [(v, m, c) for v, methods in summary.choices.items() for m, c in methods.items()]
    if recipe.paper.mode == "fair" and not is_earlier_version(recipe, summary):
        chosen = []
    if chosen:
        yield from ("", "| clients | method | chosen on validation data | candidates |", "|---|---|---|---|")
    for variant, method, choice in chosen:
        yield f"| {variant} | {method} | {choice['chosen']}{_edge_note(choice)} | {' / '.join(choice['scores'])} |"
    for failure in summary.failures:
        yield f"\nA run has no result: {failure}."
    for tried in recipe.paper.tried:
        yield f"\n{tried}"


def _mean_over_seeds(by_seed: Mapping[str, float | None]) -> float:
    """Return the mean over the seeds that have a result, or NaN if no seed has one."""
    measured = [value for value in by_seed.values() if value is not None]
    return sum(measured) / len(measured) if measured else math.nan


def search_lines(recipe: Recipe, summary: RecipeSummary | None) -> Iterator[str]:
    """Yield lines about the search in a fair recipe: the grid of every method, and the chosen values."""
    if recipe.paper.mode != "fair":
        return
    scale = summary.scale if summary else "laptop"
    choices = summary.choices if summary and not is_earlier_version(recipe, summary) else {}
    titles, rows = ["clients", "method", "options tuned", "trials", "chosen", "values at an edge"], []
    for variant, document in recipe.make_documents(scale).items():
        for method in document["method"]:
            label, grid = get_label(method), method.get("choose", {})
            options = "; ".join(f"{key} {', '.join(map(str, values))}" for key, values in grid.items())
            choice = choices.get(variant, {}).get(label)
            edges = ", ".join(edge_keys(choice["chosen"], choice["scores"])) if choice else ""
            further = count_beyond_edges(choice) if choice else 0
            trials = f"{len(method_candidates(method))}{f', then {further} beyond the grid' if further else ''}"
            chosen_text = choice["chosen"] if choice else looks.UntestedReason.NOT_RUN
            rows.append([variant, label, options or "none", trials, chosen_text, edges or EMPTY_CELL])
    yield from ("", *_nonempty_columns_table(titles, rows))
    for label, why in recipe.paper.fixed.items():
        yield f"\nFixed settings of `{label}`: {why}."
    yield ""


def _edge_note(choice: Mapping[str, Any]) -> str:
    keys = edge_keys(choice["chosen"], choice["scores"])
    return f" (at the edge of the grid: {', '.join(keys)})" if keys else ""
