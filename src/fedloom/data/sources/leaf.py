"""LEAF JSON: samples by user, read as a stream; FEMNIST with its writers.

Caldas et al. 2019, LEAF: a benchmark for federated settings, arXiv 1812.01097.
"""

from __future__ import annotations

import math
import re
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedloom.data.dataset import Dataset, Task
from fedloom.data.sources._base import MOST_CLASSES, FileSource, lies_at, locate, numbered
from fedloom.data.sources.archive import Entry, Rows, entries
from fedloom.data.sources.json_stream import JsonStream
from fedloom.errors import DataError, NoSamples

Floats = NDArray[np.float64]
TEST = re.compile(r"(?<![a-z])(my)?test(?![a-z])")
DIGITS = tuple("0123456789")
UPPER, LOWER = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), tuple("abcdefghijklmnopqrstuvwxyz")


class _Collector:
    """All users of all files: features in one growing array, one code per sample."""

    def __init__(self, options: Leaf, kept: range | None) -> None:
        self._options, self._kept = options, kept
        self.x: Rows | None = None
        self.y: list[Floats] = []
        self.user: list[int] = []
        self.counts: list[int] = []
        self.in_test: list[bool] = []
        self.codes: dict[str, int] = {}
        self._width = 0
        self._seen: dict[tuple[str, bool], str] = {}

    def file(self, entry: Entry, in_test: bool) -> None:
        """Reads one file."""
        stream = JsonStream(entry.stream, entry.where)
        declared: Any = None
        sizes: Any = None
        found: dict[str, int] = {}
        for key in stream.members():
            if key == "users":
                declared = stream.value()
            elif key == "num_samples":
                sizes = stream.value()
            elif key == "user_data":
                for user in stream.members():
                    found[user] = self._user(stream, user, in_test, entry)
            else:
                stream.value()
        stream.end()
        if not isinstance(declared, list) or not all(isinstance(user, str) for user in declared) or not found:
            raise DataError(f"{entry.where}: no list of users or no user_data; not a LEAF file")
        if len(set(declared)) != len(declared):
            twice = next(user for user in declared if declared.count(user) > 1)
            raise DataError(f"{entry.where}: user {twice!r} is listed twice; every user may come once")
        if set(declared) != set(found):
            odd = sorted(set(declared) ^ set(found))[0]
            raise DataError(f"{entry.where}: user {odd!r} is in only one of users and user_data; fetch the file again")
        if sizes is not None and sizes != [found[user] for user in declared]:
            raise DataError(f"{entry.where}: num_samples is not what user_data holds; fetch the file again")

    def _user(self, stream: JsonStream, user: str, in_test: bool, entry: Entry) -> int:
        if (user, in_test) in self._seen:
            other = self._seen[user, in_test]
            raise DataError(f"{entry.where}: user {user!r} comes twice (also in {other}); every user may come once")
        self._seen[user, in_test] = entry.where
        start = self.x.size if self.x is not None else 0
        y: Floats | None = None
        for key in stream.members():
            if key == "x":
                for row in stream.rows():
                    self._row(row, user, entry)
            elif key == "y":
                rows = list(stream.rows())
                y = np.concatenate(rows) if rows else np.empty(0)
            else:
                stream.value()
        got = (self.x.size if self.x is not None else 0) - start
        if y is not None and len(y) == got == 0:
            raise DataError(f"{entry.where}: user {user!r} has no sample; remove the user")
        if y is None or self.x is None or len(y) != got:
            raise DataError(
                f"{entry.where}: user {user!r} has {got} x and {0 if y is None else len(y)} y; make them equal"
            )
        if self._options.task == "classification":
            self._check_labels(y, user, entry)
        if self._kept is not None:
            mask = (y >= self._kept.start) & (y < self._kept.stop)
            self.x.keep(start, mask)
            y = y[mask] - self._kept.start
        if len(y):
            code = self.codes.setdefault(user, len(self.codes))
            self.user.append(code)
            self.counts.append(len(y))
            self.in_test.append(in_test)
            self.y.append(y)
        return got

    def _check_labels(self, y: Floats, user: str, entry: Entry) -> None:
        count = self._options.classes or MOST_CLASSES
        if (y != np.floor(y)).any():
            raise DataError(
                f"{entry.where}: user {user!r} has labels that are not whole numbers; set task = 'regression' if they "
                "are measurements"
            )
        if ((y < 0) | (y >= count)).any():
            bad = y[((y < 0) | (y >= count)).argmax()]
            raise DataError(
                f"{entry.where}: user {user!r} has the unknown label {bad:g}, allowed 0..{count - 1}; repair the file, "
                "or set task = 'regression' if labels are measurements"
            )

    def _row(self, row: Floats, user: str, entry: Entry) -> None:
        shape, pixels = self._options.shape, self._options.pixels
        if self.x is None:
            if shape is not None and math.prod(shape) != len(row):
                raise DataError(
                    f"{entry.where}: samples of {len(row)} values cannot have the shape {shape}; not the data set "
                    "that was asked for"
                )
            self.x = Rows((len(row),), np.uint8 if pixels else np.float32)
            self._width = len(row)
        if len(row) != self._width:
            raise DataError(
                f"{entry.where}: user {user!r} has a sample of {len(row)} values, the others have {self._width}; "
                "all samples need one size"
            )
        if pixels:
            bytes_ = np.rint(row * 255)
            if not (abs(row * 255 - bytes_) < 1e-2).all() or bytes_.min() < 0 or bytes_.max() > 255:
                raise DataError(
                    f"{entry.where}: user {user!r} has pixels other than k/255; read it with source = 'leaf' and "
                    "pixels = false"
                )
            row = bytes_
        self.x.room(1)[0] = row


class Leaf(FileSource):
    """LEAF JSON files of any kind with numbers as features; users are the natural clients.

    Files below a folder `test`, or with the word `test` in their name, are the official test set, if there are others.
    """

    inside: str = Field(default="", description="read only files whose path in the folder or archive starts so")
    shape: tuple[int, ...] | None = Field(default=None, description="shape of one sample; None: as long as a row is")
    pixels: bool = Field(default=False, description="features are k/255: keep them as bytes")
    task: Literal["classification", "regression"] = Field(default="classification", description="what y is")
    classes: int | None = Field(default=None, ge=2, description="number of classes; None: the largest label + 1")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """All users of all files."""
        place = locate("LEAF", self.path, data_dir, (), lambda p: True)
        return _load(place, self, None)


class Femnist(FileSource):
    """FEMNIST: handwritten digits and letters by writer, 28x28, white is 1; writers are the natural clients."""

    subset: Literal["all", "digits", "letters"] = Field(
        default="all",
        description="all 62 classes (0-9 A-Z a-z); digits only; letters: a to j as 0..9, as FedProx's sampler (FIAELT)",
    )

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """All writers; LEAF's test files are the official test set."""
        place = locate("FEMNIST", self.path, data_dir, ("femnist",), _holds_json)
        options = Leaf(shape=(1, 28, 28), pixels=True, classes=62)
        first, classes = {
            "all": (0, DIGITS + UPPER + LOWER),
            "digits": (0, DIGITS),
            "letters": (36, LOWER[:10]),
        }[self.subset]
        return _load(place, options, (first, classes))


def _holds_json(place: Path) -> bool:
    if not place.is_dir():
        return True
    return any(any(place.glob(pattern)) for pattern in ("*.tar*", "*.zip", "*.json*", "train/*.json*"))


def _load(place: Path, options: Leaf, known: tuple[int, tuple[str, ...]] | None) -> Dataset:
    first, names = known or (0, ())
    collector = _Collector(options, range(first, first + len(names)) if known else None)
    for entry in entries(place, lambda name: name.endswith(".json") and name.startswith(options.inside)):
        path = PurePosixPath(entry.name)
        collector.file(entry, any(TEST.search(part) for part in (*path.parts[-2:-1], path.stem)))
    if collector.x is None or not collector.counts:
        inside = f"{place}/{options.inside}" if options.inside else str(place)
        raise NoSamples(f"LEAF: no sample in {inside}; expected JSON files with users and user_data")
    x = torch.from_numpy(collector.x.done())
    if options.shape is not None:
        x = x.view(len(x), *options.shape)
    counts = torch.tensor(collector.counts)
    users = torch.tensor(collector.user).repeat_interleave(counts)
    in_test = torch.tensor(collector.in_test).repeat_interleave(counts)
    test = in_test.nonzero().flatten() if not bool(in_test.all()) else in_test.new_empty(0, dtype=torch.int64)
    y, task, classes = _targets(np.concatenate(collector.y), options, names)
    user_names = tuple(collector.codes)
    column = "writer" if known else "user"
    with lies_at(place):
        return Dataset(
            "femnist" if known else (PurePosixPath(options.inside).name or place.name),
            x,
            y,
            task,
            classes,
            test=test if len(test) else None,
            columns={column: users},
            levels={column: user_names},
            users=users,
            user_names=user_names,
        )


def _targets(y: Floats, options: Leaf, names: tuple[str, ...]) -> tuple[torch.Tensor, Task, tuple[str, ...]]:
    if options.task == "regression":
        return torch.from_numpy(y)[:, None], "regression", ()
    classes = names or (numbered(y) if options.classes is None else tuple(str(i) for i in range(options.classes)))
    return torch.from_numpy(y.astype(np.int64)), "classification", classes
