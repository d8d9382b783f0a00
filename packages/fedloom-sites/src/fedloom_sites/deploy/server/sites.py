"""Clients of a deployment, which train, answer and score where their samples are stored."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from fedloom.analyses.patients import GroupScore
from fedloom.engine.clients.chunk import ClientOutput
from fedloom.engine.clients.remote import StreamedClients
from fedloom.engine.job import Job
from fedloom.errors import Refused, WireError
from fedloom.local.rows import Fields
from fedloom.processes.clients import AskRequest, ScoreRequest, TrainRequest
from fedloom_sites.deploy.analyses import AnswerForm
from fedloom_sites.deploy.groups import GroupSums
from fedloom_sites.deploy.protocol.envelope import SiteRequest, ValidReply
from fedloom_sites.deploy.secure.counters import (
    ABSENT_COUNTS,
    ANSWERED_COUNTS,
    SILENT_COUNTS,
    AnswerCounts,
)
from fedloom_sites.deploy.secure.protocol import Integers
from fedloom_sites.deploy.secure.terms import AnalysisStep, SessionTerms
from fedloom_sites.deploy.server.transport import Transport
from fedloom_sites.deploy.settings import Server
from fedloom_sites.transport.forms import Forms, make_output


class AnalysisSum(NamedTuple):
    """Sum in one step of an analysis.

    Attributes:
        total: sum of the vectors of all sites. None if a site could not answer.
        clients: sites that received the question and sent a vector.
        counts: number of sites that answered from their rows, and number of sites that could not answer.
    """

    total: Integers | None
    clients: list[int]
    counts: AnswerCounts


class Sites(StreamedClients):
    """Sites of a run (see `RemoteClients` and, for a buffered run, `StreamedClients`).

    Args:
        job: run on the server's side.
        forms: formats of the run's messages.
        transport: connection to the sites.
        settings: the server's settings.
        group_sums: encoding of the sums over groups.

    Attributes:
        group_sums: encoding of the sums over groups.
    """

    def __init__(self, job: Job, forms: Forms, transport: Transport, settings: Server, group_sums: GroupSums) -> None:
        super().__init__(job, transport.sizes)
        self.group_sums = group_sums
        self._forms, self._transport, self._settings = forms, transport, settings
        self._pending: ScoreRequest | None = None
        self._scores: tuple[int, Mapping[int, dict[str, float]]] | None = None
        self.patience, self.longest, self._start = settings.patience, settings.ttl, math.nan
        transport.begin(job, forms, group_sums.names)

    def score_with_training(self, request: ScoreRequest) -> None:
        """Request the scores in the messages of the next training step.

        A later call of `score` returns these scores.
        """
        self._pending = request

    def sums(self, round: int) -> Iterator[tuple[str, str, str, float]]:
        """Yield the model, part, name and value of each metric summed over the sites after a round."""
        yield from ()

    def groups(self) -> list[GroupScore]:
        """Return the scores by group after the last round, for all sites together and for each site."""
        return [*self.group_sums.scores(self._scores[1])] if self._scores is not None else []

    def train_each(self, request: TrainRequest, downloads: Mapping[int, object]) -> dict[int, ClientOutput]:
        """Train at the sites, and return every client's output.

        Raises:
            RunStopped: fewer sites than the quorum have answered in time.
        """
        forms = self._forms
        pending, self._pending = self._pending, None
        scored, asks = (-1, {}) if pending is None else (pending.round, self._make_score_requests(pending))
        letters = dict[int, SiteRequest]()
        for c, message in forms.write_downs(request, downloads):
            ask = asks.pop(c, None)
            parts, has_global = ((), False) if ask is None else (ask.arrays, bool((ask.extra_fields or {})["global"]))
            more = self._place(c) | {"scored": -1 if ask is None else scored, "global": has_global}
            letters[c] = SiteRequest("train", c, [message, *parts], more, downloads[c])
        need = max(1, min(self._settings.quorum, len(letters)))
        replies = self._transport.collect_replies(request.round, letters | asks, need)
        self._scores = (scored, {c: reply.metrics for c, reply in replies.items()})
        return {c: make_output(reply.value, _reply_work(reply)) for c, reply in replies.items() if c in letters}

    def ask_each(self, request: AskRequest, clients: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
        message = [self._forms.write_model(request.model)]
        replies = self._transport.collect_replies(
            request.round, {c: SiteRequest("ask", c, message) for c in clients}, 0
        )
        return {c: (reply.value, _reply_work(reply)) for c, reply in replies.items()}

    def begin_at(self, seconds: float) -> None:
        if math.isnan(self._start):
            self._start = self._transport.seconds() - seconds

    def seconds(self) -> float:
        return self._transport.seconds() - self._start

    def pause(self) -> None:
        self._transport.pause()

    def present(self) -> AbstractSet[int]:
        return {c for c in self._transport.nodes if self.can_train(c)}

    def is_asked(self, client: int) -> bool:
        return client in self._transport.awaited

    def ask_to_train(self, client: int, round: int, down: Fields, server: Fields | None) -> None:
        more = self._place(client) | {"scored": -1, "global": False}
        node, message = self._transport.nodes[client], self._forms.write_down(down, server)
        self._transport.post(round, [SiteRequest("train", client, [message], more, down, node)])

    def arrived(self) -> tuple[dict[int, ClientOutput], set[int]]:
        replies, failed = self._transport.arrived()
        return {c: make_output(reply.value, _reply_work(reply)) for c, reply in replies.items()}, failed

    def give_up(self, client: int) -> None:
        self._transport.give_up(client)

    def score_each(self, request: ScoreRequest) -> Mapping[int, dict[str, float]]:
        """Return the scores that arrived with the training, or request them from sites that are not training now.

        After the last round, every site computes scores.
        """
        if self._scores is None or self._scores[0] != request.round:
            letters, busy = self._make_score_requests(request), self._transport.awaited
            if busy and request.round < self._job.setting.rounds:
                letters = {c: letter for c, letter in letters.items() if c not in busy}
            replies = self._transport.collect_replies(request.round, letters, 0)
            self._scores = request.round, {c: reply.metrics for c, reply in replies.items()}
        return self._scores[1]

    def analysis_terms(self, name: str, request: ScoreRequest | None) -> SessionTerms:
        """Return the terms that are common to all steps of an analysis.

        Args:
            name: the analysis's name.
            request: request for the models that the analysis reads. None if the analysis reads no models.
        """
        cohort, transport = sorted(self._transport.nodes), self._transport
        digests = () if request is None else self._model_digests(request, cohort[0])
        return SessionTerms(
            round=self._job.setting.rounds, trains=False, sizes=tuple(map(tuple, transport.sizes.tolist())),
            cohort=tuple(cohort), accepted=tuple(self._place(c)["accepted"] for c in cohort), models=digests,
            common=request is not None and request.model is not None, figures=tuple(transport.figures),
            question=AnalysisStep.create(name, 0, b""),
        )  # fmt: skip

    def analysis_sum(
        self, terms: SessionTerms, form: AnswerForm, request: ScoreRequest | None, clients: Sequence[int]
    ) -> AnalysisSum:
        """Return the sum of the sites' vectors in a step.

        Args:
            terms: terms that contain the question.
            form: format of a single vector.
            request: request for the models that the analysis reads. None if the analysis reads no models.
            clients: sites that took part in the previous steps. None before the first step.

        Raises:
            RunStopped: one of these sites does not answer, or fewer sites than the quorum answer.
        """
        need, letters = (
            len(clients) or self._settings.quorum,
            {} if request is None else self._make_score_requests(request),
        )

        count = len(ANSWERED_COUNTS)

        def read(message: bytes) -> tuple[Integers, tuple[int, ...]]:
            try:
                numbers = np.frombuffer(message, dtype="<u8").astype(np.uint64, copy=False)
                vector, counts = numbers[:-count], tuple(numbers[-count:].tolist())
                form.decode(vector, 1)
                if counts not in (ABSENT_COUNTS, ANSWERED_COUNTS, SILENT_COUNTS):
                    raise ValueError(f"a site has impossible counters: {counts}")
            except (Refused, ValueError) as error:
                raise WireError(str(error)) from None
            return vector, counts

        asks = dict[int, SiteRequest]()
        for c in clients or terms.cohort:
            models = letters[c].arrays if c in letters else ()
            site_terms = terms if request is None else terms.with_(models=self._model_digests(request, c))
            arrays, accepted = [site_terms.encode(), *models], {"accepted": terms.bases[c]}
            asks[c] = SiteRequest("analysis", c, arrays, accepted, read=read, max_reply_bytes=8 * (form.length + count))
        replies = self._transport.collect_replies(self._job.setting.rounds, asks, need)
        vectors, counts = zip(*(reply.value for _, reply in sorted(replies.items())), strict=True)
        counted = AnswerCounts(len(replies), counts.count(ANSWERED_COUNTS), counts.count(SILENT_COUNTS))
        total: Integers | None = None if counted.silent else np.sum(vectors, axis=0, dtype=np.uint64)
        return AnalysisSum(total, sorted(replies), counted)

    def share_result(self, name: str, table: pa.Table) -> None:
        """Send the result of an analysis to the connected sites."""
        content = json.dumps({"analysis": name, "columns": table.to_pydict()}).encode()
        asks = {c: SiteRequest("result", c, [content]) for c in self._transport.nodes}
        self._transport.collect_replies(self._job.setting.rounds, asks, 0)

    def _model_digests(self, request: ScoreRequest, client: int) -> tuple[str, ...]:
        """Return the digests of the models that a site receives."""
        return tuple(hashlib.sha256(m).hexdigest() for m in self._make_score_requests(request)[client].arrays)

    def _make_score_requests(self, request: ScoreRequest) -> dict[int, SiteRequest]:
        """Return requests for scores to every connected site."""
        has_global, t = {"global": request.model is not None}, request.round
        return {
            c: SiteRequest("score", c, parts, self._place(c) | has_global, round=t)
            for c, parts in self._forms.write_models_of(request, self._transport.nodes)
        }

    def _place(self, client: int) -> dict[str, Any]:
        return {"accepted": int(self.accepted[client]), "weight": float(self._job.alpha[client])}


def _reply_work(reply: ValidReply) -> Tensor:
    return torch.tensor([reply.head["work"]])
