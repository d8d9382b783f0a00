"""Base class of oracles. An oracle defines each client's local problem f_i and computes its gradient."""

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
"""Function applied to the outputs ``[b, a]`` of samples."""

Minimise = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""Function (w, ids, mu, steady, mask) that returns argmin f_i(w) + mu/2 ||w||^2 + <steady, w> over the coordinates in
the mask.

The strength mu is ``[m, 1]``, or ``[m, d]`` for a separate strength per coordinate.
"""


Steps = tuple[float | Tensor, float, Tensor | None, Tensor | None, tuple[float | Tensor, float] | None]
"""Form of an SGD step. (beta, alpha, steady, scale, None) stands for ``w <- beta w + alpha scale grad + steady``.

With (pulled, rate) in place of None, it stands for ``v <- beta v + alpha scale grad + steady + pulled w`` and ``w <- w
- rate v``, where v starts at 0.
"""

Descend = Callable[[Tensor, BatchPlan, Tensor, Steps], None]
"""Function (w, plan, steps [m], form of SGD step) that performs all steps in place in one call."""


class Features(NamedTuple):
    """Representations ``[b, k]`` and labels ``[b]`` of samples."""

    z: Tensor
    y: Tensor


class Oracle(ABC):
    """Local problems of all clients, with the functions that compute them.

    No method modifies its arguments, except for ``out``.
    """

    name: ClassVar[str]
    layout: Layout
    dtype: torch.dtype
    device: torch.device
    minimise: Minimise | None = None
    whole: bool = False
    """True if the loss depends on all of a client's samples together instead of being a mean over samples."""

    def loop_for(self, w: Tensor) -> Descend | None:
        """Return a function that takes all SGD steps on rows like ``w [m, d]`` in one call, or None."""
        return None

    @property
    def reached(self) -> Tensor | None:
        """Mask ``[d]`` with 1 for parameters that affect the loss of any sample, and 0 for all other parameters.

        None if all parameters affect it.

        As in PyTorch, optimizers and weight decay do not change parameters without a gradient.
        """
        return None

    @property
    def reached_with_terms(self) -> Tensor | None:
        """Mask as in `reached`, for a loss with terms on the representation. None if all parameters affect the loss."""
        return None

    @abstractmethod
    def sizes(self, ids: Tensor) -> Tensor:
        """Return the number of training samples ``[m]`` of the clients ``ids``."""

    def locate(self, ids: Tensor, position: Tensor) -> Tensor:
        """Return references, for later use, to the samples at ``position [..., m, b]`` of clients ``ids [m]``."""
        return position

    @abstractmethod
    def addgrad_(
        self, out: Tensor, w: Tensor, batch: Batch, beta: float | Tensor, alpha: float, steady: Tensor | None = None,
        functions: Sequence[TermFunction] = (), terms: Sequence[Bound] = (),
    ) -> None:  # fmt: skip
        """Set ``out <- beta out + alpha grad + steady``, where grad is the gradient of the mean loss plus terms.

        Args:
            out: rows ``[m, d]`` that are changed in place. Without terms, ``out`` may be ``w`` itself, which makes this
                an SGD step in one pass.
            w: models ``[m, d]`` where the gradient is computed.
            batch: one batch for each row.
            beta: factor of ``out``, a scalar or ``[m, 1]``. If it is the scalar 0, the old values are ignored even if
                they are not finite.
            alpha: factor of the gradient.
            steady: vector ``[m, d]``, or None if the vector is zero.
            functions: functions of terms on the representation.
            terms: weights, anchors and arguments of each term.

        Raises:
            ConfigError: terms are given, but this oracle cannot compute them (see `add_terms_`).
        """

    @abstractmethod
    def batch_loss(self, w: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the sample losses of ``batch`` at ``w``, divided by ``batch.total``, ``[m, 1]``.

        Dropout is not applied.
        """

    @abstractmethod
    def activations(
        self, w: Tensor, ids: Tensor, layer: str, reduce: Reduce | None, batch: Batch | None = None
    ) -> Tensor:
        """Return the mean ``[m, a]`` of ``reduce(outputs of layer)`` over ``batch`` or all training samples."""

    def accuracy(self, w: Tensor, ids: Tensor) -> Tensor:
        """Return the fraction of each client's training samples that are predicted correctly, ``[m, 1]``.

        Raises:
            ConfigError: predictions of the task are neither correct nor incorrect.
        """
        raise Refused(
            "accuracy is undefined, because this task has no classes",
            rule="method-needs-classes",
            fix="use the loss or a different method",
        )

    def group_counts(self, w: Tensor, ids: Tensor, group: str) -> Tensor:
        """Count each client's training samples in two groups, ``[m, 8]`` (see `Work.group_counts`).

        Raises:
            ConfigError: the task is not binary, or the groups do not exist.
        """
        raise Refused(
            "group rates require a task with two classes",
            rule="method-needs-classes",
            fix="use the accuracy or the loss instead",
        )

    def class_counts(self, ids: Tensor) -> Tensor:
        """Return each client's number of training samples per class, ``[m, c]``, in the oracle's dtype.

        Raises:
            ConfigError: the task has no classes.
        """
        raise Refused(
            "class counts are undefined, because this task has no classes",
            rule="method-needs-classes",
            fix="use a method that does not need class counts",
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
        """Add alpha times the gradient of terms on the representation to ``out`` (see `fedloom.local.terms`).

        Raises:
            ConfigError: the model has no representation, or the loss is not a mean over samples.
        """
        raise Refused(
            f"gradient engine {self.name!r} has no representation to which a term could apply. Use a method without "
            f"terms"
        )

    def class_means(self, w: Tensor, ids: Tensor) -> Tensor:
        """Return the mean representation of each class in the training sets, ``[m, c, k]``, or 0 for a missing class.

        Raises:
            ConfigError: the task has no classes.
        """
        raise Refused(
            "class means are undefined, because this task has no classes",
            rule="method-needs-classes",
            fix="use a method that does not need class counts",
        )

    def features(self, w: Tensor, ids: Tensor) -> list[Features]:
        """Return representations and labels of each client's training samples, in the order of the training set.

        Raises:
            ConfigError: the task has no classes.
        """
        raise Refused(
            "class features are undefined, because this task has no classes",
            rule="method-needs-classes",
            fix="use a method that does not need class counts",
        )
