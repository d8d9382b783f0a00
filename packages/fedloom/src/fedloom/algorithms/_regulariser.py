"""Nonsmooth terms of composite problems. A term is a function that has a prox, or None if there is no term."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import AfterValidator
from torch import Tensor

from fedloom.local import Ctx
from fedloom.local.inexact import LyapunovParts
from fedloom.rows import algebra
from fedloom.rows.layout import Layout
from fedloom.rows.proxes import L1, AnyProx, Form, Nuclear, Prox, find_form
from fedloom.values import Value


def _has_prox(f: Value | None) -> Value | None:
    if f is not None and not isinstance(f, Prox):
        raise ValueError(f"a regularizer must define f, prox and convex, got {type(f).__name__}")
    if find_form(f) not in get_args(Form):
        raise ValueError(
            f"the attribute `makes` of {type(f).__name__} must be one of {', '.join(get_args(Form))}, got "
            f"{find_form(f)!r}"
        )
    return f


Regulariser = Annotated[AnyProx | None, AfterValidator(_has_prox)]
"""Type of an option that holds the nonsmooth term of a composite problem. None means that there is no term."""


def to_prox(f: object) -> Prox | None:
    """Convert a regularizer to a function that has a prox. None stays None."""
    return f if isinstance(f, Prox) else None


def note_missing_regularizer(method: Any, then: str = "produces models without zeros", c: float = 0.01) -> list[str]:
    """Return a note if a composite method has no regularizer.

    The note names the equivalent method and the option to set.
    """
    if method.regulariser is not None:
        return []
    name = type(method).__name__
    return [f"{name} without a regularizer {then}. Set one, such as regulariser = {{ kind = 'l1', c = {c} }}"]


def proximal(f: object, v: Tensor, t: float | Tensor, layout: Layout) -> Tensor:
    """Return prox_{t f}(v) for v ``[d]`` or ``[m, d]``, where t is a number or ``[m, 1]``.

    If f is None, return v itself.
    """
    return f.prox(v, t, layout) if isinstance(f, Prox) else v


def penalty(f: object, x: Tensor, layout: Layout) -> Tensor:
    """Return f(x), ``[m, 1]`` for ``[m, d]`` and a scalar for ``[d]``. If f is None, return 0."""
    return f.f(x, layout) if isinstance(f, Prox) else algebra.total(torch.zeros_like(x))


def stationarity(f: object, y: Tensor, xi: Tensor, total: LyapunovParts, ctx: Ctx) -> dict[str, float]:
    """Return FIAELT's diagnostics at y ``[d]``, given xi in df(y), the mean gradient ``[d]`` and mean energy ``[1]``.

    ``kkt`` is at least the distance between 0 and the sum of the gradients plus df(y) (Theorem 1). ``lyapunov`` is H_t
    (Proposition 5).
    """
    gradient, energy = ctx.n * total.gradient, ctx.n * total.energy
    kkt, h = torch.linalg.vector_norm(gradient + xi), energy + penalty(f, y, ctx.layout)
    return {"kkt": float(kkt), "lyapunov": float(h), "nonzeros": float(y.count_nonzero())}


Components = Literal["lr+s", "s+s", "s+lr", "lr+lr"]
"""Choice of models that are the sum of a global and a personal part. Each part has low rank or is sparse."""


def penalties(components: Components, lam: float, mu: float) -> dict[str, Prox]:
    """Return FedSLR's penalties, with weight lam on the global part and weight mu on the personal part."""
    kinds: dict[str, type[L1 | Nuclear]] = {"lr": Nuclear, "s": L1}
    shared, personal = components.split("+")
    return {"global": kinds[shared](c=lam), "personal": kinds[personal](c=mu)}
