"""Analyses by sums at real sites, plain and masked: equal to a simulation by the same rules, and to pooled rows."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lifelines import CoxPHFitter, KaplanMeierFitter
from lifelines.statistics import multivariate_logrank_test
from scipy import stats
from sklearn.linear_model import Ridge
from statsmodels.genmod import families
from statsmodels.genmod.generalized_linear_model import GLM

import fedloom as fl
from fedloom.analyses import AnalysisTerms, ClientRows, Question, Rules, Schema
from fedloom.analyses.registry import ANALYSES
from fedloom.analyses.rows import client_rows
from fedloom.analyses.run import answer_question, run_questions, sum_answers
from fedloom.data.groups import keep_group_columns
from fedloom.data.tables import TableColumn
from fedloom.errors import CodeError, ConfigError, Refused, Stop
from fedloom.rundir import analysis_file
from fedloom_clinic.columns import flag_columns
from fedloom_clinic.fits.cox import SurvivalSite, fit_cox
from fedloom_clinic.fits.glm import GlmSite, fit_glm
from fedloom_clinic.fits.penalty import RIDGE_STRENGTHS
from fedloom_clinic.table_one import TableOne
from fedloom_sites.deploy.analyses import (
    AgreedAnalysis,
    agreed_analyses,
    check_analyses,
    make_sample_schema,
)
from fedloom_sites.deploy.audit import Audit
from fedloom_sites.deploy.ops.status import read_status
from fedloom_sites.deploy.protocol.envelope import Envelope, common_head, digest_arrays
from fedloom_sites.deploy.protocol.public import PublicReason
from fedloom_sites.deploy.row_sets import isolates_subjects, judge_row_sets
from fedloom_sites.deploy.secure.counters import ANSWERED_COUNTS, SILENT_COUNTS
from fedloom_sites.deploy.secure.terms import AnalysisStep, SessionTerms
from fedloom_sites.deploy.settings import SecureSettings
from fedloom_sites.deploy.site.analyses import SiteAnswer
from fedloom_sites.deploy.site.client import Client
from fedloom_sites.deploy.site.local_data import part_sizes
from tests.deploy.grid import FakeGrid
from tests.deploy.scene import Scene, scene

pytestmark = [
    pytest.mark.filterwarnings("ignore:Starting with pandas"),
    pytest.mark.filterwarnings("ignore:__array_wrap__"),
]
SITES, ROWS = 5, 400
RANGES = {"age": (0.0, 120.0), "glucose": (0.0, 40.0)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def patients(seed: int = 0) -> pd.DataFrame:
    """Rows of five sites with targets of every task."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({
        "site": np.arange(ROWS) % SITES, "age": rng.normal(60, 9, ROWS).round(1), "glucose": rng.normal(6, 1, ROWS),
        "ward": rng.choice(["GEN", "ICU", "PED"], ROWS, p=[0.6, 0.3, 0.1]),
    })  # fmt: skip
    eta = 0.04 * (table.age - 60) - 0.3 * (table.glucose - 6) + 0.7 * (table.ward == "ICU")
    time, end = rng.exponential(100 * np.exp(-eta)), rng.uniform(20, 200, ROWS)
    table["days"], table["died"] = np.minimum(time, end).round() + 1, (time <= end) * 1
    table["stay"] = 10 + 5 * eta + rng.normal(0, 1, ROWS)
    table["visits"] = rng.poisson(np.exp(0.5 + eta))
    table["ill"] = np.where(rng.random(ROWS) < 1 / (1 + np.exp(-eta)), "yes", "no")
    return table


TARGETS: Mapping[str, dict[str, Any]] = {
    "survival": {"target": "days", "event": "died", "target_range": [0.0, 400.0]},
    "regression": {"target": "stay", "target_range": [-50.0, 80.0]},
    "count": {"target": "visits", "target_range": [0.0, 100.0]},
    "binary": {"target": "ill", "classes": ["no", "yes"]},
}


def deployed(
    folder: Path, task: str, analysis: dict[str, Any], *, masked: bool, table: pd.DataFrame | None = None,
    verify: bool = False, **changes: Any,
) -> Scene:  # fmt: skip
    """Five sites, and a round of training before the analysis."""
    folder.mkdir(exist_ok=True)
    (patients() if table is None else table).to_csv(folder / "all.csv", index=False)
    columns = [{"name": name, "range": list(limits)} for name, limits in RANGES.items()]
    columns.append({"name": "ward", "type": "level", "levels": ["GEN", "ICU", "PED"]})
    agreement = {"task": task, "column": columns, **TARGETS[task]}
    here = scene(
        folder, "fedavg", rounds=1, partition={"kind": "natural"}, evaluate={"every": 1}, analysis=[analysis],
        data={"source": "csv", "path": str(folder / "all.csv"), "client_column": "site", "agreement": agreement},
        local={"lr": 0.001, "batch_size": "full"}, **changes,
    )  # fmt: skip
    if not masked:
        return here
    agreed = SecureSettings(threshold=4, keys=tuple(m.signing_key for m in here.server.sites), verify=verify)
    return here._replace(
        server=here.server.with_(secure=agreed, quorum=4), sites=[s.with_(secure=agreed) for s in here.sites]
    )


def agreed_of(here: Scene) -> AgreedAnalysis:
    """The analysis as the sites have agreed on it."""
    server = here.server
    return next(iter(agreed_analyses(here.experiment, server.samples, server.clients, server.survivors, 0).values()))


def simulated(here: Scene) -> pa.Table:
    """The same analysis in process, by the rules of the sites, on the rows of the sites."""
    agreed = agreed_of(here)
    fed = federation(here)
    rows = [client_rows(fed, k) for k in range(fed.n)]
    missing = 0 if here.server.survivors is None else fed.n - here.server.survivors
    rules = agreed.rules.with_(missing=missing)
    terms = AnalysisTerms(agreed.schema, torch.tensor([len(r) for r in rows]), rules)
    terms = replace(terms, published=tuple(agreed.analysis.publish(r, terms) for r in rows))

    def ask(question: Any, bounds: Any) -> Any:
        return sum_answers([answer_question(agreed.analysis, question, r, terms, bounds, "a site") for r in rows])

    state, _ = run_questions(agreed.analysis, terms, ask)
    return agreed.analysis.result(state)


def federation(here: Scene) -> Any:
    """The rows of all sites."""
    return here.experiment.partition(keep_group_columns(here.experiment.source, here.experiment.kept_columns).load(), 0)


def results(here: Scene) -> pa.Table:
    return pq.read_table(here.server.results / analysis_file(agreed_of(here).name))


def served(here: Scene, grid: FakeGrid | None = None) -> pd.DataFrame:
    """The result of the sites, which is that of the simulation."""
    assert here.serve(grid) is Stop.DONE, here.audit()
    assert not here.audit("no result")
    found, wanted = results(here), simulated(here)
    assert found.schema == wanted.schema
    for name in wanted.column_names:
        got, want = found[name].to_pylist(), wanted[name].to_pylist()
        if pa.types.is_floating(wanted[name].type):
            atol = 0.1 if name == "p_clients" else 1e-8  # the statistic has a coarse step, see `HOMOGENEITY_STEP`
            both = (np.array(values, float) for values in (got, want))
            np.testing.assert_allclose(*both, rtol=1e-6, atol=atol, err_msg=name)
        else:
            assert got == want, name
    for site in here.sites:
        stem = analysis_file(agreed_of(here).name).removesuffix(".parquet")
        kept = json.loads(next(site.state.rglob(f"{stem}.json")).read_text())
        assert kept["columns"] == found.to_pydict()
    return found.to_pandas()


masks = pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])


def design(table: pd.DataFrame) -> np.ndarray:
    wards = np.stack([table.ward == "ICU", table.ward == "PED"], 1) * 1.0
    return np.column_stack([np.ones(len(table)), table.age.astype(np.float32), table.glucose.astype(np.float32), wards])


@masks
@pytest.mark.parametrize("task", ["regression", "count", "binary"])
def test_glm_is_the_pooled_fit(tmp_path: Path, task: str, masked: bool) -> None:
    found, table = (
        served(deployed(tmp_path, task, {"kind": "glm", "rules": {"min_subjects": 2}}, masked=masked)),
        patients(),
    )
    family = {"regression": families.Gaussian(), "count": families.Poisson(), "binary": families.Binomial()}[task]
    y = {"regression": table.stay.astype(np.float32), "count": table.visits, "binary": table.ill == "yes"}[task]
    pooled = GLM(np.asarray(y, float), design(table), family).fit(tol=1e-14)
    order = ["intercept", "age", "glucose", "ward ICU", "ward PED"]
    got = found.set_index("column")
    assert sorted(got.index) == sorted(order), got.index
    np.testing.assert_allclose(got.coefficient[order], pooled.params, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.standard_error[order], pooled.bse, rtol=1e-4)


FIRTH, RIDGE = {"penalty": "firth"}, {"penalty": "ridge", "strength": "cv"}


@pytest.mark.parametrize(
    ("kind", "task", "choice", "masked"),
    [
        *((kind, task, choice, False) for kind, task in (("glm", "binary"), ("glm", "count"), ("cox", "survival"))
          for choice in (FIRTH, RIDGE)),
        ("glm", "binary", RIDGE, True), ("cox", "survival", FIRTH, True),  # masks do not know the penalty
    ],
)  # fmt: skip
def test_a_penalty_at_sites_is_that_of_the_pooled_rows(
    tmp_path: Path, kind: str, task: str, choice: dict[str, Any], masked: bool
) -> None:
    """Firth's, and a ridge whose strength is found by held-out likelihood in the sums of folds."""
    table = patients()
    table["ward"] = np.where(table.index // SITES % 2, "ICU", "GEN")
    strata = {"stratify": True, "min_events": 2} if kind == "cox" else {}
    analysis = {"kind": kind, **choice, **strata, "rules": {"min_subjects": 2, "min_clients": 3}}
    here = deployed(tmp_path, task, analysis, masked=masked, table=table)
    found, fed = served(here).set_index("column"), federation(here)
    rows = [client_rows(fed, k) for k in range(SITES)]
    sites = [(one.x.numpy(), one.y.numpy()) for one in rows]  # the level PED has no row, and is no column
    more: dict[str, Any] = {**choice}
    if "strength" in choice:
        assert found.ridge.iloc[0] in RIDGE_STRENGTHS
        more["strength"] = float(found.ridge.iloc[0])
    if kind == "cox":
        fit: Any = fit_cox([SurvivalSite(x, *y.T) for x, y in sites], stratify=True, **more)
        order = ["age", "glucose", "ward ICU"]
    else:
        family = {"binary": "logistic", "count": "poisson"}[task]
        fit = fit_glm([GlmSite(x, y[:, 0]) for x, y in sites], family, **more)
        order = ["intercept", "age", "glucose", "ward ICU"]
    np.testing.assert_allclose(found.coefficient[order], fit.beta, rtol=0, atol=1e-8)
    np.testing.assert_allclose(found.standard_error[order], fit.se, rtol=0, atol=1e-8)
    assert (np.abs(found.coefficient[order] - fit.beta) <= found.bound[order] + 1e-12).all()


@masks
def test_curves_are_those_of_the_pooled_binned_times(tmp_path: Path, masked: bool) -> None:
    rules = {"min_subjects": 2}
    choice = {"kind": "kaplan-meier", "width": 40.0, "until": 160.0, "rules": rules}
    found, table = served(deployed(tmp_path, "survival", choice, masked=masked)), patients()
    ends = np.unique(found.time)
    place = np.searchsorted(ends, table.days)
    event = np.where(place < len(ends), table.died, 0)
    curve = KaplanMeierFitter().fit(ends[np.minimum(place, len(ends) - 1)], event)
    want = curve.survival_function_at_times(ends).to_numpy()
    np.testing.assert_allclose(found.survival, want, atol=1e-12)


@masks
def test_the_log_rank_test_is_that_of_the_pooled_binned_times(tmp_path: Path, masked: bool) -> None:
    choice = {
        "kind": "kaplan-meier",
        "width": 80.0,
        "until": 160.0,
        "group": "ward",
        "rules": {"min_subjects": 2, "min_clients": 3},
    }
    found, table = served(deployed(tmp_path, "survival", choice, masked=masked)), patients()
    ends, groups = np.unique(found.time), {*found.group}
    ward = table.ward.where(table.ward.isin(groups), "other")
    place = np.searchsorted(ends, table.days)
    event, time = np.where(place < len(ends), table.died, 0), ends[np.minimum(place, len(ends) - 1)]
    test = multivariate_logrank_test(time, ward, event)
    assert found.log_rank[0] == pytest.approx(test.test_statistic, rel=1e-9)


@masks
def test_table_one_is_that_of_pooled_rows(tmp_path: Path, masked: bool) -> None:
    choice = {"kind": "table-1", "group": "ward", "bins": 10, "rules": {"min_subjects": 2}}
    found, table = served(deployed(tmp_path, "binary", choice, masked=masked)), patients()
    groups = {*found.group}
    ward = table.ward.where(table.ward.isin(groups), "other")
    ages = found[found.column == "age"].set_index("group")
    for name, some in table.astype({"age": np.float32}).groupby(ward):
        assert ages["rows"][name] == len(some)
        assert ages["mean"][name] == pytest.approx(some.age.mean(), abs=1e-5)
        assert ages["deviation"][name] == pytest.approx(some.age.std(), abs=1e-5)
    parts = [some.age for _, some in table.groupby(ward)]
    want = stats.f_oneway(*parts).pvalue if len(parts) > 2 else stats.ttest_ind(*parts, equal_var=False).pvalue
    assert ages["p_groups"].iloc[0] == pytest.approx(want, rel=1e-3)


@masks
def test_ridge_is_the_pooled_fit(tmp_path: Path, masked: bool) -> None:
    here = deployed(tmp_path, "regression", {"kind": "ridge", "strength": 0.1}, masked=masked)
    found = served(here)
    fed = here.experiment.partition(here.experiment.source.load(), 0)
    x, y = (torch.cat([part(k) for k in range(fed.n)]).double().numpy() for part in (
        lambda k: fed.fetch(fed.indices("train", k)), lambda k: fed.data.y[fed.indices("train", k)]))  # fmt: skip
    y = y * fed.data.unit + fed.data.centre
    centre, spread = x.mean(0), x.std(0)
    fit = Ridge(alpha=0.1 * len(x)).fit((x - centre) / np.where(spread > 0, spread, 1), y)
    got = found[found.input != "intercept"].coefficient
    np.testing.assert_allclose(got, fit.coef_.ravel() / np.where(spread > 0, spread, 1), atol=1e-6)


@masks
@pytest.mark.parametrize("options", [{"stratify": True}, {"width": 40.0, "until": 160.0}], ids=["strata", "bins"])
def test_cox_is_the_pooled_fit(tmp_path: Path, options: dict[str, Any], masked: bool) -> None:
    found, table = (
        served(deployed(tmp_path, "survival", {"kind": "cox", "rules": {"min_subjects": 2}, **options}, masked=masked)),
        patients(),
    )
    if "stratify" in options:
        frame = table[["days", "died", "site", "age", "glucose"]].assign(
            icu=table.ward == "ICU", ped=table.ward == "PED"
        )
        frame = frame.astype({"age": np.float32, "glucose": np.float32}).astype(float)
        pooled = CoxPHFitter().fit(frame, "days", "died", strata=["site"])
        np.testing.assert_allclose(found.coefficient, pooled.params_, atol=1e-5)


@masks
@pytest.mark.parametrize(
    "choice", [{"kind": "conformal", "bins": 50, "alpha": 0.5}, {"kind": "calibration"}, {"kind": "pooled-importance"}],
    ids=lambda choice: str(choice["kind"]),
)  # fmt: skip
def test_analyses_of_models_are_those_of_the_trained_model(
    tmp_path: Path, choice: dict[str, Any], masked: bool
) -> None:
    """Sums over scores at sites are those of the simulated run of the same experiment."""
    rules = {"min_subjects": 2, "min_clients": 3}
    verify, model = masked and choice["kind"] == "calibration", {"kind": "softmax"}
    here = deployed(tmp_path, "binary", {**choice, "rules": rules}, masked=masked, verify=verify, model=model)
    assert here.serve() is Stop.DONE, here.audit()
    found = results(here).to_pandas()
    fed = here.experiment.partition(here.experiment.source.load(), 0)
    result = fl.simulate(here.experiment.methods[0].setting, fed)
    missing = 0 if here.server.survivors is None else fed.n - here.server.survivors
    agreed = agreed_of(here)
    want = fl.analyze(agreed.analysis, result, rules=agreed.rules.with_(missing=missing)).table.to_pandas()
    if choice["kind"] == "conformal":
        assert want.threshold[0] < 1
    pd.testing.assert_frame_equal(found, want, rtol=1e-5, atol=1e-7)


BINS = {"width": 40.0, "until": 160.0}
ASKING: Mapping[str, tuple[str, dict[str, Any]]] = {
    "cox": ("survival", BINS), "glm": ("binary", {}), "kaplan-meier": ("survival", BINS), "table-1": ("binary", {}),
    "ridge": ("regression", {}), "conformal": ("regression", {"alpha": 1e-9}), "calibration": ("binary", {}),
    "pooled-importance": ("binary", {}),
}  # fmt: skip
"""Task and options with which each analysis by sums asks questions; conformal with an infinite threshold."""


@pytest.mark.parametrize("kind", [kind for kind in ANALYSES if ANALYSES[kind].questions])
def test_every_question_of_an_analysis_can_be_sent_and_is_repeated_only_in_a_fit(tmp_path: Path, kind: str) -> None:
    """Conformal coverage counts the rows below a threshold, so a second answer would show the row between two of them.

    The same holds for other bins of a calibration, and for other shares of a Table 1.
    """
    task, options = ASKING[kind]
    here = deployed(tmp_path, task, {"kind": kind, **options}, masked=True)
    agreed, fed = agreed_of(here), federation(here)
    result = fl.simulate(here.experiment.methods[0].setting, fed)
    log = fl.analyze(agreed.analysis, result, rules=agreed.rules.with_(missing=1)).log
    order, repeated = agreed.analysis.order, agreed.analysis.retried
    for record in log:
        assert Question.decode(
            AnalysisStep.create(kind, 0, record.question.encode()).message, agreed.analysis.questions
        ) == (record.question)
    names = [record.question.name for record in log]
    assert names[: len(order)] == [*order][: len(names)]
    assert len(names) <= len(order) or {*names[len(order) :]} <= {*repeated}
    if order[-1] not in repeated:
        with pytest.raises(Refused, match=f"asks each question only once .* so there is no step {len(order)}"):
            agreed.read_question(len(order), log[-1].question.encode(), agreed.preliminary_terms)


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        (Question("bins", {"reached": torch.tensor([1.0, math.inf])}), "reached of the question 'bins' is not finite"),
        (Question("bins", {"reached": torch.zeros(1, 2)}), "has the fields {'reached': 2}"),
        (Question("bins"), "has the fields {}"),
        (Question("others"), "the question 'others' has the fields"),
    ],
)
def test_a_question_that_no_site_could_read_is_an_error_in_a_simulation_too(question: Question, sentence: str) -> None:
    with pytest.raises(CodeError, match=re.escape(sentence)):
        question.check_form(ANALYSES["calibration"].questions)
    with pytest.raises(Refused, match="has 200000 bytes, but sites accept at most 131072"):
        AnalysisStep.create("calibration", 1, bytes(200_000))


# ------------------------------------------------------------------------------------------------- crafted questions


def asked(client: Client, question: Question, step: int = 0, **changes: Any) -> SiteAnswer:
    """What a site answers to a question, by terms in which all sites are as it is."""
    n, own = client.site.clients, client.answers.figures
    sizes = (tuple(part_sizes(client.trainer.fed, client.site.client)),) * n
    [name] = client.answers._analyses.agreed
    terms = SessionTerms(
        round=1, trains=False, sizes=sizes, cohort=(*range(n),), accepted=(0,) * n, figures=(own,) * n,
        question=AnalysisStep.create(name, step, question.encode()),
    )  # fmt: skip
    return client.answers._analyses.answer(terms.with_(**changes))


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


MEANS = Question("means")
SPREADS = Question("spreads", {"centre": numbers(0, 0, 0, 0, 0)})


def glm_site(folder: Path, table: pd.DataFrame | None = None, client: int = 0, **rules: Any) -> Client:
    here = deployed(
        folder, "regression", {"kind": "glm", "rules": {"min_subjects": 2, **rules}}, masked=False, table=table
    )
    return Client(here.sites[client])


def test_a_site_answers_the_declared_questions_in_their_order_and_number(tmp_path: Path) -> None:
    client = glm_site(tmp_path, questions=3)
    step = Question("step", {"beta": numbers(0, 0, 0, 0, 0), "centre": numbers(*[0] * 5), "spread": numbers(*[1] * 5)})
    assert asked(client, MEANS).counters == ANSWERED_COUNTS
    for place, question, sentence in (
        (1, MEANS, "asks 'spreads', got 'means'"), (2, SPREADS, "asks 'step', got 'spreads'"),
        (3, step, "has at most 3 steps, so there is no step 3"), (0, SPREADS, "asks 'means'"),
        (1, Question("spreads", {"centre": numbers(0, 0)}), "5 numbers, got 2"),
        (1, Question("spreads", {"centre": numbers(0, 0, 0, 0, float("nan"))}), "do not encode a question"),
        (2, replace(step, values={**step.values, "spread": numbers(1, 1, 0, 1, 1)}),
         "spreads of a question must be greater than 0"),
    ):  # fmt: skip
        with pytest.raises(PublicReason, match=sentence):
            asked(client, question, place)
    with pytest.raises(PublicReason, match="different terms: sites, sizes or cells have changed"):
        asked(client, SPREADS, 1, sizes=((9, 9, 9),) * SITES)
    with pytest.raises(PublicReason, match="must contain no models of the run"):
        client.answers._analyses.answer(SessionTerms(
            round=1, trains=False, sizes=((9, 9, 9),) * SITES, cohort=(*range(SITES),), accepted=(0,) * SITES,
            figures=(client.answers.figures,) * SITES, question=AnalysisStep.create("glm", 1, SPREADS.encode()),
        ), [b"a model"])  # fmt: skip
    assert asked(client, SPREADS, 1).counters == ANSWERED_COUNTS


def test_an_answer_is_never_clipped_under_masks(tmp_path: Path) -> None:
    """About a centre far from all rows, the squares of four sites exceed their bounds, which the server knows.

    With clipped answers, the sum minus these bounds would be the squares of the fifth site, which has fewer rows.
    """
    table = patients().assign(ward=np.array(["GEN", "ICU", "PED"])[np.arange(ROWS) // SITES % 3])
    table = table.drop(table.index[table.site == 4][:25])
    here = deployed(tmp_path, "regression", {"kind": "glm"}, masked=True, table=table)
    clients = [Client(site) for site in here.sites]
    sizes = tuple(tuple(c.sizes) for c in clients)
    for client, answers in zip(clients, (False,) * 4 + (True,), strict=True):
        far = Question("spreads", {"centre": numbers(2.2, 1.5, 1.67, 1.67, 2.13)})
        answer = asked(client, far, 1, sizes=sizes)
        assert answer.counters == (ANSWERED_COUNTS if answers else SILENT_COUNTS)
        assert bool(answer.vector.any()) is answers


def test_time_bins_are_the_agreed_ones_and_not_those_of_a_message(tmp_path: Path) -> None:
    """Two bins whose ends differ by a little would show one patient."""
    choice = {"kind": "cox", "width": 40.0, "until": 160.0, "rules": {"min_subjects": 2}}
    client = Client(deployed(tmp_path, "survival", choice, masked=False).sites[0])
    beta = numbers(0, 0, 0, 0)
    for ends in (numbers(40, 80, 120.001, 160), numbers(160), numbers()):
        with pytest.raises(PublicReason, match="agreed-upon bins after merging"):
            asked(client, Question("step", {"beta": beta, "ends": ends}))
    ends = numbers(40, 80, 120, 160)
    assert asked(client, Question("step", {"beta": beta, "ends": ends})).counters == ANSWERED_COUNTS


def test_agreements_and_snapshots_that_differ_a_little_show_no_subject(tmp_path: Path) -> None:
    """Four experiments ask an analysis over the same data, and a snapshot with one other subject is no answer."""
    client = glm_site(tmp_path)
    for k in range(4):
        other = Client(client.site.with_(fingerprint=f"{k:064x}"))
        other.trainer.__dict__["experiment"] = client.trainer.experiment
        assert asked(other, MEANS).counters == ANSWERED_COUNTS
    other = Client(client.site.with_(fingerprint=f"{4:064x}"))
    other.trainer.__dict__["experiment"] = client.trainer.experiment
    with pytest.raises(PublicReason, match="4 experiments have already requested the analysis glm of the data 'data'"):
        asked(other, MEANS)
    renamed = Client(client.site.with_(data_name="other"))  # whose memory would be empty
    for kind in ("train", "analysis"):
        head = {
            **common_head(client.site.fingerprint, kind, 1, 0, b"", digest_arrays([])), "accepted": 0, "weight": 1.0,
            "scored": -1, "global": False,
        }  # fmt: skip
        with pytest.raises(Refused, match="data_name") if kind == "analysis" else nullcontext():
            renamed._check(Envelope(head, [], {}))


@pytest.mark.parametrize(("changed", "answers"), [(1, False), (4, False), (5, True)])
def test_a_snapshot_is_answered_if_enough_subjects_differ(tmp_path: Path, changed: int, answers: bool) -> None:
    table = patients()
    first = glm_site(tmp_path / "first", min_subjects=5)
    assert asked(first, MEANS).counters == ANSWERED_COUNTS
    rows = table.index[table.site == 0][:changed]
    table.loc[rows, "age"] += 1
    later = glm_site(tmp_path / "later", table, min_subjects=5)
    later = Client(later.site.with_(state=first.site.state, signing_key=first.site.signing_key))
    counts = asked(later, MEANS).counters
    assert counts == (ANSWERED_COUNTS if answers else SILENT_COUNTS)


@pytest.mark.parametrize(("gaps", "answers"), [(0, True), (1, False), (4, False), (5, True)])
def test_two_analyses_of_rows_that_differ_in_few_subjects_are_not_both_answered(
    tmp_path: Path, gaps: int, answers: bool
) -> None:
    """Table 1 has the glucose of every patient, and a regression leaves out patients whose age is missing."""
    table = patients()
    table.loc[table.index[table.site == 0][:gaps], "age"] = np.nan
    first = Client(deployed(tmp_path / "first", "regression", {"kind": "table-1"}, masked=False, table=table).sites[0])
    figures = (first.answers.figures,) * SITES
    assert asked(first, Question("counts"), figures=figures).counters == ANSWERED_COUNTS
    later = glm_site(tmp_path / "later", table, min_subjects=5)
    later = Client(later.site.with_(state=first.site.state, signing_key=first.site.signing_key))
    for _ in range(2):  # a verdict stands, also if the step is asked again
        assert asked(later, MEANS).counters == (ANSWERED_COUNTS if answers else SILENT_COUNTS)


def test_a_column_more_hides_no_subject_less(tmp_path: Path) -> None:
    """Rows of other columns cannot be matched, so their numbers of subjects must be equal or differ as much."""
    rows = torch.arange(40.0).double()[:, None]
    memory: dict[str, Any] = {}

    def judge(columns: str, name: str, first: int) -> bool:
        one = ClientRows(rows[first:], rows[first:], *torch.arange(80).view(2, 40)[:, first:])
        return judge_row_sets(memory, name, [one], columns, b"salt", 5)

    assert judge("age", "a", 0)
    assert not judge("age, sex", "b", 1)
    assert judge("age, sex", "c", 5)
    assert judge("age, sex", "d", 0)
    assert not judge("age", "e", 1)
    assert not judge("age, sex", "b", 1)


@pytest.mark.parametrize(("more", "answers"), [(0, True), (1, False), (4, False), (5, True)])
@pytest.mark.parametrize("columns", ["age", "age, sex"])
def test_three_analyses_together_isolate_no_subject(more: int, answers: bool, columns: str) -> None:
    """Two wards and then both wards with a few further patients: each pair of sets differs in many patients."""
    memory: dict[str, Any] = {}

    def judge(columns: str, name: str, first: int, last: int) -> bool:
        rows = torch.arange(float(first), float(last)).double()[:, None]
        one = ClientRows(rows, rows, *torch.arange(2 * (last - first)).view(2, -1))
        return judge_row_sets(memory, name, [one], columns, b"salt", 5)

    assert judge("age", "one ward", 0, 40)
    assert judge("age", "the other ward", 40, 90)
    assert judge(columns, "both wards", 0, 90 + more) is answers


def test_a_combination_of_any_number_of_sets_isolates_no_subject() -> None:
    """Sets that consist of whole wards isolate at least a ward; one further patient in a reachable set is isolated."""
    for seed in range(40):
        rng = np.random.default_rng([20261130, seed])
        wards = [{f"{ward} {k}" for k in range(rng.integers(9, 30))} for ward in range(6)]
        members = rng.integers(2, size=(rng.integers(2, 6), len(wards)))
        sets = [set[str]().union(*(wards[k] for k in np.flatnonzero(row))) for row in members]
        assert not any(isolates_subjects(sets[k], [[one] for one in sets[:k]], 5) for k in range(len(sets)))
        for signs in product((-1, 0, 1), repeat=len(sets)):
            reachable = np.array(signs) @ members
            if set(reachable.tolist()) <= {0, 1} and reachable.any():
                new = set[str]().union(*(wards[k] for k in np.flatnonzero(reachable)))
                assert not isolates_subjects(new, [[one] for one in sets], 5)
                assert isolates_subjects(new | {"patient"}, [[one] for one in sets], 5)
                assert isolates_subjects(new ^ {"patient", min(new)}, [[one] for one in sets], 5)  # a corrected row


def test_the_sets_of_one_analysis_are_not_combined() -> None:
    """Table 1 sums another column over each set, so only one of the sets can be compared with a regression."""
    everyone = {*map(str, range(100))}
    gaps = [{*map(str, range(6))}, {*map(str, range(3, 9))}]
    columns = [everyone, everyone - gaps[0], everyone - gaps[1]]
    assert not isolates_subjects(everyone - gaps[0] - gaps[1] - {"9", "10"}, [columns], 5)
    assert isolates_subjects(everyone - gaps[0] - gaps[1] - {"9", "10"}, [[one] for one in columns], 5)


def test_a_regression_after_table_1_is_answered_if_many_cells_are_missing() -> None:
    """Table 1 has a set of rows for each of 12 columns, a regression needs all cells, and both are asked again."""
    rng = np.random.default_rng(20261201)
    is_missing = rng.random((400, 12)) < 0.1
    assert is_missing.sum(0).min() > 5
    memory: dict[str, Any] = {}

    def judge(name: str, masks: Iterable[np.ndarray]) -> bool:
        rows, subjects = torch.arange(400.0).double()[:, None], torch.arange(800).view(2, 400)
        sets = [ClientRows(rows[mask], rows[mask], *subjects[:, torch.from_numpy(mask)]) for mask in masks]
        return judge_row_sets(memory, name, sets, "columns", b"salt", 5)

    for again in range(4):
        assert judge(f"table-1 {again}", ~is_missing.T)
        assert judge(f"glm {again}", [~is_missing.any(1)])
    one_more = ~is_missing.any(1)
    one_more[np.flatnonzero(~one_more)[0]] = True
    assert not judge("one patient more", [one_more])


def test_a_range_that_isolates_a_row_is_no_answer(tmp_path: Path) -> None:
    """Even where people have signed it: fewer subjects than the least count have a part in the sums."""
    table = patients()
    table["age"] = np.where(table.index == 0, 110.0, table.age.clip(upper=100))
    client = glm_site(tmp_path, table)
    agreement = client.trainer.experiment.source.agreement
    columns = tuple(c.with_(range=(105.0, 115.0)) if c.name == "age" else c for c in agreement.column)
    experiment = client.trainer.experiment
    source = experiment.source.with_(agreement=agreement.with_(column=columns))
    one = client.answers._analyses.agreed["glm"]
    schema = make_sample_schema(replace(experiment, source=source), client.site.samples)
    client.answers._analyses.__dict__["agreed"] = {"glm": replace(one, schema=schema)}
    answer = asked(client, MEANS, figures=("ffff",) * SITES)
    assert answer.counters == SILENT_COUNTS
    assert not answer.vector.any()


def test_one_subject_with_many_rows_is_no_cell(tmp_path: Path) -> None:
    """Least counts are of subjects: ten rows of one patient reach no cell of five."""
    x = torch.cat([torch.zeros(10, 1), torch.ones(10, 1)]).double()
    subjects = torch.cat([torch.zeros(10), torch.arange(1, 11)]).long()
    column = TableColumn(name="ward", levels=2, names=("GEN", "ICU"))
    schema = Schema("rows", "binary", (column,), ("no", "yes"))
    rows = ClientRows(x, torch.zeros(20, 1).double(), torch.zeros(20).long(), subjects)
    terms = AnalysisTerms(schema, torch.tensor([20]), Rules(min_subjects=5))
    groups, *cells = TableOne().publish(rows, terms).tolist()
    assert (groups, cells) == (1, [0, 1, 0])
    assert flag_columns(rows, terms).tolist() == [0.0]


def test_a_column_that_few_subjects_vary_in_is_left_out(tmp_path: Path) -> None:
    table = patients()
    table["ward"] = np.where(table.index < 2, "PED", np.where(table.ward == "PED", "GEN", table.ward))
    here = deployed(tmp_path, "regression", {"kind": "glm", "rules": {"min_subjects": 2}}, masked=True, table=table)
    found = served(here)
    assert [*found.column] == ["intercept", "age", "glucose", "ward ICU"]
    assert {*found.merged} == {"ward PED"}


def test_figures_of_single_clients_and_unagreed_ranges_are_refused_beforehand(tmp_path: Path) -> None:
    for task, choice, masked, sentence in (
        ("binary", {"kind": "table-1", "group": "client"}, True, "shows individual clients' results"),
        ("survival", {"kind": "cox"}, True, "cox requires time bins, but no time bins are set. Set"),
        ("survival", {"kind": "cox"}, False, "time bins"),
    ):  # fmt: skip
        here = deployed(tmp_path / f"{choice['kind']}-{masked}", task, choice, masked=masked)
        with pytest.raises(ConfigError, match=sentence):
            check_analyses(
                Client(here.sites[0]).trainer.job,
                here.experiment,
                here.server.samples,
                SITES,
                here.server.survivors,
                0,
                ["global"],
            )


def test_steps_of_a_former_version_are_named(tmp_path: Path) -> None:
    """A recorded deployment is read by status, and its unfinished steps are not mixed with others."""
    here = deployed(tmp_path, "survival", {"kind": "cox", "stratify": True}, masked=False)
    here.server.checkpoints.mkdir(parents=True)
    (here.server.checkpoints / "cox-0.json").write_text("{}")
    [state] = read_status(here.server)["analyses"]
    assert (state["state"], state["sums"]) == ("begun", 1)
    assert here.serve() is Stop.DONE
    assert "recorded by an earlier version" in here.audit("no result")[0]["reason"]
    Audit(here.server.audit).write("cox", rows=400, events=3, lost={})
    [state] = read_status(here.server)["analyses"]
    assert (state["state"], state["rows"]) == ("done", 400)
    Audit(here.server.audit).write("no Cox regression", reason="why")
    [state] = read_status(here.server)["analyses"]
    assert (state["state"], state["reason"]) == ("none", "why")


def test_a_rule_that_is_left_out_has_its_default(tmp_path: Path) -> None:
    """So an agreement on the number of questions does not give up the least count."""
    for number, rules in enumerate(({}, {"questions": 3}, {"min_subjects": 7})):
        choice = {"kind": "glm", **({"rules": rules} if rules else {})}
        agreed = agreed_of(deployed(tmp_path / f"{number}", "binary", choice, masked=False)).rules
        assert agreed.min_subjects == rules.get("min_subjects", 5)
        assert agreed.missing == 0
        assert (agreed.questions, agreed.min_clients) == (rules.get("questions", 24), SITES)
