"""Steps in place: what they add up to, against gradients that are formed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import CASES, TOLERANCE, M, Problem, make_work
from torch import Tensor

from fedloom.local import Batch, LocalSGD, Work, descend, step_, where_moved

RATES = torch.arange(1.0, M + 1, dtype=torch.float64)[:, None] / 10


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(CASES["mlp"])


def work_of(problem: Problem, **local: Any) -> Work:
    return make_work(problem.oracle("compiled"), LocalSGD(**{"lr": 0.1, "batch_size": 6, **local}))


def batch_of(work: Work) -> Batch:
    return work.plan("local", work.steps[:, 0]).batch(0)


@pytest.mark.parametrize("local", [{}, {"weight_decay": 0.3}, {"clip": 0.05}, {"clip": 0.05, "weight_decay": 0.3}])
@pytest.mark.parametrize("lr", [0.2, RATES], ids=["one rate", "rates"])
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("steady", [False, True])
def test_a_step_is_keep_w_minus_lr_g_plus_steady(
    problem: Problem, local: dict[str, float], lr: float | Tensor, elsewhere: bool, steady: bool
) -> None:
    work = work_of(problem, **local)
    batch, w = batch_of(work), problem.start.clone()
    at = problem.rows if elsewhere else problem.start
    want = 0.7 * problem.start - lr * work.grad(at, batch) + (problem.rows if steady else 0)
    counted = work.counts.backward.clone()
    got = step_(w, work, batch, lr, at if elsewhere else None, 0.7, problem.rows if steady else None)
    assert got is w
    assert torch.equal(work.counts.backward, 2 * counted)
    torch.testing.assert_close(w, want, **TOLERANCE)
    again = step_(problem.start.clone(), work, batch, lr)
    torch.testing.assert_close(again, problem.start - lr * work.grad(problem.start, batch), **TOLERANCE)


def test_a_rate_of_zero_moves_nothing(problem: Problem) -> None:
    work, w = work_of(problem), problem.start.clone()
    assert torch.equal(step_(w, work, batch_of(work), torch.zeros(M, 1, dtype=torch.float64)), problem.start)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_full_gradient_is_added(problem: Problem, decay: float) -> None:
    work, out = work_of(problem, weight_decay=decay), problem.rows.clone()
    got = work.add_full_grad_(out, problem.start)
    assert got is out
    torch.testing.assert_close(out, problem.rows + work.full_grad(problem.start), **TOLERANCE)


def test_who_takes_no_step_keeps_what_was(problem: Problem) -> None:
    work, new, old = work_of(problem), problem.start, problem.rows
    assert where_moved(work, new, old) is new
    steps = torch.arange(M)[:, None] % 2
    some = make_work(problem.oracle("compiled"), LocalSGD(), steps=steps)
    assert torch.equal(where_moved(some, new, old), torch.stack([new[i] if i % 2 else old[i] for i in range(M)]))


@pytest.mark.parametrize("local", [{}, {"momentum": 0.9}, {"weight_decay": 0.3}, {"clip": 0.05}])
@pytest.mark.parametrize("mask", [None, "d", "md"])
def test_descend_on_scaled_problems_with_masks(problem: Problem, local: dict[str, float], mask: str | None) -> None:
    """Written out: momentum SGD on s f_i + mu/2 ||w - x||^2 + <shift, w>, in which the rest of the model stays."""
    work, mu, scale = work_of(problem, epochs=2, **local), 0.4, 3 * RATES
    where = {None: None, "d": problem.x > 0, "md": problem.rows > 0}[mask]
    options: dict[str, Any] = {"pull": ((mu, problem.x),), "shift": problem.rows}
    got = descend(problem.start, work, mask=where, scale=scale, **options)
    for i in range(M):
        one = work.take(torch.tensor([i]))
        w, velocity = problem.start[i : i + 1].clone(), torch.zeros(1, problem.d, dtype=torch.float64)
        plan = one.plan("local", one.steps[:, 0])
        for k in range(int(one.steps)):
            g = scale[i] * one.grad(w, plan.batch(k)) + mu * (w - problem.x) + problem.rows[i]
            velocity = work.local.momentum * velocity + g
            moves = 1.0 if where is None else where.expand(M, -1)[i]
            w = w - 0.1 * velocity * moves
        torch.testing.assert_close(got[i], w[0], **TOLERANCE)
    if where is not None:
        still = ~where.expand(M, -1)
        assert torch.equal(got[still], problem.start[still])
    if mask == "md":
        ones = (problem.rows > 0).double()
        assert torch.equal(got, descend(problem.start, work, mask=ones, scale=scale, **options))
