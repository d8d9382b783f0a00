"""Reports of recorded runs: a single offline HTML page, tables as Arrow, CSV and LaTeX, and charts as SVG.

Reports are computed from the recorded files alone.
"""

from __future__ import annotations

from fedloom.lab.report.charts import kit, look
from fedloom.lab.report.comparison.card import check_card, write_card
from fedloom.lab.report.comparison.conclusion import comparison_record, conclude_groups, conclude_runs
from fedloom.lab.report.comparison.criteria import TARGET_SHARE, accumulate_cost
from fedloom.lab.report.comparison.family import (
    FAMILY_ERROR_LEVEL,
    MODERATED_LEVEL,
    DifferenceTest,
    PairVerdict,
    adjust_by_holm,
    fit_common_prior,
    log_ratio,
    pair_verdict,
    run_family_tests,
    seed_differences,
)
from fedloom.lab.report.comparison.moderated import required_seeds
from fedloom.lab.report.csv_files import render_table_csv
from fedloom.lab.report.numbers import (
    EMPTY_CURVE,
    MIN_SEEDS,
    MODEL_KINDS,
    WORK_FIGURES,
    Curve,
    Estimate,
    benign_curve,
    find_seeds,
    half_width,
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
    "DifferenceTest",
    "Estimate",
    "Key",
    "PairVerdict",
    "Run",
    "accumulate_cost",
    "adjust_by_holm",
    "benign_curve",
    "check_card",
    "comparison_record",
    "conclude_groups",
    "conclude_runs",
    "find_seeds",
    "fit_common_prior",
    "half_width",
    "kit",
    "log_ratio",
    "look",
    "pair_verdict",
    "read_runs",
    "render_table_csv",
    "required_seeds",
    "result_table",
    "run_family_tests",
    "seed_differences",
    "test_metrics",
    "write_card",
    "write_report",
]  # fmt: skip
