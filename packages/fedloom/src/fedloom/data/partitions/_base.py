"""Base class of partitions: common fields, the pool of samples, and the conversion of a draw to a federation."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedloom.data.dataset import Dataset, default_to_cpu
from fedloom.data.federation import Federation, Split
from fedloom.data.partitions.changes import add_noise, prepared, relabelled, viewed
from fedloom.data.partitions.deal import (
    Dealt,
    Ints,
    choose_each,
    concatenate_dealt,
    distinct,
    group_by_owner,
    owners,
    round_to_total,
)
from fedloom.data.partitions.parts import check_dealt, cut_parts
from fedloom.data.subjects.cut import Quota, whole_subjects
from fedloom.data.subjects.design import Design
from fedloom.data.subjects.equal import equal_rows, single_classes, untrained_levels
from fedloom.errors import ConfigError, DataError, PartitionError, Refused, attribute_error
from fedloom.seeds import numpy_generator
from fedloom.values import Value


class Pool(NamedTuple):
    """Samples that a partition may assign.

    Attributes:
        data: the complete data set.
        index: positions in the data set ``[k]`` int64, without the official test set. If the data have subjects, the
            index contains each subject's last row, which represents all its rows.
        y: class of each sample ``[k]``. None for a regression, or if there is a label per position.
    """

    data: Dataset
    index: Ints  # type: ignore[assignment]
    y: Ints | None

    @classmethod
    def create(cls, data: Dataset, index: Ints) -> Pool:
        """Select the samples at these positions."""
        return cls(data, index, None if data.labels is None else data.labels.numpy()[index])

    def __len__(self) -> int:
        return len(self.index)

    def labels(self, kind: str) -> Ints:
        """Return the classes, for a partition that needs classes.

        Raises:
            ConfigError: the task is a regression, or has a label per position.
        """
        if self.y is None:
            what = "has a label per position" if self.data.each else f"is a {self.data.task}"
            raise Refused(
                f"{kind} splits by class, but {self.data.name} {what}. Use iid, quantity-skew, "
                "by-column, or natural if the data have natural clients"
            )
        return self.y

    def group_by_class(self, kind: str, rng: np.random.Generator) -> list[Ints]:
        """Return the positions of the samples of each class in the data set, each list in random order."""
        labels, order = self.labels(kind), rng.permutation(len(self))
        order = order[np.argsort(labels[order], kind="stable")]
        counts = np.bincount(labels, minlength=len(self.data.classes))
        return np.split(self.index[order], np.cumsum(counts)[:-1])


class Draw(NamedTuple):
    """Result of a partition's draw for n clients.

    Attributes:
        dealt: samples of each client, from which its parts are cut.
        test: samples of each client's test part, if the partition determines it. In this case, the fraction ``test``
            has no effect. These samples are modified, scaled and encoded like the samples in ``dealt``.
        common: positions ``[k]`` int64 of a common test set, on which global models are evaluated. No client has these
            samples, and table columns are scaled there as for a new client. None: the data set's own test set.
        noise: standard deviation of Gaussian noise on each client's features, ``[n, 1]``, or per channel ``[n, c]``.
        anew: True for clients whose noise is drawn again in every step ``[n]``.
        relabel: new class of each class at each client, ``[n, C]``.
        views: number of quarter turns of a client's images, and 1 if the images are inverted, ``[n, 2]``.
        groups: planted group of each client ``[n]``.
        names: name of each client. By default, names are numbers.
        notes: sentences for the report.
    """

    dealt: Dealt
    test: Dealt | None = None
    common: Ints | None = None
    noise: NDArray[np.float64] | None = None
    anew: NDArray[np.bool_] | None = None
    relabel: Ints | None = None
    views: Ints | None = None
    groups: Ints | None = None
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def keep_trained(self, trains: NDArray[np.bool_]) -> Draw:
        """Return the draw restricted to the clients that train ``[n]``.

        The rows of the other clients become the common test set.
        """
        owner, n, dealt = owners(self.dealt), len(trains), self.dealt.index
        number, of = np.cumsum(trains) - 1, int(trains.sum())
        kept = {name: None if (v := getattr(self, name)) is None else v[trains] for name in PER_CLIENT}
        outside = dealt[~trains[owner]]
        shown = ", ".join(self.names[k] if self.names else str(k) for k in np.flatnonzero(~trains)[:8].tolist())
        note = (
            f"{n - of} of {n} clients have only test rows ({shown}). They do not train, and their "
            f"{len(outside)} rows are the common test set, on which global models are scored as for a "
            "new client"
        )
        return self._replace(
            dealt=group_by_owner(dealt[trains[owner]], number[owner[trains[owner]]], of),
            common=outside if self.common is None else np.concatenate([self.common, outside]),
            names=tuple(name for name, train in zip(self.names, trains, strict=False) if train),
            notes=(*self.notes, note),
            **kept,
        )


PER_CLIENT = ("noise", "anew", "relabel", "views", "groups")
"""Fields of a draw that contain a row for each client, if they are set."""


class Partition(Value):
    """Splits a data set into clients: ``partition(data, seed) -> Federation``.

    A small client's samples are assigned to train, test and validation in this order, and at least one sample of each
    class stays in the client's training part.
    """

    kind: ClassVar[str]
    by_row: ClassVar[bool] = False
    """True if a draw assigns individual rows. False: each entry represents all rows of a subject, if there are
    subjects."""
    test: float = Field(
        default=0.2, ge=0, lt=1, description="fraction of a client's samples that form its test part (FLAME)"
    )
    validation: float = Field(
        default=0.1, ge=0, lt=1, description="fraction of a client's samples that form its validation part"
    )
    test_from: Literal["own", "ratio", "clients"] = Field(
        default="own",
        description=(
            "source of test samples. own: the fraction `test` of the client's samples. ratio: "
            "test_count official test samples in the client's training label ratio (FedSLR, section "
            "5.1). clients: the official test samples of the client's own users (LEAF)"
        ),
    )
    test_count: int = Field(
        default=100, ge=1, description="test samples per client when test_from is ratio (FedSLR: 100)"
    )
    folds: int | None = Field(
        default=None,
        ge=2,
        description="number of folds of a cross-validation. Seed s tests on fold s mod folds of the split of s "
        "div folds",
    )
    max_train_per_client: int | None = Field(
        default=None, ge=1, description="maximum number of training samples kept per client (FedACS, Table 2: 50)"
    )
    min_size: int = Field(default=1, ge=1, description="smallest number of samples per client")
    pool: bool = Field(
        default=False,
        description="join the official training and test sets before the split. Otherwise all clients share the "
        "official test set",
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Partition:
        if self.test + self.validation >= 1:
            raise ValueError(
                "test + validation must be less than 1, so that training data are left, got "
                f"{self.test + self.validation}"
            )
        if self.pool and self.test_from != "own":
            raise ValueError(
                f"test_from = {self.test_from!r} needs the official test set, but pool = true adds "
                "this test set to the training samples"
            )
        if self.folds is not None and self.test_from != "own":
            raise ValueError(
                f"folds split each client's own samples, but test_from is {self.test_from!r}. Leave "
                "folds or test_from out"
            )
        return self

    @abstractmethod
    def draw(self, pool: Pool, seed: int) -> Draw:
        """Assign samples to clients. All random numbers are derived from `seed`.

        Raises:
            PartitionError: the data cannot be split in this way. The message contains the numbers involved.
            ConfigError: this kind of partition needs classes or images, but the data have none.
        """
        ...

    @default_to_cpu()
    def __call__(self, data: object, seed: int = 0) -> Federation:
        """Build the federation of this partition.

        Args:
            data: a `Dataset`, or an argument of `Dataset.create`: arrays, tensors, torch, Hugging Face or pandas data
                sets.
            seed: seed of all random numbers.

        Raises:
            ConfigError: the seed is not an integer.
            PartitionError: there are more clients than samples or more labels than classes, or a client has fewer than
                `min_size` samples.
            ConfigError: the partition needs classes, and the data set has none.
            DataError: the data cannot be read, or a table's target has the same value in every row.
        """
        data = Dataset.create(data)
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise ConfigError(f"seed must be a whole number, got {seed!r:.60}")
        seed_of_draw, fold = (seed, None) if self.folds is None else divmod(seed, self.folds)
        self._check_design(data)
        pool = self.pool_of(data)
        with attribute_error("partition", self, f"draw, seed {seed}"):
            draw = self.draw(pool, seed_of_draw)
            check_dealt(draw.dealt, draw.test, draw.common, len(data))
        draw = self._complete_subjects(draw, data, pool)
        held = draw.dealt if draw.test is None else concatenate_dealt(draw.dealt, draw.test)
        self._check(draw, held, data)
        y = None if data.labels is None else data.labels.numpy()
        own_test_share = 0.0 if self.test_from != "own" or draw.test is not None else self.test
        quota = Quota(own_test_share, self.validation, self.max_train_per_client, self.folds, fold)
        rng = numpy_generator(seed_of_draw, purpose="parts")
        cut = cut_parts(draw.dealt, y, quota, rng, data.design)
        if self.test_from == "ratio":
            cut["test"] = self._matched(data, cut["train"], seed_of_draw)
        elif draw.test is not None:
            cut["test"] = draw.test
        common = draw.common if draw.common is not None or data.test is None or self.pool else data.test.numpy()
        places = {part: lists.index for part, lists in cut.items()}
        doubts = [
            *equal_rows(data, places, common),
            *untrained_levels(data, places, common),
            *single_classes(data, places, common),
        ]
        if draw.relabel is not None:
            data = relabelled(data, held, draw.relabel)
        if draw.views is not None:
            data = viewed(data, held, draw.views)
        if data.prepare is not None:
            data = prepared(data, held, cut["train"], common)
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
            test=None if common is None else torch.from_numpy(common),
            partition={"kind": self.kind, **self.model_dump(exclude_defaults=True)},
            seed=seed,
            groups=None if draw.groups is None else torch.from_numpy(draw.groups),
            noise=noise,
            notes=(
                *data.notes,
                *draw.notes,
                *self._note_unused_share(draw, data),
                *([] if data.design is None else data.design.notes(held.index, owners(held))),
                *_unused(
                    held.index if draw.common is None else np.concatenate([held.index, draw.common]),
                    self._dealt_from(data),
                ),
                *_notes(cut, y, names, data.classes, len(data)),
                *doubts,
            ),
        )

    def pool_of(self, data: Dataset) -> Pool:
        """Return the samples to assign, one per subject. The official test set is excluded unless ``pool = true``."""
        index = self._dealt_from(data)
        if data.design is not None and not self.by_row:
            index = np.sort(data.design.last_rows(index))
        return Pool.create(data, index)

    def _dealt_from(self, data: Dataset) -> Ints:
        """Return the positions of all samples that may be assigned."""
        mask = np.ones(len(data), bool)
        if data.test is not None and not self.pool:
            mask[data.test.numpy()] = False
        return np.flatnonzero(mask)

    def _check_design(self, data: Dataset) -> None:
        """Raise if test rows are marked and the test part is also chosen in another way."""
        if data.design is None or data.design.tested is None or self.test == 0:
            return
        other = f"folds = {self.folds}" if self.folds is not None else f"test_from = {self.test_from!r}"
        if self.folds is not None or self.test_from != "own":
            raise PartitionError(
                f"{self.kind}: {data.name} marks its test rows (test_column or test_since), so "
                f"{other} cannot choose other test rows. Leave one of the two out"
            )

    def _complete_subjects(self, draw: Draw, data: Dataset, pool: Pool) -> Draw:
        """Return the draw with all rows of each subject. Clients that have only test rows become a common test set."""
        design = data.design
        if design is None:
            return draw
        if not self.by_row:
            lists = {name: value for name in ("dealt", "test") if (value := getattr(draw, name)) is not None}
            for name, value in lists.items():
                if strange := value.index[~np.isin(value.index, pool.index)].tolist():
                    raise PartitionError(
                        f"{self.kind}: {name} contains rows that are not in pool.index, which lists "
                        f"one row of every subject (first: row {strange[0]}). Assign entries of "
                        "pool.index, or set by_row = True in the class to assign single rows"
                    )
            every = self._dealt_from(data)
            draw = draw._replace(dealt=_whole(design, draw.dealt, every))
            draw = draw if draw.test is None else draw._replace(test=_whole(design, draw.test, every))
        if design.tested is None or self.test == 0 or draw.test is not None:
            return draw
        owner, n = owners(draw.dealt), len(draw.dealt.offsets) - 1
        trains = np.bincount(owner[~design.tested[draw.dealt.index]], minlength=n) > 0
        if not trains.any():
            raise PartitionError(
                f"{self.kind}: every row of {data.name} is marked as a test row, so no training row is left"
            )
        return draw if trains.all() else draw.keep_trained(trains)

    def _note_unused_share(self, draw: Draw, data: Dataset) -> list[str]:
        """Return a note if a test fraction has no effect because the partition or the data determine the test parts."""
        if self.test_from != "own" or "test" not in self.model_fields_set:
            return []
        marked = data.design is not None and data.design.tested is not None
        if marked and self.test == 0:
            return [
                f"{self.kind}: test = 0 leaves the test part empty, so rows that are marked as test rows "
                "are training rows"
            ]
        if draw.test is None and not marked:
            return []
        who = "the partition defines the test parts itself" if draw.test is not None else "the data mark test rows"
        return [f"{self.kind}: test = {self.test:g} has no effect, because the {who}"]

    def _check(self, draw: Draw, held: Dealt, data: Dataset) -> None:
        n = len(draw.dealt.offsets) - 1
        sizes, what = np.diff(draw.dealt.offsets), "samples"
        if data.design is not None and data.design.subject is not None:
            sizes, what = data.design.counts(owners(draw.dealt), draw.dealt.index, n), "subjects"
        if len(sizes) == 0 or sizes.min() < self.min_size:
            who = f"client {sizes.argmin()} gets {sizes.min()} {what}" if len(sizes) else "there are no clients"
            raise PartitionError(
                f"{self.kind}: {who} of {data.name}, but min_size is {self.min_size}. Use fewer clients"
            )
        looked_at = data.prepare is not None or len(data.classes) == 1
        if looked_at and len(sizes) > 1 and bool((data.y == data.y[0]).all()):
            raise DataError(f"{data.name}: the target is the same in every row. A model cannot learn from it")
        if self.test_from != "own" and data.test is None:
            raise PartitionError(
                f"{self.kind}: test_from = {self.test_from!r}, but {data.name} has no official test set"
            )
        if self.test_from == "clients" and draw.test is None:
            raise PartitionError(
                f"{self.kind}: test_from = 'clients' works only with natural and by-column. Use 'ratio'"
            )
        changes = any(change is not None for change in (draw.noise, draw.relabel, draw.views))
        if draw.noise is not None or draw.views is not None:
            data.refuse_random(f"{self.kind}, which changes the samples of clients,")
        if self.test_from != "own" and changes:
            raise Refused(
                f"{self.kind}: changes the samples of clients, so official test samples would not "
                "match. Use test_from = 'own'"
            )
        if draw.test is not None and (self.folds is not None or self.test_from == "ratio"):
            option = f"folds = {self.folds}" if self.folds is not None else "test_from = 'ratio'"
            raise PartitionError(
                f"{self.kind}: defines the test parts itself, so {option} has no effect. Leave this option out"
            )
        if (changes or data.prepare is not None) and distinct(held.index, len(data)) < len(held.index):
            cure = "set overlap = false"
            if draw.test is not None:
                cure = "assign every sample to one client, and to one part. A test set for all clients is Draw.common"
            raise Refused(
                f"{self.kind}: if clients share a sample, this partition would need two versions of the sample; {cure}"
            )

    def _matched(self, data: Dataset, train: Dealt, seed: int) -> Dealt:
        """Choose `test_count` official test samples per client, with the label shares of its training part."""
        assert data.test is not None
        rng = numpy_generator(seed, purpose="matched test")
        lists, n = Pool.create(data, data.test.numpy()).group_by_class(self.kind, rng), len(train.offsets) - 1
        cells = owners(train) * len(lists) + data.y.numpy()[train.index]
        counts = np.bincount(cells, minlength=n * len(lists)).reshape(n, -1)
        wanted = round_to_total(counts / counts.sum(1, keepdims=True), self.test_count)
        held = np.array([len(samples) for samples in lists])
        if (wanted > held).any():
            c = int((wanted - held).max(0).argmax())
            raise PartitionError(
                f"{self.kind}: test_count = {self.test_count} needs {wanted[:, c].max()} test samples "
                f"of class {data.classes[c]!r}, but {data.name} has {held[c]}. Lower test_count"
            )
        return choose_each(lists, wanted, rng)


class Sized(Partition):
    """Partition with a chosen number of clients."""

    clients: int = Field(default=10, ge=1, description="number of clients")

    def fits(self, pool: Pool) -> None:
        """Raise if there are more clients than the samples allow.

        Raises:
            PartitionError: some client would have fewer than `min_size` samples.
        """
        if self.clients * self.min_size > len(pool):
            raise PartitionError(
                f"{self.kind}: {self.clients} clients with at least {self.min_size} samples each need "
                f"more than the {len(pool)} samples of {pool.data.name}. Use fewer clients or a "
                "smaller min_size"
            )


def _whole(design: Design, dealt: Dealt, rows: Ints) -> Dealt:
    """Return all rows of the assigned subjects, among the rows that may be assigned."""
    return Dealt(*whole_subjects(design, dealt.index, dealt.offsets, rows))


def _unused(used: Ints, pool: Ints) -> list[str]:
    left = len(pool) - int(np.isin(pool, used).sum())
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
                f"the data contain no sample of {len(absent)} of their {len(classes)} classes "
                f"({absent_names}), although the model has outputs for them. If this is not intended, "
                "number the labels from 0 without gaps"
            )
        cells = [owners(cut[part]) * len(classes) + y[cut[part].index] for part in ("train", "test")]
        unknown, counts = np.unique(cells[1][~np.isin(cells[1], cells[0])], return_counts=True)
        if len(unknown):
            who, c = divmod(int(unknown[0]), len(classes))
            notes.append(
                f"{len(np.unique(unknown // len(classes)))} clients are tested on a class that they "
                f"have no training sample of (first: client {names[who]!r}, {counts[0]} test samples "
                f"of class {classes[c]!r}). A personal model cannot learn it. If that matters, use "
                "test_from = 'own' or 'ratio', or a larger max_train_per_client"
            )
    held = np.concatenate([dealt.index for dealt in cut.values()])
    shared = len(held) - distinct(held, samples)
    if shared:
        notes.append(
            f"clients share samples: {shared} of {len(held)} places are taken by samples that another "
            "place also contains"
        )
    return notes
