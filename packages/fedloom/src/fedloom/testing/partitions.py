"""Laws of partitions: the permitted content of a draw, and the samples used to prepare a client's samples."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from fedloom.data.dataset import Dataset, default_to_cpu
from fedloom.data.federation import DATA_PARTS, Federation
from fedloom.data.partitions import Draw, Partition, Pool
from fedloom.data.partitions.deal import Dealt
from fedloom.data.tables import Table, TableColumn
from fedloom.errors import ConfigError, PartitionError
from fedloom.seeds import generator, numpy_generator
from fedloom.testing.report import check_arguments, generators_untouched, hold
from fedloom.testing.scene import demand

SAMPLE_COUNT, TEST_SAMPLE_COUNT, DATA_CLASS_COUNT, USER_COUNT = 1200, 200, 10, 12
"""Sizes of the data in the laws. The built-in `clusters` needs this number of classes, with at least 100
samples each."""
PARTITION_SEED = 3


@dataclass(frozen=True)
class PartitionCase:
    """Input of a law: a partition, a data set, and an unchanged copy of the data set."""

    partition: Partition
    data: Dataset
    original: Dataset

    @classmethod
    def create(cls, partition: Partition, data: Dataset) -> PartitionCase:
        """Return a case whose data set the partition may change."""
        return cls(partition, replace(data, x=data.x.clone(), y=data.y.clone()), data)

    @cached_property
    def pool(self) -> Pool:
        """Pool of samples that the partition distributes when it is called."""
        return self.partition.pool_of(self.data)

    @cached_property
    def drawn(self) -> Draw:
        """Result of the partition's draw from this pool."""
        return self.partition.draw(self.pool, PARTITION_SEED)

    @cached_property
    def fed(self) -> Federation:
        """Federation that results from the same seed."""
        return self.partition(self.data, PARTITION_SEED)


def _runs(s: PartitionCase) -> None:
    """Check that the partition distributes samples to clients, and that a federation can be built from the result."""
    demand(isinstance(s.drawn, Draw), f"draw must return fl.partitions.Draw, got {type(s.drawn).__name__}")
    demand(s.fed.n > 0, "there are no clients")


def declared(s: PartitionCase) -> None:
    """Check that each field of a draw contains one entry per client, of the documented type."""
    drawn, n, classes = s.drawn, len(s.drawn.dealt.offsets) - 1, len(s.data.classes)
    for name, dealt in _lists(drawn).items():
        for what, values in zip(("index", "offsets"), dealt, strict=True):
            kind = getattr(values, "dtype", type(values))
            demand(kind == np.int64, f"{name}.{what} must be a numpy array of int64, got {kind}")
    shapes = {"noise": (n, None), "anew": (n,), "relabel": (n, classes), "views": (n, 2), "groups": (n,)}
    for name, shape in shapes.items():
        values = getattr(drawn, name)
        if values is not None:
            fits = len(np.shape(values)) == len(shape) and all(
                want in (None, got) for got, want in zip(np.shape(values), shape, strict=True)
            )
            demand(fits, f"{name} must have an entry for each of the {n} clients, got shape {[*np.shape(values)]}")
    if drawn.names:
        demand(len(set(drawn.names)) == n, f"names must be {n} different names, got {len(set(drawn.names))}")
    demand(all(isinstance(note, str) for note in drawn.notes), "notes must be sentences")


def pool_only(s: PartitionCase) -> None:
    """Check that training samples come from the given pool, even if the pool is only a part of the data set.

    Samples for testing may also come from the official test set.
    """
    half = numpy_generator(PARTITION_SEED, purpose="half").random(len(s.pool)) < 0.5
    some = Pool(s.data, s.pool.index[half], None if s.pool.y is None else s.pool.y[half])
    pools = [("the pool", s.pool, s.drawn)]
    with suppress(PartitionError):  # too few samples for this partition
        pools.append(("a pool of half the samples", some, s.partition.draw(some, PARTITION_SEED)))
    official = np.zeros(0, np.int64) if s.data.test is None else s.data.test.numpy()
    for what, pool, drawn in pools:
        for name, dealt in _lists(drawn).items():
            allowed = pool.index if name == "dealt" else np.concatenate([pool.index, official])
            strange = dealt.index[~np.isin(dealt.index, allowed)]
            demand(
                not len(strange),
                f"{name} contains {len(strange)} samples that are not in {what} (first: {strange[:1].tolist()})",
            )


def disjoint(s: PartitionCase) -> None:
    """Check that no sample belongs to two clients."""
    for name, dealt in _lists(s.drawn).items():
        samples, counts = np.unique(dealt.index, return_counts=True)
        twice = samples[counts > 1]
        demand(not len(twice), f"{name} contains {len(twice)} samples more than once (first: {twice[:1].tolist()})")


def tested_apart(s: PartitionCase) -> None:
    """Check that no client trains on a sample from its test split."""
    trained, tested = (s.fed.parts[part].index for part in ("train", "test"))
    both = tested[torch.isin(tested, trained)]
    demand(not len(both), f"{len(both)} test samples are also training samples (first: {both[:1].tolist()})")


def seeded(s: PartitionCase) -> None:
    """Check that equal seeds give equal draws, and that only the seed's generators are used.

    The partition itself must not change.
    """
    before = s.partition.model_dump()
    with generators_untouched():
        again = s.partition.draw(s.pool, PARTITION_SEED)
    copy = s.partition.with_().draw(s.pool, PARTITION_SEED)
    for what, other in (("a second draw with this seed", again), ("a partition with the same options and seed", copy)):
        for name, got, want in zip(Draw._fields, other, s.drawn, strict=True):
            demand(_same(got, want), f"{what} gives a different {name}")
    demand(s.partition.model_dump() == before, f"the partition changed from {before} to {s.partition.model_dump()}")


def _arguments_unmodified(s: PartitionCase) -> None:
    """Check that a draw does not change the pool or the data set."""
    data = replace(s.data, x=s.data.x.clone(), y=s.data.y.clone())
    pool = Pool(data, s.pool.index.copy(), None if s.pool.y is None else s.pool.y.copy())
    s.partition.draw(pool, PARTITION_SEED)
    for name, got, want in (
        ("pool.index", pool.index, s.pool.index),
        ("pool.y", pool.y, s.pool.y),
        ("the features", data.x.numpy(), s.original.x.numpy()),
        ("the targets", data.y.numpy(), s.original.y.numpy()),
    ):
        demand(_same(got, want), f"draw changed {name}")


def prepared(s: PartitionCase) -> None:
    """Check that every sample in a part exists, and that it is prepared with its client's training split."""
    for part in DATA_PARTS:
        x = s.fed.fetch(s.fed.parts[part].index)
        demand(s.data.vocabulary or x.isfinite().all(), f"the {part} part contains samples that are not finite")
    if not isinstance(s.data.prepare, Table) or any(v is not None for v in (s.drawn.noise, s.drawn.views)):
        return
    for client in range(s.fed.n):
        places = [s.fed.indices(part, client) for part in DATA_PARTS]
        rows = torch.cat(places)
        in_train = torch.arange(len(rows)) < len(places[0])
        raw = s.data.x[rows]
        want = s.data.prepare(raw, torch.zeros(len(rows), dtype=torch.long), in_train)
        worst = (s.fed.fetch(rows) - want).abs().max() if len(rows) else torch.zeros(())
        demand(
            worst <= 1e-5,  # float32, and a different summation order
            f"rows of client {client} are not scaled by the client's training part (difference {worst:.3g})",
        )


PARTITION_LAWS: dict[Callable[[Any], None], str] = {
    _runs: "repair this line",
    declared: "use int64 arrays, and give every field of Draw one entry per client",
    pool_only: "assign entries of pool.index, which are positions in the data set, not positions in the pool",
    disjoint: "assign every sample only once. If clients should overlap, omit this law: without=['disjoint']",
    tested_apart: "remove the samples of Draw.test from Draw.dealt",
    seeded: "draw from fl.seeds.numpy_generator(seed, purpose=...), and do not store anything on self",
    _arguments_unmodified: "copy before an in-place operation",
    prepared: "assign the samples of a test part to their clients in Draw.test, so that their clients scale them",
}
"""All laws of a partition, each with advice on how a violation is usually fixed."""


@default_to_cpu()
def check_partition(partition: Partition, data: object = None, without: Collection[str] = ()) -> None:
    """Check that a partition satisfies all laws, both on a table and on images with an official test set.

    Args:
        partition: the partition.
        data: data set that the partition accepts, or an argument of `fl.Dataset.create`. This data set is used instead
            of the built-in data. The built-in data have ten classes, twelve users, and the columns ``site`` and
            ``time``.
        without: names of laws that the partition violates on purpose.

    Raises:
        AssertionError: a law is violated. The message names the first such law, the partition, the problem and the
            usual fix. If the partition's code raised an error, the message contains the function, the error, the file
            and the line.
        ConfigError: the value is not a partition, it rejects every data set, or a name in ``without`` is not the name
            of a law.
    """
    check_arguments(partition, Partition, "fl.partitions.iid(clients=10)", PARTITION_LAWS, without)
    cases = _data() if data is None else {"the data": Dataset.create(data)}
    refusals = []
    for where, data_set in cases.items():
        case = PartitionCase.create(partition, data_set)
        try:
            _runs(case)
        except ConfigError as refusal:
            refusals.append(str(refusal))
            continue
        except Exception:
            hold({_runs: PARTITION_LAWS[_runs]}, case, partition, Partition, where=f" on {where}")
            raise
        hold(PARTITION_LAWS, case, partition, Partition, without, f" on {where}")
    if len(refusals) == len(cases):
        raise ConfigError(
            f"{partition!r} rejects every data set: {'; '.join(refusals)}. Pass a suitable data set as data="
        )


@cache
def _data() -> dict[str, Dataset]:
    """Return a table with missing cells, and images with an official test set."""
    rng, g = numpy_generator(0, purpose="laws of partitions"), generator(0, purpose="laws of partitions")
    users = torch.from_numpy(rng.permutation(np.arange(SAMPLE_COUNT) % USER_COUNT))
    common = {
        "classes": tuple(map(str, range(DATA_CLASS_COUNT))),
        "columns": {"site": users, "time": torch.arange(SAMPLE_COUNT)},
        "levels": {"site": tuple(f"site {k}" for k in range(USER_COUNT)), "time": tuple(map(str, range(SAMPLE_COUNT)))},
        "users": users,
        "user_names": tuple(f"site {k}" for k in range(USER_COUNT)),
    }
    y = torch.from_numpy(rng.permutation(np.arange(SAMPLE_COUNT) % DATA_CLASS_COUNT))
    numbers = torch.randn(SAMPLE_COUNT, 2, generator=g, dtype=torch.float64) * 10 + users[:, None]
    codes = torch.randint(3, (SAMPLE_COUNT, 1), generator=g).double()
    x = torch.cat([numbers, codes], 1)
    x[torch.rand(x.shape, generator=g) < 0.05] = torch.nan
    columns = (TableColumn(name="a", flag=True), TableColumn(name="b"), TableColumn(name="c", levels=3))
    images = torch.randint(256, (SAMPLE_COUNT, 1, 4, 4), generator=g, dtype=torch.uint8)
    official = torch.arange(SAMPLE_COUNT - TEST_SAMPLE_COUNT, SAMPLE_COUNT)
    return {
        "a table": Dataset("a table", x, y, prepare=Table(columns=columns), **common),  # type: ignore[arg-type]
        "images": Dataset("images", images, y, test=official, **common),  # type: ignore[arg-type]
    }


def _lists(drawn: Draw) -> dict[str, Dealt]:
    return {name: dealt for name, dealt in {"dealt": drawn.dealt, "test": drawn.test}.items() if dealt is not None}


def _same(got: object, want: object) -> bool:
    if isinstance(got, Dealt) and isinstance(want, Dealt):
        return all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    if isinstance(got, np.ndarray) and isinstance(want, np.ndarray):
        return np.array_equal(got, want, equal_nan=got.dtype.kind == "f")
    return type(got) is type(want) and bool(got == want)
