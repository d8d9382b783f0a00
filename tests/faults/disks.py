"""Disks that fail at one of their operations, and the disk that a power cut leaves: only what was fsynced is there."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom.storage import disk


class PowerCut(BaseException):
    """The machine has no power any more, or the process was killed."""


class Faulty:
    """A hook of the disk that counts its operations in one folder, and fails at one of them.

    Args:
        folder: whose operations count. Others never fail.
        at: number of the operation that fails, from 1 on. 0 for none.
        kind: of the fault, see `DISK_FAULTS`.
    """

    def __init__(self, folder: Path, at: int = 0, kind: str = "") -> None:
        self.folder, self.at, self.kind, self.count, self.is_dead = folder, at, kind, 0, False
        self._last: tuple[str, Path] | None = None
        self._handles = dict[int, int]()
        self._durable = dict[int, bytes]()
        self._names = dict[Path, dict[str, int]]()
        for path in [folder, *sorted(folder.rglob("*"))] if folder.exists() else []:
            if path.is_dir():
                self._names[path] = self._listing(path)
            elif path.is_file():
                self._durable[self._hold(path)] = path.read_bytes()

    def concerns(self, path: Path) -> bool:
        """Whether a path is in the folder."""
        return self.folder == path or self.folder in path.parents

    def __call__(self, op: str, path: Path) -> None:
        if not self.concerns(path):
            return
        if self.is_dead:  # a process that is gone cleans nothing up
            raise PowerCut
        self._settle()
        self.count += 1
        if self.at and self.count >= self.at:
            first = self.count == self.at
            if self.kind in ("kill", "power") and first:
                self.is_dead = True
                raise PowerCut
            if self.kind == "EIO" and first:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            if self.kind == "ENOSPC" and op in ("create", "write", "tear", "fsync"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self._last = (op, path)

    def _settle(self) -> None:
        """Note what the last operation has made durable, now that it is done."""
        op, path = self._last or ("", self.folder)
        self._last = None
        if op == "create" and path.is_file():
            self._durable.setdefault(self._hold(path), b"")
        elif op == "fsync" and path.is_dir():
            self._names[path] = self._listing(path)
        elif op == "fsync" and path.is_file():
            self._durable[self._hold(path)] = path.read_bytes()

    def _hold(self, path: Path) -> int:
        """Keep a file open, so that its number is never another file's."""
        number = path.stat().st_ino
        if number not in self._handles:
            self._handles[number] = os.open(path, os.O_RDONLY)
        return number

    def _listing(self, folder: Path) -> dict[str, int]:
        return {p.name: self._hold(p) for p in folder.iterdir() if p.is_file() and not p.is_symlink()}

    def start_again(self) -> None:
        """Start a process that is gone. After a power cut, only what was fsynced is there: contents by file, names by
        folder."""
        is_cut, self.is_dead = self.is_dead and self.kind == "power", False
        if not is_cut or not self.folder.exists():
            return
        for folder in [self.folder, *(p for p in self.folder.rglob("*") if p.is_dir())]:
            durable = self._names.get(folder, {})
            for name in self._listing(folder):
                (folder / name).unlink()
            for name, number in durable.items():
                (folder / name).write_bytes(self._durable.get(number, b""))

    def close(self) -> None:
        """Close all files."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()


DISK_FAULTS = ("ENOSPC", "EIO", "kill", "power")
"""A full disk from an operation on, one failed operation, a killed process, a power cut."""


@contextmanager
def failing(folder: Path, at: int = 0, kind: str = "") -> Iterator[Faulty]:
    """A disk with a fault. After a power cut, what was not fsynced is gone."""
    faulty = Faulty(folder, at, kind)
    disk.hook = faulty
    try:
        yield faulty
    finally:
        disk.hook = None
        faulty.start_again()
        faulty.close()
