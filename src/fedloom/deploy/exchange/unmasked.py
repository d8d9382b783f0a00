"""Unmasked: which sums the server asked for, kept on its disk, so that none is asked for of other sites."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedloom.storage.files import write_atomic

NAME = "unmasked.json"


class Unmasked:
    """Whose sum was asked for last, and how often: it can be asked for again of the same sites only.

    Args:
        folder: of the checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def of(self, what: str, round: int) -> tuple[set[int], int] | None:
        """The sites, and how many times; None where it was not asked for."""
        found = self._read().get(what)
        return (set(found["clients"]), found["attempts"]) if found and found["round"] == round else None

    def note(self, sums: Mapping[str, int], clients: Collection[int]) -> None:
        """Remember it, on the disk."""
        known = self._read()
        for what, t in sums.items():
            before = self.of(what, t)
            known[what] = {"round": t, "clients": sorted(clients), "attempts": 1 + (before[1] if before else 0)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, json.dumps(known).encode())

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return found
