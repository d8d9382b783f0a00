"""Files that are made to hang, to fill memory or to break a parser: every command that reads them gives a sentence."""

from __future__ import annotations

import csv
import gzip
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from fedloom import load
from fedloom.data.sources.table import cells, conversion
from fedloom.errors import ConfigError, DataError
from fedloom.lab.cli import app
from fedloom.storage import read_toml

pytestmark = pytest.mark.attack("hostile files")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(*words: object, code: int = 2) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
    return result.output


@pytest.mark.parametrize(
    "name", ["t.csv", "t.csv.gz", "t.parquet", "t.npz", "a.zip", "train-images-idx3-ubyte", "a.json"]
)
def test_a_pipe_is_no_data(name: str) -> None:
    os.mkfifo(name)
    assert "is a pipe, socket or device. Use a regular file" in said("data", f"./{name}")
    Path("e.toml").write_text(f'[data]\nsource = "./{name}"\n[[method]]\nalgorithm = "fedavg"\n')
    assert "is a pipe" in said("run", "e.toml")


def test_a_pipe_in_a_folder_of_data_is_left_out() -> None:
    Path("t").mkdir()
    os.mkfifo("t/a.csv")
    Path("t/b.csv").write_text("a,y\n1,0\n2,1\n")
    assert len(load("./t")) == 2


@pytest.mark.parametrize("command", ["run", "tune", "bench", "deploy init"])
def test_a_pipe_is_no_experiment(command: str) -> None:
    os.mkfifo("e.toml")
    assert "it is a pipe" in said(*command.split(), "e.toml")


HOSTILE = {
    "arrays in arrays": "a = " + "[" * 5000 + "]" * 5000,
    "tables in tables": "a = " + "{a=" * 5000 + "1" + "}" * 5000,
    "dotted": "a." * 3_000 + "a = 1",
    "long number": "rounds = " + "9" * 5000,
    "long exponent": "rounds = 1e" + "9" * 5000,
    "not UTF-8": "a = \udcff",
    "zero byte": "a = '\0'",
    "huge number": f"rounds = {2**70}\n[data]\nsource='digits'\n[[method]]\nalgorithm='fedavg'",
    "inf": "rounds = inf\n[data]\nsource='digits'\n[[method]]\nalgorithm='fedavg'",
    "data is a list": "data = [1]\nmethod = [{algorithm='fedavg'}]",
    "method is a table": "[data]\nsource='digits'\n[method]\nalgorithm='fedavg'",
    "methods are numbers": "method = [1, 2]\n[data]\nsource='digits'",
    "algorithm is a date": "[data]\nsource='digits'\n[[method]]\nalgorithm=1979-05-27",
    "algorithm is a list": "[data]\nsource='digits'\n[[method]]\nalgorithm=['fedavg']",
    "source is a table": "[data.source]\na=1\n[[method]]\nalgorithm='fedavg'",
    "label is a list": "[data]\nsource='digits'\n[[method]]\nalgorithm='fedavg'\nlabel=[1]",
    "kind is a list": "[data]\nsource='digits'\n[partition]\nkind=['iid']\n[[method]]\nalgorithm='fedavg'",
    "name with a slash": "name='../../x'\n[data]\nsource='digits'\n[[method]]\nalgorithm='fedavg'",
    "name with a backslash": "name='a\\b'\n[data]\nsource='digits'\n[[method]]\nalgorithm='fedavg'",
    "space of lists": "[data]\nsource='digits'\n[[method]]\nalgorithm='fedavg'\n[tune.space]\nall=[[1]]",
    "empty": "",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("command", ["run", "tune", "deploy init"])
def test_a_hostile_experiment_file_gets_a_sentence(name: str, command: str) -> None:
    Path("e.toml").write_bytes(HOSTILE[name].encode("utf-8", "surrogateescape"))
    output = said(*command.split(), "e.toml")
    assert output.startswith("error: ")
    assert len(output) < 2000
    assert os.listdir() == ["e.toml"]


@pytest.mark.parametrize("name", ["arrays in arrays", "tables in tables", "long number"])
def test_reading_toml_raises_one_kind_of_error(name: str) -> None:
    Path("e.toml").write_text(HOSTILE[name])
    with pytest.raises(ConfigError, match=r"e\.toml"):
        read_toml(Path("e.toml"), "experiment file")


def test_a_byte_order_mark_is_no_part_of_a_toml_file() -> None:
    Path("e.toml").write_bytes(b"\xef\xbb\xbfrounds = 2\r\n")
    assert read_toml(Path("e.toml"), "experiment file") == {"rounds": 2}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"rounds = 2\nname = 'caf\xe9'", "line 2 is not valid UTF-8. Save the file as UTF-8"),
        ("rounds = 2".encode("utf-16"), "line 1 is not valid UTF-8"),
        (b"rounds = 2\nrounds = 3", r"A key is given twice. Leave one of them out \(at "),
        (
            b"[data]\na = 1\n[data]",
            r"The table \[data\] is given twice. Write all its keys under one heading \(at line 3",
        ),
        (b"[a.b]\n[a.b]", r"The table \[a\.b\] is given twice"),
    ],
)
def test_what_editors_do_to_a_toml_file_has_its_cure(content: bytes, sentence: str) -> None:
    Path("e.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"e\.toml is not a TOML file: {sentence}"):
        read_toml(Path("e.toml"), "experiment file")


def test_one_text_that_many_rows_of_a_parquet_file_share_is_refused_in_little_memory() -> None:
    schema = pa.schema([("a", pa.string()), ("y", pa.int64())])
    group = pa.table({"a": pa.array(["x" * 1_000_000] * 100), "y": range(100)}, schema)
    with parquet.ParquetWriter("t.parquet", schema, compression="zstd") as writer:
        for _ in range(20):
            writer.write_table(group)
    assert Path("t.parquet").stat().st_size < 30_000
    code = "import fedloom as fl, resource as r\ntry: fl.load('./t.parquet')\nexcept Exception as e: print(e)\n"
    code += "print(r.getrusage(r.RUSAGE_SELF).ru_maxrss)"
    plain = "import fedloom.data.sources.tabular, resource as r; print(r.getrusage(r.RUSAGE_SELF).ru_maxrss)"
    runs = [
        subprocess.run([sys.executable, "-c", c], capture_output=True, text=True, check=True) for c in (code, plain)
    ]
    sentence, peak = runs[0].stdout.splitlines()
    assert re.search(r"column 'a' unpacks to at least [\d,]+ bytes", sentence)
    assert int(peak) - int(runs[1].stdout) < 400_000  # kB; 2 GB of text


def test_texts_of_a_parquet_file_read_as_before() -> None:
    texts = ["b", None, "a", "b", ""]
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())):
        table = pa.table({"t": pa.array(texts).cast(kind), "x": [1.0, 2, 3, 4, 5], "y": [0, 1, 0, 1, 0]})
        parquet.write_table(table, "t.parquet")
        data = load("./t.parquet", categorical=["t"], impute=True)
        column: Any = data.prepare.columns[0] if data.prepare is not None else None
        assert column.names == ("a", "b")
        assert data.x[:, 0].nan_to_num(-1).tolist() == [1, -1, 0, 1, -1]


def test_a_column_of_lists_is_refused_before_it_is_read() -> None:
    parquet.write_table(pa.table({"x": [1.0, 2], "l": [[1] * 9, [2]], "y": [0, 1]}), "t.parquet")
    assert "column 'l' contains lists" in said("data", "./t.parquet")
    assert len(load("./t.parquet", drop=["l"])) == 2


def test_a_row_without_end_is_refused_where_it_becomes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "MAX_ROW_CHARACTERS", 10_000)
    endless = [b"a,y\n" + b"1" * 20_000, b'a,y\n"' + b"1\n" * 9000, b"a,y\n" + b"1," * 9000]
    for content in endless:
        Path("t.csv.gz").write_bytes(gzip.compress(content))
        assert "a row with at least 10,000 characters" in said("data", "./t.csv.gz")


def test_long_rows_are_held_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load("digits")
    lines = [",".join(map(str, [*row.flatten().tolist(), int(y)])) for row, y in zip(whole.x, whole.y, strict=True)]
    Path("t.csv").write_text("\n".join([",".join(f"c{k}" for k in range(65)), *lines]))
    before = load("./t.csv")
    monkeypatch.setattr(cells, "MAX_ROW_CHARACTERS", 1000)
    after = load("./t.csv")
    assert (after.x.tolist(), after.y.tolist()) == (before.x.tolist(), before.y.tolist())


def test_more_classes_than_can_be_are_refused_while_they_are_read() -> None:
    Path("t.csv").write_text("a,y\n" + "".join(f"{k},c{k}\n" for k in range(70_000)) + "x,z\n")
    assert "column 'y': more than 65,536 classes" in said("data", "./t.csv")
    Path("t.csv").write_text("a,y\n" + "".join(f"{k},{k}.5\n" for k in range(70_000)))
    assert len(load("./t.csv", task="regression")) == 70_000


def test_more_classes_than_can_be_are_refused_of_every_source() -> None:
    from fedloom.data import Dataset

    with pytest.raises(DataError, match="65,537 classes; at most 65,536"):
        Dataset.create([[0.0]] * 65_537, [f"c{k}" for k in range(65_537)])


def test_a_text_is_no_name_of_a_class() -> None:
    Path("t.csv").write_text("a,y\n1,b\n2," + "z" * 5000 + "\n")
    output = said("data", "./t.csv")
    assert "column 'y': a cell of 5,000 characters is too long for the name of a class" in output
    assert len(output) < 500


def test_a_long_cell_is_shown_in_short() -> None:
    Path("t.csv").write_text("a,y\n1,0\n" + "z" * 90_000 + ",1\n")
    output = said("data", "./t.csv")
    assert "expected a finite number, got 'zzz" in output
    assert len(output) < 500


def test_very_many_columns_are_refused_and_many_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    header = ",".join(f"c{k}" for k in range(300))
    Path("t.csv").write_text(f"{header}\n" + "1," * 299 + "0\n" + "2," * 299 + "1\n")
    assert load("./t.csv").x.shape == (2, 299)
    monkeypatch.setattr(conversion, "MAX_COLUMNS", 299)
    assert "300 columns, but fedloom reads at most 299" in said("data", "./t.csv")


@pytest.mark.needs("fedloom_clinic")
def test_names_of_a_file_reach_the_terminal_as_text() -> None:
    odd = "\x1b[2Jno\x07\u202e"
    rows = [f"{k},{odd if k % 2 else 'yes'}" for k in range(80)]
    Path("t.csv").write_text("\n".join([f"a{odd},y", *rows]))
    for words in (["init", "t.csv", "--target", "y"], ["data", "./t.csv"], ["data", f"./{odd}.csv"]):
        result = CliRunner().invoke(app, words)
        assert not {"\x1b", "\x07", "\u202e"} & set(result.output), result.output
    assert "\\x1b[2Jno" in CliRunner().invoke(app, ["init", "t.csv", "--target", "y", "--force"]).output


def test_predictions_hold_no_formula() -> None:
    names = ("=cmd|' /C calc'!A0", "@b")
    Path("t.csv").write_text("\n".join(["a,y", *(f"{k},{names[k % 2]}" for k in range(60))]))
    Path("e.toml").write_text(
        "rounds = 1\n[data]\nsource = './t.csv'\n[partition]\nclients = 2\n[[method]]\nalgorithm = 'fedavg'\n"
    )
    assert CliRunner().invoke(app, ["run", "e.toml", "--out", "run"]).exit_code == 0
    Path("new.csv").write_text("a\n" + "".join(f"{k}\n" for k in range(60)))
    said("predict", "run", "new.csv", code=0)
    with Path("predictions.csv").open(newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert any(cell.startswith("'=cmd") or cell == "'@b" for cell in cells)
    assert not any(cell.startswith(("=", "@")) for cell in cells)
