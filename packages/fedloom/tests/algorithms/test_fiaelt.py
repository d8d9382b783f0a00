"""FIAELT: criterion (9), the theory's constants, the Lyapunov value, limits with any prox."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedloom as fl
from fedloom.algorithms import FIAELT, FLAME, FedADMMInexact
from fedloom.algorithms.fiaelt import LyapunovParts
from fedloom.choose.weighers import UniformWeigher
from fedloom.engine.checks.refusals import check_together
from fedloom.errors import Refused
from fedloom.local import LocalSGD, Work, svrg
from fedloom.local.inexact import Solver, gradient_descent
from fedloom.local.smoothness import smoothness
from fedloom.rows.proxes import L1, Nuclear, SquaredL2
from fedloom.testing import Problem, federate
from fedloom.testing.federate import ReferenceFederation, ReferenceState
from fedloom.testing.problems import Penalty

SOME = [(0, 1, 2), (2, 3), (0, 4, 3), (1, 2, 4, 0), (3,), (0, 1, 2, 3, 4)]
R = 0.005


def same(a: Tensor, b: Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tol * (1 + float(b.abs().max())))


def largest(p: Problem) -> float:
    return float(torch.linalg.eigvalsh(p.hessian)[:, -1].max())


def figures(
    method: FIAELT, p: Problem, state: ReferenceState, noise: float = 0.0, local: LocalSGD | None = None
) -> dict[str, float]:
    """The record of a round: observed at every client, summed."""
    fed, everyone = ReferenceFederation(p.oracle(noise=noise), p.alpha, local or LocalSGD()), range(p.n)
    ctx = fed.ctx(state.round, everyone)
    seen = method.observe(method.down(state.server, None, ctx), state.rows, fed.work(state.round, everyone))
    return method.diagnostics(state.server, LyapunovParts(*(part.sum(0) for part in seen)), ctx)


def local_solution(p: Problem, before: ReferenceState) -> Tensor:
    """argmin f_i(x) + <x - y, z_i> + beta/2 ||x - y||^2, ``[n, d]``."""
    y, z, beta = before.server.y, before.rows.z, float(before.server.beta)
    right = torch.einsum("nij,nj->ni", p.hessian, p.minimiser) - z + beta * y
    return torch.linalg.solve(p.hessian + beta * torch.eye(p.d, dtype=y.dtype), right)


# ---------------------------------------------------------------------------------------------------------- criterion


@pytest.mark.parametrize("solver", ["svrg", "gd"])
@pytest.mark.parametrize("seed", range(4))
def test_local_solutions_meet_criterion_9(solver: Any, seed: int) -> None:
    """||x_i - x*||^2 <= r ||x_i^t - x*||^2 at every client and round, measured against the exact minimiser."""
    p, noise = Problem.random(seed), 0.5 if solver == "svrg" else 0.0
    method = FIAELT(smooth=largest(p), solver=solver, inner=40)
    for before, after in _pairs(federate(method, p, 6, noise=noise)):
        best = local_solution(p, before)
        left = (after.rows.x - best).square().sum(1) / (before.rows.x - best).square().sum(1)
        assert (left <= R).all()
        assert 1 <= after.server.iterations <= 10


def _pairs(states: list[ReferenceState]) -> list[tuple[ReferenceState, ReferenceState]]:
    return list(itertools.pairwise(states))


def test_svrg_meets_criterion_9_within_nine_outer_iterations() -> None:
    """Corollary 2: beta = 5 L, r = .005, m_i = 200, eta_i = 1/(40 L) give rho_i <= 1/2 and k = log2 300 < 9.

    Prop. 3's proof: the expected value of L_i - L_i* falls by rho_i per outer iteration.
    """
    gained, nine = [], []
    for seed in range(2):
        p = Problem.random(seed, n=8)
        smooth = largest(p)
        fed = ReferenceFederation(p.oracle(noise=1.0), p.alpha, LocalSGD(batch_size=1), seed)
        x, y = 2 * p.x0 + p.minimiser, p.x0
        eye, right = torch.eye(p.d, dtype=x.dtype), torch.einsum("nij,nj->ni", p.hessian, p.minimiser)
        a = p.hessian + 5 * smooth * eye
        best = torch.linalg.solve(a, right + 5 * smooth * y)

        def excess(w: Tensor, best: Tensor = best, a: Tensor = a) -> Tensor:
            return torch.einsum("ni,nij,nj->n", w - best, a, w - best)

        def run(
            outer: int,
            fed: ReferenceFederation = fed,
            x: Tensor = x,
            y: Tensor = y,
            smooth: float = smooth,
            n: int = p.n,
        ) -> Tensor:
            work = fed.work(1, range(n))
            return svrg(x, work, ((5 * smooth, y),), outer=outer, inner=200, lr=1 / (40 * smooth)).w

        one, end = run(1), run(9)
        gained.append(excess(one) / excess(x))
        nine.append((end - best).square().sum(1) / (x - best).square().sum(1))
    assert torch.cat(gained).mean() <= 0.5
    assert torch.cat(nine).mean() <= R


def test_r_zero_takes_all_iterations() -> None:
    p = Problem.random(0)
    for solver in ("svrg", "gd"):
        run = federate(FIAELT(smooth=2.0, r=0.0, solver=solver, iterations=4, inner=5), p, 2)
        assert [float(s.server.iterations) for s in run[1:]] == [4, 4]
    sgd = federate(FIAELT(smooth=2.0, solver="sgd", passes=1), p, 1, local=LocalSGD(lr=0.05, steps=7))
    assert float(sgd[1].server.iterations) == 7


def test_gradient_descent_stops_after_its_own_number_of_steps() -> None:
    p = Problem.random(1)
    work = ReferenceFederation(p.oracle(), p.alpha, LocalSGD(lr=0.3)).work(1, range(p.n))

    def direction(w: Tensor) -> Tensor:
        return p.gradient(w) + 0.7 * (w - p.x0) + 0.1

    w, taken, _ = gradient_descent(
        p.minimiser,
        work,
        ((0.7, p.x0),),
        torch.full_like(p.minimiser, 0.1),
        steps=30,
        until=lambda now, start: now.norm(dim=1, keepdim=True) <= 1e-2 * start.norm(dim=1, keepdim=True),
    )
    assert len(taken.unique()) > 1
    assert taken.max() < 30
    for i, k in enumerate(taken[:, 0].tolist()):
        x, start = p.minimiser, direction(p.minimiser)[i].norm()
        for step in range(k):
            assert step == 0 or direction(x)[i].norm() > 1e-2 * start
            x = x - 0.3 * direction(x)
        assert direction(x)[i].norm() <= 1e-2 * start
        same(w[i], x[i])


@pytest.mark.parametrize("given", [{}, {"smooth": 1.3}])
def test_gradient_descent_until_the_bound_written_out(given: dict[str, float]) -> None:
    """Steps 1/beta until ||grad L_i|| <= sqrt(r) (beta - L)/(beta + L) times the first; L is measured if unknown."""
    p, beta, r = Problem.random(12), 4.0, 0.003
    smooth = given.get("smooth", measured(p))
    before, after = federate(FIAELT(beta=beta, r=r, solver="gd", **given), p, 4)[-2:]
    y, counts = before.server.y, []
    for i in range(p.n):
        x, z, k, first = before.rows.x[i], before.rows.z[i], 0, torch.zeros(())
        while True:
            g = p.hessian[i] @ (x - p.minimiser[i]) + z + beta * (x - y)
            first = first if k else g.norm()
            if k and g.norm() <= r**0.5 * (beta - smooth) / (beta + smooth) * first:
                break
            x, k = x - g / beta, k + 1
        counts.append(k)
        same(after.rows.x[i], x)
    assert float(after.server.iterations) == pytest.approx(sum(counts) / p.n)
    assert len(set(counts)) > 1


def measured(p: Problem) -> float:
    """The largest L of the clients, as the first round of a run measures it."""
    return float(smoothness(p.x0, ReferenceFederation(p.oracle(), p.alpha, LocalSGD()).work(1, range(p.n))).max())


@pytest.mark.parametrize("solver", ["gd", "svrg", "sgd"])
@pytest.mark.parametrize("factor", [0.4, 1.5])
def test_l_is_measured_beside_a_given_beta_and_a_beta_below_it_is_said(solver: Solver, factor: float) -> None:
    p = Problem.random(12)
    method = FIAELT(beta=factor * measured(p), solver=solver, iterations=3, inner=4)
    start, first, second = federate(method, p, 2)
    assert float(start.server.smooth) == 0
    assert float(first.server.smooth) == measured(p)
    assert torch.equal(first.server.y, start.server.y)
    assert (second.server.y - first.server.y).abs().max() > 1e-6
    below = factor < 1
    assert (float(second.server.iterations) == {"sgd": 2, "svrg": 3, "gd": 3}[solver]) or not below
    assert [method.remarks(s.server) != [] for s in (start, first, second)] == [False, below, below]


@pytest.mark.parametrize("options", [{"solver": "sgd", "passes": 1}, {"solver": "gd", "r": 0.0}, {}])
def test_l_is_not_measured_where_the_criterion_is_not_looked_at(options: dict[str, Any]) -> None:
    p = Problem.random(12)
    method = FIAELT(**options, **({"beta": 3.0} if options else {}))
    start, first = federate(
        method.derive_options(ReferenceFederation(p.oracle(), p.alpha, LocalSGD()).ctx(0, range(p.n))), p, 1
    )
    assert (first.server.y - start.server.y).abs().max() > 1e-6


def test_a_run_notes_a_beta_below_the_measured_l_once() -> None:
    fed = fl.partitions.iid(clients=3)(fl.data.load("digits"), seed=0)
    run = fl.simulate(FIAELT(beta=0.01, solver="gd", iterations=2), fed, rounds=3)
    assert sum("beta must be greater than L, got beta = 0.01" in note for note in run.notes) == 1
    run = fl.simulate(FIAELT(beta=1e4, solver="gd", iterations=2), fed, rounds=3)
    assert not any("beta must be greater than L" in note for note in run.notes)


@pytest.mark.parametrize(("lr", "step"), [(None, 1 / 32), (0.05, 0.05)])
def test_svrg_is_called_with_the_theory_s_step(lr: float | None, step: float) -> None:
    p = Problem.random(12)
    method = FIAELT(solver="svrg", beta=4.0, r=0.0, iterations=2, inner=6, lr=lr)
    before, after = federate(method, p, 2, noise=0.5)[-2:]
    fed = ReferenceFederation(p.oracle(noise=0.5), p.alpha, LocalSGD())
    y, z = before.server.y, before.rows.z
    want = svrg(before.rows.x, fed.work(2, range(p.n)), ((4.0, y),), z, outer=2, inner=6, lr=step)
    assert torch.equal(after.rows.x, want.w)


def test_an_epoch_of_one_step_is_two_steps_of_svrg() -> None:
    p = Problem.random(3)
    state = federate(FIAELT(solver="svrg", smooth=largest(p), inner=None), p, 6, local=LocalSGD(batch_size="full"))[-1]
    assert (state.rows.x - p.x0).abs().amax(1).min() > 0


@pytest.mark.parametrize("setting", [{"momentum": 0.5}, {"clip": 1.0}])
@pytest.mark.parametrize(
    "method",
    [FIAELT(solver="gd"), FIAELT(solver="svrg"), FLAME(eps0=0.1), FedADMMInexact()],
    ids=["fiaelt gd", "fiaelt svrg", "flame", "fedadmm-inexact"],
)
def test_full_gradients_take_no_momentum_and_no_clipping(method: Any, setting: dict[str, float]) -> None:
    p = Problem.random(0)
    ctx = ReferenceFederation(p.oracle(), p.alpha, LocalSGD(**setting)).ctx(0, range(p.n))
    with pytest.raises(Refused, match=r"Set local=\{\"momentum\": 0\}"):
        check_together(method, ctx.local, UniformWeigher())
    free = ReferenceFederation(p.oracle(), p.alpha, LocalSGD()).ctx(0, range(p.n))
    check_together(method, free.local, UniformWeigher())
    assert all("without a regularizer" in note for note in method.check(free.layout, free))


def test_a_penalty_below_l_is_said() -> None:
    p = Problem.random(0)
    ctx = ReferenceFederation(p.oracle(), p.alpha, LocalSGD(momentum=0.5)).ctx(0, range(p.n))
    for beta, smooth, said in ((1.0, 3.0, True), (3.0, 3.0, True), (3.1, 3.0, False), (None, 3.0, False)):
        notes = FIAELT(beta=beta, smooth=smooth, solver="sgd").check(ctx.layout, ctx)
        assert any("beta must be greater than L" in note for note in notes) == said


def test_what_travels() -> None:
    """2d + 3 numbers per client in every round, the measuring one included."""
    p = Problem.random(12)
    for method in (FIAELT(), FIAELT(beta=3.0, inner=3), FIAELT(beta=3.0, solver="sgd")):
        state, fed = federate(method, p, 0)[0], ReferenceFederation(p.oracle(), p.alpha, LocalSGD())
        down = method.down(state.server, None, fed.ctx(1, range(p.n)))
        up, _ = method.client(down, state.rows, fed.work(1, range(p.n)))
        assert [tuple(f.shape) for f in up] == [(p.n, p.d)] * 2 + [(p.n, 1)] * 3
        assert [tuple(f.shape) for f in down] == [(p.d,), (1,), (1,)]


# ------------------------------------------------------------------------------------------------------------- L


def test_smoothness_is_the_largest_eigenvalue() -> None:
    spectrum = torch.tensor([0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 4.0], dtype=torch.float64)
    for dtype, tol in ((torch.float64, 1e-8), (torch.float32, 1e-4)):
        p = Problem.random(2)
        basis = torch.linalg.eigh(p.hessian).eigenvectors
        scale = torch.arange(1.0, p.n + 1, dtype=torch.float64)[:, None, None]
        p = replace(p, hessian=scale * basis @ torch.diag(spectrum) @ basis.mT).to(dtype)
        work: Work = ReferenceFederation(p.oracle(), p.alpha, LocalSGD()).work(1, range(p.n))
        found = smoothness(p.x0, work)
        same(found, 4 * scale[:, 0].to(dtype), tol)
        assert (smoothness(p.x0, work, 2) < found).all()
        assert (work.counts.backward == 2 * 22 * p.sizes).all()


def test_smoothness_far_from_the_origin_of_flat_and_of_constant_functions() -> None:
    p = Problem.random(2)
    for scale in (0.0, 0.01):
        q = replace(p, hessian=scale * p.hessian, x0=1e4 * p.x0).to(torch.float32)
        found = smoothness(q.x0, ReferenceFederation(q.oracle(), q.alpha, LocalSGD()).work(1, range(p.n)), 60)
        top = scale * torch.linalg.eigvalsh(p.hessian)[:, -1]
        torch.testing.assert_close(found[:, 0].double(), top, rtol=0.05, atol=1e-12)


def test_without_beta_and_l_the_first_round_measures_them() -> None:
    p = Problem.random(3)
    start, first, second = federate(FIAELT(solver="gd"), p, 2, cohorts=[(1, 3), range(5)])
    assert float(start.server.beta) == 0
    top = torch.linalg.eigvalsh(p.hessian)[:, -1]
    same(first.server.beta, 5 * top[[1, 3]].max()[None], 1e-2)
    assert first.server.beta <= 5 * top[[1, 3]].max() * (1 + 1e-6)
    for name in ("y", "xbar", "zbar"):
        assert torch.equal(getattr(first.server, name), getattr(start.server, name))
    assert all(torch.equal(a, b) for a, b in zip(first.rows, start.rows, strict=True))
    assert (second.server.y - first.server.y).abs().max() > 1e-3
    assert torch.equal(second.server.beta, first.server.beta)


def test_beta_is_five_l_unless_given() -> None:
    p = Problem.random(3)
    for method, beta in (
        (FIAELT(smooth=3.0), 15.0),
        (FIAELT(beta=4.0, passes=1), 4.0),
        (FIAELT(beta=4.0, smooth=3.0), 4.0),
    ):
        assert float(federate(method, p, 0)[0].server.beta) == beta


# -------------------------------------------------------------------------------------------------------- identities


def test_equation_31_with_its_sign_corrected() -> None:
    """Z+ = (1 - tau) Z + tau beta e - tau grad F(X*), e = X+ - X*; the paper prints + tau grad F(X*)."""
    p, tau = Problem.random(4), 0.6
    method = FIAELT(solver="svrg", smooth=2.0, tau=tau, iterations=2, r=0.0, inner=7)
    for before, after in _pairs(federate(method, p, 4, noise=0.5))[1:]:
        best, beta = local_solution(p, before), 10.0
        rest = (1 - tau) * before.rows.z + tau * beta * (after.rows.x - best)
        same(after.rows.z, rest - tau * p.gradient(best))
        assert (after.rows.z - rest - tau * p.gradient(best)).abs().max() > 0.1


def test_duals_are_minus_the_gradients_when_tau_is_1() -> None:
    p = Problem.random(4)
    rows = federate(FIAELT(beta=3.0, tau=1.0, solver="sgd", passes=1), p, 3, solve=True)[-1].rows
    same(rows.z, -p.gradient(rows.x))


def test_server_means_and_y_under_partial_participation() -> None:
    p, g = Problem.random(5), L1(c=0.7)
    method = FIAELT(smooth=2.0, regulariser=g, solver="gd")
    for state in federate(method, p, 6, cohorts=SOME)[1:]:
        y, xbar, zbar, beta, *_ = state.server
        same(xbar, state.rows.x.mean(0))
        same(zbar, state.rows.z.mean(0))
        v, t = xbar + zbar / beta, 0.7 / (float(beta) * p.n)
        same(y, torch.where(v > t, v - t, torch.where(v < -t, v + t, 0.0)))
    state = federate(method.with_(regulariser=None), p, 2)[-1]
    same(state.server.y, state.server.xbar + state.server.zbar / state.server.beta)


# ---------------------------------------------------------------------------------------------------- limits and H_t


@pytest.mark.parametrize(("penalty", "solver"), [("l1", "gd"), ("nuclear", "gd"), ("l1", "svrg")])
def test_limit_is_the_composite_solution(penalty: Penalty, solver: Any) -> None:
    """tau = 1/2; the weight of g in the mean is 1/n of that in the sum. All of them, and with absent clients."""
    p, c = Problem.random(6), 0.3
    g = (L1 if penalty == "l1" else Nuclear)(c=c * p.n)
    best = p.composite(penalty, c)
    method, rounds, cohorts = FIAELT(smooth=largest(p), regulariser=g, solver=solver), 600, lambda t: SOME[t % 6]
    if solver == "svrg":
        method, rounds, cohorts = method.with_(beta=2 * largest(p), tau=0.9, inner=20), 80, None
    end = federate(method, p, rounds, noise=0.5 if solver == "svrg" else 0.0, cohorts=cohorts)[-1]
    same(end.server.y, best)
    same(end.rows.z, -p.gradient(best), 1e-8)
    assert figures(method, p, end)["kkt"] < 1e-7
    if penalty == "l1":
        assert torch.equal(end.server.y == 0, best == 0)
        assert figures(method, p, end)["nonzeros"] == (best != 0).sum()


def test_other_proxes() -> None:
    """g = c ||x||^2 moves the consensus to a closed form."""
    p, c = Problem.random(6), 0.4
    a = p.hessian.sum(0) + 2 * c * torch.eye(p.d, dtype=p.x0.dtype)
    best = torch.linalg.solve(a, torch.einsum("nij,nj->i", p.hessian, p.minimiser))
    method = FIAELT(smooth=largest(p), regulariser=SquaredL2(c=c), solver="gd")
    same(federate(method, p, 250)[-1].server.y, best)


@pytest.mark.parametrize("solver", ["svrg", "gd"])
@pytest.mark.parametrize("regulariser", [None, L1(c=1.0), Nuclear(c=1.0)], ids=["none", "l1", "nuclear"])
def test_lyapunov_value_decreases(solver: Any, regulariser: Any) -> None:
    """Proposition 5: H_{t+1} <= H_t - delta ||X+ - X||^2 - beta/2 ||Y+ - Y||^2 for beta = 5 L, r = .005, tau = .5."""
    for seed in range(2):
        p, noise = Problem.random(seed), 0.5 if solver == "svrg" else 0.0
        smooth = largest(p)
        method = FIAELT(smooth=smooth, regulariser=regulariser, solver=solver, inner=20)
        states = federate(method, p, 15, noise=noise)[1:]
        h = [figures(method, p, s, noise)["lyapunov"] for s in states]
        beta, upsilon = 5 * smooth, 54 * smooth / 2.5 * 4 * R / (1 - 2 * R)
        delta = (beta - smooth) / 4 - 2 * upsilon
        assert delta > 0.1 * smooth
        for (before, after), old, new in zip(_pairs(states), h, h[1:], strict=False):
            step = (after.rows.x - before.rows.x).square().sum() * delta
            step = step + beta / 2 * p.n * (after.server.y - before.server.y).square().sum()
            assert new <= old - float(step) + 1e-11 * (1 + abs(old))
        assert h[0] - h[-1] > 1e-3


@pytest.mark.parametrize("smooth", [1.5, None])
def test_lyapunov_value_is_its_definition(smooth: float | None) -> None:
    p, g = Problem.random(7), L1(c=0.8)
    method = FIAELT(beta=7.0, smooth=smooth, tau=0.6, r=0.01, regulariser=g, solver="gd", iterations=2)
    before, after = federate(method, p, 3, cohorts=[range(5)] * 3)[-2:]
    y, gap = after.server.y, after.rows.x - after.server.y
    h = sum(
        0.5 * (after.rows.x[i] - p.minimiser[i]) @ p.hessian[i] @ (after.rows.x[i] - p.minimiser[i]) for i in range(p.n)
    )
    h = h + 0.8 * y.abs().sum() + (gap * after.rows.z).sum() + 3.5 * gap.square().sum()
    upsilon = (2 * 49 + 4 * (smooth or measured(p)) ** 2) / (0.6 * 7) * 0.04 / 0.98
    h = h + (0.4 / 0.6) / (0.6 * 7) * (after.rows.z - before.rows.z).square().sum()
    h = h + upsilon * (after.rows.x - before.rows.x).square().sum()
    assert figures(method, p, after)["lyapunov"] == pytest.approx(float(h), rel=1e-12)


def test_weight_decay_is_part_of_the_local_problems() -> None:
    p, local = Problem.random(7), LocalSGD(weight_decay=0.3)
    method = FIAELT(smooth=largest(p) + 0.3, solver="gd")
    end = federate(method, p, 200, local=local)[-1]
    a = p.hessian + 0.3 * torch.eye(p.d, dtype=p.x0.dtype)
    best = torch.linalg.solve(a.sum(0), torch.einsum("nij,nj->i", p.hessian, p.minimiser))
    same(end.server.y, best)
    found = figures(method, p, end, local=local)
    assert found["kkt"] < 1e-7
    gap = best - p.minimiser
    value = 0.5 * torch.einsum("ni,nij,nj->", gap, p.hessian, gap) + p.n * 0.15 * best.square().sum()
    assert found["lyapunov"] == pytest.approx(float(value), rel=1e-8)


def test_kkt_residual_bounds_the_distance_to_stationarity() -> None:
    """For l1 the distance of 0 from sum grad f_i(y) + dg(y) is known; without g the two are equal."""
    p, c = Problem.random(8), 2.0
    for regulariser in (None, L1(c=c)):
        method = FIAELT(smooth=largest(p), regulariser=regulariser, solver="gd")
        for state in federate(method, p, 12)[1:]:
            y, g = state.server.y, p.gradient(state.server.y).sum(0)
            if regulariser is None:
                assert figures(method, p, state)["kkt"] == pytest.approx(float(g.norm()), abs=1e-9)
                continue
            exact = torch.where(y != 0, g + c * y.sign(), (g.abs() - c).clamp_min(0)).norm()
            assert figures(method, p, state)["kkt"] >= float(exact) - 1e-12


def test_linear_convergence_with_l1() -> None:
    """On a strongly convex problem the distance falls by a steady factor per round, down to rounding."""
    p, c = Problem.random(9), 0.3
    method = FIAELT(smooth=largest(p), regulariser=L1(c=c * p.n), solver="gd")
    best = p.composite("l1", c)
    gaps = torch.stack([(s.server.y - best).norm() for s in federate(method, p, 150)])
    windows = (gaps[20:141:20] / gaps[:121:20]).tolist()
    assert max(windows) < 0.2  # per 20 rounds
    assert all(0.8 < b / a < 1.5 for a, b in itertools.pairwise(windows))
    assert gaps[140] < 1e-5 * gaps[0]


# ----------------------------------------------------------------------------------------------------- released code


@pytest.mark.parametrize("ignored", [{}, {"beta": 7.0, "tau": 0.5}, {"regulariser": L1(c=3.0)}])
def test_no_dual_penalty_or_prox_enters_a_model_of_the_released_code(ignored: dict[str, Any]) -> None:
    """With one full batch a round it is two steps of gradient descent from the server's model, and their mean."""
    p = Problem.random(3)
    run = federate(FIAELT(solver="released", **ignored), p, 4, local=LocalSGD(lr=0.05, steps=1, batch_size="full"))
    y = run[0].server.y
    for state in run[1:]:
        x = y.expand(p.n, p.d)
        for _ in range(2):
            x = x - 0.05 * p.gradient(x)
        y = (p.alpha * x).sum(0)
        same(state.server.y, y)
