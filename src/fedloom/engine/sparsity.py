"""Sizes of models that a method makes sparse or of low rank: non-zero parameters and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.algorithms import Algorithm
from fedloom.algorithms._base import ranks
from fedloom.rows.layout import Layout
from fedloom.rows.prox import Nuclear, Prox

WORTH = 2e9
"""Multiply-adds that the singular values of one evaluation may cost; ranks of more or larger models are left out."""


def penalties(algorithm: Algorithm) -> list[Prox]:
    """The proximal functions among a method's values; such a method is composite, and its models are counted."""
    names = (*type(algorithm).model_fields, "global_penalty", "personal_penalty")
    found = (getattr(algorithm, name, None) for name in names)
    return [value for value in found if isinstance(value, Prox)]


def sizes_of(algorithm: Algorithm, layout: Layout, rows: Tensor) -> dict[str, Tensor]:
    """Figures of the models ``rows [m, d]`` of a composite method, float64 ``[m]`` each; none for other methods.

    ``nonzeros`` are the parameters that are not zero. With a nuclear norm, and where it is cheap enough, ``rank`` is
    the sum of the numerical ranks of a model's matrices and ``factorised`` its parameters, each matrix as two thin
    ones where these are fewer.
    """
    values = penalties(algorithm)
    if not values:
        return {}
    figures = {"nonzeros": rows.count_nonzero(1).double().cpu()}
    shapes = torch.tensor(list(layout.matrix_shapes.values())).reshape(-1, 2)
    cost = 10 * len(rows) * float((shapes.prod(1) * shapes.amin(1)).sum())
    if any(isinstance(value, Nuclear) for value in values) and cost <= WORTH:
        found = torch.stack([ranks(row, layout) for row in rows]).cpu()
        dense = shapes.prod(1)
        figures["rank"] = found.sum(1).double()
        figures["factorised"] = (layout.d - dense.sum() + (found * shapes.sum(1)).minimum(dense).sum(1)).double()
    return figures
