"""Calibration over all clients' test rows, i.e., how well predicted probabilities match outcomes, computed from sums.

References: A. P. Dawid, JASA 1982. M. P. Naeini et al., AAAI 2015 (calibration error by bins). G. W. Brier, Monthly
Weather Review 1950 (Brier score).

In a binary task, a row's score is the probability of the second class. In other tasks, it is the probability of the
most probable class. Rows are counted in each bin, and their scores and outcomes are summed. A bin in which too few
clients have enough subjects with and without the outcome is merged with its neighbors (as in `conformal`).
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar, NamedTuple

import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor

from fedloom.analyses import Analysis, AnalysisTerms, Bounds, ClientRows, Info, Question
from fedloom.analyses.models import ModelKind
from fedloom.analyses.tables import NUMBER_TYPE, make_table
from fedloom.data import DATA_PARTS
from fedloom.errors import DataError, Refused
from fedloom_clinic.cells import forbids_small_cells
from fedloom_clinic.conformal import check_reached, find_bin_edges, flag_ranges, make_bin_ranges, predict_probabilities


class CalibrationState(NamedTuple):
    """Bins' upper edges, once known, and the totals: rows, scores and outcomes in each bin, and squared errors."""

    terms: AnalysisTerms
    reached: Tensor | None
    total: Tensor | None = None


class Calibration(Analysis):
    """Predicted and observed outcomes of all clients' test rows in bins, calibration error, and Brier score."""

    kind: ClassVar[str] = "calibration"
    tasks: ClassVar = ("binary", "classification")
    questions: ClassVar = {"reached": {}, "bins": {"reached": 1}}
    uses_models: ClassVar[bool] = True

    model_kind: ModelKind = Field(
        None,
        description="model whose probabilities are used (default: global, or personal if there is no global model)",
    )
    bins: int = Field(10, ge=2, le=1000, description="number of equal-width bins for scores from 0 to 1")

    def used(self, client: ClientRows, terms: AnalysisTerms) -> ClientRows:
        return client.select(client.part == DATA_PARTS.index("test"))

    def start(self, terms: AnalysisTerms) -> CalibrationState:
        every = torch.zeros(len(self._ranges), dtype=torch.float64)
        return CalibrationState(terms, None if forbids_small_cells(terms.rules) else every)

    def check_question(self, question: Question, terms: AnalysisTerms) -> None:
        if question.name == "bins" and len(question.values["reached"]) != len(self._ranges):
            raise Refused(f"`reached` of a question must have {len(self._ranges)} numbers")
        if question.name == "bins":
            check_reached(question.values["reached"], self._ranges, len(terms.sizes))

    def question(self, state: CalibrationState) -> Question | None:
        if state.reached is None:
            return Question("reached")
        return Question("bins", {"reached": state.reached}) if state.total is None else None

    def bounds(self, question: Question, terms: AnalysisTerms) -> Bounds:
        if question.name == "reached":
            return Bounds.counts(len(self._ranges), 1.0)
        bins, most = len(self._find_edges(question.values["reached"], terms)) - 1, float(terms.most_rows)
        scores = Bounds.between(torch.zeros(bins + 1), torch.full((bins + 1,), 2 * most))
        return Bounds.join([Bounds.counts(2 * bins, most), scores])

    def answer(self, question: Question, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        test, classes = self.used(client, terms), len(terms.schema.classes)
        p, label = predict_probabilities(test, classes, self.model_kind), test.y[:, 0].long()
        score, came = (p[:, 1], label == 1) if terms.schema.task == "binary" else (p.amax(1), p.argmax(1) == label)
        fine = (score * self.bins).long().clamp(max=self.bins - 1)
        if question.name == "reached":
            flags = (
                flag_ranges(fine[some], test.subjects[some], self._ranges, terms.rules.min_subjects)
                for some in (came, ~came)  # both outcomes need enough subjects
            )
            return torch.stack([*flags]).amin(0)
        ends = self._find_edges(question.values["reached"], terms)
        of = torch.bucketize(fine, torch.tensor(ends[1:-1]), right=True)
        rows, outcomes, scores = (
            torch.zeros(len(ends) - 1, dtype=torch.float64).index_add(0, of, values)
            for values in (torch.ones_like(score), came.double(), score)
        )
        errors = (p - torch.nn.functional.one_hot(label, classes)).square().sum() / (2 if classes == 2 else 1)
        return torch.cat([rows, outcomes, scores, errors[None]])

    def step(self, state: CalibrationState, total: Tensor, info: Info) -> CalibrationState:
        if state.reached is None:
            return state._replace(reached=total)
        if not total.any():
            raise DataError("no client has test rows. Set a larger test fraction in the partition")
        return state._replace(total=total)

    def result(self, state: CalibrationState) -> pa.Table:
        assert state.total is not None
        assert state.reached is not None
        ends = self._find_edges(state.reached, state.terms)
        rows, outcomes, scores = state.total[:-1].view(3, -1)
        count = rows.sum()
        facts = (float((outcomes - scores).abs().sum() / count), float(state.total[-1] / count), float(count))
        lines = [
            (ends[k] / self.bins, ends[k + 1] / self.bins, n, float(scores[k]) / n, float(outcomes[k]) / n, *facts)
            for k, n in enumerate(rows.tolist())
            if n
        ]
        names = ("low", "high", "rows", "predicted", "observed", "calibration_error", "brier", "test_rows")
        return make_table(lines, **dict.fromkeys(names, NUMBER_TYPE))

    @cached_property
    def _ranges(self) -> list[tuple[int, int]]:
        return make_bin_ranges(self.bins)

    def _find_edges(self, reached: Tensor, terms: AnalysisTerms) -> list[int]:
        if not forbids_small_cells(terms.rules):
            return [*range(self.bins + 1)]
        return find_bin_edges(
            reached, self._ranges, terms.rules, what="with the outcome and without it in the test set"
        )
