"""Base class of functions with a proximal operator."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from fedloom.rows.algebra import Scalar
from fedloom.rows.layout import Layout

Form = Literal["dense", "sparse", "lowrank"]
"""Structure that a vector may have: no particular structure, many zeros, or matrices of low rank."""


@runtime_checkable
class Prox(Protocol):
    """Function f on R^d with prox_{t f}(v) = argmin_x f(x) + ||x - v||^2 / (2 t), applied to each row.

    Functions that depend on matrices or parameter names need the layout, and all others ignore it. If a class's prox
    produces sparse or low-rank vectors, the class declares this as ``makes: ClassVar[Form]``. Messages are then encoded
    in this way.
    """

    @property
    def convex(self) -> bool:
        """True if f is convex.

        Otherwise, f + weak / 2 ||x||^2 must be convex, and the step t of the prox must be less than 1 / weak.
        """
        ...

    def f(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        """Return the values of f as [m, 1] for rows [m, d], or as a scalar tensor for [d]."""
        ...

    def prox(self, v: Tensor, t: Scalar, layout: Layout | None = None) -> Tensor:
        """Return the prox of v ([m, d] or [d]) with the step t > 0, which is a number or [m, 1].

        Raises:
            ConfigError: the layout is missing, or t is too large for a weakly convex function.
        """
        ...


def find_form(f: object) -> Form:
    """Return the structure of the vectors that the prox of ``f`` produces, which is ``f.makes``.

    The default is "dense".
    """
    form: Form = getattr(f, "makes", "dense")
    return form
