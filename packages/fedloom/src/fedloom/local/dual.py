"""Client side of ADMM on the Moreau envelope (FLAME): epochs with dual updates, a tolerance, and residuals."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedloom.local.iterate import iterate

if TYPE_CHECKING:
    from fedloom.local.batches import Batch
    from fedloom.local.work import Work


class Primal(NamedTuple):
    """Primal variables theta and w and dual variable pi, ``[m, d]`` each."""

    theta: Tensor
    w: Tensor
    pi: Tensor


class _DualEpochRows(NamedTuple):
    theta: Tensor
    w: Tensor
    pi: Tensor
    velocity: Tensor


def epochs_with_dual(theta: Tensor, w: Tensor, pi: Tensor, x: Tensor, work: Work, lam: float, rho: float) -> Primal:
    """Run local SGD on f_i(theta) + lam/2 ||theta - w||^2, and update w and pi after each epoch.

    With the client's weight a_i, the updates are w <- (lam a_i theta + rho x - pi)/(lam a_i + rho), and then ``pi <- pi
    + rho (w - x)``. Momentum carries over between epochs. The last epoch may be incomplete.

    Args:
        theta: starting point of each client ``[m, d]``.
        w: prox center of the first epoch ``[m, d]``.
        pi: dual variable of the constraint w = x ``[m, d]``.
        x: received model ``[d]``.
        work: the clients' local problems.
        lam: weight of the squared distance to w.
        rho: penalty of the constraint w = x.

    Returns:
        The variables after the round's steps. They are unchanged for clients that take no step.
    """

    def step(r: _DualEpochRows, work: Work, batch: Batch) -> _DualEpochRows:
        velocity = work.local.momentum * r.velocity + work.grad(r.theta, batch) + lam * (r.theta - r.w)
        theta, ends, pull = r.theta - work.lr * velocity, work.ends("epoch"), lam * work.weight
        w = (pull * theta + rho * x - r.pi) / (pull + rho)
        pi = torch.where(ends, r.pi + rho * (w - x), r.pi)
        return _DualEpochRows(theta, torch.where(ends, w, r.w), pi, velocity)

    return Primal(*iterate(step, _DualEpochRows(theta, w, pi, torch.zeros_like(theta)), work)[:3])


class _ToleranceRows(NamedTuple):
    theta: Tensor
    g: Tensor
    w: Tensor
    eps: Tensor


def descend_to_tolerance(theta: Tensor, w: Tensor, eps: Tensor, work: Work, lam: float, most: int) -> Tensor:
    """Run gradient descent on f_i + lam/2 ||theta - w||^2 until the gradient is small (FLAME, Eq. 17).

    Args:
        theta: starting point of each client ``[m, d]``.
        w: prox center ``[m, d]``.
        eps: upper bound on the squared norm of the gradient, times the client's weight ``[m, 1]``.
        work: the clients' local problems.
        lam: weight of the squared distance to w.
        most: maximum number of steps.
    """

    def step(s: _ToleranceRows, work: Work) -> _ToleranceRows:
        work.count_steps()
        theta = s.theta - work.lr * s.g
        return s._replace(theta=theta, g=work.full_grad(theta) + lam * (theta - s.w))

    def close(s: _ToleranceRows, work: Work) -> Tensor:
        return _squared_norms(work.weight * s.g) <= s.eps

    start = _ToleranceRows(theta, work.full_grad(theta) + lam * (theta - w), w, eps)
    steps = most * ((work.steps > 0) & ~close(start, work))
    return iterate(step, start, work, steps, batches=0, until=close).theta


class Residuals(NamedTuple):
    """Each client's term of the augmented Lagrangian, and its squared primal and dual residuals, ``[m, 1]`` each."""

    lagrangian: Tensor
    primal: Tensor
    dual: Tensor


def residuals_of(
    theta: Tensor, w: Tensor, pi: Tensor, x: Tensor, work: Work, lam: float, rho: float
) -> Residuals:  # fmt: skip
    """Compute the terms of the augmented Lagrangian (FLAME, Eq. 10), and the residuals."""
    gap, share = w - x, work.weight
    decay = work.local.weight_decay / 2 * _squared_norms(theta)
    envelope = work.loss(theta) + decay + lam / 2 * _squared_norms(theta - w)
    lagrangian = share * envelope + (pi * gap).sum(1, keepdim=True) + rho / 2 * _squared_norms(gap)
    return Residuals(lagrangian, _squared_norms(gap), _squared_norms(share * work.full_grad(theta) + pi))


def _squared_norms(rows: Tensor) -> Tensor:
    return rows.square().sum(1, keepdim=True)
