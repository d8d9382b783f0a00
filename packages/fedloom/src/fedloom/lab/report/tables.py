"""Results tables as Arrow, CSV and LaTeX (booktabs), and the formatting of numbers in HTML tables."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import pyarrow as pa

from fedloom.errors import ConfigError
from fedloom.formats import (
    PERCENT_DECIMALS,
    PLAIN_DECIMALS,
    UNKNOWN_DASH,
    finite_or_none,
    format_factor,
    format_interval,
    format_pair,
    write_total,
)
from fedloom.lab.report.comparison.criteria import HighlightedRows
from fedloom.lab.report.csv_files import render_csv
from fedloom.lab.report.naming import COST_FIGURES, FEDERATION_FIGURES, METRICS, describe_figure, is_ratio, titled
from fedloom.lab.report.numbers import WORK_FIGURES, Estimate, Row, method_rows
from fedloom.lab.report.reading import read_runs
from fedloom.metrics import leading

T = TypeVar("T")

HIDDEN_FIGURES = set(WORK_FIGURES) - set(COST_FIGURES)
"""Metrics in the CSV file that are not in the HTML table."""
MAX_LATEX_COLUMNS = 6
"""Maximum number of columns in the LaTeX table if the caller does not choose the columns."""
BOOKTABS_LINE = "% \\usepackage{booktabs}"
TERMINAL_FIGURES = ("steps", "bytes_down")
"""Costs that are omitted from the LaTeX table if the caller does not choose the columns."""


def result_table(run_dir: Path) -> pa.Table:
    """Return a table with one row for each method and model in a run. The numbers are unrounded and unscaled.

    The first columns are ``run, method, algorithm, model, status, seeds, rounds, parameters``. For each metric, three
    columns follow: its mean over seeds (``<name>``), the half-width of the 95 % t interval (``<name>_ci95``), and the
    number of seeds with a finite value (``<name>_seeds``). The metrics are ``<metric>`` (mean over the clients' test
    sets in the last round), ``<metric>_worst10``, ``<metric>_at_validation`` (in the round with the best validation
    result), ``<metric>_common`` (on the common test set), ``loss_variance``, work, traffic in bytes, and seconds.

    Raises:
        RunDirError: ``run_dir`` is not a run directory, or cannot be read.
    """
    return make_arrow_table(method_rows(read_runs([run_dir])))


def make_arrow_table(rows: list[Row]) -> pa.Table:
    """Convert rows of results to an Arrow table (see `result_table`)."""
    columns: dict[str, list[str | int | float | None]] = {
        "run": [row.run for row in rows],
        "method": [row.method for row in rows],
        "algorithm": [row.algorithm for row in rows],
        "model": [row.model for row in rows],
        "status": [row.status for row in rows],
        "seeds": [row.measured for row in rows],
        "rounds": [max((record.rounds for record in row.records), default=None) for row in rows],
        "parameters": [next((record.parameters for record in row.records), None) for row in rows],
    }
    for name in dict.fromkeys(name for row in rows for name in row.figures):
        column = column_of(name)
        estimates = [row.figures.get(name) for row in rows]
        columns[column] = [finite_or_none(e.mean) if e else None for e in estimates]
        columns[f"{column}_ci95"] = [finite_or_none(e.half) if e else None for e in estimates]
        columns[f"{column}_seeds"] = [len(e.finite) if e else None for e in estimates]
    return pa.table(columns)


def column_of(name: str) -> str:
    """Return the name of a metric's column in the CSV file.

    >>> column_of("accuracy/worst10"), column_of("accuracy@validation")
    ('accuracy_worst10', 'accuracy_at_validation')
    """
    return name.replace("/", "_").replace("@validation", "_at_validation").replace("@", "_")


def csv_text(rows: list[Row]) -> str:
    """Return the table from `make_arrow_table` as CSV. Unknown values are left empty."""
    table = make_arrow_table(rows)
    return render_csv(table.column_names, table.to_pylist())


def list_columns(rows: list[Row]) -> dict[str, str]:
    """Return the titles of the metrics in the HTML table, keyed by metric. The primary metric comes first."""
    have = {name for row in rows for name, estimate in row.figures.items() if estimate.finite}
    lead = leading(have)
    parts = ("@validation", "@common", "/weighted", "/sigma", "/jain")
    order = [*headline_metrics(lead), *(lead + part for part in parts)]
    order += [*METRICS, *FEDERATION_FIGURES, *sorted(name for name in have if not set(name) & set("/@"))]
    return {
        name: titled(describe_figure(name))
        for name in dict.fromkeys(order)
        if name in have and name not in HIDDEN_FIGURES
    }


def headline_metrics(lead: str) -> tuple[str, ...]:
    """Return the first metrics of an HTML table, given its primary metric."""
    return lead, f"{lead}/worst10", "attack_success", "calibration_error", "loss/variance", *COST_FIGURES


def latex_columns(rows: list[Row], chosen: Sequence[str] | None = None) -> dict[str, str]:
    """Return the titles of the metrics in the LaTeX table: the chosen ones or, by default, up to `MAX_LATEX_COLUMNS`.

    Raises:
        ConfigError: a chosen metric does not exist.
    """
    shown = list_columns(rows)
    if chosen is None:
        order = [
            name for name in headline_metrics(next(iter(shown), "")) if name in shown and name not in TERMINAL_FIGURES
        ]
        return {name: shown[name] for name in order[:MAX_LATEX_COLUMNS]}
    name_of_column = {column_of(name): name for row in rows for name in row.figures}
    unknown = [name for name in chosen if name not in name_of_column]
    if unknown or not chosen:
        what = f"unknown column {unknown[0]!r}" if unknown else "the list is empty"
        raise ConfigError(f"--columns: {what}. These runs have the columns {', '.join(name_of_column)}")
    return {name_of_column[name]: titled(describe_figure(name_of_column[name])) for name in chosen}


def render_cell(name: str, estimate: Estimate | None) -> tuple[str, str]:
    """Format a metric's mean and its interval's half-width, both rounded to two significant digits of the half-width.

    Without a value, return ``(UNKNOWN_DASH, "")``.

    >>> render_cell("accuracy", Estimate({0: 0.9, 1: 0.92}))
    ('91.0', '12.7')
    """
    if estimate is None or not estimate.finite:
        return UNKNOWN_DASH, ""
    return render_measured(name, estimate.mean, estimate.half)


def cell_text(name: str, estimate: Estimate | None) -> str:
    """Format a metric and its interval as text."""
    return format_pair(*render_cell(name, estimate))


def render_measured(name: str, mean: float, half: float) -> tuple[str, str]:
    """Format a metric, given its unscaled mean and half-width (see `render_cell`)."""
    scale = describe_figure(name).scale
    if not math.isfinite(mean):
        return UNKNOWN_DASH, ""
    return (
        (write_total(mean * scale), "")
        if name in COST_FIGURES
        else format_interval(mean * scale, half * scale, decimals_of_metric(name))
    )


def write_difference(name: str, mean: float, half: float) -> tuple[str, str]:
    """Format the difference in a metric and its confidence interval.

    For the logarithm of a ratio, format the ratio as a single text.
    """
    scale = describe_figure(name).scale
    if is_ratio(name):
        return format_factor(mean, half), ""
    return format_interval(mean * scale, half * scale, decimals_of_metric(name), signed=True)


def decimals_of_metric(name: str) -> tuple[int, int]:
    """Return a metric's minimum and maximum number of displayed decimal places."""
    return PERCENT_DECIMALS if describe_figure(name).scale == 100 else PLAIN_DECIMALS


def render_latex_table(
    rows: list[Row],
    caption: str,
    chosen: Sequence[str] | None = None,
    marks: Mapping[str, HighlightedRows] = MappingProxyType({}),
) -> str:
    """Render the results as a LaTeX table (package booktabs). The table has the columns that `latex_columns` returns.

    Args:
        rows: rows of the results table.
        caption: caption of the table.
        chosen: columns to include, by their names in the CSV file.
        marks: rows to set in bold or mark with a dagger, keyed by metric.
    """
    columns = latex_columns(rows, chosen)
    several = len({row.run for row in rows}) > 1
    head = [*(["Run"] if several else []), "Method", "Model", *columns.values()]
    legend = [
        *(["Bold: the best mean of a column."] if any(m.best for m in marks.values()) else []),
        *(
            ["$^{\\dagger}$: not significantly worse than the best (paired t test over seeds, Holm, 5\\,\\%)."]
            if any(m.not_worse for m in marks.values())
            else []
        ),
    ]
    lines = []
    for place, row in enumerate(rows):
        cells = [*([escape_tex(row.run)] if several else []), escape_tex(row.method), escape_tex(row.model)]
        for name in columns:
            mark = marks.get(name, HighlightedRows())
            best, beside = place in mark.best, place in mark.not_worse
            cells.append(mark_cell(*render_cell(name, row.figures.get(name)), best=best, dagger=beside))
        lines.append(" & ".join(cells) + " \\\\" + ("" if row.is_complete else f" % {row.status}"))
    words = ". ".join([escape_tex(caption), *([" ".join(legend)] if legend else [])])
    return "\n".join(
        [BOOKTABS_LINE, *latex_tabular(words, "l" * (3 if several else 2) + "r" * len(columns), head, lines), ""]
    )


def latex_tabular(caption: str, columns: str, heads: Sequence[str], lines: Sequence[str]) -> list[str]:
    """Return the lines of a LaTeX table.

    Args:
        caption: caption of the table, as LaTeX.
        columns: alignment of the columns, such as ``llr``.
        heads: titles of the columns, as plain text.
        lines: lines of the table body, as LaTeX.
    """
    head = " & ".join(map(escape_tex, heads)) + " \\\\"
    first = ["\\begin{table}", "\\centering", f"\\caption{{{caption}}}", f"\\begin{{tabular}}{{{columns}}}"]
    return [*first, "\\toprule", head, "\\midrule", *lines, "\\bottomrule", "\\end{tabular}", "\\end{table}"]


_TEX_ESCAPES = {
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "²": "$^2$",
    "·": "$\\cdot$",
}


def escape_tex(text: str) -> str:
    """Escape the characters that LaTeX would interpret as commands."""
    return "".join(_TEX_ESCAPES.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def mark_cell(mean: str, half: str, *, best: bool = False, dagger: bool = False) -> str:
    r"""Format a LaTeX cell with a value and its half-width. The cell may be in bold or marked with a dagger.

    >>> mark_cell("91.2", "0.4"), mark_cell("91.2", "0.4", best=True), mark_cell("91", "", dagger=True)
    ('$91.2 \\pm 0.4$', '$\\mathbf{91.2 \\pm 0.4}$', '$91^{\\dagger}$')
    """
    if mean == UNKNOWN_DASH:
        return "--"
    body = re.sub(r"e(-?\d+)", r" \\times 10^{\1}", f"{mean} \\pm {half}" if half else mean)
    body = f"\\mathbf{{{body}}}" if best else f"{body}^{{\\dagger}}" if dagger else body
    plain_text = not (half or best or dagger or "times" in body or body.startswith(("+", "-")))
    return (body if plain_text else f"${body}$").replace("\u202f", "\\,")
