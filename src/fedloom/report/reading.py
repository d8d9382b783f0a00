"""Reads a run directory: every file is checked, and nothing but recorded numbers is used."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from fedloom.errors import RunDirError

Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]
FEDERATION = -1
"""Client id of rows about the whole federation."""

_TEXT, _INTEGER = ("method", "model", "part", "metric"), ("seed", "round", "client")


class Key(NamedTuple):
    """What a recorded series is about."""

    method: str
    seed: int
    model: str
    part: str
    metric: str


class Points(NamedTuple):
    """A recorded series, sorted by round, then client; all ``[k]``."""

    round: Integers
    client: Integers
    value: Numbers


class _Lenient(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Record(_Lenient):
    """One method with one seed."""

    method: str
    algorithm: str = ""
    seed: int
    status: Literal["done", "diverged", "interrupted", "failed"]
    reason: str = ""
    rounds: int = 0
    oracle: str | None = None
    chunk: int | None = None
    device: str | None = None
    parameters: int | None = None
    attackers: tuple[int, ...] = ()


class Partition(_Lenient):
    """Samples per client and class: one ``[n][C]`` table per seed (C = 0 for a regression); names of both.

    ``groups`` are the planted groups of the clients, one list per seed, empty where none were planted.
    """

    counts: tuple[tuple[tuple[float, ...], ...], ...] = ()
    classes: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    skew: dict[str, Any] | list[dict[str, Any]] = {}
    groups: tuple[tuple[int, ...], ...] = ()

    @field_validator("counts", mode="before")
    @classmethod
    def _by_seed(cls, counts: Any) -> Any:
        if isinstance(counts, dict):
            return tuple(counts.values())
        if counts and counts[0] and not isinstance(counts[0][0], list | tuple):
            return (counts,)
        return counts

    @field_validator("counts")
    @classmethod
    def _rectangular(cls, counts: tuple[tuple[tuple[float, ...], ...], ...]) -> Any:
        if any(len({len(row) for row in table}) != 1 for table in counts):
            raise ValueError("every client needs one count per class")
        return counts


class Summary(_Lenient):
    """What ``summary.json`` says."""

    name: str = ""
    runs: tuple[Record, ...] = ()
    partition: Partition = Partition()
    select_on: str = "validation"
    warnings: tuple[str, ...] = ()

    @field_validator("partition", mode="before")
    @classmethod
    def _may_be_null(cls, partition: Any) -> Any:
        return {} if partition is None else partition


@dataclass(frozen=True)
class Run:
    """One run directory in memory.

    Attributes:
        label: short unique name in this report.
        settings: the text of ``experiment.toml``.
        series: the points of every recorded series about clients.
        totals: the same for the whole federation.
        seconds: seconds per round of (method, seed), sorted by round.
    """

    path: Path
    label: str
    settings: str
    summary: Summary
    series: dict[Key, Points] = field(repr=False)
    totals: dict[Key, Points] = field(repr=False)
    seconds: dict[tuple[str, int], Points] = field(repr=False)

    @property
    def options(self) -> dict[str, Any]:
        """The settings, parsed."""
        return tomllib.loads(self.settings)

    @property
    def methods(self) -> list[str]:
        """Labels of the methods, in the order of the experiment."""
        named = [record.method for record in self.summary.runs]
        return list(dict.fromkeys([*named, *(key.method for key in [*self.series, *self.totals])]))

    @property
    def clients(self) -> int:
        """Number of clients, 0 if nothing says."""
        if self.summary.partition.counts:
            return len(self.summary.partition.counts[0])
        return max((int(points.client.max()) + 1 for points in self.series.values()), default=0)

    def attackers(self, method: str, seed: int) -> frozenset[int]:
        """Clients that attacked; what they score says nothing about a method."""
        found = (record.attackers for record in self.summary.runs if (record.method, record.seed) == (method, seed))
        return frozenset(next(found, ()))

    def benign(self, key: Key) -> Points | None:
        """A series without the clients that attacked; None if it was not recorded."""
        points = self.series.get(key)
        attackers = self.attackers(key.method, key.seed)
        if points is None or not attackers:
            return points
        honest = ~np.isin(points.client, list(attackers))
        return Points(points.round[honest], points.client[honest], points.value[honest])

    def client(self, id: int) -> str:
        """Name of a client, its number where none was recorded."""
        names = self.summary.partition.clients
        return names[id] if id < len(names) else str(id)


def read_runs(run_dirs: Sequence[Path]) -> list[Run]:
    """The run directories, with labels that tell them apart.

    Raises:
        RunDirError: there is none, one is given twice, or one is not a readable run directory.
    """
    paths = [Path(path).resolve() for path in run_dirs]
    if not paths:
        raise RunDirError("a report needs at least one run directory, got none")
    for path in paths:
        if paths.count(path) > 1:
            raise RunDirError(f"run directory {path} is given twice")
    names = [path.name for path in paths]
    labels = [path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}" for path in paths]
    return [_read(path, label) for path, label in zip(paths, labels, strict=True)]


def _read(path: Path, label: str) -> Run:
    if not path.is_dir():
        raise RunDirError(f"{path} is not a directory; give the output directory of 'fedloom run'")
    if not (path / "experiment.toml").is_file():
        raise RunDirError(
            f"{path} is not a run directory: no experiment.toml; give the output directory of 'fedloom run'"
        )
    if not (path / "metrics.parquet").is_file():
        raise RunDirError(f"{path} has no metrics.parquet yet; run the experiment until its first method has a result")
    settings = _text(path / "experiment.toml")
    try:
        tomllib.loads(settings)
    except tomllib.TOMLDecodeError as error:
        raise RunDirError(f"{path / 'experiment.toml'} is damaged: {error}") from error
    table = read_table(path / "metrics.parquet", (*_TEXT, *_INTEGER, "value"))
    about_all = pc.equal(table["client"], FEDERATION)
    series, totals = _split(table.filter(pc.invert(about_all))), _split(table.filter(about_all))
    return Run(
        path, label, settings, _summary(path / "summary.json"), series, totals, _seconds(path / "timings.parquet")
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirError(f"{path} cannot be read: {error}") from error


def _summary(path: Path) -> Summary:
    """The summary; an empty one while the first method is still running."""
    if not path.exists():
        return Summary()
    try:
        return Summary.model_validate(json.loads(_text(path)))
    except json.JSONDecodeError as error:
        raise RunDirError(f"{path} is damaged: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RunDirError(f"{path}: {place}: {first['msg']}, got {str(first['input'])[:60]}") from error


def _seconds(path: Path) -> dict[tuple[str, int], Points]:
    if not path.exists():
        return {}
    table = read_table(path, ("method", "seed", "round", "seconds"))
    for name in ("model", "part", "metric"):
        table = table.append_column(name, pa.array([""] * len(table)))
    found = _split(table.append_column("client", table["seed"]).append_column("value", table["seconds"]))
    return {(key.method, key.seed): points for key, points in found.items()}


def read_table(path: Path, names: tuple[str, ...]) -> pa.Table:
    """The named columns: text as strings, integers as int64, the rest as float64.

    Raises:
        RunDirError: the file is damaged, or lacks one of them.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise RunDirError(f"{path} is damaged: {error}") from error
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise RunDirError(f"{path} has no column {missing[0]!r}; its columns are {', '.join(table.column_names)}")
    columns: dict[str, Any] = {}
    for name in names:
        kind = pa.string() if name in _TEXT else pa.int64() if name in _INTEGER else pa.float64()
        try:
            columns[name] = pc.cast(table[name], kind)
        except pa.ArrowException as error:
            raise RunDirError(f"{path}: column {name!r} must be {kind}, got {table[name].type}") from error
        if name in _TEXT + _INTEGER and columns[name].null_count:
            raise RunDirError(f"{path}: column {name!r} has {columns[name].null_count} empty cells")
    return pa.table(columns)


def _split(table: pa.Table) -> dict[Key, Points]:
    """The rows grouped by key, each group sorted by round, then client."""
    if not len(table):
        return {}
    known: dict[str, list[Any]] = {}
    own: dict[str, NDArray[np.int32]] = {}
    code = np.zeros(len(table), dtype=np.int64)
    for name in Key._fields:
        encoded = table[name].combine_chunks().dictionary_encode()
        known[name], own[name] = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
        code = code * len(known[name]) + own[name]
    points = Points(*(table[name].to_numpy() for name in ("round", "client", "value")))
    order = np.lexsort((points.client, points.round, code))
    starts = np.flatnonzero(np.diff(code[order], prepend=-1))
    groups: dict[Key, Points] = {}
    for rows in np.split(order, starts[1:]):
        key = Key(*(known[name][own[name][rows[0]]] for name in Key._fields))
        groups[key] = Points(points.round[rows], points.client[rows], points.value[rows])
    return groups
