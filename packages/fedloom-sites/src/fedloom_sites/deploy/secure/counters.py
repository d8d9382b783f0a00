"""Counters: small numbers of every site whose sum each site reads before it opens the sum that they are about.

A site sends its counters with its vector, under masks of their own. The server first asks for the shares that take the
masks off the counters, and then passes the masked counters and these shares on to all sites. So each site finds the sum
of the counters itself, and a server cannot tell a site another one. The site opens the sum of the vectors only if the
counters allow it. Both sums are of one list of sites. As long as a threshold of the sites answers, others may drop out.
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
from fedloom_sites.deploy.secure.protocol import SIGNATURE_BYTES, Broken, Integers, Secrets, Session

ANSWERED_COUNTS, NEUTRAL_COUNTS, ABSENT_COUNTS = (1, 0), (0, 1), (0, 0)
"""Counters of one site: it answers from its samples. It sends a neutral answer in their place. It has no samples."""
COUNTER_COUNT = len(ANSWERED_COUNTS)
COUNTERS_BYTES = SIGNATURE_BYTES + 8 * COUNTER_COUNT
"""Bytes of the message in which one site sends its counters."""


class AnswerCounts(NamedTuple):
    """Sums of the counters of all sites of a sum.

    Attributes:
        answered: sites that answered from their samples.
        neutral: sites that have samples and sent a neutral answer.
    """

    answered: int
    neutral: int


def write_counters(
    session: Session, bound: bytes, client: int, secrets: Secrets, key: Ed25519PrivateKey, peers: Collection[int],
    counters: Sequence[int],
) -> bytes:  # fmt: skip
    """Encode the masked counters of a site, with its signature in front.

    Args:
        session: all agree on.
        bound: see `protocol.bound_to`.
        client: number of the site.
        secrets: of the site in this session.
        key: signing key of the site.
        peers: sites that have masks with each other.
        counters: of the site.
    """
    own = secrets._replace(seed=secrets.counting)
    sent = secure.masked(session, _masks(bound), client, own, peers, np.array(counters, dtype=np.uint64))
    numbers = sent.astype("<u8", copy=False).tobytes()
    return key.sign(_signed(bound, numbers)) + numbers


def read_counters(message: bytes, bound: bytes, public: Ed25519PublicKey) -> bytes:
    """Check the counter message of one site.

    Raises:
        WireError: it has another length, or the site has not signed it.
    """
    if len(message) != COUNTERS_BYTES:
        raise WireError(f"masked counters and their signature have {COUNTERS_BYTES} bytes, got {len(message)}")
    try:
        public.verify(message[:SIGNATURE_BYTES], _signed(bound, message[SIGNATURE_BYTES:]))
    except InvalidSignature:
        raise WireError("the signature is not of these counters: the site was asked something else") from None
    return message


def open_counters(
    session: Session, bound: bytes, peers: Collection[int], messages: Mapping[int, bytes],
    answers: Mapping[int, Mapping[int, bytes]], public: Mapping[int, Ed25519PublicKey],
) -> tuple[AnswerCounts, set[int]]:  # fmt: skip
    """Open the sums of all sites' counters, and name the sites whose shares are wrong.

    Args:
        session: all agree on.
        bound: see `protocol.bound_to`.
        peers: sites that have masks with each other.
        messages: of the sites of the sum, see `write_counters`.
        answers: by the site that gives them, shares by owner (`shares.reveal_shares`).
        public: signing keys of the sites.

    Raises:
        Broken: messages are not the sites' own, shares are missing, or the sum cannot be one of counters.
    """
    try:
        numbers = [read_counters(m, bound, public[c])[SIGNATURE_BYTES:] for c, m in messages.items()]
    except WireError as error:
        raise Broken(str(error)) from None
    secrets, wrong = shares.restored(session, peers, messages, answers, of_counters=True)
    total: Integers = np.sum([np.frombuffer(one, dtype="<u8") for one in numbers], axis=0, dtype=np.uint64)
    total = secure.unmasked(session, _masks(bound), messages, total, secrets)
    if bool((total > len(messages)).any()) or int(total.sum()) > len(messages):
        raise Broken("the sum of counters is out of range: a site's counters are wrong, or a mask is still on them")
    return AnswerCounts(*total.tolist()), wrong


def check_enough(counts: AnswerCounts, threshold: int) -> None:
    """Keep a sum closed that fewer sites than the threshold have a part in.

    Raises:
        Broken: how many have one.
    """
    if counts.answered < threshold:
        raise Broken(
            f"{counts.answered} sites have answered from their samples, a sum that is opened must be of {threshold}"
        )


def _masks(bound: bytes) -> bytes:
    """Return the label of the counters' masks. Their streams differ from the vectors' streams."""
    return secure.derived(bound, b"", b"counters")


def _signed(bound: bytes, numbers: bytes) -> bytes:
    return b"fedloom counters\n" + bound + numbers
