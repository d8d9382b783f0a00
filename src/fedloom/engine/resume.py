"""Disk: a run's checkpoints, from its state and back, and the fingerprint that they and all ranks must agree on.

Of several ranks, the first reads and writes for all.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch

from fedloom.engine.job import Job
from fedloom.engine.setting import Setting
from fedloom.engine.state import State, Times
from fedloom.errors import ConfigError, Stop
from fedloom.imports import source_of
from fedloom.storage.checkpoint import Checkpoints
from fedloom.version import __version__


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

    def late(self) -> bool:
        """Whether the last checkpoint is long enough ago for another."""
        return self._kept and time.monotonic() - self._saved >= self._job.setting.engine.checkpoint_every


def fingerprint(job: Job) -> str:
    """Everything that a run's numbers depend on, as 16 hexadecimal digits."""
    data = hashlib.blake2b(job.alpha.cpu().numpy().tobytes(), digest_size=16)
    for part in sorted(job.judge.parts):
        data.update(job.judge.parts[part].index.cpu().numpy().tobytes())
        data.update(job.judge.parts[part].offsets.cpu().numpy().tobytes())
    if job.fed.noise is not None:
        data.update(job.fed.noise.cpu().numpy().tobytes())
    text = json.dumps(
        {
            "setting": {**job.setting.numbers(), **job.replay.marks()},
            "engine": [job.oracle.name, job.chunk],
            "data": [job.judge.data.checksum(), data.hexdigest(), job.fed.n],
            **_beyond(job),
            "user code": [s for code in _user_code(job.setting) if (s := source_of(code))],
        },
        sort_keys=True,
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _beyond(job: Job) -> dict[str, str]:
    """What a model has from elsewhere: its frozen parameters and its file of weights, as a digest; mostly nothing."""
    frozen = [p for p in job.oracle.module.parameters() if not p.requires_grad]
    if not frozen and job.setting.model.weights is None:
        return {}
    digest = hashlib.blake2b(digest_size=16)
    for p in frozen:
        digest.update(p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    if job.setting.model.weights is not None:
        digest.update(Path(job.setting.model.weights).expanduser().read_bytes())
    return {"base": digest.hexdigest()}


def _user_code(setting: Setting) -> list[Any]:
    """Classes and functions that may be a user's."""
    return [*(type(value) for _, value in setting), *(f.call for f in setting.task.functions)]


def check_ranks(job: Job) -> None:
    """Refuse ranks that would not compute the same numbers.

    Raises:
        ConfigError: another experiment, other data, libraries or instructions of the processor.
    """
    if job.ranks.size == 1:
        return
    mine = {
        "the experiment, its code or data": fingerprint(job),
        "fedloom": __version__,
        "torch": torch.__version__,
        "the processor's instructions": torch.backends.cpu.get_cpu_capability(),
        "device": job.oracle.device.type,
    }
    for rank, theirs in enumerate(job.ranks.gather(mine)):
        for what, value in mine.items():
            if value != theirs[what]:
                raise ConfigError(
                    f"rank {rank} differs from rank {job.ranks.rank} in {what}: {theirs[what]} there, {value} here; "
                    "give every machine the same files and installation"
                )
