"""Bad replies: rejected one by one, logged with the step that they failed, and without any effect on the model.

The numbers are those of the list of faults that a deployment survives (docs/deploy-protocol.md).
"""

from __future__ import annotations

import os
import pickle  # noqa: TID251 (as an attacker would send it)
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedloom.errors import Stop
from fedloom.rows.fields import Field
from fedloom.rows.layout import Layout
from fedloom.rows.wire import Codec
from fedloom_sites.deploy.protocol.checks import ReplyChecks
from fedloom_sites.deploy.protocol.envelope import (
    ARRAYS_RECORD,
    HEAD_RECORD,
    MAX_FIGURES,
    METRICS_RECORD,
    PendingRequest,
)
from fedloom_sites.deploy.protocol.rejected import RejectedReply
from tests.deploy.grid import outside_flower, wire
from tests.deploy.scene import FIRST, Scene, changed, scene

pytestmark = pytest.mark.attack("forged replies")

SMALL = {
    "partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.5, "max_train_per_client": 12},
    "rounds": 2,
    "evaluate": {"every": 2},
    "client_weights": "uniform",  # by samples, a run begins when all sites are there
}
BAD = 1
"""The client that misbehaves."""

Bend = Callable[[Message], "Message | list[Message] | None"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def upload(reply: Message) -> bytes:
    return next(iter(reply.content[ARRAYS_RECORD].values())).data


def with_rows(value: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float64) -> Bend:
    """A reply whose only field w is another."""

    def bend(reply: Message) -> Message:
        layout = Layout.create_from_shapes({"head.weight": (10, 64), "head.bias": (10,)})
        codec = Codec(layout, {"dw": Field((layout.d,), torch.float64)})
        w = value(codec.decode(upload(reply))["dw"]).to(dtype)
        return changed(reply, BAD, arrays=[Codec(layout, {"dw": Field(tuple(w.shape), w.dtype)}).encode({"dw": w})])

    return bend


def renamed(reply: Message) -> Message:
    layout = Layout.create_from_shapes({"head.weight": (10, 64), "head.bias": (10,)})
    w = Codec(layout, {"dw": Field((layout.d,), torch.float64)}).decode(upload(reply))["dw"]
    return changed(reply, BAD, arrays=[Codec(layout, {"v": Field((layout.d,), torch.float64)}).encode({"v": w})])


def with_arrays(*arrays: bytes) -> Bend:
    return lambda reply: changed(reply, BAD, arrays=list(arrays))


def with_head(**head: Any) -> Bend:
    return lambda reply: changed(reply, BAD, head=head)


def with_array(**fields: Any) -> Bend:
    """Another description of the same bytes, or other bytes."""

    def bend(reply: Message) -> Message:
        def edit(records: RecordDict) -> None:
            honest = {"dtype": "uint8", "shape": (len(upload(reply)),), "stype": "fedloom.wire", "data": upload(reply)}
            records[ARRAYS_RECORD] = ArrayRecord(array_dict={"0": Array(**{**honest, **fields})})

        return changed(reply, BAD, edit=edit)

    return bend


def with_records(**records: Any) -> Bend:
    def bend(reply: Message) -> Message:
        def edit(sealed: RecordDict) -> RecordDict:
            return RecordDict({k: v for k, v in {**sealed, **records}.items() if v is not None})

        return changed(reply, BAD, edit=edit)

    return bend


def without_field(reply: Message) -> Message:
    def edit(records: RecordDict) -> None:
        records[HEAD_RECORD] = ConfigRecord({k: v for k, v in records[HEAD_RECORD].items() if k != "nonce"})

    return changed(reply, BAD, edit=edit)


class Bomb:
    """Unpickled, it would leave a trace."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("fedloom-bomb",)


def npy(shape: tuple[int, ...]) -> bytes:
    """A header of numpy's format that claims a shape, and eight bytes."""
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(8)


CASES: dict[str, tuple[int, Bend]] = {
    "1 NaN": (8, with_rows(lambda w: w * torch.nan)),
    "1 one NaN": (8, with_rows(lambda w: torch.where(torch.arange(len(w)) == 3, torch.nan, w))),
    "1 Inf": (8, with_rows(lambda w: w / 0)),
    "2 broadcastable": (6, with_rows(lambda w: w[:1])),
    "2 transposed": (6, with_rows(lambda w: w[:, None].T)),
    "2 0-d": (6, with_rows(lambda w: w[0])),
    "2 empty": (6, with_rows(lambda w: w[:0])),
    "2 longer": (6, with_rows(lambda w: torch.cat([w, w]))),
    "3 float32": (6, with_rows(lambda w: w, torch.float32)),
    "3 float16": (6, with_rows(lambda w: w, torch.float16)),
    "3 int64": (6, with_rows(lambda w: w, torch.int64)),
    "3 said to be float64": (3, with_array(dtype="float64")),
    "3 bool": (3, with_array(dtype="bool")),
    "3 string": (3, with_array(dtype="<U8")),
    "3 object": (3, with_array(dtype="object")),
    "3 another serialisation": (3, with_array(stype="numpy.ndarray")),
    "4 scaled": (11, with_rows(lambda w: 1e30 * w)),
    "4 scaled and flipped": (11, with_rows(lambda w: -1e300 * (w + 1))),
    "5 no array": (5, with_arrays()),
    "5 a second array": (5, lambda reply: changed(reply, BAD, arrays=[upload(reply), upload(reply)])),
    "5 renamed array": (3, with_records(**{ARRAYS_RECORD: ArrayRecord(array_dict={"w": Array(np.zeros(3))})})),
    "5 renamed field": (6, renamed),
    "6 nothing": (6, with_arrays(b"")),
    "6 garbage": (6, with_arrays(bytes(range(256)) * 20)),
    "6 pickle": (6, with_arrays(pickle.dumps(Bomb()))),
    "6 pickled array": (6, with_arrays(npy((1,))[:-8] + pickle.dumps(Bomb()))),
    "6 truncated": (6, lambda reply: changed(reply, BAD, arrays=[upload(reply)[:-5]])),
    "6 truncated on the way": (3, lambda reply: with_array(data=upload(reply)[:-5])(reply)),
    "6 a bit on the way": (4, lambda reply: with_array(data=upload(reply)[:-1] + b"!")(reply)),
    "7 gigabytes in the description": (3, with_array(shape=(2_000_000_000,))),
    "7 terabytes in a header": (6, with_arrays(npy((450_000_000_000,)))),
    "8 oversized": (3, with_arrays(bytes(3_000_000))),
    "8 many metrics": (3, lambda reply: changed(reply, BAD, metrics={f"m{k}": 0.0 for k in range(MAX_FIGURES + 1)})),
    "8 a list of metrics": (3, with_records(**{METRICS_RECORD: MetricRecord({"m": [0.0] * 10_000})})),
    "8 a long list in the head": (3, with_head(work=[1] * 200_000)),
    "9 negative": (9, with_head(samples=-5)),
    "9 zero": (9, with_head(samples=0)),
    "9 NaN": (3, with_head(samples=float("nan"))),
    "9 huge": (9, with_head(samples=10**15)),
    "9 string": (3, with_head(samples="12")),
    "9 negative work": (9, with_head(work=[-1, 0, 0])),
    "13 another client's name": (4, with_head(client=0)),
    "13 nobody's name": (4, with_head(client=7)),
    "14 another nonce": (4, with_head(nonce=bytes(16))),
    "14 another round": (4, with_head(round=7)),
    "34 another release": (4, with_head(release="0.0.1")),
    "34 another protocol": (4, with_head(protocol=99)),
    "another experiment": (4, with_head(experiment="0" * 64)),
    "another kind": (3, with_head(kind="score")),
    "a missing field": (3, without_field),
    "a further field": (3, with_head(extra=1)),
    "a further record": (3, with_records(more=ConfigRecord({}))),
    "no head": (3, with_records(**{HEAD_RECORD: None})),
    "a head of arrays": (3, with_records(**{HEAD_RECORD: ArrayRecord()})),
}


def run(here: Scene, bend: Bend, kind: str = "train", **settings: Any) -> Stop:
    """Run with one client whose replies to a kind of message are bent."""

    def fault(node: int, message: Message, reply: Message) -> Any:
        return bend(reply) if node == FIRST + BAD and message.content[HEAD_RECORD]["kind"] == kind else reply

    return here.serve(here.grid(fault), **({"quorum": 2, "norm_bound": 100.0, "message_limit": 1_000_000} | settings))


class Heard(NamedTuple):
    """An honest reply, what it answers, and its judge."""

    checks: ReplyChecks
    reply: Message
    asked: PendingRequest


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Heard:
    found: list[Heard] = []
    check = ReplyChecks.check

    def look(self: ReplyChecks, reply: Message, asked: PendingRequest, **more: Any) -> Any:
        if asked.kind == "train" and asked.client == BAD:
            found.append(Heard(self, reply, asked))
        return check(self, reply, asked, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplyChecks, "check", look)
        here = scene(tmp_path_factory.mktemp("heard"), "fedavg", **SMALL)
        assert here.serve(norm_bound=100.0, message_limit=1_000_000) is Stop.DONE
    return found[0]


@pytest.mark.parametrize("case", CASES)
def test_rejected(case: str, heard: Heard) -> None:
    step, bend = CASES[case]
    assert heard.checks.check(heard.reply, heard.asked).client == BAD
    bent = bend(heard.reply)
    assert isinstance(bent, Message)
    with pytest.raises(RejectedReply) as error:
        heard.checks.check(wire(bent), heard.asked)
    assert error.value.step == step, error.value
    assert 10 < len(error.value.reason) <= 500
    assert not Path("fedloom-bomb").exists()


def test_the_model_is_as_if_the_bad_client_were_not_there(tmp_path: Path) -> None:
    many = {**SMALL, "rounds": len(CASES), "evaluate": {"every": 1000}}
    here = scene(tmp_path / "bad", "fedavg", **many)
    rest = iter(CASES.values())
    assert run(here, lambda reply: next(rest)[1](reply)) is Stop.DONE
    rejected = here.audit("rejected", kind="train")
    assert [(r["round"], r["client"], r["step"]) for r in rejected] == [
        (t, BAD, step) for t, (step, _) in enumerate(CASES.values(), 1)
    ]
    assert len(here.audit("accepted", kind="train")) == 2 * len(CASES)
    without = scene(tmp_path / "without", "fedavg", **many)
    there = [c for c in without.clients() if c.site.client != BAD]
    assert without.serve(without.grid(clients=there), quorum=2) is Stop.DONE
    assert torch.equal(here.model(), without.model())


def test_a_weight_below_zero_is_rejected(tmp_path: Path) -> None:
    here = scene(tmp_path, "fedskip", **SMALL)
    layout = Layout.create_from_shapes({"head.weight": (10, 64), "head.bias": (10,)})
    codec = Codec(layout, {"w": Field((layout.d,), torch.float64), "seen": Field((1,), torch.float64)})

    def bend(reply: Message) -> Message:
        sent = codec.decode(upload(reply))
        return changed(reply, BAD, arrays=[codec.encode({**sent, "seen": -sent["seen"]})])

    assert run(here, bend) is Stop.DONE
    assert [(r["client"], r["step"]) for r in here.audit("rejected", kind="train")] == [(BAD, 11)] * 2
    assert "the client's model has a negative weight" in here.audit("rejected", kind="train")[0]["reason"]


def test_both_releases_are_named(tmp_path: Path) -> None:  # 34
    here = scene(tmp_path, "fedavg", **SMALL)
    run(here, with_head(release="0.0.1"), kind="hello")
    reasons = {r["reason"] for r in here.audit("rejected", kind="hello")}
    assert len(reasons) == 1
    assert "0.0.1" in next(iter(reasons))
    assert "the server" in next(iter(reasons))
    assert not here.audit(kind="train", client=BAD)


def test_claimed_terabytes_cost_no_memory(tmp_path: Path) -> None:  # 7
    here = scene(tmp_path, "fedavg", **SMALL)
    tracemalloc.start()
    run(here, with_array(shape=(2_000_000_000,)))
    run(here, with_arrays(npy((450_000_000_000,))))
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()


def test_bounded_influence(tmp_path: Path) -> None:  # 4
    """Whatever one of m clients sends within the bound B, the mean moves by at most 2 B / m from the honest one."""
    models = []
    for k, factor in enumerate((0.0, -1.0)):
        here = scene(tmp_path / str(k), "fedavg", **{**SMALL, "rounds": 1})
        start = here.experiment

        def bend(reply: Message, factor: float = factor) -> Message:
            def push(w: torch.Tensor) -> torch.Tensor:
                direction = torch.ones_like(w) / w.norm().clamp_min(1e-9)
                return w + factor * 0.9 * direction / direction.norm()

            return with_rows(push)(reply)

        assert start.methods
        run(here, bend, norm_bound=1.0)
        assert not here.audit("rejected")
        models.append(here.model())
    assert 0 < float((models[0] - models[1]).norm()) <= 2 * 1.0 / 3


def test_metrics_that_make_no_sense_are_left_out(tmp_path: Path) -> None:  # 10
    bad = {"global/test/accuracy": float("nan"), "global/test/loss": 1.5, "global/train/accuracy": 7.0}
    bad["global/train/loss"] = float("inf")  # within its bounds
    more = {"global/test/invented": 1.0, "nonsense": 2.0, "personal/elsewhere/loss": 1.0}
    here = scene(tmp_path, "fedavg", **SMALL)
    assert run(here, lambda reply: changed(reply, BAD, metrics={**bad, **more}), kind="score") is Stop.DONE
    assert not here.audit("rejected")
    import pyarrow.parquet as pq

    rows = pq.read_table(here.server.results / "metrics.parquet").to_pylist()
    mine = {(r["part"], r["metric"]): r["value"] for r in rows if r["client"] == BAD and r["round"] == 2}
    assert mine["test", "loss"] == 1.5
    assert np.isnan(mine["test", "accuracy"])
    assert np.isnan(mine["train", "accuracy"])
    assert np.isnan(mine["train", "loss"])
    assert not {"invented", "nonsense"} & {r["metric"] for r in rows}
    mean = [r["value"] for r in rows if (r["metric"], r["part"], r["round"]) == ("accuracy/mean", "test", 2)]
    assert np.isfinite(mean).all()


def test_fairness_weights_never_see_nan(tmp_path: Path) -> None:  # 10
    here = scene(tmp_path, {"algorithm": "equitable-fl", "clusters": 2}, **SMALL)
    forms = here.clients()[BAD].trainer.forms

    def bend(reply: Message) -> Message:
        sent = forms.read_up(upload(reply))
        assert sent.info is not None
        values = {**{n: v[0] for n, v in sent.up._asdict().items()}, "answer to the weigher": sent.info[0] * torch.nan}
        return changed(reply, BAD, arrays=[forms._upload.codec.encode(values)])

    assert run(here, bend) is Stop.DONE
    assert {r["step"] for r in here.audit("rejected")} == {8}
    assert bool(here.model().isfinite().all())


def test_a_second_reply_does_not_count(tmp_path: Path) -> None:  # 11
    here = scene(tmp_path / "twice", "fedavg", **SMALL)
    assert run(here, lambda reply: [reply, with_rows(lambda w: w + 1)(reply)]) is Stop.DONE
    plain = scene(tmp_path / "once", "fedavg", **SMALL)
    plain.serve()
    assert torch.equal(here.model(), plain.model())
    assert {r["step"] for r in here.audit("rejected")} == {1}


def test_a_late_reply_has_no_effect(tmp_path: Path) -> None:  # 12
    here = scene(tmp_path, "fedavg", **SMALL)
    grid = here.grid()
    kept: list[Message] = []

    def fault(node: int, message: Message, reply: Message) -> Any:
        if node == FIRST + BAD and message.content[HEAD_RECORD]["kind"] == "train":
            grid.late += kept
            kept[:] = [reply]
            return None
        return reply

    grid.fault = fault
    assert here.serve(grid, quorum=2) is Stop.DONE
    assert [r["step"] for r in here.audit("rejected")] == [1]
    assert len(here.audit("missed", client=BAD)) == 2


def test_a_replayed_reply_is_rejected(tmp_path: Path) -> None:  # 14
    first: list[Message] = []

    def bend(reply: Message) -> Message:
        first.append(reply)
        again = Message(first[0].content, reply_to=reply)
        again.metadata.__dict__.update(reply.metadata.__dict__)
        return again

    here = scene(tmp_path, "fedavg", **SMALL)
    assert run(here, bend) is Stop.DONE
    assert [(r["round"], r["step"]) for r in here.audit("rejected")] == [(2, 4)]


def test_an_answer_in_anothers_name_is_rejected(tmp_path: Path) -> None:  # 13
    """Node 1 answers the message to node 0 before node 0 does, in the name of client 0."""
    here = scene(tmp_path, "fedavg", **SMALL)
    seen: dict[int, Message] = {}

    def fault(node: int, message: Message, reply: Message) -> Any:
        if message.content[HEAD_RECORD]["kind"] != "train" or node != FIRST:
            return reply
        seen[node] = reply
        head = {"client": 0, "nonce": bytes(16)}
        return changed(reply, BAD, head=head)  # signed with the key of client 1

    assert here.serve(here.grid(fault), quorum=2) is Stop.DONE
    assert {(r["client"], r["step"]) for r in here.audit("rejected")} == {(0, 4)}


def test_an_unknown_site_is_refused(tmp_path: Path) -> None:  # 15
    """A node whose site has a key that the server does not list; TLS and connection keys are tested on real servers."""
    here = scene(tmp_path, "fedavg", **SMALL)
    grid = here.grid()
    honest = grid.nodes[FIRST + BAD]
    grid.nodes[FIRST + 50] = lambda message: changed(honest(message), 5, head={"client": 2})
    assert here.serve(grid) is Stop.DONE
    assert {r["node"] for r in here.audit("rejected", kind="hello", step=4)} == {FIRST + 50}
    assert all(m.metadata.dst_node_id != FIRST + 50 for m in grid.sent if m.metadata.message_type == "train")


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("ClientApp stopped responding", "ClientApp stopped responding"),
        ("<class 'a.site.NoAnswer'>:<'its process ended'>", "its process ended"),  # as Flower writes an exception
        ("\n<class 'a.B'>:<\"it isn't there\">", "it isn't there"),
    ],
)
def test_an_error_of_the_node_is_no_reply(reason: str, sentence: str, tmp_path: Path) -> None:
    from flwr.app import Error

    def bend(reply: Message) -> Message:
        lost = Message(Error(8, reason), reply_to=reply)
        lost.metadata.__dict__.update(reply.metadata.__dict__)
        return lost

    here = scene(tmp_path, "fedavg", **SMALL)
    assert run(here, bend) is Stop.DONE
    assert {(r["step"], r["reason"]) for r in here.audit("rejected")} == {(2, f"error 8 from the node: {sentence}")}


outside_flower()
