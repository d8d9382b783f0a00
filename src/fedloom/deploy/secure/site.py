"""Answers of a site under secure aggregation: its steps of a session, in which it trains and scores under masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from fedloom.deploy.noise import SharedMean
from fedloom.deploy.protocol.envelope import STEPS, Envelope, Kind
from fedloom.deploy.protocol.lengths import lengths
from fedloom.deploy.secure.member import SessionMember
from fedloom.deploy.secure.protocol import ACCUSES, Broken
from fedloom.deploy.secure.terms import Terms, check_models, check_terms, read_terms
from fedloom.deploy.secure.vectors import ScoreVector, UploadVector
from fedloom.deploy.settings import Site, bound_of
from fedloom.deploy.site.cox import SiteCox
from fedloom.deploy.site.groups import SiteGroups
from fedloom.deploy.site.local_data import part_sizes
from fedloom.deploy.site.plain import Answer, metrics_of, single
from fedloom.deploy.site.state import Generation
from fedloom.deploy.site.trainer import Trainer
from fedloom.engine.clients.chunk import ClientOutput, usable
from fedloom.engine.job import Job
from fedloom.errors import Refused, WireError


class MaskedAnswers:
    """The answers of a site with secure aggregation.

    Args:
        site: its settings.
        key: its signing key.
        trainer: its training and its scores.
        folder: of its state in this experiment.
    """

    def __init__(self, site: Site, key: Ed25519PrivateKey, trainer: Trainer, folder: Path) -> None:
        assert site.secure is not None
        self._site, self._agreed, self._trainer = site, site.secure, trainer
        self._member, self._groups = SessionMember(site, key, folder), SiteGroups(trainer)
        self._cox = SiteCox(trainer, folder)
        self._last: tuple[object, Job] | None = None

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of messages that are answered."""
        return (*STEPS, "fitted") if self._trainer.scoring == "masked" else (*STEPS, "score", "fitted")

    @cached_property
    def figures(self) -> str:
        """The figures and groups that the site's samples define, as bits in hexadecimal digits; none without sums."""
        trainer, client = self._trainer, self._site.client
        if not part_sizes(trainer.fed, client)[0]:
            return ""
        vector, groups, bits = ScoreVector(trainer.job), self._groups, 0
        if trainer.scoring == "masked":
            bits = vector.definable(client) | groups.sums.bits(groups.members) << len(vector.figures)
        bits |= self._cox.bits << len(vector.figures) + len(groups.sums.groups)
        return f"{bits:x}" if bits else ""

    def answer(self, envelope: Envelope) -> Answer:
        """The answer to a step of a session, or to a request for the site's own scores.

        Raises:
            FedloomError: there is none; the sentence has the reason.
        """
        head, arrays, member, kind = envelope.head, envelope.arrays, self._member, envelope.head["kind"]
        if kind == "score":
            return self._scores(envelope)
        if kind == "fitted":
            self._cox.keep(single(arrays))
            return {"samples": part_sizes(self._trainer.fed, self._site.client)[0]}, [], None
        if kind in ("masked", "tally"):
            return {}, [self._masked(envelope)], None
        if kind == "keys":
            self._cox.begin()
        fewest, most = (0, 0) if kind == "keys" else (1, 2) if kind == "unmask" else (1, 1)
        if not fewest <= len(arrays) <= most:
            raise WireError(f"{len(arrays)} arrays, {fewest} to {most} are expected")
        steps: dict[str, Callable[..., bytes]] = {
            "keys": member.keys, "shares": member.shares, "open": member.open, "agree": member.agree,
            "count": member.count, "unmask": member.reveal,
        }  # fmt: skip
        return {}, [steps[kind](head["round"], head["session"], *arrays)], None

    def _scores(self, envelope: Envelope) -> Answer:
        head, trainer = envelope.head, self._trainer
        job, _ = trainer.with_local_data(head["accepted"], trainer.weighed(head["weight"]))
        scores = trainer.scores(job, envelope.arrays, head["round"], common=head["global"])
        return {"samples": part_sizes(trainer.fed, self._site.client)[0]}, [], metrics_of(scores)

    def _masked(self, envelope: Envelope) -> bytes:
        """What a site trained, its scores of the models that it received, or both, under its masks."""
        head, t, trains = envelope.head, envelope.head["round"], envelope.head["kind"] == "masked"
        trainer, client = self._trainer, self._site.client
        if len(envelope.arrays) < 2 + trains:
            raise WireError(f"{len(envelope.arrays)} arrays, at least {2 + trains} are expected")
        download = envelope.arrays[0] if trains else None
        message, inbox, *models = envelope.arrays[trains:]
        terms, sizes = read_terms(message), part_sizes(trainer.fed, client)
        if (terms.round, terms.trains) != (t, trains):
            raise Broken(f"the terms are of round {terms.round}, the message is of round {t}")
        check_terms(terms, client, sizes, self.figures, self._site.clients, head["accepted"])
        check_models(terms, download, models)
        accusations = self._member.receive(t, head["session"], inbox, terms, terms.weights(self._weighed(terms)))
        if accusations:
            return ACCUSES + accusations
        if terms.question is not None:
            first = len(ScoreVector(trainer.job).figures) + len(self._groups.sums.groups)
            return self._member.masked(t, head["session"], *self._cox.masked_vector(terms, first))
        job, state = trainer.with_local_data(head["accepted"], self._weighed(terms))
        vectors = []
        if terms.scored >= 0:
            scores = trainer.scores(job, models, terms.scored, common=terms.common)
            if trainer.scoring == "masked":
                vector, agreed = ScoreVector(job), (self._agreed.threshold, self._agreed.max_share)
                summed = terms.summed(*agreed, [part for part, _ in vector.figures])
                vectors.append(vector.encode(scores, sizes, summed, weighs=not terms.is_dominated("train", *agreed)))
            if trainer.scoring == "masked" and terms.scored == trainer.rounds:
                cells, sums = (
                    self._groups.cells(job, models, terms.scored, scores, common=terms.common),
                    self._groups.sums,
                )
                bits = terms.bits(len(vector.figures))
                dominated = terms.is_dominated("test", *agreed)
                vectors.append(sums.encode({} if dominated else cells, sums.summed(bits, self._agreed.threshold)))
        if trains:
            if job.kept_fields and (0 if state is None else state.round) != head["accepted"]:
                raise Broken(
                    f"the row that the server's sum has of site {self._site.site} is not on this disk any more, so its "
                    "change is unknown; the site cannot take part in this run again"
                )
            weights = terms.share(job, client), float(job.masses[client])
            new = trainer.train(job, state, t, envelope.arrays[0], self._send(weights), weights)
            vectors.insert(0, new.tensors["reply"].numpy().view(np.uint64))
        return self._member.masked(t, head["session"], np.concatenate([np.zeros(0, np.uint64), *vectors]))

    def _weighed(self, terms: Terms) -> Job:
        """The run with the shares of these terms, which stay as long as the numbers of samples do."""
        if self._last is None or self._last[0] != terms.sizes:
            self._last = terms.sizes, terms.weighed(self._trainer.job, self._site.samples)
        return self._last[1]

    def _send(self, weights: tuple[float, float]) -> Callable[..., dict[str, Tensor]]:
        """Write an upload as the integers that are masked.

        Args:
            weights: the site's in the mean of the cohort, and in what is kept or added up over rounds.
        """

        def send(job: Job, state: Generation | None, output: ClientOutput, down: object) -> dict[str, Tensor]:
            trainer = self._trainer
            self._check(job, output, down)
            output = output._replace(work=torch.zeros_like(output.work)) if trainer.private else output
            before = None if state is None else state.group("kept")
            vector, rows, clipped = UploadVector(job, trainer.forms.idle).encode(output, *weights, before)
            if clipped:
                trainer.log_privately(f"{clipped} numbers of the upload are out of range and were clipped")
            return {"reply": torch.from_numpy(vector.view(np.int64)), **{f"kept.{n}": row for n, row in rows.items()}}

        return send

    def _check(self, job: Job, output: ClientOutput, down: object) -> None:
        """Refuse to send what the server would reject, could it look at it.

        Raises:
            Refused: a field is too long, or not finite.
        """
        if isinstance(job.setting.aggregator, SharedMean):  # which clips, and a refusal would be an answer
            return
        for name, norm in lengths(job, output.upload, down).items():
            most = bound_of(self._agreed.norm_bound, name)
            if float(norm) > most:
                raise Refused(f"the difference of {name} is {float(norm):.4g} long, at most {most:.4g} is agreed")
        rows = () if self._trainer.noise else output.state.rows  # without noise, so that a refusal would reveal them
        fields = (*output.upload, *rows)
        if not bool(usable(fields, 1, job.setting.engine.norm_bound, job.weights(output.upload)).all()):
            raise Refused("the upload is not finite, longer than engine.norm_bound, or has a weight below zero")
