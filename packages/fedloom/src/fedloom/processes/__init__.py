"""Processes that compute a run together: workers on one machine, ranks on several machines, and their messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.lazy import getter, lazy_names

if TYPE_CHECKING:
    from fedloom.processes.distributed import check_alone as check_alone
    from fedloom.processes.distributed import join_ranks as join_ranks
    from fedloom.processes.pool import WorkerPool as WorkerPool
    from fedloom.processes.pool import cores as cores
    from fedloom.processes.pool import useful as useful
    from fedloom.processes.signals import interruptible as interruptible

__all__ = [*lazy_names(__name__)]

__getattr__ = getter(__name__)
