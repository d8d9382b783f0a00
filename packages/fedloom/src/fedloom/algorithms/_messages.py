"""Declarations of messages: the annotations of a method state how each field is aggregated and encoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_type_hints

from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.hints import suggest_nearest
from fedloom.rows.proxes import Form, find_form
from fedloom.values import Value


@dataclass(frozen=True)
class Kind:
    """Declaration of an upload field, with the properties that fields of all kinds have.

    Attributes:
        base: value that is subtracted from the field before it is sent: ``"zero"`` (none), ``"down.<field>"`` or
            ``"rows.<field>"``.
        primary: True for the field that contains the model.
        accumulates: True if the server adds the field, multiplied by ``ctx.part``, to a sum over rounds. The field then
            arrives as the cohort's mean, weighted by the clients' shares, even if a weigher is used.
        part: name of one of the algorithm's masks (`Algorithm.part`). Only the coordinates in this mask are sent.
        label: True if the numbers are identifiers, such as the number of a cluster. A channel does not change such a
            field.
        carries: content of a primary field. A primary field is a change relative to the first field of the download
            only if it carries "model".
    """

    averaged: ClassVar[bool] = True
    """True if the server receives the field as one vector ``[d]``."""
    keeps: ClassVar[bool] = False
    """True if the server stores the last row of every client."""

    base: str = "zero"
    primary: bool = False
    accumulates: bool = False
    part: str | None = None
    label: bool = False
    carries: Literal["model", "statistics", "head"] = "model"
    weight: str | None = None

    def __post_init__(self) -> None:
        """Check the weight.

        Raises:
            ValueError: the server does not store the rows of this field.
        """
        if self.weight is not None and not self.keeps:
            raise ValueError(f"only a Kept field can have a weight, got {type(self).__name__}(weight={self.weight!r})")

    @property
    def single(self) -> bool:
        """True if the server receives each client's row separately."""
        return self.keeps or not self.averaged

    @property
    def is_weighable(self) -> bool:
        """True if means of the field are weighted by the weigher's weights instead of the clients' shares."""
        return not self.single and not self.accumulates


@dataclass(frozen=True)
class Mean(Kind):
    """Upload field that arrives as the cohort's mean ``[d]``, weighted by the clients' shares or by the weigher."""


@dataclass(frozen=True)
class Kept(Kind):
    """Upload field for which the server stores every client's last row.

    The server's step receives the field as a mean ``[d]`` over all n clients.

    Attributes:
        weight: name of another stored field ``[m, 1]`` with nonnegative numbers, which are the clients' weights in the
            mean. A channel does not modify this field. If None, the clients' shares are used as weights.
    """

    keeps: ClassVar[bool] = True


@dataclass(frozen=True)
class Rows(Kind):
    """Upload field that the server receives as separate rows ``[m, .]``. Only `Algorithm.server` uses these rows."""

    averaged: ClassVar[bool] = False


@dataclass(frozen=True)
class Sent:
    """Encoding of a download or upload field.

    A field is sent as a dense vector if that form is not longer (`fedloom.rows.encodings`).

    The encoding is given as a second annotation of the field: ``x: Annotated[Tensor, Sent(prox="regulariser")]``. A
    field without this annotation is sent as a dense vector.

    Attributes:
        encoding: shortest possible encoding of the field, given its content.
        prox: name of a function in `Algorithm.proxes`. The field is the result of this prox, and the encoding that the
            prox ``makes`` is used instead of ``encoding``.
        ranks: name of the field in the server's state that contains the ranks of the matrices in the download,
            ``[matrices]`` in the order of `Layout.matrix_shapes`. If None, the ranks are measured.
        part: name of one of the algorithm's masks (`Algorithm.part`). A download sets this name if clients already know
            all other coordinates.
    """

    encoding: Form = "dense"
    prox: str | None = None
    ranks: str | None = None
    part: str | None = None


class Model(NamedTuple):
    """The server's model x ``[d]``, as state and as download of a server that stores nothing else."""

    x: Tensor


class Delta(NamedTuple):
    """Upload of dw ``[m, d]``, the difference between each trained model and the received model."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True)]


class Point(NamedTuple):
    """Upload of u ``[m, .]``, whose last value the server stores for every client.

    The server's step receives the mean over all clients.
    """

    u: Annotated[Tensor, Kept(primary=True)]


def _annotated(algorithm: type[Value], function: str, name: str) -> Any:
    """Return the most specific version of a method's function that annotates ``name``."""
    return next(f for f in _defined(algorithm, function) if name in f.__annotations__)


def _defined(algorithm: type[Value], function: str) -> list[Any]:
    """List the versions of a function in the method and its base classes, starting with the method's own version.

    The last version is the one in `Algorithm`.
    """
    return [vars(base)[function] for base in algorithm.__mro__ if function in vars(base)]


def _hint(algorithm: type[Value], function: str, name: str) -> Any:
    """Return the type of an argument of a function, or of its result.

    Raises:
        ConfigError: the type annotation cannot be read.
    """
    try:
        return get_type_hints(_annotated(algorithm, function, name))[name]
    except NameError as error:
        raise ConfigError(f"{algorithm.__name__}.{function}: the annotation cannot be read: {error}") from None


def _fields(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


def _returned(algorithm: type[Value], function: str, wanted: str) -> Any:
    """Return the NamedTuple class that a function returns. If the function returns several, return the first one.

    Raises:
        ConfigError: the function's return annotation does not name a NamedTuple.
    """
    hint = _hint(algorithm, function, "return")
    returned = next(iter(get_args(hint)), hint)
    if not _fields(returned):
        raise ConfigError(
            f"{algorithm.__name__}.{function} must be annotated with its return type, -> {wanted}, whose fields "
            f"declare how they are sent, got {_annotated(algorithm, function, 'return').__annotations__['return']!r}"
        )
    return returned


@cache
def upload_type(algorithm: type[Value]) -> Any:
    """Return the NamedTuple class of a method's upload, read from the annotation of `client`.

    Raises:
        ConfigError: the annotation is missing.
    """
    return _returned(algorithm, "client", "'tuple[Up, Client]' with a NamedTuple Up")


@cache
def download_type(algorithm: type[Value]) -> Any:
    """Return the NamedTuple class of a method's download, read from the annotation of `down`.

    If `down` has no annotation, the class is read from the annotation of `client`'s download.

    Raises:
        ConfigError: the annotation is missing.
    """
    if _annotated(algorithm, "down", "return") is not _defined(algorithm, "down")[-1]:
        return _returned(algorithm, "down", "'Down' with a NamedTuple Down")
    hint = _hint(algorithm, "client", "down")
    return hint if _fields(hint) else Model


@cache
def upload_fields(algorithm: type[Value]) -> Mapping[str, Kind]:
    """Return the upload fields of an algorithm and their declarations, which are read from the annotation of `client`.

    Raises:
        ConfigError: a field has no declaration, or not exactly one field contains the model.
    """
    up, name = upload_type(algorithm), algorithm.__name__
    hints = get_type_hints(up, include_extras=True)
    kinds = {field: [a for a in get_args(hints[field]) if isinstance(a, Mean | Kept | Rows)] for field in up._fields}
    for field, declared in kinds.items():
        if len(declared) != 1:
            raise ConfigError(
                f"{name}: the upload field {field!r} must declare exactly once how it is sent, as Annotated[Tensor, "
                f"Mean(...)], Kept(...) or Rows(...), but it has {len(declared)} such declarations"
            )
    primary = [field for field, (kind,) in kinds.items() if kind.primary]
    if kinds and len(primary) != 1:
        got = " and ".join(primary) or "none"
        raise ConfigError(f"{name}: exactly one upload field must carry the model, as Mean(primary=True), got {got}")
    return {field: kind for field, (kind,) in kinds.items()}


def exact_fields(algorithm: type[Value]) -> list[str]:
    """Return the names of upload fields that channels do not change: labels, and fields that weight another field."""
    kinds = upload_fields(algorithm)
    weights = {kind.weight for kind in kinds.values() if isinstance(kind, Kept)}
    return [name for name, kind in kinds.items() if kind.label or name in weights]


def check_declaration(algorithm: type[Value]) -> None:
    """Raise an error if a method does not annotate its messages, or if a field refers to a nonexistent field.

    Raises:
        ConfigError: a declaration is missing or wrong. The message states which declaration is wrong and how to write
            it.
    """
    fields, down, name = upload_fields(algorithm), download_type(algorithm), algorithm.__name__
    for field, kind in fields.items():
        source, _, base = kind.base.partition(".")
        if kind.base != "zero" and source not in ("down", "rows"):
            raise ConfigError(
                f"{name}: base of {field!r} must be 'zero', 'down.FIELD' or 'rows.FIELD', got {kind.base!r}"
            )
        if source == "down" and base not in down._fields:
            raise ConfigError(f"{name}: base of {field!r} is {kind.base!r}; {suggest_nearest(base, down._fields)}")
        weight = getattr(kind, "weight", None)
        if weight is not None and weight not in fields:
            raise ConfigError(f"{name}: weight of {field!r} is {weight!r}; {suggest_nearest(weight, fields)}")


def encodings(algorithm: Any, message: Literal["down", "up"]) -> dict[str, Sent]:
    """Return the encoding of every field of a message.

    Each ``prox`` is replaced by the encoding of the vectors that it produces.

    Raises:
        ConfigError: a field refers to a prox that the method does not have.
    """
    kind: type[Value] = type(algorithm)
    fields = download_type(kind) if message == "down" else upload_type(kind)
    hints = get_type_hints(fields, include_extras=True)
    sent = {name: next((a for a in get_args(hints[name]) if isinstance(a, Sent)), Sent()) for name in fields._fields}
    proxes = algorithm.proxes()
    for name, s in sent.items():
        if s.prox not in {None, *proxes, *kind.model_fields}:
            where = f"{kind.__name__}: prox of the field {name!r}"
            raise ConfigError(f"{where} is {s.prox!r}; {suggest_nearest(str(s.prox), proxes)}")
    return {
        name: s if s.prox is None else replace(s, encoding=find_form(proxes.get(s.prox)), prox=None)
        for name, s in sent.items()
    }


def primary_field(algorithm: type[Value]) -> str:
    """Return the name of the upload field that contains the model."""
    return next(name for name, kind in upload_fields(algorithm).items() if kind.primary)


def replace_model(
    algorithm: type[Value], idle: tuple[Any, Any], model: Tensor, down: Any, rows: Any
) -> tuple[Any, Any]:
    """Replace the model ``[m, .]`` in the uploads and rows of clients that take no step.

    If the model is sent as the difference from a field of the client's state, this field is set to the model.

    Args:
        algorithm: the method.
        idle: upload and state of the clients that take no step.
        model: new model of each client.
        down: the download that the clients received.
        rows: the clients' states before the round.
    """
    (up, kept), name = idle, primary_field(algorithm)
    kind = upload_fields(algorithm)[name]
    source, _, field = kind.base.partition(".")
    if source == "rows":
        kept = kept._replace(**{field: model})
    return up._replace(**{name: model - base_of(kind, down, rows)}), kept


def base_of(kind: Kind, down: Any, rows: Any) -> Tensor | float:
    """Return the value that is subtracted from a field before it is sent."""
    if kind.base == "zero":
        return 0.0
    source, name = kind.base.split(".")
    base: Tensor = getattr(down if source == "down" else rows, name)
    return base
