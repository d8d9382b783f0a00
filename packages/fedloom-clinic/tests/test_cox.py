"""Cox regression by sums of sites equals the pooled and the stratified fit of statsmodels, with ties and without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.duration.hazard_regression import PHReg

import fedloom as fl
from fedloom.errors import ConfigError, DataError
from fedloom_clinic.fits.cox import TIES_METHODS, SurvivalSite, fit_cox, risk_sums
from fedloom_clinic.fits.cox_vectors import CoxAgreement, SiteVectors
from tests.commands import call

BETA = np.array([0.7, -0.04, 0.9])


def test_few_events_are_a_sentence_without_bins() -> None:
    frame = pd.DataFrame({"age": [1.0, 2, 4, 3] * 2, "t": np.arange(1.0, 9), "e": [1, 0, 1, 1] * 2, "s": [*"aabb"] * 2})
    data = fl.Dataset.create(frame, "t", event="e", client_column="s", task="survival")
    with pytest.raises(DataError, match="no site has 5 events. Agree on a smaller min_events"):
        fl.analyze("cox", data, stratify=True)
    assert len(fl.analyze("cox", data, stratify=True, min_events=1).table) == 1


def patients(rows: int, seed: int, tied: bool, shift: float = 0.0) -> SurvivalSite:
    """Exponential times with a hazard of the site's own, columns far from 0 and of other sizes, a third censored."""
    rng = np.random.default_rng(seed)
    x = np.stack([rng.normal(0, 1, rows), rng.normal(64, 12, rows), rng.integers(0, 2, rows)], 1).astype(float)
    hazard = 0.02 * np.exp(x @ BETA + 0.04 * 64 + shift)
    time, censored = rng.exponential(1 / hazard), rng.exponential(60, rows)
    event = (time <= censored).astype(float)
    time = np.minimum(time, censored)
    return SurvivalSite(x, np.ceil(time / 5) * 5 if tied else time + 1e-9, event)


def pooled(sites: list[SurvivalSite], ties: str, strata: bool) -> tuple[np.ndarray, np.ndarray, float]:
    x, time, event = (np.concatenate(parts) for parts in zip(*sites, strict=True))
    codes = np.repeat(np.arange(len(sites)), [len(site.x) for site in sites])
    fit = PHReg(time, x, status=event, ties=ties, strata=codes if strata else None).fit(
        disp=0, method="newton", tol=1e-13
    )
    return fit.params, fit.bse, fit.llf


@pytest.mark.parametrize("strata", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ties", TIES_METHODS)
def test_sums_of_sites_give_the_pooled_fit(ties: str, tied: bool, strata: bool) -> None:
    sites = [patients(rows, seed, tied, shift) for seed, (rows, shift) in enumerate([(300, 0), (120, 1.5), (60, -1)])]
    found = fit_cox(sites, ties, stratify=strata)
    beta, se, value = pooled(sites, ties, strata)
    np.testing.assert_allclose(found.beta, beta, atol=1e-8)
    np.testing.assert_allclose(found.se, se, atol=1e-8)
    assert found.likelihood == pytest.approx(value, abs=1e-6)
    assert found.events == sum(site.event.sum() for site in sites)
    if strata and not tied:  # the model that the times were drawn from
        low, high = found.interval(0.999)
        assert ((low < BETA) & (high > BETA)).all()


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(1, 199), max_size=4),
    ties=st.sampled_from(TIES_METHODS),
)
def test_it_does_not_matter_how_rows_are_cut_into_sites(seed: int, cuts: list[int], ties: str) -> None:
    whole = patients(200, seed, tied=True)
    order = np.random.default_rng(seed).permutation(200)
    pieces = [p for p in np.split(order, sorted(cuts)) if len(p)]
    sites = [SurvivalSite(*(part[piece] for part in whole)) for piece in pieces]
    one, many = fit_cox([whole], ties), fit_cox(sites, ties)
    np.testing.assert_allclose(many.beta, one.beta, atol=1e-9)
    np.testing.assert_allclose(many.se, one.se, atol=1e-9)


def test_coefficients_are_per_unit_of_the_column() -> None:
    sites = [patients(200, 5, tied=False), patients(100, 6, tied=False)]
    factor = np.array([18.0, 1.0, 0.5])
    other = [site._replace(x=site.x * factor + 7) for site in sites]
    np.testing.assert_allclose(fit_cox(other).beta * factor, fit_cox(sites).beta, rtol=1e-8)


def test_a_site_without_events_still_counts_at_risk() -> None:
    sites = [patients(200, 1, tied=True), patients(80, 2, tied=True)]
    sites[1] = sites[1]._replace(event=np.zeros(80))
    beta, _, _ = pooled(sites, "efron", False)
    np.testing.assert_allclose(fit_cox(sites).beta, beta, atol=1e-8)
    assert not np.allclose(fit_cox(sites[:1]).beta, beta, atol=1e-3)
    assert risk_sums(sites[1], beta, np.array([5.0, 10.0])).deaths.sum() == 0


def test_what_cannot_be_fitted_is_a_sentence() -> None:
    site = patients(60, 3, tied=False)
    constant = np.concatenate([site.x, np.ones((60, 1))], 1)
    twice = np.concatenate([site.x, site.x[:, :1]], 1)
    perfect = site._replace(
        x=(site.time[:, None] < np.median(site.time)).astype(float), event=(site.time < np.median(site.time)) * 1.0
    )
    for bad, sentence in (
        (site._replace(time=-site.time), "times are negative"),
        (site._replace(event=site.event + 1), "events must be 0 or 1"),
        (site._replace(event=site.event * 0), "no row contains an event, so nothing"),
        (site._replace(x=constant), "column 3 has the same value in every row"),
        (site._replace(x=twice), "depend on each other|not converged"),
        (perfect, "no finite fit"),
    ):
        with pytest.raises(DataError, match=sentence):
            fit_cox([bad])
    with pytest.raises(ConfigError, match="treatment of ties"):
        fit_cox([site], "exact")


def test_the_command_fits_a_table_of_sites(tmp_path: Path) -> None:
    """Levels of text are columns, rows with a gap are left out, and the figures are those of the pooled fit."""
    rng = np.random.default_rng(0)
    sites = {name: patients(rows, seed, tied=True) for seed, (name, rows) in enumerate([("a", 150), ("b", 90)])}
    lines, kept = ["pid,site,dose,age,ward,days,died"], {name: [] for name in sites}  # type: ignore[var-annotated]
    for name, site in sites.items():
        for k, (x, days, died) in enumerate(zip(*site, strict=True)):
            ward, gap = rng.choice(["GEN", "ICU"]), k % 17 == 0
            lines.append(
                f"{name}{k},{name},{'NA' if gap else round(x[0], 3)},{round(x[1])},{ward},{days:.0f},{died:.0f}"
            )
            if not gap:
                kept[name].append([round(x[0], 3), round(x[1]), float(ward == "ICU"), days, died])
    (tmp_path / "t.csv").write_text("\n".join(lines))
    (tmp_path / "t.toml").write_text(
        f'[data]\nsource = "{tmp_path}/t.csv"\ntarget = "died"\nclient_column = "site"\ncategorical = ["ward"]\n'
        'drop = ["pid", "days"]\n[partition]\nkind = "natural"\n[[method]]\nalgorithm = "fedavg"\n'
    )
    tables = [np.array(rows) for rows in kept.values()]
    whole = [SurvivalSite(rows[:, :3], rows[:, 3], rows[:, 4]) for rows in tables]
    for words, strata in (((), False), (("--stratify",), True)):
        said = call("cox", tmp_path / "t.toml", "--time", "days", "--event", "died", *words)
        beta, se, _ = pooled(whole, "efron", strata)
        assert "15 of 240 rows have a missing cell and are omitted" in said
        for column, b, s in zip(("dose", "age", "ward ICU"), beta, se, strict=True):
            line = next(line for line in said.splitlines() if line.strip().startswith(column))
            assert f"{b:.4f}"[:5] in line, (column, line)
            assert f"{s:.4f}"[:5] in line, (column, line)
    assert "no column 'hours'" in call("cox", tmp_path / "t.toml", "--time", "hours", "--event", "died", code=2)


def test_sums_that_overflow_are_no_vector() -> None:
    """Coefficients at which all weights are zero, and the likelihood is no number."""
    terms = CoxAgreement(np.zeros(0), np.array([-1.0, -1.0]), np.array([1.0, 1.0]), least=1, stratify=True)
    x = np.array([[0.5, 0.5], [-0.5, 0.2], [0.1, -0.9]])
    vectors = SiteVectors(SurvivalSite(x, np.array([1.0, 7.0, 9.0]), np.array([1.0, 1.0, 0.0])), terms)
    assert vectors.largest_share(np.zeros(2)) <= 0.5
    assert len(vectors.encode(np.array([1.0, -2.0]))) == terms.length
    for beta in ([1.7e308, 1.7e308], [1.7e308, -1.7e308]):
        assert not vectors.largest_share(np.array(beta)) <= 0.5
        with pytest.raises(DataError, match="not finite"):
            vectors.encode(np.array(beta))
