"""The variants of the public codes differ from the methods in the documented way, and in no other."""

from __future__ import annotations

import pytest
import torch

from fedloom.algorithms import REGISTRY, Ditto
from fedloom.algorithms.flame import FLAME, Client, Down
from fedloom.data import load
from fedloom.data.partition import Shards
from fedloom.engine.simulate import simulate
from fedloom.local import Local, Work
from fedloom.local.oracles import Quadratic
from fedloom.reproduce.as_published import AS_PUBLISHED, DittoAsPublished, FLAMEAsPublished
from fedloom.seeds import generator

DATA = load("digits")
FED = Shards(clients=4, labels_per_client=3, keep=40)(DATA, 0)


def personal(method: object, rounds: int, **local: object) -> torch.Tensor:
    result = simulate(method, FED, rounds=rounds, local=Local(lr=0.05, **local), seed=1)
    return result.job.clients.read(torch.arange(FED.n))[0]


def shared(method: object, rounds: int, **local: object) -> torch.Tensor:
    result = simulate(method, FED, rounds=rounds, local=Local(lr=0.05, **local), seed=1)
    model = result.job.algorithm.global_model(result.state.server)
    assert model is not None
    return model


def test_they_are_outside_the_registry() -> None:
    assert not set(AS_PUBLISHED.values()) & {v for v in REGISTRY.values() if isinstance(v, type)}


def test_flames_prox_centre_differs_from_the_second_round_on() -> None:
    assert torch.equal(personal(FLAMEAsPublished(), 1), personal(FLAME(), 1))
    assert torch.equal(shared(FLAMEAsPublished(), 1), shared(FLAME(), 1))
    assert not torch.allclose(personal(FLAMEAsPublished(), 2), personal(FLAME(), 2), atol=1e-4)


@pytest.mark.parametrize(("method", "centre"), [(FLAME, "w"), (FLAMEAsPublished, "x")])
def test_flame_as_published_pulls_to_the_received_model(method: type[FLAME], centre: str) -> None:
    """On b/2 ||theta - c_i||^2, solved exactly, theta_i is (b c_i + lam z)/(b + lam): z is w_i in the paper."""
    n, d, b, lam = 3, 5, 2.0, 0.7
    c, w, pi, x = (torch.randn(k, d, dtype=torch.float64, generator=generator(k)) for k in (n, n, n, 1))
    ids = torch.arange(n)
    oracle = Quadratic(b * torch.eye(d, dtype=torch.float64).expand(n, d, d), c, solve=True)
    work = Work(oracle, ids, torch.full((n, 1), 1 / n, dtype=torch.float64), Local(), seed=0)
    rows = Client(torch.zeros_like(w), w, pi, torch.zeros_like(w[:, :1]))
    _, after = method(lam=lam).client(Down(x[0]), rows, work)
    z = {"w": w, "x": x}[centre]
    assert torch.allclose(after.theta, (b * c + lam * z) / (b + lam), atol=1e-12)


def test_ditto_as_published_never_resets_its_global_branch() -> None:
    """Its global model is the mean of local runs of one batch per round: those of the method 'local'."""
    alone = REGISTRY["local"]()  # type: ignore[operator]
    runs = personal(alone, 3, steps=1)
    assert torch.allclose(shared(DittoAsPublished(), 3, epochs=1), runs.mean(0), atol=1e-6)
    assert not torch.allclose(shared(Ditto(), 3, epochs=1), runs.mean(0), atol=1e-3)


def test_ditto_as_published_has_dittos_personal_step() -> None:
    assert torch.equal(personal(DittoAsPublished(), 1), personal(Ditto(), 1))
