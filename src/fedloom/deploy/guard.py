"""Guard: a process that ends process groups when the process that started it is gone, even if that was killed.

Its standard input is a pipe from whoever started it: a line with the id of a group that has begun, and one with minus
the id when it has ended. Run as a script, which imports nothing else.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable

GRACE = 10.0
"""Seconds that groups have to end by themselves."""


def watch(lines: Iterable[str]) -> None:
    """Read until the pipe is closed, then end what has not ended."""
    groups: set[int] = set()
    for line in lines:
        number = int(line)
        groups = groups | {number} if number > 0 else groups - {-number}
    end = time.monotonic() + GRACE
    groups = {group for group in groups if _tell(group, signal.SIGTERM)}
    while groups and time.monotonic() < end:
        time.sleep(0.05)
        groups = {group for group in groups if _tell(group, 0)}
    for group in groups:
        _tell(group, signal.SIGKILL)


def _tell(group: int, number: int) -> bool:
    """Whether the group was there to be told."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    watch(sys.stdin)
