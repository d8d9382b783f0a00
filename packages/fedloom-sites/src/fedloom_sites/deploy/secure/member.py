"""A site's side of secure aggregation, which masks the site's vectors.

A site keeps only the secrets of the latest session, on its own disk, in a folder that only its owner can read. The site
deletes the secrets when it answers the last step. If a message is repeated, the answer is the same. A different message
for the same step is rejected, because two vectors under the same mask reveal their difference. A damaged session file
ends only its own session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedloom.algorithms import upload_fields
from fedloom.engine import Setting
from fedloom.engine.privacy import find_accounted_noise
from fedloom.errors import Refused, WireError
from fedloom.rows.aggregators import PrivateMean
from fedloom.schedule import Stream
from fedloom_sites.deploy.noise import MIN_NOISE_STEPS, deployed_part
from fedloom_sites.deploy.protocol.envelope import Kind
from fedloom_sites.deploy.protocol.identity import read_verifying_key
from fedloom_sites.deploy.relay import encode_vector_statement
from fedloom_sites.deploy.secure import counters, shares
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure.opened import OpenedSums, read_checked, write_checked
from fedloom_sites.deploy.secure.protocol import MAX_SITES, SIGNATURE_BYTES, Integers, ProtocolBroken
from fedloom_sites.deploy.secure.stages import REVEALED_ENTRY, SessionProgress, Stage, read_progress
from fedloom_sites.deploy.secure.terms import SessionTerms, check_summands
from fedloom_sites.deploy.settings import SecureSettings, Site

COUNTERS_ENTRY = "digest of the counters"
"""Key of the digest of all masked counters of the sum, in a site's record of a session."""


def check_maskable(setting: Setting, *, verify: bool = False) -> None:
    """Raise an error if a run's server needs individual sites' uploads.

    Args:
        setting: the run.
        verify: True if every site opens the sums itself and replays the server's steps from them.

    Raises:
        ConfigError: a part of the run needs individual sites' uploads, or sites cannot replay it from the sums.
            The message names this part.
    """
    setting = setting.resolved()
    if verify and find_accounted_noise(setting.upload_transform, setting.aggregator) is not None:
        raise Refused(
            "with a delta, the sites send no scores, so the server sends the last models outside the sums that the "
            "sites verify",
            rule="verify-needs-scores",
            fix="omit the delta, or verify in the table secure (option --verify of init)",
        )
    name, fields = type(setting.method).__name__, upload_fields(type(setting.method))
    single = [field for field, kind in fields.items() if not kind.averaged]
    why = ""
    if single:
        why = f"{name} gives its server the rows of single clients (of {', '.join(single)})"
    elif setting.method.mixes:
        why = f"{name} mixes the kept rows of single clients into its downloads"
    elif setting.personalized_aggregation is not None:
        why = f"personalized_aggregation {setting.personalized_aggregation.kind!r} mixes the models of single clients"
    elif not isinstance(setting.aggregator, PrivateMean | None) and not setting.aggregator.linear:
        why = f"aggregator {type(setting.aggregator).__name__} compares single uploads"
    elif setting.aggregation_weights.probes:
        why = f"aggregation_weights {setting.aggregation_weights.kind!r} queries single clients"
    elif setting.sampler.probes or setting.sampler.learns:
        why = f"sampler {setting.sampler.kind!r} reads single clients"
    elif setting.sampler.repeats:
        why = (
            f"sampler {setting.sampler.kind!r} may draw a client twice, so that a sum would consist "
            "mostly of its upload"
        )
    elif isinstance(setting.aggregator, PrivateMean) and (
        not setting.aggregator.sigma or deployed_part(setting.aggregator, MAX_SITES).scale < MIN_NOISE_STEPS
    ):
        why = f"aggregator 'private-mean' with sigma {setting.aggregator.sigma:g} has too little noise to be shared"
    stored = {kind.keeps or kind.accumulates for kind in fields.values()}
    if len(stored) == 2 and setting.aggregation_weights.kind != "shares":
        raise Refused(
            f"{name} sends fields that are averaged and fields that are added up over rounds, and aggregation_weights "
            f"{setting.aggregation_weights.kind!r} weights the two sums differently. A difference can reveal a site",
            rule="masks-need-one-weighting",
            fix="omit {aggregation_weights} or secure aggregation",
        )
    if isinstance(setting.schedule, Stream):
        raise Refused(
            f"schedule {setting.schedule.kind!r} sends different models to the sites at different "
            "times, but secure aggregation needs the same download for all sites of a sum",
            rule="masks-need-rounds",
            fix="omit {schedule} or secure aggregation",
        )
    if why:
        raise Refused(
            f"{why}, but under secure aggregation the server receives only sums",
            rule="masks-need-sums",
            fix="choose a different one, or omit it",
        )


class SessionMember:
    """A site's participation in one session of secure aggregation.

    Args:
        site: settings of the site, with secure aggregation.
        key: the site's signing key.
        folder: folder with the site's state in this experiment.
    """

    def __init__(self, site: Site, key: Ed25519PrivateKey, folder: Path) -> None:
        assert site.secure is not None
        self._agreed, self._client, self._key = site.secure, site.client, key
        self._path = folder / "session" / "session.json"
        self._agreement = site.secure.digest(site.fingerprint)
        self._public = {c: read_verifying_key(line, f"client {c}") for c, line in enumerate(site.secure.keys)}
        agreed = site.secure
        self._opened = OpenedSums(
            folder, site.memory_folder, agreed.names, agreed.changes, agreed.steady_sites, site.client
        )

    def keys(self, round: int, nonce: bytes, link: bytes = b"") -> bytes:
        """Return this site's public keys for a new session, which replaces the previous session (step 1).

        ``link`` is the newest link of the chain of opened sums, if sites verify the sums.
        """
        name = secure.session_name(self._agreement, round, nonce, link)
        record = self._load()
        self._opened.begin(name, record.get("name"))
        if record.get("name") != name.hex():
            secrets = secure.new_secrets()
            advert = secure.write_adverts([secure.make_advert(name, self._client, secrets, self._key)])
            record = {"name": name.hex(), "secrets": [part.hex() for part in secrets], "advert": advert.hex()}
            record |= {"link": link.hex()} if link else {}
            self._save(record)
        read_progress(record).advance("keys")
        return self._read_bytes(record, "advert")

    def shares(self, round: int, nonce: bytes, message: bytes) -> bytes:
        """Return shares of this site's secrets, each sealed for another site that advertised keys (step 2)."""
        record = self._check_session(round, nonce, "shares")
        self._store_once(record, "adverts", message.hex())
        if "shares" not in record:
            session, secrets = self._agreed_by(record, message), _stored_secrets(record)
            parts = shares.make_shares(session, self._client, secrets, self._key)
            record["own"] = parts.pop(self._client).hex()
            record["shares"] = secure.join_parts(parts).hex()
            self._save(record)
        return self._read_bytes(record, "shares")

    def receive(
        self, round: int, nonce: bytes, message: bytes, terms: SessionTerms, weights: Mapping[int, Sequence[float]], *,
        is_noisy: bool = False,
    ) -> bytes:  # fmt: skip
        """Read the other sites' shares (first half of step 3), and return accusations.

        This site will share masks with the sites that sent these shares.

        Args:
            round: round of the run.
            nonce: the session's nonce.
            message: sealed shares that were sent by the other sites.
            terms: terms that describe the vector to mask.
            weights: weights of every site in its sums (see `SessionTerms.weights`).
            is_noisy: True if the sum contains noise that the privacy accounting covers, so that it may include
                different sites than the last sum.

        Returns:
            Accusations, keyed by accused site, if a share cannot be decrypted, otherwise empty bytes. An accusation
            ends the session at this site.
        """
        record = self._check_session(round, nonce, "masked")
        if "link" in record and not {terms.download, *terms.models} <= {"", record["link"]}:
            raise ProtocolBroken("the terms name another chain of opened sums than the keys of this session")
        self._store_once(record, "inbox", message.hex())
        self._store_once(record, "terms", terms.digest.hex())
        self._store_once(record, "sums", terms.sums)
        self._store_once(record, "asked", terms.model_digests)
        self._store_once(record, "question", terms.question.content if terms.question else "")
        self._store_once(record, "weights", {str(c): [*values] for c, values in weights.items()})
        self._store_once(record, "noisy", is_noisy)
        self._store_once(record, "bases", {str(c): t for c, t in terms.bases.items()})
        if "held" not in record and "accuses" not in record:
            session, secrets = self._agreed_by(record), _stored_secrets(record)
            sealed = _read_parts(message, shares.SEALED_SHARE_BYTES)
            if not set(sealed) <= set(session.adverts) - {self._client}:
                raise ProtocolBroken("shares came from sites that did not advertise keys")
            if len(sealed) + 1 < session.threshold:
                raise ProtocolBroken(f"{len(sealed) + 1} sites sent shares, but {session.threshold} are required")
            held, accuses = {self._client: bytes.fromhex(record["own"])}, dict[int, bytes]()
            for c, part in sealed.items():
                try:
                    held[c] = shares.open_share(session, self._client, secrets, c, part, self._public[c])
                except shares.UnreadableShare:
                    accuses[c] = shares.sign_accusation(session, self._client, c, self._key)
            if accuses:
                record["accuses"] = secure.join_parts(accuses).hex()
            else:
                record["held"] = {str(c): part.hex() for c, part in held.items()}
                self._check_change(record, held)
            self._save(record)
        return self._read_bytes(record, "accuses") if "accuses" in record else b""

    @property
    def answer(self) -> tuple[Integers, tuple[int, ...]] | None:
        """Integers and counters that `keep_answer` stored for this session, or None if nothing is stored."""
        stored = self._load().get("answer")
        if stored is None:
            return None
        return np.frombuffer(bytes.fromhex(stored["numbers"]), dtype="<u8"), tuple(stored["counters"])

    def keep_answer(self, numbers: Integers, counts: Sequence[int]) -> None:
        """Store scores or an answer, so that a repeated message gets the same reply even if rows have changed.

        Args:
            numbers: scores or answer, encoded as integers.
            counts: counters of the site.
        """
        stored = {"numbers": numbers.astype("<u8", copy=False).tobytes().hex(), "counters": [*counts]}
        self._save(self._load() | {"answer": stored})

    def masked(self, round: int, nonce: bytes, vector: Integers, counts: Sequence[int] = ()) -> bytes:
        """Return this site's signed consent to a sum of all sites, then its masked vector (second half of step 3).

        Args:
            round: round of the run.
            nonce: the session's nonce.
            vector: ``[D]``.
            counts: this site's counters (see `counters`), whose total the sites check before they open the sum of the
                vectors. Empty if the sum is opened without counters.
        """
        record = self._check_session(round, nonce, "masked")
        read_progress(record).require_stage(Stage.RECEIVED)
        session = self._agreed_by(record)
        self._store_once(record, "counters", [*counts])
        if counts and "tokens" not in record:
            flags = any(record["weights"][str(self._client)]) and not counts[0], bool(counts[2])
            record["tokens"] = counters.draw_counters(len(session.adverts), flags).tobytes().hex()
        self._store_once(record, "vector", hashlib.sha256(vector.data).hexdigest())
        self._save(record)
        peers, bound = [int(c) for c in record["held"]], self._bound(record)
        secrets = _stored_secrets(record)
        sent = secure.mask_vector(session, bound, self._client, secrets, peers, vector)
        signature = self._key.sign(secure.encode_statement(bound, peers))
        counted = b""
        if counts:
            tokens = np.frombuffer(self._read_bytes(record, "tokens"), dtype=np.uint64)
            counted = counters.write_counters(session, bound, self._client, secrets, self._key, peers, tokens)
        numbers = sent.astype("<u8", copy=False).tobytes()
        relayed = "link" in record and "uploads" in record["sums"]
        vector_signature = self._key.sign(encode_vector_statement(bound, numbers)) if relayed else b""
        return b"".join((signature, numbers, vector_signature, counted))

    def open(self, round: int, nonce: bytes, message: bytes) -> bytes:
        """Return the one-time keys for those of this site's messages that other sites say they cannot decrypt."""
        record = self._check_session(round, nonce, "open")
        session, secrets = self._agreed_by(record), _stored_secrets(record)
        for accuser, signature in _read_parts(message, SIGNATURE_BYTES).items():
            if accuser not in session.adverts or not shares.is_accused(
                session, accuser, self._client, signature, self._public[accuser]
            ):
                raise ProtocolBroken(f"the accusation against this site is not signed by client {accuser}")
        return secure.join_parts(
            {c: shares.one_time_key(session, secrets, c) for c in _read_parts(message, SIGNATURE_BYTES)}
        )

    def agree(self, round: int, nonce: bytes, message: bytes) -> bytes:
        """Return this site's signed consent to a sum over the sites whose vectors have arrived (step 4).

        This step is necessary only if some vectors are missing.
        """
        record = self._check_session(round, nonce, "agree")
        arrived = self._check_arrived(record, _read_parts(message, 0))
        self._check_change(record, arrived)
        self._store_once(record, "arrived", message.hex())
        self._save(record)
        return self._key.sign(secure.encode_statement(self._bound(record), arrived))

    def count(self, round: int, nonce: bytes, message: bytes, digest: bytes) -> bytes:
        """Return the shares that unmask the counters (in a session with counters, before step 5).

        The site first records which sites the sum covers. From then on, the site opens no other sum of this round, so
        that the counters cover exactly this list of sites. It also records the digest of all masked counters.
        Otherwise, once the counters are open, a colluding site could replace its own counters with ones that cancel the
        other sites' tokens.

        Args:
            round: round of the run.
            nonce: the session's nonce.
            message: signatures of the sites in the sum.
            digest: SHA-256 of the masked counters of all sites in the sum.
        """
        record = self._check_session(round, nonce, "count")
        if not record["counters"]:
            raise ProtocolBroken("the sum of this session is decrypted without counters")
        signed = _read_parts(message, SIGNATURE_BYTES)
        if "counted" not in record:
            held, arrived = _list_held_shares(record), self._enter_sum(record, signed)
            answer = secure.join_parts(shares.reveal_shares(held, arrived, of_counters=True))
            record |= {"counted": answer.hex(), "survivors": _encode_clients(signed), COUNTERS_ENTRY: digest.hex()}
            self._save(record)
        self._store_once(record, COUNTERS_ENTRY, digest.hex())
        self._store_once(record, "survivors", _encode_clients(signed))
        return self._read_bytes(record, "counted")

    def reveal(self, round: int, nonce: bytes, message: bytes, counted: bytes = b"", openers: bytes = b"") -> bytes:
        """Return shares of the seeds of sites whose vectors arrived, and of the other sites' masking keys (step 5).

        Args:
            round: round of the run.
            nonce: the session's nonce.
            message: signatures of the sites in the sum.
            counted: masked counters of all sites in the sum. Empty if the session has no counters.
            openers: shares that unmask the counters, keyed by the site that sent them.

        Raises:
            ProtocolBroken: opening the sum is not allowed. In a session with counters, this includes a sum with too few
                answers from samples.
        """
        record = self._check_session(round, nonce, "unmask")
        signed = _read_parts(message, SIGNATURE_BYTES)
        survivors = _encode_clients(signed)
        if REVEALED_ENTRY not in record:
            held = _list_held_shares(record)
            if record["counters"]:
                self._check_counters(record, [*signed], counted, openers)
            arrived = self._enter_sum(record, signed)
            answer = secure.join_parts(shares.reveal_shares(held, arrived)).hex()
            record = {key: value for key, value in record.items() if key in ("name", "link")}
            record |= {REVEALED_ENTRY: answer, "survivors": survivors}  # all secrets are gone
            self._save(record)
        self._store_once(record, "survivors", survivors)
        return self._read_bytes(record, REVEALED_ENTRY)

    # ---------------------------------------------------------------------------------------------------- inside

    def _enter_sum(self, record: dict[str, Any], signed: Mapping[int, bytes]) -> list[int]:
        """Record that a sum is opened, and return the sites in it.

        `signed` lists every site in the sum, each with its signature, or with zeros if the site has not signed.

        Raises:
            ProtocolBroken: opening the sum is not allowed.
        """
        arrived = self._check_arrived(record, signed)
        if not {record.get("arrived"), record.get("survivors")} <= {None, _encode_clients(signed)}:
            raise ProtocolBroken("this site has signed a sum over different sites")
        secure.check_statement(self._agreed_by(record), self._bound(record), signed, self._public)
        bases = {str(c): record["bases"][str(c)] for c in arrived}
        self._opened.reveal(
            record["name"], record["sums"], record["asked"], bases, self._agreed.threshold, record["question"],
            weights=_weights_by_sum(record), counts=record["counters"],
        )  # fmt: skip
        return arrived

    def _check_change(self, record: dict[str, Any], clients: Collection[int]) -> None:
        """Raise an error if a sum differs from the last sum in a site that has already left or returned too often.

        Raises:
            ProtocolBroken: a site has left or returned too often. The message contains the site's name.
        """
        weights = _weights_by_sum(record)
        if weights is not None:
            bases = {str(c): record["bases"][str(c)] for c in clients}
            self._opened.check_change(record["sums"], record["asked"], bases, record["question"], weights)

    def _check_counters(self, record: dict[str, Any], arrived: Sequence[int], counted: bytes, openers: bytes) -> None:
        """Raise an error if a sum's counters are missing or show that too few sites answered from their samples.

        Raises:
            ProtocolBroken: counters are missing or too small. The message states the reason.
        """
        self._store_once(record, COUNTERS_ENTRY, hashlib.sha256(counted).hexdigest())
        session, bound, peers = self._agreed_by(record), self._bound(record), [int(c) for c in record["held"]]
        sent = _read_parts(counted, counters.counters_bytes(len(session.adverts)))
        if sent.keys() != {*arrived}:
            raise ProtocolBroken(
                f"expected counters of the {len(arrived)} sites of the sum, got counters of {len(sent)}"
            )
        answers = {
            c: _read_parts(part, secure.KEY_BYTES)
            for c, part in _read_parts(openers, len(peers) * (4 + secure.KEY_BYTES)).items()
        }
        if any({*one} != {*peers} or c not in peers for c, one in answers.items()):
            raise ProtocolBroken("the shares of the counter masks do not belong to the sites of the session")
        sites = sum(any(record["weights"][str(c)]) for c in arrived)
        counts, _ = counters.open_counters(session, bound, peers, sent, answers, self._public, sites)
        counters.check_enough(counts, self._agreed.threshold)

    @property
    def counter_count(self) -> int:
        """Number of the site's counters in this session."""
        return len(self._load().get("tokens", "")) // 16

    @property
    def agreed(self) -> SecureSettings:
        """Settings of secure aggregation that all sites have agreed on."""
        return self._agreed

    @property
    def stays_neutral(self) -> bool:
        """True if the site's uploads stay neutral from now on (see `OpenedSums.stays_neutral`)."""
        return self._opened.stays_neutral()

    def _check_arrived(self, record: dict[str, Any], clients: Collection[int]) -> list[int]:
        """Check that a sum may be opened, and return its sites.

        Raises:
            ProtocolBroken: opening the sum is not allowed.
        """
        if self._client not in clients or not {*clients} <= {int(c) for c in record["held"]}:
            raise ProtocolBroken(
                "the list of sites whose vector arrived contains a site that sent no shares, or does "
                "not contain this site"
            )
        if len(clients) < self._agreed.threshold:
            raise ProtocolBroken(
                f"the sum contains {len(clients)} sites, but must contain at least {self._agreed.threshold}"
            )
        weights = {int(c): values for c, values in record["weights"].items()}
        check_summands(weights, clients, self._agreed.threshold, self._agreed.max_share)
        return [*clients]

    def _bound(self, record: dict[str, Any]) -> bytes:
        peers = [int(c) for c in record["held"]]
        return secure.session_binding(self._agreed_by(record), bytes.fromhex(record["terms"]), peers)

    def _check_session(self, round: int, nonce: bytes, kind: Kind) -> dict[str, Any]:
        """Check that the session's stage permits an answer to this kind of message, and return the session's record."""
        record = self._load()
        link = bytes.fromhex(record.get("link", ""))
        same = record.get("name") == secure.session_name(self._agreement, round, nonce, link).hex()
        (read_progress(record) if same else SessionProgress()).advance(kind)
        return record

    def _store_once(self, record: dict[str, Any], name: str, value: object) -> None:
        """Store a value when it is first used, and raise an error if a later value differs.

        Within a session, a stored value never changes.
        """
        if record.setdefault(name, value) != value:
            raise ProtocolBroken(f"the {name} of a session cannot change")

    def _agreed_by(self, record: dict[str, Any], message: bytes | None = None) -> secure.Session:
        """Return the session of the sites that advertised keys, after checking newly arrived advertisements."""
        if message is None:
            return _rebuild_session(bytes.fromhex(record["name"]), self._agreed.threshold, record["adverts"])
        name, adverts = bytes.fromhex(record["name"]), _stored_adverts(message)
        try:
            secure.check_adverts(name, adverts, self._public)
        except ProtocolBroken as error:
            if "link" not in record:
                raise
            raise ProtocolBroken(
                f"{error}. The site has opened other sums than this site, because the server or a site has shown them "
                "different vectors, or the server has changed the keys"
            ) from None
        if bytes.fromhex(record["advert"]) not in [secure.write_adverts([a]) for a in adverts]:
            raise ProtocolBroken("this site's own keys are missing, or are not the keys that the site advertised")
        if len(adverts) < self._agreed.threshold:
            raise ProtocolBroken(f"{len(adverts)} sites advertised keys, but {self._agreed.threshold} are required")
        return secure.build_session(name, self._agreed.threshold, adverts)

    @staticmethod
    def _read_bytes(record: dict[str, Any], name: str) -> bytes:
        return bytes.fromhex(record[name])

    def _load(self) -> dict[str, Any]:
        return read_checked(self._path) or {}

    def _save(self, record: dict[str, Any]) -> None:
        write_checked(self._path, record)


@lru_cache(maxsize=1)
def _rebuild_session(name: bytes, threshold: int, adverts: str) -> secure.Session:
    """Rebuild a session from the advertisements that were stored."""
    return secure.build_session(name, threshold, _stored_adverts(bytes.fromhex(adverts)))


def _encode_clients(clients: Collection[int]) -> str:
    """Encode a list of sites as hexadecimal digits."""
    return secure.join_parts(dict.fromkeys(clients, b"")).hex()


def _weights_by_sum(record: dict[str, Any]) -> dict[str, dict[str, list[float]]] | None:
    """Return every site's weights in each sum of a session, or None if the sum contains noise.

    An upload is multiplied by its weight before it is sent. Every other sum adds the sites' numbers without weights.
    """
    if record["noisy"]:
        return None
    weights: dict[str, list[float]] = record["weights"]
    alike = {c: [float(any(values))] for c, values in weights.items()}
    return {what: weights if what == "uploads" else alike for what in record["sums"]}


def _list_held_shares(record: dict[str, Any]) -> dict[int, bytes]:
    """Return the shares of the sites' secrets that this site holds, keyed by the secret's owner."""
    return {int(c): bytes.fromhex(part) for c, part in record["held"].items()}


def _stored_secrets(record: dict[str, Any]) -> secure.SessionSecrets:
    return secure.SessionSecrets(*map(bytes.fromhex, record["secrets"]))


def _read_parts(message: bytes, width: int) -> dict[int, bytes]:
    try:
        return secure.split_parts(message, width)
    except WireError as error:
        raise ProtocolBroken(str(error)) from None


def _stored_adverts(message: bytes) -> list[secure.KeyAdvert]:
    try:
        return secure.read_adverts(message)
    except WireError as error:
        raise ProtocolBroken(str(error)) from None
