"""A site's signed replies to the server's messages, with results of `trainer` or with the reason for a rejection."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

from flwr.app import Message, RecordDict

from fedloom.data import Federation
from fedloom.data.input_spec import comparable_facts
from fedloom.errors import CheckpointError, DiskError, FedloomError, Refused, describe_error, escape_controls
from fedloom.local.oracles.precision import isolate_torch_settings
from fedloom.version import __version__
from fedloom_sites.deploy.alarms import Alarms, message_digest, raise_alarm
from fedloom_sites.deploy.analyses import count_questions
from fedloom_sites.deploy.audit import SENT_FILE, Audit
from fedloom_sites.deploy.protocol.envelope import (
    MAX_REASON_CHARACTERS,
    PROTOCOL_VERSION,
    REQUEST_FIELDS,
    UNABLE_STATUS,
    UNUSABLE_STATUS,
    Envelope,
    common_head,
    digest_arrays,
    seal_message,
    unseal_message,
)
from fedloom_sites.deploy.protocol.identity import read_signing_key, sign_fields
from fedloom_sites.deploy.protocol.public import PublicReason, publish_reasons
from fedloom_sites.deploy.secure.changes import MAX_CHANGES
from fedloom_sites.deploy.secure.site import MaskedAnswers
from fedloom_sites.deploy.settings import Site
from fedloom_sites.deploy.site.approval import check_approved, check_data_name
from fedloom_sites.deploy.site.asked import MODEL_MESSAGES, AskedModels
from fedloom_sites.deploy.site.local_data import part_sizes
from fedloom_sites.deploy.site.plain import Answer, PlainAnswers
from fedloom_sites.deploy.site.state import ServerRewound, SiteState
from fedloom_sites.deploy.site.trainer import VALUE_FREE_ERRORS, Trainer, UnusableResult
from fedloom_sites.deploy.snapshots import check_snapshot


class Client:
    """One site.

    Args:
        site: the site's settings.
        fed: samples of the site, if they have already been read. None if the samples are read from the source in the
            site's settings.

    Attributes:
        trainer: object that trains and scores models at the site.
        answers: object that answers the messages of a round, either individually or under masks.

    Raises:
        ConfigError: the signing key cannot be read.
    """

    def __init__(self, site: Site, fed: Federation | None = None) -> None:
        agreed = "" if site.secure is None else site.secure.keys[site.client]
        self.site, self._key, self._has_named_data = site, read_signing_key(site.signing_key, agreed), False
        self._memory = SiteState(site.state, site.fingerprint, site.client)
        self.trainer = Trainer(site, self._memory, fed)
        self._asked = AskedModels(site, self._memory, self.trainer)
        self._alarms = Alarms(self._memory.folder, self._count_questions)
        self.answers = (
            PlainAnswers(self.trainer, self._memory.folder)
            if site.secure is None
            else MaskedAnswers(site, self._key, self.trainer, self._memory.folder, self._asked)
        )

    @property
    def sizes(self) -> list[int]:
        """Number of training, validation and test samples of the site."""
        return part_sizes(self.trainer.fed, self.site.client)

    @property
    def figures(self) -> str:
        """Metrics that the site's samples define, encoded for the server."""
        return self.answers.figures

    def prepare(self) -> None:
        """Read the data and build the run before they are needed for a message.

        Raises:
            FedloomError: the data cannot be read, or the run cannot be built.
        """
        with isolate_torch_settings(self.site.threads):
            _ = self.trainer.samples, self.trainer.forms

    def answer(self, message: Message) -> Message:
        """Return the `reply` to a message as a message."""
        return Message(self.reply(message.content), reply_to=message)

    def reply(self, content: RecordDict) -> RecordDict:
        """Return the signed reply to the content of a message from the server. A rejection states the reason.

        If the site cannot write to its disk, the reply says so, and the server may send the same message again.

        The reply contains the reason only if the reason reveals no value of a sample. Under differential privacy or
        secure aggregation, the reason must also come from code that reads no samples (`PublicReason`). Otherwise, the
        reason appears only in the site's log.
        """
        head: dict[str, Any] = {}
        secret, reason = False, ""
        try:
            with publish_reasons():
                envelope = unseal_message(content, REQUEST_FIELDS, {}, self.site.message_limit)
                head = envelope.head
                self._check(envelope)
                secret = self.trainer.private or self.site.secure is not None
            with isolate_torch_settings(self.site.threads), ExitStack() as held:
                with publish_reasons():
                    held.enter_context(self._memory.open())
                self._watch_samples()
                more, arrays, metrics = self._answer_envelope(envelope)
            more |= {"status": "ok", "reason": "; ".join(self._memory.notes)[:MAX_REASON_CHARACTERS]}
        except Exception as error:  # the reply contains the message, and the server logs it
            reason = public = describe_error(error)
            cause, status = error.__cause__ if isinstance(error, PublicReason) else error, "refused"
            if not isinstance(error, PublicReason if secret else (PublicReason, *VALUE_FREE_ERRORS)):
                public = self.trainer.log_privately(reason)
            elif isinstance(cause, DiskError):
                status = UNABLE_STATUS
            elif isinstance(cause, UnusableResult):
                status = UNUSABLE_STATUS
            more, arrays, metrics = {"status": status, "reason": public[:MAX_REASON_CHARACTERS]}, [], None
        self._memory.notes.clear()
        more["digest"] = digest_arrays(arrays)
        try:
            self._note_sent(head, more, arrays, metrics, reason)
        except CheckpointError as error:  # nothing leaves the site without an entry in the log
            more, arrays, metrics = {"status": UNABLE_STATUS, "reason": str(error)[:MAX_REASON_CHARACTERS]}, [], None
            more["digest"] = digest_arrays(arrays)
        return self._sign_reply(head, more, arrays, metrics)

    def _note_sent(
        self, about: dict[str, Any], more: dict[str, Any], arrays: Sequence[bytes], metrics: dict[str, float] | None,
        reason: str,
    ) -> None:  # fmt: skip
        """Log the content of a reply before the reply leaves the site, and raise alarms about the message.

        Raises:
            CheckpointError: the disk is full or cannot be written to.
        """
        facts = {"kind": about.get("kind"), "round": about.get("round"), "status": more["status"]}
        parameters = self.answers.count_parameters(str(about.get("kind")), arrays)
        sizes = {"bytes": sum(map(len, arrays)), "parameters": parameters, "numbers": len(metrics or {})}
        line = facts | sizes | {"digest": more["digest"], "asked": message_digest(about)}
        log = Audit(self._memory.folder / SENT_FILE)
        alarms = self._alarms.note({"what": "sent", **line}, reason)
        log.write("sent", **line)
        for alarm in alarms:
            raise_alarm(log, alarm[:MAX_REASON_CHARACTERS])
            self.trainer.log_privately(alarm)

    def _count_questions(self, t: int) -> int:
        """Return the number of analysis questions in round ``t``: 0 before the last round or if there are none."""
        try:
            has_questions = t == self.trainer.rounds and not self.trainer.private
            return count_questions(self.trainer.experiment) if has_questions else 0
        except FedloomError:  # the experiment cannot be read, so the site rejects every message
            return 0

    def _sign_reply(
        self, about: dict[str, Any], more: dict[str, Any], arrays: Sequence[bytes], metrics: dict[str, float] | None
    ) -> RecordDict:
        kind, round, nonce = about.get("kind", "hello"), about.get("round", 0), about.get("nonce", b"")
        head = common_head(self.site.fingerprint, kind, round, self.site.client, nonce, more["digest"]) | more
        return seal_message(
            {**head, "signature": sign_fields(self._key, {**head, "metrics": metrics or {}})}, arrays, metrics
        )

    def _check(self, envelope: Envelope) -> None:
        """Raise an error if a message is damaged, or comes from a different release or experiment.

        Raises:
            ConfigError: the message differs from what the site expects. The error names the values that the two parties
                have.
        """
        head, site = envelope.head, self.site
        for what, got, here in (
            ("fedloom", head["release"], __version__),
            ("protocol", head["protocol"], PROTOCOL_VERSION),
            ("experiment", head["experiment"][:16], site.fingerprint[:16]),
        ):
            if got != here:
                raise Refused(
                    f"the server's {what} is {escape_controls(str(got)[:60])}, but site {site.site} has {here}"
                )
        if head["client"] not in (-1, site.client):
            raise Refused(f"the message is for client {head['client']}, but site {site.site} is client {site.client}")
        if head["digest"] != digest_arrays(envelope.arrays):
            raise Refused("the arrays changed during transmission")
        if head["kind"] == "ask" and self.trainer.private:
            raise Refused(
                f"site {site.site} does not answer analyses, because its epsilon is limited and the "
                "answers contain no noise"
            )

        kind = head["kind"]
        if kind not in ("hello", *self.answers.kinds):
            agreed = "no secure aggregation" if site.secure is None else "secure aggregation"
            raise Refused(
                f"site {site.site} does not answer messages of kind {kind}, because the agreement has {agreed}"
            )
        if kind != "hello":
            check_approved(site)
            if not self._has_named_data or kind == "analysis":
                try:
                    check_data_name(site, remembers_answers=kind == "analysis")
                except Refused as error:  # the message names data of other agreements
                    self.trainer.log_privately(describe_error(error))
                    raise Refused(
                        f"site {site.site} does not accept the data_name of the agreement. At the site, run: fedloom "
                        "deploy check FOLDER"
                    ) from None
                self._has_named_data = True
        self._check_round(head)

    def _check_round(self, head: dict[str, Any]) -> None:
        """Raise an error if a round was not agreed on, or has already ended at this site.

        Raises:
            ServerRewound: the round is wrong. The message names both rounds.
        """
        kind, t, rounds = head["kind"], head["round"], self.trainer.rounds
        if kind in ("hello", "relay"):
            return
        trains = kind in ("train", "ask", "masked")
        behind, _ = self._memory.accepted()
        if not int(trains) <= t <= rounds:
            raise ServerRewound(f"round {t} is not one of the agreed rounds 1 to {rounds}")
        if t < behind - (not trains):
            raise ServerRewound(f"round {t} is over: this site has already accepted round {behind}")
        accepted = head.get("accepted", 0)
        if not 0 <= accepted <= t - trains:
            raise ServerRewound(f"the server names round {accepted} as accepted, but requests round {t}")
        scored = head.get("scored", -1)
        if scored != -1 and not behind - 1 <= scored < t:
            raise ServerRewound(f"the server requests scores of round {scored} together with the training of round {t}")

    def _watch_samples(self) -> None:
        """Report that samples have changed since the last message, or raise an error if changes are not allowed.

        Numbers of samples and cells with enough subjects are public, so a server that repeatedly greets a site would
        see every new subject in a growing table. Under secure aggregation or an epsilon, after `MAX_CHANGES` changes
        the samples may therefore change once a day.

        Raises:
            ConfigError: the samples have changed although the agreement does not allow it, or too often.
        """
        before = self._memory.changed(self.trainer.samples)
        if before is None:
            return
        what = f"the samples of {self.site.site} differ from those at the start"
        if self.site.fixed_data:
            raise Refused(
                f"{what}, but with fixed_data the data must not change. Restore the data, or start a new experiment"
            )
        days, today = self._memory.list_change_days(), datetime.now(UTC).date().isoformat()
        is_secret = self.trainer.private or self.site.secure is not None
        if is_secret and len(days) >= MAX_CHANGES and today in days:
            raise Refused(
                f"{what}, for the second time today. Restore the data, or wait until tomorrow (UTC). In the next "
                "deployment, read a snapshot: fedloom deploy snapshot"
            )
        self._memory.note_samples(self.trainer.samples, [*days, today])
        if is_secret:
            self.trainer.log_privately(what)
        else:
            self._memory.notes.append(f"{what}. The run continues with the new samples")

    def _answer_envelope(self, envelope: Envelope) -> Answer:
        if envelope.head["kind"] == "hello":
            if day := check_snapshot(self.site):
                self._memory.notes.append(f"site {self.site.site} reads its snapshot of {day}")
            described = comparable_facts(self.trainer.fed.data)
            facts = {"sizes": self.sizes, "figures": self.figures}
            return described | facts, [], None
        if envelope.head["kind"] in MODEL_MESSAGES:
            with publish_reasons():
                self._asked.enter(envelope)
        return self.answers.answer(envelope)
