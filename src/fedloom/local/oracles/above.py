"""The part of a network above the bodies that `Fused` computes: client by client, by autograd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedloom.local.oracles.forward import caught
from fedloom.local.oracles.samples import Samples, slope
from fedloom.local.oracles.terms import Representations, summed
from fedloom.models import penultimate
from fedloom.models.parts import Bodied
from fedloom.rows.layout import Layout, trainable

if TYPE_CHECKING:
    from fedloom.local.terms import Bound, TermFunction
    from fedloom.tasks import Task


class Above:
    """The part of a network that takes the outputs of its bodies.

    Args:
        module: the network; its parameters are replaced at every use.
        layout: of a row.
        task: the loss.
        below: names of the parameters that are not its.
    """

    def __init__(self, module: Bodied, layout: Layout, task: Task, below: set[str]) -> None:
        self._module, self._layout, self._task = module, layout, task
        self.parameters = {name: p for name, p in trainable(module).items() if name not in below}

    @cached_property
    def represents(self) -> bool:
        """Whether the representation is in it, and not the output of a body."""
        return penultimate(self._module) not in self._module.bodies()

    @torch.no_grad()
    def features(self, w: Tensor, ends: list[Tensor], data: Samples) -> list[Tensor]:
        """Each client's representation ``[b, k]`` in evaluation mode; ``ends [m, b, .]`` are outputs of the bodies."""
        rows, representations = self._layout.tree(w), []
        self._module.eval()
        for i, count in enumerate(data.counts):
            self._hold(rows, i)
            with caught(self._layer) as features:
                self._module.above(*(end[i, :count] for end in ends))
            representations.append(features[-1].flatten(1))
        return representations

    def slopes(
        self,
        w: Tensor,
        ends: list[Tensor],
        data: Samples,
        total: Tensor,
        functions: Sequence[TermFunction],
        terms: Sequence[Bound],
        anchors: Sequence[Sequence[Sequence[Tensor]]],
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Gradients of those of its parameters that have one ``[m, ...]``, and of ``ends``.

        Args:
            w: ``[m, d]``.
            ends: outputs of the bodies ``[m, b, .]``.
            data: the samples.
            total: ``[m, 1]`` divisor of the sum of terms.
            functions: of the terms.
            terms: what they have of every client.
            anchors: of every term and anchor the `features`.
        """
        rows, gradients = self._layout.tree(w), dict[str, Tensor]()
        deltas = [torch.zeros_like(end) for end in ends]
        self._module.train()
        for i, count in enumerate(data.counts):
            if not count:
                continue
            self._hold(rows, i)
            leaves = [end[i, :count].detach().requires_grad_() for end in ends]
            with torch.enable_grad(), caught(self._layer if terms else None) as features:
                outputs = self._module.above(*leaves)
                roots, above = [outputs], [slope(self._task, outputs, data, i)]
                if terms:
                    now = Representations(features[-1].flatten(1), outputs)
                    beside = [[anchor[i] for anchor in of_term] for of_term in anchors]
                    added = summed(functions, terms, i, now, data.y[i, :count], beside)
                    if added.requires_grad:
                        roots, above = [outputs, added], [*above, total[i, 0].to(added).reciprocal()]
            grads = torch.autograd.grad(roots, [*self.parameters.values(), *leaves], above, allow_unused=True)
            for name, g in zip(self.parameters, grads, strict=False):
                if g is not None:
                    gradients.setdefault(name, torch.zeros_like(rows[name]))[i] = g
            for delta, g in zip(deltas, grads[len(self.parameters) :], strict=True):
                if g is not None:
                    delta[i, :count] = g
        return gradients, deltas

    @cached_property
    def _layer(self) -> nn.Module:
        return self._module.get_submodule(penultimate(self._module))

    def _hold(self, rows: dict[str, Tensor], i: int) -> None:
        for name, p in self.parameters.items():
            p.data = rows[name][i]
