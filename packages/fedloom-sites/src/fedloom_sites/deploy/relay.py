"""Relayed sums: all messages of a round, so that every site can open the sum of the uploads itself, as exact integers.

If the agreement sets ``verify``, a round's sum extends a chain. The first link is the digest of everything that
determines the initial model, such as the seed. Each subsequent link is the digest of the previous link and the opened
sum. A link therefore determines the state of the server, except for rounding errors. The terms of a session contain the
link instead of digests of models, and the session's name contains it, too: every site signs the link, and sites with
different links have no common session.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from safetensors.torch import load_file

from fedloom.engine import Setting
from fedloom.errors import CheckpointError, LayoutError, WireError
from fedloom.storage import make_folder
from fedloom.storage.checkpoint import check_file_digest, save_tensors
from fedloom.storage.files import delete_files
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure import shares
from fedloom_sites.deploy.secure.opened import read_checked, write_checked
from fedloom_sites.deploy.secure.protocol import KEY_BYTES, SIGNATURE_BYTES, Integers, ProtocolBroken, Session
from fedloom_sites.deploy.secure.terms import SessionTerms, read_terms
from fedloom_sites.deploy.settings import SecureSettings, Server, SharedSettings

RELAYED_FOLDER = "relayed"
LINKS_FILE = "links.json"
RECORD_PARTS = ("terms", "adverts", "signed", "vectors", "shares")
"""Arrays of a relayed sum: the terms, the advertisements, the survivors with their consent, every survivor's signature
and masked vector, and the shares that unmask the sum."""


class RelayedSum(NamedTuple):
    """Sum of a round that a site opened itself.

    Attributes:
        terms: terms of the round.
        survivors: sites in the sum.
        total: sum of their vectors, without masks.
    """

    terms: SessionTerms
    survivors: list[int]
    total: Integers


def compute_first_link(agreed: SharedSettings, setting: Setting) -> bytes:
    """Return the first link of the chain, which is the same for all experiments with the same initial model.

    The digest of the model's numbers is not used, because they may differ between processors.
    """
    model = setting.model.model_dump(mode="json", exclude={"init_from"})
    seed = setting.seed if agreed.start is None else None  # an agreed initial model is the same for all seeds
    facts = [model, seed, str(setting.engine.dtype), agreed.samples.shape, agreed.samples.outputs, agreed.start]
    return hashlib.sha256(b"fedloom first model\n" + json.dumps(facts, sort_keys=True).encode()).digest()


def compute_next_link(before: bytes, opened: RelayedSum, length: int) -> bytes:
    """Return the link after a round.

    Args:
        before: link before the round.
        opened: the round's sum.
        length: length of the upload at the start of a vector. Scores in the same vector do not change a model.
    """
    terms, numbers = opened.terms, opened.total[:length].astype("<u8", copy=False)
    facts = json.dumps([terms.round, terms.sizes, terms.cohort, sorted(opened.survivors)]).encode()
    return hashlib.sha256(b"fedloom opened sum\n" + before + facts + b"\n" + numbers.tobytes()).digest()


def encode_vector_statement(bound: bytes, vector: bytes) -> bytes:
    """Encode the statement that a site signs for its masked vector.

    The argument `bound` is from `fedloom_sites.deploy.secure.protocol.session_binding`.
    """
    return b"fedloom vector\n" + bound + hashlib.sha256(vector).digest()


def open_relayed(
    agreed: SecureSettings, agreement: bytes, public: Mapping[int, Ed25519PublicKey], round: int, nonce: bytes,
    before: bytes, parts: Sequence[bytes],
) -> RelayedSum:  # fmt: skip
    """Check all messages of a round, and return the sum that they open.

    Args:
        agreed: settings of secure aggregation.
        agreement: digest of the agreement (see `SecureSettings.digest`).
        public: verification keys of all sites.
        round: round of the sum.
        nonce: nonce of the session.
        before: newest link of the site's chain.
        parts: arrays of the record, in the order of `RECORD_PARTS`.

    Raises:
        ProtocolBroken: a signature, a vector, a share or the list of sites is wrong. The message states which.
        WireError: the arrays cannot be read.
    """
    if len(parts) != len(RECORD_PARTS):
        raise WireError(f"expected {len(RECORD_PARTS)} arrays, got {len(parts)}")
    terms, adverts = read_terms(parts[0]), secure.read_adverts(parts[1])
    if (terms.round, terms.trains) != (round, True):
        raise ProtocolBroken(
            f"the relayed sum belongs to round {terms.round}, but the message belongs to round {round}"
        )
    if terms.download != before.hex():
        raise ProtocolBroken(
            f"the relayed sum of round {round} does not continue the sums opened by this site. The server left out, "
            "replaced or repeated a round, or this site lost its folder. Restore the site's folder from "
            "a copy, or continue without this site"
        )
    name = secure.session_name(agreement, round, nonce, before)
    secure.check_adverts(name, adverts, public)
    session = secure.build_session(name, agreed.threshold, adverts)
    signed, answers = secure.split_parts(parts[2], SIGNATURE_BYTES), _read_answers(parts[4], session)
    peers = sorted(next(iter(answers.values())))
    if not signed.keys() <= {*peers} <= session.adverts.keys():
        raise ProtocolBroken("the relayed sum contains sites that did not share masks")
    bound = secure.session_binding(session, terms.digest, peers)
    secure.check_statement(session, bound, signed, public)
    total = _add_vectors(parts[3], bound, [*signed], public)
    secrets, wrong = shares.restore_secrets(session, peers, signed, answers)
    if wrong:
        raise ProtocolBroken(f"the relayed shares of the clients {sorted(wrong)} do not belong to this sum")
    return RelayedSum(terms, [*signed], secure.unmask_sum(session, bound, [*signed], total, secrets))


def _read_answers(message: bytes, session: Session) -> dict[int, dict[int, bytes]]:
    """Return the shares from each site, keyed by the owner of the secret.

    Raises:
        ProtocolBroken: the sites have sent shares of different secrets.
    """
    count = int.from_bytes(message[:2], "little")
    answers = {
        c: secure.split_parts(one, KEY_BYTES)
        for c, one in secure.split_parts(message[2:], count * (4 + KEY_BYTES)).items()
    }
    owners = {tuple(one) for one in answers.values()}
    if len(owners) != 1 or not answers.keys() <= session.adverts.keys():
        raise ProtocolBroken("the relayed shares belong to different sums")
    return answers


def _add_vectors(
    message: bytes, bound: bytes, survivors: Sequence[int], public: Mapping[int, Ed25519PublicKey]
) -> Integers:
    """Check every survivor's signature on its masked vector, and return the sum of the vectors.

    Raises:
        ProtocolBroken: a vector is missing, or its site has not signed it.
    """
    width = len(message) // max(1, len(survivors)) - 4
    vectors = secure.split_parts(message, width) if width > SIGNATURE_BYTES and not width % 8 else {}
    if [*vectors] != [*survivors]:
        raise ProtocolBroken("the relayed vectors do not belong to the sites that have consented to the sum")
    for c, part in vectors.items():
        try:
            public[c].verify(part[:SIGNATURE_BYTES], encode_vector_statement(bound, part[SIGNATURE_BYTES:]))
        except InvalidSignature:
            raise ProtocolBroken(f"the relayed vector of client {c} is not the vector that the client signed") from None
    numbers = [np.frombuffer(part, dtype="<u8", offset=SIGNATURE_BYTES) for part in vectors.values()]
    total: Integers = np.sum(numbers, axis=0, dtype=np.uint64)
    return total


class Relays:
    """Records of rounds that the server relays to the sites, and the chain of the opened sums, on the server's disk.

    A record is kept until every site has opened the sum. The newest record is always kept.

    Args:
        settings: settings of the server.
        setting: the run.
        length: length of an upload.
    """

    def __init__(self, settings: Server, setting: Setting, length: int) -> None:
        self._folder, self._length = settings.checkpoints / RELAYED_FOLDER, length
        self._first = compute_first_link(settings, setting)
        self._members, self._holders = len(settings.sites), dict[int, set[int]]()
        links = (read_checked(self._folder / LINKS_FILE) or {"links": {}})["links"]
        self._links = {int(t): bytes.fromhex(link) for t, link in links.items()}

    def find_link(self, t: int) -> bytes:
        """Return the link after the newest summed round up to round ``t``."""
        newest = max((r for r in self._links if r <= t), default=0)
        return self._links.get(newest, self._first)

    def keep_vectors(
        self, t: int, nonce: bytes, terms: SessionTerms, adverts: bytes, signed: Mapping[int, bytes],
        vectors: Mapping[int, bytes],
    ) -> None:  # fmt: skip
        """Store the record of a sum before its shares are requested."""
        make_folder(self._folder)
        delete_files(*(p for p in self._folder.glob("*.vectors") if not p.with_suffix(".shares").exists()))
        listed = secure.join_parts({c: signed.get(c, bytes(SIGNATURE_BYTES)) for c in vectors})
        parts = (nonce, terms.encode(), adverts, listed, secure.join_parts(vectors))
        self._save(t, "vectors", dict(zip(("nonce", *RECORD_PARTS[:-1]), parts, strict=True)))

    def complete(self, t: int, answers: Mapping[int, Mapping[int, bytes]], survivors: Sequence[int],
                 total: Integers) -> None:  # fmt: skip
        """Store the shares of an opened sum, which completes its record, and the link after its round."""
        count = len(next(iter(answers.values())))
        message = secure.join_parts({c: secure.join_parts(one) for c, one in answers.items()})
        self._save(t, "shares", {"shares": count.to_bytes(2, "little") + message})
        opened = RelayedSum(read_terms(self._load(t, "vectors")["terms"]), [*survivors], total)
        self._links = {r: link for r, link in self._links.items() if r < t}
        self._links[t] = compute_next_link(self.find_link(t), opened, self._length)
        self._holders.pop(t, None)
        write_checked(self._folder / LINKS_FILE, {"links": {str(r): link.hex() for r, link in self._links.items()}})

    def find_missing(self, t: int, clients: Collection[int]) -> dict[int, list[int]]:
        """Return the sites that lack a record, keyed by each stored round up to round ``t``, in ascending order."""
        stored = [r for r in sorted(self._links) if r <= t and self._path(r, "shares").exists()]
        return {r: lacking for r in stored if (lacking := [c for c in clients if c not in self._holders.get(r, ())])}

    def read(self, t: int) -> tuple[bytes, list[bytes]]:
        """Return the nonce and the arrays of a round's record.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        parts = self._load(t, "vectors") | self._load(t, "shares")
        return parts["nonce"], [parts[name] for name in RECORD_PARTS]

    def acknowledge(self, t: int, client: int, link: bytes) -> bool:
        """Record that a site opened a sum, and return False if it opened a different sum.

        Records of sums that all sites opened are deleted.
        """
        if link != self._links[t]:
            return False
        self._holders.setdefault(t, set()).add(client)
        done = [r for r, holders in self._holders.items() if len(holders) == self._members and r < max(self._links)]
        delete_files(*(self._path(r, kind) for r in done for kind in ("shares", "vectors")))
        return True

    def _path(self, t: int, kind: str) -> Path:
        return self._folder / f"round-{t:06d}.{kind}"

    def _save(self, t: int, kind: str, parts: Mapping[str, bytes]) -> None:
        tensors = {name: torch.frombuffer(bytearray(part), dtype=torch.uint8) for name, part in parts.items()}
        save_tensors(self._path(t, kind), tensors, {"round": str(t)})

    def _load(self, t: int, kind: str) -> dict[str, bytes]:
        path = self._path(t, kind)
        try:
            check_file_digest(path)
            return {name: part.numpy().tobytes() for name, part in load_file(path).items()}
        except (OSError, LayoutError) as error:
            raise CheckpointError(f"{path} cannot be read, so the sites cannot verify round {t}: {error}") from None
