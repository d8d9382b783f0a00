"""Weakly convex penalties: f + weak / 2 ||x||^2 is convex, and the prox is unique for t < 1 / weak."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.rows.algebra import Scalar, soft, total
from fedloom.rows.layout import Layout
from fedloom.rows.proxes._base import Form
from fedloom.values import Value


class SCAD(Value):
    """Smoothly clipped absolute deviation, weakly convex with weak = 1 / (a - 1) (Fan and Li, JASA 2001, Eq. 2.7, 2.8).

    f(x) is the sum over all coordinates of c|x| for |x| <= c, of (2 a c |x| - x^2 - c^2) / (2 (a - 1)) for c < |x| <= a
    c, and of c^2 (a + 1) / 2 for larger |x|. The prox, for t < a - 1, is the soft threshold S_{c t}(v) for |v| <= (1 +
    t) c, ((a - 1) v - sign(v) a c t) / (a - 1 - t) for larger |v| <= a c, and v for |v| > a c.
    """

    convex: ClassVar[bool] = False
    makes: ClassVar[Form] = "sparse"
    kind: Literal["scad"] = "scad"
    c: float = Field(0.01, gt=0, description="threshold lambda")
    a: float = Field(
        3.7, gt=2, description="point beyond which the penalty is flat, in units of c (Fan and Li, section 2.2)"
    )

    @property
    def weak(self) -> float:
        """Constant of weak convexity."""
        return 1 / (self.a - 1)

    def f(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        c, a, z = self.c, self.a, x.abs()
        middle = (2 * a * c * z - z.square() - c**2) / (2 * (a - 1))
        return total(torch.where(z <= c, c * z, torch.where(z <= a * c, middle, c**2 * (a + 1) / 2)))

    def prox(self, v: Tensor, t: Scalar, layout: Layout | None = None) -> Tensor:
        _check_single_valued(self, t, self.weak)
        c, a, z = self.c, self.a, v.abs()
        middle = ((a - 1) * v - v.sign() * a * c * t) / (a - 1 - t)
        return torch.where(z <= (1 + t) * c, soft(v, c * t), torch.where(z <= a * c, middle, v))


class MCP(Value):
    """Minimax concave penalty, weakly convex with weak = 1 / gamma (Zhang, Ann. Statist. 2010, Eq. 2.1).

    f(x) is the sum over all coordinates of c|x| - x^2 / (2 gamma) for |x| <= gamma c, and of gamma c^2 / 2 for larger
    |x|. The prox, for t < gamma, is the soft threshold S_{c t}(v) divided by 1 - t / gamma for |v| <= gamma c, and v
    for larger |v|.
    """

    convex: ClassVar[bool] = False
    makes: ClassVar[Form] = "sparse"
    kind: Literal["mcp"] = "mcp"
    c: float = Field(0.01, gt=0, description="threshold lambda")
    gamma: float = Field(3.0, gt=0, description="point beyond which the penalty is flat, in units of c")

    @property
    def weak(self) -> float:
        """Constant of weak convexity."""
        return 1 / self.gamma

    def f(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        c, gamma, z = self.c, self.gamma, x.abs()
        return total(torch.where(z <= gamma * c, c * z - z.square() / (2 * gamma), gamma * c**2 / 2))

    def prox(self, v: Tensor, t: Scalar, layout: Layout | None = None) -> Tensor:
        _check_single_valued(self, t, self.weak)
        return torch.where(v.abs() <= self.gamma * self.c, soft(v, self.c * t) / (1 - t / self.gamma), v)


def _check_single_valued(penalty: Value, t: Scalar, weak: float) -> None:
    largest = float(t.max()) if isinstance(t, Tensor) else t
    if largest * weak >= 1:
        raise ConfigError(
            f"{type(penalty).__name__} is weakly convex: its prox needs t < {1 / weak:g}, got "
            f"{largest:g}. Use a smaller step, or make the penalty flat only at larger values"
        )
