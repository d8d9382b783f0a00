"""Partitions that modify or combine others (mixed, feature noise, swapped labels, rotation), and a list of kinds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedloom.data.partitions._base import Partition, Sized
from fedloom.data.partitions.deal import Dealt, Ints
from fedloom.data.partitions.groups import ByColumn, Clusters, Natural
from fedloom.data.partitions.pools import Draw, Pool
from fedloom.data.partitions.skew import Dirichlet, FemnistFedProx, Iid, QuantitySkew, Shards
from fedloom.errors import ConfigError, PartitionError, Refused
from fedloom.seeds import derive, numpy_generator
from fedloom.values import choose

NestedPartition = Annotated[
    dict[str, Any],
    Field(
        default_factory=lambda: {"kind": "iid"},
        description="partition to change: a table with a `kind`",
    ),
]


class FeatureNoise(Sized):
    """Noise that increases with the client's number (NIID-Bench, section 4.2; FLAME "Gau(0.1)").

    Gaussian noise with variance sigma * i / m is added to each feature (for pixels in [0, 1]) of client i = 1..m, in
    all its parts.
    """

    kind: ClassVar[str] = "feature-noise"
    sigma: float = Field(default=0.1, ge=0, description="noise level of the last client (FLAME, Table III: 0.1)")
    sigma_unit: Literal["variance", "std"] = Field(
        default="variance",
        description=(
            "meaning of sigma for client i of m. variance: noise variance sigma * i / m, with i from "
            "1 (paper). std: noise deviation sigma * i / m in features that are normalized by the "
            "data set's std, with i from 0 (FLAME's code)"
        ),
    )
    noise_draws: Literal["per-sample", "per-batch"] = Field(
        default="per-sample",
        description=(
            "frequency of the noise draws. per-sample: once per sample. per-batch: once per batch in "
            "each step, as in FLAME's code. Validation and test samples then have fixed noise, and passes over a "
            "whole training set use no noise"
        ),
    )
    base: dict[str, Any] = Field(
        default_factory=lambda: {"kind": "iid"},
        description="partition whose samples get the noise, as a table with the key `kind` (FLAME's code: "
        "{kind = 'iid', shuffle = false})",
    )

    def draw(self, pool: Pool, seed: int) -> Draw:
        """Draw the clients of the base partition, and assign noise to each client."""
        drawn = make_nested_partition(self.kind, self.base, self.clients, self.min_size).draw(pool, seed)
        m = len(drawn.dealt.offsets) - 1
        if self.sigma_unit == "variance":
            noise = np.sqrt(self.sigma * np.arange(1, m + 1) / m)[:, None]
        else:
            unit = np.ones(1) if pool.data.std is None else pool.data.std.numpy()
            noise = np.outer(self.sigma * np.arange(m) / m, unit)
        return drawn._replace(noise=noise, anew=np.full(m, self.noise_draws == "per-batch"))


class LabelSwap(Sized):
    """Concept skew: the same features have different classes in different groups of clients.

    The clients form `groups` blocks. Clients in the first block keep their classes. In each other block, a random
    permutation of the classes applies to all parts of the clients. The common test set keeps the true classes.
    """

    kind: ClassVar[str] = "label-swap"
    groups: int = Field(default=2, ge=1, description="number of groups (if not set: at most the number of clients)")
    base: NestedPartition

    def draw(self, pool: Pool, seed: int) -> Draw:
        """Draw the clients of the base partition, and the permutation of classes for each group."""
        pool.labels(self.kind)
        classes, rng = len(pool.data.classes), numpy_generator(seed, purpose="concept")
        drawn = make_nested_partition(self.kind, self.base, self.clients, self.min_size).draw(pool, seed)
        n = len(drawn.dealt.offsets) - 1
        most, count, notes = min(n, math.factorial(min(classes, 12))), self.groups, drawn.notes
        if count > most and "groups" not in self.model_fields_set:
            count, notes = most, (*notes, f"label-swap: groups = {most}, because {n} clients do not allow more")
        if count > most:
            raise PartitionError(
                f"label-swap: {count} groups are too many for {n} clients and {classes} classes. Use fewer groups"
            )
        tables = [tuple(range(classes))]
        while len(tables) < count:
            table = tuple(rng.permutation(classes).tolist())
            if table not in tables:
                tables.append(table)
        groups = np.arange(n) * count // n
        return drawn._replace(relabel=np.array(tables)[groups], groups=groups, notes=notes)


class Rotated(Sized):
    """Feature skew: the clients' images are rotated and inverted (as in IFCA's Rotated MNIST).

    The clients form one block for each view: first all rotations, then all rotations of inverted images. Clients in the
    first block have unchanged images. All parts of a client have the same view. The images in the common test set are
    unchanged.
    """

    kind: ClassVar[str] = "rotated"
    turns: int = Field(
        default=4,
        ge=1,
        le=4,
        description=(
            "number of orientations: 1 is upright only, 2 adds 180 degrees, 4 covers all quarter "
            "turns (default: as many as the number of clients and the image shape allow)"
        ),
    )
    inverted: bool = Field(default=False, description="add a copy of every orientation with inverted brightness")
    base: NestedPartition

    def draw(self, pool: Pool, seed: int) -> Draw:
        """Draw the clients of the base partition, and set the view for each group."""
        shape, name = pool.data.shape, pool.data.name
        if len(shape) != 3 or pool.data.vocabulary:
            raise Refused(
                f"rotated needs images of shape [channels, height, width], but the samples of {name} have "
                f"shape {[*shape]}"
            )
        drawn = make_nested_partition(self.kind, self.base, self.clients, self.min_size).draw(pool, seed)
        n, count, notes = len(drawn.dealt.offsets) - 1, self.turns, drawn.notes
        if "turns" not in self.model_fields_set:
            count = min(count, max(n // (1 + self.inverted), 1), 4 if shape[1] == shape[2] else 2)
        if count < self.turns:
            notes = (
                *notes,
                f"rotated: turns = {count}, because the number of clients or the shape of the images allows no more",
            )
        if count > 2 and shape[1] != shape[2]:
            raise Refused(
                f"rotated: {count} turns need square images, but the images of {name} are {shape[1]} x {shape[2]}"
            )
        turns = np.array({1: [0], 2: [0, 2], 3: [0, 1, 2], 4: [0, 1, 2, 3]}[count])
        views = np.stack([np.tile(turns, 1 + self.inverted), np.repeat([0, 1][: 1 + self.inverted], len(turns))], 1)
        if len(views) > n:
            raise PartitionError(
                f"rotated: {len(views)} views need at least as many clients, got {n} clients. Use fewer turns"
            )
        groups = np.arange(n) * len(views) // n
        return drawn._replace(views=views[groups], groups=groups, notes=notes)


class MixedSkew(Sized):
    """Two kinds of skew in one federation (FLAME, section V-A: half the clients # label = 2, half quantity Dir(0.5)).

    The first round(ratio * clients) clients come from `first_partition`, and the others from `second_partition`. Each
    partition divides a separate random part of the samples.
    """

    kind: ClassVar[str] = "mixed"
    aliases: ClassVar[Mapping[str, str]] = {"beta": "alpha"}
    clients: int = Field(default=10, ge=2, description="number of clients")
    ratio: float = Field(default=0.5, gt=0, lt=1, description="fraction of clients in the first partition")
    labels_per_client: int = Field(
        default=2,
        ge=1,
        description="number of labels per client in the first partition (default: as in this partition)",
    )
    alpha: float = Field(
        default=0.5,
        gt=0,
        description="concentration parameter of the second partition (default: as in this partition)",
    )
    first_partition: dict[str, Any] | None = Field(
        default=None, description="first partition: a table with a `kind` (None: shards)"
    )
    second_partition: dict[str, Any] | None = Field(
        default=None, description="second partition: a table with a `kind` (None: quantity-skew)"
    )
    overlap: bool = Field(
        default=False,
        description="let both partitions draw from all samples, and let quantity-skew clients share samples "
        "(FLAME's code)",
    )

    @model_validator(mode="after")
    def _tables_fit(self) -> MixedSkew:
        for short, long in (("labels_per_client", "first_partition"), ("alpha", "second_partition")):
            if getattr(self, long) is not None and short in self.model_fields_set:
                raise ValueError(
                    f"{short} is an option of the default {long}, but {long} is set. Move {short} into {long}"
                )
        self._halves()
        return self

    def _halves(self) -> tuple[Partition, Partition]:
        k = round(self.ratio * self.clients)
        if not 0 < k < self.clients:
            raise ValueError(
                f"with ratio {self.ratio}, one of the two partitions of {self.clients} clients has no client"
            )
        assignment = "flame" if self.overlap else "labels"
        first = self.first_partition or {
            "kind": "shards", "labels_per_client": self.labels_per_client, "assignment": assignment
        }  # fmt: skip
        second = self.second_partition or {"kind": "quantity-skew", "alpha": self.alpha, "overlap": self.overlap}
        return (
            make_nested_partition("mixed.first_partition", first, k, self.min_size),
            make_nested_partition("mixed.second_partition", second, self.clients - k, self.min_size),
        )

    def draw(self, pool: Pool, seed: int) -> Draw:
        """Draw the clients of both partitions, and return them one after another."""
        self.fits(pool)
        first, second = self._halves()
        k = round(self.ratio * self.clients)
        pools = (pool, pool)
        if not self.overlap:
            order = numpy_generator(seed, purpose="hybrid").permutation(len(pool))
            share = len(pool) * k // self.clients
            pools = (_select_from_pool(pool, np.sort(order[:share])), _select_from_pool(pool, np.sort(order[share:])))
        draws = [
            part.draw(p, derive(seed, purpose=("hybrid", j)))
            for j, (part, p) in enumerate(zip((first, second), pools, strict=True))
        ]
        return _join_draws(draws, len(pool.data.classes))


def _select_from_pool(pool: Pool, chosen: Ints) -> Pool:
    return Pool(pool.data, pool.index[chosen], None if pool.y is None else pool.y[chosen])


def _join_draws(draws: list[Draw], classes: int) -> Draw:
    """Concatenate draws. If a draw has no noise, views or permuted classes, neutral values are used for its clients."""
    sizes = [len(draw.dealt.offsets) - 1 for draw in draws]
    index = np.concatenate([draw.dealt.index for draw in draws])
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(draw.dealt.offsets) for draw in draws]))])
    channels = max((d.noise.shape[1] for d in draws if d.noise is not None), default=1)

    def joint(values: list[Any], none: NDArray[Any]) -> Any:
        """Concatenate the values of all draws, with one row per client. Draws without values contribute `none`.

        Return None if no draw has values.
        """
        rows = [np.broadcast_to(none if v is None else v, (n, *none.shape)) for v, n in zip(values, sizes, strict=True)]
        return np.concatenate(rows) if any(v is not None for v in values) else None

    return Draw(
        Dealt(index, offsets),
        noise=joint([d.noise for d in draws], np.zeros(channels)),
        anew=joint([d.anew for d in draws], np.array(False)),
        relabel=joint([d.relabel for d in draws], np.arange(classes)),
        views=joint([d.views for d in draws], np.zeros(2, np.int64)),
        groups=np.repeat(np.arange(len(draws)), sizes),
        notes=tuple(note for draw in draws for note in draw.notes),
    )


PARTITIONS: dict[str, type[Partition]] = {
    "clusters": Clusters,
    "by-column": ByColumn,
    "label-swap": LabelSwap,
    "dirichlet": Dirichlet,
    "femnist-fedprox": FemnistFedProx,
    "mixed": MixedSkew,
    "iid": Iid,
    "feature-noise": FeatureNoise,
    "quantity-skew": QuantitySkew,
    "rotated": Rotated,
    "shards": Shards,
    "natural": Natural,
}

OUTER_FIELDS = tuple(Partition.model_fields)
"""Options that apply to the federation as a whole. If a partition is nested in another partition, it must not set
them."""


def make_nested_partition(where: str, table: Mapping[str, object], clients: int, min_size: int) -> Partition:
    """Return the partition that a table ``{kind = ..., ...}`` defines for a subset of the clients.

    Raises:
        ConfigError: the kind is missing or unknown, or an option that applies only to the whole federation is given.
    """
    fields = dict(table)
    kind = choose("partition", PARTITIONS, fields.pop("kind", None), where)
    if kind is Clusters:
        raise Refused(
            f"{where}: clusters defines its own clients and cannot be combined with other partitions. Use "
            "clusters alone"
        )
    extra = [name for name in fields if name in OUTER_FIELDS or name == "clients"]
    if extra:
        raise ConfigError(f"{where}: {', '.join(extra)} belongs to the partition itself, not to the table inside it")
    return kind(**{**fields, "clients": clients, "min_size": min_size})
