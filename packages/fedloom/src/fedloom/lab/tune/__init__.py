"""Tuning: choose each method's settings on validation data, with equal numbers of trials and compute budgets."""

from __future__ import annotations

from fedloom.lab.tune.search import SearchResult, build_search_space, check_values, replace_params
from fedloom.lab.tune.trial import Trial, make_scored_setting
from fedloom.lab.tune.tuning import Tuning
from fedloom.lab.tune.work import Budget, plain_budget

__all__ = [
    "Budget",
    "SearchResult",
    "Trial",
    "Tuning",
    "build_search_space",
    "check_values",
    "make_scored_setting",
    "plain_budget",
    "replace_params",
]  # fmt: skip
