"""Regime: the distance of the anchors' values from the paper's.

Anchors are simple methods whose values the paper also prints.

Local training and FedAvg have hardly any settings that are specific to them. If their results are far from the paper's,
the data, the network or the length of training differ. In this case, a run does not allow conclusions about the paper's
method. The file `papers.toml` lists the anchors of each paper. The printed values are taken from the cells in its
recipes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedloom_studies.reproduce.cells import make_table_cells
from fedloom_studies.reproduce.figures import get_unit
from fedloom_studies.reproduce.page import is_earlier_version
from fedloom_studies.reproduce.recipe import Recipe
from fedloom_studies.reproduce.summary import RecipeSummary

MAX_ANCHOR_DISTANCE = 0.1
"""Maximum difference in accuracy between an anchor and the paper's value. For FLAME and Equitable-FL, the anchors
differ from the paper's values by at most 0.07.

In runs on a clearly different problem, such as CIFAR-10 with a small network, they differ by 0.16 to 0.54.
"""


@dataclass(frozen=True)
class PaperAnchor:
    """Our value for a method, compared with the value that the paper prints.

    Attributes:
        title: title of the column in the paper's table.
        variant: row in the paper's table.
        gap: our value minus the paper's value.
        recipe: recipe that contains both values.
        figure: name of the compared figure.
    """

    title: str
    variant: str
    gap: float
    recipe: str
    figure: str

    @property
    def words(self) -> str:
        """Text that names the column and states the difference."""
        return f"{self.title} {get_unit(self.figure).lead(self.gap)}"


def farthest_anchors(
    references: Sequence[str], place: str, recipes: Mapping[str, Recipe], summaries: Mapping[str, RecipeSummary | None]
) -> list[PaperAnchor]:
    """Return the anchor in each column that is farthest from the paper's value, or [] if no anchor was run or printed.

    Args:
        references: references that serve as anchors, written like the columns of the recipe.
        place: name of the recipe that contains the paper's cells.
        recipes: recipes, keyed by name.
        summaries: summaries, keyed by name.
    """
    recipe, summary = recipes[place], summaries.get(place)
    if summary is None or is_earlier_version(recipe, summary):
        return []
    titles = {title for title, text in recipe.paper.columns.items() if text in references}
    farthest: dict[str, PaperAnchor] = {}
    for cell in make_table_cells(recipe, summary.numbers, compare=False):
        if cell.column not in titles or cell.paper is None or not np.isfinite(cell.mean):
            continue
        one = PaperAnchor(cell.column, cell.variant, cell.mean - cell.paper, place, cell.figure)
        farthest[cell.column] = max(farthest.get(cell.column, one), one, key=lambda a: abs(a.gap))
    return list(farthest.values())


def is_different_regime(distances: Sequence[PaperAnchor]) -> bool:
    """Return True if an anchor is so far from the paper's value that the run is not comparable to the paper's."""
    return any(abs(anchor.gap) > MAX_ANCHOR_DISTANCE for anchor in distances)
