"""Figures of a comparison for papers, as Altair charts: learning curves, individual clients, critical differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import ConfigError
from fedloom.formats import format_significant, round_significant
from fedloom.hints import unknown_name_error
from fedloom.lab.report.charts import kit
from fedloom.lab.report.charts.curves import CURVE_AXES, draw_points
from fedloom.lab.report.charts.kit import Rows, Spec
from fedloom.lab.report.charts.spread import last_results
from fedloom.lab.report.naming import metric, titled
from fedloom.lab.report.numbers import Estimate, Row, find_run, find_seeds
from fedloom.lab.report.run import Run

Blocks = Literal["seeds", "clients"]
"""Unit (seed or client) for ranking the methods."""
MIN_RANKED_METHODS, MIN_RANKED_BLOCKS = 3, 5
RANK_LEVEL = 0.05


class MethodNames:
    """Names of the methods in a figure.

    Args:
        rows: rows of the results table available to the figure.
        labels: names to show, keyed by the label of the method. Only these methods are plotted, in the given order. If
            None, all methods are plotted.

    Raises:
        ConfigError: a method does not exist.
    """

    def __init__(self, rows: Sequence[Row], labels: Mapping[str, str] | None) -> None:
        methods = [row.method for row in rows]
        for label in labels or ():
            if label not in methods:
                raise unknown_name_error("method", label, methods, "labels")
        named = {row.method: row for row in rows}
        self.rows = [named[label] for label in labels] if labels else list(rows)
        models: dict[str, set[str]] = {}
        for row in rows:
            models.setdefault(row.method, set()).add(row.model)
        self._names = {(row.method, row.model): self._name(row, labels or {}, models) for row in self.rows}

    @staticmethod
    def _name(row: Row, labels: Mapping[str, str], models: Mapping[str, set[str]]) -> str:
        name = labels.get(row.method, row.method)
        return f"{name} ({row.model})" if len(models[row.method]) > 1 else name

    def __getitem__(self, row: Row) -> str:
        return self._names[row.method, row.model]

    @property
    def order(self) -> list[str]:
        """Names of the plotted methods in the order of the figure, without duplicates."""
        return list(dict.fromkeys(self._names.values()))


def _method_colors(order: Sequence[str]) -> Spec:
    return {"field": "method", "type": "nominal", "title": None, "scale": {"domain": [*order]}}


def curve_chart(runs: list[Run], labels: MethodNames, name: str, x: str, width: int, height: int) -> Spec:
    """Build a chart of all methods' learning curves in one panel, with 95 % intervals over seeds as bands.

    Raises:
        ConfigError: the axis does not exist, or no method has recorded the metric along this axis.
    """
    if x not in CURVE_AXES:
        raise unknown_name_error("axis", x, CURVE_AXES, "curves: x")
    rows: Rows = []
    for row in labels.rows:
        points = draw_points(find_run(runs, row), row, name, x)
        rows += [{**point, "method": labels[row]} for point in points if point["seed"] is None]
    if not rows:
        raise ConfigError(f"curves: no method has {name!r} {CURVE_AXES[x][0]}. Choose a different metric or axis")
    shown = titled(metric(name))
    place = {
        "x": kit.number("x", CURVE_AXES[x][1]),
        "y": kit.number("value", shown),
        "color": _method_colors(labels.order),
    }
    ends = {**place, "y": {**place["y"], "field": "low"}, "y2": {"field": "high"}}
    tips = kit.tooltip(("method", "Method"), ("round", "Round")) + kit.interval_tips(shown)
    band = kit.mark_layer("area", ends, kit.INTERVAL_FILTER, opacity=0.16)
    bands = [band] if any(point.get("low") is not None for point in rows) else []
    line = kit.mark_layer("line", {**place, "tooltip": tips}, point={"size": 18})
    return kit.layer_chart(*bands, line, width=width, height=height, datasets={"rows": rows})


def client_chart(runs: list[Run], labels: MethodNames, name: str, width: int, height: int | None) -> Spec:
    """Build a chart with a dot for each client and method: the mean over seeds with its 95 % interval.

    Raises:
        ConfigError: no client has recorded the metric.
    """
    rows: Rows = []
    sites: dict[int, str] = {}
    for row in labels.rows:
        run = find_run(runs, row)
        scores: dict[int, dict[int, float]] = {}
        for seed in find_seeds(run, row.method):
            for client, value in zip(*(part.tolist() for part in last_results(run, row, seed, name)), strict=True):
                scores.setdefault(client, {})[seed] = value
        for client, by_seed in sorted(scores.items()):
            sites[client] = run.client(client)
            point = Estimate(by_seed).points()[0]  # has the units of the metric
            rows.append({**point, "client": sites[client], "method": labels[row]})
    if not rows:
        raise ConfigError(f"clients: no client has the metric {name!r}. Choose a different metric")
    shown, order = titled(metric(name)), [sites[client] for client in sorted(sites)]
    y = kit.nominal_channel("client", order, None, axis={"labelOverlap": False})
    place = {"y": y, "yOffset": {"field": "method", "sort": labels.order}}
    tips = kit.tooltip(("client", "Client"), ("method", "Method")) + kit.interval_tips(shown)
    dots = kit.interval_layers(place, kit.number("value", shown), tint=_method_colors(labels.order), tooltip=tips)
    dots = dots if any(point.get("low") is not None for point in rows) else dots[1:]
    high = height or len(order) * max(14, 9 * len(labels.order))
    return kit.layer_chart(*dots, width=width, height=high, datasets={"rows": rows})


def rank_methods(runs: list[Run], labels: MethodNames, name: str, blocks: Blocks) -> NDArray[np.float64]:
    """Rank the methods within each complete block (all methods have a result). Return the ranks ``[blocks, methods]``.

    The best method has rank 1.

    Raises:
        ConfigError: there are fewer than three methods or fewer than five blocks.
    """
    from scipy.stats import rankdata  # slow to import

    scores: list[dict[int, float]] = []
    for row in labels.rows:
        run = find_run(runs, row)
        if blocks == "seeds":
            scores.append(dict(row.figures[name].finite) if name in row.figures else {})
            continue
        by_client: dict[int, list[float]] = {}
        for seed in find_seeds(run, row.method):
            for client, value in zip(*(part.tolist() for part in last_results(run, row, seed, name)), strict=True):
                by_client.setdefault(client, []).append(value)
        scores.append({client: float(np.mean(values)) for client, values in by_client.items()})
    common = sorted(set.intersection(*(set(s) for s in scores))) if scores else []
    if len(scores) < MIN_RANKED_METHODS or len(common) < MIN_RANKED_BLOCKS:
        raise ConfigError(
            f"critical_difference needs at least {MIN_RANKED_METHODS} methods and {MIN_RANKED_BLOCKS} "
            f"{blocks} with {name!r}, got {len(scores)} methods and {len(common)} {blocks}"
        )
    table = np.array([[score[block] for score in scores] for block in common])
    ranks: NDArray[np.float64] = rankdata(-table if metric(name).higher_is_better else table, axis=1)
    return ranks


def critical_difference(methods: int, blocks: int) -> float:
    """Return Nemenyi's critical difference between mean ranks at level 0.05 (Demsar, JMLR 7, 2006, Section 3.2.2)."""
    from scipy.stats import studentized_range  # slow to import

    quantile = float(studentized_range.ppf(1 - RANK_LEVEL, methods, np.inf)) / math.sqrt(2)
    return quantile * math.sqrt(methods * (methods + 1) / (6 * blocks))


def rank_chart(runs: list[Run], labels: MethodNames, name: str, blocks: Blocks, width: int, height: int | None) -> Spec:
    """Build a critical-difference diagram: mean ranks, with bars connecting indistinguishable methods."""
    ranks = rank_methods(runs, labels, name, blocks)
    mean, limit = ranks.mean(0), critical_difference(ranks.shape[1], len(ranks))
    order = np.argsort(mean, kind="stable")
    names = [labels[labels.rows[k]] for k in order]
    rows: Rows = [{"method": n, "rank": round_significant(float(mean[k]))} for n, k in zip(names, order, strict=True)]
    bars: Rows = []
    reach = 0
    for first, k in enumerate(order):
        last = max(j for j in range(first, len(order)) if mean[order[j]] - mean[k] < limit)
        if last > max(first, reach):
            blank = " " * (len(bars) + 1)  # each bar has its own row with a blank name
            bars.append(
                {
                    "method": blank,
                    "from": round_significant(float(mean[k])),
                    "to": round_significant(float(mean[order[last]])),
                }
            )
            reach = last
    title = f"Mean rank over {len(ranks)} {blocks} (1 is best, critical difference {format_significant(limit)})"
    lines = [*names, *(bar["method"] for bar in bars)]
    x, y = kit.number("rank", title, scale={"domain": [0.8, len(names) + 0.2]}), kit.nominal_channel("method", lines)
    y["axis"] |= {"labelOverlap": False, "ticks": False}
    across: dict[str, Any] = {"y": y, "x": {**x, "field": "from"}, "x2": {"field": "to"}}
    tips = kit.tooltip(("method", "Method"), ("rank", "Mean rank", ".3~g"))
    dot = kit.mark_layer("point", {"x": x, "y": y, "tooltip": tips}, filled=True, size=70, opacity=1)
    layers = [dot, kit.mark_layer("rule", across, data="bars", strokeWidth=4)] if bars else [dot]
    high = height or 22 * len(lines)
    return kit.layer_chart(*layers, width=width, height=high, datasets={"rows": rows, "bars": bars})
