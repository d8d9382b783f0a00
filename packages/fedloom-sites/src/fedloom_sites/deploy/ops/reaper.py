"""Reaper: ends process groups when whoever started them closes the pipe to it, which a killed process does as well.

Its standard input has a line with the id of every group that has begun. Run as a script, which imports nothing else.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable

GROUP_GRACE_SECONDS = 10.0
"""Seconds that groups have to end by themselves."""


def reap(lines: Iterable[str], grace: float = GROUP_GRACE_SECONDS) -> None:
    """Read until the pipe is closed, then end what has not ended: last begun, first ended."""
    groups = [group for group in reversed([int(line) for line in lines]) if _tell(group, signal.SIGTERM)]
    end = time.monotonic() + grace
    while groups and time.monotonic() < end:
        time.sleep(0.05)
        groups = [group for group in groups if _tell(group, 0)]
    for group in groups:
        _tell(group, signal.SIGKILL)


def _tell(group: int, number: int) -> bool:
    """Return whether the group was there to be ended."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    reap(sys.stdin, *map(float, sys.argv[1:]))
