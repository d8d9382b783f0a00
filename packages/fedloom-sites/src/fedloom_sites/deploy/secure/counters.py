"""Counters: small integers sent by every site, whose total each site checks before it opens the sum of the vectors.

A site sends its counters together with its vector, but under separate masks. The server first requests the shares that
unmask the counters, and then sends all sites the masked counters together with these shares. Each site thus computes
the sum of the counters itself, so a server cannot forge it. The site opens the sum of the vectors only if the counters
permit it. Both sums cover the same sites. Sites may still drop out, as long as at least as many sites answer as the
threshold requires.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
COUNTER_COUNT = len(ANSWERED_COUNTS)
COUNTERS_BYTES = SIGNATURE_BYTES + 8 * COUNTER_COUNT
"""Length in bytes of the message in which a site sends its counters."""


class AnswerCounts(NamedTuple):
    """Totals of the counters over all sites in a sum.

    Attributes:
        answered: number of sites whose answers were computed from their samples.
        neutral: number of sites that have samples and sent a neutral upload.
        silent: number of sites that have samples and no answer to a question or no scores.
    """

    answered: int
    neutral: int
    silent: int


def write_counters(
    session: Session, bound: bytes, client: int, secrets: SessionSecrets, key: Ed25519PrivateKey,
    peers: Collection[int], counters: Sequence[int],
) -> bytes:  # fmt: skip
    """Encode a site's masked counters, preceded by the site's signature.

    Args:
        session: agreed session.
        bound: see `fedloom_sites.deploy.secure.protocol.session_binding`.
        client: number of the site.
        secrets: the site's secrets in this session.
        key: the site's signing key.
        peers: sites that share masks with each other.
        counters: the site's counters.
    """
    masking = secrets._replace(seed=secrets.counting)
    sent = secure.mask_vector(session, _mask_label(bound), client, masking, peers, np.array(counters, dtype=np.uint64))
    numbers = sent.astype("<u8", copy=False).tobytes()
    return key.sign(_signed_counters_text(bound, numbers)) + numbers


def read_counters(message: bytes, bound: bytes, public: Ed25519PublicKey) -> bytes:
    """Verify the signature on a site's counter message, and return the message.

    Raises:
        WireError: the message has the wrong length, or was not signed by the site.
    """
    if len(message) != COUNTERS_BYTES:
        raise WireError(f"masked counters and their signature must have {COUNTERS_BYTES} bytes, got {len(message)}")
    try:
        public.verify(message[:SIGNATURE_BYTES], _signed_counters_text(bound, message[SIGNATURE_BYTES:]))
    except InvalidSignature:
        raise WireError("the signature does not match these counters: the site received a different request") from None
    return message


def open_counters(
    session: Session, bound: bytes, peers: Collection[int], messages: Mapping[int, bytes],
    answers: Mapping[int, Mapping[int, bytes]], public: Mapping[int, Ed25519PublicKey],
) -> tuple[AnswerCounts, set[int]]:  # fmt: skip
    """Return the totals of the counters, and the sites whose shares are wrong.

    Args:
        session: agreed session.
        bound: see `fedloom_sites.deploy.secure.protocol.session_binding`.
        peers: sites that share masks with each other.
        messages: counter messages of the sites in the sum (see `write_counters`).
        answers: shares from each site that answered, keyed by the owner of the secret (see `shares.reveal_shares`).
        public: the sites' verification keys.

    Raises:
        ProtocolBroken: a message is not signed by its site, shares are missing, or the numbers cannot be sums of
            counters.
    """
    try:
        numbers = [read_counters(m, bound, public[c])[SIGNATURE_BYTES:] for c, m in messages.items()]
    except WireError as error:
        raise ProtocolBroken(str(error)) from None
    secrets, wrong = shares.restore_secrets(session, peers, messages, answers, of_counters=True)
    total: Integers = np.sum([np.frombuffer(one, dtype="<u8") for one in numbers], axis=0, dtype=np.uint64)
    total = secure.unmask_sum(session, _mask_label(bound), messages, total, secrets)
    if bool((total > len(messages)).any()) or int(total[:2].sum()) > len(messages):
        raise ProtocolBroken(
            "the sum of counters is out of range: a site sent wrong counters, or a mask was not removed"
        )
    return AnswerCounts(*total.tolist()), wrong


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
    """Return the label from which the masks of the counters are derived.

    With it, the mask streams of the counters differ from the mask streams of the vectors.
    """
    return secure.derive_key(bound, b"", b"counters")


def _signed_counters_text(bound: bytes, numbers: bytes) -> bytes:
    return b"fedloom counters\n" + bound + numbers
