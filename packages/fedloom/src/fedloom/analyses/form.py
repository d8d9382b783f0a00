"""Base classes of analyses.

An analysis is a frozen value with pure functions. It asks all clients questions and sums their answers.
"""

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

from fedloom.analyses.models import missing_model_error
from fedloom.analyses.rows import ClientRows, Schema, make_schema
from fedloom.errors import CodeError, ConfigError, Refused, WireError
from fedloom.values import Value, get_kind

if TYPE_CHECKING:
    from fedloom.data.federation import Federation
    from fedloom.engine.result import Result
    from fedloom.engine.setting import Setting

State = Any
"""State of an analysis between two questions. Each analysis has its own type of state, and states are never
modified."""
MAX_QUESTION_BYTES = 2**26
BOUND_SLACK = 1e-12
"""Maximum amount by which rounding errors may exceed a bound, as a fraction of the bound, e.g.

in a sum over rows that are all at the limit.
"""
_LENGTH_STRUCT = struct.Struct("<I")


@dataclass(frozen=True, eq=False)
class Question:
    """Question, which is a set of public numbers sent to all clients.

    Args:
        name: name of the question, which is a key of the analysis' `questions`.
        values: each field's numbers, as float64 tensors.
    """

    name: str
    values: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Question) and self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash(self.encode())

    def check_form(self, forms: Mapping[str, Mapping[str, int]]) -> None:
        """Raise an error if real sites could not read the question.

        Args:
            forms: fields of each question with their numbers of dimensions (see `Analysis.questions`).

        Raises:
            CodeError: the structure differs from the declared one, or a number is not finite.
        """
        got, form = {name: value.dim() for name, value in self.values.items()}, forms.get(self.name)
        if form is None or [*got.items()] != [*form.items()]:
            raise CodeError(
                f"the question {self.name!r} has the fields {got} (name and number of dimensions), but the declared "
                f"questions are { ({name: dict(one) for name, one in forms.items()}) }"
            )
        if broken := [name for name, value in self.values.items() if not bool(value.isfinite().all())]:
            raise CodeError(
                f"{broken[0]} of the question {self.name!r} is not finite, but sites accept only finite numbers"
            )

    def encode(self) -> bytes:
        """Return the question as bytes: a JSON header with the name and shapes, followed by little-endian numbers."""
        shapes = {name: list(value.shape) for name, value in self.values.items()}
        head = json.dumps([self.name, shapes], separators=(",", ":")).encode()
        body = b"".join(value.double().contiguous().numpy().astype("<f8").tobytes() for value in self.values.values())
        return _LENGTH_STRUCT.pack(len(head)) + head + body

    @classmethod
    def decode(cls, content: bytes, forms: Mapping[str, Mapping[str, int]]) -> Question:
        """Decode a question from the bytes that `encode` wrote.

        Args:
            content: bytes of the question.
            forms: fields of each question, with their numbers of dimensions (see `Analysis.questions`).

        Raises:
            WireError: the bytes do not encode a question in any of these formats.
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
                "these bytes do not encode a question of the analysis. The server and the client "
                "must use the same analysis"
            ) from None
        return cls(name, values)


class QuestionOrderError(CodeError):
    """Raised if an analysis asks a question out of order, or repeats a question that is not in `Analysis.retried`."""


class Bounds(NamedTuple):
    """Range and step of each number in a client's answer. Bounds depend only on public numbers.

    Attributes:
        low: smallest possible values, ``[k]``.
        high: largest possible values, ``[k]``.
        step: positive steps, ``[k]``. With masking, each number is rounded to a multiple of its step. Numbers are not
            rounded if the whole analysis runs in a single process.
    """

    low: Tensor
    high: Tensor
    step: Tensor

    @classmethod
    def counts(cls, numbers: int, most: float) -> Bounds:
        """Return the bounds of integers between 0 and ``most``."""
        return cls.between(torch.zeros(numbers), torch.full((numbers,), float(most)), 1.0)

    @classmethod
    def between(cls, low: Tensor, high: Tensor, step: float = 2.0**-36) -> Bounds:
        """Return the bounds of numbers ``[k]`` that all have the same step."""
        return cls(low.double(), high.double(), torch.full((len(low),), step, dtype=torch.float64))

    @classmethod
    def join(cls, parts: Sequence[Bounds]) -> Bounds:
        """Return the bounds of an answer that is the concatenation of several parts."""
        return cls(*(torch.cat(sides) for sides in zip(*parts, strict=True)))

    def project(self, answer: Tensor) -> tuple[Tensor, int]:
        """Return an answer ``[k]`` clipped to the bounds, and the number of its values that were outside the bounds.

        If a value exceeds a bound only by rounding errors, it is not counted.
        """
        inside = answer.clamp(self.low, self.high)
        slack = BOUND_SLACK * torch.maximum(self.low.abs(), self.high.abs())
        return inside, int(((inside - answer).abs() > slack).sum())


class Info(NamedTuple):
    """Facts about a sum that accompany its numbers.

    Attributes:
        clients: number of clients whose answers are included in the sum.
        clipped: number of values that were outside their bounds. It must be 0 for a valid result.
        neutral: number of clients that have rows but answered with zeros, because they have too few subjects or
            declined to answer.
        rows: number of rows of the clients that answered.
    """

    clients: int
    clipped: int
    neutral: int
    rows: int


class Rules(Value):
    """Rules that all parties agree on before an analysis asks its first question."""

    questions: int = Field(
        200,
        ge=1,
        description="maximum number of questions that the analysis may ask (default at real sites: 24 for most "
        "analyses)",
    )
    min_subjects: int = Field(
        1,
        ge=1,
        description="minimum number of subjects at a client or in a cell. Clients with fewer subjects send zeros",
    )
    min_clients: int = Field(
        1, ge=1, description="minimum number of clients in a cell. Cells with fewer clients are merged"
    )
    missing: int = Field(
        0, ge=0, description="number of clients that may drop out without leaving a cell with too few clients"
    )

    @model_serializer(mode="wrap")
    def _stated(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize only the rules that are set, because each party uses its own values for the other rules."""
        return {name: value for name, value in write(self).items() if name in self.model_fields_set}


@dataclass(frozen=True, eq=False)
class AnalysisTerms:
    """Everything that is public before the first question. It is the same for all parties.

    Args:
        schema: columns, levels and agreed-upon ranges.
        sizes: number of rows of each client, ``[n]`` int64.
        rules: the agreed-upon rules.
        published: numbers that each client publishes (see `Analysis.publish`), ``[c]``. The tensors are empty if
            clients publish nothing.
        names: names of the clients, which only the party that computes the result needs. Empty if clients have none.
    """

    schema: Schema
    sizes: Tensor
    rules: Rules = field(default_factory=Rules)
    published: tuple[Tensor, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def client_names(self) -> tuple[str, ...]:
        """Name of each client in a table, such as "north", or "client 0" if the name is a number or missing."""
        names = self.names or tuple(map(str, range(len(self.sizes))))
        return tuple(f"client {name}" if name.isdecimal() else name for name in names)

    @property
    def most_rows(self) -> int:
        """Number of rows at the largest client."""
        return int(self.sizes.max())


class FurtherRun(NamedTuple):
    """An additional run that an analysis needs, and the function that evaluates the result of this run.

    Attributes:
        setting: setting of the additional run.
        fed: clients of this run.
        measure: function that returns rows for the analysis' table.
    """

    setting: Setting
    fed: Federation
    measure: Callable[[Result], pa.Table]


class Analysis(Value):
    """Question about a whole federation.

    An analysis is a frozen value whose fields are options and whose functions are pure.

    An analysis that is computed from sums defines `start`, `question`, `bounds`, `answer`, `step` and `result`. Such an
    analysis gives the same result in one process, at sites (with or without masking) and in a Flower app. An analysis
    of a run defines `measure`, which uses the models of a `fedloom.engine.result.Result`. An analysis that needs
    additional runs defines `units`.
    """

    kind: ClassVar[str]
    """Name of the analysis in files and in `fl.analyze`. For a user-defined analysis, this is the import path."""
    questions: ClassVar[Mapping[str, Mapping[str, int]]] = {}
    """Form of each question: the names of its fields, and their numbers of dimensions.

    Questions are asked in this order, and real sites do not answer them in any other order. Only the last question may
    be repeated.
    """
    retried: ClassVar[Collection[str]] = ()
    """Questions that a client may be unable to answer, for instance because a step is too long. If this happens, `step`
    leads to a different question."""
    suppresses: ClassVar[bool] = False
    """True if clients themselves remove small cells from every answer. Small cells then need not be merged if no masks
    are used."""
    uses_models: ClassVar[bool] = False
    """True if answers use `ClientRows.models`, so that a run must precede the analysis."""
    wider: ClassVar[str] = "Agree on wider ranges"
    """Advice in the error about answers outside their bounds."""
    tasks: ClassVar[Collection[str]] = ()
    """Tasks that the analysis supports. If empty, every task is allowed."""
    needs_table: ClassVar[bool] = False
    """True if the analysis uses the columns of a table."""
    assumes_independence: ClassVar[bool] = False
    """True if the table contains standard errors, intervals or p-values that treat rows as independent."""
    per: ClassVar[str] = "run"
    """Scope of the table that `measure` returns: "run", or "seed" if the table is the same for all methods."""

    rules: Rules | None = Field(
        None, description="limits that all clients agree on (default: the limits for simulations or for real sites)"
    )

    def check(self, schema: Schema, setting: Setting | None = None) -> None:
        """Raise an error if the analysis is not suitable for the data or the setting.

        This method is called before anything is computed.

        Subclasses with additional conditions should call this method of the base class first.

        Args:
            schema: schema of the data.
            setting: setting of the run whose models are analyzed, or None if there is no run.

        Raises:
            ConfigError: the analysis is unsuitable. The message states the problem, its location, and the required
                action.
            Refused: the analysis is meaningless for these data.
        """
        what = f"the analysis {get_kind(self)}"
        if self.tasks and schema.task not in self.tasks:
            raise Refused(
                f"{what} works only for the task {' or '.join(self.tasks)}, but the task of "
                f"{schema.name} is {schema.task}",
                rule="analysis-task",
                fix="read the data with {data.task = 'binary'}"
                if "binary" in self.tasks and len(schema.classes) == 2
                else f"omit the analysis, or use {list_fitting_analyses(schema)}",
            )
        if self.needs_table and not schema.is_table:
            raise Refused(
                f"{what} reads the columns of a table, but {schema.name} is not a table",
                rule="analysis-needs-a-table",
                fix=f"omit the analysis, or use {list_fitting_analyses(schema)}",
            )

    def check_run(self, fed: Federation, setting: Setting | None = None) -> None:
        """Raise an error if the analysis is not suitable for a federation (see `check`)."""
        self.check(make_schema(fed.data), setting)

    def check_models(self, kinds: Sequence[str]) -> None:
        """Raise an error if the analysis uses a kind of model (option ``model_kind``) that the run does not have.

        Args:
            kinds: kinds of models that the run has.

        Raises:
            Refused: the run has no model of this kind.
        """
        kind = getattr(self, "model_kind", None)
        if kind is not None and kind not in kinds:
            raise missing_model_error(kind, kinds[0])

    def check_sites(self, schema: Schema, *, masked: bool) -> None:
        """Raise an error if an agreement forbids real sites to answer.

        This method is called after `check`, when the sites create the agreement.

        Args:
            schema: schema that contains the agreed-upon ranges.
            masked: True if answers are summed under masks.

        Raises:
            ConfigError: the analysis reveals individual clients' values, or a number has no agreed-upon range.
        """
        if masked and self.shows_rows:
            raise ConfigError(
                f"with these options, the analysis {get_kind(self)} shows individual clients' results, but secure "
                f"aggregation hides them",
                rule="analysis-shows-clients",
                fix="omit these options, or deploy without secure aggregation",
            )
        unagreed = [column.name for column in schema.columns if not column.levels and column.range is None]
        if unagreed:
            raise ConfigError(
                f"the analysis {get_kind(self)} scales numbers by their ranges, but "
                f"{', '.join(map(repr, unagreed[:5]))} has no range in the agreement",
                rule="analysis-range",
                fix="set range = [LOWEST, HIGHEST] for each of these columns in the agreement (fedloom init --agree)",
            )

    @property
    def most_questions(self) -> int:
        """Maximum number of questions that a real site answers if the rules do not set a limit."""
        return 24

    @property
    def kept_columns(self) -> Sequence[str]:
        """Columns, or thresholds on columns, that a table must keep in addition to the inputs of models."""
        return ()

    @property
    def shows_rows(self) -> bool:
        """True if `publish` returns values of individual rows, which is allowed only without masking."""
        return False

    def publish(self, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        """Return the numbers that a client publishes before the first question, float64 ``[c]``.

        In most analyses, clients publish nothing.

        Real sites publish only flags: 1 for a cell that reaches the minimum count at the client, and 0 otherwise. At
        this point, a client does not know the other clients' sizes.
        """
        return torch.zeros(0, dtype=torch.float64)

    def used(self, client: ClientRows, terms: AnalysisTerms) -> ClientRows:
        """Return the client's rows that are included in sums. By default, all rows are included.

        If these rows belong to too few subjects, the client answers with zeros.
        """
        return client

    def row_sets(self, client: ClientRows, terms: AnalysisTerms) -> Sequence[ClientRows]:
        """Return the sets of client rows over which sums are computed.

        By default, the only set contains the rows that `used` returns.

        A site does not answer for a set that differs from an earlier set in only a few subjects.
        """
        return [self.used(client, terms)]

    def start(self, terms: AnalysisTerms) -> State:
        """Return the state before the first question."""
        raise NotImplementedError

    def question(self, state: State) -> Question | None:
        """Return the next question, or None after the last question."""
        raise NotImplementedError

    def check_question(self, question: Question, terms: AnalysisTerms) -> None:
        """Raise an error if a client should not answer a question.

        This method runs at the client and receives only public arguments.

        Raises:
            ConfigError: the rules do not allow this question.
        """

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the questions, in order.

        The last question may be repeated if it is in `retried`.
        """
        return tuple(self.questions)

    def check_step(self, step: int, question: Question) -> None:
        """Raise an error if a question may not be asked at a step.

        Args:
            step: number of the question, counted from 0.
            question: the question.

        Raises:
            QuestionOrderError: `order` has a different question at this step, or the question was already asked and is
                not in `retried`.
        """
        order, what = self.order, f"the analysis {get_kind(self)}"
        if step >= len(order) and question.name not in self.retried:
            raise QuestionOrderError(
                f"{what} asks each question only once (questions that may be repeated are listed in `retried`), so "
                f"there is no step {step}, got {question.name!r}"
            )
        if question.name != (wanted := order[min(step, len(order) - 1)]):
            raise QuestionOrderError(f"step {step} of {what} asks {wanted!r}, got {question.name!r}")

    def bounds(self, question: Question, terms: AnalysisTerms) -> Bounds:
        """Return the bounds of an individual client's answer."""
        raise NotImplementedError

    def answer(self, question: Question, client: ClientRows, terms: AnalysisTerms) -> Tensor | None:
        """Return a client's answer, float64 ``[k]``, which is a sum over its rows.

        If there are no rows, the answer consists of zeros. None also stands for zeros. An analysis returns None if a
        client's rows should not be revealed, for instance because a single row would determine the sum. The server
        learns how many clients did not answer, but not which ones.
        """
        raise NotImplementedError

    def step(self, state: State, total: Tensor, info: Info) -> State:
        """Return the state after a question has been answered.

        Args:
            state: state before the question.
            total: sum of the clients' answers, ``[k]``.
            info: facts about the sum.

        Raises:
            DataError: the analysis has no result, for instance because a fit is not finite.
        """
        raise NotImplementedError

    def result(self, state: State) -> pa.Table:
        """Return the table that is the result of a finished analysis."""
        raise NotImplementedError

    def remarks(self, table: pa.Table) -> Sequence[str]:
        """Return notes about a finished analysis, for example about rows that it does not use."""
        return ()

    def model(self, state: State) -> nn.Module | None:
        """Return a finished analysis' predictor, or None if it does not have one.

        The predictor maps inputs ``[b, *shape]``, in the representation that the federation's models use, to outputs
        ``[b, c]``.
        """
        return None

    def measure(self, result: Result) -> tuple[pa.Table, Sequence[str]]:
        """Return the table of an analysis that uses a run's models, and notes about the table."""
        raise NotImplementedError

    def units(self, setting: Setting, fed: Federation, result: Result) -> Iterator[FurtherRun]:
        """Yield the additional runs that the analysis needs for a given method and seed.

        Args:
            setting: setting of the complete run.
            fed: clients of the complete run.
            result: result of the complete run with all clients.
        """
        yield from ()

    @property
    def runs_further(self) -> bool:
        """True if the analysis needs additional runs."""
        return type(self).units is not Analysis.units

    @property
    def by_sums(self) -> bool:
        """True if the analysis is computed from sums over clients."""
        return type(self).answer is not Analysis.answer

    def find_name(self) -> str:
        """Return the name of the analysis in files.

        For a user-defined analysis, the module is omitted.
        """
        return get_kind(self).rpartition(":")[2]


class ModelAnalysis(Analysis):
    """Analysis that fits a linear model from sums. The model can be a row of a comparison."""

    needs_independent: ClassVar[bool] = True
    """True if the fit fails when an input is constant or a linear function of other inputs."""

    compare: bool = Field(
        False,
        description="also fit the model to each seed's training rows, and add it to the comparison as a row named "
        "after the analysis",
    )

    def check_sites(self, schema: Schema, *, masked: bool) -> None:
        if self.compare:
            raise ConfigError(
                f"the analysis {get_kind(self)} has compare = true, but a deployment does not compare methods",
                rule="analysis-compare",
                fix="omit compare",
            )
        super().check_sites(schema, masked=masked)

    @model_serializer(mode="wrap")
    def _stated(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize ``compare`` only if it is set, because it is not part of the sites' agreement."""
        return {name: value for name, value in write(self).items() if name != "compare" or value}


def require_questions(analysis: Analysis) -> None:
    """Raise an error if an analysis is not computed from sums over clients.

    Raises:
        ConfigError: the analysis does not define `answer`.
    """
    if not analysis.by_sums:
        raise needs_run(analysis)


def needs_run(analysis: Analysis) -> ConfigError:
    """Return the error for an analysis that needs the models of a run although there is no run."""
    return ConfigError(
        f"the analysis {get_kind(analysis)} needs trained models, but no run was given",
        rule="analysis-needs-a-run",
        fix=f"write [[analysis]] kind = {get_kind(analysis)!r} into the experiment file of a run, or pass "
        f"the result of a run, as in fl.analyze({get_kind(analysis)!r}, fl.simulate(...))",
    )


def list_fitting_analyses(schema: Schema) -> str:
    """Return a phrase that lists the analyses of rows that suit the data."""
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
