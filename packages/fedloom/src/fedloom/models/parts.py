"""Parts of a model: its head, which is the last linear layer, and the layer below the head.

A user-defined module may name these parts in the attributes ``head`` and ``penultimate``, which must be strings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.hints import suggest_nearest
from fedloom.models.dropout import Dropout
from fedloom.values import Value

POSITIONS_REASON = "these sequences have one label per position"
"""Reason why a model option that requires one label per sample cannot be used."""


class Construction(Value):
    """Option of every model. If it is set, a larger network is built from plain networks.

    Methods recognize such networks by their parameter names. No other code depends on the method.
    """

    option: ClassVar[str]
    """Name of the option. If its value is false, the model is the plain network."""

    @staticmethod
    def count_networks(value: Any) -> int:
        """Return the number of plain networks that the larger network contains."""
        return 1

    @staticmethod
    @abstractmethod
    def wrap_networks(networks: Sequence[nn.Module], value: Any) -> nn.Module:
        """Build the larger network from the plain networks. The plain networks must not be used after that."""

    @staticmethod
    @abstractmethod
    def check_task(classed: bool, each: bool, task_keys: Collection[str]) -> None:
        """Raise an error if the option cannot be used for a task.

        Args:
            classed: True if the labels are classes.
            each: True if each position of a sequence has its own label.
            task_keys: keys that are set in the ``[task]`` table.

        Raises:
            Refused: the option cannot be used for this task. The message states the reason.
        """


class MultiBodyNetwork(nn.Module, ABC):
    """Network with several bodies, which all receive the samples, and a part that combines their outputs."""

    @abstractmethod
    def bodies(self) -> dict[str, nn.Module]:
        """Return the bodies, keyed by name."""

    @abstractmethod
    def above(self, *z: Tensor) -> Tensor:
        """Return logits ``[b, c]`` from the outputs of all bodies."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[b, c]``."""
        return self.above(*(body(x) for body in self.bodies().values()))


BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
ADAPTED_SUFFIX = ".wrapped"
"""Last part of the name of a layer that is inside an adapter."""

_PASSIVE_LAYERS = (Dropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Identity)


def head_prefixes(module: nn.Module) -> tuple[str, ...]:
    """Return prefixes of the parameters of the last linear layer, to split body and head (FedRep, LG-FedAvg).

    The last linear layer is the module that the attribute ``head`` names if the attribute is a string. Otherwise, it is
    the `nn.Linear` that was registered last.

    Raises:
        ConfigError: the module has no linear layer, or its attribute names a layer that does not exist.

    >>> head_prefixes(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    ('2.',)
    """
    return (f"{_head_layer(module)}.",)


def penultimate_layer(module: nn.Module) -> str:
    """Return the name of the submodule whose output, after its activation, is the representation below the head.

    It is the module that the attribute ``penultimate`` names if the attribute is a string. Otherwise, it is the last
    submodule without children that was registered before the head. Dropout and identity layers are skipped, because
    they have no effect in evaluation mode. If the model has no hidden layer, the representation is the flattened input.
    If a module applies an activation as a function, the representation is the input of the head
    (`fedloom.local.oracles.forward.find_representation`).

    Raises:
        ConfigError: there is no such submodule, or the attribute names a submodule that does not exist.

    >>> penultimate_layer(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    '1'
    """
    named = _declared_part(module, "penultimate")
    if named is not None:
        return named
    last = _head_layer(module)
    before: list[str] = []
    for name, part in module.named_modules():
        if name == last:
            break
        if name and not isinstance(part, _PASSIVE_LAYERS) and not any(True for _ in part.children()):
            before.append(name.removesuffix(ADAPTED_SUFFIX))
    if not before:
        raise ConfigError(
            f"{type(module).__name__} has no layer before {last!r}",
            rule="representation-missing",
            fix="put another layer before this layer, such as torch.nn.Flatten(), or set an attribute "
            "penultimate = 'NAME' on the module",
        )
    return before[-1]


def split_at_head(module: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """Split a network into the part below its last linear layer, and this layer.

    The network must not be used after that.

    Raises:
        ConfigError: the network does not end with a linear layer that comes after other layers.
    """
    name = _head_layer(module)
    layer = module.get_submodule(name)
    if not isinstance(layer, nn.Linear) or not name:
        raise ConfigError(
            f"the head of {type(module).__name__} is {name!r}, a {type(layer).__name__}",
            rule="head-not-linear",
            fix="name a linear layer that is the last operation of the network",
        )
    setattr(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], nn.Identity())
    return module, layer


def _head_layer(module: nn.Module) -> str:
    named = _declared_part(module, "head")
    if named is not None:
        return named
    linear: list[str] = [name for name, part in module.named_modules() if name and isinstance(part, nn.Linear)]
    linear = [name.removesuffix(ADAPTED_SUFFIX) for name in linear]
    if not linear:
        bare = isinstance(module, nn.Linear)
        raise ConfigError(
            f"{type(module).__name__} has no linear layer that could be its head",
            rule="head-missing",
            fix="put a layer before this layer: torch.nn.Sequential(torch.nn.Flatten(), layer)"
            if bare
            else "set an attribute head = 'name of a submodule' on the module",
        )
    return linear[-1]


def _declared_part(module: nn.Module, part: str) -> str | None:
    name = getattr(module, part, None)
    if not isinstance(name, str):
        return None
    submodules = [submodule for submodule, _ in module.named_modules() if submodule]
    if name not in submodules:
        raise ConfigError(
            f"{type(module).__name__}.{part} does not name a submodule: {name!r}; {suggest_nearest(name, submodules)}"
        )
    return name
