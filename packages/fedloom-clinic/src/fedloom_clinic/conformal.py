"""Split conformal prediction: a threshold on scores, shared or per client, from histograms of scores.

References: V. Vovk, A. Gammerman, G. Shafer, "Algorithmic Learning in a Random World", 2005. M. Sadinle, J. Lei, L.
Wasserman, JASA 2019 (scores 1 - p of a class). C. Lu et al., "Federated Conformal Predictors", ICML 2023.

Bins that too few clients reach are merged. A first question counts the clients that reach the whole range, its halves,
and so on. Neighboring ranges are merged until they cover a range that enough clients reach, beginning with the largest
scores, and all parties derive the same bins from this sum.

A set contains each class whose probability is at least 1 - threshold (see `fedloom predict --set-threshold`). With n
calibration rows, the threshold is the end of the bin that contains the score with rank ceil((n + 1) (1 - alpha)). If a
new row follows the distribution of the calibration rows, the probability that its set contains its class is between 1 -
alpha and 1 - alpha + 1 / (n + 1) + the mass of a bin. A shared threshold guarantees this for the pooled rows of all
clients, but not at each client.

Calibration rows are drawn from the test part, which was not used to choose the round, the model or settings. The other
test rows measure the coverage.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor

from fedloom.analyses import Analysis, AnalysisTerms, Bounds, ClientRows, Info, Question, Rules, Schema
from fedloom.analyses.models import outputs_of
from fedloom.analyses.tables import NUMBER_TYPE, TEXT_TYPE, table_of
from fedloom.data import DATA_PARTS
from fedloom.errors import DataError, Refused
from fedloom_clinic.cells import merges

if TYPE_CHECKING:
    from fedloom.engine import Setting

EVERY_CLASS = 2.0
"""Threshold above all scores: with too few calibration rows, no smaller threshold is possible, so sets contain every
class."""


class Calibrated(NamedTuple):
    """Known results.

    Attributes:
        terms: public facts about the analysis.
        owners: number S of thresholds.
        reached: number of clients that reach each range of bins ``[S, B]``.
        thresholds: ``[S]`` thresholds.
        rows: number of calibration rows ``[S]``.
        covered: totals of the last question.
    """

    terms: AnalysisTerms
    owners: int
    reached: Tensor | None = None
    thresholds: Tensor | None = None
    rows: Tensor | None = None
    covered: Tensor | None = None


class Conformal(Analysis):
    """Thresholds for sets that contain the true class with a chosen probability, and the coverage of these sets."""

    kind: ClassVar[str] = "conformal"
    tasks: ClassVar = ("binary", "classification")
    questions: ClassVar = {"reached": {}, "scores": {"reached": 2}, "coverage": {"thresholds": 1}}
    uses_models: ClassVar[bool] = True

    alpha: float = Field(
        0.1, gt=0, lt=1, description="target fraction of rows whose class is missing from their prediction set"
    )
    model_kind: Literal["global", "personal"] = Field("global", description="model whose probabilities are used")
    by_client: bool = Field(
        False, description="use a separate threshold for each client. Clients then reveal their own histograms"
    )
    calibration_fraction: float = Field(0.5, gt=0, lt=1, description="fraction of the test rows for calibration")
    bins: int = Field(1000, ge=10, le=100_000, description="number of equal bins of scores from 0 to 1")
    draw: int = Field(0, ge=0, description="seed of the draw of calibration rows")

    @property
    def shows_rows(self) -> bool:
        return self.by_client

    def check(self, schema: Schema, setting: Setting | None = None) -> None:
        super().check(schema, setting)
        if setting is not None and setting.evaluate.select_on == "test":
            raise Refused(
                "conformal thresholds are of rows that chose no round, and this run selects on test",
                rule="analysis-selects-on-test",
                fix="set {evaluate.select_on = 'validation'}",
            )

    def used(self, client: ClientRows, terms: AnalysisTerms) -> ClientRows:
        return client.select(client.part == DATA_PARTS.index("test"))

    def start(self, terms: AnalysisTerms) -> Calibrated:
        owners = len(terms.sizes) if self.by_client else 1
        every = torch.zeros(owners, len(self._nodes), dtype=torch.float64)
        return Calibrated(terms, owners, None if merges(terms.rules) else every)

    def check_question(self, question: Question, terms: AnalysisTerms) -> None:
        owners = self.start(terms).owners
        for name, shape in (("reached", (owners, len(self._nodes))), ("thresholds", (owners,))):
            if name in question.values and question.values[name].shape != shape:
                raise Refused(f"{name} of a question has the shape {shape}, got {tuple(question.values[name].shape)}")

    def question(self, state: Calibrated) -> Question | None:
        if state.reached is None:
            return Question("reached")
        if state.thresholds is None:
            return Question("scores", {"reached": state.reached})
        return Question("coverage", {"thresholds": state.thresholds}) if state.covered is None else None

    def bounds(self, question: Question, terms: AnalysisTerms) -> Bounds:
        owners, most = self.start(terms).owners, float(terms.most_rows)
        if question.name == "reached":
            return Bounds.counts(owners * len(self._nodes), 1.0)
        if question.name == "scores":
            ends = self._ends(question.values["reached"], terms)
            return Bounds.counts(sum(len(of) - 1 for of in ends), most)
        rows = torch.full((owners,), most, dtype=torch.float64)
        high = torch.cat([rows, rows, most * len(terms.schema.classes) * torch.ones(owners)])
        return Bounds.between(torch.zeros(3 * owners), high, 1.0)

    def answer(self, question: Question, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        owners, classes = self.start(terms).owners, len(terms.schema.classes)
        place = client.place if self.by_client else 0
        test = client.select(client.part == DATA_PARTS.index("test"))
        drawn = self._draws(test) < self.calibration_fraction
        some = test.select(~drawn if question.name == "coverage" else drawn)
        p = probabilities_of(some, classes, self.model_kind)
        label = some.y[:, 0].long()
        score = 1 - p[torch.arange(len(some)), label]
        fine = (score * self.bins).long().clamp(max=self.bins - 1)
        if question.name == "reached":
            flags = torch.zeros(owners, len(self._nodes), dtype=torch.float64)
            flags[place] = flag_ranges(fine, some.subjects, self._nodes, terms.rules.min_subjects)
            return flags.flatten()
        if question.name == "scores":
            ends = self._ends(question.values["reached"], terms)
            histograms = [torch.zeros(len(of) - 1, dtype=torch.float64) for of in ends]
            of = torch.bucketize(fine, torch.tensor(ends[place][1:-1]), right=True)
            histograms[place] = torch.bincount(of, minlength=len(histograms[place])).double()
            return torch.cat(histograms)
        counts = torch.zeros(3, owners, dtype=torch.float64)
        limit = question.values["thresholds"][place]
        counts[:, place] = torch.tensor([len(some), int((score <= limit).sum()), int((1 - p <= limit).sum())]).double()
        return counts.flatten()

    def step(self, state: Calibrated, total: Tensor, info: Info) -> Calibrated:
        if state.reached is None:
            return state._replace(reached=total.view(state.owners, -1))
        if state.thresholds is not None:
            return state._replace(covered=total.view(3, -1))
        if not total.any():
            raise DataError("no client has test rows for calibration. Give the partition a test part")
        ends = self._ends(state.reached, state.terms)
        counts = total.split([len(of) - 1 for of in ends])
        limits = [self._threshold(row, of) for row, of in zip(counts, ends, strict=True)]
        rows = torch.stack([row.sum() for row in counts])
        return state._replace(thresholds=torch.tensor(limits, dtype=torch.float64), rows=rows)

    def result(self, state: Calibrated) -> pa.Table:
        assert state.thresholds is not None
        assert state.rows is not None
        assert state.covered is not None
        lines = list[tuple[object, ...]]()
        for k, (limit, rows) in enumerate(zip(state.thresholds.tolist(), state.rows.tolist(), strict=True)):
            tested, covered, size = state.covered[:, k].tolist()
            mean = (covered / tested, size / tested) if tested else (None, None)
            lines.append((f"client {k}" if self.by_client else "all", limit, rows, 1 - self.alpha, tested, *mean))
        names = ("threshold", "rows", "wanted", "test_rows", "coverage", "set_size")
        return table_of(lines, client=TEXT_TYPE, **dict.fromkeys(names, NUMBER_TYPE))

    @cached_property
    def _nodes(self) -> list[tuple[int, int]]:
        return ranges_of_bins(self.bins)

    def _ends(self, reached: Tensor, terms: AnalysisTerms) -> list[list[int]]:
        """Return the ends of the merged bins of each owner, from 0 to the number of bins.

        Raises:
            Refused: too few clients have calibration rows.
        """
        if not merges(terms.rules):
            return [[*range(self.bins + 1)]] * len(reached)
        rules = terms.rules.with_(min_clients=1, missing=0) if self.by_client else terms.rules
        return [ends_of_bins(row, self._nodes, rules, what="that calibrate") for row in reached]

    def _threshold(self, counts: Tensor, ends: Sequence[int]) -> float:
        """Return the end of the bin that contains the score of the wanted rank.

        With too few rows, the result is above all scores.
        """
        rank = math.ceil((float(counts.sum()) + 1) * (1 - self.alpha) - 1e-9)
        if rank > counts.sum():
            return EVERY_CLASS
        return ends[int(torch.searchsorted(counts.cumsum(0), float(rank))) + 1] / self.bins

    def _draws(self, client: ClientRows) -> Tensor:
        """Return numbers in [0, 1) ``[N]`` that depend on the draw and a row's cells alone, at every place."""
        key = f"conformal {self.draw}".encode()
        cells = torch.cat([client.x, client.y], 1).numpy()
        digests = (hashlib.blake2b(row.tobytes(), key=key, digest_size=6).digest() for row in cells)
        return torch.tensor([int.from_bytes(digest, "little") / 2**48 for digest in digests], dtype=torch.float64)


def probabilities_of(client: ClientRows, classes: int, model_kind: str) -> Tensor:
    """Return a model's probabilities ``[N, classes]`` for the rows of a client.

    Raises:
        Refused: the run has no model of this kind.
    """
    if not len(client):
        return torch.zeros(0, classes, dtype=torch.float64)
    outputs = outputs_of(client, model_kind, client.inputs)
    if classes == 2 and outputs.shape[1] == 1:
        return torch.cat([torch.sigmoid(-outputs), torch.sigmoid(outputs)], 1)
    return outputs.softmax(1)


def ranges_of_bins(bins: int) -> list[tuple[int, int]]:
    """Return ranges of bins, from all bins to single bins: each range is followed by its halves, if it has halves."""
    ranges = [(0, bins)]
    for low, high in ranges:  # grows while it is read
        if high - low > 1:
            ranges += [(low, (low + high) // 2), ((low + high) // 2, high)]
    return ranges


def flag_ranges(bin_of: Tensor, subjects: Tensor, ranges: Sequence[tuple[int, int]], least: int) -> Tensor:
    """Return 1 for each range of bins ``[B]`` in which a client has enough subjects, else 0.

    Args:
        bin_of: bin of every row ``[N]``.
        subjects: subject of every row ``[N]``.
        ranges: ranges of bins.
        least: smallest number of subjects.
    """
    counts = [len(subjects[(bin_of >= low) & (bin_of < high)].unique()) for low, high in ranges]
    return torch.tensor([float(count >= least) for count in counts], dtype=torch.float64)


def ends_of_bins(reached: Tensor, ranges: Sequence[tuple[int, int]], rules: Rules, what: str) -> list[int]:
    """Return the ends of merged bins, from 0 to the number of bins.

    Each merged bin contains a range that enough clients reach.

    Args:
        reached: number of clients that reach each range ``[B]``.
        ranges: ranges of bins (see `ranges_of_bins`).
        rules: agreed rules.
        what: description of the rows, used in messages.

    Raises:
        Refused: too few clients reach the range of all bins.
    """
    count, needed = dict(zip(ranges, map(round, reached.tolist()), strict=True)), rules.min_clients + rules.missing
    if count[ranges[0]] < needed:
        raise Refused(
            f"{count[ranges[0]]} clients have {rules.min_subjects} subjects {what}, and {needed} must; agree on a "
            "smaller least count, or give the partition a larger test part"
        )
    starts, top = list[int](), ranges[0][1]
    for low, high in sorted(ranges, reverse=True):  # from the largest scores, where thresholds are
        if high <= top and count[low, high] >= needed:
            starts, top = [low, *starts], low
    return [0, *starts[1:], ranges[0][1]]
