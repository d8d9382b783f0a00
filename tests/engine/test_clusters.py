"""Shares by recovered clusters: those of the planted groups, in every method that has shares, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from fedloom.algorithms import FIAELT, FLAME, Algorithm, FedAvg, FedDR, FedSLR
from fedloom.choose import EquitableWeigher
from fedloom.data.federation import Federation
from fedloom.engine.setting import Setting
from fedloom.engine.setup import check
from fedloom.engine.simulate import simulate
from fedloom.errors import ConfigError
from fedloom.local import LocalSGD
from fedloom.models import MLP
from fedloom.testing import Problem
from fedloom.testing.federate import ReferenceFederation as Clients

GROUPS = torch.tensor([0, 0, 0, 0, 1, 1])


@pytest.fixture(scope="module")
def fed() -> Federation:
    """Four clients of one group and two of another, whose samples are elsewhere."""
    clients = []
    for k, group in enumerate(GROUPS.tolist()):
        x = 0.2 * torch.randn(16, 6, generator=Generator().manual_seed(k)) + torch.eye(6)[group] * 4
        y = (x[:, 2] > 0).long()
        clients.append(((x[:12], y[:12]), (x[12:], y[12:])))
    return replace(Federation.of(clients), groups=GROUPS)


def run(fed: Federation, method: Algorithm, weights: Any, **choices: Any) -> Any:
    local = LocalSGD(lr=0.1, steps=2, batch_size=4)
    return simulate(
        method, fed, MLP(hidden=(5,)), rounds=2, local=local, weights=weights, evaluate={"every": 2}, **choices
    )


@pytest.mark.parametrize("method", [FLAME(), FedSLR(), FIAELT(), FedDR(), FedAvg()], ids=lambda m: type(m).__name__)
def test_recovered_clusters_have_the_shares_of_planted_groups(fed: Federation, method: Algorithm) -> None:
    found, planted, uniform = (run(fed, method, w) for w in ("clusters-2", "groups", "uniform"))
    assert torch.equal(found.job.alpha, planted.job.alpha)
    assert all(torch.equal(a, b) for a, b in zip(found.state.server, planted.state.server, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(found.state.server, uniform.state.server, strict=True))


def test_one_cluster_is_uniform_and_the_number_can_be_sought(fed: Federation) -> None:
    one, uniform, sought = (run(fed, FLAME(), w) for w in ("clusters-1", "uniform", "clusters"))
    assert torch.equal(one.state.server.x, uniform.state.server.x)
    torch.testing.assert_close(sought.job.alpha[:, 0], torch.tensor([0.125] * 4 + [0.25] * 2))


def test_finding_them_is_counted(fed: Federation) -> None:
    """A round of local training of all clients, and their activations for it."""
    found, planted = (run(fed, FedAvg(), w).state.totals for w in ("clusters-2", "groups"))
    d, width = 6 * 5 + 5 + 5 * 2 + 2, 5
    assert (found - planted)[[0, 2, 3, 4]].tolist() == [6 * 8, 6 * 2, 6 * 4 * width, 6 * 4 * d]


def test_refused_where_they_cannot_be(fed: Federation) -> None:
    with pytest.raises(ConfigError, match="needs as many clients"):
        run(fed, FedAvg(), "clusters-7")
    with pytest.raises(ConfigError, match="weights"):
        run(fed, FedAvg(), "clusters-x")


def test_a_check_trains_nobody(fed: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.engine.setup.cluster_shares", None)
    check(Setting.of("flame", model="mlp", weights="clusters-2"), fed)


def shares(info: Tensor, clusters: int | None) -> Tensor:
    p = Problem.random(0)
    ctx = Clients(p.oracle(), p.alpha, LocalSGD()).ctx(1, range(p.n))
    ctx = ctx._replace(n=len(info), m=len(info), ids=torch.arange(len(info)))
    weigher = EquitableWeigher(clusters=clusters)
    p_i, _ = weigher.apply(weigher.init(ctx), info, ctx)
    return p_i[:, 0] / p_i.sum()


def test_forged_activations_buy_a_cluster_of_their_own() -> None:
    """Eight clients in two groups and one forger: with C = 3 given it has a third of the model, with C sought 1/9."""
    groups = torch.eye(4, dtype=torch.float64)[[0, 0, 0, 0, 1, 1, 1, 1]]
    noise = 0.01 * torch.randn(8, 4, generator=Generator().manual_seed(0), dtype=torch.float64)
    forged = torch.tensor([[0.0, 0, 30, 0]], dtype=torch.float64)
    info = torch.cat([groups + noise, forged])
    assert float(shares(info, 3)[-1]) == pytest.approx(1 / 3)
    assert float(shares(info, 2)[-1]) >= 1 / 2 - 1e-9  # and with C = 2 the honest groups are one cluster
    assert float(shares(info, None)[-1]) < 1 / 4  # a cluster that would be a client alone is none
