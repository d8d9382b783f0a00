"""Plot each column's importance for the predictions at each site."""

from __future__ import annotations

import math

import numpy as np

from fedloom.formats import format_fixed, round_significant
from fedloom.lab.report.charts import kit
from fedloom.lab.report.charts.kit import Figure, Rows
from fedloom.lab.report.comparison.gains import find_leader
from fedloom.lab.report.naming import metric
from fedloom.lab.report.numbers import Row
from fedloom.lab.report.reading import read_columns, rows_where
from fedloom.lab.report.run import Run
from fedloom.rundir import IMPORTANCE_FILE

MAX_DRAWN_COLUMNS = 30
"""Maximum number of columns to plot, and maximum number of sites."""
IMPORTANCE_COLUMNS = ("method", "seed", "client", "model", "column", "metric", "value", "spread")


def draw_importances(runs: list[Run], rows: list[Row], lead: str) -> list[Figure]:
    """Plot a heat map of the best federated method for each run with measured column importance."""
    figures = []
    for place, run in enumerate(runs, start=1):
        best = find_leader(run, runs, rows, lead)
        table = None if best is None else read_columns(run.path / IMPORTANCE_FILE, IMPORTANCE_COLUMNS)
        if best is None or table is None:
            continue
        table = rows_where(table, method=best.method)
        model = best.model if best.model in set(table["model"].to_pylist()) else "personal"
        lines = rows_where(table, model=model).to_pylist()
        if lines:
            figures.append(
                _importance_figure(run, lines, f"{best.method}, {model} model", place if len(runs) > 1 else 0)
            )
    return figures


def _importance_figure(run: Run, lines: Rows, words: str, place: int) -> Figure:
    values: dict[tuple[str, int], list[float]] = {}
    for line in lines:
        if math.isfinite(line["value"]):
            values.setdefault((line["column"], line["client"]), []).append(line["value"])
    means = {key: float(np.mean(some)) for key, some in values.items()}
    columns = list(dict.fromkeys(column for column, _ in means))
    overall = {column: float(np.mean([v for (c, _), v in means.items() if c == column])) for column in columns}
    columns = sorted(columns, key=lambda column: -overall[column])[:MAX_DRAWN_COLUMNS]
    clients = sorted({client for _, client in means})[:MAX_DRAWN_COLUMNS]
    data: Rows = [
        {"site": run.client(client), "column": column, "value": round_significant(means[column, client]),
         "text": format_fixed(means[column, client], 3)}
        for column in columns for client in clients if (column, client) in means
    ]  # fmt: skip
    top = max(max(row["value"] for row in data), 1e-9)
    lead = metric(str(lines[0]["metric"])).title
    inner = kit.heat_map(
        kit.nominal_channel("site", [run.client(client) for client in clients]), kit.nominal_channel("column", columns),
        kit.intensity_channel("value", "Importance", domain=[0, top]),
        kit.tooltip(("site", "Site"), ("column", "Column"), ("value", "Importance", ".4f")), "text",
        f"datum.value > {top / 2}",
    )  # fmt: skip
    caption = (
        f"Deterioration of {lead} on a site's test samples when a column's values are permuted, mean over "
        f"permutations and seeds ({words}). Correlated columns share their importance. Importance does not measure a "
        "column's effect on patients."
    )
    title = "Column importance" + (f" ({run.label})" if place else "")
    id = f"importance-{place}" if place else "importance"
    return Figure(
        id, "importance", title, title, caption, {**inner, "width": 560, "height": {"step": 22}}, {"rows": data}, "wide"
    )
