"""Nodes that speak Flower's own protocol from this process: they answer, and forge, over a real TLS connection."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import Any

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_connection import http_request_response

from fedloom_sites.deploy.settings import Site


class WireNode:
    """A node's connection; see `connected`."""

    def __init__(self, calls: tuple[Any, ...]) -> None:
        self.number = calls[0]
        self._receive, self._send, _, _, self._pull, self._send_requests, self._confirm = calls[1:]

    def receive(self) -> Message | None:
        """The next message for this node, if there is one."""
        got = self._receive()
        if got is None:
            return None
        bare, tree = got
        run = bare.metadata.run_id
        message = pull_and_inflate_object_from_tree(
            tree, lambda i: self._pull(run, i), lambda i: self._confirm(run, i), return_type=Message
        )
        message.metadata.__dict__["_message_id"] = tree.object_id
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, self.number, 1
        return message

    def send(self, reply: Message) -> bool:
        """Post a reply, in whose name ever; whether the server took it."""
        reply.metadata.__dict__["_message_id"] = ""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        tree, run = get_object_tree(reply), reply.metadata.run_id
        objects = get_all_nested_objects(reply)
        wanted, session = self._send(reply, tree, 0.0)
        with suppress(ObjectPushError):  # the server may refuse what is announced while the content still arrives
            push_objects(objects, lambda i, data: self._send_requests(run, session, i, data), object_ids_to_push=wanted)
        return bool(wanted)


@contextmanager
def connected(site: Site, address: str) -> Any:
    """A node with a site's key."""
    key = load_ssh_private_key(site.node_key.read_bytes(), None)
    ca = site.ca.read_bytes()
    error = None
    with http_request_response(address, False, ca, (key, key.public_key()), max_retries=3) as calls:
        try:
            yield WireNode(calls)
        except Exception as raised:
            error = raised
    if error is not None:  # Flower's context would write it to a log and go on
        raise error
