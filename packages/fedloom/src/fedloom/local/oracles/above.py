"""Part of a network above the bodies computed by `Fused`. Autograd computes this part for all clients at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedloom.local.oracles.forward import record_layer_calls, set_training
from fedloom.local.oracles.samples import Samples, output_gradients
from fedloom.local.oracles.terms import ParameterHolder, Representations, sum_terms
from fedloom.models import penultimate_layer
from fedloom.models.parts import MultiBodyNetwork
from fedloom.rows.layout import Layout, trainable

if TYPE_CHECKING:
    from fedloom.local.terms import Bound, TermFunction
    from fedloom.tasks import Task


class HeadNetwork:
    """Part of a network (the head) whose inputs are the outputs of the bodies.

    Args:
        module: the whole network.
        layout: layout of a client's row.
        task: task that defines the loss.
        below: names of the bodies' parameters.
    """

    def __init__(self, module: MultiBodyNetwork, layout: Layout, task: Task, below: set[str]) -> None:
        self._module, self._layout, self._task = module, layout, task
        self.parameters = {name: p for name, p in trainable(module).items() if name not in below}
        self._holder = ParameterHolder(module, [*self.parameters])

    @cached_property
    def computes_representation(self) -> bool:
        """True if this part of the network computes the representation, not a body."""
        return penultimate_layer(self._module) not in self._module.bodies()

    @torch.no_grad()
    def features(self, w: Tensor, ends: list[Tensor]) -> Tensor:
        """Return the representations ``[m, b, k]`` of samples in evaluation mode.

        ``ends [m, b, .]`` are the outputs of the bodies.
        """
        set_training(self._module, False)
        rows = self._layout.tree(w)
        _, representations = vmap(self._call)({name: rows[name] for name in self.parameters}, *ends)
        return representations

    def slopes(
        self, w: Tensor, ends: list[Tensor], data: Samples, total: Tensor, functions: Sequence[TermFunction],
        terms: Sequence[Bound], anchors: Sequence[Sequence[Tensor]],
    ) -> tuple[dict[str, Tensor], list[Tensor]]:  # fmt: skip
        """Return the gradients ``[m, ...]`` of this part's parameters (if they have one) and of ``ends``.

        Args:
            w: models ``[m, d]``.
            ends: outputs of the bodies ``[m, b, .]``.
            data: the batch's samples.
            total: divisor of the sum of the terms ``[m, 1]``.
            functions: the terms' functions.
            terms: weights and arguments of each term.
            anchors: features of the samples for each term and anchor.
        """
        rows = self._layout.tree(w)
        parameters = {name: rows[name].detach().requires_grad_() for name in self.parameters}
        leaves = [end.detach().requires_grad_() for end in ends]
        set_training(self._module, True)
        with torch.enable_grad():
            outputs, features = vmap(self._call)(parameters, *leaves)
            roots, above = [outputs], [output_gradients(self._task, outputs, data)]
            if terms:
                added = outputs.new_zeros(())
                for i, (count, z, of_samples) in enumerate(zip(data.counts, features, outputs, strict=True)):
                    if count:
                        now = Representations(z[:count], of_samples[:count])
                        beside = [[anchor[i, :count] for anchor in of_term] for of_term in anchors]
                        of_client = sum_terms(functions, terms, i, now, data.y[i, :count], beside)
                        added = added + of_client / total[i, 0].to(added)
                if added.requires_grad:
                    roots, above = [outputs, added], [*above, torch.ones_like(added)]
        grads: tuple[Tensor | None, ...] = torch.autograd.grad(
            roots, [*parameters.values(), *leaves], above, allow_unused=True
        )
        gradients = {name: g for name, g in zip(parameters, grads, strict=False) if g is not None}
        deltas = [
            torch.zeros_like(end) if g is None else g for end, g in zip(ends, grads[len(parameters) :], strict=True)
        ]
        return gradients, deltas

    def _call(self, parameters: dict[str, Tensor], *ends: Tensor) -> tuple[Tensor, Tensor]:
        """Return a client's outputs ``[b, c]`` and, if this part computes it, the representation ``[b, k]``."""
        with (
            self._holder.hold([*parameters.values()]),
            record_layer_calls(self._layer if self.computes_representation else None) as features,
        ):
            outputs = self._module.above(*ends)
        return outputs, features[-1].flatten(1) if self.computes_representation else outputs

    @cached_property
    def _layer(self) -> nn.Module:
        return self._module.get_submodule(penultimate_layer(self._module))
