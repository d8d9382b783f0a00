"""Run directories that somebody else wrote: a report or a sentence; never a traceback, an abort or a file elsewhere."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
from recorded import Recording

from fedloom.errors import CheckpointError, ConfigError, FedloomError, RunDirError
from fedloom.lab import report
from fedloom.lab.report.charts.kit import Figure, layer_chart, mark_layer, number
from fedloom.lab.report.csv_files import render_csv, render_table_csv

pytestmark = pytest.mark.attack("hostile directories")

FORMULAS = ("=cmd|' /C calc'!A0", "+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1")
DEEP = "[" * 100_000
VALUES: tuple[Any, ...] = (
    None, True, -1, 2**31, 2**62, 2**63, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "\x1b[2J", [], [[1]], {},
    {"a": {"b": 1}},
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Recording(methods=2, seeds=1, clients=3, rounds=10, extras=True).write(tmp_path_factory.mktemp("r") / "run")


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny, tmp_path / "run")


def outcome(run: Path) -> str:
    """What a report of a directory comes to: "" or the sentence; any other error is raised."""
    try:
        report.write_report([run], run / "report.html", charts=False)
    except FedloomError as error:
        return str(error)
    return ""


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values lie in a document; of lists only the first item."""
    if at:
        yield at
    items = (
        document.items()
        if isinstance(document, dict)
        else list(enumerate(document[:1]))
        if at and isinstance(document, list)
        else ()
    )
    for key, value in items:
        yield from places(value, (*at, key))


def put(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    changed = json.loads(json.dumps(document))
    inner = changed
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return changed


def test_every_value_of_a_summary_may_be_another(copy: Path, record_property: Any) -> None:
    path = copy / "summary.json"
    document = json.loads(path.read_text())
    tried = refused = 0
    for at in places(document):
        for value in VALUES:
            path.write_text(json.dumps(put(document, at, value)))
            refused += bool(outcome(copy))
            tried += 1
    record_property("tries", tried)
    assert tried > 200
    assert refused > 30


def test_every_value_of_settings_may_be_another(copy: Path, record_property: Any) -> None:
    path = copy / "experiment.toml"
    document = tomllib.loads(path.read_text()) | {"attack": {"kind": "sign-flip", "fraction": 0.5}}
    document["resolved"] = {"versions": {"torch": "2"}}
    tried = 0
    for at in places(document):
        for value in (True, -1, "x", [], [[1]], {}, {"a": {"b": 1}})[tried % 2 :: 2]:
            path.write_text(tomli_w.dumps(put(document, at, value)))
            outcome(copy)
            tried += 1
    record_property("tries", tried)
    assert tried > 50


def columns(table: pa.Table, name: str) -> Iterator[Any]:
    count = len(table)
    yield pa.array([[1]] * count)
    yield pa.array([{"a": 1}] * count)
    yield pa.array([None] * count)
    yield pa.array(["x\x1b"] * count)
    yield pa.array([b"\xff\xfe"] * count)
    yield pa.array([2**63] * count, pa.uint64())
    for value in (-7, 0, 2**40, 2**62):
        yield pa.array([value] * count)
    yield pa.array([float("nan")] * count)
    yield pa.array([1e308, *[float("inf")] * (count - 1)])
    yield pa.array(["=1"] * count).dictionary_encode()


@pytest.mark.parametrize("file", ["metrics", "partition", "timings"])
def test_every_column_of_a_table_may_be_another(file: str, copy: Path, record_property: Any) -> None:
    path = copy / f"{file}.parquet"
    table, tried = pq.read_table(path), 0
    for name in table.column_names:
        for column in columns(table, name):
            tried += 1
            place = table.column_names.index(name)
            pq.write_table(table.set_column(place, name, column), path)
            outcome(copy)
        pq.write_table(table.append_column(name, table[name]), path)
        assert outcome(copy)
    pq.write_table(table.slice(0, 0), path)
    outcome(copy)
    pq.write_table(pa.concat_tables([table, table]), path)
    outcome(copy)
    record_property("tries", tried + len(table.column_names) + 2)


RAW: dict[str, tuple[str, bytes]] = {
    "deep JSON": ("summary.json", DEEP.encode()),
    "deep objects": ("summary.json", b'{"a":' * 50_000),
    "long number": ("summary.json", b'{"name": ' + b"9" * 5000 + b"}"),
    "half of a character": ("summary.json", b'{"name": "\\ud800"}'),
    "deep TOML": ("experiment.toml", b"a = " + DEEP.encode()),
    "long number in TOML": ("experiment.toml", b"a = " + b"9" * 5000),
    "not UTF-8": ("summary.json", b'{"name": "\xff"}'),
    "no Parquet": ("metrics.parquet", b"PAR1" * 9),
}


@pytest.mark.parametrize("name", RAW)
def test_files_that_break_parsers_get_a_sentence(name: str, copy: Path) -> None:
    file, content = RAW[name]
    (copy / file).write_bytes(content)
    assert file in outcome(copy)


@pytest.mark.parametrize("file", ["summary.json", "timings.parquet", "partition.parquet", "confusion.parquet"])
def test_a_pipe_in_a_directory_is_not_waited_for(file: str, copy: Path) -> None:
    (copy / file).unlink(missing_ok=True)
    os.mkfifo(copy / file)
    assert f"{file} is not a regular file" in outcome(copy)


def test_a_client_that_the_partition_has_not_is_refused(copy: Path) -> None:
    table = pq.read_table(copy / "metrics.parquet")
    clients = [5 if client == 2 else client for client in table["client"].to_pylist()]
    place = table.column_names.index("client")
    pq.write_table(table.set_column(place, "client", pa.array(clients)), copy / "metrics.parquet")
    assert "client 5 is not one of the 3" in outcome(copy)


@pytest.mark.parametrize("letter", ["\x07", "\x0b", "\x0c", "\x1b", "\x00", "\ufffe", "\uffff", "\ud800"])
def test_a_chart_with_any_character_becomes_a_picture(letter: str) -> None:
    rows = [{"x": 1.0, f"y{letter}": 2.0, "name": f"a{letter}b"}]
    spec = layer_chart(
        mark_layer("point", {"x": number("x", f"title{letter}"), "color": {"field": "name", "type": "nominal"}})
    )
    svg = Figure("a", "g", f"t{letter}", "t", f"caption{letter}", spec, {"rows": rows}, "wide").svg()
    assert "a\ufffdb" in svg
    assert letter not in svg


@pytest.mark.parametrize("link", ["report", "report.html"])
def test_a_report_is_not_written_through_a_link(link: str, copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "results.csv").write_text("years of work")
    (copy / link).symlink_to(other if link == "report" else other / "results.csv")
    with pytest.raises(ConfigError, match="is a link"):
        report.write_report([copy], copy / "report.html")
    assert [path.read_text() for path in other.iterdir()] == ["years of work"]


def test_links_at_the_names_of_drafts_and_results_are_replaced_not_followed(copy: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    (copy / "report").mkdir()
    for name in (f"report.html.{os.getpid()}.tmp", "report/results.csv", f"report/results.csv.{os.getpid()}.tmp"):
        (copy / name).symlink_to(precious)
    report.write_report([copy], copy / "report.html", charts=False)
    assert precious.read_text() == "years of work"
    assert not (copy / "report" / "results.csv").is_symlink()


def test_nothing_of_a_run_is_written_through_a_link(tmp_path: Path) -> None:
    from fedloom.storage.files import write_atomic
    from fedloom.storage.locks import lock

    precious = tmp_path / "precious"
    precious.write_text("years of work")
    for name in (".a.json.tmp", ".lock"):
        (tmp_path / name).symlink_to(precious)
    with pytest.raises(CheckpointError):
        write_atomic(tmp_path / "a.json", b"{}")
    with pytest.raises(CheckpointError), lock(tmp_path):
        pass
    assert precious.read_text() == "years of work"


@pytest.mark.parametrize("text", FORMULAS)
def test_every_csv_is_inert(text: str) -> None:
    plain = render_csv([text], [[text], {text: text}, [None]])
    table = render_table_csv(pa.table({text: [text, "a"], "n": [-1.0, 1 / 3]})).decode()
    for content in (plain, table):
        for row in csv.reader(io.StringIO(content, newline="")):
            assert not any(cell.startswith(("=", "+", "@", "\t", "\r", "-1+")) for cell in row), row
    assert "0.3333333333333333" in table


def test_a_page_of_a_directory_with_odd_names_is_written_with_its_charts(tmp_path: Path) -> None:
    run = Recording(methods=1, seeds=1, clients=2, rounds=5, classes=2, name="a\ufffe").write(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    summary["classes"] = ["\x0b", "=1+1"]
    (run / "summary.json").write_text(json.dumps(summary))
    report.write_report([run], run / "report.html")
    assert list((run / "report").glob("*.svg"))


def test_what_does_not_fit_together_is_said(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Callable[[], None]:
        raise KeyError("x")

    monkeypatch.setattr("fedloom.lab.report.page.make_figures", broken)
    with pytest.raises(RunDirError, match=r"are inconsistent \(KeyError: 'x'\)"):
        report.write_report([copy], copy / "report.html")
