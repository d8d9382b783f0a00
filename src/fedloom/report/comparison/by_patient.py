"""Gains over test samples: AUROC of a site alone and together, and DeLong's interval of the difference.

Reference: E. R. DeLong et al., "Comparing the areas under two or more correlated receiver operating characteristic
curves", Biometrics 1988, Eq. 5 to 8; by mid-ranks as X. Sun and W. Xu, IEEE Signal Process. Lett. 2014.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from scipy.stats import norm, rankdata

from fedloom.formats import DASH, fixed, p_value, pair
from fedloom.report.comparison.gains import SiteGains
from fedloom.report.csv_files import csv_of
from fedloom.report.numbers import run_of
from fedloom.report.patients import Predicted, is_binary, tested
from fedloom.report.run import Numbers, Run
from fedloom.report.tables import scrolling

LEVEL = 0.95
LEAST = 2
"""Test samples of each class from which a difference has an interval."""

ABOUT = (
    "The same, patient by patient: every test sample with the mean of its predictions over the seeds that tested it, "
    "and DeLong's 95 % interval of the difference in AUROC: how the gain would vary over new patients of a site. "
    "With folds every patient is tested once."
)


class SiteDifference(NamedTuple):
    """A site, or all of them (``site`` is "All").

    Attributes:
        site: its name.
        samples: test samples.
        events: of the second class.
        alone: AUROC of the site's own model.
        together: AUROC of the federated one.
        half: half the width of the interval of their difference; nan where there is none.
        p: two-sided, of no difference.
    """

    site: str
    samples: int
    events: int
    alone: float
    together: float
    half: float
    p: float


def delong(scores: Numbers, target: Numbers) -> tuple[Numbers, Numbers]:
    """AUROC of models ``[k]`` on the same samples, and the covariance ``[k, k]`` of these estimates.

    Args:
        scores: ``[k, N]``, higher for the second class.
        target: ``[N]`` 0 or 1, at least `LEAST` of each.
    """
    cases, controls = scores[:, target == 1], scores[:, target == 0]
    m, n = cases.shape[1], controls.shape[1]
    whole = np.stack([rankdata(row) for row in np.concatenate([cases, controls], 1)])
    won = (whole[:, :m] - np.stack([rankdata(row) for row in cases])) / n  # controls below each case
    lost = 1 - (whole[:, m:] - np.stack([rankdata(row) for row in controls])) / m  # cases above each control
    return won.mean(1), np.atleast_2d(np.cov(won)) / m + np.atleast_2d(np.cov(lost)) / n


def differences(run: Run, table: SiteGains) -> list[SiteDifference]:
    """A line per site and one over all of them; none where predictions were not kept, or are no probabilities."""
    alone, shared = (tested(run, row.method, row.model) for row in (table.alone, table.together))
    if alone is None or shared is None or not is_binary(run, alone) or not np.array_equal(alone[:2], shared[:2]):
        return []
    places: list[tuple[str, int | None]] = [(run.client(k), k) for k in range(run.clients)]
    return [_difference(name, alone.at(place), shared.at(place)) for name, place in (*places, ("All", None))]


def _difference(name: str, alone: Predicted, shared: Predicted) -> SiteDifference:
    events = int(alone.target.sum())
    if min(events, len(alone.target) - events) < LEAST:
        return SiteDifference(name, len(alone.target), events, math.nan, math.nan, math.nan, math.nan)
    areas, covariance = delong(np.stack([alone.prediction, shared.prediction]), alone.target)
    se = math.sqrt(max(0.0, covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]))
    gain = float(areas[1] - areas[0])
    p = float(2 * norm.sf(abs(gain) / se)) if se > 0 else 1.0 if gain == 0 else math.nan
    half = float(norm.ppf(0.5 + LEVEL / 2)) * se
    return SiteDifference(name, len(alone.target), events, float(areas[0]), float(areas[1]), half, p)


def by_patients(runs: list[Run], by_site: Sequence[SiteGains]) -> list[tuple[str, list[SiteDifference]]]:
    """Gains over test samples of the runs that kept their predictions, by the run's label where there are several."""
    by_run = [(table.run, differences(run_of(runs, table.alone), table)) for table in by_site]
    return [(label, lines) for label, lines in by_run if lines]


def differences_html(tables: Sequence[tuple[str, Sequence[SiteDifference]]]) -> str:
    """A table per run, by its label."""
    text = ""
    for label, lines in tables:
        cells = [[escape(line.site), str(line.samples), str(line.events), *_words(line)] for line in lines]
        heads = ("Site", "Patients tested", "Events", "AUROC alone", "Together", "Gain", "p (DeLong)")
        text += f"<h3>{escape(label)}</h3>" * bool(label) + scrolling(f"Gains by patient {label}".strip(), heads, cells)
    return f'<p class="lead">{ABOUT}</p>{text}' if text else ""


def _words(line: SiteDifference) -> list[str]:
    if math.isnan(line.alone):
        return [DASH] * 4
    gain = line.together - line.alone
    difference = pair(fixed(gain, 3, signed=True), fixed(line.half, 3))
    return [fixed(line.alone, 3), fixed(line.together, 3), difference, p_value(line.p)]


def differences_csv(tables: Sequence[tuple[str, Sequence[SiteDifference]]]) -> str:
    """The same as CSV, unrounded; empty cells where there is no figure."""
    rows = [
        (label, *(None if isinstance(value, float) and math.isnan(value) else value for value in line))
        for label, lines in tables
        for line in lines
    ]
    return csv_of(("run", *SiteDifference._fields), rows)
