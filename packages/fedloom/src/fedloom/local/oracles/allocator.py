"""Configuration of the C library's allocator to reuse memory, because new pages cost more time than the computation."""

from __future__ import annotations

import ctypes
from functools import cache

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Parameters of glibc's `mallopt`."""

MAX_BLOCK_BYTES = 32 << 20
"""Size in bytes of the largest block that is reused, which is the maximum that glibc allows."""

MAX_RETAINED_BYTES = 256 << 20
"""Maximum number of bytes kept for reuse. It is enough for the temporary rows of several of a chunk's fields."""


@cache
def keep_memory() -> None:
    """Configure the allocator once per process. This has no effect if the C library does not support it."""
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None:
        change(MMAP_THRESHOLD, MAX_BLOCK_BYTES)
        change(TRIM_THRESHOLD, MAX_RETAINED_BYTES)
