"""Base class of partitions: common options, the samples to be assigned, and conversion of draws to federations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator

from fedloom.data.dataset import Dataset, default_to_cpu
from fedloom.data.federation import Federation, Split
from fedloom.data.partitions.changes import add_noise, fit_preparation, relabel_clients, rotate_and_invert_images
from fedloom.data.partitions.deal import (
    Dealt,
    Ints,
    choose_each,
    concatenate_dealt,
    count_distinct,
    find_owners,
    round_to_total,
)
from fedloom.data.partitions.parts import check_draw, cut_parts
from fedloom.data.partitions.pools import Draw, Pool
from fedloom.data.subjects.cut import PartSizes, whole_subjects
from fedloom.data.subjects.design import Design
from fedloom.data.subjects.equal import note_equal_rows, note_single_classes, note_untrained_levels
from fedloom.errors import ConfigError, DataError, PartitionError, Refused, attribute_error
from fedloom.seeds import as_global, generator, numpy_generator
from fedloom.values import Value, note_idle_fields

UNSEEDED_NOTE = (
    "partition {} gives different results in two calls with the same seed, so runs cannot be repeated. Draw from a "
    "generator that depends only on the argument seed"
)


class Partition(Value):
    """Partition of a data set among clients: ``partition(data, seed) -> Federation``.

    If a client has few samples, the training set gets a sample first, then the test set, then the validation set. At
    least one sample of each class stays in the training set.
    """

    kind: ClassVar[str]
    needs: ClassVar[Mapping[str, str]] = {"test_count": "test_from ratio"}
    by_row: ClassVar[bool] = False
    """True if a draw assigns rows individually. False if each assigned row represents all rows of its subject (if there
    are subjects)."""
    test: float = Field(
        default=0.2, ge=0, lt=1, description="fraction of a client's samples that are held out for testing (FLAME)"
    )
    validation: float = Field(
        default=0.1, ge=0, lt=1, description="fraction of a client's samples that are held out for validation"
    )
    test_from: Literal["own", "ratio", "clients"] = Field(
        default="own",
        description=(
            "source of test samples. own: the fraction `test` of the client's samples. ratio: test_count "
            "official test samples, with the same label ratios as the client's training set (FedSLR, section 5.1). "
            "clients: the official test samples of the client's own users (LEAF)"
        ),
    )
    test_count: int = Field(
        default=100, ge=1, description="number of test samples per client if test_from is 'ratio' (FedSLR: 100)"
    )
    folds: int | None = Field(
        default=None,
        ge=2,
        description="number of cross-validation folds. Seed s tests on fold `s % folds` of the split drawn with seed "
        "`s // folds`",
    )
    max_train_per_client: int | None = Field(
        default=None,
        ge=1,
        description="maximum number of training samples (or subjects, if the data have subjects) kept per client "
        "(FedACS, Table 2: 50)",
    )
    min_size: int = Field(default=1, ge=1, description="minimum number of samples per client")
    pool: bool = Field(
        default=False,
        description="merge the official training and test sets before the split. Otherwise, all clients share the "
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
                f"folds split each client's own samples, but test_from is {self.test_from!r}. Omit "
                "`folds` or `test_from`"
            )
        return self

    @abstractmethod
    def draw(self, pool: Pool, seed: int) -> Draw:
        """Assign samples to clients. All randomness must be derived from `seed`.

        Raises:
            PartitionError: the data cannot be divided in this way. The message states the relevant numbers.
            ConfigError: this kind of partition needs classes or images, but the data have none.
        """
        ...

    @default_to_cpu()
    def __call__(self, data: object, seed: int = 0) -> Federation:
        """Split a data set among clients, and return the federation.

        Args:
            data: a `Dataset`, or an argument of `Dataset.create`, such as arrays, tensors, or torch, Hugging Face or
                pandas data sets.
            seed: seed of all random draws.

        Raises:
            ConfigError: the seed is not an integer.
            PartitionError: there are more clients than samples or more labels than classes, or a client gets fewer than
                `min_size` samples.
            ConfigError: the partition needs classes, but the data set has none.
            DataError: the data cannot be read, or the target of a table has the same value in all rows.
        """
        data = Dataset.create(data)
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise ConfigError(f"seed must be a whole number, got {seed!r:.60}")
        seed_of_draw, fold = (seed, None) if self.folds is None else divmod(seed, self.folds)
        self._check_design(data)
        pool = self.pool_of(data)
        with attribute_error("partition", self, f"draw, seed {seed}"):
            draw, is_unseeded = self._draw_seeded(pool, seed_of_draw)
        draw = self._complete_subjects(draw, data, pool)
        held = draw.dealt if draw.test is None else concatenate_dealt(draw.dealt, draw.test)
        self._check(draw, held, data)
        y = None if data.labels is None else data.labels.numpy()
        own_test_share = 0.0 if self.test_from != "own" or draw.test is not None else self.test
        quota = PartSizes(own_test_share, self.validation, self.max_train_per_client, self.folds, fold)
        rng = numpy_generator(seed_of_draw, purpose="parts")
        cut = cut_parts(draw.dealt, data.outcome_strata, quota, rng, data.design)
        if self.test_from == "ratio":
            cut["test"] = self._match_test_samples(data, cut["train"], seed_of_draw)
        elif draw.test is not None:
            cut["test"] = draw.test
        common = draw.common if draw.common is not None or data.test is None or self.pool else data.test.numpy()
        places = {part: lists.index for part, lists in cut.items()}
        doubts = [
            *note_equal_rows(data, places, common),
            *note_untrained_levels(data, places, common),
            *note_single_classes(data, places, common),
        ]
        if draw.relabel is not None:
            data = relabel_clients(data, held, draw.relabel)
        if draw.views is not None:
            data = rotate_and_invert_images(data, held, draw.views)
        if data.prepare is not None:
            data = fit_preparation(data, held, cut["train"], common)
        noise = None
        if draw.noise is not None:
            later = cut["train"].index
            later = later[:0] if draw.anew is None else later[draw.anew[find_owners(cut["train"])]]
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
                *self._note_idle_options(draw, data),
                *([] if data.design is None else data.design.notes(held.index, find_owners(held))),
                *_count_unused_samples(
                    held.index if draw.common is None else np.concatenate([held.index, draw.common]),
                    self._find_assignable(data),
                ),
                *_partition_notes(cut, y, names, data.classes, len(data)),
                *doubts,
                *[UNSEEDED_NOTE.format(type(self).__name__)] * is_unseeded,
            ),
        )

    def _draw_seeded(self, pool: Pool, seed: int) -> tuple[Draw, bool]:
        """Return the draw, and True if the partition's class is user-defined and a second draw with this seed differs.

        The global generators are seeded, because a user's code may draw from them.

        Raises:
            ValueError: the user's code returned invalid values.
        """
        draws = list[Draw]()
        for _ in range(1 if self._is_built_in else 2):
            with as_global(generator(seed, purpose="user code"), torch.device("cpu")):
                draw = self.draw(pool, seed)
            if not isinstance(draw, Draw):
                raise ValueError(f"draw must return fl.partitions.Draw, got {type(draw).__name__}")
            if not self._is_built_in:
                check_draw(draw, len(pool.data), len(pool.data.classes))
            draws.append(draw)
        first, last = draws[0].dealt, draws[-1].dealt
        return draws[0], any(not np.array_equal(getattr(first, n), getattr(last, n)) for n in ("index", "offsets"))

    @property
    def _is_built_in(self) -> bool:
        return type(self).__module__.startswith("fedloom.")

    def pool_of(self, data: Dataset) -> Pool:
        """Return the samples that can be assigned, with one row per subject.

        The official test set is omitted unless ``pool = true``.
        """
        index = self._find_assignable(data)
        if data.design is not None and not self.by_row:
            index = np.sort(data.design.last_rows(index))
        return Pool.create(data, index)

    def _find_assignable(self, data: Dataset) -> Ints:
        """Return the positions of all samples that can be assigned."""
        mask = np.ones(len(data), bool)
        if data.test is not None and not self.pool:
            mask[data.test.numpy()] = False
        return np.flatnonzero(mask)

    def _check_design(self, data: Dataset) -> None:
        """Raise an error if the data mark test rows but an option chooses the test set in a different way."""
        if data.design is None or data.design.tested is None or self.test == 0:
            return
        other = f"folds = {self.folds}" if self.folds is not None else f"test_from = {self.test_from!r}"
        if self.folds is not None or self.test_from != "own":
            raise PartitionError(
                f"{self.kind}: {data.name} marks its test rows (test_column or test_since), so "
                f"{other} cannot choose other test rows. Omit one of the two"
            )

    def _complete_subjects(self, draw: Draw, data: Dataset, pool: Pool) -> Draw:
        """Return the draw with all rows of each subject.

        The rows of clients that have only test rows become a common test set.
        """
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
                        "pool.index, or set by_row = True in the class to assign individual rows"
                    )
            every = self._find_assignable(data)
            draw = draw._replace(dealt=_complete_dealt_subjects(design, draw.dealt, every))
            draw = draw if draw.test is None else draw._replace(test=_complete_dealt_subjects(design, draw.test, every))
        if design.tested is None or self.test == 0 or draw.test is not None:
            return draw
        owner, n = find_owners(draw.dealt), len(draw.dealt.offsets) - 1
        trains = np.bincount(owner[~design.tested[draw.dealt.index]], minlength=n) > 0
        if not trains.any():
            raise PartitionError(
                f"{self.kind}: every row of {data.name} is marked as a test row, so there are no training rows"
            )
        return draw if trains.all() else draw.keep_trained(trains)

    def _note_idle_options(self, draw: Draw, data: Dataset) -> list[str]:
        """Return notes on options that have no effect because of another option, the partition's draw or the data."""
        notes = [f"{self.kind}: {note.partition(': ')[2]}" for note in note_idle_fields(self)]
        if self.pool and data.test is None:
            notes.append(f"{self.kind}: pool = true has no effect, because {data.name} has no official test set")
        if self.max_train_per_client is not None and self.max_train_per_client < self.min_size:
            notes.append(
                f"{self.kind}: max_train_per_client = {self.max_train_per_client} keeps fewer training samples than "
                f"min_size = {self.min_size}, which counts the samples of all parts"
            )
        why, marked = "", data.design is not None and data.design.tested is not None
        if marked and self.test == 0 and "test" in self.model_fields_set:
            notes.append(
                f"{self.kind}: test = 0 leaves the test set empty, so rows marked as test rows are used for training"
            )
        elif self.folds is not None:
            why = f"folds = {self.folds} defines the test sets"
        elif self.test_from != "own":
            why = f"test_from = {self.test_from!r} defines the test sets"
        elif draw.test is not None:
            why = "the partition defines the test sets itself"
        elif marked:
            why = "the data mark test rows"
        if why and "test" in self.model_fields_set:
            notes.append(f"{self.kind}: test = {self.test:g} has no effect, because {why}")
        return notes

    def _check(self, draw: Draw, held: Dealt, data: Dataset) -> None:
        n = len(draw.dealt.offsets) - 1
        sizes, what = np.diff(draw.dealt.offsets), "samples"
        if data.design is not None and data.design.subject is not None:
            sizes, what = data.design.counts(find_owners(draw.dealt), draw.dealt.index, n), "subjects"
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
                f"{self.kind} changes the samples of clients, so official test samples would not "
                "match. Use test_from = 'own'"
            )
        if draw.test is not None and (self.folds is not None or self.test_from == "ratio"):
            option = f"folds = {self.folds}" if self.folds is not None else "test_from = 'ratio'"
            raise PartitionError(
                f"{self.kind} defines the test sets itself, so {option} has no effect. Omit this option"
            )
        if (changes or data.prepare is not None) and count_distinct(held.index, len(data)) < len(held.index):
            cure = "set overlap = false"
            if draw.test is not None or not (self._is_built_in or "overlap" in type(self).model_fields):
                cure = (
                    "assign every sample to one client, and to one part, and only once. "
                    "Put a test set for all clients into Draw.common"
                )
            raise Refused(
                f"{self.kind}: if clients share a sample, this partition would need two versions of the sample; {cure}"
            )

    def _match_test_samples(self, data: Dataset, train: Dealt, seed: int) -> Dealt:
        """For each client, choose `test_count` official test samples with its training set's label frequencies."""
        assert data.test is not None
        rng = numpy_generator(seed, purpose="matched test")
        lists, n = Pool.create(data, data.test.numpy()).group_by_class(self.kind, rng), len(train.offsets) - 1
        cells = find_owners(train) * len(lists) + data.y.numpy()[train.index]
        counts = np.bincount(cells, minlength=n * len(lists)).reshape(n, -1)
        wanted = round_to_total(counts / counts.sum(1, keepdims=True), self.test_count)
        held = np.array([len(samples) for samples in lists])
        if (wanted > held).any():
            c = int((wanted - held).max(0).argmax())
            raise PartitionError(
                f"{self.kind}: test_count = {self.test_count} needs {wanted[:, c].max()} test samples "
                f"of class {data.classes[c]!r}, but {data.name} has {held[c]}. Lower `test_count`"
            )
        return choose_each(lists, wanted, rng)


class Sized(Partition):
    """Partition with an option for the number of clients."""

    clients: int = Field(default=10, ge=1, description="number of clients")

    def fits(self, pool: Pool) -> None:
        """Raise an error if the number of clients is too large for the number of samples.

        Raises:
            PartitionError: a client would have fewer than `min_size` samples.
        """
        if self.clients * self.min_size > len(pool):
            design = pool.data.design
            units = "samples" if design is None or design.subject is None else "subjects"
            raise PartitionError(
                f"{self.kind}: {self.clients} clients with at least {self.min_size} {units} each need more than the "
                f"{len(pool)} {units} of {pool.data.name}. Use fewer clients or a smaller min_size"
            )


def _complete_dealt_subjects(design: Design, dealt: Dealt, rows: Ints) -> Dealt:
    """Return all rows of the assigned subjects that can be assigned."""
    return Dealt(*whole_subjects(design, dealt.index, dealt.offsets, rows))


def _count_unused_samples(used: Ints, pool: Ints) -> list[str]:
    left = len(pool) - int(np.isin(pool, used).sum())
    return [f"{left} of {len(pool)} samples belong to no client"] if left else []


def _partition_notes(
    cut: dict[str, Dealt], y: Ints | None, names: tuple[str, ...], classes: tuple[str, ...], samples: int
) -> list[str]:
    notes = [
        f"{count} client{' has' if count == 1 else 's have'} no {part} set"
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
        cells = [find_owners(cut[part]) * len(classes) + y[cut[part].index] for part in ("train", "test")]
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
    repeated = len(held) - count_distinct(held, samples)
    copies = 0
    if repeated:
        copies = len(held) - len(np.unique(np.concatenate([find_owners(d) * samples + d.index for d in cut.values()])))
    if copies:
        notes.append(
            f"clients have duplicate samples: {copies} of {len(held)} entries are copies of a sample that the same "
            "client already has. If this is not intended, assign every sample only once"
        )
    if shared := repeated - copies:
        notes.append(
            f"clients share samples: {shared} of {len(held)} entries are samples that another client or part also "
            "contains"
        )
    return notes
