"""Gains on test samples by site: metrics of the local and the federated model, with an interval for the difference.

For the AUROC, this is DeLong's interval. For all other metrics, the interval uses the bootstrap standard error. If
subjects are known, both methods resample or count subjects rather than samples.

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

from fedloom.formats import UNKNOWN_DASH, format_fixed, format_p_value, format_pair
from fedloom.lab.report.comparison.bootstrap import standard_error, weighted_metric
from fedloom.lab.report.comparison.gains import SiteGains
from fedloom.lab.report.csv_files import render_csv
from fedloom.lab.report.markup import render_scrolling_table
from fedloom.lab.report.naming import describe_figure, metric
from fedloom.lab.report.numbers import find_run
from fedloom.lab.report.patients import StoredPredictions, benign_test_predictions, is_binary
from fedloom.lab.report.run import Numbers, Run

CONFIDENCE_LEVEL = 0.95
BOOTSTRAP_METRICS = ("accuracy", "c_index", "macro_auroc", "r2", "rmse", "mae", "deviance")
"""Metrics whose intervals are computed by the bootstrap."""
MIN_DELONG_SAMPLES = 2
"""Minimum number of test samples (or subjects) in each class for computing the interval of a difference."""

BY_PATIENT_TEXT = (
    "The same comparison by patient: predictions for a test sample are averaged over the seeds that tested it. The 95 "
    "% interval of the difference uses DeLong's method for the AUROC, and otherwise a bootstrap over patients. The "
    "interval shows how the gain would vary with new patients of a site. Errors are in the units of the label. With "
    "folds, every patient is tested once."
)


class SiteDifference(NamedTuple):
    """Difference between the local and the federated model for one site, or for all sites together (``site`` is "All").

    Attributes:
        site: name of the site.
        samples: number of test samples or, if subjects are known, of their subjects.
        metric: name of the compared metric.
        events: number of samples (or subjects) in the second class, or with an event. None if the task has no events.
        alone: metric of the site's local model.
        together: metric of the federated model.
        half: half-width of the confidence interval of the difference. NaN if it cannot be computed.
        p: two-sided p-value for the hypothesis that there is no difference.
    """

    site: str
    samples: int
    metric: str
    events: int | None
    alone: float
    together: float
    half: float
    p: float


def delong_auroc(scores: Numbers, target: Numbers, units: NDArray[np.int64] | None = None) -> tuple[Numbers, Numbers]:
    """Return each model's AUROC on the same samples, ``[k]``, and the covariance of these estimates, ``[k, k]``.

    Args:
        scores: scores ``[k, N]``. Higher scores indicate the second class.
        target: targets ``[N]``, 0 or 1. Each class must have at least `MIN_DELONG_SAMPLES` samples, from at least as
            many subjects.
        units: subject number of each sample, counted from 0, ``[N]``. If None, each sample is a separate subject.
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


def patient_differences(run: Run, table: SiteGains) -> list[SiteDifference]:
    """Return the difference for each site and for all sites together.

    Return [] if there are no stored predictions or the metric is missing.
    """
    alone, shared = (benign_test_predictions(run, row.method, row.model) for row in (table.alone, table.together))
    if alone is None or shared is None or not np.array_equal(alone[:2], shared[:2]):
        return []
    lead = "auroc" if is_binary(run, alone) else table.metric
    if lead not in ("auroc", *BOOTSTRAP_METRICS) or (lead == "c_index" and alone.event is None):
        return []
    places: list[tuple[str, int | None]] = [(run.client(k), k) for k in range(run.clients)]
    return [
        compare_predictions(name, lead, alone.select_client(place), shared.select_client(place))
        for name, place in (*places, ("All", None))
    ]


def compare_predictions(name: str, lead: str, alone: StoredPredictions, shared: StoredPredictions) -> SiteDifference:
    """Return the difference of a metric between two models on the same samples.

    The interval and the p-value use Student's t distribution, with degrees of freedom equal to the number of subjects
    minus one.

    Args:
        name: name of the site.
        lead: ``auroc``, or one of the `BOOTSTRAP_METRICS`.
        alone: the local models' predictions.
        shared: the federated model's predictions for the same samples.
    """
    count, units = alone.count(), alone.units
    if lead == "auroc":
        cases, controls = (alone.count(alone.target == k) for k in (1, 0))
        events: int | None = cases
        if min(cases, controls) < MIN_DELONG_SAMPLES:
            return SiteDifference(name, count, lead, cases, math.nan, math.nan, math.nan, math.nan)
        scores = np.stack([alone.prediction, shared.prediction])
        areas, covariance = delong_auroc(scores, alone.target, None if alone.subject is None else units)
        values = (float(areas[0]), float(areas[1]))
        se = math.sqrt(max(0.0, covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]))
    else:
        events = None if alone.event is None else alone.count(alone.event > 0)
        once = np.ones((1, len(alone.target)))
        values = (float(weighted_metric(lead, once, alone)[0]), float(weighted_metric(lead, once, shared)[0]))
        se = standard_error(lead, alone, shared)
    from scipy.special import stdtr, stdtrit  # slow to import

    change, freedom = values[1] - values[0], max(1, count - 1)
    p = float(2 * stdtr(freedom, -abs(change) / se)) if se > 0 else 1.0 if change == 0 else math.nan
    return SiteDifference(
        name, count, lead, events, *values, float(stdtrit(freedom, 0.5 + CONFIDENCE_LEVEL / 2)) * se, p
    )


def patient_gains(runs: list[Run], by_site: Sequence[SiteGains]) -> list[tuple[str, list[SiteDifference]]]:
    """Return the gains on test samples for each run with stored predictions, with the run's label.

    The label is empty if there is only one run.
    """
    by_run = [(table.run, patient_differences(find_run(runs, table.alone), table)) for table in by_site]
    return [(label, lines) for label, lines in by_run if lines]


def differences_html(tables: Sequence[tuple[str, Sequence[SiteDifference]]]) -> str:
    """Render an HTML table for each run, titled with the run's label."""
    text = ""
    for label, lines in tables:
        has_events = any(line.events is not None for line in lines)
        cells = [
            [line.site, line.samples, *([UNKNOWN_DASH if line.events is None else line.events] if has_events else []),
             *_difference_sentence(line)]
            for line in lines
        ]  # fmt: skip
        title = describe_figure(lines[0].metric).title
        events = ["Events"] if has_events else []
        heads = ["Site", "Patients tested", *events, f"{title} alone", "Together", "Gain", "p"]
        text += render_scrolling_table(f"Gains by patient {label}".strip(), heads, cells, title=label)
    return f'<p class="lead">{BY_PATIENT_TEXT}</p>{text}' if text else ""


def _difference_sentence(line: SiteDifference) -> list[str]:
    if math.isnan(line.alone) or math.isnan(line.together):
        return [UNKNOWN_DASH] * 4
    gain = (line.together - line.alone) * (1 if metric(line.metric).higher_is_better else -1)
    difference = (
        format_pair(format_fixed(gain, 3, signed=True), format_fixed(line.half, 3))
        if line.half == line.half
        else UNKNOWN_DASH
    )
    return [format_fixed(line.alone, 3), format_fixed(line.together, 3), difference, format_p_value(line.p)]


def differences_csv(tables: Sequence[tuple[str, Sequence[SiteDifference]]]) -> str:
    """Return the unrounded gains on test samples as CSV. Missing values are left empty."""
    rows = [
        (label, *(None if isinstance(value, float) and math.isnan(value) else value for value in line))
        for label, lines in tables
        for line in lines
    ]
    return render_csv(("run", *SiteDifference._fields), rows)
