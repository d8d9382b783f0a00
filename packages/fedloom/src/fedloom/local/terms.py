"""Terms: functions of a sample's representation that a method adds to the sample's loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.local.rows import each_client, per_client

TermFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Any], Tensor]
"""Function that maps features ``[b, k]``, outputs ``[b, c]``, labels ``[b]``, features under the anchors ``[a, b, k]``
and an argument to ``[b]``."""


class Term(NamedTuple):
    """Term of the local loss: ``weight`` times the mean of ``fn`` over a batch.

    The representation is the flattened output of the model's penultimate layer, as in `Work.activations`. Gradients
    flow through features and outputs, but not through the features under the anchors, which are computed without
    dropout.

    Attributes:
        fn: function of a client's samples and its row of `argument`.
        weight: scalar or tensor ``[m, 1]``. A term is ignored if all its weights are zero.
        anchors: additional models ``[d]`` or ``[m, d]``. The function receives the features of the same samples under
            these models.
        argument: tensor or NamedTuple of tensors ``[m, .]``, or None.  The function receives the client's row.
    """

    fn: TermFunction
    weight: float | Tensor = 1.0
    anchors: tuple[Tensor, ...] = ()
    argument: Any = None


class Bound(NamedTuple):
    """Values of a term for all clients: weights ``[m, 1]``, anchors ``[m, d]``, arguments ``[m, .]``."""

    weight: Tensor
    anchors: tuple[Tensor, ...]
    argument: Any


def active(terms: Sequence[Term]) -> list[Term]:
    """Return the terms with nonzero weights."""
    return [t for t in terms if bool(torch.as_tensor(t.weight).any())]


def bound(terms: Sequence[Term], w: Tensor) -> tuple[Bound, ...]:
    """Return the values of terms with one row for each client in ``w [m, d]``."""
    m = len(w)

    def weights(value: float | Tensor) -> Tensor:
        return per_client(value, m, w) if isinstance(value, Tensor) else torch.full_like(w[:, :1], value)

    return tuple(Bound(weights(t.weight), tuple(each_client(a, m) for a in t.anchors), t.argument) for t in terms)
