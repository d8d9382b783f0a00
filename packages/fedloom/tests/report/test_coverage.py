"""Law: an interval by subject covers the population's figure as often as it says, where a subject has several rows.

Every set has so many subjects of one to five rows. Rows of one subject are alike: half of the variance of a score, and
of what makes a prediction right, is the subject's. ``python -m`` of this file prints the table of docs/subjects.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from scipy.special import expit, logit, stdtrit
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from fedloom.lab.report.comparison.bootstrap import standard_error, weighted_metric
from fedloom.lab.report.comparison.by_patient import MIN_CLASS_SAMPLES, delong_auroc
from fedloom.lab.report.patients import StoredPredictions

Draw = Callable[[np.random.Generator, int], StoredPredictions]
FREE, TIMES = 20_000, 4_000
"""Subjects of one row by which the true concordance is measured, and events that are compared at a time."""


def subjects_of(rng: np.random.Generator, subjects: int) -> np.ndarray:
    return np.repeat(np.arange(subjects), rng.integers(1, 6, subjects))


def made(
    subject: np.ndarray, target: np.ndarray, prediction: np.ndarray, event: np.ndarray | None = None
) -> StoredPredictions:
    client = np.zeros(len(subject), np.int64)
    return StoredPredictions(client, np.arange(len(subject)), target, prediction, event, subject)


def scores(area: float) -> Draw:
    """Scores whose AUROC over subjects is ``area``; a subject is mostly of one class."""

    def draw(rng: np.random.Generator, subjects: int) -> StoredPredictions:
        subject = subjects_of(rng, subjects)
        often = rng.choice([0.2, 0.8], subjects)
        target = (rng.random(len(subject)) < often[subject]).astype(float)
        noise = (rng.normal(size=subjects)[subject] + rng.normal(size=len(subject))) / math.sqrt(2)
        return made(subject, target, noise + math.sqrt(2) * norm.ppf(area) * target)

    return draw


def labels(area: float) -> Draw:
    """Scores of two labels, each known in four of five samples, whose AUROC over subjects is ``area``."""

    def draw(rng: np.random.Generator, subjects: int) -> StoredPredictions:
        subject = subjects_of(rng, subjects)
        size = (len(subject), 2)
        target = (rng.random(size) < rng.choice([0.2, 0.8], (subjects, 2))[subject]).astype(float)
        noise = (rng.normal(size=(subjects, 2))[subject] + rng.normal(size=size)) / math.sqrt(2)
        score = noise + math.sqrt(2) * norm.ppf(area) * target
        return made(subject, np.where(rng.random(size) < 0.2, np.nan, target), score)

    return draw


def right(share: float) -> Draw:
    """Predictions of which a share is right, those of a subject alike."""

    def draw(rng: np.random.Generator, subjects: int) -> StoredPredictions:
        subject = subjects_of(rng, subjects)
        noise = (rng.normal(size=subjects)[subject] + rng.normal(size=len(subject))) / math.sqrt(2)
        return made(subject, np.ones(len(subject)), (noise < norm.ppf(share)).astype(float))

    return draw


def times(rng: np.random.Generator, subjects: int, most: int = 5) -> StoredPredictions:
    """Times and risks that share a subject's frailty, a third of them censored."""
    subject = np.repeat(np.arange(subjects), rng.integers(1, most + 1, subjects))
    own, rows = rng.normal(size=subjects), len(subject)
    risk = (own[subject] + rng.normal(size=rows)) / math.sqrt(2)
    frailty = np.exp(0.5 * rng.normal(size=subjects))[subject]
    time = rng.exponential(size=rows) / (np.exp(0.8 * risk) * frailty)
    censored = rng.exponential(size=rows) * 2
    return made(subject, np.minimum(time, censored), risk, (time <= censored).astype(float))


@cache
def true_concordance() -> float:
    """The C-index of pairs of different subjects."""
    s = times(np.random.default_rng(99), FREE, most=1)
    assert s.event is not None
    won = pairs = 0.0
    for k in np.flatnonzero(s.event > 0)[:TIMES]:
        later = s.target > s.target[k]
        won += float((s.prediction[later] < s.prediction[k]).sum())
        pairs += float(later.sum())
    return won / pairs


FIGURES: dict[str, tuple[str, Draw, Callable[[], float]]] = {
    "AUROC 0.5": ("auroc", scores(0.5), lambda: 0.5),
    "AUROC 0.7": ("auroc", scores(0.7), lambda: 0.7),
    "AUROC 0.9": ("auroc", scores(0.9), lambda: 0.9),
    "AUROC of labels 0.7": ("macro_auroc", labels(0.7), lambda: 0.7),
    "accuracy 0.8": ("accuracy", right(0.8), lambda: 0.8),
    "concordance": ("c_index", times, true_concordance),
}


SHARE_METRICS = ("auroc", "macro_auroc", "accuracy", "c_index")
"""Metrics from 0 to 1, whose intervals are computed on the logit scale."""


def estimate_interval(metric: str, samples: StoredPredictions, level: float = 0.95) -> tuple[float, float, float]:
    """Return a metric of one model, and the lower and upper ends of its interval.

    All three are NaN without an interval.

    The interval is based on Student's t with one degree of freedom fewer than subjects, on the logit scale for shares.

    Args:
        metric: ``auroc``, or one of the `BOOTSTRAP_METRICS`.
        samples: predictions of one model, with the subject of each sample if subjects have several samples.
        level: probability with which the interval covers the metric of the population.
    """
    subjects = samples.count()
    if metric == "auroc":
        some = [samples.count(samples.target == k) for k in (0, 1)]
        if min(some) < MIN_CLASS_SAMPLES:
            return math.nan, math.nan, math.nan
        areas, variance = delong_auroc(samples.prediction[None], samples.target, samples.units)
        value, se = float(areas[0]), math.sqrt(max(0.0, float(variance[0, 0])))
    else:
        value = float(weighted_metric(metric, np.ones((1, len(samples.target))), samples)[0])
        se = standard_error(metric, samples)
    if not se > 0 or subjects < 2:
        return value, math.nan, math.nan
    width = float(stdtrit(subjects - 1, 0.5 + level / 2)) * se
    if metric in SHARE_METRICS and 0 < value < 1:
        centre, half = logit(value), width / (value * (1 - value))
        return value, float(expit(centre - half)), float(expit(centre + half))
    return value, value - width, value + width


def coverage(figure: str, subjects: int, sets: int, *, known: bool = True) -> float:
    """The share of sets whose 95 % interval has the true figure; ``known``: whether the subjects are."""
    metric, draw, truth = FIGURES[figure]
    rng, held = np.random.default_rng([sets, subjects, len(figure)]), 0
    for _ in range(sets):
        samples = draw(rng, subjects)
        _, low, high = estimate_interval(metric, samples if known else samples._replace(subject=None))
        held += low <= truth() <= high
    return held / sets


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("subjects", "least", "most"), [(100, 0.93, 0.97), (30, 0.90, 1.0)])
@pytest.mark.parametrize("figure", FIGURES)
def test_intervals_by_subject_cover_on_2000_sets(figure: str, subjects: int, least: float, most: float) -> None:
    assert least <= coverage(figure, subjects, 2000) <= most


SETS = 120
ERROR = math.sqrt(0.05 * 0.95 / SETS)
"""Standard error of a coverage of 95 % on so many sets: 2.0 points. The bounds leave 3.3 of them."""


@pytest.mark.parametrize("figure", FIGURES)
def test_intervals_by_subject_cover(figure: str) -> None:
    sets = SETS if figure not in ("concordance", "AUROC of labels 0.7") else SETS // 2
    assert coverage(figure, 100, sets) >= 0.95 - 3.3 * ERROR * math.sqrt(SETS / sets)


def test_intervals_by_row_do_not_cover_where_rows_of_a_subject_are_alike() -> None:
    assert coverage("accuracy 0.8", 100, SETS, known=False) < 0.95 - 3.3 * ERROR


def test_the_area_of_weighted_labels_is_that_of_scikit_learn() -> None:
    """With equal scores, unknown labels, and a label that all samples of some resamples have."""
    rng = np.random.default_rng(5)
    samples = labels(0.7)(rng, 30)
    samples = samples._replace(prediction=samples.prediction.round(1))
    weight = rng.integers(0, 3, (20, len(samples.target))).astype(float)
    weight[0, samples.target[:, 1] == 0] = 0
    for w, value in zip(weight, weighted_metric("macro_auroc", weight, samples), strict=True):
        areas = []
        for y, z in zip(samples.target.T, samples.prediction.T, strict=True):
            some = ~np.isnan(y) & (w > 0)
            if len({*y[some].tolist()}) == 2:
                areas.append(roc_auc_score(y[some], z[some], sample_weight=w[some]))
        assert value == pytest.approx(np.mean(areas))


def test_a_subject_of_one_row_changes_no_interval() -> None:
    """Obuchowski's variance is DeLong's, and drawing subjects is drawing rows."""
    rng = np.random.default_rng(3)
    for metric, draw, _ in FIGURES.values():
        samples = draw(rng, 60)
        alone = samples._replace(subject=rng.permutation(len(samples.target)))
        assert estimate_interval(metric, alone)[:1] == estimate_interval(metric, alone._replace(subject=None))[:1]
        if metric == "auroc":
            np.testing.assert_allclose(
                estimate_interval(metric, alone), estimate_interval(metric, alone._replace(subject=None))
            )


def test_copies_of_every_row_widen_no_interval_and_narrow_none() -> None:
    """Identity: with each row three times under its subject's name, the variance is that of the rows once."""
    rng = np.random.default_rng(4)
    for metric, draw, _ in FIGURES.values():
        one = draw(rng, 80)
        one = one._replace(subject=np.arange(len(one.target)))
        three = StoredPredictions(*(None if values is None else np.repeat(values, 3, axis=0) for values in one))
        np.testing.assert_allclose(estimate_interval(metric, three), estimate_interval(metric, one), rtol=0.01)


if __name__ == "__main__":
    print("| figure | 100 subjects | 30 subjects | 100 subjects, rows taken as patients |\n|---|---|---|---|")
    for name in FIGURES:
        shares = coverage(name, 100, 2000), coverage(name, 30, 2000), coverage(name, 100, 500, known=False)
        print(f"| {name} | {' | '.join(f'{share:.1%}' for share in shares)} |", flush=True)
