"""Ledger: what a site has released under differential privacy; written before the noise is drawn, never after.

A crash between the entry and the release costs budget and releases nothing. A round that is asked again is answered
with the reply that is kept, so it is neither noised nor counted again; one that has to be computed anew, because the
server's download is another, is counted again. Noise comes from generators seeded by the operating system.
"""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime

import torch

from fedloom.deploy.settings import Site
from fedloom.errors import Refused
from fedloom.rows.channel import GaussianNoise
from fedloom.running.files import append_synced, make_folder
from fedloom.running.job import Job
from fedloom.running.privacy import accounted, epsilon


class Ledger:
    """The releases of one site in one experiment.

    Args:
        site: its settings, with its own limit of epsilon.
        job: the run, with the channel.
    """

    def __init__(self, site: Site, job: Job) -> None:
        self._site, self._channel = site, job.channel
        self._path = site.state / site.fingerprint[:16] / "ledger.jsonl"

    def releases(self) -> int:
        """Entries; one that a crash cut short counts."""
        return len(self._path.read_bytes().splitlines()) if self._path.exists() else 0

    def release(self, round: int) -> list[torch.Generator] | None:
        """Enter one release, and give the generator of its noise; None where no noise is added.

        Raises:
            Refused: the site's epsilon would be exceeded, or cannot be known.
            CheckpointError: the entry cannot be written.
        """
        limit, noise = self._site.epsilon, accounted(self._channel)
        if limit is not None and noise is None:
            raise Refused(
                f"site {self._site.site} releases nothing without accounted noise (epsilon = {limit}), but the "
                "experiment has no channel 'gaussian-noise' with a delta"
            )
        if not isinstance(self._channel, GaussianNoise):
            return None
        count = self.releases() + 1
        spent = None if noise is None else epsilon(noise, count)
        if limit is not None and spent is not None and spent > limit:
            raise Refused(
                f"the privacy budget of site {self._site.site} is spent: release {count} would make epsilon "
                f"{spent:.4g}, its limit is {limit:.4g}"
            )
        entry = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "round": round, "epsilon": spent}
        make_folder(self._path.parent)
        self._path.touch()
        append_synced(self._path, [json.dumps(entry).encode() + b"\n"])
        return [torch.Generator().manual_seed(secrets.randbits(63))]
