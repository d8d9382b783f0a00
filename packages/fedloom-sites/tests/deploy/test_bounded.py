"""Messages beyond what their kind may have are given up while they come, before memory is taken for them.

Flower's own objects and trees, served by what stands in the place of its network client.
"""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from fedloom.errors import Stop, WireError
from fedloom_sites.deploy.protocol.envelope import HEAD_LIMIT, STATUS_FIELDS, seal_message, unseal_message
from fedloom_sites.deploy.server.bounded import pull_replies
from tests.deploy.grid import outside_flower
from tests.deploy.scene import FIRST, changed, scene

pytestmark = pytest.mark.attack("messages beyond memory")

MB = 1 << 20


class Store:
    """Flower's network client, over messages in this process.

    Args:
        messages: replies.
        trees: of their objects, where they are other ones.
        contents: of the objects, where they are other ones.
    """

    def __init__(
        self, messages: list[Message], trees: list[ObjectTree] | None = None, contents: dict[str, bytes] | None = None
    ) -> None:
        self.contents = dict(contents or {})
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            self.contents |= {k: o.deflate() for k, o in get_all_nested_objects(message).items()}
        self.headers = [message_to_proto(m) for m in messages]
        self.trees = trees or [get_object_tree(m) for m in messages]
        self.pulled, self.confirmed = list[str](), list[str]()

    def PullMessages(self, _request: Any) -> Any:
        return SimpleNamespace(messages_list=self.headers, message_object_trees=self.trees)

    def PullObject(self, request: Any) -> Any:
        self.pulled.append(request.object_id)
        return SimpleNamespace(
            object_found=True, object_available=True, object_content=self.contents[request.object_id]
        )

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed.append(request.message_object_id)

    def grid(self) -> Any:
        return SimpleNamespace(
            _runtime_client=self, node=Node(node_id=1), run=SimpleNamespace(run_id=1), pull_messages=None
        )


def reply(content: RecordDict) -> Message:
    outside_flower()
    question = Message(RecordDict(), dst_node_id=1, message_type="train")
    question.metadata.__dict__["_message_id"] = "asked"
    return Message(content, reply_to=question)


def record(*arrays: bytes, **head: Any) -> RecordDict:
    return seal_message({"kind": "train", **head}, arrays)


def test_a_reply_within_its_limit_arrives_as_it_was_sent() -> None:
    sent = reply(record(b"x" * MB, b"y" * 100))
    store = Store([sent])
    [found] = pull_replies(store.grid(), {"asked": 2 * MB})
    assert not found.has_error()
    assert [a.data for a in found.content["arrays"].values()] == [b"x" * MB, b"y" * 100]
    assert store.confirmed == [sent.object_id]


def bomb(arrays: int, times: int) -> Store:
    """Arrays of one megabyte each, which claim to have it many times: some parts to send, gigabytes to put together."""

    chunk = ArrayChunk(memoryview(b"\0" * MB))
    content: dict[str, bytes] = {chunk.object_id: chunk.deflate()}
    tree = ObjectTree(object_id=chunk.object_id)
    blown = ObjectTree(object_id="a" * 64, children=[tree] * times)
    content["a" * 64] = b"Array " + ",".join([chunk.object_id] * times).encode() + b" 0\0"
    sent = reply(RecordDict({"arrays": ArrayRecord(array_dict={})}))
    store = Store([sent], contents=content)
    store.trees[0].children.extend([blown] * arrays)
    return store


@pytest.mark.parametrize(("arrays", "times"), [(1, 21), (1, 100), (4, 750), (20, 150), (1, 3000)])
def test_parts_that_are_claimed_many_times_are_counted_as_often(arrays: int, times: int) -> None:
    store = bomb(arrays, times)
    tracemalloc.start()
    try:
        [found] = pull_replies(store.grid(), {"asked": 20 * MB})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.has_error()
    assert "the reply has more than" in found.error.reason
    assert f"at most {20 * MB} are allowed" in found.error.reason
    assert found.metadata.reply_to_message_id == "asked"
    assert peak < 30 * MB
    assert len(store.confirmed) == 1  # so that Flower forgets it


def test_noise_is_given_up_while_it_comes() -> None:
    """Parts that all differ: no more are pulled than fit, beside those that are under way."""
    sent = reply(RecordDict({"arrays": ArrayRecord(array_dict={}), "head": ConfigRecord({"kind": "train"})}))
    store = Store([sent])
    chunks = [ArrayChunk(memoryview(k.to_bytes(4, "big") * (MB // 4))) for k in range(50)]
    store.contents |= {c.object_id: c.deflate() for c in chunks}
    store.trees[0].children.extend(ObjectTree(object_id=c.object_id) for c in chunks)
    [found] = pull_replies(store.grid(), {"asked": 10 * MB})
    assert found.has_error()
    assert len(store.pulled) <= 10 + 4 + 16


def test_a_reply_that_nobody_waits_for_is_not_put_together() -> None:
    store = Store([reply(record(b"x" * MB))])
    [found] = pull_replies(store.grid(), {"another": 10 * MB})
    assert found.has_error()


def test_the_head_is_limited_in_bytes() -> None:
    fields = {"hello": {"vocabulary": list}}
    good = {
        "protocol": 1, "release": "", "experiment": "", "kind": "hello", "round": 0, "client": 0, "nonce": b"",
        "digest": "", "status": "ok", "reason": "", "signature": b"", "vocabulary": ["word"],
    }  # fmt: skip
    assert unseal_message(seal_message(good), fields, STATUS_FIELDS, 0).head["vocabulary"] == ["word"]
    for value in (["x" * 1000] * 2000, ["x" * (2 * HEAD_LIMIT)], ["word"] * 400_000):
        with pytest.raises(WireError, match=f"at most {HEAD_LIMIT} are allowed"):
            unseal_message(seal_message(good | {"vocabulary": value}), fields, STATUS_FIELDS, 0)


@pytest.mark.parametrize("kind", ["hello", "score", "train"])
def test_bytes_that_a_kind_has_no_use_for_are_refused(kind: str, tmp_path: Any) -> None:
    """A few megabytes more than the form: far below `message_limit`, and refused."""
    here = scene(
        tmp_path,
        "fedavg",
        client_weights="uniform",
        partition={"kind": "iid", "clients": 3, "max_train_per_client": 12},
        rounds=2,
    )
    here = here._replace(server=here.server.with_(quorum=2))

    def fault(node: int, message: Message, answer: Message) -> Message:
        if node != FIRST + 1 or message.content["head"]["kind"] != kind:
            return answer
        return changed(answer, 1, arrays=[b"\0" * (3 * MB)])

    assert here.serve(here.grid(fault)) is Stop.DONE
    assert here.audit("rejected", step=3)
    assert all("bytes, but at most" in x["reason"] for x in here.audit("rejected", step=3))


def test_the_units_have_a_limit_of_memory(written: Any) -> None:
    for unit in [*written.rglob("*.service")]:
        assert "MemoryMax=" in unit.read_text(), unit.name
