"""A report has a section for every analysis: of a package where it brings one, else the recorded table."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import fedloom as fl
from fedloom.errors import RunDirError
from fedloom.formats import format_significant
from fedloom.lab import report
from fedloom.lab.report.reading import read_runs
from fedloom.lab.sections import plain_section
from fedloom_clinic.sections import tables

TABLE = "site,dose,days,died\n" + "".join(
    f"{'abc'[k % 3]},{(k * 7 % 11) / 3:.2f},{1 + k * 5 % 17},{int(k % 4 > 0)}\n" for k in range(90)
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a Cox regression, which has a section, and a table of the patients, which has none."""
    folder = tmp_path_factory.mktemp("sections")
    (folder / "t.csv").write_text(TABLE)
    document = {
        "rounds": 1, "partition": {"kind": "natural", "test": 0.2}, "method": [{"algorithm": "local"}],
        "data": {"source": str(folder / "t.csv"), "target": "days", "event": "died", "client_column": "site"},
        "analysis": [{"kind": "cox"}, {"kind": "table-1"}],
    }  # fmt: skip
    fl.experiment.Plan(fl.experiment.parse(document), folder / "run").run()
    return folder / "run"


def test_a_section_of_the_package_and_a_plain_table(run: Path) -> None:
    page = report.write_report([run], run / "report.html").read_text()
    assert 'id="cox"' in page
    assert "Cox regression</h2>" in page
    assert "Table 1</h2>" in page
    assert "90 rows of all sites" in page


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Runs of two methods and two seeds with the analyses of models, of classes and of numbers."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "t.csv").write_text(TABLE)
    folders = []
    for target, task, kinds in (("died", "binary", ("calibration", "conformal", "pooled-importance", "glm", "ridge")),
                          ("dose", "regression", ("conformal",))):  # fmt: skip
        document = {
            "rounds": 2, "seeds": [0, 1], "partition": {"kind": "natural", "test": 0.4},
            "data": {"source": str(folder / "t.csv"), "target": target, "task": task, "client_column": "site"},
            "method": [{"algorithm": "fedavg"}, {"algorithm": "fedavg-ft"}],
            "analysis": [{"kind": kind} for kind in kinds],
        }  # fmt: skip
        fl.experiment.Plan(fl.experiment.parse(document), folder / target).run()
        folders.append(folder / target)
    return folders[0], folders[1]


def test_analyses_of_models_and_regressions_have_sections_with_means_over_seeds(trained: tuple[Path, Path]) -> None:
    page = report.write_report([trained[0]], trained[0] / "report.html").read_text()
    for title, words in (
        ("Calibration", "Brier score"), ("Conformal sets", "Classes in a set"),
        ("Importance of columns", "Metric before"),
        ("Generalized linear model", "Standard error"), ("Ridge regression", "Coefficient"),
    ):  # fmt: skip
        assert f"{title}</h2>" in page
        assert f">{words}</th>" in page
    runs = read_runs([trained[0]])
    section = tables.conformal(runs, [], "")
    recorded = pq.read_table(trained[0] / "conformal.parquet").to_pandas()
    means = recorded.groupby("method", sort=False).coverage.mean()
    assert section.body.count("<tr") == 3
    assert all(f">{format_significant(value)}<" in section.body for value in means)
    numbers = tables.conformal(read_runs([trained[1]]), [], "")
    assert "Width of the interval" in numbers.body
    assert "Classes in a set" not in numbers.body
    assert tables.calibration(read_runs([trained[1]]), [], "") is None


def test_a_plain_table_has_every_recorded_cell(run: Path) -> None:
    section = plain_section(read_runs([run]), "table_1.parquet")
    recorded = fl.analyze("table-1", _data(run)).table
    lines = [*csv.DictReader(io.StringIO(section.files["table_1"]))]
    assert [*lines[0]] == ["run", *recorded.column_names]
    assert len(lines) == recorded.num_rows
    assert section.body.count("<tr") == recorded.num_rows + 1


def _data(run: Path) -> fl.Federation:
    experiment = fl.experiment.read(run / "experiment.toml")
    return experiment.partition(experiment.source.read(None), 0)


def test_a_file_without_a_record_is_no_section_and_a_changed_one_is_refused(run: Path, tmp_path: Path) -> None:
    assert not plain_section(read_runs([run]), "nothing.parquet").body
    path = run / "table_1.parquet"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"dose", b"dosf"))
    with pytest.raises(RunDirError, match="damaged"):
        plain_section(read_runs([run]), "table_1.parquet")
    path.write_bytes(content)
