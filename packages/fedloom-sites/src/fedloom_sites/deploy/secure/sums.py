"""The server's side of secure aggregation, from collecting the sites' keys to a plausible sum.

A site that has provably violated the protocol is named, and excluded from sessions until the server restarts. The
server requests a round's uploads in a new session only if it has not yet requested any shares in the previous one. Once
the server has requested shares, the sum must cover exactly the sites in this request, or the round is lost.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedloom.engine import Setting
from fedloom.errors import GivenUp, Refused, RunStopped, Stop
from fedloom_sites.deploy.protocol.envelope import Kind, SiteRequest
from fedloom_sites.deploy.protocol.identity import NONCE_BYTES, read_verifying_key
from fedloom_sites.deploy.relay import Relays
from fedloom_sites.deploy.secure import counters, shares
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure.answers import read_advert, read_sealed, read_shares, read_signature, read_vector
from fedloom_sites.deploy.secure.changes import AnswerStates, CohortChanges
from fedloom_sites.deploy.secure.opened import read_checked, write_checked
from fedloom_sites.deploy.secure.pending import PendingSum, PendingSums
from fedloom_sites.deploy.secure.protocol import KEY_BYTES, SIGNATURE_BYTES, Integers, ProtocolBroken
from fedloom_sites.deploy.secure.stages import SessionProgress, Stage
from fedloom_sites.deploy.secure.terms import SessionTerms, check_summands
from fedloom_sites.deploy.server.transport import Transport
from fedloom_sites.deploy.settings import Server

MAX_ATTEMPTS = 3
"""Maximum number of requests for the shares of a sum before the server gives up."""

Ask = Callable[[int, bytes], SiteRequest]
"""Function that maps a client and the other sites' sealed shares to the request for the client's vector."""


Weights = Mapping[int, Sequence[float]]
"""The weights of every site in the sums of a session (see `SessionTerms.weights`)."""


class SessionSum(NamedTuple):
    """Sum that results from a session.

    Attributes:
        value: decoded sum. None if the sum stayed closed because of its counters.
        clients: the sites in the sum.
        traffic: number of bytes per site, up and down.
        counts: numbers of sites that the counters show (see `counters`). None if the session has no counters.
    """

    value: Any
    clients: list[int]
    traffic: list[int]
    counts: counters.AnswerCounts | None


class _SessionCourse(NamedTuple):
    """Session in progress, with its round, nonce and stage."""

    round: int
    nonce: bytes
    progress: SessionProgress = SessionProgress()


class SecureSums:
    """All sessions of secure aggregation in a run.

    Args:
        transport: connection to the sites.
        settings: settings of the server, which include secure aggregation.
        is_noisy: True if the sums contain noise that the privacy accounting covers, so that they may cover different
            sites each time.
        run: the run, whose sums the sites verify if they have agreed to do so.
        length: length of an upload.
    """

    def __init__(
        self, transport: Transport, settings: Server, *, is_noisy: bool = False, run: Setting | None = None,
        length: int = 0,
    ) -> None:  # fmt: skip
        assert settings.secure is not None
        self._transport, self._settings, self._agreed = transport, settings, settings.secure
        self._agreement = settings.secure.digest(settings.fingerprint)
        self._public = {c: read_verifying_key(line, f"client {c}") for c, line in enumerate(settings.secure.keys)}
        self._unmasked = PendingSums(settings.checkpoints)
        self._out, self._is_noisy = set[int](), is_noisy
        self._changes_path = settings.checkpoints / "summed-sites.json"
        agreed = settings.secure
        self._changes = CohortChanges(read_checked(self._changes_path) or {}, agreed.changes, agreed.steady_sites)
        self._relays = Relays(settings, run, length) if agreed.verify and run is not None else None

    def find_link(self, t: int) -> bytes:
        """Return the link of the chain of opened sums after round ``t``, or empty bytes if sites do not verify sums."""
        return b"" if self._relays is None else self._relays.find_link(t)

    def _relay(self, terms: SessionTerms, cohort: list[int]) -> list[int]:
        """Send the records of opened sums to the sites that lack them, and return the sites that have opened all.

        Raises:
            RunStopped: too few sites have opened all sums.
        """
        t = terms.round - terms.trains
        for r in [] if self._relays is None else self._relays.find_missing(t, cohort):
            assert self._relays is not None
            lacking = self._relays.find_missing(t, cohort).get(r, [])
            nonce, parts = self._relays.read(r)
            ask = {
                c: SiteRequest(
                    "relay", c, parts, {"session": nonce}, round=r, read=lambda link: link, max_reply_bytes=KEY_BYTES
                )
                for c in lacking
            }
            need = max(0, self._agreed.threshold - len(cohort) + len(lacking))
            wanted = {c for c in lacking if self._name(c) in self._changes.sites}
            replies = self._transport.collect_replies(terms.round, ask, need, wanted)
            opened = {c for c, reply in replies.items() if self._relays.acknowledge(r, c, reply.value)}
            if other := {*replies} - opened:
                reason = f"round {r}: {self._names(other)} computes another sum from the relayed messages"
                self._transport.note("other sum", r, other, reason)
            cohort = [c for c in cohort if c not in lacking or c in opened]
        return cohort

    def find_repeated(self, sums: Mapping[str, int]) -> PendingSum | None:
        """Return the sum that was already requested for one of these kinds and rounds, or None if there is none."""
        return self._unmasked.find_match(sums)

    def sum(
        self, terms: SessionTerms, weights: Weights, request: Ask, length: int, read: Callable[[Integers, int], Any], *,
        counted: bool = False, again: bool = False,
    ) -> SessionSum:  # fmt: skip
        """Compute and return the sum of the sites' vectors.

        A sum that was requested before the server stopped is now revealed.

        Args:
            terms: terms that describe the request to the sites.
            weights: every site's weights in the sum (see `SessionTerms.weights`).
            request: function that creates the request for a client's vector. Its arguments include the shares of the
                other sites.
            length: number of values in a vector.
            read: function that decodes a sum of a given number of vectors. It raises `Refused` if the sum is
                implausible.
            counted: True if the sites check their counters before they open the sum of their vectors.
            again: True to begin a new session even though a sum was already requested, because that sum stays closed.

        Raises:
            RunStopped: fewer sites than the threshold participate.
            GivenUp: the sum was requested too many times, a vector is wrong, or too few sites answered when this round
                was requested before the server stopped.
        """
        pending = None if again else self._unmasked.find_match(terms.sums)
        if pending is not None and pending.sums == terms.sums and len(pending.total) != length:
            pending = None  # an earlier version of fedloom summed different numbers
        if pending is not None and pending.models.items() & terms.model_digests.items() != terms.model_digests.items():
            raise GivenUp(
                f"round {terms.round}: this round was already summed for a different model, and the server has gone "
                "back. No site decrypts a second sum of a round",
                pending.clients,
            )
        if pending is None:
            pending = self._collect_masked_sum(terms, weights, request, length, counted)
            self._enter_change(terms, weights, pending.clients)
        counts = None
        if counted:
            was_shown, (pending, counts) = bool(pending.shown), self._open_counters(pending)
            try:
                counters.check_enough(counts, self._agreed.threshold)
            except ProtocolBroken as error:
                if was_shown and terms.trains and counts.answered < self._agreed.threshold:
                    raise GivenUp(f"round {terms.round}: {error}", pending.clients) from None
                return SessionSum(None, pending.clients, [0, 0], counts)
        pending = pending if pending.told else self._unmask_sum(pending, read)
        n, part = len(secure.read_adverts(pending.adverts)), 4 + shares.SEALED_SHARE_BYTES
        up = len(pending.adverts) // n + n * part + SIGNATURE_BYTES + 8 * length + n * (4 + secure.KEY_BYTES)
        down = len(pending.adverts) + n * (part + 4 + SIGNATURE_BYTES) + len(terms.encode())
        if self._relays is not None and terms.trains:
            record = 8 * length + 2 * (4 + SIGNATURE_BYTES) + n * (4 + KEY_BYTES)
            up, down = up + SIGNATURE_BYTES, down + len(pending.adverts) + len(pending.clients) * record
        return SessionSum(read(pending.total, len(pending.clients)), pending.clients, [up, down], counts)

    # --------------------------------------------------------------------------------------- until shares are asked for

    def _collect_masked_sum(
        self, terms: SessionTerms, weights: Weights, request: Ask, length: int, counted: bool
    ) -> PendingSum:
        """Run all steps of a session except the last, and return the masked sum.

        Nothing has been revealed at this point.
        """
        while True:
            cohort = self._exclude_revealing(terms, [c for c in terms.cohort if c not in self._out])
            cohort = self._relay(terms, self._same_sites(terms, weights, cohort))
            self._check_summands(terms.round, weights, cohort)
            session_sum = self._begin_session(terms, weights, cohort, request, length, counted)
            if session_sum is not None:
                return session_sum

    def _begin_session(
        self, terms: SessionTerms, weights: Weights, cohort: list[int], request: Ask, length: int, counted: bool
    ) -> PendingSum | None:
        """Begin a session.

        Return the masked sum of one session, or None if a site was excluded, so that a new session must begin.
        """
        t, course, public = terms.round, _SessionCourse(terms.round, os.urandom(NONCE_BYTES)), self._public
        wanted = {c for c in cohort if self._name(c) in self._changes.sites}
        link = self.find_link(t - terms.trains)
        name = secure.session_name(self._agreement, t, course.nonce, link)
        ask = {c: SiteRequest("keys", c, [link] if link else []) for c in cohort}
        course, adverts = self._step(course, "keys", ask, lambda c, m: read_advert(m, name, c, public), wanted=wanted)
        everyone = secure.write_adverts(adverts.values())
        session = secure.build_session(name, self._agreed.threshold, adverts.values())
        ask = {c: SiteRequest("shares", c, [everyone]) for c in adverts}
        course, sealed = self._step(
            course, "shares", ask, lambda c, m: read_sealed(m, session, c, public[c]), wanted=wanted
        )
        self._check_leaving(terms, weights, sealed)
        inbox = {c: secure.join_parts({p: sent[c] for p, sent in sealed.items() if p != c}) for c in sealed}
        bound = secure.session_binding(session, terms.digest, [*sealed])
        text = secure.encode_statement(bound, [*sealed])
        ask = {c: request(c, inbox[c]) for c in sealed}
        course, answers = self._step(
            course,
            "masked" if terms.trains else "tally",
            ask,
            lambda c, m: read_vector(
                m,
                length,
                text,
                public[c],
                (len(adverts), bound) if counted else None,
                bound if link and terms.trains else None,
            ),
            most=2 * SIGNATURE_BYTES
            + 8 * length
            + counters.counters_bytes(len(adverts))
            + secure.MAX_SITES * (4 + SIGNATURE_BYTES),
            wanted=wanted,
        )
        accusations = {c: answer for c, answer in answers.items() if isinstance(answer, dict)}
        if accusations and self._exclude_violators(course, session, accusations, sealed):
            return None
        vectors: dict[int, tuple[bytes, Integers, bytes, bytes]] = {
            c: a for c, a in answers.items() if c not in accusations
        }
        if self._exclude_revealing(terms, [*vectors]) != [*vectors]:
            raise RunStopped(Stop.TOO_FEW, f"round {t}: another sum would reveal the upload of a single site")
        self._check_summands(t, weights, vectors)
        self._check_leaving(terms, weights, vectors)
        total: Integers = np.sum([vector for _, vector, _, _ in vectors.values()], axis=0, dtype=np.uint64)
        signed = {c: signature for c, (signature, _, _, _) in vectors.items()}
        masked_counters = {c: one for c, (_, _, one, _) in vectors.items()} if counted else {}
        if vectors.keys() != sealed.keys():
            arrived = secure.join_parts(dict.fromkeys(vectors, b""))
            text = secure.encode_statement(bound, vectors)
            ask = {c: SiteRequest("agree", c, [arrived]) for c in vectors}
            _, signed = self._step(course, "agree", ask, lambda c, m: read_signature(m, text, public[c]))
        if self._relays is not None and terms.trains:
            parts = {c: part for c, (_, _, _, part) in vectors.items()}
            self._relays.keep_vectors(t, course.nonce, terms, everyone, signed, parts)
        return PendingSum(
            t, course.nonce, everyone, terms.digest, [*sealed], [*vectors], signed, terms.sums, terms.model_digests,
            total, counters=masked_counters, link=link, counting=sum(any(weights[c]) for c in vectors),
        )  # fmt: skip

    def _exclude_violators(
        self,
        course: _SessionCourse,
        session: secure.Session,
        accusations: Mapping[int, Mapping[int, bytes]],
        sealed: Mapping[int, Mapping[int, bytes]],
    ) -> bool:
        """Exclude sites that have provably violated the session, and return True if any site was excluded.

        These sites remain excluded until the server restarts.

        Args:
            course: the session's progress.
            session: agreed session.
            accusations: signatures keyed by accusing and accused site.
            sealed: sealed shares keyed by sender and receiver.
        """
        against: dict[int, dict[int, bytes]] = {}
        for accuser, signed in accusations.items():
            for accused, signature in signed.items():
                valid = accused in sealed and accuser != accused
                if valid and shares.is_accused(session, accuser, accused, signature, self._public[accuser]):
                    against.setdefault(accused, {})[accuser] = signature
        ask = {c: SiteRequest("open", c, [secure.join_parts(signed)]) for c, signed in against.items()}
        opened = dict[int, Any]()
        if ask:
            _, opened = self._step(course, "open", ask, lambda _, m: secure.split_parts(m, secure.KEY_BYTES), need=0)
        before = len(self._out)
        for accused, accusers in against.items():
            keys = opened.get(accused, {})
            bad = [
                c
                for c in accusers
                if c not in keys or not shares.is_readable(session, accused, c, sealed[accused][c], keys[c])
            ]
            if bad:
                self._leave_out(course.round, accused, f"its signed shares for {self._names(bad)} do not decrypt")
            for accuser in {*accusers} - {*bad}:
                self._leave_out(
                    course.round,
                    accuser,
                    f"it claims that the share of {self._names([accused])} does not decrypt, but it does",
                )
        return len(self._out) > before

    def _exclude_revealing(self, terms: SessionTerms, clients: Collection[int]) -> list[int]:
        """Return the sites whose vectors may be summed.

        If the same models were already summed in a different round, return the sites in that sum.

        Sites reject any other set, unless it differs in so many sites that the difference between the two sums is
        itself a sum over enough sites.

        Raises:
            RunStopped: sites in the earlier sum are missing.
        """
        for what, t in terms.sums.items():
            round, models = self._unmasked.about(what)
            before = self._unmasked.newest(what) if models == terms.model_digests[what] != "" and round != t else None
            if before is None:
                continue
            apart = {*clients} ^ {*before.clients}
            if not 0 < len(apart) < self._agreed.threshold:
                continue
            missing = {*before.clients} - {*clients}
            if missing:
                raise RunStopped(
                    Stop.TOO_FEW,
                    f"round {terms.round}: a sum without {self._names(missing)} and the sum of round "
                    f"{before.round}, for the same models, would together reveal the upload of that "
                    "site. The run continues when the site is back",
                )
            clients = [c for c in clients if c in before.clients]
        return [*clients]

    def _same_sites(self, terms: SessionTerms, weights: Weights, cohort: list[int]) -> list[int]:
        """Return the cohort without sites that would return to the sums more often than agreed."""
        listed, _ = self._counting(terms, weights, cohort)
        returning = (
            {*self._changes.exhausted({*listed} - {*self._changes.sites})} if self._changes.sites else set[str]()
        )
        if self._is_noisy or not returning:
            return cohort
        stays_out = [c for c in cohort if self._name(c) in returning]
        self._transport.note(
            "stays out",
            terms.round,
            stays_out,
            f"round {terms.round}: {self._names(stays_out)} has left the sums or returned {self._changes.limit} times, "
            "and every further change would reveal one more difference (key `changes` in the table `secure`)",
        )
        return [c for c in cohort if c not in stays_out]

    def _check_leaving(self, terms: SessionTerms, weights: Weights, clients: Collection[int]) -> None:
        """Raise an error if the sites would not open a sum because a site that has left too often is missing from it.

        Raises:
            RunStopped: the run cannot continue until a site returns. The message contains the site's name.
        """
        if self._is_noisy:
            return
        try:
            self._changes.add_sum(*self._counting(terms, weights, clients), self._collect_states(terms, clients))
        except ProtocolBroken as error:
            raise RunStopped(
                Stop.TOO_FEW, f"round {terms.round}: {error}. The run continues when the sites of that sum are back"
            ) from None

    def _enter_change(self, terms: SessionTerms, weights: Weights, clients: Collection[int]) -> None:
        """Store and log which sites are in a sum before its shares are requested."""
        if self._is_noisy:
            return
        counting, before = self._counting(terms, weights, clients), self._changes
        changed = before.changed(*counting, self._collect_states(terms, clients))
        self._changes = before.add_sum(*counting, self._collect_states(terms, clients))
        if self._changes == before:
            return
        write_checked(self._changes_path, self._changes.record)
        if changed:
            counts = self._changes.record["changes"]
            words = [
                f"{'with' if c in counting[0] else 'without'} {c} (change {counts[c]} of {before.limit})"
                for c in sorted(changed)
            ]
            reason = f"round {terms.round}: the sites have signed a sum {', '.join(words)}"
            self._transport.note("other sites", terms.round, clients, reason)

    def _counting(
        self, terms: SessionTerms, weights: Weights, clients: Collection[int]
    ) -> tuple[list[str], dict[str, dict[str, Sequence[float]]]]:
        """Return the sites in a sum whose contribution is unknown, and their weights, computed as at the sites."""
        listed = {self._name(c): weights[c] for c in clients if any(weights[c])}
        alike: dict[str, Sequence[float]] = dict.fromkeys(listed, (1.0,))
        return sorted(listed), {what: listed if what == "uploads" else alike for what in terms.sums}

    def _collect_states(self, terms: SessionTerms, clients: Collection[int]) -> AnswerStates:
        return AnswerStates("", terms.sums.get("uploads"), {self._name(c): terms.bases[c] for c in clients})

    def _name(self, client: int) -> str:
        names = self._agreed.names
        return names[client] if names else str(client)

    # ------------------------------------------------------------------------------------------------- the last step

    def _unmask_sum(self, pending: PendingSum, read: Callable[[Integers, int], Any]) -> PendingSum:
        """Unmask a sum with the shares of at least the threshold number of its sites, and return it.

        If the sum is plausible, it is also stored.
        """
        t, why = pending.round, "it was never revealed"
        while pending.attempts < MAX_ATTEMPTS:
            self._unmasked.keep(pending := pending._replace(attempts=pending.attempts + 1))
            try:
                total, answers = self._open(pending)
            except ProtocolBroken as error:
                why = str(error)
                self._transport.note("wrong shares", t, pending.clients, f"round {t}: {error}")
                continue
            try:
                read(total, len(pending.clients))
            except Refused as error:
                why = f"{error}. A sum does not show which site's vector is wrong"
                self._unmasked.keep(pending := pending._replace(attempts=MAX_ATTEMPTS))
                continue
            if self._relays is not None and "uploads" in pending.sums:
                self._relays.complete(t, answers, pending.clients, total)
            self._unmasked.keep(pending := pending._replace(total=total, told=True))
            return pending
        raise GivenUp(
            f"round {t}: no sum was obtained: {why}. The round is not repeated with different sites, "
            "because the difference between the two sums would reveal individual uploads",
            pending.clients,
        )

    def _open_counters(self, pending: PendingSum) -> tuple[PendingSum, counters.AnswerCounts]:
        """Open the counters of a sum of masked vectors.

        Return the sum with the shares of its counters, and the numbers of sites that the counters show.

        Raises:
            RunStopped: fewer sites than the threshold answer.
            GivenUp: the counters were requested too often, or the numbers are not valid counters.
        """
        session, t, why = self._session_of(pending), pending.round, "they were never revealed"
        bound, is_new = secure.session_binding(session, pending.question, pending.shared), not pending.shown
        peers = pending.shared
        while pending.shown or pending.attempts < MAX_ATTEMPTS:
            if not pending.shown:
                self._unmasked.keep(pending := pending._replace(attempts=pending.attempts + 1))
                digest = hashlib.sha256(secure.join_parts(pending.counters)).digest()
                ask = {c: SiteRequest("count", c, [_encode_signatures(pending), digest]) for c in pending.clients}
                course = _SessionCourse(t, pending.nonce, SessionProgress(Stage.MASKED))
                _, shown = self._step(course, "count", ask, lambda _, m: read_shares(m, peers))
                pending = pending._replace(shown={c: secure.join_parts(one) for c, one in shown.items()})
            answers = {c: secure.split_parts(one, secure.KEY_BYTES) for c, one in pending.shown.items()}
            try:
                counts, wrong = counters.open_counters(
                    session, bound, peers, pending.counters, answers, self._public, pending.counting
                )
            except ProtocolBroken as error:
                why, is_new, pending = str(error), True, pending._replace(shown={})
                self._transport.note("wrong shares", t, pending.clients, f"round {t}: {error}")
                continue
            for client in sorted(wrong):
                self._leave_out(t, client, "its shares of the others' secrets are wrong")
            if is_new:
                self._unmasked.keep(pending := pending._replace(attempts=0))
            return pending, counts
        raise GivenUp(f"round {t}: no counters of the sum were obtained: {why}", pending.clients)

    def _session_of(self, pending: PendingSum) -> secure.Session:
        """Rebuild the session of a sum that was requested."""
        name = secure.session_name(self._agreement, pending.round, pending.nonce, pending.link)
        return secure.build_session(name, self._agreed.threshold, secure.read_adverts(pending.adverts))

    def _open(self, pending: PendingSum) -> tuple[Integers, dict[int, dict[int, bytes]]]:
        """Request the shares that unmask a sum. Return the sum without masks, and the correct shares of each site.

        Raises:
            RunStopped: fewer sites than the threshold answer.
            ProtocolBroken: the sites' shares do not give secrets that match their owners' commitments.
        """
        session = self._session_of(pending)
        bound = secure.session_binding(session, pending.question, pending.shared)
        counted = [secure.join_parts(pending.counters), secure.join_parts(pending.shown)] if pending.counters else []
        message = [_encode_signatures(pending), *counted]
        ask = {c: SiteRequest("unmask", c, message) for c in pending.clients}
        course = _SessionCourse(pending.round, pending.nonce, SessionProgress(Stage.MASKED))
        _, answers = self._step(course, "unmask", ask, lambda _, m: read_shares(m, pending.shared))
        secrets, wrong = shares.restore_secrets(session, pending.shared, pending.clients, answers)
        for client in sorted(wrong):
            self._leave_out(pending.round, client, "its shares of the others' secrets are wrong")
        right = {c: one for c, one in answers.items() if c not in wrong}
        return secure.unmask_sum(session, bound, pending.clients, pending.total, secrets), right

    # ---------------------------------------------------------------------------------------------------------- inside

    def _step(
        self, course: _SessionCourse, kind: Kind, requests: dict[int, SiteRequest], read: Callable[[int, bytes], Any],
        need: int | None = None, most: int = secure.MAX_SITES * (4 + shares.SEALED_SHARE_BYTES),
        wanted: Collection[int] = (),
    ) -> tuple[_SessionCourse, dict[int, Any]]:  # fmt: skip
        """Carry out a step of a session, and return the new progress and the sites' answers, keyed by client."""
        progress = course.progress.advance(kind)

        def reader(c: int) -> Callable[[bytes], Any]:
            return lambda message: read(c, message)

        requests = {
            c: x._replace(
                extra_fields={**(x.extra_fields or {}), "session": course.nonce}, read=reader(c), max_reply_bytes=most
            )
            for c, x in requests.items()
        }
        last = kind in ("agree", "unmask")
        least = max(self._agreed.threshold, 1 if last else min(self._settings.quorum, len(requests)))
        need = least if need is None else need
        replies = self._transport.collect_replies(course.round, requests, need, wanted)
        return course._replace(progress=progress), {c: reply.value for c, reply in sorted(replies.items())}

    def _leave_out(self, t: int, client: int, why: str) -> None:
        self._out.add(client)
        name = self._names([client])
        self._transport.note("left out", t, [client], f"round {t}: {name} is excluded until the server restarts: {why}")

    def _names(self, clients: Collection[int]) -> str:
        return ", ".join(
            self._transport.members[c].site if c in self._transport.members else f"client {c}" for c in sorted(clients)
        )

    def _check_summands(self, t: int, weights: Weights, clients: Collection[int]) -> None:
        """Raise an error if the sites would not open a sum.

        Raises:
            RunStopped: the sum would cover fewer sites than the threshold, or one site would have too large a share of
                the weight.
        """
        count, threshold = len(clients), self._agreed.threshold
        if count < threshold:
            raise RunStopped(
                Stop.TOO_FEW, f"round {t}: the sum would contain {count} sites, but the threshold is {threshold}"
            )
        try:
            check_summands(weights, clients, threshold, self._agreed.max_share)
        except ProtocolBroken as error:
            raise RunStopped(Stop.TOO_FEW, f"round {t}: {error}") from None


def _encode_signatures(pending: PendingSum) -> bytes:
    """Encode the sites in a sum, each with its signature, or with zeros if the signature is missing."""
    return secure.join_parts({c: pending.signed.get(c, bytes(SIGNATURE_BYTES)) for c in pending.clients})
