"""Gains over test samples: the metric of a site alone and together, and an interval for the difference.

DeLong's interval is used for AUROC, and a bootstrap standard error for other metrics. If samples belong to known
subjects, both methods count subjects.

Reference: E. R. DeLong et al., "Comparing the areas under two or more correlated receiver operating characteristic
curves", Biometrics 1988, Eq. 5 to 8, computed by mid-ranks as in X. Sun and W. Xu, IEEE Signal Process. Lett. 2014, and
for subjects with several samples as in N. A. Obuchowski, "Nonparametric analysis of clustered ROC curve data",
Biometrics 53, 1997.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.formats import UNKNOWN_DASH, fixed, p_value, pair
from fedloom.lab.report.comparison.bootstrap import standard_error, weighted_metric
from fedloom.lab.report.comparison.gains import SiteGains
from fedloom.lab.report.csv_files import csv_of
from fedloom.lab.report.markup import scrolling
from fedloom.lab.report.naming import figure, metric
from fedloom.lab.report.numbers import run_of
from fedloom.lab.report.patients import Predicted, is_binary, tested
from fedloom.lab.report.run import Numbers, Run

CONFIDENCE_LEVEL = 0.95
BOOTSTRAP_METRICS = ("accuracy", "c_index", "r2", "rmse", "mae", "deviance")
"""Metrics whose interval is computed with a bootstrap."""
SHARE_METRICS = ("auroc", "accuracy", "c_index")
"""Metrics from 0 to 1, whose intervals are computed on the logit scale."""
MIN_CLASS_SAMPLES = 2
"""Smallest number of test samples, or subjects, in each class for which an interval of a difference is computed."""

BY_PATIENT_TEXT = (
    "The same, patient by patient: the mean prediction for every test sample over the seeds that "
    "tested it, and a 95 % interval of the difference (DeLong for AUROC, otherwise a bootstrap over "
    "patients). The interval shows how the gain would vary over new patients of a site. Errors are "
    "in units of the label. With folds, every patient is tested once."
)


class SiteDifference(NamedTuple):
    """Difference for one site, or for all sites together (``site`` is "All").

    Attributes:
        site: its name.
        samples: number of test samples, or of subjects if subjects are known.
        metric: name of the compared metric.
        events: number of samples (or subjects) in the second class, or with an event. None for other tasks.
        alone: metric of the site's local model.
        together: metric of the federated model.
        half: half width of the interval of the difference. NaN without an interval.
        p: two-sided p value for no difference.
    """

    site: str
    samples: int
    metric: str
    events: int | None
    alone: float
    together: float
    half: float
    p: float


def delong(scores: Numbers, target: Numbers, units: NDArray[np.int64] | None = None) -> tuple[Numbers, Numbers]:
    """Return the AUROC of models ``[k]`` on the same samples, and the covariance ``[k, k]`` of these estimates.

    Args:
        scores: scores ``[k, N]``, higher for the second class.
        target: targets ``[N]``, 0 or 1, with at least `MIN_CLASS_SAMPLES` samples of each class, from as many subjects.
        units: subject ``[N]`` of each sample, numbered from 0. None: each sample is a separate subject.
    """
    from scipy.stats import rankdata  # slow to import

    case = target == 1
    cases, controls = scores[:, case], scores[:, ~case]
    m, n = cases.shape[1], controls.shape[1]
    whole = np.stack([rankdata(row) for row in np.concatenate([cases, controls], 1)])
    won = (whole[:, :m] - np.stack([rankdata(row) for row in cases])) / n  # controls below each case
    lost = 1 - (whole[:, m:] - np.stack([rankdata(row) for row in controls])) / m  # cases above each control
    areas = won.mean(1)
    if units is None:
        return areas, np.atleast_2d(np.cov(won)) / m + np.atleast_2d(np.cov(lost)) / n
    subjects = int(units.max()) + 1
    by_case, by_control = (
        np.stack([np.bincount(units[some], row - area, subjects) for row, area in zip(parts, areas, strict=True)])
        for some, parts in ((case, won), (~case, lost))
    )
    counts = [len(np.unique(units[some])) for some in (case, ~case)] + [len(np.unique(units))]
    a, b, both = (count / (count - 1) for count in counts)
    cross = by_case @ by_control.T
    variance = (
        a * by_case @ by_case.T / m**2 + b * by_control @ by_control.T / n**2 + both * (cross + cross.T) / (m * n)
    )
    return areas, variance


def estimate_interval(metric: str, samples: Predicted, level: float = CONFIDENCE_LEVEL) -> tuple[float, float, float]:
    """Return a metric of one model, and the lower and upper ends of its interval.

    All three are NaN without an interval.

    The interval is based on Student's t with one degree of freedom fewer than subjects, on the logit scale for shares.

    Args:
        metric: ``auroc``, or one of the `BOOTSTRAP_METRICS`.
        samples: predictions of one model, with the subject of each sample if subjects have several samples.
        level: probability with which the interval covers the metric of the population.
    """
    subjects = samples.count()
    if metric == "auroc":
        some = [samples.count(samples.target == k) for k in (0, 1)]
        if min(some) < MIN_CLASS_SAMPLES:
            return math.nan, math.nan, math.nan
        areas, variance = delong(samples.prediction[None], samples.target, samples.units)
        value, se = float(areas[0]), math.sqrt(max(0.0, float(variance[0, 0])))
    else:
        value = float(weighted_metric(metric, np.ones((1, len(samples.target))), samples)[0])
        se = standard_error(metric, samples)
    if not se > 0 or subjects < 2:
        return value, math.nan, math.nan
    from scipy.special import expit, logit, stdtrit  # slow to import

    width = float(stdtrit(subjects - 1, 0.5 + level / 2)) * se
    if metric in SHARE_METRICS and 0 < value < 1:
        centre, half = logit(value), width / (value * (1 - value))
        return value, float(expit(centre - half)), float(expit(centre + half))
    return value, value - width, value + width


def differences(run: Run, table: SiteGains) -> list[SiteDifference]:
    """Return a line per site and a line over all sites, or [] without stored predictions or without such a metric."""
    alone, shared = (tested(run, row.method, row.model) for row in (table.alone, table.together))
    if alone is None or shared is None or not np.array_equal(alone[:2], shared[:2]):
        return []
    lead = "auroc" if is_binary(run, alone) else table.metric
    if lead not in ("auroc", *BOOTSTRAP_METRICS) or (lead == "c_index" and alone.event is None):
        return []
    places: list[tuple[str, int | None]] = [(run.client(k), k) for k in range(run.clients)]
    return [
        _difference(name, lead, alone.select_client(place), shared.select_client(place))
        for name, place in (*places, ("All", None))
    ]


def _difference(name: str, lead: str, alone: Predicted, shared: Predicted) -> SiteDifference:
    count, units = alone.count(), alone.units
    if lead == "auroc":
        cases, controls = (alone.count(alone.target == k) for k in (1, 0))
        events: int | None = cases
        if min(cases, controls) < MIN_CLASS_SAMPLES:
            return SiteDifference(name, count, lead, cases, math.nan, math.nan, math.nan, math.nan)
        scores = np.stack([alone.prediction, shared.prediction])
        areas, covariance = delong(scores, alone.target, None if alone.subject is None else units)
        values = (float(areas[0]), float(areas[1]))
        se = math.sqrt(max(0.0, covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]))
    else:
        events = None if alone.event is None else alone.count(alone.event > 0)
        once = np.ones((1, len(alone.target)))
        values = (float(weighted_metric(lead, once, alone)[0]), float(weighted_metric(lead, once, shared)[0]))
        se = standard_error(lead, alone, shared)
    from scipy.special import ndtr, ndtri  # slow to import

    change = values[1] - values[0]
    p = float(2 * ndtr(-abs(change) / se)) if se > 0 else 1.0 if change == 0 else math.nan
    return SiteDifference(name, count, lead, events, *values, float(ndtri(0.5 + CONFIDENCE_LEVEL / 2)) * se, p)


def patient_gains(runs: list[Run], by_site: Sequence[SiteGains]) -> list[tuple[str, list[SiteDifference]]]:
    """Return gains over test samples for the runs with stored predictions.

    Each gain is returned with the label of its run if there are several runs.
    """
    by_run = [(table.run, differences(run_of(runs, table.alone), table)) for table in by_site]
    return [(label, lines) for label, lines in by_run if lines]


def differences_html(tables: Sequence[tuple[str, Sequence[SiteDifference]]]) -> str:
    """Render a table per run, titled by its label."""
    text = ""
    for label, lines in tables:
        cells = [
            [line.site, line.samples, UNKNOWN_DASH if line.events is None else line.events, *_words(line)]
            for line in lines
        ]
        title = figure(lines[0].metric).title
        heads = ("Site", "Patients tested", "Events", f"{title} alone", "Together", "Gain", "p")
        text += scrolling(f"Gains by patient {label}".strip(), heads, cells, title=label)
    return f'<p class="lead">{BY_PATIENT_TEXT}</p>{text}' if text else ""


def _words(line: SiteDifference) -> list[str]:
    if math.isnan(line.alone) or math.isnan(line.together):
        return [UNKNOWN_DASH] * 4
    gain = (line.together - line.alone) * (1 if metric(line.metric).higher else -1)
    difference = pair(fixed(gain, 3, signed=True), fixed(line.half, 3)) if line.half == line.half else UNKNOWN_DASH
    return [fixed(line.alone, 3), fixed(line.together, 3), difference, p_value(line.p)]


def differences_csv(tables: Sequence[tuple[str, Sequence[SiteDifference]]]) -> str:
    """Render the gains over test samples as CSV, unrounded. Missing values are empty."""
    rows = [
        (label, *(None if isinstance(value, float) and math.isnan(value) else value for value in line))
        for label, lines in tables
        for line in lines
    ]
    return csv_of(("run", *SiteDifference._fields), rows)
