"""Conformal sets cover as the theorem promises, and thresholds are the exact ones but for the width of a bin."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedloom as fl
from fedloom.analyses import Question, client_rows
from fedloom.data import DATA_PARTS
from fedloom.engine.result import Result
from fedloom.engine.setting import Evaluate
from fedloom.errors import ConfigError, DataError, Refused
from fedloom.trained.predictions import Predictions
from fedloom_clinic.conformal import ALL_CLASSES_THRESHOLD, Conformal, check_reached, flag_ranges, make_bin_ranges


@pytest.fixture(scope="module")
def trained() -> Result:
    """A weak model, so that sets are not of one class."""
    fed = fl.partitions.dirichlet(clients=5, alpha=0.5, test=0.6)(fl.load("digits"), seed=0)
    return fl.simulate("fedavg-ft", fed, rounds=2, local=fl.LocalSGD(lr=0.02))


def scores(result: Result, client: int) -> tuple[np.ndarray, np.ndarray]:
    """1 - p ``[N, c]`` of all test rows of a client, and their classes."""
    fed = result.job.eval_fed
    rows = fed.indices("test", client)
    x = result.models.rows("global")
    return 1 - result.job.oracle.run(x, fed.fetch(rows)).softmax(1).double().numpy(), fed.data.y[rows].numpy()


def test_thresholds_are_the_exact_quantiles_but_for_a_bin(trained: Result) -> None:
    """Over all test rows but one in 1e9, whose order statistic NumPy has."""
    table = fl.analyze(
        "conformal", trained, calibration_fraction=1 - 1e-9, bins=10_000, by_client=True
    ).table.to_pandas()
    for client in range(5):
        score, label = scores(trained, client)
        own = np.sort(score[np.arange(len(label)), label])
        rank = math.ceil((len(own) + 1) * 0.9 - 1e-9)
        assert table["rows"][client] == len(own)
        assert 0 <= table.threshold[client] - own[rank - 1] <= 1e-4 + 1e-9


def split_rows(result: Result, client: int, analysis: Conformal) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs ``[N, c]`` of the global model for a client's test rows, targets, and whether a row calibrates."""
    rows = client_rows(result.job.eval_fed, client)
    rows = rows.select(rows.part == DATA_PARTS.index("test"))
    output = result.job.oracle.run(result.models.rows("global"), rows.inputs).double().numpy()
    return output, rows.y[:, 0].numpy(), (analysis._draw_numbers(rows) < analysis.calibration_fraction).numpy()


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.4])
@pytest.mark.parametrize("by_client", [False, True])
def test_sets_are_those_of_crepes(trained: Result, by_client: bool, alpha: float) -> None:
    """A threshold is the end of a bin, so a set has at most the classes whose scores lie in the bin in addition."""
    crepes = pytest.importorskip("crepes")
    analysis = Conformal(alpha=alpha, by_client=by_client, bins=100_000)
    table = fl.analyze(analysis, trained).table.to_pandas()
    parts = [split_rows(trained, client, analysis) for client in range(5)]
    joined = parts if by_client else [tuple(map(np.concatenate, zip(*parts, strict=True)))]
    for (output, label, drawn), limit in zip(joined, table.threshold, strict=True):
        score = 1 - torch.from_numpy(output).softmax(1).numpy()
        own = score[drawn][np.arange(drawn.sum()), label[drawn].astype(int)]
        oracle = crepes.ConformalClassifier().fit(own)
        level = 1 - alpha - 1e-9  # crepes keeps a class whose p-value is alpha itself, which the theorem does not need
        wanted = np.asarray(oracle.predict_set(score[~drawn], confidence=level, smoothing=False)) == 1
        found = score[~drawn] <= limit
        assert wanted.any(), "sets that are not all empty"
        assert not (wanted & ~found).any()
        assert (score[~drawn][found & ~wanted] > limit - 1e-5 - 1e-12).all()


@pytest.mark.parametrize("model", ["global", "personal"])
@pytest.mark.parametrize("by_client", [False, True])
def test_mean_coverage_is_the_theorems(trained: Result, by_client: bool, model: str) -> None:
    """Over 100 draws of the calibration rows: from 1 - a to 1 - a + 1/(n + 1) + the mass of a bin, +- 3 errors."""
    coverage, most = [], []
    for draw in range(100):
        table = fl.analyze("conformal", trained, draw=draw, by_client=by_client, model_kind=model).table.to_pandas()
        if not by_client:
            table = table.iloc[:1]
        coverage.append(table.coverage.to_numpy())
        most.append((1 / (table["rows"] + 1)).to_numpy())
    values = np.array(coverage)
    slack = 3 * values.std(0) / np.sqrt(len(values))
    bin_mass = 0.02  # of 1000 bins; the fullest has less than that of the rows
    assert (values.mean(0) >= 0.9 - slack).all()
    assert (values.mean(0) <= 0.9 + np.mean(most, 0) + bin_mass + slack).all()


def test_sets_have_the_classes_that_the_coverage_counts(trained: Result) -> None:
    table = fl.analyze("conformal", trained, calibration_fraction=1e-6 + 0.5).table.to_pandas()
    sizes, covered, rows = 0, 0, 0
    for client in range(5):
        score, label = scores(trained, client)
        facts = trained.models.recipe.facts
        predictions = Predictions(facts, 1 - score, ["global"] * len(score)).apply_threshold(None, table.threshold[0])
        sets = np.array([[c in row for c in facts.classes] for row in predictions.sets])
        assert predictions.table()["set"].to_pylist() == [" | ".join(row) for row in predictions.sets]
        sizes, rows = sizes + sets.sum(), rows + len(sets)
        covered += sets[np.arange(len(label)), label].sum()
    assert covered / rows == pytest.approx(table.coverage[0], abs=0.05)
    assert sizes / rows == pytest.approx(table.set_size[0], rel=0.1)
    assert sizes / rows > 1


def test_too_few_rows_give_sets_of_every_class(trained: Result) -> None:
    table = fl.analyze("conformal", trained, alpha=0.0005).table.to_pandas()
    assert table.threshold[0] == ALL_CLASSES_THRESHOLD
    assert table.coverage[0] == 1
    assert table.set_size[0] == 10


@pytest.mark.parametrize("least", [2, 5])
def test_bins_that_too_few_clients_reach_are_merged(trained: Result, least: int) -> None:
    """Every bin has calibration rows of enough clients, and the threshold is the end of the bin of the exact one."""
    fine = fl.analyze("conformal", trained, bins=64, alpha=0.4).table
    rules = {"min_subjects": least, "min_clients": 3}
    found = fl.analyze("conformal", trained, bins=64, alpha=0.4, rules=rules)
    assert [one.question.name for one in found.log] == ["reached", "scores", "coverage"]
    counts = found.log[1].total
    assert (counts >= 3 * least).all()
    assert counts.sum() == fine["rows"][0].as_py()
    assert len(counts) < 64
    exact, merged = fine["threshold"][0].as_py(), found.table["threshold"][0].as_py()
    ends = Conformal(bins=64)._find_edges(found.log[0].total.view(1, -1), fl.analyses.AnalysisTerms(
        None, torch.zeros(5), fl.analyses.Rules(**rules)))[0]  # fmt: skip
    assert merged == min(end for end in ends if end / 64 >= exact) / 64
    with pytest.raises(Refused, match="clients have 500 subjects that calibrate, but 3 clients are needed"):
        fl.analyze("conformal", trained, rules={**rules, "min_subjects": 500})


@pytest.fixture(scope="module")
def numbers() -> Result:
    """A regression at five clients."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 3))
    y = 20 + 4 * x @ [1.0, -0.5, 0.2] + 2 * rng.normal(size=600)
    frame = pd.DataFrame(x, columns=list("abc")).assign(y=y, site=np.arange(600) % 5)
    data = fl.Dataset.create(frame, "y", client_column="site", task="regression")
    fed = fl.partitions.natural(test=0.5)(data, seed=0)
    return fl.simulate("fedavg-ft", fed, rounds=5, model=fl.models.Softmax(), local=fl.LocalSGD(lr=0.05))


def residuals(result: Result, client: int) -> np.ndarray:
    """Absolute residuals of all test rows of a client, by the global model."""
    fed = result.job.eval_fed
    rows = fed.indices("test", client)
    outputs = result.job.oracle.run(result.models.rows("global"), fed.fetch(rows)).double()
    return (outputs - fed.data.y[rows].view(-1, 1)).abs().flatten().numpy()


def test_intervals_of_numbers_have_the_exact_quantiles_but_for_a_bin(numbers: Result) -> None:
    found = fl.analyze("conformal", numbers, calibration_fraction=1 - 1e-9, by_client=True, max_error=50.0, bins=5000)
    table = found.table.to_pandas()
    for client in range(5):
        own = np.sort(residuals(numbers, client))
        exact = own[math.ceil((len(own) + 1) * 0.9 - 1e-9) - 1]
        assert 0 <= table.threshold[client] - exact <= 50 / 5000 + 1e-9
    shared = fl.analyze("conformal", numbers).table.to_pandas()
    assert shared.interval_width[0] == 2 * shared.threshold[0]
    predictions = Predictions(numbers.models.recipe.facts, np.array([[1.0], [2.0]]), ["global"] * 2)
    written = predictions.apply_threshold(None, 0.5).table()
    assert written["prediction from"].to_pylist() == [0.5, 1.5]
    assert written["prediction to"].to_pylist() == [1.5, 2.5]


@pytest.mark.parametrize("by_client", [False, True])
def test_intervals_are_those_of_crepes(numbers: Result, by_client: bool) -> None:
    crepes = pytest.importorskip("crepes")
    analysis = Conformal(by_client=by_client, max_error=50.0, bins=100_000)
    table = fl.analyze(analysis, numbers).table.to_pandas()
    parts = [split_rows(numbers, client, analysis) for client in range(5)]
    joined = parts if by_client else [tuple(map(np.concatenate, zip(*parts, strict=True)))]
    for (output, target, drawn), limit in zip(joined, table.threshold, strict=True):
        oracle = crepes.ConformalRegressor().fit(residuals=target[drawn] - output[drawn, 0])
        wanted = oracle.predict_int(output[~drawn, 0], confidence=0.9)
        found = output[~drawn] + [[-limit, limit]]
        assert np.abs(found - wanted).max() <= 50 / 100_000 + 1e-9


def test_mean_coverage_of_intervals_is_the_theorems(numbers: Result) -> None:
    """As for sets, and a threshold beyond the bins is infinite: every interval covers."""
    tables = [fl.analyze("conformal", numbers, draw=draw, max_error=50.0).table.to_pandas() for draw in range(100)]
    coverage, rows = (np.array([table[name][0] for table in tables]) for name in ("coverage", "rows"))
    slack = 3 * coverage.std() / 10
    assert 0.9 - slack <= coverage.mean() <= 0.9 + np.mean(1 / (rows + 1)) + 0.02 + slack
    found = fl.analyze("conformal", numbers, max_error=1e-3)
    beyond = found.table.to_pandas()
    assert (beyond.threshold[0], beyond.coverage[0]) == (math.inf, 1.0)
    asked = found.log[-1].question
    sent = Question.decode(asked.encode(), Conformal.questions)
    assert torch.equal(sent.values["thresholds"], asked.values["thresholds"]), "sites read the question of a run"


@pytest.mark.slow
def test_thresholds_are_those_of_crepes(numbers: Result) -> None:
    crepes = pytest.importorskip("crepes")
    table = fl.analyze(
        "conformal", numbers, calibration_fraction=1 - 1e-9, by_client=True, max_error=50.0, bins=50_000
    ).table.to_pandas()
    for client in range(5):
        reference = crepes.ConformalRegressor().fit(residuals(numbers, client))
        low, high = reference.predict_int(np.zeros(1), confidence=0.9)[0]
        assert table.threshold[client] == pytest.approx((high - low) / 2, abs=50 / 50_000 + 1e-9)


def test_it_obeys_the_laws(trained: Result, numbers: Result) -> None:
    fl.testing.check_analysis(Conformal(), trained)
    fl.testing.check_analysis(Conformal(), numbers)
    fl.testing.check_analysis(Conformal(by_client=True), trained, without=["union"])


def test_what_it_cannot_be_of_is_a_sentence(trained: Result) -> None:
    wrong = Predictions(trained.models.recipe.facts, np.zeros((1, 10)), ["global"])
    with pytest.raises(ConfigError, match="threshold of the sets must be greater than 0, got 0"):
        wrong.apply_threshold(None, 0.0)
    with pytest.raises(ConfigError, match="needs trained models, but no run was given"):
        fl.analyze("conformal", fl.load("digits"))
    with pytest.raises(Refused, match="omit max_error|Omit max_error"):
        fl.analyze("conformal", trained, max_error=3.0)
    fed = fl.partitions.iid(clients=3)(fl.load("digits"), seed=0)
    chosen = fl.simulate("fedavg", fed, rounds=1, evaluate=Evaluate(select_on="test"))
    with pytest.raises(Refused, match="selects the round on the test set"):
        fl.analyze("conformal", chosen)
    plain = fl.simulate("fedavg", fed, rounds=1)
    with pytest.raises(Refused, match="no personal model"):
        fl.analyze("conformal", plain, model_kind="personal")
    untested = fl.partitions.iid(clients=3, test=0.0)(fl.load("digits"), seed=0)
    with pytest.raises((DataError, ConfigError, Refused)):
        fl.analyze("conformal", fl.simulate("fedavg", untested, rounds=1))


def test_numbers_of_clients_that_no_flags_give_are_rejected() -> None:
    """A client that reaches a bin reaches all ranges around the bin."""
    ranges = make_bin_ranges(10)
    bins = torch.tensor([0, 0, 3, 9, 9])
    flags = flag_ranges(bins, torch.arange(5), ranges, 2)
    check_reached(3 * flags, ranges, 3)
    for place, value in ((ranges.index((5, 6)), 2.0), (0, 2.0), (0, 4.0), (0, float("nan")), (3, 0.5)):
        forged = (3 * flags).index_fill(0, torch.tensor([place]), value)
        with pytest.raises(Refused, match="invalid `reached`"):
            check_reached(forged, ranges, 3)


def test_a_slightly_larger_draw_is_another_set_of_rows(trained: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two draws that differ in few rows would show the scores of these rows, so both parts of a draw are remembered."""
    sizes, answer = list[list[int]](), Conformal.answer

    def recorded(self: Conformal, question: Any, client: Any, terms: Any) -> Any:
        if question.name == "coverage":
            sizes.append([len(part) for part in self.row_sets(client, terms)])
        return answer(self, question, client, terms)

    monkeypatch.setattr(Conformal, "answer", recorded)
    for draw in (0.5, 0.53):
        fl.analyze("conformal", trained, calibration_fraction=draw)
    for first, second in zip(sizes[:5], sizes[5:], strict=True):
        assert sum(first) == sum(second)
        assert first[0] <= second[0]
    assert sizes[:5] != sizes[5:]
