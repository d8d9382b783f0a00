"""descend: local SGD whose direction is declared, so that an oracle can fuse it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedloom.local.iterate import iterate
from fedloom.local.rows import each_client, per_client

if TYPE_CHECKING:
    from fedloom.local.plan import Batch
    from fedloom.local.work import Work
    from fedloom.rows.prox import Prox
    from fedloom.seeds import Purpose

Pull = tuple[float | Tensor, Tensor]
"""(mu, x): the term mu/2 ||w - x||^2; mu a number or ``[m, 1]``, x ``[d]`` or ``[m, d]``."""


class _Rows(NamedTuple):
    w: Tensor
    velocity: Tensor | None
    pulled: Tensor | None
    steady: Tensor | None
    mask: Tensor | None
    centre: Tensor | None


def descend(
    w: Tensor,
    work: Work,
    pull: Sequence[Pull] = (),
    shift: Tensor | None = None,
    prox: tuple[Prox, Tensor | None] | None = None,
    mask: Tensor | None = None,
    steps: Tensor | int | None = None,
    stream: Purpose = "local",
    lr: float | None = None,
) -> Tensor:
    """Local SGD on f_i(w) + sum mu/2 ||w - x||^2 + <shift, w>, started at ``w``.

    A step is ``w <- w - lr (g(w) + sum mu (w - x) + shift)``, with momentum, decay and clipping as `Local` says, then
    ``w <- centre + prox_{lr f}(w - centre)`` if a prox is given.

    Args:
        w: ``[d]`` or ``[m, d]``, where every client starts; not modified.
        work: the local problems.
        pull: pairs (mu, x).
        shift: ``[d]`` or ``[m, d]``, added to the gradient.
        prox: (f, centre); centre None is zero.
        mask: bool ``[d]`` or ``[m, d]``: only these coordinates move.
        steps: ``[m, 1]`` or one number; the steps of the round when None.
        stream: equal names mean equal batches.
        lr: step size; the step size of the round when None.

    Returns:
        ``[m, d]``. A problem that can be solved exactly (`Quadratic` with ``solve=True``) is.
    """
    m, local = work.m, work.local
    rate = work.lr if lr is None else lr
    w = each_client(w, m)
    constant = all(isinstance(mu, int | float) for mu, _ in pull)
    pulled: float | Tensor = local.weight_decay + sum((mu for mu, _ in pull), 0.0)
    if not constant:
        pulled = per_client(pulled, m, w)
    steady = _steady(pull, shift, w)
    if work.oracle.minimise is not None and prox is None:
        best = work.oracle.minimise(
            w, work.ids, per_client(pulled, m, w), None if steady is None else each_client(steady, m), mask
        )
        return torch.where(per_client(work.steps if steps is None else steps, m, w) > 0, best, w)
    whole = local.clip is None and mask is None
    in_place = whole and not local.momentum
    if in_place and steady is not None:
        steady = -rate * steady
    rows = _Rows(
        w.clone(memory_format=torch.contiguous_format),
        torch.zeros_like(w, memory_format=torch.contiguous_format) if local.momentum else None,
        None if isinstance(pulled, float) else pulled,
        None if steady is None else each_client(steady, m),
        None if mask is None else each_client(mask, m),
        None if prox is None or prox[1] is None else each_client(prox[1], m),
    )

    def step(rows: _Rows, work: Work, batch: Batch) -> _Rows:
        w, factor = rows.w, pulled if rows.pulled is None else rows.pulled
        if in_place:
            work.addgrad_(w, w, batch, 1 - rate * factor, -rate, rows.steady)
        else:
            w.sub_(direction(rows, work, batch, factor), alpha=rate)
        if prox is not None:
            centre = 0.0 if rows.centre is None else rows.centre
            moved = prox[0].prox(w - centre, rate, work.layout) + centre
            w.copy_(moved if rows.mask is None else torch.where(rows.mask, moved, w))
        return rows

    def direction(rows: _Rows, work: Work, batch: Batch, factor: float | Tensor) -> Tensor:
        if whole and rows.velocity is not None:
            work.addgrad_(rows.velocity, rows.w, batch, local.momentum, 1.0)
            return _declared_(rows.velocity, rows, factor)
        g = _declared_(work.clipped(rows.w, batch), rows, factor)
        if rows.mask is not None:
            g.mul_(rows.mask)
        return g if rows.velocity is None else rows.velocity.mul_(local.momentum).add_(g)

    return iterate(step, rows, work, steps, stream=stream).w


def _declared_(g: Tensor, rows: _Rows, factor: float | Tensor) -> Tensor:
    """``g`` with decay, pulls and shift added in place."""
    if isinstance(factor, Tensor):
        g.addcmul_(rows.w, factor)
    elif factor:
        g.add_(rows.w, alpha=factor)
    return g if rows.steady is None else g.add_(rows.steady)


def _steady(pull: Sequence[Pull], shift: Tensor | None, w: Tensor) -> Tensor | None:
    """shift - sum mu x: the part of the direction that does not change, ``[d]`` where it is the same for all."""
    total = shift
    for mu, x in pull:
        if isinstance(mu, Tensor):
            mu = per_client(mu, len(w), w)
        elif mu == 0:
            continue
        total = -mu * x if total is None else total - mu * x
    return total
