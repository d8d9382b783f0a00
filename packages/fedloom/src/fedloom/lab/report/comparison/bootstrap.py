"""Bootstrap: metrics of resampled test samples, and the standard error of the difference between two models.

Reference: B. Efron and R. Tibshirani, "An Introduction to the Bootstrap", 1993, Section 6.2. Each resample uses both
models' predictions for the same patients. If subjects are known, each subject is resampled together with all of its
samples: C. A. Field and A. H. Welsh, "Bootstrapping clustered data", J. R. Stat. Soc. B 69, 2007.
"""

from __future__ import annotations

import numpy as np

from fedloom.lab.report.patients import StoredPredictions
from fedloom.lab.report.run import Numbers

BOOTSTRAP_RESAMPLES = 1000
"""Number of bootstrap resamples. With this number, the relative error of a standard error is about 1 / sqrt(2 * 1000) =
2.2 %. Efron and Tibshirani (Section 6.4) consider 200 resamples sufficient."""
MAX_PAIRS = 10**8
"""Maximum number of pairs (a patient with an event and another patient) for the interval of a C-index."""


def weighted_metric(metric: str, weight: Numbers, samples: StoredPredictions) -> Numbers:
    """Compute a metric of test samples for each set of weights, ``[B]``. An undefined metric is NaN.

    Args:
        metric: ``accuracy`` (a prediction above 0.5 must match a target above 0.5), ``c_index``, ``macro_auroc``,
            ``r2``, ``rmse``, ``mae`` or ``deviance``. They are defined as in the tasks, in the units of the label.
        weight: nonnegative weight of each sample in each resample, ``[B, N]``.
        samples: targets and predictions of the samples, ``[N]``, or ``[N, k]`` for ``macro_auroc``.
    """
    y, prediction = samples.target, samples.prediction
    error, total = prediction - y, weight.sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        if metric == "macro_auroc":
            return _label_areas(weight, samples)
        if metric == "c_index":
            return _concordance(weight, samples)
        if metric == "accuracy":
            return np.asarray(weight @ ((prediction > 0.5) == (y > 0.5)).astype(float) / total)
        if metric == "mae":
            return np.asarray(weight @ np.abs(error) / total)
        if metric == "deviance":
            from scipy.special import xlogy  # slow to import

            return np.asarray(weight @ (2 * (xlogy(y, y) - xlogy(y, prediction) + error)) / total)
        squares = weight @ error**2
        if metric == "rmse":
            return np.asarray(np.sqrt(squares / total))
        return np.asarray(1 - squares / (weight @ y**2 - (weight @ y) ** 2 / total))


def _label_areas(weight: Numbers, samples: StoredPredictions) -> Numbers:
    """Compute the weighted AUROC, averaged over labels with both positive and negative samples, ``[B]``."""
    total, defined = np.zeros(len(weight)), np.zeros(len(weight))
    for y, score in zip(samples.target.T, samples.prediction.T, strict=True):
        labelled = np.flatnonzero(~np.isnan(y))
        order = labelled[np.argsort(score[labelled], kind="stable")]
        if len(order) == 0:
            continue
        first = np.flatnonzero(np.diff(score[order], prepend=-np.inf))  # start of each group of equal scores
        present, absent = (
            np.add.reduceat(weight[:, order] * some, first, axis=1) for some in (y[order] == 1, y[order] == 0)
        )
        won = (present * (absent.cumsum(1) - absent / 2)).sum(1)  # correctly ranked pairs, with ties counted as half
        pairs = present.sum(1) * absent.sum(1)
        total += np.where(pairs > 0, won / np.maximum(pairs, 1), 0.0)
        defined += pairs > 0
    return total / defined


def _concordance(weight: Numbers, samples: StoredPredictions) -> Numbers:
    """Compute Harrell's C-index of weighted samples, ``[B]``.

    Two copies of the same patient are not compared with each other.
    """
    assert samples.event is not None
    events = np.flatnonzero(samples.event > 0)
    right, pairs = np.zeros(len(weight)), np.zeros(len(weight))
    for some in np.array_split(events, max(1, len(events) * len(samples.target) // 10**6)):
        time, risk = samples.target[some, None], samples.prediction[some, None]
        later = (samples.target > time) | ((samples.target == time) & (samples.event == 0))
        won = later * ((samples.prediction < risk) + (samples.prediction == risk) / 2)
        pairs += ((weight[:, some] @ later) * weight).sum(1)
        right += ((weight[:, some] @ won) * weight).sum(1)
    return right / pairs


def standard_error(metric: str, alone: StoredPredictions, shared: StoredPredictions | None = None) -> float:
    """Return the bootstrap standard error of a metric: its standard deviation over resamples of subjects.

    Return NaN if it cannot be computed.

    Args:
        metric: name of the metric, as in `weighted_metric`.
        alone: samples with one model's predictions.
        shared: another model's predictions for the same samples. If given, the standard error is that of the difference
            between the two models.
    """
    n, units = len(alone.target), alone.units
    subjects = int(units.max(initial=-1)) + 1
    if subjects < 2 or (metric == "c_index" and alone.event is not None and alone.event.sum() * n > MAX_PAIRS):
        return float("nan")
    rng = np.random.default_rng(0)
    values = list[Numbers]()
    block = max(1, 10**7 // n)
    for start in range(0, BOOTSTRAP_RESAMPLES, block):
        count = min(block, BOOTSTRAP_RESAMPLES - start)
        drawn = rng.multinomial(subjects, np.full(subjects, 1 / subjects), count).astype(float)
        weight = drawn if alone.subject is None else drawn[:, units]
        figures = weighted_metric(metric, weight, alone)
        values.append(figures if shared is None else weighted_metric(metric, weight, shared) - figures)
    gains = np.concatenate(values)
    gains = gains[np.isfinite(gains)]
    return float(gains.std(ddof=1)) if len(gains) > BOOTSTRAP_RESAMPLES / 2 else float("nan")
