"""Curves of results by round, traffic, work, time and fraction of attackers, and curves of other metrics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedloom.formats import round_significant
from fedloom.lab.report.charts import kit
from fedloom.lab.report.charts.kit import Figure, Rows
from fedloom.lab.report.comparison.criteria import accumulate_cost
from fedloom.lab.report.naming import FIGURE_SECTIONS, MEGABYTE_BYTES, describe_figure, lowercase_title, metric, titled
from fedloom.lab.report.numbers import (
    EMPTY_CURVE,
    MIN_SEEDS,
    MODEL_KINDS,
    Curve,
    Estimate,
    Row,
    benign_curve,
    find_run,
    find_seeds,
    is_other_figure,
)
from fedloom.lab.report.run import Key, Run

POINTS_PER_LINE, POINTS_PER_CROWDED_LINE = 80, 25
"""Maximum number of points per line, followed by the maximum in a chart with many lines. Longer curves are thinned."""
MIN_CROPPED_POINTS = 60
"""Minimum number of points for leaving the worst 5 % of them outside the axis range."""
MIN_LOG_RATIO = 100.0
"""Minimum ratio of the largest to the smallest value for plotting a residual on a logarithmic axis."""

CURVE_AXES = {
    "round": ("by round", "Round", 1.0),
    "bytes": ("by traffic", "Two-way traffic of all clients (MB)", 1 / MEGABYTE_BYTES),
    "samples_backward": ("by sample gradients", "Sample gradients of all clients", 1.0),
    "seconds": ("by time", "Seconds", 1.0),
    "simulated_seconds": ("by simulated time", "Simulated hours", 1 / 3600),
}
FAMILY_NEUTRAL_SETTINGS = ("name", "attack", "engine", "evaluate", "resolved", "tune")
"""Settings that may differ between the runs in one chart of attacks."""


def draw_curves(runs: list[Run], rows: list[Row], lead: str) -> list[Figure | None]:
    """Plot learning curves of the primary metric and the loss, and curves of other federation metrics by round."""
    wanted = [(lead, axis) for axis in CURVE_AXES] + ([("loss", "round")] if lead != "loss" else [])
    totals = dict.fromkeys(k.metric for run in runs for k in run.totals if is_other_figure(k) and k.metric != "dropped")
    figures = [_draw_learning_curves(runs, rows, name, axis) for name, axis in wanted]
    return [
        *figures,
        *(_draw_other(runs, rows, name, f"other-{i}-{kit.make_slug(name)}") for i, name in enumerate(totals, start=1)),
    ]


def _draw_learning_curves(runs: list[Run], rows: list[Row], name: str, axis: str) -> Figure | None:
    data: Rows = []
    idle = []
    for row in rows:
        points = draw_points(find_run(runs, row), row, name, axis, crowded=len(rows) > 12)
        if points and axis != "round" and not any(point["x"] for point in points):
            idle.append(row.name)
        else:
            data += points
    title, label = metric(name).title, CURVE_AXES[axis][0]
    nothing = f" Not shown because they spent nothing: {', '.join(dict.fromkeys(idle))}." if idle else ""
    caption = f"{title}, mean over the clients' test sets, {label}.{nothing}"
    tab = title if axis == "round" else label.removeprefix("by ").capitalize()
    return _draw_method_panels(
        rows, data, name, axis, (f"curves-{name}-{axis}", "curves", tab, f"{title} {label}", caption)
    )


def draw_points(run: Run, row: Row, name: str, axis: str, *, crowded: bool = False) -> Rows:
    """Return a row's learning curve: the mean over the clients' test sets along an axis of `CURVE_AXES`."""
    seeds = find_seeds(run, row.method)
    results = {seed: benign_curve(run, Key(row.method, seed, row.model, "test", name), "mean") for seed in seeds}
    costs = {} if axis == "round" else {seed: accumulate_cost(run, row.method, seed, axis) for seed in seeds}
    return _curve_points(row, name, axis, results, costs, POINTS_PER_CROWDED_LINE if crowded else POINTS_PER_LINE)


def _draw_other(runs: list[Run], rows: list[Row], name: str, id: str) -> Figure | None:
    data: Rows = []
    for row in rows:
        run = find_run(runs, row)
        recorded = {
            s: _recorded_curve(run, Key(row.method, s, row.model, "test", name)) for s in find_seeds(run, row.method)
        }
        data += _curve_points(
            row, name, "round", recorded, {}, POINTS_PER_CROWDED_LINE if len(rows) > 12 else POINTS_PER_LINE
        )
    title = metric(name).title
    return _draw_method_panels(
        rows,
        data,
        name,
        "round",
        (id, FIGURE_SECTIONS.get(name, "others"), title, f"{title} by round", f"{title} by round."),
    )


def _recorded_curve(run: Run, key: Key) -> Curve:
    """Return the curve of a federation metric.

    A metric that does not belong to a model is plotted with the method's first kind of model.
    """
    of_model = [key, key._replace(part="")]
    models = [model for model in MODEL_KINDS if any((k.method, k.model) == (key.method, model) for k in run.totals)]
    places = [*of_model, key._replace(part="", model="")] if models[:1] == [key.model] else of_model
    total = next((run.totals[place] for place in places if place in run.totals), None)
    return Curve(total.round, total.value) if total else EMPTY_CURVE


def _curve_points(
    row: Row, name: str, axis: str, results: dict[int, Curve], costs: dict[int, Curve], most: int
) -> Rows:
    """Return the mean and confidence interval over seeds, or the individual seeds, at no more than ``most`` rounds.

    The horizontal axis shows the round or, if ``costs`` is given, the mean cost.
    """
    scale = metric(name).scale
    rounds = np.unique(np.concatenate([EMPTY_CURVE.round, *(result.round for result in results.values())]))
    points: Rows = []
    for t in (
        rounds[np.unique(np.linspace(0, len(rounds) - 1, most).round().astype(int))].tolist() if len(rounds) else []
    ):
        result_mean = Estimate({seed: result.read_round(t) for seed, result in results.items()})
        spent = Estimate({seed: cost.read_round(t) for seed, cost in costs.items()} if costs else {0: float(t)})
        if result_mean.finite and spent.finite:
            tags = {"method": row.name, "model": row.model, "round": t}
            across = round_significant(spent.mean * CURVE_AXES[axis][2])
            points += [{**tags, "x": across, **point} for point in result_mean.points(scale)]
    return points


def _draw_method_panels(
    rows: list[Row], data: Rows, name: str, axis: str, words: tuple[str, str, str, str, str]
) -> Figure | None:
    """Plot one panel per method, or return None if there are no data.

    ``words`` contains the chart's ID, group, tab, title and caption.
    """
    means = [point for point in data if point["seed"] is None]
    lines = {(point["method"], point["model"]) for point in means}
    if len(means) <= len(lines):
        return None
    shown, title, group = metric(name), CURVE_AXES[axis][1], FIGURE_SECTIONS.get(name)
    values = [point["value"] for point in means]
    log = group == "convergence" and min(values) > 0 and max(values) > MIN_LOG_RATIO * min(values)
    largest = {
        m: max(abs(p["value"]) for p in means if p["method"] == m) for m in dict.fromkeys(p["method"] for p in means)
    }
    off = set() if log else kit.find_off_axis_names(largest)
    near = [p["value"] for p in means if p["method"] not in off]
    trim = 0.05 * (len(values) >= MIN_CROPPED_POINTS and group != "convergence")  # mostly first rounds
    cut = np.quantile(near, (trim, 1.0) if shown.higher_is_better else (0.0, 1.0 - trim)).tolist()
    y = kit.number(
        "value", titled(shown), scale={"type": "log"} if log else {"domain": kit.axis_domain(cut), "nice": False}
    )
    y["axis"] |= {"tickCount": 4, **({"labelExpr": "format(datum.value, '.0e')"} if log else {})}
    x = kit.number("x", axis={"tickCount": 3, "grid": False})
    x["scale"] = {}
    for channel, whole in ((x, axis == "round"), (y, group == "structure")):
        channel["axis"] |= {"tickMinStep": 1} if whole else {}
    across = () if axis == "round" else (("x", title, ",.4~g"),)
    hints = kit.tooltip(("method", "Method"), ("model", "Model"), ("round", "Round"), *across) + kit.interval_tips(
        titled(shown)
    )
    tint = kit.model_color_channel([row for row in rows if (row.name, row.model) in lines])
    spec = kit.line_panels(data, x, y, tint, hints, title)
    id, place, tab, head, caption = words
    return Figure(
        id, place, tab, head, caption + _panel_title(len(largest), means) + kit.axis_note(off), spec, {"rows": data},
        "facet",
    )  # fmt: skip


def _panel_title(panels: int, means: Rows) -> str:
    """Return the sentence that explains the lines of a panel."""
    seeds = max(point["seeds"] for point in means)
    ghosts = "One panel per method, with the other methods in gray" if panels > 1 else ""
    band = "the band shows the 95 % interval over seeds, clipped to the panel"
    thin = "the thick line shows the mean over seeds, and thin lines show individual seeds"
    text = "; ".join(part for part in (ghosts, "" if seeds < 2 else thin if seeds < MIN_SEEDS else band) if part)
    return f" {text[:1].upper()}{text[1:]}." if text else ""


def draw_robustness(runs: list[Run], rows: list[Row], lead: str) -> list[Figure | None]:
    """Plot the benign clients' results by the fraction of attackers.

    For each kind of attack with at least two fractions, one chart shows the mean result and another shows the worst 10
    % of clients.
    """
    figures: list[Figure | None] = []
    for i, (kind, members) in enumerate(_attack_families(runs)):
        for name in (lead, f"{lead}/worst10"):
            id = "-".join(["attacks", *([kit.make_slug(name)] if name != lead else []), *([str(i + 1)] if i else [])])
            figures.append(
                _draw_shares(members, [row for row in rows if find_run(runs, row) in members], name, kind, id)
            )
    return figures


def decide_share(run: Run) -> float:
    """Return the recorded fraction of attacking clients or, if it was not recorded, the experiment's setting."""
    if run.attacked:
        return sum(len(part.attackers) for part in run.partitions.values()) / (len(run.partitions) * run.clients)
    attack: dict[str, Any] = run.options.get("attack", {})
    return float(attack.get("fraction", 0.0)) if attack.get("kind", "none") != "none" else 0.0


def _attack_families(runs: list[Run]) -> list[tuple[str, list[Run]]]:
    """Group runs with the same kind of attack that differ only in the fraction of attackers.

    Runs without attackers belong to every group.
    """
    families: dict[str, tuple[str, list[Run]]] = {}
    for run in runs:
        if decide_share(run) and "attack" in run.options:
            attack = {k: v for k, v in run.options["attack"].items() if k != "fraction"}
            families.setdefault(_attack_family_key(run) + repr(attack), (attack["kind"], []))[1].append(run)
    for same, (_, family) in families.items():
        family[:0] = [run for run in runs if not decide_share(run) and same.startswith(_attack_family_key(run))]
    return [(kind, members) for kind, members in families.values() if len({decide_share(run) for run in members}) > 1]


def _attack_family_key(run: Run) -> str:
    return repr(sorted((k, repr(v)) for k, v in run.options.items() if k not in FAMILY_NEUTRAL_SETTINGS))


def _draw_shares(runs: list[Run], rows: list[Row], name: str, kind: str, id: str) -> Figure | None:
    shown = describe_figure(name)
    data: Rows = []
    for row in rows:
        result = row.figures.get(name)
        if result is not None and math.isfinite(result.mean):
            tags = {"method": row.method, "model": row.model, "run": row.run, "x": decide_share(find_run(runs, row))}
            data += [{**tags, **point} for point in result.points(shown.scale)]
    if not data:
        return None
    order = list(dict.fromkeys(point["method"] for point in data))
    data.sort(key=lambda point: (order.index(point["method"]), point["model"], point["x"]))
    means = [point for point in data if point["seed"] is None]
    off = kit.find_off_axis_names({f"{p['method']} in {p['run']}": p["value"] for p in means})
    near = [p["value"] for p in means if f"{p['method']} in {p['run']}" not in off]
    x = kit.number("x", axis={"tickCount": 3, "grid": False, "labelExpr": "format(datum.value, '.0%')"})
    x["scale"] = {"nice": False, "padding": 7}
    y = kit.number(
        "value", titled(shown), scale={"domain": kit.axis_domain(near), "nice": False}, axis={"tickCount": 4}
    )
    hints = kit.tooltip(("method", "Method"), ("model", "Model"), ("run", "Run"), ("x", "Fraction of attackers", ".0%"))
    below = "Fraction of attacking clients"
    spec = kit.line_panels(
        data, x, y, kit.model_color_channel(rows), hints + kit.interval_tips(titled(shown)), below, dots=1
    )
    base = name.partition("/")[0]
    title = (
        metric(base).title
        if base == name
        else f"{shown.title} of the benign clients, {lowercase_title(metric(base).title)}"
    )
    caption = f"{title} by fraction of attackers ({kind}), benign clients only.{_panel_title(len(order), means)}"
    words = (id, "attacks", f"{shown.title}, {kind}", f"{title} under {kind}", caption + kit.axis_note(off))
    return Figure(*words, spec, {"rows": data}, "facet")
