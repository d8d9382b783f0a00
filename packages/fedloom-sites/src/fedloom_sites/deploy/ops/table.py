"""Tables of the latest metrics of a deployed run, by site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fedloom.metrics import SUMMARY_METRICS
from fedloom.storage.disk import check_regular_file

MEAN_NAMES = ("mean", "weighted")
"""Names of the two kinds of means in the records: over sites, and over samples. A server that receives only sums
records only the latter."""


def site_table(metrics: Path, sites: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the latest test metrics, one row per site and model: ``site``, ``model``, ``round`` and metrics.

    The metrics are from the last round that the site reported metrics for.

    Args:
        metrics: file `metrics.parquet`.
        sites: names of the sites, keyed by client. Metrics of other clients (those that were removed) are omitted.
    """
    records = [r for r in _read_metrics(metrics, SUMMARY_METRICS) if r["client"] in sites]
    last = {(r["client"], r["model"]): r["round"] for r in records if r["value"] == r["value"]}
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for r in records:
        key = r["client"], r["model"]
        if last.get(key) == r["round"]:
            row = rows.setdefault(key, {"site": sites[r["client"]], "model": r["model"], "round": r["round"]})
            row[r["metric"]] = r["value"]
    return [rows[key] for key in sorted(rows)]


def mean_table(metrics: Path) -> list[dict[str, Any]]:
    """Return the latest means of the federation, one row per model: ``model``, ``round`` and metrics.

    Means are over sites. If the server receives only sums, they are over samples.

    ``sites``: number of sites in the mean of a loss.

    Args:
        metrics: file `metrics.parquet`.
    """
    rows: dict[str, dict[str, Any]] = {}
    losses = [r for r in _read_metrics(metrics, ["loss"]) if r["client"] >= 0 and r["value"] == r["value"]]
    counts = Counter((r["model"], r["round"]) for r in losses)  # empty if the server receives only sums
    totals = _read_metrics(
        metrics, [*(f"{name}/{mean}" for name in SUMMARY_METRICS for mean in MEAN_NAMES), "loss/sites"]
    )
    mean = next((name for name in MEAN_NAMES if any(r["metric"].endswith(f"/{name}") for r in totals)), "")
    for r in totals:
        name, _, what = r["metric"].partition("/")
        if what in (mean, "sites"):
            row = rows.setdefault(r["model"], {"model": r["model"]})
            row |= {"round": r["round"], **({name: r["value"]} if what == mean else {"sites": int(r["value"])})}
    for row in rows.values():
        if count := counts[row["model"], row["round"]]:
            row["sites"] = count
    return [rows[key] for key in sorted(rows)]


def _read_metrics(metrics: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the metrics with these names on the test parts, sorted by round."""
    table = pq.read_table(check_regular_file(metrics))
    mask = pc.and_(pc.equal(table["part"], "test"), pc.is_in(table["metric"], pa.array(names)))
    records: list[dict[str, Any]] = table.filter(mask).sort_by("round").to_pylist()
    return records
