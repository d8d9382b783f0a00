"""Tables of other programs, and options of text files: one table is the same data set, whoever wrote it."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyarrow import feather

import fedloom as fl
from fedloom.data.sources.table.formats import STATISTICS_READERS, Statistics
from fedloom.errors import ConfigError, DataError
from tests.commands import call

openpyxl = pytest.importorskip("openpyxl")
pyreadstat = pytest.importorskip("pyreadstat")

ROWS = 60
OPTIONS: dict[str, Any] = {
    "target": "ill", "categorical": ["sex"], "impute": True, "days_since": {"admitted": "born"}
}  # fmt: skip
LABELS = {"sex": {1: "f", 2: "m", 3: "unknown"}, "ill": {0: "no", 1: "yes"}}


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)

    def days(start: date, most: int) -> list[date]:
        return [start + timedelta(int(k)) for k in rng.integers(0, most, ROWS)]

    table = pd.DataFrame({
        "age": rng.integers(20, 80, ROWS).astype(float),
        "lab": np.round(rng.normal(1, 0.2, ROWS), 3),
        "sex": rng.choice(["f", "m"], ROWS),
        "born": days(date(1950, 1, 1), 9000),
        "admitted": days(date(2020, 1, 1), 900),
        "ill": rng.choice(["no", "yes"], ROWS),
    })  # fmt: skip
    table.loc[3, "lab"] = np.nan
    return table


def coded(frame: pd.DataFrame, fill: float = np.nan) -> pd.DataFrame:
    """The table as a statistics program has it: numbers for levels, and perhaps a number for missing cells."""
    numbers = {name: frame[name].map({text: k for k, text in LABELS[name].items()}) for name in ("sex", "ill")}
    return frame.assign(**numbers, lab=frame["lab"].fillna(fill))


def write_zip_of_a_mac(frame: pd.DataFrame, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("t.csv", frame.to_csv(index=False))
        archive.writestr("__MACOSX/._t.csv", b"\x00\x05\x16\x07")
        archive.writestr(".DS_Store", b"\x00")


WRITERS: dict[str, Callable[[pd.DataFrame, Path], Any]] = {
    "t.csv": lambda frame, path: frame.to_csv(path, index=False),
    "t.txt": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
    "t.dat": lambda frame, path: frame.to_csv(path, index=False, sep=";", decimal=","),
    "t.xlsx": lambda frame, path: frame.to_excel(path, index=False),
    "t.jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True, date_format="iso"),
    "t.feather": lambda frame, path: feather.write_feather(pa.Table.from_pandas(frame), str(path)),
    "t.parquet.gzip": lambda frame, path: frame.to_parquet(path, compression="gzip"),
    "t.sav": lambda frame, path: pyreadstat.write_sav(
        coded(frame, 99.0), str(path), variable_value_labels=LABELS, missing_ranges={"lab": [99]}
    ),
    "t.dta": lambda frame, path: pyreadstat.write_dta(coded(frame), str(path), variable_value_labels=LABELS),
    "t.xpt": lambda frame, path: pyreadstat.write_xport(frame, str(path), file_format_version=8),
    "mac.zip": write_zip_of_a_mac,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_table_is_the_same_data_set_in_every_format(name: str, frame: pd.DataFrame, tmp_path: Path) -> None:
    WRITERS[name](frame, tmp_path / name)
    got, expected = fl.load(tmp_path / name, **OPTIONS), fl.Dataset.create(frame, **OPTIONS)
    assert torch.equal(got.x.nan_to_num(nan=-1.0), expected.x.nan_to_num(nan=-1.0))
    assert torch.equal(got.y, expected.y)
    assert got.classes == expected.classes == ("no", "yes")
    assert got.prepare.columns == expected.prepare.columns
    days = [(last - first).days for first, last in zip(frame["born"], frame["admitted"], strict=True)]
    assert got.x[:, -1].tolist() == days


def test_user_missing_codes_are_missing_and_counted_and_partial_labels_are_no_levels(tmp_path: Path) -> None:
    """The label of -9 names no level of a number, and a labeled event stays a number."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"dose": rng.normal(5, 1, ROWS), "time": rng.uniform(1, 9, ROWS), "died": 1.0})
    table.loc[:6, "dose"] = -9.0
    labels = {"dose": {-9.0: "refused"}, "died": {0.0: "alive", 1.0: "dead"}}
    pyreadstat.write_sav(
        table, str(tmp_path / "s.sav"), variable_value_labels=labels, missing_ranges={"dose": [{"lo": -9, "hi": -7}]}
    )
    data = fl.load(tmp_path / "s.sav", target="time", event="died", impute=True)
    assert int(data.x[:, 0].isnan().sum()) == 7
    assert "column 'dose': the file declares as missing -9 (refused) in 7 of its rows" in data.notes
    assert data.task == "survival"
    table["dose"] = table["dose"].astype(object)
    table.loc[:2, "dose"] = "a"
    pyreadstat.write_dta(
        table,
        str(tmp_path / "s.dta"),
        variable_value_labels={"dose": {"a": "refused"}},
        missing_user_values={"dose": ["a"]},
    )
    data = fl.load(tmp_path / "s.dta", target="time", event="died", impute=True)
    assert int(data.x[:, 0].isnan().sum()) == 3
    assert "a (refused) in 3 of its rows" in " ".join(data.notes)
    with pytest.raises(DataError, match="missing value"):
        fl.load(tmp_path / "s.dta", target="time", event="died")


def test_value_labels_may_stay_numbers(frame: pd.DataFrame, tmp_path: Path) -> None:
    pyreadstat.write_sav(coded(frame, 1.0), str(tmp_path / "t.sav"), variable_value_labels=LABELS)
    data = fl.load(tmp_path / "t.sav", **{**OPTIONS, "labels": False, "categorical": []})
    assert data.classes == ("0", "1")
    assert set(data.x[:, 2].tolist()) == {1.0, 2.0}


def test_a_text_file_without_a_header_below_a_title_in_another_encoding(frame: pd.DataFrame, tmp_path: Path) -> None:
    expected = fl.Dataset.create(frame, **OPTIONS)
    text = "Größe: 60 Zeilen\n\n" + frame.to_csv(index=False, header=False)
    options = {"target": "column6", "categorical": ["column3"], "impute": True, "days_since": {"column5": "column4"}}
    for encoding in ("latin-1", "utf-16", "utf-8"):
        (tmp_path / "t.csv").write_bytes(text.encode(encoding))
        data = fl.load(tmp_path / "t.csv", encoding=encoding, skip=2, header=False, **options)
        assert torch.equal(data.x.nan_to_num(nan=-1.0), expected.x.nan_to_num(nan=-1.0))


def test_rows_are_counted_from_the_first_line_of_the_file(tmp_path: Path) -> None:
    for lines, options, row in (("title\na,b\n1,0\nx,1\n", {"skip": 1}, 4), ("1,0\nx,1\n", {"header": False}, 2)):
        (tmp_path / "t.csv").write_text(lines)
        with pytest.raises(DataError, match=f"row {row}, column '.*': expected a finite number, got 'x'"):
            fl.load(tmp_path / "t.csv", **options)
    (tmp_path / "t.csv").write_text("1,1,0\n2,1,1\n")
    with pytest.raises(DataError, match="set header = false"):
        fl.load(tmp_path / "t.csv")


def test_sheets_are_chosen_by_name_or_number_and_rows_above_the_header_are_skipped(
    frame: pd.DataFrame, tmp_path: Path
) -> None:
    expected = fl.Dataset.create(frame, **OPTIONS)
    with pd.ExcelWriter(tmp_path / "t.xlsx") as book:
        pd.DataFrame({"note": ["first"]}).to_excel(book, sheet_name="About", index=False)
        frame.to_excel(book, sheet_name="Visits", index=False, startrow=3)
    for sheet in ("Visits", 2):
        data = fl.load(tmp_path / "t.xlsx", sheet=sheet, skip=3, **OPTIONS)
        assert torch.equal(data.y, expected.y)
    with pytest.raises(DataError, match="contains 2 sheets, 'About', 'Visits'. Name one"):
        fl.load(tmp_path / "t.xlsx", **OPTIONS)
    for wrong in ("Visit", 3, 0):
        with pytest.raises(ConfigError, match="sheet"):
            fl.load(tmp_path / "t.xlsx", sheet=wrong, **OPTIONS)


@pytest.mark.parametrize(("name", "library"), [("t.xlsx", "openpyxl"), ("t.sav", "pyreadstat")])
def test_a_missing_library_is_one_sentence_with_the_command(
    name: str, library: str, frame: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS[name](frame, tmp_path / name)
    monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(ConfigError, match=rf"needs {library}. Run: pip install 'fedloom\[formats\]'"):
        fl.load(tmp_path / name, **OPTIONS)


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ("t.csv", "t.txt", "t.dat", "mac.zip")])
def test_a_damaged_file_is_a_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"no table at all")
    with pytest.raises(DataError, match=name):
        fl.load(tmp_path / name, **OPTIONS)


@pytest.mark.parametrize(
    ("days_since", "words"),
    [
        ({"admited": "born"}, "no column 'admited'; did you mean 'admitted'"),
        ({"admitted": "borne"}, "neither a column nor a date such as 2024-09-01; did you mean 'born'"),
        ({"age": "born", "admitted": "born"}, "column 'age': expected a date, got "),
        ({}, "make days of it: days_since"),
    ],
)
def test_wrong_dates_are_refused(days_since: dict[str, str], words: str, frame: pd.DataFrame, tmp_path: Path) -> None:
    frame.to_csv(tmp_path / "t.csv", index=False)
    for data in (frame, tmp_path / "t.csv"):
        load = fl.load if isinstance(data, Path) else fl.Dataset.create
        with pytest.raises((ConfigError, DataError), match=words):
            load(data, **{**OPTIONS, "days_since": days_since})


def test_days_count_from_a_fixed_date_and_missing_dates_are_missing_cells(tmp_path: Path) -> None:
    lines = [f"{1 + k}.2.2020,{k % 2}" for k in range(20)] + [",1"]
    (tmp_path / "t.csv").write_text("seen,ill\n" + "\n".join(lines))
    data = fl.load(tmp_path / "t.csv", target="ill", days_since={"seen": "2020-01-01"}, impute=True)
    assert data.x[:-1, 0].tolist() == [31.0 + k for k in range(20)]
    assert bool(data.x[-1, 0].isnan())


def test_a_model_takes_new_dates_as_in_training_from_frames_and_files(frame: pd.DataFrame, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("title\n" + frame.to_csv(index=False))
    (tmp_path / "e.toml").write_text(f"""
name = "dates"
rounds = 2
seeds = [0]
[data]
source = "{tmp_path / "t.csv"}"
skip = 1
target = "ill"
categorical = ["sex"]
impute = true
days_since = {{ admitted = "born" }}
[partition]
kind = "iid"
clients = 2
[[method]]
algorithm = "fedavg"
""")
    call("run", str(tmp_path / "e.toml"), "--out", str(tmp_path / "run"))
    run = fl.open_run(tmp_path / "run")
    new = frame.drop(columns=["ill"]).head(9)
    expected = run.predict(new).scores
    new.to_excel(tmp_path / "new.xlsx", index=False)
    assert np.array_equal(run.predict(tmp_path / "new.xlsx").scores, expected)
    assert np.array_equal(run.runs()[0].models.predict_proba(new, kind="global"), expected)


def test_a_draft_of_a_file_takes_its_options(frame: pd.DataFrame, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("title\n" + frame.drop(columns=["born", "admitted"]).to_csv(index=False))
    said = call("init", str(tmp_path / "t.csv"), "--set", "data.skip=1", "--target", "ill", "--client-column", "")
    assert "draft:" in said
    assert "skip = 1" in (tmp_path / "t.toml").read_text()


def test_a_portable_file_of_spss_is_the_table_of_the_others(frame: pd.DataFrame, tmp_path: Path) -> None:
    """Its names are in capitals."""
    small = frame.rename(columns=str.upper).drop(columns=["BORN", "ADMITTED"])
    pyreadstat.write_por(small, str(tmp_path / "t.por"))
    small.to_csv(tmp_path / "t.csv", index=False)
    options = {"target": "ILL", "categorical": ["SEX"], "impute": True}
    one, other = (fl.load(tmp_path / name, **options) for name in ("t.por", "t.csv"))
    assert one.checksum() == other.checksum()
    assert one.classes == other.classes == ("no", "yes")


REAL_FILES = sorted(Path(os.environ.get("FEDLOOM_STATISTICS_FILES", os.devnull)).glob("**/*.*"))
"""Files of real programs, such as the folder test_data of pyreadstat's repository, which this one has no copy of."""


@pytest.mark.skipif(not REAL_FILES, reason="FEDLOOM_STATISTICS_FILES names no folder of files")
def test_files_of_real_programs_have_the_cells_that_pyreadstat_reads() -> None:
    compared = set[str]()
    for path in REAL_FILES:
        reader = STATISTICS_READERS.get(path.suffix)
        if reader is None:
            continue
        with Statistics(path=str(path)).open_file() as raw:
            cells = {piece.column: list(piece.cells) for piece in raw.cells}
        known, facts = getattr(pyreadstat, reader)(str(path), output_format="dict")
        assert list(cells) == raw.names == list(known)
        for name, values in known.items():
            labels = facts.variable_value_labels.get(name, {}) if name in raw.coded else {}
            assert len(cells[name]) == len(values)
            for cell, value in zip(cells[name], values, strict=True):
                missing = value is None or value == "" or value != value
                assert cell is None if missing else cell == labels.get(value, value), f"{path.name}, {name}"
        compared.add(path.suffix)
    assert compared
