"""Registry of a run's clients at real sites, and of their Flower nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor


class NodeRegister:
    """Clients of a run and their Flower nodes.

    Args:
        client_of: client of every node that has introduced itself, keyed by Flower's node number.
        sizes: number of training, validation and test samples of every client, ``[n, 3]``.

    Attributes:
        nodes: Flower's node number of every connected client, keyed by client.
        sizes: number of training, validation and test samples of every client, ``[n, 3]``.
    """

    def __init__(self, client_of: Mapping[int, int], sizes: Tensor) -> None:
        self._client_of, self.sizes = dict(client_of), sizes
        self.nodes: dict[int, int] = {}

    def client(self, node: int) -> int | None:
        """Return the client that a node named in its last introduction, or None if the node never introduced itself."""
        return self._client_of.get(node)

    def enter(self, client: int, node: int) -> None:
        """Record the node of a client, and mark the client as connected."""
        self.nodes[client], self._client_of[node] = node, client

    def connect(self, here: Collection[int]) -> list[int]:
        """Mark exactly the known clients at these nodes as connected, and return the nodes that have disconnected."""
        before = {*self.nodes.values()}
        self.nodes = {client: node for node, client in self._client_of.items() if node in here}
        return sorted(before - {*self.nodes.values()})
