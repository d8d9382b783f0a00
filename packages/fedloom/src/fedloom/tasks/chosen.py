"""A data set's task, which can be combined with a user-defined loss, class weights and metrics."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from fedloom.errors import CodeError, ConfigError, FedloomError, FunctionError, describe_cause
from fedloom.hints import unknown_name_error
from fedloom.imports import UserFunction
from fedloom.metrics import declare
from fedloom.tasks.calibration import calibration
from fedloom.tasks.figures import (
    class_metrics,
    label_metrics,
    mask_nonfinite_clients,
    owner_mean,
    select_labelled,
    to_float64,
)
from fedloom.tasks.kinds import Binary, Classification, Count, MultiLabel, Regression, Task
from fedloom.tasks.objective import Objective
from fedloom.tasks.survival import Survival

TASK_LOG = logging.getLogger("fedloom")

BuiltinTask = Classification | Binary | MultiLabel | Regression | Survival | Count
Kinds = Literal["classification", "binary", "multilabel", "regression", "survival", "count"]


class LabeledData(Protocol):
    """Fields of a data set that `make_task` uses."""

    @property
    def task(self) -> Kinds:
        """Kind of prediction."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        ...

    @property
    def y(self) -> Tensor:
        """Targets of all samples."""
        ...


def make_task(dataset: LabeledData, objective: Objective = Objective()) -> Task:  # noqa: B008  # frozen
    """Return the task that a data set declares, combined with the user's own objective.

    Raises:
        ConfigError: the data set's ``task`` is unknown, or the task does not support the objective's metrics, class
            weights or horizon.
    """
    base: BuiltinTask
    match dataset.task:
        case "classification":
            base = Classification(classes=len(dataset.classes))
        case "binary":
            base = Binary()
        case "multilabel":
            base = MultiLabel(labels=tuple(dataset.classes))
        case "regression":
            base = Regression(outputs=dataset.y.shape[1])
        case "survival":
            base = Survival(horizon=objective.horizon)
        case "count":
            base = Count()
        case other:
            raise unknown_name_error("task", other, get_args(Kinds))
    return base if objective == Objective() else ChosenTask.create(base, objective, tuple(dataset.classes))


@dataclass(frozen=True)
class ChosenTask:
    """Task combined with a user-defined loss, metrics or class weights (see `Task`).

    Attributes:
        base: task that the data set declares.
        objective: loss, metrics and class weights chosen by the user.
        classes: names of the classes. If the targets are numbers, this is empty.
        extra: metrics of fedloom that are computed only on request.
    """

    base: BuiltinTask
    objective: Objective
    classes: tuple[str, ...]
    extra: tuple[str, ...]

    @classmethod
    def create(cls, base: BuiltinTask, objective: Objective, classes: tuple[str, ...]) -> ChosenTask:
        """Check the user's choices, and return the task.

        Raises:
            ConfigError: a metric is incompatible with this task, two metrics have the same name, or the weights do not
                match the classes.
        """
        measured = base.metrics(torch.zeros(0, base.outputs), _blank_outputs(base), torch.zeros(0, dtype=torch.long), 1)
        named = [m for m in objective.metrics if isinstance(m, str)]
        for name in named:
            if name not in (*measured, *base.further):
                raise ConfigError(
                    f"task.metrics: {name!r} is not defined for a {type(base).__name__.lower()}. "
                    f"Allowed: {', '.join((*measured, *base.further))}",
                    rule="metric-undefined",
                    fix="omit {task.metrics}, or name other metrics",
                )
        own_names = [m.short for m in objective.metrics if isinstance(m, UserFunction)]
        twice = next((name for name in own_names if own_names.count(name) > 1), None)
        if twice:
            raise ConfigError(f"task.metrics: two metrics are called {twice!r}. Rename one function")
        _check_weights(objective.class_weights, classes)
        if objective.class_weights is not None and objective.loss is not None and isinstance(base, MultiLabel):
            raise ConfigError(
                "task.class_weights: a custom loss of a multilabel task is a scalar for all labels, so "
                "individual labels cannot be weighted. Omit task.class_weights, and weight the labels inside the "
                "loss, like pos_weight in torch.nn.BCEWithLogitsLoss"
            )
        if objective.calibrate and not isinstance(base, Binary):
            raise ConfigError(
                "task.calibrate works only for binary tasks",
                rule="calibrate-needs-two-classes",
                fix="omit {task.calibrate}",
            )
        if objective.horizon is not None and not isinstance(base, Survival):
            raise ConfigError(
                "task.horizon works only for survival tasks",
                rule="horizon-needs-survival",
                fix="omit {task.horizon}, or name the event column in {data.event}",
            )
        declare(objective.directions)
        return cls(base, objective, classes, tuple(n for n in dict.fromkeys(named) if n not in measured))

    @property
    def outputs(self) -> int:
        return self.base.outputs

    @property
    def own_loss(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        return self.base.own_loss if self.objective.loss is None else self.objective.loss.call

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return self.base.loss(output, y)

    def dloss(self, output: Tensor, y: Tensor) -> Tensor:
        return self.base.dloss(output, y)

    def label_losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each label of a multilabel task (see `MultiLabel.label_losses`)."""
        assert isinstance(self.base, MultiLabel)
        return self.base.label_losses(output, y)

    def predict(self, output: Tensor) -> Tensor:
        return self.base.predict(output)

    def class_weights(self, counts: Tensor) -> Tensor | None:
        """Return the loss factors ``[n, C]`` of each client's training samples.

        In a multilabel task, the result contains a factor for an absent and for a present label, ``[n, k, 2]``. If all
        factors are 1, the result is None.

        Args:
            counts: number of training samples of each client in each class, ``[n, C]``, or of samples without and with
                each label, ``[n, k, 2]``. With 'balanced', the mean factor over a client's samples is 1.
        """
        weights = self.objective.class_weights
        if weights is None:
            return None
        if weights == "balanced":
            size, present = counts.sum(-1, keepdim=True).double(), (counts > 0).sum(-1, keepdim=True)
            return torch.where(counts > 0, size / (present * counts.clamp(min=1)), 0.0)
        if isinstance(weights, Mapping):
            weights = [weights.get(name, 1.0) for name in self.classes]
        factors = torch.tensor(weights, dtype=torch.float64)
        if isinstance(self.base, MultiLabel):
            factors = torch.stack([torch.ones_like(factors), factors], 1)
        return factors.expand(counts.shape)

    def metrics(self, output: Tensor, y: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
        """Compute the metrics of the task, followed by the metrics that the user requested (see `Task.metrics`)."""
        output, y, owner = select_labelled(output, y, owner)
        figures = self.base.metrics(output, y, owner, n)
        z, target, who = to_float64(output), y.cpu(), owner.cpu()
        more: dict[str, Tensor] = {}
        if isinstance(self.base, Classification | Binary):
            p, guess = self.base.probabilities(z), self.base.predict(z)
            more = class_metrics(self.extra, p, guess, target, who, n, metric_labels(self.classes))
        if isinstance(self.base, MultiLabel):
            more = label_metrics(self.extra, z, to_float64(target), who, n, metric_labels(self.classes))
        if calibration_metrics := {"calibration_slope", "calibration_intercept"} & {*self.extra}:
            more |= {
                name: value for name, value in calibration(z, target, who, n).items() if name in calibration_metrics
            }
        if "perplexity" in self.extra:
            more["perplexity"] = owner_mean(self.base.loss(z, target), who, n).exp()
        if self.objective.loss is not None:
            more["loss"] = _score_each_client(self.objective.loss, "loss", output.detach(), y, owner, n)
        for scorer in self.objective.metrics:
            if isinstance(scorer, UserFunction):
                more[scorer.short] = _score_each_client(scorer, "metric", z, target, who, n)
        return {**figures, **mask_nonfinite_clients(more, z, who, n)}


def metric_labels(classes: Sequence[str]) -> list[str]:
    """Return class names as parts of metric names: at most 40 characters, without slashes or brackets, all different.

    >>> metric_labels(["a/b", "a b", "a_b"])
    ['a_b', 'a b', 'a_b 2']
    """
    names_of_metrics: list[str] = []
    for k, name in enumerate(classes):
        text = re.sub(r"[^\w .+-]", "_", name)[:40]
        names_of_metrics.append(f"{text} {k}" if text in names_of_metrics else text)
    return names_of_metrics


def _blank_outputs(base: BuiltinTask) -> Tensor:
    if isinstance(base, Classification | Binary):
        return torch.zeros(0, dtype=torch.long)
    return torch.zeros(0, 2 if isinstance(base, Survival) else base.outputs)


def _check_weights(weights: object, classes: tuple[str, ...]) -> None:
    if weights is not None and not classes:
        raise ConfigError(
            "task.class_weights requires a classification task",
            rule="class-weights-need-classes",
            fix="omit {task.class_weights}",
        )
    if isinstance(weights, Mapping):
        for name in weights:
            if name not in classes:
                raise unknown_name_error("class", name, classes, "task.class_weights")
    elif isinstance(weights, tuple) and len(weights) != len(classes):
        raise ConfigError(
            f"task.class_weights contains {len(weights)} numbers for {len(classes)} classes ({', '.join(classes[:8])})",
            rule="class-weights-of-other-classes",
            fix="set {task.class_weights} to one number per class, in this order",
        )


def _score_each_client(scorer: UserFunction, what: str, output: Tensor, y: Tensor, owner: Tensor, n: int) -> Tensor:
    """Call a user's function on the samples of each client, and return its results, float64 ``[n]``.

    A result is NaN if the client has no samples or its outputs are not finite.

    Every metric is tested on samples before the first round. If it later fails at a client, its value is NaN and the
    failure is logged once. For example, a metric for two classes fails at a client that has only one class. Models do
    not depend on this value.
    """
    values = torch.full((n,), math.nan, dtype=torch.float64)
    order = owner.to(output.device).argsort(stable=True)
    sizes = torch.bincount(owner.cpu(), minlength=n).tolist()
    for i, index in enumerate(order.split(sizes)):
        if len(index) and bool(output[index].isfinite().all()):
            try:
                values[i] = compute_user_number(scorer, what, output[index], y.to(output.device)[index])
            except CodeError as error:
                if what != "metric":
                    raise
                _warn_about_metric(scorer.display_name, f"{error}")
    return values


@lru_cache(maxsize=64)
def _warn_about_metric(_name: str, sentence: str) -> None:
    """Log, once per process, that a metric could not be computed."""
    TASK_LOG.warning("%s. The value is NaN in these cases, and the run continues", sentence)


def compute_user_number(scorer: UserFunction, what: str, output: Tensor, y: Tensor) -> float:
    """Return the scalar that a user-defined loss or metric computes for a batch.

    Raises:
        FunctionError: the function fails, or does not return a scalar.
    """
    try:
        with torch.no_grad():
            value: Any = scorer.call(output, y)
        size = getattr(value, "shape", ())
        if len(size):
            raise FunctionError(
                f"{what} {scorer.display_name!r} must return a scalar for each batch, got shape "
                f"{[*size]}. Reduce the result, for example to its mean"
            )
        return float(value)
    except FedloomError:
        raise
    except Exception as error:
        cure = ". It is called with (outputs, targets)"
        if output.shape == (len(y), 1) and y.ndim == 1:
            cure += ", here logits and classes. It may need outputs.squeeze(1) and targets.float()"
        raise FunctionError(
            f"{what} {scorer.display_name!r} fails on outputs {[*output.shape]} with targets {[*y.shape]}: "
            f"{describe_cause(error)}{cure}"
        ) from error
