"""The protocol of secure aggregation alone: sums are right whoever drops out, and nothing else can be read."""

import itertools
import os
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import Refused, WireError
from fedloom_sites.deploy.secure import integers, shares
from fedloom_sites.deploy.secure import protocol as secure

NAME = bytes(range(32))


class Site:
    """An honest site, with what it draws and gets."""

    def __init__(self, client: int, name: bytes = NAME) -> None:
        self.client, self.signing = client, Ed25519PrivateKey.generate()
        self.secrets = secure.new_secrets()
        self.advert = secure.make_advert(name, client, self.secrets, self.signing)


def ready(clients: Collection[int], threshold: int) -> tuple[dict[int, Site], secure.Session]:
    sites = {c: Site(c) for c in clients}
    adverts = [s.advert for s in sites.values()]
    secure.check_adverts(NAME, adverts, {c: s.signing.public_key() for c, s in sites.items()})
    return sites, secure.build_session(NAME, threshold, adverts)


def held(sites: dict[int, Site], session: secure.Session, peers: Collection[int]) -> dict[int, dict[int, bytes]]:
    """The shares that every peer holds, by owner."""
    sent = {c: shares.make_shares(session, c, sites[c].secrets, sites[c].signing) for c in peers}
    return {
        to: {c: sent[c][to] if c == to else opened(sites, session, to, c, sent[c][to]) for c in peers} for to in peers
    }


def opened(sites: dict[int, Site], session: secure.Session, to: int, sender: int, sealed: bytes) -> bytes:
    """What ``to`` reads of what ``sender`` sealed for it."""
    public = sites[sender].signing.public_key()
    return shares.open_share(session, to, sites[to].secrets, sender, sealed, public)


QUESTION = bytes(32)


def bound(session: secure.Session, peers: Collection[int], question: bytes = QUESTION) -> bytes:
    return secure.session_binding(session, question, peers)


def play(n, threshold, peers, arrived, answering, vectors):
    sites, session = ready(range(n), threshold)
    parts, salt = held(sites, session, peers), bound(session, peers)
    masked = [secure.mask_vector(session, salt, c, sites[c].secrets, peers, vectors[c]) for c in arrived]
    told = {c: shares.reveal_shares(parts[c], arrived) for c in answering}
    secrets, wrong = shares.restore_secrets(session, peers, arrived, told)
    assert not wrong
    return secure.unmask_sum(session, salt, arrived, np.sum(masked, axis=0, dtype=np.uint64), secrets)


def test_every_drop_out_up_to_the_threshold() -> None:
    """Five sites, threshold three: all ways to drop after the shares, and after the vectors."""
    vectors = np.random.default_rng(0).integers(0, 2**64, (5, 7), dtype=np.uint64)
    for peers in ([0, 1, 2, 3, 4], [0, 2, 3, 4], [1, 3, 4]):
        for m in range(3, len(peers) + 1):
            for arrived in itertools.combinations(peers, m):
                for answering in itertools.combinations(arrived, 3):
                    total = play(5, 3, peers, arrived, answering, vectors)
                    assert (total == vectors[[*arrived]].sum(0, dtype=np.uint64)).all()


def test_too_few_answers_give_nothing() -> None:
    vectors = np.ones((5, 3), dtype=np.uint64)
    with pytest.raises(Refused, match="2 sites sent their shares, but 3 are required"):
        play(5, 3, range(5), range(5), [0, 1], vectors)


def test_fewer_shares_than_the_threshold_give_another_secret() -> None:
    sites, session = ready(range(5), 3)
    own = held(sites, session, range(5))
    parts = [(c + 1, own[c][0][:32]) for c in range(5)]
    assert shares.combine_shares(parts[:3]) == sites[0].secrets.seed
    assert shares.combine_shares(parts[2:]) == sites[0].secrets.seed
    assert shares.combine_shares(parts[:2]) != sites[0].secrets.seed


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.floats(-(2.0**14), 2.0**14), min_size=4, max_size=4), min_size=1, max_size=100))
def test_sums_of_numbers_are_right_to_the_resolution(rows: list[list[float]]) -> None:
    encoded = [integers.encode_integers(np.array(row))[0] for row in rows]
    found = integers.decode_integers(np.sum(encoded, axis=0, dtype=np.uint64), len(rows))
    exact = np.array(rows).sum(0)
    assert np.abs(found - exact).max() <= len(rows) * (2.0 ** -(integers.RESOLUTION_BITS + 1) + 1e-15 * 2**14)


def test_numbers_out_of_range_are_clipped_and_counted() -> None:
    steps, clipped = integers.encode_integers(np.array([1e9, -1e9, 1.0]))
    assert clipped == 2
    assert (integers.decode_integers(steps, 1) == [2.0**14, -(2.0**14), 1.0]).all()
    steps, clipped = integers.encode_integers(np.array([np.nan, np.inf, -np.inf, 2.0]))
    assert clipped == 3
    assert (integers.decode_integers(steps, 1) == [0.0, 2.0**14, -(2.0**14), 2.0]).all()


def test_a_sum_with_a_mask_on_it_is_out_of_range() -> None:
    noise = secure.mask_stream(bytes(32), 100)
    with pytest.raises(Refused, match="out of range"):
        integers.decode_integers(noise, 100)
    edge = np.array([int(2 * 3 * integers.MAX_NUMBER) << integers.RESOLUTION_BITS], dtype=np.int64)
    assert integers.decode_integers(edge.view(np.uint64), 3) == 6 * integers.MAX_NUMBER
    for beyond in (edge + 1, -edge - 1):
        with pytest.raises(Refused, match="out of range"):
            integers.decode_integers(beyond.view(np.uint64), 3)


def test_every_bit_of_the_secret_changes_the_whole_stream() -> None:
    """The masks come from all 256 bits: whichever is flipped, streams agree as little as two random ones."""
    key = bytes(range(32))
    for make in (
        lambda k: secure.mask_stream(k, 256),
        lambda k: secure.mask_stream(secure.derive_key(k, b"", b"mask"), 256),
    ):
        mine = np.unpackbits(make(key).view(np.uint8))
        seen = {mine.tobytes()}
        for bit in range(256):
            other = bytearray(key)
            other[bit // 8] ^= 1 << bit % 8
            theirs = np.unpackbits(make(bytes(other)).view(np.uint8))
            assert abs((mine == theirs).mean() - 0.5) < 6 * 0.5 / len(mine) ** 0.5
            seen.add(theirs.tobytes())
        assert len(seen) == 257


def test_masks_depend_on_both_keys_the_session_the_question_and_the_peers() -> None:
    sites, session = ready(range(3), 2)
    other = replace(session, name=bytes(32))
    zero = np.zeros(64, dtype=np.uint64)
    seen = [
        secure.mask_vector(s, bound(s, p, q), c, sites[c].secrets, p, zero)
        for s in (session, other)
        for c in (0, 1)
        for p in ([0, 1], [0, 1, 2])
        for q in (QUESTION, b"1" * 32)
    ]
    assert len({x.tobytes() for x in seen}) == len(seen)


def test_masked_vectors_are_uniform_whatever_is_in_them() -> None:
    """Chi-squared of the bytes, and no correlation with the input, for inputs as unlike as can be."""
    d = 20_000
    rng = np.random.default_rng(1)
    for values in (np.zeros(d), np.full(d, 1e4), rng.normal(size=d)):
        sites, session = ready(range(3), 2)
        vector, _ = integers.encode_integers(values)
        sent = secure.mask_vector(session, bound(session, range(3)), 0, sites[0].secrets, range(3), vector)
        counts = np.bincount(sent.view(np.uint8), minlength=256)
        chi = ((counts - 8 * d / 256) ** 2 / (8 * d / 256)).sum()
        assert abs(chi - 255) < 6 * (2 * 255) ** 0.5
        if values.std():
            assert abs(np.corrcoef(sent.astype(np.float64), values)[0, 1]) < 6 / d**0.5
        bits = np.unpackbits(sent.view(np.uint8)) == np.unpackbits(vector.view(np.uint8))
        assert abs(bits.mean() - 0.5) < 6 * 0.5 / (64 * d) ** 0.5


def test_equal_inputs_are_masked_differently_in_every_session() -> None:
    vector = np.zeros(32, dtype=np.uint64)
    sent = set()
    for _ in range(5):
        sites, session = ready(range(2), 2)
        sent.add(secure.mask_vector(session, bound(session, [0, 1]), 0, sites[0].secrets, range(2), vector).tobytes())
    assert len(sent) == 5


def test_advertisements_that_are_refused() -> None:
    """Forged in every field, of another session, of another site, doubled, unknown."""
    sites = {c: Site(c) for c in range(3)}
    keys = {c: s.signing.public_key() for c, s in sites.items()}
    good = [s.advert for s in sites.values()]
    secure.check_adverts(NAME, good, keys)
    own = good[0]
    for wrong in (
        own._replace(sealing=Site(0).advert.sealing),
        own._replace(masking=Site(0).advert.masking),
        own._replace(signature=bytes(64)),
        own._replace(seed=bytes(32)),
        own._replace(sealing=own.masking, masking=own.sealing),
        Site(0).advert,  # the server's own keys, signed with its own key
        secure.make_advert(bytes(32), 0, sites[0].secrets, sites[0].signing),  # of another session
    ):
        with pytest.raises(Refused, match="not signed by that client for this session"):
            secure.check_adverts(NAME, [wrong, *good[1:]], keys)
    for wrong, sentence in (
        ([own, own], "advertised twice"),
        ([own, secure.make_advert(NAME, 1, sites[0].secrets, sites[1].signing)], "same key"),
        ([own._replace(client=7)], "keys are advertised for client 7, which is not in the agreement"),
    ):
        with pytest.raises(Refused, match=sentence):
            secure.check_adverts(NAME, wrong, keys)


def test_a_point_of_low_order_is_refused() -> None:
    """With it a common secret would be known to everybody."""
    sites, session = ready(range(2), 2)
    weak = sites[1].advert._replace(masking=bytes(32))
    session = secure.build_session(NAME, 2, [sites[0].advert, weak])
    with pytest.raises(Refused, match="an advertised key is not an X25519 public key"):
        secure.mask_vector(session, bound(session, [0, 1]), 0, sites[0].secrets, range(2), np.zeros(1, dtype=np.uint64))


def test_a_share_decrypts_only_as_it_was_meant() -> None:
    sites, session = ready(range(3), 2)
    sent = shares.make_shares(session, 0, sites[0].secrets, sites[0].signing)
    assert len(opened(sites, session, 1, 0, sent[1])) == 3 * 32
    other = replace(session, adverts={c: a for c, a in session.adverts.items() if c != 2})
    for wrong in (
        lambda: opened(sites, session, 1, 2, sent[1]),
        lambda: opened(sites, session, 2, 0, sent[1]),
        lambda: opened(sites, other, 1, 0, sent[1]),
        lambda: opened(sites, replace(session, threshold=3), 1, 0, sent[1]),
        *(lambda k=k: opened(sites, session, 1, 0, flipped(sent[1], k)) for k in (0, 32, 44, 123, 124, 187)),
    ):
        with pytest.raises(Refused, match="not made with the keys of this session"):
            wrong()


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def test_who_is_to_blame_for_a_share_that_does_not_decrypt() -> None:
    """The sender's own key of that message shows it to anybody; a false accusation falls back on its author."""
    sites, session = ready(range(3), 2)
    good = shares.make_shares(session, 0, sites[0].secrets, sites[0].signing)
    for body in (os.urandom(124), good[1][:44] + os.urandom(80)):
        sealed = body + sites[0].signing.sign(shares._share_header(session, 0, 1, body))
        with pytest.raises(shares.UnreadableShare):
            opened(sites, session, 1, 0, sealed)
        for key in (shares.one_time_key(session, sites[0].secrets, 1), os.urandom(32)):
            assert not shares.is_readable(session, 0, 1, sealed, key)
    key = shares.one_time_key(session, sites[0].secrets, 1)
    assert shares.is_readable(session, 0, 1, good[1], key)
    assert not shares.is_readable(session, 0, 2, good[2], key)  # it opens that one message
    signature = shares.sign_accusation(session, 1, 0, sites[1].signing)
    public = sites[1].signing.public_key()
    assert shares.is_accused(session, 1, 0, signature, public)
    for wrong in (
        lambda: shares.is_accused(session, 1, 2, signature, public),
        lambda: shares.is_accused(replace(session, name=bytes(32)), 1, 0, signature, public),
        lambda: shares.is_accused(session, 1, 0, signature, sites[2].signing.public_key()),
    ):
        assert not wrong()


@given(st.data(), st.integers(2, 100), st.binary(min_size=32, max_size=32))
@settings(max_examples=15, deadline=None)
def test_shares_join_to_what_was_split(data: st.DataObject, n: int, secret: bytes) -> None:
    """Any threshold of the shares in any order; of any bytes in their places, what PyCryptodome makes of them."""
    threshold = data.draw(st.integers(2, min(n, 12)))
    places = data.draw(st.lists(st.integers(1, n), min_size=threshold, max_size=threshold, unique=True))
    halves = [dict(Shamir.split(threshold, n, secret[k : k + 16])) for k in (0, 16)]
    assert shares.combine_shares([(k, halves[0][k] + halves[1][k]) for k in places]) == secret
    wrong = [(k, data.draw(st.binary(min_size=32, max_size=32))) for k in places]
    combined = [Shamir.combine([(k, both[a : a + 16]) for k, both in wrong]) for a in (0, 16)]
    assert shares.combine_shares(wrong) == b"".join(combined)


def test_never_both_shares_of_a_site() -> None:
    both = {0: b"a" * 32 + b"b" * 32, 1: b"c" * 32 + b"d" * 32}
    assert shares.reveal_shares(both, [0]) == {0: b"a" * 32, 1: b"d" * 32}


@pytest.mark.parametrize("arrived", [range(7), range(6)], ids=["all", "one lost"])
@pytest.mark.parametrize("liars", [[0], [3], [6], [0, 5], [2, 3]])
def test_wrong_shares_are_found_and_the_sum_is_right(liars: list[int], arrived: range) -> None:
    """Seven sites, threshold four: up to two wrong answers of seven, of one secret or of all."""
    if len(arrived) - len(liars) < 4:
        pytest.skip("too few right shares are left")
    sites, session = ready(range(7), 4)
    parts, salt = held(sites, session, range(7)), bound(session, range(7))
    vectors = np.random.default_rng(1).integers(0, 2**64, (7, 5), dtype=np.uint64)
    masked = [secure.mask_vector(session, salt, c, sites[c].secrets, range(7), vectors[c]) for c in arrived]
    for owners in ([2], range(7)):
        told = {c: shares.reveal_shares(parts[c], arrived) for c in range(7)}
        for c in liars:
            told[c] |= {owner: flipped(told[c][owner], 3 * c) for owner in owners}
        secrets, wrong = shares.restore_secrets(session, range(7), arrived, told)
        total = secure.unmask_sum(session, salt, arrived, np.sum(masked, axis=0, dtype=np.uint64), secrets)
        assert (total == vectors[[*arrived]].sum(0, dtype=np.uint64)).all()
        assert wrong <= {*liars}
        assert wrong or 0 not in liars  # those that the first subset has are found


def test_shares_of_which_no_subset_fits_are_told_of_their_owner() -> None:
    sites, session = ready(range(4), 3)
    parts = held(sites, session, range(4))
    told = {c: shares.reveal_shares(parts[c], range(3)) for c in range(3)}
    told[1][3] = bytes(32)
    with pytest.raises(shares.UndecidedShares, match="client 3") as error:
        shares.restore_secrets(session, range(4), range(3), told)
    assert error.value.owner == 3


def signatures(sites: dict[int, Site], text: bytes, clients: Collection[int]) -> dict[int, bytes]:
    return {c: sites[c].signing.sign(text) for c in clients}


def test_a_sum_needs_a_threshold_of_signatures_of_itself() -> None:
    """Of the same question, the same peers, the same sites; an empty place is no signature."""
    sites, session = ready(range(5), 3)
    keys = {c: s.signing.public_key() for c, s in sites.items()}
    salt = bound(session, range(5))
    signed = signatures(sites, secure.encode_statement(salt, range(4)), range(4))
    secure.check_statement(session, salt, signed, keys)
    secure.check_statement(session, salt, signed | {0: bytes(64)}, keys)
    with pytest.raises(secure.ProtocolBroken, match="2 sites have signed this sum, but 3 are required"):
        secure.check_statement(session, salt, signed | {0: bytes(64), 1: bytes(64)}, keys)
    for wrong in (
        lambda: secure.check_statement(session, bound(session, range(4)), signed, keys),
        lambda: secure.check_statement(session, bound(session, range(5), b"other" * 6), signed, keys),
        lambda: secure.check_statement(session, salt, signed | {4: bytes(64)}, keys),
        lambda: secure.check_statement(session, salt, {c: signed[c] for c in range(3)}, keys),
        lambda: secure.check_statement(session, salt, signed | {0: signed[1]}, keys),
    ):
        with pytest.raises(secure.ProtocolBroken, match="has not signed this sum"):
            wrong()


def test_lists_of_parts() -> None:
    parts = {3: b"abcd", 1: b"efgh"}
    assert secure.split_parts(secure.join_parts(parts), 4) == {1: b"efgh", 3: b"abcd"}
    one = secure.join_parts({1: b"efgh"})
    for wrong in (b"x", one + one, secure.join_parts({3: b"abcd"}) + one, one * 101):
        with pytest.raises(WireError):
            secure.split_parts(wrong, 4)


ELEMENTS = st.integers(0, 2**128 - 1)


@given(ELEMENTS, ELEMENTS, ELEMENTS)
def test_a_field_of_2_to_the_128_elements(a: int, b: int, c: int) -> None:
    assert shares.multiply_in_field(a, b) == shares.multiply_in_field(b, a) < 2**128
    assert shares.multiply_in_field(a, shares.multiply_in_field(b, c)) == shares.multiply_in_field(
        shares.multiply_in_field(a, b), c
    )
    assert shares.multiply_in_field(a, b ^ c) == shares.multiply_in_field(a, b) ^ shares.multiply_in_field(a, c)
    assert shares.multiply_in_field(1, a) == a
    if a:
        assert shares.multiply_in_field(a, shares.invert_in_field(a)) == 1


@given(st.data(), st.integers(3, 12), st.binary(min_size=32, max_size=32))
@settings(max_examples=20)
def test_shares_are_joined_as_the_library_combines_them(data: st.DataObject, n: int, secret: bytes) -> None:
    """PyCryptodome cuts a secret; its own function and this one give it back, of any of the shares."""
    threshold = data.draw(st.integers(2, n))
    halves = [dict(Shamir.split(threshold, n, secret[k : k + 16], ssss=False)) for k in (0, 16)]
    places = data.draw(st.permutations(range(1, n + 1)))[:threshold]
    parts = [(k, halves[0][k] + halves[1][k]) for k in places]
    assert shares.combine_shares(parts) == secret
    assert Shamir.combine([(k, halves[0][k]) for k in places], ssss=False) == secret[:16]
