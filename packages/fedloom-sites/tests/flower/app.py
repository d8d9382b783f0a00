"""A Flower app in this process: its nodes are functions, and every message is written to bytes and read back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

import fedloom_sites.flower as ff
from tests.deploy.grid import FakeGrid, Fault, outside_flower


class Grid(FakeGrid):
    """A grid that also waits for replies, as a strategy does."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        pushed = [*self.push_messages(list(messages))]
        return [self._from(reply) for reply in self.pull_messages(pushed)]

    def _from(self, reply: Message) -> Message:
        return reply


def app_of(local: Callable[[Context], ff.Local]) -> ClientApp:
    """A client app around a function of a node's context."""
    app = ClientApp()
    ff.client(app)(local)
    return app


class App:
    """The nodes 100, 101, ... of an app, each with its own state.

    Args:
        local: makes the model and samples of a node; its number is ``context.node_config["partition-id"]``.
        n: number of nodes.
        fault: what becomes of replies on their way.
    """

    def __init__(self, local: Callable[[Context], ff.Local], n: int, fault: Fault | None = None) -> None:
        outside_flower()
        self.contexts = {
            100 + k: Context(
                run_id=1, node_id=100 + k, node_config={"partition-id": k}, state=RecordDict(), run_config={}
            )
            for k in range(n)
        }
        self.apps: dict[int, Any] = {node: app_of(local) for node in self.contexts}
        nodes = {node: self._node(node) for node in self.contexts}
        self.grid = Grid(nodes, fault)

    def _node(self, node: int) -> Callable[[Message], Message]:
        def answer(message: Message) -> Message:
            reply: Message = self.apps[node](message, self.contexts[node])
            reply.metadata.__dict__["_src_node_id"] = node
            return reply

        return answer

    def restart(self, node: int, local: Callable[[Context], ff.Local], *, forget: bool = False) -> None:
        """A node's process begins anew, with the state that Flower kept for it or without any."""
        self.apps[node] = app_of(local)
        if forget:
            self.contexts[node].state = RecordDict()
