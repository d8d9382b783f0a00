"""Gradients of terms on a representation, and mean representations per class, for all network oracles."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from fedloom.errors import Refused
from fedloom.local.oracles.base import Features
from fedloom.local.oracles.forward import RepresentationSpot, set_training
from fedloom.local.oracles.network import Network
from fedloom.local.oracles.pooling import has_hook
from fedloom.local.rows import map_rows
from fedloom.rows.layout import trainable

if TYPE_CHECKING:
    from fedloom.local.batches import Batch
    from fedloom.local.terms import Bound, TermFunction


class Representations(NamedTuple):
    """Features ``[b, k]`` and outputs ``[b, c]`` of samples."""

    features: Tensor
    outputs: Tensor


class ParameterHolder:
    """Network whose parameters can be temporarily replaced, faster than with `torch.func.functional_call`.

    Args:
        module: the network.
        names: names of the parameters to replace. A parameter with several names is replaced under all of them.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        every = dict(module.named_parameters(remove_duplicate=False))
        self._places = [
            (k, module.get_submodule(layer), key, every[name])
            for k, name in enumerate(names)
            for layer, _, key in (other.rpartition(".") for other, p in every.items() if p is every[name])
        ]

    @contextmanager
    def hold(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Replace the parameters by ``values`` inside the block, in the order of their names."""
        for k, layer, key, _ in self._places:
            layer._parameters[key] = cast("nn.Parameter", values[k])
        try:
            yield
        finally:
            for _, layer, key, original in self._places:
                layer._parameters[key] = original


class Representation:
    """Network that returns its representation with its outputs. Its parameters are passed in each call.

    Args:
        module: network. A copy of it is used.
        spot: location of the representation.
        like: tensor with the dtype and device of the computation.
    """

    def __init__(self, module: nn.Module, spot: RepresentationSpot, like: Tensor) -> None:
        self.module, self._caught = copy.deepcopy(module).to(like.device, like.dtype), list[Tensor]()
        self._holder = ParameterHolder(self.module, [*trainable(self.module)])
        layer, below = self.module.get_submodule(spot.name), list[nn.Module]()
        if (
            type(self.module) is nn.Sequential
            and "." not in spot.name
            and not any(map(has_hook, self.module.modules()))
        ):
            below = [*self.module][: [*self.module._modules].index(spot.name) + (not spot.entering)]
        self._below = below
        if spot.entering:
            layer.register_forward_pre_hook(lambda _module, inputs: self._caught.append(inputs[0]))
        else:
            layer.register_forward_hook(lambda _module, _inputs, out: self._caught.append(out))

    def __call__(self, values: Sequence[Tensor], x: Tensor) -> Representations:
        """Return features and outputs of samples ``[b, *shape]`` in training mode for parameters in module order."""
        set_training(self.module, True)
        with self._holder.hold(values):
            outputs = self.module(x)
        return Representations(self._features(), outputs)

    @torch.no_grad()
    def features(self, values: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return the representations ``[b, k]`` of samples in evaluation mode.

        If the network is a plain sequence of layers, layers above the representation are not computed.
        """
        set_training(self.module, False)
        with self._holder.hold(values):
            for layer in self._below or (self.module,):
                x = layer(x)
        return self._features() if self._caught else x.flatten(1)

    def _features(self) -> Tensor:
        """Return the last recorded representation."""
        latest = self._caught[-1].flatten(1)
        self._caught.clear()
        return latest


def sum_terms(
    functions: Sequence[TermFunction],
    terms: Sequence[Bound],
    i: int,
    now: Representations,
    y: Tensor,
    anchors: Sequence[Sequence[Tensor]],
) -> Tensor:
    """Return the weighted sum of all terms over the samples of client ``i``, given the features of the ``anchors``.

    Raises:
        ValueError: a function does not return one number per sample.
    """
    total = now.features.new_zeros(())
    for fn, term, features in zip(functions, terms, anchors, strict=True):
        beside = torch.stack([*features]) if features else now.features.new_empty(0, *now.features.shape)
        argument = map_rows(lambda t: t[i], term.argument)
        values = fn(now.features, now.outputs, y, beside, argument)
        if values.shape != y.shape[:1]:
            raise ValueError(
                f"a term must return one number per sample as a tensor of shape [{len(y)}], got {[*values.shape]}"
            )
        total = total + term.weight[i, 0] * values.sum()
    return total


class TermNetwork(Network):
    """Network with mean representations per class and gradients of terms on its representation (see `Network`)."""

    def class_means(self, w: Tensor, ids: Tensor) -> Tensor:
        """Return the mean representation of each class in the training sets, ``[m, c, k]``, or 0 for a missing class.

        Raises:
            ConfigError: the model cannot process its samples individually.
        """
        means = []
        for (z, y), count in zip(self.features(w, ids), self.class_counts(ids), strict=True):
            total = z.new_zeros(len(count), z.shape[1]).index_add_(0, y, z)
            means.append(total / count.clamp(min=1)[:, None])
        return torch.stack(means)

    def features(self, w: Tensor, ids: Tensor) -> list[Features]:
        """Return representations and labels of each client's training samples, in the order of the training set.

        Raises:
            ConfigError: the model cannot process its samples individually.
        """
        self._check_terms()
        clients: list[Features] = []
        for row, i in zip(w, ids, strict=True):
            index = self.fed.indices("train", int(i))
            self.set_statistics(row, i[None])
            clients.append(Features(self.representations(row, index), self.fed.targets(index)))
        return clients

    def add_terms_(
        self,
        out: Tensor,
        w: Tensor,
        batch: Batch,
        functions: Sequence[TermFunction],
        terms: Sequence[Bound],
        alpha: float = 1.0,
    ) -> None:
        """Add alpha times the gradient of all terms (weight times the mean over the batch) to ``out``.

        Autograd computes the gradient one client at a time.

        Raises:
            ConfigError: the model cannot process its samples individually.
        """
        self._check_terms()
        data, model = self.samples(batch, step=True), self.representation
        rows, targets = self._split(w.detach()), self._split(out)
        held = [[self._split(anchor) for anchor in term.anchors] for term in terms]
        ends, leaves, slots = list[Tensor](), list[Tensor](), list[Tensor]()
        for i, count in enumerate(data.counts):
            if not count:
                continue
            x, y = self.set_memory_format(data.x[i, :count]), data.y[i, :count]
            for name, mask in self.draw_masks(batch, i, count).items():
                model.module.get_submodule(name).mask = mask
            anchors = [[model.features(anchor[i], x) for anchor in of_term] for of_term in held]
            parameters = [value.requires_grad_() for value in rows[i]]
            with torch.enable_grad():
                total = sum_terms(functions, terms, i, model(parameters, x), y, anchors)
                if total.requires_grad:
                    ends.append(total / batch.total[i, 0].to(total))
                    leaves += parameters
                    slots += targets[i]
        if ends:
            grads: tuple[Tensor | None, ...] = torch.autograd.grad(ends, leaves, allow_unused=True)
            added = [(slot, g) for slot, g in zip(slots, grads, strict=True) if g is not None]
            torch._foreach_add_(*map(list, zip(*added, strict=True)), alpha=alpha)

    def _split(self, rows: Tensor) -> list[list[Tensor]]:
        """Return each client's parameters as views of ``rows [m, d]``, in the order of the module."""
        return [*map(list, zip(*(value.unbind() for value in self.layout.tree(rows).values()), strict=True))]

    @cached_property
    def representation(self) -> Representation:
        """Copy of the network that returns its representation with its outputs."""
        return Representation(self._module, self.spot, torch.empty(0, dtype=self.dtype, device=self.device))

    def _check_terms(self) -> None:
        """Raise an error if the network cannot process its samples individually.

        Raises:
            ConfigError: the network cannot process samples individually. The message states the reason.
        """
        what = ""
        if self.normalisers:
            what = "its normalization layers mix the samples of a batch"
        elif self.labels_each is not None:
            what = "its sequences have a label per position"
        elif getattr(self, "draws", False):
            what = "it draws from a global generator (use fedloom.models.Dropout)"
        elif not self.fed.data.classed:
            what = "its task has no classes"
        if what:
            raise Refused(
                f"a term on the representation of this model cannot be computed: {what}",
                rule="term-on-representation",
                fix="use a different method or a different model",
            )
