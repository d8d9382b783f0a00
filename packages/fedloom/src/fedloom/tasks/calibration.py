"""Recalibration of a binary model at a client by a linear function of its logits, fitted on validation data.

References: J. C. Platt, "Probabilistic outputs for support vector machines", 1999. E. W. Steyerberg, "Clinical
Prediction Models", 2nd ed., Section 15.3, recommends fitting only the intercept if there are few events, and otherwise
the intercept and the slope.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
MIN_SLOPE_ROWS = 10
"""Minimum number of validation rows in each class for fitting the slope."""
INVERSE_PENALTY = 1e10
"""Inverse strength of the penalty in scikit-learn's logistic regression."""
MAX_LOGIT = 1e3
"""Logit that represents a probability that is 0 or 1 in all of its digits."""


def recalibration(output: Tensor, y: Tensor, owner: Tensor, n: int) -> Tensor:
    """Return the slope and intercept of each client, ``[n, 2]`` float64.

    If one of the classes has no rows at the client, both are NaN.

    If a class has fewer than `MIN_SLOPE_ROWS` rows, or if the logits rank the rows worse than chance, the slope is set
    to 1. The intercept makes the mean probability equal to the fraction of positive targets.

    Args:
        output: logits ``[N, 1]`` for the validation samples of all clients.
        y: targets of these samples, 0 or 1, ``[N]``.
        owner: client of each sample ``[N]``.
        n: number of clients.
    """
    lines = torch.full((n, 2), torch.nan, dtype=torch.float64)
    for client, z, hits in _clients_with_both_classes(output, y, owner, n):
        slope = _fit_slope(z, hits)
        slope = slope if slope > 0 else 1.0
        lines[client] = torch.tensor([slope, _fit_intercept(slope * z, float(hits.mean()))], dtype=torch.float64)
    return lines


def calibration(output: Tensor, y: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
    """Return two measures of how well the probabilities of each client are calibrated, each float64 ``[n]``.

    The arguments are the same as for `recalibration`.

    ``calibration_slope`` is the slope in a regression of the targets on the logits. The slope is 1 if the probabilities
    have the correct spread, less than 1 if they are too extreme, and NaN if a class has fewer than `MIN_SLOPE_ROWS`
    rows. ``calibration_intercept`` is calibration-in-the-large, i.e., the number that must be added to the logits to
    match the fraction of positive targets. Ideally, this number is 0. The number is NaN if all targets are in one
    class.
    """
    slopes, intercepts = torch.full((2, n), torch.nan, dtype=torch.float64)
    for client, z, hits in _clients_with_both_classes(output, y, owner, n):
        slopes[client], intercepts[client] = _fit_slope(z, hits), _fit_intercept(z, float(hits.mean()))
    return {"calibration_slope": slopes, "calibration_intercept": intercepts}


def _clients_with_both_classes(
    output: Tensor, y: Tensor, owner: Tensor, n: int
) -> Iterator[tuple[int, Floats, Floats]]:
    """Yield the number, logits and targets of each client that has finite logits and targets of both classes."""
    logits, targets, owners = (t.detach().cpu().numpy() for t in (output.double().flatten(), y.double(), owner))
    for client in range(n):
        z, hits = logits[owners == client], targets[owners == client]
        if 0 < hits.sum() < len(hits) and np.isfinite(z).all():
            yield client, z, hits


def _fit_slope(z: Floats, hits: Floats) -> float:
    """Return the slope of a logistic regression of targets on logits.

    If a class has fewer than `MIN_SLOPE_ROWS` rows, the result is NaN.
    """
    from sklearn.linear_model import LogisticRegression  # slow to import

    if min(hits.sum(), len(hits) - hits.sum()) < MIN_SLOPE_ROWS or z.std() == 0:
        return float("nan")
    scaled = ((z - z.mean()) / z.std())[:, None]
    fit = LogisticRegression(C=INVERSE_PENALTY, tol=1e-10, max_iter=1000).fit(scaled, hits)
    return float(fit.coef_[0, 0]) / float(z.std())


def _fit_intercept(z: Floats, share: float) -> float:
    """Return the number that must be added to logits so that the mean probability equals a given fraction in (0, 1)."""
    from scipy.optimize import brentq  # slow to import
    from scipy.special import expit

    return float(brentq(lambda b: expit(z + b).mean() - share, -MAX_LOGIT - z.max(), MAX_LOGIT - z.min(), xtol=1e-12))


def recalibrate(output: Tensor, line: Tensor) -> Tensor:
    """Recalibrate logits ``[N, 1]`` with the slopes and intercepts of their clients, ``[N, 2]`` or ``[2]``.

    If the slope or the intercept is NaN, logits are not changed.
    """
    slope, intercept = line.to(output).unbind(-1)
    fitted = ~(slope.isnan() | intercept.isnan())
    return torch.where(fitted, slope, 1.0).unsqueeze(-1) * output + torch.where(fitted, intercept, 0.0).unsqueeze(-1)
