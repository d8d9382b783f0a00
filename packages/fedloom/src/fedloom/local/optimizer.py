"""Training with optimizers other than plain SGD (from `torch.optim` or user-defined) and their states."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.rows.layout import Layout

if TYPE_CHECKING:
    from fedloom.local.settings import LocalSGD
    from fedloom.seeds import Purpose


FUSED_OPTIMIZERS = {torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD}
ELEMENTWISE_OPTIMIZERS = FUSED_OPTIMIZERS | {
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop,
}  # fmt: skip
"""Optimizers that update each coordinate separately, so a single optimizer can update all clients' stacked parameters,
one row per client."""


class Slot(NamedTuple):
    """Scalar or tensor in an optimizer's state, identified by parameter and key, with its shape and initial value."""

    parameter: int
    key: str
    shape: torch.Size
    like: Any


class OptimizerStates:
    """States of the clients' optimizers between two rounds: W numbers for each of S streams ``[m, S W]``.

    If there is a state, the first number of each stream is 1. Each call of `descend` in a round has separate
    optimizers, named after its stream: a second call with "local" is named "local 2", but ("local", 1) continues
    "local".

    Attributes:
        rows: states ``[m, S W]``.
        streams: names of the S streams.
        slots: entries of a state.
    """

    def __init__(self, rows: Tensor, slots: Sequence[Slot], streams: Sequence[str] = ()) -> None:
        self.rows, self.slots, self.streams = rows, slots, [*streams]
        self._calls: Counter[Purpose] = Counter()

    def call(self, stream: Purpose) -> str:
        """Return the name for the next call of `descend` with this stream in the current round."""
        self._calls[stream] += 1
        name = str(stream[0] if isinstance(stream, tuple) else stream)
        return name if self._calls[stream] == 1 else f"{name} {self._calls[stream]}"

    def replace_rows(self, rows: Tensor) -> OptimizerStates:
        """Return the same layout for other rows, i.e., for other clients or another round."""
        return OptimizerStates(rows, self.slots, self.streams)

    @property
    def width(self) -> int:
        """Number W of values in one optimizer's state."""
        return 1 + sum(slot.shape.numel() for slot in self.slots)

    def part(self, name: str) -> Tensor:
        """Return a stream's values ``[m, W]``, or zeros for a new stream."""
        if name not in self.streams:
            self.streams.append(name)
            self.rows = torch.cat([self.rows, self.rows.new_zeros(len(self.rows), self.width)], 1)
        start = self.streams.index(name) * self.width
        return self.rows[:, start : start + self.width]

    def pack(self, state: Sequence[Mapping[str, object]]) -> Tensor:
        """Pack an optimizer's state into a vector ``[W]``."""
        values = [torch.as_tensor(state[s.parameter][s.key]).reshape(-1).to(self.rows) for s in self.slots]
        return torch.cat([self.rows.new_ones(1), *values])

    def unpack(self, row: Tensor, parameters: int) -> list[dict[str, Any]]:
        """Unpack an optimizer's state from ``row [W]``. This is the inverse of `pack`."""
        state: list[dict[str, Any]] = [{} for _ in range(parameters)]
        widths = [s.shape.numel() for s in self.slots]
        for slot, values in zip(self.slots, row[1:].split(widths), strict=True):
            like = slot.like
            state[slot.parameter][slot.key] = (
                values.view(slot.shape).to(like.device, like.dtype, copy=True)
                if isinstance(like, Tensor)
                else type(like)(values.item())
            )
        return state


def make_optimizer_factory(local: LocalSGD, lr: float) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Return a function that creates the optimizer for given parameters.

    If the parameters are rows, the optimizer updates all of them in one call.
    """
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in local.optimizer_options.items()}
    if decays_itself(local):
        options["weight_decay"] = local.weight_decay
    if is_elementwise(local) and not options.keys() & {"foreach", "fused", "capturable", "differentiable"}:
        options["fused" if local.optimizer_class in FUSED_OPTIMIZERS else "foreach"] = True
    return partial(local.optimizer_class, lr=lr, **options)


def is_elementwise(local: LocalSGD) -> bool:
    """Return True if each parameter is a client's row, not a tensor of the model (see `ELEMENTWISE_OPTIMIZERS`)."""
    return local.optimizer_class in ELEMENTWISE_OPTIMIZERS


def parameter_views(local: LocalSGD, layout: Layout, row: Tensor) -> list[Tensor]:
    """Return a client's parameters as views of its row ``[d]``."""
    return [row] if is_elementwise(local) else [*layout.tree(row).values()]


@cache
def _takes_decay(optimizer: Any) -> bool:
    return "weight_decay" in inspect.signature(optimizer).parameters


def decays_itself(local: LocalSGD) -> bool:
    """Return True if the optimizer itself applies weight decay, as an L2 term or decoupled from the gradient."""
    return _takes_decay(local.optimizer_class)


def find_slots(local: LocalSGD, layout: Layout, like: Tensor) -> list[Slot]:
    """Find the entries of an optimizer's state for one client by taking a step with a zero gradient.

    Args:
        local: settings with the optimizer and its options.
        layout: names and shapes of the model's parameters.
        like: example of a model ``[d]``.

    Raises:
        ConfigError: the optimizer rejects its options or the model or needs more than a gradient, or its state cannot
            be stored.
    """
    try:
        parameters = [nn.Parameter(view.clone()) for view in parameter_views(local, layout, like)]
        for p in parameters:
            p.grad = torch.zeros_like(p)
        optimizer = make_optimizer_factory(local, local.lr)(parameters)
        with torch.no_grad():
            optimizer.step()
    except ConfigError:
        raise
    except Exception as error:
        options = f" with optimizer_options = {local.optimizer_options}" if local.optimizer_options else ""
        raise ConfigError(
            f"local.optimizer = {local.optimizer!r}{options} cannot train this model: {error}",
            rule="optimizer-fails",
            fix="set {local.optimizer = 'sgd'}, or use an optimizer that needs only the parameters' gradients",
        ) from error
    slots = []
    for place, p in enumerate(parameters):
        for key, value in sorted(optimizer.state[p].items()):
            if value is None:
                continue
            if not isinstance(value, Tensor | int | float):
                raise ConfigError(
                    f"local.optimizer_state = 'persistent': the state {key!r} of {local.optimizer!r} "
                    f"is a {type(value).__name__}, which cannot be stored as a row of numbers",
                    rule="optimizer-state",
                    fix="set {local.optimizer_state = 'fresh'}",
                )
            slots.append(Slot(place, key, value.shape if isinstance(value, Tensor) else torch.Size(), value))
    return slots
