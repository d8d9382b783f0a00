"""The base of every algorithm: a frozen value with pure functions, and what the files of methods import with it.

Letters, the same in every file: x the server's model ``[d]``, w local models ``[m, d]``, v personal models, g
gradients, y duals, c control variates. m clients of the cohort, n of all clients. Per-client scalars are ``[m, 1]``.
A difference is new - old.
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
from fedloom.rows.layout import Layout
from fedloom.rows.proxes import Prox
from fedloom.values import FACTOR_PATTERN, Value, factor_of, or_derived

AS_IT_IS = PlainSerializer(lambda value: value, return_type=float | str | None)
"""Form of a derived option: its number, or the multiple."""
_MULTIPLE = {"type": "string", "pattern": f"^{FACTOR_PATTERN}$"}

Derived = Annotated[
    float, Gt(0), WrapValidator(or_derived), AS_IT_IS,
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, _MULTIPLE]}),
]  # fmt: skip
"""Type of a positive option whose default, None, is derived by `Algorithm.derived` before the first round. "2x" is
twice that."""

DerivedFrom0 = Annotated[
    float, Ge(0), WrapValidator(or_derived), AS_IT_IS,
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, _MULTIPLE]}),
]  # fmt: skip
"""The same for an option that may be 0."""


def by_rule(**field: Any) -> Any:
    """Declare a field that `Algorithm.derived` fills if it is not given."""
    return Field(None, **field)


SETTINGS = ("default", "paper", "released")
"""Constants of the options that are not given: fedloom's, those that the paper prints, or those of its public code."""


def chosen_settings(settings: Any, paper: Mapping[str, Any], released: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the constants that the option ``settings`` selects.

    Raises:
        ValueError: it is neither "default", "paper" nor "released", or the method has no released constants.
    """
    if settings not in SETTINGS:
        raise ValueError(f"settings must be 'default', 'paper' or 'released', got {settings!r}")
    if settings == "released" and not released:
        raise ValueError(
            "settings = 'released' needs a method with constants of a released code; give this one settings = 'paper'"
        )
    return {"default": {}, "paper": paper, "released": released}[settings]


def weighed_in_itself(method: Algorithm, option: str, ctx: Ctx) -> None:
    """Refuse an option that weighs clients by samples beside shares that differ: they would count twice.

    Raises:
        Refused: the shares differ.
    """
    if len(ctx.weight.unique()) > 1:
        name = type(method).__name__
        raise Refused(f"{name} with {option} weighs clients by their samples in itself; set weights = 'uniform'")


class Algorithm(Value, ABC):
    """A federated method. Its fields are its hyper-parameters. Its functions have no state and change no argument."""

    mixes: ClassVar[bool] = False
    """`down` mixes the cohort's kept rows. Otherwise it is given none."""
    plain_sgd: ClassVar[str | None] = None
    """Why the method needs plain SGD, if it does: a run with momentum or another optimiser is refused with this
    sentence."""
    needs_sgd: ClassVar[str | None] = None
    """Why the method needs SGD, if it may have momentum: a run with another optimiser is refused with this sentence."""
    uses_shares: ClassVar[bool] = False
    """Has the clients' shares alpha_i in its local problems (``work.weight``): what the server keeps of the clients
    arrives as a uniform mean. Every other method has them in its means only."""
    needs_exact: ClassVar[str | None] = None
    """Reason why no channel may change what clients upload, if there is one. A run with a channel is refused with it.
    Reason why no channel may change what clients upload, if there is one. A run with a channel is refused with it."""
    weighs_partial: ClassVar[bool] = False
    """Its server weighs or its local problem tolerates clients that take fewer steps than others, so that a deadline
    may cut their work short (`affordable`)."""
    counting_option: ClassVar[str] = ""
    """The option with which its server's model is a mean over all clients (`counts_absent`), of a method whose server
    takes whole changes of it with others, as ``"server_lr = 'fraction'"``."""
    projects: ClassVar[bool] = False
    """Works in a subspace. Takes the matrix that a run replays (``ctx.projection``, ``work.projection``)."""
    family: ClassVar[str] = "consensus"
    """consensus, personalised, composite, fair, clustered or reference, for lists."""
    paper: ClassVar[Mapping[str, Any]] = {}
    """The paper's own constants where a default is another: ``settings = "paper"`` takes them."""
    released: ClassVar[Mapping[str, Any]] = {}
    """The constants and variants of the paper's public code, if they are not the paper's: ``settings = "released"``
    takes them."""

    @model_validator(mode="before")
    @classmethod
    def _settings(cls, options: Any) -> Any:
        if not isinstance(options, dict):
            return options
        for key in options:
            if key in LocalSGD.model_fields and key not in cls.model_fields:
                place = f"local={ {key: options[key]}!r} of the run"
                raise ValueError(f"unknown key {key!r}; how clients train is no option of a method: give {place}")
        if "settings" not in options or "settings" in cls.model_fields:
            return options
        rest = {key: value for key, value in options.items() if key != "settings"}
        return {**chosen_settings(options["settings"], cls.paper, cls.released), **rest}

    def derived(self, ctx: Ctx) -> dict[str, Any]:
        """Values of the options that are not given (None), from what is known before the first round."""
        return {}

    def derive_options(self, ctx: Ctx) -> Self:
        """Return the method with its missing options derived, as simulation and deployment run it.

        Raises:
            ConfigError: a derived value is out of its range. Give the option.
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
            raise ConfigError(f"{where} cannot be derived from this run's steps; give a value") from None
        except KeyError as error:
            name = error.args[0]
            reason = f"{type(self).__name__}: {name} is not derived with these options, so it has no multiples"
            raise ConfigError(f"{reason}, got {getattr(self, name)!r}; give a number") from None

    @property
    def mixes_all(self) -> bool:
        """True if a method that mixes is given the kept rows of all clients ``[n, .]``, not those of the cohort."""
        return False

    def mixer(self, round: int) -> Mixer | None:
        """Return the mixer of the method's downloads in a round, or None if it does not mix the kept primary field."""
        return None

    @property
    def counts_absent(self) -> bool:
        """True if the server's model is a mean over all clients, absent ones as it keeps them."""
        return any(kind.keeps for kind in upload_fields(type(self)).values())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Keys of ``[local]`` that change nothing. A run notes those that are not at their default.

        By default those of the steps of local SGD, with an option ``solver`` that is "svrg", "gd" or "released".
        """
        steps = ("lr", "schedule", "epochs", "steps")
        return {"svrg": steps, "gd": (*steps, "batch_size"), "released": ("steps",)}.get(
            getattr(self, "solver", ""), ()
        )

    @property
    def full_gradients(self) -> str:
        """Name the method's option that needs exact full gradients, or "" if steps are the run's local SGD.

        By default a method with an option ``solver`` that is not "sgd".
        """
        solver = getattr(self, "solver", "sgd")
        return "" if solver == "sgd" else f"{type(self).__name__} with solver {solver!r}"

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Any, Any, Any]:
        """State before the first round, by default the server has the model and clients keep nothing.

        Args:
            x0: ``[d]`` the initial model.
            ctx: round 0.

        Returns:
            Server state, the template of a client's rows, and the server's copy of a client's upload before its
            first one (None without `Kept` fields).
        """
        return Model(x0), Nothing(), None

    def down(self, server: Any, kept: Any, ctx: Ctx) -> Any:
        """The download: fields ``[d]``, or ``[m, .]`` where clients differ. First the model, where uploads have one.

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
        """Run a client's round and return the upload and the client's new rows."""

    def affordable(self, samples: Tensor, work: Work) -> Tensor:
        """Local steps ``[m, 1]`` of clients that have time for ``samples [m, 1]`` of training before a deadline.

        By default as many as their batches, up to the steps of the round.
        """
        size = work.local.batch_size
        batch = work.sizes if size == "full" else work.sizes.clamp(max=size)
        return torch.minimum((samples / batch).floor(), work.steps.to(samples)).long()

    def received(self, down: Any, up: Any) -> Tensor:
        """Return the model ``[d]`` or ``[m, d]`` that clients started from. A channel gets the change to it.

        By default the first field of the download. Zeros where uploads carry no model.

        Args:
            down: what the clients received.
            up: their uploads, of which a channel changes no label.
        """
        name = primary_field(type(self))
        if upload_fields(type(self))[name].carries != "model":
            return torch.zeros_like(getattr(up, name))
        received: Tensor = down[0]
        return received

    def decode(self, down: Any, rows: Any, up: Any, work: Work) -> Tensor:
        """Return the local models ``[m, .]`` that uploads carry. The inverse of `encode`.

        By default the primary field plus its base. A method whose primary field is a multiple of the model's change
        overrides this function and `encode`.

        Args:
            down: what the clients received.
            rows: their state before the round.
            up: their uploads.
            work: their local problems. Asked in simulation only, and not counted as work of the method.
        """
        name = primary_field(type(self))
        model: Tensor = getattr(up, name) + base_of(upload_fields(type(self))[name], down, rows)
        return model

    def encode(self, model: Tensor, down: Any, rows: Any, work: Work) -> tuple[Any, Any] | None:
        """Return upload and new rows of clients whose local training ends at ``model [m, .]``. Attackers forge it.

        By default (None) the primary field is the model less its base, a state field that is this base becomes the
        model, and all else is what a client sends and keeps that takes no step. A method overrides this function if
        its upload has the model in another form, or has other fields that depend on it.

        Args:
            model: models that an attack has made, which need not be near those of any training.
            down: what the clients received.
            rows: their state before the round.
            work: their local problems. Asked in simulation only, and not counted as work of the method.
        """
        return None

    def ranges(self, down: Any, up: Any, work: Work) -> Mapping[str, tuple[Tensor | float, Tensor | float]]:
        """Return the range of upload fields by name: a smallest and a largest value, or one pair per number.

        A deployed server refuses what is beyond them. None by default.

        Args:
            down: what the clients received.
            up: their uploads.
            work: their local problems, of which the server has sizes, steps and step size.
        """
        return {}

    @abstractmethod
    def server(self, server: Any, up: Any, ctx: Ctx) -> Any:
        """Take the server's step on the aggregated upload of the accepted cohort."""

    def reshared(self, server: Any, moved: Any, ctx: Ctx) -> Any:
        """Return the server's state after the clients' shares have changed between two rounds, see `Setting.weights`.

        By default there is none (None) where the server adds uploads up over rounds (`Mean.accumulates`), which shares
        of later rounds do not reach. Such a run is refused.

        Args:
            server: the server's state, whose sums are by the shares until now.
            moved: fields ``[d]``, one for each that accumulates: the sum over all clients of the change of the share
                times what the client's uploads have added up to, from which ``server`` has the sums by the new shares.
            ctx: all clients, with the new shares.
        """
        accumulates = any(kind.accumulates for kind in upload_fields(type(self)).values())
        return None if accumulates else server

    def global_model(self, server: Any) -> Tensor | None:
        """``[d]``, or None for a method without a global model, by default the field x of the server's state."""
        return getattr(server, "x", None)

    def personal(self, down: Any, rows: Any, work: Work) -> Tensor | None:
        """``[m, d]``, or None for a method without personal models."""
        return None

    def remarks(self, server: Any) -> list[str]:
        """Sentences that warn of what the server's state shows after a round. A run notes each of them once."""
        return []

    def observe(self, down: Any, rows: Any, work: Work) -> Any:
        """Return the rows of every client that `diagnostics` needs after a round, a NamedTuple of ``[m, .]``, or None.

        Args:
            down: a download with the server's state after the round.
            rows: the clients' states after the round.
            work: their local problems. Asked in simulation only, and not counted as work of the method.
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
        """Return the functions whose prox makes models of this method, by the name in `Sent`, by default its fields.

        A method that has some is composite: the non-zeros, and with a low rank the ranks, of its models are recorded.
        """
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, Prox)}

    def part(self, name: str, layout: Layout) -> Tensor:
        """Return the bool mask ``[d]`` that an upload field names as its part."""
        raise AssertionError(f"{type(self).__name__} names no part {name!r}")

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        """Refuse a model or setting that the method cannot work with.

        Returns:
            Sentences of warning.

        Raises:
            Refused: the combination makes no sense. The message has the reason.
        """
        return []
