"""Results of single clients: one by one, as a distribution, over rounds, and relative to a baseline."""

from __future__ import annotations

import json
import math

import numpy as np

from fedloom.report import figure as vl
from fedloom.report.figure import Figure, Rows, Spec
from fedloom.report.naming import METRICS, metric, titled
from fedloom.report.numbers import Estimate, Row, rounded, run_of, seeds_of
from fedloom.report.reading import Integers, Key, Numbers, Run
from fedloom.report.tables import rounded_pair

NAMED, WORST = 60, 40
"""Up to so many clients are shown one by one; of more, so many of the worst."""
WRITTEN = 8
"""Up to so many clients have their number written into the cell."""
DOTS = 2000
"""Up to so many clients (times seeds) of all rows are drawn as dots."""
PANELS = 16
"""Up to so many clients are drawn over rounds."""
POINTS, FEWEST = 2500, 5
"""Up to so many points in all over rounds; lines are thinned, but not below the fewest."""
BASELINES = ("local", "fedavg")
"""The first of these algorithms that was run is the baseline of gains (FedSLR, Fig. 3, has FedAvg)."""

Seeds = dict[int, tuple[Integers, Numbers]]
"""Clients and their values by seed."""


def clients(runs: list[Run], rows: list[Row], lead: str) -> list[Figure | None]:
    """The charts of this module, None for those without data."""
    last = [
        {seed: _last(run_of(runs, row), row, seed, lead) for seed in seeds_of(run_of(runs, row), row.method)}
        for row in rows
    ]
    known = [i for i, seeds in enumerate(last) if any(len(values) for _, values in seeds.values())]
    if not known:
        return []
    sign = 1 if metric(lead).higher else -1
    best = max(known, key=lambda i: sign * np.mean(_pooled(last[i])))
    clients, means = _means(last[best])
    order = clients[np.argsort(sign * means, kind="stable")]
    calibration = (
        [_one_by_one(runs, rows, "calibration_error", order, rows[best])] if lead != "calibration_error" else []
    )
    return [
        _spread(runs, [rows[i] for i in known], [last[i] for i in known], lead),
        _one_by_one(runs, rows, lead, order, rows[best]),
        *calibration,
        _over_rounds(runs, rows, lead, clients, order, rows[best]),
        _relative(runs, rows, lead),
    ]


def without_attackers(runs: list[Run]) -> str:
    """The sentence on attackers for a chart of clients."""
    return " Clients that attacked are left out." if any(run.attacked for run in runs) else ""


def _last(run: Run, row: Row, seed: int, name: str) -> tuple[Integers, Numbers]:
    """Benign clients and their finite values at the last recorded round; none of a seed that was lost."""
    points = run.benign(Key(row.method, seed, row.model, "test", name))
    if points is None or not len(points.round) or seed in row.lost:
        return np.empty(0, np.int64), np.empty(0)
    known = (points.round == points.round[-1]) & np.isfinite(points.value)
    return points.client[known], points.value[known] * metric(name).scale


def _pooled(seeds: Seeds) -> Numbers:
    return np.concatenate([np.empty(0), *(values for _, values in seeds.values())])


def _means(seeds: Seeds) -> tuple[Integers, Numbers]:
    """Clients and their means over seeds."""
    clients, place = np.unique(np.concatenate([own for own, _ in seeds.values()]), return_inverse=True)
    return clients, np.bincount(place, _pooled(seeds)) / np.bincount(place)


def _one_by_one(runs: list[Run], rows: list[Row], name: str, order: Integers, best: Row) -> Figure | None:
    """Rows x clients, mean over seeds; of many clients the worst of the best row."""
    many = max(run.clients for run in runs) > NAMED
    wanted = np.sort(order[:WORST]) if many else None
    data = [cell for row in rows for cell in _cells(run_of(runs, row), row, name, wanted)]
    if not data:
        return None
    shown, title, higher = metric(name), titled(metric(name)), metric(name).higher
    few = len({cell["client"] for cell in data}) <= WRITTEN
    off = vl.off_axis({cell["row"]: max(abs(c["value"]) for c in data if c["row"] == cell["row"]) for cell in data})
    values = [cell["value"] for cell in data if cell["row"] not in off]
    domain = [min(values), max(values)]
    methods = list(dict.fromkeys(cell["row"] for cell in data))
    sites = [run.client(i) for run in runs for i in (order[:WORST].tolist() if many else range(run.clients))]
    spec = vl.heat_map(
        vl.names("client", sites, f"Client, the worst {WORST} first" if many else "Client", scale={"padding": 0.06}),
        vl.names("row", methods, scale={"padding": 0.06}, axis={"labelOverlap": False}),
        vl.shade("value", title, reverse=not higher, domain=domain),
        vl.tips(
            *(("row", "Method"), ("client", "Client"), ("value", title, ".4~g")),
            *(("half", "95 % interval, half width", ".3~g"), ("seeds", "Seeds")),
        ),
        "label" if few else "",
        f"datum.value {'>' if higher else '<'} {sum(domain) / 2!r}",
    )
    which = f"the {WORST} clients that are worst with {best.title}" if many else "every client"
    caption = (
        f"{shown.title} of {which} with every method on its own test part at the last round, mean over seeds"
        + (" with half the width of the 95 % interval" if few else "")
        + f"; darker is better (in the dark look: lighter).{vl.off_words(off)}{without_attackers(runs)}"
    )
    first = shown is not METRICS.get("calibration_error")
    id, tab = ("single-clients", "Client by client") if first else ("single-clients-calibration", shown.title)
    head = f"{shown.title}, client by client"
    spec |= {"width": 640, "height": 26 * len(methods)}
    return Figure(id, "clients", tab, head, caption, spec, {"rows": data}, "wide")


def _cells(run: Run, row: Row, name: str, wanted: Integers | None) -> Rows:
    found: dict[int, dict[int, float]] = {}
    for seed in seeds_of(run, row.method):
        clients, values = _last(run, row, seed, name)
        chosen = np.isin(clients, wanted) if wanted is not None else np.ones(len(clients), bool)
        for client, value in zip(clients[chosen].tolist(), values[chosen].tolist(), strict=True):
            found.setdefault(client, {})[seed] = value
    cells: Rows = []
    for client, by_seed in sorted(found.items()):
        estimate = Estimate(by_seed)
        digits = 1 if metric(name).scale == 100 else 3
        label, half = (rounded_pair(v, math.nan, (digits, digits))[0] for v in (estimate.mean, estimate.half))
        cells.append(
            {
                "row": row.title,
                "method": row.name,
                "model": row.model,
                "client": run.client(client),
                "value": rounded(estimate.mean),
                "half": rounded(estimate.half),
                "seeds": len(by_seed),
                "label": f"{label} ± {half}" if half else label,
                "label_narrow": label,
            }
        )
    return cells


def _spread(runs: list[Run], rows: list[Row], last: list[Seeds], lead: str) -> Figure | None:
    higher, title = metric(lead).higher, titled(metric(lead))
    spec, data, words = _distribution(runs, rows, last, title, -1 if higher else 1)
    caption = (
        f"{metric(lead).title} of single clients on their own test parts at the last round, all seeds together. "
        f"{words}{without_attackers(runs)}"
    )
    return Figure("clients", "clients", "Spread", "How clients differ", caption, spec, data, "wide", table="dots")


def _relative(runs: list[Run], rows: list[Row], lead: str) -> Figure | None:
    """Gain of each client over the baseline with the same seed, above 0 where the method is better (FedSLR, Fig. 3)."""
    shown, sign = metric(lead), 1 if metric(lead).higher else -1
    gains: list[tuple[Row, Seeds]] = []
    against: dict[str, None] = {}
    for row in rows:
        run, base = run_of(runs, row), _baseline(rows, row)
        if base is None or (base.method, base.model) == (row.method, row.model):
            continue
        found: Seeds = {}
        for seed in seeds_of(run, row.method):
            (ids, own), (others, other) = (_last(run, r, seed, lead) for r in (row, base))
            both, i, j = np.intersect1d(ids, others, assume_unique=True, return_indices=True)
            found[seed] = (both, sign * (own[i] - other[j]))
        if len(_pooled(found)) > 1:
            against[base.name] = None
            gains.append((row, found))
    if not gains:
        return None
    compared, found_gains = [row for row, _ in gains], [found for _, found in gains]
    axis = f"Gain in {shown.title}{' (points)' * (shown.scale == 100)}"
    spec, data, words = _distribution(runs, compared, found_gains, axis, -1, zero=True)
    base_names = " or ".join(against)
    caption = (
        f"Gain of each client: its {shown.title} on its own test part at the last round "
        + (f"minus that of {base_names}" if sign > 0 else f"subtracted from that of {base_names}")
        + f" with the same seed; right of the red line clients gain, left of it they lose. {words}"
        f"{without_attackers(runs)}"
    )
    title = f"Gain in {shown.title} over {base_names}"
    return Figure("relative", "clients", f"Gain over {base_names}", title, caption, spec, data, "wide", table="dots")


def _baseline(rows: list[Row], row: Row) -> Row | None:
    """The row of the same run that the others are compared with."""
    own = [other for other in rows if other.run == row.run]
    found = [r for name in BASELINES for r in own if r.algorithm == name and r.model in ("global", "personal")]
    return found[0] if found else None


def _distribution(
    runs: list[Run], rows: list[Row], found: list[Seeds], title: str, sign: int, *, zero: bool = False
) -> tuple[Spec, dict[str, Rows], str]:
    """Density, quantiles and clients of every row, sorted by median; specification, data sets, and words on them."""
    order = sorted(range(len(rows)), key=lambda i: sign * float(np.median(_pooled(found[i]))))
    boxes: Rows = []
    dots: Rows = []
    some = False
    cuts = ("minimum", "p10", "p25", "median", "p75", "p90", "maximum")
    for place, i in enumerate(order):
        values = _pooled(found[i])
        tags = {"row": rows[i].title, "model": rows[i].model, "place": place}
        quantiles = np.quantile(values, [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1])
        box = {name: rounded(float(value)) for name, value in zip(cuts, quantiles, strict=True)}
        more = {"better": rounded(float((values > 0).mean()))} if zero else {}
        boxes.append({**tags, "method": rows[i].name, **box, **more, "clients": len(values)})
        seeds = np.concatenate([np.full(len(own), seed) for seed, (own, _) in found[i].items()])
        clients = np.concatenate([own for own, _ in found[i].values()])
        most = max(40, DOTS // len(rows))
        some |= len(values) > most
        for k in np.argsort(values, kind="stable")[np.linspace(0, len(values) - 1, min(len(values), most)).astype(int)]:
            client = run_of(runs, rows[i]).client(int(clients[k]))
            dots.append({**tags, "seed": int(seeds[k]), "client": client, "value": rounded(float(values[k]))})
    low, high = min(box["p10"] for box in boxes), max(box["p90"] for box in boxes)
    off = vl.off_axis({box["row"]: max(abs(box["p10"]), abs(box["p90"])) for box in boxes} if not zero else {})
    if off:
        low, high = (f(box[n] for box in boxes if box["row"] not in off) for f, n in ((min, "p10"), (max, "p90")))
    room = 1.5 * (high - low) or 1.0
    ends = [max(low - room, min(b["minimum"] for b in boxes)), min(high + room, max(b["maximum"] for b in boxes))]
    air = 0.03 * (ends[1] - ends[0]) or 0.5
    labels = json.dumps([box["row"] for box in boxes])
    axis = {"values": list(range(len(boxes))), "labelExpr": f"{labels}[datum.value]", "labelLimit": 190, "grid": False}
    y = {"field": "place", "type": "quantitative", "title": None, "axis": axis}
    y["scale"] = {"domain": [len(boxes) - 0.5, -0.5], "nice": False}
    x = vl.number(
        "value", title, scale={"domain": [ends[0] - air, ends[1] + air], "nice": False}, axis={"tickCount": 6}
    )
    tint = vl.colour(rows)
    quantile_tips = vl.tips(
        ("row", "Method"), *((n, n, ".4~g") for n in cuts[1:6]), *((("better", "gain", ".0%"),) if zero else ())
    )
    box_y = {**y, "field": "middle"}
    cloud: list[Spec] = [
        {"joinaggregate": [{"op": op, "field": "value", "as": op} for op in ("min", "max")], "groupby": ["row"]},
        {"filter": "datum.max > datum.min"},  # equal values have no density
        {"density": "value", "groupby": ["row", "model", "place"], "steps": 80},
        {"joinaggregate": [{"op": "max", "field": "density", "as": "top"}], "groupby": ["row"]},
        {"calculate": "datum.place - 0.42 * datum.density / datum.top", "as": "up"},
    ]
    down = {"calculate": "datum.place + 0.32", "as": "middle"}
    here = {"calculate": "datum.place + 0.1", "as": "middle"}
    dot = vl.tips(("row", "Method"), ("client", "Client"), ("seed", "Seed"), ("value", title, ".4~g"))
    box_at = {"y": box_y, "tooltip": quantile_tips}
    look: Spec = {"shape": "circle", "size": 42, "fill": "white", "stroke": "black", "strokeWidth": 1.2, "opacity": 1}
    shape = {"x": x, "y": {**y, "field": "up"}, "y2": {"field": "place"}, "detail": {"field": "row"}, "color": tint}
    spread = any(box["maximum"] > box["minimum"] for box in boxes)
    layers = [
        *([vl.mark("area", shape, *cloud, data="dots", opacity=0.45, clip=True, tooltip=None)] if spread else []),
        vl.mark(
            "point",
            {"x": x, "y": box_y, "color": tint, "tooltip": dot},
            down,
            data="dots",
            size=18,
            opacity=0.3,
            clip=True,
        ),
        *([vl.mark("rule", {"x": {"datum": 0}}, color="#d33f3f", strokeWidth=1.4, aria=False)] if zero else []),
        vl.mark(
            "rule",
            {**box_at, "x": {**x, "field": "p10"}, "x2": {"field": "p90"}, "color": tint},
            here,
            strokeWidth=1.4,
            clip=True,
        ),
        vl.mark(
            "rule",
            {**box_at, "x": {**x, "field": "p25"}, "x2": {"field": "p75"}, "color": tint},
            here,
            strokeWidth=6,
            clip=True,
        ),
        vl.mark("point", {**box_at, "x": {**x, "field": "median"}}, here, clip=True, **look),
    ]
    spec = vl.chart(*layers, width=640, height=52 * len(boxes))
    each = "a sample of the clients, evenly from the worst to the best" if some else "every client"
    hill = "Hill: density; white" if spread else "White"
    words = f"{hill} dot: median; thick line: middle half; thin line: 10 % to 90 %; small dots: {each}."
    cut = any(box["minimum"] < ends[0] or box["maximum"] > ends[1] for box in boxes if box["row"] not in off)
    return (
        spec,
        {"rows": boxes, "dots": dots},
        words + " Some clients lie outside of the axis." * cut + vl.off_words(off),
    )


def _over_rounds(
    runs: list[Run], rows: list[Row], lead: str, clients: Integers, order: Integers, best: Row
) -> Figure | None:
    """A panel per client with a line per row, mean over seeds; the best row of all is thick."""
    if len(order) > PANELS:
        clients = order[np.linspace(0, len(order) - 1, PANELS).round().astype(int)]
    lines = {row.title: _lines(run_of(runs, row), row, lead, clients) for row in rows}
    models = {row.title: row.model for row in rows}
    budget = max(FEWEST, POINTS // (len(lines) * len(clients)))
    off = vl.off_axis(
        {r: max((abs(v) for line in own.values() for _, v in line), default=0.0) for r, own in lines.items()}
    )
    data: Rows = []
    shown = [run_of(runs, best).titled_client(client) for client in clients.tolist()]
    for row, own in lines.items():
        for client in [name for name in shown if name in own]:
            values = own[client]
            kept = np.unique(np.linspace(0, len(values) - 1, min(budget, len(values))).round().astype(int))
            tags = {"client": client, "row": row, "model": models[row]}
            data += [{**tags, "round": int(values[k][0]), "value": rounded(values[k][1])} for k in kept]
    if len({point["round"] for point in data}) < 2:
        return None
    some = f" {len(clients)} of {len(order)} clients, from the worst to the best of it." if len(order) > PANELS else ""
    caption = (
        f"{metric(lead).title} of each client on its own test part, a line per method and model, mean over seeds. "
        f"Thick: {best.title}, the best mean over all clients.{some}{vl.off_words(off)}{without_attackers(runs)}"
    )
    title = titled(metric(lead))
    near = [point["value"] for point in data if point["row"] not in off]
    x = vl.number("round", axis={"tickCount": 3, "grid": False})
    y = vl.number("value", title, axis={"tickCount": 4}, scale={"domain": [min(near), max(near)]} if off else {})
    place = {"x": x, "y": y, "color": vl.colour(rows), "detail": {"field": "row"}}
    hints = vl.tips(("client", "Client"), ("row", "Method"), ("round", "Round"), ("value", title, ".4~g"))
    inner = vl.chart(
        vl.mark("line", place, strokeWidth=1, opacity=0.45, tooltip=None, clip=True),
        vl.mark(
            "line", place, {"filter": {"field": "row", "equal": best.title}}, strokeWidth=2.6, tooltip=None, clip=True
        ),
        vl.mark("point", {**place, "tooltip": hints}, size=40, opacity=0, clip=True),
    )
    head = f"{metric(lead).title} of each client over rounds"
    spec = vl.panels(inner, "client", shown, "Round")
    return Figure("each-client", "clients", "Over rounds", head, caption, spec, {"rows": data}, "facet")


def _lines(run: Run, row: Row, name: str, clients: Integers) -> dict[str, list[tuple[int, float]]]:
    """Rounds and means over seeds by client; attackers are left out."""
    found: dict[tuple[int, int], list[float]] = {}
    for seed in seeds_of(run, row.method):
        points = run.benign(Key(row.method, seed, row.model, "test", name))
        if points is None or seed in row.lost:
            continue
        known = np.isfinite(points.value) & np.isin(points.client, clients)
        columns = (points.client[known].tolist(), points.round[known].tolist(), points.value[known].tolist())
        for client, t, value in zip(*columns, strict=True):
            found.setdefault((client, t), []).append(value * metric(name).scale)
    lines: dict[str, list[tuple[int, float]]] = {}
    for (client, t), values in sorted(found.items()):
        lines.setdefault(run.titled_client(client), []).append((t, sum(values) / len(values)))
    return lines
