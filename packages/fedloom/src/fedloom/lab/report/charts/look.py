"""Rendering of charts: the colors and fonts of a light and a dark theme, and conversion to SVG and notebook charts."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedloom.errors import ConfigError

if TYPE_CHECKING:
    import altair as alt

Spec = dict[str, Any]

PAGE_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
FILE_FONT = f"'DejaVu Sans', Verdana, {PAGE_FONT}"
"""Fonts for charts that are written to files. Text widths are computed during rendering, so the first font must be at
least as wide as every other common font."""
BLUE_COLOR, ORANGE_COLOR, GREY_COLOR = "#3b82f6", "#e0730d", "#808690"
"""Colors with a contrast ratio of at least 3:1 on both light and dark backgrounds."""
INK_COLORS = ("#57606a", "#b1bac4")
"""Text colors for light and dark backgrounds, each with a contrast ratio of at least 4.5:1."""
_BY_READER = (
    f"<style>text{{fill:{INK_COLORS[0]}}}@media(prefers-color-scheme:dark){{text{{fill:{INK_COLORS[1]}}}}}</style>"
)
"""Style element that overrides the text color that Vega-Lite writes."""
_UNUSED_ATTRIBUTE_PATTERN = re.compile(r' (?:role|pointer-events|aria-[a-z]+)="[^"]*"')
"""Pattern of SVG attributes that an image on a page does not need."""
PHONE_WIDTH = 364
"""Width in pixels of an image that a 390-pixel phone screen shows without shrinking its text."""
LETTER_WIDTH = 7.0
"""Mean width in pixels of a character in a label."""

NON_XML_PATTERN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Pattern of characters that XML 1.0 documents must not contain."""


def _replace_invalid_xml(value: object) -> Any:
    """Return a copy of a value with every character that XML does not allow replaced with U+FFFD.

    Such a character would make the rendering library abort the process.
    """
    if isinstance(value, str):
        return NON_XML_PATTERN.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_replace_invalid_xml(key): _replace_invalid_xml(inner) for key, inner in value.items()}
    return [_replace_invalid_xml(inner) for inner in value] if isinstance(value, list | tuple) else value


def chart_theme(*, dark: bool, font: str = PAGE_FONT) -> Spec:
    """Return the Vega-Lite configuration of the light or the dark theme.

    The first three colors are the blue, vermilion and green of Okabe and Ito's palette, which are lighter in the dark
    theme.
    """
    ink, soft, line, paper = (
        ("#e8e6e1", "#a3a19b", "#3a3b3f", "#17181b") if dark else ("#1f2328", "#5f6670", "#dcdfe3", "#ffffff")
    )
    category = (
        ["#56b4e9", "#f0883e", "#2ebd8f", "#cc79a7", "#e6c229", "#9aa0a6"]
        if dark
        else ["#0072b2", "#c8500a", "#00805c", "#a6467b", "#8a6d00", "#5f6670"]
    )
    ramp = ["#1d2530", "#2b5c85", "#56b4e9", "#d6ecfa"] if dark else ["#f3f6f9", "#a9cbe3", "#3b86b8", "#083a5c"]
    text = {"labelColor": soft, "titleColor": soft, "labelFont": font, "titleFont": font, "titleFontWeight": "normal"}
    axis = {"labelFontSize": 11, "titleFontSize": 11.5, "gridColor": line, "gridOpacity": 0.7, "domain": False}
    legend = {"labelColor": ink, "labelFontSize": 12, "symbolOpacity": 1, "symbolStrokeWidth": 2.5, "orient": "top"}
    return {
        "background": paper,
        "font": font,
        "view": {"stroke": None},
        "axis": {**text, **axis, "ticks": False, "labelPadding": 6, "titlePadding": 8},
        "header": {**text, "labelColor": ink, "labelFontSize": 12, "labelFontWeight": 600, "labelPadding": 6},
        "legend": {**text, **legend, "titleLimit": 400},
        "title": {"color": ink, "font": font},
        "range": {"category": category, "ramp": ramp, "heatmap": ramp},
        "text": {"color": ink, "fontSize": 11.5, "font": font},
        "rule": {"color": soft},
        "style": {
            "ghost": {"color": soft},
            "plain": {"color": "#7d8794", "opacity": 0.8},
            "onstrong": {"color": "#0d1216" if dark else "#ffffff"},
            "onweak": {"color": "#f1f4f6" if dark else "#1f2328"},
        },
        "line": {"strokeWidth": 2, "strokeCap": "round", "strokeJoin": "round"},
        "point": {"size": 60, "filled": True},
    }


def render_svg(spec: Spec, *, dark: bool = False) -> str:
    """Render a chart as SVG in the light or the dark theme, on the background of that theme."""
    return _convert_to_svg({**spec, "config": chart_theme(dark=dark, font=FILE_FONT)})


def svg_for_pages(spec: Spec) -> str:
    """Render a chart as SVG without a background, for light and dark pages.

    The text color follows the reader's color scheme.
    """
    common = chart_theme(dark=False, font=FILE_FONT)
    for part in ("axis", "header", "legend"):
        common[part] = {**common[part], "labelColor": GREY_COLOR, "titleColor": GREY_COLOR}
    config: Spec = {
        **common,
        "aria": False,
        "background": "transparent",
        "axis": {
            **common["axis"],
            "gridColor": GREY_COLOR,
            "gridOpacity": 0.25,
            "labelFontSize": 12,
            "titleFontSize": 12,
        },
        "title": {"color": GREY_COLOR, "font": FILE_FONT, "fontWeight": "normal", "fontSize": 12, "anchor": "start"},
        "range": {"category": [BLUE_COLOR, ORANGE_COLOR, GREY_COLOR]},
        "style": {**common["style"], "plain": {"color": GREY_COLOR}, "ghost": {"color": GREY_COLOR}},
        "text": {"color": GREY_COLOR, "font": FILE_FONT, "fontSize": 12},
    }
    text = _UNUSED_ATTRIBUTE_PATTERN.sub("", _convert_to_svg({**spec, "config": config}))
    return text.replace(">", f">{_BY_READER}", 1) + "\n"


def make_notebook_chart(spec: Spec) -> alt.Chart | alt.LayerChart | alt.FacetChart | alt.VConcatChart:
    """Build an Altair chart for a notebook.

    Users can modify it with Altair. If the notebook includes Vega-Lite, the chart uses the notebook's theme. Otherwise,
    an SVG is shown. Nothing is downloaded.
    """
    altair = import_charts("altair")

    chart: alt.Chart | alt.LayerChart | alt.FacetChart | alt.VConcatChart = altair.Chart.from_dict(spec)
    vega = f"application/vnd.vegalite.{altair.SCHEMA_VERSION.partition('.')[0]}+json"

    def bundle(shown: Any, *_: Any, **__: Any) -> Spec:
        """Return the chart in all formats that a notebook supports, richest format first."""
        drawn = shown.to_dict()
        return {vega: drawn, "image/svg+xml": render_svg(drawn), "text/plain": repr(shown)}

    kind = type(chart)
    shown_by = type(kind.__name__, (kind,), {"_repr_mimebundle_": bundle, "__module__": kind.__module__})
    object.__setattr__(chart, "__class__", shown_by)  # Altair would add a plain assignment to the chart
    return chart


def _convert_to_svg(spec: Spec) -> str:
    text: str = import_charts("vl_convert").vegalite_to_svg(_replace_invalid_xml(spec))
    return text


def can_draw() -> bool:
    """Return True if the packages in the ``charts`` extra are installed."""
    return all(find_spec(name) is not None for name in ("altair", "vl_convert"))


def import_charts(name: str) -> Any:
    """Import and return a package from the ``charts`` extra. The import is slow.

    Raises:
        ConfigError: the ``charts`` extra is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"charts need {name}: pip install 'fedloom[charts]'") from error
