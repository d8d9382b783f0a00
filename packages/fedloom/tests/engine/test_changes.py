"""What a channel, an attack and a counter get of methods that upload models or take steps of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedloom.algorithms import (
    FIAELT,
    FLAME,
    IFCA,
    REGISTRY,
    Ditto,
    FedACS,
    FedADMMInexact,
    FedAvg,
    Preset,
    upload_fields,
)
from fedloom.data import load
from fedloom.data.federation import Federation
from fedloom.data.partitions import Dirichlet, Iid
from fedloom.engine.result import Result
from fedloom.engine.setting import Engine
from fedloom.engine.simulate import simulate
from fedloom.errors import Refused
from fedloom.local import LocalSGD
from fedloom.models import MLP
from fedloom.rows.attacks import SignFlip
from fedloom.rows.channels import Clip, GaussianNoise

LOCAL, MODEL = LocalSGD(lr=0.1, batch_size=20), MLP(hidden=(12,))
ABSOLUTE = [
    name
    for name, entry in REGISTRY.items()
    if not isinstance(entry, Preset) and any(k.primary and k.base == "zero" for k in upload_fields(entry).values())
]


@pytest.fixture(scope="module")
def fed() -> Federation:
    return Dirichlet(clients=4, alpha=0.3, min_size=20)(load("digits"), seed=0)


def run(fed: Federation, method: Any, **options: Any) -> Result:
    given: dict[str, Any] = {"rounds": 1, "local": LOCAL, "engine": Engine(dtype="float64"), **options}
    return simulate(method, fed, MODEL, **given)


def initial(result: Result) -> torch.Tensor:
    """The initial model, which every client receives in the first round."""
    data = result.job.fed.data
    module = MODEL.build(tuple(data.shape), len(data.classes), 0, data.tokens)
    return result.job.oracle.layout.vector(module, torch.float64)


def kept(result: Result) -> torch.Tensor:
    rows: torch.Tensor = result.job.kept.read(torch.arange(result.job.n))[0]
    return rows


def test_methods_that_upload_models_are_there() -> None:
    assert {"fedacs", "flame", "fedamp", "fedpd", "feddr", "lpgd"} <= set(ABSOLUTE)


WITH_MORE = ("lpgd", "fedskip", "admm-lp-proj", "fedadmm-inexact", "fedfomo")
"""Their uploads have more than the model, and the bound is that of all."""


@pytest.mark.parametrize("name", [n for n in ABSOLUTE if n not in {*WITH_MORE, "ifca", "fedproto"}])
def test_the_change_to_the_received_model_is_clipped(fed: Federation, name: str) -> None:
    """What a server keeps lies within the bound of what the clients received."""
    plain, clipped = run(fed, name), run(fed, name, upload_transform=Clip(bound=0.01))
    received = initial(plain)
    assert torch.linalg.vector_norm(received) > 0.1
    far = torch.linalg.vector_norm(kept(plain) - received, dim=1)
    near = torch.linalg.vector_norm(kept(clipped) - received, dim=1)
    moved = far > 0.01
    assert moved.any()
    torch.testing.assert_close(near[moved], torch.full_like(near[moved], 0.01), rtol=1e-9, atol=0)
    torch.testing.assert_close(kept(run(fed, name, upload_transform=Clip(bound=1e6))), kept(plain), rtol=0, atol=1e-12)


def test_the_change_to_the_model_of_the_cluster_is_clipped(fed: Federation) -> None:
    """A model is a mean of those of its clients, which lie within the bound of it; their choice is left alone."""
    method = IFCA(clusters=3)
    plain, clipped, wide, noisy = (
        run(fed, method, upload_transform=channel)
        for channel in (None, Clip(bound=0.01), Clip(bound=1e6), GaussianNoise(clip=1e-9, sigma=1.0))
    )
    start, _, _ = method.init(initial(plain), plain.job.ctx(0))

    def moved(result: Result) -> torch.Tensor:
        change = torch.cat([*result.state.server]) - torch.cat([*start])
        return torch.linalg.vector_norm(change.view(3, -1), dim=1)

    chosen = moved(plain) > 0.01
    assert chosen[1:].any()
    assert chosen.sum() > 1
    assert ((moved(clipped) > 0) == chosen).all()
    assert moved(clipped).max() <= 0.01 * (1 + 1e-9)
    assert moved(clipped).max() > 0.005
    assert ((moved(noisy) > 0) == chosen).all()
    assert moved(noisy).max() < 1e-6
    torch.testing.assert_close(moved(wide), moved(plain), rtol=0, atol=1e-12)


def test_a_deployed_server_measures_the_change_to_the_model_of_the_cluster(fed: Federation) -> None:
    """And a site may name no cluster that is not there."""
    method = IFCA(clusters=3)
    job = run(fed, method).job
    down = method.init(initial(run(fed, method)), job.ctx(0))[0]
    models, choice = torch.cat([*down]).view(3, -1), torch.tensor([[0.0], [1.0], [2.0], [9.0]])
    sent = models[[0, 1, 2, 2]].clone()
    sent[:, 0] += torch.tensor([1.0, 2.0, 3.0, 4.0])
    up = job.upload(sent, choice.to(sent))
    protocol = pytest.importorskip("fedloom_sites.deploy.protocol.lengths")
    torch.testing.assert_close(protocol.upload_norms(job, up, down)["w"], torch.tensor([1.0, 2.0, 3.0, 4.0]).double())
    low, high = method.ranges(down, up, job.work(1, torch.arange(4)))["choice"]
    assert ((choice >= low) & (choice <= high)).flatten().tolist() == [True, True, True, False]


@pytest.mark.parametrize(("name", "field"), [("ifca", "choice"), ("fedskip", "seen")])
def test_epsilon_is_refused_beside_what_no_noise_is_added_to(fed: Federation, name: str, field: str) -> None:
    pytest.importorskip("dp_accounting")
    with pytest.raises(Refused, match=f"also upload {field} without noise"):
        run(fed, name, upload_transform=GaussianNoise(clip=1.0, sigma=1.0, delta=1e-5))


@pytest.mark.parametrize("name", ["fedacs", "flame"])
def test_noise_is_around_the_received_model_too(fed: Federation, name: str) -> None:
    noisy = run(fed, name, upload_transform=GaussianNoise(clip=1e-9, sigma=1.0))
    assert torch.linalg.vector_norm(kept(noisy) - initial(noisy), dim=1).max() < 1e-6


def test_a_bound_above_every_change_costs_fedacs_nothing(fed: Federation) -> None:
    """Clipping the models themselves, as before, left it at chance."""
    plain, clipped = (
        run(fed, FedACS(), rounds=5, upload_transform=c).final("personal") for c in (None, Clip(bound=2.0))
    )
    torch.testing.assert_close(plain, clipped, rtol=0, atol=0.02)
    assert plain.mean() > 0.5


@pytest.mark.parametrize("name", ["flame", "fedacs"])
def test_a_sign_flip_of_the_own_message(fed: Federation, name: str) -> None:
    """Its clients train, and what arrives is -|p| times what they would have sent (FLAME, V-D and Proposition 2)."""
    honest, flipped, code = (
        run(fed, name, attack=attack) for attack in (None, SignFlip(fraction=0.5, of="own"), SignFlip(fraction=0.5))
    )
    ids = SignFlip(fraction=0.5).attackers(fed.n, 0)
    for base, result in ((kept(honest)[ids], flipped), (initial(code).expand(len(ids), -1), code)):
        ratio = kept(result)[ids] / base
        torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))
        assert (ratio < 0).all()
    others = [i for i in range(fed.n) if i not in ids]
    assert torch.equal(kept(flipped)[others], kept(honest)[others])


def steps(result: Result) -> int:
    return int(result.state.totals[2])


def test_steps_of_own_solvers_count() -> None:
    fed = Iid(clients=3, test=0.2, validation=0.0, max_train_per_client=90)(load("digits"), seed=0)
    per_client = sum(-(-n // 20) for n in fed.sizes("train").tolist())
    assert steps(run(fed, FedAvg(), rounds=2)) == 2 * per_client
    assert steps(run(fed, Ditto(), rounds=2)) == 2 * 2 * per_client
    few, many = (steps(run(fed, FIAELT(solver="svrg", beta=5.0, r=0.0, iterations=2, inner=m))) for m in (10, 200))
    assert 0 < few <= 3 * 2 * 10
    assert many > 3 * few
    assert steps(run(fed, FIAELT(solver="gd", beta=5.0, r=0.0, iterations=4))) == 3 * 4
    exact = FedADMMInexact(rho=1.0, iterations=2, inner=3, eps0=1e-12)
    assert steps(run(fed, exact)) == 3 * 2 * 3
    flame = run(fed, FLAME(lam=1.0, rho=1.0, eps0=1e-30, most=7))
    assert steps(flame) == 3 * 7
    assert int(flame.state.totals[0]) == (7 + 1) * int(fed.sizes("train").sum())
