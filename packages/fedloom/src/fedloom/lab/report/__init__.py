"""Reports of recorded runs: a single offline HTML page, tables as Arrow, CSV and LaTeX, and charts as SVG.

The reports are computed only from the recorded files.
"""

from __future__ import annotations

from fedloom.lab.report.charts import kit, look
from fedloom.lab.report.comparison.card import check_card, write_card
from fedloom.lab.report.comparison.conclusion import as_record, conclude, conclusions
from fedloom.lab.report.comparison.criteria import TARGET_SHARE, cumulative
from fedloom.lab.report.comparison.family import (
    FAMILY_ERROR_LEVEL,
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
from fedloom.lab.report.comparison.moderated import seeds_for
from fedloom.lab.report.csv_files import csv_of_table
from fedloom.lab.report.numbers import (
    EMPTY_CURVE,
    MIN_SEEDS,
    MODEL_KINDS,
    WORK_FIGURES,
    Curve,
    Estimate,
    curve,
    half_width,
    seeds_of,
    test_metrics,
)  # fmt: skip
from fedloom.lab.report.page import write_report
from fedloom.lab.report.reading import read_runs
from fedloom.lab.report.run import Key, Run
from fedloom.lab.report.tables import result_table

__all__ = [
    "EMPTY_CURVE",
    "FAMILY_ERROR_LEVEL",
    "MIN_SEEDS",
    "MODEL_KINDS",
    "MODERATED_LEVEL",
    "TARGET_SHARE",
    "WORK_FIGURES",
    "Curve",
    "Estimate",
    "Key",
    "PairVerdict",
    "Run",
    "TestedDifference",
    "as_record",
    "check_card",
    "conclude",
    "conclusions",
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
    "write_card",
    "write_report",
]  # fmt: skip
