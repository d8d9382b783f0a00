"""pFedMe, Per-FedAvg, APFL, FedAMP and HeurFedAMP: what they are at the ends of their options, and step by step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from short_runs import PARTIAL, equal, models
from torch import Tensor

from fedloom.algorithms import APFL, Algorithm, FedAMP, FedAvg, HeurFedAMP, LocalOnly, PerFedAvg, PFedMe
from fedloom.algorithms.fedamp import Up
from fedloom.local import Batch, LocalSGD, Work
from fedloom.testing import Problem, ReferenceState, federate, personal_models
from fedloom.testing.federate import ReferenceFederation

SEEDS = pytest.mark.parametrize("seed", [0, 1])
SGD = LocalSGD(lr=0.1, batch_size=2, schedule="exponential", decay=0.8, weight_decay=0.05)  # one to four steps


def run(algorithm: Algorithm, p: Problem, rounds: int = 5, **options: Any) -> list[ReferenceState]:
    return federate(algorithm, p, rounds, **{"local": SGD, "noise": 0.5, **options})


def steps_of(p: Problem, local: LocalSGD = SGD) -> Tensor:
    return torch.tensor([[local.batches(size)] for size in p.sizes.tolist()])


def alone(p: Problem, round: int, i: int, local: LocalSGD = SGD) -> tuple[Work, int]:
    """The noisy local problem of one client, and its steps."""
    work = ReferenceFederation(p.oracle(noise=0.5), p.alpha, local).work(round, [i])
    return work, int(work.steps)


def batches(work: Work, count: int, stream: str = "local") -> list[Batch]:
    plan = work.plan(stream, torch.tensor([count]))
    return [plan.batch(k) for k in range(count)]


def flat(seed: int) -> tuple[Problem, Tensor]:
    """f_i = b_i/2 ||w - c_i||^2, with b [n, 1]."""
    p, b = Problem.random(seed), 0.5 + torch.arange(5, dtype=torch.float64)[:, None] / 3
    return replace(p, hessian=b[:, :, None] * torch.eye(p.d, dtype=torch.float64)), b


# --- pFedMe


@SEEDS
def test_pfedme_by_hand(seed: int) -> None:
    """Theta goes on from batch to batch, K steps on each, and starts at the received model."""
    p = Problem.random(seed)
    algorithm = PFedMe(lam=1.5, eta=0.2, inner=3, personal_lr=0.07, beta=1.3)
    for before, after in pairwise(run(algorithm, p, cohorts=PARTIAL)):
        x, ends = before.server.x, []
        for i in PARTIAL[before.round]:
            work, steps = alone(p, after.round, i)
            w = theta = x[None]
            for batch in batches(work, steps):
                for _ in range(3):
                    theta = theta - 0.07 * (work.grad(theta, batch) + 1.5 * (theta - w))
                w = w - 0.2 * 1.5 * (w - theta)
            equal(after.rows.theta[i], theta[0])
            ends.append(w[0])
        equal(after.server.x, (1 - 1.3) * x + 1.3 * torch.stack(ends).mean(0))
        absent = [i for i in range(p.n) if i not in PARTIAL[before.round]]
        equal(after.rows.theta[absent], before.rows.theta[absent], 0)


@SEEDS
def test_pfedme_takes_the_step_size_of_the_round(seed: int) -> None:
    p = Problem.random(seed)
    constant = LocalSGD(lr=0.08, batch_size=2)
    equal(
        models(run(PFedMe(lam=1.0), p, local=constant)),
        models(run(PFedMe(lam=1.0, personal_lr=0.08), p, local=LocalSGD(lr=0.5, batch_size=2))),
        0,
    )
    end, other = (run(PFedMe(lam=1.0, personal_lr=lr), p)[-1] for lr in (None, 0.1))
    assert torch.linalg.vector_norm(end.server.x - other.server.x) > 1e-4


@SEEDS
def test_pfedme_with_eta_lam_1_has_theta_for_w(seed: int) -> None:
    p = Problem.random(seed)
    for state in run(PFedMe(lam=4.0, eta=0.25), p)[1:]:
        equal(state.server.x, state.rows.theta.mean(0))


@SEEDS
def test_pfedme_with_a_tiny_step_stays(seed: int) -> None:
    p = Problem.random(seed)
    end = run(PFedMe(lam=1.0, eta=1e-16), p)[-1]
    equal(end.server.x, p.x0, 1e-14)
    assert torch.linalg.vector_norm(end.rows.theta - p.x0) > 0.01


@SEEDS
def test_pfedme_exact_theta_in_closed_form(seed: int) -> None:
    p = Problem.random(seed, same_curvature=True)
    b, lam = float(p.hessian[0, 0, 0]), 3.0
    local = LocalSGD(lr=1 / (b + lam), steps=1)
    for before, after in pairwise(run(PFedMe(lam=lam, inner=1), p, local=local, noise=0.0)):
        equal(after.rows.theta, (b * p.minimiser + lam * before.server.x) / (b + lam))


EXACT: dict[str, Any] = {"lam": 2.0, "inner": 22, "personal_lr": 0.3}


@SEEDS
def test_pfedme_with_one_local_round_ends_at_the_moreau_minimiser(seed: int) -> None:
    p = Problem.random(seed)
    end = run(PFedMe(eta=0.5, **EXACT), p, 80, local=LocalSGD(steps=1), noise=0.0)[-1]
    best = p.moreau(2.0)
    equal(end.server.x, best.w, 1e-9)
    equal(end.rows.theta, best.theta, 1e-9)


@SEEDS
@pytest.mark.parametrize("rounds", [1, 4])
def test_pfedme_weighs_clients_by_how_far_their_local_rounds_get(seed: int, rounds: int) -> None:
    p, b = flat(seed)
    end = run(PFedMe(eta=0.3, **EXACT), p, 120 // rounds, local=LocalSGD(steps=rounds), noise=0.0)[-1]
    s = 0.3 * 2.0 * b / (b + 2.0)
    weight = 1 - (1 - s) ** rounds
    equal(end.server.x, (weight * p.minimiser).sum(0) / weight.sum(), 1e-9)


# --- Per-FedAvg


@SEEDS
@pytest.mark.parametrize("variant", ["hf", "fo"])
def test_perfedavg_by_hand(seed: int, variant: Any) -> None:
    """Every step its own batches: for the step ahead, for the gradient there, and for the Hessian."""
    p = Problem.random(seed)
    many = 3 if variant == "hf" else 2
    algorithm = PerFedAvg(alpha=0.2, variant=variant, delta=0.05)
    states = run(algorithm, p, cohorts=PARTIAL)
    for before, after in pairwise(states):
        ends = []
        for i in PARTIAL[before.round]:
            work, steps = alone(p, after.round, i)
            w, drawn = before.server.x[None], batches(work, many * steps)
            for k in range(steps):
                g = work.grad(w - 0.2 * work.grad(w, drawn[many * k]), drawn[many * k + 1])
                if variant == "hf":
                    hessian = p.hessian[i] + 0.05 * torch.eye(p.d, dtype=torch.float64)  # with weight decay
                    g = g - 0.2 * (hessian @ g[0])[None]
                w = w - work.lr * g
            ends.append(w[0])
        equal(after.server.x, torch.stack(ends).mean(0), 1e-11)


@SEEDS
@pytest.mark.parametrize("variant", ["hf", "fo"])
@pytest.mark.parametrize("delta", [1e-3, 1.0])
def test_perfedavg_direction_on_a_quadratic(seed: int, variant: Any, delta: float) -> None:
    """(I - alpha A) g(w - alpha g(w)), whatever delta; without the Hessian term in the first-order form."""
    p, lr, alpha = Problem.random(seed), 0.3, 0.2
    algorithm = PerFedAvg(alpha=alpha, variant=variant, delta=delta)
    (after,) = run(algorithm, p, 1, local=LocalSGD(lr=lr, steps=1), noise=0.0)[1:]
    g = p.gradient(p.x0 - alpha * p.gradient(p.x0))
    if variant == "hf":
        g = g - alpha * torch.einsum("nij,nj->ni", p.hessian, g)
    equal(after.server.x, p.x0 - lr * g.mean(0), 1e-11)


@SEEDS
@pytest.mark.parametrize("variant", ["hf", "fo"])
def test_perfedavg_with_alpha_0_is_fedavg(seed: int, variant: Any) -> None:
    p = Problem.random(seed)
    quiet = {"noise": 0.0, "cohorts": PARTIAL}
    equal(models(run(PerFedAvg(alpha=0, variant=variant), p, **quiet)), models(run(FedAvg(), p, **quiet)))


@SEEDS
def test_perfedavg_personal_model_is_one_step_on_training_data(seed: int) -> None:
    p = Problem.random(seed)
    state = run(PerFedAvg(alpha=0.3), p)[-1]
    fed = ReferenceFederation(p.oracle(noise=0.5), p.alpha, SGD)
    got = personal_models(PerFedAvg(alpha=0.3), fed, state)
    assert got is not None
    for i in range(p.n):
        work, _ = alone(p, state.round, i)
        (batch,) = batches(work, 1, "personal")
        equal(got[i], state.server.x - 0.3 * work.grad(state.server.x[None], batch)[0])


@pytest.mark.parametrize(("variant", "gradients"), [("hf", 4), ("fo", 2)])
def test_perfedavg_counts_every_gradient(variant: Any, gradients: int) -> None:
    p = Problem.random(0)
    fed = ReferenceFederation(p.oracle(), p.alpha, LocalSGD(lr=0.1, batch_size="full", steps=3))
    algorithm = PerFedAvg(variant=variant, alpha=0.1)
    state = federate(algorithm, p, 0)[0]
    work = fed.work(1, range(p.n))
    algorithm.client(algorithm.down(state.server, None, fed.ctx(1, range(p.n))), state.rows, work)
    assert work.counts.backward.tolist() == (3 * gradients * p.sizes).tolist()


# --- APFL


@SEEDS
@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl_by_hand(seed: int, adaptive: bool) -> None:
    """Gradient at the mixture of both models as they are before the step; decay acts on the mixture."""
    p = Problem.random(seed)
    algorithm = APFL(alpha=0.4, adaptive=adaptive)
    for before, after in pairwise(run(algorithm, p, cohorts=PARTIAL)):
        for i in PARTIAL[before.round]:
            work, steps = alone(p, after.round, i)
            w, v, a = before.server.x[None], before.rows.v[i][None], before.rows.alpha[i]
            now = a
            for k, batch in enumerate(batches(work, steps)):
                g = work.grad(a * v + (1 - a) * w, batch)
                if adaptive and k == 0:
                    now = (a - work.lr * ((v - w) * g).sum()).clamp(0, 1)
                w, v, a = w - work.lr * work.grad(w, batch), v - work.lr * a * g, now
            equal(after.rows.v[i], v[0])
            equal(after.rows.alpha[i], a)
        absent = [i for i in range(p.n) if i not in PARTIAL[before.round]]
        equal(after.rows.v[absent], before.rows.v[absent], 0)


@SEEDS
def test_apfl_trains_the_global_model_as_fedavg(seed: int) -> None:
    p = Problem.random(seed)
    for algorithm in (APFL(alpha=0.0), APFL(), APFL(alpha=1.0), APFL(adaptive=True)):
        equal(models(run(algorithm, p, cohorts=PARTIAL)), models(run(FedAvg(), p, cohorts=PARTIAL)))


@SEEDS
def test_apfl_with_alpha_0_never_moves_v(seed: int) -> None:
    p = Problem.random(seed)
    states = run(APFL(alpha=0.0), p)
    equal(states[-1].rows.v, p.x0.expand(p.n, -1), 0)
    fed = ReferenceFederation(p.oracle(), p.alpha, SGD)
    got = personal_models(APFL(alpha=0.0), fed, states[-1])
    assert got is not None
    equal(got, states[-1].server.x.expand(p.n, -1), 0)


@SEEDS
def test_apfl_with_alpha_1_is_local_training(seed: int) -> None:
    p = Problem.random(seed)
    end = run(APFL(alpha=1.0), p, cohorts=PARTIAL)[-1]
    equal(end.rows.v, run(LocalOnly(), p, cohorts=PARTIAL)[-1].rows.v)
    got = personal_models(APFL(alpha=1.0), ReferenceFederation(p.oracle(), p.alpha, SGD), end)
    assert got is not None
    equal(got, end.rows.v, 0)


def test_apfl_share_stays_between_0_and_1_and_moves_both_ways() -> None:
    p, local = Problem.random(0), LocalSGD(lr=0.3, batch_size=2)
    shares = torch.cat([s.rows.alpha for s in run(APFL(adaptive=True), p, 12, local=local)], 1)
    assert shares.min() >= 0
    assert shares.max() <= 1
    assert (shares.diff() > 0).any()
    assert (shares.diff() < 0).any()
    assert (shares == 1).any()


def test_apfl_on_equal_clients_finds_their_minimiser() -> None:
    p = Problem.random(0)
    p = replace(p, hessian=p.hessian[:1].expand(p.n, -1, -1), minimiser=p.minimiser[:1].expand(p.n, -1))
    end = run(APFL(alpha=0.7), p, 150, local=LocalSGD(lr=0.4, steps=2), noise=0.0)[-1]
    equal(end.rows.v, p.minimiser, 1e-9)
    equal(end.server.x, p.minimiser[0], 1e-9)


# --- FedAMP, HeurFedAMP


def mixed(algorithm: FedAMP | HeurFedAMP, w: Tensor) -> Tensor:
    p = Problem.random(0)
    ctx = ReferenceFederation(p.oracle(), p.alpha, SGD).ctx(1, range(len(w)))
    return algorithm.down(algorithm.init(p.x0, ctx)[0], Up(w), ctx).u


@SEEDS
@pytest.mark.parametrize(("alpha", "sigma"), [(0.5, 9.0), (0.02, 0.5), (3.0, 30.0)])
def test_fedamp_mixture_is_a_gradient_step_on_the_attraction(seed: int, alpha: float, sigma: float) -> None:
    """u_i = w_i - alpha grad_i of 1/2 sum_j A(||w_i - w_j||^2), A(t) = 1 - exp(-t/sigma)."""
    w = Problem.random(seed).minimiser
    moving = w.clone().requires_grad_()
    attraction = 1 - torch.exp(-(moving[:, None] - w).square().sum(2) / sigma)
    (slope,) = torch.autograd.grad(attraction.sum() / 2, moving)
    equal(mixed(FedAMP(alpha=alpha, sigma=sigma), w), w - alpha * slope)


@SEEDS
def test_fedamp_mixture_is_convex_for_any_step(seed: int) -> None:
    """A step too large for that is shortened until the own weight is zero."""
    w = 0.2 * Problem.random(seed).minimiser
    near = torch.exp(-(w[:, None] - w).square().sum(2) / 2.0).fill_diagonal_(0)
    assert (1000 / 2.0 * near.sum(1) > 1).all()
    equal(mixed(FedAMP(alpha=1000.0, sigma=2.0), w), near / near.sum(1, keepdim=True) @ w)
    tail = torch.cat([w, w[:1] + 100])  # one client is far from all others
    equal(mixed(FedAMP(alpha=1000.0, sigma=2.0), tail)[-1], tail[-1])


@SEEDS
def test_fedamp_without_neighbours_or_step_leaves_every_model(seed: int) -> None:
    w = Problem.random(seed).minimiser
    for algorithm in (FedAMP(alpha=1e-15, sigma=1), FedAMP(alpha=1, sigma=1e16), FedAMP(alpha=1, sigma=1e-3)):
        equal(mixed(algorithm, w), w)
    for algorithm in (FedAMP(alpha=1, sigma=1), FedAMP(alpha=0.1, sigma=1), HeurFedAMP(), HeurFedAMP(self_weight=0.0)):
        equal(mixed(algorithm, w[:1].expand(4, -1)), w[:1].expand(4, -1))
        equal(mixed(algorithm, w[:1]), w[:1])
    equal(mixed(HeurFedAMP(self_weight=1.0), w), w)


@SEEDS
@pytest.mark.parametrize("kind", [FedAMP, HeurFedAMP])
def test_fedamp_without_pull_is_local_training(seed: int, kind: type[FedAMP | HeurFedAMP]) -> None:
    p = Problem.random(seed)
    local = run(LocalOnly(), p, cohorts=PARTIAL)[-1].rows.v
    equal(run(kind(lam=0), p, cohorts=PARTIAL)[-1].rows.w, local, 0)


@SEEDS
@pytest.mark.parametrize("kind", [FedAMP, HeurFedAMP])
def test_fedamp_starts_at_the_own_model_and_is_pulled_to_the_mixture(
    seed: int, kind: type[FedAMP | HeurFedAMP]
) -> None:
    p, local = Problem.random(seed), LocalSGD(lr=0.1, batch_size=2)
    algorithm = kind(lam=0.6, alpha=1.5, sigma=8.0)
    for before, after in pairwise(run(algorithm, p, local=local, noise=0.0)):
        u = mixed(algorithm, before.rows.w)
        equal(after.rows.w, p.descent(before.rows.w, steps_of(p, local), 0.1, 0.4, u))
        equal(after.kept.w, after.rows.w, 0)
    before, after = run(algorithm, p, 2, local=local, solve=True)[1:]
    equal(after.rows.w, p.proximal(0.4, mixed(algorithm, before.rows.w)))


@SEEDS
def test_heurfedamp_weights(seed: int) -> None:
    """Own weight as given, the rest by the softmax of the cosines; lengths do not matter."""
    w = Problem.random(seed).minimiser
    n = len(w)
    for sigma, own in ((0.0, 0.3), (4.0, 0.3), (4.0, None), (30.0, 0.0)):
        share = 1 / n if own is None else own
        xi = torch.zeros(n, n, dtype=torch.float64)
        for i in range(n):
            cos = torch.nn.functional.cosine_similarity(w[i][None], w)
            xi[i] = torch.where(torch.arange(n) == i, 0.0, torch.exp(sigma * cos))
            xi[i] = (1 - share) * xi[i] / xi[i].sum()
            xi[i, i] = share
        equal(mixed(HeurFedAMP(sigma=sigma, self_weight=own), w), xi @ w)
    a = HeurFedAMP(sigma=4.0, self_weight=0.0)
    for length in (7, 0.01):
        equal(mixed(a, length * w), length * mixed(a, w))


def test_heurfedamp_of_a_zero_model_is_finite() -> None:
    w = Problem.random(0).minimiser.clone()
    w[0] = 0
    assert mixed(HeurFedAMP(), w).isfinite().all()
