"""Disks that fail in a round with secure sums: nothing changes, or the server's log names the absent site."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from fedloom.errors import FedloomError, Stop
from fedloom.storage import disk
from tests.deploy.scene import FIRST, Scene
from tests.deploy.sessions import kind_of, secured
from tests.faults.disks import failing
from tests.faults.scenes import SITES, found_at, serve_with, server_command, site_command

FOUR = {**SITES, "partition": {**SITES["partition"], "clients": 4}}
"""Four sites, of which the quorum and the threshold need three."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that nothing happens to."""
    here = secured(tmp_path_factory.mktemp("whole"), "ditto", **FOUR)
    assert here.serve() is Stop.DONE
    return found_at(here)


def act(here: Scene, fault: Callable[[int, Message, Message], Any] | None = None) -> str | None:
    nodes = {FIRST + c.site.client: c.answer for c in here.clients()}
    if fault is None:
        return serve_with(here, nodes)
    stop = here.serve(here.grid(fault))
    return None if stop is Stop.DONE else str(here.summary()["detail"])


@contextmanager
def failing_at(folder: Path, name: str, times: float, after: int = 0) -> Iterator[list[int]]:
    """A disk that fails so many times to rename a file of a folder to a name, after it could so many times."""
    seen = list[int]()

    def hook(op: str, path: Path) -> None:
        if op == "rename" and path.name == name and folder in path.parents:
            seen.append(1)
            if after < len(seen) <= after + times:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    disk.hook = hook
    try:
        yield seen
    finally:
        disk.hook = None


WRITES = [
    ("session.json", 0), ("session.json", 1), ("asked.json", 0), ("accepted.json", 0), ("round-000002.state", 0),
    ("opened.json", 0), ("model.safetensors", 0), ("session.json", 14),
]  # fmt: skip
"""Files of a site in the steps of a session, and how often each was written before it fails."""


@pytest.mark.parametrize(("name", "after"), WRITES)
def test_a_site_whose_disk_failed_once_is_asked_again(
    name: str, after: int, tmp_path: Path, whole: dict[str, Any]
) -> None:
    here = secured(tmp_path, "ditto", **FOUR)
    with failing_at(here.sites[0].state, name, 1, after) as seen:
        assert act(here) is None
    assert len(seen) > after
    assert found_at(here) == whole
    [line] = here.audit("rejected")
    assert line["client"] == 0
    assert "cannot answer now" in line["reason"]
    assert not here.audit("other sites")


def test_no_sum_of_scores_silently_lacks_a_site(tmp_path: Path, whole: dict[str, Any]) -> None:
    """A site that cannot store its newest model does not send zeros for its scores."""
    here = secured(tmp_path, "ditto", **FOUR)
    with failing_at(here.sites[0].state, "model.safetensors", float("inf"), after=1):
        assert act(here) is None
    [line] = here.audit("other sites")
    assert "without site-0" in line["reason"]
    assert {x["client"] for x in here.audit("rejected", kind="tally", round=2)} == {0}
    found = found_at(here)
    assert found["model"] == whole["model"]
    counts = [row["value"] for row in found["scores of all"] if row["metric"].endswith("/sites") and row["round"] == 2]
    assert set(counts) == {3.0}


@pytest.mark.parametrize("since", range(3))
def test_a_site_that_stays_away_changes_what_the_log_says_and_nothing_else(since: int, tmp_path: Path) -> None:
    """A full disk from a session on leaves the models and scores of a run whose site is cut off from there on."""
    sessions = [(1, "masked"), (2, "masked"), (2, "tally")]
    cut, full = (secured(tmp_path / name, "ditto", **FOUR) for name in ("cut", "full"))
    clients = full.clients()

    def answer(message: Message) -> Message:
        if disk.hook is None and (int(message.content["head"]["round"]), kind_of(message)) == sessions[since]:
            disk.hook = no_space(full.sites[0].state)
        return clients[0].answer(message)

    try:
        assert serve_with(full, {FIRST + c.site.client: c.answer for c in clients} | {FIRST: answer}) is None
    finally:
        disk.hook = None
    assert act(cut, from_session(*sessions[since])) is None
    found, expected = found_at(full), found_at(cut)
    assert {name for name in expected if found.get(name) != expected[name]} <= {"own model of site-0"}
    round, kind = sessions[since]
    assert full.audit("rejected", client=0, round=round, kind=kind)
    assert since == 0 or "without site-0" in full.audit("other sites")[0]["reason"]


def from_session(round: int, kind: str) -> Callable[[int, Message, Message], Message | None]:
    """A site that is cut off from a session on."""
    cut = list[int]()

    def fault(node: int, message: Message, reply: Message) -> Message | None:
        if (int(message.content["head"]["round"]), kind_of(message)) == (round, kind):
            cut.append(node)
        return None if node == FIRST and cut else reply

    return fault


def no_space(folder: Path) -> Callable[[str, Path], None]:
    def hook(op: str, path: Path) -> None:
        if op in ("create", "write", "tear", "fsync") and folder in path.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    return hook


def test_the_last_scores_wait_for_the_quorum(tmp_path: Path, whole: dict[str, Any]) -> None:
    """All sites store their newest model in this session, so a run without it is not done."""
    here, seen = secured(tmp_path, "ditto", **FOUR), set[str]()

    def fault(_node: int, message: Message, reply: Message) -> Message | None:
        kind, is_last = kind_of(message), message.content["head"]["round"] == 2
        seen.update({kind} if is_last else ())
        return None if is_last and kind == "keys" and "unmask" in seen else reply

    stop = act(here, fault)
    assert stop is not None
    assert "scores after the last round" in stop
    assert act(here) is None
    assert found_at(here) == whole


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", [server_command, site_command])
@pytest.mark.parametrize("kind", ["EIO", "kill"])
def test_no_operation_of_a_disk_changes_a_masked_round(
    command: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation in one round and its scores, at a site and at the server."""
    monkeypatch.setitem(SITES, "rounds", 1)
    monkeypatch.setitem(SITES, "evaluate", {"every": 1})
    reference = command(tmp_path / "reference", masked=True)
    with failing(reference.folder) as faulty:
        assert reference.act() is None
    expected, wrong = reference.found(), dict[int, str]()
    for at in range(1, faulty.count + 1):
        one = command(tmp_path / f"{at}", masked=True)
        try:
            with failing(one.folder, at, kind):
                one.act()
        except FedloomError:
            pass
        except BaseException as error:
            wrong |= {} if kind == "kill" else {at: repr(error)}
        again = one.act()
        if again or one.found() != expected:
            wrong[at] = str(again)
    assert not wrong
