"""Show a recipe in the terminal: ours beside the paper's, the claims, and the list of recipes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedloom_studies.reproduce import judge
from fedloom_studies.reproduce.cells import cells
from fedloom_studies.reproduce.figures import unit
from fedloom_studies.reproduce.recipe import Recipe
from fedloom_studies.reproduce.summary import RecipeSummary

WIDTH = 160


def print_verdicts(recipe: Recipe, summary: RecipeSummary) -> None:
    """Both tables of a recipe on standard output."""
    compare = recipe.as_the_paper(summary.scale, summary.samples)
    rows = [
        (c.variant, c.column, unit(c.figure).value(c.mean, c.std), str(c.n), unit(c.figure).value(c.chosen),
         "-" if c.paper is None else unit(c.figure).value(c.paper, c.paper_std), c.verdict)
        for c in cells(recipe, summary.numbers, compare=compare)
    ]  # fmt: skip
    if rows:
        _print(("variant", "column", "ours", "seeds", "at validation's round", "paper", "verdict"), rows)
    claims = [(c.claim.text, c.summary) for c in judge.claims(recipe, summary.numbers)]
    if claims:
        _print(("claim", "verdict"), claims)
    for failure in summary.failures:
        print_line(f"without a result: {failure}")


def print_listing(rows: Sequence[tuple[str, ...]]) -> None:
    """The list of recipes."""
    _print(("recipe", "what", "data", "state", "budget", "estimate here"), rows)


def print_line(text: str) -> None:
    """One line on standard output."""
    _console().print(text, markup=False, highlight=False)


def _print(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    names = max((len(row[0]) for row in rows), default=0)  # which are copied and searched for, so never broken
    for place, title in enumerate(titles):
        table.add_column(title, overflow="fold", min_width=0 if place else names, no_wrap=not place)
    for row in rows:
        table.add_row(*row)
    _console().print(table, markup=False, highlight=False)


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    return console
