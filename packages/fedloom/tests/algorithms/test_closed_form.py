"""Closed-form heads are scikit-learn's on all rows together, however rows lie at clients and whoever comes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from torch import Tensor, nn

import fedloom as fl
from fedloom.algorithms import REGISTRY, Algorithm, AnalyticFL, Fed3R, FedHiP, primary_field, upload_fields
from fedloom.algorithms._statistics import outputs_of, width_of
from fedloom.algorithms.fedhip import SHARES_TRIED
from fedloom.errors import Refused
from fedloom.testing.federate import ReferenceFederation, federate, personal_models
from fedloom.testing.network import CLIENT_SIZES, Classifier

NETWORK = Classifier.create()
COUNT = sum(CLIENT_SIZES)
OWNER = np.repeat(np.arange(len(CLIENT_SIZES)), CLIENT_SIZES)


def features() -> np.ndarray:
    """The inputs of the last layer under the initial body."""
    body = nn.Sequential(*list(NETWORK.module)[:-1]).double().eval()  # type: ignore[call-overload]
    with torch.no_grad():
        return body(NETWORK.x.double()).numpy()


def targets() -> np.ndarray:
    return np.eye(NETWORK.classes)[NETWORK.y.numpy()]


def run(method: Algorithm, rounds: int = 1, cohorts: Sequence[Sequence[int]] | None = None) -> Tensor:
    problem = (NETWORK.oracle(), NETWORK.x0, NETWORK.alpha)
    model = method.global_model(federate(method, problem, rounds, cohorts=cohorts)[-1].server)
    assert model is not None
    return model


def head(model: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Weight ``[c, k]`` and bias ``[c]`` of the last layer."""
    *_, weight, bias = NETWORK.layout.tree(model).values()
    return weight.numpy(), bias.numpy()


@pytest.mark.parametrize("ridge", [0.0, 0.1, 10.0])
def test_the_head_is_that_of_all_rows_together(ridge: float) -> None:
    pooled = (Ridge(alpha=ridge) if ridge else LinearRegression()).fit(features(), targets())
    model = run(AnalyticFL(ridge=ridge))
    weight, bias = head(model)
    np.testing.assert_allclose(weight, pooled.coef_, atol=1e-6)
    np.testing.assert_allclose(bias, pooled.intercept_, atol=1e-6)
    body = NETWORK.layout.d - weight.size - bias.size
    assert torch.equal(model[:body], NETWORK.x0[:body])


@pytest.mark.parametrize("method", [AnalyticFL(ridge=0.3), Fed3R(), Fed3R(bias=True), FedHiP()])
def test_it_does_not_matter_who_comes_when_and_how_often(method: Algorithm) -> None:
    once = run(method)
    for cohorts in ([[3, 1], [4], [0, 2]], [[k] for k in range(5)], [[0, 1, 2, 3, 4], [1, 2], [2]]):
        torch.testing.assert_close(run(method, len(cohorts), cohorts), once, atol=1e-10, rtol=0)


@pytest.mark.parametrize("method", [AnalyticFL(ridge=1.0), Fed3R(ridge=1.0), FedHiP(ridge=1.0)])
def test_the_partition_does_not_matter(method: Algorithm) -> None:
    """Of the same rows: one client, five by rows, and five of which each has the rows of few classes."""
    orders = [np.arange(COUNT), np.argsort(NETWORK.y.numpy(), kind="stable")]
    models = [run(method)]
    for order in orders:
        moved = replace(NETWORK, x=NETWORK.x[order], y=NETWORK.y[order])
        fed = (moved.oracle(), NETWORK.x0, NETWORK.alpha)
        models.append(federate(method, fed, 1)[-1].server.x)
    for model in models[1:]:
        torch.testing.assert_close(model, models[0], atol=1e-10, rtol=0)


def test_fed3r_is_a_ridge_without_a_bias_whose_classes_have_length_1() -> None:
    pooled = Ridge(alpha=0.01, fit_intercept=False).fit(features(), targets())
    weight, bias = head(run(Fed3R()))
    np.testing.assert_allclose(weight, pooled.coef_ / np.linalg.norm(pooled.coef_, axis=1, keepdims=True), atol=1e-6)
    assert not bias.any()
    np.testing.assert_allclose(head(run(Fed3R(normalise=False)))[0], pooled.coef_, atol=1e-6)


@pytest.mark.parametrize("normalise", [True, False])
def test_the_bias_of_fed3r_is_the_weight_of_a_constant_feature(normalise: bool) -> None:
    constant = np.hstack([features(), np.ones((COUNT, 1))])
    pooled = Ridge(alpha=2.0, fit_intercept=False).fit(constant, targets()).coef_
    lengths = np.linalg.norm(pooled[:, :-1], axis=1, keepdims=True) if normalise else 1.0
    weight, bias = head(run(Fed3R(ridge=2.0, bias=True, normalise=normalise)))
    np.testing.assert_allclose(np.column_stack([weight, bias]), pooled / lengths, atol=1e-6)


def personal(method: FedHiP) -> Tensor:
    fed = ReferenceFederation(NETWORK.oracle(), NETWORK.alpha, fl.LocalSGD())
    models = personal_models(method, fed, federate(method, (NETWORK.oracle(), NETWORK.x0, NETWORK.alpha), 1)[-1])
    assert models is not None
    return models


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_a_personal_head_is_a_ridge_in_which_others_count_less(share: float) -> None:
    for client, model in enumerate(personal(FedHiP(share=share, ridge=0.5))):
        weights = np.where(client == OWNER, 1.0, share)
        pooled = Ridge(alpha=0.5).fit(features(), targets(), sample_weight=weights)
        weight, bias = head(model)
        np.testing.assert_allclose(weight, pooled.coef_, atol=1e-6)
        np.testing.assert_allclose(bias, pooled.intercept_, atol=1e-6)


def test_the_share_of_a_client_has_the_smallest_leave_one_out_error() -> None:
    """By fitting anew without each of the client's rows, at every share that is tried."""
    z, t = features(), targets()
    for client, model in enumerate(personal(FedHiP(ridge=0.5))):
        errors, fits = [], []
        for share in SHARES_TRIED:
            weights = np.where(client == OWNER, 1.0, share)
            wrong = []
            for row in np.flatnonzero(client == OWNER):
                rest = np.arange(COUNT) != row
                fit = Ridge(alpha=0.5).fit(z[rest], t[rest], sample_weight=weights[rest])
                wrong.append(((fit.predict(z[row : row + 1]) - t[row]) ** 2).mean())
            errors.append(np.mean(wrong))
            fits.append(Ridge(alpha=0.5).fit(z, t, sample_weight=weights))
        np.testing.assert_allclose(head(model)[0], fits[int(np.argmin(errors))].coef_, atol=1e-6)


@pytest.mark.parametrize("name", ["analytic-fl", "fed3r", "fedhip"])
def test_what_is_sent_is_statistics_and_nothing_a_second_time(name: str) -> None:
    method = REGISTRY[name]()
    assert isinstance(method, Algorithm)
    kind = upload_fields(type(method))[primary_field(type(method))]
    assert kind.carries == "statistics"
    states = federate(method, (NETWORK.oracle(), NETWORK.x0, NETWORK.alpha), 2)
    assert torch.equal(states[2].server.total, states[1].server.total)
    k, c = features().shape[1], NETWORK.classes
    assert states[1].server.total.shape == (width_of(NETWORK.layout),) == ((k + 1) * (k + 2) // 2 + (k + 1) * c,)
    assert outputs_of(NETWORK.layout) == c


def test_a_linear_model_and_a_module_of_the_user_have_closed_form_heads() -> None:
    """In float32 and with other settings of local training, which change nothing."""
    fed = fl.partitions.dirichlet(clients=6, alpha=0.3)(fl.load("digits"), seed=0)
    rows = torch.cat([fed.indices("train", i) for i in range(6)])
    x, y = fed.data.x[rows].flatten(1).float() / 255 / fed.data.std.float(), np.eye(10)[fed.data.y[rows].numpy()]
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 10))
    with torch.no_grad():
        designs = {fl.models.Softmax(): x, net: net[:3](x)}
    for model, design in designs.items():
        pooled = Ridge(alpha=10.0).fit(design.double().numpy(), y)
        found = [
            fl.simulate(AnalyticFL(ridge=10.0), fed, model, rounds=1, local=fl.LocalSGD(lr=lr, batch_size=size))
            for lr, size in ((0.1, 10), (3.0, "full"))
        ]
        one, other = (result.models.rows("global") for result in found)
        assert torch.equal(one, other)
        head = one[-(design.shape[1] + 1) * 10 :]
        np.testing.assert_allclose(head[:-10].reshape(10, -1), pooled.coef_, atol=2e-5)
        np.testing.assert_allclose(head[-10:], pooled.intercept_, atol=2e-5)


@pytest.mark.parametrize("name", ["analytic-fl", "fed3r", "fedhip"])
def test_a_task_without_classes_is_refused(name: str) -> None:
    fed = fl.partitions.iid(clients=3)(fl.Dataset.create(torch.randn(60, 3), torch.randn(60)), seed=0)
    with pytest.raises(Refused, match="has no classes"):
        fl.simulate(name, fed, rounds=1)
