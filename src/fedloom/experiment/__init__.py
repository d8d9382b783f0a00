"""Experiments: TOML files, validated values, runs and run directories.

Every name is imported when it is first touched: `fedloom list` answers without torch, and a deployed site runs no plan.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedloom.experiment.editors import json_schema
    from fedloom.experiment.execute import Plan
    from fedloom.experiment.file import parse, read
    from fedloom.experiment.listing import listed
    from fedloom.experiment.opened import Opened, Recorded, open_run
    from fedloom.experiment.outputs import Outcome
    from fedloom.experiment.schema import Experiment, Method

_WHERE = {
    "Experiment": "schema",
    "Method": "schema",
    "Opened": "opened",
    "Outcome": "outputs",
    "Plan": "execute",
    "Recorded": "opened",
    "json_schema": "editors",
    "listed": "listing",
    "open_run": "opened",
    "parse": "file",
    "read": "file",
}

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


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
