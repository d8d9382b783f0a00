"""Fused oracle, which computes all clients' linear layers and pointwise activations at once and stores no gradients.

The product that yields a layer's gradient is added directly to ``out``, which in an SGD step holds the parameters
themselves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.errors import Refused
from fedloom.local.batches import PASS_STREAM
from fedloom.local.oracles.above import HeadNetwork
from fedloom.local.oracles.network import scale_
from fedloom.local.oracles.pooling import has_hook
from fedloom.local.oracles.products import (
    BatchedProducts,
    CompiledProducts,
    LinearLayerSlice,
    Products,
    StoredSamples,
    apply,
)
from fedloom.local.oracles.samples import Samples, batch_loss, output_gradients
from fedloom.local.oracles.terms import TermNetwork
from fedloom.models.dropout import Dropout
from fedloom.models.parts import MultiBodyNetwork

if TYPE_CHECKING:
    from fedloom.data.federation import Federation
    from fedloom.local.batches import Batch, BatchPlan
    from fedloom.local.oracles.base import Descend, Steps
    from fedloom.local.terms import Bound, TermFunction
    from fedloom.models import Augment
    from fedloom.tasks import Task

aten = torch.ops.aten

Backward = Callable[[Any, Tensor, Tensor, Tensor], Tensor]

ACTIVATION_DERIVATIVES: dict[type[nn.Module], Backward] = {
    nn.ReLU: lambda _, delta, _z, h: aten.threshold_backward(delta, h, 0),
    nn.Tanh: lambda _, delta, _z, h: aten.tanh_backward(delta, h),
    nn.Sigmoid: lambda _, delta, _z, h: aten.sigmoid_backward(delta, h),
    nn.GELU: lambda layer, delta, z, _h: aten.gelu_backward(delta, z, approximate=layer.approximate),
    nn.SiLU: lambda _, delta, z, _h: aten.silu_backward(delta, z),
    nn.ELU: lambda layer, delta, z, _h: aten.elu_backward(delta, layer.alpha, 1.0, 1.0, False, z),
}
"""Backward functions of activations. They compute the gradient of the input from (layer, gradient of the output, input
z, output h)."""


def find_chain(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Return the (name, layer) steps of a network that Fused supports, or None if it contains any other layer."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return None
    chain = [(name, layer) for name, layer in module._modules.items() if type(layer) is not nn.Identity]
    linear = [name for name, layer in chain if type(layer) is nn.Linear]
    names_of_module = {name for name, _ in module.named_parameters()}
    names_of_chain = {f"{name}.{part}" for name in linear for part, p in module._modules[name].named_parameters()}
    if not all(p.requires_grad for p in module.parameters()):
        return None
    if not linear or len({id(layer) for _, layer in chain}) < len(chain) or names_of_chain != names_of_module:
        return None
    if any(map(has_hook, module.modules())):
        return None
    seen_linear = False
    for _, layer in chain:
        seen_linear = seen_linear or type(layer) is nn.Linear
        if type(layer) is nn.Flatten:
            if seen_linear or layer.start_dim != 1 or layer.end_dim != -1:
                return None
        elif type(layer) not in (nn.Linear, Dropout) and (type(layer) not in ACTIVATION_DERIVATIVES or not seen_linear):
            return None
    return chain


class LayerChain(NamedTuple):
    """Steps (name, layer) of a network, and the index of its first linear layer."""

    steps: list[tuple[str, nn.Module]]
    first_linear: int


def find_chains(module: nn.Module) -> list[LayerChain] | None:
    """Return the chain of a network or the chains of its bodies, or None if Fused does not support one of them."""
    bodies, chains = {"": module}, list[LayerChain]()
    if isinstance(module, MultiBodyNetwork):
        if type(module).forward is not MultiBodyNetwork.forward or any(map(has_hook, module.modules())):
            return None
        if len({*module.parameters()}) < sum(1 for _ in module.named_parameters(remove_duplicate=False)):
            return None
        if not all(p.requires_grad for p in module.parameters()):
            return None
        bodies = module.bodies()
    for prefix, body in bodies.items():
        steps = find_chain(body)
        if steps is None:
            return None
        steps = [(f"{prefix}.{name}" if prefix else name, layer) for name, layer in steps]
        chains.append(LayerChain(steps, next(k for k, (_, layer) in enumerate(steps) if isinstance(layer, nn.Linear))))
    return chains


class Fused(TermNetwork):
    """Oracle that computes stacked networks of linear layers with batched products (see `Network` for the arguments).

    Autograd computes the part of a network above its bodies, if any (`fedloom.models.parts.MultiBodyNetwork`).

    Raises:
        ConfigError: the network contains layers other than linear layers and pointwise activations.
    """

    name: ClassVar[str] = "compiled"

    def __init__(self, module: nn.Module, task: Task, fed: Federation, augment: Augment | None = None) -> None:
        super().__init__(module, task, fed, augment)
        chains = find_chains(self.module)
        if chains is None or fed.data.each:
            raise Refused(
                "gradient engine 'compiled' requires a sequence of linear layers and pointwise activations",
                rule="oracle-fused",
                fix="set {engine.gradient_engine = 'auto'}",
            )
        self.chains, steps = chains, [step for chain in chains for step in chain.steps]
        for _, layer in steps:
            if isinstance(layer, nn.ReLU | nn.ELU | nn.SiLU):
                layer.inplace = False
        if not isinstance(self.module, MultiBodyNetwork):  # such layers draw no random numbers and change no parameters
            self.hides_randomness, self.draws_evaluated, self.mixes_samples, self.overwritten = False, False, False, ()
            self.returns_probabilities = False
        self.linear = {
            name: LinearLayerSlice.create(self.layout, name) for name, layer in steps if isinstance(layer, nn.Linear)
        }
        below = {f"{name}.{part}" for name in self.linear for part in ("weight", "bias")}
        self.above = (
            HeadNetwork(self.module, self.layout, task, below) if isinstance(self.module, MultiBodyNetwork) else None
        )

    def addgrad_(
        self, out: Tensor, w: Tensor, batch: Batch, beta: float | Tensor, alpha: float, steady: Tensor | None = None,
        functions: Sequence[TermFunction] = (), terms: Sequence[Bound] = (),
    ) -> None:  # fmt: skip
        """Run one forward and one backward pass. The product for the weights is added directly to ``out``.

        Terms are computed in the same pass if the representation is above the bodies.
        """
        if terms and (self.above is None or not self.above.computes_representation):
            self.addgrad_(out, w, batch, beta, alpha, steady)
            return self.add_terms_(out, w, batch, functions, terms, alpha)
        if terms:
            self._check_terms()
        elif self._fits(out, random=batch.draw.stream != PASS_STREAM):
            whole = CompiledProducts(self.layout, out, w, beta, alpha, steady)
            return whole.add_gradients_(self._layers, self._pack_samples(out, batch), batch.count, batch.total)
        data = self.samples(batch, step=True)
        masks = self._masks(batch, data.counts) if self.dropouts else {}
        kind = CompiledProducts if CompiledProducts.fits(out) else BatchedProducts
        products = kind(self.layout, out, w, beta, alpha, steady)
        values = [self._forward(chain, products, masks, data.x) for chain in self.chains]
        if self.above is None:
            deltas = [output_gradients(self.task, values[0][-1], data)]
        else:
            ends = [inputs[-1] for inputs in values]
            anchors = [
                [self._compute_representations(kind, a.contiguous(), data) for a in term.anchors] for term in terms
            ]
            gradients, deltas = self.above.slopes(w, ends, data, batch.total, functions, terms, anchors)
            targets, constant = self.layout.tree(out), {} if steady is None else self.layout.tree(steady)
            for name in self.above.parameters:
                scale_(targets[name], beta)
                if name in gradients:
                    targets[name].add_(gradients[name], alpha=alpha)
                if name in constant:
                    targets[name].add_(constant[name])
        for chain, inputs, delta in zip(self.chains, values, deltas, strict=True):
            self._backward(chain, products, masks, inputs, delta)

    def _compute_representations(self, kind: type[Products], w: Tensor, data: Samples) -> Tensor:
        """Return the representations ``[m, b, k]`` of the models ``w [m, d]``, computed above the bodies."""
        assert self.above is not None
        products = kind(self.layout, w, w, 1.0, 1.0, None)
        return self.above.features(w, [self._forward(chain, products, {}, data.x)[-1] for chain in self.chains])

    def _backward(
        self, chain: LayerChain, products: Products, masks: dict[str, Tensor], values: list[Tensor], delta: Tensor
    ) -> None:
        """Add the gradients of the layers in a chain to ``out``.

        ``delta [m, b, k]`` is the gradient of the chain's outputs.
        """
        for k in range(len(chain.steps) - 1, chain.first_linear - 1, -1):
            name, layer = chain.steps[k]
            if name in self.linear:
                linear = self.linear[name]
                below = products.backward(linear, delta) if k > chain.first_linear else delta
                products.add_gradient_(linear, delta, values[k])
                delta = below
            elif isinstance(layer, Dropout):
                delta = delta * masks[name].flatten(2) if name in masks else delta
            else:
                delta = ACTIVATION_DERIVATIVES[type(layer)](layer, delta, values[k], values[k + 1])

    def loop_for(self, w: Tensor) -> Descend | None:
        """Return the compiled loop for networks with ReLU, cross-entropy and no randomized inputs, or None."""
        return self._descend if self._fits(w, random=True) else None

    def _fits(self, rows: Tensor, random: bool) -> bool:
        """Return True if the compiled loop for whole networks can compute gradients for rows ``[m, d]``.

        Args:
            rows: rows that the loop would change.
            random: True if samples are randomly changed before use.
        """
        if not self._simple or not CompiledProducts.fits(rows):
            return False
        changes = (self.augment, self.fed.noise, self.fed.data.rereading)
        if random and any(change is not None for change in changes):
            return False
        data = self.fed.stored()[0]
        wide = data.shape[1] == self._layers[0][2]
        return wide and data.dtype in (torch.uint8, rows.dtype) and data.is_contiguous()

    @cached_property
    def _simple(self) -> bool:
        """True if the compiled loop for whole networks supports this network and this loss."""
        if self.above is not None or self.dropouts:
            return False
        supported = all(type(layer) in (nn.Flatten, nn.Linear, nn.ReLU, Dropout) for _, layer in self.chains[0].steps)
        classes = self.fed.data.task == "classification" and self.labels_each is None and self.task.own_loss is None
        return supported and classes

    @cached_property
    def _layers(self) -> list[list[int]]:
        """Linear layers in the form that `fedloom.kernels.descend` expects."""
        layers: list[list[int]] = []
        for name, layer in self.chains[0].steps:
            if name in self.linear:
                layers.append([*self.linear[name][2:], 0])
            elif isinstance(layer, nn.ReLU):
                layers[-1][-1] = 1
        return layers

    def _pack_samples(self, rows: Tensor, of: BatchPlan | Batch) -> StoredSamples:
        """Return the samples of a plan or batch for the compiled loop."""
        classes = rows.new_empty(len(rows), 0) if self.class_weights is None else self.class_weights[of.ids]
        data, scale, shift = self.fed.stored()
        return StoredSamples(data, scale, shift, self.fed.data.y, of.where, classes)

    def _descend(self, w: Tensor, plan: BatchPlan, steps: Tensor, step: Steps) -> None:
        samples = self._pack_samples(w, plan)
        CompiledProducts(self.layout, w, w, *step[:3]).descend_(self._layers, samples, steps, plan.count, *step[3:])

    @torch.no_grad()
    def outputs_of(self, rows: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
        """Compute outputs with compiled loops on a CPU, in one call for many models (see `Network.outputs_of`)."""
        if self.above is not None or not CompiledProducts.fits(rows):
            return super().outputs_of(rows, index, sizes)
        ends, blocks, start = [0, *sizes.cumsum(0).tolist()], [], 0
        while start < len(rows):
            stop = max(start + 1, bisect_right(ends, ends[start] + self._together) - 1)
            piece = index[ends[start] : ends[stop]]
            if len(piece) > self._together:
                blocks.append(torch.cat([*self.outputs(rows[start], piece)]))
            else:
                blocks.append(self._apply(rows[start:stop], self.fed.fetch(piece), sizes[start:stop]))
            start = stop
        return torch.cat(blocks) if blocks else rows.new_empty(0, self.task.outputs)

    def batch_loss(self, w: Tensor, batch: Batch) -> Tensor:
        """Compute the loss with compiled loops on a CPU, as in `outputs_of` (see `Network.batch_loss`)."""
        w = w.contiguous()
        if self.above is not None or self.labels_each is not None or not CompiledProducts.fits(w):
            return super().batch_loss(w, batch)
        data, loss = self.samples(batch), torch.zeros(len(w), 1, dtype=self.dtype)
        outputs = self._apply(w, self.fed.fetch(batch.where[batch.position >= 0]), batch.count[:, 0])
        for i, rows in enumerate(outputs.split(data.counts)):
            if len(rows):
                loss[i] = batch_loss(self.task, rows, data, i)
        return loss

    def _apply(self, rows: Tensor, x: Tensor, sizes: Tensor) -> Tensor:
        """Return outputs ``[N, k]`` in evaluation mode for samples ``x [N, *shape]``, which are ordered by client."""
        ends = sizes.cumsum(0).numpy()
        for name, layer in self.chains[0].steps:
            if name in self.linear:
                x = apply(rows.numpy(), self.linear[name], x.flatten(1), ends)
            elif isinstance(layer, nn.ReLU):
                x = layer(x)
            elif not isinstance(layer, Dropout | nn.Flatten):  # vectorized code rounds the last values differently
                x = torch.cat([layer(samples) for samples in x.split(sizes.tolist())])
        return x

    def _forward(self, chain: LayerChain, products: Products, masks: dict[str, Tensor], x: Tensor) -> list[Tensor]:
        """Return the input of each step of a chain and the output of the last step, each ``[m, b, .]``."""
        values = [x.flatten(2)]
        for name, layer in chain.steps:
            h = values[-1]
            if name in self.linear:
                h = products.forward(self.linear[name], h)
            elif isinstance(layer, Dropout):
                h = h * masks[name].flatten(2) if name in masks else h
            elif not isinstance(layer, nn.Flatten):
                h = layer(h)
            values.append(h)
        return values
