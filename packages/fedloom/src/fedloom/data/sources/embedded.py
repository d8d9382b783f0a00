"""Data sets that are included in scikit-learn and need neither files nor a network connection."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from fedloom.data.dataset import Dataset
from fedloom.data.sources._base import Source
from fedloom.data.tables import Table

Name = Literal["breast_cancer", "diabetes", "digits", "iris", "linnerud", "wine"]


class Digits(Source):
    """Handwritten digits: 1,797 gray images of 8x8 pixels with 17 levels (the test set of UCI optdigits)."""

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load all images as bytes from 0 to 16, which are scaled to the range 0 to 1 for models.

        There is no official test set.
        """
        table = _digit_rows()
        x = torch.from_numpy(table[:, :-1].astype(np.uint8)).view(-1, 1, 8, 8)
        classes = tuple(str(digit) for digit in range(10))
        std = torch.tensor([16 / 255], dtype=torch.float64)
        return Dataset("digits", x, torch.from_numpy(table[:, -1].copy()), "classification", classes, std=std)


@cache
def _digit_rows() -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return the 64 pixels of each row and the digit, read from a scikit-learn file.

    Importing scikit-learn instead would take as long as importing torch.
    """
    spec = find_spec("sklearn")
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.exists():
            return np.loadtxt(file, dtype=np.int64, delimiter=",")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.column_stack([digits.data, digits.target]).astype(np.int64)


class Embedded(Source):
    """Small table that is included in scikit-learn. It is scaled with each client's training set."""

    set: Name = Field(default="breast_cancer", description="name of a data set that is included in scikit-learn")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load the table as a classification, binary (breast_cancer) or regression (diabetes, linnerud) task."""
        if self.set == "digits":
            return Digits().load(data_dir)
        from sklearn import datasets

        bunch = getattr(datasets, f"load_{self.set}")()
        x = torch.from_numpy(np.asarray(bunch.data, np.float64))
        prepare = Table.numeric(x.shape[1])
        if self.set in ("diabetes", "linnerud"):
            y = torch.from_numpy(np.asarray(bunch.target, np.float64)).reshape(len(x), -1)
            return Dataset(self.set, x, y, "regression", prepare=prepare)
        classes = tuple(str(name) for name in bunch.target_names)
        task: Literal["binary", "classification"] = "binary" if len(classes) == 2 else "classification"
        return Dataset(self.set, x, torch.from_numpy(bunch.target).long(), task, classes, prepare=prepare)
