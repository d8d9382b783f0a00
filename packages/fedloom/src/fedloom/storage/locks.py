"""Locks on run directories. A directory may be used only by one process and its forks."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedloom.errors import RunDirError
from fedloom.outputs import LOCK_FILE
from fedloom.storage import disk
from fedloom.storage.files import convert_write_errors, make_folder


@contextmanager
def lock(folder: Path, wait: float = 5.0, *, joins: bool = False) -> Iterator[None]:
    """Keep all other processes out of a run directory within the block.

    A lock ends with its process, so a dead process cannot hold a lock.

    Forked processes share the lock of their parent. Another process can therefore enter only when none of these
    processes can still write.

    Args:
        folder: run directory. The directory is created if it does not exist.
        wait: number of seconds to wait for the workers of a dead process to end.
        joins: True to work together with other processes that have joined. In this case, if the disk does not support
            locks, the block runs without a lock.

    Raises:
        RunDirError: a different process is using the directory, or the disk does not support file locks.
    """
    make_folder(folder)
    path, me = folder / LOCK_FILE, os.getpid()
    with convert_write_errors(path):
        fd = disk.open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        _take_lock(fd, path, wait, joins=joins)
        if not joins:
            with convert_write_errors(path):
                disk.truncate(fd, path, 0)
                disk.write_bytes(fd, path, disk.as_bytes(f"{me} {socket.gethostname()}".encode()), 0)
        yield
    finally:
        if os.getpid() == me:
            release_lock(fd)
        os.close(fd)


def take_lock(fd: int, path: Path, *, wait: bool = False) -> bool:
    """Take an exclusive lock on an open file.

    Args:
        fd: file descriptor.
        path: path of the file, which is named in the message.
        wait: True to wait for the process that is holding the lock.

    Returns:
        False if another process holds the lock.

    Raises:
        RunDirError: the disk does not support file locks, such as an NFS disk without its lock service. Without locks,
            two processes could write at the same time.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunDirError(
            f"{path} cannot be locked ({error.strerror}): the disk does not support file locks, so two processes could "
            "write at the same time. Choose a folder on a local disk, or enable file locks on this disk"
        ) from error
    return True


def release_lock(fd: int) -> None:
    """Release the lock on an open file. If the disk does not support file locks, nothing happens."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


def is_in_use(folder: Path) -> bool:
    """Return True if a run directory is locked by a process or one of its forks.

    The kernel releases a lock as soon as its processes have ended.

    The process id in the file is not used, because any process may have this id after a reboot.
    """
    try:
        fd = disk.open_file(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a disk without locks
        return False
    finally:
        os.close(fd)
    return False


def _take_lock(fd: int, path: Path, wait: float, *, joins: bool) -> None:
    end = time.monotonic() + wait
    while True:
        if _share_lock(fd) if joins else take_lock(fd, path):
            return
        pid, _, host = os.pread(fd, 300, 0).decode(errors="replace").partition(" ")
        alive = host != socket.gethostname() or _is_alive(int(pid))
        if (time.monotonic() > end or (pid and alive)) and _is_held(fd):
            what = f"process {pid} on {host}" + ("" if alive else ", which has ended, but some of its workers have not")
            cure = "wait for it, or start both with --join" if joins else "wait for it, or choose another folder"
            raise RunDirError(f"{path.parent} is in use by {what}; {cure}")
        if time.monotonic() > end:
            raise RunDirError(
                f"{path.parent} is in use by processes that joined. Join these processes (--join), or "
                "wait until they end"
            )
        time.sleep(0.02)


def _share_lock(fd: int) -> bool:
    """Take a shared lock together with other processes that join.

    Return False if a process has exclusive access to the directory.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the disk has no locks, but claims need none
        return True
    return True


def _is_held(fd: int) -> bool:
    """Return True if a process is using the directory. To check this, `is_in_use` briefly takes a shared lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    release_lock(fd)
    return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True
