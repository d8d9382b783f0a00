"""Limit identities in place of inheritance: what a method is when an option is at its end, what its states mean."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from short_runs import PARTIAL, SEEDS, SGD, equal, models, run, steps_of

from fedloom.algorithms import REGISTRY, SCAFFOLD, Ditto, FedAvg, FedDyn, FedProx, LocalOnly
from fedloom.choose import SamplesWeigher
from fedloom.local import LocalSGD
from fedloom.testing import Problem
from fedloom.testing.federate import ReferenceFederation, begin

ONE = LocalSGD(lr=0.1, steps=1, batch_size=2)


# --- FedAvg, FedProx, Local, Centralized


@SEEDS
def test_fedavg_with_one_full_batch_step_is_gradient_descent_on_the_pooled_loss(seed: int) -> None:
    p = Problem.random(seed, weights="samples")
    states = run(FedAvg(), p, local=LocalSGD(lr=0.1, batch_size="full"), weigher=SamplesWeigher())
    x = p.x0
    for state in states[1:]:
        x = x - 0.1 * (p.sizes[:, None] * p.gradient(x)).sum(0) / p.sizes.sum()
        equal(state.server.x, x)


@SEEDS
def test_fedavg_is_the_mean_of_the_cohorts_descents(seed: int) -> None:
    p = Problem.random(seed)
    w = p.descent(p.x0, steps_of(p), 0.1)[[0, 3]].mean(0)
    for server_lr in (1.0, 0.5):
        (after,) = run(FedAvg(server_lr=server_lr), p, 1, noise=0.0, cohorts=[(0, 3)])[1:]
        equal(after.server.x, p.x0 + server_lr * (w - p.x0))


@SEEDS
def test_fedprox_without_pull_is_fedavg(seed: int) -> None:
    p = Problem.random(seed)
    equal(models(run(FedProx(mu=0), p, cohorts=PARTIAL)), models(run(FedAvg(), p, cohorts=PARTIAL)), 0)


@SEEDS
@pytest.mark.parametrize("mu", [0.01, 1.0, 30.0])
def test_fedprox_exact(seed: int, mu: float) -> None:
    p = Problem.random(seed)
    before, after = run(FedProx(mu=mu), p, 4, solve=True, cohorts=PARTIAL)[-2:]
    equal(after.server.x, p.proximal(mu, before.server.x)[list(PARTIAL[3])].mean(0))
    b = Problem.random(seed, same_curvature=True)
    curvature = b.hessian[0, 0, 0]
    (after,) = run(FedProx(mu=mu), b, 1, solve=True)[1:]
    equal(after.server.x, ((curvature * b.minimiser + mu * b.x0) / (curvature + mu)).mean(0))


@SEEDS
def test_fedprox_with_an_infinite_pull_stays(seed: int) -> None:
    p = Problem.random(seed)
    equal(run(FedProx(mu=1e12), p, solve=True)[-1].server.x, p.x0, 1e-10)


@SEEDS
def test_local_is_descent_of_every_client_by_itself(seed: int) -> None:
    p = Problem.random(seed)
    rounds_of = torch.tensor([[sum(i in cohort for cohort in PARTIAL)] for i in range(p.n)])
    end = run(LocalOnly(), p, noise=0.0, cohorts=PARTIAL)[-1]
    equal(end.rows.v, p.descent(p.x0, rounds_of * steps_of(p), 0.1))


@SEEDS
def test_centralized_is_descent_on_the_pooled_problem(seed: int) -> None:
    p = Problem.random(seed, weights="samples")
    preset = REGISTRY["centralized"]()
    assert preset.pooled
    assert preset.weigher is None
    whole = p.pooled()
    end = run(preset.algorithm, whole, 3, noise=0.0)[-1]
    x = p.x0
    for _ in range(3 * int(steps_of(whole))):
        x = x - 0.1 * (p.alpha * p.gradient(x)).sum(0)
    equal(end.server.x, x)


# --- SCAFFOLD


@SEEDS
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_keeps_c_the_mean_of_all_variates(seed: int, option: Any) -> None:
    lost = [(), (3,), (2,), (), (1, 2)]
    for state in run(SCAFFOLD(option=option), Problem.random(seed), cohorts=PARTIAL, dropped=lost):
        equal(state.server.c, state.rows.ci.mean(0))


@SEEDS
def test_scaffold_after_one_step_has_the_batch_gradient(seed: int) -> None:
    p = Problem.random(seed)
    fed = ReferenceFederation(p.oracle(noise=0.5), p.alpha, ONE)
    for before, after in pairwise(run(SCAFFOLD(), p, local=ONE)):
        work = fed.work(after.round, range(p.n))
        batch = work.plan("local", work.steps[:, 0]).batch(0)
        equal(after.rows.ci, work.grad(before.server.x.expand(p.n, -1), batch))


@SEEDS
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_scaffold_with_one_step_and_everyone_moves_like_fedavg(seed: int, server_lr: float) -> None:
    p = Problem.random(seed)
    scaffold, fedavg = SCAFFOLD(server_lr=server_lr), FedAvg(server_lr=server_lr)
    equal(models(run(scaffold, p, local=ONE)), models(run(fedavg, p, local=ONE)))


@SEEDS
def test_scaffold_with_equal_variates_is_fedavg(seed: int) -> None:
    p = Problem.random(seed)
    fed = ReferenceFederation(p.oracle(noise=0.5), p.alpha, SGD)
    state = begin(SCAFFOLD(), fed, p.x0)
    c = p.minimiser.sum(0)
    server, rows = state.server._replace(c=c), state.rows._replace(ci=c.expand(p.n, -1))
    down = SCAFFOLD().down(server, None, fed.ctx(1, range(p.n)))
    dy = SCAFFOLD().client(down, rows, fed.work(1, range(p.n)))[0].dy
    dw = FedAvg().client(FedAvg().down(state.server, None, fed.ctx(1, range(p.n))), (), fed.work(1, range(p.n)))[0].dw
    equal(dy, dw)


@SEEDS
def test_scaffold_by_hand(seed: int) -> None:
    """Every step written out, with other step sizes and other numbers of steps from round to round."""
    p = Problem.random(seed)
    local = LocalSGD(lr=0.1, batch_size=2, schedule="exponential", decay=0.7)
    for option in ("I", "II"):
        x, c, ci = p.x0, torch.zeros_like(p.x0), torch.zeros_like(p.minimiser)
        for state in run(SCAFFOLD(option=option, server_lr=0.8), p, local=local, noise=0.0, cohorts=PARTIAL)[1:]:
            eta, dy, dc = 0.1 * 0.7 ** (state.round - 1), 0.0, 0.0
            for i in PARTIAL[state.round - 1]:
                y, path = x, []
                for _ in range(local.batches(int(p.sizes[i]))):
                    path.append(p.hessian[i] @ (y - p.minimiser[i]))
                    y = y - eta * (path[-1] - ci[i] + c)
                new = p.gradient(x)[i] if option == "I" else sum(path) / len(path)
                dy, dc = dy + (y - x), dc + (new - ci[i])
                ci = torch.cat([ci[:i], new[None], ci[i + 1 :]])
            x, c = x + 0.8 * dy / len(PARTIAL[state.round - 1]), c + dc / p.n
            equal(state.server.x, x)
            equal(state.server.c, c)
            equal(state.rows.ci, ci)


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_without_steps_keeps_the_variate(option: Any) -> None:
    p = Problem.random(0)
    state = run(SCAFFOLD(option=option), p)[-1]
    fed = ReferenceFederation(p.oracle(noise=0.5), p.alpha, SGD)
    down = SCAFFOLD().down(state.server, None, fed.ctx(6, range(p.n)))
    up, rows = SCAFFOLD(option=option).client(down, state.rows, fed.work(6, range(p.n), steps=0))
    equal(rows.ci, state.rows.ci, 0)
    equal(up.dc, torch.zeros_like(up.dc), 0)


def test_scaffold_with_partial_cohorts_finds_the_optimum_that_fedavg_misses() -> None:
    p = Problem.random(0)
    cohorts = [[(t + k) % 5 for k in range(3)] for t in range(400)]
    end = run(SCAFFOLD(), p, 400, noise=0.0, cohorts=cohorts)[-1]
    equal(end.server.x, p.consensus(), 1e-9)
    biased = run(FedAvg(), p, 100, noise=0.0)[-1]
    assert torch.linalg.vector_norm(biased.server.x - p.consensus()) > 0.01


# --- FedDyn


@SEEDS
@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_feddyn_remembers_gradients(seed: int, alpha: float) -> None:
    """h_i is the gradient at the client's last model, h the mean of all h_i, x the cohort's mean minus h/alpha."""
    p, last, lost = Problem.random(seed), {}, [(), (3,), (), (4,), ()]
    states = run(FedDyn(alpha=alpha), p, solve=True, cohorts=PARTIAL, dropped=lost)
    for before, after in pairwise(states):
        x, cohort = before.server.x, [i for i in PARTIAL[after.round - 1] if i not in lost[after.round - 1]]
        eye = torch.eye(p.d, dtype=x.dtype)
        for i in cohort:
            right = p.hessian[i] @ p.minimiser[i] + before.rows.hi[i] + alpha * x
            last[i] = torch.linalg.solve(p.hessian[i] + alpha * eye, right)
        for i in range(p.n):
            gradient = p.hessian[i] @ (last[i] - p.minimiser[i]) if i in last else torch.zeros_like(x)
            equal(after.rows.hi[i], gradient)
        equal(after.server.h, after.rows.hi.mean(0))
        equal(after.server.x, torch.stack([last[i] for i in cohort]).mean(0) - after.server.h / alpha, 1e-11)


@SEEDS
def test_feddyn_with_everyone_is_fedpd(seed: int) -> None:
    """FedPD with eta = 1/alpha: prox, dual step, mean of x_i + eta dual_i."""
    p, eta = Problem.random(seed), 2.0
    x, dual = p.x0, torch.zeros_like(p.minimiser)
    for state in run(FedDyn(alpha=1 / eta), p, 8, solve=True)[1:]:
        xi = p.proximal(1 / eta, x - eta * dual)
        dual = dual + (xi - x) / eta
        x = (xi + eta * dual).mean(0)
        equal(state.server.x, x, 1e-11)


# --- Ditto


@SEEDS
def test_ditto_without_pull_is_local_training_beside_fedavg(seed: int) -> None:
    p = Problem.random(seed)
    ditto, alone, fedavg = (run(a, p, cohorts=PARTIAL) for a in (Ditto(lam=0), LocalOnly(), FedAvg()))
    equal(ditto[-1].rows.v, alone[-1].rows.v, 0)
    equal(models(ditto), models(fedavg), 0)
    equal(models(run(Ditto(lam=2.0), p, cohorts=PARTIAL)), models(fedavg), 0)


@SEEDS
def test_ditto_has_its_own_length_and_step_size(seed: int) -> None:
    p = Problem.random(seed)
    ditto = Ditto(lam=0, personal_epochs=3, personal_lr=0.02)
    alone = run(LocalOnly(), p, local=LocalSGD(lr=0.02, batch_size=2, epochs=3))
    equal(run(ditto, p)[-1].rows.v, alone[-1].rows.v, 0)
    frozen = run(Ditto(personal_epochs=0), p)[-1]
    equal(frozen.rows.v, p.x0.expand(p.n, -1), 0)


@SEEDS
@pytest.mark.parametrize("lam", [0.1, 2.0, 1e12])
def test_ditto_is_pulled_to_the_received_model(seed: int, lam: float) -> None:
    p = Problem.random(seed)
    for before, after in pairwise(run(Ditto(lam=lam), p, 3, solve=True)):
        equal(after.rows.v, p.proximal(lam, before.server.x))
        if lam > 1e9:
            equal(after.rows.v, before.server.x.expand(p.n, -1), 1e-10)


@SEEDS
def test_ditto_with_equal_curvature_has_the_fixed_points_of_the_moreau_problem(seed: int) -> None:
    p = Problem.random(seed, same_curvature=True)
    end = run(Ditto(lam=1.5), p, 2, solve=True)[-1]
    b, centre = p.hessian[0, 0, 0], p.minimiser.mean(0)
    equal(end.rows.v, (b * p.minimiser + 1.5 * centre) / (b + 1.5))
    equal(end.rows.v, p.moreau(1.5).theta)
    equal(end.server.x, p.moreau(1.5).w)
