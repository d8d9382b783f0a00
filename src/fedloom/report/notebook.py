"""What a notebook shows of a run: a small table and a curve, made from the tidy table of what was measured."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import altair as alt
import pyarrow as pa
import pyarrow.compute as pc
import vl_convert

from fedloom import metrics
from fedloom.errors import ConfigError, nearest, unknown
from fedloom.report.figure import theme
from fedloom.report.naming import figure, metric, titled
from fedloom.report.numbers import Estimate

MODELS = ("global", "personal", "hybrid")


def chart(table: pa.Table, name: str | None = None, part: str = "test") -> alt.Chart:
    """The mean over clients of a metric by round, a line per model.

    Args:
        table: columns round, client, model, part, metric, value; see `fedloom.engine.result.Result.table`.
        name: the metric; accuracy, AUROC or what else leads when None.
        part: of the clients' samples.

    Raises:
        ConfigError: it was not measured.
    """
    return _chart(_curves(table, name or leading(table), part), name or leading(table), part)


def leading(table: pa.Table) -> str:
    """The metric that says most, of those that were measured."""
    return metrics.leading(set(table["metric"].unique().to_pylist()))


def page(table: pa.Table, title: str) -> str:
    """A table of the models and the curve of the leading metric, as HTML with an inline SVG; nothing is fetched."""
    name = leading(table)
    scale, shown = metric(name).scale, titled(metric(name))
    heads = ["model", f"test {shown}", "worst 10 %", "validation"]
    rows = []
    for model in MODELS:
        figures = [
            _last(table, model, part, f"{name}/{statistic}")
            for part, statistic in (("test", "mean"), ("test", "worst10"), ("validation", "mean"))
        ]
        if any(value is not None for value in figures):
            rows.append([model, *("-" if value is None else f"{value * scale:.4g}" for value in figures)])
    parts = [f"<p><b>{html.escape(title)}</b></p>"]
    if rows:
        parts.append(html_table(heads, rows))
    curves = _curves(table, name, "test", strict=False)
    if len({row["round"] for row in curves}) > 1:
        spec = {**_chart(curves, name, "test").to_dict(), "config": theme(dark=False)}
        parts.append(vl_convert.vegalite_to_svg(spec))
    return "\n".join(parts)


def comparison_chart(estimates: Mapping[str, Estimate], name: str) -> alt.LayerChart | alt.FacetChart:
    """The mean of every method with its 95 % interval over seeds, and every seed as a dot, the best on top.

    Args:
        estimates: the figure by the label of the method.
        name: the figure.
    """
    shown = figure(name)
    sign = -1 if shown.higher else 1
    order = sorted(estimates, key=lambda label: sign * estimates[label].mean)
    means, seeds = [], []
    for label in order:
        found, half = estimates[label], estimates[label].half
        ends = {"low": found.mean - half, "high": found.mean + half} if half == half else {}
        means.append({"method": label, "value": found.mean * shown.scale,
                      **{key: value * shown.scale for key, value in ends.items()}})  # fmt: skip
        seeds += [{"method": label, "seed": s, "value": v * shown.scale} for s, v in found.finite.items()]
    y = alt.Y("method:N", sort=order, title=None)
    x = alt.X("value:Q", title=titled(shown), scale=alt.Scale(zero=False))
    summary, single = (alt.Chart(alt.InlineData(values=rows)) for rows in (means, seeds))
    return alt.layer(
        single.mark_circle(size=24, opacity=0.35).encode(x=x, y=y, tooltip=["method:N", "seed:Q", "value:Q"]),
        summary.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", title=titled(shown)), x2="high:Q", y=y),
        summary.mark_point(filled=True, size=70).encode(x=x, y=y, tooltip=["method:N", "value:Q"]),
        width=380,
    )


def _chart(rows: list[dict[str, Any]], name: str, part: str) -> alt.Chart:
    shown: alt.Chart = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_line(point=True)
        .encode(
            x=alt.X("round:Q", title="Round"),
            y=alt.Y("value:Q", title=f"{titled(metric(name))}, {part}", scale=alt.Scale(zero=False)),
            color=alt.Color("model:N", scale=alt.Scale(domain=list(MODELS)), title=None),
            tooltip=["model:N", "round:Q", alt.Tooltip("value:Q", format=".4g")],
        )
        .properties(width=380, height=200)
    )
    return shown


def _curves(table: pa.Table, name: str, part: str, *, strict: bool = True) -> list[dict[str, Any]]:
    mine = pc.and_(pc.equal(table["metric"], f"{name}/mean"), pc.equal(table["part"], part))
    found = table.filter(mine).sort_by("round")
    if strict and not len(found):
        if part not in (parts := set(table["part"].to_pylist()) - {""}):
            raise unknown("part", part, parts)
        there = set(table.filter(pc.equal(table["part"], part))["metric"].to_pylist())
        known = [metric.removesuffix("/mean") for metric in there if metric.endswith("/mean")]
        raise ConfigError(f"{name!r} on the part {part!r} was not measured; {nearest(name, known)}")
    scale = metric(name).scale
    return [
        {"round": row["round"], "model": row["model"], "value": row["value"] * scale}
        for row in found.select(["round", "model", "value"]).to_pylist()
        if row["value"] == row["value"]
    ]


def _last(table: pa.Table, model: str, part: str, name: str) -> float | None:
    found = table
    for column, value in (("model", model), ("part", part), ("metric", name)):
        found = found.filter(pc.equal(found[column], value))
    if not len(found):
        return None
    value = found.sort_by([("round", "descending")])["value"][0].as_py()
    return None if value != value else float(value)


def html_table(heads: list[str], rows: list[list[str]]) -> str:
    """An HTML table of texts."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
