"""Conversion of individual samples (from torch data sets, lists and the Hugging Face hub) to arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset

from fedloom.data.sources.archive import GrowingRows
from fedloom.data.sources.array_data import as_array, convert_to_plain_array, has_channels_last, refuse_masked
from fedloom.data.sources.rereading import (
    REREAD_SAMPLES,
    ChangedSamples,
    Reader,
    check_reread_samples,
    is_picture,
    read_at_random,
)
from fedloom.errors import ConfigError, DataError, NoSamples, describe_cause
from fedloom.seeds import preserve_rng

FEATURE_TARGET_NAMES = (
    ("x", "y"),
    ("X", "y"),
    ("data", "target"),
    ("image", "label"),
    ("images", "labels"),
    ("data", "labels"),
    ("features", "target"),
    ("pixel_values", "labels"),
)
"""Names of features and targets in dictionaries and NPZ files."""
COLOR_MODES = {
    "P": "RGB", "PA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB", "HSV": "RGB", "LAB": "RGB", "RGBX": "RGB", "RGBa": "RGBA"
}  # fmt: skip
"""New mode of a converted picture, keyed by Pillow modes whose numbers are not red, green, blue and opacity."""
TARGET_READINGS = 8
"""Number of times that a few samples are read in order to check that their targets do not change."""


class StackedSamples(NamedTuple):
    """Stacked samples.

    Attributes:
        x: features ``[N, ...]``, bytes or float32.
        y: targets, before any conversion.
        dtype: numpy name of the type of the first sample.
        are_pictures: True if samples were pictures. Their channels have been moved to the first axis.
        reader: function that reads samples again and draws new random changes. None if samples do not change.
    """

    x: NDArray[Any]
    y: list[Any]
    dtype: str
    are_pictures: bool
    reader: Reader | None = None


def find_pair(obj: Any) -> tuple[Any, Any] | None:
    """Return the features and targets that a dictionary contains under one of the known pairs of names.

    Return None if there is no such pair.
    """
    pairs = (pair for pair in FEATURE_TARGET_NAMES if isinstance(obj, Mapping) and pair[0] in obj and pair[1] in obj)
    return next(((obj[x], obj[y]) for x, y in pairs), None)


def stack_samples(samples: Iterable[tuple[object, object]], name: str) -> StackedSamples:
    """Return samples as stacked features and a list of targets, without ever holding two copies of the features.

    Args:
        samples: pairs of features and a target.
        name: name of the data set, which is used in messages.

    Raises:
        DataError: samples differ in their shape or type, or are not numbers.
        NoSamples: there are no samples.
    """
    x: GrowingRows | None = None
    y: list[Any] = []
    first, pictures = "", False
    for value, label in samples:
        refuse_masked((value, label), f"{name}: sample {len(y)}")
        numbers, picture = _sample_array(value), is_picture(value)
        if numbers.dtype.kind not in "uifb":
            raise DataError(f"{name}: sample {len(y)} is {numbers.dtype}, but a sample must be an image or numbers")
        if x is None:
            first, pictures = numbers.dtype.name, picture
            x = GrowingRows(numbers.shape, np.uint8 if numbers.dtype == np.uint8 else np.float32)
        if numbers.shape != x.shape:
            raise DataError(
                f"{name}: sample {len(y)} has shape {numbers.shape}, but earlier samples have shape "
                f"{x.shape}. All samples must have the same size"
            )
        row = x.room(1)
        if (row.dtype == np.uint8) is not (numbers.dtype == np.uint8) or picture is not pictures:
            kinds = [f"{'a picture of ' * of}{kind}" for of, kind in ((picture, numbers.dtype), (pictures, first))]
            raise DataError(
                f"{name}: sample {len(y)} is {kinds[0]}, but earlier samples are {kinds[1]}. All "
                "samples must have the same type"
            )
        row[0] = numbers
        y.append(label.tolist() if isinstance(label, (torch.Tensor, np.ndarray, np.generic)) else label)
    if x is None:
        raise NoSamples(f"{name} contains no samples")
    return StackedSamples(x.trim(), y, first, pictures)


def _sample_array(value: object) -> NDArray[Any]:
    """Return a sample as an array. In pictures, the channels come first, and the colors are red, green and blue."""
    mode = COLOR_MODES.get(getattr(value, "mode", "")) if is_picture(value) else None
    array = as_array(value if mode is None else value.convert(mode))  # type: ignore[attr-defined]
    if is_picture(value) and array.ndim == 3:
        array = array.transpose(2, 0, 1)
    return array[None] if array.ndim == 2 else array


def stack_torch_dataset(obj: TorchDataset[Any], name: str, labelled: bool = True) -> StackedSamples:
    """Return the stacked samples of a torch data set.

    If samples change at random, return one version of the samples and a function that reads further versions.

    Args:
        obj: data set whose samples are pairs (features, target). If ``labelled`` is False, samples may also be features
            alone.
        name: name of the data set, which is used in messages.
        labelled: True if every sample must have a target.

    Raises:
        ConfigError: the data set has no length.
        DataError: a sample cannot be read or is not a pair, or its target, shape or type changes at random. Features
            may change at random if samples can be read by position and the changes depend only on the global random
            generators.
    """

    def pairs(places: Sequence[int] | None = None) -> Iterator[tuple[Any, Any]]:
        return iterate_pairs(_iterate_user_dataset(obj, name, places), name, labelled, places)

    again = None if isinstance(obj, IterableDataset) else pairs
    try:
        return stack_samples(check_reread_samples(pairs(), again, lambda: pairs(), name), name)
    except ChangedSamples:
        if again is None or not labelled or not hasattr(obj, "__getitem__"):
            raise
        count = len(obj)  # type: ignore[arg-type]  # checked by _samples
        with preserve_rng():
            some = range(min(count, REREAD_SAMPLES))
            targets = {
                convert_to_plain_array(stack_samples(pairs(some), name).y, name).tobytes()
                for _ in range(TARGET_READINGS)
            }
        if len(targets) > 1:
            raise
    drawn = read_at_random(
        lambda places: stack_samples(pairs(places), name), lambda stack: stack.x.tobytes(), count, name
    )

    def read(places: Sequence[int]) -> NDArray[Any]:
        new = stack_samples(pairs(places), name)
        if (new.x.dtype, new.x.shape[1:]) != (drawn.x.dtype, drawn.x.shape[1:]):
            raise DataError(
                f"{name}: samples are {new.x.dtype} of shape {new.x.shape[1:]}, but when first read, they were "
                f"{drawn.x.dtype} of shape {drawn.x.shape[1:]}. Use the same size and type for all samples"
            )
        return new.x

    return drawn._replace(reader=read)


def _iterate_user_dataset(obj: TorchDataset[Any], name: str, places: Sequence[int] | None = None) -> Iterator[Any]:
    """Yield the samples of a user-defined data set, whose code may raise errors."""
    count: Any = 0
    if not isinstance(obj, IterableDataset) and not hasattr(obj, "__len__"):
        raise ConfigError(
            f"{name}: {type(obj).__name__} has no __len__. Add this method, or make the class an IterableDataset"
        )
    try:
        if isinstance(obj, IterableDataset):
            for sample in obj:
                yield sample
                count += 1
        else:
            for count in range(len(obj)) if places is None else places:
                yield obj[count]
    except Exception as error:
        raise DataError(f"{name}: sample {count} cannot be read: {describe_cause(error)}") from error


def iterate_pairs(
    samples: Iterable[object], name: str, labelled: bool = True, places: Sequence[int] | None = None
) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of features and target from samples of any accepted type.

    Args:
        samples: tuples (features, target), or dictionaries that contain both under names in `FEATURE_TARGET_NAMES`.
        name: name of the data set, which is used in messages.
        labelled: True if every sample must have a target. If it is False, samples that consist of features alone are
            also accepted, and their target is 0.
        places: numbers of the samples in messages. If None, the numbers are 0, 1, and so on.

    Raises:
        DataError: a sample has any other type or length. A list is also rejected, because its two features could be
            mistaken for features and a target.
    """
    for k, entry in enumerate(samples):
        sample = find_pair(entry) or entry
        if isinstance(sample, tuple) and len(sample) == 2:
            yield sample[0], sample[1]
        elif not labelled and not isinstance(sample, (tuple, Mapping)):
            yield sample, 0
        else:
            what = f" with {', '.join(map(repr, sample))}" if isinstance(sample, Mapping) else ""
            what += f" of {len(sample)}" if isinstance(sample, (tuple, list)) else ""
            raise DataError(
                f"{name}: sample {k if places is None else places[k]} is {type(sample).__name__}{what}, expected the "
                "pair (features, target) as a tuple, or features and target by name: "
                f"{', '.join(' and '.join(pair) for pair in FEATURE_TARGET_NAMES)}"
            )


def stack_hub_columns(
    obj: Any, x_name: str, y_name: str | None, users: str | None, name: str
) -> tuple[StackedSamples, list[str]]:
    """Return the stacked features and targets from two columns of a Hugging Face data set, and the client of each row.

    Args:
        obj: Hugging Face data set.
        x_name: column with the features.
        y_name: name of the target column. None if all targets are 0.
        users: name of the column that contains the client of each row. None if there is no such column.
        name: name of the data set, which is used in messages.

    Raises:
        DataError: `stack_samples` rejects the samples, or a row changes when it is read again, for example because of
            ``set_transform``.
    """
    image = type(obj.features.get(x_name)).__name__ == "Image"  # decoded as [height, width, channels]
    owners: list[str] = []

    def rows() -> Iterator[Any]:
        for row in obj:
            owners.extend([] if users is None else [str(row[users])])
            yield row

    def pairs(rows: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        for row in rows:
            value = row[x_name]
            if not isinstance(value, torch.Tensor) and not is_picture(value):
                value = as_array(value)
                if value.ndim == 3 and (image or has_channels_last((1, *value.shape))):
                    value = value.transpose(2, 0, 1)
            yield value, 0 if y_name is None else row[y_name]

    def again(places: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        return pairs(obj[place] for place in places)

    frozen = f"[(row[{x_name!r}], {'0' if y_name is None else f'row[{y_name!r}]'}) for row in d]"
    return stack_samples(check_reread_samples(pairs(rows()), again, lambda: (), name, frozen=frozen), name), owners


def stack_unlabelled_samples(rows: Any, name: str) -> tuple[NDArray[Any], str]:
    """Return samples ``[N, ...]`` that need no targets, and the numpy name of their original type.

    Args:
        rows: an array or tensor. A list of samples (arrays, tensors or pictures) is also accepted. A torch data set is
            also accepted, but its targets are ignored. A data set from the hub must have a column that contains arrays
            or pictures.
        name: name of the data in messages.

    Raises:
        ConfigError: the argument is a tuple, which would contain features and targets, or it has any other unsupported
            type.
        DataError: samples differ in their shape or type.
    """
    if isinstance(rows, tuple):
        raise ConfigError(
            f"{name}: a tuple means features and targets (x, y), but this tuple contains no targets. "
            "Pass x alone, or the samples as a list"
        )
    if hasattr(rows, "batch_size") and hasattr(rows, "dataset"):
        raise ConfigError(f"{name} is a {type(rows).__name__}. Pass its .dataset")
    stack = None
    if isinstance(rows, TorchDataset):
        stack = stack_torch_dataset(rows, name, labelled=False)
    elif hasattr(rows, "column_names") and hasattr(rows, "features"):
        column = next((c for c in rows.column_names if len(rows) and _is_sample(rows[0][c])), None)
        if column is None:
            raise ConfigError(
                f"{name} contains no column of arrays or pictures. Its columns: {', '.join(rows.column_names)}"
            )
        stack, _ = stack_hub_columns(rows, column, None, None, name)
    elif is_picture(rows):
        raise ConfigError(f"{name} is a single picture. Pass a list of pictures")
    elif isinstance(rows, list) and rows and isinstance(rows[0], torch.Tensor):
        stack = stack_samples(((value, 0) for value in rows), name)
    return stack_features(rows, name)[:2] if stack is None else (stack.x, stack.dtype)


def stack_features(values: Any, name: str) -> tuple[NDArray[Any], str, bool]:
    """Return features ``[N, ...]``, the numpy name of their type, and whether they were pictures (see `stack_samples`).

    Raises:
        DataError: samples differ in shape, or some samples are bytes and others are numbers on a different scale.
    """
    samples = values if isinstance(values, list | tuple) else ()
    if any(map(is_picture, samples)):
        stack = stack_samples(((value, 0) for value in samples), name)
        return stack.x, stack.dtype, stack.are_pictures
    dtypes = {k: str(v.dtype) for k, v in enumerate(samples) if getattr(v, "ndim", 0) and hasattr(v, "dtype")}
    first = {dtype.endswith("uint8"): k for k, dtype in reversed(dtypes.items())}
    if len(first) > 1:
        places = first[True], first[False]
        raise DataError(
            f"{name}: sample {places[0]} is bytes (uint8), but sample {places[1]} is "
            f"{dtypes[places[1]]}. All samples must have the same type"
        )
    array = convert_to_plain_array(values, name)
    return array, array.dtype.name, False


def _is_sample(cell: object) -> bool:
    return is_picture(cell) or np.ndim(cell) > 0  # type: ignore[arg-type]
