"""The page of one recipe: Markdown made from its summary, run or not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedloom.report.numbers import WORK
from fedloom.reproduce import judge
from fedloom.reproduce.charts import chart, charted
from fedloom.reproduce.choices import at_an_edge
from fedloom.reproduce.figures import Reference
from fedloom.reproduce.recipe import SCALES, Recipe, Scale
from fedloom.reproduce.summary import Summary, read

MODES = {
    "published": "The paper's own settings, its public code's variants and its own way to choose.",
    "fair": "Equal trials for every method, chosen on validation data; budgets are stated.",
    "near": "The stated protocol; what it leaves open is taken alike for all methods.",
}


def last(recipe: Recipe, results: Path) -> Summary | None:
    """The summary of the largest scale that was run; smoke shows nothing."""
    scales: list[Scale] = [scale for scale in reversed(SCALES) if scale != "smoke"]
    return next((s for scale in scales if (s := read(results, recipe.name, scale))), None)


def state(recipe: Recipe, summary: Summary | None) -> str:
    """One phrase: not run, unfinished or run, at which scale, and whether of an earlier version of the recipe."""
    if summary is None:
        return "not run"
    done = "run" if summary.complete else "unfinished"
    earlier = "" if summary.protocol == recipe.protocol(summary.scale) else ", an earlier version of the recipe"
    return f"{done}, {summary.scale} scale, {summary.date}{earlier}"


def plot(recipe: Recipe, summary: Summary | None) -> str:
    """The figure of a recipe's table as SVG; empty where nothing was run or there is no table."""
    return "" if summary is None else chart(judge.cells(recipe, summary.numbers, compare=False))


def has_plot(recipe: Recipe, summary: Summary | None) -> bool:
    """Whether `plot` gives a figure; it is slow to draw."""
    return summary is not None and bool(charted(judge.cells(recipe, summary.numbers, compare=False)))


def page(recipe: Recipe, summary: Summary | None) -> str:
    """The page of a recipe as Markdown."""
    return "\n".join(_lines(recipe, summary)).rstrip() + "\n"


def _lines(recipe: Recipe, summary: Summary | None) -> Iterator[str]:
    paper = recipe.paper
    yield from (f"# {recipe.name}", "", f"{paper.title}. {MODES[paper.mode]} Protocol: {paper.protocol}", "")
    yield from ("[All papers](../papers.md)", "")
    if paper.reduced:
        yield from (f"Reduced: {paper.reduced}; so claims are judged, and no cell is.", "")
    for unknown in paper.open:
        yield f"- Not stated: {unknown.what}. Taken: {unknown.choice} ({unknown.reason})."
    if paper.open:
        yield ""
    if summary is None:
        yield f"Not run{_stated(recipe)}. Command: `fedloom reproduce {recipe.name}`"
        return
    budget = recipe.budget(summary.scale)
    code = f", commit {summary.commit[:12]}{'-dirty' * summary.commit.endswith('-dirty')}" if summary.commit else ""
    yield (
        f"{'Run' if summary.complete else 'Unfinished'}: `{summary.command}`; {summary.says}; seeds {summary.seeds}, "
        f"{summary.rounds} rounds, {summary.minutes:.1f} core-minutes{f' of a budget of {budget:g}' if budget else ''},"
        f" {summary.date}{code}, torch {summary.versions['torch']}, {summary.machine}."
    )
    if summary.protocol != recipe.protocol(summary.scale):
        yield from ("", "The recipe has changed since; these are the results of its earlier version.")
    yield from ("", *_table(recipe, summary), *_claims(recipe, summary), *_rest(recipe, summary))


def _stated(recipe: Recipe) -> str:
    budget = recipe.budget("laptop")
    return "; no laptop scale" if budget is None else f" (stated budget: {budget:g} core-minutes)"


def _table(recipe: Recipe, summary: Summary) -> Iterator[str]:
    compare = recipe.as_the_paper(summary.scale, summary.samples)
    cells = judge.cells(recipe, summary.numbers, compare=compare)
    if not cells:
        return
    if any(c.n for c in cells):
        yield from (f"![ours and the paper's]({recipe.name}.svg)", "")
    verdict = " verdict |" if compare else ""
    yield f"| | | ours (mean ± std) | round chosen on validation | paper |{verdict}"
    yield f"|---|---|---|---|---|{'---|' if compare else ''}"
    for cell in cells:
        few = f" (n = {cell.n})" if cell.n < len(summary.seeds) else ""
        ours = "not run" if not cell.n else number(cell.mean) + spread(cell.std) + few
        paper = "-" if cell.paper is None else number(cell.paper) + spread(cell.paper_std)
        said = f" {cell.verdict} |" if compare else ""
        yield f"| {cell.variant} | {cell.column} | {ours} | {number(cell.chosen)} | {paper} |{said}"
    if compare and recipe.paper.nearest:
        yield f"\nThese cells are counted in [{recipe.paper.nearest}]({recipe.paper.nearest}.md), nearer to the paper."
    elif not compare and recipe.paper.reduced is None and not summary.samples:
        yield "\nThe size of the data was not recorded, so no cell is compared."
    yield ""


def _claims(recipe: Recipe, summary: Summary) -> Iterator[str]:
    judged = judge.claims(recipe, summary.numbers)
    if not judged:
        return
    yield "| claim | verdict | pooled difference | detectable | comparisons as claimed | the paper's |"
    yield "|---|---|---|---|---|---|"
    for one in judged:
        theirs = number(judge.papers_lead(recipe, one.claim))
        if not one.known:
            yield f"| {one.claim.text} | not run | - | - | - | {theirs} |"
            continue
        verdict = f"by construction; {one.verdict}" if one.claim.construction else one.verdict
        detectable = number(one.pooled.detectable) if one.verdict == judge.OPEN else "-"
        yield f"| {one.claim.text} | {verdict} | {difference(one)} | {detectable} | {one.count} | {theirs} |"
    yield ""
    several = [one for one in judged if len(one.known) > 1 and not one.claim.construction]
    if several:
        yield from ("| comparison | difference | clear (Holm) |", "|---|---|---|")
    for one in several:
        for c in sorted(one.known, key=lambda c: c.look.difference):
            pair = f"{c.left} against {c.right}".replace("|", "\\|")
            yield f"| {pair} | {signed(c.look.difference)}{spread(c.look.half)} | {c.look.verdict} |"
    if several:
        yield ""


def difference(judged: judge.Judged) -> str:
    """The pooled difference with its interval, the margin beside it, and the seeds."""
    look = judged.pooled
    margin = judged.claim.margin
    within = "" if not margin else f"; margin {'±' if judged.claim.equivalent else '-'}{margin:g}"
    level = f" at {100 * (1 - look.level):g} %" if math.isfinite(look.level) else ""
    return f"{signed(look.difference)}{spread(look.half)}{level} (n = {look.n}{within})"


def _rest(recipe: Recipe, summary: Summary) -> Iterator[str]:
    """Work, choices, failures, and what was tried."""
    first = next(iter(summary.numbers))
    methods = dict.fromkeys(Reference.of(text, "").method for text in summary.numbers[first])
    work = []
    for method in methods:
        known = {n: summary.numbers[first].get(str(Reference("", method, "", n)), {}) for n in WORK}
        means = {n: sum(v for v in by.values() if v) / max(1, len(by)) for n, by in known.items()}
        traffic = (means["bytes_up"] + means["bytes_down"]) / 1e6
        work.append(f"{method} {means['samples_backward']:.4g} and {traffic:.4g} MB")
    yield f"Gradients of samples and traffic of a run ({first}): {'; '.join(work)}."
    chosen = [(v, m, c) for v, methods in summary.choices.items() for m, c in methods.items()]
    if chosen:
        yield from ("", "| chosen on validation | method | chosen | of |", "|---|---|---|---|")
    for variant, method, choice in chosen:
        yield f"| {variant} | {method} | {choice['chosen']}{_edge(choice)} | {' / '.join(choice['scores'])} |"
    for failure in summary.failures:
        yield f"\nWithout a result: {failure}."
    for tried in recipe.paper.tried:
        yield f"\n{tried}"


def _edge(choice: Mapping[str, Any]) -> str:
    keys = at_an_edge(choice["chosen"], choice["scores"])
    return f" (edge of the grid: {', '.join(keys)})" if keys else ""


def number(value: float) -> str:
    """A figure for people: four decimals below 10, four digits above."""
    return "-" if not math.isfinite(value) else f"{value:.4f}" if abs(value) < 10 else f"{value:.5g}"


def signed(value: float) -> str:
    """A difference for people."""
    return ("+" if value > 0 else "") + number(value)


def spread(std: float | None) -> str:
    """± standard deviation or half an interval, where there is one."""
    return f" ± {number(std)}" if std is not None and math.isfinite(std) else ""
