"""Cells of a table, which show our value next to the paper's.

Our value is within the range of the paper's value if |ours - paper| <= 2 sqrt(s1^2/n1 + s2^2/n2), where s1 and s2 are
the standard deviations over n1 and n2 seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.formats import format_fixed
from fedloom.lab.report import half_width
from fedloom_studies.reproduce.figures import Reference, get_unit
from fedloom_studies.reproduce.looks import UntestedReason
from fedloom_studies.reproduce.recipe import Recipe

Numbers = Mapping[str, Mapping[str, Mapping[str, float | None]]]
"""Values keyed by variant, reference and seed, as in a summary."""


@dataclass(frozen=True)
class TableCell:
    """Value in a table: our value at the chosen round, and the value printed in the paper.

    Our value is a mean with the half-width of its 95 % interval and the number of seeds.
    """

    variant: str
    column: str
    figure: str
    mean: float
    std: float
    n: int
    half: float
    chosen: float
    paper: float | None
    paper_std: float | None
    verdict: str


def make_table_cells(recipe: Recipe, numbers: Numbers, *, compare: bool) -> list[TableCell]:
    """Return all cells that were run or that the paper prints, row by row."""
    paper, rows = recipe.paper, []
    for variant, by_reference in numbers.items():
        row = paper.cells.get(variant, (None,) * len(paper.columns))
        for (title, text), cell in zip(paper.columns.items(), row, strict=True):
            reference = Reference.create(text, paper.figure)
            measured = finite_by_seed(by_reference.get(str(reference), {}))
            if cell is None and str(reference) not in by_reference:
                continue
            values = list(measured.values())
            mean = float(np.mean(values)) if values else math.nan
            std = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
            papers_value, spread = printed_mean_and_std(cell, paper.percent)
            at = reference.chosen()
            chosen = finite_by_seed(by_reference.get(str(at), {})) if at else {}
            best = float(np.mean(list(chosen.values()))) if chosen else math.nan
            verdict: str = UntestedReason.LOST if str(reference) in by_reference else UntestedReason.NOT_RUN
            if values:
                comparison = position_in_range(
                    mean, std, len(values), papers_value, spread, paper.seeds, reference.figure
                )
                verdict = comparison if compare else "-"
            half, name = half_width(values), reference.figure
            rows.append(
                TableCell(variant, title, name, mean, std, len(values), half, best, papers_value, spread, verdict)
            )
    return rows


def position_in_range(
    mean: float, std: float, n: int, paper: float | None, spread: float | None, seeds: int, figure: str
) -> str:  # fmt: skip
    """Return the position of our value: within, above or below the range of the paper's value.

    The difference is added in units and in standard errors.
    """
    if paper is None:
        return "-"
    variance = 0.0 if math.isnan(std) else std**2 / n
    error = math.sqrt(variance + (spread or 0.0) ** 2 / seeds)
    gap = mean - paper
    word = "within" if abs(gap) <= 2 * error else "above" if gap > 0 else "below"
    errors = f"{format_fixed(gap / error, 1, signed=True)} standard errors" if error else "no deviation known"
    return f"{word} ({get_unit(figure).difference(gap)}, {errors})"


def finite_by_seed(by_seed: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite values, keyed by seed."""
    return {seed: value for seed, value in by_seed.items() if value is not None and math.isfinite(value)}


def printed_mean_and_std(cell: object, percent: bool) -> tuple[float | None, float | None]:
    """Return the mean and the standard deviation that the paper prints in a cell, as fractions."""
    if cell is None:
        return None, None
    mean, std = cell if isinstance(cell, tuple) else (cell, None)
    scale = 0.01 if percent else 1.0
    return scale * mean, None if std is None else scale * std
