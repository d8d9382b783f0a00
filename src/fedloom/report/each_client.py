"""Small multiples of clients: how every method does at each of them, round by round."""

from __future__ import annotations

import math
from typing import Any

import altair as alt
import numpy as np

from fedloom.report.clients import honest, row_name
from fedloom.report.figure import Figure, Rows, colour, rounded
from fedloom.report.naming import metric, titled
from fedloom.report.numbers import Row, run_of, seeds_of
from fedloom.report.panels import NUMBERS, facets
from fedloom.report.reading import Key, Numbers, Run

PANELS = 16
"""Up to so many clients are drawn."""
POINTS = 2500
"""Up to so many points in all; lines are thinned, but not below `FEWEST` points."""
FEWEST = 5


def each_client_picture(runs: list[Run], rows: list[Row], lead: str) -> Figure | None:
    """A panel per client with a line per row, mean over seeds; the best row of all is thick."""
    known = [row for row in rows if lead in row.figures and math.isfinite(row.figures[lead].mean)]
    lines = {row_name(row): _lines(run_of(runs, row), row, lead) for row in known}
    lines = {name: found for name, found in lines.items() if found}
    if not lines:
        return None
    sign = 1 if metric(lead).higher else -1
    best = max((row for row in known if row_name(row) in lines), key=lambda row: sign * row.figures[lead].mean)
    last = {client: values[-1][1] for client, values in lines[row_name(best)].items()}
    clients = _chosen(last, sign)
    budget = max(FEWEST, POINTS // (len(lines) * len(clients)))
    data: Rows = []
    for row in known:
        for client in clients:
            values = lines.get(row_name(row), {}).get(client, [])
            kept = np.unique(np.linspace(0, len(values) - 1, min(budget, len(values))).round().astype(int))
            tags = {"client": _title(client), "row": row_name(row), "model": row.model}
            data += [{**tags, "round": int(values[k][0]), "value": rounded(values[k][1])} for k in kept]
    if len({point["round"] for point in data}) < 2:
        return None
    some = (
        f" {len(clients)} of {len(last)} clients, from the worst to the best of it." if len(clients) < len(last) else ""
    )
    caption = (
        f"{metric(lead).title} of each client on its own test part, a line per method and model, mean over seeds. "
        f"Thick: {row_name(best)}, the best mean over all clients.{some}{honest(runs)}"
    )
    chart = _draw([_title(client) for client in clients], rows, lead, row_name(best))
    title = f"{metric(lead).title} of each client over rounds"
    return Figure("each-client", "clients", "Over rounds", title, caption, chart, data, {}, "facet")


def _title(client: str) -> str:
    return f"Client {client}" if client.isdigit() else client


def _lines(run: Run, row: Row, name: str) -> dict[str, list[tuple[int, float]]]:
    """Rounds and means over seeds by client; attackers are left out."""
    found: dict[tuple[int, int], list[float]] = {}
    for seed in seeds_of(run, row.method):
        points = run.benign(Key(row.method, seed, row.model, "test", name))
        if points is None or seed in row.lost:
            continue
        finite = np.isfinite(points.value)
        columns = (points.client[finite].tolist(), points.round[finite].tolist(), points.value[finite].tolist())
        for client, t, value in zip(*columns, strict=True):
            found.setdefault((client, t), []).append(value * metric(name).scale)
    lines: dict[str, list[tuple[int, float]]] = {}
    for (client, t), values in sorted(found.items()):
        lines.setdefault(run.client(client), []).append((t, sum(values) / len(values)))
    return lines


def _chosen(last: dict[str, float], sign: int) -> list[str]:
    """All clients in their order; of many, some spread evenly from the worst to the best."""
    if len(last) <= PANELS:
        return list(last)
    order = sorted(last, key=lambda client: sign * last[client])
    places: Numbers = np.linspace(0, len(order) - 1, PANELS)
    return [order[int(k)] for k in places.round()]


def _draw(panels: list[str], rows: list[Row], lead: str, best: str) -> Any:
    x = alt.X("round:Q", title=None, axis=alt.Axis(tickCount=3, grid=False, labelExpr=NUMBERS, labelOverlap=True))
    y = alt.Y("value:Q", title=titled(metric(lead)), scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=4))
    tint = colour(rows)
    hints = [
        alt.Tooltip("client:N", title="Client"),
        alt.Tooltip("row:N", title="Method"),
        alt.Tooltip("round:Q", title="Round"),
        alt.Tooltip("value:Q", title=titled(metric(lead)), format=".4~g"),
    ]
    base = alt.Chart().encode(x=x, y=y, color=tint, detail="row:N")
    chart = alt.layer(
        base.mark_line(strokeWidth=1, opacity=0.45, tooltip=None),
        base.mark_line(strokeWidth=2.6, tooltip=None).transform_filter(alt.datum.row == best),
        base.mark_point(size=40, opacity=0).encode(tooltip=hints),
        data=alt.NamedData(name="rows"),
    )
    return facets(chart, "client", panels, "Round")
