"""Results against the share of attackers, over runs that differ in nothing else."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from fedloom.report.figure import Figure, Rows, colour, rounded, slug
from fedloom.report.naming import figure, metric, titled
from fedloom.report.numbers import Row, run_of
from fedloom.report.panels import Axis, line_panels
from fedloom.report.reading import Run

OUTSIDE = ("name", "attack", "engine", "evaluate", "resolved", "tune")
"""Settings that do not make runs another family."""


def robustness_pictures(runs: list[Run], rows: list[Row], lead: str) -> list[Figure | None]:
    """For every kind of attack with two shares or more: the mean result, and the worst tenth of the benign clients."""
    families = _families(runs)
    found: list[Figure | None] = []
    for i, (kind, own) in enumerate(families):
        for name in (lead, f"{lead}/worst10"):
            id = "-".join(["attacks", *([slug(name)] if name != lead else []), *([str(i + 1)] if i else [])])
            found.append(_curve(own, [row for row in rows if run_of(runs, row) in own], name, kind, id))
    return found


def share_of(run: Run) -> float:
    """Share of the clients that attack."""
    attack: dict[str, Any] = run.options.get("attack", {})
    return float(attack.get("fraction", 0.0)) if attack.get("kind", "none") != "none" else 0.0


def _families(runs: list[Run]) -> list[tuple[str, list[Run]]]:
    """Runs of one kind of attack that are equal but for its share; a run without attackers belongs to every kind."""
    found: dict[str, tuple[str, list[Run]]] = {}
    for run in runs:
        if share_of(run):
            attack = {k: v for k, v in run.options["attack"].items() if k != "fraction"}
            found.setdefault(_same(run) + repr(attack), (attack["kind"], []))[1].append(run)
    for same, (_, family) in found.items():
        family[:0] = [run for run in runs if not share_of(run) and same.startswith(_same(run))]
    return [(kind, own) for kind, own in found.values() if len({share_of(run) for run in own}) > 1]


def _same(run: Run) -> str:
    return repr(sorted((k, repr(v)) for k, v in run.options.items() if k not in OUTSIDE))


def _curve(runs: list[Run], rows: list[Row], name: str, kind: str, id: str) -> Figure | None:
    shown = figure(name)
    data: Rows = []
    for row in rows:
        result = row.figures.get(name)
        if result is not None and math.isfinite(result.mean):
            half = 0.0 if math.isnan(result.half) else result.half
            ends = {"mean": result.mean, "low": result.mean - half, "high": result.mean + half}
            tags = {"method": row.method, "model": row.model, "run": row.run, "x": share_of(run_of(runs, row))}
            data.append(tags | {n: rounded(v * shown.scale) for n, v in ends.items()} | {"seeds": len(result.finite)})
    if not data:
        return None
    methods = list(dict.fromkeys(point["method"] for point in data))
    data.sort(key=lambda point: (methods.index(point["method"]), point["model"], point["x"]))
    hints = [
        alt.Tooltip("method:N", title="Method"),
        alt.Tooltip("model:N", title="Model"),
        alt.Tooltip("run:N", title="Run"),
        alt.Tooltip("x:Q", title="Share of attackers", format=".0%"),
        alt.Tooltip("mean:Q", title=titled(shown), format=".4~g"),
        alt.Tooltip("low:Q", title="95 % interval from", format=".4~g"),
        alt.Tooltip("high:Q", title="to", format=".4~g"),
    ]
    values = [point["mean"] for point in data]
    air = 0.06 * (max(values) - min(values)) or 1.0
    x = Axis("Share of the clients that attack", percent=True)
    y = Axis(titled(shown), domain=(min(values) - air, max(values) + air))
    chart, more = line_panels(data, "method", x, y, colour(rows), hints, marks=True)
    base = name.partition("/")[0]
    what = metric(base).title if base == name else f"{shown.title} of the benign clients, {metric(base).title}"
    caption = (
        f"{what} over the share of attackers ({kind}), benign clients only. One panel per method, the others in grey "
        "behind it; the band is the 95 % interval over seeds, cut at the edge of the panel."
    )
    tab = f"{shown.title}, {kind}"
    return Figure(id, "attacks", tab, f"{what} under {kind}", caption, chart, data, more, "facet")
