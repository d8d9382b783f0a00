"""A site's answers under secure aggregation: steps of a session, and masked training results and scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from fedloom.engine.job import Job
from fedloom.errors import WireError
from fedloom_sites.deploy.groups import Cells
from fedloom_sites.deploy.noise import SharedMean
from fedloom_sites.deploy.protocol.envelope import SESSION_STEPS, Envelope, Kind
from fedloom_sites.deploy.protocol.lengths import clip_upload
from fedloom_sites.deploy.protocol.public import publish_reasons
from fedloom_sites.deploy.replay import ModelReplay
from fedloom_sites.deploy.secure.counters import ABSENT_COUNTS, ANSWERED_COUNTS, NEUTRAL_COUNTS, SILENT_COUNTS
from fedloom_sites.deploy.secure.member import SessionMember
from fedloom_sites.deploy.secure.protocol import ACCUSATION_PREFIX, Integers, ProtocolBroken, draw_random_integers
from fedloom_sites.deploy.secure.terms import SessionTerms, check_models, check_summands, check_terms, read_terms
from fedloom_sites.deploy.secure.vectors import ScoreVector, UploadVector, count_earlier_bits
from fedloom_sites.deploy.settings import Site, get_norm_bound
from fedloom_sites.deploy.site.analyses import SiteAnalyses
from fedloom_sites.deploy.site.asked import AskedModels
from fedloom_sites.deploy.site.groups import SiteGroups
from fedloom_sites.deploy.site.local_data import part_sizes
from fedloom_sites.deploy.site.plain import Answer, message_metrics, single_array
from fedloom_sites.deploy.site.state import StateGeneration
from fedloom_sites.deploy.site.trainer import TrainedRound, Trainer


class MaskedAnswers:
    """A site's answers under secure aggregation.

    Args:
        site: the site's settings.
        key: the site's signing key.
        trainer: object that trains and scores models at the site.
        folder: folder with the site's state in this experiment.
        budget: record of the models that the site has already answered requests for.
    """

    def __init__(self, site: Site, key: Ed25519PrivateKey, trainer: Trainer, folder: Path, budget: AskedModels) -> None:
        assert site.secure is not None
        self._site, self._agreed, self._trainer = site, site.secure, trainer
        self._member, self._groups = SessionMember(site, key, folder), SiteGroups(trainer)
        self._analyses = SiteAnalyses(
            trainer, folder, lambda: count_earlier_bits(trainer.job, self._groups.sums.groups)
        )
        self._asked = budget
        self._replay = ModelReplay(site, lambda: trainer.experiment, trainer.log_privately)
        self._last: tuple[object, Job] | None = None
        self._numbers = 0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of messages that the site answers."""
        relayed: tuple[Kind, ...] = ("relay",) if self._agreed.verify else ()
        if self._trainer.scoring == "masked":
            return (*SESSION_STEPS, *relayed, "result")
        return (*SESSION_STEPS, "score", "result")

    @cached_property
    def figures(self) -> str:
        """The metrics and groups that the site's samples define, as a bit field in hexadecimal digits.

        Empty if the site has no training samples or nothing is summed.
        """
        trainer, client = self._trainer, self._site.client
        if not part_sizes(trainer.fed, client)[0]:
            return ""
        vector, groups, bits = ScoreVector(trainer.job), self._groups, 0
        if trainer.scoring == "masked":
            bits = vector.find_definable_figures(client) | groups.sums.bits(groups.members) << len(vector.figures)
        bits |= self._analyses.bits
        return f"{bits:x}" if bits else ""

    def answer(self, envelope: Envelope) -> Answer:
        """Return the answer to a step of a session, or to a request for the site's scores.

        Raises:
            FedloomError: the site has no answer. The message states the reason.
        """
        head, arrays, member, kind = envelope.head, envelope.arrays, self._member, envelope.head["kind"]
        if kind == "score":
            return self._scores(envelope)
        if kind == "result":
            self._analyses.keep(single_array(arrays))
            return {"samples": part_sizes(self._trainer.fed, self._site.client)[0]}, [], None
        if kind in ("masked", "tally"):
            return {}, [self._mask_answer(envelope)], None
        if kind == "keys":
            self._analyses.begin()
        linked = int(self._agreed.verify)
        limits: dict[str, tuple[int, int]] = {"keys": (linked, linked), "count": (2, 2), "unmask": (1, 3)}
        fewest, most = limits.get(kind, (1, 1))
        steps: dict[str, Callable[..., bytes]] = {
            "keys": member.keys, "shares": member.shares, "open": member.open, "agree": member.agree,
            "count": member.count, "unmask": member.reveal,
        }  # fmt: skip
        with publish_reasons():
            if kind == "relay":
                return {}, [self._replay.add(head["round"], head["session"], arrays)], None
            if not fewest <= len(arrays) <= most:
                raise WireError(f"expected {fewest} to {most} arrays, got {len(arrays)}")
            if kind == "keys" and linked:
                self._replay.check_link(head["round"], arrays[0])
            with self._replay.watch("a new session") if kind == "shares" and linked else nullcontext():
                return {}, [steps[kind](head["round"], head["session"], *arrays)], None

    def count_parameters(self, kind: str, arrays: Sequence[bytes]) -> int:
        """Return the number of masked values in the arrays of the newest answer, including its counters.

        Args:
            kind: kind of the message.
            arrays: arrays of the answer.
        """
        return self._numbers if arrays and kind in ("masked", "tally") else 0

    def _scores(self, envelope: Envelope) -> Answer:
        head, trainer = envelope.head, self._trainer
        job, _ = trainer.attach_local_data(head["accepted"], trainer.weighed(head["weight"]))
        scores = trainer.scores(job, envelope.arrays, head["round"], common=head["global"])
        return {"samples": part_sizes(trainer.fed, self._site.client)[0]}, [], message_metrics(scores)

    def _mask_answer(self, envelope: Envelope) -> bytes:
        """Return the site's masked training result, its masked scores of the received models, or both."""
        head, t, trains = envelope.head, envelope.head["round"], envelope.head["kind"] == "masked"
        trainer, client = self._trainer, self._site.client
        sizes, figures = part_sizes(trainer.fed, client), self.figures
        self._numbers = 0
        with publish_reasons():
            if len(envelope.arrays) < 2 + trains:
                raise WireError(f"expected at least {2 + trains} arrays, got {len(envelope.arrays)}")
            download = envelope.arrays[0] if trains else None
            message, inbox, *models = envelope.arrays[trains:]
            terms = read_terms(message)
            if (terms.round, terms.trains) != (t, trains):
                raise ProtocolBroken(f"the terms belong to round {terms.round}, but the message belongs to round {t}")
            check_terms(terms, client, sizes, figures, self._site.clients, head["accepted"])
            if self._agreed.verify:
                download, models = self._replay.compute_messages(terms, download, models)
            else:
                check_models(terms, download, models)
        weights_of_all = terms.weights(self._set_shares(terms))
        with publish_reasons():
            check_summands(weights_of_all, terms.cohort, self._agreed.threshold, self._agreed.max_share)
            self._asked.enter_masked(terms, head["accepted"])
            accusations = self._member.receive(
                t, head["session"], inbox, terms, weights_of_all, is_noisy=self._trainer.private
            )
        if accusations:
            return ACCUSATION_PREFIX + accusations
        if terms.question is not None:
            return self._mask_vector(envelope, *self._compute_once(lambda: self._analyses.answer(terms, models)))
        job, state = trainer.attach_local_data(head["accepted"], self._set_shares(terms))
        vectors, counts = list[Integers](), tuple[int, ...]()
        if terms.scored >= 0:
            vector, counts = self._compute_once(lambda: self._score_models(job, terms, models))
            vectors.append(vector)
        if download is not None:
            with publish_reasons():
                if job.kept_fields and (0 if state is None else state.round) != head["accepted"]:
                    raise ProtocolBroken(
                        f"the row of site {self._site.site} that the server has summed is no longer on this disk, so "
                        "the change since then is unknown. The site cannot take part in this run again"
                    )
            weights = terms.share(job, client), float(job.masses[client])
            with publish_reasons():
                stays_neutral = self._member.stays_neutral
            new = trainer.train(job, state, t, download, self._send(weights), weights, stays_neutral=stays_neutral)
            vectors.insert(0, new.tensors["reply"].numpy().view(np.uint64))
            if UploadVector(job, trainer.forms.idle).is_counted:
                upload_counts = NEUTRAL_COUNTS if new.reply["neutral"] else ANSWERED_COUNTS
                counts = (*upload_counts[:2], *(counts or upload_counts)[2:]) if sizes[0] else ABSENT_COUNTS
        return self._mask_vector(envelope, np.concatenate([np.zeros(0, np.uint64), *vectors]), counts)

    def _compute_once(
        self, compute: Callable[[], tuple[Integers, tuple[int, ...]]]
    ) -> tuple[Integers, tuple[int, ...]]:
        """Return the result of ``compute``, or the stored result if it was already computed in this session.

        An answer must not reveal whether rows have changed since an earlier message. A site without an answer sends
        random numbers. Sites do not open such a sum, but a colluding site may forge the counters. Without random
        numbers, the difference from the next sum would then be the answer of this site.
        """
        with publish_reasons():
            result = self._member.answer
        if result is None:
            result = compute()
            if result[1] == SILENT_COUNTS:
                result = draw_random_integers(len(result[0])), SILENT_COUNTS
            with publish_reasons():
                self._member.keep_answer(*result)
        return result

    def _score_models(self, job: Job, terms: SessionTerms, models: Sequence[bytes]) -> tuple[Integers, tuple[int, ...]]:
        """Return the site's encoded scores (after the last round, with the scores of its groups) and its counters.

        The vector is zero if any of these scores is not finite, and empty if no scores are summed.
        """
        scores = self._trainer.scores(job, models, terms.scored, common=terms.common)
        if self._trainer.scoring != "masked":
            return np.zeros(0, np.uint64), ()
        form, sums, sizes = ScoreVector(job), self._groups.sums, part_sizes(self._trainer.fed, self._site.client)
        agreed, with_groups = (self._agreed.threshold, self._agreed.max_share), terms.scored == self._trainer.rounds
        nothing = np.zeros(form.length + (sums.length if with_groups else 0), dtype=np.uint64)
        if not sizes[0]:
            return nothing, ABSENT_COUNTS
        weighs, bits = not terms.is_dominated("train", *agreed), int(self.figures or "0", 16)
        summed = terms.summed(*agreed, [part for part, _ in form.figures])
        summed = [is_summed and bool(bits >> k & 1) for k, is_summed in enumerate(summed)]
        cells: Cells | None = {}
        if with_groups:  # even without scores, because the response time would otherwise show that there are none
            cells = self._groups.cells(job, models, terms.scored, scores, common=terms.common)
        if not form.is_whole(scores, sizes, summed, weighs=weighs):
            self._trainer.log_privately(f"round {terms.scored}: a score is missing, not finite, or too large for a sum")
            return nothing, SILENT_COUNTS
        vector = form.encode(scores, sizes, summed, weighs=weighs)
        if with_groups:
            are_summed = sums.summed(terms.bits(len(form.figures)), self._agreed.threshold)
            cells = {} if terms.is_dominated("test", *agreed) else cells
            of_groups = None if cells is None else sums.encode(cells, are_summed)
            if of_groups is None:
                self._trainer.log_privately(f"round {terms.scored}: a sum over a group is not finite, or too large")
                return nothing, SILENT_COUNTS
            vector = np.concatenate([vector, of_groups])
        return vector, ANSWERED_COUNTS

    def _mask_vector(self, envelope: Envelope, vector: Integers, counts: Sequence[int]) -> bytes:
        head = envelope.head
        with publish_reasons():
            message = self._member.masked(head["round"], head["session"], vector, counts)
        self._numbers = len(vector) + self._member.counter_count
        return message

    def _set_shares(self, terms: SessionTerms) -> Job:
        """Return the run, with the shares of the objective that follow from the numbers of samples in these terms.

        The shares are cached as long as the numbers of samples do not change.
        """
        if self._last is None or self._last[0] != terms.sizes:
            self._last = terms.sizes, terms.weighed(self._trainer.job, self._site.samples)
        return self._last[1]

    def _send(self, weights: tuple[float, float]) -> Callable[..., dict[str, Tensor]]:
        """Return a function that converts an upload to the integers to be masked.

        Args:
            weights: the site's weights in the cohort's mean, and in sums that are kept or accumulated over rounds.
        """

        def send(job: Job, state: StateGeneration | None, trained: TrainedRound, down: object) -> dict[str, Tensor]:
            trainer, output, is_cut = self._trainer, trained.output, False
            if not isinstance(job.setting.aggregator, SharedMean):  # `SharedMean` clips in exact arithmetic
                bounds = {name: get_norm_bound(self._agreed.norm_bound, name) for name in job.fields}
                upload, is_cut = clip_upload(job, output.upload, down, bounds)
                output = output._replace(upload=upload)
            output = output._replace(work=torch.zeros_like(output.work)) if trainer.private else output
            before = None if state is None else state.group("kept")
            upload_vector = UploadVector(job, trainer.forms.idle)
            vector, rows, clipped = upload_vector.encode(
                output, *weights, before, is_neutral=trained.is_neutral, is_cut=is_cut
            )
            if is_cut:
                trainer.log_privately("the norm of the upload exceeded the agreed bound and was reduced")
            if clipped:
                trainer.log_privately(f"{clipped} numbers of the upload are out of range and were clipped")
            return {"reply": torch.from_numpy(vector.view(np.int64)), **{f"kept.{n}": row for n, row in rows.items()}}

        return send
