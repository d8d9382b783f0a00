"""Equitable-FL and presets in general: what the weigher's shares are, and what a preset is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.algorithms import PRESETS, REGISTRY, FedAvg, FedProx, Preset
from fedloom.choose import EquitableWeigher, UniformWeigher
from fedloom.errors import ConfigError
from fedloom.local import Ctx, LocalSGD
from fedloom.seeds import generator
from fedloom.testing import Problem, federate
from fedloom.testing.federate import ReferenceFederation

GROUPS = torch.tensor([0, 1, 0, 2, 2, 0, 1])


def context(m: int, seed: int = 0) -> Ctx:
    p = Problem.random(0, n=m + 2)
    return ReferenceFederation(p.oracle(), p.alpha, LocalSGD(), seed).ctx(1, range(m))


def activations(seed: int, rows: int = 7, k: int = 9) -> Tensor:
    return torch.randn(rows, k, generator=generator(seed, purpose="activations"), dtype=torch.float64)


def shares(a: Tensor, clusters: int | None, seed: int = 0) -> tuple[Tensor, Tensor]:
    weigher, ctx = EquitableWeigher(clusters=clusters), context(len(a), seed)
    p, state = weigher.apply(weigher.init(ctx), a, ctx)
    assert (state.labels[len(a) :] == -1).all()
    return p, state.labels[: len(a)]


def equal(got: Tensor, want: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


def test_one_cluster_and_singletons_are_uniform() -> None:
    a = activations(0)
    for clusters in (1, 7):
        p, labels = shares(a, clusters)
        equal(p, torch.full((7, 1), 1 / 7, dtype=torch.float64))
        assert len(labels.unique()) == clusters


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("clusters", [2, 3, 4])
def test_every_cluster_has_the_same_mass(seed: int, clusters: int) -> None:
    p, labels = shares(activations(seed), clusters)
    found = labels.unique()
    equal(p.sum(), torch.tensor(1.0, dtype=torch.float64))
    for label in found:
        members = p[labels == label]
        equal(members, torch.full_like(members, 1 / (len(found) * len(members))))


@pytest.mark.parametrize("seed", range(4))
def test_groups_with_equal_activations_are_recovered(seed: int) -> None:
    p, labels = shares(activations(seed, rows=3)[GROUPS], 3)
    together = labels[:, None] == labels
    assert torch.equal(together, GROUPS[:, None] == GROUPS)
    equal(p[:, 0], (1 / 3 / torch.bincount(GROUPS).double())[GROUPS])


@pytest.mark.parametrize("seed", range(4))
def test_groups_are_recovered_from_noisy_activations_whatever_the_order_and_seed(seed: int) -> None:
    order = torch.tensor([4, 2, 6, 0, 3, 1, 5])
    a = 3 * activations(seed, rows=3)[GROUPS] + 0.01 * activations(seed + 50)
    p = shares(a, 3)[0]
    equal(p[:, 0], (1 / 3 / torch.bincount(GROUPS).double())[GROUPS])
    equal(shares(a[order], 3, seed=9)[0], p[order])


def test_clusters_that_are_clearly_apart_are_found_without_their_number() -> None:
    for seed in range(4):
        groups = torch.arange(12) % 3
        a = 3 * activations(seed, rows=3)[groups] + 0.01 * activations(seed + 50, rows=12)
        p, labels = shares(a, None)
        assert torch.equal(labels[:, None] == labels, groups[:, None] == groups)
        equal(p, torch.full((12, 1), 1 / 12, dtype=torch.float64))


@pytest.mark.parametrize("seed", range(4))
def test_one_client_is_no_cluster(seed: int) -> None:
    """Whatever is found by itself, of C clusters every one has two clients: nobody has more than 1/(2 C)."""
    noise = activations(seed, rows=12)
    near = activations(seed, rows=1) + 0.1 * noise
    outlier = torch.cat([near[:11], 5 * noise[11:]])
    for a in (noise, near, outlier):
        p, labels = shares(a, None)
        assert float(p.max()) <= (1 / 12 if len(labels.unique()) == 1 else 1 / (2 * len(labels.unique()))) + 1e-12
        equal(p.sum(), torch.tensor(1.0, dtype=torch.float64))
    for a in (noise[:1], noise[:3]):
        equal(shares(a, None)[0], torch.full((len(a), 1), 1 / len(a), dtype=torch.float64))


def test_activations_are_log_softmax_of_the_trained_model() -> None:
    p = Problem.random(0)
    work = ReferenceFederation(p.oracle(), p.alpha, LocalSGD()).work(1, range(p.n))
    w = p.minimiser
    h = work.activations(w, "penultimate", None)
    equal(EquitableWeigher().probe(None, w, work), h - torch.logsumexp(h, 1, keepdim=True))
    equal(EquitableWeigher(log_softmax=False).probe(None, w, work), h)


def test_more_clusters_than_clients_are_refused() -> None:
    EquitableWeigher(clusters=4).check(4)
    with pytest.raises(ConfigError, match="at most the number of clients in the federation \\(4\\), got 5"):
        EquitableWeigher(clusters=5).check(4)


def test_one_cluster_without_pull_is_fedavg_and_with_pull_fedprox() -> None:
    p, options = Problem.random(1), {"local": LocalSGD(lr=0.1, batch_size=2), "noise": 0.5}
    for mu, same in ((0.0, FedAvg()), (0.5, FedProx(mu=0.5))):
        preset = REGISTRY["equitable-fl"](clusters=1, mu=mu)
        got = federate(preset.algorithm, p, 4, weigher=preset.weigher, **options)[-1]
        equal(got.server.x, federate(same, p, 4, **options)[-1].server.x)


def test_preset_shares_its_options_among_its_parts() -> None:
    preset = PRESETS["equitable-fl"]
    assert preset.parts == [FedProx, EquitableWeigher]
    assert set(preset.options) == {"mu", "clusters", "layer", "log_softmax", "reduce"}
    made = preset(mu=0.3, clusters=4)
    assert made.algorithm == FedProx(mu=0.3)
    assert made.weigher == EquitableWeigher(clusters=4)
    assert made.sampler is None
    assert not made.pooled
    assert PRESETS["centralized"]() == (FedAvg(), None, None, True)


def test_preset_defaults_give_way_to_options() -> None:
    preset = Preset("card", FedProx, defaults={"mu": 0.7})
    assert preset().algorithm == FedProx(mu=0.7)
    assert preset(mu=0.2).algorithm == FedProx(mu=0.2)


def test_preset_refuses_an_option_that_no_part_has() -> None:
    with pytest.raises(ConfigError, match="unknown option 'cluster'; did you mean 'clusters'"):
        PRESETS["equitable-fl"](cluster=3)
    with pytest.raises(ConfigError, match="unknown option 'kind'"):
        PRESETS["equitable-fl"](kind="equitable")


# --- Theorem 1


PLANTED = torch.tensor([0, 0, 0, 1, 1])


class ByCluster(UniformWeigher):
    """Shares 1/(C |gamma_q|) of planted clusters, as the weigher gives them where it recovers them."""

    equal: bool = True

    def apply(self, state: Any, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Any]:
        groups = PLANTED[ctx.ids]
        share = 1 / torch.bincount(groups).double()[groups] if self.equal else torch.ones(len(groups)).double()
        return share[:, None], state


def planted(seed: int) -> Problem:
    """Two clusters of clients that are alike within and far apart, with values that are not negative."""
    p = Problem.random(seed)
    return replace(p, hessian=p.hessian[[0, 0, 0, 3, 3]], minimiser=p.minimiser[[0, 0, 0, 3, 3]])


def mean_square_gradient(p: Problem, rounds: int, mu: float, weigher: ByCluster) -> tuple[float, float, float]:
    """E ||grad f(w_k*)||^2 over the theorem's distribution of k*, its bound for exact gradients, the last square."""
    steps, smooth = 3, float(torch.linalg.eigvalsh(p.hessian)[:, -1].max())
    eta = 1 / (4 * steps * (3 * smooth * rounds) ** 0.5)
    assert eta * smooth * steps <= 0.5
    local = LocalSGD(lr=eta, steps=steps, batch_size="full")
    share = 1 / (2 * torch.bincount(PLANTED).double()[PLANTED])
    gap = p.x0 - p.minimiser
    start = 0.5 * (share * torch.einsum("ni,nij,nj->n", gap, p.hessian, gap)).sum()
    inner = 9 * eta * smooth**2 * steps + 4 * eta * mu * steps + 6 * smooth * (1 + 4 * eta**2 * mu**2 * steps**2 / 18)
    zeta = eta**2 * steps**2 * inner
    chances = (1 + zeta) ** torch.arange(rounds - 1, -1, -1, dtype=torch.float64)
    states = federate(FedProx(mu=mu), p, rounds - 1, local=local, weigher=weigher)
    squares = torch.stack([(share[:, None] * p.gradient(s.server.x)).sum(0).square().sum() for s in states])
    bound = 16 * (3 * smooth) ** 0.5 * start / ((1 - mu) * rounds**0.5)
    return float((chances * squares).sum() / chances.sum()), float(bound), float(squares[-1])


@pytest.mark.parametrize("seed", range(2))
def test_theorem_1_the_gradient_of_the_equitable_objective_vanishes_like_one_over_root_k(seed: int) -> None:
    p = planted(seed)
    figures = [mean_square_gradient(p, rounds, 0.1, ByCluster()) for rounds in (200, 800)]
    for square, bound, _ in figures:
        assert square <= bound
    (first, *_), (second, *_) = figures
    assert first > 1.8 * second  # the bound halves
    elsewhere = mean_square_gradient(p, 800, 0.1, ByCluster(equal=False))[2]
    assert figures[1][2] < 0.5 * elsewhere  # equal shares of clients go elsewhere
