"""Stacked oracle, which computes a chunk of clients in one torch.func call for any model that vmap accepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedloom.errors import ClientError
from fedloom.local.oracles.network import scale_
from fedloom.local.oracles.samples import output_gradients
from fedloom.local.oracles.terms import TermNetwork
from fedloom.models.sequences import TorchLSTMLayer

if TYPE_CHECKING:
    from fedloom.data.federation import Federation
    from fedloom.local.batches import Batch
    from fedloom.local.terms import Bound, TermFunction
    from fedloom.models import Augment
    from fedloom.tasks import Task


class Stacked(TermNetwork):
    """Oracle that computes stacked models with vmap, in one pass for all clients (see `Network` for the arguments)."""

    name: ClassVar[str] = "vmap"

    def __init__(self, module: nn.Module, task: Task, fed: Federation, augment: Augment | None = None) -> None:
        super().__init__(module, task, fed, augment)
        for layer in self.module.modules():
            if isinstance(layer, TorchLSTMLayer):
                layer.plain = True

    def addgrad_(
        self, out: Tensor, w: Tensor, batch: Batch, beta: float | Tensor, alpha: float, steady: Tensor | None = None,
        functions: Sequence[TermFunction] = (), terms: Sequence[Bound] = (),
    ) -> None:  # fmt: skip
        """Run one forward and one backward pass for all clients of the chunk.

        Raises:
            ClientError: vmap does not accept the model.
        """
        data = self.samples(batch, step=True)
        masks = {f"{name}.mask": mask for name, mask in self._masks(batch, data.counts).items()}
        leaves = {name: view.requires_grad_() for name, view in self.layout.tree(w.detach()).items()}
        self.module.train()
        with torch.enable_grad(), self.lower_precision(batch):
            try:
                outputs = vmap(self._forward)(leaves, masks, data.x).flatten(1, -2)
            except RuntimeError as error:
                cause = (
                    f"the model cannot be stacked ({str(error).splitlines()[0]}). Set engine.gradient_engine = 'loop'"
                )
                raise ClientError("gradient", batch.draw.round, sorted(batch.draw.ids), cause) from error
        above = output_gradients(self.task, outputs.to(self.dtype), data).to(outputs.dtype)
        grads = torch.autograd.grad(outputs, list(leaves.values()), above, allow_unused=True, materialize_grads=True)
        for target, g in zip(self.layout.tree(out).values(), grads, strict=True):
            scale_(target, beta).add_(g, alpha=alpha)
        if steady is not None:
            out.add_(steady)
        if terms:
            self.add_terms_(out, w, batch, functions, terms, alpha)

    def _forward(self, parameters: dict[str, Tensor], masks: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.module, {**parameters, **masks}, (x,))  # type: ignore[no-any-return]
