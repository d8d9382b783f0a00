"""Recalibration of a binary model at a client: a linear function of its logits, fitted on the client's validation part.

References: J. C. Platt, "Probabilistic outputs for support vector machines", 1999. E. W. Steyerberg, "Clinical
Prediction Models", 2nd ed., Section 15.3: only the intercept if there are few events, else intercept and slope.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
MIN_SLOPE_ROWS = 10
"""Number of validation rows in each class from which on the slope is fitted too."""
INVERSE_PENALTY = 1e10
"""Inverse strength of the penalty in scikit-learn's logistic regression."""
MAX_LOGIT = 1e3
"""Logit of a probability that is 0 or 1 to all digits."""


def recalibration(output: Tensor, y: Tensor, owner: Tensor, n: int) -> Tensor:
    """Return slope and intercept ``[n, 2]`` float64 for each client. NaN if a client has no rows of one of the classes.

    If a class has fewer than `MIN_SLOPE_ROWS` rows, or if the logits rank the rows worse than chance, the slope is 1.
    The intercept makes the mean probability equal to the share of positives.

    Args:
        output: logits of all clients' validation samples ``[N, 1]``.
        y: their targets, 0 or 1, ``[N]``.
        owner: client of each sample ``[N]``.
        n: number of clients.
    """
    lines = torch.full((n, 2), torch.nan, dtype=torch.float64)
    for client, z, hits in _clients(output, y, owner, n):
        slope = _slope(z, hits)
        slope = slope if slope > 0 else 1.0
        lines[client] = torch.tensor([slope, _intercept(slope * z, float(hits.mean()))], dtype=torch.float64)
    return lines


def calibration(output: Tensor, y: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
    """Return the calibration of each client's probabilities, each float64 ``[n]``. Arguments as `recalibration`.

    ``calibration_slope`` is the slope in a regression of the targets on the logits: 1 if the probabilities have the
    correct spread, less than 1 if they are too extreme, and NaN with fewer than `MIN_SLOPE_ROWS` rows of a class.
    ``calibration_intercept`` is calibration in the large: the number to add to the logits to match the share of
    positives, which is ideally 0. It is NaN if there is only one class.
    """
    slopes, intercepts = torch.full((2, n), torch.nan, dtype=torch.float64)
    for client, z, hits in _clients(output, y, owner, n):
        slopes[client], intercepts[client] = _slope(z, hits), _intercept(z, float(hits.mean()))
    return {"calibration_slope": slopes, "calibration_intercept": intercepts}


def _clients(output: Tensor, y: Tensor, owner: Tensor, n: int) -> Iterator[tuple[int, Floats, Floats]]:
    """Yield the logits and targets of each client with both classes and finite logits, with the client's number."""
    logits, targets, owners = (t.detach().cpu().numpy() for t in (output.double().flatten(), y.double(), owner))
    for client in range(n):
        z, hits = logits[owners == client], targets[owners == client]
        if 0 < hits.sum() < len(hits) and np.isfinite(z).all():
            yield client, z, hits


def _slope(z: Floats, hits: Floats) -> float:
    """Return the slope of the logistic regression of targets on logits.

    The result is NaN with fewer than `MIN_SLOPE_ROWS` rows of a class.
    """
    from sklearn.linear_model import LogisticRegression  # slow to import

    if min(hits.sum(), len(hits) - hits.sum()) < MIN_SLOPE_ROWS or z.std() == 0:
        return float("nan")
    scaled = ((z - z.mean()) / z.std())[:, None]
    fit = LogisticRegression(C=INVERSE_PENALTY, tol=1e-10, max_iter=1000).fit(scaled, hits)
    return float(fit.coef_[0, 0]) / float(z.std())


def _intercept(z: Floats, share: float) -> float:
    """Return the number to add to logits so that the mean probability equals a share in (0, 1)."""
    from scipy.optimize import brentq  # slow to import
    from scipy.special import expit

    return float(brentq(lambda b: expit(z + b).mean() - share, -MAX_LOGIT - z.max(), MAX_LOGIT - z.min(), xtol=1e-12))


def recalibrated(output: Tensor, line: Tensor) -> Tensor:
    """Recalibrate logits ``[N, 1]`` with their clients' recalibrations ``[N, 2]`` or ``[2]``.

    Without recalibrations, return the logits unchanged.
    """
    slope, intercept = line.to(output).unbind(-1)
    fitted = ~(slope.isnan() | intercept.isnan())
    return torch.where(fitted, slope, 1.0).unsqueeze(-1) * output + torch.where(fitted, intercept, 0.0).unsqueeze(-1)
