"""Base class of functions with a prox."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from fedloom.rows.algebra import Scalar
from fedloom.rows.layout import Layout

Form = Literal["dense", "sparse", "lowrank"]
"""Form of a vector: no special form, many zeros, or matrices of low rank."""


@runtime_checkable
class Prox(Protocol):
    """A function f on R^d with prox_{t f}(v) = argmin_x f(x) + ||x - v||^2 / (2 t), applied row by row.

    Functions of matrices or of named parameters need the layout. All other functions ignore the layout. A class whose
    prox makes vectors sparse or of low rank declares this in ``makes: ClassVar[Form]``. Messages then use this form and
    count its bytes.
    """

    @property
    def convex(self) -> bool:
        """True if f is convex.

        If f is not convex, f + weak / 2 ||x||^2 must be convex, and the step must satisfy t < 1 / weak.
        """
        ...

    def f(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        """Return values [m, 1] of rows [m, d], or a scalar tensor of [d]."""
        ...

    def prox(self, v: Tensor, t: Scalar, layout: Layout | None = None) -> Tensor:
        """Return the prox of v [m, d] or [d] with step t > 0, a number or [m, 1].

        Raises:
            ConfigError: the layout is missing, or t is too large for a weakly convex function.
        """
        ...


def find_form(f: object) -> Form:
    """Return the form that the prox of ``f`` gives to a vector, ``f.makes``. The default is "dense"."""
    form: Form = getattr(f, "makes", "dense")
    return form
