"""One figure per table: ours with intervals, the paper's values as marks, in colours for a light and a dark ground."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import vl_convert

from fedloom_studies.reproduce.cells import Cell
from fedloom_studies.reproduce.figures import unit

INK, OURS, PAPER = "#808690", "#3b82f6", "#e0730d"
"""Colours of lines, of ours and of the paper's: each at least 3 to 1 on white and on the dark ground."""
WORDS, WORDS_DARK = "#57606a", "#b1bac4"
"""Colours of words on a light and on a dark ground: each at least 4.5 to 1."""
LOOK = f"<style>text{{fill:{WORDS}}}@media(prefers-color-scheme:dark){{text{{fill:{WORDS_DARK}}}}}</style>"
"""Goes before what Vega-Lite says of a text."""
WIDTH, STEP = 420, 13
SPARE = re.compile(r' (?:role|pointer-events|aria-[a-z]+)="[^"]*"')
"""Attributes of an SVG that an image on a page does not need."""


def charted(cells: Sequence[Cell]) -> list[Cell]:
    """The cells that a chart has; none where nothing was run."""
    return [c for c in cells if c.n and math.isfinite(c.mean)]


def legend(cells: Sequence[Cell]) -> str:
    """What the marks are, of those that are drawn."""
    marks = [("dot", "ours", True),
             ("line", "its 95 % interval", any(math.isfinite(c.half) for c in cells)),
             ("diamond", "the paper's", any(c.paper is not None for c in cells))]  # fmt: skip
    return ", ".join(f"{mark}: {meaning}" for mark, meaning, there in marks if there)


def alt(title: str, cells: Sequence[Cell]) -> str:
    """The figure in a sentence."""
    beside = " beside the paper's" if any(c.paper is not None for c in charted(cells)) else ""
    return f"Our results{beside}, a row per column of the table: {title}."


def chart(cells: Sequence[Cell]) -> str:
    """An SVG of a table: a panel per variant, a row per column; empty where nothing was run."""
    known = charted(cells)
    if not known:
        return ""
    rows = []
    for c in known:
        of = unit(c.figure)
        low, high = (of.scale * (c.mean + side * c.half) if math.isfinite(c.half) else None for side in (-1, 1))
        panel = f"{c.variant} ({of.name})" if of.name else c.variant
        paper = None if c.paper is None else of.scale * c.paper
        rows.append({"variant": panel, "column": c.column, "ours": of.scale * c.mean, "low": low, "high": high,
                     "paper": paper})  # fmt: skip
    y = {"field": "column", "type": "nominal", "sort": None, "title": None}

    def x(name: str) -> dict[str, object]:
        axis = {"tickCount": 6, "labelOverlap": True}
        return {"field": name, "type": "quantitative", "title": None, "scale": {"zero": False}, "axis": axis}

    layers = [
        {
            "mark": {"type": "rule", "color": OURS, "strokeWidth": 2},
            "encoding": {"y": y, "x": x("low"), "x2": {"field": "high"}},
        },
        {"mark": {"type": "point", "filled": True, "size": 42, "color": OURS}, "encoding": {"y": y, "x": x("ours")}},
        {
            "mark": {"type": "point", "shape": "diamond", "size": 52, "color": PAPER, "strokeWidth": 2},
            "encoding": {"y": y, "x": x("paper")},
        },
    ]
    spec = {
        "data": {"values": rows},
        "title": {"text": legend(known), "anchor": "start", "fontWeight": "normal", "fontSize": 11},
        "facet": {"row": {"field": "variant", "type": "nominal", "sort": None, "title": None,
                          "header": {"labelAngle": 0, "labelAlign": "left", "labelOrient": "top",
                                     "labelFontWeight": "bold"}}},
        "spec": {"width": WIDTH, "height": {"step": STEP}, "layer": layers},
        "resolve": {"scale": {"x": "independent", "y": "independent"}},
        "spacing": 8,
    }  # fmt: skip
    return drawn(spec)


def drawn(spec: dict[str, Any]) -> str:
    """A chart of Vega-Lite as an SVG without a ground of its own, for pages of both looks."""
    look = {
        "background": "transparent",
        "config": {
            "font": "sans-serif",
            "aria": False,
            "view": {"stroke": None},
            "title": {"color": INK},
            "header": {"labelColor": INK},
            "legend": {"labelColor": INK, "titleColor": INK, "titleFontWeight": "normal", "titleLimit": 400},
            "axis": {"labelColor": INK, "domainColor": INK, "tickColor": INK, "gridColor": INK, "gridOpacity": 0.25,
                     "labelLimit": 260, "titleColor": INK, "titleFontWeight": "normal"},
        },
    }  # fmt: skip
    made = SPARE.sub("", str(vl_convert.vegalite_to_svg({**spec, **look})))
    return made.replace(">", f">{LOOK}", 1) + "\n"
