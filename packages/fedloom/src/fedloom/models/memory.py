"""Models with a memory, whose predictions also use the labels of stored samples with similar representations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from fedloom.errors import Refused
from fedloom.models.mixture import log_probabilities
from fedloom.models.parts import POSITIONS_REASON, Construction, MultiBodyNetwork, split_at_head

KEYS, LABELS, RULE = "memory.keys", "memory.labels", "memory.rule"
"""Names of parameters of a model with a memory, which are the parameters of `StoredSampleMemory`."""

MIN_CLASS_PROBABILITY = 1e-12
"""Minimum probability of a class, so that its logarithm is finite."""


class StoredSampleMemory(nn.Module):
    """Representations and labels of stored samples, and the rule for predictions from them.

    An empty place has no label.

    Args:
        places: number S of samples that can be stored.
        width: length k of a representation.
        classes: number c of classes.

    Attributes:
        keys: representations of the stored samples ``[S, k]``.
        labels: one-hot labels of the stored samples ``[S, c]``.
        rule: weight of the memory in a prediction, scale of the kernel, and number of neighbors ``[3]``.
    """

    def __init__(self, places: int, width: int, classes: int) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.zeros(places, width))
        self.labels = nn.Parameter(torch.zeros(places, classes))
        self.rule = nn.Parameter(torch.tensor([0.0, 1.0, 1.0]))

    def forward(self, z: Tensor) -> Tensor:
        """Return class probabilities ``[b, c]`` for representations ``[b, k]``."""
        return recalled(z, self.keys, self.labels, self.rule[1], self.rule[2])


class WithMemory(MultiBodyNetwork):
    """Network whose class probabilities are mixed with those of the nearest stored samples (kNN-Per).

    In training, and as long as the weight of the memory is 0, predictions come only from the network.

    Attributes:
        body: part of the network below its head. Its output is the representation.
        memory: stored samples. At the start, there are none.
        head: last linear layer of the network.
    """

    penultimate = "body"

    def __init__(self, network: nn.Module, places: int) -> None:
        super().__init__()
        self.body, head = split_at_head(network)
        self.memory = StoredSampleMemory(places, head.in_features, max(2, head.out_features))
        self.head = head

    def bodies(self) -> dict[str, nn.Module]:
        return {"body": self.body}

    def above(self, z: Tensor) -> Tensor:  # type: ignore[override]
        logits: Tensor = self.head(z)
        if self.training:
            return logits
        weight = self.memory.rule[0]
        if not torch.compiler.is_compiling() and not weight > 0:  # exported programs have no branches
            return logits
        logs = mixed(log_probabilities(logits).exp(), self.memory(z), weight)
        return torch.where(weight > 0, logs if logits.shape[-1] > 1 else logs[..., 1:] - logs[..., :1], logits)


def mixed(p: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    """Return logarithms of mixed probabilities: ``weight`` applies to ``q [..., c]``, the rest to ``p [..., c]``."""
    return torch.lerp(p, q, weight).clamp(min=MIN_CLASS_PROBABILITY).log()


def recalled(z: Tensor, keys: Tensor, labels: Tensor, scale: Tensor, neighbours: Tensor) -> Tensor:
    """Return class probabilities ``[b, c]`` from the stored samples that are nearest to representations ``[b, k]``.

    The weight of a neighbor at distance r is proportional to exp(-r^2 / (k scale)). The weights of all neighbors add up
    to 1. If no samples are stored, all probabilities are 0.

    Args:
        z: representations ``[b, k]``.
        keys: representations of the stored samples ``[S, k]``.
        labels: one-hot labels of the stored samples ``[S, c]``. A row of zeros means that no sample is stored in this
            place.
        scale: scale of the kernel.
        neighbours: number of nearest samples that are used.
    """
    vacant = labels.sum(1) == 0
    r = torch.cdist(z, keys, compute_mode="donot_use_mm_for_euclid_dist").masked_fill(vacant, torch.inf)
    near, order = r.sort(dim=1, stable=True)
    beyond = torch.arange(len(keys), device=z.device) >= neighbours
    counts = (-near.square() / (z.shape[1] * scale)).masked_fill(beyond, -torch.inf)
    counts = torch.where(vacant[order], -torch.finfo(z.dtype).max, counts).softmax(1)
    return torch.zeros_like(counts).scatter(1, order, counts) @ labels


class MemoryOption(Construction):
    """Option ``memory`` of a model, which replaces its network with `WithMemory`."""

    option = "memory"
    memory: int | None = Field(
        None, ge=1, description="maximum number of samples that each client stores for its predictions (kNN-Per)"
    )

    @staticmethod
    def wrap_networks(networks: Sequence[nn.Module], value: Any) -> nn.Module:
        return WithMemory(networks[0], value)

    @staticmethod
    def check_task(classed: bool, each: bool, task_keys: Collection[str]) -> None:
        if each or not classed:
            what = POSITIONS_REASON if each else "this task has no classes"
            raise Refused(
                f"model.memory stores samples with their classes, but {what}",
                rule="memory-needs-classes",
                fix="omit {model.memory}",
            )
