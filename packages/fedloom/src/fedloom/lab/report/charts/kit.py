"""Build charts from their parts: Vega-Lite specifications as plain dictionaries, with their data."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedloom.lab.report.charts import look
from fedloom.lab.report.numbers import MODEL_KINDS, Row

TICK_FORMAT = (
    "abs(datum.value) >= 1e9 ? format(datum.value, '.1e') : "
    "abs(datum.value) >= 1000 ? format(datum.value, '~s') : format(datum.value, '.3~g')"
)
"""Expression that formats ticks: 0.5, 20, 1.5k, 3M, 7.0e+15."""
AXIS_OUTLIER_RATIO = 50
"""Factor by which a result must exceed the better results to be excluded from the range of the axis."""
MEAN_FILTER = {"filter": "datum.seed == null"}
SEED_FILTER = {"filter": "datum.seed != null"}
HAS_INTERVAL = {"filter": "isValid(datum.low)"}
"""Filters of the rows of a chart: means over seeds, single seeds, and means with an interval. If there are few seeds,
they are shown individually instead of as an interval."""

HIDDEN_COLUMNS = ("label", "label_narrow", "side", "place", "middle")
"""Columns of chart data that are only used for drawing."""


Rows = list[dict[str, Any]]
Spec = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """Chart with its data and its texts.

    Attributes:
        id: identifier, unique within a report. It is also the name of the chart's files.
        tab: name of the chart's tab, if several charts share a location (equal ``group``).
        chart: Vega-Lite specification over the named data sets, without the colors of a theme.
        data: data sets by name. ``rows`` is one of them.
        layout: how the page adjusts the chart to its width. ``facet`` changes the number of columns. ``square`` does
            the same and keeps the panels square. ``wide`` changes the width of the chart. ``beside`` changes the width
            of the first of two charts.
        canvas: True if the page draws the chart as a bitmap, because the chart contains very many marks.
        table: name of the data set that a reader may view and download, which is the most detailed data set of the
            chart.
    """

    id: str
    group: str
    tab: str
    title: str
    caption: str
    chart: Spec
    data: dict[str, Rows]
    layout: Literal["facet", "square", "wide", "beside"]
    canvas: bool = False
    table: str = "rows"

    @property
    def rows(self) -> Rows:
        """Main data set."""
        return self.data["rows"]

    def spec(self) -> Spec:
        """Return the specification with its data."""
        return {**self.chart, "description": self.caption, "datasets": self.data}

    def svg(self) -> str:
        """Return the chart as an SVG in the light theme."""
        return look.svg(self.spec())

    def columns(self, name: str) -> list[str]:
        """Return the columns of a data set."""
        return list(dict.fromkeys(key for row in self.data[name] for key in row))


def layer_chart(*layers: Spec, **more: object) -> Spec:
    """Build a chart of layers over the data set ``rows``."""
    return {"data": {"name": "rows"}, "layer": list(layers), **more}


def mark(kind: str, encoding: Spec, *transform: Spec, data: str = "", **look: object) -> Spec:
    """Build a layer: a mark with its style, encoding and transforms. If a data set is named, the layer uses it."""
    layer: Spec = {"mark": {"type": kind, **look}, "encoding": encoding}
    if transform:
        layer["transform"] = list(transform)
    return layer | ({"data": {"name": data}} if data else {})


def number(field: str, title: str | None = None, **more: Any) -> Spec:
    """Build a quantitative channel. Its axis need not begin at 0, and its ticks use a common format."""
    scale = {"zero": False, **more.pop("scale", {})}
    axis = {"tickCount": 5, "labelExpr": TICK_FORMAT, "labelOverlap": True, **more.pop("axis", {})}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": axis, **more}


def nominal_channel(field: str, order: Iterable[str], title: str | None = None, **more: Any) -> Spec:
    """Build a nominal channel with a given order."""
    axis = {"labelLimit": 190, "grid": False, "labelAngle": 0, "labelOverlap": True, **more.pop("axis", {})}
    return {"field": field, "type": "nominal", "sort": [*dict.fromkeys(order)], "title": title, "axis": axis, **more}


def name_lines(field: str, order: Sequence[str], letters: int) -> tuple[Spec, int]:
    """Build a nominal channel that breaks long names into lines. Also return the largest number of lines."""
    lines = {name: textwrap.wrap(name, letters) or [name] for name in order}
    most = max(map(len, lines.values()), default=1)
    split = f"{json.dumps(lines)}[datum.value]"
    higher = [{"test": f"length({split}) === {n}", "value": -6.5 * (n - 1)} for n in range(2, most + 1)]
    axis = {"labelExpr": split, "labelLineHeight": 13, "labelOverlap": False, "labelLimit": 400}
    return nominal_channel(field, order, axis=axis | {"labelOffset": {"condition": higher, "value": 0}}), most


def tips(*parts: tuple[str, ...]) -> list[Spec]:
    """Build a tooltip from (field, title) for text and counts, and from (field, title, format) for numbers."""
    return [
        {
            "field": field,
            "title": title,
            **({"type": "quantitative", "format": form[0]} if form else {"type": "nominal"}),
        }
        for field, title, *form in parts
    ]


def interval_tips(title: str) -> list[Spec]:
    """Build the tooltip of a mean with its interval."""
    ends = (("low", "95 % interval from"), ("high", "to"))
    return tips(("value", title, ".4~g"), *((field, words, ".4~g") for field, words in ends), ("seeds", "Seeds"))


def intervals(
    place: Spec, x: Spec, *, tint: Spec | None = None, tooltip: list[Spec] | None = None, **dot: Any
) -> list[Spec]:
    """Build layers of the fields ``value``, ``low`` and ``high``: a line over the interval and a dot at the mean.

    Args:
        place: channels of the position, and other channels that the dots and lines share.
        x: channel of the mean.
        tint: color of the dots and lines.
        tooltip: tooltip of the dots.
        dot: style of the dots.
    """
    common = {**place, **({"color": tint} if tint else {})}
    ends = {**common, "x": {**x, "field": "low"}, "x2": {"field": "high"}}
    mean = {**common, "x": x, **({"tooltip": tooltip} if tooltip else {})}
    return [
        mark("rule", ends, HAS_INTERVAL, strokeWidth=2),
        mark("point", mean, **{"filled": True, "size": 60, "opacity": 1, **dot}),
    ]


def heat_map(x: Spec, y: Spec, color: Spec, tooltip: list[Spec], text: str = "", strong: str = "", **look: Any) -> Spec:
    """Build a heat map.

    With ``text``, numbers are written into the cells, in a different color where the expression ``strong`` is true.
    """
    place = {"x": x, "y": y, "tooltip": tooltip}
    words = [
        mark("text", {**place, "text": {"field": text}}, {"filter": test}, style=style, fontSize=11.5)
        for style, test in (("onstrong", strong), ("onweak", f"!({strong})"))
        if text
    ]
    return layer_chart(mark("rect", {**place, "color": color}, **{"cornerRadius": 2, **look}), *words)


def shade(field: str, title: str, *, form: str = "", **scale: object) -> Spec:
    """Build a color channel from pale to strong."""
    legend = {"gradientLength": 160, "gradientThickness": 8, **({"format": form} if form else {})}
    scale = {"range": "heatmap", "clamp": True, **scale}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "legend": legend}


def panels(
    inner: Spec, field: str, order: Iterable[str], below: str | None, *, high: int = 120, **more: object
) -> Spec:
    """Build small multiples: a panel for each value of a field.

    Each panel has a separate horizontal axis, and one title is below all panels.
    """
    header = {"labelAnchor": "start", "labelLimit": 180, "titleOrient": "bottom", "titleFontWeight": "normal"}
    header |= {"titleFontSize": 11.5, "titlePadding": 4}
    return {
        "data": inner["data"],
        "facet": {"field": field, "type": "nominal", "sort": [*dict.fromkeys(order)], "title": below, "header": header},
        "columns": 4,
        "spacing": {"column": 24, "row": 16},
        "resolve": {"axis": {"x": "independent"}, **more},
        "spec": {"width": 200, "height": high, "layer": inner["layer"]},
    }


def select_filters(rows: Rows) -> list[Spec]:
    """Return those of the filters `MEAN_FILTER`, `HAS_INTERVAL` and `SEED_FILTER` that select any rows."""
    return [
        MEAN_FILTER,
        *([HAS_INTERVAL] if any(row.get("low") is not None for row in rows) else []),
        *([SEED_FILTER] if any(row["seed"] is not None for row in rows) else []),
    ]


def line_panels(data: Rows, x: Spec, y: Spec, tint: Spec, tooltip: list[Spec], below: str, dots: float = 0) -> Spec:
    """Build a panel per method with means and intervals or single seeds.

    Behind them, the other methods are drawn in grey.
    """
    order = list(dict.fromkeys(row["method"] for row in data))
    place, seeds = {"x": x, "y": y}, [{"field": "model"}, {"field": "seed"}]
    ends = {"y": {**y, "field": "low"}, "y2": {"field": "high"}, "x": x, "color": tint}
    grey = {**place, "detail": [{"field": "method"}, {"field": "model"}]}
    pale = {"strokeWidth": 0.8, "opacity": 0.45 if len(order) < 9 else 0.2, "style": "ghost"}
    ghosts = mark("line", grey, MEAN_FILTER, data="rows", clip=True, tooltip=None, **pale)
    shown = select_filters(data)
    layers = [
        mark("area", ends, HAS_INTERVAL, opacity=0.16, clip=True, tooltip=None),
        mark("line", {**place, "color": tint, "detail": seeds}, SEED_FILTER, strokeWidth=1, opacity=0.5, clip=True),
        mark("line", {**place, "color": tint}, MEAN_FILTER, clip=True),
        mark("point", {**place, "color": tint, "tooltip": tooltip}, MEAN_FILTER, size=45, opacity=dots, clip=True),
    ]
    layers = [layer for layer in layers if layer["transform"][0] in shown]
    return panels(layer_chart(*([ghosts] if len(order) > 1 else []), *layers), "method", order, below)


def colour(rows: list[Row]) -> Spec:
    """Return the color of the model, which is the same in every chart."""
    present = list(dict.fromkeys(row.model for row in rows))
    order = [*MODEL_KINDS, *(model for model in present if model not in MODEL_KINDS)]
    shown = [model for model in order if model in present]
    legend = {"title": None, "values": shown} if len(shown) > 1 else None
    return {"field": "model", "type": "nominal", "scale": {"domain": order, "range": "category"}, "legend": legend}


def off_axis(largest: dict[str, float]) -> set[str]:
    """Return the names whose largest value exceeds the better values by the factor `AXIS_OUTLIER_RATIO`.

    Such names would flatten all other values.
    """
    sizes = sorted(abs(value) for value in largest.values() if value)
    near = sizes[(len(sizes) - 1) // 4] if sizes else 0.0
    return {name for name, value in largest.items() if abs(value) > AXIS_OUTLIER_RATIO * near > 0}


def off_words(off: Iterable[str]) -> str:
    """Render the sentence on the names that `off_axis` returned."""
    listed = ", ".join(dict.fromkeys(off))
    return f" Far outside the axis: {listed}." if listed else ""


def domain(values: Iterable[float | None], air: float = 0.06) -> list[float]:
    """Return an axis range around values, with a margin."""
    numbers = [value for value in values if value is not None]
    low, high = min(numbers), max(numbers)
    more = air * (high - low) or 0.1 * abs(high) or 1.0
    return [low - more, high + more]


def slug(name: str) -> str:
    """Convert a name to a safe file name and HTML id.

    >>> slug("../my metric")
    'my-metric'
    """
    return re.sub(r"[^\w-]+", "-", name).strip("-")
