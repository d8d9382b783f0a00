"""Results for each device class: its clients' metrics, their uploads, and times to a common target."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fedloom.formats import UNKNOWN_DASH, finite_or_none, format_fixed, format_significant
from fedloom.lab.report.comparison.contenders import Models, select_run_contenders
from fedloom.lab.report.comparison.criteria import (
    accumulate_cost,
    find_run_target,
    find_target_round,
    target_text,
    total_up_to_round,
)
from fedloom.lab.report.csv_files import render_csv
from fedloom.lab.report.markup import render_scrolling_table
from fedloom.lab.report.naming import describe_figure, titled
from fedloom.lab.report.numbers import Estimate, Row, aggregate_clients, find_seeds
from fedloom.lab.report.run import Key, Numbers, Run
from fedloom.lab.report.tables import cell_text
from fedloom.rundir import UPLOADS_FIGURE

DEVICES_TEXT = (
    "Results of the clients in each device class, with the model that a client would use: mean over seeds. "
    "Uploads and staleness are per client. Idle is the fraction of a device's available time in which it does no "
    "work. Hours are the simulated time until the class mean reaches the common target: 95 % of the best result in "
    "the overview (if lower values are better, the best result divided by 0.95). A dash means that some seed never "
    "reaches the target. devices.csv contains the same values."
)
DEVICE_FIGURES = ("clients", "mean", "worst10", "uploads", "staleness", "idle_share", "seconds_to_target")


def device_tables(runs: list[Run], rows: list[Row], lead: str, models: Models = "best-on-validation") -> str:
    """Render an HTML table for each run with multiple device classes."""
    text, shown = "", describe_figure(lead)
    for run in runs:
        by_class, lines = [*_device_class_figures(run, runs, rows, lead, models)], []
        for row, name, _, figures in by_class:
            of_metric = (cell_text(lead, figures[key]) for key in ("mean", "worst10"))
            counts = (format_fixed(figures[key].mean, 1) for key in ("uploads", "staleness"))
            hours, idle = figures["seconds_to_target"], format_fixed(100 * figures["idle_share"].mean, 1)
            missed = len(hours.finite) < len(hours.by_seed)
            lines.append(
                [
                    f"{row.method}, {name}", format_fixed(figures["clients"].mean, 0), *of_metric, *counts, idle,
                    UNKNOWN_DASH if missed else format_significant(hours.mean / 3600),
                ]
            )  # fmt: skip
        if not lines:
            continue
        target = by_class[0][2]
        goal = "the target" if math.isnan(target) else target_text(lead, target)
        heads = [
            "Method and class", "Clients", titled(shown), "Worst 10 %", "Uploads", "Staleness", "Idle (%)",
            f"Hours until {goal}",
        ]  # fmt: skip
        text += render_scrolling_table("Device classes", heads, lines, title=run.label if len(runs) > 1 else "")
    return text


def devices_csv(runs: list[Run], rows: list[Row], lead: str, models: Models = "best-on-validation") -> str:
    """Return the metrics of each device class as CSV, as unscaled means over seeds. Unknown values are left empty."""
    lines = [
        (
            run.label,
            row.method,
            row.model,
            name,
            lead,
            target,
            *(finite_or_none(figures[key].mean) for key in DEVICE_FIGURES),
        )
        for run in runs
        for row, name, target, figures in _device_class_figures(run, runs, rows, lead, models)
    ]
    return render_csv(("run", "method", "model", "class", "metric", "target", *DEVICE_FIGURES), lines) if lines else ""


def _device_class_figures(
    run: Run, runs: list[Run], rows: list[Row], lead: str, models: Models
) -> Iterator[tuple[Row, str, float, dict[str, Estimate]]]:
    """Yield each compared row with each device class, the common target and the class's metrics.

    Methods with a single device class are omitted.
    """
    compared = select_run_contenders(run, runs, rows, lead)
    target = find_run_target(run, runs, rows, lead, models)
    for row in compared:
        names = next((record.device_classes for record in row.records if record.device_classes), ())
        for place, name in enumerate(names if len(names) > 1 else ()):
            by_seed = {
                seed: _class_figures(run, row, seed, place, lead, target) for seed in find_seeds(run, row.method)
            }
            some = {seed: numbers for seed, numbers in by_seed.items() if numbers}
            if some:
                yield row, name, target, {key: Estimate({s: v[key] for s, v in some.items()}) for key in DEVICE_FIGURES}


def _class_figures(run: Run, row: Row, seed: int, place: int, lead: str, target: float) -> dict[str, float]:
    """Return a device class's metrics in one run, or {} if none of its clients has a result."""
    scores = run.benign(Key(row.method, seed, row.model, "test", lead))
    classes = run.series.get(Key(row.method, seed, "", "", "device_class"))
    if scores is None or classes is None or seed in row.lost_seeds:
        return {}
    scores = scores.select(np.isin(scores.client, classes.client[classes.value == place]))
    if not len(scores.round):
        return {}
    clients = np.unique(scores.client)

    def last(name: str) -> Numbers:
        points = run.series[Key(row.method, seed, "", "", name)]
        return points.select((points.round == points.round[-1]) & np.isin(points.client, clients)).value

    higher = describe_figure(lead).higher_is_better
    mean, uploads, stale, idle = (
        aggregate_clients(scores, "mean", higher),
        last(UPLOADS_FIGURE),
        last("staleness"),
        last("idle_seconds"),
    )
    present, reached = float((last("busy_seconds") + idle).sum()), find_target_round(mean, target, higher)
    seconds = accumulate_cost(run, row.method, seed, "simulated_seconds")
    return {
        "clients": float(len(clients)), "mean": mean.last, "worst10": aggregate_clients(scores, "worst10", higher).last,
        "uploads": float(uploads.mean()),
        "staleness": float(np.nansum(stale * uploads) / uploads.sum()) if uploads.any() else math.nan,
        "idle_share": float(idle.sum()) / present if present else math.nan,
        "seconds_to_target": math.nan if reached is None else total_up_to_round(seconds, reached),
    }  # fmt: skip
