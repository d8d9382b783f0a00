"""Sites: the chunks of a round computed at real sites; it stands where a simulation has its pool of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fedloom.deploy.exchange.forms import Forms, for_client, is_common, made_of
from fedloom.deploy.exchange.post import Letter, Post
from fedloom.deploy.exchange.replies import Reply
from fedloom.deploy.settings import Server
from fedloom.engine.chunk import asked_counts, receive
from fedloom.engine.job import Job
from fedloom.engine.records import Scores
from fedloom.engine.scoring import scores_of, sizes_of
from fedloom.engine.state import State
from fedloom.errors import ConfigError, RunStopped, Stop
from fedloom.processes.chunks import COUNTS, AskTask, ScoreTask, Trained, TrainTask


class Sites:
    """The sites of a run, as what computes its chunks; a chunk is one client.

    Args:
        job: the run, as the server has it.
        forms: of its messages.
        post: the way to the sites.
        settings: of the server.

    Attributes:
        accepted: ``[n]`` round in which a site's upload was last accepted, 0 for none.
    """

    def __init__(self, job: Job, forms: Forms, post: Post, settings: Server) -> None:
        self._job, self._forms, self._post, self._settings = job, forms, post, settings
        self.accepted = torch.zeros(job.n, dtype=torch.long)
        self._noting = False
        self._due: tuple[int, Any] | None = None
        self._found: tuple[int, dict[int, dict[str, float]]] | None = None
        post.begin(job, forms)

    def map(self, name: str, shared: Any, tasks: Sequence[Any]) -> Iterator[Any]:
        """Results of ``name`` (train, ask or score) on every task, in their order; see `fedloom.processes.pool`.

        Raises:
            RunStopped: fewer sites than the quorum answered in time.
        """
        work: dict[str, Callable[[Any, Any], Iterator[Any]]] = {
            "train": self._train,
            "ask": self._ask,
            "score": self._score,
        }
        return work[name](shared, tasks)

    def carry(self, state: State) -> None:
        """Ask for the scores of this state in the messages of the training that comes next; `map` has them then."""
        self._noting = True
        try:
            scores_of(self._job, cast(Any, self), state)
        finally:
            self._noting = False

    def sums(self, round: int) -> Iterator[tuple[str, str, str, float]]:
        """Model, part, name and value of figures of the federation that the sites have summed after a round."""
        yield from ()

    def _train(self, shared: tuple[Any, Any], tasks: Sequence[TrainTask]) -> Iterator[Trained]:
        job, forms = self._job, self._forms
        down, server = shared
        received = {int(task.ids): for_client(down, int(task.place)) for task in tasks}
        common = forms.write_down(down, server) if is_common(down) else None
        due, self._due = self._due, None
        scored, asks = (-1, {}) if due is None else (due[0], self._asking(*due))
        letters = dict[int, Letter]()
        for c, one in received.items():
            if bool(self._post.sizes[c, 0]):
                ask = asks.pop(c, None)
                parts, there = ((), False) if ask is None else (ask.arrays, bool((ask.more or {})["global"]))
                more = self._place(c) | {"scored": -1 if ask is None else scored, "global": there}
                letters[c] = Letter("train", c, [common or forms.write_down(one, server), *parts], more, one)
        t = tasks[0].round
        need = max(1, min(self._settings.quorum, len(letters)))
        replies = self._post.until(t, letters | asks, need)
        self._found = (scored, {c: reply.metrics for c, reply in replies.items()})
        replies = {c: reply for c, reply in replies.items() if c in letters}
        if job.setting.aggregator is not None:
            heard = len({*replies, *job.kept.seen.nonzero()[:, 0].tolist()} if job.kept_fields else replies)
            try:
                job.setting.aggregator.check(heard)
            except ConfigError as error:
                raise RunStopped(Stop.TOO_FEW, f"round {t}: {error}") from error
        for task in tasks:
            c = int(task.ids)
            if c not in replies:
                none = torch.zeros(1, len(COUNTS), dtype=torch.long)
                yield Trained(torch.tensor([False]), {}, {}, 0.0, none)
                continue
            reply = replies.pop(c)
            made = made_of(reply.value, self._post.judge.model(reply.value, received[c]), _work(reply))
            yield receive(job, server, task, received[c], made)

    def _ask(self, model: Tensor, tasks: Sequence[AskTask]) -> Iterator[tuple[Tensor, Tensor]]:
        """Answers of candidates; one that gives none is worth less than any other."""
        job, forms = self._job, self._forms
        message = [forms.write_model(model)]
        clients = [int(i) for task in tasks for i in task.ids]
        letters = {c: Letter("ask", c, message) for c in clients if bool(self._post.sizes[c, 0])}
        replies = self._post.until(tasks[0].round, letters, 0)
        width = next((r.value.shape[1] for r in replies.values()), 1)
        nothing = torch.full((1, width), -torch.inf, dtype=job.oracle.dtype)
        for task in tasks:
            there = [replies.get(int(i)) for i in task.ids]
            answer = torch.cat([nothing if r is None else r.value for r in there])
            work = torch.cat([torch.zeros(1, 3, dtype=torch.long) if r is None else _work(r) for r in there])
            yield answer, asked_counts(job, answer, work)

    def _score(self, shared: tuple[Any, Tensor | None], tasks: Sequence[ScoreTask]) -> Iterator[Scores]:
        """Scores that every site finds of the models on its own samples; NaN where it is not there."""
        t, job, model = tasks[0].round, self._job, shared[1]
        if self._noting:
            self._due = t, shared
            yield from ({} for _ in tasks)
            return
        if self._found is not None and self._found[0] == t:
            found = self._found[1]
        else:
            replies = self._post.until(t, self._asking(t, shared), 0)
            found = {c: r.metrics for c, r in replies.items()}
        keys = sorted({key for metrics in found.values() for key in metrics})
        for task in tasks:
            scores: Scores = {}
            for key in keys:
                kind, part, name = key.split("/")
                values = [found.get(c, {}).get(key, torch.nan) for c in task.ids.tolist()]
                scores.setdefault((kind, part), {})[name] = torch.tensor(values, dtype=torch.float64)
            if task.common and model is not None:
                scores["global", ""] = sizes_of(job.algorithm, job.oracle.layout, model[None])
            yield scores

    def _asking(self, round: int, shared: tuple[Any, Tensor | None]) -> dict[int, Letter]:
        """Letters that ask every site that is there for scores."""
        forms, (down, model) = self._forms, shared
        common = forms.write_models(down, model) if down is None or is_common(down) else None
        return {
            c: Letter(
                "score",
                c,
                common or forms.write_models(for_client(down, c), model),
                self._place(c) | {"global": model is not None},
                round=round,
            )
            for c in self._post.nodes
        }

    def _place(self, client: int) -> dict[str, Any]:
        return {"accepted": int(self.accepted[client]), "weight": float(self._job.alpha[client])}


def _work(reply: Reply) -> Tensor:
    return torch.tensor([reply.head["work"]])
