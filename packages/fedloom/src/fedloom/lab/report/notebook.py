"""Display of a run in a notebook: a small table and a curve, created from the tidy table of the run's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from markupsafe import Markup

from fedloom import metrics
from fedloom.errors import ConfigError
from fedloom.formats import UNKNOWN_DASH, format_significant
from fedloom.hints import suggest_nearest, unknown_name_error
from fedloom.lab.report.charts import kit, look
from fedloom.lab.report.markup import render_part
from fedloom.lab.report.naming import describe_figure, metric, titled
from fedloom.lab.report.numbers import MODEL_KINDS, Estimate
from fedloom.lab.report.reading import rows_where

if TYPE_CHECKING:
    from altair import LayerChart

    from fedloom.lab.report.charts.kit import Spec

MEAN_NAMES = ("mean", "weighted")
"""Means of a metric over clients, and means over samples. Tables from secure sums contain only means over samples."""


def draw_curve(table: pa.Table, name: str | None = None, part: str = "test") -> LayerChart:
    """Plot a metric's mean over clients by round, with one line per kind of model.

    Args:
        table: table with the columns round, client, model, part, metric and value (see
            `fedloom.engine.result.Result.table`).
        name: name of the metric. If None, this is the task's default metric, such as accuracy or AUROC.
        part: part of the clients' samples, such as "test".

    Raises:
        ConfigError: the metric was not measured.
    """
    shown = name or choose_leading_metric(table)
    return cast("LayerChart", look.make_notebook_chart(_curve_chart(_model_curves(table, shown, part), shown, part)))


def choose_leading_metric(table: pa.Table) -> str:
    """Return the most informative of the measured metrics."""
    return metrics.leading(set(table["metric"].unique().to_pylist()))


def notebook_page(table: pa.Table, title: str) -> str:
    """Render a table of the models and the learning curve of the primary metric, as HTML with an inline SVG.

    The page does not load any external resources.
    """
    name = choose_leading_metric(table)
    scale, shown = metric(name).scale, titled(metric(name))
    heads = ["model", f"test {shown}", "worst 10 %", "validation"]
    rows = []
    for model in MODEL_KINDS:
        figures = [
            next((v for one in statistics if (v := _last_value(table, model, part, f"{name}/{one}")) is not None), None)
            for part, statistics in (("test", MEAN_NAMES), ("test", ("worst10",)), ("validation", MEAN_NAMES))
        ]
        if any(value is not None for value in figures):
            rows.append(
                [model, *(UNKNOWN_DASH if value is None else format_significant(value * scale) for value in figures)]
            )
    parts = [str(Markup("<p><b>{}</b></p>").format(title))]
    if rows:
        parts.append(html_table(heads, rows))
    curves = _model_curves(table, name, "test", strict=False)
    if len({row["round"] for row in curves}) > 1:
        parts.append(look.render_svg(_curve_chart(curves, name, "test")))
    return "\n".join(parts)


def draw_svg(chart: LayerChart) -> str:
    """Render a chart as HTML with an inline SVG."""
    return f"<p>{look.render_svg(chart.to_dict())}</p>"


def comparison_chart(estimates: Mapping[str, Estimate], name: str) -> LayerChart:
    """Plot each method's mean with its 95 % interval over seeds, and a dot for each seed.

    The best method is at the top.

    Args:
        estimates: values of the metric, keyed by the label of the method.
        name: name of the metric.
    """
    shown = describe_figure(name)
    sign = -1 if shown.higher_is_better else 1
    order = sorted(estimates, key=lambda label: sign * estimates[label].mean)
    means, seeds = [], []
    for label in order:
        mean, half = estimates[label].mean * shown.scale, estimates[label].half * shown.scale
        ends = {"low": mean - half, "high": mean + half} if half == half else {}
        means.append({"method": label, "value": mean, **ends})
        seeds += [{"method": label, "seed": s, "value": v * shown.scale} for s, v in estimates[label].finite.items()]
    y, x = kit.nominal_channel("method", order), kit.number("value", titled(shown))
    hints = kit.tooltip(("method", "Method"), ("seed", "Seed"), ("value", titled(shown), ".4~g"))
    single = kit.mark_layer(
        "point", {"x": x, "y": y, "tooltip": hints}, data="seeds", size=24, opacity=0.35, filled=True
    )
    spec = kit.layer_chart(single, *kit.interval_layers({"y": y}, x, tooltip=hints[::2]), width=380)
    return cast("LayerChart", look.make_notebook_chart({**spec, "datasets": {"rows": means, "seeds": seeds}}))


def _curve_chart(rows: list[dict[str, Any]], name: str, part: str) -> Spec:
    tint = {"field": "model", "type": "nominal", "title": None, "scale": {"domain": list(MODEL_KINDS)}}
    x, y = kit.number("round", "Round"), kit.number("value", f"{titled(metric(name))}, {part}")
    hints = kit.tooltip(("model", "Model"), ("round", "Round"), ("value", titled(metric(name)), ".4~g"))
    line = kit.mark_layer("line", {"x": x, "y": y, "color": tint, "tooltip": hints}, point=True)
    return kit.layer_chart(line, width=380, height=200, datasets={"rows": rows})


def _model_curves(table: pa.Table, name: str, part: str, *, strict: bool = True) -> list[dict[str, Any]]:
    found = [rows_where(table, metric=f"{name}/{one}", part=part).sort_by("round") for one in MEAN_NAMES]
    rows = found[0] if len(found[0]) else found[1]
    if strict and not len(rows):
        if part not in (parts := set(table["part"].to_pylist()) - {""}):
            raise unknown_name_error("part", part, parts)
        measured = set(rows_where(table, part=part)["metric"].to_pylist())
        names = sorted({metric.rpartition("/")[0] for metric in measured if metric.endswith(MEAN_NAMES)})
        raise ConfigError(f"{name!r} was not measured on the part {part!r}; {suggest_nearest(name, names)}")
    scale = metric(name).scale
    return [
        {"round": row["round"], "model": row["model"], "value": row["value"] * scale}
        for row in rows.select(["round", "model", "value"]).to_pylist()
        if row["value"] == row["value"]
    ]


def _last_value(table: pa.Table, model: str, part: str, name: str) -> float | None:
    rows = rows_where(table, model=model, part=part, metric=name)
    if not len(rows):
        return None
    value = rows.sort_by([("round", "descending")])["value"][0].as_py()
    return None if value != value else float(value)


def html_table(heads: list[str], rows: list[list[str]]) -> str:
    """Render an HTML table from texts."""
    return render_part("plain_table", heads=heads, rows=rows)
