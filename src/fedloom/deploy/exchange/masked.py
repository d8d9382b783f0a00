"""Masked: the sites of a run under secure aggregation, of which the server gets sums (`sessions`)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.deploy.exchange.forms import Forms, is_common
from fedloom.deploy.exchange.post import Letter, Post
from fedloom.deploy.exchange.replies import absolute
from fedloom.deploy.exchange.secure import Broken, Integers
from fedloom.deploy.exchange.sessions import Sessions
from fedloom.deploy.exchange.terms import Terms
from fedloom.deploy.noise import SharedMean
from fedloom.deploy.settings import Server
from fedloom.deploy.site.vectors import Figures, Uploads
from fedloom.deploy.sites import Sites
from fedloom.engine.job import Job
from fedloom.engine.privacy import accounted
from fedloom.engine.records import Scores
from fedloom.engine.scoring import sizes_of
from fedloom.errors import GivenUp, Refused, RunStopped
from fedloom.processes.chunks import COUNTS, ScoreTask, Trained, TrainTask

Figure = tuple[float, float, int]
"""A score's mean over sites, over samples, and of how many sites."""


class MaskedSites(Sites):
    """The sites of a run whose uploads, and scores, are summed under masks; see `Sites`."""

    def __init__(self, job: Job, forms: Forms, post: Post, settings: Server) -> None:
        super().__init__(job, forms, post, settings)
        assert settings.secure is not None
        self._sessions, self._agreed = Sessions(post, settings), settings.secure
        self._uploads, self._figures = Uploads(job, forms.idle), Figures(job)
        private = accounted(job.setting.channel, job.setting.aggregator) is not None
        self._tallies = settings.secure.scores == "masked" and not private
        self._tallied: tuple[int, dict[tuple[str, str, str], Figure]] = -1, {}

    def sums(self, round: int) -> Iterator[tuple[str, str, str, float]]:
        t, found = self._tallied
        for (model, part, name), (mean, weighted, sites) in (found if t == round else {}).items():
            yield model, part, f"{name}/mean", mean
            yield model, part, f"{name}/weighted", weighted
            yield model, part, f"{name}/sites", sites

    def _train(self, shared: tuple[Any, Any], tasks: Sequence[TrainTask]) -> Iterator[Trained]:
        job, forms, (down, server), t = self._job, self._forms, shared, tasks[0].round
        if not is_common(down):
            raise Refused(
                f"{type(job.algorithm).__name__} sends every client another download; under secure aggregation all "
                "get the same, so that no site can be singled out"
            )
        tasks_of = {int(task.ids): task for task in tasks if bool(self._post.sizes[int(task.ids), 0])}
        download = forms.write_down(down, server)
        scored, asks = self._riding(t, tasks_of)
        scale = max((abs(float(task.share)) for task in tasks_of.values()), default=0.0) or 1.0
        terms = self._terms(t, tasks_of, asks, scored, download)
        n = self._uploads.length
        length = n + (self._figures.length if scored >= 0 and self._tallies else 0)

        def letter(c: int, inbox: bytes) -> Letter:
            models = asks[c].arrays if c in asks else ()
            return Letter("masked", c, [download, terms.encode(), inbox, *models], self._accepted(c))

        def read(total: Integers, count: int) -> tuple[Any, Tensor, dict[Any, Figure]]:
            sums, work = self._uploads.decode(total[:n], count, scale)
            self._check_length(sums, count, scale)
            return sums, work, self._figures.decode(total[n:], count) if len(total) > n else {}

        found = self._sessions.sum(terms, letter, length, read)
        first, work, figures = found.value
        accepted = found.clients
        if scored >= 0:
            self._tallied = scored, figures
        paper = [int(letter.lengths()[1]) for letter in (job.messages.up(forms.idle), job.messages.down(down, server))]
        traffic = [found.traffic[0], found.traffic[1] + len(download)]
        counts = dict.fromkeys(tasks_of, torch.zeros(1, len(COUNTS), dtype=torch.long))
        for k, c in enumerate(accepted):
            counts[c] = torch.tensor([[*(work.tolist() if k == 0 else [0, 0, 0]), *traffic, *paper]])
        alike = isinstance(job.setting.aggregator, SharedMean)
        for task in tasks:
            c = int(task.ids)
            if c not in accepted:
                yield Trained(torch.tensor([False]), {}, {}, 0.0, torch.zeros(1, len(COUNTS), dtype=torch.long))
                continue
            yield Trained(torch.tensor([True]), first, {}, 1.0 if alike else float(task.share), counts[c])
            first = {}  # the first brings the sum

    def _riding(self, t: int, cohort: Collection[int]) -> tuple[int, dict[int, Letter]]:
        """The round whose models are scored with the training, and what asks for it: where all sites train.

        Otherwise, or if these scores were asked for already, they have a session of their own, which comes first. A
        sum of the training that was asked for already has the scores or has them not.
        """
        due, self._due = self._due, None
        if due is None:
            return -1, {}
        self._found = due[0], {}
        before, alone = self._sessions.asked_for({"uploads": t}), self._sessions.asked_for({"scores": due[0]})
        rides = set(self._post.nodes) <= set(cohort) and alone is None
        if rides if before is None else before.sums.get("scores") == due[0]:
            return due[0], self._asking(*due)
        if self._tallies:
            self._tally(*due)
        else:
            self._post.until(due[0], self._asking(*due), 0)
        return -1, {}

    def _score(self, shared: tuple[Any, Tensor | None], tasks: Sequence[ScoreTask]) -> Iterator[Scores]:
        """The sums of all sites' scores, which `sums` then gives; of a single client nothing is known."""
        if not self._tallies:
            yield from super()._score(shared, tasks)
            return
        t, model = tasks[0].round, shared[1]
        if self._noting:
            self._due = t, shared
        elif self._tallied[0] != t:
            self._tally(t, shared)
        sizes = {} if model is None else sizes_of(self._job.algorithm, self._job.oracle.layout, model[None])
        for task in tasks:
            yield {("global", ""): sizes} if task.common and sizes else {}

    def _tally(self, t: int, shared: tuple[Any, Tensor | None]) -> None:
        """Sum the scores of all sites that are there, in a session of its own; without a sum the run goes on."""
        asks = self._asking(t, shared)
        terms = self._terms(t, asks, asks, t)

        def letter(c: int, inbox: bytes) -> Letter:
            return Letter("tally", c, [terms.encode(), inbox, *asks[c].arrays], self._accepted(c))

        self._tallied = t, {}
        try:
            self._tallied = t, self._sessions.sum(terms, letter, self._figures.length, self._figures.decode).value
        except (Broken, GivenUp, RunStopped) as error:
            self._post.note("scores given up", t, asks, str(error))

    def _terms(
        self, t: int, cohort: Collection[int], asks: Mapping[int, Letter], scored: int, download: bytes | None = None
    ) -> Terms:
        """What all sites of a session are asked."""
        first = next(iter(asks.values()), None)
        digests = [hashlib.sha256(m).hexdigest() for m in (first.arrays if first is not None else ())]
        return Terms(
            round=t,
            trains=download is not None,
            sizes=tuple(map(tuple, self._post.sizes.tolist())),
            cohort=tuple(sorted(cohort)),
            download="" if download is None else hashlib.sha256(download).hexdigest(),
            scored=scored,
            common=first is not None and bool((first.more or {})["global"]),
            models=tuple(digests),
        )

    def _accepted(self, client: int) -> dict[str, Any]:
        return {"accepted": int(self.accepted[client])}

    def _check_length(self, sums: Mapping[str, Tensor], count: int, scale: float) -> None:
        """That differences are no longer than they can be together; a change of a kept row is one of two.

        Raises:
            Broken: they are.
        """
        bound, squares = self._agreed.norm_bound, 0.0
        if bound is None or isinstance(self._job.setting.aggregator, SharedMean):
            return
        down = self._job.oracle.layout.d
        for name, value in sums.items():
            kind = self._job.fields[name]
            if not absolute(kind, value.shape[0], down):
                squares += float((value / (2 if kind.keeps else 1 if kind.accumulates else scale)).square().sum())
        if squares**0.5 > count * bound * (1 + 1e-6) + 1e-6:
            raise Broken(
                f"the sum of {count} sites is {squares**0.5:.4g} long, {count * bound:.4g} is the most it can be"
            )
