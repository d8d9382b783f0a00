"""Tables of the primary metric for groups of patients, overall and at each site."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from fedloom.formats import UNKNOWN_DASH, format_fixed
from fedloom.lab.report.comparison.gains import MAX_LISTED_SITES, find_leader
from fedloom.lab.report.csv_files import render_csv
from fedloom.lab.report.markup import render_scrolling_table
from fedloom.lab.report.naming import describe_figure, titled
from fedloom.lab.report.numbers import Row
from fedloom.lab.report.reading import read_columns, rows_where
from fedloom.lab.report.run import Run
from fedloom.metrics import leading
from fedloom.rundir import FEDERATION_CLIENT, GROUPS_FILE, SAMPLES_FIGURE

GROUP_COLUMNS = ("method", "seed", "client", "model", "subgroup", "metric", "value")
GROUPS_TEXT = (
    "The best method's results on the test samples of every group of patients, for all sites together and site by "
    "site: mean over seeds, with the number of test samples in parentheses. A dash means that a group is too small to "
    "be scored or, at real sites, that the metric compares samples of different sites, such as AUROC. groups.csv "
    "contains every method and metric."
)


def group_tables(runs: list[Run], rows: list[Row], lead: str) -> str:
    """Render an HTML table for each run with scored groups."""
    text = ""
    for run in runs:
        best = find_leader(run, runs, rows, lead)
        table = None if best is None else group_cells(run, best, lead)
        if best is None or table is None:
            continue
        heads, cells, shown = table
        label = f"{titled(describe_figure(shown))}, {best.method}{f', {run.label}' if len(runs) > 1 else ''}"
        text += render_scrolling_table(f"Groups of patients: {label}", heads, cells, title=label)
    return text


def group_cells(run: Run, row: Row, lead: str) -> tuple[list[str], list[list[str]], str] | None:
    """Return the titles and lines of one model's table of groups, and the metric that it shows.

    Return None if no groups were scored.

    The metric is the primary one among those that were scored. Metrics that rank samples cannot be computed from secure
    sums, and are therefore not included.
    """
    table = _read_group_table(run)
    if table is None:
        return None
    table = rows_where(table, method=row.method, model=row.model)
    means = _group_means(table, ["client", "subgroup", "metric"])
    recorded = {client for client, *_ in means} - {FEDERATION_CLIENT}
    metrics = dict.fromkeys(str(name) for *_, name in means)
    lead = lead if lead in metrics or leading(metrics) not in metrics else leading(metrics)
    clients = [FEDERATION_CLIENT, *(range(run.clients) if recorded and run.clients <= MAX_LISTED_SITES else [])]
    heads = [
        "Group",
        *("All sites" if client == FEDERATION_CLIENT else run.titled_client(client) for client in clients),
    ]
    groups = dict.fromkeys(table["subgroup"].to_pylist())
    return heads, [[group, *(_group_cell(means, client, group, lead) for client in clients)] for group in groups], lead


def _read_group_table(run: Run) -> pa.Table | None:
    return read_columns(run.path / GROUPS_FILE, GROUP_COLUMNS)


def _group_means(table: pa.Table, keys: Sequence[str]) -> dict[tuple[object, ...], float]:
    """Return the means of finite values over seeds, keyed by ``keys``."""
    values: dict[tuple[object, ...], list[float]] = {}
    for row in table.to_pylist():
        if math.isfinite(row["value"]):
            values.setdefault(tuple(row[key] for key in keys), []).append(row["value"])
    return {key: float(np.mean(some)) for key, some in values.items()}


def _group_cell(means: dict[tuple[object, ...], float], client: int, group: str, lead: str) -> str:
    samples, value = means.get((client, group, SAMPLES_FIGURE), 0.0), means.get((client, group, lead))
    shown = describe_figure(lead)
    number = UNKNOWN_DASH if value is None else format_fixed(value * shown.scale, 1 if shown.scale == 100 else 3)
    return f"{number} ({format_fixed(samples, 0)})"


def groups_csv(runs: list[Run]) -> str:
    """Return the metrics of each group as CSV, as unscaled means over seeds.

    In rows for all clients together, the client column is empty.
    """
    keys = ("method", "model", "client", "subgroup", "metric")
    lines: list[tuple[object, ...]] = []
    for run in runs:
        if (table := _read_group_table(run)) is not None:
            for (method, model, client, *rest), value in _group_means(table, keys).items():
                site = "" if client == FEDERATION_CLIENT else run.client(int(str(client)))
                lines.append((run.label, method, model, site, *rest, value))
    return render_csv(("run", "method", "model", "site", "group", "metric", "value"), lines) if lines else ""
