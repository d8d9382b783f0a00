"""Building blocks of charts: Vega-Lite specifications as plain dictionaries, together with their data."""

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
"""Expression that formats axis ticks, as in 0.5, 20, 1.5k, 3M and 7.0e+15."""
AXIS_OUTLIER_RATIO = 50
"""A result is excluded from the axis range if it exceeds the better results by at least this factor."""
MEAN_FILTER = {"filter": "datum.seed == null"}
SEED_FILTER = {"filter": "datum.seed != null"}
INTERVAL_FILTER = {"filter": "isValid(datum.low)"}
"""Filters on the rows of a chart: means over seeds, individual seeds, and means with a confidence interval. If there
are only a few seeds, they are shown individually, without an interval."""

HIDDEN_COLUMNS = ("label", "label_narrow", "side", "place", "middle")
"""Columns of chart data used only for plotting."""


Rows = list[dict[str, Any]]
Spec = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """Chart with its data and texts.

    Attributes:
        id: identifier that is unique within a report. It is also the name of the chart's files.
        tab: title of the chart's tab, if several charts have the same ``group``.
        chart: Vega-Lite specification that refers to named data sets and takes its colors from a theme.
        data: data sets, keyed by name. The main data set is called ``rows``.
        layout: how the chart adapts to the available width. ``facet`` changes the number of columns. ``square`` does
            the same and keeps the panels square. ``wide`` changes the width of the chart. ``beside`` changes the width
            of the first of two charts.
        canvas: True to draw the chart as a bitmap because it contains very many marks.
        table: name of the chart's most detailed data set, for viewing and downloading.
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
        """Rows of the main data set."""
        return self.data["rows"]

    def spec(self) -> Spec:
        """Return the Vega-Lite specification together with its data."""
        return {**self.chart, "description": self.caption, "datasets": self.data}

    def svg(self) -> str:
        """Render the chart as an SVG in the light theme."""
        return look.render_svg(self.spec())

    def columns(self, name: str) -> list[str]:
        """Return the names of the columns in a data set."""
        return list(dict.fromkeys(key for row in self.data[name] for key in row))


def layer_chart(*layers: Spec, **more: object) -> Spec:
    """Build a chart from layers that use the data set ``rows``."""
    return {"data": {"name": "rows"}, "layer": list(layers), **more}


def mark_layer(kind: str, encoding: Spec, *transform: Spec, data: str = "", **look: object) -> Spec:
    """Build a layer from a mark with its style, encoding and transforms.

    If ``data`` is given, the layer uses the data set with this name.
    """
    layer: Spec = {"mark": {"type": kind, **look}, "encoding": encoding}
    if transform:
        layer["transform"] = list(transform)
    return layer | ({"data": {"name": data}} if data else {})


def number(field: str, title: str | None = None, **more: Any) -> Spec:
    """Build a quantitative channel for a field.

    The axis need not start at 0, and its ticks have the same format as on all other axes.
    """
    scale = {"zero": False, **more.pop("scale", {})}
    axis = {"tickCount": 5, "labelExpr": TICK_FORMAT, "labelOverlap": True, **more.pop("axis", {})}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": axis, **more}


def nominal_channel(field: str, order: Iterable[str], title: str | None = None, **more: Any) -> Spec:
    """Build a nominal channel for a field, with its values in the given order."""
    axis = {"labelLimit": 190, "grid": False, "labelAngle": 0, "labelOverlap": True, **more.pop("axis", {})}
    return {"field": field, "type": "nominal", "sort": [*dict.fromkeys(order)], "title": title, "axis": axis, **more}


def name_lines(field: str, order: Sequence[str], letters: int) -> tuple[Spec, int]:
    """Build a nominal channel that breaks long names into several lines. Also return the maximum number of lines."""
    lines = {name: textwrap.wrap(name, letters) or [name] for name in order}
    most = max(map(len, lines.values()), default=1)
    split = f"{json.dumps(lines)}[datum.value]"
    higher = [{"test": f"length({split}) === {n}", "value": -6.5 * (n - 1)} for n in range(2, most + 1)]
    axis = {"labelExpr": split, "labelLineHeight": 13, "labelOverlap": False, "labelLimit": 400}
    return nominal_channel(field, order, axis=axis | {"labelOffset": {"condition": higher, "value": 0}}), most


def tooltip(*parts: tuple[str, ...]) -> list[Spec]:
    """Build a tooltip from pairs (field, title) for text and counts, and triples (field, title, format) for numbers."""
    return [
        {
            "field": field,
            "title": title,
            **({"type": "quantitative", "format": form[0]} if form else {"type": "nominal"}),
        }
        for field, title, *form in parts
    ]


def interval_tips(title: str) -> list[Spec]:
    """Build a tooltip with a mean and its confidence interval."""
    ends = (("low", "95 % interval from"), ("high", "to"))
    return tooltip(("value", title, ".4~g"), *((field, words, ".4~g") for field, words in ends), ("seeds", "Seeds"))


def interval_layers(
    place: Spec, x: Spec, *, tint: Spec | None = None, tooltip: list[Spec] | None = None, **dot: Any
) -> list[Spec]:
    """Build layers that draw a line from ``low`` to ``high`` and a dot at the mean ``value``.

    Args:
        place: channels for the position, and other channels shared by the lines and dots.
        x: channel for the mean.
        tint: color of the dots and lines.
        tooltip: tooltip of the dots.
        dot: style of the dots.
    """
    common = {**place, **({"color": tint} if tint else {})}
    ends = {**common, "x": {**x, "field": "low"}, "x2": {"field": "high"}}
    mean = {**common, "x": x, **({"tooltip": tooltip} if tooltip else {})}
    return [
        mark_layer("rule", ends, INTERVAL_FILTER, strokeWidth=2),
        mark_layer("point", mean, **{"filled": True, "size": 60, "opacity": 1, **dot}),
    ]


def heat_map(x: Spec, y: Spec, color: Spec, tooltip: list[Spec], text: str = "", strong: str = "", **look: Any) -> Spec:
    """Build a heat map.

    If given, ``text`` is the field printed in the cells, highlighted where the expression ``strong`` is true.
    """
    place = {"x": x, "y": y, "tooltip": tooltip}
    words = [
        mark_layer("text", {**place, "text": {"field": text}}, {"filter": test}, style=style, fontSize=11.5)
        for style, test in (("onstrong", strong), ("onweak", f"!({strong})"))
        if text
    ]
    return layer_chart(mark_layer("rect", {**place, "color": color}, **{"cornerRadius": 2, **look}), *words)


def intensity_channel(field: str, title: str, *, form: str = "", **scale: object) -> Spec:
    """Build a color channel that ranges from pale to strong."""
    legend = {"gradientLength": 160, "gradientThickness": 8, **({"format": form} if form else {})}
    scale = {"range": "heatmap", "clamp": True, **scale}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "legend": legend}


def facet_panels(
    inner: Spec, field: str, order: Iterable[str], below: str | None, *, high: int = 120, **more: object
) -> Spec:
    """Build small multiples with one panel for each value of a field.

    Each panel has its own horizontal axis. All panels share a single title below them.
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
    """Return the filters among `MEAN_FILTER`, `INTERVAL_FILTER` and `SEED_FILTER` that select at least one row."""
    return [
        MEAN_FILTER,
        *([INTERVAL_FILTER] if any(row.get("low") is not None for row in rows) else []),
        *([SEED_FILTER] if any(row["seed"] is not None for row in rows) else []),
    ]


def line_panels(data: Rows, x: Spec, y: Spec, tint: Spec, tooltip: list[Spec], below: str, dots: float = 0) -> Spec:
    """Build one panel per method with means and intervals, or with individual seeds.

    The other methods appear in gray in the background.
    """
    order = list(dict.fromkeys(row["method"] for row in data))
    place, seeds = {"x": x, "y": y}, [{"field": "model"}, {"field": "seed"}]
    ends = {"y": {**y, "field": "low"}, "y2": {"field": "high"}, "x": x, "color": tint}
    grey = {**place, "detail": [{"field": "method"}, {"field": "model"}]}
    pale = {"strokeWidth": 0.8, "opacity": 0.45 if len(order) < 9 else 0.2, "style": "ghost"}
    ghosts = mark_layer("line", grey, MEAN_FILTER, data="rows", clip=True, tooltip=None, **pale)
    shown = select_filters(data)
    layers = [
        mark_layer("area", ends, INTERVAL_FILTER, opacity=0.16, clip=True, tooltip=None),
        mark_layer(
            "line", {**place, "color": tint, "detail": seeds}, SEED_FILTER, strokeWidth=1, opacity=0.5, clip=True
        ),
        mark_layer("line", {**place, "color": tint}, MEAN_FILTER, clip=True),
        mark_layer(
            "point", {**place, "color": tint, "tooltip": tooltip}, MEAN_FILTER, size=45, opacity=dots, clip=True
        ),
    ]
    layers = [layer for layer in layers if layer["transform"][0] in shown]
    return facet_panels(layer_chart(*([ghosts] if len(order) > 1 else []), *layers), "method", order, below)


def model_color_channel(rows: list[Row]) -> Spec:
    """Return the color channel for kinds of models. Each kind is shown in the same color in every chart."""
    present = list(dict.fromkeys(row.model for row in rows))
    order = [*MODEL_KINDS, *(model for model in present if model not in MODEL_KINDS)]
    shown = [model for model in order if model in present]
    legend = {"title": None, "values": shown} if len(shown) > 1 else None
    return {"field": "model", "type": "nominal", "scale": {"domain": order, "range": "category"}, "legend": legend}


def find_off_axis_names(largest: dict[str, float]) -> set[str]:
    """Return the series whose largest value exceeds the better values by more than a factor of `AXIS_OUTLIER_RATIO`.

    On an axis that includes them, all other values would appear flat.
    """
    sizes = sorted(abs(value) for value in largest.values() if value)
    near = sizes[(len(sizes) - 1) // 4] if sizes else 0.0
    return {name for name, value in largest.items() if abs(value) > AXIS_OUTLIER_RATIO * near > 0}


def axis_note(off: Iterable[str]) -> str:
    """Return a sentence that lists the names from `find_off_axis_names`, or "" if there are none."""
    listed = ", ".join(dict.fromkeys(off))
    return f" Far outside the axis: {listed}." if listed else ""


def axis_domain(values: Iterable[float | None], air: float = 0.06) -> list[float]:
    """Return an axis range that contains the values and a margin."""
    numbers = [value for value in values if value is not None]
    low, high = min(numbers), max(numbers)
    more = air * (high - low) or 0.1 * abs(high) or 1.0
    return [low - more, high + more]


def make_slug(name: str) -> str:
    """Convert a name to a safe file name and HTML ID.

    >>> make_slug("../my metric")
    'my-metric'
    """
    return re.sub(r"[^\w-]+", "-", name).strip("-")
