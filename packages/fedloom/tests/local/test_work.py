"""What work answers about the local problems, and what it counts."""

from __future__ import annotations

import math
from typing import Any

import handwritten
import pytest
import torch
from engine_cases import CASES, TOLERANCE, M, Problem, Soft, make_work, oracles_of
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.local import Batch, LocalSGD, Work, descend, iterate, svrg
from fedloom.seeds import generator

SIZES = torch.tensor(handwritten.SIZES)
CLOSE = TOLERANCE


def first_batch(work: Work, steps: int = 1) -> Batch:
    """The last of ``steps`` batches of every client."""
    found: list[Batch] = []

    def step(rows: Tensor, work: Work, batch: Batch) -> Tensor:
        found.append(batch)
        return rows

    iterate(step, torch.zeros(work.m, 1), work, steps)
    return found[-1]


@pytest.fixture(params=["compiled", "vmap", "loop"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def clipped(g: Tensor, bound: float | None) -> Tensor:
    return g if bound is None or g.norm() <= bound else g * bound / g.norm()


@pytest.mark.parametrize("task", ["classification", "binary", "regression"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_grad_is_the_gradient_of_the_mean_batch_loss(name: str, task: str, clip: float | None) -> None:
    problem = Problem(CASES["mlp"], task=task)
    work = make_work(problem.oracle(name), LocalSGD(batch_size=20, weight_decay=0.3, clip=clip))
    batch = first_batch(work, 3)
    assert batch.count[:, 0].tolist() == [1, 7, 20, 13]
    got = work.grad(problem.start, batch)
    for i in range(M):
        x, y = handwritten.samples(problem.fed, i)
        where = batch.position[i][batch.position[i] >= 0]
        g = handwritten.gradient_at(problem.module, x[where], y[where], problem.start[i], task)
        torch.testing.assert_close(got[i], clipped(g, clip) + 0.3 * problem.start[i], **CLOSE)
    torch.testing.assert_close(work.grad(problem.x, batch), work.grad(problem.x.expand(M, -1), batch), **CLOSE)


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [2, 3, 0, 1], [1, 3, 2, 0]])
def test_a_pass_leaves_out_clients_that_have_ended(
    name: str, order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.local.batches.PIECE_SAMPLES", 8)
    problem = Problem(CASES["mlp"])
    work = make_work(problem.oracle(name), LocalSGD(batch_size=20))
    gradient, loss = work.full_grad(problem.start), work.loss(problem.start)
    other = make_work(problem.oracle(name), LocalSGD(batch_size=20)).take(torch.tensor(order))
    assert [len(piece.ids) for piece in other.pieces()][-1] == order.index(3) + 1
    torch.testing.assert_close(other.full_grad(problem.start[order]), gradient[order], **CLOSE)
    torch.testing.assert_close(other.loss(problem.start[order]), loss[order], **CLOSE)
    assert other.counts.backward.tolist() == other.counts.forward.tolist() == SIZES.tolist()


@pytest.mark.parametrize("task", ["classification", "binary", "regression"])
@pytest.mark.parametrize("piece", [1024, 8])
@pytest.mark.parametrize("case", ["mlp", "cnn"])
def test_full_grad_and_loss_are_those_of_the_mean_loss(
    task: str, piece: int, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.local.batches.PIECE_SAMPLES", piece)
    problem = Problem(CASES[case], task=task)
    for oracle in oracles_of(problem):
        work = make_work(problem.oracle(oracle), LocalSGD(weight_decay=0.2, clip=1e-3))
        got, loss = work.full_grad(problem.start), work.loss(problem.start)
        for i in range(M):
            x, y = handwritten.samples(problem.fed, i)
            expected = handwritten.gradient_at(problem.module, x, y, problem.start[i], task, decay=0.2)
            torch.testing.assert_close(got[i], expected, **CLOSE)
            torch.nn.utils.vector_to_parameters(problem.start[i].clone(), problem.module.double().parameters())
            torch.testing.assert_close(loss[i, 0], handwritten.mean_loss(problem.module(x), y, task).detach(), **CLOSE)
        assert loss.shape == (M, 1)
        assert torch.equal(work.counts.backward, SIZES)
        assert torch.equal(work.counts.forward, SIZES)


def test_loss_of_a_batch(name: str) -> None:
    problem = Problem(CASES["softmax"])
    work = make_work(problem.oracle(name), LocalSGD(batch_size=6, weight_decay=0.5))
    batch = first_batch(work, 2)
    got = work.loss(problem.x, batch)
    torch.nn.utils.vector_to_parameters(problem.x.clone(), problem.module.double().parameters())
    for i in range(M):
        x, y = handwritten.samples(problem.fed, i)
        where = batch.position[i][batch.position[i] >= 0]
        expected = handwritten.mean_loss(problem.module(x[where]), y[where])
        torch.testing.assert_close(got[i, 0], expected.detach(), **CLOSE)
    assert work.counts.forward.tolist() == batch.count[:, 0].tolist() == [1, 1, 6, 6]
    assert not work.counts.backward.any()


def test_dropout_does_nothing_in_losses_and_activations(name: str) -> None:
    problem = Problem(CASES["mlp dropout"])
    plain = Problem(CASES["mlp"])
    some, other = make_work(problem.oracle(name), LocalSGD()), make_work(plain.oracle(name), LocalSGD())
    torch.testing.assert_close(some.loss(problem.x), other.loss(problem.x), **CLOSE)
    torch.testing.assert_close(some.activations(problem.x), other.activations(problem.x), **CLOSE)


@pytest.mark.parametrize("piece", [4096, 8])
@pytest.mark.parametrize("layer", ["penultimate", "logits", "fc1", "fc1_act"])
def test_activations_are_what_a_forward_hook_sees(
    name: str, layer: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.local.oracles.forward.FORWARD_SAMPLES", piece)
    problem = Problem(CASES["mlp"])
    work = make_work(problem.oracle(name), LocalSGD(), [2, 0, 3])
    rows = problem.start[[2, 0, 3]]
    plain = work.activations(rows, layer)
    reduced = work.activations(rows, layer, reduce=lambda z: z.log_softmax(-1))
    inside = {"penultimate": "fc2_act", "logits": "head"}.get(layer, layer)
    for k, i in enumerate([2, 0, 3]):
        module = problem.module.double()
        torch.nn.utils.vector_to_parameters(rows[k].clone(), module.parameters())
        seen: list[Tensor] = []
        handle = module.get_submodule(inside).register_forward_hook(lambda _m, _x, out, seen=seen: seen.append(out))
        module(handwritten.samples(problem.fed, i)[0])
        handle.remove()
        torch.testing.assert_close(plain[k], seen[0].mean(0).detach(), **CLOSE)
        torch.testing.assert_close(reduced[k], seen[0].log_softmax(-1).mean(0).detach(), **CLOSE)
    assert torch.equal(work.counts.forward, 2 * SIZES[[2, 0, 3]])


def test_activations_name_the_layers_that_exist(name: str) -> None:
    work = make_work(Problem(CASES["mlp"]).oracle(name), LocalSGD())
    with pytest.raises(ConfigError, match="did you mean 'fc1'.*allowed: .*penultimate"):
        work.activations(torch.zeros(work.layout.d, dtype=torch.float64), "fc11")


@pytest.mark.parametrize("epochs", [0, 1, 3])
@pytest.mark.parametrize("batch_size", [1, 6, 20, "full"])
def test_an_epoch_counts_every_sample_once(name: str, epochs: int, batch_size: int | str) -> None:
    problem = Problem(CASES["softmax"])
    work = make_work(problem.oracle(name), LocalSGD(epochs=epochs, batch_size=batch_size))
    descend(problem.x, work)
    assert torch.equal(work.counts.backward, epochs * SIZES)
    assert not work.counts.forward.any()
    descend(problem.x, work.take(torch.tensor([3, 1])))
    again = torch.tensor([0, 1, 0, 1]) * epochs * SIZES
    assert torch.equal(work.counts.backward, epochs * SIZES + again)


def test_steps_count_their_batches() -> None:
    problem = Problem(CASES["mlp"])
    work = make_work(problem.oracle("compiled"), LocalSGD(batch_size=20), [3, 0, 2, 1])
    descend(problem.x, work, steps=torch.tensor([[4], [2], [0], [1]]))
    assert work.counts.backward.tolist() == [20 + 20 + 13 + 20, 1 + 1, 0, 7]


def test_svrg_counts_full_gradients_and_both_gradients_of_a_step() -> None:
    problem = Problem(CASES["softmax"])
    work = make_work(problem.oracle("compiled"), LocalSGD(batch_size=20, lr=0.1))
    svrg(problem.x, work, outer=3)
    epoch = torch.where(SIZES > 20, SIZES, 2 * SIZES)  # at least two steps; a sweep ends where Option II draws
    passes, steps = (1 + 3) * SIZES, work.counts.backward - (1 + 3) * SIZES
    assert bool((steps % 2 == 0).all())
    assert bool(((steps >= 0) & (steps <= 3 * 2 * epoch)).all())
    assert bool((work.counts.backward > passes).any())
    stopping = make_work(problem.oracle("compiled"), LocalSGD(batch_size=20, lr=0.1))
    svrg(
        problem.x,
        stopping,
        outer=3,
        inner=2,
        until=lambda now, first: torch.tensor([[True], [False]]).repeat(2, 1)[: len(now)],
    )
    two = torch.tensor([2, 14, 40, 40])
    for i, size in ((0, 1), (2, 20)):  # one sweep of at most two steps, between two full gradients
        assert 2 * size <= stopping.counts.backward[i] <= 2 * size + 2 * two[i]


def test_work_knows_its_clients(name: str) -> None:
    problem = Problem(CASES["softmax"])
    work = make_work(problem.oracle(name), LocalSGD(batch_size=6, epochs=2), [3, 1], seed=4, round=9)
    assert work.m == 2
    assert work.layout.d == problem.d
    assert work.sizes.tolist() == [[53], [7]]
    assert work.epochs(3).tolist() == [[27], [6]]
    assert work.steps.tolist() == [[18], [4]]
    drawn = [torch.rand(3, generator=g) for g in work.rng("x")]
    for i, got in zip([3, 1], drawn, strict=True):
        assert torch.equal(got, torch.rand(3, generator=generator(4, 9, i, "x")))


def test_no_argument_is_modified(name: str) -> None:
    problem = Problem(CASES["mlp dropout"])
    module_before = {k: v.clone() for k, v in problem.module.state_dict().items()}
    oracle = problem.oracle(name)
    local = LocalSGD(momentum=0.9, weight_decay=0.1, clip=1.0, epochs=2)
    arguments = {"start": problem.start, "x": problem.x, "rows": problem.rows, "mu": problem.mu, **problem.masks}
    before = {k: v.clone() for k, v in arguments.items()}
    data = problem.fed.data.x.clone(), problem.fed.parts["train"].index.clone()
    for settings in (local, LocalSGD()):
        work = make_work(oracle, settings)
        batch = first_batch(work)
        work.grad(problem.start, batch)
        work.full_grad(problem.x)
        work.loss(problem.rows, batch)
        work.activations(problem.start)
        for mask in (None, problem.masks["md"]):
            pulls = ((problem.mu, problem.x), (0.5, problem.rows))
            descend(problem.start, work, pull=pulls, shift=problem.rows, prox=(Soft(), problem.x), mask=mask)
            descend(problem.x, work, pull=pulls, shift=problem.x, prox=(Soft(), None), mask=mask)
        svrg(problem.start, work, pull=((problem.mu, problem.x),), shift=problem.rows, outer=2)
    for k, v in arguments.items():
        assert torch.equal(v, before[k]), k
    assert torch.equal(problem.fed.data.x, data[0])
    assert torch.equal(problem.fed.parts["train"].index, data[1])
    for k, v in problem.module.state_dict().items():
        assert torch.equal(v, module_before[k]), k
    assert problem.module.training


def test_results_do_not_share_memory_with_arguments(name: str) -> None:
    problem = Problem(CASES["softmax"])
    work = make_work(problem.oracle(name), LocalSGD())
    for steps in (0, 1):
        out = descend(problem.start, work, steps=steps)
        out.zero_()
        assert problem.start.any()
    first = descend(problem.start, work)
    kept = first.clone()
    descend(first, work)
    work.loss(problem.rows)
    assert torch.equal(first, kept)


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, {1: 0.5, 7: 0.5}),
        ({"schedule": "exponential", "decay": 0.9}, {1: 0.5, 3: 0.5 * 0.81}),
        ({"schedule": "inverse-sqrt"}, {1: 0.5, 4: 0.25}),
        ({"schedule": "cosine", "decay_rounds": 10}, {1: 0.5, 6: 0.25, 11: 0.0, 50: 0.0}),
    ],
)
def test_schedules(options: dict[str, Any], rates: dict[int, float]) -> None:
    local = LocalSGD(lr=0.5, **options)
    problem = Problem(CASES["softmax"])
    for t, rate in rates.items():
        assert math.isclose(local.lr_at(t), rate, abs_tol=1e-15)
        assert make_work(problem.oracle("compiled"), local, round=t).lr == local.lr_at(t)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.0},
        {"lr": float("nan")},
        {"batch_size": 0},
        {"batch_size": "half"},
        {"epochs": -1},
        {"epochs": 1, "steps": 2},
        {"momentum": 1.0},
        {"weight_decay": -1e-3},
        {"clip": 0.0},
        {"schedule": "linear"},
        {"decay": 1.1},
        {"rate": 0.1},
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LocalSGD(**options)
