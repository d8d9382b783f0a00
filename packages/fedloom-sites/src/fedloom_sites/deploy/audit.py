"""Audit log: an append-only record of every reply, whether accepted or rejected, with the reason.

The log contains one JSON object per line, and each line is written to disk before the reply is used.

Each line contains its number and the SHA-256 of the previous line, so that a changed, removed or inserted line is
detected (`verify_log`). A line that was truncated by a crash remains in this chain, because the next line contains the
digest of its bytes. Lines missing at the end are revealed only by a digest stored elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.errors import RunDirError
from fedloom.storage import make_folder
from fedloom.storage.disk import check_regular_file
from fedloom.storage.files import append_line, create_file

SENT_FILE = "sent.jsonl"
"""Log of everything that has left the site, in the site's state folder."""
TAIL_BYTES = 1 << 16
"""Number of bytes at the end of a log to search for its last line. A line is a few hundred bytes long."""


class LogEnd(NamedTuple):
    """End of a log whose chain is unbroken.

    Attributes:
        lines: number of lines, including lines truncated by a crash.
        digest: SHA-256 of the last line. Empty if the log is empty.
    """

    lines: int
    digest: str


class Audit:
    """An append-only log.

    Args:
        path: the file, which is created if necessary.

    Raises:
        CheckpointError: (all methods) the disk is full, or the line cannot be written.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        create_file(path)
        self._path = path

    def write(self, what: str, **facts: Any) -> None:
        """Append one line with the time, the event, and facts (JSON-compatible values, where None is omitted)."""
        line: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "what": what}
        line |= {k: v for k, v in facts.items() if v is not None}
        end = self._end()
        line |= {"number": end.lines + 1, "before": end.digest}
        append_line(self._path, json.dumps(line, allow_nan=True).encode())

    def _end(self) -> LogEnd:
        """Return the end of the log, reading only its last lines."""
        with check_regular_file(self._path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = complete_lines(file.read())
        for after, line in enumerate(reversed(lines)):
            number = (parse_entry(line) or {}).get("number")
            if isinstance(number, int):
                return LogEnd(number + after, digest_line(lines[-1]))
        return LogEnd(len(lines), digest_line(lines[-1]) if lines else "")

    def lines(self) -> list[dict[str, Any]]:
        """Return all entries of the log (see `read_entries`)."""
        return read_entries(self._path)


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return all entries of a log, even if another process is writing to it. Truncated lines are omitted.

    Raises:
        RunDirError: the path is not a regular file, or cannot be read.
    """
    return [entry for line in complete_lines(_read_log_bytes(path)) if (entry := parse_entry(line)) is not None]


def verify_log(path: Path) -> LogEnd:
    """Check that no line of a log was changed, removed or inserted since it was written, and return the log's end.

    Raises:
        RunDirError: the log does not exist or is empty, or a line was changed, removed or inserted. The message names
            the first line that reveals the change.
    """
    if not path.exists():
        raise RunDirError(
            f"the log {path} does not exist. Pass a log, or the folder of a server or site that has already run"
        )
    lines = complete_lines(_read_log_bytes(path))
    if (broken := find_broken_line(lines)) is not None:
        raise RunDirError(
            f"{path}: line {broken} does not match the previous line, so one of the two lines was "
            "changed, removed or inserted later. Compare the log with a copy"
        )
    if not lines:
        raise RunDirError(f"{path} is empty. A log receives its first line when its program starts")
    return LogEnd(len(lines), digest_line(lines[-1]))


def find_broken_line(lines: Sequence[bytes]) -> int | None:
    """Return the number of the first line that does not continue the chain of lines, or None if all lines do.

    A line truncated by a crash continues the chain if it is the last line or precedes a complete line.
    """
    before = ""
    for k, line in enumerate(lines, 1):
        entry = parse_entry(line)
        is_torn = entry is None and line.startswith(b"{") and (k == len(lines) or parse_entry(lines[k]) is not None)
        if not is_torn and (entry is None or (entry.get("number"), entry.get("before")) != (k, before)):
            return k
        before = digest_line(line)
    return None


def _read_log_bytes(path: Path) -> bytes:
    try:
        return check_regular_file(path).read_bytes() if path.exists() else b""
    except OSError as error:
        raise RunDirError(f"cannot read the log {path}: {error.strerror}") from None


def complete_lines(content: bytes) -> list[bytes]:
    """Split the content of a log into lines. The last line may be truncated."""
    return content.removesuffix(b"\n").split(b"\n") if content else []


def digest_line(line: bytes) -> str:
    """Return the SHA-256 of a line as hexadecimal digits."""
    return hashlib.sha256(line).hexdigest()


def parse_entry(line: bytes) -> dict[str, Any] | None:
    """Parse a line of a log, and return None if the line is truncated."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
