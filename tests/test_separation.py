"""Why a regression has no fit: separation by rows and by sums, dependent columns; and no false alarm."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from statsmodels.api import GLM, PHReg
from statsmodels.api import families as glm_families

from fedloom.errors import DataError
from fedloom_clinic.fits import cox, glm
from fedloom_clinic.fits.cox import SurvivalSite, fit_cox
from fedloom_clinic.fits.cox_vectors import simulated_agreement
from fedloom_clinic.fits.glm import GlmSite, fit_glm
from fedloom_clinic.fits.secure_cox import fit_secure_cox
from tests.commands import call

Floats = NDArray[np.float64]
NAMES = ["age", "crp", "drug", "ward"]
SCALES = st.lists(st.sampled_from([1e-6, 1e-3, 1.0, 1e3, 1e6]), min_size=4, max_size=4)
KINDS = ["logistic", "poisson", "cox", "stratified"]


def table(rng: np.random.Generator, rows: int) -> Floats:
    """Two columns of measurements, and two rare ones of 0 and 1."""
    x = np.stack(
        [rng.normal(60, 12, rows), rng.lognormal(1, 1, rows), rng.random(rows) < 0.2, rng.random(rows) < 0.3], 1
    )
    return x.astype(float)


def outcome(rng: np.random.Generator, x: Floats, kind: str) -> list[Floats]:
    """Outcomes that depend little on the columns."""
    eta = (x[:, 0] - 60) / 30
    if kind == "logistic":
        return [(rng.random(len(x)) < 1 / (1 + np.exp(-eta))).astype(float)]
    if kind == "poisson":
        return [rng.poisson(np.exp(eta)).astype(float)]
    time = np.ceil(20 * rng.exponential(np.exp(-eta))) / 4 + 0.25  # with ties
    return [time, (rng.random(len(x)) < 0.6).astype(float)]


def fit(x: Floats, y: list[Floats], kind: str) -> Floats:
    """Coefficients of the columns, from rows that lie at three sites."""
    cuts = [len(x) // 5, len(x) // 2]
    parts = [np.split(part, cuts) for part in (x, *y)]
    if kind in ("cox", "stratified"):
        return fit_cox([SurvivalSite(*s) for s in zip(*parts, strict=True)], stratify=kind != "cox", names=NAMES).beta
    return fit_glm([GlmSite(*s) for s in zip(*parts, strict=True)], kind, NAMES).beta[1:]


def by_sums_alone(patch: pytest.MonkeyPatch) -> None:
    """Take the rows away from the fits, as at real sites."""
    newton = cox.maximize_likelihood
    for module in (cox, glm):
        patch.setattr(module, "maximize_likelihood", lambda at, names, _rows=None, **more: newton(at, names, **more))


@given(seed=st.integers(0, 10**6), scales=SCALES, kind=st.sampled_from(KINDS), up=st.booleans(), sums=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_column_that_separates_is_named_with_its_way(
    seed: int, scales: list[float], kind: str, up: bool, sums: bool
) -> None:
    rng = np.random.default_rng(seed)
    x = table(rng, 240)
    y = outcome(rng, x, kind)
    rare, up = (
        x[:, 2] == 1,
        up and kind == "logistic",
    )  # that a rare column has only large counts or early events is none
    y[-1][rare] = float(up)
    with pytest.MonkeyPatch.context() as patch:
        if sums:
            by_sums_alone(patch)
        with pytest.raises(DataError) as caught:
            fit(x * scales - 3 * np.array(scales), y, kind)
    assert str(caught.value).startswith(
        f"no finite fit: drug separates the rows: its coefficient {'rises' if up else 'falls'} without limit; leave"
    )


@given(seed=st.integers(0, 10**6), scales=SCALES, kind=st.sampled_from(KINDS))
@settings(max_examples=30, deadline=None)
def test_columns_that_separate_together_are_named_and_no_others(seed: int, scales: list[float], kind: str) -> None:
    """What decides is crp + ward; neither column separates the rows alone."""
    rng = np.random.default_rng(seed)
    x = table(rng, 240)
    x[:, 1] = rng.normal(0, 1, 240)
    y = outcome(rng, x, kind)
    score = x[:, 1] + x[:, 3]
    if kind == "logistic":
        y[-1] = (score > 0.5).astype(float)
    else:
        top = np.quantile(score, 0.7)
        y[-1][score > top] = 0
        x[:, 1] = np.where(score <= top, top - x[:, 3], x[:, 1])  # nothing is below what rows with an event have
        y[-1][np.flatnonzero(score <= top)[:3]] = 1
    with pytest.raises(DataError) as caught:
        fit(x * scales, y, kind)
    said = str(caught.value)
    assert said.startswith("no finite fit: crp and ward together separate the rows"), said
    way = "rises" if kind == "logistic" else "falls"
    assert f"crp {way} and ward {way}" in said


@given(
    seed=st.integers(0, 10**6), scales=SCALES, kind=st.sampled_from(["logistic", "poisson", "cox"]),
    far=st.sampled_from([0.0, 10.0, 1e4]), sums=st.booleans(),
)  # fmt: skip
@example(seed=174735, scales=[1.0] * 4, kind="logistic", far=1e4, sums=False)  # the one event is the far cell's row
@settings(max_examples=60, deadline=None)
def test_data_with_a_fit_raise_no_alarm(seed: int, scales: list[float], kind: str, far: float, sums: bool) -> None:
    """Nearly separated, on any scale, with one far cell: as long as one row contradicts, the libraries' fit is ours."""
    rng = np.random.default_rng(seed)
    x = table(rng, 240)
    y = outcome(rng, x, kind)
    rare = np.flatnonzero(x[:, 2])
    y[-1][rare] = 0.0
    y[-1][rare[:1]] = 1.0  # one event
    if kind == "logistic":
        x[0, 1] += far
    z = (x - x.mean(0)) / x.std(0)
    if kind == "cox":
        with warnings.catch_warnings(record=True) as caught:  # that it has not converged: the one event may be the last
            warnings.simplefilter("always")
            pooled = PHReg(y[0], z, status=y[1], ties="efron").fit(disp=0, method="newton", tol=1e-13).params
        resolved = not caught
    else:
        family = glm_families.Binomial() if kind == "logistic" else glm_families.Poisson()
        model = GLM(y[0], np.column_stack([np.ones(len(z)), z]), family)
        with warnings.catch_warnings(
            action="ignore", category=RuntimeWarning
        ):  # the library's exp may overflow on the way
            pooled, coarse = (model.fit(maxiter=200, tol=tol).params[1:] for tol in (1e-12, 1e-8))
        resolved = np.allclose(pooled, coarse, rtol=1e-3, atol=1e-3)
    if kind == "cox" and not resolved:
        return  # the library has no answer to compare with
    with pytest.MonkeyPatch.context() as patch:
        if sums:
            by_sums_alone(patch)
        if not resolved:  # else rounding hides where the likelihood is largest, and the fit depends on the tolerance
            with pytest.raises(DataError, match="no finite fit: drug separates the rows: its coefficient falls"):
                fit(x * scales, y, kind)
            return
        ours = fit(x * scales, y, kind) * scales
    np.testing.assert_allclose(ours * x.std(0), pooled, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_columns_of_a_null_vector_are_named(kind: str) -> None:
    rng = np.random.default_rng(5)
    x = table(rng, 240)
    y = outcome(rng, x, kind)
    sum_of = x.copy()
    sum_of[:, 3] = 2 * x[:, 0] - x[:, 2] + 7
    twice = x.copy()
    twice[:, 1], twice[:, 3] = -x[:, 0], 1 - x[:, 2]
    for columns, sentence in ((sum_of, "columns age, drug and ward depend on each other. Omit one of these"),
                              (twice, "columns age and crp; so do drug and ward depend on each other")):  # fmt: skip
        with pytest.raises(DataError) as caught:
            fit(columns, y, kind)
        assert str(caught.value).startswith(sentence)


def test_a_column_that_rounds_to_a_spread_is_still_the_same_in_every_row() -> None:
    rng = np.random.default_rng(1)
    x = table(rng, 240)
    x[:, 3] = 0.1
    for kind in KINDS:
        with pytest.raises(DataError, match="ward has the same value in every row. Omit this column"):
            fit(x, outcome(rng, x, kind), kind)


def test_separation_of_masked_sums_is_named() -> None:
    rng = np.random.default_rng(2)
    x = table(rng, 600)
    y = outcome(rng, x, "cox")
    y[1][x[:, 2] == 1] = 0
    sites = [SurvivalSite(*s) for s in zip(*(np.split(part, 3) for part in (x, *y)), strict=True)]
    with pytest.raises(DataError, match="no finite fit: drug separates the rows: its coefficient falls without limit"):
        fit_secure_cox(sites, simulated_agreement(sites, 2.0, 5, "efron"), NAMES)


def test_what_the_sentence_advises_gives_a_fit(tmp_path: Path) -> None:
    """The report of a marker that is 1 only in the dead, and the same regression without it."""
    rng = np.random.default_rng(3)
    lines = ["site,age,marker,died"]
    for k in range(400):
        age, marker = rng.normal(60, 10), rng.random() < 0.1
        died = marker or rng.random() < 1 / (1 + np.exp(-(age - 70) / 10))
        lines.append(f"{'ns'[k % 2]},{age:.1f},{int(marker)},{int(died)}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    text = (
        f'[data]\nsource = "{tmp_path}/t.csv"\ntarget = "died"\nclient_column = "site"\n[partition]\nkind = "natural"\n'
        '[[method]]\nalgorithm = "fedavg"\n'
    )
    (tmp_path / "t.toml").write_text(text)
    said = call("glm", tmp_path / "t.toml", code=2)
    assert "marker separates the rows: its coefficient rises" in said
    assert "choose the penalty 'ridge'" in said
    assert "logistic regression" in call("glm", tmp_path / "t.toml", "--penalty", "ridge")
    (tmp_path / "t.toml").write_text(
        text.replace('client_column = "site"', 'client_column = "site"\ndrop = ["marker"]')
    )
    assert "logistic regression" in call("glm", tmp_path / "t.toml")


@pytest.mark.parametrize("kind", [*KINDS, "linear"])
def test_numbers_that_no_fit_can_use_are_named_with_their_column(kind: str) -> None:
    rng = np.random.default_rng(0)
    x = table(rng, 240)
    y = [rng.normal(size=240)] if kind == "linear" else outcome(rng, x, kind)
    for bad, said in (
        (x * [1e-200, 1, 1, 1], "age spans .*a different unit"),
        (x * [1e200, 1, 1, 1], "age spans .*a different unit"),
        (np.where(np.arange(240)[:, None] == 5, [1, np.nan, 1, 1], x), "crp contains missing or infinite values"),
        (np.where(np.arange(240)[:, None] == 5, [1, 1, 1, np.inf], x), "ward contains missing or infinite values"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(DataError, match=said):
                fit(bad, y, kind)
    with pytest.raises(DataError, match="missing or infinite|not finite|must be 0 or 1"):
        fit(x, [np.where(np.arange(240) == 7, np.nan, y[0]), *y[1:]], kind)


def test_a_target_that_columns_determine_has_errors_of_zero_and_no_nan() -> None:
    two, three = np.arange(240) % 2.0, (np.arange(240) % 3 == 0) * 1.0
    both = (np.arange(240) % 6 == 0) * 1.0
    fitted = fit_glm([GlmSite(np.stack([two, three, both], 1), both)], "linear", ["a", "b", "c"])
    np.testing.assert_allclose(fitted.beta, [0, 0, 0, 1], atol=1e-12)
    assert np.isfinite(fitted.se).all()
    assert (fitted.se < 1e-6).all()


@given(seed=st.integers(0, 10**6), bins=st.integers(5, 100), columns=st.integers(1, 3), kind=st.sampled_from("ab"))
@settings(max_examples=20, deadline=None)
def test_separation_in_bins_is_named_and_blames_no_site(seed: int, bins: int, columns: int, kind: str) -> None:
    """The step of the sums rounds the rows at risk away before the likelihood reaches its limit."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(200, columns))
    time = rng.uniform(1, 2, 200)
    if kind == "a":  # the rows with a mark die first
        x[:, 0] = np.arange(200) < 20
        time[:20] = rng.uniform(0, 0.5, 20)
    else:  # the time follows from the column, and every bin has one event time
        x[:, 0] = rng.permutation(200) * bins // 200
        time = bins - x[:, 0] - 0.5
    order = rng.permutation(200)
    sites = [SurvivalSite(x[some], time[some], np.ones(len(some))) for some in np.split(order, [50, 120])]
    width = 1.0 if kind == "b" else 2 / bins
    with pytest.raises(DataError) as caught:
        fit_secure_cox(sites, simulated_agreement(sites, width, 1, "efron"), NAMES[:columns])
    assert str(caught.value).startswith("no finite fit: age separates the rows: its coefficient rises"), caught.value


@given(
    seed=st.integers(0, 10**6), effect=st.sampled_from([0.0, 0.5, 2.0]), width=st.sampled_from([1.0, 3.0, 30.0, 300.0]),
    bins=st.sampled_from([5, 30, 100]),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_agreed_ranges_that_are_too_wide_change_no_fit_and_blame_no_site(
    seed: int, effect: float, width: float, bins: int
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(300, 2))
    time, event = rng.exponential(np.exp(-effect * x[:, 0])), (rng.random(300) < 0.7).astype(float)
    sites = [SurvivalSite(x[some], time[some], event[some]) for some in np.split(rng.permutation(300), [90, 200])]
    terms = simulated_agreement(sites, float(time.max()) / bins, 1, "efron")
    near = terms._replace(low=terms.low - 1e-9, high=terms.high + 1e-9)
    wide = near._replace(high=near.low + width * (near.high - near.low))
    plain = fit_secure_cox(sites, near, ["age", "crp"])
    try:
        far = fit_secure_cox(sites, wide, ["age", "crp"])
    except DataError as error:
        why = str(error)
    else:
        assert (np.abs(plain.fit.beta - far.fit.beta) <= plain.bound + far.bound).all()
        return
    assert width > 3
    assert "too few digits" in why
