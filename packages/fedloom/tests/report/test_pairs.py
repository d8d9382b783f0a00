"""Every method against a reference: one row a method, one family, the same models once, and their natural rival."""

from __future__ import annotations

import csv
import io
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from recorded import Recording
from scipy import stats
from statsmodels.stats.multitest import multipletests
from typer.testing import CliRunner

from fedloom.errors import ConfigError
from fedloom.lab import report
from fedloom.lab.cli import app
from fedloom.lab.report import overview
from fedloom.lab.report.comparison.contenders import Models, are_same_models, select_contenders
from fedloom.lab.report.comparison.criteria import find_highlighted_rows, find_winners
from fedloom.lab.report.comparison.pairs import Pair, compare_pairs, pairs_csv, pairs_latex
from fedloom.lab.report.comparison.paper import results_latex
from fedloom.lab.report.numbers import Estimate, Row, method_rows
from fedloom.lab.report.reading import read_runs
from fedloom.lab.report.run import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six methods with seven seeds; FedProx has the models of FedAvg."""
    path = Recording(methods=6, seeds=7, clients=10, rounds=10).write(tmp_path_factory.mktemp("runs") / "pairs")
    table = pq.read_table(path / "metrics.parquet")
    copies = table.filter(pc.equal(table["method"], "fedavg"))
    place = table.column_names.index("method")
    copies = copies.set_column(place, "method", pa.array(["fedprox"] * len(copies)))
    table = pa.concat_tables([table.filter(pc.not_equal(table["method"], "fedprox")), copies.cast(table.schema)])
    pq.write_table(table, path / "metrics.parquet")
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return read_runs([folder])[0]


@pytest.fixture(scope="module")
def rows(run: Run) -> list[Row]:
    return method_rows([run])


def test_one_row_a_method_and_the_rival_of_hybrid_models(run: Run, rows: list[Row]) -> None:
    used = {row.method: row.model for row in select_contenders([run], rows)}
    assert used == {"fedavg": "global", "fedprox": "global", "local": "personal", "ditto": "hybrid", "flame": "hybrid",
                    "fedacs": "personal", "local or fedavg": "hybrid"}  # fmt: skip
    personal = {row.method: row.model for row in select_contenders([run], rows, "personal")}
    assert personal == {"fedavg": "global", "fedprox": "global", "local": "personal", "ditto": "personal",
                        "flame": "personal", "fedacs": "personal"}  # fmt: skip
    assert select_contenders([run], rows, "all") == rows
    assert "local or fedavg" not in {
        r.method for r in select_contenders([run], [r for r in rows if r.method != "local"])
    }


def test_the_rival_is_each_clients_better_one_on_validation(run: Run, rows: list[Row], folder: Path) -> None:
    rival = select_contenders([run], rows)[-1]
    table = pq.read_table(folder / "metrics.parquet").to_pandas()
    last = table[(table["round"] == 10) & (table["client"] >= 0) & (table["metric"] == "accuracy")]
    for seed in range(7):
        own = last[last["seed"] == seed].set_index(["method", "model", "part", "client"])["value"]
        values = []
        for client in range(10):
            local, shared = (
                [own[m, k, part, client] for part in ("validation", "test")]
                for m, k in (("local", "personal"), ("fedavg", "global"))
            )
            values.append(shared[1] if shared[0] > local[0] else local[1])
        assert rival.figures["accuracy"].by_seed[seed] == pytest.approx(np.nanmean(values))
        assert rival.figures["accuracy/worst10"].by_seed[seed] == pytest.approx(np.nanmin(values))


def recomputed(
    run: Run, rows: list[Row], reference: str, doubles: tuple[str, ...] = ("fedprox",)
) -> dict[str, tuple[float, float, bool]]:
    """Raw p, Holm's p and verdict of every distinct model, by SciPy and statsmodels from the result of every seed."""
    means = {row.method: row.figures["accuracy"].by_seed for row in select_contenders([run], rows)}
    names = [m for m in means if m not in (reference, *doubles)]
    p = [stats.ttest_rel(*([means[k][s] for s in range(7)] for k in (m, reference))).pvalue for m in names]
    rejections, holm, *_ = multipletests(p, method="holm")
    return {m: found for m, *found in zip(names, p, holm, rejections, strict=True)}


@pytest.mark.parametrize("reference", ["local", "flame", "local or fedavg"])
def test_pairs_are_one_family_by_scipy_and_statsmodels(reference: str, run: Run, rows: list[Row]) -> None:
    found = {pair.row.method: pair for pair in compare_pairs([run], rows, reference)}
    fresh = recomputed(run, rows, reference)
    assert found.keys() == fresh.keys() | {"fedprox"}
    for method, (p, holm, rejected) in fresh.items():
        one = found[method].comparison
        assert one is not None
        assert (one.p, one.holm, one.significant) == (pytest.approx(p), pytest.approx(holm), rejected)
        assert one.significant == (abs(one.mean) > one.half)
        better = "better" if one.mean > 0 else "worse"
        assert found[method].verdict == (better if rejected else "inconclusive")
    assert found["fedprox"].comparison == found["fedavg"].comparison


def test_the_same_models_are_no_test(run: Run, rows: list[Row]) -> None:
    found = {pair.row.method: pair for pair in compare_pairs([run], rows, "fedavg")}
    assert (found["fedprox"].words, found["fedprox"].comparison) == ("not tested (same models)", None)
    leader = find_winners(
        [run], select_contenders([run], [r for r in rows if r.method in ("fedavg", "fedprox", "fedacs")]), "accuracy"
    )
    assert len(leader[0].rivals) + len(leader[0].equals) <= 2
    apart = [r for r in rows if r.method in ("fedavg", "fedprox")]
    text = overview.render_cards([run], apart)
    assert "The models of fedprox are the same." in text
    assert "equal to" not in text


@pytest.mark.parametrize("better", ["local", "fedavg"])
def test_the_rival_is_no_test_of_its_own_where_it_is_one_of_both(better: str, folder: Path, tmp_path: Path) -> None:
    """Where every client takes the same of both, the families are those without the rival."""
    place = tmp_path / "equal"
    shutil.copytree(folder, place)
    table = pq.read_table(place / "metrics.parquet").to_pandas()
    methods = {better, "fedprox"} if better == "fedavg" else {better}
    chosen = (table["part"] == "validation") & table["method"].isin(methods)
    table.loc[chosen, "value"] = np.where(table.loc[chosen, "metric"].str.startswith("loss"), -1.0, 2.0)
    pq.write_table(pa.Table.from_pandas(table, preserve_index=False), place / "metrics.parquet")
    run = read_runs([place])[0]
    shown = select_contenders([run], method_rows([run]))
    own, rival = (next(k for k, row in enumerate(shown) if row.method == m) for m in (better, "local or fedavg"))
    for name, figure in shown[rival].figures.items():
        assert figure.by_seed == pytest.approx(shown[own].figures[name].by_seed, nan_ok=True)
    without = find_winners([run], [row for row in shown if row is not shown[rival]], "accuracy")
    for one, other in zip(find_winners([run], shown, "accuracy"), without, strict=True):
        assert (one.lead, one.half) == (pytest.approx(other.lead), pytest.approx(other.half))
    for reference in [row.method for row in shown if row.method not in ("fedprox", "local or fedavg")]:
        found = {pair.row.method: pair for pair in compare_pairs([run], method_rows([run]), reference)}
        for method, (_, holm, rejected) in recomputed(run, shown, reference, ("fedprox", "local or fedavg")).items():
            assert found[method].comparison is not None
            assert found[method].comparison[3:5] == (pytest.approx(holm), rejected)
        assert (found["local or fedavg"].reason == "same models") == (reference == better)


@pytest.mark.parametrize("models", ["best-on-validation", "personal", "all"])
def test_cards_and_pairs_of_a_page_are_about_the_same_models(models: Models, folder: Path, tmp_path: Path) -> None:
    page = report.write_report([folder], tmp_path / "r.html", compare_model=models, charts=False).read_text()
    cards = set(re.findall(r'<p class="who">([^<]+) <span class="model" data-model="(\w+)"', page))
    compared = {(pair.row.method, pair.row.model) for pair in compare_pairs(*_read(folder), None, models)}
    assert cards
    assert cards <= compared | {("local", "personal")} or models == "all"
    assert models != "personal" or "hybrid" not in {model for _, model in cards}


def _read(folder: Path) -> tuple[list[Run], list[Row]]:
    runs = read_runs([folder])
    return runs, method_rows(runs)


def test_methods_without_a_result_are_not_the_same_models(rows: list[Row]) -> None:
    lost = [replace(r, figures={"accuracy": Estimate({0: math.nan})}) for r in rows[:2]]
    assert not are_same_models(*lost)


def test_csv_and_latex_have_what_the_pairs_have(run: Run, rows: list[Row]) -> None:
    found = compare_pairs([run], rows, "local")
    table = list(csv.DictReader(io.StringIO(pairs_csv(found))))
    assert [row["method"] for row in table] == [pair.row.method for pair in found]
    for row, pair in zip(table, found, strict=True):
        assert pair.comparison is not None
        assert float(row["difference"]) == pytest.approx(pair.comparison.mean)
        assert float(row["p_holm"]) == pytest.approx(pair.comparison.holm)
        assert row["verdict"] == pair.verdict
    lines = pairs_latex(found, "a_b").splitlines()
    body = dict(zip([p.row.method for p in found], lines[lines.index("\\midrule") + 1 :], strict=False))
    for pair in found:
        assert ("mathbf" in body[pair.row.method]) == (pair.verdict == "better")
        assert pair.verdict in body[pair.row.method]
    assert any(r"a\_b: every method compared with local" in line for line in lines)


def test_fewer_seeds_than_five_decide_nothing(tmp_path: Path) -> None:
    few = read_runs([Recording(methods=4, seeds=4, rounds=5).write(tmp_path / "few")])
    found: list[Pair] = compare_pairs(few, method_rows(few), "local")
    assert {(pair.verdict, pair.reason) for pair in found} == {("not tested", "fewer than five seeds")}
    assert "dagger" not in results_latex(few, method_rows(few))


def test_repetitions_of_one_run_decide_nothing(folder: Path, tmp_path: Path) -> None:
    """Seeds with which two methods only repeat a run are no sample; against a method that varies they are."""
    place = tmp_path / "repeated"
    shutil.copytree(folder, place)
    table = pq.read_table(place / "metrics.parquet").to_pandas()
    fixed = table["method"].isin(["local", "ditto"])
    copies = [table[fixed & (table["seed"] == 0)].assign(seed=seed) for seed in range(7)]
    table = pd.concat([table[~fixed], *copies])
    pq.write_table(pa.Table.from_pandas(table, preserve_index=False), place / "metrics.parquet")
    runs, rows = _read(place)
    found = {pair.row.method: pair for pair in compare_pairs(runs, rows, "local")}
    assert (found["ditto"].verdict, found["ditto"].comparison and found["ditto"].comparison.seeds) == ("not tested", 1)
    fresh = recomputed(runs[0], rows, "local", ("fedprox", "ditto", "local or fedavg"))
    for method, (p, holm, rejected) in fresh.items():
        one = found[method].comparison
        assert one is not None
        assert (one.p, one.holm, one.significant) == (pytest.approx(p), pytest.approx(holm), rejected)
    (note,) = (note for note in overview.report_notes(runs, rows) if "other seeds are identical" in note)
    assert note.startswith("With local, ditto, runs with other seeds are identical to the last digit, because")


def test_the_result_table_marks_the_best_and_what_is_not_significantly_worse(run: Run, rows: list[Row]) -> None:
    shown = select_contenders([run], rows)
    found = find_highlighted_rows(shown, ["accuracy", "bytes_up"])
    assert found.keys() == {"accuracy"}
    means = {row.method: row.figures["accuracy"].mean for row in shown}
    best = max(means, key=means.__getitem__)
    fresh = recomputed(run, rows, best)
    assert {shown[i].method for i in found["accuracy"].best} - {"fedprox"} == {best}
    assert {shown[i].method for i in found["accuracy"].not_worse} - {"fedprox"} == {
        m for m, f in fresh.items() if not f[2]
    }
    lines = results_latex([run], rows).splitlines()
    body = lines[lines.index("\\midrule") + 1 : lines.index("\\bottomrule")]
    assert len(body) == len(shown)
    assert sum("mathbf" in re.split(" & ", line)[2] for line in body) == len(found["accuracy"].best)
    every = results_latex([run], rows, None, "all").splitlines()
    assert len(every) == len(lines) + len(rows) - len(shown)


def test_the_command_writes_pairs_and_refuses_what_is_not_there(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    found = CliRunner().invoke(app, ["report", str(folder), "--out", str(out), "--baseline", "local"])
    assert found.exit_code == 0, found.output
    assert "Every method compared with local" in out.read_text()
    assert (tmp_path / "r" / "pairs.csv").read_text().count("\n") == 7
    assert "\\toprule" in (tmp_path / "r" / "pairs.tex").read_text()
    wrong = CliRunner().invoke(app, ["report", str(folder), "--out", str(out), "--baseline", "locl"])
    assert (wrong.exit_code, "did you mean 'local'?" in wrong.output) == (2, True)
    wrong = CliRunner().invoke(app, ["report", str(folder), "--out", str(out), "--compare-model", "mine"])
    assert (wrong.exit_code, "allowed: all, best-on-validation, personal" in wrong.output) == (2, True)
    with pytest.raises(ConfigError, match="method to compare with"):
        report.write_report([folder], out, baseline="nobody")


def test_runs_under_other_attacks_have_references_of_their_own(tmp_path: Path) -> None:
    recording = Recording(methods=4, seeds=5, clients=6, rounds=5)
    runs = read_runs([replace(recording, attack=a, seed=k).write(tmp_path / f"r{k}") for k, a in enumerate((0.0, 0.2))])
    found = compare_pairs(runs, method_rows(runs), None)
    assert {(pair.row.run, pair.reference.name) for pair in found} == {("r0", "local · r0"), ("r1", "local · r1")}
    assert {pair.reference.run for pair in compare_pairs(runs, method_rows(runs), "local · r1")} == {"r1"}
