"""Gradients of terms on a representation, and means of representations by class, for every oracle of a network."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.errors import Refused
from fedloom.local.oracles.base import Features
from fedloom.local.oracles.forward import Spot, caught
from fedloom.local.oracles.network import Network
from fedloom.local.rows import map_rows

if TYPE_CHECKING:
    from fedloom.local.batches import Batch
    from fedloom.local.terms import Bound, TermFunction


class Representations(NamedTuple):
    """features ``[b, k]`` and outputs ``[b, c]`` of samples."""

    features: Tensor
    outputs: Tensor


class Representation:
    """A network that gives its representation beside its outputs, with parameters from outside.

    Args:
        module: the network. Copied.
        spot: where the representation is.
        like: a tensor of the dtype and on the device to compute with.
    """

    def __init__(self, module: nn.Module, spot: Spot, like: Tensor) -> None:
        self.module, self.entering = copy.deepcopy(module).to(like.device, like.dtype), spot.entering
        self.layer = self.module.get_submodule(spot.name)

    def __call__(self, parameters: dict[str, Tensor], x: Tensor, *, train: bool) -> Representations:
        """Features and outputs of samples ``[b, *shape]``."""
        with caught(self.layer, entering=self.entering) as features:
            outputs = functional_call(self.module.train(train), parameters, (x,))
        return Representations(features[-1].flatten(1), outputs)


def summed(
    functions: Sequence[TermFunction],
    terms: Sequence[Bound],
    i: int,
    now: Representations,
    y: Tensor,
    anchors: Sequence[Sequence[Tensor]],
) -> Tensor:
    """Sum over client ``i``'s samples of all terms, each with its weight and the features of its ``anchors``.

    Raises:
        ValueError: a function gives something else than one number per sample.
    """
    total = now.features.new_zeros(())
    for fn, term, features in zip(functions, terms, anchors, strict=True):
        beside = torch.stack([*features]) if features else now.features.new_empty(0, *now.features.shape)
        argument = map_rows(lambda t: t[i], term.argument)
        values = fn(now.features, now.outputs, y, beside, argument)
        if values.shape != y.shape[:1]:
            raise ValueError(f"a term must return one number per sample, [{len(y)}], got {[*values.shape]}")
        total = total + term.weight[i, 0] * values.sum()
    return total


class TermNetwork(Network):
    """A network with class means and gradients of terms of its representation, see `Network` for the arguments."""

    def class_means(self, w: Tensor, ids: Tensor) -> Tensor:
        """Return the mean representation of every class in each training part, ``[m, c, k]``, 0 for a missing class.

        Raises:
            ConfigError: the model's samples cannot be processed one by one.
        """
        means = []
        for (z, y), count in zip(self.features(w, ids), self.class_counts(ids), strict=True):
            total = z.new_zeros(len(count), z.shape[1]).index_add_(0, y, z)
            means.append(total / count.clamp(min=1)[:, None])
        return torch.stack(means)

    def features(self, w: Tensor, ids: Tensor) -> list[Features]:
        """Return representations and labels of every client's training part, in its order.

        Raises:
            ConfigError: the model's samples cannot be processed one by one.
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
        """Compute ``out <- out + alpha gradient`` of the sum of terms: weight times the function's mean over the batch.

        Autograd computes it client by client.

        Raises:
            ConfigError: the model's samples cannot be processed one by one.
        """
        self._check_terms()
        data, layout = self.samples(batch, step=True), self.layout
        model = self.representation
        for i, count in enumerate(data.counts):
            if not count:
                continue
            x, y = self.arranged(data.x[i, :count]), data.y[i, :count]
            for name, mask in self.masks_of(batch, i, count).items():
                model.module.get_submodule(name).mask = mask
            leaves = {name: value.detach().requires_grad_() for name, value in layout.tree(w[i]).items()}
            with torch.no_grad():
                anchors = [[model(layout.tree(a[i]), x, train=False).features for a in t.anchors] for t in terms]
            with torch.enable_grad():
                total = summed(functions, terms, i, model(leaves, x, train=True), y, anchors)
            if total.requires_grad:
                grads = torch.autograd.grad(
                    total / batch.total[i, 0].to(total), list(leaves.values()), allow_unused=True
                )
                for target, g in zip(layout.tree(out[i]).values(), grads, strict=True):
                    if g is not None:
                        target.add_(g, alpha=alpha)

    @cached_property
    def representation(self) -> Representation:
        """The module, which returns its representation beside its outputs."""
        return Representation(self._module, self.spot, torch.empty(0, dtype=self.dtype, device=self.device))

    def _check_terms(self) -> None:
        """Raise if the samples of a network cannot be processed one by one.

        Raises:
            ConfigError: they cannot; the message says why.
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
                fix="use another method, or another model",
            )
