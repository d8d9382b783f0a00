"""Live metrics of an unfinished run, for interim reports."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq

from fedloom.engine.state import State
from fedloom.lab.experiment.outputs import label_rows, select_runs, write_parquet
from fedloom.rundir import (
    LIVE_FOLDER,
    METRICS_FILE,
    PARTITION_FILE,
    SETTINGS_FILE,
    SUMMARY_FILE,
    TIMINGS_FILE,
    WORK_FOLDER,
    file_name,
)
from fedloom.storage.files import make_folder

WRITE_INTERVAL_SECONDS = 2.0
"""Minimum number of seconds between two writes of a run's live metrics."""


class LiveFigures:
    """Callback for `simulate` that writes the metrics of a run in progress, so that other processes can read them.

    Args:
        out: the run directory.
        label: label of the method.
        seed: seed of the run.
        rounds: number of rounds of the run. The metrics of the last round are always written.
    """

    def __init__(self, out: Path, label: str, seed: int, rounds: int) -> None:
        self._folder, self._label, self._seed, self._rounds = out / LIVE_FOLDER, label, seed, rounds
        self._last, self._records_written = time.monotonic(), 0

    def __call__(self, state: State) -> None:
        """Write all metrics after a round, unless there are no new measurements or the last write was too recent."""
        count, now = len(state.records.items), time.monotonic()
        if count == self._records_written or (now - self._last < WRITE_INTERVAL_SECONDS and state.round < self._rounds):
            return
        self._last, self._records_written = now, count
        make_folder(self._folder)
        name = f"{file_name(self._label)}-{self._seed}.parquet"
        write_parquet(self._folder / name, [label_rows(state.records.table(), self._label, self._seed)])


def find_modified_files(out: Path) -> dict[str, int]:
    """Return the modification times of the files that a report reads from a run directory, keyed by file name.

    The report is out of date if these times change.
    """
    names = (SETTINGS_FILE, METRICS_FILE, TIMINGS_FILE, PARTITION_FILE, SUMMARY_FILE)
    paths = [*(out / name for name in names), *_live_files(out)]
    times = dict[str, int]()
    for path in paths:
        with suppress(FileNotFoundError):  # a run deletes its files in `LIVE_FOLDER` at its end
            times[path.name] = path.stat().st_mtime_ns
    return times


def copy_live_run(out: Path, into: Path) -> Path:
    """Write a copy of a run directory with the current metrics, and return its path.

    If the run is finished, return the path of the directory itself.

    Args:
        out: the run directory.
        into: folder for the copy.

    Raises:
        FileNotFoundError: the run ended, or was deleted, during the call.
    """
    live = {path.name: path for path in _live_files(out)}
    if not live:
        return out
    make_folder(into)
    tables = [pq.read_table(path) for path in live.values()]
    recorded = {(t["method"][0].as_py(), t["seed"][0].as_py()) for t in tables if t.num_rows}
    if (out / METRICS_FILE).exists():
        tables = [select_runs(pq.read_table(out / METRICS_FILE), recorded, invert=True), *tables]
    for name in (SETTINGS_FILE, TIMINGS_FILE, PARTITION_FILE):
        (into / name).unlink(missing_ok=True)
        if (out / name).exists():
            shutil.copyfile(out / name, into / name)
    write_parquet(into / METRICS_FILE, tables)
    return into


def _live_files(out: Path) -> list[Path]:
    """Return the live-metrics files of this process and of processes with claims, latest attempts last."""
    claimed = sorted(out.glob(f"{WORK_FOLDER}/*/*/{LIVE_FOLDER}/*.parquet"), key=lambda path: int(path.parts[-3]))
    return [*sorted((out / LIVE_FOLDER).glob("*.parquet")), *claimed]
