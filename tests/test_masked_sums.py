"""Sums of answers as whole numbers: exact for any range, and results within the bound that they state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedloom as fl
from fedloom.analyses import AnalysisTerms, Bounds, Question, resolve_analysis
from fedloom.analyses.run import answer_question, prepare_clients, run_questions, sum_answers
from fedloom_sites.deploy.analyses import AnswerForm, SumTooLarge
from fedloom_sites.deploy.secure.protocol import ProtocolBroken

SIZES = (60, 45, 80, 50)


@given(
    seed=st.integers(0, 10**6), sites=st.integers(1, 100),
    magnitudes=st.lists(st.integers(-40, 130), min_size=1, max_size=12), step=st.integers(-44, 0),
)  # fmt: skip
def test_a_sum_of_answers_is_exact_whatever_its_range(seed: int, sites: int, magnitudes: list[int], step: int) -> None:
    """Also where one limb of 64 bits would wrap: the sum is that of the rounded numbers, rounded once."""
    draws, high = np.random.default_rng(seed), torch.tensor([2.0**k for k in magnitudes], dtype=torch.float64)
    bounds = Bounds.between(-high, high, 2.0**step)
    form = AnswerForm(bounds, sites)
    answers = [high * torch.from_numpy(draws.uniform(-1, 1, len(high))) for _ in range(sites)]
    answers[0] = high  # an end of the range
    vectors = [form.encode(answer, k % 2, k) for k, answer in enumerate(answers)]
    total, clipped, rows = form.decode(np.sum(vectors, axis=0, dtype=np.uint64), sites)
    assert (clipped, rows) == (sites // 2, sites * (sites - 1) // 2)
    for j in range(len(high)):
        exact = sum(int(np.rint(np.ldexp(float(answer[j]), -step))) for answer in answers)
        assert float(total[j]) == float(exact) * 2.0**step
    assert form.length >= len(high) + 2


def test_a_range_without_room_and_a_sum_out_of_range_are_refused() -> None:
    wide = Bounds.between(*(torch.tensor([end], dtype=torch.float64) for end in (-(2.0**300), 2.0**300)))
    with pytest.raises(SumTooLarge, match="bits"):
        AnswerForm(wide, 5)
    form = AnswerForm(Bounds.counts(3, 10), 5)
    for wrong in ([11, 0, 0, 0, 9], [-1, 0, 0, 0, 9], [2**63 - 1, 0, 0, 0, 9], [0, 0, 0, 4, -1], [0, 0, 0, -1, 3]):
        with pytest.raises(ProtocolBroken, match="out of range"):
            form.decode(np.array(wrong, dtype=np.int64).view(np.uint64), 1)


def clients(seed: int, task: str, scale: float) -> fl.Dataset:
    rng, rows = np.random.default_rng(seed), sum(SIZES)
    x = np.column_stack([rng.normal(0, 1, rows), scale * rng.normal(5, 1, rows), rng.integers(0, 2, rows)])
    eta = 0.6 * x[:, 0] + 0.4 * (x[:, 1] / scale - 5) - 0.5 * x[:, 2]
    y: Any = {
        "regression": lambda: (3 + eta + rng.normal(0, 0.5, rows))[:, None],
        "count": lambda: rng.poisson(np.exp(eta))[:, None].astype(float),
        "binary": lambda: (rng.random(rows) < 1 / (1 + np.exp(-eta))).astype(np.int64),
        "survival": lambda: np.column_stack([rng.exponential(20 * np.exp(-eta)) + 0.1, rng.random(rows) < 0.7]),
    }[task]()
    users = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    classes = ("0", "1") if task == "binary" else ()
    return fl.Dataset(
        "rows", torch.from_numpy(x), torch.from_numpy(y), task, classes, users=users, user_names=tuple("abcd")
    )  # type: ignore[arg-type]


ANALYSES: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("glm", "regression", {}, ["coefficient"]), ("glm", "count", {}, ["coefficient"]),
    ("glm", "binary", {}, ["coefficient"]), ("glm", "binary", {"penalty": "ridge", "strength": 0.1}, ["coefficient"]),
    ("ridge", "regression", {"strength": 0.1, "max_input": 1e7}, ["coefficient"]),
    ("ridge", "binary", {"max_input": 1e7}, ["coefficient"]),
    ("table-1", "binary", {"bins": 10}, ["mean", "deviation"]),
    ("cox", "survival", {"stratify": True, "min_events": 2}, ["coefficient"]),
    ("cox", "survival", {"width": 10.0, "min_events": 2, "penalty": "ridge", "strength": 0.05}, ["coefficient"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "task", "options", "figures"), ANALYSES, ids=lambda one: str(one)[:40])
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**5), scale=st.sampled_from([1e-3, 1.0, 1e5]))
def test_a_masked_result_is_within_the_bound_that_it_states(
    name: str, task: str, options: dict[str, Any], figures: list[str], seed: int, scale: float
) -> None:
    analysis = resolve_analysis(name, options)
    schema, rows, _ = prepare_clients(clients(seed, task, scale), analysis)
    members = [*rows.values()]
    terms = AnalysisTerms(schema, torch.tensor([len(one) for one in members]))
    terms = AnalysisTerms(schema, terms.sizes, terms.rules, tuple(analysis.publish(one, terms) for one in members))

    def plain(question: Question, bounds: Bounds) -> Any:
        return sum_answers([answer_question(analysis, question, one, terms, bounds, "a site") for one in members])

    def masked(question: Question, bounds: Bounds) -> Any:
        form = AnswerForm(bounds, len(members))
        answers = [answer_question(analysis, question, one, terms, bounds, "a site") for one in members]
        assert not any(answer.neutral for answer in answers)
        vectors = [form.encode(answer.values, answer.clipped, answer.rows) for answer in answers]
        total, clipped, _ = form.decode(np.sum(vectors, axis=0, dtype=np.uint64), len(members))
        return total, sum_answers(answers)[1]._replace(clipped=clipped)

    exact, rounded = (analysis.result(run_questions(analysis, terms, ask)[0]).to_pandas() for ask in (plain, masked))
    stated = exact["bound"].to_numpy(float)
    assert np.isfinite(stated[~np.isnan(stated)]).all()
    for figure in figures:
        gap = np.abs(exact[figure].to_numpy(float) - rounded[figure].to_numpy(float))
        size = np.abs(exact[figure].to_numpy(float))
        with np.errstate(invalid="ignore"):
            assert not (gap > stated + 1e-13 * size).any(), (gap, stated)
            assert not (stated > 1e-6 * np.maximum(size.max(initial=0), np.nanmax(size))).any(), stated
