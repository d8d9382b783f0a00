"""Who gains: every site alone and together, recomputed with SciPy and statsmodels from what was recorded."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from recorded import Recording
from scipy import stats
from statsmodels.stats.multitest import multipletests
from typer.testing import CliRunner

from fedloom.lab import report
from fedloom.lab.cli import app
from fedloom.lab.report.comparison.gains import (
    MAX_LISTED_SITES,
    MEAN_ROWS,
    gains_csv,
    gains_html,
    gains_latex,
    site_gains,
)
from fedloom.lab.report.numbers import method_rows
from fedloom.lab.report.overview import report_notes
from fedloom.lab.report.reading import read_runs
from tests import hospitals

EXPERIMENT = """
name = "hospitals"
rounds = 3
seeds = [0, 1, 2, 3, 4]
[data]
source = "csv"
path = "{path}"
target = "died"
client_column = "hospital"
impute = true
task = "binary"
categorical = ["sex", "ward"]
drop = ["patient_id", "troponin_hs"]
missing = ["-9"]
[partition]
kind = "natural"
folds = 5
[model]
kind = "softmax"
[[method]]
algorithm = "local"
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "centralized"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three hospitals of 400, 150 and 20 patients, the last with one event, which folds never test."""
    place = tmp_path_factory.mktemp("gains")
    table = hospitals.everyone(place / "all.csv", sites=("Celle", "Dorn", "Esche"), drop=(hospitals.LEAK,))
    (place / "e.toml").write_text(EXPERIMENT.format(path=table))
    result = CliRunner().invoke(app, ["run", str(place / "e.toml"), "--out", str(place / "run")])
    assert result.exit_code == 0, result.output
    return place / "run"


def make_client_record(folder: Path, method: str) -> np.ndarray:
    """AUROC ``[5, 3]`` by seed and client at the last round."""
    table = pq.read_table(folder / "metrics.parquet")
    for name, value in (("method", method), ("part", "test"), ("metric", "auroc"), ("round", 3)):
        table = table.filter(pc.equal(table[name], value))
    values = np.full((5, 3), np.nan)
    for row in table.to_pylist():
        if row["client"] >= 0:
            values[row["seed"], row["client"]] = row["value"]
    return values


def records(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_gains_of_a_run_are_those_of_scipy_and_statsmodels(folder: Path, tmp_path: Path) -> None:
    report.write_report([folder], tmp_path / "r.html", charts=False)
    lines = records((tmp_path / "r" / "sites.csv").read_text())
    assert [line["site"] for line in lines] == ["Celle", "Dorn", "Esche", *MEAN_ROWS]
    difference = make_client_record(folder, "fedavg") - make_client_record(folder, "local")
    assert np.isfinite(difference[:, :2]).all()
    assert np.isnan(difference[:, 2]).all()
    parts = pq.read_table(folder / "partition.parquet").to_pandas()
    sizes = parts.pivot(index="seed", columns="client", values="size").to_numpy()
    weighted = [np.average(difference[s, :2], weights=sizes[s, :2]) for s in range(5)]
    columns = [difference[:, 0], difference[:, 1], difference[:, :2].mean(1), np.array(weighted)]
    tested = parts.pivot(index="seed", columns="client", values="tested").to_numpy()
    ratios = [*(tested.sum(0) / sizes.sum(0))[:2], *[tested.sum() / sizes.sum()] * 2]
    errors = [stats.sem(column) * math.sqrt(1 + 5 * ratio) for column, ratio in zip(columns, ratios, strict=True)]
    p = [2 * stats.t.sf(abs(column.mean()) / error, 4) for column, error in zip(columns, errors, strict=True)]
    rejections, corrected, *_ = multipletests(p, alpha=0.05, method="holm")
    order = np.argsort(p, kind="stable")
    step = {int(k): min(place, rejections.sum()) for place, k in enumerate(order)}
    for k, (line, column) in enumerate(zip([*lines[:2], *lines[3:]], columns, strict=True)):
        assert float(line["gain"]) == pytest.approx(column.mean(), abs=1e-10)
        assert float(line["p"]) == pytest.approx(p[k])
        assert float(line["p_holm"]) == pytest.approx(corrected[k])
        interval = stats.t.interval(1 - 0.05 / (4 - step[k]), 4, column.mean(), errors[k])
        assert float(line["half_width"]) == pytest.approx((interval[1] - interval[0]) / 2)
        decided = "better" if interval[0] > 0 else "worse" if interval[1] < 0 else "inconclusive"
        assert line["verdict"] == decided
        assert line["together_method"] == "fedavg"  # centralized is no federation
    assert [float(line["samples"]) for line in lines[:3]] == pytest.approx(sizes.mean(0))


def test_a_site_without_a_result_is_named_with_the_reason(folder: Path) -> None:
    runs = read_runs([folder])
    tables = site_gains(runs, method_rows(runs), "auroc")
    line = tables[0].lines[2]
    low, high = min(line.samples), max(line.samples)
    size = f"{low}" if low == high else f"{low} to {high}"
    sentence = (
        f"Esche ({size} samples, 1 event in training) has no AUROC, because its test sets contain only one class."
    )
    assert (line.verdict, line.words, line.reason) == ("not tested", "not tested (no result)", sentence)
    assert sentence in gains_html(tables)
    assert "Events" in gains_html(tables)
    assert records(gains_csv(tables))[2]["gain"] == ""


def test_the_page_opens_with_it(folder: Path, tmp_path: Path) -> None:
    text = report.write_report([folder], tmp_path / "r.html", charts=False).read_text()
    assert text.index('<section id="gains"') == text.index("<section ")
    assert '<a class="skip" href="#gains">' in text


def shown(recording: Recording, folder: Path, lead: str) -> str:
    runs = read_runs([recording.write(folder)])
    tables = site_gains(runs, method_rows(runs), lead)
    latex, page = gains_latex(tables, "a_b"), gains_html(tables)
    rows = [line for line in latex.splitlines() if line.endswith("\\\\")]
    assert len(rows) == sum(1 + len(table.lines) for table in tables)
    assert "Events" not in latex + page  # the tasks of these recordings have no events
    assert {row.count(" & ") for row in rows} <= {5}
    return gains_csv(tables)


def test_lower_errors_are_gains_and_few_seeds_decide_nothing(tmp_path: Path) -> None:
    recording = Recording(methods=4, seeds=3, clients=4, rounds=5, task="regression")
    lines = records(shown(recording, tmp_path / "r", "rmse"))
    assert len(lines) == 6
    assert lines[-1]["verdict"] == "not tested"
    for line in lines[:-1]:
        assert float(line["gain"]) == pytest.approx(float(line["alone"]) - float(line["together"]), abs=1e-9)
        assert (line["verdict"], line["p"], line["events"]) == ("not tested", "", "")
        assert line["reason"] == "fewer than five seeds"


def test_many_sites_and_runs_without_training_alone_have_no_table(tmp_path: Path) -> None:
    assert (
        shown(Recording(methods=4, seeds=2, clients=MAX_LISTED_SITES + 1, rounds=5), tmp_path / "many", "accuracy")
        == ""
    )
    assert shown(Recording(methods=2, seeds=2, clients=4, rounds=5), tmp_path / "no-local", "accuracy") == ""
    few = Recording(methods=4, seeds=2, clients=MAX_LISTED_SITES, rounds=5)
    assert len(records(shown(few, tmp_path / "few", "accuracy"))) == MAX_LISTED_SITES + 2


def test_numbered_clients_are_sites_where_the_partition_cuts_by_site(tmp_path: Path) -> None:
    folder = Recording(methods=4, seeds=2, clients=4, rounds=5).write(tmp_path / "r")
    table = pq.read_table(folder / "partition.parquet")
    numbers = [str(client) for client in table["client"].to_pylist()]
    pq.write_table(table.set_column(table.column_names.index("name"), "name", [numbers]), folder / "partition.parquet")
    runs = read_runs([folder])
    assert site_gains(runs, method_rows(runs), "accuracy") == []
    settings = folder / "experiment.toml"
    settings.write_text(settings.read_text().replace('kind = "mixed"', 'kind = "natural"'))
    runs = read_runs([folder])
    assert len(site_gains(runs, method_rows(runs), "accuracy")) == 1


def test_a_site_that_attacks_is_not_scored(tmp_path: Path) -> None:
    folder = Recording(methods=4, seeds=2, clients=6, rounds=5).write(tmp_path / "r")
    table = pq.read_table(folder / "partition.parquet")
    attacks = pc.equal(table["client"], 2)
    pq.write_table(
        table.set_column(table.column_names.index("attacks"), "attacks", attacks), folder / "partition.parquet"
    )
    runs = read_runs([folder])
    lines = site_gains(runs, method_rows(runs), "accuracy")[0].lines
    assert [line.comparison.seeds for line in lines] == [2, 0, 0, 2, 2, 2, 2, 2]  # client 1 has no test part
    assert lines[1].reason.endswith("none of its samples was tested.")
    assert lines[2].reason.endswith("is an attacker and is not scored.")


def test_the_notes_name_who_is_left_out_of_the_means(folder: Path) -> None:
    runs = read_runs([folder])
    assert "Clients without AUROC, which the means omit: up to 1 of 3; Esche." in report_notes(runs, method_rows(runs))
