"""Augmented training: every oracle as a hand-written loop, row by row, and nothing but steps sees it."""

from __future__ import annotations

import copy

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
from fedloom.tasks import task_of

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


def by_hand(problem: Problem, client: int, lr: float, epochs: int, round: int = 1) -> Tensor:
    module = copy.deepcopy(problem.module).double().train()
    vector_to_parameters(problem.start[client].clone(), module.parameters())
    x, y = samples(problem.fed, client)
    for k, batch in enumerate(positions(len(x), 20, steps_of(len(x), 20, epochs), client, seed=4, round=round)):
        drawn = AUGMENT.draw(len(batch), generator(4, round, client, ("local", k, "augment")))
        loss = mean_loss(module(changed(x[batch], drawn, AUGMENT.crop)), y[batch])
        grads = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for p, g in zip(module.parameters(), grads, strict=True):
                p -= lr * g
    return parameters_to_vector(module.parameters()).detach()


def oracle_of(problem: Problem, name: str, augment: Augment | None = AUGMENT) -> Network:
    return make_oracle(problem.module, task_of(problem.fed.data), problem.fed, name, augment)


@pytest.mark.parametrize("case", IMAGES)
def test_every_oracle_augments_as_the_handwritten_loop(case: str) -> None:
    problem = Problem(IMAGES[case])
    expected = torch.stack([by_hand(problem, i, 0.2, epochs=2, round=3) for i in range(M)])
    for name in oracles_of(problem):
        work = make_work(oracle_of(problem, name), LocalSGD(lr=0.2, epochs=2, batch_size=20), seed=4, round=3)
        torch.testing.assert_close(descend(problem.start, work), expected, **TOLERANCE)
        plain = make_work(oracle_of(problem, name, None), work.local, seed=4, round=3)
        assert ((descend(problem.start, plain) - expected).abs().amax(1) > 1e-4).all()


@pytest.mark.parametrize("case", IMAGES)
def test_a_client_is_augmented_alike_in_any_company(case: str) -> None:
    problem = Problem(IMAGES[case])
    local = LocalSGD(lr=0.2, epochs=2, batch_size=20)
    for name in oracles_of(problem):
        oracle = oracle_of(problem, name)
        together = descend(problem.start, make_work(oracle, local))
        for ids in ([0], [2], [3, 1], [1, 3, 2, 0]):
            some = descend(problem.start[ids], make_work(oracle, local, ids))
            torch.testing.assert_close(some, together[ids], **TOLERANCE)


@pytest.mark.parametrize("case", IMAGES)
def test_only_steps_see_augmented_samples(case: str) -> None:
    problem = Problem(IMAGES[case])
    for name in oracles_of(problem):
        augmented, plain = oracle_of(problem, name), oracle_of(problem, name, None)
        answers = []
        for oracle in (augmented, plain):
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
    for name in ("auto", "fused", "stacked", "looped"):
        with pytest.raises(Refused, match=r"shape 6; leave \[augment\] out"):
            make_oracle(module, task_of(fed.data), fed, name, AUGMENT)
