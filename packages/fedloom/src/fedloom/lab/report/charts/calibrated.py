"""Charts and tables of the usefulness of predicted probabilities: calibration, thresholds and net benefit.

References: E. W. Steyerberg, "Clinical Prediction Models", 2nd ed., Chapter 15. A. J. Vickers and E. B. Elkin,
"Decision Curve Analysis", Medical Decision Making 2006. Confidence intervals of proportions: E. B. Wilson, JASA 1927.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.formats import UNKNOWN_DASH, format_fixed, format_percent, format_significant, round_significant
from fedloom.lab.report.charts import kit
from fedloom.lab.report.charts.kit import Figure, Rows
from fedloom.lab.report.comparison.gains import MAX_LISTED_SITES, find_leader
from fedloom.lab.report.csv_files import render_csv
from fedloom.lab.report.markup import render_scrolling_table
from fedloom.lab.report.numbers import Row
from fedloom.lab.report.patients import StoredPredictions, benign_test_predictions, is_binary
from fedloom.lab.report.run import Run

MAX_CALIBRATION_BINS, PER_BIN = 10, 10
"""Maximum number of bins in a calibration curve, followed by the minimum number of samples per bin."""
DECISION_THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
CURVE_THRESHOLDS = np.linspace(0.01, 0.6, 60)
"""Probability thresholds in the table and on the curves."""
NORMAL_QUANTILE = 1.959963984540054
CALIBRATION_TEXT = (
    "Patients whose predicted probability reaches a threshold are flagged, based on all test samples of a site. "
    "Sensitivity: fraction of patients with an event who are flagged. Specificity: fraction of the other patients who "
    "are not flagged. Net benefit: flagged events minus false alarms, weighted by the odds of the threshold. A "
    "threshold is useful if its net benefit is "
    "above 0 and above the net benefit of treating everyone."
)


class OperatingPoint(NamedTuple):
    """Result of flagging the samples whose predicted probability is at least ``threshold``.

    Attributes:
        threshold: threshold on the probability.
        flagged: proportion of all samples that are flagged.
        sensitivity: proportion of the events that are flagged.
        specificity: proportion of samples without an event that are not flagged.
        predictive: proportion of flagged samples that are events (positive predictive value).
        benefit: net benefit per sample.
        treating_all: net benefit per sample if all samples were flagged.
    """

    threshold: float
    flagged: float
    sensitivity: float
    specificity: float
    predictive: float
    benefit: float
    treating_all: float


def operating_point(samples: StoredPredictions, threshold: float) -> OperatingPoint:
    """Compute the operating point at a threshold. The proportion of zero samples is NaN."""
    hit, ill = samples.prediction >= threshold, samples.target == 1
    odds, size = threshold / (1 - threshold), len(ill)

    def share(part: NDArray[np.bool_], of: NDArray[np.bool_]) -> float:
        return float(part.sum() / of.sum()) if of.any() else math.nan

    benefit = float(((hit & ill).sum() - odds * (hit & ~ill).sum()) / size)
    everyone = float(((ill).sum() - odds * (~ill).sum()) / size)
    return OperatingPoint(
        threshold, float(hit.mean()), share(hit & ill, ill), share(~hit & ~ill, ~ill), share(hit & ill, hit), benefit,
        everyone,
    )  # fmt: skip


def wilson_interval(share: float, size: int) -> tuple[float, float]:
    """Compute Wilson's 95 % confidence interval for a proportion of ``size`` samples."""
    middle = (share + NORMAL_QUANTILE * NORMAL_QUANTILE / (2 * size)) / (1 + NORMAL_QUANTILE * NORMAL_QUANTILE / size)
    half = (
        NORMAL_QUANTILE
        / (1 + NORMAL_QUANTILE * NORMAL_QUANTILE / size)
        * math.sqrt(share * (1 - share) / size + NORMAL_QUANTILE * NORMAL_QUANTILE / (4 * size * size))
    )
    return middle - half, middle + half


def calibration_curve(samples: StoredPredictions) -> list[tuple[float, float, int]]:
    """Return the mean probability, the proportion of events and the number of samples for each bin.

    The samples are sorted by probability and divided into equal-sized bins.
    """
    order = np.argsort(samples.prediction, kind="stable")
    bins = np.array_split(order, max(1, min(MAX_CALIBRATION_BINS, len(order) // PER_BIN)))
    return [(float(samples.prediction[b].mean()), float(samples.target[b].mean()), len(b)) for b in bins]


def _binary_run_choices(
    runs: list[Run], rows: list[Row], lead: str
) -> list[tuple[Run, Row, list[tuple[str, StoredPredictions]]]]:
    """Return each binary run with stored predictions, its best federated method, and its sites' samples."""
    chosen = []
    for run in runs:
        best = find_leader(run, runs, rows, lead)
        samples = None if best is None else benign_test_predictions(run, best.method, best.model)
        if best is None or samples is None or not is_binary(run, samples):
            continue
        sites = (
            [(run.titled_client(k), samples.select_client(k)) for k in range(run.clients)]
            if run.clients <= MAX_LISTED_SITES
            else []
        )
        chosen.append((run, best, [("All", samples), *((name, some) for name, some in sites if len(some.target))]))
    return chosen


def draw_calibrated(runs: list[Run], rows: list[Row], lead: str) -> list[Figure]:
    """Plot calibration curves and decision curves for each binary run with stored predictions."""
    figures = []
    for place, (run, best, sites) in enumerate(_binary_run_choices(runs, rows, lead), start=1):
        words = f"{best.method}, {best.model} model{f', {run.label}' if len(runs) > 1 else ''}"
        mark = f"-{place}" if len(runs) > 1 else ""
        figures += [_draw_calibration(sites, words, mark), _draw_decision_curves(sites, words, mark)]
    return figures


def _draw_calibration(sites: list[tuple[str, StoredPredictions]], words: str, mark: str) -> Figure:
    data: Rows = []
    for name, samples in sites:
        for mean, observed, size in calibration_curve(samples):
            low, high = wilson_interval(observed, size)
            numbers = {"predicted": mean, "observed": observed, "low": low, "high": high}
            data.append({"client": name, **{k: round_significant(v) for k, v in numbers.items()}, "samples": size})
    most = max(max(row["predicted"], row["high"]) for row in data)
    ideal: Rows = [{"predicted": end, "observed": end} for end in (0.0, most)]
    place = {"x": kit.number("predicted"), "y": kit.number("observed", "Observed fraction")}
    ends = {"x": place["x"], "y": {**place["y"], "field": "low"}, "y2": {"field": "high"}}
    hints = kit.tooltip(
        ("client", "Site"), ("predicted", "Predicted", ".3f"), ("observed", "Observed", ".3f"), ("samples", "Samples")
    )
    inner = kit.layer_chart(
        kit.mark_layer("line", place, data="ideal", style="ghost", strokeDash=[4, 4], strokeWidth=1),
        kit.mark_layer("rule", ends),
        kit.mark_layer("line", place, strokeWidth=1),
        kit.mark_layer("point", {**place, "tooltip": hints}),
    )
    caption = (
        "Fraction of events by mean predicted probability, in equal-sized bins of each site's test samples, with 95 % "
        f"Wilson intervals. The dashed line shows perfect calibration ({words})."
    )
    spec = kit.facet_panels(inner, "client", [name for name, _ in sites], "Predicted probability", high=200)
    return Figure(
        f"calibration-curve{mark}", "patients", "Calibration", "Calibration by site", caption, spec,
        {"rows": data, "ideal": ideal}, "square",
    )  # fmt: skip


def _draw_decision_curves(sites: list[tuple[str, StoredPredictions]], words: str, mark: str) -> Figure:
    data: Rows = []
    for name, samples in sites:
        for threshold in CURVE_THRESHOLDS.tolist():
            now = operating_point(samples, threshold)
            floor = -0.1 * float(samples.target.mean())
            for policy, value in (("model", now.benefit), ("treat all", now.treating_all), ("treat none", 0.0)):
                if value >= floor or policy == "model":
                    data.append(
                        {
                            "client": name,
                            "threshold": round_significant(threshold),
                            "policy": policy,
                            "benefit": round_significant(value),
                        }
                    )
    order = ["model", "treat all", "treat none"]
    tint = {"field": "policy", "type": "nominal", "scale": {"domain": order}, "legend": {"title": None}}
    hints = kit.tooltip(
        ("client", "Site"), ("policy", "Policy"), ("threshold", "Threshold", ".2f"), ("benefit", "Net benefit", ".4f")
    )
    encoding = {
        "x": kit.number("threshold"), "y": kit.number("benefit", "Net benefit"), "color": tint, "tooltip": hints,
    }  # fmt: skip
    caption = (
        "Net benefit per patient by threshold probability, for the model, for treating everyone and for treating "
        f"nobody, on each site's test samples ({words})."
    )
    spec = kit.facet_panels(
        kit.layer_chart(kit.mark_layer("line", encoding, strokeWidth=1.5)), "client", [name for name, _ in sites],
        "Threshold probability", high=200, scale={"y": "independent"},
    )  # fmt: skip
    return Figure(
        f"net-benefit{mark}", "patients", "Net benefit", "Net benefit by site", caption, spec, {"rows": data}, "square"
    )


def threshold_tables(runs: list[Run], rows: list[Row], lead: str) -> str:
    """Render one HTML table per run with every site's operating points at `DECISION_THRESHOLDS`."""
    heads = ("Site", "Patients tested", "Events", "Threshold", "Flagged", "Sensitivity", "Specificity",
             "Predictive value", "Net benefit", "Treating all")  # fmt: skip
    text = ""
    for run, best, sites in _binary_run_choices(runs, rows, lead):
        lines = []
        for name, samples in sites:
            for k, threshold in enumerate(DECISION_THRESHOLDS):
                now = operating_point(samples, threshold)
                shares = (now.flagged, now.sensitivity, now.specificity, now.predictive)
                first = (name, str(len(samples.target)), str(int(samples.target.sum())))
                lines.append([
                    *(first if k == 0 else ("", "", "")), format_significant(threshold),
                    *(UNKNOWN_DASH if math.isnan(share) else format_percent(share) for share in shares),
                    format_fixed(now.benefit, 4), format_fixed(now.treating_all, 4),
                ])  # fmt: skip
        label = f"{best.method}, {best.model} model{f', {run.label}' if len(runs) > 1 else ''}"
        text += render_scrolling_table(f"Thresholds by site: {label}", heads, lines, title=label)
    return text


def thresholds_csv(runs: list[Run], rows: list[Row], lead: str) -> str:
    """Render the unrounded operating points as CSV."""
    lines = [
        (run.label, best.method, best.model, name, len(samples.target), int(samples.target.sum()),
         *(None if math.isnan(value) else value for value in operating_point(samples, threshold)))
        for run, best, sites in _binary_run_choices(runs, rows, lead)
        for name, samples in sites
        for threshold in DECISION_THRESHOLDS
    ]  # fmt: skip
    return (
        render_csv(("run", "method", "model", "site", "samples", "events", *OperatingPoint._fields), lines)
        if lines
        else ""
    )
