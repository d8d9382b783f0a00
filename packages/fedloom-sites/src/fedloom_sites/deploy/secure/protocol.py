"""Secure aggregation: the server learns the sum of the vectors that the sites send, but no single vector.

The module implements the protocol of Bonawitz et al. (CCS 2017) on the complete graph of n sites. With a threshold of T
sites, it tolerates up to n - T dropouts, and protects against a malicious server that colludes with c sites if 2 T > n
+ c (their Theorem 6.5). Each attempt to compute a sum is a session. A session has four steps, or five if a site drops
out along the way.

1. Every site creates two X25519 key pairs and a seed. With its signing key, it signs the session, both public keys
   and a commitment to the seed.
2. Every site splits its seed and its masking key into Shamir shares. Any ``threshold`` of these shares restore the
   secrets. It encrypts one share of each secret for every other site, and signs each of these messages, so that no
   other site can forge a bad share.
3. Every site adds to its vector a mask derived from its own seed, and for every other site a mask derived from the key
   that the two sites share. The two sites add this pairwise mask with opposite signs. Numbers are integers modulo 2^64
   (see `integers`), so a masked vector is uniformly distributed regardless of its content. The masks depend on the
   entire request to the sites and on the list of sites that shared secrets (see `session_binding`), so masks cancel
   only between sites that received the same request and list. Together with its vector, a site signs that the sum may
   cover all sites that shared secrets (see `encode_statement`).
4. If a vector is missing, the sites sign the list of the sites whose vectors arrived. Each site signs only one such
   list.
5. The sites reveal their shares of the seeds of sites whose vectors arrived, and of the masking keys of the other
   sites. They never reveal shares of both secrets of the same site, and reveal shares only for a list that
   ``threshold`` sites have signed. With these shares, the server removes the masks from the sum. Each site has
   committed to both of its secrets, so wrong shares are detected (see `fedloom_sites.deploy.secure.shares`).

Two different lists can both be opened only if ``threshold`` sites have signed each of them. After an honest site has
signed a list in step 4, it opens no other list. Opening both lists therefore requires T - c honest sites for each of
them, which is possible only if 2 T <= n + c.

Masks are ChaCha20 streams with 256-bit keys derived by HKDF-SHA256. Shares are encrypted with AES-256-GCM. The sender
uses a separate key pair for each receiver, and the digest of all advertised keys is authenticated as associated data,
so a share for a different set of keys cannot be decrypted. All random bits come from the operating system. The ciphers
come from ``cryptography``, and the secret sharing from PyCryptodome.
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
"""Minimum number of sites in a sum, and maximum number of sites in a session. With only two sites, each would learn the
other's vector from the sum."""
ACCUSATION_PREFIX = b"accuses\n"
"""Prefix of an answer in step 3 that accuses another site of an unreadable share."""
KEY_BYTES, SIGNATURE_BYTES = 32, 64
MAX_ANALYSIS_STEPS = 1 << 16
"""Maximum number of steps in an analysis, regardless of the agreement."""

Integers = np.ndarray[Any, np.dtype[np.uint64]]
"""Vector ``[D]`` of integers modulo 2^64."""


class ProtocolBroken(Refused):
    """Error: a step of the protocol cannot be carried out. The message reveals nothing about the numbers in the sum."""


class SessionSecrets(NamedTuple):
    """Secrets that a site creates for a single session.

    Attributes:
        sealing, masking: private keys for encrypting the site's shares and for its masks.
        seed, counting: seeds of the masks for the site's vector and for its counters, which are opened first.
    """

    sealing: bytes
    masking: bytes
    seed: bytes
    counting: bytes


class KeyAdvert(NamedTuple):
    """A site's signed public keys in a session, and the commitments to its seeds."""

    client: int
    sealing: bytes
    masking: bytes
    seed: bytes
    counting: bytes
    signature: bytes


@dataclass(frozen=True)
class Session:
    """State that all sites in a session agree on.

    Attributes:
        name: 32 bytes. Never used twice.
        threshold: number of sites needed to unmask anything, at least the value of `min_threshold` for the number of
            all sites.
        adverts: advertisements keyed by client, in ascending order. The index of a site's Shamir shares is its position
            in this order.
    """

    name: bytes
    threshold: int
    adverts: Mapping[int, KeyAdvert]

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the entire session."""
        parts = (
            a.client.to_bytes(4, "little") + a.sealing + a.masking + a.seed + a.counting for a in self.adverts.values()
        )
        return hashlib.sha256(self.name + self.threshold.to_bytes(4, "little") + b"".join(parts)).digest()


def min_threshold(sites: int) -> int:
    """Return the minimum threshold for the given number of sites: a majority, and at least `MIN_SITES`."""
    return max(MIN_SITES, sites // 2 + 1)


def safe_threshold(sites: int) -> int:
    """Return a threshold that protects against a server that colludes with sites (Bonawitz et al. 2017, Section 6.2).

    Their proof requires 2 T > n + c for a threshold T, n sites, and c colluding sites (Theorem 6.5). This threshold
    tolerates the collusion of fewer than a third of the sites.
    """
    return max(MIN_SITES, 2 * sites // 3 + 1)


def max_colluders(sites: int, threshold: int) -> int:
    """Return the maximum number of sites that can collude with a server without learning another site's upload.

    With n sites and a threshold T, the condition 2 T > n + c limits the server to one sum, and T >= c + 2 leaves two
    other sites in that sum after the c colluding sites subtract their uploads.
    """
    return min(2 * threshold - sites - 1, threshold - 2)


def session_name(agreement: bytes, round: int, nonce: bytes, link: bytes = b"") -> bytes:
    """Return a session's name.

    Args:
        agreement: digest of the agreement.
        round: round of the session.
        nonce: 16 random bytes chosen by the server.
        link: newest link of the chain of opened sums (see `fedloom_sites.deploy.relay`), if sites verify the sums.
    """
    return hashlib.sha256(b"fedloom session\n" + agreement + round.to_bytes(8, "little") + nonce + link).digest()


# --------------------------------------------------------------------------------------------------------------- keys


def new_secrets() -> SessionSecrets:
    """Fresh random secrets."""
    sealing, masking = (X25519PrivateKey.generate().private_bytes_raw() for _ in range(2))
    return SessionSecrets(sealing, masking, os.urandom(KEY_BYTES), os.urandom(KEY_BYTES))


def make_advert(session: bytes, client: int, secrets: SessionSecrets, key: Ed25519PrivateKey) -> KeyAdvert:
    """Return a site's public keys, signed with its signing key."""
    sealing, masking = derive_public_key(secrets.sealing), derive_public_key(secrets.masking)
    new = KeyAdvert(client, sealing, masking, commit_to_seed(secrets.seed), commit_to_seed(secrets.counting), b"")
    return new._replace(signature=key.sign(_signed_advert_text(session, new)))


def check_adverts(session: bytes, adverts: Collection[KeyAdvert], keys: Mapping[int, Ed25519PublicKey]) -> None:
    """Check that every advertisement was sent by its site and belongs to this session.

    Raises:
        ProtocolBroken: an advertisement is forged, belongs to a different session or an unknown client, repeats a
            client or a key, or contains a key that cannot produce a common secret.
    """
    if len({a.client for a in adverts}) != len(adverts):
        raise ProtocolBroken("the keys of one site are advertised twice")
    publics = [key for a in adverts for key in (a.sealing, a.masking)]
    if len(set(publics)) != len(publics):
        raise ProtocolBroken("two sites advertise the same key")
    for a in adverts:
        if a.client not in keys:
            raise ProtocolBroken(f"keys are advertised for client {a.client}, which is not in the agreement")
        try:
            keys[a.client].verify(a.signature, _signed_advert_text(session, a))
        except InvalidSignature:
            raise ProtocolBroken(
                f"the keys of client {a.client} are not signed by that client for this session"
            ) from None
        for public in (a.sealing, a.masking):  # a point of small order gives no common secret with any private key
            shared_secret(load_private_key(bytes(KEY_BYTES)), public)


def _signed_advert_text(session: bytes, a: KeyAdvert) -> bytes:
    return b"fedloom keys\n" + session + a.client.to_bytes(4, "little") + a.sealing + a.masking + a.seed + a.counting


def commit_to_seed(seed: bytes) -> bytes:
    """Return a commitment to a random 256-bit seed. The commitment hides the seed."""
    return hashlib.sha256(b"fedloom seed\n" + seed).digest()


def derive_public_key(private: bytes) -> bytes:
    """Derive a public key from a private key."""
    return load_private_key(private).public_key().public_bytes_raw()


def load_private_key(private: bytes) -> X25519PrivateKey:
    """Load an X25519 private key from its bytes."""
    return X25519PrivateKey.from_private_bytes(private)


def shared_secret(private: X25519PrivateKey, public: bytes) -> bytes:
    """Compute the Diffie-Hellman secret that only the owners of two key pairs know.

    Raises:
        ProtocolBroken: the public key is not a valid point, so there is no common secret.
    """
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise ProtocolBroken("an advertised key is not an X25519 public key") from None


def derive_key(secret: bytes, salt: bytes, use: bytes) -> bytes:
    """Derive 256 bits for a single use from a secret, with HKDF-SHA256."""
    return HKDF(SHA256(), KEY_BYTES, salt, b"fedloom " + use).derive(secret)


# --------------------------------------------------------------------------------------------------------- agreement


def session_binding(session: Session, question: bytes, peers: Collection[int]) -> bytes:
    """Return the digest of a session, of the request to its sites, and of the sites that share masks."""
    body = question + join_parts(dict.fromkeys(peers, b""))
    return hashlib.sha256(b"fedloom session\n" + session.digest + body).digest()


def encode_statement(bound: bytes, arrived: Collection[int]) -> bytes:
    """Encode the statement that a site signs to consent to a sum over the given sites."""
    return b"fedloom sum\n" + bound + join_parts(dict.fromkeys(arrived, b""))


def check_statement(
    session: Session, bound: bytes, signed: Mapping[int, bytes], keys: Mapping[int, Ed25519PublicKey]
) -> None:
    """Check that at least the threshold number of sites signed the same list of sites for the same request.

    Args:
        session: agreed session.
        bound: see `session_binding`.
        signed: signature of each site in the sum, or zeros if the signature is missing.
        keys: verification keys of all sites.

    Raises:
        ProtocolBroken: too few sites have signed, or a signature belongs to a different sum.
    """
    text, count = encode_statement(bound, [*signed]), 0
    for client, signature in signed.items():
        if not any(signature):
            continue
        try:
            keys[client].verify(signature, text)
        except (InvalidSignature, KeyError):
            raise ProtocolBroken(
                f"client {client} has not signed this sum: the client received a different request, "
                "or was asked to sum different sites"
            ) from None
        count += 1
    if count < session.threshold:
        raise ProtocolBroken(f"only {count} sites have signed this sum, but {session.threshold} are required")


# -------------------------------------------------------------------------------------------------------------- masks


def mask_stream(key: bytes, length: int) -> Integers:
    """Return uniform integers ``[length]`` modulo 2^64, generated from a 256-bit key that is used only once."""
    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * length)), dtype="<u8").astype(np.uint64, copy=False)


def draw_random_integers(length: int) -> Integers:
    """Return uniform random integers ``[length]`` modulo 2^64 from the operating system's entropy."""
    return mask_stream(os.urandom(KEY_BYTES), length)


def mask_vector(
    session: Session, bound: bytes, client: int, secrets: SessionSecrets, peers: Collection[int], vector: Integers
) -> Integers:
    """Mask a site's vector ``[D]`` with the site's own mask and with the masks that it shares with the ``peers``."""
    total = vector + mask_stream(derive_key(secrets.seed, bound, b"seed"), len(vector))
    masking = load_private_key(secrets.masking)
    for peer in peers:
        if peer != client:
            _add_pair(total, session, bound, client, masking, peer)
    return total


def _add_pair(
    total: Integers, session: Session, bound: bytes, client: int, masking: X25519PrivateKey, peer: int
) -> None:
    """Add the mask that ``client`` shares with ``peer``, with the client's sign.

    The peer adds it with the opposite sign.
    """
    pair = b"mask" + b"".join(c.to_bytes(4, "little") for c in sorted((client, peer)))
    mask = mask_stream(derive_key(shared_secret(masking, session.adverts[peer].masking), bound, pair), len(total))
    (np.add if client < peer else np.subtract)(total, mask, out=total)


def unmask_sum(
    session: Session, bound: bytes, arrived: Collection[int], total: Integers, secrets: Mapping[int, bytes]
) -> Integers:
    """Remove the masks from the sum of the vectors that have arrived, and return the sum.

    Args:
        session: agreed session.
        bound: see `session_binding`.
        arrived: sites whose vectors have arrived.
        total: masked sum of these vectors.
        secrets: seeds of these sites, and masking keys of the other sites that share masks with them.
    """
    total = total.copy()
    for owner, secret in secrets.items():
        if owner in arrived:
            total -= mask_stream(derive_key(secret, bound, b"seed"), len(total))
            continue
        masking = load_private_key(secret)
        for peer in arrived:
            _add_pair(total, session, bound, owner, masking, peer)
    return total


# ----------------------------------------------------------------------------------------------------------- messages


def join_parts(parts: Mapping[int, bytes]) -> bytes:
    """Concatenate one part of equal length per client into a message."""
    return b"".join(client.to_bytes(4, "little") + part for client, part in sorted(parts.items()))


def split_parts(message: bytes, width: int) -> dict[int, bytes]:
    """Split a message into parts of ``width`` bytes, keyed by client.

    Raises:
        WireError: the bytes do not encode a valid list of parts.
    """
    step = 4 + width
    if len(message) % step or len(message) > MAX_SITES * step:
        raise WireError(f"{len(message)} bytes are not a list of at most {MAX_SITES} parts with {width} bytes each")
    rows = [message[a : a + step] for a in range(0, len(message), step)]
    parts = {int.from_bytes(row[:4], "little"): row[4:] for row in rows}
    if [*parts] != sorted(parts) or len(parts) != len(rows):
        raise WireError(
            "each part must belong to a different client, and the client numbers must be in increasing order"
        )
    return parts


def write_adverts(adverts: Collection[KeyAdvert]) -> bytes:
    """Encode advertisements as a message."""
    return join_parts({a.client: a.sealing + a.masking + a.seed + a.counting + a.signature for a in adverts})


def read_adverts(message: bytes) -> list[KeyAdvert]:
    """Decode the advertisements in a message.

    Raises:
        WireError: the bytes are not advertisements.
    """
    parts = split_parts(message, 4 * KEY_BYTES + SIGNATURE_BYTES)
    cuts = (*(slice(k * KEY_BYTES, (k + 1) * KEY_BYTES) for k in range(4)), slice(4 * KEY_BYTES, None))
    return [KeyAdvert(c, *(part[cut] for cut in cuts)) for c, part in parts.items()]


def build_session(name: bytes, threshold: int, adverts: Collection[KeyAdvert]) -> Session:
    """Build the session of all sites that have advertised keys."""
    return Session(name, threshold, {a.client: a for a in sorted(adverts)})
