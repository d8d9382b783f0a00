"""Sums over rounds and experiments: no combination of those that a server can have opened is of fewer than T sites."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from fedloom.errors import GivenUp, Refused, Stop
from fedloom_sites.deploy.rehearsal.combinations import Row, find_isolated
from fedloom_sites.deploy.secure import counters, shares
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure.changes import MAX_CHANGES, AnswerStates, CohortChanges, find_reweighted_sites
from fedloom_sites.deploy.secure.counters import ABSENT_COUNTS, ANSWERED_COUNTS, NEUTRAL_COUNTS, SILENT_COUNTS
from fedloom_sites.deploy.secure.member import SessionMember
from fedloom_sites.deploy.secure.opened import OpenedSums, read_checked
from fedloom_sites.deploy.secure.pending import PendingSum, PendingSums
from fedloom_sites.deploy.secure.protocol import ProtocolBroken
from fedloom_sites.deploy.secure.sums import SecureSums
from fedloom_sites.deploy.secure.terms import AnalysisStep, SessionTerms
from fedloom_sites.deploy.secure.vectors import UploadVector
from fedloom_sites.deploy.settings import Site
from fedloom_sites.deploy.site.approval import NAMES_FILE, check_data_name
from tests.deploy.scene import Scene, signing_key_of
from tests.deploy.sessions import losing, secured, sum_honestly, terms_of
from tests.deploy.test_coalitions import Colluder
from tests.deploy.test_dishonest import Rogue, rogue_of

pytestmark = pytest.mark.attack("a server that combines sums")

THRESHOLD = 3


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def test_the_solver_finds_what_is_planted() -> None:
    """R5, R7, R12, a neutral answer and other weights; nothing where all sums are of the same sites."""

    def row(sites: Collection[int], weights: Sequence[float] = (1.0,) * 5) -> Row:
        return {("uploads", c): weights[c] for c in sites}

    everyone = range(5)
    assert not find_isolated([row(everyone)] * 9, THRESHOLD)
    assert find_isolated([row([0])], THRESHOLD) == {(("uploads", 0),)}  # R5: what the two others send is known
    assert find_isolated([row(everyone), row([0, 1, 2, 3])], THRESHOLD) == {(("uploads", 4),)}  # R7, R12
    assert find_isolated([row([0, 1, 2]), row([0, 1, 3])], THRESHOLD) == {(("uploads", 2), ("uploads", 3))}
    assert find_isolated([row(everyone), row([0, 1, 3, 4])], THRESHOLD) == {(("uploads", 2),)}  # site 2 was neutral
    assert find_isolated([row(everyone), row(everyone, (1, 1, 1, 1, 2))], THRESHOLD) == {(("uploads", 4),)}
    assert not find_isolated([row(everyone), {("scores", c): 1.0 for c in range(4)}], THRESHOLD)  # of something else


class Federation:
    """The sites of several experiments on the same data, asked by a server that keeps every sum that it gets.

    Args:
        here: a deployment.
        weights: of each site in a mean of uploads; 0 for one without samples.
    """

    def __init__(self, here: Scene, weights: Sequence[float]) -> None:
        self.here, self.weights = here, {c: (w,) for c, w in enumerate(weights)}
        self.rows: list[Row] = []
        self.refused: list[str] = []
        self.begin(0)

    def begin(self, experiment: int) -> None:
        """Begin another experiment on the same data, under another key."""
        self.experiment, self.t = experiment, 0
        self.settings = [s.with_(fingerprint=f"{experiment:x}".ljust(64, "0")) for s in self.here.sites]
        self.members = [member_of(s) for s in self.settings]

    def sum(self, kind: str, present: Collection[int], arrived: Collection[int], neutral: Collection[int] = ()) -> bool:
        """Ask for a sum of some sites, of which some drop out before their vector arrives; whether it is opened."""
        self.t += kind == "uploads"
        t, n, members, nonce = self.t, len(self.members), self.members, os.urandom(16)
        model = os.urandom(32).hex()
        terms = SessionTerms(
            round=t, trains=kind == "uploads", sizes=((9, 3, 3),) * n, cohort=sorted(present),
            accepted=(0,) * len(present), download=model if kind == "uploads" else "",
            scored=t if kind == "scores" else -1, models=(model,) if kind == "scores" else (),
            question=AnalysisStep.create("sums", t, b"") if kind == "sums" else None,
        )  # fmt: skip
        weights = {c: self.weights[c] for c in present}
        try:
            adverts = secure.write_adverts([secure.read_adverts(members[c].keys(t, nonce))[0] for c in present])
            sealed = {
                c: secure.split_parts(members[c].shares(t, nonce, adverts), shares.SEALED_SHARE_BYTES) for c in present
            }
            inbox = {c: secure.join_parts({p: sealed[p][c] for p in present if p != c}) for c in present}
            vectors = dict[int, bytes]()
            for c in present:
                members[c].receive(t, nonce, inbox[c], terms, weights)
                is_neutral = c in neutral or (kind == "uploads" and members[c].stays_neutral)
                unable = NEUTRAL_COUNTS if kind == "uploads" else SILENT_COUNTS
                answer = unable if is_neutral else ANSWERED_COUNTS
                counts = answer if any(weights[c]) else ABSENT_COUNTS
                vectors[c] = members[c].masked(t, nonce, np.zeros(3, dtype=np.uint64), counts)
        except ProtocolBroken as error:
            self.refused.append(str(error))
            return False
        told = set[int]()
        signed = {c: vectors[c][:64] for c in arrived}
        if {*arrived} != {*present}:
            listed = secure.join_parts(dict.fromkeys(sorted(arrived), b""))
            signed = {c: self._ask(lambda c=c: members[c].agree(t, nonce, listed)) or bytes(64) for c in arrived}
        message = secure.join_parts(signed)
        sent = secure.join_parts({c: vectors[c][-counters.counters_bytes(len(present)) :] for c in arrived})
        digest = hashlib.sha256(sent).digest()
        shown = {c: self._ask(lambda c=c: members[c].count(t, nonce, message, digest)) for c in arrived}
        answers = {c: one for c, one in shown.items() if one}
        openers = secure.join_parts(answers)
        if len(answers) >= THRESHOLD:
            self._keep("counters", arrived)
        for c in arrived:
            if self._ask(lambda c=c: members[c].reveal(t, nonce, message, sent, openers)):
                told.add(c)
        if len(told) < THRESHOLD:
            return False
        known = {c for c in arrived if c in neutral or (kind == "uploads" and self.stayed(c))}
        self._keep(kind, {*arrived} - known)
        return True

    def stayed(self, c: int) -> bool:
        record = read_checked(self.settings[c].memory_folder / "opened.json")
        return bool(record and record["neutral"])

    def _keep(self, kind: str, sites: Collection[int]) -> None:
        alike = {c: float(any(w)) for c, w in self.weights.items()}
        weights = {c: w for c, (w,) in self.weights.items()} if kind == "uploads" else alike
        self.rows.append({(kind, c): weights[c] for c in sites if weights[c]})

    def _ask(self, answer: Any) -> Any:
        try:
            return answer()
        except ProtocolBroken as error:
            self.refused.append(str(error))
            return None

    def changes(self) -> dict[str, int]:
        """The most changes that any site has counted of each."""
        most = dict[str, int]()
        for site in self.settings:
            record = read_checked(site.memory_folder / "opened.json") or {"sites": {}}
            for name, count in record["sites"].get("changes", {}).items():
                most[name] = max(most.get(name, 0), count)
        return most


def member_of(site: Site) -> SessionMember:
    return SessionMember(site, signing_key_of(site.client), site.folder)


KINDS = ("uploads", "uploads", "scores", "sums")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("changes", [0, MAX_CHANGES])
def test_no_combination_of_sums_isolates_a_site(changes: int, seed: int, tmp_path: Path) -> None:
    """50 random rounds in two experiments: sites drop out, join late, have no samples, and answer neutrally.

    Without any agreed change the server finds no sum of fewer than T sites. With some it finds sites alone that have
    changed, each as often as was agreed on and no oftener. A site that answers neutrally is known as one that has left.
    """
    draw = np.random.default_rng([changes, seed])
    fed = Federation(secured(tmp_path, "fedavg", THRESHOLD, agreed={"changes": changes}), (3, 1, 2, 5, seed % 2))
    opened, last = 0, list[int]()
    joins = {c: int(draw.choice([0, 0, 0, 9])) for c in range(5)}
    for t in range(50):
        if t == 25:
            fed.begin(1)
        here = [c for c in range(5) if t >= joins[c] and (t < 4 or draw.random() > 0.1)]
        here = last if last and draw.random() > 0.5 else here  # as a server asks that wants a sum
        arrived = [c for c in here if draw.random() > 0.05]
        if len(here) >= THRESHOLD <= len(arrived):
            kind = str(draw.choice(KINDS))
            often = 0.1 if kind != "uploads" else 0.02 if changes and seed == 3 else 0.0
            neutral = [c for c in here if draw.random() < often]
            if fed.sum(kind, here, arrived, neutral):
                opened, last = opened + 1, arrived
    found = {c for few in find_isolated(fed.rows, THRESHOLD) for _, c in few}
    assert opened >= 8
    assert fed.refused
    turned = {c for c in range(5) if (read_checked(fed.settings[c].memory_folder / "opened.json") or {}).get("turns")}
    known = turned | {c for c in range(5) if f"site-{c}" in fed.changes()}
    steady = {c for c, weight in fed.weights.items() if any(weight)} - known
    assert max(fed.changes().values(), default=0) <= changes
    assert len(steady) >= THRESHOLD or turned
    assert found <= known or len(steady) < THRESHOLD
    assert changes or not found


@pytest.mark.parametrize("changes", [0, MAX_CHANGES])
def test_no_combination_of_sums_isolates_a_site_for_a_server_with_a_site_of_its_own(
    changes: int, tmp_path: Path
) -> None:
    """The same rounds with T = 4, where one site does whatever the server wants: T - 1 of the others remain in all."""
    draw, own = np.random.default_rng(changes), 4
    fed = Federation(secured(tmp_path, "fedavg", 4, agreed={"changes": changes}), (3, 1, 2, 5, 4))
    opened = 0
    for t in range(40):
        if t in (0, 20):
            fed.begin(t)
            site = fed.settings[own]
            fed.members[own] = Colluder(site, signing_key_of(own), site.folder)
        here = [c for c in range(5) if c == own or t < 3 or draw.random() > 0.1]
        arrived = [c for c in here if c == own or draw.random() > 0.05]
        if len(here) >= 4 <= len(arrived):
            opened += fed.sum(str(draw.choice(KINDS)), here, arrived)
    rows = [{key: weight for key, weight in row.items() if key[1] != own} for row in fed.rows]
    found = {c for few in find_isolated(rows, 3) for _, c in few}
    known = {c for c in range(own) if f"site-{c}" in fed.changes()}
    assert opened >= 8
    assert fed.refused
    assert max(fed.changes().values(), default=0) <= changes
    assert found <= known
    assert changes or not found


def test_sites_that_leave_one_after_the_other_leave_a_threshold_that_never_has(tmp_path: Path) -> None:
    """If all but one left once, their differences are known, and so is what remains of a sum: the last one's."""
    for steady, isolates in ((None, set[int]()), (0, {*range(5)})):
        agreed = {} if steady is None else {"steady": steady}
        fed = Federation(secured(tmp_path / f"{steady}", "fedavg", THRESHOLD, agreed=agreed), (1,) * 5)
        for gone in (4, 3, 2, 1):
            fed.sum("uploads", range(5), range(5))
            rest = [c for c in range(5) if c != gone]
            assert fed.sum("uploads", rest, rest) is (gone >= THRESHOLD or steady == 0)
        found = {c for few in find_isolated(fed.rows, THRESHOLD) for kind, c in few if kind == "uploads"}
        assert found == (isolates or {3, 4})


def test_a_site_that_is_renamed_has_no_further_changes(tmp_path: Path) -> None:
    """A site that has used its changes is in no sum, also if the next agreement gives it another name.

    The site's own settings may have the new name as well, or only the list by which the other sites count changes.
    """
    fed = Federation(secured(tmp_path, "fedavg", THRESHOLD, agreed={"changes": 1}), (1,) * 5)
    rest = range(4)
    assert fed.sum("uploads", range(5), range(5))
    assert fed.sum("uploads", rest, rest)
    assert not fed.sum("uploads", range(5), range(5))
    secure_of = fed.settings[4].secure
    assert secure_of is not None
    renamed = secure_of.with_(names=(*secure_of.names[:4], "another"))
    for experiment, name in enumerate(("another", fed.settings[4].site), 1):
        fed.here = fed.here._replace(
            sites=[s.with_(secure=renamed, **({"site": name} if s.client == 4 else {})) for s in fed.here.sites]
        )
        fed.begin(experiment)
        assert not fed.sum("uploads", range(5), range(5))
        assert "this site took part in earlier sums over these data under another name" in fed.refused[-1]
    assert fed.sum("uploads", rest, rest)


def test_without_the_memory_the_same_rounds_isolate_every_site(tmp_path: Path) -> None:
    """The control: sites that sign any change open sums that give every upload away."""
    draw = np.random.default_rng(0)
    fed = Federation(secured(tmp_path, "fedavg", THRESHOLD, agreed={"changes": 10**6, "steady": 0}), (3, 1, 2, 5, 4))
    for _ in range(30):
        here = sorted(draw.permutation(5)[: draw.integers(4, 6)].tolist())
        assert fed.sum("uploads", here, here)
    found = find_isolated(fed.rows, THRESHOLD)
    assert {few for few in found if few[0][0] == "uploads"} == {(("uploads", c),) for c in range(5)}


def test_a_site_that_turns_neutral_too_often_stays_neutral(tmp_path: Path) -> None:
    """Each turn is a difference of its last upload; in the end its uploads stay known, and refuse nothing."""
    fed = Federation(secured(tmp_path, "fedavg", THRESHOLD), (1,) * 5)
    for t in range(12):
        assert fed.sum("uploads", range(5), range(5), [4] if t % 2 else [])
        assert fed.sum("sums", range(5), range(5))  # what it answers to questions is no turn
    record = read_checked(fed.settings[4].memory_folder / "opened.json")
    assert record is not None
    assert (record["neutral"], record["turns"]) == (True, MAX_CHANGES - 1)
    assert all(not (read_checked(s.memory_folder / "opened.json") or {})["turns"] for s in fed.settings[:4])
    with_it = [("uploads", 4) in row for row in fed.rows if ("uploads", 0) in row]
    assert with_it == [True, False, True, *[False] * 9]


@pytest.mark.parametrize("kind", ["sums", "scores"])
def test_a_site_without_an_answer_keeps_a_sum_closed_and_trains_on(kind: str, tmp_path: Path) -> None:
    """Four of five sites answer, and three are enough; but the fifth would be the difference to the next sum.

    However often it has no answer to a question, its uploads stay what they are.
    """
    fed = Federation(secured(tmp_path, "fedavg", THRESHOLD, agreed={"changes": 1}), (1,) * 5)
    for t in range(1, 5):
        assert fed.sum("uploads", range(5), range(5))
        assert fed.sum(kind, range(5), range(5), [4] if t % 2 else []) is (t % 2 == 0)
    assert sum("1 of the sites could not answer" in reason for reason in fed.refused) == 10
    assert {len(row) for row in fed.rows} == {5}
    assert not find_isolated(fed.rows, THRESHOLD)


def test_weights_that_change_are_changes_of_a_site() -> None:
    """Two sums of the same sites with other weights give a site away, whichever weight is the reference."""
    before = {"a": [3.0], "b": [1.0], "c": [2.0], "d": [5.0]}
    assert not find_reweighted_sites(before, {c: [w[0] / 7] for c, w in before.items()})
    assert find_reweighted_sites(before, {**before, "d": [5.001]}) == {"d"}
    assert find_reweighted_sites(before, {c: [w[0] * (1 if c == "a" else 2)] for c, w in before.items()}) == {"a"}
    assert find_reweighted_sites(before, {**before, "b": [0.0]}) == {"b"}
    states = AnswerStates("one", None, {})
    first = CohortChanges({}, 1).add_sum([*before], {"uploads": before}, states)
    assert first.record["changes"] == {}
    second = first.add_sum([*before], {"uploads": {**before, "d": [6.0]}}, states)
    assert second.record["changes"] == {"d": 1}
    with pytest.raises(
        ProtocolBroken,
        match="previous sum in d; a site may leave the sums over the same data, or return, at most 1 times",
    ):
        second.add_sum([*before], {"uploads": before}, states)
    assert second.add_sum([*before], {"scores": before}, states).record["changes"] == {
        "d": 1
    }  # a sum of something else


# ------------------------------------------------------------------------------------------------- played at real sites


def test_nearly_the_same_model_in_the_next_round_without_a_site(tmp_path: Path) -> None:
    """R7: 1e-16 more in the model. Without an agreed change no site signs; else as often as is agreed on."""
    rogue, rest = rogue_of(tmp_path / "none", changes=0), [0, 1, 2, 3]
    assert sum_honestly(rogue, 1, rogue.download()).told
    session = sum_honestly(rogue, 2, rogue.download(1e-16), clients=rest)
    assert not session.told
    assert not session.vectors
    assert any("differ from the previous sum in site-4" in reason for reason in rogue.refused)
    assert sum_honestly(rogue, 3, rogue.download(1e-16)).told.keys() == {*range(5)}
    rogue = rogue_of(tmp_path / "two", changes=2)
    assert sum_honestly(rogue, 1, rogue.download()).told
    assert sum_honestly(rogue, 2, rogue.download(0.1), clients=rest).told
    assert sum_honestly(rogue, 3, rogue.download(0.2)).told
    assert not sum_honestly(rogue, 4, rogue.download(0.3), clients=rest).told


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        ("without a site", "differ from the previous sum in site-4"),
        ("with an older state", "differ from the previous sum in site-4"),
        ("with most uploads neutral", "only 3 sites answered from their samples, but a sum needs 4"),
    ],
)
def test_attacks_of_a_server_with_a_site_of_its_own(
    attack: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site signs and opens whatever it is asked; the others do not, and three of four must, with T = 4."""
    rogue, own = Rogue(secured(tmp_path, "scaffold", 4, agreed={"changes": 0, "norm_bound": 5.0}, **FULL_BATCH)), 3
    answers = cast(Any, rogue.sites[own].answers)
    answers._member = Colluder(rogue.sites[own].site, signing_key_of(own), rogue.sites[own].site.folder)
    assert sum_honestly(rogue, 1, rogue.download()).is_open
    if attack == "without a site":
        session = sum_honestly(rogue, 2, rogue.download(1e-16), clients=[0, 1, 2, own], accepted=(1,) * 4)
    elif attack == "with an older state":
        session = sum_honestly(rogue, 2, rogue.download(1e-16), accepted=(1, 1, 1, 1, 0))
    else:
        for site in rogue.sites[:2]:
            monkeypatch.setattr(site.trainer.node, "train", lambda *_: 1 / 0)
        session = sum_honestly(rogue, 2, rogue.download(1e-16), accepted=(1,) * 5)
    assert not session.is_open
    assert {*session.told} <= {own}
    assert any(reason in one for one in rogue.refused)


FULL_BATCH: dict[str, Any] = {"local": {"lr": 0.05, "epochs": 1, "batch_size": 200}}


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_site_that_is_told_that_its_last_upload_was_lost(
    is_checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sums of all sites and nearly the same model; the server names an older state to one of them.

    In the second round of SCAFFOLD the others send no change of their control variates, so the sum of these is the
    gradient of that site alone. Without the check, the attack succeeds.
    """
    if not is_checked:
        monkeypatch.setattr(CohortChanges, "_find_moved_sites", lambda self, states: set())
    rogue = Rogue(secured(tmp_path, "scaffold", agreed={"changes": 0}, **FULL_BATCH))
    assert sum_honestly(rogue, 1, rogue.download()).told
    bases = (1, 1, 1, 1, 0)
    session = sum_honestly(rogue, 2, rogue.download(1e-16), accepted=bases)
    assert bool(session.told) is not is_checked
    if is_checked:
        assert any("differ from the previous sum in site-4" in reason for reason in rogue.refused)
        assert sum_honestly(rogue, 2, rogue.download(1e-16), accepted=(1,) * 5).told
    else:
        job, forms = rogue.trainer.job, rogue.trainer.forms
        total = session.total(rogue.terms(2, rogue.download(1e-16), accepted=bases))
        sums, _, _ = UploadVector(job, forms.idle).decode(total, 5, 1.0)
        kept = rogue.sites[4]._memory.read(2)
        assert kept is not None
        gradient = kept.group("rows")["ci"].double()
        assert float(gradient.norm()) > 0.1
        assert float((sums["dc"] - gradient).norm()) < 1e-3 * float(gradient.norm())


@pytest.mark.parametrize(
    ("bases", "moved"),
    [
        ({"a": 4, "b": 4, "c": 4, "d": 4}, set()),  # the sum of round 4 was accepted
        ({"a": 3, "b": 3, "c": 3, "d": 1}, set()),  # it was given up; d had returned in it
        ({"a": 4, "b": 4, "c": 4, "d": 1}, {"d"}),
        ({"a": 4, "b": 4, "c": 3, "d": 4}, {"c"}),
        ({"a": 3, "b": 3, "c": 4, "d": 1}, {"c"}),
        ({"a": 2, "b": 4, "c": 4, "d": 4}, {"a"}),
        ({"a": 4, "b": 4, "c": 4, "e": 0}, {"d", "e"}),  # another site, whose state no sum has shown
    ],
)
def test_states_that_differ_are_changes_of_a_site(bases: dict[str, int], moved: set[str]) -> None:
    weights = {"uploads": dict.fromkeys("abcde", (1.0,))}
    first = CohortChanges({}, 1).add_sum("abcd", weights, AnswerStates("one", 4, {"a": 3, "b": 3, "c": 3, "d": 1}))
    assert first.changed([*bases], weights, AnswerStates("one", 5, bases)) == moved
    scored = first.add_sum("abcd", {}, AnswerStates("one", None, dict.fromkeys("abcd", 4)))
    assert scored.changed([*bases], weights, AnswerStates("one", 5, bases)) == moved  # a sum of scores moves no state
    if moved == {"d"}:  # a sum from another state of d differs from the next one, as a sum without d does
        after = first.add_sum([*bases], weights, AnswerStates("one", 5, bases))
        following = AnswerStates("one", 6, dict.fromkeys(bases, 5))
        assert after.changed([*bases], weights, following) == moved
        with pytest.raises(ProtocolBroken, match="differ from the previous sum in d"):
            after.add_sum([*bases], weights, following)
    again = first.changed("abcd", weights, AnswerStates("two", 1, {"a": 0, "b": 0, "c": 0, "d": 2}))
    assert again == {"d"}  # nothing is known of an experiment's first states, but that they are the same


def test_experiments_in_turn_cost_no_change_and_hide_none() -> None:
    """Each experiment has rounds and states of its own; a record of an earlier version has those of one."""
    weights = {"uploads": dict.fromkeys("abcd", (1.0,))}

    def after(record: CohortChanges, experiment: str, t: int, d: int, lost: int = 0) -> CohortChanges:
        bases = {**dict.fromkeys("abc", t - 1), "d": d}
        return record.add_sum("abcd", weights, AnswerStates(experiment, t + lost, bases))

    returned = after(after(CohortChanges({}, 9), "one", 3, 2), "one", 4, 1)  # d was not in the sum of round 3
    assert returned.record["changes"] == {"d": 1}
    other = after(returned, "two", 1, 0)
    assert other.record["changes"] == {"d": 1}
    assert after(other, "one", 4, 1, 1).record["changes"] == {"d": 2}, "the sum of round 4 was given up"
    assert after(returned, "one", 4, 1) is returned, "the same sum again"
    assert after(after(other, "two", 2, 1), "one", 5, 4).record["changes"] == {"d": 2}
    quiet = after(after(after(after(CohortChanges({}, 0), "one", 1, 0), "two", 1, 0), "one", 2, 1), "two", 2, 1)
    assert quiet.record["changes"] == {}
    old = returned.record | {
        "states": {"experiment": "one", "round": 4, "bases": {**dict.fromkeys("abc", 3), "d": 1}}, "moved": ["d"],
    }  # fmt: skip
    assert after(CohortChanges(old, 9), "one", 5, 4).record["changes"] == {"d": 2}


def opened_sums(folder: Path, changes: int, data: str = "data") -> OpenedSums:
    return OpenedSums(folder / "state" / "one", folder / "state" / f"data-{data}", "abcde", changes, 0, 0)


def test_a_finished_round_can_be_repeated_after_a_site_has_returned(tmp_path: Path) -> None:
    """The server lost its newest checkpoints; the site that was away in the round has no change left.

    The repeated sum is that of the round: with another site, model or weight it stays closed.
    """
    opened, ones = opened_sums(tmp_path, 2), {"uploads": {f"{c}": (1.0,) for c in range(5)}}
    bases = [dict.fromkeys(map(str, range(n)), t) for t, n in enumerate((5, 4, 5))]

    def sum_round(t: int, model: str = "", weights: Any = ones) -> None:
        asked = ({"uploads": t}, {"uploads": model or f"model {t}"}, bases[t - 1])
        opened.check_change(*asked, "", weights)
        opened.reveal(os.urandom(4).hex(), *asked, 3, weights=weights, counts=ANSWERED_COUNTS)

    for t in (1, 2, 3, 2, 3):
        sum_round(t)
    with pytest.raises(ProtocolBroken, match="differ from the previous sum in e"):
        sum_round(2, "another model")
    heavy = {"uploads": {**ones["uploads"], "3": (2.0,)}}  # of one more sample at d, which would be the difference
    sum_round(3, weights=heavy)
    record = read_checked(tmp_path / "state" / "data-data" / "opened.json")
    assert record is not None
    assert record["sites"]["changes"] == {"e": 2, "d": 1}


def test_uploads_are_summed_again_without_the_scores_that_were_given_up(tmp_path: Path) -> None:
    """The site that lost its last state has no change left; the second sum of the round is no further change.

    The server counts as the sites do.
    """
    opened, ones = opened_sums(tmp_path, 2), {f"{c}": (1.0,) for c in range(5)}
    here, notes = secured(tmp_path / "server", "fedavg", agreed={"changes": 2}), list[Any]()
    assert here.server.secure is not None
    settings = here.server.with_(secure=here.server.secure.with_(names=tuple("abcde")))
    server = SecureSums(cast(Any, SimpleNamespace(note=lambda *args: notes.append(args), members={})), settings)
    for t, sums in enumerate(({"uploads": 1}, {"uploads": 2, "scores": 1}, {"uploads": 2}, {"uploads": 3}), 1):
        r = sums["uploads"]
        bases = dict.fromkeys(ones, r - 1) | ({"4": 0} if r == 2 else {})
        asked, weights = {what: f"{what} {r}" for what, r in sums.items()}, dict.fromkeys(sums, ones)
        opened.check_change(sums, asked, bases, "", weights)
        opened.reveal(os.urandom(4).hex(), sums, asked, bases, 3, weights=weights)
        terms = terms_of(5).with_(
            round=r, accepted=(*bases.values(),), scored=sums.get("scores", -1), figures=("3",) * 5 * ("scores" in sums)
        )
        asked_sites = (terms, dict.fromkeys(range(5), (1.0,)), range(5))
        server._check_leaving(*asked_sites)
        server._enter_change(*asked_sites)
        expected = {} if t == 1 else {"e": min(2, t - 1 - (t > 2))}
        assert (read_checked(tmp_path / "state" / "data-data" / "opened.json") or {})["sites"]["changes"] == expected
        assert (read_checked(here.server.checkpoints / "summed-sites.json") or {})["changes"] == expected
    assert [round for _, round, *_ in notes] == [2, 3]


def test_sites_whose_names_are_numbers_stay_in_the_sums(tmp_path: Path) -> None:
    """Site 1 is client 0, and client 1 is site 2."""
    ones = {"uploads": {f"{c}": (1.0,) for c in range(3)}}
    opened = OpenedSums(tmp_path / "one", None, "123", MAX_CHANGES, 3, 0)
    for t in range(1, 4):
        asked = ({"uploads": t}, {"uploads": f"model {t}"}, dict.fromkeys(ones["uploads"], t - 1))
        opened.check_change(*asked, "", ones)
        opened.reveal(os.urandom(4).hex(), *asked, 3, weights=ones)
    record = read_checked(tmp_path / "one" / "session" / "opened.json") or {}
    assert (record["sites"]["sites"], record["sites"]["changes"]) == (["1", "2", "3"], {})


def test_sums_over_other_data_are_no_lost_record(tmp_path: Path) -> None:
    """The folder of the second data exists before the first sum over them, as after `fedloom deploy snapshot`."""
    first, second = opened_sums(tmp_path, 4), opened_sums(tmp_path, 4, "others")
    first.begin(b"session", None)
    (tmp_path / "state" / "one").mkdir()
    sent = {"kind": "unmask", "status": "ok", "round": 1}
    (tmp_path / "state" / "one" / "sent.jsonl").write_text(json.dumps(sent) + "\n")
    (tmp_path / "state" / "data-others").mkdir()
    second.begin(b"session", None)
    path = tmp_path / "state" / "data-others" / "opened.json"
    assert (read_checked(path) or {})["sites"] == {}
    path.unlink()
    (tmp_path / "state" / "data-data" / "opened.json").unlink()
    first.begin(b"session", None)  # now nobody knows which sites the sum of round 1 had
    assert (read_checked(tmp_path / "state" / "data-data" / "opened.json") or {})["sites"] == {"lost": True}


def test_a_kept_sum_of_an_earlier_version_is_summed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server stopped after a sum of scores, and was upgraded to a version that sums fewer numbers."""
    here = secured(tmp_path, "fedavg")
    sums, terms = SecureSums(cast(Any, None), here.server), terms_of(5)
    advert = secure.make_advert(b"", 0, secure.new_secrets(), signing_key_of(0))
    new, old = (
        PendingSum(
            1, bytes(16), secure.write_adverts([advert]), b"", [0], [0], {0: bytes(64)}, terms.sums,
            terms.model_digests, np.zeros(length, dtype=np.uint64), told=True,
        )
        for length in (4, 6)
    )  # fmt: skip
    monkeypatch.setattr(sums, "_collect_masked_sum", lambda *_: new)
    weights = dict.fromkeys(range(5), (1.0,))
    for kept, length in ((old, 4), (old, 6)):  # the second one is of this version
        PendingSums(here.server.checkpoints).keep(kept)
        assert sums.sum(terms, weights, cast(Any, None), length, lambda total, _: len(total)).value == length
    with pytest.raises(GivenUp, match="already summed for a different model"):  # the server went back, and lost a round
        sums.sum(terms.with_(download="1" * 64), weights, cast(Any, None), 6, lambda total, _: len(total))


def test_another_experiment_on_the_same_data_without_a_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R12: the study is begun again with the same seed and the same first model, a new key and other rows."""
    first, rest = rogue_of(tmp_path / "first"), [0, 1, 2, 3]
    download = first.download()
    assert sum_honestly(first, 1, download).told
    for number, rounds in enumerate((5, 6)):
        again = Rogue(second_experiment(tmp_path, first, rounds, data_name="data"))
        assert again.here.sites[0].fingerprint != first.here.sites[0].fingerprint
        assert again.download() == download
        again_without = sum_honestly(again, 1, download, clients=rest)
        assert not again_without.told
        assert any("on these models were already summed in another round" in reason for reason in again.refused)
        assert sum_honestly(again, 1, download).told.keys() == {*range(5)}, number
    other = Rogue(second_experiment(tmp_path, first, 7, data_name="other"))
    assert not other.begin(1, rest).sealed  # another name of the same source
    assert all("does not accept the data_name of the agreement" in one for one in other.refused)
    assert "knows these data under the name 'data', but the agreement calls" in capsys.readouterr().err
    for site in other.sites:  # as the refusal says, where the source contains other patients now
        path = site.site.state / NAMES_FILE
        with pytest.raises(Refused, match="knows these data under the name 'data'") as told:
            check_data_name(site.site)
        [change] = re.findall('change its line to ("[0-9a-f]{64}": "other") in', str(told.value))
        path.write_text(json.dumps({}))  # a memory from before there were names: no name begins another memory
        with pytest.raises(Refused, match="remembers sums or budgets of data named data, which may be .*") as told:
            check_data_name(site.site)
        assert f"add {change} to" in str(told.value)
        path.write_text(f"{{{change}}}")
    assert sum_honestly(Rogue(other.here), 1, download, clients=rest).told


def second_experiment(folder: Path, first: Rogue, rounds: int, **changes: Any) -> Scene:
    """The deployment of another experiment file at the same sites, with the state that these have."""
    cut = {"kind": "dirichlet", "clients": 5, "alpha": 0.5}
    here = secured(
        folder / f"{rounds}",
        "fedavg",
        client_weights="samples",
        aggregation_weights={"kind": "samples"},
        partition=cut,
        rounds=rounds,
    )
    states = [s.state for s in first.here.sites]
    sites = [s.with_(state=state, **changes) for s, state in zip(here.sites, states, strict=True)]
    return here._replace(sites=sites, server=here.server.with_(**changes))


# ---------------------------------------------------------------------------------------------- an honest server's run


def test_a_site_that_stays_away_is_left_out_by_signature_and_returns(tmp_path: Path) -> None:
    """Two changes; a site that answers late, but within the patience, costs none."""
    here, late = secured(tmp_path, "flame", rounds=5), list[int]()

    def fault(node: int, message: Any, reply: Any) -> Any:
        t, kind = int(message.content["head"]["round"]), str(message.content["head"]["kind"])
        if (t, kind, node) == (2, "masked", 103) and not late:
            late.append(t)
            return None
        return losing({(3, "masked"): [4], (4, "keys"): [4]})(node, message, reply)

    assert here.serve(here.grid(fault), patience=3.0) is Stop.DONE
    assert late
    lines = here.audit("other sites")
    assert [(line["round"], line["reason"].partition(": ")[2]) for line in lines] == [
        (3, "the sites have signed a sum without site-4 (change 1 of 4)"),
        (5, "the sites have signed a sum with site-4 (change 2 of 4)"),
    ]
    assert [len(line["sites"]) for line in lines] == [4, 5]


def test_without_a_change_left_the_run_waits_or_the_site_stays_out(tmp_path: Path) -> None:
    here = secured(tmp_path / "none", "fedavg", rounds=3, agreed={"changes": 0})
    assert here.serve(here.grid(losing({(2, "keys"): [4], (2, "masked"): [4]}))) is Stop.TOO_FEW
    detail = here.summary()["detail"]
    assert "previous sum in site-4; a site may leave the sums over the same data, or return, at most 0 times" in detail
    assert "The run continues when the sites of that sum are back" in detail
    assert here.serve() is Stop.DONE
    assert not here.audit("other sites")
    here = secured(tmp_path / "one", "fedavg", rounds=4, agreed={"changes": 1})
    assert here.serve(here.grid(losing({(2, "keys"): [4]}))) is Stop.DONE
    assert {line["round"] for line in here.audit("stays out")} >= {3, 4}
    assert len(here.audit("other sites")) == 1
