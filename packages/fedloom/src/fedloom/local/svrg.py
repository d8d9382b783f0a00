"""SVRG, the stochastic variance reduced gradient method (Option II)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedloom.local.iterate import iterate
from fedloom.local.rows import each_client, per_coordinate
from fedloom.local.step import step_, where_moved

if TYPE_CHECKING:
    from fedloom.local.batches import Batch
    from fedloom.local.descend import Pull
    from fedloom.local.work import Work
    from fedloom.seeds import Purpose

Until = Callable[[Tensor, Tensor], Tensor]
"""Stopping rule that compares the directions ``[m, d]`` at the snapshot and at the start, and returns bool ``[m,
1]``."""


class SvrgResult(NamedTuple):
    """Clients' last points ``w [m, d]`` and numbers of ``outer [m, 1]`` iterations.

    ``met [m, 1]`` is True for clients that satisfy the stopping rule.
    """

    w: Tensor
    outer: Tensor
    met: Tensor


class SolverRows(NamedTuple):
    """Clients' points ``w [m, d]``, directions at these points and at the start, and iterations ``done [m, 1]``.

    ``mu`` (``[m, 1]`` or ``[m, d]``) and ``steady [m, d]`` are results of `pull_terms`.
    """

    w: Tensor
    direction: Tensor
    start: Tensor
    done: Tensor
    mu: Tensor
    steady: Tensor


class _InnerLoopRows(NamedTuple):
    w: Tensor
    snapshot: Tensor
    keep: Tensor
    steady: Tensor


def svrg(
    w: Tensor, work: Work, pull: Sequence[Pull] = (), shift: Tensor | None = None, outer: Tensor | int = 10,
    inner: int | None = None, lr: float | None = None, until: Until | None = None, stream: Purpose = "svrg",
) -> SvrgResult:  # fmt: skip
    """Minimize L(w) = f_i(w) + sum mu/2 ||w - x||^2 + <shift, w> by SVRG that starts at ``w``.

    An outer iteration computes the full gradient at a snapshot v, and then takes ``inner`` steps ``w <- w - lr (g(w) -
    g(v) + grad L(v) + sum mu (w - v))`` from v. The next snapshot is drawn uniformly from w_0, ..., w_{inner-1} (Option
    II of Johnson and Zhang, NeurIPS 2013), and the iteration ends at the drawn point. The proximal terms and the shift
    are computed exactly rather than sampled.

    Args:
        w: starting point, ``[d]`` or ``[m, d]``.
        work: the clients' local problems.
        pull: proximal terms (mu, x).
        shift: vector ``[d]`` or ``[m, d]``.
        outer: maximum number of outer iterations, ``[m, 1]`` or a scalar.
        inner: number of steps in each outer iteration. If None, one epoch of each client, but at least 2 steps. With 1,
            the point never moves, because the last iterate is never drawn.
        lr: step size. If None, the round's step size is used.
        until: stopping rule that uses full directions (which are computed anyway). It is checked after each outer
            iteration.
        stream: name of the stream of batches.

    Returns:
        Each client's last snapshot and number of outer iterations. ``met`` is False if there is no stopping
        rule.
    """
    rate = work.lr if lr is None else lr

    def sweep(rows: SolverRows, work: Work) -> SolverRows:
        count = work.epochs(1).clamp(min=2) if inner is None else torch.full((work.m, 1), inner)
        draws = zip(count[:, 0].tolist(), work.rng((str(stream), work.k, "option II")), strict=True)
        pick = torch.stack([torch.randint(int(c), (1,), generator=g) for c, g in draws])
        v, shrunk = rows.w, rate * rows.mu
        rest = torch.addcmul(-rate * rows.direction, v, shrunk)
        start = _InnerLoopRows(v.clone(), v, 1 - shrunk, rest)
        snapshot = iterate(step, start, work, pick.to(w.device), stream=(str(stream), work.k)).w
        now = full_direction(snapshot, work, rows.mu, rows.steady)
        return rows._replace(w=snapshot, direction=now, done=rows.done + 1)

    step = _make_variance_reduced_step(rate)
    return SvrgResult(*iterate_solver(sweep, w, work, pull, shift, outer, until))


def svrg_without_refresh(w: Tensor, work: Work, lr: float | None = None, stream: Purpose = "svrg") -> Tensor:
    """Run SVRG on f_i alone with the starting point as the only snapshot v, as in FIAELT's released code.

    It takes a full gradient step from v, and then steps ``w <- w - lr (g(w) - g(v) + grad f_i(v))`` for the epochs of
    the round. The number of steps in each epoch is drawn uniformly from 1 to the number of batches in a pass.

    Args:
        w: starting point, ``[d]`` or ``[m, d]``.
        work: the clients' local problems.
        lr: step size. If None, the round's step size is used.
        stream: name of the stream of batches.

    Returns:
        The last iterate ``[m, d]``.
    """
    rate, v = work.lr if lr is None else lr, each_client(w, work.m)
    steady = -rate * work.add_full_grad_(torch.zeros_like(v), v)
    passes, longest = work.passes()[:, 0].tolist(), work.batches()[:, 0].tolist()
    drawn = zip(passes, longest, work.rng((str(stream), "lengths")), strict=True)
    steps = torch.stack([torch.randint(1, b + 1, (p,), generator=g).sum() for p, b, g in drawn])
    first = _InnerLoopRows(where_moved(work, v + steady, v), v, torch.ones_like(v[:, :1]), steady)
    return iterate(_make_variance_reduced_step(rate), first, work, steps[:, None].to(v.device), stream=stream).w


def _make_variance_reduced_step(rate: float) -> Callable[[_InnerLoopRows, Work, Batch], _InnerLoopRows]:
    """Return a function that takes the step ``w <- keep w - rate (g(w) - g(snapshot)) + steady``."""

    def step(rows: _InnerLoopRows, work: Work, batch: Batch) -> _InnerLoopRows:
        step_(rows.w, work, batch, rate, keep=rows.keep, steady=rows.steady)
        step_(rows.w, work, batch, -rate, at=rows.snapshot)
        return rows

    return step


def iterate_solver(
    step: Callable[[SolverRows, Work], SolverRows],
    w: Tensor,
    work: Work,
    pull: Sequence[Pull],
    shift: Tensor | None,
    most: Tensor | int | None,
    until: Until | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Iterate a solver that starts at ``w``.

    Return each client's last point and number of iterations, and whether the stopping rule holds.
    """
    w = each_client(w, work.m)
    mu, steady = pull_terms(w, pull, shift)
    first = full_direction(w, work, mu, steady)
    rows = SolverRows(w, first, first, torch.zeros(work.m, 1, dtype=torch.long, device=w.device), mu, steady)
    stop = None if until is None else (lambda rows, _work: until(rows.direction, rows.start))
    end = iterate(step, rows, work, most, batches=0, until=stop)
    met = torch.zeros_like(end.done, dtype=torch.bool) if until is None else until(end.direction, end.start)
    return end.w, end.done, met


def pull_terms(w: Tensor, pull: Sequence[Pull], shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return mu and steady of the gradient ``mu w + steady`` of proximal terms and a shift at ``w [m, d]``.

    mu is ``[m, 1]``, or ``[m, d]`` for a separate strength per coordinate.
    """
    m = len(w)
    mu = sum((per_coordinate(k, m, w) for k, _ in pull), torch.zeros_like(w[:, :1]))
    steady = torch.zeros_like(w) if shift is None else each_client(shift, m)
    for k, x in pull:
        steady = steady - per_coordinate(k, m, w) * x
    return mu, steady


def full_direction(w: Tensor, work: Work, mu: Tensor, steady: Tensor) -> Tensor:
    """Compute the gradient over all of each client's samples, plus ``mu w + steady``, ``[m, d]`` (see `pull_terms`)."""
    return work.add_full_grad_(torch.addcmul(steady, w, mu), w)
