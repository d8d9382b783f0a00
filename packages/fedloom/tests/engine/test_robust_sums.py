"""Robust rules where the server adds uploads up: the rule of all clients' sums, or of the cohort's changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Generator, Tensor

from fedloom.algorithms import FIAELT, SCAFFOLD, Algorithm, FedADMM, FedDyn, FedSLR
from fedloom.choose import Uniform
from fedloom.data.federation import Federation
from fedloom.engine.simulate import simulate
from fedloom.local import LocalSGD
from fedloom.rows.aggregators import Median, MultiKrum, TrimmedMean
from fedloom.rows.attacks import Forgery, SameValue

METHODS = [FedSLR(lam=0.0), FIAELT(beta=2.0, smooth=0.4), SCAFFOLD(), FedADMM(), FedDyn()]


@pytest.fixture(scope="module")
def fed() -> Federation:
    gen = Generator().manual_seed(0)
    v, clients = torch.randn(5, generator=gen), []
    for _ in range(7):
        x = torch.randn(20, 5, generator=gen)
        y = (x @ (v + 0.3 * torch.randn(5, generator=gen)) > 0).long()
        clients.append(((x[:16], y[:16]), (x[16:], y[16:])))
    return Federation.create(clients)


def run(fed: Federation, method: Algorithm, rounds: int = 3, **choices: Any) -> Any:
    setting = {
        "local": LocalSGD(lr=0.2, steps=3, batch_size=8),
        "engine": {"dtype": "float64"},
        "client_weights": "uniform",
    }
    return simulate(method, fed, rounds=rounds, evaluate={"every": rounds}, **{**setting, **choices})


def ids(method: Algorithm) -> str:
    return type(method).__name__


@pytest.mark.parametrize("method", METHODS, ids=ids)
@pytest.mark.parametrize("clients", [7, 4])
def test_a_rule_that_trims_nobody_is_the_mean(fed: Federation, method: Algorithm, clients: int) -> None:
    """With everyone. The server's mean of sums is over all clients, the rule's value over those seen."""
    sampler = Uniform(clients=clients)
    mean, rule = (run(fed, method, sampler=sampler, aggregator=a) for a in (None, TrimmedMean(f=0)))
    same = all(
        torch.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(mean.state.server, rule.state.server, strict=True)
    )
    summed = bool(rule.job.summed_fields)
    assert same == (clients == 7 or not summed)
    assert not all(
        torch.allclose(a, b, rtol=0, atol=1e-6)
        for a, b in zip(
            mean.state.server, run(fed, method, sampler=sampler, aggregator=Median()).state.server, strict=True
        )
    )


def test_the_server_s_means_are_the_rule_s_value_of_all_clients_seen(fed: Federation) -> None:
    result = run(fed, FIAELT(beta=2.0, smooth=0.4), 4, sampler=Uniform(clients=5), aggregator=Median())
    seen = result.job.clients.occupied.nonzero()[:, 0]
    x, z, _ = result.job.clients.read(seen)
    for mean, rows in ((result.state.server.xbar, x), (result.state.server.zbar, z)):
        torch.testing.assert_close(mean, rows.quantile(0.5, 0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("clients", [7, 3])
def test_a_server_step_of_one_passes_the_rule_s_value_where_clients_are_absent(fed: Federation, clients: int) -> None:
    """By n/m in the first round, which is noted; with everyone it is that value."""
    rule = {"aggregator": Median(), "sampler": Uniform(clients=clients)}
    one, fraction = (run(fed, FedADMM(server_lr=eta), 1, **rule) for eta in (1.0, "fraction"))
    moved = [result.state.server.x - result.job.clients.template.u for result in (one, fraction)]
    torch.testing.assert_close(moved[0], 7 / clients * moved[1], rtol=0, atol=1e-12)
    assert ["server_lr = 'fraction'" in " ".join(r.notes) for r in (one, fraction)] == [clients < 7, False]


class Far(Forgery):
    """A model far away."""

    kind: Literal["far"] = "far"

    def forge(self, honest: Tensor | None, base: Tensor, benign: Tensor, m: int, gens: Sequence[Generator]) -> Tensor:
        return torch.full_like(base, 50.0)


@pytest.mark.parametrize("method", METHODS, ids=ids)
def test_an_attacker_moves_the_mean_and_not_the_rule(fed: Federation, method: Algorithm) -> None:
    """The rule's model stays near that of a run whose attacker is honest; the mean's does not."""

    def model(**choices: Any) -> Tensor:
        result = run(fed, method, 4, sampler=Uniform(fraction=1.0), **choices)
        row = result.job.algorithm.global_model(result.state.server)
        assert row is not None
        return row

    honest, far = model(), Far(fraction=1 / 7)
    for rule in (Median(), MultiKrum(f=1, k=3)):
        assert float((model(attack=far, aggregator=rule) - honest).norm()) < 2 * float(honest.norm()) + 0.5
    assert float((model(attack=far) - honest).norm()) > 5


def test_a_resumed_run_has_the_rule_s_last_values(fed: Federation, tmp_path: Path) -> None:
    def stop(state: Any) -> None:
        if state.round == 2:
            raise KeyboardInterrupt

    method, some = FIAELT(beta=2.0, smooth=0.4), {"aggregator": Median(), "sampler": Uniform(clients=5)}
    engine = {"dtype": "float64", "checkpoint_every": 1e-9}
    with pytest.raises(KeyboardInterrupt):
        run(fed, method, 4, folder=tmp_path / "a", callbacks=[stop], **{**some, "engine": engine})
    resumed, whole = (
        run(fed, method, 4, folder=tmp_path / "a", **{**some, "engine": engine}),
        run(fed, method, 4, **some),
    )
    assert all(torch.equal(a, b) for a, b in zip(resumed.state.server, whole.state.server, strict=True))


@pytest.mark.parametrize("clients", [7, 4])
def test_the_mean_of_fiaelt_holds_what_arrives_while_it_measures(fed: Federation, clients: int) -> None:
    """Attackers send something in that round too; x-bar is the mean of the x_i that are left then."""
    method = FIAELT(solver="svrg", iterations=1, inner=2)
    end = run(fed, method, sampler=Uniform(clients=clients), attack=SameValue(fraction=0.3, variance=1.0))
    x, z, _ = end.job.clients.read(torch.arange(7))
    assert end.state.server.smooth > 0
    torch.testing.assert_close(end.state.server.xbar, x.mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(end.state.server.zbar, z.mean(0), rtol=0, atol=1e-12)
