"""Regime: anchors, i.e. simple methods whose values the paper also prints, and the distance of a run from these values.

Local training and FedAvg have hardly any settings. If their results are far from the paper's, the data, the network or
the length of training differ, and no verdict on the paper's method follows. `papers.toml` lists the anchors of a paper.
The printed values are the cells in its recipes.
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
"""Largest difference in accuracy between an anchor and the paper's value. The anchors of FLAME and Equitable-FL are
within 0.07 of the paper's values.

Runs on a clearly different problem, such as CIFAR-10 with a small network, differ by 0.16 to 0.54.
"""


@dataclass(frozen=True)
class Anchor:
    """A method's value here, and the paper's value.

    Attributes:
        title: title of the column in the paper.
        variant: row in the paper's table.
        gap: our value minus the paper's value.
        recipe: recipe that contains both values.
        figure: name of the figure.
    """

    title: str
    variant: str
    gap: float
    recipe: str
    figure: str

    @property
    def words(self) -> str:
        """Text on the column and the difference."""
        return f"{self.title} {unit(self.figure).lead(self.gap)}"


def anchors(
    references: Sequence[str], place: str, recipes: Mapping[str, Recipe], summaries: Mapping[str, RecipeSummary | None]
) -> list[Anchor]:
    """Return every column's most distant anchor, or [] if no cell was run or the paper prints no anchor.

    Args:
        references: references to anchors, as in the recipe's columns.
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
    """Return True if an anchor is so far from the paper's value that the run is in a different regime."""
    return any(abs(anchor.gap) > MAX_ANCHOR_DISTANCE for anchor in distances)
