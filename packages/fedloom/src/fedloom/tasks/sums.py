"""Sums over samples from which metrics can be computed.

The sums of several sites add up to the sums over all their samples.

In this module, N is the number of samples, C is the number of classes, k is the number of outputs, and S is the number
of sums. Metrics that rank all samples, such as AUROC, cannot be computed from sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedloom.metrics import class_metric_name
from fedloom.tasks.chosen import ChosenTask, metric_labels
from fedloom.tasks.figures import CALIBRATION_BINS, CLASS_RATIOS, COUNT_METRICS, label_counts, owner_total, to_float64
from fedloom.tasks.kinds import Binary, Classification, Count, MultiLabel, Regression, Task

MIN_TARGET_SPREAD = 1e-12
"""Fraction of a target's sum of squares. A spread below this fraction is treated as the rounding error of a constant
target."""


def compute_sums(task: Task, output: Tensor, y: Tensor) -> Tensor:
    """Compute the sums over some samples, as float64 ``[S]``. The first sum is the number of samples.

    Args:
        task: task of the run.
        output: finite outputs ``[N, k]``.
        y: targets of these outputs, ``[N]`` (for numbers ``[N, k]``).
    """
    base, z, count = base_of(task), to_float64(output), torch.tensor([float(len(y))], dtype=torch.float64)
    if isinstance(base, Classification | Binary):
        p, guess, y = base.probabilities(z), base.predict(z), y.cpu()
        classes = p.shape[1]
        hit = guess == y
        gap = (p - functional.one_hot(y, classes)).square().sum() / (2 if classes == 2 else 1)
        score, came = (p[:, 1], y) if isinstance(base, Binary) else (p.amax(1), hit)
        bins = owner_total(
            came.double() - score, (score * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1), CALIBRATION_BINS
        )
        counts = [torch.bincount(of, minlength=classes).double() for of in (y, guess, y[hit])]
        return torch.cat([count, base.loss(z, y).sum()[None], gap[None], bins, *counts])
    target = to_float64(y)
    if isinstance(base, MultiLabel):
        guess, present = base.predict(z).double() * (target >= 0), target.clamp(min=0)
        return torch.cat(
            [count, base.loss(z, target).sum()[None], present.sum(0), guess.sum(0), (present * guess).sum(0)]
        )
    if isinstance(base, Regression):
        error = z - target
        sums = [error.abs().mean(1).sum()[None], target.sum(0), target.square().sum(0), error.square().sum(0)]
        return torch.cat([count, *sums])
    if isinstance(base, Count):
        error = z.exp() - target
        deviance = 2 * (torch.xlogy(target, target) - target * z + error)
        parts = [base.loss(z, target), deviance, error.abs(), error.square()]
        return torch.cat([count, torch.stack([part.sum() for part in parts])])
    return count


def compute_metrics(task: Task, sums: Tensor) -> dict[str, float]:
    """Compute metrics from sums ``[S]``, keyed by the names that the task uses. If there are no samples, return {}."""
    base, (size, *rest) = base_of(task), sums.split([1, len(sums) - 1])
    if not float(size):
        return {}
    if isinstance(base, Classification | Binary):
        figures = _class_sums(task, size, rest[0])
    elif isinstance(base, MultiLabel):
        loss, true, guessed, hits = rest[0].split([1, *[base.outputs] * 3])
        figures = {"loss": loss / size, **label_counts(true, guessed, hits, metric_labels(base.labels))}
    elif isinstance(base, Regression):
        mae, linear, square, error = rest[0].split([1, *[base.outputs] * 3])
        spread, mse = square - linear.square() / size, error.mean() / size
        r2 = torch.where(spread > MIN_TARGET_SPREAD * square, 1 - error / spread, torch.nan).mean()
        figures = {"loss": mse, "mae": mae / size, "rmse": mse.sqrt(), "r2": r2}
    elif isinstance(base, Count):
        loss, deviance, mae, mse = rest[0] / size
        figures = {"loss": loss, "deviance": deviance, "mae": mae, "rmse": mse.sqrt()}
    else:
        figures = {}
    named = metric_names(task)
    own_loss = isinstance(task, ChosenTask) and task.objective.loss is not None
    return {
        name: float(value)
        for name, value in figures.items()
        if name in named and bool(value.isfinite().all()) and not (own_loss and name == "loss")
    }


def base_of(task: Task) -> Task:
    """Return the task that the data set declares, without the user's choices."""
    return task.base if isinstance(task, ChosenTask) else task


def sum_count(task: Task) -> int:
    """Return the number S of sums for a task."""
    return len(compute_sums(task, torch.zeros(0, task.outputs, dtype=torch.float64), _empty_targets(task)))


def metric_names(task: Task) -> list[str]:
    """Return the names of a client's metrics, in the order in which they are recorded."""
    blank = torch.zeros(0, task.outputs, dtype=torch.float64)
    return [*task.metrics(blank, _empty_targets(task), torch.zeros(0, dtype=torch.long), 1)]


def _empty_targets(task: Task) -> Tensor:
    base = base_of(task)
    if isinstance(base, Classification | Binary):
        return torch.zeros(0, dtype=torch.long)
    many = isinstance(base, MultiLabel | Regression)
    return torch.zeros(0, task.outputs if many else 2 if not isinstance(base, Count) else 1)


def _class_sums(task: Task, size: Tensor, rest: Tensor) -> dict[str, Tensor]:
    binary = isinstance(base_of(task), Binary)
    classes = (len(rest) - 2 - CALIBRATION_BINS) // 3
    loss, gap, bins, true, guessed, hits = rest.split([1, 1, CALIBRATION_BINS, classes, classes, classes])
    names: Sequence[str] = metric_labels(task.classes) if isinstance(task, ChosenTask) else ()
    each = {
        class_metric_name(what, name): ratio(true, guessed, hits)[k]
        for what, ratio in CLASS_RATIOS.items()
        for k, name in enumerate(names)
    }
    return each | {
        "loss": loss / size,
        "accuracy": hits.sum() / size,
        "calibration_error": bins.abs().sum() / size,
        "brier": gap / size,
        "perplexity": (loss / size).exp(),
        **{name: metric(true, guessed, hits) for name, metric in COUNT_METRICS.items()},
        **({"f1": 2 * hits[1] / (true[1] + guessed[1])} if binary else {}),
    }
