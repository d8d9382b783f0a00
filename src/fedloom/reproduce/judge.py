"""Verdicts: ours beside the paper's, cell by cell and claim by claim.

A cell is within when |ours - paper| <= 2 sqrt(s1^2/n1 + s2^2/n2). A claim is a family of paired comparisons over seeds
(equal seeds: equal data, cohorts, initial model and batches), each a two-sided paired t test with Holm's correction
over all comparisons of the recipe. It holds where every difference is as claimed and significant, does not hold where
one is significant the other way, and is not decidable otherwise, or with fewer than five seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.report.compare import holm, paired_p
from fedloom.report.numbers import half_width
from fedloom.reproduce.figures import Reference
from fedloom.reproduce.recipe import Claim, Recipe

ENOUGH = 5
"""Seeds below which no ordering is called decided."""
ROUNDING = 1e-9
"""What equal means may differ by."""
HOLDS, FAILS, OPEN = "holds", "does not hold", "not decidable at this scale"

Numbers = Mapping[str, Mapping[str, Mapping[str, float | None]]]
"""variant -> reference -> seed -> value, as in a summary."""


@dataclass(frozen=True)
class Cell:
    """One number of a table: ours (mean, standard deviation, seeds), at the chosen round, and the paper's."""

    variant: str
    column: str
    mean: float
    std: float
    n: int
    chosen: float
    paper: float | None
    paper_std: float | None
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """One pair of a claim: the mean difference in the claimed direction, its 95 % interval, n, p and the verdict."""

    left: str
    right: str
    n: int
    difference: float
    half: float
    p: float
    verdict: str


@dataclass(frozen=True)
class Judged:
    """A claim with its comparisons."""

    claim: Claim
    verdict: str
    comparisons: tuple[Comparison, ...]

    @property
    def summary(self) -> str:
        """Verdict, how many comparisons went which way, and the mean difference over them."""
        known = [c for c in self.comparisons if c.n]
        if not known:
            return "not run"
        counts = {v: sum(c.verdict == v for c in known) for v in (HOLDS, FAILS, OPEN)}
        parts = [f"{count} {verdict}" for verdict, count in counts.items() if count]
        detail = f" ({len(known)} comparisons: {', '.join(parts)})" if len(known) > 1 else ""
        return f"{'by construction; ' if self.claim.construction else ''}{self.verdict}{detail}"


def cells(recipe: Recipe, numbers: Numbers, *, compare: bool) -> list[Cell]:
    """Every cell that was run, row by row."""
    paper, found = recipe.paper, []
    for variant, known in numbers.items():
        printed = paper.cells.get(variant, (None,) * len(paper.columns))
        for (title, text), cell in zip(paper.columns.items(), printed, strict=True):
            reference = Reference.of(text, paper.figure)
            ours = _finite(known.get(str(reference), {}))
            if not ours and cell is None:
                continue
            values = list(ours.values())
            mean = float(np.mean(values)) if values else math.nan
            std = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
            theirs, spread = _printed(cell, paper.percent)
            at = reference.chosen()
            chosen = _finite(known.get(str(at), {})) if at else {}
            best = float(np.mean(list(chosen.values()))) if chosen else math.nan
            verdict = "not run"
            if values:
                verdict = within(mean, std, len(values), theirs, spread, paper.seeds) if compare else "-"
            found.append(Cell(variant, title, mean, std, len(values), best, theirs, spread, verdict))
    return found


def within(mean: float, std: float, n: int, paper: float | None, spread: float | None, seeds: int) -> str:
    """within, above or below, with the difference in points and in standard errors."""
    if paper is None:
        return "-"
    ours = 0.0 if math.isnan(std) else std**2 / n
    error = math.sqrt(ours + (spread or 0.0) ** 2 / seeds)
    gap = mean - paper
    word = "within" if abs(gap) <= 2 * error else "above" if gap > 0 else "below"
    errors = f"{gap / error:+.1f} standard errors" if error else "no deviation known"
    return f"{word} ({100 * gap:+.2f} points, {errors})"


def claims(recipe: Recipe, numbers: Numbers) -> list[Judged]:
    """Every claim, with Holm's correction over all comparisons of the recipe."""
    pairs = [(claim, pair) for claim in recipe.paper.claims for pair in _pairs(recipe, claim, numbers)]
    leads = [_leads(claim, left, right, numbers) for claim, (left, right) in pairs]
    tested = (k for k, (claim, _) in enumerate(pairs) if len(leads[k]) >= ENOUGH and not claim.construction)
    p = {k: paired_p(leads[k]) for k in tested}
    clear = holm(p)
    judged: dict[int, list[Comparison]] = {id(claim): [] for claim in recipe.paper.claims}
    for k, ((claim, (left, right)), lead) in enumerate(zip(pairs, leads, strict=True)):
        mean = float(np.mean(lead)) if lead else math.nan
        verdict = OPEN if not clear.get(k) else HOLDS if mean > 0 else FAILS
        if claim.construction and lead:
            verdict = HOLDS if min(lead) >= -ROUNDING else FAILS
        judged[id(claim)].append(
            Comparison(_name(left), _name(right), len(lead), mean, half_width(lead), p.get(k, math.nan), verdict)
        )
    return [Judged(claim, _overall(judged[id(claim)]), tuple(judged[id(claim)])) for claim in recipe.paper.claims]


def _overall(comparisons: Sequence[Comparison]) -> str:
    verdicts = {c.verdict for c in comparisons if c.n}
    if FAILS in verdicts:
        return FAILS
    return HOLDS if verdicts == {HOLDS} else OPEN


Side = Reference | float


def _pairs(recipe: Recipe, claim: Claim, numbers: Numbers) -> list[tuple[Reference, Side]]:
    figure = recipe.paper.figure
    left = Reference.of(claim.subject, figure)
    rights: list[Side] = [Reference.of(side, figure) if isinstance(side, str) else side for side in claim.than]
    variants = claim.variants or tuple(recipe.variants)
    if left.variant:
        variants = (left.variant,)
    there = [v for v in variants if v in numbers] if not left.variant else list(variants)
    return [(left._replace(variant=variant), _in(variant, right)) for variant in there for right in rights]


def _in(variant: str, side: Side) -> Side:
    return side._replace(variant=side.variant or variant) if isinstance(side, Reference) else side


def _name(side: Side) -> str:
    return f"{side.variant} | {side}" if isinstance(side, Reference) else f"{side:g}"


def _leads(claim: Claim, left: Reference, right: Side, numbers: Numbers) -> list[float]:
    """Differences over common seeds, positive where the claim is right."""
    a = _finite(numbers.get(left.variant, {}).get(str(left), {}))
    b = (
        dict.fromkeys(a, right)
        if isinstance(right, float)
        else _finite(numbers.get(right.variant, {}).get(str(right), {}))
    )
    sign = 1.0 if claim.higher is not None else -1.0
    return [sign * (a[seed] - b[seed]) + claim.margin for seed in sorted(a.keys() & b.keys())]


def _finite(by_seed: Mapping[str, Any]) -> dict[str, float]:
    return {seed: value for seed, value in by_seed.items() if value is not None and math.isfinite(value)}


def _printed(cell: Any, percent: bool) -> tuple[float | None, float | None]:
    if cell is None:
        return None, None
    mean, std = cell if isinstance(cell, tuple) else (cell, None)
    scale = 0.01 if percent else 1.0
    return scale * mean, None if std is None else scale * std
