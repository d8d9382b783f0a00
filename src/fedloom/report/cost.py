"""What the methods cost: totals of work and traffic, and what was spent until a common result."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from fedloom.report.compare import common_target, cost_to_reach, tasks
from fedloom.report.figure import Figure, Rows, colour, rounded
from fedloom.report.naming import COSTS, MB, figure, metric
from fedloom.report.numbers import Estimate, Row
from fedloom.report.panels import NUMBERS, facets
from fedloom.report.reading import Run

REACHED = {"bytes": ("Traffic, both ways (MB)", 1 / MB), "samples_backward": ("Gradients of samples", 1.0)}


def cost_pictures(runs: list[Run], rows: list[Row], lead: str) -> list[Figure | None]:
    """The charts of this module, None for those without data."""
    return [_totals(rows), _reached(runs, rows, lead)]


def _totals(rows: list[Row]) -> Figure | None:
    """Bars per method: models of a method share its work."""
    data: Rows = []
    for measure in COSTS:
        shown = figure(measure)
        seen: set[str] = set()
        for row in rows:
            spent = row.figures.get(measure)
            if spent is not None and row.name not in seen and math.isfinite(spent.mean):
                seen.add(row.name)
                data.append({"measure": shown.title, "method": row.name, **_ends(spent, shown.scale)})
    if not data:
        return None
    y = _names("method", [point["method"] for point in data])
    bars = alt.Chart().mark_bar(size=11, cornerRadiusEnd=2, opacity=0.8, color="#7d8794")
    hints = [alt.Tooltip("method:N", title="Method"), *_hints()]
    chart = alt.layer(
        bars.encode(x=_x("mean:Q", zero=True), y=y, tooltip=hints),
        alt.Chart().mark_rule(strokeWidth=1.4).encode(x=_x("low:Q", zero=True), x2="high:Q", y=y),
        data=alt.NamedData(name="rows"),
    )
    caption = (
        "Totals over all clients up to the last round, mean over seeds with the 95 % interval. MB is 10⁶ bytes of the "
        "messages as sent; samples count every gradient, also of inner problems. Seconds depend on the machine."
    )
    return _facets("costs", "In all", "Work and traffic in all", caption, chart, data, "method")


def _reached(runs: list[Run], rows: list[Row], lead: str) -> Figure | None:
    """Dots per row: what was spent when the mean result first came to the target of its task."""
    data: Rows = []
    missed: list[str] = []
    targets = []
    for _, own_runs, own in tasks(runs, rows):
        target = common_target(own, lead)
        targets.append(f"{target * metric(lead).scale:.4g}")
        for cost, (title, scale) in REACHED.items():
            spent = cost_to_reach(own_runs, own, lead, target, cost)
            for i, estimate in spent.items():
                row = own[i]
                tags = {"row": f"{row.name} · {row.model}", "method": row.name, "model": row.model, "target": target}
                data.append({"measure": title, **tags, **_ends(estimate, scale)})
            missed += [f"{row.name} {row.model}".strip() for i, row in enumerate(own) if i not in spent]
    if len({point["row"] for point in data}) < 2:
        return None
    y = _names("row", [point["row"] for point in data])
    tint = colour([row for row in rows if any(point["model"] == row.model for point in data)])
    hints = [alt.Tooltip("row:N", title="Method"), *_hints()]
    chart = alt.layer(
        alt.Chart().mark_rule(strokeWidth=1.4, opacity=0.5).encode(x=_x("low:Q"), x2="high:Q", y=y, color=tint),
        alt.Chart().mark_point(size=80, opacity=1).encode(x=_x("mean:Q"), y=y, color=tint, tooltip=hints),
        data=alt.NamedData(name="rows"),
    )
    unit = f" {metric(lead).unit}" if metric(lead).unit else ""
    goal = f"{metric(lead).title} {', '.join(dict.fromkeys(targets))}{unit}"
    never = f" Never there with every seed: {', '.join(dict.fromkeys(missed))}." if missed else ""
    caption = (
        f"Spent by all clients until the mean test result first reaches 95 % of the best ({goal}), mean over seeds "
        f"with the 95 % interval; left is better.{never}"
    )
    return _facets("costs-reached", "Until a common result", f"Spent until {goal}", caption, chart, data, "row")


def _ends(estimate: Estimate, scale: float) -> dict[str, Any]:
    half = 0.0 if math.isnan(estimate.half) else estimate.half
    ends = {"mean": estimate.mean, "low": max(0.0, estimate.mean - half), "high": estimate.mean + half}
    return {name: rounded(value * scale) for name, value in ends.items()} | {"seeds": len(estimate.finite)}


def _names(field: str, names: list[str]) -> alt.Y:
    axis = alt.Axis(labelLimit=190, grid=False)
    return alt.Y(f"{field}:N", sort=list(dict.fromkeys(names)), title=None, axis=axis)


def _x(field: str, *, zero: bool = False) -> alt.X:
    axis = alt.Axis(tickCount=3, labelExpr=NUMBERS, labelOverlap=True)
    return alt.X(field, title=None, axis=axis, scale=alt.Scale(zero=zero))


def _hints() -> list[alt.Tooltip]:
    return [
        alt.Tooltip("measure:N", title="What"),
        alt.Tooltip("mean:Q", title="Mean over seeds", format=",.4~g"),
        alt.Tooltip("low:Q", title="95 % interval from", format=",.4~g"),
        alt.Tooltip("high:Q", title="to", format=",.4~g"),
        alt.Tooltip("seeds:Q", title="Seeds"),
    ]


def _facets(id: str, tab: str, title: str, caption: str, chart: Any, data: Rows, field: str) -> Figure:
    high = 24 * len({point[field] for point in data})
    panels = list(dict.fromkeys(point["measure"] for point in data))
    drawn = facets(chart, "measure", panels, None, high=high).resolve_scale(x="independent")
    return Figure(id, "costs", tab, title, caption, drawn, data, {}, "facet")
