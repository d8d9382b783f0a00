"""Counters under masks: they open for all sites of a sum together, and for nobody else."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedloom.deploy.secure import protocol as secure
from fedloom.deploy.secure.counters import (
    ABSENT,
    ANSWERED,
    NEUTRAL,
    WIDTH,
    Counts,
    check_enough,
    opened_counters,
    read_counters,
    write_counters,
)
from fedloom.deploy.secure.protocol import SIGNATURE, Broken
from fedloom.errors import WireError

SITES = range(5)
BOUND = bytes(range(32))
KEYS = [Ed25519PrivateKey.generate() for _ in SITES]
PUBLIC = {c: key.public_key() for c, key in enumerate(KEYS)}
MINE = (ANSWERED, ANSWERED, NEUTRAL, ABSENT, ANSWERED)


def sent(arrived: tuple[int, ...] = (*SITES,), bound: bytes = BOUND, session: bytes = bytes(32)) -> dict[int, bytes]:
    """What the sites of a sum send of `MINE`."""
    secrets = {c: secure.new_secrets() for c in SITES}
    adverts = [secure.advertise(session, c, secrets[c], KEYS[c]) for c in SITES]
    all_ = secure.session_of(session, 3, adverts)
    return {c: write_counters(all_, bound, c, secrets[c], KEYS[c], arrived, MINE[c]) for c in arrived}


@pytest.mark.parametrize("arrived", [(0, 1, 2, 3, 4), (0, 2, 3), (1, 2, 4)])
def test_all_of_them_give_the_sums(arrived: tuple[int, ...]) -> None:
    counters = np.array([MINE[c] for c in arrived]).sum(0)
    assert opened_counters(sent(arrived), BOUND, arrived, PUBLIC) == Counts(*counters.tolist())


def test_counters_open_for_all_sites_of_a_sum_alone() -> None:
    messages, other = sent(), sent()
    wrong: dict[str, Callable[[], Mapping[int, bytes]]] = {
        "nobody's": dict,
        "one is missing": lambda: {c: m for c, m in messages.items() if c},
        "of another session": lambda: messages | {0: other[0]},
        "of another sum": lambda: sent(bound=bytes(32)),
        "of another list": lambda: sent((0, 1, 2, 3)) | {4: messages[4]},
        "in another's name": lambda: messages | {0: messages[1]},
    }
    for make in wrong.values():
        with pytest.raises(Broken):
            opened_counters(make(), BOUND, SITES, PUBLIC)


def test_one_bit_more_is_not_what_a_site_signed() -> None:
    message = sent()[2]
    for place in (0, SIGNATURE - 1, SIGNATURE, WIDTH - 1):
        changed = bytearray(message)
        changed[place] ^= 1
        with pytest.raises(WireError, match="the signature is not of these counters"):
            read_counters(bytes(changed), BOUND, SITES, PUBLIC[2])
    for text in (b"", message[:-1], message + b"0"):
        with pytest.raises(WireError, match=f"have {WIDTH} bytes, got {len(text)}"):
            read_counters(text, BOUND, SITES, PUBLIC[2])


def test_what_a_site_sends_is_uniform_whatever_its_counters_are() -> None:
    """Of all but one site too: the bytes of many sessions have a mean of 127.5 within four standard errors."""
    draws = [np.frombuffer(m[SIGNATURE:], np.uint8) for _ in range(200) for c, m in sent().items() if c]
    values = np.concatenate(draws).astype(float)
    assert abs(values.mean() - 127.5) < 4 * 73.9 / np.sqrt(len(values))
    sums = [sum(np.frombuffer(m[SIGNATURE:], "<u8").astype(object) for c, m in sent().items() if c) for _ in range(20)]
    assert min(int(one) % 2**64 for row in sums for one in row) > 5


@pytest.mark.parametrize(("answered", "threshold"), [(0, 3), (2, 3), (3, 4)])
def test_fewer_answers_than_the_threshold_are_not_enough(answered: int, threshold: int) -> None:
    with pytest.raises(Broken, match=f"{answered} sites have answered .* must be of {threshold}"):
        check_enough(Counts(answered, 9), threshold)
    check_enough(Counts(threshold, 0), threshold)


def test_a_wrong_counter_of_one_site_is_no_sum() -> None:
    secrets = {c: secure.new_secrets() for c in SITES}
    session = secure.session_of(bytes(32), 3, [secure.advertise(bytes(32), c, secrets[c], KEYS[c]) for c in SITES])
    for huge in (6, 2**64 - 1, int.from_bytes(os.urandom(8), "little") | 8):
        mine = {c: (huge, 0) if c == 1 else ABSENT for c in SITES}
        messages = {c: write_counters(session, BOUND, c, secrets[c], KEYS[c], SITES, mine[c]) for c in SITES}
        with pytest.raises(Broken, match="out of range"):
            opened_counters(messages, BOUND, SITES, PUBLIC)
