"""The pictures of the map as SVG, in colours that can be read on a light and on a dark ground."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from fedloom.report import Spec, mark, rounded
from fedloom_studies.map.judge import Groups, Judged
from fedloom_studies.map.records import DONE, FAILED, NOT_APPLICABLE, NOT_RUN
from fedloom_studies.reproduce.charts import INK, OURS, PAPER, drawn

CLIP = 0.1
"""Gains beyond this have the fullest colour."""
SIGNS = {NOT_RUN: "·", NOT_APPLICABLE: "\N{EN DASH}", FAILED: "\N{MULTIPLICATION SIGN}"}
"""In cells without a gain."""


def overview(judged: Sequence[Judged], methods: Sequence[str]) -> str:
    """Methods x setups: the colour is the gain over the better of local and FedAvg, pale where not significant."""
    cells = []
    for j in judged:
        for method in methods:
            record, standing = j.records.get(method), j.of(method)
            gain = rounded(100 * standing.gain.mean) if standing and standing.gain else None
            gain = 0.0 if method == j.reference else gain
            status = record.status if record else NOT_RUN
            sign = SIGNS.get(status, "") if status != DONE else ""
            cells.append({"setup": j.setup.name, "method": method, "gain": gain, "sign": sign,
                          "clear": 1.0 if standing and (standing.better or standing.worse) else 0.3})  # fmt: skip
    y = _names("method", methods)
    x = _names("setup", [j.setup.name for j in judged], orient="top", labelAngle=-45)
    limit = 100 * CLIP
    colour = {
        "field": "gain", "type": "quantitative", "title": "points over the better of local and FedAvg",
        "scale": {"domain": [-limit, 0, limit], "range": [PAPER, INK, OURS], "clamp": True, "interpolate": "rgb"},
        "legend": {"orient": "top", "gradientLength": 240},
    }  # fmt: skip
    opacity = {"field": "clear", "type": "quantitative", "scale": None}
    valid = {"filter": "isValid(datum.gain)"}
    layers = [
        mark("rect", {"x": x, "y": y, "color": colour, "opacity": opacity}, valid),
        mark("text", {"x": x, "y": y, "text": {"field": "sign"}}, color=INK),
    ]
    return drawn({"data": {"values": cells}, "width": {"step": 34}, "height": {"step": 15}, "layer": layers})


def ladder(
    names: Sequence[str],
    values: Sequence[float],
    halves: Sequence[float],
    title: str,
    *,
    groups: Groups | None = None,
    level: Collection[str] | None = None,
) -> str:
    """A row per method with its value and interval, and which methods are level.

    Args:
        names: of the methods, the best first.
        values: of each.
        halves: half of the interval of each; nan where there is none.
        title: of the values.
        groups: of methods that are level, each drawn as a bar beside its rows.
        level: methods that are level with the first one, drawn as full circles, the others as empty ones.
    """
    rows = [
        {
            "method": name,
            "value": rounded(value),
            "low": rounded(value - half),
            "high": rounded(value + half),
            "full": float(level is None or name in level),
        }
        for name, value, half in zip(names, values, halves, strict=True)
        if math.isfinite(value)
    ]
    bars = [{"group": k, "method": names[a], "last": names[b]} for k, (a, b) in enumerate(groups or ()) if b > a]
    y = _names("method", names)
    x = {"field": "value", "type": "quantitative", "title": title, "scale": {"zero": False}, "axis": {"tickCount": 6}}
    known = {"filter": "isValid(datum.low)"}
    points = {"width": 360, "height": {"step": 13}, "data": {"values": rows}, "layer": [
        mark("rule", {"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}}, known, color=OURS, strokeWidth=2),
        mark("point", {"y": y, "x": x, "fillOpacity": {"field": "full", "type": "quantitative", "scale": None}},
             fill=OURS, stroke=OURS, strokeWidth=1.5, size=42),
    ]}  # fmt: skip
    if not bars:
        return drawn(points)
    place = {"field": "group", "type": "ordinal", "axis": None}
    beside = {"width": {"step": 8}, "height": {"step": 13}, "data": {"values": bars}, **mark(
        "rule", {"x": place, "y": {**y, "axis": None, "scale": {"domain": [*names]}}, "y2": {"field": "last"}},
        color=PAPER, strokeWidth=3, strokeCap="round",
    )}  # fmt: skip
    return drawn({"hconcat": [points, beside], "spacing": 6})


def _names(field: str, order: Sequence[str], **axis: Any) -> Spec:
    return {"field": field, "type": "nominal", "sort": [*order], "title": None, "axis": {"grid": False, **axis}}
