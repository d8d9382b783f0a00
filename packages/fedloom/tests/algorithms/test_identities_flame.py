"""FLAME: what its duals, messages and limits are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from method_rows import gradient_mapping
from short_runs import PARTIAL, SEEDS, equal
from torch import Tensor

from fedloom.algorithms import FLAME, PFedMe
from fedloom.errors import Refused
from fedloom.local import LocalSGD
from fedloom.rows.proxes import L1, Nuclear, Prox
from fedloom.testing import Problem, ReferenceState, federate, locate_difference
from fedloom.testing.federate import ReferenceFederation

SGD = LocalSGD(lr=0.1, batch_size=2)


def run(algorithm: FLAME, p: Problem, rounds: int = 5, **options: Any) -> list[ReferenceState]:
    return federate(algorithm, p, rounds, **{"local": SGD, "noise": 0.5, **options})


@SEEDS
@pytest.mark.parametrize("rho", [0.1, 1.0])
def test_dual_is_the_weighted_distance_for_any_inexact_theta(seed: int, rho: float) -> None:
    p = Problem.random(seed, weights="samples")
    for state in run(FLAME(lam=1.7, rho=rho), p, cohorts=PARTIAL)[1:]:
        equal(state.rows.pi, p.alpha * 1.7 * (state.rows.theta - state.rows.w))


@SEEDS
def test_server_has_the_mean_of_all_messages(seed: int) -> None:
    p = Problem.random(seed, weights="samples")
    lost = [(), (3,), (), (4,), ()]
    for state in run(FLAME(rho=0.3), p, cohorts=PARTIAL, dropped=lost):
        equal(state.server.x, (state.rows.w + state.rows.pi / 0.3).mean(0))
        equal(state.kept.u, state.rows.w + state.rows.pi / 0.3)


@SEEDS
def test_recursion_of_the_global_model_with_everyone(seed: int) -> None:
    p = Problem.random(seed)
    for before, after in pairwise(run(FLAME(rho=0.3), p)):
        want = 2 * after.rows.w.mean(0) - before.server.x + before.rows.pi.mean(0) / 0.3
        equal(after.server.x, want)


@SEEDS
def test_exact_round_is_the_step_on_the_gradient_of_the_envelope(seed: int) -> None:
    """Theta is the proximal point of the client's own w; w_i steps along alpha grad + rho (w_i - w) + pi."""
    p, lam, rho = Problem.random(seed, weights="samples"), 1.7, 0.3
    for before, after in pairwise(run(FLAME(lam=lam, rho=rho), p, solve=True)):
        _, w, pi, _ = before.rows
        equal(after.rows.theta, p.proximal(lam, w))
        push = p.alpha * p.gradient(after.rows.theta) + rho * (w - before.server.x) + pi
        equal(after.rows.w, w - push / (lam * p.alpha + rho))


@SEEDS
def test_theta_starts_where_it_was(seed: int) -> None:
    p = Problem.random(seed)
    steps = torch.tensor([[SGD.batches(size)] for size in p.sizes.tolist()])
    for before, after in pairwise(run(FLAME(lam=1.7), p, noise=0.0)):
        equal(after.rows.theta, p.descent(before.rows.theta, steps, 0.1, 1.7, before.rows.w))


def flat(seed: int, *, same: bool) -> tuple[Problem, Tensor]:
    """f_i = b_i/2 ||theta - theta_i||^2 from zero, with b [n, 1]."""
    p = Problem.random(seed)
    b = (
        torch.full((5, 1), 1.3, dtype=torch.float64)
        if same
        else 0.5 + torch.arange(5, dtype=torch.float64)[:, None] / 2
    )
    eye = torch.eye(p.d, dtype=torch.float64)
    return replace(p, hessian=b[:, :, None] * eye, x0=torch.zeros_like(p.x0)), b


@SEEDS
@pytest.mark.parametrize("same", [True, False])
def test_first_round_in_closed_form(seed: int, same: bool) -> None:
    p, b = flat(seed, same=same)
    lam, rho, alpha = 1.7, 0.3, 1 / 5
    (after,) = run(FLAME(lam=lam, rho=rho), p, 1, solve=True)[1:]
    equal(after.kept.u, 2 * lam * alpha / (lam * alpha + rho) * b / (b + lam) * p.minimiser)


@SEEDS
@pytest.mark.parametrize("same", [True, False])
def test_limit_in_closed_form(seed: int, same: bool) -> None:
    p, b = flat(seed, same=same)
    lam = 1.7
    end = run(FLAME(lam=lam, rho=0.2), p, 250, solve=True)[-1]
    w = (b * p.minimiser / (b + lam)).sum(0) / (b / (b + lam)).sum(0)
    equal(end.server.x, w, 1e-10)
    equal(end.rows.theta, (b * p.minimiser + lam * w) / (b + lam), 1e-10)
    if same:
        equal(w, p.minimiser.mean(0))


@pytest.mark.parametrize("lam", [0.3, 3.0])
def test_limit_with_partial_cohorts_is_the_moreau_minimiser(lam: float) -> None:
    p = Problem.random(1, weights="samples")
    cohorts = [[(t + k) % 5 for k in range(3)] for t in range(500)]
    end = run(FLAME(lam=lam, rho=0.1), p, 500, solve=True, cohorts=cohorts)[-1]
    best = p.moreau(lam)
    equal(end.server.x, best.w, 1e-9)
    equal(end.rows.theta, best.theta, 1e-9)
    equal(p.gradient(end.rows.theta) + lam * (end.rows.theta - end.server.x), torch.zeros_like(best.theta), 1e-8)
    equal(end.server.x, (p.alpha * end.rows.theta).sum(0), 1e-9)
    equal(end.rows.pi.sum(0), torch.zeros_like(best.w), 1e-9)


@pytest.mark.parametrize("lam", [0.3, 30.0, 1e4])
@pytest.mark.parametrize("solve", [True, False])
def test_the_moreau_minimiser_is_left_alone_for_every_lambda(lam: float, solve: bool) -> None:
    p, rho = Problem.random(1, weights="samples"), 0.2
    best = p.moreau(lam)
    w, pi = best.w.expand(p.n, -1), p.alpha * lam * (best.theta - best.w)
    state = run(FLAME(), p, 0)[0]
    state = state._replace(
        server=state.server._replace(x=best.w),
        rows=state.rows._replace(theta=best.theta, w=w, pi=pi),
        kept=state.kept._replace(u=w + pi / rho),
    )
    local = LocalSGD(lr=0.1 / lam, batch_size=2)
    end = run(FLAME(lam=lam, rho=rho), p, 3, local=local, noise=0.0, solve=solve, cohorts=PARTIAL, start=state)[-1]
    assert locate_difference(end.parts(), state.parts(), 1e-11) is None


def test_large_lambda_has_the_consensus_problems_optimum_but_moves_slowly() -> None:
    """The limit's distance to the optimum falls like 1/lam, and so does a round's step: iterates have no limit."""
    p = Problem.random(1)
    far = [torch.linalg.vector_norm(p.moreau(lam).w - p.consensus()) for lam in (1.0, 10.0, 100.0, 1e4)]
    assert all(b < 0.5 * a for a, b in pairwise(far))
    assert 50 < far[2] / far[3] < 200
    moved = [torch.linalg.vector_norm(run(FLAME(lam=lam), p, 1, solve=True)[-1].rows.w - p.x0) for lam in (1e4, 1e6)]
    assert 95 < moved[0] / moved[1] < 105


@SEEDS
def test_without_penalty_the_global_model_is_the_mean_of_thetas_in_the_first_round(seed: int) -> None:
    p = Problem.random(seed)
    (after,) = run(FLAME(rho=1e-12), p, 1)[1:]
    equal(after.rows.w, after.rows.theta, 1e-9)


@SEEDS
def test_a_client_without_weight_follows_the_server(seed: int) -> None:
    p = Problem.random(seed)
    state = run(FLAME(lam=1.0, rho=0.3), p)[-1]
    fed = ReferenceFederation(p.oracle(noise=0.5), torch.zeros_like(p.alpha), SGD)
    down = FLAME().down(state.server, None, fed.ctx(6, range(p.n)))
    _, rows = FLAME(lam=1.0, rho=0.3).client(down, state.rows, fed.work(6, range(p.n)))
    equal(rows.w, state.server.x - state.rows.pi / 0.3)


# --- the convergence theory


def admitted(lam: float, rho: float, alpha: float, smooth: float) -> bool:
    """The three conditions of Lemma 1 and Theorem 1, for a client with the share alpha."""
    a = lam * alpha
    return (
        a**2 * (1 + rho) / rho**2 < (a + rho) / 2
        and rho >= a
        and (1 - rho**2) / rho**2 * a**2 > (smooth * alpha + rho) / 2
    )


FLAT, LAM, RHO = 0.05, 0.21, 0.147
"""A smoothness, lambda and rho that meet Lemma 1 with five clients of equal share: the data have to be this flat."""


def flat_problem(seed: int) -> Problem:
    p = Problem.random(seed)
    largest = torch.linalg.eigvalsh(p.hessian)[:, -1].max()
    return replace(p, hessian=FLAT * p.hessian / largest)


def lagrangian(p: Problem, rows: Any, w: Tensor) -> Tensor:
    """L(P) of Eq. 10 at Theta, W, Pi and a global model, in sums over clients."""
    total = torch.zeros((), dtype=w.dtype)
    for i in range(p.n):
        theta, wi, pi = rows.theta[i], rows.w[i], rows.pi[i]
        gap = theta - p.minimiser[i]
        f = 0.5 * gap @ p.hessian[i] @ gap + LAM / 2 * (theta - wi).square().sum()
        total = total + p.alpha[i, 0] * f + pi @ (wi - w) + RHO / 2 * (wi - w).square().sum()
    return total


@SEEDS
@pytest.mark.parametrize("eps0", [None, 1e-3])
def test_lemma_1_the_lyapunov_function_falls(seed: int, eps0: float | None) -> None:
    """L~ = L + sum iota_i eps_i falls by D_1 times the squared steps; w is the one that the round began with."""
    p, alpha, shrink = flat_problem(seed), 0.2, 0.5
    assert admitted(LAM, RHO, alpha, FLAT)
    assert not admitted(LAM, 2 * RHO, alpha, FLAT)
    a = LAM * alpha
    iota = alpha**2 / (((1 / RHO**2 - 1) * a**2 - (FLAT * alpha + RHO) / 2) * (1 - shrink))
    least = min(RHO / 2, (a + RHO) / 2 - a**2 * (1 + RHO) / RHO**2)
    assert iota > 0
    assert least > 0
    method = FLAME(lam=LAM, rho=RHO, eps0=eps0, shrink=shrink)
    states = run(method, p, 30, solve=eps0 is None, noise=0.0, local=LocalSGD(lr=1.0))
    points = [(after.rows, before.server.x) for before, after in pairwise(states)]
    values = [lagrangian(p, rows, w) + iota * rows.eps.sum() for rows, w in points]
    for (old, w0), (new, w1), before, after in zip(points, points[1:], values, values[1:], strict=False):
        steps = p.n * (w1 - w0).square().sum() + (new.w - old.w).square().sum() + (new.theta - old.theta).square().sum()
        assert before - after >= least * steps - 1e-12
        assert steps > 0


@SEEDS
def test_the_recorded_lagrangian_and_residuals_are_their_definitions_and_vanish(seed: int) -> None:
    p = flat_problem(seed)
    method, fed = FLAME(lam=LAM, rho=RHO, residuals=True), ReferenceFederation(p.oracle(), p.alpha, SGD)
    figures = []
    for state in run(method, p, 60, solve=True, noise=0.0)[1:]:
        ctx = fed.ctx(state.round, range(p.n))
        parts = method.observe(method.down(state.server, None, ctx), state.rows, fed.work(state.round, range(p.n)))
        assert parts is not None
        figures.append(method.diagnostics(state.server, type(parts)(*(part.sum(0) for part in parts)), ctx))
        equal(torch.tensor(figures[-1]["lagrangian"], dtype=p.x0.dtype), lagrangian(p, state.rows, state.server.x))
    push = p.alpha * p.gradient(state.rows.theta) + state.rows.pi
    assert figures[-1]["dual_residual"] == pytest.approx(float(push.norm()), abs=1e-12)
    assert figures[-1]["primal_residual"] == pytest.approx(float((state.rows.w - state.server.x).norm()), abs=1e-12)
    for name in ("primal_residual", "dual_residual"):
        assert figures[-1][name] < 0.5 * figures[0][name] or figures[0][name] < 1e-12
    assert FLAME().diagnostics(state.server, None, ctx) == {}


@SEEDS
@pytest.mark.parametrize("rho", [0.1, 0.7])
def test_pfedme_is_flame_without_duals(seed: int, rho: float) -> None:
    """Sec. IV-E: pi = 0 leaves w_i = w - eta lam (w - theta_i) with eta lam = lam alpha/(lam alpha + rho)."""
    p, lam = Problem.random(seed), 1.7
    alpha = 1 / p.n
    flame = FLAME(lam=lam, rho=rho, centre="received", dual="none")
    pfedme = PFedMe(lam=lam, eta=alpha / (lam * alpha + rho), inner=1, theta="kept", moves="round")
    local = LocalSGD(lr=0.1, batch_size=2, epochs=2)
    for one, other in zip(run(flame, p, local=local), federate(pfedme, p, 5, local=local, noise=0.5), strict=True):
        equal(one.server.x, other.server.x)
        equal(one.rows.theta, other.rows.theta)
        assert not one.rows.pi.any()


# --- with a regulariser on the global model


@pytest.mark.parametrize("g", [L1(c=0.15), Nuclear(c=0.2)], ids=lambda g: type(g).__name__)
def test_limit_with_a_regulariser_is_stationary(g: Prox) -> None:
    """w_i = w, pi_i = lambda alpha_i (theta_i - w), and their sum is in dg(w): 0 is in sum grad F_i(w) + dg(w)."""
    p, lam = Problem.random(1, weights="samples"), 1.3
    end = run(FLAME(lam=lam, rho=0.3, regulariser=g), p, 400, solve=True, cohorts=PARTIAL * 80)[-1]
    layout = ReferenceFederation(p.oracle(), p.alpha, SGD).ctx(0, range(p.n)).layout
    w, (theta, own, pi, _) = end.server.x, end.rows
    equal(own, w.expand_as(own), 1e-8)
    equal(pi, lam * p.alpha * (theta - w), 1e-8)
    equal(p.gradient(theta) + lam * (theta - w), torch.zeros_like(theta), 1e-8)
    assert float(gradient_mapping(g, w, -pi.sum(0), 1.0, layout)) < 1e-8
    assert float(pi.sum(0).norm()) > 0.05  # g acts
    if isinstance(g, L1):
        zero = w == 0
        assert 0 < int(zero.sum()) < len(w)
        assert bool((pi.sum(0)[zero].abs() <= 0.15 + 1e-12).all())


def test_limit_with_l1_is_that_of_proximal_gradients_on_the_envelopes() -> None:
    p, lam, c = Problem.random(2, weights="samples"), 0.9, 0.1
    end = run(FLAME(lam=lam, rho=0.3, regulariser=L1(c=c)), p, 400, solve=True)[-1]
    inverse = torch.linalg.inv(p.hessian + lam * torch.eye(p.d, dtype=p.x0.dtype))
    w = p.x0
    for _ in range(4000):
        theta = torch.einsum("nij,nj->ni", inverse, torch.einsum("nij,nj->ni", p.hessian, p.minimiser) + lam * w)
        w = w - (p.alpha * lam * (w - theta)).sum(0)
        w = w.sign() * (w.abs() - c).clamp(min=0)
    equal(end.server.x, w, 1e-8)


def test_without_weight_a_regulariser_changes_nothing() -> None:
    p = Problem.random(0)
    bare, none = (run(FLAME(lam=1.0, rho=0.3, regulariser=g), p)[-1] for g in (None, L1(c=0.0)))
    assert torch.equal(bare.server.x, none.server.x)
    assert torch.equal(bare.rows.theta, none.rows.theta)


@SEEDS
def test_the_criterion_ends_the_theta_step_where_it_says(seed: int) -> None:
    """||theta - theta*||^2 <= r ||theta_0 - theta*||^2, theta* = prox_{f_i/lambda}(w_i)."""
    p = Problem.random(seed)
    smooth = float(torch.linalg.eigvalsh(p.hessian).max())
    lam, r = 2 * smooth, 0.05
    method = FLAME(lam=lam, rho=0.3, solver="criterion", smooth=smooth, r=r)
    before, after = run(method, p, 4, noise=0.0)[-2:]
    best = torch.linalg.solve(
        p.hessian + lam * torch.eye(p.d, dtype=p.x0.dtype),
        torch.einsum("nij,nj->ni", p.hessian, p.minimiser) + lam * before.rows.w,
    )
    left, was = ((rows.theta - best).square().sum(1) for rows in (after.rows, before.rows))
    assert bool((left <= r * was).all())
    assert bool((left > 0).all())


@SEEDS
def test_eq_12_meets_fiaelt_s_criterion_where_rho_is_large(seed: int) -> None:
    """With theta exact, ||w_new - w*||^2 <= r ||w_old - w*||^2: w* minimises F_i + <pi, .> + rho/2 ||. - x||^2."""
    p, lam, r = Problem.random(seed), 1.7, 0.1
    bound = lam * float(p.alpha.max())  # of the smoothness of the F_i, which are convex here
    rho, eye = bound * (3 + 2 / r**0.5), torch.eye(p.d, dtype=p.x0.dtype)
    before, after = run(FLAME(lam=lam, rho=rho), p, 3, solve=True)[-2:]
    x, (_, old, pi, _), new = before.server.x, before.rows, after.rows.w
    a = p.alpha[:, :, None] * lam * torch.linalg.solve(p.hessian + lam * eye, p.hessian)
    best = torch.linalg.solve(a + rho * eye, torch.einsum("nij,nj->ni", a, p.minimiser) - pi + rho * x)
    assert bool(((new - best).square().sum(1) <= r * (old - best).square().sum(1)).all())


def test_the_criterion_refuses_what_it_cannot_bound() -> None:
    p = Problem.random(0)
    ctx = ReferenceFederation(p.oracle(), p.alpha, SGD).ctx(0, range(p.n))
    with pytest.raises(Refused, match="needs lam > smooth"):
        FLAME(lam=1.0, rho=0.1, solver="criterion", smooth=2.0).check(ctx.layout, ctx)
    FLAME(lam=1.0, rho=0.1, solver="criterion", smooth=0.5).check(ctx.layout, ctx)
