"""SVRG, Option II: what it is when the minibatch is all data, where it starts, what it counts, when it stops."""

from __future__ import annotations

from typing import Any

import handwritten
import pytest
import torch
from engine_cases import CASES, TOLERANCE, M, Problem, make_work
from torch import Tensor

from fedloom.local import LocalSGD, Work, svrg
from fedloom.local.oracles import Quadratic
from fedloom.local.svrg import svrg_without_refresh
from fedloom.seeds import generator

LR = 0.2


class Objective:
    """f_i(w) + 0.4/2 ||w - x||^2 + mu_i/2 ||w - rows_i||^2 + <shift, w> with decay 0.1, by hand.

    With ``diagonal``, the first strength is |x_j| for coordinate j.
    """

    def __init__(self, diagonal: bool = False) -> None:
        self.problem = Problem(CASES["mlp"])
        self.mu: Any = 0.4 * self.problem.x.abs() if diagonal else 0.4
        self.shift = 0.3 * self.problem.x
        self.terms: dict[str, Any] = {
            "pull": ((self.mu, self.problem.x), (self.problem.mu, self.problem.rows)),
            "shift": self.shift,
        }

    def work(self, ids: list[int] | None = None, **local: Any) -> Work:
        return make_work(
            self.problem.oracle("compiled"), LocalSGD(lr=LR, weight_decay=0.1, **local), ids, seed=3, round=2
        )

    def sampled(self, w: Tensor, i: int, where: Tensor | None = None) -> Tensor:
        x, y = handwritten.samples(self.problem.fed, i)
        where = torch.arange(len(x)) if where is None else where
        return handwritten.gradient_at(self.problem.module, x[where], y[where], w, decay=0.1)

    def declared(self, w: Tensor, i: int) -> Tensor:
        p = self.problem
        return self.mu * (w - p.x) + p.mu[i] * (w - p.rows[i]) + self.shift

    def by_hand(self, w: Tensor, i: int, outer: int, inner: int | None, batch_size: int | str) -> Tensor:
        size = handwritten.SIZES[i]
        count = max(handwritten.steps_of(size, batch_size, 1), 2) if inner is None else inner
        snapshot = w
        for k in range(outer):
            full = self.sampled(snapshot, i) + self.declared(snapshot, i)
            pick = int(torch.randint(count, (1,), generator=generator(3, 2, i, ("svrg", k, "option II"))))
            path = [snapshot]
            for where in handwritten.positions(size, batch_size, count, i, ("svrg", k), seed=3, round=2):
                v = path[-1]
                change = self.sampled(v, i, where) - self.sampled(snapshot, i, where)
                path.append(v - LR * (change + self.declared(v, i) - self.declared(snapshot, i) + full))
            snapshot = path[pick]
        return snapshot


@pytest.mark.parametrize("batch_size", [1, 6, 20, "full"])
@pytest.mark.parametrize("inner", [None, 1, 5])
@pytest.mark.parametrize("diagonal", [False, True])
def test_svrg_is_the_papers_box(diagonal: bool, batch_size: int | str, inner: int | None) -> None:
    objective = Objective(diagonal)
    order = [3, 0, 2, 1]
    start = objective.problem.start
    terms = {
        **objective.terms,
        "pull": ((objective.mu, objective.problem.x), (objective.problem.mu[order], objective.problem.rows[order])),
    }
    result = svrg(start[order], objective.work(order, batch_size=batch_size), **terms, outer=3, inner=inner)
    for k, i in enumerate(order):
        expected = objective.by_hand(start[i], i, 3, inner, batch_size)
        torch.testing.assert_close(result.w[k], expected, **TOLERANCE)
    assert result.outer.tolist() == [[3]] * M


def test_with_all_data_in_the_batch_it_is_gradient_descent() -> None:
    objective, inner = Objective(), 6
    moved = 0
    for seed in range(6):
        work = make_work(
            objective.problem.oracle("compiled"), LocalSGD(lr=LR, weight_decay=0.1, batch_size="full"), seed=seed
        )
        got = svrg(objective.problem.start, work, **objective.terms, outer=1, inner=inner).w
        for i in range(M):
            path = [objective.problem.start[i]]
            for _ in range(inner - 1):
                w = path[-1]
                path.append(w - LR * (objective.sampled(w, i) + objective.declared(w, i)))
            gaps = torch.stack([(got[i] - w).abs().max() for w in path])
            assert gaps.min() < 1e-10
            moved += int(gaps.argmin())
    assert moved > 0


def test_the_first_step_from_a_snapshot_is_the_full_gradient() -> None:
    """With two inner steps the next snapshot is the old one, or one full gradient step from it, whatever the batch."""
    objective = Objective()
    start = objective.problem.start
    seen = set()
    for seed in range(8):
        work = make_work(
            objective.problem.oracle("compiled"), LocalSGD(lr=LR, weight_decay=0.1, batch_size=3), seed=seed
        )
        got = svrg(start, work, **objective.terms, outer=1, inner=2).w
        for i in range(M):
            step = start[i] - LR * (objective.sampled(start[i], i) + objective.declared(start[i], i))
            gaps = [(got[i] - start[i]).abs().max().item(), (got[i] - step).abs().max().item()]
            assert min(gaps) < 1e-10
            seen.add(gaps.index(min(gaps)))
    assert seen == {0, 1}


def test_the_choice_of_option_two_is_uniform() -> None:
    oracle = Quadratic(torch.eye(1, dtype=torch.float64).expand(200, 1, 1), torch.zeros(200, 1, dtype=torch.float64))
    work = Work(oracle, torch.arange(200), torch.full((200, 1), 0.005), LocalSGD(lr=0.5))
    got = svrg(torch.ones(1, dtype=torch.float64), work, outer=1, inner=4).w[:, 0]  # w_k = 2^-k
    counts = [int((got == 0.5**k).sum()) for k in range(4)]
    assert sum(counts) == 200
    assert all(abs(c - 50) < 4 * 6.2 for c in counts)  # four standard deviations


def quadratic(n: int = 3, d: int = 4) -> Quadratic:
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(n, d, d, generator=g, dtype=torch.float64)).Q
    spectrum = 0.5 + torch.rand(n, d, generator=g, dtype=torch.float64)
    return Quadratic(
        basis @ (spectrum[:, :, None] * basis.mT),
        torch.randn(n, d, generator=g, dtype=torch.float64),
        torch.tensor([3, 9, 40]),
    )


def test_it_solves_the_problem_with_pulls_and_shift() -> None:
    oracle = quadratic()
    mu, x = torch.tensor([[0.2], [1.0], [0.5]], dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    shift = torch.arange(12, dtype=torch.float64).view(3, 4) / 10
    work = Work(oracle, torch.arange(3), torch.full((3, 1), 1 / 3), LocalSGD(lr=0.4))
    w = svrg(torch.zeros(4, dtype=torch.float64), work, pull=((mu, x),), shift=shift, outer=150, inner=5).w
    direction = work.full_grad(w) + mu * (w - x) + shift
    assert direction.abs().max() < 1e-12
    again = svrg(w, work, pull=((mu, x),), shift=shift, outer=2, inner=5).w
    torch.testing.assert_close(again, w, **TOLERANCE)


def test_until_compares_directions_and_stops_single_clients() -> None:
    oracle = quadratic()
    shift = torch.ones(4, dtype=torch.float64)
    work = Work(oracle, torch.tensor([2, 0, 1]), torch.full((3, 1), 1 / 3), LocalSGD(lr=0.3))
    start = torch.full((3, 4), 5.0, dtype=torch.float64)
    first = work.full_grad(start) + shift
    calls: list[int] = []

    def until(now: Tensor, then: Tensor) -> Tensor:
        calls.append(len(now))
        if len(calls) == 1:
            torch.testing.assert_close(then, first, **TOLERANCE)
        return now.norm(dim=1, keepdim=True) <= 0.1 * then.norm(dim=1, keepdim=True)

    before = work.counts.backward.clone()
    result = svrg(start, work, shift=shift, outer=60, inner=4, until=until)
    ended = work.full_grad(result.w) + shift
    assert (ended.norm(dim=1) <= 0.1 * first.norm(dim=1)).all()
    assert len(set(result.outer[:, 0].tolist())) > 1
    assert calls[0] == 3
    assert len(calls) == int(result.outer.max()) + 1  # once more at the end, on directions that are there
    sizes = torch.tensor([40, 3, 9])
    spent = work.counts.backward - before - sizes
    outer = result.outer[:, 0].tolist()
    drawn = [[int(torch.randint(4, (1,), generator=g)) for g in work.rng(("svrg", k, "option II"))] for k in range(60)]
    steps = torch.tensor([sum(drawn[k][i] for k in range(count)) for i, count in enumerate(outer)])
    assert torch.equal(spent, sizes * (1 + result.outer[:, 0]) + 2 * torch.tensor([20, 3, 9]) * steps)


def test_outer_iterations_may_differ_between_clients() -> None:
    objective = Objective()
    outer = torch.tensor([[2], [0], [3], [1]])
    result = svrg(objective.problem.start, objective.work(batch_size=6), **objective.terms, outer=outer)
    assert torch.equal(result.outer, outer)
    for i, count in enumerate(outer[:, 0].tolist()):
        expected = objective.by_hand(objective.problem.start[i], i, count, None, 6)
        torch.testing.assert_close(result.w[i], expected, **TOLERANCE)


@pytest.mark.parametrize("local", [{"epochs": 3, "batch_size": 6}, {"epochs": 2, "batch_size": "full"}, {"steps": 0}])
def test_without_refresh_every_step_of_the_round_uses_the_gradients_at_the_start(local: dict[str, Any]) -> None:
    """The released code of FIAELT: a full step first, then epochs of random length, of which the last iterate stays."""
    objective, order = Objective(), [3, 0, 2, 1]
    start = objective.problem.start
    ended = svrg_without_refresh(start[order], objective.work(order, **local))
    for k, i in enumerate(order):
        v = start[i]
        full, w = objective.sampled(v, i), v
        if local.get("steps") != 0:
            each = handwritten.steps_of(handwritten.SIZES[i], local["batch_size"], 1)
            draws = torch.randint(1, each + 1, (local["epochs"],), generator=generator(3, 2, i, ("svrg", "lengths")))
            w = v - LR * full
            count = int(draws.sum())
            for where in handwritten.positions(handwritten.SIZES[i], local["batch_size"], count, i, "svrg", 3, 2):
                w = w - LR * (objective.sampled(w, i, where) - objective.sampled(v, i, where) + full)
        torch.testing.assert_close(ended[k], w, **TOLERANCE)
