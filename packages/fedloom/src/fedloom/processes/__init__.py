"""Processes that compute a run together: workers on one machine, ranks on several machines, and their messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.lazy import lazy_names, make_getattr

if TYPE_CHECKING:
    from fedloom.processes.distributed import check_alone as check_alone
    from fedloom.processes.distributed import join_ranks as join_ranks
    from fedloom.processes.pool import WorkerPool as WorkerPool
    from fedloom.processes.pool import usable_cores as usable_cores
    from fedloom.processes.pool import useful_processes as useful_processes
    from fedloom.processes.signals import interruptible as interruptible

__all__ = [*lazy_names(__name__)]

__getattr__ = make_getattr(__name__)
