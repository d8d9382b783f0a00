"""What a model is trained for: losses with closed-form gradients, predictions, and the metrics of every client at once.

Letters: b samples, k outputs of the model, N samples of all clients together, n clients.

References:
    AUROC: rank sum with mid-ranks for ties (Mann and Whitney 1947; Hanley and McNeil, Radiology 1982).
    AUPRC: average precision, one step per distinct score (Davis and Goadrich, ICML 2006).
    Calibration error: 15 equal bins of the predicted probability (Naeini et al., AAAI 2015; Guo et al., ICML 2017).
"""

from __future__ import annotations

from typing import Protocol

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedloom.errors import unknown
from fedloom.values import Value

BINS = 15
"""Number of equal bins of the calibration error."""


class Task(Protocol):
    """Loss, prediction and metrics of one kind of target."""

    @property
    def outputs(self) -> int:
        """Number k of outputs that a model needs."""
        ...

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Loss of every sample, ``[..., b]``: output ``[..., b, k]``, y ``[..., b]`` (regression ``[..., b, k]``)."""
        ...

    def dloss(self, output: Tensor, y: Tensor) -> Tensor:
        """Gradient of every sample's loss with respect to its output, ``[..., b, k]``."""
        ...

    def predict(self, output: Tensor) -> Tensor:
        """Prediction of every sample: class ``[..., b]``, or value ``[..., b, k]``."""
        ...

    def metrics(self, output: Tensor, y: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
        """Metrics of every client.

        Args:
            output: ``[N, k]`` outputs of all clients' samples.
            y: their targets, ``[N]`` (regression ``[N, k]``).
            owner: ``[N]`` client of every sample, 0..n-1, in any order.
            n: number of clients.

        Returns:
            ``{name: float64 [n]}`` on the CPU; nan where a client has no sample or an output that is not finite, and
            where the metric is undefined (AUROC of one class only, R2 of a constant target).
        """
        ...


class Classification(Value):
    """One of C classes; cross-entropy of the softmax, in nats.

    Metrics: ``loss``; ``accuracy`` in [0, 1]; ``macro_f1``, the mean F1 over the classes among the client's targets.
    """

    classes: int = Field(ge=2, description="number of classes C")

    @property
    def outputs(self) -> int:
        """One logit per class."""
        return self.classes

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy: log sum_j exp(z_j) - z_y."""
        return output.logsumexp(-1) - output.gather(-1, y.unsqueeze(-1)).squeeze(-1)

    def dloss(self, output: Tensor, y: Tensor) -> Tensor:
        """Gradient: softmax(z) - e_y."""
        label = y.unsqueeze(-1)
        p = output.mT.contiguous().softmax(-2).mT  # on few classes ten times faster than over the last dimension
        return p.scatter_add_(-1, label, output.new_full((), -1.0).expand(label.shape))

    def predict(self, output: Tensor) -> Tensor:
        """Class with the largest logit."""
        return output.argmax(-1)

    def metrics(self, output: Tensor, y: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
        """Loss, accuracy and macro F1; see `Task.metrics`."""
        z, y, owner = _wide(output), y.cpu(), owner.cpu()
        guess, cells = self.predict(z), n * self.classes
        hit = guess == y

        def count(label: Tensor, owner: Tensor) -> Tensor:
            return torch.bincount(owner * self.classes + label, minlength=cells).view(n, self.classes).double()

        true, guessed, hits = count(y, owner), count(guess, owner), count(y[hit], owner[hit])
        present = true > 0
        f1 = torch.where(present, 2 * hits / (true + guessed).clamp(min=1), 0.0).sum(1) / present.sum(1)
        found = {
            "loss": _mean(self.loss(z, y), owner, n),
            "accuracy": _mean(hit.double(), owner, n),
            "macro_f1": f1,
        }
        return _known(found, z, owner, n)


class Binary(Value):
    """Yes or no from one logit z; logistic loss, in nats.

    Metrics: ``loss``; ``accuracy`` and ``f1`` of the rule z > 0 (F1 is nan without a positive target or prediction);
    ``auroc``; ``auprc``; ``calibration_error``, the mean over samples of |share of positives - mean probability| in
    their bin.
    """

    @property
    def outputs(self) -> int:
        """One logit."""
        return 1

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Logistic loss: log(1 + exp(z)) - y z."""
        z = output.squeeze(-1)
        return functional.softplus(z) - y.to(z.dtype) * z

    def dloss(self, output: Tensor, y: Tensor) -> Tensor:
        """Gradient: sigmoid(z) - y."""
        return output.sigmoid() - y.to(output.dtype).unsqueeze(-1)

    def predict(self, output: Tensor) -> Tensor:
        """1 where the logit is positive, else 0."""
        return (output.squeeze(-1) > 0).long()

    def metrics(self, output: Tensor, y: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
        """Loss, accuracy, F1, AUROC, AUPRC and calibration error; see `Task.metrics`."""
        z, y, owner = _wide(output), y.cpu(), owner.cpu()
        guess, label = self.predict(z), y.double()
        both = _sum((guess * y).double(), owner, n)
        auroc, auprc = _ranking(z.squeeze(-1), label, owner, n)
        found = {
            "loss": _mean(self.loss(z, y), owner, n),
            "accuracy": _mean((guess == y).double(), owner, n),
            "f1": 2 * both / _sum((guess + y).double(), owner, n),
            "auroc": auroc,
            "auprc": auprc,
            "calibration_error": _calibration_error(z.squeeze(-1).sigmoid(), label, owner, n),
        }
        return _known(found, z, owner, n)


class Regression(Value):
    """Real targets; squared error, summed over the k outputs and divided by k (no factor 1/2).

    Metrics: ``loss``; ``mae`` and ``rmse`` over samples and outputs; ``r2``, the mean over outputs of 1 - SSE / SST
    around the client's own mean.
    """

    outputs: int = Field(1, ge=1, description="number of real targets k")

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Squared error: sum_j (o_j - y_j)^2 / k."""
        return (output - y.to(output.dtype)).square().mean(-1)

    def dloss(self, output: Tensor, y: Tensor) -> Tensor:
        """Gradient: 2 (o - y) / k."""
        return (output - y.to(output.dtype)) * (2 / self.outputs)

    def predict(self, output: Tensor) -> Tensor:
        """The output itself."""
        return output

    def metrics(self, output: Tensor, y: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
        """Loss, MAE, RMSE and R2; see `Task.metrics`."""
        z, target, owner = _wide(output), _wide(y), owner.cpu()
        error = z - target
        spread = target - _mean(target, owner, n)[owner]
        sse, sst, size = (_sum(v.square(), owner, n) for v in (error, spread, target))
        mse = _mean(error.square().mean(1), owner, n)
        found = {
            "loss": mse,
            "mae": _mean(error.abs().mean(1), owner, n),
            "rmse": mse.sqrt(),
            "r2": torch.where(sst > 1e-24 * size, 1 - sse / sst, torch.nan).mean(1),  # else constant but for rounding
        }
        return _known(found, z, owner, n)


class Labelled(Protocol):
    """What `task_of` reads of a data set."""

    @property
    def task(self) -> str:
        """``classification``, ``binary`` or ``regression``."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        ...

    @property
    def y(self) -> Tensor:
        """Targets."""
        ...


def task_of(dataset: Labelled) -> Classification | Binary | Regression:
    """The task that a data set declares.

    Raises:
        ConfigError: the data set's ``task`` is not one of classification, binary and regression.
    """
    match dataset.task:
        case "classification":
            return Classification(classes=len(dataset.classes))
        case "binary":
            return Binary()
        case "regression":
            return Regression(outputs=dataset.y.shape[1])
        case other:
            raise unknown("task", other, ("classification", "binary", "regression"))


def _wide(x: Tensor) -> Tensor:
    """On the CPU, where sums have one order, in float64."""
    return x.detach().to("cpu", torch.float64)


def _sum(x: Tensor, owner: Tensor, n: int) -> Tensor:
    """Sum of x ``[N, ...]`` per owner, ``[n, ...]``."""
    return x.new_zeros(n, *x.shape[1:]).index_add(0, owner, x)


def _mean(x: Tensor, owner: Tensor, n: int) -> Tensor:
    size = torch.bincount(owner, minlength=n).double()
    return _sum(x, owner, n) / size.view(n, *[1] * (x.ndim - 1))


def _known(found: dict[str, Tensor], output: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
    """The metrics with nan for the clients that have an output which is not finite."""
    lost = torch.bincount(owner[~output.isfinite().all(1)], minlength=n) > 0
    return {name: value.masked_fill(lost, torch.nan) for name, value in found.items()}


def _ranking(score: Tensor, y: Tensor, owner: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """AUROC and AUPRC per client; equal scores form one threshold."""
    order = score.argsort(descending=True, stable=True)
    order = order[owner[order].argsort(stable=True)]
    score, y, owner = score[order], y[order], owner[order]
    fresh = torch.ones_like(owner, dtype=torch.bool)
    fresh[1:] = (owner[1:] != owner[:-1]) | (score[1:] != score[:-1])
    tie, who = fresh.cumsum(0) - 1, owner[fresh]  # groups of equal scores, highest first, and their clients
    ties = len(who)
    positive, negative = _sum(y, tie, ties), _sum(1 - y, tie, ties)
    all_positive, all_negative = _sum(y, owner, n), _sum(1 - y, owner, n)
    before = _sum(torch.stack([positive, negative], 1), who, n).cumsum(0).roll(1, 0)  # of the clients before
    before[:1] = 0
    above = positive.cumsum(0) - before[who, 0]  # positives at or above the threshold
    named = above + negative.cumsum(0) - before[who, 1]  # all samples at or above it
    won = _sum(negative * (above - positive / 2), who, n)  # pairs ranked right, ties count half
    step = _sum(positive * above / named, who, n)
    return won / (all_positive * all_negative), step / all_positive


def _calibration_error(p: Tensor, y: Tensor, owner: Tensor, n: int) -> Tensor:
    cell = owner * BINS + (p.nan_to_num(0) * BINS).long().clamp(max=BINS - 1)
    gap = _sum(y - p, cell, n * BINS).abs().view(n, BINS).sum(1)
    return gap / torch.bincount(owner, minlength=n).double()
