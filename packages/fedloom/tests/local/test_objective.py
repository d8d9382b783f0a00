"""Own losses and class weights in the gradient: by every oracle the same as autograd of the loss that was declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import handwritten
import pytest
import torch
from engine_cases import CASES, TOLERANCE, M, Problem, oracles_of
from torch import Tensor
from torch.nn import functional

import fedloom as fl
from fedloom.errors import CodeError, ConfigError
from fedloom.imports import load_function
from fedloom.local import LocalSGD, Work
from fedloom.local.oracles import Network, make_oracle
from fedloom.seeds import as_global, generator
from fedloom.tasks import Objective, make_task
from fedloom.tasks.chosen import compute_user_number


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)


def coupled(output: Tensor, target: Tensor) -> Tensor:
    """Not a sum over samples."""
    return functional.cross_entropy(output, target) ** 2 + output.logsumexp(0).square().mean()


def work_of(problem: Problem, oracle: str, objective: Objective, **local: Any) -> tuple[Network, Work]:
    found = make_oracle(problem.module, make_task(problem.fed.data, objective), problem.fed, oracle)
    share = torch.full((M, 1), 1 / M)
    return found, Work(found, torch.arange(M), share, LocalSGD(**local), seed=4)


def by_autograd(problem: Problem, loss: Any) -> Tensor:
    """Gradient ``[m, d]`` of ``loss(outputs, y)`` of each client's training part."""
    rows = []
    for i, start in enumerate(problem.start):
        x, y = handwritten.samples(problem.fed, i)
        leaf = start.clone().requires_grad_()
        parameters = {}
        for name, p in problem.module.named_parameters():
            done = sum(v.numel() for v in parameters.values())
            parameters[name] = leaf[done : done + p.numel()].view_as(p)
        out = torch.func.functional_call(problem.module.double().eval(), parameters, (x,))
        rows.append(torch.autograd.grad(loss(out, y), leaf)[0])
    return torch.stack(rows)


def balanced(output: Tensor, y: Tensor) -> Tensor:
    """The mean over the classes of the mean loss of each."""
    return torch.stack([functional.cross_entropy(output[y == c], y[y == c]) for c in y.unique()]).mean()


NUMBERS = (0.5, 2.0, 0.0, 1.5)


def weighted(output: Tensor, y: Tensor) -> Tensor:
    return (functional.cross_entropy(output, y, reduction="none") * torch.tensor(NUMBERS).double()[y]).mean()


def test_the_shapes_of_a_binary_task_are_explained() -> None:
    loss, y = load_function(torch.nn.BCEWithLogitsLoss(), "loss"), torch.tensor([0, 1])
    with pytest.raises(CodeError, match=r"logits and classes. It may need outputs.squeeze\(1\) and targets.float"):
        compute_user_number(loss, "loss", torch.zeros(2, 1), y)


LOSSES: dict[str, tuple[dict[str, Any], Any]] = {
    "own": ({"loss": cross_entropy}, functional.cross_entropy),
    "coupled": ({"loss": coupled}, coupled),
    "balanced": ({"class_weights": "balanced"}, balanced),
    "numbers": ({"class_weights": NUMBERS}, weighted),
    "a tensor": ({"class_weights": torch.tensor(NUMBERS, dtype=torch.float64)}, weighted),
    "by name": ({"class_weights": {"0": 0.5, "1": 2.0, "2": 0.0, "3": 1.5}}, weighted),
    "own, balanced": ({"loss": cross_entropy, "class_weights": "balanced"}, balanced),
    "own, numbers": ({"loss": cross_entropy, "class_weights": NUMBERS}, weighted),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("case", ["softmax", "mlp", "cnn"])
def test_the_gradient_is_that_of_the_declared_loss(case: str, name: str) -> None:
    options, loss = LOSSES[name]
    problem = Problem(CASES[case])
    wanted = by_autograd(problem, loss)
    for oracle in oracles_of(problem):
        _, work = work_of(problem, oracle, Objective(**options), batch_size="full")
        found = work.full_grad(problem.start)
        torch.testing.assert_close(found, wanted, **TOLERANCE)
        batch = work.plan("local", work.steps[:, 0]).batch(0)
        torch.testing.assert_close(work.grad(problem.start, batch), wanted, **TOLERANCE)


@pytest.mark.parametrize("name", LOSSES)
def test_padded_batches_and_the_loss_agree_with_their_gradient(name: str) -> None:
    """Batches of clients of 1, 7, 20 and 53 samples are padded; central differences of the loss give the gradient."""
    problem = Problem(CASES["softmax"])
    for oracle in oracles_of(problem):
        _, work = work_of(problem, oracle, Objective(**LOSSES[name][0]), batch_size=16)
        batch = work.plan("local", work.steps[:, 0].clamp(max=1)).batch(0)
        g, v = work.grad(problem.start, batch), problem.rows
        ahead, behind = (work.loss(problem.start + side * 1e-5 * v, batch) for side in (1, -1))
        slope = (ahead - behind) / 2e-5
        torch.testing.assert_close((g * v).sum(1, keepdim=True), slope, rtol=1e-6, atol=1e-7)


def test_an_own_loss_of_one_number_per_class_has_no_class() -> None:
    problem = Problem(CASES["softmax"], task="regression")
    found, work = work_of(problem, "auto", Objective(loss=functional.mse_loss))
    plain, other = work_of(problem, "auto", Objective())
    assert found.name == plain.name == "compiled"
    torch.testing.assert_close(work.full_grad(problem.start), other.full_grad(problem.start), **TOLERANCE)


def no_mean(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="none")


def summed(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="sum")


def not_a_number(output: Tensor, target: Tensor) -> Tensor:
    return output.mean() * torch.nan


def cut_off(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.detach(), target)


def wrong_shape(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.view(-1, 3)).mean()


def steep(output: Tensor, target: Tensor) -> Tensor:
    return (output - output.detach()).abs().sqrt().sum()


def text(output: Tensor, target: Tensor) -> str:
    return "good"


def unreal(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target).to(torch.complex64)


def upside_down(output: Tensor, target: Tensor) -> Tensor:
    return -functional.cross_entropy(output, target)


def broken(output: Tensor, target: Tensor) -> Tensor:
    found = functional.cross_entropy(output, target).exp()
    found.detach().mul_(2)
    return found


def in_place(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.mul_(2), target)


class Learned(torch.nn.Module):
    """A loss with a parameter, and the parameter's constant twin."""

    def __init__(self, trains: bool = True) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3), requires_grad=trains)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target) + self.scale.square().mean()


@pytest.mark.parametrize(
    ("objective", "sentence"),
    [
        (
            {"loss": Learned()},
            r"loss '.*Learned' depends on tensors that no client trains, of shape \[3\]\. Call detach",
        ),
        ({"loss": unreal}, "has no gradient. Compute the loss from the outputs with real-valued PyTorch functions"),
        ({"loss": in_place}, "the gradient of loss '.*in_place' cannot be computed: RuntimeError: a leaf Variable"),
        ({"loss": broken}, "the gradient of loss '.*broken' cannot be computed: RuntimeError: .*in-?place operation"),
        ({"loss": no_mean}, r"loss '.*no_mean' must return a scalar for a batch, got shape \[32\]"),
        (
            {"loss": summed},
            r"loss '.*summed' is a sum instead of a mean: .*32 samples.*Make task.loss return the mean over the batch",
        ),
        ({"loss": not_a_number}, "loss '.*not_a_number' is nan on 32 samples with the initial model. The loss"),
        ({"loss": cut_off}, "has no gradient. Compute the loss from the outputs"),
        ({"loss": functional.nll_loss}, "nll_loss' has no lower bound for this model"),
        ({"loss": upside_down}, "upside_down' has no lower bound for this model"),
        ({"loss": steep}, "the gradient of loss '.*steep' is not finite"),
        (
            {"loss": wrong_shape},
            r"fails on outputs \[32, 4\] with targets \[32\]: RuntimeError: shape.*test_objective.py, line \d+",
        ),
        ({"loss": text}, "fails on .*ValueError: could not convert"),
        ({"metrics": [no_mean]}, r"metric '.*no_mean' must return a scalar for each batch, got shape \[32\]"),
    ],
)
def test_what_cannot_work_is_a_sentence_before_work_starts(objective: dict[str, Any], sentence: str) -> None:
    problem = Problem(CASES["softmax"])
    with pytest.raises(ConfigError, match=sentence):
        make_oracle(problem.module, make_task(problem.fed.data, Objective(**objective)), problem.fed)


@pytest.mark.parametrize(
    "end",
    [
        torch.tanh,
        torch.sigmoid,
        functional.normalize,
        functional.logsigmoid,
        lambda output: output.softmax(-1),
        lambda output: output.log_softmax(-1),
        lambda output: -output.square(),
    ],
)
def test_a_falling_loss_is_taken_if_the_outputs_of_the_model_are_bounded(end: Callable[[Tensor], Tensor]) -> None:
    class Ended(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return end(super().forward(x))

    fed, objective = Problem(CASES["softmax"]).fed, Objective(loss=functional.nll_loss)
    with as_global(generator(0, purpose="test"), torch.device("cpu")):
        module = Ended(fed.data.shape[0], 4)
    oracle = make_oracle(module, make_task(fed.data, objective), fed)
    assert torch.equal(oracle.layout.vector(oracle.module), oracle.layout.vector(module.to(oracle.dtype)))


@pytest.mark.parametrize("seed", range(8))
def test_a_falling_loss_is_refused_whatever_the_signs_of_the_initial_outputs_are(seed: int) -> None:
    fed, objective = Problem(CASES["softmax"]).fed, Objective(loss=functional.nll_loss)
    with as_global(generator(seed, purpose="test"), torch.device("cpu")):
        module = torch.nn.Sequential(torch.nn.Linear(fed.data.shape[0], 3), torch.nn.ReLU(), torch.nn.Linear(3, 4))
    torch.nn.init.constant_(module[2].bias, -100)
    with pytest.raises(ConfigError, match="nll_loss' has no lower bound"):
        make_oracle(module, make_task(fed.data, objective), fed)


def test_a_loss_may_have_constants() -> None:
    problem = Problem(CASES["softmax"])
    make_oracle(problem.module, make_task(problem.fed.data, Objective(loss=Learned(trains=False))), problem.fed)


PAIRED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared": lambda output, target: (output.squeeze(1) - target.flatten()).square().mean(),
    "cross-entropy": lambda output, target: functional.binary_cross_entropy_with_logits(output, target.view(-1, 1) / 2),
    "of probabilities": lambda output, target: functional.binary_cross_entropy(
        output.sigmoid(), target.view(-1, 1).to(output).clamp(0, 1)
    ),
    "absolute": lambda output, target: functional.l1_loss(output.flatten(), target.flatten().to(output.dtype)),
    "of a quantile": lambda output, target: (
        (target.flatten() - output.squeeze(1)) * (0.9 - (target.flatten() < output.squeeze(1)).float())
    ).mean(),
    "of counts": lambda output, target: functional.poisson_nll_loss(output, target.view(-1, 1).to(output)),
    "of a margin": lambda output, target: (1 - (2 * target.flatten() - 1) * output.flatten()).relu().mean(),
    "robust": lambda output, target: functional.smooth_l1_loss(output.flatten(), target.flatten().to(output.dtype)),
    "blind to targets": lambda output, target: output.square().mean(),
}


@pytest.mark.parametrize("task", ["binary", "regression"])
@pytest.mark.parametrize("loss", PAIRED)
def test_a_loss_that_pairs_outputs_with_targets_is_taken(loss: str, task: Any) -> None:
    x = torch.rand(40, 3)
    fed = fl.Federation.create([(x, torch.arange(40) % 2 if task == "binary" else 1000 + x[:, :1])], task=task)
    fl.simulate("fedavg", fed, rounds=1, task={"loss": PAIRED[loss]}, local={"lr": 1e-6})


@pytest.mark.parametrize("task", ["binary", "regression"])
def test_a_loss_that_pairs_every_output_with_every_target_is_refused(task: Any) -> None:
    def crossed(output: Tensor, target: Tensor) -> Tensor:
        return ((output if task == "binary" else output.squeeze(1)) - target).square().mean()

    x = torch.rand(40, 3)
    fed = fl.Federation.create([(x, torch.arange(40) % 2 if task == "binary" else x[:, :1])], task=task)
    with pytest.raises(ConfigError, match="ignores the pairing of outputs and targets, for example because"):
        fl.simulate("fedavg", fed, rounds=1, task={"loss": crossed})
