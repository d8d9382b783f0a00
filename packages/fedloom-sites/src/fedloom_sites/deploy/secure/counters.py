"""Counters that tell each site how many sites answered, before it opens the sum of the vectors.

A site sends its counters together with its vector, but under separate masks. The server first requests the shares that
unmask the counters, and then sends all sites the masked counters together with these shares. Each site thus computes
the sum of the counters itself, so a server cannot forge it. The site opens the sum of the vectors only if the counters
permit it. Both sums cover the same sites. Sites may still drop out, as long as the number of answers reaches the
threshold.

The sum shows how many sites have no answer, but not which ones. A colluding site can add any numbers to the sum,
including negative numbers. If the counters were zeros and ones, it could cancel the other sites' ones. Therefore a site
without an answer draws a secret *token* r from 1..p-1 and sends its powers r, r^2, ..., r^(2n-1) modulo the prime p,
where n is the number of sites. A site with an answer sends zeros. The sums of powers fill the Hankel matrix H with the
entries H[a, b] = sum of r^(a+b+1) over all tokens, for a and b from 0 to n-1. The rank of H is the number of different
tokens.

Colluding sites add a matrix E that they choose before they learn the tokens. Suppose that k honest sites have no
answer. The determinant of the first k rows and columns of H + E is a polynomial in the k tokens. Its highest-degree
terms, of degree k^2, form the determinant for E = 0, which is the product of all r_i and of all (r_i - r_j)^2. The
polynomial is therefore not zero, and random tokens are a root of it with a probability of at most k^2 / (p - 1)
(Schwartz, Zippel). For all other tokens, the rank of H + E is at least k. Colluding sites can thus increase the number
of sites without an answer, but not reduce it.

For this reason all counters are fixed before they are opened: a site gives its shares of the masks for one digest of
all masked counters, and later reads only the counters with this digest (see `member`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from secrets import randbelow
from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedloom.errors import WireError
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure import shares
from fedloom_sites.deploy.secure.protocol import SIGNATURE_BYTES, Integers, ProtocolBroken, Session, SessionSecrets

ANSWERED_COUNTS, NEUTRAL_COUNTS, SILENT_COUNTS, ABSENT_COUNTS = (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)
"""Counters that a site sends if it answers from its samples, sends a neutral upload instead, has no answer to a
question or no scores, or has no samples."""
TOKEN_KINDS = 2
"""Number of tokens of a site: one if it has samples but did not answer from them, and one if it is silent."""
TOKEN_PRIME = (1 << 56) - 5
"""Prime modulus of the tokens. The sum of the powers of `MAX_SITES` tokens is below 2^63."""


class AnswerCounts(NamedTuple):
    """Numbers of sites in a sum, by their answers.

    Attributes:
        sites: number of sites that have samples.
        answered: number of these sites whose answers were computed from their samples.
        silent: number of these sites that have no answer to a question or no scores.
    """

    sites: int
    answered: int
    silent: int


def counters_bytes(sites: int) -> int:
    """Return the length in bytes of a site's message with its counters, in a session of ``sites`` sites."""
    return SIGNATURE_BYTES + 8 * TOKEN_KINDS * (2 * sites - 1)


def draw_counters(sites: int, flags: Sequence[bool]) -> Integers:
    """Return a site's counters: for each flag that is set, the powers of a new token, otherwise zeros.

    Args:
        sites: number of sites in the session.
        flags: True if the site has samples but did not answer from them, and True if it is silent.
    """
    tokens = [1 + randbelow(TOKEN_PRIME - 1) for _ in flags]  # unused ones too, so that all sites take equally long
    powers = [[pow(token, k, TOKEN_PRIME) for k in range(1, 2 * sites)] for token in tokens]
    return (np.array(powers, dtype=np.uint64) * np.array(flags, dtype=np.uint64)[:, None]).flatten()


def write_counters(
    session: Session, bound: bytes, client: int, secrets: SessionSecrets, key: Ed25519PrivateKey,
    peers: Collection[int], counters: Integers,
) -> bytes:  # fmt: skip
    """Encode a site's masked counters, preceded by the site's signature.

    Args:
        session: agreed session.
        bound: see `fedloom_sites.deploy.secure.protocol.session_binding`.
        client: number of the site.
        secrets: the site's secrets in this session.
        key: the site's signing key.
        peers: sites that share masks with each other.
        counters: the site's counters (see `draw_counters`).
    """
    masking = secrets._replace(seed=secrets.counting)
    sent = secure.mask_vector(session, _mask_label(bound), client, masking, peers, counters)
    numbers = sent.astype("<u8", copy=False).tobytes()
    return key.sign(_signed_counters_text(bound, numbers)) + numbers


def read_counters(message: bytes, sites: int, bound: bytes, public: Ed25519PublicKey) -> bytes:
    """Verify the signature on a site's counter message, and return the message.

    Raises:
        WireError: the message has the wrong length, or was not signed by the site.
    """
    if len(message) != (length := counters_bytes(sites)):
        raise WireError(f"masked counters and their signature must have {length} bytes, got {len(message)}")
    try:
        public.verify(message[:SIGNATURE_BYTES], _signed_counters_text(bound, message[SIGNATURE_BYTES:]))
    except InvalidSignature:
        raise WireError("the signature does not match these counters: the site received a different request") from None
    return message


def open_counters(
    session: Session, bound: bytes, peers: Collection[int], messages: Mapping[int, bytes],
    answers: Mapping[int, Mapping[int, bytes]], public: Mapping[int, Ed25519PublicKey], sites: int,
) -> tuple[AnswerCounts, set[int]]:  # fmt: skip
    """Return the number of sites that answered, and the sites whose shares are wrong.

    Args:
        session: agreed session.
        bound: see `fedloom_sites.deploy.secure.protocol.session_binding`.
        peers: sites that share masks with each other.
        messages: counter messages of the sites in the sum (see `write_counters`).
        answers: shares from each site that answered, keyed by the owner of the secret (see `shares.reveal_shares`).
        public: the sites' verification keys.
        sites: number of sites in the sum that have samples.

    Raises:
        ProtocolBroken: a message is not signed by its site, shares are missing, or the numbers cannot be sums of
            counters.
    """
    try:
        n = len(session.adverts)
        numbers = [read_counters(m, n, bound, public[c])[SIGNATURE_BYTES:] for c, m in messages.items()]
    except WireError as error:
        raise ProtocolBroken(str(error)) from None
    secrets, wrong = shares.restore_secrets(session, peers, messages, answers, of_counters=True)
    total: Integers = np.sum([np.frombuffer(one, dtype="<u8") for one in numbers], axis=0, dtype=np.uint64)
    total = secure.unmask_sum(session, _mask_label(bound), messages, total, secrets)
    unanswered, silent = (count_tokens(sums) for sums in total.reshape(TOKEN_KINDS, -1).tolist())
    if max(total.tolist()) >= len(messages) * TOKEN_PRIME or max(unanswered, silent) > sites:
        raise ProtocolBroken(
            "the sum of counters is out of range: a site sent wrong counters, or a mask was not removed"
        )
    return AnswerCounts(sites, sites - unanswered, silent), wrong


def count_tokens(sums: Sequence[int]) -> int:
    """Return the number of tokens whose 1st to (2n-1)th powers have the given sums: the rank of their Hankel matrix."""
    n, rank = (len(sums) + 1) // 2, 0
    rows = [[value % TOKEN_PRIME for value in sums[a : a + n]] for a in range(n)]
    for column in range(n):
        pivot = next((row for row in rows if row[column]), None)
        if pivot is None:
            continue
        rank, scale = rank + 1, pow(pivot[column], -1, TOKEN_PRIME)
        factors = [(row, row[column] * scale) for row in rows if row is not pivot]
        rows = [[(x - f * y) % TOKEN_PRIME for x, y in zip(row, pivot, strict=True)] for row, f in factors]
    return rank


def check_enough(counts: AnswerCounts, threshold: int) -> None:
    """Raise an error, so that the sum stays closed, if too few sites contribute to it or any site is silent.

    The question of the next step may be almost the same. The sum of its answers, minus a sum without a silent site,
    would then reveal the answer of that site.

    Raises:
        ProtocolBroken: too few sites contribute, or a site is silent. The message states how many there are.
    """
    if counts.answered < threshold:
        raise ProtocolBroken(
            f"only {counts.answered} sites answered from their samples, but a sum needs {threshold} to be decrypted"
        )
    if counts.silent:
        raise ProtocolBroken(
            f"{counts.silent} of the sites could not answer. The difference between this sum and a "
            "sum that includes their answers would reveal these answers"
        )


def _mask_label(bound: bytes) -> bytes:
    """Return the label for deriving the masks of the counters.

    With it, the mask streams of the counters differ from the mask streams of the vectors.
    """
    return secure.derive_key(bound, b"", b"counters")


def _signed_counters_text(bound: bytes, numbers: bytes) -> bytes:
    return b"fedloom counters\n" + bound + numbers
