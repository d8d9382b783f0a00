"""Counters: small numbers of every site whose sum each site reads before it opens the sum that they are about.

The sites of a session have sent their vectors and agreed on whose sum may be opened. Then each sends its counters,
under masks that it has with every other site of that sum and with nobody else. The masks cancel once all of them have
sent theirs, so no share of a secret is needed. The server passes what every site sent to all of them. Each site adds
the counters up itself, so a server cannot tell a site another sum, and opens the large sum only if the counters allow
it.

A site sends counters once in a session, for one list of sites, and enters the sum before (`opened`). A site that does
not send them leaves the others masked, and the large sum closed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedloom.deploy.secure import protocol as secure
from fedloom.deploy.secure.protocol import SIGNATURE, Broken, Integers, Secrets, Session
from fedloom.errors import WireError

ANSWERED, NEUTRAL, ABSENT = (1, 0), (0, 1), (0, 0)
"""Counters of one site: it answers from its samples; it sends zeros in place of an answer; it has no samples."""
COUNTERS = len(ANSWERED)
WIDTH = SIGNATURE + 8 * COUNTERS
"""Bytes of the message in which one site sends its counters."""


class Counts(NamedTuple):
    """Sums of the counters of all sites of a sum.

    Attributes:
        answered: sites that answered from their samples.
        neutral: sites that have samples and sent zeros.
    """

    answered: int
    neutral: int


def write_counters(
    session: Session, bound: bytes, client: int, secrets: Secrets, key: Ed25519PrivateKey, arrived: Collection[int],
    counters: Sequence[int],
) -> bytes:  # fmt: skip
    """The masked counters of a site, behind its signature.

    Args:
        session: all agree on.
        bound: see `protocol.bound_to`.
        client: number of the site.
        secrets: of the site in this session.
        key: signing key of the site.
        arrived: sites of the sum that the counters are about.
        counters: of the site.
    """
    masks = secure.statement(b"counters\n" + bound, arrived)  # other streams than the vector's
    sent = secure.paired(session, masks, client, secrets, arrived, np.array(counters, dtype=np.uint64))
    numbers = sent.astype("<u8", copy=False).tobytes()
    return key.sign(_signed(bound, arrived, numbers)) + numbers


def read_counters(message: bytes, bound: bytes, arrived: Collection[int], public: Ed25519PublicKey) -> bytes:
    """The message of one site, if it is that.

    Raises:
        WireError: it has another length, or the site has not signed it.
    """
    if len(message) != WIDTH:
        raise WireError(f"masked counters and their signature have {WIDTH} bytes, got {len(message)}")
    try:
        public.verify(message[:SIGNATURE], _signed(bound, arrived, message[SIGNATURE:]))
    except InvalidSignature:
        raise WireError("the signature is not of these counters: the site was asked something else") from None
    return message


def opened_counters(
    messages: Mapping[int, bytes], bound: bytes, arrived: Collection[int],
    public: Mapping[int, Ed25519PublicKey],
) -> Counts:  # fmt: skip
    """The sums of the counters of all sites of a sum.

    Args:
        messages: of these sites, see `write_counters`.
        bound: see `protocol.bound_to`.
        arrived: sites of the sum that the counters are about.
        public: signing keys of the sites.

    Raises:
        Broken: messages are missing or are not the sites' own, or the sum cannot be one of counters.
    """
    if messages.keys() != {*arrived}:
        raise Broken(f"counters must be of the {len(arrived)} sites of the sum, got those of {len(messages)}")
    try:
        numbers = [read_counters(m, bound, arrived, public[c])[SIGNATURE:] for c, m in messages.items()]
    except WireError as error:
        raise Broken(str(error)) from None
    total: Integers = np.sum([np.frombuffer(one, dtype="<u8") for one in numbers], axis=0, dtype=np.uint64)
    if bool((total > len(arrived)).any()):
        raise Broken("the sum of counters is out of range: a site's counters are wrong, or a mask is still on them")
    return Counts(*total.tolist())


def check_enough(counts: Counts, threshold: int) -> None:
    """Keep a sum closed that fewer sites than the threshold have a part in.

    Raises:
        Broken: how many have one.
    """
    if counts.answered < threshold:
        raise Broken(
            f"{counts.answered} sites have answered from their samples, a sum that is opened must be of {threshold}"
        )


def _signed(bound: bytes, arrived: Collection[int], numbers: bytes) -> bytes:
    return b"fedloom counters\n" + secure.statement(bound, arrived) + numbers
