"""Shared work: several processes, on any machines that share a disk, divide the units of one run directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fedloom.errors import CheckpointError, RunStopped, Stop
from fedloom.lab.experiment.units.shares import ProcessShare
from fedloom.processes.pool import WorkerPool
from fedloom.processes.signals import interruptible
from fedloom.rundir import WORK_FOLDER
from fedloom.storage.claims import Claims, UnitClaim
from fedloom.storage.files import make_folder, write_atomic

PAUSE_SECONDS = 0.5
"""Number of seconds between searches for an unclaimed unit."""
BEGIN_STAGE, FINISH_STAGE = "begin", "finish"
BEGUN_FILE, FAILED_FILE = "begun", "failed"


class WorkUnit(NamedTuple):
    """A unit of work that a process can claim.

    Attributes:
        name: name of the claim, which must be a valid folder name.
        target: path of the published result.
    """

    name: str
    target: Path


ClaimedUnit = tuple[int, WorkUnit, UnitClaim]
Work = Callable[[int, UnitClaim], str | None]
"""Function that computes a unit and takes the arguments (number of the unit, claim). The function returns the reason
why the unit has no result, or None once its state is complete. If the user interrupts this function, it raises an
error."""


class JoinedWork:
    """Work shared by processes in a run directory, from the first process that joins to the last.

    Args:
        out: the run directory.

    Raises:
        RunStopped: (all methods) the user interrupted this process. The other processes continue.
    """

    def __init__(self, out: Path) -> None:
        self.claims = Claims(out / WORK_FOLDER)
        self._token: bytes | None = None

    @property
    def is_begun(self) -> bool:
        """True if any process has already prepared the directory."""
        return self._read_token() is not None

    def begin(self, prepare: Callable[[], object]) -> None:
        """Prepare the directory, unless another process is preparing it, and wait until it is ready."""
        with interruptible() as interrupted:
            while (token := self._read_token()) is None:
                claim = self.claims.take(BEGIN_STAGE)
                if claim is None:
                    _wait_for_others(interrupted)
                    continue
                try:
                    prepare()
                    write_atomic(self.claims.folder / BEGUN_FILE, os.urandom(8).hex().encode())
                finally:
                    claim.release()
            self._token = token

    def work(self, units: Sequence[WorkUnit], do: Work, share: ProcessShare) -> None:
        """Compute units until every unit has completed or failed, in this or another process.

        Args:
            units: all units of work.
            do: function that computes a unit.
            share: number of units that this process computes in parallel, and number of processes per unit.
        """

        def handle(_shared: None, _k: int) -> bool:
            with interruptible() as interrupted:
                return self._work(units, do, interrupted)

        runs = max(1, min(share.runs, len(units)))
        with WorkerPool([handle], runs, nested=share.workers > 1) as pool, interruptible() as interrupted:
            ended = [*pool.map(handle, None, range(runs), interrupted)]
        if interrupted() or not all(ended):
            raise RunStopped(
                Stop.INTERRUPTED,
                "other processes that joined are still running. Run the same command to join them again",
            )

    def finish(self, write: Callable[[], object]) -> None:
        """Write the final files, unless another process is writing them, and wait until they have been written."""
        with interruptible() as interrupted:
            while self._is_in_progress():
                claim = self._claim_unit(FINISH_STAGE)
                if claim is None:
                    _wait_for_others(interrupted)
                    continue
                try:
                    write()
                finally:
                    claim.release()
                self.claims.forget()
                return

    def failure(self, unit: WorkUnit) -> str | None:
        """Return the reason why a unit has no result.

        Return None if the unit has a result or has not yet been computed.
        """
        with suppress(OSError):
            return self._failure_file(unit).read_text(encoding="utf-8")
        return None

    def _work(self, units: Sequence[WorkUnit], do: Work, interrupted: Callable[[], bool]) -> bool:
        """Compute units until no unit remains, and return True. Return False if the user stopped the work."""
        open_units = [*enumerate(units)]
        while self._is_in_progress():
            open_units = [(k, unit) for k, unit in open_units if not self._is_done(unit)]
            if not open_units:
                return True
            claimed = self._claim_next(open_units, interrupted)
            if interrupted():
                return False
            if claimed is None:
                time.sleep(PAUSE_SECONDS)
            elif not self._compute_claimed(*claimed, do):
                return False
        return True

    def _claim_next(self, units: Sequence[tuple[int, WorkUnit]], interrupted: Callable[[], bool]) -> ClaimedUnit | None:
        """Claim and return the first unclaimed unit.

        Return None if all units are claimed or the user stopped the work.
        """
        for k, unit in units:
            if not interrupted() and (claim := self._claim_unit(unit.name)) is not None:
                return k, unit, claim
        return None

    def _compute_claimed(self, k: int, unit: WorkUnit, claim: UnitClaim, do: Work) -> bool:
        """Compute a claimed unit and return True, or False if the user stopped the work."""
        try:
            if not self._is_done(unit):
                failure = do(k, claim)
                if failure is not None:
                    write_atomic(self._failure_file(unit), failure.encode())
                make_folder(claim.state)
                claim.publish(unit.target)
        except KeyboardInterrupt:
            return False
        except CheckpointError:
            if self._is_in_progress():  # otherwise, the other processes finished and deleted the claim
                raise
        finally:
            claim.release()
        return True

    def _claim_unit(self, name: str) -> UnitClaim | None:
        try:
            return self.claims.take(name)
        except CheckpointError:
            if self._is_in_progress():
                raise
            return None

    def _is_done(self, unit: WorkUnit) -> bool:
        return unit.target.exists() or self._failure_file(unit).exists()

    def _failure_file(self, unit: WorkUnit) -> Path:
        return self.claims.folder / unit.name / FAILED_FILE

    def _is_in_progress(self) -> bool:
        """Return True if the shared work is still in progress."""
        return self._read_token() == self._token

    def _read_token(self) -> bytes | None:
        with suppress(OSError):
            return (self.claims.folder / BEGUN_FILE).read_bytes()
        return None


def _wait_for_others(interrupted: Callable[[], bool]) -> None:
    if interrupted():
        raise RunStopped(
            Stop.INTERRUPTED, "other processes that joined are still running. Run the same command to join them again"
        )
    time.sleep(PAUSE_SECONDS)
