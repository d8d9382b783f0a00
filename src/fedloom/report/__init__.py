"""Reports of recorded runs: one offline page, tables as Arrow, CSV and LaTeX, charts as SVG. Reads files only."""

from __future__ import annotations

from fedloom.report.charts import kit, look
from fedloom.report.comparison.card import check_card, write_card
from fedloom.report.comparison.criteria import NEAR, cumulative
from fedloom.report.comparison.family import (
    LEVEL,
    MODERATED_LEVEL,
    PairVerdict,
    TestedDifference,
    differences,
    family,
    holm,
    log_ratio,
    pair_verdict,
    prior_of,
)
from fedloom.report.comparison.moderated import seeds_for
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
    "MODERATED_LEVEL",
    "NEAR",
    "WORK",
    "Curve",
    "Estimate",
    "Key",
    "PairVerdict",
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
    "log_ratio",
    "look",
    "pair_verdict",
    "prior_of",
    "read_runs",
    "result_table",
    "seeds_for",
    "seeds_of",
    "test_metrics",
    "write",
    "write_card",
]  # fmt: skip
