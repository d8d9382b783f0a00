"""Penalized regressions by sums equal lifelines, scikit-learn and statsmodels, and Firth's penalty by autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lifelines import CoxPHFitter
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge
from statsmodels.api import GLM
from statsmodels.api import families as glm_families

import fedloom as fl
from fedloom.analyses import AnalysisTerms, resolve_analysis
from fedloom.analyses.run import prepare_clients
from fedloom.errors import ConfigError, DataError, Refused
from fedloom_clinic.columns import design_of
from fedloom_clinic.fits.cox import TIES_METHODS, SurvivalSite, fit_cox
from fedloom_clinic.fits.cox_vectors import bin_site, simulated_agreement
from fedloom_clinic.fits.glm import GLM_FAMILIES, GlmSite, fit_glm
from fedloom_clinic.fits.penalty import CV_FOLDS, RIDGE_STRENGTHS, fold_masks
from fedloom_clinic.fits.secure_cox import fit_secure_cox
from fedloom_clinic.glm import Glm
from fedloom_clinic.penalties import assign_folds


def patients(rows: int, seed: int) -> SurvivalSite:
    """Tied times, some of them 0; the third column is rare and has no event, so that it separates the rows."""
    rng = np.random.default_rng(seed)
    x = np.stack([rng.normal(0, 1, rows), rng.normal(64, 12, rows), (rng.random(rows) < 0.06) * 1.0], 1)
    time, end = rng.exponential(50 * np.exp(-x[:, 0] / 2)), rng.exponential(60, rows)
    event = ((time <= end) & (x[:, 2] == 0)) * 1.0
    return SurvivalSite(x, np.floor(np.minimum(time, end) / 5) * 5, event)


SITES = [patients(150, 1), patients(80, 2)]
X, TIME, EVENT = (np.concatenate(parts) for parts in zip(*SITES, strict=True))
N = len(X)
SCALED = (X - X.mean(0)) / X.std(0)


def glm_sites(y: np.ndarray) -> list[GlmSite]:
    return [GlmSite(X[:150], y[:150]), GlmSite(X[150:], y[150:])]


def test_the_rows_are_what_no_fit_without_a_penalty_takes() -> None:
    assert (TIME == 0).any()
    with pytest.raises(DataError, match="column 2 separates the rows"):
        fit_cox(SITES)
    with pytest.raises(DataError, match="column 2 separates the rows"):
        fit_glm(glm_sites(EVENT), "logistic")


@pytest.mark.filterwarnings("ignore")  # of lifelines, on pandas
@pytest.mark.parametrize("strength", [1.0, 0.1, 0.01])
def test_a_ridge_of_a_cox_regression_is_lifelines_penalizer(strength: float) -> None:
    """lifelines has the deviation with N - 1; sites' whole numbers stay within their bound of the same rows' fit."""
    table = pd.DataFrame(np.column_stack([X, TIME, EVENT]), columns=["a", "b", "c", "T", "E"])
    pooled = CoxPHFitter(penalizer=strength * (N - 1) / N).fit(table, "T", "E", fit_options={"precision": 1e-12})
    fit = fit_cox(SITES, penalty="ridge", strength=strength)
    np.testing.assert_allclose(fit.beta, pooled.params_, atol=1e-6)
    np.testing.assert_allclose(fit.se, pooled.standard_errors_, atol=1e-6)
    for stratify in (False, True):
        terms = simulated_agreement(SITES, 5.0, 1, "efron", strength)
        terms = terms._replace(ends=np.zeros(0), stratify=True) if stratify else terms
        rows = SITES if stratify else [bin_site(site, terms)[0] for site in SITES]
        exact = fit_cox(rows, stratify=stratify, penalty="ridge", strength=strength)
        secure = fit_secure_cox(SITES, terms)
        assert (np.abs(secure.fit.beta - exact.beta) <= secure.bound).all()
        assert (secure.bound < 1e-6).all()
        np.testing.assert_allclose(secure.fit.se, exact.se, rtol=1e-8)


@pytest.mark.parametrize("strength", [1.0, 0.1, 0.01])
def test_a_ridge_of_a_regression_is_scikit_learns(strength: float) -> None:
    pooled = {
        "logistic": (LogisticRegression(C=1 / (N * strength), tol=1e-10, solver="newton-cholesky"), EVENT),
        "linear": (Ridge(alpha=N * strength), TIME),
        "poisson": (PoissonRegressor(alpha=strength, tol=1e-10, solver="newton-cholesky"), EVENT),
    }
    for family, (model, y) in pooled.items():
        fit = fit_glm(glm_sites(y), family, penalty="ridge", strength=strength)
        np.testing.assert_allclose(fit.beta[1:] * X.std(0), model.fit(SCALED, y).coef_.ravel(), atol=1e-8)
        assert fit.beta[0] + fit.beta[1:] @ X.mean(0) == pytest.approx(float(np.ravel(model.intercept_)[0]), abs=1e-7)
    design = np.column_stack([np.ones(N), SCALED])
    alpha = np.array([0.0, *[strength] * 3])
    same = GLM(EVENT, design, glm_families.Binomial()).fit_regularized(alpha=alpha, L1_wt=0)
    fit = fit_glm(glm_sites(EVENT), "logistic", penalty="ridge", strength=strength)
    np.testing.assert_allclose(fit.beta[1:] * X.std(0), same.params[1:], atol=1e-4)  # its optimizer stops there


def test_a_ridge_takes_columns_that_depend_and_more_columns_than_rows() -> None:
    twice = [site._replace(x=np.hstack([site.x, site.x[:, :1]])) for site in SITES]
    with pytest.raises(DataError, match="depend on each other"):
        fit_cox(twice)
    fit = fit_cox(twice, penalty="ridge", strength=0.1)
    assert fit.beta[0] == pytest.approx(fit.beta[3])
    wide = np.random.default_rng(0).normal(size=(20, 30))
    y = wide[:, 0] + 0.1
    found = fit_glm([GlmSite(wide[:9], y[:9]), GlmSite(wide[9:], y[9:])], "linear", penalty="ridge", strength=0.2)
    scaled = (wide - wide.mean(0)) / wide.std(0)
    np.testing.assert_allclose(found.beta[1:] * wide.std(0), Ridge(alpha=4.0).fit(scaled, y).coef_, atol=1e-8)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("kind", [*TIES_METHODS, "logistic", "poisson"])
def test_firths_fit_has_the_largest_likelihood_times_root_of_the_information(kind: str) -> None:
    """The penalized likelihood by autograd, whose Hessian is the information, has no larger value nearby."""
    z, time, event = (torch.from_numpy(part) for part in (SCALED, TIME, EVENT))
    at_risk = []  # of every death, the weights of the rows in its denominator
    for at in time[event == 1].unique():
        dead, risk = (time == at) & (event == 1), (time >= at)
        deaths = int(dead.sum())
        shares = (k / deaths if kind == "efron" else 0.0 for k in range(deaths))
        at_risk += [risk.double() - share * dead.double() for share in shares]
    weights = torch.stack(at_risk)

    def log_likelihood(beta: torch.Tensor) -> torch.Tensor:
        if kind not in TIES_METHODS:
            eta = beta[0] + z @ beta[1:]
            cumulant = torch.nn.functional.softplus(eta) if kind == "logistic" else eta.exp()
            return (event * eta - cumulant).sum()
        eta = z @ beta
        return eta @ event - (weights @ eta.exp()).log().sum()

    def penalized(beta: torch.Tensor) -> torch.Tensor:
        return log_likelihood(beta) + torch.logdet(-torch.func.hessian(log_likelihood)(beta)) / 2

    if kind in TIES_METHODS:
        fit = fit_cox(SITES, kind, penalty="firth")
        beta, se = fit.beta * X.std(0), fit.se * X.std(0)
    else:
        found = fit_glm(glm_sites(EVENT), kind, penalty="firth")
        beta = np.append(found.beta[0] + found.beta[1:] @ X.mean(0), found.beta[1:] * X.std(0))
        se = np.append(0.0, found.se[1:] * X.std(0))
    at = torch.from_numpy(beta)
    gradient = torch.func.grad(penalized)(at)
    np.testing.assert_allclose(gradient @ torch.linalg.inv(-torch.func.hessian(log_likelihood)(at)), 0, atol=1e-6)
    best = minimize(
        lambda b: -float(penalized(torch.from_numpy(b))), beta, method="Nelder-Mead", options={"maxiter": 60}
    )
    assert -best.fun <= float(penalized(at)) + 1e-8
    inverse = torch.linalg.inv(-torch.func.hessian(log_likelihood)(at)).diagonal().sqrt().numpy()
    np.testing.assert_allclose(se[-3:], inverse[-3:], rtol=1e-6)


def test_firth_is_half_a_success_and_half_a_failure_more_in_a_two_by_two_table() -> None:
    """Of a saturated logistic regression, Firth's estimate adds 1/2 to every cell (Firth 1993, Section 3)."""
    x = np.repeat([0.0, 1.0], [30, 12])[:, None]
    y = np.concatenate([np.repeat([1.0, 0.0], [7, 23]), np.zeros(12)])
    fit = fit_glm([GlmSite(x[:20], y[:20]), GlmSite(x[20:], y[20:])], "logistic", penalty="firth")
    np.testing.assert_allclose(fit.beta, [np.log(7.5 / 23.5), np.log(0.5 / 12.5) - np.log(7.5 / 23.5)], atol=1e-8)
    linear = [GlmSite(SITES[0].x, SITES[0].time), GlmSite(SITES[1].x, SITES[1].time)]
    np.testing.assert_allclose(fit_glm(linear, "linear", penalty="firth").beta, fit_glm(linear, "linear").beta)


@pytest.mark.parametrize("family", GLM_FAMILIES)
def test_the_strength_has_the_largest_held_out_likelihood(family: str) -> None:
    """Of scikit-learn's fits without each fold, on the rows of the fold."""
    y = TIME if family == "linear" else EVENT
    fit = fit_glm(glm_sites(y), family, penalty="ridge")
    assert fit.ridge is not None
    assert [strength for strength, _ in fit.ridge.held_out] == list(RIDGE_STRENGTHS)
    folds = np.concatenate([np.array(masks).argmax(0) for masks in zip(*fold_masks([150, 80]), strict=True)])
    assert set(folds) == set(range(CV_FOLDS))
    for strength, value in fit.ridge.held_out[1::4]:
        total = 0.0
        for k in range(CV_FOLDS):
            train, rows = folds != k, int((folds != k).sum())
            model = {
                "linear": Ridge(alpha=rows * strength),
                "logistic": LogisticRegression(C=1 / (rows * strength), tol=1e-10, solver="newton-cholesky"),
                "poisson": PoissonRegressor(alpha=strength, tol=1e-10, solver="newton-cholesky"),
            }[family]
            target = (y - y.mean()) / y.std() if family == "linear" else y
            model.fit(SCALED[train], target[train])
            eta = SCALED[~train] @ model.coef_.ravel() + model.intercept_
            total += float((target[~train] * eta - GLM_FAMILIES[family][0](eta)).sum())
        assert value == pytest.approx(total, abs=1e-5)
    assert fit.ridge.strength == max(fit.ridge.held_out, key=lambda pair: pair[1])[0]
    again = fit_glm(glm_sites(y), family, penalty="ridge", strength=fit.ridge.strength)
    np.testing.assert_array_equal(again.beta, fit.beta)


def test_what_is_no_penalty_is_a_sentence() -> None:
    for words, sentence in (
        ({"penalty": "lasso"}, "penalty"),
        ({"strength": 0.1}, "has no strength"),
        ({"penalty": "firth", "strength": 0.1}, "has no strength"),
        ({"penalty": "ridge", "strength": 0}, "greater than 0"),
        ({"penalty": "ridge", "strength": float("nan")}, "greater than 0"),
        ({"penalty": "ridge", "strength": "much"}, "a finite number greater than 0, or 'cv'"),
    ):
        for fit in (lambda **w: fit_cox(SITES, **w), lambda **w: fit_glm(glm_sites(EVENT), "logistic", **w)):
            with pytest.raises(ConfigError, match=sentence):
                fit(**words)
    alone = [GlmSite(X[:150], EVENT[:150]), GlmSite(X[150:], EVENT[150:] * 0)]
    with pytest.raises(DataError, match="site b: the target is 0 in every row"):
        fit_glm(alone, "logistic", by_site=["a", "b"], penalty="ridge")


def tables() -> dict[str, fl.Dataset]:
    """The rows as data sets of two clients, for a Cox and for a logistic regression."""
    place = np.repeat(["a", "b"], [150, 80])
    frame = pd.DataFrame(X.astype(np.float32), columns=["x0", "x1", "x2"]).assign(site=place, T=TIME, E=EVENT)
    return {
        "cox": fl.Dataset.create(frame, "T", event="E", client_column="site"),
        "glm": fl.Dataset.create(frame.drop(columns="T"), "E", client_column="site", task="binary"),
    }


ROWS = [site._replace(x=site.x.astype(np.float32).astype(float)) for site in SITES]
COX_FORMS: list[dict[str, Any]] = [{}, {"stratify": True}, {"width": 5.0, "min_events": 1}]


def test_a_ridge_counts_only_rows_of_clients_with_enough_events() -> None:
    """As docs/statistics.md has it: a third client with 4 events changes nothing, not even the penalty per row."""
    few = ROWS[1]._replace(event=np.where(np.cumsum(ROWS[1].event) <= 4, ROWS[1].event, 0.0))
    frames = [pd.DataFrame(site.x, columns=["x0", "x1", "x2"]).assign(T=site.time, E=site.event) for site in ROWS]
    frames.append(frames[1].assign(E=few.event))
    frame = pd.concat([one.assign(site=name) for one, name in zip(frames, "abc", strict=True)])
    data = fl.Dataset.create(frame, "T", event="E", client_column="site")
    found = fl.analyze("cox", data, stratify=True, penalty="ridge", strength=0.1).table.to_pandas()
    wanted = fit_cox(ROWS, stratify=True, penalty="ridge", strength=0.1)
    np.testing.assert_allclose(found.coefficient, wanted.beta, rtol=0, atol=1e-8)
    every = fit_cox([*ROWS, few], stratify=True, penalty="ridge", strength=0.1)
    assert found.rows[0] == wanted.row_count < every.row_count
    assert np.abs(every.beta - wanted.beta).max() > 1e-3


@pytest.mark.parametrize("ties", TIES_METHODS)
@pytest.mark.parametrize("form", COX_FORMS, ids=["exact", "strata", "bins"])
def test_firths_fit_by_sums_is_that_of_the_rows(form: dict[str, Any], ties: str) -> None:
    found = fl.analyze("cox", tables()["cox"], penalty="firth", ties=ties, **form).table.to_pandas()
    stratify = "stratify" in form
    rows = [bin_site(site, simulated_agreement(ROWS, 5.0, 1, ties))[0] for site in ROWS] if "width" in form else ROWS
    fit = fit_cox(rows, ties, stratify=stratify, penalty="firth")
    np.testing.assert_allclose(found.coefficient, fit.beta, rtol=0, atol=1e-9)
    np.testing.assert_allclose(found.standard_error, fit.se, rtol=0, atol=1e-9)
    assert found.likelihood[0] == pytest.approx(fit.likelihood, abs=1e-8)


def test_firths_fit_of_few_events_ends_where_rounding_hides_its_gain_and_says_who_is_left_out() -> None:
    """Eight rows with six events: the last steps gain less than sums are rounded by."""
    frame = pd.DataFrame({
        "age": [-0.57, -2.02, -0.23, 3.32, 0.23, 0.48, 0.02, 0.55], "arm": [0, 0, 0, 1, 1, 1, 1, 0],
        "ward": [1, 0, 1, 0, 1, 1, 1, 0], "days": [1, 10, 5, 0, 5, 0, 2, 6], "died": [1, 1, 1, 1, 1, 1, 0, 0],
    })  # fmt: skip
    rows = SurvivalSite(*(frame[part].to_numpy(float) for part in (["age", "arm", "ward"], "days", "died")))
    whole = fit_cox([rows], stratify=True, penalty="firth")
    small = frame.assign(site="small")[:4]
    data = fl.Dataset.create(pd.concat([frame.assign(site="large"), small]), "days", event="died", client_column="site")
    found = fl.analyze("cox", data, stratify=True, penalty="firth")
    np.testing.assert_allclose(found.table["coefficient"], whole.beta, rtol=1e-5)
    np.testing.assert_allclose(found.table["standard_error"], whole.se, rtol=1e-5)
    assert len(found.log) < 60
    assert any("4 of 10 events are not used, because their clients have fewer than 5" in note for note in found.notes)
    binned = fl.analyze("cox", data, width=5.0, until=8.0, penalty="ridge", strength=1.0, min_events=4)
    assert [note for note in binned.notes if "censored" in note]


def test_a_strength_by_the_sums_of_folds_has_the_largest_held_out_likelihood() -> None:
    """Of scikit-learn's fits without each fold, with folds as clients divide their subjects."""
    analysis = Glm(penalty="ridge", strength="cv")
    result = fl.analyze(analysis, tables()["glm"])
    schema, rows, _ = prepare_clients(tables()["glm"], analysis)
    terms = AnalysisTerms(schema, torch.tensor([len(one) for one in rows.values()]))
    designs = [(design_of(one, terms), one) for one in rows.values()]
    fold = np.concatenate([assign_folds(design, one, design.y[:, 0] > 0) for design, one in designs])
    x, y = (np.concatenate([np.asarray(getattr(design, k)) for design, _ in designs]) for k in "xy")
    scaled, y = (x - x.mean(0)) / x.std(0), y[:, 0]
    for k in range(CV_FOLDS):
        assert abs(y[fold == k].sum() - y.sum() / CV_FOLDS) <= 2

    def held_out(strength: float) -> float:
        total = 0.0
        for k in range(CV_FOLDS):
            train = fold != k
            model = LogisticRegression(C=1 / (train.sum() * strength), tol=1e-12, solver="newton-cholesky")
            eta = model.fit(scaled[train], y[train]).decision_function(scaled[~train])
            total += float((y[~train] * eta - np.logaddexp(0, eta)).sum())
        return total

    assert result.table["ridge"][0].as_py() == max(RIDGE_STRENGTHS, key=held_out)
    assert len(result.log) < 24


@pytest.mark.parametrize("kind", ["cox", "glm"])
def test_penalties_obey_the_laws_and_what_is_none_is_a_sentence(kind: str) -> None:
    """Strata of a union are one, so its likelihood is no sum of theirs."""
    data, more = tables()[kind], {"stratify": True} if kind == "cox" else {}
    without = ["union"] if kind == "cox" else []
    fl.testing.check_analysis(resolve_analysis(kind, {"penalty": "firth", **more}), data, without=without)
    ridge = {"penalty": "ridge", "strength": "cv"}
    with pytest.raises(Refused, match="Set strength to a number, or agree on a smaller minimum count"):
        fl.analyze(kind, data, rules={"min_subjects": 9, "min_clients": 2}, **ridge, **more)
    for options, sentence in (
        ({"penalty": "ridge"}, "be set together"), ({"penalty": "firth", "strength": 0.1}, "be set together"),
        ({"penalty": "ridge", "strength": 0.0}, "greater than 0"),
        ({"penalty": "ridge", "strength": float("nan")}, "finite"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=sentence):
            fl.analyze(kind, data, **options)
    with pytest.raises(ConfigError, match="Set stratify = true, or set strength to a number"):
        fl.analyze("cox", tables()["cox"], **ridge)
