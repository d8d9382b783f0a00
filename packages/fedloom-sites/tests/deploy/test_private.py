"""Noise, budgets and ledgers of a deployment."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from fedloom.algorithms import FedAvg
from fedloom.data.input_spec import COMPARED_FACTS
from fedloom.engine.privacy import epsilon
from fedloom.errors import Refused, Stop
from fedloom.rows.aggregators import PrivateMean
from fedloom.rows.channels import GaussianNoise
from fedloom.version import __version__
from fedloom_sites.deploy.noise import ReleasedNoise, deployed_part
from fedloom_sites.deploy.ops.check import check_site
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.deploy.protocol.envelope import (
    COMMON_FIELDS,
    PROTOCOL_VERSION,
    STATUS_FIELDS,
    digest_arrays,
    seal_message,
)
from fedloom_sites.deploy.secure.opened import read_checked
from fedloom_sites.deploy.site.client import Client
from fedloom_sites.deploy.site.ledger import Ledger
from tests.deploy.grid import wire
from tests.deploy.scene import Scene, scene

SMALL = {"partition": {"kind": "iid", "clients": 3, "max_train_per_client": 12}, "evaluate": {"every": 9}, "rounds": 4}
STILL = {"local": {"lr": 1e-40, "steps": 1}}
LOCAL = {"upload_transform": {"kind": "gaussian-noise", "clip": 1.0, "sigma": 3.0, "delta": 1e-5}}
CENTRAL = {"aggregator": {"kind": "private-mean", "clip": 1.0, "sigma": 3.0, "delta": 1e-5}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in next(folder.rglob("ledger.jsonl")).read_text().splitlines()]


def limited(here: Scene, limit: float) -> Scene:
    return here._replace(sites=[site.with_(epsilon=limit) for site in here.sites])


def test_a_site_stops_before_its_budget_is_exceeded(tmp_path: Path) -> None:  # 26
    here = scene(tmp_path, "fedavg", **SMALL, **LOCAL)
    noise = deployed_part(here.experiment.methods[0].setting.upload_transform)
    assert isinstance(noise, ReleasedNoise)
    here = limited(here, (epsilon(noise, 2) + epsilon(noise, 3)) / 2)
    assert here.serve() is Stop.TOO_FEW
    for site in here.sites:
        assert [x["round"] for x in lines(site.state)] == [1, 2]
        assert lines(site.state)[-1]["epsilon"] == pytest.approx(epsilon(noise, 2))
    assert all("budget of site" in r["reason"] for r in here.audit("rejected"))


def test_a_run_stops_before_its_budget_is_exceeded(tmp_path: Path) -> None:  # 26
    for how, settings in (("local", LOCAL), ("central", CENTRAL)):
        here = scene(tmp_path / how, "fedavg", **SMALL, **settings)
        method = here.experiment.methods[0]
        noise = deployed_part(method.setting.upload_transform or method.setting.aggregator)
        assert isinstance(noise, GaussianNoise | PrivateMean)
        limit = (epsilon(noise, 2) + epsilon(noise, 3)) / 2
        assert here.serve(epsilon=limit) is Stop.BUDGET
        assert len(here.audit("accepted", kind="train")) == 6
        assert here.serve(epsilon=limit) is Stop.BUDGET  # and running it again changes nothing
        assert len(here.audit("accepted", kind="train")) == 6


def test_the_entry_comes_before_the_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # 26
    """A crash while the noise is drawn leaves the entry, and nothing that was sent."""
    here = scene(tmp_path, "fedavg", **SMALL, **LOCAL)

    def crash(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ReleasedNoise, "send", crash)
        with pytest.raises(KeyboardInterrupt):
            here.serve()
    assert [x["round"] for x in lines(here.sites[0].state)] == [1]
    assert not list(here.sites[0].state.rglob("*.state"))
    here = limited(here, 1000.0)  # what is agreed on is epsilon of four releases, and one was lost
    assert here.serve() is Stop.DONE
    assert [x["round"] for x in lines(here.sites[0].state)] == [1, 1, 2, 3, 4]


def test_a_round_asked_again_is_not_noised_again(tmp_path: Path) -> None:  # 26
    """The first reply is lost; the second has the same bytes, and the ledger one entry."""
    here = scene(tmp_path, "fedavg", **SMALL, **LOCAL)
    seen: dict[tuple[int, int], list[bytes]] = {}

    def fault(node: int, message: Message, reply: Message) -> Message | None:
        head = message.content["head"]
        if head["kind"] != "train":
            return reply
        sent = seen.setdefault((node, head["round"]), [])
        sent.append(next(iter(reply.content["arrays"].values())).data)
        return reply if len(sent) > 1 else None

    assert here.serve(here.grid(fault), patience=20.0) is Stop.DONE
    assert all(len(sent) >= 2 and len(set(sent)) == 1 for sent in seen.values())
    assert [x["round"] for x in lines(here.sites[0].state)] == [1, 2, 3, 4]


def test_an_entry_that_was_torn_counts(tmp_path: Path) -> None:
    noise = GaussianNoise(sigma=3.0, delta=1e-5)
    book = Ledger(tmp_path, noise, epsilon(noise, 2), "x")
    book.release(1)
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(b'{"time": "2026')
    with pytest.raises(Refused, match="release 3 would raise"):
        book.release(2)


def test_a_limit_without_noise_releases_nothing(tmp_path: Path) -> None:
    here = limited(scene(tmp_path, "fedavg", **SMALL), 1.0)
    assert here.serve() is Stop.TOO_FEW
    assert all("without accounted noise" in r["reason"] for r in here.audit("rejected"))


def test_a_limit_without_noise_answers_no_question_either(tmp_path: Path) -> None:
    """A server that asks candidates for their losses before it trains: a site with a limit says none."""
    asks = {"sampler": {"kind": "power-of-choice", "clients": 2}, "evaluate": {"every": 1}}
    here = limited(scene(tmp_path, "fedavg", **{**SMALL, **asks}), 1.0)
    seen: list[Message] = []
    assert here.serve(here.grid(lambda _node, _message, reply: (seen.append(reply), reply)[1])) is Stop.TOO_FEW
    told = [r for r in seen if r.content["head"]["kind"] != "hello"]
    assert {str(r.content["head"]["kind"]) for r in told} >= {"ask", "train"}
    assert not [r for r in told if r.content["arrays"] or r.content.get("metrics")]


def test_noise_comes_from_the_operating_system(tmp_path: Path) -> None:
    """Two runs of one seed have different noise of the size that was asked for; in simulation they are the same."""
    for how, settings, scale in (("local", LOCAL, 3 / math.sqrt(3)), ("central", CENTRAL, 1.0)):
        models = []
        for k in range(2):
            here = scene(tmp_path / f"{how}{k}", "fedavg", **{**SMALL, "rounds": 1}, **STILL, **settings)
            assert here.serve() is Stop.DONE
            models.append(here.model())
        start = scene(tmp_path / f"{how}-start", "fedavg", **{**SMALL, "rounds": 1}, **STILL)
        assert start.serve() is Stop.UNCHANGED
        moves = [model - start.model() for model in models]
        assert float((moves[0] - moves[1]).norm()) > 1
        for move in moves:  # 650 coordinates: the standard deviation is known to 3 % (one sigma)
            assert float(move.std()) == pytest.approx(scale, rel=0.15)
        first, second = (here.simulate().models.rows("global") for _ in range(2))
        assert torch.equal(first, second)


def test_the_private_mean_is_bounded_and_refuses_what_it_cannot_protect(tmp_path: Path) -> None:
    rows = {"w": torch.randn(5, 40, dtype=torch.float64) * 100, "c": torch.randn(5, 3, dtype=torch.float64)}
    other = {name: value.clone() for name, value in rows.items()}
    for value in other.values():
        value[2] = 0
    rule = PrivateMean(clip=2.0, sigma=0.0)
    ctx: Any = type("Ctx", (), {"rng": lambda self, _purpose: torch.Generator(), "ids": torch.arange(5)})()
    a, _ = rule.apply({}, rows, torch.ones(5, 1), "w", ctx)
    b, _ = rule.apply({}, other, torch.ones(5, 1), "w", ctx)
    change = torch.cat([a[name] - b[name] for name in rows]).norm()
    assert 0 < float(change) <= 2.0 / 5 + 1e-12
    for method, why in (
        ("fedacs", "clips differences, but clients of FedACS upload models"),
        ("flame", "clips differences, but clients of FLAME upload models"),
    ):
        with pytest.raises(Refused, match=why):
            scene(tmp_path / method, method, **SMALL, **CENTRAL).serve()


def test_replies_are_what_was_signed(tmp_path: Path) -> None:
    """Noise or not, a reply survives the wire bit for bit."""
    here = scene(tmp_path, "fedavg", **{**SMALL, "rounds": 1}, **LOCAL)
    assert here.serve(here.grid(lambda _node, _message, reply: wire(reply))) is Stop.DONE
    assert not here.audit("rejected")


# --- what leaves a site when a delta is in force


def replies(here: Scene, **settings: Any) -> dict[str, list[Message]]:
    """Every reply of a run to its end, by the kind of message it answers."""
    seen: dict[str, list[Message]] = {}

    def look(_node: int, message: Message, reply: Message) -> Message:
        seen.setdefault(message.content["head"]["kind"], []).append(reply)
        return reply

    assert here.serve(here.grid(look), **settings) is Stop.DONE
    return seen


@pytest.mark.parametrize("limit", [None, 1000.0])
@pytest.mark.parametrize("how", [LOCAL, CENTRAL])
def test_no_score_and_no_count_of_work_leaves_a_site(tmp_path: Path, how: dict[str, Any], limit: float | None) -> None:
    """With and without a limit of the site's own: noised uploads, what is public, and acknowledgements."""
    here = scene(tmp_path, "fedavg", **{**SMALL, "evaluate": {"every": 1}}, **how)
    if limit is not None and how is LOCAL:
        here = limited(here, limit)
    seen = replies(here)
    assert {kind: len(found) for kind, found in seen.items()} == {"hello": 3, "score": 3, "train": 12}
    for kind, found in seen.items():
        for reply in found:
            head = dict(reply.content["head"])
            assert not reply.content.get("metrics")
            assert head["reason"] == ""
            assert len(reply.content.get("arrays", ())) == (kind == "train")
            own = {"train": {"samples", "work"}, "score": {"samples"}}.get(kind, {"sizes", "figures", *COMPARED_FACTS})
            assert set(head) == {*COMMON_FIELDS, *STATUS_FIELDS, *own}
            assert head.get("figures", "") == ""
            if kind == "train":
                assert head["work"] == [0, 0, 0]
    assert not here.audit("rejected")


def test_scores_leave_a_site_that_promises_nothing(tmp_path: Path) -> None:
    """The same run without a delta has them: the test above looks at the right place."""
    bare = {"upload_transform": {k: v for k, v in LOCAL["upload_transform"].items() if k != "delta"}}
    seen = replies(scene(tmp_path, "fedavg", **{**SMALL, "rounds": 1}, **bare))
    assert all(reply.content["metrics"] for reply in seen["score"])
    assert all(sum(reply.content["head"]["work"]) > 0 for reply in seen["train"])


def test_a_question_is_refused_whatever_the_server_asks(tmp_path: Path) -> None:
    """A server that asks what the agreed sampler never would."""
    for how, word in ((LOCAL, "does not answer analyses, because"), (CENTRAL, "does not answer analyses, because")):
        here = scene(tmp_path / word / str(how is LOCAL), "fedavg", **SMALL, **how)
        site = Client(here.sites[0])
        head = {
            "protocol": PROTOCOL_VERSION, "release": __version__, "experiment": here.sites[0].fingerprint, "kind":
                "ask",
            "round": 1, "client": 0, "nonce": b"0" * 16, "digest": digest_arrays([b"x"]),
        }  # fmt: skip
        question = Message(seal_message(head, [b"x"]), dst_node_id=100, message_type="query", ttl=9.0)
        reply = dict(site.answer(question).content["head"])
        assert reply["status"] == "refused"
        assert word in reply["reason"]


def test_answers_without_noise_are_refused_before_anything_starts(tmp_path: Path) -> None:
    """At `deploy init`, at `deploy check` and by the server."""
    for n, asks in enumerate(
        ({"sampler": {"kind": "power-of-choice", "clients": 2}}, {"aggregation_weights": {"kind": "fairfed"}})
    ):
        here = scene(tmp_path / str(n), "fedavg", **SMALL, **LOCAL, **asks)
        found = [f.sentence for f in check_site(here.sites[0], offline=True) if f.level == "refused"]
        assert any("answer without noise" in sentence for sentence in found)
        with pytest.raises(Refused, match="answer without noise"):
            plan_deployment(here.experiment)
        with pytest.raises(Refused, match="answer without noise"):
            here.serve()


def test_the_check_says_what_an_upload_costs(tmp_path: Path) -> None:
    here = scene(tmp_path, "fedavg", **SMALL, **LOCAL)
    noise = deployed_part(here.experiment.methods[0].setting.upload_transform)
    [said] = [f for f in check_site(here.sites[0], offline=True) if "privacy" in f.sentence]
    assert said.level == "ok"
    assert f"epsilon {epsilon(noise, 1):.3g}, and 4 cost {epsilon(noise, 4):.3g}" in said.sentence
    bare = limited(scene(tmp_path / "bare", "fedavg", **SMALL), 1.0)
    assert any("without accounted noise" in f.sentence for f in check_site(bare.sites[0], offline=True))


@pytest.mark.parametrize("how", ["raises", "not finite"])
def test_training_that_fails_is_no_answer_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    """Whether the samples of a site break the training is no answer either: noise alone is sent."""
    here = scene(tmp_path, "fedavg", **{**SMALL, "rounds": 1}, **LOCAL)
    whole = FedAvg.client

    def broken(self: FedAvg, down: Any, rows: Any, work: Any) -> Any:
        if work.ids.tolist() == [1] and bool(work.steps.any()):
            if how == "raises":
                raise ValueError("patient Miller-Smith has a weight of 1e999")
            up, rows = whole(self, down, rows, work)
            return type(up)(up[0] * torch.nan), rows
        return whole(self, down, rows, work)

    monkeypatch.setattr(FedAvg, "client", broken)
    seen = replies(here)
    assert len(seen["train"]) == 3
    assert len(here.audit("accepted", kind="train")) == 3
    assert not here.audit("rejected")
    assert all("Miller-Smith" not in str(reply.content["head"]) for found in seen.values() for reply in found)
    assert ("Miller-Smith" in capfd.readouterr().err) == (
        how == "raises"
    )  # a row that is not finite passes the channel as 0
    norms = [r["norm"] for r in here.audit("accepted", kind="train")]
    assert all(0.8 < norm / (3 * 650**0.5) < 1.2 for norm in norms)


@pytest.mark.parametrize("how", [{}, LOCAL, CENTRAL])
@pytest.mark.parametrize(
    ("table", "secret"),
    [
        ("age,disease\n4711,no\nMiller,yes\n", "Miller"),  # a cell that is no number
        ("Miller,no\n12,yes\n", "Miller"),  # no header: the first patient is one
    ],
)
def test_errors_tell_the_server_no_value_of_a_sample(
    table: str, secret: str, how: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server reads that the site cannot answer; the sentence that quotes the cell is in the site's own log."""
    here = scene(tmp_path, "fedavg", **SMALL, **how)
    (tmp_path / "patients.csv").write_text(table)
    data = {"source": "csv", "path": str(tmp_path / "patients.csv"), "target": "disease"}
    broken = here.sites[0].with_(data=data, share="all")
    here = here._replace(sites=[broken, *here.sites[1:]])
    assert here.serve() is Stop.TOO_FEW
    [reason] = {r["reason"] for r in here.audit("rejected")}
    assert reason == "the site rejected the message: site site-0 could not answer. Its own log states the reason"
    assert secret not in here.server.audit.read_text() + json.dumps(here.summary())
    lines = [line for line in capfd.readouterr().err.splitlines() if secret in line]
    assert lines
    assert all(re.match(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ fedloom: site ", line) for line in lines)


@pytest.mark.parametrize("how", [LOCAL, CENTRAL, {}])
def test_scoring_that_fails_is_no_answer_under_a_delta(
    how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a site whose samples break the scoring, alone or with a training, the server reads what it does of others."""
    here = scene(tmp_path, "fedavg", **{**SMALL, "rounds": 1, "evaluate": {"every": 1}}, **how)

    def broken(*_: Any) -> Any:
        raise ValueError("patient Miller-Smith has a weight of 1e999")

    clients = here.clients()
    monkeypatch.setattr(clients[1].trainer, "_score", broken)
    seen: dict[tuple[str, int], dict[str, Any]] = {}

    def look(node: int, message: Message, reply: Message) -> Message:
        head = reply.content["head"]
        seen[str(head["kind"]), node - 100] = {k: head[k] for k in ("status", "reason")} | {"fields": [*head]}
        return reply

    assert here.serve(here.grid(look, clients)) is Stop.DONE
    assert not here.audit("rejected")
    for kind in ("train", "score"):
        assert (seen[kind, 1] == seen[kind, 0]) == bool(how)
        assert "Miller-Smith" not in str(seen[kind, 1])
    assert "Miller-Smith" in capfd.readouterr().err


def test_sites_and_rounds_have_noise_of_their_own(tmp_path: Path) -> None:
    """Three sites, four rounds, training stands still: twelve uploads of noise, none like another, all on the grid."""
    here = scene(tmp_path, "fedavg", **SMALL, **STILL, **LOCAL)
    clients, sent = here.clients(), []
    by_node = {100 + c.site.client: c for c in clients}

    def look(node: int, message: Message, reply: Message) -> Message:
        if message.content["head"]["kind"] == "train":
            data = next(iter(reply.content["arrays"].values())).data
            sent.append(by_node[node].trainer.forms.read_up(data).up[0][0])
        return reply

    assert here.serve(here.grid(look, clients)) is Stop.DONE
    rows = torch.stack(sent)
    assert rows.shape == (12, 650)
    assert float(torch.corrcoef(rows).fill_diagonal_(0).abs().max()) < 6 / 650**0.5
    assert len(set(rows.flatten().tolist())) > 0.999 * rows.numel()
    assert float(rows.std()) == pytest.approx(3.0, rel=0.05)
    steps = rows * 2.0**29
    assert torch.equal(steps, steps.round())


def test_a_sites_limit_is_one_of_its_data_over_experiments(tmp_path: Path) -> None:
    """Another experiment, other rows, and another key: what was spent stays spent; other data have their own budget."""
    noise, memory = GaussianNoise(sigma=3.0, delta=1e-5), tmp_path / "data-heart"
    limit = epsilon(noise, 2) + epsilon(noise, 3)

    def book(name: str, at: Path = memory) -> Ledger:
        return Ledger(tmp_path / name, noise, limit, "site alder", memory=at)

    for t in (1, 2):
        book("first").release(t, samples="one snapshot")
    later = book("second")
    later.release(1, samples="another")
    for t in (2, 3):
        later.release(t)
    with pytest.raises(Refused, match="with 1 other experiment on these data, this release would raise epsilon"):
        later.release(4)
    assert len(lines(tmp_path / "second")) == 3
    book("third", tmp_path / "data-lung").release(1)
    (tmp_path / "moved").mkdir()  # to another agreement, with its ledger: it is counted once
    (tmp_path / "moved" / "ledger.jsonl").write_bytes((tmp_path / "first" / "ledger.jsonl").read_bytes())
    before = read_checked(memory / "epsilon.json")
    assert before is not None
    with pytest.raises(Refused, match="with 1 other experiment"):
        book("moved").release(3)
    after = read_checked(memory / "epsilon.json")
    assert after is not None
    assert after.keys() == before.keys()
    (memory / "epsilon.json").write_text("damaged")
    with pytest.raises(
        Refused, match="is damaged, so the budget that other experiments on these data have spent is unknown. Restore"
    ):
        book("second").release(2)
