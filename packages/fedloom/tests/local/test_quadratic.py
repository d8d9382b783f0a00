"""Quadratic local problems: the exact answers, and what many steps lead to."""

from __future__ import annotations

import pytest
import torch
from engine_cases import TOLERANCE
from torch import Tensor

from fedloom.local import LocalSGD, Work, descend, iterate
from fedloom.local.oracles import Quadratic

N, D = 4, 5
G = torch.Generator().manual_seed(1)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=G, dtype=torch.float64)


ROOT = draw(N, D, D) / 2
HESSIAN = ROOT @ ROOT.mT + 0.3 * torch.eye(D, dtype=torch.float64)
MINIMISER = draw(N, D)
SIZES = torch.tensor([1, 7, 20, 53])
IDS = torch.tensor([3, 1, 0])
START, X, ROWS, MU = draw(3, D), draw(D), draw(3, D), torch.tensor([[0.5], [0.0], [2.0]], dtype=torch.float64)
MASKS = {"none": None, "d": torch.arange(D) % 2 == 0, "md": draw(3, D) > 0}


def work(solve: bool = False, **local: object) -> Work:
    oracle = Quadratic(HESSIAN, MINIMISER, SIZES, solve=solve)
    return Work(oracle, IDS, torch.full((3, 1), 1 / N), LocalSGD(**{"lr": 0.1, **local}))  # type: ignore[arg-type]


def value(w: Tensor, i: int) -> Tensor:
    gap = w - MINIMISER[i]
    return 0.5 * gap @ HESSIAN[i] @ gap


@pytest.mark.parametrize("piece", [1024, 8])
def test_gradient_and_loss_are_those_of_the_formula(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.local.batches.PIECE_SAMPLES", piece)
    at = work(weight_decay=0.2)
    g, loss = at.full_grad(START), at.loss(START)
    for k, i in enumerate(IDS.tolist()):
        w = START[k].clone().requires_grad_()
        f = value(w, i)
        (expected,) = torch.autograd.grad(f, w)
        torch.testing.assert_close(g[k], expected + 0.2 * START[k], **TOLERANCE)
        torch.testing.assert_close(loss[k, 0], f.detach(), **TOLERANCE)
    assert torch.equal(at.counts.backward, SIZES[IDS])


def test_every_batch_has_the_same_gradient() -> None:
    at = work(batch_size=6)
    full = at.full_grad(START)

    def step(w: Tensor, work: Work, batch: object) -> Tensor:
        torch.testing.assert_close(
            work.grad(START[: work.m] if work.m == 3 else START[:1], batch)[0], full[0], **TOLERANCE
        )  # type: ignore[arg-type]
        return w

    iterate(step, START, at)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_exact_minimiser_is_where_many_steps_lead(mask: str, decay: float) -> None:
    arguments = {"pull": ((0.4, X), (MU, ROWS), (ROWS.abs(), X)), "shift": 0.5 * ROWS, "mask": MASKS[mask]}
    best = descend(START, work(solve=True, weight_decay=decay), **arguments)  # type: ignore[arg-type]
    far = descend(START, work(weight_decay=decay), steps=4000, **arguments)  # type: ignore[arg-type]
    torch.testing.assert_close(best, far, **TOLERANCE)
    if mask != "none":
        kept = ~MASKS[mask].expand(3, D)  # type: ignore[union-attr]
        assert torch.equal(best[kept], START[kept])
        assert kept.any()
    plain = descend(START, work(solve=True))
    torch.testing.assert_close(plain, MINIMISER[IDS], **TOLERANCE)


def test_no_steps_no_move() -> None:
    steps = torch.tensor([[0], [3], [0]])
    got = descend(START, work(solve=True), steps=steps)
    torch.testing.assert_close(got, torch.where(steps > 0, MINIMISER[IDS], START), **TOLERANCE)
    assert torch.equal(descend(START, work(solve=True, steps=0)), START)


def test_momentum_and_clipping_act_on_quadratics_too() -> None:
    at = work(momentum=0.6, clip=0.5, weight_decay=0.1, batch_size="full")
    got = descend(START, at, pull=((MU, X),), steps=5)
    for k, i in enumerate(IDS.tolist()):
        w, v = START[k], torch.zeros(D, dtype=torch.float64)
        for _ in range(5):
            g = HESSIAN[i] @ (w - MINIMISER[i])
            g = g * min(1.0, 0.5 / float(g.norm()))
            v = 0.6 * v + g + 0.1 * w + MU[k] * (w - X)
            w = w - 0.1 * v
        torch.testing.assert_close(got[k], w, **TOLERANCE)
