"""Nodes that are online and do not answer, or whose messages are lost: they cost one deadline, then nobody waits."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Error, Message

from fedloom.errors import Stop
from fedloom.storage import disk
from fedloom_sites.deploy.protocol.envelope import HEAD_RECORD
from tests.deploy.grid import Clock, Delay, FakeGrid
from tests.deploy.scene import FIRST, Scene, scene

FEW = {
    "partition": {"kind": "iid", "clients": 3, "max_train_per_client": 12},
    "evaluate": {"every": 1},
    "rounds": 4,
    "client_weights": "uniform",  # by samples, a run begins when all sites are there
}
WAIT = {"deadline": 600.0, "ttl": 1200.0, "patience": 600.0, "quorum": 2}
SLACK = 30.0
"""Seconds of polling in a whole run, beyond what a node is waited for."""
MUTE = 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def silent(when: Callable[[str, int], bool]) -> Delay:
    """The mute node's replies to messages of a kind and round never arrive."""

    def delay(node: int, message: Message) -> float:
        head = message.content[HEAD_RECORD]
        return math.inf if node == FIRST + MUTE and when(str(head["kind"]), int(head["round"])) else 0.0

    return delay


def timed(here: Scene, clock: Clock, delay: Delay) -> FakeGrid:
    return FakeGrid({FIRST + c.site.client: c.answer for c in here.clients()}, None, clock, delay)


def mute(here: Scene) -> list[tuple[str, int, str | None]]:
    return [(r["kind"], r["node"], r.get("site")) for r in here.audit("mute")]


def test_a_node_that_is_mute_from_the_start(tmp_path: Path, clock: Clock) -> None:
    here = scene(tmp_path, "fedavg", **FEW)
    grid = timed(here, clock, silent(lambda *_: True))
    assert here.serve(grid, **WAIT) is Stop.DONE
    assert clock.now <= 600 + SLACK
    assert mute(here) == [("hello", FIRST + MUTE, None)]
    hellos = [m for m in grid.sent if m.metadata.dst_node_id == FIRST + MUTE]
    assert len(hellos) == 1


def test_a_mute_node_of_an_earlier_run_is_named_by_its_site(tmp_path: Path, clock: Clock) -> None:
    here = scene(tmp_path, "fedavg", **FEW)
    kind = {"train": 3}
    grid = timed(
        here,
        clock,
        lambda _node, message: (
            math.inf if kind.get(message.content[HEAD_RECORD]["kind"]) == message.content[HEAD_RECORD]["round"] else 0
        ),
    )
    assert here.serve(grid, **WAIT) is Stop.TOO_FEW
    again = timed(here, clock, silent(lambda *_: True))
    assert here.serve(again, **WAIT) is Stop.DONE
    assert mute(here)[-1] == ("hello", FIRST + MUTE, "site-1")


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("train", "fedavg"),
        ("score", "fedavg"),
        ("ask", {"algorithm": "fedavg", "sampler": {"kind": "power-of-choice", "clients": 3, "candidates": 3}}),
        ("train", "flame"),
    ],
)
def test_a_node_that_falls_mute_in_any_phase(kind: str, method: str, tmp_path: Path, clock: Clock) -> None:
    """All that it is sent from round 2 on stays without an answer: the run loses one deadline, not one per phase."""
    here = scene(tmp_path, method, **FEW)
    seen = [False]

    def falls(what: str, round: int) -> bool:
        seen[0] |= what == kind and round >= 2
        return seen[0]

    assert here.serve(timed(here, clock, silent(falls)), **WAIT) is Stop.DONE
    assert seen[0]
    assert clock.now <= 600 + SLACK
    assert mute(here) == [(kind, FIRST + MUTE, "site-1")]
    assert len(here.audit("accepted", kind="train")) >= 8


def test_a_node_that_is_back_is_waited_for_again(tmp_path: Path, clock: Clock) -> None:
    """Mute in round 2, slow from round 3 on: that round does not wait, but its late answer is a sign of life."""
    here = scene(tmp_path, "fedavg", **{**FEW, "rounds": 8, "evaluate": {"every": 100}})

    def delay(node: int, message: Message) -> float:
        head = message.content[HEAD_RECORD]
        if head["kind"] != "train":
            return 0.0
        slow = {2: math.inf, 3: 60.0, 4: 60.0, 5: 60.0, 6: 60.0, 7: 60.0, 8: 60.0}.get(int(head["round"]), 0.0)
        return slow if node == FIRST + MUTE else 30.0

    assert here.serve(timed(here, clock, delay), **WAIT) is Stop.DONE
    rounds = {r["round"] for r in here.audit("accepted", kind="train", client=MUTE)}
    assert rounds == {1, 4, 5, 6, 7, 8}
    late = here.audit("rejected", kind="train", client=MUTE)
    assert [(r["round"], r["step"], r["site"]) for r in late] == [(3, 1, "site-1")]
    assert clock.now <= 600 + 7 * 60 + SLACK


def test_a_greeting_that_is_answered_late_counts(tmp_path: Path, clock: Clock) -> None:
    """A site that reads its data for longer than the deadline joins when it has."""
    here = scene(tmp_path, "fedavg", **{**FEW, "evaluate": {"every": 100}})

    def delay(node: int, message: Message) -> float:
        hello = message.content[HEAD_RECORD]["kind"] == "hello"
        return 700.0 if hello and node == FIRST + MUTE else 0.0 if hello else 60.0

    assert here.serve(timed(here, clock, delay), **WAIT) is Stop.DONE
    assert {r["round"] for r in here.audit("accepted", kind="train", client=MUTE)} == {3, 4}  # round 2: 660 s to 720 s
    assert not here.audit("rejected")


def test_a_node_whose_messages_are_lost_every_time(tmp_path: Path, clock: Clock) -> None:
    """Flower reports each after a minute: the first greeting costs that, no later one anything."""
    here = scene(tmp_path, "fedavg", **FEW)

    def fault(node: int, message: Message, reply: Message) -> Message:
        if node != FIRST + MUTE:
            return reply
        lost = Message(Error(8, "ClientApp stopped responding"), reply_to=reply)
        lost.metadata.__dict__.update(reply.metadata.__dict__)
        return lost

    grid = timed(here, clock, lambda node, _: 57.0 if node == FIRST + MUTE else 0.0)
    grid.fault = fault
    assert here.serve(grid, **{**WAIT, "patience": 60.0}) is Stop.DONE
    assert clock.now <= 60 + 57 + SLACK
    assert mute(here) == [("hello", FIRST + MUTE, None)]


def test_a_site_with_another_node_replaces_its_mute_one(tmp_path: Path, clock: Clock) -> None:
    here = scene(tmp_path, "fedavg", **FEW)
    grid = timed(here, clock, silent(lambda kind, round: kind == "train" and round >= 2))
    real = grid.nodes[FIRST + MUTE]

    def delay(node: int, message: Message) -> float:
        if message.content[HEAD_RECORD]["round"] == 3:
            grid.nodes[FIRST + 50] = real
        return silent(lambda kind, round: round >= 2)(node, message)

    grid.delay = delay
    assert here.serve(grid, **WAIT) is Stop.DONE
    assert {r["round"] for r in here.audit("accepted", kind="train", client=MUTE)} == {1, 4}


def test_a_mute_site_counts_as_absent_after_some_rounds_until_it_answers_a_greeting(
    tmp_path: Path, clock: Clock
) -> None:
    """It is asked in vain in rounds 2, 3 and 4, and costs one deadline; then it is sent a greeting and no models."""
    here = scene(tmp_path, "fedavg", **{**FEW, "rounds": 9, "evaluate": {"every": 100}})

    def delay(node: int, message: Message) -> float:
        kind, round = message.content[HEAD_RECORD]["kind"], int(message.content[HEAD_RECORD]["round"])
        if node != FIRST + MUTE:
            return 60.0 if kind == "train" else 0.0
        if kind == "hello":
            return 90.0 if clock.now else 0.0  # in the middle of round 6
        return math.inf if kind == "train" and 2 <= round <= 6 else 0.0

    grid = timed(here, clock, delay)
    assert here.serve(grid, **WAIT, absent_after=3) is Stop.DONE
    sent = [m.content[HEAD_RECORD] for m in grid.sent if m.metadata.dst_node_id == FIRST + MUTE]
    assert [h["round"] for h in sent if h["kind"] == "train"] == [1, 2, 3, 4, 7, 8, 9]
    assert [h["kind"] for h in sent].count("hello") == 2
    assert {r["round"] for r in here.audit("accepted", kind="train", client=MUTE)} == {1, 7, 8, 9}
    assert mute(here) == [("train", FIRST + MUTE, "site-1")]
    assert clock.now <= 600 + 8 * 60 + SLACK


def late(seconds: float, usual: float, when: Callable[[str], bool]) -> Delay:
    """One site answers some messages so many seconds after they were sent, the others after the usual time."""

    def delay(node: int, message: Message) -> float:
        kind = str(message.content[HEAD_RECORD]["kind"])
        return seconds if node == FIRST + MUTE and when(kind) else usual

    return delay


USUAL = 15.0
ROUNDS = 12
PATTERNS: dict[str, Callable[[int, int], float]] = {
    "always late": lambda _site, _t: 601.0,
    "later still": lambda _site, _t: 1100.0,
    "never": lambda _site, _t: math.inf,
    "just in time": lambda _site, _t: 599.0,
    "late, late, in time": lambda _site, t: 20.0 if t % 3 == 0 else 601.0,
    "in time, late": lambda _site, t: 599.0 if t % 2 else 601.0,
    "once in a while": lambda _site, t: 599.0 if t % 4 == 0 else USUAL,
    "growing": lambda _site, t: USUAL * 1.5**t,
    "shrinking": lambda _site, t: 600.0 / t,
    "by turns": lambda site, t: 599.0 if t % 2 == site else USUAL,
    "a little less each time": lambda site, t: 599.0 - t - site,
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("slow", [1, 2])
def test_slow_sites_do_not_set_the_pace(pattern: str, slow: int, tmp_path: Path, clock: Clock) -> None:
    """A round with its quorum ends within ten times the median of the other sites, whatever one or two of five do."""
    cut = {"kind": "iid", "clients": 5, "max_train_per_client": 12}
    here = scene(tmp_path, "fedavg", **{**FEW, "partition": cut, "rounds": ROUNDS, "evaluate": {"every": 100}})

    def delay(node: int, message: Message) -> float:
        head = message.content[HEAD_RECORD]
        if head["kind"] == "hello" or node - FIRST >= slow:
            return 0.0 if head["kind"] == "hello" else USUAL
        return PATTERNS[pattern](node - FIRST, int(head["round"]))

    assert here.serve(timed(here, clock, delay), **{**WAIT, "quorum": 3}) is Stop.DONE
    assert clock.now <= (ROUNDS + 1) * 10 * USUAL + SLACK  # the scores are one phase more
    assert here.summary()["runs"][0]["rounds"] == ROUNDS
    named = {line["site"] for what in ("mute", "slow") for line in here.audit(what)}
    assert named == {f"site-{k}" for k in range(slow)}
    for line in here.audit("mute", kind="train"):
        assert "raise pace above 10 in server.toml" in line["reason"]
    for k in range(slow, 5):
        assert len(here.audit("accepted", kind="train", client=k)) == ROUNDS


def test_a_site_within_the_pace_takes_part_in_every_round(tmp_path: Path, clock: Clock) -> None:
    """Nine times as slow as the others, as a hospital with nine times their samples; and the log names it."""
    here = scene(tmp_path, "fedavg", **{**FEW, "rounds": 6, "evaluate": {"every": 100}})
    delay = late(9 * USUAL, USUAL, lambda kind: kind == "train")
    assert here.serve(timed(here, clock, delay), **WAIT) is Stop.DONE
    assert len(here.audit("accepted", kind="train", client=MUTE)) == 6
    slow = here.audit("slow")
    assert {line["site"] for line in slow} == {"site-1"}
    assert all(abs(line["others"] - USUAL) < 1 and abs(line["seconds"] - 9 * USUAL) < 1 for line in slow)
    assert not here.audit("mute")


@pytest.mark.parametrize(("pace", "accepted"), [(10.0, 0), (40.0, 6)])
def test_a_larger_pace_waits_for_a_site_that_needs_longer(
    pace: float, accepted: int, tmp_path: Path, clock: Clock
) -> None:
    here = scene(tmp_path, "fedavg", **{**FEW, "rounds": 6, "evaluate": {"every": 100}})
    delay = late(500.0, USUAL, lambda kind: kind == "train")
    assert here.serve(timed(here, clock, delay), **WAIT, pace=pace) is Stop.DONE
    assert len(here.audit("accepted", kind="train", client=MUTE)) == accepted


def test_a_site_that_is_in_time_again_counts_at_once(tmp_path: Path, clock: Clock) -> None:
    here = scene(tmp_path, "fedavg", **{**FEW, "rounds": 8, "evaluate": {"every": 100}})

    def delay(node: int, message: Message) -> float:
        t, kind = int(message.content[HEAD_RECORD]["round"]), message.content[HEAD_RECORD]["kind"]
        if node != FIRST + MUTE or kind != "train":
            return USUAL
        return {1: 601.0, 2: 601.0, 7: 300.0}.get(t, 30.0)

    assert here.serve(timed(here, clock, delay), **WAIT) is Stop.DONE
    accepted = {r["round"] for r in here.audit("accepted", kind="train", client=MUTE)}
    assert accepted >= {5, 6}
    assert not accepted & {1, 2, 7}
    assert clock.now <= 9 * 150 + SLACK


def test_a_site_that_cannot_write_and_then_takes_its_time_sets_no_pace(tmp_path: Path, clock: Clock) -> None:
    """It is asked again, and waited for as long as the others took, half a minute at least."""
    here = scene(tmp_path, "fedavg", **{**FEW, "rounds": 6, "evaluate": {"every": 100}})
    clients, asked = {FIRST + c.site.client: c for c in here.clients()}, list[int]()

    def fails(_op: str, _path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def answer(message: Message) -> Message:
        head = message.content[HEAD_RECORD]
        if head["kind"] == "train":
            asked.append(int(head["round"]))
        disk.hook = fails if asked and asked.count(asked[-1]) == 1 and head["kind"] == "train" else None
        try:
            return clients[FIRST + MUTE].answer(message)
        finally:
            disk.hook = None

    def delay(node: int, message: Message) -> float:
        train = message.content[HEAD_RECORD]["kind"] == "train"
        return 599.0 if train and node == FIRST + MUTE and asked.count(asked[-1]) > 1 else 0.0

    nodes = {node: client.answer for node, client in clients.items()} | {FIRST + MUTE: answer}
    assert here.serve(FakeGrid(nodes, None, clock, delay), **WAIT) is Stop.DONE
    assert len(asked) > 6
    assert clock.now <= 6 * 32 + SLACK
