"""Clients on other machines that communicate by messages: the sites of a deployment or the nodes of a Flower app."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import TypeVar

import torch
from torch import Tensor

from fedloom.algorithms._messages import base_of
from fedloom.engine.clients.chunk import ClientOutput, accept_uploads, question_counts
from fedloom.engine.clients.scores import measure_sizes
from fedloom.engine.job import Job
from fedloom.errors import ConfigError, RunStopped, Stop
from fedloom.local.rows import Fields, rows_of
from fedloom.processes.clients import (
    CLIENT_COUNTS,
    Answers,
    AskRequest,
    ChunkResult,
    ScoreRequest,
    Scores,
    TrainRequest,
    TrainResult,
    TrainTask,
)

T = TypeVar("T")


class RemoteClients(ABC):
    """Clients on other machines, with the interface of `fedloom.processes.clients.Clients`.

    Each client forms its own chunk.

    A subclass implements `train_each`, `ask_each` and `score_each`, which send the requests. The results omit clients
    without a usable reply.

    Args:
        job: the run from the server's point of view.
        sizes: each client's number of training, validation and test samples ``[n, 3]``.

    Attributes:
        accepted: last round in which each client's upload was accepted ``[n]``, or 0 if there is none.
    """

    def __init__(self, job: Job, sizes: Tensor) -> None:
        self._job, self._sizes = job, sizes
        self.accepted = torch.zeros(job.n, dtype=torch.long)

    @abstractmethod
    def train_each(self, request: TrainRequest, downloads: Mapping[int, Fields]) -> dict[int, ClientOutput]:
        """Train clients from their downloads, whose fields have shape ``[1, .]`` or ``[.]``.

        The outputs do not contain the model separately.

        Raises:
            RunStopped: fewer clients replied than the run requires.
        """

    @abstractmethod
    def ask_each(self, request: AskRequest, clients: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """Query candidates. Return each client's answer ``[1, k]`` and work ``[1, 3]``."""

    @abstractmethod
    def score_each(self, request: ScoreRequest) -> Mapping[int, Mapping[str, float]]:
        """Have clients evaluate models on their own samples.

        Return each client's metrics, keyed by "model/part/metric".
        """

    def can_train(self, client: int) -> bool:
        """Return True if a client has training samples and can therefore train."""
        return bool(self._sizes[client, 0])

    def train(self, request: TrainRequest) -> Iterator[TrainResult]:
        """Train the clients, and yield their results.

        The round continues without clients that have no samples or send no usable reply.

        Raises:
            RunStopped: fewer clients replied than the network's rule or the aggregator requires.
        """
        places = zip(request.ids.tolist(), request.place.tolist(), strict=True)
        received = {c: rows_of(request.down, slice(place, place + 1)) for c, place in places}
        outputs = self.train_each(request, {c: down for c, down in received.items() if self.can_train(c)})
        self._check_count(request.round, outputs)
        for k, c in enumerate(request.ids.tolist()):
            task = TrainTask(request.round, *(row[k : k + 1] for row in (request.place, request.ids, request.share)))
            if c in outputs:
                output = self.add_model(outputs.pop(c), received[c])
                yield accept_uploads(self._job, request.server, task, received[c], output)
            else:
                nothing = torch.zeros(1, len(CLIENT_COUNTS), dtype=torch.long)
                yield ChunkResult(task.ids, task.share, torch.tensor([False]), {}, {}, 0.0, nothing)

    def ask(self, request: AskRequest) -> Iterator[Answers]:
        """Query candidates. A client that does not answer is treated as if it had sent the lowest possible value."""
        clients = request.ids.tolist()
        answers = self.ask_each(request, [c for c in clients if self.can_train(c)])
        width = next((values.shape[1] for values, _ in answers.values()), 1)
        least = torch.full((1, width), -torch.inf, dtype=self._job.oracle.dtype), torch.zeros(1, 3, dtype=torch.long)
        values, work = (torch.cat(rows) for rows in zip(*(answers.get(c, least) for c in clients), strict=True))
        yield Answers(values, question_counts(self._job, values, work))

    def score(self, request: ScoreRequest) -> Iterator[Scores]:
        """Yield the models' metrics on each client's own samples.

        The metrics of a client that does not answer are NaN.
        """
        figures = self.score_each(request)
        scores: Scores = {}
        for key in sorted({key for named in figures.values() for key in named if key.count("/") == 2}):
            kind, part, name = key.split("/")
            values = [figures.get(c, {}).get(key, torch.nan) for c in request.ids.tolist()]
            scores.setdefault((kind, part), {})[name] = torch.tensor(values, dtype=torch.float64)
        yield scores | self.global_sizes(request)

    def call_once(self, ids: Tensor, call: Callable[[], T]) -> T:
        """Call a function on the server, and return its result."""
        return call()

    def global_sizes(self, request: ScoreRequest) -> Scores:
        """Return the sizes of a composite method's global model, which the server computes itself."""
        if request.model is None:
            return {}
        return {("global", ""): measure_sizes(self._job.algorithm, self._job.oracle.layout, request.model[None])}

    def _check_count(self, round: int, outputs: Mapping[int, ClientOutput]) -> None:
        job = self._job
        if job.setting.aggregator is not None:
            count = len({*outputs, *job.kept.occupied.nonzero()[:, 0].tolist()} if job.kept_fields else outputs)
            try:
                job.setting.aggregator.check(count)
            except ConfigError as error:
                raise RunStopped(Stop.TOO_FEW, f"round {round}: {error}") from error

    def add_model(self, output: ClientOutput, down: Fields) -> ClientOutput:
        """Add the client's model to the output if the server reads it."""
        name = self._job.model_field
        if not name or self._job.fields[name].base.startswith("rows."):
            return output
        return output._replace(model=getattr(output.upload, name) + base_of(self._job.fields[name], down, None))


class StreamedClients(RemoteClients):
    """Clients that receive individual requests and may reply at any time (see `fedloom.engine.virtual.real`).

    Attributes:
        patience: number of seconds without an available client after which the run ends.
        longest: maximum number of seconds to wait for a client's reply.
    """

    patience: float
    longest: float

    @abstractmethod
    def begin_at(self, seconds: float) -> None:
        """Start the run's clock at this number of seconds, unless it is already running."""

    @abstractmethod
    def seconds(self) -> float:
        """Return the run's elapsed seconds, excluding the time without a running server."""

    @abstractmethod
    def pause(self) -> None:
        """Wait briefly before the next attempt."""

    @abstractmethod
    def present(self) -> AbstractSet[int]:
        """Return the clients that are available for training."""

    @abstractmethod
    def is_asked(self, client: int) -> bool:
        """Return True if a client has not yet replied to a request from this process."""

    @abstractmethod
    def ask_to_train(self, client: int, round: int, down: Fields, server: Fields | None) -> None:
        """Send a client its download, whose fields have shape ``[1, .]`` or ``[.]``.

        ``server`` contains the ranks of the download's matrices. It is None if it is no longer available.
        """

    @abstractmethod
    def arrived(self) -> tuple[Mapping[int, ClientOutput], AbstractSet[int]]:
        """Return the messages received since the last call, and the clients that will not send a usable message."""

    @abstractmethod
    def give_up(self, client: int) -> None:
        """Stop waiting for a client's reply."""
