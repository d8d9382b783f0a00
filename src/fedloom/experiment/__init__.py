"""Experiments: TOML files, validated values, runs and run directories."""

from fedloom.experiment.editors import json_schema
from fedloom.experiment.execute import Plan
from fedloom.experiment.listing import listed
from fedloom.experiment.opened import Opened, Recorded, open_run
from fedloom.experiment.outputs import Outcome
from fedloom.experiment.schema import Experiment, Method, parse, read

__all__ = [
    "Experiment",
    "Method",
    "Opened",
    "Outcome",
    "Plan",
    "Recorded",
    "json_schema",
    "listed",
    "open_run",
    "parse",
    "read",
]
