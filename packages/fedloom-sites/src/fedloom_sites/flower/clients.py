"""FlowerClients: the nodes of an existing Flower app as the clients of a round."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from logging import WARNING
from typing import Any, NamedTuple, TypeVar

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedloom.engine.clients.chunk import ClientOutput, ClientState
from fedloom.engine.clients.remote import RemoteClients
from fedloom.engine.job import Job
from fedloom.errors import FedloomError, WireError
from fedloom.local import Nothing
from fedloom.local.rows import rows_of
from fedloom.processes.clients import AskRequest, ScoreRequest, TrainRequest, TrainResult
from fedloom_sites.flower.records import (
    VALUES_RECORD,
    array_of_each,
    arrays_of,
    fields_like,
    head_of,
    log,
    tensors_of,
    write_values,
)
from fedloom_sites.flwr_adapter import ErrorCode

T = TypeVar("T")

Send = Callable[[Iterable[Message]], Iterable[Message]]
"""Function that sends messages and returns the replies that arrive in time, in any order."""


class Members(NamedTuple):
    """The nodes of a run.

    Attributes:
        nodes: Flower's numbers of the nodes, by client.
        sizes: numbers of training, validation and test samples of each node.
        run: name of the run, by which nodes recognize it. The name is empty if the run cannot be resumed.
    """

    nodes: list[int]
    sizes: list[list[int]]
    run: str


class FlowerClients(RemoteClients):
    """The nodes of an app, see `RemoteClients`.

    Args:
        job: the run at the server.
        idle: upload ``[1, .]`` of a client that takes no step, for the shapes.
        members: the nodes by client.
        document: method and choices of the run.
        parameters: names and shapes of the model's parameters.
        send: function that sends messages to the nodes.

    Attributes:
        reachable: numbers of the nodes that can be reached.
        scores: metrics of every client that answered the newest evaluation.
        refusals: reason for which each client refused the newest request. Clients that did not answer, or that have
            lost their state, are not included.
    """

    def __init__(self, job: Job, idle: Any, members: Members, document: str, parameters: str, send: Send) -> None:
        super().__init__(job, torch.tensor(members.sizes))
        self._nodes, self._send = members.nodes, send
        self.reachable = set(members.nodes)
        self._shared: dict[str, Any] = {
            "document": document, "parameters": parameters, "rounds": job.setting.rounds,
            "sizes": job.train_sizes[:, 0].tolist(), "weights": job.alpha[:, 0].double().tolist(),
        }  # fmt: skip
        if members.run:
            self._shared["run"] = members.run
        self._idle = idle
        self._start = arrays_of({"start": job.oracle.layout.vector(job.oracle.module, job.oracle.dtype)})
        self.scores: dict[int, dict[str, float]] = {}
        self.refusals: dict[int, str] = {}

    def through(self, send: Send) -> FlowerClients:
        """Return a copy of these clients with another way to send messages."""
        other = copy.copy(self)
        other._send, other.refusals = send, {}
        return other

    def can_train(self, client: int) -> bool:
        return self._is_reachable(client) and super().can_train(client)

    def train_each(self, request: TrainRequest, downloads: Mapping[int, Any]) -> dict[int, ClientOutput]:
        t, everyone = request.round, array_of_each(request.down)
        messages = (
            self._message("train", c, t, {"down": arrays_of(down._asdict(), everyone)}) for c, down in downloads.items()
        )
        return self._replies([*downloads], messages, lambda reply: self._output(reply, t))

    def ask_each(self, request: AskRequest, clients: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
        model = {"model": arrays_of({"model": request.model})}
        messages = (self._message("query.ask", c, request.round, model) for c in clients)

        def read(reply: RecordDict) -> tuple[Tensor, Tensor]:
            answer = tensors_of(reply, "answers").get("sampler")
            if answer is None or answer.dim() != 2 or len(answer) != 1:
                raise WireError("it contains no answer [1, k] to the sampler")
            return answer.to(self._job.oracle.dtype), _work(head_of(reply))

        return self._replies(clients, messages, read)

    def score_each(self, request: ScoreRequest) -> dict[int, dict[str, float]]:
        recipients = [c for c in request.ids.tolist() if self._can_score(c)]
        self.scores = self._replies(recipients, self.score_messages(request), _metrics)
        return self.scores

    def score_messages(self, request: ScoreRequest) -> Iterator[Message]:
        """Yield the messages that ask for scores."""
        everyone, global_model = array_of_each(request.down), self._global(request)
        for c in request.ids.tolist():
            down = None if request.down is None else rows_of(request.down, slice(c, c + 1))
            records = global_model | ({} if down is None else {"down": arrays_of(down._asdict(), everyone)})
            if self._can_score(c):
                yield self._message("evaluate", c, request.round, records, **{"global": request.model is not None})

    def _global(self, request: ScoreRequest) -> dict[str, ArrayRecord]:
        """Return the record of the global model, which is empty if nodes receive the model anyway."""
        if request.model is None or (
            request.down and request.down[0].dim() == 1 and torch.equal(request.down[0], request.model)
        ):
            return {}
        return {"model": arrays_of({"model": request.model})}

    def _is_reachable(self, client: int) -> bool:
        return self._nodes[client] in self.reachable

    def _can_score(self, client: int) -> bool:
        return self._is_reachable(client) and bool(self._sizes[client].sum())

    def _message(self, kind: str, client: int, t: int, records: Mapping[str, Any], **more: Any) -> Message:
        accepted = int(self.accepted[client])
        values = {"client": client, "round": t, "accepted": accepted}
        content = RecordDict({VALUES_RECORD: write_values(**self._shared, **values, **more), **records})
        if not accepted:  # the node has no state yet, whose template begins at this model
            content["start"] = self._start
        return Message(content, dst_node_id=self._nodes[client], message_type=kind, group_id=str(t))

    def _replies(
        self, recipients: list[int], messages: Iterable[Message], read: Callable[[RecordDict], T]
    ) -> dict[int, T]:
        """Return the first usable reply of every client. All other replies are logged and dropped."""
        clients = {self._nodes[c]: c for c in recipients}
        values: dict[int, T] = {}
        for reply in self._send(messages) if recipients else ():
            node = reply.metadata.src_node_id
            client = clients.get(node)
            if reply.has_error():
                if client is not None and reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION:
                    self.refusals[client] = str(reply.error.reason)[:500]
                log(WARNING, "fedloom: node %s did not answer: %s", node, reply.error.reason)
                continue
            if client is None or client in values:
                log(WARNING, "fedloom: node %s was not asked, so its reply is ignored", node)
                continue
            try:
                values[client] = self._read(client, reply, read)
            except Exception as error:  # of a reply from elsewhere
                reason = (
                    str(error) if isinstance(error, FedloomError) else f"it cannot be read ({type(error).__name__})"
                )
                log(WARNING, "fedloom: the reply of node %s is ignored: %s", node, reason)
        return values

    def _read(self, client: int, reply: Message, read: Callable[[RecordDict], T]) -> T:
        values = head_of(reply.content)
        if "error" in values:
            if values.get("lost"):
                self.accepted[client] = 0
            else:
                self.refusals[client] = str(values["error"])[:500]
            raise WireError(str(values["error"])[:500])
        if "client" in values and values["client"] != client:
            raise WireError(f"it belongs to client {values['client']}, not to {client}")
        return read(reply.content)

    def _output(self, reply: RecordDict, t: int) -> ClientOutput:
        """Return a client's decoded output after a check of its round and of the shapes of the method."""
        values = head_of(reply)
        if values.get("round") != t:
            raise WireError(f"it belongs to round {values.get('round')}, not to {t}")
        upload = fields_like(self._idle, tensors_of(reply, "up"), "upload")
        answers = {name: rows.to(self._job.oracle.dtype) for name, rows in tensors_of(reply, "answers").items()}
        weigher, sampler = (self._answer(answers, name) for name in ("weigher", "sampler"))
        return ClientOutput(upload, ClientState(Nothing()), _work(values), weigher, sampler)

    def _answer(self, answers: Mapping[str, Tensor], name: str) -> Tensor | None:
        rows = answers.get(name)
        if name == "weigher" and rows is None and self._job.setting.aggregation_weights.probes:
            raise WireError("it contains no answer to aggregation_weights")
        if rows is not None and (rows.dim() != 2 or len(rows) != 1 or not bool(rows.isfinite().all())):
            raise WireError(f"its answer to the {name} must be finite numbers [1, k]")
        return rows


class Remembering:
    """Clients whose answers to a sampler are remembered, so that a round can be repeated."""

    def __init__(self, clients: FlowerClients) -> None:
        self._clients, self._answers = clients, dict[int, Any]()
        self.score, self.call_once = clients.score, clients.call_once

    def replaying(self, clients: FlowerClients) -> Remembering:
        """Return these answers with the trainings of other clients."""
        other = Remembering(clients)
        other._answers = self._answers
        return other

    def ask(self, request: Any) -> Iterator[Any]:
        if request.round not in self._answers:
            self._answers[request.round] = list(self._clients.ask(request))
        yield from self._answers[request.round]

    def train(self, request: TrainRequest) -> Iterator[TrainResult]:
        return self._clients.train(request)


def _work(values: Mapping[str, Any]) -> Tensor:
    work = values.get("work")
    if not isinstance(work, list) or len(work) != 3 or not all(type(k) is int and 0 <= k <= 10**15 for k in work):
        raise WireError(f"work must be three counts, got {json.dumps(work, default=str)[:60]}")
    return torch.tensor([work])


def _metrics(reply: RecordDict) -> dict[str, float]:
    record = reply.get("metrics")
    if not isinstance(record, MetricRecord):
        raise WireError("it contains no metrics")
    return {key: float(value) for key, value in record.items() if isinstance(value, (int, float))}
