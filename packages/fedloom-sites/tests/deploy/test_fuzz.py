"""Replies of any bytes and any structure: rejected, without a crash, in bounded memory; never accepted."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import Stop, WireError
from fedloom_sites.deploy.protocol.checks import ReplyChecks
from fedloom_sites.deploy.protocol.envelope import ARRAYS_RECORD, HEAD_RECORD, METRICS_RECORD, PendingRequest
from fedloom_sites.deploy.protocol.rejected import RejectedReply
from fedloom_sites.deploy.site.client import Client
from tests.deploy.grid import wire
from tests.deploy.scene import changed, scene

SMALL = {"partition": {"kind": "iid", "clients": 3, "max_train_per_client": 6}, "rounds": 1, "evaluate": {"every": 9}}
BAD = 1


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReplyChecks, Message, PendingRequest, Client, Message]:
    """A judge, an honest reply, what it answers; and the site that gave it, with the message."""
    found: list[tuple[ReplyChecks, Message, PendingRequest]] = []
    check = ReplyChecks.check

    def look(self: ReplyChecks, reply: Message, asked: PendingRequest, **more: Any) -> Any:
        if asked.kind == "train" and asked.client == BAD:
            found.append((self, reply, asked))
        return check(self, reply, asked, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplyChecks, "check", look)
        patch.setattr(os, "fsync", lambda _fd: None)
        here = scene(tmp_path_factory.mktemp("fuzz"), "fedavg", **SMALL)
        grid = here.grid()
        assert here.serve(grid) is Stop.DONE
    [(checks, reply, asked)] = found
    message = next(m for m in grid.sent if m.content[HEAD_RECORD]["nonce"] == asked.nonce)
    return checks, reply, asked, Client(here.sites[BAD]), message


def upload(reply: Message) -> bytes:
    return next(iter(reply.content[ARRAYS_RECORD].values())).data


def is_rejected(checks: ReplyChecks, reply: Message, asked: PendingRequest) -> bool:
    try:
        checks.check(reply, asked)
    except RejectedReply as error:
        return 2 <= error.step <= 12 and error.reason.isprintable() and len(error.reason) <= 500
    return False


def random_bytes(honest: bytes, seed: int, count: int) -> Iterator[bytes]:
    """Half of them random altogether, half the honest message with some bytes changed, cut, doubled or moved."""
    rng = np.random.default_rng(seed)
    for k in range(count):
        if k % 2:
            yield rng.bytes(int(rng.integers(0, 400)))
            continue
        data = bytearray(honest)
        for _ in range(int(rng.integers(1, 4))):
            at, kind = int(rng.integers(0, min(len(data), 120))), rng.integers(0, 4)
            if kind == 0:
                data[at] ^= int(rng.integers(1, 256))
            elif kind == 1:
                del data[at : at + int(rng.integers(1, 9))]
            elif kind == 2:
                data[at:at] = rng.bytes(int(rng.integers(1, 9)))
            else:
                data[at : at + 8] = int(rng.integers(0, 2**63)).to_bytes(8, "little")
        if bytes(data) != honest:
            yield bytes(data)


def test_ten_thousand_byte_strings(heard: Any) -> None:
    """Every tenth is signed by the site itself and goes the whole way, the others go to the codec."""
    checks, reply, asked, *_ = heard
    for k, data in enumerate(random_bytes(upload(reply), 0, 10_000)):
        with pytest.raises(WireError):
            checks._forms.read_up(data)
        if k % 10 == 0:
            assert is_rejected(checks, changed(reply, BAD, arrays=[data]), asked), data[:60]


@pytest.mark.attack("messages beyond memory")
def test_memory_is_bounded(heard: Any) -> None:
    checks, reply, asked, *_ = heard
    tracemalloc.start()
    for data in random_bytes(upload(reply), 1, 200):
        assert is_rejected(checks, changed(reply, BAD, arrays=[data]), asked), data[:60]
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


names = st.text(max_size=12) | st.sampled_from(
    ["nonce", "client", "round", "samples", "work", "digest", "kind", "0", "1"]
)
scalars = (
    st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=True, allow_infinity=True) | st.booleans() | names
    | st.binary(max_size=40)
)  # fmt: skip
lists = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5) | st.lists(st.text(max_size=5), max_size=5)
heads = st.dictionaries(names, scalars | lists, max_size=6)


@settings(max_examples=300)
@given(change=heads)
def test_heads_with_any_values(heard: Any, change: dict[str, Any]) -> None:
    """Some fields of the head replaced or added, and signed; what changes nothing is accepted."""
    checks, reply, asked, *_ = heard
    honest = {k: v for k, v in reply.content[HEAD_RECORD].items() if k != "signature"}
    told = {**honest, **{k: v for k, v in change.items() if k != "signature"}}
    bent = changed(reply, BAD, head={k: v for k, v in change.items() if k != "signature"})
    free = {"reason": told["reason"], "work": told["work"]}  # what a site may say as it likes
    if {**told, **free} == {**honest, **free} and not is_rejected(checks, wire(bent), asked):
        return
    assert is_rejected(checks, wire(bent), asked)


arrays = st.builds(
    lambda dtype, shape, stype, data: Array(dtype=dtype, shape=tuple(shape), stype=stype, data=data),
    st.sampled_from(["uint8", "float64", "object", "<U4", ""]),
    st.lists(st.integers(-1, 2**31 - 1), max_size=3),
    st.sampled_from(["fedloom.wire", "numpy.ndarray", "", "pickle"]),
    st.binary(max_size=60),
)
records = (
    heads.map(lambda head: ConfigRecord(head))
    | st.dictionaries(names, arrays, max_size=3).map(lambda found: ArrayRecord(array_dict=found))
    | st.dictionaries(names, st.floats() | st.integers(-9, 9) | st.lists(st.floats(), max_size=3), max_size=4).map(
        lambda found: MetricRecord(found)
    )
)


@settings(max_examples=300)
@given(
    change=st.dictionaries(
        st.sampled_from([HEAD_RECORD, ARRAYS_RECORD, METRICS_RECORD]) | names,
        st.none() | records,
        min_size=1,
        max_size=3,
    )
)
def test_records_of_any_structure(heard: Any, change: dict[str, Any]) -> None:
    checks, reply, asked, *_ = heard

    def edit(sealed: RecordDict) -> RecordDict:
        return RecordDict({k: v for k, v in {**sealed, **change}.items() if v is not None})

    bent = changed(reply, BAD, edit=edit)
    if dict(bent.content) == dict(reply.content) or change == {METRICS_RECORD: None}:
        return
    same_but_metrics = {k: bent.content.get(k) for k in (HEAD_RECORD, ARRAYS_RECORD)} == {
        k: reply.content[k] for k in (HEAD_RECORD, ARRAYS_RECORD)
    }
    if (
        same_but_metrics
        and set(bent.content) == {HEAD_RECORD, ARRAYS_RECORD, METRICS_RECORD}
        and not bent.content[METRICS_RECORD]
    ):
        return  # no metric at all is what was signed
    assert is_rejected(checks, wire(bent), asked)


@settings(max_examples=100)
@given(change=st.dictionaries(st.sampled_from([HEAD_RECORD, ARRAYS_RECORD]) | names, st.none() | records, max_size=3))
def test_a_site_answers_any_message(heard: Any, change: dict[str, Any]) -> None:
    """Whatever the server, or who stands in its place, sends: a signed refusal, or the reply that was kept."""
    *_, client, message = heard
    content = RecordDict({k: v for k, v in {**message.content, **change}.items() if v is not None})
    bent = Message(content, reply_to=message)
    bent.metadata.__dict__["_message_id"] = "bent"
    reply = client.answer(bent)
    head = reply.content[HEAD_RECORD]
    assert head["status"] in ("ok", "refused")
    if content != message.content:
        assert head["status"] == "refused", change
