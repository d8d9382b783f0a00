"""Claims, which let any number of processes and machines share the units of work in a folder without locks or clocks.

Each unit has a folder, in which there is a subfolder for each attempt. Attempts are numbered from 1. The process that
creates the subfolder owns the attempt, because the creation of a folder is atomic on every disk. While this process is
alive, it increments the counter of the attempt. Another process may start the next attempt if the counter has not
changed for `EXPIRY_SECONDS` by that process's own clock, or if it knows that the owner has ended. The result of a unit
is published by renaming a folder. If several attempts finish, the first result is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.errors import RunDirError
from fedloom.storage import disk
from fedloom.storage.files import convert_write_errors, make_folder

PULSE_SECONDS = 5.0
"""Time in seconds between two increments of a counter."""
EXPIRY_SECONDS = 60.0
"""Number of seconds without an increment after which the owner of a claim is considered dead."""
PULSE_FILE, STATE_KEY = "claim.json", "state"


class Claimant(NamedTuple):
    """Owner of a claim, and the progress of its work.

    Attributes:
        host: name of the owner's machine.
        pid: id of the owner's process on this machine.
        progress: text that describes the progress.
        has_ended: True if the owner has released the unit or is known to have ended.
    """

    host: str
    pid: int
    progress: str
    has_ended: bool


class UnitClaim:
    """Unit of work claimed by this process.

    A thread increments the counter of the attempt until `release` is called.

    Args:
        folder: folder of the attempt, which this process has created.
        before: folder of the previous attempt, whose owner has ended. None if there is no previous attempt.
        dead: True if the previous owner is known to have ended, so that it can no longer write to its folder.

    Attributes:
        state: folder for the work. If the previous attempt has left a checkpoint, the folder contains this
            checkpoint.
        earlier: state folder of the previous attempt, which may have been moved. None at the first attempt.
        progress: text that describes the progress for other processes.
    """

    def __init__(self, folder: Path, before: Path | None, *, dead: bool) -> None:
        self.folder, self.state, self.progress = folder, folder / STATE_KEY, ""
        self.earlier = None if before is None else before / STATE_KEY
        self._counter, self._end = 0, threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._pulse, daemon=True)
        self._thread.start()
        if self.earlier is not None:
            _take_over(self.earlier, self.state, dead=dead)

    def release(self) -> None:
        """Release the unit. After that, other processes may take over the state of the attempt."""
        self._stop()
        with suppress(OSError):
            self._write(released=True)

    def publish(self, target: Path) -> bool:
        """Publish the result by renaming the state folder to its final location.

        Returns:
            True if this attempt was the first to finish. Otherwise False, and the earlier result is kept.

        Raises:
            CheckpointError: the write is rejected.
        """
        self._stop()
        return publish(self.state, target)

    def _stop(self) -> None:
        self._end.set()
        self._thread.join()

    def _pulse(self) -> None:
        while not self._end.wait(PULSE_SECONDS):
            with suppress(OSError):  # another process may have finished and deleted the folder
                self._write()

    def _write(self, *, released: bool = False) -> None:
        self._counter += 1
        host, pid = socket.gethostname(), os.getpid()
        content = {
            "counter": self._counter,
            "host": host,
            "pid": pid,
            "place": _boot_identity(),
            "begun": _process_start_time(pid),
        }
        content |= {"progress": self.progress, "released": released}
        draft = self.folder / f".{PULSE_FILE}.tmp"
        draft.write_text(json.dumps(content))
        draft.rename(self.folder / PULSE_FILE)  # not synced, because a crash of the machine frees its claims


class Claims:
    """Claims in a folder, as seen by one process.

    Args:
        folder: folder with a subfolder for each unit that was ever claimed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[Path, tuple[object, float]] = {}

    def take(self, unit: str) -> UnitClaim | None:
        """Claim a unit. If another process has claimed the unit, return None.

        Args:
            unit: name of the unit, which must also be a valid folder name.

        Raises:
            CheckpointError: the write is rejected.
        """
        place, newest = self.folder / unit, self._newest_attempt(unit)
        before = None if newest == 0 else place / str(newest)
        pulse = None if before is None else _read_pulse(before)
        dead = before is not None and _has_ended(pulse)
        if before is not None and not dead and not self._has_expired(before, pulse):
            return None
        attempt = place / str(newest + 1)
        make_folder(place)
        with convert_write_errors(attempt):
            disk.note_disk_step("create", attempt)
            try:
                attempt.mkdir()
            except FileExistsError:
                return None
            return UnitClaim(attempt, before, dead=dead)

    def claimant(self, unit: str) -> Claimant | None:
        """Return the current owner of a unit, or else its last owner. If the unit was never claimed, return None."""
        newest = self._newest_attempt(unit)
        pulse = _read_pulse(self.folder / unit / str(newest)) if newest else None
        if pulse is None:
            return None
        return Claimant(str(pulse["host"]), int(pulse["pid"]), str(pulse["progress"]), _has_ended(pulse))

    def units(self) -> list[str]:
        """Return the names of all units that were ever claimed."""
        with suppress(FileNotFoundError):
            return sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        return []

    def find_abandoned(self, unit: str) -> Path | None:
        """Return the state folder of a unit whose owner is known to have ended.

        If there is no such state, return None.
        """
        newest = self._newest_attempt(unit)
        attempt = self.folder / unit / str(newest)
        state = attempt / STATE_KEY
        return state if newest and state.is_dir() and _has_ended(_read_pulse(attempt)) else None

    def check_ended(self) -> None:
        """Raise an error if another process may still be working on a unit.

        Raises:
            RunDirError: an owner has not released its unit and may still be running.
        """
        for unit in self.units():
            holder = self.claimant(unit)
            if holder is not None and not holder.has_ended:
                raise RunDirError(
                    f"{self.folder.parent}: process {holder.pid} on {holder.host} has claimed {unit} "
                    "and may still be running. Use --join to join as well: a process that joins "
                    "takes over the work of processes that have ended"
                )

    def forget(self) -> None:
        """Delete all claims at once, after the last unit is finished."""
        waste = self.folder.with_name(f"{self.folder.name}-{socket.gethostname()}-{os.getpid()}")
        with suppress(OSError):
            self.folder.rename(waste)
        shutil.rmtree(waste, ignore_errors=True)

    def _newest_attempt(self, unit: str) -> int:
        with suppress(FileNotFoundError):
            return max((int(p.name) for p in (self.folder / unit).iterdir() if p.name.isdigit()), default=0)
        return 0

    def _has_expired(self, attempt: Path, pulse: dict[str, Any] | None) -> bool:
        """Return True if an attempt's counter has not changed for `EXPIRY_SECONDS` by the clock of this process."""
        counter, now = None if pulse is None else pulse["counter"], time.monotonic()
        value, since = self._seen.get(attempt, (..., now))
        if value != counter:
            since = now
        self._seen[attempt] = counter, since
        return now - since >= EXPIRY_SECONDS


def publish(source: Path, target: Path) -> bool:
    """Rename a folder to its final location, unless something already exists there.

    Returns:
        True if the folder was renamed.

    Raises:
        CheckpointError: the write is rejected.
    """
    make_folder(target.parent)
    with convert_write_errors(target):
        disk.note_disk_step("rename", target)
        try:
            source.rename(target)
        except OSError:
            if target.exists():
                return False
            raise
        disk.fsync_folder(target.parent)
    return True


def _take_over(before: Path, state: Path, *, dead: bool) -> None:
    """Continue an ended attempt, with all its files if its owner is dead, or else with its newest checkpoint."""
    if dead:
        with suppress(OSError):
            before.rename(state)
        return
    with suppress(OSError):
        if all(path.name.lstrip(".").startswith("checkpoint-") for path in before.iterdir()):
            from fedloom.storage.checkpoint import Checkpoints  # imports PyTorch, which is needed only here

            Checkpoints(before).copy_newest(state)


def _read_pulse(attempt: Path) -> dict[str, Any] | None:
    """Return the last record that the owner of an attempt has written.

    If nothing has been recorded yet, return None.
    """
    with suppress(OSError, ValueError):
        pulse: dict[str, Any] = json.loads((attempt / PULSE_FILE).read_text())
        return pulse
    return None


def _has_ended(pulse: dict[str, Any] | None) -> bool:
    """Return True if the owner has released its unit, or if the owner was a process on this system that has ended."""
    if pulse is None:
        return False
    here = pulse["place"] is not None and pulse["place"] == _boot_identity()
    return bool(pulse["released"]) or (here and pulse["begun"] != _process_start_time(pulse["pid"]))


def _boot_identity() -> str | None:
    """Return a text that identifies the system where process ids are valid: a boot of a machine, or a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _process_start_time(pid: int) -> str | None:
    """Return the start time of a process on this system, in the units that the kernel uses.

    Return None if the process has ended.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in "ZX" else after_name[19]
