"""Closed convex sets as functions: f is 0 inside and infinite outside, so the prox is the projection for every t.

`f` treats a point as inside the set if it differs from its projection only by rounding (sqrt(eps) times its length).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.rows.algebra import Scalar, norm, onto_l1_ball, onto_simplex, total
from fedloom.rows.layout import Layout
from fedloom.rows.proxes._base import Form
from fedloom.values import Value


class ConvexSet(Value, ABC):
    """Indicator function of a convex set, which is 0 inside and infinite outside.

    Its prox is the projection onto the set, for every t.
    """

    convex: ClassVar[bool] = True

    @abstractmethod
    def project(self, v: Tensor, layout: Layout | None = None) -> Tensor:
        """Project each row of ``[m, d]``, or a vector ``[d]``, onto the set."""

    def f(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        return indicator(x, self.project(x, layout))

    def prox(self, v: Tensor, t: Scalar, layout: Layout | None = None) -> Tensor:
        return self.project(v, layout)


class Box(ConvexSet):
    """Box {lower <= x <= upper} with the same bounds in every coordinate.

    None means that there is no bound (Parikh and Boyd, 6.2.4).
    """

    kind: Literal["box"] = "box"
    lower: float | None = Field(-1.0, description="smallest value")
    upper: float | None = Field(1.0, description="largest value")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"lower must be at most upper, got {self.lower} > {self.upper}")
        return self

    def project(self, v: Tensor, layout: Layout | None = None) -> Tensor:
        return v if self.lower is None and self.upper is None else v.clamp(self.lower, self.upper)


class LinfBall(ConvexSet):
    """Ball of the maximum norm, {max|x| <= radius} (Parikh and Boyd, 6.2.4)."""

    kind: Literal["linf-ball"] = "linf-ball"
    radius: float = Field(1.0, gt=0, description="radius of the ball")

    def project(self, v: Tensor, layout: Layout | None = None) -> Tensor:
        return v.clamp(-self.radius, self.radius)


class L2Ball(ConvexSet):
    """Ball of the Euclidean norm, {||x||_2 <= radius} (Parikh and Boyd, 6.5.1)."""

    kind: Literal["l2-ball"] = "l2-ball"
    radius: float = Field(1.0, gt=0, description="radius of the ball")

    def project(self, v: Tensor, layout: Layout | None = None) -> Tensor:
        return v * (self.radius / norm(v)).clamp_max(1)


class L1Ball(ConvexSet):
    """Ball of the l1 norm, {||x||_1 <= radius} (Duchi et al., ICML 2008, Fig. 1)."""

    makes: ClassVar[Form] = "sparse"
    kind: Literal["l1-ball"] = "l1-ball"
    radius: float = Field(1.0, gt=0, description="radius of the ball")

    def project(self, v: Tensor, layout: Layout | None = None) -> Tensor:
        return onto_l1_ball(v, self.radius)


class Simplex(ConvexSet):
    """Simplex {x >= 0, sum x = radius} (Duchi et al., ICML 2008, Fig. 1)."""

    makes: ClassVar[Form] = "sparse"
    kind: Literal["simplex"] = "simplex"
    radius: float = Field(1.0, gt=0, description="required sum of the coordinates")

    def project(self, v: Tensor, layout: Layout | None = None) -> Tensor:
        return onto_simplex(v, self.radius)


class HalfSpace(ConvexSet):
    """Half-space {<a, x> <= b}. The projection is v - a max(<a, v> - b, 0) / ||a||^2 (Parikh and Boyd, 6.2.3)."""

    kind: Literal["half-space"] = "half-space"
    a: tuple[float, ...] = Field(
        description="normal vector: one number per coordinate, or one number for all coordinates"
    )
    b: float = Field(description="bound")

    @model_validator(mode="after")
    def _nonzero(self) -> Self:
        if not any(self.a):
            raise ValueError("the normal a must not be zero")
        return self

    def project(self, v: Tensor, layout: Layout | None = None) -> Tensor:
        if len(self.a) > 1:
            _check_dimension(self, len(self.a), v)
        a = torch.tensor(self.a, dtype=v.dtype, device=v.device).expand(v.shape[-1])
        return v - a * (((a * v).sum(-1, keepdim=True) - self.b).clamp_min(0) / a.square().sum())


class Affine(ConvexSet):
    """Affine subspace {x: A x = b}. The projection is v - A^+ (A v - b) (Parikh and Boyd, 6.2.2)."""

    kind: Literal["affine"] = "affine"
    A: tuple[tuple[float, ...], ...] = Field(min_length=1, description="matrix with k rows of d numbers")
    b: tuple[float, ...] = Field(min_length=1, description="k numbers")

    @model_validator(mode="after")
    def _solvable(self) -> Self:
        if len(self.A) != len(self.b) or len({len(row) for row in self.A}) != 1:
            raise ValueError(f"A must have {len(self.b)} rows of equal length, got {[len(row) for row in self.A]}")
        A, b, inverse = self._system
        if (A @ (inverse @ b) - b).norm() > 1e-8 * (1 + b.norm()):
            raise ValueError("A x = b has no solution")
        return self

    @cached_property
    def _system(self) -> tuple[Tensor, Tensor, Tensor]:
        A = torch.tensor(self.A, dtype=torch.float64)
        return A, torch.tensor(self.b, dtype=torch.float64), torch.linalg.pinv(A)

    def project(self, v: Tensor, layout: Layout | None = None) -> Tensor:
        A, b, inverse = (part.to(v.device) for part in self._system)
        _check_dimension(self, A.shape[1], v)
        return (v.double() - (v.double() @ A.T - b) @ inverse.T).to(v.dtype)


def indicator(x: Tensor, nearest: Tensor) -> Tensor:
    """Return 0 where x equals its projection up to rounding, or else infinity: [m, 1] for [m, d], a scalar for [d]."""
    inside = total((x - nearest).square()) <= torch.finfo(x.dtype).eps * (1 + total(x.square()))
    return torch.where(inside, 0.0, torch.inf).to(x.dtype)


def _check_dimension(chosen: Value, d: int, v: Tensor) -> None:
    if v.shape[-1] != d:
        raise ConfigError(f"{type(chosen).__name__} is a set in R^{d}, but the rows have {v.shape[-1]} scalars")
