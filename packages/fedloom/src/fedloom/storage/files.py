"""Files of a run directory. They are written only with the primitives in `fedloom.storage.disk`."""

from __future__ import annotations

import fcntl
import io
import os
import weakref
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.errors import CheckpointError, ConfigError, DamagedCheckpoint, RunDirError, check_folder, explain_os_error
from fedloom.outputs import draft_path
from fedloom.storage import disk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

MAX_BUFFERS_PER_CALL = 1024
"""Maximum number of buffers that one system call reads or writes."""
MAX_OPEN_ATTEMPTS = 100
"""Number of attempts to open a temporary file, if it appears to be a different file each time. The number is limited
because some disks change the inode numbers of open files."""


def convert_write_errors(path: Path) -> AbstractContextManager[None]:
    """If a write inside the block fails, convert the error to a `CheckpointError`."""
    return explain_os_error(path, "Earlier results are intact", "run the same command again")


class FileSink(io.RawIOBase):
    """File-like object that `write_atomic` passes to a function. The function fills it from start to end."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self._path, self._length = fd, path, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        view = disk.as_bytes(data)
        disk.write_bytes(self._fd, self._path, view, None)
        self._length += len(view)
        return len(view)

    def tell(self) -> int:
        return self._length

    def replace(self, data: Buffer, at: int) -> None:
        """Overwrite the bytes that start at position ``at``."""
        disk.write_bytes(self._fd, self._path, disk.as_bytes(data), at)


def read_content(path: Path, what: str = "", cure: str = "") -> bytes:
    """Return the content of a regular file.

    Args:
        path: the file.
        what: description of the file for the message, e.g. ``"the site file"``.
        cure: end of the message, which tells the user what to do.

    Raises:
        ConfigError: the file does not exist, is not a regular file, or cannot be read.
    """
    try:
        return disk.check_regular_file(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {what}{what and ' '}{path}: {error.strerror}{cure and '; '}{cure}") from None


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Durably create a folder with the given mode, together with its parents.

    Raises:
        RunDirError: the path cannot be a folder.
        CheckpointError: the write is rejected.
    """
    check_folder(folder)
    if folder.exists():
        return
    missing = [*takewhile(lambda f: not f.exists(), (folder, *folder.parents))]
    with convert_write_errors(folder):
        for path in reversed(missing):
            disk.note_disk_step("create", path)
            path.mkdir(mode if path == folder else 0o777, exist_ok=True)
            disk.fsync_folder(path.parent)


def is_unused(folder: Path) -> bool:
    """Return True if a folder does not exist or contains only hidden files.

    Raise a `RunDirError` if the path cannot be a folder.
    """
    check_folder(folder)
    return not folder.exists() or all(path.name.startswith(".") for path in folder.iterdir())


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Raise an error if a folder, or an entry in it, is a symbolic link, because fedloom may delete its content.

    Raises:
        RunDirError: one of them is a symbolic link. The message names the first symbolic link.
    """
    for place in (folder / name for name in names):
        inside = () if place.is_symlink() else sorted(place.glob("*"))
        link = next((path for path in (place, *inside) if path.is_symlink()), None)
        if link is not None:
            raise RunDirError(
                f"{link} is a link, and fedloom would write and delete files in its target. Remove "
                "the link, or choose another --out"
            )


def write_atomic(path: Path, content: Buffer | Callable[[FileSink], object]) -> None:
    """Replace a whole file. After a crash at any point, the file contains either its old or its new content.

    Several processes may write the same file. They take turns, and each of them writes a complete file.

    Args:
        path: the file. Its folder exists.
        content: bytes, or a function that writes the bytes to a file-like object.

    Raises:
        CheckpointError: the path is a folder, the disk is full, or the write is rejected. In this case, the old file is
            intact and no temporary file remains.
    """
    with convert_write_errors(path):
        if path.is_dir():
            raise CheckpointError(f"{path} is a folder, not a file. Give the path of a file, such as {path / 'NAME'}")
        temporary = draft_path(path)
        with _open_draft(temporary) as fd:
            if callable(content):
                content(FileSink(fd, temporary))
            else:
                disk.write_bytes(fd, temporary, disk.as_bytes(content), None)
            disk.fsync(fd, temporary)
            disk.note_disk_step("rename", path)
            temporary.rename(path)
        disk.fsync_folder(path.parent)


@contextmanager
def _open_draft(path: Path) -> Iterator[int]:
    """Open a temporary file that can be used by only one writer at a time among all processes. Other writers wait."""
    for tries_left in reversed(range(MAX_OPEN_ATTEMPTS)):
        with _remove_on_error(path):
            fd = disk.open_file(path, os.O_WRONLY | os.O_CREAT)
        try:
            with suppress(OSError):  # a disk without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_at(path, fd) or not tries_left:  # the previous writer may have renamed or removed it
                with _remove_on_error(path):
                    if os.fstat(fd).st_size:
                        disk.truncate(fd, path, 0)
                    yield fd
                return
        finally:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a forked process may also have the file open
            os.close(fd)


@contextmanager
def _remove_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            disk.note_disk_step("unlink", path)
            path.unlink()
        raise


def _is_at(path: Path, fd: int) -> bool:
    """Return True if a path refers to the given open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def create_file(path: Path) -> None:
    """Create an empty file if the path does not exist. Raise a `CheckpointError` if the write is rejected."""
    if not path.exists():
        with convert_write_errors(path):
            os.close(disk.open_file(path, os.O_WRONLY | os.O_CREAT))


def append_synced(path: Path, pieces: Iterable[Buffer]) -> int:
    """Append bytes to an existing file, with a single fsync.

    Args:
        path: the file.
        pieces: bytes to append, in order.

    Returns:
        New length of the file in bytes.

    Raises:
        CheckpointError: the disk is full or the write is rejected. In this case, the file has its previous length.
    """
    with convert_write_errors(path):
        fd = disk.open_file(path, os.O_WRONLY)
        try:
            former = os.lseek(fd, 0, os.SEEK_END)
            try:
                for piece in pieces:
                    disk.write_bytes(fd, path, disk.as_bytes(piece), None)
                disk.fsync(fd, path)
            except BaseException:
                with suppress(OSError):
                    disk.truncate(fd, path, former)
                raise
            return os.lseek(fd, 0, os.SEEK_CUR)
        finally:
            os.close(fd)


def append_line(path: Path, line: bytes) -> None:
    """Append a line with a single fsync.

    Even if a crash truncated the last line, the appended line starts on a new line.

    Raises:
        CheckpointError: the disk is full or the write is rejected. In this case, the file has its previous length.
    """
    with convert_write_errors(path), disk.check_regular_file(path).open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        is_torn = file.read(1) not in (b"", b"\n")
    append_synced(path, [b"\n" * is_torn + line + b"\n"])


def delete_files(*paths: Path) -> None:
    """Delete files in the given order.

    After each deletion, the folder is fsynced, so that a deleted file cannot reappear after the next file has been
    deleted.

    Raises:
        CheckpointError: the deletion is rejected.
    """
    for path in paths:
        with convert_write_errors(path), suppress(FileNotFoundError):
            disk.note_disk_step("unlink", path)
            path.unlink()
            disk.fsync_folder(path.parent)


class RowFile:
    """File of fixed length that is read and written in place. Forked processes may share the file.

    Args:
        path: the file.
        length: length of the file in bytes.
        new: True to create the file, or to replace an existing file, with zeros. Otherwise, the file must exist and
            have this length.

    Raises:
        CheckpointError: (any method) the disk is full, the write is rejected, or the file is missing or truncated.
    """

    def __init__(self, path: Path, length: int, new: bool) -> None:
        self.path = path
        with convert_write_errors(path):
            if not new and (not path.exists() or path.stat().st_size != length):
                raise DamagedCheckpoint(f"{path} is missing or is shorter than {length} bytes")
            self._fd = disk.open_file(path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if new else 0))
            self._close = weakref.finalize(self, os.close, self._fd)
            if new:
                disk.truncate(self._fd, path, length)
                disk.fsync(self._fd, path)
                disk.fsync_folder(path.parent)

    def read(self, into: Sequence[memoryview], at: int) -> None:
        """Fill up to `MAX_BUFFERS_PER_CALL` buffers, in order, with the bytes that start at position ``at``."""
        while into:
            done = os.preadv(self._fd, into, at)
            if done == 0:
                raise DamagedCheckpoint(f"{self.path} is truncated: it ends before byte {at}")
            into, at = _remaining_buffers(into, done), at + done

    def write(self, pieces: Iterable[tuple[Sequence[memoryview], int]]) -> None:
        """Write buffers, up to `MAX_BUFFERS_PER_CALL` at a time, where each group starts at its own position.

        The bytes become durable only with `sync`.
        """
        with convert_write_errors(self.path):
            for data, at in pieces:
                if not disk.is_watched():
                    done = os.pwritev(self._fd, data, at)
                    data, at = _remaining_buffers(data, done), at + done
                if data:
                    disk.write_bytes(self._fd, self.path, memoryview(b"".join(data)), at)

    def sync(self) -> None:
        """Wait until the data written by all processes are on the disk."""
        with convert_write_errors(self.path):
            disk.fsync(self._fd, self.path)

    def close(self) -> None:
        """Close the file in this process. The file is also closed when the object is deleted."""
        self._close()


def _remaining_buffers(buffers: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """Return the part of some buffers that remains after a number of bytes has been processed."""
    for k, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[k + 1 :]]
        done -= len(buffer)
    return []
