"""Record of the site on each node, and of the nodes that actually answer. Flower may list more nodes as online.

A round waits for a node as long as the median of the times that the other nodes took to answer in that round,
multiplied by the server's `pace`. No node can therefore set the pace for the others. A node is marked as mute if it
exceeds this time or a deadline, or if Flower reports its message as lost. The server still sends requests to a mute
node, but no round waits for it until it answers a message. A site that has not answered for a certain number of rounds
is treated as absent until it answers a greeting. Until then, the site receives greetings, one at a time, but no models.
The server ignores a rejected node for `patience` seconds.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from math import inf
from statistics import median

import torch

from fedloom_sites.deploy.protocol.rejected import GROWTH_HINT, RejectedReply
from fedloom_sites.deploy.settings import Member
from fedloom_sites.transport.roll import NodeRegister

SLOW_RATIO = 3.0
"""Multiple of the other nodes' median time above which a node is reported as slow."""
MIN_SLOW_SECONDS = 30.0
"""Minimum time in seconds to wait for a node: if other nodes answer immediately, a node that checks for messages only
every few seconds, or that reads its data first, could otherwise be late by chance."""


class NodePresence(NodeRegister):
    """The nodes of a run, and which of them answer.

    Args:
        members: sites that may participate, keyed by client.
        clients: number of sites in the experiment.
        patience: seconds before a rejected node is asked again.
        rounds: number of rounds in which a mute site still receives requests before it counts as absent.
        pace: maximum time to wait for a node, as a multiple of the other nodes' median time.
        client_of: client of every node that was accepted in an earlier run of the server, keyed by node.

    Attributes:
        round: round of the latest message of the run.
    """

    def __init__(
        self, members: Mapping[int, Member], clients: int, patience: float, rounds: int, pace: float,
        client_of: Mapping[int, int],
    ) -> None:  # fmt: skip
        super().__init__(client_of, torch.zeros(clients, 3, dtype=torch.long))
        self._members, self._patience, self._rounds, self._pace = members, patience, rounds, pace
        self.round = 0
        self._refused: dict[int, tuple[str, float]] = {}
        self._mute: dict[int, int] = {}
        self._fixed = False

    def fix_sizes(self) -> None:
        """Fix the sites' numbers of samples. Changes after that are rejected."""
        self._fixed = True

    def find_strangers(self, nodes: Iterable[int]) -> list[int]:
        """Return the connected nodes to greet, and forget nodes that have left or have failed to answer too often."""
        here, now = set(nodes), time.monotonic()
        self._refused = {n: r for n, r in self._refused.items() if n in here and now < r[1]}
        self._mute = {n: since for n, since in self._mute.items() if n in here}
        absent = {n for n, since in self._mute.items() if self.round - since >= self._rounds}
        self.nodes = {c: n for c, n in self.nodes.items() if n in here - absent}
        return sorted(here - set(self.nodes.values()) - set(self._refused))

    def welcome(self, client: int, node: int, sizes: list[int]) -> None:
        """Record the node of a site.

        Raises:
            RejectedReply: another node already answers for the site, or the site's numbers of samples have changed.
        """
        other = self.nodes.get(client, node)
        if other != node and other not in self._mute:
            raise RejectedReply(12, f"node {other} is already client {client}")
        earlier, counts = self.sizes[client], torch.tensor(sizes)
        if self._fixed and bool(earlier.any()) and not torch.equal(earlier, counts):
            raise RejectedReply(
                9,
                f"the site has {sizes} training, validation and test samples, but had {earlier.tolist()} "
                f"at the start of the run. {GROWTH_HINT}",
            )
        self.enter(client, node)
        self.sizes[client] = counts

    def refuse(self, node: int, reason: str) -> None:
        """Ignore a rejected node for some time."""
        self._refused[node] = reason, time.monotonic() + self._patience

    def record_answer(self, node: int) -> None:
        """Record that a node has answered, so that the server waits for it again."""
        self._mute.pop(node, None)

    def mark_silent(self, node: int) -> bool:
        """Stop waiting for a node that has not answered in time, and return True if it was not yet mute.

        The result is False for a node that was already mute.
        """
        new = node not in self._mute
        self._mute.setdefault(node, self.round)
        return new

    def longest_wait(self, times: Collection[float]) -> float:
        """Return the time, in seconds, to wait for a node's answer.

        Args:
            times: times in seconds that the other nodes took to answer the same kind of message in this round.
        """
        return max(MIN_SLOW_SECONDS, self._pace * median(times)) if times else inf

    def find_slow_client(self, took: Mapping[int, float]) -> tuple[int, float] | None:
        """Return the client that delayed a round and the other clients' median time in seconds, or None if none did.

        Args:
            took: time that each client took to answer, in seconds.
        """
        client = max(took, key=lambda c: took[c], default=-1)
        rest = [seconds for c, seconds in took.items() if c != client]
        is_slow = bool(rest) and took[client] > max(MIN_SLOW_SECONDS, SLOW_RATIO * median(rest))
        return (client, median(rest)) if is_slow else None

    def is_awaited(self, node: int, seconds: float, times: Collection[float]) -> bool:
        """Return True if the server still waits for a node's answer after the given seconds (see `longest_wait`)."""
        return node not in self._mute and seconds <= self.longest_wait(times)

    def name(self, node: int) -> str:
        """Return the name of a node's site, or the node's number if it has never answered."""
        client = self.client(node)
        return f"node {node}" if client is None or client not in self._members else self._members[client].site

    def reasons(self) -> dict[str, str]:
        """Return the reasons why connected nodes do not participate, keyed by the nodes' names."""
        mute = {self.name(n): "does not answer" for n in self._mute}
        return mute | {self.name(node): why for node, (why, _) in self._refused.items()}
