"""Tables that differ from what was agreed on: one sentence with column, count and cure, or a note; no traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.data.sources.tabular import Csv
from fedloom.data.survey.agreement import AgreedColumn, Agreement
from fedloom.errors import FedloomError
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
    "column twice": (ROWS, lambda t: t.replace("systolic", "glucose", 1), ("two columns", "'glucose'; rename one")),
    "other unit": (every(1, glucose=5.5), same, ("column 'glucose': 100% of the rows lie beyond 30 to", "factors")),
    "other marker": (every(5, systolic=-99.0), same, ("column 'systolic': 2", "name its marker in missing")),
    "text": (every(10, age="old"), same, ("column 'age'", "got 'old' (15 such)", "or name it in missing")),
    "infinity": (every(50, age="inf"), same, ("column 'age'", "got 'inf' (3 such)", "repair the cell")),
    "label unknown": (every(10, died="maybe"), same, ("label 'died' is 'maybe', allowed are 0, 1 (15 such rows)",)),
    "label gone": (every(10, died=None), same, ("column 'died': missing value (15 such); repair",)),
    "levels otherwise": (every(1, sex="W"), same, ("column 'sex': 150 of 150 cells have no agreed level ('W';",)),
    "row cut": (ROWS, lambda t: t + "1,2,3\n", ("row 152 has 3 cells, expected 11", "repair the row")),
    "header only": ([], same, ("no rows below the header",)),
    "nothing": ([], lambda _: "", ("empty; a table needs a header row",)),
}  # fmt: skip
NOTES = {
    "rare marker": (every(50, systolic=-99.0), "column 'systolic': 3 of 150 numbers lie beyond 40 to 260, as -99 does"),
    "other level": (every(10, ward="XRAY"), "column 'ward': 15 cells of other levels than agreed are filled: 'XRAY'"),
    "gap": (every(50, creatinine=None), "column 'creatinine': 3 cells are missing and filled; none was to be"),
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
