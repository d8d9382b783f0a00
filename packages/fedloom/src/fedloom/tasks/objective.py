"""Objective: loss, class weights and metrics that a user specifies in addition to the data set's task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema
from torch import Tensor

from fedloom.hints import unknown_name_error
from fedloom.imports import IMPORT_PATH_PATTERN, UserFunction, is_path, load_function
from fedloom.metrics import METRICS
from fedloom.tasks.calibration import recalibration
from fedloom.tasks.survival import fit_baseline
from fedloom.values import Value


def _check_metric(choice: object) -> str | UserFunction:
    """Check a metric, which is a name in `fedloom.metrics.METRICS` or a user-defined function."""
    if isinstance(choice, str) and not is_path(choice):
        if choice not in METRICS:
            raise unknown_name_error("metric", choice, METRICS)
        return choice
    measure = load_function(choice, "metric")
    if measure.short in METRICS:
        raise ValueError(
            f"metric {measure.short!r} has the same name as a fedloom metric. To use fedloom's metric, pass the name "
            f"{measure.short!r}; to use your own, rename your function, for example to my_{measure.short}"
        )
    if not measure.short.isidentifier():
        raise ValueError(
            f"metric {measure.short!r} has no name. Define the metric as a named function, def my_metric(...)"
        )
    return measure


def _check_class_weights(weights: Any) -> Any:
    """Check class weights, which are "balanced", a list of numbers, or a table of numbers by class."""
    weights = weights.tolist() if hasattr(weights, "tolist") else weights
    values = list(weights.values()) if isinstance(weights, Mapping) else weights
    if weights is None or (isinstance(weights, str) and weights == "balanced"):
        return weights
    numbers = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
    if not numbers or any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
        raise ValueError(
            f"must be 'balanced', a list with one number per class, or a table class = number, got {weights!r}"
        )
    if not all(math.isfinite(v) and v >= 0 for v in values) or not any(values):
        raise ValueError(f"must be finite numbers of at least 0, not all of them 0, got {weights!r}")
    return {str(k): float(v) for k, v in weights.items()} if isinstance(weights, Mapping) else tuple(map(float, values))


def _serialize_name(value: object) -> Any:
    return value.name if isinstance(value, UserFunction) else value


NAMED_SERIALIZER = PlainSerializer(_serialize_name)
OwnFunction = Annotated[
    Any, PlainValidator(lambda loss: None if loss is None else load_function(loss, "loss")), NAMED_SERIALIZER,
    WithJsonSchema({"type": "string", "pattern": IMPORT_PATH_PATTERN}),
]  # fmt: skip
MetricFunction = Annotated[Any, PlainValidator(_check_metric), NAMED_SERIALIZER, WithJsonSchema({"type": "string"})]
Weights = Annotated[
    Any,
    PlainValidator(_check_class_weights),
    WithJsonSchema({"anyOf": [{"const": "balanced"}, {"type": "array"}, {"type": "object"}]}),
]


class Objective(Value):
    """Training loss and metrics that differ from the defaults for this kind of target.

    A custom loss receives the outputs ``[b, k]`` of a batch and its targets. The targets are ``[b]``, or ``[b, k]`` for
    a regression. For sequences with a label per position, only positions with a label are passed. The loss returns a
    scalar, the mean over the batch. Its gradient is computed by autograd. A custom metric receives outputs and targets
    for all samples of one client (float64, on the CPU). The metric returns a scalar, or NaN if it is undefined. Larger
    values are considered better unless the function sets ``higher_is_better = False``.

    Class weights are used only in training, and are ignored in evaluation. With "balanced", class c at a client has the
    weight n / (C n_c), where n is the number of the client's training samples, n_c is the number of these samples in
    class c, and C is the number of classes that the client has. Clients do not send their class counts, so that a
    deployment trains exactly as a simulation does. In a multilabel task, every label is weighted separately: "balanced"
    treats the samples with the label and the samples without it as two classes, and a list or table contains one number
    per label, by which the loss of a present label is multiplied (``pos_weight`` of ``torch.nn.BCEWithLogitsLoss``).
    """

    loss: OwnFunction = Field(None, description="custom loss: an import path, or a function")
    metrics: tuple[MetricFunction, ...] = Field(
        (), description="additional metrics: names, or import paths of custom metrics"
    )
    class_weights: Weights = Field(
        None,
        description="class weights in the training loss: 'balanced' (at each client), a list, or a table. In a "
        "multilabel task, weights of positive labels",
    )
    calibrate: bool = Field(
        False, description="recalibrate the models of a binary task at each client, using the client's validation set"
    )

    horizon: float | None = Field(
        None,
        gt=0,
        description="time horizon, in the same unit as the times: a survival task predicts whether the event occurs "
        "by this time",
    )

    @property
    def line_part(self) -> Literal["train", "validation"] | None:
        """Part of a client's samples used to fit the slope and intercept of `line`.

        None if outputs are not recalibrated.
        """
        return "validation" if self.calibrate else None if self.horizon is None else "train"

    def line(self, output: Tensor, y: Tensor, owner: Tensor, n: int) -> Tensor:
        """Return the slope and intercept that recalibrate each client's outputs, ``[n, 2]``.

        The slopes and intercepts are computed by `fedloom.tasks.calibration.recalibration` or, with a horizon, by
        `fedloom.tasks.survival.fit_baseline`.
        """
        if self.horizon is None:
            return recalibration(output, y, owner, n)
        return fit_baseline(output, y, owner, n, self.horizon)

    def remarks(self, kind: str) -> list[str]:
        """Return notes that a user should read before a run of a task ``kind``, such as "binary"."""
        if self.class_weights is None or self.calibrate:
            return []
        cure = ". Set [task] calibrate = true to correct them on validation data" if kind == "binary" else ""
        return [
            "class_weights raise the probabilities of rare classes above their true values. AUROC "
            f"and recall remain valid, but probabilities and calibration do not{cure}"
        ]

    @property
    def functions(self) -> list[UserFunction]:
        """User-defined functions in the objective."""
        return [f for f in (self.loss, *self.metrics) if isinstance(f, UserFunction)]

    @property
    def directions(self) -> dict[str, bool]:
        """Direction of each custom metric: True if larger values are better."""
        measures = (m for m in self.metrics if isinstance(m, UserFunction))
        return {m.short: bool(getattr(m.call, "higher_is_better", True)) for m in measures}
