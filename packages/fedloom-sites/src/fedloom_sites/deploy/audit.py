"""Audit: an append-only log of every reply, accepted or not and why. One JSON object per line, on disk before use.

Each line has its number and the SHA-256 of the line before, so that a line that was changed, removed or put in is found
(`verify_log`). A line that a crash cut short is one of them: the line after it names its bytes. Lines that are missing
at the end show only against a digest that was noted elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.errors import RunDirError
from fedloom.storage import make_folder
from fedloom.storage.disk import regular
from fedloom.storage.files import append_line, create_file

SENT_FILE = "sent.jsonl"
"""The log in the folder of a site's state of what has left the site."""
TAIL_BYTES = 1 << 16
"""Bytes at the end of a log in which its last line is looked for. A line has a few hundred."""


class LogEnd(NamedTuple):
    """The end of a log whose chain holds.

    Attributes:
        lines: their number, those among them that a crash cut short included.
        digest: SHA-256 of the last line. Empty without any.
    """

    lines: int
    digest: str


class Audit:
    """A log that is only ever appended to.

    Args:
        path: the file. Created if need be.

    Raises:
        CheckpointError: (also of any method) the disk is full or refuses.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        create_file(path)
        self._path = path

    def write(self, what: str, **facts: Any) -> None:
        """Append one line: time, event, and facts (plain values; None is left out)."""
        line: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "what": what}
        line |= {k: v for k, v in facts.items() if v is not None}
        end = self._end()
        line |= {"number": end.lines + 1, "before": end.digest}
        append_line(self._path, json.dumps(line, allow_nan=True).encode())

    def _end(self) -> LogEnd:
        """Read the end of the log, of whose lines only the last are needed."""
        with regular(self._path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = _lines(file.read())
        for after, line in enumerate(reversed(lines)):
            number = (entry_of(line) or {}).get("number")
            if isinstance(number, int):
                return LogEnd(number + after, _digest(lines[-1]))
        return LogEnd(len(lines), _digest(lines[-1]) if lines else "")

    def lines(self) -> list[dict[str, Any]]:
        """Everything in the log, see `lines_of`."""
        return lines_of(self._path)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Everything in a log that may be written at this moment. A line that was cut short is left out.

    Raises:
        RunDirError: it is no regular file, or cannot be read.
    """
    return [entry for line in _content(path).splitlines() if (entry := entry_of(line)) is not None]


def verify_log(path: Path) -> LogEnd:
    """Check that no line of a log was changed, removed or put in since it was written.

    Raises:
        RunDirError: there is no such log, or one was. The first line that shows it is named.
    """
    if not path.exists():
        raise RunDirError(f"there is no log {path}; give the folder of a server or of a site that has run, or a log")
    before = ""
    lines = _lines(_content(path))
    for k, line in enumerate(lines, 1):
        entry = entry_of(line)
        is_torn = entry is None and line.startswith(b"{") and (k == len(lines) or entry_of(lines[k]) is not None)
        if not is_torn and (entry is None or (entry.get("number"), entry.get("before")) != (k, before)):
            raise RunDirError(
                f"{path}: line {k} does not follow the line before, so one of them was changed, removed or put in "
                "after it was written; compare the log with a copy of it"
            )
        before = _digest(line)
    return LogEnd(len(lines), before)


def _content(path: Path) -> bytes:
    try:
        return regular(path).read_bytes() if path.exists() else b""
    except OSError as error:
        raise RunDirError(f"cannot read the log {path}: {error.strerror}") from None


def _lines(content: bytes) -> list[bytes]:
    return content.removesuffix(b"\n").split(b"\n") if content else []


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def entry_of(line: bytes) -> dict[str, Any] | None:
    """Parse a line of a log. Return None for a line that was cut short."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
