"""Looks of a race: the paired difference against libraries and simulation, and the levels that it may spend."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedloom.errors import ConfigError
from fedloom.lab.advise.answer import Verdict, decide
from fedloom.lab.advise.laps import ESTIMATING_PART, Arm, Lap, LapResult
from fedloom.lab.advise.looks import (
    RACE_ERROR_LEVEL,
    PairedDifference,
    pair_differences,
    pool_seeds,
    shrink_gains,
    spend_level,
)
from fedloom.lab.advise.race import (
    ALONE_METHOD,
    AVERAGE_METHOD,
    MAX_RACE_SEEDS,
    LapShares,
    RaceOutcome,
    choose_counts,
    compare_methods,
    race,
)

RNG = np.random.default_rng(5)
WORK = 900


def test_one_seed_is_the_paired_t_test_over_clients() -> None:
    values = RNG.normal(0.3, 1.0, (1, 12))
    ours, theirs = pair_differences(values), stats.ttest_1samp(values[0], 0.0, alternative="greater")
    assert ours.p_above() == pytest.approx(theirs.pvalue, rel=1e-10)
    interval = stats.ttest_1samp(values[0], 0.0).confidence_interval(0.95)
    assert ours.mean - ours.half_width(0.05) == pytest.approx(interval.low, rel=1e-10)


def test_mean_squares_are_those_of_a_two_way_analysis_of_variance() -> None:
    from statsmodels.formula.api import ols
    from statsmodels.stats.anova import anova_lm

    values = RNG.normal(0.0, 1.0, (4, 9)) + RNG.normal(0.0, 2.0, 9) + RNG.normal(0.0, 1.0, (4, 1))
    seeds, clients = np.indices(values.shape)
    table = pd.DataFrame({"y": values.ravel(), "client": clients.ravel(), "seed": seeds.ravel()})
    squares = anova_lm(ols("y ~ C(client) + C(seed)", table).fit())["mean_sq"]
    ours = pair_differences(values)
    assert [ours.client_mean_square, ours.seed_mean_square, ours.residual_mean_square] == pytest.approx(
        squares.tolist(), rel=1e-9
    )


@pytest.mark.parametrize(("of_clients", "of_seeds"), [(0.0, 0.0), (1.0, 0.0), (0.0, 0.3), (0.5, 1.0)])
def test_without_a_difference_the_level_is_kept_whatever_varies(of_clients: float, of_seeds: float) -> None:
    """A t test over clients alone claims too often where a seed moves all clients."""
    rng, methods, seeds, clients, n = np.random.default_rng(0), 5, 2, 15, 2000
    ours = naive = 0
    for _ in range(n):
        values = rng.normal(0, 1, (methods, seeds, clients)) + of_clients * rng.normal(0, 1, (methods, 1, clients))
        values = values + of_seeds * rng.normal(0, 1, (methods, seeds, 1))
        difference = values[0] - values[1]
        ours += pair_differences(difference, pool_seeds(values)).p_above() <= 0.05
        naive += stats.ttest_1samp(difference.mean(0), 0.0, alternative="greater").pvalue <= 0.05
    assert ours / n <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / n)
    if of_seeds:
        assert naive / n > 0.1


def test_seeds_needed_are_the_first_that_decide() -> None:
    values = 0.3 + np.random.default_rng(1).normal(0.0, 1.0, (2, 40))
    summary = pair_differences(values)
    needed = summary.seeds_needed(0.001)
    assert needed is not None
    assert 2 < needed < 20
    assert pair_differences(values - values.mean() + 1e-6).seeds_needed(0.001) is None


@given(st.integers(1, 5), st.integers(2, 9))
def test_a_gain_that_lasts_stays_and_one_that_does_not_is_the_mean(seeds: int, clients: int) -> None:
    rng = np.random.default_rng(seeds * 10 + clients)
    own = rng.normal(0, 1, clients)
    assert shrink_gains(np.tile(own, (seeds, 1))) == pytest.approx(own)
    noise = rng.normal(0, 1, (max(2, seeds), clients))
    noise -= noise.mean(0)  # every client gains as much as any other
    assert shrink_gains(noise + 0.25) == pytest.approx(np.full(clients, 0.25))


@given(st.integers(1, 12), st.floats(0.001, 0.2))
def test_levels_of_looks_add_up(looks: int, level: float) -> None:
    levels = spend_level(looks, level)
    assert len(levels) == looks
    assert min(levels) > 0
    assert sum(levels) == pytest.approx(level)


class Field:
    """Made-up runs: methods with a quality, settings with a deficit, clients, seeds and noise."""

    def __init__(self, quality: dict[str, float], seed: int = 0, noise: float = 0.05, clients: int = 12) -> None:
        self.quality, self.noise, self.clients, self.seed = quality, noise, clients, seed
        self.laps = list[Lap]()

    def __call__(self, laps: Sequence[Lap]) -> list[LapResult]:
        self.laps += laps
        return [self._result(lap) for lap in laps]

    def _result(self, lap: Lap) -> LapResult:
        # one number for each method and seed, whatever the setting and depth
        rng = np.random.default_rng([self.seed, lap.seed, sorted(self.quality).index(lap.arm.label)])
        value = self.quality[lap.arm.label] - 0.2 * lap.arm.number + self.noise * rng.normal(0, 1, self.clients)
        samples = round(WORK * lap.depth)
        kept = value + self.noise * rng.normal(0, 1, self.clients)
        scores = {"global": {"validation": value.tolist(), "test": kept.tolist()}}
        return LapResult(round(9 * lap.depth), samples, samples, 0, None, scores)


def run_race(field: Field, budget: float = 16.0) -> RaceOutcome:
    count, stay = choose_counts([LapShares()] * len(field.quality), budget)
    arms = {label: [Arm(label, k, {"k": k}) for k in range(count)] for label in field.quality}
    return race(arms, stay, budget * WORK, WORK, range(MAX_RACE_SEEDS), field, higher=True)


def test_the_best_of_equal_methods_leaves_with_at_most_the_level_of_the_race() -> None:
    names, n = (ALONE_METHOD, AVERAGE_METHOD, "a", "b"), 300
    left = sum("a" in run_race(Field(dict.fromkeys(names, 0.5), seed)).departures for seed in range(n))
    assert left / n <= RACE_ERROR_LEVEL + 3 * math.sqrt(RACE_ERROR_LEVEL / n)


class Lucky(Field):
    """Runs whose seeds are lucky for a method at all clients, with other noise on the kept data."""

    def _result(self, lap: Lap) -> LapResult:
        rng = np.random.default_rng([self.seed, lap.seed, sorted(self.quality).index(lap.arm.label)])
        luck = self.quality[lap.arm.label] - 0.2 * lap.arm.number + 0.03 * rng.normal()
        parts = {part: (luck + self.noise * rng.normal(0, 1, self.clients)).tolist() for part in ("validation", "test")}
        samples = round(WORK * lap.depth)
        return LapResult(round(9 * lap.depth), samples, samples, 0, None, {"global": parts})


def verdict_of(field: Field, margin: float | None = None) -> tuple[Verdict, PairedDifference]:
    outcome = run_race(field)
    method = next((label for label in outcome.racing if label != ALONE_METHOD), AVERAGE_METHOD)
    gain = compare_methods(outcome.results, method, ALONE_METHOD, ESTIMATING_PART, 1.0)
    assert gain is not None
    return decide(outcome, gain, margin)[0], gain


def test_equal_methods_are_rarely_said_to_be_better_than_training_alone() -> None:
    """Although the leading method is also the luckiest one."""
    names, n = (ALONE_METHOD, AVERAGE_METHOD, "a", "b", "c", "d"), 120
    fields = [Lucky(dict.fromkeys(names, 0.5), seed, 0.01, clients=5) for seed in range(n)]
    wrong = sum(verdict_of(field)[0] is Verdict.TOGETHER for field in fields)
    assert wrong / n <= RACE_ERROR_LEVEL + 3 * math.sqrt(RACE_ERROR_LEVEL / n)


@pytest.mark.parametrize(("gain", "usual"), [(0.1, Verdict.TOGETHER), (-0.2, Verdict.ALONE)])
def test_a_clear_difference_is_decided_with_few_clients(gain: float, usual: Verdict) -> None:
    quality = {ALONE_METHOD: 0.5, **dict.fromkeys((AVERAGE_METHOD, "a", "b", "c", "d"), 0.5 + gain)}
    found = [verdict_of(Lucky(quality, seed, 0.03, clients=5))[0] for seed in range(20)]
    assert found.count(usual) >= 16


def test_the_printed_interval_decides_with_any_margin() -> None:
    """A margin at the interval's end decides, a smaller one does not."""
    quality = dict.fromkeys((ALONE_METHOD, AVERAGE_METHOD, "a"), 0.5)
    verdict, gain = verdict_of(Lucky(quality, 3, 0.05))
    assert verdict is Verdict.UNDECIDED
    largest = gain.mean + gain.half_width()
    for margin, want in [(largest * 1.01, Verdict.ALONE), (largest * 0.99, Verdict.UNDECIDED)]:
        assert verdict_of(Lucky(quality, 3, 0.05), margin)[0] is want


def test_a_race_finds_the_best_method_and_its_best_setting() -> None:
    outcome = run_race(Field({ALONE_METHOD: 0.5, AVERAGE_METHOD: 0.6, "a": 0.9, "b": 0.4}, noise=0.01))
    assert outcome.racing == ("a",)
    assert outcome.arms["a"].number == 0
    assert {label for label, _ in outcome.results} == {ALONE_METHOD, AVERAGE_METHOD, "a"}
    assert all(result.samples == WORK for result in outcome.results.values())
    assert all(one.difference is not None and one.difference.mean > 0 for one in outcome.departures.values())


@given(st.integers(2, 6), st.floats(4.0, 60.0))
def test_a_race_keeps_to_its_budget(methods: int, budget: float) -> None:
    names = [ALONE_METHOD, AVERAGE_METHOD, *"abcd"][:methods]
    field = Field(dict.fromkeys(names, 0.5))
    if budget < 2 * methods:
        with pytest.raises(ConfigError, match="too small"):
            run_race(field, budget)
        return
    assert run_race(field, budget).spent <= budget * WORK + 1
    first = [lap for lap in field.laps if lap.depth < 0.2]
    counts = {sum(lap.arm.label == name for lap in first) for name in names}
    assert len(counts) == 1
    assert len({lap.seed for lap in first}) == 1


def test_a_method_whose_runs_fail_leaves_with_the_reason() -> None:
    class Failing(Field):
        def _result(self, lap: Lap) -> LapResult:
            if lap.arm.label == "b":
                return LapResult(0, 0, 0, 0, None, {}, "it diverged")
            return super()._result(lap)

    outcome = run_race(Failing({ALONE_METHOD: 0.5, AVERAGE_METHOD: 0.6, "b": 0.9}))
    assert outcome.departures["b"].reason == "it diverged"
    assert "b" not in outcome.racing
