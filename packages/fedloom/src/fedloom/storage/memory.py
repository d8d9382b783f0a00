"""Memory through which several processes share the rows of a store."""

from __future__ import annotations

import mmap
from math import prod
from typing import Protocol

import torch
from torch import Tensor


class Memory(Protocol):
    """Rows that processes share. Each process must create the same stores in the same order."""

    @property
    def leads(self) -> bool:
        """True if this process creates the files and writes the journal. There is exactly one such process."""
        ...

    def allocate(self, size: int, large: bool) -> mmap.mmap:
        """Return zero bytes that all processes share.

        Args:
            size: number of bytes, at least 1.
            large: True if the bytes are for rows that exceed the memory budget.
        """
        ...

    def wait(self) -> None:
        """Wait until all processes have called this method."""
        ...


class ForkedMemory:
    """Memory shared with processes that are forked after the store is created.

    These processes do not use the store's files.
    """

    leads = True

    def allocate(self, size: int, large: bool) -> mmap.mmap:
        return mmap.mmap(-1, size)

    def wait(self) -> None:
        pass


def allocate(shape: tuple[int, ...], dtype: torch.dtype, memory: Memory | None, large: bool = False) -> Tensor:
    """Return a tensor that does not use any space until something is written to it.

    The tensor contains zeros if processes share the memory, and arbitrary numbers otherwise.
    """
    size = prod(shape) * dtype.itemsize
    if memory is None or not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory.allocate(size, large), dtype=dtype).view(shape)
