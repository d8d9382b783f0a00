"""False verdicts where the truth is known: sources that are drawn anew, on which no method is better in the population.

A repetition draws samples from one source, and seeds split these samples anew, as runs do. The methods classify by
blocks of features that can be exchanged, so that their expected accuracy over samples is the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import fedloom as fl
from fedloom.lab.report.comparison.family import FAMILY_ERROR_LEVEL, PairVerdict, pair_verdict, run_family_tests

METHODS, FEATURES = 4, 3


def accuracies(rng: np.random.Generator, samples: int, seeds: int, clients: int) -> tuple[np.ndarray, float]:
    """Accuracies ``[seeds, METHODS]`` of nearest means by block, over clients, and test samples per training sample."""
    y = rng.integers(0, 2, samples)
    x = rng.standard_normal((samples, METHODS, FEATURES)) + 0.35 * (2 * y[:, None, None] - 1)
    data = fl.Dataset.create((x.reshape(samples, -1).astype(np.float32), y))
    cut = fl.partitions.iid(clients=clients)
    found, tested, trained = np.zeros((seeds, METHODS)), 0, 0
    for seed in range(seeds):
        fed = cut(data, seed)
        train, tests = fed.parts["train"].index.numpy(), [fed.indices("test", i).numpy() for i in range(clients)]
        tested, trained = tested + sum(map(len, tests)), trained + len(train)
        ends = [x[train][y[train] == label].mean(0) for label in (0, 1)]
        for k in range(METHODS):
            w, c = ends[1][k] - ends[0][k], (ends[0][k] + ends[1][k]) / 2
            found[seed, k] = np.mean([np.mean(((x[test, k] - c) @ w > 0) == y[test]) for test in tests])
    return found, tested / trained


def false_families(repetitions: int, seeds: int, clients: int, samples: int = 300) -> tuple[int, int]:
    """Families with any verdict, with the correction and without it."""
    rng, counts = np.random.default_rng(0), [0, 0]
    for _ in range(repetitions):
        found, ratio = accuracies(rng, samples, seeds, clients)
        members = {k: dict(enumerate(found[:, k] - found[:, 0])) for k in range(1, METHODS)}
        for place, one in enumerate((ratio, 0.0)):
            verdicts = {pair_verdict(test, higher=True) for test in run_family_tests(members, ratio=one).values()}
            counts[place] += verdicts != {PairVerdict.INCONCLUSIVE}
    return counts[0], counts[1]


def at_most_the_level(false: int, repetitions: int) -> bool:
    """Whether a count of false families is what an error of at most 5 % gives, at 1 %."""
    return bool(stats.binomtest(false, repetitions, FAMILY_ERROR_LEVEL, alternative="greater").pvalue > 0.01)


def test_seeds_that_split_the_same_samples_give_few_false_verdicts_on_the_source() -> None:
    corrected, plain = false_families(150, seeds=5, clients=2)
    assert at_most_the_level(corrected, 150)
    assert not at_most_the_level(plain, 150)  # the test would see it


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "clients", "samples"), [(5, 2, 300), (5, 10, 600), (10, 5, 300), (20, 5, 300)])
def test_few_false_verdicts_on_the_source_long(seeds: int, clients: int, samples: int) -> None:
    corrected, plain = false_families(1000, seeds, clients, samples)
    row = f"| {seeds} | {clients} | {samples} | {corrected / 10:.1f} % | {plain / 10:.1f} % |"
    assert row in (Path(__file__).parents[4] / "docs" / "tuning.md").read_text()
    assert at_most_the_level(corrected, 1000)
    assert corrected < plain
