"""Context of a round that functions on rows can read. It is part of the server's context."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Cohort(Protocol):
    """Clients of a round whose uploads were accepted."""

    @property
    def ids(self) -> Tensor:
        """Client ids [m] in the order of the rows."""
        ...

    def rng(self, purpose: str) -> torch.Generator:
        """Return the server's random generator for a purpose in this round."""
        ...
