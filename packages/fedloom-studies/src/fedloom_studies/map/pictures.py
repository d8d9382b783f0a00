"""Pictures of the map in SVG, in colors that are readable on light and dark backgrounds."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from fedloom.formats import round_significant
from fedloom.lab.report import kit, look
from fedloom_studies.map.judge import Groups, SetupVerdict
from fedloom_studies.map.records import DONE_STATUS, FAILED_STATUS, NOT_APPLICABLE_STATUS, NOT_RUN_STATUS

ROW_PIXELS, BAR_PIXELS = 16, 8
"""Height of a row, and width of a bar next to the rows, in pixels."""
MAX_COLORED_GAIN = 0.1
"""Gain of the cells with the strongest color in the picture."""
STATUS_SIGNS = {NOT_RUN_STATUS: "·", NOT_APPLICABLE_STATUS: "\N{EN DASH}", FAILED_STATUS: "\N{MULTIPLICATION SIGN}"}
"""Symbols shown in cells that have no gain, keyed by status."""


def draw_overview(verdicts: Sequence[SetupVerdict], methods: Sequence[str]) -> str:
    """Draw each method's gain over the baseline in each setup as a color. Inconclusive gains are pale.

    A triangle that points up or down also marks better or worse methods.
    """
    cells = []
    for j in verdicts:
        for method in methods:
            record, standing = j.records.get(method), j.find(method)
            gain = round_significant(100 * standing.gain.mean) if standing and standing.gain else None
            gain = 0.0 if method == j.reference else gain
            status = record.status if record else NOT_RUN_STATUS
            sign = STATUS_SIGNS.get(status, "") if status != DONE_STATUS else ""
            way = (
                "triangle-up"
                if standing and standing.better
                else "triangle-down"
                if standing and standing.worse
                else ""
            )
            cells.append({"setup": j.setup.title, "method": method, "gain": gain, "sign": sign, "way": way,
                          "clear": 1.0 if way else 0.3})  # fmt: skip
    y = kit.nominal_channel("method", methods, axis={"labelOverlap": False})
    whole = {"labelOverlap": False, "labelLimit": 0}
    x = kit.nominal_channel(
        "setup", [j.setup.title for j in verdicts], axis={"orient": "top", "labelAngle": -90} | whole
    )
    limit = 100 * MAX_COLORED_GAIN
    colour = kit.intensity_channel("gain", "points over the better of local and FedAvg") | {
        "scale": {
            "domain": [-limit, 0, limit],
            "range": [look.ORANGE_COLOR, look.GREY_COLOR, look.BLUE_COLOR],
            "clamp": True,
            "interpolate": "rgb",
        }
    }
    opacity = {"field": "clear", "type": "quantitative", "scale": None}
    spec = kit.layer_chart(
        kit.mark_layer(
            "rect", {"x": x, "y": y, "color": colour, "opacity": opacity}, {"filter": "isValid(datum.gain)"}
        ),
        kit.mark_layer(
            "point",
            {"x": x, "y": y, "shape": {"field": "way", "type": "nominal", "scale": None}},
            {"filter": "datum.way"},
            filled=True,
            color="white",
            size=24,
            opacity=1,
        ),
        kit.mark_layer("text", {"x": x, "y": y, "text": {"field": "sign"}}, color=look.GREY_COLOR),
    )
    room = look.PHONE_WIDTH - look.LETTER_WIDTH * max(map(len, methods)) - 8
    steps = {"width": {"step": int(room / max(1, len(verdicts)))}, "height": {"step": ROW_PIXELS}}
    return look.svg_for_pages({**spec, **steps, "datasets": {"rows": cells}})


def draw_ladder(
    names: Sequence[str],
    values: Sequence[float],
    halves: Sequence[float],
    title: str,
    *,
    groups: Groups | None = None,
    full: Collection[str] | None = None,
) -> str:
    """Draw one row for each method, with its value and interval.

    Args:
        names: names of the methods, best first.
        values: value of each method.
        halves: half-width of each value's interval. NaN if there is no interval.
        title: title shown for the values.
        groups: groups of methods that a test does not distinguish. Each group is drawn as a bar next to its rows.
        full: methods to draw as filled circles. All other methods are drawn as empty circles. If None, all circles are
            filled.
    """
    rows = [
        {
            "method": name,
            "value": round_significant(value),
            "low": round_significant(value - half),
            "high": round_significant(value + half),
            "full": float(full is None or name in full),
        }
        for name, value, half in zip(names, values, halves, strict=True)
        if math.isfinite(value)
    ]
    y = kit.nominal_channel("method", names, axis={"labelOverlap": False})
    x = kit.number("value", title, axis={"tickCount": 4})
    filled = {"field": "full", "type": "quantitative", "scale": None}
    layers = kit.interval_layers({"y": y, "color": {"value": look.BLUE_COLOR}}, x, fill=look.BLUE_COLOR, size=42)
    layers[1]["encoding"]["fillOpacity"] = filled
    bars = [{"group": k, "method": names[a], "last": names[b]} for k, (a, b) in enumerate(groups or ()) if b > a]
    beside = BAR_PIXELS * len(bars) + 6 if bars else 0
    width = round(look.PHONE_WIDTH - look.LETTER_WIDTH * max(map(len, names)) - 14 - beside)
    points = {**kit.layer_chart(*layers), "width": width, "height": {"step": ROW_PIXELS}}
    if not bars:
        return look.svg_for_pages({**points, "datasets": {"rows": rows}})
    place = {"field": "group", "type": "ordinal", "axis": None}
    bar = kit.mark_layer(
        "rule", {"x": place, "y": {**y, "axis": None, "scale": {"domain": [*names]}}, "y2": {"field": "last"}},
        data="bars", color=look.ORANGE_COLOR, strokeWidth=3, strokeCap="round",
    )  # fmt: skip
    sized = {**bar, "width": {"step": BAR_PIXELS}, "height": {"step": ROW_PIXELS}}
    both = {"hconcat": [points, sized], "spacing": 6, "datasets": {"rows": rows, "bars": bars}}
    return look.svg_for_pages(both)
