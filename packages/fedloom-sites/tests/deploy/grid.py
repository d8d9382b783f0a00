"""Flower's grid in this process: every message and reply is written to bytes and read back, as on the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid

Fault = Callable[[int, Message, Message], "Message | Iterable[Message] | None"]
"""(node, message, reply) -> what arrives instead: a reply, several, or none."""


def outside_flower(monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Let messages be made outside a process of Flower."""
    with suppress(ImportError):  # of older releases, which need nothing
        identity = import_module("flwr.supercore.task_identity").TaskIdentity
        identity.run_id = identity.task_id = identity.node_id = 1


def wire(message: Message) -> Message:
    """The message after its way over the network."""
    return message_from_proto(ProtoMessage.FromString(message_to_proto(message).SerializeToString()))


class Clock:
    """Time that passes only where somebody sleeps; it stands in the place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


Delay = Callable[[int, Message], float]
"""(node, message) -> seconds until its reply arrives; infinite for none."""


class FakeGrid(Grid):
    """Nodes are functions; a message is answered when it is pushed.

    Args:
        nodes: by number; each takes a message and returns its reply.
        fault: what happens to replies on their way.
        clock: what delays are of.
        delay: of a reply; none if left out.
    """

    def __init__(
        self,
        nodes: dict[int, Callable[[Message], Message]],
        fault: Fault | None = None,
        clock: Clock | None = None,
        delay: Delay | None = None,
    ) -> None:
        self.nodes, self.fault = nodes, fault or (lambda _node, _message, reply: reply)
        self.clock, self.delay = clock or Clock(), delay or (lambda _node, _message: 0.0)
        self.due: dict[str, float] = {}
        self.sent: list[Message] = []
        self.waiting: dict[str, list[Message]] = {}
        self.late: list[Message] = []
        self._count = 0

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return sorted(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            self._count += 1
            id_ = f"message-{self._count}"
            message.metadata.__dict__["_message_id"] = id_
            arrived = wire(message)
            arrived.metadata.__dict__["_message_id"] = id_
            self.sent.append(arrived)
            node = arrived.metadata.dst_node_id
            answer = self.fault(node, arrived, wire(self.nodes[node](arrived)))
            replies = [] if answer is None else [answer] if isinstance(answer, Message) else list(answer)
            self.waiting.setdefault(id_, []).extend(replies)
            self.due[id_] = self.clock.now + self.delay(node, arrived)
            ids.append(id_)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        there = [id_ for id_ in message_ids if self.due[id_] <= self.clock.now]
        found = [reply for id_ in there for reply in self.waiting.pop(id_, [])]
        return found + [self.late.pop() for _ in range(len(self.late))]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        raise NotImplementedError


def node(state: Path, client: Any) -> Callable[[Message], Message]:
    """A node that answers with a client."""
    return lambda message: client.answer(message)
