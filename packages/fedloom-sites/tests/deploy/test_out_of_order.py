"""Messages of a session that no honest server sends: from another session, out of order, changed, doubled or malformed.

A site answers none of them with anything that opens a sum, and the honest session that follows is opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure.counters import counters_bytes
from tests.deploy.sessions import secured, sum_honestly
from tests.deploy.test_dishonest import Rogue
from tests.deploy.test_refusals import BUDGET, THREE

pytestmark = pytest.mark.attack("sends messages of a session out of order")

SITES = 3
Refused = bytes | None


class Attack:
    """A session in which all sites have sent their vectors, and a second one in which the first site has sent shares.

    Args:
        folder: of the deployment.
    """

    def __init__(self, folder: Path) -> None:
        here = secured(folder, "fedavg", SITES, **THREE)
        self.rogue = Rogue(here._replace(sites=[s.with_(**BUDGET) for s in here.sites]))
        self.download, self.other = self.rogue.download(), self.rogue.download(0.5)
        self.terms = self.rogue.terms(1, self.download)

    def begin(self, *, vectors: bool = True) -> Any:
        session = self.rogue.begin(1)
        for c in range(SITES) if vectors else ():
            session.vector(c, self.terms, self.download)
        return session

    @staticmethod
    def inbox(session: Any, *senders: int) -> bytes:
        return secure.join_parts({c: session.sealed[c][0] for c in senders or (1, 2)})

    @staticmethod
    def signed(session: Any, *sites: int) -> bytes:
        return secure.join_parts({c: session.vectors[c][:64] for c in sites or range(SITES)})

    def masked(self, session: Any, *, terms: bytes = b"", inbox: bytes = b"", download: bytes = b"") -> Refused:
        arrays = (download or self.download, terms or self.terms.encode(), inbox or self.inbox(session))
        answer: Refused = session.ask(0, "masked", *arrays, accepted=0)
        return answer


def own(session: Any) -> bytes:
    """The counters of the first site in the name of all."""
    return secure.join_parts(dict.fromkeys(range(SITES), session.vectors[0][-counters_bytes(SITES) :]))


def edited(a: Attack, old: bytes, new: bytes) -> bytes:
    text = a.terms.encode()
    assert old in text
    return text.replace(old, new, 1)


def begun(attack: Callable[[Attack, Any], Refused]) -> Callable[[Attack], Refused]:
    return lambda a: attack(a, a.begin(vectors=False))


def sent(attack: Callable[[Attack, Any], Refused]) -> Callable[[Attack], Refused]:
    return lambda a: attack(a, a.begin())


ATTACKS: dict[str, Callable[[Attack], Refused]] = {
    # before the vector
    "the counters before the vector": begun(lambda a, s: s.ask(0, "count", own(a.begin()), bytes(32))),
    "the sum before the vector": begun(lambda a, s: s.ask(0, "unmask", a.signed(a.begin()))),
    "shares that this site has sent itself": begun(
        lambda a, s: a.masked(s, inbox=secure.join_parts({0: s.sealed[1][0], 1: s.sealed[1][0], 2: s.sealed[2][0]}))
    ),
    "shares of too few sites": begun(lambda a, s: a.masked(s, inbox=a.inbox(s, 1))),
    "shares of another session": begun(
        lambda a, s: a.rogue.ask(
            0, "masked", a.download, a.terms.encode(), a.inbox(s), session=os.urandom(16), round=1, accepted=0
        )
    ),
    "shares of a site that is none": begun(
        lambda a, s: a.masked(s, inbox=secure.join_parts({1: s.sealed[1][0], 9: s.sealed[2][0]}))
    ),
    # terms
    "terms that are nested deeply": begun(lambda a, s: a.masked(s, terms=b"[" * 100_000)),
    "terms with a further field": begun(lambda a, s: a.masked(s, terms=edited(a, b"{", b'{"more":1,'))),
    "terms with a field twice": begun(
        lambda a, s: a.masked(s, terms=edited(a, b'"round":1', b'"round":1,"round":2'))
    ),
    "terms with a number of 5,000 digits": begun(
        lambda a, s: a.masked(s, terms=edited(a, b'"round":1', b'"round":' + b"9" * 5000))
    ),
    "terms that name a file": begun(
        lambda a, s: a.masked(
            s, terms=edited(a, b'"question":null', b'"question":{"analysis":"../x","step":0,"content":""}')
        )
    ),
    "terms with an end of text": begun(lambda a, s: a.masked(s, terms=a.terms.encode() + b"\x00")),
    "terms of 64 megabytes": begun(lambda a, s: a.masked(s, terms=a.terms.encode() + b" " * (1 << 26))),
    "a step that no analysis has": begun(
        lambda a, s: a.masked(
            s, terms=edited(a, b'"question":null', b'"question":{"analysis":"x","step":%d,"content":""}' % 10**30)
        )
    ),
    # models
    "a model that is cut off": begun(lambda a, s: a.masked(s, download=a.download[:-3])),
    "a model that is followed by a byte": begun(lambda a, s: a.masked(s, download=a.download + b"x")),
    "an empty model": begun(lambda a, s: a.masked(s, download=b"\x00")),
    "another model than in the terms": begun(lambda a, s: a.masked(s, download=a.other)),
    # after the vector
    "another model in the same session": sent(
        lambda a, s: a.masked(s, terms=a.rogue.terms(1, a.other).encode(), download=a.other)
    ),
    "a list of sites without this one": sent(lambda a, s: s.ask(0, "count", a.signed(s, 1, 2), bytes(32))),
    "a list of sites twice": sent(lambda a, s: s.ask(0, "count", a.signed(s) * 2, bytes(32))),
    "another digest of the counters": sent(
        lambda a, s: s.ask(0, "count", a.signed(s), bytes(32)) and s.ask(0, "count", a.signed(s), b"1" * 32)
    ),
    "the sum without counters": sent(lambda a, s: s.ask(0, "unmask", a.signed(s))),
    "the sum with empty counters": sent(lambda a, s: s.ask(0, "unmask", a.signed(s), b"", b"")),
    "the sum with its own counters thrice": sent(lambda a, s: s.ask(0, "unmask", a.signed(s), own(s), b"")),
    "a sum of fewer sites after the counters of all": sent(
        lambda a, s: s.ask(0, "count", a.signed(s), bytes(32))
        and s.ask(0, "agree", secure.join_parts({0: b"", 1: b""}))
    ),
    "an accusation that nobody has signed": sent(lambda a, s: s.ask(0, "open", secure.join_parts({1: bytes(64)}))),
    "an accusation of itself": sent(lambda a, s: s.ask(0, "open", secure.join_parts({0: bytes(64)}))),
    "an accusation of a site that is none": sent(lambda a, s: s.ask(0, "open", secure.join_parts({9: bytes(64)}))),
    "the counters of a session that a new one has replaced": sent(
        lambda a, s: (a.begin(vectors=False), s.ask(0, "count", a.signed(s), bytes(32)))[1]
    ),
    # rounds and other messages
    **{
        f"keys of round {t}": lambda a, t=t: a.rogue.ask(0, "keys", session=os.urandom(16), round=t)
        for t in (-1, 9, 2**62)
    },
    "a session name of two megabytes": lambda a: a.rogue.ask(0, "keys", session=bytes(1 << 21), round=1),
    "a result that is nested deeply": lambda a: a.rogue.ask(0, "result", b'{"analysis":' + b"[" * 200_000, round=4),
    "a result that names a file": lambda a: a.rogue.ask(0, "result", b'{"analysis":"../x","columns":{}}', round=4),
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Attack:
    return Attack(tmp_path_factory.mktemp("sites"))


@pytest.mark.parametrize("name", ATTACKS)
def test_no_message_out_of_order_is_answered(name: str, attack: Attack) -> None:
    refused = len(attack.rogue.refused)
    assert ATTACKS[name](attack) is None
    assert len(attack.rogue.refused) == refused + 1, "the attack was refused before its last message"
    assert "could not answer" not in attack.rogue.refused[-1], "the reason has no words for the server"


def test_after_all_of_them_an_honest_sum_is_opened(tmp_path: Path) -> None:
    a = Attack(tmp_path)
    for play in ATTACKS.values():
        play(a)
    assert sum_honestly(a.rogue, 1, a.download).is_open
