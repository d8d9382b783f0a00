"""Terms: the identical request to all sites of a session.

Masks cancel and shares can be opened only if all sites have received the same terms.

A site checks those parts of the terms that it knows: its own numbers of samples, the models that arrive with the terms,
and the rounds of the experiment. Anyone can compute all weights in the sum from the sites' numbers of samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, ValidationError
from torch import Tensor

from fedloom.choose.shares import shares_of
from fedloom.data import DATA_PARTS
from fedloom.data.input_spec import InputSpec
from fedloom.engine.clients.uploads import compute_weights
from fedloom.engine.job import Job
from fedloom.errors import WireError
from fedloom.local import Nothing
from fedloom.values import Value
from fedloom_sites.deploy.noise import SharedMean
from fedloom_sites.deploy.protocol.envelope import MAX_FLAG_DIGITS
from fedloom_sites.deploy.secure.protocol import MAX_ANALYSIS_STEPS, MAX_SITES, MIN_SITES, ProtocolBroken
from fedloom_sites.deploy.site.local_data import make_blank_federation

MAX_TERMS_BYTES = 1 << 18
"""Maximum length, in bytes, of encoded terms."""

Count = Annotated[int, Field(ge=0)]
Bits = Annotated[str, Field(pattern=rf"^[0-9a-f]{{0,{MAX_FLAG_DIGITS}}}$")]
"""Bit field of the metrics that a site's samples define (see `ScoreVector.definable`), and of the groups and cells that
the site publishes."""


class AnalysisStep(Value):
    """Question of an analysis, whose answers are summed, encoded in a format that the analysis declares."""

    analysis: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_.:-]{0,99}$",
        description="name of the analysis, or its import path for user code",
    )
    step: int = Field(ge=0, lt=MAX_ANALYSIS_STEPS, description="number of the question, counted from 0")
    content: str = Field(
        pattern=r"^([0-9a-f]{2})*$", max_length=MAX_TERMS_BYTES, description="content of the question, hex-encoded"
    )

    @classmethod
    def create(cls, analysis: str, step: int, content: bytes) -> AnalysisStep:
        """Return the step of an analysis, together with the bytes of its question.

        Raises:
            ProtocolBroken: the question is too long for a message to the sites.
        """
        if 2 * len(content) > MAX_TERMS_BYTES:
            raise ProtocolBroken(
                f"a question of the analysis {analysis} has {len(content)} bytes, but sites accept at "
                f"most {MAX_TERMS_BYTES // 2}. Choose fewer bins or columns"
            )
        return cls(analysis=analysis, step=step, content=content.hex())

    @property
    def message(self) -> bytes:
        """The question, as bytes."""
        return bytes.fromhex(self.content)


class SessionTerms(Value):
    """A session's request to all its sites."""

    round: int = Field(ge=0, description="round to train, or the round whose models are only scored")
    trains: bool = Field(description="whether the sites train")
    sizes: tuple[tuple[Count, Count, Count], ...] = Field(
        max_length=MAX_SITES, description="number of training, validation and test samples of every site"
    )
    cohort: tuple[Count, ...] = Field(max_length=MAX_SITES, description="requested sites, in ascending order")
    accepted: tuple[Count, ...] = Field(max_length=MAX_SITES, description="last accepted round of every requested site")
    download: str = Field(
        "",
        description="SHA-256 of the message that every site of the cohort trains from. If sites verify the sums, the "
        "newest link of their chain (see `fedloom_sites.deploy.relay`), also in `models`",
    )
    scored: int = Field(-1, ge=-1, description="round whose models are scored (-1: none)")
    common: bool = Field(False, description="whether the global model is scored")
    models: tuple[str, ...] = Field((), max_length=2, description="SHA-256 of every message with models to score")
    figures: tuple[Bits, ...] = Field(
        (),
        max_length=MAX_SITES,
        description="for each site, the metrics and bins that its samples define, as bits. Empty if nothing is summed",
    )

    question: AnalysisStep | None = Field(
        None, description="analysis step whose answers this session sums. If set, the session computes no other sums"
    )

    @property
    def sums(self) -> dict[str, int]:
        """Round of each sum, keyed by "uploads", "scores" or the name of an analysis."""
        if self.question is not None:
            return {self.question.analysis: self.question.step}
        rounds = {"uploads": self.round} if self.trains else {}
        return rounds | ({"scores": self.scored} if self.scored >= 0 else {})

    @property
    def model_digests(self) -> dict[str, str]:
        """Digest of the summed models, keyed by "uploads", "scores" or the name of an analysis.

        It is empty if no models are sent to the sites.

        All steps of an analysis have the same digest, so all their sums cover the same sites.
        """
        digests = {"uploads": self.download, "scores": " ".join(self.models)}
        return {what: digests.get(what, what) for what in self.sums}

    @property
    def course(self) -> str:
        """SHA-256 of all terms except the question. The value is the same for every step of an analysis."""
        return hashlib.sha256(self.with_(question=None).encode()).hexdigest()

    @property
    def bases(self) -> dict[int, int]:
        """Last accepted round of each site in the cohort, which is the round of the site's state for its answer."""
        return dict(zip(self.cohort, self.accepted, strict=True))

    def encode(self) -> bytes:
        """Encode the terms as a message."""
        return self.model_dump_json().encode()

    @property
    def digest(self) -> bytes:
        """SHA-256 of the encoded terms."""
        return hashlib.sha256(self.encode()).digest()

    def summed(self, threshold: int, most: float, parts: Sequence[str]) -> list[bool]:
        """Return a flag for each metric, which is True if the metric is summed.

        A metric is summed if every subset of ``threshold`` sites contains at least `MIN_SITES` sites with the metric,
        so that no sum covers only one or two sites, and if no site can dominate the metric's part of the data (see
        `is_dominated`).

        Args:
            threshold: minimum number of sites in a sum.
            most: maximum share that one site may have of the samples in a sum.
            parts: part of the data for each metric, in the order of the metrics' bits.
        """
        lacking = [sum(not one >> k & 1 for one in self.bits()) for k in range(len(parts))]
        dominated = {part: self.is_dominated(part, threshold, most) for part in {*parts}}
        return [
            threshold - lack >= MIN_SITES and not dominated[part] for lack, part in zip(lacking, parts, strict=True)
        ]

    def is_dominated(self, part: str, threshold: int, most: float) -> bool:
        """Return True if one site can exceed the share ``most`` of a part's samples in a sum of ``threshold`` sites."""
        counts = sorted(self.sizes[c][DATA_PARTS.index(part)] for c in self.cohort)
        return bool(counts) and counts[-1] > most * (counts[-1] + sum(counts[:-1][: threshold - 1]))

    def weights(self, job: Job) -> dict[int, tuple[float, ...]]:
        """Return each cohort site's weights in the sums, which are zero for a site without training samples.

        For uploads, these are the site's weight in the mean if any field is averaged, and its share of the objective if
        any field is kept or accumulated over rounds. For an analysis, the weight is the number of rows at the site. For
        scores, all weights are equal, because `summed` checks the samples.

        Args:
            job: run returned by `weighed`.
        """
        if self.question is not None:
            counting = {c: (float(sum(self.sizes[c])),) for c in self.cohort}
        elif self.trains and not isinstance(job.setting.aggregator, SharedMean):
            stored = [kind.keeps or kind.accumulates for kind in job.fields.values()]
            columns = [self._weights(job).abs().flatten()] if not all(stored) or not stored else []
            if any(stored):
                columns.append(job.masses[list(self.cohort)].abs().flatten())
            counting = dict(zip(self.cohort, zip(*(column.tolist() for column in columns), strict=True), strict=True))
        else:
            counting = dict.fromkeys(self.cohort, (1.0,))
        return {c: weights if self.sizes[c][0] else (0.0,) * len(weights) for c, weights in counting.items()}

    def bits(self, first: int = 0) -> list[int]:
        """Return every site's bits, starting at bit ``first``: metrics that its samples define, then groups."""
        return [int(self.figures[c] or "0", 16) >> first for c in self.cohort]

    def bins(self, first: int, count: int) -> NDArray[np.bool_]:
        """Return ``count`` bits of every site in the cohort, starting at bit ``first``, as an array ``[n, count]``."""
        return np.array([[bool(one >> k & 1) for k in range(count)] for one in self.bits(first)], dtype=bool)

    def weighed(self, job: Job, samples: InputSpec) -> Job:
        """Return a site's run, with the shares of the objective computed from all sites' numbers of samples."""
        fed = make_blank_federation(samples, torch.tensor(self.sizes))
        return replace(job, alpha=shares_of(job.setting.client_weights, fed).to(job.oracle.dtype))

    def share(self, job: Job, client: int) -> float:
        """Return a site's weight in the cohort's mean relative to the largest weight, for a run from `weighed`."""
        weights = self._weights(job)
        return float(weights[self.cohort.index(client)] / weights.max())

    def _weights(self, job: Job) -> Tensor:
        """Return the weights used for the cohort's mean, ``[m, 1]``."""
        ids, sizes = torch.tensor(self.cohort), torch.tensor(self.sizes)[:, :1].clamp(min=1)
        return compute_weights(job, Nothing(), None, job.ctx(self.round, ids)._replace(sizes=sizes))[0]


def read_terms(message: bytes) -> SessionTerms:
    """Decode the terms of a message.

    Raises:
        WireError: the bytes are not valid terms.
    """
    try:
        if len(message) > MAX_TERMS_BYTES:
            raise ValueError("too long")
        return SessionTerms.model_validate_json(message, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise WireError(
            f"the terms of a session cannot be read: {where and f'{where}: '}{first['msg']}"[:300]
        ) from None
    except ValueError as error:
        raise WireError(f"the terms of a session cannot be read: {error}"[:300]) from None


def check_summands(
    weights: Mapping[int, Sequence[float]], clients: Collection[int], threshold: int, most: float
) -> None:
    """Raise an error if too few sites in a sum have samples, or if one site dominates the sum.

    A site without samples sends numbers that anyone can compute and subtract.

    Args:
        weights: weights of every site (see `SessionTerms.weights`).
        clients: the sites in the sum.
        threshold: minimum number of these sites that must have a weight.
        most: maximum share of the weight that one of these sites may have.

    Raises:
        ProtocolBroken: too few sites have a weight, or a site has more than the maximum share. The message states how
            many sites have a weight, or which site has more than the maximum share.
    """
    counting = [c for c in clients if any(weights[c])]
    if len(counting) < threshold:
        raise ProtocolBroken(
            f"{len(counting)} of the {len(clients)} sites of the sum have samples, but {threshold} are required"
        )
    columns = list(zip(*(weights[c] for c in counting), strict=True))
    for column in columns:
        share, client = max((weight, -c) for weight, c in zip(column, counting, strict=True))
        if share > most * sum(column):
            raise ProtocolBroken(
                f"client {-client} has {share / sum(column):.1%} of the weight of the sum, but the "
                f"agreement allows at most {most:.0%} (key `max_share` in the table `secure`)"
            )
    if len(columns) > 1:
        _check_combinations(np.array(columns), counting, threshold, most)


def _check_combinations(columns: NDArray[np.float64], clients: Sequence[int], threshold: int, most: float) -> None:
    """Raise an error if two differently weighted sums have a difference that covers too few sites or mostly one site.

    Two fields of an upload may be computed from the same model, such as SCAFFOLD's model and control. The two sums of
    these fields have the weights ``[2, n]``. Subtracting a multiple of the second sum from the first can remove any
    site, along with all sites that have the same ratio of weights.

    Raises:
        ProtocolBroken: such a difference exists. The message names the remaining sites.
    """
    first, second = columns / columns.sum(1, keepdims=True)
    if np.allclose(first, second, rtol=1e-9, atol=0):
        return
    ratios = first / np.maximum(second, np.finfo(np.float64).tiny)
    rests = np.abs(first - ratios[:, None] * second)
    remain = rests > 1e-9 * first
    fewest = int(remain.sum(1).argmin())
    if remain[fewest].sum() < threshold or bool((rests.max(1) > most * rests.sum(1)).any()):
        names = ", ".join(str(c) for c, stays in zip(clients, remain[fewest], strict=True) if stays)
        raise ProtocolBroken(
            "the fields of an upload are summed with different weights, and the difference between "
            f"two sums contains only the clients {names}, or almost only one client. Use the same "
            "weights (client_weights, aggregation_weights)"
        )


def check_terms(
    terms: SessionTerms, client: int, sizes: Sequence[int], figures: str, clients: int, accepted: int
) -> None:
    """Raise an error if terms belong to a different experiment, or are wrong about this site.

    Args:
        terms: received terms, whose round already matches the round of their message.
        client: number of the site.
        sizes: numbers of the site's training, validation and test samples.
        figures: metrics that the site's samples define.
        clients: number of sites in the experiment.
        accepted: round of the state that the site should answer with.

    Raises:
        ProtocolBroken: the terms are wrong. The message describes the error.
    """
    if terms.question is not None:
        if terms.question.analysis in ("uploads", "scores"):
            raise ProtocolBroken(f"{terms.question.analysis} is not a valid analysis name")
        if (terms.trains, terms.scored, terms.download) != (False, -1, ""):
            raise ProtocolBroken("the terms of an analysis must not ask for anything else")
    elif terms.scored > terms.round or (not terms.trains and (terms.scored, terms.download) != (terms.round, "")):
        raise ProtocolBroken("terms must score a finished round, and a request for scores alone contains no download")
    if len(terms.sizes) != clients or [*terms.cohort] != sorted({*terms.cohort} & {*range(clients)}):
        raise ProtocolBroken(
            f"the terms must list sites of the agreement, which has {clients} sites, each once and in increasing order"
        )
    if client not in terms.cohort:
        raise ProtocolBroken(f"the terms do not list this site. They list the sites {[*terms.cohort]}")
    if len(terms.accepted) != len(terms.cohort) or terms.bases[client] != accepted:
        raise ProtocolBroken(
            "the terms must contain a round number for every site, and the number for this site must "
            f"be {accepted}, the round in the message"
        )
    if list(terms.sizes[client]) != list(sizes):
        raise ProtocolBroken(f"the terms state {[*terms.sizes[client]]} samples for this site, but it has {[*sizes]}")
    if len(terms.figures) != (clients if terms.scored >= 0 or terms.question is not None else 0):
        raise ProtocolBroken(
            "if a sum contains more than uploads, the terms must list the metrics that every site can compute"
        )
    if terms.figures and terms.figures[client] != figures:
        raise ProtocolBroken(
            "the metrics that the terms list for this site differ from the metrics that its samples allow"
        )


def check_models(terms: SessionTerms, download: bytes | None, models: Sequence[bytes]) -> None:
    """Check that the received models are the models in the terms, so that they are the same at every site.

    Raises:
        ProtocolBroken: the received models differ.
    """
    digests = [hashlib.sha256(m).hexdigest() for m in models]
    if digests != [*terms.models] or (hashlib.sha256(download).hexdigest() if download is not None else "") != (
        terms.download
    ):
        raise ProtocolBroken(
            "the model that the server sent to this site differs from the model that the terms of the session name"
        )
