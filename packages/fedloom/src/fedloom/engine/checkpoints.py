"""A run's checkpoints, and the fingerprint that all checkpoints and all ranks must share.

With several ranks, the first rank reads and writes the checkpoints for all of them.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Mapping
from inspect import getmembers, isfunction
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedloom.engine.checks.moved import restore_numbers, update_numbers
from fedloom.engine.job import Job
from fedloom.engine.records import Records
from fedloom.engine.setting import Setting
from fedloom.engine.state import State, Times
from fedloom.errors import ConfigError, RunDirError, Stop
from fedloom.imports import digest_source
from fedloom.models.spec import weights_content
from fedloom.schedule import Trace
from fedloom.storage.checkpoint import Checkpoints
from fedloom.values import Value
from fedloom.version import __version__

UNATTACKED_NOTE = "no attacker took part in any round, so no attack took place"
"""Note that is added after the last round if no attacker participated."""


class ResumedRun(NamedTuple):
    """State of a run according to its newest checkpoint.

    Attributes:
        state: state to continue from.
        stop: reason why the run ended in this state. None if the run can be resumed by the same command.
        detail: description of how the run ended, for example the round, the clients and the numbers involved.
        diverged: round in which divergence was detected, if the run still continued to its end.
        extras: additional values that only some kinds of runs save.
    """

    state: State
    stop: Stop | None = None
    detail: str = ""
    diverged: int | None = None
    extras: Mapping[str, Any] = {}


class RunCheckpoints:
    """Reader and writer of a run's checkpoints. Without a folder, nothing is saved.

    Args:
        job: the run.
        folder: checkpoint folder.
        mark: fingerprint that a checkpoint must have to be resumed. If None, the job's own fingerprint is used.
        every_round: True to save after every round, no matter how recent the last checkpoint is.
    """

    def __init__(self, job: Job, folder: Path | None, mark: str | None = None, *, every_round: bool = False) -> None:
        self._job, self._stores = job, job.stores
        self._saves, self.every_round, self._extends = folder is not None, every_round, mark is None
        self._checkpoints = (
            None if folder is None or job.ranks.rank > 0 else Checkpoints(folder, update_numbers=update_numbers)
        )
        self._mark = "" if self._checkpoints is None else mark or fingerprint(job)
        self._numbers = {**job.setting.numbers(), **job.replay.marks()}
        self._saved = time.monotonic()

    def resume(self, start: State) -> ResumedRun:
        """Read the newest checkpoint. If there is no checkpoint, return ``start``."""
        resumed, ranks = self._resume(start), self._job.ranks
        if ranks.size == 1:
            return resumed
        state, stop, detail, diverged, _ = resumed
        local_state = (state.round, state.tensors(), [*state.notes], stop and stop.name, detail, diverged)
        round, tensors, notes, name, detail, diverged = ranks.share(local_state)
        self._job.locations.begin()
        if ranks.rank > 0:
            state = start.restored(round, tensors, notes, start.times)
        return ResumedRun(state, name and Stop[name], detail, diverged)

    def _resume(self, start: State) -> ResumedRun:
        if self._checkpoints is None:
            return ResumedRun(start)
        shorter = self._shorter(self._checkpoints)
        job = self._job if shorter is None else _replace_rounds(self._job, shorter)
        mark, numbers = (self._mark, self._numbers) if shorter is None else (fingerprint(job), job.setting.numbers())
        loaded = self._checkpoints.resume(mark, self._stores, {**numbers, **job.replay.marks()})
        if loaded is None:
            return ResumedRun(start)
        meta = loaded.meta
        times = Times.resumed(meta["seconds"], meta.get("firsts", [0]))
        state = start.restored(meta["round"], loaded.tensors, [*meta["notes"], *loaded.warnings], times)
        if shorter is not None:  # drop the results of the earlier last round
            records = Records([r for r in state.records.items if r.round < shorter], state.records.ids)
            notes = tuple(note for note in state.notes if note != UNATTACKED_NOTE)
            return ResumedRun(state.with_(records=records, notes=notes))
        stop = Stop[meta["stop"]] if meta["stop"] else None
        ended = None if stop is None or stop.is_resumable else stop
        return ResumedRun(state, ended, meta["detail"], meta.get("diverged"), meta["more"])

    def _shorter(self, checkpoints: Checkpoints) -> int | None:
        """Return the number of rounds of a shorter, finished run in the folder that this run can extend, if any.

        Raises:
            RunDirError: a setting depends on the number of rounds, so the longer run would have produced different
                results.
        """
        meta, rounds = checkpoints.meta() if self._extends else None, self._job.setting.rounds
        before = update_numbers((meta or {}).get("numbers") or {})
        ended = int(before.get("rounds", rounds))
        if meta is None or not meta["stop"] or meta["round"] != ended or ended >= rounds:
            return None
        changed = {k for k, value in json.loads(json.dumps(self._numbers)).items() if before.get(k) != value}
        derived = [k.removeprefix("algorithm.") for k in sorted(changed) if k.startswith("algorithm.")]
        if depending := derived or find_round_readers(self._job.setting):
            raise RunDirError(
                f"{checkpoints.folder} contains a run of {ended} rounds, but {', '.join(depending)} "
                f"depends on the number of rounds, so a run of {rounds} rounds is a different run. "
                "Choose another --out folder, or start over with --force"
            )
        return ended

    def save(
        self, state: State, stop: Stop | None = None, detail: str = "", diverged: int | None = None, **extras: Any
    ) -> None:
        """Write a checkpoint of ``state``. The values in ``extras`` must be JSON-serializable."""
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
        """Return True if enough time has passed since the last checkpoint to write a new one."""
        return (
            self._saves
            and not self.every_round
            and time.monotonic() - self._saved >= self._job.setting.engine.checkpoint_every
        )


def find_round_readers(setting: Setting) -> list[str]:
    """Return the unset options that depend on the number of rounds, such as ``aggregation_weights.beta``."""
    options_open = list[str]()
    parts = {"algorithm": setting.method, **{name: value for name, value in setting if isinstance(value, Value)}}
    for name, part in parts.items():
        for title, function in getmembers(type(part), isfunction):
            read = function.__code__.co_names
            if "rounds" not in read or title == "derived":
                continue
            options = [option for option in read if option in type(part).model_fields]
            left = [option for option in options if not getattr(part, option)]
            options_open += [f"{name}.{left[0]}"] if left else [] if options else [f"{name} ({type(part).__name__})"]
    return list(dict.fromkeys(options_open))


def _replace_rounds(job: Job, rounds: int) -> Job:
    """Return a copy of the job with a different number of rounds and the same stores."""
    other = copy.copy(job)
    other.__dict__.update(setting=job.setting.with_(rounds=rounds))
    return other


def fingerprint(job: Job) -> str:
    """Return a fingerprint of 16 hexadecimal digits that covers everything that affects the run's results."""
    data = hashlib.blake2b(job.alpha.cpu().numpy().tobytes(), digest_size=16)
    for part in sorted(job.eval_fed.parts):
        data.update(job.eval_fed.parts[part].index.cpu().numpy().tobytes())
        data.update(job.eval_fed.parts[part].offsets.cpu().numpy().tobytes())
    if job.fed.noise is not None:
        data.update(job.fed.noise.cpu().numpy().tobytes())
    named = restore_numbers({"engine.gradient_engine": job.oracle.name})
    text = json.dumps(
        {
            "setting": {**restore_numbers(job.setting.numbers()), **job.replay.marks()},
            "engine": [*named.values(), job.chunk],
            "data": [job.eval_fed.data.checksum(), data.hexdigest(), job.fed.n],
            **_external_digests(job),
            "user code": [s for code in _user_code(job.setting) if (s := digest_source(code))],
        },
        sort_keys=True,
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _external_digests(job: Job) -> dict[str, str]:
    """Return digests of inputs that the settings only refer to: frozen parameters, a weight file, and a device file."""
    frozen = [p for p in job.oracle.module.parameters() if not p.requires_grad]
    digests = dict[str, str]()
    if isinstance(job.setting.devices, Trace):
        trace = Path(job.setting.devices.file).expanduser().read_bytes()
        digests["devices"] = hashlib.blake2b(trace, digest_size=16).hexdigest()
    if not frozen and job.setting.model.init_from is None:
        return digests
    digest = hashlib.blake2b(digest_size=16)
    for p in frozen:
        digest.update(p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    if job.setting.model.init_from is not None:
        digest.update(weights_content(job.setting.model.init_from))
    return {**digests, "base": digest.hexdigest()}


def _user_code(setting: Setting) -> list[Any]:
    """Return the classes and functions of the setting that may be user code."""
    return [*(type(value) for _, value in setting), *(f.call for f in setting.task.functions)]


def check_ranks(job: Job) -> None:
    """Raise an error if the ranks would not compute the same results.

    Raises:
        ConfigError: the experiment, data, library versions or processor instructions differ between ranks.
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
                    f"rank {rank} differs from rank {job.ranks.rank} in {what}: {remote[what]} there, {value} here. "
                    "Use the same files and installation on every machine"
                )
