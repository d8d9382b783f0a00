"""Recalibration of a binary model at a client: a line through its logits, fitted on the client's validation part.

References: J. C. Platt, "Probabilistic outputs for support vector machines", 1999; E. W. Steyerberg, "Clinical
Prediction Models", 2nd ed., Section 15.3: the intercept alone where events are few, else intercept and slope.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from torch import Tensor

ENOUGH = 10
"""Validation rows of each class from which the slope is fitted too."""
UNPENALISED = 1e10
"""Inverse strength of the penalty that scikit-learn's logistic regression is given."""
STEEP = 1e3
"""Logit of a probability that is 0 or 1 in every digit."""


def recalibration(output: Tensor, y: Tensor, owner: Tensor, n: int) -> Tensor:
    """Slope and intercept ``[n, 2]`` float64 of every client; nan where a client has no row of one of the classes.

    With fewer than `ENOUGH` rows of a class, or where the logits rank the rows worse than chance, the slope is 1. The
    intercept makes the mean probability the share of positives.

    Args:
        output: ``[N, 1]`` logits of all clients' validation samples.
        y: ``[N]`` their targets, 0 or 1.
        owner: ``[N]`` client of every sample.
        n: number of clients.
    """
    lines = torch.full((n, 2), torch.nan, dtype=torch.float64)
    logits, targets, owners = (t.detach().cpu().numpy() for t in (output.double().flatten(), y, owner))
    for client in range(n):
        z, hits = logits[owners == client], targets[owners == client]
        least = min(int(hits.sum()), len(hits) - int(hits.sum()))
        if least == 0 or not np.isfinite(z).all():
            continue
        slope = 1.0
        if least >= ENOUGH and z.std() > 0:
            fit = LogisticRegression(C=UNPENALISED, tol=1e-10, max_iter=1000).fit(
                ((z - z.mean()) / z.std())[:, None], hits
            )
            steep = float(fit.coef_[0, 0]) / float(z.std())
            slope = steep if steep > 0 else 1.0
        lines[client] = torch.tensor([slope, _intercept(slope * z, float(hits.mean()))], dtype=torch.float64)
    return lines


def _intercept(z: NDArray[np.float64], share: float) -> float:
    """What is added to logits to make the mean probability a share in (0, 1)."""
    return float(brentq(lambda b: expit(z + b).mean() - share, -STEEP - z.max(), STEEP - z.min(), xtol=1e-12))


def recalibrated(output: Tensor, line: Tensor) -> Tensor:
    """Logits ``[N, 1]`` on the lines ``[N, 2]`` or ``[2]`` of their clients; as they are where there is none."""
    slope, intercept = line.to(output).unbind(-1)
    there = ~(slope.isnan() | intercept.isnan())
    return torch.where(there, slope, 1.0).unsqueeze(-1) * output + torch.where(there, intercept, 0.0).unsqueeze(-1)
