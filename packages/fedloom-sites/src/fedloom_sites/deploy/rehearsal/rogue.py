"""Dishonest server, which sends arbitrary requests to the sites and keeps all answers.

The attacks are in the other modules.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedloom_sites.deploy.protocol.envelope import (
    COMMON_FIELDS,
    REQUEST_FIELDS,
    Kind,
    common_head,
    digest_arrays,
    seal_message,
)
from fedloom_sites.deploy.protocol.identity import read_verifying_key
from fedloom_sites.deploy.secure import counters, shares
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure.protocol import Integers
from fedloom_sites.deploy.secure.terms import SessionTerms
from fedloom_sites.deploy.secure.vectors import UploadVector
from fedloom_sites.deploy.settings import Site
from fedloom_sites.deploy.site.trainer import Trainer

BLANK_VALUES: dict[type, Any] = {int: 0, float: 0.0, bool: False, bytes: b"", str: "", list: []}
"""Placeholder for each type of field in a head."""


class AskedSite(Protocol):
    """A site as the server sees it: facts that are public, and replies."""

    site: Site

    @property
    def sizes(self) -> Sequence[int]:
        """Numbers of training, validation and test samples."""
        ...

    @property
    def figures(self) -> str:
        """The metrics that the site's samples define."""
        ...

    def reply(self, content: RecordDict) -> RecordDict:
        """Return the reply to the content of a message."""
        ...


class RogueServer:
    """A dishonest server and its sites.

    Args:
        sites: sites in the order of their numbers.
        trainer: a site's trainer, which provides the formats of messages.

    Attributes:
        sizes: numbers of samples of each site, as claimed by the server.
        refused: messages of all refusals so far.
    """

    def __init__(self, sites: Sequence[AskedSite], trainer: Trainer) -> None:
        self.sites, self.trainer = [*sites], trainer
        self.sizes = tuple(tuple(site.sizes) for site in sites)
        self.refused: list[str] = []

    def ask(self, c: int, kind: Kind, *arrays: bytes, **fields: Any) -> bytes | None:
        """Return the first array of a site's answer, or None if the site refuses."""
        reply_head, data = self.exchange(c, kind, *arrays, **fields)
        if reply_head["status"] != "ok":
            self.refused.append(str(reply_head["reason"]))
            return None
        return data[0] if data else b""

    def exchange(self, c: int, kind: str, *arrays: bytes, **fields: Any) -> tuple[dict[str, Any], list[bytes]]:
        """Send a message with arbitrary fields, and return the head and the arrays of the reply."""
        head = {name: BLANK_VALUES[type_] for name, type_ in {**COMMON_FIELDS, **REQUEST_FIELDS.get(kind, {})}.items()}
        head |= common_head(self.sites[c].site.fingerprint, kind, 0, c, b"", digest_arrays(arrays)) | fields
        reply = self.sites[c].reply(seal_message(head, arrays))
        reply_head, data = reply["head"], reply["arrays"]
        assert isinstance(reply_head, ConfigRecord)
        assert isinstance(data, ArrayRecord)
        return dict(reply_head), [array.data for array in data.values()]

    def download(self, change: float = 0.0) -> bytes:
        """Return the initial model, with ``change`` added to each coordinate, as a download."""
        down, _ = self.first_download()
        return self.write(down[0] + change * torch.ones_like(down[0]))

    def first_download(self) -> tuple[Any, Any]:
        """Return the first download that a client receives in the run, and the server's initial state."""
        job, server = self.trainer.job, self.trainer.node.server
        return job.down(server, 1, self.trainer.ids), server

    def write(self, row: Tensor) -> bytes:
        """Return a download with a given row in place of the first field."""
        down, server = self.first_download()
        return self.trainer.forms.write_down(type(down)(row.reshape(down[0].shape).to(down[0]), *down[1:]), server)

    def model(self, change: float = 0.0) -> bytes:
        """Return the global model, multiplied by 1 plus ``change``, as a model to be scored."""
        job, server = self.trainer.job, self.trainer.node.server
        model = job.algorithm.global_model(server)
        assert model is not None
        return self.trainer.forms.write_model(model * (1 + change))

    def terms(self, t: int, download: bytes | None = None, models: Iterable[bytes] = (), **more: Any) -> SessionTerms:
        """Return the terms of a session, which are true except for the given fields."""
        everyone = range(len(self.sites))
        facts = {"sizes": self.sizes, "cohort": everyone, "round": t, "trains": download is not None}
        facts["accepted"] = more.get("accepted", (0,) * len(more.get("cohort", everyone)))
        facts["download"] = "" if download is None else hashlib.sha256(download).hexdigest()
        facts["models"] = tuple(hashlib.sha256(m).hexdigest() for m in models)
        if (more.get("scored", -1) >= 0 or more.get("question") is not None) and "figures" not in more:
            facts["figures"] = tuple(s.figures for s in self.sites)
        return SessionTerms(**facts | more)

    def begin(self, t: int, clients: Collection[int] | None = None) -> RogueSession:
        """Ask some or all sites for the first two steps of a session, and return the session."""
        return RogueSession(self, t, range(len(self.sites)) if clients is None else clients)


class RogueSession:
    """A session of secure aggregation that a dishonest server runs, after its first two steps.

    Attributes:
        vectors: masked vectors from the sites, each preceded by a signature.
        shown: shares that open the counters, keyed by site.
        told: shares that a site reveals to open the sum, keyed by site.
    """

    def __init__(self, rogue: RogueServer, t: int, clients: Collection[int]) -> None:
        self.rogue, self.t, self.nonce = rogue, t, os.urandom(16)
        here = rogue.sites[min(clients)].site
        assert here.secure is not None
        adverts = [self.ask(c, "keys") for c in clients]
        self.adverts = secure.write_adverts([secure.read_adverts(a)[0] for a in adverts if a is not None])
        name = secure.session_name(here.secure.digest(here.fingerprint), t, self.nonce)
        self.session = secure.build_session(name, here.secure.threshold, secure.read_adverts(self.adverts))
        sealed = {c: self.ask(c, "shares", self.adverts) for c in clients}
        self.sealed = {c: secure.split_parts(m, shares.SEALED_SHARE_BYTES) for c, m in sealed.items() if m is not None}
        self.vectors = dict[int, bytes]()
        self.shown, self.has_counters = dict[int, bytes](), False
        self._counted = set[tuple[int, bytes]]()
        self.told = dict[int, dict[int, bytes]]()

    def ask(self, c: int, kind: Kind, *arrays: bytes, **fields: Any) -> bytes | None:
        """Ask a site for one step of the session, and return its answer or None (see `RogueServer.ask`)."""
        return self.rogue.ask(c, kind, *arrays, session=self.nonce, round=self.t, **fields)

    def vector(
        self,
        c: int,
        terms: SessionTerms,
        download: bytes | None,
        *models: bytes,
        peers: Collection[int] | None = None,
        accepted: int | None = None,
    ) -> None:
        """Ask a site for its masked vector."""
        inbox = {p: s[c] for p, s in self.sealed.items() if p != c and c in s and p in (peers or self.sealed)}
        arrays = [*([] if download is None else [download]), terms.encode(), secure.join_parts(inbox), *models]
        base = terms.bases.get(c, 0) if accepted is None else accepted
        sent_back = self.ask(c, "tally" if download is None else "masked", *arrays, accepted=base)
        if sent_back is not None:
            self.vectors[c] = sent_back
            self.has_counters = has_counters(terms, self.rogue.trainer)

    def count(self, c: int, survivors: Collection[int] | None = None) -> None:
        """Ask a site for the shares that open the counters of those sites whose vectors arrived."""
        listed = [*(survivors or self.vectors)]
        digest = hashlib.sha256(self.masked_counters(listed)).digest()
        sent_back = self.ask(c, "count", secure.join_parts({s: self.vectors[s][:64] for s in listed}), digest)
        if sent_back is not None:
            self.shown[c] = sent_back

    @property
    def counters_bytes(self) -> int:
        """Length in bytes of the counters at the end of a vector. Zero if the session has no counters."""
        return counters.counters_bytes(len(self.session.adverts)) if self.has_counters else 0

    def masked_counters(self, clients: Collection[int]) -> bytes:
        """Return the masked counters of some sites, as the sites in a sum read them."""
        return secure.join_parts({c: self.vectors[c][-self.counters_bytes :] for c in clients})

    def counts(self, terms: SessionTerms) -> counters.AnswerCounts:
        """Open the counters, and return the numbers of sites that they show."""
        answers = {c: secure.split_parts(one, secure.KEY_BYTES) for c, one in self.shown.items()}
        agreed = self.rogue.sites[min(self.vectors)].site.secure
        assert agreed is not None
        public = {c: read_verifying_key(agreed.keys[c], f"client {c}") for c in self.vectors}
        messages = secure.split_parts(self.masked_counters(self.vectors), self.counters_bytes)
        sites = sum(bool(terms.sizes[c][0]) for c in self.vectors)
        return counters.open_counters(
            self.session, self.bound(terms), [*self.sealed], messages, answers, public, sites
        )[0]  # fmt: skip

    def bound(self, terms: SessionTerms) -> bytes:
        """Return the digest that determines the masks of the session."""
        return secure.session_binding(self.session, terms.digest, [*self.sealed])

    def open(self, c: int, survivors: Collection[int] | None = None) -> None:
        """Ask a site for the shares that open the sum of the sites whose vectors arrived.

        The shares of the counters are requested first.

        If there are too few shares of the counters, the site is not asked for shares of the sum, because no site opens
        a sum without the counters.
        """
        listed = [*(survivors or self.vectors)]
        signed = secure.join_parts({s: self.vectors[s][:64] for s in listed})
        if self.has_counters:
            for s in listed:
                if (s, signed) not in self._counted:
                    self._counted.add((s, signed))
                    self.count(s, survivors)
            if len(self.shown) < self.session.threshold:
                return
            sent_back = self.ask(c, "unmask", signed, self.masked_counters(listed), secure.join_parts(self.shown))
        else:
            sent_back = self.ask(c, "unmask", signed)
        if sent_back is not None:
            self.told[c] = secure.split_parts(sent_back, secure.KEY_BYTES)

    @property
    def is_open(self) -> bool:
        """True if enough shares have arrived to remove the masks."""
        return len(self.told) >= self.session.threshold

    def total(self, terms: SessionTerms) -> Integers:
        """Return the sum of the vectors without their masks."""
        bound, end = self.bound(terms), -self.counters_bytes or None
        secrets, wrong = shares.restore_secrets(self.session, [*self.sealed], [*self.vectors], self.told)
        assert not wrong
        sent = [np.frombuffer(v[64:end], dtype="<u8") for v in self.vectors.values()]
        return secure.unmask_sum(self.session, bound, [*self.vectors], np.sum(sent, axis=0, dtype=np.uint64), secrets)


def has_counters(terms: SessionTerms, trainer: Trainer) -> bool:
    """Return True if the vectors of a session contain counters."""
    if terms.question is not None or (terms.scored >= 0 and trainer.scoring == "masked"):
        return True
    return terms.trains and UploadVector(trainer.job, trainer.forms.idle).is_counted
