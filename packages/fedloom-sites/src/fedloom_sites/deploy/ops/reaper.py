"""Reaper that ends process groups when their starter closes the pipe to it, or is killed.

Its standard input contains one line with the group's ID for each group that is started, and one line with the negative
ID for each group that has ended, because the system may give this ID to another process. The module runs as a script
and imports only the standard library.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable

GROUP_GRACE_SECONDS = 10.0
"""Time, in seconds, that groups have to end after SIGTERM before they are killed."""


def end_groups_at_close(lines: Iterable[str], grace: float = GROUP_GRACE_SECONDS) -> None:
    """Read group IDs until the pipe is closed; then end the remaining groups, newest first."""
    started = dict[int, None]()
    for number in map(int, lines):
        if number > 0:
            started[number] = None
        else:
            started.pop(-number, None)
    groups = [group for group in reversed(started) if _signal_group(group, signal.SIGTERM)]
    end = time.monotonic() + grace
    while groups and time.monotonic() < end:
        time.sleep(0.05)
        groups = [group for group in groups if _signal_group(group, 0)]
    for group in groups:
        _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to a group, and return True if the group exists."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    end_groups_at_close(sys.stdin, *map(float, sys.argv[1:]))
