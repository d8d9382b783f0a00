"""Compressed changes of methods that upload absolute models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.algorithms import FLAME, IFCA, LPGD, Algorithm, FedACS, FedAvg
from fedloom.choose import Uniform
from fedloom.data.federation import Federation
from fedloom.engine.simulate import simulate
from fedloom.local import LocalSGD
from fedloom.rows.channels import QSGD, TopK


@pytest.fixture(scope="module")
def fed() -> Federation:
    g = torch.Generator().manual_seed(0)
    w = torch.randn(5, 12, generator=g)
    xs = [torch.randn(20, 12, generator=g) for _ in range(5)]
    return Federation.create(
        [((x[:16], (x[:16] @ v > 0).long()), (x[16:], (x[16:] @ v > 0).long())) for x, v in zip(xs, w, strict=True)]
    )


def run(fed: Federation, method: Algorithm, rounds: int = 3, steps: int = 3, **choices: Any) -> Any:
    local = LocalSGD(lr=0.5, steps=steps, batch_size="full")
    return simulate(
        method, fed, rounds=rounds, local=local, evaluate={"every": rounds}, engine={"dtype": "float64"}, **choices
    )


def rows(result: Any) -> Tensor:
    everyone = torch.arange(result.job.n)
    return torch.cat([row.flatten() for row in (*result.state.server, *result.job.kept.read(everyone))])


def bytes_up(result: Any) -> float:
    return float(result.state.totals[3])


@pytest.mark.parametrize("method", [FLAME(), FedACS(), LPGD(), IFCA(clusters=2)], ids=lambda m: type(m).__name__)
def test_all_that_is_sent_is_the_method_itself_and_a_part_is_not(fed: Federation, method: Algorithm) -> None:
    bare = run(fed, method)
    whole, part = (run(fed, method, upload_transform=TopK(fraction=f)) for f in (1.0, 0.25))
    torch.testing.assert_close(rows(whole), rows(bare), rtol=0, atol=1e-12)
    assert not torch.allclose(rows(part), rows(bare), rtol=0, atol=1e-6)
    assert bytes_up(part) < 0.7 * bytes_up(bare)


@pytest.mark.parametrize("channel", [TopK(fraction=0.2), pytest.param(QSGD(levels=4), marks=pytest.mark.slow)])
def test_flame_s_limit_is_stationary_with_a_compressor(fed: Federation, channel: Any) -> None:
    """A change to the last upload goes to 0 where uploads settle, and so does all that a compressor does to it.

    The limit is FLAME's (its Eqs. 15 and 16): w_i = w, pi_i = lambda alpha_i (theta_i - w), and their sum is 0.
    """
    result = run(fed, FLAME(lam=1.0, rho=0.2), 300, steps=10, upload_transform=channel, sampler=Uniform(fraction=1.0))
    theta, w, pi, _ = result.job.clients.read(torch.arange(5))
    assert float(pi.mean(0).abs().max()) < 1e-4 < 0.01 < float(pi.norm(dim=1).min())
    torch.testing.assert_close(w, result.state.server.x.expand_as(w), rtol=0, atol=1e-4)
    torch.testing.assert_close(pi, 0.2 * (theta - w), rtol=0, atol=1e-12)


def test_the_client_s_copy_is_the_server_s(fed: Federation) -> None:
    result = run(fed, FLAME(), upload_transform=TopK(fraction=0.2), sampler=Uniform(clients=3))
    everyone = torch.arange(5)
    assert torch.equal(result.job.residue.read(everyone).e, result.job.kept.read(everyone).u)


def test_differences_are_compressed_as_they_were(fed: Federation) -> None:
    """FedAvg's upload is a difference: its error feedback is the channel's own."""
    result = run(fed, FedAvg(), upload_transform=TopK(fraction=0.2))
    assert not result.job.messages.sends_change
    assert bool((result.job.residue.read(torch.arange(5)).e != 0).any())
