"""Arrays of the user's own in an NPZ file; a file with a pickle inside is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedloom.data.dataset import Dataset
from fedloom.data.sources._base import FileSource, locate
from fedloom.data.sources.archive import Entry, check_size, entries, fill, finished
from fedloom.data.sources.memory import of_arrays
from fedloom.errors import DataError

BLOCK = 2**20
"""Bytes of the blocks in which an array of another type is read."""
KEYS = (("x_train", "y_train", "x_test", "y_test"), ("x", "y", "", ""), ("X", "y", "", ""), ("data", "labels", "", ""))


class _Header(NamedTuple):
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]


class Npz(FileSource):
    """An NPZ file with x and y, or x_train, y_train, x_test, y_test; optionally users."""

    task: Literal["classification", "regression"] | None = Field(
        default=None, description="None: classification if y has whole numbers"
    )
    channels_last: bool = Field(default=False, description="x is [N, height, width, channels]")
    mean: tuple[float, ...] | None = Field(default=None, description="subtracted (from pixels in [0, 1], if bytes)")
    std: tuple[float, ...] | None = Field(default=None, description="divides after that")
    vocabulary: int | None = Field(
        default=None, ge=2, description="x holds tokens [N, length] below this number, 0 for padding at the end"
    )

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """All arrays; the headers are read first, so that each array is read straight into its place."""
        place = locate("NPZ", self.path, data_dir, (), lambda p: p.is_file())
        headers = {_key(entry): _header(entry) for entry in entries(place, _is_array)}
        keys = next((keys for keys in KEYS if keys[0] in headers and keys[1] in headers), None)
        if keys is None:
            raise DataError(
                f"{place}: needs arrays x and y (or x_train, y_train, x_test, y_test), got {sorted(headers)}"
            )
        x_key, y_key, x_test, y_test = keys
        sides = [(x_key, y_key)] + ([(x_test, y_test)] if x_test in headers and y_test in headers else [])
        sizes = [headers[key].shape[0] if headers[key].shape else 0 for key, _ in sides]
        x = self._room_of_x(place, headers, [key for key, _ in sides])
        y = _room(place, headers, [key for _, key in sides])
        users = _room(place, headers, ["users"]) if "users" in headers else None
        start = {key: 0 if i == 0 else sizes[0] for i, side in enumerate(sides) for key in side} | {"users": 0}
        for entry in entries(place, lambda name: _is_array(name) and name[:-4] in start):
            key, header = _key(entry), _header(entry)
            whole = {True: x, False: y}[key in (x_key, x_test)] if key != "users" else users
            assert whole is not None
            turn = self.channels_last and whole is x
            _into(entry, header, whole[start[key] : start[key] + header.shape[0]], turn=turn)
        split = sizes[0] if len(sizes) == 2 else None
        return of_arrays(
            place.stem,
            x,
            y,
            self.task,
            where=place,
            split=split,
            mean=self.mean,
            std=self.std,
            users=users,
            vocabulary=self.vocabulary or (),
        )

    def _room_of_x(self, place: Path, headers: dict[str, _Header], keys: list[str]) -> NDArray[Any]:
        """Room for the features, as models take them: bytes or float32, channels first."""
        shape, dtype = _joined(place, headers, keys)
        kind = np.uint8 if dtype == np.uint8 else np.float32
        if self.channels_last:
            if len(shape) != 4:
                raise DataError(f"{place}: channels_last needs x [N, height, width, channels], got {shape}")
            shape = (shape[0], shape[3], *shape[1:3])
        return np.empty(shape, kind)


def _is_array(name: str) -> bool:
    return name.endswith(".npy")


def _key(entry: Entry) -> str:
    return entry.name[:-4]


def _header(entry: Entry) -> _Header:
    """Shape and type, believed only where the packed bytes can hold them; types with Python objects are refused."""
    try:
        version = np.lib.format.read_magic(entry.stream)
        if version == (1, 0):
            header = _Header(*np.lib.format.read_array_header_1_0(entry.stream))
        else:
            header = _Header(*np.lib.format.read_array_header_2_0(entry.stream))
    except ValueError as error:
        raise DataError(f"{entry.where}: not an array written by numpy ({error}); save it again") from error
    if header.dtype.hasobject or header.dtype.kind not in "uifbUS":
        raise DataError(
            f"{entry.where}: holds {header.dtype} (a pickle), allowed are numbers; save it with a number type"
        )
    if any(length < 0 for length in header.shape):
        raise DataError(f"{entry.where}: shape {header.shape} cannot be; the file is damaged, save it again")
    check_size(entry.where, math.prod(header.shape) * header.dtype.itemsize, entry.packed)
    return header


def _room(place: Path, headers: dict[str, _Header], keys: list[str]) -> NDArray[Any]:
    """One empty array for all the arrays of these keys, one after the other."""
    return np.empty(*_joined(place, headers, keys))


def _joined(place: Path, headers: dict[str, _Header], keys: list[str]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of the arrays of these keys, one after the other."""
    first = headers[keys[0]]
    for key in keys:
        if headers[key].shape[1:] != first.shape[1:] or headers[key].dtype != first.dtype or not first.shape:
            raise DataError(
                f"{place}: {keys[0]} is {first.dtype} {first.shape}, {key} is {headers[key].shape}; no match"
            )
    if first.dtype.kind in "US" and keys != ["users"]:
        raise DataError(
            f"{place}: {keys[0]} holds text ({first.dtype}), allowed are numbers; number the classes from 0"
        )
    return (sum(headers[key].shape[0] for key in keys), *first.shape[1:]), first.dtype


def _into(entry: Entry, header: _Header, out: NDArray[Any], *, turn: bool) -> None:
    """Reads an array into its place, a block of rows at a time where its type or the order of its axes is another."""
    if header.fortran and len(header.shape) > 1:
        turned = np.empty(header.shape[::-1], header.dtype)
        fill(entry, turned, "the array")
        out[:] = _channels_first(turned.T) if turn else turned.T
    elif out.dtype == header.dtype and not turn:
        fill(entry, out, "the array")
    else:
        step = max(1, BLOCK // max(1, math.prod(header.shape[1:]) * header.dtype.itemsize))
        block = np.empty((step, *header.shape[1:]), header.dtype)
        for at in range(0, len(out), step):
            rows = block[: len(out) - at]
            fill(entry, rows, "the array")
            out[at : at + step] = _channels_first(rows) if turn else rows
    finished(entry)


def _channels_first(x: NDArray[Any]) -> NDArray[Any]:
    return x.transpose(0, 3, 1, 2)
