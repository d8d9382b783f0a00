"""Memory: lets several processes share the rows of a store."""

from __future__ import annotations

import mmap
from math import prod
from typing import Protocol

import torch
from torch import Tensor


class Memory(Protocol):
    """Rows that processes share: each process creates the same stores in the same order."""

    @property
    def leads(self) -> bool:
        """True if this process creates the files and keeps the journal. There is one."""
        ...

    def allocate(self, size: int, large: bool) -> mmap.mmap:
        """Return zeros that all processes share.

        Args:
            size: number of bytes, at least 1.
            large: True if the zeros belong to rows beyond the memory budget.
        """
        ...

    def wait(self) -> None:
        """Return after every process has called this method."""
        ...


class Forked:
    """Rows shared with processes that are forked after the store is created.

    These processes do not access its files.
    """

    leads = True

    def allocate(self, size: int, large: bool) -> mmap.mmap:
        return mmap.mmap(-1, size)

    def wait(self) -> None:
        pass


def allocate(shape: tuple[int, ...], dtype: torch.dtype, memory: Memory | None, large: bool = False) -> Tensor:
    """Memory that uses no space until it is written. Return zeros if processes share the memory."""
    size = prod(shape) * dtype.itemsize
    if memory is None or not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory.allocate(size, large), dtype=dtype).view(shape)
