"""Oracle: what a client's local problem f_i is, and how its gradient is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedloom.errors import Refused
from fedloom.local.batches import Batch, BatchPlan
from fedloom.local.terms import Bound, TermFunction
from fedloom.rows.layout import Layout

Reduce = Callable[[Tensor], Tensor]
"""Acts on the outputs ``[b, a]`` of single samples."""

Minimise = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""(w, ids, mu, steady, mask) -> argmin f_i(w) + mu/2 ||w||^2 + <steady, w> over the coordinates in mask.

Mu is ``[m, 1]``, or ``[m, d]`` for a strength per coordinate.
"""


Steps = tuple[float | Tensor, float, Tensor | None, Tensor | None, tuple[float | Tensor, float] | None]
"""(beta, alpha, steady, scale, None): ``w <- beta w + alpha scale grad + steady``.

With (pulled, rate) in place of None, ``v <- beta v + alpha scale grad + steady + pulled w``, ``w <- w - rate v``, from
v = 0.
"""

Descend = Callable[[Tensor, BatchPlan, Tensor, Steps], None]
"""Function (w, plan, steps [m], step form) that takes every step at once, in place."""


class Features(NamedTuple):
    """Representations ``[b, k]`` and labels ``[b]`` of samples."""

    z: Tensor
    y: Tensor


class Oracle(ABC):
    """The local problems of all clients. Nothing that an oracle is given is modified, except ``out``."""

    name: ClassVar[str]
    layout: Layout
    dtype: torch.dtype
    device: torch.device
    minimise: Minimise | None = None
    whole: bool = False
    """Whether the loss is of all of a client's samples together, not a mean over them."""

    def loop_for(self, w: Tensor) -> Descend | None:
        """Return a function for all SGD steps on rows like ``w [m, d]`` in one call, or None without such a loop."""
        return None

    @property
    def reached(self) -> Tensor | None:
        """``[d]`` 1 for parameters that the gradient of some sample reaches, 0 for others. None where it reaches all.

        Optimisers of torch leave a parameter without a gradient as it is, weight decay or not.
        """
        return None

    @property
    def reached_with_terms(self) -> Tensor | None:
        """`reached` where the loss has terms on the representation. None where it reaches all."""
        return None

    @abstractmethod
    def sizes(self, ids: Tensor) -> Tensor:
        """Training samples ``[m]`` of the clients ``ids``."""

    def locate(self, ids: Tensor, position: Tensor) -> Tensor:
        """Return what the oracle needs to find the samples at ``position [..., m, b]`` of clients ``ids [m]``."""
        return position

    @abstractmethod
    def addgrad_(
        self,
        out: Tensor,
        w: Tensor,
        batch: Batch,
        beta: float | Tensor,
        alpha: float,
        steady: Tensor | None = None,
        functions: Sequence[TermFunction] = (),
        terms: Sequence[Bound] = (),
    ) -> None:
        """``out <- beta out + alpha grad + steady``, the gradient of the mean loss of ``batch`` and of terms at ``w``.

        Args:
            out: ``[m, d]``, written in place, without terms it may be ``w`` itself (a step of SGD in one pass).
            w: ``[m, d]``.
            batch: one batch per row.
            beta: a number, or ``[m, 1]``. 0 ignores what ``out`` held.
            alpha: factor of the gradient.
            steady: ``[m, d]``, or None for zero.
            functions: of the terms on the representation.
            terms: what they have of every client.

        Raises:
            Refused: as `add_terms_`, where there are terms.
        """

    @abstractmethod
    def batch_loss(self, w: Tensor, batch: Batch) -> Tensor:
        """Sum of the sample losses of ``batch`` at ``w`` over ``batch.total``, ``[m, 1]``. No dropout."""

    @abstractmethod
    def activations(
        self, w: Tensor, ids: Tensor, layer: str, reduce: Reduce | None, batch: Batch | None = None
    ) -> Tensor:
        """Mean of ``reduce`` of the output of ``layer``, ``[m, a]``, over ``batch`` or all training samples."""

    def accuracy(self, w: Tensor, ids: Tensor) -> Tensor:
        """Share of the client's training samples that are predicted right, ``[m, 1]``.

        Raises:
            Refused: nothing is right or wrong here.
        """
        raise Refused(
            "accuracy needs classes, and this task has none",
            rule="method-needs-classes",
            fix="use the loss, or take another method",
        )

    def group_counts(self, w: Tensor, ids: Tensor, group: str) -> Tensor:
        """Count each client's training samples in two groups ``[m, 8]`` (`Work.group_counts`).

        Raises:
            Refused: the task is not binary.
            ConfigError: there are not two such groups.
        """
        raise Refused(
            "rates of groups need two classes, which this task has not",
            rule="method-needs-classes",
            fix="use the accuracy or the loss",
        )

    def class_counts(self, ids: Tensor) -> Tensor:
        """Training samples ``[m, c]`` of the clients by class, in the oracle's dtype.

        Raises:
            Refused: there are no classes.
        """
        raise Refused(
            "class counts need classes, and this task has none",
            rule="method-needs-classes",
            fix="take a method without them",
        )

    def add_terms_(
        self,
        out: Tensor,
        w: Tensor,
        batch: Batch,
        functions: Sequence[TermFunction],
        terms: Sequence[Bound],
        alpha: float = 1.0,
    ) -> None:
        """``out <- out + alpha gradient`` of terms on the representation (`fedloom.local.terms`).

        Raises:
            Refused: there is no representation, or its samples cannot be looked at one by one.
        """
        raise Refused(f"oracle {self.name!r} has no representation for a term; take a method without one")

    def class_means(self, w: Tensor, ids: Tensor) -> Tensor:
        """Mean representation of every class in the clients' training parts, ``[m, c, k]``. 0 where it has none.

        Raises:
            Refused: there are no classes.
        """
        raise Refused(
            "means by class need classes, and this task has none",
            rule="method-needs-classes",
            fix="take a method without them",
        )

    def features(self, w: Tensor, ids: Tensor) -> list[Features]:
        """Representations and labels of every client's training part, in its order.

        Raises:
            Refused: there are no classes.
        """
        raise Refused(
            "features by class need classes, and this task has none",
            rule="method-needs-classes",
            fix="take a method without them",
        )
