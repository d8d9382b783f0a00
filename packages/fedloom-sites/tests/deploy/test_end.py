"""What a site holds to by itself: the agreed rounds, its last accepted state, and its budget."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message
from safetensors.torch import load_file

from fedloom.engine.privacy import epsilon
from fedloom.errors import CheckpointError, RunDirError, Stop
from fedloom.rows.channels import GaussianNoise
from fedloom.storage import disk
from fedloom.version import __version__
from fedloom_sites.deploy.audit import SENT_FILE, Audit, read_entries, verify_log
from fedloom_sites.deploy.protocol.envelope import (
    COMMON_FIELDS,
    PROTOCOL_VERSION,
    REQUEST_FIELDS,
    Kind,
    digest_arrays,
    seal_message,
)
from fedloom_sites.deploy.site.client import Client
from fedloom_sites.deploy.site.ledger import BudgetSpent, Ledger
from fedloom_sites.deploy.site.state import MODEL_FILE, ServerRewound, SiteState, StateGeneration
from tests.deploy.scene import FIRST, Scene, scene
from tests.deploy.sessions import losing, secured
from tests.deploy.test_faults_in_runs import personal
from tests.deploy.test_private import LOCAL, SMALL, limited, lines


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def ask(client: Client, kind: Kind, *arrays: bytes, **fields: Any) -> tuple[str, str]:
    """Status and reason of a site's answer to a message that is made up."""
    blank: dict[type, Any] = {int: 0, float: 1.0, bool: False, bytes: b"", str: "", list: []}
    head = {name: blank[type_] for name, type_ in (COMMON_FIELDS | REQUEST_FIELDS[kind]).items()}
    head |= {"protocol": PROTOCOL_VERSION, "release": __version__, "experiment": client.site.fingerprint, "kind": kind}
    head |= {"client": client.site.client, "digest": digest_arrays(arrays)} | fields
    answer = client.reply(seal_message(head, arrays))["head"]
    assert isinstance(answer, ConfigRecord)
    return str(answer["status"]), str(answer["reason"])


def download(client: Client) -> bytes:
    job, server = client.trainer.job, client.trainer.node.server
    return client.trainer.forms.write_down(job.down(server, 1, client.trainer.ids), server)


NOTES = ("lock", SENT_FILE, "asked.json")
"""Files that a refused message may change."""


def forget_models(client: Client) -> None:
    """Let a round be asked again on any model."""
    (client._memory.folder / "asked.json").unlink(missing_ok=True)


def files(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in NOTES}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A finished run of Ditto under local differential privacy."""
    here = scene(tmp_path_factory.mktemp("done"), "ditto", **SMALL, **LOCAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _fd: None)
        assert here.serve() is Stop.DONE
    return here


@pytest.mark.parametrize("t", [-7, 0, 5, 100, 10**9])
@pytest.mark.parametrize("accepted", [0, 3, 4])
def test_a_round_that_is_not_agreed_is_refused(t: int, accepted: int, done: Scene) -> None:
    client = done.clients()[0]
    before = files(client.site.state)
    message = download(client)
    for status, reason in (
        ask(client, "train", message, round=t, accepted=accepted, scored=-1),
        *([ask(client, "score", message, round=t, accepted=accepted)] if t else []),
    ):
        assert status == "refused"
        assert f"round {t} is not one of the agreed rounds 1 to 4" in reason
    assert files(client.site.state) == before


@pytest.mark.parametrize("t", [1, 2])
def test_a_round_that_is_over_is_refused(t: int, done: Scene) -> None:
    """Round 4 was accepted, so it is sent to nobody again but a server that went back by one."""
    client = done.clients()[0]
    before = files(client.site.state)
    status, reason = ask(client, "train", download(client), round=t, accepted=t - 1, scored=-1)
    assert (status, reason) == (
        "refused",
        f"round {t} is over: this site has already accepted round {client._memory.accepted()[0]}",
    )
    assert files(client.site.state) == before


def test_a_server_that_names_no_accepted_round_erases_no_model(done: Scene) -> None:
    client = done.clients()[0]
    before = files(client.site.state)
    assert client._memory.accepted()[0] == 4
    for accepted in (0, 1, 2):
        for kind in ("score", "train"):
            forget_models(client)
            more: dict[str, Any] = {"scored": 3, "global": True} if kind == "train" else {"global": True}
            status, reason = ask(client, kind, download(client), round=4, accepted=accepted, **more)  # type: ignore[arg-type]
            assert status == "refused"
            assert "back. The site keeps its state and model. Start" in reason
    assert files(client.site.state) == before


def test_the_last_accepted_state_outlives_a_server_that_claims_others(tmp_path: Path) -> None:
    """A server that names rounds as accepted which the site never computed: the last real state stays."""
    memory = SiteState(tmp_path, "a" * 64, 0)
    for t in (1, 2):
        memory.keep(StateGeneration(t, t - 1, "d", {"rows.w": torch.full((2,), float(t))}, {}))
        memory.settle(t)
    for t in (5, 7, 9, 11):
        state = memory.settle(t)
        assert state is not None
        assert state.round == 2
        memory.keep(StateGeneration(t + 1, 2, "d", {"rows.w": torch.zeros(2)}, {}))
    assert memory.read(2) is not None
    with pytest.raises(ServerRewound):
        memory.settle(7)


def test_the_model_of_a_lost_state_is_kept(tmp_path: Path) -> None:
    here = scene(tmp_path, "ditto", **SMALL)
    assert here.serve(here.grid(losing({(3, "train"): range(3)}))) is Stop.TOO_FEW
    [file] = here.sites[1].state.rglob(MODEL_FILE)
    before = load_file(file)["rows"]
    for path in here.sites[1].state.glob("*/round-*"):
        path.unlink()
    assert here.serve() is Stop.DONE
    [kept] = here.sites[1].state.rglob("*.lost")
    assert torch.equal(load_file(kept)["rows"], before)


def test_the_limit_is_that_of_the_agreed_rounds_by_default(tmp_path: Path) -> None:
    """A release that a crash lost is not given anew: the last round is one too many."""
    here = scene(tmp_path, "fedavg", **SMALL, **LOCAL)
    assert here.serve(here.grid(losing({(2, "train"): range(3)}))) is Stop.TOO_FEW
    for site in here.sites:
        for path in site.state.glob("*/round-000002.state"):
            path.unlink()
    assert here.serve() is Stop.TOO_FEW
    assert [x["round"] for x in lines(here.sites[0].state)] == [1, 2, 2, 3]
    assert all("the privacy budget of site" in x["reason"] for x in here.audit("rejected"))
    assert limited(here, 1000.0).serve() is Stop.DONE


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda _: b"",
    "zeros of the same length": lambda data: bytes(len(data)),
    "zeros and line ends": lambda data: bytes(c if c == 10 else 0 for c in data),
    "garbage": lambda data: os.urandom(len(data)),
    "without line ends": lambda data: data.replace(b"\n", b""),
    "the last line lost": lambda data: b"".join(data.splitlines(keepends=True)[:-1]),
    "the first line lost": lambda data: b"".join(data.splitlines(keepends=True)[1:]),
    "a line in the middle lost": lambda data: b"".join(
        x for k, x in enumerate(data.splitlines(keepends=True)) if k != 1
    ),
    "a line changed": lambda data: data.replace(b'"round": 2', b'"round": 9'),
    "a line cut": lambda data: data.replace(b'"round": 2', b'"ro'),
    "two lines swapped": lambda data: b"".join(data.splitlines(keepends=True)[k] for k in (1, 0, 2, 3)),
    "one line only": lambda data: data.splitlines(keepends=True)[0],
    "as many other lines": lambda data: b"{}\n" * 4,
}


@pytest.mark.parametrize("case", [*DAMAGE, "deleted"])
def test_a_damaged_ledger_gives_no_budget_anew(case: str, tmp_path: Path) -> None:
    """Four rounds are released, four more are asked for by a longer run; what is spent cannot be known."""
    here = scene(tmp_path, "fedavg", **SMALL, **LOCAL)
    here = limited(here, 1000.0)
    assert here.serve() is Stop.DONE
    site = here.sites[0]
    [file] = site.state.rglob("ledger.jsonl")
    if case == "deleted":
        file.unlink()
    else:
        file.write_bytes(DAMAGE[case](file.read_bytes()))
    client = here.clients()[0]
    before = files(site.state)
    with pytest.raises(
        BudgetSpent, match="is damaged in line|lists [0-9]+ releases, but the state in the same folder counts 4"
    ):
        client.trainer._ledger.release(4)
    assert files(site.state) == before


@pytest.mark.parametrize("back", ["lost", "older"])
def test_a_folder_that_is_lost_or_put_back_gives_no_budget_anew(back: str, tmp_path: Path) -> None:
    here = scene(tmp_path, "fedavg", **{**SMALL, "rounds": 4}, **LOCAL)
    folder, older = here.clients()[0]._memory.folder, tmp_path / "older"

    def copied(node: int, message: Message, reply: Message) -> Message | None:
        head = message.content["head"]
        if (node, head["kind"], head["round"]) == (FIRST, "train", 1):
            shutil.copytree(folder, older)
        return None if (head["kind"], head["round"]) == ("train", 3) else reply

    assert here.serve(here.grid(copied)) is Stop.TOO_FEW
    shutil.rmtree(folder)
    if back == "older":
        shutil.copytree(older, folder)
    before = folder / "ledger.jsonl"
    text = before.read_bytes() if before.exists() else b""
    assert here.serve() is Stop.TOO_FEW
    assert (
        "lists no release of round 2, which the server has accepted" in here.audit("rejected", client=0)[-1]["reason"]
    )
    assert (before.read_bytes() if before.exists() else b"") == text
    assert len(here.audit("accepted", kind="train", round=3)) == 2


def test_lines_that_a_crash_cut_short_count_and_the_chain_goes_on(tmp_path: Path) -> None:
    noise = GaussianNoise(sigma=3.0, delta=1e-5)
    book = Ledger(tmp_path, noise, epsilon(noise, 6), "x")
    file = tmp_path / "ledger.jsonl"
    for t in (1, 2):
        book.release(t)
        with file.open("ab") as torn:
            torn.write(b'{"number": 3, "bef')
    assert book.releases() == 4
    book.release(3)
    assert Ledger(tmp_path, noise, None, "x", least=5).releases() == 5
    book.release(4)
    with pytest.raises(BudgetSpent, match="release 7 would raise"):
        book.release(5)


def test_a_line_that_a_crash_cut_short_takes_no_later_one_with_it(tmp_path: Path) -> None:
    log = Audit(tmp_path / "audit.jsonl")
    for t in range(3):
        log.write("accepted", round=t)
        with (tmp_path / "audit.jsonl").open("ab") as torn:
            torn.write(b'{"time": "2026')
    assert [line["round"] for line in log.lines()] == [0, 1, 2]


@pytest.mark.parametrize("change", ["edited", "removed", "put in", "moved", "cut at the end", "emptied"])
def test_a_log_that_was_changed_is_found(change: str, tmp_path: Path) -> None:
    """Not where lines are missing at the end: the digest of the last line shows that, if it was noted."""
    log, path = Audit(tmp_path / "audit.jsonl"), tmp_path / "audit.jsonl"
    for t in range(5):
        log.write("accepted", round=t, reason="x" * 40_000 if t == 1 else None)
        if t == 2:
            with path.open("ab") as torn:
                torn.write(b'{"time": "2026')
    end = verify_log(path)
    assert end.lines == 6
    lines = path.read_bytes().splitlines()
    changed = {
        "edited": [lines[0], lines[1].replace(b"accepted", b"rejected"), *lines[2:]],
        "removed": [lines[0], *lines[2:]],
        "put in": [*lines[:2], lines[1], *lines[2:]],
        "moved": [lines[1], lines[0], *lines[2:]],
        "cut at the end": lines[:-1],
        "emptied": [],
    }[change]
    path.write_bytes(b"".join(line + b"\n" for line in changed))
    if change == "cut at the end":
        assert verify_log(path) != end
        return
    with pytest.raises(RunDirError, match=r"audit\.jsonl(: line [123] does not match the previous line| is empty)"):
        verify_log(path)


def test_logs_of_a_run_hold_and_count_what_left(tmp_path: Path) -> None:
    """Of the server and of every site; parameters of an upload are counted, and so are scores."""
    for masked in (False, True):
        folder = tmp_path / f"{masked}"
        here = secured(folder, "fedavg", rounds=2) if masked else scene(folder, "fedavg", **SMALL)
        assert here.serve() is Stop.DONE
        assert verify_log(here.server.audit).lines == len(here.audit())
        for site in here.sites:
            [log] = site.state.glob(f"*/{SENT_FILE}")
            assert verify_log(log).lines > 3
            trained = [x for x in read_entries(log) if x["kind"] in ("train", "masked")]
            assert trained
            assert all(x["parameters"] >= 650 for x in trained)
            assert all(not x["parameters"] for x in read_entries(log) if x["kind"] in ("hello", "keys", "unmask"))


def test_a_damaged_ledger_of_the_server_ends_the_run(tmp_path: Path) -> None:
    central = {"aggregator": {"kind": "private-mean", "clip": 1.0, "sigma": 2.0, "delta": 1e-5}}
    here = scene(tmp_path, "fedavg", **SMALL, **central)
    assert here.serve(here.grid(losing({(3, "train"): range(3)}))) is Stop.TOO_FEW
    (here.server.checkpoints / "ledger.jsonl").write_bytes(b"")
    assert here.serve() is Stop.BUDGET
    assert "lists 0 releases, but the state in the same folder counts 2" in here.summary()["detail"]


@pytest.mark.parametrize("factor", [0.0, 0.01, 30.0, -50.0])
def test_a_site_may_refuse_a_model_that_is_far_from_the_last(factor: float, tmp_path: Path) -> None:
    """Whole or in one layer; that of an honest run passes, and without the setting any is taken."""
    given: dict[str, Any] = {"model": {"kind": "mlp", "hidden": [8]}, "client_weights": "uniform"}
    here = scene(tmp_path, "fedavg", **{**SMALL, "rounds": 3} | given)
    here = here._replace(sites=[s.with_(model_change=4.0) for s in here.sites])
    assert here.serve(here.grid(losing({(3, "train"): range(3)}))) is Stop.TOO_FEW
    assert not here.audit("rejected")
    client = here.clients()[0]
    job, server = client.trainer.job, client.trainer.node.server
    down = job.down(server, 1, client.trainer.ids)
    for layer in (None, *job.oracle.layout.tree(down[0][None])):
        mask = torch.ones_like(down[0]) if layer is None else job.oracle.layout.mask(layer).to(down[0])
        if layer is not None and not bool((down[0] * mask).any()):
            continue  # a layer that was zero has no norm to compare with
        crafted = type(down)(down[0] * (1 - mask) + factor * mask * down[0], *down[1:])
        message = client.trainer.forms.write_down(crafted, server)
        forget_models(client)
        status, reason = ask(client, "train", message, round=3, accepted=2, scored=-1)
        assert (status, "accepts changes only up to a factor of 4" in reason) == ("refused", True)
    open_ = Client(here.sites[0].with_(model_change=None))
    assert ask(open_, "train", message, round=3, accepted=2, scored=-1)[0] == "ok"


def test_a_site_refuses_a_model_with_dead_units(tmp_path: Path) -> None:
    """As in a first layer that is made so that each unit shows one sample; an honest run passes."""
    given: dict[str, Any] = {"model": {"kind": "mlp", "hidden": [20]}, "client_weights": "uniform"}
    for decay in (0.0, 0.01):
        local = {"lr": 0.05, "epochs": 1, "batch_size": 200, "weight_decay": decay}
        here = scene(tmp_path / f"{decay}", "fedavg", **{**SMALL, "rounds": 2, "local": local} | given)
        here = here._replace(sites=[s.with_(dead_units=0.5) for s in here.sites])
        assert here.serve() is Stop.DONE
        assert not here.audit("rejected")
        client = Client(here.sites[0].with_(state=tmp_path / f"new-{decay}"))
        job, server = client.trainer.job, client.trainer.node.server
        down = job.down(server, 1, client.trainer.ids)
        first = job.oracle.layout.mask("fc1.bias").nonzero().flatten()
        for dead, passes in ((4, True), (14, False)):
            crafted = type(down)(down[0].index_fill(0, first[:dead], -1e3), *down[1:])
            message = client.trainer.forms.write_down(crafted, server)
            status, reason = ask(client, "train", message, round=1, accepted=0, scored=-1)
            assert status == ("ok" if passes else "refused"), reason
            assert passes or "than dead_units = 0.5 allows" in reason
            assert not re.search(r"[0-9]%|fc1", reason)  # no share of units, which is a value of a sample


ASKING = {"sampler": {"kind": "power-of-choice", "clients": 2, "candidates": 3}}


@pytest.mark.parametrize("kind", ["train", "score", "ask"])
def test_a_round_is_answered_on_few_models(kind: Kind, tmp_path: Path) -> None:
    """Crafted models in great number, whose answers can be subtracted: three of a round, each as often as it comes."""
    here = scene(tmp_path, "fedavg", **SMALL, **(ASKING if kind == "ask" else {}))
    client = here.clients()[0]
    job, server = client.trainer.job, client.trainer.node.server
    down, forms = job.down(server, 1, client.trainer.ids), client.trainer.forms

    def asked(site: Client, change: float, **fields: Any) -> tuple[str, str]:
        model = type(down)(down[0] + change, *down[1:])
        message = forms.write_down(model, server) if kind == "train" else forms.write_model(model[0])
        more = {"global": True} if kind == "score" else {"scored": -1} if kind == "train" else {}
        return ask(site, kind, message, **{"round": 1, **more, **fields})

    for k in (0, 1, 2, 1, 0):
        assert asked(client, 1e-3 * k) == ("ok", "")
    for site in (client, here.clients()[0]):  # after a start of its process too
        for k in (3, 4):
            status, reason = asked(site, 1e-3 * k)
            assert status == "refused"
            assert f"round 1: the site has already answered 3 models in messages of kind {kind}" in reason
        assert asked(site, 1e-3) == ("ok", "")
    if kind == "train":  # from another state, and models to be scored on the way, count as well
        assert asked(client, 0.0, round=2, accepted=0)[0] == "ok"
        assert [asked(client, 1e-3 * k, round=2, accepted=1)[0] for k in (0, 1, 0, 2)] == ["ok", "ok", "ok", "refused"]
        for k in range(4):
            parts = forms.write_down(down, server), forms.write_model(down[0] + 1e-3 * k)
            status, reason = ask(client, "train", *parts, round=3, accepted=1, scored=1, **{"global": True})
            assert status == "ok" if k < 3 else "of kind score" in reason
        for scored in (-2, 3, 10**9):
            status, reason = ask(client, "train", *parts, round=3, accepted=1, scored=scored, **{"global": True})
            assert (status, f"the server requests scores of round {scored} together with the training" in reason) == (
                "refused",
                True,
            )


@pytest.mark.parametrize("name", ["fedavg", "flame"])
def test_buffers_of_a_model_do_not_travel(name: str, tmp_path: Path) -> None:
    """An upload is of parameters: it has no running mean or variance, which of one sample would be that sample."""
    cut = {"model": {"kind": "cnn", "channels": [2], "kernel": 3, "hidden": [], "norm": "batch"}, "rounds": 1}
    here = scene(tmp_path, name, **SMALL | cut | {"local": {"lr": 0.05, "steps": 2, "batch_size": 1}})
    uploads = []
    for start in (0.0, 7.0):
        client = Client(here.sites[0].with_(state=tmp_path / f"{start}"))
        module = client.trainer.job.oracle.module
        buffers = [b for n, b in module.named_buffers() if "running" in n]
        assert buffers
        for buffer in buffers:
            buffer.fill_(start)
        assert ask(client, "train", download(client), round=1, scored=-1) == ("ok", "")
        generation = client._memory.read(1)
        assert generation is not None
        uploads.append(bytes(generation.tensors["reply"].numpy()))
        assert len(uploads[-1]) < len(download(client)) + 8 * sum(b.numel() for b in buffers)
        assert {client.trainer.job.oracle.layout.d} == {sum(p.numel() for p in module.parameters())}
    assert uploads[0] == uploads[1]


@pytest.mark.parametrize("name", ["ditto", "flame", "pfedme", "apfl"])
def test_neither_samples_nor_personal_models_leave_a_site(name: str, tmp_path: Path) -> None:
    """No reply has eight numbers of a sample or of the site's own model in a row, but what the server sent."""
    here, sent, received = scene(tmp_path, name, **SMALL), dict[int, bytes](), dict[int, bytes]()

    def look(node: int, message: Message, reply: Message) -> Message:
        for content, by_node in ((reply.content, sent), (message.content, received)):
            by_node[node] = by_node.get(node, b"") + b"".join(a.data for a in content["arrays"].values())
        return reply

    clients = here.clients()
    assert here.serve(here.grid(look, clients)) is Stop.DONE

    def part_left(row: torch.Tensor, node: int) -> float:
        """The part of the pieces of a row that a site has sent and was not sent."""
        pieces = [piece for piece in row.split(8) if len(piece) == 8 and piece.unique().numel() > 4]
        texts = [[piece.to(dtype).numpy().tobytes() for dtype in (torch.float32, torch.float64)] for piece in pieces]
        left = [any(text in sent[node] and text not in received[node] for text in both) for both in texts]
        return sum(left) / max(1, len(left))

    for client in clients:
        node, trainer = FIRST + client.site.client, client.trainer
        index, _ = trainer.fed.gather("train", torch.tensor([client.site.client]))
        rows = [sample.flatten() for sample in trainer.fed.fetch(index)]
        assert rows
        assert not any(part_left(row, node) for row in rows)
        # where no sample has a gradient, FLAME's own model may be what it sends
        assert part_left(personal(here, client.site.client).flatten(), node) < 0.03
        assert part_left(torch.frombuffer(bytearray(sent[node][-512:]), dtype=torch.float64), node) == 1


def test_a_site_has_a_log_of_its_own_of_what_left_it(tmp_path: Path) -> None:
    """Every reply, refusals too, with its digest, which the server's log has of the same reply."""
    here = scene(tmp_path, "fedavg", **SMALL | {"evaluate": {"every": 1}})
    assert here.serve() is Stop.DONE
    for site in here.sites:
        [file] = site.state.rglob(SENT_FILE)
        sent = read_entries(file)
        accepted = here.audit("accepted", client=site.client)
        assert [(x["kind"], x["round"], x["digest"]) for x in sent] == [
            (x["kind"], x["round"], x["digest"]) for x in accepted
        ]
        assert {x["kind"] for x in sent if x["bytes"]} == {"train"}
        assert {x["kind"] for x in sent if x["numbers"]} == {"train", "score"}
    client = here.clients()[0]
    assert ask(client, "train", b"", round=99)[0] == "refused"
    last = read_entries(client._memory.folder / SENT_FILE)[-1]
    assert (last["status"], last["bytes"], last["round"]) == ("refused", 0, 99)


def test_what_cannot_be_noted_does_not_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = scene(tmp_path, "fedavg", **SMALL)
    client = here.clients()[0]

    def full(*_: Any, **__: Any) -> None:
        raise CheckpointError("no space left on the disk")

    with monkeypatch.context() as patch:
        patch.setattr(Audit, "write", full)
        assert ask(client, "hello") == ("unable", "no space left on the disk")

    def forbidden(step: str, path: Path) -> None:
        if step == "create" and path.name in ("ledger.jsonl", SENT_FILE):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(disk, "hook", forbidden)
    status, reason = ask(here.clients()[1], "hello")
    assert status == "unable"
    assert f"{SENT_FILE} could not be written: Permission denied. " in reason
    book = Ledger(tmp_path, GaussianNoise(sigma=3.0, delta=1e-5), None, "a site")
    with pytest.raises(CheckpointError, match=r"ledger\.jsonl could not be written: Permission denied\. "):
        book.release(1)


@pytest.mark.parametrize(("kind", "accepted"), [("train", 4), ("train", 10**9), ("score", 5), ("score", -1)])
def test_a_round_that_cannot_be_accepted_yet_is_refused(kind: Kind, accepted: int, done: Scene) -> None:
    """A site that took it as accepted could follow no honest server any more."""
    client = done.clients()[0]
    before = files(client.site.state)
    status, reason = ask(client, kind, download(client), round=4, accepted=accepted)
    assert (status, f"names round {accepted} as accepted, but requests round 4" in reason) == ("refused", True)
    assert files(client.site.state) == before
