"""InputSpec: facts about the training data that determine how new samples are prepared and which are rejected."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional

from fedloom.data.dataset import CLASS_TASKS, Dataset, Task, default_to_cpu, raise_data_problems
from fedloom.data.federation import Federation, Split
from fedloom.data.partitions.changes import fit_preparation
from fedloom.data.partitions.deal import Dealt
from fedloom.data.partitions.parts import cut_parts
from fedloom.data.pixels import check_number_type, find_value_range, is_from_bytes, is_from_integers
from fedloom.data.sources.table.frames import is_frame
from fedloom.data.subjects.cut import PartSizes
from fedloom.data.survey.agreement import Agreement
from fedloom.data.tables import MAX_RANGE_WIDTHS, NOTED_ROW_SHARE, Table, TableColumn
from fedloom.data.text import NO_LABEL, UNKNOWN_TOKEN, recode_tokens, token_errors
from fedloom.errors import ConfigError, DataError, direction_in
from fedloom.seeds import numpy_generator
from fedloom.values import Value, has_type

COMPARED_FACTS = ("task", "shape", "outputs", "classes", "vocabulary", "each")
"""Facts about samples that must match between a server and its sites."""
NO_TABLE_HINT = "pass an array of samples, an NPZ file or, for images, a folder"
"""Advice for users whose samples are not in a table."""
SMALL_SPAN_SHARE = 0.01
"""Fraction of the training range below which the range of new samples shows that they are in a different unit. Bytes
and numbers from 0 to 1 differ by a factor of 255."""
MIN_SPAN_SAMPLES = 10
"""Minimum number of samples other than images for this conclusion."""


def comparable_facts(data: InputSpec | Dataset) -> dict[str, Any]:
    """Return the `COMPARED_FACTS` of the data as values that JSON can represent."""
    values = {name: getattr(data, name) for name in COMPARED_FACTS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


class InputSpec(Value):
    """Shape, classes, scaling and columns of a data set, without any samples.

    It describes the training data of a model.
    """

    shape: tuple[int, ...] = Field(description="shape of a single sample, as the model expects it")
    task: Task = Field(description="classification, binary, multilabel, regression, survival or count")
    classes: tuple[str, ...] = Field((), description="names of the classes or labels")
    targets: int = Field(1, ge=1, description="number of target values per sample, if targets are numeric")
    centre: float = Field(0.0, description="value subtracted from regression targets")
    unit: float = Field(1.0, gt=0, description="value by which targets are divided after the subtraction")
    pixels: bool = Field(
        False, description="whether samples were stored as bytes and divided by 255. If not, they are unchanged floats"
    )
    integers: bool | None = Field(
        None,
        description="whether images were given as integers or booleans (true) or as floats (false). None: "
        "unknown, or the samples are not images",
    )
    mean: tuple[float, ...] | None = Field(
        None, description="values subtracted from samples: one per channel, or one for all channels"
    )
    std: tuple[float, ...] | None = Field(None, description="values by which samples are divided after the subtraction")
    span: tuple[float, float] | None = Field(
        None, description="smallest and largest values of float samples. None: unknown, or the samples are not floats"
    )
    table: Table | None = Field(None, description="table columns from which the features are computed")
    vocabulary: tuple[str, ...] = Field((), description="tokens in the vocabulary")
    each: bool = Field(False, description="whether every position in a sequence has a label")

    @model_validator(mode="after")
    def _shows_its_names(self) -> InputSpec:
        if disguised := direction_in(*self.classes, *self.vocabulary):
            raise ValueError(disguised)
        return self

    @classmethod
    def create(cls, data: Dataset) -> InputSpec:
        """Return the description of a federation's data."""
        return cls(
            shape=data.shape,
            task=data.task,
            classes=data.classes,
            targets=1 if data.classed else data.y.shape[1],
            centre=data.centre,
            unit=data.unit,
            pixels=is_from_bytes(data),
            integers=is_from_integers(data),
            span=find_value_range(data),
            mean=None if data.mean is None else tuple(data.mean.tolist()),
            std=None if data.std is None else tuple(data.std.tolist()),
            table=None if data.fitted is None else data.fitted.table,
            vocabulary=data.vocabulary,
            each=data.each,
        )

    @classmethod
    def agreed(cls, agreement: Agreement) -> InputSpec:
        """Return the description of the data that sites will read under an agreement."""
        table = agreement.table
        return cls(
            shape=(table.width,),
            task=agreement.task,
            classes=agreement.classes,
            targets={"survival": 2, "multilabel": len(agreement.classes)}.get(agreement.task, 1),
            centre=agreement.centre,
            unit=agreement.divisor,
            table=table,
        )

    @property
    def tokens(self) -> tuple[int, bool] | None:
        """Size of the vocabulary and `each`, as in `Dataset.tokens`."""
        return (len(self.vocabulary), self.each) if self.vocabulary or self.each else None

    @property
    def outputs(self) -> int:
        """Number of outputs of a model, as in `Dataset.outputs`."""
        return {"classification": len(self.classes)}.get(
            self.task, self.targets if self.task in ("multilabel", "regression") else 1
        )

    @property
    def positions(self) -> int:
        """Number of labels per sample if each token, time step or pixel has its own label."""
        return self.shape[0] if self.vocabulary or len(self.shape) < 3 else math.prod(self.shape[1:])

    @property
    def classed(self) -> bool:
        """True if targets are classes, as in `Dataset.classed`."""
        return self.task in CLASS_TASKS

    @property
    def agreement(self) -> Agreement | None:
        """Agreement for reading sites' tables like the training data, or None if the data are not a table."""
        if self.table is None:
            return None
        columns = tuple(column.with_(range=None) for column in self.table.columns)  # out of range: a note, no error
        return Agreement.create(
            self.table.with_(columns=columns), self.task, self.classes, None, self.centre, self.unit
        )

    @default_to_cpu()
    def labelled(self, data: Any) -> Dataset:
        """Create a data set from samples with targets. It has the task and vocabulary of the training data.

        Raises:
            DataError: the samples are not a data set, or are a table instead of a data set.
        """
        if isinstance(data, Dataset):
            return data
        if is_frame(data[0] if isinstance(data, tuple) and data else data):
            raise DataError(
                "data is a table. Pass fl.Dataset.create(table, LABEL, ...) with the same options as for training"
            )
        options: dict[str, Any] = {"vocabulary": self.vocabulary} if self.vocabulary else {}
        options |= {"layout": "sequence"} if len(self.shape) == 2 else {}
        return Dataset.create(data, task=self.task, **options)

    def take(self, data: Dataset) -> Dataset:
        """Convert new data to the format of the training data. Classes and columns are matched by name.

        Args:
            data: data set from any source. It does not need to contain all classes.

        Raises:
            DataError: the classes, the columns, the shape or the value range differ from what is expected, or samples
                change at random.
        """
        data.refuse_random("a trained model")
        return Dataset(
            data.name,
            self.raw(data),
            self._targets(data),
            self.task,
            self.classes,
            None if self.mean is None else torch.tensor(self.mean, dtype=torch.float64),
            None if self.std is None else torch.tensor(self.std, dtype=torch.float64),
            prepare=self.table,
            centre=self.centre,
            unit=self.unit,
            vocabulary=self.vocabulary,
            positions=self.each and not self.vocabulary,
            original_dtype=data.original_dtype,
            design=data.design,
        )

    @default_to_cpu()
    def raw(self, data: Dataset) -> Tensor:
        """Return unlabeled new samples, as raw columns ``[N, p]`` of a table or as ``[N, *shape]``.

        Raises:
            DataError: the columns, the shape or the value range differs from what is expected.
        """
        if self.table is not None:
            return self._columns(self.table, data)
        if data.prepare is not None:
            raise DataError(
                f"{data.name} is a table, but the model takes samples of shape {_text(self.shape)}; {NO_TABLE_HINT}"
            )
        vocabulary_used = [data.vocabulary[k] for k in data.x.unique().tolist() if k] if data.vocabulary else []
        strange = [token for token in vocabulary_used if token not in self.vocabulary]
        if strange and self.vocabulary[1:2] != (UNKNOWN_TOKEN,):
            raise DataError(f"{data.name}: token {strange[0]!r} is not in the vocabulary of the model's training data")
        x = recode_tokens(data.x, data.vocabulary, self.vocabulary) if data.vocabulary else data.x
        return self.samples(x, data.name, data.original_dtype)

    def samples(self, x: Tensor, name: str, original_dtype: str = "") -> Tensor:
        """Check samples that do not come from a table, and return them as ``[N, *shape]``.

        A model that was trained on bytes accepts bytes, which are divided by 255, and floats from 0 to 1, which are
        used unchanged. A model that was trained on floats accepts floats, which are used unchanged, but no images of
        integers.

        Args:
            x: bytes, floats or tokens.
            name: name of the data in messages.
            original_dtype: original type, as in `Dataset.original_dtype`.

        Raises:
            DataError: the shape, the type or the value range differs from what is expected. The message states what is
                expected instead.
        """
        if self.vocabulary:
            raise_data_problems(name, [*token_errors(x, self.vocabulary)])
            if x.shape[1] > self.shape[0]:
                raise DataError(
                    f"{name}: sequences have {x.shape[1]} tokens, but the model accepts at most {self.shape[0]}"
                )
            return functional.pad(x.long(), (0, self.shape[0] - x.shape[1]))
        if tuple(x.shape[1:]) != self.shape:
            raise DataError(
                f"{name}: samples have shape {_text(tuple(x.shape[1:]))}, but the model takes {_text(self.shape)}"
                + _cure_of_shape(tuple(x.shape), self.shape, original_dtype or str(x.dtype).removeprefix("torch."))
            )
        check_number_type(x, name, self.pixels, original_dtype, integers=self.integers)
        return x

    def find_far_share(self, x: Tensor) -> float:
        """Return the fraction of samples ``[N, *shape]`` whose values are far outside the training range.

        A value is far outside if it exceeds the range by more than half its width. If all samples together cover less
        than `SMALL_SPAN_SHARE` of the range, they are probably in another unit, such as numbers from 0 to 1 instead of
        0 to 255. The share is then 1, unless all values are equal, or the samples are too few and are not images: a
        silent recording, for example, covers a small range by chance. The share is 0 if the training range is unknown.
        """
        if self.span is None or not len(x):
            return 0.0
        (low, high), values = self.span, x.flatten(1).double()
        reach, least, most = MAX_RANGE_WIDTHS * (high - low), values.amin(1), values.amax(1)
        enough = len(x) >= MIN_SPAN_SAMPLES or x.ndim == 4
        if enough and 0 < float(most.max() - least.min()) < SMALL_SPAN_SHARE * (high - low):
            return 1.0
        return float(((least < low - reach) | (most > high + reach)).double().mean())

    def note_far(self, x: Tensor) -> list[str]:
        """Return a note if at least `NOTED_ROW_SHARE` of the samples are far out of range (see `find_far_share`)."""
        if self.span is None or (share := self.find_far_share(x)) < NOTED_ROW_SHARE:
            return []
        return [
            f"samples: values are from {float(x.min()):.4g} to {float(x.max()):.4g}, but in the training data they "
            f"were from {self.span[0]:.4g} to {self.span[1]:.4g} ({share:.0%} of the samples are affected). Scale the "
            "samples as for training"
        ]

    def _targets(self, data: Dataset) -> Tensor:
        if data.task != self.task and not (data.classed and self.classed):
            raise DataError(f"{data.name} is a {data.task}, but the model was trained for a {self.task}")
        if not self.classed:
            if data.y.shape[1] != self.targets:
                raise DataError(
                    f"{data.name} has {data.y.shape[1]} target values per sample, but the model predicts {self.targets}"
                )
            if data.classes != self.classes and {*data.classes} == {*self.classes}:
                return data.y[:, [data.classes.index(name) for name in self.classes]]
            if data.classes not in (self.classes, tuple(map(str, range(self.targets)))):
                raise DataError(
                    f"{data.name}: the labels are {', '.join(data.classes)}, but the model predicts "
                    f"{', '.join(self.classes)}"
                )
            return (data.y * data.unit + data.centre - self.centre) / self.unit
        if data.each != self.each:
            what = {True: "one label per position", False: "one label per sample"}
            raise DataError(f"{data.name} has {what[data.each]}, but the model was trained on {what[self.each]}")
        present = set(data.y[data.y >= 0].unique().tolist())
        names = {k: name for k, name in enumerate(data.classes) if k in present}
        unknown = [name for name in names.values() if name not in self.classes]
        if not unknown:
            place = {name: k for k, name in enumerate(self.classes)}
            code = torch.tensor([place.get(name, -1) for name in data.classes])
        elif all(name == str(k) and k < len(self.classes) for k, name in names.items()):
            code = torch.arange(len(data.classes))
        else:
            raise DataError(
                f"{data.name}: unknown class {unknown[0]!r}. The model knows {', '.join(map(repr, self.classes))}"
            )
        if self.each and not self.vocabulary:
            return torch.where(data.y < 0, NO_LABEL, code[data.y])
        if self.each:
            return functional.pad(
                torch.where(data.y < 0, NO_LABEL, code[data.y]), (0, self.shape[0] - data.y.shape[1]), value=NO_LABEL
            )
        return code[data.y]

    def _columns(self, table: Table, data: Dataset) -> Tensor:
        """Return raw columns ``[N, p]`` in the order of the training data, with the level codes used there."""
        wanted = [c.name for c in table.columns]
        if not isinstance(data.prepare, Table):
            if data.shape != (len(wanted),) or any(c.levels for c in table.columns):
                raise DataError(f"{data.name} is not a table with the columns {', '.join(wanted)}")
            return table.replace_missing_markers(data.x.double())
        places = {c.name: (k, c) for k, c in enumerate(data.prepare.columns)}
        missing, extra = [n for n in wanted if n not in places], [n for n in places if n not in wanted]
        if missing or extra:
            lacks = f"lacks {', '.join(map(repr, missing))}" if missing else f"has {', '.join(map(repr, extra))} too"
            raise DataError(f"{data.name}: {lacks}. The model was trained on the columns {', '.join(wanted)}")
        pairs = [(old, places[old.name][1], data.x[:, places[old.name][0]]) for old in table.columns]
        x = torch.stack([_recode_levels(old, new, values, data.name) for old, new, values in pairs], 1)
        return x if set(table.missing) <= set(data.prepare.missing) else table.replace_missing_markers(x)


def single_client_federation(data: Dataset, holdout: float = 0.0, seed: int = 0) -> Federation:
    """Return a federation in which a single client owns all samples.

    The columns of a table are scaled with the client's training set.

    Args:
        data: result of `InputSpec.take`.
        holdout: fraction of the samples in the test set, in [0, 1). At least one sample of each class stays in the
            training set.
        seed: seed of the split.

    Raises:
        ConfigError: ``holdout`` is out of range.
    """
    if not has_type(holdout, int, float) or not 0 <= holdout < 1:
        raise ConfigError(f"holdout must be a number of at least 0 and less than 1, got {holdout!r:.80}")
    dealt = Dealt(np.arange(len(data)), np.array([0, len(data)]))
    cut = cut_parts(
        dealt, data.outcome_strata, PartSizes(holdout, 0.0), numpy_generator(seed, purpose="parts"), data.design
    )
    if data.prepare is not None:
        data = fit_preparation(data, dealt, cut["train"])
    parts = {part: Split(torch.from_numpy(d.index), torch.from_numpy(d.offsets)) for part, d in cut.items()}
    return Federation(data, parts, ("new",), seed=seed)


def _recode_levels(old: TableColumn, new: TableColumn, values: Tensor, name: str) -> Tensor:
    """Return a column's values, with the codes of levels that were used in the training data."""
    if bool(old.levels) != bool(new.levels):
        what = {True: "codes", False: "numbers"}
        raise DataError(
            f"{name}: column {old.name!r} contains {what[bool(new.levels)]}, but the model was trained on "
            f"{what[bool(old.levels)]}. Add the column to `categorical`, or remove the column from `categorical`"
        )
    if not old.levels or not old.names or not new.names:
        if old.levels and new.levels > old.levels:
            raise DataError(
                f"{name}: column {old.name!r} has {new.levels} levels, but the model was trained with {old.levels}"
            )
        return values
    unknown = [level for level in new.names if level not in old.names]
    if unknown:
        raise DataError(
            f"{name}: column {old.name!r} contains the unknown level {unknown[0]!r}. The model knows "
            f"{', '.join(old.names)}"
        )
    code = torch.tensor([old.names.index(level) for level in new.names], dtype=values.dtype)
    return torch.where(values.isnan(), values, code[values.nan_to_num(0).long()])


def _cure_of_shape(got: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> str:
    """Return advice for samples of shape ``got``, starting with their number, or "" if other samples are needed.

    Args:
        got: shape of all samples together.
        shape: shape of a sample that the model accepts.
        dtype: original type of the samples.
    """
    images = len(shape) == 3
    if images and (got[3:], got[1:3]) == (shape[:1], shape[1:]):
        return ". The channels are last: pass numpy.moveaxis(x, -1, 1)"
    if images and len(got) == 4 and got[2:] == shape[1:] and shape[0] in (1, 3):
        mode = "L" if shape[0] == 1 else "RGB"
        if dtype in ("uint8", "bool"):
            return f". Convert the pictures: picture.convert({mode!r})"
        return f". Scale the pixels to bytes, because Pillow clips {dtype}, and then convert the pictures to {mode}"
    if got in (shape, shape[1:]):
        return ". This looks like a single sample: pass x[None]"
    if math.prod(got[1:]) == math.prod(shape):
        return f". If the order of the values is the same, pass x.reshape(-1, {', '.join(map(str, shape))})"
    return ""


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "()"
