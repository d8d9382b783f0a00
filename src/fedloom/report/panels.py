"""Small multiples of lines: a panel per method or client, everything else in grey behind it."""

from __future__ import annotations

from typing import Any, NamedTuple

import altair as alt

from fedloom.report.figure import Rows

NUMBERS = "abs(datum.value) >= 1000 ? format(datum.value, '~s') : format(datum.value, '.3~g')"
"""Ticks in a common form: 0.5, 20, 1.5k, 3M."""
FEW = 8
"""Of more panels the lines behind them are thinned and paler."""


class Axis(NamedTuple):
    """An axis of all panels."""

    title: str
    log: bool = False
    domain: tuple[float, float] | None = None
    percent: bool = False
    whole: bool = False


def line_panels(
    data: Rows, field: str, x: Axis, y: Axis, tint: alt.Color, hints: list[alt.Tooltip], *, marks: bool = False
) -> tuple[Any, dict[str, Rows]]:
    """A chart of the data sets ``rows`` and ``ghosts``, and the second of them.

    Args:
        data: points with ``x``, ``mean``, ``low``, ``high``, ``method``, ``model`` and the field.
        field: a panel for each of its values, in the order of the data.
        x: what is across.
        y: what is up.
        tint: colour of the lines.
        hints: what a point tells.
        marks: draw the points, for lines of few.
    """
    panels = list(dict.fromkeys(point[field] for point in data))
    across = alt.X(
        "x:Q",
        title=None,
        axis=alt.Axis(
            tickCount=3,
            grid=False,
            labelOverlap=True,
            tickMinStep=_step(x),
            labelExpr="format(datum.value, '.0%')" if x.percent else NUMBERS,
        ),
        scale=alt.Scale(nice=False, padding=7) if x.percent else alt.Undefined,
    )
    kind = alt.Scale(type="log") if y.log else alt.Scale(zero=False)
    if y.domain:
        kind = alt.Scale(domain=list(y.domain), nice=False)
    form = "format(datum.value, '.0e')" if y.log else NUMBERS
    up = alt.Y(
        "mean:Q",
        title=y.title,
        scale=kind,
        axis=alt.Axis(tickCount=4, labelExpr=form, labelOverlap=True, tickMinStep=_step(y)),
    )
    ghost = alt.Chart(alt.NamedData(name="ghosts")).mark_line(
        strokeWidth=0.8, opacity=0.45 if len(panels) <= FEW else 0.2, clip=True, style="ghost", tooltip=None
    )
    band = alt.Chart().mark_area(opacity=0.16, clip=True, tooltip=None)
    line = alt.Chart().mark_line(clip=True)
    dots = alt.Chart().mark_point(size=45, opacity=1 if marks else 0, clip=True)
    ghosts = _ghosts(data, field, len(panels))
    chart: Any = alt.layer(
        *([ghost.encode(x=across, y=up, detail="line:N")] if ghosts else []),
        band.encode(x=across, y=alt.Y("low:Q", scale=kind), y2="high:Q", color=tint, detail="model:N"),
        line.encode(x=across, y=up, color=tint),
        dots.encode(x=across, y=up, color=tint, tooltip=hints),
        data=alt.NamedData(name="rows"),
    )
    return facets(chart, field, panels, x.title), {"ghosts": ghosts}


def _step(axis: Axis) -> Any:
    return 1 if axis.whole else alt.Undefined


def facets(chart: Any, field: str, panels: list[str], below: str | None, *, high: int = 120) -> Any:
    """A panel for each value of a field, with its own axis across and one title below them all."""
    header = alt.Header(
        labelAnchor="start",
        labelLimit=180,
        titleOrient="bottom",
        titleFontWeight="normal",
        titleFontSize=11.5,
        titlePadding=4,
    )
    return (
        chart.properties(width=200, height=high)
        .facet(
            facet=alt.Facet(f"{field}:N", sort=panels, title=below, header=header),
            columns=4,
            spacing={"column": 24, "row": 16},
        )
        .resolve_axis(x="independent")
    )


def _ghosts(data: Rows, field: str, panels: int) -> Rows:
    """All lines, thinned where there are many panels; nothing where there is one."""
    if panels < 2:
        return []
    lines: dict[str, Rows] = {}
    for point in data:
        lines.setdefault(f"{point[field]}|{point['model']}", []).append(point)
    thin = 1 if panels <= FEW else 4
    return [
        {"line": name, "x": point["x"], "mean": point["mean"]}
        for name, points in lines.items()
        for point in [*points[:-1:thin], points[-1]]
    ]
