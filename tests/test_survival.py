"""Time to event and counts: losses, fits and scores are those of lifelines, statsmodels and scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import mean_poisson_deviance
from statsmodels.api import GLM, add_constant
from statsmodels.api import families as glm_families
from statsmodels.duration.hazard_regression import PHReg

import fedloom as fl
from fedloom.data.sources.tabular import Csv
from fedloom.errors import ConfigError, DataError, Refused
from fedloom.tasks import Count, Objective, Survival, make_task
from fedloom.tasks.survival import SurvivalRows, brier, concordance, fit_baseline, observed_expected, partial_loss
from fedloom_clinic.fits.cox import SurvivalSite, fit_cox
from fedloom_clinic.fits.cox_vectors import bin_site, simulated_agreement
from fedloom_clinic.fits.secure_cox import fit_secure_cox, ring_sum
from tests.commands import call

lifelines = pytest.importorskip("lifelines")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Starting with pandas"),
    pytest.mark.filterwarnings("ignore:__array_wrap__"),
]


def tables() -> dict[str, tuple[Any, str, str]]:
    """lifelines' own examples, times and events by name; text as one column per level but the first."""
    import pandas as pd
    from lifelines.datasets import load_gbsg2, load_rossi

    breast = pd.get_dummies(load_gbsg2(), drop_first=True, dtype=float)
    return {"rossi": (load_rossi(), "week", "arrest"), "gbsg2": (breast, "time", "cens")}


@pytest.fixture(scope="module", params=["rossi", "gbsg2"])
def cut(request: pytest.FixtureRequest) -> tuple[Any, str, str]:
    """A table cut into four sites of unequal size that depend on a column."""
    table, time, event = tables()[request.param]
    first = table.drop(columns=[time, event]).columns[1]
    rank = table[first].rank(method="first") / len(table)
    return table.assign(site=np.searchsorted([0.1, 0.3, 0.6], rank)), time, event


def sites_of(table: Any, time: str, event: str) -> list[SurvivalSite]:
    groups = [rows for _, rows in table.groupby("site")]
    columns = table.drop(columns=[time, event, "site"]).columns
    return [SurvivalSite(*(rows[of].to_numpy(float) for of in (columns, time, event))) for rows in groups]


@pytest.mark.parametrize("strata", [False, True])
def test_cox_over_sites_is_the_pooled_fit_of_lifelines_and_statsmodels(cut: Any, strata: bool) -> None:
    table, time, event = cut
    sites = sites_of(table, time, event)
    fit = fit_cox(sites, "efron", stratify=strata)
    whole = lifelines.CoxPHFitter().fit(
        table if strata else table.drop(columns="site"), time, event, strata=["site"] if strata else None,
        fit_options={"precision": 1e-14},
    )  # fmt: skip
    np.testing.assert_allclose(fit.beta, whole.params_, atol=1e-8)
    np.testing.assert_allclose(fit.se, whole.standard_errors_, atol=1e-8)
    assert fit.likelihood == pytest.approx(whole.log_likelihood_, abs=1e-6)
    x, times, events = (np.concatenate(parts) for parts in zip(*sites, strict=True))
    codes = np.repeat(np.arange(len(sites)), [len(site.x) for site in sites])
    pooled = PHReg(times, x, status=events, ties="breslow", strata=codes if strata else None)
    fit, pooled = fit_cox(sites, "breslow", stratify=strata), pooled.fit(disp=0, method="newton", tol=1e-13)
    np.testing.assert_allclose(fit.beta, pooled.params, atol=1e-8)
    np.testing.assert_allclose(fit.se, pooled.bse, atol=1e-8)


def patients(seed: int, rows: int, ties: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 2))
    time, end = rng.exponential(np.exp(-x @ [0.8, -0.5])) * 10, rng.exponential(15, rows)
    observed = np.minimum(time, end)
    return x, np.ceil(observed) if ties else observed + 1e-3, (time <= end).astype(float)


def target(time: np.ndarray, event: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack([time, event], 1))


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(2, 60), ties=st.booleans())
def test_the_loss_is_the_partial_likelihood(seed: int, rows: int, ties: bool) -> None:
    x, time, event = patients(seed, rows, ties)
    z, y = torch.from_numpy(x[:, :1]).requires_grad_(), target(time, event)
    loss = partial_loss(z, y)
    if not event.any():
        assert loss == 0
        return
    model = PHReg(time, x[:, :1], status=event, ties="efron")
    assert float(loss.detach()) * rows == pytest.approx(-model.loglike(np.ones(1)), rel=1e-9, abs=1e-9)
    (slope,) = torch.autograd.grad(loss, z)
    assert float((slope * z).sum().detach()) * rows == pytest.approx(-model.score(np.ones(1))[0], abs=1e-8)
    torch.testing.assert_close(Survival().dloss(z.detach(), y), slope * rows, rtol=1e-9, atol=1e-11)
    assert float(slope.sum()) == pytest.approx(0, abs=1e-12)  # a constant changes no likelihood
    far = partial_loss(z.float() * 300, y.float())
    assert bool(far.isfinite())
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(partial_loss(z[order], y[order]), loss)


def federation(sizes: tuple[int, ...] = (80, 50, 120)) -> tuple[Any, list[tuple[np.ndarray, ...]]]:
    clients = [patients(seed, rows) for seed, rows in enumerate(sizes)]
    pairs = {
        f"s{k}": {part: (x, np.stack([time, event], 1)) for part in ("train", "test")}
        for k, (x, time, event) in enumerate(clients)
    }
    return fl.Federation.create(pairs, task="survival", validation=0.0), clients


def test_fedavg_with_full_batches_reaches_the_stratified_cox_fit() -> None:
    fed, clients = federation()
    result = fl.simulate(
        "fedavg", fed, rounds=120, model="softmax", evaluate={"every": 120},
        local=fl.LocalSGD(lr=2.0, batch_size="full", epochs=1),
        aggregation_weights="samples", engine={"dtype": "float64"},
    )  # fmt: skip
    row = result.models.model("global").row[:2].numpy()
    fit = fit_cox([SurvivalSite(*site) for site in clients], "efron", stratify=True)
    np.testing.assert_allclose(row, fit.beta, atol=1e-6)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(3, 60), digits=st.integers(0, 3))
def test_ranks_brier_and_calibration_are_those_of_lifelines(seed: int, rows: int, digits: int) -> None:
    x, time, event = patients(seed, rows)
    score = x[:, 0].round(digits)
    if event.any() and any((time > t).any() for t in time[event == 1]):
        assert concordance(SurvivalRows(score, time, event)) == pytest.approx(
            lifelines.utils.concordance_index(time, -score, event)
        )
    risk, horizon = SurvivalRows(1 / (1 + np.exp(-x[:, 0])), time, event), float(np.median(time))
    wanted = figures_by_lifelines(risk, horizon)
    if (time > horizon).any():
        assert brier(risk, horizon) == pytest.approx(wanted["brier"])
    assert observed_expected(risk, horizon) == pytest.approx((wanted["calibration_error"], wanted["observed_expected"]))


def figures_by_lifelines(risk: SurvivalRows, horizon: float) -> dict[str, float]:
    """The figures of risks of an event by a horizon, from lifelines' curves; Brier's where some are observed longer."""
    z, time, event = risk
    free, alive = (lifelines.KaplanMeierFitter().fit(time, happened) for happened in (1 - event, event))
    terms = [
        (1 - r) ** 2 / free.predict(t - 0.5)
        if t <= horizon and e
        else r**2 / free.predict(horizon)
        if t > horizon
        else 0
        for r, t, e in zip(*risk, strict=True)
    ]
    groups = np.array_split(np.argsort(z, kind="stable"), max(1, min(5, len(z) // 10)))
    gaps = [
        len(g) * abs(1 - lifelines.KaplanMeierFitter().fit(time[g], event[g]).predict(horizon) - z[g].mean())
        for g in groups
    ]
    return {
        "brier": float(np.mean(terms)),
        "observed_expected": float((1 - alive.predict(horizon)) / z.mean()),
        "calibration_error": float(sum(gaps) / len(z)),
    }


def test_the_baseline_is_breslows() -> None:
    table, time, event = tables()["rossi"]
    fit = lifelines.CoxPHFitter(baseline_estimation_method="breslow").fit(table, time, event)
    z = torch.tensor(fit.predict_log_partial_hazard(table).to_numpy())[:, None]
    y = target(table[time].to_numpy(float), table[event].to_numpy(float))
    owner = torch.zeros(len(z), dtype=torch.long)
    slope, intercept = fit_baseline(z, y, owner, 1, 40.0)[0].tolist()
    hazard = fit.baseline_cumulative_hazard_.loc[:40.0].iloc[-1, 0]
    assert (slope, intercept) == (1.0, pytest.approx(np.log(hazard), rel=1e-9))
    silent = y * torch.tensor([1.0, 0.0])
    assert float(fit_baseline(z, silent, owner, 1, 40.0)[0, 1]) == pytest.approx(np.log(0.5 / z.exp().sum()))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five methods on Rossi's table at three sites."""
    folder = tmp_path_factory.mktemp("rossi")
    table = tables()["rossi"][0]
    table.assign(site=np.array(["north", "south", "west"])[np.arange(len(table)) % 3]).to_csv(
        folder / "rossi.csv", index=False
    )
    methods = "".join(f'[[method]]\nalgorithm = "{m}"\n' for m in ("local", "fedavg", "fedavg-ft", "ditto", "flame"))
    (folder / "rossi.toml").write_text(
        f'rounds = 2\n[data]\nsource = "{folder}/rossi.csv"\ntarget = "week"\nevent = "arrest"\n'
        'client_column = "site"\n'
        '[partition]\nkind = "natural"\nvalidation = 0.2\n[model]\nkind = "mlp"\nhidden = [4]\n'
        '[[analysis]]\nkind = "cox"\nstratify = true\n'
        f'[local]\nlr = 0.2\nbatch_size = "full"\nepochs = 3\n[task]\nhorizon = 40\n{methods}'
    )
    call("run", folder / "rossi.toml", "--out", folder / "run")
    return folder


def test_every_method_trains_scores_and_predicts_alike(run: Path) -> None:
    import pandas as pd

    opened = fl.open_run(run / "run")
    table = pd.read_csv(run / "rossi.csv")
    data = fl.Dataset.create(table, "week", event="arrest", client_column="site")
    for method in ("local", "fedavg", "fedavg-ft", "ditto", "flame"):
        models = opened[method, 0].models
        kind = "global" if method == "fedavg" else "personal"
        model = models.model(kind, "south")
        south = table[table.site == "south"]
        risk = model.predict(south)
        assert ((risk > 0) & (risk < 1)).all()
        parts = SurvivalRows(risk, south.week.to_numpy(float), south.arrest.to_numpy(float))
        scores = model.score(fl.Dataset.create(south.drop(columns="site"), "week", event="arrest"))
        assert scores["c_index"] == pytest.approx(concordance(parts), abs=1e-6)
        assert scores["brier"] == pytest.approx(brier(parts, 40.0), abs=1e-6)
    assert data.task == "survival"
    assert "probabilities of the event by time 40" in call(
        "predict", run / "run", run / "rossi.csv", "--method", "ditto", "--seed", "0", "--out", run / "p.csv"
    )
    assert "114 events" in call("cox", run / "rossi.toml")
    with pytest.raises(ConfigError, match="a survival task has no class probabilities. Use"):
        model.predict_proba(table)


def test_every_site_has_the_figures_of_lifelines(run: Path) -> None:
    """What the run recorded of each site's test part, from the risks that its models predict."""
    import pandas as pd

    opened, table = fl.open_run(run / "run"), pd.read_csv(run / "rossi.csv")
    fed = fl.partitions.natural(validation=0.2)(opened.read(run / "rossi.csv"), seed=0)
    for recorded in opened:
        for kind in recorded.models.kinds():
            risks = opened.predict(run / "rossi.csv", recorded.method, kind=kind).scores[:, 0]
            for client, site in enumerate(recorded.models.names):
                rows = fed.indices("test", client).numpy()
                part = table.iloc[rows]
                assert set(part.site) == {site}
                risk = SurvivalRows(risks[rows], part.week.to_numpy(float), part.arrest.to_numpy(float))
                wanted = figures_by_lifelines(risk, 40.0)
                wanted["c_index"] = lifelines.utils.concordance_index(risk.time, -risk.z, risk.event)
                for name, value in wanted.items():
                    figure = float(recorded.final(kind, name)[client])
                    assert figure == pytest.approx(value, rel=1e-4, abs=1e-6), (recorded.method, kind, site, name)


def test_a_run_has_the_cox_regression_over_all_rows_of_its_clients(run: Path) -> None:
    import pandas as pd

    table = pd.read_csv(run / "rossi.csv")
    names = [name for name in table.columns if name not in ("week", "arrest", "site")]
    fit = fit_cox(sites_of(table, "week", "arrest"), stratify=True, names=names)
    found = pd.read_csv(run / "run" / "report" / "cox.csv").set_index("column").loc[names]
    np.testing.assert_allclose(found["coefficient"], fit.beta, atol=1e-7)
    np.testing.assert_allclose(found["standard_error"], fit.se, rtol=1e-6)
    assert "Cox regression</h3><p>432 rows of all sites with 114 events" in (run / "run" / "report.html").read_text()


def test_adapting_gives_the_new_client_a_baseline(run: Path) -> None:
    models = fl.open_run(run / "run")["ditto", 0].models
    table = tables()["gbsg2"][0]
    new = tables()["rossi"][0].iloc[:90]
    made = models.adapt(fl.Dataset.create(new, "week", event="arrest"), holdout=0.3)
    assert made.calibration is not None
    assert np.isfinite(made.about["scores"]["adapted"]["brier"])
    with pytest.raises(DataError, match="lacks"):
        models.adapt(fl.Dataset.create(table, "time", event="cens"))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"task": "survival"}, "needs `event`"),
        ({"event": "arrest", "task": "binary"}, "Omit one of the two"),
        ({"event": "week"}, "'week' is both target and event"),
        ({"event": "gone"}, "no column 'gone'"),
        ({"event": "prio"}, "events must be 1, or 0"),
        ({"event": "arrest", "centre": 3.0}, "Omit `centre` and `unit`"),
    ],
)
def test_what_is_no_time_to_event_is_a_sentence(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, DataError), match=sentence):
        fl.Dataset.create(tables()["rossi"][0], "week", **keys)


def test_a_table_without_an_event_is_read_with_a_note_and_refused_for_training() -> None:
    table = tables()["rossi"][0].assign(none=0)
    data = fl.Dataset.create(table.drop(columns="arrest"), "week", event="none")
    assert [note for note in data.notes if "0 in every row" in note]
    with pytest.raises(Refused) as caught:
        fl.simulate("fedavg", fl.partitions.iid(clients=3)(data, seed=0), rounds=2)
    assert caught.value.rule == "nothing-to-learn"


def test_times_and_horizons_are_checked() -> None:
    table = tables()["rossi"][0]
    table.loc[3, "week"] = 0  # as of a patient who dies on the day of admission
    assert fl.Dataset.create(table, "week", event="arrest").y[3, 0] == 0
    table.loc[3, "week"] = -1
    with pytest.raises(DataError, match=r"column 'week': times must be at least 0, got -1 \(1 such"):
        fl.Dataset.create(table, "week", event="arrest")
    with pytest.raises(ValueError, match="a model predicts a single column, got week, arrest"):
        Csv(path="rossi.csv", target=["week", "arrest"])
    with pytest.raises(ConfigError, match="task.horizon works only for survival tasks"):
        make_task(fl.load("digits"), Objective(horizon=3.0))
    with pytest.raises(DataError, match="every count must be a single nonnegative integer"):
        fl.Dataset.create(np.zeros((3, 2)), np.array([0.5, 1, 2]), task="count")


def test_poisson_over_sites_is_the_pooled_fit() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 2))
    y = rng.poisson(np.exp(0.4 + x @ [0.5, -0.3])).astype(float)
    pairs = {f"s{k}": dict.fromkeys(("train", "test"), (x[k::3], y[k::3])) for k in range(3)}
    result = fl.simulate(
        "fedavg", fl.Federation.create(pairs, task="count", validation=0.0), rounds=80,
        model="softmax", evaluate={"every": 80},
        local=fl.LocalSGD(lr=0.5, batch_size="full", epochs=1), engine={"dtype": "float64"},
    )  # fmt: skip
    fit = GLM(y, add_constant(x), glm_families.Poisson()).fit()
    np.testing.assert_allclose(result.models.model("global").row.numpy(), [*fit.params[1:], fit.params[0]], atol=1e-6)
    z = torch.from_numpy(x[:, :1])
    scores = Count().metrics(z, torch.from_numpy(y)[:, None], torch.zeros(240, dtype=torch.long), 1)
    assert float(scores["deviance"]) == pytest.approx(mean_poisson_deviance(y, np.exp(x[:, 0])))
    assert Survival().outputs == Count().outputs == 1


def test_secure_sums_give_the_pooled_fit_of_binned_rows_within_their_bound(cut: Any) -> None:
    table, time, event = cut
    sites = sites_of(table, time, event)
    names = list(table.drop(columns=[time, event, "site"]).columns)
    rng = np.random.default_rng(0)

    def masked(vectors: Sequence[np.ndarray]) -> np.ndarray:
        """Pairwise masks: what a single site sends is uniform, and they cancel in the sum."""
        sent = [vector.copy() for vector in vectors]
        for i in range(len(sent)):
            for j in range(i):
                mask = rng.integers(0, 2**64, len(sent[i]), dtype=np.uint64)
                sent[i], sent[j] = sent[i] + mask, sent[j] - mask
        assert all((a != b).all() for a, b in zip(sent, vectors, strict=True))
        return ring_sum(sent)

    for ties, least, step in (("efron", 2, 2.0**-40), ("breslow", 1, 2.0**-24)):
        terms = simulated_agreement(sites, float(table[time].max()) / 13, least, ties)._replace(step=step)
        secure = fit_secure_cox(sites, terms, names, masked)
        rows = [bin_site(site, terms)[0] for site in sites]
        pooled = fit_cox([SurvivalSite(*map(np.concatenate, zip(*rows, strict=True)))], ties)
        gap = np.abs(secure.fit.beta - pooled.beta)
        assert (gap <= secure.bound).all()
        assert (secure.bound < 0.05 * pooled.se).all()
        np.testing.assert_allclose(secure.fit.se, pooled.se, rtol=1e-4)
        lost = secure.losses
        assert lost.events - lost.rare - lost.uncovered == pooled.events == secure.fit.events
        for row, site in zip(rows, sites, strict=True):
            counts = np.unique(row.time[row.event == 1], return_counts=True)[1]
            assert (counts >= least).all()
            assert not len(row.time) or (row.time == row.time.max()).sum() >= least
            assert len(row.time) in (0, len(site.time))


def test_finer_bins_lose_less_and_at_exact_times_nothing() -> None:
    sites = [SurvivalSite(*patients(seed, rows)) for seed, rows in enumerate((120, 60))]
    exact = fit_cox(sites)
    gaps = [
        np.abs(fit_secure_cox(sites, simulated_agreement(sites, width, 1, "efron")).fit.beta - exact.beta).max()
        for width in (15.0, 5.0, 1.0)
    ]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-8  # times are whole numbers


def test_what_cannot_be_summed_is_a_sentence(run: Path) -> None:
    sites = [SurvivalSite(*patients(seed, 40)) for seed in range(2)]
    terms = simulated_agreement(sites, 5.0, 1, "efron")
    for bad, sentence in (
        (terms._replace(high=terms.high - 1), "site 0: column 0 has 1?[0-9] values outside the agreed"),
        (terms._replace(least=40), "no bin of a site has 40 events"),
        (terms._replace(step=2.0**-62), "Use a larger step"),
    ):
        with pytest.raises(DataError, match=sentence):
            fit_secure_cox(sites, bad)
    with pytest.raises(ConfigError, match="must be in increasing order"):
        fit_secure_cox(sites, terms._replace(ends=terms.ends[::-1]))
    with pytest.raises(ConfigError, match="a bin width of 1e-09 gives more than 10000 bins for times up to 24"):
        simulated_agreement(sites, 1e-9, 1, "efron")
    said = call("cox", run / "rossi.toml", "--bins", "8", "--min-events", "3")
    assert "of 114 events are censored" in said
    assert "with exact times" in said
    assert "Omit one of the two options" in call("cox", run / "rossi.toml", "--bins", "8", "--stratify", code=2)
