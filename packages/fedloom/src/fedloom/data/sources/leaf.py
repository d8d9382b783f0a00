"""LEAF data in JSON files, which contain samples grouped by user, including FEMNIST with samples grouped by writer.

Caldas et al. 2019, LEAF: a benchmark for federated settings, arXiv 1812.01097.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedloom.data.dataset import MAX_CLASSES, Dataset, Task
from fedloom.data.sources._base import FileSource, locate, name_file_in_errors, number_names
from fedloom.data.sources.archive import ArchiveEntry, GrowingRows, iterate_entries
from fedloom.errors import DataError, NoSamples

Floats = NDArray[np.float64]
TEST_NAME_PATTERN = re.compile(r"(?<![a-z])(my)?test(?![a-z])")
DIGIT_CLASSES = tuple("0123456789")
UPPERCASE_CLASSES, LOWERCASE_CLASSES = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), tuple("abcdefghijklmnopqrstuvwxyz")


class LeafUserCollector:
    """Samples of all users in all files: features in one growing array, and one user code per sample."""

    wanted = "numbers. Every sample needs one number"

    def __init__(self, options: Leaf, kept: range | None) -> None:
        self._options, self._kept = options, kept
        self.x: GrowingRows | None = None
        self.y: list[Floats] = []
        self.user: list[int] = []
        self.counts: list[int] = []
        self.in_test: list[bool] = []
        self.codes: dict[str, int] = {}
        self._file_of: dict[tuple[str, bool], str] = {}

    def file(self, entry: ArchiveEntry, in_test: bool) -> None:
        """Add the samples in a file.

        Besides the arrays, memory holds only the text of the file and the lists of one user.
        """
        where = entry.location

        def compact(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            fields = dict(pairs)
            if len(fields) < len(pairs):
                key = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
                what = "user" if isinstance(fields[key], dict) else "key"
                raise DataError(
                    f"{where}: {what} {key!r} occurs twice (also in {where}). Each {what} may occur only once"
                )
            if isinstance(fields.get("x"), list):
                fields["x"] = self._features(fields["x"])
            return fields

        try:
            parsed = json.loads(entry.stream.read(), object_pairs_hook=compact)
        except (ValueError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            why = "nested too deeply" if isinstance(error, RecursionError) else error
            raise DataError(
                f"{where}: invalid JSON ({why}). The file is truncated or not a LEAF file, so fetch the file again"
            ) from error
        document: dict[str, Any] = parsed if isinstance(parsed, dict) else {}
        declared, data, sizes = (document.get(key) for key in ("users", "user_data", "num_samples"))
        if not (isinstance(declared, list) and all(isinstance(u, str) for u in declared)) or not isinstance(data, dict):
            raise DataError(f"{where} lacks users or user_data, so it is not a LEAF file")
        held = {user: self._user(samples, user, in_test, where) for user, samples in data.items()}
        if not held:
            raise DataError(f"{where} lacks users or user_data, so it is not a LEAF file")
        if len(set(declared)) != len(declared):
            twice = next(user for user in declared if declared.count(user) > 1)
            raise DataError(f"{where}: user {twice!r} is listed twice. Each user may occur only once")
        if set(declared) != set(held):
            odd = min(set(declared) ^ set(held))
            raise DataError(f"{where}: user {odd!r} is in only one of users and user_data. Fetch the file again")
        if sizes is not None and sizes != [held[user] for user in declared]:
            raise DataError(f"{where}: num_samples contradicts user_data. Fetch the file again")

    def _features(self, rows: list[Any]) -> NDArray[np.generic] | str:
        """Return samples ``[n, width]`` in their stored type, or a description of the problem."""
        features = _number_array(rows)
        if features is None:
            widths = [len(row) if isinstance(row, list) else 1 for row in rows]
            odd = next((width for width in widths if width != widths[0]), None)
            if odd is None:
                return "has x that are not numbers. Every sample needs a list of numbers of one size"
            return f"has a sample of {odd} values, but the others have {widths[0]}. All samples need one size"
        x = features.reshape(1 if features.ndim == 1 else len(rows), -1) if rows else np.empty((0, 0))
        if not self._options.pixels:
            return x.astype(np.float32)
        scaled = np.rint(x * 255)
        if x.size and (not (abs(x * 255 - scaled) < 1e-2).all() or scaled.min() < 0 or scaled.max() > 255):
            return "has pixels other than k/255. Read it with source = 'leaf' and pixels = false"
        return scaled.astype(np.uint8)

    def _labels(self, listed: object) -> Floats | None:
        """Return the targets as numbers, or None if they are not numbers."""
        return _number_array(listed)

    def _user(self, entry: object, user: str, in_test: bool, where: str) -> int:
        if (user, in_test) in self._file_of:
            other = self._file_of[user, in_test]
            raise DataError(f"{where}: user {user!r} occurs twice (also in {other}). Each user may occur only once")
        self._file_of[user, in_test] = where
        x, listed = (entry.get(key, []) if isinstance(entry, dict) else [] for key in ("x", "y"))
        if isinstance(x, str):
            raise DataError(f"{where}: user {user!r} {x}")
        y = self._labels(listed)
        if y is None:
            raise DataError(f"{where}: the y of user {user!r} contains values that are not {self.wanted}")
        y = y.ravel()
        if len(x) != len(y):
            raise DataError(
                f"{where}: x of user {user!r} has length {len(x)}, but y has length {len(y)}. Make the lengths equal"
            )
        if len(y) == 0:
            raise DataError(f"{where}: user {user!r} has no samples. Remove the user")
        if self._options.task == "classification":
            self._check_labels(y, user, where)
        if self.x is None:
            shape = self._options.shape
            if shape is not None and math.prod(shape) != x.shape[1]:
                raise DataError(
                    f"{where}: samples of {x.shape[1]} values cannot have the shape {shape}. This "
                    "file belongs to a different data set"
                )
            self.x = GrowingRows(x.shape[1:], x.dtype.type)
        if x.shape[1:] != self.x.shape:
            raise DataError(
                f"{where}: user {user!r} has a sample of {x.shape[1]} values, but the other samples "
                f"have {self.x.shape[0]}. All samples must have the same size"
            )
        held = len(y)
        if self._kept is not None:
            mask = (y >= self._kept.start) & (y < self._kept.stop)
            x, y = x[mask], y[mask] - self._kept.start
        if len(y):
            self.x.room(len(y))[:] = x
            self.user.append(self.codes.setdefault(user, len(self.codes)))
            self.counts.append(len(y))
            self.in_test.append(in_test)
            self.y.append(y)
        return held

    def _check_labels(self, y: Floats, user: str, where: str) -> None:
        count = self._options.classes or MAX_CLASSES
        if (y != np.floor(y)).any():
            raise DataError(
                f"{where}: user {user!r} has labels that are not whole numbers. Set task = "
                "'regression' if the labels are measurements"
            )
        if ((y < 0) | (y >= count)).any():
            bad = y[((y < 0) | (y >= count)).argmax()]
            raise DataError(
                f"{where}: user {user!r} has the unknown label {bad:g}: labels must be from 0 to "
                f"{count - 1}. Repair the file, or set task = 'regression' if labels are measurements"
            )


def _number_array(values: object) -> Floats | None:
    """Convert a rectangular nested list of numbers to an array, or return None if the value is anything else."""
    try:
        array = np.array(values)
    except ValueError:
        return None
    return array.astype(np.float64) if array.dtype.kind in "iuf" or array.size == 0 else None


class Leaf(FileSource):
    """Any data set in LEAF's JSON format whose features are numbers. The users are the natural clients.

    Files in a folder `test`, or with the word `test` in their name, form the official test set if there are also other
    files.
    """

    inside: str = Field(
        default="", description="path prefix of the files to read, relative to the root of the folder or archive"
    )
    shape: tuple[int, ...] | None = Field(
        default=None, description="shape of one sample (default: the length of a row)"
    )
    pixels: bool = Field(
        default=False, description="store features as bytes. Every feature must be k/255 for an integer k"
    )
    task: Literal["classification", "regression"] = Field(default="classification", description="type of y")
    classes: int | None = Field(default=None, ge=2, description="number of classes (None: the largest label + 1)")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load the samples of all users from all files."""
        place = locate("LEAF", self.path, data_dir, (), lambda p: True)
        return _load_leaf(place, self, None)


class Femnist(FileSource):
    """FEMNIST: handwritten digits and letters by writer, with 28x28 pixels and white as 1.

    The writers are the natural clients.
    """

    subset: Literal["all", "digits", "letters"] = Field(
        default="all",
        description=(
            "classes to read. all: 62 classes (0-9 A-Z a-z). digits: 0-9. letters: a to j, numbered "
            "0..9, as in FedProx's sampler (FIAELT)"
        ),
    )

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load the samples of all writers of the data set. LEAF's test files form the official test set."""
        place = locate("FEMNIST", self.path, data_dir, ("femnist",), holds_json)
        options = Leaf(shape=(1, 28, 28), pixels=True, classes=62)
        first, classes = {
            "all": (0, DIGIT_CLASSES + UPPERCASE_CLASSES + LOWERCASE_CLASSES),
            "digits": (0, DIGIT_CLASSES),
            "letters": (36, LOWERCASE_CLASSES[:10]),
        }[self.subset]
        return _load_leaf(place, options, (first, classes))


def holds_json(place: Path) -> bool:
    """Return True if the path is a file, or a folder that contains JSON files or archives."""
    if not place.is_dir():
        return True
    return any(any(place.glob(pattern)) for pattern in ("*.tar*", "*.zip", "*.json*", "train/*.json*"))


def _load_leaf(place: Path, options: Leaf, original: tuple[int, tuple[str, ...]] | None) -> Dataset:
    first, names = original or (0, ())
    kept = range(first, first + len(names)) if original else None
    collected = collect_user_samples(place, options.inside, LeafUserCollector(options, kept))
    x = torch.from_numpy(collected.x)
    if options.shape is not None:
        x = x.view(len(x), *options.shape)
    y, task, classes = _convert_leaf_targets(collected.y, options, names)
    name = "femnist" if original else (PurePosixPath(options.inside).name or place.name)
    return make_user_dataset(place, collected, name, "writer" if original else "user", x, y, task, classes)


def make_user_dataset(
    place: Path, collected: UserSamples, name: str, column: str, x: torch.Tensor, y: torch.Tensor, task: Task,
    classes: tuple[str, ...], vocabulary: tuple[str, ...] = (),
) -> Dataset:  # fmt: skip
    """Create a data set from samples that were collected by user, with a column for the user."""
    with name_file_in_errors(place):
        return Dataset(
            name, x, y, task, classes, test=collected.test, columns={column: collected.users},
            levels={column: collected.names}, users=collected.users, user_names=collected.names, vocabulary=vocabulary,
        )  # fmt: skip


class UserSamples(NamedTuple):
    """Samples of all users.

    Attributes:
        x: features ``[N, .]``.
        y: targets ``[N]``.
        users: codes of the users ``[N]``.
        names: names of the users.
        test: official test set, or None if there is none.
    """

    x: NDArray[Any]
    y: Floats
    users: torch.Tensor
    names: tuple[str, ...]
    test: torch.Tensor | None


def collect_user_samples(place: Path, inside: str, collector: LeafUserCollector) -> UserSamples:
    """Collect the samples from all files whose path within a folder or archive starts with ``inside``.

    Raises:
        DataError: the files are not LEAF files, or the collector rejects the data in them.
    """
    for entry in iterate_entries(place, lambda name: name.endswith(".json") and name.startswith(inside)):
        path = PurePosixPath(entry.name)
        collector.file(entry, any(TEST_NAME_PATTERN.search(part) for part in (*path.parts[-2:-1], path.stem)))
    if collector.x is None or not collector.counts:
        where = f"{place}/{inside}" if inside else str(place)
        raise NoSamples(f"LEAF: no samples in {where}; expected JSON files with users and user_data")
    counts = torch.tensor(collector.counts)
    users = torch.tensor(collector.user).repeat_interleave(counts)
    in_test = torch.tensor(collector.in_test).repeat_interleave(counts)
    test = in_test.nonzero().flatten() if bool(in_test.any()) and not bool(in_test.all()) else None
    return UserSamples(collector.x.trim(), np.concatenate(collector.y), users, tuple(collector.codes), test)


def _convert_leaf_targets(
    y: Floats, options: Leaf, names: tuple[str, ...]
) -> tuple[torch.Tensor, Task, tuple[str, ...]]:
    if options.task == "regression":
        return torch.from_numpy(y)[:, None], "regression", ()
    classes = names or (number_names(y) if options.classes is None else tuple(str(i) for i in range(options.classes)))
    return torch.from_numpy(y.astype(np.int64)), "classification", classes
