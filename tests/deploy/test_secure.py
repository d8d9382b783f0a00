"""The protocol of secure aggregation alone: sums are right whoever drops out, and nothing else can be read."""

import itertools
from collections.abc import Collection

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.deploy.exchange import secure
from fedloom.errors import Refused, WireError

NAME = bytes(range(32))


class Site:
    """An honest site, with what it draws and gets."""

    def __init__(self, client: int, name: bytes = NAME) -> None:
        self.client, self.signing = client, Ed25519PrivateKey.generate()
        self.secrets = secure.new_secrets()
        self.advert = secure.advertise(name, client, self.secrets, self.signing)


def ready(clients: Collection[int], threshold: int) -> tuple[dict[int, Site], secure.Session]:
    sites = {c: Site(c) for c in clients}
    adverts = [s.advert for s in sites.values()]
    secure.check_adverts(NAME, adverts, {c: s.signing.public_key() for c, s in sites.items()})
    return sites, secure.session_of(NAME, threshold, adverts)


def held(sites: dict[int, Site], session: secure.Session, peers: Collection[int]) -> dict[int, dict[int, bytes]]:
    """The shares that every peer holds, by owner."""
    sent = {c: secure.share(session, c, sites[c].secrets) for c in peers}
    return {
        to: {
            c: sent[c][to] if c == to else secure.open_share(session, to, sites[to].secrets, c, sent[c][to])
            for c in peers
        }
        for to in peers
    }


def play(n, threshold, peers, arrived, answering, vectors):
    sites, session = ready(range(n), threshold)
    shares = held(sites, session, peers)
    masked = {c: secure.masked(session, c, sites[c].secrets, peers, vectors[c]) for c in arrived}
    told = {c: secure.tell(shares[c], arrived) for c in answering}
    return secure.unmasked(session, peers, arrived, np.sum([*masked.values()], axis=0, dtype=np.uint64), told)


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
    with pytest.raises(Refused, match="2 sites said their shares, 3 are needed"):
        play(5, 3, range(5), range(5), [0, 1], vectors)


def test_fewer_shares_than_the_threshold_give_another_secret() -> None:
    sites, session = ready(range(5), 3)
    shares = held(sites, session, range(5))
    parts = [(c + 1, shares[c][0][:32]) for c in range(5)]
    assert secure._joined(parts, 3) == sites[0].secrets.seed
    assert secure._joined(parts[2:], 3) == sites[0].secrets.seed
    assert secure._joined(parts, 2) != sites[0].secrets.seed


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.floats(-(2.0**14), 2.0**14), min_size=4, max_size=4), min_size=1, max_size=100))
def test_sums_of_numbers_are_right_to_the_resolution(rows: list[list[float]]) -> None:
    encoded = [secure.encode(np.array(row))[0] for row in rows]
    found = secure.decode(np.sum(encoded, axis=0, dtype=np.uint64), len(rows))
    exact = np.array(rows).sum(0)
    assert np.abs(found - exact).max() <= len(rows) * (2.0 ** -(secure.BITS + 1) + 1e-15 * 2**14)


def test_numbers_out_of_range_are_clipped_and_counted() -> None:
    steps, clipped = secure.encode(np.array([1e9, -1e9, 1.0]))
    assert clipped == 2
    assert (secure.decode(steps, 1) == [2.0**14, -(2.0**14), 1.0]).all()
    with pytest.raises(Refused, match="not finite"):
        secure.encode(np.array([np.nan]))


def test_a_sum_with_a_mask_on_it_is_out_of_range() -> None:
    noise = secure.stream(bytes(32), 100)
    with pytest.raises(Refused, match="out of range"):
        secure.decode(noise, 100)
    edge = np.array([int(2 * 3 * secure.RANGE) << secure.BITS], dtype=np.int64)
    assert secure.decode(edge.view(np.uint64), 3) == 6 * secure.RANGE
    for beyond in (edge + 1, -edge - 1):
        with pytest.raises(Refused, match="out of range"):
            secure.decode(beyond.view(np.uint64), 3)


def test_every_bit_of_the_secret_changes_the_whole_stream() -> None:
    """The masks come from all 256 bits: whichever is flipped, streams agree as little as two random ones."""
    key = bytes(range(32))
    for make in (lambda k: secure.stream(k, 256), lambda k: secure.stream(secure.derived(k, b"", b"mask"), 256)):
        mine = np.unpackbits(make(key).view(np.uint8))
        seen = {mine.tobytes()}
        for bit in range(256):
            other = bytearray(key)
            other[bit // 8] ^= 1 << bit % 8
            theirs = np.unpackbits(make(bytes(other)).view(np.uint8))
            assert abs((mine == theirs).mean() - 0.5) < 6 * 0.5 / len(mine) ** 0.5
            seen.add(theirs.tobytes())
        assert len(seen) == 257


def test_masks_depend_on_both_keys_and_the_session() -> None:
    sites, session = ready(range(3), 2)
    other = session._replace(name=bytes(32))
    zero = np.zeros(64, dtype=np.uint64)
    seen = [
        secure.masked(s, c, sites[c].secrets, p, zero)
        for s in (session, other)
        for c in (0, 1)
        for p in ([0, 1], [0, 1, 2])
    ]
    assert len({x.tobytes() for x in seen}) == len(seen)


def test_masked_vectors_are_uniform_whatever_is_in_them() -> None:
    """Chi-squared of the bytes, and no correlation with the input, for inputs as unlike as can be."""
    d = 20_000
    rng = np.random.default_rng(1)
    for values in (np.zeros(d), np.full(d, 1e4), rng.normal(size=d)):
        sites, session = ready(range(3), 2)
        vector, _ = secure.encode(values)
        sent = secure.masked(session, 0, sites[0].secrets, range(3), vector)
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
        sent.add(secure.masked(session, 0, sites[0].secrets, range(2), vector).tobytes())
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
        own._replace(sealing=own.masking, masking=own.sealing),
        Site(0).advert,  # the server's own keys, signed with its own key
        secure.advertise(bytes(32), 0, sites[0].secrets, sites[0].signing),  # of another session
    ):
        with pytest.raises(Refused, match="not signed by it for this session"):
            secure.check_adverts(NAME, [wrong, *good[1:]], keys)
    for wrong, sentence in (
        ([own, own], "advertised twice"),
        ([own, secure.advertise(NAME, 1, sites[0].secrets, sites[1].signing)], "same key"),
        ([own._replace(client=7)], "does not know"),
    ):
        with pytest.raises(Refused, match=sentence):
            secure.check_adverts(NAME, wrong, keys)


def test_a_point_of_low_order_is_refused() -> None:
    """With it a common secret would be known to everybody."""
    sites, session = ready(range(2), 2)
    weak = sites[1].advert._replace(masking=bytes(32))
    session = secure.session_of(NAME, 2, [sites[0].advert, weak])
    with pytest.raises(Refused, match="no public key"):
        secure.masked(session, 0, sites[0].secrets, range(2), np.zeros(1, dtype=np.uint64))


def test_a_share_decrypts_only_as_it_was_meant() -> None:
    sites, session = ready(range(3), 2)
    sent = secure.share(session, 0, sites[0].secrets)
    assert len(secure.open_share(session, 1, sites[1].secrets, 0, sent[1])) == 64
    other = session._replace(adverts={c: a for c, a in session.adverts.items() if c != 2})
    for wrong in (
        lambda: secure.open_share(session, 1, sites[1].secrets, 2, sent[1]),
        lambda: secure.open_share(session, 2, sites[2].secrets, 0, sent[1]),
        lambda: secure.open_share(other, 1, sites[1].secrets, 0, sent[1]),
        lambda: secure.open_share(session._replace(threshold=3), 1, sites[1].secrets, 0, sent[1]),
        lambda: secure.open_share(session, 1, sites[1].secrets, 0, sent[1][:-1] + bytes([sent[1][-1] ^ 1])),
    ):
        with pytest.raises(Refused, match="not made with the keys of this session"):
            wrong()


def test_never_both_shares_of_a_site() -> None:
    shares = {0: b"a" * 32 + b"b" * 32, 1: b"c" * 32 + b"d" * 32}
    assert secure.tell(shares, [0]) == {0: b"a" * 32, 1: b"d" * 32}


def test_a_wrong_share_of_a_masking_key_is_seen() -> None:
    sites, session = ready(range(4), 3)
    shares = held(sites, session, range(4))
    vectors = {c: secure.masked(session, c, sites[c].secrets, range(4), np.zeros(2, dtype=np.uint64)) for c in range(3)}
    told = {c: secure.tell(shares[c], range(3)) for c in range(3)}
    told[1][3] = bytes(32)
    with pytest.raises(Refused, match="do not fit"):
        secure.unmasked(session, range(4), range(3), np.sum([*vectors.values()], axis=0, dtype=np.uint64), told)


def test_lists_of_parts() -> None:
    parts = {3: b"abcd", 1: b"efgh"}
    assert secure.read(secure.write(parts), 4) == {1: b"efgh", 3: b"abcd"}
    one = secure.write({1: b"efgh"})
    for wrong in (b"x", one + one, secure.write({3: b"abcd"}) + one, one * 101):
        with pytest.raises(WireError):
            secure.read(wrong, 4)
