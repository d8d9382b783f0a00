"""Lp-Proj and ADMM-Lp-Proj-2, and FLAME's theta step to a tolerance."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from short_runs import PARTIAL, equal
from torch import Tensor

from fedloom.algorithms import APFL, FLAME, ADMMLpProj, Algorithm, LocalOnly, LpProj, PerFedAvg, PFedMe
from fedloom.choose import UniformWeigher
from fedloom.engine.checks.refusals import check_together
from fedloom.errors import Refused
from fedloom.local import LocalSGD
from fedloom.rows.projection import Projection, new_key, projection
from fedloom.seeds import generator
from fedloom.testing import Problem, ReferenceState, federate, locate_difference, personal_models
from fedloom.testing.federate import ReferenceFederation

SEEDS = pytest.mark.parametrize("seed", [0, 1])
SGD = LocalSGD(lr=0.1, batch_size=2, schedule="exponential", decay=0.8, weight_decay=0.05)


def run(algorithm: Algorithm, p: Problem, rounds: int = 5, **options: Any) -> list[ReferenceState]:
    return federate(algorithm, p, rounds, **{"local": SGD, "noise": 0.5, "cohorts": PARTIAL, **options})


def matrix_of(state: ReferenceState, k: int, like: Tensor) -> Tensor:
    matrix = projection(state.server.key, k, like).matrix
    assert matrix is not None
    return matrix


# --- the projection


def test_projection_has_rows_of_length_1_and_depends_on_its_key_only() -> None:
    like = torch.zeros(300, dtype=torch.float64)
    keys = [new_key(generator(seed)) for seed in (0, 0, 1)]
    a, b, c = (projection(key, 40, like).matrix for key in keys)
    assert a is not None
    assert b is not None
    assert c is not None
    assert a.shape == (40, 300)
    equal(torch.linalg.vector_norm(a, dim=1), torch.ones(40, dtype=torch.float64))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert abs(float(a.mean())) < 0.002
    assert float((a * 300**0.5).square().mean()) == pytest.approx(1)
    assert float((a * 300**0.5).pow(4).mean()) == pytest.approx(3, abs=0.2)  # Gaussian
    single = projection(keys[0], 40, like.float()).matrix
    assert single is not None
    assert torch.equal(single, a.float())


def test_projections_have_keys_of_their_own() -> None:
    assert len({tuple(new_key(generator(seed)).tolist()) for seed in range(200)}) == 200


def test_every_bit_of_a_key_counts() -> None:
    like, key = torch.zeros(1, 7), new_key(generator(0))
    flipped = [key.clone() for _ in range(128)]
    for bit, other in enumerate(flipped):
        other.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    drawn = [projection(k, 2, like).matrix for k in (key, *flipped)]
    assert len({tuple(m.flatten().tolist()) for m in drawn if m is not None}) == 129


def test_projection_and_its_transpose() -> None:
    p = Problem.random(0)
    for k in (3, None):
        proj = projection(new_key(generator(0)), k, p.x0)
        low = torch.linspace(-1, 1, k or p.d, dtype=torch.float64)
        equal((proj(p.minimiser) * low).sum(1), (p.minimiser * proj.back(low)).sum(1))
        equal(proj(p.minimiser)[2], proj(p.minimiser[2]))
    assert torch.equal(Projection(None)(p.minimiser), p.minimiser)
    assert torch.equal(Projection(None).back(p.minimiser), p.minimiser)


@pytest.mark.parametrize("kind", [LpProj, ADMMLpProj])
def test_all_clients_share_one_projection_per_seed(kind: type[LpProj | ADMMLpProj]) -> None:
    p = Problem.random(0)
    keys = [run(kind(dim=3), p, 3, seed=seed)[-1].server.key for seed in (0, 0, 1)]
    assert torch.equal(keys[0], keys[1])
    assert not torch.equal(keys[0], keys[2])
    assert keys[0].dtype == torch.int64
    states = run(kind(dim=3), p)
    assert torch.equal(states[0].server.key, states[-1].server.key)
    assert states[-1].server.w.shape == (3,)


# --- Lp-Proj


@SEEDS
@pytest.mark.parametrize(("p_norm", "dim"), [(1.0, 3), (1.5, 3), (2.0, 3), (2.0, None), (1.3, None)])
def test_lpproj_by_hand(seed: int, p_norm: float, dim: int | None) -> None:
    """Local rounds of theta steps and one step of w_i, both along the gradient of lam/p ||w - P theta||_p^p."""
    p = Problem.random(seed)
    algorithm = LpProj(p=p_norm, lam=0.7, dim=dim, eta=0.3, local_rounds=2, beta=0.8)
    states = run(algorithm, p)
    equal(states[0].server.w, torch.zeros(dim or p.d, dtype=torch.float64), 0)
    matrix = matrix_of(states[0], dim, p.x0) if dim else torch.eye(p.d, dtype=torch.float64)

    def gradients(w: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        w, theta = w.clone().requires_grad_(), theta.clone().requires_grad_()
        penalty = 0.7 / p_norm * (w - matrix @ theta).abs().pow(p_norm).sum()
        by_w, by_theta = torch.autograd.grad(penalty, (w, theta))
        return by_w, by_theta

    for before, after in pairwise(states):
        ends = []
        for i in PARTIAL[before.round]:
            work = ReferenceFederation(p.oracle(noise=0.5), p.alpha, SGD).work(after.round, [i])
            w, theta = before.server.w, before.rows.theta[i]
            for r in range(2):
                plan = work.plan(("local", r), work.steps[:, 0])
                for k in range(int(work.steps)):
                    g = work.grad(theta[None], plan.batch(k))[0]
                    theta = theta - work.lr * (g + gradients(w, theta)[1])
                w = w - 0.3 * gradients(w, theta)[0]
            equal(after.rows.theta[i], theta)
            ends.append(w)
        equal(after.server.w, 0.2 * before.server.w + 0.8 * torch.stack(ends).mean(0))
        absent = [i for i in range(p.n) if i not in PARTIAL[before.round]]
        equal(after.rows.theta[absent], before.rows.theta[absent], 0)
    got = personal_models(algorithm, ReferenceFederation(p.oracle(), p.alpha, SGD), states[-1])
    assert got is not None
    equal(got, states[-1].rows.theta, 0)


@SEEDS
def test_lpproj_without_penalty_is_local_training(seed: int) -> None:
    p = Problem.random(seed)
    end = run(LpProj(lam=0, dim=3, local_rounds=2), p, noise=0.0)[-1]
    twice = run(LocalOnly(), p, noise=0.0, local=SGD.with_(epochs=2))[-1]
    equal(end.rows.theta, twice.rows.v)
    equal(end.server.w, torch.zeros_like(end.server.w), 0)


@SEEDS
def test_lpproj_with_p_1_bounds_what_a_client_can_do(seed: int) -> None:
    p = Problem.random(seed)
    wild = Problem(p.hessian, 1e4 * p.minimiser, p.sizes, p.alpha, p.x0)
    for before, after in pairwise(run(LpProj(lam=2.0, dim=3, eta=0.1, local_rounds=4), wild)):
        assert (after.server.w - before.server.w).abs().max() <= 4 * 0.1 * 2.0 + 1e-12


@SEEDS
def test_lpproj_in_the_whole_space_begins_as_pfedme(seed: int) -> None:
    """From zero, with p = 2 and P = I: K steps to the proximal point, then eta lam of the way to it."""
    p = Problem.random(seed)
    p = Problem(p.hessian, p.minimiser, p.sizes, p.alpha, torch.zeros_like(p.x0))
    steps = LocalSGD(lr=0.1, steps=4)
    (a,) = run(LpProj(p=2, lam=1.5, dim=None, eta=0.2, local_rounds=3), p, 1, local=steps, noise=0.0)[1:]
    (b,) = run(PFedMe(lam=1.5, eta=0.2, inner=4), p, 1, local=LocalSGD(lr=0.1, steps=3), noise=0.0)[1:]
    equal(a.server.w, b.server.x)
    equal(a.rows.theta, b.rows.theta)


@pytest.mark.parametrize("kind", [LpProj, ADMMLpProj])
def test_subspace_methods_without_steps_stay(kind: type[LpProj | ADMMLpProj]) -> None:
    p, everyone = Problem.random(0), range(5)
    fed = ReferenceFederation(p.oracle(), p.alpha, SGD)
    algorithm = LpProj(dim=3) if kind is LpProj else ADMMLpProj(dim=3, lam=1.0, rho=0.1)
    state = run(algorithm, p)[-1]
    down = algorithm.down(state.server, None, fed.ctx(6, everyone))
    up, rows = algorithm.client(down, state.rows, fed.work(6, everyone, steps=0))
    equal(rows.theta, state.rows.theta, 0)
    if kind is LpProj:
        equal(up.dw, torch.zeros_like(up.dw), 0)


# --- ADMM-Lp-Proj-2


@SEEDS
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_admmlpproj_in_the_whole_space_is_flame(seed: int, weights: Any) -> None:
    p = Problem.random(seed, weights=weights)
    lost = [(), (3,), (), (4,), ()]
    a, b = (run(kind, p, dropped=lost) for kind in (ADMMLpProj(lam=1.7, rho=0.3, dim=None), FLAME(lam=1.7, rho=0.3)))
    for x, y in zip(a, b, strict=True):
        equal(x.server.w, y.server.x)
        equal(x.kept.u, y.kept.u)
        for name in ("theta", "w", "pi"):
            equal(getattr(x.rows, name), getattr(y.rows, name))


@SEEDS
def test_admmlpproj_by_hand(seed: int) -> None:
    p = Problem.random(seed, weights="samples")
    algorithm, lam, rho = ADMMLpProj(lam=1.7, rho=0.3, dim=3), 1.7, 0.3
    states = run(algorithm, p)
    matrix = matrix_of(states[0], 3, p.x0)
    equal(states[0].server.w, matrix @ p.x0)
    for before, after in pairwise(states):
        for i in PARTIAL[before.round]:
            work = ReferenceFederation(p.oracle(noise=0.5), p.alpha, SGD).work(after.round, [i])
            theta, w, pi = (field[i] for field in before.rows)
            plan = work.plan("local", work.steps[:, 0])
            for k in range(int(work.steps)):
                g = work.grad(theta[None], plan.batch(k))[0]
                theta = theta - work.lr * (g + lam * matrix.T @ (matrix @ theta - w))
            a = lam * p.alpha[i]
            w = (a * (matrix @ theta) + rho * before.server.w - pi) / (a + rho)
            pi = pi + rho * (w - before.server.w)
            for got, want in zip(after.rows, (theta, w, pi), strict=True):
                equal(got[i], want)
            equal(after.kept.u[i], w + pi / rho)
        equal(after.rows.pi, p.alpha * lam * (after.rows.theta @ matrix.T - after.rows.w))
        equal(after.server.w, (after.rows.w + after.rows.pi / rho).mean(0))
        absent = [i for i in range(p.n) if i not in PARTIAL[before.round]]
        equal(after.rows.theta[absent], before.rows.theta[absent], 0)


@SEEDS
def test_admmlpproj_with_a_vanishing_weight_is_local_training(seed: int) -> None:
    p = Problem.random(seed)
    end = run(ADMMLpProj(lam=1e-15, dim=3), p)[-1]
    equal(end.rows.theta, run(LocalOnly(), p)[-1].rows.v)


def test_methods_with_steps_of_their_own_refuse_momentum() -> None:
    for algorithm in (PerFedAvg(), APFL(), LpProj(), ADMMLpProj()):
        with pytest.raises(Refused, match="momentum"):
            check_together(algorithm, LocalSGD(momentum=0.5), UniformWeigher())
        check_together(algorithm, LocalSGD(), UniformWeigher())


# --- FLAME to a tolerance


@SEEDS
@pytest.mark.parametrize(("eps0", "shrink"), [(1.0, 0.5), (0.05, 0.2)])
def test_flame_to_a_tolerance_by_hand(seed: int, eps0: float, shrink: float) -> None:
    """Gradient descent until alpha ||grad f + lam (theta - w)|| <= sqrt(eps), and not a step further."""
    p, lam = Problem.random(seed, weights="samples"), 1.7
    algorithm = FLAME(lam=lam, rho=0.3, eps0=eps0, shrink=shrink)
    counts = []
    for before, after in pairwise(run(algorithm, p, local=LocalSGD(lr=0.2, batch_size=2))):
        for i in range(p.n):
            if i not in PARTIAL[before.round]:
                equal(after.rows.theta[i], before.rows.theta[i], 0)
                equal(after.rows.eps[i], before.rows.eps[i], 0)
                continue
            equal(after.rows.eps[i], shrink * before.rows.eps[i])
            theta, w, count = before.rows.theta[i], before.rows.w[i], 0

            def slope(theta: Tensor, w: Tensor = w, i: int = i) -> Tensor:
                return p.hessian[i] @ (theta - p.minimiser[i]) + lam * (theta - w)

            while (p.alpha[i] * slope(theta)).square().sum() > after.rows.eps[i]:  # Eq. 17
                theta, count = theta - 0.2 * slope(theta), count + 1
            equal(after.rows.theta[i], theta)
            counts.append(count)
    if eps0 == 1.0:  # a loose tolerance holds at once or after little work, a tight one takes several steps
        assert {0, 1} <= set(counts)
    else:
        assert max(counts) > 1


def test_flame_to_a_tolerance_takes_at_most_as_many_steps_as_allowed() -> None:
    p = Problem.random(0)
    algorithm = FLAME(lam=1.0, rho=0.1, eps0=1e-20, most=3)
    (after,) = run(algorithm, p, 1, local=LocalSGD(lr=0.2), cohorts=None)[1:]
    steps = torch.full((p.n, 1), 3)
    equal(after.rows.theta, p.descent(p.x0, steps, 0.2, 1.0, p.x0))
    fed = ReferenceFederation(p.oracle(), p.alpha, LocalSGD(lr=0.2))
    work = fed.work(2, range(p.n))
    algorithm.client(algorithm.down(after.server, None, fed.ctx(2, range(p.n))), after.rows, work)
    assert work.counts.backward.tolist() == (4 * p.sizes).tolist()


def test_flame_to_a_tolerance_ends_at_the_moreau_minimiser() -> None:
    p = Problem.random(1, weights="samples")
    cohorts = [[(t + k) % 5 for k in range(3)] for t in range(250)]
    algorithm = FLAME(lam=2.0, rho=0.2, eps0=1.0, shrink=0.7)
    end = run(algorithm, p, 250, local=LocalSGD(lr=0.4), cohorts=cohorts, noise=0.0)[-1]
    best = p.moreau(2.0)
    equal(end.server.x, best.w, 1e-9)
    equal(end.rows.theta, best.theta, 1e-9)


def test_flame_without_steps_keeps_theta() -> None:
    p, everyone = Problem.random(0), range(5)
    fed, algorithm = ReferenceFederation(p.oracle(), p.alpha, SGD), FLAME(lam=1.0, rho=0.1, eps0=1e-9)
    state = run(algorithm, p, 1)[-1]
    down = algorithm.down(state.server, None, fed.ctx(2, everyone))
    equal(algorithm.client(down, state.rows, fed.work(2, everyone, steps=0))[1].theta, state.rows.theta, 0)
    plain = run(FLAME(), p)
    assert all(locate_difference(s.rows.eps, torch.zeros_like(s.rows.eps)) is None for s in plain)


def warnings_of(algorithm: FLAME, alpha: list[float], local: LocalSGD = SGD) -> list[str]:
    p = Problem.random(0, n=len(alpha))
    ctx = ReferenceFederation(p.oracle(), torch.tensor(alpha, dtype=torch.float64)[:, None], local).ctx(
        0, range(len(alpha))
    )
    return algorithm.check(ctx.layout, ctx)


def test_theorem_1_holds_neither_by_default_nor_in_the_paper() -> None:
    """The card says so, and a run does not warn of its own default."""
    for alpha in ([0.1] * 10, [0.1] * 5 + [0.5], [1.0]):
        p = Problem.random(0, n=len(alpha))
        weights = torch.tensor(alpha, dtype=torch.float64)[:, None]
        ctx = ReferenceFederation(p.oracle(), weights, SGD).ctx(0, range(len(alpha)))
        for method in (FLAME().derive_options(ctx), FLAME(defaults="paper")):
            pull, rho = method.lam * max(alpha), method.rho
            assert (pull / rho) ** 2 * (1 + rho) >= (pull + rho) / 2
            assert method.check(ctx.layout, ctx) == []
