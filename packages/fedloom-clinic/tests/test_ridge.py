"""Ridge by sums is scikit-learn's on the pooled rows, and its predictor is a model as any other."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

import fedloom as fl
from fedloom.errors import DataError, Refused
from fedloom_clinic.ridge import RidgeRegression

SIZES = (120, 70, 30)


def rows(task: str, seed: int = 0) -> fl.Dataset:
    """Columns of other sizes, one of them far from 0."""
    rng = np.random.default_rng(seed)
    x = np.stack([rng.normal(0, 1, sum(SIZES)), rng.normal(900, 12, sum(SIZES)), rng.integers(0, 2, sum(SIZES))], 1)
    z = x @ [1.0, 0.05, -2.0] - 45 + rng.normal(size=sum(SIZES))
    y = {"regression": 100 * z[:, None], "binary": (z > 0).astype(int), "classification": np.digitize(z, [-1, 1])}[task]
    classes = {"binary": ("no", "yes"), "classification": ("low", "mid", "high")}.get(task, ())
    users = torch.arange(3).repeat_interleave(torch.tensor(SIZES))
    return fl.Dataset(
        "rows", torch.from_numpy(x), torch.from_numpy(y), task, classes, users=users, user_names=("a", "b", "c")
    )  # type: ignore[arg-type]


def pooled(x: np.ndarray, y: np.ndarray, strength: float) -> tuple[np.ndarray, np.ndarray]:
    """Scikit-learn's coefficients per unit, and its intercept."""
    scaler = StandardScaler().fit(x)
    fit = Ridge(alpha=max(len(x) * strength, 1e-12)).fit(scaler.transform(x), y)
    weight = fit.coef_.reshape(-1, x.shape[1]) / scaler.scale_
    return weight, np.ravel(fit.intercept_) - weight @ scaler.mean_


@pytest.mark.parametrize("strength", [0.0, 0.01, 2.0])
@pytest.mark.parametrize("task", ["regression", "binary", "classification"])
def test_coefficients_are_scikit_learns(task: str, strength: float) -> None:
    data = rows(task)
    result = fl.analyze("ridge", data, strength=strength)
    y = (
        data.y
        if task == "regression"
        else torch.eye(3)[data.y]
        if task == "classification"
        else 2 * data.y[:, None] - 1
    )
    weight, bias = pooled(data.x.numpy(), y.double().numpy(), strength)
    assert result.model is not None
    np.testing.assert_allclose(result.model.weight.detach().numpy(), weight, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(result.model.bias.detach().numpy(), bias, rtol=1e-8)
    assert result.table["rows"][0].as_py() == sum(SIZES)
    assert len(result.table) == 4 * len(weight)
    assert len(result.log) == 3


def test_the_predictor_takes_the_inputs_of_a_federation() -> None:
    """Only training rows count, and the test rows are predicted better than by the largest class."""
    fed = fl.partitions.dirichlet(clients=6, alpha=0.3)(fl.load("digits"), seed=0)
    result = fl.analyze("ridge", fed, strength=0.01)
    train, test = (torch.cat([fed.indices(part, k) for k in range(6)]) for part in ("train", "test"))
    x, y = fed.fetch(train).flatten(1).double().numpy(), fed.data.y[train]
    varying = x.std(0) > 0
    weight, _ = pooled(x[:, varying], np.eye(10)[y], 0.01)
    assert result.model is not None
    np.testing.assert_allclose(result.model.weight.detach().numpy()[:, varying], weight, atol=1e-8)
    assert result.model.weight.detach()[:, ~torch.from_numpy(varying)].abs().max() < 1e-12
    right = (result.model(fed.fetch(test)).argmax(1) == fed.data.y[test]).double().mean()
    assert right > 0.9


def test_codes_have_a_number_for_each_level() -> None:
    import pandas as pd

    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"dose": rng.normal(size=90), "ward": rng.choice(["GEN", "ICU"], 90), "site": ["a", "b", "c"] * 30}
    )
    frame["y"] = frame.dose + 2.0 * (frame.ward == "ICU")
    data = fl.Dataset.create(frame, "y", client_column="site", categorical=("ward",), task="regression")
    table = fl.analyze("ridge", data, strength=1e-9).table.to_pandas().set_index("input").coefficient
    assert [*table.index] == ["dose", "ward GEN", "ward ICU", "intercept"]
    assert table["dose"] == pytest.approx(1, abs=1e-5)
    assert table["ward ICU"] - table["ward GEN"] == pytest.approx(2, abs=1e-5)


@pytest.mark.parametrize("task", ["regression", "binary", "classification"])
def test_it_obeys_the_laws(task: str) -> None:
    fl.testing.check_analysis(RidgeRegression(), rows(task))


def test_what_it_cannot_be_of_is_a_sentence() -> None:
    with pytest.raises(Refused, match="for the task regression or binary or classification"):
        fl.analyze(
            "ridge", fl.Dataset.create(np.zeros((4, 1)), np.array([[1, 1], [2, 0], [3, 1], [4, 1.0]]), task="survival")
        )
    with pytest.raises(DataError, match="outside their bounds"):
        fl.analyze("ridge", rows("regression"), max_input=100.0)


@pytest.mark.parametrize(("unit", "offset", "options"), [
    (1.0, 0.0, {}), (1e-9, 0.0, {}), (1e6, 1e9, {"max_input": 1e10}), (1.0, 0.0, {"max_input": 1e12}),
])  # fmt: skip
def test_no_unit_or_offset_makes_an_input_vanish(unit: float, offset: float, options: dict[str, float]) -> None:
    """A constant input has no coefficient, and every other one has that of scikit-learn, in units of deviations."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(200, 3)) * unit + offset).astype(np.float32).astype(float)
    x[:, 2] = offset + unit
    y = (rng.normal(size=200) + (x[:, 0] - x[:, 0].mean()) / x[:, 0].std()).astype(np.float32).astype(float)
    frame = pd.DataFrame(x, columns=["a", "b", "c"]).assign(y=y, site=np.arange(200) % 3)
    data = fl.Dataset.create(frame, "y", client_column="site", task="regression")
    table = fl.analyze("ridge", data, strength=0.1, **options).table.to_pandas()
    spread = np.where(x.std(0) > 0, x.std(0), 1.0) * [1, 1, 0] + [0, 0, 1]
    want = Ridge(alpha=20.0).fit((x - x.mean(0)) / spread * [1, 1, 0], y).coef_
    got = table[table.input != "intercept"].coefficient.to_numpy()
    np.testing.assert_allclose(got * spread, want, rtol=0, atol=1e-9)
