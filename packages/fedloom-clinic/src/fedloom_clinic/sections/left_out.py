"""Section on new clients: results at each site of models that were trained without it."""

from __future__ import annotations

import pyarrow as pa

from fedloom.formats import UNKNOWN_DASH
from fedloom.lab.sections import (
    Estimate,
    Row,
    Run,
    Section,
    cell_text,
    describe_figure,
    federated_leader,
    read_columns,
    render_csv,
    render_scrolling_table,
    rows_where,
    select_run_contenders,
    site_estimate,
    titled,
    values_by_seed,
)
from fedloom.rundir import analysis_file

LEFT_OUT_COLUMNS = ("method", "seed", "client", "scaling", "metric", "value")
LEFT_OUT_TEXT = (
    "Each site in turn is treated as a new site: the method trains on the other sites and is scored "
    "on all samples of this site. Left out: columns are scaled by the other sites' medians, as for a new site. On its "
    "own rows: columns are scaled by the site's own samples. The table also shows the site's results on its test "
    "samples when it takes part in the same method and when it trains alone. Values are means over seeds ± half the "
    "width of the 95 % interval."
)


def left_out_section(runs: list[Run], rows: list[Row], lead: str) -> Section | None:
    """Return the section on clients that runs excluded, or None if no run excluded a client."""
    body = make_left_out_tables(runs, rows, lead)
    return Section("A new site", LEFT_OUT_TEXT, body, {"left_out": write_left_out_csv(runs)}) if body else None


section = left_out_section
"""Name by which the entry point of the report finds the function."""


def make_left_out_tables(runs: list[Run], rows: list[Row], lead: str) -> str:
    """Return HTML with a table of the methods with a global model for each run that excluded every site in turn."""
    text = ""
    for run in runs:
        table = read_columns(run.path / analysis_file("left-out"), LEFT_OUT_COLUMNS)
        if table is None:
            continue
        shown = select_run_contenders(run, runs, rows, lead)
        alone = next((row for row in shown if row.role == "alone"), None)
        best = federated_leader(shown, lead)
        methods = [row for row in shown if row.method in set(table["method"].to_pylist())]
        for row in sorted(methods, key=lambda row: row is not best):
            text += _render_left_out_table(run, rows_where(table, method=row.method), row, alone, lead, len(runs) > 1)
    return text


def _render_left_out_table(run: Run, table: pa.Table, row: Row, alone: Row | None, lead: str, several: bool) -> str:
    scalings = list(dict.fromkeys(table["scaling"].to_pylist()))
    values: dict[tuple[int, str], dict[int, float]] = {}
    for line in rows_where(table, metric=lead).to_pylist():
        values.setdefault((line["client"], line["scaling"]), {})[line["seed"]] = line["value"]
    samples = {line["client"]: int(line["value"]) for line in rows_where(table, metric="samples").to_pylist()}
    inside = {r.method: values_by_seed(run, r, lead) for r in (row, alone) if r is not None}
    title = titled(describe_figure(lead))
    heads = [
        "Site", "Samples", f"{title} left out", *(["On its own rows"] if len(scalings) > 1 else []), "Taking part",
        *(["Alone"] if alone is not None and alone is not row else []),
    ]  # fmt: skip
    lines = []
    for client in range(run.clients):
        estimates = [Estimate(values.get((client, scaling), {})) for scaling in scalings]
        estimates += [site_estimate(by_seed, client) for by_seed in inside.values()]
        words = [cell_text(lead, estimate) for estimate in estimates]
        lines.append([run.client(client), str(samples.get(client, UNKNOWN_DASH)), *words])
    label = f"{row.method}{f', {run.label}' if several else ''}"
    return render_scrolling_table(f"Sites left out: {label}", heads, lines, title=label)


def write_left_out_csv(runs: list[Run]) -> str:
    """Return an unrounded table with each metric of each excluded site by seed."""
    lines = [
        (run.label, *(run.client(line[name]) if name == "client" else line[name] for name in LEFT_OUT_COLUMNS))
        for run in runs
        if (table := read_columns(run.path / analysis_file("left-out"), LEFT_OUT_COLUMNS)) is not None
        for line in table.to_pylist()
    ]
    return render_csv(("run", "method", "seed", "site", "scaling", "metric", "value"), lines) if lines else ""
