"""Charts of model behavior at individual clients: confusion matrices, and projections of representations.

In a projection, color and shape show the class.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from fedloom.formats import format_significant, round_significant
from fedloom.lab.report.charts import kit
from fedloom.lab.report.charts.kit import Figure, Rows, Spec
from fedloom.lab.report.charts.spread import attackers_sentence
from fedloom.lab.report.reading import read_columns, rows_where
from fedloom.lab.report.run import Key, Run

MAX_CONFUSION_PANELS = 12
"""Maximum number of clients to plot."""
MAX_NUMBERED_CLASSES = 6
"""Maximum number of classes in a chart with printed counts."""
POINT_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")


def draw_inspections(runs: list[Run]) -> list[Figure | None]:
    """Return this module's charts. A chart without data is None."""
    several = len(runs) > 1
    figures: list[Figure | None] = []
    for place, run in enumerate(runs, start=1):
        figures += [_draw_confusion(run, place if several else 0), _draw_representations(run, place if several else 0)]
    return figures


def _choose_drawn_model(run: Run, table: Any) -> tuple[str, int, str]:
    """Return the method and model with the best test accuracy, and the first seed, for plotting."""
    keys = table.group_by(["method", "seed", "model"]).aggregate([]).to_pylist()
    recorded = sorted((key["method"], key["seed"], key["model"]) for key in keys)

    def score(key: tuple[str, int, str]) -> float:
        points = run.benign(Key(*key, "test", "accuracy"))
        last = points.value[points.round == points.round[-1]] if points and len(points.round) else np.empty(0)
        return float(np.nanmean(last)) if np.isfinite(last).any() else -1.0

    method, _, model = max(recorded, key=score)
    return method, min(seed for m, seed, kind in recorded if (m, kind) == (method, model)), model


def _select_drawn(run: Run, name: str, columns: tuple[str, ...]) -> tuple[Rows, str] | None:
    """Return the first benign clients' rows and a text that names the method, model and seed.

    Return None if there are no rows.
    """
    import pyarrow.compute as pc  # slow to import

    table = read_columns(run.path / f"{name}.parquet", ("method", "seed", "client", "model", *columns))
    if table is None or not len(table):
        return None
    method, seed, model = _choose_drawn_model(run, table)
    hostile = pa.array(sorted(run.attackers(seed)), pa.int64())
    table = rows_where(table, method=method, seed=seed, model=model)
    table = table.filter(pc.invert(pc.is_in(table["client"], value_set=hostile)))
    clients = sorted(pc.unique(table["client"]).to_pylist())
    rows = table.filter(
        pc.is_in(table["client"], value_set=pa.array(clients[:MAX_CONFUSION_PANELS], pa.int64()))
    ).to_pylist()
    some = (
        f"; the first {MAX_CONFUSION_PANELS} of {len(clients)} clients" if len(clients) > MAX_CONFUSION_PANELS else ""
    )
    return rows, f"{method}, {model} model, seed {seed}{some}"


def _class_name(run: Run, code: float) -> str:
    classes = run.summary.classes
    return "" if code != code else classes[int(code)] if 0 <= code < len(classes) else format_significant(code, 6)


def _draw_confusion(run: Run, place: int) -> Figure | None:
    sample_of_run = _select_drawn(run, "confusion", ("true", "predicted", "count"))
    if sample_of_run is None:
        return None
    rows, words = sample_of_run
    total: dict[tuple[int, float], float] = {}
    for r in rows:
        total[r["client"], r["true"]] = total.get((r["client"], r["true"]), 0) + r["count"]
    classes = [_class_name(run, c) for c in sorted({r["true"] for r in rows} | {r["predicted"] for r in rows})]
    data: Rows = [
        {
            "client": run.titled_client(r["client"]),
            "count": int(r["count"]),
            **{name: _class_name(run, r[name]) for name in ("true", "predicted")},
            "share": round_significant(r["count"] / total[r["client"], r["true"]]),
        }
        for r in rows
    ]
    more: Spec = {"scale": {"domain": classes, "padding": 0.04}, "axis": {"labelLimit": 70}}
    hints = kit.tooltip(
        *((n, n.capitalize()) for n in ("client", "true", "predicted", "count")), ("share", "Share", ".0%")
    )
    inner = kit.heat_map(
        kit.nominal_channel("predicted", classes, **more),
        kit.nominal_channel("true", classes, "True", **more),
        kit.intensity_channel("share", "Fraction of true class", form="%", domain=[0, 1]),
        hints,
        "count" if len(classes) <= MAX_NUMBERED_CLASSES else "",
        "datum.share > 0.5",
        cornerRadius=0,
    )
    caption = (
        "Predicted class by true class on every client's own test set after the last round. Each row shows the "
        f"fractions of a true class, and the diagonal shows correct predictions ({words}).{attackers_sentence([run])}"
    )
    return _inspection_figure(
        run, place, "confusion", ("Confusion", "Confusion by client"), caption, inner, data, "Predicted"
    )


def _draw_representations(run: Run, place: int) -> Figure | None:
    sample_of_run = _select_drawn(run, "tsne", ("label", "x", "y"))
    if sample_of_run is None:
        return None
    rows, words = sample_of_run
    classes = [_class_name(run, c) for c in sorted({r["label"] for r in rows if r["label"] == r["label"]})]
    data: Rows = [
        {
            "client": run.titled_client(r["client"]),
            "class": _class_name(run, r["label"]),
            **{axis: round_significant(r[axis]) for axis in ("x", "y")},
        }
        for r in rows
    ]
    bare: Spec = {"axis": {"labels": False, "grid": False}, "scale": {"padding": 8}}
    encoding: Spec = {
        "x": kit.number("x", **bare),
        "y": kit.number("y", **bare),
        "tooltip": kit.tooltip(("client", "Client"), ("class", "Class")),
    }
    if classes:
        legend = {"columns": 6, "symbolStrokeWidth": 0}
        of_class = {"field": "class", "type": "nominal", "sort": classes, "title": "Class", "legend": legend}
        shapes = [POINT_SHAPES[(i // 6 + i) % 6] for i in range(len(classes))]
        encoding["color"] = {**of_class, "scale": {"domain": classes}}
        encoding["shape"] = {**of_class, "scale": {"domain": classes, "range": shapes}}
    caption = (
        "t-SNE of the last layer's inputs for every client's test samples. Each client has a separate projection, and "
        "the axes have no meaning. Samples of a class cluster together if the representation separates the class "
        f"({words}).{attackers_sentence([run])}"
    )
    inner = kit.layer_chart(kit.mark_layer("point", encoding, size=26, opacity=0.75))
    titles = ("Representations", "Representations by client")
    figure = _inspection_figure(run, place, "tsne", titles, caption, inner, data, None)
    figure.chart["resolve"]["scale"] = {"x": "independent", "y": "independent"}
    return figure


def _inspection_figure(
    run: Run, place: int, kind: str, titles: tuple[str, str], caption: str, inner: Spec, data: Rows, below: str | None
) -> Figure:
    tab, title = (f"{text} ({run.label})" if place else text for text in titles)
    spec = kit.facet_panels(inner, "client", [row["client"] for row in data], below, high=200)
    spec["spec"]["view"] = {"stroke": "#8a8f98", "strokeOpacity": 0.4}
    return Figure(f"{kind}-{place}" if place else kind, "clients", tab, title, caption, spec, {"rows": data}, "square")
