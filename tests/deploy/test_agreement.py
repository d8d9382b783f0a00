"""Five hospitals whose tables differ: one document says what columns mean, and all join, train and predict."""

from __future__ import annotations

import csv
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tomli_w

from fedloom.data.survey.agreement import Agreement
from fedloom.deploy.server.run import serve
from fedloom.deploy.settings import read_server, read_site
from fedloom.deploy.site.client import Client
from fedloom.errors import ConfigError, Stop
from tests import hospitals
from tests.commands import call
from tests.deploy.grid import FakeGrid, outside_flower
from tests.deploy.scene import FIRST

NAMES = [name.lower() for name in hospitals.SITES]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def own_rows(site: str, seed: int = 0) -> list[hospitals.Row]:
    rows = hospitals.patients(site, seed)
    return [{**row, "died": 0} for row in rows] if site == "Esche" else rows  # nobody died there yet


def own_file(path: Path, site: str, seed: int = 0) -> Path:
    """A hospital's table as its own system writes it: separators, order and further columns of its own."""
    rows = own_rows(site, seed)
    if site == "Birke":
        return hospitals.write(path, rows, separator=";", comma=True, drop=("hospital",))
    if site == "Celle":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, ["note", "died", *reversed(hospitals.COLUMNS[:-1])], restval="as ever")
            table.writeheader()
            table.writerows({name: hospitals.cell(value) for name, value in row.items()} for row in rows)
        return path
    return hospitals.write(path, rows)


@pytest.fixture(scope="module")
def agreed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deployment drafted at one hospital, whose table is then gone; people filled in units, ranges and least rows."""
    folder = tmp_path_factory.mktemp("agreed")
    table = hospitals.write(folder / "amsel.csv", hospitals.patients("Amsel"), drop=("hospital", "troponin_hs"))
    said = call("init", table, "--target", "died", "--by", "", "--agree")
    assert f"agreement: {folder / 'amsel.agreement.toml'}" in said
    document = tomllib.loads((folder / "amsel.agreement.toml").read_text())
    units = {"age": "years", "systolic": "mmHg", "glucose": "mg/dL", "creatinine": "mg/dL"}
    ranges = {"age": [0.0, 110.0], "systolic": [40.0, 260.0], "glucose": [30.0, 700.0], "creatinine": [0.1, 15.0]}
    for column in document["column"]:
        if column["name"] in units:
            column |= {"unit": units[column["name"]], "range": ranges[column["name"]]}
    document["patients"] = 20
    (folder / "amsel.agreement.toml").write_text(tomli_w.dumps(document))
    settings = tomllib.loads((folder / "amsel.toml").read_text())
    settings |= {"rounds": 3, "seeds": [0], "method": [{"algorithm": "ditto"}], "evaluate": {"every": 3}}
    settings["partition"] = {"kind": "iid", "clients": 2, "test": 0.2, "validation": 0.1}
    (folder / "experiment.toml").write_text(tomli_w.dumps(settings))
    table.unlink()
    words = ["deploy", "init", folder / "experiment.toml", "--own-data", "--names", ",".join(NAMES)]
    call(*words, "--out", folder / "made")
    (folder / "amsel.agreement.toml").unlink()
    for site in hospitals.SITES:
        home = folder / "made" / "sites" / site.lower()
        own_file(home / "amsel.csv", site)
        if site in hospitals.SI:
            text = (home / "site.toml").read_text()
            factors = "{ glucose = 18.0, creatinine = 0.01131 }"
            (home / "site.toml").write_text(text.replace("[data]\n", f"[data]\nfactors = {factors}\n"))
    return folder / "made"


def check(home: Path, code: int = 0) -> str:
    return call("deploy", "check", home, "--offline", code=code)


def test_the_document_says_the_same_when_it_is_read_again(agreed: Path) -> None:
    site = read_site(agreed / "sites" / "dorn" / "site.toml")
    document = tomllib.loads(site.experiment.read_text())["data"]["agreement"]
    agreement = Agreement(**document)
    assert Agreement(**tomllib.loads(agreement.text())) == agreement
    assert [c.name for c in agreement.column] == ["age", "sex", "ward", "systolic", "glucose", "creatinine"]
    assert {c.name: c.missing for c in agreement.column}["systolic"]
    assert site.samples.table is not None
    assert site.samples.table.columns == agreement.table.columns


def test_all_five_hospitals_can_take_part_train_and_use_their_models(agreed: Path, tmp_path: Path) -> None:
    outside_flower()
    for name in NAMES:
        assert "samples for training" in check(agreed / "sites" / name)
    assert "no training sample of 1; the site trains all the same, and AUROC has no value" in check(
        agreed / "sites" / "esche"
    )
    clients = [Client(read_site(agreed / "sites" / name / "site.toml")) for name in NAMES]
    grid = FakeGrid({FIRST + c.site.client: c.answer for c in clients})
    said: list[str] = []
    assert serve(grid, read_server(agreed / "server" / "server.toml"), said.append) is Stop.DONE
    assert any("round 3/3: 5 of 5 accepted" in line for line in said), said
    for site in hospitals.SITES:
        home = agreed / "sites" / site.lower()
        rows = own_rows(site, seed=5)
        new = own_file(tmp_path / f"{site}.csv", site, seed=5)
        out = tmp_path / f"{site}.predictions.csv"
        told = call("deploy", "predict", home, new, "--out", out)
        assert f"model of {site.lower()}" in told
        assert "lie beyond" not in told
        with out.open(newline="") as file:
            scores = np.array([float(row["probability of 1"]) for row in csv.DictReader(file)])
        assert len(scores) == len(rows)
        if site != "Esche":
            assert "auroc" in call("deploy", "evaluate", home, new)
            died = np.array([row["died"] for row in rows])
            ranks = scores.argsort().argsort()
            assert ranks[died == 1].mean() > ranks[died == 0].mean()
        same_as_graph(home, site, rows, scores, tmp_path)
    for command in (
        ("predict", agreed / "sites" / "dorn", tmp_path / "Dorn.csv"),
        ("models", agreed / "sites" / "dorn"),
    ):
        assert "fedloom deploy predict" in call(*command, code=2)
    assert "models are at its sites" in call("models", agreed / "server" / "results", code=2)


def same_as_graph(home: Path, site: str, rows: list[hospitals.Row], scores: np.ndarray, folder: Path) -> None:
    """The exported graph says of raw rows in the agreed units what the site's own command says."""
    if site not in ("Amsel", "Esche"):
        return
    call("deploy", "export", home, "--out", folder / "m.onnx")
    graph = onnxruntime.InferenceSession(folder / "m.onnx")
    names: Any = json.loads(graph.get_modelmeta().custom_metadata_map["columns"])
    gone = (None, -9.0)
    feed = {
        "numbers": np.array([[np.nan if row[n] in gone else row[n] for n in names["numbers"]] for row in rows], float),
        "texts": np.array([[row[n] for n in names["texts"]] for row in rows], object),
    }
    np.testing.assert_allclose(graph.run(["probabilities"], feed)[0][:, 1], scores, atol=1e-6)


FAULTS = [
    ("Dorn", lambda rows: rows[:12], "12 rows, the agreement requires at least 20"),
    (
        "Amsel",
        lambda rows: [{**row, "glucose": 5.5} for row in rows],
        "column 'glucose': 100% of the rows lie beyond 30 to 700 mg/dL, which was agreed on",
    ),
    ("Amsel", lambda rows: [{**row, "died": "maybe"} for row in rows], "the label 'died' is 'maybe', allowed are 0, 1"),
    (
        "Amsel",
        lambda rows: [{**row, "age": "old"} for row in rows],
        "column 'age': expected a finite number, got 'old'",
    ),
]


@pytest.mark.parametrize(("site", "change", "sentence"), FAULTS)
def test_a_table_that_does_not_fit_is_told_so_in_one_sentence(
    agreed: Path, tmp_path: Path, site: str, change: Any, sentence: str
) -> None:
    home = agreed / "sites" / site.lower()
    text = (home / "site.toml").read_text()
    wrong = hospitals.write(tmp_path / "wrong.csv", change(hospitals.patients(site)))
    try:
        (home / "site.toml").write_text(text.replace('path = "amsel.csv"', f'path = "{wrong}"'))
        assert sentence in check(home, code=1)
        hospitals.write(wrong, hospitals.patients(site), drop=("ward",))
        assert "no column 'ward' (the agreement names it)" in check(home, code=1)
    finally:
        (home / "site.toml").write_text(text)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"target": "age"}, "is the target, it cannot be a feature"),
        ({"classes": ["0"]}, "classes"),
        ({"column": [{"name": "age"}, {"name": "age"}]}, "two of them are called 'age'"),
        ({"column": [{"name": "ward", "type": "level"}]}, "levels belong to type = 'level'"),
        ({"column": [{"name": "age", "range": [9, 1]}]}, "range must rise"),
        ({"colums": []}, "colums"),
    ],
)
def test_an_agreement_that_cannot_be_is_refused(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    document = {"target": "died", "classes": ["0", "1"], "column": [{"name": "age"}]} | change
    (tmp_path / "a.toml").write_text(tomli_w.dumps(document))
    with pytest.raises(ConfigError, match=sentence):
        Agreement.read(tmp_path / "a.toml")
