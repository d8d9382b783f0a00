"""Secure aggregation: the server learns the sum of what the sites send, and no summand.

The protocol of Bonawitz et al. (CCS 2017) on the complete graph, against a server that follows it but looks at all
it gets, with up to n - threshold sites that drop out. A session, one for each attempt at a round, has four steps.

1. Every site makes two X25519 key pairs and signs both public keys, with the session, with its signing key.
2. Every site cuts its seed and its masking key into Shamir shares, any ``threshold`` of which give them back, and
   encrypts to every other site its share of each.
3. Every site adds a mask from its seed, and for every other site one from their common key, which the two add with
   opposite signs. Numbers are integers modulo 2^64 (`encode`), so a masked vector is uniform whatever is in it.
4. The sites say their shares of the seeds of those whose vector arrived, and of the masking keys of those whose did
   not, never both of one site. With them the server takes the masks off the sum.

Masks are ChaCha20 streams under 256-bit keys from HKDF-SHA256; shares travel under AES-256-GCM, whose associated data
is the digest of all advertised keys, so an answer to other keys does not decrypt. All bits come from the operating
system. Ciphers are those of ``cryptography``, shares those of PyCryptodome.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedloom.errors import Refused, WireError

FEWEST, MOST = 3, 100
"""Sites of a session, and of a sum at least `FEWEST`: of two, each would know the other's vector from the sum."""
BITS = 36
"""A number travels as a multiple of the resolution 2^-36."""
RANGE = 2.0**14
"""A number is clipped to -2^14..2^14. A change has twice that; the sum of 100 is below 2^58 steps, so none wraps."""

KEY, SEALED, SIGNATURE = 32, 12 + 64 + 16, 64
_HALF = KEY // 2

Integers = np.ndarray[Any, np.dtype[np.uint64]]
"""Integers modulo 2^64, ``[D]``."""


class Broken(Refused):
    """A step of the protocol cannot be done; the sentence holds nothing of what is summed."""


class Secrets(NamedTuple):
    """What a site draws for a session: private keys of its shares' encryption and of its masks, and a seed."""

    sealing: bytes
    masking: bytes
    seed: bytes


class Advert(NamedTuple):
    """The public keys of a site in a session, signed."""

    client: int
    sealing: bytes
    masking: bytes
    signature: bytes


class Session(NamedTuple):
    """What all sites of a session agree on.

    Attributes:
        name: 32 bytes; never used twice.
        threshold: sites without which nothing is unmasked, at least `least_threshold` of all.
        adverts: by client, in rising order; the place of a site in it is the place of its shares.
    """

    name: bytes
    threshold: int
    adverts: Mapping[int, Advert]

    @property
    def digest(self) -> bytes:
        """SHA-256 of all of it."""
        parts = (a.client.to_bytes(4, "little") + a.sealing + a.masking for a in self.adverts.values())
        return hashlib.sha256(self.name + self.threshold.to_bytes(4, "little") + b"".join(parts)).digest()


def least_threshold(sites: int) -> int:
    """The smallest threshold among so many sites: a majority, and at least `FEWEST`."""
    return max(FEWEST, sites // 2 + 1)


def safe_threshold(sites: int) -> int:
    """The threshold of Bonawitz et al. (2017, Section 6.2) against a server that colludes with sites.

    Their proof needs 2 T > n + c for c colluding sites (Theorem 6.5); this one leaves room for fewer than a third.
    """
    return max(FEWEST, 2 * sites // 3 + 1)


def colluders(sites: int, threshold: int) -> int:
    """Most sites that a server may collude with without learning the upload of another (2 T > n + c)."""
    return 2 * threshold - sites - 1


def session_name(agreement: bytes, round: int, nonce: bytes) -> bytes:
    """The name of a session: of the agreement, the round, and 16 random bytes of the server."""
    return hashlib.sha256(b"fedloom session\n" + agreement + round.to_bytes(8, "little") + nonce).digest()


# ------------------------------------------------------------------------------------------------------------ numbers


def encode(values: np.ndarray[Any, Any]) -> tuple[Integers, int]:
    """Numbers ``[D]`` clipped to the range and rounded to the grid, and how many of them were clipped.

    Raises:
        Broken: one is not finite.
    """
    if not np.isfinite(values).all():
        raise Broken("a number to be masked is not finite")
    clipped = np.clip(values.astype(np.float64), -RANGE, RANGE)
    steps = np.rint(np.ldexp(clipped, BITS)).astype(np.int64)
    return steps.view(np.uint64), int((clipped != values).sum())


def decode(total: Integers, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The sum of ``count`` numbers or changes, ``[D]`` float64.

    Raises:
        Broken: it is out of the range that ``count`` of them have.
    """
    steps = total.view(np.int64)
    limit = int(2 * count * RANGE) << BITS
    if bool(((steps > limit) | (steps < -limit)).any()):
        raise Broken(f"the sum of {count} sites is out of range: one sent what it must not, or a mask is still on it")
    return np.ldexp(steps.astype(np.float64), -BITS)


# --------------------------------------------------------------------------------------------------------------- keys


def new_secrets() -> Secrets:
    """Fresh random secrets."""
    sealing, masking = (X25519PrivateKey.generate().private_bytes_raw() for _ in range(2))
    return Secrets(sealing, masking, os.urandom(KEY))


def advertise(session: bytes, client: int, secrets: Secrets, key: Ed25519PrivateKey) -> Advert:
    """The public keys of a site, signed with its signing key."""
    sealing, masking = map(_public, secrets[:2])
    return Advert(client, sealing, masking, key.sign(_advertised(session, client, sealing, masking)))


def check_adverts(session: bytes, adverts: Collection[Advert], keys: Mapping[int, Ed25519PublicKey]) -> None:
    """That every advertisement is a site's own, of this session.

    Raises:
        Broken: one is forged, of another session, of nobody, or there twice.
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
            keys[a.client].verify(a.signature, _advertised(session, a.client, a.sealing, a.masking))
        except InvalidSignature:
            raise Broken(f"the keys of client {a.client} are not signed by it for this session") from None


def _advertised(session: bytes, client: int, sealing: bytes, masking: bytes) -> bytes:
    return b"fedloom keys\n" + session + client.to_bytes(4, "little") + sealing + masking


def _public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _common(private: bytes, public: bytes, salt: bytes, use: bytes) -> bytes:
    """256 bits that only the owners of two key pairs know.

    Raises:
        Broken: the public key is no point with which there is a secret.
    """
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise Broken("an advertised key is no public key of X25519") from None
    return derived(secret, salt, use)


def derived(secret: bytes, salt: bytes, use: bytes) -> bytes:
    """256 bits of a secret for one use, by HKDF-SHA256."""
    return HKDF(SHA256(), KEY, salt, b"fedloom " + use).derive(secret)


# ------------------------------------------------------------------------------------------------------------- shares


def share(session: Session, client: int, secrets: Secrets) -> dict[int, bytes]:
    """For every site of the session its share of this site's seed and masking key; sealed, but for this site's own."""
    n, shares = len(session.adverts), [b""] * len(session.adverts)
    for half in (secrets.seed[:_HALF], secrets.seed[_HALF:], secrets.masking[:_HALF], secrets.masking[_HALF:]):
        for k, (_, part) in enumerate(Shamir.split(session.threshold, n, half, ssss=False)):
            shares[k] += part
    digest = session.digest
    made = {}
    for (to, advert), plain in zip(session.adverts.items(), shares, strict=True):
        made[to] = plain
        if to != client:
            nonce = os.urandom(12)
            made[to] = nonce + AESGCM(_way(secrets, advert, digest, client, to)).encrypt(nonce, plain, digest)
    return made


def open_share(session: Session, client: int, secrets: Secrets, sender: int, sealed: bytes) -> bytes:
    """The share that another site sent to this one.

    Raises:
        Broken: it was not made by that site, for this one, with the keys of this session.
    """
    digest = session.digest
    key = _way(secrets, session.adverts[sender], digest, sender, client)
    try:
        return AESGCM(key).decrypt(sealed[:12], sealed[12:], digest)
    except InvalidTag:
        raise Broken(f"the share of client {sender} was not made with the keys of this session") from None


def _way(secrets: Secrets, other: Advert, digest: bytes, sender: int, receiver: int) -> bytes:
    use = b"share" + sender.to_bytes(4, "little") + receiver.to_bytes(4, "little")
    return _common(secrets.sealing, other.sealing, digest, use)


def tell(shares: Mapping[int, bytes], survivors: Collection[int]) -> dict[int, bytes]:
    """Of every site one share: of its seed where its vector arrived, of its masking key where it did not."""
    return {owner: both[:KEY] if owner in survivors else both[KEY:] for owner, both in shares.items()}


def _joined(parts: Sequence[tuple[int, bytes]], threshold: int) -> bytes:
    """The secret of ``(place, share)``."""
    some = parts[:threshold]
    return b"".join(Shamir.combine([(k, s[a : a + _HALF]) for k, s in some], ssss=False) for a in (0, _HALF))


# -------------------------------------------------------------------------------------------------------------- masks


def stream(key: bytes, length: int) -> Integers:
    """Uniform integers modulo 2^64 ``[length]`` of a key of 256 bits that is used once."""
    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * length)), dtype="<u8").astype(np.uint64, copy=False)


def masked(session: Session, client: int, secrets: Secrets, peers: Collection[int], vector: Integers) -> Integers:
    """A site's vector ``[D]`` under its own mask and those that it has with the ``peers``, itself left out."""
    total = vector + stream(derived(secrets.seed, session.digest, b"seed"), len(vector))
    for peer in peers:
        if peer != client:
            total += _pair(session, client, secrets.masking, peer, len(vector))
    return total


def _pair(session: Session, client: int, masking: bytes, peer: int, length: int) -> Integers:
    """What ``client`` adds for ``peer``, who adds the opposite."""
    pair = b"mask" + b"".join(c.to_bytes(4, "little") for c in sorted((client, peer)))
    mask = stream(_common(masking, session.adverts[peer].masking, session.digest, pair), length)
    return mask if client < peer else -mask


def unmasked(
    session: Session,
    peers: Collection[int],
    arrived: Collection[int],
    total: Integers,
    told: Mapping[int, Mapping[int, bytes]],
) -> Integers:
    """The sum of the vectors that arrived, without the masks.

    Args:
        session: all agree on.
        peers: sites that have masks with each other.
        arrived: those of them whose vector arrived.
        total: the sum of these vectors.
        told: by the site that says them, shares by owner (`tell`).

    Raises:
        Broken: there are fewer than ``threshold`` answers, or a masking key that they give is not the advertised one.
    """
    if len(told) < session.threshold:
        raise Broken(f"{len(told)} sites said their shares, {session.threshold} are needed")
    place = {c: k + 1 for k, c in enumerate(session.adverts)}
    total = total.copy()
    for owner in peers:
        secret = _joined([(place[c], shares[owner]) for c, shares in told.items()], session.threshold)
        if owner in arrived:
            total -= stream(derived(secret, session.digest, b"seed"), len(total))
            continue
        if _public(secret) != session.adverts[owner].masking:
            raise Broken(f"the shares of client {owner}'s masking key do not fit its advertised key")
        for peer in arrived:
            total += _pair(session, owner, secret, peer, len(total))
    return total


# ----------------------------------------------------------------------------------------------------------- messages


def write(parts: Mapping[int, bytes]) -> bytes:
    """Parts of equal length by client."""
    return b"".join(client.to_bytes(4, "little") + part for client, part in sorted(parts.items()))


def read(message: bytes, width: int) -> dict[int, bytes]:
    """Parts of ``width`` bytes by client.

    Raises:
        WireError: the bytes are not that.
    """
    step = 4 + width
    if len(message) % step or len(message) > MOST * step:
        raise WireError(f"{len(message)} bytes are no list of at most {MOST} parts of {width} bytes")
    rows = [message[a : a + step] for a in range(0, len(message), step)]
    found = {int.from_bytes(row[:4], "little"): row[4:] for row in rows}
    if [*found] != sorted(found) or len(found) != len(rows):
        raise WireError("parts must be of different clients, in rising order")
    return found


def write_adverts(adverts: Collection[Advert]) -> bytes:
    """Advertisements as a message."""
    return write({a.client: a.sealing + a.masking + a.signature for a in adverts})


def read_adverts(message: bytes) -> list[Advert]:
    """Advertisements of a message.

    Raises:
        WireError: the bytes are not that.
    """
    found = read(message, 2 * KEY + SIGNATURE)
    return [Advert(c, part[:KEY], part[KEY : 2 * KEY], part[2 * KEY :]) for c, part in found.items()]


def session_of(name: bytes, threshold: int, adverts: Collection[Advert]) -> Session:
    """The session of the sites that advertised."""
    return Session(name, threshold, {a.client: a for a in sorted(adverts)})
