"""Work: everything about the clients' local problems that an algorithm may compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedloom.local.batches import Batch, BatchPlan, FixedBatches, convert_positions, iterate_pieces, make_plan
from fedloom.local.optimizer import OptimizerStates
from fedloom.local.oracles.base import Features, Oracle, Reduce, Steps
from fedloom.local.rows import each_client
from fedloom.local.settings import LocalSGD
from fedloom.local.terms import Bound, TermFunction
from fedloom.rows.layout import Layout
from fedloom.seeds import Purpose, generator


@dataclass(frozen=True)
class Counts:
    """Work of each client in a chunk: backward and forward samples ``[m]``, and steps ``[m]`` of any solver."""

    backward: Tensor
    forward: Tensor
    steps: Tensor

    @classmethod
    def zeros(cls, m: int) -> Counts:
        """Return counters for ``m`` clients that start at 0."""
        return cls(*(torch.zeros(m, dtype=torch.long) for _ in range(3)))


class Work:
    """Local problems f_i of ``m`` clients in one round.

    Attributes:
        ids: client ids ``[m]``.
        round: number of the round, counted from 1.
        k: number of the current step in `iterate`, counted from 0.
        lr: the round's step size.
        local: settings of local training.
        weight: clients' weights alpha_i in the objective ``[m, 1]``. Over all clients, they sum to 1.
        steps: number of local steps in the round ``[m, 1]``.
        sizes: number of training samples ``[m, 1]``.
        layout: names and shapes of the model's parameters.
        fixed_batches: each client's batches, keyed by stream, if a run replays them. None if batches are drawn.
        counted: True if ``steps`` is the number of given batches, of which a step of `iterate` may use several.
        projection: matrix ``[k, d]`` of a method that works in a subspace, if a run replays it. None if the matrix is
            drawn.
        memory: states from which the clients' optimizers continue after the previous round. None if optimizers start
            from scratch.
        places: positions of the samples used in batches and losses ``[m, b]``. If None, all samples are used (see
            `fedloom.local.split`).
    """

    def __init__(
        self,
        oracle: Oracle,
        ids: Tensor,
        weight: Tensor,
        local: LocalSGD,
        *,
        seed: int = 0,
        round: int = 1,
        steps: Tensor | int | None = None,
        counts: Counts | None = None,
        fixed_batches: Sequence[FixedBatches] | None = None,
        projection: Tensor | None = None,
        memory: OptimizerStates | None = None,
    ) -> None:
        self.oracle, self.ids, self.weight, self.local, self.seed, self.round = oracle, ids, weight, local, seed, round
        self.lr = local.lr_at(round)
        self.k = 0
        self.is_idle = False
        self.sizes = oracle.sizes(ids)[:, None]
        self.counts = Counts.zeros(len(ids)) if counts is None else counts
        self.slots = torch.arange(len(ids))
        self.fixed_batches, self.projection, self.memory = fixed_batches, projection, memory
        self.places: Tensor | None = None
        self.counted = (
            steps is None
            and local.steps is None
            and fixed_batches is not None
            and all("local" in g for g in fixed_batches)
        )
        if self.counted:
            steps = torch.tensor([len(g["local"]) for g in fixed_batches or ()])
        if steps is None:
            steps = self.epochs(local.epochs) if local.steps is None else local.steps
        self.steps = torch.as_tensor(steps, device=oracle.device).reshape(-1, 1).expand(len(ids), 1)

    @property
    def m(self) -> int:
        """Number of clients, which decreases as clients finish."""
        return len(self.ids)

    @property
    def layout(self) -> Layout:
        """Names and shapes of the model's parameters."""
        return self.oracle.layout

    def epochs(self, e: int) -> Tensor:
        """Return the number of steps ``[m, 1]`` in ``e`` passes over each client's training set.

        The number is 0 if the work is `idle`.
        """
        if self.is_idle:
            return torch.zeros(self.m, 1, dtype=torch.long)
        return e * self.batches()

    def passes(self) -> Tensor:
        """Return the round's number of passes over the training set, ``[m, 1]``.

        The last pass may be incomplete.
        """
        per = self._per_epoch()
        return (self.steps + per - 1) // per

    def ends(self, span: Literal["epoch", "round"]) -> Tensor:
        """Return a bool mask ``[m, 1]`` of the clients whose current step is the last of an epoch or the round."""
        last = self.steps == self.k + 1
        return last if span == "round" else last | ((self.k + 1) % self._per_epoch() == 0)

    def _per_epoch(self) -> Tensor:
        """Return the number of steps per epoch, ``[m, 1]``."""
        if self.local.steps is None:
            return self.steps.div(max(self.local.epochs, 1), rounding_mode="floor").clamp(min=1)
        return self.batches().to(self.steps.device)

    def batches(self) -> Tensor:
        """Return the number of steps in a pass over the training set, ``[m, 1]`` (see `LocalSGD.batches`)."""
        size = self.local.batch_size
        return torch.ones_like(self.sizes) if size == "full" else -(-self.sizes // size)

    def grad(self, w: Tensor, batch: Batch) -> Tensor:
        """Return the gradient of f_i on ``batch`` at ``w``, ``[m, d]``, with clipping (if set) and weight decay."""
        w = each_client(w, self.m)
        return self.add_decay_(self.clipped(w, batch), w)

    def add_decay_(self, out: Tensor, w: Tensor) -> Tensor:
        """Add the gradient of the weight decay at ``w`` to ``out``, both ``[m, d]``, and return ``out``.

        As in PyTorch, weight decay does not apply to parameters without a gradient.
        """
        decay, reached = self.local.weight_decay, self.oracle.reached if self.local.weight_decay else None
        if reached is not None:
            return out.addcmul_(w, reached, value=decay)
        return out.add_(w, alpha=decay) if decay else out

    def clipped(
        self, w: Tensor, batch: Batch, functions: Sequence[TermFunction] = (), terms: Sequence[Bound] = ()
    ) -> Tensor:
        """Return the gradient of the batch's mean loss and terms at ``w [m, d]``, clipped to ``local.clip``."""
        g = torch.empty_like(w, memory_format=torch.contiguous_format)
        self.addgrad_(g, w, batch, 0.0, 1.0, None, functions, terms)
        if self.local.clip is not None:
            norm = torch.linalg.vector_norm(g, dim=1, keepdim=True)
            g.mul_((self.local.clip / norm).clamp(max=1.0))
        return g

    def addgrad_(
        self, out: Tensor, w: Tensor, batch: Batch, beta: float | Tensor, alpha: float, steady: Tensor | None = None,
        functions: Sequence[TermFunction] = (), terms: Sequence[Bound] = (),
    ) -> None:  # fmt: skip
        """Set ``out <- beta out + alpha grad + steady``, where grad is the gradient of mean loss plus terms at ``w``.

        Samples count as backward samples, and once more as forward samples for each anchor of a term (see
        `fedloom.local.terms`).

        Raises:
            ConfigError: terms are given, but the model cannot process its samples individually.
        """
        self._count(self.counts.backward, batch.count)
        self._count_anchors(batch, terms)
        self.oracle.addgrad_(out, w, batch, beta, alpha, steady, functions, terms)

    def _count_anchors(self, batch: Batch, terms: Sequence[Bound]) -> None:
        anchors = sum(len(term.anchors) for term in terms)
        if anchors:
            self._count(self.counts.forward, anchors * batch.count)

    def slope(self, w: Tensor, batch: Batch, functions: Sequence[TermFunction], terms: Sequence[Bound]) -> Tensor:
        """Return the gradient of only the terms at ``w``, ``[m, d]``. The samples count as backward samples."""
        self._count(self.counts.backward, batch.count)
        g = torch.zeros_like(w, memory_format=torch.contiguous_format)
        if terms:
            self._count_anchors(batch, terms)
            self.oracle.add_terms_(g, w, batch, functions, terms)
        return g

    def features(self, w: Tensor) -> list[Features]:
        """Return representations and labels of each client's training samples at ``w``, in the order of the samples.

        Args:
            w: model, ``[d]`` or ``[m, d]``.

        Raises:
            ConfigError: the task has no classes, or the model cannot process its samples individually.
        """
        self._count(self.counts.forward, self.sizes)
        return self.oracle.features(each_client(w, self.m), self.ids)

    def class_means(self, w: Tensor) -> Tensor:
        """Return the mean representation at ``w`` of each class in the training set, ``[m, c, k]``, or 0 if missing.

        Args:
            w: model, ``[d]`` or ``[m, d]``.

        Raises:
            ConfigError: the task has no classes, or the model cannot process its samples individually.
        """
        self._count(self.counts.forward, self.sizes)
        return self.oracle.class_means(each_client(w, self.m), self.ids)

    def descend_(self, w: Tensor, steps: Tensor | int | None, stream: Purpose, step: Steps) -> bool:
        """Take all SGD steps on ``w [m, d]`` in place in one call of a compiled loop.

        Return False if the oracle has no such loop.
        """
        descend = self.oracle.loop_for(w)
        if descend is None or not self.m:
            return False
        count = self.counted_steps(steps)
        plan = self.plan(stream, count)
        self._count(self.counts.backward, plan.count.sum(0))
        self.count_steps(count)
        descend(w, plan, count, step)
        return True

    def _count(self, counter: Tensor, samples: Tensor) -> None:
        """Add numbers of samples ``[k, 1]`` to a counter of the first k clients."""
        counter.index_add_(0, self.slots[: len(samples)], samples[:, 0])

    def count_steps(self, steps: Tensor | int = 1) -> None:
        """Count ``steps [m]``, or the same number for all current clients.

        `iterate` counts steps that use batches.
        """
        self.counts.steps.index_add_(0, self.slots, torch.as_tensor(steps).expand(self.m))

    def counted_steps(self, steps: Tensor | int | None = None, batches: int = 1) -> Tensor:
        """Return the number of steps of each client ``[m]`` on the CPU.

        If ``steps`` is None, return the round's steps with ``batches`` batches each.
        """
        if steps is None:
            steps = self.steps // batches if self.counted and batches else self.steps
        return torch.as_tensor(steps).reshape(-1, 1).expand(self.m, 1)[:, 0].cpu().long()

    def full_grad(self, w: Tensor) -> Tensor:
        """Return the gradient of f_i over the whole training set at ``w``, including weight decay, ``[m, d]``."""
        w = each_client(w, self.m)
        return self.add_full_grad_(torch.zeros_like(w, memory_format=torch.contiguous_format), w)

    def add_full_grad_(self, out: Tensor, w: Tensor) -> Tensor:
        """Compute ``out <- out + full_grad(w)``, both ``[m, d]``.

        Return ``out``, which must not be the same tensor as ``w``.
        """
        for piece in self.pieces():
            self.addgrad_(out[: len(piece.ids)], w[: len(piece.ids)], piece, 1.0, 1.0)
        return self.add_decay_(out, w)

    def loss(self, w: Tensor, batch: Batch | None = None) -> Tensor:
        """Return the mean loss (without weight decay) on ``batch`` or the whole training set, ``[m, 1]``."""
        w = each_client(w, self.m)
        total = torch.zeros(self.m, 1, dtype=w.dtype, device=w.device)
        for piece in self.pieces() if batch is None else [batch]:
            first = slice(len(piece.ids))
            self._count(self.counts.forward, piece.count)
            total[first] += self.oracle.batch_loss(w[first], piece)
        return total

    def accuracy(self, w: Tensor) -> Tensor:
        """Return the fraction ``[m, 1]`` of each client's training samples that ``w`` predicts correctly.

        Raises:
            ConfigError: the task has no classes.
        """
        self._count(self.counts.forward, self.sizes)
        return self.oracle.accuracy(each_client(w, self.m), self.ids)

    def group_counts(self, w: Tensor, group: str) -> Tensor:
        """Count each client's training samples in two groups of rows, ``[m, 8]``, for a binary task.

        The result contains four numbers for the first group, followed by those of the second: all samples, samples
        predicted as 1, samples labeled 1, and samples both predicted as and labeled 1.

        Args:
            w: model, ``[d]`` or ``[m, d]``.
            group: column with two levels, or a column with a threshold (see `fedloom.data.groups.make_group_masks`).

        Raises:
            ConfigError: the task is not binary, the column was not kept, or it does not define two groups.
        """
        self._count(self.counts.forward, self.sizes)
        return self.oracle.group_counts(each_client(w, self.m), self.ids, group)

    @property
    def class_counts(self) -> Tensor:
        """Each client's number of training samples per class, ``[m, c]``.

        They are counted on the client and never sent in a message.

        Raises:
            ConfigError: the task has no classes.
        """
        return self.oracle.class_counts(self.ids)

    def activations(
        self, w: Tensor, layer: str = "penultimate", reduce: Reduce | None = None, batch: Batch | None = None
    ) -> Tensor:
        """Return the mean of ``reduce(output of layer)`` over the client's training samples at ``w``, ``[m, a]``.

        Args:
            w: model, ``[d]`` or ``[m, d]``.
            layer: name of a module, ``"penultimate"`` (the last hidden representation), or ``"logits"``.
            reduce: function applied to the outputs ``[b, a]`` of samples, such as log-softmax, or None.
            batch: batch of the samples to use, or None for all samples.
        """
        self._count(self.counts.forward, self.sizes if batch is None else batch.count)
        return self.oracle.activations(each_client(w, self.m), self.ids, layer, reduce, batch)

    def last_batch(self, stream: Purpose = "local") -> Batch:
        """Return the batch of each client's last step in a stream.

        If a client takes no step, return the batch of its first step.
        """
        steps = self.steps[:, 0].cpu().clamp(min=1)
        return self.plan(stream, steps).each(steps - 1)

    def rng(self, purpose: Purpose) -> list[torch.Generator]:
        """Return a random generator for each client, for a purpose in this round."""
        return [generator(self.seed, self.round, i, purpose) for i in self.ids.tolist()]

    def plan(self, stream: Purpose, steps: Tensor) -> BatchPlan:
        """Draw the batches of a stream for ``steps [m]`` steps of each client."""
        size = None if self.local.batch_size == "full" else self.local.batch_size
        named = (self.seed, self.round, stream, self.oracle.locate, self.fixed_batches)
        plan = make_plan(self.ids, self.sizes[:, 0], steps, size, *named)
        if self.places is None:
            return plan
        position = convert_positions(plan.position, self.places)
        return plan._replace(position=position, where=self.oracle.locate(self.ids, position))

    def idle(self) -> Work:
        """Return the same clients' work without any steps."""
        return self.with_(is_idle=True, steps=torch.zeros_like(self.steps))

    def uncounted(self) -> Work:
        """Return the same work with new counters and without optimizer states."""
        return self.with_(counts=Counts.zeros(self.m), memory=None)

    def move_to_step(self, k: int) -> Work:
        """Return the same work at step ``k``."""
        return self.with_(k=k)

    def take(self, clients: slice | Tensor) -> Work:
        """Select the work of some clients."""
        parts = {name: getattr(self, name)[clients] for name in ("ids", "weight", "sizes", "steps", "slots")}
        parts |= {} if self.places is None else {"places": self.places[clients]}
        fixed_batches = self.fixed_batches and [self.fixed_batches[i] for i in torch.arange(self.m)[clients].tolist()]
        return self.with_(**parts, fixed_batches=fixed_batches)

    def with_(self, **changes: object) -> Work:
        """Return the same work with some attributes replaced."""
        other = object.__new__(Work)
        other.__dict__ = {**self.__dict__, **changes}
        return other

    def pieces(self) -> list[Batch]:
        """Return batches that cover each client's training set, weighted so that losses sum to the mean.

        Clients at the end are omitted once they have no samples left.
        """
        together = int(self.sizes.max()) if self.oracle.whole else None
        return iterate_pieces(self.ids, self.sizes, self.seed, self.round, self.oracle.locate, together, self.places)
