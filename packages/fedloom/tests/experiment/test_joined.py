"""Processes that join: the files of one process, for any number of them, whatever happens to some."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
import torch

import fedloom as fl
from fedloom.errors import ConfigError, RunDirError, RunStopped, Stop
from fedloom.lab.experiment import Plan, parse
from fedloom.lab.experiment.events import Event
from fedloom.rundir import WORK_FOLDER
from fedloom.storage import claims as claims_module
from fedloom.storage import disk
from fedloom.storage.claims import Claims
from fedloom.storage.locks import lock
from tests.commands import end, fork, in_a_fork

pytestmark = pytest.mark.attack("processes on one directory")

SMALL: dict[str, Any] = {
    "rounds": 3,
    "seeds": [0, 1],
    "data": {"source": "digits"},
    "partition": {"kind": "iid", "clients": 3, "max_train_per_client": 30, "validation": 0.2},
    "model": {"kind": "softmax"},
    "engine": {"workers": 1},
    "method": [{"algorithm": "fedavg"}, {"algorithm": "ditto", "label": "two words"}],
}
LONG = {**SMALL, "rounds": 20, "seeds": [0, 1, 2, 3], "engine": {"workers": 1, "checkpoint_every": 0.05}}


def contents(out: Path) -> dict[str, bytes]:
    """Every file but those with times in them, and the lock."""
    files = {str(path.relative_to(out)): path for path in sorted(out.rglob("*")) if path.is_file()}
    timed = ("timings.parquet", ".lock")
    return {n: p.read_bytes() for n, p in files.items() if n not in timed and not n.startswith("checkpoints")}


def join(document: dict[str, Any], out: Path, *hear: Callable[[Event], object]) -> None:
    Plan(parse(document, "small"), out).run(*hear, page=False, join=True)


def start(document: dict[str, Any], out: Path) -> int:
    """Another process that joins."""
    return fork(lambda: join(document, out))


def start_together(out: Path, moments: list[int], number: signal.Signals) -> list[int]:
    """Processes that join, of which each begins a run before any goes on; some stop themselves at the n-th event."""
    begun, heard = multiprocessing.get_context("fork").Barrier(len(moments)), list[int]()

    def work(moment: int) -> None:
        def hear(event: Event) -> None:
            heard.append(event.round)
            if len(heard) == 1:
                begun.wait(600)
            if len(heard) == moment:
                signal.raise_signal(number)

        join(LONG, out, hear)

    return [fork(partial(work, moment)) for moment in moments]


def alone(document: dict[str, Any], out: Path) -> dict[str, bytes]:
    Plan(parse(document, "small"), out).run(page=False)
    return contents(out)


def soon(condition: Callable[[], object], seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return alone(SMALL, tmp_path_factory.mktemp("alone") / "out")


def test_one_process_that_joins_gives_the_files_of_one_alone(small: dict[str, bytes], tmp_path: Path) -> None:
    join(SMALL, tmp_path / "out")
    assert contents(tmp_path / "out") == small
    join(SMALL, tmp_path / "out")
    assert contents(tmp_path / "out") == small
    assert not (tmp_path / "out" / WORK_FOLDER).exists()


def test_eight_processes_of_which_three_are_killed_give_the_files_of_one(tmp_path: Path) -> None:
    draw, out, ends = torch.Generator().manual_seed(7), tmp_path / "out", [0] * 8
    for victim in torch.randperm(8, generator=draw)[:3].tolist():
        ends[victim] = int(torch.randint(1, 18, (), generator=draw))
    processes = start_together(out, ends, signal.SIGKILL)
    assert [end(pid) for pid in processes] == [-signal.SIGKILL if last else 0 for last in ends]
    assert contents(out) == alone(LONG, tmp_path / "alone")


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Number of changes that one process makes to the disk."""
    steps = list[str]()
    disk.hook = lambda step, _path: steps.append(step)
    try:
        join(SMALL, tmp_path_factory.mktemp("counted") / "out")
    finally:
        disk.hook = None
    return len(steps)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9, 0.98])
def test_a_process_that_ends_at_any_write_leaves_nothing_that_holds_the_next_up(
    small: dict[str, bytes], writes: int, tmp_path: Path, share: float
) -> None:
    assert in_a_fork(lambda: join(SMALL, tmp_path / "out"), round(share * writes)) == 137
    join(SMALL, tmp_path / "out")
    assert contents(tmp_path / "out") == small


def test_a_run_alone_goes_on_with_what_one_that_joined_has_left(small: dict[str, bytes], tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if event.round == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(RunStopped, match="other processes that joined are still running"):
        join(SMALL, tmp_path / "out", stop)
    assert (tmp_path / "out" / WORK_FOLDER / "fedavg-0" / "1" / "state" / "checkpoint-1.json").exists()
    assert alone(SMALL, tmp_path / "out") == small


def test_one_that_joins_goes_on_with_what_a_run_alone_has_left(small: dict[str, bytes], tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if event.round == 2:
            signal.raise_signal(signal.SIGINT)

    def hear(event: Event) -> None:
        first.setdefault((event.label, event.seed), event.round)

    first = dict[tuple[str, int], int]()
    Plan(parse(SMALL, "small"), tmp_path / "out").run(stop, page=False)
    join(SMALL, tmp_path / "out", hear)
    assert first[("fedavg", 0)] == 3
    assert contents(tmp_path / "out") == small


def test_an_interrupt_of_one_leaves_the_others_running(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, second = start_together(out, [2, 0], signal.SIGINT)
    assert (end(first), end(second)) == (1, 0)
    assert contents(out) == alone(LONG, tmp_path / "alone")


@pytest.mark.needs("fedloom_clinic")
def test_clients_left_out_are_units_too(tmp_path: Path) -> None:
    document = {**SMALL, "analysis": [{"kind": "left-out"}]}
    processes = [start(document, tmp_path / "out") for _ in range(3)]
    assert [end(process) for process in processes] == [0, 0, 0]
    assert contents(tmp_path / "out") == alone(document, tmp_path / "alone")
    assert "left_out.parquet" in contents(tmp_path / "out")


def test_a_run_that_fails_has_failed_for_all(tmp_path: Path) -> None:
    document = {
        **SMALL,
        "method": [{"algorithm": "fedavg"}, {"algorithm": "fedavg", "label": "odd", "local": {"lr": 1e30}}],
    }
    processes = [start(document, tmp_path / "out") for _ in range(2)]
    assert [end(process) for process in processes] == [0, 0]
    assert contents(tmp_path / "out") == alone(document, tmp_path / "alone")
    statuses = {
        run["method"]: run["status"] for run in json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    }
    assert statuses["fedavg"] == "done"
    assert statuses["odd"] in ("diverged", "failed")


def test_who_shares_a_directory_agrees_on_all_settings(tmp_path: Path) -> None:
    def disturb(event: Event) -> None:
        if not refused:
            refused.append(event.label)
            for change in ({"seeds": [0]}, {"rounds": 4}, {"method": SMALL["method"][:1]}):
                with pytest.raises(RunDirError, match="another experiment's processes are using this folder"):
                    join({**SMALL, **change}, tmp_path / "out")
            with pytest.raises(RunDirError, match="processes that joined. Join these processes"):
                Plan(parse(SMALL, "small"), tmp_path / "out").run(page=False)

    refused = list[str]()
    join(SMALL, tmp_path / "out", disturb)
    with lock(tmp_path / "out"), pytest.raises(RunDirError, match="in use by process .* start both with --join"):
        join(SMALL, tmp_path / "out")
    with pytest.raises(ConfigError, match="cannot restart with --force"):
        Plan(parse(SMALL, "small"), tmp_path / "out", force=True).run(join=True)


def test_a_claim_is_free_once_its_counter_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process on another machine nothing but the counter is known; its clock says nothing."""
    first, second = Claims(tmp_path / "work"), Claims(tmp_path / "work")
    now = [0.0]
    monkeypatch.setattr(claims_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(claims_module, "PULSE_SECONDS", 0.01)
    claim = first.take("unit")
    assert claim is not None
    monkeypatch.setattr(claims_module, "_boot_identity", lambda: "another machine")
    for _ in range(4):
        before = claim._counter
        assert second.take("unit") is None
        soon(lambda: claim._counter > before + 1)  # noqa: B023
        now[0] += claims_module.EXPIRY_SECONDS - 1
    claim._stop()  # as if its machine had lost its power
    assert second.take("unit") is None
    now[0] += claims_module.EXPIRY_SECONDS
    taken = second.take("unit")
    assert taken is not None
    assert first.take("unit") is None
    taken.release()


def test_the_first_result_stays(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result").write_text(name)
    assert claims_module.publish(tmp_path / "a", tmp_path / "target")
    assert not claims_module.publish(tmp_path / "b", tmp_path / "target")
    assert (tmp_path / "target" / "result").read_text() == "a"


def test_one_of_many_gets_a_unit(tmp_path: Path) -> None:
    def take() -> None:
        barrier.wait()
        taken.append(Claims(tmp_path / "work").take("unit"))

    barrier, taken = threading.Barrier(16), list[Any]()
    threads = [threading.Thread(target=take) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(claim is not None for claim in taken) == 1


def test_every_process_of_a_comparison_has_all_of_it(tmp_path: Path) -> None:
    def compare(folder: Path, **more: Any) -> fl.Comparison:
        cut = fl.partitions.iid(clients=3, max_train_per_client=30)
        given = {"partition": cut, "seeds": [0, 1], "rounds": 2, "progress_bar": False, "folder": folder, **more}
        return fl.compare(["fedavg", "ditto"], "digits", **given)

    other = fork(lambda: compare(tmp_path / "shared", join=True))
    together = compare(tmp_path / "shared", join=True)
    assert end(other) == 0
    here = compare(tmp_path / "here")
    assert together.results.keys() == here.results.keys()
    assert contents(tmp_path / "shared") == contents(tmp_path / "here")
    with pytest.raises(ConfigError, match="needs a shared folder"):
        compare(None, join=True)  # type: ignore[arg-type]


def test_the_command_joins_and_ctrl_c_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(tomli_w.dumps({**SMALL, "rounds": 100_000}))
    words = ["run", str(tmp_path / "long.toml"), "--out", str(tmp_path / "out"), "--join"]
    command = [sys.executable, "-m", "fedloom.lab.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        soon(lambda: list(tmp_path.glob(f"out/{WORK_FOLDER}/*/*/live/*")))
        first.send_signal(signal.SIGINT)
        _, said = first.communicate(timeout=600)
    assert first.returncode == 130
    lines = [line for line in said.splitlines() if "round" not in line]
    assert lines == [
        f"{Stop.INTERRUPTED.value} (other processes that joined are still running. "
        "Run the same command to join them again)"
    ]
