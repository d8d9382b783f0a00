"""Low-rank adapters: a model's layers are frozen, and a small trainable product is added to some of them.

E. J. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, Section 4.1: W x + scale B A x, where
B is 0 at the start.
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
"""Pattern that matches the names and classes of attention modules."""


class Adapters(Value):
    """Choice of the layers that get adapters.

    All other parameters, except a trained head, are frozen and stored only once for all clients.
    """

    rank: PositiveInt = Field(8, description="rank of each adapter")
    on: Literal["attention", "linear"] = Field(
        "attention", description="layers that get adapters: the linear layers in attention, or all linear layers"
    )
    scale: float = Field(1.0, gt=0, description="scaling factor of the adapter's product (LoRA: alpha / rank)")
    head: bool = Field(False, description="also train the whole last linear layer")


class Adapted(nn.Module):
    """Linear layer with an adapter.

    Attributes:
        wrapped: original layer, which is frozen.
        down: matrix A of the paper ``[rank, inputs]``.
        up: matrix B of the paper ``[outputs, rank]``, which is 0 at the start.
    """

    def __init__(self, layer: nn.Module, rank: int, scale: float) -> None:
        super().__init__()
        outputs, inputs = weight_matrix(layer).shape
        self.wrapped, self.scale = layer, scale
        self.down = nn.Parameter(torch.empty(rank, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the original layer plus the adapter's product."""
        output: Tensor = self.wrapped(x)
        return output + self.scale * ((x @ self.down.mT) @ self.up.mT)

    @property
    def weight(self) -> Tensor:
        """The layer's weights plus the adapter's product. Some modules read the weights and do not call the layer."""
        plain: Tensor = self.wrapped.weight  # type: ignore[assignment]
        product = self.scale * (self.up @ self.down)
        return plain + (product if type(self.wrapped) is nn.Linear else product.mT)

    @property
    def bias(self) -> Tensor | None:
        """Bias of the layer, or None if it has none."""
        return self.wrapped.bias  # type: ignore[return-value]


def add_adapters(module: nn.Module, adapters: Adapters = Adapters()) -> nn.Module:  # noqa: B008  # frozen
    """Return a copy of a module with adapters added.

    In the copy, only the adapters (and the head, if ``adapters.head`` is True) are trainable. Their initial values are
    drawn from torch's global generator.

    Raises:
        ConfigError: the module has no such layers, or the rank is too large for one of them.
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
        if adapters.rank > min(weight_matrix(linear[name]).shape):
            shape = "x".join(map(str, weight_matrix(linear[name]).shape))
            raise ConfigError(
                f"adapters.rank is {adapters.rank}, but layer {name!r} is {shape}, so its rank is at "
                f"most {min(weight_matrix(linear[name]).shape)}. Use a smaller rank"
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
    """Return a copy of a module whose adapters are merged into their layers, which restores the original architecture.

    A module without adapters is returned uncopied.
    """
    adapters = {name: layer for name, layer in module.named_modules() if isinstance(layer, Adapted)}
    module = copy.deepcopy(module) if adapters else module
    for name in adapters:
        layer = module.get_submodule(name)
        assert isinstance(layer, Adapted)
        layer.wrapped.weight.copy_(layer.weight)  # type: ignore[operator]
        module.set_submodule(name, layer.wrapped)
    return module


def weight_matrix(layer: nn.Module) -> Tensor:
    """Return the weights ``[outputs, inputs]`` of a linear layer."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight if isinstance(layer, nn.Linear) else weight.mT


def _is_linear(layer: nn.Module) -> bool:
    """Return True for a linear layer of torch, or of GPT-2 in transformers (``Conv1D``, whose matrix is transposed)."""
    return type(layer) is nn.Linear or (type(layer).__name__ == "Conv1D" and hasattr(layer, "nf"))


def _is_attention(module: nn.Module, name: str) -> bool:
    parts = name.split(".")
    above = [".".join(parts[:k]) for k in range(1, len(parts))]
    return any(
        ATTENTION_PATTERN.search(p.rpartition(".")[2] + " " + type(module.get_submodule(p)).__name__) for p in above
    )
