"""Traces, which are files that describe devices. Each row is checked when the trace is read."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import DataError

Column = NDArray[np.float64]

TRACE_COLUMNS = ("client", "speed", "up", "down")
TRACE_BOUNDS = {"speed": "at least 0", "up": "above 0", "down": "above 0", "latency": "at least 0"}


class DeviceRow(NamedTuple):
    """Device in a trace: speed, rates, latency, class, and intervals of availability.

    If there are no intervals, the device is always available.
    """

    speed: float
    up: float
    down: float
    latency: float
    name: str
    intervals: list[tuple[float, float]]


def read_trace(path: Path, period: float) -> dict[int, DeviceRow]:
    """Read the devices of a trace, keyed by client in ascending order.

    Args:
        path: Parquet or CSV file. A CSV file may be compressed with gzip.
        period: length of the period in seconds. All intervals must be within the period. An infinite period allows any
            interval.

    Raises:
        DataError: the file cannot be read, or a row is invalid. The message states the file, the row, the value and the
            required action.
    """
    columns, names = _read_columns(path)
    _check_rows(path, columns)
    order = np.lexsort((columns["start"], columns["client"]))
    _check_clients(path, order, columns, names)
    _check_intervals(path, order, columns, period)
    rows = dict[int, DeviceRow]()
    for k in order.tolist():
        client, start, end = int(columns["client"][k]), float(columns["start"][k]), float(columns["end"][k])
        if client not in rows:
            speed, up, down, latency = (float(columns[name][k]) for name in TRACE_BOUNDS)
            rows[client] = DeviceRow(speed, up, down, latency, names[k], [])
        if not math.isnan(start):
            rows[client].intervals.append((start, end))
    return rows


def _read_columns(path: Path) -> tuple[dict[str, Column], list[str]]:
    """Read the columns as numbers, with NaN for empty cells, and read the device class of each row."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        table = parquet.read_table(path) if path.suffix == ".parquet" else csv.read_csv(path)
    except FileNotFoundError:
        raise DataError(
            f"devices.file {path} does not exist (looked for at {path.absolute()}). Correct the path"
        ) from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"devices.file {path} cannot be read: {str(error).splitlines()[0]}") from None
    has = table.column_names
    if missing := [name for name in TRACE_COLUMNS if name not in has]:
        raise DataError(f"devices.file {path} lacks the columns {missing}. Its columns: {has}")
    if ("start" in has) != ("end" in has):
        raise DataError(
            f"devices.file {path} contains only one of the columns start and end. Add the other column, or remove both"
        )
    allowed = (*TRACE_COLUMNS, "latency", "start", "end", "class")
    if twice := [name for name, count in Counter(has).items() if count > 1 and name in allowed]:
        raise DataError(f"devices.file {path} contains the column {twice[0]} {has.count(twice[0])} times. Keep one")
    columns = {"latency": np.zeros(len(table)), **dict.fromkeys(("start", "end"), np.full(len(table), math.nan))}
    for name in allowed[:-1]:
        if name in has:
            columns[name] = _read_numbers(path, name, table[name])
    classes: list[Any] = table["class"].to_pylist() if "class" in has else [None] * len(table)
    return columns, [str(name or "all") for name in classes]


def _read_numbers(path: Path, name: str, column: Any) -> Column:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    try:
        numbers: Column = column.cast(pa.float64()).to_numpy()
    except pa.ArrowException:
        some = next((str(x) for x in column.to_pylist() if not isinstance(x, int | float | None)), "")
        raise DataError(f"devices.file {path}: column {name} must contain numbers, got {some[:40]!r}") from None
    return numbers


def _refuse(path: Path, row: int, sentence: str) -> None:
    raise DataError(f"devices.file {path}, row {row + 1}: {sentence}")


def _check_rows(path: Path, columns: dict[str, Column]) -> None:
    """Raise an error if a cell is invalid."""

    def first(bad: NDArray[np.bool_]) -> int | None:
        return int(bad.argmax()) if bad.any() else None

    client = columns["client"]
    if (k := first(~((client >= 0) & (client == np.floor(client)) & np.isfinite(client)))) is not None:
        _refuse(path, k, f"client must be a whole number of at least 0, got {_cell_text(client[k])}")
    for name, bound in TRACE_BOUNDS.items():
        column = columns[name]
        good = np.isfinite(column) & (column > 0 if bound == "above 0" else column >= 0)
        if (k := first(~good)) is not None:
            _refuse(path, k, f"{name} must be a number {bound}, got {_cell_text(column[k])}")
    starts, ends = columns["start"], columns["end"]
    if (k := first(np.isnan(starts) != np.isnan(ends))) is not None:
        _refuse(
            path,
            k,
            f"start and end must both be given or both be empty, got {_cell_text(starts[k])}, {_cell_text(ends[k])}",
        )


def _check_clients(path: Path, order: NDArray[np.int64], columns: dict[str, Column], names: list[str]) -> None:
    """Raise an error if the rows of a client do not describe intervals of the same device."""
    clients = columns["client"][order]
    for place in np.flatnonzero(clients[1:] == clients[:-1]).tolist():
        before, k = order[place : place + 2].tolist()
        client = int(clients[place])
        if math.isnan(columns["start"][before]) or math.isnan(columns["start"][k]):
            cure = "add an interval of presence to each row, or keep one row"
            _refuse(
                path,
                max(before, k),
                f"client {client} also has row {min(before, k) + 1}, but at least one of the two rows has "
                f"no start; {cure}",
            )
        one, other = ([*(columns[name][r] for name in TRACE_BOUNDS), names[r]] for r in (before, k))
        if one != other:
            what = [*TRACE_BOUNDS, "class"][next(j for j in range(5) if one[j] != other[j])]
            _refuse(
                path,
                k,
                f"client {client} has a different {what} than in row {before + 1}. All rows of a client "
                "must describe the same device",
            )


def _check_intervals(path: Path, order: NDArray[np.int64], columns: dict[str, Column], period: float) -> None:
    """Raise an error if intervals are empty, overlap or exceed the period."""
    previous = (-1, 0.0)
    for k in order[~np.isnan(columns["start"][order])].tolist():
        client, start, end = int(columns["client"][k]), float(columns["start"][k]), float(columns["end"][k])
        span = f"client {client} is present in [{start:g}, {end:g}) s"
        if not start < end:
            _refuse(path, k, f"{span}; end must be after start")
        if start < 0:
            _refuse(path, k, f"{span}. The start must be at least 0")
        if end > period:
            cure = f"within devices.period = {period:g}. Split an interval at its end into two rows"
            _refuse(path, k, f"{span}, which must be {cure}")
        if previous[0] == client and start < previous[1]:
            _refuse(
                path, k, f"{span}, but an earlier interval lasts until {previous[1]:g} s. Join intervals that overlap"
            )
        previous = client, end


def _cell_text(number: float) -> str:
    return "nothing" if math.isnan(number) else f"{number:g}"
