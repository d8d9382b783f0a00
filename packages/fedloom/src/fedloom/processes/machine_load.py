"""Machine load: processor time used by this process, and by other processes that could disturb a measurement."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_FOREIGN_CORES = 0.1
"""Maximum number of cores that other processes may use during a measurement: a tenth of a core delays one process by at
most 10 %, and processes on an idle machine use less."""

_STAT_FILE = Path("/proc/stat")


def machine_seconds() -> float:
    """Return the processor time in seconds of all processes since the machine started, or of this one if unknown."""
    try:
        user, nice, system = map(int, _STAT_FILE.read_text().split(maxsplit=4)[1:4])
    except OSError:
        return process_seconds()
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def process_seconds() -> float:
    """Return the processor time in seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


class OtherProcesses:
    """Number of cores that other processes use. It is stored in ``cores`` at the end of `watch_others`."""

    cores = 0.0


@contextmanager
def watch_others() -> Iterator[OtherProcesses]:
    """Within the block, measure how many cores are used by other processes.

    Child processes of this process that work inside the block must also end inside it.
    """
    gc.collect()
    load = OtherProcesses()
    before, own_before, start = machine_seconds(), process_seconds(), time.perf_counter()
    yield load
    load.cores = max(0.0, (machine_seconds() - before) - (process_seconds() - own_before)) / (
        time.perf_counter() - start
    )


def wait_for_quiet(patience: float) -> None:
    """Wait until the machine has been idle for 0.2 seconds, but for at most ``patience`` seconds."""
    end = time.perf_counter() + patience
    while time.perf_counter() < end:
        before = machine_seconds()
        time.sleep(0.2)
        if machine_seconds() - before <= 0.2 * MAX_FOREIGN_CORES:
            return
