"""Tables with a published schema: UCI heart disease (four hospitals) and UCI adult (census income)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.dataset import Dataset, raise_data_problems
from fedloom.data.sources._base import FileSource, locate
from fedloom.data.sources.archive import GrowingRows, iterate_entries
from fedloom.data.sources.table.cells import Problems, convert_to_numbers, csv_rows, iterate_column_pieces
from fedloom.data.tables import Table, TableColumn
from fedloom.errors import DataError, NoSamples

Schema = Mapping[str, tuple[str, ...]]
"""Levels of each column, with the label as the last column. A column without levels is numeric, and ``?`` marks a
missing value."""

HEART_HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
HEART_COLUMNS: Schema = {
    "age": (),
    "sex": ("0", "1"),
    "cp": ("1", "2", "3", "4"),
    "trestbps": (),
    "chol": (),
    "fbs": ("0", "1"),
    "restecg": ("0", "1", "2"),
    "thalach": (),
    "exang": ("0", "1"),
    "oldpeak": (),
    "slope": ("1", "2", "3"),
    "ca": (),
    "thal": ("3", "6", "7"),
    "num": ("0", "1", "2", "3", "4"),
}
COMPLETE_COLUMNS = ("age", "sex", "cp")
ZERO_MISSING_COLUMNS = ("trestbps", "chol")


class Heart(FileSource):
    """UCI heart disease (Janosi et al. 1988): four hospitals and 920 patients, with or without the disease (num > 0).

    The hospitals are the natural clients of this data set. A cholesterol level or resting blood pressure of 0 is
    treated as missing. Imputation and scaling are fitted to each client's training set. If a client has fewer than 5
    values in a column, all values in this column become 0 for the client. For each column with missing values, an
    additional feature marks these values.
    """

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load the data of all four hospitals as raw values, with NaN for missing cells."""
        folders = ("tabular/uci_heart", "uci_heart", "heart")
        place = locate(
            "UCI heart disease", self.path, data_dir, folders, _make_file_check("processed.*.data*", "*heart*.zip")
        )
        files = [f"processed.{hospital}.data" for hospital in HEART_HOSPITALS]
        tables = dict(_iterate_census_tables(place, files, HEART_COLUMNS))
        if lacking := [file for file in files if file not in tables]:
            raise DataError(f"UCI heart disease: {place} lacks {', '.join(lacking)}. Put all four files there")
        *features, _ = HEART_COLUMNS
        values = np.concatenate([tables[file] for file in files])
        for column in map(features.index, ZERO_MISSING_COLUMNS):
            values[values[:, column] == 0, column] = np.nan
        users = torch.arange(len(files)).repeat_interleave(torch.tensor([len(tables[file]) for file in files]))
        columns = tuple(
            TableColumn(
                name=name,
                levels=len(HEART_COLUMNS[name]) if len(HEART_COLUMNS[name]) > 2 else 0,
                flag=name not in COMPLETE_COLUMNS,
                scale=not HEART_COLUMNS[name],
            )
            for name in features
        )
        return Dataset(
            "heart", torch.from_numpy(values[:, :-1].copy()), torch.from_numpy(values[:, -1] > 0).long(), "binary",
            ("healthy", "disease"), columns={"hospital": users}, levels={"hospital": HEART_HOSPITALS}, users=users,
            user_names=HEART_HOSPITALS, prepare=Table(columns=columns),
        )  # fmt: skip


ADULT_COLUMNS: Schema = {  # in the order of adult.names
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
    "income": ("<=50K", ">50K"),
}
LOG_SCALED_COLUMNS = ("capital-gain", "capital-loss")
COLUMN_RANGES = {
    "age": 100.0,
    "education-num": 16.0,
    "hours-per-week": 100.0,
    "capital-gain": 12.0,
    "capital-loss": 12.0,
}


class Adult(FileSource):
    """UCI adult (Becker, Kohavi 1996): 32,561 + 16,281 people, with an income above or at most 50,000 dollars.

    Numbers are divided by fixed bounds (after log(1 + x) for capital gain and loss), so nothing is fitted to the data.
    Each categorical column becomes one feature per level, and `?` is one of the levels. The sampling weight fnlwgt is
    not used as a feature. Clients can be formed by any categorical column.
    """

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Load the data of both files, with adult.test as the official test set."""
        folders = ("tabular/adult.tar.xz", "tabular/adult", "adult")
        place = locate("UCI adult", self.path, data_dir, folders, _make_file_check("adult.data*", "adult*.tar*"))
        tables = list(_iterate_census_tables(place, ("adult.data", "adult.test"), ADULT_COLUMNS))
        if not tables:
            raise DataError(f"UCI adult: {place} contains neither adult.data nor adult.test. Put both files there")
        in_test = np.repeat([name == "adult.test" for name, _ in tables], [len(values) for _, values in tables])
        values = np.concatenate([values for _, values in tables])
        column = {name: torch.from_numpy(values[:, j]) for j, name in enumerate(ADULT_COLUMNS)}
        codes = {name: column[name].long() for name, levels in ADULT_COLUMNS.items() if levels}
        y, start = codes.pop("income"), 0
        x = torch.zeros(len(y), sum(len(ADULT_COLUMNS[name]) for name in codes) + len(COLUMN_RANGES))
        for name, code in codes.items():
            x[torch.arange(len(x)), start + code] = 1
            start += len(ADULT_COLUMNS[name])
        for name, bound in COLUMN_RANGES.items():
            x[:, start] = (column[name].log1p() if name in LOG_SCALED_COLUMNS else column[name]) / bound
            start += 1
        test = torch.from_numpy(np.flatnonzero(in_test))
        return Dataset(
            "adult", x, y, "binary", ADULT_COLUMNS["income"], test=test if 0 < len(test) < len(x) else None,
            columns=codes, levels={name: ADULT_COLUMNS[name] for name in codes},
        )  # fmt: skip


def _iterate_census_tables(
    place: Path, files: Sequence[str], schema: Schema
) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield each existing file and its cells [N, columns], as numbers or as indices of levels.

    Missing cells are NaN.
    """
    *_, label = schema
    places = {name: {level: float(i) for i, level in enumerate(levels)} for name, levels in schema.items() if levels}
    for entry in iterate_entries(place, lambda name: name.rsplit("/", 1)[-1] in files):
        problems, table = Problems(entry.location, first=1), GrowingRows((len(schema),), np.float64)
        for piece in iterate_column_pieces(csv_rows(entry, ",", comment="|"), list(schema), problems):
            codes = places.get(piece.column)
            missing = np.array([cell == "?" for cell in piece.cells]) & (codes is None or "?" not in codes)
            if codes is None:
                values = convert_to_numbers(piece, missing, problems, "fetch the file again")
            else:
                values = np.array([codes.get(cell, codes.get(_normalize_level(cell), np.nan)) for cell in piece.cells])
                bad = np.flatnonzero(np.isnan(values) & ~(missing & (piece.column != label)))
                if len(bad):
                    cells, kind = [piece.cells[k] for k in bad.tolist()], "label" if piece.column == label else "level"
                    what = f"row {1 + piece.start + bad[0]}, column {piece.column!r}: unknown {kind} {cells[0]!r}"
                    cure = f"the schema has {', '.join(codes)}. Fetch the file again"
                    problems.add("level", piece.column, what, cells, cure)
            table.reserve(piece.start, len(values))[:, list(schema).index(piece.column)] = values
        if sentences := problems.sentences():
            raise_data_problems(entry.location, sentences)
        if table.size == 0:
            raise NoSamples(f"{entry.location} is empty, but needs at least one row. Fetch the file again")
        yield entry.name.rsplit("/", 1)[-1], table.trim().astype(np.float64, copy=False)


def _normalize_level(cell: str) -> str:
    """Return a level in the notation that the schema uses.

    For example, 7.0 becomes 7, and the period at the end of labels in adult.test is removed.
    """
    try:
        return f"{float(cell):g}"
    except ValueError:
        return cell.removesuffix(".")


def _make_file_check(*patterns: str) -> Callable[[Path], bool]:
    return lambda place: not place.is_dir() or any(any(place.glob(pattern)) for pattern in patterns)
