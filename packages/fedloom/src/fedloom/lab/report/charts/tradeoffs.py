"""Plot trade-offs between results and fairness or sparsity, and the methods' work and traffic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from fedloom.formats import format_percent
from fedloom.lab.report.charts import kit
from fedloom.lab.report.charts.kit import INTERVAL_FILTER, MEAN_FILTER, SEED_FILTER, Figure, Rows, Spec
from fedloom.lab.report.charts.look import LETTER_WIDTH
from fedloom.lab.report.comparison.contenders import Models
from fedloom.lab.report.comparison.criteria import (
    TARGET_SHARE,
    common_target,
    cost_to_reach,
    group_comparable_runs,
    target_text,
)
from fedloom.lab.report.naming import COST_FIGURES, MEGABYTE_BYTES, describe_figure, lowercase_title, metric, titled
from fedloom.lab.report.numbers import Estimate, Row
from fedloom.lab.report.run import Run

COST_AXES = {
    "bytes": ("Two-way traffic (MB)", 1 / MEGABYTE_BYTES),
    "samples_backward": ("Sample gradients", 1.0),
}
LABEL_DISTANCE = 12
"""Distance in pixels between a point and its label."""
WIDE_PLOT_WIDTH, NARROW_PLOT_WIDTH = 590, 300
"""Widths in pixels of the plot in a chart file and on a phone."""


class CostAxis(NamedTuple):
    """Horizontal axis of a trade-off chart: a metric, its column and title, and whether smaller values are better."""

    figure: str
    column: str
    title: str
    lower_is_better: bool = True


def draw_tradeoffs(runs: list[Run], rows: list[Row], lead: str) -> list[Figure | None]:
    """Plot the primary metric versus the loss variance, the worst 10 % of clients, and nonzero parameters."""
    what, side = metric(lead).title, "top" if metric(lead).higher_is_better else "bottom"
    variance = CostAxis("loss/variance", "variance", "Variance of the clients' test losses")
    title = f"Worst 10 % of clients: {titled(metric(lead))}"
    worst = CostAxis(f"{lead}/worst10", "worst", title, not metric(lead).higher_is_better)
    fair = ("fairness", "fairness", "Variance", f"{what} versus fairness", f"{side} left")
    corner = "top right" if metric(lead).higher_is_better else "bottom left"
    tenth = ("worst", "fairness", "Worst 10 %", f"{what} versus the result of the worst 10 % of clients", corner)
    figures = [_draw_trade_off(runs, rows, lead, variance, fair), _draw_trade_off(runs, rows, lead, worst, tenth)]
    if any("nonzeros" in row.figures for row in rows):
        sparse = ("sparsity", "structure", "Trade-off", f"{what} versus sparsity", f"{side} left")
        price = CostAxis("nonzeros", "nonzeros", "Nonzero parameters")
        figures.append(_draw_trade_off(runs, [_add_parameter_count(row) for row in rows], lead, price, sparse))
    return figures


def draw_costs(runs: list[Run], rows: list[Row], lead: str, models: Models) -> list[Figure | None]:
    """Plot each method's total work and traffic, and its cost of reaching a common result."""
    return [_draw_total_costs(rows), _draw_cost_to_target(runs, rows, lead, models)]


def _add_parameter_count(row: Row) -> Row:
    """Return the row with its number of nonzero parameters.

    A model whose nonzero parameters were not counted is assumed to be dense.
    """
    dense = {record.seed: float(record.parameters) for record in row.records if record.parameters}
    return replace(row, figures={**({"nonzeros": Estimate(dense)} if dense else {}), **row.figures})


def _draw_trade_off(
    runs: list[Run], rows: list[Row], lead: str, price: CostAxis, words: tuple[str, str, str, str, str]
) -> Figure | None:
    """Plot both metrics as one point per row, or return None if there are too few points.

    ``words`` contains the chart's ID, group, tab and title, and a name for its best corner.
    """
    up, across = metric(lead).scale, metric(lead).scale if price.figure.startswith(lead) else 1.0
    data: Rows = []
    singles: Rows = []
    for row in rows:
        result, cost = row.figures.get(lead), row.figures.get(price.figure)
        if result is None or cost is None or not (math.isfinite(result.mean) and math.isfinite(cost.mean)):
            continue
        tags = {"method": row.name, "model": row.model}
        (first, *one), (second, *other) = result.points(up), cost.points(across)
        ends = {"low": first["low"], "high": first["high"], price.column: second["value"]}
        ends |= {f"{price.column}_low": second["low"], f"{price.column}_high": second["high"]}
        data.append({**tags, "result": first["value"], **ends})
        both = {point["seed"]: point["value"] for point in other}
        singles += [
            {**tags, "seed": p["seed"], "result": p["value"], price.column: both[p["seed"]]}
            for p in one
            if p["seed"] in both
        ]
    if len(data) < 2 or len({point[price.column] for point in data}) == 1:
        return None
    signs = (1 if metric(lead).higher_is_better else -1, -1 if price.lower_is_better else 1)
    for _, _, task_rows in group_comparable_runs(runs, rows):
        sound = {(row.name, row.model): row.sound for row in task_rows}
        task_points = [point for point in data if (point["method"], point["model"]) in sound]
        peers = [point for point in task_points if sound[point["method"], point["model"]]]
        for point in task_points:
            beaten = any(_is_better_in_both(other, point, price.column, signs) for other in peers)
            point["best"] = point in peers and not beaten
    axes = []
    off: set[str] = set()
    for column, open_ended in (("result", True), (price.column, price.column != "nonzeros")):
        largest = {f"{p['method']} {p['model']}".strip(): p[column] for p in data}
        far = kit.find_off_axis_names(largest) if open_ended else set()
        axes.append(kit.axis_domain([value for name, value in largest.items() if name not in far], 0.12))
        off |= far
    _label_points(data, price.column, axes[1], axes[0])
    id, group, tab, title, corner = words
    several = any(point["low"] is not None for point in data)
    lines = " Lines show 95 % intervals over seeds, clipped to the chart." if several else ""
    lines = " Small dots show individual seeds." if singles else lines
    among = " among runs with the same data and attack" if len(group_comparable_runs(runs, rows)) > 1 else ""
    never = "" if all(row.sound for row in rows) else " Methods with a diverged or failed run are not ringed."
    caption = (
        f"{title}, one point per model and method: {corner} is best. Rings mark Pareto-optimal methods{among}: no "
        f"other method is at least as good in both values and better in one.{never}{lines} Of points that are too "
        f"close together, only one is labeled. Hover over a point to see its name.{kit.axis_note(off)}"
    )
    spec = _scatter_chart(data, singles, rows, lead, price, axes)
    return Figure(id, group, tab, title, caption, spec, {"rows": data, "seeds": singles}, "wide")


def _is_better_in_both(one: dict[str, Any], other: dict[str, Any], column: str, signs: tuple[int, int]) -> bool:
    gains: list[float] = [sign * (one[n] - other[n]) for n, sign in zip(("result", column), signs, strict=True)]
    return min(gains) >= 0 and max(gains) > 0


def _label_points(data: Rows, column: str, across: list[float], up: list[float]) -> None:
    """Label each point whose label does not overlap another label, starting with the Pareto-optimal points.

    ``label`` is used in a wide chart, and ``label_narrow`` on a phone.
    """
    for field, width in (("label", WIDE_PLOT_WIDTH), ("label_narrow", NARROW_PLOT_WIDTH)):
        labeled: list[tuple[float, float, float]] = []
        for point in sorted(data, key=lambda p: not p["best"]):
            x, y = ((point[n] - low) / (high - low) for n, (low, high) in ((column, across), ("result", up)))
            point["side"] = "right" if x > 0.6 else "left"
            size = (LABEL_DISTANCE + LETTER_WIDTH * len(point["method"])) / width
            start, end = (x - size, x) if x > 0.6 else (x, x + size)
            overlaps = any(start < right and left < end and abs(y - height) < 0.05 for left, right, height in labeled)
            point[field] = "" if overlaps or not (0 <= x <= 1 and 0 <= y <= 1) else point["method"]
            labeled += [(start, end, y)] if point[field] else []


def _scatter_chart(
    data: Rows, seeds: Rows, rows: list[Row], lead: str, price: CostAxis, axes: list[list[float]]
) -> Spec:
    title, column = titled(metric(lead)), price.column
    y, x = (
        kit.number(name, words, scale={"domain": ends, "nice": False})
        for name, words, ends in zip(("result", column), (title, price.title), axes, strict=True)
    )
    place, tint = {"x": x, "y": y}, {"color": kit.model_color_channel(rows)}
    hints = kit.tooltip(
        ("method", "Method"), ("model", "Model"), ("result", title, ".4~g"), (column, price.title, ".4~g")
    )
    vertical = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, **tint}
    level = {"x": {**x, "field": f"{column}_low"}, "x2": {"field": f"{column}_high"}, "y": y, **tint}
    # The filter also drops points outside the axis range: even an empty text there would shrink the plot to nothing.
    sides = [
        kit.mark_layer(
            "text",
            {**place, "text": {"field": "label"}},
            {"filter": f"(datum.label || datum.label_narrow) && datum.side === '{align}'"},
            align=align,
            dx=dx,
        )
        for align, dx in (("left", LABEL_DISTANCE), ("right", -LABEL_DISTANCE))
    ]
    intervals = [
        kit.mark_layer("rule", vertical, INTERVAL_FILTER, opacity=0.3, clip=True),
        kit.mark_layer("rule", level, INTERVAL_FILTER, opacity=0.3, clip=True),
    ]
    single = kit.mark_layer("point", {**place, **tint}, data="seeds", size=14, opacity=0.5, clip=True, tooltip=None)
    return kit.layer_chart(
        *(intervals if any(point["low"] is not None for point in data) else []),
        *([single] if seeds else []),
        kit.mark_layer(
            "point",
            place,
            {"filter": "datum.best"},
            size=220,
            filled=False,
            strokeWidth=1.2,
            style="ghost",
            opacity=1,
            clip=True,
            tooltip=None,
        ),
        kit.mark_layer("point", {**place, **tint, "tooltip": hints}, size=80, opacity=1, clip=True),
        *sides,
        width=640,
        height=360,
    )


def _draw_total_costs(rows: list[Row]) -> Figure | None:
    """Plot one bar per method, because all models of a method share the same work.

    Return None if costs were not recorded.
    """
    data: Rows = []
    for measure in COST_FIGURES:
        first = {row.name: row for row in reversed(rows) if measure in row.figures}
        for name in dict.fromkeys(row.name for row in rows if row.name in first):
            spent = first[name].figures[measure]
            if math.isfinite(spent.mean):
                tags = {"measure": describe_figure(measure).title, "method": name}
                data += [{**tags, **point} for point in spent.points(describe_figure(measure).scale)]
    if not data:
        return None
    caption = (
        "Totals over all clients up to the last round: mean over seeds with the 95 % interval (with few seeds, one "
        "dot per seed). One MB is 10⁶ bytes of sent messages. Sample gradients "
        "also include inner problems. Seconds depend on the machine."
    )
    return _draw_measures("costs", "Totals", "Total work and traffic", caption, data, "method", None)


def _draw_cost_to_target(runs: list[Run], rows: list[Row], lead: str, models: Models) -> Figure | None:
    """Plot one dot per row: the cost at which the mean result first reaches the task's target.

    Return None if fewer than two rows reached the target.
    """
    data: Rows = []
    missed: list[str] = []
    targets = []
    for _, own_runs, compared in group_comparable_runs(runs, rows):
        target = common_target(own_runs, compared, lead, models)
        for cost, (title, scale) in COST_AXES.items():
            spent = cost_to_reach(own_runs, compared, lead, target, cost)
            targets += [target_text(lead, target)] if spent else []
            for i, estimate in spent.items():
                tags = {
                    "measure": title,
                    "row": compared[i].title,
                    "method": compared[i].name,
                    "model": compared[i].model,
                }
                data += [{**tags, "target": target, **point} for point in estimate.points(scale)]
            missed += [f"{row.name} {row.model}".strip() for i, row in enumerate(compared) if spent and i not in spent]
    if len({point["row"] for point in data}) < 2:
        return None
    goal = f"{lowercase_title(metric(lead).title)} {' or '.join(dict.fromkeys(targets))}"
    never = f" Not reached with every seed: {', '.join(dict.fromkeys(missed))}." if missed else ""
    best = (
        f"{format_percent(TARGET_SHARE)} of the best result"
        if metric(lead).higher_is_better
        else f"the best result over {format_percent(TARGET_SHARE)}"
    )
    caption = (
        f"Total cost of all clients until the mean test result first reaches {goal}, where {best} is the best of the "
        "compared models. Mean over seeds with the 95 % interval (with few seeds, one small dot per seed). Further "
        f"left is better.{never}"
    )
    tint = kit.model_color_channel([row for row in rows if any(point["model"] == row.model for point in data)])
    return _draw_measures("costs-reached", "Cost of a common result", f"Spent until {goal}", caption, data, "row", tint)


def _draw_measures(id: str, tab: str, title: str, caption: str, data: Rows, field: str, tint: Spec | None) -> Figure:
    """Plot one panel per measure, with bars that start at 0, or with dots if the color ``tint`` is given."""
    order = list(dict.fromkeys(point[field] for point in data))
    x = kit.number("value", axis={"tickCount": 3}, scale={"zero": tint is None})
    place = {
        "x": x,
        "y": kit.nominal_channel(field, order, axis={"labelOverlap": False}),
        **({"color": tint} if tint else {}),
    }
    ends = {**place, "x": {**x, "field": "low"}, "x2": {"field": "high"}}
    look = {"size": 80, "opacity": 1} if tint else {"size": 11, "cornerRadiusEnd": 2, "style": "plain"}
    hints = kit.tooltip((field, "Method"), ("measure", "Measure")) + kit.interval_tips("Mean over seeds")
    inner = kit.layer_chart(
        kit.mark_layer("point" if tint else "bar", {**place, "tooltip": hints}, MEAN_FILTER, **look),
        kit.mark_layer("rule", ends, INTERVAL_FILTER, strokeWidth=1.4, opacity=0.7),
        kit.mark_layer("point", place, SEED_FILTER, size=12, opacity=0.7, tooltip=None),
    )
    inner["layer"] = [layer for layer in inner["layer"] if layer["transform"][0] in kit.select_filters(data)]
    spec = kit.facet_panels(inner, "measure", [point["measure"] for point in data], None, high=24 * len(order))
    spec["resolve"]["scale"] = {"x": "independent"}
    return Figure(id, "costs", tab, title, caption, spec, {"rows": data}, "facet")
