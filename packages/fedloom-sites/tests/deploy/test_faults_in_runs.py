"""Sites and servers that die, come back, lag, fill their disk or say nonsense: the run goes on, or says why it cannot.

The numbers are those of the list of faults that a deployment survives (docs/deploy-protocol.md).
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from fedloom.errors import CheckpointError, ConfigError, FedloomError, RunDirError, Stop
from fedloom.storage import disk
from fedloom_sites.deploy.ops.status import read_status
from fedloom_sites.deploy.protocol.envelope import HEAD_RECORD
from fedloom_sites.deploy.server.run import serve_run
from fedloom_sites.deploy.setting_files import read_server, read_site
from fedloom_sites.deploy.site.client import Client
from fedloom_sites.deploy.site.state import latest_models
from fedloom_sites.transport import node as node_module
from tests.deploy.grid import FakeGrid
from tests.deploy.scene import FIRST, Scene, changed, scene

SMALL = {
    "partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.5, "max_train_per_client": 12},
    "evaluate": {"every": 4},
    "rounds": 4,
    "client_weights": "uniform",  # by samples, a run begins when all sites are there
}
"""Four rounds of three sites; FLAME has a personal model, a dual and a server's copy of every site."""
LOST = 1
"""The client that something happens to."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A run that nothing happens to."""
    here = scene(tmp_path_factory.mktemp("whole"), "flame", **SMALL)
    assert here.serve() is Stop.DONE
    return here


def personal(here: Scene, client: int) -> torch.Tensor:
    [mine] = latest_models(here.sites[client].state)
    return load_file(mine.path)["rows"]


def same(here: Scene, other: Scene) -> None:
    """The same models at the server and at every site."""
    assert torch.equal(here.model(), other.model())
    for site in here.sites:
        assert torch.equal(personal(here, site.client), personal(other, site.client))


def loses(*, client: int, rounds: set[int], kind: str = "train") -> Callable[[int, Message, Message], Any]:
    """Replies of a client that never arrive."""

    def fault(node: int, message: Message, reply: Message) -> Any:
        head = message.content[HEAD_RECORD]
        return None if node == FIRST + client and head["kind"] == kind and head["round"] in rounds else reply

    return fault


class Killed(BaseException):
    """A process that is gone."""


def killing(round: int, kind: str) -> Callable[[int, Message, Message], Any]:
    """The server dies when the last site's reply of a round arrives."""

    def fault(node: int, message: Message, reply: Message) -> Any:
        head = message.content[HEAD_RECORD]
        if head["kind"] == kind and head["round"] == round and node == FIRST + 2:
            raise Killed
        return reply

    return fault


def trained(here: Scene, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A list that fills with (round, client) of every training that is really computed."""
    done: list[tuple[int, int]] = []
    real = node_module.run_clients

    def make(job: Any, down: Any, task: Any) -> Any:
        done.append((task.round, int(task.ids)))
        return real(job, down, task)

    monkeypatch.setattr(node_module, "run_clients", make)
    return done


def test_a_client_that_dies_in_a_round(tmp_path: Path) -> None:  # 16
    here = scene(tmp_path, "flame", **SMALL)
    assert here.serve(here.grid(loses(client=LOST, rounds={2})), quorum=2) is Stop.DONE
    assert [r["round"] for r in here.audit("missed", client=LOST)] == [2]
    assert {r["round"] for r in here.audit("accepted", kind="train", client=LOST)} == {1, 3, 4}


def test_a_client_that_was_not_heard_is_as_if_not_sampled(tmp_path: Path) -> None:  # 16, 18
    """It trained and kept a pending state, which the next message discards: as if it had not been asked at all."""
    here = scene(tmp_path / "lost", "flame", **SMALL)
    assert here.serve(here.grid(loses(client=LOST, rounds={2})), quorum=2) is Stop.DONE
    other = scene(tmp_path / "off", "flame", **SMALL)
    grid = other.grid()
    node, real = FIRST + LOST, grid.nodes[FIRST + LOST]

    def absent(message: Message) -> Message:
        head = message.content[HEAD_RECORD]
        grid.fault = lambda n, m, r: None if (n, m.content[HEAD_RECORD]["round"]) == (node, 2) else r
        asked = head["kind"] == "train" and head["round"] == 2
        return message if asked else real(message)  # its disk is never touched in round 2

    grid.nodes[node] = absent
    assert other.serve(grid, quorum=2) is Stop.DONE
    same(here, other)


def test_a_node_that_is_killed_and_comes_back(tmp_path: Path, whole: Scene) -> None:  # 17
    """A new process with the site's disk, and another number: its state goes on where it was."""
    here = scene(tmp_path, "flame", **SMALL)
    grid = here.grid()

    def fault(node: int, message: Message, reply: Message) -> Any:
        if (
            message.content[HEAD_RECORD]["round"] == 2
            and message.content[HEAD_RECORD]["kind"] == "train"
            and node == FIRST + LOST
        ):
            del grid.nodes[node]
            grid.nodes[FIRST + 50] = Client(here.sites[LOST]).answer
            return None
        return reply

    grid.fault = fault
    assert here.serve(grid, patience=5.0) is Stop.DONE
    same(here, whole)


def test_a_client_that_missed_rounds_goes_on_from_its_last_accepted_state(tmp_path: Path) -> None:  # 18
    here = scene(tmp_path, "flame", **SMALL)
    assert here.serve(here.grid(loses(client=LOST, rounds={2, 3})), quorum=2) is Stop.DONE
    memory = Client(here.sites[LOST])._memory
    assert memory.accepted() == (4, 1)
    generation = memory.read(4)
    assert generation is not None
    assert generation.base == 1


def test_states_of_experiments_are_never_mixed(tmp_path: Path) -> None:  # 18
    here = scene(tmp_path, "flame", **SMALL)
    assert here.serve() is Stop.DONE
    before = personal(here, 0)
    other = scene(tmp_path, {"algorithm": "flame", "rho": 0.5}, **SMALL)
    assert other.sites[0].state == here.sites[0].state
    server = other.server.with_(checkpoints=tmp_path / "other", results=tmp_path / "other")
    assert other._replace(server=server).serve() is Stop.DONE
    alone = scene(tmp_path / "alone", {"algorithm": "flame", "rho": 0.5}, **SMALL)
    assert alone.serve() is Stop.DONE
    assert len(latest_models(here.sites[0].state)) == 2
    found = {m.experiment: load_file(m.path)["rows"] for m in latest_models(here.sites[0].state)}
    assert torch.equal(found[other.sites[0].fingerprint], personal(alone, 0))
    assert torch.equal(found[here.sites[0].fingerprint], before)


@pytest.mark.parametrize(("kind", "round"), [("train", 1), ("train", 4), ("score", 4)])
def test_a_server_that_is_killed_goes_on(
    kind: str, round: int, tmp_path: Path, whole: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:  # 19, 22
    here = scene(tmp_path, "flame", **SMALL)
    done = trained(here, monkeypatch)
    with pytest.raises(Killed):
        here.serve(here.grid(killing(round, kind)))
    assert here.serve() is Stop.DONE
    same(here, whole)
    assert len(done) == len(set(done)) == 12  # what was asked for again was not trained again


def test_a_server_that_went_back(tmp_path: Path, whole: Scene, monkeypatch: pytest.MonkeyPatch) -> None:  # 19
    """The sites have accepted a round that the server lost: same download, same reply."""
    here = scene(tmp_path, "flame", **SMALL)
    with pytest.raises(Killed):
        here.serve(here.grid(killing(4, "train")))
    newest = max(here.server.checkpoints.glob("checkpoint-*.json"), key=lambda p: int(p.stem.split("-")[1]))
    newest.write_bytes(b"torn")
    done = trained(here, monkeypatch)
    assert here.serve() is Stop.DONE
    same(here, whole)
    assert {t for t, _ in done} <= {4}
    notes = [r["reason"] for r in here.audit("accepted") if "went back" in r.get("reason", "")]
    assert len(notes) == 3


def test_a_site_that_lost_its_disk_begins_anew(tmp_path: Path) -> None:  # 18
    here = scene(tmp_path, "flame", **SMALL)
    with pytest.raises(Killed):
        here.serve(here.grid(killing(3, "train")))
    for path in here.sites[LOST].state.glob("*/round-*"):
        path.unlink()
    assert here.serve() is Stop.DONE
    assert any("so the site begins anew" in r.get("reason", "") for r in here.audit("accepted", client=LOST))
    assert bool(here.model().isfinite().all())


def test_a_run_weighed_by_samples_states_why_it_waits_for_all(tmp_path: Path) -> None:
    """Though the quorum is there: every share depends on the samples of the missing site."""
    here = scene(tmp_path, "fedavg", **{**SMALL, "client_weights": "samples"})
    two = here.grid()
    del two.nodes[FIRST + LOST]
    assert here.serve(two, quorum=2) is Stop.TOO_FEW
    detail = here.summary()["detail"]
    assert "2 of 3 sites are connected, missing: site-1" in detail
    assert re.search(
        r"\. For client_weights = 'samples', the server needs every site's number of samples at the start of the run",
        detail,
    )
    assert here.serve() is Stop.DONE


def test_who_the_first_round_waits_for_is_said_once(tmp_path: Path) -> None:
    here, said = scene(tmp_path, "fedavg", **SMALL), list[str]()
    two = here.grid()
    del two.nodes[FIRST + LOST]
    assert serve_run(two, here.server, said.append) is Stop.TOO_FEW
    waits = f"fedloom: waits for site-1, at most {here.server.patience:g} s"
    assert [line for line in said if "waits for" in line] == [waits]
    assert serve_run(here.grid(), here.server, said.append) is Stop.DONE
    assert len([line for line in said if "waits for" in line]) == 1


def test_too_few_sites(tmp_path: Path, whole: Scene) -> None:  # 20
    here = scene(tmp_path, "flame", **SMALL)
    nobody = FakeGrid({})
    assert here.serve(nobody) is Stop.TOO_FEW
    assert "site-0, site-1, site-2" in here.summary()["detail"]
    two = here.grid()
    del two.nodes[FIRST + LOST]
    assert here.serve(two) is Stop.TOO_FEW
    assert "2 of 3 sites are connected, missing: site-1" in here.summary()["detail"]
    assert not [m for m in two.sent if m.metadata.message_type == "train"]
    lost = loses(client=LOST, rounds={3})
    assert here.serve(here.grid(lost)) is Stop.TOO_FEW
    assert "round 3: only 2 of 3 sites sent a usable answer" in here.summary()["detail"]
    assert here.serve() is Stop.DONE
    same(here, whole)


def test_too_few_for_the_rule(tmp_path: Path) -> None:  # 21
    krum = {"aggregator": {"kind": "krum", "f": 1}}
    with pytest.raises(ConfigError, match=r"2 f \+ 3|2f"):
        scene(tmp_path / "three", "fedavg", **SMALL, **krum).serve()
    five = {**SMALL, "partition": {"kind": "iid", "clients": 5, "max_train_per_client": 12}}
    here = scene(tmp_path / "five", "fedavg", **five, **krum)
    assert here.serve(here.grid(loses(client=LOST, rounds={2})), quorum=2) is Stop.TOO_FEW
    assert "krum needs" in here.summary()["detail"]
    assert here.summary()["runs"][0]["status"] == "interrupted"
    assert here.serve() is Stop.DONE


def test_too_few_kept_rows_for_the_rule_are_awaited(tmp_path: Path) -> None:
    """The rule decides on rows that the server keeps, of which there are too few until other sites have answered."""
    krum = {"aggregator": {"kind": "krum", "f": 1}}
    five = {**SMALL, "partition": {"kind": "iid", "clients": 5, "max_train_per_client": 12}}
    here = scene(tmp_path, "flame", **five, **krum)
    assert here.serve(here.grid(loses(client=LOST, rounds={1})), quorum=2) is Stop.TOO_FEW
    assert here.serve(here.grid(loses(client=LOST, rounds={2})), quorum=2) is Stop.DONE


@pytest.mark.parametrize("cut", [0, 100, -1])
@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_torn_checkpoint(cut: int, suffix: str, tmp_path: Path, whole: Scene) -> None:  # 23
    here = scene(tmp_path, "flame", **SMALL)
    with pytest.raises(Killed):
        here.serve(here.grid(killing(4, "train")))
    newest = max(here.server.checkpoints.glob(f"checkpoint-*.{suffix}"), key=lambda p: int(p.stem.split("-")[1]))
    newest.write_bytes(newest.read_bytes()[:cut])
    assert here.serve() is Stop.DONE
    same(here, whole)


@pytest.mark.parametrize("what", ["flip", "cut", "pickle"])
def test_a_damaged_state_of_a_site(what: str, tmp_path: Path) -> None:  # 23, 24
    here = scene(tmp_path, "flame", **SMALL)
    with pytest.raises(Killed):
        here.serve(here.grid(killing(3, "train")))
    accepted = next(here.sites[LOST].state.glob("*/round-000002.state"))
    data = bytearray(accepted.read_bytes())
    data[len(data) // 2] ^= 1
    accepted.write_bytes({"flip": bytes(data), "cut": bytes(data[:-9]), "pickle": b"\x80\x05K\x01."}[what])
    assert here.serve() is Stop.DONE
    assert list(here.sites[LOST].state.glob("*/*.damaged"))
    notes = [r["reason"] for r in here.audit("accepted", client=LOST) if r.get("reason")]
    assert any("set aside" in note and "resumes from round 1" in note for note in notes)


def test_checkpoints_that_cannot_be_used(tmp_path: Path) -> None:  # 24
    here = scene(tmp_path, "fedavg", **SMALL)
    with pytest.raises(Killed):
        here.serve(here.grid(killing(3, "train")))
    other = scene(tmp_path, "fedavg", **{**SMALL, "rounds": 5})
    with pytest.raises(RunDirError, match="contains checkpoints of a different run: its fingerprint is"):
        other.serve()
    here = scene(tmp_path, "fedavg", **SMALL)
    for path in here.server.checkpoints.glob("checkpoint-*.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "body": {**content["body"], "format": 0}}))
    with pytest.raises(CheckpointError, match="no checkpoint can be read"):
        here.serve()


def full(folder: Path, after: int = 0) -> Callable[[str, Path], None]:
    """A disk that is full below a folder."""
    count = [0]

    def hook(op: str, path: Path) -> None:
        if op == "write" and folder in path.parents:
            count[0] += 1
            if count[0] > after:
                raise OSError(errno.ENOSPC, "No space left on device")

    return hook


def test_a_full_disk_of_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # 25
    here = scene(tmp_path, "flame", **SMALL)
    monkeypatch.setattr(disk, "hook", full(here.sites[LOST].state))
    assert here.serve(quorum=2) is Stop.DONE
    reasons = {r["reason"] for r in here.audit("rejected", client=LOST)}
    assert all("the disk is full" in reason for reason in reasons)
    assert not here.audit("accepted", kind="train", client=LOST)
    assert len(here.audit("accepted", kind="train")) == 8


def test_a_full_disk_of_the_server(tmp_path: Path, whole: Scene, monkeypatch: pytest.MonkeyPatch) -> None:  # 25
    here = scene(tmp_path, "flame", **SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "hook", full(here.server.checkpoints, after=12))
        with pytest.raises(CheckpointError, match="the disk is full") as stop:
            here.serve()
        found = read_status(here.server)
        assert (found["state"], found["reason"]) == ("stopped", str(stop.value))
        patch.setattr(disk, "hook", full(here.server.checkpoints.parent))
        with pytest.raises(CheckpointError, match="the disk is full"):
            here.serve()
    assert here.serve() is Stop.DONE
    assert read_status(here.server)["state"] == "done"
    same(here, whole)


def test_a_network_that_is_cut(tmp_path: Path, whole: Scene, monkeypatch: pytest.MonkeyPatch) -> None:  # 27
    here = scene(tmp_path, "flame", **SMALL)
    grid = here.grid()
    for name in ("push_messages", "pull_messages", "get_node_ids"):
        real, turns = getattr(grid, name), iter(range(100))

        def flaky(*args: Any, real: Any = real, turns: Any = turns) -> Any:
            if next(turns) % 3 == 1:
                raise ConnectionError("connection refused")
            return real(*args)

        monkeypatch.setattr(grid, name, flaky)
    assert here.serve(grid, ttl=5.0) is Stop.DONE
    same(here, whole)


def test_two_servers(tmp_path: Path) -> None:  # 28
    here = scene(tmp_path, "fedavg", **SMALL)
    errors: list[FedloomError] = []

    def fault(node: int, message: Message, reply: Message) -> Message:
        if not errors:
            with pytest.raises(RunDirError, match="is in use by process") as error:
                here.serve(FakeGrid({}))
            errors.append(error.value)
        return reply

    assert here.serve(here.grid(fault)) is Stop.DONE
    assert errors


def csv_scene(folder: Path, tables: list[str]) -> Scene:
    """Sites with tables of their own: two features and a label."""
    data = folder / "all.csv"
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.random.default_rng(0).normal(size=(60, 2))
    data.write_text("a,b,y\n" + "".join(f"{a},{b},{int(a > b)}\n" for a, b in rows))
    here = scene(folder, "fedavg", **{**SMALL, "data": {"source": str(data)}})
    sites = []
    for site, text in zip(here.sites, tables, strict=True):
        own = folder / f"{site.site}.csv"
        own.write_text(text or data.read_text())
        sites.append(site.with_(data={"source": str(own)}, share="all"))
    return here._replace(sites=sites)


def test_a_site_without_data(tmp_path: Path) -> None:  # 29
    here = csv_scene(tmp_path, ["", "a,b,y\n", ""])
    assert here.serve() is Stop.DONE
    assert not here.audit(kind="train", client=LOST)
    assert here.summary()["sites"]["site-1"]["here"] is True
    [mine] = latest_models(here.sites[LOST].state)
    assert (mine.kind, mine.round) == ("global", 4)
    assert torch.equal(personal(here, LOST)[0], here.model())


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("a,b,y\n1,2,0\n3,,1\n4,5,1\n", "missing value"),
        ("a,b,y\n1,2,0\n3,nan,1\n4,5,1\n", "missing value|finite|NaN"),
        ("a,b,y\n1,2,0\n3,4,2\n5,6,1\n", "the label 'y' is '2', but only 0, 1 are allowed"),
        ("a,b,y\n1,2,-1\n3,4,0\n5,6,1\n", "the label 'y' is '-1', but only 0, 1 are allowed"),
        ("a,b,y\n1,2,0.5\n3,4,0\n5,6,1\n", "the label 'y' is '0.5', but only 0, 1 are allowed"),
        ("a,c,y\n1,3,0\n3,5,1\n5,5,1\n", "no column 'b'"),  # further columns are left alone, one that is missing is not
        ("nonsense", "label|column|rows|header"),
        (
            "a,b,y\n1,2,Miller\n3,4,Smith\n5,6,Smith\n",
            "the label 'y' is 'Miller', 'Smith', but only 0, 1 are allowed",
        ),  # the wrong column
    ],
)
def test_bad_data_of_a_site(  # 31, and another schema
    table: str, sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The site's own log has the sentence; the server's too, where it cannot quote a cell."""
    here = csv_scene(tmp_path, ["", table, ""])
    assert here.serve(quorum=2) is Stop.DONE
    reasons = {r["reason"] for r in here.audit("rejected", kind="hello", node=FIRST + LOST)}
    assert reasons
    assert "Miller" not in here.server.audit.read_text()
    told = "; ".join(reasons) + capfd.readouterr().err
    assert any(word in told for word in sentence.split("|")), told
    assert not here.audit(kind="train", client=LOST)
    assert len(here.audit("accepted", kind="train")) == 8


def test_a_site_with_one_sample_of_one_class(tmp_path: Path) -> None:  # 30
    here = csv_scene(tmp_path, ["", "a,b,y\n0.5,2,1\n", ""])
    sites = [s.with_(data={**s.data, "task": "classification"}) if s.client == LOST else s for s in here.sites]
    assert here._replace(sites=sites).serve(quorum=2) is Stop.DONE
    assert bool(here.model().isfinite().all())


@pytest.mark.parametrize(
    "more", [{}, {"aggregator": {"kind": "geometric-median"}}, {"upload_transform": {"kind": "clip"}}]
)
@pytest.mark.parametrize("method", [{"algorithm": "equitable-fl", "clusters": 2}, {"algorithm": "flame"}])
def test_updates_that_are_all_the_same(method: dict[str, Any], more: dict[str, Any], tmp_path: Path) -> None:  # 32
    still = {**SMALL, "rounds": 2, "local": {"lr": 1e-40, "steps": 1}}
    here = scene(tmp_path, method, **still, **more)
    assert here.serve() in {Stop.DONE, Stop.UNCHANGED}  # flame sends its own state, which moves by rounding
    assert bool(here.model().isfinite().all())


def test_a_straggler(tmp_path: Path) -> None:  # 33
    """A site that is slower than the deadline in every round: the others are not held up, and it is counted."""
    here = scene(tmp_path, "fedavg", **SMALL)
    assert here.serve(here.grid(loses(client=LOST, rounds={1, 2, 3, 4})), quorum=2) is Stop.DONE
    assert len(here.audit("missed", client=LOST)) == 4
    assert len(here.audit("accepted", kind="train")) == 8


def test_numbers_of_samples_do_not_change_in_a_run(tmp_path: Path) -> None:
    here = scene(tmp_path, "fedavg", **SMALL)
    with pytest.raises(Killed):
        here.serve(here.grid(killing(3, "train")))
    grid = here.grid()
    honest = grid.nodes[FIRST + LOST]

    def grown(message: Message) -> Message:
        reply = honest(message)
        hello = message.content[HEAD_RECORD]["kind"] == "hello"
        return changed(reply, LOST, head={"sizes": [500, 0, 0]}) if hello else reply

    grid.nodes[FIRST + LOST] = grown
    assert here.serve(grid, quorum=2) is Stop.DONE
    assert "at the start of the run" in here.audit("rejected", kind="hello")[0]["reason"]


@pytest.mark.parametrize("fixed", [False, True])
def test_samples_that_change_at_equal_size(fixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cell of a site's table is another from round 3 on: told once, or refused until the table is as it was."""
    here = csv_scene(tmp_path, ["", "", ""])
    here = here._replace(sites=[s.with_(fixed_data=fixed) for s in here.sites])
    own = tmp_path / "site-1.csv"
    table = own.read_text()
    grid = here.grid()

    def anew(message: Message) -> Message:  # Flower starts a process for every message
        if message.content[HEAD_RECORD]["round"] == 3:
            lines = table.splitlines()
            own.write_text("\n".join([*lines[:-1], lines[-1].replace(lines[-1].split(",")[0], "0.125")]) + "\n")
        return Client(here.sites[LOST]).answer(message)

    grid.nodes[FIRST + LOST] = anew
    said: list[str] = []
    assert serve_run(grid, here.server.with_(quorum=2), said.append) is Stop.DONE
    sentence = "the samples of site-1 differ from those at the start"
    if fixed:
        assert {r["round"] for r in here.audit("rejected", kind="train", client=LOST)} == {3, 4}
        assert all(sentence in r["reason"] for r in here.audit("rejected", client=LOST))
        own.write_text(table)
        assert grid.nodes[FIRST + LOST](grid.sent[0]).content[HEAD_RECORD]["status"] == "ok"
    else:
        [told] = [r for r in here.audit("accepted", client=LOST) if sentence in r.get("reason", "")]
        assert (told["round"], told["site"]) == (3, "site-1")
        assert {r["round"] for r in here.audit("accepted", kind="train", client=LOST)} == {1, 2, 3, 4}
    assert any(sentence in line for line in said)
    assert not [r for r in here.audit() if r.get("client") != LOST and sentence in r.get("reason", "")]


def test_the_ledger_says_which_samples_a_release_is_of(tmp_path: Path) -> None:
    noise = {"upload_transform": {"kind": "gaussian-noise", "clip": 1.0, "sigma": 2.0, "delta": 1e-5}}
    here = scene(tmp_path, "fedavg", **SMALL, **noise)
    assert here.serve() is Stop.DONE
    path = next(here.sites[LOST].state.glob("*/ledger.jsonl"))
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [e["samples"] for e in entries] == [Client(here.sites[LOST]).trainer.samples] * 4
    assert entries[0]["samples"] not in here.server.audit.read_text()


def test_another_experiment_at_a_site(tmp_path: Path) -> None:
    here = scene(tmp_path / "a", "fedavg", **SMALL)
    other = scene(tmp_path / "b", "fedavg", **{**SMALL, "rounds": 9})
    sites = [other.sites[i] if i == LOST else s for i, s in enumerate(here.sites)]
    assert here._replace(sites=sites).serve(quorum=2) is Stop.DONE
    [refusal] = {r["reason"] for r in here.audit("rejected", kind="hello")}
    assert here.sites[0].fingerprint[:16] in refusal
    assert other.sites[0].fingerprint[:16] in refusal


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("nonsense = 1", "unknown key 'nonsense'"),
        ('quorum = "x"', "quorum"),
        ("deadline = -1", "deadline"),
        ("", "name"),
    ],
)
def test_settings_are_refused_at_the_start(line: str, sentence: str, tmp_path: Path) -> None:  # 35
    path = tmp_path / "settings.toml"
    path.write_text(line)
    for reader in (read_server, read_site):
        with pytest.raises(ConfigError, match=rf"settings.toml: .*({sentence}|unknown key|name)"):
            reader(path)


def test_a_finished_run_asks_no_site(tmp_path: Path) -> None:
    here = scene(tmp_path, "fedavg", **SMALL)
    assert here.serve() is Stop.DONE
    before = {p: p.read_bytes() for p in (here.folder / "results").iterdir()}
    said: list[str] = []
    assert serve_run(here.grid(clients=[]), here.server.with_(patience=1e-3), said.append) is Stop.DONE
    assert said == ["fedloom: all rounds are done. For more rounds, deploy an experiment with more rounds"]
    assert before == {p: p.read_bytes() for p in (here.folder / "results").iterdir()}


def test_a_run_that_is_done_but_has_no_results_writes_them(tmp_path: Path) -> None:
    """The server was killed between its last checkpoint and its last file."""
    here = scene(tmp_path, "fedavg", **SMALL)
    assert here.serve() is Stop.DONE
    before, summary = {p.name: p.read_bytes() for p in (here.folder / "results").iterdir()}, here.summary()
    shutil.rmtree(here.folder / "results")
    assert here.serve() is Stop.DONE
    after, again = {p.name: p.read_bytes() for p in (here.folder / "results").iterdir()}, here.summary()
    assert before.keys() == after.keys()
    assert {n for n in before if before[n] != after[n]} <= {"summary.json"}
    for name, site in again["sites"].items():  # they were greeted once more, and that is all that is new
        assert site.pop("last_reply") > summary["sites"][name].pop("last_reply")
    assert summary.pop("digest") != again.pop("digest")
    assert summary == again
