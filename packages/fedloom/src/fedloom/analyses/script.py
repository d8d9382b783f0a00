"""Analyses written as a single function that asks questions, which is suitable for Newton's method, for example.

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
"""Sum of the answers to a question ``[k]``, with facts about the sum."""


class _Pending(BaseException):
    """Signal that carries the next question of the function.

    The signal is a `BaseException`, so that the code of an analysis does not catch it by accident.
    """

    def __init__(self, question: Question) -> None:
        super().__init__()
        self.question = question


@dataclass(frozen=True, eq=False)
class Transcript:
    """Answers received so far by a scripted analysis.

    Args:
        script: the scripted analysis.
        terms: public facts about the analysis.
        totals: sums of the answers to the analysis' questions, in order.
    """

    script: ScriptedAnalysis
    terms: AnalysisTerms
    totals: tuple[Total, ...] = ()

    @cached_property
    def outcome(self) -> Question | tuple[pa.Table, nn.Module | None]:
        """Next question of the analysis. After the last question, the table and the predictor."""
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
    """Analysis that is written as a single function `conclude`, which is run again from the beginning after every sum.

    Therefore, the code between two questions should not take much time. `conclude` must be pure, so that equal sums
    lead to equal questions.
    """

    def conclude(self, ask: Callable[[Question], Total], terms: AnalysisTerms) -> tuple[pa.Table, nn.Module | None]:
        """Return the table and the predictor. If the analysis does not compute a predictor, the predictor is None.

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
