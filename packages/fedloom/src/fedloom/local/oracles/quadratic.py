"""Quadratic problems f_i(w) = 1/2 (w - c_i)' A_i (w - c_i), for which all results are known exactly.

They are used in tests and theory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedloom.local.oracles.base import Features, Oracle, Reduce
from fedloom.local.rows import map_rows
from fedloom.rows.algebra import solved
from fedloom.rows.layout import Layout

if TYPE_CHECKING:
    from fedloom.local.batches import Batch
    from fedloom.local.terms import Bound, TermFunction


class Quadratic(Oracle):
    """Local problems that are quadratic functions.

    Args:
        hessian: symmetric matrices A_i ``[n, d, d]``.
        minimiser: minimizers c_i ``[n, d]``.
        sizes: each client's nominal number of training samples ``[n]``. All batches have the same gradient.
        solve: True if `descend` returns the exact minimizer of its problem, regardless of the number of steps (with no
            steps, it returns the starting point).
        layout: shapes. If None, the only parameter is a vector of length d.
    """

    name: ClassVar[str] = "quadratic"

    def __init__(
        self,
        hessian: Tensor,
        minimiser: Tensor,
        sizes: Tensor | None = None,
        *,
        solve: bool = False,
        layout: Layout | None = None,
    ) -> None:
        n, d = minimiser.shape
        self.hessian, self.minimiser = hessian, minimiser
        self.count = torch.full((n,), 4) if sizes is None else sizes
        self.minimise = self._minimise if solve else None
        self.layout = layout or Layout(names=("w",), shapes=(torch.Size([d]),))
        self.dtype, self.device = minimiser.dtype, minimiser.device

    def sizes(self, ids: Tensor) -> Tensor:
        """Return each client's nominal number of training samples."""
        return self.count[ids]

    def _gradient(self, w: Tensor, ids: Tensor) -> Tensor:
        return torch.einsum("mij,mj->mi", self.hessian[ids], w - self.minimiser[ids])

    def _compute_gradient(self, w: Tensor, batch: Batch) -> Tensor:
        """Return A_i (w - c_i), scaled by the fraction of the client's samples if the batch is part of a pass."""
        return self._gradient(w, batch.ids) * (batch.count.to(w) / batch.total)

    def addgrad_(
        self, out: Tensor, w: Tensor, batch: Batch, beta: float | Tensor, alpha: float, steady: Tensor | None = None,
        functions: Sequence[TermFunction] = (), terms: Sequence[Bound] = (),
    ) -> None:  # fmt: skip
        """Compute ``out <- beta out + alpha gradient + steady``."""
        g = self._compute_gradient(w, batch)
        out.copy_(alpha * g if isinstance(beta, int | float) and beta == 0 else beta * out + alpha * g)
        if steady is not None:
            out.add_(steady)
        if terms:
            self.add_terms_(out, w, batch, functions, terms, alpha)

    def batch_loss(self, w: Tensor, batch: Batch) -> Tensor:
        """Return f_i(w), ``[m, 1]``."""
        gap = w - self.minimiser[batch.ids]
        return 0.5 * (gap * self._gradient(w, batch.ids)).sum(1, keepdim=True) * (batch.count.to(w) / batch.total)

    def class_counts(self, ids: Tensor) -> Tensor:
        """Return class counts: the last sample is in the second class, and all others are in the first."""
        counts = torch.zeros(len(ids), self._classes, dtype=self.dtype)
        counts[:, 0], counts[:, 1] = self.count[ids] - 1, 1
        return counts

    def class_means(self, w: Tensor, ids: Tensor) -> Tensor:
        """Return the first parameters of the model as the mean of every class.

        Their number equals the number of columns in the last matrix.
        """
        return w[:, None, : self._features].repeat(1, self._classes, 1)

    @property
    def _classes(self) -> int:
        """Number of classes: the number of rows of the last matrix, as in a head.

        If the last matrix has a single row, as in a binary task, there are two classes.
        """
        shapes = list(self.layout.matrix_shapes.values())
        return max(2, shapes[-1][0]) if shapes else 2

    @property
    def _features(self) -> int:
        shapes = list(self.layout.matrix_shapes.values())
        return shapes[-1][1] if shapes else self.layout.d

    def add_terms_(
        self,
        out: Tensor,
        w: Tensor,
        batch: Batch,
        functions: Sequence[TermFunction],
        terms: Sequence[Bound],
        alpha: float = 1.0,
    ) -> None:
        """Add the terms for one sample of the first class, whose outputs and representation come from the model."""
        k, first = self._features, torch.zeros(1, dtype=torch.long)
        for i, row in enumerate(w):
            leaf = row.detach().clone().requires_grad_()
            with torch.enable_grad():
                for fn, term in zip(functions, terms, strict=True):
                    anchors = (
                        torch.stack([a[i : i + 1, :k] for a in term.anchors]) if term.anchors else row.new_empty(0, 1)
                    )
                    argument = map_rows(lambda t, i=i: t[i], term.argument)  # type: ignore[misc]
                    value = term.weight[i, 0] * fn(leaf[None, :k], leaf[None], first, anchors, argument).sum()
                    if value.requires_grad:
                        out[i].add_(torch.autograd.grad(value, leaf)[0], alpha=alpha)

    def activations(
        self, w: Tensor, ids: Tensor, layer: str, reduce: Reduce | None, batch: Batch | None = None
    ) -> Tensor:
        """Return the model as its own outputs, or its first parameters as its representation (see `class_means`)."""
        outputs = w[:, : self._features] if layer == "penultimate" else w
        return outputs.clone() if reduce is None else reduce(outputs)

    def features(self, w: Tensor, ids: Tensor) -> list[Features]:
        """Return the same representation for every sample (as in `class_means`).

        The last sample is in the second class, and all other samples are in the first class.
        """
        sizes = self.count[ids].tolist()
        return [
            Features(row[: self._features].expand(size, -1), (torch.arange(size) == size - 1).long())
            for row, size in zip(w, sizes, strict=True)
        ]

    def _minimise(self, w: Tensor, ids: Tensor, mu: Tensor, steady: Tensor | None, mask: Tensor | None) -> Tensor:
        a, c = self.hessian[ids], self.minimiser[ids]
        eye = torch.eye(w.shape[1], dtype=w.dtype)
        h = a + mu[:, :, None] * eye
        b = torch.einsum("mij,mj->mi", a, c) - (0 if steady is None else steady)
        if mask is not None:
            free = mask.expand_as(w)
            b = torch.where(free, b - torch.einsum("mij,mj->mi", h, torch.where(free, 0.0, w)), w)
            h = torch.where(free[:, :, None] & free[:, None, :], h, eye)
        return solved(h, b[..., None])[..., 0]
