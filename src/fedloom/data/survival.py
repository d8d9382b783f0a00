"""A table as rows with times and events, site by site."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.sources import Source
from fedloom.data.sources.table_reading import TableSource
from fedloom.data.tables import Table
from fedloom.errors import ConfigError, DataError


class SurvivalTable(NamedTuple):
    """Rows with times and events.

    sites: of every site columns ``[N, p]``, times ``[N]`` and events ``[N]``; columns: their names; notes: sentences on
    rows that are left out.
    """

    sites: list[tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]]
    columns: list[str]
    notes: list[str]


def survival_table(
    source: Source, time: str | None = None, event: str | None = None, data_dir: Path | str | None = None
) -> SurvivalTable:
    """The rows of a table by site; every level of a text column but the first is a column.

    Args:
        source: says how the table is read and whose a row is; its label is no column.
        time: column of times above 0; None: the source's label.
        event: column with 1 for an event and 0 for none; None: the source's.
        data_dir: folder of data sets.

    Raises:
        ConfigError: the source is no table, or a column is not there or not named.
        DataError: a cell that is no number, or no complete row.
    """
    if not isinstance(source, TableSource):
        raise ConfigError("time to event needs a table (CSV or Parquet) in [data]")
    if source.agreement is not None:
        raise ConfigError("time to event reads its columns from [data] itself; give categorical and drop, no agreement")
    columns = [column for column in (source.label, source.event) if column]
    time, event = time or source.label, event or source.event
    if time is None or event is None:
        raise ConfigError("which columns are the time and the event? name them here, or label and event in [data]")
    read = source.with_(
        label=time, event=event, task="survival", impute=True, drop=tuple({*source.drop, *columns} - {time, event}),
        centre=0.0, unit=1.0, unlabelled="drop",
    )  # fmt: skip
    data = read.read(data_dir)
    assert isinstance(data.prepare, Table)
    places = {column.name: k for k, column in enumerate(data.prepare.columns)}
    whole = ~data.x.isnan().any(1)
    if not bool(whole.any()):
        raise DataError(f"{data.name}: every row has a missing cell; drop the columns that are mostly missing")
    blocks, names = [], []
    for column in data.prepare.columns:
        values = data.x[:, places[column.name]]
        if column.levels:
            blocks += [(values == k).double() for k in range(1, column.levels)]
            names += [f"{column.name} {level}" for level in column.names[1:]]
        else:
            blocks.append(values)
            names.append(column.name)
    if not blocks:
        raise ConfigError(f"{data.name}: no column is left beside {time!r} and {event!r}")
    x, (times, events) = torch.stack(blocks, 1), data.y.double().unbind(1)
    owner = torch.zeros(len(data), dtype=torch.long) if data.users is None else data.users
    rows = [here for k in owner.unique() if bool((here := whole & (owner == k)).any())]
    lost = int((~whole).sum())
    notes = [f"{lost} of {len(data)} rows have a missing cell and are left out"] if lost else []
    return SurvivalTable(
        [(x[here].numpy(), times[here].numpy(), events[here].numpy()) for here in rows], names, [*data.notes, *notes]
    )
