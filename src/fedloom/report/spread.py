"""How clients differ: their results, and what they gain over a baseline."""

from __future__ import annotations

import json
from typing import Any

import altair as alt
import numpy as np

from fedloom.report.clients import honest, last_values, row_name
from fedloom.report.figure import Figure, Rows, colour, rounded
from fedloom.report.naming import metric, titled
from fedloom.report.numbers import Row, run_of, seeds_of
from fedloom.report.reading import Numbers, Run

DOTS = 400
"""Up to so many clients (times seeds) are drawn one by one."""
BASELINES = ("fedavg", "local")
"""The first of these algorithms that was run is the baseline of relative accuracies (FedSLR, Fig. 3: FedAvg)."""
STEPS = 41
"""Points of a violin's outline."""


def spread_picture(runs: list[Run], rows: list[Row], name: str) -> Figure | None:
    """Quantiles over the clients of every row, and every client where they are few."""
    boxes: Rows = []
    dots: Rows = []
    for row in rows:
        run = run_of(runs, row)
        pooled = [(seed, *last_values(run, row, seed, name)) for seed in seeds_of(run, row.method)]
        values = np.concatenate([found for _, _, found in pooled]) if pooled else np.empty(0)
        if not len(values):
            continue
        tags = {"row": row_name(row), "method": row.name, "model": row.model}
        cuts = np.quantile(values, [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1])
        names = ("minimum", "p10", "p25", "median", "p75", "p90", "maximum")
        boxes.append(
            {**tags, **{n: rounded(float(c)) for n, c in zip(names, cuts, strict=True)}, "values": len(values)}
        )
        if len(values) <= DOTS:
            for seed, clients, found in pooled:
                dots += [
                    {
                        "row": tags["row"],
                        "model": row.model,
                        "seed": seed,
                        "client": run.client(c),
                        "value": rounded(float(v)),
                    }
                    for c, v in zip(clients, found, strict=True)
                ]
    if not boxes:
        return None
    boxes.sort(key=lambda box: -box["median"] if metric(name).higher else box["median"])
    y = alt.Y("row:N", sort=[box["row"] for box in boxes], title=None, axis=alt.Axis(labelLimit=190, grid=False))
    scale = alt.Scale(zero=False)
    tint = colour(rows)
    hints = [
        alt.Tooltip("row:N", title="Method"),
        *(alt.Tooltip(f"{n}:Q", format=".4~g") for n in ("p10", "p25", "median", "p75", "p90")),
    ]
    base = alt.Chart(alt.NamedData(name="rows"))
    low = alt.X("p10:Q", scale=scale, title=titled(metric(name)), axis=alt.Axis(tickCount=6))
    every = (
        alt.Chart(alt.NamedData(name="dots"))
        .mark_point(size=22, opacity=0.3, yOffset=8)
        .encode(x=alt.X("value:Q", scale=scale), y=y, color=tint, tooltip=["row:N", "client:N", "seed:Q", "value:Q"])
    )
    chart = alt.layer(
        *([every] if dots else []),
        base.mark_rule(strokeWidth=1.4, yOffset=-3).encode(x=low, x2="p90:Q", y=y, color=tint, tooltip=hints),
        base.mark_bar(size=7, cornerRadius=3.5, yOffset=-3).encode(
            x=alt.X("p25:Q"), x2="p75:Q", y=y, color=tint, tooltip=hints
        ),
        base.mark_point(
            shape="circle", size=42, fill="white", stroke="black", strokeWidth=1.2, opacity=1, yOffset=-3
        ).encode(x=alt.X("median:Q"), y=y, tooltip=hints),
    ).properties(height=30 * len(boxes), width=640)
    each = "; small dots: every client" if dots else ""
    caption = (
        f"{metric(name).title} of single clients on their own test parts at the last round, all seeds together. "
        f"White dot: median; bar: middle half; line: 10 % to 90 %{each}.{honest(runs)}"
    )
    words = ("clients", "clients", "Spread", "How clients differ", caption)
    return Figure(*words, chart, boxes, {"dots": dots}, "wide", table="dots" if dots else "rows")


def relative_picture(runs: list[Run], rows: list[Row]) -> Figure | None:
    """Client accuracy minus the baseline's at the same client and seed, as densities (FedSLR, Fig. 3)."""
    data: Rows = []
    middles: Rows = []
    single: Rows = []
    words: dict[str, None] = {}
    for row in rows:
        run = run_of(runs, row)
        base = _baseline(rows, row)
        if base is None or (base.method, base.model) == (row.method, row.model):
            continue
        tags = {"row": row_name(row), "method": row.name, "model": row.model}
        gains: Rows = []
        for seed in seeds_of(run, row.method):
            own, other = (dict(zip(*last_values(run, r, seed, "accuracy"), strict=True)) for r in (row, base))
            both = [client for client in own if client in other]
            gains += [
                {"row": tags["row"], "seed": seed, "client": run.client(c), "gain": rounded(float(own[c] - other[c]))}
                for c in both
            ]
        if len(gains) < 2:
            continue
        words[row_name(base)] = None
        single += gains
        values = np.array([point["gain"] for point in gains])
        data += [{"row": tags["row"], "model": row.model, **point} for point in _outline(values)]
        middles.append(
            {
                **tags,
                "median": rounded(float(np.median(values))),
                "better": rounded(float((values > 0).mean())),
                "clients": len(values),
            }
        )
    if not data:
        return None
    caption = (
        f"Relative accuracy: each client's test accuracy at the last round minus that of {' or '.join(words)} at the "
        "same client and seed, in percentage points. The wider, the more clients; white dot: median; right of the red "
        f"line clients gain, left of it they lose.{honest(runs)}"
    )
    title = f"Accuracy relative to {' or '.join(words)}"
    chart = _draw_violins(data, middles, rows)
    more = {"outlines": data, "zero": [{"gain": 0}], "clients": single}
    words_of_it = ("relative", "clients", "Relative accuracy", title, caption)
    return Figure(*words_of_it, chart, middles, more, "wide", table="clients")


def _baseline(rows: list[Row], row: Row) -> Row | None:
    """The row of the same run that the others are compared with."""
    own = [other for other in rows if other.run == row.run]
    found = [r for name in BASELINES for r in own if r.algorithm == name and r.model in ("global", "personal")]
    return found[0] if found else None


def _outline(values: Numbers) -> Rows:
    """Points of a density within the values, its highest 1; a narrow bump where all values are equal."""
    spread = float(values.std(ddof=1))
    width = max(1.06 * spread * len(values) ** -0.2, 0.3)
    places = np.linspace(values.min() - 0.3, values.max() + 0.3, STEPS)
    density = np.exp(-0.5 * ((places[:, None] - values) / width) ** 2).sum(1)
    return [
        {"gain": rounded(float(x)), "density": rounded(float(d))}
        for x, d in zip(places, density / density.max(), strict=True)
    ]


def _draw_violins(data: Rows, middles: Rows, rows: list[Row]) -> Any:
    middles.sort(key=lambda m: -m["median"])
    order = {m["row"]: i for i, m in enumerate(middles)}
    for point in middles:
        point["place"] = order[point["row"]]
    for point in data:
        place, half = order[point["row"]], 0.42 * point.pop("density")
        point["low"], point["high"] = rounded(place - half), rounded(place + half)
    names = json.dumps(list(order))
    y = alt.Y(
        "low:Q",
        title=None,
        scale=alt.Scale(domain=[len(order) - 0.5, -0.5], nice=False),
        axis=alt.Axis(values=list(range(len(order))), labelExpr=f"{names}[datum.value]", labelLimit=190, grid=False),
    )
    x = alt.X(
        "gain:Q",
        title="Gain in accuracy (points)",
        axis=alt.Axis(tickCount=6),
        scale=alt.Scale(nice=False),
    )
    tint = colour(rows)
    hints = [
        alt.Tooltip("row:N", title="Method"),
        alt.Tooltip("median:Q", title="Median gain (points)"),
        alt.Tooltip("better:Q", title="Clients that gain", format=".0%"),
        alt.Tooltip("clients:Q", title="Clients, all seeds"),
    ]
    shape = alt.Chart(alt.NamedData(name="outlines")).mark_area(opacity=0.55, tooltip=None)
    middle = alt.Chart(alt.NamedData(name="rows")).mark_point(
        shape="circle", size=42, fill="white", stroke="black", strokeWidth=1.2, opacity=1
    )
    return alt.layer(
        shape.encode(x=x, y=y, y2="high:Q", detail="row:N", color=tint),
        alt.Chart(alt.NamedData(name="zero")).mark_rule(color="#d33f3f", strokeWidth=1.4).encode(x="gain:Q"),
        middle.encode(x=alt.X("median:Q"), y=alt.Y("place:Q"), tooltip=hints),
    ).properties(height=44 * len(order), width=640)
