"""Records of the map's cells. A cell is a method in a setup."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedloom.errors import FedloomError
from fedloom.formats import round_significant
from fedloom.lab.report import MODEL_KINDS, Key, Run, accumulate_cost, benign_curve, test_metrics
from fedloom.metrics import leading
from fedloom_studies.map.setups import Cell, Protocol
from fedloom_studies.reproduce.summary import current_commit, processor_name
from fedloom_studies.store import not_a_record_error, read_records_of_file, write_record

DONE_STATUS, FAILED_STATUS, NOT_APPLICABLE_STATUS, NOT_RUN_STATUS = "done", "failed", "not applicable", "not run"
REUSED_STATUS = "reused"
"""Status of a cell at equal gradients whose method already computes as many gradients as FedAvg at equal rounds. The
runs would be the same under both protocols, so the runs at equal rounds are reused."""
SIGNIFICANT_DIGITS = 6
"""Number of significant digits kept in records."""
Values = list[float | None]


class Series(NamedTuple):
    """Result of a run with one seed, for the model that a client would use.

    Attributes:
        clients: metric on each client's test split after the last round, ``[n]``. A value is None if it is unknown, as
            for an attacker.
        rounds: numbers of the evaluated rounds, ``[k]``.
        mean: mean over clients in each of these rounds.
        gradients: number of per-sample gradients that were computed by the end of each of these rounds.
        bytes: number of bytes that had been sent in both directions by each of these rounds.
    """

    clients: Values
    rounds: list[int]
    mean: Values
    gradients: list[float]
    bytes: list[float]


@dataclass(frozen=True)
class CellRecord:
    """Result of a cell.

    Attributes:
        protocol: quantity that the runs share with FedAvg's runs: the number of rounds or the number of gradients.
        digest: digest of the inputs (see `Cell.digest`).
        source: digest of the code that was run (see `Cell.source`).
        space: search space given for the method's settings.
        status: "done", "failed" (a run diverged), "not applicable" or "reused".
        reason: reason why the cell has no result, or why it is reused.
        metric: metric of the values. Higher values are better.
        model: kind of model that a client would use: hybrid if the method has both a global and a personal model,
            otherwise its only model.
        chosen: settings of the best trial, keyed by name.
        trials: settings and validation metric of every trial. The metric is None if the trial was not completed.
        seeds: results of the runs, keyed by seed.
        again: results of a second run with different seeds, keyed by seed.
        minutes: processor time of trials, runs and evaluation, in core-minutes.
        parameters: number of parameters of the model, or 0 in records of earlier versions.
        commit: commit of fedloom, followed by "-dirty" if the code had uncommitted changes. The commit is empty if it
            is unknown. If additional seeds were run with another commit, its name follows after a comma.
    """

    setup: str
    method: str
    protocol: Protocol
    digest: str
    source: str
    space: dict[str, Any]
    status: str
    reason: str
    minutes: float
    date: str
    commit: str
    machine: str
    versions: dict[str, str] = field(default_factory=dict[str, str])
    metric: str = ""
    model: str = ""
    chosen: dict[str, Any] = field(default_factory=dict[str, Any])
    trials: list[tuple[dict[str, Any], float | None]] = field(default_factory=list[Any])
    seeds: dict[str, Series] = field(default_factory=dict[str, Series])
    again: dict[str, Series] = field(default_factory=dict[str, Series])
    parameters: int = 0


def new_record(cell: Cell, status: str, reason: str, minutes: float, **more: Any) -> CellRecord:
    """Return a new record of a cell, created with the current commit on this machine."""
    today = datetime.date.today().isoformat()
    return CellRecord(
        cell.setup.name, cell.method, cell.protocol, cell.digest, cell.source, cell.space, status, reason,
        round(minutes, 3), today, current_commit(), processor_name(), **more,
    )  # fmt: skip


def read_record(fields: Mapping[str, Any]) -> CellRecord:
    """Convert plain values (such as those read from JSON) to a record."""
    looks = {key: {seed: Series(*values) for seed, values in fields[key].items()} for key in ("seeds", "again")}
    return CellRecord(**{**fields, **looks})


def record_cell(record: CellRecord, file: Path) -> None:
    """Write the record of a cell to a file."""
    write_record(file, record.__dict__, ("setup", "method", "protocol"))


def read_records(file: Path, protocol: Protocol = "rounds") -> dict[tuple[str, str], CellRecord]:
    """Return all records made under a protocol, keyed by setup and method.

    Raises:
        RunDirError: a line of the file is not a record of the map.
    """
    cells = {}
    for number, fields in enumerate(read_records_of_file(file), 1):
        try:
            record = read_record(fields)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise not_a_record_error(file, number, error) from None
        if record.protocol == protocol:
            cells[record.setup, record.method] = record
    return cells


def fill_reused(
    records: Mapping[tuple[str, str], CellRecord], first: Mapping[tuple[str, str], CellRecord]
) -> dict[tuple[str, str], CellRecord]:
    """Return the records, with reused cells filled from the runs at equal rounds.

    Args:
        records: records at equal gradients.
        first: records at equal rounds. Reused cells without a record at equal rounds are omitted.
    """
    whole = {}
    for key, record in records.items():
        if record.status != REUSED_STATUS:
            whole[key] = record
        elif key in first:
            facts = {name: getattr(record, name) for name in ("protocol", "digest", "source", "reason", "minutes")}
            whole[key] = replace(first[key], **facts)
    return whole


def stale_reason(cell: Cell, record: CellRecord) -> str:
    """Return the reason why a record is outdated, or "" if it is up to date.

    A record is outdated if the protocol or the code of the method has changed since it was made.
    """
    try:
        if record.digest != cell.digest:
            return "another protocol"
        return "" if record.source == cell.source else "another version of the method"
    except FedloomError:  # neither an inapplicable cell's protocol nor missing code can be resolved
        return ""


def read_series(run: Run, method: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Read the fields of a record from a run directory: the metric, the model, and the result of each seed.

    Seeds that have no result are omitted.
    """
    kinds = {key.model for key in run.series if key.part == "test"}
    model = next((kind for kind in reversed(MODEL_KINDS) if kind in kinds), "")
    metric = leading(test_metrics(run, method, model))
    lost = {record.seed for record in run.summary.runs if record.lost or record.status == "interrupted"}
    series = {}
    for seed in sorted(set(seeds) - lost):
        key = Key(method, seed, model, "test", metric)
        means, points = benign_curve(run, key, "mean"), run.benign(key)
        if points is None or not math.isfinite(means.last):
            continue
        clients = np.full(run.clients, math.nan)
        last = points.round == points.round.max()
        clients[points.client[last]] = points.value[last]
        costs = [accumulate_cost(run, method, seed, cost) for cost in ("samples_backward", "bytes")]
        spent = [[total.value[total.round <= r].max(initial=0.0) for r in means.round] for total in costs]
        series[str(seed)] = Series(
            _round_values(clients), means.round.tolist(), _round_values(means.value), *map(_exact_values, spent)
        )
    versions: Mapping[str, str] = run.options["resolved"]["versions"]
    parameters = max((record.parameters or 0 for record in run.summary.runs), default=0)
    return {"metric": metric, "model": model, "parameters": parameters, "seeds": series, "versions": dict(versions)}


def _round_values(values: Any) -> Values:
    return [round_significant(value, SIGNIFICANT_DIGITS) for value in values]


def _exact_values(values: Sequence[float]) -> list[float]:
    return [float(v) for v in values]
