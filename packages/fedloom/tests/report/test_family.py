"""A family of paired tests agrees with SciPy and statsmodels, and its intervals with its verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.multitest import multipletests

from fedloom.lab.report.comparison.family import FAMILY_ERROR_LEVEL, run_family_tests, seed_differences
from fedloom.lab.report.numbers import Estimate, equal_seeds
from tests import recomputed

VALUES = st.lists(st.floats(-1, 1).map(lambda v: round(v, 4)), min_size=5, max_size=8)


@given(st.lists(VALUES, min_size=1, max_size=9))
def test_p_values_verdicts_and_intervals_agree(members: list[list[float]]) -> None:
    found = run_family_tests({k: dict(enumerate(values)) for k, values in enumerate(members)})
    spread = {k: values for k, values in enumerate(members) if len(set(values)) > 1}
    p = [stats.ttest_1samp(spread[k], 0).pvalue if k in spread else float(v[0] == 0) for k, v in enumerate(members)]
    rejections, corrected, *_ = multipletests(p, alpha=FAMILY_ERROR_LEVEL, method="holm")
    for k, values in enumerate(members):
        one = found[k]
        assert one.mean == pytest.approx(np.mean(values), abs=1e-12)
        assert (one.p, one.holm) == (pytest.approx(p[k], abs=1e-12), pytest.approx(corrected[k], abs=1e-12))
        assert one.significant == rejections[k]
        assert one.is_testable
        if k in spread and not math.isclose(one.half, abs(one.mean)):
            assert one.significant == (abs(one.mean) > one.half)
            plain = stats.ttest_1samp(values, 0).confidence_interval(1 - FAMILY_ERROR_LEVEL)
            assert one.half >= (plain.high - plain.low) / 2 * (1 - 1e-9)


def test_a_family_of_one_has_the_plain_interval() -> None:
    values = {0: 0.1, 1: 0.3, 2: 0.2, 3: 0.15, 4: 0.22}
    one = run_family_tests({"a": values})["a"]
    low, high = stats.ttest_1samp([*values.values()], 0).confidence_interval(0.95)
    assert (one.mean - one.half, one.mean + one.half) == (pytest.approx(low), pytest.approx(high))
    assert -one == one._replace(mean=-one.mean)


def test_few_seeds_are_no_member_of_the_family() -> None:
    many = dict(enumerate([0.1, 0.3, 0.2, 0.15, 0.22]))
    few = dict(enumerate([0.1, 0.1001, 0.1, 0.1]))
    both = run_family_tests({"many": many, "few": few, "none": {}})
    assert both["many"] == run_family_tests({"many": many})["many"]
    assert (both["few"].significant, both["few"].is_testable, math.isnan(both["few"].p)) == (False, False, True)
    assert math.isnan(both["none"].mean)


def test_differences_are_of_common_seeds_with_finite_values() -> None:
    one, other = Estimate({0: 1.0, 1: math.nan, 3: 5.0}), Estimate({0: 0.5, 1: 1.0, 2: 1.0, 3: 2.0})
    assert seed_differences(one, other) == {0: 0.5, 3: 3.0}


DRAWS = st.lists(st.integers(0, 3), min_size=2, max_size=8)


@given(DRAWS, DRAWS)
def test_seeds_that_repeat_the_runs_of_others_count_once(mine: list[int], others: list[int]) -> None:
    """A difference is counted once for every pair of runs that differ; equal figures of distinct runs all count."""
    kinds = list(zip(mine, others, strict=False))
    one, other = (
        Estimate(dict.fromkeys(range(len(kinds)), level), equal_seeds(_recorded([kind[k] for kind in kinds])))
        for k, level in enumerate((0.9, 0.7))
    )
    found = seed_differences(one, other)
    assert [*found] == [seed for seed, kind in enumerate(kinds) if kind not in kinds[:seed]]
    assert run_family_tests({"a": found})["a"].is_testable == (len(set(kinds)) >= 5)


def _recorded(draws: list[int]) -> dict[str, dict[int, float]]:
    """Figures of runs by what they drew: accuracies that are all the same, losses that are not, and times."""
    figures = {"accuracy": [0.5] * len(draws), "loss": [*draws], "seconds": [*range(len(draws))]}
    return {name: dict(enumerate(map(float, values))) for name, values in figures.items()}


def test_runs_without_a_result_repeat_nothing() -> None:
    lost = {"loss": dict.fromkeys(range(3), math.nan), "seconds": dict.fromkeys(range(3), 1.0)}
    assert equal_seeds(lost) == {}
    partly = {"loss": dict.fromkeys(range(3), 0.5), "loss/variance": dict.fromkeys(range(3), math.nan)}
    assert equal_seeds(partly) == {1: 0, 2: 0}


@pytest.mark.parametrize("draw", range(4))
def test_moderated_tests_are_those_of_the_recomputation_and_agree_with_their_intervals(draw: int) -> None:
    rng = np.random.default_rng(draw)
    spreads = np.exp(rng.normal(-4, (0.0, 0.5, 1.0, 2.0)[draw], 20))  # alike: the prior has infinitely many degrees
    table = rng.normal(rng.choice([0.0, 0.1], (20, 1)), spreads[:, None], (20, 5))
    table[0] = 0.0  # the same result in every seed is no evidence, and no part of the prior
    found = run_family_tests({k: dict(enumerate(row)) for k, row in enumerate(table.tolist())}, moderate=True)
    fresh = recomputed.moderated(table)
    assert [found[k].significant for k in range(20)] == fresh.rejected.tolist()
    assert [found[k].half for k in range(20)] == pytest.approx(fresh.half.tolist(), rel=1e-6)
    assert all(one.significant == (abs(one.mean) > one.half) for one in found.values())


def test_the_correction_widens_by_the_ratio_of_test_to_training_samples() -> None:
    values = dict(enumerate([0.1, 0.3, 0.2, 0.15, 0.22]))
    plain, corrected = run_family_tests({"a": values})["a"], run_family_tests({"a": values}, ratio=0.25)["a"]
    error = stats.sem([*values.values()]) * math.sqrt(1 + 5 * 0.25)  # (1 / n + r) s^2, Nadeau and Bengio, Section 4
    assert corrected.half == pytest.approx(stats.t.ppf(0.975, 4) * error)
    assert corrected.p == pytest.approx(2 * stats.t.sf(corrected.mean / error, 4))
    assert corrected.p > plain.p
    assert run_family_tests({"a": values, "b": values}, ratio={"a": 0.25})["b"].p == pytest.approx(plain.p)


def test_ratios_are_tested_by_their_logarithms() -> None:
    one, other = Estimate({0: 2.0, 1: 0.0, 2: 0.0, 3: 1.0}), Estimate({0: 1.0, 1: 0.0, 2: 1.0, 3: 0.0})
    assert seed_differences(one, other, log=True) == {0: math.log(2), 1: 0.0, 2: -math.inf, 3: math.inf}
    mixed = {0: -math.inf, **dict.fromkeys(range(1, 5), 1.0)}
    never = run_family_tests({"nothing sent": dict.fromkeys(range(5), -math.inf), "both": mixed})
    assert never["nothing sent"].significant
    assert not never["both"].significant
