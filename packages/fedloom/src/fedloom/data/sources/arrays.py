"""Reading of arrays from an NPZ file, or from NPY files that stay on disk. Files that contain a pickle are rejected."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedloom.data.dataset import Dataset
from fedloom.data.samples import FEATURE_TARGET_NAMES
from fedloom.data.sources._base import SampleSource, locate
from fedloom.data.sources.archive import ArchiveEntry, check_no_trailing_bytes, check_size, fill_array, iterate_entries
from fedloom.data.sources.array_data import Layout, add_notes, has_channels_last, make_dataset, narrow_numbers
from fedloom.data.subjects.design import SAMPLE_ROLES, create_design
from fedloom.errors import DataError

CONVERSION_BLOCK_BYTES = 2**20
"""Number of bytes per block when an array is converted to another type while it is read."""
SPLIT_NAME_FORMS = (("{}_train", "{}_test"), ("train_{}", "test_{}"), ("{}", ""))
CLIENT_KEYS = ("clients", "users")
"""Possible names of the array that contains the client of each sample. Earlier versions used the second of these
names."""
ARRAY_KEYS = tuple(
    (train.format(x), train.format(y), test.format(x), test.format(y))
    for train, test in SPLIT_NAME_FORMS
    for x, y in FEATURE_TARGET_NAMES
)
"""Possible names of the features and targets of a training set and its test set, each formed from a pair in
`FEATURE_TARGET_NAMES`."""


class _Header(NamedTuple):
    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]


class _Arrays(SampleSource):
    task: Literal["classification", "binary", "multilabel", "regression", "survival", "count"] | None = Field(
        default=None,
        description="task (default: classification if y contains integers). multilabel: y has shape [N, labels] and "
        "contains 0 and 1",
    )
    mean: tuple[float, ...] | None = Field(
        default=None, description="value subtracted from samples (for bytes: from pixels in [0, 1])"
    )
    std: tuple[float, ...] | None = Field(
        default=None, description="value by which samples are divided after the subtraction"
    )
    layout: Layout | None = Field(
        default=None,
        description="layout of x. 'sequence': x has shape [N, time, features]. Otherwise, arrays of shape [N, "
        "height, width] are images",
    )
    vocabulary: int | None = Field(
        default=None,
        ge=2,
        description="vocabulary size, if x contains tokens and has shape [N, length]. Tokens must be less than this "
        "size, and sequences are padded with 0 at the end",
    )


class Npy(_Arrays):
    """Folder that contains x.npy, y.npy and, optionally, clients.npy, subject.npy, order.npy and strata.npy.

    The features stay on disk and are read when they are needed, so x may be larger than the available memory. It must
    contain bytes or float32, and images must have the channels first.
    """

    channels_last: Literal[False] | None = Field(
        default=None, description="set to false if channels come first although the shape of x suggests channels last"
    )

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load the arrays. The features are scanned once for values that are not finite, but they stay on disk."""
        place = locate("NPY", self.path, data_dir, (), lambda p: (p / "x.npy").is_file())
        x, y = (_map_array(place / f"{name}.npy") for name in ("x", "y"))
        if self.channels_last is None and has_channels_last(x.shape):
            raise DataError(
                f"{place / 'x.npy'}: {x.shape} looks like images with the channels last. Save the images with the "
                "channels first, as numpy.ascontiguousarray(numpy.moveaxis(x, -1, 1)), or set channels_last = false"
            )
        users = next((_map_array(file) for key in CLIENT_KEYS if (file := place / f"{key}.npy").exists()), None)
        if x.dtype not in (np.uint8, np.float32) or not x.flags.c_contiguous:
            raise DataError(
                f"{place / 'x.npy'}: contains {x.dtype} in {'C' if x.flags.c_contiguous else 'Fortran'} order, but an "
                "array that stays on disk must be uint8 or float32 in C order. Save the array in this form"
            )
        options: dict[str, Any] = {"where": place, "mean": self.mean, "std": self.std, "users": users}
        options |= {"layout": self.layout}
        data = make_dataset(place.name, x, y, self.task, vocabulary=self.vocabulary or (), **options)
        files = {role: place / f"{role}.npy" for role in SAMPLE_ROLES}
        roles = {role: _map_array(file) for role, file in files.items() if file.exists()}
        return add_notes(replace(data, design=create_design(roles, len(data), str(place))))

    def samples(self, data_dir: str | Path | None = None) -> tuple[NDArray[Any], None]:
        """Return x as a memory map of the file."""
        return _map_array(locate("NPY", self.path, data_dir, (), lambda p: (p / "x.npy").is_file()) / "x.npy"), None


def _map_array(path: Path) -> NDArray[Any]:
    """Map an array into memory in copy-on-write mode, so that changing it never changes the file."""
    try:
        mapped: NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as an array ({error}). Save it with numpy.save") from None
    return mapped


class Npz(_Arrays):
    """NPZ file with the arrays x and y, or x_train, y_train, x_test and y_test.

    It may also contain the arrays clients, subject, order and strata.
    """

    channels_last: bool | None = Field(
        default=None,
        description="whether x has shape [N, height, width, channels] (default: raise an error if the shape "
        "suggests it)",
    )

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load all arrays.

        The headers are read first, so that each array can be read directly into its final place in memory.
        """
        place, headers = self._headers(data_dir)
        keys = next((keys for keys in ARRAY_KEYS if keys[0] in headers and keys[1] in headers), None)
        if keys is None:
            raise DataError(
                f"{place} needs arrays x and y (or x_train, y_train, x_test, y_test; or "
                f"{', '.join(' and '.join(pair) for pair in FEATURE_TARGET_NAMES[1:])}), got {sorted(headers)}"
            )
        x_key, y_key, x_test, y_test = keys
        unread = [key for key in headers if key not in (*keys, *CLIENT_KEYS, *SAMPLE_ROLES)]
        if tests := [key for key in unread if "test" in key.lower().split("_")]:
            raise DataError(
                f"{place}: fedloom would ignore {tests[0]} beside {x_key} and {y_key}. Name the "
                f"arrays {x_key}_train, {y_key}_train, {x_key}_test and {y_key}_test"
            )
        sides = [(x_key, y_key)] + ([(x_test, y_test)] if x_test in headers and y_test in headers else [])
        x_keys, y_keys = ([side[k] for side in sides] for k in (0, 1))
        x, y = self._allocate_features(place, headers, x_keys), _allocate_joint_array(place, headers, y_keys)
        beside = {
            key: _allocate_joint_array(place, headers, [key]) for key in (*CLIENT_KEYS, *SAMPLE_ROLES) if key in headers
        }
        self._read(place, headers, [(x_keys, x), (y_keys, y), *(([key], room) for key, room in beside.items())])
        owners = [beside.pop(key) for key in CLIENT_KEYS if key in beside]
        users = owners[0] if owners else None
        split = headers[x_key].shape[0] if len(sides) == 2 else None
        options: dict[str, Any] = {"where": place, "split": split, "mean": self.mean, "std": self.std, "users": users}
        options |= {"original_dtype": headers[x_key].dtype.name, "layout": self.layout}
        data = make_dataset(place.stem, x, y, self.task, vocabulary=self.vocabulary or (), **options)
        data = replace(data, design=create_design(beside, len(data), str(place)))
        extra = [key for key in unread if headers[key].shape[:1] in {headers[side[0]].shape[:1] for side in sides}]
        notes = (
            f"fedloom reads {x_key!r} and {y_key!r} of {place.name}, and ignores {', '.join(map(repr, extra))}",
        ) * bool(extra)
        return add_notes(replace(data, notes=(*data.notes, *notes)))

    def samples(self, data_dir: str | Path | None = None) -> tuple[NDArray[Any], None]:
        """Return only the features.

        Values of a table keep their full precision. If the file contains a single array, this array may have any name.
        """
        place, headers = self._headers(data_dir)
        keys_present = ([key for key in keys[::2] if key in headers] for keys in ARRAY_KEYS)
        keys = next((keys for keys in keys_present if keys), [*headers] if len(headers) == 1 else [])
        if not keys:
            raise DataError(f"{place} needs an array x (or x_train, x_test), got {sorted(headers)}")
        columns = len(headers[keys[0]].shape) == 2
        x = (
            _allocate_joint_array(place, headers, keys)
            if columns
            else self._allocate_features(place, headers, keys, own_type=True)
        )
        self._read(place, headers, [(keys, x)])
        return x, None

    def _headers(self, data_dir: str | Path | None) -> tuple[Path, dict[str, _Header]]:
        place = locate("NPZ", self.path, data_dir, (), lambda p: p.is_file())
        return place, {_entry_key(entry): _read_array_header(entry) for entry in iterate_entries(place, _is_array)}

    def _read(self, place: Path, headers: dict[str, _Header], rooms: list[tuple[list[str], NDArray[Any]]]) -> None:
        """Read arrays into their buffers one after another. The first buffer contains the features."""
        parts: dict[str, tuple[NDArray[Any], bool]] = {}
        for k, (keys, room) in enumerate(rooms):
            at = 0
            for key in keys:
                length = headers[key].shape[0]
                parts[key] = (room[at : at + length], bool(self.channels_last) and k == 0)
                at += length
        for entry in iterate_entries(place, lambda name: _is_array(name) and name[:-4] in parts):
            out, turn = parts[_entry_key(entry)]
            _read_into_array(entry, _read_array_header(entry), out, turn=turn)

    def _allocate_features(
        self, place: Path, headers: dict[str, _Header], keys: list[str], *, own_type: bool = False
    ) -> NDArray[Any]:
        """Return a buffer for the features, with channels as the first axis.

        The result has a type that models accept (bytes or float32), or the array's own type if ``own_type`` is True.
        """
        shape, dtype = _joint_shape(place, headers, keys)
        kind = dtype if own_type else np.uint8 if dtype == np.uint8 else np.float32
        if self.channels_last is None and has_channels_last(shape) and not own_type:
            raise DataError(
                f"{place}: {keys[0]} {shape} looks like images with the channels last. Set "
                "channels_last = true or false"
            )
        if self.channels_last:
            if len(shape) != 4:
                raise DataError(f"{place}: channels_last needs x of shape [N, height, width, channels], got {shape}")
            shape = (shape[0], shape[3], *shape[1:3])
        return np.empty(shape, kind)


def _is_array(name: str) -> bool:
    return name.endswith(".npy")


def _entry_key(entry: ArchiveEntry) -> str:
    return entry.name[:-4]


def _read_array_header(entry: ArchiveEntry) -> _Header:
    """Check that the packed bytes can contain the array, and return its shape and type.

    Arrays of Python objects are rejected.
    """
    try:
        version = np.lib.format.read_magic(entry.stream)
        if version == (1, 0):
            header = _Header(*np.lib.format.read_array_header_1_0(entry.stream))
        else:
            header = _Header(*np.lib.format.read_array_header_2_0(entry.stream))
    except ValueError as error:
        raise DataError(f"{entry.location} is not an array written by numpy ({error}). Save the array again") from error
    if header.dtype.hasobject or header.dtype.kind not in "uifbUS":
        raise DataError(
            f"{entry.location} contains {header.dtype} (a pickle), but only numbers are allowed. Save "
            "the array with a numeric type"
        )
    if any(length < 0 for length in header.shape):
        raise DataError(
            f"{entry.location}: shape {header.shape} is impossible. The file is damaged, so save the array again"
        )
    check_size(entry.location, math.prod(header.shape) * header.dtype.itemsize, entry.packed_bytes)
    return header


def _allocate_joint_array(place: Path, headers: dict[str, _Header], keys: list[str]) -> NDArray[Any]:
    """Return an empty array with enough space for all arrays with these names, one after another."""
    return np.empty(*_joint_shape(place, headers, keys))


def _joint_shape(place: Path, headers: dict[str, _Header], keys: list[str]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and type of the concatenated arrays with these names."""
    first = headers[keys[0]]
    for key in keys:
        if headers[key].shape[1:] != first.shape[1:] or headers[key].dtype != first.dtype or not first.shape:
            raise DataError(
                f"{place}: {keys[0]} is {first.dtype} {first.shape}, but {key} is {headers[key].shape}. They must match"
            )
    if first.dtype.kind in "US" and keys[0] not in (*CLIENT_KEYS, "subject", "strata"):
        raise DataError(
            f"{place}: {keys[0]} contains text ({first.dtype}), but only numbers are allowed. Number the classes from 0"
        )
    return (sum(headers[key].shape[0] for key in keys), *first.shape[1:]), first.dtype


def _read_into_array(entry: ArchiveEntry, header: _Header, out: NDArray[Any], *, turn: bool) -> None:
    """Read an array into its buffer. If its type or the order of its axes must be changed, read it in blocks."""
    if header.fortran_order and len(header.shape) > 1:
        turned = np.empty(header.shape[::-1], header.dtype)
        fill_array(entry, turned, "the array")
        narrow_numbers(_channels_first(turned.T) if turn else turned.T, out, entry.location)
    elif out.dtype == header.dtype and not turn:
        fill_array(entry, out, "the array")
    else:
        step = max(1, CONVERSION_BLOCK_BYTES // max(1, math.prod(header.shape[1:]) * header.dtype.itemsize))
        block = np.empty((step, *header.shape[1:]), header.dtype)
        for at in range(0, len(out), step):
            rows = block[: len(out) - at]
            fill_array(entry, rows, "the array")
            narrow_numbers(_channels_first(rows) if turn else rows, out[at : at + step], entry.location, at)
    check_no_trailing_bytes(entry)


def _channels_first(x: NDArray[Any]) -> NDArray[Any]:
    return x.transpose(0, 3, 1, 2)
