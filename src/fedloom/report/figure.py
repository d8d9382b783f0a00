"""What every chart shares: its data, its look in light and dark, and how it becomes an SVG."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import altair as alt
import vl_convert

from fedloom.report.numbers import MODELS, Row

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Figure:
    """A chart with its data and its words.

    Attributes:
        id: unique within a report; also the name of its files.
        tab: name of its tab, where several figures share a place (equal ``group``).
        chart: Altair chart over the named data sets ``rows`` and those of ``more``.
        rows: the data.
        more: further data sets of the chart, by name.
        table: the data set that a reader may look at and download, the finest that there is.
        layout: how the page fits it to its width: ``facet`` changes the number of columns, ``square`` too and keeps
            its panels square, ``wide`` changes the width, ``beside`` that of the first of two charts.
        canvas: whether the page draws it as a bitmap, because it has very many marks.
    """

    id: str
    group: str
    tab: str
    title: str
    caption: str
    chart: Any
    rows: Rows
    more: dict[str, Rows]
    layout: Literal["facet", "square", "wide", "beside"]
    canvas: bool = False
    table: str = "rows"

    def spec(self) -> dict[str, Any]:
        """The Vega-Lite specification with its data, without colours of a theme."""
        spec: dict[str, Any] = self.chart.to_dict()
        spec.pop("config", None)
        return {**spec, "description": self.caption, "datasets": {"rows": self.rows, **self.more}}

    def svg(self) -> str:
        """The chart as an SVG in the light look."""
        svg: str = vl_convert.vegalite_to_svg({**self.spec(), "config": theme(dark=False)}, vl_version=VEGA_LITE)
        return svg


def theme(*, dark: bool) -> dict[str, Any]:
    """Vega-Lite configuration. The three colours are Okabe and Ito's blue, vermilion and green, lighter on dark."""
    ink, soft, line, paper = (
        ("#e8e6e1", "#a3a19b", "#3a3b3f", "#17181b") if dark else ("#1f2328", "#5f6670", "#dcdfe3", "#ffffff")
    )
    category = (
        ["#56b4e9", "#f0883e", "#2ebd8f", "#cc79a7", "#e6c229", "#9aa0a6"]
        if dark
        else ["#0072b2", "#c8500a", "#00805c", "#a6467b", "#8a6d00", "#5f6670"]
    )
    ramp = ["#1d2530", "#2b5c85", "#56b4e9", "#d6ecfa"] if dark else ["#f3f6f9", "#a9cbe3", "#3b86b8", "#083a5c"]
    text = {"labelColor": soft, "titleColor": soft, "labelFont": FONT, "titleFont": FONT, "titleFontWeight": "normal"}
    return {
        "background": paper,
        "font": FONT,
        "view": {"stroke": None},
        "axis": {
            **text,
            "labelFontSize": 11,
            "titleFontSize": 11.5,
            "gridColor": line,
            "gridOpacity": 0.7,
            "domain": False,
            "ticks": False,
            "labelPadding": 6,
            "titlePadding": 8,
        },
        "header": {**text, "labelColor": ink, "labelFontSize": 12, "labelFontWeight": 600, "labelPadding": 6},
        "legend": {
            **text,
            "labelColor": ink,
            "labelFontSize": 12,
            "symbolOpacity": 1,
            "symbolStrokeWidth": 2.5,
            "orient": "top",
            "titleLimit": 400,
        },
        "title": {"color": ink, "font": FONT},
        "range": {"category": category, "ramp": ramp, "heatmap": ramp},
        "text": {"color": ink, "fontSize": 11.5, "font": FONT},
        "rule": {"color": soft},
        "style": {
            "ghost": {"color": soft},
            "onstrong": {"color": "#0d1216" if dark else "#ffffff"},
            "onweak": {"color": "#f1f4f6" if dark else "#1f2328"},
        },
        "line": {"strokeWidth": 2, "strokeCap": "round", "strokeJoin": "round"},
        "point": {"size": 60, "filled": True},
    }


def models_of(rows: list[Row]) -> list[str]:
    """Models in a fixed order, unknown ones last."""
    present = dict.fromkeys(row.model for row in rows)
    return [*MODELS, *(model for model in present if model not in MODELS)]


def colour(rows: list[Row], *, legend: bool = True) -> alt.Color:
    """The colour of the model, the same in every chart."""
    present = [model for model in models_of(rows) if any(row.model == model for row in rows)]
    shown: Any = alt.Legend(title=None, values=present) if legend and len(present) > 1 else None
    return alt.Color("model:N", scale=alt.Scale(domain=models_of(rows), range="category"), legend=shown)


def slug(name: str) -> str:
    """A name that is safe as a file name and an HTML id.

    >>> slug("../my metric")
    'my-metric'
    """
    return re.sub(r"[^\w-]+", "-", name).strip("-")


def rounded(value: float) -> float | None:
    """Five significant digits: enough for a picture; None where it is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
