"""Low-rank adapters: the module's layers are frozen, and each layer is extended by a small trainable product.

E. J. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, Section 4.1: W x + scale B A x, with B
= 0 at the start.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.models.parts import head_prefixes
from fedloom.values import Value

ATTENTION_PATTERN = re.compile("attention|attn", re.IGNORECASE)
"""Substring of a module's name or class that identifies attention layers."""


class Adapters(Value):
    """Layers with adapters. All other parameters of the model are frozen and stored once for all clients."""

    rank: PositiveInt = Field(8, description="rank of each adapter")
    on: Literal["attention", "linear"] = Field(
        "attention", description="layers that get adapters: linear layers of attention, or all linear layers"
    )
    scale: float = Field(1.0, gt=0, description="factor of the adapter's product (LoRA: alpha / rank)")
    head: bool = Field(False, description="also train the whole last linear layer")


class Adapted(nn.Module):
    """Linear layer with an adapter.

    Attributes:
        wrapped: original layer, which is frozen.
        down: ``[rank, inputs]``. down: matrix A in the paper.
        up: ``[outputs, rank]``. up: matrix B in the paper, which is 0 at the start.
    """

    def __init__(self, layer: nn.Module, rank: int, scale: float) -> None:
        super().__init__()
        outputs, inputs = matrix(layer).shape
        self.wrapped, self.scale = layer, scale
        self.down = nn.Parameter(torch.empty(rank, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's product to the layer's output."""
        output: Tensor = self.wrapped(x)
        return output + self.scale * ((x @ self.down.mT) @ self.up.mT)

    @property
    def weight(self) -> Tensor:
        """Matrix of the layer. Some modules read this matrix instead of calling the layer."""
        plain: Tensor = self.wrapped.weight  # type: ignore[assignment]
        product = self.scale * (self.up @ self.down)
        return plain + (product if type(self.wrapped) is nn.Linear else product.mT)

    @property
    def bias(self) -> Tensor | None:
        """The layer's."""
        return self.wrapped.bias  # type: ignore[return-value]


def add_adapters(module: nn.Module, adapters: Adapters = Adapters()) -> nn.Module:  # noqa: B008  # frozen
    """Copy a module and add adapters to the copy. Only the adapters are trained, and the head if requested.

    Initial values of the adapters are drawn from torch's global generator.

    Raises:
        ConfigError: no such layer exists, or the rank is too large for one of the layers.
    """
    module = copy.deepcopy(module)
    linear = {name: layer for name, layer in module.named_modules() if name and _is_linear(layer)}
    last = head_prefixes(module)[0][:-1] if adapters.head else ""
    chosen = [name for name in linear if name != last and (adapters.on == "linear" or _is_attention(module, name))]
    if not chosen:
        elsewhere = (
            f"linear layers elsewhere: {', '.join(list(linear)[:8])}. Use on = 'linear'" if linear else "none at all"
        )
        raise ConfigError(
            f"adapters on {adapters.on!r}: {type(module).__name__} contains no such linear layer ({elsewhere})"
        )
    for name in chosen:
        if adapters.rank > min(matrix(linear[name]).shape):
            shape = "x".join(map(str, matrix(linear[name]).shape))
            raise ConfigError(
                f"adapters.rank is {adapters.rank}, but layer {name!r} is {shape}, so its rank is at "
                f"most {min(matrix(linear[name]).shape)}. Use a smaller rank"
            )
    for p in module.parameters():
        p.requires_grad = False
    for name in chosen:
        module.set_submodule(name, Adapted(linear[name], adapters.rank, adapters.scale))
    if last:
        for p in module.get_submodule(last).parameters():
            p.requires_grad = True
    return module


@torch.no_grad()
def merge_adapters(module: nn.Module) -> nn.Module:
    """Merge the adapters into their layers and return the original architecture.

    Without adapters, return the module.
    """
    adapters = {name: layer for name, layer in module.named_modules() if isinstance(layer, Adapted)}
    module = copy.deepcopy(module) if adapters else module
    for name in adapters:
        layer = module.get_submodule(name)
        assert isinstance(layer, Adapted)
        layer.wrapped.weight.copy_(layer.weight)  # type: ignore[operator]
        module.set_submodule(name, layer.wrapped)
    return module


def matrix(layer: nn.Module) -> Tensor:
    """Return the weights ``[outputs, inputs]`` of a linear layer."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight if isinstance(layer, nn.Linear) else weight.mT


def _is_linear(layer: nn.Module) -> bool:
    """Return True if a module is a torch linear layer, or GPT-2's in transformers (a transposed matrix)."""
    return type(layer) is nn.Linear or (type(layer).__name__ == "Conv1D" and hasattr(layer, "nf"))


def _is_attention(module: nn.Module, name: str) -> bool:
    parts = name.split(".")
    above = [".".join(parts[:k]) for k in range(1, len(parts))]
    return any(
        ATTENTION_PATTERN.search(p.rpartition(".")[2] + " " + type(module.get_submodule(p)).__name__) for p in above
    )
