"""Copies of a site for a rehearsal: its code, data and settings, with temporary keys and a temporary state.

The other sites are stand-ins. They follow the protocol with all its checks and send zeros. An attack that isolates this
site in a sum therefore reads exactly the numbers sent by this site.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import RecordDict

from fedloom.data import Federation
from fedloom.errors import FedloomError, describe_error
from fedloom_sites.deploy.code import CODE_FOLDER, INITIAL_MODEL_FILE
from fedloom_sites.deploy.ops.keys import KeyPair, make_key_pair
from fedloom_sites.deploy.protocol.envelope import REQUEST_FIELDS, Envelope, seal_message, unseal_message
from fedloom_sites.deploy.protocol.identity import read_signing_key
from fedloom_sites.deploy.rehearsal.rogue import RogueServer, has_counters
from fedloom_sites.deploy.secure.counters import ABSENT_COUNTS, ANSWERED_COUNTS
from fedloom_sites.deploy.secure.member import SessionMember
from fedloom_sites.deploy.secure.terms import check_models, check_summands, check_terms, read_terms
from fedloom_sites.deploy.setting_files import sha256_hex
from fedloom_sites.deploy.settings import Site
from fedloom_sites.deploy.site.client import Client
from fedloom_sites.deploy.site.state import SiteState
from fedloom_sites.deploy.site.trainer import Trainer

SIGNING_KEY_FILE = "signing-key"


class StandInSite:
    """Stand-in for another site in a session, which follows the protocol and sends zeros.

    Args:
        site: the site's settings.
        key: signing key of the stand-in.
        trainer: trainer of the rehearsed site, which determines the weights of a sum.
        sizes: numbers of samples that the stand-in reports.
        figures: metrics that the stand-in reports for its samples.

    Attributes:
        length: length of the next vector.
    """

    def __init__(
        self, site: Site, key: Ed25519PrivateKey, trainer: Trainer, sizes: Sequence[int], figures: str
    ) -> None:
        self.site, self.sizes, self.figures = site, [*sizes], figures
        self._trainer, self._member, self.length = trainer, SessionMember(site, key, site.folder), 1

    def reply(self, content: RecordDict) -> RecordDict:
        """Return the reply to one step of a session."""
        try:
            arrays, head = (
                [self._answer(unseal_message(content, REQUEST_FIELDS, {}, 1 << 40))],
                {"status": "ok", "reason": ""},
            )
        except FedloomError as error:
            arrays, head = [], {"status": "refused", "reason": describe_error(error)}
        return seal_message(head, arrays)

    def _answer(self, envelope: Envelope) -> bytes:
        head, arrays, member = envelope.head, envelope.arrays, self._member
        kind, t, nonce = head["kind"], head["round"], head.get("session", b"")
        if kind in ("masked", "tally"):
            return self._make_vector(t, nonce, head["accepted"], arrays, trains=kind == "masked")
        steps = {"keys": member.keys, "shares": member.shares, "agree": member.agree, "count": member.count}
        step: Any = steps.get(kind, member.reveal)
        answer: bytes = step(t, nonce, *arrays)
        return answer

    def _make_vector(self, t: int, nonce: bytes, accepted: int, arrays: Sequence[bytes], *, trains: bool) -> bytes:
        message, inbox, *models = arrays[trains:]
        terms, site, agreed = read_terms(message), self.site, self._member.agreed
        check_terms(terms, site.client, self.sizes, self.figures, site.clients, accepted)
        check_models(terms, arrays[0] if trains else None, models)
        weights = terms.weights(terms.weighed(self._trainer.job, site.samples))
        check_summands(weights, terms.cohort, agreed.threshold, agreed.max_share)
        self._member.receive(t, nonce, inbox, terms, weights, is_noisy=self._trainer.private)
        counts: tuple[int, ...] = ANSWERED_COUNTS if self.sizes[0] else ABSENT_COUNTS
        counts = counts if has_counters(terms, self._trainer) else ()
        return self._member.masked(t, nonce, np.zeros(self.length, dtype=np.uint64), counts)


class RehearsedSite:
    """Site whose copies the rehearsal attacks.

    Args:
        site: the site's settings. Nothing in the site's folders is changed.
        folder: folder for keys and state of the copies.
    """

    def __init__(self, site: Site, folder: Path) -> None:
        self.client, self.clients, self.folder = site.client, site.clients, folder
        self._pairs: list[KeyPair] = [make_key_pair("signing") for _ in range(site.clients)]
        self._copies = 0
        changes: dict[str, Any] = {"memory": None, "approval": False}
        if site.secure is not None:
            changes["secure"] = site.secure.with_(keys=tuple(pair.public for pair in self._pairs), verify=False)
        self.site = site.with_(**changes)

    @cached_property
    def fed(self) -> Federation:
        """Samples of the site, read once in the same way as the site reads them.

        Raises:
            FedloomError: the samples cannot be read, or differ from the agreement.
        """
        return Trainer(self.site, SiteState(self.folder / "read", self.site.fingerprint, self.client)).fed

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of training, validation and test samples of the site.

        The stand-ins report the same numbers of samples.
        """
        return tuple(self.copy().sizes)

    def copy(self, fed: Federation | None = None, **settings: Any) -> Client:
        """Return a copy of the site with an empty state.

        Args:
            fed: samples of the copy. If None, the site's own samples are used.
            settings: settings that replace the settings in site.toml.
        """
        self._copies += 1
        state = self.folder / f"copy-{self._copies}"
        state.mkdir(mode=0o700)
        settings = {"state": state, "signing_key": self._key_file(state, self.client), **settings}
        return Client(self.site.with_(**settings), self.fed if fed is None else fed)

    def rogue(
        self, client: Client | None = None, sizes: Mapping[int, Sequence[int]] | None = None, **settings: Any
    ) -> RogueServer:
        """Return a dishonest server for a copy of the site and for stand-ins of the other sites.

        Args:
            client: the copy. If None, a new copy is used.
            sizes: numbers of samples of stand-ins, keyed by site number, if they differ from the site's own numbers.
            settings: see `copy`.
        """
        client = self.copy(**settings) if client is None else client
        sites: list[Any] = [client] * self.clients
        for c in range(self.clients) if client.site.secure is not None else ():
            if c != self.client:
                count, state = (sizes or {}).get(c, client.sizes), client.site.state / f"stand-in-{c}"
                memory = None if client.site.memory is None else client.site.memory / f"stand-in-{c}"
                site = client.site.with_(client=c, site=f"stand-in-{c}", state=state, memory=memory)
                key = read_signing_key(self._key_file(client.site.state, c))
                sites[c] = StandInSite(site, key, client.trainer, count, client.figures if count[0] else "")
        return RogueServer(sites, client.trainer)

    def make_later_rogue_server(self, number: int, memory: Path) -> RogueServer:
        """Return a server for one of several experiments on the same data.

        The site keeps a common record of these experiments.

        Args:
            number: number of the experiment, which is 0 for the experiment of the site's settings.
            memory: folder of the site's memory.
        """
        return self.rogue(memory=memory, **self._experiment(number))

    def _experiment(self, number: int) -> dict[str, Any]:
        """Write a copy of the experiment with a different digest, and return the settings changed accordingly."""
        if number == 0:
            return {}
        agreed, folder = self.site.experiment, self.folder / f"experiment-{number}"
        content = agreed.read_bytes() + f"\n# the same study, begun again: {number}\n".encode()
        if not folder.exists():
            folder.mkdir(mode=0o700)
            (folder / agreed.name).write_bytes(content)
            if (agreed.parent / CODE_FOLDER).is_dir():
                shutil.copytree(agreed.parent / CODE_FOLDER, folder / CODE_FOLDER)
            if (agreed.parent / INITIAL_MODEL_FILE).is_file():
                shutil.copy(agreed.parent / INITIAL_MODEL_FILE, folder)
        return {"experiment": folder / agreed.name, "fingerprint": sha256_hex(content)}

    @property
    def other_clients(self) -> list[int]:
        """Numbers of the other sites."""
        return [c for c in range(self.clients) if c != self.client]

    def _key_file(self, state: Path, client: int) -> Path:
        path = state / f"{SIGNING_KEY_FILE}-{client}"
        path.write_bytes(self._pairs[client].private)
        path.chmod(0o600)
        return path
