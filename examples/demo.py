"""Compare five methods on handwritten digits in three federations, with ten seeds each.

    python examples/demo.py [FOLDER]

The demo prints the leading method in each federation with the verdicts on the other methods. It writes a report on
each federation, and the chart demo.svg with versions for phones and for dark pages. The federations and settings are
fixed. Every method uses its default options and the best of five learning rates, which was chosen on validation data
with seeds 100 to 103.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import fedloom as fl
from fedloom.errors import FedloomError
from fedloom.formats import format_fixed, format_interval, format_pair
from fedloom.lab.report.charts import kit, look

PARTS: dict[str, Any] = {
    "unequal amounts of data": fl.partitions.quantity_skew(clients=10, alpha=1.0, min_size=30),
    "three classes per client": fl.partitions.shards(
        clients=10, labels_per_client=3, min_size=30, max_train_per_client=60
    ),
    "two groups with swapped labels": fl.partitions.label_swap(
        clients=10, groups=2, min_size=30, max_train_per_client=60
    ),
}
"""Partitions, keyed by the way in which clients differ. Every client has at least 20 training samples."""
RATES = {
    "local": (0.8, 0.1, 0.8),
    "fedavg": (0.8, 0.8, 1.6),
    "fedavg-ft": (0.4, 0.4, 0.8),
    "pfedme": (0.4, 0.4, 0.8),
    "fedslr": (0.2, 0.2, 0.8),
}
"""Learning rates of each method, in the order of the federations."""
SEEDS = range(10)
PANEL_WIDTHS = {"": 96, "-phone": 190}
"""Width of a panel in pixels, side by side or (on a phone) one below another, keyed by the end of the file name."""


def compare_methods(place: int, what: str, folder: Path) -> Any:
    """Compare all methods in one federation."""
    methods: dict[str, Any] = {}
    for name, rates in RATES.items():
        methods[name] = {"algorithm": name, "local": {"lr": rates[place], "batch_size": 20}}
    model, evaluate = fl.models.MLP(hidden=(32,)), {"every": 30}
    return fl.compare(
        methods, "digits", model, partition=PARTS[what], seeds=SEEDS, rounds=30, evaluate=evaluate,
        compare_model="personal", folder=folder / f"federation-{place + 1}", progress_bar=False, name=what,
        engine={"workers": min(2, os.cpu_count() or 1)},
    )  # fmt: skip


def rows_of(what: str, comparison: Any) -> list[dict[str, Any]]:
    """Return a row for each method in a federation: its mean accuracy in percent, its interval and its verdict."""
    table = comparison.table().to_pylist()
    best = max(table, key=lambda row: row["accuracy"])["method"]
    tests = {row["method"]: row for row in comparison.significance(baseline=best).to_pylist()}
    rows = []
    for row in table:
        mean, half = 100 * row["accuracy"], 100 * (row["accuracy_ci95"] or 0.0)
        test = tests.get(row["method"])
        stands = "best mean" if test is None else test["verdict"]
        behind = "" if test is None else format_gap(100 * test["difference"], 100 * test["half_width"])
        rows.append({"federation": what, "method": row["method"], "value": mean, "low": mean - half,
                     "high": mean + half, "stands": stands, "behind": behind})  # fmt: skip
    return sorted(rows, key=lambda row: -row["value"])


def format_gap(difference: float, half: float) -> str:
    """Format a difference in percentage points with its interval."""
    return format_pair(*format_interval(difference, half, (1, 1), signed=True))


def verdict_sentence(rows: list[dict[str, Any]]) -> str:
    """Return a sentence with the leading method in a federation and the verdicts on the other methods."""
    best, *others = rows
    beside = [row["method"] for row in others if row["stands"] != "worse"]
    worse = [row for row in others if row["stands"] == "worse"]
    said = f"{best['method']} {format_fixed(best['value'], 1)} %"
    said += f", inconclusive against {', '.join(beside)}" if beside else ", better than all others"
    if worse:
        said += ", worse: " + ", ".join(f"{row['method']} ({row['behind']})" for row in worse)
    return said


def summary_sentences(rows: list[dict[str, Any]], sharing: dict[str, str]) -> list[str]:
    """Return sentences about the number of wins, and about one shared model compared with local training.

    Args:
        rows: rows of all federations.
        sharing: verdict on FedAvg compared with local training, keyed by federation.
    """
    wins: dict[str, int] = {}
    for row in rows:
        if row["stands"] == "best mean":
            wins[row["method"]] = wins.get(row["method"], 0) + 1
    name, count = max(wins.items(), key=lambda item: item[1])
    each = f"A different method has the best mean in each of the {len(sharing)} federations"
    said = [f"{name} has the best mean in {count} of {len(sharing)} federations" if count > 1 else each]
    for verdict in ("better", "worse"):
        if places := [what for what, found in sharing.items() if found == verdict]:
            where = " and ".join(places)
            said.append(f"One model for all clients (fedavg) is {verdict} than local training with {where}")
    return said


def make_chart(rows: list[dict[str, Any]], end: str = "") -> dict[str, Any]:
    """Return a chart of the means over ten seeds and their 95 % intervals, with a panel for each federation.

    Args:
        rows: rows of all federations.
        end: end of the file name, which is a key of `PANEL_WIDTHS`.
    """
    stands = ["best mean", "inconclusive", "worse"]
    tint = {
        "field": "stands",
        "type": "nominal",
        "title": None,
        "legend": {"columnPadding": 6},
        "scale": {"domain": stands, "range": [look.BLUE_COLOR, look.GREY_COLOR, look.ORANGE_COLOR]},
    }
    x = kit.number("value", "test accuracy, %", axis={"tickCount": 4})
    panels = []
    for what in PARTS:
        order = [row["method"] for row in rows if row["federation"] == what]
        y = kit.nominal_channel("method", order, axis={"labelOverlap": False})
        behind = {"x": {**x, "field": "high"}, "y": y, "text": {"field": "behind"}}
        layers = [
            *kit.interval_layers({"y": y}, x, tint=tint, size=80),
            kit.mark_layer("text", behind, align="left", dx=8),
        ]
        shown = {"transform": [{"filter": {"field": "federation", "equal": what}}], "title": what}
        panels.append({**kit.layer_chart(*layers), **shown, "width": PANEL_WIDTHS[end], "height": 110})
    return {"vconcat" if end else "hconcat": panels, "datasets": {"rows": rows}}


def main(folder: Path) -> None:
    """Compare the methods, print the results and write the charts."""
    rows, sharing = list[dict[str, Any]](), dict[str, str]()
    for place, what in enumerate(PARTS):
        comparison = compare_methods(place, what, folder)
        found = rows_of(what, comparison)
        print(f"{what}: {verdict_sentence(found)}", flush=True)
        print(f"  report: {comparison.report()}", flush=True)
        rows += found
        beside = {row["method"]: row["verdict"] for row in comparison.significance(baseline="local").to_pylist()}
        sharing[what] = beside["fedavg"]
    title = summary_sentences(rows, sharing)
    for end in PANEL_WIDTHS:
        for look_end, dark in (("", False), ("-dark", True)):
            (folder / f"demo{end}{look_end}.svg").write_text(look.render_svg(make_chart(rows, end), dark=dark))
    print(*(f"{line}." for line in title), f"  picture: {folder / 'demo.svg'}", sep="\n")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
    except FedloomError as error:
        sys.exit(f"demo: {error}")
