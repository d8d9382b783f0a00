"""Buffered schedules at real sites: a step after K answers, by the engine's own streams."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file
from torch import Tensor

from fedloom.engine.privacy import epsilon
from fedloom.engine.simulate import simulate
from fedloom.errors import ConfigError, Refused, Stop
from fedloom.schedule import Devices, Fleet
from fedloom_sites.deploy.noise import ReleasedNoise, deployed_part
from fedloom_sites.deploy.protocol.envelope import HEAD_RECORD
from fedloom_sites.deploy.secure.member import check_maskable
from fedloom_sites.deploy.server import transport
from fedloom_sites.deploy.site.state import latest_models
from tests.deploy.grid import Clock, Delay, FakeGrid
from tests.deploy.scene import FIRST, Scene, changed, scene

N = 4
SMALL = {
    "partition": {"kind": "iid", "clients": N, "max_train_per_client": 24},
    "local": {"lr": 0.05, "epochs": 1, "batch_size": 24},
    "evaluate": {"every": 3},
    "rounds": 3,
    "client_weights": "uniform",
}
NOISE = {"upload_transform": {"kind": "gaussian-noise", "clip": 1.0, "sigma": 3.0, "delta": 1e-5}}
WAIT = {"deadline": 600.0, "ttl": 1200.0, "patience": 300.0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    monkeypatch.setattr(transport, "POLL_SECONDS", 1.0)


def buffered(buffer: int, **more: Any) -> dict[str, Any]:
    return {"schedule": {"kind": "buffered", "buffer": buffer, **more}}


def seconds(times: Mapping[int, float], kind: str = "train") -> Delay:
    """Sites answer messages of a kind after their times, and others at once."""
    return lambda node, message: times.get(node - FIRST, 0.0) if message.content[HEAD_RECORD]["kind"] == kind else 0.0


def grid(here: Scene, clock: Clock, delay: Delay) -> FakeGrid:
    return FakeGrid({FIRST + c.site.client: c.answer for c in here.clients()}, None, clock, delay)


def steps(here: Scene) -> list[dict[str, int]]:
    """Staleness of every upload of every step, by site."""
    return [line["staleness"] for line in here.audit("step")]


@pytest.mark.parametrize("method", ["fedavg", "flame", "scaffold"])
def test_a_buffer_of_all_sites_that_answer_alike_is_the_synchronous_deployment(
    method: str, tmp_path: Path, clock: Clock
) -> None:
    plain, stream = (scene(tmp_path / name, method, **SMALL, **more) for name, more in (("a", {}), ("b", buffered(N))))
    for here in (plain, stream):
        assert here.serve(grid(here, clock, seconds(dict.fromkeys(range(N), 5.0))), **WAIT) is Stop.DONE
    assert torch.equal(plain.model(), stream.model())
    assert steps(stream) == [{f"site-{i}": 0 for i in range(N)}] * 3
    lines = [s.audit("accepted", kind="train") for s in (plain, stream)]
    sent, asked = ({(x["round"], x["client"], x["digest"]) for x in some} for some in lines)
    assert sent == asked


TIMES = (31.0, 77.0, 113.0, 269.0)


class Taking(Devices):
    """Devices that answer after these seconds, whatever they do."""

    kind: ClassVar[str] = "taking"

    def fleet(self, n: int, seed: int, rarity: Tensor) -> Fleet:
        free = torch.full((n,), math.inf, dtype=torch.float64)
        half = torch.tensor(TIMES, dtype=torch.float64) / 2  # a message down and one up
        return Fleet(0 * half, free, free, half, ("all",), torch.zeros(n, dtype=torch.long))


@pytest.mark.parametrize(
    ("method", "schedule"),
    [
        ("fedavg", buffered(2)),
        ("flame", buffered(2)),
        ("scaffold", buffered(1)),
        ("fedavg", {"schedule": {"kind": "asynchronous"}}),
        ({"algorithm": "fedamp", "among": "all"}, buffered(2, concurrency=3)),
    ],
    ids=["fedavg", "flame", "scaffold", "asynchronous", "fedamp"],
)
def test_a_deployed_stream_is_the_simulated_one_of_the_same_arrivals(
    method: Any, schedule: dict[str, Any], tmp_path: Path, clock: Clock
) -> None:
    here = scene(tmp_path, method, **{**SMALL, "rounds": 8, "evaluate": {"every": 8}}, **schedule)
    assert here.serve(grid(here, clock, seconds(dict(enumerate(TIMES)))), **WAIT) is Stop.DONE
    stale = steps(here)
    assert len(stale) == 8
    assert max(s for step in stale for s in step.values()) > 0
    fed = here.experiment.partition(here.experiment.source.load(), 0)
    simulated = simulate(here.experiment.methods[0].setting.with_(devices=Taking()), fed)
    log = simulated.uploads().to_pylist()
    assert stale == [{f"site-{r['client']}": r["staleness"] for r in log if r["round"] == t} for t in range(1, 9)]
    if "global" in simulated.models.kinds():
        torch.testing.assert_close(here.model(), simulated.models.rows("global"), rtol=1e-10, atol=1e-10)
    if "personal" in simulated.models.kinds():
        for site in here.sites:
            [mine] = latest_models(site.state)
            rows = simulated.models.rows("personal")[site.client]
            torch.testing.assert_close(load_file(mine.path)["rows"][0], rows, rtol=1e-10, atol=1e-10)


def ledger(site: Any) -> list[dict[str, Any]]:
    [path] = site.state.rglob("ledger.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_epsilon_of_a_stream_is_that_of_the_site_that_sends_most(tmp_path: Path, clock: Clock) -> None:
    here = scene(tmp_path, "fedavg", **{**SMALL, "rounds": 8, "evaluate": {"every": 8}}, **buffered(2), **NOISE)
    assert here.serve(grid(here, clock, seconds(dict(enumerate(TIMES)))), **WAIT) is Stop.DONE
    noise = deployed_part(here.experiment.methods[0].setting.upload_transform)
    assert isinstance(noise, ReleasedNoise)
    arrivals = [sum(f"site-{i}" in step for step in steps(here)) for i in range(N)]
    assert max(arrivals) > min(arrivals)
    figures = pq.read_table(here.server.results / "metrics.parquet").to_pylist()
    [spent] = [f["value"] for f in figures if (f["round"], f["metric"]) == (8, "epsilon")]
    assert spent == pytest.approx(epsilon(noise, max(arrivals)))
    for site, used in zip(here.sites, arrivals, strict=True):
        releases = ledger(site)
        assert used <= len(releases) <= used + 1  # one may be under way at the end
        assert releases[-1]["epsilon"] == pytest.approx(epsilon(noise, len(releases)))


def test_a_site_whose_budget_is_spent_leaves_a_stream_to_the_others(tmp_path: Path, clock: Clock) -> None:
    here = scene(tmp_path, "fedavg", **{**SMALL, "rounds": 6}, **buffered(2), **NOISE)
    noise = deployed_part(here.experiment.methods[0].setting.upload_transform)
    assert isinstance(noise, ReleasedNoise)
    first = here.sites[0].with_(epsilon=(epsilon(noise, 2) + epsilon(noise, 3)) / 2)
    others = [site.with_(epsilon=100 * epsilon(noise, 6)) for site in here.sites[1:]]
    here = here._replace(sites=[first, *others])
    assert here.serve(grid(here, clock, seconds(dict(enumerate(TIMES)))), **WAIT) is Stop.DONE
    assert len(ledger(first)) == 2
    assert sum("site-0" in step for step in steps(here)) == 2
    assert {line["client"] for line in here.audit("rejected") if "budget of site" in line["reason"]} == {0}


def test_a_slow_site_holds_no_step_and_a_mute_one_its_place_until_the_time_out(tmp_path: Path, clock: Clock) -> None:
    """Site 3 takes 100 s and site 2 never answers, while two others make a step of two every 11 s."""
    here = scene(tmp_path, "fedavg", **{**SMALL, "rounds": 20, "evaluate": {"every": 20}}, **buffered(2, timeout=150.0))
    waited = seconds({0: 10.0, 1: 11.0, 2: math.inf, 3: 100.0})
    assert here.serve(grid(here, clock, waited), **WAIT) is Stop.DONE
    taken = steps(here)
    late = [step["site-3"] for step in taken if "site-3" in step]
    assert late[0] >= 8
    assert clock.now < 20 * 12
    assert "site-2" not in {site for step in taken for site in step}
    [mute] = here.audit("mute")
    assert (mute["site"], mute["reason"]) == ("site-2", "no answer within 150 s")
    figures = pq.read_table(here.server.results / "metrics.parquet").to_pylist()
    last = {f["client"]: f["value"] for f in figures if (f["round"], f["metric"]) == (20, "heard")}
    assert last == {i: sum(f"site-{i}" in step for step in taken) for i in range(N)}


FORGED: dict[str, tuple[int, Callable[[Message, list[Message]], Message | list[Message]]]] = {
    "garbage": (6, lambda reply, _: changed(reply, 1, arrays=[b"garbage"])),
    "in another's name": (4, lambda reply, _: changed(reply, 1, head={"client": 2})),
    "twice": (1, lambda reply, _: [reply, reply]),
    "an old one again": (1, lambda _, sent: sent[0]),
}


@pytest.mark.attack("forged replies")
@pytest.mark.parametrize("case", FORGED)
def test_forged_replies_hold_no_step_and_no_place(case: str, tmp_path: Path, clock: Clock) -> None:
    """The fastest site forges every upload: it is asked once a step, and has one upload in a step at most."""
    here, sent = scene(tmp_path, "fedavg", **{**SMALL, "rounds": 4}, **buffered(2)), list[Message]()
    step, forge = FORGED[case]

    def fault(node: int, message: Message, reply: Message) -> Any:
        if node != FIRST + 1 or message.content[HEAD_RECORD]["kind"] != "train":
            return reply
        sent.append(reply)
        return forge(reply, sent)

    nodes = {FIRST + c.site.client: c.answer for c in here.clients()}
    assert here.serve(FakeGrid(nodes, fault, clock, seconds({0: 5.0, 1: 1.0, 2: 6.0, 3: 7.0})), **WAIT) is Stop.DONE
    taken, rejected = steps(here), here.audit("rejected")
    assert [len(clients) for clients in taken] == [2] * 4
    assert rejected
    assert {line["step"] for line in rejected} == {step}
    assert len(sent) <= len(taken)
    honest = sum(x["kind"] == "train" for x in here.audit("accepted", client=1))
    assert sum("site-1" in clients for clients in taken) == honest
    assert honest == {"twice": len(sent), "an old one again": 1}.get(case, 0)


def test_a_server_that_is_killed_goes_on_with_what_is_under_way(tmp_path: Path, clock: Clock) -> None:
    """All sites have answered when it resumes; they send what they have kept, and train nothing twice."""
    here = scene(tmp_path, "flame", **{**SMALL, "rounds": 6, "evaluate": {"every": 6}}, **buffered(2))
    delay = seconds(dict(enumerate(TIMES)))

    class Killed(BaseException):
        pass

    first = grid(here, clock, delay)
    pull = first.pull_messages

    def killed(message_ids: Iterable[str]) -> list[Message]:
        replies = pull(message_ids)
        if len(steps(here)) == 3 and any(r.metadata.message_type == "train" for r in replies):
            raise Killed
        return replies

    first.pull_messages = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        here.serve(first, **WAIT)
    asked = [
        (m.content[HEAD_RECORD]["round"], m.metadata.dst_node_id)
        for m in first.sent
        if m.content[HEAD_RECORD]["kind"] == "train"
    ]
    second = grid(here, clock, delay)
    assert here.serve(second, **WAIT) is Stop.DONE
    again = [
        (m.content[HEAD_RECORD]["round"], m.metadata.dst_node_id)
        for m in second.sent
        if m.content[HEAD_RECORD]["kind"] == "train"
    ]
    assert set(again[:2]) <= set(asked)
    digests: dict[tuple[int, int], set[str]] = {}
    for line in here.audit("accepted", kind="train"):
        digests.setdefault((line["round"], line["client"]), set()).add(line["digest"])
    assert all(len(d) == 1 for d in digests.values())
    assert len(steps(here)) == 6


def test_what_makes_no_sense_at_sites_is_refused(tmp_path: Path, clock: Clock) -> None:
    few = scene(tmp_path / "few", "fedavg", **SMALL, **buffered(9))
    with pytest.raises(
        ConfigError, match="schedule.buffer must be at most the number of clients in the federation \\(4\\)"
    ):
        few.serve()
    with pytest.raises(Refused, match="needs the same download for all sites of a sum"):
        check_maskable(few.experiment.methods[0].setting)
    late = scene(tmp_path / "late", "fedavg", **SMALL, schedule={"kind": "deadline", "seconds": 3.0})
    with pytest.raises(Refused, match="'deadline' needs simulated time, .*. Leave schedule= out"):
        late.serve()
    device = scene(tmp_path / "device", "fedavg", **SMALL, devices={"kind": "equal"}, **buffered(2))
    with pytest.raises(Refused, match="real sites take the time that they need"):
        device.serve()


def test_a_buffer_that_too_few_sites_can_fill_is_a_stop_that_resumes(tmp_path: Path, clock: Clock) -> None:
    here = scene(tmp_path, "fedavg", **SMALL, **buffered(3))
    full = grid(here, clock, seconds({}))
    two = FakeGrid({n: f for n, f in full.nodes.items() if n < FIRST + 2}, None, clock, seconds({}))
    assert here.serve(two, **WAIT, quorum=2) is Stop.TOO_FEW
    assert "2 of 3 uploads have arrived, and no other site is free. The" in here.summary()["runs"][0]["reason"]
    assert here.serve(full, **WAIT) is Stop.DONE
    assert here.summary()["runs"][0]["rounds"] == 3
