"""Reading of run directories. All files are checked, and only recorded values are used."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedloom.errors import RunDirError
from fedloom.lab.report.run import Key, Points, Run, RunPartition
from fedloom.metrics import declare, over_clients
from fedloom.rundir import (
    EXPERIMENT_TABLES,
    FEDERATION_CLIENT,
    MAX_CLIENTS,
    METRICS_FILE,
    PARTITION_FILE,
    REPAIR_HINT,
    SETTINGS_FILE,
    SUMMARY_FILE,
    TIMINGS_FILE,
    Summary,
    check_digest,
    read_summary,
)  # fmt: skip

_TEXT_COLUMNS, _INTEGER_COLUMNS = (
    ("method", "model", "part", "metric", "subgroup", "scaling", "column"),
    ("seed", "round", "client", "row"),
)
_COLUMN_TYPES = {
    **dict.fromkeys(_TEXT_COLUMNS, pa.string()),
    **dict.fromkeys((*_INTEGER_COLUMNS, "group", "tested"), pa.int64()),
    "name": pa.string(),
    "tests": pa.string(),
    "column": pa.string(),
    "ties": pa.string(),
    "attacks": pa.bool_(),
    "counts": pa.list_(pa.float64()),
}
_TEXT_CODE_TYPE = pa.dictionary(pa.int32(), pa.string())


def read_runs(run_dirs: Sequence[Path]) -> list[Run]:
    """Read run directories, and give each run a unique label.

    Raises:
        RunDirError: the list is empty, a directory is given twice, or a folder is not a readable run directory.
    """
    paths = [Path(path).resolve() for path in run_dirs]
    if not paths:
        raise RunDirError("a report needs at least one run directory, got none")
    for path in paths:
        if paths.count(path) > 1:
            raise RunDirError(f"run directory {path} is listed twice")
    names = [path.name for path in paths]
    labels = [path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}" for path in paths]
    return [_read_run(path, label) for path, label in zip(paths, labels, strict=True)]


def _read_run(path: Path, label: str) -> Run:
    if not path.is_dir():
        raise RunDirError(f"{path} is not a directory. Name the output directory of 'fedloom run'")
    if not (path / SETTINGS_FILE).is_file():
        raise RunDirError(
            f"{path} is not a run directory: it contains no experiment.toml. Name the output directory of 'fedloom run'"
        )
    if not (path / METRICS_FILE).is_file():
        raise RunDirError(
            f"{path} contains no metrics.parquet yet. Continue the run until its first method has a result"
        )
    settings = _read_settings_text(path / SETTINGS_FILE)
    _check_settings(path / SETTINGS_FILE, settings)
    table = read_table(path / METRICS_FILE, (*Key._fields, "round", "client", "value"), coded=True)
    series: dict[Key, Points] = {}
    totals: dict[Key, Points] = {}
    for key, points in _split_by_key(table).items():
        of_clients = points.client != FEDERATION_CLIENT
        for target, rows in ((series, of_clients), (totals, ~of_clients)):
            if rows.any():
                target[key] = points if rows.all() else points.select(rows)
    summary, seconds = _read_run_summary(path / SUMMARY_FILE), _read_round_seconds(path / TIMINGS_FILE)
    declare(summary.metrics)
    partitions, names = _read_partitions(path / PARTITION_FILE)
    most = max((int(points.client.max()) for points in series.values()), default=FEDERATION_CLIENT)
    if most >= (len(names) or MAX_CLIENTS):
        raise RunDirError(
            f"{path / METRICS_FILE}: client {most} is not one of the {len(names)} clients in partition.parquet"
        )
    if any(int(points.client.min()) < FEDERATION_CLIENT for points in series.values()):
        raise RunDirError(f"{path / METRICS_FILE}: a client number is negative")
    if any("attack" in method for method in tomllib.loads(settings).get("method", [])):
        totals |= _recompute_metrics(series, totals, partitions)
    return Run(path, label, settings, summary, partitions, names, series, totals, seconds)


def _recompute_metrics(
    series: dict[Key, Points], totals: dict[Key, Points], partitions: dict[int, RunPartition]
) -> dict[Key, Points]:
    """Recompute the metrics over clients, excluding every method's attackers.

    A run's own metrics exclude only its own attackers. If only one method is attacked, the other methods' metrics would
    otherwise still include the attacking clients.
    """
    recounted: dict[Key, Points] = {}
    for key, points in series.items():
        part = partitions.get(key.seed)
        if part is None or key.part == "common" or key._replace(metric=f"{key.metric}/mean") not in totals:
            continue
        sizes = {"train": part.sizes, "test": part.tested}.get(key.part)
        figures: dict[str, list[float]] = {}
        rounds, starts = np.unique(points.round, return_index=True)
        centres = totals.get(key._replace(model="global", part="common"))
        for round, start, end in zip(rounds, starts, [*starts[1:], len(points.round)], strict=True):
            clients, values = points.client[start:end], points.value[start:end].astype(np.float64)
            values = np.where(np.isin(clients, [*part.attackers]), np.nan, values)
            held = np.full(len(clients), np.nan) if sizes is None else sizes[clients].astype(np.float64)
            centre = None if centres is None else float(centres.value[centres.round == round].mean())
            for name, value in over_clients(key.metric, values, held, centre).items():
                figures.setdefault(name, []).append(value)
        for name, values_of in figures.items():
            if key._replace(metric=name) in totals:
                all_clients = np.full(len(rounds), FEDERATION_CLIENT)
                recounted[key._replace(metric=name)] = Points(rounds, all_clients, np.array(values_of))
    return recounted


def _read_settings_text(path: Path) -> str:
    try:
        content = path.read_bytes()
        check_digest(path, content)
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirError(f"{path} cannot be read: {error}") from error


def _check_settings(path: Path, settings: str) -> None:
    """Raise an error if a file does not have the structure of the settings that `fedloom run` writes."""
    try:
        document = tomllib.loads(settings)
    except RecursionError as error:
        raise RunDirError(f"{path} is damaged: it is nested too deeply") from error
    except ValueError as error:
        raise RunDirError(f"{path} is damaged: {error}") from error
    for name in (*EXPERIMENT_TABLES, "resolved"):
        if not isinstance(document.get(name, {}), dict):
            raise RunDirError(f"{path} is damaged: [{name}] must be a table")
    if not isinstance(document.get("resolved", {}).get("versions", {}), dict):
        raise RunDirError(f"{path} is damaged: [resolved] versions must be a table")
    methods = document.get("method", [])
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        raise RunDirError(f"{path} is damaged: [[method]] must be a list of tables")


def _read_run_summary(path: Path) -> Summary:
    """Read the summary of a run directory. While the first method is still running, the summary is empty."""
    try:
        return read_summary(path)
    except FileNotFoundError:
        return Summary()
    except OSError as error:
        raise RunDirError(f"{path} cannot be read: {error}") from error


def _read_round_seconds(path: Path) -> dict[tuple[str, int], Points]:
    if not path.exists():
        return {}
    table = read_table(path, ("method", "seed", "round", "seconds"))
    for name in ("model", "part", "metric"):
        table = table.append_column(name, pa.array([""] * len(table)))
    series = _split_by_key(table.append_column("client", table["seed"]).append_column("value", table["seconds"]))
    return {(key.method, key.seed): points for key, points in series.items()}


def _read_partitions(path: Path) -> tuple[dict[int, RunPartition], list[str]]:
    """Read the split for every seed, and the names of the clients.

    While the first method is still running, both results are empty.
    """
    import pyarrow.compute as pc  # slow to import

    if not path.exists():
        return {}, []
    needed = ("seed", "client", "name", "size", "group", "attacks", "counts")
    table = read_table(path, needed, optional=("tested", "tests"))
    seed, attacks = table["seed"].to_numpy(), table["attacks"].to_numpy()
    partitions, names = {}, []
    for value in dict.fromkeys(seed.tolist()):
        clients = rows_where(table, seed=value).sort_by("client")
        if clients["client"].to_pylist() != list(range(len(clients))):
            raise RunDirError(
                f"{path}: seed {value}: the clients must be numbered from 0 to {len(clients) - 1} without duplicates"
            )
        flat = clients["counts"].combine_chunks().flatten().to_numpy()
        if len(flat) % len(clients) or (pc.count_distinct(pc.list_value_length(clients["counts"])).as_py() or 1) > 1:
            raise RunDirError(f"{path}: column 'counts': every client needs one count per class")
        groups = clients["group"].to_numpy()
        hostile = frozenset(np.flatnonzero(attacks[seed == value]).tolist())
        partitions[int(value)] = RunPartition(
            flat.reshape(len(clients), -1), clients["size"].to_numpy(), groups, hostile,
            *((clients["tested"].to_numpy(), clients["tests"][0].as_py()) if "tests" in clients.column_names else ()),
        )  # fmt: skip
        names = clients["name"].to_pylist()
    return partitions, names


def read_table(path: Path, names: tuple[str, ...], *, coded: bool = False, optional: tuple[str, ...] = ()) -> pa.Table:
    """Read the named columns of a file, and convert each column to its standard type.

    If ``coded`` is true, text columns are read with dictionary encoding. ``optional`` names additional columns that
    earlier versions did not write. If any of them is missing, all of them are skipped.

    Raises:
        RunDirError: the file is damaged, or does not contain one of the required columns.
    """
    import pyarrow.compute as pc  # slow to import

    if path.exists() and not path.is_file():
        raise RunDirError(f"{path} is not a regular file. Remove it")
    try:
        check_digest(path, path.read_bytes())
        schema = pq.read_schema(path)
        stored = schema.names
        names += optional if {*optional} <= {*stored} else ()
        if twice := [name for name in names if stored.count(name) > 1]:
            raise RunDirError(f"{path} is damaged: two columns are named {twice[0]!r}")
        for name in names:
            if name in stored and pa.types.is_nested(schema.field(name).type) != (name == "counts"):
                raise RunDirError(
                    f"{path}: column {name!r} is {schema.field(name).type}. The file was not written by fedloom"
                )
        with pq.ParquetFile(path, read_dictionary=[n for n in stored if coded and n in _TEXT_COLUMNS]) as file:
            table = file.read(columns=[n for n in names if n in stored])
        table.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        raise RunDirError(f"{path} is damaged: {str(error).rstrip('.')}. {REPAIR_HINT}") from error
    missing = [name for name in names if name not in stored]
    if missing:
        raise RunDirError(f"{path} contains no column {missing[0]!r}. Its columns are {', '.join(stored)}")
    columns: dict[str, Any] = {}
    for name in names:
        kind = _TEXT_CODE_TYPE if coded and name in _TEXT_COLUMNS else _COLUMN_TYPES.get(name, pa.float64())
        try:
            columns[name] = table[name] if table[name].type == kind else pc.cast(table[name], kind)
        except pa.ArrowException as error:
            raise RunDirError(f"{path}: column {name!r} must be {kind}, got {table[name].type}") from error
        if name in _COLUMN_TYPES and columns[name].null_count:
            raise RunDirError(f"{path}: column {name!r} contains {columns[name].null_count} empty cells")
    return pa.table(columns)


def read_columns(path: Path, names: tuple[str, ...]) -> pa.Table | None:
    """Read the named columns of a file in a run directory.

    Return None if the file does not exist (see `read_table`).
    """
    return read_table(path, names) if path.exists() else None


def rows_where(table: pa.Table, **values: object) -> pa.Table:
    """Select the rows with the given values in the given columns."""
    import pyarrow.compute as pc  # slow to import

    for name, value in values.items():
        table = table.filter(pc.equal(table[name], value))
    return table


def _split_by_key(table: pa.Table) -> dict[Key, Points]:
    """Group the rows of a table by key. Each group is sorted by round and then by client."""
    if not len(table):
        return {}
    categories: dict[str, list[Any]] = {}
    code = np.zeros(len(table), dtype=np.int64)
    for name in Key._fields:
        coded = table[name].combine_chunks().dictionary_encode()
        categories[name] = coded.dictionary.to_pylist()
        code = code * len(categories[name]) + coded.indices.to_numpy()
    small = np.int16 if code.max() <= np.iinfo(np.int16).max else np.int64
    order = np.argsort(code.astype(small), kind="stable")  # NumPy sorts int16 by radix sort, in linear time
    code = code[order]
    ends = [*np.flatnonzero(np.diff(code)) + 1, len(code)]
    points = Points(*(table[name].to_numpy()[order] for name in ("round", "client", "value")))
    groups: dict[Key, Points] = {}
    for start, end in zip([0, *ends], ends, strict=False):
        number, parts = int(code[start]), []
        for name in reversed(Key._fields):
            number, place = divmod(number, len(categories[name]))
            parts.append(categories[name][place])
        series = points.select(slice(start, end))
        later = np.diff(series.round)
        if not ((later > 0) | ((later == 0) & (np.diff(series.client) >= 0))).all():
            series = series.select(np.lexsort((series.client, series.round)))
        groups[Key(*reversed(parts))] = series
    return groups
