"""LocalSGD: all settings of local training."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeGuard

import torch
from pydantic import AfterValidator, Field, model_validator

from fedloom.errors import ConfigError
from fedloom.hints import suggest_nearest
from fedloom.imports import find_class, find_import_path, is_path
from fedloom.values import Value

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}

ADAMW_PATTERN = re.compile(r"adamw|torch\.optim[\w.]*:AdamW")
"""Names that select AdamW. Its default weight decay is `ADAMW_DECAY`, as in PyTorch."""
ADAMW_DECAY = 0.01

MOMENTUM_RANGES: dict[str, Callable[[float], bool]] = {
    "momentum": lambda m: 0 <= m < 1,
    "dampening": lambda t: 0 <= t <= 1,
}
"""Momentum options of PyTorch optimizers, with checks of their ranges."""

MIN_STEP_SIZE = 1e-45
"""Minimum step size. Smaller values would become zero in float32."""


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_optimizer(name: str) -> str:
    if is_path(name):
        find_class(name, "optimizer", torch.optim.Optimizer)
    elif name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}; {suggest_nearest(name, OPTIMIZERS)}, or use an import path")
    return name


class LocalSGD(Value):
    """Settings of local training: step size and its schedule, batches, duration, momentum, weight decay, and clipping.

    The direction of a step is the sum of the batch gradient (with a norm of at most ``clip``), ``weight_decay`` times
    the parameters, and the proximal terms and shift of the method. Momentum is applied to this sum, as in
    ``torch.optim.SGD``.

    Any other ``optimizer`` uses the same direction. An optimizer with a ``weight_decay`` argument applies the weight
    decay itself (in AdamW, it is decoupled from the gradient and 0.01 by default).
    """

    lr: float = Field(0.01, gt=0, description="learning rate of local SGD in the first round")
    schedule: Literal["constant", "exponential", "inverse-sqrt", "cosine"] = Field(
        "constant",
        description=(
            "learning rate schedule over rounds t = 1, 2, ...: constant (lr), exponential (lr * "
            "decay^(t-1)), inverse-sqrt (lr/sqrt(t)), or cosine (half a period)"
        ),
    )
    decay: float = Field(
        1.0, gt=0, le=1, description="factor by which the exponential schedule multiplies the learning rate every round"
    )
    decay_rounds: int = Field(100, ge=1, description="number of rounds until the cosine schedule reaches zero")
    batch_size: int | Literal["full"] = Field(
        20, description="number of samples per step ('full': the whole training set)"
    )
    epochs: int = Field(1, ge=0, description="number of passes over the client's training set per round")
    steps: int | None = Field(
        None, ge=0, description="number of steps per round, the same for every client (replaces epochs)"
    )
    optimizer: Annotated[str, AfterValidator(_check_optimizer)] = Field(
        "sgd", description="sgd, adam, adamw, or the import path of a class such as torch.optim:RMSprop"
    )
    optimizer_options: dict[str, Any] = Field(
        default_factory=dict, description="additional arguments of the optimizer, such as betas = [0.9, 0.99]"
    )
    optimizer_state: Literal["fresh", "persistent"] = Field(
        "fresh",
        description="lifetime of optimizer states. fresh: reset in every round. persistent: kept by every client "
        "between rounds",
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="heavy-ball momentum, which restarts from zero in every round")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description=("weight of the L2 penalty in every local problem (parameters without a gradient are excluded)"),
    )
    clip: float | None = Field(None, gt=0, description="maximum norm of batch gradients")

    needs: ClassVar[Mapping[str, str]] = {"decay": "schedule exponential", "decay_rounds": "schedule cosine"}

    @model_validator(mode="before")
    @classmethod
    def _as_in_torch(cls, options: object) -> Any:
        """Replace an optimizer class by its import path, and set AdamW's default weight decay."""
        if not isinstance(options, dict):
            return options
        name = options.get("optimizer")
        if isinstance(name, type):
            name = find_import_path(name) or name.__qualname__
            options = {**options, "optimizer": name}
        return {"weight_decay": ADAMW_DECAY, **options} if ADAMW_PATTERN.fullmatch(str(name)) else options

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if isinstance(self.batch_size, int) and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 or 'full', got {self.batch_size}")
        if self.schedule == "exponential" and "decay" not in self.model_fields_set:
            raise ValueError("schedule 'exponential' needs `decay`, the factor of the learning rate per round")
        if self.steps is not None and "epochs" in self.model_fields_set:
            raise ValueError("set either epochs or steps, not both")
        if self.optimizer == "sgd":
            for key in ("optimizer_options", "optimizer_state"):
                if key in self.model_fields_set and getattr(self, key) not in ({}, "fresh"):
                    raise ValueError(
                        f"{key} can be used only with optimizers other than plain sgd. Name an "
                        "optimizer, such as optimizer = 'torch.optim:SGD'"
                    )
        elif self.momentum:
            cure = "Set momentum in optimizer_options" if self.has_momentum else "Omit `momentum`"
            raise ValueError(f"momentum works only with plain sgd, not with {self.optimizer!r}. {cure}")
        for key, value in self.optimizer_options.items():
            if key in ("lr", "weight_decay"):
                raise ValueError(f"optimizer_options: {key} is a key of [local]. Set {key} there")
            if key in MOMENTUM_RANGES and self.has_momentum and not (_is_number(value) and MOMENTUM_RANGES[key](value)):
                limit = "less than 1" if key == "momentum" else "1"
                raise ValueError(f"optimizer_options: {key} must be a number from 0 to {limit}, got {value!r}")
        return self

    def __hash__(self) -> int:
        """Hash the settings as JSON, because the optimizer options are a dict."""
        return hash(self.model_dump_json())

    @property
    def optimizer_class(self) -> Any:
        """Class of the optimizer."""
        return OPTIMIZERS.get(self.optimizer) or find_class(self.optimizer, "optimizer", torch.optim.Optimizer)

    @property
    def follows_gradient(self) -> bool:
        """True if the length of a step is proportional to the gradient, as in SGD but not in Adam."""
        return issubclass(self.optimizer_class, torch.optim.SGD)

    @property
    def has_momentum(self) -> bool:
        """True if the optimizer is a PyTorch optimizer whose momentum accumulates over steps."""
        return issubclass(self.optimizer_class, torch.optim.SGD | torch.optim.RMSprop)

    @property
    def momenta(self) -> tuple[float, float, bool]:
        """Momentum, dampening, and whether Nesterov momentum is used, from the settings or the optimizer options."""
        options = self.optimizer_options if self.has_momentum else {}
        momentum = options.get("momentum", self.momentum)
        return momentum, options.get("dampening", 0.0) if momentum else 0.0, bool(options.get("nesterov"))

    def lr_at(self, round: int) -> float:
        """Return the step size in a round (counted from 1).

        For round 0, return the step size of the first round.
        """
        round = max(round, 1)
        match self.schedule:
            case "exponential":
                return self.lr * self.decay ** (round - 1)
            case "inverse-sqrt":
                return self.lr / math.sqrt(round)
            case "cosine":
                return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, (round - 1) / self.decay_rounds)))
            case _:
                return self.lr

    def check(self, rounds: int) -> None:
        """Raise an error if local training takes no steps, or if the step size becomes zero within ``rounds`` rounds.

        Raises:
            ConfigError: no step is possible with these settings. The message names them.
        """
        key = "epochs" if self.steps is None else "steps"
        if not getattr(self, key):
            raise ConfigError(
                f"local.{key} = 0, so nothing would be trained",
                rule="no-local-step",
                fix=f"set {{local.{key} = 1}}, or use a larger number",
            )
        if self.lr < MIN_STEP_SIZE:
            raise ConfigError(
                f"local.lr = {self.lr:g} is 0 in float32, so nothing would be trained",
                rule="step-size-zero",
                fix="set a larger learning rate, such as {local.lr = 0.1}",
            )
        if self.lr_at(rounds) == 0:
            longer = (
                f"set {{local.decay_rounds = {rounds}}}, or more"
                if self.schedule == "cosine"
                else "set a larger {local.decay}"
            )
            raise ConfigError(
                f"schedule {self.schedule!r} reduces the learning rate to 0 by round {rounds}, the last round",
                rule="step-size-vanishes",
                fix=longer,
            )

    def batches(self, size: int) -> int:
        """Return the number of steps in an epoch over ``size`` samples. The last batch may be short."""
        return 1 if self.batch_size == "full" else math.ceil(size / self.batch_size)
