"""The campaign: every fault at every operation of every command, resumable, with a record of what was tried.

`pytest -m faults` plays it, for at most `MINUTES` per call, and writes `record.toml`. The table in SECURITY.md comes
from that record.
"""

from __future__ import annotations

import datetime as datetime_module
import errno
import fcntl
import itertools
import os
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tomli_w
import torch
from flwr.app import Message

from fedloom.errors import FedloomError
from fedloom.storage import disk
from tests.faults import scenes
from tests.faults.disks import DISK_FAULTS, Faulty, PowerCut, failing
from tests.faults.scenes import COMMANDS, Command

RECORD = Path(__file__).with_name("record.toml")
SECURITY = Path(__file__).parents[2] / "SECURITY.md"
MINUTES = float(os.environ.get("FEDLOOM_FAULTS_MINUTES", "55"))
"""Minutes of one call, after which the campaign stops and the next call goes on."""
CLOCK_STRIDE = 8
"""Every so many operations the clock jumps in one try."""
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Folder in memory for the disks of the tries."""
JUMP_SECONDS = 400 * 86400.0
KINDS = (*DISK_FAULTS, "clock", "no locks", "late reply", "lost reply")
WORDS = {
    "ENOSPC": "the disk is full",
    "EIO": "a disk operation fails",
    "kill": "the process is killed",
    "power": "the power fails; only synced data survive",
    "clock": "the clock jumps by 400 days, forward or back",
    "no locks": "the disk has no file locks",
    "late reply": "a reply of a site comes after the deadline",
    "lost reply": "a reply of a site never comes",
}
"""The faults, as SECURITY.md names them."""


class Try(NamedTuple):
    """One fault at one place of one command."""

    command: str
    kind: str
    at: int


def places_of(name: str, folder: Path) -> dict[str, list[int]]:
    """The operations, or the messages, at which each fault is tried."""
    command, ops, sent = COMMANDS[name](folder), list[str](), list[int]()
    with failing(command.folder) as faulty, counting(sent):
        disk.hook = lambda op, path: (ops.append(op) if faulty.concerns(path) else None, faulty(op, path))[1]
        assert command.act() is None
    every = [*range(1, len(ops) + 1)]
    written = [k for k in every if ops[k - 1] in ("create", "write", "tear", "fsync")]
    found = {"ENOSPC": written, "EIO": every, "kill": every, "power": every}
    found |= {"clock": every[::CLOCK_STRIDE], "no locks": [1]}
    messages = [*range(1, len(sent) + 1)] if name.startswith("server") else []
    return {
        kind: places for kind, places in {**found, "late reply": messages, "lost reply": messages}.items() if places
    }


@contextmanager
def counting(sent: list[int]) -> Iterator[None]:
    """Count the messages of a server."""
    with delayed(lambda _node, _message: sent.append(1) or 0.0):
        yield


@contextmanager
def delayed(delay: Callable[[int, Message], float]) -> Iterator[None]:
    """Replies that take their time."""
    serve = scenes.serve_with
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenes, "serve_with", lambda here, clients, *_: serve(here, clients, delay))
        yield


@contextmanager
def jumping(faulty: Faulty, at: int) -> Iterator[None]:
    """A wall clock that jumps at an operation of the disk, forth at even places and back at odd ones."""
    offset = JUMP_SECONDS * (1 if at % 2 == 0 else -1)
    real_time, real_datetime = time.time, datetime_module.datetime

    class Jumping(real_datetime):  # type: ignore[misc,valid-type]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            shift = datetime_module.timedelta(seconds=offset if faulty.count >= at else 0.0)
            return real_datetime.now(tz) + shift

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real_time() + (offset if faulty.count >= at else 0.0))
        for module in [*sys.modules.values()]:
            if getattr(module, "__name__", "").startswith("fedloom") and vars(module).get("datetime") is real_datetime:
                patch.setattr(module, "datetime", Jumping)
        yield


@contextmanager
def unlockable() -> Iterator[None]:
    """A disk without file locks, as NFS without its lock service."""

    def flock(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        yield


def wrong_with(one: Try, expected: Any, folder: Path) -> str:
    """Play a command with a fault, and then again without one. What is wrong with that; empty for nothing.

    A command may fail with a sentence, never with another error, and the same command again must end with the same
    results as a command without any fault. What the command's own log names as missing is excused, see `Command`.
    """
    command: Command = COMMANDS[one.command](folder)
    is_disk = one.kind in DISK_FAULTS
    late = {"late reply": 0.3, "lost reply": float("inf")}.get(one.kind)
    sent = list[int]()

    def delay(_node: int, _message: Message) -> float:
        sent.append(1)
        return late if late is not None and len(sent) == one.at else 0.0

    try:
        with (
            failing(command.folder, one.at if is_disk else 0, one.kind if is_disk else "") as faulty,
            jumping(faulty, one.at) if one.kind == "clock" else nullcontext(),
            unlockable() if one.kind == "no locks" else nullcontext(),
            delayed(delay) if late is not None else nullcontext(),
        ):
            command.act()
    except PowerCut:
        pass
    except FedloomError as error:
        if not str(error) or "\n" in str(error).strip():
            return f"the error is no sentence: {error!r}"
    except Exception as error:  # a traceback
        return f"{type(error).__name__}: {error}"
    try:
        again = command.act()
        found, excused = command.found(), command.excused()
        other = {name for name in {*found, *expected} - excused if found.get(name) != expected.get(name)}
        is_wrong = again or other
        return (
            ""
            if not is_wrong
            else f"the same command again: {again}"
            if again
            else f"other: {', '.join(sorted(other))}"
        )
    except Exception as error:
        return f"the same command again: {type(error).__name__}: {error}"


def play(tries: Sequence[Try], end: float, apply: Callable[..., Iterable[Any]] = map) -> Iterator[tuple[Try, str]]:
    """Play tries in their order until a moment of the monotonic clock. `apply` is `map`, also the one of a pool."""
    for one, reason in zip(tries, apply(partial(reason_of, end), tries), strict=True):
        if reason is None:
            return
        yield one, reason


def reason_of(end: float, one: Try) -> str | None:
    """What is wrong with one try, in a folder of its own. None if there is no time left."""
    if time.monotonic() > end:
        return None
    with tempfile.TemporaryDirectory(dir=MEMORY) as temporary:
        return wrong_with(one, expected_of(one.command), Path(temporary) / "try")


@cache
def expected_of(name: str) -> Any:
    """What a command leaves without any fault."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as temporary:
        command = COMMANDS[name](Path(temporary) / "reference")
        assert command.act() is None
        expected = command.found()
    assert expected
    return expected


def begin_worker() -> None:
    """Prepare a process of a pool."""
    torch.set_num_threads(1)
    os.fsync = lambda _fd: None  # the disks of these tests know what was fsynced


def all_tries(name: str) -> list[Try]:
    """Every fault at every place of a command."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as temporary:
        places = places_of(name, Path(temporary))
    return [Try(name, kind, at) for kind, some in places.items() for at in some]


def in_turn(tries: Sequence[Try], rows: Mapping[str, Any]) -> list[Try]:
    """What is left of the tries, in a fixed random order, a part of every fault at a time. What was wrong comes first,
    since it may be repaired by now."""
    order = np.random.default_rng(0).permutation(len(tries))
    by_kind: dict[str, list[Try]] = {kind: [] for kind in rows}
    for k in order:
        by_kind[tries[int(k)].kind].append(tries[int(k)])
    left = {kind: some[rows[kind]["tried"] :] for kind, some in by_kind.items()}
    wrong = [Try(tries[0].command, kind, place_of(text)) for kind, row in rows.items() for text in row["wrong"]]
    return wrong + [one for row in itertools.zip_longest(*left.values()) for one in row if one is not None]


def note(one: Try, reason: str, row: dict[str, Any]) -> None:
    """Note a try in its row of the record."""
    before = len(row["wrong"])
    row["wrong"] = [text for text in row["wrong"] if place_of(text) != one.at]
    row["tried"] += before == len(row["wrong"])
    row["wrong"] += [f"{one.at}: {reason}"[:300]] if reason else []


def place_of(text: str) -> int:
    """The place of a try that was wrong, from its line of the record."""
    return int(text.partition(":")[0])


def read_record() -> dict[str, Any]:
    return tomllib.loads(RECORD.read_text()) if RECORD.exists() else {}


def write_record(record: dict[str, Any]) -> None:
    head = "# What `pytest -m faults` has tried: places of each fault, those tried, and those that were wrong.\n"
    RECORD.write_text(head + tomli_w.dumps(record))


def write_table(record: dict[str, Any]) -> None:
    """Write the table of SECURITY.md anew."""
    old = re.search(r"^\| fault \|.*?\n\n", text := SECURITY.read_text(), re.M | re.S)
    assert old is not None
    SECURITY.write_text(text.replace(old[0], table(record) + "\n"))


def table(record: dict[str, Any]) -> str:
    """The table of SECURITY.md."""
    lines = ["| fault | " + " | ".join(COMMANDS) + " |", "|---|" + "---|" * len(COMMANDS)]
    for kind in KINDS:
        cells = []
        for name in COMMANDS:
            row = record.get(name, {}).get(kind)
            cells.append("" if row is None else f"{row['tried'] - len(row['wrong'])} of {row['places']}")
        lines.append(f"| {WORDS[kind]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
