"""Calibration and importance by sums equal scikit-learn's figures of all clients' test rows together."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import accuracy_score, brier_score_loss

import fedloom as fl
from fedloom.analyses import resolve_analysis
from fedloom.engine.result import Result
from fedloom.errors import Refused


def run_of(target: np.ndarray, task: str) -> Result:
    rows = load_breast_cancer()
    table = pd.DataFrame(rows.data[:, :5], columns=list("abcde")).assign(y=target, site=np.arange(len(target)) % 5)
    data = fl.Dataset.create(table, "y", client_column="site", task=task)
    fed = fl.partitions.natural(test=0.4)(data, seed=0)
    return fl.simulate("fedavg", fed, rounds=3, model=fl.models.Softmax(), local=fl.LocalSGD(lr=0.1))


@pytest.fixture(scope="module")
def trained() -> Result:
    return run_of(load_breast_cancer().target, "binary")


def scores(result: Result) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of the second class of all test rows, and their classes."""
    fed, row = result.job.eval_fed, result.models.rows("global")
    rows = torch.cat([fed.indices("test", k) for k in range(fed.n)])
    outputs = result.job.oracle.run(row, fed.fetch(rows)).double()
    return outputs.sigmoid().flatten().numpy(), fed.data.y[rows].numpy()


def test_calibration_is_scikit_learns(trained: Result) -> None:
    p, y = scores(trained)
    found = fl.analyze("calibration", trained).table.to_pandas()
    observed, predicted = calibration_curve(y, p, n_bins=10)
    np.testing.assert_allclose(found.observed, observed, atol=1e-12)
    np.testing.assert_allclose(found.predicted, predicted, atol=1e-7)
    assert found.brier[0] == pytest.approx(brier_score_loss(y, p), abs=1e-7)
    error = (found.rows * (found.observed - found.predicted).abs()).sum() / len(y)
    assert found.calibration_error[0] == pytest.approx(error)
    merged = fl.analyze("calibration", trained, rules={"min_subjects": 3, "min_clients": 4}).table.to_pandas()
    came = merged.rows * merged.observed
    assert (came.round() >= 12).all()
    assert ((merged.rows - came).round() >= 12).all(), "a bin without the outcome would be a small cell too"
    assert merged.rows.sum() == len(y)
    assert len(merged) < len(found)
    assert merged.brier[0] == found.brier[0]


def test_importance_is_the_loss_on_permuted_columns(trained: Result) -> None:
    """Unpermuted figures are scikit-learn's. Losses are those of random permutations within clients."""
    p, y = scores(trained)
    found = fl.analyze("pooled-importance", trained).table.to_pandas().set_index(["column", "metric"])
    assert found.unpermuted["a", "accuracy"] == accuracy_score(y, p > 0.5)
    assert found.unpermuted["a", "brier"] == pytest.approx(brier_score_loss(y, p), abs=1e-7)
    fed, row = trained.job.eval_fed, trained.models.rows("global")
    worse = []
    for column in range(5):
        losses = []
        for seed in range(30):
            draw, total = np.random.default_rng(seed), 0.0
            for k in range(fed.n):
                x, label = fed.fetch(fed.indices("test", k)), fed.data.y[fed.indices("test", k)].numpy()
                x[:, column] = x[draw.permutation(len(x)), column]
                total += ((trained.job.oracle.run(row, x).double().sigmoid().flatten().numpy() - label) ** 2).sum()
            losses.append(total / len(y) - brier_score_loss(y, p))
        worse.append((np.mean(losses), np.std(losses)))
    for column, (mean, spread) in zip("abcde", worse, strict=True):
        assert found.value[column, "brier"] == pytest.approx(mean, abs=3 * spread)  # a mean of five permutations


def test_they_obey_the_laws_and_refuse_what_is_no_sum(trained: Result) -> None:
    """Outputs of a batch are float32, so the union differs in its last digits."""
    for name in ("calibration", "pooled-importance"):
        fl.testing.check_analysis(resolve_analysis(name, {}), trained, without=["union"])
        with pytest.raises(Refused, match="no personal model"):
            fl.analyze(name, trained, model_kind="personal")
    alone = fl.simulate("local", trained.job.eval_fed, rounds=1)  # it has personal models only
    assert fl.analyze("calibration", alone).table == fl.analyze("calibration", alone, model_kind="personal").table
    numbers = run_of(load_breast_cancer().data[:, 7], "regression")
    with pytest.raises(Refused, match="for the task binary or classification"):
        fl.analyze("calibration", numbers)
    with pytest.raises(Refused, match="for the task binary or classification"):
        fl.analyze("pooled-importance", numbers)
