"""Dataset: data from a single source, held in memory and checked once.

Arrays keep their stored type, so bytes stay bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.data.text import label_errors, label_range_errors, token_errors
from fedloom.errors import DataError, NoSamples, direction_in
from fedloom.hints import suggest_nearest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fedloom.data.subjects.design import Design
    from fedloom.data.tables import FittedTable

Task = Literal["classification", "binary", "multilabel", "regression", "survival", "count"]
CLASS_TASKS = ("classification", "binary")
"""Tasks whose targets are classes."""
MISSING_LEVEL = ""
"""Level of a kept column that represents rows without a value."""
MAX_CLASSES = 2**16
"""Maximum number of classes in a data set. Larger class numbers are probably measurements or errors."""
TOO_MANY_CLASSES_TEXT = (
    f"at most {MAX_CLASSES:,} are allowed. Set task = 'regression' if labels are measurements, or name another column"
)


@contextmanager
def default_to_cpu() -> Iterator[None]:
    """Create new tensors on the CPU inside the block, even if the caller has set a different default device."""
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield


class Prepare(Protocol):
    """Preparation that is fitted to the training set of each client, such as imputation and scaling of tables."""

    def __call__(self, x: Tensor, owner: Tensor, train: Tensor) -> Tensor:
        """Return features in the representation that a model accepts.

        Args:
            x: raw features [N, p]. Missing values are NaN.
            owner: client of each sample [N]. Samples with -1 belong to no client and are not read.
            train: bool mask [N] of the samples in their clients' training sets.

        Returns:
            Features [N, q], which are float32 and finite.
        """
        ...


class Rereads(Protocol):
    """Samples that change at random and are therefore read again for each step (`fedloom.data.sources.rereading`)."""

    def read_into(self, x: Tensor, index: Tensor, rng: torch.Generator) -> None:
        """Replace stored samples ``x [k, ...]`` at positions ``index [k]`` with new versions drawn with ``rng``."""
        ...


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and targets from one source.

    Args:
        name: name of the source.
        x: features [N, *shape], which are uint8 (images, `[N, channels, height, width]`) or float. Alternatively,
            tokens [N, length] (int32 or int64), which are numbers in `vocabulary`, with 0 as padding at the end of a
            sequence.
        y: class numbers [N] (int64). For tokens, y may also contain one label per position [N, length], with -1 for
            positions without a label. Otherwise, float targets: numbers [N, k] for a regression, 0 or 1 [N, k] for
            multiple labels, counts [N, 1], or nonnegative times and events of 0 or 1 [N, 2] for a survival task.
        task: ``"classification"``, ``"binary"``, ``"multilabel"``, ``"regression"``, ``"survival"`` or ``"count"``.
        classes: names of the classes or labels. Empty if targets are numbers.
        mean: mean of each channel [C], or of all values [1]. It is subtracted after bytes have been divided by 255.
            None for 0.
        std: standard deviation, with the same shape as `mean`. Values are divided by it after the subtraction. None for
            1.
        test: positions [k] in `x` of the samples in the source's official test set. None if the source has none.
        columns: codes [N] (int64) for properties of samples that can define clients, such as writer, hospital or
            education.
        levels: names of the codes in each column.
        users: codes of the clients [N], if the source is already divided into clients.
        user_names: names of these clients, in the order of their codes.
        prepare: preparation that is fitted for each client when a federation is created. If it is not given, the data
            must not contain NaN (missing values).
        fitted: table from which the features were computed, with the fitted values, if there is one.
        ready: bool mask [N] of the samples whose features `prepare` has computed. All other samples are NaN, and no
            part of a federation is allowed to contain them. None if all samples are ready.
        centre: number that was subtracted from regression targets.
        unit: number by which regression targets were divided after the subtraction. Errors are reported in this unit.
        vocabulary: names of the tokens. It is empty if samples are numbers.
        positions: True if every position of a numeric sequence has its own label. In this case, `y` is [N, length],
            with -1 at positions without a label.
        notes: notes on how the source was read, which a report shows.
        conversion: the ``factors`` by which columns of a table were multiplied, the column ``users`` that contains the
            client of each row, and the columns in ``days_since``. It is empty if no factors were applied and no dates
            were converted.
        design: which rows belong together, in which order they came, and which rows form the test set. None if all rows
            are independent.
        original_dtype: numpy name of the type that the features had before they became `x`, such as ``"int64"``, or
            ``"uint8"`` if `x` contains bytes divided by 255. It is empty if the type has not changed.
        rereading: object that reads samples again for every training step, because the samples change at random. For
            all other purposes, `x` contains one random version of each sample. None if samples never change.

    Raises:
        DataError: lengths differ, labels are outside 0..C-1, values are not finite, or types are wrong.
    """

    name: str
    x: Tensor
    y: Tensor
    task: Task = "classification"
    classes: tuple[str, ...] = ()
    mean: Tensor | None = None
    std: Tensor | None = None
    test: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    users: Tensor | None = None
    user_names: tuple[str, ...] = ()
    prepare: Prepare | None = None
    fitted: FittedTable | None = None
    ready: Tensor | None = None
    centre: float = 0.0
    unit: float = 1.0
    vocabulary: tuple[str, ...] = ()
    positions: bool = False
    notes: tuple[str, ...] = ()
    conversion: Mapping[str, Any] = field(default_factory=dict[str, Any])
    original_dtype: str = ""
    design: Design | None = None
    rereading: Rereads | None = None

    def __post_init__(self) -> None:
        n = len(self.x)
        if n == 0:
            raise NoSamples(f"{self.name} contains no samples. A data set needs at least one sample")
        if self.task not in get_args(Task):
            raise DataError(f"{self.name}: unknown task {self.task!r}; {suggest_nearest(self.task, get_args(Task))}")
        if len(self.classes) > MAX_CLASSES:
            raise DataError(f"{self.name}: {len(self.classes):,} classes; {TOO_MANY_CLASSES_TEXT}")
        problems = [*self._wrong_x(), *self._wrong_y(n), *self._wrong_scale()]
        problems += [] if self.design is None else self.design.wrong(n)
        for what, codes, names in self._coded():
            if len(codes) != n:
                problems.append(f"{what} has {len(codes)} codes for {n} samples. Pass one code per sample")
            problems += _outside_range_problem(what, codes, len(names))
        named = {"classes": self.classes, "columns": [*self.columns], "users": self.user_names, **self.levels}
        problems += [f"{what}: {wrong}" for what, names in named.items() if (wrong := direction_in(*names))]
        if self.test is not None:
            problems += _outside_range_problem("the test set", self.test, n)
        if self.ready is not None and (self.ready.dtype != torch.bool or self.ready.shape != (n,)):
            problems.append(f"ready must be bool [{n}], got {self.ready.dtype} {list(self.ready.shape)}")
        raise_data_problems(self.name, problems)

    @classmethod
    @default_to_cpu()
    def create(cls, obj: Any, target: Any = None, **options: Any) -> Dataset:
        """Create a data set from objects in memory.

        The accepted types are listed in `fedloom.data.sources.memory.as_dataset`.

        Arrays and tensors of float32 or bytes are not copied, so if they are changed later, the data set changes.

        >>> Dataset.create(np.eye(3), [0, 1, 1])
        Dataset('data': 3 samples of shape 3, classification of 2 classes)
        """
        if isinstance(obj, cls) and target is None and not options:
            return obj
        from fedloom.data.sources.memory import as_dataset  # imported here because memory imports Dataset

        return as_dataset(obj, target, **options)

    def __repr__(self) -> str:
        size = "x".join(map(str, self.shape)) or "1"
        what = "classes" if self.classed else "labels"
        kinds = f" of {len(self.classes)} {what}" if self.classes else ""
        more = [f"{len(self.test)} of them the official test set"] if self.test is not None else []
        more += [f"{len(self.user_names)} users"] if self.user_names else []
        return (
            f"Dataset({self.name!r}: {', '.join([f'{len(self):,} samples of shape {size}', *more, self.task + kinds])})"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def outputs(self) -> int:
        """Number of outputs of a model: one per class or label, k for a regression, or 1 otherwise."""
        if self.task == "classification":
            return len(self.classes)
        return self.y.shape[1] if self.task in ("multilabel", "regression") else 1

    @property
    def classed(self) -> bool:
        """True if targets are classes rather than numbers."""
        return self.task in CLASS_TASKS

    @property
    def each(self) -> bool:
        """True if each position of a sequence has its own label."""
        return self.classed and self.y.ndim == 2

    @property
    def tokens(self) -> tuple[int, bool] | None:
        """Size of the vocabulary, and the value of `each`. None if samples are numbers with a single label each."""
        return (len(self.vocabulary), self.each) if self.vocabulary or self.each else None

    @property
    def labels(self) -> Tensor | None:
        """Class of each sample [N]. None if samples have no class, or if they have one class per position."""
        return self.y if self.classed and not self.each else None

    @property
    def outcome_strata(self) -> NDArray[np.int64] | None:
        """Stratum of each sample [N] in splits and folds: its class, or 1 for an event and 0 for a censored time.

        None if samples have neither.
        """
        labels = (self.y[:, 1] > 0).long() if self.task == "survival" else self.labels
        return None if labels is None else labels.cpu().numpy()

    def __len__(self) -> int:
        return len(self.x)

    def checksum(self) -> str:
        """Return the SHA-256 digest of the types, shapes and bytes of `x` and `y`, in hexadecimal.

        Samples that are not ready are filled with 0.
        """
        digest = hashlib.sha256()
        x = self.x if self.ready is None else self.x.masked_fill(~self.ready.view(-1, *[1] * len(self.shape)), 0)
        for part in (x, self.y):
            array = part.detach().cpu().contiguous().numpy()
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(array.reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return a summary: samples, shape, type, task, classes with counts, test size, columns and checksum."""
        facts: dict[str, Any] = {
            "name": self.name,
            "samples": len(self),
            "shape": self.shape,
            "dtype": str(self.x.dtype).removeprefix("torch."),
            "task": self.task,
            "test": 0 if self.test is None else len(self.test),
            "columns": {name: len(self.levels[name]) for name in self.columns},
            "users": len(self.user_names),
            "checksum": self.checksum(),
        }
        if self.classed:
            counts: list[int] = torch.bincount(self.y[self.y >= 0], minlength=len(self.classes)).tolist()
            facts["classes"] = dict(zip(self.classes, counts, strict=True))
        if self.vocabulary:
            facts["vocabulary"], facts["tokens"] = len(self.vocabulary), int((self.x != 0).sum())
        return facts

    def refuse_random(self, what: str) -> None:
        """Raise an error if samples are reread for each step, because that would undo changes to the stored samples.

        Raises:
            DataError: samples are reread.
        """
        if self.rereading is not None:
            raise DataError(
                f"{self.name}: the samples change at random whenever they are read, so {what} cannot "
                "use them. Remove random transforms from the data set d, or, to keep one random version of "
                "each sample, pass [d[i] for i in range(len(d))]"
            )

    def append_samples(self, index: Tensor, x: Tensor, y: Tensor) -> Dataset:
        """Append copies of the samples at `index` ``[k]`` that have the features ``x`` and targets ``y``.

        Raises:
            DataError: samples are reread for each step.
        """
        self.refuse_random("a backdoor")

        def more(values: Tensor | None) -> Tensor | None:
            return None if values is None else torch.cat([values, values[index.to(values.device)]])

        design, columns = self.design, {name: torch.cat([c, c[index]]) for name, c in self.columns.items()}
        if design is not None:
            rows: dict[str, Any] = {
                name: more(getattr(design, name)) for name in ("subject", "order", "strata", "held_out")
            }
            design = replace(design, **rows)
        moved: dict[str, Any] = {"users": more(self.users), "ready": more(self.ready), "columns": columns}
        return replace(self, x=torch.cat([self.x, x]), y=torch.cat([self.y, y]), design=design, **moved)

    def _coded(self) -> list[tuple[str, Tensor, tuple[str, ...]]]:
        coded = [(f"column {key!r}", codes, self.levels.get(key, ())) for key, codes in self.columns.items()]
        return coded if self.users is None else [*coded, ("users", self.users, self.user_names)]

    def _wrong_x(self) -> Iterator[str]:
        if self.vocabulary:
            yield from token_errors(self.x, self.vocabulary)
            return
        if self.x.dtype == torch.uint8:
            return
        if not self.x.dtype.is_floating_point:
            yield (
                f"features must be uint8 or float, got {self.x.dtype}. Convert the features, or pass a "
                "vocabulary of tokens"
            )
        elif not bool(torch.isfinite(self.x.sum())):  # a sum with NaN or Inf is not finite
            bad = ~torch.isfinite(self.x) if self.prepare is None else torch.isinf(self.x)
            bad = bad.reshape(len(bad), -1).any(1)
            where: list[int] = (bad if self.ready is None else bad & self.ready).nonzero().flatten().tolist()
            if where:
                yield (
                    f"NaN or Inf in the features of {len(where)} samples (first: sample {where[0]}). "
                    "Remove or repair them"
                )

    def _wrong_y(self, n: int) -> Iterator[str]:
        if len(self.y) != n:
            yield f"{n} samples but {len(self.y)} targets. Every sample needs one target"
        if self.classed:
            if self.task == "binary" and len(self.classes) != 2:
                yield f"a binary task has 2 classes, got {len(self.classes)}"
            if self.each and self.vocabulary:
                yield from label_errors(self.x, self.y, len(self.classes))
            elif self.each and self.positions:
                yield from label_range_errors(self.y, len(self.classes))
            else:
                yield from _outside_range_problem("labels", self.y, len(self.classes))
        elif self.y.ndim != 2 or not self.y.dtype.is_floating_point:
            yield f"targets of a {self.task} must be float [N, k], got {self.y.dtype}"
        elif not bool(torch.isfinite(self.y).all()):
            yield "NaN or Inf in the targets. Remove or repair those samples"
        else:
            yield from _number_problems(self.task, self.y)
            if self.task == "multilabel" and not 1 < len(self.classes) == self.y.shape[1]:
                yield (
                    f"a multilabel task needs at least two labels and one name per label, got {self.y.shape[1]} labels "
                    f"and {len(self.classes)} names"
                )

    def _wrong_scale(self) -> Iterator[str]:
        for what, values in (("mean", self.mean), ("std", self.std)):
            channels = self.shape[0] if self.shape else 1
            if values is None:
                continue
            if values.ndim != 1 or len(values) not in (1, channels) or not bool(torch.isfinite(values).all()):
                yield f"{what} must be finite with 1 or {channels} values, got {values.tolist()}"
            elif what == "std" and bool((values <= 0).any()):
                yield f"std must be > 0, got {values.tolist()}"


def raise_data_problems(where: str, problems: Sequence[str]) -> None:
    """Raise a single error that lists all problems with the data, if there are any.

    Raises:
        DataError: the data have at least one problem.
    """
    if len(problems) == 1:
        raise DataError(f"{where}: {problems[0]}")
    if problems:
        raise DataError(f"{where}: {len(problems)} problems" + "".join(f"\n  - {problem}" for problem in problems))


def _number_problems(task: Task, y: Tensor) -> Iterator[str]:
    """Yield the problems found in times and events, in labels, or in counts."""
    if task == "survival" and y.shape[1] != 2:
        yield f"targets of a survival task must be a time and an event in every row, got {y.shape[1]} columns"
    elif task == "survival":
        early, odd = y[:, 0] < 0, (y[:, 1] != 0) & (y[:, 1] != 1)
        if bool(early.any()):
            yield f"{int(early.sum())} times are negative (first: sample {int(early.int().argmax())}). Repair them"
        if bool(odd.any()):
            yield f"events must be 1, or 0 if the time is censored, got {y[odd, 1].unique()[:5].tolist()}"
    elif task == "multilabel":
        odd = ((y != 0) & (y != 1) & (y != -1)).any(1) | (y == -1).all(1)
        if bool(odd.any()):
            first = int(odd.int().argmax())
            yield (
                f"every label must be 1 (present), 0 (absent) or -1 (unknown), but {int(odd.sum())} samples have other "
                f"labels, or no known label (first: sample {first}, {y[first].tolist()}). Repair or remove them"
            )
    elif task == "count":
        odd = ((y < 0) | (y != y.floor())).any(1)
        if y.shape[1] != 1 or bool(odd.any()):
            yield (f"every count must be a single nonnegative integer, but {int(odd.sum())} rows have no such number")


def _outside_range_problem(what: str, codes: Tensor, count: int) -> Iterator[str]:
    if codes.dtype != torch.int64 or codes.ndim != 1:
        yield f"{what} must be a one-dimensional int64 tensor, got {codes.dtype} {codes.ndim}-d"
    elif len(codes) and (int(codes.min()) < 0 or int(codes.max()) >= count):
        yield f"{what} must be from 0 to {count - 1}, got {int(codes.min())} to {int(codes.max())}"
