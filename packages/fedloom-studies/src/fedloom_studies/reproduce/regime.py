"""Regime: anchors, simple methods whose figures the paper also prints, and the distance of a run from these figures.

Local training and FedAvg have almost no settings. If they end far from the paper's figures, the data, the network or
the length of training differ, and no verdict on the paper's method follows. `papers.toml` names the anchors
of a paper. The printed figures are the cells of its recipes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedloom_studies.reproduce.cells import cells
from fedloom_studies.reproduce.figures import unit
from fedloom_studies.reproduce.page import earlier
from fedloom_studies.reproduce.recipe import Recipe
from fedloom_studies.reproduce.summary import RecipeSummary

MAX_ANCHOR_DISTANCE = 0.1
"""Largest difference in accuracy between an anchor and the paper's figure. The anchors of FLAME and Equitable-FL lie
within 0.07 of the paper's figures.

Runs of a clearly different problem, such as CIFAR-10 with a small network, differ by 0.16 to 0.54.
"""


@dataclass(frozen=True)
class Anchor:
    """Figure of a method here, beside the paper's figure.

    Attributes:
        title: title of the paper's column.
        variant: row of the paper's table.
        gap: our figure minus the paper's figure.
        recipe: recipe with both figures.
        figure: name of the figure.
    """

    title: str
    variant: str
    gap: float
    recipe: str
    figure: str

    @property
    def words(self) -> str:
        """Text of the column and the difference."""
        return f"{self.title} {unit(self.figure).lead(self.gap)}"


def anchors(
    references: Sequence[str], place: str, recipes: Mapping[str, Recipe], summaries: Mapping[str, RecipeSummary | None]
) -> list[Anchor]:
    """Return the most distant anchor of every column, or [] if no cell was run or the paper prints no anchor.

    Args:
        references: references of anchors, as in the recipe's columns.
        place: recipe with the paper's cells.
        recipes: recipes by name.
        summaries: summaries by name.
    """
    recipe, summary = recipes[place], summaries.get(place)
    if summary is None or earlier(recipe, summary):
        return []
    titles = {title for title, text in recipe.paper.columns.items() if text in references}
    farthest: dict[str, Anchor] = {}
    for cell in cells(recipe, summary.numbers, compare=False):
        if cell.column not in titles or cell.paper is None or not np.isfinite(cell.mean):
            continue
        one = Anchor(cell.column, cell.variant, cell.mean - cell.paper, place, cell.figure)
        farthest[cell.column] = max(farthest.get(cell.column, one), one, key=lambda a: abs(a.gap))
    return list(farthest.values())


def elsewhere(distances: Sequence[Anchor]) -> bool:
    """Return True if an anchor is so far from the paper's that the run is in another regime."""
    return any(abs(anchor.gap) > MAX_ANCHOR_DISTANCE for anchor in distances)
