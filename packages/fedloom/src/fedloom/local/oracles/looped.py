"""Looped oracle, which runs the module itself, one client at a time.

It is used for convolutions on a CPU and for debugging.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from fedloom.local.oracles.forward import record_layer_calls, repeat_single
from fedloom.local.oracles.linear import LinearPass, replace_linear_layers
from fedloom.local.oracles.network import scale_
from fedloom.local.oracles.pooling import join_relu_and_pooling
from fedloom.local.oracles.precision import find_product_parameters
from fedloom.local.oracles.probes import draws_globally, find_changed_values
from fedloom.local.oracles.samples import output_gradient
from fedloom.local.oracles.terms import Representations, TermNetwork, sum_terms
from fedloom.models.imported import ABSENT_VALUE, put_value, read_values
from fedloom.seeds import as_global

if TYPE_CHECKING:
    from fedloom.data.federation import Federation
    from fedloom.local.batches import Batch
    from fedloom.local.terms import Bound, TermFunction
    from fedloom.models import Augment
    from fedloom.tasks import Task


class Looped(TermNetwork):
    """Oracle that computes gradients one client at a time (see `Network` for the arguments).

    Batch normalization uses the statistics of the batch. Other buffers and attributes that training changes are reset
    to their initial values before every step, so that clients do not affect each other. If a module draws from the
    global random generator, this generator is seeded with (seed, round, client, stream, step) during the step.
    """

    name: ClassVar[str] = "loop"
    _initial: Sequence[tuple[nn.Module, str, object]] = ()

    def __init__(self, module: nn.Module, task: Task, fed: Federation, augment: Augment | None = None) -> None:
        super().__init__(module, task, fed, augment)
        self.draws = draws_globally(module, fed)
        self.moved = find_changed_values(module, fed)
        initial, places = read_values(module), [(name, *name.rpartition(".")) for name in self.moved]
        self._initial = [
            (self.module.get_submodule(owner), name, initial.get(whole, ABSENT_VALUE))
            for whole, owner, _, name in places
        ]
        self._restore()
        if self.memory_format is torch.channels_last:
            join_relu_and_pooling(self.module)
        self.linear = replace_linear_layers(self.module, self.layout) if self.device.type == "cpu" else LinearPass()
        self.narrow = find_product_parameters(self.module, self.parameters)

    def addgrad_(
        self, out: Tensor, w: Tensor, batch: Batch, beta: float | Tensor, alpha: float, steady: Tensor | None = None,
        functions: Sequence[TermFunction] = (), terms: Sequence[Bound] = (),
    ) -> None:  # fmt: skip
        """Run a forward and backward pass client by client.

        Terms are computed in the same pass, unless the step uses a lower precision or a `LinearPass` computes layers.
        """
        if terms and (self.uses_low_precision(batch) or self.linear.used):
            self.addgrad_(out, w, batch, beta, alpha, steady)
            return self.add_terms_(out, w, batch, functions, terms, alpha)
        if terms:
            self._check_terms()
        data = self.samples(batch, step=True)
        self.module.train()
        for normaliser in self.normalisers:
            normaliser.momentum = 0.0
        for i, count in enumerate(data.counts):
            factor = beta[i : i + 1] if isinstance(beta, Tensor) else beta
            if not count:
                scale_(out[i : i + 1], factor)
                continue
            x = self.set_memory_format(data.x[i, :count])
            anchors = [[self._compute_features(a[i], data.x[i, :count]) for a in term.anchors] for term in terms]
            if terms:
                self.module.train()
            for name, layer in self.dropouts.items():
                layer.mask = self._mask(name, batch, i, count)
            views = self.views(w[i])
            self.linear.begin(self.layout, out[i : i + 1], w[i : i + 1], alpha)
            self._install_views(self._lower_parameters(views) if self.uses_low_precision(batch) else views)
            with (
                torch.enable_grad(),
                self.lower_precision(batch),
                record_layer_calls(
                    self._layer if terms else None, entering=bool(terms) and self.spot.entering
                ) as features,
            ):
                outputs = self._forward(x, batch, i).flatten(0, -2)
            ends, above = [outputs], [output_gradient(self.task, outputs.to(self.dtype), data, i).to(outputs.dtype)]
            if terms:
                with torch.enable_grad():
                    now = Representations(features[-1].flatten(1), outputs)
                    total = sum_terms(functions, terms, i, now, data.y[i, :count], anchors)
                if total.requires_grad:
                    ends, above = [outputs, total], [*above, batch.total[i, 0].to(total).reciprocal()]
            grads: tuple[Tensor | None, ...] = torch.autograd.grad(ends, self.parameters, above, allow_unused=True)
            self._restore()
            scale_(out[i : i + 1], factor)
            targets = views if out is w else self.views(out[i])
            added = [(to, g) for to, g in zip(targets, grads, strict=True) if g is not None]
            if added:
                torch._foreach_add_(*map(list, zip(*added, strict=True)), alpha=alpha)
            self.linear.end()
        if steady is not None:
            out.add_(steady)

    def run(self, row: Tensor, x: Tensor) -> Tensor:
        outputs = super().run(row, x)
        self._restore()
        return outputs

    def _restore(self) -> None:
        """Restore the initial values of all buffers and attributes changed by a forward pass."""
        for owner, name, value in self._initial:
            put_value(owner, name, value)

    @cached_property
    def _layer(self) -> nn.Module:
        """Layer that provides the representation (see `spot`)."""
        return self.module.get_submodule(self.spot.name)

    def _compute_features(self, row: Tensor, x: Tensor) -> Tensor:
        """Return the representation ``[b, k]`` of samples under the model ``row [d]`` in evaluation mode."""
        with record_layer_calls(self._layer, entering=self.spot.entering) as features:
            self.run(row, x)
        return features[-1].flatten(1)

    def _lower_parameters(self, views: list[Tensor]) -> list[Tensor]:
        """Return the parameters, with those of bfloat16 products converted once instead of in every pass."""
        return [view.to(torch.bfloat16) if narrow else view for view, narrow in zip(views, self.narrow, strict=True)]

    def _forward(self, x: Tensor, batch: Batch, i: int) -> Tensor:
        if self.normalisers and len(x) == 1:
            return self._call(repeat_single(x), batch, i)[:1]
        return self._call(x, batch, i)

    def _call(self, x: Tensor, batch: Batch, i: int) -> Tensor:
        if not self.draws:
            return self.module(x)  # type: ignore[no-any-return]
        with as_global(batch.draw.generator(i, "module"), self.device):
            return self.module(x)  # type: ignore[no-any-return]
