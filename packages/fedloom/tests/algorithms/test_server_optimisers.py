"""FedOpt against torch's optimisers and plain formulas, FedNova against the weights of every local gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from short_runs import PARTIAL, SEEDS, SGD, equal, models, run
from torch import Tensor

from fedloom.algorithms import Algorithm, Delta, FedAvg, FedNova, FedOpt
from fedloom.algorithms.fedopt import Server
from fedloom.choose import SamplesWeigher, Uniform
from fedloom.data import load
from fedloom.data.partitions import Dirichlet
from fedloom.engine.setting import Engine, Evaluate
from fedloom.engine.simulate import simulate
from fedloom.local import LocalSGD
from fedloom.seeds import generator
from fedloom.testing import Problem, ReferenceState
from fedloom.testing.federate import ReferenceFederation

# --- FedOpt


def differences(seed: int, rounds: int = 6) -> Tensor:
    return torch.randn(rounds, 7, generator=generator(seed, purpose="differences"), dtype=torch.float64)


def stepped(method: FedOpt, changes: Tensor) -> list[Server]:
    p = Problem.random(0)
    ctx = ReferenceFederation(p.oracle(), p.alpha, SGD).ctx(0, range(p.n))
    states = [method.init(p.x0, ctx)[0]]
    for dw in changes:
        states.append(method.server(states[-1], Delta(dw), ctx))
    return states


def by_torch(make: Any, x0: Tensor, changes: Tensor) -> Tensor:
    """Where an optimiser of torch leads whose gradients are -dw."""
    x = x0.clone().requires_grad_()
    optimiser = make([x])
    for dw in changes:
        x.grad = -dw
        optimiser.step()
    return x.detach()


@SEEDS
@pytest.mark.parametrize("optimiser", ["adam", "yogi", "adagrad"])
@pytest.mark.parametrize("clip", [0.01, 1.0, None])
def test_a_first_round_of_clipped_gradients_goes_no_further_than_fedavgs_can(
    seed: int, optimiser: Any, clip: float | None
) -> None:
    p = Problem.random(seed)
    ctx = ReferenceFederation(p.oracle(), p.alpha, LocalSGD(lr=0.1, batch_size=2, clip=clip)).ctx(1, range(p.n))
    method = FedOpt(optimiser=optimiser, tau=1e-9).derive_options(ctx)
    if clip is None:
        assert method.server_lr == pytest.approx(ctx.reach / 10)
        return
    change = torch.randn(p.d, generator=generator(seed), dtype=torch.float64)
    change *= ctx.reach * clip / change.norm()  # the longest sum of steps
    for dw in (change, ctx.reach * clip * torch.eye(len(change), dtype=change.dtype)[0]):
        first = method.server(method.init(p.x0, ctx)[0], Delta(dw), ctx)
        assert float((first.x - p.x0).norm()) <= ctx.reach * clip * (1 + 1e-6)


@SEEDS
@pytest.mark.parametrize("beta1", [None, 0.0, 0.5])
def test_momentum_is_torchs(seed: int, beta1: float | None) -> None:
    changes = differences(seed)
    states = stepped(FedOpt(optimiser="momentum", server_lr=0.3, beta1=beta1), changes)
    rho = 0.9 if beta1 is None else beta1
    equal(states[-1].x, by_torch(lambda ps: torch.optim.SGD(ps, 0.3, momentum=rho), states[0].x, changes))


@SEEDS
def test_adagrad_is_torchs(seed: int) -> None:
    changes = differences(seed)
    states = stepped(FedOpt(optimiser="adagrad", server_lr=0.3, tau=0.2), changes)
    make = lambda ps: torch.optim.Adagrad(ps, 0.3, initial_accumulator_value=0.04, eps=0.2)  # noqa: E731
    equal(states[-1].x, by_torch(make, states[0].x, changes))


@SEEDS
@pytest.mark.parametrize("optimiser", ["adam", "yogi", "adagrad"])
@pytest.mark.parametrize("beta1", [None, 0.0, 0.7])
def test_algorithm_2_coordinate_by_coordinate(seed: int, optimiser: Any, beta1: float | None) -> None:
    changes = differences(seed)
    changes[0, 0] = 0.5  # its square is v
    options = {} if beta1 is None else {"beta1": beta1}
    states = stepped(FedOpt(optimiser=optimiser, server_lr=0.3, beta2=0.8, tau=0.5, **options), changes)
    b1 = (0.0 if optimiser == "adagrad" else 0.9) if beta1 is None else beta1
    for j in range(7):
        x, m, v = float(states[0].x[j]), 0.0, 0.5**2
        for delta in changes[:, j].tolist():
            m = b1 * m + (1 - b1) * delta
            if optimiser == "adagrad":
                v = v + delta**2
            elif optimiser == "adam":
                v = 0.8 * v + 0.2 * delta**2
            else:
                v = v - 0.2 * delta**2 * np.sign(v - delta**2)
            x = x + 0.3 * m / (np.sqrt(v) + 0.5)
        assert float(states[-1].x[j]) == pytest.approx(x, abs=1e-12)
        assert float(states[-1].m[j]) == pytest.approx(m, abs=1e-12)
        assert float(states[-1].v[j]) == pytest.approx(v, abs=1e-12)


@SEEDS
def test_no_momentum_is_fedavg(seed: int) -> None:
    p = Problem.random(seed)
    for lr in (1.0, 0.5):
        got = run(FedOpt(optimiser="momentum", beta1=0.0, server_lr=lr), p, cohorts=PARTIAL)
        equal(models(got), models(run(FedAvg(server_lr=lr), p, cohorts=PARTIAL)))


@SEEDS
@pytest.mark.parametrize("optimiser", ["adam", "yogi", "adagrad"])
def test_little_adaptivity_is_fedavg(seed: int, optimiser: Any) -> None:
    """With a large tau, sqrt(v) stays tau: the step is server_lr / (2 tau)."""
    p = Problem.random(seed)
    got = run(FedOpt(optimiser=optimiser, beta1=0.0, beta2=1 - 1e-9, tau=1e6, server_lr=1e6), p, cohorts=PARTIAL)
    equal(models(got), models(run(FedAvg(server_lr=0.5), p, cohorts=PARTIAL)), 1e-6)


@SEEDS
def test_the_second_moment_never_falls_below_zero(seed: int) -> None:
    for optimiser in ("adam", "yogi", "adagrad"):
        method = FedOpt(optimiser=optimiser, server_lr=0.1, tau=1e-6, beta2=0.0)  # type: ignore[arg-type]
        for state in stepped(method, differences(seed, 30)):
            assert float(state.v.min()) >= 0


# --- FedNova


@SEEDS
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_equal_steps_are_fedavg(seed: int, momentum: float) -> None:
    p, local = Problem.random(seed), LocalSGD(lr=0.1, batch_size=2, steps=3, momentum=momentum)
    equal(
        models(run(FedNova(), p, local=local, cohorts=PARTIAL)), models(run(FedAvg(), p, local=local, cohorts=PARTIAL))
    )


@SEEDS
def test_equal_steps_are_fedavg_for_any_weights(seed: int) -> None:
    p, local = Problem.random(seed), LocalSGD(lr=0.1, batch_size=2, steps=4)
    options: dict[str, Any] = {"local": local, "cohorts": PARTIAL, "weigher": SamplesWeigher()}
    equal(models(run(FedNova(), p, **options)), models(run(FedAvg(), p, **options)))


@SEEDS
def test_equation_8(seed: int) -> None:
    p, ids = Problem.random(seed), [0, 2, 3]
    (after,) = run(FedNova(), p, 1, noise=0.0, cohorts=[ids], weigher=SamplesWeigher())[1:]
    share = p.sizes[ids].double() / p.sizes[ids].sum()
    tau = torch.tensor([SGD.batches(size) for size in p.sizes[ids].tolist()], dtype=torch.float64)
    w = p.descent(p.x0, torch.tensor([[SGD.batches(size)] for size in p.sizes.tolist()]), 0.1)[ids]
    direction = (p.x0 - w) / 0.1 / tau[:, None]  # d_i
    assert len(set(tau.tolist())) > 1
    equal(after.server.x, p.x0 - (share @ tau) * 0.1 * (share @ direction))


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.9])
def test_sizes_are_the_sums_of_the_weights_of_the_local_gradients(rho: float) -> None:
    p = Problem.random(1)
    fed = ReferenceFederation(p.oracle(), p.alpha, LocalSGD(lr=0.1, batch_size=1, momentum=rho))
    work = fed.work(1, range(p.n))
    server = FedNova().init(p.x0, fed.ctx(0, [0]))[0]
    up, _ = FedNova().client(FedNova().down(server, None, fed.ctx(1, range(p.n))), None, work)
    for k, steps in enumerate(work.steps[:, 0].tolist()):
        moved, velocity = 0.0, 0.0
        for _ in range(steps):  # a gradient of 1 in every step
            velocity = rho * velocity + 1.0
            moved += velocity
        assert float(up.size[k]) == pytest.approx(moved, rel=1e-12)


def test_a_client_without_steps_sends_nothing() -> None:
    p = Problem.random(1)
    fed = ReferenceFederation(p.oracle(), p.alpha, SGD)
    server = FedNova().init(p.x0, fed.ctx(0, [0]))[0]
    up, _ = FedNova().client(FedNova().down(server, None, fed.ctx(1, [0, 1])), None, fed.work(1, [0, 1], 0))
    assert [float(up.dw.abs().max()), float(up.size.max())] == [0.0, 0.0]


@SEEDS
def test_the_objective_is_consistent_in_the_limit_of_small_steps(seed: int) -> None:
    """The limit of FedNova goes to the optimum with the step size, that of FedAvg does not."""
    p = Problem.random(seed)
    steps = torch.tensor([[SGD.batches(size)] for size in p.sizes.tolist()])
    share = 1 / steps.double()
    gaps = []
    for lr in (1e-2, 1e-3):
        nova = p.drifted(steps, lr, share=share / share.sum())
        (after,) = run(FedNova(), p, 1, LocalSGD(lr=lr, batch_size=2), noise=0.0, start=started(p, nova))[1:]
        equal(after.server.x, nova, 1e-11)
        avg = p.drifted(steps, lr)
        gaps.append([float(torch.linalg.vector_norm(x - p.consensus())) for x in (nova, avg)])
    assert gaps[1][0] < 0.11 * gaps[0][0] < 0.11
    assert gaps[1][1] > 0.9 * gaps[0][1] > 10 * gaps[0][0]


def started(p: Problem, x: Tensor) -> ReferenceState:
    state = run(FedNova(), p, 0)[0]
    return state._replace(server=state.server._replace(x=x))


# --- runs


METHODS = [
    FedNova(),
    FedOpt(),
    FedOpt(optimiser="yogi"),
    FedOpt(optimiser="adagrad"),
    FedOpt(optimiser="momentum", server_lr=0.5),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_digits_with_one_and_two_workers(method: Algorithm) -> None:
    fed = Dirichlet(clients=10, alpha=0.5, min_size=4)(load("digits"), seed=0)
    options: dict[str, Any] = {
        "rounds": 3,
        "local": LocalSGD(lr=0.05, batch_size=8),
        "sampler": Uniform(fraction=0.5),
        "evaluate": Evaluate(every=3),
    }
    one, two = (
        simulate(method, fed, "softmax", engine=Engine(workers=w, clients_per_batch=2), **options) for w in (1, 2)
    )
    assert torch.equal(one.models.rows("global"), two.models.rows("global"))
    assert float(one.final("global", "accuracy").nanmean()) > 0.2
