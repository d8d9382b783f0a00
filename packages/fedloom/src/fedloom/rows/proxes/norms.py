"""Norms and their squares, whose prox has a closed form (Parikh and Boyd, Proximal Algorithms, 2014, section 6)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.rows.algebra import Scalar, norm, onto_l1_ball, soft, total
from fedloom.rows.layout import Layout
from fedloom.rows.proxes._base import Form
from fedloom.values import Value


class L1(Value):
    """f(x) = c ||x||_1. The prox is the soft threshold sign(v) max(|v| - c t, 0) (Parikh and Boyd, 6.5.2)."""

    convex: ClassVar[bool] = True
    makes: ClassVar[Form] = "sparse"
    kind: Literal["l1"] = "l1"
    c: float = Field(0.01, ge=0, description="weight of the norm penalty (FedDR, section 5)")

    def f(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        return self.c * total(x.abs())

    def prox(self, v: Tensor, t: Scalar, layout: Layout | None = None) -> Tensor:
        return soft(v, self.c * t)


class L2(Value):
    """f(x) = c ||x||_2. The prox is v max(1 - c t / ||v||, 0) (Parikh and Boyd, 6.5.1)."""

    convex: ClassVar[bool] = True
    kind: Literal["l2"] = "l2"
    c: float = Field(0.01, ge=0, description="weight of the norm penalty")

    def f(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        return self.c * total(x.square()).sqrt()

    def prox(self, v: Tensor, t: Scalar, layout: Layout | None = None) -> Tensor:
        return v * _shrink_factor(norm(v), self.c * t)


class SquaredL2(Value):
    """f(x) = c ||x||^2. The prox is v / (1 + 2 c t) (Parikh and Boyd, 6.1.1)."""

    convex: ClassVar[bool] = True
    kind: Literal["squared-l2"] = "squared-l2"
    c: float = Field(0.01, ge=0, description="weight of the squared norm, without the factor 1/2")

    def f(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        return self.c * total(x.square())

    def prox(self, v: Tensor, t: Scalar, layout: Layout | None = None) -> Tensor:
        return v / (1 + 2 * self.c * t)


class ElasticNet(Value):
    """f(x) = a ||x||_1 + b ||x||^2. The prox is S_{a t}(v) / (1 + 2 b t) (Parikh and Boyd, 6.5.3)."""

    convex: ClassVar[bool] = True
    makes: ClassVar[Form] = "sparse"
    kind: Literal["elastic-net"] = "elastic-net"
    a: float = Field(0.01, ge=0, description="weight of the l1 norm")
    b: float = Field(0.01, ge=0, description="weight of the squared l2 norm, without the factor 1/2")

    def f(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        return total(self.a * x.abs() + self.b * x.square())

    def prox(self, v: Tensor, t: Scalar, layout: Layout | None = None) -> Tensor:
        return soft(v, self.a * t) / (1 + 2 * self.b * t)


class Linf(Value):
    """f(x) = c max|x|.

    The prox is v - P(v), where P is the projection onto the l1 ball of radius c t (Parikh and Boyd, 6.5.2).
    """

    convex: ClassVar[bool] = True
    kind: Literal["linf"] = "linf"
    c: float = Field(0.01, ge=0, description="weight of the norm penalty")

    def f(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        return self.c * x.abs().amax(-1, keepdim=x.dim() > 1)

    def prox(self, v: Tensor, t: Scalar, layout: Layout | None = None) -> Tensor:
        return v - onto_l1_ball(v, self.c * t)


class GroupL1(Value):
    """f(x) = c sum_g s_g ||x_g||_2. The prox is x_g = v_g max(1 - c t s_g / ||v_g||, 0).

    (Yuan and Lin, J. R. Statist. Soc. B 2006; Parikh and Boyd, 6.5.4.) Groups do not overlap. Each group is a parameter
    of the layout ("parameter"), an output unit of a parameter ("unit"), or `by` consecutive scalars (fewer in the last
    group).
    """

    convex: ClassVar[bool] = True
    makes: ClassVar[Form] = "sparse"
    kind: Literal["group-l1"] = "group-l1"
    c: float = Field(0.01, ge=0, description="weight of the norm penalty")
    by: Literal["parameter", "unit"] | PositiveInt = Field("unit", description="parameters that form a group")
    scaled: bool = Field(
        False, description="weight each group by s_g = sqrt(size of the group) (Yuan and Lin, Eq. 2.1) instead of 1"
    )

    def f(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        lengths, scale, _ = self._groups(x, layout)
        return self.c * total(lengths * scale)

    def prox(self, v: Tensor, t: Scalar, layout: Layout | None = None) -> Tensor:
        lengths, scale, ids = self._groups(v, layout)
        return v * _shrink_factor(lengths, self.c * t * scale)[..., ids]

    def _groups(self, x: Tensor, layout: Layout | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the norms of the groups [..., G], their factors s_g [G], and the group of each scalar [d]."""
        sizes = torch.tensor(self._sizes(x.shape[-1], layout), device=x.device)
        ids = torch.repeat_interleave(torch.arange(len(sizes), device=x.device), sizes)
        squares = x.new_zeros((*x.shape[:-1], len(sizes))).index_add(-1, ids, x.square())
        return squares.sqrt(), sizes.to(x.dtype).sqrt() if self.scaled else x.new_ones(len(sizes)), ids

    def _sizes(self, d: int, layout: Layout | None) -> list[int]:
        if isinstance(self.by, int):
            return [min(self.by, d - start) for start in range(0, d, self.by)]
        if layout is None:
            raise ConfigError(
                f'group l1 by "{self.by}" needs the layout of the model. If there is no layout, set a size'
            )
        if self.by == "parameter":
            return [shape.numel() for shape in layout.shapes]
        return [shape[1:].numel() for shape in layout.shapes for _ in range(shape[0] if shape else 1)]


def _shrink_factor(lengths: Tensor, t: Scalar) -> Tensor:
    """Return the shrinkage factor max(1 - t / length, 0), which is 1 at length 0.

    If the length is NaN, the factor is NaN.
    """
    return torch.where(lengths > 0, 1 - t / lengths, 1 + lengths).clamp_min(0)
