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
from torch.nn import functional

from fedloom.errors import ConfigError
from fedloom.metrics import metric
from fedloom.tasks import Binary, Classification, Count, MultiLabel, Objective, Regression, Task, make_task
from fedloom.tasks.sums import compute_metrics, compute_sums
from fedloom.values import dump_value

TASKS: list[Task] = [Classification(classes=4), Binary(), Regression(outputs=3), MultiLabel(labels=("a", "b", "c"))]


def problem(task: Task, samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    output = torch.randn(samples, task.outputs, generator=gen, dtype=torch.float64).mul(4).round().div(4)  # with ties
    if isinstance(task, Regression):
        return output, torch.randn(samples, task.outputs, generator=gen, dtype=torch.float64)
    if isinstance(task, MultiLabel):
        return output, torch.randint(0, 2, (samples, task.outputs), generator=gen).double()
    return output, torch.randint(0, max(task.outputs, 2), (samples,), generator=gen)


def per_client(task: Task, output: list[list[float]], y: list, owner: list[int], n: int) -> dict[str, list[float]]:
    found = task.metrics(torch.tensor(output), torch.tensor(y), torch.tensor(owner), n)
    return {name: value.tolist() for name, value in found.items()}


@pytest.mark.parametrize("task", TASKS, ids=lambda t: type(t).__name__)
@pytest.mark.parametrize("stack", [(), (2,), (2, 3)])
def test_dloss_is_the_gradient_of_each_samples_loss(task: Task, stack: tuple[int, ...]) -> None:
    output, y = problem(task, 30, 0)
    output = output.view(*stack, -1, task.outputs).requires_grad_()
    y = y.view(output.shape if isinstance(task, Regression | MultiLabel) else output.shape[:-1])
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


@pytest.mark.parametrize("value", [-4.217259168595231, 0.3, 1e-3, 7.7e6])
def test_r2_of_a_constant_target_has_no_value_from_sums_either(value: float) -> None:
    task, noise = Regression(outputs=1), torch.randn(40, 1, generator=torch.Generator().manual_seed(0))
    for n in range(2, 41):
        y = torch.full((n, 1), value)
        assert "r2" not in compute_metrics(task, compute_sums(task, y + noise[:n], y))
    y = value * (1 + 1e-5 * torch.arange(40.0, dtype=torch.float64)[:, None])
    wanted = task.metrics(y * 0, y, torch.zeros(40, dtype=torch.long), 1)["r2"].item()
    assert compute_metrics(task, compute_sums(task, y * 0, y))["r2"] == pytest.approx(wanted, rel=1e-4)


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
    assert make_task(SimpleNamespace(task="classification", classes=("a", "b", "c"), y=y)) == Classification(classes=3)
    assert make_task(SimpleNamespace(task="binary", classes=("no", "yes"), y=y)) == Binary()
    assert make_task(SimpleNamespace(task="regression", classes=(), y=y)) == Regression(outputs=2)
    with pytest.raises(ConfigError, match="did you mean 'binary'"):
        make_task(SimpleNamespace(task="binery", classes=(), y=y))


FURTHER = ("balanced_accuracy", "recall", "precision", "macro_precision", "brier")
MORE = (*FURTHER, "auroc_ovr", "auprc_ovr", "calibration_error", "perplexity")


def chosen(base: Task, **objective: object) -> Task:
    classes = {
        Classification: tuple("abcd"), Binary: ("no", "yes"), Regression: (), MultiLabel: tuple("abc"),
    }[type(base)]  # fmt: skip
    kind = {
        Classification: "classification", Binary: "binary", Regression: "regression", MultiLabel: "multilabel",
    }[type(base)]  # fmt: skip
    return make_task(
        SimpleNamespace(task=kind, classes=classes, y=torch.zeros(1, base.outputs)), Objective(**objective)
    )


def top_gap(output: torch.Tensor, y: torch.Tensor) -> float:
    """Smallest distance of the first output to the number of the target; nan for a single sample."""
    return float((output[:, 0] - y).abs().min()) if len(y) > 1 else math.nan


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_metrics_of_classes_agree_with_scikit_learn(seed: int) -> None:
    own = torch.zeros(60, dtype=torch.int64)
    output, y = problem(TASKS[0], 60, seed)
    y[:4] = torch.arange(4)
    found = {k: v.item() for k, v in chosen(TASKS[0], metrics=MORE).metrics(output, y, own, 1).items()}
    p, label, guess = output.softmax(-1).numpy(), y.numpy(), output.argmax(1).numpy()
    each = np.eye(4)[label]
    assert found["balanced_accuracy"] == pytest.approx(reference.balanced_accuracy_score(label, guess))
    assert found["auroc_ovr"] == pytest.approx(reference.roc_auc_score(label, p, multi_class="ovr"))
    assert found["auprc_ovr"] == pytest.approx(reference.average_precision_score(each, p))
    assert found["brier"] == pytest.approx(((p - each) ** 2).sum(1).mean())
    assert found["perplexity"] == pytest.approx(math.exp(reference.log_loss(label, p)))
    known = {"zero_division": math.nan, "average": None}
    recall, precision = (f(label, guess, **known) for f in (reference.recall_score, reference.precision_score))
    assert [found[f"recall[{c}]"] for c in "abcd"] == pytest.approx(list(recall))
    assert [found[f"precision[{c}]"] for c in "abcd"] == pytest.approx(list(precision), nan_ok=True)
    assert found["macro_precision"] == pytest.approx(np.nan_to_num(precision).mean())
    output, y = problem(Binary(), 60, seed)
    y[:2] = torch.tensor([0, 1])
    found = {k: v.item() for k, v in chosen(Binary(), metrics=FURTHER).metrics(output, y, own, 1).items()}
    score, label = output[:, 0].sigmoid().numpy(), y.numpy()
    assert found["brier"] == pytest.approx(reference.brier_score_loss(label, score))
    assert found["recall[yes]"] == pytest.approx(reference.recall_score(label, score > 0.5))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_metrics_of_labels_agree_with_scikit_learn(seed: int) -> None:
    task = TASKS[3]
    z, y = problem(task, 60, seed)
    y[:2] = torch.tensor([[0.0], [1.0]])
    found = chosen(task, metrics=task.further).metrics(z, y, torch.zeros(60, dtype=torch.long), 1)
    figures = {name: value.item() for name, value in found.items()}
    score, guess, label = z.sigmoid().numpy(), (z > 0).long().numpy(), y.long().numpy()
    for average in ("micro", "macro"):
        assert figures[f"{average}_f1"] == pytest.approx(reference.f1_score(label, guess, average=average))
    assert figures["macro_auroc"] == pytest.approx(reference.roc_auc_score(label, score))
    assert figures["macro_auprc"] == pytest.approx(reference.average_precision_score(label, score))
    assert figures["exact_match"] == pytest.approx(reference.accuracy_score(label, guess))
    assert figures["loss"] == pytest.approx(functional.binary_cross_entropy_with_logits(z, y).item())
    each = {
        "label_auroc": reference.roc_auc_score(label, score, average=None),
        "label_auprc": reference.average_precision_score(label, score, average=None),
        "label_f1": reference.f1_score(label, guess, average=None),
        "recall": reference.recall_score(label, guess, average=None),
        "precision": reference.precision_score(label, guess, average=None, zero_division=math.nan),
    }
    for name, values in each.items():
        assert [figures[f"{name}[{c}]"] for c in "abc"] == pytest.approx(list(values), nan_ok=True), name


def test_a_client_without_a_class_says_nothing_of_it() -> None:
    # client 0: classes 0 and 1, of which 1 is never found; client 1: class 2 only; client 2: nobody
    logits = torch.eye(4)[[0, 0, 0, 2]] * 3
    found = chosen(TASKS[0], metrics=MORE).metrics(logits, torch.tensor([0, 1, 0, 2]), torch.tensor([0, 0, 0, 1]), 3)
    assert found["recall[a]"].tolist() == pytest.approx([1, math.nan, math.nan], nan_ok=True)
    assert found["recall[b]"].tolist() == pytest.approx([0, math.nan, math.nan], nan_ok=True)
    assert found["precision[b]"].isnan().all()
    assert found["balanced_accuracy"].tolist() == pytest.approx([0.5, 1, math.nan], nan_ok=True)
    assert found["macro_precision"].tolist() == pytest.approx([1 / 3, 1, math.nan], nan_ok=True)
    assert found["auroc_ovr"].tolist() == pytest.approx([0.5, math.nan, math.nan], nan_ok=True)


def test_calibration_of_several_classes_is_that_of_the_class_that_was_predicted() -> None:
    logits = torch.tensor([[0.9, 0.05, 0.03, 0.02]] * 4).log()
    found = chosen(TASKS[0], metrics=("calibration_error",)).metrics(
        logits, torch.tensor([0, 0, 1, 2]), torch.zeros(4).long(), 1
    )
    assert found["calibration_error"].item() == pytest.approx(0.9 - 0.5, rel=1e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), clients=st.integers(1, 5))
def test_an_own_task_scores_each_client_as_if_alone(seed: int, clients: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    owner = torch.randint(0, clients, (40,), generator=gen)
    for base, names in ((TASKS[0], MORE), (TASKS[1], FURTHER)):
        task, (output, y) = chosen(base, metrics=(*names, top_gap)), problem(base, 40, seed)
        output[3] = math.nan
        together = task.metrics(output, y, owner, clients)
        for i in range(clients):
            own = owner == i
            alone = task.metrics(output[own], y[own], torch.zeros(int(own.sum()), dtype=torch.int64), 1)
            assert {k: v[i].item() for k, v in together.items()} == pytest.approx(
                {k: v.item() for k, v in alone.items()}, nan_ok=True
            )
        assert together["top_gap"][owner[3]].isnan()


RANKED = {
    *("auroc", "auprc", "auroc_ovr", "auprc_ovr", "calibration_slope", "calibration_intercept", "exact_match"),
    *("macro_auroc", "macro_auprc", *(f"label_{area}[{c}]" for area in ("auroc", "auprc") for c in "abc")),
}


@pytest.mark.parametrize("task", [*TASKS, Count()], ids=lambda t: type(t).__name__)
@pytest.mark.parametrize("seed", range(3))
def test_sums_of_parts_give_the_metrics_of_all(task: Task, seed: int) -> None:
    """Whatever the cut, the sum of the parts' sums has every metric of all samples but those that rank them."""
    measured = task if isinstance(task, Count) else chosen(task, metrics=task.further)
    output, y = problem(task, 60, seed)
    y = y[:, None] if isinstance(task, Count) else y
    owner = torch.randint(4, (60,), generator=torch.Generator().manual_seed(seed))
    total = torch.stack([compute_sums(measured, output[owner == k], y[owner == k]) for k in range(5)]).sum(0)
    assert float(total[0]) == 60
    figures = compute_metrics(measured, total)
    wanted = measured.metrics(output, y, torch.zeros(60, dtype=torch.long), 1)
    assert set(wanted) - set(figures) <= RANKED
    for name, figure in figures.items():
        assert figure == pytest.approx(float(wanted[name]), abs=1e-12), name
    assert compute_metrics(measured, torch.zeros_like(total)) == {}


def test_an_own_metric_has_its_name_and_direction() -> None:
    task = chosen(Binary(), metrics=(top_gap, "brier"))
    assert list(task.metrics(*problem(Binary(), 9, 0), torch.zeros(9).long(), 1))[-2:] == ["brier", "top_gap"]
    assert (metric("top_gap").higher_is_better, metric("brier").higher_is_better) == (True, False)
    top_gap.higher_is_better = False
    try:
        chosen(Binary(), metrics=(top_gap,))
        assert not metric("top_gap").higher_is_better
    finally:
        del top_gap.higher_is_better


WRONG: list[tuple[Task, dict[str, object], str]] = [
    (TASKS[0], {"metrics": ("acuracy",)}, "did you mean 'accuracy'"),
    (TASKS[2], {"metrics": ("brier",)}, "'brier' is not defined for a regression. Allowed: loss, mae, rmse, r2"),
    (TASKS[1], {"metrics": ("auroc_ovr",)}, "not defined for a binary"),
    (TASKS[1], {"metrics": (top_gap, top_gap)}, "two metrics are called 'top_gap'"),
    (TASKS[1], {"metrics": (lambda output, y: 0.0,)}, "has no name. Define the metric as a named function"),
    (TASKS[0], {"class_weights": (1.0, 2.0)}, r"contains 2 numbers for 4 classes \(a, b, c, d\)"),
    (TASKS[0], {"class_weights": {"e": 1.0}}, "unknown class 'e'; allowed: a, b, c, d"),
    (TASKS[2], {"class_weights": "balanced"}, "requires a classification task"),
    (TASKS[0], {"class_weights": "balance"}, "must be 'balanced', a list .*got 'balance'"),
    (TASKS[0], {"class_weights": (0, 0, 0, 0)}, "not all of them 0"),
    (TASKS[0], {"class_weights": (1, -1, 1, 1)}, "at least 0"),
    (TASKS[0], {"class_weights": ("a",)}, "must be 'balanced', a list"),
    (TASKS[0], {"loss": 3}, "an import path, package.module:name, or a function, got 3"),
    (TASKS[0], {"loss": "torch.nn.functional:cross_entrpy"}, "did you mean 'cross_entropy'"),
    (TASKS[0], {"loss": "torch.nn:NLLLoss2d2"}, "has no 'NLLLoss2d2'"),
    (TASKS[0], {"loss": torch.nn.Linear}, "cannot be created without arguments"),
]


@pytest.mark.parametrize(("base", "objective", "sentence"), WRONG, ids=lambda v: v if isinstance(v, str) else "")
def test_a_wrong_objective_is_a_sentence(base: Task, objective: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        chosen(base, **objective)


def test_an_objective_is_written_with_names() -> None:
    def here(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return output.mean()

    path = "torch.nn.functional:cross_entropy"
    written = dump_value(Objective(loss=torch.nn.functional.cross_entropy, metrics=("brier",), class_weights={"a": 2}))
    assert written == {"loss": path, "metrics": ["brier"], "class_weights": {"a": 2.0}, "calibrate": False}
    assert dump_value(Objective(**written)) == written
    held = dump_value(Objective(loss=here))["loss"]
    assert held.startswith("here ")
    assert dump_value(Objective(loss=here))["loss"] == held
    assert dump_value(Objective(loss=torch.nn.CrossEntropyLoss(label_smoothing=0.1))) != dump_value(
        Objective(loss=torch.nn.CrossEntropyLoss())
    )


def test_macro_f1_of_two_classes_is_that_of_scikit_learn_and_a_function_of_its_name_gets_a_sentence() -> None:
    g = torch.Generator().manual_seed(3)
    z, y = torch.randn(40, 1, generator=g, dtype=torch.float64), torch.randint(0, 2, (40,), generator=g)
    data = SimpleNamespace(task="binary", classes=("no", "yes"), y=y)
    task = make_task(data, Objective(metrics=("macro_f1",)))
    value = task.metrics(z, y, torch.zeros(40, dtype=torch.long), 1)["macro_f1"]
    assert float(value) == pytest.approx(reference.f1_score(y, z[:, 0] > 0, average="macro"), abs=1e-12)

    def macro_f1(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return 0.0

    with pytest.raises(
        ConfigError, match="'macro_f1' has the same name as a fedloom metric.* for example to my_macro_f1"
    ):
        Objective(metrics=(macro_f1,))
