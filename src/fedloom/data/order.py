"""Which samples a client takes in which step."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def plan(size: int, batch_size: int | None, steps: int, gen: torch.Generator | None) -> Tensor:
    """Positions of the batches of one client.

    Every epoch is a fresh permutation cut into ceil(size / batch_size) batches, the last one short. The batches depend
    on (size, batch_size, gen) only: more steps leave the first ones as they were.

    Args:
        size: samples of the client, >= 1.
        batch_size: samples per step, >= 1; None is the full batch (in order, no draw).
        steps: number of steps, >= 0.
        gen: generator of (seed, round, client, purpose); the full batch needs none.

    Returns:
        positions [steps, batch_size] int64 in 0..size-1; -1 pads short batches.

    >>> from fedloom.seeds import generator
    >>> plan(3, 2, 3, generator(0)).shape
    torch.Size([3, 2])
    """
    assert min(size, batch_size or 1) >= 1, (size, batch_size)
    if batch_size is None:
        return torch.arange(size).repeat(steps, 1)
    assert gen is not None
    per_epoch = math.ceil(size / batch_size)
    epochs = math.ceil(steps / per_epoch)
    slots = per_epoch * batch_size
    if epochs == 1 and slots == size:
        return torch.randperm(size, generator=gen).view(per_epoch, batch_size)[:steps]
    out = torch.full((epochs, slots), -1, dtype=torch.int64)
    for row in out:
        torch.randperm(size, generator=gen, out=row[:size])
    return out.view(epochs * per_epoch, batch_size)[:steps]
