"""Part of a round's context that rules on rows may read. It is contained in the server's context."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Cohort(Protocol):
    """The accepted cohort of a round."""

    @property
    def ids(self) -> Tensor:
        """Client ids [m], in the order of the rows."""
        ...

    def rng(self, purpose: str) -> torch.Generator:
        """Return the server's generator for this round and a purpose."""
        ...
