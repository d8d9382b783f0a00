"""Weight decay: of every parameter that a gradient can reach, as optimisers of torch have it.

They leave a parameter without a gradient as it is, such as one of a layer that the forward pass never calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from fedloom.local.work import Work


def add_decay_(work: Work, out: Tensor, w: Tensor) -> Tensor:
    """``out <- out + weight decay at w``, both ``[m, d]`` or ``[d]``; returns ``out``."""
    decay = work.local.weight_decay
    if not decay:
        return out
    reached = work.oracle.reached
    return out.add_(w, alpha=decay) if reached is None else out.addcmul_(w, reached, value=decay)


def decay_of(work: Work, w: Tensor) -> Tensor:
    """Weight decay at ``w``, of its shape."""
    decay = work.local.weight_decay * w
    reached = work.oracle.reached if work.local.weight_decay else None
    return decay if reached is None else decay.mul_(reached)


def shrink_(work: Work, w: Tensor, lr: float) -> Tensor:
    """``w <- w - lr weight decay at w``; returns ``w``."""
    factor = 1 - lr * work.local.weight_decay
    reached = work.oracle.reached if work.local.weight_decay else None
    return w.mul_(factor) if reached is None else w.mul_(1 + (factor - 1) * reached)
