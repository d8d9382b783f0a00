"""Decode and check the sites' answers in a secure-aggregation session at the server."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedloom.errors import WireError
from fedloom_sites.deploy.relay import encode_vector_statement
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure import shares
from fedloom_sites.deploy.secure.counters import counters_bytes, read_counters
from fedloom_sites.deploy.secure.protocol import ACCUSATION_PREFIX, SIGNATURE_BYTES, Integers, ProtocolBroken


def read_advert(message: bytes, name: bytes, client: int, public: Mapping[int, Ed25519PublicKey]) -> secure.KeyAdvert:
    """Return the only advertisement in a message.

    Args:
        message: message sent by the site.
        name: name of the session.
        client: number of the site.
        public: verification keys of all sites.

    Raises:
        WireError: the bytes are not an advertisement, or the keys do not belong to this client in this session. The
            second case can mean that the site and the server have different agreements.
    """
    adverts = secure.read_adverts(message)
    if [a.client for a in adverts] != [client]:
        raise WireError(
            f"expected exactly one key advertisement, from client {client}, but got advertisements from "
            f"clients {[a.client for a in adverts][:5]}"
        )
    try:
        secure.check_adverts(name, adverts, public)
    except ProtocolBroken as error:
        raise WireError(f"{error}. Do both sides have the same agreement?") from None
    return adverts[0]


def read_sealed(message: bytes, session: secure.Session, client: int, public: Ed25519PublicKey) -> dict[int, bytes]:
    """Read the sealed (encrypted) shares that a site sends to all other sites, and check the site's signature on each.

    Raises:
        WireError: the bytes are not sealed shares, or the site has not signed a share.
    """
    parts, receivers = secure.split_parts(message, shares.SEALED_SHARE_BYTES), {*session.adverts} - {client}
    if set(parts) != receivers:
        raise WireError(f"expected shares for {sorted(receivers)}, got shares for {sorted(parts)}")
    for to, sealed in parts.items():
        if not shares.is_signed(session, client, to, sealed, public):
            raise WireError(f"the share for client {to} is not signed by client {client} for this session")
    return parts


def read_vector(
    message: bytes, length: int, text: bytes, public: Ed25519PublicKey, counted: tuple[int, bytes] | None,
    relayed: bytes | None = None,
) -> tuple[bytes, Integers, bytes, bytes] | dict[int, bytes]:  # fmt: skip
    """Read either a signed masked vector with its masked counters, or accusations keyed by accused site.

    The last part of a vector's answer is the site's signature on the vector, followed by the vector. It is empty if
    sites do not verify the sums.

    Args:
        message: message sent by the site.
        length: expected length of the vector.
        text: statement whose signature the message must contain.
        public: verification key of the site.
        counted: number of sites in the session, and the digest of the session that the site signs together with its
            counters (see `counters`). None if the session has no counters.
        relayed: digest of the session that the site signs together with its vector (see `relay`). None if sites do not
            verify the sums.

    Raises:
        WireError: the bytes are neither a vector nor a list of accusations.
    """
    end, rest = SIGNATURE_BYTES + 8 * length, 0 if counted is None else counters_bytes(counted[0])
    signed = 0 if relayed is None else SIGNATURE_BYTES
    if len(message) == end + signed + rest:
        vector = np.frombuffer(message[:end], dtype="<u8", offset=SIGNATURE_BYTES).astype(np.uint64, copy=False)
        sent = b"" if counted is None else read_counters(message[end + signed :], *counted, public)
        part = b""
        if relayed is not None:
            text_of_vector = encode_vector_statement(relayed, message[SIGNATURE_BYTES:end])
            part = read_signature(message[end : end + signed], text_of_vector, public) + message[SIGNATURE_BYTES:end]
        return read_signature(message[:SIGNATURE_BYTES], text, public), vector, sent, part
    if message.startswith(ACCUSATION_PREFIX):
        return secure.split_parts(message[len(ACCUSATION_PREFIX) :], SIGNATURE_BYTES)
    raise WireError(f"a masked vector must have {end + signed + rest} bytes, got {len(message)}")


def read_signature(message: bytes, text: bytes, public: Ed25519PublicKey) -> bytes:
    """Verify a site's signature on the list of sites in a sum, and return the signature.

    Raises:
        WireError: the signature was not made for this sum.
    """
    try:
        public.verify(message, text)
    except InvalidSignature:
        raise WireError("the signature does not match this sum. The site received a different request") from None
    return message


def read_shares(message: bytes, owners: Collection[int]) -> dict[int, bytes]:
    """Read the shares of secrets that a site sent, keyed by the owner of each secret.

    Raises:
        WireError: the bytes do not encode shares of these owners' secrets.
    """
    parts = secure.split_parts(message, secure.KEY_BYTES)
    if set(parts) != set(owners):
        raise WireError(f"expected shares of {sorted(owners)}, got shares of {sorted(parts)}")
    return parts
