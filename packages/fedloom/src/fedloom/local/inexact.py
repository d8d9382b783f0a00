"""Inexact solution of an ADMM local problem, which ends once a relative criterion holds.

One of the solvers is gradient descent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.local.descend import descend
from fedloom.local.iterate import iterate
from fedloom.local.rows import each_client
from fedloom.local.svrg import SolverRows, full_direction, iterate_solver, svrg, svrg_without_refresh

if TYPE_CHECKING:
    from fedloom.local.descend import Pull
    from fedloom.local.svrg import Until
    from fedloom.local.work import Work

Solver = Literal["svrg", "gd", "sgd", "released"]
"""Name of a solver: SVRG, gradient descent, the run's local SGD, or `svrg_without_refresh` ("released").

The last solver ignores the proximal terms and the shift.
"""


class DescentResult(NamedTuple):
    """Clients' last points ``w [m, d]`` and numbers of ``steps [m, 1]``.

    ``met [m, 1]`` is True for clients that satisfy the stopping rule.
    """

    w: Tensor
    steps: Tensor
    met: Tensor


def gradient_descent(
    w: Tensor,
    work: Work,
    pull: Sequence[Pull] = (),
    shift: Tensor | None = None,
    steps: Tensor | int | None = None,
    lr: float | None = None,
    until: Until | None = None,
) -> DescentResult:
    """Minimize L(w) = f_i(w) + sum mu/2 ||w - x||^2 + <shift, w> by gradient descent ``w <- w - lr grad L(w)``.

    Args:
        w: starting point, ``[d]`` or ``[m, d]``.
        work: the clients' local problems. Each step computes a full gradient, and another one is computed at the end.
        pull: proximal terms (mu, x).
        shift: vector ``[d]`` or ``[m, d]``.
        steps: maximum number of steps, ``[m, 1]`` or a scalar. If None, the round's number of steps.
        lr: step size. If None, the round's step size is used.
        until: stopping rule that is checked after each step.

    Returns:
        Each client's last point and number of steps, and whether the stopping rule holds.
    """
    rate = work.lr if lr is None else lr

    def step(rows: SolverRows, work: Work) -> SolverRows:
        work.count_steps()
        w = rows.w.sub(rows.direction, alpha=rate)
        return rows._replace(w=w, direction=full_direction(w, work, rows.mu, rows.steady), done=rows.done + 1)

    return DescentResult(*iterate_solver(step, w, work, pull, shift, steps, until))


def inexact(
    w: Tensor, work: Work, pull: tuple[float, Tensor], shift: Tensor, solver: Solver, smooth: float, r: float,
    most: int, inner: int | None = None, lr: float | None = None,
) -> DescentResult:  # fmt: skip
    """Minimize L(w) = f_i(w) + beta/2 ||w - y||^2 + <shift, w> approximately, starting at ``w``.

    The solvers "svrg" and "gd" stop when ||grad L(w')|| <= sqrt(r) (beta - L)/(beta + L) ||grad L(w)||. If the
    gradients of f_i have a Lipschitz constant L < beta, this implies ||w' - w*||^2 <= r ||w - w*||^2 for the minimizer
    w*, because (beta - L) ||x - w*|| <= ||grad L(x)|| <= (beta + L) ||x - w*||. If L >= beta, this does not follow, so
    the bound is set to zero and all iterations are run. "sgd" repeats the round's local steps until the criterion
    holds. With one iteration, "sgd" is the same as `descend`, which checks no criterion.

    Args:
        w: starting points ``[m, d]``.
        work: the clients' local problems.
        pull: proximal term (beta, y).
        shift: vectors ``[m, d]`` of the linear term.
        solver: SVRG, gradient descent, or the run's local SGD.
        smooth: Lipschitz constant L of the gradients of f_i.
        r: tolerance, at least 0. With 0, all iterations are run.
        most: for clients that train in the round, the maximum number of SVRG's outer iterations, steps of gradient
            descent, or repetitions of the round's SGD.
        inner: number of steps in each outer iteration (see `svrg`).
        lr: step size. If None, 1/(8 beta) in SVRG, 1/beta in gradient descent, and the round's step size in SGD.

    Returns:
        Each client's last point and number of iterations (steps for "gd" and "sgd"), and whether the criterion holds.
    """
    beta, limit = pull[0], most * (work.steps > 0)
    bound = r * (max(beta - smooth, 0.0) / (beta + smooth)) ** 2

    def met(now: Tensor, start: Tensor) -> Tensor:
        return now.square().sum(1, keepdim=True) <= bound * start.square().sum(1, keepdim=True)

    if solver == "svrg":
        return DescentResult(*svrg(w, work, (pull,), shift, limit, inner, lr or 1 / (8 * beta), met))
    if solver == "gd":
        return gradient_descent(w, work, (pull,), shift, limit, lr or 1 / beta, met)
    if solver == "released":
        return DescentResult(svrg_without_refresh(w, work, lr), work.steps, work.steps < 0)
    if most == 1:
        return DescentResult(descend(w, work, (pull,), shift, lr=lr), work.steps, work.steps < 0)
    end = _run_passes(w, work, pull, shift, limit, met, lr)
    return DescentResult(end.w, end.done * work.steps, end.met)


def below(method: object, beta: float | None, smooth: float) -> list[str]:
    """Return a warning if a given beta is at most L, because the criterion of `inexact` then guarantees nothing."""
    if not beta or beta > smooth:
        return []
    return [
        f"{type(method).__name__} may not converge: beta must be greater than L, got beta = {beta:g} and L = "
        f"{smooth:.3g}. The criterion guarantees nothing in this case, so all local iterations are run"
    ]


class _PassRows(NamedTuple):
    w: Tensor
    start: Tensor
    done: Tensor
    met: Tensor
    y: Tensor
    shift: Tensor


def _run_passes(
    w: Tensor, work: Work, pull: tuple[float, Tensor], shift: Tensor, limit: Tensor, met: Until, lr: float | None
) -> _PassRows:
    """Repeat the round's local steps until the criterion holds."""
    beta, m = pull[0], work.m

    def slope(rows: _PassRows, work: Work) -> Tensor:
        return work.add_full_grad_(torch.add(rows.shift, rows.w - rows.y, alpha=beta), rows.w)

    def run_pass(rows: _PassRows, work: Work) -> _PassRows:
        stream = ("local", work.k) if work.k else "local"
        new = rows._replace(
            w=descend(rows.w, work, ((beta, rows.y),), rows.shift, stream=stream, lr=lr), done=rows.done + 1
        )
        return new._replace(met=met(slope(new, work), rows.start))

    zero = torch.zeros(m, 1, dtype=torch.long, device=w.device)
    first = _PassRows(w, torch.zeros_like(w), zero, zero > 0, each_client(pull[1], m), each_client(shift, m))
    first = first._replace(start=slope(first, work))
    return iterate(run_pass, first, work, limit, batches=0, until=lambda rows, _work: rows.met)


class LyapunovParts(NamedTuple):
    """Gradient of f_i at y ``[m, d]``, and the client's part of FIAELT's function H_t, ``energy [m, 1]``."""

    gradient: Tensor
    energy: Tensor


def lyapunov_parts(x: Tensor, work: Work, pull: tuple[Tensor, Tensor], z: Tensor, moved: Tensor) -> LyapunovParts:
    """Compute the client's part of FIAELT's diagnostics, with (beta, y) = ``pull``.

    ``moved`` is the result of `lyapunov_step`.
    """
    alpha = work.weight.to(x)
    return LyapunovParts(alpha * work.full_grad(pull[1]), alpha * (augmented_lagrangian(x, work, pull, z) + moved))


def augmented_lagrangian(x: Tensor, work: Work, pull: tuple[Tensor, Tensor], z: Tensor) -> Tensor:
    """Return f_i(x) + <z, x - y> + beta/2 ||x - y||^2 and the weight decay, ``[m, 1]``, with (beta, y) = ``pull``."""
    beta, y = pull
    gap = x - y
    terms = gap * z + beta / 2 * gap.square() + work.local.weight_decay / 2 * x.square()
    return work.loss(x) + terms.sum(1, keepdim=True)


def lyapunov_step(dx: Tensor, dz: Tensor, beta: float, smooth: float, tau: float, r: float) -> Tensor:
    """Compute the term of the last changes ``[m, 1]`` in inexact ADMM's Lyapunov function (FIAELT, Proposition 5)."""
    upsilon = (2 * beta**2 + 4 * smooth**2) / (tau * beta) * 4 * r / (1 - 2 * r)
    return ((1 - tau) / tau**2 / beta * dz.square() + upsilon * dx.square()).sum(1, keepdim=True)
