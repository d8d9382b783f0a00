"""Dropout with masks that the caller draws, so that a client's random draws do not depend on the other clients."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """Layer that multiplies by the buffer ``mask`` in training, and returns its input unchanged in evaluation.

    The engine draws masks from the client's own generator with `draw`. It passes them to the layer by assigning the
    buffer or through `torch.func.functional_call`, which also supports one mask per client under `torch.func.vmap`.
    Until the engine sets ``mask``, it is 1, so no values are dropped. The buffer is not included in the state dict.

    Args:
        p: probability in [0, 1) of dropping a feature.

    Raises:
        ValueError: ``p`` is out of range.
    """

    mask: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout: p must be in [0, 1), got {p}")
        self.p = p
        self.register_buffer("mask", torch.ones(()), persistent=False)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw a mask ``[b, *features]`` whose values are 1 / (1 - p) with probability 1 - p, and 0 otherwise."""
        kept = torch.rand(shape, dtype=torch.float32, generator=generator, device=generator.device).ge_(self.p)
        return kept.to(self.mask.dtype).mul_(1 / (1 - self.p))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * mask`` in training, and ``x`` in evaluation."""
        return x * self.mask if self.training else x

    def extra_repr(self) -> str:
        """Return ``p`` for the printed representation of the module."""
        return f"p={self.p}"
