"""Functions through which all changes to a run directory reach the disk.

The primitives create, write, fsync, rename, truncate and unlink files. Each primitive first calls `hook`, so that a
test can stop the process at this point. If a test may stop the process there, each write is split in half, with the
step ``"tear"`` in between. A process that was started with ``FEDLOOM_CRASH_AT=N`` ends at its N-th primitive as if it
had been killed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

hook: Callable[[str, Path], None] | None = None
"""Function that is called before each primitive, with the name of the primitive and the path. This function is set by
tests."""

_crash_at = int(os.environ.get("FEDLOOM_CRASH_AT", "0"))
_steps = 0


def note_disk_step(op: str, path: Path) -> None:
    """Call the hook before a primitive. If the process was started in order to crash here, end it instead."""
    global _steps
    if hook is not None:
        hook(op, path)
    if _crash_at:
        _steps += 1
        if _steps == _crash_at:
            os._exit(137)


def is_watched() -> bool:
    """Return True if a test may stop the process at a primitive."""
    return hook is not None or _crash_at > 0


def check_regular_file(path: Path) -> Path:
    """Check that a path is a regular file or does not exist, and return the path.

    Raises:
        OSError: the path is a pipe, a socket, a device or a folder. This check prevents the process from waiting for a
            writer, as it would when opening a pipe.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return path
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return path


def open_file(path: Path, flags: int) -> int:
    """Open a regular file. Symbolic links are not followed, because a link could point to any of the user's files."""
    if flags & os.O_CREAT:
        note_disk_step("create", path)
    return os.open(check_regular_file(path), flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def write_bytes(fd: int, path: Path, data: memoryview, at: int | None) -> None:
    """Write bytes to an open file, starting at a position.

    If the position is None, writing starts at the current position of the file.
    """
    torn = len(data) > 1 and is_watched()
    cut = len(data) // 2 if torn else len(data)
    for op, part in (("write", data[:cut]), ("tear", data[cut:])):
        if op == "write" or torn:
            note_disk_step(op, path)
        while part:
            done = os.write(fd, part) if at is None else os.pwrite(fd, part, at)
            part = part[done:]
            at = None if at is None else at + done


def fsync(fd: int, path: Path) -> None:
    """Wait until the bytes that were written to a file are on the disk."""
    note_disk_step("fsync", path)
    os.fsync(fd)


def fsync_folder(folder: Path) -> None:
    """Wait until the names of the files in a folder have been written to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(fd, folder)
    finally:
        os.close(fd)


def truncate(fd: int, path: Path, length: int) -> None:
    """Set the length of an open file."""
    note_disk_step("truncate", path)
    os.ftruncate(fd, length)


def as_bytes(data: Buffer) -> memoryview:
    """Return a view of a buffer as bytes."""
    return memoryview(data).cast("B")
