"""Nodes of an existing Flower app, used as the clients of a round."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from logging import WARNING
from typing import Any, TypeVar

import torch
from flwr.app import Message, MetricRecord, RecordDict
from torch import Tensor

from fedloom.engine.clients.chunk import ClientOutput
from fedloom.engine.clients.remote import RemoteClients
from fedloom.engine.job import Job
from fedloom.errors import FedloomError, WireError, escape_line
from fedloom.processes.clients import AskRequest, ScoreRequest, TrainRequest, TrainResult
from fedloom_sites.deploy.protocol.envelope import ARRAYS_RECORD, pack_arrays
from fedloom_sites.flower.records import VALUES_RECORD, head_of, log, make_array_record, read_messages, write_values
from fedloom_sites.flwr_adapter import ErrorCode
from fedloom_sites.transport.forms import Forms, make_output
from fedloom_sites.transport.roll import NodeRegister

T = TypeVar("T")

Send = Callable[[Iterable[Message]], Iterable[Message]]
"""Function that sends messages and returns the replies that arrive in time, in any order."""


class FlowerClients(RemoteClients):
    """Nodes of an app, represented as clients (see `RemoteClients`).

    Args:
        job: the run, as set up at the server.
        forms: formats of the run's messages.
        roll: registry of the clients and their nodes.
        run: name of the run at the nodes. If the run cannot be resumed, the name is empty.
        document: JSON text with the method and the choices of the run.
        parameters: names and shapes of the model's parameters.
        send: function that sends messages to the nodes.

    Attributes:
        roll: registry of the clients and their nodes.
        scores: metrics of every client that answered the latest evaluation.
        refusals: reason why each client refused the latest request. Clients that did not answer, or that have lost
            their state, are not included.
        uploaded: clients whose latest upload could be read. It may contain numbers that are not finite.
    """

    def __init__(
        self, job: Job, forms: Forms, roll: NodeRegister, run: str, document: str, parameters: str, send: Send
    ) -> None:
        super().__init__(job, roll.sizes)
        self.roll, self._forms, self._send = roll, forms, send
        self._shared: dict[str, Any] = {
            "document": document, "parameters": parameters, "rounds": job.setting.rounds,
            "sizes": job.train_sizes[:, 0].tolist(), "weights": job.alpha[:, 0].double().tolist(),
        }  # fmt: skip
        if run:
            self._shared["run"] = run
        self._start = make_array_record({"start": job.oracle.layout.vector(job.oracle.module, job.oracle.dtype)})
        self.scores: dict[int, dict[str, float]] = {}
        self.refusals: dict[int, str] = {}
        self.uploaded = set[int]()

    def replace_sender(self, send: Send) -> FlowerClients:
        """Return a copy of these clients that uses a different function for sending messages."""
        other = copy.copy(self)
        other._send, other.refusals, other.uploaded = send, {}, set()
        return other

    def can_train(self, client: int) -> bool:
        return client in self.roll.nodes and super().can_train(client)

    def train_each(self, request: TrainRequest, downloads: Mapping[int, Any]) -> dict[int, ClientOutput]:
        def messages() -> Iterator[Message]:
            for c, down in self._forms.write_downs(request, downloads):
                yield self._message("train", c, request.round, [down])

        def read(client: int, reply: RecordDict) -> ClientOutput:
            values = head_of(reply)
            if values.get("round") != request.round:
                raise WireError(f"the reply belongs to round {values.get('round')}, not to round {request.round}")
            upload = self._forms.read_up(_single_array(reply), client, downloads[client])
            if any(not bool(rows.isfinite().all()) for rows in upload[1:] if rows is not None):
                raise WireError("the answers in the reply must be finite numbers")
            return make_output(upload, _work_tensor(values))

        outputs = self._read_replies([*downloads], messages(), read)
        self.uploaded = {*outputs}
        return outputs

    def ask_each(self, request: AskRequest, clients: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
        model = [self._forms.write_model(request.model)]
        messages = (self._message("query.ask", c, request.round, model) for c in clients)

        def read(_client: int, reply: RecordDict) -> tuple[Tensor, Tensor]:
            return self._forms.read_answer(_single_array(reply)), _work_tensor(head_of(reply))

        return self._read_replies(clients, messages, read)

    def score_each(self, request: ScoreRequest) -> dict[int, dict[str, float]]:
        self.scores = self._read_replies(self._list_scorers(request), self.score_messages(request), _reply_metrics)
        return self.scores

    def score_messages(self, request: ScoreRequest) -> Iterator[Message]:
        """Yield the messages that request scores."""
        has_global = request.model is not None
        for c, models in self._forms.write_models_of(request, self._list_scorers(request)):
            yield self._message("evaluate", c, request.round, models, **{"global": has_global})

    def _list_scorers(self, request: ScoreRequest) -> list[int]:
        return [c for c in request.ids.tolist() if c in self.roll.nodes and bool(self._sizes[c].sum())]

    def _message(self, kind: str, client: int, t: int, arrays: Sequence[bytes], **more: Any) -> Message:
        accepted = int(self.accepted[client])
        values = write_values(**self._shared, client=client, round=t, accepted=accepted, **more)
        content = RecordDict({VALUES_RECORD: values, ARRAYS_RECORD: pack_arrays(arrays)})
        if not accepted:  # the node has no state yet, and creates its first state from this model
            content["start"] = self._start
        return Message(content, dst_node_id=self.roll.nodes[client], message_type=kind, group_id=str(t))

    def _read_replies(
        self, recipients: list[int], messages: Iterable[Message], read: Callable[[int, RecordDict], T]
    ) -> dict[int, T]:
        """Return the first usable reply from every client. All other replies are logged and discarded."""
        values: dict[int, T] = {}
        for reply in self._send(messages) if recipients else ():
            node = reply.metadata.src_node_id
            client = self.roll.client(node)
            client = client if client in recipients else None
            if reply.has_error():
                if client is not None and reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION:
                    self.refusals[client] = escape_line(reply.error.reason)[:500]
                log(WARNING, "fedloom: node %s did not answer: %s", node, reply.error.reason)
                continue
            if client is None or client in values:
                log(WARNING, "fedloom: node %s was not asked, so its reply is ignored", node)
                continue
            try:
                values[client] = self._read(client, reply, read)
            except Exception as error:  # a damaged reply must not stop the server
                reason = (
                    str(error) if isinstance(error, FedloomError) else f"it cannot be read ({type(error).__name__})"
                )
                log(WARNING, "fedloom: the reply of node %s is ignored: %s", node, reason)
        return values

    def _read(self, client: int, reply: Message, read: Callable[[int, RecordDict], T]) -> T:
        values = head_of(reply.content)
        if "error" in values:
            if values.get("lost"):
                self.accepted[client] = 0
            else:
                self.refusals[client] = escape_line(values["error"])[:500]
            raise WireError(str(values["error"])[:500])
        if "client" in values and values["client"] != client:
            raise WireError(f"the reply belongs to client {values['client']}, not to client {client}")
        return read(client, reply.content)


class RememberingClients:
    """Clients whose answers to a sampler are stored, so that a round can be repeated."""

    def __init__(self, clients: FlowerClients) -> None:
        self._clients, self._answers = clients, dict[int, Any]()
        self.score, self.call_once = clients.score, clients.call_once

    def replaying(self, clients: FlowerClients) -> RememberingClients:
        """Return clients that give the stored answers, but train with the given clients."""
        other = RememberingClients(clients)
        other._answers = self._answers
        return other

    def ask(self, request: Any) -> Iterator[Any]:
        if request.round not in self._answers:
            self._answers[request.round] = list(self._clients.ask(request))
        yield from self._answers[request.round]

    def train(self, request: TrainRequest) -> Iterator[TrainResult]:
        return self._clients.train(request)


def _work_tensor(values: Mapping[str, Any]) -> Tensor:
    work = values.get("work")
    if not isinstance(work, list) or len(work) != 3 or not all(type(k) is int and 0 <= k <= 10**15 for k in work):
        raise WireError(f"work must be three counts, got {json.dumps(work, default=str)[:60]}")
    return torch.tensor([work])


def _single_array(reply: RecordDict) -> bytes:
    parts = read_messages(reply)
    if len(parts) != 1:
        raise WireError(f"the reply contains {len(parts)} arrays instead of 1")
    return parts[0]


def _reply_metrics(_client: int, reply: RecordDict) -> dict[str, float]:
    record = reply.get("metrics")
    if not isinstance(record, MetricRecord):
        raise WireError("the reply contains no metrics")
    return {key: float(value) for key, value in record.items() if isinstance(value, (int, float))}
