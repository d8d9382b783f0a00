"""Sessions: the server's side of secure aggregation, from the sites' keys to a sum that makes sense.

A site that is shown to have broken the protocol is named, and left out of sessions until the server is started again. A
round's uploads are asked for in a new session only as long as no share of the session before has been asked for;
after that the sum is of these sites, or the round is lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedloom.deploy.protocol.identity import NONCE, verifying_key
from fedloom.deploy.secure import protocol as secure
from fedloom.deploy.secure import shares
from fedloom.deploy.secure.pending import PendingSum, PendingSums
from fedloom.deploy.secure.protocol import ACCUSES, SIGNATURE, Broken, Integers
from fedloom.deploy.secure.terms import Terms
from fedloom.deploy.server.transport import Request, Transport
from fedloom.deploy.settings import Server
from fedloom.errors import GivenUp, Refused, RunStopped, Stop, WireError

ATTEMPTS = 3
"""How often the shares of a sum are asked for before it is given up."""

Ask = Callable[[int, bytes], Request]
"""(client, sealed shares of the others) -> what asks the client for its vector."""


class Sum(NamedTuple):
    """A sum of a session: what it was read as, whose it is, and bytes per site up and down."""

    value: Any
    clients: list[int]
    traffic: list[int]


class SecureSums:
    """The sessions of a run.

    Args:
        transport: the way to the sites.
        settings: of the server, with secure aggregation.
    """

    def __init__(self, transport: Transport, settings: Server) -> None:
        assert settings.secure is not None
        self._transport, self._settings, self._agreed = transport, settings, settings.secure
        self._agreement = settings.secure.digest(settings.fingerprint)
        self._public = {c: verifying_key(line, f"client {c}") for c, line in enumerate(settings.secure.keys)}
        self._unmasked = PendingSums(settings.checkpoints)
        self._out = set[int]()

    def asked_for(self, sums: Mapping[str, int]) -> PendingSum | None:
        """The sum of any of these, by kind and round, if it was asked for before."""
        return self._unmasked.of(sums)

    def sum(self, terms: Terms, letter: Ask, length: int, read: Callable[[Integers, int], Any]) -> Sum:
        """The sum of the sites' vectors; one that was asked for before a stop is told now.

        Args:
            terms: what the sites are asked.
            letter: asks a client for its vector; takes the shares of the others too.
            length: of a vector.
            read: what a sum of so many vectors is; Refused where it makes no sense.

        Raises:
            RunStopped: fewer than the threshold take part.
            GivenUp: it was asked for too often, or one of the vectors is wrong.
        """
        asked = self._unmasked.of(terms.sums) or self._collected(terms, letter, length)
        asked = asked if asked.told else self._told(asked, read)
        n, part = len(secure.read_adverts(asked.adverts)), 4 + shares.SEALED
        up = len(asked.adverts) // n + n * part + SIGNATURE + 8 * length + n * (4 + secure.KEY)
        down = len(asked.adverts) + n * (part + 4 + SIGNATURE) + len(terms.encode())
        return Sum(read(asked.total, len(asked.clients)), asked.clients, [up, down])

    # --------------------------------------------------------------------------------------- until shares are asked for

    def _collected(self, terms: Terms, letter: Ask, length: int) -> PendingSum:
        """The steps before the last: the sum under its masks. Until the last, nobody can tell anything."""
        while True:
            cohort = self._apart(terms, [c for c in terms.cohort if c not in self._out])
            self._check_count(terms.round, len(cohort))
            session_sum = self._begun(terms, cohort, letter, length)
            if session_sum is not None:
                return session_sum

    def _begun(self, terms: Terms, cohort: list[int], letter: Ask, length: int) -> PendingSum | None:
        """A session; None if a site was left out of it, so that another one is to begin."""
        t, nonce = terms.round, os.urandom(NONCE)
        name = secure.session_name(self._agreement, t, nonce)
        adverts = self._step(t, nonce, {c: Request("keys", c) for c in cohort}, lambda c, m: self._advert(name, c, m))
        everyone = secure.write_adverts(adverts.values())
        session = secure.session_of(name, self._agreed.threshold, adverts.values())
        ask = {c: Request("shares", c, [everyone]) for c in adverts}
        sealed = self._step(t, nonce, ask, lambda c, m: self._sealed(session, c, m))
        inbox = {c: secure.write({p: sent[c] for p, sent in sealed.items() if p != c}) for c in sealed}
        bound = secure.bound_to(session, terms.digest, [*sealed])
        text = secure.statement(bound, [*sealed])
        answers = self._step(
            t,
            nonce,
            {c: letter(c, inbox[c]) for c in sealed},
            lambda c, m: _answer(m, length, text, self._public[c]),
            most=SIGNATURE + 8 * length + secure.MOST * (4 + SIGNATURE),
        )
        accusations = {c: answer for c, answer in answers.items() if isinstance(answer, dict)}
        if accusations and self._judge(t, nonce, session, accusations, sealed):
            return None
        vectors: dict[int, tuple[bytes, Integers]] = {c: a for c, a in answers.items() if c not in accusations}
        if self._apart(terms, [*vectors]) != [*vectors]:
            raise RunStopped(Stop.TOO_FEW, f"round {t}: another sum would tell what a single site sent")
        self._check_count(t, len(vectors))
        total: Integers = np.sum([vector for _, vector in vectors.values()], axis=0, dtype=np.uint64)
        signed = {c: signature for c, (signature, _) in vectors.items()}
        if vectors.keys() != sealed.keys():
            arrived = secure.write(dict.fromkeys(vectors, b""))
            signed = self._signed(t, nonce, bound, vectors, {c: Request("agree", c, [arrived]) for c in vectors})
        return PendingSum(
            t, nonce, everyone, terms.digest, [*sealed], [*vectors], signed, terms.sums, terms.asked, total
        )

    def _signed(
        self, t: int, nonce: bytes, bound: bytes, arrived: Collection[int], ask: dict[int, Request]
    ) -> dict[int, bytes]:
        """Signatures of the sites of a sum that it is of them, where not all that shared have sent a vector."""
        text = secure.statement(bound, arrived)
        return self._step(t, nonce, ask, lambda c, m: _signature(m, text, self._public[c]))

    def _judge(
        self,
        t: int,
        nonce: bytes,
        session: secure.Session,
        accusations: Mapping[int, Mapping[int, bytes]],
        sealed: Mapping[int, Mapping[int, bytes]],
    ) -> bool:
        """Leave out whoever is shown to have broken the session; whether anybody is.

        Args:
            t: round.
            nonce: of the session.
            session: the same.
            accusations: signatures by accuser and accused.
            sealed: shares by sender and receiver.
        """
        against: dict[int, dict[int, bytes]] = {}
        for accuser, signed in accusations.items():
            for accused, signature in signed.items():
                valid = accused in sealed and accuser != accused
                if valid and shares.is_accused(session, accuser, accused, signature, self._public[accuser]):
                    against.setdefault(accused, {})[accuser] = signature
        ask = {c: Request("open", c, [secure.write(signed)]) for c, signed in against.items()}
        opened = self._step(t, nonce, ask, lambda _, m: secure.read(m, secure.KEY), need=0) if ask else {}
        before = len(self._out)
        for accused, accusers in against.items():
            keys = opened.get(accused, {})
            bad = [
                c
                for c in accusers
                if c not in keys or not shares.is_readable(session, accused, c, sealed[accused][c], keys[c])
            ]
            if bad:
                self._leave_out(t, accused, f"its shares for {self._names(bad)} do not decrypt, which it has signed")
            for accuser in {*accusers} - {*bad}:
                self._leave_out(
                    t, accuser, f"it says that the share of {self._names([accused])} does not decrypt; it does"
                )
        return len(self._out) > before

    def _apart(self, terms: Terms, clients: Collection[int]) -> list[int]:
        """The sites that may be summed; if models were asked for before in another round, those of that sum.

        Sites refuse any but these, or so many others that the difference of both sums is itself of enough sites.

        Raises:
            RunStopped: sites of that sum are missing.
        """
        for what, t in terms.sums.items():
            before = self._unmasked.newest(what)
            if (
                before is None
                or before.sums[what] == t
                or not terms.asked[what]
                or (before.models.get(what) != terms.asked[what])
            ):
                continue
            apart = {*clients} ^ {*before.clients}
            if not 0 < len(apart) < self._agreed.threshold:
                continue
            missing = {*before.clients} - {*clients}
            if missing:
                raise RunStopped(
                    Stop.TOO_FEW,
                    f"round {terms.round}: a sum without {self._names(missing)} and that of round {before.round}, on "
                    "the same models, would tell what it sent; the run goes on when it is back",
                )
            clients = [c for c in clients if c in before.clients]
        return [*clients]

    # ------------------------------------------------------------------------------------------------- the last step

    def _told(self, asked: PendingSum, read: Callable[[Integers, int], Any]) -> PendingSum:
        """The last step: any threshold of the sites of a sum take its masks off; it is kept once it makes sense."""
        t, why = asked.round, "it was never told"
        while asked.attempts < ATTEMPTS:
            self._unmasked.keep(asked := asked._replace(attempts=asked.attempts + 1))
            try:
                total = self._open(asked)
            except Broken as error:
                why = str(error)
                self._transport.note("wrong shares", t, asked.clients, f"round {t}: {error}")
                continue
            try:
                read(total, len(asked.clients))
            except Refused as error:
                why = f"{error}; which site's vector is wrong cannot be known from a sum"
                self._unmasked.keep(asked := asked._replace(attempts=ATTEMPTS))
                continue
            self._unmasked.keep(asked := asked._replace(total=total, told=True))
            return asked
        raise GivenUp(
            f"round {t}: the sum was asked for in vain: {why}; a sum of other sites would tell the difference",
            asked.clients,
        )

    def _open(self, asked: PendingSum) -> Integers:
        """The sum without its masks.

        Raises:
            RunStopped: fewer than the threshold answer.
            Broken: their shares do not give the secrets that their owners are committed to.
        """
        name = secure.session_name(self._agreement, asked.round, asked.nonce)
        session = secure.session_of(name, self._agreed.threshold, secure.read_adverts(asked.adverts))
        bound = secure.bound_to(session, asked.question, asked.shared)
        arrived = secure.write({c: asked.signed.get(c, bytes(SIGNATURE)) for c in asked.clients})
        ask = {c: Request("unmask", c, [arrived]) for c in asked.clients}
        answers = self._step(asked.round, asked.nonce, ask, lambda _, m: _shares_of(m, asked.shared))
        secrets, wrong = shares.restored(session, asked.shared, asked.clients, answers)
        for client in sorted(wrong):
            self._leave_out(asked.round, client, "its shares of the others' secrets are wrong")
        return secure.unmasked(session, bound, asked.clients, asked.total, secrets)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _step(
        self,
        t: int,
        nonce: bytes,
        letters: dict[int, Request],
        read: Callable[[int, bytes], Any],
        need: int | None = None,
        most: int = secure.MOST * (4 + shares.SEALED),
    ) -> dict[int, Any]:
        """What the sites answer in a step of a session, by client in rising order."""

        def reader(c: int) -> Callable[[bytes], Any]:
            return lambda message: read(c, message)

        letters = {
            c: x._replace(more={**(x.more or {}), "session": nonce}, read=reader(c), most=most)
            for c, x in letters.items()
        }
        last = any(x.kind in ("agree", "unmask") for x in letters.values())
        least = max(self._agreed.threshold, 1 if last else min(self._settings.quorum, len(letters)))
        replies = self._transport.until(t, letters, least if need is None else need)
        return {c: reply.value for c, reply in sorted(replies.items())}

    def _leave_out(self, t: int, client: int, why: str) -> None:
        self._out.add(client)
        name = self._names([client])
        self._transport.note(
            "left out", t, [client], f"round {t}: {name} is left out until the server starts again: {why}"
        )

    def _names(self, clients: Collection[int]) -> str:
        return ", ".join(
            self._transport.members[c].site if c in self._transport.members else f"client {c}" for c in sorted(clients)
        )

    def _check_count(self, t: int, count: int) -> None:
        if count < self._agreed.threshold:
            raise RunStopped(
                Stop.TOO_FEW, f"round {t}: {count} sites would be summed, the threshold is {self._agreed.threshold}"
            )

    def _advert(self, name: bytes, client: int, message: bytes) -> secure.Advert:
        """The one advertisement of a message.

        Raises:
            WireError: the bytes are not that, or not this client's keys in this session: the agreements may differ.
        """
        adverts = secure.read_adverts(message)
        if [a.client for a in adverts] != [client]:
            raise WireError(
                f"one advertisement, of client {client}, is expected, got {[a.client for a in adverts][:5]}"
            )
        try:
            secure.check_adverts(name, adverts, self._public)
        except Broken as error:
            raise WireError(f"{error}; do both sides have the same agreement?") from None
        return adverts[0]

    def _sealed(self, session: secure.Session, client: int, message: bytes) -> dict[int, bytes]:
        """The sealed shares of a site, for all others, each signed by it.

        Raises:
            WireError: the bytes are not that.
        """
        parts, receivers = secure.read(message, shares.SEALED), {*session.adverts} - {client}
        if set(parts) != receivers:
            raise WireError(f"shares for {sorted(receivers)} are expected, got those for {sorted(parts)}")
        for to, sealed in parts.items():
            if not shares.is_signed(session, client, to, sealed, self._public[client]):
                raise WireError(f"the share for client {to} is not signed by client {client} for this session")
        return parts


def _shares_of(message: bytes, owners: Collection[int]) -> dict[int, bytes]:
    parts = secure.read(message, secure.KEY)
    if set(parts) != set(owners):
        raise WireError(f"shares of {sorted(owners)} are expected, got those of {sorted(parts)}")
    return parts


def _signature(message: bytes, text: bytes, public: Any) -> bytes:
    """A signature of a sum's sites.

    Raises:
        WireError: it is not of this sum.
    """
    try:
        public.verify(message, text)
    except Exception:
        raise WireError("the signature is not of this sum: the site was asked something else") from None
    return message


def _answer(message: bytes, length: int, text: bytes, public: Any) -> tuple[bytes, Integers] | dict[int, bytes]:
    """A masked vector behind its site's signature, or accusations by the accused.

    Raises:
        WireError: the bytes are neither.
    """
    if len(message) == SIGNATURE + 8 * length:
        vector = np.frombuffer(message, dtype="<u8", offset=SIGNATURE).astype(np.uint64, copy=False)
        return _signature(message[:SIGNATURE], text, public), vector
    if message.startswith(ACCUSES):
        return secure.read(message[len(ACCUSES) :], SIGNATURE)
    raise WireError(f"a masked vector has {SIGNATURE + 8 * length} bytes, got {len(message)}")
