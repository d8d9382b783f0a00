"""Load of the machine: core seconds used by this process, and by other processes that disturb a measurement."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_FOREIGN_CORES = 0.1
"""Number of cores that other processes may use during a measurement: a tenth of a core delays one process by at most a
tenth, and an idle machine uses less."""

_STAT_FILE = Path("/proc/stat")


def machine_seconds() -> float:
    """Return the core seconds of all processes since the machine started, or only of this one if not counted."""
    try:
        user, nice, system = map(int, _STAT_FILE.read_text().split(maxsplit=4)[1:4])
    except OSError:
        return process_seconds()
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def process_seconds() -> float:
    """Return the core seconds of this process and its ended children."""
    return sum(os.times()[:4])


class OtherProcesses:
    """Number of cores that other processes use, as ``cores``, which is set when `watch_others` ends."""

    cores = 0.0


@contextmanager
def watch_others() -> Iterator[OtherProcesses]:
    """Watch other processes. Child processes that work in the meantime must also end within the block."""
    gc.collect()
    load = OtherProcesses()
    before, own_before, start = machine_seconds(), process_seconds(), time.perf_counter()
    yield load
    load.cores = max(0.0, (machine_seconds() - before) - (process_seconds() - own_before)) / (
        time.perf_counter() - start
    )


def wait_for_quiet(patience: float) -> None:
    """Wait until the machine has been idle for a fifth of a second, or for ``patience`` seconds."""
    end = time.perf_counter() + patience
    while time.perf_counter() < end:
        before = machine_seconds()
        time.sleep(0.2)
        if machine_seconds() - before <= 0.2 * MAX_FOREIGN_CORES:
            return
