"""Workers: how many processes a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.engine.setting import Engine
from fedloom.errors import Refused
from fedloom.processes.pool import PER_CORE, cores, useful

if TYPE_CHECKING:
    from fedloom.engine.problem import JobFacts

WORTH_FORKING = 2e11
"""Number of multiply-adds in a run, about four seconds on one core, from which on more workers pay off."""


def worker_count(engine: Engine, problem: JobFacts, samples: int) -> int:
    """Choose the number of processes for a run. ``auto`` uses the cores if the work justifies starting them.

    There are never more processes than clients, because a chunk has at least one client, nor more than the cores can
    use.

    Raises:
        Refused: several processes share a GPU.
    """
    on_cpu = engine.device == "cpu"
    if engine.workers == "auto":
        work = 3.0 * problem.setting.rounds * samples * problem.oracle.layout.d
        return useful(cores(), problem.n) if on_cpu and work > WORTH_FORKING else 1
    if engine.workers > 1 and not on_cpu:
        raise Refused(
            f"engine.workers is {engine.workers}, but workers are forks of this process, and a fork "
            f"cannot use the GPU {engine.device!r} of its parent process",
            rule="workers-on-a-gpu",
            fix="leave {engine.workers} out, or start one process per GPU with torchrun",
        )
    return useful(engine.workers, problem.n)


def idle_workers(engine: Engine) -> list[str]:
    """Return a note if more processes are requested than the cores can use."""
    if engine.workers == "auto" or engine.workers <= PER_CORE * cores():
        return []
    return [
        f"engine.workers = {engine.workers}: at most {PER_CORE * cores()} processes start, {PER_CORE} "
        f"for each of the {cores()} cores that this program may use, and no more than clients or runs"
    ]
