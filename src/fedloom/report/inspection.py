"""Charts of what models do on single clients: confusion, and representations in the plane.

In the plane of representations colour and shape mean the class.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedloom.report.clients import honest
from fedloom.report.figure import Figure, Rows, rounded
from fedloom.report.panels import facets
from fedloom.report.reading import Key, Run, read_table

PANELS = 12
"""Up to so many clients are drawn."""
WRITTEN = 6
"""Up to so many classes have their counts written into the cells."""
FRAME = alt.ViewBackground(stroke="#8a8f98", strokeOpacity=0.4)


def inspection_pictures(runs: list[Run]) -> list[Figure | None]:
    """The charts of this module, None for those without data."""
    several = len(runs) > 1
    found: list[Figure | None] = []
    for place, run in enumerate(runs, start=1):
        found += [_confusion(run, place if several else 0), _tsne(run, place if several else 0)]
    return found


def _chosen(run: Run, table: Any) -> tuple[str, int, str]:
    """Method, seed and model that are drawn: the best by test accuracy of those in the table, its first seed."""
    keys = sorted({(r["method"], r["seed"], r["model"]) for r in table.select(["method", "seed", "model"]).to_pylist()})

    def score(key: tuple[str, int, str]) -> float:
        points = run.benign(Key(*key, "test", "accuracy"))
        last = points.value[points.round == points.round[-1]] if points and len(points.round) else np.empty(0)
        return float(np.nanmean(last)) if np.isfinite(last).any() else -1.0

    method, _, model = max(keys, key=score)
    return method, min(seed for m, seed, kind in keys if (m, kind) == (method, model)), model


def _drawn(run: Run, name: str, columns: tuple[str, ...]) -> tuple[Rows, str, int] | None:
    """Rows of the drawn method, model and seed, of its first benign clients; its name; how many benign clients."""
    path = run.path / f"{name}.parquet"
    if not path.exists():
        return None
    table = read_table(path, ("method", "seed", "client", "model", *columns))
    if not len(table):
        return None
    method, seed, model = _chosen(run, table)
    same = [pc.equal(table[n], v) for n, v in (("method", method), ("seed", seed), ("model", model))]
    hostile = pa.array(sorted(run.attackers(method, seed)), pa.int64())
    same.append(pc.invert(pc.is_in(table["client"], value_set=hostile)))
    table = table.filter(pc.and_(pc.and_(same[0], same[1]), pc.and_(same[2], same[3])))
    clients = sorted(set(table["client"].to_pylist()))
    rows = [row for row in table.to_pylist() if row["client"] in clients[:PANELS]]
    return rows, f"{method}, {model} model, seed {seed}", len(clients)


def _client(run: Run, id: int) -> str:
    name = run.client(id)
    return f"Client {name}" if name.isdigit() else name


def _class(run: Run, code: float) -> str:
    names = run.summary.partition.classes
    return names[int(code)] if 0 <= code < len(names) else f"{code:g}"


def _confusion(run: Run, place: int) -> Figure | None:
    found = _drawn(run, "confusion", ("true", "predicted", "count"))
    if found is None:
        return None
    rows, who, clients = found
    total: dict[tuple[int, float], float] = {}
    for r in rows:
        cell = (r["client"], r["true"])
        total[cell] = total.get(cell, 0) + r["count"]
    codes = sorted({r["true"] for r in rows} | {r["predicted"] for r in rows})
    names = [_class(run, c) for c in codes]
    data: Rows = [
        {
            "client": _client(run, r["client"]),
            "true": _class(run, r["true"]),
            "predicted": _class(run, r["predicted"]),
            "count": int(r["count"]),
            "share": rounded(r["count"] / total[r["client"], r["true"]]),
        }
        for r in rows
    ]
    axis = alt.Axis(labelAngle=0, labelOverlap=True, labelLimit=70, grid=False)
    base = alt.Chart().encode(
        x=alt.X("predicted:N", sort=names, scale=alt.Scale(domain=names, padding=0.04), title=None, axis=axis),
        y=alt.Y("true:N", sort=names, scale=alt.Scale(domain=names, padding=0.04), title="True", axis=axis),
        tooltip=["client:N", "true:N", "predicted:N", "count:Q", alt.Tooltip("share:Q", format=".0%")],
    )
    heat = base.mark_rect().encode(
        color=alt.Color(
            "share:Q",
            title="Share of the true class",
            scale=alt.Scale(range="heatmap", domain=[0, 1]),
            legend=alt.Legend(format="%", gradientLength=160, gradientThickness=8),
        )
    )
    words = [
        base.mark_text(style=style, fontSize=11).transform_filter(test).encode(text="count:Q")
        for style, test in (("onstrong", "datum.share > 0.5"), ("onweak", "datum.share <= 0.5"))
    ]
    chart = alt.layer(heat, *(words if len(names) <= WRITTEN else []), data=alt.NamedData(name="rows"))
    some = f" The first {PANELS} of {clients} clients." if clients > PANELS else ""
    caption = (
        f"Predicted class by true class on every client's own test part after the last round, {who}: each row is the "
        f"share of a true class; the diagonal is right.{some}{honest([run])}"
    )
    return _panels(run, place, "confusion", "Confusion", "Confusion per client", caption, chart, data, "Predicted")


def _tsne(run: Run, place: int) -> Figure | None:
    found = _drawn(run, "tsne", ("label", "x", "y"))
    if found is None:
        return None
    rows, who, clients = found
    codes = sorted({r["label"] for r in rows if r["label"] == r["label"]})
    names = [_class(run, c) for c in codes]
    data: Rows = [
        {
            "client": _client(run, r["client"]),
            "class": _class(run, r["label"]) if r["label"] == r["label"] else "",
            "x": rounded(r["x"]),
            "y": rounded(r["y"]),
        }
        for r in rows
    ]
    shapes = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]
    bare = alt.Axis(labels=False, grid=False)
    chart = alt.Chart(alt.NamedData(name="rows")).mark_point(size=26, opacity=0.75)
    chart = chart.encode(
        x=alt.X("x:Q", title=None, axis=bare, scale=alt.Scale(zero=False, padding=8)),
        y=alt.Y("y:Q", title=None, axis=bare, scale=alt.Scale(zero=False, padding=8)),
        tooltip=["client:N", "class:N"],
    )
    if names:
        legend = alt.Legend(columns=6, symbolStrokeWidth=0)
        chart = chart.encode(
            color=alt.Color("class:N", sort=names, title="Class", scale=alt.Scale(domain=names), legend=legend),
            shape=alt.Shape(
                "class:N",
                sort=names,
                scale=alt.Scale(domain=names, range=[shapes[(i // 6 + i) % 6] for i in range(len(names))]),
                legend=legend,
            ),
        )
    some = f" The first {PANELS} of {clients} clients." if clients > PANELS else ""
    caption = (
        f"t-SNE of what the last layer sees of every client's test samples, {who}; each client has a plane of its own, "
        f"whose axes mean nothing. Samples of a class lie together where the representation separates it.{some}"
        f"{honest([run])}"
    )
    return _panels(run, place, "tsne", "Representations", "Representations per client", caption, chart, data, None)


def _panels(
    run: Run, place: int, kind: str, tab: str, title: str, caption: str, chart: Any, data: Rows, below: str | None
) -> Figure:
    where = f" ({run.label})" if place else ""
    order = list(dict.fromkeys(row["client"] for row in data))
    chart = facets(chart.properties(view=FRAME), "client", order, below, high=200)
    if kind == "tsne":
        chart = chart.resolve_scale(x="independent", y="independent")
    id = f"{kind}-{place}" if place else kind
    return Figure(id, "clients", tab + where, title + where, caption, chart, data, {}, "square")
