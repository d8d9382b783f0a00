"""Number of a run's worker processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.engine.setting import Engine
from fedloom.errors import Refused
from fedloom.processes.pool import PROCESSES_PER_CORE, usable_cores, useful_processes

if TYPE_CHECKING:
    from fedloom.engine.problem import JobFacts

MIN_FORKING_WORK = 2e11
"""Number of multiply-adds in a run above which additional workers save time (about four seconds on one core)."""


def worker_count(engine: Engine, problem: JobFacts, samples: int) -> int:
    """Return the number of worker processes for a run.

    ``auto`` uses all cores if the run is long enough to justify it.

    The number never exceeds the number of processes that the cores can use, or the number of clients, because a chunk
    has at least one client.

    Raises:
        Refused: several processes would share one GPU.
    """
    on_cpu = engine.device == "cpu"
    if engine.workers == "auto":
        work = 3.0 * problem.setting.rounds * samples * problem.oracle.layout.d
        return useful_processes(usable_cores(), problem.n) if on_cpu and work > MIN_FORKING_WORK else 1
    if engine.workers > 1 and not on_cpu:
        raise Refused(
            f"engine.workers is {engine.workers}, but workers are forks of this process, and forks cannot use its GPU "
            f"{engine.device!r}",
            rule="workers-on-a-gpu",
            fix="omit {engine.workers}, or start one process per GPU with torchrun",
        )
    return useful_processes(engine.workers, problem.n)


def note_idle_workers(engine: Engine) -> list[str]:
    """Return a note if more worker processes are requested than the cores can use."""
    if engine.workers == "auto" or engine.workers <= PROCESSES_PER_CORE * usable_cores():
        return []
    return [
        f"engine.workers = {engine.workers}, but at most {PROCESSES_PER_CORE * usable_cores()} processes start "
        f"({PROCESSES_PER_CORE} for each of the {usable_cores()} cores available to this program), and at most one "
        f"per client or run"
    ]
