"""Order the samples of a client's steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fedloom.seeds import Purpose, generator, states


def plan(size: int, batch_size: int | None, steps: int, gen: torch.Generator | None) -> Tensor:
    """Positions of the batches of one client.

    Every epoch is a fresh permutation cut into ceil(size / batch_size) batches, the last one short. The batches depend
    on (size, batch_size, gen) only: more steps leave the first ones as they were.

    Args:
        size: samples of the client, >= 1.
        batch_size: samples per step, >= 1. None is the full batch (in order, no draw).
        steps: number of steps, >= 0.
        gen: generator of (seed, round, client, purpose). The full batch needs none.

    Returns:
        positions [steps, batch_size] int64 in 0..size-1. -1 pads short batches.

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


MAX_PERMUTATION_SAMPLES = 1 << 27
"""Samples from which PyTorch draws an order otherwise."""


@cache
def matches_torch() -> bool:
    """Return whether `plans` draws as the PyTorch at hand does: beyond the words that a generator holds, too."""
    size, one = 700, torch.tensor([1])
    return torch.equal(plans(size * one, size, one, 0, 0, [0], "")[0], plan(size, size, 1, generator(0, 0, 0, "")))


def plans(
    sizes: Tensor, batch_size: int, steps: Tensor, seed: int, round: int, clients: Sequence[int], purpose: Purpose
) -> Tensor:
    """Draw the batches of many clients in one compiled loop: each client's `plan`, as narrow as the largest client.

    True where `matches_torch`, and no client has `MAX_PERMUTATION_SAMPLES` samples.

    Args:
        sizes: samples ``[m]`` of the clients, >= 1.
        batch_size: samples per step, >= 1.
        steps: ``[m]`` numbers of steps.
        seed: names the generators with the next three.
        round: of the run.
        clients: their ids.
        purpose: of the draws.

    Returns:
        positions ``[most steps, m, b]``, b at most ``batch_size``. -1 pads.
    """
    from fedloom import kernels

    largest, per_epoch = int(sizes.max()), -(-sizes // batch_size)
    draws = int((-(-steps // per_epoch) * (sizes - 1)).max())
    out = torch.full((int(steps.max()), len(clients), min(batch_size, largest)), -1)
    room = torch.empty(largest, dtype=torch.int64)
    kernels.shuffle(
        states(seed, round, clients, purpose, draws),
        sizes.contiguous().numpy(), steps.contiguous().numpy(), room.numpy(), out.numpy(),
    )  # fmt: skip
    return out
