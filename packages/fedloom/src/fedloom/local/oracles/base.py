"""Oracle: defines a client's local problem f_i, and computes its gradient."""

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
"""Function of the outputs ``[b, a]`` of single samples."""

Minimise = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""(w, ids, mu, steady, mask) -> argmin f_i(w) + mu/2 ||w||^2 + <steady, w> over the coordinates in mask.

mu is ``[m, 1]``, or ``[m, d]`` for a strength per coordinate.
"""


Steps = tuple[float | Tensor, float, Tensor | None, Tensor | None, tuple[float | Tensor, float] | None]
"""(beta, alpha, steady, scale, None): ``w <- beta w + alpha scale grad + steady``.

With (pulled, rate) in place of None: ``v <- beta v + alpha scale grad + steady + pulled w``, ``w <- w - rate v``,
starting at v = 0.
"""

Descend = Callable[[Tensor, BatchPlan, Tensor, Steps], None]
"""Function (w, plan, steps [m], step form) that takes all steps at once, in place."""


class Features(NamedTuple):
    """Representations ``[b, k]`` and labels ``[b]`` of samples."""

    z: Tensor
    y: Tensor


class Oracle(ABC):
    """Local problems of all clients. An oracle does not modify its arguments, except ``out``."""

    name: ClassVar[str]
    layout: Layout
    dtype: torch.dtype
    device: torch.device
    minimise: Minimise | None = None
    whole: bool = False
    """True if the loss is a function of all of a client's samples together, and not a mean over samples."""

    def loop_for(self, w: Tensor) -> Descend | None:
        """Return a function that takes all SGD steps on rows like ``w [m, d]`` in one call, or None."""
        return None

    @property
    def reached(self) -> Tensor | None:
        """Mask ``[d]`` of the parameters that affect the loss of some sample: 1 if they do, 0 if not.

        None if all parameters affect the loss.

        PyTorch optimizers do not change a parameter that has no gradient, with or without weight decay.
        """
        return None

    @property
    def reached_with_terms(self) -> Tensor | None:
        """`reached` for a loss with terms on the representation. None if all parameters affect it."""
        return None

    @abstractmethod
    def sizes(self, ids: Tensor) -> Tensor:
        """Return the number of training samples ``[m]`` of each of the clients ``ids``."""

    def locate(self, ids: Tensor, position: Tensor) -> Tensor:
        """Return the data by which the oracle finds the samples at ``position [..., m, b]`` of clients ``ids [m]``."""
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
        """Set ``out <- beta out + alpha grad + steady``, for the mean loss of ``batch`` and the terms at ``w``.

        Args:
            out: rows ``[m, d]``, which are written in place. Without terms, ``out`` may be ``w`` itself (which gives an
                SGD step in one pass).
            w: ``[m, d]``.
            batch: one batch per row.
            beta: number, or ``[m, 1]``. If it is 0, the old values of ``out`` are ignored.
            alpha: factor of the gradient.
            steady: vector ``[m, d]``, or None for zero.
            functions: functions of the terms on the representation.
            terms: per-client data of each term.

        Raises:
            ConfigError: terms are given, and `add_terms_` would raise.
        """

    @abstractmethod
    def batch_loss(self, w: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the sample losses of ``batch`` at ``w``, divided by ``batch.total``, ``[m, 1]``.

        No dropout.
        """

    @abstractmethod
    def activations(
        self, w: Tensor, ids: Tensor, layer: str, reduce: Reduce | None, batch: Batch | None = None
    ) -> Tensor:
        """Return the mean ``[m, a]`` of ``reduce`` of the outputs of ``layer``, for ``batch`` or for all samples."""

    def accuracy(self, w: Tensor, ids: Tensor) -> Tensor:
        """Return the share of a client's training samples that are predicted correctly, ``[m, 1]``.

        Raises:
            ConfigError: predictions cannot be correct or incorrect in this task.
        """
        raise Refused(
            "accuracy needs classes, but this task has no classes",
            rule="method-needs-classes",
            fix="use the loss, or choose another method",
        )

    def group_counts(self, w: Tensor, ids: Tensor, group: str) -> Tensor:
        """Count each client's training samples in two groups ``[m, 8]`` (`Work.group_counts`).

        Raises:
            ConfigError: the task is not binary, or the groups do not exist.
        """
        raise Refused(
            "rates of groups need a task with two classes",
            rule="method-needs-classes",
            fix="use the accuracy or the loss instead",
        )

    def class_counts(self, ids: Tensor) -> Tensor:
        """Return each client's number of training samples by class ``[m, c]``, in the oracle's dtype.

        Raises:
            ConfigError: the task has no classes.
        """
        raise Refused(
            "class counts need classes, but this task has no classes",
            rule="method-needs-classes",
            fix="use a method that needs no class counts",
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
        """Compute ``out <- out + alpha gradient`` for terms on the representation (`fedloom.local.terms`).

        Raises:
            ConfigError: there is no representation, or the loss is not a mean over samples.
        """
        raise Refused(
            f"gradient engine {self.name!r} has no representation to which a term could apply. Use a "
            "method without terms"
        )

    def class_means(self, w: Tensor, ids: Tensor) -> Tensor:
        """Return the mean representation ``[m, c, k]`` of each class in the training parts, 0 for a missing class.

        Raises:
            ConfigError: the task has no classes.
        """
        raise Refused(
            "means by class need classes, but this task has no classes",
            rule="method-needs-classes",
            fix="use a method that needs no class counts",
        )

    def features(self, w: Tensor, ids: Tensor) -> list[Features]:
        """Return the representations and labels of each client's training part, in the order of the part.

        Raises:
            ConfigError: the task has no classes.
        """
        raise Refused(
            "features by class need classes, but this task has no classes",
            rule="method-needs-classes",
            fix="use a method that needs no class counts",
        )
