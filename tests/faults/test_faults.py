"""Faults at every operation: a sentence or no effect, and the same command again ends with the same results."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fedloom.lab.experiment import Plan
from fedloom.storage import disk
from tests.faults.campaign import (
    MINUTES,
    SECURITY,
    all_tries,
    begin_worker,
    in_turn,
    note,
    play,
    read_record,
    table,
    write_record,
    write_table,
    wrong_with,
)
from tests.faults.scenes import COMMANDS

SAMPLE = int(os.environ.get("FEDLOOM_FAULTS_SAMPLE", "2"))
"""Faults of each command that CI tries."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)  # the disks of these tests know what was fsynced


@pytest.fixture(scope="session")
def campaign_end() -> float:
    """The moment of the monotonic clock at which the campaign ends."""
    return time.monotonic() + 60 * MINUTES


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPoolExecutor]:
    """One process per processor. They are not forks, because the threads of some libraries do not survive a fork."""
    processes = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=begin_worker) as made:
        yield made


@pytest.mark.parametrize("name", COMMANDS)
def test_a_sample_of_faults(name: str) -> None:
    """Other places each week, the same on all machines."""
    tries = all_tries(name)
    draw = np.random.default_rng(int(time.time() // (7 * 86400)))
    sample = [tries[int(k)] for k in draw.choice(len(tries), size=min(SAMPLE, len(tries)), replace=False)]
    wrong = {one: reason for one, reason in play(sample, time.monotonic() + 600) if reason}
    assert not wrong


def test_the_campaign_notices_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk whose files are never fsynced loses what a run has written; another error is no sentence."""
    cut = [one for one in all_tries("run") if one.kind == "power"]
    fsync = disk.fsync
    monkeypatch.setattr(disk, "fsync", lambda fd, path: fsync(fd, path) if path.is_dir() else None)
    assert any(reason for _, reason in play(cut[-20:], time.monotonic() + 60))
    monkeypatch.undo()

    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Plan, "run", fails)
    assert "ZeroDivisionError" in wrong_with(cut[0], None, Path("unused"))


@pytest.mark.faults
@pytest.mark.timeout(3700)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_fault_at_every_operation(name: str, campaign_end: float, pool: ProcessPoolExecutor) -> None:
    """At most `MINUTES` for all commands; what is left is tried by the next call.

    Each command has an equal part of the time that is left, so a quick one leaves some to those after it. The places of
    each fault are tried in a fixed random order, so what was tried is a sample of all.
    """
    tries, record = pool.submit(all_tries, name).result(), read_record()
    rows = record.setdefault(name, {})
    for kind in dict.fromkeys(one.kind for one in tries):
        count = sum(one.kind == kind for one in tries)
        if rows.get(kind, {}).get("places") != count:  # also where the command has other operations by now
            rows[kind] = {"places": count, "tried": 0, "wrong": []}
    later = [*COMMANDS][[*COMMANDS].index(name) :]
    end = time.monotonic() + (campaign_end - time.monotonic()) / len(later)
    for one, reason in play(in_turn(tries, rows), end, pool.map):
        note(one, reason, rows[one.kind])
        write_record({**read_record(), name: rows})
    write_table(read_record())
    wrong = {f"{kind} at {text}" for kind, row in rows.items() for text in row["wrong"]}
    assert not wrong
    left = sum(row["places"] - row["tried"] for row in rows.values())
    if left:
        pytest.skip(f"{left} of {len(tries)} places are left. Run the same command again")


def test_the_table_of_security_is_that_of_the_record() -> None:
    record = read_record()
    assert not [text for rows in record.values() for row in rows.values() for text in row["wrong"]]
    assert table(record) in SECURITY.read_text()
