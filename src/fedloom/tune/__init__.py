"""Tuning: the settings of every method of an experiment, chosen on validation with equal trials and equal work."""

from fedloom.tune.trial import Trial
from fedloom.tune.tuning import Tuning

__all__ = ["Trial", "Tuning"]
