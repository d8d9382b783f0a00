"""The base of functions with a prox."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from fedloom.rows.algebra import Scalar
from fedloom.rows.layout import Layout

Form = Literal["dense", "sparse", "lowrank"]
"""Form of a vector: nothing special, many zeros, or matrices of low rank."""


@runtime_checkable
class Prox(Protocol):
    """A function f of R^d with prox_{t f}(v) = argmin_x f(x) + ||x - v||^2 / (2 t), row by row.

    Functions of matrices and of parameters need the layout, the others ignore it. A class whose prox makes vectors
    sparse or of low rank declares that in ``makes: ClassVar[Form]``: they are then sent in that form and counted.
    """

    @property
    def convex(self) -> bool:
        """Whether f is convex. If not, it has `weak` with f + weak / 2 ||x||^2 convex, and t < 1 / weak is needed."""
        ...

    def f(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        """Values [m, 1] of rows [m, d], a scalar tensor of [d]."""
        ...

    def prox(self, v: Tensor, t: Scalar, layout: Layout | None = None) -> Tensor:
        """Prox of v [m, d] or [d] with step t > 0, a number or [m, 1].

        Raises:
            ConfigError: no layout where one is needed, or t beyond what a weakly convex function allows.
        """
        ...


def made_by(f: object) -> Form:
    """Return the form that the prox of ``f`` gives a vector, ``f.makes``. "dense" if f does not say."""
    form: Form = getattr(f, "makes", "dense")
    return form
