"""Aggregation rules that are applied to each field separately: means, coordinate-wise rules, and centers of vectors."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fedloom.rows.aggregators._base import Aggregator, Rows, State, check_row_count, mixture
from fedloom.rows.algebra import norm
from fedloom.rows.context import Cohort

Result = tuple[dict[str, Tensor], State]


class WeightedMean(Aggregator):
    """Weighted mean sum w_i x_i / sum w_i (McMahan et al., AISTATS 2017, Algorithm 1)."""

    weighted: ClassVar[bool] = True
    kind: Literal["mean"] = "mean"

    @property
    def linear(self) -> bool:
        """True if no transformation is applied before the rule."""
        return not self.pre

    def combine(self, state: State, rows: Rows, weights: Tensor, primary: str, ctx: Cohort) -> Result:
        return mixture(weights / weights.sum(), rows), state


class Median(Aggregator):
    """Coordinate-wise median.

    If m is even, this is the mean of the two middle values (Yin et al., ICML 2018, Definition 1).
    """

    kind: Literal["median"] = "median"

    def combine(self, state: State, rows: Rows, weights: Tensor, primary: str, ctx: Cohort) -> Result:
        return {name: median(r) for name, r in rows.items()}, state


class TrimmedMean(Aggregator):
    """Coordinate-wise mean without the f smallest and f largest values (Yin et al., ICML 2018, Definition 2).

    It requires m > 2f rows.

    """

    kind: Literal["trimmed-mean"] = "trimmed-mean"
    f: int = Field(
        1, ge=0, description="number of values dropped at each end (default: 1, or 0 if the cohort is too small for 1)"
    )

    def require(self, m: int) -> None:
        check_row_count(self.kind, m > 2 * self.f, "m > 2 f", m, f=self.f)

    def combine(self, state: State, rows: Rows, weights: Tensor, primary: str, ctx: Cohort) -> Result:
        return {name: r.sort(0).values[self.f : len(r) - self.f].mean(0) for name, r in rows.items()}, state


class GeometricMedian(Aggregator):
    """Minimizer of sum w_i ||x - x_i||, computed by the smoothed Weiszfeld method with the mean as the starting point.

    (Pillutla, Kakade and Harchaoui, IEEE TSP 2022, Algorithm 2: b_i = w_i / max(nu, ||x - x_i||), then x = sum b_i x_i
    / sum b_i; the paper runs 3 iterations.) Each field is aggregated separately.
    """

    weighted: ClassVar[bool] = True
    kind: Literal["geometric-median"] = "geometric-median"
    nu: float = Field(1e-6, gt=0, description="smoothing: distances below this value are raised to it (section V)")
    iterations: PositiveInt = Field(100, description="most iterations")
    tolerance: float = Field(1e-8, ge=0, description="stop if x changes by less than this value, relative to 1 + ||x||")

    def combine(self, state: State, rows: Rows, weights: Tensor, primary: str, ctx: Cohort) -> Result:
        return {name: self._centre(r, weights.to(r.dtype)) for name, r in rows.items()}, state

    def _centre(self, rows: Tensor, weights: Tensor) -> Tensor:
        x = mixture(weights / weights.sum(), {"x": rows})["x"]
        for _ in range(self.iterations):
            b = weights / norm(rows - x).clamp_min(self.nu)
            moved = mixture(b / b.sum(), {"x": rows})["x"]
            done = norm(moved - x) <= self.tolerance * (1 + norm(x))
            x = moved
            if done:
                break
        return x


class CenteredClipping(Aggregator):
    """Iteration v <- v + sum w_i (x_i - v) min(1, tau / ||x_i - v||), which starts at the last aggregate v.

    (Karimireddy, He and Jaggi, ICML 2021, Algorithm 2.) The state contains v for each field. In the first round, v
    starts at the coordinate-wise median of the rows. In the paper, v starts at 0, which is suitable only for
    differences.
    """

    weighted: ClassVar[bool] = True
    kind: Literal["centered-clipping"] = "centered-clipping"
    tau: float = Field(10.0, gt=0, description="clipping radius (10 in section 6)")
    iterations: PositiveInt = Field(1, description="iterations L (section 6: 1)")

    def combine(self, state: State, rows: Rows, weights: Tensor, primary: str, ctx: Cohort) -> Result:
        share, centres = weights / weights.sum(), {}
        for name, r in rows.items():
            v = state.get(name)
            v = median(r) if v is None else v
            for _ in range(self.iterations):
                pull = (r - v) * (self.tau / norm(r - v)).clamp_max(1)
                v = v + mixture(share, {"v": pull})["v"]
            centres[name] = v
        return centres, dict(centres)


def median(rows: Tensor) -> Tensor:
    """Return the coordinate-wise median [d] of rows [m, d]."""
    ordered, m = rows.sort(0).values, len(rows)
    return torch.lerp(ordered[(m - 1) // 2], ordered[m // 2], 0.5)
