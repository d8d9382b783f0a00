"""Picture of a paper's table, for light and dark backgrounds.

Our values are drawn with confidence intervals, and the paper's values as markers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedloom.lab.report import kit, look
from fedloom_studies.reproduce.cells import TableCell
from fedloom_studies.reproduce.figures import get_unit

LINE_CHARACTERS = 24
"""Maximum number of characters per line in the name of a row."""


def drawable_cells(cells: Sequence[TableCell]) -> list[TableCell]:
    """Return the cells that can be drawn. The result is empty if no cell was run."""
    return [c for c in cells if c.n and math.isfinite(c.mean)]


def legend_svg(cells: Sequence[TableCell]) -> str:
    """Return the legend for the marks that are drawn."""
    marks = [("dot", "ours", True),
             ("line", "its 95 % interval", any(math.isfinite(c.half) for c in cells)),
             ("diamond", "the paper's", any(c.paper is not None for c in cells))]  # fmt: skip
    return ", ".join(f"{mark}: {meaning}" for mark, meaning, is_drawn in marks if is_drawn)


def alternative_text(title: str, cells: Sequence[TableCell]) -> str:
    """Return the alternative text of the figure."""
    beside = " next to the paper's" if any(c.paper is not None for c in drawable_cells(cells)) else ""
    return f"Our results{beside}, by table column: {title}."


def draw_table(cells: Sequence[TableCell]) -> str:
    """Draw a table as SVG, with one panel for each variant and one row for each column.

    Return "" if none of the cells was run.
    """
    drawn = drawable_cells(cells)
    if not drawn:
        return ""
    rows: kit.Rows = []
    for c in drawn:
        of = get_unit(c.figure)
        low, high = (of.scale * (c.mean + side * c.half) if math.isfinite(c.half) else None for side in (-1, 1))
        panel = f"{c.variant} ({of.name})" if of.name else c.variant
        paper = None if c.paper is None else of.scale * c.paper
        rows.append({"variant": panel, "column": c.column, "value": of.scale * c.mean, "low": low, "high": high,
                     "paper": paper})  # fmt: skip
    y, lines = kit.name_lines("column", [c.column for c in drawn], LINE_CHARACTERS)
    names = look.LETTER_WIDTH * min(LINE_CHARACTERS, max(len(c.column) for c in drawn))
    x = kit.number("value", axis={"tickCount": 3})
    paper_points = kit.mark_layer("point", {"y": y, "x": {**x, "field": "paper"}}, shape="diamond", size=52,
                     color=look.ORANGE_COLOR, filled=False, strokeWidth=2, opacity=1)  # fmt: skip
    inner = kit.layer_chart(
        *kit.interval_layers({"y": y, "color": {"value": look.BLUE_COLOR}}, x, size=42), paper_points
    )
    panels = list(dict.fromkeys(row["variant"] for row in rows))
    spec = kit.facet_panels(inner, "variant", panels, None, high=0)
    spec["facet"]["header"] |= {"labelLimit": look.PHONE_WIDTH - 10, "labelAnchor": "start"}
    spec["spec"] |= {"width": round(look.PHONE_WIDTH - names - 30), "height": {"step": 4 + 13 * lines}}
    spec |= {"columns": 1, "spacing": 14, "datasets": {"rows": rows}, "title": {"text": legend_svg(drawn)}}
    spec["resolve"] = {"scale": {"x": "independent", "y": "independent"}}
    return look.svg_for_pages(spec)
