"""Merge: combine run directories of the same experiment, with different seeds or methods, into one directory."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w

from fedloom.analyses import ANALYSES, Analysis
from fedloom.engine.checks.moved import update_document
from fedloom.engine.setting import Engine
from fedloom.errors import RunDirError
from fedloom.lab.experiment.file import difference_to_recorded
from fedloom.lab.experiment.outputs import select_runs, write_parquet
from fedloom.rundir import (
    CHECKPOINTS_FOLDER,
    METRICS_FILE,
    MODELS_FOLDER,
    NO_DIGEST,
    SETTINGS_FILE,
    SUMMARY_FILE,
    TIMINGS_FILE,
    Summary,
    analysis_file,
    check_digest,
    compared_tables,
    insert_digest,
    read_summary,
    run_folder,
)
from fedloom.storage.disk import check_regular_file
from fedloom.storage.files import is_unused, make_folder, write_atomic
from fedloom.storage.locks import lock

FREE_KEYS_PATTERN = "|".join(["name", "seeds", *(rf"engine\.{key}" for key in Engine.free)])
"""Pattern of the settings that may differ between the directories. The methods may also differ."""


def merge(folders: Sequence[Path], out: Path) -> list[tuple[str, int]]:
    """Merge run directories of the same experiment into a new directory, and return the runs that are still missing.

    Args:
        folders: paths of two or more run directories. If several directories contain the same run, the first one is
            used.
        out: path of the new run directory.

    Returns:
        The label and seed of each run of the merged experiment that is missing from all directories, and thus from the
        new one.

    Raises:
        RunDirError: a folder is given twice or is not a finished run directory, the experiments differ, the metrics of
            a run differ between directories, or ``out`` is in use.
    """
    if not is_unused(out):
        raise RunDirError(f"{out} is not empty. Pass a new folder for the merged runs")
    whole_paths = [folder.resolve() for folder in folders]
    if twice := next((f for k, f in enumerate(folders) if whole_paths[k] in whole_paths[:k]), None):
        raise RunDirError(f"{twice} is passed more than once. Pass each directory only once")
    documents = {folder: _read_settings(folder) for folder in folders}
    first = next(iter(documents.values()))
    for folder, document in documents.items():
        if difference := difference_to_recorded(first, document, FREE_KEYS_PATTERN):
            raise RunDirError(f"{folders[0]} and {folder} contain different experiments: {difference}")
    summaries = {folder: read_summary(folder / SUMMARY_FILE) for folder in folders}
    methods = {method["label"]: method for document in documents.values() for method in document["method"]}
    labels = dict.fromkeys(
        [*methods, *(table["label"] for one in documents.values() for table in compared_tables(one))]
    )
    seeds = sorted({seed for document in documents.values() for seed in document["seeds"]})
    records = {(run.method, run.seed): (folder, run) for folder in reversed(folders) for run in summaries[folder].runs}
    wanted = [(label, seed) for label in labels for seed in seeds]
    runs = [run for run in wanted if run in records]
    _check_equal(folders, summaries)
    make_folder(out)
    with lock(out):
        versions = {"resolved": first.get("resolved", {})}
        whole = {**first, "seeds": seeds, "method": [*methods.values()], **versions}
        write_atomic(out / SETTINGS_FILE, insert_digest(f"{tomli_w.dumps(whole)}# {NO_DIGEST}\n".encode()))
        for name in sorted({path.name for folder in folders for path in folder.glob("*.parquet")}):
            write_parquet(out / name, _merge_tables(name, folders, [(run, records[run][0]) for run in runs], seeds))
        for label, seed in runs:
            for kind in (CHECKPOINTS_FOLDER, MODELS_FOLDER):
                source = run_folder(records[label, seed][0], kind, label, seed)
                if source.is_dir():
                    shutil.copytree(source, run_folder(out, kind, label, seed))
        joined = summaries[folders[0]]
        warnings = _order_warnings([w for one in summaries.values() for w in one.warnings], runs, seeds)
        metrics = {name: more for one in summaries.values() for name, more in one.metrics.items()}
        fields = {"runs": tuple(records[run][1] for run in runs), "warnings": warnings, "metrics": metrics}
        content = Summary.model_validate(joined.model_dump(exclude_unset=True) | fields | {"name": first["name"]})
        write_atomic(out / SUMMARY_FILE, content.content())
    return [run for run in wanted if run not in records]


def _read_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of a finished run directory, and return them.

    Raises:
        RunDirError: the run has not finished, or the folder is not a run directory.
    """
    for name in (SETTINGS_FILE, SUMMARY_FILE):
        if not (folder / name).is_file():
            raise RunDirError(f"{folder} contains no {name}. Pass directories of finished 'fedloom run' commands")
    content = check_regular_file(folder / SETTINGS_FILE).read_bytes()
    check_digest(folder / SETTINGS_FILE, content)
    try:
        return update_document(tomllib.loads(content.decode()))
    except ValueError as error:
        raise RunDirError(f"{folder / SETTINGS_FILE} is damaged: {error}. Run the experiment again") from None


def _check_equal(folders: Sequence[Path], summaries: Mapping[Path, Summary]) -> None:
    """Raise an error if directories contain different metrics for the same run."""
    figures = dict[tuple[str, int], tuple[Path, pa.Table]]()
    for folder in folders:
        if not (folder / METRICS_FILE).exists():
            continue
        table = pq.read_table(folder / METRICS_FILE)
        for run in summaries[folder].runs:
            key = run.method, run.seed
            rows = select_runs(table, [key])
            other, before = figures.setdefault(key, (folder, rows))
            if not rows.equals(before):
                raise RunDirError(
                    f"{run.method}, seed {run.seed}, has different results in {folder} than in "
                    f"{other}. Merge only one of the two"
                )


def _merge_tables(
    name: str, folders: Sequence[Path], runs: Sequence[tuple[tuple[str, int], Path]], seeds: Sequence[int]
) -> list[pa.Table]:
    """Return a file's rows in the order of the runs or, for a table of clients, of the seeds."""
    tables = {folder: _read_parquet(folder / name) for folder in folders if (folder / name).exists()}
    if not tables:
        return []
    columns = next(iter(tables.values())).column_names
    if "method" in columns and any(
        label for table in tables.values() for label in table["method"].unique().to_pylist()
    ):
        order = runs if name in (METRICS_FILE, TIMINGS_FILE) else sorted(runs)
        parts = [select_runs(tables[folder], [run]) for run, folder in order if folder in tables]
        return [part for part in parts if part.num_rows]
    of_first = any(name == analysis_file(kind) and a.answer is not Analysis.answer for kind, a in ANALYSES.items())
    if of_first or "seed" not in columns:
        return [tables[folders[0]]] if folders[0] in tables else []
    parts_by_seed = list[pa.Table]()
    for seed in seeds:
        rows = [t.filter(pa.array([s == seed for s in t["seed"].to_pylist()], pa.bool_())) for t in tables.values()]
        parts_by_seed += [part for part in rows if part.num_rows][:1]
    return parts_by_seed


def _read_parquet(path: Path) -> pa.Table:
    """Return a table with its original column types. Parquet files change the names of list elements."""
    table = pq.read_table(path)
    fields = [f.with_type(pa.list_(f.type.value_type)) if pa.types.is_list(f.type) else f for f in table.schema]
    return table.cast(pa.schema(fields))


def _order_warnings(warnings: Sequence[str], runs: Sequence[tuple[str, int]], seeds: Sequence[int]) -> tuple[str, ...]:
    """Return warnings in the order of a single experiment: data by seed, then individual runs, then all others."""
    heads = [*(f"data, seed {seed}: " for seed in seeds), *(f"{label}, seed {seed}: " for label, seed in runs)]

    def place(sentence: str) -> int:
        return next((k for k, head in enumerate(heads) if sentence.startswith(head)), len(heads))

    return tuple(sorted(dict.fromkeys(warnings), key=place))
