"""Aggregation rules that choose rows or weights based on the primary field and use them for all fields."""

from __future__ import annotations

from itertools import combinations, islice
from math import comb
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.rows.aggregators._base import Aggregator, ByzantineCount, Rows, State, check_row_count, mixture
from fedloom.rows.aggregators.vectors import Result, median
from fedloom.rows.algebra import distances, norm, shortest
from fedloom.rows.context import Cohort

MAX_SUBSETS = 200_000


class Krum(Aggregator):
    """Row with the smallest score, which is the sum of squared distances to the m - f - 2 nearest other rows.

    The rule needs m >= 2f + 3.

    (Blanchard et al., NeurIPS 2017, section 3.)
    """

    kind: Literal["krum"] = "krum"
    f: ByzantineCount = 1

    def require(self, m: int) -> None:
        check_row_count(self.kind, m >= 2 * self.f + 3, "m >= 2 f + 3", m, f=self.f)

    def combine(self, state: State, rows: Rows, weights: Tensor, primary: str, ctx: Cohort) -> Result:
        best = int(krum_order(distances(rows[primary]).square(), self.f)[0])
        return {name: r[best].clone() for name, r in rows.items()}, state


class MultiKrum(Aggregator):
    """Weighted mean of the k rows with the smallest Krum scores. The rule needs m >= 2f + 3 and k <= m.

    (Blanchard et al., NeurIPS 2017, section 4.) Public implementations differ from the paper: FLAME's implementation
    uses unsquared distances and k = 5.
    """

    weighted: ClassVar[bool] = True
    kind: Literal["multi-krum"] = "multi-krum"
    f: ByzantineCount = 1
    k: PositiveInt | None = Field(None, description="number of vectors to average (None: m - f of m vectors)")
    squared: bool = Field(True, description="use squared distances for the scores, as in the paper")

    def require(self, m: int) -> None:
        check_row_count(self.kind, m >= 2 * self.f + 3, "m >= 2 f + 3", m, f=self.f)
        check_row_count(self.kind, self.k is None or self.k <= m, "k <= m", m, k=self.k)

    def combine(self, state: State, rows: Rows, weights: Tensor, primary: str, ctx: Cohort) -> Result:
        far = distances(rows[primary])
        best = krum_order(far.square() if self.squared else far, self.f)[: self.k or len(far) - self.f]
        return mixture(_chosen_weights(best, weights), rows), state


class Bulyan(Aggregator):
    """Krum, applied m - 2f times without replacement, followed by a coordinate-wise trimmed mean around the median.

    (El Mhamdi, Guerraoui and Rouault, ICML 2018, section 4.) The trimmed mean averages the m - 4f values nearest the
    median. The rule needs m >= 4f + 3. The first step uses only the primary field, and the second step is applied to
    every field. Even if few rows remain, a Krum score uses at least one neighbor.
    """

    kind: Literal["bulyan"] = "bulyan"
    f: ByzantineCount = 1

    def require(self, m: int) -> None:
        check_row_count(self.kind, m >= 4 * self.f + 3, "m >= 4 f + 3", m, f=self.f)

    def combine(self, state: State, rows: Rows, weights: Tensor, primary: str, ctx: Cohort) -> Result:
        squares, left, chosen = distances(rows[primary]).square(), list(range(len(weights))), list[int]()
        for _ in range(len(weights) - 2 * self.f):
            chosen.append(left.pop(int(krum_order(squares[left][:, left], self.f)[0])))
        return {name: self._near_median(r[chosen]) for name, r in rows.items()}, state

    def _near_median(self, rows: Tensor) -> Tensor:
        near = (rows - median(rows)).abs().argsort(dim=0, stable=True)[: len(rows) - 2 * self.f]
        return rows.gather(0, near).mean(0)


class MDA(Aggregator):
    """Weighted mean of the m - f rows with the smallest diameter (the largest distance between any two of them).

    The rule needs m > 2f.

    (Minimum diameter averaging: El Mhamdi, Guerraoui, Guirguis, Hoang and Rouault, PODC 2020, section 3.) The rule
    tries all subsets of m - f rows, and rejects cohorts with more than 200,000 subsets.
    """

    weighted: ClassVar[bool] = True
    kind: Literal["mda"] = "mda"
    f: ByzantineCount = 1

    def require(self, m: int) -> None:
        check_row_count(self.kind, m > 2 * self.f, "m > 2 f", m, f=self.f)
        if comb(m, self.f) > MAX_SUBSETS:
            raise ConfigError(
                f"mda tries every subset of clients, but the number of subsets, C({m}, {self.f}) = "
                f"{comb(m, self.f)}, is larger than {MAX_SUBSETS}",
                rule="subsets-too-many",
                fix="use fewer clients per round, or set {aggregator = 'multi-krum'}",
            )

    def combine(self, state: State, rows: Rows, weights: Tensor, primary: str, ctx: Cohort) -> Result:
        far, m, best = distances(rows[primary]), len(weights), (torch.inf, torch.arange(0))
        every = combinations(range(m), m - self.f)
        while group := list(islice(every, 4096)):
            subsets = torch.tensor(group, device=far.device)
            inside = far.new_zeros(len(group), m).scatter(1, subsets, 1)
            diameters = (inside[:, :, None] * inside[:, None, :] * far).flatten(1).amax(1)
            least = int(diameters.argmin())
            best = min(best, (float(diameters[least]), subsets[least]), key=lambda pair: pair[0])
        return mixture(_chosen_weights(best[1], weights), rows), state


class FLTrust(Aggregator):
    """Mean of rows scaled to the norm of a trusted row x_0 and weighted by the positive part of their cosine with x_0.

    (Cao et al., NDSS 2021, Algorithm 2: sum of relu(cos(x_i, x_0)) ||x_0|| / ||x_i|| x_i over the sum of relu(cos).) In
    the paper, the server trains x_0 on its own data. Here, the client `root` provides x_0. This client must be in every
    cohort and, as in the paper, its own row has no weight. If no cosine is positive, the result is x_0. Use this rule
    only for rows that are differences.
    """

    kind: Literal["fltrust"] = "fltrust"
    root: int = Field(0, ge=0, description="index of the trusted client")

    @model_validator(mode="after")
    def _sees_the_root(self) -> Self:
        if self.pre:
            raise ValueError(
                "fltrust compares all rows with the row of the trusted client, but `pre` would "
                "change this row. Leave `pre` empty"
            )
        return self

    def require(self, m: int) -> None:
        check_row_count(self.kind, m >= 2, "m >= 2", m)

    @property
    def needs_client(self) -> bool:
        """True, because the rule needs the row of a trusted client."""
        return True

    def check_cohort(self, ids: Tensor) -> None:
        """Raise an error if the trusted client is not in the cohort."""
        super().check_cohort(ids)
        if int((ids == self.root).sum()) != 1:
            raise ConfigError(
                f"fltrust trusts client {self.root}, which is not in this cohort",
                rule="trusted-client-absent",
                fix="set {sampler = 'uniform'} with {sampler.fraction = 1.0}",
            )

    def combine(self, state: State, rows: Rows, weights: Tensor, primary: str, ctx: Cohort) -> Result:
        self.check_cohort(ctx.ids)
        at = (ctx.ids == self.root).nonzero().flatten().tolist()
        x = rows[primary]
        lengths, trusted = norm(x).clamp_min(shortest(x)), x[at[0]]
        cosines = (x @ trusted[:, None]) / (lengths * norm(trusted)).clamp_min(torch.finfo(x.dtype).tiny)
        scores = cosines.clamp_min(0).index_fill(0, torch.tensor(at, device=x.device), 0)
        share = scores / scores.sum() * norm(trusted) / lengths
        alone = torch.zeros_like(share).index_fill(0, torch.tensor(at, device=x.device), 1)
        return mixture(share if scores.sum() > 0 else alone, rows), state


def krum_order(far: Tensor, f: int) -> Tensor:
    """Return row indices [m] by ascending score, the sum of the (at least one) m - f - 2 smallest distances.

    If scores use only one neighbor, two rows that are each other's nearest neighbors have the same score. In this case,
    the row whose sum of distances to all rows is smaller comes first.
    """
    neighbours = far.masked_fill(torch.eye(len(far), dtype=torch.bool, device=far.device), torch.inf).sort(1).values
    central = far.sum(1).argsort(stable=True)
    return central[neighbours[central, : max(len(far) - f - 2, 1)].sum(1).argsort(stable=True)]


def _chosen_weights(chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the coefficients [m, 1] for a weighted mean of the chosen rows.

    They are equal if none of the chosen rows has a positive weight.
    """
    member = torch.zeros_like(weights).index_fill(0, chosen, 1)
    mass = member * weights
    mass = mass if mass.sum() > 0 else member
    return mass / mass.sum()
