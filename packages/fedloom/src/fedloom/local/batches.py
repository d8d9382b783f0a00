"""Batches that a chunk's clients use in each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.data.order import MAX_PERMUTATION_SAMPLES, matches_torch, plan_batches, plan_many_batches
from fedloom.errors import ConfigError
from fedloom.seeds import Purpose, generator

PASS_STREAM = "pass"
"""Name of the stream for passes over a client's whole training set."""

PIECE_SAMPLES = 1024
"""Number of samples per client that are processed together in a pass over the whole training set."""

MIN_COMPILED_CLIENTS = 8
"""Minimum number of clients for drawing batches in a compiled loop. With fewer clients, compilation would take longer
than the loop saves."""

FixedBatches = Mapping[Purpose, Tensor]
"""A client's batches in a round ``[steps, b]``, keyed by stream: positions in its training set, padded with -1. The
user provides these batches. They are not drawn."""


class BatchKey(NamedTuple):
    """Key of the random draws for a batch: seed, round, client ids, stream and step."""

    seed: int
    round: int
    ids: tuple[int, ...]
    stream: Purpose
    k: int

    def generator(self, row: int, purpose: str) -> torch.Generator:
        """Return the generator of the client in ``row``, seeded with (seed, round, client, (*stream, k, purpose))."""
        stream = self.stream if isinstance(self.stream, tuple) else (self.stream,)
        return generator(self.seed, self.round, self.ids[row], (*stream, self.k, purpose))


class Batch(NamedTuple):
    """One batch per client, given by positions in the client's training set. Short batches are padded with -1.

    Attributes:
        position: positions ``[m, b]`` from 0 to n_i - 1, or -1 for padding. Padding comes after the samples.
        where: result ``[m, b]`` of `Oracle.locate` for these positions.
        count: size of each client's batch ``[m, 1]``.
        ids: client ids ``[m]``.
        draw: key of additional random draws for this batch, such as dropout masks.
        total: divisor of the sum of sample losses ``[m, 1]``. This is ``count``, or the client's size if the batch is
            part of a pass over its data.
        full: True if no client's batch is padded.
    """

    position: Tensor
    where: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which is not needed here
    ids: Tensor
    draw: BatchKey
    total: Tensor
    full: bool

    def scaled(self, factor: Tensor) -> Batch:
        """Multiply each client's sample losses (and thus the batch's gradient) by ``factor [m, 1]``."""
        return self._replace(total=self.total / factor.to(self.total.device))


class BatchPlan(NamedTuple):
    """All batches of a chunk's clients in one stream.

    Attributes:
        position: positions ``[steps, m, b]``.
        where: result ``[steps, m, b]`` of `Oracle.locate` for these positions.
        count: size of each client's batch ``[steps, m, 1]``.
        width: size of the largest batch in each step.
        narrowest: size of the smallest batch in each step.
        ids: client ids ``[m]``.
        draw: key of random draws, without the number of the step.
    """

    position: Tensor
    where: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which is not needed here
    width: list[int]
    narrowest: list[int]
    ids: Tensor
    draw: BatchKey

    def take(self, clients: slice | Tensor) -> BatchPlan:
        """Select some clients' batches."""
        ids = self.ids[clients]
        draw = self.draw._replace(ids=tuple(ids.tolist()))
        position, where, count = self.position[:, clients], self.where[:, clients], self.count[:, clients]
        return self._replace(position=position, where=where, count=count, ids=ids, draw=draw)

    def batch(self, k: int) -> Batch:
        """Return each client's batch in step ``k``, padded to the size of the largest batch."""
        position, where, count, width = self.position[k], self.where[k], self.count[k], self.width[k]
        if width < position.shape[1]:
            position, where = position[:, :width], where[:, :width]
        return Batch(position, where, count, self.ids, self.draw._replace(k=k), count, self.narrowest[k] == width)

    def each(self, steps: Tensor) -> Batch:
        """Return the batch of each client in a step that differs between clients, given by ``steps [m]``."""
        rows = torch.arange(len(steps))
        position, where, count = (t[steps, rows] for t in (self.position, self.where, self.count))
        return Batch(position, where, count, self.ids, self.draw, count, int(count.min()) == position.shape[1])


def make_plan(
    ids: Tensor, sizes: Tensor, steps: Tensor, batch_size: int | None, seed: int, round: int, stream: Purpose,
    locate: Callable[[Tensor, Tensor], Tensor], fixed_batches: Sequence[FixedBatches] | None = None,
) -> BatchPlan:  # fmt: skip
    """Draw the batches of a chunk's clients for one stream of a round.

    If ``batch_size`` is None, every batch contains the whole training set.

    If ``fixed_batches`` has an entry for each client, these batches are used instead.

    Raises:
        ConfigError: a client has fewer fixed batches than steps.
    """
    names: list[int] = ids.tolist()
    many = fixed_batches is None and len(names) >= MIN_COMPILED_CLIENTS and int(sizes.max()) < MAX_PERMUTATION_SAMPLES
    if many and batch_size is not None and matches_torch():
        position = plan_many_batches(sizes, batch_size, steps, seed, round, names, stream)
    else:
        position = _draw_positions(names, sizes, steps, batch_size, seed, round, stream, fixed_batches)
    samples = (position >= 0).sum(2, keepdim=True)
    widest: list[int] = samples.amax((1, 2)).tolist() if samples.numel() else []
    narrowest: list[int] = samples.amin((1, 2)).tolist() if samples.numel() else []
    draw = BatchKey(seed, round, tuple(names), stream, 0)
    return BatchPlan(position, locate(ids, position), samples, widest, narrowest, ids, draw)


def _draw_positions(
    names: list[int], sizes: Tensor, steps: Tensor, batch_size: int | None, seed: int, round: int, stream: Purpose,
    fixed_batches: Sequence[FixedBatches] | None,
) -> Tensor:  # fmt: skip
    """Return positions ``[most steps, m, b]``, drawn client by client."""
    longest, width = max(steps.tolist(), default=0), max(sizes.tolist(), default=0)
    if batch_size is not None:
        width = min(batch_size, width)
    if fixed_batches is not None:
        drawn = [
            _fixed_position(g, i, round, stream, count)
            for g, i, count in zip(fixed_batches, names, steps.tolist(), strict=True)
        ]
        width = max((d.shape[1] for d in drawn), default=0)
    else:
        drawn = [
            plan_batches(
                size, batch_size and width, count, None if batch_size is None else generator(seed, round, i, stream)
            )
            for i, size, count in zip(names, sizes.tolist(), steps.tolist(), strict=True)
        ]
    if len({d.shape for d in drawn}) == 1:
        return torch.stack(drawn, 1)[..., :width]
    position = torch.full((longest, len(names), width), -1)
    for row, d in enumerate(drawn):
        position[: len(d), row, : d.shape[1]] = d[:, :width]
    return position


def _fixed_position(fixed_batches: FixedBatches, client: int, round: int, stream: Purpose, count: int) -> Tensor:
    indices = fixed_batches.get(stream)
    have = 0 if indices is None else len(indices)
    if have < count:
        named = f"client {client}, round {round}, stream {stream!r}"
        raise ConfigError(f"batches: {named}: the method requires {count} batches, but only {have} are listed")
    return torch.empty(0, 1, dtype=torch.long) if indices is None else indices[:count]


def convert_positions(position: Tensor, places: Tensor) -> Tensor:
    """Convert positions ``[..., m, b]`` among the samples ``places [m, c]`` to positions in the whole training set."""
    places = places.expand(*position.shape[:-1], -1)
    return torch.where(position >= 0, places.gather(-1, position.clamp(min=0)), -1)


def iterate_pieces(
    ids: Tensor,
    sizes: Tensor,
    seed: int,
    round: int,
    locate: Callable[[Tensor, Tensor], Tensor],
    together: int | None = None,
    places: Tensor | None = None,
) -> list[Batch]:
    """Return batches that together cover each client's training set (of size ``sizes [m, 1]``), or only ``places``.

    Each batch contains up to ``together`` samples of every client. Clients at the end are omitted once they have no
    samples left.
    """
    longest, together = int(sizes.max()), PIECE_SAMPLES if together is None else together
    batches = []
    for start in range(0, longest, together):
        m = int((sizes[:, 0] > start).nonzero().max()) + 1
        position = torch.arange(start, min(start + together, longest)).expand(m, -1)
        position = torch.where(position < sizes[:m], position, -1)
        position = position if places is None else convert_positions(position, places[:m])
        count = (position >= 0).sum(1, keepdim=True)
        draw = BatchKey(seed, round, tuple(ids[:m].tolist()), PASS_STREAM, start)
        where, full = locate(ids[:m], position), int(count.min()) == position.shape[1]
        batches.append(Batch(position, where, count, ids[:m], draw, sizes[:m], full))
    return batches
