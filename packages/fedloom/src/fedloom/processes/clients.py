"""Clients: pass the requests of a round to the parties that compute, and collect the results.

A round does not depend on where its clients are: in this process, in forked workers, on ranks, or at real sites. A
request lists the clients in an order that the round chooses. Results are returned in this order, so no bit depends on
which process computes. A client's state stays at the client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from fedloom.local.oracles import chunk_count
from fedloom.local.rows import Fields
from fedloom.processes.pool import Workers

T = TypeVar("T")

CLIENT_COUNTS = (
    "samples_backward",
    "samples_forward",
    "steps",
    "bytes_up",
    "bytes_down",
    "bytes_up_paper",
    "bytes_down_paper",
)
"""Counters for each client of a cohort."""

Scores = dict[tuple[str, str], dict[str, Tensor]]
"""(model, part) -> metric -> float64 ``[m]``. Part "" contains metrics of the models themselves."""


class TrainRequest(NamedTuple):
    """Request that clients train on the models that they receive.

    Attributes:
        round: round number, which determines the batches, the step size and all draws.
        place: indices of the clients in the download ``[m]``.
        ids: ids of the clients ``[m]``.
        share: clients' shares in the mean ``[m, 1]`` float64.
        down: download, with fields ``[.]`` if all clients receive the same values, else ``[c, .]``.
        server: state of the server before the round.
        steps: numbers of local steps of the clients ``[m]``. None: the number in the run's settings.
        alpha: clients' shares in the objective ``[n, 1]``, if they differ from the shares before round 1.
    """

    round: int
    place: Tensor
    ids: Tensor
    share: Tensor
    down: Fields
    server: Fields
    steps: Tensor | None = None
    alpha: Tensor | None = None


class ChunkResult(NamedTuple):
    """Result of training some clients of a request, following the previous result.

    Attributes:
        ids: ids of the clients ``[m]``.
        share: their shares in the mean ``[m, 1]`` float64.
        accepted: mask of the uploads that are finite and within the bound ``[m]``.
        parts: what the accepted uploads contribute to each field of the upload (`fedloom.engine.clients.uploads`).
        answers: rows of the accepted clients: under ``weigher`` their answers to the weigher, under ``models`` their
            models if an attacker reads them, and under ``sampler`` their answers to a sampler.
        total: sum of the shares of the accepted clients.
        counts: work and traffic ``[m, 7]`` (see `CLIENT_COUNTS`).
    """

    ids: Tensor
    share: Tensor
    accepted: Tensor
    parts: dict[str, Tensor]
    answers: dict[str, Tensor]
    total: float
    counts: Tensor


class SumResult(NamedTuple):
    """Sum over some clients of a request. Nothing else is known about these clients individually.

    Attributes:
        ids: clients in the sum ``[m]``, in the order of the request.
        missing: clients of the request that are not in the sum ``[k]``.
        parts: what these clients together contribute to each field of the upload.
        total: the sum of their shares in the mean.
        counts: total work and traffic ``[7]`` (see `CLIENT_COUNTS`).
    """

    ids: Tensor
    missing: Tensor
    parts: dict[str, Tensor]
    total: float
    counts: Tensor


TrainResult = ChunkResult | SumResult


class AskRequest(NamedTuple):
    """Request that queries clients about the global model before a round.

    Attributes:
        round: round number.
        ids: ids of the clients ``[m]``.
        model: global model ``[d]``.
        describes: True if clients train the model for one round and send their activations, for shares by clusters.
            Otherwise, they answer a sampler.
    """

    round: int
    ids: Tensor
    model: Tensor
    describes: bool = False


class Answers(NamedTuple):
    """Answers of some clients ``[m, k]``, and their cost ``[m, 7]`` (see `CLIENT_COUNTS`)."""

    values: Tensor
    counts: Tensor


class ScoreRequest(NamedTuple):
    """Request that clients evaluate models on their own samples.

    Attributes:
        round: round after which models are evaluated.
        ids: clients of the evaluated federation ``[m]``.
        cohort: clients whose training parts determine the normalization statistics of the global model ``[c]``.
        down: download for all clients, from which personal models are computed. None if there are no personal models.
        model: global model ``[d]``. None if there is no global model.
        alpha: clients' shares in the objective ``[n, 1]``, if they differ from the shares before round 1.
    """

    round: int
    ids: Tensor
    cohort: Tensor
    down: Fields | None
    model: Tensor | None
    alpha: Tensor | None = None


class Clients(Protocol):
    """Clients that compute for a run."""

    def train(self, request: TrainRequest) -> Iterator[TrainResult]:
        """Train clients. The results cover all clients of the request, in its order.

        Raises:
            RunStopped: too few clients answered.
            ClientError: the method's code failed.
        """
        ...

    def ask(self, request: AskRequest) -> Iterator[Answers]:
        """Query candidates in the order of the request."""
        ...

    def score(self, request: ScoreRequest) -> Iterator[Scores]:
        """Evaluate models in the order of the request.

        Metrics that belong to no client are returned with the first result.
        """
        ...

    def call_once(self, ids: Tensor, call: Callable[[], T]) -> T:
        """Return the value of a call that runs in a single process and may read and write the rows of some clients."""
        ...


class TrainTask(NamedTuple):
    """A chunk to train (see `TrainRequest`)."""

    round: int
    place: Tensor
    ids: Tensor
    share: Tensor
    steps: Tensor | None = None


class AskTask(NamedTuple):
    """A chunk of clients to query (see `AskRequest`)."""

    round: int
    ids: Tensor
    describes: bool = False


class ScoreTask(NamedTuple):
    """A chunk of clients to evaluate (see `ScoreRequest`).

    ``common`` is True to include the metrics that belong to no client.
    """

    round: int
    ids: Tensor
    cohort: Tensor
    common: bool


class Handlers(NamedTuple):
    """Functions that compute a chunk, given a task and the data that all chunks share."""

    train: Callable[[tuple[Any, Any, Tensor | None], TrainTask], ChunkResult]
    compute: Callable[[tuple[Any, Any], TrainTask], dict[str, Tensor]]
    ask: Callable[[Tensor, AskTask], Answers]
    score: Callable[[tuple[Any, Tensor | None, Tensor | None], ScoreTask], Scores]


class LocalClients:
    """Clients whose samples and state are in this program. `Workers` compute their chunks.

    Args:
        handlers: functions that compute a chunk.
        workers: processes that compute chunks.
        chunk: largest number of clients per chunk.
    """

    def __init__(self, handlers: Handlers, workers: Workers, chunk: int) -> None:
        self._handlers, self._workers, self._chunk = handlers, workers, chunk

    def train(self, request: TrainRequest) -> Iterator[TrainResult]:
        return self._workers.map(
            self._handlers.train, (request.down, request.server, request.alpha), self._tasks(request)
        )

    def compute(self, request: TrainRequest) -> Iterator[tuple[TrainTask, dict[str, Tensor]]]:
        """Train clients without using their uploads: yield each task with its handler's result, in order."""
        tasks = self._tasks(request)
        answers = self._workers.map(self._handlers.compute, (request.down, request.server), tasks)
        return zip(tasks, answers, strict=True)

    def _tasks(self, request: TrainRequest) -> list[TrainTask]:
        rows = (request.place, request.ids, request.share, *(() if request.steps is None else (request.steps,)))
        pieces = zip(*(_split(row, self._chunk) for row in rows), strict=True)
        return [TrainTask(request.round, *piece) for piece in pieces]

    def ask(self, request: AskRequest) -> Iterator[Answers]:
        tasks = [AskTask(request.round, ids, request.describes) for ids in _split(request.ids, self._chunk)]
        return self._workers.map(self._handlers.ask, request.model, tasks)

    def score(self, request: ScoreRequest) -> Iterator[Scores]:
        pieces = enumerate(_split(request.ids, max(self._chunk, 8)))
        tasks = [ScoreTask(request.round, ids, request.cohort, common=k == 0) for k, ids in pieces]
        return self._workers.map(self._handlers.score, (request.down, request.model, request.alpha), tasks)

    def call_once(self, ids: Tensor, call: Callable[[], T]) -> T:
        return self._workers.call_once(ids, call)

    def wrap_workers(self, wrap: Callable[[Workers], Workers]) -> LocalClients:
        """Return the same clients, with chunks computed by ``wrap(workers)``."""
        return LocalClients(self._handlers, wrap(self._workers), self._chunk)


def _split(rows: Tensor, most: int) -> Sequence[Tensor]:
    """Rows of clients in chunks. The number of chunks depends only on the number of rows."""
    return rows.tensor_split(chunk_count(len(rows), most))
