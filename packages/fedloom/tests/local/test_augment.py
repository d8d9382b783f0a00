"""Augmented and noisy training: every oracle as a hand-written loop, row by row, and nothing but steps sees it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from engine_cases import CASES, TOLERANCE, M, Problem, make_work, oracles_of
from handwritten import CLASSES, federation, mean_loss, positions, samples, steps_of
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedloom.errors import Refused
from fedloom.local import LocalSGD, descend
from fedloom.local.oracles import Network, make_oracle
from fedloom.models import MLP, Augment
from fedloom.seeds import generator
from fedloom.tasks import make_task

AUGMENT = Augment(flip=0.5, crop=2, crop_probability=0.7)
IMAGES = {
    "mlp": CASES["mlp"]._replace(spec=MLP(hidden=(5,)), shape=(1, 6, 5)),
    "cnn": CASES["cnn"],
}


def changed(x: Tensor, drawn: Tensor, crop: int) -> Tensor:
    """Images moved and mirrored one by one."""
    out = torch.zeros_like(x)
    _, high, wide = x.shape[1:]
    for image, target, (flip, top, left) in zip(x, out, drawn.tolist(), strict=True):
        for row in range(high):
            for column in range(wide):
                i, j = row + top - crop, (wide - 1 - column if flip else column) + left - crop
                if 0 <= i < high and 0 <= j < wide:
                    target[:, row, column] = image[:, i, j]
    return out


def noise_of(problem: Problem) -> Tensor:
    """Standard deviations by sample and channel, of samples as they are stored; client 1 has none."""
    fed = problem.fed
    level = 0.1 + torch.rand(len(fed.data), fed.data.shape[0], generator=torch.Generator().manual_seed(8)).double()
    level[fed.indices("train", 1)] = 0
    return level


def augmented(_: Problem, batch: Tensor, x: Tensor, generator_of: Callable[[str], torch.Generator]) -> Tensor:
    return changed(x, AUGMENT.draw(len(batch), generator_of("augment")), AUGMENT.crop)


def noisy(problem: Problem, batch: Tensor, x: Tensor, generator_of: Callable[[str], torch.Generator]) -> Tensor:
    std, x = problem.fed.data.std, x.clone()
    drawn = torch.randn(x.shape, generator=generator_of("noise")).double()
    for one, row, noise in zip(x, noise_of(problem)[batch], drawn, strict=True):
        for channel, level in enumerate(row):
            one[channel] += noise[channel] * level / (1 if std is None else float(std[channel % len(std)]))
    return x


CHANGES = {"augmented": augmented, "noisy": noisy}


def by_hand(problem: Problem, change: str, client: int, lr: float, epochs: int, round: int = 1) -> Tensor:
    module = copy.deepcopy(problem.module).double().train()
    vector_to_parameters(problem.start[client].clone(), module.parameters())
    x, y = samples(problem.fed, client)
    for k, batch in enumerate(positions(len(x), 20, steps_of(len(x), 20, epochs), client, seed=4, round=round)):

        def generator_of(purpose: str, k: int = k) -> torch.Generator:
            return generator(4, round, client, ("local", k, purpose))

        places = problem.fed.indices("train", client)[batch]
        loss = mean_loss(module(CHANGES[change](problem, places, x[batch], generator_of)), y[batch])
        grads = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for p, g in zip(module.parameters(), grads, strict=True):
                p -= lr * g
    return parameters_to_vector(module.parameters()).detach()


def oracle_of(problem: Problem, name: str, change: str | None) -> Network:
    augment = AUGMENT if change == "augmented" else None
    fed = replace(problem.fed, noise=noise_of(problem)) if change == "noisy" else problem.fed
    return make_oracle(problem.module, make_task(fed.data), fed, name, augment)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("case", IMAGES)
def test_every_oracle_changes_samples_as_the_handwritten_loop(case: str, change: str) -> None:
    problem = Problem(IMAGES[case])
    expected = torch.stack([by_hand(problem, change, i, 0.2, epochs=2, round=3) for i in range(M)])
    for name in oracles_of(problem):
        work = make_work(oracle_of(problem, name, change), LocalSGD(lr=0.2, epochs=2, batch_size=20), seed=4, round=3)
        torch.testing.assert_close(descend(problem.start, work), expected, **TOLERANCE)
        plain = make_work(oracle_of(problem, name, None), work.local, seed=4, round=3)
        apart = (descend(problem.start, plain) - expected).abs().amax(1) > 1e-4
        assert apart.tolist() == [change == "augmented" or client != 1 for client in range(M)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("case", IMAGES)
def test_a_clients_samples_change_alike_in_any_company(case: str, change: str) -> None:
    problem = Problem(IMAGES[case])
    local = LocalSGD(lr=0.2, epochs=2, batch_size=20)
    for name in oracles_of(problem):
        oracle = oracle_of(problem, name, change)
        together = descend(problem.start, make_work(oracle, local))
        for ids in ([0], [2], [3, 1], [1, 3, 2, 0]):
            some = descend(problem.start[ids], make_work(oracle, local, ids))
            torch.testing.assert_close(some, together[ids], **TOLERANCE)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("case", IMAGES)
def test_only_steps_see_changed_samples(case: str, change: str) -> None:
    problem = Problem(IMAGES[case])
    for name in oracles_of(problem):
        answers = []
        for oracle in (oracle_of(problem, name, change), oracle_of(problem, name, None)):
            work = make_work(oracle, LocalSGD(lr=0.2, batch_size=20))
            batch = work.last_batch()
            answers.append(
                [
                    work.full_grad(problem.start),
                    work.loss(problem.start),
                    work.loss(problem.start, batch),
                    work.accuracy(problem.start),
                    work.activations(problem.start),
                    work.activations(problem.start, batch=batch),
                    *oracle.outputs(problem.start[3], problem.fed.indices("train", 3)),
                    work.grad(problem.start, batch),
                ]
            )
        *same, other = zip(*answers, strict=True)
        assert all(torch.equal(a, b) for a, b in same)
        assert not torch.equal(*other)


def test_data_that_are_no_images_are_refused() -> None:
    fed = federation(shape=(6,))
    module = MLP(hidden=(5,)).build((6,), CLASSES, 0)
    for name in ("auto", "compiled", "vmap", "loop"):
        with pytest.raises(Refused, match=r"shape 6\. Omit augment="):
            make_oracle(module, make_task(fed.data), fed, name, AUGMENT)
