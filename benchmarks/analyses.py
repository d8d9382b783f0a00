"""Print how far the analyses by sums are from the libraries on pooled rows, and what they ask and send.

    python benchmarks/analyses.py

Five sites, no network. "rounded" has each number of an answer rounded to its step, as masked integers are. "bits" has
the most that any number of the sum of five sites takes; a ring of 64 bits has room for 63. Cells of a table are float32
in a data set, so the columns here are multiples of 1/8.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from lifelines import CoxPHFitter, KaplanMeierFitter
from lifelines.statistics import multivariate_logrank_test
from scipy import stats
from sklearn.linear_model import LogisticRegression, Ridge
from statsmodels.discrete.discrete_model import Logit

import fedloom as fl
from fedloom.analyses import Analysis, AnalysisTerms, analysis_of, answer_question, run_questions, sum_answers
from fedloom.analyses.run import clients_of
from fedloom_clinic.fits.glm import GlmSite, fit_glm

SIZES = (400, 250, 150, 120, 80)


class Row(NamedTuple):
    """One analysis: how far it is from a library, in process and rounded, and what it costs."""

    analysis: str
    library: str
    difference: float
    rounded: float
    bits: int
    questions: int
    kilobytes: float
    seconds: float


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
    frame["stay"] = (10 + 3 * eta + rng.normal(0, 2, rows)).round(2)
    return frame


def measure(name: str, library: str, data: fl.Dataset, options: dict[str, object], gap: Callable) -> Row:  # type: ignore[type-arg]
    """Run an analysis as it is and with rounded answers, and compare the tables by ``gap(table, model)``."""
    analysis: Analysis = analysis_of(name, options)
    schema, rows, _ = clients_of(data, analysis)
    members = list(rows.values())
    terms = AnalysisTerms(schema, torch.tensor([len(client) for client in members]))
    terms = replace(terms, published=tuple(analysis.publish(client, terms) for client in members))
    found, numbers, bits, start = [], 0, 0, time.perf_counter()
    for rounds in (False, True):

        def ask(question: object, bounds: object, rounds: bool = rounds) -> object:
            nonlocal numbers, bits
            answers = [answer_question(analysis, question, c, terms, bounds, "a site") for c in members]  # type: ignore[arg-type]
            if rounds:
                step = bounds.step  # type: ignore[attr-defined]
                answers = [a._replace(values=(a.values / step).round() * step) for a in answers]
                numbers += len(step)
                reach = torch.maximum(bounds.low.abs(), bounds.high.abs()) / step * len(members)  # type: ignore[attr-defined]
                bits = max(bits, 1 + math.ceil(math.log2(max(float(reach.max()), 1.0))))
            return sum_answers(answers)

        state, log = run_questions(analysis, terms, ask)  # type: ignore[arg-type]
        found.append(gap(analysis.result(state), analysis.model(state)))
        if not rounds:
            seconds = time.perf_counter() - start
    return Row(name, library, found[0], found[1], bits, len(log), 8 * numbers / 1000, seconds)


def of(frame: pd.DataFrame, label: str, drop: tuple[str, ...], **more: object) -> fl.Dataset:
    return fl.Dataset.create(frame, label, users="site", categorical=("ward",), drop=drop, **more)  # type: ignore[arg-type]


def main() -> None:
    warnings.simplefilter("ignore")
    frame = patients()
    design = np.column_stack([frame.age, frame.marker, frame.ward == "ICU"]).astype(float)
    names = ["age", "marker", "icu"]
    survival = of(frame, "days", ("died", "stay"), event="event")
    binary, number = (
        of(frame, "died", ("days", "event", "stay")),
        of(frame, "stay", ("days", "event", "died"), task="regression"),
    )
    table = pd.DataFrame(design, columns=names).assign(T=frame.days, E=frame.event)
    n = len(frame)

    def largest(*pairs: tuple[object, object]) -> float:
        return max(float(np.abs(np.asarray(a, float) - np.asarray(b, float)).max()) for a, b in pairs)

    def coefficients(want: object, se: object) -> Callable:  # type: ignore[type-arg]
        return lambda t, m: largest((t["coefficient"].to_numpy()[-3:], want), (t["standard_error"].to_numpy()[-3:], se))

    precise = {"precision": 1e-12}
    cox, ridge_cox = (
        CoxPHFitter(penalizer=p).fit(table, "T", "E", fit_options=precise) for p in (0.0, 0.1 * (n - 1) / n)
    )
    ends = np.arange(1, 16) * 20.0
    place = np.searchsorted(ends, frame.days)
    binned, event = ends[place.clip(max=14)], frame.event * (place < 15)
    binned_cox = CoxPHFitter().fit(table.assign(T=binned, E=event), "T", "E", fit_options=precise)
    logit = Logit(frame.died, np.column_stack([np.ones(n), design])).fit(disp=0, method="newton", tol=1e-13)
    scaled = (design - design.mean(0)) / design.std(0)
    ridge_logit = LogisticRegression(C=1 / (n * 0.1), tol=1e-12, solver="newton-cholesky").fit(scaled, frame.died)
    hot = np.column_stack([frame.age, frame.marker, frame.ward == "GEN", frame.ward == "ICU"]).astype(float)
    linear = Ridge(alpha=0.01 * n).fit((hot - hot.mean(0)) / hot.std(0), frame.stay)

    def curve(t: object, m: object) -> float:
        t = t.to_pandas()  # type: ignore[attr-defined]
        gaps = []
        for ward in ("GEN", "ICU"):
            some, rows = frame.ward == ward, t[t.group == ward]
            fit = KaplanMeierFitter().fit(binned[some], event[some])
            gaps.append(largest((rows.survival, fit.survival_function_at_times(rows.time))))
        return max(*gaps, abs(t.p[0] - multivariate_logrank_test(binned, frame.ward, event).p_value))

    def first_table(t: object, m: object) -> float:
        t = t.to_pandas()  # type: ignore[attr-defined]
        gaps = []
        for column in ("age", "marker"):
            for ward in ("GEN", "ICU"):
                row, values = t[(t.column == column) & (t.group == ward)].iloc[0], frame[frame.ward == ward][column]
                gaps.append(largest(([row["mean"], row.deviation], [values.mean(), values.std()])))
            parts = [part for _, part in frame.groupby("ward")[column]]
            gaps.append(abs(row.p_groups - stats.ttest_ind(*parts, equal_var=False).pvalue))
            gaps.append(abs(row.p_clients - stats.f_oneway(*(p for _, p in frame.groupby("site")[column])).pvalue))
        return max(gaps)

    rows = [
        measure("table-1", "pandas, SciPy", number, {"group": "ward"}, first_table),
        measure("kaplan-meier", "lifelines, binned", survival, {"group": "ward", "width": 20, "until": 300}, curve),
        measure("cox", "lifelines", survival, {}, coefficients(cox.params_, cox.standard_errors_)),
        measure("cox", "lifelines, binned", survival, {"width": 20, "until": 300, "least": 1},
                coefficients(binned_cox.params_, binned_cox.standard_errors_)),
        measure("cox", "lifelines, ridge", survival, {"penalty": "ridge", "strength": 0.1},
                coefficients(ridge_cox.params_, ridge_cox.standard_errors_)),
        measure("glm", "statsmodels", binary, {}, coefficients(logit.params[1:], logit.bse[1:])),
        measure("glm", "scikit-learn, ridge", binary, {"penalty": "ridge", "strength": 0.1},
                lambda t, m: largest((t["coefficient"].to_numpy()[1:] * design.std(0), ridge_logit.coef_[0]))),
        measure("ridge", "scikit-learn", number, {"strength": 0.01},
                lambda t, m: largest((m.weight.detach().numpy()[0] * hot.std(0), linear.coef_))),
    ]  # fmt: skip
    print(pd.DataFrame(rows).to_string(index=False, float_format=lambda x: f"{x:.2g}"))
    _firth(frame, design)


def _firth(frame: pd.DataFrame, design: np.ndarray) -> None:
    """Compare with firthmodels, where it is installed."""
    try:
        from firthmodels import FirthLogisticRegression
    except ModuleNotFoundError:
        return
    place = frame.site.to_numpy()
    sites = [GlmSite(design[place == s], frame.died.to_numpy()[place == s].astype(float)) for s in "abcde"]
    fit = fit_glm(sites, "logistic", penalty="firth")
    other = FirthLogisticRegression(xtol=1e-12, gtol=1e-10, max_iter=1000).fit(design, frame.died.to_numpy())
    print(f"firth: {np.abs(fit.beta[1:] - other.coef_.ravel()).max():.2g} from firthmodels")


if __name__ == "__main__":
    main()
