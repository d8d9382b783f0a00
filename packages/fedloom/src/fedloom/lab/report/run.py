"""Run directory in memory: its series by key, its partitions, its settings and its summary."""

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
    """Recorded series, sorted by round, then client. All ``[k]``."""

    round: Integers
    client: Integers
    value: Numbers

    def select(self, rows: Any) -> Points:
        """Select points by positions, a slice or a mask."""
        return Points(self.round[rows], self.client[rows], self.value[rows])


@dataclass(frozen=True)
class RunPartition:
    """Split of one seed's samples among its clients.

    Attributes:
        counts: number of training samples ``[n, C]`` by client and class. C = 0 for a regression.
        sizes: number of training samples ``[n]``.
        groups: planted group ``[n]``, or -1 without planted groups.
        attackers: clients that attack.
        tested: number of test samples ``[n]``. None if they are not recorded.
        tests: digest of the clients' test parts. It is empty if the digest is not recorded.
    """

    counts: Numbers
    sizes: Numbers
    groups: Integers
    attackers: frozenset[int]
    tested: Integers | None = None
    tests: str = ""


@dataclass(frozen=True)
class Run:
    """Run directory in memory.

    Attributes:
        label: short name, unique in this report.
        settings: text of ``experiment.toml``.
        partitions: split of every seed.
        names: names of the clients.
        series: points of each recorded series about clients.
        totals: points of each recorded series about the whole federation.
        seconds: duration of each round in seconds for (method, seed), sorted by round.
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
        """Versions of the packages with which the run was made, by name."""
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
        """Number of clients, or 0 if it is not recorded."""
        return len(self.names) or max((int(points.client.max()) + 1 for points in self.series.values()), default=0)

    def attackers(self, seed: int) -> frozenset[int]:
        """Clients that attacked. Scores of clients that attack are not informative about a method."""
        return self.partitions[seed].attackers if seed in self.partitions else frozenset()

    @property
    def ratio(self) -> float:
        """Test samples per training sample if every seed splits the same samples again, else 0 (see `ratios`)."""
        ratios, sizes = self.ratios, np.sum([part.sizes for part in self.partitions.values()], axis=0)
        return float(np.average(ratios, weights=sizes)) if ratios is not None else 0.0

    @property
    def ratios(self) -> Numbers | None:
        """Test samples per training sample for each client ``[n]``, as a mean over seeds.

        None if seeds share their test parts, if there is only one seed, or if test parts are not recorded.
        """
        parts = [*self.partitions.values()]
        if len({part.tests for part in parts}) < 2:
            return None
        tested = np.sum([part.tested for part in parts if part.tested is not None], axis=0)
        ratios: Numbers = tested / np.sum([part.sizes for part in parts], axis=0)
        return ratios

    @property
    def attacked(self) -> bool:
        """True if clients that attacked are known."""
        return any(partition.attackers for partition in self.partitions.values())

    def benign(self, key: Key) -> Points | None:
        """Return a series without the attacking clients, or None if it was not recorded."""
        points = self.series.get(key)
        attackers = self.attackers(key.seed)
        if points is None or not attackers:
            return points
        return points.select(~np.isin(points.client, list(attackers)))

    def client(self, id: int) -> str:
        """Return the name of a client, or its number if no name was recorded."""
        return self.names[id] if id < len(self.names) else str(id)

    def titled_client(self, id: int) -> str:
        """Return the name of a client as the title of a panel."""
        return f"Client {self.client(id)}" if self.client(id).isdigit() else self.client(id)
