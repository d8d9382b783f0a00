"""One meaning of a table: the same rows by any door give the same bits, and a marker of gaps is compared by value."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import fedloom as fl
from fedloom.data import Dataset
from fedloom.data.input_spec import InputSpec
from fedloom.data.new_data import NewData
from fedloom.data.new_rows import new_rows
from fedloom.data.tables import MISSING_MARKERS
from fedloom.errors import DataError
from tests import hospitals

SPEC: dict[str, Any] = {
    "target": "died",
    "task": "binary",
    "client_column": "site",
    "categorical": ("ward", "grade"),
    "missing": ("-9", "999"),
    "impute": True,
}
NUMBERS = st.one_of(st.sampled_from([-9.0, 999.0, 0.0, -9.5]), st.integers(-50, 50).map(lambda k: k / 4))
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "dose": st.one_of(st.none(), NUMBERS),
            "count": st.sampled_from([-9, 0, 1, 999, 12]),
            "alive": st.booleans(),
            "ward": st.sampled_from(["A", "B", "NA", "-9"]),
            "grade": st.one_of(st.none(), st.sampled_from([1, 2, 10, -9])),
            "site": st.sampled_from(["x", "y"]),
            "died": st.sampled_from([0, 1]),
        }
    ),
    min_size=6,
    max_size=20,
)


class Hub(list[dict[str, Any]]):
    """A data set of the hub, as far as a table is read from it."""

    features: ClassVar[dict[str, Any]] = {}

    @property
    def column_names(self) -> list[str]:
        return [*self[0]]

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


class Stream:
    """A table of another library, as Arrow reads it."""

    def __init__(self, table: pa.Table) -> None:
        self.columns, self._table = table.column_names, table

    def __arrow_c_stream__(self, schema: object = None) -> object:
        return self._table.__arrow_c_stream__(schema)


NAMES = ("dose", "count", "alive", "ward", "grade", "site", "died")
Hub.features = dict.fromkeys(NAMES)


def doors(rows: list[dict[str, Any]], folder: Path, spec: dict[str, Any]) -> dict[str, Dataset]:
    """The rows as a data set by every door, the CSV file with markers as a program and as a person writes them."""
    found: dict[str, Dataset] = {}
    for name, change in (("plain", str), ("blanks", lambda v: f" {float(v)} " if v in (-9, 999, "-9") else str(v))):
        path = folder / f"{name}.csv"
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, [*rows[0]])
            table.writeheader()
            table.writerows({k: "" if v is None else change(v) for k, v in row.items()} for row in rows)
        found[name] = fl.load(path, **spec)
    frame, arrow = pd.DataFrame(rows), pa.Table.from_pylist(rows)
    own = Stream(pa.Table.from_pylist([{name: row[name] for name in reversed(NAMES)} for row in rows]).select(NAMES))
    for door, table in (("arrow", arrow), ("arrow of another library", own)):
        found[door] = Dataset.create(table, spec["target"], **{k: v for k, v in spec.items() if k != "target"})
    found["pandas"] = Dataset.create(frame, spec["target"], **{k: v for k, v in spec.items() if k != "target"})
    parquet.write_table(arrow, folder / "t.parquet")
    found["parquet"] = fl.load(folder / "t.parquet", **spec)
    found["hub"] = Dataset.create(Hub(rows), spec["target"], **{k: v for k, v in spec.items() if k != "target"})
    return found


@given(rows=ROWS)
def test_the_same_rows_by_any_door_are_the_same_bits(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    rows = [{name: row[name] for name in NAMES} for row in rows]
    rows = [*rows, {**rows[0], "died": 0, "dose": 1.5}, {**rows[0], "died": 1, "ward": "A", "grade": 1}]
    found = doors(rows, tmp_path_factory.mktemp("doors"), SPEC)
    first = found.pop("plain")
    gaps = [row["dose"] in (None, -9.0, 999.0) for row in rows]
    assert first.x[:, 0].isnan().tolist() == gaps
    table: Any = first.prepare
    features = {name: [row[name] for row in rows] for name in ("dose", "count", "alive", "ward", "grade")}
    spec = InputSpec(shape=(table.width,), task="binary", classes=first.classes, table=table)
    want = new_rows(spec, features).x
    assert torch.equal(want.nan_to_num(-1e9), first.x.nan_to_num(-1e9))
    for door, data in found.items():
        assert torch.equal(data.x.nan_to_num(-1e9), first.x.nan_to_num(-1e9)), door
        assert torch.equal(data.y, first.y), door
        assert (data.classes, data.user_names, data.prepare) == (first.classes, first.user_names, table), door
        assert torch.equal(new_rows(spec, data).x.nan_to_num(-1e9), want.nan_to_num(-1e9)), door
    table = pa.Table.from_pylist(rows)
    for arrow in (table, Stream(table.select([*reversed(NAMES)]))):
        assert torch.equal(new_rows(spec, arrow).x.nan_to_num(-1e9), want.nan_to_num(-1e9))


@settings(max_examples=12)
@given(rows=ROWS)
def test_converted_units_are_the_same_bits_by_any_door(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any]
) -> None:
    """A marker is compared before its cell is converted, and a client's factor is that of its rows."""
    rows = [{name: row[name] for name in NAMES} for row in rows]
    rows = [*rows, {**rows[0], "died": 0, "dose": 1.5, "site": "x"}, {**rows[0], "died": 1, "dose": 1.5, "site": "y"}]
    by_client = {"x": 0.1, "y": 88.4}
    converted = doors(rows, tmp_path_factory.mktemp("doors"), {**SPEC, "factors": {"dose": by_client, "count": 3.7}})
    for door, data in converted.items():
        for name, place, factors in (("dose", 0, by_client), ("count", 1, {"x": 3.7, "y": 3.7})):
            cells = [-1e9 if row[name] in (None, -9, 999) else row[name] * factors[row["site"]] for row in rows]
            assert torch.equal(data.x[:, place].nan_to_num(-1e9), torch.tensor(cells, dtype=data.x.dtype)), door
        assert torch.equal(data.x.nan_to_num(-1e9), converted["plain"].x.nan_to_num(-1e9)), door
        assert torch.equal(data.y, converted["plain"].y), door


def test_arrow_codes_are_levels_and_unnamed_rows_are_converted_as_named_ones(tmp_path: Path) -> None:
    """By an array, whose columns have no names, too."""
    rows = pd.DataFrame({"dose": [1.0, 2.0, -9.0, 4.0], "count": [3.0, 1.0, 2.0, 5.0], "died": [0, 1, 0, 1]})
    coded = rows.assign(ward=pd.Categorical(["A", "B", "A", "A"]))[["ward", *rows]]
    by_door = [Dataset.create(t, "died", missing=("-9",), impute=True) for t in (coded, pa.Table.from_pandas(coded))]
    assert [d.prepare.columns[0].names for d in by_door] == [("A", "B")] * 2  # type: ignore[union-attr]
    assert torch.equal(*(d.x.nan_to_num(-1e9) for d in by_door))
    data = Dataset.create(rows, "died", missing=("-9",), impute=True, factors={"dose": 3.7})
    spec = InputSpec(shape=(3,), task="binary", classes=("0", "1"), table=data.prepare)  # type: ignore[arg-type]
    features = rows[["dose", "count"]]
    np.savez(tmp_path / "t.npz", x=features.to_numpy())
    reader = NewData({"factors": {"dose": 3.7}})
    for given_rows in (features, features.to_numpy(), tmp_path / "t.npz", pa.Table.from_pandas(features)):
        found = reader.rows(spec, given_rows)
        assert torch.equal(found.x.nan_to_num(-1e9), data.x.nan_to_num(-1e9))
        assert found.notes == ("column 'dose': 1 cell filled as in training",)


def test_a_data_set_made_without_the_markers_has_the_model_s_gaps() -> None:
    """What a model was trained to see as missing is missing in whatever table it is given."""
    rows = [{"a": float(k), "y": k % 2} for k in range(8)]
    trained = Dataset.create(pd.DataFrame(rows), "y", missing=("-9",), impute=True)
    spec = InputSpec(shape=(1,), task="binary", classes=("0", "1"), table=trained.prepare)  # type: ignore[arg-type]
    plain = Dataset.create(pd.DataFrame([{"a": -9, "y": 0}, {"a": 2, "y": 1}]), "y")
    assert spec.raw(plain).isnan().flatten().tolist() == [True, False]


def test_markers_add_to_those_of_every_table_and_a_useless_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,y\n-9.0,1,0\nNA,2,1\n3,-99,0\n4,5,1\n")
    data = fl.load(path, missing=("-9", "-99", "-77"), impute=True)
    assert data.x.isnan().tolist() == [[True, False], [True, False], [False, True], [False, False]]
    assert list(data.notes) == ["missing: no cell of t is '-77'"]
    assert "missing: no cell of t is '-77'" in fl.partitions.iid(clients=2, test=0.0)(data, seed=0).notes
    path.write_text("a,y\n1;5,0\n2,1\n")
    with pytest.raises(DataError, match="add it to missing"):
        fl.load(path)


def test_cells_that_pandas_reads_as_missing_are_missing_but_none(tmp_path: Path) -> None:
    """In numbers and in levels alike, None and the question mark apart."""
    cells = [*MISSING_MARKERS[1:], "None", "#N/A ", " n/a", "Na", "none", "0"]
    path = tmp_path / "t.csv"
    path.write_text("ward,y\n" + "".join(f"{cell},{k % 2}\n" for k, cell in enumerate(cells)))
    data = fl.load(path, categorical=("ward",), impute=True)
    frame = pd.read_csv(path, skipinitialspace=True)["ward"].str.strip()
    gaps = frame.isna() | frame.isin(["?", "#N/A"])
    assert data.x[:, 0].isnan().tolist() == gaps.mask(pd.Series(cells) == "None", False).tolist()
    path.write_text("a,y\n1,0\n" + "".join(f"{cell},1\n" for cell in cells[: len(MISSING_MARKERS) - 1]))
    assert fl.load(path, impute=True).x.isnan().flatten().tolist() == [False] + [True] * (len(MISSING_MARKERS) - 1)


def test_a_decimal_comma_and_its_separator_are_found_at_every_door(tmp_path: Path) -> None:
    rows = hospitals.patients("Dorn", si=False)
    options: dict[str, Any] = {
        "target": "died", "categorical": ("sex", "ward"), "missing": ("-9",), "impute": True,
        "drop": ("patient_id", "hospital", "troponin_hs", hospitals.LEAK),
    }  # fmt: skip
    plain = fl.load(hospitals.write(tmp_path / "plain.csv", rows), **options)
    for sign in ";\t|":
        data = fl.load(hospitals.write(tmp_path / "other.csv", rows, separator=sign, comma=True), **options)
        assert torch.equal(data.x.nan_to_num(-1e9), plain.x.nan_to_num(-1e9)), sign
        assert torch.equal(data.y, plain.y)
    table: Any = plain.prepare
    place = [column.name for column in table.columns].index("systolic")
    assert int(plain.x[:, place].isnan().sum()) == sum(row["systolic"] == -9 for row in rows) > 5


TABLE = np.random.default_rng(0).normal(size=(40, 3))
NOTED: dict[str, tuple[Any, Any, list[str]]] = {
    "sound": (TABLE, np.arange(40) % 2, []),
    "far": (
        np.where(np.arange(120).reshape(40, 3) == 61, 1e9, TABLE), np.arange(40) % 2,
        ["row 20, column '1': 1e+09 is extremely far from the other numbers"],
    ),
    "constant": (
        TABLE * (1, 1, 0), np.arange(40) % 2,
        ["column '2': the same in every row, so a model cannot learn from it; leave it out"],
    ),
    "one class": (TABLE, np.zeros(40, int), ["the label 'y' is '0' in every row, so a model cannot learn from these"]),
    "a target": (TABLE, np.r_[1e9, TABLE[1:, 0]], ["row 0, column 'y': 1e+09 is extremely far from the other numbers"]),
    "an event": (TABLE, np.c_[np.arange(1, 41), np.ones(40)], []),
    "few": (TABLE[:9] * 0, np.arange(9) % 2, []),
    "a table of bytes": (
        (TABLE * 0).astype(np.uint8), np.arange(40) % 2, ["x contains bytes (uint8), which are read as pixels"],
    ),
    "images of bytes": (np.arange(640, dtype=np.uint8).reshape(40, 1, 4, 4), np.arange(40) % 2, []),
    "black images of bytes": (
        np.zeros((40, 1, 4, 4), np.uint8),
        np.arange(40) % 2,
        ["x contains only the bytes 0 and 1, and bytes are divided"],
    ),
    "images": (np.zeros((40, 1, 4, 4)), np.arange(40) % 2, []),
    "bright images": (
        np.full((40, 1, 4, 4), 255.0), np.arange(40) % 2, ["x contains numbers of up to 255. Floats are used"],
    ),
    "bright flat images": (
        np.pad(np.random.default_rng(1).random((40, 30)) * 255, ((0, 0), (34, 0))), np.arange(40) % 2,
        ["x contains numbers of up to 25"],
    ),
    "flat images": (np.pad(np.random.default_rng(1).random((40, 30)), ((0, 0), (34, 0))), np.arange(40) % 2, []),
}  # fmt: skip


@pytest.mark.parametrize("case", NOTED)
def test_arrays_have_the_notes_of_a_table_and_images_one_on_their_size(case: str, tmp_path: Path) -> None:
    """By NPZ, NPY and in memory, where a table in columns has them too."""
    x, y, wanted = NOTED[case]
    task = "survival" if case == "an event" else None
    np.savez(tmp_path / "t.npz", x=x, y=y)
    (tmp_path / "t").mkdir()
    np.save(tmp_path / "t" / "x.npy", x if x.dtype == np.uint8 else x.astype(np.float32))
    np.save(tmp_path / "t" / "y.npy", y)
    by_door = {
        "npz": fl.load(tmp_path / "t.npz", task=task),
        "npy": fl.load("npy", path=str(tmp_path / "t"), task=task),
        "memory": Dataset.create(x, y, task=task),
    }
    for door, data in by_door.items():
        assert [note[: len(want)] for note, want in zip(data.notes, wanted, strict=True)] == wanted, door
    clients = 1 + (case != "one class")  # one of several sites, for which alone it is no error
    assert set(data.notes) <= set(fl.partitions.iid(clients=clients, test=0.0)(data, seed=0).notes)


def test_an_array_s_number_beyond_a_model_s_is_named(tmp_path: Path) -> None:
    x = TABLE.copy()
    x[7, 1] = -1e39
    np.savez(tmp_path / "t.npz", x=x, y=np.arange(40) % 2)
    np.savez(tmp_path / "f.npz", x=np.asfortranarray(x), y=np.arange(40) % 2)
    wanted = r"row 7, column 1: expected a number of at most 3.4e\+38, got -1e\+39"
    for file in ("t.npz", "f.npz"):
        with pytest.raises(DataError, match=rf"{file}.*{wanted}"):
            fl.load(tmp_path / file)
    with pytest.raises(DataError, match=rf"{wanted}\. Repair the number, or remove the row"):
        Dataset.create(x, np.arange(40) % 2)
    with pytest.raises(DataError, match=r"row 0: expected a number .*\(40 such rows\)"):
        Dataset.create(np.full((40, 1, 2, 2), 1e300), np.arange(40) % 2)
