"""Compilation of loops by numba for the processor of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from typing import Any

import numba
from filelock import FileLock

FASTMATH_FLAGS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz"},  # flags that keep NaN and infinity
    "error_model": "numpy",
    "nogil": True,
    "_nrt": False,  # reference counting took a third of the time of small layers
}


MIN_FREE_BYTES = 64 << 20
"""Minimum number of free bytes on the disk for machine code."""


def compile_loop(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a loop and cache the machine code in the package folder or in the user's cache folder.

    If there is no home folder, as in some containers, the code is not stored, because numba would create a folder named
    ``~`` in the working folder.

    numba compiles a stored function again if the file of the function has changed, but not if the function calls a
    function from another file and that file has changed. In this case, remove the folder ``__pycache__``.
    """
    home = os.path.expanduser("~")
    places = [place for place in (os.path.dirname(__file__), home) if os.path.isdir(place)]
    if os.path.isabs(home) and all(shutil.disk_usage(place).free >= MIN_FREE_BYTES for place in places):
        with suppress(RuntimeError):  # numba raises it if no folder is writable
            return _lock_cache(numba.njit(cache=True, **FASTMATH_FLAGS)(loop))
    return numba.njit(**FASTMATH_FLAGS)(loop)  # type: ignore[no-any-return]


def _lock_cache(loop: Any) -> Callable[..., Any]:
    """Allow only one process at a time to read or write the machine code of a compiled loop.

    numba chooses the name of a file based on the index that it has read, and writes the index before the file. Without
    a lock, two processes that compile at the same time could store two versions under the same name, and a third
    process could load the wrong version.
    """
    if numba.config.DISABLE_JIT:  # numba then returns a plain function
        return loop  # type: ignore[no-any-return]
    stored = loop._cache
    for name in ("load_overload", "save_overload"):
        setattr(stored, name, _wrap_with_lock(getattr(stored, name), stored.cache_path))
    return loop  # type: ignore[no-any-return]


def _wrap_with_lock(step: Callable[..., Any], folder: str) -> Callable[..., Any]:
    @wraps(step)
    def locked(*args: Any) -> Any:
        with _lock_folder(folder):
            return step(*args)

    return locked


@contextmanager
def _lock_folder(folder: str) -> Iterator[None]:
    """Lock a folder of machine code, unless the disk does not support locks or the folder cannot be written."""
    lock = _lock_of(folder, os.getpid())
    try:
        os.makedirs(folder, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        lock.release()


@cache
def _lock_of(folder: str, pid: int) -> FileLock:
    """Return the lock of a folder for one process, which can acquire it again while it holds it.

    A forked worker needs its own lock, because it cannot use a lock created by its parent.
    """
    return FileLock(os.path.join(folder, "machine-code.lock"))
