"""Kinds of targets, with losses and their gradients in closed form, predictions, and metrics for all clients at once.

In this module, b is the number of samples, k is the number of the model's outputs, N is the number of samples of all
clients together, n is the number of clients, and C is the number of classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedloom.tasks.figures import (
    CLASS_RATIOS,
    COUNT_METRICS,
    calibration_error,
    compute_rank_metrics,
    count_by_class,
    label_metrics,
    macro_f1,
    mask_nonfinite_clients,
    owner_mean,
    owner_total,
    select_labelled,
    to_float64,
)
from fedloom.values import Value

OwnLoss = Callable[[Tensor, Tensor], Tensor]
"""Function of outputs ``[b, k]`` and targets ``[b]`` or ``[b, k]`` that returns a batch's mean loss as a scalar."""


class Task(Protocol):
    """Loss, predictions and metrics for one kind of target."""

    @property
    def own_loss(self) -> OwnLoss | None:
        """User-defined loss, which replaces `loss` and `dloss` in training.

        None if the user has not specified a loss.
        """
        ...

    @property
    def outputs(self) -> int:
        """Number of outputs k that a model needs."""
        ...

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return each sample's loss ``[..., b]``, for output ``[..., b, k]`` and y ``[..., b]`` or ``[..., b, k]``."""
        ...

    def dloss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the gradient ``[..., b, k]`` of each sample's loss with respect to its outputs."""
        ...

    def predict(self, output: Tensor) -> Tensor:
        """Return the prediction for each sample, which is a class ``[..., b]`` or values ``[..., b, k]``."""
        ...

    def metrics(self, output: Tensor, y: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
        """Return the metrics of every client.

        Args:
            output: outputs ``[N, k]`` for the samples of all clients, or ``[N L, k]`` for sequences with a label per
                position.
            y: targets of these samples, ``[N]`` (for numbers ``[N, k]``), or ``[N L]`` with -1 for positions without a
                label, which metrics ignore.
            owner: client of each sample, 0..n-1, in any order, ``[N]``.
            n: number of clients.

        Returns:
            Values ``{name: float64 [n]}`` on the CPU. A metric is NaN if a client has no samples or an output that is
                not finite, or if the metric is undefined (AUROC for targets of one class, R2 for a constant target).
        """
        ...


class TaskKind(Value):
    """Task that a data set declares."""

    further: ClassVar[tuple[str, ...]] = ()
    """Metrics that are computed only if `Objective.metrics` lists them."""

    @property
    def own_loss(self) -> OwnLoss | None:
        """Always None, because the task uses its own loss."""
        return None


class Classification(TaskKind):
    """Classification into C classes. The loss is the cross-entropy of the softmax, in nats.

    Metrics: ``loss``. ``accuracy`` is in [0, 1]. ``macro_f1`` is the mean F1 over the classes that occur among the
    client's targets.
    """

    further: ClassVar[tuple[str, ...]] = (
        *(name for name in (*COUNT_METRICS, *CLASS_RATIOS) if name != "macro_f1"),  # always measured
        *("auroc_ovr", "auprc_ovr", "brier", "calibration_error", "perplexity"),
    )

    classes: int = Field(ge=2, description="number of classes C")

    @property
    def outputs(self) -> int:
        """Number of classes, because there is one logit for each class."""
        return self.classes

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy log sum_j exp(z_j) - z_y."""
        return output.logsumexp(-1) - output.gather(-1, y.unsqueeze(-1)).squeeze(-1)

    def dloss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the gradient softmax(z) - e_y."""
        label = y.unsqueeze(-1)
        p = output.mT.contiguous().softmax(-2).mT  # ten times faster than the last dimension for few classes
        return p.scatter_add_(-1, label, output.new_full((), -1.0).expand(label.shape))

    def probabilities(self, output: Tensor) -> Tensor:
        """Return the softmax of the logits, ``[..., b, C]``."""
        return output.softmax(-1)

    def predict(self, output: Tensor) -> Tensor:
        """Return the class with the largest logit."""
        return output.argmax(-1)

    def metrics(self, output: Tensor, y: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
        """Return loss, accuracy and macro F1 (see `Task.metrics`)."""
        output, y, owner = select_labelled(output, y, owner)
        z, y, owner = to_float64(output), y.cpu(), owner.cpu()
        guess = self.predict(z)
        hit = guess == y
        counted = ((y, owner), (guess, owner), (y[hit], owner[hit]))
        true, guessed, hits = (count_by_class(*of, n, self.classes) for of in counted)
        values = {
            "loss": owner_mean(self.loss(z, y), owner, n),
            "accuracy": owner_mean(hit.double(), owner, n),
            "macro_f1": macro_f1(true, guessed, hits),
        }
        return mask_nonfinite_clients(values, z, owner, n)


class Binary(TaskKind):
    """Binary classification with a single logit z. The loss is the logistic loss, in nats.

    Metrics: ``loss``. ``accuracy`` and ``f1`` are computed by the rule z > 0 (F1 is NaN if there is no positive target
    and no positive prediction). ``auroc`` and ``auprc`` are computed from z. ``calibration_error`` is the mean over
    samples of |fraction of positives - mean probability| in the sample's bin.
    """

    further: ClassVar[tuple[str, ...]] = (
        *(*COUNT_METRICS, *CLASS_RATIOS, "brier"),
        *("calibration_slope", "calibration_intercept"),
    )

    @property
    def outputs(self) -> int:
        """Number of outputs, which is 1 because there is a single logit."""
        return 1

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the logistic loss log(1 + exp(z)) - y z."""
        z = output.squeeze(-1)
        return functional.softplus(z) - y.to(z.dtype) * z

    def dloss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the gradient sigmoid(z) - y."""
        return output.sigmoid() - y.to(output.dtype).unsqueeze(-1)

    def probabilities(self, output: Tensor) -> Tensor:
        """Return the probabilities of the negative and the positive class, ``[..., b, 2]``."""
        yes = output.sigmoid()
        return torch.cat([1 - yes, yes], -1)

    def predict(self, output: Tensor) -> Tensor:
        """Return 1 if the logit is positive, and 0 otherwise."""
        return (output.squeeze(-1) > 0).long()

    def metrics(self, output: Tensor, y: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
        """Return loss, accuracy, F1, AUROC, AUPRC and calibration error (see `Task.metrics`)."""
        output, y, owner = select_labelled(output, y, owner)
        z, y, owner = to_float64(output), y.cpu(), owner.cpu()
        guess, label = self.predict(z), y.double()
        both = owner_total((guess * y).double(), owner, n)
        auroc, auprc = compute_rank_metrics(z.squeeze(-1), label, owner, n)
        values = {
            "loss": owner_mean(self.loss(z, y), owner, n),
            "accuracy": owner_mean((guess == y).double(), owner, n),
            "f1": 2 * both / owner_total((guess + y).double(), owner, n),
            "auroc": auroc,
            "auprc": auprc,
            "calibration_error": calibration_error(z.squeeze(-1).sigmoid(), label, owner, n),
        }
        return mask_nonfinite_clients(values, z, owner, n)


class MultiLabel(TaskKind):
    """Task with several labels per sample, each of which is present, absent or unknown.

    The loss is the sum of the logistic losses over the known labels, divided by k, in nats. A target of -1 is unknown,
    and metrics ignore it.

    Metrics: ``loss``. ``micro_f1`` is F1 over all pairs of a sample and a label. ``macro_f1`` is the mean F1 over the
    labels that occur among a client's targets. ``macro_auroc`` and ``macro_auprc`` are means over the labels for which
    they are defined. A label is predicted if its logit is positive.
    """

    further: ClassVar[tuple[str, ...]] = (
        *("label_auroc", "label_auprc", "label_f1", "recall", "precision"),
        "exact_match",
    )

    labels: tuple[str, ...] = Field(min_length=2, description="names of the labels")

    @property
    def outputs(self) -> int:
        """Number of labels, because there is one logit per label."""
        return len(self.labels)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the logistic loss over the known labels, sum_j (log(1 + exp(z_j)) - y_j z_j) / k."""
        return self.label_losses(output, y).mean(-1)

    def label_losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the logistic loss of each label ``[..., k]``, which is 0 for unknown labels."""
        return torch.where(y < 0, 0.0, functional.softplus(output) - y.to(output.dtype) * output)

    def dloss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the gradient (sigmoid(z) - y) / k, which is 0 for unknown labels."""
        return torch.where(y < 0, 0.0, output.sigmoid() - y.to(output.dtype)) / self.outputs

    def predict(self, output: Tensor) -> Tensor:
        """Return 1 for each label whose logit is positive, and 0 otherwise, ``[..., b, k]``."""
        return (output > 0).long()

    def metrics(self, output: Tensor, y: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
        """Return loss, F1, AUROC and AUPRC (see `Task.metrics`)."""
        z, y, owner = to_float64(output), to_float64(y), owner.cpu()
        wanted = ("micro_f1", "macro_f1", "macro_auroc", "macro_auprc")
        return mask_nonfinite_clients(
            {"loss": owner_mean(self.loss(z, y), owner, n), **label_metrics(wanted, z, y, owner, n)}, z, owner, n
        )


class Regression(TaskKind):
    """Regression on k real targets.

    The loss is the mean squared error over the k outputs (without a factor 1/2).

    Metrics: ``loss``. ``mae`` and ``rmse`` are computed over all samples and outputs. ``r2`` is the mean over outputs
    of 1 - SSE / SST, where SST is the sum of squares around the client's own mean.
    """

    outputs: int = Field(1, ge=1, description="number k of real-valued targets")

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the squared error sum_j (o_j - y_j)^2 / k."""
        return (output - y.to(output.dtype)).square().mean(-1)

    def dloss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the gradient 2 (o - y) / k."""
        return (output - y.to(output.dtype)) * (2 / self.outputs)

    def predict(self, output: Tensor) -> Tensor:
        """Return the output unchanged."""
        return output

    def metrics(self, output: Tensor, y: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
        """Return loss, MAE, RMSE and R2 (see `Task.metrics`)."""
        z, target, owner = to_float64(output), to_float64(y), owner.cpu()
        error = z - target
        spread = target - owner_mean(target, owner, n)[owner]
        sse, sst, size = (owner_total(v.square(), owner, n) for v in (error, spread, target))
        mse = owner_mean(error.square().mean(1), owner, n)
        values = {
            "loss": mse,
            "mae": owner_mean(error.abs().mean(1), owner, n),
            "rmse": mse.sqrt(),
            "r2": torch.where(sst > 1e-24 * size, 1 - sse / sst, torch.nan).mean(1),  # NaN if constant up to rounding
        }
        return mask_nonfinite_clients(values, z, owner, n)


class Count(TaskKind):
    """Task with counts as targets.

    The model has one output z, which is the log of the predicted mean. The loss is the Poisson loss exp(z) - y z.

    Metrics: ``loss``. ``deviance`` is the mean Poisson deviance 2 (y log(y / mu) - y + mu). ``mae`` and ``rmse`` are
    computed for the predicted mean mu = exp(z).
    """

    @property
    def outputs(self) -> int:
        """Number of outputs, which is 1 because the model predicts the log of the mean."""
        return 1

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the negative Poisson log-likelihood exp(z) - y z, which omits the constant log y!."""
        return (output.exp() - y.to(output.dtype) * output).squeeze(-1)

    def dloss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the gradient exp(z) - y."""
        return output.exp() - y.to(output.dtype)

    def predict(self, output: Tensor) -> Tensor:
        """Return the predicted mean."""
        return output.exp()

    def metrics(self, output: Tensor, y: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
        """Return loss, deviance, MAE and RMSE (see `Task.metrics`)."""
        z, target, owner = to_float64(output), to_float64(y), owner.cpu()
        mu = z.exp()
        error = mu - target
        values = {
            "loss": owner_mean(self.loss(z, target), owner, n),
            "deviance": owner_mean(2 * (torch.xlogy(target, target) - target * z + error)[:, 0], owner, n),
            "mae": owner_mean(error.abs()[:, 0], owner, n),
            "rmse": owner_mean(error.square()[:, 0], owner, n).sqrt(),
        }
        return mask_nonfinite_clients(values, z, owner, n)
