"""Transport of messages to the sites, and of their replies, over Flower's grid.

Each reply is matched to the message that it answers.

Each message to a site has its own nonce and an explicit time to live. A round of messages ends when all messages are
answered, or at the soft deadline if enough valid replies have arrived. Once there are enough valid replies, the server
does not wait for a mute node (see `fedloom_sites.deploy.server.presence`). A greeting that is answered after its
deadline is still accepted.

Flower's `Grid.send_and_receive` (1.41) is unsuitable: it waits for every node or until its timeout, checks only every
three seconds, discards late replies, and assembles replies of any length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid
from torch import Tensor

from fedloom.engine.clients.uploads import describe_usable
from fedloom.engine.job import Job
from fedloom.errors import RunStopped, Stop
from fedloom_sites.deploy.audit import Audit
from fedloom_sites.deploy.protocol.checks import ReplyChecks
from fedloom_sites.deploy.protocol.envelope import PendingRequest, SiteRequest, ValidReply, make_message
from fedloom_sites.deploy.protocol.identity import read_verifying_key
from fedloom_sites.deploy.protocol.rejected import LateReply, RejectedReply, UnableReply, UnusableUpload, make_printable
from fedloom_sites.deploy.server.bounded import POLL_SECONDS, call_with_retry, pull_replies
from fedloom_sites.deploy.server.presence import MIN_SLOW_SECONDS, NodePresence
from fedloom_sites.deploy.settings import Server
from fedloom_sites.transport.forms import Forms

MAX_REPEATS = 2
"""Maximum number of times that a message is sent again to a site that could not write to its disk."""


class Transport:
    """Connection to the sites.

    Args:
        grid: Flower's grid.
        settings: the server's settings.
        audit: log of every reply.
        say: function that prints a line.

    Attributes:
        members: sites that may participate, keyed by client.
        presence: record of which sites are connected.
        figures: for each client, the metrics that the site's samples define. Empty if no scores are summed.
    """

    def __init__(self, grid: Grid, settings: Server, audit: Audit, say: Callable[[str], None]) -> None:
        self._grid, self._settings, self._audit, self._say = grid, settings, audit, say
        self.members = {member.client: member for member in settings.sites}
        self._keys = {c: read_verifying_key(m.signing_key, m.site) for c, m in self.members.items()}
        self.checks = ReplyChecks(settings, self._keys)
        self.figures = [""] * settings.clients
        self.presence = NodePresence(
            self.members,
            settings.clients,
            settings.patience,
            settings.absent_after,
            settings.pace,
            self._registered_clients(),
        )
        self._overdue: dict[str, tuple[PendingRequest, float]] = {}
        self._posted: dict[str, tuple[PendingRequest, float]] = {}
        self._unable, self._unusable = set[int](), set[int]()

    def _registered_clients(self) -> dict[int, int]:
        """Return the client of each node with a logged reply, so that a site has a name before it answers again."""
        lines = [x for x in self._audit.lines() if x.get("what") == "accepted"]
        names: dict[Any, str] = {c: m.site for c, m in self.members.items()}
        return {x["node"]: x["client"] for x in lines if names.get(x.get("client")) == x.get("site") and "node" in x}

    @property
    def nodes(self) -> dict[int, int]:
        """Flower's node number of every connected site, keyed by client."""
        return self.presence.nodes

    @property
    def sizes(self) -> Tensor:
        """Number of training, validation and test samples of every site, ``[n, 3]``.

        Before the site's first answer, the numbers are 0.
        """
        return self.presence.sizes

    def begin(self, job: Job, forms: Forms, names: Collection[str] = ()) -> None:
        """Begin a run: from now on, its messages are recognized and its numbers of samples are fixed.

        Args:
            job: run.
            forms: formats of the run's messages.
            names: names of the values that arrive with the scores of the last round.
        """
        self.checks = ReplyChecks(self._settings, self._keys, job, forms, self.sizes, names)
        self.presence.fix_sizes()

    def gather(self, everyone: str) -> None:
        """Greet nodes until all sites are connected, or until the patience runs out while the quorum is connected.

        Args:
            everyone: description of the part of the run that needs every site's number of samples. Empty if the quorum
                is sufficient.

        Raises:
            RunStopped: too few sites are connected.
        """
        patience, waits = self._settings.patience, False
        end = time.monotonic() + patience
        while True:
            self.greet()
            missing = [m.site for c, m in self.members.items() if c not in self.nodes]
            if not missing:
                return
            if time.monotonic() > end:
                break
            if not waits:
                self._say(f"fedloom: waits for {', '.join(missing)}, at most {patience:g} s")
                waits = True
            time.sleep(min(5 * POLL_SECONDS, patience / 10))
        need = len(self.members) if everyone else self._settings.quorum
        if len(self.nodes) < need:
            why = "".join(f"; {name}: {reason}" for name, reason in self.presence.reasons().items())
            rule = (
                (f". For {everyone}, the server needs every site's number of samples at the start of the run")
                if everyone
                else ""
            )
            raise RunStopped(
                Stop.TOO_FEW,
                f"{len(self.nodes)} of {need} sites are connected, missing: {', '.join(missing)}{why}{rule}",
            )
        self._say(f"fedloom: begins without {', '.join(missing)}")

    def note(self, what: str, round: int, clients: Iterable[int], reason: str) -> None:
        """Print and log an event in a round, together with the sites concerned."""
        sites = [self.members[c].site for c in sorted(clients)]
        self._say(f"fedloom: {what}: {reason}")
        self._audit.write(what, round=round, sites=sites, reason=reason)

    def step(self, round: int, staleness: Mapping[int, int]) -> None:
        """Log the sites whose uploads were used in a step of the server, and the staleness of each upload."""
        sites = {self.members[c].site: s for c, s in sorted(staleness.items())}
        self._audit.write("step", round=round, staleness=sites)

    def greet(self) -> None:
        """Ask unknown nodes for their identity (one request at a time per node), and forget nodes that have left."""
        self._collect({}, {}, set())
        self.exchange(0, self._make_greetings(), 0, self._settings.deadline)

    def _make_greetings(self) -> list[SiteRequest]:
        """Return greetings for unknown nodes that have no pending greeting."""
        nodes = call_with_retry(self._grid.get_node_ids, self._settings.ttl)
        greeted = {p.node for p, _ in (*self._posted.values(), *self._overdue.values()) if p.kind == "hello"}
        return [SiteRequest("hello", None, node=n) for n in self.presence.find_strangers(nodes) if n not in greeted]

    def collect_replies(
        self, round: int, requests: dict[int, SiteRequest], need: int, wanted: Collection[int] = ()
    ) -> dict[int, ValidReply]:
        """Send requests to sites, and return the accepted replies, keyed by client.

        Unanswered requests are repeated until ``need`` replies have arrived.

        A site that could not write to its disk receives the same request again, up to `MAX_REPEATS` times, even if
        enough other sites have answered. A reply to a request for scores only does not count towards ``need``.

        Args:
            round: round of the run.
            requests: requests, keyed by client.
            need: minimum number of replies. With fewer replies, the run stops.
            wanted: clients that receive requests until the patience runs out, even if enough other clients have
                answered.

        Raises:
            RunStopped: too few replies were accepted, or no site has a finite upload within the experiment's bounds.
        """
        end = time.monotonic() + self._settings.patience
        self.presence.round, self._unusable = max(self.presence.round, round), set()
        replies, rejected = dict[int, ValidReply](), set[int]()
        open_, repeats, is_enough, longest = dict(requests), MAX_REPEATS, False, self._settings.deadline
        while True:
            self.greet()
            repeated = self._unable if is_enough else {*open_}
            now = [
                request._replace(node=self.nodes[c]) for c, request in open_.items() if c in {*self.nodes} & repeated
            ]
            self._unable, start = set(), time.monotonic()
            good, bad = self.exchange(round, now, need - _count_replies(replies), longest, wanted)
            longest = min(longest, max(MIN_SLOW_SECONDS, time.monotonic() - start)) if self._unable else longest
            replies |= good
            if self._unable and not repeats:
                bad |= self._unable
            repeats -= bool(self._unable)
            rejected |= bad
            open_ = {c: request for c, request in open_.items() if c not in good and c not in bad}
            is_enough = _count_replies(replies) >= need and not {*wanted} & {*open_}
            if (is_enough and not self._unable & {*open_}) or (not open_ and requests):
                break
            if time.monotonic() > end or not requests:
                break
            time.sleep(min(5 * POLL_SECONDS, self._settings.patience / 10))
        for c in open_:
            self._record_missing_reply(round, c)
        wanted_count = sum(r.kind != "score" for r in requests.values())
        if need and wanted_count == len(self._unusable):  # restarting would not change this
            raise RunStopped(Stop.DIVERGED, describe_usable(round, 0, wanted_count))
        self.checks.quorum(round, _count_replies(replies), wanted_count, need, len(rejected))
        return replies

    def exchange(
        self, round: int, requests: Sequence[SiteRequest], need: int, deadline: float, wanted: Collection[int] = ()
    ) -> tuple[dict[int, ValidReply], set[int]]:
        """Send requests, and return the checked replies once all have arrived or both quorum and deadline are reached.

        The server waits for a ``wanted`` client until the deadline, even if the other clients have answered earlier.

        Returns:
            Accepted replies, and the clients whose replies were rejected.
        """
        start = time.monotonic()
        open_requests = self._send_requests(round, requests)
        good: dict[int, ValidReply] = {}
        bad: set[int] = set()
        took: dict[str, dict[int, float]] = {pending.kind: {} for pending in open_requests.values()}
        while open_requests:
            arrived = self._collect(open_requests, good, bad)
            waited = time.monotonic() - start
            for client, reply in good.items():
                took[reply.head["kind"]].setdefault(client, waited)
            idle = not any(
                self.presence.is_awaited(pending.node, waited, took[pending.kind].values())
                for pending in open_requests.values()
            )
            is_over = waited > deadline or idle
            if any(pending.client in wanted for pending in open_requests.values()):
                is_over = waited > deadline
            if waited > self._settings.ttl or (is_over and _count_replies(good) >= need):
                break
            if open_requests and not arrived:
                time.sleep(POLL_SECONDS)
        for kind, seconds in took.items():
            self._name_slow(round, kind, seconds)
        waited = time.monotonic() - start
        for id_, pending in open_requests.items():
            self._overdue[id_] = pending, start + self._settings.ttl
            times, why = took[pending.kind].values(), f"no answer within {waited:.0f} s"
            if waited <= deadline and waited > self.presence.longest_wait(times):
                why += (
                    f", and the median of the other sites is {median(times):.0f} s. If the site needs "
                    f"longer, raise pace above {self._settings.pace:g} in server.toml"
                )
            self._mark_mute(pending, why)
        return good, bad

    def _name_slow(self, round: int, kind: str, took: Mapping[int, float]) -> None:
        """Log which site delayed a round."""
        slow = self.presence.find_slow_client(took)
        if slow is not None and kind != "hello":
            client, usual = slow
            site = self.members[client].site
            self._say(
                f"fedloom: {site} is slow ({kind}): {took[client]:.0f} s, but the median of the others is {usual:.0f} s"
            )
            self._audit.write(
                "slow", kind=kind, round=round, client=client, site=site, seconds=took[client], others=usual
            )

    def _send_requests(self, round: int, requests: Sequence[SiteRequest]) -> dict[str, PendingRequest]:
        """Send requests, and return those that are open, keyed by message."""
        experiment, ttl = self._settings.fingerprint, self._settings.ttl
        messages = [make_message(request, round, experiment, ttl) for request in requests]
        pushed = call_with_retry(lambda: self._grid.push_messages([m for m, _ in messages]), ttl) if messages else []
        longest = self.checks.longest
        return {
            id_: pending._replace(max_reply_bytes=longest(pending.kind, pending.max_reply_bytes))
            for id_, (_, pending) in zip(pushed, messages, strict=True)
            if id_
        }

    def post(self, round: int, requests: Sequence[SiteRequest]) -> None:
        """Send requests whose replies `arrived` will return later."""
        self.presence.round, now = max(self.presence.round, round), time.monotonic()
        self._posted |= {id_: (pending, now) for id_, pending in self._send_requests(round, requests).items()}

    @property
    def awaited(self) -> set[int]:
        """Clients whose answers to a posted request have not yet arrived."""
        return {pending.client for pending, _ in self._posted.values() if pending.client is not None}

    def arrived(self) -> tuple[dict[int, ValidReply], set[int]]:
        """Return new replies to posted requests, and the clients whose replies were rejected or lost.

        The function also greets new nodes. The server waits for the answer to a greeting as long as for any other
        answer, but a greeting delays nothing.
        """
        self.post(0, self._make_greetings())
        replies, failed = dict[int, ValidReply](), set[int]()
        for is_greeting in (True, False):
            some = {id_: p for id_, (p, _) in self._posted.items() if (p.kind == "hello") is is_greeting}
            open_requests, good = dict(some), dict[int, ValidReply]()
            self._collect(open_requests, good, set())
            ended = {id_: p for id_, p in some.items() if id_ not in open_requests}
            self._posted = {id_: posted for id_, posted in self._posted.items() if id_ not in ended}
            if not is_greeting:
                replies, failed = good, {p.client for p in ended.values() if p.client is not None} - set(good)
        self.give_up(None, self._settings.deadline)
        return replies, failed

    def give_up(self, client: int | None, most: float = 0.0) -> None:
        """Stop waiting for replies of a client, or of greeted nodes if the client is None, after ``most`` seconds."""
        now = time.monotonic()
        for id_, (pending, start) in [*self._posted.items()]:
            if pending.client == client and now - start >= most:
                del self._posted[id_]
                self._overdue[id_] = pending, start + self._settings.ttl
                self._mark_mute(pending, f"no answer within {now - start:.0f} s")
                if client is not None:
                    self._record_missing_reply(pending.round, client)

    @staticmethod
    def seconds() -> float:
        """Return the number of seconds since a fixed point in time."""
        return time.monotonic()

    @staticmethod
    def pause() -> None:
        """Wait briefly."""
        time.sleep(POLL_SECONDS)

    def _collect(self, open_requests: dict[str, PendingRequest], good: dict[int, ValidReply], bad: set[int]) -> int:
        """Check the replies that have arrived, including late ones, and return the number of replies.

        Late replies answer messages that the server no longer waits for.
        """
        now = time.monotonic()
        self._overdue = {id_: overdue for id_, overdue in self._overdue.items() if now <= overdue[1]}
        limits = {
            id_: pending.max_reply_bytes
            for id_, pending in [*open_requests.items(), *((k, overdue) for k, (overdue, _) in self._overdue.items())]
        }
        arrived = call_with_retry(lambda: pull_replies(self._grid, limits), self._settings.ttl) if limits else []
        for reply in arrived:
            self._accept_or_reject(reply, open_requests, good, bad)
        return len(arrived)

    def _record_missing_reply(self, round: int, client: int) -> None:
        site = self.members[client].site if client in self.members else None
        self._audit.write("missed", round=round, client=client, site=site)

    def _mark_mute(self, pending: PendingRequest, why: str) -> None:
        """Mark a node as mute because it did not answer in time, or because its answer was lost.

        The server no longer waits for this node.
        """
        if self.presence.mark_silent(pending.node):
            name = self.presence.name(pending.node)
            self._say(
                f"fedloom: {name} does not answer ({pending.kind}: {why}). The server continues "
                "without it until it answers"
            )
            self._audit.write("mute", reason=why, **self._message_facts(pending))

    def _message_facts(self, pending: PendingRequest) -> dict[str, Any]:
        """Return the facts about a message that are logged.

        The site may be known only from earlier answers of the node.
        """
        client = self.presence.client(pending.node) if pending.client is None else pending.client
        site = self.members[client].site if client in self.members else None
        return {"kind": pending.kind, "round": pending.round, "client": client, "site": site, "node": pending.node}

    def _accept_or_reject(
        self, reply: Message, open_requests: dict[str, PendingRequest], good: dict[int, ValidReply], bad: set[int]
    ) -> None:
        """Check a reply, and log the result."""
        id_ = reply.metadata.reply_to_message_id
        overdue, _ = self._overdue.pop(id_, (None, 0.0))
        pending = open_requests.pop(id_, overdue)
        try:
            accepted = self.checks.check(reply, pending, is_late=overdue is not None, answered=good)
            assert pending is not None
            if pending.kind == "hello":
                self.presence.welcome(accepted.client, pending.node, accepted.head["sizes"])
                self.figures[accepted.client] = accepted.head["figures"]
        except RejectedReply as error:
            bad |= self._reject(error, id_, pending, overdue is not None, reply.has_error())
            return
        self.presence.record_answer(pending.node)
        if overdue is None:
            good[accepted.client] = accepted
        note = make_printable(accepted.head["reason"])
        if note:
            self._say(f"fedloom: {self.presence.name(pending.node)} notes ({pending.kind}): {note}")
        self._audit.write(
            "accepted", digest=accepted.digest, norm=accepted.norm, reason=note or None, message=make_printable(id_),
            **self._message_facts(pending._replace(client=accepted.client)),
        )  # fmt: skip

    def _reject(
        self, error: RejectedReply, id_: str, pending: PendingRequest | None, is_late: bool, lost: bool
    ) -> set[int]:
        """Log a rejected reply, and return its client if the client receives no further request in this round.

        Otherwise, the returned set is empty.
        """
        facts: dict[str, Any] = {"step": error.step, "reason": error.reason, "message": make_printable(id_)}
        if pending is None:
            self._audit.write("rejected", **facts)
            return set()
        if isinstance(error, LateReply):
            self.presence.record_answer(pending.node)
        if pending.kind == "hello" and not lost:
            self.presence.refuse(pending.node, error.reason)
        self._say(f"fedloom: refuses {self.presence.name(pending.node)} ({pending.kind}): {error.reason}")
        self._audit.write("rejected", **facts, **self._message_facts(pending))
        if lost:
            self._mark_mute(pending, error.reason)
        if isinstance(error, UnusableUpload) and not is_late and pending.client is not None:
            self._unusable.add(pending.client)
        asked_again = isinstance(error, UnableReply) and not is_late
        self._unable |= {pending.client} if asked_again and pending.client is not None else set()
        return set() if pending.client is None or lost or is_late or asked_again else {pending.client}


def _count_replies(replies: Mapping[int, ValidReply]) -> int:
    return sum(reply.head["kind"] != "score" for reply in replies.values())
