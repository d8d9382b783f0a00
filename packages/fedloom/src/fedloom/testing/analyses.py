"""Laws of analyses: answers are sums over rows, their bounds are public, and the result depends only on sums."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from fedloom.analyses import (
    Analysis,
    AnalysisTerms,
    Bounds,
    ClientRows,
    Info,
    Question,
    Rules,
    answer_question,
    run_questions,
    sum_answers,
)
from fedloom.analyses.run import SumRecord, prepare_clients
from fedloom.data.dataset import default_to_cpu
from fedloom.errors import ConfigError, Refused
from fedloom.seeds import generator
from fedloom.testing.report import check_arguments, generators_untouched, hold
from fedloom.testing.scene import demand

SUM_TOLERANCE = 1e-9
"""Maximum relative difference between float64 sums that are computed in different orders."""


class KilledRun(Exception):
    """Error that represents a process that is killed between two sums."""


@dataclass(frozen=True, eq=False)
class AnalysisScene:
    """Input of a law: an analysis, and the rows of the clients used for the check."""

    analysis: Analysis
    clients: tuple[ClientRows, ...]
    terms: AnalysisTerms

    @cached_property
    def log(self) -> list[SumRecord]:
        """All questions that are asked in a run, each with the resulting sum."""
        return self.run(self.terms, self.clients)[1]

    @cached_property
    def table(self) -> Any:
        """Result of the analysis in this run."""
        return self.analysis.result(self.run(self.terms, self.clients)[0])

    def run(
        self, terms: AnalysisTerms, clients: Sequence[ClientRows], folder: Path | None = None, most: int | None = None
    ) -> tuple[Any, list[SumRecord]]:
        """Run the analysis on some clients. If ``most`` is given, `KilledRun` is raised after this number of sums."""
        done = 0

        def ask(question: Question, bounds: Bounds) -> tuple[Tensor, Info]:
            nonlocal done
            if done == most:
                raise KilledRun
            done += 1
            answers = (self.reply(question, client, terms, bounds) for client in clients)
            return sum_answers([*answers])

        return run_questions(self.analysis, terms, ask, folder)

    def reply(self, question: Question, client: ClientRows, terms: AnalysisTerms, bounds: Bounds) -> Any:
        """Return the answer of one client to a question."""
        return answer_question(self.analysis, question, client, terms, bounds, "a client")

    def answers(self, clients: Sequence[ClientRows]) -> Iterator[tuple[Question, list[Tensor | None]]]:
        """Yield each question together with the answers that the clients compute, before bounds are applied."""
        for question, _, _ in self.log:
            yield question, [self.analysis.answer(question, client, self.terms) for client in clients]


def finishes(s: AnalysisScene) -> None:
    """Check that the analysis ends with a table and asks no more than the agreed number of questions."""
    demand(s.log, "the analysis asks no question")
    demand(hasattr(s.table, "column_names"), f"result must return a pyarrow table, got {type(s.table).__name__}")


def union(s: AnalysisScene) -> None:
    """Check that the answer for the rows of two clients together is the sum of their separate answers."""
    first, second = s.clients[0], s.clients[1]
    for question, (one, two, both) in s.answers([first, second, join_clients(first, second)]):
        if one is None or two is None or both is None:
            continue
        _agree(both, one + two, f"question {question.name!r}: the answer of all rows is not the sum of the answers")


def rows_in_any_order(s: AnalysisScene) -> None:
    """Check that changing the order of a client's rows changes its answer only by rounding errors."""
    client = s.clients[0]
    order = torch.randperm(len(client), generator=generator(0, purpose="laws of analyses"))
    for question, (one, two) in s.answers([client, client.select(order)]):
        if one is not None and two is not None:
            _agree(two, one, f"question {question.name!r}: the order of rows changes the answer")


def clients_in_any_order(s: AnalysisScene) -> None:
    """Check that the result is bitwise the same for any order of the clients."""
    turned = replace(s.terms, sizes=s.terms.sizes.flip(0), published=s.terms.published[::-1])
    other = s.analysis.result(s.run(turned, s.clients[::-1])[0])
    demand(other.equals(s.table), "the order of clients changes the result")


def nothing_of_no_rows(s: AnalysisScene) -> None:
    """Check that a client without rows answers with zeros."""
    for question, (answer,) in s.answers([s.clients[0].select(torch.zeros(0, dtype=torch.long))]):
        demand(
            answer is not None and not bool(answer.any()),
            f"question {question.name!r}: a client without rows must answer with zeros",
        )


def within_bounds(s: AnalysisScene) -> None:
    """Check that each answer lies within its bounds, which depend only on public numbers."""
    for question, answers in s.answers(s.clients):
        bounds = s.analysis.bounds(question, s.terms)
        demand(
            bool((bounds.step > 0).all() and (bounds.low <= bounds.high).all()),
            f"question {question.name!r}: low must be at most high, and step must be above 0",
        )
        for answer in answers:
            if answer is not None:
                where = f"question {question.name!r}: an answer has {len(answer)} numbers, but {len(bounds.low)} bounds"
                demand(answer.shape == bounds.low.shape, where)
                outside = bounds.project(answer)[1]
                demand(
                    not outside, f"question {question.name!r}: {outside} numbers of an answer are outside their bounds"
                )


def pure(s: AnalysisScene) -> None:
    """Check that an answer is repeatable, does not change any argument and does not use a global generator."""
    for client in s.clients:
        before = (client.x.clone(), client.y.clone())
        with generators_untouched():
            for question, (one, two) in s.answers([client, client]):
                demand(
                    one is None or (two is not None and torch.equal(one, two)),
                    f"question {question.name!r}: the same rows give two different answers",
                )
        for old, new in zip(before, (client.x, client.y), strict=True):
            demand(torch.equal(old.nan_to_num(7.5), new.nan_to_num(7.5)), "answer changes the client's rows")


def resumes(s: AnalysisScene) -> None:
    """Check that an analysis killed between two sums continues without losing a sum and gives the same result."""
    for most in range(len(s.log)):
        with TemporaryDirectory() as place:
            with suppress(KilledRun):
                s.run(s.terms, s.clients, Path(place), most)
            log = list[Question]()

            def ask(question: Question, bounds: Bounds, log: list[Question] = log) -> tuple[Tensor, Info]:
                log.append(question)
                return sum_answers([s.reply(question, client, s.terms, bounds) for client in s.clients])

            state, _ = run_questions(s.analysis, s.terms, ask, Path(place))
            sentence = f"a run resumed after {most} of {len(s.log)} sums asks for {len(log)} more sums"
            demand(len(log) == len(s.log) - most, sentence)
            demand(s.analysis.result(state).equals(s.table), f"a run resumed after {most} sums has a different result")


def few_stay_silent(s: AnalysisScene) -> None:
    """Check that a client with fewer subjects than agreed answers with zeros, and that this client is counted."""
    terms = replace(s.terms, rules=s.terms.rules.with_(min_subjects=10**6), published=())
    terms = replace(terms, published=tuple(s.analysis.publish(client, terms) for client in s.clients))
    question = s.log[0].question
    try:
        reply = s.reply(question, s.clients[0], terms, s.analysis.bounds(question, s.terms))
    except Refused:  # cells are too rare, so no question is asked
        return
    demand(reply.neutral and not bool(reply.values.any()), "a client with too few subjects must answer zeros")


ANALYSIS_LAWS: dict[Callable[[Any], None], str] = {
    finishes: "return None from `question` when the analysis is done",
    pure: "clone before an in-place operation, and do not draw random numbers",
    union: "answer with sums over rows. Divide in `step`, where the total is known",
    rows_in_any_order: "answer with sums over rows that do not depend on the order",
    clients_in_any_order: "use only the total and the public terms",
    nothing_of_no_rows: "start from zeros of the full length, and add rows",
    within_bounds: "derive low and high from terms.sizes and the agreed ranges",
    resumes: "store everything that a question needs in the state, and compute it only from the totals",
    few_stay_silent: "do not check minimum counts in the analysis, because the runner checks them",
}
"""All laws of an analysis that is computed from sums, each with advice on how a violation is usually fixed."""


@default_to_cpu()
def check_analysis(
    analysis: Analysis, clients: Any, *, rules: Rules | None = None, without: Collection[str] = ()
) -> None:
    """Check, on data from several clients, that an analysis computed from sums satisfies all laws.

    Args:
        analysis: the value.
        clients: at least two clients, of any type that `fl.analyze` accepts.
        rules: rules that the clients agreed on.
        without: names of laws that the analysis violates on purpose.

    Raises:
        AssertionError: a law is violated. The message names the first such law, the analysis, the problem and the usual
            fix.
        ConfigError: the value is not an analysis that is computed from sums, there are fewer than two clients, or a
            name in ``without`` is not the name of a law.
    """
    check_arguments(analysis, Analysis, "fl.analyses.ANALYSES['table-1']()", ANALYSIS_LAWS, without)
    schema, rows, _ = prepare_clients(clients, analysis)
    if len(rows) < 2:
        raise ConfigError("the laws of sums need at least two clients. Pass a federation or a mapping of clients")
    members = tuple(rows.values())
    terms = AnalysisTerms(schema, torch.tensor([len(client) for client in members]), rules or Rules())
    terms = replace(terms, published=tuple(analysis.publish(client, terms) for client in members))
    hold(ANALYSIS_LAWS, AnalysisScene(analysis, members, terms), analysis, Analysis, without)


def join_clients(first: ClientRows, second: ClientRows) -> ClientRows:
    """Return the rows of two clients as if they all belonged to a single client."""
    cut = len(first)

    def fetch(rows: Tensor) -> Tensor:
        return torch.cat([client.inputs for client in (first, second)])[rows]

    return ClientRows(
        torch.cat([first.x, second.x]),
        torch.cat([first.y, second.y]),
        torch.cat([first.part, second.part]),
        torch.cat([first.subjects, second.subjects + cut]),
        {name: torch.cat([codes, second.columns[name]]) for name, codes in first.columns.items()},
        fetch,
        models=first.models,
    )


def _agree(got: Tensor, want: Tensor, sentence: str) -> None:
    worst = float((got - want).abs().max()) if len(got) else 0.0
    size = float(want.abs().max()) if len(want) else 0.0
    demand(worst <= SUM_TOLERANCE * max(size, 1.0), f"{sentence} (largest difference {worst:.3g})")
