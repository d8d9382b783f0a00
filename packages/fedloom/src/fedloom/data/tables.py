"""Table: imputation, missing-value flags, one-hot encoding and scaling, all fitted separately at each client."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedloom.errors import DataError, direction_in
from fedloom.values import Value

MISSING_MARKERS = (
    "", "?", "NA", "N/A", "n/a", "#N/A", "#N/A N/A", "#NA", "<NA>", "NaN", "nan", "-NaN", "-nan", "NULL", "null",
    "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN",
)  # fmt: skip
"""Texts that mark missing cells in every table, in addition to the table's own: pandas' texts except None, and "?".

In many tables, None is a level, for example the level of a treatment. A table may declare None as one of its own
missing-value codes.
"""


WHOLE_NUMBER_PATTERN = re.compile(r"([-+]?\d+)\.0+")
"""Pattern of an integer that is written with zeros after a decimal point."""
TRUTH_VALUES = {"true": 1.0, "false": 0.0}
"""Truth values as text, in lower case. They are read as numbers in every table."""


def level_name(cell: object) -> str:
    """Return the name of a level, which is the same for all file types: 1, 1.0, "1", "1.0" and " 1" become "1".

    >>> [level_name(cell) for cell in (1, 1.0, "1.0", " 1", "01", True, "b ")]
    ['1', '1', '1', '1', '01', 'True', 'b']
    """
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    text = str(cell).strip()
    whole = WHOLE_NUMBER_PATTERN.fullmatch(text)
    return text if whole is None else whole[1]


def parse_number(cell: Any) -> float | None:
    """Return the number that a cell of a table represents. For any other cell, return None.

    A text is a number only if it is ASCII and does not contain ``_``. Python also reads 1_000 and digits of other
    scripts as numbers, but pandas and Arrow do not, and 1_0 could mean 10, 1.0 or a code.

    >>> [parse_number(cell) for cell in ("1e3", " 2 ", "True", 3, "1_000", "\u0661\u0662", "inf", "two")]
    [1000.0, 2.0, 1.0, 3.0, None, None, None, None]
    """
    if isinstance(cell, str):
        cell = cell.strip()
        if cell.lower() in TRUTH_VALUES:
            return TRUTH_VALUES[cell.lower()]
        if "_" in cell or not cell.isascii():
            return None
    try:
        value = float(cell)
    except (ValueError, TypeError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def is_number(cell: Any) -> bool:
    """Return True if a cell is a finite number written in digits.

    Booleans are not treated as numbers (see `parse_number`).
    """
    return parse_number(cell) is not None and not (isinstance(cell, str) and cell.strip().lower() in TRUTH_VALUES)


class MissingMarkers:
    """Missing-value codes, compared by value: -9 matches the number -9 and the texts "-9", " -9" and "-9.0".

    Args:
        markers: texts. A missing-value code that can be read as a number is compared as a number.
    """

    def __init__(self, markers: Sequence[str]) -> None:
        self._texts = frozenset(marker.strip() for marker in markers)
        values = [float(marker) for marker in self._texts if is_number(marker)]
        self._values = frozenset([*values, *np.array(values, np.float32).tolist()])  # as stored in a 32-bit column
        self.numbers = sorted(self._values)

    def hold(self, cell: object) -> bool:
        """Return True if a cell contains a missing-value code."""
        if isinstance(cell, str):
            text = cell.strip()
            return text in self._texts or bool(self._values and is_number(text) and float(text) in self._values)
        if isinstance(cell, int | float | np.number) and not isinstance(cell, bool):
            return cell in self._values
        return False


markers_of = lru_cache(maxsize=64)(MissingMarkers)


VALUES_PER_COLUMN = 5
"""Number of values that are fitted for a column at a client."""
MAX_RANGE_WIDTHS = 0.5
"""Distance from the training range, as a multiple of its width, beyond which even a single number is reported."""
FAR_ROW_SHARE = 0.5
"""Fraction of a column's rows outside the training range above which predict ends with a different exit code."""
MAX_RARE_DEVIATIONS = 100
"""Largest distance, in standard deviations, of a value that differs from all others in one of 10,000 rows."""
NOTED_ROW_SHARE = 0.1
"""A note is added if at least this fraction of a column's rows is outside the training range."""


class TableColumn(Value):
    """Raw column of a table, which contains either numbers, or codes from 0 to levels - 1. Missing values are NaN."""

    name: str
    levels: int = Field(
        default=0, ge=0, description="number of levels of a categorical column (0: the column is numeric)"
    )
    names: tuple[str, ...] = Field(default=(), description="names of the levels, if the source has them")
    flag: bool = Field(default=False, description="whether an additional feature marks missing values")
    scale: bool = Field(default=True, description="whether to center and scale the numeric column")
    unit: str = Field(default="", description="unit of a numeric column in the agreement")
    range: tuple[float, float] | None = Field(
        default=None, description="smallest and largest plausible values of a numeric column"
    )

    @model_validator(mode="after")
    def _shows_its_names(self) -> TableColumn:
        if disguised := direction_in(self.name, *self.names, self.unit):
            raise ValueError(disguised)
        return self


class Table(Value):
    """Conversion of raw columns [N, p] to features [N, q], fitted separately for each client.

    In a numeric column, missing values are replaced by the median of the client's observed training values. Then, the
    column is centered and divided by its standard deviation in the client's training set (or by 1 if this is 0), unless
    scaling is switched off. In a column of codes, missing values are replaced by the client's most frequent training
    level, and each level becomes one feature. If a client has fewer than `min_observed` observed training values in a
    column, the column is 0 for this client. A column with a missing-value flag has an additional feature that is 1 if
    the value was missing. No value is fitted to the data of several clients, or to validation or test sets.

    Training, evaluation, prediction, exports and deployments use the same scaling: a client's rows are always encoded
    with the values fitted to its training set, regardless of the model. For a new client, which has no training set,
    the `typical` values are used.
    """

    columns: tuple[TableColumn, ...] = Field(min_length=1)
    min_observed: int = Field(
        default=5,
        ge=1,
        description="minimum number of training values in a column. Columns with fewer values are dropped",
    )
    missing: tuple[str, ...] = Field(default=("",), description="missing-value codes")
    impute: bool = Field(default=True, description="whether missing cells in new rows are imputed")

    @classmethod
    def numeric(cls, count: int) -> Table:
        """Return a table with `count` numeric columns without missing values."""
        return cls(columns=tuple(TableColumn(name=f"x{i}") for i in range(count)), min_observed=1)

    @property
    def width(self) -> int:
        """Number of features q after the conversion."""
        return sum(max(column.levels, 1) + column.flag for column in self.columns)

    def replace_missing_markers(self, x: Tensor) -> Tensor:
        """Replace numbers that represent missing values in raw columns ``[N, p]`` by NaN."""
        marks = torch.tensor(markers_of(self.missing).numbers, dtype=x.dtype)
        numbers = torch.tensor([not column.levels for column in self.columns])
        return torch.where(torch.isin(x, marks) & numbers, torch.nan, x) if len(marks) else x

    def __call__(self, x: Tensor, owner: Tensor, train: Tensor) -> Tensor:
        """Return features [N, q] (float32), fitted as described in `Prepare`."""
        return self.encode(x, owner, self.fit(x, owner, train))

    def fit(self, x: Tensor, owner: Tensor, train: Tensor) -> Tensor:
        """Fit the conversion to each client's training set. The arguments are the same as for `Prepare`.

        Returns:
            Fitted values [n, p, 5] (float64): the value for missing cells, the number to subtract, the divisor, and the
            1st and 99th percentiles of the observed values. They are NaN for a column with too few observed values.

        Raises:
            DataError: the number of columns in the samples differs from the number of columns in the table.
        """
        self._check(x)
        fitted = [
            torch.stack([self._fit(c, x[rows, j], train[rows]) for j, c in enumerate(self.columns)])
            for rows in _rows_by_client(owner)
        ]
        return (
            torch.stack(fitted) if fitted else torch.zeros(0, len(self.columns), VALUES_PER_COLUMN, dtype=torch.float64)
        )

    def encode(self, x: Tensor, owner: Tensor, fitted: Tensor) -> Tensor:
        """Return features [N, q] (float32) of samples x [N, p], given ``fitted [n, p, .]`` and clients ``owner [N]``.

        The features are NaN where the owner is -1.

        Raises:
            DataError: the number of columns in the samples differs from the number of columns in the table.
        """
        self._check(x)
        out = torch.full((len(x), self.width), torch.nan, dtype=torch.float32)
        for rows, statistics in zip(_rows_by_client(owner), fitted, strict=True):
            out[rows] = self.encoder(statistics)(x[rows])
        return out

    def encoder(self, fitted: Tensor) -> Encoder:
        """Return the conversion for the rows of one client, given its fitted values ``[p, .]``."""
        return Encoder(self.columns, fitted)

    def typical(self, fitted: Tensor) -> Tensor:
        """Return typical values ``[p, .]`` for a client without a training set, from other clients' ``[n, p, .]``.

        For a numeric column, these are the medians over the clients that observed it, and the widest bounds. For a
        column of codes, this is the level that clients most often use to fill missing cells.
        """
        middle = torch.stack([column.nanquantile(0.5, dim=0) for column in fitted.unbind(1)])
        for k, column in enumerate(self.columns):
            measured = fitted[:, k][~fitted[:, k, 0].isnan()]
            if column.levels and len(measured):
                middle[k, :3] = torch.tensor([float(torch.bincount(measured[:, 0].long()).argmax()), 0.0, 1.0])
            elif len(measured) and fitted.shape[2] == VALUES_PER_COLUMN:
                middle[k, 3:] = torch.stack([measured[:, 3].amin(), measured[:, 4].amax()])
        return middle

    def note_outliers(self, x: Tensor, fitted: Tensor) -> list[str]:
        """Return notes on raw columns ``[N, p]`` with numbers far from the training data, given ``fitted [p, .]``.

        A number is far outside the bounds if it exceeds the training bounds by more than a standard deviation or, in a
        column with an agreed range, if it is outside this range. A column is reported if at least the fraction
        `NOTED_ROW_SHARE` of its rows is far outside the bounds, or if a single number exceeds the bounds by
        `MAX_RANGE_WIDTHS` times the distance between them.
        """
        sentences = []
        for k, column in enumerate(self.columns):
            values = x[:, k][~x[:, k].isnan()]
            bounds = self._bounds(column, fitted[k])
            if column.levels or bounds is None or not len(values):
                continue
            low, high = bounds
            share, reach = float(((values < low) | (values > high)).double().mean()), MAX_RANGE_WIDTHS * (high - low)
            extreme = values[(values < low - reach) | (values > high + reach)]
            if share < NOTED_ROW_SHARE and column.range is None and len(extreme):
                sentences.append(
                    f"column {column.name!r}: {len(extreme)} of {len(values)} numbers are far outside "
                    f"{low:.4g} to {high:.4g}, the range of the training data, for example "
                    f"{float(extreme[0]):.4g}. Predictions for these rows are uncertain"
                )
            if share >= NOTED_ROW_SHARE:
                unit = f" {column.unit}" if column.unit else ""
                origin = "the agreed range" if column.range is not None else "the range of the training data"
                sentences.append(
                    f"column {column.name!r}: {share:.0%} of the rows are outside {low:.4g} to "
                    f"{high:.4g}{unit}, {origin} (median here {float(values.median()):.4g}). Check "
                    "whether the numbers have a different unit or mark missing cells"
                )
        return sentences

    def find_far(self, x: Tensor, fitted: Tensor) -> list[str]:
        """Return the raw columns ``[N, p]`` whose numbers are mostly outside the training range.

        Such columns are in a different unit, or describe a different population. The bounds and ``fitted`` are the same
        as in `note_outliers`.
        """
        far = []
        for k, column in enumerate(self.columns):
            values, bounds = x[:, k][~x[:, k].isnan()], self._bounds(column, fitted[k])
            if not column.levels and bounds is not None and len(values):
                outside = (values < bounds[0]) | (values > bounds[1])
                far += [column.name] * (float(outside.double().mean()) > FAR_ROW_SHARE)
        return far

    @staticmethod
    def _bounds(column: TableColumn, fitted: Tensor) -> tuple[float, float] | None:
        """Return the expected range of a column's numbers, or None if it is unknown."""
        if column.range is not None:
            return column.range
        if len(fitted) < VALUES_PER_COLUMN or bool(fitted.isnan().any()):
            return None
        _, _, scale, low, high = fitted.tolist()
        margin = scale if column.scale else (high - low) / 2
        if column.scale and low == high and scale != 1:  # few rows differ, for example because a disease is rare
            margin *= MAX_RARE_DEVIATIONS
        return low - margin, high + margin

    def _check(self, x: Tensor) -> None:
        if x.ndim != 2 or x.shape[1] != len(self.columns):
            raise DataError(f"the table has {len(self.columns)} columns, but samples have shape {tuple(x.shape[1:])}")

    def _fit(self, column: TableColumn, values: Tensor, train: Tensor) -> Tensor:
        missing = values.isnan()
        observed = values[train & ~missing]
        if len(observed) < self.min_observed:
            return torch.full((VALUES_PER_COLUMN,), torch.nan, dtype=torch.float64)
        if column.levels:
            common = torch.bincount(observed.long(), minlength=column.levels).argmax()
            return torch.tensor([float(common), 0.0, 1.0, 0.0, column.levels - 1.0], dtype=torch.float64)
        fill, edge = observed.median(), math.ceil(len(observed) / 100)
        bounds = [float(observed.kthvalue(place).values) for place in (edge, len(observed) + 1 - edge)]
        full = torch.where(missing, fill, values)
        centre, std = 0.0, 1.0
        if column.scale:
            centre, std = float(full[train].mean()), float(full[train].std(correction=0))
        return torch.tensor([float(fill), centre, std if std > 0 else 1.0, *bounds], dtype=torch.float64)


class FittedTable(NamedTuple):
    """Table with the values that were fitted for each client ``[n, p, 5]`` (see `Table.fit`).

    Attributes:
        table: table that describes the columns.
        values: fitted values.
        raw: raw columns [N, p], which are needed by analyses of individual rows.
    """

    table: Table
    values: Tensor
    raw: Tensor


class Encoder(nn.Module):
    """Conversion of one client's raw columns to features, implemented as a module that can be exported as a graph.

    Args:
        columns: columns of the table.
        fitted: fitted values of the columns ``[p, .]`` (see `Table.fit`).
    """

    def __init__(self, columns: tuple[TableColumn, ...], fitted: Tensor) -> None:
        super().__init__()
        fitted = fitted[:, :3].double()
        complete = ~fitted.isnan().any(1)
        self.complete: Tensor
        self.fitted: Tensor
        self.order: Tensor
        self.register_buffer("complete", complete)
        self.register_buffer(
            "fitted", torch.where(complete[:, None], fitted, torch.tensor([0.0, 0.0, 1.0])).T.contiguous()
        )
        self.numbers = [k for k, c in enumerate(columns) if not c.levels]
        self.codes = [(k, c.levels) for k, c in enumerate(columns) if c.levels]
        self.flags = [k for k, c in enumerate(columns) if c.flag]
        blocks = [*self.numbers, *(k for k, levels in self.codes for _ in range(levels)), *self.flags]
        self.register_buffer("order", torch.argsort(torch.tensor(blocks), stable=True))

    def forward(self, samples: Tensor) -> Tensor:
        """Return features ``[b, q]`` (float32) for raw columns ``[b, p]``, in the order of the table's columns."""
        missing, (fill, centre, scale) = samples.isnan(), self.fitted.unbind(0)
        full = torch.where(missing, fill, samples.double())
        scaled = torch.where(self.complete, (full - centre) / scale, 0.0)
        blocks = [scaled[:, self.numbers]] if self.numbers else []
        for k, levels in self.codes:
            hot = full[:, k : k + 1] == torch.arange(levels, dtype=full.dtype, device=full.device)
            blocks.append((hot & self.complete[k]).to(full.dtype))
        if self.flags:
            blocks.append(missing[:, self.flags].to(full.dtype))
        return torch.cat(blocks, 1)[:, self.order].float()


def _rows_by_client(owner: Tensor) -> list[Tensor]:
    """Return the rows of each client in their original order."""
    order = torch.argsort(owner, stable=True)
    return list(order.split(torch.bincount(owner + 1).tolist()))[1:]
