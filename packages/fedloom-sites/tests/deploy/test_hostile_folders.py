"""Deployment folders that somebody else wrote: an answer or a sentence; no traceback, wait or odd character."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedloom.errors import ConfigError, FedloomError, Stop
from fedloom.lab.cli import app
from fedloom.rows.channels import GaussianNoise
from fedloom_sites.deploy.ops.status import read_status, status_lines, status_table
from fedloom_sites.deploy.secure.pending import PendingSum, PendingSums
from fedloom_sites.deploy.server.run import serve_run
from fedloom_sites.deploy.setting_files import read_server
from fedloom_sites.deploy.site.handover import SITE_LOG_FILE, SOCKET_LOCK_FILE, hand_over
from fedloom_sites.deploy.site.ledger import BudgetSpent, Ledger
from tests.deploy.conftest import make_experiment
from tests.deploy.grid import outside_flower
from tests.deploy.test_members import Location, grid, plan_deployment, read, write_directory

pytestmark = pytest.mark.attack("hostile directories")

CONTENTS: dict[str, bytes | None] = {
    "pipe": None, "folder": None, "empty": b"", "noise": bytes(range(256)), "deep": b"[" * 100_000,
    "escape": b'{"what": "stop", "reason": "\\u001b[2J", "time": "\\u001b[2J", "detail": "\\u001b[2J"}\n',
    "list": b"[1]\n",
}  # fmt: skip
KEYS = {"nonce": bytes(16), "adverts": b"a", "question": b"q", "signed": {0: b"s"}}
WRONG: tuple[Any, ...] = (None, -1, 2**70, float("nan"), "x", [[1]], {"a": 1})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    outside_flower()
    folder = tmp_path_factory.mktemp("served") / "d"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _fd: None)
        write_directory(plan_deployment(make_experiment(rounds=1), 3), folder, Location())
        assert serve_run(grid(folder, range(3)), read(folder), lambda _: None) is Stop.DONE
    return folder


@pytest.fixture
def copy(served: Path, tmp_path: Path) -> Path:
    return shutil.copytree(served, tmp_path / "d")


def put(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    content = CONTENTS[kind]
    if content is not None:
        path.write_bytes(content)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


def shown(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), (words, done.exception)
    assert all(letter >= " " or letter in "\n\t" for letter in done.output), (words, done.output)


@pytest.mark.parametrize("kind", CONTENTS)
def test_files_of_the_server_may_be_anything(kind: str, copy: Path, record_property: Any) -> None:
    server = copy / "server"
    names = ("server.toml", "experiment.toml", "ca.crt", "results/metrics.parquet", "state/audit.jsonl")
    paths = [*(server / name for name in names), *server.glob("state/checkpoints/checkpoint-*.json")]
    paths = [path for path in paths if path.exists()]
    record_property("tries", len(paths))
    for path in paths:
        content = path.read_bytes()
        put(path, kind)
        shown(["deploy", "status", str(copy)])
        path.rmdir() if kind == "folder" else path.unlink()
        path.write_bytes(content)


@pytest.mark.parametrize("kind", CONTENTS)
def test_files_of_a_site_may_be_anything(kind: str, copy: Path, record_property: Any) -> None:
    site, names = copy / "sites" / "site-0", ("site.toml", "experiment.toml", "signing-key", "ca.crt")
    record_property("tries", 3 * len(names))
    for name in names:
        content = (site / name).read_bytes()
        put(site / name, kind)
        shown(["deploy", "models", str(site)])
        shown(["deploy", "approve", str(site)])
        shown(["deploy", "check", str(site), "--offline"])
        (site / name).rmdir() if kind == "folder" else (site / name).unlink()
        (site / name).write_bytes(content)


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_ledger_may_be_anything_and_releases_nothing_then(kind: str, tmp_path: Path) -> None:
    put(tmp_path / "ledger.jsonl", kind)
    book = Ledger(tmp_path, GaussianNoise(sigma=3.0, delta=1e-5), None, "a site", least=1)
    for call in (book.releases, lambda: book.release(1)):
        with pytest.raises(BudgetSpent, match=r"(is unknown|counts \d+)\. Restore"):
            call()


def kept_sum(folder: Path, name: str) -> tuple[PendingSums, Path]:
    """A sum that a server keeps, and one of its two files."""
    sums = PendingSums(folder)
    numbers = {"round": 1, "shared": [0], "clients": [0], "sums": {"uploads": 1}, "models": {}}
    sums.keep(PendingSum(**numbers, **KEYS, total=np.arange(3, dtype=np.uint64)))
    kept = sums.newest("uploads")
    assert kept is not None
    assert kept.total.tolist() == [0, 1, 2]
    [path] = folder.glob(name)
    return sums, path


@pytest.mark.parametrize("name", ["*.masked", "unmasked.json"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_what_is_kept_of_a_sum_may_be_anything(kind: str, name: str, tmp_path: Path) -> None:
    sums, path = kept_sum(tmp_path, name)
    put(path, kind)
    assert sums.newest("uploads") is None


@pytest.mark.parametrize("place", [0, 9, 23])
@pytest.mark.parametrize("name", ["*.masked", "unmasked.json"])
def test_one_wrong_bit_of_a_kept_sum_is_noticed(name: str, place: int, tmp_path: Path) -> None:
    sums, path = kept_sum(tmp_path, name)
    content = path.read_bytes()
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    assert sums.newest("uploads") is None


@pytest.mark.parametrize("kind", CONTENTS)
def test_what_a_message_is_handed_over_by_may_be_anything(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    put(file, kind)
    with pytest.raises(ConfigError, match="cannot read the site file"):
        hand_over(file, b"", os.getpid())
    file.rmdir() if kind == "folder" else file.unlink()
    file.write_text('fingerprint = "ab"\n')
    state = tmp_path / "state" / "ab"
    state.mkdir(parents=True)
    if CONTENTS[kind] is None:  # as a log or a lock, other contents do no harm
        put(state / SITE_LOG_FILE, kind)
        with pytest.raises(ConfigError, match=f"cannot write {state / SITE_LOG_FILE}"):
            hand_over(file, b"", os.getpid())
        put(state / SOCKET_LOCK_FILE, kind)
        with pytest.raises(ConfigError, match=f"cannot write {state / SOCKET_LOCK_FILE}"):
            hand_over(file, b"", os.getpid())


def test_every_fact_of_the_log_may_be_another(copy: Path, record_property: Any) -> None:
    server, tried, sentences = read_server(copy / "server" / "server.toml"), 0, list[str]()
    (server.results / "metrics.parquet").unlink()  # scores are of no fact of the log
    whole = [json.loads(line) for line in server.audit.read_text().splitlines()]
    first = {line["what"]: k for k, line in enumerate(whole)}
    for k in first.values():
        for key in whole[k]:
            for value in WRONG:
                facts = [*whole[:k], {**whole[k], key: value}, *whole[k + 1 :]]
                server.audit.write_text("".join(json.dumps(line) + "\n" for line in facts))
                tried += 1
                try:
                    status = read_status(server)
                    status_lines(status)
                    status_table(status)
                except FedloomError as error:
                    sentences.append(str(error))
    record_property("tries", tried)
    assert tried > len(sentences) > 10
    assert all("log and checkpoints are inconsistent" in sentence for sentence in sentences)
