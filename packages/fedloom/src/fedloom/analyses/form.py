"""Form of an analysis: a frozen value with pure functions that asks all clients questions. The answers are summed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pyarrow as pa
import torch
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer
from torch import Tensor, nn

from fedloom.analyses.rows import ClientRows, Schema, schema_of
from fedloom.errors import ConfigError, Refused, WireError
from fedloom.values import Value, kind_of

if TYPE_CHECKING:
    from fedloom.data.federation import Federation
    from fedloom.engine.result import Result
    from fedloom.engine.setting import Setting

State = Any
"""State of an analysis between two questions. It has its own type and is never modified."""
MAX_QUESTION_BYTES = 2**26
_LENGTH_STRUCT = struct.Struct("<I")


@dataclass(frozen=True, eq=False)
class Question:
    """Public numbers that are sent to all clients.

    Args:
        name: a key of the analysis' `questions`.
        values: the numbers by field, float64 tensors.
    """

    name: str
    values: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Question) and self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash(self.encode())

    def encode(self) -> bytes:
        """Return the question as bytes: a JSON header with name and shapes, followed by little-endian numbers."""
        shapes = {name: list(value.shape) for name, value in self.values.items()}
        head = json.dumps([self.name, shapes], separators=(",", ":")).encode()
        body = b"".join(value.double().contiguous().numpy().astype("<f8").tobytes() for value in self.values.values())
        return _LENGTH_STRUCT.pack(len(head)) + head + body

    @classmethod
    def decode(cls, content: bytes, forms: Mapping[str, Mapping[str, int]]) -> Question:
        """Return the question that `encode` has written.

        Args:
            content: the bytes.
            forms: fields of each question with their numbers of dimensions (see `Analysis.questions`).

        Raises:
            WireError: the bytes are not a question in one of these forms.
        """
        try:
            if len(content) > MAX_QUESTION_BYTES:
                raise ValueError
            (length,) = _LENGTH_STRUCT.unpack_from(content)
            name, shapes = json.loads(content[4 : 4 + length])
            form, at, values = forms[name], 4 + length, dict[str, Tensor]()
            if {key: len(shape) for key, shape in shapes.items()} != dict(form) or [*shapes] != [*form]:
                raise ValueError
            for key, shape in shapes.items():
                if not all(type(size) is int and size >= 0 for size in shape):
                    raise ValueError
                count = int(torch.Size(shape).numel())
                piece = content[at : at + 8 * count]
                values[key] = torch.tensor(struct.unpack(f"<{count}d", piece), dtype=torch.float64).view(shape)
                if not bool(values[key].isfinite().all()):
                    raise ValueError
                at += 8 * count
            if at != len(content):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
            raise WireError(
                "these bytes are not a question of the analysis. The server and the client must use the same analysis"
            ) from None
        return cls(name, values)


class Bounds(NamedTuple):
    """Range and step of each number in a client's answer. They depend only on public numbers.

    Attributes:
        low: smallest possible values ``[k]``.
        high: ``[k]`` largest.
        step: steps ``[k]``, > 0. Under masks, a number is rounded to a multiple of its step. If everything runs in one
            process, nothing is rounded.
    """

    low: Tensor
    high: Tensor
    step: Tensor

    @classmethod
    def counts(cls, numbers: int, most: float) -> Bounds:
        """Return the bounds of integers from 0 to ``most``."""
        return cls.between(torch.zeros(numbers), torch.full((numbers,), float(most)), 1.0)

    @classmethod
    def between(cls, low: Tensor, high: Tensor, step: float = 2.0**-36) -> Bounds:
        """Return the bounds of numbers ``[k]`` with the same step."""
        return cls(low.double(), high.double(), torch.full((len(low),), step, dtype=torch.float64))

    @classmethod
    def join(cls, parts: Sequence[Bounds]) -> Bounds:
        """Return the bounds of an answer that consists of several parts, one part after the other."""
        return cls(*(torch.cat(sides) for sides in zip(*parts, strict=True)))

    def project(self, answer: Tensor) -> tuple[Tensor, int]:
        """Return an answer ``[k]`` clipped to the bounds, and how many of its numbers were outside."""
        inside = answer.clamp(self.low, self.high)
        return inside, int((inside != answer).sum())


class Info(NamedTuple):
    """Facts about a sum, in addition to its numbers.

    Attributes:
        clients: number of clients in the sum.
        clipped: number of values that were outside their bounds. A result requires that this number is 0.
        neutral: number of clients with rows that answered zeros, because they have fewer rows than the agreed minimum
            or declined to answer.
        rows: number of rows of the clients that answered.
    """

    clients: int
    clipped: int
    neutral: int
    rows: int


class Rules(Value):
    """Rules on which all parties agree before the first question of an analysis."""

    questions: int = Field(
        200,
        ge=1,
        description="maximum number of questions that the analysis may ask (default at real sites: 24 for most "
        "analyses)",
    )
    min_subjects: int = Field(
        1,
        ge=1,
        description="smallest number of subjects of a client or in a cell. A client with fewer subjects answers zero",
    )
    min_clients: int = Field(1, ge=1, description="smallest number of clients in a cell. Cells with fewer are merged")
    missing: int = Field(
        0, ge=0, description="number of clients that may be absent while a cell still has enough clients"
    )

    @model_serializer(mode="wrap")
    def _stated(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write only the rules that are set: every party uses its own values for the others."""
        return {name: value for name, value in write(self).items() if name in self.model_fields_set}


@dataclass(frozen=True, eq=False)
class AnalysisTerms:
    """Everything that is public before the first question, and equal for all parties.

    Args:
        schema: columns, levels and agreed ranges.
        sizes: number of rows of each client ``[n]`` int64.
        rules: the agreed rules.
        published: numbers ``[c]`` that `Analysis.publish` returns for each client. The tensors are empty if nothing is
            published.
    """

    schema: Schema
    sizes: Tensor
    rules: Rules = field(default_factory=Rules)
    published: tuple[Tensor, ...] = ()

    @property
    def most_rows(self) -> int:
        """Number of rows of the largest client."""
        return int(self.sizes.max())


class FurtherRun(NamedTuple):
    """Run that an analysis needs, and how its result is used.

    Attributes:
        setting: setting of the run.
        fed: its clients.
        measure: function that returns the rows of the analysis' table.
    """

    setting: Setting
    fed: Federation
    measure: Callable[[Result], pa.Table]


class Analysis(Value):
    """Question about a whole federation, as a frozen value whose fields are its options and whose functions are pure.

    An analysis by sums defines `start`, `question`, `bounds`, `answer`, `step` and `result`, and runs in one process,
    at sites (plain or masked) and in a Flower app, with the same result. An analysis of a run defines `measure`, which
    reads the models of a `fedloom.engine.result.Result`. An analysis that needs further runs defines `units`.
    """

    kind: ClassVar[str]
    """Name in files and in `fl.analyze`. For user code, it is the import path."""
    questions: ClassVar[Mapping[str, Mapping[str, int]]] = {}
    """Declared form of each question: its fields by name, with their numbers of dimensions.

    Questions are asked in this order. Real sites do not answer questions in any other order. The last question may be
    repeated.
    """
    retried: ClassVar[Collection[str]] = ()
    """Questions that a client may be unable to answer, for instance because a step is too long. In this case, `step`
    tries a different question."""
    suppresses: ClassVar[bool] = False
    """True if clients remove their rare cells from every answer themselves, so that rare cells need not be merged
    without masks."""
    uses_models: ClassVar[bool] = False
    """True if an answer reads `ClientRows.models`, so that a run must come first."""
    wider: ClassVar[str] = "Agree on wider ranges"
    """Advice if numbers of an answer are outside their bounds."""
    tasks: ClassVar[Collection[str]] = ()
    """Tasks whose data the analysis can read. Empty: every task."""
    needs_table: ClassVar[bool] = False
    """True if the analysis reads the columns of a table."""
    per: ClassVar[str] = "run"
    """Scope of a table that `measure` returns: "run", or "seed" if the table is the same for all methods."""

    rules: Rules | None = Field(
        None, description="limits that all clients agree on (default: the limits of a simulation or of real sites)"
    )

    def check(self, schema: Schema, setting: Setting | None = None) -> None:
        """Raise if the analysis is incompatible with the data or the setting. This method is called before any work.

        An analysis with further conditions should call this base method first.

        Args:
            schema: schema of the data.
            setting: setting of the run whose models are analyzed. None without one.

        Raises:
            ConfigError: the message states what is wrong, where, and what to do.
            Refused: the analysis makes no sense for these data.
        """
        what = f"the analysis {kind_of(self)}"
        if self.tasks and schema.task not in self.tasks:
            raise Refused(
                f"{what} works only for the task {' or '.join(self.tasks)}, but the task of "
                f"{schema.name} is {schema.task}",
                rule="analysis-task",
                fix="read the data with {data.task = 'binary'}"
                if "binary" in self.tasks and len(schema.classes) == 2
                else f"leave the analysis out, or use {_fitting(schema)}",
            )
        if self.needs_table and not schema.is_table:
            raise Refused(
                f"{what} reads the columns of a table, but {schema.name} is not a table",
                rule="analysis-needs-a-table",
                fix=f"leave the analysis out, or use {_fitting(schema)}",
            )

    def check_run(self, fed: Federation, setting: Setting | None = None) -> None:
        """Raise if the analysis is incompatible with a federation (see `check`)."""
        self.check(schema_of(fed.data), setting)

    def check_sites(self, schema: Schema, *, masked: bool) -> None:
        """Raise if an agreement does not allow real sites to answer.

        This method is called when the sites agree, after `check`.

        Args:
            schema: schema with the agreed ranges.
            masked: True if answers are summed under masks.

        Raises:
            ConfigError: the analysis shows values of individual clients, or a number has no agreed range.
        """
        if masked and self.shows_rows:
            raise ConfigError(
                f"with these options, the analysis {kind_of(self)} shows results of single clients, "
                "but secure aggregation hides these results",
                rule="analysis-shows-clients",
                fix="leave these options out, or deploy without secure aggregation",
            )
        unagreed = [column.name for column in schema.columns if not column.levels and column.range is None]
        if unagreed:
            raise ConfigError(
                f"the analysis {kind_of(self)} scales numbers by agreed ranges, but "
                f"{', '.join(map(repr, unagreed[:5]))} has no agreed range",
                rule="analysis-range",
                fix="set range = [LOWEST, HIGHEST] for each of these columns in the agreement (fedloom init --agree)",
            )

    @property
    def most_questions(self) -> int:
        """Largest number of questions that a real site answers, if no rules state a number."""
        return 24

    @property
    def kept_columns(self) -> Sequence[str]:
        """Return columns, or thresholds on columns, that a table must keep in addition to the models' inputs."""
        return ()

    @property
    def shows_rows(self) -> bool:
        """True if `publish` returns values of individual rows, which a plain agreement allows but masks do not."""
        return False

    def publish(self, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        """Return the numbers that a client publishes before the first question, float64 ``[c]``.

        Most analyses publish nothing.

        At real sites, these numbers are only flags: 1 for a cell that reaches the minimum at the client, else 0. The
        sizes of other clients are unknown at this time.
        """
        return torch.zeros(0, dtype=torch.float64)

    def used(self, client: ClientRows, terms: AnalysisTerms) -> ClientRows:
        """Return the rows of a client that sums include. By default, these are all rows.

        A client with fewer subjects than agreed in these rows answers zeros.
        """
        return client

    def row_sets(self, client: ClientRows, terms: AnalysisTerms) -> Sequence[ClientRows]:
        """Return the sets of a client's rows that sums cover. By default, there is one set: `used`.

        A site does not answer for a set that differs from an earlier set in only a few subjects.
        """
        return [self.used(client, terms)]

    def start(self, terms: AnalysisTerms) -> State:
        """Return the state before the first question."""
        raise NotImplementedError

    def question(self, state: State) -> Question | None:
        """Return the next question. None after the last question."""
        raise NotImplementedError

    def check_question(self, question: Question, terms: AnalysisTerms) -> None:
        """Raise if a client should not answer a question.

        This method is called at the client, with public arguments only.

        Raises:
            ConfigError: the rules do not allow this question.
        """

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the questions, in the order in which they are asked. The last question may be repeated."""
        return tuple(self.questions)

    def bounds(self, question: Question, terms: AnalysisTerms) -> Bounds:
        """Return the bounds of one client's answer."""
        raise NotImplementedError

    def answer(self, question: Question, client: ClientRows, terms: AnalysisTerms) -> Tensor | None:
        """Return the client's answer, float64 ``[k]``: a sum over its rows. Zeros without rows.

        None stands for zeros. It is returned if the client's rows are a reason not to answer, for instance because a
        single row would determine the sum. Such a client counts as neutral, and nobody learns which client it is.
        """
        raise NotImplementedError

    def step(self, state: State, total: Tensor, info: Info) -> State:
        """Return the state after a question.

        Args:
            state: before it.
            total: sum of the answers ``[k]``.
            info: facts about the sum.

        Raises:
            DataError: the analysis has no result, for instance because a fit is not finite.
        """
        raise NotImplementedError

    def result(self, state: State) -> pa.Table:
        """Return the table of a finished analysis."""
        raise NotImplementedError

    def model(self, state: State) -> nn.Module | None:
        """Return the predictor of a finished analysis, or None if the analysis does not make a predictor.

        The predictor maps inputs ``[b, *shape]``, in the form of the federation's models, to outputs ``[b, c]``.
        """
        return None

    def measure(self, result: Result) -> tuple[pa.Table, Sequence[str]]:
        """Return the table of an analysis that reads a run, and notes about the table."""
        raise NotImplementedError

    def units(self, setting: Setting, fed: Federation, result: Result) -> Iterator[FurtherRun]:
        """Yield the further runs that the analysis needs for a method and a seed.

        Args:
            setting: setting of the run.
            fed: its clients.
            result: result of the complete run.
        """
        yield from ()

    @property
    def runs_further(self) -> bool:
        """True if the analysis needs further runs."""
        return type(self).units is not Analysis.units

    @property
    def by_sums(self) -> bool:
        """True if the analysis works by sums."""
        return type(self).answer is not Analysis.answer

    def find_name(self) -> str:
        """Return the name in files, for user code without the module."""
        return kind_of(self).rpartition(":")[2]


def require_questions(analysis: Analysis) -> None:
    """Raise if an analysis does not work by sums.

    Raises:
        ConfigError: the analysis does not define `answer`.
    """
    if not analysis.by_sums:
        raise needs_run(analysis)


def needs_run(analysis: Analysis) -> ConfigError:
    """Return the error for an analysis of models if there is no run."""
    return ConfigError(
        f"the analysis {kind_of(analysis)} needs the trained models of a run, but there is no run here",
        rule="analysis-needs-a-run",
        fix=f"write [[analysis]] kind = {kind_of(analysis)!r} into the experiment file of a run, or pass "
        f"the result of a run, as in fl.analyze({kind_of(analysis)!r}, fl.simulate(...))",
    )


def _fitting(schema: Schema) -> str:
    """Return the names of the analyses of rows that can read the data."""
    from fedloom.analyses.registry import ANALYSES

    entries = {name: ANALYSES[name] for name in ANALYSES}
    names = [
        name
        for name, entry in entries.items()
        if entry.answer is not Analysis.answer
        and not entry.uses_models
        and (not entry.tasks or schema.task in entry.tasks)
        and (schema.is_table or not entry.needs_table)
    ]
    return f"{' or '.join(names)}" if names else "another one"
