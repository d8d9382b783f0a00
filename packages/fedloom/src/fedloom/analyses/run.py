"""Functions that run an analysis in one process, and functions shared by all other ways to run it.

`answer_question` runs at the client, and `run_questions` runs in the process that asks the questions. The code in
between only transports questions and sums.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch import Tensor, nn

from fedloom.analyses.form import (
    Analysis,
    AnalysisTerms,
    Bounds,
    Info,
    Question,
    QuestionOrderError,
    Rules,
    State,
    needs_run,
    require_questions,
)
from fedloom.analyses.registry import ANALYSES
from fedloom.analyses.rows import ClientRows, Schema, client_rows, dataset_rows, fill_ranges, make_schema
from fedloom.data.dataset import Dataset, default_to_cpu
from fedloom.data.federation import Federation
from fedloom.data.groups import describe_repeated_subjects, get_subjects
from fedloom.engine.result import Result
from fedloom.engine.setting import Setting
from fedloom.engine.setup import find_model_kinds
from fedloom.errors import CheckpointError, CodeError, ConfigError, DataError, Refused, attribute_error
from fedloom.formats import as_pandas
from fedloom.hints import suggest_nearest, unknown_name_error
from fedloom.rundir import as_path
from fedloom.storage.files import write_atomic
from fedloom.values import dump_value, get_kind, make, make_kind

SUM_FILE = "sum-{:04}.bin"
SUM_FORM = {"sum": {"total": 1, "info": 1}}
"""Structure of a sum in a checkpoint."""


class Answer(NamedTuple):
    """A client's answer in the form in which it leaves the client.

    Attributes:
        values: numbers within the bounds, ``[k]`` float64.
        clipped: number of values that were outside their bounds.
        neutral: True if the client has rows but answers with zeros, because it has too few subjects or declined to
            answer.
        rows: number of rows in the answer.
    """

    values: Tensor
    clipped: int
    neutral: bool
    rows: int


class SumRecord(NamedTuple):
    """A question and the sum of the answers to it."""

    question: Question
    total: Tensor
    info: Info


Ask = Callable[[Question, Bounds], tuple[Tensor, Info]]
"""Function that sends a question to all clients and returns the sum of their answers ``[k]``, with facts about the
sum."""


@dataclass(frozen=True, eq=False)
class AnalysisResult:
    """Result of an analysis.

    Attributes:
        analysis: the analysis.
        table: resulting table.
        log: all questions with their sums.
        notes: notes about the data and about omitted results.
        model: predictor, if the analysis computes one.
    """

    analysis: Analysis
    table: pa.Table
    log: tuple[SumRecord, ...] = ()
    notes: tuple[str, ...] = ()
    model: nn.Module | None = None

    def to_pandas(self) -> Any:
        """Return the table as a pandas DataFrame.

        Raises:
            ConfigError: pandas is not installed.
        """
        return as_pandas(self.table)

    def __repr__(self) -> str:
        count = f", {len(self.log)} questions" if self.analysis.by_sums else ""
        name = self.analysis.find_name()
        return f"AnalysisResult({name}: {self.table.num_rows} rows of {self.table.column_names}{count})"


@default_to_cpu()
def analyze(
    analysis: Analysis | str,
    clients: object,
    *,
    rules: Rules | Mapping[str, Any] | None = None,
    folder: Path | str | None = None,
    **options: object,
) -> AnalysisResult:
    """Run an analysis and return its result. The analysis uses only sums over all clients' rows, or a run's models.

    >>> import numpy as np
    >>> clients = {"north": ([[1.0], [2.0]], [0, 1]), "south": ([[3.0], [6.0]], [1, 0])}  # doctest: +SKIP
    >>> fl.analyze("table-1", clients).table  # doctest: +SKIP

    Args:
        analysis: an analysis, its name in `fedloom.analyses.ANALYSES`, or its import path.
        clients: a `Federation`, a `Dataset` whose users are the clients, or a value that `Federation.create` or
            `Dataset.create` accepts. For an analysis of models, this is the `Result` of a run.
        rules: rules that the clients agreed on (`Rules`), as a value or a table of options. If None, the analysis' own
            rules are used.
        folder: folder for the sums. If a call is interrupted, repeating it resumes from this folder. If None, sums are
            not saved.
        options: options of the analysis, if it is given by name.

    Raises:
        ConfigError: an analysis or an option is unknown, or the analysis is unsuitable for the data.
        DataError: the analysis has no result, or an answer is outside its bounds.
        CheckpointError: the folder belongs to a different analysis.
    """
    value = resolve_analysis(analysis, options)
    if not isinstance(rules, Rules | Mapping | None):
        raise ConfigError(f"rules must be a table, such as {{'min_subjects': 5}}, got {rules!r:.80}")
    agreed = rules if isinstance(rules, Rules) else value.rules or Rules()
    if isinstance(rules, Mapping):
        agreed = make(Rules, rules, "rules", Rules.model_fields)
    if isinstance(clients, Result) and not value.by_sums:
        value.check_run(clients.job.eval_fed, clients.job.setting)
        table, notes = value.measure(clients)
        return AnalysisResult(value, table, notes=tuple(notes))
    require_questions(value)
    schema, rows, notes = prepare_clients(clients, value)
    place = None if folder is None else as_path(folder, "folder", ", or None to save nothing")
    return analyze_rows(value, schema, rows, agreed, place, notes)


def analyze_rows(
    analysis: Analysis,
    schema: Schema,
    rows: Mapping[str, ClientRows],
    rules: Rules,
    folder: Path | None = None,
    notes: Sequence[str] = (),
) -> AnalysisResult:
    """Run an analysis of the given rows, using only sums.

    Args:
        analysis: analysis that is computed from sums.
        schema: schema of the rows, with a range for each number.
        rows: each client's rows, keyed by client name.
        rules: rules that the clients agreed on.
        folder: folder for the sums. If None, sums are not saved.
        notes: notes about the rows, which come first in the result.

    Raises:
        DataError: see `analyze`.
    """
    members = list(rows.values())
    sizes = torch.tensor([len(client) for client in members])
    terms = AnalysisTerms(schema, sizes, rules, names=tuple(rows))
    terms = replace(terms, published=tuple(analysis.publish(client, terms) for client in members))

    def ask(question: Question, bounds: Bounds) -> tuple[Tensor, Info]:
        answers = (
            answer_question(analysis, question, client, terms, bounds, f"client {name}")
            for name, client in rows.items()
        )
        return sum_answers([*answers])

    state, log = run_questions(analysis, terms, ask, folder)
    with attribute_error("analysis", analysis, "its result"):
        table = analysis.result(state)
        notes = (*notes, *analysis.remarks(table))
        return AnalysisResult(analysis, table, tuple(log), notes, analysis.model(state))


def resolve_analysis(
    analysis: Analysis | str | Mapping[str, Any], options: Mapping[str, Any], where: str = ""
) -> Analysis:
    """Return the analysis that a value, a name with options, or a table with a ``kind`` describes.

    Raises:
        ConfigError: a name or an option is unknown, or options are given together with a value.
    """
    if isinstance(analysis, Analysis):
        if options:
            raise ConfigError(
                f"{', '.join(options)}: options can be passed only with the name of an analysis. To "
                f"change an option of this value, use with_({next(iter(options))}=...)"
            )
        return analysis
    if not isinstance(analysis, str | Mapping):
        raise ConfigError(
            f"{where}{where and ': '}an analysis must be a value, a name or a table with `kind`, got "
            f"{analysis!r:.80}. Allowed names: {', '.join(ANALYSES)}"
        )
    table = {"kind": analysis, **options} if isinstance(analysis, str) else {**analysis, **options}
    if "kind" not in table:
        raise ConfigError(f"{where}{where and ': '}kind is missing. Allowed: {', '.join(ANALYSES)}")
    kind = str(table["kind"])
    if ":" not in kind and kind not in ANALYSES and find_spec("fedloom_clinic") is None:
        cure = f"{suggest_nearest(kind, ANALYSES)}. More analyses come with the package fedloom-clinic"
        raise unknown_name_error("analysis kind", kind, ANALYSES, where, cure)
    value: Analysis = make_kind("analysis", ANALYSES, table, where or kind, base=Analysis)
    return value


def run_questions(
    analysis: Analysis, terms: AnalysisTerms, ask: Ask, folder: Path | None = None
) -> tuple[State, list[SumRecord]]:
    """Run an analysis to its end, and return its last state and the log of its questions.

    The state follows from the sums, so a checkpoint contains only sums. One file is written after every sum. An
    interrupted run asks only the remaining questions.

    Args:
        analysis: analysis that is computed from sums.
        terms: public facts about the analysis.
        ask: function that sends a question to all clients.
        folder: folder for the sums. If None, sums are not saved.

    Raises:
        ConfigError: the analysis asks more questions than were agreed on.
        CodeError: a question does not have the declared form or is asked too late. Questions may be skipped.
        DataError: a number in an answer was outside its bounds.
        CheckpointError: the folder belongs to a different analysis, or one of its sums is damaged.
    """
    log, place = list[SumRecord](), 0
    kept = SumFolder(folder, analysis, terms) if folder is not None else None
    with attribute_error("analysis", analysis, "its start"):
        state = analysis.start(terms)
    while True:
        where = f"question {len(log) + 1}"
        with attribute_error("analysis", analysis, where):
            question = analysis.question(state)
        if question is None:
            return state, log
        question.check_form(analysis.questions)
        while place < len(analysis.order) - 1 and analysis.order[place] != question.name:
            place += 1
        analysis.check_step(place, question)
        place += 1
        if len(log) == terms.rules.questions:
            raise Refused(
                f"{get_kind(analysis)} needs more than the {terms.rules.questions} questions that the rules allow. "
                f"Agree on a larger number: rules = {{questions = ...}}"
            )
        record = None if kept is None else kept.read(len(log), question)
        if record is None:
            with attribute_error("analysis", analysis, where):
                bounds = analysis.bounds(question, terms)
            total, info = ask(question, bounds)
            check_info(analysis, question, info)
            record = SumRecord(question, total, info)
            if kept is not None:
                kept.write(len(log), record)
        log.append(record)
        with attribute_error("analysis", analysis, where):
            state = analysis.step(state, record.total, record.info)


def check_analysis(analysis: Analysis, fed: Federation, setting: Setting | None = None) -> None:
    """Raise an error if an analysis is unsuitable for a federation, or asks questions that no real site would answer.

    Raises:
        ConfigError: see `Analysis.check_run`.
        CodeError: see `check_order`.
    """
    analysis.check_run(fed, setting)
    if setting is not None and getattr(analysis, "model_kind", None) is not None:  # to find the kinds takes a model
        analysis.check_models(find_model_kinds(setting, fed))
    if analysis.by_sums and ":" in get_kind(analysis):
        clients = [client_rows(fed, k) for k in range(fed.n)]
        schema, _ = fill_ranges(make_schema(fed.data), dict(zip(fed.names, clients, strict=True)))
        terms = AnalysisTerms(schema, torch.tensor([*map(len, clients)]), analysis.rules or Rules())
        with suppress(Exception):  # user code may expect models; the run reports such errors
            terms = replace(terms, published=tuple(analysis.publish(rows, terms) for rows in clients))
        check_order(analysis, terms)


def check_order(analysis: Analysis, terms: AnalysisTerms, *, at_sites: bool = False) -> None:
    """Raise an error if an analysis asks its questions in the wrong order when all sums are zeros.

    Clients with too few subjects answer with zeros. All other errors are ignored here, because a real run may never see
    sums of zeros.

    Args:
        analysis: analysis that is computed from sums.
        terms: public facts about the analysis.
        at_sites: True for real sites, which do not answer if an earlier question was skipped.

    Raises:
        CodeError: see `Analysis.check_step`.
    """
    steps = itertools.count()

    def ask(question: Question, bounds: Bounds) -> tuple[Tensor, Info]:
        if at_sites:
            analysis.check_step(next(steps), question)
        return torch.zeros_like(bounds.low), Info(len(terms.sizes), 0, 0, int(terms.sizes.sum()))

    most = analysis.most_questions  # an analysis of zero sums may not converge
    rules = terms.rules.with_(questions=min(terms.rules.questions or most, most))
    try:
        with warnings.catch_warnings(action="ignore"):  # such as division by a total of zero
            run_questions(analysis, replace(terms, rules=rules), ask)
    except QuestionOrderError:
        raise
    except Exception:
        return


def check_info(analysis: Analysis, question: Question, info: Info) -> None:
    """Raise an error if numbers in a sum were clipped, because the result would be wrong.

    Raises:
        DataError: at least one number was clipped.
    """
    if info.clipped:
        raise DataError(
            f"{get_kind(analysis)}, question {question.name!r}: {info.clipped} numbers in the answers were outside "
            f"their bounds, so the result would be wrong. {analysis.wider}"
        )


def answer_question(
    analysis: Analysis, question: Question, client: ClientRows, terms: AnalysisTerms, bounds: Bounds, where: str
) -> Answer:
    """Return a client's answer, clipped to the bounds.

    A client with too few subjects answers with zeros.

    Args:
        analysis: analysis that is computed from sums.
        question: question that the client received.
        client: the client's rows.
        terms: public facts about the analysis.
        bounds: bounds of the answer.
        where: client's name for messages.

    Raises:
        ConfigError: the analysis does not answer this question.
        CodeError: the answer has the wrong shape or dtype, or it is not finite.
    """
    with attribute_error("analysis", analysis, f"the answer of {where}"):
        analysis.check_question(question, terms)
        if 0 < analysis.used(client, terms).count < terms.rules.min_subjects:
            return Answer(torch.zeros_like(bounds.low), 0, True, 0)
        answer = analysis.answer(question, client, terms)
    if answer is None:
        return Answer(torch.zeros_like(bounds.low), 0, True, 0)
    shape = tuple(bounds.low.shape)
    got = (getattr(answer, "dtype", type(answer).__name__), tuple(getattr(answer, "shape", ())))
    if got != (torch.float64, shape):
        raise CodeError(
            f"{get_kind(analysis)}: the answer of {where} to {question.name!r} must be float64 "
            f"{[*shape]}, got {got[0]} {[*got[1]]}"
        )
    if not bool(answer.isfinite().all()):
        raise CodeError(f"{get_kind(analysis)}: the answer of {where} to {question.name!r} is not finite")
    values, clipped = bounds.project(answer)
    return Answer(values, clipped, False, len(client))


def sum_answers(answers: Sequence[Answer]) -> tuple[Tensor, Info]:
    """Return the sum of answers and facts about the sum.

    Numbers are added exactly (`math.fsum`), so the sum is bitwise identical for any order of the clients.
    """
    columns = zip(*(reply.values.tolist() for reply in answers), strict=True)
    total = torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64)
    clipped, neutral, rows = (sum(int(reply[k]) for reply in answers) for k in (1, 2, 3))
    return total, Info(len(answers), clipped, neutral, rows)


class SumFolder:
    """Folder that contains the sums of one analysis, with one file per sum.

    Args:
        folder: path to the folder, which is created if it does not exist.
        analysis: analysis that requested the sums.
        terms: public facts about the analysis.

    Raises:
        CheckpointError: the folder contains sums of a different analysis or of different data.
    """

    def __init__(self, folder: Path, analysis: Analysis, terms: AnalysisTerms) -> None:
        self._folder = folder
        facts = {
            "analysis": {"kind": get_kind(analysis), **dump_value(analysis)},
            "rules": dump_value(terms.rules),
            "columns": [dump_value(column) for column in terms.schema.columns],
            "sizes": terms.sizes.tolist(),
            "published": [hashlib.sha256(flags.double().numpy().tobytes()).hexdigest() for flags in terms.published],
        }
        text = json.dumps(facts, sort_keys=True, indent=1)
        self._digest = hashlib.sha256(text.encode()).digest()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "analysis.json"
        if path.exists() and path.read_text() != text:
            raise CheckpointError(
                f"{folder} contains sums of a different analysis or of different rows. Choose another folder"
            )
        write_atomic(path, text.encode())

    def read(self, place: int, question: Question) -> SumRecord | None:
        """Return the sum for a question, or None if the folder does not contain it.

        Raises:
            CheckpointError: the sum is damaged or belongs to a different question.
        """
        path = self._folder / SUM_FILE.format(place + 1)
        if not path.exists():
            return None
        content = path.read_bytes()
        digest, body = content[:32], content[32:]
        head = question.encode()
        if digest != self._hash(body) or body[: len(head)] != head:
            raise CheckpointError(
                f"{path} is damaged or belongs to a different question. Delete {self._folder} and start over"
            )
        sums = Question.decode(body[len(head) :], SUM_FORM).values
        return SumRecord(question, sums["total"], Info(*(int(count) for count in sums["info"].tolist())))

    def write(self, place: int, record: SumRecord) -> None:
        """Write the sum for a question to the folder."""
        sums = Question("sum", {"total": record.total, "info": torch.tensor([*record.info], dtype=torch.float64)})
        body = record.question.encode() + sums.encode()
        write_atomic(self._folder / SUM_FILE.format(place + 1), self._hash(body) + body)

    def _hash(self, body: bytes) -> bytes:
        return hashlib.sha256(self._digest + body).digest()


def prepare_clients(clients: object, analysis: Analysis) -> tuple[Schema, dict[str, ClientRows], list[str]]:
    """Return the schema with a range for each number, each client's rows keyed by name, and notes.

    Raises:
        ConfigError: see `analyze`.
    """
    data, rows, notes = _read_given_clients(clients, analysis)
    schema = make_schema(data)
    analysis.check(schema, clients.job.setting if isinstance(clients, Result) else None)
    if analysis.assumes_independence and get_subjects(data) is not None:
        subjects = torch.cat([some.subjects for some in rows.values()])
        notes += describe_repeated_subjects(len(subjects), len(subjects.unique()))
    schema, unagreed = fill_ranges(schema, rows)
    if unagreed:
        more = ", ..." if len(unagreed) > 5 else ""
        notes.append(
            f"no ranges have been agreed on for {', '.join(unagreed[:5])}{more}. This simulation uses the columns' "
            f"actual ranges, but real sites must agree on ranges"
        )
    return schema, rows, notes


def _read_given_clients(clients: object, analysis: Analysis) -> tuple[Dataset, dict[str, ClientRows], list[str]]:
    if isinstance(clients, Result):
        from fedloom.analyses.models import models_by_client

        fed = clients.job.eval_fed
        models = models_by_client(clients) if analysis.uses_models else None
        rows = {name: client_rows(fed, k, models and models(k)) for k, name in enumerate(fed.names)}
        return fed.data, rows, [*fed.remarks]
    if analysis.uses_models:
        raise needs_run(analysis)
    if not isinstance(clients, Dataset | Federation):
        many = isinstance(clients, list) or (isinstance(clients, Mapping) and not {"x", "train"} & clients.keys())
        clients = Federation.create(clients) if many else Dataset.create(clients)
    if isinstance(clients, Dataset):
        return clients, dataset_rows(clients), [*clients.notes]
    rows = {name: client_rows(clients, k) for k, name in enumerate(clients.names)}
    return clients.data, rows, [*clients.remarks]
