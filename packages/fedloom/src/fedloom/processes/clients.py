"""Clients: pass the requests of a round to the parties that compute, and collect the results.

A round does not depend on where its clients are: in this process, in forked workers, on ranks, or at real sites. A
request lists the clients in an order that the round chooses. Results have that order, so no bit depends on which
process computes. The state of a client stays at the client.
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
"""Counters of every client of a cohort."""

Scores = dict[tuple[str, str], dict[str, Tensor]]
"""(model, part) -> metric -> float64 ``[m]``. Part "" contains the metrics of the models themselves."""


class TrainRequest(NamedTuple):
    """Clients that train on the models that they receive.

    Attributes:
        round: round number, which determines the batches, the step size and all draws.
        place: ``[m]`` indices of the clients in the download.
        ids: ``[m]`` ids of the clients.
        share: ``[m, 1]`` float64 shares of the clients in the mean.
        down: the download, with fields ``[.]`` if all clients receive the same, else ``[c, .]``.
        server: the server's state before the round.
        steps: ``[m]`` local steps of the clients. None: the steps of the run's settings.
        alpha: ``[n, 1]`` the clients' shares of the objective, if they differ from the shares before round 1.
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
        ids: ``[m]`` ids of the clients.
        share: ``[m, 1]`` float64 their shares in the mean.
        accepted: ``[m]`` bool: uploads that are finite and within the bound.
        parts: contribution of the accepted uploads to every field of the upload (`fedloom.engine.clients.uploads`).
        answers: rows of the accepted clients: ``weigher`` their answers to the weigher, ``models`` their models if an
            attacker reads them, ``sampler`` their answers to a sampler.
        total: sum of the shares of the accepted clients.
        counts: ``[m, 7]`` work and traffic, see `CLIENT_COUNTS`.
    """

    ids: Tensor
    share: Tensor
    accepted: Tensor
    parts: dict[str, Tensor]
    answers: dict[str, Tensor]
    total: float
    counts: Tensor


class SumResult(NamedTuple):
    """Sum over some clients of a request. Nothing else is known about each of them.

    Attributes:
        ids: ``[m]`` summed clients, in the order of the request.
        missing: ``[k]`` clients of the request that are not summed.
        parts: their common contribution to every field of the upload.
        total: the sum of their shares in the mean.
        counts: ``[7]`` total work and traffic, see `CLIENT_COUNTS`.
    """

    ids: Tensor
    missing: Tensor
    parts: dict[str, Tensor]
    total: float
    counts: Tensor


TrainResult = ChunkResult | SumResult


class AskRequest(NamedTuple):
    """Clients to query about the global model before a round.

    Attributes:
        round: the round number.
        ids: ``[m]`` ids of the clients.
        model: ``[d]`` the global model.
        describes: True if they train it for a round and send their activations, for shares by clusters. Otherwise they
            answer a sampler.
    """

    round: int
    ids: Tensor
    model: Tensor
    describes: bool = False


class Answers(NamedTuple):
    """Answers of some clients ``[m, k]``, and their cost ``[m, 7]``, see `CLIENT_COUNTS`."""

    values: Tensor
    counts: Tensor


class ScoreRequest(NamedTuple):
    """Clients that evaluate models on their own samples.

    Attributes:
        round: the round after which models are evaluated.
        ids: ``[m]`` clients of the evaluated federation.
        cohort: ``[c]`` clients whose training parts determine the normalization statistics of the global model.
        down: the download of all clients, from which personal models are computed. None if there are no personal
            models.
        model: ``[d]`` the global model. None if there is no global model.
        alpha: ``[n, 1]`` the clients' shares of the objective, if they differ from the shares before round 1.
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
        """Train clients. The results cover all of them, in the order of the request.

        Raises:
            RunStopped: too few clients answered.
            ClientError: the method's code failed.
        """
        ...

    def ask(self, request: AskRequest) -> Iterator[Answers]:
        """Query candidates, in the order of the request."""
        ...

    def score(self, request: ScoreRequest) -> Iterator[Scores]:
        """Evaluate models, in the order of the request. Metrics that belong to no client come with the first result."""
        ...

    def call_once(self, ids: Tensor, call: Callable[[], T]) -> T:
        """Return the value of a call that runs in one place and may read and write the rows of some clients."""
        ...


class TrainTask(NamedTuple):
    """A chunk to train: see `TrainRequest`."""

    round: int
    place: Tensor
    ids: Tensor
    share: Tensor
    steps: Tensor | None = None


class AskTask(NamedTuple):
    """A chunk of clients to query: see `AskRequest`."""

    round: int
    ids: Tensor
    describes: bool = False


class ScoreTask(NamedTuple):
    """A chunk of clients to evaluate: see `ScoreRequest`. ``common`` includes the metrics that belong to no client."""

    round: int
    ids: Tensor
    cohort: Tensor
    common: bool


class Handlers(NamedTuple):
    """Functions that compute a chunk, from a task and the data that all chunks share."""

    train: Callable[[tuple[Any, Any, Tensor | None], TrainTask], ChunkResult]
    compute: Callable[[tuple[Any, Any], TrainTask], dict[str, Tensor]]
    ask: Callable[[Tensor, AskTask], Answers]
    score: Callable[[tuple[Any, Tensor | None, Tensor | None], ScoreTask], Scores]


class LocalClients:
    """Clients whose samples and state are in this program. `Workers` compute their chunks.

    Args:
        handlers: the functions that compute a chunk.
        workers: the processes that compute chunks.
        chunk: largest number of clients per chunk.
    """

    def __init__(self, handlers: Handlers, workers: Workers, chunk: int) -> None:
        self._handlers, self._workers, self._chunk = handlers, workers, chunk

    def train(self, request: TrainRequest) -> Iterator[TrainResult]:
        return self._workers.map(
            self._handlers.train, (request.down, request.server, request.alpha), self._tasks(request)
        )

    def compute(self, request: TrainRequest) -> Iterator[tuple[TrainTask, dict[str, Tensor]]]:
        """Train clients without taking their uploads: yield every task with its handler's result, in order."""
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

    def through(self, wrap: Callable[[Workers], Workers]) -> LocalClients:
        """Return these clients with chunks computed by ``wrap(workers)``."""
        return LocalClients(self._handlers, wrap(self._workers), self._chunk)


def _split(rows: Tensor, most: int) -> Sequence[Tensor]:
    """Rows of clients in chunks. The number of chunks depends only on the number of rows."""
    return rows.tensor_split(chunk_count(len(rows), most))
