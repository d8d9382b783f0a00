"""The base of partitions: common fields, the pool of samples, and the way from a draw to a federation."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedloom.data.dataset import Dataset, on_cpu
from fedloom.data.federation import Federation, Split
from fedloom.data.partition.changes import add_noise, prepared, relabelled, viewed
from fedloom.data.partition.deal import Dealt, Ints, choose_each, distinct, joined, owners, round_to_total
from fedloom.data.partition.parts import check_dealt, cut_parts
from fedloom.errors import ConfigError, DataError, PartitionError, Refused, attribute_error
from fedloom.seeds import numpy_generator
from fedloom.values import Value


class Pool(NamedTuple):
    """The samples that a partition may give away.

    Attributes:
        data: the whole data set.
        index: positions in the data set ``[k]`` int64, all but those of the official test set.
        y: class of each ``[k]``; None for a regression or labels per position.
    """

    data: Dataset
    index: Ints  # type: ignore[assignment]
    y: Ints | None

    @classmethod
    def of(cls, data: Dataset, index: Ints) -> Pool:
        """The samples at these positions."""
        return cls(data, index, None if data.labels is None else data.labels.numpy()[index])

    def __len__(self) -> int:
        return len(self.index)

    def labels(self, kind: str) -> Ints:
        """The classes, for a partition that cannot do without.

        Raises:
            Refused: a regression, or a label per position.
        """
        if self.y is None:
            what = "has a label per position" if self.data.each else f"is a {self.data.task}"
            raise Refused(
                f"{kind} splits by class, but {self.data.name} {what}; use iid, quantity, column, or writers where the "
                "data come by client"
            )
        return self.y

    def by_class(self, kind: str, rng: np.random.Generator) -> list[Ints]:
        """Positions in the data set of every class, each list in random order."""
        labels, order = self.labels(kind), rng.permutation(len(self))
        order = order[np.argsort(labels[order], kind="stable")]
        counts = np.bincount(labels, minlength=len(self.data.classes))
        return np.split(self.index[order], np.cumsum(counts)[:-1])


class Draw(NamedTuple):
    """What a partition decides, for n clients.

    Attributes:
        dealt: samples of every client, from which its parts are cut.
        test: samples of every client's test part, where the partition chooses it. The fraction ``test`` then has no
            effect, and these samples are changed, scaled and encoded as those of ``dealt`` are.
        noise: standard deviation of Gaussian noise on each client's features, ``[n, 1]``, or by channel ``[n, c]``.
        anew: whether every step draws a client's noise anew ``[n]``.
        relabel: new class of every class at every client, ``[n, C]``.
        views: quarter turns of a client's images, and whether they are inverted, ``[n, 2]``.
        groups: planted group of every client ``[n]``.
        names: name of every client; their numbers if empty.
        notes: sentences for the report.
    """

    dealt: Dealt
    test: Dealt | None = None
    noise: NDArray[np.float64] | None = None
    anew: NDArray[np.bool_] | None = None
    relabel: Ints | None = None
    views: Ints | None = None
    groups: Ints | None = None
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Partition(Value):
    """Cuts a data set into clients: ``partition(data, seed) -> Federation``.

    Small clients fill train, test and validation in that order, and a class never leaves a client's training part for
    its test part altogether: the first sample of each class stays in training.
    """

    kind: ClassVar[str]
    test: float = Field(default=0.2, ge=0, lt=1, description="fraction of a client's samples for its test part (FLAME)")
    validation: float = Field(default=0.1, ge=0, lt=1, description="fraction of a client's samples for validation")
    test_from: Literal["own", "ratio", "users"] = Field(
        default="own",
        description="own: the fraction `test` of the client's samples; ratio: test_count samples of the official test"
        " set with the client's training label ratio (FedSLR, section 5.1); users: the official test samples of the"
        " client's own users (LEAF)",
    )
    test_count: int = Field(
        default=100, ge=1, description="test samples per client when test_from is ratio (FedSLR: 100)"
    )
    folds: int | None = Field(
        default=None, ge=2, description="cross-validation: seed s tests on fold s mod folds of the split of s div folds"
    )
    keep: int | None = Field(default=None, ge=1, description="training samples kept per client (FedACS, Table 2: 50)")
    min_size: int = Field(default=1, ge=1, description="samples that every client must get")
    pool: bool = Field(
        default=False, description="pool the official training and test sets, then cut; else the test set stays common"
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Partition:
        if self.test + self.validation >= 1:
            raise ValueError(f"test + validation must be < 1 to leave training data, got {self.test + self.validation}")
        if self.pool and self.test_from != "own":
            raise ValueError(f"test_from = {self.test_from!r} needs the official test set, but pool = true mixes it in")
        if self.folds is not None and self.test_from != "own":
            raise ValueError(
                f"folds cut the client's own samples, but test_from is {self.test_from!r}; drop one of them"
            )
        return self

    @abstractmethod
    def draw(self, pool: Pool, seed: int) -> Draw:
        """Who gets which samples; everything random comes from `seed`.

        Raises:
            PartitionError: the data cannot be split in this way; the message has the numbers.
            Refused: the data have no classes, or are no images, where the kind needs them.
        """
        ...

    @on_cpu()
    def __call__(self, data: object, seed: int = 0) -> Federation:
        """The federation of this partition.

        Args:
            data: a `Dataset`, or what `Dataset.of` makes one of: arrays, tensors, torch, Hugging
                Face and pandas data sets.
            seed: everything random comes from it.

        Raises:
            ConfigError: a seed that is no integer.
            PartitionError: more clients than samples, more labels than classes, or a client below `min_size`.
            Refused: a partition by class of a data set without classes.
            DataError: data that cannot be read, or a table whose target is the same in every row.
        """
        data = Dataset.of(data)
        if not isinstance(seed, (int, np.integer)):
            raise ConfigError(f"seed must be a whole number, got {seed!r:.60}")
        seed_of_draw, fold = (seed, None) if self.folds is None else divmod(seed, self.folds)
        pool = self.pool_of(data)
        with attribute_error("partition", self, f"draw, seed {seed}"):
            draw = self.draw(pool, seed_of_draw)
            check_dealt(draw.dealt, draw.test, len(data))
        held = draw.dealt if draw.test is None else joined(draw.dealt, draw.test)
        self._check(draw, held, data)
        y = None if data.labels is None else data.labels.numpy()
        own_test_share = 0.0 if self.test_from != "own" or draw.test is not None else self.test
        rng = numpy_generator(seed_of_draw, purpose="parts")
        cut = cut_parts(draw.dealt, y, own_test_share, self.validation, self.keep, self.folds, fold, rng)
        if self.test_from == "ratio":
            cut["test"] = self._matched(data, cut["train"], seed_of_draw)
        elif draw.test is not None:
            cut["test"] = draw.test
        if draw.relabel is not None:
            data = relabelled(data, held, draw.relabel)
        if draw.views is not None:
            data = viewed(data, held, draw.views)
        if data.prepare is not None:
            data = prepared(data, held, cut["train"], pool=self.pool)
        noise = None
        if draw.noise is not None:
            later = cut["train"].index
            later = later[:0] if draw.anew is None else later[draw.anew[owners(cut["train"])]]
            data, noise = add_noise(data, held, draw.noise, seed_of_draw, torch.from_numpy(later))
        names = draw.names or tuple(str(i) for i in range(len(draw.dealt.offsets) - 1))
        return Federation(
            data,
            {part: Split(torch.from_numpy(d.index), torch.from_numpy(d.offsets)) for part, d in cut.items()},
            names,
            test=None if self.pool else data.test,
            partition={"kind": self.kind, **self.model_dump(exclude_defaults=True)},
            seed=seed,
            groups=None if draw.groups is None else torch.from_numpy(draw.groups),
            noise=noise,
            notes=(
                *data.notes,
                *draw.notes,
                *self._without_effect(draw),
                *_unused(held, pool),
                *_notes(cut, y, names, data.classes, len(data)),
            ),
        )

    def pool_of(self, data: Dataset) -> Pool:
        """The samples to give away: all but the official test set, or all with ``pool = true``."""
        mask = np.ones(len(data), bool)
        if data.test is not None and not self.pool:
            mask[data.test.numpy()] = False
        return Pool.of(data, np.flatnonzero(mask))

    def _without_effect(self, draw: Draw) -> list[str]:
        """The note on a share for test parts that the partition itself gives."""
        if draw.test is None or self.test_from != "own" or "test" not in self.model_fields_set:
            return []
        return [f"{self.kind}: test = {self.test:g} has no effect, because the partition gives the test parts itself"]

    def _check(self, draw: Draw, held: Dealt, data: Dataset) -> None:
        sizes = np.diff(draw.dealt.offsets)
        if len(sizes) == 0 or sizes.min() < self.min_size:
            who = f"client {sizes.argmin()} gets {sizes.min()} samples" if len(sizes) else "there are no clients"
            raise PartitionError(f"{self.kind}: {who} of {data.name}, min_size is {self.min_size}; use fewer clients")
        looked_at = data.prepare is not None or len(data.classes) == 1
        if looked_at and len(sizes) > 1 and bool((data.y == data.y[0]).all()):
            raise DataError(f"{data.name}: the target is the same in every row; nothing can be learned from it")
        if self.test_from != "own" and data.test is None:
            raise PartitionError(
                f"{self.kind}: test_from = {self.test_from!r}, but {data.name} has no official test set"
            )
        if self.test_from == "users" and draw.test is None:
            raise PartitionError(f"{self.kind}: test_from = 'users' works with writers and column only; use 'ratio'")
        changes = any(change is not None for change in (draw.noise, draw.relabel, draw.views))
        if self.test_from != "own" and changes:
            raise Refused(
                f"{self.kind}: changes a client's samples, official test samples would not fit; use test_from = 'own'"
            )
        if draw.test is not None and (self.folds is not None or self.test_from == "ratio"):
            option = f"folds = {self.folds}" if self.folds is not None else "test_from = 'ratio'"
            raise PartitionError(f"{self.kind}: gives the test parts itself, so {option} cannot; leave it out")
        if (changes or data.prepare is not None) and distinct(held.index, len(data)) < len(held.index):
            cure = "set overlap = false" if draw.test is None else "give every sample to one client, and to one part"
            raise Refused(f"{self.kind}: overlapping clients would need two versions of one sample; {cure}")

    def _matched(self, data: Dataset, train: Dealt, seed: int) -> Dealt:
        """For every client `test_count` official test samples in the label ratio of its training part."""
        assert data.test is not None
        rng = numpy_generator(seed, purpose="matched test")
        lists, n = Pool.of(data, data.test.numpy()).by_class(self.kind, rng), len(train.offsets) - 1
        cells = owners(train) * len(lists) + data.y.numpy()[train.index]
        counts = np.bincount(cells, minlength=n * len(lists)).reshape(n, -1)
        wanted = round_to_total(counts / counts.sum(1, keepdims=True), self.test_count)
        held = np.array([len(samples) for samples in lists])
        if (wanted > held).any():
            c = int((wanted - held).max(0).argmax())
            raise PartitionError(
                f"{self.kind}: test_count = {self.test_count} needs {wanted[:, c].max()} test samples of class "
                f"{data.classes[c]!r}, {data.name} has {held[c]}; lower test_count"
            )
        return choose_each(lists, wanted, rng)


class Sized(Partition):
    """A partition whose number of clients is chosen."""

    clients: int = Field(default=10, ge=1, description="number of clients")

    def fits(self, pool: Pool) -> None:
        """Refuses more clients than the samples can serve.

        Raises:
            PartitionError: some client would have fewer than `min_size`.
        """
        if self.clients * self.min_size > len(pool):
            raise PartitionError(
                f"{self.kind}: {self.clients} clients of at least {self.min_size} samples, but {pool.data.name} has "
                f"{len(pool)} to give; use fewer clients or a smaller min_size"
            )


def _unused(held: Dealt, pool: Pool) -> list[str]:
    is_held = np.zeros(len(pool.data), bool)
    is_held[held.index] = True
    left = int((~is_held[pool.index]).sum())
    return [f"{left} of {len(pool)} samples belong to no client"] if left else []


def _notes(
    cut: dict[str, Dealt], y: Ints | None, names: tuple[str, ...], classes: tuple[str, ...], samples: int
) -> list[str]:
    notes = [
        f"{count} client{' has' if count == 1 else 's have'} no {part} part"
        for part in ("validation", "test")
        if (count := int((np.diff(cut[part].offsets) == 0).sum()))
    ]
    if y is not None:
        absent = np.flatnonzero(np.bincount(y[y >= 0], minlength=len(classes)) == 0)
        if len(absent):
            absent_names = ", ".join(repr(classes[c]) for c in absent[:8]) + (", ..." if len(absent) > 8 else "")
            notes.append(
                f"the data have no sample of {len(absent)} of their {len(classes)} classes ({absent_names}), for which "
                "the model has outputs all the same: number the labels from 0 without gaps, if that was not meant"
            )
        cells = [owners(cut[part]) * len(classes) + y[cut[part].index] for part in ("train", "test")]
        unknown, counts = np.unique(cells[1][~np.isin(cells[1], cells[0])], return_counts=True)
        if len(unknown):
            who, c = divmod(int(unknown[0]), len(classes))
            notes.append(
                f"clients tested on a class that they have no training sample of: "
                f"{len(np.unique(unknown // len(classes)))} (first: client {names[who]!r}, {counts[0]} test samples of "
                f"class {classes[c]!r}); a "
                "personal model cannot learn it: use test_from = 'own' or 'ratio', or a larger keep, if that matters"
            )
    held = np.concatenate([dealt.index for dealt in cut.values()])
    shared = len(held) - distinct(held, samples)
    if shared:
        notes.append(f"clients overlap: {shared} of {len(held)} places are taken by samples that another place has too")
    return notes
