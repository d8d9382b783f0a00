"""Secret sharing among the sites, and proofs that a site has violated the protocol.

Every sealed share carries its sender's signature, which proves that the sender is to blame if the share cannot be
decrypted. The receiver accuses the sender, which must then open its message by revealing the private key that it
generated for this one message. A sender that refuses is excluded. A sender that opens its message reveals only one
share, and only to the accusing receiver. An accusing receiver reveals nothing, so neither a server nor a site gains
anything from a false accusation.

The commitments to the secrets expose wrong shares: a subset that contains a wrong share yields a secret that does not
match the commitment, so other subsets of the shares are tried for the same fixed set of uploads.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, reduce

from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedloom.seeds import numpy_generator
from fedloom_sites.deploy.secure.protocol import (
    KEY_BYTES,
    SIGNATURE_BYTES,
    ProtocolBroken,
    Session,
    SessionSecrets,
    commit_to_seed,
    derive_key,
    derive_public_key,
    load_private_key,
    shared_secret,
)

SHARE_NONCE_BYTES, _HALF_KEY_BYTES = 12, KEY_BYTES // 2
_HALF_KEY_BITS = 8 * _HALF_KEY_BYTES
FIELD_POLYNOMIAL = (1 << 128) | 0x87
"""Reduction polynomial of Shamir's scheme in PyCryptodome: x^128 + x^7 + x^2 + x + 1.

PyCryptodome provides secret sharing, but no arithmetic in this field.
"""
SEALED_SHARE_BYTES = KEY_BYTES + SHARE_NONCE_BYTES + 3 * KEY_BYTES + 16 + SIGNATURE_BYTES
"""Length in bytes of a sealed share: a public key, a nonce, three shares with AES-GCM's tag, and a signature."""
MAX_SUBSETS = 200
"""Maximum number of subsets of a secret's shares that are tried."""


class UnreadableShare(ProtocolBroken):
    """Error: a share cannot be decrypted although its sender has signed it."""


def make_shares(session: Session, client: int, secrets: SessionSecrets, key: Ed25519PrivateKey) -> dict[int, bytes]:
    """Return one share of this site's seeds and masking key for every site in the session.

    All shares are sealed, except those for this site itself.
    """
    n, shares = len(session.adverts), [b""] * len(session.adverts)
    all_secrets = secrets.seed + secrets.masking + secrets.counting
    for half in (all_secrets[a : a + _HALF_KEY_BYTES] for a in range(0, 3 * KEY_BYTES, _HALF_KEY_BYTES)):
        for k, (_, part) in enumerate(Shamir.split(session.threshold, n, half, ssss=False)):
            shares[k] += part
    sealed = {}
    for to, plain in zip(session.adverts, shares, strict=True):
        sealed[to] = plain if to == client else _seal_share(session, client, to, secrets, plain, key)
    return sealed


def _seal_share(
    session: Session, sender: int, to: int, secrets: SessionSecrets, plain: bytes, key: Ed25519PrivateKey
) -> bytes:
    private, nonce = load_private_key(one_time_key(session, secrets, to)), os.urandom(SHARE_NONCE_BYTES)
    way = _share_cipher(session, shared_secret(private, session.adverts[to].sealing), sender, to)
    body = private.public_key().public_bytes_raw() + nonce + AESGCM(way).encrypt(nonce, plain, session.digest)
    return body + key.sign(_share_header(session, sender, to, body))


def one_time_key(session: Session, secrets: SessionSecrets, to: int) -> bytes:
    """Derive the private key that a site uses to seal its share for one other site.

    The key does not open any other share.
    """
    return derive_key(secrets.sealing, session.digest, b"share for" + to.to_bytes(4, "little"))


def open_share(
    session: Session, client: int, secrets: SessionSecrets, sender: int, sealed: bytes, public: Ed25519PublicKey
) -> bytes:
    """Return the decrypted share that another site sent to this site.

    Args:
        session: agreed session.
        client: number of the receiving site.
        secrets: the receiving site's secrets.
        sender: number of the sending site.
        sealed: sealed share from the sender.
        public: the sender's verification key.

    Raises:
        ProtocolBroken: the sender did not make the share for this site with this session's keys.
        UnreadableShare: the sender created the share, but the share cannot be decrypted.
    """
    if not is_signed(session, sender, client, sealed, public):
        raise ProtocolBroken(f"the share of client {sender} was not made with the keys of this session")
    try:
        secret = shared_secret(load_private_key(secrets.sealing), sealed[:KEY_BYTES])
    except ProtocolBroken as error:
        raise UnreadableShare(str(error)) from None
    return decrypt_share(session, secret, sender, client, sealed)


def is_signed(session: Session, sender: int, to: int, sealed: bytes, public: Ed25519PublicKey) -> bool:
    """Return True if the sender of a sealed share has signed it for this receiver and session."""
    try:
        public.verify(sealed[-SIGNATURE_BYTES:], _share_header(session, sender, to, sealed[:-SIGNATURE_BYTES]))
    except InvalidSignature:
        return False
    return True


def decrypt_share(session: Session, common: bytes, sender: int, to: int, sealed: bytes) -> bytes:
    """Decrypt a sealed share with ``common``, the secret shared by its one-time key and the receiver's key.

    Raises:
        UnreadableShare: the share cannot be decrypted.
    """
    nonce, text = (
        sealed[KEY_BYTES : KEY_BYTES + SHARE_NONCE_BYTES],
        sealed[KEY_BYTES + SHARE_NONCE_BYTES : -SIGNATURE_BYTES],
    )
    try:
        return AESGCM(_share_cipher(session, common, sender, to)).decrypt(nonce, text, session.digest)
    except InvalidTag:
        raise UnreadableShare(f"the share of client {sender} for client {to} cannot be decrypted") from None


def _share_header(session: Session, sender: int, to: int, body: bytes) -> bytes:
    return b"fedloom share\n" + session.digest + sender.to_bytes(4, "little") + to.to_bytes(4, "little") + body


def _share_cipher(session: Session, common: bytes, sender: int, to: int) -> bytes:
    use = b"share" + sender.to_bytes(4, "little") + to.to_bytes(4, "little")
    return derive_key(common, session.digest, use)


def reveal_shares(
    shares: Mapping[int, bytes], survivors: Collection[int], *, of_counters: bool = False
) -> dict[int, bytes]:
    """Return one share for each site: of its seed if its vector arrived, otherwise of its masking key.

    Args:
        shares: for every site, the shares of its three secrets, joined together.
        survivors: sites whose vectors have arrived.
        of_counters: True to use the seed of a site's counter mask instead of its vector mask.
    """
    seed = slice(2 * KEY_BYTES, None) if of_counters else slice(KEY_BYTES)
    return {
        owner: all_[seed if owner in survivors else slice(KEY_BYTES, 2 * KEY_BYTES)] for owner, all_ in shares.items()
    }


def combine_shares(parts: Sequence[tuple[int, bytes]]) -> bytes:
    """Combine a threshold of shares, given as ``(index, share)``, to recover the secret, like `Shamir.combine`.

    Each half of the secret is a weighted sum of the shares, multiplied by a factor. `_interpolation_weights` computes
    the weights and the factor, which depend only on the indices.
    """
    (weights, factor), halves = _interpolation_weights(tuple(k for k, _ in parts)), [0, 0]
    for weight, (_, both) in zip(weights, parts, strict=True):
        for k in (0, 1):
            halves[k] ^= multiply_in_field(
                weight, int.from_bytes(both[k * _HALF_KEY_BYTES : (k + 1) * _HALF_KEY_BYTES])
            )
    return b"".join(multiply_in_field(factor, half).to_bytes(_HALF_KEY_BYTES) for half in halves)


def multiply_in_field(a: int, b: int) -> int:
    """Multiply two elements of GF(2^128), taking one step per bit of ``a``.

    The bits of an integer represent the coefficients of a polynomial.
    """
    product = 0
    while a:
        product ^= b if a & 1 else 0
        a, b = a >> 1, b << 1
        b ^= FIELD_POLYNOMIAL if b >> _HALF_KEY_BITS else 0
    return product


def invert_in_field(a: int) -> int:
    """Compute the inverse of a nonzero element of GF(2^128) as its power 2^128 - 2."""
    inverse = 1
    for _ in range(_HALF_KEY_BITS - 1):
        a = multiply_in_field(a, a)
        inverse = multiply_in_field(inverse, a)
    return inverse


@lru_cache(maxsize=2 * MAX_SUBSETS)
def _interpolation_weights(places: tuple[int, ...]) -> tuple[list[int], int]:
    """Compute the weights of the shares with these indices, and the factor of the weighted sum.

    The weights are the Lagrange polynomials at 0, and the factor is one. If this takes fewer bits, the weights are
    instead these polynomials multiplied by all differences of the indices, and the factor is the inverse of this
    product. Fewer bits save time, because a multiplication takes a step for each bit.
    """
    weights = []
    for k in places:
        rest = [place for place in places if place != k]
        above, below = (reduce(multiply_in_field, factors, 1) for factors in (rest, [k ^ place for place in rest]))
        weights.append(multiply_in_field(above, invert_in_field(below)))
    apart = reduce(multiply_in_field, (a ^ b for a, b in itertools.combinations(places, 2)), 1)
    multiples = [multiply_in_field(weight, apart) for weight in weights]
    forms = (weights, 1), (multiples, invert_in_field(apart))
    return min(forms, key=lambda form: sum(element.bit_length() for element in (*form[0], form[1])))


# --------------------------------------------------------------------------------------------------------- accusations


def sign_accusation(session: Session, accuser: int, accused: int, key: Ed25519PrivateKey) -> bytes:
    """Return a signed accusation that another site's share for this site cannot be decrypted."""
    return key.sign(_accusation_text(session, accuser, accused))


def is_accused(session: Session, accuser: int, accused: int, signature: bytes, public: Ed25519PublicKey) -> bool:
    """Return True if the accuser has signed the accusation that it cannot decrypt its share from the accused site."""
    try:
        public.verify(signature, _accusation_text(session, accuser, accused))
    except InvalidSignature:
        return False
    return True


def is_readable(session: Session, sender: int, to: int, sealed: bytes, private: bytes) -> bool:
    """Return True if a sealed share can be decrypted with the one-time key revealed by its sender.

    This check can be performed by anyone.

    Args:
        session: agreed session.
        sender: number of the site that sealed the share.
        to: number of the receiving site.
        sealed: sealed share, whose signature has already been checked.
        private: the sender's private key for this message (see `one_time_key`).
    """
    if derive_public_key(private) != sealed[:KEY_BYTES]:
        return False
    try:
        decrypt_share(
            session, shared_secret(load_private_key(private), session.adverts[to].sealing), sender, to, sealed
        )
    except ProtocolBroken:
        return False
    return True


def _accusation_text(session: Session, accuser: int, accused: int) -> bytes:
    return b"fedloom accusation\n" + session.digest + accuser.to_bytes(4, "little") + accused.to_bytes(4, "little")


# ------------------------------------------------------------------------------------------------------------- secrets


class UndecidedShares(ProtocolBroken):
    """Error: none of the subsets of shares that were tried yields the owner's secret.

    Args:
        owner: number of the secret's site.
        count: number of shares of the secret.
    """

    def __init__(self, owner: int, count: int) -> None:
        self.owner = owner
        super().__init__(f"no subset of the {count} shares of client {owner}'s secret fits the committed value")


def restore_secrets(
    session: Session, peers: Collection[int], arrived: Collection[int], answers: Mapping[int, Mapping[int, bytes]], *,
    of_counters: bool = False,
) -> tuple[dict[int, bytes], set[int]]:  # fmt: skip
    """Return the secrets that unmask a sum, keyed by owner, and the sites whose shares are wrong.

    Args:
        session: agreed session.
        peers: sites that share masks with each other.
        arrived: the sites in ``peers`` whose vectors have arrived. Their seeds are reconstructed, as are the masking
            keys of the other ``peers``.
        answers: shares from each site that answered, keyed by the owner of the secret (see `reveal_shares`).
        of_counters: see `reveal_shares`.

    Raises:
        ProtocolBroken: fewer than ``threshold`` sites answered.
        UndecidedShares: the shares do not give a secret that matches its owner's commitment.
    """
    if len(answers) < session.threshold:
        raise ProtocolBroken(f"only {len(answers)} sites sent their shares, but {session.threshold} are required")

    def fits(owner: int, secret: bytes) -> bool:
        advert = session.adverts[owner]
        if owner not in arrived:
            return derive_public_key(secret) == advert.masking
        return commit_to_seed(secret) == (advert.counting if of_counters else advert.seed)

    place = {c: k + 1 for k, c in enumerate(session.adverts)}
    secrets, wrong = dict[int, bytes](), set[int]()
    for owner in peers:
        parts = {c: (place[c], shares[owner]) for c, shares in answers.items() if c not in wrong}
        tried = (
            (combine_shares([parts[c] for c in subset]), subset)
            for subset in _share_subsets([*parts], session.threshold)
        )
        first = next(tried, None)
        match = next((x for x in itertools.chain([first], tried) if x and fits(owner, x[0])), None)
        if match is None:
            raise UndecidedShares(owner, len(parts))
        secrets[owner], subset = match
        if match is not first:
            rest = [parts[c] for c in subset[1:]]
            wrong |= {c for c in parts if c not in subset and combine_shares([parts[c], *rest]) != match[0]}
    return secrets, wrong


def _share_subsets(clients: list[int], size: int) -> Iterator[Sequence[int]]:
    """Yield at most `MAX_SUBSETS` subsets of a given size: first cyclic windows of the list, then random subsets."""
    m = len(clients)
    if m < size:
        return
    yield from ([clients[(k + a) % m] for a in range(size)] for k in range(m if m > size else 1))
    draws = numpy_generator(0, purpose="subsets")
    yield from ([clients[k] for k in draws.permutation(m)[:size]] for _ in range(MAX_SUBSETS - m) if m > size + 1)
