"""Tuning: the settings of every method of an experiment, chosen on validation with equal trials and equal work."""

from __future__ import annotations

from fedloom.tune.search import SearchResult, check_values, space_of, with_params
from fedloom.tune.trial import Trial
from fedloom.tune.tuning import Tuning

__all__ = ["SearchResult", "Trial", "Tuning", "check_values", "space_of", "with_params"]
