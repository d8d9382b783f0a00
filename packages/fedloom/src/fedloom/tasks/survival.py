"""Time-to-event task: partial likelihood of a batch, and the discrimination and calibration of a client's risks.

In this module, b is the number of samples in a batch, N is the number of samples of all clients together, and n is the
number of clients. A target consists of a time and an indicator, which is 1 if the event was observed and 0 if the time
is censored.

References:
    Partial likelihood: D. R. Cox, JRSS B 1972. Ties by B. Efron, JASA 1977. Networks: J. L. Katzman et al., "DeepSurv",
    BMC Med. Res. Methodol. 2018. Risk sets of a batch: H. Kvamme et al., "Time-to-event prediction with neural networks
    and Cox regression", JMLR 2019, Section 3.2. Baseline hazard: N. Breslow, Biometrics 1974. Survival: E. L. Kaplan
    and P. Meier, JASA 1958. C-index: F. E. Harrell et al., JAMA 1982. Brier score with inverse censoring weights: E.
    Graf et al., Stat. Med. 1999.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedloom.tasks.figures import mask_nonfinite_clients
from fedloom.tasks.kinds import OwnLoss, TaskKind

Floats = NDArray[np.float64]
MAX_RISK_GROUPS = 5
"""Maximum number of risk groups for comparing observed and expected events."""
MIN_GROUP_ROWS = 10
"""Minimum number of rows in each of these groups."""
BLOCK_PAIRS = 1 << 22
"""Number of pairs of rows that are compared in one step."""


class Survival(TaskKind):
    """Time-to-event task. The model has one output z, which is the log of the hazard relative to the client's baseline.

    The loss is the partial likelihood.

    Metrics: ``loss`` is the negative log partial likelihood divided by the number of rows (Efron's method for ties).
    ``c_index`` is Harrell's C-index in [0, 1], which is the fraction of comparable pairs in which the row with the
    earlier event has the higher risk. With a horizon, z is the log of the cumulative hazard at the horizon
    (`fit_baseline`), and there are three additional metrics. ``brier`` is the Brier score in [0, 1] with inverse
    censoring weights. ``calibration_error`` is the mean of |observed - expected| fraction of events by the horizon,
    over up to `MAX_RISK_GROUPS` groups of increasing risk. ``observed_expected`` is the ratio of the two fractions over
    all rows. Observed fractions are Kaplan-Meier estimates.
    """

    horizon: float | None = Field(
        None,
        gt=0,
        description="time horizon: the model predicts whether the event occurs by this time (None: it only ranks "
        "samples)",
    )

    @property
    def outputs(self) -> int:
        """Number of outputs, which is 1 because the model predicts the log of a hazard."""
        return 1

    @property
    def own_loss(self) -> OwnLoss:
        """Partial likelihood as a loss: it is defined for a batch rather than for a single row."""
        return partial_loss

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of the batch, repeated for every row, so that the mean over rows is the loss of the batch."""
        return partial_loss(output, y).expand(len(y))

    def dloss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of b times the loss of the batch."""
        rows = _sum_hazards(output, y)
        if rows is None:
            return torch.zeros_like(output)
        z, tie, place, at_risk, share, hazards = rows.z, rows.tie, rows.place, rows.at_risk, rows.share, rows.hazards
        later = torch.cat([(-hazards).flip(0).logcumsumexp(0).flip(0), z.new_tensor([-torch.inf])])
        slope = (z + later[torch.searchsorted(place, tie)]).exp()  # a row is in every risk set up to its time
        ties = z.new_zeros(len(at_risk)).index_add(0, place, share * (at_risk[place] - hazards).exp())[place]
        slope[rows.event] -= 1 + (z[rows.event] - at_risk[place]).exp() * ties
        return torch.empty_like(slope).index_copy(0, rows.order, slope)[:, None]

    def predict(self, output: Tensor) -> Tensor:
        """Return the output unchanged."""
        return output

    def metrics(self, output: Tensor, y: Tensor, owner: Tensor, n: int) -> dict[str, Tensor]:
        """Return the loss and the C-index.

        With a horizon, also return the Brier score and measures of calibration (see `Task.metrics`).
        """
        names = ["loss", "c_index", *(["brier", "calibration_error", "observed_expected"] if self.horizon else [])]
        values = {name: torch.full((n,), torch.nan, dtype=torch.float64) for name in names}
        for client, rows in _finite_client_rows(output, y, owner, n):
            z = torch.from_numpy(rows.z)[:, None]
            values["loss"][client] = partial_loss(z, torch.from_numpy(np.stack([rows.time, rows.event], 1)))
            values["c_index"][client] = concordance(rows)
            if self.horizon is not None:
                risk = rows._replace(z=-np.expm1(-np.exp(rows.z)))
                values["brier"][client] = brier(risk, self.horizon)
                error, ratio = observed_expected(risk, self.horizon)
                values["calibration_error"][client], values["observed_expected"][client] = error, ratio
        return mask_nonfinite_clients(values, output.detach().cpu(), owner.cpu(), n)


class SurvivalRows(NamedTuple):
    """Rows of one client: scores ``z [N]``, where higher scores mean earlier events, ``time [N]`` and ``event [N]``."""

    z: Floats
    time: Floats
    event: Floats


def _finite_client_rows(output: Tensor, y: Tensor, owner: Tensor, n: int) -> Iterator[tuple[int, SurvivalRows]]:
    """Yield the number and the rows of each client that has rows and whose outputs are all finite."""
    z, times, owners = (t.detach().cpu().numpy() for t in (output.double().flatten(), y.double(), owner))
    order = np.argsort(owners, kind="stable")
    for client, rows in enumerate(np.split(order, np.bincount(owners, minlength=n).cumsum()[:-1])):
        if len(rows) and np.isfinite(z[rows]).all():
            yield client, SurvivalRows(z[rows], times[rows, 0], times[rows, 1])


def partial_loss(output: Tensor, y: Tensor) -> Tensor:
    """Return the negative log partial likelihood divided by the number of rows, with Efron's method for ties.

    The result is a scalar, which is 0 if there is no event.

    Args:
        output: log hazards ``[b, 1]``.
        y: times and events ``[b, 2]``.
    """
    rows = _sum_hazards(output, y)
    return output.sum() * 0 if rows is None else (rows.hazards - rows.z[rows.event]).sum() / len(y)


class _AtRisk(NamedTuple):
    """Rows by decreasing time: ``order [b]``, log hazards ``z``, events, and ``tie``, the index of the tied group.

    For each of the e events, ``place`` ``[e]`` is the index of its group, ``share`` is the share of the group's events
    that Efron's method removes, and ``hazards`` is the log of the sum of the hazards at risk. ``at_risk`` is this
    logarithm for each group before a share is removed.
    """

    order: Tensor
    z: Tensor
    event: Tensor
    tie: Tensor
    at_risk: Tensor
    place: Tensor
    share: Tensor
    hazards: Tensor


def _sum_hazards(output: Tensor, y: Tensor) -> _AtRisk | None:
    """Sum the hazards of the rows that are at risk at each event, or return None if there is no event."""
    order = y[:, 0].argsort(descending=True, stable=True)
    z, time, event = output[order, 0], y[order, 0], y[order, 1] > 0
    if not bool(event.any()):
        return None
    last = torch.cat([time[1:] != time[:-1], torch.ones_like(event[:1])])  # last row of each tied time
    tie = last.cumsum(0) - last.long()
    at_risk = z.logcumsumexp(0)[last]  # log-sum over rows with at least this time
    place = tie[event]
    deaths = torch.bincount(place, minlength=len(at_risk))
    earlier = torch.arange(len(place), device=z.device) - (deaths.cumsum(0) - deaths)[place]
    tied = z.new_zeros(len(at_risk)).index_add(0, place, (z[event] - at_risk[place]).exp())
    share = earlier.to(z.dtype) / deaths[place]
    hazards = at_risk[place] + torch.log1p(-share * tied[place])
    return _AtRisk(order, z, event, tie, at_risk, place, share, hazards)


def fit_baseline(output: Tensor, y: Tensor, owner: Tensor, n: int, horizon: float) -> Tensor:
    """Return slope 1 and baseline ``[n, 2]``, which convert log hazards to log cumulative hazards at the horizon.

    The baseline is Breslow's estimate at each client. If a client has no event by the horizon, half an event is
    distributed over all of its rows at risk.

    Args:
        output: log hazards ``[N, 1]`` of the training samples of all clients.
        y: times and events ``[N, 2]`` of these samples.
        owner: client of each sample ``[N]``.
        n: number of clients.
        horizon: time horizon of the predicted events.
    """
    lines = torch.full((n, 2), torch.nan, dtype=torch.float64)
    for client, rows in _finite_client_rows(output, y, owner, n):
        shift, order = rows.z.max(), np.argsort(rows.time)
        at_risk = np.exp(rows.z - shift)[order][::-1].cumsum()[::-1]
        times = rows.time[(rows.event > 0) & (rows.time <= horizon)]
        hazard = (1 / at_risk[np.searchsorted(rows.time[order], times)]).sum() if len(times) else 0.5 / at_risk[0]
        lines[client] = torch.tensor([1.0, np.log(hazard) - shift], dtype=torch.float64)
    return lines


def concordance(rows: SurvivalRows) -> float:
    """Return Harrell's C-index. If no pair is comparable, the result is NaN.

    A pair of rows is comparable if one row has an event before the other row's time, or if both times are equal and the
    other row is censored. A pair with equal scores contributes one half.
    """
    right, pairs = 0.0, 0
    events = np.nonzero(rows.event > 0)[0]
    for some in np.array_split(events, max(1, len(events) * len(rows.z) // BLOCK_PAIRS)):
        time, z = rows.time[some, None], rows.z[some, None]
        later = (rows.time > time) | ((rows.time == time) & (rows.event == 0))
        pairs += int(later.sum())
        right += float(((rows.z < z) & later).sum()) + float(((rows.z == z) & later).sum()) / 2
    return right / pairs if pairs else float("nan")


def survival_curve(time: Floats, event: Floats, at: Floats, *, before: bool = False) -> Floats:
    """Return the Kaplan-Meier fraction without an event up to times ``at [k]``, or just before them with ``before``."""
    times, inverse = np.unique(time, return_inverse=True)
    at_risk = np.bincount(inverse)[::-1].cumsum()[::-1]
    curve = np.concatenate([[1.0], np.cumprod(1 - np.bincount(inverse, event > 0) / at_risk)])
    return np.asarray(curve[np.searchsorted(times, at, side="left" if before else "right")])


def brier(risk: SurvivalRows, horizon: float) -> float:
    """Return the Brier score: the weighted mean of the squared difference between risk and outcome at the horizon.

    The weights are computed from the censoring at the client itself.

    If no row is observed beyond the horizon, the result is NaN.
    """
    came, past = (risk.time <= horizon) & (risk.event > 0), risk.time > horizon
    free = survival_curve(risk.time, 1 - risk.event, np.where(came, risk.time, horizon), before=True)
    at_end = survival_curve(risk.time, 1 - risk.event, np.array([horizon]))[0]
    if not past.any() or at_end == 0:
        return float("nan")
    terms = np.where(came, (1 - risk.z) ** 2 / np.where(free > 0, free, 1), np.where(past, risk.z**2 / at_end, 0.0))
    return float(terms.mean())


def observed_expected(risk: SurvivalRows, horizon: float) -> tuple[float, float]:
    """Return the calibration error, and the ratio of observed to expected events by the horizon.

    If no row is observed until the horizon, both are NaN.
    """
    if risk.time.max() < horizon:
        return float("nan"), float("nan")

    def observed(rows: NDArray[np.int64]) -> float:
        return 1 - float(survival_curve(risk.time[rows], risk.event[rows], np.array([horizon]))[0])

    order = np.argsort(risk.z, kind="stable")
    groups = np.array_split(order, max(1, min(MAX_RISK_GROUPS, len(order) // MIN_GROUP_ROWS)))
    gaps = [len(rows) * abs(observed(rows) - risk.z[rows].mean()) for rows in groups]
    return sum(gaps) / len(order), observed(order) / float(risk.z.mean())
