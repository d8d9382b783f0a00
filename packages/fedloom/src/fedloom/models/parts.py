"""Parts of a model: its head (the last linear layer), and the layer before the head.

A user's module may name its parts by the string attributes ``head`` and ``penultimate``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.hints import nearest
from fedloom.models.dropout import Dropout
from fedloom.values import Value

POSITIONS_REASON = "these sequences have a label per position"
"""Reason why a construction that needs one label per sample cannot be used."""


class Construction(Value):
    """Field that every model inherits, and the larger network that this field builds around the plain network.

    A method recognizes a construction by the names of its parameters in the layout. No other code knows the method.
    """

    option: ClassVar[str]
    """Name of the field. If the field is false, the model is the plain network."""

    @staticmethod
    def count_networks(value: Any) -> int:
        """Return the number of plain networks that the construction contains."""
        return 1

    @staticmethod
    @abstractmethod
    def wrap_networks(networks: Sequence[nn.Module], value: Any) -> nn.Module:
        """Build the larger network from plain networks. The plain networks must not be used afterwards."""

    @staticmethod
    @abstractmethod
    def check_task(classed: bool, each: bool, task_keys: Collection[str]) -> None:
        """Reject a task for which the construction is useless.

        Args:
            classed: True if labels are classes.
            each: True if each position of a sequence has a label.
            task_keys: keys of [task] that are set.

        Raises:
            Refused: the construction is incompatible with the task. The message states the reason.
        """


class Bodied(nn.Module, ABC):
    """Network of bodies, all of which receive the samples, and a part that combines their outputs."""

    @abstractmethod
    def bodies(self) -> dict[str, nn.Module]:
        """Return the bodies by name."""

    @abstractmethod
    def above(self, *z: Tensor) -> Tensor:
        """Return logits ``[b, c]`` from the outputs of all bodies."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[b, c]``."""
        return self.above(*(body(x) for body in self.bodies().values()))


BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
ADAPTED_SUFFIX = ".wrapped"
"""Last part of the name of a layer inside its adapter."""

_PASSIVE_LAYERS = (Dropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Identity)


def head_prefixes(module: nn.Module) -> tuple[str, ...]:
    """Return prefixes of the last linear layer's parameters, for splits into body and head (FedRep, LG-FedAvg).

    The last linear layer is the module that the attribute ``head`` names, if it is a string, else the last registered
    `nn.Linear`.

    Raises:
        ConfigError: the module has no linear layer, or names a layer that does not exist.

    >>> head_prefixes(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    ('2.',)
    """
    return (f"{_head(module)}.",)


def penultimate(module: nn.Module) -> str:
    """Return the name of the submodule whose output, after its activation, is the representation and the head's input.

    It is the module that the attribute ``penultimate`` names, if it is a string, else the last submodule without
    children that is registered before the head. Dropout and identity layers are skipped, because they do nothing in
    evaluation. For a model without a hidden layer, it is the flattened input. If a module applies an activation as a
    function, the oracles use the head's input itself (`fedloom.local.oracles.forward.representing`).

    Raises:
        ConfigError: there is no such submodule, or the module names a submodule that does not exist.

    >>> penultimate(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    '1'
    """
    named = _declared(module, "penultimate")
    if named is not None:
        return named
    last = _head(module)
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


def parted(module: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """Split a network into its last linear layer and the part below this layer.

    The network must not be used afterwards.

    Raises:
        ConfigError: the network does not end in a linear layer on top of other layers.
    """
    name = _head(module)
    layer = module.get_submodule(name)
    if not isinstance(layer, nn.Linear) or not name:
        raise ConfigError(
            f"the head of {type(module).__name__} is {name!r}, a {type(layer).__name__}",
            rule="head-not-linear",
            fix="name a linear layer that is the last operation of the network",
        )
    setattr(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], nn.Identity())
    return module, layer


def _head(module: nn.Module) -> str:
    named = _declared(module, "head")
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


def _declared(module: nn.Module, part: str) -> str | None:
    name = getattr(module, part, None)
    if not isinstance(name, str):
        return None
    submodules = [submodule for submodule, _ in module.named_modules() if submodule]
    if name not in submodules:
        raise ConfigError(f"{type(module).__name__}.{part} names no submodule: {name!r}; {nearest(name, submodules)}")
    return name
