"""The same model on the same rows gives the same numbers by every command and from every kind of file."""

from __future__ import annotations

import csv
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pytest
from sklearn.metrics import log_loss, roc_auc_score

import fedloom as fl
from fedloom.lab.experiment import Plan, parse
from fedloom.lab.experiment.opened import RunDirectory
from fedloom.trained.export import export_model, load
from tests import hospitals
from tests.commands import call

TRAINED = ("Amsel", "Birke", "Celle", "Dorn")
EXPERIMENT = """
name = "four"
rounds = 3
seeds = [0]
[data]
source = "PATH"
target = "died"
task = "binary"
client_column = "hospital"
categorical = ["sex", "ward"]
drop = ["patient_id", "troponin_hs", "hours_to_death"]
missing = ["-9"]
impute = true
[partition]
kind = "natural"
validation = 0.2
[local]
lr = 0.1
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "ditto"
[[method]]
algorithm = "local"
"""
NUMBERS = ("age", "systolic", "glucose", "creatinine")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("four")
    path = hospitals.everyone(folder / "four.csv", sites=TRAINED)
    outcomes = Plan(parse(tomllib.loads(EXPERIMENT.replace("PATH", str(path)))), folder / "out").run(page=False)
    assert {o.status for o in outcomes} == {"done"}
    return fl.open_run(folder / "out")


def table(rows: list[hospitals.Row], **changes: Any) -> list[hospitals.Row]:
    return [{**row, **changes} for row in rows]


def write(folder: Path, rows: list[hospitals.Row]) -> dict[str, Path]:
    """The rows by every kind of file, with labels; and as CSV without, in another order of columns."""
    frame = pd.DataFrame(rows).drop(columns=["troponin_hs"])
    frame.to_parquet(folder / "rows.parquet")
    frame[["died", "extra", *reversed(frame.columns.drop(["died", "extra"]))]].to_csv(
        folder / "turned.csv", index=False
    )
    hospitals.write(folder / "rows.csv", rows)
    hospitals.write(folder / "comma.csv", rows, separator=";", comma=True)
    hospitals.write(folder / "bare.csv", rows, drop=("died", hospitals.LEAK, "patient_id"))
    return {name: folder / name for name in ("rows.csv", "rows.parquet", "turned.csv", "comma.csv", "bare.csv")}


@pytest.fixture(scope="module")
def rows() -> list[hospitals.Row]:
    """Rows of two hospitals of the run, as two files would have them, with one column that no model knows."""
    some = [row for site in ("Amsel", "Birke") for row in hospitals.patients(site, seed=1)[:150]]
    for k, row in enumerate(some):
        row["died"] = int(k % 9 == 0)
    return [{**row, "extra": "text"} for row in some]


def figures_of(scores: np.ndarray, rows: list[hospitals.Row]) -> dict[str, float]:
    died = [row["died"] for row in rows]
    return {"loss": log_loss(died, scores[:, 1]), "auroc": roc_auc_score(died, scores[:, 1])}


def agree(found: dict[str, Any], want: dict[str, float], what: object) -> None:
    for name, value in want.items():
        assert found[name] == pytest.approx(value, abs=2e-6), (what, name)


CHOICES = [("fedavg", None, None), ("ditto", None, "personal"), ("ditto", None, "hybrid"), ("ditto", None, "global")]
CHOICES += [
    ("ditto", "Birke", "personal"),
    ("ditto", "Birke", "global"),
    ("local", None, None),
    ("local", "Amsel", None),
]


@pytest.mark.parametrize(("method", "client", "kind"), CHOICES)
def test_every_command_and_every_file_give_the_same_numbers(
    opened: RunDirectory, rows: list[hospitals.Row], tmp_path: Path, method: str, client: str | None, kind: str | None
) -> None:
    places = write(tmp_path, rows)
    want = opened.predict(places["rows.csv"], method, client=client, kind=kind)
    for name, path in places.items():
        found = opened.predict(path, method, client=client, kind=kind)
        np.testing.assert_array_equal(found.scores, want.scores, err_msg=name)
        if name != "bare.csv":
            own = kind or ("global" if method == "fedavg" else "personal")
            lines = list(opened.evaluate(opened.read(path), method, client=client, kind=own))
            assert len(lines) == 1
            agree(lines[0].metrics(), figures_of(want.scores, rows), name)
    frame = pd.DataFrame(rows)
    np.testing.assert_array_equal(opened.predict(frame, method, client=client, kind=kind).scores, want.scores)
    owner = client or want.models[0]
    mine = [k for k, row in enumerate(rows) if client is not None or row["hospital"] == owner]
    model = opened.runs(method)[0].models.ready(kind, owner)
    same_outside(model, [rows[k] for k in mine], want.scores[mine], tmp_path)


def same_outside(model: Any, rows: list[hospitals.Row], want: np.ndarray, folder: Path) -> None:
    """What a graph says of the same rows."""
    export_model(model, folder / "m.onnx", "onnx")
    graph = onnxruntime.InferenceSession(folder / "m.onnx")
    names = json.loads(graph.get_modelmeta().custom_metadata_map["columns"])
    assert names == {"numbers": list(NUMBERS), "texts": ["sex", "ward"]}
    gone = (None, -9.0)
    feed = {
        "numbers": np.array([[np.nan if row[n] in gone else row[n] for n in NUMBERS] for row in rows], float),
        "texts": np.array([[row["sex"], row["ward"]] for row in rows], object),
    }
    np.testing.assert_allclose(graph.run(["probabilities"], feed)[0], want, atol=1e-6)
    export_model(model, folder / "m.pt2", "torch")
    np.testing.assert_allclose(load(folder / "m.pt2").scores(pd.DataFrame(rows)), want, atol=1e-6)


def predictions(path: Path) -> np.ndarray:
    with path.open(newline="") as file:
        return np.array([[float(row[f"probability of {c}"]) for c in "01"] for row in csv.DictReader(file)])


def test_an_adapted_model_is_the_one_that_predicts(opened: RunDirectory, tmp_path: Path) -> None:
    rows = [{**row, "hospital": "Linde"} for row in hospitals.patients("Birke", seed=2)]
    file = hospitals.write(tmp_path / "fifth.csv", rows)
    bare = hospitals.write(tmp_path / "bare.csv", rows, drop=("hospital", "died", hospitals.LEAK))
    made = tmp_path / "adapted.safetensors"
    call("adapt", opened.path, "--data", file, "--method", "ditto", "--rounds", 5, "--holdout", 0, "--out", made)
    found = {}
    for name, arguments in (
        ("labelled", (file, "--model", made)),
        ("bare", (bare, "--model", made)),
        ("global", (bare, "--method", "ditto", "--model", "global")),
    ):
        said = call("predict", opened.path, *arguments, "--out", tmp_path / f"{name}.p")
        found[name] = predictions(tmp_path / f"{name}.p")
        assert (f"the model of {made} for all rows" in said) == (name != "global")
        assert "not a client of the run" not in said
    np.testing.assert_array_equal(found["labelled"], found["bare"])
    assert np.abs(found["labelled"] - found["global"]).max() > 0.01
    want = figures_of(found["labelled"], rows)
    (line,) = opened.evaluate(opened.read(file), kind=str(made))
    agree(line.metrics(), want, "evaluate")
    assert f"{want['auroc']:.4f}" in call("evaluate", opened.path, "--data", file, "--model", made)
    same_outside(opened.load(made), rows, found["labelled"], tmp_path)
    assert "was adapted to ditto" in call("predict", opened.path, bare, "--model", made, "--method", "fedavg", code=2)
    assert "not a readable file of models" in call("predict", opened.path, bare, "--model", tmp_path / "no", code=2)


def test_a_new_hospital_is_scored_as_it_would_be_used(opened: RunDirectory, tmp_path: Path) -> None:
    """First the scaling that predict uses; that of the new rows is a second line, and needs no column of the site."""
    rows = hospitals.patients("Birke", seed=3)
    for drop in ((), ("hospital",)):
        file = hospitals.write(tmp_path / "new.csv", [{**row, "hospital": "Linde"} for row in rows], drop=drop)
        used, fitted = opened.evaluate(opened.read(file), "fedavg")
        assert [used.scaling, fitted.scaling] == ["as the clients' on average", "on these rows"]
        agree(used.metrics(), figures_of(opened.predict(file, "fedavg").scores, rows), drop)
        assert abs(used.metrics()["loss"] - fitted.metrics()["loss"]) > 1e-4
        said = call("evaluate", opened.path, "--data", file, "--method", "fedavg")
        assert said.index("average") < said.index("on these rows")
    model = opened["fedavg", 0].models.ready()
    fresh = model.rescale(opened.read(file)).scores(fitted.rows.x)
    agree(fitted.metrics(), figures_of(fresh, rows), "rescaled")


def test_columns_in_other_units_are_named_with_the_share_beyond_the_training(
    opened: RunDirectory, tmp_path: Path
) -> None:
    rows = hospitals.patients("Amsel", seed=4, si=True)
    file = hospitals.write(tmp_path / "si.csv", rows)
    words = ("predict", opened.path, file, "--method", "fedavg", "--client", "Amsel", "--out", tmp_path / "p.csv")
    said = call(*words, code=3)
    assert "'glucose', 'creatinine': most numbers are far outside the range of the training data" in said
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 1 + len(rows)
    for column in ("glucose", "creatinine"):
        assert f"column {column!r}: 100% of the rows are outside" in said
        assert said.count(f"column {column!r}: 100%") == 1
    assert "column 'age'" not in said
    assert "column 'glucose': 100% of the rows are outside" in call(
        "evaluate", opened.path, "--data", file, "--method", "fedavg", "--client", "Amsel"
    )
    usual = hospitals.write(tmp_path / "usual.csv", hospitals.patients("Amsel", seed=4))
    assert "are outside" not in call("predict", opened.path, usual, "--method", "fedavg", "--out", tmp_path / "p.csv")


def test_a_single_number_far_beyond_the_training_is_named(opened: RunDirectory, tmp_path: Path) -> None:
    rows = hospitals.patients("Amsel", seed=4)
    file = hospitals.write(tmp_path / "far.csv", [{**rows[0], "age": -60}, *rows[1:]])
    said = call("predict", opened.path, file, "--method", "fedavg", "--client", "Amsel", "--out", tmp_path / "p.csv")
    assert f"column 'age': 1 of {len(rows)} numbers are far outside" in said
    assert "for example -60" in said


def test_predictions_carry_ids_and_are_decided_by_a_threshold(opened: RunDirectory, tmp_path: Path) -> None:
    rows = hospitals.patients("Amsel", seed=6)
    file, out = hospitals.write(tmp_path / "new.csv", rows), tmp_path / "p.csv"
    words = ("predict", opened.path, file, "--method", "fedavg", "--out", out)
    call(*words, "--id-column", "patient_id", "--id-column", "age", "--threshold", 0.05)
    with out.open(newline="") as source:
        table = list(csv.DictReader(source))
    assert [row["patient_id"] for row in table] == [row["patient_id"] for row in rows]
    assert [int(row["age"]) for row in table] == [row["age"] for row in rows]
    assert all((row["prediction"] == "1") == (float(row["probability of 1"]) >= 0.05) for row in table)
    assert 0 < sum(row["prediction"] == "1" for row in table) < len(table)
    assert "no column 'id' to keep" in call(*words, "--id-column", "id", code=2)
    assert "must be a probability from 0 to 1" in call(*words, "--threshold", 5, code=2)


def test_a_graph_takes_markers_and_decides_by_the_threshold_that_it_is_given(
    opened: RunDirectory, tmp_path: Path
) -> None:
    rows = hospitals.patients("Birke", seed=6)
    file, words = hospitals.write(tmp_path / "new.csv", rows), ("export", opened.path, "--method", "fedavg")
    want = opened.predict(file, "fedavg", client="Birke").apply_threshold(0.05)
    assert 0 < list(want.labels).count("1") < len(rows)
    numbers = np.array([[np.nan if row[n] is None else row[n] for n in NUMBERS] for row in rows], float)
    assert (numbers == -9).any()
    feed = {"numbers": numbers, "texts": np.array([[row["sex"], row["ward"]] for row in rows], object)}
    for threshold, labels in ((0.05, want.labels), (None, want.apply_threshold(None).labels)):
        more = () if threshold is None else ("--threshold", threshold)
        said = call(*words, "--client", "Birke", "--format", "onnx", "--out", tmp_path / "m.onnx", *more)
        assert f"class '1' if its probability is at least {threshold or 0.5:g}" in said
        graph = onnxruntime.InferenceSession(tmp_path / "m.onnx")
        probabilities, classes = graph.run(["probabilities", "class"], feed)
        np.testing.assert_allclose(probabilities, want.scores, atol=1e-6)
        sure = np.abs(probabilities[:, 1] - (threshold or 0.5)) > 1e-6
        assert classes[sure].tolist() == labels[sure].tolist()
    for format in ("torch", "safetensors"):
        said = call(*words, "--format", format, "--out", tmp_path / "m", "--threshold", 0.05, code=2)
        assert f"{format} does not predict classes, so a threshold has no effect. Export" in said
    assert not (tmp_path / "m").exists()
    said = call(*words, "--format", "onnx", "--out", tmp_path / "m", "--threshold", 5, code=2)
    assert "must be a probability from 0 to 1" in said
