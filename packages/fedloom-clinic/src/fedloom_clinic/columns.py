"""Columns of a regression: numbers, and every level of a code but the first."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedloom.analyses import AnalysisTerms, ClientRows, Schema
from fedloom.data.site_rows import column_names, numbers_of
from fedloom.data.tables import Table
from fedloom.errors import ConfigError, Refused

Floats = NDArray[np.float64]
MAX_ROW_SHARE = 0.5
"""Largest share of one row in the weights of a client's rows, where rules protect rows."""
NARROWEST_RANGE = 1e-9
"""Width of a range at least, so that a column that is the same everywhere can be divided by it."""


class DesignColumns(NamedTuple):
    """Complete rows of one client within the agreed ranges.

    Attributes:
        x: columns of the regression ``[N, p]``.
        y: targets ``[N, k]``.
        left_out: further rows, with a missing cell or a number beyond the agreed range.
        rows: places of these rows ``[N]`` among those of the client.
    """

    x: Floats
    y: Floats
    left_out: int
    rows: Tensor


def require_columns(schema: Schema, what: str) -> None:
    """Refuse data that are no rows of a table with a column beside the target.

    Raises:
        Refused: they are none.
        ConfigError: no column is left.
    """
    if not schema.is_table:
        raise Refused(f"{what} is of the columns of a table, and {schema.name} is none; leave it out")
    if not names_of(schema):
        raise ConfigError(f"{what}: {schema.name} has no column left beside the target")


def names_of(schema: Schema) -> list[str]:
    """Return the names of the columns of a regression."""
    return column_names(Table(columns=schema.columns)) if schema.columns else []


def ranges_of(schema: Schema) -> tuple[Floats, Floats]:
    """Return the smallest and the largest agreed value ``[p]`` of every column of a regression."""
    pairs = [
        pair
        for column in schema.columns
        for pair in ([(0.0, 1.0)] * (column.levels - 1) if column.levels else [column.range or (0.0, 1.0)])
    ]
    low, high = np.array([low for low, _ in pairs]), np.array([high for _, high in pairs])
    return low, np.maximum(high, low + NARROWEST_RANGE)


def design_of(client: ClientRows, terms: AnalysisTerms) -> DesignColumns:
    """Return the rows of a client that a regression uses."""
    whole = ~client.x.isnan().any(1)
    x, y = numbers_of(Table(columns=terms.schema.columns), client.x[whole]).numpy(), client.y[whole].numpy()
    low, high = ranges_of(terms.schema)
    inside = ((x >= low) & (x <= high)).all(1)
    for target, pair in zip(y.T, terms.schema.target_ranges, strict=True):
        if pair is not None:
            inside &= (target >= pair[0]) & (target <= pair[1])
    rows = whole.nonzero().flatten()[torch.from_numpy(inside)]
    return DesignColumns(x[inside], y[inside], len(client) - int(inside.sum()), rows)


def outweighs(*weights: Floats) -> bool:
    """Return whether one of several rows has more than half of some weights ``[N]``: sums are mostly this row's then.

    A number that is not finite counts as such a row.
    """
    for some in weights:
        total = float(some.sum())
        if len(some) > 1 and not float(some.max(initial=0.0)) <= MAX_ROW_SHARE * total and total > 0:
            return True
        if not np.isfinite(total):
            return True
    return False


def triangle(matrices: Floats) -> Floats:
    """Return the upper triangles of symmetric matrices ``[..., p, p]``: ``[..., p (p + 1) / 2]``."""
    rows, columns = np.triu_indices(matrices.shape[-1])
    halves: Floats = matrices[..., rows, columns]
    return halves


def square(halves: Floats, size: int) -> Floats:
    """Return the symmetric matrices ``[..., p, p]`` of upper triangles."""
    rows, columns = np.triu_indices(size)
    matrices = np.zeros((*halves.shape[:-1], size, size))
    matrices[..., rows, columns] = matrices[..., columns, rows] = halves
    return matrices


def tensor(*parts: ArrayLike) -> Tensor:
    """Return numbers one after the other, float64 ``[k]``."""
    return torch.from_numpy(np.concatenate([np.ravel(np.asarray(part, float)) for part in parts]))
