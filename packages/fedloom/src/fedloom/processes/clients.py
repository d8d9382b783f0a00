"""Clients of a run: they receive the requests of each round and return the results.

Clients may compute in this process, in forked workers, on ranks, or at real sites; a round is the same in all cases. A
request lists the clients in the order chosen by the round. Results are returned in this order, so the result is bitwise
identical regardless of the process that computes it. The state of a client stays with the client.
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
    "samples_backward", "samples_forward", "steps", "bytes_up", "bytes_down", "bytes_up_paper", "bytes_down_paper",
)  # fmt: skip
"""Names of the counts for each client in a cohort."""

Scores = dict[tuple[str, str], dict[str, Tensor]]
"""Metrics, keyed by pairs (model, part of the data), as ``{metric: float64 [m]}``. If the part is "", the metrics
describe the models themselves."""


class TrainRequest(NamedTuple):
    """Request to train on the models that clients receive.

    Attributes:
        round: number of the round, which determines the batches, the step size and all random draws.
        place: row of the download that each client receives ``[m]``.
        ids: ids of the clients ``[m]``.
        share: weight of each client in the mean ``[m, 1]``, as float64.
        down: values that clients receive, with fields ``[.]`` if all clients receive the same values, otherwise ``[c,
            .]``.
        server: state of the server before the round.
        steps: number of local steps of each client ``[m]``. If None, the number in the run's settings is used.
        alpha: weights of all clients in the objective ``[n, 1]``, or None if they are the same as before round 1.
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
    """Result of a chunk, i.e. of a group of clients that were asked to train in a request.

    Chunks are returned in order.

    Attributes:
        ids: ids of the clients ``[m]``.
        share: weight of each client in the mean ``[m, 1]``, as float64.
        accepted: mask ``[m]`` of the clients whose uploads are finite and within the bound.
        parts: contribution of the accepted uploads to each field of the upload (`fedloom.engine.clients.uploads`).
        answers: rows of the accepted clients: under ``weigher`` the answers that determine their weights, under
            ``models`` their models if an attacker reads them, and under ``sampler`` the answers that determine how
            clients are sampled.
        total: sum of the weights of the accepted clients.
        counts: work and traffic of each client ``[m, 7]``, in the order of `CLIENT_COUNTS`.
    """

    ids: Tensor
    share: Tensor
    accepted: Tensor
    parts: dict[str, Tensor]
    answers: dict[str, Tensor]
    total: float
    counts: Tensor


class SumResult(NamedTuple):
    """Sum over a group of clients in a request. Nothing is known about the individual clients.

    Attributes:
        ids: ids of the clients in the sum ``[m]``, in the requested order.
        missing: ids ``[k]`` of the clients in the request that are not included in the sum.
        parts: joint contribution of these clients to each field of the upload.
        total: sum of the weights of these clients in the mean.
        counts: total work and traffic ``[7]``, in the order of `CLIENT_COUNTS`.
    """

    ids: Tensor
    missing: Tensor
    parts: dict[str, Tensor]
    total: float
    counts: Tensor


TrainResult = ChunkResult | SumResult


class AskRequest(NamedTuple):
    """Request to answer a question about the global model before a round.

    Attributes:
        round: number of the round.
        ids: ids of the clients ``[m]``.
        model: global model ``[d]``.
        asks_activations: True if clients train the model for one round and return their activations, which determine
            clusters and weights. False if they return answers that determine how clients are sampled.
    """

    round: int
    ids: Tensor
    model: Tensor
    asks_activations: bool = False


class Answers(NamedTuple):
    """Answers of some clients ``[m, k]``, and each client's work and traffic ``[m, 7]`` as in `CLIENT_COUNTS`."""

    values: Tensor
    counts: Tensor


class ScoreRequest(NamedTuple):
    """Request to evaluate models on the clients' own samples.

    Attributes:
        round: number of the last round before the evaluation.
        ids: ids of the clients that evaluate ``[m]``.
        cohort: ids ``[c]`` of the clients whose training splits determine the normalization statistics of the global
            model.
        down: values for all clients, from which they compute their personal models. None if the method has no personal
            models.
        model: global model ``[d]``. None if the method has no global model.
        alpha: weights of all clients in the objective ``[n, 1]``, or None if they are the same as before round 1.
    """

    round: int
    ids: Tensor
    cohort: Tensor
    down: Fields | None
    model: Tensor | None
    alpha: Tensor | None = None


class Clients(Protocol):
    """Clients that perform the computations of a run."""

    def train(self, request: TrainRequest) -> Iterator[TrainResult]:
        """Train clients. Together, the results include all requested clients, in the requested order.

        Raises:
            RunStopped: too few clients have answered.
            ClientError: the method's code failed.
        """
        ...

    def ask(self, request: AskRequest) -> Iterator[Answers]:
        """Ask clients for answers, in the requested order."""
        ...

    def score(self, request: ScoreRequest) -> Iterator[Scores]:
        """Evaluate models on each client's samples, in the requested order.

        Metrics that do not belong to any client are included in the first result.
        """
        ...

    def call_once(self, ids: Tensor, call: Callable[[], T]) -> T:
        """Return the result of a function that is called in only one process and can access rows of some clients."""
        ...


class TrainTask(NamedTuple):
    """Chunk of clients that are to be trained (see `TrainRequest`)."""

    round: int
    place: Tensor
    ids: Tensor
    share: Tensor
    steps: Tensor | None = None


class AskTask(NamedTuple):
    """Chunk of clients that are asked a question (see `AskRequest`)."""

    round: int
    ids: Tensor
    asks_activations: bool = False


class ScoreTask(NamedTuple):
    """Chunk of clients that are to evaluate models (see `ScoreRequest`).

    If ``common`` is True, the result includes the metrics that do not belong to any client.
    """

    round: int
    ids: Tensor
    cohort: Tensor
    common: bool


class Handlers(NamedTuple):
    """Functions that compute a chunk from its task and from the data that all chunks share."""

    train: Callable[[tuple[Any, Any, Tensor | None], TrainTask], ChunkResult]
    compute: Callable[[tuple[Any, Any], TrainTask], dict[str, Tensor]]
    ask: Callable[[Tensor, AskTask], Answers]
    score: Callable[[tuple[Any, Tensor | None, Tensor | None], ScoreTask], Scores]


class LocalClients:
    """Clients whose samples and states are in this program. Their chunks are computed by `Workers`.

    Args:
        handlers: functions that compute a chunk.
        workers: processes that compute the chunks.
        chunk: maximum number of clients in a chunk.
    """

    def __init__(self, handlers: Handlers, workers: Workers, chunk: int) -> None:
        self._handlers, self._workers, self._chunk = handlers, workers, chunk

    def train(self, request: TrainRequest) -> Iterator[TrainResult]:
        return self._workers.map(
            self._handlers.train, (request.down, request.server, request.alpha), self._tasks(request)
        )

    def compute(self, request: TrainRequest) -> Iterator[tuple[TrainTask, dict[str, Tensor]]]:
        """Train clients without using their uploads, and yield each task with its result, in order."""
        tasks = self._tasks(request)
        answers = self._workers.map(self._handlers.compute, (request.down, request.server), tasks)
        return zip(tasks, answers, strict=True)

    def _tasks(self, request: TrainRequest) -> list[TrainTask]:
        rows = (request.place, request.ids, request.share, *(() if request.steps is None else (request.steps,)))
        pieces = zip(*(_split_into_chunks(row, self._chunk) for row in rows), strict=True)
        return [TrainTask(request.round, *piece) for piece in pieces]

    def ask(self, request: AskRequest) -> Iterator[Answers]:
        tasks = [
            AskTask(request.round, ids, request.asks_activations)
            for ids in _split_into_chunks(request.ids, self._chunk)
        ]
        return self._workers.map(self._handlers.ask, request.model, tasks)

    def score(self, request: ScoreRequest) -> Iterator[Scores]:
        pieces = enumerate(_split_into_chunks(request.ids, max(self._chunk, 8)))
        tasks = [ScoreTask(request.round, ids, request.cohort, common=k == 0) for k, ids in pieces]
        return self._workers.map(self._handlers.score, (request.down, request.model, request.alpha), tasks)

    def call_once(self, ids: Tensor, call: Callable[[], T]) -> T:
        return self._workers.call_once(ids, call)

    def wrap_workers(self, wrap: Callable[[Workers], Workers]) -> LocalClients:
        """Return the same clients, but let ``wrap(workers)`` compute their chunks."""
        return LocalClients(self._handlers, wrap(self._workers), self._chunk)


def _split_into_chunks(rows: Tensor, most: int) -> Sequence[Tensor]:
    """Split rows of clients into chunks.

    The chunks depend only on the number of rows and on the maximum size of a chunk.
    """
    return rows.tensor_split(chunk_count(len(rows), most))
