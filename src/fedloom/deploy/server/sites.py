"""Sites: the clients of a deployment, which train, answer and score where their samples are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedloom.deploy.protocol.envelope import Reply
from fedloom.deploy.protocol.forms import Forms, for_client, is_common, output_of
from fedloom.deploy.server.transport import Request, Transport
from fedloom.deploy.settings import Server
from fedloom.engine.chunk import accept, asked_counts
from fedloom.engine.job import Job
from fedloom.engine.scoring import sizes_of
from fedloom.errors import ConfigError, RunStopped, Stop
from fedloom.processes.clients import (
    COUNTS,
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


class Sites:
    """The sites of a run; see `fedloom.processes.clients.Clients`. Each is a chunk of its own.

    Args:
        job: the run, as the server has it.
        forms: the forms of its messages.
        transport: the way to the sites.
        settings: the settings of the server.

    Attributes:
        accepted: ``[n]`` round in which a site's upload was last accepted, 0 for none.
    """

    def __init__(self, job: Job, forms: Forms, transport: Transport, settings: Server) -> None:
        self._job, self._forms, self._transport, self._settings = job, forms, transport, settings
        self.accepted = torch.zeros(job.n, dtype=torch.long)
        self._pending: ScoreRequest | None = None
        self._scores: tuple[int, dict[int, dict[str, float]]] | None = None
        transport.begin(job, forms)

    def score_with_training(self, request: ScoreRequest) -> None:
        """Ask for scores in the messages of the training that comes next; `score` has them then."""
        self._pending = request

    def sums(self, round: int) -> Iterator[tuple[str, str, str, float]]:
        """Model, part, name and value of figures of the federation that the sites have summed after a round."""
        yield from ()

    def train(self, request: TrainRequest) -> Iterator[TrainResult]:
        """Train at the sites.

        Raises:
            RunStopped: fewer sites than the quorum answered in time.
        """
        job, forms, t = self._job, self._forms, request.round
        places = zip(request.ids.tolist(), request.place.tolist(), strict=True)
        received = {c: for_client(request.down, place) for c, place in places}
        common = forms.write_down(request.down, request.server) if is_common(request.down) else None
        pending, self._pending = self._pending, None
        scored, asks = (-1, {}) if pending is None else (pending.round, self._score_letters(pending))
        letters = dict[int, Request]()
        for c, down in received.items():
            if bool(self._transport.sizes[c, 0]):
                ask = asks.pop(c, None)
                parts, has_global = ((), False) if ask is None else (ask.arrays, bool((ask.more or {})["global"]))
                more = self._place(c) | {"scored": -1 if ask is None else scored, "global": has_global}
                message = common or forms.write_down(down, request.server)
                letters[c] = Request("train", c, [message, *parts], more, down)
        replies = self._transport.until(t, letters | asks, max(1, min(self._settings.quorum, len(letters))))
        self._scores = (scored, {c: reply.metrics for c, reply in replies.items()})
        replies = {c: reply for c, reply in replies.items() if c in letters}
        if job.setting.aggregator is not None:
            count = len({*replies, *job.kept.occupied.nonzero()[:, 0].tolist()} if job.kept_fields else replies)
            try:
                job.setting.aggregator.check(count)
            except ConfigError as error:
                raise RunStopped(Stop.TOO_FEW, f"round {t}: {error}") from error
        for k, c in enumerate(request.ids.tolist()):
            task = TrainTask(t, request.place[k : k + 1], request.ids[k : k + 1], request.share[k : k + 1])
            if c not in replies:
                nothing = torch.zeros(1, len(COUNTS), dtype=torch.long)
                yield ChunkResult(task.ids, task.share, torch.tensor([False]), {}, {}, 0.0, nothing)
                continue
            reply = replies.pop(c)
            output = output_of(reply.value, self._transport.checks.model(reply.value, received[c]), _work(reply))
            yield accept(job, request.server, task, received[c], output)

    def ask(self, request: AskRequest) -> Iterator[Answers]:
        """Ask candidates; one that gives no answer is worth less than any other."""
        job, message = self._job, [self._forms.write_model(request.model)]
        clients = request.ids.tolist()
        letters = {c: Request("ask", c, message) for c in clients if bool(self._transport.sizes[c, 0])}
        replies = self._transport.until(request.round, letters, 0)
        width = next((r.value.shape[1] for r in replies.values()), 1)
        nothing = torch.full((1, width), -torch.inf, dtype=job.oracle.dtype), torch.zeros(1, 3, dtype=torch.long)
        answers = [(replies[c].value, _work(replies[c])) if c in replies else nothing for c in clients]
        values, work = (torch.cat(rows) for rows in zip(*answers, strict=True))
        yield Answers(values, asked_counts(job, values, work))

    def score(self, request: ScoreRequest) -> Iterator[Scores]:
        """Scores that every site has of the models on its own samples; NaN where it is not there."""
        if self._scores is None or self._scores[0] != request.round:
            replies = self._transport.until(request.round, self._score_letters(request), 0)
            self._scores = request.round, {c: r.metrics for c, r in replies.items()}
        metrics = self._scores[1]
        scores: Scores = {}
        for key in sorted({key for row in metrics.values() for key in row}):
            kind, part, name = key.split("/")
            values = [metrics.get(c, {}).get(key, torch.nan) for c in request.ids.tolist()]
            scores.setdefault((kind, part), {})[name] = torch.tensor(values, dtype=torch.float64)
        yield scores | self._sizes(request)

    def on_one(self, ids: Tensor, call: Callable[[], T]) -> T:
        """The value of a call, made at the server."""
        return call()

    def _sizes(self, request: ScoreRequest) -> Scores:
        """Sizes of the global model of a composite method."""
        if request.model is None:
            return {}
        return {("global", ""): sizes_of(self._job.algorithm, self._job.oracle.layout, request.model[None])}

    def _score_letters(self, request: ScoreRequest) -> dict[int, Request]:
        """Requests that ask every site that is there for scores."""
        forms, down, model = self._forms, request.down, request.model
        common = forms.write_models(down, model) if down is None or is_common(down) else None
        return {
            c: Request(
                "score",
                c,
                common or forms.write_models(for_client(down, c), model),
                self._place(c) | {"global": model is not None},
                round=request.round,
            )
            for c in self._transport.nodes
        }

    def _place(self, client: int) -> dict[str, Any]:
        return {"accepted": int(self.accepted[client]), "weight": float(self._job.alpha[client])}


def _work(reply: Reply) -> Tensor:
    return torch.tensor([reply.head["work"]])
