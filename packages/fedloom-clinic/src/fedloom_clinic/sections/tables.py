"""Sections on analyses computed from sums over clients.

The sections show the most important numbers as means over seeds. The CSV file contains all numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from fedloom.errors import RunDirError
from fedloom.formats import UNKNOWN_DASH, format_p_value, format_significant
from fedloom.lab.sections import Row, Run, Section, plain_section, render_scrolling_table
from fedloom.rundir import REPAIR_HINT, analysis_file


class ShownTable(NamedTuple):
    """Parts of a recorded table that a section shows.

    Attributes:
        title: heading of the section.
        lead: sentences that follow the heading.
        keys: headings of the columns that identify a row, keyed by column.
        values: headings of the columns with numbers, keyed by column.
    """

    title: str
    lead: str
    keys: Mapping[str, str]
    values: Mapping[str, str]


SHOWN_TABLES: Mapping[str, ShownTable] = {
    "calibration": ShownTable(
        "Calibration",
        "Mean predicted probability and observed frequency by score bin over the test rows of all clients. The "
        "calibration error is the mean gap between the two. The Brier score is the mean squared error of the "
        "probabilities.",
        {"low": "Scores from", "high": "to"},
        {"rows": "Rows", "predicted": "Predicted", "observed": "Observed", "calibration_error": "Calibration error",
         "brier": "Brier score"},
    ),
    "conformal": ShownTable(
        "Conformal sets",
        "With this threshold, prediction sets contain the true class, or intervals the true number, with the target "
        "probability. Coverage is measured on other test rows. A shared threshold reaches the target coverage over "
        "the pooled clients, not at each client.",
        {"client": "Clients"},
        {"threshold": "Threshold", "rows": "Calibration rows", "wanted": "Wanted coverage", "test_rows": "Test rows",
         "coverage": "Coverage", "set_size": "Classes in a set", "interval_width": "Width of the interval"},
    ),
    "pooled-importance": ShownTable(
        "Importance of columns",
        "Loss in accuracy and Brier score over the test rows of all clients when a column is permuted within each "
        "client. The loss is 0 for a column that the model does not use.",
        {"column": "Column", "metric": "Metric"},
        {"value": "Loss", "unpermuted": "Metric before", "rows": "Rows"},
    ),
    "table-1": ShownTable(
        "Table 1",
        "Rows of all clients, by column and group. The p-values test whether means or level proportions are equal in "
        "all groups and at all clients.",
        {"column": "Column", "level": "Level", "group": "Group", "note": "Note"},
        {"rows": "Rows", "share": "Share", "missing": "Missing", "mean": "Mean", "deviation": "Standard deviation",
         "median": "Median", "standardized_difference": "Standardized difference", "p_groups": "p of groups",
         "p_clients": "p of clients"},
    ),
    "kaplan-meier": ShownTable(
        "Survival by group",
        "Restricted mean survival times with standard errors, and the log-rank test across groups. The CSV file "
        "contains the curves.",
        {"group": "Group"},
        {"restricted_mean": "Restricted mean", "restricted_mean_se": "Standard error", "log_rank": "Log-rank statistic",
         "p": "p"},
    ),
    "glm": ShownTable(
        "Generalized linear model",
        "Coefficients over the rows of all clients, computed from sums only.",
        {"column": "Column"},
        {"coefficient": "Coefficient", "standard_error": "Standard error", "low": "95 % from", "high": "to", "p": "p"},
    ),
    "ridge": ShownTable(
        "Ridge regression",
        "Coefficients over the rows of all clients, computed from sums only.",
        {"output": "Output", "input": "Input"},
        {"coefficient": "Coefficient"},
    ),
}  # fmt: skip
"""Sections, keyed by the kind of the analysis."""


def make_section(kind: str, runs: list[Run], rows: list[Row], lead: str) -> Section | None:
    """Return the section on a kind of analysis, or None if no run contains this analysis."""
    shown, body, plain = SHOWN_TABLES[kind], "", plain_section(runs, analysis_file(kind))
    for run in runs:
        path = run.path / analysis_file(kind)
        if not plain_section([run], path.name).body:  # also checks the file
            continue
        try:
            table = pq.read_table(path)
            keys = {
                name: head for name, head in {"method": "Method", **shown.keys}.items() if name in table.column_names
            }
            values = {name: head for name, head in shown.values.items() if name in table.column_names}
            means = table.group_by([*keys], use_threads=False).aggregate([(name, "mean") for name in values])
        except pa.ArrowException as error:
            raise RunDirError(f"{path} is damaged: {error}. {REPAIR_HINT}") from None
        empty = {name for name in values if means[f"{name}_mean"].null_count == len(means)}
        lines = [
            [*(_cell_text(line[name]) for name in keys),
             *(_figure_text(name, line[f"{name}_mean"]) for name in values if name not in empty)]
            for line in means.to_pylist()
        ]  # fmt: skip
        heads = [*keys.values(), *(head for name, head in values.items() if name not in empty)]
        label = f"{shown.title}{f', {run.label}' if len(runs) > 1 else ''}"
        body += render_scrolling_table(label, heads, lines, title=label if len(runs) > 1 else "")
    return Section(shown.title, shown.lead, body, plain.files) if body else None


def _cell_text(value: object) -> str:
    return "" if value is None else format_significant(value) if isinstance(value, float) else str(value)


def _figure_text(name: str, value: float | None) -> str:
    if value is None:
        return UNKNOWN_DASH
    return format_p_value(value) if name == "p" or name.startswith("p_") else format_significant(value)


calibration, conformal, glm, kaplan_meier, pooled_importance, ridge, table_one = (
    partial(make_section, kind)
    for kind in ("calibration", "conformal", "glm", "kaplan-meier", "pooled-importance", "ridge", "table-1")
)
