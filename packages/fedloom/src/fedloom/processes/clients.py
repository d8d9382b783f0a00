"""Clients: the requests of a round to those who compute, and their results, wherever they are.

A round does not know where its clients are: in this process, in forked workers, on ranks, or at real sites. A request
names the clients in an order that the round chooses. Results come in that order, so that no bit depends on who
computes. The state of a client stays where the client is.
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
"""Counts of every client of a cohort."""

Scores = dict[tuple[str, str], dict[str, Tensor]]
"""(model, part) -> metric -> float64 ``[m]``. Part "" has figures of the models themselves."""


class TrainRequest(NamedTuple):
    """Clients to train on what they receive.

    Attributes:
        round: the round number, of which follow the batches, the step size and all draws.
        place: ``[m]`` places of the clients in the download.
        ids: ``[m]`` ids of the clients.
        share: ``[m, 1]`` float64 shares of the clients in the mean.
        down: the download, fields ``[.]`` where all clients receive the same, else ``[c, .]``.
        server: the server's state before the round.
        steps: ``[m]`` local steps that the clients take. None: as many as the run's settings have.
        alpha: ``[n, 1]`` the clients' shares of the objective. Where they are not those before round 1.
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
    """The result of training some clients of a request, next to those of the result before.

    Attributes:
        ids: ``[m]`` the clients.
        share: ``[m, 1]`` float64 their shares in the mean.
        accepted: ``[m]`` bool: uploads that are finite and within the bound.
        parts: what the accepted add to every field of the upload (`fedloom.engine.clients.uploads`).
        answers: rows of the accepted: ``weigher`` their answers to the weigher, ``models`` their models if an attacker
            reads them, ``sampler`` what a sampler learns from them.
        total: the sum of the shares of the accepted.
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
    """The sum over some clients of a request, of each of whom nothing else is known.

    Attributes:
        ids: ``[m]`` the clients that are summed, in the order of the request.
        missing: ``[k]`` clients of the request that are not.
        parts: what they add together to every field of the upload.
        total: the sum of their shares in the mean.
        counts: ``[7]`` work and traffic of all of them, see `CLIENT_COUNTS`.
    """

    ids: Tensor
    missing: Tensor
    parts: dict[str, Tensor]
    total: float
    counts: Tensor


TrainResult = ChunkResult | SumResult


class AskRequest(NamedTuple):
    """Clients to ask about the global model before a round.

    Attributes:
        round: the round number.
        ids: ``[m]`` the clients.
        model: ``[d]`` the global model.
        describes: they train it for a round and send their activations, for shares by clusters. Else answer a sampler.
    """

    round: int
    ids: Tensor
    model: Tensor
    describes: bool = False


class Answers(NamedTuple):
    """The answers of some clients ``[m, k]``, and what they cost ``[m, 7]``, see `CLIENT_COUNTS`."""

    values: Tensor
    counts: Tensor


class ScoreRequest(NamedTuple):
    """Clients that score models on their own samples.

    Attributes:
        round: the round after which models are scored.
        ids: ``[m]`` clients of the evaluated federation.
        cohort: ``[c]`` clients whose training parts give the normalisation statistics of the global model.
        down: the download of all clients, of which personal models are made. None if there are none.
        model: ``[d]`` the global model. None if there is none.
        alpha: ``[n, 1]`` the clients' shares of the objective. Where they are not those before round 1.
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
            ClientError: code of the method failed.
        """
        ...

    def ask(self, request: AskRequest) -> Iterator[Answers]:
        """Ask candidates, in the order of the request."""
        ...

    def score(self, request: ScoreRequest) -> Iterator[Scores]:
        """Score models, in the order of the request. Figures of no client come with the first result."""
        ...

    def call_once(self, ids: Tensor, call: Callable[[], T]) -> T:
        """Return the value of a call, made in one place, that may read and write the rows of some clients."""
        ...


class TrainTask(NamedTuple):
    """A chunk to train: see `TrainRequest`."""

    round: int
    place: Tensor
    ids: Tensor
    share: Tensor
    steps: Tensor | None = None


class AskTask(NamedTuple):
    """A chunk of clients to ask: see `AskRequest`."""

    round: int
    ids: Tensor
    describes: bool = False


class ScoreTask(NamedTuple):
    """A chunk of clients to score: see `ScoreRequest`. ``common`` includes the figures that belong to no client."""

    round: int
    ids: Tensor
    cohort: Tensor
    common: bool


class Handlers(NamedTuple):
    """The functions that compute a chunk, from what all chunks share and a task."""

    train: Callable[[tuple[Any, Any, Tensor | None], TrainTask], ChunkResult]
    compute: Callable[[tuple[Any, Any], TrainTask], dict[str, Tensor]]
    ask: Callable[[Tensor, AskTask], Answers]
    score: Callable[[tuple[Any, Tensor | None, Tensor | None], ScoreTask], Scores]


class LocalClients:
    """Clients whose samples and state this program has. `Workers` compute their chunks.

    Args:
        handlers: the functions that compute a chunk.
        workers: the processes that do.
        chunk: most clients of a chunk.
    """

    def __init__(self, handlers: Handlers, workers: Workers, chunk: int) -> None:
        self._handlers, self._workers, self._chunk = handlers, workers, chunk

    def train(self, request: TrainRequest) -> Iterator[TrainResult]:
        return self._workers.map(
            self._handlers.train, (request.down, request.server, request.alpha), self._tasks(request)
        )

    def compute(self, request: TrainRequest) -> Iterator[tuple[TrainTask, dict[str, Tensor]]]:
        """Train clients without taking their uploads: every task with what its handler gives, in order."""
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
        """Return these clients with their chunks computed by ``wrap(workers)``."""
        return LocalClients(self._handlers, wrap(self._workers), self._chunk)


def _split(rows: Tensor, most: int) -> Sequence[Tensor]:
    """Rows of clients in chunks. How many follows from their number alone."""
    return rows.tensor_split(chunk_count(len(rows), most))
