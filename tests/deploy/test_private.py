"""Noise, budgets and ledgers of a deployment."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from fedloom.deploy import ledger as ledger_module
from fedloom.deploy.ledger import Ledger
from fedloom.engine.privacy import epsilon
from fedloom.errors import Refused, Stop
from fedloom.rows.aggregate import PrivateMean
from fedloom.rows.channel import GaussianNoise
from tests.deploy.grid import wire
from tests.deploy.scene import Scene, scene

SMALL = {"partition": {"kind": "iid", "clients": 3, "keep": 12}, "evaluate": {"every": 9}, "rounds": 4}
STILL = {"local": {"lr": 1e-300, "steps": 1}}
LOCAL = {"channel": {"kind": "gaussian-noise", "clip": 1.0, "sigma": 3.0, "delta": 1e-5}}
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
    noise = here.experiment.methods[0].channel
    assert isinstance(noise, GaussianNoise)
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
        noise = method.channel or method.aggregator
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
        patch.setattr(GaussianNoise, "send", crash)
        with pytest.raises(KeyboardInterrupt):
            here.serve()
    assert [x["round"] for x in lines(here.sites[0].state)] == [1]
    assert not list(here.sites[0].state.rglob("*.state"))
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
    with pytest.raises(Refused, match="release 3 would make"):
        book.release(2)


def test_a_limit_without_noise_releases_nothing(tmp_path: Path) -> None:
    here = limited(scene(tmp_path, "fedavg", **SMALL), 1.0)
    assert here.serve() is Stop.TOO_FEW
    assert all("without accounted noise" in r["reason"] for r in here.audit("rejected"))


def test_noise_comes_from_the_operating_system(tmp_path: Path) -> None:
    """Two runs of one seed have different noise of the size that was asked for; in simulation they are the same."""
    for how, settings, scale in (("local", LOCAL, 3 / math.sqrt(3)), ("central", CENTRAL, 1.0)):
        models = []
        for k in range(2):
            here = scene(tmp_path / f"{how}{k}", "fedavg", **{**SMALL, "rounds": 1}, **STILL, **settings)
            assert here.serve() is Stop.DONE
            models.append(here.model())
        start = scene(tmp_path / f"{how}-start", "fedavg", **{**SMALL, "rounds": 1}, **STILL)
        assert start.serve() is Stop.DONE
        moves = [model - start.model() for model in models]
        assert float((moves[0] - moves[1]).norm()) > 1
        for move in moves:  # 650 coordinates: the standard deviation is known to 3 % (one sigma)
            assert float(move.std()) == pytest.approx(scale, rel=0.15)
        first, second = (here.simulate().models.rows("global") for _ in range(2))
        assert torch.equal(first, second)


def test_no_seed_can_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(ledger_module.secrets, "randbits", lambda bits: asked.append(bits) or 7)
    ledger_module.entropy()
    assert asked == [63]


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
    for method, why in (("fedacs", "mixes|single clients"), ("flame", "absolute|single clients")):
        with pytest.raises(Refused, match=why):
            scene(tmp_path / method, method, **SMALL, **CENTRAL).serve()


def test_replies_are_what_was_signed(tmp_path: Path) -> None:
    """Noise or not, a reply survives the wire bit for bit."""
    here = scene(tmp_path, "fedavg", **{**SMALL, "rounds": 1}, **LOCAL)
    assert here.serve(here.grid(lambda _node, _message, reply: wire(reply))) is Stop.DONE
    assert not here.audit("rejected")
