"""Audit: an append-only log of every reply, accepted or not and why; one JSON object per line, on disk before use."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedloom.errors import RunDirError
from fedloom.storage.disk import regular
from fedloom.storage.files import append_line, create_file, make_folder

SENT = "sent.jsonl"
"""The log in the folder of a site's state of what has left the site."""


class Audit:
    """A log that is only ever appended to.

    Args:
        path: the file; created if need be.

    Raises:
        CheckpointError: (also of any method) the disk is full or refuses.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        create_file(path)
        self._path = path

    def write(self, what: str, **facts: Any) -> None:
        """Append one line: the time, what happened, and the facts (plain values; None is left out)."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "what": what}
        line |= {k: v for k, v in facts.items() if v is not None}
        append_line(self._path, json.dumps(line, allow_nan=True).encode())

    def lines(self) -> list[dict[str, Any]]:
        """Everything in the log; see `lines_of`."""
        return lines_of(self._path)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Everything in a log that may be written at this moment; a line that was cut short is left out.

    Raises:
        RunDirError: it is no regular file, or cannot be read.
    """
    try:
        content = regular(path).read_bytes() if path.exists() else b""
    except OSError as error:
        raise RunDirError(f"cannot read the log {path}: {error.strerror}") from None
    return [entry for line in content.splitlines() if (entry := entry_of(line)) is not None]


def entry_of(line: bytes) -> dict[str, Any] | None:
    """The values of a line of a log; None where it was cut short."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
