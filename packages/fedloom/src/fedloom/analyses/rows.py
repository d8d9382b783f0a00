"""A client's rows as analyses use them, and the schema that all clients share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fedloom.data.dataset import Dataset, Task
from fedloom.data.federation import DATA_PARTS, Federation
from fedloom.data.groups import get_subjects
from fedloom.data.tables import Table, TableColumn

Range = tuple[float, float]


@dataclass(frozen=True)
class Schema:
    """Columns, levels and ranges that all clients have agreed on.

    Args:
        name: name of the data set.
        task: kind of targets.
        columns: columns of `ClientRows.x` in order, with their names, the levels of codes, units and agreed-upon
            ranges.
        classes: names of the classes. Empty if the targets are numbers.
        outputs: number of outputs that a model for the task has.
        target_ranges: agreed-upon range for each number in a target. An entry is None if no range has been agreed on.
        levels: names of the codes of each kept column.
        is_table: True if samples are rows of a table.
        columns_are_inputs: True if the columns are the inputs of models, so that a linear model can be fitted to them.
    """

    name: str
    task: Task
    columns: tuple[TableColumn, ...]
    classes: tuple[str, ...] = ()
    outputs: int = 1
    target_ranges: tuple[Range | None, ...] = (None,)
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    is_table: bool = True
    columns_are_inputs: bool = False

    def place(self, column: str) -> int | None:
        """Return the index of a column, or None if there is no column with this name."""
        names = [c.name for c in self.columns]
        return names.index(column) if column in names else None


@dataclass(frozen=True, eq=False)
class ClientRows:
    """Rows of a single client.

    Args:
        x: raw columns ``[N, p]`` float64 in the order of the schema, which contain numbers or codes of levels. Missing
            cells are NaN. If samples are not rows of a table, x contains their features.
        y: targets ``[N, k]`` float64, each a class number, numbers in the target's unit, or a time and an event.
        part: data part of each row, ``[N]`` int64, as an index into `DATA_PARTS` (train, validation, test).
        subjects: number of the person or thing that each row describes, ``[N]`` int64.
        columns: codes of each column that the schema keeps, ``[N]`` int64.
        fetch: function that returns the inputs ``[b, *shape]`` for rows ``[b]`` in the representation that models use.
        place: index of the client in ``AnalysisTerms.sizes``.
        models: a run's models by kind ("global", "personal", "hybrid"). Each model is a function of inputs. Empty if
            there is no run.
    """

    x: Tensor
    y: Tensor
    part: Tensor
    subjects: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    fetch: Callable[[Tensor], Tensor] | None = None
    place: int = 0
    models: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict[str, Callable[[Tensor], Tensor]])

    def __len__(self) -> int:
        return len(self.x)

    @cached_property
    def inputs(self) -> Tensor:
        """Inputs of all rows ``[N, *shape]`` in the representation that models use."""
        rows = torch.arange(len(self))
        return self.x if self.fetch is None else self.fetch(rows)

    def select(self, rows: Tensor) -> ClientRows:
        """Return the client with a subset of its rows, selected by positions ``[m]`` or flags ``[N]``."""
        at = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
        fetch = self.fetch
        return replace(
            self,
            x=self.x[at],
            y=self.y[at],
            part=self.part[at],
            subjects=self.subjects[at],
            columns={name: codes[at] for name, codes in self.columns.items()},
            fetch=None if fetch is None else lambda some: fetch(at[some]),
        )

    @property
    def count(self) -> int:
        """Number of subjects."""
        return len(self.subjects.unique())


def make_schema(data: Dataset) -> Schema:
    """Return the schema of a data set, either raw or prepared by a federation."""
    table = _declared_table(data)
    width = data.x[0].numel() if len(data) else 0
    columns = Table.numeric(max(width, 1)).columns if table is None else table.columns
    targets = 1 if data.y.ndim == 1 else data.y.shape[1]
    is_table = table is not None or (data.x.ndim == 2 and not data.vocabulary)
    ranges = (None,) * targets
    levels = dict(data.levels)
    return Schema(data.name, data.task, columns, data.classes, data.outputs, ranges, levels, is_table)


def client_rows(
    fed: Federation, client: int, models: Mapping[str, Callable[[Tensor], Tensor]] | None = None
) -> ClientRows:
    """Return a client's rows in a federation, from all data parts.

    Args:
        fed: federation that contains the client.
        client: number of the client.
        models: a run's models by kind.
    """
    index = [fed.indices(part, client).cpu() for part in DATA_PARTS]
    rows = torch.cat(index)
    part = torch.arange(len(DATA_PARTS)).repeat_interleave(torch.tensor([len(some) for some in index]))

    # common test rows belong to no client and no part
    def fetch(some: Tensor) -> Tensor:
        return fed.fetch(rows[some].to(fed.device))

    return _make_client_rows(fed.data, rows, part, fetch, client, models or {})


def dataset_rows(data: Dataset) -> dict[str, ClientRows]:
    """Return each user's rows in a data set, keyed by name.

    If there are no users, all rows belong to one client.
    """
    owner = torch.zeros(len(data), dtype=torch.long) if data.users is None else data.users
    names = ("all",) if data.users is None else data.user_names
    places = {name: (owner == k).nonzero().flatten() for k, name in enumerate(names)}
    train = {name: torch.zeros(len(rows), dtype=torch.long) for name, rows in places.items()}
    return {
        name: _make_client_rows(data, rows, train[name], None, k, {}) for k, (name, rows) in enumerate(places.items())
    }


def fill_ranges(schema: Schema, clients: Mapping[str, ClientRows]) -> tuple[Schema, list[str]]:
    """Return the schema with pooled ranges in place of missing agreed-upon ranges, and the names of these ranges.

    Pooled ranges are intended only for simulations. Real sites must agree on ranges, because pooled ranges reveal
    individual rows' values.
    """
    x, y = (torch.cat([getattr(client, name) for client in clients.values()]) for name in ("x", "y"))
    columns, unagreed = list[TableColumn](), list[str]()
    for k, column in enumerate(schema.columns):
        if not column.levels and column.range is None and (pair := _column_range(x[:, k])) is not None:
            columns.append(column.with_(range=pair))
            unagreed.append(column.name)
        else:
            columns.append(column)
    ranges = [pair or _column_range(y[:, k]) for k, pair in enumerate(schema.target_ranges)]
    return replace(schema, columns=tuple(columns), target_ranges=tuple(ranges)), unagreed


def _column_range(values: Tensor) -> Range | None:
    finite = values[values.isfinite()]
    return (float(finite.min()), float(finite.max())) if len(finite) else None


def _declared_table(data: Dataset) -> Table | None:
    table = data.prepare if data.fitted is None else data.fitted.table
    return table if isinstance(table, Table) else None


def _make_client_rows(
    data: Dataset,
    rows: Tensor,
    part: Tensor,
    fetch: Callable[[Tensor], Tensor] | None,
    place: int,
    models: Mapping[str, Callable[[Tensor], Tensor]],
) -> ClientRows:
    raw = data.x if data.fitted is None else data.fitted.raw
    table = _declared_table(data)
    x = raw[rows.to(raw.device)].cpu().double().flatten(1) if raw.ndim > 1 else raw[rows][:, None].double()
    if table is not None:
        x = table.replace_missing_markers(x)
    y = data.y.cpu()[rows].double()
    y = y[:, None] if y.ndim == 1 else y
    if not data.classed:
        y = y * data.unit + data.centre if data.task == "regression" else y
    columns = {name: codes.cpu()[rows] for name, codes in data.columns.items()}
    units = get_subjects(data)
    subjects = torch.arange(len(rows)) if units is None else units[rows]
    return ClientRows(x, y, part, subjects, columns, fetch, place, models)
