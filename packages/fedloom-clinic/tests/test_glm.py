"""Regressions by sums of sites equal the pooled fit of statsmodels, with one intercept and with one per site."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from statsmodels.api import GLM, OLS, Logit
from statsmodels.api import families as glm_families

import fedloom as fl
from fedloom.errors import ConfigError, DataError
from fedloom_clinic.fits.glm import GLM_FAMILIES, GlmSite, fit_glm
from tests.commands import call

BETA = np.array([0.7, -0.03, 0.5])


def site(rows: int, seed: int, family: str, shift: float) -> GlmSite:
    """Columns far from 0 and of other sizes, and an intercept of the site's own."""
    rng = np.random.default_rng(seed)
    x = np.stack([rng.normal(0, 1, rows), rng.normal(64, 12, rows), rng.integers(0, 2, rows)], 1).astype(float)
    eta = x @ BETA + 0.03 * 64 + shift
    if family == "linear":
        return GlmSite(x, 1000 + 80 * (eta + rng.normal(0, 1, rows)))
    if family == "poisson":
        return GlmSite(x, rng.poisson(np.exp(eta)).astype(float))
    return GlmSite(x, (rng.random(rows) < 1 / (1 + np.exp(-eta))).astype(float))


@pytest.mark.parametrize("by_site", [False, True])
@pytest.mark.parametrize("family", GLM_FAMILIES)
def test_sums_of_sites_give_the_pooled_fit(family: str, by_site: bool) -> None:
    sites = [site(rows, k, family, shift) for k, (rows, shift) in enumerate([(200, 0.0), (90, 1.0), (60, -0.7)])]
    fit = fit_glm(sites, family, ["a", "b", "c"], ["n", "s", "w"] if by_site else None)
    x, y = (np.concatenate(parts) for parts in zip(*sites, strict=True))
    codes = np.repeat(np.arange(3), [len(one.y) for one in sites])
    ones = (codes[:, None] == np.arange(3)).astype(float) if by_site else np.ones((len(y), 1))
    design = np.hstack([ones, x])
    if family == "linear":
        pooled = OLS(y, design).fit()
    elif family == "poisson":
        pooled = GLM(y, design, glm_families.Poisson()).fit(tol=1e-14)
    else:
        pooled = Logit(y, design).fit(disp=0, method="newton", tol=1e-13)
    np.testing.assert_allclose(fit.beta, pooled.params, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(fit.se, pooled.bse, rtol=1e-8)
    assert fit.names == [*(["intercept n", "intercept s", "intercept w"] if by_site else ["intercept"]), "a", "b", "c"]
    np.testing.assert_allclose(fit.p_values, pooled.pvalues, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(np.stack(fit.interval(), 1), pooled.conf_int(), rtol=1e-7, atol=1e-7)
    low, high = fit.interval(0.999)
    if by_site and family != "linear":  # what the targets were drawn from
        assert ((low[3:] < BETA) & (high[3:] > BETA)).all()


def test_a_linear_regression_of_few_rows_has_student_s_intervals_and_tests() -> None:
    """As OLS in statsmodels and lm in R: with 12 rows and 4 coefficients, normal intervals are 15 % too short."""
    sites = [site(5, 1, "linear", 0.0), site(7, 2, "linear", 0.0)]
    x, y = (np.concatenate(parts) for parts in zip(*sites, strict=True))
    pooled = OLS(y, np.column_stack([np.ones(12), x])).fit()
    fit = fit_glm(sites, "linear")
    np.testing.assert_allclose(fit.p_values, pooled.pvalues)
    np.testing.assert_allclose(np.stack(fit.interval(), 1), pooled.conf_int())
    frame = pd.DataFrame(x, columns=list("abc")).assign(y=y, site=np.repeat(["n", "s"], [5, 7]))
    data = fl.Dataset.create(frame, "y", task="regression", client_column="site")
    table = fl.analyze("glm", data).table.to_pandas()
    np.testing.assert_allclose(table.p, pooled.pvalues, rtol=1e-6)
    np.testing.assert_allclose(table[["low", "high"]], pooled.conf_int(), rtol=1e-6)


def test_what_cannot_be_fitted_is_a_sentence() -> None:
    good = site(60, 3, "logistic", 0.0)
    order = good.x[:, 0] > np.median(good.x[:, 0])
    for bad, family, sentence in (
        (good._replace(y=good.y + 1), "logistic", "0 or 1"),
        (good._replace(y=good.y - 1), "poisson", "at least 0"),
        (good._replace(y=good.y * 0), "logistic", "0 in every row"),
        (
            good._replace(x=np.hstack([good.x, np.ones((60, 1))])),
            "logistic",
            "column 3 has the same value in every row",
        ),
        (good._replace(x=np.hstack([good.x, good.x[:, :1]])), "logistic", "depend on each other|not converged"),
        (good._replace(y=order.astype(float)), "logistic", "no finite fit|not converged"),
        (GlmSite(good.x[:4], np.arange(4.0)), "linear", "leave no degrees of freedom"),
    ):
        with pytest.raises(DataError, match=sentence):
            fit_glm([bad], family)
    with pytest.raises(ConfigError, match="regression"):
        fit_glm([good], "gamma")


def test_the_command_names_columns_and_levels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sites = {name: site(rows, k, "logistic", 0.0) for k, (name, rows) in enumerate([("n", 120), ("s", 80)])}
    lines, kept = ["site,dose,age,ward,died"], []
    for name, one in sites.items():
        for x, y in zip(*one, strict=True):
            ward = rng.choice(["GEN", "ICU"])
            lines.append(f"{name},{x[0]:.3f},{x[1]:.0f},{ward},{y:.0f}")
            kept.append([1, round(x[0], 3), round(x[1]), float(ward == "ICU"), y])
    (tmp_path / "t.csv").write_text("\n".join(lines))
    (tmp_path / "t.toml").write_text(
        f'[data]\nsource = "{tmp_path}/t.csv"\ntarget = "died"\nclient_column = "site"\ncategorical = ["ward"]\n'
        '[partition]\nkind = "natural"\n[[method]]\nalgorithm = "fedavg"\n'
    )
    said = call("glm", tmp_path / "t.toml")
    table = np.array(kept)
    pooled = Logit(table[:, 4], table[:, :4]).fit(disp=0)
    for column, beta, se in zip(("intercept", "dose", "age", "ward ICU"), pooled.params, pooled.bse, strict=True):
        line = next(line for line in said.splitlines() if line.strip().startswith(column))
        assert f"{beta:.4g}" in line
        assert f"{se:.4g}" in line
        assert f"{np.exp(beta):.4g}" in line
    assert "logistic regression of '1': 200 rows at 2 sites" in said
    assert "intercept s" in call("glm", tmp_path / "t.toml", "--by-client")


def test_a_target_of_three_classes_is_refused_with_a_fix_that_works(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.normal(60, 9, 90), "grade": rng.choice(["a", "b", "c"], 90)})
    frame.assign(site=rng.choice(["n", "s"], 90), high=(frame.grade == "c") * 1).to_csv(tmp_path / "t.csv", index=False)
    for target, other, code in (("grade", "high", 2), ("high", "grade", 0)):
        (tmp_path / "t.toml").write_text(
            f'[data]\nsource = "{tmp_path}/t.csv"\nclient_column = "site"\ntarget = "{target}"\ndrop = ["{other}"]\n'
        )
        said = call("glm", tmp_path / "t.toml", code=code)
        assert ("set target to a column with two values" in " ".join(said.split())) == (code == 2)
