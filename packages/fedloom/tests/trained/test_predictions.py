"""Predictions for rows without labels: by name of the columns, by site, filled as in training; exports say the same."""

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
import torch
from PIL import Image
from typer.testing import CliRunner

import fedloom as fl
from fedloom.data.new_rows import new_rows
from fedloom.data.tables import Table, TableColumn
from fedloom.errors import ConfigError, DataError
from fedloom.lab.cli import app
from fedloom.lab.experiment import Plan, parse
from fedloom.lab.experiment.opened import RunDirectory
from fedloom.trained.export import export_model, load

SITES = {"north": 0.0, "south": 1.0, "west": -1.0}
EXPERIMENT = """
name = "patients"
rounds = 3
seeds = [0, 1]
[data]
source = "PATH"
target = "ill"
client_column = "site"
categorical = ["ward"]
impute = true
[partition]
kind = "natural"
validation = 0.2
[local]
lr = 0.2
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "ditto"
[[method]]
algorithm = "local"
"""


def patients(path: Path, sites: dict[str, float], rows: int, labels: bool = True) -> Path:
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["age", "pressure", "ward", "site", *(["ill"] if labels else [])])
        for site, shift in sites.items():
            for k in range(rows):
                age, pressure, ward = rng.normal(55, 10), rng.normal(130, 15), rng.integers(3)
                risk = (age - 55) / 10 + shift * (pressure - 130) / 15 + 0.8 * ward - 0.8 + rng.normal()
                cells = [f"{age:.0f}" if k % 7 else "", f"{pressure:.0f}", "ABC"[ward] if k % 11 else "NA", site]
                table.writerow([*cells, *(["yes" if risk > 0 else "no"] if labels else [])])
    return path


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("patients")
    path = patients(folder / "all.csv", SITES, 40)
    outcomes = Plan(parse(tomllib.loads(EXPERIMENT.replace("PATH", str(path)))), folder / "out").run(page=False)
    assert {o.status for o in outcomes} == {"done"}
    return fl.open_run(folder / "out")


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    path = patients(tmp_path_factory.mktemp("new") / "new.csv", SITES, 9, labels=False)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [row[name] for row in rows] for name in ("ward", "site", "pressure", "age")}


def test_a_prediction_is_what_the_scores_of_the_same_rows_are_made_of(opened: RunDirectory) -> None:
    path = opened.path.parent / "all.csv"
    with path.open(newline="") as file:
        truth = np.array([row["ill"] for row in csv.DictReader(file)])
    for kind in ("personal", "global"):
        run = opened["ditto", 1]
        found = opened.predict(path, "ditto", 1, kind=kind)
        hits = found.labels == truth
        want = np.zeros(3)
        for part in ("train", "validation", "test"):
            want += run.final(kind, "accuracy", part).numpy() * _sizes(opened, part)
        got = [hits[[m == site for m in _sites(path)]].sum() for site in SITES]
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_caller_s_default_device_changes_no_prediction(opened: RunDirectory, columns: dict[str, list[Any]]) -> None:
    def run() -> list[Any]:
        labelled = opened.read(opened.path.parent / "all.csv")
        scores = [
            line.row() for kind in ("global", "personal") for line in opened.evaluate(labelled, "ditto", kind=kind)
        ]
        model = opened["ditto", 0].models.ready("personal", "south")
        return [scores, opened.predict(columns).scores.tolist(), model.predict_proba(columns).tolist()]

    want = run()
    with torch.device("meta"):
        assert run() == want


def _sites(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return [row["site"] for row in csv.DictReader(file)]


def _sizes(opened: RunDirectory, part: str) -> np.ndarray:
    data = fl.load(
        opened.path.parent / "all.csv", target="ill", client_column="site", categorical=("ward",), impute=True
    )
    return fl.partitions.natural(validation=0.2)(data, seed=1).sizes(part).numpy()


def test_every_row_goes_to_the_model_of_its_site(opened: RunDirectory, columns: dict[str, list[Any]]) -> None:
    found = opened.predict(columns, "ditto")
    assert list(found.models) == columns["site"]
    assert found.notes[0] == "ditto, seed 0"
    assert "column 'age': 6 cells filled as in training" in found.notes
    models = opened["ditto", 0].models
    for site in SITES:
        mine = [k for k, s in enumerate(columns["site"]) if s == site]
        some = {name: [cells[k] for k in mine] for name, cells in columns.items()}
        np.testing.assert_array_equal(found.scores[mine], models.predict_proba(some, client=site))
    np.testing.assert_allclose(found.scores.sum(1), 1)
    assert found.labels.tolist() == np.array(["no", "yes"])[found.scores.argmax(1)].tolist()
    stranger = opened.predict({**columns, "site": ["hill"] * 27}, "ditto")
    assert set(stranger.models) == {"global"}
    assert any("'hill' (27 rows)" in note for note in stranger.notes)
    np.testing.assert_array_equal(stranger.scores, models.predict_proba(columns))
    with pytest.raises(
        ConfigError, match=r"'hill' \(27 rows\)\. local has no global model, so choose one of the run's clients"
    ):
        opened.predict({**columns, "site": ["hill"] * 27}, "local")


def test_levels_that_the_training_did_not_have_are_named(opened: RunDirectory, columns: dict[str, list[Any]]) -> None:
    other = opened.predict({**columns, "ward": ["A", "b", "b"] * 9}, "fedavg")
    assert (
        "column 'ward': 18 cells contain levels that the training data do not contain: 'b'; agreed are A, B, C"
        in other.notes
    )


def test_a_row_is_predicted_alone_as_among_others(opened: RunDirectory, columns: dict[str, list[Any]]) -> None:
    whole = opened["fedavg", 0].models.predict_proba(columns)
    for k in (0, 5, 26):
        one = {name: cells[k : k + 1] for name, cells in columns.items()}
        np.testing.assert_allclose(opened["fedavg", 0].models.predict_proba(one), whole[k : k + 1], atol=1e-7)


def test_the_best_method_on_validation_is_taken_and_named(opened: RunDirectory, columns: dict[str, list[Any]]) -> None:
    def mean(method: str, kind: str) -> float:
        runs = opened.runs(method)
        return float(np.mean([run.final(kind, "auroc", "validation").nanmean() for run in runs]))

    own = {"fedavg": mean("fedavg", "global"), "ditto": mean("ditto", "hybrid"), "local": mean("local", "personal")}
    assert own[opened.best().method] == max(own.values())
    shared = {name: mean(name, "global") for name in ("fedavg", "ditto")}
    assert shared[opened.best(personal=False).method] == max(shared.values())
    assert opened.predict(columns).notes[0] == f"{opened.best().method}, seed 0, the best method on validation"
    assert opened.best(personal=True, shared=True).method != "local"


def test_the_command_writes_a_table(opened: RunDirectory, tmp_path: Path) -> None:
    rows = patients(tmp_path / "new.csv", {"west": 0.0, "hill": 1.0}, 4, labels=False)
    out = tmp_path / "deep" / "predictions.csv"
    said = CliRunner().invoke(app, ["predict", str(opened.path), str(rows), "--method", "ditto", "--out", str(out)])
    assert said.exit_code == 0, said.output
    assert "not a client of the run, so the global model predicts: 'hill' (4 rows)" in said.output
    with out.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["model"] for row in found] == ["west"] * 4 + ["global"] * 4
    assert [int(row["row"]) for row in found] == list(range(1, 9))
    for row in found:
        p = {name: float(row[f"probability of {name}"]) for name in ("no", "yes")}
        assert row["prediction"] == max(p, key=lambda name: p[name])


def test_what_cannot_be_predicted_is_a_sentence(
    opened: RunDirectory, columns: dict[str, list[Any]], tmp_path: Path
) -> None:
    models = opened["ditto", 0].models
    with pytest.raises(DataError, match="lacks the columns 'pressure', 'ward'"):
        models.predict({"age": [1.0]})
    with pytest.raises(DataError, match="column 'age': expected a finite number, got 'old'"):
        models.predict({**columns, "age": ["old"] * 27})
    with pytest.raises(DataError, match="column 'age' must be a list with one cell per row"):
        models.predict({"age": 50.0, "pressure": 120.0, "ward": "A"})
    with pytest.raises(DataError, match=r"is a table. Pass fl.Dataset.create\(table, LABEL, ...\)"):
        models.model("global").score(pd.DataFrame(columns))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="trained on text columns"):
        models.predict(np.zeros((2, 3)))
    (file := tmp_path / "empty.csv").write_text("age,pressure,ward,site\n")
    with pytest.raises(DataError, match="empty.csv contains no rows to predict. Pass at least one row"):
        opened.predict(str(file))
    with pytest.raises(DataError, match="no rows to predict"):
        models.predict({"age": [], "pressure": [], "ward": []})
    table: Any = models.recipe.facts.table
    strict = models.recipe.facts.with_(table=table.with_(impute=False))
    with pytest.raises(DataError) as caught:
        new_rows(strict, {**columns, "ward": ["Q"] * 27})
    assert "row 0, column 'age': missing value (6 such)" in str(caught.value)
    assert "unknown level 'Q', allowed are A, B, C (27 such)" in str(caught.value)


def test_arrays_and_images_without_labels_are_predicted(tmp_path: Path) -> None:
    """An NPZ file of features alone, and images in any folders or none, say what the same samples say in memory."""
    gen = np.random.default_rng(0)
    x, y = gen.integers(0, 256, (60, 6, 6), dtype=np.uint8), np.arange(60) % 2
    x[y == 1, :3] //= 4
    np.savez(tmp_path / "known.npz", x=x, y=y)
    head = f'rounds = 3\n[data]\nsource = "{tmp_path}/known.npz"\n'
    text = head + '[partition]\nclients = 3\n[[method]]\nalgorithm = "fedavg"\n'
    Plan(parse(tomllib.loads(text)), tmp_path / "run").run(page=False)
    opened = fl.open_run(tmp_path / "run")
    want = opened["fedavg", 0].models.predict_proba(x[:8])
    np.savez(tmp_path / "x.npz", x=x[:8])
    np.savez(tmp_path / "alone.npz", scans=x[:8])
    np.savez(tmp_path / "labelled.npz", x=x[:8], y=y[:8])
    for folder in ("scans", "scans/b"):
        (tmp_path / folder).mkdir()
    for k in range(8):
        Image.fromarray(x[k]).save(tmp_path / "scans" / ("b" if k > 4 else ".") / f"{k}.png")
    for name in ("x.npz", "alone.npz", "labelled.npz", "scans"):
        found = opened.predict(tmp_path / name)
        order = [int(Path(file).stem) for file in found.files] if found.files else range(8)
        np.testing.assert_array_equal(found.scores, want[order], err_msg=name)
    assert found.table()["file"].to_pylist()[0].endswith("0.png")
    with pytest.raises(DataError, match=r"NaN or Inf in 2 samples \(first: 0\)"):
        opened["fedavg", 0].models.predict(np.full((2, 6, 6), np.nan))
    np.savez(tmp_path / "two.npz", a=x, b=x)
    with pytest.raises(DataError, match=r"needs an array x \(or x_train, x_test\), got \['a', 'b'\]"):
        opened.predict(tmp_path / "two.npz")


@pytest.mark.parametrize(("kind", "client"), [*(("personal", site) for site in SITES), ("global", None)])
def test_exports_take_raw_rows(
    opened: RunDirectory, columns: dict[str, list[Any]], tmp_path: Path, kind: str, client: str | None
) -> None:
    model = opened["ditto", 0].models.ready(kind, client)
    want = model.predict_proba(columns)
    export_model(model, tmp_path / "m.onnx", "onnx")
    export_model(model, tmp_path / "m.pt2", "torch")
    np.testing.assert_allclose(load(tmp_path / "m.pt2").scores(columns), want, atol=1e-6)
    assert load(tmp_path / "m.pt2").predict(columns).tolist() == model.predict(columns).tolist()
    graph = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    names = json.loads(graph.get_modelmeta().custom_metadata_map["columns"])
    assert names == {"numbers": ["age", "pressure"], "texts": ["ward"]}
    feed = {
        "numbers": np.array([[float(c or "nan") for c in columns[n]] for n in names["numbers"]]).T,
        "texts": np.array([[str(c) for c in columns[n]] for n in names["texts"]], object).T,
    }
    scores, said = graph.run(["probabilities", "class"], feed)
    np.testing.assert_allclose(scores, want, atol=1e-6)
    assert said.tolist() == model.predict(columns).tolist()


def test_the_graph_s_features_are_those_of_training() -> None:
    gen = torch.Generator().manual_seed(0)
    columns = (
        TableColumn(name="a", flag=True),
        TableColumn(name="b", levels=3, names=("x", "y", "z"), flag=True),
        TableColumn(name="c"),
        TableColumn(name="d", scale=False),
        TableColumn(name="e", levels=2),
    )
    table = Table(columns=columns)
    x = torch.randn(60, 5, generator=gen, dtype=torch.float64)
    x[:, 1], x[:, 4] = torch.randint(3, (60,), generator=gen), torch.randint(2, (60,), generator=gen)
    x[torch.rand(60, 5, generator=gen) < 0.2] = torch.nan
    owner = torch.arange(60) % 2
    x[owner == 1, 2] = torch.nan
    fitted = table.fit(x, owner, torch.arange(60) < 40)
    assert fitted[1, 2].isnan().all()
    for client in (0, 1):
        rows = x[owner == client]
        want = table.encode(rows, torch.zeros(len(rows), dtype=torch.long), fitted[client][None])
        assert torch.equal(table.encoder(fitted[client])(rows), want)


def test_a_warning_names_the_line_of_the_caller(opened: RunDirectory, columns: dict[str, list[Any]]) -> None:
    models = opened["fedavg", 0].models
    far = {**columns, "age": [1000.0] * len(columns["age"])}
    for call in (models.predict, models.predict_proba, models.ready("global").predict):
        with pytest.warns(UserWarning, match="column 'age'") as caught:
            call(far)
        assert {Path(warning.filename).name for warning in caught} == {Path(__file__).name}
