"""Section on a run's Cox regressions: hazard ratios with intervals, and losses due to bins and minimum counts."""

from __future__ import annotations

import math
from html import escape
from typing import Any

import pyarrow.parquet as pq

from fedloom.formats import format_p_value, format_significant
from fedloom.lab.sections import Row, Run, Section, read_columns, render_csv, render_scrolling_table
from fedloom.rundir import analysis_file

COX_TEXT = "Hazard ratios per unit of a column over the rows of all clients, computed from sums only."
COLUMN_HEADS = ("Column", "Hazard ratio", "95 % from", "to", "Coefficient", "Standard error", "p")
COLUMN_NAMES = (
    "column", "coefficient", "standard_error", "low", "high", "p", "bound", "likelihood", "rows", "events",
    "late_lost", "rare_lost", "left_out", "bins", "least", "ties",
)  # fmt: skip


def cox_section(runs: list[Run], rows: list[Row], lead: str) -> Section | None:
    """Return the section on the runs' Cox regressions, or None if there are none."""
    body = cox_tables(runs)
    return Section("Cox regression", COX_TEXT, body, {"cox": cox_csv(runs)}) if body else None


section = cox_section
"""Name by which the entry point of the report finds the function."""


def cox_tables(runs: list[Run]) -> str:
    """Return HTML with a table for each run with a Cox regression over the rows of all clients."""
    text = ""
    for run in runs:
        rows = _cox_rows(run)
        if rows:
            label = f"Cox regression{f', {run.label}' if len(runs) > 1 else ''}"
            text += f"<h3>{escape(label)}</h3><p>{escape(cox_sentence(rows[0]))}</p>"
            text += render_scrolling_table(label, COLUMN_HEADS, [_cox_line(row) for row in rows])
    return text


def cox_csv(runs: list[Run]) -> str:
    """Return an unrounded table with all columns of all regressions."""
    lines = [{"run": run.label, **row} for run in runs for row in _cox_rows(run)]
    return (
        render_csv(tuple(dict.fromkeys(["run", *COLUMN_NAMES, *(name for line in lines for name in line)])), lines)
        if lines
        else ""
    )


def _cox_rows(run: Run) -> list[dict[str, Any]]:
    path = run.path / analysis_file("cox")
    if not path.exists():
        return []
    names = (*COLUMN_NAMES, "ridge") if "ridge" in pq.read_schema(path).names else COLUMN_NAMES
    table = read_columns(path, names)
    return [] if table is None else table.to_pylist()


def cox_sentence(row: dict[str, Any]) -> str:
    """Return sentences about a regression's number of rows and its losses."""
    rows, events, beyond, rare, left_out, bins, least = (
        int(row[name]) for name in ("rows", "events", "late_lost", "rare_lost", "left_out", "bins", "least")
    )
    text = f"{rows} rows of all sites with {events} events, fitted from sums. Ties by {row['ties'].title()}"
    text += f", {bins} time bins, one baseline hazard." if bins else ", one baseline hazard per site, exact times."
    lost = [
        f"{count} {what}"
        for count, what in (
            (beyond, "events after the last bin"),
            (rare, f"events where a site has fewer than {least}"),
        )
        if count
    ]
    text += f" Counted as censored: {' and '.join(lost)}." if lost and bins else ""
    text += f" Left out: sites with fewer than {least} events, which have {rare}." if rare and not bins else ""
    text += f" {left_out} further rows have a missing cell or a number outside its range." if left_out else ""
    if "ridge" in row:
        strength = format_significant(row["ridge"])
        text += (
            f" A ridge of strength {strength} shrinks the coefficients. The intervals ignore the bias due to shrinkage."
        )
    bound = row["bound"]
    moved = (
        f"no coefficient by more than {format_significant(bound, 1)}"
        if math.isfinite(bound)
        else "by an unknown amount"
    )
    return f"{text} Rounding changes {moved}."


def _cox_line(row: dict[str, Any]) -> list[str]:
    beta, low, high = (row[name] for name in ("coefficient", "low", "high"))
    ratios = [format_significant(math.exp(min(number, 700.0)), 3) for number in (beta, low, high)]
    se = format_significant(row["standard_error"], 3)
    return [row["column"], *ratios, format_significant(beta, 3), se, format_p_value(row["p"])]
