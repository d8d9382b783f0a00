"""Law: the interval of a gain covers the population's gain as often as it says, where a subject has several rows.

Every set has so many subjects of one to five rows, and two models whose scores share half of their variance. Rows of
one subject are alike: half of the variance of a score, and of what makes a prediction right, is the subject's.
``python -m`` of this file prints the table of docs/subjects.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from fedloom.lab.report.comparison.bootstrap import weighted_metric
from fedloom.lab.report.comparison.by_patient import compare_predictions
from fedloom.lab.report.patients import StoredPredictions

Pair = tuple[StoredPredictions, StoredPredictions]
Draw = Callable[[np.random.Generator, int], Pair]


def subjects_of(rng: np.random.Generator, subjects: int) -> np.ndarray:
    return np.repeat(np.arange(subjects), rng.integers(1, 6, subjects))


def made(
    subject: np.ndarray, target: np.ndarray, prediction: np.ndarray, event: np.ndarray | None = None
) -> StoredPredictions:
    client = np.zeros(len(subject), np.int64)
    return StoredPredictions(client, np.arange(len(subject)), target, prediction, event, subject)


def noises(rng: np.random.Generator, subject: np.ndarray, subjects: int, *size: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise of two models, of variance 1 each."""

    def draw() -> np.ndarray:
        own, rest = rng.normal(size=(subjects, *size))[subject], rng.normal(size=(len(subject), *size))
        return np.asarray((own + rest) / math.sqrt(2))

    common = draw()
    return (common + draw()) / math.sqrt(2), (common + draw()) / math.sqrt(2)


def scores(*areas: float) -> Draw:
    """Scores of two models with these AUROCs over subjects; a subject is mostly of one class."""

    def draw(rng: np.random.Generator, subjects: int) -> Pair:
        subject = subjects_of(rng, subjects)
        often = rng.choice([0.2, 0.8], subjects)
        target = (rng.random(len(subject)) < often[subject]).astype(float)
        a, b = (
            made(subject, target, noise + math.sqrt(2) * norm.ppf(area) * target)
            for noise, area in zip(noises(rng, subject, subjects), areas, strict=True)
        )
        return a, b

    return draw


def labels(*areas: float) -> Draw:
    """Scores of two labels, each known in four of five samples, whose AUROCs over subjects are ``areas``."""

    def draw(rng: np.random.Generator, subjects: int) -> Pair:
        subject = subjects_of(rng, subjects)
        size = (len(subject), 2)
        target = (rng.random(size) < rng.choice([0.2, 0.8], (subjects, 2))[subject]).astype(float)
        known = np.where(rng.random(size) < 0.2, np.nan, target)
        a, b = (
            made(subject, known, noise + math.sqrt(2) * norm.ppf(area) * target)
            for noise, area in zip(noises(rng, subject, subjects, 2), areas, strict=True)
        )
        return a, b

    return draw


def right(*shares: float) -> Draw:
    """Predictions of which these shares are right, those of a subject alike."""

    def draw(rng: np.random.Generator, subjects: int) -> Pair:
        subject = subjects_of(rng, subjects)
        a, b = (
            made(subject, np.ones(len(subject)), (noise < norm.ppf(share)).astype(float))
            for noise, share in zip(noises(rng, subject, subjects), shares, strict=True)
        )
        return a, b

    return draw


def measured(rng: np.random.Generator, subjects: int) -> Pair:
    """Measurements, and predictions with equal errors."""
    subject = subjects_of(rng, subjects)
    target = rng.normal(size=len(subject))
    a, b = (made(subject, target, target + noise) for noise in noises(rng, subject, subjects))
    return a, b


def times(rng: np.random.Generator, subjects: int) -> Pair:
    """Times with a subject's frailty, a third of them censored, and risks that are equally good."""
    subject = subjects_of(rng, subjects)
    risk = noises(rng, subject, subjects)[0]
    frailty = np.exp(0.5 * rng.normal(size=subjects))[subject]
    time = rng.exponential(size=len(subject)) / (np.exp(0.8 * risk) * frailty)
    censored = rng.exponential(size=len(subject)) * 2
    a, b = (
        made(subject, np.minimum(time, censored), risk + noise, (time <= censored).astype(float))
        for noise in noises(rng, subject, subjects)
    )
    return a, b


FIGURES: dict[str, tuple[str, Draw, float]] = {
    "AUROC 0.5 and 0.6": ("auroc", scores(0.5, 0.6), 0.1),
    "AUROC 0.7 and 0.8": ("auroc", scores(0.7, 0.8), 0.1),
    "AUROC 0.9 and 0.95": ("auroc", scores(0.9, 0.95), 0.05),
    "AUROC of labels 0.7 and 0.8": ("macro_auroc", labels(0.7, 0.8), 0.1),
    "accuracy 0.8 and 0.85": ("accuracy", right(0.8, 0.85), 0.05),
    "mean absolute error": ("mae", measured, 0.0),
    "concordance": ("c_index", times, 0.0),
}


def estimate_gain(metric: str, pair: Pair) -> tuple[float, float]:
    """The gain that a report prints, and the half-width of its interval."""
    line = compare_predictions("All", metric, *pair)
    return line.together - line.alone, line.half


def forget_subjects(pair: Pair) -> Pair:
    return pair[0]._replace(subject=None), pair[1]._replace(subject=None)


def coverage(figure: str, subjects: int, sets: int, *, known: bool = True) -> float:
    """The share of sets whose 95 % interval has the true gain; ``known``: whether the subjects are."""
    metric, draw, truth = FIGURES[figure]
    rng, held = np.random.default_rng([sets, subjects, len(figure)]), 0
    for _ in range(sets):
        pair = draw(rng, subjects)
        gain, half = estimate_gain(metric, pair if known else forget_subjects(pair))
        held += abs(gain - truth) <= half
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
    sets = SETS if figure not in ("concordance", "AUROC of labels 0.7 and 0.8") else SETS // 2
    assert coverage(figure, 100, sets) >= 0.95 - 3.3 * ERROR * math.sqrt(SETS / sets)


def test_intervals_by_row_do_not_cover_where_rows_of_a_subject_are_alike() -> None:
    assert coverage("AUROC 0.7 and 0.8", 100, 9 * SETS, known=False) < 0.95 - 3.3 * ERROR / 3


def test_the_area_of_weighted_labels_is_that_of_scikit_learn() -> None:
    """With equal scores, unknown labels, and a label that all samples of some resamples have."""
    rng = np.random.default_rng(5)
    samples = labels(0.7, 0.8)(rng, 30)[0]
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
        one = draw(rng, 60)
        own = rng.permutation(len(one[0].target))
        gain, half = estimate_gain(metric, (one[0]._replace(subject=own), one[1]._replace(subject=own)))
        gain_by_row, half_by_row = estimate_gain(metric, forget_subjects(one))
        assert gain == gain_by_row
        if metric == "auroc":
            np.testing.assert_allclose(half, half_by_row)


def test_copies_of_every_row_widen_no_interval_and_narrow_none() -> None:
    """Identity: with each row three times under its subject's name, the variance is that of the rows once."""
    rng = np.random.default_rng(4)
    for metric, draw, _ in FIGURES.values():
        own = [made._replace(subject=np.arange(len(made.target))) for made in draw(rng, 80)]
        three = [StoredPredictions(*(None if v is None else np.repeat(v, 3, axis=0) for v in one)) for one in own]
        np.testing.assert_allclose(
            estimate_gain(metric, (three[0], three[1])), estimate_gain(metric, (own[0], own[1])), rtol=0.02
        )


if __name__ == "__main__":
    print("| figure | 100 subjects | 30 subjects | 100 subjects, rows taken as patients |\n|---|---|---|---|")
    for name in FIGURES:
        shares = coverage(name, 100, 2000), coverage(name, 30, 2000), coverage(name, 100, 500, known=False)
        print(f"| {name} | {' | '.join(f'{share:.1%}' for share in shares)} |", flush=True)
