"""Detection of ranks that no longer respond: each rank sends a sign of life every second.

A rank ends its process if it has not received a sign of life from another rank for too long.

If a rank dies, its connections are closed, which immediately ends the other ranks. However, if a machine loses its
network or a process is stopped, no connection is closed, so signs of life are needed.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from fedloom.errors import ConfigError

HEARTBEAT_SECONDS = 1.0
"""Number of seconds between two signs of life."""

GRACE_SECONDS = 10.0
"""Number of seconds after the failure of a rank before the other ranks are ended."""

TIMEOUT_VARIABLE = "FEDLOOM_RANK_TIMEOUT"
"""Environment variable for the number of seconds without a sign of life before a rank is considered dead."""

RESUME_HINT = "Saved results are intact. Start the ranks again to continue"


class RankWatch:
    """Thread that watches the other ranks.

    Args:
        rank: number of this process.
        size: number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.patience = _parse_timeout(os.environ.get(TIMEOUT_VARIABLE, "60"))
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=max(self.patience, 5.0))))
        self._store: Any = PrefixStore(f"watch-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._store.set(self._key(rank), "0")
        self._thread.start()

    def first_to_fail(self) -> bool:
        """Return True if this rank is the first one that records a failure of the run."""
        try:
            return bool(self._store.add("failed", 1) == 1)
        except RuntimeError:
            return True

    def close(self) -> None:
        """Announce that this rank is finished."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        last = dict.fromkeys(range(self.size), ("", time.monotonic()))
        count, failed = 0, math.inf
        while not self._over.wait(HEARTBEAT_SECONDS):
            count += 1
            try:
                self._store.set(self._key(self.rank), str(count))
                for rank in range(self.size):
                    beat = self._store.get(self._key(rank)).decode() if self._store.check([self._key(rank)]) else ""
                    if beat != last[rank][0] or beat == "done":
                        last[rank] = (beat, time.monotonic())
                failed = min(failed, time.monotonic() if self._store.check(["failed"]) else math.inf)
            except RuntimeError as error:
                self._end(f"the machine of rank 0 cannot be reached ({error})")
            if time.monotonic() - failed > GRACE_SECONDS:
                os._exit(1)  # another rank has logged the cause
            silent = [rank for rank, (_, since) in last.items() if time.monotonic() - since > self.patience]
            if silent:
                self._end(f"rank {silent[0]} of {self.size} has not responded for {self.patience:.0f} s")
        try:
            self._store.set(self._key(self.rank), "done")
        except RuntimeError:
            return

    def _key(self, rank: int) -> str:
        return f"rank-{rank}"

    def _end(self, what: str) -> None:
        """End this process immediately, even if it is waiting for a rank that will never answer.

        No data are lost, because files are complete at any time.
        """
        if self.first_to_fail():
            sys.stderr.write(f"error: {what}. {RESUME_HINT}\n")
            sys.stderr.flush()
        os._exit(1)


def _parse_timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > HEARTBEAT_SECONDS:
        raise ConfigError(
            f"{TIMEOUT_VARIABLE} must be a number of seconds greater than {HEARTBEAT_SECONDS:.0f}, got {text!r}"
        )
    return seconds
