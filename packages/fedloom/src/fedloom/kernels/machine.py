"""Compilation of loops for this processor (with numba)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba

FASTMATH_FLAGS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz"},  # numbers that are not finite stay so
    "error_model": "numpy",
    "nogil": True,
    "_nrt": False,  # no counting of references to slices, which took a third of the time of small layers
}


MIN_FREE_BYTES = 64 << 20
"""Number of bytes that must be free on the disk that stores machine code."""


def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a loop, and cache the machine code in the package's folder or in the user's cache.

    Without a home folder, as in a container, nothing is cached, because numba would create a folder named ``~`` in the
    working folder.

    numba compiles a cached function again if the function's own file changes, but not if the function calls a function
    in another file that changed: remove the folder's ``__pycache__`` after such a change.
    """
    home = os.path.expanduser("~")
    places = [place for place in (os.path.dirname(__file__), home) if os.path.isdir(place)]
    if os.path.isabs(home) and all(shutil.disk_usage(place).free >= MIN_FREE_BYTES for place in places):
        with suppress(RuntimeError):  # of numba: neither can be written
            return numba.njit(cache=True, **FASTMATH_FLAGS)(loop)  # type: ignore[no-any-return]
    return numba.njit(**FASTMATH_FLAGS)(loop)  # type: ignore[no-any-return]
