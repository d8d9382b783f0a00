"""Computation of metrics for all clients at once: on the CPU, in float64, independently for each client.

Letters: N is the number of samples of all clients together, n of clients, C of classes. ``owner`` ``[N]`` is the client
of each sample.

References:
    AUROC: rank sum with mid-ranks for ties (Mann and Whitney 1947; Hanley and McNeil, Radiology 1982).
    AUPRC: average precision, one step per distinct score (Davis and Goadrich, ICML 2006).
    Calibration error: 15 equal bins of the predicted probability (Naeini et al., AAAI 2015; Guo et al., ICML 2017).
    Brier score: Brier, Monthly Weather Review 1950. For two classes, half of the original score, which is the squared
    error of one probability.
    Balanced accuracy: Brodersen et al., ICPR 2010.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedloom.metrics import class_metric_name

CALIBRATION_BINS = 15
"""Number of bins of equal width for the calibration error."""


def wide(x: Tensor) -> Tensor:
    """Move a tensor to the CPU, where sums have a fixed order, in float64."""
    return x.detach().to("cpu", torch.float64)


def owner_total(x: Tensor, owner: Tensor, n: int) -> Tensor:
    """Return the sum of x ``[N, ...]`` per owner, ``[n, ...]``."""
    return x.new_zeros(n, *x.shape[1:]).index_add(0, owner, x)


def owner_mean(x: Tensor, owner: Tensor, n: int) -> Tensor:
    """Return the mean of x ``[N, ...]`` per owner, ``[n, ...]``. NaN for an owner without samples."""
    size = torch.bincount(owner, minlength=n).double()
    return owner_total(x, owner, n) / size.view(n, *[1] * (x.ndim - 1))


def labelled(output: Tensor, y: Tensor, owner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Select the outputs, targets and owners of labeled samples or positions. -1 marks positions without a label."""
    if len(owner) == len(y):
        return output, y, owner
    has_label = y >= 0
    owners = owner.repeat_interleave(len(y) // len(owner))
    return output[has_label], y[has_label], owners[has_label.to(owner.device)]


def masked(values: dict[str, Tensor], output: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
    """Set the metrics of clients with a non-finite output to NaN."""
    if bool(output.sum().isfinite()):
        return values
    lost = torch.bincount(owner[~output.isfinite().all(1)], minlength=n) > 0
    return {name: value.masked_fill(lost, torch.nan) for name, value in values.items()}


def ranking(score: Tensor, y: Tensor, owner: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return AUROC and AUPRC per client. Equal scores form a single threshold."""
    order = score.argsort(descending=True, stable=True)
    order = order[owner[order].argsort(stable=True)]
    score, y, owner = score[order], y[order], owner[order]
    fresh = torch.ones_like(owner, dtype=torch.bool)
    fresh[1:] = (owner[1:] != owner[:-1]) | (score[1:] != score[:-1])
    tie, who = fresh.cumsum(0) - 1, owner[fresh]  # groups of equal scores, highest first, and their clients
    ties = len(who)
    positive, negative = owner_total(y, tie, ties), owner_total(1 - y, tie, ties)
    all_positive, all_negative = owner_total(y, owner, n), owner_total(1 - y, owner, n)
    before = owner_total(torch.stack([positive, negative], 1), who, n).cumsum(0).roll(1, 0)  # of the clients before
    before[:1] = 0
    above = positive.cumsum(0) - before[who, 0]  # positives at or above the threshold
    named = above + negative.cumsum(0) - before[who, 1]  # all samples at or above it
    won = owner_total(negative * (above - positive / 2), who, n)  # pairs ranked right, ties count half
    step = owner_total(positive * above / named, who, n)
    return won / (all_positive * all_negative), step / all_positive


def calibration_error(p: Tensor, y: Tensor, owner: Tensor, n: int) -> Tensor:
    """Return the mean over a client's samples of |share of hits y - mean probability p| in their bin, ``[n]``."""
    cell = owner * CALIBRATION_BINS + (p.nan_to_num(0) * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    gap = owner_total(y - p, cell, n * CALIBRATION_BINS).abs().view(n, CALIBRATION_BINS).sum(1)
    return gap / torch.bincount(owner, minlength=n).double()


def count_by_class(label: Tensor, owner: Tensor, n: int, classes: int) -> Tensor:
    """Count each client's samples by class, float64 ``[n, C]``."""
    return torch.bincount(owner * classes + label, minlength=n * classes).view(n, classes).double()


def class_metrics(
    wanted: Collection[str], p: Tensor, guess: Tensor, y: Tensor, owner: Tensor, n: int, names: Sequence[str]
) -> dict[str, Tensor]:
    """Return metrics that treat each class separately, each ``[n]``.

    A mean over classes includes only classes for which the metric is defined.

    Args:
        wanted: names among `COUNT_METRICS`, `CLASS_RATIOS` (which give one metric per class), ``auroc_ovr``,
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
        each = [torch.stack(ranking(p[:, k], (y == k).double(), owner, n)) for k in range(classes)]
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
    """Return metrics ``[n]`` for samples with several labels.

    Args:
        wanted: names among the metrics of `fedloom.tasks.MultiLabel`.
        z: logits ``[N, k]``.
        y: 1 for a label that is present, 0 for a label that is absent, -1 for an unknown label, ``[N, k]``.
        owner: ``[N]`` clients.
        n: number of clients.
        names: names of the labels, for metrics by label.
    """
    is_known = y >= 0
    guess, present = (z > 0).double() * is_known, y.clamp(min=0)
    true, guessed, hits = (owner_total(values, owner, n) for values in (present, guess, present * guess))
    figures = label_counts(true, guessed, hits, names)
    if any(name.endswith(("_auroc", "_auprc")) for name in wanted):
        each = [
            torch.stack(ranking(scores[some], label[some], owner[some], n))
            for scores, label, some in zip(z.T, y.T, is_known.T, strict=True)
        ]
        for name, values in zip(("auroc", "auprc"), torch.stack(each, -1), strict=True):
            figures[f"macro_{name}"] = values.nanmean(-1)
            figures |= {class_metric_name(f"label_{name}", label): values[:, k] for k, label in enumerate(names)}
    figures["exact_match"] = owner_mean((guess == present).all(1).double(), owner, n)
    return {name: values for name, values in figures.items() if name.partition("[")[0] in wanted}


def label_counts(true: Tensor, guessed: Tensor, hits: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Return metrics ``[...]`` from numbers of samples by label ``[..., k]``: with the label, predicted, and both."""
    shown = {"recall": "recall", "precision": "precision", "label_f1": "dice"}
    each = {name: CLASS_RATIOS[ratio](true, guessed, hits) for name, ratio in shown.items()}
    figures = {
        class_metric_name(name, label): values[..., k] for name, values in each.items() for k, label in enumerate(names)
    }
    micro = 2 * hits.sum(-1) / (true + guessed).sum(-1)
    return {"micro_f1": micro, "macro_f1": macro_f1(true, guessed, hits), **figures}


def macro_f1(true: Tensor, guessed: Tensor, hits: Tensor) -> Tensor:
    """Return the mean F1 ``[...]`` over the targets' classes, from numbers of samples by class ``[..., C]``."""
    present = true > 0
    return torch.where(present, 2 * hits / (true + guessed).clamp(min=1), 0.0).sum(-1) / present.sum(-1)


FromCounts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of the numbers of samples by class ``[..., C]``: true, predicted, and both."""

CLASS_RATIOS: Mapping[str, FromCounts] = {
    "recall": lambda true, _, hits: hits / true,
    "precision": lambda _, guessed, hits: hits / guessed,
    "dice": lambda true, guessed, hits: 2 * hits / (true + guessed),
    "iou": lambda true, guessed, hits: hits / (true + guessed - hits),
}
"""Metrics of single classes ``[..., C]``."""

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
"""Metrics ``[...]`` over all classes together. A metric in this table can be requested in every task with classes."""
