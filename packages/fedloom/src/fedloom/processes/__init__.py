"""Processes of a run: workers of one machine, ranks of several, and what they exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.lazy import getter

if TYPE_CHECKING:
    from fedloom.processes.distributed import check_alone as check_alone
    from fedloom.processes.distributed import joined as joined

__all__ = ["check_alone", "joined"]

__getattr__ = getter(__name__, {name: f"{__name__}.distributed:{name}" for name in ("check_alone", "joined")})
