"""Analyses written as a single function that asks questions. This form suits iterative fits such as Newton's method.

The state of such an analysis is the list of all previous sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
from torch import Tensor, nn

from fedloom.analyses.form import Analysis, AnalysisTerms, Info, Question

Total = tuple[Tensor, Info]
"""Sum of the answers to a question ``[k]``, and facts about the sum."""


class _Pending(BaseException):
    """Signal that carries the function's next question.

    The signal is a `BaseException`, so an analysis does not catch it by accident.
    """

    def __init__(self, question: Question) -> None:
        super().__init__()
        self.question = question


@dataclass(frozen=True, eq=False)
class Transcript:
    """Answers that a scripted analysis has received so far.

    Args:
        script: the scripted analysis.
        terms: public facts about the analysis.
        totals: sums of the answers to the questions, in order.
    """

    script: ScriptedAnalysis
    terms: AnalysisTerms
    totals: tuple[Total, ...] = ()

    @cached_property
    def outcome(self) -> Question | tuple[pa.Table, nn.Module | None]:
        """The analysis' next question, or its table and predictor after the last question."""
        totals = iter(self.totals)

        def ask(question: Question) -> Total:
            total = next(totals, None)
            if total is None:
                raise _Pending(question)
            return total

        try:
            return self.script.conclude(ask, self.terms)
        except _Pending as pending:
            return pending.question


class ScriptedAnalysis(Analysis):
    """Analysis written as a single function `conclude`, which runs again from the beginning after every sum.

    The code between two questions should therefore be fast. `conclude` must be pure, so that identical sums lead to
    identical questions.
    """

    def conclude(self, ask: Callable[[Question], Total], terms: AnalysisTerms) -> tuple[pa.Table, nn.Module | None]:
        """Return the table and the predictor, which is None if the analysis does not compute one.

        Args:
            ask: function that sends a question to all clients and returns the sum of their answers.
            terms: public facts about the analysis.

        Raises:
            DataError: the analysis has no result.
        """
        raise NotImplementedError

    def start(self, terms: AnalysisTerms) -> Transcript:
        return Transcript(self, terms)

    def question(self, state: Transcript) -> Question | None:
        return state.outcome if isinstance(state.outcome, Question) else None

    def step(self, state: Transcript, total: Tensor, info: Info) -> Transcript:
        return Transcript(self, state.terms, (*state.totals, (total, info)))

    def result(self, state: Transcript) -> pa.Table:
        return _find_conclusion(state)[0]

    def model(self, state: Transcript) -> nn.Module | None:
        return _find_conclusion(state)[1]


def _find_conclusion(state: Transcript) -> tuple[pa.Table, nn.Module | None]:
    assert not isinstance(state.outcome, Question)
    return state.outcome
