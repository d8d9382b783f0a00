"""Which method serves which clients: five methods in three federations of handwritten digits, ten seeds each.

    python examples/demo.py [FOLDER]

It prints who leads in each federation and how sure that is, and writes the picture demo.svg and a report of each.
Federations and settings are frozen: every method has its defaults and the best of five step sizes, by validation on
seeds 100 to 103.
"""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import altair as alt

import fedloom as fl
from fedloom.report.figure import WIDE, theme

PARTS: dict[str, Any] = {
    "amounts that differ": fl.partition.quantity(clients=10, beta=1.0, min_size=30),
    "three labels each": fl.partition.shards(clients=10, labels_per_client=3, min_size=30, keep=60),
    "two groups that mean other things": fl.partition.concept(clients=10, groups=2, min_size=30, keep=60),
}
"""Federations by what is special about their clients; none of them has fewer than 20 training samples."""
RATES = {
    "local": (0.8, 0.1, 0.8),
    "fedavg": (0.8, 0.8, 1.6),
    "fedavg-ft": (0.4, 0.4, 0.8),
    "pfedme": (0.4, 0.4, 0.8),
    "fedslr": (0.2, 0.2, 0.8),
}
"""Step sizes of every method, in the order of the federations."""
SEEDS = range(10)


def compared(place: int, what: str, folder: Path) -> Any:
    """The comparison of all methods in one federation."""
    methods: dict[str, Any] = {}
    for name, rates in RATES.items():
        methods[name] = {"algorithm": name, "local": {"lr": rates[place], "batch_size": 20}}
    model, evaluate = fl.models.MLP(hidden=(32,)), {"every": 30}
    return fl.compare(
        methods, "digits", model, partition=PARTS[what], seeds=SEEDS, rounds=30, evaluate=evaluate,
        models="personal", folder=folder / f"federation-{place + 1}", progress=False, name=what,
        engine={"workers": min(2, os.cpu_count() or 1)},
    )  # fmt: skip


def rows_of(what: str, comparison: Any) -> list[dict[str, Any]]:
    """A row per method of a federation: its mean accuracy in percent, its interval, and how it stands to the best."""
    table = comparison.table().to_pylist()
    best = max(table, key=lambda row: row["accuracy"])["method"]
    tests = {row["method"]: row for row in comparison.significance(against=best).to_pylist()}
    rows = []
    for row in table:
        mean, half = 100 * row["accuracy"], 100 * (row["accuracy_ci95"] or 0.0)
        test = tests.get(row["method"])
        stands = "best mean" if test is None else "clearly worse" if test["verdict"] == "worse" else "not clearly worse"
        behind = "" if test is None else f"{100 * test['difference']:+.1f} ± {100 * test['half_width']:.1f}"
        rows.append({"federation": what, "method": row["method"], "mean": mean, "low": mean - half,
                     "high": mean + half, "stands": stands, "behind": behind})  # fmt: skip
    return sorted(rows, key=lambda row: -row["mean"])


def sentence(rows: list[dict[str, Any]]) -> str:
    """Who leads in a federation, by how much, and how sure that is."""
    best, *others = rows
    level = [row["method"] for row in others if row["stands"] == "not clearly worse"]
    worse = [row for row in others if row["stands"] == "clearly worse"]
    said = f"{best['method']} {best['mean']:.1f} %"
    said += f", not clearly ahead of {', '.join(level)}" if level else ", clearly ahead of all others"
    if worse:
        said += "; clearly behind: " + ", ".join(f"{row['method']} ({row['behind']})" for row in worse)
    return said


def overall(rows: list[dict[str, Any]], sharing: dict[str, str]) -> list[str]:
    """In how many federations the winners have the best mean, and whether one shared model beats training alone there.

    Args:
        rows: of all federations.
        sharing: by federation, how FedAvg is beside local training: better, worse or level.
    """
    wins: dict[str, int] = {}
    for row in rows:
        if row["stands"] == "best mean":
            wins[row["method"]] = wins.get(row["method"], 0) + 1
    name, count = max(wins.items(), key=lambda item: item[1])
    each = f"Each of the {len(sharing)} federations has another method on top"
    said = [f"{name} has the best mean in {count} of {len(sharing)} federations" if count > 1 else each]
    for verdict in ("better", "worse"):
        if places := [what for what, found in sharing.items() if found == verdict]:
            where = " and ".join(places)
            said.append(f"One model for all (fedavg) is clearly {verdict} than training alone with {where}")
    return said


def picture(rows: list[dict[str, Any]], title: list[str], *, dark: bool) -> alt.Chart:
    """A panel per federation, a line per method: the mean over ten seeds and its 95 % interval."""
    shade = alt.Color(
        "stands:N", title="beside the best mean",
        scale=alt.Scale(domain=["best mean", "not clearly worse", "clearly worse"],
                        range=["#2ebd8f", "#a9dcc8", "#f0883e"] if dark else ["#1a7f4b", "#7fb89a", "#c0563b"]),
    )  # fmt: skip
    panels = []
    for what in PARTS:
        mine = alt.Chart(alt.InlineData(values=[row for row in rows if row["federation"] == what]))
        y = alt.Y("method:N", sort=alt.EncodingSortField("mean", order="descending"), title=None)
        x = alt.X("mean:Q", title="test accuracy, %", scale=alt.Scale(zero=False, nice=True))
        low = alt.X("low:Q", title="test accuracy, %")
        panels.append(
            alt.layer(
                mine.mark_rule(strokeWidth=3).encode(x=low, x2="high:Q", y=y, color=shade),
                mine.mark_point(filled=True, size=90).encode(x=x, y=y, color=shade),
                mine.mark_text(align="left", dx=10, fontSize=11).encode(x=alt.X("high:Q"), y=y, text="behind:N"),
            ).properties(title=what, width=400, height=110)
        )  # fmt: skip
    lines = [part for line in title for part in textwrap.wrap(line, 66)]
    chart = alt.vconcat(*panels, title=alt.Title(lines, anchor="start", fontSize=13, offset=12))
    return alt.Chart.from_dict({**chart.to_dict(), "config": theme(dark=dark, font=WIDE)})


def main(folder: Path) -> None:
    """Compare, print, draw."""
    rows, sharing = list[dict[str, Any]](), dict[str, str]()
    for place, what in enumerate(PARTS):
        comparison = compared(place, what, folder)
        found = rows_of(what, comparison)
        print(f"{what}: {sentence(found)}", flush=True)
        print(f"  report: {comparison.report()}", flush=True)
        rows += found
        beside = {row["method"]: row["verdict"] for row in comparison.significance(against="local").to_pylist()}
        sharing[what] = beside["fedavg"]
    title = overall(rows, sharing)
    for name, dark in (("demo.svg", False), ("demo-dark.svg", True)):
        picture(rows, title, dark=dark).save(folder / name)
    print(*(f"{line}." for line in title), f"  picture: {folder / 'demo.svg'}", sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
