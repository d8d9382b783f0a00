"""Base class of sources, search for files in data folders, and names and scaling of data sets."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedloom.data.dataset import MAX_CLASSES, Dataset
from fedloom.data.sources.fetch import DATA_FOLDER_VARIABLE as DATA_FOLDER_VARIABLE
from fedloom.data.sources.fetch import REMOTE_SETS
from fedloom.errors import DataError, attribute_error
from fedloom.imports import get_import_path
from fedloom.rundir import as_path
from fedloom.values import Value

FOLDER_DESCRIPTION = "file or folder of the data set (default: searched for in the data folder)"


class Source(Value):
    """Data set that can be loaded, as described by the table `[data]` of an experiment."""

    @abstractmethod
    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load the complete data set.

        Args:
            data_dir: folder of data sets. If None, the environment variable FEDLOOM_DATA is used.

        Raises:
            DataError: a file is missing, is damaged, or is not in the expected format. Incomplete data are never
                returned.
        """
        ...

    def read(self, data_dir: str | Path | None = None) -> Dataset:
        """Load the data set and check its type.

        The check is needed because the source may be user code, which can raise any exception.

        Raises:
            DataError: `load` raised it.
            CodeError: the user code failed, or did not return a data set.
        """
        if get_import_path(type(self)) is None:
            return self.load(data_dir)
        with attribute_error("data set", self, "load"):
            data = self.load(data_dir)
            if not isinstance(data, Dataset):
                raise TypeError(f"load must return a fedloom.data.Dataset, got {type(data).__name__}")
        return data


class FileSource(Source):
    """Source that reads a file or a folder."""

    path: str | None = Field(default=None, min_length=1, description=FOLDER_DESCRIPTION)


class SampleSource(FileSource):
    """Source whose files may also contain samples without labels."""

    @abstractmethod
    def samples(self, data_dir: str | Path | None = None) -> tuple[NDArray[Any], list[str] | None]:
        """Return all samples ``[N, *shape]`` as `load` returns them, with or without labels, and their file names.

        Raises:
            DataError: a file is missing, is damaged, or is not in the expected format.
        """
        ...


Scale = tuple[tuple[float, ...] | None, tuple[float, ...] | None]
"""Mean and standard deviation of images, each with one number per channel, or None."""


def mean_option(value: tuple[float, ...] | None, origin: str = "") -> Any:
    """Return the option ``mean`` of a source of images, with its default value and a note on the value's origin."""
    return Field(default=value, description=f"value subtracted from pixels, which are in [0, 1]{origin}")


def std_option(value: tuple[float, ...] | None, origin: str = "") -> Any:
    """Return the option ``std`` of a source of images, with its default value and a note on the value's origin."""
    return Field(default=value, description=f"value by which pixels are divided after the subtraction{origin}")


def image_dataset(
    name: str, x: Tensor, labels: Tensor, classes: tuple[str, ...], scale: Scale, test: Tensor | None
) -> Dataset:
    """Create a data set from images ``[N, channels, height, width]`` and the integer labels ``[N]`` of their classes.

    Raises:
        DataError: the scale is invalid for these images.
    """
    mean, std = map(scale_tensor, scale)
    return Dataset(name, x, labels.long(), "classification", classes, mean, std, test)


def locate(
    what: str, path: str | None, data_dir: str | Path | None, folders: Sequence[str], fits: Callable[[Path], bool]
) -> Path:
    """Find the file or folder of a data set.

    Args:
        what: name of the data set, which is used in messages.
        path: path given by the user, or None. The path is only checked for existence, because the reader reports
            missing contents.
        data_dir: folder that contains data sets, or None to use FEDLOOM_DATA.
        folders: subfolders of the data folder that are searched. The data folder itself is searched after all other
            places.
        fits: function that returns True if a path contains the data set.

    Raises:
        DataError: the data folder is a file, or the data set was not found. The message lists all paths that were
            searched.
    """
    if path is not None:
        place = Path(path).expanduser()
        if not place.exists():
            raise DataError(f"{what} was not found at {place}. Set path to the file or folder that contains the data")
        return place
    remote = next((name for name in REMOTE_SETS if REMOTE_SETS[name].folder in folders), None)
    root = os.environ.get(DATA_FOLDER_VARIABLE) if data_dir is None else as_path(data_dir, "data_dir")
    if not root and not folders:
        raise DataError(f"{what}: no path is set. Set path to the file or folder that contains the data")
    if not root:
        fetch = f" (fedloom data {remote} --data-dir FOLDER --fetch downloads the files)" if remote else ""
        raise DataError(f"{what}: no data folder is set. Set {DATA_FOLDER_VARIABLE}, or pass data_dir or path{fetch}")
    base = Path(root).expanduser()
    if base.is_file():
        raise DataError(
            f"{what}: {base} is a file, not a folder of data sets. Pass the folder that contains the file, or "
            "pass the file as `path`"
        )
    tried = [*(base / folder for folder in folders), base]
    for place in tried:
        if place.exists() and fits(place):
            return place
    cure = f"there, fetch them (fedloom data {remote} --fetch), or set path" if remote else "there, or set path"
    raise DataError(f"{what} was not found. Looked in {', '.join(map(str, tried))}. Put its original files {cure}")


@contextmanager
def name_file_in_errors(place: Path) -> Iterator[None]:
    """Add the name of the file or folder to every `DataError` that is raised inside the block."""
    try:
        yield
    except DataError as error:
        where, message = f"{place}: ", str(error)
        raise type(error)(message if message.startswith(where) else where + message) from error


def number_names(labels: NDArray[Any], where: object = "") -> tuple[str, ...]:
    """Return the names of numbered classes, from ``"0"`` up to the largest label.

    Raises:
        DataError: a label is negative or at least `MAX_CLASSES`.
    """
    if len(labels) and (labels.min() < 0 or labels.max() >= MAX_CLASSES):
        bad = int(((labels < 0) | (labels >= MAX_CLASSES)).argmax())
        raise DataError(
            f"{where}: sample {bad} has the unknown label {labels[bad]:g}. Classes are numbered from 0 to at most "
            f"{MAX_CLASSES - 1}. Correct the label, or set task = 'regression' if labels are measurements"
        )
    return tuple(str(i) for i in range(int(labels.max()) + 1 if len(labels) else 0))


def scale_tensor(values: Sequence[float] | None) -> Tensor | None:
    """Return the mean or standard deviation of a data set as a tensor, or None if no values are given.

    Raises:
        DataError: the values are not numbers.
    """
    try:
        return None if values is None else torch.as_tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise DataError(f"mean and std must be numbers, one per channel, got {values!r:.60}") from None
