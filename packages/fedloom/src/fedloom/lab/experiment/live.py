"""Live: figures of an unfinished run, for its report in the meantime."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq

from fedloom.engine.state import State
from fedloom.lab.experiment.outputs import labelled, of_runs, write_parquet
from fedloom.rundir import LIVE, METRICS, PARTITION, SETTINGS, SUMMARY, TIMINGS, WORK, file_name
from fedloom.storage.files import make_folder

PAUSE = 2.0
"""Seconds between two files of these figures of a run, at least."""


class LiveFigures:
    """A callback of `simulate` that writes a run's figures in the meantime, so that others can look; see `snapshot`.

    Args:
        out: the run directory.
        label: of the method.
        seed: of the run.
        rounds: of the run, whose last ones are written in any case.
    """

    def __init__(self, out: Path, label: str, seed: int, rounds: int) -> None:
        self._folder, self._label, self._seed, self._rounds = out / LIVE, label, seed, rounds
        self._last, self._records_written = time.monotonic(), 0

    def __call__(self, state: State) -> None:
        """After a round, where something was measured since the last file."""
        count, now = len(state.records.items), time.monotonic()
        if count == self._records_written or (now - self._last < PAUSE and state.round < self._rounds):
            return
        self._last, self._records_written = now, count
        make_folder(self._folder)
        name = f"{file_name(self._label)}-{self._seed}.parquet"
        write_parquet(self._folder / name, [labelled(state.records.table(), self._label, self._seed)])


def newest(out: Path) -> dict[str, int]:
    """The files of a run directory that a report reads, with their times: what differs when there is news."""
    names = (SETTINGS, METRICS, TIMINGS, PARTITION, SUMMARY)
    paths = [*(out / name for name in names), *_live_files(out)]
    times = dict[str, int]()
    for path in paths:
        with suppress(FileNotFoundError):  # a run deletes its files in `LIVE` at its end
            times[path.name] = path.stat().st_mtime_ns
    return times


def snapshot(out: Path, into: Path) -> Path:
    """A run directory with the figures so far, for a report: `out` of a finished run, else a copy of its tables.

    Args:
        out: the run directory.
        into: folder to write.

    Raises:
        FileNotFoundError: the run ends, or is deleted, at this moment.
    """
    live = {path.name: path for path in _live_files(out)}
    if not live:
        return out
    make_folder(into)
    tables = [pq.read_table(path) for path in live.values()]
    recorded = {(t["method"][0].as_py(), t["seed"][0].as_py()) for t in tables if t.num_rows}
    if (out / METRICS).exists():
        tables = [of_runs(pq.read_table(out / METRICS), recorded, invert=True), *tables]
    for name in (SETTINGS, TIMINGS, PARTITION):
        (into / name).unlink(missing_ok=True)
        if (out / name).exists():
            shutil.copyfile(out / name, into / name)
    write_parquet(into / METRICS, tables)
    return into


def _live_files(out: Path) -> list[Path]:
    """Files of figures, of runs of this machine and of those that other processes have claimed, newer attempts last."""
    claimed = sorted(out.glob(f"{WORK}/*/*/{LIVE}/*.parquet"), key=lambda path: int(path.parts[-3]))
    return [*sorted((out / LIVE).glob("*.parquet")), *claimed]
