"""CIFAR-10 and CIFAR-100 from their original binary records or their original python batches.

Krizhevsky 2009, Learning multiple layers of features from tiny images.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedloom.data.dataset import Dataset
from fedloom.data.sources._base import FileSource, locate, scale
from fedloom.data.sources.archive import Entry, Rows, entries
from fedloom.data.sources.pickles import read_batch
from fedloom.errors import DataError, NoSamples

Bytes = NDArray[np.uint8]
PIXELS = 3 * 32 * 32
RECORDS = 128
CLASSES10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class Form(NamedTuple):
    """One of the two data sets: its file names, label bytes per record, the one that counts, the key in the batches."""

    files: re.Pattern[str]
    label_bytes: int
    label: int
    key: bytes
    classes: int


TEN = Form(re.compile(r"(^|/)(data_batch_\d|test_batch)(\.bin)?$"), 1, 0, b"labels", 10)
HUNDRED = Form(re.compile(r"(^|/)(train|test)(\.bin)?$"), 2, 1, b"fine_labels", 100)


class Cifar10(FileSource):
    """CIFAR-10: 50,000 + 10,000 colour images 32x32 of ten classes."""

    mean: tuple[float, ...] | None = Field(default=(0.5,), description="subtracted from pixels in [0, 1] (FLAME)")
    std: tuple[float, ...] | None = Field(default=(0.5,), description="divides the pixels after that (FLAME)")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """All images that the files hold; the test batch is the official test set."""
        folders = ("cifar-10-batches-bin", "cifar-10-batches-py", "cifar-10", "cifar10")
        place = locate("CIFAR-10", self.path, data_dir, folders, lambda p: _holds(p, TEN))
        return _read("cifar-10", place, TEN, CLASSES10, self.mean, self.std)


class Cifar100(FileSource):
    """CIFAR-100: 50,000 + 10,000 colour images 32x32 of a hundred (fine) classes."""

    mean: tuple[float, ...] | None = Field(default=(0.5,), description="subtracted from pixels in [0, 1]")
    std: tuple[float, ...] | None = Field(default=(0.5,), description="divides the pixels after that")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """All images that the files hold, with fine labels; the test file is the official test set."""
        folders = ("cifar-100-binary", "cifar-100-python", "cifar-100", "cifar100")
        place = locate("CIFAR-100", self.path, data_dir, folders, lambda p: _holds(p, HUNDRED))
        names: tuple[str, ...] = tuple(str(i) for i in range(100))
        for entry in entries(place, lambda name: name.endswith("fine_label_names.txt")):
            names = tuple(entry.stream.read().decode("ascii", "replace").split())
        if len(names) != 100:
            raise DataError(f"{place}: fine_label_names.txt has {len(names)} names, expected 100; fetch it again")
        return _read("cifar-100", place, HUNDRED, names, self.mean, self.std)


def _holds(place: Path, form: Form) -> bool:
    if not place.is_dir():
        return True
    names = (file.name.removesuffix(".xz").removesuffix(".gz") for file in place.iterdir())
    return any(form.files.search(name) for name in names)


def _read(
    name: str,
    place: Path,
    form: Form,
    classes: tuple[str, ...],
    mean: tuple[float, ...] | None,
    std: tuple[float, ...] | None,
) -> Dataset:
    x, y, in_test = Rows((3, 32, 32), np.uint8), Rows((), np.uint8), Rows((), np.bool_)
    for entry in entries(place, lambda file: form.files.search(file) is not None):
        batches, before = _records(entry, form) if entry.name.endswith(".bin") else _pickled(entry, form), x.size
        for labels, pixels in batches:
            if len(labels) and labels.max() >= form.classes:
                raise DataError(
                    f"{entry.where}: unknown label {labels.max()}, allowed 0..{form.classes - 1}; not this set"
                )
            y.room(len(labels))[:] = labels
            x.room(len(labels))[:] = pixels.reshape(-1, 3, 32, 32)
            in_test.room(len(labels))[:] = "test" in entry.name.rsplit("/", 1)[-1]
        if x.size == before:
            raise NoSamples(f"{entry.where}: no record in the file; fetch it again")
    if x.size == 0:
        raise DataError(f"{name}: no batch in {place}; expected files like {form.files.pattern}")
    test = np.flatnonzero(in_test.done())
    return Dataset(
        name,
        torch.from_numpy(x.done()),
        torch.from_numpy(y.done()).long(),
        "classification",
        classes,
        scale(mean),
        scale(std),
        torch.from_numpy(test) if len(test) else None,
    )


def _records(entry: Entry, form: Form) -> Iterator[tuple[Bytes, Bytes]]:
    """Label bytes and pixels, record by record, in blocks."""
    width = form.label_bytes + PIXELS
    block = np.empty((RECORDS, width), np.uint8)
    view = block.reshape(-1).data
    while True:
        done = 0
        while done < len(view) and (got := cast("int", entry.stream.readinto(view[done:]))):  # type: ignore[attr-defined]
            done += got
        if done % width:
            raise DataError(
                f"{entry.where}: truncated, records have {width} bytes but {done % width} are left over; fetch it again"
            )
        rows = block[: done // width]
        if len(rows):
            yield rows[:, form.label], rows[:, form.label_bytes :]
        if len(rows) < RECORDS:
            return


def _pickled(entry: Entry, form: Form) -> Iterator[tuple[Bytes, Bytes]]:
    """Labels and pixels of one python batch, read by a reader that knows arrays, text and numbers only."""
    batch = read_batch(entry)
    labels, pixels = batch.get(form.key), batch.get(b"data")
    if not isinstance(labels, list) or not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
        raise DataError(
            f"{entry.where}: needs {form.key!r} (list) and b'data' (uint8 array), got {sorted(batch, key=str)}"
        )
    if pixels.shape != (len(labels), PIXELS):
        raise DataError(
            f"{entry.where}: data of shape {pixels.shape} for {len(labels)} labels, expected rows of {PIXELS}"
        )
    wide = np.array(labels)
    if len(wide) and not (wide.dtype.kind == "i" and wide.min() >= 0 and wide.max() < 256):
        raise DataError(f"{entry.where}: labels must be whole numbers 0..{form.classes - 1}")
    yield wide.astype(np.uint8), pixels
