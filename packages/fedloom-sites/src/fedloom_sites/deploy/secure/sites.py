"""A run's sites under secure aggregation, as the server sees them. The server receives only sums (see `sums`)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.analyses.patients import GroupScore
from fedloom.engine.checks.notes import GLOBAL_DRAWS_NOTE
from fedloom.engine.job import Job
from fedloom.engine.privacy import find_accounted_noise
from fedloom.errors import GivenUp, Refused, RunStopped, Stop
from fedloom.processes.clients import ScoreRequest, Scores, TrainRequest, TrainResult
from fedloom_sites.deploy.analyses import AnswerForm
from fedloom_sites.deploy.groups import GroupSums
from fedloom_sites.deploy.protocol.envelope import SiteRequest
from fedloom_sites.deploy.replay import decode_sum, make_result
from fedloom_sites.deploy.secure.counters import AnswerCounts
from fedloom_sites.deploy.secure.protocol import KEY_BYTES, SIGNATURE_BYTES, Integers, ProtocolBroken
from fedloom_sites.deploy.secure.sums import SecureSums, SessionSum, Weights
from fedloom_sites.deploy.secure.terms import SessionTerms, check_summands
from fedloom_sites.deploy.secure.vectors import ScoreVector, UploadVector
from fedloom_sites.deploy.server.sites import AnalysisSum, Sites
from fedloom_sites.deploy.server.transport import Transport
from fedloom_sites.deploy.settings import Server
from fedloom_sites.transport.forms import Forms, is_common

Figure = tuple[float, int]
"""Mean of a score over samples, and the number of sites that have the score."""


class MaskedSites(Sites):
    """Sites of a run with secure aggregation: uploads and scores are summed under masks (see `Sites`)."""

    def __init__(self, job: Job, forms: Forms, transport: Transport, settings: Server, group_sums: GroupSums) -> None:
        super().__init__(job, forms, transport, settings, group_sums)
        assert settings.secure is not None
        private = find_accounted_noise(job.setting.upload_transform, job.setting.aggregator) is not None
        self._agreed = settings.secure
        self._uploads, self._figures = UploadVector(job, forms.idle), ScoreVector(job)
        length = self._uploads.length
        self._sessions = SecureSums(transport, settings, is_noisy=private, run=job.setting, length=length)
        self._check_verifiable()
        self._tallies = settings.secure.scores == "masked" and not private
        self._tallied: tuple[int, dict[tuple[str, str, str], Figure]] = -1, {}
        self._groups = list[GroupScore]()

    def sums(self, round: int) -> Iterator[tuple[str, str, str, float]]:
        t, figures = self._tallied
        for (model, part, name), (weighted, sites) in (figures if t == round else {}).items():
            yield model, part, f"{name}/weighted", weighted
            yield model, part, f"{name}/sites", sites

    def groups(self) -> list[GroupScore]:
        return self._groups

    def train(self, request: TrainRequest) -> Iterator[TrainResult]:
        """Train at the sites, and yield the sum of the sites' uploads. The server never learns any individual upload.

        Raises:
            RunStopped: fewer sites than the threshold participate.
            GivenUp: the sum cannot be revealed, or is out of range.
        """
        job, forms, t, down = self._job, self._forms, request.round, request.down
        if not is_common(down):
            raise Refused(
                f"{type(job.algorithm).__name__} sends every client a different download, but secure aggregation needs "
                "the same download for all clients, so that the server cannot single out a site"
            )
        everyone = zip(request.ids.tolist(), request.share.double().flatten().tolist(), strict=True)
        shares = {c: share for c, share in everyone if bool(self._transport.sizes[c, 0])}
        download = forms.write_down(down, request.server)
        scored, asks = self._scores_in_same_session(t, shares)
        n = self._uploads.length

        def read(total: Integers, count: int) -> tuple[Any, Tensor, int, dict[Any, Figure]]:
            uploads = decode_sum(job, self._uploads, total, count, shares, self._agreed.norm_bound)
            return *uploads, self._figures.decode(total[n:], count) if len(total) > n else {}

        def request_sum(scored: int, asks: Mapping[int, SiteRequest], *, again: bool = False) -> SessionSum:
            terms = self._build_terms(t, shares, asks, scored, download)

            def letter(c: int, inbox: bytes) -> SiteRequest:
                models = asks[c].arrays if c in asks else ()
                return SiteRequest("masked", c, [download, terms.encode(), inbox, *models], self._accepted(c))

            length = n + (self._figures.length if scored >= 0 and self._tallies else 0)
            is_counted = self._uploads.is_counted
            return self._sessions.sum(
                terms, self._check_cohort(terms), letter, length, read, counted=is_counted, again=again
            )

        session = request_sum(scored, asks)
        self._tell_counts(t, session.clients, session.counts)
        if session.counts is not None and session.counts.silent:
            self._give_up_scores(scored, session)
            scored = -1
            session = request_sum(scored, {}, again=True)
            self._tell_counts(t, session.clients, session.counts)
        parts, work, clipped, figures = session.value
        if clipped:
            reason = f"round {t}: {clipped} of {len(session.clients)} uploads were clipped to the agreed bounds"
            self._transport.note("clipped uploads", t, session.clients, reason)
        if scored >= 0:
            self._tallied = scored, figures
        messages = (job.messages.up(forms.idle), job.messages.down(down, request.server))
        paper = [int(message.lengths()[1]) for message in messages]
        traffic = [session.traffic[0], session.traffic[1] + len(download), *paper]
        counts = torch.tensor([*work.tolist(), *(len(session.clients) * one for one in traffic)])
        yield make_result(job, request.ids, session.clients, parts, shares, counts)

    def _tell_counts(self, t: int, clients: Collection[int], counts: AnswerCounts | None) -> None:
        """Log how many sites answered a round without using their samples.

        Raises:
            RunStopped: too many sites answered without using their samples, so the sites do not open the sum.
        """
        if counts is None or counts.sites == counts.answered >= self._agreed.threshold:
            return
        reason = (
            f"round {t}: {counts.sites - counts.answered} of {counts.sites} sites with samples sent a neutral upload, "
            "because their upload was not finite, too long (norm_bound), failed or had a negative weight, or because "
            "their protection rejected the model. The log of each of these sites states the reason"
        )
        if counts.answered < self._agreed.threshold:
            least = f"a sum needs {self._agreed.threshold} others, so no site decrypts it"
            cure = f"Remove the reasons, then run the command again to continue with round {t + 1}"
            raise RunStopped(Stop.NEUTRAL, f"{reason}; {least}. {cure}")
        self._transport.note("neutral uploads", t, clients, reason)

    def _give_up_scores(self, t: int, session: SessionSum) -> None:
        """Log that the sites do not open the scores of a round, because a site has no finite score."""
        counts, n = session.counts, len(session.clients)
        assert counts is not None
        self._tallied = t, {}
        why = (
            f"{counts.silent} of {n} sites have no finite score, or one too large for a sum. The log of each of these "
            "sites states the reason"
            if counts.silent
            else f"only {counts.answered} of {n} sites answered from their samples, but a sum needs "
            f"{self._agreed.threshold}"
        )
        reason = f"round {t}: the sites decrypt no scores, because {why}"
        self._transport.note("scores given up", t, session.clients, reason)

    def _scores_in_same_session(self, t: int, cohort: Collection[int]) -> tuple[int, dict[int, SiteRequest]]:
        """Return the round whose scores are summed in the training session, and the requests for these scores.

        If a site does not train, or these scores were already requested, they are summed first, in a separate session,
        and the returned round is -1. If the uploads of this round were already requested, the request is repeated in
        the same form, with or without the scores.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return -1, {}
        self._scores = pending.round, {}
        before, alone = (
            self._sessions.find_repeated({"uploads": t}),
            self._sessions.find_repeated({"scores": pending.round}),
        )
        rides = set(self._transport.nodes) <= set(cohort) and alone is None
        if rides if before is None else before.sums.get("scores") == pending.round:
            return pending.round, self._make_score_requests(pending)
        if self._tallies:
            self._sum_scores(pending)
        else:
            self._transport.collect_replies(pending.round, self._make_score_requests(pending), 0)
        return -1, {}

    def score(self, request: ScoreRequest) -> Iterator[Scores]:
        """Request the sums of all sites' scores, which `sums` then returns, and yield the sizes of the parts.

        If scores are summed, the server never learns the scores of individual clients.
        """
        if not self._tallies:
            yield from super().score(request)
            return
        if self._tallied[0] != request.round:
            self._sum_scores(request)
        yield self.global_sizes(request)

    def analysis_sum(
        self, terms: SessionTerms, form: AnswerForm, request: ScoreRequest | None, clients: Sequence[int]
    ) -> AnalysisSum:
        models = () if request is None else next(iter(self._make_score_requests(request).values())).arrays

        def letter(c: int, inbox: bytes) -> SiteRequest:
            return SiteRequest("tally", c, [terms.encode(), inbox, *models], {"accepted": terms.bases[c]})

        def read(total: Integers, count: int) -> Integers:
            form.decode(total, count)
            return total

        session = self._sessions.sum(terms, self._weights(terms), letter, form.length, read, counted=True)
        assert session.counts is not None
        return AnalysisSum(session.value, session.clients, session.counts)

    def _sum_scores(self, request: ScoreRequest) -> None:
        """Sum the scores of all connected sites in a separate session.

        If this fails, the run continues without the scores. After the last round, however, the run waits for the sites.

        Raises:
            RunStopped: after the last round, too few sites answered. The run continues once these sites have returned.
        """
        t, asks = request.round, self._make_score_requests(request)
        terms = self._build_terms(t, asks, asks, t)

        def letter(c: int, inbox: bytes) -> SiteRequest:
            return SiteRequest("tally", c, [terms.encode(), inbox, *asks[c].arrays], self._accepted(c))

        n, with_groups = self._figures.length, t == self._job.setting.rounds

        def read(total: Integers, count: int) -> tuple[dict[tuple[str, str, str], Figure], list[GroupScore]]:
            groups = self.group_sums.decode(total[n:], count) if with_groups else []
            return self._figures.decode(total[:n], count), groups

        try:
            length = n + (self.group_sums.length if with_groups else 0)
            session = self._sessions.sum(terms, self._weights(terms), letter, length, read, counted=True)
            if session.value is None:
                self._give_up_scores(t, session)
                return
            figures, self._groups = session.value
            self._tallied = t, figures
        except (ProtocolBroken, GivenUp, RunStopped) as error:
            if isinstance(error, RunStopped) and with_groups:  # the sites store their last models in this session
                raise RunStopped(error.reason, f"scores after the last round: {error.detail}") from None
            self._tallied = t, {}
            self._transport.note("scores given up", t, asks, str(error))

    def _build_terms(
        self,
        t: int,
        cohort: Collection[int],
        asks: Mapping[int, SiteRequest],
        scored: int,
        download: bytes | None = None,
    ) -> SessionTerms:
        """Build a session's terms."""
        first, link = next(iter(asks.values()), None), self._sessions.find_link(t - (download is not None)).hex()
        digests = [hashlib.sha256(m).hexdigest() for m in (first.arrays if first is not None else ())]
        return SessionTerms(
            round=t,
            trains=download is not None,
            sizes=tuple(map(tuple, self._transport.sizes.tolist())),
            cohort=tuple(sorted(cohort)),
            accepted=tuple(self._accepted(c)["accepted"] for c in sorted(cohort)),
            download="" if download is None else link or hashlib.sha256(download).hexdigest(),
            scored=scored,
            common=first is not None and bool((first.extra_fields or {})["global"]),
            models=(link,) if digests and link else tuple(digests),
            figures=tuple(self._transport.figures) if scored >= 0 else (),
        )

    def _model_digests(self, request: ScoreRequest, client: int) -> tuple[str, ...]:
        link = self._sessions.find_link(request.round).hex()
        return (link,) if link else super()._model_digests(request, client)

    def _check_verifiable(self) -> None:
        """Raise an error if the sites cannot verify the sums of this run, before its first round.

        Raises:
            Refused: a site has no training samples, the relayed vectors of all sites are too long for a message, or
                code at the server draws random numbers that the sites do not know.
        """
        if not self._agreed.verify:
            return
        if GLOBAL_DRAWS_NOTE in self._job.notes:
            raise Refused(f"with verify, every site repeats the server's step, but {GLOBAL_DRAWS_NOTE}")
        sizes, limit = self._transport.sizes, self._settings.message_limit
        if without := (sizes[:, 0] == 0).nonzero().flatten().tolist():
            raise Refused(
                f"with verify, every site needs training samples, but client {without[0]} has none. Leave the site out "
                "of the agreement, or omit verify in the table secure"
            )
        others = len(sizes) * (4 + KEY_BYTES) + 1024  # a site's shares of all secrets, its keys and its terms
        longest = len(sizes) * (8 * (self._uploads.length + self._figures.length) + SIGNATURE_BYTES + others)
        if longest > limit:
            raise Refused(
                f"with verify, every site receives the masked vectors of all sites ({longest} bytes), but "
                f"message_limit is {limit}. Raise message_limit at the server and at all sites, or omit verify"
            )

    def _weights(self, terms: SessionTerms) -> Weights:
        """Return every site's weights in the sums of a session, computed in the same way as at the sites."""
        return terms.weights(terms.weighed(self._job, self._settings.samples))

    def _check_cohort(self, terms: SessionTerms) -> Weights:
        """Check whether the sites would open a sum of this cohort, and return the cohort's weights.

        If the check fails, a new cohort is drawn.

        Raises:
            GivenUp: the sites would not open a sum of this cohort, but may open one of a different cohort.
        """
        weights, agreed = self._weights(terms), self._agreed
        try:
            check_summands(weights, terms.cohort, agreed.threshold, agreed.max_share)
        except ProtocolBroken as error:
            if len(terms.cohort) >= agreed.threshold and not {*self._transport.nodes} <= {*terms.cohort}:
                raise GivenUp(f"round {terms.round}: {error}", [*terms.cohort]) from None
        return weights

    def _accepted(self, client: int) -> dict[str, Any]:
        return {"accepted": int(self.accepted[client])}
