"""A single in-place SGD step for methods that have their own loop instead of using `descend`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fedloom.local.batches import Batch
    from fedloom.local.work import Work


def step_(
    w: Tensor,
    work: Work,
    batch: Batch,
    lr: float | Tensor,
    at: Tensor | None = None,
    keep: float | Tensor = 1.0,
    steady: Tensor | None = None,
) -> Tensor:
    """Compute ``w <- keep w - lr g(at) + steady`` in one pass, where g is `Work.grad` on ``batch``.

    Args:
        w: rows ``[m, d]`` that are changed in place.
        work: the clients' local problems.
        batch: one batch per client.
        lr: step size, a scalar or ``[m, 1]``.
        at: point ``[m, d]`` where the gradient is computed. If None, ``w`` before the step.
        keep: factor of w, a scalar, ``[m, 1]`` or ``[m, d]``.
        steady: vector ``[m, d]`` that is added, or None.

    Returns:
        ``w``.
    """
    at = w if at is None else at
    if work.local.clip is not None:
        move = work.grad(at, batch).mul_(-lr)
        w.mul_(keep).add_(move)
        return w if steady is None else w.add_(steady)
    if isinstance(keep, Tensor) and keep.shape[1] > 1:  # oracles support one factor per client
        rest = w * (keep - 1)
        keep, steady = 1.0, rest if steady is None else rest.add_(steady)
    decay = work.local.weight_decay
    shrunk = None
    if decay and work.oracle.reached is not None:
        shrunk = decay_of(work, at).mul_(lr)
    keep_w = keep - lr * decay if at is w and decay and shrunk is None else keep
    if isinstance(lr, Tensor):
        work.addgrad_(w, at, batch.scaled(lr), keep_w, -1.0, steady)
    else:
        work.addgrad_(w, at, batch, keep_w, -lr, steady)
    if shrunk is not None:
        return w.sub_(shrunk)
    if at is w or not decay:
        return w
    return w.addcmul_(at, lr, value=-decay) if isinstance(lr, Tensor) else w.sub_(at, alpha=lr * decay)


def decay_of(work: Work, w: Tensor) -> Tensor:
    """Return the gradient of the weight decay at ``w``, which is 0 for parameters without a gradient."""
    decay = work.local.weight_decay * w
    reached = work.oracle.reached if work.local.weight_decay else None
    return decay if reached is None else decay.mul_(reached)


def shrink_(work: Work, w: Tensor, lr: float) -> Tensor:
    """Shrink ``w`` in place by a weight decay step of size ``lr``, and return it."""
    factor = 1 - lr * work.local.weight_decay
    reached = work.oracle.reached if work.local.weight_decay else None
    return w.mul_(factor) if reached is None else w.mul_(1 + (factor - 1) * reached)


def where_moved(work: Work, new: Tensor, old: Tensor) -> Tensor:
    """Return rows ``[m, .]`` of ``new`` for clients that take a step in the round, and of ``old`` for the others."""
    moved = work.steps > 0
    return new if bool(moved.all()) else torch.where(moved, new, old)
