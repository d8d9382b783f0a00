"""Requested sums, which the server stores on disk so that each sum is revealed for only one set of sites.

The server repeats its request for a sum, in the same session and to all connected sites in the sum, until enough sites
have given their shares. The server then keeps only the sum and sends no more requests. A damaged file is treated as if
it were missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedloom.storage import make_folder, write_atomic
from fedloom.storage.disk import check_regular_file
from fedloom.storage.files import delete_files
from fedloom_sites.deploy.secure.opened import read_checked, write_checked
from fedloom_sites.deploy.secure.protocol import Integers

UNMASKED_FILE = "unmasked.json"
BYTES_FIELDS = ("signed", "counters", "shown")
"""Fields that contain a bytes value for each client."""


class PendingSum(NamedTuple):
    """Sum requested by the server from the sites.

    Attributes:
        round: round of the session.
        nonce: the session's nonce.
        adverts: encoded advertisements of the session's sites.
        question: digest of the request to the sites.
        shared: sites that share masks with each other.
        clients: sites whose vectors have arrived and are included in the sum.
        signed: signatures of these sites on the list of sites in the sum.
        sums: round of each sum, keyed by "uploads", "scores" or the name of an analysis.
        models: digest of the summed models, keyed by "uploads", "scores" or the name of an analysis.
        total: sum of the vectors, masked until the sum is revealed.
        attempts: number of times the sum has been requested.
        told: True if the masks have already been removed from the sum.
        counters: masked counters keyed by client, if the sites check the counters before they open this sum.
        shown: shares that unmask the counters, keyed by the site that sent them. Empty until the sites have sent these
            shares.
        link: link of the chain that the session's name contains, if sites verify the sums.
        counting: number of sites in the sum that have samples.
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
    link: bytes = b""
    counting: int = 0


class PendingSums:
    """Latest requested sum of each kind.

    Args:
        folder: folder with the checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self, what: str) -> PendingSum | None:
        """Return the latest sum of a kind, or None if no such sum exists or its file is missing or damaged."""
        entry = self._read().get(what)
        if entry is None:
            return None
        try:
            content = check_regular_file(self._folder / entry["file"]).read_bytes()
            if hashlib.sha256(content).hexdigest() != entry["digest"]:
                return None
            total = np.frombuffer(content, dtype="<u8")
            fields = {key: entry[key] for key in ("round", "shared", "clients", "sums", "models", "attempts", "told")}
            fields |= {key: bytes.fromhex(entry[key]) for key in ("nonce", "adverts", "question")}
            fields |= {"link": bytes.fromhex(entry.get("link", "")), "counting": entry.get("counting", 0)}
            fields |= {name: {int(c): bytes.fromhex(part) for c, part in entry[name].items()} for name in BYTES_FIELDS}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return PendingSum(**fields, total=total.astype(np.uint64, copy=False))

    def about(self, what: str) -> tuple[int, str]:
        """Return the round and the models of the latest sum of a kind without reading the sum itself.

        The round is -1 if no such sum exists.
        """
        try:
            entry = self._read()[what]
            return entry["sums"][what], entry["models"].get(what, "")
        except (KeyError, TypeError, AttributeError):
            return -1, ""

    def find_match(self, sums: Mapping[str, int]) -> PendingSum | None:
        """Return the stored sum that matches one of the given kinds and rounds, or None if there is none."""
        matches = (pending for what, t in sums.items() if self.about(what)[0] == t and (pending := self.newest(what)))
        return next(matches, None)

    def keep(self, pending: PendingSum) -> None:
        """Store a sum durably. The new sum replaces the previous sum of the same kind."""
        make_folder(self._folder)
        name = f"{pending.nonce.hex()}.{'sum' if pending.told else 'masked'}"
        content = pending.total.astype("<u8", copy=False).data
        if not (self._folder / name).exists():
            write_atomic(self._folder / name, content)
        entry = {**pending._asdict(), "file": name, "digest": hashlib.sha256(content).hexdigest()}
        entry |= {key: entry[key].hex() for key in ("nonce", "adverts", "question", "link")}
        entry |= {name: {c: part.hex() for c, part in entry[name].items()} for name in BYTES_FIELDS}
        del entry["total"]
        entries = self._read() | dict.fromkeys(pending.sums, entry)
        write_checked(self._folder / UNMASKED_FILE, entries)
        kept = {one["file"] for one in entries.values()}
        old = [path for end in ("sum", "masked") for path in self._folder.glob(f"*.{end}") if path.name not in kept]
        delete_files(*old)

    def _read(self) -> dict[str, dict[str, Any]]:
        return read_checked(self._folder / UNMASKED_FILE) or {}
