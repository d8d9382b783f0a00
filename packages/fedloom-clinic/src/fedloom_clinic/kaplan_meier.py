"""Kaplan-Meier curves, log-rank test and restricted means of groups, computed from counts in time bins.

References: E. L. Kaplan and P. Meier, JASA 1958. Variance by M. Greenwood, 1926. N. Mantel, Cancer Chemother. Rep. 1966
(log-rank). P. Royston and M. K. B. Parmar, Stat. Med. 2011 (restricted mean).

A time is treated as if it were the upper edge of its bin, so the curve and the test apply to binned times. In the curve
for the exact times, a bin with n rows at risk, d events and c censored rows has a factor between 1 - d / (n - c) and 1
- d / n, regardless of their order. These limits bound the error of each curve and each mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pydantic import Field
from scipy.stats import chi2, norm
from torch import Tensor

from fedloom.analyses import Analysis, AnalysisTerms, Bounds, ClientRows, Info, Question, Schema
from fedloom.analyses.tables import NUMBER_TYPE, TEXT_TYPE, make_table
from fedloom.errors import ConfigError, DataError
from fedloom_clinic.cells import (
    CLIENT_GROUP,
    MergedCells,
    count_subjects,
    group_codes,
    groups_of,
    merge_bins,
    merge_small_cells,
    sum_by_cell,
)
from fedloom_clinic.fits.cox_vectors import bin_ends

if TYPE_CHECKING:
    from fedloom.engine import Setting

Floats = NDArray[np.float64]


class SurvivalCounts(NamedTuple):
    """Cells that the question counts, and their total ``[G, 2, J]`` of events and censored rows, once it is known."""

    groups: MergedCells
    ends: Tensor
    total: Tensor | None = None


class SurvivalCurve(NamedTuple):
    """A group's Kaplan-Meier curve ``[J]``, its smallest possible value for exact times, and its log variance."""

    at_risk: Floats
    events: Floats
    censored: Floats
    survival: Floats
    lowest: Floats
    variance: Floats


class KaplanMeier(Analysis):
    """Survival curves, log-rank test and restricted means of groups, in time bins."""

    kind: ClassVar[str] = "kaplan-meier"
    assumes_independence: ClassVar[bool] = True
    tasks: ClassVar = ("survival",)
    questions: ClassVar = {"counts": {}}

    width: float = Field(gt=0, description="width of the time bins, in the unit of the times")
    until: float | None = Field(
        None,
        gt=0,
        description="upper edge of the last bin. Later times are censored at this time (None: the largest time)",
    )
    group: str | None = Field(
        None, description="column whose levels are the groups, or 'client' (None: a single curve)"
    )
    level: float = Field(0.95, gt=0, lt=1, description="confidence level of the intervals")

    @property
    def shows_rows(self) -> bool:
        return self.group == CLIENT_GROUP

    @property
    def kept_columns(self) -> tuple[str, ...]:
        return () if self.group in (None, CLIENT_GROUP) else (str(self.group),)

    def check(self, schema: Schema, setting: Setting | None = None) -> None:
        super().check(schema, setting)
        groups_of(schema, self.group, ())

    def check_sites(self, schema: Schema, *, masked: bool) -> None:
        super().check_sites(schema, masked=masked)
        if self.until is None and schema.target_ranges[0] is None:
            raise ConfigError(
                "the analysis kaplan-meier requires a last time, but `until` is not set",
                rule="analysis-last-time",
                fix="set `until` in the analysis, for example until = 60",
            )

    def publish(self, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        groups = len(groups_of(terms.schema, self.group, terms.client_names))
        code, place, event = self._groups_and_bins(client, terms)
        bins = len(self._ends(terms))
        some = client.select(event)
        events = count_subjects((code * bins + place)[event], some.subjects, groups * bins)
        return (torch.cat([count_subjects(code, client.subjects, groups), events]) >= terms.rules.min_subjects).double()

    def start(self, terms: AnalysisTerms) -> SurvivalCounts:
        names, ends = groups_of(terms.schema, self.group, terms.client_names), self._ends(terms)
        flags = torch.stack(terms.published)
        groups = merge_small_cells(names, flags[:, : len(names)], terms.rules)
        filled = flags[:, len(names) :].view(len(flags), len(names), -1)
        filled = (groups.members @ filled > 0).double()[:, groups.reached(flags[:, : len(names)])]
        reached = groups.reached(flags[:, : len(names)]).nonzero().flatten().tolist()
        clients = filled.any(2).sum(0) - terms.rules.missing
        short = [groups.names[k] for at, k in enumerate(reached) if clients[at] < terms.rules.min_clients]
        what = f"subjects with an event in the same time bin in {'groups' if len(short) > 1 else 'group'} "
        fix = "wider bins, on groups that all have enough events,"
        of = merge_bins(filled, terms.rules, (1,), filled.shape[2], what + ", ".join(short), fix)
        last = [int((of == k).nonzero().max()) for k in range(int(of.max()) + 1)]
        return SurvivalCounts(groups, ends[last])

    def question(self, state: SurvivalCounts) -> Question | None:
        return Question("counts") if state.total is None else None

    def bounds(self, question: Question, terms: AnalysisTerms) -> Bounds:
        state = self.start(terms)
        return Bounds.counts(len(state.groups.names) * 2 * len(state.ends), terms.most_rows)

    def answer(self, question: Question, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        state = self.start(terms)
        counts = self._counts(client, terms)
        of = torch.searchsorted(state.ends, self._ends(terms)).clamp(max=len(state.ends) - 1)
        return sum_by_cell((state.groups.members @ counts.flatten(1)).view(-1, 2, len(of)), of).flatten()

    def step(self, state: SurvivalCounts, total: Tensor, info: Info) -> SurvivalCounts:
        if not total.any():
            raise DataError("no row contains a time, so no curve can be computed")
        return state._replace(total=total.view(len(state.groups.names), 2, -1))

    def result(self, state: SurvivalCounts) -> pa.Table:
        assert state.total is not None
        counts, ends = state.total.numpy(), state.ends.numpy()
        used = [k for k in range(len(counts)) if counts[k].any()]
        statistic, p = log_rank(counts[[k for k in used if k < state.groups.named]])
        rows = list[tuple[object, ...]]()
        widths = np.diff(ends, prepend=0.0)
        for k in used:
            curve = compute_curve(counts[k])
            before, below = np.append(1.0, curve.survival[:-1]), np.append(1.0, curve.lowest[:-1])
            mean = float((widths * before).sum())
            error = float((widths * (before - np.minimum(below, curve.lowest))).sum())
            later = np.append((widths * before)[::-1].cumsum()[::-1][1:], 0.0)  # area to the right of each bin
            left = curve.at_risk - curve.events
            hazard = np.divide(curve.events, curve.at_risk * left, out=np.zeros_like(left), where=left > 0)
            se = float(np.sqrt((later**2 * hazard).sum()))
            low, high = compute_interval(curve, self.level)
            for j, end in enumerate(ends.tolist()):
                figures = (curve.at_risk, curve.events, curve.censored, curve.survival, low, high)
                rows.append((
                    state.groups.names[k], end, *(float(part[j]) for part in figures),
                    float(curve.survival[j] - curve.lowest[j]), mean, se, error, statistic, p,
                ))  # fmt: skip
        names = (
            "time", "at_risk", "events", "censored", "survival", "low", "high", "binning_error", "restricted_mean",
            "restricted_mean_se", "restricted_mean_error", "log_rank", "p",
        )  # fmt: skip
        return make_table(rows, group=TEXT_TYPE, **dict.fromkeys(names, NUMBER_TYPE))

    def _ends(self, terms: AnalysisTerms) -> Tensor:
        last = self.until or (terms.schema.target_ranges[0] or (0.0, 1.0))[1]
        return torch.from_numpy(bin_ends(self.width, last))

    def _counts(self, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        """Return the numbers of events and censored rows for the agreed-upon bins and groups, ``[G, 2, J]``."""
        bins, groups = len(self._ends(terms)), len(groups_of(terms.schema, self.group, terms.client_names))
        code, place, event = self._groups_and_bins(client, terms)
        at = (code * 2 + (~event).long()) * bins + place
        return torch.bincount(at, minlength=groups * 2 * bins).double().view(groups, 2, -1)

    def _groups_and_bins(self, client: ClientRows, terms: AnalysisTerms) -> tuple[Tensor, Tensor, Tensor]:
        """Return each row's group and bin, and whether its event was observed, all ``[N]``."""
        ends = self._ends(terms)
        place = torch.searchsorted(ends, client.y[:, 0].contiguous())
        event = (client.y[:, 1] == 1) & (place < len(ends))
        return group_codes(client, terms, self.group), place.clamp(max=len(ends) - 1), event


def compute_curve(counts: Floats) -> SurvivalCurve:
    """Return the curve for the given numbers of events and censored rows, ``[2, J]``."""
    events, censored = counts
    at_risk = (events + censored)[::-1].cumsum()[::-1]
    factors, lowest = (
        1 - np.divide(events, risk, out=np.zeros_like(events), where=risk > 0) for risk in (at_risk, at_risk - censored)
    )
    left = at_risk - events
    terms = np.divide(events, at_risk * left, out=np.zeros_like(events), where=left > 0)
    return SurvivalCurve(at_risk, events, censored, factors.cumprod(), np.maximum(lowest, 0).cumprod(), terms.cumsum())


def compute_interval(curve: SurvivalCurve, level: float) -> tuple[Floats, Floats]:
    """Return the endpoints ``[J]`` of confidence intervals on the scale of log(-log S), computed as in lifelines."""
    with np.errstate(divide="ignore", invalid="ignore"):
        log = np.log(curve.survival)
        reach = norm.ppf(0.5 + level / 2) * np.sqrt(curve.variance) / log
        low, high = (np.exp(-np.exp(np.log(-log) + sign * reach)) for sign in (-1, 1))
    same = ~np.isfinite(low) | ~np.isfinite(high)
    return np.where(same, curve.survival, low), np.where(same, curve.survival, high)


def log_rank(counts: Floats) -> tuple[float | None, float | None]:
    """Return the log-rank statistic of groups ``[G, 2, J]`` and its p-value.

    Groups without a row at risk at any event are left out, as in R's survdiff. Both are None if fewer than two groups
    remain, for example because all times are censored.
    """
    events = counts[:, 0]
    at_risk = counts.sum(1)[:, ::-1].cumsum(1)[:, ::-1]
    at = events.sum(0) > 0
    exposed = at_risk[:, at].any(1)
    if exposed.sum() < 2:
        return None, None
    events, at_risk = events[exposed], at_risk[exposed]
    d, n = events.sum(0), at_risk.sum(0)
    share = at_risk[:, at] / n[at]
    gap = (events[:, at] - d[at] * share).sum(1)[:-1]
    scale = d[at] * (n[at] - d[at]) / np.maximum(n[at] - 1, 1)
    covariance = (np.einsum("gj,gh->ghj", share, np.eye(len(share))) - share[:, None] * share[None]) @ scale
    statistic = float(gap @ np.linalg.pinv(covariance[:-1, :-1]) @ gap)
    return statistic, float(chi2.sf(statistic, len(events) - 1))
