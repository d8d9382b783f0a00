"""Workers: the number of processes that a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.engine.setting import Engine
from fedloom.errors import Refused
from fedloom.processes.pool import PER_CORE, cores, useful

if TYPE_CHECKING:
    from fedloom.engine.problem import JobFacts

WORTH_FORKING = 2e11
"""Multiply-adds of a run, about four seconds of one core, from which more workers pay."""


def worker_count(engine: Engine, problem: JobFacts, samples: int) -> int:
    """Choose the processes of a run. ``auto`` uses the cores if the work pays for starting them.

    They are no more than clients, of which a chunk has one at least, and no more than the cores can use.

    Raises:
        Refused: several on a GPU.
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
    """Return the note on more processes than the cores can use, if they are asked for."""
    if engine.workers == "auto" or engine.workers <= PER_CORE * cores():
        return []
    return [
        f"engine.workers = {engine.workers}: at most {PER_CORE * cores()} processes start, {PER_CORE} "
        f"for each of the {cores()} cores that this program may use, and no more than clients or runs"
    ]
