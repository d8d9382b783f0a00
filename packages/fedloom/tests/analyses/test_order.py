"""The order of an analysis' questions, which is declared: a simulation refuses what real sites would refuse."""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa
import pytest
import torch
from torch import Tensor

import fedloom as fl
from fedloom.analyses import (
    Analysis,
    AnalysisTerms,
    Bounds,
    ClientRows,
    Info,
    Question,
    check_analysis,
)
from fedloom.errors import CodeError


class Counting(Analysis):
    """Counts rows again and again, until a number of questions or a number of rows is reached."""

    questions: ClassVar = {"first": {}, "more": {}}

    names: tuple[str, ...] = ("first", "more", "more")
    until: float = 1e9

    def start(self, terms: AnalysisTerms) -> tuple[int, float]:
        return 0, 0.0

    def question(self, state: tuple[int, float]) -> Question | None:
        return Question(self.names[state[0]]) if state[0] < len(self.names) and state[1] < self.until else None

    def bounds(self, question: Question, terms: AnalysisTerms) -> Bounds:
        return Bounds.counts(1, terms.most_rows)

    def answer(self, question: Question, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        return torch.tensor([float(len(client))], dtype=torch.float64)

    def step(self, state: tuple[int, float], total: Tensor, info: Info) -> tuple[int, float]:
        if not float(total):
            raise ValueError("no rows")
        return state[0] + 1, state[1] + float(total)

    def result(self, state: tuple[int, float]) -> pa.Table:
        return pa.table({"rows": [state[1]]})


class Patient(Counting):
    """Counts rows, also where there are none."""

    def step(self, state: tuple[int, float], total: Tensor, info: Info) -> tuple[int, float]:
        return state[0] + 1, state[1] + float(total)


class Retrying(Patient):
    """Counts rows with a question that may be repeated."""

    retried: ClassVar = ("more",)


CLIENTS = [([[1.0], [2.0]], [0, 1]), ([[3.0], [6.0]], [1, 0])]


@pytest.mark.parametrize(
    "names", [("first", "more", "more"), ("more", "first"), ("first", "first"), ("first", "more", "first")]
)
def test_a_question_out_of_order_is_an_error_before_and_in_a_simulation(names: tuple[str, ...]) -> None:
    """What real sites would refuse; the check before a run answers with zeros, at which an analysis may end."""
    with pytest.raises(CodeError, match="each question only once|asks '(first|more)', got"):
        fl.analyze(Counting(names=names), CLIENTS)
    fed = fl.Federation.create(CLIENTS)
    with pytest.raises(CodeError, match="each question only once|asks '(first|more)', got"):
        check_analysis(Patient(names=names), fed)
    if names[0] == "first":
        check_analysis(Counting(names=names), fed)  # which fails with zeros, and so only in the run


def test_a_question_that_is_named_may_be_repeated() -> None:
    value = Retrying()
    check_analysis(value, fl.Federation.create(CLIENTS))
    assert fl.analyze(value, CLIENTS).table.column("rows").to_pylist() == [12.0]
    assert fl.analyze(Counting(until=5.0), CLIENTS).table.column("rows").to_pylist() == [8.0]
