"""Presence: which node is which site, and which of the nodes that Flower calls online really answer.

A round waits for a node as long as the other nodes took for their answers in the same round, times the server's
`pace`: so no node sets the pace of the others. A node that lets this time or a deadline pass, or whose message Flower
reports as lost, is mute: it is asked as before, but no round waits for it until it answers something. A site that was
asked in vain in so many rounds counts as absent until it answers a greeting: it gets greetings, one at a time, and no
models. A node that was refused is left alone for the patience.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from math import inf
from statistics import median

import torch

from fedloom_sites.deploy.protocol.rejected import Rejected
from fedloom_sites.deploy.settings import Member

SLOW_RATIO = 3.0
"""Multiple of the other nodes' median seconds from which a node is named as slow."""
LEAST_SECONDS = 30.0
"""Seconds that a node has in any case: where others answer at once, nodes that look for messages every few seconds, or
read their data first, would be late by chance."""


class NodePresence:
    """The nodes of a run.

    Args:
        members: the sites that may take part, by client.
        clients: sites of the experiment.
        patience: seconds for which a refused node is left alone.
        rounds: in which a mute site is asked before it counts as absent.
        pace: how many times the median of the others' seconds a node is waited for.
        known: the client of every node that was accepted in an earlier run of the server.

    Attributes:
        nodes: Flower's number of the node of every site that is there, by client.
        sizes: ``[n, 3]`` training, validation and test samples of every site. 0 before its first answer.
        round: of the run, the latest that a message was of.
    """

    def __init__(
        self, members: Mapping[int, Member], clients: int, patience: float, rounds: int, pace: float,
        client_of: Mapping[int, int],
    ) -> None:  # fmt: skip
        self._members, self._patience, self._rounds, self._who = members, patience, rounds, dict(client_of)
        self._pace = pace
        self.round = 0
        self.nodes: dict[int, int] = {}
        self.sizes = torch.zeros(clients, 3, dtype=torch.long)
        self._refused: dict[int, tuple[str, float]] = {}
        self._mute: dict[int, int] = {}
        self._fixed = False

    def fix(self) -> None:
        """Fix the sites' numbers of samples: later changes are refused."""
        self._fixed = True

    def strangers(self, nodes: Iterable[int]) -> list[int]:
        """Return the connected nodes to greet, and forget nodes that have left or were asked in vain too often."""
        here, now = set(nodes), time.monotonic()
        self._refused = {n: r for n, r in self._refused.items() if n in here and now < r[1]}
        self._mute = {n: since for n, since in self._mute.items() if n in here}
        absent = {n for n, since in self._mute.items() if self.round - since >= self._rounds}
        self.nodes = {c: n for c, n in self.nodes.items() if n in here - absent}
        return sorted(here - set(self.nodes.values()) - set(self._refused))

    def welcome(self, client: int, node: int, sizes: list[int]) -> None:
        """Remember which node a site has.

        Raises:
            Rejected: another node that answers was first, or the site's samples are others than before.
        """
        other = self.nodes.get(client, node)
        if other != node and other not in self._mute:
            raise Rejected(12, f"node {other} is client {client} already")
        earlier, counts = self.sizes[client], torch.tensor(sizes)
        if self._fixed and bool(earlier.any()) and not torch.equal(earlier, counts):
            raise Rejected(9, f"{sizes} training, validation and test samples, {earlier.tolist()} when the run began")
        self.nodes[client], self._who[node] = node, client
        self.sizes[client] = counts

    def refuse(self, node: int, reason: str) -> None:
        """Leave a node alone for a while."""
        self._refused[node] = reason, time.monotonic() + self._patience

    def answered(self, node: int) -> None:
        """Wait for a node again, which has answered something."""
        self._mute.pop(node, None)

    def silent(self, node: int) -> bool:
        """Wait no more for a node that has not answered in time. Whether it did before."""
        new = node not in self._mute
        self._mute.setdefault(node, self.round)
        return new

    def longest_wait(self, times: Collection[float]) -> float:
        """Seconds for which a node's answer is awaited.

        Args:
            times: seconds that the other nodes took for their answers to the same kind of message in this round.
        """
        return max(LEAST_SECONDS, self._pace * median(times)) if times else inf

    def slow_one(self, took: Mapping[int, float]) -> tuple[int, float] | None:
        """Return the client that delayed a round and the median seconds of the others, or None if nobody delayed it.

        Args:
            took: seconds of every client that answered.
        """
        client = max(took, key=lambda c: took[c], default=-1)
        rest = [seconds for c, seconds in took.items() if c != client]
        is_slow = bool(rest) and took[client] > max(LEAST_SECONDS, SLOW_RATIO * median(rest))
        return (client, median(rest)) if is_slow else None

    def is_awaited(self, node: int, seconds: float, times: Collection[float]) -> bool:
        """Return whether a node's answer is awaited so many seconds after its message was sent, see `longest_wait`."""
        return node not in self._mute and seconds <= self.longest_wait(times)

    def client(self, node: int) -> int | None:
        """Return the client at a node, by the node's last answer."""
        return self._who.get(node)

    def name(self, node: int) -> str:
        """Return the site's name at a node, or the node's number if it never answered."""
        client = self.client(node)
        return f"node {node}" if client is None or client not in self._members else self._members[client].site

    def reasons(self) -> dict[str, str]:
        """Why nodes that are there do not take part, by name."""
        mute = {self.name(n): "does not answer" for n in self._mute}
        return mute | {self.name(node): why for node, (why, _) in self._refused.items()}
