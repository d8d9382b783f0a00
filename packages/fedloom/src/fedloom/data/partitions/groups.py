"""Partitions by a column of the data, and partitions into planted clusters of clients."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field, model_validator

from fedloom.data.partitions._base import Partition
from fedloom.data.partitions.deal import Dealt, Ints, deal, group_by_owner, split_evenly
from fedloom.data.partitions.pools import Draw, Pool
from fedloom.errors import PartitionError
from fedloom.hints import suggest_nearest
from fedloom.seeds import numpy_generator


class Natural(Partition):
    """Natural clients of the source, such as writers or hospitals. Several of them can be combined into one client.

    Natural clients with fewer than `min_size` samples are omitted, as with LEAF's option `-k`.
    """

    kind: ClassVar[str] = "natural"
    purpose: ClassVar[str] = "writers"
    """Purpose of the random draws, used to derive their seeds.

    It remains the original name of this kind, so that old seeds give the same draws.
    """
    by_row: ClassVar[bool] = True
    clients: int | None = Field(default=None, ge=1, description="number of clients (None: all clients of the source)")
    per_client: int | None = Field(
        default=None, ge=1, description="number of natural clients that form one client (FLAME on FEMNIST: 338)"
    )
    shuffle: bool = Field(
        default=True,
        description="draw the natural clients of a group at random (false: take consecutive ones, as in FLAME's code)",
    )

    def draw(self, pool: Pool, seed: int) -> Draw:
        """Assign whole natural clients to clients."""
        data = pool.data
        if data.users is None:
            have = f"its columns: {', '.join(data.columns)}" if data.columns else "it has no columns either"
            raise PartitionError(
                f"natural: {data.name} has no natural clients. Use kind by-column ({have}) or a different partition"
            )
        return _draw_by_level(self, pool, data.users.numpy(), data.user_names, seed)


class ByColumn(Partition):
    """Clients defined by the values of a column, such as education, occupation or writer (feature skew)."""

    kind: ClassVar[str] = "by-column"
    purpose: ClassVar[str] = "column"
    by_row: ClassVar[bool] = True
    column: str = Field(description="name of the column whose values define the clients")
    clients: int | None = Field(default=None, ge=1, description="number of clients (None: one per column value)")
    per_client: int | None = Field(default=None, ge=1, description="number of column values per client")
    shuffle: bool = Field(
        default=True, description="draw each client's column values at random (false: take consecutive values)"
    )

    def draw(self, pool: Pool, seed: int) -> Draw:
        """Assign all samples with the same value to the same client."""
        data = pool.data
        if self.column not in data.columns:
            raise PartitionError(
                f"by-column: {data.name} has no column {self.column!r}; {suggest_nearest(self.column, data.columns)}"
            )
        return _draw_by_level(self, pool, data.columns[self.column].numpy(), data.levels[self.column], seed)


_LEVEL_NOUNS = {"natural": "natural clients", "by-column": "values of the column"}


def _draw_by_level(part: Natural | ByColumn, pool: Pool, codes: Ints, names: tuple[str, ...], seed: int) -> Draw:
    counts, design = np.bincount(codes[pool.index], minlength=len(names)), pool.data.design
    if design is not None and design.subject is not None:
        counts = design.counts(codes[pool.index], pool.index, len(names))
    levels = np.flatnonzero(counts >= part.min_size)
    notes: list[str] = []
    if small := int(((np.bincount(codes, minlength=len(names)) > 0) & (counts < part.min_size)).sum()):
        what = "no training sample" if part.min_size == 1 else f"fewer than {part.min_size} samples"
        notes.append(f"{small} of {len(names)} {_LEVEL_NOUNS[part.kind]} have {what} and are left out")
    each = part.per_client or (1 if part.clients is None else None)
    n = part.clients or len(levels) // (each or 1)
    if n == 0 or n * (each or 1) > len(levels):
        raise PartitionError(
            f"{part.kind}: {max(n, 1)} clients with {each or 1} values each need "
            f"{max(n, 1) * (each or 1)} values, but {pool.data.name} has only {len(levels)} values "
            f"with at least {part.min_size} samples. Use fewer clients or fewer values per client"
        )
    if part.shuffle and (n != len(levels)):
        levels = numpy_generator(seed, purpose=part.purpose).permutation(levels)
    if not part.shuffle and n == len(levels):
        notes.append(
            f"{part.kind}: shuffle = false has no effect, because every client has one of the {_LEVEL_NOUNS[part.kind]}"
        )
    group = np.repeat(np.arange(n), split_evenly(len(levels), n)) if each is None else np.repeat(np.arange(n), each)
    if len(group) < len(levels):
        notes.append(f"{len(levels) - len(group)} of {len(levels)} {_LEVEL_NOUNS[part.kind]} belong to no client")
    client = np.full(len(names), n)
    client[levels[: len(group)]] = group
    label = tuple(names[level] for level in levels) if n == len(levels) else ()
    test = _deal_samples_by_code(pool.data.test.numpy(), codes, client, n) if pool.data.test is not None else None
    official = test if part.test_from == "clients" else None
    return Draw(_deal_samples_by_code(pool.index, codes, client, n), test=official, names=label, notes=tuple(notes))


def _deal_samples_by_code(index: Ints, codes: Ints, client: Ints, n: int) -> Dealt:
    owner = client[codes[index]]
    return group_by_owner(index[owner < n], owner[owner < n], n)


class Clusters(Partition):
    """Planted clusters: blocks of classes that are assigned to blocks of clients (Equitable-FL, Table 1 and section 5).

    Cluster k consists of the next ``classes[k]`` classes and the next ``sizes[k]`` clients. Within a cluster, each
    client has ``per_class[k]`` samples of each of the cluster's classes.
    """

    kind: ClassVar[str] = "clusters"
    classes: tuple[int, ...] = Field(
        default=(4, 6), min_length=1, description="number of classes in each cluster (MNIST: 4, 6)"
    )
    sizes: tuple[int, ...] = Field(
        default=(4, 6), min_length=1, description="number of clients in each cluster (MNIST: 4, 6)"
    )
    per_class: int | tuple[int, ...] | None = Field(
        default=None,
        description="number of samples per class and client (MNIST: 800; CIFAR-100: 220, 160, 100). None: even shares",
    )

    @model_validator(mode="after")
    def _lists_fit(self) -> Clusters:
        if len(self.classes) != len(self.sizes) or min(self.classes) < 1 or min(self.sizes) < 1:
            raise ValueError(f"classes {self.classes} and sizes {self.sizes} must be positive and have equal lengths")
        if isinstance(self.per_class, tuple) and len(self.per_class) != len(self.sizes):
            raise ValueError(f"per_class {self.per_class} must be one number, or one per cluster ({len(self.sizes)})")
        return self

    def draw(self, pool: Pool, seed: int) -> Draw:
        """Assign blocks of classes to blocks of clients."""
        data, n = pool.data, sum(self.sizes)
        lists = pool.group_by_class(self.kind, numpy_generator(seed, purpose="clusters"))
        if sum(self.classes) > len(lists):
            raise PartitionError(
                f"clusters: needs {sum(self.classes)} classes, but {data.name} has {len(lists)}. Use fewer classes"
            )
        counts = np.zeros((n, len(lists)), np.int64)
        groups = np.repeat(np.arange(len(self.sizes)), self.sizes)
        block = np.repeat(np.arange(len(self.classes)), self.classes)
        for c, k in enumerate(block.tolist()):
            size, held = self.sizes[k], len(lists[c])
            wanted = self.per_class[k] if isinstance(self.per_class, tuple) else self.per_class
            each = held // size if wanted is None else wanted
            if each < 1 or each * size > held:
                raise PartitionError(
                    f"clusters: needs {size} clients with {max(each, 1)} samples of class "
                    f"{data.classes[c]!r}, but {data.name} has {held}. Lower `per_class` or `sizes`"
                )
            counts[groups == k, c] = each
        return Draw(deal(lists, counts), groups=groups)
