"""Groups, calibration, thresholds and gains by patient: from the run's file to the page, held to references."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    log_loss,
    mean_absolute_error,
    mean_poisson_deviance,
    r2_score,
    roc_auc_score,
    root_mean_squared_error,
)
from statsmodels.stats.proportion import proportion_confint

import fedloom as fl
from fedloom.analyses.importance import check_importance, importance
from fedloom.data.groups import make_group_masks
from fedloom.errors import ConfigError, Refused
from fedloom.lab.report.charts.calibrated import calibration_curve, operating_point, wilson_interval
from fedloom.lab.report.comparison.bootstrap import standard_error, weighted_metric
from fedloom.lab.report.comparison.by_patient import delong_auroc
from fedloom.lab.report.patients import StoredPredictions
from fedloom.tasks.survival import SurvivalRows, concordance
from fedloom_clinic.left_out import remove_client, score_new_client
from fedloom_clinic.references import check_references, references
from fedloom_clinic.sections.left_out import LEFT_OUT_TEXT
from tests.commands import call
from tests.hospitals import COLUMNS, SITES, cell, patients

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT = """
rounds = 3
seeds = [0, 1]
[data]
source = "{table}"
target = "died"
client_column = "hospital"
categorical = ["ward", "sex"]
drop = ["patient_id", "hours_to_death", "troponin_hs", "sex"]
missing = ["-9"]
impute = true
[partition]
kind = "natural"
validation = 0.2
folds = 2
[model]
kind = "softmax"
[[analysis]]
kind = "groups"
by = ["sex", "age>=75"]
[[analysis]]
kind = "predictions"
[[analysis]]
kind = "importance"
[[analysis]]
kind = "references"
[[analysis]]
kind = "left-out"
[[method]]
algorithm = "local"
[[method]]
algorithm = "ditto"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods at the five hospitals, every patient tested once by two folds."""
    folder = tmp_path_factory.mktemp("five")
    rows = [[cell(row[c]) for c in COLUMNS] for site in SITES for row in patients(site, si=False)]
    with (folder / "five.csv").open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    (folder / "five.toml").write_text(EXPERIMENT.format(table=folder / "five.csv"))
    call("run", folder / "five.toml", "--out", folder / "run")
    return folder / "run"


def test_predictions_are_what_was_scored_and_groups_are_their_parts(run: Path) -> None:
    table, groups = (pq.read_table(run / f"{name}.parquet") for name in ("predictions", "groups"))
    metrics = pq.read_table(run / "metrics.parquet")
    data = [row for site in SITES for row in patients(site, si=False)]
    for method, model in (("local", "personal"), ("ditto", "global"), ("ditto", "hybrid")):
        for seed in (0, 1):
            chosen = {"method": method, "model": model, "seed": seed}

            def of(whole, chosen=chosen, **more):  # type: ignore[no-untyped-def]
                for name, value in (chosen | more).items():
                    whole = whole.filter(pc.equal(whole[name], value))
                return whole

            for client, site in ((0, "Amsel"), (2, "Celle")):
                mine = of(table, client=client)
                target, score = (mine[name].to_numpy() for name in ("target", "prediction"))
                recorded = of(metrics, client=client, part="test", metric="auroc", round=3)["value"][0].as_py()
                assert roc_auc_score(target, score) == pytest.approx(recorded)
                assert [data[k]["died"] for k in mine["row"].to_pylist()] == target.tolist()
                assert {data[k]["hospital"] for k in mine["row"].to_pylist()} == {site}
            whole = of(table)
            sex = np.array([data[k]["sex"] for k in whole["row"].to_pylist()])
            age = np.array([math.nan if data[k]["age"] is None else data[k]["age"] for k in whole["row"].to_pylist()])
            target, score = (whole[name].to_numpy() for name in ("target", "prediction"))
            for name, inside in (("sex=f", sex == "f"), ("age>=75", age >= 75), ("age<75", age < 75)):
                scores = {r["metric"]: r["value"] for r in of(groups, client=-1, subgroup=name).to_pylist()}
                assert scores["samples"] == inside.sum()
                if "auroc" in scores:
                    assert scores["auroc"] == pytest.approx(roc_auc_score(target[inside], score[inside]))
    tiny = groups.filter(pc.and_(pc.equal(groups["client"], 4), pc.equal(groups["subgroup"], "sex=f")))
    assert set(tiny["metric"].to_pylist()) == {"samples"}  # Esche's patients are too few


def test_the_page_and_its_files_have_them(run: Path) -> None:
    call("report", run, "--card")
    page, folder = (run / "report.html").read_text(), run / "report"
    for words in ("Groups of patients", "Gains by patient", "Thresholds by site", "calibration-curve", "net-benefit",
                  "importance"):  # fmt: skip
        assert words in page, words
    assert "## Groups of patients" in (folder / "card.md").read_text()

    def read(name: str) -> list[dict[str, str]]:
        return [*csv.DictReader((folder / name).read_text().splitlines())]

    lines = {line["site"]: line for line in read("sites-by-patient.csv")}
    assert int(lines["All"]["samples"]) >= sum(count for count, _ in SITES.values()) - 5
    assert lines["Esche"]["p"] == ""
    gain, half = float(lines["All"]["together"]) - float(lines["All"]["alone"]), float(lines["All"]["half"])
    assert (float(lines["All"]["p"]) < 0.05) == (abs(gain) > half)
    assert {point["site"] for point in read("thresholds.csv")} == {"All", *SITES}
    assert {line["group"] for line in read("groups.csv")} == {
        "sex=f", "sex=m", "age>=75", "age<75",
    }  # fmt: skip
    new = read("left_out.csv")
    assert {(line["method"], line["site"], line["seed"]) for line in new} == {
        ("ditto", site, seed) for site in SITES for seed in "01"
    }  # a method without a global model has nothing for a new site
    assert "Sites left out: ditto" in page


def test_a_left_out_site_is_scored_as_if_it_had_never_been_there() -> None:
    import pandas as pd

    table = pd.DataFrame([row for site in SITES for row in patients(site, si=False)])
    options = {"client_column": "hospital", "categorical": ["ward", "sex"], "impute": True, "missing": ["-9"],
               "drop": ["patient_id", "hours_to_death", "troponin_hs"]}  # fmt: skip
    cut = fl.partitions.natural(test=0.0, validation=0.0)
    whole, others = (fl.Dataset.create(rows, "died", **options) for rows in (table, table[table.hospital != "Celle"]))
    fed = cut(whole, seed=0)
    choices = {"rounds": 2, "local": fl.LocalSGD(lr=0.1, batch_size=64), "evaluate": {"parts": ("train",)}}
    left, never = (fl.simulate("fedavg", one, **choices) for one in (remove_client(fed, 2), cut(others, seed=0)))
    scores = score_new_client(left, fed, 2).to_pylist()
    celle = fl.Dataset.create(table[table.hospital == "Celle"], "died", **options)
    models = (never.models.ready("global"), never.models.ready("global").rescale(celle))
    for scaling, model in zip(("as the clients' on average", "on these rows"), models, strict=True):
        found = {line["metric"]: line["value"] for line in scores if line["scaling"] == scaling}
        assert found.pop("samples") == 400
        assert found == pytest.approx(model.score(celle), abs=1e-12)
    age, start = remove_client(fed, 2).data.fitted.values[:, 0], (ROOT / "docs" / "clinical.md").read_text()
    assert torch.equal(models[0].fitted[0, :3], age[:, :3].quantile(0.5, dim=0))
    assert "by the other sites' medians" in LEFT_OUT_TEXT
    assert "the other sites' medians" in " ".join(start.split())


def naive_delong(scores: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Equations 3 to 8 of DeLong et al. pair by pair."""
    cases, controls = scores[:, target == 1], scores[:, target == 0]
    psi = (cases[:, :, None] > controls[:, None, :]) + 0.5 * (cases[:, :, None] == controls[:, None, :])
    area, won, lost = psi.mean((1, 2)), psi.mean(2), psi.mean(1)
    s10 = (won - area[:, None]) @ (won - area[:, None]).T / (won.shape[1] - 1)
    s01 = (lost - area[:, None]) @ (lost - area[:, None]).T / (lost.shape[1] - 1)
    return area, s10 / won.shape[1] + s01 / lost.shape[1]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), cases=st.integers(2, 20), controls=st.integers(2, 20), digits=st.integers(0, 3))
def test_delong_is_the_paper_pair_by_pair(seed: int, cases: int, controls: int, digits: int) -> None:
    rng = np.random.default_rng(seed)
    target = np.repeat([1.0, 0.0], [cases, controls])
    scores = (rng.normal(size=(2, len(target))) + target).round(digits)
    areas, covariance = delong_auroc(scores, target)
    expected, spread = naive_delong(scores, target)
    np.testing.assert_allclose(areas, expected, atol=1e-12)
    np.testing.assert_allclose(covariance, spread, atol=1e-12)
    assert areas[0] == pytest.approx(roc_auc_score(target, scores[0]))


def timed(seed: int, rows: int) -> tuple[StoredPredictions, StoredPredictions]:
    """Two models' predictions of the same targets, times of which some are censored."""
    rng = np.random.default_rng(seed)
    target, event = rng.integers(1, 30, rows).astype(float), (rng.random(rows) < 0.6).astype(float)
    first = StoredPredictions(np.zeros(rows, int), np.arange(rows), target, rng.random(rows).round(1) + 0.1, event)
    return first, first._replace(prediction=(first.prediction + rng.random(rows) / target).round(2))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(8, 40))
def test_metrics_of_weighted_samples_are_those_of_repeated_ones(seed: int, rows: int) -> None:
    """Weights 0, 1, 2 are samples left out, taken once and twice; one draw alone is what the tasks score."""
    samples, rng = timed(seed, rows)[0], np.random.default_rng(seed)
    times = rng.integers(0, 3, rows)
    times[:2] = 1
    repeated = np.repeat(np.arange(rows), times)
    y, mu = samples.target[repeated], samples.prediction[repeated]
    expected = {
        "rmse": root_mean_squared_error(y, mu), "mae": mean_absolute_error(y, mu), "r2": r2_score(y, mu),
        "deviance": mean_poisson_deviance(y, mu),
    }  # fmt: skip
    for name, value in expected.items():
        assert weighted_metric(name, times[None].astype(float), samples)[0] == pytest.approx(value), name
    assert samples.event is not None
    several = concordance(SurvivalRows(mu, y, samples.event[repeated]))
    assert weighted_metric("c_index", times[None].astype(float), samples)[0] == pytest.approx(several, nan_ok=True)


def test_the_bootstrap_is_the_textbook_error_of_a_mean_and_pairs_the_patients() -> None:
    """The difference of two mean absolute errors is a mean: its standard error has a formula, and pairing lowers it."""
    first, second = timed(1, 400)
    apart = np.abs(second.prediction - second.target) - np.abs(first.prediction - first.target)
    assert standard_error("mae", first, second) == pytest.approx(apart.std(ddof=1) / 20, rel=0.1)
    assert standard_error("rmse", first, first) == 0
    own = [standard_error("c_index", first._replace(prediction=np.ones(400)), model) for model in (first, second)]
    assert standard_error("c_index", first, second) < math.hypot(*own)


def sampled(seed: int, rows: int) -> StoredPredictions:
    rng = np.random.default_rng(seed)
    risk = rng.random(rows)
    return StoredPredictions(np.zeros(rows, int), np.arange(rows), (rng.random(rows) < risk).astype(float), risk)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 200), threshold=st.floats(0.01, 0.9))
def test_operating_points_and_curves_obey_their_laws(seed: int, rows: int, threshold: float) -> None:
    samples = sampled(seed, rows)
    now, share = operating_point(samples, threshold), samples.target.mean()
    odds = threshold / (1 - threshold)
    assert now.treating_all == pytest.approx(share - (1 - share) * odds)
    assert operating_point(samples._replace(prediction=np.ones(rows)), threshold).benefit == pytest.approx(
        now.treating_all
    )
    assert operating_point(samples._replace(prediction=np.zeros(rows)), threshold).benefit == 0
    assert now.benefit <= share + 1e-12  # that of knowing everything
    found = np.nan_to_num(now.sensitivity) * share - odds * (1 - np.nan_to_num(now.specificity, nan=1.0)) * (1 - share)
    assert now.benefit == pytest.approx(found)
    bins = calibration_curve(samples)
    assert sum(size for *_, size in bins) == rows
    assert sum(observed * size for _, observed, size in bins) == pytest.approx(samples.target.sum())
    assert wilson_interval(share, rows) == pytest.approx(
        proportion_confint(samples.target.sum(), rows, method="wilson")
    )


def test_groups_take_columns_and_bounds() -> None:
    import pandas as pd

    table = pd.DataFrame(
        {"age": [70, 75, None, 80], "sex": ["f", "m", "m", None], "x": [1.0, 2.0, 3.0, 4.0], "y": [0, 1, 0, 1]}
    )
    data = fl.Dataset.create(table, "y", group_columns=["age", "sex"], drop=["age", "sex"])
    assert data.shape == (1,)
    groups = {name: inside.tolist() for name, inside in make_group_masks(data, ["sex", "age >= 75"]).items()}
    assert groups == {
        "sex=f": [True, False, False, False], "sex=m": [False, True, True, False],
        "age>=75": [False, True, False, True], "age<75": [True, False, False, False],
    }  # fmt: skip
    for choice, sentence in (("race", "race"), ("sex>=3", "is not a number"), ("wide", "Add a bound")):
        wide = fl.Dataset.create(table, "y", group_columns=["age", "sex"], drop=["age", "sex"])
        wide.columns["wide"], wide.levels["wide"] = torch.zeros(4, dtype=torch.long), tuple(map(str, range(30)))  # type: ignore[index]
        with pytest.raises(ConfigError, match=sentence):
            make_group_masks(wide, [choice])


def test_permuting_a_column_tells_what_the_model_uses() -> None:
    """Of a model that is known: nothing for columns without weight, and what scikit-learn says of the others."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3))
    level = rng.choice(["u", "v", "w"], 400)
    y = x[:, 0] * 3 + (level == "v") * 2.0
    import pandas as pd

    table = pd.DataFrame(
        {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "level": level, "y": y, "site": rng.choice(["n", "s"], 400)}
    )
    data = fl.Dataset.create(table, "y", task="regression", client_column="site", categorical=["level"], drop=["c"])
    fed = fl.partitions.natural(test=0.5)(data, seed=0)
    result = fl.simulate("fedavg", fed, rounds=30, local=fl.LocalSGD(lr=0.1, batch_size=32))
    found = importance(result).to_pylist()
    for client in (0, 1):
        share = {line["column"]: line["value"] for line in found if line["client"] == client}
        assert list(share) == ["a", "b", "level"]
        assert share["a"] > share["level"] > 0.2
        assert abs(share["b"]) < 0.05
        rows = fed.indices("test", client)
        # permuting x[:, 0] adds 2 * 9 var(a) to the squared error
        expected = np.sqrt(2 * 9 * np.var(x[rows.numpy(), 0]))
        assert share["a"] == pytest.approx(expected, rel=0.2)
    with pytest.raises(Refused, match="permutes columns of a table"):
        check_importance(fl.partitions.iid(clients=2)(fl.load("digits"), seed=0))


def test_reference_models_are_scikit_learns(run: Path) -> None:
    import pandas as pd
    from sklearn.linear_model import LogisticRegression

    table = pd.DataFrame([row for site in ("Amsel", "Birke") for row in patients(site, si=False)])
    drop = ["patient_id", "hours_to_death", "troponin_hs", "glucose", "ward", "sex", "systolic"]
    data = fl.Dataset.create(table, "died", client_column="hospital", drop=drop)
    fed = fl.partitions.natural(test=0.4)(data, seed=0)
    found = references(fl.simulate("local", fed, rounds=1)).to_pylist()
    assert {(line["client"], line["model"]) for line in found} == {
        (client, model) for client in (0, 1) for model in ("logistic regression", "forest")
    }
    train, test = (fed.indices(part, 1) for part in ("train", "test"))
    x, y = fed.fetch(torch.arange(len(data))).numpy(), data.y.numpy()
    risk = LogisticRegression(max_iter=1000).fit(x[train], y[train]).predict_proba(x[test])[:, 1]
    scores = {r["metric"]: r["value"] for r in found if (r["client"], r["model"]) == (1, "logistic regression")}
    assert scores["auroc"] == pytest.approx(roc_auc_score(y[test], risk))
    assert scores["loss"] == pytest.approx(log_loss(y[test], risk), rel=1e-6)
    with pytest.raises(Refused, match="classes or measurements in a table"):
        check_references(fl.partitions.iid(clients=2)(fl.load("digits"), seed=0))
    assert "Reference models" in (run / "report.html").read_text()
