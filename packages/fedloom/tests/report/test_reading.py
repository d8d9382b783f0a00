"""A directory that is not a readable run is refused with a sentence, and nothing is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recorded import SPLIT

from fedloom.errors import RunDirError
from fedloom.lab import report
from fedloom.lab.report.reading import read_runs


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Path:
    return shutil.copytree(small, tmp_path / "copy")


def damage_nothing_there(run: Path) -> None:
    shutil.rmtree(run)


def damage_metrics_missing(run: Path) -> None:
    (run / "metrics.parquet").unlink()


def damage_settings_missing(run: Path) -> None:
    (run / "experiment.toml").unlink()


def damage_metrics_torn(run: Path) -> None:
    data = (run / "metrics.parquet").read_bytes()
    (run / "metrics.parquet").write_bytes(data[: len(data) // 2])


def damage_column_gone(run: Path) -> None:
    pq.write_table(pq.read_table(run / "metrics.parquet").drop_columns(["part"]), run / "metrics.parquet")


def damage_column_type(run: Path) -> None:
    table = pq.read_table(run / "metrics.parquet")
    text = pa.array(["x"] * len(table))
    pq.write_table(table.set_column(table.column_names.index("round"), "round", text), run / "metrics.parquet")


def damage_empty_cells(run: Path) -> None:
    table = pq.read_table(run / "metrics.parquet")
    pq.write_table(
        table.set_column(table.column_names.index("seed"), "seed", pa.nulls(len(table), pa.int64())),
        run / "metrics.parquet",
    )


def damage_summary_torn(run: Path) -> None:
    text = (run / "summary.json").read_text()
    (run / "summary.json").write_text(text[: len(text) // 2])


def damage_summary_status(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    summary["runs"][2]["status"] = "fine"
    (run / "summary.json").write_text(json.dumps(summary))


def damage_counts_ragged(run: Path) -> None:
    rows = pq.read_table(run / "partition.parquet").to_pylist()
    rows[0]["counts"].append(3)
    pq.write_table(pa.Table.from_pylist(rows, SPLIT), run / "partition.parquet")


def damage_settings(run: Path) -> None:
    (run / "experiment.toml").write_text("name = \n")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_nothing_there, "is not a directory"),
        (damage_metrics_missing, "contains no metrics.parquet yet. Continue"),
        (damage_settings_missing, "is not a run directory: it contains no experiment.toml. Name"),
        (damage_metrics_torn, r"metrics.parquet is damaged: .*[^.]\. Run the experiment again, or put the file back$"),
        (damage_column_gone, "contains no column 'part'. Its columns are"),
        (damage_column_type, "column 'round' must be int64, got string"),
        (damage_empty_cells, r"column 'seed' contains \d+ empty cells"),
        (damage_summary_torn, r"summary.json is damaged: .*[^.]\. Run the experiment again, or put the file back$"),
        (damage_summary_status, r"runs.2.status: .*got fine"),
        (damage_counts_ragged, "one count per class"),
        (damage_settings, "experiment.toml is damaged"),
    ],
)
def test_what_is_no_run_is_refused(copy: Path, tmp_path: Path, damage, said: str) -> None:
    damage(copy)
    with pytest.raises(RunDirError, match=said):
        report.write_report([copy], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()
    assert not (tmp_path / "out").exists()


def test_no_run_and_the_same_run_twice_are_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="at least one"):
        report.write_report([], tmp_path / "out.html")
    with pytest.raises(RunDirError, match="listed twice"):
        report.write_report([small, small / ".." / small.name], tmp_path / "out.html")


def test_equal_names_get_their_folder(small: Path, tmp_path: Path) -> None:
    for name in ("x", "y"):
        shutil.copytree(small, tmp_path / name / "run")
    assert [run.label for run in read_runs([tmp_path / "x" / "run", tmp_path / "y" / "run"])] == ["x/run", "y/run"]


def test_a_run_that_has_just_begun_is_readable(copy: Path) -> None:
    (copy / "summary.json").unlink()
    (copy / "timings.parquet").unlink()
    (run,) = read_runs([copy])
    assert run.methods
    assert {row["status"] for row in report.result_table(copy).to_pylist()} == {"unfinished"}
