"""Unmasked: the sums that the server asked for, kept on its disk, so that each is revealed for one set of sites only.

A sum that was asked for is asked for again in the same session, of all its sites that are there, until enough have
given their shares. Then the sum itself is kept, and no site is asked any more. A damaged file is as if it were gone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedloom.storage import make_folder, write_atomic
from fedloom.storage.disk import regular
from fedloom.storage.files import discard
from fedloom_sites.deploy.secure.opened import read_checked, write_checked
from fedloom_sites.deploy.secure.protocol import Integers

UNMASKED_FILE = "unmasked.json"
BYTES_FIELDS = ("signed", "counters", "shown")
"""Fields with bytes by client."""


class PendingSum(NamedTuple):
    """A sum that was asked for.

    Attributes:
        round: of the session.
        nonce: of the session.
        adverts: the keys of its sites, as a message.
        question: digest of what they were asked.
        shared: sites that have masks with each other.
        clients: sites whose vector arrived, which the sum is of.
        signed: signatures of its sites that the sum is of them.
        sums: the round of what is summed, by what that is.
        models: digest of the models that it is of, by what is summed.
        total: the sum, under masks until it is revealed.
        attempts: how often it was asked for.
        told: whether the masks are off.
        counters: masked counters by client, where sites read their sum before they open this one.
        shown: shares that take the masks off the counters, by the site that gave them. Empty before.
    """

    round: int
    nonce: bytes
    adverts: bytes
    question: bytes
    shared: list[int]
    clients: list[int]
    signed: dict[int, bytes]
    sums: dict[str, int]
    models: dict[str, str]
    total: Integers
    attempts: int = 0
    told: bool = False
    counters: Mapping[int, bytes] = MappingProxyType({})
    shown: Mapping[int, bytes] = MappingProxyType({})


class PendingSums:
    """The newest sum that was asked for of every kind.

    Args:
        folder: of the checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self, what: str) -> PendingSum | None:
        """Return the most recent sum of a kind, or None if there was none, or its file is missing or damaged."""
        entry = self._read().get(what)
        if entry is None:
            return None
        try:
            content = regular(self._folder / entry["file"]).read_bytes()
            if hashlib.sha256(content).hexdigest() != entry["digest"]:
                return None
            total = np.frombuffer(content, dtype="<u8")
            fields = {key: entry[key] for key in ("round", "shared", "clients", "sums", "models", "attempts", "told")}
            fields |= {key: bytes.fromhex(entry[key]) for key in ("nonce", "adverts", "question")}
            fields |= {name: {int(c): bytes.fromhex(part) for c, part in entry[name].items()} for name in BYTES_FIELDS}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return PendingSum(**fields, total=total.astype(np.uint64, copy=False))

    def about(self, what: str) -> tuple[int, str]:
        """Return round and models of the most recent sum of a kind without reading it. Round -1 if there was none."""
        try:
            entry = self._read()[what]
            return entry["sums"][what], entry["models"].get(what, "")
        except (KeyError, TypeError, AttributeError):
            return -1, ""

    def of(self, sums: Mapping[str, int]) -> PendingSum | None:
        """Find a sum by kind and round among several candidates."""
        matches = (pending for what, t in sums.items() if self.about(what)[0] == t and (pending := self.newest(what)))
        return next(matches, None)

    def keep(self, pending: PendingSum) -> None:
        """Make it last. It takes the place of the one before of its kind."""
        make_folder(self._folder)
        name = f"{pending.nonce.hex()}.{'sum' if pending.told else 'masked'}"
        content = pending.total.astype("<u8", copy=False).data
        if not (self._folder / name).exists():
            write_atomic(self._folder / name, content)
        entry = {**pending._asdict(), "file": name, "digest": hashlib.sha256(content).hexdigest()}
        entry |= {key: entry[key].hex() for key in ("nonce", "adverts", "question")}
        entry |= {name: {c: part.hex() for c, part in entry[name].items()} for name in BYTES_FIELDS}
        del entry["total"]
        entries = self._read() | dict.fromkeys(pending.sums, entry)
        write_checked(self._folder / UNMASKED_FILE, entries)
        kept = {one["file"] for one in entries.values()}
        old = [path for end in ("sum", "masked") for path in self._folder.glob(f"*.{end}") if path.name not in kept]
        discard(*old)

    def _read(self) -> dict[str, dict[str, Any]]:
        return read_checked(self._folder / UNMASKED_FILE) or {}
