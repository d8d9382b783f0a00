"""Plot individual clients' results, as a heat map and as curves over rounds."""

from __future__ import annotations

import math

import numpy as np

from fedloom.formats import format_interval, format_pair, round_significant
from fedloom.lab.report.charts import kit
from fedloom.lab.report.charts.kit import Figure, Rows
from fedloom.lab.report.charts.spread import (
    Seeds,
    attackers_sentence,
    draw_gains_over_baseline,
    draw_spread,
    last_results,
    pool_seed_values,
)
from fedloom.lab.report.comparison.contenders import best_row
from fedloom.lab.report.comparison.criteria import group_comparable_runs
from fedloom.lab.report.naming import METRICS, metric, titled
from fedloom.lab.report.numbers import Estimate, Row, find_run, find_seeds
from fedloom.lab.report.run import Integers, Key, Numbers, Run

MAX_LABELED_CLIENTS, WORST_CLIENTS_SHOWN = 60, 40
"""Maximum number of clients that are shown individually, and number of worst clients shown if there are more."""
MAX_NUMBERED_CLIENTS = 8
"""Maximum number of clients in a heat map with printed values."""
MAX_CLIENT_PANELS = 16
"""Maximum number of clients whose results are plotted over rounds."""
MAX_LINE_POINTS, MIN_LINE_POINTS = 2500, 5
"""Maximum total number of plotted points, and minimum number of points per line after thinning."""


def draw_clients(runs: list[Run], rows: list[Row], lead: str) -> list[Figure | None]:
    """Return this module's charts. A chart without data is None."""
    last = [
        {
            seed: last_results(find_run(runs, row), row, seed, lead)
            for seed in find_seeds(find_run(runs, row), row.method)
        }
        for row in rows
    ]
    scored = [i for i, seeds in enumerate(last) if any(len(values) for _, values in seeds.values())]
    if not scored:
        return []
    sign = 1 if metric(lead).higher_is_better else -1
    shown = [rows[i] for i in scored]
    leaders = [
        best for _, _, peers in group_comparable_runs(runs, shown) if (best := best_row(peers, lead)) is not None
    ]
    first = leaders[0] if leaders else shown[0]
    clients, means = _client_means(last[next(i for i in scored if rows[i] is first)])
    order = clients[np.argsort(sign * means, kind="stable")]
    calibration = (
        [_draw_client_heat_map(runs, rows, "calibration_error", order, first)] if lead != "calibration_error" else []
    )
    return [
        draw_spread(runs, shown, [last[i] for i in scored], lead),
        _draw_client_heat_map(runs, rows, lead, order, first),
        *calibration,
        _draw_client_panels(runs, rows, lead, clients, order, first, leaders),
        draw_gains_over_baseline(runs, rows, lead),
    ]


def _client_means(seeds: Seeds) -> tuple[Integers, Numbers]:
    """Return the IDs of all clients, and each client's mean over seeds."""
    clients, place = np.unique(np.concatenate([ids for ids, _ in seeds.values()]), return_inverse=True)
    return clients, np.bincount(place, pool_seed_values(seeds)) / np.bincount(place)


def _draw_client_heat_map(runs: list[Run], rows: list[Row], name: str, order: Integers, best: Row) -> Figure | None:
    """Plot a heat map of the means over seeds for each method and client.

    If there are many clients, show only the best method's worst clients. Return None if there are no data.
    """
    many = max(run.clients for run in runs) > MAX_LABELED_CLIENTS
    wanted = np.sort(order[:WORST_CLIENTS_SHOWN]) if many else None
    data = [cell for row in rows for cell in _client_cells(find_run(runs, row), row, name, wanted)]
    if not data:
        return None
    shown, title, higher = metric(name), titled(metric(name)), metric(name).higher_is_better
    few = len({cell["client"] for cell in data}) <= MAX_NUMBERED_CLIENTS
    off = kit.find_off_axis_names(
        {cell["row"]: max(abs(c["value"]) for c in data if c["row"] == cell["row"]) for cell in data}
    )
    values = [cell["value"] for cell in data if cell["row"] not in off]
    domain = [min(values), max(values)]
    methods = list(dict.fromkeys(cell["row"] for cell in data))
    sites = [
        run.client(i) for run in runs for i in (order[:WORST_CLIENTS_SHOWN].tolist() if many else range(run.clients))
    ]
    spec = kit.heat_map(
        kit.nominal_channel(
            "client",
            sites,
            f"Client, the worst {WORST_CLIENTS_SHOWN} first" if many else "Client",
            scale={"padding": 0.06},
        ),
        kit.nominal_channel("row", methods, scale={"padding": 0.06}, axis={"labelOverlap": False}),
        kit.intensity_channel("value", title, reverse=not higher, domain=domain),
        kit.tooltip(
            *(("row", "Method"), ("client", "Client"), ("value", title, ".4~g")),
            *(("half", "half-width of the 95 % interval", ".3~g"), ("seeds", "Seeds")),
        ),
        "label" if few else "",
        f"datum.value {'>' if higher else '<'} {sum(domain) / 2!r}",
    )
    selection = f"the {WORST_CLIENTS_SHOWN} clients with the worst results of {best.title}" if many else "every client"
    caption = (
        f"{shown.title} of {selection} on its own test set in the last round, for every method, mean over seeds"
        + (" with half the width of the 95 % interval" if few else "")
        + f". Darker is better (in dark mode: lighter).{kit.axis_note(off)}{attackers_sentence(runs)}"
    )
    first = shown is not METRICS.get("calibration_error")
    id, tab = ("single-clients", "Client by client") if first else ("single-clients-calibration", shown.title)
    head = f"{shown.title}, client by client"
    spec |= {"width": 640, "height": 26 * len(methods)}
    return Figure(id, "clients", tab, head, caption, spec, {"rows": data}, "wide")


def _client_cells(run: Run, row: Row, name: str, wanted: Integers | None) -> Rows:
    by_client: dict[int, dict[int, float]] = {}
    for seed in find_seeds(run, row.method):
        clients, values = last_results(run, row, seed, name)
        chosen = np.isin(clients, wanted) if wanted is not None else np.ones(len(clients), bool)
        for client, value in zip(clients[chosen].tolist(), values[chosen].tolist(), strict=True):
            by_client.setdefault(client, {})[seed] = value
    cells: Rows = []
    for client, by_seed in sorted(by_client.items()):
        estimate = Estimate(by_seed)
        digits = 1 if metric(name).scale == 100 else 3
        label, half = (format_interval(v, math.nan, (digits, digits))[0] for v in (estimate.mean, estimate.half))
        cells.append(
            {
                "row": row.title,
                "method": row.name,
                "model": row.model,
                "client": run.client(client),
                "value": round_significant(estimate.mean),
                "half": round_significant(estimate.half),
                "seeds": len(by_seed),
                "label": format_pair(label, half),
                "label_narrow": label,
            }
        )
    return cells


def _draw_client_panels(
    runs: list[Run], rows: list[Row], lead: str, clients: Integers, order: Integers, first: Row, leaders: list[Row]
) -> Figure | None:
    """Plot a panel for each client, with one line per method and model, averaged over seeds.

    Return None if there are no data. The best methods have thick lines.
    """
    if len(order) > MAX_CLIENT_PANELS:
        clients = order[np.linspace(0, len(order) - 1, MAX_CLIENT_PANELS).round().astype(int)]
    lines = {row.title: _client_lines(find_run(runs, row), row, lead, clients) for row in rows}
    models = {row.title: row.model for row in rows}
    budget = max(MIN_LINE_POINTS, MAX_LINE_POINTS // (len(lines) * len(clients)))
    off = kit.find_off_axis_names(
        {
            r: max((abs(v) for line in by_client.values() for _, v in line), default=0.0)
            for r, by_client in lines.items()
        }
    )
    data: Rows = []
    shown = [find_run(runs, first).titled_client(client) for client in clients.tolist()]
    for row, by_client in lines.items():
        for client in [name for name in shown if name in by_client]:
            values = by_client[client]
            kept = np.unique(np.linspace(0, len(values) - 1, min(budget, len(values))).round().astype(int))
            tags = {"client": client, "row": row, "model": models[row]}
            data += [{**tags, "round": int(values[k][0]), "value": round_significant(values[k][1])} for k in kept]
    if len({point["round"] for point in data}) < 2:
        return None
    some = f" {len(clients)} of {len(order)} clients, from the worst to the best with {first.title}."
    titles = [row.title for row in leaders]
    apart = " among runs with the same data and attack" if len(leaders) > 1 else ""
    thick = f" Thick: {' and '.join(titles)}, the best mean over all clients{apart}." if leaders else ""
    caption = (
        f"{metric(lead).title} of each client on its own test set, with one line per method and model, mean over "
        f"seeds.{thick}{some if len(order) > MAX_CLIENT_PANELS else ''}{kit.axis_note(off)}{attackers_sentence(runs)}"
    )
    title = titled(metric(lead))
    near = [point["value"] for point in data if point["row"] not in off]
    x = kit.number("round", axis={"tickCount": 3, "grid": False})
    y = kit.number("value", title, axis={"tickCount": 4}, scale={"domain": [min(near), max(near)]} if off else {})
    place = {"x": x, "y": y, "color": kit.model_color_channel(rows), "detail": {"field": "row"}}
    hints = kit.tooltip(("client", "Client"), ("row", "Method"), ("round", "Round"), ("value", title, ".4~g"))
    inner = kit.layer_chart(
        kit.mark_layer("line", place, strokeWidth=1, opacity=0.45, tooltip=None, clip=True),
        kit.mark_layer(
            "line", place, {"filter": {"field": "row", "oneOf": titles}}, strokeWidth=2.6, tooltip=None, clip=True
        ),
        kit.mark_layer("point", {**place, "tooltip": hints}, size=40, opacity=0, clip=True),
    )
    head = f"{metric(lead).title} of each client over rounds"
    spec = kit.facet_panels(inner, "client", shown, "Round")
    return Figure("each-client", "clients", "Over rounds", head, caption, spec, {"rows": data}, "facet")


def _client_lines(run: Run, row: Row, name: str, clients: Integers) -> dict[str, list[tuple[int, float]]]:
    """Return pairs (round, mean over seeds), keyed by client. Attackers are excluded."""
    by_place: dict[tuple[int, int], list[float]] = {}
    for seed in find_seeds(run, row.method):
        points = run.benign(Key(row.method, seed, row.model, "test", name))
        if points is None or seed in row.lost_seeds:
            continue
        wanted = np.isfinite(points.value) & np.isin(points.client, clients)
        columns = (points.client[wanted].tolist(), points.round[wanted].tolist(), points.value[wanted].tolist())
        for client, t, value in zip(*columns, strict=True):
            by_place.setdefault((client, t), []).append(value * metric(name).scale)
    lines: dict[str, list[tuple[int, float]]] = {}
    for (client, t), values in sorted(by_place.items()):
        lines.setdefault(run.titled_client(client), []).append((t, sum(values) / len(values)))
    return lines
