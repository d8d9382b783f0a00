"""Reading of files from folders and from zip and tar archives (plain, gz or xz) as a stream of entries.

Nothing is unpacked to disk, links in archives are skipped, and the declared size of a file is checked before it is
read. If no size is declared, reading stops with an error as soon as the limit is exceeded.
"""

from __future__ import annotations

import gzip
import io
import lzma
import math
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import DataError

MAX_UNPACKED_BYTES = 16 * 2**30
"""Maximum size in bytes of a single unpacked file. It exceeds the memory of most machines, so that it can be reached
only by an attack or a mistake."""
ALWAYS_ALLOWED_BYTES = 64 * 2**20
"""Up to this number of unpacked bytes, any compression ratio is accepted. Small tables of identical rows may be
compressed by a factor above `MAX_UNPACKING_RATIO`, and every machine has enough memory for this many bytes."""
READ_CHUNK_BYTES = 2**20
"""Number of bytes to read at a time. It is limited because gzip and lzma copy their output."""
MAX_UNPACKING_RATIO = 400
"""Maximum accepted ratio of unpacked bytes to packed bytes. The ratio is at most about 50 for real data in xz format,
but 1,000 or more for a decompression bomb."""

PATIENCE_SECONDS, PACKED_BYTES_PER_SECOND = 60.0, 100_000
"""Number of seconds for unpacking any file, and number of packed bytes per additional second. A 5 MB gz
file that contains 50 MB of table cells takes about 3 s on one core. A decompression bomb that consists of identical
rows, with a ratio below `MAX_UNPACKING_RATIO`, takes minutes to unpack."""

GZIP_MAGIC, XZ_MAGIC, ZIP_MAGIC = b"\x1f\x8b", b"\xfd7zXZ\x00", b"PK\x03\x04"
DAMAGED_FILE_ERRORS = (
    EOFError, OSError, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, zlib.error, NotImplementedError,
)  # fmt: skip
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".zip")
NameFilter = Callable[[str], bool]


class ArchiveEntry(NamedTuple):
    """File in an archive: name (without .gz or .xz), bytes, location as shown in messages, and packed size."""

    name: str
    stream: BinaryIO
    location: str
    packed_bytes: int


class _LimitedStream(io.RawIOBase):
    """Stream that raises an error if it yields more than `bound` bytes or takes too long.

    The name of the file is part of the error.

    The time is measured between the first and the last byte, and includes the processing in between.
    """

    def __init__(self, inner: BinaryIO, bound: int, where: str, seconds: float = math.inf) -> None:
        self._inner, self._left, self._bound, self._where = inner, bound, bound, where
        self._seconds, self._start = seconds, math.nan

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # slices of RawIOBase.read would be copies
        try:
            count = cast("io.BufferedIOBase", self._inner).readinto(memoryview(buffer)[:READ_CHUNK_BYTES])
        except DAMAGED_FILE_ERRORS as error:
            raise damaged_file_error(self._where, error) from error
        self._left -= count
        if self._left < 0:
            raise archive_bomb_error(self._where, self._bound)
        now = time.monotonic()
        self._start = now if math.isnan(self._start) else self._start
        if now - self._start > self._seconds:
            raise DataError(
                f"{self._where}: reading took more than {self._seconds:.0f} s, which is too long for the size of the "
                "archive. If the file is genuine, unpack the file yourself and use the unpacked file"
            )
        return count


class _LastBlockStream:
    """Stream that remembers its last block, because the last block of a tar archive must contain only zeros."""

    def __init__(self, inner: BinaryIO) -> None:
        self._inner, self.last = inner, b""

    def read(self, size: int) -> bytes:
        block = self._inner.read(size)
        self.last = (self.last + block)[-tarfile.BLOCKSIZE :]
        return block


def damaged_file_error(where: str, error: Exception) -> DataError:
    """Return the error for a file that cannot be unpacked."""
    return DataError(f"{where} is truncated or damaged ({error}). Fetch the file again")


def archive_bomb_error(where: str, size: int) -> DataError:
    """Return the error for a file that unpacks to many more bytes than expected."""
    return DataError(
        f"{where} unpacks to at least {size:,} bytes, which is too much for the size of the archive, or more than the "
        f"limit of {MAX_UNPACKED_BYTES:,}. If the file is genuine, unpack the file yourself and use the unpacked file"
    )


def max_unpacked_bytes(packed: int) -> int:
    """Return the maximum unpacked size of a file of `packed` bytes, in bytes."""
    return min(MAX_UNPACKED_BYTES, max(ALWAYS_ALLOWED_BYTES, MAX_UNPACKING_RATIO * packed))


def check_size(where: str, declared: int, packed: int) -> None:
    """Raise an error if a declared size is implausible for a file of `packed` bytes.

    Raises:
        DataError: the declared size exceeds the limit.
    """
    if declared > max_unpacked_bytes(packed):
        raise archive_bomb_error(where, declared)


def _unpack_stream(stream: BinaryIO, packed: int, where: str) -> BinaryIO:
    """Return a stream of unpacked bytes from a gz or xz stream. Any other stream is returned unchanged."""
    buffered = io.BufferedReader(_LimitedStream(stream, MAX_UNPACKED_BYTES, where), 2**17)
    head = buffered.peek(6)[:6]
    if head.startswith(GZIP_MAGIC):
        inner: BinaryIO = cast("BinaryIO", gzip.GzipFile(fileobj=buffered))
    elif head.startswith(XZ_MAGIC):
        inner = cast("BinaryIO", lzma.LZMAFile(buffered))  # noqa: SIM115  (closed with the file below it)
    else:
        return cast("BinaryIO", buffered)
    seconds = PATIENCE_SECONDS + packed / PACKED_BYTES_PER_SECOND
    return cast("BinaryIO", io.BufferedReader(_LimitedStream(inner, max_unpacked_bytes(packed), where, seconds), 2**17))


def strip_compression_suffix(name: str) -> str:
    """Return a file name without .gz or .xz.

    >>> strip_compression_suffix("train-images-idx3-ubyte.gz")
    'train-images-idx3-ubyte'
    """
    return name[:-3] if name.endswith((".gz", ".xz")) else name


@contextmanager
def open_unpacked(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, and unpack the file if it is a gz or xz file.

    Raises:
        DataError: the file is missing, is unreadable or damaged, or unpacks to too many bytes.
    """
    check_regular(path)
    try:
        size = path.stat().st_size
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). Check the path and its permissions") from error
    with file:
        yield _unpack_stream(file, size, str(path))


def check_regular(path: Path) -> None:
    """Raise an error for a pipe, socket or device, because reading it may block or may never end.

    Raises:
        DataError: the path is a pipe, socket or device.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError(f"{path} is a pipe, socket or device. Use a regular file")


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def is_system_file(name: str) -> bool:
    """Return True if the file was added to a zip or folder by the macOS Finder.

    >>> [is_system_file(name) for name in ("__MACOSX/._a.csv", "a/._b.csv", "a/.DS_Store", "a/b.csv")]
    [True, True, True, False]
    """
    parts = PurePosixPath(name).parts
    return "__MACOSX" in parts or (bool(parts) and (parts[-1].startswith("._") or parts[-1] == ".DS_Store"))


def iterate_entries(path: Path, wanted: NameFilter = lambda name: True) -> Iterator[ArchiveEntry]:
    """Yield the requested files in a folder, zip or tar, or a single file.

    Each stream must be read before the next entry is requested.

    Names are relative, use forward slashes, and do not end in .gz or .xz. Folders are read in the order of their file
    names. Archives (including those inside a folder) are read in the stored order of their files.

    Raises:
        DataError: `path` does not exist, an archive is damaged, or a declared size is implausible.
    """
    if path.is_dir():
        for file in _walk_folder(path):
            name = strip_compression_suffix(file.relative_to(path).as_posix())
            if is_system_file(name):
                continue
            if file.is_file() and file.name.endswith(ARCHIVE_SUFFIXES):
                yield from iterate_entries(file, wanted)
            elif file.is_file() and wanted(name):
                with open_unpacked(file) as stream:
                    yield ArchiveEntry(name, stream, str(file), file.stat().st_size)
        return
    with open_unpacked(path) as stream:
        head = cast("io.BufferedReader", stream).peek(512)
        if head.startswith(ZIP_MAGIC):
            yield from _zip_entries(path, wanted)
        elif _is_tar(head):
            yield from _tar_entries(path, stream, wanted)
        elif wanted(strip_compression_suffix(path.name)):
            yield ArchiveEntry(strip_compression_suffix(path.name), stream, str(path), path.stat().st_size)


def _walk_folder(folder: Path) -> Iterator[Path]:
    """Yield all files in a folder and its subfolders, sorted by name. Symbolic links to folders are not followed."""
    with suppress(PermissionError):
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                yield from _walk_folder(path)
            else:
                yield path


def _zip_entries(path: Path, wanted: NameFilter) -> Iterator[ArchiveEntry]:
    try:
        with zipfile.ZipFile(path) as archive:
            files = [info for info in archive.infolist() if not info.is_dir() and not is_system_file(info.filename)]
            files = [info for info in files if wanted(strip_compression_suffix(info.filename))]
            check_size(str(path), sum(info.file_size for info in files), path.stat().st_size)
            for info in files:
                name, where = strip_compression_suffix(info.filename), f"{path}:{info.filename}"
                check_size(where, info.file_size, info.compress_size)
                with archive.open(info) as file:
                    inner = _unpack_stream(cast("BinaryIO", file), info.compress_size, where)
                    yield ArchiveEntry(name, inner, where, info.compress_size)
    except (*DAMAGED_FILE_ERRORS, RuntimeError) as error:
        raise damaged_file_error(str(path), error) from error


def _tar_entries(path: Path, stream: BinaryIO, wanted: NameFilter) -> Iterator[ArchiveEntry]:
    left, tail = max_unpacked_bytes(path.stat().st_size), _LastBlockStream(stream)
    try:
        with tarfile.open(fileobj=cast("BinaryIO", tail), mode="r|") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # the list of all members is of no use here and grows without end
                name, where = strip_compression_suffix(member.name.removeprefix("./")), f"{path}:{member.name}"
                left -= member.size
                if left < 0:
                    raise archive_bomb_error(where, member.size)
                if not member.isfile() or is_system_file(name) or not wanted(name):
                    continue
                file = archive.extractfile(member)
                assert file is not None
                yield ArchiveEntry(name, _unpack_stream(cast("BinaryIO", file), member.size, where), where, member.size)
    except DAMAGED_FILE_ERRORS as error:
        raise damaged_file_error(str(path), error) from error
    if tail.last.strip(b"\0") or len(tail.last) < tarfile.BLOCKSIZE:  # tarfile accepts truncated archives
        raise DataError(f"{path} is truncated: the end marker of the tar archive is missing. Fetch the file again")


def fill_array(entry: ArchiveEntry, out: NDArray[np.generic], what: str) -> None:
    """Fill the contiguous array `out` with bytes from the stream of an entry.

    Raises:
        DataError: the stream ends early.
    """
    view = out.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(view):
        got = cast("io.BufferedReader", entry.stream).readinto(view[done:])
        if not got:
            raise DataError(
                f"{entry.location} is truncated: {what} needs {len(view):,} bytes, got {done:,}. Fetch the file again"
            )
        done += got


def check_no_trailing_bytes(entry: ArchiveEntry) -> None:
    """Raise an error if a stream contains further bytes after the end of the data.

    Raises:
        DataError: there are further bytes.
    """
    if entry.stream.read(1):
        raise DataError(
            f"{entry.location}: more data follow the last declared record, so the file contradicts its own header"
        )


class GrowingRows:
    """Array to which rows of the same shape can be appended if the number of rows is not known in advance.

    The array grows in place, so memory never holds two copies of the data.
    """

    def __init__(self, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        self._data: NDArray[np.generic] = np.empty((0, *shape), dtype)
        self.size = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self._data.shape[1:]

    def room(self, count: int) -> NDArray[np.generic]:
        """Append `count` rows, and return them so that they can be written to.

        The rows belong to the array immediately.
        """
        start, self.size = self.size, self.size + count
        if self.size > len(self._data):
            self._data.resize((max(self.size, len(self._data) * 33 // 32), *self._data.shape[1:]), refcheck=False)
        return self._data[start : self.size]

    def reserve(self, start: int, count: int) -> NDArray[np.generic]:
        """Return `count` rows, starting at row `start`, as a buffer that can be written to.

        Rows that do not exist yet are appended.
        """
        self.room(max(start + count - self.size, 0))
        return self._data[start : start + count]

    def keep(self, start: int, mask: NDArray[np.bool_]) -> None:
        """Remove all rows from `start` on that are not selected by the mask."""
        kept = self._data[start : self.size][mask]
        self._data[start : start + len(kept)] = kept
        self.size = start + len(kept)

    def trim(self) -> NDArray[np.generic]:
        """Return all rows without the spare capacity of the array."""
        self._data.resize((self.size, *self._data.shape[1:]), refcheck=False)
        return self._data
