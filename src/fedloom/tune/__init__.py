"""Tuning: the settings of every method of an experiment, chosen on validation with equal trials and equal work."""

from fedloom.tune.plan import Tuning
from fedloom.tune.trials import Trial

__all__ = ["Trial", "Tuning"]
