"""epochs_with_dual: local SGD whose prox centre and dual move after every epoch (FLAME's public code)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedloom.local.iterate import iterate

if TYPE_CHECKING:
    from fedloom.local.batches import Batch
    from fedloom.local.work import Work


class Primal(NamedTuple):
    """theta, w, pi ``[m, d]``."""

    theta: Tensor
    w: Tensor
    pi: Tensor


class _Rows(NamedTuple):
    theta: Tensor
    w: Tensor
    pi: Tensor
    velocity: Tensor


def epochs_with_dual(theta: Tensor, w: Tensor, pi: Tensor, x: Tensor, work: Work, lam: float, rho: float) -> Primal:
    """Local SGD on f_i(theta) + lam/2 ||theta - w||^2, after each epoch of which w and pi move.

    With a_i the client's share, they move to w <- (lam a_i theta + rho x - pi)/(lam a_i + rho), then
    pi <- pi + rho (w - x). Momentum goes on from one epoch to the next; the last epoch may be cut short.

    Args:
        theta: ``[m, d]``, where every client starts.
        w: ``[m, d]`` prox centre of the first epoch.
        pi: ``[m, d]`` dual of w = x.
        x: ``[d]`` the received model.
        work: the local problems.
        lam: weight of the distance to w.
        rho: penalty.

    Returns:
        All three after the round's steps; as they were for a client that takes none.
    """

    def step(r: _Rows, work: Work, batch: Batch) -> _Rows:
        velocity = work.local.momentum * r.velocity + work.grad(r.theta, batch) + lam * (r.theta - r.w)
        theta, ends, pull = r.theta - work.lr * velocity, work.ends("epoch"), lam * work.weight
        w = (pull * theta + rho * x - r.pi) / (pull + rho)
        pi = torch.where(ends, r.pi + rho * (w - x), r.pi)
        return _Rows(theta, torch.where(ends, w, r.w), pi, velocity)

    return Primal(*iterate(step, _Rows(theta, w, pi, torch.zeros_like(theta)), work)[:3])
