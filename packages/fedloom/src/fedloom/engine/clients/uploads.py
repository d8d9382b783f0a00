"""Combination of a cohort's uploads, field by field, into the server's input.

Each kind of field defines what a chunk of clients contributes (``partial``), how the chunks are combined in order
(``merge``), and what the server finally receives (``finish``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom import algorithms
from fedloom.algorithms import Kind
from fedloom.engine.job import Job
from fedloom.errors import ConfigError, RunStopped, Stop, attribute_error
from fedloom.local import Ctx
from fedloom.local.rows import Fields, rebuild_rows
from fedloom.processes.clients import CLIENT_COUNTS, SumResult, TrainResult

SUM_PREFIX, LAST_VALUE_PREFIX = "summed.", "at."
"""Prefixes of entries in an aggregator's state: sums of changes, and the last aggregates of these sums."""
CONVERTED_ELEMENTS = 1 << 16
"""Number of elements that are converted at a time, so they stay in the processor's cache until they are added."""


def describe_usable(round: int, count: int, total: int) -> str:
    """Return a sentence that states how many of a round's uploads the server could use."""
    return f"round {round}: {count} of {total} uploads were finite and within bounds"


class RowsField:
    """Upload field of kind `fedloom.algorithms.Rows`: the accepted clients' rows ``[m, .]``.

    Args:
        name: name of the field.
        kind: kind of the field.
        before: sum over all clients' rows that the server stores, for a field with stored rows.
    """

    def __init__(self, name: str, kind: Kind, before: Tensor | None = None) -> None:
        self.name, self.kind = name, kind
        self.parts = [] if before is None else [before.clone()]

    def partial(self, up: Fields, kept: Fields | None, share: Tensor, mass: Tensor) -> Tensor:
        """Return the contribution of a chunk of clients.

        Args:
            up: uploads of the chunk.
            kept: rows that the server has stored for these clients.
            share: clients' weights ``[m, 1]`` in the mean over the cohort.
            mass: clients' weights ``[m, 1]`` in stored or accumulated sums (see `Job.masses`).
        """
        value: Tensor = getattr(up, self.name)
        return value

    def merge(self, part: Tensor) -> None:
        """Add the contribution of the next chunk."""
        self.parts.append(part)

    def finish(self, cohort: Uploads) -> Tensor:
        """Return the value that the server receives."""
        return torch.cat(self.parts)


class GatheredMean(RowsField):
    """Upload field of kind `fedloom.algorithms.Mean` whose rows are gathered for the weigher or for a robust rule."""

    def finish(self, cohort: Uploads) -> Tensor:
        rows = torch.cat(self.parts)
        weights = cohort.masses if self.kind.accumulates else cohort.shares
        return ((weights / weights.sum()).T.to(rows.device, torch.float64) @ rows.double())[0]


class MeanField(RowsField):
    """Upload field of kind `fedloom.algorithms.Mean`, which the server sums chunk by chunk in float64 ``[d]``."""

    def partial(self, up: Fields, kept: Fields | None, share: Tensor, mass: Tensor) -> Tensor:
        value: Tensor = getattr(up, self.name)
        share = mass if self.kind.accumulates else share
        if len(value) == 1:  # chunks of large models have one client
            return value[0] if share == 1 else torch.mul(value[0], share[0].to(value), out=_allocate_vector(value[0]))
        return (share.T.to(value) @ value)[0]

    def merge(self, part: Tensor) -> None:
        if not self.parts:
            self.parts = [_allocate_vector(part, torch.float64).copy_(part)]
        else:
            scratch = part.new_empty(min(CONVERTED_ELEMENTS, len(part)), dtype=torch.float64)
            for total, piece in zip(
                self.parts[0].split(CONVERTED_ELEMENTS), part.split(CONVERTED_ELEMENTS), strict=True
            ):
                total.add_(scratch[: len(piece)].copy_(piece))

    def finish(self, cohort: Uploads) -> Tensor:
        divisor = float(cohort.masses.sum()) if self.kind.accumulates else cohort.share
        return _divide_sum(self.parts[0], divisor, cohort.job)


class KeptField(RowsField):
    """Upload field of kind `fedloom.algorithms.Kept`: a float64 sum ``[d]`` over all clients.

    After each round, the changes of the cohort's values are added to the sum.
    """

    def partial(self, up: Fields, kept: Fields | None, share: Tensor, mass: Tensor) -> Tensor:
        assert kept is not None
        now, old = (self.weighted(rows).cpu() for rows in (up, kept))
        return _weighted_sum(now, mass).sub_(_weighted_sum(old, mass))

    def merge(self, part: Tensor) -> None:
        self.parts[0].add_(part)

    def finish(self, cohort: Uploads) -> Tensor:
        weight = self.kind.weight
        divisor = float(cohort.job.masses.sum()) if weight is None else cohort.sums[weight]
        return _divide_sum(self.parts[0], divisor, cohort.job)

    def weighted(self, rows: Fields) -> Tensor:
        """Multiply the field by its weights if an upload field contains them."""
        value: Tensor = getattr(rows, self.name)
        return value if self.kind.weight is None else value * getattr(rows, self.kind.weight)


def _divide_sum(total: Tensor, divisor: float | Tensor, job: Job) -> Tensor:
    """Divide a double-precision sum, and return the result in the run's precision."""
    quotient = _allocate_vector(total, job.oracle.dtype)
    scratch = total[:CONVERTED_ELEMENTS].clone()
    for to, piece in zip(quotient.split(CONVERTED_ELEMENTS), total.split(CONVERTED_ELEMENTS), strict=True):
        to.copy_(torch.div(piece, divisor, out=scratch[: len(piece)]))
    return quotient


def _allocate_vector(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate an uninitialized vector.

    On a CPU, NumPy allocates the memory, because it uses 2 MB pages for large arrays. First writes to such pages are
    faster.
    """
    dtype = dtype or like.dtype
    if like.device.type != "cpu" or dtype not in (torch.float32, torch.float64):
        return torch.empty_like(like, dtype=dtype)
    return torch.from_numpy(np.empty(like.shape, np.float32 if dtype == torch.float32 else np.float64))


def make_upload_fields(job: Job, sums: Mapping[str, Tensor] | None = None) -> dict[str, RowsField]:
    """Return an object for each upload field, to which no upload has been added yet."""
    mean = GatheredMean if job.gathers_rows else MeanField
    kinds = {algorithms.Mean: mean, algorithms.Kept: KeptField, algorithms.Rows: RowsField}
    return {name: kinds[type(kind)](name, kind, (sums or {}).get(name)) for name, kind in job.fields.items()}


def chunk_contributions(job: Job, up: Fields, ids: Tensor, share: Tensor) -> dict[str, Tensor]:
    """Return the contributions of a chunk's accepted uploads, keyed by field."""
    kept, mass = job.kept.read(ids), job.masses[ids]
    return {name: field.partial(up, kept, share, mass) for name, field in make_upload_fields(job).items()}


def first_sums(job: Job) -> dict[str, Tensor]:
    """Return sums of the rows that the server stores for all clients before the first round."""
    kept = (field for field in make_upload_fields(job).values() if isinstance(field, KeptField))
    count = float(job.masses.sum())
    return {field.name: count * field.weighted(job.kept.template).double() for field in kept}


def server_sums(job: Job) -> dict[str, Tensor]:
    """Return weighted sums of the rows that the server currently stores for all clients."""
    fields = [field for field in make_upload_fields(job).values() if isinstance(field, KeptField)]
    sums = {field.name: torch.zeros_like(first) for field, first in zip(fields, first_sums(job).values(), strict=True)}
    for ids in job.everyone.split(job.chunk) if fields else ():
        kept = job.kept.read(ids)
        for field in fields:
            sums[field.name].add_(_weighted_sum(field.weighted(kept), job.masses[ids]))
    return sums


def share_change_sums(job: Job, before: Job) -> Fields:
    """Return the change of each field's weighted sum ``[d]`` over all clients when the client weights change."""
    sums: list[Tensor] = [torch.zeros_like(row, dtype=torch.float64) for row in job.summed.template]
    step = job.masses / job.masses.sum() - before.masses / before.masses.sum()
    for ids in job.everyone.split(job.chunk) if sums else ():
        for total, rows in zip(sums, job.summed.read(ids), strict=True):
            total.add_(_weighted_sum(rows, step[ids]))
    return rebuild_rows(job.summed.template, [total.to(job.oracle.device, job.oracle.dtype) for total in sums])


class Uploads:
    """Uploads of a round, collected from the clients' results.

    Args:
        job: the run.
        sums: sums over all clients of the fields that the server stores. Not modified.

    Attributes:
        job: the run.
        ids: ids of the accepted clients, in the order of their results.
        shares: accepted clients' weights in the mean, float64 ``[m, 1]``. Clients whose uploads are already part of a
            sum have no entry.
        share: sum of these weights, added in the order of the results.
        dropped: clients whose uploads are unusable.
        counts: total work and traffic ``[7]`` (see `CLIENT_COUNTS`).
    """

    def __init__(self, job: Job, sums: Mapping[str, Tensor]) -> None:
        self.job, self._fields = job, make_upload_fields(job, sums)
        self.ids: list[Tensor] = []
        self.dropped: list[int] = []
        self.counts = torch.zeros(len(CLIENT_COUNTS), dtype=torch.long)
        self._answers: dict[str, list[Tensor]] = {}
        self.shares, self.share = torch.zeros(0, 1, dtype=torch.float64), 0.0

    def add(self, result: TrainResult) -> None:
        """Add the next result of the round."""
        if isinstance(result, SumResult):
            accepted, dropped, answers = result.ids, result.missing, dict[str, Tensor]()
        else:
            accepted, dropped = result.ids[result.accepted], result.ids[~result.accepted]
            self.shares = torch.cat([self.shares, result.share[result.accepted]])
            answers = result.answers
        self.ids.append(accepted)
        self.dropped += dropped.tolist()
        self.counts += result.counts if result.counts.dim() == 1 else result.counts.sum(0)
        self.share += result.total
        for name, part in result.parts.items():
            self._fields[name].merge(part)
        for name, rows in answers.items():
            self._answers.setdefault(name, []).append(rows)

    @property
    def masses(self) -> Tensor:
        """Accepted clients' weights for accumulated fields, float64 ``[m, 1]``."""
        return self.job.masses[torch.cat(self.ids)]

    def answers(self, name: str) -> Tensor | None:
        """Return the accepted clients' answers of one kind (see `fedloom.processes.clients.ChunkResult`), or None."""
        return torch.cat(self._answers[name]) if name in self._answers else None

    def events(self, round: int) -> tuple[str, ...]:
        """Return a tuple with one sentence about dropped uploads, or an empty tuple if there are none."""
        dropped = self.dropped
        uploads = "unusable upload from client" if len(dropped) == 1 else "unusable uploads from clients"
        return (f"round {round}: dropped {len(dropped)} {uploads} {dropped[:8]}",) if dropped else ()

    @property
    def sums(self) -> dict[str, Tensor]:
        """Sums over all clients of the fields that the server stores."""
        return {name: self._fields[name].parts[0] for name in self.job.kept_fields}

    def aggregate(
        self, ctx: Ctx, weigher: Fields, aggregator: dict[str, Tensor]
    ) -> tuple[Fields, Fields, dict[str, Tensor]]:
        """Aggregate the uploads. Return the server's input and the new states of the weigher and the aggregator.

        Raises:
            RunStopped: the aggregator rejects the uploads, for example because there are too few of them.
        """
        job, combined = self.job, dict[str, Tensor]()
        if job.setting.aggregation_weights.probes:
            weights, weigher = compute_weights(job, weigher, self.answers("weigher"), ctx)
            self.shares = self.shares * weights
        if job.robust and not job.algorithm.mixes:
            combined, aggregator = self._apply_robust_rule(ctx, aggregator)
        values = []
        for name, field in self._fields.items():
            value = combined[name] if name in combined else field.finish(self)
            values.append(value.to(job.oracle.device, job.oracle.dtype) if field.kind.averaged else value)
        return job.upload(*values), weigher, aggregator

    def _apply_robust_rule(self, ctx: Ctx, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Apply a robust rule to the cohort's rows, or to all rows that the server stores.

        Return its results by field, and its new state.

        If the server accumulates changes of the clients' rows, the rule is applied to each client's sum, over all
        clients that have participated. The server then receives the change of the rule's value divided by `Ctx.part`.
        Since the server multiplies by `Ctx.part`, its accumulated sum equals the result of the rule.
        """
        job, primary = self.job, self.job.primary
        if job.kept_fields:
            job.locations.replicate(torch.arange(job.n))
            ids = job.kept.occupied.nonzero()[:, 0]
            rows = job.kept.read(ids)._asdict()
            kind = job.fields[primary]
            weight = kind.weight if kind.keeps else None
            weights = job.masses[ids] if weight is None else rows[weight]
            return self._combine_rows(ctx, state, rows, weights, ids)
        summed = job.summed_fields
        rows = {
            name: torch.cat(field.parts)
            for name, field in self._fields.items()
            if field.kind.averaged and name not in summed
        }
        moved = {name: value for name, value in state.items() if not name.startswith(SUM_PREFIX)}
        combined, moved = self._combine_rows(ctx, moved, rows, self.shares, ctx.ids) if rows else ({}, moved)
        if not summed:
            return combined, moved
        job.locations.replicate(torch.arange(job.n))
        ids = job.summed.occupied.nonzero()[:, 0]
        sums = {name.removeprefix(SUM_PREFIX): value for name, value in state.items() if name.startswith(SUM_PREFIX)}
        before = {name: sums.pop(LAST_VALUE_PREFIX + name, getattr(job.summed.template, name)) for name in summed}
        value, sums = self._combine_rows(ctx, sums, job.summed.read(ids)._asdict(), job.masses[ids], ids)
        combined |= {name: (value[name] - before[name]) / ctx.part for name in summed}
        sums |= {LAST_VALUE_PREFIX + name: value[name] for name in summed}
        return combined, moved | {SUM_PREFIX + name: value for name, value in sums.items()}

    def _combine_rows(
        self, ctx: Ctx, state: dict[str, Tensor], rows: dict[str, Tensor], weights: Tensor, ids: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Combine some clients' rows with the aggregator. Return the results and the aggregator's new state.

        A selection rule chooses rows by the primary field, or by the first field if there is no primary field.
        """
        job = self.job
        assert job.setting.aggregator is not None
        primary = job.primary if job.primary in rows else next(iter(rows))
        place = rows[primary].device
        state, weights = {name: value.to(place) for name, value in state.items()}, weights.to(place)
        try:
            with attribute_error("aggregator", job.setting.aggregator, f"round {ctx.round}"):
                deciding = job.ctx(ctx.round, ids)
                combined, aggregator = job.setting.aggregator.apply(state, rows, weights, primary, deciding)
                _check_combined(combined, aggregator, rows)
        except ConfigError as error:
            raise RunStopped(Stop.UNUSABLE, f"round {ctx.round}: {error}", self.events(ctx.round)) from error
        return combined, aggregator


def compute_weights(job: Job, weigher: Fields, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Fields]:
    """Return a cohort's aggregation weights ``[m, 1]`` and the weigher's new state."""
    with attribute_error("weigher", job.setting.aggregation_weights, f"round {ctx.round}"):
        weights, weigher = job.setting.aggregation_weights.apply(weigher, info, ctx)
        if weights.shape != (ctx.m, 1) or (bool((weights < 0).any()) and not job.setting.aggregation_weights.signed):
            got = f"shape {[*weights.shape]} and minimum {float(weights.min())}"
            raise ValueError(f"weights must have shape [m, 1] = [{ctx.m}, 1] and must not be negative, got {got}")
    return weights, weigher


def _check_combined(combined: Any, state: Any, rows: Mapping[str, Tensor]) -> None:
    """Raise an error unless the aggregator returned one floating-point vector per field and a state of tensors."""
    for what, values in (("the aggregates", combined), ("the state", state)):
        if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
            kinds = (
                {k: type(v).__name__ for k, v in values.items()} if isinstance(values, dict) else type(values).__name__
            )
            raise ValueError(f"{what} must be a dictionary of tensors, got {kinds}")
    wanted = {name: [*value.shape[1:]] for name, value in rows.items()}
    got = {name: [*value.shape] for name, value in combined.items()}
    if odd := [name for name, value in combined.items() if not value.is_floating_point()]:
        raise ValueError(f"the aggregate of {odd[0]} must have a floating-point dtype, got {combined[odd[0]].dtype}")
    if got != wanted:
        raise ValueError(f"it must return one vector for every field, with the shapes {wanted}, got {got}")


def _weighted_sum(rows: Tensor, mass: Tensor) -> Tensor:
    """Return the sum ``[d]`` of ``rows [m, d]`` weighted by ``mass [m, 1]`` in double precision without a copy."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    for row, factor in zip(rows, mass[:, 0].tolist(), strict=True):
        total.add_(row, alpha=factor)
    return total
