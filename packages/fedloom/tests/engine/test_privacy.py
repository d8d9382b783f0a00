"""Epsilon: against closed forms of the Gaussian mechanism, and recorded for the client that sent most."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch

from fedloom.algorithms import Delta, FedAvg, FedRep, Model
from fedloom.choose import (
    SAMPLERS,
    WEIGHERS,
    Bernoulli,
    Clustered,
    FairFedWeigher,
    PowerOfChoice,
    RoundRobin,
    Uniform,
    UniformWeigher,
)
from fedloom.data import load
from fedloom.data.federation import Federation
from fedloom.data.partitions import Iid
from fedloom.engine import privacy
from fedloom.engine.result import Result
from fedloom.engine.setting import Engine, Evaluate
from fedloom.engine.simulate import simulate
from fedloom.errors import ConfigError, Refused
from fedloom.local import LocalSGD, Nothing, Work
from fedloom.models import MLP
from fedloom.rows.channels import Clip, GaussianNoise, Sign

Phi = NormalDist().cdf
DELTA = 1e-5


def exact_delta(epsilon: float, mu: float) -> float:
    """Of one Gaussian mechanism with sensitivity mu and unit noise (Balle and Wang, ICML 2018, Theorem 8)."""
    return Phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * Phi(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("multiplier", "times"), [(1.0, 1), (2.0, 10), (5.0, 60), (30.0, 1000)])
def test_privacy_losses_are_exact_for_gaussians(multiplier: float, times: int) -> None:
    """k Gaussian mechanisms are one with sensitivity sqrt(k) (Dong, Roth, Su, 2022, Corollary 3.3)."""
    found = privacy.composed_epsilon(multiplier, times, DELTA, "pld")
    mu = math.sqrt(times) / multiplier
    assert exact_delta(found, mu) <= DELTA  # never less than the truth
    assert exact_delta(found * 0.99 - 1e-3, mu) > DELTA


@pytest.mark.parametrize(("multiplier", "times"), [(1.0, 1), (2.0, 10), (5.0, 60), (30.0, 1000)])
def test_renyi_divergences_by_their_formula(multiplier: float, times: int) -> None:
    """alpha k / (2 z^2), turned into epsilon by Canonne, Kamath, Steinke, 2020, Proposition 12, at the best alpha."""

    def at(alpha: float) -> float:
        divergence = alpha * times / (2 * multiplier**2)
        return divergence + math.log1p(-1 / alpha) - math.log(DELTA * alpha) / (alpha - 1)

    best = min(at(1 + 10 ** (k / 1000)) for k in range(-2000, 3000))
    found = privacy.composed_epsilon(multiplier, times, DELTA, "rdp")
    assert best * (1 - 1e-9) <= found <= 1.02 * best
    assert found > privacy.composed_epsilon(multiplier, times, DELTA, "pld")


def test_nothing_sent_is_nothing_spent() -> None:
    for accountant in ("rdp", "pld"):
        assert privacy.composed_epsilon(1.0, 0, DELTA, accountant) == 0.0


def test_replacing_an_upload_is_twice_the_distance_of_having_none() -> None:
    loud, quiet = (GaussianNoise(sigma=s, delta=DELTA) for s in (8.0, 4.0))
    assert privacy.epsilon(loud, 7) == privacy.epsilon(quiet.with_(neighbours="zero"), 7)
    assert privacy.epsilon(loud, 7) == privacy.composed_epsilon(4.0, 7, DELTA, "pld")
    rdp = loud.with_(accountant="rdp")
    assert privacy.epsilon(rdp, 7) == privacy.composed_epsilon(4.0, 7, DELTA, "rdp")
    assert privacy.epsilon(loud.with_(clip=5.0), 7) == privacy.epsilon(loud, 7)  # noise is in units of clip


@pytest.fixture(scope="module")
def fed() -> Federation:
    return Iid(clients=5)(load("digits"), seed=0)


CHANNEL = GaussianNoise(sigma=5.0, delta=DELTA)


def run(fed: Federation, **changes: Any) -> Result:
    settings: dict[str, Any] = {
        "algorithm": FedAvg(), "model": "softmax", "rounds": 4, "upload_transform": CHANNEL,
        "sampler": Uniform(clients=3),
        "local": LocalSGD(steps=1, batch_size=4), "evaluate": Evaluate(every=2, parts=("test",)), **changes,
    }  # fmt: skip
    return simulate(fed=fed, **settings)


def epsilons(result: Result) -> dict[int, float]:
    return {r.round: float(r.values[0]) for r in result.state.records.items if r.metric == "epsilon"}


@pytest.mark.parametrize("sampler", [RoundRobin(clients=3), Uniform(clients=3), Bernoulli(probability=0.4)])
def test_the_worst_client_is_recorded_and_sampling_amplifies_nothing(fed: Federation, sampler: Any) -> None:
    result = run(fed, sampler=sampler)
    job, counts, want = result.job, torch.zeros(5, dtype=torch.long), {0: 0.0}
    for t in range(1, 5):
        counts[sampler.apply(Nothing(), None, job.ctx(t))[0]] += 1
        want[t] = privacy.composed_epsilon(2.5, int(counts.max()), DELTA, "pld")
    assert epsilons(result) == {t: want[t] for t in (0, 2, 4)}
    assert torch.equal(result.state.uploads, counts)
    totals = result.table().filter(result.table()["metric"].to_numpy() == "epsilon")
    assert set(totals["client"].to_pylist()) == {-1}


def test_who_is_drawn_by_uploads_counts_every_round(fed: Federation) -> None:
    result = run(
        fed, sampler=Clustered(clients=1, by="similarity"), rounds=3, evaluate=Evaluate(every=3, parts=("test",))
    )
    assert int(result.state.uploads.max()) <= 3
    assert epsilons(result)[3] == privacy.composed_epsilon(2.5, 3, DELTA, "pld")


class Silent(FedAvg):
    """FedAvg whose client 3 sends something that is not finite."""

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        up, rows = super().client(down, rows, work)
        return Delta(torch.where(work.ids[:, None] == 3, torch.nan, up.dw)), rows


def test_what_was_sent_in_vain_was_sent(fed: Federation) -> None:
    result = run(fed, algorithm=Silent(), sampler=Uniform())
    assert result.state.totals[-1] == 4
    assert result.state.uploads.tolist() == [4] * 5


def test_no_figure_without_delta_or_noise(fed: Federation) -> None:
    for channel in (None, Clip(), GaussianNoise(sigma=5.0)):
        assert epsilons(run(fed, upload_transform=channel, rounds=1)) == {}
    with pytest.raises(ConfigError, match="sigma must be greater than 0"):
        GaussianNoise(sigma=0.0, delta=DELTA)


def test_what_is_sent_without_noise_is_refused(fed: Federation) -> None:
    for changes, name in (
        ({"aggregation_weights": FairFedWeigher()}, "aggregation_weights 'fairfed'"),
        ({"sampler": PowerOfChoice(clients=2)}, "sampler 'power-of-choice'"),
        ({"sampler": PowerOfChoice(clients=2, estimate="last")}, "sampler 'power-of-choice'"),
    ):
        with pytest.raises(Refused, match=name):
            run(fed, **changes)
        run(fed, rounds=1, upload_transform=CHANNEL.with_(delta=None), **changes)
    for kind in set(SAMPLERS) - {"power-of-choice"}:
        privacy.check_privacy(FedAvg(), CHANNEL, None, SAMPLERS[kind](), UniformWeigher())
    privacy.check_privacy(FedAvg(), CHANNEL, None, Uniform(), WEIGHERS["samples"]())


def test_missing_accountant_says_what_to_install(fed: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"fedloom\[privacy\]"):
        run(fed)
    assert epsilons(run(fed, upload_transform=GaussianNoise(sigma=5.0), rounds=1)) == {}


def test_counts_survive_a_resume(fed: Federation, tmp_path: Path) -> None:
    class Stopped(BaseException):
        pass

    def stop(state: Any) -> None:
        if state.round == 2:
            raise Stopped

    engine = Engine(checkpoint_every=1e-9)
    with pytest.raises(Stopped):
        run(fed, folder=tmp_path, engine=engine, callbacks=[stop])
    assert epsilons(run(fed, folder=tmp_path, engine=engine)) == epsilons(run(fed))


@pytest.mark.parametrize("channel", [GaussianNoise(sigma=5.0), Sign()])
def test_what_does_not_travel_passes_no_channel(fed: Federation, channel: Any) -> None:
    """FedRep sends the body only: the server's head stays where it was, and the head's bytes are not counted."""
    result = run(fed, algorithm=FedRep(head_epochs=1), model=MLP(hidden=(8,)), upload_transform=channel, rounds=2)
    job = result.job
    body = job.messages.masks["dw"]
    start = job.setting.model.build(tuple(fed.data.shape), 10, 0)
    x0 = job.oracle.layout.vector(start, job.oracle.dtype)
    assert torch.equal(result.state.server.x[~body], x0[~body])
    assert not torch.equal(result.state.server.x[body], x0[body])
    sent = result.state.records.last("", "", "bytes_up_paper")
    assert sent is not None
    assert 0 < sent[0] <= 2 * 3 * (4 * int(body.sum()) + 4)


def test_clustered_sampling_learns_from_what_was_sent(fed: Federation) -> None:
    """Not from the model before the channel: with much noise, the server's gradients are as long as the noise."""
    sampler = Clustered(clients=5, by="similarity")
    result = run(fed, sampler=sampler, rounds=1, upload_transform=GaussianNoise(clip=1e-6, sigma=1e6))
    seen = result.state.sampler.g.norm(dim=1)
    d = result.job.oracle.layout.d
    assert ((seen[result.state.uploads > 0] / d**0.5 - 1).abs() < 0.2).all()
