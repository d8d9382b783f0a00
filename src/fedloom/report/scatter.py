"""Results against what they cost: fairness, sparsity. One point per method and model, named where there is room."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import altair as alt

from fedloom.report.compare import tasks
from fedloom.report.figure import Figure, Rows, colour, rounded
from fedloom.report.naming import metric, titled
from fedloom.report.numbers import Estimate, Row
from fedloom.report.panels import NUMBERS
from fedloom.report.reading import Run

Lengths = tuple[float, float]
HIGH = 360


class Price(NamedTuple):
    """What is across: a figure of the rows, its name as a column, its title, and whether less of it is better."""

    figure: str
    column: str
    title: str
    less: bool = True


def fairness_pictures(runs: list[Run], rows: list[Row], lead: str) -> list[Figure | None]:
    """The leading result against the variance of losses, and against the worst tenth of the clients."""
    better = "top left" if metric(lead).higher else "bottom left"
    variance = Price("loss/variance", "variance", "Variance of the clients' test losses")
    worst = Price(
        f"{lead}/worst10", "worst", f"Worst 10 % of the clients: {titled(metric(lead))}", not metric(lead).higher
    )
    corner = "top right" if metric(lead).higher else "bottom left"
    what = metric(lead).title
    return [
        trade_off(runs, rows, lead, variance, ("fairness", "fairness", "Variance", f"{what} against fairness", better)),
        trade_off(
            runs, rows, lead, worst, ("worst", "fairness", "Worst 10 %", f"{what} against the worst tenth", corner)
        ),
    ]


def sparsity_picture(runs: list[Run], rows: list[Row], lead: str) -> Figure | None:
    """The leading result against the non-zero parameters; a model that was not counted is dense."""
    if not any("nonzeros" in row.figures for row in rows):
        return None
    counted = []
    for row in rows:
        dense = {record.seed: float(record.parameters) for record in row.records if record.parameters}
        figures = (
            row.figures if "nonzeros" in row.figures or not dense else {**row.figures, "nonzeros": Estimate(dense)}
        )
        counted.append(replace(row, figures=figures))
    better = "top left" if metric(lead).higher else "bottom left"
    price = Price("nonzeros", "nonzeros", "Non-zero parameters")
    title = f"{metric(lead).title} against sparsity"
    return trade_off(runs, counted, lead, price, ("sparsity", "structure", "Trade-off", title, better))


def trade_off(
    runs: list[Run], rows: list[Row], lead: str, price: Price, words: tuple[str, str, str, str, str]
) -> Figure | None:
    """A point per row with both figures; ``words`` are id, group, tab, title and the corner that is best."""
    scale = metric(lead).scale
    factor = scale if price.figure.startswith(lead) else 1.0
    data: Rows = []
    for row in rows:
        result, cost = row.figures.get(lead), row.figures.get(price.figure)
        if result is None or cost is None or not (math.isfinite(result.mean) and math.isfinite(cost.mean)):
            continue
        low, high = _ends(cost, factor)
        bottom, top = _ends(result, scale)
        data.append(
            {
                "method": row.name,
                "model": row.model,
                "result": rounded(result.mean * scale),
                "low": rounded(bottom),
                "high": rounded(top),
                price.column: rounded(cost.mean * factor),
                f"{price.column}_low": rounded(low),
                f"{price.column}_high": rounded(high),
            }
        )
    if len(data) < 2 or len({point[price.column] for point in data}) == 1:
        return None
    signs = (1 if metric(lead).higher else -1, -1 if price.less else 1)
    for _, _, own in tasks(runs, rows):
        peers = [point for point in data if any((point["method"], point["model"]) == (r.name, r.model) for r in own)]
        for point in peers:
            point["best"] = not any(_better(other, point, price.column, signs) for other in peers)
    for narrow, width in (("", 600), ("_narrow", 280)):
        place_labels(data, ("result", price.column), (width, HIGH - 20), narrow)
    id, group, tab, title, corner = words
    caption = (
        f"{title}, one point per model and method: {corner} is best. Ringed: no other of equal data and attack is "
        "better in both. Lines are 95 % intervals over seeds, cut at the edge; names that would overlap are left out "
        "(point at a dot)."
    )
    chart = _draw(data, rows, lead, price)
    return Figure(id, group, tab, title, caption, chart, data, {}, "wide")


def _ends(estimate: Estimate, scale: float) -> Lengths:
    half = 0.0 if math.isnan(estimate.half) else estimate.half
    return (estimate.mean - half) * scale, (estimate.mean + half) * scale


def _better(one: dict[str, Any], other: dict[str, Any], column: str, signs: tuple[int, int]) -> bool:
    gains: list[float] = [
        sign * (one[name] - other[name]) for name, sign in zip(("result", column), signs, strict=True)
    ]
    return min(gains) >= 0 and max(gains) > 0


def _draw(data: Rows, rows: list[Row], lead: str, price: Price) -> Any:
    across, up = (alt.Scale(domain=_domain(data, name), nice=False) for name in (price.column, "result"))
    axis = alt.Axis(tickCount=5, labelExpr=NUMBERS)
    x = alt.X(f"{price.column}:Q", title=price.title, scale=across, axis=axis)
    y = alt.Y("result:Q", title=titled(metric(lead)), scale=up, axis=alt.Axis(tickCount=6))
    tint = colour(rows)
    base = alt.Chart(alt.NamedData(name="rows"))
    names = {"method": "Method", "model": "Model", "result": titled(metric(lead)), price.column: price.title}
    hints = [alt.Tooltip(f"{n}:{'N' if n in ('method', 'model') else 'Q'}", title=t) for n, t in names.items()]
    shift: dict[str, Any] = {"align": alt.expr("datum.align"), "dx": alt.expr("datum.dx"), "dy": alt.expr("datum.dy")}
    ring = base.mark_point(size=220, filled=False, strokeWidth=1.2, style="ghost", opacity=1, tooltip=None)
    return alt.layer(
        base.mark_rule(opacity=0.3, clip=True).encode(x=x, y=alt.Y("low:Q", scale=up), y2="high:Q", color=tint),
        base.mark_rule(opacity=0.3, clip=True).encode(
            x=alt.X(f"{price.column}_low:Q", scale=across), x2=f"{price.column}_high:Q", y=y, color=tint
        ),
        ring.transform_filter("datum.best").encode(x=x, y=y),
        base.mark_point(size=80, opacity=1).encode(x=x, y=y, color=tint, tooltip=hints),
        base.mark_text(baseline="middle", **shift).encode(x=x, y=y, text="label:N"),
    ).properties(width=640, height=HIGH)


def _domain(data: Rows, name: str) -> list[float]:
    """An axis around the points themselves: their intervals may be far wider."""
    low, high = min(point[name] for point in data), max(point[name] for point in data)
    air = 0.12 * (high - low) or 0.1 * abs(high) or 1.0
    return [low - air, high + air]


def place_labels(data: Rows, names: tuple[str, str], size: Lengths, suffix: str) -> None:
    """Adds to every point its label and where it goes (right, left, above, below), or no label where all are taken.

    Args:
        data: points with ``method``; receives ``label``, ``align``, ``dx`` and ``dy``, each with ``suffix`` appended.
        names: columns that are up and across.
        size: width and height of the chart in pixels.
        suffix: tells apart the placements for several widths.
    """
    width, height = size
    (bottom, top), (left, right) = (_domain(data, name) for name in names)
    spots = [
        ((p[names[1]] - left) / (right - left) * width, (p[names[0]] - bottom) / (bottom - top) * height) for p in data
    ]
    taken = [(x - 8, y - 8, x + 8, y + 8) for x, y in spots]
    for point, (x, y) in zip(data, spots, strict=True):
        wide = 6.6 * len(point["method"])
        sides = (("left", 12, 0), ("right", -12, 0), ("center", 0, -17), ("center", 0, 17))
        found = ("", "left", 0, 0)
        for align, dx, dy in sides:
            start = x + dx - {"left": 0.0, "right": wide, "center": wide / 2}[align]
            box = (start, y + dy - 7, start + wide, y + dy + 7)
            inside = box[0] >= 0 and box[2] <= width
            if inside and not any(a < box[2] and box[0] < c and b < box[3] and box[1] < d for a, b, c, d in taken):
                taken.append(box)
                found = (point["method"], align, dx, dy)
                break
        point.update(
            {f"{key}{suffix}": value for key, value in zip(("label", "align", "dx", "dy"), found, strict=True)}
        )
