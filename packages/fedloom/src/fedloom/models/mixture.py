"""Mixtures of networks: several networks with the same architecture, whose class probabilities are mixed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from fedloom.errors import Refused
from fedloom.models.parts import Construction, MultiBodyNetwork

MIXING = "mixing"
"""Name of the parameter that contains the logarithms of the weights in a mixture, up to a constant."""


def log_probabilities(logits: Tensor) -> Tensor:
    """Return logarithms of the class probabilities ``[..., c]``.

    If there is only one output ``[..., 1]``, the result is for two classes.
    """
    if logits.shape[-1] > 1:
        return logits.log_softmax(-1)
    return torch.cat([logsigmoid(-logits), logsigmoid(logits)], -1)


class Mixture(MultiBodyNetwork):
    """Networks whose class probabilities are mixed with weights that are the same for all samples.

    The outputs are the logits of the mixed probabilities, so that a mixture can be evaluated, saved and exported like
    any other network.

    Attributes:
        mixing: parameters ``[M]``, which are 0 at the start. The weights are the softmax of these parameters.
        components: the M networks.
        penultimate: name of the layer whose output is the representation: the logits of all networks, flattened to
            ``[b, M c]``.
    """

    penultimate = "logits"

    def __init__(self, components: Sequence[nn.Module]) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.zeros(len(components)))
        self.components = nn.ModuleList(components)
        self.logits = nn.Identity()

    def bodies(self) -> dict[str, nn.Module]:
        return {f"components.{m}": component for m, component in enumerate(self.components)}

    def above(self, *z: Tensor) -> Tensor:
        """Return the mixture's logits ``[b, ..., c]``, given the logits of its networks."""
        logits: Tensor = self.logits(torch.stack(z, 1))
        weights = self.mixing.log_softmax(0).view(-1, *[1] * (logits.dim() - 2))
        mixed = (log_probabilities(logits) + weights).logsumexp(1)
        return mixed if logits.shape[-1] > 1 else mixed[..., 1:] - mixed[..., :1]


class MixtureOption(Construction):
    """Option ``mixture`` of a model, which replaces its network with a `Mixture` of several networks."""

    option = "mixture"
    mixture: int | None = Field(
        None,
        ge=2,
        description="number of independently initialized copies of the network, whose class probabilities are "
        "mixed (FedEM)",
    )

    @staticmethod
    def count_networks(value: Any) -> int:
        return int(value)

    @staticmethod
    def wrap_networks(networks: Sequence[nn.Module], value: Any) -> nn.Module:
        return Mixture(networks)

    @staticmethod
    def check_task(classed: bool, each: bool, task_keys: Collection[str]) -> None:
        if not classed:
            raise Refused(
                "model.mixture mixes class probabilities, but this task has no classes",
                rule="mixture-needs-classes",
                fix="omit {model.mixture}",
            )
        for key in ("class_weights", "loss"):
            if key in task_keys:
                raise Refused(
                    "model.mixture always uses the negative log-probability as its loss",
                    rule="mixture-has-a-loss",
                    fix=f"omit {{task.{key}}}",
                )
