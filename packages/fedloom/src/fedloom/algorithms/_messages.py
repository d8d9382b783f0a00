"""Declarations of messages: how fields travel and are written, read from the annotations of a method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_type_hints

from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.hints import nearest
from fedloom.rows.proxes import Form, made_by
from fedloom.values import Value


@dataclass(frozen=True)
class Kind:
    """Way in which an upload field travels.

    Attributes:
        base: the value that it is a difference to: ``"zero"`` (absolute), ``"down.<field>"`` or ``"rows.<field>"``.
        primary: the field that carries the model.
        accumulates: the server adds it up over rounds, times ``ctx.part``. Arrives as its mean over the cohort by
            the clients' shares, whatever the weigher.
        part: name of a mask of the algorithm (`Algorithm.part`): only those coordinates travel.
        label: the number of something, such as a cluster: a channel leaves it as it is.
        carries: what a primary field carries. Only a model is a change to the first field of the download.
        weight: of a kept field, another kept field ``[m, 1]``, not negative: a client's weight in the mean, which no
            channel changes. None: the client's share.

    Raises:
        ValueError: ``weight`` of a field that is not kept.
    """

    averaged: ClassVar[bool] = True
    """Arrives as one vector ``[d]``."""
    keeps: ClassVar[bool] = False
    """The server keeps every client's last row."""

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
            ValueError: the field is not kept.
        """
        if self.weight is not None and not self.keeps:
            raise ValueError(f"only a Kept field has a weight, got {type(self).__name__}(weight={self.weight!r})")

    @property
    def single(self) -> bool:
        """The server receives the rows of single clients."""
        return self.keeps or not self.averaged

    @property
    def weighable(self) -> bool:
        """The weigher acts on it, not the clients' shares alone."""
        return not self.single and not self.accumulates


@dataclass(frozen=True)
class Mean(Kind):
    """Arrives at the server as the run's aggregate over the cohort, ``[d]``: by shares, or by the weigher."""


@dataclass(frozen=True)
class Kept(Kind):
    """The server keeps every client's last row. Arrives aggregated over all n clients, ``[d]``."""

    keeps: ClassVar[bool] = True


@dataclass(frozen=True)
class Rows(Kind):
    """Arrives as raw rows ``[m, .]``, used and forgotten within `Algorithm.server`."""

    averaged: ClassVar[bool] = False


@dataclass(frozen=True)
class Sent:
    """Encoding of a download or upload field. Dense wherever that is not longer (`fedloom.rows.encodings`).

    A second annotation of the field: ``x: Annotated[Tensor, Sent(prox="regulariser")]``. Without it a field is dense.

    Attributes:
        encoding: the shortest form that the field can have.
        prox: name of a function in `Algorithm.proxes`. The field comes out of its prox, whose ``makes`` decides in
            place of ``encoding``.
        ranks: the field of the server's state that has the ranks of a download's matrices, ``[matrices]`` in the order
            of `Layout.matrix_shapes`. Measured when None.
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


def _annotated(algorithm: type[Value], function: str, name: str) -> Any:
    """Return the method's function with an annotation of ``name``, or the function that it overrides."""
    return next(f for f in _defined(algorithm, function) if name in f.__annotations__)


def _defined(algorithm: type[Value], function: str) -> list[Any]:
    """List a function as the method and its bases define it. The last is `Algorithm`'s."""
    return [vars(base)[function] for base in algorithm.__mro__ if function in vars(base)]


def _hint(algorithm: type[Value], function: str, name: str) -> Any:
    """Return the type of a function's argument or result.

    Raises:
        ConfigError: the annotation cannot be read.
    """
    try:
        return get_type_hints(_annotated(algorithm, function, name))[name]
    except NameError as error:
        raise ConfigError(f"{algorithm.__name__}.{function}: its annotation cannot be read: {error}") from None


def _fields(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


def _returned(algorithm: type[Value], function: str, wanted: str) -> Any:
    """Return the NamedTuple that a function returns, the first of several.

    Raises:
        ConfigError: its annotation does not say.
    """
    hint = _hint(algorithm, function, "return")
    returned = next(iter(get_args(hint)), hint)
    if not _fields(returned):
        raise ConfigError(
            f"{algorithm.__name__}.{function} must be annotated with what it returns, -> {wanted}, whose fields say "
            f"how they travel; got {_annotated(algorithm, function, 'return').__annotations__['return']!r}"
        )
    return returned


@cache
def upload_type(algorithm: type[Value]) -> Any:
    """Return the NamedTuple that `client` returns as its upload, read from its annotation.

    Raises:
        ConfigError: it has none.
    """
    return _returned(algorithm, "client", "'tuple[Up, Client]' with a NamedTuple Up")


@cache
def download_type(algorithm: type[Value]) -> Any:
    """Return the NamedTuple that `down` returns, read from its annotation, by default the download that `client` takes.

    Raises:
        ConfigError: it has none.
    """
    if _annotated(algorithm, "down", "return") is not _defined(algorithm, "down")[-1]:
        return _returned(algorithm, "down", "'Down' with a NamedTuple Down")
    hint = _hint(algorithm, "client", "down")
    return hint if _fields(hint) else Model


@cache
def upload_fields(algorithm: type[Value]) -> Mapping[str, Kind]:
    """Fields of the algorithm's upload with their kinds, read from the annotation of `client`.

    Raises:
        ConfigError: a field does not say how it travels, or not one of them carries the model.
    """
    up, name = upload_type(algorithm), algorithm.__name__
    hints = get_type_hints(up, include_extras=True)
    kinds = {field: [a for a in get_args(hints[field]) if isinstance(a, Mean | Kept | Rows)] for field in up._fields}
    for field, declared in kinds.items():
        if len(declared) != 1:
            raise ConfigError(
                f"{name}: the upload field {field!r} must say once how it travels, as Annotated[Tensor, Mean(...)], "
                f"Kept(...) or Rows(...); it has {len(declared)} of them"
            )
    primary = [field for field, (kind,) in kinds.items() if kind.primary]
    if kinds and len(primary) != 1:
        got = " and ".join(primary) or "none"
        raise ConfigError(f"{name}: one upload field must carry the model, as Mean(primary=True); got {got}")
    return {field: kind for field, (kind,) in kinds.items()}


def exact_fields(algorithm: type[Value]) -> list[str]:
    """Names of the upload fields that no channel changes: labels, and counts that weigh another field."""
    kinds = upload_fields(algorithm)
    weights = {kind.weight for kind in kinds.values() if isinstance(kind, Kept)}
    return [name for name, kind in kinds.items() if kind.label or name in weights]


def check_declaration(algorithm: type[Value]) -> None:
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


def encodings(algorithm: Any, message: Literal["down", "up"]) -> dict[str, Sent]:
    """Return the encoding of every field of a message, with ``prox`` resolved.

    Raises:
        ConfigError: a field names a prox that the method does not have.
    """
    kind: type[Value] = type(algorithm)
    fields = download_type(kind) if message == "down" else upload_type(kind)
    hints = get_type_hints(fields, include_extras=True)
    sent = {name: next((a for a in get_args(hints[name]) if isinstance(a, Sent)), Sent()) for name in fields._fields}
    proxes = algorithm.proxes()
    for name, s in sent.items():
        if s.prox not in {None, *proxes, *kind.model_fields}:
            where = f"{kind.__name__}: prox of the field {name!r}"
            raise ConfigError(f"{where} is {s.prox!r}; {nearest(str(s.prox), proxes)}")
    return {
        name: s if s.prox is None else replace(s, encoding=made_by(proxes.get(s.prox)), prox=None)
        for name, s in sent.items()
    }


def primary_field(algorithm: type[Value]) -> str:
    """Name of the upload field that carries the model."""
    return next(name for name, kind in upload_fields(algorithm).items() if kind.primary)


def with_model(algorithm: type[Value], idle: tuple[Any, Any], model: Tensor, down: Any, rows: Any) -> tuple[Any, Any]:
    """Replace the model ``[m, .]`` in the upload and rows of clients that take no step.

    If this field is a difference to a state field, that one takes the model.

    Args:
        algorithm: the method.
        idle: what the clients send and keep without a step.
        model: of every client.
        down: what they received.
        rows: their state before the round.
    """
    (up, kept), name = idle, primary_field(algorithm)
    kind = upload_fields(algorithm)[name]
    source, _, field = kind.base.partition(".")
    if source == "rows":
        kept = kept._replace(**{field: model})
    return up._replace(**{name: model - base_of(kind, down, rows)}), kept


def base_of(kind: Kind, down: Any, rows: Any) -> Tensor | float:
    """Return the value that a field is a difference from."""
    if kind.base == "zero":
        return 0.0
    source, name = kind.base.split(".")
    base: Tensor = getattr(down if source == "down" else rows, name)
    return base
