"""Retrieval of replies from Flower's server, object by object, up to a size limit for each kind of reply.

Failed calls are retried for some time.

Flower sends identical parts of a message only once, and inserts each as often as the message specifies. While the
objects arrive, the bytes of each object are therefore counted as often as the message contains it. A reply that exceeds
its limit is abandoned immediately.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from flwr.app import Error, Message, Metadata
from flwr.serverapp import Grid

from fedloom.errors import FedloomError, RunStopped, Stop
from fedloom_sites.deploy.protocol.rejected import make_printable
from fedloom_sites.flwr_adapter import (
    SYSTEM_MESSAGE_TYPE,
    ConfirmMessageReceivedRequest,
    ErrorCode,
    ObjectPullError,
    PullAppMessagesRequest,
    get_connection,
    inflate_object_from_contents,
    iterate_object_tree,
    make_message,
    make_pull_object_fn_protobuf,
    now,
    pull_objects,
    set_message_id,
)

T = TypeVar("T")

POLL_SECONDS = 0.2
"""Time in seconds between two checks for replies."""
MAX_RETRY_SECONDS = 30.0
"""Maximum time in seconds between two attempts to reach Flower's server when it does not answer."""


class ReplyTooLong(FedloomError):
    """Error: a reply claims more bytes than its kind allows."""


def pull_replies(grid: Grid, limits: Mapping[str, int]) -> list[Message]:
    """Return the replies that have arrived. If a reply is too long or incomplete, an error is returned in its place.

    Args:
        grid: Flower's grid.
        limits: maximum number of bytes in a reply, keyed by the ID of the message that it answers.
    """
    client = get_connection(grid)
    if client is None:  # without a network, the replies are already in memory
        return list(grid.pull_messages([*limits]))
    node, run_id = cast(Any, grid).node, grid.run.run_id
    fetch = make_pull_object_fn_protobuf(pull_object_protobuf=client.PullObject, node=node, run_id=run_id)
    answer = client.PullMessages(PullAppMessagesRequest(message_ids=[*limits]))
    replies = []
    for header, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
        id_, request_id = header.metadata.message_id, header.metadata.reply_to_message_id
        try:
            replies.append(_reassemble_reply(id_, tree, fetch, limits.get(request_id, 0)))
        except (ReplyTooLong, ObjectPullError) as error:
            replies.append(_error_reply(run_id, node.node_id, request_id, str(error)))
        client.ConfirmMessageReceived(ConfirmMessageReceivedRequest(node=node, run_id=run_id, message_object_id=id_))
    return replies


def _reassemble_reply(id_: str, tree: Any, fetch: Callable[[str], bytes], limit: int) -> Message:
    """Reassemble a reply from its objects, and return it.

    Raises:
        ReplyTooLong: the reply has more bytes than the limit.
        ObjectPullError: a part has not arrived.
    """
    times = Counter(part.object_id for part in iterate_object_tree(tree))
    total, counting = 0, threading.Lock()

    def counted(part: str) -> bytes:
        nonlocal total
        content = fetch(part)
        with counting:
            total += times[part] * len(content)
            if total > limit:
                raise ReplyTooLong(f"the reply has more than {total} bytes, but at most {limit} are allowed")
        return content

    message = inflate_object_from_contents(id_, pull_objects([*times], counted))
    assert isinstance(message, Message)
    set_message_id(message, id_)
    return message


def _error_reply(run_id: int, node: int, request_id: str, reason: str) -> Message:
    metadata = Metadata(
        run_id=run_id, message_id="", src_node_id=node, dst_node_id=node, message_type=SYSTEM_MESSAGE_TYPE, group_id="",
        ttl=0, reply_to_message_id=request_id, created_at=now().timestamp(),
    )  # fmt: skip
    return make_message(metadata=metadata, error=Error(code=ErrorCode.MESSAGE_UNAVAILABLE, reason=reason))


def call_with_retry(call: Callable[[], Iterable[T]], seconds: float) -> list[T]:
    """Call Flower's server, and return its answer.

    If the server does not answer, the call is retried for ``seconds`` seconds.

    Raises:
        RunStopped: the server does not answer.
    """
    end, pause = time.monotonic() + seconds, POLL_SECONDS
    while True:
        try:
            return list(call())
        except FedloomError:
            raise
        except Exception as error:
            if time.monotonic() > end:
                raise RunStopped(
                    Stop.TOO_FEW, f"Flower's server does not answer: {make_printable(str(error))}"
                ) from error
            time.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_SECONDS)
