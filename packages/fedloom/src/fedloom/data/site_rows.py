"""Numeric rows of a table, grouped by site, for regressions that are computed from sums."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.data.dataset import Dataset
from fedloom.data.groups import describe_repeated_subjects, get_subjects
from fedloom.data.sources import Source
from fedloom.data.sources.table.reading import TableSource
from fedloom.data.tables import Table
from fedloom.errors import ConfigError, DataError

Floats = NDArray[np.float64]


class SiteRows(NamedTuple):
    """Rows of a table without missing cells.

    Attributes:
        sites: columns ``[N, p]`` and targets ``[N, k]`` of each site.
        columns: names of the columns. A text column becomes one column for each of its levels except the first.
        names: names of the sites.
        data: data set that contains the rows.
        notes: notes on rows that are omitted.
        test: columns and targets of each site's test rows, which are not part of `sites`. If no test rows are marked,
            it is empty.
    """

    sites: list[tuple[Floats, Floats]]
    columns: list[str]
    names: list[str]
    data: Dataset
    notes: list[str]
    test: list[tuple[Floats, Floats]]


def rows_by_site(
    source: Source, data_dir: Path | str | None = None, test: tuple[str, str] | None = None, **changes: object
) -> SiteRows:
    """Return the rows of a table without missing cells, grouped by site.

    Args:
        source: table, with the name of the column that contains the client of each row.
        data_dir: folder of data sets.
        test: column that marks test rows, and the value in it that does so. The regression does not use this column.
        changes: options of the source to change.

    Raises:
        ConfigError: the source is not a table, or has no column besides the target.
        DataError: a cell is not a number, or every row has a missing cell.
    """
    if not isinstance(source, TableSource):
        raise ConfigError("a regression computed from sums needs a table (CSV or Parquet) in [data]")
    if source.agreement is not None:
        raise ConfigError(
            "a regression reads its columns from [data] itself. Set `categorical` and `drop` there, "
            "and do not pass an agreement"
        )
    source = source.with_(impute=True, unlabelled="drop", **changes)
    if test is not None:
        source = source.with_(group_columns=(*source.group_columns, test[0]), drop=(*source.drop, test[0]))
    data = source.read(data_dir)
    assert isinstance(data.prepare, Table)
    whole = ~data.x.isnan().any(1)
    if not bool(whole.any()):
        raise DataError(f"{data.name}: every row contains a missing cell. Drop the columns that are mostly missing")
    columns = column_names(data.prepare)
    if not columns:
        raise ConfigError(f"{data.name}: the target is the only remaining column, so there are no features")
    x, y = extract_columns(data.prepare, data.x), data.y.reshape(len(data), -1).double()
    owner = torch.zeros(len(data), dtype=torch.long) if data.users is None else data.users
    held_out = torch.zeros(len(data), dtype=torch.bool) if test is None else _rows_with(data, *test)
    fitted = whole & ~held_out
    here = {int(k): rows for k in owner.unique() if bool((rows := fitted & (owner == k)).any())}
    names = [data.user_names[k] if data.users is not None else "all" for k in here]
    lost = int((~whole).sum())
    units = get_subjects(data)
    repeats = [] if units is None else describe_repeated_subjects(int(fitted.sum()), len(units[fitted].unique()))
    notes = [f"{lost} of {len(data)} rows have a missing cell and are omitted"] if lost else []
    sites = [(x[rows].numpy(), y[rows].numpy()) for rows in here.values()]
    tested = [whole & held_out & (owner == k) for k in here] if test is not None else []
    test_sites = [(x[rows].numpy(), y[rows].numpy()) for rows in tested]
    return SiteRows(sites, columns, names, data, [*data.notes, *notes, *repeats], test_sites)


def _rows_with(data: Dataset, column: str, value: str) -> Tensor:
    """Return a mask ``[N]`` of the rows that have a given value in a column.

    Raises:
        ConfigError: none or all of the rows have this value.
    """
    levels = data.levels[column]
    if value not in levels or len(levels) == 1:
        shown = ", ".join(map(repr, levels[:10]))
        raise ConfigError(
            f"{data.name}: column {column!r} must contain {value!r} in some rows and other values in "
            f"other rows. It has {shown}"
        )
    return data.columns[column] == levels.index(value)


def column_names(table: Table) -> list[str]:
    """Return the columns of a regression, where a text column yields one column per level except the first."""
    return [
        name
        for column in table.columns
        for name in ([f"{column.name} {level}" for level in column.names[1:]] if column.levels else [column.name])
    ]


def extract_columns(table: Table, x: Tensor) -> Tensor:
    """Return the values ``[N, p]`` of a regression's columns.

    If the level of a text column is missing, the row is treated as if it had the first level.
    """
    blocks = [
        block
        for column, values in zip(table.columns, x.double().T, strict=True)
        for block in ([(values == k).double() for k in range(1, column.levels)] if column.levels else [values])
    ]
    return torch.stack(blocks, 1) if blocks else torch.zeros(len(x), 0, dtype=torch.float64)


def survival_rows(
    source: Source,
    time: str | None = None,
    event: str | None = None,
    data_dir: Path | str | None = None,
    test: tuple[str, str] | None = None,
) -> SiteRows:
    """Return `rows_by_site` with nonnegative times and events as targets.

    Args:
        source: table, as in `rows_by_site`. Its target is not used as a column of the regression.
        time: name of the column that contains the times. If None, the target of the source is used.
        event: column that contains 1 for an event and 0 for no event. If None, the source's event column is used.
        data_dir: folder of data sets.
        test: column and value that mark test rows, as in `rows_by_site`.

    Raises:
        ConfigError: `rows_by_site` rejects the source, or it is unknown which columns contain times and events.
        DataError: `rows_by_site` rejects the data.
    """
    target, named, drop = (getattr(source, key, None) for key in ("target", "event", "drop"))
    time, event = target if time is None else time, named if event is None else event
    if time is None or event is None:
        raise ConfigError(
            "the columns of the time and the event are unknown. Give both columns here, or set "
            "`target` and `event` in [data]"
        )
    unused = {*(drop or ()), *(column for column in (target, named) if column is not None)} - {time, event}
    return rows_by_site(
        source, data_dir, test, target=time, event=event, task="survival", drop=tuple(unused), centre=0.0, unit=1.0
    )
