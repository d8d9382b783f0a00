"""One wrong bit anywhere in the files of a run or a deployment: it is noticed, or has no effect on any figure or model.

The quick tests flip a few bits of every file, the slow ones as many as an audit did, and more.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from flwr.app import Message

from fedloom.engine.privacy import epsilon
from fedloom.errors import FedloomError, Stop
from fedloom.lab import report
from fedloom.lab.experiment import Plan, parse
from fedloom.rows.channels import GaussianNoise
from fedloom_sites.deploy.site.ledger import Ledger
from tests.deploy.scene import FIRST, Scene, scene
from tests.deploy.sessions import kind_of, secured
from tests.deploy.test_faults_in_runs import Killed, killing, personal
from tests.deploy.test_hostile_folders import kept_sum

pytestmark = pytest.mark.attack("flipped bits")
TIMES = [1, pytest.param(12, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
"""Bits per file; of files with one name in several folders, the quick tests take one."""
SMALL: dict[str, Any] = {
    "rounds": 2,
    "data": {"source": "digits"},
    "partition": {"kind": "iid", "clients": 3, "max_train_per_client": 30, "validation": 0.2},
    "model": {"kind": "softmax"},
    "engine": {"workers": 1, "checkpoint_every": 1e6},
    "method": [{"algorithm": "ditto"}, {"algorithm": "scaffold"}],
}
CUT: dict[str, Any] = {
    "partition": {"kind": "iid", "clients": 3, "max_train_per_client": 12},
    "rounds": 4,
    "evaluate": {"every": 9},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def files(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return [path.relative_to(folder) for path in paths if path.stat().st_size]


def flip(path: Path, seed: str) -> int:
    """Flip one bit, by the seed; its place is returned."""
    content = bytearray(path.read_bytes())
    place = int(np.random.default_rng(zlib.crc32(seed.encode())).integers(8 * len(content)))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)
    return place


def flipped(whole: Path, copy: Path, times: int) -> Iterator[tuple[Path, int]]:
    """The copy with one bit of one file flipped, several times for each file."""
    every = files(whole)
    for name in every if times > 1 else {path.name: path for path in every}.values():
        for k in range(times):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole, copy)
            yield name, flip(copy / name, f"{name.name} {k}")


def outcome(action: Callable[[], Any]) -> tuple[Any, str]:
    """What an action returns, or None and the sentence."""
    try:
        return action(), ""
    except FedloomError as error:
        return None, str(error)


def same_rows(a: Path, b: Path) -> bool:
    tables = [pq.read_table(path).to_pylist() for path in (a, b)]
    return sorted(map(repr, tables[0])) == sorted(map(repr, tables[1]))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "out"
    Plan(parse(SMALL), out).run(page=False)
    return out


@pytest.mark.parametrize("times", TIMES)
def test_a_run_directory(times: int, finished: Path, tmp_path: Path, record_property: Any) -> None:
    """The page has the same figures or there is none; the next run has the same files, or names what is damaged."""

    def page(run: Path) -> str:
        report.write_report([run], tmp_path / "report.html", charts=False)
        return (tmp_path / "report.html").read_text()

    copy, tried = tmp_path / "out", 0
    shutil.copytree(finished, copy)
    clean = page(copy)
    for name, place in flipped(finished, copy, times):
        tried += 1
        shown, sentence = outcome(lambda: page(copy))
        assert shown == clean or name.name in sentence, (name, place)
        ends, sentence = outcome(lambda: Plan(parse(SMALL), copy).run(page=False))
        if ends is None:
            assert name.name in sentence or "a different experiment" in sentence
            continue
        damaged = any(end.is_damaged for end in ends)
        assert damaged == (name.parts[0] == "checkpoints"), (name, place)
        assert same_rows(copy / "metrics.parquet", finished / "metrics.parquet"), (name, place)
        for path in files(finished):
            fixed = path.parts[0] == "models" or (path.suffix in (".toml", ".json") and len(path.parts) == 1)
            if fixed and not damaged:
                assert (copy / path).read_bytes() == (finished / path).read_bytes(), (name, place, path)
    record_property("tries", tried)
    assert tried >= 9 * times


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scene, Path, list[torch.Tensor]]:
    """A deployment whose server died in round 3, a copy of its folder, and the models that it would have had."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _fd: None)
        here = scene(tmp_path_factory.mktemp("stopped") / "d", "flame", **CUT)
        with pytest.raises(Killed):
            here.serve(here.grid(killing(3, "train")))
        whole = shutil.copytree(here.folder, here.folder.parent / "whole")
        assert here.serve() is Stop.DONE
    assert not noted(here)
    return here, whole, models_of(here)


def noted(here: Scene) -> list[str]:
    """The sentences of the server's log."""
    return [line["reason"] for line in here.audit() if line.get("reason") and line["what"] != "stop"]


def models_of(here: Scene) -> list[torch.Tensor]:
    return [here.model(), *(personal(here, site.client) for site in here.sites)]


@pytest.mark.parametrize("times", TIMES)
def test_a_deployment(times: int, stopped: Any, record_property: Any) -> None:
    """It goes on to the same models; or a sentence names the site, the file or both."""
    (here, whole, models), tried = stopped, 0
    for name, place in flipped(whole, here.folder, times):
        tried += 1
        end, sentence = outcome(lambda: here.serve(quorum=2))
        same = end is Stop.DONE and all(map(torch.equal, models_of(here), models))
        assert same or end is not Stop.DONE or noted(here), (name, place)
        assert end or sentence
    record_property("tries", tried)
    assert tried >= 9 * times


@pytest.mark.parametrize("times", [1, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", ["session.json", "opened.json"])
def test_a_session(file: str, times: int, tmp_path: Path, record_property: Any) -> None:
    """Of sums under masks: the sums stay right, as other sites open them; or the site says that it cannot."""
    record_property("tries", times)
    expected = None
    for k in range(times):
        here = secured(tmp_path / str(k), "fedavg", rounds=3)
        expected = here.simulate().models.rows("global") if expected is None else expected
        clients = here.clients()

        def look(node: int, message: Message, reply: Message, clients: Any = clients, k: int = k) -> Message:
            if (kind_of(message), int(message.content["head"]["round"]), node) == ("masked", 2, FIRST + 3):
                for path in clients[3]._memory.folder.rglob(file):
                    flip(path, f"{file} {k}")
            return reply

        assert here.serve(here.grid(look, clients)) is Stop.DONE
        torch.testing.assert_close(here.model(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_ledger(times: int, tmp_path: Path, record_property: Any) -> None:
    """No flipped bit gives budget anew: the releases are as many as before, or none can be made."""
    noise = GaussianNoise(sigma=3.0, delta=1e-5)
    for t in range(1, 5):
        Ledger(tmp_path, noise, None, "x").release(t)
    book = Ledger(tmp_path, noise, epsilon(noise, 9), "x", least=4)
    whole = (tmp_path / "ledger.jsonl").read_bytes()
    for k in range(times):
        flip(tmp_path / "ledger.jsonl", f"ledger {k}")
        count, sentence = outcome(book.releases)
        assert (count or 0) >= 4 or re.search(r"(is unknown|counts \d+)\. Restore", sentence)
        (tmp_path / "ledger.jsonl").write_bytes(whole)
    record_property("tries", times)


@pytest.mark.parametrize("times", [10, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["*.masked", "unmasked.json"])
def test_a_kept_sum(name: str, times: int, tmp_path: Path, record_property: Any) -> None:
    sums, path = kept_sum(tmp_path, name)
    whole = path.read_bytes()
    for k in range(times):
        flip(path, f"{name} {k}")
        kept = sums.newest("uploads")
        assert kept is None or kept.total.tolist() == [0, 1, 2]
        path.write_bytes(whole)
    record_property("tries", times)
