"""Plot the spread across clients of results and of gains over a baseline."""

from __future__ import annotations

import numpy as np

from fedloom.formats import round_significant
from fedloom.lab.report.charts import kit
from fedloom.lab.report.charts.kit import Figure, Rows, Spec
from fedloom.lab.report.naming import lowercase_title, metric, titled
from fedloom.lab.report.numbers import BASELINE_ROLES, Row, find_run, find_seeds
from fedloom.lab.report.run import Integers, Key, Numbers, Run

MAX_DOTS, MIN_ROW_DOTS = 2000, 40
"""Maximum number of dots (clients times seeds) in all rows, and number of dots that each row always shows. 2,000 dots
take up about 120 kB on the page."""
Seeds = dict[int, tuple[Integers, Numbers]]
"""Clients and their values for each seed, keyed by seed."""


def attackers_sentence(runs: list[Run]) -> str:
    """Return the sentence about attackers for the caption of a client chart."""
    return " Attacking clients are not shown." if any(run.attacked for run in runs) else ""


def last_results(run: Run, row: Row, seed: int, name: str) -> tuple[Integers, Numbers]:
    """Return the benign clients and their finite values in the last recorded round.

    Both arrays are empty if a seed has no results.
    """
    points = run.benign(Key(row.method, seed, row.model, "test", name))
    if points is None or not len(points.round) or seed in row.lost_seeds:
        return np.empty(0, np.int64), np.empty(0)
    scored = (points.round == points.round[-1]) & np.isfinite(points.value)
    return points.client[scored], points.value[scored] * metric(name).scale


def pool_seed_values(seeds: Seeds) -> Numbers:
    """Return the values of all seeds as one array."""
    return np.concatenate([np.empty(0), *(values for _, values in seeds.values())])


def draw_spread(runs: list[Run], rows: list[Row], last: list[Seeds], lead: str) -> Figure | None:
    """Plot how the primary metric varies across clients, or return None if there are no data."""
    higher, title = metric(lead).higher_is_better, titled(metric(lead))
    spec, data, words = _draw_box_plots(runs, rows, last, title, -1 if higher else 1)
    caption = (
        f"{metric(lead).title} of individual clients on their own test sets in the last round, all seeds combined. "
        f"{words}{attackers_sentence(runs)}"
    )
    return Figure("clients", "clients", "Spread", "How clients differ", caption, spec, data, "wide", table="dots")


def draw_gains_over_baseline(runs: list[Run], rows: list[Row], lead: str) -> Figure | None:
    """Plot each client's gain over the baseline with the same seed, or return None if there are no gains.

    A positive gain means that the method is better (as in Fig. 3 of the FedSLR paper).
    """
    shown, sign = metric(lead), 1 if metric(lead).higher_is_better else -1
    gains: list[tuple[Row, Seeds]] = []
    against: dict[str, None] = {}
    for row in rows:
        run, base = find_run(runs, row), _baseline_row(rows, row)
        if base is None or (base.method, base.model) == (row.method, row.model):
            continue
        by_seed: Seeds = {}
        for seed in find_seeds(run, row.method):
            (ids, scores), (base_ids, base_scores) = (last_results(run, r, seed, lead) for r in (row, base))
            both, i, j = np.intersect1d(ids, base_ids, assume_unique=True, return_indices=True)
            by_seed[seed] = (both, sign * (scores[i] - base_scores[j]))
        if len(pool_seed_values(by_seed)) > 1:
            against[base.name] = None
            gains.append((row, by_seed))
    if not gains:
        return None
    compared, found_gains = [row for row, _ in gains], [by_seed for _, by_seed in gains]
    name = lowercase_title(shown.title)
    axis = f"Gain in {name}{' (points)' * (shown.scale == 100)}"
    spec, data, words = _draw_box_plots(runs, compared, found_gains, axis, -1, zero=True)
    base_names = " or ".join(against)
    caption = (
        f"Gain of each client: its {name} on its own test set in the last round, "
        + (f"minus its {name} with {base_names}" if sign > 0 else f"subtracted from its {name} with {base_names}")
        + " and the same seed. Clients to the right of the red line gain, and clients to the left of it "
        f"lose. {words}{attackers_sentence(runs)}"
    )
    title = f"Gain in {name} over {base_names}"
    return Figure("relative", "clients", f"Gain over {base_names}", title, caption, spec, data, "wide", table="dots")


def _baseline_row(rows: list[Row], row: Row) -> Row | None:
    """Return the baseline row of the same run, or None if there is none."""
    same_run = [other for other in rows if other.run == row.run]
    candidates = [
        r for role in BASELINE_ROLES for r in same_run if r.role == role and r.model in ("global", "personal")
    ]
    return candidates[0] if candidates else None


def _draw_box_plots(
    runs: list[Run], rows: list[Row], scores: list[Seeds], title: str, sign: int, *, zero: bool = False
) -> tuple[Spec, dict[str, Rows], str]:
    """Plot box plots of the clients' values, sorted by median, with one dot per client below each box.

    Args:
        runs: runs that contain the rows.
        rows: rows of the results table to compare.
        scores: client values for each row.
        title: title of the axis.
        sign: 1 to put the smallest median at the top, or -1 to put the largest median at the top.
        zero: True to draw a vertical line at 0.

    Returns:
        The chart specification, its data sets, and a sentence that explains the chart.
    """
    order = sorted(range(len(rows)), key=lambda i: sign * float(np.median(pool_seed_values(scores[i]))))
    boxes: Rows = []
    dots: Rows = []
    most = max(MIN_ROW_DOTS, MAX_DOTS // len(rows))
    for i in order:
        values, tags = pool_seed_values(scores[i]), {"row": rows[i].title, "model": rows[i].model}
        p10, q1, median, q3, p90 = (
            round_significant(float(v)) for v in np.quantile(values, [0.1, 0.25, 0.5, 0.75, 0.9])
        )
        box = {"minimum": round_significant(values.min()), "p10": p10, "q1": q1, "median": median, "q3": q3, "p90": p90}
        more = {"better": round_significant(float((values > 0).mean()))} if zero else {}
        boxes.append({**tags, "method": rows[i].name, **box, "maximum": round_significant(values.max()), **more,
                      "clients": len(values)})  # fmt: skip
        seeds = np.concatenate([np.full(len(ids), seed) for seed, (ids, _) in scores[i].items()])
        clients = np.concatenate([ids for ids, _ in scores[i].values()])
        places = np.linspace(0, len(values) - 1, min(len(values), most)).astype(int)
        for k in np.argsort(values, kind="stable")[places].tolist():
            client = find_run(runs, rows[i]).client(int(clients[k]))
            dots.append({**tags, "seed": int(seeds[k]), "client": client, "value": round_significant(float(values[k]))})
    off = (
        set() if zero else kit.find_off_axis_names({box["row"]: max(abs(box["p10"]), abs(box["p90"])) for box in boxes})
    )
    near = [box for box in boxes if box["row"] not in off]
    low, high = min(box["p10"] for box in near), max(box["p90"] for box in near)
    room = 1.5 * (high - low) or 1.0
    ends = [max(low - room, min(box["minimum"] for box in near)), min(high + room, max(b["maximum"] for b in near))]
    scale = {"domain": kit.axis_domain(ends, 0.03), "nice": False}
    x = kit.number("value", title, scale=scale, axis={"tickCount": 6})
    y = kit.nominal_channel("row", [box["row"] for box in boxes], axis={"labelOverlap": False})
    place, tint = {"x": x, "y": y}, kit.model_color_channel(rows)
    quartiles = kit.tooltip(
        *(("row", "Method"), ("q1", "a quarter below", ".4~g"), ("median", "median", ".4~g")),
        ("q3", "a quarter above", ".4~g"),
        *((("better", "gain", ".0%"),) if zero else ()),
    )
    summary = {"lookup": "row", "from": {"data": {"name": "rows"}, "key": "row", "fields": ["q1", "q3", "better"]}}
    middle = {"joinaggregate": [{"op": "median", "field": "value", "as": "median"}], "groupby": ["row"]}
    dot = kit.tooltip(("row", "Method"), ("client", "Client"), ("seed", "Seed"), ("value", title, ".4~g"))
    box_plot = {"size": 9, "outliers": False, "opacity": 0.75, "median": {"color": "white", "strokeWidth": 2}}
    layers = [
        *([kit.mark_layer("rule", {"x": {"datum": 0}}, color="#d33f3f", strokeWidth=1.4, aria=False)] if zero else []),
        kit.mark_layer("boxplot", {**place, "color": tint, "tooltip": quartiles}, summary, middle, data="dots",
                 clip=True, **box_plot),
        kit.mark_layer("point", {**place, "color": tint, "tooltip": dot}, data="dots", size=18, opacity=0.3, clip=True,
                 yOffset=13),
    ]  # fmt: skip
    spec = kit.layer_chart(*layers, width=640, height=44 * len(boxes))
    thinned = any(box["clients"] > most for box in boxes)
    each = "evenly spaced clients from worst to best" if thinned else "all clients"
    words = f"Box: middle half, with the median. Whiskers: clients within 1.5 box lengths of the box. Dots: {each}."
    cut = any(box["minimum"] < ends[0] or box["maximum"] > ends[1] for box in near)
    return (
        spec,
        {"rows": boxes, "dots": dots},
        words + " Some clients are outside the axis range." * cut + kit.axis_note(off),
    )
