"""Five hospitals whose tables differ: one document says what columns mean, and all join, train and predict."""

from __future__ import annotations

import csv
import json
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import tomli_w
from sklearn.metrics import log_loss

from fedloom.data.new_data import NewData
from fedloom.data.survey.agreement import Agreement
from fedloom.errors import ConfigError, Stop
from fedloom_sites.deploy.server.run import serve_run
from fedloom_sites.deploy.setting_files import read_server, read_site
from fedloom_sites.deploy.site.client import Client
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


LEAST, UNITS, RANGES = 20, {"age": "years", "systolic": "mmHg", "glucose": "mg/dL", "creatinine": "mg/dL"}, {
    "age": [0.0, 110.0], "systolic": [40.0, 260.0], "glucose": [30.0, 700.0], "creatinine": [0.1, 15.0],
}  # fmt: skip
NOTED = (
    "column 'hours_to_death': alone predicts the target almost perfectly (AUROC 1.000 alone)",
    "column 'followup_days': alone predicts the target almost perfectly",
    "column 'readmissions': is known only later",
    "column 'troponin_hs': has values only at 'Amsel', so it identifies that site",
    "column 'systolic': -9 in 188 cells",
    "column 'glucose': medians differ by a factor of 17.7 between sites",
    "column 'creatinine': medians differ by a factor of 88.1 between sites",
    "'Amsel' 44 of 1200, 'Birke' 26 of 600, 'Celle' 25 of 400, 'Dorn' 6 of 150, 'Esche' 1 of 20",
    "'followup_days' with the event 'died' is a time to event: --target followup_days --event died",
)


pytestmark = pytest.mark.needs("fedloom_clinic")


def journey(folder: Path, task: str = "binary", sites: tuple[str, ...] = tuple(hospitals.SITES)) -> Path:
    """The deployment of the five hospitals, from their tables on; each file is edited once, as in docs/deploy-pilot.md.

    Args:
        folder: to work in.
        task: binary, or survival.
        sites: hospitals that take part.
    """
    hospitals.main(folder / "tables")
    target = ("--target", "followup_days" if task == "survival" else "died")
    said = call("init", folder / "tables" / "all.csv", "--agree", *target, "--out", folder / "all.toml")
    for sentence in NOTED if task == "binary" else ("column 'died': 1 for an event: 102 of 2370 rows",):
        assert sentence in said, sentence
    draft = folder / "all.toml"
    draft.write_text(draft.read_text().replace("# factors =", "factors ="))  # the sites have confirmed their units
    agreement = folder / "all.agreement.toml"
    document = tomllib.loads(agreement.read_text())
    document["column"] = [column for column in document["column"] if column["name"] != "readmissions"]
    for column in document["column"]:
        if column["name"] in UNITS:
            column |= {"unit": UNITS[column["name"]], "range": RANGES[column["name"]]}
    agreement.write_text(tomli_w.dumps(document | {"patients": LEAST}))
    words = ["deploy", "init", folder / "all.toml", "--own-data", "--names", ",".join(sites).lower()]
    assert "no norm_bound, because the experiment's data are not on this machine. A single site" in call(
        *words, "--method", "ditto", "--rounds", 3, "--out", folder / "made"
    )
    for site in sites:
        home = folder / "made" / "sites" / site.lower()
        hospitals.own_table(home / "ward.csv", site, own_rows(site))
        text = (home / "site.toml").read_text().replace('path = "all.csv"', 'path = "ward.csv"')
        assert text.index("[data]") < text.index("[samples]")
        if site in hospitals.SI:
            text = text.replace("[data]\n", "[data]\nfactors = { glucose = 18.0, creatinine = 0.01131 }\n")
        (home / "site.toml").write_text(text)
    return folder / "made"


@pytest.fixture(scope="module")
def agreed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The deployment, after a run on the pooled table and its report; the coordinator's files are then gone."""
    folder = tmp_path_factory.mktemp("agreed")
    made = journey(folder)
    call("run", folder / "all.toml", "--rounds", 3, "--set", "seeds=[0]", "--out", folder / "run")
    call("report", folder / "run", "--card")
    with (folder / "run" / "report" / "sites.csv").open(newline="") as file:
        sites = {row["site"]: row for row in csv.DictReader(file)}
    assert {*hospitals.SITES} <= {*sites}
    assert sites["Esche"]["reason"].startswith("Esche (12 samples, 1 event in training) has no AUROC")
    assert "- Target: died" in (folder / "run" / "report" / "card.md").read_text()
    (folder / "all.agreement.toml").unlink()
    shutil.rmtree(folder / "tables")
    return made


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
    assert "there are no training samples of 1. The site can still train, and AUROC is undefined" in check(
        agreed / "sites" / "esche"
    )
    clients = [Client(read_site(agreed / "sites" / name / "site.toml")) for name in NAMES]
    grid = FakeGrid({FIRST + c.site.client: c.answer for c in clients})
    said: list[str] = []
    assert serve_run(grid, read_server(agreed / "server" / "server.toml"), said.append) is Stop.DONE
    assert any("round 3/3: 5 of 5 accepted" in line for line in said), said
    for site in hospitals.SITES:
        home = agreed / "sites" / site.lower()
        rows = own_rows(site, seed=5)
        new = hospitals.own_table(tmp_path / f"{site}.csv", site, rows)
        out = tmp_path / f"{site}.predictions.csv"
        told = call("deploy", "predict", home, new, "--out", out)
        assert f"model of {site.lower()}" in told
        assert "are outside" not in told
        with out.open(newline="") as file:
            scores = np.array([float(row["probability of 1"]) for row in csv.DictReader(file)])
        assert len(scores) == len(rows)
        died = np.array([row["died"] for row in rows])
        check_doors(home, new, rows, scores, tmp_path)
        if site != "Esche":
            assert "auroc" in call("deploy", "evaluate", home, new)
            ranks = scores.argsort().argsort()
            assert ranks[died == 1].mean() > ranks[died == 0].mean()
        same_as_graph(home, site, rows, scores, tmp_path)
    for command in (
        ("predict", agreed / "sites" / "dorn", tmp_path / "Dorn.csv"),
        ("models", agreed / "sites" / "dorn"),
    ):
        assert "fedloom deploy predict" in call(*command, code=2)
    assert "models are at the sites" in call("models", agreed / "server" / "results", code=2)


def check_doors(home: Path, new: Path, rows: list[hospitals.Row], scores: np.ndarray, folder: Path) -> None:
    """A site's rows by other kinds of file have the same predictions, and evaluate scores these."""
    frame = pd.DataFrame(rows).drop(columns="troponin_hs")
    frame.to_parquet(folder / "d.parquet")
    hospitals.write(folder / "d.tsv", rows, "\t", drop=("died",))
    frame.to_csv(folder / "d.csv", sep=";", decimal=",", index=False, na_rep="NA")
    for door in ("d.parquet", "d.tsv", "d.csv"):
        call("deploy", "predict", home, folder / door, "--out", folder / "d.out")
        found = pd.read_csv(folder / "d.out")["probability of 1"].to_numpy()
        np.testing.assert_array_equal(found, scores, err_msg=f"{home.name}, {door}")
    loss = log_loss(frame["died"], scores, labels=[0, 1])
    for file in (new, folder / "d.parquet"):
        lines = [line.split() for line in call("deploy", "evaluate", home, file).splitlines()]
        head = next(k for k, words in enumerate(lines) if "loss" in words)
        figure = next(words for words in lines[head + 1 :] if home.name in words)
        places = len(figure) - len(lines[head])  # a scaling is several words
        assert float(figure[lines[head].index("loss") + places]) == pytest.approx(loss, abs=6e-5), (home.name, figure)


@pytest.mark.slow
@pytest.mark.deploy
@pytest.mark.timeout(1800)
def test_the_journey_over_real_processes(tmp_path: Path) -> None:
    """A server and five sites over TLS end with the models that the same files give in this process."""
    outside_flower()
    real = journey(tmp_path)
    call("run", tmp_path / "all.toml", "--rounds", 1, "--set", "seeds=[0]", "--out", tmp_path / "run")
    call("report", tmp_path / "run", "--card")
    (tmp_path / "all.agreement.toml").unlink()
    shutil.rmtree(tmp_path / "tables")
    here = shutil.copytree(real, tmp_path / "here")
    clients = [Client(read_site(here / "sites" / name / "site.toml")) for name in NAMES]
    grid = FakeGrid({FIRST + c.site.client: c.answer for c in clients})
    assert serve_run(grid, read_server(here / "server" / "server.toml"), lambda _: None) is Stop.DONE
    told = call("deploy", "local", real)
    assert "round 3/3: 5 of 5 accepted" in told
    assert "over TLS" in told
    assert "all rounds done" in call("deploy", "status", real / "server")
    for site in hospitals.SITES:
        new = hospitals.own_table(tmp_path / f"{site}.csv", site, own_rows(site, seed=5))
        scores = []
        for made in (real, here):
            out = tmp_path / f"{site}.predictions.csv"
            call("deploy", "predict", made / "sites" / site.lower(), new, "--out", out)
            with out.open(newline="") as file:
                scores.append(np.array([float(row["probability of 1"]) for row in csv.DictReader(file)]))
        assert len(scores[0]) == hospitals.SITES[site][0]
        np.testing.assert_allclose(*scores, rtol=1e-6, atol=1e-9)


def test_times_to_an_event_are_learned_and_used_at_every_site(tmp_path: Path) -> None:
    """Training, scores, predictions and the exported graph of a deployed survival model, two units among the sites."""
    outside_flower()
    sites = ("Amsel", "Celle")
    made = journey(tmp_path, "survival", sites)
    clients = [Client(read_site(made / "sites" / site.lower() / "site.toml")) for site in sites]
    grid = FakeGrid({FIRST + c.site.client: c.answer for c in clients})
    said: list[str] = []
    assert serve_run(grid, read_server(made / "server" / "server.toml"), said.append) is Stop.DONE
    assert any("round 3/3: 2 of 2 accepted" in line for line in said), said
    for site in sites:
        home, rows = made / "sites" / site.lower(), hospitals.patients(site, seed=5)
        new, out = hospitals.own_table(tmp_path / f"{site}.csv", site, rows), tmp_path / f"{site}.predictions.csv"
        call("deploy", "predict", home, new, "--out", out)
        with out.open(newline="") as file:
            risks = np.array([float(row["prediction"]) for row in csv.DictReader(file)])
        time, died = (np.array([row[name] for row in rows]) for name in ("followup_days", "died"))
        pairs = [(a, b) for a in np.flatnonzero(died) for b in range(len(rows)) if time[b] > time[a]]
        agree = np.mean([(risks[a] > risks[b]) + 0.5 * (risks[a] == risks[b]) for a, b in pairs])
        assert agree > 0.6
        figures = call("deploy", "evaluate", home, new)
        assert f"{agree:.4g}" in figures, (agree, figures)
        same_as_graph(home, site, rows, risks, tmp_path)


def same_as_graph(home: Path, site: str, rows: list[hospitals.Row], scores: np.ndarray, folder: Path) -> None:
    """The exported graph says of raw rows in the agreed units what the site's own command says."""
    printed = call("deploy", "export", home, "--out", folder / "m.onnx")
    converted = "in the agreed-upon units. First multiply glucose by 18, creatinine by 0.01131" in printed
    assert converted == (site in hospitals.SI)
    factors = {"glucose": 18.0, "creatinine": 0.01131} if converted else {}
    graph = onnxruntime.InferenceSession(folder / "m.onnx")
    names: Any = json.loads(graph.get_modelmeta().custom_metadata_map["columns"])
    gone = (None, -9.0)
    feed = {
        "numbers": np.array(
            [[np.nan if row[n] in gone else row[n] * factors.get(n, 1) for n in names["numbers"]] for row in rows],
            float,
        ),
        "texts": np.array([[row[n] for n in names["texts"]] for row in rows], object),
    }
    np.testing.assert_allclose(graph.run(None, feed)[0][:, -1], scores, atol=1e-6)


def test_new_rows_are_judged_by_the_target_of_the_agreement(agreed: Path, tmp_path: Path) -> None:
    site = read_site(agreed / "sites" / "amsel" / "site.toml")
    agreement = tomllib.loads(site.experiment.read_text())["data"]["agreement"]
    rows = own_rows("Amsel")[:50]
    file = hospitals.write(tmp_path / "new.csv", rows, names=("died", *hospitals.COLUMNS[:-1]))  # not the last column
    labelled = NewData({"source": str(file), "agreement": agreement}).labelled(site.samples, file)
    assert labelled.y.tolist() == [row["died"] for row in rows]


FAULTS = [
    ("Dorn", lambda rows: rows[:12], "12 rows, but the agreement requires at least 20"),
    (
        "Amsel",
        lambda rows: [{**row, "glucose": 5.5} for row in rows],
        "column 'glucose': 100% of the rows are outside 30 to 700 mg/dL, the agreed range",
    ),
    (
        "Amsel",
        lambda rows: [{**row, "died": "maybe"} for row in rows],
        "the label 'died' is 'maybe', but only 0, 1 are allowed",
    ),
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
        (home / "site.toml").write_text(text.replace('path = "ward.csv"', f'path = "{wrong}"'))
        assert sentence in check(home, code=1)
        hospitals.write(wrong, hospitals.patients(site), drop=("ward",))
        assert "no column 'ward' (the agreement names it)" in check(home, code=1)
    finally:
        (home / "site.toml").write_text(text)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"target": "age"}, "is the target, so it cannot be a feature"),
        ({"classes": ["0"]}, "classes"),
        ({"column": [{"name": "age"}, {"name": "age"}]}, "two columns are called 'age'"),
        ({"column": [{"name": "ward", "type": "level"}]}, "type = 'level' requires at least one level"),
        ({"column": [{"name": "age", "range": [9, 1]}]}, "range must increase"),
        ({"colums": []}, "colums"),
    ],
)
def test_an_agreement_that_cannot_be_is_refused(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    document = {"target": "died", "classes": ["0", "1"], "column": [{"name": "age"}]} | change
    (tmp_path / "a.toml").write_text(tomli_w.dumps(document))
    with pytest.raises(ConfigError, match=sentence):
        Agreement.read(tmp_path / "a.toml")
