"""Secure aggregation: the server learns the sum of what the sites send, and no summand.

The protocol of Bonawitz et al. (CCS 2017) on the complete graph, with up to n - threshold sites that drop out, against
a server that does as it likes and colludes with c sites, for 2 T > n + c (their Theorem 6.5). A session, one for each
attempt at a sum, has four steps, and a fifth where a site drops out on the way.

1. Every site makes two X25519 key pairs and a seed, and signs both public keys and a commitment to the seed, with the
   session, with its signing key.
2. Every site cuts its seed and its masking key into Shamir shares, any ``threshold`` of which give them back, and
   encrypts to every other site its share of each. It signs each of these, so no other site can have made a bad one.
3. Every site adds a mask from its seed, and for every other site one from their common key, which the two add with
   opposite signs. Numbers are integers modulo 2^64 (`integers`), so a masked vector is uniform whatever is in it. The
   masks depend on all that the sites were asked and on who shared with whom (`bound_to`), so they cancel between sites
   that got the same only. With its vector a site signs that the sum may be of all that shared (`statement`).
4. Where a vector is missing, the sites sign the list of those that arrived. Each signs one such list.
5. The sites say their shares of the seeds of those whose vector arrived, and of the masking keys of those whose did
   not, never both of one site, and only for a list that ``threshold`` sites have signed. With them the server takes
   the masks off the sum. Both secrets have a commitment, so wrong shares are found
   (`fedloom_sites.deploy.secure.shares`).

Two lists can be opened only if each has ``threshold`` sites behind it. A site that has signed a list of step 4 opens no
other, so both together need T - c honest sites twice: 2 T <= n + c.

Masks are ChaCha20 streams under 256-bit keys from HKDF-SHA256. Shares travel under AES-256-GCM with a key pair of the
sender's for each receiver, and the digest of all advertised keys as associated data, so an answer to other keys does
not decrypt. All bits come from the operating system. Ciphers are those of ``cryptography``, shares those of
PyCryptodome.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedloom.errors import Refused, WireError

MIN_SITES, MAX_SITES = 3, 100
"""Sites of a session, and of a sum at least `MIN_SITES`: of two, each would know the other's vector from the sum."""
ACCUSATION_PREFIX = b"accuses\n"
"""Prefix of a third-step answer that accuses another site of an unreadable share."""
KEY_BYTES, SIGNATURE_BYTES = 32, 64
MOST_STEPS = 1 << 16
"""Steps of an analysis at most, whatever is agreed on."""

Integers = np.ndarray[Any, np.dtype[np.uint64]]
"""Integers modulo 2^64, ``[D]``."""


class Broken(Refused):
    """A step of the protocol cannot be done. The sentence holds nothing of what is summed."""


class Secrets(NamedTuple):
    """Secrets that a site draws for a session.

    Attributes:
        sealing, masking: private keys of its shares' encryption and of its masks.
        seed, counting: seeds of its own mask on its vector, and on its counters, which are opened first.
    """

    sealing: bytes
    masking: bytes
    seed: bytes
    counting: bytes


class Advert(NamedTuple):
    """The public keys of a site in a session and commitments to its seeds, signed."""

    client: int
    sealing: bytes
    masking: bytes
    seed: bytes
    counting: bytes
    signature: bytes


@dataclass(frozen=True)
class Session:
    """Agreement of all sites of a session.

    Attributes:
        name: 32 bytes. Never used twice.
        threshold: sites without which nothing is unmasked, at least `min_threshold` of all.
        adverts: by client, in rising order. The place of a site in it is the place of its shares.
    """

    name: bytes
    threshold: int
    adverts: Mapping[int, Advert]

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all of it."""
        parts = (
            a.client.to_bytes(4, "little") + a.sealing + a.masking + a.seed + a.counting for a in self.adverts.values()
        )
        return hashlib.sha256(self.name + self.threshold.to_bytes(4, "little") + b"".join(parts)).digest()


def min_threshold(sites: int) -> int:
    """Return the smallest threshold for a number of sites: a majority, and at least `MIN_SITES`."""
    return max(MIN_SITES, sites // 2 + 1)


def safe_threshold(sites: int) -> int:
    """Return the threshold of Bonawitz et al. (2017, Section 6.2) against a server that colludes with sites.

    Their proof needs 2 T > n + c for c colluding sites (Theorem 6.5). This one leaves room for fewer than a third.
    """
    return max(MIN_SITES, 2 * sites // 3 + 1)


def colluders(sites: int, threshold: int) -> int:
    """Most sites that a server may collude with without learning the upload of another.

    2 T > n + c keeps it to one sum, and T >= c + 2 keeps two others in that sum: c sites subtract their own uploads.
    """
    return min(2 * threshold - sites - 1, threshold - 2)


def session_name(agreement: bytes, round: int, nonce: bytes) -> bytes:
    """Build the name of a session from the agreement, the round and 16 random bytes of the server."""
    return hashlib.sha256(b"fedloom session\n" + agreement + round.to_bytes(8, "little") + nonce).digest()


# --------------------------------------------------------------------------------------------------------------- keys


def new_secrets() -> Secrets:
    """Fresh random secrets."""
    sealing, masking = (X25519PrivateKey.generate().private_bytes_raw() for _ in range(2))
    return Secrets(sealing, masking, os.urandom(KEY_BYTES), os.urandom(KEY_BYTES))


def advertise(session: bytes, client: int, secrets: Secrets, key: Ed25519PrivateKey) -> Advert:
    """Sign the public keys of a site with its signing key."""
    sealing, masking = public_of(secrets.sealing), public_of(secrets.masking)
    new = Advert(client, sealing, masking, committed(secrets.seed), committed(secrets.counting), b"")
    return new._replace(signature=key.sign(_advertised(session, new)))


def check_adverts(session: bytes, adverts: Collection[Advert], keys: Mapping[int, Ed25519PublicKey]) -> None:
    """Check that every advertisement is a site's own and belongs to this session.

    Raises:
        Broken: one is forged, of another session, without an owner, or there twice.
    """
    if len({a.client for a in adverts}) != len(adverts):
        raise Broken("a site's keys are advertised twice")
    publics = [key for a in adverts for key in (a.sealing, a.masking)]
    if len(set(publics)) != len(publics):
        raise Broken("two sites advertise the same key")
    for a in adverts:
        if a.client not in keys:
            raise Broken(f"keys are advertised of client {a.client}, whom the agreement does not know")
        try:
            keys[a.client].verify(a.signature, _advertised(session, a))
        except InvalidSignature:
            raise Broken(f"the keys of client {a.client} are not signed by it for this session") from None


def _advertised(session: bytes, a: Advert) -> bytes:
    return b"fedloom keys\n" + session + a.client.to_bytes(4, "little") + a.sealing + a.masking + a.seed + a.counting


def committed(seed: bytes) -> bytes:
    """Commit to a random seed of 256 bits. The commitment hides the seed."""
    return hashlib.sha256(b"fedloom seed\n" + seed).digest()


def public_of(private: bytes) -> bytes:
    """Derive a public key from a private key."""
    return private_key(private).public_key().public_bytes_raw()


def private_key(private: bytes) -> X25519PrivateKey:
    """Load an X25519 private key from its bytes."""
    return X25519PrivateKey.from_private_bytes(private)


def common(private: X25519PrivateKey, public: bytes) -> bytes:
    """Compute the secret that only the owners of two key pairs share.

    Raises:
        Broken: the public key is no point with which there is a secret.
    """
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise Broken("an advertised key is no public key of X25519") from None


def derived(secret: bytes, salt: bytes, use: bytes) -> bytes:
    """256 bits of a secret for one use, by HKDF-SHA256."""
    return HKDF(SHA256(), KEY_BYTES, salt, b"fedloom " + use).derive(secret)


# --------------------------------------------------------------------------------------------------------- agreement


def bound_to(session: Session, question: bytes, peers: Collection[int]) -> bytes:
    """Digest of a session, of what its sites were asked, and of those that have masks with each other."""
    body = question + join_parts(dict.fromkeys(peers, b""))
    return hashlib.sha256(b"fedloom session\n" + session.digest + body).digest()


def statement(bound: bytes, arrived: Collection[int]) -> bytes:
    """Encode the statement that a site signs about the sites of a sum."""
    return b"fedloom sum\n" + bound + join_parts(dict.fromkeys(arrived, b""))


def check_statement(
    session: Session, bound: bytes, signed: Mapping[int, bytes], keys: Mapping[int, Ed25519PublicKey]
) -> None:
    """Check that at least the threshold of sites signed the same set of sites for the same question.

    Args:
        session: all agree on.
        bound: see `bound_to`.
        signed: signatures of sites of the sum, empty where one is missing.
        keys: of all sites.

    Raises:
        Broken: fewer have, or a signature is of something else.
    """
    text, count = statement(bound, [*signed]), 0
    for client, signature in signed.items():
        if not any(signature):
            continue
        try:
            keys[client].verify(signature, text)
        except (InvalidSignature, KeyError):
            raise Broken(
                f"client {client} has not signed this sum: it was asked something else, or sums other sites"
            ) from None
        count += 1
    if count < session.threshold:
        raise Broken(f"{count} sites have signed this sum, {session.threshold} must")


# -------------------------------------------------------------------------------------------------------------- masks


def stream(key: bytes, length: int) -> Integers:
    """Uniform integers modulo 2^64 ``[length]`` of a key of 256 bits that is used once."""
    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * length)), dtype="<u8").astype(np.uint64, copy=False)


def masked(
    session: Session, bound: bytes, client: int, secrets: Secrets, peers: Collection[int], vector: Integers
) -> Integers:
    """Mask a site's vector ``[D]`` with its own mask and the masks that it shares with the ``peers``."""
    total = vector + stream(derived(secrets.seed, bound, b"seed"), len(vector))
    masking = private_key(secrets.masking)
    for peer in peers:
        if peer != client:
            _add_pair(total, session, bound, client, masking, peer)
    return total


def _add_pair(
    total: Integers, session: Session, bound: bytes, client: int, masking: X25519PrivateKey, peer: int
) -> None:
    """Add what ``client`` adds for ``peer``, who adds the opposite."""
    pair = b"mask" + b"".join(c.to_bytes(4, "little") for c in sorted((client, peer)))
    mask = stream(derived(common(masking, session.adverts[peer].masking), bound, pair), len(total))
    (np.add if client < peer else np.subtract)(total, mask, out=total)


def unmasked(
    session: Session, bound: bytes, arrived: Collection[int], total: Integers, secrets: Mapping[int, bytes]
) -> Integers:
    """Remove the masks from the sum of the vectors that arrived.

    Args:
        session: all agree on.
        bound: see `bound_to`.
        arrived: sites whose vector arrived.
        total: the sum of these vectors.
        secrets: seeds of these sites, and masking keys of the others that have masks with them.
    """
    total = total.copy()
    for owner, secret in secrets.items():
        if owner in arrived:
            total -= stream(derived(secret, bound, b"seed"), len(total))
            continue
        masking = private_key(secret)
        for peer in arrived:
            _add_pair(total, session, bound, owner, masking, peer)
    return total


# ----------------------------------------------------------------------------------------------------------- messages


def join_parts(parts: Mapping[int, bytes]) -> bytes:
    """Parts of equal length by client."""
    return b"".join(client.to_bytes(4, "little") + part for client, part in sorted(parts.items()))


def split_parts(message: bytes, width: int) -> dict[int, bytes]:
    """Parts of ``width`` bytes by client.

    Raises:
        WireError: the bytes are not that.
    """
    step = 4 + width
    if len(message) % step or len(message) > MAX_SITES * step:
        raise WireError(f"{len(message)} bytes are no list of at most {MAX_SITES} parts of {width} bytes")
    rows = [message[a : a + step] for a in range(0, len(message), step)]
    parts = {int.from_bytes(row[:4], "little"): row[4:] for row in rows}
    if [*parts] != sorted(parts) or len(parts) != len(rows):
        raise WireError("parts must be of different clients, in rising order")
    return parts


def write_adverts(adverts: Collection[Advert]) -> bytes:
    """Advertisements as a message."""
    return join_parts({a.client: a.sealing + a.masking + a.seed + a.counting + a.signature for a in adverts})


def read_adverts(message: bytes) -> list[Advert]:
    """Advertisements of a message.

    Raises:
        WireError: the bytes are not that.
    """
    parts = split_parts(message, 4 * KEY_BYTES + SIGNATURE_BYTES)
    cuts = (*(slice(k * KEY_BYTES, (k + 1) * KEY_BYTES) for k in range(4)), slice(4 * KEY_BYTES, None))
    return [Advert(c, *(part[cut] for cut in cuts)) for c, part in parts.items()]


def session_of(name: bytes, threshold: int, adverts: Collection[Advert]) -> Session:
    """Build the session of the sites that advertised."""
    return Session(name, threshold, {a.client: a for a in sorted(adverts)})
