"""Checks of a site's reply. A reply that fails a check is discarded and logged, and has no other effect.

`ReplyChecks.STEPS` lists the checks in order, with the number of each check in the audit log. The codec checks the
names, sizes and headers of arrays, and the types and order of their numbers (5 to 7) before any memory is allocated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from flwr.app import ConfigRecord, Message
from torch import Tensor

from fedloom.data.input_spec import comparable_facts
from fedloom.engine.clients.chunk import usable_uploads_mask
from fedloom.engine.clients.scores import WORK_KEY
from fedloom.engine.job import Job
from fedloom.errors import RunStopped, Stop, WireError
from fedloom.metrics import metric
from fedloom.processes.clients import CLIENT_COUNTS
from fedloom.version import __version__
from fedloom_sites.deploy.protocol.envelope import (
    HEAD_LIMIT,
    HEAD_RECORD,
    MAX_FLAG_DIGITS,
    PROTOCOL_VERSION,
    REPLY_FIELDS,
    STATUS_FIELDS,
    UNABLE_STATUS,
    UNUSABLE_STATUS,
    Envelope,
    Kind,
    PendingRequest,
    ValidReply,
    digest_arrays,
    unseal_message,
)
from fedloom_sites.deploy.protocol.identity import is_signed
from fedloom_sites.deploy.protocol.lengths import upload_norms, values_out_of_range
from fedloom_sites.deploy.protocol.rejected import (
    GROWTH_HINT,
    LateReply,
    RejectedReply,
    UnableReply,
    UnusableUpload,
    make_printable,
)
from fedloom_sites.deploy.settings import Server, get_norm_bound
from fedloom_sites.transport.forms import Forms, Upload, score_names

MAX_WORK_COUNT = 10**15
"""Maximum plausible amount of work."""
WRAPPED_ERROR_PATTERN = r"\A\s*<class '[\w.]+'>:<(['\"])(.*)\1>\s*\Z"
"""Pattern of the text that Flower puts around an error from a site's process."""


class _ReplyDraft(NamedTuple):
    """A reply that is being checked: the message, its request, and all parts that have passed so far."""

    message: Message
    pending: PendingRequest
    is_late: bool = False
    answered: Collection[int] = ()
    envelope: Envelope = Envelope({}, [], {})
    value: Any = None
    metrics: Mapping[str, float] = MappingProxyType({})
    norm: float | None = None

    @property
    def head(self) -> dict[str, Any]:
        return self.envelope.head

    @property
    def is_round(self) -> bool:
        """True if the reply belongs to a round, rather than to a greeting or a step of a secure session."""
        return self.pending.kind != "hello" and self.pending.read is None


class ReplyChecks:
    """Checks that the server applies to replies.

    Args:
        settings: the server's settings.
        job: run. None until the sites have sent their sizes.
        forms: formats of the run's messages.
        keys: keys of the sites, keyed by client.
        sizes: numbers of samples declared by the sites ``[n, 3]``.
        names: names of the numbers that arrive in addition to the scores of the last round.

    Attributes:
        STEPS: number, condition and function of each check in order, except the quorum (13), which is a check of a
            round.
    """

    def __init__(
        self,
        settings: Server,
        keys: dict[int, Ed25519PublicKey],
        job: Job | None = None,
        forms: Forms | None = None,
        sizes: Tensor | None = None,
        names: Collection[str] = (),
    ) -> None:
        self._names = names
        self._settings, self._keys, self._job, self._forms, self._sizes = settings, keys, job, forms, sizes

    def check(
        self, message: Message, pending: PendingRequest | None, *, is_late: bool = False, answered: Collection[int] = ()
    ) -> ValidReply:
        """Check a message, and return the reply that it contains.

        Args:
            message: message from a node.
            pending: message that the reply answers. None if no open message matches.
            is_late: True if the server is no longer waiting for a reply to this message.
            answered: clients whose reply has already been accepted.

        Raises:
            LateReply: the reply is valid, but late.
            RejectedReply: a check has failed. The message describes the failure. No other errors are possible.
        """
        if pending is None:
            raise RejectedReply(1, "the reply does not answer an open message")
        draft = _ReplyDraft(message, pending, is_late, answered)
        try:
            for _, _, step in self.STEPS:
                draft = step(self, draft)
        except RejectedReply:
            raise
        except Exception as error:  # a reply must never stop the server
            raise RejectedReply(3, f"the reply cannot be read ({type(error).__name__})") from error
        head = draft.head
        return ValidReply(head["client"], head, draft.value, dict(draft.metrics), draft.norm, head["digest"])

    def longest(self, kind: Kind, array: int = 0) -> int:
        """Return the maximum number of bytes in a reply of a kind, including the array of a session's step."""
        if kind in ("train", "ask"):
            assert self._forms is not None
            array = self._forms.longest
        head = HEAD_LIMIT + (4 * len(self._settings.samples.model_dump_json()) if kind == "hello" else 0)
        return min(array, self._settings.message_limit) + head

    @staticmethod
    def quorum(round: int, count: int, wanted: int, need: int, rejected: int = 0) -> None:
        """Raise an error if too few replies are accepted in a round (step 13).

        Sites whose replies were ``rejected`` send the same replies again, so a further start alone changes nothing.

        Raises:
            RunStopped: too few replies are accepted. The state from before the round is kept.
        """
        if count < need:
            cure = f"Rejected answers: {rejected}. Fix the causes, which are in the audit log, then run"
            raise RunStopped(
                Stop.TOO_FEW,
                f"round {round}: only {count} of {wanted} sites sent a usable answer, but the quorum is {need}. The "
                f"state before the round is saved. {cure if rejected else 'Run'} the command again to continue",
            )

    def _check_no_error(self, draft: _ReplyDraft) -> _ReplyDraft:
        if draft.message.has_error():
            error = draft.message.error
            sentence = re.sub(WRAPPED_ERROR_PATTERN, r"\2", str(error.reason), flags=re.DOTALL)
            raise RejectedReply(2, f"error {error.code} from the node: {sentence}")
        return draft

    def _read_envelope(self, draft: _ReplyDraft) -> _ReplyDraft:
        """Check the envelope of a reply (step 3), and return the reply with its contents.

        A different release is reported before the other fields are checked.
        """
        content, most = draft.message.content, draft.pending.max_reply_bytes
        record = content.get(HEAD_RECORD)
        release = record.get("release") if isinstance(record, ConfigRecord) else None
        if isinstance(release, str) and release != __version__:
            raise RejectedReply(
                4, f"the site runs fedloom {make_printable(release)[:30]}, but the server runs {__version__}"
            )
        try:
            return draft._replace(envelope=unseal_message(content, REPLY_FIELDS, STATUS_FIELDS, most, most))
        except WireError as error:
            raise RejectedReply(3, str(error)) from None

    def _check_identity(self, draft: _ReplyDraft) -> _ReplyDraft:
        head, pending = draft.head, draft.pending
        wanted = {
            "protocol": PROTOCOL_VERSION,
            "experiment": self._settings.fingerprint,
            "kind": pending.kind,
            "round": pending.round,
            "nonce": pending.nonce,
            "digest": digest_arrays(draft.envelope.arrays),
            **({} if pending.client is None else {"client": pending.client}),
        }
        for name, value in wanted.items():
            if head[name] != value:
                got, want = (v.hex() if isinstance(v, bytes) else v for v in (head[name], value))
                hint = (
                    ". The site has a different agreement, or has not approved this one" if name == "experiment" else ""
                )
                raise RejectedReply(4, f"{name} is {str(got)[:40]}, not {str(want)[:40]}{hint}")
        client: int = head["client"]
        if client not in self._keys:
            raise RejectedReply(4, f"no site has number {client}")
        fields = {name: value for name, value in head.items() if name != "signature"}
        fields |= {"metrics": draft.envelope.metrics}
        if not is_signed(self._keys[client], fields, head["signature"]):
            raise RejectedReply(4, f"the signature was not made with the key of client {client}")
        return draft

    def _check_not_rejected(self, draft: _ReplyDraft) -> _ReplyDraft:
        if draft.head["status"] == UNABLE_STATUS:
            raise UnableReply(draft.head["reason"])
        if draft.head["status"] != "ok":
            rejected = UnusableUpload if draft.head["status"] == UNUSABLE_STATUS else RejectedReply
            raise rejected(2, f"the site rejected the message: {draft.head['reason']}")
        return draft

    def _check_greeting(self, draft: _ReplyDraft) -> _ReplyDraft:
        if draft.pending.kind == "hello":
            self.check_data(draft.head)
        return draft

    def check_data(self, head: dict[str, Any]) -> None:
        """Check a site's description of its data in its reply to a greeting.

        Raises:
            RejectedReply: the data do not match the experiment, or are larger than a site may claim.
        """
        for name, want in comparable_facts(self._settings.samples).items():
            if (got := head[name]) != want:
                raise RejectedReply(3, f"{name} of the site's data is {str(got)[:200]}, but the experiment has {want}")
        sizes, limit = head["sizes"], self._settings.examples_limit
        if len(sizes) != 3 or not all(type(k) is int and 0 <= k <= limit for k in sizes):
            raise RejectedReply(9, f"the sample counts must be three numbers from 0 to {limit}, got {str(sizes)[:60]}")
        if not re.fullmatch(rf"[0-9a-f]{{0,{MAX_FLAG_DIGITS}}}", head["figures"]):
            raise RejectedReply(9, f"figures must be hexadecimal digits, got {head['figures'][:60]!r}")

    def _decode_arrays(self, draft: _ReplyDraft) -> _ReplyDraft:
        pending, arrays = draft.pending, draft.envelope.arrays
        if pending.kind == "hello":
            return draft
        assert self._forms is not None
        count = 0 if pending.kind in ("score", "result") else 1
        if len(arrays) != count:
            raise RejectedReply(5, f"expected {count} arrays, got {len(arrays)}")
        if not count:
            return draft
        upload = partial(self._forms.read_up, client=draft.head["client"], down=pending.down)
        read = pending.read or (upload if pending.kind == "train" else self._forms.read_answer)
        try:
            return draft._replace(value=read(arrays[0]))
        except WireError as error:
            raise RejectedReply(6, str(error)) from None

    def _check_finite(self, draft: _ReplyDraft) -> _ReplyDraft:
        value = draft.value
        if draft.is_round and value is not None:
            parts = (*value.up, value.info, value.sampler_report) if isinstance(value, Upload) else (value,)
            if not all(bool(torch.isfinite(part).all()) for part in parts if part is not None):
                raise UnusableUpload(8, "the arrays contain NaN or infinite values")
        return draft

    def _check_counts(self, draft: _ReplyDraft) -> _ReplyDraft:
        if not draft.is_round:
            return draft
        assert self._sizes is not None
        head, declared = draft.head, int(self._sizes[draft.head["client"], 0])
        if head["samples"] != declared:
            raise RejectedReply(
                9,
                f"the site reports {head['samples']} training samples, but declared {declared} at the start of the "
                f"run. {GROWTH_HINT}",
            )
        work = head.get("work", [0, 0, 0])
        if len(work) != 3 or not all(type(k) is int and 0 <= k <= MAX_WORK_COUNT for k in work):
            raise RejectedReply(9, f"work must be three counts, got {str(work)[:60]}")
        return draft

    def _keep_valid_metrics(self, draft: _ReplyDraft) -> _ReplyDraft:
        """Remove values that are non-finite, out of range or not metrics, and return the reply (step 10)."""
        if not draft.is_round:
            return draft
        assert self._job is not None
        names = {"/".join(name) for name in score_names(self._job) if name[0] != "hybrid"}
        names |= {"/".join((*WORK_KEY, name)) for name in CLIENT_COUNTS[:2]} | {*self._names}
        metrics = {}
        for key, number in draft.envelope.metrics.items():
            name = re.split("[/:]", key)[-1]
            low, high = metric(name).bounds
            if name == "loss" and self._job.oracle.task.own_loss is None:
                low = 0.0
            if key in names and math.isfinite(number) and low <= number <= high:
                metrics[key] = float(number)
        return draft._replace(metrics=metrics)

    def _check_norms(self, draft: _ReplyDraft) -> _ReplyDraft:
        """Check the norms of the upload's fields, with the model as its difference from the download (step 11)."""
        if not isinstance(draft.value, Upload):
            return draft
        job, up, pending = self._job, draft.value.up, draft.pending
        assert job is not None
        norms = {name: float(length) for name, length in upload_norms(job, up, pending.down).items()}
        for name, norm in norms.items():
            bound = get_norm_bound(self._settings.norm_bound, name)
            if not (norm <= bound and math.isfinite(norm)):
                raise RejectedReply(
                    11, f"the norm of the difference in {name} is {norm:.4g}, but at most {bound:.4g} is allowed"
                )
        if not bool(usable_uploads_mask((*up,), 1, job.setting.engine.norm_bound).all()):
            raise UnusableUpload(11, f"the norm of a field exceeds engine.norm_bound = {job.setting.engine.norm_bound}")
        if any(bool((weight < 0).any()) for weight in job.weights(up)):
            raise RejectedReply(11, "the client's model has a negative weight")
        self._check_ranges(up, pending)
        return draft._replace(norm=math.hypot(*norms.values()))

    def _check_ranges(self, up: object, pending: PendingRequest) -> None:
        """Check that numbers that a client cannot choose freely are within their ranges (step 11).

        If a channel changes the upload, the ranges are unknown, so nothing is checked.
        """
        job = self._job
        assert job is not None
        if job.setting.upload_transform is not None or not up:
            return
        work = job.work(pending.round, torch.tensor([pending.client]))
        for name, number, low, high in values_out_of_range(up, job.algorithm.ranges(pending.down, up, work)):
            raise RejectedReply(11, f"{name} is {number:.4g}, but must be from {low:.4g} to {high:.4g}")

    def _check_time(self, draft: _ReplyDraft) -> _ReplyDraft:
        if draft.is_late and draft.pending.kind != "hello":
            raise LateReply
        return draft

    def _reject_repeated(self, draft: _ReplyDraft) -> _ReplyDraft:
        client = draft.head["client"]
        if not draft.is_late and client in draft.answered:
            raise RejectedReply(12, f"client {client} has already answered")
        return draft

    STEPS: ClassVar[
        Sequence[tuple[int, str, Callable[[ReplyChecks, _ReplyDraft], _ReplyDraft]]]
    ] = (  # 1: `check` itself, the message that it answers is known
        (2, "no error of the node", _check_no_error),
        (3, "records, fields and bytes of its kind", _read_envelope),
        (4, "release, experiment, kind, round, nonce, client, digest and signature", _check_identity),
        (2, "no rejection by the site", _check_not_rejected),
        (9, "in a greeting, the experiment's columns and possible numbers of samples", _check_greeting),
        (5, "number, names, sizes, headers, types and order of the arrays (5 to 7)", _decode_arrays),
        (8, "finite numbers", _check_finite),
        (9, "the declared number of samples, and possible counts of work", _check_counts),
        (10, "metrics of the run, within their bounds", _keep_valid_metrics),
        (11, "the length of the difference, and the range of every number of a field", _check_norms),
        (1, "in time", _check_time),
        (12, "one reply of a client", _reject_repeated),
    )
