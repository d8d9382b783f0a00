"""Runs and sessions under secure aggregation, as tests play them."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message

from fedloom_sites.deploy.rehearsal.rogue import RogueServer, RogueSession
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure import shares
from fedloom_sites.deploy.secure.member import SessionMember
from fedloom_sites.deploy.secure.terms import SessionTerms
from fedloom_sites.deploy.settings import SecureSettings
from tests.deploy.scene import FIRST, Scene, scene, signing_key_of

SMALL: dict[str, Any] = {
    "partition": {"kind": "dirichlet", "clients": 5, "alpha": 0.5, "max_train_per_client": 24},
    "evaluate": {"every": 4},
}


def secured(
    folder: Path, method: Any, threshold: int = 3, *, agreed: dict[str, Any] | None = None, **changes: Any
) -> Scene:
    """A deployment under secure aggregation."""
    here = scene(folder, method, **{**SMALL, "rounds": 4, **changes})
    keys, names = (tuple(getattr(m, what) for m in here.server.sites) for what in ("signing_key", "site"))
    value = SecureSettings(threshold=threshold, keys=keys, names=names, **(agreed or {}))
    return here._replace(
        server=here.server.with_(secure=value, quorum=threshold), sites=[s.with_(secure=value) for s in here.sites]
    )


def kind_of(message: Message) -> str:
    return str(message.content["head"]["kind"])


def arrays_of(message: Message) -> list[bytes]:
    return [a.data for a in message.content["arrays"].values()]


def losing(lost: dict[tuple[int, str], Collection[int]]) -> Any:
    """A fault: replies of these clients in these (round, kind) never arrive."""

    def fault(node: int, message: Message, reply: Message) -> Message | None:
        where = (int(message.content["head"]["round"]), kind_of(message))
        return None if node - FIRST in lost.get(where, ()) else reply

    return fault


def terms_of(n: int) -> SessionTerms:
    """What n sites of `Steps` are asked."""
    return SessionTerms(
        round=1, trains=True, sizes=((9, 3, 3),) * n, cohort=range(n), accepted=(0,) * n, download="0" * 64
    )


TERMS = terms_of(5)
EQUAL = dict.fromkeys(range(100), (1.0,))
"""What each of so many sites counts in a sum."""


class Steps:
    """Sites in a session, with no training: what each answers to messages that the server makes up.

    Args:
        here: a deployment under secure aggregation.
        folder: of the sites' state.
    """

    def __init__(self, here: Scene, folder: str = "alone") -> None:
        self.here, self.nonce, self.n = here, os.urandom(16), len(here.sites)
        self.terms = terms_of(self.n)
        self.settings = [s.with_(state=s.state / folder) for s in here.sites]
        self.sites = [self.member(c) for c in range(self.n)]
        self.adverts = secure.write_adverts([secure.read_adverts(s.keys(1, self.nonce))[0] for s in self.sites])

    def member(self, c: int) -> SessionMember:
        """A site, as after a start of its process."""
        return SessionMember(self.settings[c], signing_key_of(c), self.settings[c].folder)

    def shared(self) -> dict[int, dict[int, bytes]]:
        """The sealed shares of all, by sender and receiver."""
        return {
            c: secure.split_parts(s.shares(1, self.nonce, self.adverts), shares.SEALED_SHARE_BYTES)
            for c, s in enumerate(self.sites)
        }

    def receive(self, c: int, senders: Collection[int], terms: SessionTerms | None = None) -> bytes:
        inbox = secure.join_parts({p: sent[c] for p, sent in self.shared().items() if p in senders and p != c})
        return self.sites[c].receive(1, self.nonce, inbox, terms or self.terms, {c: EQUAL[c] for c in range(self.n)})

    def masked(self, c: int, fill: int = 7) -> bytes:
        """The vector; its site's signature stands before it."""
        return self.sites[c].masked(1, self.nonce, np.full(3, fill, dtype=np.uint64))

    def session(self) -> secure.Session:
        agreed = self.here.sites[0].secure
        assert agreed is not None
        name = secure.session_name(agreed.digest(self.here.sites[0].fingerprint), 1, self.nonce)
        return secure.build_session(name, agreed.threshold, secure.read_adverts(self.adverts))

    def agreed(self, survivors: Collection[int], signers: Collection[int]) -> bytes:
        """What the server sends with the last step: the sites of a sum, with signatures of some of them."""
        text = secure.encode_statement(
            secure.session_binding(self.session(), self.terms.digest, range(self.n)), survivors
        )
        return secure.join_parts({c: signing_key_of(c).sign(text) if c in signers else bytes(64) for c in survivors})

    def reveal(self, c: int, survivors: Collection[int], signers: Collection[int] | None = None) -> bytes:
        message = self.agreed(survivors, survivors if signers is None else signers)
        return self.sites[c].reveal(1, self.nonce, message)


def sum_honestly(
    rogue: RogueServer,
    t: int,
    download: bytes | None,
    *models: bytes,
    clients: Collection[int] | None = None,
    **more: Any,
) -> RogueSession:
    """Ask for all steps as an honest server does, and return the session."""
    clients = range(len(rogue.sites)) if clients is None else clients
    more |= {} if download is not None else {"scored": t, "common": True}
    session, terms = rogue.begin(t, clients), rogue.terms(t, download, models, cohort=clients, **more)
    for c in clients:
        session.vector(c, terms, download, *models)
    for c in clients:
        session.open(c)
    return session
