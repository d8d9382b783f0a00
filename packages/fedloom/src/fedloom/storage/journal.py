"""Undo journal for rows in a file. The journal stores the old content of a row before the row is overwritten.

The journal ``journal-G`` starts at checkpoint G. Its header lists the clients that have rows at this checkpoint, and
contains the length of the previous journal. The records of a journal contain the old bytes of the rows that have been
changed since the checkpoint. If a checkpoint has a journal, its rows are restored by applying all journals from the
newest one back to this one.

A record consists of a tag (16 random bytes of the journal), the number of rows k, ids [k] int64, the rows, and the
CRC-32 of the record. A crash can damage only the last record. This record is ignored, because its rows had not yet been
overwritten.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import struct
import zlib
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from fedloom.errors import DamagedCheckpoint, RunDirError
from fedloom.storage.files import append_synced, delete_files, write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

__all__ = ["PIECE_BYTES", "Header", "Journal", "raw"]

PIECE_BYTES = 1 << 22  # bytes of rows held in memory at once
_JOURNAL_MAGIC = b"FLJOURN1"
_HEADER_STRUCT = struct.Struct("<8sII")  # magic, length and CRC-32 of the JSON that follows
_RECORD_STRUCT = struct.Struct("<16sQ")  # tag, rows
_CRC_STRUCT = struct.Struct("<I")


class Header(NamedTuple):
    """Header of a journal file.

    Attributes:
        generation: number of the journal's first checkpoint.
        previous: generation of the previous journal, or -1 if there is none.
        sealed: length of the previous journal in bytes at the time when this journal was started.
        tag: first bytes of each record.
        occupied: mask of the clients that have a row at the checkpoint, bool [n].
        length: length of the header in bytes.
    """

    generation: int
    previous: int
    sealed: int
    tag: bytes
    occupied: Tensor
    length: int


class _Record(NamedTuple):
    at: int
    ids: Tensor


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying them."""
    if not tensor.numel():
        return memoryview(b"")
    assert tensor.is_contiguous()
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class Journal:
    """All journals of a single store.

    Args:
        folder: folder that contains the ``journal-G`` files.
        layout: text that describes the fields, shapes and dtypes of the rows.
        width: number of bytes per row.
    """

    def __init__(self, folder: Path, layout: str, width: int) -> None:
        self._folder, self._layout, self._width = folder, layout, width
        self._open: Header | None = None
        self._length = 0

    def path(self, generation: int) -> Path:
        """Return the journal file that belongs to a checkpoint."""
        return self._folder / f"journal-{generation}"

    def exists(self) -> bool:
        """Return True if there is a journal.

        Raises:
            RunDirError: the journal belongs to a different set of clients or a different model.
            DamagedCheckpoint: the journal is damaged.
        """
        return bool([self._header(g) for g in self.generations()[-1:]])

    def generations(self) -> list[int]:
        """Return the numbers of the checkpoints that have a journal, in ascending order."""
        names = [p.name.removeprefix("journal-") for p in self._folder.glob("journal-*")]
        return sorted(int(name) for name in names if name.isdigit())

    def start(self, generation: int, occupied: Tensor, previous: int, sealed: int) -> None:
        """Start the journal of a checkpoint in one atomic step, replacing any existing journal."""
        tag = os.urandom(16)
        text = json.dumps(
            {
                "generation": generation,
                "previous": previous,
                "sealed": sealed,
                "tag": tag.hex(),
                "layout": self._layout,
                "seen": base64.b64encode(raw(occupied)).decode(),
            }
        ).encode()
        content = _HEADER_STRUCT.pack(_JOURNAL_MAGIC, len(text), zlib.crc32(text)) + text
        write_atomic(self.path(generation), content)
        self._open = Header(generation, previous, sealed, tag, occupied.clone(), len(content))
        self._length = len(content)

    def next(self, generation: int, occupied: Tensor) -> None:
        """Start the journal of a new checkpoint, which follows the open journal.

        If no row has changed since the open journal was started, nothing happens.
        """
        assert self._open is not None
        if (generation, self._length) == (self._open.generation, self._open.length) and self._open.occupied.equal(
            occupied
        ):
            return
        assert generation > self._open.generation, f"checkpoint {generation} after {self._open.generation}"
        self.start(generation, occupied, self._open.generation, self._length)

    def append(self, ids: Tensor, old: Callable[[Tensor], Tensor]) -> None:
        """Append one record to the journal, with a single fsync.

        Args:
            ids: ids of the clients [k] int64.
            old: function that maps ids to their current rows [len(ids), bytes per row] uint8.
        """
        assert self._open is not None
        tag = self._open.tag

        def pieces() -> Iterator[memoryview | bytes]:
            crc = 0
            head: list[memoryview | bytes] = [_RECORD_STRUCT.pack(tag, len(ids)), raw(ids)]
            rows = (raw(old(some)) for some in self._cut(ids))
            for group in (head, rows):
                for piece in group:
                    crc = zlib.crc32(piece, crc)
                    yield piece
            yield _CRC_STRUCT.pack(crc)

        self._length = append_synced(self.path(self._open.generation), pieces())

    def chain(self, generation: int) -> list[Header]:
        """Return the headers of all journals, from a checkpoint's journal to the newest one.

        Raises:
            DamagedCheckpoint: one of these journals is missing or damaged.
            RunDirError: the journals belong to a different set of clients or a different model.
        """
        headers = [self._header(g) for g in self.generations() if g >= generation]
        linked = all(b.previous == a.generation for a, b in pairwise(headers))
        if not headers or headers[0].generation != generation or not linked:
            raise DamagedCheckpoint(
                f"{self._folder}: the clients' rows of checkpoint {generation} cannot be restored, "
                f"because the journals belong to {self.generations() or 'no checkpoint'}"
            )
        return headers

    def undo(self, header: Header, sealed: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the old rows of a journal in pieces, starting with the last record.

        Args:
            header: header of the journal whose rows are read.
            sealed: length that the file must have. None if the journal is the newest one, whose last record may be
                incomplete.

        Yields:
            Ids [k], and rows [k, bytes per row] uint8.

        Raises:
            DamagedCheckpoint: the journal is damaged.
        """
        path = self.path(header.generation)
        with path.open("rb") as file:
            records = []
            at = header.length
            while (record := self._record(file.fileno(), header.tag, at)) is not None:
                records.append(record)
                at += self._size(len(record.ids))
            if at != sealed and (sealed is not None or _contains_record(file.fileno(), header.tag, at + 1)):
                raise DamagedCheckpoint(f"{path} is damaged at byte {at}")
            for record in reversed(records):
                at = record.at + _RECORD_STRUCT.size + 8 * len(record.ids)
                for ids in self._cut(record.ids):
                    rows = torch.empty(len(ids), self._width, dtype=torch.uint8)
                    os.preadv(file.fileno(), [raw(rows)], at)
                    at += rows.numel()
                    yield ids, rows

    def restart(self, chain: list[Header]) -> None:
        """Start again from the oldest header of a chain of journals that were all applied.

        The newer journals are deleted, starting with the newest one.
        """
        first = chain[0]
        delete_files(*(self.path(h.generation) for h in reversed(chain[1:])))
        self.start(first.generation, first.occupied, first.previous, first.sealed)

    def prune(self, oldest: int) -> None:
        """Delete the journals of all checkpoints before ``oldest``."""
        old = [self.path(g) for g in self.generations() if g < oldest]
        delete_files(*old, *self._folder.glob(".journal-*.tmp"))

    def clear(self) -> None:
        """Delete every journal."""
        delete_files(*(self.path(g) for g in self.generations()))
        self._open = None

    def _size(self, rows: int) -> int:
        return _RECORD_STRUCT.size + rows * (8 + self._width) + _CRC_STRUCT.size

    def _cut(self, ids: Tensor) -> Sequence[Tensor]:
        pieces: Sequence[Tensor] = ids.split(max(1, PIECE_BYTES // self._width))
        return pieces

    def _header(self, generation: int) -> Header:
        path = self.path(generation)
        with path.open("rb") as file:
            magic, length, crc = _HEADER_STRUCT.unpack(file.read(_HEADER_STRUCT.size).ljust(_HEADER_STRUCT.size, b"\0"))
            text = file.read(length) if magic == _JOURNAL_MAGIC else b""
        if zlib.crc32(text) != crc or not text:
            raise DamagedCheckpoint(f"{path} is damaged at the beginning")
        values = json.loads(text)
        if values["layout"] != self._layout:
            raise RunDirError(
                f"{path} contains the clients' rows of a different experiment: {values['layout']}, but this one has "
                f"{self._layout}. Choose another --out folder, or start over with --force"
            )
        occupied = torch.frombuffer(bytearray(base64.b64decode(values["seen"])), dtype=torch.bool)
        tag = bytes.fromhex(values["tag"])
        return Header(
            values["generation"], values["previous"], values["sealed"], tag, occupied, _HEADER_STRUCT.size + length
        )

    def _record(self, fd: int, tag: bytes, at: int) -> _Record | None:
        """Read the record that starts at a byte. If there is no complete record, return None."""
        begin, rows = _RECORD_STRUCT.unpack(os.pread(fd, _RECORD_STRUCT.size, at).ljust(_RECORD_STRUCT.size, b"\0"))
        size = self._size(rows)
        if begin != tag or at + size > os.fstat(fd).st_size:
            return None
        crc, end = 0, at + size - _CRC_STRUCT.size
        for start in range(at, end, PIECE_BYTES):
            crc = zlib.crc32(os.pread(fd, min(PIECE_BYTES, end - start), start), crc)
        if _CRC_STRUCT.pack(crc) != os.pread(fd, _CRC_STRUCT.size, end):
            return None
        ids = torch.empty(rows, dtype=torch.int64)
        os.preadv(fd, [raw(ids)], at + _RECORD_STRUCT.size)
        return _Record(at, ids)


def _contains_record(fd: int, tag: bytes, start: int) -> bool:
    """Return True if a record starts at or after a byte."""
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as content:
        return content.find(tag, start) >= 0
