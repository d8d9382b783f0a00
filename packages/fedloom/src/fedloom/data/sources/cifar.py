"""CIFAR-10 and CIFAR-100, read from their original binary files.

Krizhevsky 2009, Learning multiple layers of features from tiny images.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedloom.data.dataset import Dataset
from fedloom.data.sources._base import FileSource, Scale, image_dataset, locate, mean_option, std_option
from fedloom.data.sources.archive import GrowingRows, iterate_entries, strip_compression_suffix
from fedloom.errors import DataError, NoSamples

IMAGE_BYTES = 3 * 32 * 32
RECORDS_PER_READ = 128
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class CifarVersion(NamedTuple):
    """CIFAR-10 or CIFAR-100: its name, its files, and the number of label bytes that precede the pixels.

    The last of these bytes is the label.
    """

    name: str
    files: re.Pattern[str]
    label_bytes: int


CIFAR10_VERSION = CifarVersion("cifar-10", re.compile(r"(^|/)(data_batch_\d|test_batch)(\.bin)?$"), 1)
CIFAR100_VERSION = CifarVersion("cifar-100", re.compile(r"(^|/)(train|test)(\.bin)?$"), 2)


class Cifar10(FileSource):
    """CIFAR-10: 50,000 + 10,000 color images of 32x32 pixels in ten classes."""

    mean: tuple[float, ...] | None = mean_option((0.5,), " (FLAME)")
    std: tuple[float, ...] | None = std_option((0.5,), " (FLAME)")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load all images. The test batch forms the official test set."""
        place = _locate_cifar(CIFAR10_VERSION, self.path, data_dir)
        return _read_cifar(CIFAR10_VERSION, place, CIFAR10_CLASSES, (self.mean, self.std))


class Cifar100(FileSource):
    """CIFAR-100: 50,000 + 10,000 color images of 32x32 pixels in a hundred (fine) classes."""

    mean: tuple[float, ...] | None = mean_option((0.5,))
    std: tuple[float, ...] | None = std_option((0.5,))

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load all images with their fine labels. The test file forms the official test set."""
        place = _locate_cifar(CIFAR100_VERSION, self.path, data_dir)
        names = tuple(str(i) for i in range(100))
        for entry in iterate_entries(place, lambda name: name.endswith("fine_label_names.txt")):
            names = tuple(entry.stream.read().decode("ascii", "replace").split())
        if len(names) != 100:
            raise DataError(
                f"{place}: fine_label_names.txt has {len(names)} names, expected 100. Fetch this file again"
            )
        return _read_cifar(CIFAR100_VERSION, place, names, (self.mean, self.std))


def _locate_cifar(form: CifarVersion, path: str | None, data_dir: str | Path | None) -> Path:
    def holds(place: Path) -> bool:
        return not place.is_dir() or any(
            form.files.search(strip_compression_suffix(file.name)) or file.name == f"{form.name}-binary.tar.gz"
            for file in place.iterdir()
        )

    name = form.name
    ten = ("-batches-bin", "-batches-py") if form is CIFAR10_VERSION else ("-binary", "-python")
    folders = (*(name + end for end in ten), name, name.replace("-", ""))
    return locate(name.upper(), path, data_dir, folders, holds)


def _read_cifar(form: CifarVersion, place: Path, classes: tuple[str, ...], scale: Scale) -> Dataset:
    x, y, in_test = GrowingRows((3, 32, 32), np.uint8), GrowingRows((), np.uint8), GrowingRows((), np.bool_)
    width, pickled = form.label_bytes + IMAGE_BYTES, ""
    for entry in iterate_entries(place, lambda file: form.files.search(file) is not None):
        if not entry.name.endswith(".bin"):
            pickled = entry.location
            continue
        before = x.size
        while block := entry.stream.read(RECORDS_PER_READ * width):
            if len(block) % width:
                raise DataError(
                    f"{entry.location} is truncated: records have {width} bytes, but "
                    f"{len(block) % width} bytes are left over. Fetch the file again"
                )
            rows = np.frombuffer(block, np.uint8).reshape(-1, width)
            labels = rows[:, form.label_bytes - 1]
            if labels.max() >= len(classes):
                raise DataError(
                    f"{entry.location}: unknown label {labels.max()}: labels must be from 0 to "
                    f"{len(classes) - 1}. This file belongs to a different data set"
                )
            y.room(len(rows))[:] = labels
            x.room(len(rows))[:] = rows[:, form.label_bytes :].reshape(-1, 3, 32, 32)
            in_test.room(len(rows))[:] = "test" in entry.name.rsplit("/", 1)[-1]
        if x.size == before:
            raise NoSamples(f"{entry.location} contains no records. Fetch the file again")
    if x.size == 0 and pickled:
        raise DataError(
            f"{pickled} is a pickle, which could run code, so fedloom does not read this file. Use the binary version "
            f"of the same images, {form.name}-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html"
        )
    if x.size == 0:
        raise DataError(f"{form.name}: no batches in {place}; expected files such as {form.files.pattern}")
    test = np.flatnonzero(in_test.trim())
    official = torch.from_numpy(test) if len(test) else None
    return image_dataset(form.name, torch.from_numpy(x.trim()), torch.from_numpy(y.trim()), classes, scale, official)
