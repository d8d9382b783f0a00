"""Compare analyses that are computed from sums with libraries that fit the pooled rows, and print their costs.

    python benchmarks/analyses.py              # all analyses
    python benchmarks/analyses.py glm ridge    # only analyses whose names contain all of these words

Five sites run in this process, without a network. The columns of the printed table show the largest difference from
the library: "simulation" for `fl.analyze`, "sites" for a deployment that reads the same rows from a file, "masked" for
the same deployment with secure aggregation, and "returned" for a masked deployment in which one site is lost after
some messages and rejoins after a restart. The column "bits" is the largest number of bits that a number in the sum of
five sites needs. A number that needs more than 62 bits is sent in several parts. Data sets store table cells as
float32, so the columns in this benchmark are multiples of 1/8 and have no rounding error.
"""

from __future__ import annotations

import logging
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from flwr.app import Message
from lifelines import CoxPHFitter, KaplanMeierFitter
from lifelines.statistics import multivariate_logrank_test
from scipy import stats
from sklearn.linear_model import LogisticRegression
from statsmodels.discrete.discrete_model import Logit
from statsmodels.genmod import families
from statsmodels.genmod.generalized_linear_model import GLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "packages/fedloom-sites"))  # for the tests' helpers

import fedloom as fl
from fedloom.analyses import (
    Analysis,
    AnalysisTerms,
    Rules,
    answer_question,
    resolve_analysis,
    run_questions,
    sum_answers,
)
from fedloom.analyses.run import prepare_clients
from fedloom.errors import Stop
from fedloom.rundir import analysis_file
from fedloom_clinic.fits.cox import SurvivalSite, fit_cox
from fedloom_sites.deploy.settings import SecureSettings
from tests.deploy.scene import FIRST, scene
from tests.deploy.sessions import arrays_of, kind_of

try:
    from firthmodels import FirthLogisticRegression
except ModuleNotFoundError:
    FirthLogisticRegression = None

SIZES = (400, 250, 150, 120, 80)
RULES = {"min_subjects": 5}
COLUMNS = (
    {"name": "age", "range": [0.0, 130.0]}, {"name": "marker", "range": [0.0, 1000.0]},
    {"name": "ward", "type": "level", "levels": ["GEN", "ICU"]},
)  # fmt: skip
TARGETS: dict[str, dict[str, Any]] = {
    "survival": {"target": "days", "event": "event", "target_range": [0.0, 2000.0]},
    "binary": {"target": "died", "classes": ["0", "1"]},
    "regression": {"target": "stay", "target_range": [-50.0, 90.0]},
    "count": {"target": "visits", "target_range": [0.0, 200.0]},
}  # fmt: skip


class Row(NamedTuple):
    """Line of the table: the distances of one analysis from a library, and the costs of the analysis."""

    analysis: str
    library: str
    simulation: float
    sites: float
    masked: float
    returned: float
    bits: int
    questions: int
    kilobytes: float
    minutes: float


def patients(seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    rows = sum(SIZES)
    frame = pd.DataFrame({
        "site": np.repeat(list("abcde"), SIZES), "age": rng.normal(64, 11, rows).round(),
        "marker": (rng.gamma(2, 30, rows) * 8).round() / 8, "ward": rng.choice(["GEN", "ICU"], rows, p=[0.7, 0.3]),
    })  # fmt: skip
    eta = 0.04 * (frame.age - 64) + 0.8 * (frame.ward == "ICU")
    days, end = rng.exponential(60 * np.exp(-eta)), rng.exponential(90, rows)
    frame["days"], frame["event"] = np.minimum(days, end).round(), (days <= end) * 1
    frame["died"] = (rng.random(rows) < 1 / (1 + np.exp(-eta))).astype(int)
    frame["stay"] = ((10 + 3 * eta + rng.normal(0, 2, rows)) * 8).round() / 8
    frame["visits"] = rng.poisson(np.exp(0.5 + eta))
    return frame


def measure(
    name: str, library: str, task: str, data: fl.Dataset, options: dict[str, object],
    gap: Callable[[pd.DataFrame], float],
) -> Row:  # fmt: skip
    """Run an analysis in a simulation and in deployments, and compare each result with a library by ``gap``."""
    analysis: Analysis = resolve_analysis(name, options)
    schema, rows, _ = prepare_clients(data, analysis)
    members = list(rows.values())
    terms = AnalysisTerms(schema, torch.tensor([len(client) for client in members]), Rules())
    terms = replace(terms, published=tuple(analysis.publish(client, terms) for client in members))
    bits = 0

    def ask(question: Any, bounds: Any) -> Any:
        nonlocal bits
        reach = torch.maximum(bounds.low.abs(), bounds.high.abs()) / bounds.step * len(members)
        bits = max(bits, 1 + math.ceil(math.log2(max(float(reach.max()), 1.0))))
        return sum_answers([answer_question(analysis, question, c, terms, bounds, "a site") for c in members])

    state, log = run_questions(analysis, terms, ask)
    simulated = gap(analysis.result(state).to_pandas())
    ends = [
        deploy(task, {"kind": name, "rules": RULES, **options}, gap, masked=masked, loses_site=loses_site)
        for masked, loses_site in ((False, False), (True, False), (True, True))
    ]
    size, seconds = ends[1][1:]
    return Row(
        name, library, simulated, *(end[0] for end in ends), bits, len(log), size / 1000 / len(SIZES), seconds / 60
    )


def deploy(
    task: str, choice: dict[str, object], gap: Callable[[pd.DataFrame], float], *, masked: bool, loses_site: bool
) -> tuple[float, int, float]:
    """Run a deployment, and return its distance from a library, its bytes sent and received, and its time in seconds.

    If ``loses`` is true, one site stops replying, and the run is started again with all sites.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        patients().to_csv(folder / "all.csv", index=False)
        agreement = {"task": task, "column": [*COLUMNS], **TARGETS[task]}
        here = scene(
            folder, "fedavg", rounds=1, partition={"kind": "natural"}, evaluate={"every": 1}, analysis=[choice],
            data={"source": "csv", "path": str(folder / "all.csv"), "client_column": "site", "agreement": agreement},
            local={"lr": 0.001, "batch_size": "full"},
        )  # fmt: skip
        if masked:
            agreed = SecureSettings(threshold=4, keys=tuple(m.signing_key for m in here.server.sites))
            here = here._replace(
                server=here.server.with_(secure=agreed, quorum=4), sites=[s.with_(secure=agreed) for s in here.sites]
            )
        size, asked, began = 0, 0, 0.0

        def count(node: int, message: Message, reply: Message) -> Message | None:
            nonlocal size, asked, began
            asked += kind_of(message) == "analysis" or (
                kind_of(message) == "tally" and b'"question":{' in arrays_of(message)[0]
            )
            if asked:
                began = began or time.perf_counter()
                size += sum(map(len, arrays_of(message))) + sum(map(len, arrays_of(reply)))
            return None if loses_site and asked > 4 and node == FIRST + 1 else reply

        stop = here.serve(here.grid(count))
        if loses_site:
            assert stop is Stop.TOO_FEW or asked <= len(SIZES), stop
            stop = here.serve()
        seconds = time.perf_counter() - began
        assert stop is Stop.DONE, stop
        assert not here.audit("no result"), here.audit("no result")
        table: pa.Table = pq.read_table(here.server.results / analysis_file(str(choice["kind"])))
        return gap(table.to_pandas()), size, seconds


def make_dataset(frame: pd.DataFrame, label: str, drop: tuple[str, ...], **more: object) -> fl.Dataset:
    return fl.Dataset.create(frame, label, client_column="site", categorical=("ward",), drop=drop, **more)  # type: ignore[arg-type]


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    frame = patients()
    design = np.column_stack([frame.age, frame.marker, frame.ward == "ICU"]).astype(float)
    names, others = ["age", "marker", "icu"], {"days", "event", "died", "stay", "visits"}
    survival, binary, number, count = (
        make_dataset(frame, label, tuple(others - {label, "event"} if label == "days" else others - {label}), **more)
        for label, more in (
            ("days", {"event": "event"}), ("died", {}), ("stay", {"task": "regression"}), ("visits", {"task": "count"})
        )
    )  # fmt: skip
    table = pd.DataFrame(design, columns=names).assign(T=frame.days, E=frame.event, site=frame.site)
    n, ones = len(frame), np.column_stack([np.ones(len(frame)), design])

    def largest(*pairs: tuple[object, object]) -> float:
        return max(float(np.abs(np.asarray(a, float) - np.asarray(b, float)).max()) for a, b in pairs)

    def coefficients(want: object, se: object) -> Callable[[pd.DataFrame], float]:
        return lambda t: largest((t.coefficient[-3:], want), (t.standard_error[-3:], se))

    strata, ridge_strata = (
        CoxPHFitter(penalizer=p).fit(table, "T", "E", strata=["site"], fit_options={"precision": 1e-12})
        for p in (0.0, 0.1 * (n - 1) / n)
    )
    logit = Logit(frame.died, ones).fit(disp=0, method="newton", tol=1e-13)
    poisson = GLM(frame.visits, ones, families.Poisson()).fit(tol=1e-14)
    gaussian = GLM(frame.stay, ones, families.Gaussian()).fit(tol=1e-14)
    scaled = (design - design.mean(0)) / design.std(0)
    ridge_logit = LogisticRegression(C=1 / (n * 0.1), tol=1e-12, solver="newton-cholesky").fit(scaled, frame.died)

    def of_strength(strength: float) -> np.ndarray:
        fit = LogisticRegression(C=1 / (n * strength), tol=1e-12, solver="newton-cholesky").fit(scaled, frame.died)
        return np.asarray(fit.coef_[0])

    place = frame.site.to_numpy()
    firth_cox = fit_cox(
        [SurvivalSite(design[place == s], *frame[["days", "event"]].to_numpy(float)[place == s].T) for s in "abcde"],
        stratify=True, penalty="firth",
    )  # fmt: skip

    def curve(t: pd.DataFrame) -> float:
        ends = np.unique(t.time)
        place = np.searchsorted(ends, frame.days)
        binned, event = ends[place.clip(max=len(ends) - 1)], frame.event * (place < len(ends))
        gaps = [abs(t.p[0] - multivariate_logrank_test(binned, frame.ward, event).p_value)]
        for ward in ("GEN", "ICU"):
            some, rows = frame.ward == ward, t[t.group == ward]
            fit = KaplanMeierFitter().fit(binned[some], event[some])
            gaps.append(largest((rows.survival, fit.survival_function_at_times(rows.time))))
        return max(gaps)

    def first_table(t: pd.DataFrame) -> float:
        """Return the largest difference in Table 1, without `p_clients`, which deployed sites only approximate."""
        gaps = []
        for column in ("age", "marker"):
            for ward in ("GEN", "ICU"):
                row, values = t[(t.column == column) & (t.group == ward)].iloc[0], frame[frame.ward == ward][column]
                gaps.append(largest(([row["mean"], row.deviation], [values.mean(), values.std()])))
            parts = [part for _, part in frame.groupby("ward")[column]]
            gaps.append(abs(row.p_groups - stats.ttest_ind(*parts, equal_var=False).pvalue))
        return max(gaps)

    ridge = {"penalty": "ridge", "strength": 0.1}
    cases: list[Any] = [
        ("table-1", "pandas, SciPy", "regression", number, {"group": "ward"}, first_table),
        ("kaplan-meier", "lifelines", "survival", survival, {"group": "ward", "width": 20, "until": 300}, curve),
        ("cox", "lifelines, strata", "survival", survival, {"stratify": True},
                coefficients(strata.params_, strata.standard_errors_)),
        ("cox", "lifelines, strata, ridge", "survival", survival, {"stratify": True, **ridge},
                coefficients(ridge_strata.params_, ridge_strata.standard_errors_)),
        ("glm", "statsmodels, gaussian", "regression", number, {},
                coefficients(gaussian.params[1:], gaussian.bse[1:])),
        ("glm", "statsmodels, binomial", "binary", binary, {}, coefficients(logit.params[1:], logit.bse[1:])),
        ("glm", "statsmodels, poisson", "count", count, {}, coefficients(poisson.params[1:], poisson.bse[1:])),
        ("glm", "scikit-learn, ridge", "binary", binary, ridge,
                lambda t: largest((t.coefficient.to_numpy()[1:] * design.std(0), ridge_logit.coef_[0]))),
        ("glm", "scikit-learn, ridge by cv", "binary", binary,
                {"penalty": "ridge", "strength": "cv", "rules": {"min_subjects": 2, "min_clients": 3}},
                lambda t: largest((t.coefficient.to_numpy()[1:] * design.std(0), of_strength(float(t.ridge[0]))))),
        ("cox", "own pooled fit, strata, Firth", "survival", survival, {"stratify": True, "penalty": "firth"},
                coefficients(firth_cox.beta, firth_cox.se)),
    ]  # fmt: skip
    if FirthLogisticRegression is not None:
        firth = FirthLogisticRegression(xtol=1e-12, gtol=1e-10, max_iter=1000).fit(scaled, frame.died.to_numpy())
        away = lambda t: largest((t.coefficient.to_numpy()[1:] * design.std(0), firth.coef_.ravel()))  # noqa: E731
        cases.append(("glm", "firthmodels", "binary", binary, {"penalty": "firth"}, away))
    for case in cases:
        if all(word in f"{case[0]} {case[1]}" for word in sys.argv[1:]):
            row = pd.DataFrame([measure(*case)])
            print(row.to_string(index=False, float_format=lambda x: f"{x:.2g}"), flush=True)


if __name__ == "__main__":
    main()
