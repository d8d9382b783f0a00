"""Base class of all algorithms: a frozen value whose functions are pure.

It also provides the names that method files import.

Letters have the same meaning in every file: x the server's model ``[d]``, w local models ``[m, d]``, v personal models,
g gradients, y duals, c control variates. m is the number of clients in the cohort, and n the number of all clients.
Per-client scalars are ``[m, 1]``. A difference is always new - old.
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
"""Format of a derived option: a number, or a multiple of the derived value."""
_MULTIPLE_SCHEMA = {"type": "string", "pattern": f"^{FACTOR_PATTERN}$"}

Derived = Annotated[
    float, Gt(0), WrapValidator(or_derived), AS_IT_IS,
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, _MULTIPLE_SCHEMA]}),
]  # fmt: skip
"""Type of a positive option. If it is None, the default, `Algorithm.derived` sets it before the first round. "2x" is
twice the derived value."""

DerivedFrom0 = Annotated[
    float, Ge(0), WrapValidator(or_derived), AS_IT_IS,
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, _MULTIPLE_SCHEMA]}),
]  # fmt: skip
"""Type of a derived option that may also be 0."""


def by_rule(**field: Any) -> Any:
    """Declare a field that `Algorithm.derived` fills in if it is not given."""
    return Field(None, **field)


DEFAULT_KINDS = ("default", "paper", "released")
"""Source of the options' default values: fedloom, the paper, or the paper's public code."""


def choose_defaults(defaults: Any, paper: Mapping[str, Any], released: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the constants that the option ``defaults`` selects.

    Raises:
        ValueError: ``defaults`` is neither "default", "paper" nor "released", or the method has no released constants.
    """
    if defaults not in DEFAULT_KINDS:
        raise ValueError(f"defaults must be 'default', 'paper' or 'released', got {defaults!r}")
    if defaults == "released" and not released:
        raise ValueError(
            "defaults = 'released' needs a method with released code. Set defaults = 'paper' for this method"
        )
    return {"default": {}, "paper": paper, "released": released}[defaults]


def weighed_in_itself(method: Algorithm, option: str, ctx: Ctx) -> None:
    """Raise if an option weights clients by samples although their shares differ, because samples would count twice.

    Raises:
        ConfigError: the clients' shares differ.
    """
    if len(ctx.weight.unique()) > 1:
        name = type(method).__name__
        raise Refused(f"{name} with {option} already weights clients by their samples. Set client_weights = 'uniform'")


class Algorithm(Value, ABC):
    """A federated method.

    Its fields are its hyperparameters. Its functions are stateless and do not modify their arguments.
    """

    mixes: ClassVar[bool] = False
    """`down` mixes the stored rows of the cohort. Otherwise, `down` receives no stored rows."""
    plain_sgd: ClassVar[str | None] = None
    """Reason why the method needs plain SGD, or None if it does not. A run with momentum or another optimizer is
    rejected with this sentence."""
    needs_sgd: ClassVar[str | None] = None
    """Reason why the method needs SGD, with or without momentum, or None if it does not. A run with another optimizer
    is rejected with this sentence."""
    uses_shares: ClassVar[bool] = False
    """True if the local problems contain the clients' shares alpha_i (``work.weight``): the fields that the server
    stores per client then arrive as a uniform mean. All other methods use the shares only in means."""
    needs_exact: ClassVar[str | None] = None
    """Reason why no channel may change uploads, or None if channels may. A run with a channel is rejected with this
    sentence."""
    weighs_partial: ClassVar[bool] = False
    """True if the server's weights or the local problem tolerate that some clients take fewer steps than others, so
    that a deadline may shorten their work (`affordable`)."""
    counting_option: ClassVar[str] = ""
    """Setting that makes the server's model a mean over all clients (`counts_absent`), such as ``"server_lr =
    'fraction'"``, for a method that otherwise applies the cohort's whole change."""
    projects: ClassVar[bool] = False
    """True if the method works in a subspace. It uses the projection matrix that a run replays (``ctx.projection``,
    ``work.projection``)."""
    family: ClassVar[str] = "consensus"
    """Group in which lists show the method: consensus, personalized, composite, fair, clustered or reference."""
    paper: ClassVar[Mapping[str, Any]] = {}
    """The paper's values of options whose default differs: ``defaults = "paper"`` selects them."""
    released: ClassVar[Mapping[str, Any]] = {}
    """Values and variants in the paper's public code that differ from the paper: ``defaults = "released"`` selects
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
        """Return values for the options that are None, derived from facts known before the first round."""
        return {}

    def derive_options(self, ctx: Ctx) -> Self:
        """Return the method with its derived options filled in, as simulations and deployments run it.

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
        """True if a method that mixes receives the stored rows of all clients ``[n, .]`` and not only of the cohort."""
        return False

    def mixer(self, round: int) -> Mixer | None:
        """Return the mixer of the method's downloads in a round, or None if it does not mix the primary field."""
        return None

    @property
    def counts_absent(self) -> bool:
        """True if the server's model is a mean over all clients, where absent clients count by their stored rows."""
        return any(kind.keeps for kind in upload_fields(type(self)).values())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return the keys of ``[local]`` that have no effect on this method.

        A run adds a note for each such key that is not at its default.

        By default, these are the keys for the steps of local SGD if the option ``solver`` is "svrg", "gd" or
        "released".
        """
        steps = ("lr", "schedule", "epochs", "steps")
        return {"svrg": steps, "gd": (*steps, "batch_size"), "released": ("steps",)}.get(
            getattr(self, "solver", ""), ()
        )

    @property
    def full_gradients(self) -> str:
        """Return the method's option that needs exact full gradients, or "" if the method uses local SGD.

        By default, this is the option ``solver``, if a method has it and it is not "sgd".
        """
        solver = getattr(self, "solver", "sgd")
        return "" if solver == "sgd" else f"{type(self).__name__} with solver {solver!r}"

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Fields, Fields, Fields | None]:
        """Return the state before the first round. By default, the server stores the model, and clients store nothing.

        Args:
            x0: initial model ``[d]``.
            ctx: round 0.

        Returns:
            Server state, the template of a client's rows, and the upload that the server stores for a client before the
            client's first upload (None without `Kept` fields).
        """
        return Model(x0), Nothing(), None

    def down(self, server: Any, kept: Any, ctx: Ctx) -> Fields:
        """Return the download: fields ``[d]``, or ``[m, .]`` if clients receive different values.

        The first field is the model if uploads contain a model.

        By default, the download contains the fields of the server's state that `client` names in the annotation of its
        download.

        Raises:
            ConfigError: the server's state lacks one of these fields.
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

        By default, it is the number of their batches, but at most the number of steps in the round.
        """
        size = work.local.batch_size
        batch = work.sizes if size == "full" else work.sizes.clamp(max=size)
        return torch.minimum((samples / batch).floor(), work.steps.to(samples)).long()

    def received(self, down: Any, up: Any) -> Tensor:
        """Return the model ``[d]`` or ``[m, d]`` from which the clients started.

        A channel transforms the change from this model.

        By default, it is the first field of the download. It is zero if uploads do not contain a model.

        Args:
            down: the clients' download.
            up: their uploads. A channel leaves their labels unchanged.
        """
        name = primary_field(type(self))
        if upload_fields(type(self))[name].carries != "model":
            return torch.zeros_like(getattr(up, name))
        received: Tensor = down[0]
        return received

    def decode(self, down: Any, rows: Any, up: Any, work: Work) -> Tensor:
        """Return the local models ``[m, .]`` that uploads contain. This function is the inverse of `encode`.

        By default, a local model is the primary field plus its base. A method whose primary field is a multiple of the
        model's change must override this function and `encode`.

        Args:
            down: the clients' download.
            rows: the clients' state before the round.
            up: their uploads.
            work: their local problems. Only simulations call this function, and its computations do not count as work
                of the method.
        """
        name = primary_field(type(self))
        model: Tensor = getattr(up, name) + base_of(upload_fields(type(self))[name], down, rows)
        return model

    def encode(self, model: Tensor, down: Any, rows: Any, work: Work) -> tuple[Fields, Fields] | None:
        """Return the upload and the new rows of clients whose local training ends at ``model [m, .]``.

        Attackers forge it.

        By default (None), the primary field is the model minus its base, a state field with this base becomes the
        model, and all other fields are as for a client that takes no step. A method overrides this function if its
        upload contains the model in a different form, or contains other fields that depend on the model.

        Args:
            model: models that an attack produces, which need not be close to any trained model.
            down: the clients' download.
            rows: the clients' state before the round.
            work: their local problems. Only simulations call this function, and its computations do not count as work
                of the method.
        """
        return None

    def ranges(self, down: Any, up: Any, work: Work) -> Mapping[str, tuple[Tensor | float, Tensor | float]]:
        """Return the ranges of upload fields by name: the smallest and largest value of the field, or of each number.

        A deployed server rejects values outside these ranges. None by default.

        Args:
            down: the clients' download.
            up: their uploads.
            work: their local problems. The server knows only the numbers of samples and steps, and the step size.
        """
        return {}

    @abstractmethod
    def server(self, server: Any, up: Any, ctx: Ctx) -> Fields:
        """Apply the server's step to the aggregated upload of the accepted cohort."""

    def reshared(self, server: Any, moved: Any, ctx: Ctx) -> Fields | None:
        """Return the server's state after the clients' shares have changed between two rounds (see `Setting.weights`).

        By default, it returns None if the server accumulates uploads over rounds (`Mean.accumulates`), because new
        shares do not apply to earlier rounds. A run is rejected if this function returns None.

        Args:
            server: the server's state. Its sums use the old shares.
            moved: one field ``[d]`` per accumulated sum: over all clients, the sum of the change in share times the
                client's accumulated uploads. Adding this field to the old sum gives the sum with the new shares.
            ctx: all clients with their new shares.
        """
        accumulates = any(kind.accumulates for kind in upload_fields(type(self)).values())
        same: Fields | None = None if accumulates else server
        return same

    def global_model(self, server: Any) -> Tensor | None:
        """Return the global model ``[d]``, or None for a method without a global model.

        By default, it is the field x of the server's state.
        """
        return getattr(server, "x", None)

    def personal(self, down: Any, rows: Any, work: Work) -> Tensor | None:
        """Return the personal models ``[m, d]``, or None for a method without personal models."""
        return None

    def remarks(self, server: Any) -> list[str]:
        """Return warnings about the server's state after a round. A run notes each warning once."""
        return []

    def observe(self, down: Any, rows: Any, work: Work) -> Fields | None:
        """Return every client's rows for `diagnostics` after a round, a NamedTuple of ``[m, .]``, or None.

        Args:
            down: a download computed from the server's state after the round.
            rows: the clients' states after the round.
            work: their local problems. Only simulations call this function, and its computations do not count as work
                of the method.
        """
        return None

    def diagnostics(self, server: Any, total: Any, ctx: Ctx) -> dict[str, float]:
        """Return values to record after an evaluated round, by name.

        Args:
            server: the server's state.
            total: fields of `observe`, each summed over all n clients.
            ctx: all clients.
        """
        return {}

    def proxes(self) -> dict[str, Prox]:
        """Return the functions whose prox produces models of this method, by their name in `Sent`.

        By default, these are the method's fields with a prox.

        A method with such functions is composite: for its models, the number of nonzeros is recorded, and the ranks if
        they are of low rank.
        """
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, Prox)}

    def part(self, name: str, layout: Layout) -> Tensor:
        """Return the bool mask ``[d]`` that an upload field names as its part."""
        raise AssertionError(f"{type(self).__name__} does not declare a part {name!r}")

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        """Raise if the method cannot be used with a model or setting.

        Returns:
            Sentences of warning.

        Raises:
            ConfigError: the combination is impossible. The message states the reason.
        """
        return []
