"""Metrics of resampled test samples: the standard error of a difference of two models, paired over patients.

Reference: B. Efron and R. Tibshirani, "An Introduction to the Bootstrap", 1993, Section 6.2; every resample has both
models' predictions of the patients in it.
"""

from __future__ import annotations

import numpy as np

from fedloom.lab.report.patients import Predicted
from fedloom.lab.report.run import Numbers

RESAMPLES = 1000
MOST_PAIRS = 10**8
"""Pairs of an event and another patient that are compared; with more, a C-index has no interval here."""


def weighted(metric: str, weight: Numbers, samples: Predicted) -> Numbers:
    """A metric ``[B]`` of test samples of which each counts as often as its weight; nan where it has no value.

    Args:
        metric: ``c_index``, ``r2``, ``rmse``, ``mae`` or ``deviance``, as the tasks define them; in units of the label.
        weight: ``[B, N]``, 0 or more.
        samples: ``[N]``.
    """
    y, prediction = samples.target, samples.prediction
    error, total = prediction - y, weight.sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        if metric == "c_index":
            return _concordance(weight, samples)
        if metric == "mae":
            return np.asarray(weight @ np.abs(error) / total)
        if metric == "deviance":
            from scipy.special import xlogy  # slow to import

            return np.asarray(weight @ (2 * (xlogy(y, y) - xlogy(y, prediction) + error)) / total)
        squares = weight @ error**2
        if metric == "rmse":
            return np.asarray(np.sqrt(squares / total))
        return np.asarray(1 - squares / (weight @ y**2 - (weight @ y) ** 2 / total))


def _concordance(weight: Numbers, samples: Predicted) -> Numbers:
    """Harrell's C-index; a patient who is drawn twice is not compared with itself."""
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


def standard_error(metric: str, alone: Predicted, shared: Predicted) -> float:
    """Standard deviation of the difference of a metric over `RESAMPLES` resamples; nan where it cannot be had."""
    n = len(alone.target)
    if n < 2 or (metric == "c_index" and alone.event is not None and alone.event.sum() * n > MOST_PAIRS):
        return float("nan")
    rng = np.random.default_rng(0)
    values = list[Numbers]()
    block = max(1, 10**7 // n)
    for start in range(0, RESAMPLES, block):
        weight = rng.multinomial(n, np.full(n, 1 / n), min(block, RESAMPLES - start)).astype(float)
        values.append(weighted(metric, weight, shared) - weighted(metric, weight, alone))
    gains = np.concatenate(values)
    gains = gains[np.isfinite(gains)]
    return float(gains.std(ddof=1)) if len(gains) > RESAMPLES / 2 else float("nan")
