"""Prototypes, which are the mean representations of classes, and how methods send, store and compare them.

The module also handles the linear head that follows the representation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.errors import Refused
from fedloom.local import Term, Work
from fedloom.rows import masks
from fedloom.rows.layout import Layout


class Prototypes(NamedTuple):
    """Mean representation of every class ``[m, c, k]``, and a mask ``[m, c]`` with 1 for each class that has a mean."""

    centre: Tensor
    has_prototype: Tensor


def shape_of(layout: Layout) -> tuple[int, int]:
    """Return a model's numbers of classes and features, read from its last matrix (one output means two classes)."""
    outputs, features = list(layout.matrix_shapes.values())[-1]
    return max(2, outputs), features


def require_bias(method: str, layout: Layout) -> None:
    """Raise an error if the last layer of a model has no bias.

    Raises:
        ConfigError: the last layer of the model has no bias.
    """
    if not bool((masks.head(layout) & ~masks.matrices(layout)).any()):
        raise Refused(
            f"{method} shifts the bias of the model's last layer, but this layer has no bias. Use a model whose "
            "last layer has a bias"
        )


class LastLayer(NamedTuple):
    """Weight ``[..., c, k]`` and bias ``[..., c]`` of a model's last layer, as views."""

    weight: Tensor
    bias: Tensor


def head_of(layout: Layout, models: Tensor) -> LastLayer:
    """Return the weight and bias of the last layer of models ``[..., d]``.

    Writing to these tensors changes the models.
    """
    name, tree = list(layout.matrix_shapes)[-1], layout.tree(models)
    return LastLayer(tree[name], tree[f"{name.rpartition('.')[0]}.bias"])


def distance(z: Tensor, _outputs: Tensor, y: Tensor, _anchors: Tensor, prototypes: Prototypes) -> Tensor:
    """Return the mean squared difference ``[b]`` between features ``[b, k]`` and the prototypes of their classes.

    The difference is 0 for a class without a prototype.
    """
    return (z - prototypes.centre[y]).square().mean(1) * prototypes.has_prototype[y]


def pull_term(prototypes: Tensor, has_prototype: Tensor, weight: float, work: Work) -> Term:
    """Return the loss term that pulls features to the prototypes ``[c k]`` of the classes in ``has_prototype [c]``."""
    centre = prototypes.view(len(has_prototype), -1).expand(work.m, -1, -1)
    return Term(distance, weight, argument=Prototypes(centre, has_prototype.expand(work.m, -1)))


def shares(work: Work, like: Tensor) -> Tensor:
    """Return the share of each class in each client's samples, ``[m, c]``."""
    return work.class_counts.to(like) / work.sizes.to(like)


def share_range(share: Tensor, work: Work) -> tuple[Tensor, float]:
    """Return the range of valid shares ``[m, c]``: 0 without samples of a class, else at least one sample's share."""
    return torch.where(share > 0, 1 / work.sizes.to(share), 0.0), 1.0


def update_means(prototypes: Tensor, has_prototype: Tensor, total: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Update the server's prototypes ``[c k]``, and the mask ``[c]`` of classes that have a prototype.

    Args:
        prototypes: prototypes before the update.
        has_prototype: mask of the classes that had a prototype before the update.
        total: mean, over clients, of the mean representation of the class times the class's share of the client's
            samples, ``[c k]``.
        share: mean, over clients, of the class's share of the client's samples, ``[c]``. If this share is 0, the
            prototype does not change.
    """
    has_samples = share > 0
    mean = total.view(len(has_prototype), -1) / torch.where(has_samples, share, 1)[:, None]
    old = prototypes.view(len(has_prototype), -1)
    return torch.where(has_samples[:, None], mean.to(old), old).flatten(), torch.maximum(
        has_prototype, has_samples.to(has_prototype)
    )
