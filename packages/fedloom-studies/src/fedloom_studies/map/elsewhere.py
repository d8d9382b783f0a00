"""Measurement of cells on an executor. A cell (a method in a setup) is sent as text, and its record is returned."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedloom.errors import DataError, FedloomError
from fedloom.lab.experiment import (
    Executor,
    PackedExperiment,
    UnitReply,
    check_executor,
    compute_units,
    parse,
    unit_folder,
    worker_name,
)
from fedloom.processes import interruptible
from fedloom_studies.map.budget import GradientBudget
from fedloom_studies.map.measure import CellWork, hide_progress
from fedloom_studies.map.records import CellRecord, read_record, read_records, record_cell
from fedloom_studies.map.setups import SEED_KEYS, Cell, Setup
from fedloom_studies.reproduce.execute import TimeBudget

RECORD_FILE = "record.json"
"""Name of the file in a worker's reply that contains the record of a cell."""


def measure_elsewhere(
    executor: Executor, todo: Sequence[Cell], records: Mapping[tuple[str, str], CellRecord], results: Path,
    data_dir: Path | None, say: Callable[[str], object], *, again: bool = False,
) -> bool:  # fmt: skip
    """Measure cells on an executor and write their records. Return True if all cells have ended.

    Args:
        executor: executor that measures the cells, with one call for each cell.
        todo: cells that remain to be run.
        records: records that existed before the call, keyed by setup and method.
        results: file for the records.
        data_dir: folder with the data sets. If the data of a setup are missing, its cells are skipped.
        say: function that is called with a sentence about each cell.
        again: True to rerun each cell with other seeds, to confirm its verdict.

    Raises:
        FedloomError: a worker has different code for a method, or the executor lost a cell several times.
    """
    check_executor(executor)
    checksums, cells, units = dict[str, str](), list[Cell](), list[str]()
    for cell in todo:
        name, key = cell.setup.name, (cell.setup.name, cell.method)
        if name not in checksums:
            try:
                checksums[name] = _setup_checksum(cell.setup, data_dir)
            except DataError as error:
                checksums[name] = ""
                say(f"{name}: data are missing: {error}")
        if checksums[name]:
            cells.append(cell)
            first = read_records(results).get(key) if cell.protocol == "gradients" else None
            units.append(_write_unit(cell, checksums[name], records.get(key), first, again=again))
    with interruptible() as interrupted:
        for k, reply in compute_units(executor, PackedExperiment("", None), units, interrupted, compute_cell):
            cell = cells[k]
            if reply.failure:
                say(f"{cell.where}: {reply.failure}")
                continue
            record = read_record(json.loads(reply.files[RECORD_FILE]))
            if record.source and record.source != _method_source_digest(cell):
                raise FedloomError(
                    f"{cell.where}: the worker has a different version of the method's code. Install "
                    "the same version on the worker"
                )
            record_cell(record, results)
            say(f"{cell.where}: {record.status}{record.reason and f': {record.reason}'}")
        return not interrupted()


def compute_cell(_experiment: str, unit: str) -> bytes:
    """Measure a cell on any machine, and return the record.

    Apart from the time, machine and date, the same arguments always give the same record.

    Args:
        _experiment: not used. A cell contains its whole experiment.
        unit: JSON object that contains the cell, its existing records, and the checksum of its data.

    Returns:
        A `UnitReply` with the record, encoded as bytes.
    """
    fields = json.loads(unit)
    seeds = {key: tuple(fields["setup"][key]) for key in SEED_KEYS}
    cell = Cell(Setup(**{**fields["setup"], **seeds}), fields["method"], fields["space"], fields["protocol"])
    before, first = (None if fields[key] is None else read_record(fields[key]) for key in ("before", "first"))
    with unit_folder() as folder:
        try:
            if _setup_checksum(cell.setup, None) != fields["checksum"]:
                raise DataError(
                    "the data of this worker differ from the data of the map. Put the same files on "
                    "the worker, in the folder that FEDLOOM_DATA names"
                )
            gradients = GradientBudget(cell.setup, None) if cell.protocol == "gradients" else None
            work = CellWork(cell, folder, None, TimeBudget(), hide_progress, gradients)
            record = work.record(before, first, again=fields["look_again"])
        except DataError as missing:
            return UnitReply({}, str(missing), worker=worker_name()).pack()
    files = {} if record is None else {RECORD_FILE: json.dumps(record.__dict__).encode()}
    return UnitReply(files, interrupted=record is None, worker=worker_name()).pack()


def _write_unit(
    cell: Cell, checksum: str, before: CellRecord | None, first: CellRecord | None, *, again: bool
) -> str:  # fmt: skip
    fields: dict[str, Any] = {
        "setup": asdict(cell.setup), "method": cell.method, "space": cell.space, "protocol": cell.protocol,
        "checksum": checksum, "look_again": again,
        "before": None if before is None else before.__dict__, "first": None if first is None else first.__dict__,
    }  # fmt: skip
    return json.dumps(fields)


def _setup_checksum(setup: Setup, data_dir: Path | None) -> str:
    """Return the checksum of a setup's data."""
    plan = parse({**setup.document, "method": [{"algorithm": "fedavg"}]}, setup.name)
    return plan.source.read(data_dir).checksum()


def _method_source_digest(cell: Cell) -> str:
    """Return the digest of the code of a cell's method, as installed on this machine.

    The digest is empty if the method cannot be run in this setup.
    """
    try:
        return cell.source
    except FedloomError:
        return ""
