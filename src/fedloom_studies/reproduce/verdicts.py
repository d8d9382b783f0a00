"""Show a recipe in the terminal: ours beside the paper's, and the claims."""

from __future__ import annotations

from fedloom.cli import say
from fedloom.printing import print_texts
from fedloom_studies.reproduce import judge
from fedloom_studies.reproduce.cells import cells
from fedloom_studies.reproduce.figures import unit
from fedloom_studies.reproduce.recipe import Recipe
from fedloom_studies.reproduce.summary import RecipeSummary


def print_verdicts(recipe: Recipe, summary: RecipeSummary) -> None:
    """Both tables of a recipe on standard output."""
    compare = recipe.as_the_paper(summary.scale, summary.samples)
    rows = [
        (c.variant, c.column, unit(c.figure).value(c.mean, c.std), str(c.n), unit(c.figure).value(c.chosen),
         "-" if c.paper is None else unit(c.figure).value(c.paper, c.paper_std), c.verdict)
        for c in cells(recipe, summary.numbers, compare=compare)
    ]  # fmt: skip
    if rows:
        print_texts(
            ("variant", "column", "ours", "seeds", "at validation's round", "paper", "verdict"), rows, names=True
        )
    claims = [(c.claim.text, c.summary) for c in judge.claims(recipe, summary.numbers)]
    if claims:
        print_texts(("claim", "verdict"), claims, names=True)
    for failure in summary.failures:
        say(f"without a result: {failure}")
