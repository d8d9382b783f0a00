"""Computation of metrics for all clients at once.

The computation runs on the CPU in float64, and the results of different clients are independent.

In this module, N is the number of samples of all clients together, n is the number of clients, and C is the number of
classes. ``owner`` ``[N]`` is the client of each sample.

References:
    AUROC is computed as a rank sum with mid-ranks for ties (Mann and Whitney 1947; Hanley and McNeil, Radiology 1982).
    AUPRC is the average precision, with one step per distinct score (Davis and Goadrich, ICML 2006). The calibration
    error uses 15 equal bins of the predicted probability (Naeini et al., AAAI 2015; Guo et al., ICML 2017). The Brier
    score is defined as in Brier, Monthly Weather Review 1950. For two classes, it is half of the original score, which
    makes it the squared error of a single probability. The balanced accuracy is defined as in Brodersen et al., ICPR
    2010.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedloom.metrics import class_metric_name

CALIBRATION_BINS = 15
"""Number of bins of equal width in the calibration error."""


def to_float64(x: Tensor) -> Tensor:
    """Return a tensor in float64 on the CPU, where the order of sums is fixed."""
    return x.detach().to("cpu", torch.float64)


def owner_total(x: Tensor, owner: Tensor, n: int) -> Tensor:
    """Return the sums ``[n, ...]`` of x ``[N, ...]`` over the samples of each client."""
    return x.new_zeros(n, *x.shape[1:]).index_add(0, owner, x)


def owner_mean(x: Tensor, owner: Tensor, n: int) -> Tensor:
    """Return the means ``[n, ...]`` of x ``[N, ...]`` over the samples of each client.

    If a client has no samples, its mean is NaN.
    """
    size = torch.bincount(owner, minlength=n).double()
    return owner_total(x, owner, n) / size.view(n, *[1] * (x.ndim - 1))


def select_labelled(output: Tensor, y: Tensor, owner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs, targets and clients of labeled samples or positions.

    The target of positions without a label is -1.
    """
    if len(owner) == len(y):
        return output, y, owner
    has_label = y >= 0
    owners = owner.repeat_interleave(len(y) // len(owner))
    return output[has_label], y[has_label], owners[has_label.to(owner.device)]


def mask_nonfinite_clients(values: dict[str, Tensor], output: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
    """Set a client's metrics to NaN if some of its outputs are not finite."""
    if bool(output.sum().isfinite()):
        return values
    lost = torch.bincount(owner[~output.isfinite().all(1)], minlength=n) > 0
    return {name: value.masked_fill(lost, torch.nan) for name, value in values.items()}


def compute_rank_metrics(score: Tensor, y: Tensor, owner: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return each client's AUROC and AUPRC. Equal scores are treated as a single threshold."""
    order = score.argsort(descending=True, stable=True)
    order = order[owner[order].argsort(stable=True)]
    score, y, owner = score[order], y[order], owner[order]
    fresh = torch.ones_like(owner, dtype=torch.bool)
    fresh[1:] = (owner[1:] != owner[:-1]) | (score[1:] != score[:-1])
    tie, who = fresh.cumsum(0) - 1, owner[fresh]  # groups of equal scores, highest first, and their clients
    ties = len(who)
    positive, negative = owner_total(y, tie, ties), owner_total(1 - y, tie, ties)
    all_positive, all_negative = owner_total(y, owner, n), owner_total(1 - y, owner, n)
    before = owner_total(torch.stack([positive, negative], 1), who, n).cumsum(0).roll(1, 0)  # of preceding clients
    before[:1] = 0
    above = positive.cumsum(0) - before[who, 0]  # positive samples at or above the threshold
    named = above + negative.cumsum(0) - before[who, 1]  # all samples at or above it
    won = owner_total(negative * (above - positive / 2), who, n)  # correctly ranked pairs; ties contribute one half
    step = owner_total(positive * above / named, who, n)
    return won / (all_positive * all_negative), step / all_positive


def calibration_error(p: Tensor, y: Tensor, owner: Tensor, n: int) -> Tensor:
    """Return the mean ``[n]`` over each client's samples of |fraction of positive y - mean p| in the sample's bin."""
    cell = owner * CALIBRATION_BINS + (p.nan_to_num(0) * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    gap = owner_total(y - p, cell, n * CALIBRATION_BINS).abs().view(n, CALIBRATION_BINS).sum(1)
    return gap / torch.bincount(owner, minlength=n).double()


def count_by_class(label: Tensor, owner: Tensor, n: int, classes: int) -> Tensor:
    """Return the number of samples of each client in each class, float64 ``[n, C]``."""
    return torch.bincount(owner * classes + label, minlength=n * classes).view(n, classes).double()


def class_metrics(
    wanted: Collection[str], p: Tensor, guess: Tensor, y: Tensor, owner: Tensor, n: int, names: Sequence[str]
) -> dict[str, Tensor]:
    """Return class-wise metrics ``[n]``. Means over classes include only the classes for which the metric is defined.

    Args:
        wanted: names in `COUNT_METRICS` or `CLASS_RATIOS` (which give one metric per class), or ``auroc_ovr``,
            ``auprc_ovr``, ``brier`` and ``calibration_error``.
        p: probabilities ``[N, C]``.
        guess: predicted classes ``[N]``.
        y: ``[N]`` targets.
        owner: ``[N]`` clients.
        n: number of clients.
        names: names of the classes.
    """
    classes = p.shape[1]
    hit = guess == y
    true, guessed, hits = (count_by_class(*of, n, classes) for of in ((y, owner), (guess, owner), (y[hit], owner[hit])))
    figures: dict[str, Tensor] = {}
    for name in filter(wanted.__contains__, CLASS_RATIOS):
        values = CLASS_RATIOS[name](true, guessed, hits)
        figures |= {class_metric_name(name, label): values[:, k] for k, label in enumerate(names)}
    figures |= {name: COUNT_METRICS[name](true, guessed, hits) for name in COUNT_METRICS if name in wanted}
    if {"auroc_ovr", "auprc_ovr"} & {*wanted}:
        each = [torch.stack(compute_rank_metrics(p[:, k], (y == k).double(), owner, n)) for k in range(classes)]
        auroc, auprc = torch.stack(each).nanmean(0)
        figures |= {k: v for k, v in (("auroc_ovr", auroc), ("auprc_ovr", auprc)) if k in wanted}
    if "brier" in wanted:
        gap = (p - functional.one_hot(y, classes)).square().sum(1)
        figures["brier"] = owner_mean(gap / (2 if classes == 2 else 1), owner, n)
    if "calibration_error" in wanted:
        figures["calibration_error"] = calibration_error(p.amax(1), hit.double(), owner, n)
    return figures


def label_metrics(
    wanted: Collection[str], z: Tensor, y: Tensor, owner: Tensor, n: int, names: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Return metrics ``[n]`` for samples that have several labels.

    Args:
        wanted: names of metrics of `fedloom.tasks.MultiLabel`.
        z: logits ``[N, k]``.
        y: 1 if a label is present, 0 if it is absent, and -1 if it is unknown, ``[N, k]``.
        owner: ``[N]`` clients.
        n: number of clients.
        names: names of the labels, used in the names of metrics for individual labels.
    """
    is_known = y >= 0
    guess, present = (z > 0).double() * is_known, y.clamp(min=0)
    true, guessed, hits = (owner_total(values, owner, n) for values in (present, guess, present * guess))
    figures = label_counts(true, guessed, hits, names)
    if any(name.endswith(("_auroc", "_auprc")) for name in wanted):
        each = [
            torch.stack(compute_rank_metrics(scores[some], label[some], owner[some], n))
            for scores, label, some in zip(z.T, y.T, is_known.T, strict=True)
        ]
        for name, values in zip(("auroc", "auprc"), torch.stack(each, -1), strict=True):
            figures[f"macro_{name}"] = values.nanmean(-1)
            figures |= {class_metric_name(f"label_{name}", label): values[:, k] for k, label in enumerate(names)}
    figures["exact_match"] = owner_mean((guess == present).all(1).double(), owner, n)
    return {name: values for name, values in figures.items() if name.partition("[")[0] in wanted}


def label_counts(true: Tensor, guessed: Tensor, hits: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Return metrics ``[...]``, given the numbers of samples ``[..., k]`` with a label, a prediction, and both."""
    shown = {"recall": "recall", "precision": "precision", "label_f1": "dice"}
    each = {name: CLASS_RATIOS[ratio](true, guessed, hits) for name, ratio in shown.items()}
    figures = {
        class_metric_name(name, label): values[..., k] for name, values in each.items() for k, label in enumerate(names)
    }
    micro = 2 * hits.sum(-1) / (true + guessed).sum(-1)
    return {"micro_f1": micro, "macro_f1": macro_f1(true, guessed, hits), **figures}


def macro_f1(true: Tensor, guessed: Tensor, hits: Tensor) -> Tensor:
    """Return the mean F1 ``[...]`` over classes among the targets, from numbers of samples by class ``[..., C]``."""
    present = true > 0
    return torch.where(present, 2 * hits / (true + guessed).clamp(min=1), 0.0).sum(-1) / present.sum(-1)


FromCounts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of three numbers of samples per class ``[..., C]``: in the class, predicted to be in the class, and both."""

CLASS_RATIOS: Mapping[str, FromCounts] = {
    "recall": lambda true, _, hits: hits / true,
    "precision": lambda _, guessed, hits: hits / guessed,
    "dice": lambda true, guessed, hits: 2 * hits / (true + guessed),
    "iou": lambda true, guessed, hits: hits / (true + guessed - hits),
}
"""Metrics of each class ``[..., C]``."""

COUNT_METRICS: Mapping[str, FromCounts] = {
    "macro_f1": macro_f1,
    "balanced_accuracy": lambda true, _, hits: (hits / true).nanmean(-1),
    "mean_iou": lambda true, guessed, hits: torch.where(true > 0, hits / (true + guessed - hits), torch.nan).nanmean(
        -1
    ),
    "macro_precision": lambda true, guessed, hits: torch.where(
        true > 0, (hits / guessed).nan_to_num(0), torch.nan
    ).nanmean(-1),
}
"""Metrics ``[...]`` over all classes together. Each of these metrics can be requested in every task with classes."""
