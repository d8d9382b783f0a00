"""Terms, which a method adds to the loss of each sample as a function of the sample's representation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.local.rows import each_client, per_client

TermFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Any], Tensor]
"""Function of features ``[b, k]``, outputs ``[b, c]``, labels ``[b]``, features under the anchors ``[a, b, k]`` and an
argument, which returns ``[b]``."""


class Term(NamedTuple):
    """Term that is added to the local loss: ``weight`` times the mean of ``fn`` over the samples of a batch.

    The representation is the flattened output of the model's penultimate layer, as in `Work.activations`. Gradients
    flow through features and outputs, but not through the features under the anchors, which are computed without
    dropout.

    Attributes:
        fn: function that takes one client's samples and this client's row of `argument`.
        weight: number or tensor ``[m, 1]``. A term is ignored if all of its weights are zero.
        anchors: additional models ``[d]`` or ``[m, d]``. The function receives the features of the same samples under
            these models.
        argument: tensor or NamedTuple of tensors ``[m, .]``, or None.  The function receives the client's row of it.
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
    """Return the terms whose weight is not zero."""
    return [t for t in terms if bool(torch.as_tensor(t.weight).any())]


def bound(terms: Sequence[Term], w: Tensor) -> tuple[Bound, ...]:
    """Return the values of terms with one row for each client in ``w [m, d]``."""
    m = len(w)

    def weights(value: float | Tensor) -> Tensor:
        return per_client(value, m, w) if isinstance(value, Tensor) else torch.full_like(w[:, :1], value)

    return tuple(Bound(weights(t.weight), tuple(each_client(a, m) for a in t.anchors), t.argument) for t in terms)
