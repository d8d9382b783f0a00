"""Memory: how several processes come to share the rows of a store."""

from __future__ import annotations

import mmap
from math import prod
from typing import Protocol

import torch
from torch import Tensor


class Memory(Protocol):
    """Shared rows of processes: each process makes the same stores in the same order."""

    @property
    def leads(self) -> bool:
        """This process makes the files and keeps the journal. There is one."""
        ...

    def allocate(self, size: int, large: bool) -> mmap.mmap:
        """Zeros that all share.

        Args:
            size: bytes, at least 1.
            large: they belong to rows that are beyond the budget of memory.
        """
        ...

    def wait(self) -> None:
        """Return when every process has come here."""
        ...


class Forked:
    """Rows shared with processes that are forked after the store is made. Those leave its files alone."""

    leads = True

    def allocate(self, size: int, large: bool) -> mmap.mmap:
        return mmap.mmap(-1, size)

    def wait(self) -> None:
        pass


def allocate(shape: tuple[int, ...], dtype: torch.dtype, memory: Memory | None, large: bool = False) -> Tensor:
    """Memory that costs nothing before it is written. Zeros when processes share it."""
    size = prod(shape) * dtype.itemsize
    if memory is None or not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory.allocate(size, large), dtype=dtype).view(shape)
