"""Section that compares the federation with reference models from scikit-learn: a regression and a forest."""

from __future__ import annotations

import numpy as np

from fedloom.lab.sections import (
    Row,
    Run,
    Section,
    cell_text,
    describe_figure,
    federated_leader,
    read_columns,
    render_scrolling_table,
    rows_where,
    select_run_contenders,
    site_estimate,
    titled,
    values_by_seed,
)
from fedloom.rundir import analysis_file

REFERENCES_TEXT = (
    "Scikit-learn models that each site fitted to its own rows, compared with training alone and the federated method."
)


def reference_section(runs: list[Run], rows: list[Row], lead: str) -> Section | None:
    """Return the section on the runs' reference models, or None if no run has reference models."""
    body = reference_tables(runs, rows, lead)
    return Section("Reference models", REFERENCES_TEXT, body) if body else None


section = reference_section
"""Name by which the entry point of the report finds the function."""


def reference_tables(runs: list[Run], rows: list[Row], lead: str) -> str:
    """Return HTML with a table for each run with reference models."""
    text = ""
    for run in runs:
        table = read_columns(run.path / analysis_file("references"), ("seed", "client", "model", "metric", "value"))
        if table is None:
            continue
        shown = select_run_contenders(run, runs, rows, lead)
        methods = [next((row for row in shown if row.role == "alone"), None), federated_leader(shown, lead)]
        columns = {row.name: values_by_seed(run, row, lead) for row in methods if row is not None}
        for line in rows_where(table, metric=lead).to_pylist():
            seeds = columns.setdefault(line["model"], {})
            seeds.setdefault(line["seed"], np.full(run.clients, np.nan))[line["client"]] = line["value"]
        lines = [
            [run.client(client), *(cell_text(lead, site_estimate(values, client)) for values in columns.values())]
            for client in range(run.clients)
        ]
        label = f"{titled(describe_figure(lead))}{f', {run.label}' if len(runs) > 1 else ''}"
        text += render_scrolling_table(f"Reference models: {label}", ["Site", *columns], lines, title=label)
    return text
