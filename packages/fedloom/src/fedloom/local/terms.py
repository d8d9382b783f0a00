"""Term: a function of a sample's representation that a method adds to the loss of the sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.local.rows import each_client, per_client

TermFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Any], Tensor]
"""(features ``[b, k]``, outputs ``[b, c]``, labels ``[b]``, anchors' features ``[a, b, k]``, argument) -> ``[b]``."""


class Term(NamedTuple):
    """Term of the local loss: weight times the mean of ``fn`` over the samples of a batch.

    The representation is the flattened output of the model's penultimate layer, as in `Work.activations`. Gradients
    pass through features and outputs, but not through the anchors' features, which are computed without dropout.

    Attributes:
        fn: function of one client's samples, and of this client's row of `argument`.
        weight: number or ``[m, 1]``. A term whose weights are all zero is ignored.
        anchors: models ``[d]`` or ``[m, d]``. The function receives the features that these models compute for the same
            samples.
        argument: tensor or NamedTuple of tensors ``[m, .]``. The function receives the client's row. Or None.
    """

    fn: TermFunction
    weight: float | Tensor = 1.0
    anchors: tuple[Tensor, ...] = ()
    argument: Any = None


class Bound(NamedTuple):
    """Values of a term per client: weight ``[m, 1]``, anchors ``[m, d]``, argument ``[m, .]``."""

    weight: Tensor
    anchors: tuple[Tensor, ...]
    argument: Any


def active(terms: Sequence[Term]) -> list[Term]:
    """Return the terms with a nonzero weight."""
    return [t for t in terms if bool(torch.as_tensor(t.weight).any())]


def bound(terms: Sequence[Term], w: Tensor) -> tuple[Bound, ...]:
    """Combine the rows of terms with the models ``w [m, d]``."""
    m = len(w)

    def weights(value: float | Tensor) -> Tensor:
        return per_client(value, m, w) if isinstance(value, Tensor) else torch.full_like(w[:, :1], value)

    return tuple(Bound(weights(t.weight), tuple(each_client(a, m) for a in t.anchors), t.argument) for t in terms)
