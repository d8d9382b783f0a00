"""Large linear layers of a network trained client by client, computed by compiled products without autograd.

They use float32 even if the step uses bfloat16, because most of the time is spent reading the weights, and converting
them would cost more than it saves.

The backward pass stores only the factors of the weight gradients. Their product is added to the row after the pass,
when the weights are no longer needed.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedloom.local.oracles.products import CompiledProducts, LinearLayerSlice
from fedloom.rows.layout import Layout

LARGE_LAYER_WEIGHTS = 1 << 15
"""Minimum number of weights of such a layer. For smaller layers, the call overhead exceeds the gain."""

MAX_LOOP_INPUTS = 256
"""Maximum number of input vectors in a step. With more, other libraries' products are faster than these loops."""


class LinearPass:
    """Forward and backward pass of a client through its large linear layers."""

    used = False

    def __init__(self) -> None:
        self._products: CompiledProducts | None = None
        self._deferred: list[tuple[LinearLayerSlice, Tensor, Tensor]] = []

    def begin(self, layout: Layout, out: Tensor, w: Tensor, alpha: float) -> None:
        """Start a pass that adds ``alpha`` times the gradient at ``w [1, d]`` to ``out [1, d]``."""
        able = self.used and CompiledProducts.fits(out)
        self._products = CompiledProducts(layout, out, w, 1.0, alpha, None) if able else None
        self._deferred.clear()

    def end(self) -> None:
        """Add the weight gradients whose factors the layers have stored."""
        while self._deferred:
            layer, delta, x = self._deferred.pop()
            self._products.add_gradient_(layer, delta[None], x[None])  # type: ignore[union-attr]
        self._products = None

    def takes(self, x: Tensor) -> bool:
        """Return True if this pass computes the products of a layer for the input ``x [..., i]``."""
        return self._products is not None and torch.is_grad_enabled() and x.numel() <= MAX_LOOP_INPUTS * x.shape[-1]

    def forward(self, layer: LinearLayerSlice, x: Tensor) -> Tensor:
        """Compute a layer's outputs ``[b, o]`` from its inputs ``[b, i]``."""
        return self._products.forward(layer, x[None])[0]  # type: ignore[union-attr]

    def backward(self, layer: LinearLayerSlice, delta: Tensor, x: Tensor, below: bool) -> Tensor | None:
        """Compute the gradient of the inputs ``[b, i]`` if it is needed.

        `end` adds the gradient of the parameters later.
        """
        self._deferred.append((layer, delta, x))
        return self._products.backward(layer, delta[None])[0] if below else None  # type: ignore[union-attr]


def replace_linear_layers(module: nn.Module, layout: Layout) -> LinearPass:
    """Replace the large linear layers of ``module`` by layers computed by a `LinearPass`, and return the pass.

    Nothing is replaced if the module contains code other than fedloom's or PyTorch's.

    Such code may compute its own gradients within a forward or backward pass.
    """
    shared = LinearPass()
    if all(type(m).__module__.partition(".")[0] in ("torch", "fedloom") for m in module.modules()):
        for name, layer in module.named_modules():
            parts = {f"{name}.{part}" for part, _ in layer.named_parameters(recurse=False)}
            if type(layer) is nn.Linear and layer.weight.numel() >= LARGE_LAYER_WEIGHTS and parts <= {*layout.names}:
                layer.__class__ = _PassLinear
                replaced = cast("_PassLinear", layer)
                replaced.linear, replaced.shared, shared.used = LinearLayerSlice.create(layout, name), shared, True
    return shared


class _PassLinear(nn.Linear):
    """Linear layer whose products a `LinearPass` computes."""

    linear: LinearLayerSlice
    shared: LinearPass

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._functorch.is_functorch_wrapped_tensor(x) or not self.shared.takes(x):
            return super().forward(x)
        flat = x.reshape(-1, x.shape[-1]).to(self.weight.dtype)
        h: Tensor = _LinearProducts.apply(flat, self.weight, self.bias, self.linear, self.shared)  # type: ignore[no-untyped-call]
        if torch.is_autocast_enabled("cpu"):
            h = h.to(torch.get_autocast_dtype("cpu"))
        return h.view(*x.shape[:-1], self.out_features)


class _LinearProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearLayerSlice, shared: LinearPass
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.shared = layer, shared
        return shared.forward(layer, x.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        below = ctx.shared.backward(ctx.layer, delta, ctx.saved_tensors[0].detach(), ctx.needs_input_grad[0])
        return below, None, None, None, None
