"""Files of a run directory: the only place that writes them.

Every change of the disk is one primitive (create, write, fsync, rename, truncate, unlink), and each first calls `hook`,
so that a test can stop the process there; a write is then cut in two, with the step ``"tear"`` between the halves.
A process started with ``FEDLOOM_CRASH_AT=N`` ends at its N-th primitive as if it were killed.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import socket
import time
import weakref
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.errors import DamagedCheckpoint, RunDirError, explain_os_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

__all__ = [
    "RowFile",
    "Sink",
    "append_synced",
    "create_file",
    "discard",
    "explained",
    "hook",
    "in_use",
    "lock",
    "make_folder",
    "write_atomic",
]

BUFFERS = 1024
"""Most buffers that a system reads or writes in one call."""

hook: Callable[[str, Path], None] | None = None
"""Called before each primitive with its name and path; for tests."""

_crash_at = int(os.environ.get("FEDLOOM_CRASH_AT", "0"))
_steps = 0


def _step(op: str, path: Path) -> None:
    global _steps
    if hook is not None:
        hook(op, path)
    if _crash_at:
        _steps += 1
        if _steps == _crash_at:
            os._exit(137)


def explained(path: Path) -> AbstractContextManager[None]:
    """A block in which the disk's refusal to write a file becomes a sentence, a `CheckpointError`."""
    return explain_os_error(path, "what was saved before is", "run the same command again to go on")


def _open(path: Path, flags: int) -> int:
    if flags & os.O_CREAT:
        _step("create", path)
    return os.open(
        regular(path), flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
    )  # a link may lead to any file of the user


def _write(fd: int, path: Path, data: memoryview, at: int | None) -> None:
    is_watched = len(data) > 1 and (hook is not None or _crash_at > 0)
    cut = len(data) // 2 if is_watched else len(data)
    for op, part in (("write", data[:cut]), ("tear", data[cut:])):
        if op == "write" or is_watched:
            _step(op, path)
        while part:
            done = os.write(fd, part) if at is None else os.pwrite(fd, part, at)
            part = part[done:]
            at = None if at is None else at + done


def _fsync(fd: int, path: Path) -> None:
    _step("fsync", path)
    os.fsync(fd)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _fsync(fd, folder)
    finally:
        os.close(fd)


def _truncate(fd: int, path: Path, length: int) -> None:
    _step("truncate", path)
    os.ftruncate(fd, length)


def _bytes(data: Buffer) -> memoryview:
    return memoryview(data).cast("B")


class Sink(io.RawIOBase):
    """The file-like object that a writer of `write_atomic` fills from start to end."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self._path, self._length = fd, path, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        view = _bytes(data)
        _write(self._fd, self._path, view, None)
        self._length += len(view)
        return len(view)

    def tell(self) -> int:
        return self._length

    def replace(self, data: Buffer, at: int) -> None:
        """Other bytes in the place of those from byte ``at`` on."""
        _write(self._fd, self._path, _bytes(data), at)


def regular(path: Path) -> Path:
    """The path of a regular file, or of none.

    Raises:
        OSError: it is a pipe, a socket, a device or a folder: to open a pipe would wait for who writes to it.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return path


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Creates a folder, with a mode, and its parents, and makes their names last.

    Raises:
        CheckpointError: the disk refuses.
    """
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    with explained(folder):
        for path in reversed(missing):
            _step("create", path)
            path.mkdir(mode if path == folder else 0o777, exist_ok=True)
            _fsync_folder(path.parent)


def is_unused(folder: Path) -> bool:
    """Whether a folder is missing, or has nothing but hidden files; a `RunDirError` if it is no folder."""
    if folder.exists() and not folder.is_dir():
        raise RunDirError(f"{folder} is a file, not a folder; choose another --out")
    return not folder.exists() or all(path.name.startswith(".") for path in folder.iterdir())


def write_atomic(path: Path, content: Buffer | Callable[[Sink], object]) -> None:
    """Replaces a file as a whole: after a crash at any moment it has its old content or the new one.

    Args:
        path: the file; its folder exists.
        content: the bytes, or a function that writes them to the file-like object it is given.

    Raises:
        CheckpointError: the disk is full or refuses; the old file is intact and no temporary file is left.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with explained(path):
        try:
            fd = _open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                if callable(content):
                    content(Sink(fd, temporary))
                else:
                    _write(fd, temporary, _bytes(content), None)
                _fsync(fd, temporary)
            finally:
                os.close(fd)
            _step("rename", path)
            temporary.rename(path)
        except BaseException:
            with suppress(OSError):
                _step("unlink", temporary)
                temporary.unlink()
            raise
        _fsync_folder(path.parent)


def create_file(path: Path) -> None:
    """Creates an empty file where there is none; a `CheckpointError` when the disk refuses."""
    if not path.exists():
        with explained(path):
            os.close(_open(path, os.O_WRONLY | os.O_CREAT))


def append_synced(path: Path, pieces: Iterable[Buffer]) -> int:
    """Appends to an existing file and fsyncs it once.

    Args:
        path: the file.
        pieces: the bytes, in order.

    Returns:
        The file's new length in bytes.

    Raises:
        CheckpointError: the disk is full or refuses; the file has its former length again.
    """
    with explained(path):
        fd = _open(path, os.O_WRONLY)
        try:
            former = os.lseek(fd, 0, os.SEEK_END)
            try:
                for piece in pieces:
                    _write(fd, path, _bytes(piece), None)
                _fsync(fd, path)
            except BaseException:
                with suppress(OSError):
                    _truncate(fd, path, former)
                raise
            return os.lseek(fd, 0, os.SEEK_CUR)
        finally:
            os.close(fd)


def discard(*paths: Path) -> None:
    """Deletes the files that exist, in order; none comes back once the next is gone, since the folder is fsynced.

    Raises:
        CheckpointError: the disk refuses.
    """
    for path in paths:
        with explained(path), suppress(FileNotFoundError):
            _step("unlink", path)
            path.unlink()
            _fsync_folder(path.parent)


class RowFile:
    """A file of fixed length that is read and written in place; forked processes may share it.

    Args:
        path: the file.
        length: bytes.
        new: the file is created, or made anew, with zeros; else it must be there with this length.

    Raises:
        CheckpointError: (any method) the disk is full or refuses, or the file is missing or cut short.
    """

    def __init__(self, path: Path, length: int, new: bool) -> None:
        self.path = path
        with explained(path):
            if not new and (not path.exists() or path.stat().st_size != length):
                raise DamagedCheckpoint(f"{path} is missing or has not its {length} bytes")
            self._fd = _open(path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if new else 0))
            self._close = weakref.finalize(self, os.close, self._fd)
            if new:
                _truncate(self._fd, path, length)
                _fsync(self._fd, path)
                _fsync_folder(path.parent)

    def read(self, into: Sequence[memoryview], at: int) -> None:
        """Fills up to `BUFFERS` buffers, one after the other, from byte ``at`` on."""
        while into:
            done = os.preadv(self._fd, into, at)
            if done == 0:
                raise DamagedCheckpoint(f"{self.path} is cut short: no byte {at}")
            into, at = _left(into, done), at + done

    def write(self, pieces: Iterable[tuple[Sequence[memoryview], int]]) -> None:
        """Writes up to `BUFFERS` buffers from a byte on, for each piece; on the disk for certain only after `sync`."""
        with explained(self.path):
            for data, at in pieces:
                if hook is None and not _crash_at:
                    done = os.pwritev(self._fd, data, at)
                    data, at = _left(data, done), at + done
                if data:
                    _write(self._fd, self.path, memoryview(b"".join(data)), at)

    def sync(self) -> None:
        """Returns when everything written, by any process, is on the disk."""
        with explained(self.path):
            _fsync(self._fd, self.path)

    def close(self) -> None:
        """Closes the file in this process; so does the end of this object."""
        self._close()


def _left(buffers: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """Of buffers that are not empty, what is left after so many bytes."""
    for k, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[k + 1 :]]
        done -= len(buffer)
    return []


@contextmanager
def lock(folder: Path, wait: float = 5.0) -> Iterator[None]:
    """Keeps every other process out of a run directory; the lock of a process that has died is free.

    Forked processes hold the lock with their parent, so that no other process enters while one of them may still write.

    Args:
        folder: the run directory; created when missing.
        wait: seconds to wait for what a dead process leaves behind (its workers) to end.

    Raises:
        RunDirError: another process works there.
    """
    make_folder(folder)
    path, me = folder / ".lock", os.getpid()
    with explained(path):
        fd = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        _take(fd, path, wait)
        with explained(path):
            _truncate(fd, path, 0)
            _write(fd, path, _bytes(f"{me} {socket.gethostname()}".encode()), 0)
        yield
    finally:
        if os.getpid() == me:
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def in_use(folder: Path) -> bool:
    """Whether the process that locked a run directory last still lives, if on this machine; nothing is locked."""
    try:
        pid, _, host = regular(folder / ".lock").read_text().partition(" ")
        return host != socket.gethostname() or _alive(int(pid))
    except (OSError, ValueError):
        return False


def _take(fd: int, path: Path, wait: float) -> None:
    end = time.monotonic() + wait
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, _, host = os.pread(fd, 300, 0).decode(errors="replace").partition(" ")
        alive = host != socket.gethostname() or _alive(int(pid))
        if time.monotonic() > end or (pid and alive):
            what = f"process {pid} on {host}" + ("" if alive else ", which has ended, but not all of its workers")
            raise RunDirError(f"{path.parent} is in use by {what}; wait for it, or choose another --out folder")
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True
