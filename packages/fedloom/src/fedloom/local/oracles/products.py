"""Products of a linear layer for many clients at once: outputs, and gradients of inputs and weights.

`CompiledProducts` computes them on a CPU (see `fedloom.kernels`), and `BatchedProducts` on accelerators, for other
dtypes, and for rows that are not contiguous.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.local.oracles.network import scale_
from fedloom.rows.layout import Layout


class LinearLayerSlice(NamedTuple):
    """Linear layer: names of its weight and bias (or None), their first columns in a row (or -1), and its widths."""

    weight: str
    bias: str | None
    weight_at: int
    bias_at: int
    inputs: int
    outputs: int

    @classmethod
    def create(cls, layout: Layout, name: str) -> LinearLayerSlice:
        """Return the linear layer that has this name."""
        weight, bias = f"{name}.weight", f"{name}.bias"
        at = dict(zip(layout.names, layout.offsets, strict=True))
        outputs, inputs = layout.shapes[layout.names.index(weight)]
        return cls(weight, bias if bias in at else None, at[weight], at.get(bias, -1), inputs, outputs)


class StoredSamples(NamedTuple):
    """Samples of a data set: stored values ``[N, i]``, their normalization ``[i]``, and their classes ``[N]``.

    The tuple also contains the sample indices of a plan ``[k, m, b]`` or a batch ``[m, b]``, and class weights per
    client ``[m, C]`` (or ``[m, 0]``).
    """

    data: Tensor
    scale: Tensor
    shift: Tensor
    y: Tensor
    where: Tensor
    classes: Tensor


class Products(ABC):
    """Products of linear layers during one pass through a network.

    Args:
        layout: names and shapes of the model's parameters.
        out: rows ``[m, d]`` that `add_gradient_` changes. It may be the same tensor as ``w``.
        w: parameters ``[m, d]``.
        beta: factor of ``out``, a scalar or ``[m, 1]``. If it is 0, the old values are ignored even if they are not
            finite.
        alpha: factor of the gradient.
        steady: vector ``[m, d]`` that is added, or None.
    """

    @abstractmethod
    def __init__(
        self, layout: Layout, out: Tensor, w: Tensor, beta: float | Tensor, alpha: float, steady: Tensor | None
    ) -> None: ...

    @abstractmethod
    def forward(self, layer: LinearLayerSlice, x: Tensor) -> Tensor:
        """Compute a layer's outputs ``[m, b, o]`` from its inputs ``[m, b, i]``."""

    @abstractmethod
    def backward(self, layer: LinearLayerSlice, delta: Tensor) -> Tensor:
        """Compute the gradient of the inputs ``[m, b, i]``. ``delta [m, b, o]`` is the gradient of the outputs."""

    @abstractmethod
    def add_gradient_(self, layer: LinearLayerSlice, delta: Tensor, x: Tensor) -> None:
        """Compute ``out <- beta out + alpha gradient + steady`` in the columns of a layer."""


class BatchedProducts(Products):
    """Products that PyTorch computes as batched matrix products, adding the gradient of the weights in place."""

    def __init__(
        self, layout: Layout, out: Tensor, w: Tensor, beta: float | Tensor, alpha: float, steady: Tensor | None
    ) -> None:
        self._parameters = layout.tree(w)
        self._targets = self._parameters if out is w else layout.tree(out)
        self._steady = {} if steady is None else layout.tree(steady)
        self._beta, self._alpha = beta, alpha

    def forward(self, layer: LinearLayerSlice, x: Tensor) -> Tensor:
        h = torch.bmm(x, self._parameters[layer.weight].mT)
        return h if layer.bias is None else h.add_(self._parameters[layer.bias].unsqueeze(1))

    def backward(self, layer: LinearLayerSlice, delta: Tensor) -> Tensor:
        return torch.bmm(delta, self._parameters[layer.weight])

    def add_gradient_(self, layer: LinearLayerSlice, delta: Tensor, x: Tensor) -> None:
        target, beta = self._targets[layer.weight], self._beta
        if isinstance(beta, Tensor):
            scale_(target, beta)
            beta = 1.0
        target.baddbmm_(delta.mT, x, beta=beta, alpha=self._alpha)
        if layer.bias is not None:
            scale_(self._targets[layer.bias], self._beta).add_(delta.sum(1), alpha=self._alpha)
        for name in (layer.weight, layer.bias) if self._steady else ():
            if name is not None:
                self._targets[name].add_(self._steady[name])


class CompiledProducts(Products):
    """Products computed by loops compiled for the CPU."""

    def __init__(
        self, layout: Layout, out: Tensor, w: Tensor, beta: float | Tensor, alpha: float, steady: Tensor | None
    ) -> None:
        from fedloom import kernels

        self._loops = kernels
        self._out = out.numpy()
        self._w = self._out if out is w else w.contiguous().numpy()
        self._alpha = self._w.dtype.type(alpha)
        self._beta = self._as_client_array(beta)
        added = w[:0] if steady is None else steady[:1] if steady.stride(0) == 0 else steady
        self._steady = added.contiguous().numpy()

    @staticmethod
    def fits(out: Tensor) -> bool:
        """Return True if the compiled loops can change these rows."""
        return out.device.type == "cpu" and out.dtype in (torch.float32, torch.float64) and out.is_contiguous()

    def forward(self, layer: LinearLayerSlice, x: Tensor) -> Tensor:
        h = x.new_empty(*x.shape[:2], layer.outputs)
        self._loops.forward(self._w, layer.weight_at, layer.bias_at, x.contiguous().numpy(), h.numpy())
        return h

    def backward(self, layer: LinearLayerSlice, delta: Tensor) -> Tensor:
        below = delta.new_empty(*delta.shape[:2], layer.inputs)
        self._loops.backward(self._w, layer.weight_at, delta.contiguous().numpy(), below.numpy())
        return below

    def add_gradient_(self, layer: LinearLayerSlice, delta: Tensor, x: Tensor) -> None:
        self._loops.add_gradient(
            self._out, layer.weight_at, layer.bias_at, delta.contiguous().numpy(), x.contiguous().numpy(),
            self._beta, self._alpha, self._steady,
        )  # fmt: skip

    def _as_client_array(self, value: float | Tensor) -> np.ndarray:
        """Return a scalar, or one number per client, as an array ``[m]``."""
        column = np.empty(len(self._w), self._w.dtype)
        column[:] = value.reshape(-1).numpy() if isinstance(value, Tensor) else value
        return column

    def descend_(
        self,
        layers: list[list[int]],
        samples: StoredSamples,
        steps: Tensor,
        count: Tensor,
        scale: Tensor | None,
        momentum: tuple[float | Tensor, float] | None,
    ) -> None:
        """Take ``steps [m]`` SGD steps for each client, with ``count [k, m, 1]`` samples in each step.

        The compiled loop is `fedloom.kernels.descend`.
        """
        pulled, rate = momentum or (0.0, 0.0)
        d = self._w.shape[1]
        rooms = (samples.classes.new_empty(size).numpy() for size in (d, d if momentum else 0))
        self._loops.descend(
            self._out, *_arguments(layers, samples), steps.numpy(), count[..., 0].contiguous().numpy(),
            self._as_client_array(1.0 if scale is None else scale), samples.classes.numpy(), self._beta, self._alpha,
            self._steady, self._as_client_array(pulled), self._w.dtype.type(rate), *rooms,
            _workspace(layers, samples, samples.where.shape[2]),
        )  # fmt: skip

    def add_gradients_(self, layers: list[list[int]], samples: StoredSamples, count: Tensor, total: Tensor) -> None:
        """Compute ``out <- beta out + alpha gradient + steady`` for a batch in one pass.

        The loop is `fedloom.kernels.add_gradients`.

        Args:
            layers: linear layers in the form that `fedloom.kernels.descend` expects.
            samples: samples of the batch.
            count: each client's number of samples ``[m, 1]``.
            total: divisor of the sum of sample losses ``[m, 1]``.
        """
        block = samples.where.shape[1]
        if self._out is not self._w:
            block = min(block, self._loops.BLOCK_SAMPLES)
        self._loops.add_gradients(
            self._out, self._w, *_arguments(layers, samples), count[:, 0].contiguous().numpy(),
            self._as_client_array(total),
            samples.classes.numpy(), self._beta, self._alpha, self._steady, _workspace(layers, samples, block), block,
        )  # fmt: skip


def _arguments(layers: list[list[int]], samples: StoredSamples) -> tuple[np.ndarray, ...]:
    """Return the compiled loops' arguments that describe a network and its samples."""
    stored = (samples.data, samples.scale, samples.shift, samples.y, samples.where.contiguous())
    return np.array(layers), *(values.numpy() for values in stored)


def _workspace(layers: list[list[int]], samples: StoredSamples, block: int) -> np.ndarray:
    """Allocate workspace for the activations between the layers."""
    widths = [layers[0][2], *(layer[3] for layer in layers)]
    room: np.ndarray = samples.classes.new_empty(block * (sum(widths) + 2 * max(widths[1:]))).numpy()
    return room


def apply(w: np.ndarray, layer: LinearLayerSlice, x: Tensor, ends: np.ndarray) -> Tensor:
    """Return a layer's outputs ``[N, o]`` under the models ``w [m, d]`` for inputs ``[N, i]`` ordered by client.

    The rows of client c end before row ``ends[c]``.
    """
    from fedloom import kernels

    h = x.new_empty(len(x), layer.outputs)
    kernels.apply(w, layer.weight_at, layer.bias_at, x.contiguous().numpy(), ends, h.numpy())
    return h
