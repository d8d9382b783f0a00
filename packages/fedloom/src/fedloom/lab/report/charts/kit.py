"""Build charts: Vega-Lite specifications as plain dictionaries from their parts, with their data."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedloom.lab.report.charts import look
from fedloom.lab.report.numbers import MODELS, Row

NUMBERS = (
    "abs(datum.value) >= 1e9 ? format(datum.value, '.1e') : "
    "abs(datum.value) >= 1000 ? format(datum.value, '~s') : format(datum.value, '.3~g')"
)
"""Ticks in a common form: 0.5, 20, 1.5k, 3M, 7.0e+15."""
FAR = 50
"""A result so many times larger than the better ones sets no axis."""
MEAN = {"filter": "datum.seed == null"}
SINGLE = {"filter": "datum.seed != null"}
HAS_INTERVAL = {"filter": "isValid(datum.low)"}
"""Rows of charts are means over seeds, with an interval or beside single seeds where these are few."""

HIDDEN = ("label", "label_narrow", "side", "place", "middle")
"""Columns of the data of charts that serve the drawing only."""


Rows = list[dict[str, Any]]
Spec = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A chart with its data and its words.

    Attributes:
        id: unique within a report; also the name of its files.
        tab: name of its tab, where several figures share a place (equal ``group``).
        chart: Vega-Lite specification over the named data sets, without colours of a theme.
        data: the data sets by name; ``rows`` is among them.
        layout: how the page fits it to its width: ``facet`` changes the number of columns, ``square`` too and keeps
            its panels square, ``wide`` changes the width, ``beside`` that of the first of two charts.
        canvas: whether the page draws it as a bitmap, because it has very many marks.
        table: the data set that a reader may look at and download, the finest that there is.
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
        """The main data set."""
        return self.data["rows"]

    def spec(self) -> Spec:
        """The specification with its data."""
        return {**self.chart, "description": self.caption, "datasets": self.data}

    def svg(self) -> str:
        """The chart as an SVG in the light look."""
        return look.svg(self.spec())

    def columns(self, name: str) -> list[str]:
        """Columns of a data set."""
        return list(dict.fromkeys(key for row in self.data[name] for key in row))


def chart(*layers: Spec, **more: object) -> Spec:
    """Layers over the data set ``rows``."""
    return {"data": {"name": "rows"}, "layer": list(layers), **more}


def mark(kind: str, encoding: Spec, *transform: Spec, data: str = "", **look: object) -> Spec:
    """A layer: a mark with its look, encoding and transforms, of another data set if one is named."""
    layer: Spec = {"mark": {"type": kind, **look}, "encoding": encoding}
    if transform:
        layer["transform"] = list(transform)
    return layer | ({"data": {"name": data}} if data else {})


def number(field: str, title: str | None = None, **more: Any) -> Spec:
    """A quantitative channel whose axis need not begin at 0, with ticks in a common form."""
    scale = {"zero": False, **more.pop("scale", {})}
    axis = {"tickCount": 5, "labelExpr": NUMBERS, "labelOverlap": True, **more.pop("axis", {})}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": axis, **more}


def names(field: str, order: Iterable[str], title: str | None = None, **more: Any) -> Spec:
    """A nominal channel in a given order."""
    axis = {"labelLimit": 190, "grid": False, "labelAngle": 0, "labelOverlap": True, **more.pop("axis", {})}
    return {"field": field, "type": "nominal", "sort": [*dict.fromkeys(order)], "title": title, "axis": axis, **more}


def name_lines(field: str, order: Sequence[str], letters: int) -> tuple[Spec, int]:
    """A nominal channel whose long names are in lines of so many letters; and the most lines of a name."""
    lines = {name: textwrap.wrap(name, letters) or [name] for name in order}
    most = max(map(len, lines.values()), default=1)
    split = f"{json.dumps(lines)}[datum.value]"
    higher = [{"test": f"length({split}) === {n}", "value": -6.5 * (n - 1)} for n in range(2, most + 1)]
    axis = {"labelExpr": split, "labelLineHeight": 13, "labelOverlap": False, "labelLimit": 400}
    return names(field, order, axis=axis | {"labelOffset": {"condition": higher, "value": 0}}), most


def tips(*parts: tuple[str, ...]) -> list[Spec]:
    """Tooltip of (field, title) for text and counts, (field, title, format) for numbers."""
    return [
        {
            "field": field,
            "title": title,
            **({"type": "quantitative", "format": form[0]} if form else {"type": "nominal"}),
        }
        for field, title, *form in parts
    ]


def interval_tips(title: str) -> list[Spec]:
    """Tooltip of a mean with its interval."""
    ends = (("low", "95 % interval from"), ("high", "to"))
    return tips(("value", title, ".4~g"), *((field, words, ".4~g") for field, words in ends), ("seeds", "Seeds"))


def intervals(
    place: Spec, x: Spec, *, tint: Spec | None = None, tooltip: list[Spec] | None = None, **dot: Any
) -> list[Spec]:
    """Layers of the fields ``value``, ``low`` and ``high``: a line over the interval and a dot at the mean.

    Args:
        place: the channels that say where, and what else the dots and lines have in common.
        x: channel of the mean.
        tint: colour of both.
        tooltip: of the dots.
        dot: look of the dots.
    """
    common = {**place, **({"color": tint} if tint else {})}
    ends = {**common, "x": {**x, "field": "low"}, "x2": {"field": "high"}}
    mean = {**common, "x": x, **({"tooltip": tooltip} if tooltip else {})}
    return [
        mark("rule", ends, HAS_INTERVAL, strokeWidth=2),
        mark("point", mean, **{"filled": True, "size": 60, "opacity": 1, **dot}),
    ]


def heat_map(x: Spec, y: Spec, color: Spec, tooltip: list[Spec], text: str = "", strong: str = "", **look: Any) -> Spec:
    """Cells; with ``text`` their numbers, in another ink where the expression ``strong`` holds."""
    place = {"x": x, "y": y, "tooltip": tooltip}
    words = [
        mark("text", {**place, "text": {"field": text}}, {"filter": test}, style=style, fontSize=11.5)
        for style, test in (("onstrong", strong), ("onweak", f"!({strong})"))
        if text
    ]
    return chart(mark("rect", {**place, "color": color}, **{"cornerRadius": 2, **look}), *words)


def shade(field: str, title: str, *, form: str = "", **scale: object) -> Spec:
    """Colour of cells from pale to strong."""
    legend = {"gradientLength": 160, "gradientThickness": 8, **({"format": form} if form else {})}
    scale = {"range": "heatmap", "clamp": True, **scale}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "legend": legend}


def panels(
    inner: Spec, field: str, order: Iterable[str], below: str | None, *, high: int = 120, **more: object
) -> Spec:
    """Small multiples: a panel for each value of a field, with its own axis across and one title below them all."""
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


def drawn(rows: Rows) -> list[Spec]:
    """The filters of `MEAN`, `HAS_INTERVAL` and `SINGLE` under which there are rows."""
    return [
        MEAN,
        *([HAS_INTERVAL] if any(row.get("low") is not None for row in rows) else []),
        *([SINGLE] if any(row["seed"] is not None for row in rows) else []),
    ]


def line_panels(data: Rows, x: Spec, y: Spec, tint: Spec, tooltip: list[Spec], below: str, dots: float = 0) -> Spec:
    """A panel per method: means with intervals or single seeds, the other methods in grey behind them."""
    order = list(dict.fromkeys(row["method"] for row in data))
    place, seeds = {"x": x, "y": y}, [{"field": "model"}, {"field": "seed"}]
    ends = {"y": {**y, "field": "low"}, "y2": {"field": "high"}, "x": x, "color": tint}
    grey = {**place, "detail": [{"field": "method"}, {"field": "model"}]}
    pale = {"strokeWidth": 0.8, "opacity": 0.45 if len(order) < 9 else 0.2, "style": "ghost"}
    ghosts = mark("line", grey, MEAN, data="rows", clip=True, tooltip=None, **pale)
    shown = drawn(data)
    layers = [
        mark("area", ends, HAS_INTERVAL, opacity=0.16, clip=True, tooltip=None),
        mark("line", {**place, "color": tint, "detail": seeds}, SINGLE, strokeWidth=1, opacity=0.5, clip=True),
        mark("line", {**place, "color": tint}, MEAN, clip=True),
        mark("point", {**place, "color": tint, "tooltip": tooltip}, MEAN, size=45, opacity=dots, clip=True),
    ]
    layers = [layer for layer in layers if layer["transform"][0] in shown]
    return panels(chart(*([ghosts] if len(order) > 1 else []), *layers), "method", order, below)


def colour(rows: list[Row]) -> Spec:
    """The colour of the model, the same in every chart."""
    present = list(dict.fromkeys(row.model for row in rows))
    order = [*MODELS, *(model for model in present if model not in MODELS)]
    shown = [model for model in order if model in present]
    legend = {"title": None, "values": shown} if len(shown) > 1 else None
    return {"field": "model", "type": "nominal", "scale": {"domain": order, "range": "category"}, "legend": legend}


def off_axis(largest: dict[str, float]) -> set[str]:
    """The names whose largest value is `FAR` times that of the better ones: they would flatten all others."""
    sizes = sorted(abs(value) for value in largest.values() if value)
    near = sizes[(len(sizes) - 1) // 4] if sizes else 0.0
    return {name for name, value in largest.items() if abs(value) > FAR * near > 0}


def off_words(off: Iterable[str]) -> str:
    """The sentence on those names."""
    listed = ", ".join(dict.fromkeys(off))
    return f" Far outside of the axis: {listed}." if listed else ""


def domain(values: Iterable[float | None], air: float = 0.06) -> list[float]:
    """An axis around values, with some air."""
    numbers = [value for value in values if value is not None]
    low, high = min(numbers), max(numbers)
    more = air * (high - low) or 0.1 * abs(high) or 1.0
    return [low - more, high + more]


def slug(name: str) -> str:
    """A name that is safe as a file name and an HTML id.

    >>> slug("../my metric")
    'my-metric'
    """
    return re.sub(r"[^\w-]+", "-", name).strip("-")
