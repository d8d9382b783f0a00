"""Checkpoints of a run, and the fingerprint that they and all ranks must agree on.

Of several ranks, the first reads and writes for all.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedloom.engine.job import Job
from fedloom.engine.setting import Setting
from fedloom.engine.state import State, Times
from fedloom.errors import ConfigError, Stop
from fedloom.imports import source_of
from fedloom.models.spec import weights_content
from fedloom.schedule import Trace
from fedloom.storage.checkpoint import Checkpoints
from fedloom.version import __version__


class Resumed(NamedTuple):
    """A run as its newest checkpoint has it.

    Attributes:
        state: the state to go on from.
        stop: why the run had ended there; None where the same command resumes it.
        detail: round, clients and numbers of that end.
        diverged: the round by which the run had diverged, if it went on to its end.
        extras: what a kind of run saves beside its state.
    """

    state: State
    stop: Stop | None = None
    detail: str = ""
    diverged: int | None = None
    extras: Mapping[str, Any] = {}


class RunCheckpoints:
    """The checkpoints of a run; without a folder, nothing is saved.

    Args:
        job: the run.
        folder: the folder of the checkpoints.
        mark: what the checkpoints must agree on; the job's fingerprint when None.
        every_round: save after every round, whenever the last one was.
    """

    def __init__(self, job: Job, folder: Path | None, mark: str | None = None, *, every_round: bool = False) -> None:
        self._job, self._stores = job, job.stores
        self._saves, self.every_round = folder is not None, every_round
        self._checkpoints = None if folder is None or job.ranks.rank > 0 else Checkpoints(folder)
        self._mark = "" if self._checkpoints is None else mark or fingerprint(job)
        self._numbers = {**job.setting.numbers(), **job.replay.marks()}
        self._saved = time.monotonic()

    def resume(self, start: State) -> Resumed:
        """Read the newest checkpoint; ``start`` where there is none."""
        resumed, ranks = self._resume(start), self._job.ranks
        if ranks.size == 1:
            return resumed
        state, stop, detail, diverged, _ = resumed
        local_state = (state.round, state.tensors(), [*state.notes], stop and stop.name, detail, diverged)
        round, tensors, notes, name, detail, diverged = ranks.share(local_state)
        self._job.locations.begin()
        if ranks.rank > 0:
            state = start.restored(round, tensors, notes, start.times)
        return Resumed(state, name and Stop[name], detail, diverged)

    def _resume(self, start: State) -> Resumed:
        if self._checkpoints is None:
            return Resumed(start)
        loaded = self._checkpoints.resume(self._mark, self._stores, self._numbers)
        if loaded is None:
            return Resumed(start)
        meta = loaded.meta
        times = Times.resumed(meta["seconds"], meta.get("firsts", [0]))
        state = start.restored(meta["round"], loaded.tensors, [*meta["notes"], *loaded.warnings], times)
        stop = Stop[meta["stop"]] if meta["stop"] else None
        ended = None if stop is None or stop.resumable else stop
        return Resumed(state, ended, meta["detail"], meta.get("diverged"), meta["more"])

    def save(
        self, state: State, stop: Stop | None = None, detail: str = "", diverged: int | None = None, **extras: Any
    ) -> None:
        """Write a checkpoint of the state; ``extras`` are what JSON can hold."""
        self._job.locations.collect()
        self._saved = time.monotonic()
        if self._checkpoints is None:
            return
        meta: dict[str, Any] = {
            "round": state.round, "stop": stop and stop.name, "detail": detail, "notes": [*state.notes],
            "seconds": [*state.times.rounds], "firsts": [*state.times.process_starts], "diverged": diverged,
            "more": extras, "numbers": self._numbers,
        }  # fmt: skip
        newest = max(self._checkpoints.generations(), default=0)
        self._checkpoints.save(newest + 1, state.tensors(), meta, fingerprint=self._mark, stores=self._stores)
        self._saved = time.monotonic()

    def is_due(self) -> bool:
        """Whether the last checkpoint is long enough ago for another."""
        return (
            self._saves
            and not self.every_round
            and time.monotonic() - self._saved >= self._job.setting.engine.checkpoint_every
        )


def fingerprint(job: Job) -> str:
    """Everything that a run's numbers depend on, as 16 hexadecimal digits."""
    data = hashlib.blake2b(job.alpha.cpu().numpy().tobytes(), digest_size=16)
    for part in sorted(job.eval_fed.parts):
        data.update(job.eval_fed.parts[part].index.cpu().numpy().tobytes())
        data.update(job.eval_fed.parts[part].offsets.cpu().numpy().tobytes())
    if job.fed.noise is not None:
        data.update(job.fed.noise.cpu().numpy().tobytes())
    text = json.dumps(
        {
            "setting": {**job.setting.numbers(), **job.replay.marks()},
            "engine": [job.oracle.name, job.chunk],
            "data": [job.eval_fed.data.checksum(), data.hexdigest(), job.fed.n],
            **_beyond(job),
            "user code": [s for code in _user_code(job.setting) if (s := source_of(code))],
        },
        sort_keys=True,
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _beyond(job: Job) -> dict[str, str]:
    """What a run has from elsewhere, as digests, mostly nothing: frozen parameters, a file of weights, of devices."""
    frozen = [p for p in job.oracle.module.parameters() if not p.requires_grad]
    digests = dict[str, str]()
    if isinstance(job.setting.devices, Trace):
        trace = Path(job.setting.devices.file).expanduser().read_bytes()
        digests["devices"] = hashlib.blake2b(trace, digest_size=16).hexdigest()
    if not frozen and job.setting.model.weights is None:
        return digests
    digest = hashlib.blake2b(digest_size=16)
    for p in frozen:
        digest.update(p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    if job.setting.model.weights is not None:
        digest.update(weights_content(job.setting.model.weights))
    return {**digests, "base": digest.hexdigest()}


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
    local = {
        "the experiment, its code or data": fingerprint(job),
        "fedloom": __version__,
        "torch": torch.__version__,
        "the processor's instructions": torch.backends.cpu.get_cpu_capability(),
        "device": job.oracle.device.type,
    }
    for rank, remote in enumerate(job.ranks.gather(local)):
        for what, value in local.items():
            if value != remote[what]:
                raise ConfigError(
                    f"rank {rank} differs from rank {job.ranks.rank} in {what}: {remote[what]} there, {value} here; "
                    "give every machine the same files and installation"
                )
