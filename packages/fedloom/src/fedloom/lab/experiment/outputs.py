"""Files of a run directory that users and reports read."""

from __future__ import annotations

import hashlib
import io
import platform
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w
from numpy.typing import NDArray

from fedloom.analyses import ANALYSES, Analysis, analyze
from fedloom.analyses.registry import get_analysis_name
from fedloom.data.federation import Federation, Split
from fedloom.engine.checks.refusals import NOT_EVALUATED
from fedloom.engine.result import Result
from fedloom.errors import DataError, Refused, RunDirError
from fedloom.lab.experiment.schema import Experiment
from fedloom.rundir import (
    METRICS_FILE,
    NO_DIGEST,
    PARTITION_FILE,
    SETTINGS_FILE,
    SUMMARY_FILE,
    TIMINGS_FILE,
    RunRecord,
    Summary,
    analysis_file,
    check_digest,
    insert_digest,
)
from fedloom.storage.disk import check_regular_file
from fedloom.storage.files import write_atomic
from fedloom.version import __version__

RECORDED_PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "pyarrow", "pydantic")


RunDurations = tuple[Sequence[float], Sequence[float]]
"""Duration of each round in seconds, followed by its one-off costs (such as compilation) in seconds."""


class Outcome(NamedTuple):
    """Outcome of a run in a comparison: its result, or the reason why it has no result.

    is_damaged: True if the run's checkpoint cannot be read. Its earlier metrics then remain in the tables.
    """

    label: str
    algorithm: str
    seed: int
    result: Result | None
    failure: str = ""
    is_damaged: bool = False

    @property
    def status(self) -> str:
        """Word that states how the run ended: done, diverged, interrupted or failed."""
        return "failed" if self.result is None else self.result.status

    @property
    def complete(self) -> bool:
        """True if the run completed all rounds with finite metrics, even if it was marked as diverged."""
        return self.result is not None and (self.status == "done" or self.result.diverged is not None)

    @property
    def reason(self) -> str:
        """Sentence that states how the run ended."""
        if self.result is None:
            return self.failure
        if self.status == "done" and NOT_EVALUATED in self.result.notes:
            return NOT_EVALUATED
        return f"{self.result.stop.value}{f' ({self.result.detail})' if self.result.detail else ''}"


_version = cache(version)
"""Version of a package. The version is cached, because every call would otherwise parse the package's metadata files.
"""


def write_settings(out: Path, experiment: Experiment) -> None:
    """Write ``experiment.toml``, which contains all settings with defaults filled in, and the versions of packages."""
    versions = {
        "fedloom": __version__,
        "python": platform.python_version(),
        **{v: _version(v) for v in RECORDED_PACKAGES},
    }
    document = {**experiment.settings(), "resolved": {"versions": versions}}
    write_atomic(out / SETTINGS_FILE, insert_digest(f"{tomli_w.dumps(document)}# {NO_DIGEST}\n".encode()))


def write_tables(out: Path, outcomes: Sequence[Outcome]) -> None:
    """Write ``metrics.parquet``, which does not contain times, and ``timings.parquet``."""
    done = [(o, o.result) for o in outcomes if o.result is not None]
    runs = [(o.label, o.seed, r.table(), (r.seconds, r.startup)) for o, r in done]
    write_measured(out, runs, [(o.label, o.seed) for o in outcomes if o.is_damaged])


def write_measured(
    out: Path,
    runs: Sequence[tuple[str, int, pa.Table, tuple[Sequence[float], Sequence[float]]]],
    keep: Sequence[tuple[str, int]] = (),
) -> None:
    """Write metrics and timings of runs, each given as (label, seed, metrics, (seconds per round, one-off seconds)).

    Existing rows of the runs in ``keep`` are preserved.
    """
    metrics = [label_rows(table, label, seed) for label, seed, table, _ in runs]
    seconds = [label_rows(_timing_figures(*spent), label, seed) for label, seed, _, spent in runs]
    write_parquet(out / METRICS_FILE, metrics, keep)
    write_parquet(out / TIMINGS_FILE, seconds, keep)


def write_analyses(
    out: Path, analyses: Sequence[Analysis], outcomes: Sequence[Outcome], federation: Federation
) -> list[str]:
    """Write a file for each analysis that is computed after the last round, and return notes.

    Analyses that train additional runs are written by `write_further` instead.

    Args:
        out: the run directory.
        analyses: all analyses of the experiment.
        outcomes: outcomes of all runs. Only complete runs are analyzed.
        federation: federation of the first seed. Sum-based analyses use its rows.
    """
    done = sorted(
        ((o, o.result) for o in outcomes if o.result is not None and o.complete),
        key=lambda pair: (pair[0].label, pair[0].seed),
    )
    keep, notes = [(o.label, o.seed) for o in outcomes if o.is_damaged], list[str]()
    for kind in {*ANALYSES} - {get_analysis_name(analysis) for analysis in analyses}:
        (out / analysis_file(kind)).unlink(missing_ok=True)
    for analysis in (value for value in analyses if not value.runs_further):
        path = out / analysis_file(get_analysis_name(analysis))
        if analysis.by_sums and not analysis.uses_models:
            tables, more = _sum_analysis(analysis, federation) if done else ([], [])
            write_parquet(path, tables)
            notes += more
            continue
        tables, seeds = list[pa.Table](), set[int]()
        for outcome, result in done:
            if analysis.per == "seed" and outcome.seed in seeds:
                continue
            measured = analyze(analysis, result)
            tables.append(label_rows(measured.table, "" if analysis.per == "seed" else outcome.label, outcome.seed))
            notes += measured.notes if not analysis.by_sums else ()
            seeds.add(outcome.seed)
        write_parquet(path, tables, [] if analysis.per == "seed" else keep)
    return notes


def _sum_analysis(analysis: Analysis, federation: Federation) -> tuple[list[pa.Table], list[str]]:
    """Return the table of a sum-based analysis, and notes.

    If the analysis cannot be computed, return no table and a note that states the reason.
    """
    try:
        return [analyze(analysis, federation).table], []
    except (DataError, Refused) as error:
        return [], [f"the analysis {get_analysis_name(analysis)!r} has no answer: {error}"]


def find_measured_runs(out: Path, analysis: Analysis) -> list[tuple[str, int]]:
    """Return the (label, seed) of each run whose additional runs already have rows in an analysis's file.

    The list is empty if the file is damaged.
    """
    names, path = ["method", "seed"], out / analysis_file(get_analysis_name(analysis))
    try:
        check_digest(path, check_regular_file(path).read_bytes())
        keys = pq.read_table(path, columns=names).group_by(names).aggregate([])
    except (FileNotFoundError, RunDirError, pa.ArrowException):
        return []
    return list(zip(keys["method"].to_pylist(), keys["seed"].to_pylist(), strict=True))


def write_further(
    out: Path, analysis: Analysis, tables: Mapping[tuple[str, int], Sequence[pa.Table]], keep: Sequence[tuple[str, int]]
) -> None:
    """Write the rows of additional runs, keyed by the label and seed of the original run.

    Existing rows of the runs in ``keep`` are preserved.
    """
    rows = [label_rows(pa.concat_tables(some), *run) for run, some in sorted(tables.items())]
    write_parquet(out / analysis_file(get_analysis_name(analysis)), rows, keep)


def write_parquet(path: Path, tables: list[pa.Table], keep: Sequence[tuple[str, int]] = ()) -> None:
    """Combine all tables and the existing rows of the runs in ``keep``, and write the result.

    If there are no tables, delete the file.
    """
    if keep and path.exists():
        tables = [*tables, select_runs(pq.read_table(path), keep)]
    if not tables:
        path.unlink(missing_ok=True)
        return
    sink, table = io.BytesIO(), pa.concat_tables(tables)
    with pq.ParquetWriter(sink, table.schema, compression="zstd") as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"digest": NO_DIGEST})
    write_atomic(path, insert_digest(sink.getvalue()))


def select_runs(table: pa.Table, runs: Collection[tuple[str, int]], *, invert: bool = False) -> pa.Table:
    """Return a table's rows that belong to the given runs or, with ``invert``, all other rows."""
    keys = zip(table["method"].to_pylist(), table["seed"].to_pylist(), strict=True)
    return table.filter(pa.array([(key in runs) != invert for key in keys], pa.bool_()))


def write_summary(
    out: Path,
    experiment: Experiment,
    outcomes: Sequence[Outcome],
    federations: Mapping[int, Federation],
    more: Sequence[str] = (),
) -> None:
    """Write ``summary.json``, which records how every run ended.

    Also write ``partition.parquet``, which records the data split.
    """
    feds = list(federations.values())
    attackers = dict[int, NDArray[np.int64]]()
    for o in outcomes:  # all methods are compared on the same clients, without the attackers of any method
        if o.result is not None:
            attackers[o.seed] = np.union1d(attackers.get(o.seed, []), o.result.job.attackers.numpy()).astype(np.int64)
    write_splits(out, federations, attackers)
    of_data = {seed: fed.remarks for seed, fed in federations.items()}
    notes = [f"data, seed {seed}: {note}" for seed, remarks in of_data.items() for note in remarks]
    notes += [
        f"{o.label}, seed {o.seed}: {note}"
        for o in outcomes
        if o.result is not None
        for note in o.result.notes
        if note.removeprefix("data: ") not in of_data.get(o.seed, ())
    ]
    roles = {method.label: method.setting.role for method in experiment.compared}
    summary = Summary(
        name=experiment.head.name,
        runs=tuple(_run_record(outcome, roles.get(outcome.label)) for outcome in outcomes),
        clients=feds[0].n,
        classes=feds[0].data.classes,
        select_on=experiment.common.evaluate.select_on,
        metrics={k: v for m in experiment.compared for k, v in m.setting.task.directions.items()},
        warnings=tuple(dict.fromkeys([*notes, *more])),
    )
    write_atomic(out / SUMMARY_FILE, summary.content())


def write_splits(
    out: Path, federations: Mapping[int, Federation], attackers: Mapping[int, NDArray[np.int64]] | None = None
) -> None:
    """Write ``partition.parquet``, which records each seed's split and, if known, which clients are attackers."""
    attackers_by_seed = attackers or {}
    tables = [_partition_of_seed(seed, fed, attackers_by_seed.get(seed)) for seed, fed in federations.items()]
    write_parquet(out / PARTITION_FILE, tables)


def _run_record(outcome: Outcome, role: str | None) -> RunRecord:
    result = outcome.result
    fields: dict[str, Any] = {"method": outcome.label, "algorithm": outcome.algorithm, "seed": outcome.seed}
    fields |= {"role": role, "status": outcome.status, "reason": outcome.reason, "rounds": 0}
    if result is not None:
        oracle = result.job.oracle
        fields |= {"rounds": result.rounds, "oracle": oracle.name, "chunk": result.job.chunk}
        fields |= {"device": str(oracle.device), "parameters": oracle.layout.d}
        fields |= {} if result.diverged is None else {"diverged": result.diverged}
        fields |= {} if result.job.fleet is None else {"device_classes": result.job.fleet.names}
    return RunRecord.model_validate(fields)


def _partition_of_seed(seed: int, fed: Federation, attackers: NDArray[np.int64] | None) -> pa.Table:
    groups = None if fed.groups is None else fed.groups.numpy()
    sizes = fed.sizes("train").numpy()
    return partition_table(seed, fed.names, sizes, fed.class_counts().numpy(), groups, attackers, fed.parts["test"])


def partition_table(
    seed: int,
    names: Sequence[str],
    sizes: NDArray[np.int64],
    counts: NDArray[np.int64],
    groups: NDArray[np.int64] | None = None,
    attackers: NDArray[np.int64] | None = None,
    tests: Split | None = None,
) -> pa.Table:
    """Return a table that describes the partition, with one row per client.

    Args:
        seed: seed of the split.
        names: names of the clients.
        sizes: number of training samples of each client, ``[n]``.
        counts: number of training samples of each client and class, ``[n, C]``. C is 0 for a regression, or if only the
            sizes are known.
        groups: number of each client's planted group, ``[n]``. If None, -1 is written for all clients.
        attackers: indices of the attacking clients.
        tests: test set of each client. The sizes of the test sets are written, with one digest of all test sets. None
            if the test sets are unknown.
    """
    n, ends = len(names), np.arange(len(names) + 1) * counts.shape[1]
    columns = {
        "seed": np.full(n, seed),
        "client": np.arange(n),
        "name": pa.array(names, pa.string()),
        "size": sizes,
        "group": np.full(n, -1) if groups is None else groups,
        "attacks": np.isin(np.arange(n), [] if attackers is None else attackers),
        "counts": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(counts.flatten())),
    }
    if tests is not None:
        parts = b"".join(part.numpy().tobytes() for part in (tests.offsets, tests.index))
        digest = hashlib.sha256(parts).hexdigest()[:16]
        columns |= {"tested": tests.offsets.diff().numpy(), "tests": pa.array([digest] * n, pa.string())}
    return pa.table(columns)


def _timing_figures(seconds: Sequence[float], startup: Sequence[float]) -> pa.Table:
    rounds = pa.array(range(1, len(seconds) + 1), pa.int64())
    columns = {"seconds": seconds, "startup": startup}
    return pa.table({"round": rounds, **{name: pa.array(values, pa.float64()) for name, values in columns.items()}})


def label_rows(table: pa.Table, label: str, seed: int) -> pa.Table:
    """Return the table with the columns ``method`` and ``seed`` inserted at the front."""
    count = table.num_rows
    table = table.add_column(0, "method", pa.array([label] * count, pa.string()))
    return table.add_column(1, "seed", pa.array([seed] * count, pa.int64()))
