"""Ledger: what was released under differential privacy; written before the noise is drawn, never after.

A crash between the entry and the release costs budget and releases nothing. A round that is asked again of a site is
answered with the reply that is kept, so it is neither noised nor counted again; one that has to be computed anew,
because the download is another, is counted again.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from fedloom.deploy.noise import left_to_sites
from fedloom.engine.privacy import Noise, epsilon
from fedloom.errors import Refused
from fedloom.storage.files import append_synced, make_folder

NAME = "ledger.jsonl"


class Spent(Refused):
    """A release that the budget does not allow; the sentence holds nothing of the samples."""


class Ledger:
    """The releases of one side in one experiment.

    Args:
        folder: where the ledger lies.
        noise: what is accounted for; None without a delta.
        limit: epsilon that is never exceeded; None: none.
        who: whose budget it is, for messages.
    """

    def __init__(self, folder: Path, noise: Noise | None, limit: float | None, who: str) -> None:
        self._path, self._noise, self._limit, self._who = folder / NAME, noise, limit, who

    def releases(self) -> int:
        """Entries; one that a crash cut short counts."""
        return len(self._path.read_bytes().splitlines()) if self._path.exists() else 0

    def release(self, round: int, **facts: str) -> None:
        """Enter one release, with further facts of it: the digest of the samples that it is of.

        Raises:
            Spent: the limit would be exceeded, or what is spent cannot be known.
            CheckpointError: the entry cannot be written.
        """
        if self._noise is None and self._limit is None:
            return
        if self._noise is None:
            raise Spent(
                f"{self._who} releases nothing without accounted noise (epsilon = {self._limit}), but the experiment "
                "has neither channel 'gaussian-noise' nor aggregator 'private-mean' with a delta"
            )
        count = self.releases() + 1
        spent = epsilon(self._noise, count)
        if self._limit is not None and spent > self._limit:
            raise Spent(
                f"the privacy budget of {self._who} is spent: release {count} would make epsilon {spent:.4g}, the "
                f"limit is {self._limit:.4g}"
            )
        entry = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "round": round, "epsilon": spent, **facts}
        alone = left_to_sites(self._noise)
        if alone is not None:
            entry["epsilon_sites"] = epsilon(alone, count)
        make_folder(self._path.parent)
        self._path.touch()
        append_synced(self._path, [json.dumps(entry).encode() + b"\n"])
