"""The page: self-contained, escaped and complete for every kind of task."""

from __future__ import annotations

import csv
import errno
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import altair as alt
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from recorded import Recording

from fedloom.errors import CheckpointError, ConfigError
from fedloom.lab import report
from fedloom.lab.experiment import Plan, parse
from fedloom.lab.report import document, overview
from fedloom.lab.report.charts.kit import make_slug
from fedloom.lab.report.markup import render_scrolling_table
from fedloom.lab.report.numbers import Estimate, Row, method_rows
from fedloom.lab.report.page import make_figures
from fedloom.lab.report.reading import read_runs
from fedloom.lab.report.run import Key
from fedloom.lab.report.sections import plain_section
from fedloom.lab.report.tables import csv_text, render_latex_table
from fedloom.rundir import RunRecord


@pytest.fixture(scope="module")
def page(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write_report([small], tmp_path_factory.mktemp("report") / "report.html")


def payload(page: Path, id: str) -> list[dict]:
    found = re.search(rf'<script type="application/json" id="{id}">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])


def own_part(page: Path) -> str:
    """The page without the inlined libraries."""
    text = page.read_text()
    return text[: text.index("<script>")]


def test_files_beside_the_page(page: Path) -> None:
    beside = page.with_suffix("")
    figures = {figure["id"] for figure in payload(page, "figures")}
    assert {path.stem for path in beside.glob("*.svg")} == figures
    assert figures >= {
        "curves-accuracy-round",
        "curves-accuracy-bytes",
        "curves-accuracy-samples_backward",
        "clients",
        "fairness",
    }
    assert figures >= {"single-clients", "partition-0", "partition-2", "curves-loss-round"}
    assert all(path.read_text().startswith("<svg") for path in beside.glob("*.svg"))
    assert not list(page.parent.rglob("*.tmp"))


def test_regions_have_different_names_and_no_head_of_a_row_is_empty(page: Path) -> None:
    table = render_scrolling_table("Sites", ["Site", "Threshold"], [["All", "0.1"], ["", "0.2"]])
    assert table.count("<th scope") == 3
    text = own_part(page)
    names = re.findall(r'role="region" aria-label="([^"]+)"', text) + re.findall(r"<h2 [^>]*>([^<]+)<", text)
    assert len(names) > 10
    assert len(set(names)) == len(names)
    section = plain_section(read_runs([page_of_an_analysis(page.parent / "analysis")]), "cox.parquet")
    assert f'aria-label="{section.title}"' not in section.body


def page_of_an_analysis(path: Path) -> Path:
    """Write a run with the table of an analysis."""
    run = Recording(methods=1, seeds=1, rounds=5, clients=3).write(path)
    pq.write_table(pa.table({"column": ["age"], "hazard_ratio": [1.2]}), run / "cox.parquet")
    return run


def test_a_disk_that_is_full_is_a_sentence_and_nothing_is_lost(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fills up at the first file, at a later one, at the last: no half-written file, no draft; the page stays."""
    monkeypatch.setattr("fedloom.lab.report.charts.kit.Figure.svg", lambda _figure: "<svg></svg>")  # takes seconds
    out = report.write_report([small], tmp_path / "report.html")
    files, page = sorted(tmp_path.rglob("*")), out.read_bytes()
    real, left = Path.write_text, [0]

    def write_text(self: Path, text: str, **options: str) -> int:
        left[0] -= 1
        if left[0] < 0:
            real(self, text[:10], **options)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, text, **options)

    monkeypatch.setattr(Path, "write_text", write_text)
    for count in (0, 2, len(files) - 2):  # of the files one is a folder; the page comes last
        left[0] = count
        with pytest.raises(CheckpointError, match="the disk is full. The results of the run are intact. Free some"):
            report.write_report([small], out)
        assert sorted(tmp_path.rglob("*")) == files
        assert out.read_bytes() == page
        assert all(path.read_text().endswith("</svg>") for path in files if path.suffix == ".svg")


@pytest.mark.parametrize("start", list("=+-@\t\r"))
def test_text_that_begins_a_formula_is_text_in_a_spreadsheet(start: str) -> None:
    row = Row("=run", f"{start}HYPERLINK(1)", "fedavg", "global", (), {"loss": Estimate({0: -1.5})})
    [header, cells] = csv.reader(io.StringIO(csv_text([row]), newline=""))
    found = dict(zip(header, cells, strict=True))
    assert (found["run"], found["method"], found["algorithm"]) == (
        "'=run",
        f"'{start}HYPERLINK(1)".replace("\r", " "),
        "fedavg",
    )
    assert found["loss"] == "-1.5"


def test_the_page_loads_nothing(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=\"(?!data:|#)", own_part(page))
    assert not re.search(r"url\((?!#)|@import", own_part(page))
    assert "default-src 'none'" in text
    assert not any("http" in json.dumps({**f["spec"], "$schema": ""}) for f in payload(page, "figures"))


def test_statuses_and_settings_are_on_the_page(page: Path) -> None:
    text = own_part(page)
    assert "diverged after round 7 (seed 2)" in text
    assert "2 of 3 seeds" in text
    assert "kind = &#34;mixed&#34;" in text
    assert "<b>Not tested</b>" in text  # three seeds
    assert "Clear</b>" not in text
    assert "Inconclusive</b>" not in text


def test_the_best_of_a_column_is_bold_and_ties_are_too() -> None:
    results = {"a": (0.9, 0.2), "b": (0.9, 0.1), "c": (0.8, 0.1)}
    rows = [
        Row("", name, name, "global", (), {"accuracy": Estimate({0: good}), "loss": Estimate({0: loss})})
        for name, (good, loss) in results.items()
    ]
    bold = re.findall(r'<span class="best">([\d.]+)</span>', overview.render_results(rows))
    assert bold == ["90.00", "90.00", "0.1000", "0.1000"]


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        ({"fedavg": 100.0, "fedala": 245.0, "near": 109.0}, "(fedala has 245 % of the gradients of fedavg)"),
        ({"a": 100.0, "b": 300.0}, "(b has 300 % of the gradients of a)"),
        ({"fedavg": 100.0, "cheap": 50.0}, "50 to 100 sample gradients. Also compare"),
        ({"fedavg": 100.0, "b": 109.0}, ""),
    ],
)  # fmt: skip
def test_unequal_work_is_named_by_method(work: dict[str, float], sentence: str) -> None:
    done = (RunRecord(method="m", seed=0, status="done"),)
    rows = [Row("", m, m, "global", done, {"samples_backward": Estimate({0: w})}) for m, w in work.items()]
    text = overview._work_notes(rows)
    assert sentence in text
    assert bool(text) == bool(sentence)
    assert "near" not in text


def test_every_control_and_chart_has_a_name(page: Path) -> None:
    text = own_part(page)
    assert text.count('class="chart"') == len(payload(page, "figures")) == text.count('role="img" aria-label="')
    assert not re.search(r"<button[^>]*></button>", text)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'href="#([^"]+)"', text):
        assert target in ids


def test_recorded_text_cannot_become_markup(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    run = Recording(methods=2, seeds=2, rounds=5, clients=3, name=evil).write(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    summary["warnings"] = [evil]
    summary["runs"][0]["reason"] = evil
    (run / "summary.json").write_text(json.dumps(summary))
    out = report.write_report([run], tmp_path / "out.html")
    assert "<img" not in own_part(out)
    assert own_part(out).count("</script>") == own_part(out).count("<script")
    assert evil in {run.summary.runs[0].reason for run in read_runs([run])}


def test_numbers_in_the_csv_are_those_of_the_arrow_table(small: Path) -> None:
    table = report.result_table(small).to_pylist()
    cells = list(csv.DictReader(io.StringIO(csv_text(method_rows(read_runs([small]))))))
    assert [row["method"] for row in cells] == [row["method"] for row in table]
    for cell, row in zip(cells, table, strict=True):
        for name in ("accuracy", "accuracy_common"):
            assert cell[name] == ("" if row[name] is None else repr(float(f"{row[name]:.12g}")))


def test_latex_is_escaped_and_rectangular(small: Path) -> None:
    (run,) = read_runs([small])
    rows = [replace(row, method="a_b & 50%") if row.method == "fedavg" else row for row in method_rows([run])]
    lines = render_latex_table(rows, "x_y").splitlines()
    assert "\\caption{x\\_y}" in lines
    assert any(line.startswith("a\\_b \\& 50\\% & global") for line in lines)
    body = lines[lines.index("\\midrule") + 1 : lines.index("\\bottomrule")]
    assert len({line.replace("\\&", "").count("&") for line in [*body, lines[lines.index("\\toprule") + 1]]}) == 1


@pytest.mark.parametrize(
    ("recording", "title"),
    [
        (Recording(methods=2, seeds=1, clients=3, rounds=2, every=1), "There is only one seed, so there are"),
        (Recording(methods=3, seeds=2, clients=4, rounds=6, task="binary", classes=2), "AUROC"),
        (
            Recording(
                methods=4, seeds=2, clients=5, rounds=8, task="regression", aggregates=False, interrupted="ditto"
            ),
            "RMSE",
        ),
        (Recording(methods=30, seeds=1, clients=4, rounds=10), "apfl 3"),
        (Recording(methods=2, seeds=1, clients=400, rounds=5, classes=40), "clients are shown"),
    ],
    ids=["tiny", "binary", "regression", "many methods", "many clients"],
)
def test_every_kind_of_run_gets_a_page(
    recording: Recording, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.lab.report.charts.kit.Figure.svg", lambda _: "<svg/>")
    out = report.write_report([recording.write(tmp_path / "run")], tmp_path / "report.html")
    assert title in own_part(out)
    assert payload(out, "figures")


def test_runs_with_other_attacks_become_a_robustness_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.lab.report.charts.kit.Figure.svg", lambda _: "<svg/>")
    recording = Recording(methods=2, seeds=2, clients=4, rounds=5)
    runs = [replace(recording, attack=a, seed=i).write(tmp_path / f"run{i}") for i, a in enumerate((0.0, 0.2))]
    out = report.write_report(runs, tmp_path / "report.html")
    curve = next(figure for figure in payload(out, "figures") if figure["id"] == "attacks")
    rows = curve["spec"]["datasets"]["rows"]
    assert {row[rows["columns"].index("x")] for row in rows["rows"]} == {0.0, 0.2}
    assert "attack.fraction" in own_part(out)


def test_the_same_run_gives_the_same_page(
    small: Path, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.lab.report.charts.kit.Figure.svg", lambda _: "<svg/>")
    again = report.write_report([small], tmp_path / "report.html")
    assert again.read_bytes() == page.read_bytes()


def test_latex_has_six_columns_or_those_chosen(small: Path) -> None:
    rows = method_rows(read_runs([small]))
    head = render_latex_table(rows, "x").splitlines()[6]
    assert head.count("&") == 1 + 6
    assert (
        render_latex_table(rows, "x", ["bytes_up", "accuracy_worst10"]).splitlines()[6]
        == "Method & Model & MB up & Worst 10 \\% (\\%) \\\\"
    )
    with pytest.raises(
        ConfigError, match=r"--columns: unknown column 'acuracy'. These runs have the columns .*accuracy_worst10"
    ):
        render_latex_table(rows, "x", ["acuracy"])


def test_a_run_that_exploded_sets_no_axis_and_no_number_has_sixteen_digits(tmp_path: Path) -> None:
    run = Recording(methods=3, seeds=2, rounds=10, clients=4, task="regression", aggregates=False).write(
        tmp_path / "run"
    )
    table = pq.read_table(run / "metrics.parquet")
    bad = pc.and_(pc.equal(table["method"], "local"), pc.not_equal(table["client"], -1))
    values = pc.if_else(bad, pc.multiply(table["value"], 7856937935508588.0), table["value"])
    pq.write_table(table.set_column(table.column_names.index("value"), "value", values), run / "metrics.parquet")
    out = report.write_report([run], tmp_path / "report.html", charts=False)
    assert not re.search(
        r"\d[\d\u202f]{15}", re.sub(r'data-value="[^"]*"', "", own_part(out).partition('id="figures"')[0])
    )
    drawn = {figure.id: figure for figure in make_figures(read_runs([run]), method_rows(read_runs([run])))}
    for id in ("curves-rmse-round", "fairness", "clients", "each-client", "single-clients"):
        assert "Far outside the axis: local" in drawn[id].caption, id
        domains = re.findall(r'"domain": \[(-?[\d.e+-]+), (-?[\d.e+-]+)\]', json.dumps(drawn[id].chart))
        assert domains, id
        assert all(float(end) < 100 for ends in domains for end in ends), id


def test_few_seeds_are_drawn_one_by_one_and_many_as_an_interval(tmp_path: Path) -> None:
    for seeds, single, interval in ((3, True, False), (5, False, True)):
        run = Recording(methods=2, seeds=seeds, rounds=10, clients=4).write(tmp_path / f"run{seeds}")
        drawn = {figure.id: figure for figure in make_figures(read_runs([run]), method_rows(read_runs([run])))}
        for id in ("curves-accuracy-round", "costs"):
            assert any(row["seed"] is not None for row in drawn[id].rows) is single
            assert any(row.get("low") is not None for row in drawn[id].rows) is interval
        assert bool(drawn["fairness"].data["seeds"]) is single


def test_the_bundle_is_made_once_and_anew_when_it_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda *_: made.append(1) or "let x = '</script>';")
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    scripts = document._chart_scripts.__wrapped__
    first = scripts()
    assert scripts() == first
    assert "</script" not in first
    assert len(made) == 1
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text(kept.read_text()[:-10])
    assert scripts() == first
    assert len(made) == 2
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "file"))
    assert scripts() == first
    assert len(made) == 3


def test_every_chart_is_vega_lite(small: Path) -> None:
    runs = read_runs([small])
    for figure in make_figures(runs, method_rows(runs)):
        some = {name: rows[:3] for name, rows in figure.data.items()}  # of rows the schema asks no more than a table
        alt.Chart.from_dict({**figure.chart, "datasets": some}, validate=True)


def test_many_clients_are_a_sample_with_the_worst_by_name(tmp_path: Path) -> None:
    run = Recording(methods=2, seeds=1, clients=2000, rounds=5, classes=4).write(tmp_path / "run")
    runs = read_runs([run])
    drawn = {figure.id: figure for figure in make_figures(runs, method_rows(runs))}
    rows = drawn["single-clients"].rows
    best = next(row["row"] for row in rows if f"worst results of {row['row']}" in drawn["single-clients"].caption)
    worst = {row["client"]: row["value"] for row in rows if row["row"] == best}
    method, model = best.split(" · ")
    points = runs[0].series[Key(method, 0, model, "test", "accuracy")]
    last = np.sort(100 * points.value[(points.round == 5) & np.isfinite(points.value)])
    np.testing.assert_allclose(sorted(worst.values()), last[:40], rtol=1e-4)
    dots = [dot["value"] for dot in drawn["clients"].data["dots"] if dot["row"] == best]
    assert len(dots) < 2000
    assert (min(dots), max(dots)) == pytest.approx((last[0], last[-1]), rel=1e-4)
    assert len(drawn["partition-0"].rows) <= 4000
    out = report.write_report([run], tmp_path / "report.html", charts=False)
    assert out.stat().st_size < 1.5e6


def test_a_run_of_ten_thousand_clients_has_small_files(tmp_path: Path) -> None:
    """Everyone is scored and recorded; the page and the summary keep no entry for each."""
    gen, clients = np.random.default_rng(0), 10_000
    np.save(tmp_path / "x.npy", gen.standard_normal((5 * clients, 4), np.float32))
    np.save(tmp_path / "y.npy", gen.integers(0, 10, 5 * clients, np.uint8))
    document = {
        "name": "many",
        "rounds": 1,
        "data": {"source": "npy", "path": str(tmp_path)},
        "partition": {"kind": "iid", "clients": clients},
        "sampler": {"kind": "uniform", "clients": 20},
        "method": [{"algorithm": "fedavg"}, {"algorithm": "flame"}],
    }
    out = tmp_path / "run"
    Plan(parse(document), out).run()
    recorded = pq.read_table(out / "metrics.parquet", columns=["client"])["client"]
    assert len(recorded.unique()) == clients + 1
    assert (out / "report.html").stat().st_size <= 1.5e6
    assert (out / "summary.json").stat().st_size <= 1e5


def test_small_words() -> None:
    assert make_slug("../a b/c") == "a-b-c"
