"""The analysis of the page for authors: mean and binned quantiles of a column."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor

import fedloom as fl
from fedloom.analyses import Analysis, AnalysisTerms, Bounds, ClientRows, Info, Question, Schema


class Answered(NamedTuple):
    """Ends of the bins ``[b + 1]``, and the total once it is known."""

    ends: Tensor
    total: Tensor | None = None


class Quantiles(Analysis):
    """Mean and quantiles of a column, by counts in agreed bins."""

    kind: ClassVar[str] = "quantiles"
    questions: ClassVar = {"histogram": {"ends": 1}}

    column: str
    bins: int = Field(50, ge=1, le=1000, description="equal bins of the agreed range")
    levels: tuple[float, ...] = Field((0.25, 0.5, 0.75), description="shares of rows below the quantiles")

    def check(self, schema: Schema, setting: fl.Setting | None = None) -> None:
        names = [column.name for column in schema.columns if not column.levels]
        if self.column not in names:
            raise fl.errors.ConfigError(f"no column of numbers {self.column!r}. It has: {', '.join(names)}")

    def start(self, terms: AnalysisTerms) -> Answered:
        low, high = next(c.range or (0.0, 1.0) for c in terms.schema.columns if c.name == self.column)
        return Answered(torch.linspace(low, high, self.bins + 1, dtype=torch.float64))

    def question(self, state: Answered) -> Question | None:
        return Question("histogram", {"ends": state.ends}) if state.total is None else None

    def bounds(self, question: Question, terms: AnalysisTerms) -> Bounds:
        counts = Bounds.counts(self.bins, terms.most_rows)
        low, high = (terms.most_rows * question.values["ends"][at] for at in (0, -1))
        return Bounds.join([counts, Bounds.between(low.clamp(max=0)[None], high.clamp(min=0)[None])])

    def answer(self, question: Question, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        place = next(k for k, column in enumerate(terms.schema.columns) if column.name == self.column)
        ends, values = question.values["ends"], client.x[:, place]
        values = values[(values >= ends[0]) & (values <= ends[-1])]  # neither missing cells nor implausible numbers
        bin_of = torch.searchsorted(ends[1:-1].contiguous(), values.contiguous(), right=True)
        counts = torch.bincount(bin_of, minlength=self.bins).double()
        return torch.cat([counts, values.sum()[None]])

    def step(self, state: Answered, total: Tensor, info: Info) -> Answered:
        if not total[:-1].any():
            raise fl.errors.DataError(f"no row has a number in {self.column!r}; choose another column")
        return state._replace(total=total)

    def result(self, state: Answered) -> pa.Table:
        assert state.total is not None
        counts, total = state.total[:-1], state.total[-1]
        below = counts.cumsum(0)
        at = [int(torch.searchsorted(below, level * below[-1])) for level in self.levels]
        values = [float(total / below[-1]), *(float(state.ends[1 + k]) for k in at)]
        return pa.table({"figure": ["mean", *(f"quantile {level:g}" for level in self.levels)], "value": values})
