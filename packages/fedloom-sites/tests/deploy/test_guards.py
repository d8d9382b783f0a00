"""Guards that stand behind others: each alone, so that removing it is noticed although the next one holds.

The numbers are those of the list of faults that a deployment survives (docs/deploy-protocol.md).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fedloom.data import DATA_PARTS
from fedloom.errors import ConfigError, RunStopped, Stop, WireError
from fedloom.rows.aggregators import Krum
from fedloom.version import __version__
from fedloom_sites.deploy.audit import Audit
from fedloom_sites.deploy.protocol.checks import ReplyChecks
from fedloom_sites.deploy.protocol.envelope import (
    HEAD_LIMIT,
    HEAD_RECORD,
    REPLY_FIELDS,
    STATUS_FIELDS,
    PendingRequest,
    SiteRequest,
    ValidReply,
    unseal_message,
)
from fedloom_sites.deploy.protocol.rejected import RejectedReply
from fedloom_sites.deploy.server.transport import Transport
from fedloom_sites.deploy.site.client import Client
from fedloom_sites.deploy.site.local_data import make_blank_federation
from fedloom_sites.deploy.site.state import SiteState, StateGeneration
from tests.deploy.grid import Clock, FakeGrid, wire
from tests.deploy.scene import FIRST, Scene, changed, scene
from tests.deploy.test_mute import FEW

BAD = 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene(tmp_path_factory.mktemp("guards"), "fedavg", **FEW)


def hello(here: Scene, client: int = 0) -> tuple[Transport, FakeGrid, list[str]]:
    """A transport that has greeted nobody, its grid, and the lines that it says."""
    said: list[str] = []
    grid = here.grid()
    return Transport(grid, here.server, Audit(here.folder / "guards.jsonl"), said.append), grid, said


def test_a_client_counts_once_though_two_messages_were_answered_in_its_name(
    here: Scene,
) -> None:  # 11, the second guard
    """Both replies are sound and answer open messages; only that the client has answered already tells them apart."""
    transport, grid, said = hello(here)
    other = Client(here.sites[BAD])
    grid.nodes[FIRST + 50] = other.answer
    transport.presence.welcome = lambda *_: None  # type: ignore[method-assign]
    good, _ = transport.exchange(0, [SiteRequest("hello", None, node=n) for n in (FIRST + BAD, FIRST + 50)], 2, 0.2)
    assert set(good) == {BAD}
    assert any("has already answered" in line for line in said)


def test_a_message_is_answered_once(here: Scene) -> None:  # 11, the first guard
    """The second reply answers no open message, and is not even looked at."""
    transport, grid, _ = hello(here)
    looked: list[int] = []
    check = transport.checks.check
    transport.checks.check = lambda *a, **more: (check(*a, **more), looked.append(1))[0]  # type: ignore[method-assign]
    grid.fault = lambda _n, _m, reply: [reply, reply]
    good, _ = transport.exchange(0, [SiteRequest("hello", None, node=FIRST)], 1, 0.2)
    assert set(good) == {0}
    assert len(looked) == 1


def test_two_nodes_cannot_be_one_site(here: Scene) -> None:  # 12 of the replies: the greeting's own guard
    transport, grid, said = hello(here)
    transport.greet()
    grid.nodes[FIRST + 50] = Client(here.sites[BAD]).answer
    transport.greet()
    assert transport.nodes[BAD] == FIRST + BAD
    assert any(f"node {FIRST + BAD} is already client {BAD}" in line for line in said)


@pytest.mark.parametrize(("need", "waits"), [(1, 20.0), (2, 1200.0)])
def test_a_round_closes_at_the_deadline_if_the_quorum_is_there(
    need: int, waits: float, here: Scene, clock: Clock
) -> None:  # 16
    """A site that dies in a round has answered until then, so it is not mute: only the deadline goes on without it."""
    transport = Transport(
        grid := here.grid(), here.server.with_(deadline=20.0, ttl=1200.0), Audit(here.folder / "a"), str
    )
    transport.greet()
    grid.fault = lambda node, _, reply: None if node == FIRST + BAD else reply
    start = clock.now
    good, _ = transport.exchange(1, [SiteRequest("hello", None, node=FIRST + c) for c in range(2)], need, 20.0)
    assert set(good) == {0}
    assert waits <= clock.now - start < waits + 1


def test_a_message_lives_as_long_as_the_settings_say(here: Scene) -> None:  # 16
    transport, grid, _ = hello(here)
    transport.exchange(0, [SiteRequest("hello", None, node=FIRST)], 1, 0.2)
    assert grid.sent[-1].metadata.ttl == here.server.ttl


def test_an_answer_after_the_life_of_its_message_is_none(here: Scene, clock: Clock) -> None:  # 16
    """Not even to a greeting, which may be answered after the deadline."""
    grid = FakeGrid({FIRST: Client(here.sites[0]).answer}, None, clock, lambda *_: 1201.0)
    transport = Transport(
        grid, here.server.with_(deadline=60.0, ttl=1200.0, pace=1e6), Audit(here.folder / "late"), str
    )
    transport.greet()
    clock.now = 1300.0
    transport.greet()
    assert transport.nodes == {}


def test_a_site_may_have_a_large_vocabulary(here: Scene) -> None:
    """And no string, nor any list, may be of any length."""
    transport, grid, _ = hello(here)
    transport.exchange(0, [SiteRequest("hello", None, node=FIRST)], 1, 0.2)
    reply = Client(here.sites[0]).answer(grid.sent[-1])
    words = [f"w{k}" for k in range(20_000)]
    read = unseal_message(wire(changed(reply, 0, head={"vocabulary": words})).content, REPLY_FIELDS, STATUS_FIELDS, 1)
    assert read.head["vocabulary"] == words
    for head in ({"reason": "x" * 20_000}, {"sizes": [0] * HEAD_LIMIT}):
        with pytest.raises(WireError, match="long|at most"):
            unseal_message(changed(reply, 0, head=head).content, REPLY_FIELDS, STATUS_FIELDS, 1)


@pytest.mark.parametrize("sizes", [[-1, 0, 0], [1, 2], [10**9, 0, 0], [1.0, 0.0, 0.0]])
def test_numbers_of_samples_that_cannot_be_are_refused_in_a_greeting(here: Scene, sizes: list[float]) -> None:  # 9
    transport, grid, said = hello(here)
    grid.nodes = {FIRST: grid.nodes[FIRST]}
    grid.fault = lambda _node, _message, reply: changed(reply, 0, head={"sizes": sizes})
    transport.greet()
    assert transport.nodes == {}
    assert "the sample counts must be three numbers from 0 to 100000000" in said[0]


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReplyChecks, Message, PendingRequest]:
    """A judge, an honest reply, and what it answers."""
    found: list[tuple[ReplyChecks, Message, PendingRequest]] = []
    check = ReplyChecks.check

    def look(self: ReplyChecks, reply: Message, asked: PendingRequest, **more: Any) -> ValidReply:
        if asked.kind == "train" and asked.client == BAD:
            found.append((self, reply, asked))
        return check(self, reply, asked, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplyChecks, "check", look)
        assert scene(tmp_path_factory.mktemp("heard"), "fedavg", **FEW).serve() is Stop.DONE
    return found[0]


def test_a_site_with_its_own_key_cannot_answer_for_another(
    heard: tuple[ReplyChecks, Message, PendingRequest],
) -> None:  # 13
    """Client 0 answers the message to client 1 as itself: its signature holds, but it was not asked."""
    checks, reply, asked = heard
    with pytest.raises(RejectedReply, match="client is 0, not 1"):
        checks.check(wire(changed(reply, 0, head={"client": 0})), asked)


def test_a_reply_in_the_right_name_needs_its_key(heard: tuple[ReplyChecks, Message, PendingRequest]) -> None:  # 13
    """All else is as it must be: the client, the nonce, the digest."""
    checks, reply, asked = heard
    with pytest.raises(RejectedReply, match="not made with the key of client 1"):
        checks.check(wire(changed(reply, 0)), asked)


def test_a_state_file_of_another_experiment_is_not_read(tmp_path: Path) -> None:  # 18
    """Even where the folder is the same, since the first 16 digits are."""
    one, two = (SiteState(tmp_path, "a" * 16 + rest * 48, 0) for rest in "bc")
    one.keep(StateGeneration(3, 0, "d", {"rows.w": torch.ones(2)}, {}))
    one.settle(3)
    assert one.read(3) is not None
    assert one.accepted() == (3, 0)
    assert two.read(3) is None
    assert "belongs to another experiment, so it is not used" in two.notes[0]
    assert two.accepted() == (0, 0)
    assert SiteState(tmp_path, "a" * 16 + "b" * 48, 1).read(3) is None  # of another client


def test_a_kept_reply_answers_the_same_question_only(tmp_path: Path) -> None:  # 19
    memory = SiteState(tmp_path, "a" * 64, 0)
    memory.keep(StateGeneration(3, 2, "d", {"rows.w": torch.ones(2)}, {}))
    assert memory.answered(3, 2, "d") is not None
    assert memory.answered(3, 1, "d") is None  # from another state
    assert memory.answered(3, 2, "e") is None  # with another download
    assert memory.answered(2, 2, "d") is None


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("release", "0.0.1", "the server's fedloom is 0.0.1, but site site-1 has"),  # 34
        ("protocol", 99, "the server's protocol is 99"),  # 34
        ("experiment", "0" * 64, "the server's experiment is 0000"),  # 18
        ("client", 0, "the message is for client 0, but site site-1 is client 1"),
        ("digest", "0" * 64, "changed during transmission"),
    ],
)
def test_a_site_refuses_by_itself(here: Scene, field: str, value: Any, sentence: str) -> None:
    """The server would not send it, or would reject the reply: the site does not rely on that."""
    transport, grid, _ = hello(here)
    transport.exchange(0, [SiteRequest("hello", BAD, node=FIRST + BAD)], 1, 0.2)
    message = grid.sent[-1]
    head = {**message.content[HEAD_RECORD], field: value}
    message.content = RecordDict({**message.content, HEAD_RECORD: ConfigRecord(head)})
    answer = Client(here.sites[BAD]).answer(message).content[HEAD_RECORD]
    assert answer["status"] == "refused"
    assert sentence in answer["reason"]


def test_a_server_file_of_another_release(here: Scene) -> None:  # 34
    with pytest.raises(
        ConfigError, match=rf"fedloom is {__version__} here, but the experiment runs 9\.9\.9\. Install that version"
    ):
        here.serve(version="9.9.9")


def test_a_site_file_of_another_release(here: Scene) -> None:  # 34
    """All that the server sends is of its own release."""
    transport, grid, _ = hello(here)
    transport.exchange(0, [SiteRequest("hello", BAD, node=FIRST + BAD)], 1, 0.2)
    answer = Client(here.sites[BAD].with_(version="9.9.9")).answer(grid.sent[-1]).content[HEAD_RECORD]
    assert answer["status"] == "refused"
    assert f"fedloom is {__version__} here, but the experiment runs 9.9.9" in answer["reason"]


def test_a_candidate_that_does_not_answer_is_drawn_last(tmp_path: Path) -> None:
    asks = {"kind": "power-of-choice", "clients": 2, "candidates": 3}
    here = scene(tmp_path, {"algorithm": "fedavg", "sampler": asks}, **FEW)

    def lost(node: int, message: Message, reply: Message) -> Message | None:
        return None if node == FIRST + BAD and message.content[HEAD_RECORD]["kind"] == "ask" else reply

    assert here.serve(here.grid(lost), quorum=2) is Stop.DONE
    assert {x["client"] for x in here.audit("accepted", kind="train")} == {0, 2}


def test_too_few_for_the_rule_stops_before_the_rule_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # 21
    five = {
        **FEW,
        "partition": {"kind": "iid", "clients": 5, "max_train_per_client": 12},
        "aggregator": {"kind": "krum", "f": 1},
    }
    here = scene(tmp_path, "fedavg", **five)

    def lost(node: int, message: Message, reply: Message) -> Message | None:
        head = message.content[HEAD_RECORD]
        return None if node == FIRST + BAD and (head["kind"], head["round"]) == ("train", 2) else reply

    asked: list[bool] = []
    apply = Krum.apply
    monkeypatch.setattr(Krum, "apply", lambda self, *given: (asked.append(True), apply(self, *given))[1])
    assert here.serve(here.grid(lost), quorum=2) is Stop.TOO_FEW
    assert here.summary()["detail"].startswith("round 2: krum needs")
    assert len(asked) == 1  # in round 1


def test_a_server_that_stays_away_is_a_sentence(
    here: Scene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:  # 27
    transport, grid, _ = hello(here)

    def gone(*_: Any) -> Any:
        raise ConnectionError("connection refused")

    for name in ("push_messages", "pull_messages", "get_node_ids"):
        with monkeypatch.context() as patch:
            patch.setattr(grid, name, gone)
            start = clock.now
            with pytest.raises(RunStopped, match="Flower's server does not answer: connection refused"):
                transport.exchange(
                    0, [SiteRequest("hello", None, node=FIRST)], 1, 0.2
                ) if name != "get_node_ids" else transport.greet()
            assert clock.now - start >= here.server.ttl


def test_claimed_samples_cost_no_memory(here: Scene) -> None:  # 9
    """Every site says that it has as many as a site may, of each part; the server makes its run of that."""
    most = torch.full((here.server.clients, 3), here.server.examples_limit)
    fed = make_blank_federation(here.server.samples, most)
    assert fed.sizes("test").tolist() == most[:, 2].tolist()
    assert sum(fed.parts[part].index.untyped_storage().nbytes() for part in DATA_PARTS) < 100


def test_a_refusal_of_our_own_is_not_tried_again(
    here: Scene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:  # 27
    transport, grid, _ = hello(here)
    calls: list[int] = []

    def refuses() -> list[int]:
        calls.append(1)
        raise ConfigError("cannot be")

    monkeypatch.setattr(grid, "get_node_ids", refuses)
    with pytest.raises(ConfigError, match="cannot be"):
        transport.greet()
    assert len(calls) == 1
