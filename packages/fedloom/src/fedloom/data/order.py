"""Order in which a client uses its samples for training steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fedloom.seeds import Purpose, generator, states


def plan_batches(size: int, batch_size: int | None, steps: int, gen: torch.Generator | None) -> Tensor:
    """Return the positions of the samples in one client's batches.

    Each epoch is a new permutation that is divided into ceil(size / batch_size) batches. The last batch of an epoch may
    be shorter. The batches depend only on (size, batch_size, gen), so the first batches remain the same if the number
    of steps is larger.

    Args:
        size: number of the client's samples, at least 1.
        batch_size: number of samples per step, at least 1. If None, each batch contains all samples, in order.
        steps: number of steps, at least 0.
        gen: random generator that belongs to (seed, round, client, purpose). Full-batch training needs no generator.

    Returns:
        Positions [steps, batch_size] (int64) from 0 to size - 1. Short batches are padded with -1.

    >>> from fedloom.seeds import generator
    >>> plan_batches(3, 2, 3, generator(0)).shape
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
"""Number of samples from which PyTorch uses a different permutation algorithm."""


@cache
def matches_torch() -> bool:
    """Return True if `plan_many_batches` permutes as PyTorch does, even beyond the words that a generator stores."""
    size, one = 700, torch.tensor([1])
    return torch.equal(
        plan_many_batches(size * one, size, one, 0, 0, [0], "")[0], plan_batches(size, size, 1, generator(0, 0, 0, ""))
    )


def plan_many_batches(
    sizes: Tensor, batch_size: int, steps: Tensor, seed: int, round: int, clients: Sequence[int], purpose: Purpose
) -> Tensor:
    """Return the batches of many clients, drawn by a compiled loop: each client's `plan_batches`, padded to one width.

    The result is valid only if `matches_torch` is True and every client has fewer than `MAX_PERMUTATION_SAMPLES`
    samples.

    Args:
        sizes: number of samples of each client ``[m]``, at least 1.
        batch_size: number of samples per step, at least 1.
        steps: number of steps of each client ``[m]``.
        seed: seed that identifies the random generators, together with the next three arguments.
        round: number of the round.
        clients: ids of the clients.
        purpose: purpose of the random numbers.

    Returns:
        Positions ``[most steps, m, b]``, where b is at most ``batch_size``, with -1 as padding.
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
