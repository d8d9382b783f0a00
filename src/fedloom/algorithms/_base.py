"""The base of every algorithm: a frozen value with pure functions; fields of messages declare how they travel.

Letters, the same in every file: x the server's model ``[d]``, w local models ``[m, d]``, v personal models, g
gradients, y duals, c control variates; m clients of the cohort, n of all clients. Per-client scalars are ``[m, 1]``.
A difference is new - old.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args, get_type_hints

from annotated_types import Ge, Gt
from pydantic import Field, PlainSerializer, ValidationError, WithJsonSchema, WrapValidator, model_validator
from torch import Tensor

from fedloom.errors import ConfigError, nearest
from fedloom.local import Ctx, Nothing, Work
from fedloom.rows.layout import Layout
from fedloom.rows.prox import Form, Prox, made_by
from fedloom.values import FACTOR, Value, factor_of, or_derived

AS_IT_IS = PlainSerializer(lambda value: value, return_type=float | str | None)
"""How a derived option is written down: its number, or the multiple."""
_MULTIPLE = {"type": "string", "pattern": f"^{FACTOR}$"}

Derived = Annotated[
    float, Gt(0), WrapValidator(or_derived), AS_IT_IS,
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, _MULTIPLE]}),
]  # fmt: skip
"""Type of a positive option whose default, None, is derived by `Algorithm.derived` before the first round; "2x" is
twice that."""

DerivedFrom0 = Annotated[
    float, Ge(0), WrapValidator(or_derived), AS_IT_IS,
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, _MULTIPLE]}),
]  # fmt: skip
"""The same for an option that may be 0."""


def by_rule(**field: Any) -> Any:
    """A field that `Algorithm.derived` fills where it is not given."""
    return Field(None, **field)


def chosen_settings(settings: Any, paper: Mapping[str, Any]) -> Mapping[str, Any]:
    """The constants that the option ``settings`` names.

    Raises:
        ValueError: it is neither "default" nor "paper".
    """
    if settings not in ("default", "paper"):
        raise ValueError(f"settings must be 'default' or 'paper', got {settings!r}")
    return paper if settings == "paper" else {}


@dataclass(frozen=True)
class Kind:
    """How a field of an upload travels.

    Attributes:
        base: the value that it is a difference to: ``"zero"`` (absolute), ``"down.<field>"`` or ``"rows.<field>"``.
        primary: the field that carries the model.
        accumulates: the server adds it up over rounds; arrives as its uniform mean over the cohort.
        part: name of a mask of the algorithm (`Algorithm.part`): only those coordinates travel.
    """

    averaged: ClassVar[bool] = True
    """Arrives as one vector ``[d]``."""
    keeps: ClassVar[bool] = False
    """The server keeps every client's last row."""

    base: str = "zero"
    primary: bool = False
    accumulates: bool = False
    part: str | None = None

    @property
    def single(self) -> bool:
        """The server sees the rows of single clients."""
        return self.keeps or not self.averaged

    @property
    def weighable(self) -> bool:
        """The weigher's weights act on it."""
        return not self.single and not self.accumulates


@dataclass(frozen=True)
class Mean(Kind):
    """Arrives at the server as the run's aggregate over the cohort, ``[d]``."""


@dataclass(frozen=True)
class Kept(Kind):
    """The server keeps every client's last row; arrives aggregated over all n clients, ``[d]``.

    Attributes:
        weight: another kept field ``[m, 1]``, not negative: a client's weight in the mean; None is the uniform mean.
    """

    keeps: ClassVar[bool] = True
    weight: str | None = None


@dataclass(frozen=True)
class Rows(Kind):
    """Arrives as raw rows ``[m, .]``, used and forgotten within `Algorithm.server`."""

    averaged: ClassVar[bool] = False


@dataclass(frozen=True)
class Sent:
    """How a field of a download or upload is written; dense wherever that is not longer (`fedloom.rows.encodings`).

    A second annotation of the field: ``x: Annotated[Tensor, Sent(prox="regulariser")]``. Without it a field is dense.

    Attributes:
        encoding: the shortest form that the field can have.
        prox: name of a function in `Algorithm.proxes`; the field comes out of its prox, whose ``makes`` decides in
            place of ``encoding``.
        ranks: the field of the server's state that has the ranks of a download's matrices, ``[matrices]`` in the order
            of `Layout.matrix_shapes`; measured when None.
        part: name of a mask of the algorithm (`Algorithm.part`) for a download of which clients have the rest.
    """

    encoding: Form = "dense"
    prox: str | None = None
    ranks: str | None = None
    part: str | None = None


class Model(NamedTuple):
    """x ``[d]``: the state of a server that has the model only, and a download of it."""

    x: Tensor


class Delta(NamedTuple):
    """dw ``[m, d]``: an upload of the difference to the received model."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True)]


class Point(NamedTuple):
    """u ``[m, .]``: an upload of which the server keeps each client's last and gets the mean over all clients."""

    u: Annotated[Tensor, Kept(primary=True)]


class Algorithm(Value, ABC):
    """A federated method. Its fields are its hyper-parameters; its functions have no state and change no argument."""

    mixes: ClassVar[bool] = False
    """`down` mixes the cohort's kept rows; otherwise it is given none."""
    plain_sgd: ClassVar[str | None] = None
    """Why the method needs plain SGD, if it does: a run with momentum or another optimiser is refused with this
    sentence."""
    needs_sgd: ClassVar[str | None] = None
    """Why the method needs SGD, if it may have momentum: a run with another optimiser is refused with this sentence."""
    uses_shares: ClassVar[bool] = False
    """Reads the clients' shares alpha_i of the objective (``ctx.weight``, ``work.weight``); a run whose shares are not
    uniform says so where they change nothing."""
    projects: ClassVar[bool] = False
    """Works in a subspace; takes the matrix that a run replays (``ctx.projection``, ``work.projection``)."""
    family: ClassVar[str] = "consensus"
    """consensus, personalised, composite, fair, clustered or reference; for lists."""
    paper: ClassVar[Mapping[str, Any]] = {}
    """The paper's own constants where a default is another: ``settings = "paper"`` takes them."""

    @model_validator(mode="before")
    @classmethod
    def _settings(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "settings" not in given or "settings" in cls.model_fields:
            return given
        rest = {key: value for key, value in given.items() if key != "settings"}
        return {**chosen_settings(given["settings"], cls.paper), **rest}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        """Values of the options that are not given (None), from what is known before the first round."""
        return {}

    def settled(self, ctx: Ctx) -> Self:
        """The method with the options that are not given derived; that is how it runs, in simulation and deployment.

        Raises:
            ConfigError: a derived value is out of its range; give the option.
        """
        factors = {name: factor_of(getattr(self, name)) for name in type(self).model_fields}
        factors = {name: factor for name, factor in factors.items() if factor}
        method, values = self.with_(**dict.fromkeys(factors)) if factors else self, dict[str, Any]()
        try:
            if factors:  # what is derived from them follows
                values = {name: factor * method.derived(ctx)[name] for name, factor in factors.items()}
                method = method.with_(**values)
            values = {name: value for name, value in method.derived(ctx).items() if getattr(method, name) is None}
            return method.with_(**values) if values else method
        except ValidationError:
            where = f"{type(self).__name__}: {' and '.join(values)}"
            raise ConfigError(f"{where} cannot be derived from this run's steps; give a value") from None
        except KeyError as error:
            name = error.args[0]
            said = f"{type(self).__name__}: {name} is not derived with these options, so it has no multiples"
            raise ConfigError(f"{said}, got {getattr(self, name)!r}; give a number") from None

    @property
    def full_gradients(self) -> str:
        """What takes full gradients as they are, the method with its option; empty if steps are the run's local SGD.

        By default a method with an option ``solver`` that is not "sgd".
        """
        solver = getattr(self, "solver", "sgd")
        return "" if solver == "sgd" else f"{type(self).__name__} with solver {solver!r}"

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Any, Any, Any]:
        """State before the first round; by default the server has the model and clients keep nothing.

        Args:
            x0: ``[d]`` the initial model.
            ctx: round 0.

        Returns:
            Server state, the template of a client's rows, and the server's copy of a client's upload before its
            first one (None without `Kept` fields).
        """
        return Model(x0), Nothing(), None

    def down(self, server: Any, kept: Any, ctx: Ctx) -> Any:
        """The download: fields ``[d]``, or ``[m, .]`` where clients differ; the first field is the received model.

        By default the fields of the server's state that the annotation of `client`'s download names.

        Raises:
            ConfigError: the server's state lacks one.
        """
        fields = download_type(type(self))
        for name in fields._fields:
            if not hasattr(server, name):
                raise ConfigError(f"{type(self).__name__} must define down: its server state has no field {name!r}")
        return fields(*(getattr(server, name) for name in fields._fields))

    @abstractmethod
    def client(self, down: Any, rows: Any, work: Work) -> tuple[Any, Any]:
        """A client's round: the upload and its new rows."""

    @abstractmethod
    def server(self, server: Any, up: Any, ctx: Ctx) -> Any:
        """The server's step on the aggregated upload of the accepted cohort."""

    def global_model(self, server: Any) -> Tensor | None:
        """``[d]``, or None for a method without a global model; by default the field x of the server's state."""
        return getattr(server, "x", None)

    def personal(self, down: Any, rows: Any, work: Work) -> Tensor | None:
        """``[m, d]``, or None for a method without personal models."""
        return None

    def observe(self, down: Any, rows: Any, work: Work) -> Any:
        """What `diagnostics` needs of every client after a round: a NamedTuple of ``[m, .]``, or None.

        Args:
            down: a download with the server's state after the round.
            rows: the clients' states after the round.
            work: their local problems; asked in simulation only, and not counted as work of the method.
        """
        return None

    def diagnostics(self, server: Any, total: Any, ctx: Ctx) -> dict[str, float]:
        """Figures that are worth a record after an evaluated round, by name.

        Args:
            server: the server's state.
            total: the fields of `observe`, each the sum over all n clients.
            ctx: all clients.
        """
        return {}

    def proxes(self) -> dict[str, Prox]:
        """The functions whose prox makes models of this method, by the name that `Sent` gives; by default its fields.

        A method that has some is composite: the non-zeros, and with a low rank the ranks, of its models are recorded.
        """
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, Prox)}

    def part(self, name: str, layout: Layout) -> Tensor:
        """The bool mask ``[d]`` that a field of an upload names as its part."""
        raise AssertionError(f"{type(self).__name__} names no part {name!r}")

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        """Refuse a model or setting that the method cannot work with; returns sentences of warning.

        Raises:
            Refused: the combination makes no sense; the sentence says why.
        """
        return []


def _annotated(algorithm: type[Algorithm], function: str, name: str) -> Any:
    """The method's function with an annotation of ``name``, or the one that it overrides."""
    overridden = [vars(base)[function] for base in algorithm.__mro__ if function in vars(base)]
    return next(f for f in overridden if name in f.__annotations__)


def _hint(algorithm: type[Algorithm], function: str, name: str) -> Any:
    """The type of a function's argument or result.

    Raises:
        ConfigError: the annotation cannot be read.
    """
    try:
        return get_type_hints(_annotated(algorithm, function, name))[name]
    except NameError as error:
        raise ConfigError(f"{algorithm.__name__}.{function}: its annotation cannot be read: {error}") from None


def _fields(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")


def _returned(algorithm: type[Algorithm], function: str, wanted: str) -> Any:
    """The NamedTuple that a function returns, the first of several.

    Raises:
        ConfigError: its annotation does not say.
    """
    hint = _hint(algorithm, function, "return")
    found = next(iter(get_args(hint)), hint)
    if not _fields(found):
        raise ConfigError(
            f"{algorithm.__name__}.{function} must be annotated with what it returns, -> {wanted}, whose fields say "
            f"how they travel; got {_annotated(algorithm, function, 'return').__annotations__['return']!r}"
        )
    return found


@cache
def upload_type(algorithm: type[Algorithm]) -> Any:
    """The NamedTuple that `client` returns as its upload, read from its annotation.

    Raises:
        ConfigError: it has none.
    """
    return _returned(algorithm, "client", "'tuple[Up, Client]' with a NamedTuple Up")


@cache
def download_type(algorithm: type[Algorithm]) -> Any:
    """The NamedTuple that `down` returns, read from its annotation; by default the download that `client` takes.

    Raises:
        ConfigError: it has none.
    """
    if _annotated(algorithm, "down", "return") is not Algorithm.down:
        return _returned(algorithm, "down", "'Down' with a NamedTuple Down")
    found = _hint(algorithm, "client", "down")
    return found if _fields(found) else Model


@cache
def upload_fields(algorithm: type[Algorithm]) -> Mapping[str, Kind]:
    """Fields of the algorithm's upload with their kinds, read from the annotation of `client`.

    Raises:
        ConfigError: a field does not say how it travels, or not one of them carries the model.
    """
    up, name = upload_type(algorithm), algorithm.__name__
    hints = get_type_hints(up, include_extras=True)
    kinds = {field: [a for a in get_args(hints[field]) if isinstance(a, Mean | Kept | Rows)] for field in up._fields}
    for field, found in kinds.items():
        if len(found) != 1:
            raise ConfigError(
                f"{name}: the upload field {field!r} must say once how it travels, as Annotated[Tensor, Mean(...)], "
                f"Kept(...) or Rows(...); it says so {len(found)} times"
            )
    primary = [field for field, (kind,) in kinds.items() if kind.primary]
    if kinds and len(primary) != 1:
        got = " and ".join(primary) or "none"
        raise ConfigError(f"{name}: one upload field must carry the model, as Mean(primary=True); got {got}")
    return {field: kind for field, (kind,) in kinds.items()}


def check_declaration(algorithm: type[Algorithm]) -> None:
    """Refuse a method without annotations of its messages, or whose fields name missing fields.

    Raises:
        ConfigError: with the missing part and the way to write it.
    """
    fields, down, name = upload_fields(algorithm), download_type(algorithm), algorithm.__name__
    for field, kind in fields.items():
        source, _, base = kind.base.partition(".")
        if kind.base != "zero" and source not in ("down", "rows"):
            raise ConfigError(
                f"{name}: base of {field!r} must be 'zero', 'down.FIELD' or 'rows.FIELD', got {kind.base!r}"
            )
        if source == "down" and base not in down._fields:
            raise ConfigError(f"{name}: base of {field!r} is {kind.base!r}; {nearest(base, down._fields)}")
        weight = getattr(kind, "weight", None)
        if weight is not None and weight not in fields:
            raise ConfigError(f"{name}: weight of {field!r} is {weight!r}; {nearest(weight, fields)}")


def encodings(algorithm: Algorithm, message: Literal["down", "up"]) -> dict[str, Sent]:
    """How every field of a message is written, with ``prox`` resolved to an encoding.

    Raises:
        ConfigError: a field names a prox that the method does not have.
    """
    fields = download_type(type(algorithm)) if message == "down" else upload_type(type(algorithm))
    hints = get_type_hints(fields, include_extras=True)
    sent = {name: next((a for a in get_args(hints[name]) if isinstance(a, Sent)), Sent()) for name in fields._fields}
    proxes = algorithm.proxes()
    for name, s in sent.items():
        if s.prox not in {None, *proxes, *type(algorithm).model_fields}:
            where = f"{type(algorithm).__name__}: prox of the field {name!r}"
            raise ConfigError(f"{where} is {s.prox!r}; {nearest(str(s.prox), proxes)}")
    return {
        name: s if s.prox is None else replace(s, encoding=made_by(proxes.get(s.prox)), prox=None)
        for name, s in sent.items()
    }


def primary_field(algorithm: type[Algorithm]) -> str:
    """Name of the upload field that carries the model."""
    return next(name for name, kind in upload_fields(algorithm).items() if kind.primary)


def base_of(kind: Kind, down: Any, rows: Any) -> Tensor | float:
    """The value that a field is a difference to."""
    if kind.base == "zero":
        return 0.0
    source, name = kind.base.split(".")
    base: Tensor = getattr(down if source == "down" else rows, name)
    return base
