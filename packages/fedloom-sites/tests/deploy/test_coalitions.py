"""A server with sites of its own: each attack on sums, with each number of colluding sites, from one table.

The colluding sites send anything, sign every list of sites and give all their shares. A solver then combines the sums
that they get, from which the colluding sites subtract their own numbers.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from fedloom_sites.deploy.rehearsal.combinations import Row, find_isolated
from fedloom_sites.deploy.secure import counters, shares
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure.counters import (
    ABSENT_COUNTS,
    ANSWERED_COUNTS,
    NEUTRAL_COUNTS,
    SILENT_COUNTS,
    TOKEN_PRIME,
    draw_counters,
)
from fedloom_sites.deploy.secure.member import SessionMember, _stored_secrets
from fedloom_sites.deploy.secure.protocol import SIGNATURE_BYTES, ProtocolBroken
from fedloom_sites.deploy.secure.terms import AnalysisStep, SessionTerms
from fedloom_sites.deploy.settings import Site
from fedloom_sites.deploy.site.trainer import Trainer
from tests.deploy.scene import signing_key_of
from tests.deploy.sessions import secured, sum_honestly
from tests.deploy.test_dishonest import Rogue

pytestmark = pytest.mark.attack("a server that combines sums")

SITES = 5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


class Ask(NamedTuple):
    """A session that the server asks for.

    Attributes:
        kind: what is summed.
        present: sites that are asked.
        lists: lists of sites whose vectors are said to have arrived (default: all that have).
        unable: honest sites that the question leaves without an answer.
        weights: weights of sites, 1 where none is given.
        older: sites that are told that their last upload was lost.
        model: the model, if it is asked about more than once.
        experiment: number of the experiment.
        round: round of a session that was asked for before (default: the next).
        forged: how a colluding site changes its counters, to hide the sites without an answer: "before" or "after"
            the counters are opened.
    """

    kind: str
    present: Sequence[int]
    lists: Sequence[Sequence[int]] = ()
    unable: Collection[int] = ()
    weights: Mapping[int, float] = {}
    older: Collection[int] = ()
    model: str = ""
    experiment: int = 0
    round: int = 0
    forged: str = ""


class Colluder(SessionMember):
    """A site without any check, which can replace its counters."""

    def replace_counters(self, sent: bytes, change: Sequence[int]) -> bytes:
        """A masked vector with other counters: its own plus the change."""
        record = self._load()
        session, secrets, peers = self._agreed_by(record), _stored_secrets(record), [int(c) for c in record["held"]]
        mine = np.frombuffer(bytes.fromhex(record["tokens"]), np.uint64)
        mine = mine + np.array(change, np.uint64)
        end = len(sent) - counters.counters_bytes(len(session.adverts))
        return sent[:end] + counters.write_counters(
            session, self._bound(record), self._client, secrets, self._key, peers, mine
        )

    def _check_change(self, *_: Any) -> None:
        return

    def _check_counters(self, *_: Any) -> None:
        return

    def _check_arrived(self, _record: Any, clients: Collection[int]) -> list[int]:
        return [*clients]

    def _enter_sum(self, _record: Any, signed: Any) -> list[int]:
        return [*signed]

    def _store_once(self, record: dict[str, Any], name: str, value: object) -> None:
        record[name] = value


class Coalition:
    """Five sites, some of them on the side of the server.

    Args:
        sites: settings of the sites.
        folder: folder of their state.
        threshold: minimum number of sites in a sum.
        colluders: the server's sites.
        defended: False if the honest sites check nothing.
    """

    def __init__(
        self, sites: Sequence[Site], folder: Path, threshold: int, colluders: Collection[int], *, defended: bool = True
    ) -> None:
        agreed = sites[0].secure
        assert agreed is not None
        value = agreed.with_(threshold=threshold)
        self.sites = [site.with_(secure=value, state=folder / site.site) for site in sites]
        self.threshold, self.colluders, self.defended = threshold, {*colluders}, defended
        self.rows, self.refused, self.experiment, self.t = list[Row](), list[str](), -1, 0

    def play(self, ask: Ask) -> None:
        """Ask for a session, and keep what its opened sums contain of honest sites."""
        if ask.experiment != self.experiment:
            self.experiment, self.t = ask.experiment, 0
            sites = [s.with_(fingerprint=f"{ask.experiment:x}".ljust(64, "0")) for s in self.sites]
            kinds = [Colluder if c in self.colluders or not self.defended else SessionMember for c in range(SITES)]
            self.members = [
                kind(site, signing_key_of(c), site.folder)
                for c, (kind, site) in enumerate(zip(kinds, sites, strict=True))
            ]
        self.t = ask.round or self.t + 1
        weights = {c: (float(ask.weights.get(c, 1.0)),) for c in range(SITES)}
        model = hashlib.sha256(ask.model.encode() or os.urandom(32)).hexdigest()
        terms = SessionTerms(
            round=self.t, trains=ask.kind == "uploads", sizes=((9, 3, 3),) * SITES, cohort=(*ask.present,),
            accepted=tuple(self.t - 1 - (self.t > 1) * (c in ask.older) for c in ask.present),
            download=model if ask.kind == "uploads" else "",
            scored=self.t if ask.kind == "scores" else -1, models=(model,) if ask.kind == "scores" else (),
            question=AnalysisStep.create("sums", self.t, b"") if ask.kind == "sums" else None,
        )  # fmt: skip
        at = self.t, os.urandom(16)
        adverts = [secure.read_adverts(self.members[c].keys(*at))[0] for c in ask.present]
        message, sealed, vectors = secure.write_adverts(adverts), dict[int, dict[int, bytes]](), dict[int, bytes]()
        for c in ask.present:
            parts = self._ask(lambda c=c: self.members[c].shares(*at, message)) or b""
            sealed[c] = secure.split_parts(parts, shares.SEALED_SHARE_BYTES)
        for c in ask.present:
            inbox = secure.join_parts({p: sent[c] for p, sent in sealed.items() if c in sent})
            if self._ask(lambda c=c, inbox=inbox: self.members[c].receive(*at, inbox, terms, weights)) is not None:
                vectors[c] = self.members[c].masked(*at, np.zeros(3, np.uint64), self._count(ask, c, weights[c]))
        if ask.forged == "before":
            vectors |= self._forge(vectors, draw_counters(len(ask.present), (True, True)).tolist())
        for arrived in ask.lists or [[*vectors]]:
            if {*arrived} <= vectors.keys() and self._open(at, arrived, vectors, terms, adverts, ask):
                shown = {*arrived} - {*ask.unable} - self.colluders
                row = {(ask.kind, c): weights[c][0] * (1 + (c in ask.older)) for c in shown}
                most = max(row.values(), default=0.0)
                self.rows.append(
                    {key: weight for key, weight in row.items() if weight > 1e-3 * most}
                )  # less is nothing

    def _count(self, ask: Ask, c: int, weight: Sequence[float]) -> tuple[int, ...]:
        """Return the counters of a site."""
        unable = NEUTRAL_COUNTS if ask.kind == "uploads" else SILENT_COUNTS
        return ABSENT_COUNTS if not any(weight) else unable if c in ask.unable else ANSWERED_COUNTS

    def _forge(self, vectors: Mapping[int, bytes], sums: Sequence[int]) -> dict[int, bytes]:
        """The vector of a colluding site, with counters that take some numbers from the sum."""
        last = max(self.colluders)
        colluder = cast(Colluder, self.members[last])
        return {last: colluder.replace_counters(vectors[last], [-number % TOKEN_PRIME for number in sums])}

    def _open(
        self, at: tuple[int, bytes], arrived: Sequence[int], vectors: Mapping[int, bytes], terms: SessionTerms,
        adverts: Collection[secure.KeyAdvert], ask: Ask,
    ) -> bool:  # fmt: skip
        """Ask for all that opens a sum, and return whether enough sites have given their shares."""
        site = self.members[0]
        session = secure.build_session(secure.session_name(site._agreement, *at), self.threshold, adverts)
        text = secure.encode_statement(secure.session_binding(session, terms.digest, ask.present), arrived)
        listed = secure.join_parts(dict.fromkeys(arrived, b""))
        whole = {*arrived} == {*ask.present}
        half = ask.lists.index(arrived) if len(ask.lists) > 1 and self.defended else None
        asked = [c for c in vectors if half is None or c % 2 == half]
        signed = {c: vectors[c][:SIGNATURE_BYTES] if whole else bytes(SIGNATURE_BYTES) for c in arrived}
        for c in () if whole else arrived:  # a server with two lists shows each to some of the sites
            if c in self.colluders:
                signed[c] = signing_key_of(c).sign(text)
            elif c in asked:
                signed[c] = self._ask(lambda c=c: self.members[c].agree(*at, listed)) or signed[c]
        message = secure.join_parts(signed)
        givers = [c for c in vectors if c in asked or c in self.colluders]
        width = counters.counters_bytes(len(session.adverts))
        counts = secure.join_parts({c: vectors[c][-width:] for c in arrived})
        digest = hashlib.sha256(counts).digest()
        shown = {c: self._ask(lambda c=c: self.members[c].count(*at, message, digest)) for c in givers}
        given = {c: one for c, one in shown.items() if one}
        openers = secure.join_parts(given)
        if ask.forged == "after" and len(given) >= self.threshold:
            bound = secure.session_binding(session, terms.digest, ask.present)
            sums = sums_of_powers(session, bound, secure.split_parts(counts, width), given)
            vectors = {**vectors, **self._forge(vectors, sums)}
            counts = secure.join_parts({c: vectors[c][-width:] for c in arrived})
        told = [c for c in givers if self._ask(lambda c=c: self.members[c].reveal(*at, message, counts, openers))]
        return len({*told} | self.colluders) >= self.threshold

    def _ask(self, answer: Callable[[], bytes]) -> bytes | None:
        try:
            return answer()
        except ProtocolBroken as error:
            self.refused.append(str(error))
            return None


def sums_of_powers(
    session: secure.Session, bound: bytes, sent: Mapping[int, bytes], given: Mapping[int, bytes]
) -> list[int]:
    """The sums of powers of all tokens, which a server sees before it asks for the shares of the vectors.

    Args:
        session: agreed session.
        bound: digest of the session, its terms and its sites.
        sent: masked counters of all sites.
        given: shares that open them, by the site that sent them.
    """
    answers = {c: secure.split_parts(one, secure.KEY_BYTES) for c, one in given.items()}
    opened, _ = shares.restore_secrets(session, [*sent], [*sent], answers, of_counters=True)
    masked = [np.frombuffer(message[SIGNATURE_BYTES:], "<u8") for message in sent.values()]
    total = np.sum(masked, axis=0, dtype=np.uint64)
    return secure.unmask_sum(session, counters._mask_label(bound), [*sent], total, opened).tolist()


def list_attacks(honest: Sequence[int], own: Sequence[int], threshold: int) -> dict[str, list[Ask]]:
    """All attacks of one site, `honest[0]`, by name. Each ends with a sum, or a difference, of too few honest sites."""
    target, *rest = honest
    everyone, others = [*range(SITES)], sorted({*range(SITES)} - {target})
    few = [sorted([target, *own, *rest[:k]]) for k in range(max(1, threshold - len(own) - 1))]
    kinds = ("uploads", "scores", "sums")
    attacks = {
        "R5: sites without samples": [
            Ask(kind, everyone, weights={c: 0 for c in rest if c not in some}) for some in few for kind in kinds
        ],
        "R5: most vectors lost": [Ask("uploads", everyone, [some]) for some in few],
        "R5: little weight": [Ask("uploads", everyone, weights=dict.fromkeys(others, 1e-09))],
        "R7: the next model without it": [Ask(kind, some) for kind in kinds for some in (everyone, others)],
        "R7: it returns": [Ask("uploads", some) for some in (others, everyone)],
        "R7: the same model without it": [Ask("uploads", some, model="same") for some in (everyone, others)],
        "R7: its vector is lost in the next round": [Ask("uploads", everyone, lists) for lists in ((), [others])],
        "R12: another experiment without it": [
            Ask("uploads", some, model="first", experiment=k) for k, some in enumerate((everyone, others))
        ],
        "the round again without it": [Ask("uploads", some, round=1) for some in (everyone, others)],
        "two lists of one session": [Ask("uploads", everyone, [everyone, others])],
        "all leave, one after the other": [
            Ask("uploads", [s for s in everyone if s != c]) for c in (-1, *honest)
        ],
        "other weights": [Ask("uploads", everyone, weights={target: w}) for w in (1, 2)],
        "a state of its own": [Ask("uploads", everyone, older=older) for older in ((), (), (target,))],
        "R1, R2: most uploads neutral": [Ask("uploads", everyone, unable={*rest} - {*some}) for some in few],
        "R1, R2: it turns neutral": [Ask("uploads", everyone, unable=unable) for unable in (rest, ())],
        "R3, R4: it has no answer": [Ask(kind, everyone, unable=u) for kind in kinds[1:] for u in ([target], ())],
    }  # fmt: skip
    if own:
        for when in ("before", "after"):
            attacks[f"R1, R2: most uploads neutral, forged {when} the counters open"] = [
                Ask("uploads", everyone, unable={*rest} - {*some}, forged=when) for some in few
            ]
            attacks[f"R3, R4: it has no answer, forged {when} the counters open"] = [
                Ask(kind, everyone, unable=u, forged=when if u else "") for kind in kinds[1:] for u in ([target], ())
            ]
    return attacks


COALITIONS = ((3, 0), (4, 0), (4, 1), (4, 2), (5, 3))
"""Thresholds, each with a number of colluding sites that it tolerates."""
ATTACK_NAMES = [*list_attacks(range(4), [4], 4)]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> list[Site]:
    """Five sites that agree on no change of the sites in their sums."""
    return secured(tmp_path_factory.mktemp("sites"), "fedavg", agreed={"changes": 0}).sites


@pytest.mark.parametrize(("threshold", "colluders"), COALITIONS)
@pytest.mark.parametrize("attack", ATTACK_NAMES)
def test_no_coalition_isolates_fewer_honest_sites_than_the_page_states(
    attack: str, threshold: int, colluders: int, tmp_path: Path, sites: list[Site]
) -> None:
    """With c colluding sites, each sum and each combination of sums has T - c others, or none.

    Sites without checks are the control: with them, the same attack isolates fewer.
    """
    assert colluders <= secure.max_colluders(SITES, threshold)
    honest, own = [*range(SITES - colluders)], [*range(SITES - colluders, SITES)]
    asks = list_attacks(honest, own, threshold).get(attack, [])
    found = dict[bool, Any]()
    for defended in (True, False):
        one = Coalition(sites, tmp_path / f"{defended}", threshold, own, defended=defended)
        for ask in asks if defended or all(len(ask.present) >= threshold for ask in asks) else ():
            one.play(ask)
        found[defended] = one.rows and find_isolated(one.rows, threshold - colluders)
    assert not found[True]
    assert found[False] or any(len(ask.present) < threshold for ask in asks) or not asks


class Forger(Colluder):
    """A site without any check, whose counters take the powers of tokens that it has guessed from the sums."""

    def masked(self, round: int, nonce: bytes, vector: Any, counts: Sequence[int] = ()) -> bytes:
        sent = super().masked(round, nonce, vector, counts)
        guessed = np.sum([draw_counters(SITES, (True, True)) for _ in range(3)], axis=0, dtype=np.uint64)
        return self.replace_counters(sent, [-number % TOKEN_PRIME for number in guessed.tolist()])


def rogue_with(folder: Path, kind: type[Colluder]) -> Rogue:
    """A server, and five sites of which the last one is on its side."""
    rogue = Rogue(secured(folder, "fedavg", 4, agreed={"changes": 0}))
    site = rogue.sites[-1].site
    cast(Any, rogue.sites[-1].answers)._member = kind(site, signing_key_of(SITES - 1), site.folder)
    return rogue


def open_counters(session: Any, terms: SessionTerms) -> list[int]:
    """The sums of powers of all tokens in a session, from the shares that sites have sent."""
    sent = secure.split_parts(session.masked_counters(session.vectors), session.counters_bytes)
    return sums_of_powers(session.session, session.bound(terms), sent, session.shown)


def test_a_site_without_scores_sends_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With zeros, its scores would be the difference from the next sum, if a coalition could open this one."""
    rogue = rogue_with(tmp_path, Forger)
    score, keep, kept = Trainer.scores, SessionMember.keep_answer, dict[int, Any]()

    def look(member: SessionMember, numbers: Any, counts: Sequence[int]) -> None:
        kept[member._client] = numbers
        keep(member, numbers, counts)

    def diverge(trainer: Trainer, *args: Any, **more: Any) -> Any:
        return {} if trainer.site.client == 0 else score(trainer, *args, **more)

    monkeypatch.setattr(Trainer, "scores", diverge)
    monkeypatch.setattr(SessionMember, "keep_answer", look)
    assert sum_honestly(rogue, 1, None, rogue.model()).told.keys() <= {4}  # the colluding site
    assert 0.3 < float(np.mean(kept[0] >> np.uint64(63))) < 0.7
    assert len({*kept[0].tolist()}) == len(kept[0]) > 20


@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_forged_counters_open_no_sum_of_neutral_uploads(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four honest sites have no valid upload, and a sum needs four that have, but the last one vouches.

    It can do so blindly, or after the server has opened the counters and knows how to cancel all tokens.
    """
    rogue = rogue_with(tmp_path, Forger if when == "before" else Colluder)
    for site in rogue.sites[:3]:
        monkeypatch.setattr(site.trainer.node, "train", lambda *_: 1 / 0)
    terms, session = rogue.terms(1, rogue.download()), rogue.begin(1)
    for c in range(SITES):
        session.vector(c, terms, rogue.download())
    for c in range(SITES):
        session.count(c)
    if when == "after":
        assert session.counts(terms) == (5, 2, 0)
        cancelling = [-number % TOKEN_PRIME for number in open_counters(session, terms)]
        colluder = cast(Any, rogue.sites[-1].answers)._member
        session.vectors[4] = colluder.replace_counters(session.vectors[4], cancelling)
        assert session.counts(terms) == (5, 5, 0)
    for c in range(SITES):
        session.open(c)
    assert session.told.keys() == {4}  # the colluding site
    reason = "the digest of the counters" if when == "after" else "only [0-2] sites? answered from their samples"
    assert rogue.refused
    assert all(re.match(reason, refusal) for refusal in rogue.refused)


def test_a_site_gives_shares_for_one_digest_of_all_counters(tmp_path: Path) -> None:
    """Also after a restart. A site that was away then, and has given no shares for another digest, opens the sum."""
    rogue = Rogue(secured(tmp_path, "fedavg", 4, agreed={"changes": 0}))
    terms, session = rogue.terms(1, rogue.download()), rogue.begin(1)
    for c in range(SITES):
        session.vector(c, terms, rogue.download())
    for c in range(1, SITES):
        session.count(c)
    first, signed = session.shown[1], secure.join_parts({c: sent[:64] for c, sent in session.vectors.items()})
    site = rogue.sites[1].site
    cast(Any, rogue.sites[1].answers)._member = SessionMember(site, signing_key_of(1), site.folder)
    session.count(1)
    assert session.shown[1] == first
    assert not rogue.refused
    assert session.ask(1, "count", signed, bytes(32)) is None
    assert "the digest of the counters of a session cannot change" in rogue.refused[0]
    sent, openers = session.masked_counters(session.vectors), secure.join_parts(session.shown)
    told = [session.ask(c, "unmask", signed, sent, openers) for c in (0, 1, 1)]
    assert None not in told
    assert told[1] == told[2]
