"""Experiments: TOML files, their checked values, runs and run directories.

Each name is imported on first use, so that `fedloom list` runs without importing torch and a deployed site does not
load the code that runs experiments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.lazy import lazy_names, make_dir, make_getattr

if TYPE_CHECKING:
    from fedloom.engine.checks.moved import restore_document as restore_document
    from fedloom.engine.checks.moved import update_document as update_document
    from fedloom.lab.experiment.editors import json_schema as json_schema
    from fedloom.lab.experiment.events import Event as Event
    from fedloom.lab.experiment.events import Listener as Listener
    from fedloom.lab.experiment.execute import Plan as Plan
    from fedloom.lab.experiment.file import parse as parse
    from fedloom.lab.experiment.file import read as read
    from fedloom.lab.experiment.listing import list_model_rows as list_model_rows
    from fedloom.lab.experiment.measure.cost import measure_rounds as measure_rounds
    from fedloom.lab.experiment.measure.cost import samples_per_round as samples_per_round
    from fedloom.lab.experiment.opened import RunDirectory as RunDirectory
    from fedloom.lab.experiment.opened import open_run as open_run
    from fedloom.lab.experiment.outputs import Outcome as Outcome
    from fedloom.lab.experiment.recorded import RecordedRun as RecordedRun
    from fedloom.lab.experiment.schema import Experiment as Experiment
    from fedloom.lab.experiment.schema import Method as Method
    from fedloom.lab.experiment.tuning import Tune as Tune
    from fedloom.lab.experiment.units.executors import Executor as Executor
    from fedloom.lab.experiment.units.executors import check_executor as check_executor
    from fedloom.lab.experiment.units.executors import compute_units as compute_units
    from fedloom.lab.experiment.units.executors import open_executor as open_executor
    from fedloom.lab.experiment.units.travel import PackedExperiment as PackedExperiment
    from fedloom.lab.experiment.units.travel import UnitReply as UnitReply
    from fedloom.lab.experiment.units.travel import unit_folder as unit_folder
    from fedloom.lab.experiment.units.travel import worker_name as worker_name

__all__ = [*lazy_names(__name__)]

__getattr__ = make_getattr(__name__)

__dir__ = make_dir(__name__)
