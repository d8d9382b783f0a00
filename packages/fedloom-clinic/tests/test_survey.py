"""One survey for every reading of a table: types, numbers of rows, names of people, leaks and markers."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import fedloom as fl
from fedloom.data.site_rows import rows_by_site
from fedloom.data.sources.tabular import Csv, Parquet
from fedloom.data.survey.agreement import Agreement
from fedloom.data.survey.facts import ColumnProfile
from fedloom.data.survey.findings import exclusion_reason
from fedloom.data.survey.leaks import ReadColumn
from fedloom.errors import ConfigError, DataError
from fedloom.lab.cli import app
from fedloom.sklearn import FederatedClassifier, FederatedRegressor
from fedloom_clinic.drafts.columns import TableSurvey

N = 240
RNG = np.random.default_rng(11)
FIRST = ["Anna", "Bernd", "Chloé", "Dmitri", "Émile", "Fatma", "Günther", "Hanna", "İrem", "Jörg"]
LAST = ["Schmidt", "O'Neil", "Öztürk", "García", "Müller-Lau", "Nowak", "Rossi", "Smith", "Ivanov", "Jones"]


def clean(seed: int = 0, rows: int = N) -> pd.DataFrame:
    """A table without a fault; the outcome is learned only in part."""
    rng = np.random.default_rng(seed)
    age, bmi = rng.normal(55, 12, rows).round(0), rng.normal(27, 4, rows).round(1)
    crp = np.exp(rng.normal(1, 1, rows)).round(2)
    risk = (age - 55) / 12 + (bmi - 27) / 6
    table = {"age": age, "bmi": bmi, "crp": crp, "smoker": rng.integers(2, size=rows)}
    return pd.DataFrame({**table, "ill": (risk + rng.normal(size=rows) > 0.3).astype(int)})


def entrances(frame: pd.DataFrame, folder: Path, **options: Any) -> dict[str, fl.Dataset]:
    """The same table through every entrance."""
    frame.to_csv(folder / "t.csv", index=False)
    frame.to_parquet(folder / "t.parquet", index=False)
    return {
        "csv": fl.load(folder / "t.csv", **options),
        "parquet": fl.load(folder / "t.parquet", **options),
        "pandas": fl.Dataset.create(frame, **options),
        "arrow": fl.Dataset.create(pa.Table.from_pandas(frame, preserve_index=False), **options),
        "[data]": Csv(path=str(folder / "t.csv"), **options).read(None),
        "regression": rows_by_site(Csv(path=str(folder / "t.csv"), **options)).data,
    }


def names(data: fl.Dataset) -> list[str]:
    return [column.name for column in data.prepare.columns]


COUNT = np.arange(N)
INDEXES: dict[str, tuple[str, Any]] = {
    "of to_csv": ("", COUNT),
    "of read_csv": ("Unnamed: 0", COUNT),
    "of reset_index": ("index", COUNT),
    "of two resets": ("level_0", COUNT),
    "of R": ("rownames", COUNT + 1),
    "of write.csv": ("X", COUNT + 1),
    "shuffled": ("Unnamed: 0", RNG.permutation(N)),
    "shuffled from 1": ("id", RNG.permutation(N) + 1),
    "of rows that are left": ("Unnamed: 0", np.sort(RNG.choice(4 * N, N, replace=False))),
    "of rows drawn at random": ("index", RNG.choice(4 * N, N, replace=False)),
    "of two files": ("Unnamed: 0", np.r_[np.arange(N // 2), np.arange(N // 2)]),
    "of two readings": ("Unnamed: 0.1", COUNT),
    "of readr": ("...1", COUNT + 1),
    "a sign": ("№", COUNT + 1),
    "a word of a sequence": ("Zeile", COUNT + 1),
    "row number": ("row_id", np.cumsum(RNG.integers(1, 4, N))),
}


@pytest.mark.parametrize("case", INDEXES)
def test_a_number_of_rows_is_left_out_at_every_entrance_and_its_note_names_the_key(case: str, tmp_path: Path) -> None:
    name, numbers = INDEXES[case]
    frame = clean()
    frame.insert(0, name, numbers)
    for entrance, data in entrances(frame, tmp_path).items():
        assert names(data) == ["age", "bmi", "crp", "smoker"], entrance
        (note,) = [note for note in data.notes if "left out" in note]
        assert f"column {name!r} numbers the rows" in note, entrance
        key, value = re.search(r"(\w+) = (\[.*\]) keeps it", note).groups()
        kept = fl.Dataset.create(frame, **{key: json.loads(value)})
        assert names(kept)[0] == name
        assert not any("left out" in note for note in kept.notes)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("num_lesions", 5 + 2 * COUNT),
        ("record_length", 9 + 3 * COUNT),
        ("year", 1900 + COUNT),
        ("age", 20 + COUNT % 60),
        ("weight", RNG.permutation(N) + 40.5),
        ("x", COUNT % 40),
    ],
)
def test_a_measurement_that_rises_stays(name: str, numbers: Any) -> None:
    frame = clean().drop(columns="age")
    frame.insert(0, name, numbers)
    assert names(fl.Dataset.create(frame))[0] == name


def test_a_column_with_a_role_is_never_left_out() -> None:
    frame = clean()
    frame.insert(0, "id", COUNT)
    for options in ({"columns": ["id"]}, {"group_columns": ["id"]}, {"factors": {"id": 2.0}}):
        assert names(fl.Dataset.create(frame, **options))[0] == "id"
    assert "id" not in names(fl.Dataset.create(frame, client_column="id"))


PEOPLE: dict[str, tuple[str, Any]] = {
    "first names": ("fake_first_name", [FIRST[k % 10] for k in range(N)]),
    "surnames": ("Nachname", [LAST[k % 10] for k in range(N)]),
    "accents": ("Prénom", [FIRST[k % 10] for k in range(N)]),
    "Cyrillic": ("Фамилия", [LAST[k % 10] for k in range(N)]),
    "by cells": ("who", [f"{FIRST[k % 10]} {LAST[k // 10 % 10]} {'ABC'[k // 100]}." for k in range(N)]),
    "email": ("contact", [f"p{k}@clinic.example" for k in range(N)]),
    "phone": ("reach", [f"+49 30 {100000 + 7 * k}" for k in range(N)]),
    "phone by name": ("Telefon", [491700000 + 13 * k for k in range(N)]),
    "street": ("Anschrift", [f"Lindenweg {k}" for k in range(N)]),
    "insurance": ("Versichertennummer", [f"A{100000000 + 17 * k}" for k in range(N)]),
    "free text": ("Befund", [f"patient {k} feels better since the day {k + 3} of treatment" for k in range(N)]),
}  # fmt: skip


@pytest.mark.parametrize("case", PEOPLE)
def test_what_names_or_reaches_a_person_is_no_feature(case: str, tmp_path: Path) -> None:
    name, cells = PEOPLE[case]
    frame = clean()
    frame.insert(0, name, cells)
    text = isinstance(cells[0], str)
    for options in ({}, {"categorical": [name]}) if text else ({},):
        for entrance, data in entrances(frame, tmp_path, **options).items():
            assert names(data) == ["age", "bmi", "crp", "smoker"], entrance
            (note,) = [note for note in data.notes if "left out" in note]
            key, value = re.search(r"(\w+) = (\[.*\]) keeps it", note).groups()
            kept = fl.Dataset.create(frame, **options, **{key: json.loads(value)})
            assert names(kept)[0] == name
            assert bool(kept.prepare.columns[0].levels) is text
    said = CliRunner().invoke(app, ["init", str(tmp_path / "t.csv"), "--target", "ill", "--agree"])
    assert said.exit_code == 0, said.output
    assert name not in [column.name for column in Agreement.read(tmp_path / "t.agreement.toml").column]
    assert f"column {name!r}: " in said.output


VISITS = {
    "a security number": ("col17", [f"{100 + k}-{10 + k}-{1000 + 7 * k}" for k in range(40)]),
    "an account": ("konto", [f"DE{10 + k} 1234 5678 9012 {1000 + k} 12" for k in range(40)]),
    "a number of health insurance": ("versnr", [f"A{100000000 + 17 * k}" for k in range(40)]),
    "a record of patients": ("MRN", [f"MRN{1000000 + 31 * k}" for k in range(40)]),
    "a phone": ("reach", [f"+49 30 {100000 + 7 * k}" for k in range(40)]),
    "an email with a name": ("kontakt", [f"User {k} <u{k}@clinic.example>" for k in range(40)]),
    "a street": ("home", [f"{LAST[k % 10]}straße {k}" for k in range(40)]),
    "a doctor": ("Hausarzt", [f"Dr. med. {LAST[k % 10]}{'abcd'[k // 10]}" for k in range(40)]),
    "the surname first": ("who", [f"{LAST[k % 10]}, {FIRST[k // 10]}" for k in range(40)]),
    "a DICOM name": ("PN", [f"{LAST[k % 10].upper()}^{FIRST[k // 10].upper()}" for k in range(40)]),
    "initials": ("Initialen", [f"{chr(65 + k % 20)}.{chr(70 + k // 20)}." for k in range(40)]),
    "remarks": ("Bemerkung", [f"siehe Brief {k}" for k in range(40)]),
    "names of a mother": ("mother's name", [f"{FIRST[k % 10]} {LAST[k // 10]}" for k in range(40)]),
    "a last name with a number": ("LastName_1", [f"{LAST[k % 10]}{'abcd'[k // 10]}" for k in range(40)]),
    "a few given names": ("Name", ["Anke", "Torsten", "Zeynep", "Małgorzata", "Thabo"] * 8),
    "capitalized words": ("patient", [f"{'KLMN'[k % 4]}{'aeio'[k // 4 % 4]}rvenko" for k in range(40)]),
    "letters with marks": ("patient", [f"{'रसमद'[k % 4]}िता {'कखगघचजझटठड'[k // 4]}ुमार" for k in range(40)]),
    "a title after the name": ("attending", ["Grażyna Nowak, MD", "Halina Lis, MD", "Cy Xu, RN", "Al Zed, MD"] * 10),
    "postal codes": ("PLZ", [10115 + 997 * k for k in range(40)]),
    "a contact": ("kontakt", [f"0{301234567 + 13 * k}" for k in range(40)]),
    "Chinese": ("患者姓名", [f"{'王李张刘陈'[k % 5]}{'伟芳娜敏静华明军'[k // 5]}" for k in range(40)]),
}  # fmt: skip


@pytest.mark.parametrize("case", VISITS)
def test_a_person_with_several_visits_is_no_feature(case: str, tmp_path: Path) -> None:
    name, people = VISITS[case]
    frame = pd.concat([clean()] * 2, ignore_index=True)
    frame.insert(0, name, [people[k % 40] for k in range(len(frame))])
    frame["crp"] += RNG.random(len(frame))
    frame.to_csv(tmp_path / "t.csv", index=False)
    said = CliRunner().invoke(app, ["init", str(tmp_path / "t.csv"), "--target", "ill", "--subject", ""]).output
    draft = tomllib.loads((tmp_path / "t.toml").read_text())["data"]
    assert name in draft["drop"], said
    assert name not in draft.get("categorical", [])


def test_a_number_of_a_person_that_repeats_is_proposed_as_subject(tmp_path: Path) -> None:
    name, people = VISITS["a number of health insurance"]
    frame = pd.concat([clean()] * 2, ignore_index=True)
    frame.insert(0, name, [people[k % 40] for k in range(len(frame))])
    (note,) = [note for note in fl.Dataset.create(frame).notes if name in note]
    assert "set it as subject" in note
    assert not any(name in note for note in fl.Dataset.create(frame, subject=name).notes)
    frame.to_csv(tmp_path / "t.csv", index=False)
    said = CliRunner().invoke(app, ["init", str(tmp_path / "t.csv"), "--target", "ill"]).output
    assert re.search(rf"subject: .*{name!r}", said), said


def test_ordinary_columns_are_of_nobody() -> None:
    for name, cells in (
        ("Telephone", ["yes", "none"] * 40), ("name", ["a", "b"] * 40), ("cell", ["T", "B"] * 40),
        ("visit_date", [f"2020-{1 + k % 12:02d}-{1 + k % 28:02d}" for k in range(80)]),
        ("code", [f"{'ABC'[k % 3]}{k}" for k in range(80)]), ("dose", [f"{k / 7:.3f}" for k in range(80)]),
        ("drug", [f"Metformin {k % 30} 500 mg" for k in range(80)]), ("icd", [f"I{k % 40}.{k % 9}" for k in range(80)]),
        ("diagnosis", [f"{'ABCDEFG'[k % 7]}trial {'xyz'[k % 3]}ibrillation" for k in range(80)]),
        ("county", ["Kings", "Orange", "Erie", "Monroe", "Albany", "Essex", "Ulster", "Lewis", "Wayne", "Yates"] * 8),
        ("atc", [f"N{k % 30:02d}BE01" for k in range(80)]), ("first_visit", ["yes", "no"] * 40),
        ("last_stage", [f"Stage {'IVX'[k % 3]}" for k in range(80)]), ("street", ["Grvl", "Pave"] * 40),
        ("nombre_visites", [str(k % 5) for k in range(80)]), ("city", ["New York", "Los Angeles"] * 40),
        ("name", [f"{'KLMN'[k % 4]}{'aei'[k // 4 % 3]}formin" for k in range(120)]),
        ("attending_specialty", [f"{'KLMN'[k % 4]}{'aei'[k // 4 % 3]}rology" for k in range(120)]),
        ("city", [f"{'KLMN'[k % 4]}{'aei'[k // 4 % 3]}timore, MD" for k in range(120)]),
        ("contact_time_ms", [str(100_000 + 2903 * k) for k in range(300)]),
        ("mobile_bytes", [str(100_000 + 2903 * k) for k in range(300)]),
        ("sin_offset", [str(1_100_000 + 2903 * k) for k in range(300)]),
        ("zip_size", [str(1000 + 29 * k) for k in range(300)]),
    ):  # fmt: skip
        assert ColumnProfile(name, np.array(cells, object)).personal == "", name
        numbers = np.array([float(cell) if cell.isdigit() else np.nan for cell in cells])
        assert np.isnan(numbers).any() or exclusion_reason(name, ReadColumn(numbers), len(cells)) == "", name


def test_texts_that_are_named_as_categories_are_kept_if_they_only_look_like_names() -> None:
    frame = clean().assign(attending=[f"{'KLMN'[k % 4]}{'aei'[k // 4 % 3]}rology" for k in range(N)])
    frame = frame[["attending", "age", "ill"]]
    assert names(fl.Dataset.create(frame)) == ["age"]
    kept = fl.Dataset.create(frame, categorical=["attending"])
    assert names(kept) == ["attending", "age"]
    (note,) = [note for note in kept.notes if "attending" in note]
    assert note.endswith("If they are people, add it to drop")
    assert names(fl.Dataset.create(frame, categorical=["attending"], drop=["attending"])) == ["age"]


def test_rare_levels_stay_out_of_agreements(tmp_path: Path) -> None:
    frame = clean()
    frame["ward"] = ["rare" if k < 4 else "single" if k == 4 else "ab"[k % 2] for k in range(N)]
    frame["origin"] = [f"o{k % 60}" for k in range(N)]
    frame.to_csv(tmp_path / "t.csv", index=False)
    said = CliRunner().invoke(app, ["init", str(tmp_path / "t.csv"), "--target", "ill", "--agree"]).output
    agreement = Agreement.read(tmp_path / "t.agreement.toml")
    (ward,) = [column for column in agreement.column if column.name == "ward"]
    assert (ward.levels, ward.missing, agreement.level_rows) == (("a", "b"), True, 5)
    assert "column 'ward': 2 levels with fewer than 5 rows (level_rows) are not named, but filled" in said
    assert "rare" not in (tmp_path / "t.agreement.toml").read_text().replace("rarer", "")
    data = fl.load(tmp_path / "t.csv", target="ill", agreement=str(tmp_path / "t.agreement.toml"))
    assert int(data.x[:, names(data).index("ward")].isnan().sum()) == 5


def test_underscores_and_digits_of_other_scripts_are_no_numbers(tmp_path: Path) -> None:
    for odd in ("1_000", "1_0", "\u0661\u0662", "\uff11"):
        frame = clean().astype({"crp": object})
        frame.loc[3, "crp"] = odd
        frame["crp"] = frame["crp"].astype(str)
        frame.to_csv(tmp_path / "t.csv", index=False)
        frame.to_parquet(tmp_path / "t.parquet")
        for table in (tmp_path / "t.csv", tmp_path / "t.parquet", frame):
            with pytest.raises(DataError, match=f"column 'crp': expected a finite number, got '{odd}'"):
                fl.load(table) if isinstance(table, Path) else fl.Dataset.create(table)
        assert ColumnProfile("c", np.array([odd], object)).kind == "text"


CELLS = st.sampled_from(
    ["1", "2.5", "-3e4", " 7 ", "1_000", "\u0663", "true", "False", "yes", "b", "12,4", "<5", "2020-01-31", "", "NA",
     "?", "unknown", "-", "inf", "nan", "1e400", "0x1F", "+4", ".5", "5.", "1 000", "9", "99", "-1"]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(CELLS, min_size=12, max_size=30), st.booleans())
def test_the_survey_and_the_reader_have_one_type_for_a_column(cells: list[str], parquet: bool) -> None:
    """Law: a column is of numbers for the survey where the reader reads it as numbers, and these are the same."""
    frame = pd.DataFrame({"c": cells, "a": np.arange(len(cells)) * 0.5 + 0.25, "y": [k % 2 for k in range(len(cells))]})
    path = Path(_FOLDER) / ("t.parquet" if parquet else "t.csv")
    frame.to_parquet(path, index=False) if parquet else frame.to_csv(path, index=False)
    options = {} if parquet else {"separator": ",", "decimal": "."}
    profile = TableSurvey(path).columns["c"]
    kind = Parquet if parquet else Csv
    read = lambda **more: kind(path=str(path), target="y", impute=True, **options, **more).read(None)  # noqa: E731
    missing = [*profile.odd, *profile.extremes]
    if profile.kind in ("number", "empty"):
        np.testing.assert_array_equal(read(missing=missing).x[:, 0].numpy(), profile.values)
    else:
        with pytest.raises(DataError, match="column 'c': expected a finite number"):
            read()
        levels = read(categorical=["c"], include=["c"])
        assert levels.prepare.columns[0].levels > 0
        assert int(levels.x[:, 0].isnan().sum()) == profile.missing


@pytest.fixture(autouse=True, scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    global _FOLDER
    _FOLDER = str(tmp_path_factory.mktemp("types"))


_FOLDER = ""


@pytest.mark.parametrize("event", [False, True])
def test_an_empty_name_is_a_name(event: bool, tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": RNG.normal(size=60), "b": RNG.normal(size=60), "": RNG.permutation(60) * 1.7 + 0.5})
    options: dict[str, Any] = {"task": "regression"}
    if event:
        frame = pd.DataFrame({"a": frame["a"], "t": frame[""], "": RNG.integers(2, size=60)})
        options = {"target": "t", "event": ""}
    for entrance, data in entrances(frame, tmp_path, **options).items():
        assert data.task == ("survival" if event else "regression"), entrance
        np.testing.assert_allclose(data.y[:, -1].numpy(), frame[""], err_msg=entrance)
    first = frame[["", *(c for c in frame.columns if c)]]
    assert names(fl.Dataset.create(first, target="", task="regression"))[0] == first.columns[1]


def change(**columns: Any) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda frame: frame.assign(**columns)


def visits(frame: pd.DataFrame) -> pd.DataFrame:
    patients = clean(3, 60)
    return pd.concat([patients.assign(crp=patients["crp"] + k, patient_id=np.arange(60)) for k in range(4)])[
        ["patient_id", *patients.columns]
    ]


def noisy_copies(frame: pd.DataFrame) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    half = pd.DataFrame({**{f"x{k}": rng.normal(size=N // 2) for k in range(5)}, "ill": rng.integers(2, size=N // 2)})
    more = half.assign(**{f"x{k}": half[f"x{k}"] + rng.normal(size=N // 2) * 0.01 for k in range(5)})
    return pd.concat([half, more])


def sorted_index(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.sort_values("ill").reset_index(drop=True).reset_index()


RISK = lambda f: f["age"] * 2.0 + f["bmi"] + np.random.default_rng(5).normal(size=len(f)) * 20  # noqa: E731
TIMES = np.random.default_rng(6).integers(1, 900, N)
LEAKS: dict[str, tuple[Callable[[pd.DataFrame], pd.DataFrame], dict[str, Any], str]] = {
    "index": (sorted_index, {}, "column 'index' numbers the rows"),
    "numbered": (lambda f: f.assign(turn=COUNT).sort_index(axis=1), {"target": "ill"}, "column 'turn' counts from 0"),
    "id": (change(patient_id=RNG.permutation(10**6)[:N]), {"target": "ill"},
        "column 'patient_id' differs in every row"),
    "visits": (visits, {}, "column 'patient_id': 60 different values in 240 rows"),
    "visits by text": (
        lambda f: f.assign(subject=[f"s{k % 60}" for k in range(N)]),
        {"target": "ill", "categorical": ["subject"]}, "column 'subject': 60 different values in 240 rows",
    ),
    "copy of the class": (
        lambda f: f.assign(code=f["ill"] * 3 + 1), {"target": "ill"}, "column 'code' alone predicts 'ill'",
    ),
    "class as text": (
        lambda f: f.assign(note=np.where(f["ill"] == 1, "admitted", "well")),
        {"target": "ill", "categorical": ["note"]}, "column 'note' alone predicts 'ill'",
    ),
    "several codes": (
        lambda f: f.assign(code=f["ill"] * 5 + COUNT % 5), {"target": "ill"}, "column 'code' alone predicts 'ill'",
    ),
    "filled afterwards": (
        lambda f: f.assign(days=np.where(f["ill"] == 1, RNG.normal(9, 2, N).round(1), np.nan)),
        {"target": "ill", "impute": True}, "column 'days' alone predicts 'ill'",
    ),
    "another unit": (
        lambda f: f.assign(cost=RISK(f), cents=RISK(f) * 100), {"target": "cost", "task": "regression"},
        "column 'cents' alone predicts 'cost'",
    ),
    "rounded outcome": (
        lambda f: f.assign(cost=RISK(f), about=RISK(f).round(0)), {"target": "cost", "task": "regression"},
        "column 'about' alone predicts 'cost'",
    ),
    "logarithm": (
        lambda f: f.assign(cost=np.exp(RISK(f) / 90), log_cost=RISK(f)), {"target": "cost", "task": "regression"},
        "column 'log_cost' alone predicts 'cost'",
    ),
    "time in months": (
        lambda f: f.assign(days=TIMES, months=TIMES / 30.4), {"target": "days", "event": "ill"},
        "column 'months' alone predicts 'days'",
    ),
    "event again": (
        lambda f: f.assign(days=TIMES, dead=f["ill"]), {"target": "days", "event": "ill"},
        "column 'dead' alone predicts 'ill'",
    ),
    "rows twice": (lambda f: pd.concat([f, f.sample(40, random_state=0)]), {}, "40 of 280 rows are exact copies"),
    "all rows twice": (lambda f: pd.concat([f, f]), {}, "240 of 480 rows are exact copies"),
    "augmented": (noisy_copies, {}, "have a neighbor that is much closer"),
    "site is the class": (
        lambda f: f.assign(hospital=np.where(f["ill"] == 1, "a", "b")), {"target": "ill", "client_column": "hospital"},
        "the client alone predicts 'ill' almost perfectly",
    ),
    "sites by class": (
        lambda f: f.assign(hospital=[f"h{2 * (k % 4) + y}" for k, y in enumerate(f["ill"])]),
        {"target": "ill", "client_column": "hospital"}, "the client alone predicts 'ill' almost perfectly",
    ),
    "shuffled index": (
        lambda f: f.assign(id=RNG.permutation(N))[["id", *f.columns]], {}, "column 'id' numbers the rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEAKS)
def test_a_planted_leak_is_noted_at_every_entrance(case: str, tmp_path: Path) -> None:
    build, options, words = LEAKS[case]
    assert len(LEAKS) == 20
    frame = build(clean(1)).reset_index(drop=True)
    for entrance, data in entrances(frame, tmp_path, **options).items():
        assert any(words in note for note in data.notes), (entrance, data.notes)


SITES = np.repeat(list("abcdef"), N // 6)
OTHER_LEAKS: dict[str, tuple[Callable[[pd.DataFrame], pd.DataFrame], dict[str, Any], str]] = {
    "rank": (
        lambda f: f.assign(cost=RISK(f), place=RISK(f).rank()), {"target": "cost", "task": "regression"},
        "column 'place' alone predicts 'cost'",
    ),
    "quartiles": (
        lambda f: f.assign(cost=RISK(f), band=pd.qcut(RISK(f), 4, labels=False)),
        {"target": "cost", "task": "regression"}, "column 'band' alone predicts 'cost'",
    ),
    "bands by name": (
        lambda f: f.assign(cost=RISK(f), band=pd.qcut(RISK(f), 3, labels=["mid", "a", "top"]).astype(str)),
        {"target": "cost", "task": "regression", "categorical": ["band"]}, "column 'band' alone predicts 'cost'",
    ),
    "above a limit": (
        lambda f: f.assign(cost=RISK(f), dear=(RISK(f) > 150).astype(int)), {"target": "cost", "task": "regression"},
        "column 'dear' alone predicts 'cost'",
    ),
    "with noise": (
        lambda f: f.assign(cost=RISK(f), bill=RISK(f) + RNG.normal(size=N) * 0.5),
        {"target": "cost", "task": "regression"}, "column 'bill' alone predicts 'cost'",
    ),
    "one-hot": (
        lambda f: f.assign(stage=COUNT % 3, is_0=COUNT % 3 == 0, is_1=COUNT % 3 == 1), {"target": "stage"},
        "column 'is_1' follows from 'stage'",
    ),
    "mean by site": (
        lambda f: f.assign(site=SITES, rate=f.groupby(SITES)["ill"].transform("mean") * 100),
        {"target": "ill", "client_column": "site"}, "column 'rate' is the mean of 'ill' in groups of rows",
    ),
    "missing at one site": (
        lambda f: f.assign(site=SITES, crp=f["crp"].where(~((SITES == "c") & (f["ill"] == 0)))),
        {"target": "ill", "client_column": "site", "impute": True},
        "column 'crp' is missing at 'c' exactly if 'ill' is '0'",
    ),
    "families": (
        lambda f: f.assign(family=COUNT % 90), {"target": "ill"}, "column 'family': 90 different values in 240 rows",
    ),
    "rounded copies": (
        lambda f: pd.concat([noisy_copies(f).head(N // 2), noisy_copies(f).head(N // 2).round(5)]), {},
        "have a neighbor that is much closer",
    ),
    "9 as a class": (lambda f: f.assign(ill=f["ill"].where(COUNT % 9 > 0, 9)), {}, "the label 'ill': 9 in 27 rows may"),
    "the other class": (lambda f: f.assign(ill=f["ill"].map({0: "no", 1: "Yes"})), {}, "other values for one class"),
    "coded 1 and 2": (lambda f: f.assign(ill=f["ill"] + 1), {}, "other values for one class"),
    "long numbers": (
        lambda f: f.assign(card=2**53 + RNG.permutation(10**6)[:N])[["card", *f.columns]], {},
        "column 'card' contains numbers beyond 9,007,199,254,740,992",
    ),
    "days": (
        lambda f: f.assign(seen=[int(f"2024{1 + k % 12:02d}{1 + k % 28:02d}") for k in COUNT])[["seen", *f.columns]],
        {}, "column 'seen' contains dates as numbers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_LEAKS)
def test_another_leak_is_noted_at_every_entrance_and_not_without_it(case: str, tmp_path: Path) -> None:
    build, options, words = OTHER_LEAKS[case]
    for entrance, data in entrances(build(clean(1)).reset_index(drop=True), tmp_path, **options).items():
        assert any(words in note for note in data.notes), (entrance, data.notes)


def symptoms(rng: np.random.Generator) -> dict[str, Any]:
    """Symptoms that depend on each other, and a different integer in each row."""
    flags = (rng.random(N) < 0.5)[:, None] ^ (rng.random((N, 20)) < 0.02)
    columns = {f"s{k}": flags[:, k].astype(int) for k in range(20)}
    return {**columns, "income": rng.permutation(90_000)[:N] + 10_000, "y": rng.integers(2, size=N)}


CLEAN: dict[str, Callable[[np.random.Generator], tuple[dict[str, Any], dict[str, Any]]]] = {
    "mixed": lambda r: (dict(clean(7)), {}),
    "small": lambda r: (dict(clean(8, 40)), {}),
    "a count for every row": lambda r: ({"num_steps": r.permutation(9000)[:N], **clean(7)}, {}),
    "symptoms and an income": lambda r: (symptoms(r), {}),
    "large": lambda r: (dict(clean(9, 5000)), {}),
    "normal": lambda r: ({**{f"x{k}": r.normal(size=N) for k in range(6)}, "y": r.integers(3, size=N)}, {}),
    "flags alone": lambda r: ({**{f"f{k}": r.integers(2, size=N) for k in range(6)}, "y": r.integers(2, size=N)}, {}),
    "flags that depend": lambda r: (
        lambda a, b, c, y: ({"a": a, "b": a & b, "c": a | c, "y": y}, {})
    )(*r.integers(2, size=(4, 2000))),
    "levels": lambda r: (
        {"ward": r.choice(["a", "b", "c"], N), "age": r.integers(20, 90, N), "y": r.integers(2, size=N)},
        {"categorical": ["ward"]},
    ),
    "none is a level": lambda r: (
        {"drug": r.choice(["none", "a"], N), "age": r.integers(20, 90, N), "y": r.integers(2, size=N)},
        {"categorical": ["drug"]},
    ),
    "counts": lambda r: ({"visits": r.poisson(1, N), "age": r.integers(20, 90, N), "y": r.integers(2, size=N)}, {}),
    "zeros": lambda r: (
        {"pack_years": np.where(r.random(N) < 0.5, 0, r.exponential(20, N).round(1)), "age": r.normal(50, 9, N),
         "y": r.integers(2, size=N)}, {},
    ),
    "scores from 0 to 10": lambda r: ({"pain": r.integers(0, 11, N), "y": r.integers(2, size=N)}, {}),
    "grades with 9": lambda r: ({"grade": r.integers(1, 10, N), "y": r.integers(2, size=N)}, {}),
    "trend": lambda r: ({"trend": r.integers(-1, 2, N), "age": r.normal(50, 9, N), "y": r.integers(2, size=N)}, {}),
    "years": lambda r: ({"year": 1780 + np.arange(N), "flow": r.normal(900, 90, N), "y": r.integers(2, size=N)}, {}),
    "sites": lambda r: (
        {"age": r.normal(50, 9, N), "hospital": r.choice(list("abcd"), N), "y": r.integers(2, size=N)},
        {"client_column": "hospital"},
    ),
    "regression": lambda r: (
        lambda a: ({"a": a, "b": r.normal(size=N), "price": 3 * a + r.normal(size=N)}, {"task": "regression"})
    )(r.normal(size=N)),
    "survival": lambda r: (
        {"age": r.normal(60, 9, N), "time": r.integers(1, 900, N), "status": r.integers(2, size=N)},
        {"target": "time", "event": "status"},
    ),
    "time series": lambda r: (
        {"level": np.cumsum(r.normal(size=N)), "rain": r.exponential(2, N).round(2), "y": r.integers(2, size=N)}, {},
    ),
    "correlated": lambda r: (
        lambda a, b, c: ({"a": a, "b": a + 0.1 * b, "c": a**2 + c, "y": r.integers(2, size=N)}, {})
    )(*r.normal(size=(3, N))),
    "gaps": lambda r: (
        {"a": np.where(r.random(N) < 0.2, np.nan, r.normal(size=N)), "b": r.normal(size=N), "y": r.integers(2, size=N)},
        {"impute": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CLEAN)
def test_a_clean_table_has_no_note(case: str) -> None:
    assert len(CLEAN) == 22
    for seed in range(5):
        columns, options = CLEAN[case](np.random.default_rng(seed))
        assert fl.Dataset.create(pd.DataFrame(columns), **options).notes == (), seed


MARKED: dict[str, tuple[Any, str]] = {
    "zeros": (np.where(RNG.random(N) < 0.1, 0, RNG.normal(27, 4, N).round(1)), "0 in "),
    "zeros of insulin": (np.where(RNG.random(N) < 0.4, 0, (14 + RNG.gamma(2, 60, N)).round(0)), "0 in "),
    "9 beside 0 and 1": (np.where(RNG.random(N) < 0.05, 9, RNG.integers(2, size=N)), "9 in "),
    "99 beside ages": (np.where(RNG.random(N) < 0.05, 999, RNG.integers(20, 60, N)), "999 in "),
    "-1": (np.where(RNG.random(N) < 0.05, -1, RNG.integers(0, 40, N)), "-1 in "),
    "-9": (np.where(RNG.random(N) < 0.05, -9, RNG.normal(130, 15, N).round(0)), "-9 in "),
    "text": (np.where(RNG.random(N) < 0.05, "Unknown", RNG.choice(["a", "b"], N)), "'Unknown' in "),
    "nk": (np.where(RNG.random(N) < 0.05, "nk", RNG.choice(["y", "n"], N)), "'nk' in "),
}


@pytest.mark.parametrize("case", MARKED)
def test_numbers_and_words_that_may_mean_missing_are_named_and_left_alone(case: str, tmp_path: Path) -> None:
    cells, words = MARKED[case]
    frame = clean(2).assign(mark=cells)[["mark", "age", "bmi", "ill"]].replace({"ill": {0: "no", 1: "yes"}})
    options: dict[str, Any] = {"categorical": ["mark"]} if frame["mark"].dtype.kind not in "if" else {}
    for entrance, data in entrances(frame, tmp_path, **options).items():
        assert any(f"column 'mark': {words}" in note and "may mean missing" in note for note in data.notes), entrance
        assert not bool(data.x.isnan().any())
    marker = words.removesuffix(" in ").strip("'")
    named = fl.Dataset.create(frame, missing=[marker], impute=True, **options)
    assert not any("may mean missing" in note for note in named.notes)
    assert bool(named.x[:, 0].isnan().any())


def test_the_estimators_of_scikit_learn_have_the_notes_of_the_survey() -> None:
    frame = clean(1).assign(code=lambda f: f["ill"] * 3)
    frame.insert(0, "Unnamed: 0", COUNT)
    with pytest.warns(UserWarning, match="column 'Unnamed: 0' numbers the rows"):
        fitted = FederatedClassifier(rounds=1).fit(frame.drop(columns="ill"), frame["ill"])
    assert any("column 'Unnamed: 0' numbers the rows" in note for note in fitted.notes_)
    assert any("column 'code' alone predicts 'y'" in note for note in fitted.notes_)
    sound = clean()
    assert FederatedRegressor(rounds=1).fit(sound[["age", "crp"]], sound["bmi"]).notes_ == ()


def test_nothing_is_left_where_all_columns_number_rows() -> None:
    with pytest.raises(ConfigError, match=r"(?s)no column is left as a feature.*numbers the rows"):
        fl.Dataset.create(pd.DataFrame({"index": COUNT, "y": COUNT % 2}))


@pytest.mark.parametrize(
    "texts", [[f"{k} months" for k in range(N)], [f"Sample {k}" for k in range(N)], pd.to_timedelta(COUNT, "h")]
)
def test_numbers_with_a_word_are_no_addresses(texts: Any) -> None:
    frame = clean().assign(what=texts)
    with pytest.raises(DataError, match="column 'what': expected a finite number"):
        fl.Dataset.create(frame, target="ill")


def test_a_level_of_test_rows_alone_is_noted() -> None:
    frame = clean().assign(ward=RNG.choice(["a", "b"], N), late=(COUNT >= 200).astype(int))
    frame.loc[frame["late"] == 1, "ward"] = "new"
    options: dict[str, Any] = {"target": "ill", "categorical": ["ward"]}
    late = fl.partitions.iid(clients=2)(fl.Dataset.create(frame, test_column="late", **options), seed=0)
    assert any("column 'ward': 'new' occurs in test rows but in no training row" in note for note in late.notes)
    mixed = fl.partitions.iid(clients=2)(fl.Dataset.create(frame.drop(columns="late"), **options), seed=0)
    assert not any("in no training row" in note for note in mixed.notes)


def test_a_test_part_of_one_class_is_noted_before_a_run() -> None:
    frame = clean().assign(late=(COUNT >= 200).astype(int))
    frame.loc[frame["late"] == 1, "ill"] = 1
    late = fl.partitions.iid(clients=2)(fl.Dataset.create(frame, target="ill", test_column="late"), seed=0)
    assert any("all 40 rows of the test set are of class '1': AUROC" in note for note in late.notes)
    mixed = fl.partitions.iid(clients=2)(fl.Dataset.create(clean(), target="ill"), seed=0)
    assert not any("are of class" in note for note in mixed.notes)
