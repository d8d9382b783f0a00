"""Split conformal prediction: a threshold of scores, shared or per client, from histograms of scores.

References: V. Vovk, A. Gammerman, G. Shafer, "Algorithmic Learning in a Random World", 2005. M. Sadinle, J. Lei,
L. Wasserman, JASA 2019 (scores 1 - p of a class). C. Lu et al., "Federated Conformal Predictors", ICML 2023.

A set contains every class whose probability is at least 1 - threshold. With n calibration rows, the threshold is the
end of the bin that contains the score of rank ceil((n + 1) (1 - alpha)). If a new row follows the distribution of the
calibration rows, its set contains its class with a probability from 1 - alpha to 1 - alpha + 1 / (n + 1) + the mass of
a bin. A shared threshold gives this for the pooled rows of all clients, not at each client.

Calibration rows are drawn from the test part, which was not used to choose the round, the model or settings. The other
test rows measure the coverage.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor

from fedloom.analyses import Analysis, AnalysisTerms, Bounds, ClientRows, Info, Question, Schema
from fedloom.analyses.tables import NUMBER_TYPE, TEXT_TYPE, table_of
from fedloom.data import DATA_PARTS
from fedloom.errors import DataError, Refused

if TYPE_CHECKING:
    from fedloom.engine import Setting

EVERY_CLASS = 2.0
"""Threshold above all scores: too few calibration rows allow no smaller threshold, so sets contain every class."""


class Calibrated(NamedTuple):
    """Known results: thresholds ``[S]``, calibration rows ``[S]``, and the totals of the second question."""

    owners: int
    thresholds: Tensor | None = None
    rows: Tensor | None = None
    covered: Tensor | None = None


class Conformal(Analysis):
    """Thresholds for sets that contain the true class with a chosen probability, and their coverage."""

    kind: ClassVar[str] = "conformal"
    tasks: ClassVar = ("binary", "classification")
    questions: ClassVar = {"scores": {}, "coverage": {"thresholds": 1}}
    uses_models: ClassVar[bool] = True

    alpha: float = Field(0.1, gt=0, lt=1, description="fraction of rows whose set may miss their class")
    model_kind: Literal["global", "personal"] = Field("global", description="model whose probabilities are used")
    by_client: bool = Field(False, description="one threshold per client. Clients then show their own histograms")
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

    def start(self, terms: AnalysisTerms) -> Calibrated:
        return Calibrated(len(terms.sizes) if self.by_client else 1)

    def question(self, state: Calibrated) -> Question | None:
        if state.thresholds is None:
            return Question("scores")
        return Question("coverage", {"thresholds": state.thresholds}) if state.covered is None else None

    def bounds(self, question: Question, terms: AnalysisTerms) -> Bounds:
        owners, most = self.start(terms).owners, float(terms.most_rows)
        if question.name == "scores":
            return Bounds.counts(owners * self.bins, most)
        rows = torch.full((owners,), most, dtype=torch.float64)
        high = torch.cat([rows, rows, most * len(terms.schema.classes) * torch.ones(owners)])
        return Bounds.between(torch.zeros(3 * owners), high, 1.0)

    def answer(self, question: Question, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        owners, classes = self.start(terms).owners, len(terms.schema.classes)
        place = client.place if self.by_client else 0
        test = client.select(client.part == DATA_PARTS.index("test"))
        drawn = self._draws(test) < self.calibration_fraction
        some = test.select(drawn if question.name == "scores" else ~drawn)
        p = self._probabilities(some, classes)
        label = some.y[:, 0].long()
        score = 1 - p[torch.arange(len(some)), label]
        if question.name == "scores":
            counts = torch.zeros(owners, self.bins, dtype=torch.float64)
            counts[place] = torch.bincount((score * self.bins).long().clamp(max=self.bins - 1), minlength=self.bins)
            return counts.flatten()
        counts = torch.zeros(3, owners, dtype=torch.float64)
        limit = question.values["thresholds"][place]
        counts[:, place] = torch.tensor([len(some), int((score <= limit).sum()), int((1 - p <= limit).sum())]).double()
        return counts.flatten()

    def step(self, state: Calibrated, total: Tensor, info: Info) -> Calibrated:
        if state.thresholds is not None:
            return state._replace(covered=total.view(3, -1))
        counts = total.view(state.owners, -1)
        if not counts.any():
            raise DataError("no client has test rows for calibration. Give the partition a test part")
        rows = counts.sum(1)
        limits = [self._threshold(row) for row in counts]
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

    def _threshold(self, counts: Tensor) -> float:
        """Return the end of the bin that contains the score of the wanted rank.

        With too few rows it is above all scores.
        """
        rank = math.ceil((float(counts.sum()) + 1) * (1 - self.alpha) - 1e-9)
        if rank > counts.sum():
            return EVERY_CLASS
        return (int(torch.searchsorted(counts.cumsum(0), float(rank))) + 1) / self.bins

    def _probabilities(self, client: ClientRows, classes: int) -> Tensor:
        if not len(client):
            return torch.zeros(0, classes, dtype=torch.float64)
        if self.model_kind not in client.models:
            raise Refused(f"the run has no {self.model_kind} model. Use model_kind = {next(iter(client.models))!r}")
        outputs = client.models[self.model_kind](client.inputs).double().cpu()
        if classes == 2 and outputs.shape[1] == 1:
            return torch.cat([torch.sigmoid(-outputs), torch.sigmoid(outputs)], 1)
        return outputs.softmax(1)

    def _draws(self, client: ClientRows) -> Tensor:
        """Return numbers in [0, 1) ``[N]`` that depend on the draw and a row's cells alone, at every place."""
        key = f"conformal {self.draw}".encode()
        cells = torch.cat([client.x, client.y], 1).numpy()
        digests = (hashlib.blake2b(row.tobytes(), key=key, digest_size=6).digest() for row in cells)
        return torch.tensor([int.from_bytes(digest, "little") / 2**48 for digest in digests], dtype=torch.float64)


def prediction_sets(probabilities: Tensor, threshold: float) -> Tensor:
    """Return the classes in the set of every row, bool ``[b, c]``.

    Args:
        probabilities: ``[b, c]`` of the model, as predicted by `fedloom.trained`.
        threshold: threshold in the result's table.
    """
    return 1 - probabilities <= threshold
