"""gradient_descent: full gradient steps with a stop rule on directions already computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedloom.local.iterate import iterate
from fedloom.local.rows import each_client, per_client

if TYPE_CHECKING:
    from fedloom.local.descend import Pull
    from fedloom.local.svrg import Until
    from fedloom.local.work import Work


class DescentResult(NamedTuple):
    """Where every client ended ``w [m, d]``, and the steps it took ``steps [m, 1]``."""

    w: Tensor
    steps: Tensor


class _Rows(NamedTuple):
    w: Tensor
    direction: Tensor
    start: Tensor
    done: Tensor
    mu: Tensor
    steady: Tensor


def gradient_descent(
    w: Tensor,
    work: Work,
    pull: Sequence[Pull] = (),
    shift: Tensor | None = None,
    steps: Tensor | int | None = None,
    lr: float | None = None,
    until: Until | None = None,
) -> DescentResult:
    """``w <- w - lr grad L(w)`` on L(w) = f_i(w) + sum mu/2 ||w - x||^2 + <shift, w>, started at ``w``.

    Args:
        w: ``[d]`` or ``[m, d]``.
        work: the local problems; a full gradient per step, and one more.
        pull: pairs (mu, x).
        shift: ``[d]`` or ``[m, d]``.
        steps: most steps, ``[m, 1]`` or one number; the steps of the round when None.
        lr: step size; the step size of the round when None.
        until: stop rule, checked after each step.

    Returns:
        The last point and the number of steps of each client.
    """
    m, rate = work.m, work.lr if lr is None else lr
    w = each_client(w, m)
    mu = sum((per_client(k, m, w) for k, _ in pull), torch.zeros_like(w[:, :1]))
    steady = torch.zeros_like(w) if shift is None else each_client(shift, m)
    for k, x in pull:
        steady = steady - per_client(k, m, w) * x

    def direction(w: Tensor, work: Work, mu: Tensor, steady: Tensor) -> Tensor:
        return work.add_full_grad_(torch.addcmul(steady, w, mu), w)

    def step(rows: _Rows, work: Work) -> _Rows:
        w = rows.w.sub_(rows.direction, alpha=rate)
        return rows._replace(direction=direction(w, work, rows.mu, rows.steady), done=rows.done + 1)

    first = direction(w, work, mu, steady)
    done = torch.zeros(m, 1, dtype=torch.long, device=w.device)
    rows = _Rows(w.clone(memory_format=torch.contiguous_format), first, first, done, mu, steady)
    stop = None if until is None else (lambda rows, _work: until(rows.direction, rows.start))
    end = iterate(step, rows, work, steps, batches=0, until=stop)
    return DescentResult(end.w, end.done)
