"""Sums of functions with a proximal operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.rows.algebra import Scalar, norm
from fedloom.rows.layout import Layout
from fedloom.rows.proxes._base import Form, Prox, find_form
from fedloom.rows.proxes.nonconvex import MCP, SCAD
from fedloom.rows.proxes.norms import L1, L2, ElasticNet, GroupL1, Linf, SquaredL2
from fedloom.rows.proxes.sets import Affine, Box, HalfSpace, L1Ball, L2Ball, LinfBall, Simplex
from fedloom.rows.proxes.spectral import Nuclear, NuclearBall
from fedloom.values import Value, make_kind

PROX_PARTS: dict[str, type[Value]] = {
    "l1": L1,
    "l2": L2,
    "squared-l2": SquaredL2,
    "elastic-net": ElasticNet,
    "linf": Linf,
    "group-l1": GroupL1,
    "nuclear": Nuclear,
    "nuclear-ball": NuclearBall,
    "box": Box,
    "linf-ball": LinfBall,
    "l2-ball": L2Ball,
    "l1-ball": L1Ball,
    "simplex": Simplex,
    "half-space": HalfSpace,
    "affine": Affine,
    "scad": SCAD,
    "mcp": MCP,
}


def table_validator(registry: Mapping[str, type[Value]]) -> Callable[[Any], Any]:
    """Return a validator that converts a table {kind, ...fields} to a value, and returns a value unchanged."""

    def make(choice: object) -> Any:
        return make_kind("prox", registry, choice, "", base=Value) if isinstance(choice, Mapping) else choice

    return make


Part = Annotated[SerializeAsAny[Value], BeforeValidator(table_validator(PROX_PARTS))]


class Total(Value):
    """Sum f = f_1 + ... + f_k of functions with a proximal operator.

    A squared l2 norm is combined exactly with any function g: prox_{t (g + c||.||^2)}(v) = prox_{s g}(s v / t), s = t /
    (1 + 2 c t). An l1 norm is combined exactly with an l2 norm, group l1 or a box if its prox is applied first (Yu,
    NeurIPS 2013). The prox of any other sum is computed by the parallel Dykstra-like method (Combettes and Pesquet,
    Proximal Splitting Methods in Signal Processing, 2011, Algorithm 10.31). The method takes gradient steps on the
    dual, with momentum (Beck and Teboulle, 2009) and restarts (O'Donoghue and Candes, 2015), until the points of all
    terms agree. Then v - x is t times a sum of subgradients, up to the tolerance. A row is not changed after it has
    converged, so rows do not influence each other.

    Raises:
        ConfigError: the terms' points did not agree within the allowed number of iterations, for example because sets
            do not intersect.
    """

    kind: Literal["total"] = "total"
    parts: tuple[Part, ...] = Field(min_length=1, description="terms of the sum: objects, or tables with a `kind`")
    tolerance: float = Field(
        1e-6, gt=0, description="tolerance for the distance between the terms' points, relative to 1 + ||x||"
    )
    iterations: int = Field(20_000, ge=1, description="maximum number of iterations of the splitting method")

    @model_validator(mode="after")
    def _one_nonconvex(self) -> Self:
        rest = [p for p in self.parts if not isinstance(p, SquaredL2)]
        names = [type(p).__name__ for p in self.parts]
        if not all(isinstance(p, Prox) for p in self.parts):
            raise ValueError(f"every term needs f, prox and convex, got {names}")
        if len(rest) > 1 and not all(p.convex for p in rest if isinstance(p, Prox)):
            raise ValueError(f"a weakly convex term can be added only to squared l2 norms, got {names}")
        return self

    @property
    def convex(self) -> bool:
        """True if all terms are convex."""
        return all(p.convex for p in self._functions)

    @property
    def makes(self) -> Form:
        """Structure of the vectors that the prox produces: the first structure among the terms that is not "dense"."""
        return next((form for form in map(find_form, self.parts) if form != "dense"), "dense")

    @property
    def _functions(self) -> list[Prox]:
        return [p for p in self.parts if isinstance(p, Prox)]

    def f(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        return torch.stack([self._value(p, x, layout) for p in self._functions]).sum(0)

    def _value(self, part: Prox, x: Tensor, layout: Layout | None) -> Tensor:
        """Return the value of a term f_i at x.

        If it is infinite, return the value at the nearest point of its set, provided that x is within the tolerance of
        this point.
        """
        value = part.f(x, layout)
        if not value.isinf().any():
            return value
        nearest = part.prox(x, 1.0, layout)
        near = norm(x - nearest) <= self.tolerance * (1 + norm(x))
        return torch.where(value.isinf() & near.view_as(value), part.f(nearest, layout), value)

    def prox(self, v: Tensor, t: Scalar, layout: Layout | None = None) -> Tensor:
        c = sum(p.c for p in self.parts if isinstance(p, SquaredL2))
        v, t = v / (1 + 2 * c * t), t / (1 + 2 * c * t)
        rest = [p for p in self._functions if not isinstance(p, SquaredL2)]
        l1 = [p for p in rest if isinstance(p, L1)]
        unsorted = [p for p in rest if not isinstance(p, L1)]
        if not unsorted or (len(unsorted) == 1 and (not l1 or isinstance(unsorted[0], L2 | GroupL1 | Box))):
            for p in (*l1, *unsorted):
                v = p.prox(v, t, layout)
            return v
        return self._split(rest, v, t, layout)

    def _split(self, parts: list[Prox], v: Tensor, t: Scalar, layout: Layout | None) -> Tensor:
        """Iterate p_i = prox_{k t f_i}(z_i), z_i = y_i + v - mean y, u_i <- z_i - p_i, where y is u with momentum."""
        k, rounding = len(parts), 4 * torch.finfo(v.dtype).eps * (1 + norm(v))
        x, arrived, gap = v, torch.zeros_like(v[..., :1], dtype=torch.bool), norm(v)
        u, y, age = v.new_zeros(k, *v.shape), v.new_zeros(k, *v.shape), torch.zeros_like(gap)
        for _ in range(self.iterations):
            z = y + (v - y.mean(0))
            p = torch.stack([part.prox(zi, k * t, layout) for part, zi in zip(parts, z, strict=True)])
            mean = p.mean(0)
            gap, close = norm(p - mean).amax(0), (self.tolerance * (1 + norm(mean))).maximum(rounding)
            x, arrived = torch.where(arrived, x, mean), arrived | ~(gap > close)
            if arrived.all():
                return x
            uphill = ((y - (z - p)) * (z - p - u)).sum((0, -1)).unsqueeze(-1) > 0
            age = torch.where(uphill, 0, age + 1)
            u, y = z - p, z - p + (age / (age + 3)) * (z - p - u)
        raise ConfigError(
            f"the prox of the sum did not reach tolerance {self.tolerance:g} in {self.iterations} iterations (gap "
            f"{float(gap.max()):.1e}). Check that the sets intersect. If they do, raise iterations or tolerance"
        )
