"""Additional runs that some analyses train after an experiment, split into units that any process can compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from fedloom.analyses import Analysis
from fedloom.analyses.fitted import Fitted
from fedloom.analyses.form import FurtherRun
from fedloom.data.federation import Federation
from fedloom.engine.result import Result
from fedloom.engine.setting import Setting
from fedloom.errors import Stop
from fedloom.lab.experiment.outputs import Outcome, find_measured_runs, write_further, write_parquet
from fedloom.lab.experiment.schema import Experiment, Method
from fedloom.lab.experiment.units.joined import WorkUnit
from fedloom.rundir import CHECKPOINTS_FOLDER, WORK_FOLDER, run_folder
from fedloom.storage.files import make_folder

ROWS_FILE = "rows.parquet"
"""File with the rows that one unit adds to an analysis table."""


class AnalysisRun(NamedTuple):
    """Additional run for an analysis, with the original run (label and seed) and its index within that run."""

    analysis: Analysis
    label: str
    seed: int
    number: int
    run: FurtherRun


class FurtherRuns:
    """Additional runs of an experiment that have not yet been executed.

    Args:
        experiment: experiment with its analyses.
        federations: federations, keyed by seed.
        out: the run directory.
        runs: method and seed of every run of the experiment.
        outcomes: outcome of every run, in the same order.
        train: function that executes a run, such as `simulate`.

    Attributes:
        units: additional runs that are still missing. Units of the same analysis and the same run are adjacent.
        methods: index of each unit's method in the experiment.
    """

    def __init__(
        self,
        experiment: Experiment,
        federations: Mapping[int, Federation],
        out: Path,
        runs: Sequence[tuple[Method, int]],
        outcomes: Sequence[Outcome],
        train: Callable[[Setting, Federation], Result],
    ) -> None:
        self._train = train
        self._analyses = [analysis for analysis in experiment.analyses if analysis.runs_further]
        self._out, self._before = out, [find_measured_runs(out, analysis) for analysis in self._analyses]
        self.units, self.methods = list[AnalysisRun](), list[int]()
        for analysis, before in zip(self._analyses, self._before, strict=True):
            for (method, seed), outcome in zip(runs, outcomes, strict=False):
                fitted = isinstance(method.setting.algorithm, Fitted)  # without training
                if fitted or (method.label, seed) in before or outcome.result is None or not outcome.complete:
                    continue
                further = analysis.units(method.setting.with_(seed=seed), federations[seed], outcome.result)
                needed = [AnalysisRun(analysis, method.label, seed, k, run) for k, run in enumerate(further)]
                self.units += needed
                self.methods += [experiment.compared.index(method)] * len(needed)

    def measure(self, k: int, workers: int) -> pa.Table | None:
        """Execute a unit's run with the given number of processes, and return the added rows.

        Return None if the user stopped the run.
        """
        run = self.units[k].run
        result = self._train(run.setting.with_(engine=run.setting.engine.with_(workers=workers)), run.fed)
        return None if result.stop is Stop.INTERRUPTED else run.measure(result)

    def keep(self, k: int, rows: pa.Table, folder: Path) -> None:
        """Write the rows of a unit to a separate folder."""
        make_folder(folder)
        write_parquet(folder / ROWS_FILE, [rows])

    def place(self, k: int) -> WorkUnit:
        """Return a unit of the analysis as a unit of work, with the path of its published rows."""
        _, label, seed, number, _ = self.units[k]
        place = self._analyses.index(self.units[k].analysis)
        name = f"{run_folder(self._out, CHECKPOINTS_FOLDER, label, seed).name}@{place}-{number}"
        return WorkUnit(name, self._out / WORK_FOLDER / name / "done")

    def is_last(self, k: int) -> bool:
        """Return True if a unit is the last one of its analysis and run."""
        return k + 1 == len(self.units) or self.units[k + 1].number == 0

    def write(self, rows_by_unit: Sequence[pa.Table]) -> None:
        """Write the files of all analyses: the rows of the first units and the existing rows."""
        for analysis, before in zip(self._analyses, self._before, strict=True):
            tables = dict[tuple[str, int], list[pa.Table]]()
            for unit, rows in zip(self.units, rows_by_unit, strict=False):
                if unit.analysis is analysis:
                    tables.setdefault((unit.label, unit.seed), []).append(rows)
            write_further(self._out, analysis, tables, before)

    def write_published(self) -> None:
        """Write the files of all analyses from the rows published by the processes."""
        self.write([pq.read_table(self.place(k).target / ROWS_FILE) for k in range(len(self.units))])
