"""The test problems themselves: their optima are optima, their samples have the gradients of their losses."""

from __future__ import annotations

import pytest
import torch
from short_runs import SEEDS, equal
from torch import Tensor

from fedloom.algorithms import FLAME, FedAvg
from fedloom.choose import SamplesWeigher
from fedloom.local import LocalSGD
from fedloom.testing import TOY_LAYOUT, Problem, federate, locate_difference
from fedloom.testing.federate import ReferenceFederation
from fedloom.testing.problems import Penalty


@SEEDS
def test_optima_are_stationary(seed: int) -> None:
    p = Problem.random(seed, weights="samples")
    equal((p.alpha * p.gradient(p.consensus())).sum(0), torch.zeros(7, dtype=torch.float64))
    w, theta = p.moreau(1.3)
    equal(p.gradient(theta) + 1.3 * (theta - w), torch.zeros_like(theta))
    equal((p.alpha * theta).sum(0), w)
    x, steps = p.drifted(p.sizes[:, None], 0.1, 0.4), p.sizes[:, None]
    ends = []
    for i in range(p.n):
        v = x
        for _ in range(int(steps[i])):
            v = v - 0.1 * (p.hessian[i] @ (v - p.minimiser[i]) + 0.4 * (v - x))
        ends.append(p.alpha[i] * v)
    equal(torch.stack(ends).sum(0), x)


@SEEDS
@pytest.mark.parametrize("strength", [0.1, 1.0])
def test_composite_optima_have_the_gradient_in_the_subdifferential(seed: int, strength: float) -> None:
    p = Problem.random(seed, weights="samples")
    x = p.composite("l1", strength)
    g = -(p.alpha * p.gradient(x)).sum(0) / strength
    equal(g[x != 0], x[x != 0].sign(), 1e-11)
    assert (g.abs() <= 1 + 1e-11).all()
    x = p.composite("nuclear", strength)
    g = -(p.alpha * p.gradient(x)).sum(0) / strength
    matrices = TOY_LAYOUT.matrices(g)
    for name, matrix in TOY_LAYOUT.matrices(
        x
    ).items():  # largest singular value at most 1, inner product the nuclear norm
        assert torch.linalg.svdvals(matrices[name])[0] <= 1 + 1e-11
        equal((matrices[name] * matrix).sum(), torch.linalg.svdvals(matrix).sum(), 1e-10)
    equal(g[TOY_LAYOUT.mask("head.bias")], torch.zeros(1, dtype=torch.float64), 1e-11)


@pytest.mark.parametrize("penalty", ["l1", "nuclear"])
def test_composite_optima_are_the_lowest(penalty: Penalty) -> None:
    p = Problem.random(4)
    best = p.composite(penalty, 0.7)

    def value(x: Tensor) -> Tensor:
        gap = x - p.minimiser
        loss = 0.5 * torch.einsum("ni,nij,nj->n", gap, p.hessian, gap).mean()
        matrices = TOY_LAYOUT.matrices(x).values()
        return loss + 0.7 * (x.abs().sum() if penalty == "l1" else sum(torch.linalg.svdvals(m).sum() for m in matrices))

    g = torch.Generator().manual_seed(0)
    for size in (1e-3, 0.1, 1.0):
        for _ in range(30):
            assert value(best + size * torch.randn(7, generator=g, dtype=torch.float64)) > value(best)


@SEEDS
def test_samples_have_the_gradients_of_their_losses(seed: int) -> None:
    p = Problem.random(seed)
    work = ReferenceFederation(p.oracle(noise=0.7), p.alpha, LocalSGD(batch_size=3)).work(1, range(p.n))
    w = p.minimiser + 0.5
    equal(work.full_grad(w), p.gradient(w))
    batches = [work.plan("local", work.steps[:, 0]).batch(0)]
    for batch in batches:
        free = w.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(work.oracle.batch_loss(free, batch).sum(), free)
        equal(work.grad(w, batch), gradient)
        assert (gradient - p.gradient(w)).abs().max() > 0.1


def test_pooled_moved_and_cast() -> None:
    p = Problem.random(0, weights="samples")
    x = p.x0
    equal(p.pooled().gradient(x)[0], (p.alpha * p.gradient(x)).sum(0))
    equal(p.shift(torch.ones(7)).gradient(x + 1), p.gradient(x))
    assert p.to(torch.float32).oracle().dtype == torch.float32
    assert len(set(p.sizes.tolist())) > 2


def test_weigher_and_shares_in_the_plain_run() -> None:
    p = Problem.random(0)
    options = {"local": LocalSGD(lr=0.1, steps=1), "cohorts": [(0, 2, 3)]}
    (after,) = federate(FedAvg(), p, 1, weigher=SamplesWeigher(), **options)[1:]
    share = p.sizes[[0, 2, 3], None] / p.sizes[[0, 2, 3]].sum().double()
    equal(after.server.x, p.x0 - 0.1 * (share * p.gradient(p.x0)[[0, 2, 3]]).sum(0))


def test_a_round_without_any_answer_changes_nothing() -> None:
    p = Problem.random(0)
    before, after = federate(FLAME(), p, 2, dropped=[(), (1, 2)], cohorts=[(0, 1), (1, 2)])[1:]
    assert after.round == 2
    assert locate_difference(after.parts(), before.parts()) is None
