"""Regressions by sums equal the pooled fit of statsmodels, in process, for any cut of rows into clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.discrete.discrete_model import Logit
from statsmodels.duration.hazard_regression import PHReg
from statsmodels.genmod.families import Poisson
from statsmodels.genmod.generalized_linear_model import GLM
from statsmodels.regression.linear_model import OLS

import fedloom as fl
from fedloom.errors import ConfigError, DataError, Refused
from fedloom_clinic.cox import Cox
from fedloom_clinic.fits.cox import SurvivalSite, fit_cox
from fedloom_clinic.fits.cox_vectors import simulated_agreement
from fedloom_clinic.fits.glm import GlmSite, fit_glm
from fedloom_clinic.fits.secure_cox import fit_secure_cox
from fedloom_clinic.glm import Glm

BETA = np.array([0.7, -0.04, 0.9])
SIZES = (("north", 300, 0.0), ("south", 120, 1.5), ("east", 60, -1.0))


def columns(rng: np.random.Generator, rows: int) -> np.ndarray:
    return np.stack([rng.normal(0, 1, rows), rng.normal(64, 12, rows), rng.integers(0, 2, rows)], 1)


def patients(rows: int, seed: int, tied: bool, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = columns(rng, rows)
    time, censored = rng.exponential(1 / (0.02 * np.exp(x @ BETA + 0.04 * 64 + shift))), rng.exponential(60, rows)
    event, time = (time <= censored) * 1.0, np.minimum(time, censored)
    return x, np.stack([np.ceil(time / 5) * 5 if tied else time + 1e-9, event], 1)


def data_of(parts: dict[str, tuple[np.ndarray, np.ndarray]], task: str) -> fl.Dataset:
    """Float64 rows, so that nothing is rounded on the way in."""
    x, y = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts.values(), strict=True))
    users = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(p[0]) for p in parts.values()]))
    classes = ("0", "1") if task == "binary" else ()
    return fl.Dataset("rows", x, y, task, classes, users=users, user_names=tuple(parts))  # type: ignore[arg-type]


def pooled_cox(data: fl.Dataset, ties: str, strata: bool) -> PHReg:
    x, (time, event) = data.x.numpy(), data.y.numpy().T
    groups = data.users.numpy() if strata else None  # type: ignore[union-attr]
    return PHReg(time, x, status=event, ties=ties, strata=groups).fit(disp=0, method="newton", tol=1e-13)


def survival(tied: bool) -> fl.Dataset:
    parts = {name: patients(rows, seed, tied, shift) for seed, (name, rows, shift) in enumerate(SIZES)}
    return data_of(parts, "survival")


@pytest.mark.parametrize("strata", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_cox_is_the_pooled_fit(ties: str, tied: bool, strata: bool) -> None:
    data = survival(tied)
    table = fl.analyze("cox", data, ties=ties, stratify=strata, min_events=1).table
    pooled = pooled_cox(data, ties, strata)
    np.testing.assert_allclose(table["coefficient"].to_numpy(), pooled.params, atol=1e-8)
    np.testing.assert_allclose(table["standard_error"].to_numpy(), pooled.bse, atol=1e-8)
    assert table["likelihood"][0].as_py() == pytest.approx(pooled.llf, abs=1e-6)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(1, 199), max_size=4))
def test_it_does_not_matter_how_rows_are_cut_into_clients(seed: int, cuts: list[int]) -> None:
    x, y = patients(200, seed, tied=True)
    pieces = [p for p in np.split(np.random.default_rng(seed).permutation(200), sorted(cuts)) if len(p)]
    one = fl.analyze("cox", data_of({"all": (x, y)}, "survival")).table
    many = fl.analyze("cox", data_of({str(k): (x[p], y[p]) for k, p in enumerate(pieces)}, "survival")).table
    np.testing.assert_allclose(many["coefficient"].to_numpy(), one["coefficient"].to_numpy(), atol=1e-9)


def test_binned_cox_is_the_fit_of_masked_sums_bit_by_bit() -> None:
    data = survival(tied=False)
    parts = [(data.x[data.users == k].numpy(), data.y[data.users == k].numpy()) for k in range(3)]
    sites = [SurvivalSite(x, *y.T) for x, y in parts]
    want = fit_secure_cox(sites, simulated_agreement(sites, 4.0, 3, "efron")).fit
    table = fl.analyze("cox", data, width=4.0, min_events=3).table
    assert table["coefficient"].to_pylist() == want.beta.tolist()
    assert table["standard_error"].to_pylist() == want.se.tolist()


@pytest.mark.parametrize("options", [{}, {"width": 5.0, "min_events": 1}, {"stratify": True, "min_events": 1}], ids=str)
def test_cox_obeys_the_laws(options: dict[str, float]) -> None:
    shown = ["union"] if "stratify" in options else []  # two baselines are no sum of one
    fl.testing.check_analysis(Cox(**options), survival(tied=True), without=shown)


def test_glm_obeys_the_laws() -> None:
    for task in ("regression", "binary", "count"):
        fl.testing.check_analysis(Glm(), targets(task))


def targets(task: str) -> fl.Dataset:
    parts = {}
    for seed, (name, rows, shift) in enumerate(SIZES):
        rng = np.random.default_rng(seed)
        x = columns(rng, rows)
        eta = x @ BETA + 0.04 * 64 + shift
        y = {"regression": 1000 + 80 * (eta + rng.normal(0, 1, rows)), "count": rng.poisson(np.exp(eta - 1)),
             "binary": (rng.random(rows) < 1 / (1 + np.exp(-eta)))}[task]  # fmt: skip
        parts[name] = x, y.astype(np.int64) if task == "binary" else y[:, None].astype(float)
    return data_of(parts, task)


@pytest.mark.parametrize("by_site", [False, True])
@pytest.mark.parametrize("task", ["regression", "binary", "count"])
def test_glm_is_the_pooled_fit(task: str, by_site: bool) -> None:
    data = targets(task)
    table = fl.analyze("glm", data, by_client=by_site).table
    x, y = data.x.numpy(), data.y.numpy().ravel()
    ones = np.eye(3)[data.users] if by_site else np.ones((len(x), 1))
    design = np.hstack([ones, x])
    if task == "regression":
        pooled = OLS(y, design).fit()
    elif task == "count":
        pooled = GLM(y, design, Poisson()).fit(tol=1e-14)
    else:
        pooled = Logit(y, design).fit(disp=0, method="newton", tol=1e-13)
    np.testing.assert_allclose(table["coefficient"].to_numpy(), pooled.params, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(table["standard_error"].to_numpy(), pooled.bse, rtol=1e-8, atol=1e-8)


def test_what_cannot_be_fitted_is_a_sentence() -> None:
    x, y = patients(60, 3, tied=False)
    early = (y[:, :1] < np.median(y[:, 0])) * 1.0
    for bad, sentence in (
        ((x, y * [1, 0]), "no row contains an event, so nothing"),
        ((np.hstack([x, np.full((60, 1), 0.1)]), y), "x3 has the same value in every row"),
        ((np.hstack([x, x[:, :1]]), y), "depend on each other"),
        ((early, np.hstack([y[:, :1], early])), "no finite fit"),
    ):
        with pytest.raises(DataError, match=sentence):
            fl.analyze("cox", data_of({"all": bad}, "survival"))
    with pytest.raises(Refused, match="cox works only for the task survival"):
        fl.analyze("cox", targets("binary"))
    with pytest.raises(Refused, match="glm works only for the task binary or count or regression, but .*or use cox"):
        fl.analyze("glm", survival(tied=True))
    for options in ({"until": 3.0}, {"width": 1.0, "until": 5000.0}, {"stratify": True, "width": 2.0}):
        with pytest.raises(ConfigError):
            Cox(**options)


def test_bins_are_merged_until_enough_clients_have_events_in_each() -> None:
    data = survival(tied=False)
    free = fl.analyze("cox", data, width=2.0, min_events=3)
    merged = fl.analyze("cox", data, width=2.0, min_events=3, rules={"min_clients": 3})
    assert merged.table["bins"][0].as_py() < free.table["bins"][0].as_py()
    assert merged.table["events"][0].as_py() >= free.table["events"][0].as_py()


@pytest.mark.parametrize("options", [{}, {"stratify": True, "min_events": 1}], ids=str)
def test_a_ridge_is_that_of_the_fit_with_rows_in_hand(options: dict[str, float]) -> None:
    data = survival(tied=True)
    parts = [(data.x[data.users == k].numpy(), data.y[data.users == k].numpy()) for k in range(3)]
    want = fit_cox(
        [SurvivalSite(x, *y.T) for x, y in parts], stratify="stratify" in options, penalty="ridge", strength=0.1
    )
    table = fl.analyze("cox", data, penalty="ridge", strength=0.1, **options).table
    np.testing.assert_allclose(table["coefficient"].to_numpy(), want.beta, atol=1e-8)
    np.testing.assert_allclose(table["standard_error"].to_numpy(), want.se, atol=1e-8)
    for task, family in (("binary", "logistic"), ("regression", "linear"), ("count", "poisson")):
        rows = targets(task)
        sites = [
            GlmSite(rows.x[rows.users == k].numpy(), rows.y[rows.users == k].double().numpy().ravel()) for k in range(3)
        ]
        fit = fit_glm(sites, family, penalty="ridge", strength=0.1)
        found = fl.analyze("glm", rows, penalty="ridge", strength=0.1).table
        np.testing.assert_allclose(found["coefficient"].to_numpy(), fit.beta, rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(found["standard_error"].to_numpy(), fit.se, rtol=1e-7)
