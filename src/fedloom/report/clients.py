"""Results of single clients: every method at every client."""

from __future__ import annotations

import math

import altair as alt
import numpy as np

from fedloom.report.figure import Figure, Rows, rounded
from fedloom.report.naming import METRICS, metric, titled
from fedloom.report.numbers import Estimate, Row, run_of, seeds_of
from fedloom.report.reading import Key, Numbers, Run

NAMED = 60
"""Up to so many clients are shown one by one."""
WRITTEN = 8
"""Up to so many clients have their number written into the cell."""


def last_values(run: Run, row: Row, seed: int, name: str) -> tuple[list[int], Numbers]:
    """Benign clients and their finite values at the last recorded round; none of a seed that was lost."""
    points = run.benign(Key(row.method, seed, row.model, "test", name))
    if points is None or not len(points.round) or seed in row.lost:
        return [], np.empty(0)
    known = (points.round == points.round[-1]) & np.isfinite(points.value)
    return points.client[known].tolist(), points.value[known] * metric(name).scale


def row_name(row: Row) -> str:
    """Method, run and model of a row."""
    return f"{row.name} · {row.model}" if row.model else row.name


def honest(runs: list[Run]) -> str:
    """The words on attackers for a chart of clients."""
    return " Clients that attacked are left out." if any(r.attackers for run in runs for r in run.summary.runs) else ""


def client_pictures(runs: list[Run], rows: list[Row], lead: str) -> list[Figure | None]:
    """The charts of this module, None for those without data."""
    return [_single_clients(runs, rows, name) for name in dict.fromkeys((lead, "calibration_error"))]


def _single_clients(runs: list[Run], rows: list[Row], name: str) -> Figure | None:
    """Rows x clients, mean over seeds."""
    if max(run.clients for run in runs) > NAMED:
        return None
    data = [cell for row in rows for cell in _cells(run_of(runs, row), row, name)]
    if not data:
        return None
    order = list(dict.fromkeys(cell["row"] for cell in data))
    few = len({cell["client"] for cell in data}) <= WRITTEN
    values = [cell["value"] for cell in data if cell["value"] is not None]
    middle = (min(values) + max(values)) / 2 if values else 0.0
    higher = metric(name).higher
    base = alt.Chart(alt.NamedData(name="rows")).encode(
        x=alt.X(
            "client:N",
            sort=list(dict.fromkeys(run.client(i) for run in runs for i in range(run.clients))),
            title="Client",
            axis=alt.Axis(labelAngle=0, labelOverlap=True),
            scale=alt.Scale(padding=0.06),
        ),
        y=alt.Y("row:N", sort=order, title=None, axis=alt.Axis(labelLimit=190), scale=alt.Scale(padding=0.06)),
        tooltip=[
            alt.Tooltip("row:N", title="Method"),
            alt.Tooltip("client:N", title="Client"),
            alt.Tooltip("value:Q", title=titled(metric(name))),
            alt.Tooltip("half:Q", title="95 % interval, half width", format=".3~g"),
            alt.Tooltip("seeds:Q", title="Seeds"),
        ],
    )
    color = alt.Color(
        "value:Q",
        title=titled(metric(name)),
        scale=alt.Scale(range="heatmap", reverse=not higher),
        legend=alt.Legend(gradientLength=160, gradientThickness=8),
    )
    heat = base.mark_rect(cornerRadius=2).encode(color=color)
    strong = f"datum.value {'>' if higher else '<'} {middle!r}"
    words = [
        base.mark_text(style=style, fontSize=11.5).transform_filter(test).encode(text="label:N")
        for style, test in (("onstrong", strong), ("onweak", f"!({strong})"))
    ]
    chart = alt.layer(heat, *(words if few else [])).properties(width=640, height=26 * len(order))
    what = metric(name).title
    caption = (
        f"{what} of every client with every method on its own test part at the last round, mean over seeds"
        + (" with half the width of the 95 % interval" if few else "")
        + f"; darker is better (in the dark look: lighter).{honest(runs)}"
    )
    first = metric(name) is not METRICS.get("calibration_error")
    id, tab = ("single-clients", "Client by client") if first else ("single-clients-calibration", what)
    return Figure(id, "clients", tab, f"{what}, client by client", caption, chart, data, {}, "wide")


def _cells(run: Run, row: Row, name: str) -> Rows:
    found: dict[int, dict[int, float]] = {}
    for seed in seeds_of(run, row.method):
        for client, value in zip(*last_values(run, row, seed, name), strict=True):
            found.setdefault(client, {})[seed] = float(value)
    cells: Rows = []
    for client in sorted(found):
        estimate = Estimate(found[client])
        digits = 1 if metric(name).scale == 100 else 3
        half = "" if math.isnan(estimate.half) else f" ± {estimate.half:.{digits}f}"
        cells.append(
            {
                "row": row_name(row),
                "method": row.name,
                "model": row.model,
                "client": run.client(client),
                "value": rounded(estimate.mean),
                "half": rounded(estimate.half),
                "seeds": len(estimate.finite),
                "label": f"{estimate.mean:.{digits}f}{half}",
                "label_narrow": f"{estimate.mean:.{max(1, digits - 1)}f}",
            }
        )
    return cells
