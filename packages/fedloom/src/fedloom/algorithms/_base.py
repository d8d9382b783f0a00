"""Base class of all algorithms. An algorithm is a frozen value whose functions are pure.

The module also provides the names that method files import.

Letters have the same meaning in every file: x is the server's model ``[d]``, w are local models ``[m, d]``, v personal
models, g gradients, y duals and c control variates. m is the number of clients in the cohort, and n is the number of
all clients. Scalars per client have the shape ``[m, 1]``. A difference is always the new value minus the old value.
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
"""Serialization of a derived option: a number, or a string for a multiple of the derived value."""
_MULTIPLE_SCHEMA = {"type": "string", "pattern": f"^{FACTOR_PATTERN}$"}

Derived = Annotated[
    float, Gt(0), WrapValidator(or_derived), AS_IT_IS,
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, _MULTIPLE_SCHEMA]}),
]  # fmt: skip
"""Type of a positive option with a derived default. If the option is None, `Algorithm.derived` sets it before the first
round. "2x" means twice the derived value."""

DerivedFrom0 = Annotated[
    float, Ge(0), WrapValidator(or_derived), AS_IT_IS,
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, _MULTIPLE_SCHEMA]}),
]  # fmt: skip
"""Type of an option with a derived default that may also be 0."""


def by_rule(**field: Any) -> Any:
    """Declare a field that `Algorithm.derived` sets if the user does not."""
    return Field(None, **field)


DEFAULT_KINDS = ("default", "paper", "released")
"""Sources of the options' default values: fedloom itself, the paper, or the paper's public code."""


def choose_defaults(defaults: Any, paper: Mapping[str, Any], released: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the option values that correspond to the choice ``defaults``.

    Raises:
        ValueError: ``defaults`` is not "default", "paper" or "released", or it is "released" and the method has no
            values from public code.
    """
    if defaults not in DEFAULT_KINDS:
        raise ValueError(f"defaults must be 'default', 'paper' or 'released', got {defaults!r}")
    if defaults == "released" and not released:
        raise ValueError(
            "this method has no released code, so defaults = 'released' is not available. Set defaults = 'paper'"
        )
    return {"default": {}, "paper": paper, "released": released}[defaults]


def require_equal_shares(method: Algorithm, option: str, ctx: Ctx) -> None:
    """Raise an error if an option would weight clients by samples although the clients' shares already differ.

    Raises:
        ConfigError: the clients' shares are not equal.
    """
    if len(ctx.weight.unique()) > 1:
        name = type(method).__name__
        raise Refused(f"{name} with {option} already weights clients by their samples. Set client_weights = 'uniform'")


class Algorithm(Value, ABC):
    """Federated method.

    The fields of a method are its hyperparameters. The functions of a method are stateless and do not modify their
    arguments.
    """

    mixes: ClassVar[bool] = False
    """True if `down` mixes the rows that the server stores for the cohort. If False, `down` does not receive any stored
    rows."""
    plain_sgd: ClassVar[str | None] = None
    """Reason why the method needs plain SGD, or None if it works with other optimizers. Reason given when a run with
    momentum or a different optimizer is rejected."""
    needs_sgd: ClassVar[str | None] = None
    """Reason why the method needs SGD, with or without momentum, or None if it works with other optimizers. Reason
    given when a run that uses a different optimizer is rejected."""
    uses_shares: ClassVar[bool] = False
    """True if the local problems depend on the clients' shares alpha_i (``work.weight``). Fields that the server stores
    for each client then arrive as an unweighted mean. All other methods use the shares only as the weights of means."""
    needs_exact: ClassVar[str | None] = None
    """Reason why no channel is allowed to change uploads, or None if channels are allowed to do so. Reason given when a
    run that uses a channel is rejected."""
    weighs_partial: ClassVar[bool] = False
    """True if clients may take different numbers of steps, for which the server's weights or the local problem account.
    A deadline may then reduce the work of a client (`affordable`)."""
    counting_option: ClassVar[str] = ""
    """Setting that makes the server average over all clients (`counts_absent`), such as ``"server_lr = 'fraction'"``.
    The setting is needed if a method otherwise applies the full change of the cohort."""
    projects: ClassVar[bool] = False
    """True if the method works in a random subspace. In a replayed run, the matrix is set from outside
    (``ctx.projection``, ``work.projection``)."""
    family: ClassVar[str] = "consensus"
    """Group of the method in lists: consensus, personalized, composite, fair, clustered or reference."""
    paper: ClassVar[Mapping[str, Any]] = {}
    """Values in the paper for the options whose default is different. These values are selected with ``defaults =
    "paper"``."""
    released: ClassVar[Mapping[str, Any]] = {}
    """Values and variants in the paper's public code that differ from the paper. These values and variants are selected
    with ``defaults = "released"``."""

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
        """Return values for the options that are None.

        These values are derived from information that is available before the first round.
        """
        return {}

    def derive_options(self, ctx: Ctx) -> Self:
        """Set the derived options of the method, and return it as simulations and deployments run it.

        Raises:
            ConfigError: a derived value is out of range, so the option must be set.
        """
        factors = {name: factor_of(getattr(self, name)) for name in type(self).model_fields}
        factors = {name: factor for name, factor in factors.items() if factor}
        method, values = self.with_(**dict.fromkeys(factors)) if factors else self, dict[str, Any]()
        try:
            if factors:  # numbers are derived from the scaled options, but text values from the defaults
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
            reason = f"{type(self).__name__}: with these options, {name} has no derived value to multiply"
            raise ConfigError(f"{reason}, got {getattr(self, name)!r}. Set a number") from None

    @property
    def mixes_all(self) -> bool:
        """True if `down` receives the stored rows of all clients ``[n, .]``.

        Otherwise, `down` receives only the rows of the cohort.
        """
        return False

    def mixer(self, round: int) -> Mixer | None:
        """Return the mixer of the downloads in a round, or None if downloads are not mixtures of the primary field."""
        return None

    @property
    def counts_absent(self) -> bool:
        """True if the server's model is a mean over all clients, in which stored rows represent the absent clients."""
        return any(kind.keeps for kind in upload_fields(type(self)).values())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Keys of ``[local]`` that have no effect on this method.

        For each of these keys that does not have its default value, a note is added to the run.

        By default, these are the keys that control local SGD, provided that the option ``solver`` is "svrg", "gd" or
        "released".
        """
        steps = ("lr", "schedule", "epochs", "steps")
        return {"svrg": steps, "gd": (*steps, "batch_size"), "released": ("steps",)}.get(
            getattr(self, "solver", ""), ()
        )

    @property
    def full_gradients(self) -> str:
        """Option of the method that needs exact full gradients, or "" if the method uses local SGD.

        By default, this is the option ``solver``, if the method has this option and it is not "sgd".
        """
        solver = getattr(self, "solver", "sgd")
        return "" if solver == "sgd" else f"{type(self).__name__} with solver {solver!r}"

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Fields, Fields, Fields | None]:
        """Return the state before the first round. By default, the server stores the model, and clients store nothing.

        Args:
            x0: initial model ``[d]``.
            ctx: context of round 0, before the first round.

        Returns:
            The server's state, the initial state of a client, and the upload that represents a client before its first
            upload (None if no field is of kind `Kept`).
        """
        return Model(x0), Nothing(), None

    def down(self, server: Any, kept: Any, ctx: Ctx) -> Fields:
        """Return the download.

        The fields of the download are ``[d]``, or ``[m, .]`` if clients receive different values.

        The first field is the model if uploads contain one.

        By default, the download contains the fields of the server's state that are named in the annotation of
        `client`'s download.

        Raises:
            ConfigError: one of these fields is not part of the server's state.
        """
        fields = download_type(type(self))
        for name in fields._fields:
            if not hasattr(server, name):
                raise ConfigError(f"{type(self).__name__} must define down: its server state has no field {name!r}")
        down: Fields = fields(*(getattr(server, name) for name in fields._fields))
        return down

    @abstractmethod
    def client(self, down: Any, rows: Any, work: Work) -> tuple[Fields, Fields]:
        """Run the clients' round, and return their uploads and new states."""

    def affordable(self, samples: Tensor, work: Work) -> Tensor:
        """Return the number of local steps ``[m, 1]`` if a deadline limits clients to ``samples [m, 1]``.

        By default, this is the number of batches into which these samples can be divided, but at most the number of
        steps in the round.
        """
        size = work.local.batch_size
        batch = work.sizes if size == "full" else work.sizes.clamp(max=size)
        return torch.minimum((samples / batch).floor(), work.steps.to(samples)).long()

    def received(self, down: Any, up: Any) -> Tensor:
        """Return the model ``[d]`` or ``[m, d]`` from which the clients started training.

        A channel transforms the difference between this model and the trained model.

        By default, this is the first field of the download, or zero if uploads do not contain a model.

        Args:
            down: the download that the clients received.
            up: the clients' uploads. A channel does not change labels in these fields.
        """
        name = primary_field(type(self))
        if upload_fields(type(self))[name].carries != "model":
            return torch.zeros_like(getattr(up, name))
        received: Tensor = down[0]
        return received

    def decode(self, down: Any, rows: Any, up: Any, work: Work) -> Tensor:
        """Return the local models ``[m, .]`` that uploads contain. This function is the inverse of `encode`.

        By default, a local model is the primary field plus its base. If the primary field of a method is a multiple of
        the model's change, the method must override this function and `encode`.

        Args:
            down: the download that the clients received.
            rows: the clients' states before the round.
            up: the clients' uploads.
            work: the clients' local problems. Only simulations call this function, and its computations are not
                recorded as work of the method.
        """
        name = primary_field(type(self))
        model: Tensor = getattr(up, name) + base_of(upload_fields(type(self))[name], down, rows)
        return model

    def encode(self, model: Tensor, down: Any, rows: Any, work: Work) -> tuple[Fields, Fields] | None:
        """Return the uploads and new states of clients whose local training ends at ``model [m, .]``.

        Attackers use this function to forge their messages.

        By default, None is returned. The primary field is then the model minus the field's base. If this base is a
        state field, it is set to the model. All other fields are the same as for a client that takes no step. A method
        overrides this function if its upload represents the model differently, or if other fields of the upload depend
        on the model.

        Args:
            model: models that an attack produces. They do not need to be close to any trained model.
            down: the download that the clients received.
            rows: the clients' states before the round.
            work: the clients' local problems. Only simulations call this function, and its computations are not
                recorded as work of the method.
        """
        return None

    def ranges(self, down: Any, up: Any, work: Work) -> Mapping[str, tuple[Tensor | float, Tensor | float]]:
        """Return the ranges of upload fields, keyed by name: the smallest and the largest allowed value.

        A deployed server rejects values outside these ranges. By default, fields have no ranges.

        Args:
            down: the download that the clients received.
            up: the clients' uploads.
            work: the clients' local problems. The server knows only the numbers of samples and steps, and the step
                size.
        """
        return {}

    @abstractmethod
    def server(self, server: Any, up: Any, ctx: Ctx) -> Fields:
        """Perform the server's step with the accepted cohort's aggregated upload, and return the new state."""

    def reshared(self, server: Any, moved: Any, ctx: Ctx) -> Fields | None:
        """Return the server's state after the clients' shares (`Setting.client_weights`) changed between two rounds.

        By default, the result is None if the server accumulates uploads over rounds (`Mean.accumulates`), because the
        new shares do not apply to earlier rounds. If None is returned, the run is rejected.

        Args:
            server: the server's state. The sums that were accumulated in this state use the old shares.
            moved: one field ``[d]`` for each accumulated sum. The field is the sum over all clients of the client's
                change in share times its accumulated uploads. The sum with the new shares is obtained by adding this
                field to the old sum.
            ctx: context of all clients, with their new shares.
        """
        accumulates = any(kind.accumulates for kind in upload_fields(type(self)).values())
        same: Fields | None = None if accumulates else server
        return same

    def global_model(self, server: Any) -> Tensor | None:
        """Return the global model ``[d]``, or None if the method has no global model.

        By default, this is the field x of the server's state.
        """
        return getattr(server, "x", None)

    def personal(self, down: Any, rows: Any, work: Work) -> Tensor | None:
        """Return the personal models ``[m, d]``, or None if the method has no personal models."""
        return None

    def remarks(self, server: Any) -> list[str]:
        """Return warnings about the server's state at the end of a round.

        Each warning is added to the run's notes once.
        """
        return []

    def observe(self, down: Any, rows: Any, work: Work) -> Fields | None:
        """Return the rows that `diagnostics` needs after a round, a NamedTuple of ``[m, .]``, or None if it needs none.

        Args:
            down: download computed from the server's state after the round.
            rows: the clients' states after the round.
            work: the clients' local problems. Only simulations call this function, and its computations are not
                recorded as work of the method.
        """
        return None

    def diagnostics(self, server: Any, total: Any, ctx: Ctx) -> dict[str, float]:
        """Return values to record after a round that is evaluated, keyed by name.

        Args:
            server: the server's state.
            total: fields returned by `observe`, each of which is summed over all n clients.
            ctx: context of all clients.
        """
        return {}

    def proxes(self) -> dict[str, Prox]:
        """Return the functions whose prox is used to compute the method's models, keyed by their name in `Sent`.

        By default, these are the method's fields that contain a function with a prox.

        A method with such functions is composite. For its models, the number of nonzeros is recorded, and the ranks if
        the models have low rank.
        """
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, Prox)}

    def part(self, name: str, layout: Layout) -> Tensor:
        """Return the boolean mask ``[d]`` of the ``part`` that an upload or download field declares."""
        raise AssertionError(f"{type(self).__name__} does not declare a part {name!r}")

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        """Raise an error if the method cannot be used with the given model or setting.

        Returns:
            Warnings, one sentence each.

        Raises:
            ConfigError: this combination is impossible. The message states the reason.
        """
        return []
