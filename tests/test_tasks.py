"""Losses against autograd, metrics against cases worked by hand, against scikit-learn, and client by client."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from fedloom.errors import ConfigError
from fedloom.tasks import Binary, Classification, Regression, Task, task_of

TASKS: list[Task] = [Classification(classes=4), Binary(), Regression(outputs=3)]


def problem(task: Task, samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    output = torch.randn(samples, task.outputs, generator=gen, dtype=torch.float64).mul(4).round().div(4)  # with ties
    if isinstance(task, Regression):
        return output, torch.randn(samples, task.outputs, generator=gen, dtype=torch.float64)
    return output, torch.randint(0, max(task.outputs, 2), (samples,), generator=gen)


def per_client(task: Task, output: list[list[float]], y: list, owner: list[int], n: int) -> dict[str, list[float]]:
    found = task.metrics(torch.tensor(output), torch.tensor(y), torch.tensor(owner), n)
    return {name: value.tolist() for name, value in found.items()}


@pytest.mark.parametrize("task", TASKS, ids=lambda t: type(t).__name__)
@pytest.mark.parametrize("stack", [(), (2,), (2, 3)])
def test_dloss_is_the_gradient_of_each_samples_loss(task: Task, stack: tuple[int, ...]) -> None:
    output, y = problem(task, 30, 0)
    output = output.view(*stack, -1, task.outputs).requires_grad_()
    y = y.view(output.shape if isinstance(task, Regression) else output.shape[:-1])
    loss = task.loss(output, y)
    assert loss.shape == output.shape[:-1]
    (grad,) = torch.autograd.grad(loss.sum(), output)
    torch.testing.assert_close(task.dloss(output.detach(), y), grad, rtol=1e-12, atol=1e-12)


def test_losses_by_hand() -> None:
    assert Classification(classes=2).loss(
        torch.tensor([[0.0, math.log(3)]]), torch.tensor([0])
    ).item() == pytest.approx(math.log(4))
    assert Binary().loss(torch.tensor([[math.log(3)]]), torch.tensor([1])).item() == pytest.approx(math.log(4 / 3))
    assert Regression(outputs=2).loss(torch.tensor([[1.0, 5.0]]), torch.tensor([[0.0, 2.0]])).item() == 5.0


def test_losses_stay_finite_for_large_logits() -> None:
    assert Classification(classes=2).loss(torch.tensor([[1e4, 0.0]]), torch.tensor([1])).item() == 1e4
    assert Binary().loss(torch.tensor([[-1e4]]), torch.tensor([1])).item() == 1e4


@pytest.mark.parametrize("task", TASKS, ids=lambda t: type(t).__name__)
def test_loss_and_gradient_stack_under_vmap(task: Task) -> None:
    output, y = problem(task, 12, 1)
    many, labels = output.view(3, 4, -1), y.view(3, 4, *y.shape[1:])
    for function in (task.loss, task.dloss):
        torch.testing.assert_close(torch.vmap(function)(many, labels), function(many, labels))


def test_classification_by_hand() -> None:
    # client 0: targets 0 0 1, predicted 0 1 1: F1 of class 0 = 2/3, of class 1 = 2/3; client 2: targets 2, predicted 0
    logits = [[2.0, 0, 0], [0, 2.0, 0], [0, 2.0, 0], [2.0, 0, 0]]
    found = per_client(Classification(classes=3), logits, [0, 0, 1, 2], [0, 0, 0, 2], 3)
    assert found["accuracy"] == pytest.approx([2 / 3, math.nan, 0], nan_ok=True)
    assert found["macro_f1"] == pytest.approx([2 / 3, math.nan, 0], nan_ok=True)
    right, wrong = math.log(math.e**2 + 2) - 2, math.log(math.e**2 + 2)
    assert found["loss"] == pytest.approx([(2 * right + wrong) / 3, math.nan, wrong], nan_ok=True, rel=1e-6)


def test_auroc_and_auprc_by_hand_with_ties() -> None:
    # client 0: scores 3+ 2+ 2- 1-: pairs (3>2)(3>1)(2=2)(2>1) = 3.5 of 4; precision 1 at recall 1/2, 2/3 at recall 1
    # client 1: all scores equal, 1 of 4 positive: AUROC 1/2, AUPRC = prevalence
    # client 2: only negatives: undefined; client 3: perfectly wrong
    scores = [[3.0], [2.0], [2.0], [1.0], [5.0], [5.0], [5.0], [5.0], [1.0], [0.5], [-1.0], [1.0]]
    y = [1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]
    found = per_client(Binary(), scores, y, [0] * 4 + [1] * 4 + [2] * 2 + [3] * 2, 4)
    assert found["auroc"] == pytest.approx([3.5 / 4, 0.5, math.nan, 0], nan_ok=True)
    assert found["auprc"] == pytest.approx([0.5 * 1 + 0.5 * 2 / 3, 0.25, math.nan, 0.5], nan_ok=True)


def test_f1_and_calibration_by_hand() -> None:
    logit = [[math.log(p / (1 - p))] for p in (0.9, 0.9, 0.9, 0.1)]
    found = per_client(Binary(), logit, [1, 1, 0, 0], [0, 0, 0, 0], 1)
    assert found["f1"] == pytest.approx([4 / 5])
    assert found["accuracy"] == pytest.approx([3 / 4])
    assert found["calibration_error"] == pytest.approx([0.75 * (0.9 - 2 / 3) + 0.25 * 0.1], rel=1e-6)
    assert math.isnan(per_client(Binary(), [[-1.0]], [0], [0], 1)["f1"][0])


def test_regression_by_hand() -> None:
    found = per_client(Regression(), [[1.0], [2.0], [4.0], [7.0]], [[1.0], [3.0], [5.0], [5.0]], [0, 0, 0, 1], 2)
    assert found["mae"] == pytest.approx([2 / 3, 2])
    assert found["rmse"] == pytest.approx([math.sqrt(2 / 3), 2])
    assert found["loss"] == pytest.approx([2 / 3, 4])
    assert found["r2"] == pytest.approx([1 - 2 / 8, math.nan], nan_ok=True)


def test_r2_of_a_constant_target_is_undefined_despite_rounding() -> None:
    found = per_client(Regression(), [[0.1]] * 7, [[0.3]] * 7, [0] * 7, 1)
    assert math.isnan(found["r2"][0])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), clients=st.integers(1, 5))
def test_each_client_is_scored_as_if_alone_in_any_order(seed: int, clients: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    owner = torch.randint(0, clients, (40,), generator=gen)
    for task in TASKS:
        output, y = problem(task, 40, seed)
        shuffle = torch.randperm(40, generator=gen)
        together = task.metrics(output, y, owner, clients)
        shuffled = task.metrics(output[shuffle], y[shuffle], owner[shuffle], clients)
        for i in range(clients):
            own = owner == i
            alone = task.metrics(output[own], y[own], torch.zeros(int(own.sum()), dtype=torch.int64), 1)
            for name, value in together.items():
                assert value.dtype == torch.float64
                assert value[i].item() == pytest.approx(alone[name].item(), nan_ok=True)
                assert value[i].item() == pytest.approx(shuffled[name][i].item(), nan_ok=True)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_metrics_agree_with_scikit_learn(seed: int) -> None:
    own = torch.zeros(60, dtype=torch.int64)
    output, y = problem(Binary(), 60, seed)
    y[:2] = torch.tensor([0, 1])
    found = {k: v.item() for k, v in Binary().metrics(output, y, own, 1).items()}
    score, label = output[:, 0].numpy(), y.numpy()
    assert found["auroc"] == pytest.approx(reference.roc_auc_score(label, score))
    assert found["auprc"] == pytest.approx(reference.average_precision_score(label, score))
    assert found["f1"] == pytest.approx(reference.f1_score(label, score > 0))
    output, y = problem(Classification(classes=4), 60, seed)
    y[:4] = torch.arange(4)
    f1 = Classification(classes=4).metrics(output, y, own, 1)["macro_f1"].item()
    assert f1 == pytest.approx(reference.f1_score(y.numpy(), np.argmax(output.numpy(), 1), average="macro"))
    output, y = problem(Regression(outputs=3), 60, seed)
    r2 = Regression(outputs=3).metrics(output, y, own, 1)["r2"].item()
    assert r2 == pytest.approx(reference.r2_score(y.numpy(), output.numpy()))


@pytest.mark.parametrize("task", TASKS, ids=lambda t: type(t).__name__)
def test_a_client_with_an_output_that_is_not_finite_has_no_metric(task: Task) -> None:
    output, y = problem(task, 20, 3)
    output[3, 0] = math.nan
    output[17, 0] = math.inf
    owner = torch.arange(20) // 5
    for value in task.metrics(output, y, owner, 4).values():
        assert value[[0, 3]].isnan().all()
    assert task.metrics(output, y, owner, 4)["loss"][1:3].isfinite().all()


def test_task_of_a_data_set() -> None:
    y = torch.zeros(5, 2)
    assert task_of(SimpleNamespace(task="classification", classes=("a", "b", "c"), y=y)) == Classification(classes=3)
    assert task_of(SimpleNamespace(task="binary", classes=("no", "yes"), y=y)) == Binary()
    assert task_of(SimpleNamespace(task="regression", classes=(), y=y)) == Regression(outputs=2)
    with pytest.raises(ConfigError, match="did you mean 'binary'"):
        task_of(SimpleNamespace(task="binery", classes=(), y=y))
