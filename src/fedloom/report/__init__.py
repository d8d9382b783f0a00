"""Reports of recorded runs: one offline page, tables as Arrow, CSV and LaTeX, charts as SVG. Reads files only."""

from __future__ import annotations

from fedloom.report.charts import kit, look
from fedloom.report.comparison.card import check_card, write_card
from fedloom.report.comparison.criteria import NEAR, cumulative
from fedloom.report.comparison.family import LEVEL, TestedDifference, differences, family, holm
from fedloom.report.csv_files import csv_of_table
from fedloom.report.numbers import (
    EMPTY,
    ENOUGH,
    MODELS,
    WORK,
    Curve,
    Estimate,
    curve,
    half_width,
    seeds_of,
    test_metrics,
)  # fmt: skip
from fedloom.report.page import write
from fedloom.report.reading import read_runs
from fedloom.report.run import Key, Run
from fedloom.report.tables import result_table

__all__ = [
    "EMPTY",
    "ENOUGH",
    "LEVEL",
    "MODELS",
    "NEAR",
    "WORK",
    "Curve",
    "Estimate",
    "Key",
    "Run",
    "TestedDifference",
    "check_card",
    "csv_of_table",
    "cumulative",
    "curve",
    "differences",
    "family",
    "half_width",
    "holm",
    "kit",
    "look",
    "read_runs",
    "result_table",
    "seeds_of",
    "test_metrics",
    "write",
    "write_card",
]  # fmt: skip
