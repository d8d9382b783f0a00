"""Creation of a `Dataset` from arrays in memory.

Shapes, types and values are checked, and all problems are reported in a single message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.dataset import Dataset, Task, raise_data_problems
from fedloom.data.sources._base import name_file_in_errors, number_names, scale_tensor
from fedloom.data.sources.table.cells import MAX_NUMBER
from fedloom.data.sources.table.checks import note_doubtful_columns, note_doubtful_levels
from fedloom.data.sources.table.levels import similar_levels_text
from fedloom.data.sources.table.targets import similar_levels_message
from fedloom.data.subjects.copies import count_image_copies
from fedloom.data.survey.findings import NEAR_COPIES_NOTE, note_near_copies
from fedloom.errors import ConfigError, DataError
from fedloom.hints import unknown_name_error

MAX_COMPARED_COLUMNS = 64
"""Maximum number of columns that are compared with each other in the search for near-duplicate rows."""
MAX_NOTED_VALUES = 2**24
"""Maximum number of values in a data set that is scanned for notes (64 MiB of float32)."""
MAX_EXACT_INTEGER = 2**24
"""Float32 represents every integer up to this number exactly."""
Layout = Literal["image", "sequence"]
"""Meaning of samples ``[height, width]``: either images with one channel or sequences ``[time, features]``."""
CHANNEL_COUNTS = (1, 3, 4)
"""Common numbers of channels in images: gray, RGB, and RGB with an alpha channel. Gray images with an alpha channel (2
channels) are rare and are not included."""
MIN_PIXEL_COLUMNS = 64
"""Minimum number of columns in a table that may contain the pixels of images."""
LARGE_VALUE = 100.0
"""Median absolute value of a column, or largest value in images, above which the usual learning rates are too large."""


def make_dataset(
    name: str,
    x: NDArray[Any],
    y: NDArray[Any],
    task: Task | None = None,
    *,
    where: object = None,
    split: int | None = None,
    classes: Sequence[str] = (),
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    users: Any = None,
    vocabulary: Sequence[str] | int = (),
    original_dtype: str = "",
    layout: Layout | None = None,
) -> Dataset:
    """Check arrays, and create a data set from them.

    Args:
        name: name of the data set.
        x: features [N, ...]. Bytes keep their type, and all other numbers become float32. Samples [N, height, width]
            get a channel axis.
        y: integers, booleans or text [N], or numbers [N, k]. It may also contain integers [N, length] for tokens and
            sequences, or masks [N, height, width] for images, with -1 for positions without a label.
        task: meaning of the targets. If None, the task is classification if the targets are integers, text or booleans.
        where: name of the file, which is used in messages. If None, the name of the data set is used.
        split: index of the first sample in the official test set, or None if there is none.
        classes: names of the classes or labels. If empty, classes are named by numbers from 0, or by the sorted texts
            in y.
        mean: number that is subtracted (for bytes, from pixels in [0, 1]).
        std: divisor that is applied after the subtraction.
        users: client of each sample [N], or None.
        vocabulary: names of the tokens, or the number of tokens. If it is given, x contains tokens [N, length], with 0
            as padding at the end.
        original_dtype: numpy name of the type that x had originally. If empty, this is the type of x.
        layout: "sequence" if x has the shape ``[N, time, features]``. None for "image".

    Raises:
        DataError: shapes, types, lengths or values are invalid.
    """
    place = str(where or name)
    texts = [(what, v) for what, v in (("classes", classes), ("vocabulary", vocabulary)) if isinstance(v, str)]
    names = tuple(map(str, range(vocabulary))) if isinstance(vocabulary, int) else tuple(vocabulary)
    if layout not in (None, *get_args(Layout)):
        raise unknown_name_error("layout", layout, get_args(Layout), place)
    if layout == "sequence":
        x = x[:, 0] if x.ndim == 4 and x.shape[1] == 1 else x
        if x.ndim != 3:
            raise DataError(f"{place}: layout = 'sequence' needs x of shape [N, time, features], got {x.shape}")
    each = bool(names) and y.ndim == 2 and y.dtype.kind in "ui" and task != "multilabel"
    dense = not names and task not in ("multilabel", "regression") and _is_dense(x, y, layout)
    if dense:
        each, y = True, np.ascontiguousarray(y.reshape(len(y), -1)).astype(np.int64)
    elif y.ndim > 2:
        raise DataError(
            f"{place}: y {y.shape} does not fit images of x {x.shape}. Masks are whole numbers of "
            "shape [N, height, width] with the size of the images, and -1 for pixels without a label"
        )
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 and not each else y
    problems = []
    if x.dtype.kind not in "uifb" or x.ndim == 0:
        problems.append(f"x must be numbers [N, ...], got {x.dtype} {x.shape}. Encode text as numbers first")
    if x.ndim == 1:
        problems.append(f"x must be [N, features], got {x.shape}. For a single feature, pass x[:, None]")
    if y.ndim not in (1, 2) or y.dtype.kind not in "uifbU" or (y.ndim == 2 and y.dtype.kind == "U"):
        cures = {"S": "pass y.astype(str)", "M": "pass y.astype(str), or numbers", "c": "pass real numbers"}
        cure = cures.get(y.dtype.kind, "pass one row per sample")
        problems.append(f"y must be [N] classes or [N, k] targets, got {y.dtype} {y.shape}; {cure}")
    if len(x.shape) and len(y.shape) and len(x) != len(y):
        problems.append(f"{len(x)} samples but {len(y)} targets. Every sample needs one target")
    problems += [f"{what} must be a list of names, got the text {names!r}" for what, names in texts if names]
    if users is not None and np.shape(users) != x.shape[:1]:
        problems.append(f"users have shape {np.shape(users)} for {len(x)} samples. Pass one client per sample")
    raise_data_problems(place, problems)
    if names and ((whole := x.astype(np.int32)) != x).any():
        raise DataError(f"{place}: tokens must be whole numbers, got {x.dtype}. Encode the text")
    notes: tuple[str, ...] = ()
    if names:
        features = torch.from_numpy(whole)
    else:
        kept = as_features(x, place)
        features = torch.from_numpy(np.require(kept, requirements=["C", "W"]))
        notes = tuple(_note_rounded_integers(x, kept))
    original_dtype = original_dtype or x.dtype.name
    declared = bool(classes)
    if each:
        classes = tuple(classes) or number_names(y.clip(0).ravel(), place)
        target, kind = torch.from_numpy(y.astype(np.int64)), task or "classification"
    else:
        target, kind, classes = _convert_targets(y, task, tuple(classes), place)
    if split is not None and classes and not declared and kind != "multilabel":
        new = sorted(set(target[split:].flatten().tolist()) - {-1, *target[:split].flatten().tolist()})
        shown = ", ".join(repr(classes[c]) if c < len(classes) else str(c) for c in new)
        raise_data_problems(
            place,
            [
                f"the test set contains classes that no training sample has: {shown}. Remove these "
                "samples, or list all classes in `classes`"
            ]
            if new
            else [],
        )
    owners = None if users is None else convert_to_plain_array(users, f"{name}: users")
    if owners is not None and owners.dtype.kind == "f" and np.isnan(owners).any():
        raise DataError(
            f"{place}: users: sample {int(np.isnan(owners).argmax())} has no client. Assign every sample to a client"
        )
    if owners is not None and owners.dtype.kind == "U" and (blank := np.char.strip(owners) == "").any():
        raise DataError(
            f"{place}: users: sample {int(blank.argmax())} has an empty client name ({int(blank.sum())} such samples). "
            "Name the client of every sample, such as 'unknown'"
        )
    levels, codes = (None, None) if owners is None else np.unique(owners, return_inverse=True)
    with name_file_in_errors(Path(place)):
        return Dataset(
            name,
            features[:, None] if features.ndim == 3 and layout != "sequence" else features,
            target,
            kind,
            classes,
            scale_tensor(mean),
            scale_tensor(std),
            None if split is None else torch.arange(split, len(x)),
            users=None if codes is None else torch.from_numpy(codes),
            user_names=() if levels is None else tuple(str(level) for level in levels),
            vocabulary=names,
            positions=dense,
            notes=notes,
            original_dtype="" if names or original_dtype in ("uint8", "float32") else original_dtype,
        )


def _is_dense(x: NDArray[Any], y: NDArray[Any], layout: Layout | None) -> bool:
    """Return True if y has a label for each pixel of images or each time step of sequences."""
    if y.dtype.kind not in "uibf" or not y.size or (y.dtype.kind == "f" and not bool((y == np.floor(y)).all())):
        return False
    if layout == "sequence":
        return y.ndim == 2 and y.shape[1] == x.shape[1] > 1
    pixels = y.shape[1:] if y.ndim == 3 else y.shape[2:] if y.ndim == 4 and y.shape[1] == 1 else ()
    return x.ndim in (3, 4) and len(pixels) == 2 and x.shape[-2:] == pixels


def as_features(x: NDArray[Any], place: str) -> NDArray[Any]:
    """Return numbers ``[N, ...]`` of a type that models accept: bytes stay bytes, and other numbers become float32.

    Raises:
        DataError: a number is outside the range of float32.
    """
    return x if x.dtype in (np.uint8, np.float32) else narrow_numbers(x, np.empty(x.shape, np.float32), place)


def channels_first(x: NDArray[Any], channels_last: bool | None, place: object) -> NDArray[Any]:
    """Return images as ``[N, channels, height, width]``. Other samples are returned unchanged.

    Args:
        x: samples ``[N, ...]``.
        channels_last: True if images are ``[N, height, width, channels]``. If None, an error is raised if the shape
            suggests that the channels are last.
        place: location of the data, named in error messages.

    Raises:
        DataError: the order of the axes is unclear, or contradicts the shape.
    """
    if channels_last is None and has_channels_last(x.shape):
        raise DataError(
            f"{place}: x {x.shape} looks like images with the channels last. Set channels_last = True or False"
        )
    if channels_last and x.ndim != 4:
        raise DataError(f"{place}: channels_last needs x of shape [N, height, width, channels], got {x.shape}")
    return x.transpose(0, 3, 1, 2) if channels_last else x


def has_channels_last(shape: Sequence[int]) -> bool:
    """Return True if an array ``[N, ...]`` has the shape of images with the channels last.

    The first axis must not be a common number of channels (see `CHANNEL_COUNTS`). The length of the last axis must be
    such a number. If the length of the first axis is not 2, the length of the last axis may also be 2, or smaller than
    the sides of square images, such as satellite images.
    """
    if len(shape) != 4 or shape[1] in CHANNEL_COUNTS:
        return False
    return shape[3] in CHANNEL_COUNTS or (shape[1] != 2 and (shape[3] == 2 or shape[3] < shape[1] == shape[2]))


def _note_rounded_integers(x: NDArray[Any], kept: NDArray[Any]) -> Iterator[str]:
    """Yield a note on integers ``[N, ...]`` that float32 cannot represent exactly."""
    if x.dtype.kind not in "ui" or not x.size or max(int(x.max()), -int(x.min())) <= MAX_EXACT_INTEGER:
        return
    with np.errstate(invalid="ignore"):
        changed = kept.astype(x.dtype) != x
    if changed.any():
        at = tuple(np.argwhere(changed)[0].tolist())
        where = f"sample {at[0]}" + (f", column {at[1]}" if len(at) == 2 else "")
        yield (
            f"x: {int(changed.sum()):,} whole numbers beyond {MAX_EXACT_INTEGER:,} are rounded to float32 ({where}: "
            f"{x[at]} is {int(kept[at])}). Subtract the smallest number, or use a table, whose columns are scaled first"
        )


def narrow_numbers(x: NDArray[Any], out: NDArray[Any], place: str, first: int = 0) -> NDArray[Any]:
    """Convert numbers to the narrower type of the array ``out``, write them into it, and return it.

    Args:
        x: numbers ``[N, ...]``.
        out: array of the same shape.
        place: location of the data, named in error messages.
        first: number of the first row in messages.

    Raises:
        DataError: a number is outside the range that models can use.
    """
    with np.errstate(over="ignore"):  # infinity is rejected below
        out[...] = x
    if x.dtype.kind == "f" and x.dtype.itemsize > out.dtype.itemsize:
        beyond = np.isinf(out) & np.isfinite(x)
        if beyond.any():
            at = tuple(np.argwhere(beyond)[0].tolist())
            column = f", column {at[1]}" if len(at) == 2 else ""
            rows = int(beyond.reshape(len(x), -1).any(1).sum())
            more = f" ({rows} such rows)" if rows > 1 else ""
            raise DataError(
                f"{place}: row {first + at[0]}{column}: expected a number of at most "
                f"{MAX_NUMBER:.3g}, got {x[at]:g}{more}. Repair the number, or remove the row"
            )
    return out


def add_notes(data: Dataset) -> Dataset:
    """Return a data set made of arrays, with notes on its columns or images.

    A note is added to images of floats with large values.

    A note is added to a table of bytes, because its values may not be pixels. Samples are treated as images if they are
    bytes, have more than one axis, or have many columns of which at least half share the same minimum or maximum.
    """
    x = data.x
    if x.dtype == torch.uint8 and x.ndim == 2 and not data.vocabulary:
        note = (
            "x contains bytes (uint8), which are read as pixels and divided by 255. If the bytes are "
            "not pixels, pass floats"
        )
        return replace(data, notes=(*data.notes, note))
    if x.dtype == torch.uint8 and x.numel() and not data.vocabulary and int(x.max()) <= 1:
        note = (
            "x contains only the bytes 0 and 1, and bytes are divided by 255, so all samples are "
            "nearly black. Use 255 for white, or pass floats"
        )
        data = replace(data, notes=(*data.notes, note))
    data = add_copy_note(data)
    if not x.is_floating_point() or not 0 < x.numel() <= MAX_NOTED_VALUES or data.vocabulary:
        return data
    if x.ndim in (2, 3):
        units = None if data.design is None or data.design.subject is None else data.design.units
        numbers = [column.double().numpy() for column in x.flatten(1).T[:MAX_COMPARED_COLUMNS]]
        data = replace(data, notes=(*data.notes, *note_near_copies(numbers, units)))
    if x.ndim != 2 or _is_wide(x):
        largest = float(x.abs().max())
        note = (
            f"x contains numbers of up to {largest:,.4g}. Floats are used without scaling, so training may diverge or "
            "learn nothing. Divide the numbers, or pass images as bytes (uint8), which are divided by 255"
        )
        return replace(data, notes=(*data.notes, note)) if largest > LARGE_VALUE and data.std is None else data
    columns = {str(k): values.double().numpy() for k, values in enumerate(x.T)}
    levels, scaled = {}, dict(columns) if data.std is None else {}
    if data.classed:
        levels = {"y": (data.y.double().numpy(), data.classes)}
    else:
        targets = data.y[:, :1] if data.task == "survival" else data.y
        of_targets = {f"y {k}" if k else "y": values.double().numpy() for k, values in enumerate(targets.T)}
        columns |= of_targets
        scaled |= of_targets if data.task == "regression" else {}
    notes = (
        *note_doubtful_columns(columns, columns, 0, arrays=True),
        *note_doubtful_levels(levels, "y"),
        *_note_unscaled_columns(scaled),
    )
    return replace(data, notes=(*data.notes, *notes))


def add_copy_note(data: Dataset) -> Dataset:
    """Return a data set of images. If it contains near-duplicates, add a note."""
    if data.x.ndim != 4 or data.vocabulary or not (close := count_image_copies(data.x, data.design)):
        return data
    return replace(data, notes=(*data.notes, NEAR_COPIES_NOTE.format(f"{close:,}", f"{len(data):,} images")))


def _is_wide(x: torch.Tensor) -> bool:
    """Return True if rows ``[N, p]`` look like the pixels of images."""
    ends = [edge.unique(return_counts=True)[1].max() for edge in (x.amin(0), x.amax(0))]
    return x.shape[1] >= MIN_PIXEL_COLUMNS and 2 * int(max(ends)) >= x.shape[1]


def _note_unscaled_columns(columns: Mapping[str, NDArray[np.float64]]) -> Iterator[str]:
    """Yield a note on the numeric columns of an array that contain large values.

    In contrast, columns of a table are scaled.
    """
    sizes = {name: float(np.median(np.abs(values))) for name, values in columns.items()}
    large = [name for name in sorted(sizes, key=lambda name: -sizes[name]) if sizes[name] > LARGE_VALUE]
    if large:
        several = f", the largest of {len(large)} such columns" if len(large) > 1 else ""
        yield (
            f"column {large[0]} has large numbers, with a median size of {sizes[large[0]]:,.4g}{several}. Arrays are "
            "not scaled, so training may diverge or learn nothing. Divide the numbers by their standard deviation, or "
            "use a table, whose columns are scaled"
        )


def _convert_targets(
    y: NDArray[Any], task: Task | None, classes: tuple[str, ...], place: str
) -> tuple[torch.Tensor, Task, tuple[str, ...]]:
    if task in ("survival", "count"):
        if y.dtype.kind not in "uifb":
            raise DataError(f"{place}: y of a {task} task must be numbers, got {y.dtype}")
        return torch.from_numpy(y.reshape(len(y), -1).astype(np.float64)), task, ()
    if task == "multilabel":
        if y.ndim != 2 or y.dtype.kind not in "uifb":
            raise DataError(
                f"{place}: y of a multilabel task must be a 0/1 array of shape [N, labels], got {y.dtype} {y.shape}. "
                "sklearn.preprocessing.MultiLabelBinarizer creates such an array from lists of labels"
            )
        return torch.from_numpy(y.astype(np.float64)), task, classes or tuple(map(str, range(y.shape[1])))
    if y.dtype.kind == "U" and task != "regression":
        levels, codes, counts = np.unique(y, return_inverse=True, return_counts=True)
        rows = dict(zip(map(str, levels), counts.tolist(), strict=True))
        if not classes and task != "classification" and (same := similar_levels_text(rows)):
            raise DataError(f"{place}: {similar_levels_message('y', same)}")
        names = classes or tuple(rows)
        code_of = {name: code for code, name in enumerate(names)}
        if odd := [str(level) for level in levels if str(level) not in code_of]:
            raise DataError(f"{place}: y contains {', '.join(map(repr, odd))}, but the classes are {', '.join(names)}")
        y, classes = np.array([code_of[str(level)] for level in levels])[codes], names
    whole = y.ndim == 1 and (y.dtype.kind in "iub" or (y.dtype.kind == "f" and bool((y == np.floor(y)).all())))
    if task is None and y.ndim == 2 and bool(((y == 0) | (y == 1)).all()):
        shape_in_words = (
            "a single 1 in every row, like one-hot classes. Pass y.argmax(1)"
            if bool((y.sum(1) == 1).all())
            else "only 0 and 1, like several labels per sample. Set task = 'multilabel'"
        )
        raise DataError(
            f"{place}: y {y.shape} has {shape_in_words}, or task = 'regression', in [data] or in fl.Dataset.create(...)"
        )
    if task in ("classification", "binary") and not whole:
        raise DataError(f"{place}: for classification, y must be whole numbers of shape [N], got {y.dtype} {y.shape}")
    if task == "regression" and y.dtype.kind == "U":
        raise DataError(f"{place}: y contains text, which cannot be the target of a regression. Omit `task`")
    if (task == "regression" or not whole) and len(y) > 1 and bool((y == y[0]).all()):
        raise DataError(f"{place}: the target is the same in every row. A model cannot learn from such a target")
    if task == "regression" or not whole:
        return torch.from_numpy(y.reshape(len(y), -1).astype(np.float64)), "regression", ()
    names = classes or number_names(y, place)
    return torch.from_numpy(np.require(y, np.int64, ["C", "W"])), task or "classification", names


def convert_to_plain_array(values: object, name: str, mixed: bool = False) -> NDArray[Any]:
    """Convert values to an array of numbers or text or, if ``mixed`` is True, also of objects.

    Raises:
        DataError: rows differ in length, or values differ in type or are missing.
        ConfigError: the values are a sparse matrix.
    """
    refuse_masked(values, name)
    if getattr(values, "is_meta", False):
        raise DataError(f"{name}: a tensor on the device meta has no values. Create the tensor with device='cpu'")
    if hasattr(values, "toarray"):
        raise ConfigError(f"{name}: {type(values).__name__} is sparse, but models need dense arrays. Pass x.toarray()")
    try:
        array = as_array(values)
    except ValueError:
        raise DataError(
            f"{name}: rows have different lengths. Pad all samples to the same size (tokens with 0, "
            "and their labels with -1)"
        ) from None
    if array.dtype.names:
        raise DataError(
            f"{name} is a structured array with the fields {', '.join(array.dtype.names)}. Pass pandas.DataFrame(x)"
        )
    if array.dtype == object and not mixed:
        cells = array.ravel().tolist()
        kinds = str if isinstance(cells[0] if cells else "", str) else (int, float, np.number, np.bool_)
        for k, cell in enumerate(cells):
            if not isinstance(cell, kinds):
                cure = ". Pass y[:].astype(str)" if isinstance(cell, bytes) else ""
                raise DataError(
                    f"{name}: value {k} is {cell!r:.60}. Use only numbers or only text, without missing values{cure}"
                )
        array = np.array(cells).reshape(array.shape)
    return array


def refuse_masked(values: object, name: str) -> None:
    """Raise an error if an array, or an array in a list, has masked values, because numpy would use them as numbers.

    Raises:
        DataError: some values are masked.
    """
    if np.ma.is_masked(values) or (isinstance(values, list | tuple) and any(map(np.ma.is_masked, values))):
        raise DataError(f"{name}: some values are masked. Fill these values, or remove the samples")


def as_array(values: object) -> NDArray[Any]:
    """Convert a tensor or an array-like object to an array. Floats with 16 bits or fewer become 32-bit floats.

    Raises:
        ValueError: rows have different lengths.
    """
    if isinstance(values, torch.Tensor):
        if values.is_nested:
            raise ValueError("a nested tensor, whose rows differ in length")
        values = values.dequantize() if values.is_quantized else values.to_dense()
        small = values.is_floating_point() and values.element_size() < 4
        dense: NDArray[Any] = (values.float() if small else values).numpy(force=True)
        return dense
    array = np.asarray(values)
    array = array.astype(object) if array.dtype.kind == "T" else array
    array = array.astype(array.dtype.newbyteorder("="), copy=False)  # torch supports only the native byte order
    return array.astype(np.float32) if array.dtype == np.float16 else array
