"""Plot how samples are split across clients: their classes, each seed's skew, and the recovered clusters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from fedloom.formats import format_fixed, format_significant, round_significant
from fedloom.lab.report.charts import kit
from fedloom.lab.report.charts.kit import Figure, Rows, Spec
from fedloom.lab.report.markup import render_scrolling_table
from fedloom.lab.report.numbers import Row, find_run, find_seeds
from fedloom.lab.report.run import Integers, Key, Numbers, Run, RunPartition

MAX_CLASS_CELLS = 4_000
"""Maximum number of cells (clients times classes) to plot."""
ATTACKER_FLAG = "\N{BLACK FLAG}"
"""Mark after the name of an attacking client."""
MAX_LISTED_CLIENTS = 60
"""Maximum number of clients whose names are shown. If there are more, clients are sorted by their most frequent class
and are not named."""
MAX_DRAWN_PARTITIONS = 10
"""Maximum number of a run's partitions to plot. Fewer partitions are plotted if they are large."""
MAX_CLUSTER_ROUNDS, MAX_CLUSTERED_CLIENTS = 60, 60
"""Maximum number of rounds, and maximum number of clients, in a chart of recovered clusters."""
SHARE_FIGURE = "share"
"""Name of the metric that records a client's weight in the objective, if the weights depend on recovered clusters."""
PARTITION_TITLES = {
    "sizes": "Samples per client",
    "emd": "Earth mover's distance",
    "js": "Jensen-Shannon divergence",
    "effective_classes": "Effective classes",
}


class PartitionSkew(NamedTuple):
    """Measures of heterogeneity across a partition's clients.

    Each array contains one value per client, which is NaN for a client without samples.

    Attributes:
        label: label of the runs.
        values: ``sizes``, the numbers of samples per client. For classes, three additional measures compare each
            client's labels with all clients' labels: ``emd`` (sum of absolute differences, in [0, 2]), ``js``
            (Jensen-Shannon divergence to base 2, in [0, 1]) and ``effective_classes`` (exponential of the entropy).
    """

    run: Run
    label: str
    seed: int
    values: dict[str, Numbers]


def draw_splits(runs: list[Run]) -> list[Figure | None]:
    """Plot the partitions of all seeds, with at most `MAX_CLASS_CELLS` cells in total.

    Runs on the same data share one chart.
    """
    figures: list[Figure | None] = []
    for place, group in enumerate(_group_by_data(runs), start=1):
        skews = _partition_skews(group)
        size = max((skew.run.partitions[skew.seed].counts.size for skew in skews), default=1)
        several = len(runs) != len(group)
        for index, skew in enumerate(skews[: max(1, min(MAX_DRAWN_PARTITIONS, MAX_CLASS_CELLS // max(size, 1)))]):
            id = f"partition-{place}-{index}" if several else f"partition-{index}"
            figures.append(_draw_partition(skew, id, f"{skew.label}, " if several else ""))
    return figures


def skew_table(runs: list[Run]) -> str:
    """Render an HTML table with the mean, minimum and maximum skew over clients, for each run and seed."""
    groups = _group_by_data(runs)
    skews = [skew for group in groups for skew in _partition_skews(group)]
    if not skews:
        return ""
    shown = [name for name in PARTITION_TITLES if any(name in skew.values for skew in skews)]
    several = len(groups) > 1
    lines = [
        [*([skew.label] if several else []), str(skew.seed), *(_range_text(skew.values.get(n)) for n in shown)]
        for skew in skews
    ]
    if len(skews) > 1:
        pooled = (np.concatenate([skew.values.get(n, np.empty(0)) for skew in skews]) for n in shown)
        lines.append(["All", *([""] if several else []), *(_range_text(values) for values in pooled)])
    heads = [*(["Run"] if several else []), "Seed", *(PARTITION_TITLES[name] for name in shown)]
    labels = (
        " Earth mover's distance (0 to 2) and Jensen-Shannon divergence (0 to 1) compare a client's labels with all "
        "clients' labels. Effective classes are the exponential of the entropy of its labels."
    )
    return (
        "<h3>Skew by seed</h3><p class=lead>Mean over clients, with the minimum and maximum."
        f"{labels if 'emd' in shown else ''}</p>{render_scrolling_table('Skew by seed', heads, lines)}"
    )


def _range_text(values: Numbers | None) -> str:
    finite = np.empty(0) if values is None else values[np.isfinite(values)]
    if not len(finite):
        return ""
    mean, low, high = (
        format_fixed(v, 2 if finite.max() < 20 else 0) for v in (finite.mean(), finite.min(), finite.max())
    )
    return Markup('{} <span class="half">{} to {}</span>').format(mean, low, high)


def _group_by_data(runs: list[Run]) -> list[list[Run]]:
    """Group runs with the same class counts at each client for every seed."""
    groups: dict[int, list[Run]] = {}
    for run in runs:
        tables = tuple((seed, p.counts.tobytes(), p.sizes.tobytes()) for seed, p in run.partitions.items())
        if tables:
            groups.setdefault(hash((tables, tuple(run.names))), []).append(run)
    return list(groups.values())


def _partition_skews(group: list[Run]) -> list[PartitionSkew]:
    """Compute the skew of every recorded partition in a group of runs on the same data."""
    label = ", ".join(run.label for run in group)
    return [PartitionSkew(group[0], label, seed, _skew_of_part(part)) for seed, part in group[0].partitions.items()]


def _skew_of_part(part: RunPartition) -> dict[str, Numbers]:
    return label_skew(part.counts) if part.counts.shape[1] else {"sizes": part.sizes}


def label_skew(counts: Numbers) -> dict[str, Numbers]:
    """Compute the label skew of a partition (see `PartitionSkew`). ``counts`` has the shape ``[clients, classes]``."""
    size = counts.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        p, q = counts / size[:, None], counts.sum(0) / counts.sum()
        js = (_entropy((p + q) / 2) - (_entropy(p) + _entropy(q[None])) / 2) / math.log(2)
    effective = np.exp(_entropy(p))
    return {"sizes": size, "emd": np.abs(p - q).sum(1), "js": np.maximum(js, 0), "effective_classes": effective}


def _entropy(p: Numbers) -> Numbers:
    entropies: Numbers = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), p * 0).sum(1)
    return entropies


def _draw_partition(skew: PartitionSkew, id: str, where: str) -> Figure | None:
    """Plot the class proportions and the size of each client's data. Return None if there are no classes."""
    run, part = skew.run, skew.run.partitions[skew.seed]
    counts, size = part.counts, part.sizes
    n, classes = counts.shape
    if not classes:
        return None
    share = counts / np.maximum(size, 1)[:, None]
    many = n > MAX_LISTED_CLIENTS
    order = np.lexsort((-share.max(1), share.argmax(1))) if many else np.arange(n)
    shown = order[np.linspace(0, n - 1, min(n, max(1, MAX_CLASS_CELLS // classes))).round().astype(int)].tolist()
    clients = {i: run.client(i) + (f" {ATTACKER_FLAG}" if i in part.attackers else "") for i in shown}
    titles = run.summary.classes if len(run.summary.classes) == classes else tuple(map(str, range(classes)))
    cells: Rows = [
        {
            "place": place,
            "client": clients[i],
            "class": titles[c],
            "count": int(counts[i, c]),
            "share": round_significant(float(share[i, c])),
        }
        for place, i in enumerate(shown)
        for c in range(classes)
        if counts[i, c] or not many
    ]
    sizes: Rows = [{"place": place, "client": clients[i], "size": int(size[i])} for place, i in enumerate(shown)]
    high = max(120, min(520, 22 * len(shown)))
    title = "Clients, sorted by their most frequent class" if many else "Client"
    y = kit.nominal_channel("place" if many else "client", [], title, scale={"padding": 0 if many else 0.08}) | {
        "sort": None
    }
    y["axis"] = None if many and len(shown) > 300 else y["axis"] | {"labels": not many}
    x = kit.nominal_channel("class", titles, "Class", scale={"padding": 0.04})
    hints = kit.tooltip(("client", "Client"), ("class", "Class"), ("count", "Samples"))
    share_shade = kit.intensity_channel("share", "Fraction of the client's samples", form="%", domain=[0, 1])
    heat = kit.heat_map(x, y, share_shade, hints, cornerRadius=0 if many else 2) | {"width": 480, "height": high}
    across = {"x": kit.number("size", "Samples", scale={"zero": True}, axis={"tickCount": 2}), "y": {**y, "axis": None}}
    tooltip = kit.tooltip(("client", "Client"), ("size", "Samples"))
    bars = kit.mark_layer(
        "bar", {**across, "tooltip": tooltip}, data="sizes", style="plain", cornerRadiusEnd=0 if many else 2
    )
    means = {n: float(np.nanmean(v)) for n, v in skew.values.items() if n != "sizes" and np.isfinite(v).any()}
    words = ", ".join(
        f"{PARTITION_TITLES[n] if n == 'js' else PARTITION_TITLES[n].lower()} {format_significant(mean, 3)}"
        for n, mean in means.items()
    )
    some = f" {len(shown)} of {n} clients are shown." if len(shown) < n else ""
    attack = f" {ATTACKER_FLAG}: attacking client." if part.attackers else ""
    caption = (
        f"Class proportions and number of each client's training samples.{some}{attack} Mean over clients: {words}."
    )
    tab = f"{where}seed {skew.seed}"
    spec = {"hconcat": [heat, bars | {"width": 110, "height": high}], "spacing": 14}
    data = {"rows": cells, "sizes": sizes}
    return Figure(id, "partition", tab, f"Data of each client ({tab})", caption, spec, data, "beside", many)


def draw_clusters(runs: list[Run], rows: list[Row]) -> Figure | None:
    """Plot each client's cluster in each round, with one panel per clustering method (first seed).

    Return None if no clusters were recorded.
    """
    data: Rows = []
    planted = some = False
    for run, row, seed in _first_seeds(runs, rows, "cluster"):
        part = run.partitions.get(seed)
        groups = part.groups if part is not None and (part.groups >= 0).any() else None
        planted |= groups is not None
        some |= run.clients > MAX_CLUSTERED_CLIENTS
        data += _cluster_rows(run, row, seed, groups)
    if not data:
        return None
    order = [cell["client"] for cell in sorted(data, key=lambda cell: cell["planted"])]
    tint = {"field": "cluster", "type": "nominal", "title": "Cluster", "scale": {"range": "category"}}
    drawn = _draw_rounds(data, order, tint, ("cluster", "planted", "seed"))
    beside = (
        " Clients are sorted by their true group, which is shown at the end of their names. Each cluster is numbered "
        "after the group with which it shares the most clients."
        if planted
        else " A cluster keeps the number of the previous round's cluster with which it shares the most clients."
    )
    sample = f" The chart shows {MAX_CLUSTERED_CLIENTS} evenly spaced clients." if some else ""
    caption = f"Every client's cluster after each recorded round, first seed. Each color is a cluster.{sample}{beside}"
    title = "Recovered clusters by round"
    return Figure("clusters", "clusters", "Clusters", title, caption, drawn, {"rows": data}, "facet")


def draw_cluster_shares(runs: list[Run], rows: list[Row]) -> Figure | None:
    """Plot each client's weight in the objective by round (first seed), for methods that weight recovered clusters.

    Return None if no such weights were recorded.
    """
    cells: Rows = []
    for run, row, seed in _first_seeds(runs, rows, SHARE_FIGURE):
        points, chosen = (
            run.series[Key(row.method, seed, "", "", SHARE_FIGURE)],
            _evenly_spaced_items(run.clients, MAX_CLUSTERED_CLIENTS),
        )
        shown = points.select(
            np.isin(points.round, _evenly_spaced_items(np.unique(points.round), MAX_CLUSTER_ROUNDS))
            & np.isin(points.client, chosen)
        )
        cells += [
            {"method": row.name, "seed": seed, "round": t, "client": run.client(client), SHARE_FIGURE: share}
            for t, client, share in zip(*(column.tolist() for column in shown), strict=True)
        ]
    if not cells:
        return None
    order = [cell["client"] for cell in cells]
    drawn = _draw_rounds(cells, order, kit.intensity_channel(SHARE_FIGURE, "Share", form="%"), (SHARE_FIGURE, "seed"))
    caption = (
        "Every client's weight in the objective after each recorded round, first seed. All recovered clusters have "
        "equal weights, as do all clients within a cluster."
    )
    title = "Client weights by recovered cluster"
    return Figure("cluster-shares", "clusters", "Shares", title, caption, drawn, {"rows": cells}, "facet")


def _first_seeds(runs: list[Run], rows: list[Row], name: str) -> Iterator[tuple[Run, Row, int]]:
    """Yield a run, a row and the first recorded seed for each method that recorded the series ``name``."""
    for row in {row.name: row for row in rows}.values():
        run = find_run(runs, row)
        seeds = [s for s in find_seeds(run, row.method) if Key(row.method, s, "", "", name) in run.series]
        if seeds:
            yield run, row, seeds[0]


def _draw_rounds(cells: Rows, clients: list[str], colour: Spec, more: tuple[str, ...]) -> Spec:
    """Plot one panel per method, with rounds on the horizontal axis and clients on the vertical axis.

    The columns ``more`` are shown in tooltips in addition to the standard ones.
    """
    inner = kit.heat_map(
        {**kit.nominal_channel("round", [], scale={"padding": 0.06}), "type": "ordinal", "sort": None},
        kit.nominal_channel("client", clients, "Client", scale={"padding": 0.1}),
        colour,
        kit.tooltip(*((name, name.capitalize()) for name in ("method", "client", "round", *more))),
        cornerRadius=1,
    )
    high = max(120, min(600, 18 * len(set(clients))))
    return kit.facet_panels(inner, "method", [cell["method"] for cell in cells], "Round", high=high)


def _evenly_spaced_items(items: int | Integers, most: int) -> Integers:
    """Return at most ``most`` evenly spaced items.

    If ``items`` is an integer n, the items are 0 to n - 1.
    """
    numbers = np.arange(items) if isinstance(items, int) else items
    places = np.linspace(0, len(numbers) - 1, min(most, len(numbers))).round()
    chosen: Integers = numbers[np.unique(places.astype(int))]
    return chosen


def _cluster_rows(run: Run, row: Row, seed: int, groups: Integers | None) -> Rows:
    points = run.series[Key(row.method, seed, "", "", "cluster")]
    chosen = set(_evenly_spaced_items(run.clients, MAX_CLUSTERED_CLIENTS).tolist())
    before = groups
    cells: Rows = []
    for t in _evenly_spaced_items(np.unique(points.round), MAX_CLUSTER_ROUNDS).tolist():
        now = points.round == t
        clients, labels = points.client[now], points.value[now].astype(np.int64)
        if before is not None:
            labels = align_cluster_labels(labels, before[clients])
        if groups is None:
            before = np.full(run.clients, -1, np.int64)
            before[clients] = labels
        for client, label in zip(clients.tolist(), labels.tolist(), strict=True):
            if label >= 0 and client in chosen:
                group = -1 if groups is None else int(groups[client])
                name = run.client(client) + (f" ({group + 1})" if groups is not None else "")
                tags = {"method": row.name, "seed": seed, "round": t, "client": name}
                cells.append({**tags, "cluster": label + 1, "planted": group + 1})
    return cells


def align_cluster_labels(labels: Integers, reference: Integers) -> Integers:
    """Rename cluster labels to match as many reference labels as possible. The label -1 (unknown) is kept.

    >>> align_cluster_labels(np.array([1, 1, 0, -1]), np.array([0, 0, 1, 1])).tolist()
    [0, 0, 1, -1]
    """
    from scipy.optimize import linear_sum_assignment  # slow to import, needed by clusters only

    count = int(max(labels.max(), reference.max())) + 1
    both: NDArray[np.int64] = np.zeros((count, count), np.int64)
    labelled = (labels >= 0) & (reference >= 0)
    np.add.at(both, (labels[labelled], reference[labelled]), 1)
    names = np.append(linear_sum_assignment(both, maximize=True)[1], -1)
    return names[labels]
