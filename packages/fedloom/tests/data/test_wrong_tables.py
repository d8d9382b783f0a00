"""Tables that differ from what was agreed on: one sentence with column, count and cure, or a note; no traceback."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedloom as fl
from fedloom.data.groups import keep_group_columns, make_group_masks
from fedloom.data.sources.table.reading import TableSource
from fedloom.data.sources.tabular import Csv
from fedloom.data.survey.agreement import AgreedColumn, Agreement
from fedloom.errors import DataError, FedloomError
from tests import hospitals

AGREED = Agreement(
    target="died",
    classes=("0", "1"),
    missing=("-9",),
    column=(
        AgreedColumn(name="age", unit="years", range=(0, 110), missing=True),
        AgreedColumn(name="sex", type="level", levels=("f", "m")),
        AgreedColumn(name="ward", type="level", levels=hospitals.ALL_WARDS),
        AgreedColumn(name="systolic", unit="mmHg", range=(40, 260), missing=True),
        AgreedColumn(name="glucose", unit="mg/dL", range=(30, 700), missing=True),
        AgreedColumn(name="creatinine", unit="mg/dL", range=(0.1, 15)),
    ),
)
ROWS = hospitals.patients("Dorn", si=False)
Text = Callable[[str], str]


def every(step: int, **cells: Any) -> list[hospitals.Row]:
    """The rows with other cells in every row of so many."""
    return [{**row, **cells} if k % step == 0 else row for k, row in enumerate(ROWS)]


def same(text: str) -> str:
    return text


FAULTS: dict[str, tuple[list[hospitals.Row], Text, tuple[str, ...]]] = {
    "column lacking": (ROWS, lambda t: t.replace("systolic", "sys_bp"), ("no column 'systolic' (the agreement",)),
    "label lacking": (ROWS, lambda t: t.replace("died", "dead"), ("no column 'died'", "did you mean 'dead'")),
    "no header": (ROWS, lambda t: t.partition("\n")[2], ("no columns 'age', 'creatinine', 'died'", "is it a row")),
    "other separator in half": (ROWS, lambda t: t.replace(",", ";", 400), ("row",)),
    "column twice": (ROWS, lambda t: t.replace("systolic", "glucose", 1), ("two columns", "'glucose'")),
    "other unit": (every(1, glucose=5.5), same, ("column 'glucose': 100% of the rows are outside 30 to", "factors")),
    "other marker": (every(5, systolic=-99.0), same, ("column 'systolic': 2", "add its marker to missing")),
    "text": (every(10, age="old"), same, ("column 'age'", "got 'old' (15 such)", "or add it to missing")),
    "infinity": (every(50, age="inf"), same, ("column 'age'", "got 'inf' (3 such)", "repair the cell")),
    "label unknown": (every(10, died="maybe"), same, ("label 'died' is 'maybe', but only 0, 1 are allowed",)),
    "label gone": (every(10, died=None), same, ("column 'died': missing value (15 such); repair",)),
    "levels otherwise": (every(1, sex="W"), same, ("column 'sex': 150 of 150 cells contain no agreed level ('W';",)),
    "row cut": (ROWS, lambda t: t + "1,2,3\n", ("row 152 has 3 cells, expected 11", "Repair the row")),
    "two header lines": (
        ROWS, lambda t: t.replace("\n", "\n,,years,,,mmHg,mg/dL,,,,\n", 1),
        (
            "row 2 contains text where all other rows contain numbers ('years' in 'age', 'mmHg' in 'systolic', 'mg/dL'",
            "delete it",
        ),
    ),
    "groups above": (ROWS, lambda t: "Who,,,,,Labs,,,,,\n" + t, ("two columns have the same name: ''", "lines above")),
    "spaces": (ROWS, lambda t: t.replace(",", "  "), ("separated by spaces, so set separator = ' '",)),
    "title above": (ROWS, lambda t: "Export of May\n" + t, ("no columns 'age',", "is another line above it")),
    "units in cells": (every(2, glucose="95.2 mg/dl"), same, ("column 'glucose'", "(75 such)", "in one unit")),
    "limits in cells": (every(9, creatinine="<0.3"), same, ("column 'creatinine'", "'<0.3'", "write only numbers")),
    "header only": ([], same, ("no rows below the header",)),
    "nothing": ([], lambda _: "", ("empty. A table needs a header row",)),
}  # fmt: skip
NOTES = {
    "rare marker": (
        every(50, systolic=-99.0),
        "column 'systolic': 3 of 150 numbers are outside 40 to 260, for example -99. If",
    ),
    "other level": (
        every(10, ward="XRAY"),
        "column 'ward': 15 cells with levels outside the agreement are filled: 'XRAY'",
    ),
    "gap": (
        every(50, creatinine=None),
        ("column 'creatinine': 3 cells are missing and filled, although the agreement allows no missing cells"),
    ),
    "nothing wrong": (ROWS, ""),
}


def write(path: Path, rows: list[hospitals.Row], change: Text = same) -> Csv:
    hospitals.write(path, rows)
    path.write_text(change(path.read_text()))
    return Csv(path=str(path), agreement=AGREED)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_table_is_refused_in_a_sentence(fault: str, tmp_path: Path) -> None:
    rows, change, words = FAULTS[fault]
    with pytest.raises(FedloomError) as refused:
        write(tmp_path / "site.csv", rows, change).read(None)
    sentence = str(refused.value)
    assert sentence.startswith(str(tmp_path / "site.csv"))
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence
    assert len(sentence) < 400


@pytest.mark.parametrize("fault", NOTES)
def test_what_is_read_all_the_same_is_noted(fault: str, tmp_path: Path) -> None:
    rows, note = NOTES[fault]
    notes = write(tmp_path / "site.csv", rows).read(None).notes
    assert len(notes) == bool(note)
    assert notes == () or notes[0].startswith(note)


PLAIN: dict[str, tuple[str, dict[str, Any], str]] = {
    "truth in five ways": (
        "died", {"levels": ("TRUE", "true", "1", "FALSE", "0")},
        "the label 'died' has levels that are written differently but seem the same: '0' (8) = 'FALSE'",
    ),
    "capitals": ("died", {"levels": ("Yes", "yes", "No")}, "seem the same: 'Yes' (14) = 'yes' (13). Write"),
    "letters": ("died", {"levels": ("y", "n", "no")}, "seem the same: 'n' (13) = 'no' (13)"),
    "an encoding of a letter": ("died", {"levels": ("für", "fu\u0308r"), "task": "binary"}, "seem the same: "),
    "absurd label": ("died", {"levels": ("1.5", "1e308", "2"), "task": "regression"}, "row 3, column 'died': expected"),
    "absurd": ("age", {"levels": ("1.5", "-1e308", "2")}, "row 3, column 'age': expected a number of at most 3.4e+38"),
}  # fmt: skip
DOUBTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "classes": (
        "died", {"levels": ("a", "A", "b"), "task": "classification"},
        (
            "column 'died' has levels that are written differently but seem the same: 'A' (13) = 'a' (14). "
            "Write them in one way"
        ),
    ),
    "category": ("ward", {"levels": ("Icu", "icu ", "ward"), "categorical": ("ward",)}, "column 'ward' has levels"),
    "site": ("ward", {"levels": ("St  Anna", "St Anna", "b"), "client_column": "ward"}, "column 'ward' has levels"),
    "constant": ("age", {"levels": ("5", "5.0")}, "column 'age': the same in every row, so a model cannot"),
    "constant level": ("ward", {"levels": ("a",), "categorical": ("ward",)}, "column 'ward': the same in every row"),
    "empty": ("age", {"levels": ("NULL", "#N/A"), "impute": True}, "column 'age': every cell is missing"),
    "one class": ("died", {"levels": ("1",)}, "the label 'died' is '1' in every row, so a model cannot learn"),
    "one number": ("died", {"levels": ("1",), "task": "regression"}, "column 'died': the same in every row"),
    "far": ("age", {"levels": (*map(str, range(39)), "99999")}, "row 41, column 'age': 99999 is extremely far from"),
    "negative": (
        "age", {"levels": (*map(str, range(1, 40)), "-7")}, "row 41, column 'age': -7 is negative (1 of 40",
    ),
    "far label": ("died", {"levels": (*"123456789", "-1e30"), "task": "regression"}, "row 11, column 'died': -1e+30"),
}  # fmt: skip
FINE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("died", {"levels": ("f", "m", "n")}),
    ("died", {"levels": ("0", "1", "no", "2")}),
    ("died", {"levels": tuple("0123456789abcdefghijklmnopqrstuvwxyz")}),
    ("age", {"levels": ("0", "0", "0", "0", "0", "7e6")}),
    ("age", {"levels": (*map(str, range(-9, 30)),)}),
    ("age", {"levels": tuple(str(10.0**k) for k in range(-4, 5))}),
)


@settings(max_examples=30)
@given(numbers=st.lists(st.integers(1, 99_999), min_size=40, max_size=60))
def test_points_that_may_part_thousands_are_noted(tmp_path_factory: pytest.TempPathFactory, numbers: list[int]) -> None:
    """Where all fractions have three digits and nothing contradicts; in a file with decimal commas as well."""
    folder, numbers = tmp_path_factory.mktemp("thousands"), [*numbers, *range(1001, 1005 + len(numbers))]
    grouped = [f"{number:,}" for number in numbers]
    columns = {
        "points": [text.replace(",", ".") for text in grouped],
        "plain": [str(number) for number in numbers],
        "shares": [str(number / 1000) for number in [*numbers, 500]][1:],
        "one other": [*(text.replace(",", ".") for text in grouped[1:]), "2.5"],
    }
    for separator, column, writing in (
        *((",", name, texts) for name, texts in columns.items()),
        (";", "points", columns["points"]),
        (";", "points", grouped),
    ):
        rows = [separator.join((text, "10", str(k % 2))) for k, text in enumerate(writing)]
        path = folder / "t.csv"
        path.write_text("\n".join([separator.join(("count", "ten", "died")), *rows]) + "\n")
        notes = Csv(path=str(path), target="died", drop=("ten",)).read(None).notes
        assert any("column 'count': every fraction has three digits, like " in n for n in notes) == (column == "points")


def plain(path: Path, column: str, levels: Sequence[str], **options: Any) -> Csv:
    """A table of 40 sound rows but for a column, which has the levels in turn."""
    sound = {"age": "1234567", "bmi": ("21.5", "30", "27", "24.1", "33"), "died": "01101001101", "ward": "ab"} | {
        column: levels
    }
    names = [name for name in sound if name == column or name != "ward"]
    rows = [",".join(sound[name][k % len(sound[name])] for name in names) for k in range(40)]
    path.write_text("\n".join([",".join(names), *rows]) + "\n", "utf-8")
    return Csv(path=str(path), target="died", **options)


@pytest.mark.parametrize("fault", PLAIN)
def test_levels_that_are_alike_and_absurd_numbers_are_refused(fault: str, tmp_path: Path) -> None:
    column, options, words = PLAIN[fault]
    with pytest.raises(FedloomError) as refused:
        plain(tmp_path / "site.csv", column, **options).read(None)
    sentence = str(refused.value)
    assert sentence.startswith(str(tmp_path / "site.csv"))
    assert words in sentence
    assert "\n" not in sentence
    assert len(sentence) < 400


@pytest.mark.parametrize("fault", DOUBTS)
def test_a_doubtful_column_is_noted_once(fault: str, tmp_path: Path) -> None:
    column, options, words = DOUBTS[fault]
    (note,) = plain(tmp_path / "site.csv", column, **options).read(None).notes
    assert note.startswith(words)


@pytest.mark.parametrize(("column", "options"), FINE)
def test_a_sound_column_has_no_note(column: str, options: dict[str, Any], tmp_path: Path) -> None:
    assert plain(tmp_path / "site.csv", column, **options).read(None).notes == ()


def test_a_header_that_comes_again_is_refused(tmp_path: Path) -> None:
    table = plain(tmp_path / "site.csv", "age", "1234567")
    lines = (tmp_path / "site.csv").read_text().splitlines()
    (tmp_path / "site.csv").write_text("\n".join([*lines[:5], lines[0], *lines[5:], lines[0]]) + "\n")
    with pytest.raises(DataError, match="row 6 repeats the header \\(2 such\\); delete it"):
        table.read(None)


@pytest.mark.parametrize("by_client", [False, True])
def test_agreed_ranges_and_bounds_of_groups_are_those_of_converted_units(by_client: bool, tmp_path: Path) -> None:
    def factors(number: float) -> dict[str, Any]:
        return {"glucose": {"Dorn": number} if by_client else number}

    def high(source: TableSource) -> Tensor:
        return make_group_masks(keep_group_columns(source, ["glucose>=126"]).read(None), ["glucose>=126"])[
            "glucose>=126"
        ]

    users = {"client_column": "hospital"} if by_client else {}
    sixteenths = [{**row, "glucose": row["glucose"] and row["glucose"] / 16} for row in ROWS]  # exact in binary
    agreed = write(tmp_path / "agreed.csv", ROWS).with_(**users)
    other = write(tmp_path / "other.csv", sixteenths).with_(**users)
    converted = other.with_(factors=factors(16.0))
    assert converted.read(None).notes == agreed.read(None).notes
    assert 0 < int(high(agreed).sum()) < len(ROWS)
    assert torch.equal(high(converted), high(agreed))
    for source in (other, agreed.with_(factors=factors(1 / 16))):
        with pytest.raises(DataError, match="column 'glucose': 100% of the rows are outside 30 to 700 mg/dL"):
            source.read(None)


def test_agreed_classes_without_a_row_are_noted(tmp_path: Path) -> None:
    notes = write(tmp_path / "site.csv", every(1, died=0)).read(None).notes
    assert notes == ("the label 'died' is '0' in every row, so a model cannot learn from these rows alone",)
    three = AGREED.with_(task="classification", classes=("0", "1", "2", "3"))
    notes = write(tmp_path / "site.csv", ROWS).with_(agreement=three).read(None).notes
    assert notes == ("no row has the label 'died' = '2', '3'",)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("rows", [1, 1500, 40_000])
@pytest.mark.parametrize("end", [b"", b",1\n30,0\n"])
def test_a_wrong_byte_is_named_with_its_line(
    mark: bytes, pack: Callable[[bytes], bytes], rows: int, end: bytes, tmp_path: Path
) -> None:
    """In the part that the signs are found in, and far behind it; at the end of a file, and before it."""
    before = mark + b"age,died\n" + "\u00e41,0\n".encode() * rows + b"4"
    path = tmp_path / "latin.csv.gz"
    path.write_bytes(pack(before + "\u00e4".encode("latin-1") + end))
    with pytest.raises(FedloomError) as refused:
        Csv(path=str(path), categorical=("age",)).read(None)
    sentence = f"(byte 0xE4 at offset {len(before):,}, line {rows + 2:,}). Save the file as UTF-8, set encoding = "
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("encoding", "name", "byte"),
    [("utf-16", "UTF-16", "0xFF at offset 0"), ("utf-16-le", "UTF-16LE", "0x00 at offset 1"),
     ("utf-16-be", "UTF-16BE", "0x00 at offset 0")],
)  # fmt: skip
def test_a_file_in_16_bits_is_named(encoding: str, name: str, byte: str, tmp_path: Path) -> None:
    (tmp_path / "wide.csv").write_bytes("age,died\n30,0\n31,1\n".encode(encoding))
    with pytest.raises(FedloomError, match=f"byte {byte}, line 1.*iconv -f {name} -t UTF-8 wide.csv"):
        Csv(path=str(tmp_path / "wide.csv")).read(None)


def survival_rows(**columns: Any) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {"age": rng.normal(60, 9, 40), "time": rng.uniform(2, 9, 40), "status": [0, 1, 2, 1] * 10} | columns
    )


def test_a_cause_of_events_is_chosen_by_its_value_and_the_other_causes_are_censored() -> None:
    table = survival_rows()
    roles: dict[str, Any] = {"target": "time", "event": "status"}
    with pytest.raises(DataError, match=r"event_levels = \['2'\] counts this cause"):
        fl.Dataset.create(table, **roles)
    for levels in (["1"], ["2"], ["1", "2"]):
        events = fl.Dataset.create(table, event_levels=levels, **roles).y[:, 1]
        assert events.tolist() == table["status"].astype(str).isin(levels).astype(float).tolist()
    named = table.assign(status=table["status"].map({0: "alive", 1: "cancer", 2: "other"}))
    assert int(fl.Dataset.create(named, event_levels=["cancer"], **roles).y[:, 1].sum()) == 20
    with pytest.raises(DataError, match="event_levels: no cell of 'status' is '3'"):
        fl.Dataset.create(table, event_levels=["1", "3"], **roles)


def test_late_entry_is_refused_and_every_way_on_that_is_named_works() -> None:
    table = survival_rows(status=[0, 1] * 20)
    late = table.assign(start=table["time"] / 2)
    roles: dict[str, Any] = {"target": "time", "event": "status"}
    with pytest.raises(DataError, match=r"column 'start' seems to be the start of the time at risk \(late entry\)"):
        fl.Dataset.create(late, **roles)
    assert fl.Dataset.create(late, drop=["start"], **roles).shape == (1,)
    assert fl.Dataset.create(late, include=["start"], **roles).shape == (2,)
    since = late.assign(time=late["time"] - late["start"]).drop(columns=["start"])
    assert fl.Dataset.create(since, **roles).shape == (1,)
    assert fl.Dataset.create(table.assign(start=table["time"] * 2), **roles).shape == (2,)
    assert fl.Dataset.create(table.assign(start=0.0), **roles).shape == (2,)


def _export(column: str = "", cell: Callable[[int], object] = str, separator: str = ",") -> str:
    """A stranger's export of 60 rows, with one more column if it has a name."""
    head = ["age", "crp", *([column] if column else []), "died"]
    rows = [
        [str(20 + k % 50), f"{k * 37 % 101 / 7:.2f}", *([str(cell(k))] if column else []), str(k % 3 % 2)]
        for k in range(60)
    ]
    return "\n".join(map(separator.join, [head, *rows])) + "\n"


EXPORTS: dict[str, tuple[str | bytes, str]] = {
    "a byte 0": (_export().replace("died", "di\0ed", 1), "line 1 contains a null byte, which does not occur in text"),
    "a byte 0 in a class": (_export()[:-2] + "0\0\n", "line 61 contains a null byte"),
    "an invisible sign in a header": (_export("\u200bdose"), "contains U.200B, which is invisible"),
    "a mark in the middle": ("age,\ufeffcrp" + _export()[7:], "contains U.FEFF, which is invisible"),
    "an invisible sign in a class": (_export()[:-2] + "0\u00ad\n", "a level '0.*contains U.00AD, which is invisible"),
    "headers that differ in a blank": (_export("age "), "columns 'age ' differ from other columns only in whitespace"),
    "headers that differ in their form": (_export("\uff41ge"), "differ from other columns only in whitespace"),
    "a sign of minus": (_export("d", lambda k: f"\u2212{k}.5"), "'d'.*write only numbers"),
    "thin spaces": (_export("d", lambda k: f"1\u202f{k:03}"), "'d'.*write only numbers"),
    "negative in brackets": (_export("d", lambda k: f"({k}.5)"), "'d'.*write only numbers"),
    "minus at the end": (_export("d", lambda k: f"{k}.5-"), "'d'.*write only numbers"),
    "underscores": (_export("d", lambda k: f"1_{k:03}"), "'d'.*expected a finite number"),
    "other digits": (_export("d", lambda k: "\u0661\u0662"), "'d'.*expected a finite number"),
    "roles that have other names": (
        _export("d", lambda k: "abc"[k % 3]),
        "target, client_column .*categorical or drop",
    ),
}
"""Exports that are refused, with words of the error."""


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_that_is_read_wrongly_is_refused(name: str, tmp_path: Path) -> None:
    text, words = EXPORTS[name]
    (tmp_path / "rows.csv").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(DataError, match=words):
        fl.load(tmp_path / "rows.csv", target="died")


CODES: dict[str, tuple[Callable[[int], object], str]] = {
    "leading zeros": (lambda k: f"{k * 37 % 9000:05}", "cells such as 00000 are read as numbers"),
    "exponents": (lambda k: f"{k % 9 + 1}E{k % 6 + 1}", "cells such as 1E1 are read as numbers"),
    "seconds": (lambda k: 1_700_000_000 + k * 86400, "may contain dates as seconds since 1970"),
    "milliseconds": (lambda k: 1_700_000_000_000 + k * 86_400_000, "may contain dates as milliseconds since 1970"),
    "days of a spreadsheet": (lambda k: 45_000 + 3 * k % 177, "may contain dates as days of a spreadsheet"),
}
"""Numbers that are no measurements, with the note."""


@pytest.mark.parametrize("name", CODES)
def test_numbers_that_may_be_codes_or_dates_are_noted(name: str, tmp_path: Path) -> None:
    cell, words = CODES[name]
    (tmp_path / "rows.csv").write_text(_export("visit_date", cell))
    notes = fl.load(tmp_path / "rows.csv", target="died").notes
    assert any("'visit_date'" in note and words in note for note in notes), notes


@pytest.mark.parametrize(
    "cell", [lambda k: k / 8, lambda k: f"{k / 3e5:.2e}", lambda k: 0.25 * (k % 7), lambda k: 45_000.5 + 10 * (k % 53)]
)
def test_measurements_are_not_taken_for_codes(cell: Callable[[int], object], tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(_export("dose", cell))
    assert not [note for note in fl.load(tmp_path / "rows.csv", target="died").notes if "'dose'" in note]


@pytest.mark.parametrize("name", ["", "0", "None", "False", 0])
def test_a_column_whose_name_is_false_takes_every_role(name: str | int) -> None:
    count = np.arange(120)
    x = pd.DataFrame({"a": np.sin(count), "b": np.cos(count)})
    roles = {
        "client_column": np.array(["x", "y", "z"])[count % 3], "subject": count // 4, "order": count,
        "test_column": (count % 4 == 0).astype(int), "drop": np.sin(3 * count),
        "categorical": np.array(["u", "v"])[count % 2],
    }  # fmt: skip
    for role, cells in roles.items():
        frame = x.assign(**{str(name): cells, "y": count // 2 % 2})
        frame.columns = ["a", "b", name, "y"]
        several = role in ("drop", "categorical")
        data = fl.Dataset.create(frame, target="y", **{role: [name] if several else name})
        features = [column.name for column in data.prepare.columns]
        assert (str(name) in features) == (role == "categorical"), role
        assert (data.user_names == ("x", "y", "z")) == (role == "client_column"), role
        design = data.design
        assert (design is not None and design.subject is not None) == (role == "subject")
        assert (design is not None and design.order is not None) == (role == "order")
