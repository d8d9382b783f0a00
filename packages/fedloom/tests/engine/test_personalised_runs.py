"""The personalised methods learn digits from the clients of a round, and send what they say."""

from __future__ import annotations

from typing import Any

import pytest

from fedloom.algorithms import REGISTRY
from fedloom.choose import Uniform
from fedloom.data import load
from fedloom.data.federation import Federation
from fedloom.data.partitions import MixedSkew
from fedloom.engine.result import Result
from fedloom.engine.setting import Evaluate
from fedloom.engine.simulate import simulate
from fedloom.errors import Refused
from fedloom.local import LocalSGD
from fedloom.models import CNN, MLP

D, HEAD = 64 * 16 + 16 + 16 * 10 + 10, 16 * 10 + 10
OPTIONS: dict[str, dict[str, Any]] = {
    "pfedme": {"lam": 1.0, "eta": 0.5},
    "perfedavg": {"alpha": 0.1},
    "apfl": {"adaptive": True},
    "fedamp": {},
    "heurfedamp": {},
    "fedrep": {"head_epochs": 2},
    "fedper": {},
    "lg-fedavg": {},
    "fedbn": {"layers": ("fc1.bias", "head.bias")},
    "fedspa": {},
    "lp-proj": {"lam": 0.1, "local_rounds": 2},
    "admm-lp-proj": {},
    "flame": {"eps0": 1e-4, "most": 20},
}


@pytest.fixture(scope="module")
def fed() -> Federation:
    return MixedSkew(clients=10, labels_per_client=3, alpha=0.5)(load("digits"), seed=0)


def run(fed: Federation, name: str, **changes: Any) -> Result:
    settings: dict[str, Any] = {
        "rounds": 12,
        "local": LocalSGD(lr=0.1, epochs=2, batch_size=10),
        "sampler": Uniform(fraction=0.5),
        "evaluate": Evaluate(every=12),
        **changes,
    }
    model = settings.pop("model", MLP(hidden=(16,)))
    return simulate(REGISTRY[name](**OPTIONS[name]), fed, model, **settings)


def bytes_up(result: Result, rounds: int) -> float:
    total = result.state.records.last("", "", "bytes_up_paper")
    assert total is not None
    return float(total[0]) / (4 * 5 * rounds)


@pytest.mark.parametrize("name", OPTIONS)
def test_it_learns_with_half_of_the_clients_in_a_round(fed: Federation, name: str) -> None:
    result = run(fed, name)
    assert float(result.final("personal").nanmean()) > 0.4


SENT = {
    "pfedme": D,
    "apfl": D,
    "fedamp": D,
    "fedrep": D - HEAD,
    "fedper": D - HEAD,
    "lg-fedavg": HEAD,
    "fedbn": D - 26,
    "lp-proj": 10,
    "admm-lp-proj": 10,
}


@pytest.mark.parametrize("name", SENT)
def test_uploads_are_as_long_as_the_card_says(fed: Federation, name: str) -> None:
    result = run(fed, name, rounds=2, local=LocalSGD(lr=0.1, steps=1))
    assert bytes_up(result, 2) == SENT[name]


def test_fedspa_sends_no_more_than_its_density(fed: Federation) -> None:
    """Less where gradients are zero: pixels that are always black."""
    result = run(fed, "fedspa", rounds=2, local=LocalSGD(lr=0.1, steps=1))
    most = (D - 26) / 2 + 26
    assert most / 2 < bytes_up(result, 2) <= most + 1


def test_fedbn_on_a_network_with_batch_normalisation(fed: Federation) -> None:
    net = CNN(channels=(4,), kernel=3, norm="batch", hidden=())
    local, half = LocalSGD(lr=0.1, batch_size=20), Uniform(fraction=0.5)
    result = simulate(REGISTRY["fedbn"](), fed, net, rounds=4, local=local, sampler=half, evaluate=Evaluate(every=4))
    assert float(result.final("personal").nanmean()) > 0.5


def test_fedbn_refuses_a_network_without_normalisation(fed: Federation) -> None:
    with pytest.raises(Refused, match="the model has no normalization layers"):
        simulate(REGISTRY["fedbn"](), fed, MLP(hidden=(16,)), rounds=1)
