"""Page about tables of other programs: every printed value next to fedloom's value, and verdicts of fair tests.

A value is exact if fedloom's mean has the printed digits, and close if it differs from the printed value by at most the
table's limit. A value beyond this limit is explained either by the spread over seeds, if it lies within two standard
errors, or by a sentence in the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import numpy as np

from fedloom.formats import format_fixed
from fedloom_studies.reproduce import judge
from fedloom_studies.reproduce.cells import TableCell, make_table_cells
from fedloom_studies.reproduce.figures import get_unit
from fedloom_studies.reproduce.marks import count_claims, join_counts
from fedloom_studies.reproduce.page import (
    draw_figure,
    interval_text,
    is_earlier_version,
    last_summary,
    not_run_reason,
    recipe_page,
    recipe_state_phrase,
)
from fedloom_studies.reproduce.reasons import PAPERS_FOLDER
from fedloom_studies.reproduce.recipe import Recipe
from fedloom_studies.reproduce.summary import RecipeSummary
from fedloom_studies.store import read_document

EXACT_COX_FILE = "brca-cox.json"
"""File with concordances of the exact Cox regression, in the summaries' folder. The script
`studies/scripts/brca_cox` writes this file."""
AFL_LOOPS_FILE = "afl-adult.json"
"""File with the results of the public code's loops on adult, in the summaries' folder.
`studies/scripts/afl_adult` repeats these loops in numpy."""
COX_TABLE = "FLamby, Fed-TCGA-BRCA"
LOOPS_TABLE = "q-FFL against AFL, UCI adult"
Figures = Mapping[str, Mapping[str, float]]
OTHERS_TEXT = """# Tables from other programs

This page reproduces tables that the authors of other programs have published for public data. Each table is first
reproduced with the authors' data, split, seeds and settings. Some tables are then followed by a fair test, in which all
methods are tuned equally. This page is generated from recorded runs.

You can reproduce the first table in about two minutes with two commands. The first command downloads four files from
UCI (70 kB):

<!-- not run: fetches files -->
```sh
fedloom data heart --data-dir DATA --fetch
fedloom reproduce flamby-heart --data-dir DATA
```
"""
WORDS_TEXT = """## How cells are classified

| word | meaning |
|---|---|
| *exact* | The mean across seeds matches all printed digits. |
| *close* | The difference is at most the table's limit, which is given next to the counts. |
| *spread* | The difference is larger, but at most two standard errors of the difference. |
| *explained* | The difference is larger than two standard errors. The reason is given below the table. |

The counts include only cells with a published value. The [rules for verdicts](papers.md#how-claims-are-judged) are
the same as for paper reproductions. """


class CellWord(StrEnum):
    """Words that describe how a value compares with the value printed in a paper.

    OPEN: the reason for the difference is unknown.
    """

    EXACT = "exact"
    CLOSE = "close"
    SPREAD = "spread"
    EXPLAINED = "explained"
    OPEN = "open"


def name_cell(recipe: Recipe, cell: TableCell) -> CellWord | None:
    """Return the word for a value, or None if the table does not print the value or it was not run."""
    if cell.paper is None or not np.isfinite(cell.mean):
        return None
    gap = abs(cell.mean - cell.paper)
    digit = 0.001 if recipe.paper.percent else 0.0001
    if gap <= digit / 2 + 1e-9:
        return CellWord.EXACT
    if gap <= recipe.paper.gap_limit:
        return CellWord.CLOSE
    if cell.verdict.startswith("within"):
        return CellWord.SPREAD
    return CellWord.EXPLAINED if cell.column in recipe.paper.explained else CellWord.OPEN


def recipes_by_table(recipes: Mapping[str, Recipe]) -> dict[str, list[Recipe]]:
    """Return the recipes of each table of another program, keyed by table. Recipes as published are listed first."""
    by_table: dict[str, list[Recipe]] = {}
    for recipe in recipes.values():
        if recipe.paper.table:
            by_table.setdefault(recipe.paper.table, []).append(recipe)
    return {table: sorted(group, key=lambda r: r.paper.mode != "published") for table, group in by_table.items()}


def render_pages(recipes: Mapping[str, Recipe], results: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of all files: the page about all tables (named ""), and each recipe's page and figure.

    Raises:
        RunDirError: a file in ``results`` is not a recipe's summary.
    """
    groups = recipes_by_table(recipes)
    summaries = {one.name: last_summary(one, results) for group in groups.values() for one in group}
    beside = {COX_TABLE: EXACT_COX_FILE, LOOPS_TABLE: AFL_LOOPS_FILE}
    yield "", render_overview(groups, summaries, {t: read_document(results / file, dict) for t, file in beside.items()})
    for group in groups.values():
        for one in group:
            yield f"{one.name}.md", recipe_page(one, summaries[one.name])
            if figure := draw_figure(one, summaries[one.name]):
                yield f"{one.name}.svg", figure


Summaries = Mapping[str, RecipeSummary | None]


def render_overview(groups: Mapping[str, list[Recipe]], summaries: Summaries, beside: Mapping[str, Figures]) -> str:
    """Render the page about all tables, with additional values for some of them."""
    lines = [OTHERS_TEXT, "| table | cells that were reproduced | fair test |", "|---|---|---|"]
    for table, group in groups.items():
        published, fair = _split_by_mode(group)
        counted = ", ".join(_count_verdicts(one, summaries[one.name]) for one in published)
        verdicts = ", ".join(_verdicts_text(one, summaries[one.name]) for one in fair) or "none"
        lines.append(f"| [{table}](#{_heading_anchor(table)}) | {counted} | {verdicts} |")
    lines.append("")
    for table, group in groups.items():
        lines += [f"## {table}", ""]
        for one in group:
            lines += _recipe_section(one, summaries[one.name])
        if beside.get(table):
            lines += {COX_TABLE: _exact_cox_table, LOOPS_TABLE: _loops_table}[table](beside[table])
    return "\n".join([*lines, WORDS_TEXT]).rstrip() + "\n"


def _split_by_mode(group: list[Recipe]) -> tuple[list[Recipe], list[Recipe]]:
    """Return the recipes that repeat a table as published, and those that test it fairly."""
    return [one for one in group if one.paper.mode == "published"], [one for one in group if one.paper.mode == "fair"]


def _is_current(recipe: Recipe, summary: RecipeSummary | None) -> RecipeSummary | None:
    return None if summary is None or is_earlier_version(recipe, summary) or not summary.complete else summary


def verdict_words(recipe: Recipe, summary: RecipeSummary | None) -> dict[str, CellWord]:
    """Return the word for each printed value of a recipe that was run, keyed by column."""
    done = _is_current(recipe, summary)
    shown = make_table_cells(recipe, done.numbers, compare=True) if done else []
    return {cell.column: word for cell in shown if (word := name_cell(recipe, cell))}


def _count_verdicts(recipe: Recipe, summary: RecipeSummary | None) -> str:
    words = list(verdict_words(recipe, summary).values())
    if not words:
        return _state_reason(recipe, summary)
    counts = ", ".join(f"{words.count(word)} {word}" for word in CellWord if word in words)
    return f"{counts} (of {len(words)} cells, limit {_limit_text(recipe)})"


def _state_reason(recipe: Recipe, summary: RecipeSummary | None) -> str:
    """Return the reason why a recipe has no current values."""
    return not_run_reason(recipe, None) if summary is None else recipe_state_phrase(recipe, summary)


def _limit_text(recipe: Recipe) -> str:
    return get_unit(recipe.paper.figure).difference(recipe.paper.gap_limit).removeprefix("+")


def _verdicts_text(recipe: Recipe, summary: RecipeSummary | None) -> str:
    done = _is_current(recipe, summary)
    if done is None:
        return _state_reason(recipe, summary)
    words = [one.words for one in judge.judge_claims(recipe, done.numbers)]
    counted = join_counts([count_claims(words.count(word), word) for word in dict.fromkeys(words)])
    best = max(_means_table(recipe, done).items(), key=lambda item: item[1])
    top = f"{_name_cell_row(best[0])} has the best mean ({get_unit(recipe.paper.figure).value(best[1])})"
    return f"{top}. Of {len(words)} claims, {counted}"


def _means_table(recipe: Recipe, summary: RecipeSummary) -> dict[str, float]:
    """Return each column's mean, in the unit of the table's values."""
    shown = make_table_cells(recipe, summary.numbers, compare=False)
    return {cell.column: cell.mean for cell in shown if cell.figure == recipe.paper.figure and np.isfinite(cell.mean)}


def _name_cell_row(column: str) -> str:
    return column.partition(", ")[0]


def _recipe_section(recipe: Recipe, summary: RecipeSummary | None) -> Iterator[str]:
    """Yield the lines about a recipe: its protocol, a row for each method, explanations, and verdicts."""
    done, paper = _is_current(recipe, summary), recipe.paper
    link = f"[{recipe.name}]({PAPERS_FOLDER}/{recipe.name}.md)"
    if paper.mode == "fair":
        yield from (
            f"**In a fair test** ({link}), every method is tuned on validation data with the same number of trials.",
            "",
        )
    else:
        yield from (f"**As published** ({link}): {paper.protocol}", "")
    if done is None:
        yield from (f"State: {_state_reason(recipe, summary)}. To run it, use `fedloom reproduce {recipe.name}`.", "")
        return
    shown = make_table_cells(recipe, done.numbers, compare=True)
    by_row: dict[str, dict[str, str]] = {}
    for cell in shown:
        row, _, column = cell.column.partition(", ")
        by_row.setdefault(row, {})[column] = _cell_value_text(recipe, cell)
    columns = list(dict.fromkeys(column for row in by_row.values() for column in row))
    yield from ('<div class="narrow" markdown="1">', "")
    values = "fedloom / printed" if any(cell.paper is not None for cell in shown) else "fedloom"
    yield f"| {values} | {' | '.join(column or 'mean' for column in columns)} |"
    yield f"|{'---|' * (len(columns) + 1)}"
    for row, by_column in by_row.items():
        yield f"| {row} | {' | '.join(by_column.get(column, '-') for column in columns)} |"
    yield from ("", "</div>", "")
    for column, word in verdict_words(recipe, summary).items():
        if word is CellWord.EXPLAINED:
            yield f"- {column}: {paper.explained[column]}."
    verdicts = judge.judge_claims(recipe, done.numbers)
    if verdicts:
        yield from ("", "| claim | verdict | difference from the closest rival |", "|---|---|---|")
    for one in verdicts:
        number = (
            f"{interval_text(one.closest_rival.look, one.figure)} compared with {one.closest_rival.name}"
            if one.measured
            else "-"
        )
        yield f"| {one.claim.text} | {one.words} | {number} |"
    yield ""


def _cell_value_text(recipe: Recipe, cell: TableCell) -> str:
    """Render fedloom's value, the printed value, and the word that compares them."""
    scale, digits = (100.0, 2) if get_unit(cell.figure).name == "%" else (1.0, 3)
    text = format_fixed(scale * cell.mean, digits)
    word = name_cell(recipe, cell)
    return text if word is None or cell.paper is None else f"{text} / {format_fixed(scale * cell.paper, digits)} {word}"


def _loops_table(loops: Figures) -> Iterator[str]:
    """Yield the lines about the results of running the public code's loops."""
    parts = list(next(iter(loops.values())))
    yield from ("**The public code's loops.** `studies/scripts/afl_adult` reimplements these loops in NumPy and runs "
                "them with five seeds.", "")  # fmt: skip
    yield from (f"| accuracy, % | {' | '.join(parts)} |", f"|{'---|' * (len(parts) + 1)}")
    for name, by_part in loops.items():
        yield f"| {name} | {' | '.join(format_fixed(100 * by_part[part], 2) for part in parts)} |"
    yield ""


def _exact_cox_table(cox: Figures) -> Iterator[str]:
    """Yield the lines about the exact Cox regression, which are printed below the table."""
    regions = [key for key in next(iter(cox.values())) if key.startswith("region")]
    yield from ("**Exact Cox regression.** `fedloom cox` fits a model to all patients' data in a few rounds. It uses "
                "only sums and does not need a learning rate. Seven pairs of the 39 columns are linearly dependent, so "
                "the fit uses a ridge penalty. The strength of the penalty is selected by cross-validation on the "
                "training patients.", "")  # fmt: skip
    yield from (f"| concordance | pooled | {' | '.join(regions)} |", f"|{'---|' * (len(regions) + 2)}")
    for kind, by_part in cox.items():
        yield f"| {kind} | {' | '.join(format_fixed(by_part[part], 3) for part in ('pooled', *regions))} |"
    yield ""


def _heading_anchor(title: str) -> str:
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -")
    return kept.replace(" ", "-")
