"""Toolkit for sections of the report: helpers for other packages to show their analyses' results.

A section is created by a function ``(runs, rows, lead) -> Section | None``, which is registered as an entry point in
the group ``fedloom.sections`` under the name of the analysis kind.
"""

from fedloom.lab.report.comparison.contenders import select_run_contenders
from fedloom.lab.report.comparison.gains import federated_leader, site_estimate, values_by_seed
from fedloom.lab.report.csv_files import render_csv
from fedloom.lab.report.markup import render_scrolling_table
from fedloom.lab.report.naming import describe_figure, titled
from fedloom.lab.report.numbers import Estimate, Row
from fedloom.lab.report.reading import read_columns, rows_where
from fedloom.lab.report.run import Run
from fedloom.lab.report.sections import Section, plain_section
from fedloom.lab.report.tables import cell_text

__all__ = [
    "Estimate",
    "Row",
    "Run",
    "Section",
    "cell_text",
    "describe_figure",
    "federated_leader",
    "plain_section",
    "read_columns",
    "render_csv",
    "render_scrolling_table",
    "rows_where",
    "select_run_contenders",
    "site_estimate",
    "titled",
    "values_by_seed",
]  # fmt: skip
