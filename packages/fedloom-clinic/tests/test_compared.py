"""A model that an analysis fits is a row of a comparison: its scores and predictions are a library's on pooled rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import statsmodels.api as sm
import torch
from lifelines import CoxPHFitter
from lifelines.utils import concordance_index
from safetensors.torch import load_file
from sklearn.linear_model import Ridge
from sklearn.metrics import log_loss, mean_poisson_deviance, roc_auc_score, root_mean_squared_error
from typer.testing import CliRunner

import fedloom as fl
from fedloom.analyses import make_schema
from fedloom.data import DATA_PARTS
from fedloom.errors import ConfigError
from fedloom.lab.cli import app
from fedloom.values import dump_value
from fedloom_clinic.glm import Glm
from fedloom_clinic.ridge import RidgeRegression

ROWS = 240
DESIGN = {
    "ridge": ("bp", "regression"), "linear": ("bp", "regression"), "logistic": ("died", "binary"),
    "poisson": ("visits", "count"), "cox": ("days", "survival"),
}  # fmt: skip


def patients() -> pd.DataFrame:
    """Three sites; a number, three levels and a constant column; one outcome for each task, with tied times."""
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({
        "site": rng.choice(list("abc"), ROWS), "age": rng.normal(60, 9, ROWS), "ward": rng.choice(list("GIR"), ROWS),
        "same": 1.0,
    })  # fmt: skip
    eta = (0.1 * (frame.age - 60) + (frame.ward == "I")).to_numpy()
    frame["bp"] = 100 + 5 * eta + rng.normal(0, 3, ROWS)
    frame["died"] = (rng.random(ROWS) < 1 / (1 + np.exp(-eta))) * 1
    frame["visits"] = rng.poisson(np.exp(0.3 * eta + 0.5))
    frame["days"] = np.ceil(rng.exponential(20 / np.exp(eta / 2)))
    return frame


def data_of(case: str) -> fl.Dataset:
    target, task = DESIGN[case]
    dropped = {"bp", "visits", "days", "died"} - {target, *(["died"] if task == "survival" else [])}
    more = {"event": "died"} if task == "survival" else {}
    return fl.Dataset.create(
        patients().drop(columns=[*dropped]), target, client_column="site", categorical=["ward"], task=task, **more
    )


def rows_of(fed: fl.Federation, part: str, client: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of the models as float64, and targets in their unit."""
    at = torch.cat([fed.indices(part, k) for k in (range(fed.n) if client is None else [client])])
    y = fed.data.y[at].double()
    return fed.fetch(at).double().numpy(), (y * fed.data.unit + fed.data.centre if not fed.data.classed else y).numpy()


def fit_pooled(case: str, x: np.ndarray, y: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Linear predictor of a library for new inputs, fitted to pooled inputs."""
    varying = x.std(0) > 0
    centre, spread = x.mean(0), np.where(varying, x.std(0), 1.0)
    if case == "ridge":
        return Ridge(alpha=0.1 * len(x)).fit((x - centre) / spread, y[:, 0]).predict((new - centre) / spread)
    used = np.flatnonzero(varying)[:-1]  # the last level follows from the others
    if case == "cox":
        frame = pd.DataFrame(x[:, used]).assign(time=y[:, 0], event=y[:, 1])
        fit = CoxPHFitter().fit(frame, "time", "event", fit_options={"precision": 1e-13})
        return new[:, used] @ fit.params_.to_numpy()
    family = {"linear": sm.families.Gaussian(), "logistic": sm.families.Binomial(), "poisson": sm.families.Poisson()}
    fitted = sm.GLM(np.ravel(y), sm.add_constant(x[:, used], has_constant="add"), family=family[case]).fit(tol=1e-14)
    return sm.add_constant(new[:, used], has_constant="add") @ fitted.params


def scores(case: str, eta: np.ndarray, y: np.ndarray) -> dict[str, float]:
    match case:
        case "logistic":
            p = 1 / (1 + np.exp(-eta))
            return {"auroc": roc_auc_score(y, eta), "loss": log_loss(y, p)}
        case "poisson":
            return {"deviance": mean_poisson_deviance(y.ravel(), np.exp(eta))}
        case "cox":
            return {"c_index": concordance_index(y[:, 0], -eta, y[:, 1])}
        case _:
            return {"rmse": root_mean_squared_error(y.ravel(), eta)}


@pytest.mark.filterwarnings("ignore")  # of lifelines, on pandas
@pytest.mark.parametrize("case", DESIGN)
def test_a_fitted_model_is_scored_as_the_librarys(case: str, tmp_path: Path) -> None:
    kind = case if case in ("ridge", "cox") else "glm"
    analysis = {"kind": kind, "compare": True, **({"strength": 0.1} if case == "ridge" else {})}
    comparison = fl.compare(
        ["fedavg"], data_of(case), partition=fl.partitions.natural(), seeds=range(2), rounds=1, analyses=[analysis],
        folder=tmp_path / "run", progress_bar=False,
    )  # fmt: skip
    assert {*comparison.results} == {(label, seed) for label in ("fedavg", kind) for seed in range(2)}
    for seed in range(2):
        result = comparison[kind, seed]
        fed = result.job.eval_fed
        assert result.status == "done"
        for client in range(fed.n):
            x, y = rows_of(fed, "test", client)
            eta = fit_pooled(case, *rows_of(fed, "train"), x)
            for metric, value in scores(case, eta, y).items():
                assert float(result.final(metric=metric)[client]) == pytest.approx(value, abs=1e-8), metric
            shown = comparison["fedavg", seed].job.eval_fed  # the same test rows
            np.testing.assert_array_equal(rows_of(shown, "test", client)[0], x)
    rows = comparison.to_pandas().set_index("method")
    assert rows.loc[kind, "bytes_up"] > 0
    assert rows.loc[kind, "samples_backward"] == 0
    fed, models = comparison[kind, 0].job.eval_fed, fl.open_run(tmp_path / "run")[kind, 0].models
    x, _ = rows_of(fed, "test", 0)
    eta = fit_pooled(case, *rows_of(fed, "train"), x)
    output = models.module("global")(torch.from_numpy(x)).detach().numpy()[:, 0]
    np.testing.assert_allclose(output * fed.data.unit + fed.data.centre, eta, atol=1e-8)
    file = tmp_path / "model.safetensors"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--method", kind, "--out", str(file)])
    assert done.exit_code == 0, done.output
    exported = load_file(file)
    np.testing.assert_array_equal(x @ exported["head.weight"][0].numpy() + exported["head.bias"].numpy(), output)
    if case in ("ridge", "linear"):
        fresh = patients()[lambda frame: frame.site == fed.names[0]].drop(columns=["bp", "visits", "days", "died"])
        rows = models.predict(fresh, client=fed.names[0])
        whole, _ = (
            np.concatenate(parts) for parts in zip(*(rows_of(fed, part, 0) for part in DATA_PARTS), strict=True)
        )
        wanted = fit_pooled(case, *rows_of(fed, "train"), whole)
        np.testing.assert_allclose(np.sort(np.ravel(rows)), np.sort(wanted), rtol=1e-7)


def write_experiment(folder: Path, strength: float, more: str = "") -> Path:
    """File with FedAvg and a ridge regression for comparison, whose data are in the folder."""
    patients().drop(columns=["visits", "days", "died", "same"]).to_csv(folder / "t.csv", index=False)
    (folder / "t.toml").write_text(
        f'seeds = [0, 1]\nrounds = 1\n[data]\nsource = "{folder}/t.csv"\ntarget = "bp"\ntask = "regression"\n'
        'client_column = "site"\ncategorical = ["ward"]\n[partition]\nkind = "natural"\n'
        f'[[method]]\nalgorithm = "fedavg"\n{more}\n[[analysis]]\nkind = "ridge"\ncompare = true\n'
        f"strength = {strength}\n"
    )
    return folder / "t.toml"


def test_a_file_compares_it_and_another_option_fits_it_again(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def run(strength: float, *words: str) -> dict[str, Any]:
        file = write_experiment(tmp_path, strength)
        done = CliRunner().invoke(app, ["run", str(file), "--out", str(out), *words])
        assert done.exit_code == 0, done.output
        assert "ridge (global)" in done.output
        table = pq.read_table(out / "metrics.parquet").to_pandas()
        some = table[(table.metric == "rmse/mean") & (table.part == "test")]
        return {key: frame.value.iloc[-1] for key, frame in some.groupby(["method", "seed"])}

    first = run(0.1)
    assert set(first) == {(label, seed) for label in ("fedavg", "ridge") for seed in (0, 1)}
    weight = fl.open_run(out)["ridge", 0].models.rows("global")
    second = run(5.0, "--workers", "2")
    assert {key for key in first if first[key] != second[key]} == {("ridge", 0), ("ridge", 1)}
    assert not torch.equal(weight, fl.open_run(out)["ridge", 0].models.rows("global"))


@pytest.mark.parametrize(("more", "words"), [
    ('label = "ridge"', "the same label as the method 'ridge'"),
    ('[attack]\nkind = "sign-flip"', "compare = true, but attacks do not affect its sums"),
])  # fmt: skip
def test_a_row_that_would_mislead_is_refused(tmp_path: Path, more: str, words: str) -> None:
    done = CliRunner().invoke(app, ["run", str(write_experiment(tmp_path, 0.1, more)), "--out", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert not (tmp_path / "run").exists()


def test_a_model_of_no_comparison_is_refused() -> None:
    with pytest.raises(ConfigError, match="no model is shared by all clients"):
        fl.analyze("glm", data_of("linear"), by_client=True, compare=True)
    schema = make_schema(data_of("linear"))
    with pytest.raises(ConfigError, match="a deployment does not compare methods"):
        RidgeRegression(compare=True).check_sites(schema, masked=True)
    assert "compare" not in dump_value(Glm()), "sites agree on the same terms as before"


def test_a_fit_without_a_result_is_a_row_that_failed() -> None:
    comparison = fl.compare(
        ["fedavg"], data_of("ridge"), partition=fl.partitions.natural(), seeds=[0], rounds=1, progress_bar=False,
        analyses=[RidgeRegression(compare=True, max_input=0.5)],
    )  # fmt: skip
    assert {*comparison.results} == {("fedavg", 0)}
    assert "outside their bounds" in comparison.failures["ridge", 0]
    frame = pd.DataFrame({"site": [*"aabb"] * 9, "x": 1.0, "y": [1.0, 2.0, 4.0] * 12})
    same = fl.Dataset.create(frame, "y", client_column="site", task="regression")
    comparison = fl.compare(
        ["local"], same, partition=fl.partitions.natural(), seeds=[0], rounds=1, progress_bar=False,
        analyses=[Glm(compare=True)],
    )  # fmt: skip
    assert "has the same value in all training rows" in comparison.failures["glm", 0]
