"""Steppers: the optimisers of a chunk's clients in one call of `descend`, each client with its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedloom.local.optimizer import maker

if TYPE_CHECKING:
    from fedloom.local.work import Work
    from fedloom.seeds import Purpose


class Steppers:
    """The optimisers of the clients in one call of `descend`.

    Args:
        w: ``[m, d]``, where the clients start.
        work: their local problems.
        stream: name of the call.
        lr: step size.
    """

    def __init__(self, w: Tensor, work: Work, stream: Purpose, lr: float) -> None:
        self._layout, self._memory = work.layout, work.memory
        self._name = "" if work.memory is None else work.memory.call(stream)
        make = maker(work.local, lr)
        views = [[nn.Parameter(view) for view in self._layout.tree(row).values()] for row in w]
        self._own = {slot: make(own) for slot, own in zip(work.slots.tolist(), views, strict=True)}
        if self._memory is not None:
            memory, part = self._memory, self._memory.part(self._name)
            for slot, own in self._own.items():
                if part[slot, 0]:
                    restored = memory.unpack(part[slot], len(_parameters(own)))
                    own.state.update(zip(_parameters(own), restored, strict=True))

    def step_(self, w: Tensor, g: Tensor, slots: Tensor) -> None:
        """A step along ``g [m, d]`` of the clients at the places ``slots``; ``w [m, d]`` is changed."""
        for row, slope, slot in zip(w, g, slots.tolist(), strict=True):
            own = self._own[slot]
            views = zip(self._layout.tree(row).values(), self._layout.tree(slope).values(), strict=True)
            for p, (value, gradient) in zip(_parameters(own), views, strict=True):
                p.data, p.grad = value, gradient
            with torch.no_grad():
                own.step()

    def keep(self) -> None:
        """Keep the states, where states are kept."""
        memory = self._memory
        if memory is not None:
            for slot, own in self._own.items():
                if own.state:
                    memory.part(self._name)[slot] = memory.pack([own.state[p] for p in _parameters(own)])


def _parameters(own: torch.optim.Optimizer) -> list[nn.Parameter]:
    found: list[nn.Parameter] = own.param_groups[0]["params"]
    return found
