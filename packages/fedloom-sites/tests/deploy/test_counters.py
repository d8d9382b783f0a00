"""Counters under masks: they open for all sites of a sum together, by the shares of a threshold of them.

Whatever numbers colluding sites add before the counters are open, each site without an answer is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedloom.errors import WireError
from fedloom.seeds import numpy_generator
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure import shares
from fedloom_sites.deploy.secure.counters import (
    TOKEN_PRIME,
    AnswerCounts,
    check_enough,
    count_tokens,
    counters_bytes,
    draw_counters,
    open_counters,
    read_counters,
    write_counters,
)
from fedloom_sites.deploy.secure.protocol import MAX_SITES, SIGNATURE_BYTES, Integers, ProtocolBroken

SITES = range(5)
BOUND = bytes(range(32))
KEYS = [Ed25519PrivateKey.generate() for _ in SITES]
PUBLIC = {c: key.public_key() for c, key in enumerate(KEYS)}
MINE = ((False, False), (False, False), (True, False), (False, False), (True, True))
"""Which sites have no answer, and which are silent."""
COUNTERS_BYTES = counters_bytes(len(SITES))


class Sent(NamedTuple):
    """A session, what its sites send of `MINE`, and the shares that open it."""

    session: secure.Session
    messages: dict[int, bytes]
    told: dict[int, dict[int, bytes]]

    def opened(self, *peers: int, **changes: Mapping[int, Any]) -> tuple[AnswerCounts, set[int]]:
        given = self._replace(**changes)
        return open_counters(
            self.session, BOUND, peers or SITES, given.messages, given.told, PUBLIC, len(self.messages)
        )


def sent(arrived: tuple[int, ...] = (*SITES,), bound: bytes = BOUND, added: Integers | None = None) -> Sent:
    """All sites share their secrets, and the counters of some arrive. Site 0 adds numbers to its own."""
    secrets = {c: secure.new_secrets() for c in SITES}
    session = secure.build_session(bytes(32), 3, [secure.make_advert(bytes(32), c, secrets[c], KEYS[c]) for c in SITES])
    sealed = {c: shares.make_shares(session, c, secrets[c], KEYS[c]) for c in SITES}
    held = {
        to: {c: all_[to] if c == to else shares.open_share(session, to, secrets[to], c, all_[to], PUBLIC[c])
             for c, all_ in sealed.items()} for to in SITES
    }  # fmt: skip
    mine = {c: draw_counters(len(SITES), MINE[c]) for c in arrived}
    mine |= {} if added is None else {0: added}
    messages = {c: write_counters(session, bound, c, secrets[c], KEYS[c], SITES, mine[c]) for c in arrived}
    told = {c: shares.reveal_shares(held[c], arrived, of_counters=True) for c in arrived}
    return Sent(session, messages, told)


@pytest.mark.parametrize("answering", [5, 3])
@pytest.mark.parametrize("arrived", [(0, 1, 2, 3, 4), (0, 2, 3), (1, 2, 4)])
def test_a_threshold_of_them_gives_the_sums(arrived: tuple[int, ...], answering: int) -> None:
    """Whichever counters are lost before, and whoever drops out after."""
    one = sent(arrived)
    told = {c: one.told[c] for c in arrived[-answering:]}
    unanswered, silent = np.array([MINE[c] for c in arrived]).sum(0).tolist()
    assert one.opened(told=told) == (AnswerCounts(len(arrived), len(arrived) - unanswered, silent), set())


def test_a_wrong_share_changes_nothing_and_its_site_is_named() -> None:
    one = sent()
    told = one.told | {2: {c: bytes([part[0] ^ 1]) + part[1:] for c, part in one.told[2].items()}}
    assert one.opened(told=told) == (AnswerCounts(5, 3, 1), {2})


def test_counters_open_for_all_sites_of_a_sum_alone() -> None:
    one, other = sent(), sent()
    few = {c: one.told[c] for c in (0, 1)}
    wrong: dict[str, Callable[[], object]] = {
        "too few shares": lambda: one.opened(told=few),
        "shares of another session": lambda: one.opened(told=other.told),
        "of another session": lambda: one.opened(messages=one.messages | {0: other.messages[0]}),
        "of another sum": lambda: sent(bound=bytes(32)).opened(),
        "one is missing": lambda: one.opened(messages={c: m for c, m in one.messages.items() if c}),
        "in another's name": lambda: one.opened(messages=one.messages | {0: one.messages[1]}),
    }
    for make in wrong.values():
        with pytest.raises(ProtocolBroken):
            make()


def test_the_shares_of_counters_do_not_open_the_vectors() -> None:
    """The two sums of a session have seeds of their own, each committed to."""
    one = sent()
    with pytest.raises(ProtocolBroken, match="fits the committed value"):
        shares.restore_secrets(one.session, SITES, SITES, one.told)
    assert shares.restore_secrets(one.session, SITES, SITES, one.told, of_counters=True)[1] == set()


def test_one_bit_more_is_not_what_a_site_signed() -> None:
    message = sent().messages[2]
    for place in (0, SIGNATURE_BYTES - 1, SIGNATURE_BYTES, COUNTERS_BYTES - 1):
        changed = bytearray(message)
        changed[place] ^= 1
        with pytest.raises(WireError, match="the signature does not match these counters"):
            read_counters(bytes(changed), len(SITES), BOUND, PUBLIC[2])
    for text in (b"", message[:-1], message + b"0"):
        with pytest.raises(WireError, match=f"have {COUNTERS_BYTES} bytes, got {len(text)}"):
            read_counters(text, len(SITES), BOUND, PUBLIC[2])


def test_what_a_site_sends_is_uniform_whatever_its_counters_are() -> None:
    """Of all sites together too: the bytes of many sessions have a mean of 127.5 within four standard errors."""
    draws = [np.frombuffer(m[SIGNATURE_BYTES:], np.uint8) for _ in range(100) for m in sent().messages.values()]
    values = np.concatenate(draws).astype(float)
    assert abs(values.mean() - 127.5) < 4 * 73.9 / np.sqrt(len(values))
    every = [sent().messages.values() for _ in range(20)]
    sums = [sum(np.frombuffer(m[SIGNATURE_BYTES:], "<u8").astype(object) for m in messages) for messages in every]
    assert min(int(one) % 2**64 for row in sums for one in row) > 5


@pytest.mark.parametrize(("answered", "threshold"), [(0, 3), (2, 3), (3, 4)])
def test_fewer_answers_than_the_threshold_are_not_enough(answered: int, threshold: int) -> None:
    with pytest.raises(ProtocolBroken, match=f"only {answered} sites answered .* needs {threshold}"):
        check_enough(AnswerCounts(9, answered, 0), threshold)
    check_enough(AnswerCounts(threshold + 2, threshold, 0), threshold)
    with pytest.raises(ProtocolBroken, match="1 of the sites could not answer"):
        check_enough(AnswerCounts(threshold + 1, threshold + 1, 1), threshold)


def test_numbers_out_of_range_are_no_counters() -> None:
    zeros = np.zeros(len(draw_counters(len(SITES), MINE[0])), dtype=np.uint64)
    for huge in (len(SITES) * TOKEN_PRIME, 2**63, 2**64 - 1):
        wrong = zeros.copy()
        wrong[3] = huge
        with pytest.raises(ProtocolBroken, match="out of range"):
            sent((0, 1, 3), added=wrong).opened()


def test_as_many_tokens_as_sites_are_counted() -> None:
    """Also if every site of a session has one, and if none has. The sums of the most powers do not wrap around."""
    for n in (3, 5, 20):
        for k in (0, 1, n - 1, n):
            flags = [(c < k, False) for c in range(n)]
            total = np.sum([draw_counters(n, flag) for flag in flags], axis=0, dtype=np.uint64)
            assert [count_tokens(one) for one in total.reshape(2, -1).tolist()] == [k, 0]
    assert pow(2, TOKEN_PRIME - 1, TOKEN_PRIME) == 1  # as for each prime
    assert MAX_SITES * TOKEN_PRIME < 2**63


def forgeries(n: int, seed: int) -> dict[str, list[int]]:
    """Numbers that colluding sites may add to the sums of powers without knowing any token."""
    draw, powers = numpy_generator(seed, purpose="forgeries"), range(1, 2 * n)
    tokens, other = ([int(x) for x in draw.integers(1, TOKEN_PRIME, size)] for size in (n, 2 * n))
    place = int(draw.integers(1, 2 * n))
    return {
        "nothing": [0 for _ in powers],
        "the powers of other tokens": [sum(pow(r, k, TOKEN_PRIME) for r in tokens) for k in powers],
        "their negatives": [-sum(pow(r, k, TOKEN_PRIME) for r in tokens) for k in powers],
        "one number": [other[0] * (k == place) for k in powers],
        "all but the first": [other[k] * (k > 1) for k in powers],
        "ones less": [-1 for _ in powers],
        "random numbers": [other[k] for k in powers],
    }


@pytest.mark.parametrize("name", forgeries(3, 0))
@pytest.mark.parametrize(("n", "k"), [(5, 1), (5, 2), (5, 4), (12, 7)])
def test_no_numbers_that_are_chosen_before_hide_a_token(n: int, k: int, name: str) -> None:
    """Tokens that are known can be hidden, as the control shows, but counters are fixed before they are opened."""
    for seed in range(20):
        total = np.sum([draw_counters(n, (True,)) for _ in range(k)], axis=0, dtype=np.uint64).tolist()
        added = forgeries(n, seed)[name]
        assert count_tokens([a + b for a, b in zip(total, added, strict=True)]) >= k
    assert count_tokens([a - b for a, b in zip(total, total, strict=True)]) == 0
