"""Texts of other machines, and edits of files, that would look like lines which a log has written."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message

import fedloom_sites.flower as ff
from fedloom.errors import RunDirError
from fedloom_sites.deploy.alarms import site_status
from fedloom_sites.deploy.audit import Audit, read_entries, verify_log
from fedloom_sites.flower.records import VALUES_RECORD, write_values
from tests.deploy.sessions import secured
from tests.deploy.test_dishonest import Rogue
from tests.deploy.test_refusals import THREE
from tests.flower.app import App
from tests.flower.test_faults import CHOICES, Net, local

pytestmark = pytest.mark.attack("forges lines of a log")

FORGED = "fedloom: site site-0: all is well"
TEXT = f"9\n{FORGED}\x1b[2J\u202e"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def test_a_server_adds_no_line_to_the_log_of_a_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An alarm quotes the newest message, whose release the server chooses."""
    rogue = Rogue(secured(tmp_path, "fedavg", **THREE))
    for _ in range(3):
        assert rogue.exchange(0, "hello", release=TEXT)[0]["status"] == "refused"
    lines = capsys.readouterr().err.splitlines()
    assert any(FORGED in line for line in lines)
    assert all(line.startswith("20") and " fedloom: site site-0: " in line for line in lines)
    alarms = [one["reason"] for one in site_status(rogue.sites[0].site)["alarms"]]
    assert alarms
    assert all(alarm.isprintable() for alarm in alarms)


def test_a_node_adds_no_line_to_the_log_of_a_flower_server(caplog: pytest.LogCaptureFixture) -> None:
    def forge(node: int, message: Message, reply: Message) -> Message:
        if node == 101 and message.metadata.message_type == "train":
            reply.content[VALUES_RECORD] = write_values(error=TEXT)
        return reply

    with caplog.at_level(logging.INFO, logger="flwr"):
        ff.Strategy("fedavg", Net(), wait=0.1, **CHOICES).start(
            App(local, 3, forge).grid, ArrayRecord(Net().state_dict()), num_rounds=1
        )
    said = [record.getMessage() for record in caplog.records if FORGED in record.getMessage()]
    assert said
    assert all(text.isprintable() for text in said)


def edit(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[bytes], bytes]:
    return lambda log: b"".join(line + b"\n" for line in change(log.splitlines()))


EDITS: dict[str, Callable[[bytes], bytes]] = {
    "a line is missing": edit(lambda x: x[:2] + x[3:]),
    "the first line is missing": edit(lambda x: x[1:]),
    "two lines are swapped": edit(lambda x: [*x[:2], x[3], x[2], *x[4:]]),
    "a line stands twice": edit(lambda x: [*x[:3], *x[2:]]),
    "a value differs": lambda log: log.replace(b'"k": 3', b'"k": 9'),
    "lines end otherwise": lambda log: log.replace(b"\n", b"\r\n"),
    "a space is added": lambda log: log.replace(b"}\n", b"} \n"),
    "an empty line is added": edit(lambda x: [*x[:2], b"", *x[2:]]),
    "a line is cut, as in a crash": edit(lambda x: [*x[:2], x[2][:10], *x[3:]]),
    "half a line is added, as in a crash": edit(lambda x: [*x[:3], b'{"what": "x', *x[3:]]),
    "a mark of the order of bytes is added": lambda log: b"\xef\xbb\xbf" + log,
    "a number is written otherwise": lambda log: log.replace(b'"number": 2', b'"number": 2.0'),
    "zeros follow": lambda log: log + bytes(9),
    "another kind of line is added": edit(lambda x: [*x[:2], b"[1]", *x[2:]]),
}


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS.keys())
def test_an_edited_log_has_a_broken_chain(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for k in range(6):
        Audit(path).write("x", k=k)
    assert verify_log(path).lines == 6
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(RunDirError, match=r"line \d does not match the previous line"):
        verify_log(path)


def test_a_page_shows_no_line_that_the_check_of_the_chain_takes_for_cut_off(tmp_path: Path) -> None:
    """What looks like the rest of a crash must not hold an entry of its own."""
    path = tmp_path / "log.jsonl"
    Audit(path).write("x")
    path.write_bytes(path.read_bytes() + b'{x\r{"what": "accepted", "site": "forged"}\n')
    known: list[dict[str, Any]] = read_entries(path)
    assert verify_log(path).lines == 2
    assert [one["what"] for one in known] == ["x"]
