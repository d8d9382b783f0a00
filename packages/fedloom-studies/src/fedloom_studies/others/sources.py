"""Data of tables from other programs, prepared and split as in those programs, and their initial model.

Experiment files refer to these classes by import path. Each client's test part is given in the table, so the partition
is ``writers`` with ``test_from = "users"``.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from sklearn.model_selection import train_test_split
from torch import nn

from fedloom.data import Dataset, Source, load
from fedloom.errors import DataError
from fedloom.models import ModelSpec
from fedloom.seeds import forked

Floats = NDArray[np.float64]
HEART_FILES = {name: f"processed.{name}.data" for name in ("cleveland", "hungarian", "switzerland", "va")}
HEART_NUMBERS, HEART_CODES = (0, 1, 3, 4, 5, 7, 8, 9), (2, 6)
"""Columns of the UCI files that FLamby uses: numeric columns, and categorical columns, which become indicators. The
target is the last column."""
HEART_SEED, HEART_TRAINING_SHARE = 43, 0.66
BRCA_FEATURES = 39
AFL_CLASSES = (("T-shirt/top", 0), ("Pullover", 2), ("Shirt", 6))
AFL_SCALE_FLOOR = 0.001
"""Number added to the standard deviation of each pixel."""
PHD_LEVEL = "Doctorate"


class SeededLinear(ModelSpec):
    """Linear layer with the weights that PyTorch draws after ``torch.manual_seed(seed)``, as in another program."""

    kind: ClassVar[str] = f"{__name__}:SeededLinear"

    def build(
        self, shape: tuple[int, ...], outputs: int, seed: int = 0, tokens: tuple[int, bool] | None = None
    ) -> nn.Module:
        """Return the layer that accepts input vectors ``[b, k]``."""
        with forked(torch.device("cpu")):
            torch.manual_seed(seed)  # noqa: TID251 (as the other program)
            return self.module(shape, outputs)

    def module(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Return the layer, whose weights are drawn from the current global generator."""
        return nn.Linear(shape[0], outputs)


class FlambyHeart(Source):
    """Fed-Heart-Disease from FLamby (owkin/FLamby at edacf54): four hospitals, 740 patients without missing values.

    Columns 10 to 12 are dropped first, and then all patients with a missing value. Two thirds of the patients of each
    hospital are used for training. The training patients are drawn by scikit-learn with seed 43. The features are
    scaled using each hospital's training part.
    """

    path: str | None = Field(None, description="folder with the four UCI files (None: search the data folder)")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Read the four files and return the data set.

        Raises:
            DataError: a file is missing or damaged.
        """
        places = _find_files("UCI heart disease", self.path, data_dir, ("tabular/uci_heart", "uci_heart", "heart"),
                       {name: (file,) for name, file in HEART_FILES.items()}, "fedloom data heart --fetch")  # fmt: skip
        tables = [_heart_rows(file) for file in places.values()]
        rows, owner = np.concatenate(tables), np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        sick = (rows[:, -1] > 0).astype(np.int64)
        tested = np.concatenate([_heart_test_mask(sick[owner == k]) for k in range(len(tables))])
        codes = [rows[:, [column]] == np.unique(rows[:, column])[1:] for column in HEART_CODES]
        x = np.concatenate([rows[:, HEART_NUMBERS], *codes], 1).astype(np.float32)
        for k in range(len(tables)):
            training = x[(owner == k) & ~tested]
            x[owner == k] = (x[owner == k] - training.mean(0)) / (training.std(0, ddof=1) + np.float32(1e-9))
        return Dataset(
            "flamby-heart", torch.from_numpy(x), torch.from_numpy(sick), "binary", ("healthy", "disease"),
            test=torch.from_numpy(np.flatnonzero(tested)), users=torch.from_numpy(owner), user_names=tuple(HEART_FILES),
        )  # fmt: skip


def _heart_rows(file: Path) -> Floats:
    """Return the patients of a hospital that have no missing values, ``[N, 11]``. The target is in the last column."""
    try:
        table = np.genfromtxt(file, delimiter=",", missing_values="?", dtype=np.float64)
        rows = np.delete(table, (10, 11, 12), axis=1)
    except (ValueError, IndexError) as error:
        raise DataError(
            f"{file} is not a table of the UCI heart disease data ({error}). Fetch the file again"
        ) from None
    return rows[~np.isnan(rows).any(1)]


def _heart_test_mask(sick: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask ``[N]`` of the hospital's patients whom FLamby uses for testing."""
    counts = np.bincount(sick, minlength=2)
    _, test = train_test_split(
        np.arange(len(sick)), test_size=1 - HEART_TRAINING_SHARE, train_size=HEART_TRAINING_SHARE,
        random_state=HEART_SEED, stratify=sick if counts.min() > 2 else None,
    )  # fmt: skip
    return np.isin(np.arange(len(sick)), test)


class FlambyBrca(Source):
    """Fed-TCGA-BRCA from FLamby (owkin/FLamby at edacf54): survival of 1,088 patients in six regions, with 39 columns.

    The split is FLamby's own, and the columns are unchanged.
    """

    path: str | None = Field(None, description="folder with both files (None: search the data folder)")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Read the table and the split, and return the data set.

        Raises:
            DataError: a file is missing, or differs from the file that FLamby uses.
        """
        wanted = {"table": ("brca.csv",), "split": ("train_test_split.csv", "split.csv")}
        places = _find_files("Fed-TCGA-BRCA", self.path, data_dir, ("flamby", "brca"), wanted,
                       "copy brca.csv and train_test_split.csv from github.com/owkin/FLamby, "
                       "flamby/datasets/fed_tcga_brca, into a folder flamby there")  # fmt: skip
        with places["table"].open(newline="") as file:
            patients = {row[0]: row[1:] for row in csv.reader(file)}
        with places["split"].open(newline="") as file:
            folds = [(row["pid"], row["fold2"].split("_")) for row in csv.DictReader(file)]
        try:
            values = np.array([patients[patient] for patient, _ in folds], dtype=np.float64)
            owner = np.array([int(fold[1]) for _, fold in folds])
            tested = np.array([fold[0] == "test" for _, fold in folds])
        except (KeyError, ValueError, IndexError) as error:
            raise DataError(
                f"{places['table']} is not FLamby's table and split ({error!r}). Fetch both files again"
            ) from None
        return Dataset(
            "flamby-brca", torch.from_numpy(values[:, :BRCA_FEATURES].astype(np.float32)),
            torch.from_numpy(values[:, [BRCA_FEATURES + 1, BRCA_FEATURES]]), "survival",
            test=torch.from_numpy(np.flatnonzero(tested)), users=torch.from_numpy(owner),
            user_names=tuple(f"region {k}" for k in range(owner.max() + 1)),
        )  # fmt: skip


class AflAdult(Source):
    """UCI adult as split by q-FFL's code for agnostic federated learning (litian96/fair_flearn): doctorates and others.

    The features are indicators of all levels of the eight categorical columns, 99 in total. There is no indicator for a
    missing level.
    """

    path: str | None = Field(None, description="same meaning as this option of the data source 'adult'")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Read both files and return the data set.

        Raises:
            DataError: raised in the same cases as for the source ``adult``.
        """
        adult = load("adult", data_dir, **({} if self.path is None else {"path": self.path}))
        parts = []
        for name, levels in adult.levels.items():
            places = [k for k, level in enumerate(levels) if level != "?"]
            parts.append(nn.functional.one_hot(adult.columns[name], len(levels))[:, places])
        of = {True: 0, False: 1}
        doctor = adult.columns["education"] == adult.levels["education"].index(PHD_LEVEL)
        return Dataset(
            "afl-adult", torch.cat(parts, 1).float(), adult.y, "classification", adult.classes, test=adult.test,
            users=torch.where(doctor, of[True], of[False]), user_names=("doctorate", "others"),
        )  # fmt: skip


class AflFashion(Source):
    """Three classes of Fashion-MNIST, with one client per class (litian96/fair_flearn).

    Each pixel is scaled using the training images of all ten classes.
    """

    path: str | None = Field(None, description="same meaning as this option of the data source 'fashion-mnist'")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Read the four files and return the data set.

        Raises:
            DataError: raised in the same cases as for the source ``fashion-mnist``.
        """
        images = load("fashion-mnist", data_dir, **({} if self.path is None else {"path": self.path}))
        if images.test is None:
            raise DataError("fashion-mnist: the official test images are missing. Fetch all four files")
        x, y, test = images.x.flatten(1).numpy().astype(np.float32), images.y.numpy(), images.test.numpy()
        training = np.delete(x, test, axis=0)
        x = (x - training.mean(0)) / (training.std(0) + np.float32(AFL_SCALE_FLOOR))
        number = np.full(len(images.classes), -1)
        number[[label for _, label in AFL_CLASSES]] = np.arange(len(AFL_CLASSES))
        kept = np.flatnonzero(number[y] >= 0)
        codes, names = torch.from_numpy(number[y[kept]]), tuple(name for name, _ in AFL_CLASSES)
        return Dataset(
            "afl-fashion", torch.from_numpy(x[kept]), codes, "classification", names,
            test=torch.from_numpy(np.flatnonzero(np.isin(kept, test))), users=codes, user_names=names,
        )  # fmt: skip


def _find_files(
    what: str, path: str | None, data_dir: str | Path | None, folders: Sequence[str],
    files: Mapping[str, Sequence[str]], cure: str,
) -> dict[str, Path]:  # fmt: skip
    """Find a folder that contains all files of a data set, and return their paths.

    Raises:
        DataError: no folder contains all of the files.
    """
    root = path or data_dir or os.environ.get("FEDLOOM_DATA")
    if not root:
        raise DataError(f"{what}: no data folder was given. Set FEDLOOM_DATA, or give data_dir or path")
    base = Path(root).expanduser()
    tried = [base] if path else [*(base / folder for folder in folders), base]
    for folder in tried:
        places: dict[str, Any] = {
            key: next((folder / name for name in names if (folder / name).is_file()), None)
            for key, names in files.items()
        }
        if None not in places.values():
            return places
    needed = ", ".join(" or ".join(names) for names in files.values())
    raise DataError(
        f"{what}: {needed} were not found together in one folder. Looked in {', '.join(map(str, tried))}; {cure}"
    )
