"""Envelope: a Flower message with a head of plain values, and with arrays that are messages of `fedloom.rows.wire`.

In both directions, the head contains protocol, release, experiment, kind, round and client, the nonce, and the SHA-256
of the arrays. A reply also contains a signature over all of these fields. Nothing in a message is ever unpickled: the
arrays are bytes that the codec decodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedloom.errors import WireError
from fedloom.version import __version__
from fedloom_sites.deploy.protocol.identity import new_nonce

PROTOCOL_VERSION = 13
Kind = Literal[
    "hello", "ask", "train", "score", "analysis", "result", "keys", "shares", "masked", "tally", "open", "agree",
    "count", "unmask", "relay",
]  # fmt: skip
MESSAGE_TYPES: dict[Kind, str] = {
    "hello": "query", "ask": "query", "train": "train", "score": "evaluate",
    "analysis": "query", "result": "query",
    "keys": "query", "shares": "query", "masked": "train", "tally": "evaluate", "open": "query", "agree": "query",
    "count": "query", "unmask": "query", "relay": "query",
}  # fmt: skip
"""Flower's message types."""

MAX_FLAG_DIGITS = 9000
"""Maximum number of hexadecimal digits in a site's list of metrics, groups and cells.

The limit for a field of a head is 10,000 characters.
"""
MAX_FIGURES = 5000
"""Maximum number of values in a message: metrics for every class, part and model."""
MAX_ARRAYS = 5
"""Maximum number of arrays in one message."""
HEAD_LIMIT = 1 << 20
"""Maximum number of bytes in a message's head."""
HEAD_RECORD, ARRAYS_RECORD, METRICS_RECORD = "head", "arrays", "metrics"
ARRAY_STYPE, ARRAY_DTYPE = "fedloom.wire", "uint8"

COMMON_FIELDS = {
    "protocol": int, "release": str, "experiment": str, "kind": str, "round": int, "client": int, "nonce": bytes,
    "digest": str,
}  # fmt: skip
REQUEST_FIELDS: Mapping[str, Mapping[str, type]] = {
    "hello": {},
    "ask": {},
    "train": {"accepted": int, "weight": float, "scored": int, "global": bool},
    "score": {"accepted": int, "weight": float, "global": bool},
    "analysis": {"accepted": int},
    "result": {},
    "keys": {"session": bytes},
    "shares": {"session": bytes},
    "masked": {"session": bytes, "accepted": int},
    "tally": {"session": bytes, "accepted": int},
    "open": {"session": bytes},
    "agree": {"session": bytes},
    "count": {"session": bytes},
    "unmask": {"session": bytes},
    "relay": {"session": bytes},
}
"""Additional fields of a message from the server.

``weight`` is alpha_i. ``scored`` is the round whose models are scored first, or -1 if there is none.
"""

SESSION_STEPS: tuple[Kind, ...] = ("keys", "shares", "masked", "tally", "open", "agree", "count", "unmask")
"""Kinds of messages of secure aggregation, in sending order.

A session contains ``masked``, or ``tally`` if only scores are summed. A session contains ``open`` if a site is accused,
``agree`` if a site is lost, and ``count`` if sites send counters before their sum is opened.
"""

REPLY_FIELDS: Mapping[str, Mapping[str, type]] = {
    "hello": {
        "task": str,
        "shape": list,
        "outputs": int,
        "classes": list,
        "vocabulary": list,
        "each": bool,
        "sizes": list,
        "figures": str,
    },
    "ask": {"samples": int, "work": list},
    "train": {"samples": int, "work": list},
    "score": {"samples": int},
    "analysis": {},
    "result": {"samples": int},
    **{step: {} for step in (*SESSION_STEPS, "relay")},
}
"""Additional fields of a site's reply."""

STATUS_FIELDS = {"status": str, "reason": str, "signature": bytes}
"""Additional fields of every reply."""

UNABLE_STATUS = "unable"
"""Status of a reply from a site that could not write to its disk, so that the server may send the message again."""

UNUSABLE_STATUS = "unusable"
"""Status of a reply from a site whose upload is not finite or exceeds a bound of the experiment."""

MAX_REASON_CHARACTERS = 500
"""Maximum length of a reason, in characters."""


class Envelope(NamedTuple):
    """Contents of an envelope.

    Attributes:
        head: plain values.
        arrays: encoded messages for the codec.
        metrics: values keyed by name.
    """

    head: dict[str, Any]
    arrays: list[bytes]
    metrics: dict[str, float]


class SiteRequest(NamedTuple):
    """Message to one node.

    Attributes:
        kind: kind of the message.
        client: number of the site. None if the message is a greeting, which asks for this number.
        arrays: encoded messages for the codec.
        extra_fields: additional fields of the header.
        down: message that the client receives, used to compute the norm of the difference.
        node: Flower's number for the node. The number is set when the message is sent.
        round: round of the message, if it differs from the round of the other messages sent with it.
        read, most: see `PendingRequest`.
    """

    kind: Kind
    client: int | None
    arrays: Sequence[bytes] = ()
    extra_fields: Mapping[str, Any] | None = None
    down: Any = None
    node: int = 0
    round: int | None = None
    read: Callable[[bytes], Any] | None = None
    max_reply_bytes: int = 0


class PendingRequest(NamedTuple):
    """Message that was sent to a site and whose reply has not yet arrived.

    Attributes:
        kind: kind of the message.
        round: round of the run.
        client: number of the site. None if the message is a greeting, which asks for this number.
        node: Flower's number for the node.
        nonce: nonce of this message.
        down: message that the client received, for computing the norm of the difference.
        read: function, provided by the caller, that decodes and checks the array of a step of secure aggregation.
        max_reply_bytes: maximum number of bytes in the entire reply.
    """

    kind: Kind
    round: int
    client: int | None
    node: int
    nonce: bytes
    down: Any = None
    read: Callable[[bytes], Any] | None = None
    max_reply_bytes: int = 0


class ValidReply(NamedTuple):
    """Valid reply.

    Attributes:
        client: number of the site.
        head: plain values.
        value: an upload (`Upload`), an answer ``[1, k]``, or None.
        metrics: accepted numbers.
        norm: norm of the difference between an upload and its download.
        digest: SHA-256 of the arrays.
    """

    client: int
    head: dict[str, Any]
    value: Any
    metrics: dict[str, float]
    norm: float | None
    digest: str


def digest_arrays(arrays: Sequence[bytes]) -> str:
    """Return the SHA-256 of the arrays, each preceded by its length, as hexadecimal digits."""
    digest = hashlib.sha256()
    for part in arrays:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def seal_message(
    head: Mapping[str, Any], arrays: Sequence[bytes] = (), metrics: Mapping[str, float] | None = None
) -> RecordDict:
    """Build the records of a message."""
    records: dict[str, Any] = {HEAD_RECORD: ConfigRecord(dict(head)), ARRAYS_RECORD: pack_arrays(arrays)}
    if metrics is not None:
        records[METRICS_RECORD] = MetricRecord(dict(metrics))
    return RecordDict(records)


def pack_arrays(arrays: Sequence[bytes]) -> ArrayRecord:
    """Pack encoded messages for the codec into a record."""
    packed = {
        f"{k}": Array(dtype=ARRAY_DTYPE, shape=(len(part),), stype=ARRAY_STYPE, data=bytes(part))
        for k, part in enumerate(arrays)
    }
    return ArrayRecord(array_dict=packed)


def common_head(experiment: str, kind: str, round: int, client: int, nonce: bytes, digest: str) -> dict[str, Any]:
    """Return the fields that every message and every reply contain (see `COMMON_FIELDS`)."""
    return dict(
        zip(COMMON_FIELDS, (PROTOCOL_VERSION, __version__, experiment, kind, round, client, nonce, digest), strict=True)
    )


def make_message(request: SiteRequest, round: int, experiment: str, ttl: float) -> tuple[Message, PendingRequest]:
    """Return a Flower message to a site with a fresh nonce, and the entry to keep until the reply arrives."""
    nonce, round = new_nonce(), round if request.round is None else request.round
    client = -1 if request.client is None else request.client
    head = common_head(experiment, request.kind, round, client, nonce, digest_arrays(request.arrays))
    records, kind = seal_message({**head, **(request.extra_fields or {})}, request.arrays), MESSAGE_TYPES[request.kind]
    message = Message(records, dst_node_id=request.node, message_type=kind, ttl=ttl, group_id=str(round))
    down, read, most = request.down, request.read, request.max_reply_bytes
    return message, PendingRequest(request.kind, round, request.client, request.node, nonce, down, read, most)


def unseal_message(
    content: RecordDict,
    fields: Mapping[str, Mapping[str, type]],
    status: Mapping[str, type],
    limit: int,
    head_limit: int = HEAD_LIMIT,
) -> Envelope:
    """Check the fields of a message, and return its content. No array is parsed for this.

    Args:
        content: content of any message.
        fields: additional fields of the message's header, keyed by kind.
        status: fields of the head in addition to the common fields.
        limit: maximum number of bytes in the arrays.
        head_limit: maximum number of bytes in the message's head.

    Raises:
        WireError: records, fields, types or sizes are not as expected. No other errors are possible.
    """
    head, arrays = content.get(HEAD_RECORD), content.get(ARRAYS_RECORD)
    names = {HEAD_RECORD, ARRAYS_RECORD} | ({METRICS_RECORD} if METRICS_RECORD in content else set())
    if set(content) != names or not isinstance(head, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise WireError(
            f"records must be {HEAD_RECORD} and {ARRAYS_RECORD}, got {sorted(map(_short_repr, content))[:8]}"
        )
    size = sum(len(name) + _head_value_bytes(value) for name, value in head.items())
    if size > head_limit:
        raise WireError(f"the header has {size} bytes, but at most {head_limit} are allowed")
    return Envelope(_check_head(head, fields, status), unpack_arrays(arrays, limit), _check_metrics(content))


def _check_head(
    record: ConfigRecord, fields: Mapping[str, Mapping[str, type]], status: Mapping[str, type]
) -> dict[str, Any]:
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in fields:
        raise WireError(f"unknown kind of message {_short_repr(kind)}")
    wanted = {**COMMON_FIELDS, **status}
    refusal = "status" in wanted and record.get("status") != "ok"
    wanted |= {} if refusal else fields[kind]
    if set(record) != set(wanted):
        raise WireError(
            f"the header must have the fields {sorted(wanted)}, got {sorted(map(_short_repr, record))[:30]}"
        )
    for name, value in record.items():
        if type(value) is not wanted[name]:
            raise WireError(f"{name} must be of type {wanted[name].__name__}, got {_short_repr(value)}")
        if isinstance(value, str | bytes) and len(value) > 10_000:
            raise WireError(f"{name} is too long ({len(value)} characters)")
    return dict(record)


def unpack_arrays(record: ArrayRecord, limit: float) -> list[bytes]:
    """Return the encoded messages that a record contains for the codec. No message is parsed for this.

    Args:
        record: record of any message.
        limit: maximum number of bytes in the messages.

    Raises:
        WireError: names, types or sizes are not as expected.
    """
    if len(record) > MAX_ARRAYS or list(record) != [f"{k}" for k in range(len(record))]:
        raise WireError(
            f"arrays must be named 0 to {MAX_ARRAYS - 1}, got {[_short_repr(name) for name in list(record)[:8]]}"
        )
    total = sum(len(array.data) for array in record.values())
    if total > limit:
        raise WireError(f"the arrays have {total} bytes, but at most {limit} are allowed")
    for name, array in record.items():
        got = (array.stype, array.dtype, tuple(array.shape))
        if got != (ARRAY_STYPE, ARRAY_DTYPE, (len(array.data),)):
            raise WireError(
                f"array {name} must be {ARRAY_STYPE} {ARRAY_DTYPE} [{len(array.data)}], got {_short_repr(got)}"
            )
    return [array.data for array in record.values()]


def _check_metrics(content: RecordDict) -> dict[str, float]:
    """Return at most `MAX_FIGURES` values, keyed by names of limited length.

    Any values except lists are allowed.
    """
    record = content.get(METRICS_RECORD)
    if record is None:
        return {}
    if not isinstance(record, MetricRecord) or len(record) > MAX_FIGURES:
        raise WireError(f"{METRICS_RECORD} must contain at most {MAX_FIGURES} numbers")
    for name, value in record.items():
        if len(name) > 100 or isinstance(value, list):
            raise WireError(
                f"{METRICS_RECORD} must contain only single numbers with short names, got {_short_repr(name)}"
            )
    return dict(record)  # type: ignore[arg-type]  # lists were refused


def _head_value_bytes(value: object) -> int:
    """Return the size in bytes of a value in a header, with one byte for each character."""
    if isinstance(value, list):
        return sum(map(_head_value_bytes, value)) + len(value)
    return len(value) if isinstance(value, str | bytes) else 8


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
