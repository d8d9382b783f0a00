"""Disk: a run's checkpoints, from its state and back; of several ranks, the first reads and writes for all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fedloom.engine.job import Job
from fedloom.engine.setup import fingerprint
from fedloom.engine.state import State, Times
from fedloom.errors import Stop
from fedloom.storage.checkpoint import Checkpoints


class Disk:
    """The run's checkpoints; without a folder, nothing is saved.

    Args:
        job: the run.
        folder: of the checkpoints.
        mark: what the checkpoints must agree on; the job's fingerprint when None.

    Attributes:
        times: seconds of the rounds.
        detail: round, clients and numbers of an early end.
        diverged: by which round the run had diverged, if it went on to its end.
        more: what else is saved with every checkpoint; what JSON can hold.
    """

    def __init__(self, job: Job, folder: Path | None, mark: str | None = None) -> None:
        self._job, self._stores = job, job.stores
        self._kept = folder is not None
        self._checkpoints = None if folder is None or job.ranks.rank > 0 else Checkpoints(folder)
        self._mark = "" if self._checkpoints is None else mark or fingerprint(job)
        self._numbers = {**job.setting.numbers(), **job.replay.marks()}
        self._saved = time.monotonic()
        self.times, self.detail = Times(), ""
        self.diverged: int | None = None
        self.more: dict[str, Any] = {}

    def resume(self, start: State) -> tuple[State, Stop | None]:
        """The newest state, and why the run had stopped there, if it had."""
        state, stop = self._resume(start)
        ranks = self._job.ranks
        if ranks.size == 1:
            return state, stop
        round, tensors, notes, name = ranks.share((state.round, state.tensors(), state.notes, stop and stop.name))
        self._job.homes.begin()
        return (state if ranks.rank == 0 else start.restored(round, tensors, notes)), name and Stop[name]

    def _resume(self, start: State) -> tuple[State, Stop | None]:
        loaded = (
            None if self._checkpoints is None else self._checkpoints.resume(self._mark, self._stores, self._numbers)
        )
        if loaded is None:
            return start, None
        meta = loaded.meta
        self.times, self.diverged = Times(meta["seconds"], meta.get("firsts", [0])), meta.get("diverged")
        self.detail, self.more = meta["detail"], meta["more"]
        state = start.restored(meta["round"], loaded.tensors, meta["notes"] + loaded.warnings)
        return state, meta["stop"] and Stop[meta["stop"]]

    def save(self, state: State, stop: Stop | None, detail: str = "") -> None:
        """A checkpoint of the state."""
        self._job.homes.collect()
        self._saved = time.monotonic()
        if self._checkpoints is None:
            return
        meta: dict[str, Any] = {
            "round": state.round,
            "stop": stop and stop.name, "detail": detail, "notes": state.notes, "seconds": self.times.rounds,
            "firsts": self.times.firsts, "diverged": self.diverged, "more": self.more, "numbers": self._numbers,
        }  # fmt: skip
        newest = max(self._checkpoints.generations(), default=0)
        self._checkpoints.save(newest + 1, state.tensors(), meta, fingerprint=self._mark, stores=self._stores)
        self._saved = time.monotonic()

    def save_if_due(self, state: State) -> None:
        """A checkpoint when the last one is long enough ago."""
        late = time.monotonic() - self._saved >= self._job.setting.engine.checkpoint_every
        if self._kept and self._job.ranks.any(late):
            self.save(state, None)
