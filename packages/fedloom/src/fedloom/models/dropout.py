"""Dropout with masks from outside, so that one client's draws do not depend on which other clients train."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """Multiplies by the buffer ``mask`` in training, and does nothing in evaluation.

    The engine draws masks from the client's own generator (`draw`) and passes them in as the buffer, by assignment or
    with `torch.func.functional_call`, which also works with stacked masks under `torch.func.vmap`. Until the engine
    sets it, ``mask`` is one and nothing is dropped. The buffer is not part of the state dict.

    Args:
        p: probability with which a feature is dropped, in [0, 1).

    Raises:
        ValueError: p is out of range.
    """

    mask: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout: p must be in [0, 1), got {p}")
        self.p = p
        self.register_buffer("mask", torch.ones(()), persistent=False)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw a mask with ``shape`` (``[b, *features]``): 1 / (1 - p) with probability 1 - p, else 0."""
        kept = torch.rand(shape, dtype=torch.float32, generator=generator, device=generator.device).ge_(self.p)
        return kept.to(self.mask.dtype).mul_(1 / (1 - self.p))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * mask`` in training, else ``x``."""
        return x * self.mask if self.training else x

    def extra_repr(self) -> str:
        """Return ``p`` for the printed representation of the module."""
        return f"p={self.p}"
