"""The face of scikit-learn: its own checks, and groups that are clients."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from sklearn import config_context
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import check_estimator

import fedloom as fl
from fedloom.errors import ConfigError, DataError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(180, 3)) * [1, 10, 0.1] + [0, 5, 1]
SITES = np.repeat(["north", "south", "west"], 60)
SIGN = np.where(SITES == "south", -1, 1)
Y = np.where(SIGN * X[:, 0] > 0, "ill", "well")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["fedavg", "ditto", "local"])
@pytest.mark.parametrize("kind", ["FederatedClassifier", "FederatedRegressor"])
def test_scikit_learn_s_own_checks_pass(kind: str, method: str) -> None:
    done = check_estimator(getattr(fl.sklearn, kind)(method), on_skip=None)
    assert {one["status"] for one in done} <= {"passed", "skipped"}
    assert len([one for one in done if one["status"] == "passed"]) >= 48


def test_every_group_is_predicted_by_its_own_model() -> None:
    made = fl.sklearn.FederatedClassifier(fl.algorithms.Ditto(lam=0.01), lr=0.5).fit(X, Y, groups=SITES)
    assert made.classes_.tolist() == ["ill", "well"]
    own, shared = (made.predict(X, groups=SITES) == Y).mean(), made.score(X, Y)
    assert own > 0.9
    assert shared < 0.75, "north and west outvote south in the global model"
    proba = made.predict_proba(X, groups=SITES)
    np.testing.assert_allclose(proba.sum(1), 1)
    assert (made.classes_[proba.argmax(1)] == made.predict(X, groups=SITES)).all()
    order = RNG.permutation(len(X))
    np.testing.assert_allclose(made.predict_proba(X[order], groups=SITES[order]), proba[order], atol=1e-12)
    unknown = made.predict_proba(X[:2], groups=["east", "east"])
    np.testing.assert_array_equal(unknown, made.predict_proba(X[:2]))


def test_a_caller_s_default_device_changes_no_bit() -> None:
    def run() -> Any:
        fl.testing.check_algorithm(fl.algorithms.FedRep())
        made = fl.sklearn.FederatedClassifier("ditto", rounds=1, lr=0.5).fit(X, Y, groups=SITES)
        return made.predict_proba(X, groups=SITES)

    want = run()
    with torch.device("meta"):
        np.testing.assert_array_equal(run(), want)


@pytest.mark.parametrize("fitted", [int, float, str, object])
@pytest.mark.parametrize("predicted", [int, float, str, object])
def test_groups_are_the_same_as_numbers_and_as_text(fitted: type, predicted: type) -> None:
    """As the column of a table that has gaps elsewhere, which makes whole numbers 1.0."""
    codes = np.array([{"north": 2, "south": 10, "west": 7}[site] for site in SITES])
    made = fl.sklearn.FederatedClassifier("ditto", rounds=1, lr=0.5).fit(X, Y, groups=codes.astype(fitted))
    proba = made.predict_proba(X, groups=codes.astype(predicted))
    for code in (2, 10, 7):
        here = codes == code
        np.testing.assert_array_equal(proba[here], made.models_[str(code)].scores(torch.tensor(X[here])))


def test_a_method_without_a_global_model_asks_for_groups() -> None:
    made = fl.sklearn.FederatedClassifier("local", rounds=3).fit(X, Y, groups=SITES)
    assert made.predict(X[:2], groups=["west", "north"]).shape == (2,)
    with pytest.raises(DataError, match="local has no global model.*'north', 'south', 'west'"):
        made.predict(X)
    alone = fl.sklearn.FederatedClassifier("local", rounds=3).fit(X, Y)
    assert alone.predict(X).shape == (180,)


def test_a_regression_has_the_units_of_its_target() -> None:
    y = 4000 * X[:, 0] + 300 * X[:, 1] + 1e6
    made = fl.sklearn.FederatedRegressor(rounds=40).fit(X, y, groups=SITES)
    assert made.score(X, y) > 0.95
    assert made.predict(X).mean() == pytest.approx(1e6, rel=0.01)


def test_several_labels_of_a_row_are_predicted() -> None:
    y = np.stack([X[:, 0] > 0, X[:, 1] > 5, SIGN * X[:, 0] > 0], 1)
    made = fl.sklearn.FederatedClassifier("ditto", rounds=15, lr=1.0).fit(X, y, groups=SITES)
    proba, found = made.predict_proba(X, groups=SITES), made.predict(X, groups=SITES)
    assert (made.multilabel_, made.classes_.tolist(), found.dtype) == (True, [0, 1, 2], y.dtype)
    assert (found == (proba >= 0.5)).all()
    assert made.score(X, y, groups=SITES) == (found == y).all(1).mean() > 0.7
    assert (made.fit(X, csr_array(y.astype(int)), groups=SITES).predict(X, groups=SITES) == found).all()
    assert cross_val_score(made.set_params(clients=3, method="fedavg"), X, y[:, :2], cv=2).mean() > 0.7
    with pytest.raises(DataError, match=r"y of shape \[180, 2\] must contain only 0 and 1, with one column per label"):
        made.fit(X, np.stack([SIGN, SIGN], 1))
    leaky = np.column_stack([X, y[:, 1]])
    assert any("label 1" in note for note in made.fit(leaky, y).notes_)


def test_it_works_with_the_tools_of_scikit_learn() -> None:
    made = fl.sklearn.FederatedClassifier(rounds=4, clients=3)
    assert clone(made).get_params() == made.get_params()
    assert made.set_params(lr=0.3).lr == 0.3
    scores = cross_val_score(make_pipeline(PolynomialFeatures(2), made), X, Y, cv=2)
    assert scores.shape == (2,)
    found = GridSearchCV(made, {"lr": [1e-4, 2.0]}, cv=2).fit(X, np.where(X[:, 0] > 0, 1, 0))
    assert found.best_params_ == {"lr": 2.0}
    assert found.best_score_ > 0.8


def test_scores_of_a_search_go_to_the_groups_where_they_are_routed() -> None:
    """As scikit-learn routes metadata, to fit and to score; a method without a global model needs them for both."""
    made = fl.sklearn.FederatedClassifier("local", rounds=4)
    with config_context(enable_metadata_routing=True):
        routed = clone(made).set_fit_request(groups=True).set_score_request(groups=True)
        found = GridSearchCV(routed, {"lr": [1e-4, 2.0]}, cv=StratifiedKFold(2, shuffle=True)).fit(X, Y, groups=SITES)
        assert found.best_params_ == {"lr": 2.0}
        assert found.best_score_ > 0.8
        assert found.score(X, Y, groups=SITES) > 0.9
    fitted = made.set_params(lr=2.0).fit(X, Y, groups=SITES)
    right = fitted.predict(X, groups=SITES) == Y
    assert fitted.score(X, Y, groups=SITES) == pytest.approx(right.mean())
    assert fitted.score(X, Y, right, groups=SITES) == 1.0
    values = fl.sklearn.FederatedRegressor("local", rounds=9).fit(X, SIGN * X[:, 0], groups=SITES)
    assert values.score(X, SIGN * X[:, 0], groups=SITES) > 0.9
    with pytest.raises(DataError, match="no global model"):
        values.score(X, X[:, 0])


def test_the_same_seed_gives_the_same_model() -> None:
    def made(**more: Any) -> np.ndarray[Any, Any]:
        return fl.sklearn.FederatedClassifier(rounds=2, clients=2, **more).fit(X, Y).predict_proba(X)

    assert np.array_equal(made(), made())
    assert not np.array_equal(made(), made(random_state=1))
    assert np.array_equal(*(made(random_state=np.random.RandomState(3)) for _ in range(2)))


def test_what_cannot_be_learned_is_a_sentence() -> None:
    made = fl.sklearn.FederatedClassifier(rounds=1)
    with pytest.raises(DataError, match="groups has 3 entries for 180 rows"):
        made.fit(X, Y, groups=["a", "b", "c"])
    for gap in (None, float("nan")):
        with pytest.raises(DataError, match=r"groups: row 2 has no value \(178 such rows\). Pass a value for each"):
            made.fit(X, Y, groups=np.array([1.0, 2.0, *[gap] * 178], dtype=object))
    with pytest.raises(DataError, match="one class, 'ill'"):
        made.fit(X, ["ill"] * 180)
    with pytest.raises(ConfigError, match="did you mean 'fedavg'"):
        fl.sklearn.FederatedClassifier("fedavgg").fit(X, Y)
    with pytest.raises(ValueError, match="lr"):
        fl.sklearn.FederatedClassifier(lr=-1).fit(X, Y)


def test_settings_add_to_the_estimator_s_own() -> None:
    """A table changes its options alone, classes go by their names; what has a parameter is refused with its name."""

    def made(**more: Any) -> np.ndarray[Any, Any]:
        return fl.sklearn.FederatedClassifier(rounds=2, **more).fit(X, Y, groups=SITES).predict_proba(X)

    assert np.array_equal(made(lr=0.3, settings={"local": {"momentum": 0.0}}), made(lr=0.3))
    assert np.array_equal(made(settings={"local": {"lr": 0.3}}), made(lr=0.3))
    assert not np.array_equal(made(lr=0.3, settings={"local": {"momentum": 0.9}}), made(lr=0.3))
    weighted = made(settings={"task": {"class_weights": {"ill": 9.0}}})
    assert weighted[:, 0].mean() > made()[:, 0].mean() + 0.1
    for key, name in (("rounds", "rounds"), ("seed", "random_state"), ("model", "model")):
        with pytest.raises(ConfigError, match=f"settings: '{key}' is already set by the estimator.*give {name}="):
            made(settings={key: 1})
    momentum = made(lr=0.3, settings={"local": {"momentum": 0.9}})
    assert np.array_equal(made(lr=0.3, settings={"local": fl.LocalSGD(momentum=0.9)}), momentum)
    assert np.array_equal(made(settings={"local": fl.LocalSGD(lr=0.3, momentum=0.9)}), momentum)
    with pytest.raises(ConfigError, match="settings: 'local' is .*give its options"):
        made(settings={"local": 0.1})


def test_a_fit_that_diverges_warns() -> None:
    with pytest.warns(ConvergenceWarning, match="diverged"):
        fl.sklearn.FederatedRegressor(rounds=9, lr=1e9).fit(X, X[:, 0], groups=SITES)


def test_scikit_learn_is_imported_when_it_is_asked_for() -> None:
    code = "import sys, fedloom as fl; assert 'sklearn' not in sys.modules; fl.sklearn; assert 'sklearn' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
