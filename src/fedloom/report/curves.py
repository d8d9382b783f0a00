"""Curves over rounds, traffic, work and time, and whatever else was recorded round by round."""

from __future__ import annotations

import math

import altair as alt
import numpy as np

from fedloom.report.compare import cumulative
from fedloom.report.figure import Figure, Rows, colour, rounded, slug
from fedloom.report.naming import GROUPS, MB, metric, titled
from fedloom.report.numbers import EMPTY, MODELS, Curve, Row, curve, half_width, other_figure, run_of, seeds_of
from fedloom.report.panels import Axis, line_panels
from fedloom.report.reading import Key, Run

POINTS = 80
"""Points per line; longer curves are thinned."""
MANY = 60
"""Of so many points the worst twentieth may be outside of the axis."""
WIDE = 100.0
"""From such a ratio of largest to smallest on, a residual is drawn on a logarithmic axis."""

AXES = {
    "round": ("by round", "Round", 1.0),
    "bytes": ("by traffic", "Traffic, both ways, all clients (MB)", 1 / MB),
    "samples_backward": ("by gradients of samples", "Gradients of samples, all clients", 1.0),
    "seconds": ("by time", "Seconds", 1.0),
}


def curve_pictures(runs: list[Run], rows: list[Row], lead: str) -> list[Figure | None]:
    """Learning curves of the leading metric and the loss, and the federation's own figures round by round."""
    wanted = [(lead, axis) for axis in AXES] + ([("loss", "round")] if lead != "loss" else [])
    found = [_learning(runs, rows, name, axis) for name, axis in wanted]
    others = dict.fromkeys(
        key.metric for run in runs for key in run.totals if other_figure(key) and key.metric != "dropped"
    )
    return [*found, *(_other(runs, rows, name, f"other-{i}-{slug(name)}") for i, name in enumerate(others, start=1))]


def points_of(row: Row, name: str, axis: str, results: list[Curve], costs: list[Curve]) -> Rows:
    """Mean and interval over seeds, point by point, of at most `POINTS` rounds.

    Args:
        row: whose points they are.
        name: the metric.
        axis: a key of `AXES`.
        results: a curve per seed.
        costs: what was spent by then, a curve per seed.
    """
    scale = metric(name).scale
    rounds = np.unique(np.concatenate([result.round for result in results]))
    if len(rounds) > POINTS:
        rounds = rounds[np.unique(np.linspace(0, len(rounds) - 1, POINTS).round().astype(int))]
    points: Rows = []
    for t in rounds.tolist():
        values = [v * scale for v in (result.at(t) for result in results) if math.isfinite(v)]
        spent = [t] if axis == "round" else [v for v in (cost.at(t) for cost in costs) if math.isfinite(v)]
        if values and spent:
            mean, half = float(np.mean(values)), half_width(values)
            half = 0.0 if math.isnan(half) else half
            points.append(
                {
                    "method": row.name,
                    "model": row.model,
                    "round": t,
                    "x": rounded(float(np.mean(spent)) * AXES[axis][2]),
                    "mean": rounded(mean),
                    "low": rounded(mean - half),
                    "high": rounded(mean + half),
                    "seeds": len(values),
                }
            )
    return points


def _learning(runs: list[Run], rows: list[Row], name: str, axis: str) -> Figure | None:
    lines = []
    idle = []
    for row in rows:
        run, seeds = run_of(runs, row), seeds_of(run_of(runs, row), row.method)
        results = [curve(run, Key(row.method, seed, row.model, "test", name), "mean") for seed in seeds]
        costs = results if axis == "round" else [cumulative(run, row.method, seed, axis) for seed in seeds]
        points = points_of(row, name, axis, results, costs)
        if points and axis != "round" and not any(point["x"] for point in points):
            idle.append(row.name)
        elif points:
            lines.append(points)
    label = AXES[axis][0]
    nothing = f" Without any: {', '.join(dict.fromkeys(idle))}." if idle else ""
    caption = f"{metric(name).title}, mean over the clients' test parts, {label}.{nothing}"
    tab = metric(name).title if axis == "round" else label.removeprefix("by ").capitalize()
    return _panels(rows, lines, name, axis, (f"curves-{name}-{axis}", "curves", tab, caption))


def _other(runs: list[Run], rows: list[Row], name: str, id: str) -> Figure | None:
    lines = []
    for row in rows:
        run = run_of(runs, row)
        found = (_recorded(run, Key(row.method, seed, row.model, "test", name)) for seed in seeds_of(run, row.method))
        points = points_of(row, name, "round", list(found) or [EMPTY], [])
        if points:
            lines.append(points)
    shown = metric(name)
    return _panels(
        rows, lines, name, "round", (id, GROUPS.get(name, "others"), shown.title, f"{shown.title} by round.")
    )


def _recorded(run: Run, key: Key) -> Curve:
    """A figure of the federation; one of no model goes with the method's first model."""
    own = [key, key._replace(part="")]
    models = [model for model in MODELS if any((k.method, k.model) == (key.method, model) for k in run.totals)]
    places = [*own, key._replace(part="", model="")] if models[:1] == [key.model] else own
    total = next((run.totals[place] for place in places if place in run.totals), None)
    return Curve(total.round, total.value) if total else EMPTY


def _panels(
    rows: list[Row], lines: list[Rows], name: str, axis: str, words: tuple[str, str, str, str]
) -> Figure | None:
    """One panel per method, with all other methods in grey behind it; ``words`` are id, group, tab and caption."""
    data = [point for points in lines for point in points]
    if len(data) <= len(lines):
        return None
    shown, (label, title, _) = metric(name), AXES[axis]
    values = [point["mean"] for point in data]
    log = GROUPS.get(name) == "convergence" and min(values) > 0 and max(values) > WIDE * min(values)
    for point in data if log else []:
        point["low"] = max(point["low"], rounded(point["mean"] / 10))
    hints = [
        alt.Tooltip("method:N", title="Method"),
        alt.Tooltip("model:N", title="Model"),
        alt.Tooltip("round:Q", title="Round"),
        *([] if axis == "round" else [alt.Tooltip("x:Q", title=title, format=",.4~g")]),
        alt.Tooltip("mean:Q", title=titled(shown), format=".4~g"),
        alt.Tooltip("low:Q", title="95 % interval from", format=".4~g"),
        alt.Tooltip("high:Q", title="to", format=".4~g"),
        alt.Tooltip("seeds:Q", title="Seeds"),
    ]
    tint = colour([row for row in rows if any(p["model"] == row.model for p in data)])
    trimmed = len(values) >= MANY and GROUPS.get(name) != "convergence"
    domain = None if log else _span(values, shown.higher, trimmed=trimmed)
    y = Axis(titled(shown), log, domain, whole=GROUPS.get(name) == "structure")
    chart, more = line_panels(data, "method", Axis(title, whole=axis == "round"), y, tint, hints)
    id, group, tab, caption = words
    behind = "One panel per method, the others in grey behind it; " if more["ghosts"] else ""
    seeds = max(point["seeds"] for point in data)
    band = f"{behind}the band is the 95 % interval over seeds, cut at the edge of the panel." if seeds > 1 else behind
    words_of_it = f"{caption} {band[:1].upper()}{band[1:]}".strip(" ;")
    return Figure(id, group, tab, f"{shown.title} {label}", words_of_it, chart, data, more, "facet")


def _span(values: list[float], higher: bool, *, trimmed: bool) -> tuple[float, float]:
    """Lower and upper end of an axis with some air; trimmed of the worst twentieth, mostly the start of the runs."""
    cut = (0.05 * trimmed, 1.0) if higher else (0.0, 1.0 - 0.05 * trimmed)
    low, high = (float(v) for v in np.quantile(values, cut))
    air = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - air, high + air
