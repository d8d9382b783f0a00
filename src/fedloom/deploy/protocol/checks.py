"""Replies: everything that must hold of a reply before it counts; what does not pass is as if it had not come.

The steps, in order: 1 the message that it answers is known and open; 2 it is no error; 3 its records and fields are
those of its kind; 4 release, experiment, round, client, nonce, digest and signature; 5 the names of its arrays; 6 their
sizes and headers, before anything is allocated; 7 types and order of their numbers; 8 all are finite; 9 numbers of
samples; 10 metrics; 11 the length of the difference; 12 one per client; 13 the quorum. Steps 1, 12 and 13 are the
round's (`fedloom.deploy.server.sites`), the others are here; 5, 6 and 7 are the codec's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from flwr.app import ConfigRecord, Message
from torch import Tensor

from fedloom.algorithms._messages import base_of
from fedloom.data.input_spec import compared
from fedloom.deploy.protocol.envelope import (
    HEAD,
    HEAD_LIMIT,
    PROTOCOL,
    REASON,
    REPLIED,
    STATUS,
    Envelope,
    Kind,
    digest_of,
    unseal,
)
from fedloom.deploy.protocol.forms import Forms, Upload, score_names
from fedloom.deploy.protocol.identity import is_signed
from fedloom.deploy.settings import Server, bound_of
from fedloom.engine.chunk import usable
from fedloom.engine.job import Job
from fedloom.engine.scoring import COST
from fedloom.errors import FedloomError, WireError
from fedloom.metrics import metric
from fedloom.processes.clients import COUNTS
from fedloom.version import __version__

TINY = 1e-6
"""What a number may be off beside its relative error."""
MOST = 10**15
"""Largest count of work that is believed."""


class Rejected(FedloomError):
    """A reply that does not count.

    Args:
        step: of the list above.
        reason: a sentence.
    """

    def __init__(self, step: int, reason: str) -> None:
        self.step, self.reason = step, plain(reason)
        super().__init__(f"step {step}: {self.reason}")


class Pending(NamedTuple):
    """A message to a site, as long as its reply is awaited.

    Attributes:
        kind: of the message.
        round: of the run.
        client: number of the site; None in a greeting, which is to find it out.
        node: Flower's number of the node.
        nonce: of this message.
        down: what a client received, for the length of the difference.
        read: reads the array of a step of secure aggregation, which nobody else can judge.
        most: most bytes of the reply, all told.
    """

    kind: Kind
    round: int
    client: int | None
    node: int
    nonce: bytes
    down: Any = None
    read: Callable[[bytes], Any] | None = None
    most: int = 0


class Reply(NamedTuple):
    """A reply that counts.

    Attributes:
        client: number of the site.
        head: plain values.
        value: an upload (`Upload`), an answer ``[1, k]``, or None.
        metrics: numbers that were believed.
        norm: length of the difference of an upload.
        digest: SHA-256 of the arrays.
    """

    client: int
    head: dict[str, Any]
    value: Any
    metrics: dict[str, float]
    norm: float | None
    digest: str


class Checks:
    """Checks replies.

    Args:
        settings: of the server.
        job: the run; None before the sites have said what they hold.
        forms: of its messages.
        keys: of the sites, by client.
        sizes: ``[n, 3]`` samples that the sites declared.
    """

    def __init__(
        self,
        settings: Server,
        keys: dict[int, Ed25519PublicKey],
        job: Job | None = None,
        forms: Forms | None = None,
        sizes: Tensor | None = None,
    ) -> None:
        self._settings, self._keys, self._job, self._forms, self._sizes = settings, keys, job, forms, sizes

    def check(self, message: Message, asked: Pending) -> Reply:
        """The reply, if all holds.

        Raises:
            Rejected: what does not; no other error is possible.
        """
        try:
            return self._check(message, asked)
        except Rejected:
            raise
        except Exception as error:  # what nobody thought of counts as little as the rest
            raise Rejected(3, f"cannot be read ({type(error).__name__})") from error

    def longest(self, kind: Kind, array: int = 0) -> int:
        """Most bytes of a reply of a kind, of which the step of a session has so many in its array."""
        if kind in ("train", "ask"):
            assert self._forms is not None
            array = self._forms.longest
        head = HEAD_LIMIT + (4 * len(self._settings.samples.model_dump_json()) if kind == "hello" else 0)
        return min(array, self._settings.message_limit) + head

    def _check(self, message: Message, asked: Pending) -> Reply:
        if message.has_error():
            raise Rejected(2, f"error {message.error.code} of the node: {message.error.reason}")
        letter = self._read(message, asked)
        client = self._identify(letter, asked)
        if letter.head["status"] != "ok":
            raise Rejected(2, f"the site says: {letter.head['reason']}")
        if asked.kind == "hello":
            self._check_data(letter.head)
            return Reply(client, letter.head, None, {}, None, letter.head["digest"])
        value = self._value(letter, asked)
        if asked.read is not None:
            return Reply(client, letter.head, value, {}, None, letter.head["digest"])
        self._check_counts(letter.head, client)
        norm = self._norm(value, asked) if isinstance(value, Upload) else None
        return Reply(client, letter.head, value, self._metrics(letter), norm, letter.head["digest"])

    def _read(self, message: Message, asked: Pending) -> Envelope:
        """Step 3; another release is named before its other fields are looked at."""
        record = message.content.get(HEAD)
        release = record.get("release") if isinstance(record, ConfigRecord) else None
        if isinstance(release, str) and release != __version__:
            raise Rejected(4, f"the site runs fedloom {plain(release)[:30]}, the server {__version__}")
        try:
            return unseal(message.content, REPLIED, STATUS, asked.most, asked.most)
        except WireError as error:
            raise Rejected(3, str(error)) from None

    def _identify(self, letter: Envelope, asked: Pending) -> int:
        """Step 4."""
        head = letter.head
        wanted = {
            "protocol": PROTOCOL,
            "experiment": self._settings.fingerprint,
            "kind": asked.kind,
            "round": asked.round,
            "nonce": asked.nonce,
            "digest": digest_of(letter.arrays),
            **({} if asked.client is None else {"client": asked.client}),
        }
        for name, value in wanted.items():
            if head[name] != value:
                got, want = (v.hex() if isinstance(v, bytes) else v for v in (head[name], value))
                raise Rejected(4, f"{name} is {str(got)[:40]}, not {str(want)[:40]}")
        client: int = head["client"]
        if client not in self._keys:
            raise Rejected(4, f"no site has the number {client}")
        fields = {name: value for name, value in head.items() if name != "signature"} | {"metrics": letter.metrics}
        if not is_signed(self._keys[client], fields, head["signature"]):
            raise Rejected(4, f"not signed with the key of client {client}")
        return client

    def _check_data(self, head: dict[str, Any]) -> None:
        """What a site says of its data."""
        for name, want in compared(self._settings.samples).items():
            if (got := head[name]) != want:
                raise Rejected(3, f"{name} of the site's data is {str(got)[:200]}, that of the experiment {want}")
        sizes, limit = head["sizes"], self._settings.examples_limit
        if len(sizes) != 3 or not all(type(k) is int and 0 <= k <= limit for k in sizes):
            raise Rejected(9, f"numbers of samples must be three from 0 to {limit}, got {str(sizes)[:60]}")

    def _value(self, letter: Envelope, asked: Pending) -> Any:
        """Steps 5 to 8."""
        assert self._forms is not None
        count = 0 if asked.kind == "score" else 1
        if len(letter.arrays) != count:
            raise Rejected(5, f"{len(letter.arrays)} arrays, {count} are expected")
        if not count:
            return None
        try:
            read = asked.read or (self._forms.read_up if asked.kind == "train" else self._forms.read_answer)
            value: Any = read(letter.arrays[0])
        except WireError as error:
            raise Rejected(6, str(error)) from None
        if asked.read is not None:
            return value
        parts = (*value.up, value.info, value.told) if isinstance(value, Upload) else (value,)
        if not all(bool(torch.isfinite(part).all()) for part in parts if part is not None):
            raise Rejected(8, "NaN or infinite numbers in the arrays")
        return value

    def _check_counts(self, head: dict[str, Any], client: int) -> None:
        """Step 9."""
        assert self._sizes is not None
        declared = int(self._sizes[client, 0])
        if head["samples"] != declared:
            raise Rejected(9, f"{head['samples']} training samples, {declared} were declared at the start of the run")
        work = head.get("work", [0, 0, 0])
        if len(work) != 3 or not all(type(k) is int and 0 <= k <= MOST for k in work):
            raise Rejected(9, f"work must be three counts, got {str(work)[:60]}")

    def _metrics(self, letter: Envelope) -> dict[str, float]:
        """Step 10: what is not a metric of this run, not finite or out of its range is left out."""
        assert self._job is not None
        known = {"/".join(name) for name in score_names(self._job) if name[0] != "hybrid"}
        known |= {"/".join((*COST, name)) for name in COUNTS[:2]}
        found = {}
        for key, value in letter.metrics.items():
            name = key.rpartition("/")[2]
            low, high = metric(name).bounds
            if name == "loss" and self._job.oracle.task.own_loss is None:
                low = 0.0
            if key in known and math.isfinite(value) and low <= value <= high:
                found[key] = float(value)
        return found

    def _norm(self, sent: Upload, asked: Pending) -> float:
        """Step 11: the length of the upload, the model as a difference to what the client received."""
        assert self._job is not None
        norms = {name: float(length) for name, length in lengths(self._job, sent.up, asked.down).items()}
        for name, norm in norms.items():
            bound = bound_of(self._settings.norm_bound, name)
            if not (norm <= bound and math.isfinite(norm)):
                raise Rejected(11, f"the difference of {name} is {norm:.4g} long, at most {bound:.4g} is allowed")
        if not bool(usable((*sent.up,), 1, self._job.setting.engine.norm_bound).all()):
            raise Rejected(11, f"a field is longer than engine.norm_bound = {self._job.setting.engine.norm_bound}")
        if any(bool((weight < 0).any()) for weight in self._job.weights(sent.up)):
            raise Rejected(11, "a weight of the client's model is below zero")
        self._check_ranges(sent.up, asked)
        return math.hypot(*norms.values())

    def _check_ranges(self, up: Any, asked: Pending) -> None:
        """Step 11: what a client does not choose is what it must be; a channel changes it, so nothing is known then."""
        job = self._job
        assert job is not None
        if job.setting.channel is not None or not up:
            return
        work = job.work(asked.round, torch.tensor([asked.client]))
        for name, (low, high) in job.algorithm.ranges(asked.down, up, work).items():
            value, slack = float(getattr(up, name)), 1 + 1e-4
            low, high = float(low), float(high)
            if not low - TINY <= value * (slack if value >= 0 else 1 / slack) or not value <= high * slack + TINY:
                raise Rejected(11, f"{name} is {value:.4g}, it can be {low:.4g} to {high:.4g}")

    def model(self, sent: Upload, down: Any) -> Tensor | None:
        """The client's model, if the server's side looks at it."""
        job = self._job
        if job is None or not job.model_field:
            return None
        base = base_of(job.fields[job.model_field], down, None)
        model: Tensor = getattr(sent.up, job.model_field) + base
        return model


def lengths(job: Job, up: Any, down: Any) -> dict[str, Tensor]:
    """The lengths ``[m]`` of the fields of uploads, the model as a difference to what the client received.

    Fields of one number beside the model have ranges instead (`Algorithm.ranges`).
    """
    found = {}
    for name, field in up._asdict().items():
        kind = job.fields[name]
        if kind.primary or field.shape[1] > 1:
            whole = absolute(kind, field.shape[1], down[0].shape[-1])
            change = field - job.algorithm.received(down, up) if whole else field
            found[name] = change.double().square().sum(1).sqrt()
    return found


def absolute(kind: Any, width: int, received: int) -> bool:
    """Whether a field of an upload is the model itself, whose difference to the ``received`` numbers is bounded."""
    return bool(kind.primary and kind.base == "zero" and width == received)


def plain(text: str) -> str:
    """A sentence from elsewhere that is safe to print and to log."""
    return re.sub(r"[^\x20-\x7e]+", " ", str(text))[:REASON]
