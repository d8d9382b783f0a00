"""Data as people have them in memory (arrays, tensors, torch, Hugging Face and pandas data sets) as a `Dataset`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from fedloom.data.dataset import Dataset, Task
from fedloom.data.sources._base import Source
from fedloom.data.sources.archive import GrowingRows
from fedloom.data.sources.array_data import as_array, noted, of_arrays, plain
from fedloom.data.sources.table.cells import Problems
from fedloom.data.sources.table.frames import class_names, coded_columns, frame_cells, frame_names, is_frame, is_hub
from fedloom.data.sources.table.reading import TableSource, read_table
from fedloom.data.sources.tabular import Csv
from fedloom.errors import ConfigError, DataError, NoSamples, cause_of, nearest
from fedloom.values import fields_of, make

PAIRS = (
    ("x", "y"),
    ("X", "y"),
    ("data", "target"),
    ("image", "label"),
    ("features", "target"),
    ("pixel_values", "labels"),
)
"""Names that dictionaries have for features and targets."""
LABELS = ("label", "labels", "fine_label", "target", "y")
ACCEPTED = (
    "arrays or tensors (x, y), a dictionary with x and y, a torch Dataset, a Hugging Face Dataset, a pandas DataFrame, "
    "an Arrow table"
)


def as_dataset(
    obj: Any,
    target: Any = None,
    *,
    task: Task | None = None,
    test: Any = None,
    name: str = "data",
    **options: Any,
) -> Dataset:
    """A data set of what a user has in memory.

    Args:
        obj: a `Dataset` (given back as it is); features ``[N, ...]`` as a numpy array or tensor; a pair ``(x, y)``; a
            dictionary with ``x`` and ``y`` (or another pair of `PAIRS`), or with ``train`` and ``test`` that are one of
            these; a torch `Dataset` or a list of pairs; a Hugging Face `Dataset` or `DatasetDict`; a pandas
            `DataFrame`, alone or with its targets; a table of pyarrow, or one that Arrow can read (polars).
        target: targets ``[N]`` or ``[N, k]`` of features that come alone; or the name of the target's column, None:
            ``label``, ``labels``, ``fine_label``, ``target`` or ``y``, and of a table otherwise the last.
        task: what the targets are; None: classification if they are whole numbers, text or booleans.
        test: the official test set, of the same kind as `obj`; not for tables, whose scaling is fitted per client.
        name: of the data set, for reports and messages.
        options: of arrays and samples: ``classes`` (names), ``mean``, ``std``, ``users`` (owner of each sample, or the
            column that names it), ``features`` (column of the features), ``channels_last``, ``vocabulary`` (names of
            the tokens, or how many: features are then tokens ``[N, length]``). Of tables, as of a CSV
            file: ``users``, ``categorical``, ``drop``, ``columns``, ``missing``, ``impute``, ``scale``.

    Raises:
        ConfigError: it is of no known kind, or an option or column does not exist.
        DataError: shapes, types, lengths or values that cannot be; one message has all of them.
    """
    if isinstance(obj, Dataset):
        if target is not None or task is not None or test is not None or options:
            raise ConfigError(f"{obj.name}: is a Dataset already; give target, task, test and options when it is made")
        return obj
    if isinstance(obj, Mapping) and "train" in obj:
        sides = [obj["train"], *([obj["test"]] if test is None and "test" in obj else [])]
    else:
        sides = [obj]
    sides += [test] if test is not None else []
    first = sides[0]
    if isinstance(first, tuple) and len(first) == 2 and len(sides) == 1 and is_frame(first[0]) and target is None:
        first, target = first
    if is_frame(first):
        if len(sides) > 1:
            raise ConfigError(f"{name}: a table has no separate test set, its scaling is fitted per client; join both")
        return _table(first, target, task, name, options)
    options.setdefault("channels_last", None)
    allowed = ("classes", "mean", "std", "users", "features", "channels_last", "vocabulary")
    if odd := [key for key in options if key not in allowed]:
        raise ConfigError(f"{name}: unknown option {odd[0]!r}; {nearest(odd[0], allowed)}")
    column, users = options.pop("features", None), options.get("users")
    parts = [
        side_of(side, None if i and not isinstance(target, str) else target, column, users, name)
        for i, side in enumerate(sides)
    ]
    if len({part.x.shape[1:] for part in parts}) > 1:
        raise DataError(
            f"{name}: training samples of shape {parts[0].x.shape[1:]}, test samples of {parts[1].x.shape[1:]}"
        )
    refuse_unlike(dict(zip((name, f"{name}: the test set"), parts, strict=False)), bool(options.get("vocabulary")))
    if parts[0].users is not None:
        options["users"] = np.concatenate([part.users for part in parts])
    x, y = (
        values[0] if len(parts) == 1 else np.concatenate(values)
        for values in zip(*((p.x, p.y) for p in parts), strict=True)
    )
    options.setdefault("classes", most_classes(parts))
    return noted(of_arrays(name, x, y, task, split=len(parts[0].x) if len(parts) == 2 else None, **options))


class _Side(NamedTuple):
    """Features, targets and owners of a training or test set, and the classes and columns that it names."""

    x: NDArray[Any]
    y: NDArray[Any]
    users: NDArray[Any] | None = None
    classes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    @classmethod
    def of(cls, x: Any, y: Any, name: str, users: Any = None) -> _Side:
        """What a user has, as arrays."""
        _refuse_order(x, y, name)
        columns = tuple(frame_names(x)) if is_frame(x) else ()
        owners = None if users is None else plain(users, name)
        return cls(plain(x, name), plain(y, name), owners, columns=columns)


def most_classes(sides: Iterable[_Side]) -> tuple[str, ...]:
    """The classes of sets that number them alike: those of the set that declares most."""
    return max((side.classes for side in sides), key=len)


def refuse_unlike(sides: Mapping[str, _Side], tokens: bool = False) -> None:
    """Refuse sets that joined would not be what each is alone.

    Args:
        sides: by the words that name them in messages.
        tokens: whether features are numbers in a vocabulary, which bytes hold too.

    Raises:
        DataError: samples without targets, bytes beside other numbers, classes or columns in another order.
    """
    for who, side in sides.items() if len(sides) > 1 else ():
        if side.x.shape[:1] != side.y.shape[:1]:
            rows = (len(values) if values.ndim else 1 for values in (side.x, side.y))
            raise DataError("{}: {} samples but {} targets; every sample needs one target".format(who, *rows))
        for what, values in (("features", side.x), ("targets", side.y)):
            if values.dtype.kind == "f" and not np.isfinite(values.sum(dtype=np.float64)):
                odd = ~np.isfinite(values.reshape(len(values), -1)).all(1)
                if odd.any():
                    raise DataError(
                        f"{who}: NaN or Inf in the {what} of {odd.sum()} samples (first: sample {odd.argmax()}); "
                        "remove or repair them"
                    )
    bytes_of = {who: side.x.dtype == np.uint8 for who, side in sides.items()}
    if len(set(bytes_of.values())) > 1 and not tokens:
        whole, other = (next(who for who, value in bytes_of.items() if value is kind) for kind in (True, False))
        raise DataError(
            f"{whole}: features are bytes, which are divided by 255; those of {other} are {sides[other].x.dtype}, "
            "taken as they are; give all one type"
        )
    for field, cure in (("classes", "number them alike"), ("columns", "give all one order, as x[names]")):
        named = {who: getattr(side, field) for who, side in sides.items() if getattr(side, field)}
        longest = max(named.values(), key=len, default=())
        for who, names in named.items():
            if names != longest[: len(names)] or (field == "columns" and len(names) != len(longest)):
                first = next(other for other, order in named.items() if order == longest)
                raise DataError(
                    f"{who}: {field} are {', '.join(names):.200}, those of {first} {', '.join(longest):.200}; {cure}"
                )


def _refuse_order(x: Any, y: Any, name: str) -> None:
    """Refuse targets whose rows pandas names as those of the features, in another order."""
    rows, labels = (getattr(part, "index", None) if hasattr(part, "iloc") else None for part in (x, y))
    if rows is None or labels is None or len(rows) != len(labels) or rows.equals(labels):
        return
    if rows.is_unique and labels.is_unique and labels.isin(rows).all():
        raise DataError(
            f"{name}: the targets have the index of the features in another order; give y.loc[x.index], or "
            "y.to_numpy() where they belong together by place"
        )


def side_of(obj: Any, target: Any, column: str | None, users: Any, name: str) -> _Side:
    """The training or test set that `as_dataset` takes, as arrays."""
    pair = _named(obj)
    if target is not None and (pair or isinstance(obj, TorchDataset) or (is_hub(obj) and not isinstance(target, str))):
        raise ConfigError(f"{name}: has its targets; leave target out, or give the features alone")
    if is_hub(obj):
        return _hub_side(obj, target, column, users, name)
    if pair:
        return _Side.of(*pair, name, obj.get("users"))
    if isinstance(obj, TensorDataset):
        if len(obj.tensors) != 2:
            raise ConfigError(f"{name}: has {len(obj.tensors)} tensors, expected features and targets")
        return _Side.of(*obj.tensors, name)._replace(classes=_classes(obj))
    if isinstance(obj, (tuple, list)) and obj and all(isinstance(part, TorchDataset | DataLoader) for part in obj):
        raise ConfigError(
            f"{name}: several data sets are no pair (x, y): give {{'train': one, 'test': other}}, or the data sets of "
            "clients to fl.Federation.of"
        )
    if isinstance(obj, (tuple, list)) and len(obj) == 2 and target is None and not isinstance(obj[0], tuple):
        return _Side.of(obj[0], obj[1], name)
    if isinstance(obj, list) and target is None and are_many(obj):
        raise ConfigError(
            f"{name}: {len(obj)} pairs of features and labels of many samples are clients, not samples: give them "
            "to fl.Federation.of, or to fl.simulate in the place of a federation"
        )
    if isinstance(obj, list) and target is None and all(isinstance(s, tuple) and len(s) == 2 for s in obj):
        return _Side(*_stacked(_pairs(obj, name), name))
    if isinstance(obj, (np.ndarray, torch.Tensor, list, tuple)):
        if target is None or isinstance(target, str):
            four = isinstance(obj, tuple) and len(obj) == 4
            cure = "((x, y), (x_test, y_test))" if four else "the pair (x, y), or target"
            raise ConfigError(f"{name}: features without targets; give {cure}")
        return _Side.of(obj, target, name)
    if isinstance(obj, TorchDataset):
        x, y = _stacked(_pairs(_samples(obj, name), name), name)
        return _Side(x, y, classes=_classes(obj))
    if is_frame(obj):
        raise ConfigError(
            f"{name}: a table is no client: join them, with a column that names the client, as in "
            "fl.Dataset.of(frame, label='ill', users='site'), and give partition=fl.partition.writers()"
        )
    sampler = type(getattr(obj, "sampler", None))
    subset = sampler not in (type(None), SequentialSampler, RandomSampler)
    hints = {
        "toarray": "give x.toarray()",
        "batch_size": "give torch.utils.data.Subset(x.dataset, list(x.sampler))" if subset else "give its .dataset",
        "__next__": "give what it goes through, such as the .dataset of a DataLoader",
        "strip": "read a file by fl.load",
        "to_pandas": "give x.to_pandas()",
    }
    hint = next((f"; {say}" for key, say in hints.items() if hasattr(obj, key)), "")
    raise ConfigError(f"{name}: cannot make a data set of {type(obj).__name__}{hint}; known are {ACCEPTED}")


def _classes(obj: TorchDataset[Any]) -> tuple[str, ...]:
    return tuple(str(c) for c in getattr(obj, "classes", ()))


def are_many(pairs: Sequence[Any]) -> bool:
    """Whether all are pairs of samples with their labels, as clients and batches are, not a sample with its label."""
    shapes = [
        [tuple(getattr(part, "shape", ())) for part in pair]
        for pair in pairs
        if isinstance(pair, tuple | list) and len(pair) == 2
    ]
    whole = all(len(x) > 1 and len(y) == 1 and x[0] == y[0] for x, y in shapes)
    return 0 < len(shapes) == len(pairs) and whole and any(y[0] > 1 for _, y in shapes)


def _named(obj: Any) -> tuple[Any, Any] | None:
    """Features and targets of a dictionary by their names; None where there is no such pair."""
    pairs = (pair for pair in PAIRS if isinstance(obj, Mapping) and pair[0] in obj and pair[1] in obj)
    return next(((obj[x], obj[y]) for x, y in pairs), None)


def _samples(obj: TorchDataset[Any], name: str) -> Iterator[Any]:
    """The samples of a user's data set, whose code may fail."""
    count = 0
    if not isinstance(obj, IterableDataset) and not hasattr(obj, "__len__"):
        raise ConfigError(f"{name}: {type(obj).__name__} has no __len__; add one, or make it an IterableDataset")
    try:
        for sample in obj if isinstance(obj, IterableDataset) else (obj[i] for i in range(len(obj))):
            yield sample
            count += 1
    except Exception as error:
        raise DataError(f"{name}: sample {count} cannot be had: {cause_of(error)}") from error


def _pairs(samples: Iterable[object], name: str) -> Iterator[tuple[Any, Any]]:
    for k, entry in enumerate(samples):
        sample = _named(entry) or entry
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            what = f" with {', '.join(map(repr, sample))}" if isinstance(sample, Mapping) else ""
            what += f" of {len(sample)}" if isinstance(sample, (tuple, list)) else ""
            raise DataError(
                f"{name}: sample {k} is {type(sample).__name__}{what}, expected the pair (features, target), or both "
                f"by the names {', '.join(' and '.join(pair) for pair in PAIRS)}"
            )
        yield sample[0], sample[1]


def _hub_side(obj: Any, target: Any, column: str | None, users: str | None, name: str) -> _Side:
    names: list[str] = list(obj.column_names)
    y_name = target or next((n for n in LABELS if n in names), None)
    x_name = column or next((n for n in names if n not in (y_name, users)), None)
    for what in (x_name, y_name, users or y_name):
        if what not in names:
            raise DataError(f"{name}: no column {what!r} for x or y; its columns: {', '.join(names)}; name both")
    owners: list[str] = []

    def samples() -> Iterator[tuple[Any, Any]]:
        for row in obj:
            if users is not None:
                owners.append(str(row[users]))
            value = row[x_name]
            yield value if isinstance(value, torch.Tensor) else _planes(_pixels(value)), row[y_name]

    x, y = _stacked(samples(), name)
    return _Side(x, y, np.array(owners) if users is not None else None, class_names(obj, y_name))


def _pixels(value: Any) -> NDArray[Any]:
    """A sample as an array; a picture of a palette's numbers in its colours."""
    return as_array(value.convert("RGB") if getattr(value, "mode", "") == "P" else value)


def _planes(value: NDArray[Any]) -> NDArray[Any]:
    return value.transpose(2, 0, 1) if value.ndim == 3 else value


def _stacked(samples: Iterable[tuple[object, object]], name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Features one below the other, never held twice, and targets."""
    x: GrowingRows | None = None
    y: list[Any] = []
    for value, label in samples:
        pixels = _pixels(value)
        if not isinstance(value, (torch.Tensor, np.ndarray)):
            pixels = _planes(pixels)  # a picture
        if pixels.dtype.kind not in "uifb":
            raise DataError(f"{name}: sample {len(y)} holds {pixels.dtype}, only images and numbers work")
        pixels = pixels[None] if pixels.ndim == 2 else pixels
        x = x or GrowingRows(pixels.shape, np.uint8 if pixels.dtype == np.uint8 else np.float32)
        if pixels.shape != x.shape:
            raise DataError(f"{name}: sample {len(y)} has shape {pixels.shape}, others {x.shape}; one size only")
        row = x.room(1)
        if row.dtype == np.uint8 and pixels.dtype != np.uint8:
            raise DataError(f"{name}: sample {len(y)} holds {pixels.dtype}, those before uint8; one type only")
        row[0] = pixels
        y.append(label.tolist() if isinstance(label, (torch.Tensor, np.ndarray, np.generic)) else label)
    if x is None:
        raise NoSamples(f"{name}: no samples")
    return x.done(), plain(y, name)


def _table(obj: Any, target: Any, task: Task | None, name: str, options: dict[str, Any]) -> Dataset:
    if hasattr(obj, "iloc") and np.ndim(target) == 1:
        if len(target) != len(obj):
            raise DataError(f"{name}: {len(obj)} samples but {len(target)} targets; every sample needs one target")
        _refuse_order(obj, target, name)
        label = str(getattr(target, "name", None) or "target")
        obj, target = obj.assign(**{label: target.array if hasattr(target, "array") else np.asarray(target)}), label
    if "label" in options:
        if target is not None:
            raise ConfigError(f"{name}: give the target or label, not both")
        target = options.pop("label")
    if target is not None and (np.ndim(target) or not isinstance(target, (str, int))):
        raise ConfigError(f"{name}: target names a column of the table, or holds its targets, got {target!r:.60}")
    names = frame_names(obj)
    target = next((n for n in LABELS if n in names), names[-1]) if target is None else target
    target = str(target)
    options["categorical"] = tuple(
        {*options.get("categorical", ()), *coded_columns(obj)} - {target, options.get("users")}
    )
    table_options = {"label": target, "task": task or "auto", **options}
    spec = make(Csv, table_options, name, {k: v for k, v in fields_of(TableSource).items() if k != "path"})
    return read_table(spec, name, names, frame_cells(obj), Problems(name, first=0))


class HubData(Source):
    """``hub:owner/name``: images or numbers with a label. Opens a connection, because it was asked for by name."""

    name: str = Field(min_length=1, description="owner/name on the hub")
    config: str | None = Field(default=None, description="configuration of the data set, where it has several")
    train: str = Field(default="train", description="split to train on")
    test: str | None = Field(default="test", description="split that is the official test set, if it exists")
    x: str | None = Field(default=None, description="column of the features; None: the first image or array column")
    y: str | None = Field(default=None, description="column of the target; None: label, labels or fine_label")
    users: str | None = Field(default=None, description="column that names the client of a sample (writer_id, ...)")
    task: Literal["classification", "regression"] = Field(default="classification", description="what y is")
    mean: tuple[float, ...] | None = Field(default=None, description="subtracted (from pixels in [0, 1], if images)")
    std: tuple[float, ...] | None = Field(default=None, description="divides after that")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Both splits; without a connection only what the library has kept from before."""
        try:
            import datasets
        except ImportError as error:
            raise ConfigError(f"hub:{self.name}: needs the extra hub; run: pip install 'fedloom[hub]'") from error
        try:
            splits: Any = datasets.load_dataset(self.name, self.config)
        except Exception as error:  # the library raises its own, urllib's and httpx's errors
            raise DataError(
                f"hub:{self.name}: cannot be had ({type(error).__name__}: {error}); check name and connection, or "
                "run this once where there is one (the library keeps data sets in ~/.cache/huggingface)"
            ) from error
        if self.train not in splits:
            raise DataError(f"hub:{self.name}: no split {self.train!r}; {nearest(self.train, splits)}")
        data = as_dataset(
            splits[self.train],
            self.y,
            task=self.task if self.task == "regression" else None,
            test=splits[self.test] if self.test is not None and self.test in splits else None,
            name=f"hub:{self.name}",
            **{
                k: v
                for k, v in (("features", self.x), ("users", self.users), ("mean", self.mean), ("std", self.std))
                if v
            },
        )
        return replace(data, name=self.name)
