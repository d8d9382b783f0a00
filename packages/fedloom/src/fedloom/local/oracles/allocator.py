"""Memory that the C library keeps for reuse: fresh pages from the system take longer than what is computed on them."""

from __future__ import annotations

import ctypes
from functools import cache

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Names of `mallopt` (glibc)."""

MAX_BLOCK_BYTES = 32 << 20
"""Bytes of the largest block that is kept, the most that glibc allows."""

MAX_RETAINED_BYTES = 256 << 20
"""Bytes that are kept at most: the temporary rows of several fields of a chunk."""


@cache
def keep_memory() -> None:
    """Set it, once in a process, where the C library has no such setting nothing happens."""
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None:
        change(MMAP_THRESHOLD, MAX_BLOCK_BYTES)
        change(TRIM_THRESHOLD, MAX_RETAINED_BYTES)
