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
from fedloom.deploy.exchange.unmasked import Unmasked
from fedloom.deploy.noise import SharedMean
from fedloom.deploy.settings import Server
from fedloom.deploy.site.vectors import Figures, Uploads
from fedloom.deploy.sites import Sites
from fedloom.engine.job import Job
from fedloom.engine.privacy import accounted
from fedloom.engine.records import Scores
from fedloom.engine.scoring import sizes_of
from fedloom.errors import FedloomError, Refused, RunStopped, Stop, WireError
from fedloom.processes.chunks import COUNTS, ScoreTask, Trained, TrainTask

ATTEMPTS = 3
"""Sessions in which a sum is asked for before it is given up."""


class GivenUp(FedloomError):
    """A round whose sum cannot be told any more: it was asked for, and of the sites that it is of some are lost.

    Args:
        reason: a sentence.
        clients: sites that the sum was to be of.
    """

    def __init__(self, reason: str, clients: Collection[int]) -> None:
        self.clients = sorted(clients)
        super().__init__(reason)


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
        scored, asks = self._riding(tasks_of)
        scale = max((abs(float(task.share)) for task in tasks_of.values()), default=0.0) or 1.0
        parts = self._parts(tasks_of) if asks else []
        length = self._uploads.length + (self._figures.length if asks and self._tallies else 0)

        def letter(c: int, inbox: bytes) -> Letter:
            arrays = [downs[c], inbox, *(asks[c].arrays if c in asks else ())]
            there = bool((asks[c].more or {})["global"]) if c in asks else False
            more = self._place(c) | {"share": float(tasks_of[c].share) / scale}
            return Letter("masked", c, arrays, more | {"scored": scored, "global": there, "parts": parts})

        found = self._session(t, [*tasks_of], letter, length, {"uploads": t, "scores": scored})
        accepted, n = found.clients, self._uploads.length
        try:
            sums, work = self._uploads.decode(found.total[:n], len(accepted), scale)
            self._check_length(sums, len(accepted), scale)
            if asks:
                self._keep(scored, found.total[n:], accepted)
        except Refused as error:
            raise RunStopped(Stop.DIVERGED, f"round {t}: {error}") from error
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

    def _riding(self, cohort: Collection[int]) -> tuple[int, dict[int, Letter]]:
        """The round whose models are scored with the training, and what asks for it: where all sites train.

        Otherwise, or if these scores were asked for already, they have a session of their own, which comes first.
        """
        due, self._due = self._due, None
        if due is None:
            return -1, {}
        self._found = due[0], {}
        if set(self._post.nodes) <= set(cohort) and self._unmasked.of("scores", due[0]) is None:
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
            found = self._session(t, [*asks], letter, self._figures.length, {"scores": t})
            self._keep(t, found.total, found.clients)
        except (Broken, GivenUp, RunStopped) as error:
            self._post.note("scores given up", t, asks, str(error))

    def _keep(self, t: int, total: Integers, clients: Collection[int]) -> None:
        self._tallied = t, self._figures.decode(total, len(clients)) if len(total) else {}

    def _parts(self, clients: Collection[int]) -> list[str]:
        """The parts of which two of any threshold of these clients have samples: no sum is one site's score."""
        lacking = {part: sum(not self._post.sizes[c, k] for c in clients) for k, part in enumerate(PARTS)}
        return [part for part, count in lacking.items() if self._agreed.threshold - count >= 2]

    def _session(
        self,
        t: int,
        clients: Collection[int],
        letter: Callable[[int, bytes], Letter],
        length: int,
        sums: dict[str, int],
    ) -> _Sum:
        """The sum of the sites' vectors.

        Args:
            t: round of the session.
            clients: sites to be summed.
            letter: asks a client for its vector; takes the shares of the others too.
            length: of a vector.
            sums: the round of what is summed, by what that is; -1 for none.

        Raises:
            RunStopped: fewer than the threshold take part.
            GivenUp: it was asked for before, and can be told of the same sites only, of which one is lost.
        """
        nonce, agreed, post = os.urandom(NONCE), self._agreed, self._post
        sums = {what: r for what, r in sums.items() if r >= 0}
        before = self._before(sums)
        cohort = [c for c in clients if before is None or c in before]
        if before is not None and set(cohort) != before:
            raise GivenUp(self._lost(t, before - set(cohort)), before)
        if len(cohort) < agreed.threshold:
            raise RunStopped(
                Stop.TOO_FEW, f"round {t}: {len(cohort)} sites would be summed, the threshold is {agreed.threshold}"
            )

        def step(asked: Callable[[int], Letter], to: Collection[int], read: Callable[[bytes], Any]) -> dict[int, Any]:
            found = {c: asked(c) for c in to}
            letters = {c: x._replace(more={**(x.more or {}), "session": nonce}, read=read) for c, x in found.items()}
            last = any(x.kind == "unmask" for x in letters.values())
            need = max(agreed.threshold, 1 if last else min(self._settings.quorum, len(letters)))
            try:
                replies = post.until(t, letters, len(before) if before and not last else need)
            except RunStopped as error:
                if before is None or last:
                    raise
                raise GivenUp(f"{self._lost(t, before)}: {error.detail}", before) from error
            return {c: reply.value for c, reply in sorted(replies.items())}

        name = secure.session_name(self._agreement, t, nonce)
        adverts = step(lambda c: Letter("keys", c), cohort, lambda m: self._advert(name, m))
        adverts = {c: advert for c, advert in adverts.items() if advert.client == c}
        session = secure.session_of(name, agreed.threshold, adverts.values())
        everyone = secure.write_adverts(adverts.values())
        sealed = step(lambda c: Letter("shares", c, [everyone]), adverts, lambda m: secure.read(m, secure.SEALED))
        sealed = {p: sent for p, sent in sealed.items() if set(sent) == set(adverts) - {p}}
        inbox = {c: secure.write({p: sent[c] for p, sent in sealed.items() if p != c}) for c in sealed}
        masked = step(lambda c: letter(c, inbox[c]), sealed, lambda m: _vector(m, length))
        arrived = secure.write(dict.fromkeys(masked, b""))
        if before is not None and set(masked) != before:
            raise GivenUp(self._lost(t, before - set(masked)), before)
        self._unmasked.note(sums, masked)
        told = step(lambda c: Letter("unmask", c, [arrived]), masked, lambda m: secure.read(m, secure.KEY))
        told = {c: parts for c, parts in told.items() if set(parts) == set(sealed)}
        try:
            total = secure.unmasked(session, [*sealed], masked, told)
        except Broken as error:
            raise RunStopped(Stop.TOO_FEW, f"round {t}: {error}") from error
        n, part, advert = len(adverts), 4 + secure.SEALED, len(everyone) // len(adverts)
        up = advert + n * part + 8 * length + n * (4 + secure.KEY)
        return _Sum(total, [*masked], [up, n * (advert + part + 4)])

    def _before(self, sums: Mapping[str, int]) -> set[int] | None:
        """Whose sum of any of these was asked for before a stop.

        Raises:
            GivenUp: for the `ATTEMPTS`-th time.
        """
        for what, t in sums.items():
            found = self._unmasked.of(what, t)
            if found is not None:
                clients, attempts = found
                if attempts >= ATTEMPTS:
                    raise GivenUp(f"round {t}: the sum was asked for {attempts} times, and never told", clients)
                return clients
        return None

    def _lost(self, t: int, lost: Collection[int]) -> str:
        names = ", ".join(self._post.members[c].site for c in sorted(lost))
        return f"round {t} was to be summed with {names}, and a sum of other sites would tell the difference"

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
