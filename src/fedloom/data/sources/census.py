"""Tables with a published schema: UCI heart disease (four hospitals) and UCI adult (census income)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import torch

from fedloom.data.dataset import Dataset
from fedloom.data.sources._base import FileSource, locate
from fedloom.data.sources.archive import Entry, Rows, entries
from fedloom.data.tables import Column, Table
from fedloom.errors import DataError, NoSamples

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
HEART: dict[str, tuple[int, ...]] = {  # levels of codes; empty: a number
    "age": (),
    "sex": (0, 1),
    "cp": (1, 2, 3, 4),
    "trestbps": (),
    "chol": (),
    "fbs": (0, 1),
    "restecg": (0, 1, 2),
    "thalach": (),
    "exang": (0, 1),
    "oldpeak": (),
    "slope": (1, 2, 3),
    "ca": (),
    "thal": (3, 6, 7),
}
NEVER_MISSING = ("age", "sex", "cp")
ZERO_IS_MISSING = ("trestbps", "chol")


class Heart(FileSource):
    """UCI heart disease (Janosi et al. 1988): four hospitals, 920 patients, is there a disease (num > 0).

    The hospitals are the natural clients. A cholesterol or a resting blood pressure of 0 is missing. Imputation and
    scaling are fitted on each client's training part; a column with fewer than 5 observed values there becomes 0.
    Columns with gaps have a feature that tells where.
    """

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """All four hospitals, raw values with NaN where missing."""
        place = locate(
            "UCI heart disease", self.path, data_dir, ("tabular/uci_heart", "uci_heart", "heart"), _has_heart
        )
        files = {f"processed.{hospital}.data": i for i, hospital in enumerate(HOSPITALS)}
        found: dict[int, tuple[list[list[float]], list[int]]] = {}
        for entry in entries(place, lambda name: name.rsplit("/", 1)[-1] in files):
            rows = [_heart_row(row, line, entry) for line, row in _rows(entry, len(HEART) + 1)]
            if not rows:
                raise NoSamples(f"{entry.where}: empty, a hospital needs a patient; fetch the file again")
            found[files[entry.name.rsplit("/", 1)[-1]]] = ([row for row, _ in rows], [num for _, num in rows])
        lacking = [f"processed.{hospital}.data" for i, hospital in enumerate(HOSPITALS) if i not in found]
        if lacking:
            raise DataError(f"UCI heart disease: {place} lacks {', '.join(lacking)}; put all four files there")
        users = torch.tensor([i for i in range(len(HOSPITALS)) for _ in found[i][1]])
        columns = tuple(
            Column(
                name=name,
                levels=len(levels) if len(levels) > 2 else 0,
                flag=name not in NEVER_MISSING,
                scale=not levels,
            )
            for name, levels in HEART.items()
        )
        return Dataset(
            "heart",
            torch.tensor([row for i in range(len(HOSPITALS)) for row in found[i][0]], dtype=torch.float64),
            torch.tensor([int(num > 0) for i in range(len(HOSPITALS)) for num in found[i][1]]),
            "binary",
            ("healthy", "disease"),
            columns={"hospital": users},
            levels={"hospital": HOSPITALS},
            users=users,
            user_names=HOSPITALS,
            prepare=Table(columns=columns),
        )


def _has_heart(place: Path) -> bool:
    return not place.is_dir() or any(place.glob("*processed.*.data*")) or any(place.glob("*heart*.zip"))


def _heart_row(cells: list[str], line: int, entry: Entry) -> tuple[list[float], int]:
    values: list[float] = []
    for (name, levels), cell in zip(HEART.items(), cells[:-1], strict=True):
        value = float("nan") if cell == "?" else _number(cell, name, line, entry)
        if name in ZERO_IS_MISSING and value == 0:
            value = float("nan")
        if levels and value == value:
            if value not in levels:
                raise DataError(f"{entry.where}: row {line}, {name}: unknown level {cell}, the schema has {levels}")
            value = float(levels.index(int(value)))
        values.append(value)
    num = _number(cells[-1], "num", line, entry)
    if num not in range(5):
        raise DataError(
            f"{entry.where}: row {line}, num: unknown label {cells[-1]}, allowed 0..4; fetch the file again"
        )
    return values, int(num)


def _number(cell: str, name: str, line: int, entry: Entry) -> float:
    try:
        return float(cell)
    except ValueError as error:
        raise DataError(
            f"{entry.where}: row {line}, {name}: expected a number, got {cell!r}; repair the cell"
        ) from error


def _rows(entry: Entry, width: int) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every row of data."""
    text = io.TextIOWrapper(cast("io.BufferedReader", entry.stream), "ascii", errors="replace", newline="")
    for line, row in enumerate(csv.reader(text, skipinitialspace=True), 1):
        if not row or row[0].startswith("|"):  # adult.test begins with a comment
            continue
        if len(row) != width:
            raise DataError(
                f"{entry.where}: row {line} has {len(row)} cells, expected {width}; truncated or another file"
            )
        yield line, row
    text.detach()


ADULT: dict[str, tuple[str, ...]] = {  # levels of codes in the order of adult.names; empty: a number
    "age": (),
    "workclass": (
        *("Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov"),
        *("Local-gov", "State-gov", "Without-pay", "Never-worked", "?"),
    ),
    "fnlwgt": (),
    "education": (
        *("Bachelors", "Some-college", "11th", "HS-grad", "Prof-school", "Assoc-acdm", "Assoc-voc", "9th"),
        *("7th-8th", "12th", "Masters", "1st-4th", "10th", "Doctorate", "5th-6th", "Preschool"),
    ),
    "education-num": (),
    "marital-status": (
        *("Married-civ-spouse", "Divorced", "Never-married", "Separated"),
        *("Widowed", "Married-spouse-absent", "Married-AF-spouse"),
    ),
    "occupation": (
        *("Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty"),
        *("Handlers-cleaners", "Machine-op-inspct", "Adm-clerical", "Farming-fishing", "Transport-moving"),
        *("Priv-house-serv", "Protective-serv", "Armed-Forces", "?"),
    ),
    "relationship": ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried"),
    "race": ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"),
    "sex": ("Female", "Male"),
    "capital-gain": (),
    "capital-loss": (),
    "hours-per-week": (),
    "native-country": (
        *("United-States", "Cambodia", "England", "Puerto-Rico", "Canada", "Germany", "Outlying-US(Guam-USVI-etc)"),
        *("India", "Japan", "Greece", "South", "China", "Cuba", "Iran", "Honduras", "Philippines", "Italy", "Poland"),
        *("Jamaica", "Vietnam", "Mexico", "Portugal", "Ireland", "France", "Dominican-Republic", "Laos", "Ecuador"),
        *("Taiwan", "Haiti", "Columbia", "Hungary", "Guatemala", "Nicaragua", "Scotland", "Thailand", "Yugoslavia"),
        *("El-Salvador", "Trinadad&Tobago", "Peru", "Hong", "Holand-Netherlands", "?"),
    ),
}
LOG = ("capital-gain", "capital-loss")
RANGE = {"age": 100.0, "education-num": 16.0, "hours-per-week": 100.0, "capital-gain": 12.0, "capital-loss": 12.0}


class Adult(FileSource):
    """UCI adult (Becker, Kohavi 1996): 32,561 + 16,281 people, is the income above 50,000 dollars.

    Numbers are divided by fixed bounds (capital gain and loss after log(1 + x)), so nothing is fitted; codes have one
    feature per level, `?` is a level; the sampling weight fnlwgt is no feature. Every coded column can split a
    federation.
    """

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Both files; adult.test is the official test set."""
        place = locate("UCI adult", self.path, data_dir, ("tabular/adult.tar.xz", "tabular/adult", "adult"), _has_adult)
        coded = [name for name, levels in ADULT.items() if levels]
        codes = {name: {level: i for i, level in enumerate(ADULT[name])} for name in coded}
        starts = dict(zip(coded, np.cumsum([0] + [len(ADULT[name]) for name in coded]).tolist(), strict=False))
        width = sum(len(ADULT[name]) for name in coded)
        x, facts = Rows((width + len(RANGE),), np.float32), Rows((len(coded) + 2,), np.uint8)
        for entry in entries(place, lambda name: name.rsplit("/", 1)[-1] in ("adult.data", "adult.test")):
            in_test = entry.name.endswith("adult.test")
            for line, row in _rows(entry, len(ADULT) + 1):
                cells = dict(zip(ADULT, row, strict=False))
                out, fact = x.room(1)[0], facts.room(1)[0]
                out[:] = 0
                for j, name in enumerate(coded):
                    code = codes[name].get(cells[name])
                    if code is None:
                        raise DataError(
                            f"{entry.where}: row {line}, {name}: unknown level {cells[name]!r}; not this file"
                        )
                    out[starts[name] + code] = 1
                    fact[j] = code
                for j, (name, bound) in enumerate(RANGE.items()):
                    value = _number(cells[name], name, line, entry)
                    out[width + j] = (np.log1p(value) if name in LOG else value) / bound
                label = row[-1].rstrip(".")
                if label not in ("<=50K", ">50K"):
                    raise DataError(f"{entry.where}: row {line}: unknown label {row[-1]!r}; allowed <=50K and >50K")
                fact[-2:] = label == ">50K", in_test
        if x.size == 0:
            raise DataError(f"UCI adult: {place} has neither adult.data nor adult.test; put both there")
        table = torch.from_numpy(facts.done())
        test = table[:, -1].nonzero().flatten()
        return Dataset(
            "adult",
            torch.from_numpy(x.done()),
            table[:, -2].long(),
            "binary",
            ("<=50K", ">50K"),
            test=test if 0 < len(test) < len(table) else None,
            columns={name: table[:, j].long() for j, name in enumerate(coded)},
            levels={name: ADULT[name] for name in coded},
        )


def _has_adult(place: Path) -> bool:
    return not place.is_dir() or any(place.glob("adult.data*")) or any(place.glob("adult*.tar*"))
