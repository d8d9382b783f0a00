"""The partition as a picture: clients x classes, and the size of every client."""

from __future__ import annotations

import altair as alt
import numpy as np

from fedloom.report.figure import Figure, rounded
from fedloom.report.reading import Run
from fedloom.report.skew import Skew, same_data, skews_of

CELLS = 12_000
"""Up to so many client x class cells are drawn."""
HOSTILE = "\N{BLACK FLAG}"
"""Stands after the name of a client that attacks."""
MANY = 60
"""From so many clients on they are sorted by their largest class and not named."""


SPLITS = 10
"""Up to so many partitions of a run are drawn, fewer where they are large."""


def partition_pictures(runs: list[Run]) -> list[Figure | None]:
    """The partitions of all seeds, of as many as have `CELLS` cells together; runs on the same data share theirs."""
    groups = same_data(runs)
    found: list[Figure | None] = []
    for place, group in enumerate(groups, start=1):
        tables = group[0].summary.partition.counts
        size = max((len(table) * len(table[0]) for table in tables), default=1)
        drawn = skews_of(group[0])[: max(1, min(SPLITS, CELLS // max(size, 1)))]
        number = place if len(groups) > 1 else 0
        found += [_picture(group, index, skew, number) for index, skew in enumerate(drawn)]
    return found


def _attackers(runs: list[Run], seed: int) -> set[int]:
    """Who attacks with a seed, if it is the same clients in all of the runs."""
    sets = [{i for record in run.summary.runs if record.seed == seed for i in record.attackers} for run in runs]
    return sets[0] if all(own == sets[0] for own in sets) else set()


def _picture(runs: list[Run], index: int, skew: Skew, place: int) -> Figure | None:
    """Clients x classes: the share of each class in a client's data, and the client's size."""
    run = runs[0]
    partition = run.summary.partition
    counts = np.array(partition.counts[index])
    n, classes = counts.shape
    if not classes:
        return None
    size = counts.sum(1)
    share = counts / np.maximum(size, 1)[:, None]
    many = n > MANY
    order = np.lexsort((-share.max(1), share.argmax(1))) if many else np.arange(n)
    shown = order[np.linspace(0, n - 1, min(n, max(1, CELLS // classes))).round().astype(int)]
    hostile = _attackers(runs, skew.seed)
    clients = [run.client(i) + (f" {HOSTILE}" if i in hostile else "") for i in range(n)]
    names = partition.classes if len(partition.classes) == classes else tuple(str(c) for c in range(classes))
    cells = [
        {
            "place": place,
            "client": clients[int(i)],
            "class": names[c],
            "count": int(counts[i, c]),
            "share": rounded(float(share[i, c])),
        }
        for place, i in enumerate(shown)
        for c in range(classes)
        if counts[i, c] or not many
    ]
    sizes = [{"place": place, "client": clients[int(i)], "size": int(size[i])} for place, i in enumerate(shown)]
    high = max(120, min(520, 22 * len(shown)))
    y = alt.Y(
        "place:O" if many else "client:N",
        sort=None,
        title="Clients, sorted by their largest class" if many else "Client",
        axis=None if many and len(shown) > 600 else alt.Axis(labels=not many, labelOverlap=True, grid=False),
        scale=alt.Scale(padding=0 if many else 0.08),
    )
    hints = [
        alt.Tooltip("client:N", title="Client"),
        alt.Tooltip("class:N", title="Class"),
        alt.Tooltip("count:Q", title="Samples"),
    ]
    heat = (
        alt.Chart(alt.NamedData(name="rows"))
        .mark_rect(cornerRadius=0 if many else 2)
        .encode(
            x=alt.X(
                "class:N",
                sort=list(names),
                title="Class",
                axis=alt.Axis(labelAngle=0, labelOverlap=True),
                scale=alt.Scale(padding=0.04),
            ),
            y=y,
            color=alt.Color(
                "share:Q",
                title="Share of the client's samples",
                scale=alt.Scale(range="heatmap", domain=[0, 1]),
                legend=alt.Legend(format="%", gradientLength=160, gradientThickness=8),
            ),
            tooltip=hints,
        )
        .properties(width=480, height=high)
    )
    bars = (
        alt.Chart(alt.NamedData(name="sizes"))
        .mark_bar(cornerRadiusEnd=0 if many else 2, opacity=0.75, color="#7d8794")
        .encode(
            x=alt.X("size:Q", title="Samples", axis=alt.Axis(tickCount=2, format="~s")),
            y=alt.Y(
                "place:O" if many else "client:N", sort=None, axis=None, scale=alt.Scale(padding=0 if many else 0.2)
            ),
            tooltip=[alt.Tooltip("client:N", title="Client"), alt.Tooltip("size:Q", title="Samples")],
        )
        .properties(width=110, height=high)
    )
    some = f" {len(shown)} of {n} clients are drawn." if len(shown) < n else ""
    where = f"{', '.join(run.label for run in runs)}, " if place else ""
    seed = f"seed {skew.seed}"
    attack = f" {HOSTILE}: client that attacks." if hostile else ""
    caption = (
        f"Share of each class in a client's training samples, and their number.{some}{attack} Mean over the clients: "
        f"{skew.words()}."
    )
    id = f"partition-{place}-{index}" if place else f"partition-{index}"
    chart = alt.hconcat(heat, bars, spacing=14)
    title = f"Who holds what ({where}{seed})"
    return Figure(id, "partition", f"{where}{seed}", title, caption, chart, cells, {"sizes": sizes}, "beside", many)
