"""Claims: units of work that any number of processes and machines take from one folder, without locks or clocks.

A unit has a folder, and each attempt at it a folder of its own in there, numbered from 1. Who creates the folder has
the attempt: creating a folder is atomic on every disk. The attempt's counter grows while its process lives. If an
observer has seen one value for `EXPIRY_SECONDS` by its own clock, or knows that the process has ended, the next attempt
may be taken. What a unit gives is published by a rename. The first one stays.
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
from fedloom.storage.files import explained, make_folder

PULSE_SECONDS = 5.0
"""Seconds between two values of a counter."""
EXPIRY_SECONDS = 60.0
"""Seconds without a new value after which a claim is thought to be of a process that has ended."""
PULSE_FILE, STATE_KEY = "claim.json", "state"


class Claimant(NamedTuple):
    """Who has a claim, and how far the work is.

    Attributes:
        host: name of the machine.
        pid: number of the process there.
        progress: how far it is, in words.
        ended: whether the claimant has let go of the unit, or is known to have died.
    """

    host: str
    pid: int
    progress: str
    ended: bool


class UnitClaim:
    """A unit that this process works on. Another thread keeps its counter growing until `release`.

    Args:
        folder: of the attempt, which this process has created.
        before: the attempt before, whose claimant has ended. None for the first attempt.
        dead: whether that claimant is known to have ended, so that nothing is written there any more.

    Attributes:
        state: folder for the work. A checkpoint of the attempt before lies there.
        earlier: the state of the attempt before, as far as it has not been moved. None for the first attempt.
        progress: how far the work is, in words, for others.
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
        """Let go of the unit, whose state others may use from now on."""
        self._stop()
        with suppress(OSError):
            self._write(released=True)

    def publish(self, target: Path) -> bool:
        """Rename the state to its place for good.

        Returns:
            Whether this attempt was the first. Another one's result stays.

        Raises:
            CheckpointError: the disk refuses.
        """
        self._stop()
        return publish(self.state, target)

    def _stop(self) -> None:
        self._end.set()
        self._thread.join()

    def _pulse(self) -> None:
        while not self._end.wait(PULSE_SECONDS):
            with suppress(OSError):  # the folder is gone where another process has finished all
                self._write()

    def _write(self, *, released: bool = False) -> None:
        self._counter += 1
        host, pid = socket.gethostname(), os.getpid()
        content = {"counter": self._counter, "host": host, "pid": pid, "place": _place(), "begun": _begun(pid)}
        content |= {"progress": self.progress, "released": released}
        draft = self.folder / f".{PULSE_FILE}.tmp"
        draft.write_text(json.dumps(content))
        draft.rename(self.folder / PULSE_FILE)  # not synced: after a crash of the machine its claims are free anyway


class Claims:
    """The claims of a folder, as one process sees them.

    Args:
        folder: has a folder for every unit that was ever claimed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[Path, tuple[object, float]] = {}

    def take(self, unit: str) -> UnitClaim | None:
        """Claim a unit. None where another process has it.

        Args:
            unit: its name, which a folder can have.

        Raises:
            CheckpointError: the disk refuses.
        """
        place, newest = self.folder / unit, self._newest(unit)
        before = None if newest == 0 else place / str(newest)
        pulse = None if before is None else _read(before)
        dead = before is not None and _has_ended(pulse)
        if before is not None and not dead and not self._expired(before, pulse):
            return None
        attempt = place / str(newest + 1)
        make_folder(place)
        with explained(attempt):
            disk.step("create", attempt)
            try:
                attempt.mkdir()
            except FileExistsError:
                return None
            return UnitClaim(attempt, before, dead=dead)

    def claimant(self, unit: str) -> Claimant | None:
        """Who has a unit, or had it last. None where nobody ever claimed it."""
        newest = self._newest(unit)
        pulse = _read(self.folder / unit / str(newest)) if newest else None
        if pulse is None:
            return None
        return Claimant(str(pulse["host"]), int(pulse["pid"]), str(pulse["progress"]), _has_ended(pulse))

    def units(self) -> list[str]:
        """Names of the units that were ever claimed."""
        with suppress(FileNotFoundError):
            return sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        return []

    def left_behind(self, unit: str) -> Path | None:
        """Return the state of a unit whose claimant is known to have ended. None without one."""
        newest = self._newest(unit)
        attempt = self.folder / unit / str(newest)
        state = attempt / STATE_KEY
        return state if newest and state.is_dir() and _has_ended(_read(attempt)) else None

    def check_ended(self) -> None:
        """Refuse to go on alone while another process may still work on a unit.

        Raises:
            RunDirError: a claimant has not let go, and is not known to have ended.
        """
        for unit in self.units():
            holder = self.claimant(unit)
            if holder is not None and not holder.ended:
                raise RunDirError(
                    f"{self.folder.parent}: process {holder.pid} on {holder.host} joined for {unit}, and may still "
                    "work; join too (--join), which takes over what has died"
                )

    def forget(self) -> None:
        """Delete all claims at once, when nothing is left to do."""
        waste = self.folder.with_name(f"{self.folder.name}-{socket.gethostname()}-{os.getpid()}")
        with suppress(OSError):
            self.folder.rename(waste)
        shutil.rmtree(waste, ignore_errors=True)

    def _newest(self, unit: str) -> int:
        with suppress(FileNotFoundError):
            return max((int(p.name) for p in (self.folder / unit).iterdir() if p.name.isdigit()), default=0)
        return 0

    def _expired(self, attempt: Path, pulse: dict[str, Any] | None) -> bool:
        """Whether the counter of an attempt has stood still for long, by the clock of this process."""
        counter, now = None if pulse is None else pulse["counter"], time.monotonic()
        value, since = self._seen.get(attempt, (..., now))
        if value != counter:
            since = now
        self._seen[attempt] = counter, since
        return now - since >= EXPIRY_SECONDS


def publish(source: Path, target: Path) -> bool:
    """Rename a folder to its place for good, unless something is there already.

    Returns:
        Whether it was renamed.

    Raises:
        CheckpointError: the disk refuses.
    """
    make_folder(target.parent)
    with explained(target):
        disk.step("rename", target)
        try:
            source.rename(target)
        except OSError:
            if target.exists():
                return False
            raise
        disk.fsync_folder(target.parent)
    return True


def _take_over(before: Path, state: Path, *, dead: bool) -> None:
    """Go on where an attempt ended: with all its files if nobody writes there, else with its newest checkpoint."""
    if dead:
        with suppress(OSError):
            before.rename(state)
        return
    with suppress(OSError):
        if all(path.name.lstrip(".").startswith("checkpoint-") for path in before.iterdir()):
            from fedloom.storage.checkpoint import Checkpoints  # with PyTorch, which nothing else here needs

            Checkpoints(before).copy_newest(state)


def _read(attempt: Path) -> dict[str, Any] | None:
    """Read what a claimant wrote last. None before it has written anything."""
    with suppress(OSError, ValueError):
        pulse: dict[str, Any] = json.loads((attempt / PULSE_FILE).read_text())
        return pulse
    return None


def _has_ended(pulse: dict[str, Any] | None) -> bool:
    """Whether a claimant has let go, or was a process of this system that has ended."""
    if pulse is None:
        return False
    here = pulse["place"] is not None and pulse["place"] == _place()
    return bool(pulse["released"]) or (here and pulse["begun"] != _begun(pulse["pid"]))


def _place() -> str | None:
    """Identify the system whose process numbers this process sees: a boot of a machine, or a container on it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _begun(pid: int) -> str | None:
    """When a process of this system began, as the kernel counts. None where it has ended."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in "ZX" else after_name[19]
