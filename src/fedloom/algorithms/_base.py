"""What an algorithm is: a frozen value with pure functions, and fields that say what they are.

Letters, the same in every file: x the server's model ``[d]``, w local models ``[m, d]``, v personal models, g
gradients, y duals, c control variates; m clients of the cohort, n of all clients. Per-client scalars are ``[m, 1]``.
A difference is new - old.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

import torch
from pydantic import AfterValidator
from torch import Tensor

from fedloom.errors import ConfigError, Refused, nearest
from fedloom.local import Ctx, Local, Work
from fedloom.rows import algebra
from fedloom.rows.layout import Layout
from fedloom.rows.prox import AnyProx, Prox
from fedloom.values import Value


@dataclass(frozen=True)
class Kind:
    """How a field of an upload travels.

    Attributes:
        base: what the value is a difference to: ``"zero"`` (absolute), ``"down.<field>"`` or ``"rows.<field>"``.
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
        prox: the attribute of the algorithm that holds a function with a prox, or None; the field comes out of that
            prox, which decides in place of ``encoding``.
        ranks: the field of the server's state that has the ranks of a download's matrices, ``[matrices]`` in the order
            of `Layout.matrix_shapes`; measured when None.
        part: name of a mask of the algorithm (`Algorithm.part`) for a download of which clients have the rest.
    """

    encoding: Literal["dense", "sparse", "lowrank"] = "dense"
    prox: str | None = None
    ranks: str | None = None
    part: str | None = None


def _has_prox(f: Value | None) -> Value | None:
    if f is not None and not isinstance(f, Prox):
        raise ValueError(f"a regulariser needs f, prox and convex, got {type(f).__name__}")
    return f


Regulariser = Annotated[AnyProx | None, AfterValidator(_has_prox)]
"""Type of a field that holds the nonsmooth term of a composite problem; None is no term."""


def with_prox(f: object) -> Prox | None:
    """A regulariser as what it is: a function with a prox, or None."""
    return f if isinstance(f, Prox) else None


def proximal(f: object, v: Tensor, t: float | Tensor, layout: Layout) -> Tensor:
    """prox_{t f}(v), and v itself without f; v ``[d]`` or ``[m, d]``, t a number or ``[m, 1]``."""
    return f.prox(v, t, layout) if isinstance(f, Prox) else v


def penalty(f: object, x: Tensor, layout: Layout) -> Tensor:
    """f(x), and 0 without f: ``[m, 1]`` of ``[m, d]``, a scalar of ``[d]``."""
    return f.f(x, layout) if isinstance(f, Prox) else algebra.total(torch.zeros_like(x))


def gradient_mapping(f: object, x: Tensor, gradient: Tensor, t: float, layout: Layout) -> Tensor:
    """||x - prox_{t f}(x - t gradient)|| / t: zero exactly where 0 is in gradient + df(x) (f convex), ``[..., 1]``."""
    gap = x - proximal(f, x - t * gradient, t, layout)
    return algebra.norm(gap) / t


def ranks(x: Tensor, layout: Layout) -> Tensor:
    """Numerical ranks of the matrices of ``x [d]``, int64 in the order of `Layout.matrix_shapes`; 0 if not finite."""
    found = [algebra.ranks(w.nan_to_num(0.0, 0.0, 0.0)) for w in layout.matrices(x).values()]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64)


def check_full_gradients(name: str, local: Local) -> None:
    """Refuse settings of stochastic steps that a method would leave aside.

    Raises:
        Refused: momentum, or a bound on batch gradients.
    """
    if local.momentum or local.clip is not None:
        raise Refused(f"{name} takes full gradients as they are; set local.momentum = 0 and leave local.clip out")


class Algorithm(Value, ABC):
    """A federated method. Its fields are its hyper-parameters; its functions have no state and change no argument."""

    mixes: ClassVar[bool] = False
    """`down` mixes the cohort's kept rows; otherwise it is given none."""
    plain_sgd: ClassVar[str | None] = None
    """Why the method needs plain SGD, if it does: a run with momentum, clipping or such is refused with this
    sentence."""
    uses_shares: ClassVar[bool] = False
    """Reads the clients' shares alpha_i of the objective (``ctx.weight``, ``work.weight``); a run whose shares are not
    uniform says so where they change nothing."""
    family: ClassVar[str] = "consensus"
    """consensus, personalised, composite, fair, clustered or reference; for lists."""

    @abstractmethod
    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Any, Any, Any]:
        """State before the first round.

        Args:
            x0: ``[d]`` the initial model.
            ctx: round 0.

        Returns:
            Server state, the template of a client's rows, and what the server keeps of a client before its first
            upload (None without `Kept` fields).
        """

    @abstractmethod
    def down(self, server: Any, kept: Any, ctx: Ctx) -> Any:
        """The download: fields ``[d]``, or ``[m, .]`` where clients differ; the first field is the received model."""

    @abstractmethod
    def client(self, down: Any, rows: Any, work: Work) -> tuple[Any, Any]:
        """A client's round: the upload and its new rows."""

    @abstractmethod
    def server(self, server: Any, up: Any, ctx: Ctx) -> Any:
        """The server's step on the aggregated upload of the accepted cohort."""

    def global_model(self, server: Any) -> Tensor | None:
        """``[d]``, or None for a method without a global model."""
        return None

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

    def part(self, name: str, layout: Layout) -> Tensor:
        """The bool mask ``[d]`` that a field of an upload names as its part."""
        raise AssertionError(f"{type(self).__name__} names no part {name!r}")

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        """Refuse what the method cannot do with this model and setting; sentences to warn of are returned.

        Raises:
            Refused: the combination makes no sense; the sentence says why.
        """
        return []


def _returned(algorithm: type[Algorithm], function: str, wanted: str) -> Any:
    """The NamedTuple that a function returns, first of several, by its annotation or that of the function it replaces.

    Raises:
        ConfigError: none of them says so.
    """
    replaced = [vars(base)[function] for base in algorithm.__mro__ if function in vars(base)]
    said = next(f for f in replaced if "return" in f.__annotations__)
    try:
        found = get_type_hints(said)["return"]
    except NameError as error:
        raise ConfigError(f"{algorithm.__name__}.{function}: its annotation cannot be read: {error}") from None
    found = next(iter(get_args(found)), found)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise ConfigError(
            f"{algorithm.__name__}.{function} must be annotated with what it returns, -> {wanted}, whose fields say "
            f"how they travel; got {said.__annotations__['return']!r}"
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
    """The NamedTuple that `down` returns, read from its annotation.

    Raises:
        ConfigError: it has none.
    """
    return _returned(algorithm, "down", "'Down' with a NamedTuple Down")


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
    """Refuse a method whose functions do not say what they return, or whose fields name what is not there.

    Raises:
        ConfigError: what is missing, and how it is said.
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
    """How every field of a message is written, with ``prox`` resolved to an encoding."""
    fields = download_type(type(algorithm)) if message == "down" else upload_type(type(algorithm))
    hints = get_type_hints(fields, include_extras=True)
    sent = {name: next((a for a in get_args(hints[name]) if isinstance(a, Sent)), Sent()) for name in fields._fields}
    return {
        name: s if s.prox is None else replace(s, encoding=_form(getattr(algorithm, s.prox)), prox=None)
        for name, s in sent.items()
    }


_FORMS: dict[str, Literal["sparse", "lowrank"]] = {
    **dict.fromkeys(("l1", "elastic-net", "group-l1", "scad", "mcp", "l1-ball", "simplex"), "sparse"),
    **dict.fromkeys(("nuclear", "nuclear-ball"), "lowrank"),
}


def _form(f: object) -> Literal["dense", "sparse", "lowrank"]:
    """What the prox of f makes of a vector."""
    kinds = [getattr(part, "kind", "") for part in getattr(f, "parts", (f,))]
    return next((_FORMS[kind] for kind in kinds if kind in _FORMS), "dense")


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
