"""A run directory that has been read into memory: its series of metrics, partitions, settings and summary."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.engine.checks.moved import update_document
from fedloom.rundir import Summary

Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]


class Key(NamedTuple):
    """Key that identifies a recorded series."""

    method: str
    seed: int
    model: str
    part: str
    metric: str


class Points(NamedTuple):
    """Recorded series of a metric, sorted by round and then by client. All arrays have the shape ``[k]``."""

    round: Integers
    client: Integers
    value: Numbers

    def select(self, rows: Any) -> Points:
        """Select points by a slice, a mask or an array of positions."""
        return Points(self.round[rows], self.client[rows], self.value[rows])


@dataclass(frozen=True)
class RunPartition:
    """Split of the samples across clients with one seed.

    Attributes:
        counts: number of training samples of each client and class, ``[n, C]``. C is 0 for a regression.
        sizes: number of training samples of each client, ``[n]``.
        groups: planted group of each client, ``[n]``, or -1 if there are no planted groups.
        attackers: indices of the attacking clients.
        tested: number of test samples of each client, ``[n]``. None if these numbers were not recorded.
        tests: digest of all clients' test sets. Empty if it was not recorded.
    """

    counts: Numbers
    sizes: Numbers
    groups: Integers
    attackers: frozenset[int]
    tested: Integers | None = None
    tests: str = ""


@dataclass(frozen=True)
class Run:
    """A run directory that has been read into memory.

    Attributes:
        label: short name of the run, unique within a report.
        settings: content of ``experiment.toml``.
        partitions: split of the samples, keyed by seed.
        names: names of the clients.
        series: recorded metrics of individual clients, keyed by series.
        totals: recorded metrics of the federation as a whole, keyed by series.
        seconds: duration of each round in seconds, keyed by (method, seed) and sorted by round.
    """

    path: Path
    label: str
    settings: str
    summary: Summary
    partitions: dict[int, RunPartition] = field(repr=False)
    names: list[str] = field(repr=False)
    series: dict[Key, Points] = field(repr=False)
    totals: dict[Key, Points] = field(repr=False)
    seconds: dict[tuple[str, int], Points] = field(repr=False)

    @property
    def options(self) -> dict[str, Any]:
        """Parsed settings, with current key names."""
        return update_document(tomllib.loads(self.settings))

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the packages that the run used, keyed by name."""
        resolved = self.options.get("resolved", {})
        versions = resolved.get("versions", resolved)
        return {name: version for name, version in versions.items() if isinstance(version, str)}

    @property
    def methods(self) -> list[str]:
        """Labels of the methods, in the order of the experiment."""
        named = [record.method for record in self.summary.runs]
        return list(dict.fromkeys([*named, *(key.method for key in [*self.series, *self.totals])]))

    @property
    def clients(self) -> int:
        """Number of clients, or 0 if it was not recorded."""
        return len(self.names) or max((int(points.client.max()) + 1 for points in self.series.values()), default=0)

    def attackers(self, seed: int) -> frozenset[int]:
        """Return the clients that attacked with the given seed. Their scores are not informative about a method."""
        return self.partitions[seed].attackers if seed in self.partitions else frozenset()

    @property
    def ratio(self) -> float:
        """Number of test samples per training sample (see `ratios`).

        The ratio is 0 unless every seed splits the same samples anew.
        """
        ratios, sizes = self.ratios, np.sum([part.sizes for part in self.partitions.values()], axis=0)
        return float(np.average(ratios, weights=sizes)) if ratios is not None else 0.0

    @property
    def ratios(self) -> Numbers | None:
        """Number of test samples per training sample for each client, ``[n]``, averaged over seeds.

        None if all seeds use the same test sets, if there is only one seed, or if the test sets were not recorded.
        """
        parts = [*self.partitions.values()]
        if len({part.tests for part in parts}) < 2:
            return None
        tested = np.sum([part.tested for part in parts if part.tested is not None], axis=0)
        ratios: Numbers = tested / np.sum([part.sizes for part in parts], axis=0)
        return ratios

    @property
    def attacked(self) -> bool:
        """True if at least one client is recorded as an attacker."""
        return any(partition.attackers for partition in self.partitions.values())

    def benign(self, key: Key) -> Points | None:
        """Return a series without the attacking clients, or None if the series was not recorded."""
        points = self.series.get(key)
        attackers = self.attackers(key.seed)
        if points is None or not attackers:
            return points
        return points.select(~np.isin(points.client, list(attackers)))

    def client(self, id: int) -> str:
        """Return the name of a client, or its number if no name was recorded."""
        return self.names[id] if id < len(self.names) else str(id)

    def titled_client(self, id: int) -> str:
        """Return a client's name as used in panel titles."""
        return f"Client {self.client(id)}" if self.client(id).isdigit() else self.client(id)
