"""Disk: a run's checkpoints, from its state and back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fedloom.errors import Stop
from fedloom.running.checkpoint import Checkpoints
from fedloom.running.job import Job
from fedloom.running.setup import fingerprint
from fedloom.running.state import State


class Disk:
    """The run's checkpoints; without a folder, nothing is saved.

    Args:
        job: the run.
        folder: of the checkpoints.
        mark: what the checkpoints must agree on; the job's fingerprint when None.

    Attributes:
        seconds: duration of every round.
        detail: round, clients and numbers of an early end.
        more: what else is saved with every checkpoint; what JSON can hold.
    """

    def __init__(self, job: Job, folder: Path | None, mark: str | None = None) -> None:
        self._job, self._stores = job, job.stores
        self._checkpoints = None if folder is None else Checkpoints(folder)
        self._mark = "" if folder is None else mark or fingerprint(job)
        self._saved = time.monotonic()
        self.seconds: list[float] = []
        self.detail = ""
        self.more: dict[str, Any] = {}

    def resume(self, start: State) -> tuple[State, Stop | None]:
        """The newest state, and why the run had stopped there, if it had."""
        loaded = None if self._checkpoints is None else self._checkpoints.resume(self._mark, self._stores)
        if loaded is None:
            return start, None
        meta = loaded.meta
        self.seconds, self.detail, self.more = meta["seconds"], meta["detail"], meta["more"]
        state = start.restored(meta["round"], loaded.tensors, meta["notes"] + loaded.warnings)
        return state, meta["stop"] and Stop[meta["stop"]]

    def save(self, state: State, stop: Stop | None, detail: str = "") -> None:
        """A checkpoint of the state."""
        if self._checkpoints is None:
            return
        meta: dict[str, Any] = {
            "round": state.round,
            "stop": stop and stop.name, "detail": detail, "notes": state.notes, "seconds": self.seconds,
            "more": self.more,
        }  # fmt: skip
        newest = max(self._checkpoints.generations(), default=0)
        self._checkpoints.save(newest + 1, state.tensors(), meta, fingerprint=self._mark, stores=self._stores)
        self._saved = time.monotonic()

    def save_if_due(self, state: State) -> None:
        """A checkpoint when the last one is long enough ago."""
        if time.monotonic() - self._saved >= self._job.engine.checkpoint_every:
            self.save(state, None)
