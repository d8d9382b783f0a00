"""Masked: the sites of a run under secure aggregation, of which the server gets sums (`secure`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.data.federation import PARTS
from fedloom.deploy.exchange import secure
from fedloom.deploy.exchange.forms import Forms, for_client, is_common
from fedloom.deploy.exchange.identity import NONCE, verifying_key
from fedloom.deploy.exchange.post import Letter, Post
from fedloom.deploy.exchange.replies import absolute
from fedloom.deploy.exchange.secure import Broken, Integers
from fedloom.deploy.exchange.unmasked import Asked, Unmasked
from fedloom.deploy.noise import SharedMean
from fedloom.deploy.settings import Server
from fedloom.deploy.site.vectors import Figures, Uploads
from fedloom.deploy.sites import Sites
from fedloom.engine.job import Job
from fedloom.engine.privacy import accounted
from fedloom.engine.records import Scores
from fedloom.engine.scoring import sizes_of
from fedloom.errors import GivenUp, Refused, RunStopped, Stop, WireError
from fedloom.processes.chunks import COUNTS, ScoreTask, Trained, TrainTask

ATTEMPTS = 3
"""How often the shares of a sum are asked for before it is given up."""


class _Sum(NamedTuple):
    """A sum of a session: the vector, whose it is, and bytes per site up and down."""

    total: Integers
    clients: list[int]
    traffic: list[int]


class MaskedSites(Sites):
    """The sites of a run whose uploads, and scores, are summed under masks; see `Sites`."""

    def __init__(self, job: Job, forms: Forms, post: Post, settings: Server) -> None:
        super().__init__(job, forms, post, settings)
        assert settings.secure is not None
        self._agreed = settings.secure
        self._agreement = settings.secure.digest(settings.fingerprint)
        self._public = {c: verifying_key(line, f"client {c}") for c, line in enumerate(settings.secure.keys)}
        self._uploads, self._figures = Uploads(job, forms.idle), Figures(job)
        private = accounted(job.setting.channel, job.setting.aggregator) is not None
        self._tallies = settings.secure.scores == "masked" and not private
        self._unmasked = Unmasked(settings.checkpoints)
        self._tallied: tuple[int, dict[tuple[str, str, str], tuple[float, float, int]]] = -1, {}

    def sums(self, round: int) -> Iterator[tuple[str, str, str, float]]:
        t, found = self._tallied
        for (model, part, name), (mean, weighted, sites) in (found if t == round else {}).items():
            yield model, part, f"{name}/mean", mean
            yield model, part, f"{name}/weighted", weighted
            yield model, part, f"{name}/sites", sites

    def _train(self, shared: tuple[Any, Any], tasks: Sequence[TrainTask]) -> Iterator[Trained]:
        job, forms, (down, server), t = self._job, self._forms, shared, tasks[0].round
        tasks_of = {int(task.ids): task for task in tasks if bool(self._post.sizes[int(task.ids), 0])}
        received = {c: for_client(down, int(task.place)) for c, task in tasks_of.items()}
        common = forms.write_down(down, server) if is_common(down) else None
        downs = {c: common or forms.write_down(one, server) for c, one in received.items()}
        scored, asks = self._riding(t, tasks_of)
        scale = max((abs(float(task.share)) for task in tasks_of.values()), default=0.0) or 1.0
        parts = self._parts(tasks_of) if asks else []
        length = self._uploads.length + (self._figures.length if scored >= 0 and self._tallies else 0)

        def letter(c: int, inbox: bytes) -> Letter:
            arrays = [downs[c], inbox, *(asks[c].arrays if c in asks else ())]
            there = bool((asks[c].more or {})["global"]) if c in asks else False
            more = self._place(c) | {"share": float(tasks_of[c].share) / scale, "mass": float(job.masses[c])}
            return Letter("masked", c, arrays, more | {"scored": scored, "global": there, "parts": parts})

        found = self._sum(t, [*tasks_of], letter, length, {"uploads": t, "scores": scored})
        accepted, n = found.clients, self._uploads.length
        try:
            sums, work = self._uploads.decode(found.total[:n], len(accepted), scale)
            self._check_length(sums, len(accepted), scale)
            if scored >= 0:
                self._keep(scored, found.total[n:], accepted)
        except Refused as error:
            raise RunStopped(Stop.TOO_FEW, f"round {t}: {error}") from error
        paper = [int(letter.lengths()[1]) for letter in (job.messages.up(forms.idle), job.messages.down(down, server))]
        traffic = [found.traffic[0], found.traffic[1] + max(map(len, downs.values()))]
        counts = dict.fromkeys(tasks_of, torch.zeros(1, len(COUNTS), dtype=torch.long))
        for k, c in enumerate(accepted):
            counts[c] = torch.tensor([[*(work.tolist() if k == 0 else [0, 0, 0]), *traffic, *paper]])
        first: dict[str, Tensor] = sums
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
        before, alone = self._unmasked.of({"uploads": t}), self._unmasked.of({"scores": due[0]})
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
        parts = self._parts(asks)

        def letter(c: int, inbox: bytes) -> Letter:
            more = self._place(c) | {"global": bool((asks[c].more or {})["global"]), "parts": parts}
            return Letter("tally", c, [inbox, *asks[c].arrays], more)

        self._tallied = t, {}
        try:
            found = self._sum(t, [*asks], letter, self._figures.length, {"scores": t})
            self._keep(t, found.total, found.clients)
        except (Broken, GivenUp, RunStopped) as error:
            self._post.note("scores given up", t, asks, str(error))

    def _keep(self, t: int, total: Integers, clients: Collection[int]) -> None:
        self._tallied = t, self._figures.decode(total, len(clients)) if len(total) else {}

    def _parts(self, clients: Collection[int]) -> list[str]:
        """The parts of which `FEWEST` of any threshold of these clients have samples: no sum is of one or two scores."""
        lacking = {part: sum(not self._post.sizes[c, k] for c in clients) for k, part in enumerate(PARTS)}
        return [part for part, count in lacking.items() if self._agreed.threshold - count >= secure.FEWEST]

    def _sum(
        self,
        t: int,
        clients: Collection[int],
        letter: Callable[[int, bytes], Letter],
        length: int,
        sums: dict[str, int],
    ) -> _Sum:
        """The sum of the sites' vectors; one that was asked for before a stop is told now.

        Args:
            t: round of the session.
            clients: sites to be summed.
            letter: asks a client for its vector; takes the shares of the others too.
            length: of a vector.
            sums: the round of what is summed, by what that is; -1 for none.

        Raises:
            RunStopped: fewer than the threshold take part.
            GivenUp: it was asked for too often.
        """
        sums = {what: r for what, r in sums.items() if r >= 0}
        asked = self._unmasked.of(sums) or self._collected(t, clients, letter, length, sums)
        asked = asked if asked.told else self._told(asked)
        n, part = len(secure.read_adverts(asked.adverts)), 4 + secure.SEALED
        up = len(asked.adverts) // n + n * part + 8 * length + n * (4 + secure.KEY)
        return _Sum(asked.total, asked.clients, [up, len(asked.adverts) + n * (part + 4)])

    def _collected(
        self,
        t: int,
        clients: Collection[int],
        letter: Callable[[int, bytes], Letter],
        length: int,
        sums: dict[str, int],
    ) -> Asked:
        """The first three steps of a session: the sum under its masks. Until the fourth, nobody can tell anything."""
        nonce, agreed = os.urandom(NONCE), self._agreed
        cohort = self._apart(t, clients, sums)
        if len(cohort) < agreed.threshold:
            raise RunStopped(
                Stop.TOO_FEW, f"round {t}: {len(cohort)} sites would be summed, the threshold is {agreed.threshold}"
            )
        name = secure.session_name(self._agreement, t, nonce)
        adverts = self._step(t, nonce, {c: Letter("keys", c) for c in cohort}, lambda m: self._advert(name, m))
        adverts = {c: advert for c, advert in adverts.items() if advert.client == c}
        everyone = secure.write_adverts(adverts.values())
        ask = {c: Letter("shares", c, [everyone]) for c in adverts}
        sealed = self._step(t, nonce, ask, lambda m: secure.read(m, secure.SEALED))
        sealed = {p: sent for p, sent in sealed.items() if set(sent) == set(adverts) - {p}}
        inbox = {c: secure.write({p: sent[c] for p, sent in sealed.items() if p != c}) for c in sealed}
        masked = self._step(t, nonce, {c: letter(c, inbox[c]) for c in sealed}, lambda m: _vector(m, length))
        if self._apart(t, masked, sums) != [*masked]:
            raise RunStopped(Stop.TOO_FEW, f"round {t}: another sum would tell what a single site sent")
        total: Integers = np.sum([*masked.values()], axis=0, dtype=np.uint64)
        return Asked(t, nonce, everyone, [*sealed], [*masked], sums, total)

    def _told(self, asked: Asked) -> Asked:
        """The fourth step: any threshold of the sites of a sum take its masks off."""
        t, agreed = asked.round, self._agreed
        if asked.attempts >= ATTEMPTS:
            why = f"round {t}: the sum was asked for {ATTEMPTS} times, and never told"
            raise GivenUp(f"{why}; a sum of other sites would tell the difference", asked.clients)
        self._unmasked.keep(asked := asked._replace(attempts=asked.attempts + 1))
        arrived = secure.write(dict.fromkeys(asked.clients, b""))
        ask = {c: Letter("unmask", c, [arrived]) for c in asked.clients}
        told = self._step(t, asked.nonce, ask, lambda m: secure.read(m, secure.KEY))
        told = {c: parts for c, parts in told.items() if set(parts) == set(asked.shared)}
        name = secure.session_name(self._agreement, t, asked.nonce)
        session = secure.session_of(name, agreed.threshold, secure.read_adverts(asked.adverts))
        try:
            total = secure.unmasked(session, asked.shared, asked.clients, asked.total, told)
        except Broken as error:
            raise RunStopped(Stop.TOO_FEW, f"round {t}: {error}") from error
        self._unmasked.keep(asked := asked._replace(total=total, told=True))
        return asked

    def _step(self, t: int, nonce: bytes, letters: dict[int, Letter], read: Callable[[bytes], Any]) -> dict[int, Any]:
        """What the sites answer in a step of a session, by client in rising order."""
        letters = {c: x._replace(more={**(x.more or {}), "session": nonce}, read=read) for c, x in letters.items()}
        last = any(x.kind == "unmask" for x in letters.values())
        need = max(self._agreed.threshold, 1 if last else min(self._settings.quorum, len(letters)))
        return {c: reply.value for c, reply in sorted(self._post.until(t, letters, need).items())}

    def _apart(self, t: int, clients: Collection[int], sums: Mapping[str, int]) -> list[int]:
        """The sites of a sum on a model of which one was asked for and given up: those of that, not one more or less.

        Where so many differ as one, both sums together would tell what a single site sent, if the first arrives late.
        """
        before = self._unmasked.newest("uploads") if "uploads" in sums else None
        if before is None or before.told or len(apart := {*clients} ^ {*before.clients}) != 1:
            return [*clients]
        if apart <= {*clients}:
            return [c for c in clients if c not in apart]
        lost = self._post.members[apart.pop()].site
        raise RunStopped(
            Stop.TOO_FEW, f"round {t}: a sum without {lost} and the one that was given up would tell what it sent"
        )

    def _advert(self, name: bytes, message: bytes) -> secure.Advert:
        """The one advertisement of a message.

        Raises:
            WireError: the bytes are not that, or nobody's keys in this session: the agreements may differ.
        """
        found = secure.read_adverts(message)
        if len(found) != 1:
            raise WireError(f"one advertisement is expected, got {len(found)}")
        try:
            secure.check_adverts(name, found, self._public)
        except Broken as error:
            raise WireError(f"{error}; do both sides have the same agreement?") from None
        return found[0]

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


def _vector(message: bytes, length: int) -> Integers:
    """A masked vector.

    Raises:
        WireError: its length is another.
    """
    if len(message) != 8 * length:
        raise WireError(f"a masked vector has {8 * length} bytes, got {len(message)}")
    return np.frombuffer(message, dtype="<u8").astype(np.uint64, copy=False)
