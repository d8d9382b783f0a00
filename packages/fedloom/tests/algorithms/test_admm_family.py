"""The ADMM and composite family: equal methods are equal, duals are gradients, limits are the papers' solutions."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_rows import gradient_mapping
from torch import Tensor

from fedloom.algorithms import (
    FIAELT,
    FedADMM,
    FedADMMComposite,
    FedADMMInexact,
    FedAvg,
    FedDR,
    FedDualAvg,
    FedDyn,
    FedMiD,
    FedPD,
    FedSkip,
    FedSLR,
    FedSplit,
    encodings,
)
from fedloom.algorithms._base import Algorithm
from fedloom.choose.weighers import SamplesWeigher
from fedloom.errors import ConfigError
from fedloom.local import LocalSGD
from fedloom.rows.proxes import L1, Nuclear
from fedloom.testing import Problem, federate
from fedloom.testing.federate import ReferenceFederation, ReferenceState
from fedloom.testing.problems import Penalty

SOME = [(0, 1, 2), (2, 3), (0, 4, 3), (1, 2, 4, 0), (3,), (0, 1, 2, 3, 4)]
"""Cohorts of partial participation."""

SGD = LocalSGD(lr=0.07, batch_size=2, epochs=2)
seeds = st.integers(0, 10**6)


def models(method: Algorithm, p: Problem, rounds: int = 6, **options: Any) -> Tensor:
    """Global models ``[rounds + 1, d]``."""
    found = [method.global_model(s.server) for s in federate(method, p, rounds, **options)]
    return torch.stack([x for x in found if x is not None])


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-9 * (1 + float(b.abs().max())))


def last(method: Algorithm, p: Problem, rounds: int = 1, **options: Any) -> ReferenceState:
    return federate(method, p, rounds, **{"solve": True, **options})[-1]


PROXES: dict[Penalty, tuple[type[L1 | Nuclear], str]] = {"l1": (L1, "s+s"), "nuclear": (Nuclear, "lr+s")}


# ------------------------------------------------------------------------------------------------- equal methods


@settings(max_examples=12)
@given(seeds, st.floats(0.2, 5))
def test_family_without_regulariser(seed: int, eta: float) -> None:
    p = Problem.random(seed)
    want = models(FedPD(eta=eta), p, solve=True)
    assert (want[-1] - want[1]).abs().max() > 1e-3
    same(models(FedDyn(alpha=1 / eta), p, solve=True), want)
    same(models(FedDR(eta=eta, alpha=1.0), p, solve=True), want)
    same(models(FedADMM(rho=1 / eta), p, solve=True), want)
    same(models(FedADMMComposite(eta=eta), p, solve=True), want)
    same(models(FIAELT(beta=1 / eta, tau=1.0, solver="sgd", passes=1), p, solve=True), want)
    same(models(FedSLR(eta_g=eta, lam=0.0), p, solve=True), want)


@pytest.mark.parametrize("penalty", PROXES)
@settings(max_examples=12)
@given(seeds, st.floats(0.2, 5), st.floats(0.01, 0.4))
def test_family_with_regulariser(penalty: Penalty, seed: int, eta: float, c: float) -> None:
    """FIAELT minimises the sum, so its regulariser weighs n times that of the others."""
    p, (prox, components) = Problem.random(seed), PROXES[penalty]
    want = models(FedDR(eta=eta, alpha=1.0, regulariser=prox(c=c)), p, solve=True)
    same(models(FedADMMComposite(eta=eta, regulariser=prox(c=c)), p, solve=True), want)
    same(models(FedSLR(eta_g=eta, lam=c, components=components), p, solve=True), want)
    fiaelt = FIAELT(beta=1 / eta, tau=1.0, solver="sgd", passes=1, regulariser=prox(c=p.n * c))
    same(models(fiaelt, p, solve=True), want)


@pytest.mark.parametrize("how", [{"solve": True}, {"noise": 1.0, "local": SGD}], ids=["exact", "sgd"])
def test_family_with_partial_participation(how: dict[str, Any]) -> None:
    """Those that count absent clients with their last message agree with the same local solver, exact or not."""
    p, g = Problem.random(4), L1(c=0.1)
    options: dict[str, Any] = {"cohorts": SOME, **how}
    want = models(FedADMMComposite(eta=0.8, regulariser=g), p, **options)
    same(models(FedDR(eta=0.8, alpha=1.0, regulariser=g, start="own"), p, **options), want)
    fiaelt = FIAELT(beta=1 / 0.8, tau=1.0, solver="sgd", passes=1, regulariser=L1(c=0.1 * p.n))
    same(models(fiaelt, p, **options), want)
    free = models(FedADMMComposite(eta=0.8), p, **options)
    same(models(FedPD(eta=0.8), p, **options), free)
    same(models(FedADMM(rho=1 / 0.8, start="own"), p, **options), free)
    assert (free - want).abs().max() > 1e-3


@settings(max_examples=12)
@given(seeds, st.floats(0.2, 5))
def test_feddr_with_alpha_2_is_fedsplit(seed: int, s: float) -> None:
    p = Problem.random(seed)
    for options in ({}, {"cohorts": SOME}):
        want = models(FedSplit(step=s), p, solve=True, **options)
        same(models(FedDR(eta=s, alpha=2.0), p, solve=True, **options), want)


def test_fedslr_without_penalty_is_feddyn_with_any_solver_and_cohort() -> None:
    p, options = Problem.random(5), {"noise": 1.0, "local": SGD, "cohorts": SOME}
    same(models(FedSLR(eta_g=2.5, lam=0.0), p, **options), models(FedDyn(alpha=0.4), p, **options))


# ---------------------------------------------------------------------------------------------- duals are gradients


@settings(max_examples=12)
@given(seeds, st.floats(0.2, 5))
def test_duals_after_exact_steps_are_minus_the_gradients(seed: int, eta: float) -> None:
    p = Problem.random(seed)
    for method in (FedPD(eta=eta), FedADMMComposite(eta=eta, regulariser=L1(c=0.1))):
        rows = last(method, p, 4).rows
        same(rows.y, -p.gradient(rows.w))
    rows = last(FedADMM(rho=1 / eta), p, 4).rows
    same(rows.y, -p.gradient(rows.u - eta * rows.y))
    rows = last(FedDR(eta=eta, alpha=1.5), p, 4).rows
    same((rows.y - rows.w) / eta, p.gradient(rows.w))


def test_the_server_of_fedadmm_is_the_mean_of_augmented_models() -> None:
    p = Problem.random(6)
    for options, method in (({}, FedADMM(rho=0.7, server_lr=1.0)), ({"cohorts": SOME}, FedADMM(rho=0.7))):
        for state in federate(method, p, 6, solve=True, **options):
            same(state.server.x, state.rows.u.mean(0))


def test_fedadmm_with_few_clients_a_round_needs_its_theorys_server_step() -> None:
    """Every change holds what theta moved by since the client's last round; with a server step of 1 it is added up."""
    p, alone = Problem.random(0), [(t % 5,) for t in range(60)]
    start, by_theory, wild = (
        float((x - p.minimiser.mean(0)).norm())
        for x in (p.x0, *(models(FedADMM(rho=1.0, **o), p, 60, cohorts=alone)[-1] for o in ({}, {"server_lr": 1.0})))
    )
    assert by_theory < start
    assert wild > 1e6 * start


def test_fedadmm_is_the_paper_s_and_not_its_public_code_s() -> None:
    """The public code's theta = 2 mean(w_i) - theta differs by mean(y_i)/rho."""
    p, rho = Problem.random(6), 0.7
    before, after = federate(FedADMM(rho=rho), p, 2, solve=True)[1:]
    w = after.rows.u - after.rows.y / rho
    code = 2 * w.mean(0) - before.server.x
    same(after.server.x - code, before.rows.y.mean(0) / rho)
    assert (after.server.x - code).abs().max() > 0.05


# ------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("penalty", PROXES)
@pytest.mark.parametrize("alpha", [1.0, 1.95])
def test_composite_limits(penalty: Penalty, alpha: float) -> None:
    p, g = Problem.random(7), PROXES[penalty][0](c=0.3)
    best = p.composite(penalty, 0.3)
    assert (best - p.consensus()).abs().max() > 0.05
    x = models(FedDR(eta=1.0, alpha=alpha, regulariser=g), p, 400, solve=True, cohorts=lambda t: SOME[t % 6])[-1]
    same(x, best)
    same(models(FedADMMComposite(eta=1.0, regulariser=g), p, 150, solve=True)[-1], best)
    assert gradient_mapping(g, x, p.gradient(x).mean(0), 0.5, p.layout) < 1e-9
    assert gradient_mapping(g, x + 0.1, p.gradient(x + 0.1).mean(0), 0.5, p.layout) > 1e-2
    away = p.gradient(x + 0.1)
    for t in (0.5, 2.0):
        same(gradient_mapping(None, x + 0.1, away, t, p.layout), away.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("method", [FedPD(eta=1.0), FedSplit(step=1.0), FedADMM(rho=1.0), FedDR(eta=1.0)])
def test_consensus_limits(method: Algorithm) -> None:
    p = Problem.random(8)
    same(models(method, p, 300, solve=True)[-1], p.consensus())


def test_feddualavg_ends_at_the_composite_solution_where_fedmid_does_not() -> None:
    """With one local step: the mean of the dual variables keeps the prox, the mean of the models undoes it."""
    p, local = Problem.random(9), LocalSGD(lr=0.2, steps=1)
    c = next(c for c in (0.4, 0.8, 1.6) if bool((p.composite("l1", c) == 0).any()))  # a solution with zeros
    best = p.composite("l1", c)
    dual = models(FedDualAvg(regulariser=L1(c=c)), p, 500, local=local)[-1]
    same(dual, best)
    assert (dual == 0).sum() == (best == 0).sum() > 0
    x = models(FedMiD(regulariser=L1(c=c)), p, 500, local=local)[-1]
    assert (x - best).abs().max() > 0.01


# ------------------------------------------------------------------------------------- the papers' boxes, written out


def test_fedpd_iterates_without_communication() -> None:
    """Algorithm 1 iteration by iteration; a round is what lies between two communications."""
    p, eta = Problem.random(10), 0.6
    states = federate(FedPD(eta=eta, skip=0.6), p, 6, solve=True)
    x0, y, w = p.x0.expand(p.n, -1), torch.zeros(p.n, p.d, dtype=p.x0.dtype), p.x0.expand(p.n, -1)
    counts = []
    for state in states[1:]:
        found = 0
        while not (found and torch.allclose(x0.mean(0), state.server.x, rtol=0, atol=1e-11)):
            a = p.hessian + torch.eye(p.d, dtype=y.dtype) / eta
            b = torch.einsum("nij,nj->ni", p.hessian, p.minimiser) - y + x0 / eta
            w = torch.linalg.solve(a, b)
            y = y + (w - x0) / eta
            x0 = w + eta * y
            found += 1
            assert found < 30
        x0 = x0.mean(0).expand(p.n, -1)
        counts.append(found)
    assert max(counts) > 1
    same(w, states[-1].rows.w)


def test_fedpd_skips_with_probability_p() -> None:
    p, method = Problem.random(0), FedPD(skip=0.7)
    fed = federate(method, p, 0)[0]
    ctx = ReferenceFederation(p.oracle(), p.alpha, LocalSGD()).ctx(1, range(p.n))
    draws = [int(method.down(fed.server, None, ctx._replace(round=t)).iterations) for t in range(1, 2001)]
    for k in (1, 2, 3):
        share, want = sum(d == k for d in draws) / 2000, 0.3 * 0.7 ** (k - 1)
        assert abs(share - want) < 4 * math.sqrt(want / 2000)
    assert min(draws) == 1


def test_inexact_fedadmm_in_the_paper_s_units() -> None:
    """Zhou and Li with f_i weighed by 1/m, sigma = rho/m, r/m, pi and eps as printed, client by client."""
    p = Problem.random(11)
    lr, rho, k0, inner, eps0, nu = 0.3, 0.8, 3, 4, 0.5, 0.9
    method = FedADMMInexact(rho=rho, iterations=k0, inner=inner, eps0=eps0, shrink=nu)
    states = federate(method, p, 6, local=LocalSGD(lr=lr), cohorts=SOME)
    m, sigma, r = p.n, rho / p.n, 1 / lr / p.n
    x, w, pi = p.x0, [p.x0] * m, [torch.zeros_like(p.x0)] * m
    z, eps, taken = [sigma * p.x0] * m, [eps0 / m**2] * m, []
    for cohort, state in zip(SOME, states[1:], strict=True):
        for i in cohort:
            for _ in range(k0):
                k = 0
                while k < inner:
                    k += 1
                    g = p.hessian[i] @ (w[i] - p.minimiser[i]) / m
                    w[i] = (r * w[i] + sigma * x - pi[i] - g) / (r + sigma)
                    g = p.hessian[i] @ (w[i] - p.minimiser[i]) / m
                    if (sigma * (x - w[i]) - pi[i] - g).square().sum() < eps[i] * p.d:
                        break
                taken.append(k)
                pi[i] = pi[i] + sigma * (w[i] - x)
                eps[i] *= nu
            z[i] = sigma * w[i] + pi[i]
        x = torch.stack(z).sum(0) / (m * sigma)
        same(state.server.x, x)
    same(states[-1].rows.w, torch.stack(w))
    assert len(set(taken)) > 1


@pytest.mark.parametrize(("start", "turn"), [(0.05, "falls"), (10.0, "rises")])
def test_inexact_fedadmm_measures_the_curvature_of_every_client(start: float, turn: str) -> None:
    """By the last step, client by client; sigma is r0 times the geometric mean. An r that rises makes L fall again."""
    p, lr = Problem.random(12), start
    states = federate(FedADMMInexact(r0=0.4, inner=3, eps0=1e-300), p, 6, local=LocalSGD(lr=lr), cohorts=SOME)
    x, w, pi, u = p.x0, [p.x0] * p.n, [torch.zeros_like(p.x0)] * p.n, [p.x0] * p.n
    r, sigma, moved, turns = [1 / lr] * p.n, 0.4 / lr, 0, {"rises": 0, "falls": 0, "stays": 0}
    for cohort, state in zip(SOME, states[1:], strict=True):
        for i in cohort:
            for _ in range(3):
                old = w[i]
                w[i] = (r[i] * old + sigma * x - pi[i] - p.hessian[i] @ (old - p.minimiser[i])) / (r[i] + sigma)
                step = w[i] - old
                slope = float((p.hessian[i] @ step).norm() / step.norm())
                along = float(step @ p.hessian[i] @ step / step.square().sum())
                if along > 2 * (r[i] + sigma):
                    r[i], turns["rises"] = along / 2, turns["rises"] + 1
                    assert along + sigma < 2 * (r[i] + sigma)
                elif max(4 * slope, sigma) < r[i]:
                    r[i], turns["falls"] = max(4 * slope, r[i] / 2, sigma), turns["falls"] + 1
                else:
                    turns["stays"] += 1
            pi[i] = pi[i] + sigma * (w[i] - x)
            u[i] = w[i] + pi[i] / sigma
        x, mean = torch.stack(u).mean(0), 0.4 * math.prod(r) ** (1 / p.n)
        same(state.server.x, x)
        moves = not 1 / 1.9 <= mean / sigma <= 1.9
        moved, sigma = moved + moves, mean if moves else sigma
        same(state.server.sigma, torch.tensor([sigma], dtype=torch.float64))
    assert 0 < moved < len(SOME)
    assert min(turns[turn], turns["stays"]) > 0
    same(states[-1].rows.r[:, 0], torch.tensor(r, dtype=torch.float64))


@pytest.mark.parametrize("lr", [1e-3, 0.5, 20.0])
def test_inexact_fedadmm_does_as_well_with_any_step_size(lr: float) -> None:
    p = Problem.random(11)
    found = (models(FedADMMInexact(), p, 60, local=LocalSGD(lr=lr))[-1] - p.consensus()).norm()
    assert float(found) < 1e-3 * float((p.x0 - p.consensus()).norm())


def test_inexact_fedadmm_ends_at_the_consensus() -> None:
    p, local = Problem.random(11), LocalSGD(lr=0.5)
    some = {"local": local, "cohorts": lambda t: SOME[t % 6]}
    same(models(FedADMMInexact(rho=1.0, iterations=2), p, 200, **some)[-1], p.consensus())
    same(models(FedADMMInexact(iterations=2), p, 200, local=local)[-1], p.consensus())
    far = (models(FedADMMInexact(), p, 100, **some)[-1] - p.consensus()).norm()
    assert float(far) < 1e-2 * float((p.x0 - p.consensus()).norm())


def soft(v: Tensor, t: float) -> Tensor:
    return torch.where(v > t, v - t, torch.where(v < -t, v + t, 0.0))


def test_fedmid_takes_the_prox_twice() -> None:
    """One client, one step, eta_s = 1: the threshold is 2 eta_c c."""
    p, lr, c = Problem.random(12, n=1), 0.2, 0.3
    x = models(FedMiD(regulariser=L1(c=c)), p, 5, local=LocalSGD(lr=lr, steps=1))
    for old, new in itertools.pairwise(x):
        same(new, soft(old - lr * p.gradient(old)[0], 2 * lr * c))


def test_fedmid_written_out() -> None:
    p, lr, c, eta_s, local = Problem.random(12), 0.1, 0.3, 0.7, LocalSGD(lr=0.1, batch_size=2)
    x = models(FedMiD(regulariser=L1(c=c), server_lr=eta_s), p, 5, local=local)
    steps = [local.batches(k) for k in p.sizes.tolist()]
    for old, new in itertools.pairwise(x):
        ends = []
        for i, k in enumerate(steps):
            w = old
            for _ in range(k):
                w = soft(w - lr * p.hessian[i] @ (w - p.minimiser[i]), lr * c)
            ends.append(w - old)
        same(new, soft(old + eta_s * torch.stack(ends).mean(0), eta_s * lr * c * sum(steps) / p.n))


def test_feddualavg_with_one_client_is_regularised_dual_averaging() -> None:
    """RDA with the simple step (Xiao 2010): w_{k+1} = prox_{(k+1) lr psi}(w_0 - lr sum of g(w_j))."""
    p, lr, c = Problem.random(13, n=1), 0.2, 0.3
    x = models(FedDualAvg(regulariser=L1(c=c)), p, 6, local=LocalSGD(lr=lr, steps=1))
    total = torch.zeros_like(p.x0)
    for k in range(6):
        total = total + p.gradient(x[k])[0]
        same(x[k + 1], soft(p.x0 - lr * total, (k + 1) * lr * c))


def test_feddualavg_written_out() -> None:
    p, lr, c, eta_s, k = Problem.random(13), 0.1, 0.2, 0.8, 3
    x = models(FedDualAvg(regulariser=L1(c=c), server_lr=eta_s), p, 5, local=LocalSGD(lr=lr, steps=k))
    z = p.x0
    for r in range(5):
        ends = []
        for i in range(p.n):
            zi = z
            for j in range(k):
                w = soft(zi, (eta_s * lr * k * r + lr * j) * c)
                zi = zi - lr * p.hessian[i] @ (w - p.minimiser[i])
            ends.append(zi - z)
        z = z + eta_s * torch.stack(ends).mean(0)
        same(x[r + 1], soft(z, eta_s * lr * k * (r + 1) * c))


def test_without_regulariser_the_composite_baselines_are_fedavg() -> None:
    p, options = Problem.random(14), {"noise": 1.0, "local": SGD, "cohorts": SOME}
    for eta in (1.0, 0.6):
        want = models(FedAvg(server_lr=eta), p, **options)
        same(models(FedMiD(server_lr=eta), p, **options), want)
        same(models(FedDualAvg(server_lr=eta), p, **options), want)


# ------------------------------------------------------------------------------------------------------- FedSkip


def test_fedskip_with_skip_1_is_fedavg() -> None:
    p, options = Problem.random(15), {"noise": 1.0, "local": SGD}
    same(models(FedSkip(skip=1), p, **options), models(FedAvg(), p, weigher=SamplesWeigher(), **options))


def test_fedskip_weighs_every_model_by_the_samples_it_was_trained_on() -> None:
    """Model by model: whose it goes on with is the one start from which a step of gradient descent leads to it."""
    p, lr, cohorts = Problem.random(15), 0.1, [(0, 1, 2), (2, 3), (0, 4, 3), (1, 2, 4, 0), (0, 1, 2, 3, 4)]
    states = federate(FedSkip(skip=3), p, 5, local=LocalSGD(lr=lr, steps=1), cohorts=cohorts)
    at: dict[int, Tensor] = {}
    seen: dict[int, int] = {}
    for t, cohort in enumerate(cohorts):
        x, w = states[t].server.x, states[t + 1].kept.w
        before, counted = dict(at), dict(seen)
        for i in cohort:
            starts = {-1: x} if t % 3 == 0 else {j: before.get(j, p.x0) for j in cohort}
            ends = {j: v - lr * p.hessian[i] @ (v - p.minimiser[i]) for j, v in starts.items()}
            source = min(ends, key=lambda j: float((ends[j] - w[i]).norm()))
            at[i], seen[i] = ends[source], int(p.sizes[i]) + (0 if t % 3 == 0 else counted.get(source, 0))
            same(w[i], at[i])
        mean = sum((seen[i] * at[i] for i in at), torch.zeros_like(x)) / sum(seen.values())
        same(states[t + 1].server.x, mean)


def test_fedskip_permutes_models_and_averages_every_skip_rounds() -> None:
    p, lr = Problem.random(15), 0.1
    states = federate(FedSkip(skip=3), p, 7, local=LocalSGD(lr=lr, steps=1))
    moved = 0
    for t, (before, after) in enumerate(itertools.pairwise(states)):
        w, kept = after.kept.w, before.kept.w
        start = torch.linalg.solve(
            torch.eye(p.d, dtype=w.dtype) - lr * p.hessian,
            w - lr * torch.einsum("nij,nj->ni", p.hessian, p.minimiser),
        )
        source = before.server.x.expand(p.n, -1) if t % 3 == 0 else kept
        distance = torch.cdist(start, source)
        order = distance.argmin(1)
        assert distance.amin(1).max() < 1e-9
        if t % 3:
            assert sorted(order.tolist()) == list(range(p.n))
            moved += int((order != torch.arange(p.n)).sum())
        seen = after.kept.seen
        assert int(seen.sum()) == (t % 3 + 1) * int(p.sizes.sum())
        same(after.server.x, (seen * w).sum(0) / seen.sum())
    assert moved > 5


# ------------------------------------------------------------------------------------------- declarations and config


@pytest.mark.parametrize("method", [FedADMM(), FedADMMInexact(), FIAELT(beta=3.0), FIAELT(beta=3.0, solver="gd")])
def test_a_client_without_steps_keeps_its_state_and_sends_what_it_sent(method: Algorithm) -> None:
    p = Problem.random(16)
    before = federate(method, p, 3)[-1]
    after = federate(method, p, 1, start=before, local=LocalSGD(steps=0))[-1]
    for name in ("u", "w", "x", "y", "z"):
        if name in before.rows._fields:
            assert torch.equal(getattr(after.rows, name), getattr(before.rows, name))
    x = method.global_model(before.server), method.global_model(after.server)
    assert x[0] is not None
    assert x[1] is not None
    same(x[1], x[0])


def test_first_states() -> None:
    p = Problem.random(16)
    matlab = FedADMMInexact(iterations=7, eps0="matlab")
    assert federate(matlab, p, 0)[0].rows.eps.tolist() == [[(7.0 * p.n) ** 2]] * p.n
    assert federate(FedADMMInexact(iterations=7, eps0=0.3), p, 0)[0].rows.eps.tolist() == [[0.3]] * p.n
    assert federate(FedDualAvg(), p, 0)[0].server.t.tolist() == [0.0]
    state = federate(FIAELT(smooth=2.0), p, 0)[0]
    assert (state.server.beta.tolist(), state.server.iterations.tolist()) == ([10.0], [0.0])
    assert state.rows.moved.tolist() == [[0.0]] * p.n


def test_regularisers_are_values_or_tables() -> None:
    given_table = FedDR.model_validate({"regulariser": {"kind": "l1", "c": 0.5}})
    assert given_table == FedDR(regulariser=L1(c=0.5))
    assert FedDR.model_validate(given_table.model_dump()) == given_table
    for wrong in ({"kind": "l3"}, FedAvg()):
        with pytest.raises(ConfigError, match="prox"):
            FedDR(regulariser=wrong)


@pytest.mark.parametrize("method", [FedDR, FedADMMComposite, FedMiD, FIAELT])
def test_downloads_are_written_as_the_prox_makes_them(method: type[Algorithm]) -> None:
    forms = {None: "dense", L1(): "sparse", Nuclear(): "lowrank"}
    for regulariser, form in forms.items():
        sent = encodings(method(regulariser=regulariser), "down")
        assert next(iter(sent.values())).encoding == form
        assert all(s.encoding == "dense" for s in encodings(method(regulariser=regulariser), "up").values())


def test_fedavg_declares_no_encoding() -> None:
    assert {s.encoding for s in encodings(FedAvg(), "down").values()} == {"dense"}
