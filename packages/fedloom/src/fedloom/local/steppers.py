"""Optimizers of a chunk's clients in one call of `descend`, each with its own state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedloom.local.optimizer import is_elementwise, make_optimizer_factory, parameter_views

if TYPE_CHECKING:
    from fedloom.local.work import Work
    from fedloom.seeds import Purpose


class Steppers:
    """The clients' optimizers during one call of `descend`.

    Args:
        w: starting point of each client ``[m, d]``.
        work: the clients' local problems.
        stream: name of the stream of batches.
        lr: step size.
    """

    def __init__(self, w: Tensor, work: Work, stream: Purpose, lr: float) -> None:
        self._local, self._layout, self._memory = work.local, work.layout, work.memory
        self._name = "" if work.memory is None else work.memory.call(stream)
        slots, make = work.slots.tolist(), make_optimizer_factory(work.local, lr)
        self._parameters = {
            slot: [nn.Parameter(v) for v in self._views(row)] for slot, row in zip(slots, w, strict=True)
        }
        if is_elementwise(work.local):
            self._optimizers = dict.fromkeys(
                slots, make([p for parameters in self._parameters.values() for p in parameters])
            )
        else:
            self._optimizers = {slot: make(parameters) for slot, parameters in self._parameters.items()}
        if self._memory is not None:
            memory, part = self._memory, self._memory.part(self._name)
            for slot, parameters in self._parameters.items():
                if part[slot, 0]:
                    self._optimizers[slot].state.update(
                        zip(parameters, memory.unpack(part[slot], len(parameters)), strict=True)
                    )

    def step_(self, w: Tensor, g: Tensor, slots: Tensor) -> None:
        """Take a step along ``g [m, d]`` for the clients with the indices ``slots``.

        ``w [m, d]`` is changed in place.
        """
        stepped = slots.tolist()
        for slot in self._parameters.keys() - set(stepped):
            for p in self._parameters[slot]:
                p.grad = None  # the optimizer then skips it
        for row, slope, slot in zip(w, g, stepped, strict=True):
            for p, value, gradient in zip(self._parameters[slot], self._views(row), self._views(slope), strict=True):
                p.data, p.grad = value, gradient
        with torch.no_grad():
            for optimizer in dict.fromkeys(self._optimizers[slot] for slot in stepped):
                optimizer.step()

    def keep(self) -> None:
        """Store the optimizer states if the settings preserve them between rounds."""
        memory = self._memory
        if memory is not None:
            for slot, parameters in self._parameters.items():
                if state := [self._optimizers[slot].state[p] for p in parameters if p in self._optimizers[slot].state]:
                    memory.part(self._name)[slot] = memory.pack(state)

    def _views(self, row: Tensor) -> list[Tensor]:
        return parameter_views(self._local, self._layout, row)
