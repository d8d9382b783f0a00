"""Term: what a method adds to the loss of a sample, as a function of its representation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.local.rows import each_client, per_client

TermFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Any], Tensor]
"""(features ``[b, k]``, outputs ``[b, c]``, labels ``[b]``, anchors' features ``[a, b, k]``, argument) -> ``[b]``."""


class Term(NamedTuple):
    """A term of the local loss: weight times the mean over a batch of ``fn`` of its samples.

    The representation is that of `Work.activations`, the output of the model's penultimate layer, flattened. Gradients
    flow through features and outputs, not through those of the anchors, which are taken without dropout.

    Attributes:
        fn: of the samples of one client, and that client's row of `argument`.
        weight: a number or ``[m, 1]``. A term whose weights are all 0 is no term.
        anchors: models ``[d]`` or ``[m, d]`` whose features of the same samples the function gets.
        argument: a tensor or NamedTuple of tensors ``[m, .]``, of which a client's function gets its row. Or None.
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
    """Return the terms with a weight."""
    return [t for t in terms if bool(torch.as_tensor(t.weight).any())]


def bound(terms: Sequence[Term], w: Tensor) -> tuple[Bound, ...]:
    """Bind the rows of terms to the models ``w [m, d]``."""
    m = len(w)

    def weights(value: float | Tensor) -> Tensor:
        return per_client(value, m, w) if isinstance(value, Tensor) else torch.full_like(w[:, :1], value)

    return tuple(Bound(weights(t.weight), tuple(each_client(a, m) for a in t.anchors), t.argument) for t in terms)
