"""Table: imputation, missing flags, one-hot levels and scaling, fitted on each client's training part only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.errors import DataError
from fedloom.values import Value

MARKERS = ("", "?", "NA", "NaN", "nan", "null")
"""Cells that mean missing in every table, whatever other markers it has."""


def is_number(cell: Any) -> bool:
    """Whether a cell is a finite number."""
    try:
        return bool(np.isfinite(float(cell)))
    except (ValueError, TypeError, OverflowError):
        return False


class Markers:
    """Cells that mean missing, by value: the marker -9 is the number -9, and the texts "-9", " -9" and "-9.0" alike.

    Args:
        markers: texts; one that reads as a number is compared as a number.
    """

    def __init__(self, markers: Sequence[str]) -> None:
        self._texts = frozenset(marker.strip() for marker in markers)
        values = [float(marker) for marker in self._texts if is_number(marker)]
        self._values = frozenset([*values, *np.array(values, np.float32).tolist()])  # as a column of 32 bits has it
        self.numbers = sorted(self._values)

    def hold(self, cell: Any) -> bool:
        """Whether a cell is one of them."""
        if isinstance(cell, str):
            text = cell.strip()
            return text in self._texts or bool(self._values and is_number(text) and float(text) in self._values)
        if isinstance(cell, int | float | np.number) and not isinstance(cell, bool):
            return cell in self._values
        return False


markers_of = lru_cache(maxsize=64)(Markers)


class Column(Value):
    """One raw column: a number, or a code 0..levels-1; NaN is missing."""

    name: str
    levels: int = Field(default=0, ge=0, description="number of levels of a code; 0 is a number")
    names: tuple[str, ...] = Field(default=(), description="names of the levels, where the source knows them")
    flag: bool = Field(default=False, description="whether a feature tells that the value was missing")
    scale: bool = Field(default=True, description="whether a number is centred and scaled")


class Table(Value):
    """Turns raw columns [N, p] into features [N, q], client by client.

    A number: missing values become the median of the client's observed training values, then the column is centred
    and divided by its standard deviation over the client's training part (by 1 where that is 0), unless told not to.
    A code: missing values become the client's most frequent training level, then one feature per level of the schema.
    A column with fewer than `min_observed` observed training values at a client is 0 there. A flagged column has one
    more feature: 1 where the value was missing. Nothing is fitted across clients or on validation or test parts.
    """

    columns: tuple[Column, ...] = Field(min_length=1)
    min_observed: int = Field(default=5, ge=1, description="observed training values below which a column is dropped")
    missing: tuple[str, ...] = Field(default=("",), description="cells that mean missing, by value")
    impute: bool = Field(default=True, description="whether missing cells of new rows are filled")

    @classmethod
    def numeric(cls, count: int) -> Table:
        """A table of `count` numbers, none of them missing."""
        return cls(columns=tuple(Column(name=f"x{i}") for i in range(count)), min_observed=1)

    @property
    def width(self) -> int:
        """Number of features q."""
        return sum(max(column.levels, 1) + column.flag for column in self.columns)

    def unmarked(self, x: Tensor) -> Tensor:
        """Raw columns ``[N, p]`` with NaN in the place of numbers that mean missing."""
        marks = torch.tensor(markers_of(self.missing).numbers, dtype=x.dtype)
        numbers = torch.tensor([not column.levels for column in self.columns])
        return torch.where(torch.isin(x, marks) & numbers, torch.nan, x) if len(marks) else x

    def __call__(self, x: Tensor, owner: Tensor, train: Tensor) -> Tensor:
        """Features [N, q] float32; see `Prepare`."""
        return self.features(x, owner, self.fit(x, owner, train))

    def fit(self, x: Tensor, owner: Tensor, train: Tensor) -> Tensor:
        """What the columns look like in every client's training part; arguments as `Prepare`.

        Returns:
            [n, p, 3] float64: what fills a missing value, what is subtracted, what divides; NaN for a column with too
            few observed values.

        Raises:
            DataError: samples of another number of columns.
        """
        self._check(x)
        fitted = [
            torch.stack([self._fit(c, x[rows, j], train[rows]) for j, c in enumerate(self.columns)])
            for rows in _clients(owner)
        ]
        return torch.stack(fitted) if fitted else torch.zeros(0, len(self.columns), 3, dtype=torch.float64)

    def features(self, x: Tensor, owner: Tensor, fitted: Tensor) -> Tensor:
        """Features [N, q] float32 of samples x [N, p] of the clients `owner` [N] (-1: becomes 0), as fitted [n, p, 3].

        Raises:
            DataError: samples of another number of columns.
        """
        self._check(x)
        out = torch.zeros(len(x), self.width, dtype=torch.float32)
        for rows, own in zip(_clients(owner), fitted, strict=True):
            out[rows] = torch.cat([_features(c, x[rows, j], own[j]) for j, c in enumerate(self.columns)], 1).float()
        return out

    def _check(self, x: Tensor) -> None:
        if x.ndim != 2 or x.shape[1] != len(self.columns):
            raise DataError(f"the table has {len(self.columns)} columns, got samples of shape {tuple(x.shape[1:])}")

    def _fit(self, column: Column, values: Tensor, train: Tensor) -> Tensor:
        missing = values.isnan()
        observed = values[train & ~missing]
        if len(observed) < self.min_observed:
            return torch.full((3,), torch.nan, dtype=torch.float64)
        if column.levels:
            common = torch.bincount(observed.long(), minlength=column.levels).argmax()
            return torch.tensor([float(common), 0.0, 1.0], dtype=torch.float64)
        fill = observed.median()
        full = torch.where(missing, fill, values)
        if not column.scale:
            return torch.tensor([float(fill), 0.0, 1.0], dtype=torch.float64)
        std = float(full[train].std(correction=0))
        return torch.tensor([float(fill), float(full[train].mean()), std if std > 0 else 1.0], dtype=torch.float64)


class Fitted(NamedTuple):
    """A table and what it was fitted to at every client [n, p, 3]; see `Table.fit`."""

    table: Table
    values: Tensor


def _clients(owner: Tensor) -> list[Tensor]:
    """Rows of every client, in their order."""
    order = torch.argsort(owner, stable=True)
    return list(order.split(torch.bincount(owner + 1).tolist()))[1:]


def _features(column: Column, values: Tensor, fitted: Tensor) -> Tensor:
    missing, (fill, centre, scale) = values.isnan(), fitted.to(values.dtype)
    block = torch.zeros(len(values), max(column.levels, 1), dtype=values.dtype)
    if not fitted.isnan().any():
        full = torch.where(missing, fill, values)
        if column.levels:
            block = torch.nn.functional.one_hot(full.long(), column.levels).to(values.dtype)
        else:
            block = ((full - centre) / scale)[:, None]
    return torch.cat([block, missing[:, None].to(values.dtype)], 1) if column.flag else block
