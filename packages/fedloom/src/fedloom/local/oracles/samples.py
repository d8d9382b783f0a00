"""Samples of a batch and their losses, including class weights per client and user-defined losses."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedloom.errors import CodeError, ConfigError, describe_cause
from fedloom.imports import UserFunction
from fedloom.seeds import as_global, generator
from fedloom.tasks import ChosenTask, compute_user_number
from fedloom.tasks.figures import to_float64

if TYPE_CHECKING:
    from fedloom.data.federation import Federation
    from fedloom.local.batches import Batch
    from fedloom.models import Augment
    from fedloom.tasks import Task
    from fedloom.tasks.kinds import OwnLoss

GROWING_FACTORS = 1e4, 1e6
"""Factors of the outputs for testing whether a loss decreases in proportion to them."""


class Samples:
    """Training samples of a batch.

    If ``changed`` is True, the samples include a step's random changes: new versions, noise and augmentation.

    Attributes:
        y: targets ``[m, b]`` or ``[m, b, k]``.
        weight: factor of each sample's loss, which is 0 for padding. Its shape is ``[m, b]``, or ``[m, 1]`` if no batch
            is padded.
        span: number of targets per sample, which is 1, or the length L of sequences with a label per position. In the
            latter case, ``y`` and ``weight`` have shape ``[m, b L]``. The weight of a position without a label is 0.
            The weight of a labeled position is the weight of its sequence divided by the mean number of labels in the
            client's training sequences, so that f_i is the mean loss over all labeled positions.
        class_weights: additional factor for each class ``[m, C]``, or for each absent and present label ``[m, k, 2]``.
            None if all factors are 1.
    """

    def __init__(
        self, fed: Federation, batch: Batch, dtype: torch.dtype, class_weights: Tensor | None = None,
        labels_each: Tensor | None = None, *, changed: bool = False, augment: Augment | None = None,
    ) -> None:  # fmt: skip
        self._fed, self._batch, self._changed, self._augment = fed, batch, changed, augment
        self.weight = batch.total.to(fed.device, dtype).reciprocal()
        if not batch.full:
            self.weight = self.weight * (batch.position >= 0).to(fed.device)
        self.class_weights = class_weights
        self.y = fed.targets(batch.where)
        self.span = 1
        if labels_each is not None:
            self.span = self.y.shape[1] // batch.where.shape[1]
            weight = (self.weight / labels_each[:, None]).expand(batch.where.shape)
            self.weight = weight.repeat_interleave(self.span, 1) * (self.y >= 0)
            self.y = self.y.clamp(min=0)

    @cached_property
    def x(self) -> Tensor:
        """Values of the samples ``[m, b, *shape]``.

        Padding repeats one of the client's samples.
        """
        x = self._fed.fetch(self._batch.where)
        if self._changed and self._fed.data.rereading is not None:
            for row, count in enumerate(self.counts):
                rng = self._batch.draw.generator(row, "samples")
                x[row, :count] = self._fed.fetch_anew(self._batch.where[row, :count], rng)
        if self._changed and self._fed.noise is not None:
            self._add_noise(x)
        if self._changed and self._augment is not None:
            x = self._augment.apply(x, self._draw_augmentation(self._augment))
        return x

    @cached_property
    def counts(self) -> list[int]:
        """Size of each client's batch."""
        counts: list[int] = self._batch.count[:, 0].tolist()
        return counts

    def _add_noise(self, x: Tensor) -> None:
        """Add noise, drawn on the CPU in float32 from each client's own generator."""
        for row, count in enumerate(self.counts):
            spread = self._fed.spread(self._batch.where[row, :count])
            if spread is not None and bool(spread.any()):
                rng = self._batch.draw.generator(row, "noise")
                drawn = torch.randn(spread.shape, dtype=torch.float32, generator=rng)
                x[row, :count] += spread * drawn.to(spread)

    def _draw_augmentation(self, augment: Augment) -> Tensor:
        """Draw the augmentation of every sample ``[m, b, 3]`` from each client's own generator.

        Padding is not augmented.
        """
        still = torch.tensor([0, augment.crop, augment.crop]).repeat(*self._batch.position.shape, 1)
        for row, count in enumerate(self.counts):
            still[row, :count] = augment.draw(count, self._batch.draw.generator(row, "augment"))
        return still

    @property
    def weighs_labels(self) -> bool:
        """True if a multilabel task has label weights."""
        return self.class_weights is not None and self.class_weights.ndim == 3

    def factors(self) -> Tensor:
        """Return the factor of each sample's loss, including class weights, ``[m, b, 1]`` or ``[m, 1, 1]``.

        If labels are weighted, each label has its own factor, ``[m, b, k]``.
        """
        if self.class_weights is None:
            return self.weight.unsqueeze(-1)
        if self.weighs_labels:
            absent, present = self.class_weights[:, None].unbind(-1)
            return self.weight.unsqueeze(-1) * torch.where(self.y > 0, present, absent)
        return (self.weight * self.class_weights.gather(1, self.y)).unsqueeze(-1)

    def client_factors(self, i: int, count: int) -> Tensor:
        """Return the factors for the first ``count`` targets of client ``i``, as in `factors`, or a scalar for all.

        The shape is ``[count, 1]``, ``[count, k]`` or ``[]``.
        """
        if self.class_weights is None and self.span == 1:
            return self.weight[i, 0]
        return self.factors()[i, :count]


def output_gradients(task: Task, outputs: Tensor, data: Samples) -> Tensor:
    """Return the gradient of a batch's weighted losses with respect to the outputs, both ``[m, b, k]``."""
    if task.own_loss is None:
        return task.dloss(outputs.detach(), data.y).mul_(data.factors())
    gradients = torch.zeros_like(outputs)
    for i, count in enumerate(data.counts):
        if count:
            gradients[i, : count * data.span] = output_gradient(task, outputs[i, : count * data.span], data, i)
    return gradients


def output_gradient(task: Task, outputs: Tensor, data: Samples, i: int) -> Tensor:
    """Return the gradient of client ``i``'s weighted losses with respect to its outputs, both ``[b, k]``."""
    y = data.y[i, : len(outputs)]
    if task.own_loss is not None:
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            return torch.autograd.grad(_user_loss(task.own_loss, leaf, y, data, i), leaf)[0]
    return task.dloss(outputs.detach(), y).mul_(data.client_factors(i, len(y)))


def batch_loss(task: Task, outputs: Tensor, data: Samples, i: int) -> Tensor:
    """Return the sum of client ``i``'s weighted losses as a scalar.

    ``outputs [b, k]`` are the outputs for the client's samples.
    """
    y = data.y[i, : len(outputs)]
    if task.own_loss is not None:
        return _user_loss(task.own_loss, outputs, y, data, i)
    factor = data.client_factors(i, len(y))
    if data.weighs_labels:
        assert isinstance(task, ChosenTask)
        return (task.label_losses(outputs, y) * factor).mean(-1).sum()
    loss = task.loss(outputs, y)
    return (loss * factor.squeeze(-1)).sum() if factor.ndim else loss.sum() * factor


def _user_loss(loss: OwnLoss, outputs: Tensor, y: Tensor, data: Samples, i: int) -> Tensor:
    """Compute the weighted sum of a user-defined loss over a client's samples.

    Since the loss is a mean, it is multiplied by the number of samples. With class weights, it is computed separately
    for each class.
    """
    weight = data.weight[i, 0]
    if data.span > 1:
        labelled = data.weight[i, : len(y)] > 0
        outputs, y, weight = outputs[labelled], y[labelled], data.weight[i].amax()
    if data.class_weights is None:
        return loss(outputs, y) * (weight * len(y))
    weights, classes = data.class_weights[i], y.unique().tolist()
    parts = [loss(outputs[y == c], y[y == c]) * (weights[c] * (y == c).sum()) for c in classes if weights[c]]
    return torch.stack([outputs.sum() * 0, *parts]).sum() * weight


def probe_task(
    task: ChosenTask, outputs: Tensor, y: Tensor, bounded: bool = False, negative: bool = False
) -> list[str]:
    """Try a user's loss and metrics on the outputs ``[b, k]`` for a few samples or positions.

    Return the names of the functions whose values differ between two identical calls (see `_is_unseeded`).

    Args:
        task: task with the user's functions.
        outputs: outputs of the initial model.
        y: targets.
        bounded: True if outputs cannot grow with the parameters, as with a sigmoid, so losses need no lower bound.
        negative: True if outputs are never positive, as with a log-softmax.

    Raises:
        ConfigError: a function fails or does not return a scalar, or the loss is a sum, is not finite, has no gradient,
            has its own parameters, or pairs every output with every target.
    """
    if not y.is_floating_point():
        outputs, y = outputs[y >= 0], y[y >= 0]
    if task.objective.loss is not None:
        _check_reduction(task.objective.loss, outputs, y)
    user_metrics = [metric for metric in task.objective.metrics if isinstance(metric, UserFunction)]
    try:
        for metric in user_metrics:
            compute_user_number(metric, "metric", to_float64(outputs), y.cpu())
        task.metrics(outputs, y, torch.zeros(len(y), dtype=torch.long), 1)
        unseeded = [
            f"metric {m.display_name!r}"
            for m in user_metrics
            if _is_unseeded(m, "metric", to_float64(outputs), y.cpu())
        ]
        if task.objective.loss is None:
            return unseeded
        name, value = (
            task.objective.loss.display_name,
            compute_user_number(task.objective.loss, "loss", outputs.clone(), y),
        )
    except CodeError as error:
        raise ConfigError(f"task: {error}") from error
    if not math.isfinite(value):
        raise ConfigError(
            f"task: loss {name!r} is {value} on {len(y)} samples with the initial model. The loss must be finite"
        )
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        try:
            loss = task.objective.loss.call(leaf, y)
            real = isinstance(loss, Tensor) and loss.requires_grad and loss.is_floating_point()
            untrained = [[*tensor.shape] for tensor in _gradient_leaves(loss) if tensor is not leaf] if real else []
            gradient = torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)[0] if real else None
        except Exception as error:
            raise ConfigError(
                f"task: the gradient of loss {name!r} cannot be computed: {describe_cause(error)}"
            ) from error
        if gradient is None:
            raise ConfigError(
                f"task: loss {name!r} has no gradient. Compute the loss from the outputs with real-valued PyTorch "
                f"functions"
            )
    if not bool(gradient.isfinite().all()):
        raise ConfigError(
            f"task: the gradient of loss {name!r} is not finite on {len(y)} samples with the initial model"
        )
    if untrained:
        raise ConfigError(
            f"task: loss {name!r} depends on tensors that no client trains, of shape "
            f"{', '.join(map(str, untrained[:4]))}. Call detach() on them, or make them parameters of "
            "the model (for a penalty on parameters, use local.weight_decay)"
        )
    if outputs.shape == (len(y), 1) and y.numel() == len(y) and not _uses_pairing(task.objective.loss, outputs, y):
        raise ConfigError(
            f"task: loss {name!r} ignores the pairing of outputs and targets, for example because outputs "
            f"{[*outputs.shape]} and targets {[*y.shape]} broadcast to {[len(y), len(y)]}",
            rule="loss-broadcasts",
            fix="make {task.loss} use outputs and targets of the same shape",
        )
    doubled = compute_user_number(task.objective.loss, "loss", torch.cat([outputs, outputs]), torch.cat([y, y]))
    if value and math.isclose(doubled, 2 * value, rel_tol=1e-4):
        raise ConfigError(
            f"task: loss {name!r} is a sum instead of a mean: {value:.4g} on {len(y)} samples, "
            f"but {doubled:.4g} if each sample occurs twice",
            rule="loss-is-a-sum",
            fix="make {task.loss} return the mean over the batch",
        )
    if not bounded and _is_unbounded(task.objective.loss, outputs, y, negative):
        raise ConfigError(
            f"task: loss {name!r} has no lower bound for this model: larger outputs make it more negative for every "
            f"class. Typical causes are a negated loss, or nll_loss applied to logits",
            rule="loss-is-unbounded",
            fix="make {task.loss} a loss that is at least 0 for logits, such as cross_entropy, or end the model with "
            "LogSoftmax",
        )
    return unseeded + [f"loss {name!r}"] * _is_unseeded(task.objective.loss, "loss", outputs, y)


def _is_unbounded(loss: UserFunction, outputs: Tensor, y: Tensor, negative: bool) -> bool:
    """Return True if a classification loss decreases without bound as the outputs grow.

    Each sample is first assigned the class with its largest output, and then the class with its smallest output. If
    ``negative`` is True, all outputs stay negative, like log probabilities and negative distances.
    """
    if y.is_floating_point() or y.ndim != 1 or not len(y):
        return False
    if outputs.shape[1] > 1:
        if not negative:
            outputs = outputs - outputs.mean(1, keepdim=True)
        targets = outputs.argmax(1), outputs.argmin(1)
    else:
        targets = outputs[:, 0] > 0, outputs[:, 0] <= 0
    values = list[float]()
    for target in targets:
        for factor in GROWING_FACTORS:
            try:
                values.append(compute_user_number(loss, "loss", factor * outputs, target.to(y.dtype)))
            except CodeError:  # the loss does not accept such targets
                return False
    return any(b < 10 * a < 0 for a, b in (values[:2], values[2:]))


def _is_unseeded(function: UserFunction, what: str, outputs: Tensor, y: Tensor) -> bool:
    """Return True if two identical calls differ even though the global generators start in the same state.

    Such a function draws from its own generator, counts its calls, or reads a clock.
    """
    values = list[float]()
    for _ in range(2):
        with as_global(generator(0, purpose="probe"), outputs.device):
            values.append(compute_user_number(function, what, outputs.clone(), y))
    return values[0] != values[1] and not all(map(math.isnan, values))


def _check_reduction(loss: UserFunction, outputs: Tensor, y: Tensor) -> None:
    """Raise an error if a loss returns one value per sample.

    No error is raised here if the loss fails, because `compute_user_number` raises a more precise one.

    Raises:
        ConfigError: the loss does not return a scalar.
    """
    try:
        with torch.no_grad():
            shape = [*getattr(loss.call(outputs.clone(), y), "shape", ())]
    except Exception:
        return
    if shape:
        raise ConfigError(
            f"task: loss {loss.display_name!r} must return a scalar for a batch, got shape {shape}",
            rule="loss-per-sample",
            fix="make {task.loss} return the mean over the batch",
        )


def _gradient_leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors for which a loss has a gradient."""
    nodes: list[Any] = [loss.grad_fn or torch.autograd.graph.get_gradient_edge(loss).node]
    reached = {*nodes}
    for node in nodes:
        for below, _ in node.next_functions:
            if below is not None and below not in reached:
                reached.add(below)
                nodes.append(below)
    return [node.variable for node in nodes if node.name() == "torch::autograd::AccumulateGrad"]


def _uses_pairing(loss: UserFunction, outputs: Tensor, y: Tensor) -> bool:
    """Return True if a loss depends on the assignment of two targets to two outputs ``[b, 1]``.

    The test uses increasing outputs, half of them with each target.

    The result is also True if a loss does not depend on the targets or rejects these numbers.
    """
    rising = torch.linspace(0.1, 0.7, len(y)).to(outputs)[:, None]
    low, high = (torch.full_like(y, value) for value in ((0.3, 0.9) if y.is_floating_point() else (0, 1)))
    upper = (torch.arange(len(y), device=y.device) >= len(y) // 2).reshape(y.shape)
    pairings = (torch.where(upper, high, low), torch.where(upper, low, high), low, high)
    try:
        one, other, least, most = (compute_user_number(loss, "loss", rising.clone(), targets) for targets in pairings)
    except CodeError:
        return True
    return not math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-7) or math.isclose(least, most, rel_tol=1e-5)
