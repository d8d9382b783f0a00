"""Which client is in which recovered cluster, round by round, beside the planted groups."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from fedloom.report.figure import Figure, Rows
from fedloom.report.numbers import Row, run_of, seeds_of
from fedloom.report.panels import facets
from fedloom.report.reading import Integers, Key, Run

ROUNDS = 60
"""Longer runs are thinned."""
CLIENTS = 200
"""With more clients nothing is drawn."""


def cluster_picture(runs: list[Run], rows: list[Row]) -> Figure | None:
    """A panel per method that clusters its clients; its first seed."""
    data: Rows = []
    planted = False
    for row in {row.name: row for row in rows}.values():
        run = run_of(runs, row)
        seeds = [s for s in seeds_of(run, row.method) if Key(row.method, s, "", "", "cluster") in run.series]
        if seeds and run.clients <= CLIENTS:
            groups = _groups(run, row.method, seeds[0])
            planted |= groups is not None
            data += _cells(run, row, seeds[0], groups)
    if not data:
        return None
    order = list(dict.fromkeys(cell["client"] for cell in sorted(data, key=lambda cell: cell["planted"])))
    axis = alt.Axis(labelOverlap=True, labelAngle=0, grid=False)
    chart = (
        alt.Chart(alt.NamedData(name="rows"))
        .mark_rect(cornerRadius=1)
        .encode(
            x=alt.X("round:O", title=None, axis=axis, scale=alt.Scale(padding=0.06)),
            y=alt.Y("client:N", sort=order, title="Client", axis=axis, scale=alt.Scale(padding=0.1)),
            color=alt.Color("cluster:N", title="Cluster", scale=alt.Scale(range="category")),
            tooltip=["method:N", "client:N", "round:Q", "cluster:N", "planted:N", "seed:Q"],
        )
    )
    high = max(120, min(600, 18 * len(order)))
    drawn = facets(chart, "method", list(dict.fromkeys(cell["method"] for cell in data)), "Round", high=high)
    beside = (
        " Clients are sorted by their planted group, which their names end with; clusters have the number of the group "
        "that they share most clients with."
        if planted
        else " Clusters keep their number where they share most clients with one of the round before."
    )
    caption = f"The cluster of every client after each recorded round, first seed; colour means the cluster.{beside}"
    title = "Recovered clusters over rounds"
    return Figure("clusters", "clusters", "Clusters", title, caption, drawn, data, {}, "facet")


def _groups(run: Run, method: str, seed: int) -> Integers | None:
    """Planted groups of the clients in the partition of a seed."""
    partition, seeds = run.summary.partition, seeds_of(run, method)
    groups = partition.groups[seeds.index(seed)] if seeds.index(seed) < len(partition.groups) else ()
    return np.array(groups) if groups else None


def _cells(run: Run, row: Row, seed: int, groups: Integers | None) -> Rows:
    points = run.series[Key(row.method, seed, "", "", "cluster")]
    rounds = np.unique(points.round)
    shown = rounds[np.unique(np.linspace(0, len(rounds) - 1, ROUNDS).round().astype(int))]
    before = groups
    cells: Rows = []
    for t in shown.tolist():
        there = points.round == t
        clients, labels = points.client[there], points.value[there].astype(np.int64)
        if before is not None:
            labels = aligned(labels, before[clients])
        before = groups if groups is not None else _filled(clients, labels, run.clients)
        for client, label in zip(clients.tolist(), labels.tolist(), strict=True):
            group = -1 if groups is None else int(groups[client])
            name = run.client(client) + (f" ({group + 1})" if groups is not None else "")
            tags: dict[str, Any] = {"method": row.name, "seed": seed, "round": t, "client": name}
            cells += [tags | {"cluster": label + 1, "planted": group + 1}] if label >= 0 else []
    return cells


def _filled(clients: Integers, labels: Integers, n: int) -> Integers:
    found = np.full(n, -1, np.int64)
    found[clients] = labels
    return found


def aligned(labels: Integers, others: Integers) -> Integers:
    """Labels renamed so that as many as can be equal the others; -1 (unknown) stays.

    >>> aligned(np.array([1, 1, 0, -1]), np.array([0, 0, 1, 1])).tolist()
    [0, 0, 1, -1]
    """
    count = int(max(labels.max(), others.max())) + 1
    both: NDArray[np.int64] = np.zeros((count, count), np.int64)
    known = (labels >= 0) & (others >= 0)
    np.add.at(both, (labels[known], others[known]), 1)
    names = np.append(linear_sum_assignment(both, maximize=True)[1], -1)
    return names[labels]
