"""MNIST and Fashion-MNIST, read from their original IDX files.

LeCun, Cortes, Burges: the MNIST database of handwritten digits. Xiao, Rasul, Vollgraf 2017: Fashion-MNIST, arXiv
1708.07747. The default mean and std are those in FLAME's public code, for both data sets.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from fedloom.data.dataset import Dataset
from fedloom.data.sources._base import (
    FileSource,
    Scale,
    image_dataset,
    locate,
    mean_option,
    name_file_in_errors,
    std_option,
)
from fedloom.data.sources.archive import ArchiveEntry, check_no_trailing_bytes, check_size, fill_array, iterate_entries
from fedloom.errors import DataError

IMAGES_MAGIC, LABELS_MAGIC = 0x00000803, 0x00000801
IDX_FILES = {
    "train-images-idx3-ubyte": IMAGES_MAGIC,
    "train-labels-idx1-ubyte": LABELS_MAGIC,
    "t10k-images-idx3-ubyte": IMAGES_MAGIC,
    "t10k-labels-idx1-ubyte": LABELS_MAGIC,
}


class Mnist(FileSource):
    """MNIST: 60,000 + 10,000 gray images of handwritten digits with 28x28 pixels."""

    mean: tuple[float, ...] | None = mean_option((0.1307,))
    std: tuple[float, ...] | None = std_option((0.3081,))

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load all 70,000 images of the data set. The last 10,000 images are the official test set."""
        place = locate("MNIST", self.path, data_dir, ("mnist", "MNIST/raw", "MNIST"), holds_idx)
        return read_idx("mnist", place, tuple(str(digit) for digit in range(10)), (self.mean, self.std))


class FashionMnist(FileSource):
    """Fashion-MNIST: 60,000 + 10,000 gray images of clothing with 28x28 pixels."""

    mean: tuple[float, ...] | None = mean_option((0.1307,), " (FLAME)")
    std: tuple[float, ...] | None = std_option((0.3081,), " (FLAME)")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load all 70,000 images of the data set. The last 10,000 images are the official test set."""
        folders = ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST")
        place = locate("Fashion-MNIST", self.path, data_dir, folders, holds_idx)
        return read_idx("fashion-mnist", place, FASHION_CLASSES, (self.mean, self.std))


FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def holds_idx(place: Path) -> bool:
    """Return True if a folder contains any of the four files.

    A path that is not a folder is accepted without being checked.
    """
    return not place.is_dir() or any(place.glob("*-idx[13]-ubyte*"))


def read_idx(name: str, place: Path, classes: tuple[str, ...], scale: Scale) -> Dataset:
    """Load the four IDX files from a folder or archive as one data set.

    The headers are read first, so that the array can be allocated once and the files can be read directly into it.

    Raises:
        DataError: a file is missing, truncated or too long, or has the wrong magic number or size.
    """
    sizes = {_idx_file_part(entry): _read_idx_sizes(entry) for entry in iterate_entries(place, _is_idx_file)}
    missing = [file for file in IDX_FILES if file not in sizes]
    if missing:
        raise DataError(f"{name}: {place} lacks {', '.join(missing)} (plain, .gz or .xz). Put all four files there")
    train, test = sizes["train-images-idx3-ubyte"], sizes["t10k-images-idx3-ubyte"]
    if train[1:] != test[1:]:
        raise DataError(
            f"{name}: {place} contains training images of size {train[1:]} but test images of size {test[1:]}"
        )
    for side, (count, *_) in (("train", train), ("t10k", test)):
        label_count = sizes[f"{side}-labels-idx1-ubyte"][0]
        if label_count != count:
            raise DataError(
                f"{name}: {place} contains {count} {side} images but {label_count} labels. Fetch the files again"
            )
    total = train[0] + test[0]
    x, y = np.empty((total, 1, *train[1:]), np.uint8), np.empty(total, np.uint8)
    for entry in iterate_entries(place, _is_idx_file):
        file = _idx_file_part(entry)
        part = slice(0, train[0]) if file.startswith("train") else slice(train[0], None)
        _read_idx_sizes(entry)
        fill_array(entry, x[part] if IDX_FILES[file] == IMAGES_MAGIC else y[part], "the data")
        check_no_trailing_bytes(entry)
        if IDX_FILES[file] == LABELS_MAGIC and (y[part] >= len(classes)).any():
            bad = int((y[part] >= len(classes)).argmax())
            raise DataError(
                f"{entry.location}: sample {bad} has the unknown label {y[part][bad]}: labels must be "
                f"from 0 to {len(classes) - 1}. These labels belong to a different data set"
            )
    with name_file_in_errors(place):
        test_set = torch.arange(train[0], total)
        return image_dataset(name, torch.from_numpy(x), torch.from_numpy(y), classes, scale, test_set)


def _is_idx_file(name: str) -> bool:
    return name.rsplit("/", 1)[-1] in IDX_FILES


def _idx_file_part(entry: ArchiveEntry) -> str:
    return entry.name.rsplit("/", 1)[-1]


def _read_idx_sizes(entry: ArchiveEntry) -> tuple[int, ...]:
    """Check that the packed file can contain the bytes, and return the sizes (count, height, width) or (count,)."""
    magic = IDX_FILES[_idx_file_part(entry)]
    header = np.empty(4 if magic == IMAGES_MAGIC else 2, ">u4")
    fill_array(entry, header, "the header")
    if header[0] != magic:
        got = f"0x{int(header[0]):08x}"
        raise DataError(
            f"{entry.location}: wrong magic number, expected 0x{magic:08x}, got {got}. This is not the expected "
            "IDX file"
        )
    sizes = tuple(int(size) for size in header[1:])
    check_size(entry.location, math.prod(sizes), entry.packed_bytes)
    return sizes
