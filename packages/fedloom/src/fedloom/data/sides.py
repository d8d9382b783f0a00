"""Training and test sets that a user passes in memory, as arrays, and errors for sets that do not match."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
    default_convert,
)
from torch.utils.data import Dataset as TorchDataset

from fedloom.data.samples import (
    FEATURE_TARGET_NAMES,
    StackedSamples,
    find_pair,
    iterate_pairs,
    stack_features,
    stack_hub_columns,
    stack_samples,
    stack_torch_dataset,
)
from fedloom.data.sources.array_data import channels_first, convert_to_plain_array
from fedloom.data.sources.rereading import Reader
from fedloom.data.sources.table.frames import class_names, frame_names, is_frame, is_hub
from fedloom.data.subjects.design import SAMPLE_ROLES
from fedloom.errors import ConfigError, DataError

TARGET_NAMES = ("label", "labels", "fine_label", "target", "y")
ACCEPTED_FORMS = (
    "arrays or tensors (x, y), a dictionary with x and y, a torch Dataset, a Hugging Face Dataset, a pandas DataFrame, "
    "an Arrow table"
)


class SampleSet(NamedTuple):
    """Training or test set: features, targets, clients of the samples, declared classes and columns, and notes.

    `dtype` is the numpy name of the type of individual samples, or empty if the set was an array. `pictures` is True if
    the samples were pictures. Their channels have been moved to the first axis.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    users: NDArray[Any] | None = None
    classes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dtype: str = ""
    are_pictures: bool = False
    reader: Reader | None = None

    @classmethod
    def create(cls, x: object, y: object, name: str, users: object = None) -> SampleSet:
        """Create a set from a user's features and targets."""
        check_target_order(x, y, name)
        columns = tuple(frame_names(x)) if is_frame(x) else ()
        owners = None if users is None else convert_to_plain_array(users, name)
        array, dtype, pictures = stack_features(x, name)
        return cls(array, convert_to_plain_array(y, name), owners, columns=columns, dtype=dtype, are_pictures=pictures)

    @classmethod
    def create_from_stack(cls, stack: StackedSamples, name: str, **more: Any) -> SampleSet:
        """Create a set from stacked samples."""
        more |= {"dtype": stack.dtype, "are_pictures": stack.are_pictures}
        return cls(stack.x, convert_to_plain_array(stack.y, name), reader=stack.reader, **more)

    def placed(self, channels_last: bool | None, place: str) -> SampleSet:
        """Return the set after moving the channels of images to the first axis (see `channels_first`)."""
        read = self.reader
        if self.are_pictures:
            return self

        def placed(places: Sequence[int]) -> NDArray[Any]:
            assert read is not None
            return np.ascontiguousarray(channels_first(read(places), channels_last, place))

        x = channels_first(self.x, channels_last, place)
        return self._replace(x=x, reader=None if read is None else placed)


def merge_class_names(sides: Iterable[SampleSet]) -> tuple[str, ...]:
    """Return the longest list of classes that any of the sets declares. The sets must number their classes alike."""
    return max((side.classes for side in sides), key=len)


def join_roles(sides: Sequence[object], name: str) -> dict[str, NDArray[Any]]:
    """Return the entries of dictionaries other than features and targets, joined over all sets and keyed by role.

    Raises:
        DataError: some, but not all, of the sets contain an entry.
    """
    by_role = {
        role: [side[role] for side in sides if isinstance(side, Mapping) and role in side] for role in SAMPLE_ROLES
    }
    if odd := [role for role, values in by_role.items() if values and len(values) < len(sides)]:
        some = f"{len(by_role[odd[0]])} of {len(sides)} sets"
        raise DataError(f"{name}: {some} have {odd[0]!r}. Pass {odd[0]!r} for all clients, or for none")
    return {role: np.concatenate([np.asarray(v) for v in values]) for role, values in by_role.items() if values}


def check_joinable(name: str, sides: Mapping[str, SampleSet], tokens: bool = False) -> None:
    """Raise an error if sets cannot be joined without changing the meaning of at least one of them.

    Args:
        name: name of the data set.
        sides: sets of samples, keyed by the names that messages use for them.
        tokens: True if features are tokens, which may also be stored as bytes.

    Raises:
        DataError: samples have no targets, features are bytes in some sets and other numbers in others, targets are
            text in some sets and numbers in others, or classes or columns are in different orders.
    """
    for who, side in sides.items() if len(sides) > 1 else ():
        if side.x.shape[:1] != side.y.shape[:1]:
            rows = (len(values) if values.ndim else 1 for values in (side.x, side.y))
            raise DataError("{}: {}: {} samples but {} targets. Every sample needs one target".format(name, who, *rows))
        for what, values in (("features", side.x), ("targets", side.y)):
            if values.dtype.kind == "f" and not np.isfinite(values.sum(dtype=np.float64)):
                odd = ~np.isfinite(values.reshape(len(values), -1)).all(1)
                if odd.any():
                    raise DataError(
                        f"{name}: {who}: NaN or Inf in the {what} of {odd.sum()} samples "
                        f"(first: sample {odd.argmax()}). Remove or repair them"
                    )
    bytes_of = {who: side.x.dtype == np.uint8 for who, side in sides.items()}
    if len(set(bytes_of.values())) > 1 and not tokens:
        whole, other = (next(who for who, value in bytes_of.items() if value is kind) for kind in (True, False))
        raise DataError(
            f"{name}: {whole}: features are bytes, which fedloom divides by 255, but the features of {other} are "
            f"{sides[other].x.dtype}, which fedloom does not divide. Use the same type for all features"
        )
    is_text = {who: side.y.dtype.kind in "US" for who, side in sides.items() if side.y.size}
    if len({*is_text.values()}) > 1:
        text, numbers = (next(who for who, value in is_text.items() if value is kind) for kind in (True, False))
        raise DataError(
            f"{name}: {text}: targets are text, but targets of {numbers} are numbers. Use the same type for all targets"
        )
    for field, cure in (
        ("classes", "number them in the same order"),
        ("columns", "pass the same columns in the same order, as x[names]"),
    ):
        named = {who: getattr(side, field) for who, side in sides.items() if getattr(side, field)}
        longest = max(named.values(), key=len, default=())
        for who, names in named.items():
            if names != longest[: len(names)] or (field == "columns" and len(names) != len(longest)):
                first = next(other for other, order in named.items() if order == longest)
                raise DataError(
                    f"{name}: {who}: {field} are {', '.join(names):.200}, but for {first} they are "
                    f"{', '.join(longest):.200}; {cure}"
                )


def check_target_order(x: object, y: object, name: str) -> None:
    """Raise an error if the targets and the features are pandas objects whose indexes are in different orders."""
    rows, labels = (getattr(part, "index", None) if hasattr(part, "iloc") else None for part in (x, y))
    if rows is None or labels is None or len(rows) != len(labels) or rows.equals(labels):
        return
    if rows.is_unique and labels.is_unique and labels.isin(rows).all():
        raise DataError(
            f"{name}: the index of the targets has a different order than the index of the features. "
            "Pass y.loc[x.index], or y.to_numpy() if rows correspond by position"
        )


def read_sample_set(obj: Any, target: Any, column: str | None, users: Any, name: str) -> SampleSet:
    """Return a training or test set, in any form that `Dataset.create` accepts, as arrays."""
    pair = find_pair(obj)
    if target is not None and (pair or isinstance(obj, TorchDataset) or (is_hub(obj) and not isinstance(target, str))):
        raise ConfigError(f"{name} already contains targets. Omit `target`, or pass only the features")
    if is_hub(obj):
        return _read_hub_sample_set(obj, target, column, users, name)
    if pair:
        return SampleSet.create(*pair, name, obj.get("clients", obj.get("users")))._replace(
            notes=_note_unread_entries(obj, name)
        )
    if isinstance(obj, TensorDataset):
        if len(obj.tensors) != 2:
            raise ConfigError(f"{name} has {len(obj.tensors)} tensors, but expected features and targets")
        return SampleSet.create(*obj.tensors, name)._replace(classes=_declared_classes(obj))
    if isinstance(obj, (tuple, list)) and obj and all(isinstance(part, TorchDataset | DataLoader) for part in obj):
        raise ConfigError(
            f"{name}: two data sets are not a pair (x, y). Pass {{'train': one, 'test': other}}, or "
            "pass the data sets of clients to fl.Federation.create"
        )
    if isinstance(obj, tuple) and len(obj) == 2 and target is None and not isinstance(obj[0], tuple):
        return SampleSet.create(obj[0], obj[1], name)
    if isinstance(obj, list) and target is None and are_sample_sets(obj):
        raise ConfigError(
            f"{name}: {len(obj)} pairs of features and labels, each with many samples, look like the data of clients. "
            "Pass them to fl.Federation.create, or to fl.simulate instead of a federation"
        )
    pairs = isinstance(obj, list) and all((isinstance(s, tuple) and len(s) == 2) or find_pair(s) for s in obj)
    if pairs and target is None:
        return SampleSet.create_from_stack(stack_samples(iterate_pairs(obj, name), name), name)
    if isinstance(obj, (np.ndarray, torch.Tensor, list, tuple)) or _is_array(obj):
        if target is None or isinstance(target, str):
            parts = obj if isinstance(obj, tuple) else ()
            cure = "the pair (x, y) as a tuple, or target"
            if isinstance(obj, list):
                raise ConfigError(
                    f"{name}: a list contains samples, but these have no targets. Pass features and targets as the "
                    "tuple (x, y), or a list of tuples (features, target), or pass the targets as `target`"
                )
            if len(parts) == 4 or [len(part) for part in parts if type(part) is tuple] == [2, 2]:
                cure = "{'train': (x, y), 'test': (x_test, y_test)}"
            raise ConfigError(f"{name}: features without targets. Pass {cure}")
        return SampleSet.create(obj, target, name)
    if isinstance(obj, TorchDataset):
        return SampleSet.create_from_stack(stack_torch_dataset(obj, name), name, classes=_declared_classes(obj))
    if is_frame(obj):
        raise ConfigError(
            f"{name}: a table cannot be a client. Join the tables, with a column that names the client, as in "
            "fl.Dataset.create(frame, target='ill', client_column='site'), and pass partition=fl.partitions.natural()"
        )
    subset = type(getattr(obj, "sampler", None)) not in (type(None), SequentialSampler, RandomSampler)
    collates = getattr(obj, "collate_fn", default_collate) not in (default_collate, default_convert)
    hints = {
        "toarray": "pass x.toarray()",
        "batch_size": ("pass torch.utils.data.Subset(x.dataset, list(x.sampler))" if subset else "pass its .dataset")
        + (", whose samples come from its collate_fn" if collates else ""),
        "__next__": "pass the object that it iterates over, such as the .dataset of a DataLoader",
        "strip": "load a file or a named data set with fl.load",
        "to_pandas": "pass x.to_pandas()",
    }
    hint = next((f"; {say}" for key, say in hints.items() if hasattr(obj, key)), "")
    raise ConfigError(f"{name}: {type(obj).__name__} is not a known form of data{hint}. Known forms: {ACCEPTED_FORMS}")


def _is_array(obj: object) -> bool:
    """Return True if NumPy can read the object as an array. This is the case for an h5py or zarr array, for example."""
    return hasattr(obj, "__array__") and not is_frame(obj) and not isinstance(obj, TorchDataset)


def _declared_classes(obj: TorchDataset[Any]) -> tuple[str, ...]:
    return tuple(str(c) for c in getattr(obj, "classes", ()))


def are_sample_sets(pairs: Sequence[Any]) -> bool:
    """Return True if every pair is a set of labeled samples, such as a client or a batch, and not a single sample."""
    shapes = [
        [tuple(getattr(part, "shape", ())) for part in pair]
        for pair in pairs
        if isinstance(pair, tuple | list) and len(pair) == 2
    ]
    whole = all(len(x) > 1 and len(y) == 1 and x[0] == y[0] for x, y in shapes)
    return 0 < len(shapes) == len(pairs) and whole and any(y[0] > 1 for _, y in shapes)


def batches_error(place: str, batches: Sequence[Any]) -> ConfigError:
    """Return the error for batches that were passed instead of a data set."""
    return ConfigError(
        f"{place} is a list of {len(batches)} batches. Pass the data set of the batches, or (torch.cat([x for x, _ "
        "in batches]), torch.cat([y for _, y in batches]))"
    )


def _note_unread_entries(obj: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a note on entries of a dictionary that have one value per sample but are not read.

    If the entry is a test set, an error is raised instead.

    Raises:
        ConfigError: the dictionary contains a test set besides features and targets.
    """
    x, y = next(pair for pair in FEATURE_TARGET_NAMES if pair[0] in obj and pair[1] in obj)
    unused = [
        key for key in obj if key not in (x, y, "clients", "users", "frame", *SAMPLE_ROLES)
    ]  # a scikit-learn Bunch contains both
    if tests := [key for key in unused if "test" in str(key).lower().split("_")]:
        raise ConfigError(
            f"{name}: fedloom would ignore {tests[0]!r} beside {x!r} and {y!r}. Pass {{'train': (x, "
            "y), 'test': (x, y)}"
        )
    beside = [repr(key) for key in unused if _count_samples(obj[key]) == _count_samples(obj[x])]
    return (f"fedloom reads {x!r} and {y!r} of the dictionary, and ignores {', '.join(beside)}",) if beside else ()


def _count_samples(values: object) -> int | None:
    """Return the number of samples in an array, tensor, table or list, or None if the object is of any other type."""
    shape = getattr(values, "shape", (len(values),) if isinstance(values, tuple | list) else ())
    return shape[0] if shape else None


def _read_hub_sample_set(obj: Any, target: Any, column: str | None, users: str | None, name: str) -> SampleSet:
    names: list[str] = list(obj.column_names)
    y_name = next((n for n in TARGET_NAMES if n in names), None) if target is None else target
    features = [n for n in names if n not in (y_name, users)]
    arrays = (n for n in features if len(obj) and np.ndim(obj[0][n]))
    x_name = next(arrays, next(iter(features), None)) if column is None else column
    for what in (x_name, y_name, y_name if users is None else users):
        if what not in names:
            raise DataError(
                f"{name} has no column {what!r} for x or y. Its columns: {', '.join(names)}. Name one "
                "column for x and one for y"
            )
    beside = ", ".join(repr(n) for n in features if n != x_name)
    note = f"fedloom reads the columns {x_name!r} and {y_name!r}, and ignores {beside}"
    notes = (note,) if beside and column is None else ()
    stack, owners = stack_hub_columns(obj, str(x_name), str(y_name), users, name)
    return SampleSet.create_from_stack(
        stack, name, users=np.array(owners) if owners else None, classes=class_names(obj, y_name), notes=notes
    )
