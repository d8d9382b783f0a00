"""Base class of all algorithms: a frozen value with pure functions.

It also provides the names that method files import.

Letters, the same in every file: x the server's model ``[d]``, w local models ``[m, d]``, v personal models, g
gradients, y duals, c control variates. m is the number of clients in the cohort, n of all clients. Per-client scalars
are ``[m, 1]``. A difference is new - old.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import torch
from annotated_types import Ge, Gt
from pydantic import Field, PlainSerializer, WithJsonSchema, WrapValidator, model_validator
from torch import Tensor

from fedloom.algorithms._messages import Delta as Delta
from fedloom.algorithms._messages import Kept as Kept
from fedloom.algorithms._messages import Mean as Mean
from fedloom.algorithms._messages import Model as Model
from fedloom.algorithms._messages import Point as Point
from fedloom.algorithms._messages import Rows as Rows
from fedloom.algorithms._messages import Sent as Sent
from fedloom.algorithms._messages import base_of, download_type, primary_field, upload_fields
from fedloom.choose.mixers import Mixer
from fedloom.errors import ConfigError, InvalidValue, Refused
from fedloom.local import Ctx, LocalSGD, Nothing, Work
from fedloom.local.rows import Fields
from fedloom.rows.layout import Layout
from fedloom.rows.proxes import Prox
from fedloom.values import FACTOR_PATTERN, Value, factor_of, or_derived

AS_IT_IS = PlainSerializer(lambda value: value, return_type=float | str | None)
"""Form of a derived option: a number, or a multiple of the derived value."""
_MULTIPLE = {"type": "string", "pattern": f"^{FACTOR_PATTERN}$"}

Derived = Annotated[
    float, Gt(0), WrapValidator(or_derived), AS_IT_IS,
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, _MULTIPLE]}),
]  # fmt: skip
"""Type of a positive option. With the default None, `Algorithm.derived` sets it before the first round. "2x" is twice
that value."""

DerivedFrom0 = Annotated[
    float, Ge(0), WrapValidator(or_derived), AS_IT_IS,
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, _MULTIPLE]}),
]  # fmt: skip
"""Type of such an option that may also be 0."""


def by_rule(**field: Any) -> Any:
    """Declare a field that `Algorithm.derived` fills if it is not given."""
    return Field(None, **field)


DEFAULT_KINDS = ("default", "paper", "released")
"""Default values of options: fedloom's, the values that the paper prints, or the values of its public code."""


def choose_defaults(defaults: Any, paper: Mapping[str, Any], released: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the constants that the option ``defaults`` selects.

    Raises:
        ValueError: it is neither "default", "paper" nor "released", or the method has no released constants.
    """
    if defaults not in DEFAULT_KINDS:
        raise ValueError(f"defaults must be 'default', 'paper' or 'released', got {defaults!r}")
    if defaults == "released" and not released:
        raise ValueError(
            "defaults = 'released' needs a method with released code. Set defaults = 'paper' for this method"
        )
    return {"default": {}, "paper": paper, "released": released}[defaults]


def weighed_in_itself(method: Algorithm, option: str, ctx: Ctx) -> None:
    """Raise if an option weights clients by samples although their shares differ, which would count samples twice.

    Raises:
        ConfigError: the shares differ.
    """
    if len(ctx.weight.unique()) > 1:
        name = type(method).__name__
        raise Refused(f"{name} with {option} already weights clients by their samples. Set client_weights = 'uniform'")


class Algorithm(Value, ABC):
    """A federated method. Its fields are its hyperparameters. Its functions are stateless and change no argument."""

    mixes: ClassVar[bool] = False
    """`down` mixes the cohort's stored rows. Otherwise it receives no stored rows."""
    plain_sgd: ClassVar[str | None] = None
    """Reason why the method needs plain SGD, if it does. A run with momentum or another optimizer is rejected with this
    sentence."""
    needs_sgd: ClassVar[str | None] = None
    """Reason why the method needs SGD, if it does, with or without momentum. A run with another optimizer is rejected
    with this sentence."""
    uses_shares: ClassVar[bool] = False
    """True if the local problems contain the clients' shares alpha_i (``work.weight``): fields that the server stores
    by client then arrive as a uniform mean. All other methods use the shares only in means."""
    needs_exact: ClassVar[str | None] = None
    """Reason why no channel may change uploads, if any. A run with a channel is rejected with this sentence."""
    weighs_partial: ClassVar[bool] = False
    """True if the server's weights or the local problem tolerate clients that take fewer steps than others, so a
    deadline may cut their work short (`affordable`)."""
    counting_option: ClassVar[str] = ""
    """Option with which the server's model becomes a mean over all clients (`counts_absent`), for a method that
    otherwise takes the cohort's whole change, as ``"server_lr = 'fraction'"``."""
    projects: ClassVar[bool] = False
    """True if the method works in a subspace. Takes the matrix that a run replays (``ctx.projection``,
    ``work.projection``)."""
    family: ClassVar[str] = "consensus"
    """Family for lists: consensus, personalized, composite, fair, clustered or reference."""
    paper: ClassVar[Mapping[str, Any]] = {}
    """The paper's own values of options with another default: ``defaults = "paper"`` selects them."""
    released: ClassVar[Mapping[str, Any]] = {}
    """Values and variants of the paper's public code that differ from the paper: ``defaults = "released"`` selects
    them."""

    @model_validator(mode="before")
    @classmethod
    def _choose_defaults(cls, options: Any) -> Any:
        if not isinstance(options, dict):
            return options
        for key in options:
            if key in LocalSGD.model_fields and key not in cls.model_fields:
                place = f"local={ {key: options[key]}!r} of the run"
                raise ValueError(
                    f"unknown key {key!r}. The settings of client training are not options of a method. Pass {place}"
                )
        if "defaults" not in options or "defaults" in cls.model_fields:
            return options
        rest = {key: value for key, value in options.items() if key != "defaults"}
        return {**choose_defaults(options["defaults"], cls.paper, cls.released), **rest}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        """Return values of the options that are None, from facts known before the first round."""
        return {}

    def derive_options(self, ctx: Ctx) -> Self:
        """Return the method with derived options, as simulation and deployment run it.

        Raises:
            ConfigError: a derived value is out of range. Give the option.
        """
        factors = {name: factor_of(getattr(self, name)) for name in type(self).model_fields}
        factors = {name: factor for name, factor in factors.items() if factor}
        method, values = self.with_(**dict.fromkeys(factors)) if factors else self, dict[str, Any]()
        try:
            if factors:  # numbers that are derived from them follow; words are those of the default
                rules = method.derived(ctx)
                words = {
                    name: word for name, word in rules.items() if isinstance(word, str) and not getattr(self, name)
                }
                values = {name: factor * rules[name] for name, factor in factors.items()} | words
                method = method.with_(**values)
            values = {name: value for name, value in method.derived(ctx).items() if getattr(method, name) is None}
            return method.with_(**values) if values else method
        except InvalidValue:
            where = f"{type(self).__name__}: {' and '.join(values)}"
            raise ConfigError(f"{where} cannot be derived from the steps of this run. Set a value") from None
        except KeyError as error:
            name = error.args[0]
            reason = f"{type(self).__name__}: {name} is not derived with these options, so it has no multiples"
            raise ConfigError(f"{reason}, got {getattr(self, name)!r}. Set a number") from None

    @property
    def mixes_all(self) -> bool:
        """True if a method that mixes receives the stored rows of all clients ``[n, .]``, not only the cohort."""
        return False

    def mixer(self, round: int) -> Mixer | None:
        """Return the mixer of the method's downloads in a round, or None if it does not mix the primary field."""
        return None

    @property
    def counts_absent(self) -> bool:
        """True if the server's model is a mean over all clients, including absent ones by their stored rows."""
        return any(kind.keeps for kind in upload_fields(type(self)).values())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return keys of ``[local]`` that have no effect. A run notes the ones that are not at their default.

        The default returns the keys for local SGD's steps if an option ``solver`` is "svrg", "gd" or "released".
        """
        steps = ("lr", "schedule", "epochs", "steps")
        return {"svrg": steps, "gd": (*steps, "batch_size"), "released": ("steps",)}.get(
            getattr(self, "solver", ""), ()
        )

    @property
    def full_gradients(self) -> str:
        """Return the method's option that needs exact full gradients, or "" if its steps are the run's local SGD.

        The default returns it for a method whose option ``solver`` is not "sgd".
        """
        solver = getattr(self, "solver", "sgd")
        return "" if solver == "sgd" else f"{type(self).__name__} with solver {solver!r}"

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Fields, Fields, Fields | None]:
        """Return the state before the first round. By default the server has the model, and clients store nothing.

        Args:
            x0: ``[d]`` the initial model.
            ctx: round 0.

        Returns:
            Server state, the template of a client's rows, and the server's stored upload of a client before its first
            one (None without `Kept` fields).
        """
        return Model(x0), Nothing(), None

    def down(self, server: Any, kept: Any, ctx: Ctx) -> Fields:
        """Return the download: fields ``[d]``, or ``[m, .]`` if clients receive different values.

        The first field is the model, if uploads contain one.

        By default it contains the fields of the server's state that the annotation of `client`'s download names.

        Raises:
            ConfigError: the server's state lacks one.
        """
        fields = download_type(type(self))
        for name in fields._fields:
            if not hasattr(server, name):
                raise ConfigError(f"{type(self).__name__} must define down: its server state has no field {name!r}")
        down: Fields = fields(*(getattr(server, name) for name in fields._fields))
        return down

    @abstractmethod
    def client(self, down: Any, rows: Any, work: Work) -> tuple[Fields, Fields]:
        """Run a client's round and return the upload and the client's new rows."""

    def affordable(self, samples: Tensor, work: Work) -> Tensor:
        """Return the local steps ``[m, 1]`` of clients that can train on ``samples [m, 1]`` before a deadline.

        By default these are the steps of their batches, at most the steps of the round.
        """
        size = work.local.batch_size
        batch = work.sizes if size == "full" else work.sizes.clamp(max=size)
        return torch.minimum((samples / batch).floor(), work.steps.to(samples)).long()

    def received(self, down: Any, up: Any) -> Tensor:
        """Return the model ``[d]`` or ``[m, d]`` from which clients started. A channel transforms the change to it.

        By default it is the first field of the download. It is zero if uploads contain no model.

        Args:
            down: the clients' download.
            up: their uploads. A channel does not change labels in them.
        """
        name = primary_field(type(self))
        if upload_fields(type(self))[name].carries != "model":
            return torch.zeros_like(getattr(up, name))
        received: Tensor = down[0]
        return received

    def decode(self, down: Any, rows: Any, up: Any, work: Work) -> Tensor:
        """Return the local models ``[m, .]`` that uploads contain. It is the inverse of `encode`.

        By default they are the primary field plus its base. A method whose primary field is a multiple of the model's
        change
        overrides this function and `encode`.

        Args:
            down: the clients' download.
            rows: the clients' state before the round.
            up: their uploads.
            work: their local problems. Only simulations call it, and it does not count as work of the method.
        """
        name = primary_field(type(self))
        model: Tensor = getattr(up, name) + base_of(upload_fields(type(self))[name], down, rows)
        return model

    def encode(self, model: Tensor, down: Any, rows: Any, work: Work) -> tuple[Fields, Fields] | None:
        """Return upload and new rows of clients whose local training ends at ``model [m, .]``. Attackers forge it.

        By default (None) the primary field is the model minus its base, a state field with this base becomes the model,
        and everything else equals the result of a client that takes no step. A method overrides this function if its
        upload contains the model in another form, or other fields that depend on it.

        Args:
            model: models of an attack, which need not be near any trained model.
            down: the clients' download.
            rows: the clients' state before the round.
            work: their local problems. Only simulations call it, and it does not count as work of the method.
        """
        return None

    def ranges(self, down: Any, up: Any, work: Work) -> Mapping[str, tuple[Tensor | float, Tensor | float]]:
        """Return the ranges of upload fields by name: a smallest and a largest value, or one pair per number.

        A deployed server rejects values outside them. None by default.

        Args:
            down: the clients' download.
            up: their uploads.
            work: their local problems. The server knows only sizes, steps and step size.
        """
        return {}

    @abstractmethod
    def server(self, server: Any, up: Any, ctx: Ctx) -> Fields:
        """Take the server's step with the aggregated upload of the accepted cohort."""

    def reshared(self, server: Any, moved: Any, ctx: Ctx) -> Fields | None:
        """Return the server's state after the clients' shares have changed between two rounds, see `Setting.weights`.

        By default it returns None if the server accumulates uploads over rounds (`Mean.accumulates`), because new
        shares do not apply to earlier rounds. Such a run is rejected.

        Args:
            server: the server's state. Its sums use the old shares.
            moved: one field ``[d]`` for each accumulated sum: the sum over all clients of the change of the share times
                the client's accumulated uploads. Adding it gives the sums with the new shares.
            ctx: all clients, with the new shares.
        """
        accumulates = any(kind.accumulates for kind in upload_fields(type(self)).values())
        same: Fields | None = None if accumulates else server
        return same

    def global_model(self, server: Any) -> Tensor | None:
        """Return ``[d]``, or None for a method without a global model.

        The default is the field x of the server's state.
        """
        return getattr(server, "x", None)

    def personal(self, down: Any, rows: Any, work: Work) -> Tensor | None:
        """Return ``[m, d]``, or None for a method without personal models."""
        return None

    def remarks(self, server: Any) -> list[str]:
        """Return warnings about the server's state after a round. A run notes each of them once."""
        return []

    def observe(self, down: Any, rows: Any, work: Work) -> Fields | None:
        """Return the rows of every client that `diagnostics` needs after a round, a NamedTuple of ``[m, .]``, or None.

        Args:
            down: a download from the server's state after the round.
            rows: the clients' states after the round.
            work: their local problems. Only simulations call it, and it does not count as work of the method.
        """
        return None

    def diagnostics(self, server: Any, total: Any, ctx: Ctx) -> dict[str, float]:
        """Return figures to record after an evaluated round, by name.

        Args:
            server: the server's state.
            total: fields of `observe`, each summed over all n clients.
            ctx: all clients.
        """
        return {}

    def proxes(self) -> dict[str, Prox]:
        """Return the functions whose prox creates models of this method, by the name in `Sent`.

        The default is its fields.

        A method with such functions is composite: its models' nonzeros, and ranks if they are of low rank, are
        recorded.
        """
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, Prox)}

    def part(self, name: str, layout: Layout) -> Tensor:
        """Return the bool mask ``[d]`` that an upload field names as its part."""
        raise AssertionError(f"{type(self).__name__} does not declare a part {name!r}")

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        """Raise if the method cannot work with a model or setting.

        Returns:
            Sentences of warning.

        Raises:
            ConfigError: the combination is impossible. The message states the reason.
        """
        return []
