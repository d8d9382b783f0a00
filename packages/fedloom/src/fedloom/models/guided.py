"""Guided models, in which a conditional valve adapts the features below the head to a client."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from fedloom.errors import Refused
from fedloom.models.parts import POSITIONS_REASON, Construction, MultiBodyNetwork, split_at_head

EMBEDDING, CONDITION = "embedding.weight", "condition"
"""Names of parameters of a guided model: the class embeddings, and the two conditions of its valve."""


class ConditionalValve(nn.Module):
    """Layer that scales and shifts features z by a condition c: relu((gamma(c) + 1) z + beta(c)).

    Args:
        width: number k of features.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma, self.beta = (
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width)) for _ in range(2)
        )

    def forward(self, z: Tensor, condition: Tensor) -> Tensor:
        """Return features ``[q, b, k]`` from ``z [b, k]``, with one result for each ``condition [q, k]``."""
        return torch.relu(z * (self.gamma(condition) + 1)[:, None] + self.beta(condition)[:, None])


class Guided(MultiBodyNetwork):
    """Network with a valve below its head and with an embedding of each class (GPFL).

    Its predictions use the features under the second condition, which is personal. The embeddings do not affect
    predictions.

    Attributes:
        body: part of the network below its head.
        embedding: class embeddings ``[c, k]``, which are drawn from the standard normal distribution.
        valve: valve that is used with both conditions.
        condition: generic and personal condition ``[2, k]``, which are 0 at the start.
        head: last linear layer of the network.
        penultimate: name of the layer whose output ``[b, k + c + 1]`` is the representation: the generic features,
            their cosine similarities to the embeddings, and half of the squared norm of the valve and the embeddings.
    """

    penultimate = "guidance"

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.body, head = split_at_head(network)
        width = head.in_features
        self.embedding = nn.Embedding(max(2, head.out_features), width)
        self.valve = ConditionalValve(width)
        self.condition = nn.Parameter(torch.zeros(2, width))
        self.guidance = nn.Identity()
        self.head = head

    def bodies(self) -> dict[str, nn.Module]:
        return {"body": self.body}

    def above(self, z: Tensor) -> Tensor:  # type: ignore[override]
        generic, personal = self.valve(z, self.condition)
        cosines = linear(normalize(generic), normalize(self.embedding.weight))
        weights = [self.embedding.weight, *self.valve.parameters()]
        size = torch.cat([weight.flatten() for weight in weights]).square().sum() / 2
        self.guidance(torch.cat([generic, cosines, size.expand(z.shape[0], 1)], 1))
        logits: Tensor = self.head(personal)
        return logits


class GuidedOption(Construction):
    """Option ``guided`` of a model, which replaces the model's network with `Guided`."""

    option = "guided"
    guided: bool = Field(
        False, description="add a conditional valve before the head, and an embedding of every class (GPFL)"
    )

    @staticmethod
    def wrap_networks(networks: Sequence[nn.Module], value: Any) -> nn.Module:
        return Guided(networks[0])

    @staticmethod
    def check_task(classed: bool, each: bool, task_keys: Collection[str]) -> None:
        if each:
            raise Refused(
                f"model.guided compares the representation of a whole sample with the class embeddings, but "
                f"{POSITIONS_REASON}",
                rule="guided-needs-one-label",
                fix="omit {model.guided}",
            )
