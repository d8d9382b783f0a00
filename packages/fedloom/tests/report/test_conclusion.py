"""The answer of a comparison: the same lines in Python, on the terminal and at the head of the page, from the tests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from markupsafe import escape
from recorded import Recording
from typer.testing import CliRunner

from fedloom.lab import report
from fedloom.lab.cli import app
from fedloom.lab.printing import print_results
from fedloom.lab.report.comparison.conclusion import MAX_SHOWN_PAIRS, conclude_runs
from fedloom.lab.report.comparison.recorded import RecordedComparison

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Recording(methods=6, seeds=6, rounds=10, clients=8).write(tmp_path_factory.mktemp("runs") / "six")


@pytest.mark.parametrize("seed", range(6))
def test_the_answer_names_the_methods_that_the_tests_find_better_and_no_other(seed: int, tmp_path: Path) -> None:
    folder = Recording(methods=5, seeds=6, rounds=10, clients=8, seed=seed).write(tmp_path / "run")
    (found,) = conclude_runs([folder])
    table = RecordedComparison(folder).significance().to_pylist()
    methods = {row["method"] for row in table if " or " not in row["method"]}
    better = {row["method"] for row in table if row["verdict"] == "better"} & methods
    winners = re.sub(r"\(.*", "", found.answer.partition(" better than ")[0])
    assert {name for name in methods if re.search(rf"\b{re.escape(name)}\b", winners)} == better
    assert found.answer.startswith("Answer: no method is better") == (not better)
    assert [line.split(", ")[-1].split(" (")[0] for line in found.pairs] == [row["verdict"] for row in table]


def test_fewer_than_five_seeds_have_no_winner(tmp_path: Path) -> None:
    (found,) = conclude_runs([Recording(methods=4, seeds=3, rounds=10, clients=8).write(tmp_path / "three")])
    assert found.answer == "Answer: not tested, because a test needs at least 5 seeds."


def test_it_has_three_to_six_lines_and_names_what_it_leaves_out(run: Path) -> None:
    (found,) = conclude_runs([run])
    assert len(found.pairs) > MAX_SHOWN_PAIRS
    lines = found.lines()
    assert f"  {len(found.pairs) - MAX_SHOWN_PAIRS} more in the report" in lines
    assert len(lines) <= 7
    assert found.lines(None) == [found.answer, *(f"  {line}" for line in found.pairs), found.compared, found.cost]


def test_python_the_terminal_and_the_page_say_the_same(run: Path, tmp_path: Path) -> None:
    (found,) = conclude_runs([run])
    printed = RUNNER.invoke(app, ["report", str(run), "--out", str(tmp_path / "page.html")]).output
    head = (tmp_path / "page.html").read_text().partition("</header>")[0]
    for line in (found.answer, *found.pairs[:MAX_SHOWN_PAIRS], found.compared, found.cost):
        assert line in printed
        assert escape(line) in head
    for line in (found.answer, found.compared, found.cost):
        assert line in repr(RecordedComparison(run))
    assert head.index(escape(found.answer)) < head.index('class="facts"') < head.index('class="notes"')


def test_json_has_the_results_the_tests_and_the_answer(run: Path, tmp_path: Path) -> None:
    printed = RUNNER.invoke(app, ["report", str(run), "--out", str(tmp_path / "page.html"), "--json"])
    found = json.loads(printed.stdout)
    assert found["report"] == str(tmp_path / "page.html")
    assert found["results"] == report.result_table(run).to_pylist()
    assert [pair["verdict"] for pair in found["comparisons"]] == [
        row["verdict"] for row in RecordedComparison(run).significance().to_pylist()
    ]
    assert found["conclusions"][0]["answer"] == conclude_runs([run])[0].answer


def test_the_table_fits_80_columns_and_marks_the_best_row(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = report.result_table(run)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    print_results(table)
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert max(map(len, shown.splitlines())) <= 80
    rows = [line for line in shown.splitlines() if re.search(r"(global|personal|hybrid)", line)]
    assert len(rows) == table.num_rows
    best = max(range(table.num_rows), key=lambda k: table["accuracy"][k].as_py())
    assert [k for k, row in enumerate(rows) if " * " in row] == [best]


def test_no_column_of_the_first_table_of_results_is_missing_its_status_and_work(run: Path, tmp_path: Path) -> None:
    page = report.write_report([run], tmp_path / "page.html", charts=False).read_text()
    table = page.partition('<table class="results">')[2].partition("</table>")[0]
    heads = re.findall(r'data-do="sort">([^<]*)<', table)
    assert heads[:2] == ["Method", "Model"]
    assert heads[3:5] == ["Status", "Sample gradients"]
    assert len(heads) <= 10
    more = re.findall(r'data-do="sort">([^<]*)<', page.partition('<table class="further">')[2].partition("</table>")[0])
    assert not set(more[2:]) & set(heads)
