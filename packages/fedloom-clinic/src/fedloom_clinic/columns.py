"""Columns of a regression: numeric columns, and an indicator for every level of a coded column except the first."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from fedloom.analyses import AnalysisTerms, ClientRows, Schema
from fedloom.data.site_rows import column_names, extract_columns
from fedloom.data.tables import Table
from fedloom.errors import ConfigError, Refused
from fedloom_clinic.cells import forbids_small_cells

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
MAX_ROW_SHARE = 0.5
"""Maximum share of a single row in the total weight of a client's rows, if the rules protect rows."""
NARROWEST_RANGE = 1e-9
"""Minimum width of a range, so that even a constant column can be divided by it."""


class DesignColumns(NamedTuple):
    """A client's rows that are complete and within the agreed-upon ranges.

    Attributes:
        x: columns of the regression, ``[N, p]``.
        y: targets, ``[N, k]``.
        left_out: number of rows excluded because of a missing cell or a number outside its range.
        rows: positions of the used rows among all of the client's rows, ``[N]``.
    """

    x: Floats
    y: Floats
    left_out: int
    rows: Tensor


class LinearPredictor(nn.Module):
    """Linear model of outputs ``[b, c]`` for inputs ``[b, *shape]``: numbers in the target's unit, or class scores."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs in the same dtype as the inputs."""
        return inputs.flatten(1) @ self.weight.to(inputs).T + self.bias.to(inputs)


def linear_model(
    terms: AnalysisTerms, beta: Floats, intercept: float = 0.0, *, flagged: bool = True
) -> LinearPredictor | None:
    """Return the model with a regression's coefficients ``[p]``, or None if the columns are not the inputs of models.

    Omitted columns have weight 0.
    """
    if not terms.schema.columns_are_inputs:
        return None
    kept = torch.from_numpy(select_columns(terms, flagged=flagged))
    weight = torch.zeros(1, len(kept), dtype=torch.float64)
    weight[:, kept] = torch.from_numpy(beta)
    return LinearPredictor(weight, torch.tensor([intercept], dtype=torch.float64))


def require_columns(schema: Schema, what: str) -> None:
    """Raise an error if the data are not rows of a table with at least one column besides the target.

    Raises:
        ConfigError: the data are not rows of a table, or the table has no column besides the target.
    """
    if not list_column_names(schema):
        raise ConfigError(
            f"{what}: {schema.name} has no column except the target",
            rule="analysis-no-column",
            fix="keep at least one column: list fewer columns in {data.drop}",
        )


def missing_target_range_error(name: str) -> ConfigError:
    """Return the error for an analysis without an agreed-upon range for the target."""
    return ConfigError(
        f"the analysis {name} requires a range for the target, but the agreement does not contain one",
        rule="analysis-target-range",
        fix="set target_range = [LOWEST, HIGHEST] in the agreement",
    )


def list_column_names(schema: Schema) -> list[str]:
    """Return the names of all of a regression's columns."""
    return column_names(Table(columns=schema.columns)) if schema.columns else []


def flag_columns(client: ClientRows, terms: AnalysisTerms) -> Tensor:
    """Return a mask ``[p]`` of the columns where enough subjects have a value other than the most frequent one.

    In a column with two values, each value must occur in enough subjects, so a level that few subjects have does not
    get its own column. These flags are the last numbers that a client publishes for an analysis.
    """
    design = design_of(client, terms, flagged=False)
    return torch.from_numpy(varying_columns(design.x, client.subjects[design.rows].numpy(), terms.rules.min_subjects))


def varying_columns(x: Floats, subjects: NDArray[np.int64], least: int) -> Floats:
    """Return flags ``[p]`` of the columns ``x [N, p]`` (see `flag_columns`)."""
    flags = np.zeros(x.shape[1])
    for k, values in enumerate(x.T):
        several, counts = np.unique(values, return_counts=True)
        if len(several):
            common = values == several[counts.argmax()]
            sides = [~common, common] if len(several) == 2 else [~common]
            flags[k] = float(min(len(np.unique(subjects[side])) for side in sides) >= least)
    return flags


def select_columns(terms: AnalysisTerms, *, flagged: bool = True) -> Mask:
    """Return a mask ``[p]`` of the columns that enough clients flagged.

    All other columns are omitted. This merges an omitted level into the first level.

    Args:
        terms: terms of the analysis, including the numbers that each client published. The flags of the columns come
            last.
        flagged: True if clients publish flags.
    """
    p = len(list_column_names(terms.schema))
    if not (flagged and forbids_small_cells(terms.rules) and terms.published and p):
        return np.ones(p, bool)
    support = torch.stack([flags[-p:] for flags in terms.published]).sum(0).numpy()
    alone = terms.rules.min_clients == 1  # no sum hides a client then, so every client must reach the minimum count
    needed = int((terms.sizes > 0).sum()) if alone else terms.rules.min_clients + terms.rules.missing
    kept: Mask = support >= needed
    if not kept.any():
        raise Refused(
            f"no column has {terms.rules.min_subjects} subjects with a rare value at {needed} clients or more. Agree "
            f"on a smaller minimum count"
        )
    return kept


def columns_of(terms: AnalysisTerms, *, flagged: bool = True) -> list[str]:
    """Return the names of the used columns."""
    kept = select_columns(terms, flagged=flagged)
    return [name for name, one in zip(list_column_names(terms.schema), kept, strict=True) if one]


def list_omitted_columns(terms: AnalysisTerms) -> str:
    """Return the names of the columns that too few clients flagged, separated by commas."""
    kept = select_columns(terms)
    return ", ".join(name for name, one in zip(list_column_names(terms.schema), kept, strict=True) if not one)


def get_ranges(terms: AnalysisTerms, *, flagged: bool = True) -> tuple[Floats, Floats]:
    """Return the lower and upper limit of each used column's agreed-upon range, ``[p]``."""
    kept = select_columns(terms, flagged=flagged)
    low, high = _all_ranges(terms.schema)
    return low[kept], high[kept]


def _all_ranges(schema: Schema) -> tuple[Floats, Floats]:
    pairs = [
        pair
        for column in schema.columns
        for pair in ([(0.0, 1.0)] * (column.levels - 1) if column.levels else [column.range or (0.0, 1.0)])
    ]
    low, high = np.array([low for low, _ in pairs]), np.array([high for _, high in pairs])
    return low, np.maximum(high, low + NARROWEST_RANGE)


def design_of(client: ClientRows, terms: AnalysisTerms, *, flagged: bool = True) -> DesignColumns:
    """Return a client's rows in a regression, with the regression's columns."""
    whole = ~client.x.isnan().any(1)
    x, y = extract_columns(Table(columns=terms.schema.columns), client.x[whole]).numpy(), client.y[whole].numpy()
    low, high = _all_ranges(terms.schema)
    inside = ((x >= low) & (x <= high)).all(1)
    for target, pair in zip(y.T, terms.schema.target_ranges, strict=True):
        if pair is not None:
            inside &= (target >= pair[0]) & (target <= pair[1])
    rows = whole.nonzero().flatten()[torch.from_numpy(inside)]
    kept = select_columns(terms, flagged=flagged)
    return DesignColumns(x[inside][:, kept], y[inside], len(client) - int(inside.sum()), rows)


def has_dominant_row(*weights: Floats) -> bool:
    """Return True if one of several rows has more than half of their total weight ``[N]``.

    The sums would then mostly reveal this row. The result is also True if the total weight is not finite.
    """
    for some in weights:
        total = float(some.sum())
        if len(some) > 1 and not float(some.max(initial=0.0)) <= MAX_ROW_SHARE * total and total > 0:
            return True
        if not np.isfinite(total):
            return True
    return False


def upper_triangles(matrices: Floats) -> Floats:
    """Return the upper triangles ``[..., p (p + 1) / 2]`` of symmetric matrices ``[..., p, p]``."""
    rows, columns = np.triu_indices(matrices.shape[-1])
    halves: Floats = matrices[..., rows, columns]
    return halves


def symmetric_from_triangles(halves: Floats, size: int) -> Floats:
    """Return the symmetric matrices ``[..., p, p]`` with the given upper triangles."""
    rows, columns = np.triu_indices(size)
    matrices = np.zeros((*halves.shape[:-1], size, size))
    matrices[..., rows, columns] = matrices[..., columns, rows] = halves
    return matrices


def to_vector(*parts: ArrayLike) -> Tensor:
    """Concatenate the values of several arrays into a float64 vector ``[k]``."""
    return torch.from_numpy(np.concatenate([np.ravel(np.asarray(part, float)) for part in parts]))
