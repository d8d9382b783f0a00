"""Images in folders: Medical MNIST, Tiny-ImageNet, and any folder or archive that has a folder for each class."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedloom.data.dataset import Dataset
from fedloom.data.sources._base import FileSource, SampleSource, Scale, image_dataset, locate, mean_option, std_option
from fedloom.data.sources.archive import ArchiveEntry, GrowingRows, check_size, iterate_entries
from fedloom.data.sources.array_data import add_copy_note
from fedloom.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
MAX_SIDE_PIXELS = 8192
HIGH_DEPTH_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Image modes with more than 8 bits per pixel. Pillow clips the pixel values of such images to 255 when it converts
them."""


def is_image(name: str) -> bool:
    """Return True if a file name has the extension of an image."""
    return name.lower().endswith(IMAGE_SUFFIXES)


class _Pictures:
    """Collector that stacks images of the same size in one array.

    Unless the size and the channels are given, they are taken from the first image.
    """

    def __init__(self, rgb: bool | None, side: int | None) -> None:
        self._mode = {True: "RGB", False: "L", None: None}[rgb]
        self._side, self._rows = side, GrowingRows((0,), np.uint8)
        self.size: tuple[int, int] | None = None
        self._pixels = self._packed = 0

    def add(self, entry: ArchiveEntry) -> None:
        from PIL import Image, UnidentifiedImageError  # slow to import, needed by these sources only

        try:
            content = io.BytesIO(entry.stream.read())
            with warnings.catch_warnings(action="ignore"), Image.open(content, formats=IMAGE_FORMATS) as image:
                self._check(entry, image.size)
                if image.mode in HIGH_DEPTH_MODES:
                    raise DataError(
                        f"{entry.location} has more than 8 bits per pixel (mode {image.mode}), but "
                        "images are read as bytes, and the range of the numbers is unknown. Convert "
                        "the images to 8 bits, such as numpy.uint8(numpy.asarray(image) / largest * "
                        "255), or pass floats from 0 to 1 as an array or NPZ file"
                    )
                if self._mode is None:
                    self._mode = "L" if image.mode in ("1", "L") else "RGB"
                picture = image.convert(self._mode)
                if self._side is not None:
                    picture = picture.resize((self._side, self._side), Image.Resampling.BILINEAR)
                pixels: NDArray[np.uint8] = np.asarray(picture)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            if isinstance(error, DataError):
                raise
            why = "no known format, or truncated" if isinstance(error, UnidentifiedImageError) else error
            raise DataError(f"{entry.location} is not a readable image ({why}). Replace or remove the file") from error
        planes = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        if self._rows.size == 0:
            self._rows = GrowingRows(planes.shape, np.uint8)
        self._rows.room(1)[0] = planes

    def _check(self, entry: ArchiveEntry, size: tuple[int, int]) -> None:
        if max(size) > MAX_SIDE_PIXELS:
            raise DataError(
                f"{entry.location}: declares {size[0]}x{size[1]} pixels, but images may have at most "
                f"{MAX_SIDE_PIXELS} per side"
            )
        if self._side is None:
            self.size = self.size or size
            if size != self.size:
                raise DataError(
                    f"{entry.location}: the image is {size[0]}x{size[1]}, but the others are "
                    f"{self.size[0]}x{self.size[1]}. Set side to resize all images"
                )
            self._pixels, self._packed = self._pixels + size[0] * size[1], self._packed + entry.packed_bytes
            check_size(entry.location, self._pixels, self._packed)

    def stack(self) -> torch.Tensor:
        return torch.from_numpy(self._rows.trim())


def _read_images(
    name: str,
    place: Path,
    class_of: Callable[[PurePosixPath], str | None],
    side_of: Callable[[PurePosixPath], bool],
    pictures: _Pictures,
    scale: Scale,
    wanted: Callable[[str], bool] = is_image,
) -> Dataset:
    """Load all images. Their paths determine their classes. Classes are numbered in the order of their names."""
    labels: list[str] = []
    in_test: list[bool] = []
    for entry in iterate_entries(place, wanted):
        path = PurePosixPath(entry.name)
        label = class_of(path)
        if label is None:
            raise DataError(f"{entry.location}: the image has no class. Put the image into the folder of its class")
        pictures.add(entry)
        labels.append(label)
        in_test.append(side_of(path))
    if not labels:
        raise DataError(f"{name}: no images in {place}; expected one folder of images per class")
    classes = tuple(sorted(set(labels)))
    unseen = set(classes) - {label for label, held in zip(labels, in_test, strict=True) if not held}
    if unseen and not all(in_test):
        raise DataError(
            f"{name}: unknown label {min(unseen)!r} in the test images of {place}, because no training image has it"
        )
    code = {label: i for i, label in enumerate(classes)}
    numbers, test = torch.tensor([code[label] for label in labels]), torch.tensor(in_test).nonzero().flatten()
    official = test if 0 < len(test) < len(labels) else None
    return add_copy_note(image_dataset(name, pictures.stack(), numbers, classes, scale, official))


class ImageFolder(SampleSource):
    """Folder, zip or tar with one folder of images per class.

    Images below a folder `test` or `val` form the test set.
    """

    rgb: bool | None = Field(default=None, description="number of channels, 3 or 1 (default: as in the first image)")
    side: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SIDE_PIXELS,
        description="resize images to side x side pixels (default: all images must have the same size)",
    )
    mean: tuple[float, ...] | None = mean_option(None)
    std: tuple[float, ...] | None = std_option(None)

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load all images. The images below a folder `test` or `val` are the official test set."""
        place = locate("image folder", self.path, data_dir, (), lambda p: True)
        pictures = _Pictures(self.rgb, self.side)
        return _read_images(
            place.name, place, _parent_folder_name, _is_below_test_folder, pictures, (self.mean, self.std)
        )

    def samples(self, data_dir: str | Path | None = None) -> tuple[NDArray[Any], list[str]]:
        """Return all images, regardless of the folder that contains them."""
        place = locate("image folder", self.path, data_dir, (), lambda p: True)
        pictures = _Pictures(self.rgb, self.side)
        names = []
        for entry in iterate_entries(place, is_image):
            pictures.add(entry)
            names.append(entry.name)
        return pictures.stack().numpy(), names


def _parent_folder_name(path: PurePosixPath) -> str | None:
    return path.parent.name or None


def _is_below_test_folder(path: PurePosixPath) -> bool:
    return any(part in ("test", "val", "validation") for part in path.parts[:-2])


class MedicalMnist(FileSource):
    """Medical MNIST (MedNIST): 58,954 gray images of 64x64 pixels in six classes.

    A subset of the images is also accepted.
    """

    rgb: bool = Field(
        default=False, description="repeat the channel three times, as required by FLAME's CNN (206,678 parameters)"
    )
    mean: tuple[float, ...] | None = mean_option((0.3,), " (FLAME)")
    std: tuple[float, ...] | None = std_option((0.3,), " (FLAME)")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load all images. There is no official test set."""
        folders = ("medical-mnist", "medical_mnist", "MedNIST")
        place = locate("Medical MNIST", self.path, data_dir, folders, _has_pictures)
        pictures = _Pictures(self.rgb, None)
        return _read_images(
            "medical-mnist", place, _parent_folder_name, lambda path: False, pictures, (self.mean, self.std)
        )


def _has_pictures(place: Path) -> bool:
    if not place.is_dir():
        return True
    return any(place.glob("*.tar*")) or any(place.glob("*.zip")) or any(is_image(f.name) for f in place.glob("*/*"))


def _has_train(place: Path) -> bool:
    return not place.is_dir() or (place / "train").is_dir() or any(place.glob("tiny-imagenet*.zip"))


class TinyImagenet(FileSource):
    """Tiny-ImageNet: 200 classes of 64x64 color images, 500 for training, 50 for validation each (CS231n, Stanford)."""

    mean: tuple[float, ...] | None = mean_option((0.5,))
    std: tuple[float, ...] | None = std_option((0.5,))

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load the training and validation images.

        The labeled validation images are the official test set.
        """
        folders = ("tiny-imagenet-200", "tiny-imagenet")
        place = locate("Tiny-ImageNet", self.path, data_dir, folders, _has_train)
        held_out: dict[str, str] = {}
        for entry in iterate_entries(place, lambda name: name.endswith("val_annotations.txt")):
            lines = entry.stream.read().decode("ascii", "replace").splitlines()
            held_out.update((line.split("\t")[0], line.partition("\t")[2].split("\t")[0]) for line in lines)

        def class_of(path: PurePosixPath) -> str | None:
            if "val" in path.parts[:-1]:
                return held_out.get(path.name)
            return path.parent.parent.name if "train" in path.parts[:-1] else None

        def is_validation(path: PurePosixPath) -> bool:
            return "val" in path.parts[:-1]

        def wanted(name: str) -> bool:
            return is_image(name) and "test" not in PurePosixPath(name).parts[:-1]  # the test images have no labels

        return _read_images(
            "tiny-imagenet", place, class_of, is_validation, _Pictures(True, None), (self.mean, self.std), wanted
        )
