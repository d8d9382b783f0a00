"""--force, and damage: nothing of a run that goes on is lost, and what is damaged stops its own method only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import tomli_w
from typer.testing import CliRunner

from fedloom.errors import RunDirError
from fedloom.lab.cli import app
from fedloom.lab.experiment import Plan, parse
from fedloom.lab.experiment.events import Event
from fedloom.lab.tune import Tuning
from fedloom.rundir import LIVE_FOLDER
from fedloom.storage.locks import lock

pytestmark = pytest.mark.attack("two runs on one directory")

SMALL: dict[str, Any] = {
    "rounds": 3,
    "data": {"source": "digits"},
    "partition": {"kind": "iid", "clients": 3, "max_train_per_client": 30, "validation": 0.2},
    "model": {"kind": "softmax"},
    "engine": {"workers": 1},
    "method": [{"algorithm": "fedavg"}, {"algorithm": "ditto", "label": "two words"}],
}
SEARCH = {**SMALL, "tune": {"trials": 2, "space": {"all": {"local.lr": [0.01, 0.02]}}}}


def contents(folder: Path) -> dict[str, bytes]:
    files = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in ("timings.parquet", ".lock")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "out"
    Plan(parse(SMALL), out).run(page=False)
    return out


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("search") / "out"
    Tuning(SEARCH, "search.toml", out).run()
    return out


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "out")


def test_labels_that_differ_in_case_are_refused_where_the_disk_ignores_it(tmp_path: Path) -> None:
    experiment = {**SMALL, "rounds": 1, "method": [{"algorithm": "fedavg", "label": label} for label in ("a b", "A B")]}
    plan = Plan(parse(experiment), tmp_path / "out")
    (tmp_path / "out" / ".LOCK").write_text("")  # as such a disk answers for .lock
    with pytest.raises(RunDirError, match=r"the disk ignores case, but the labels 'a b' and 'A B'"):
        plan.run(page=False)
    (tmp_path / "out" / ".LOCK").unlink()
    assert [outcome.status for outcome in plan.run(page=False)] == ["done", "done"]


def test_force_deletes_nothing_of_a_directory_in_use(copy: Path) -> None:
    before = contents(copy)
    plan = Plan(parse(SMALL), copy, force=True)
    assert contents(copy) == before
    with lock(copy), pytest.raises(RunDirError, match="in use by process"):
        plan.run(page=False)
    assert contents(copy) == before
    plan.run(page=False)
    assert contents(copy).keys() == before.keys()


DOORS = (
    "run", "run --force", "run --force --method fedavg", "run --method fedavg", "run --set name=other",
    "run --force --set rounds=9", "tune", "tune --force", "tune --trials 1",
)  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_no_command_changes_a_directory_in_use(door: str, copy: Path, searched: Path, tmp_path: Path) -> None:
    command, *more = door.split()
    out = copy if command == "run" else shutil.copytree(searched, tmp_path / "search")
    file, before = tmp_path / "e.toml", contents(out)
    file.write_text(tomli_w.dumps(SMALL if command == "run" else SEARCH))
    with lock(out):
        result = CliRunner().invoke(app, [command, str(file), "--out", str(out), *more])
    assert result.exit_code == 2, result.output
    assert "in use by process" in result.output
    assert contents(out) == before


def test_a_second_run_with_force_leaves_the_first_its_results(finished: Path, tmp_path: Path) -> None:
    def disturb(event: Event) -> None:
        if event.round == 2 and not refused:
            for partly in (False, True):
                with pytest.raises(RunDirError, match="in use"):
                    Plan(parse(SMALL), tmp_path / "out", force=True, partly=partly).run(page=False)
                refused.append(event.label)

    refused: list[str] = []
    Plan(parse(SMALL), tmp_path / "out").run(disturb, page=False)
    assert len(refused) == 2
    same = ("metrics.parquet", "partition.parquet", "summary.json", "experiment.toml")
    assert all((tmp_path / "out" / name).read_bytes() == (finished / name).read_bytes() for name in same)
    assert {o.status for o in Plan(parse(SMALL), tmp_path / "out").run(page=False)} == {"done"}


def test_another_process_with_force_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    file, out = tmp_path / "long.toml", tmp_path / "out"
    file.write_text(tomli_w.dumps({**SMALL, "rounds": 100_000}))
    command = [sys.executable, "-m", "fedloom.lab.cli", "run", str(file), "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        try:
            end = time.monotonic() + 600
            while not list(out.glob(f"{LIVE_FOLDER}/*")) and first.poll() is None and time.monotonic() < end:
                time.sleep(0.1)  # a run listens to signals once its first round has begun
            before = set(contents(out))
            second = CliRunner().invoke(app, ["run", str(file), "--out", str(out), "--force", "--set", "rounds=1"])
            assert second.exit_code == 2, second.output
            assert f"in use by process {first.pid}" in second.output
            assert before <= set(contents(out))
        finally:
            os.kill(first.pid, signal.SIGINT)
            first.wait(600)
    assert (out / "experiment.toml").exists()
    assert {run["status"] for run in json.loads((out / "summary.json").read_text())["runs"]} == {"interrupted"}


def test_a_search_with_force_deletes_nothing_of_one_that_goes_on(searched: Path, tmp_path: Path) -> None:
    out = shutil.copytree(searched, tmp_path / "out")
    before = contents(out)
    search = Tuning(SEARCH, "search.toml", out, force=True)
    assert contents(out) == before
    with lock(out), pytest.raises(RunDirError, match="in use by process"):
        search.run()
    assert contents(out) == before
    search.run()
    assert contents(out).keys() == before.keys()


def test_force_that_is_killed_while_it_deletes_leaves_a_run_directory(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[Path] = []

    def killed(path: Path, **_: object) -> None:
        if len(deleted) == 2:
            raise KeyboardInterrupt
        deleted.append(path)

    plan = Plan(parse(SMALL), copy, force=True)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            plan.run(page=False)
    assert {o.status for o in Plan(parse(SMALL), copy, force=True).run(page=False)} == {"done"}


def damage(out: Path, name: str) -> None:
    for path in (out / "checkpoints" / name).glob("checkpoint-*"):
        path.write_bytes(path.read_bytes()[:-7])


LINKS = ["checkpoints", "models", "live", "checkpoints/fedavg-0", "models/fedavg-0", "trials", "checkpoints/fedavg"]


@pytest.mark.parametrize("link", LINKS)
def test_nothing_is_written_or_deleted_where_a_linked_folder_leads(
    link: str, finished: Path, searched: Path, tmp_path: Path
) -> None:
    """A directory that somebody else has made could lead to one's own files, which --force and trials delete."""
    is_search = link in LINKS[-2:]
    out = shutil.copytree(searched if is_search else finished, tmp_path / "out")
    precious = shutil.copytree(finished / "checkpoints", tmp_path / "precious")
    shutil.rmtree(out / link, ignore_errors=True)
    (out / link).parent.mkdir(exist_ok=True)
    (out / link).symlink_to(precious, target_is_directory=True)
    before = contents(precious)

    def begin(**options: bool) -> None:
        if is_search:
            Tuning(SEARCH, "search.toml", out, **options).run()
        else:
            Plan(parse(SMALL), out, **options).run(page=False)

    for options in ({}, {"force": True}, *(() if is_search else ({"force": True, "partly": True},))):
        with pytest.raises(RunDirError, match="is a link"):
            begin(**options)
        assert contents(precious) == before


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_checkpoint_stops_its_own_method_only(workers: int, copy: Path) -> None:
    damage(copy, "two+words-0")
    document = {**SMALL, "seeds": [0, 1], "engine": {"workers": workers}}
    before = pq.read_table(copy / "metrics.parquet")
    outcomes = Plan(parse(document), copy).run(page=False)
    assert [o.status for o in outcomes] == ["done", "done", "failed", "done"]
    assert [o.is_damaged for o in outcomes] == [False, False, True, False]
    assert "no checkpoint can be read" in outcomes[2].reason
    assert outcomes[2].reason.endswith("--force --method 'two words'")
    now = pq.read_table(copy / "metrics.parquet")
    mine = (pc.field("method") == "two words") & (pc.field("seed") == 0)
    rows = [table.filter(mine) for table in (before, now)]
    assert rows[0].equals(rows[1])
    assert (copy / "models" / "two+words-0" / "personal.safetensors").exists()


def test_force_with_a_method_begins_that_one_anew(finished: Path, copy: Path, tmp_path: Path) -> None:
    damage(copy, "two+words-0")
    file = tmp_path / "small.toml"
    file.write_text(tomli_w.dumps(SMALL))
    kept = contents(copy / "checkpoints" / "fedavg-0")

    def call(*more: str) -> Any:
        return CliRunner().invoke(app, ["run", str(file), "--out", str(copy), *more])

    assert call().exit_code == 1
    other = call("--method", "two words", "--force", "--set", "partition.clients=4")
    assert other.exit_code == 2
    assert "a different experiment: partition.clients" in other.output
    changed = call("--method", "two words", "--force", "--set", "method.two words.lam=0.5")
    assert changed.exit_code == 0, changed.output
    again = call("--method", "two words", "--force")
    assert again.exit_code == 0, again.output
    assert contents(copy / "checkpoints" / "fedavg-0") == kept
    assert call().exit_code == 0
    assert (copy / "metrics.parquet").read_bytes() == (finished / "metrics.parquet").read_bytes()
