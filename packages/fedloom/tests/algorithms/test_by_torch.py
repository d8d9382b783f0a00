"""Personalised methods against loops written from their papers with torch, and at the ends of their options."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from by_torch import (
    BATCH,
    CLASSES,
    COHORTS,
    LR,
    ROUNDS,
    SIZES,
    batches,
    federation,
    mean,
    network,
    put,
    run,
    same,
    samples,
    trained,
    vector,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedloom as fl
from fedloom.algorithms import IFCA, MOON, FedALA, FedAvg, FedAvgFT, FedBABU, FedPAC, FedProto, FedRoD
from fedloom.algorithms.fedpac import combine_heads
from fedloom.errors import Refused
from fedloom.models import MLP, ModelSpec

N = len(SIZES)


def fedavg_rounds() -> Tensor:
    """The model of FedAvg after all rounds."""
    net = network()
    for t, cohort in enumerate(COHORTS, start=1):
        net = put(net, mean([vector(trained(net, t, i)) for i in cohort], cohort))
    return vector(net)


# --- FedAvg-FT


@pytest.mark.parametrize(("epochs", "lr"), [(5, 0.3), (2, 0.05)])
def test_fedavg_ft_is_fedavg_and_then_local_steps(epochs: int, lr: float) -> None:
    result = run(FedAvgFT(epochs=epochs, lr=lr))
    x = put(network(), fedavg_rounds())
    same(result.models.rows("global"), vector(x))
    own = [vector(trained(x, ROUNDS, i, epochs, "fine-tuning", lr)) for i in range(N)]
    same(result.models.rows("personal"), torch.stack(own))


def test_fedavg_ft_without_steps_is_fedavg() -> None:
    plain = run(FedAvg()).models.rows("global")
    for none in ({"epochs": 0}, {"steps": 0}):
        result = run(FedAvgFT(**none))
        assert torch.equal(result.models.rows("global"), plain)
        assert torch.equal(result.models.rows("personal"), plain.expand(N, -1))


def test_steps_of_fine_tuning_take_the_place_of_epochs() -> None:
    one = run(FedAvgFT(steps=1)).models.rows("personal")
    assert torch.equal(one, run(FedAvgFT(steps=1, epochs=9)).models.rows("personal"))
    assert not torch.equal(one, run(FedAvgFT()).models.rows("personal"))


def work_of(result: Any, name: str = "samples_backward") -> dict[int, int]:
    return {r.round: int(r.values[0]) for r in result.state.records.items if r.metric == name}


@pytest.mark.parametrize("every", [1, 2, ROUNDS])
def test_the_work_of_a_round_has_what_the_personal_models_after_it_took(every: int) -> None:
    """Whatever was evaluated before; a client never seen counts with what its first training takes."""
    trains = [sum(SIZES[i] for cohort in COHORTS[:t] for i in cohort) for t in range(ROUNDS + 1)]
    evaluate = {"every": every, "parts": ("train",)}
    got = work_of(run(FedAvgFT(epochs=3), evaluate=evaluate))
    assert got == {t: trains[t] + 3 * sum(SIZES) for t in got}
    assert sorted(got)[1:] == [*range(every, ROUNDS + 1, every)]
    few = [[0], [0, 2], [0], [2]]
    late = work_of(run("ditto", cohorts=few))[ROUNDS]
    assert late == 2 * (sum(SIZES[i] for cohort in few for i in cohort) + SIZES[1] + SIZES[3])


def test_work_of_clients_that_are_not_scored_counts_as_that_of_those_that_are() -> None:
    judged = {"every": ROUNDS, "parts": ("train",), "clients": 2}
    result = run(FedAvgFT(epochs=3), evaluate=judged)
    trains = sum(SIZES[i] for cohort in COHORTS for i in cohort)
    scored = sum(SIZES[i] for i in result.job.scored_ids.tolist())
    assert work_of(result)[ROUNDS] == trains + 3 * scored * N // 2


def test_workers_change_no_count() -> None:
    assert work_of(run(FedAvgFT(), engine={"dtype": "float64", "workers": 2})) == work_of(run(FedAvgFT()))


# --- FedBABU


def frozen(net: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """A copy in which the parameters with these prefixes do not move."""
    own = copy.deepcopy(net)
    for name, p in own.named_parameters():
        p.requires_grad = not name.startswith(names)
    return own


@pytest.mark.parametrize(("tunes", "fixed"), [("all", ("none",)), ("head", ("0.",)), ("body", ("2.",))])
def test_fedbabu_trains_the_body_and_then_tunes(tunes: Any, fixed: tuple[str, ...]) -> None:
    result = run(FedBABU(epochs=3, tunes=tunes))
    net = network()
    for t, cohort in enumerate(COHORTS, start=1):
        net = put(net, mean([vector(trained(frozen(net, ("2.",)), t, i)) for i in cohort], cohort))
    same(result.models.rows("global"), vector(net))
    same(vector(net[2]), vector(network()[2]))
    own = [vector(trained(frozen(net, fixed), ROUNDS, i, 3, "fine-tuning")) for i in range(N)]
    same(result.models.rows("personal"), torch.stack(own))


# --- FedALA


def test_fedala_learns_how_much_of_the_received_head_to_take() -> None:
    result = run(FedALA(eta=2.0, share=0.5, first=2))
    x, own, weights = vector(network()), [vector(network())] * N, [torch.ones(18, dtype=torch.float64)] * N
    top, between = slice(-18, None), 0
    for t, cohort in enumerate(COHORTS, start=1):
        ends = []
        for i in cohort:
            gap = x[top] - own[i][top]
            passes = 0 if not gap.any() else 2 if bool((weights[i] == 1).all()) else 1
            half = math.ceil(0.5 * math.ceil(SIZES[i] / BATCH))
            for bx, by in itertools.islice(batches(t, i, 2, "weights"), passes * half):
                mixed = put(network(), torch.cat([x[:-18], own[i][top] + gap * weights[i]]))
                cross_entropy(mixed(bx), by).backward()
                slope = torch.cat([p.grad.reshape(-1) for p in mixed[2].parameters()]) * gap
                weights[i] = (weights[i] - 2.0 * slope).clamp(0, 1)
            between += int(((weights[i] > 0) & (weights[i] < 1)).sum())
            start = put(network(), torch.cat([x[:-18], own[i][top] + gap * weights[i]]))
            own[i] = vector(trained(start, t, i))
            ends.append(own[i])
        x = mean(ends, cohort)
    assert between > 0
    same(result.models.rows("global"), x)
    same(result.models.rows("personal"), torch.stack(own))


def test_fedala_with_weights_of_1_is_fedavg() -> None:
    assert torch.equal(run(FedALA(eta=0)).models.rows("global"), run(FedAvg()).models.rows("global"))


# --- IFCA


def loss_of(net: nn.Module, i: int) -> float:
    x, y = samples(i)
    return float(cross_entropy(net(x), y).detach())


def test_ifca_trains_the_model_that_fits() -> None:
    result = run(IFCA(clusters=2))
    start = run(IFCA(clusters=2), rounds=1).job
    server, *_ = start.algorithm.init(vector(network()), start.ctx(0))
    assert sorted(server.more.tolist()) == sorted(server.x.tolist())
    models, chosen = [put(network(), server.x), put(network(), server.more)], set()
    for t, cohort in enumerate(COHORTS, start=1):
        choice = {i: min((0, 1), key=lambda j, i=i: loss_of(models[j], i)) for i in cohort}
        chosen |= set(choice.values())
        ends = {i: vector(trained(models[choice[i]], t, i)) for i in cohort}
        for j in (0, 1):
            if members := [i for i in cohort if choice[i] == j]:
                models[j] = put(network(), mean([ends[i] for i in members], members))
    same(torch.stack([result.state.server.x, result.state.server.more]), torch.stack([*map(vector, models)]))
    best = [vector(min(models, key=lambda net, i=i: loss_of(net, i))) for i in range(N)]
    same(result.models.rows("personal"), torch.stack(best))
    assert chosen


def test_ifca_with_one_cluster_is_fedavg() -> None:
    same(run(IFCA(clusters=1)).state.server.x, run(FedAvg()).models.rows("global"))


def test_ifca_finds_two_groups_whose_labels_are_exchanged() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(320, 4)).astype(np.float32)
    owner = np.arange(320) // 40
    y = (x[:, 0] > 0) ^ (owner % 2 == 1)
    fed = fl.partitions.natural(validation=0.0, test=0.25)(fl.Dataset.create(x, y.astype(int), clients=owner), seed=0)
    settings: dict[str, Any] = {"rounds": 15, "local": {"lr": 0.5, "batch_size": 10}, "evaluate": {"every": 15}}
    found = fl.simulate(IFCA(), fed, MLP(hidden=(8,)), **settings)
    assert found.final("personal").mean() > 0.9
    assert fl.simulate(FedAvg(), fed, MLP(hidden=(8,)), **settings).final("global").mean() < 0.7


# --- FedRoD


@pytest.mark.parametrize("gamma", [1.0, 0.0])
def test_fedrod_has_a_balanced_generic_head_and_a_personal_one(gamma: float) -> None:
    result = run(FedRoD(gamma=gamma))
    x, personal = network(), [torch.zeros(18, dtype=torch.float64)] * N
    for t, cohort in enumerate(COHORTS, start=1):
        ends = []
        for i in cohort:
            net, own = copy.deepcopy(x), nn.Linear(5, CLASSES).double()
            nn.utils.vector_to_parameters(personal[i].clone(), own.parameters())
            counts = torch.bincount(samples(i)[1], minlength=CLASSES).double().clamp(min=1e-9)
            for bx, by in batches(t, i):
                z = net[1](net[0](bx))
                generic = net[2](z)
                cross_entropy(generic + gamma * counts.log(), by).backward()
                cross_entropy(generic.detach() + own(z.detach()), by).backward()
                with torch.no_grad():
                    for p in (*net.parameters(), *own.parameters()):
                        p -= LR * p.grad
                        p.grad = None
            personal[i] = vector(own)
            ends.append(vector(net))
        x = put(x, mean(ends, cohort))
    same(result.models.rows("global"), vector(x))
    both = [torch.cat([vector(x)[:-18], vector(x)[-18:] + own]) for own in personal]
    same(result.models.rows("personal"), torch.stack(both))


def test_fedrod_without_class_counts_is_fedavg_at_its_generic_head() -> None:
    same(run(FedRoD(gamma=0)).models.rows("global"), run(FedAvg()).models.rows("global"))


def test_fedrod_needs_classes_and_a_bias() -> None:
    rng = np.random.default_rng(0)
    data = fl.Dataset.create(rng.normal(size=(40, 3)), rng.normal(size=40), clients=np.arange(40) // 10)
    with pytest.raises(Refused, match="class counts are undefined"):
        fl.simulate(FedRoD(), fl.partitions.natural()(data, seed=0), MLP(hidden=(4,)), rounds=1)
    with pytest.raises(Refused, match="bias"):
        fl.simulate(FedRoD(), federation(), Biasless(), rounds=1)


class Biasless(ModelSpec):
    """Its last layer has no bias."""

    def module(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(int(np.prod(shape)), 5), nn.Tanh(), nn.Linear(5, outputs, bias=False))


# --- MOON


def similar(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))


def test_moon_contrasts_with_the_received_and_the_last_model() -> None:
    result = run(MOON(mu=2.0, tau=0.7))
    net, last = network(), [network()] * N
    for t, cohort in enumerate(COHORTS, start=1):
        for i in cohort:
            own = copy.deepcopy(net)
            optimizer = torch.optim.SGD(own.parameters(), LR)
            for x, y in batches(t, i):
                z = own[1](own[0](x))
                with torch.no_grad():
                    received, before = (other[1](other[0](x)) for other in (net, last[i]))
                near, far = (similar(z, anchor).div(0.7).exp() for anchor in (received, before))
                optimizer.zero_grad()
                (cross_entropy(own[2](z), y) - 2.0 * (near / (near + far)).log().mean()).backward()
                optimizer.step()
            last[i] = own
        net = put(net, mean([vector(last[i]) for i in cohort], cohort))
    same(result.models.rows("global"), vector(net))


def test_moon_without_contrast_is_fedavg() -> None:
    assert torch.equal(run(MOON(mu=0)).models.rows("global"), run(FedAvg()).models.rows("global"))


# --- FedProto


def test_fedproto_shares_what_classes_look_like() -> None:
    result = run(FedProto(lam=3.0))
    nets, prototypes = [network() for _ in range(N)], dict[int, Tensor]()
    for t, cohort in enumerate(COHORTS, start=1):
        for i in cohort:
            optimizer = torch.optim.SGD(nets[i].parameters(), LR)
            for x, y in batches(t, i):
                z = nets[i][1](nets[i][0](x))
                away = [((z[k] - prototypes[c]) ** 2).mean() for k, c in enumerate(y.tolist()) if c in prototypes]
                optimizer.zero_grad()
                (cross_entropy(nets[i][2](z), y) + 3.0 * sum(away, torch.tensor(0.0)) / len(y)).backward()
                optimizer.step()
        seen: dict[int, list[Tensor]] = {}
        for i in cohort:
            x, y = samples(i)
            z = nets[i][1](nets[i][0](x)).detach()
            for row, c in zip(z, y.tolist(), strict=True):
                seen.setdefault(c, []).append(row)
        prototypes |= {c: torch.stack(rows).mean(0) for c, rows in seen.items()}
    same(result.models.rows("personal"), torch.stack([vector(net) for net in nets]))
    same(result.state.server.prototypes.view(CLASSES, 5), torch.stack([prototypes[c] for c in range(CLASSES)]))


def test_fedproto_without_distance_is_local() -> None:
    assert torch.equal(run(FedProto(lam=0)).models.rows("personal"), run("local").models.rows("personal"))


def test_a_class_that_the_cohort_lacks_keeps_its_prototype() -> None:
    first = run(FedProto(), rounds=1, cohorts=[[0]]).state.server
    second = run(FedProto(), rounds=2, cohorts=[[0], [1]]).state.server
    assert first.known.tolist() == second.known.tolist() == [1.0] * CLASSES
    assert 2 not in samples(1)[1].tolist()
    assert torch.equal(second.prototypes[-5:], first.prototypes[-5:])
    assert not torch.equal(second.prototypes[:5], first.prototypes[:5])


# --- FedPAC


def class_sums(net: nn.Module, i: int) -> Tensor:
    x, y = samples(i)
    return nn.functional.one_hot(y, CLASSES).double().T @ net[1](net[0](x)).detach()


def test_fedpac_aligns_features_and_combines_heads() -> None:
    result = run(FedPAC(lam=2.0))
    body, heads, prototypes = vector(network())[:-18], [vector(network())[-18:]] * N, dict[int, Tensor]()
    for t, cohort in enumerate(COHORTS, start=1):
        nets, moments, spreads = {}, [], []
        for i in cohort:
            net, size = put(network(), torch.cat([body, heads[i]])), SIZES[i]
            moments.append((class_sums(net, i) / size).flatten())
            z = net[1](net[0](samples(i)[0])).detach()
            spreads.append((z.square().sum() / size - moments[-1].square().sum()) / size)
            net = trained(frozen(net, ("0.",)), t, i, 1, "head")
            net.requires_grad_(True)
            optimizer = torch.optim.SGD(net[0].parameters(), LR)
            for x, y in batches(t, i):
                z = net[1](net[0](x))
                away = [((z[k] - prototypes[c]) ** 2).mean() for k, c in enumerate(y.tolist()) if c in prototypes]
                optimizer.zero_grad()
                (cross_entropy(net[2](z), y) + 2.0 * sum(away, torch.tensor(0.0)) / len(y)).backward()
                optimizer.step()
            nets[i] = net
        total = torch.stack([class_sums(nets[i], i) for i in cohort]).sum(0)
        count = torch.stack([torch.bincount(samples(i)[1], minlength=CLASSES) for i in cohort]).sum(0)
        prototypes |= {c: total[c] / count[c] for c in range(CLASSES) if count[c]}
        body = mean([vector(nets[i])[:-18] for i in cohort], cohort)
        weights = combine_heads(torch.stack(spreads), torch.stack(moments))
        for row, i in zip(weights, cohort, strict=True):
            heads[i] = sum((a * vector(nets[j])[-18:] for a, j in zip(row, cohort, strict=True)), torch.zeros(18))
    want = torch.stack([torch.cat([body, head]) for head in heads])
    torch.testing.assert_close(result.models.rows("personal"), want, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("clients", "entries"), [(6, 4), (200, 400)])
def test_heads_are_combined_by_the_quadratic_program(clients: int, entries: int) -> None:
    g = torch.Generator().manual_seed(0)
    moment = torch.randn(clients, entries, generator=g, dtype=torch.float64) / entries**0.5
    spread = torch.rand(clients, generator=g, dtype=torch.float64)
    weights = combine_heads(spread, moment)
    same(weights.sum(1), torch.ones(clients, dtype=torch.float64))
    for a, gap in zip(weights, moment[:, None] - moment, strict=True):
        p = torch.diag(spread) + gap @ gap.T
        slope = p @ a  # optimal where no coordinate in use has a larger slope than any other
        assert float((slope[a > 1e-9].max() - slope.min()).detach()) < 1e-6


def test_heads_stay_where_means_are_exact_and_are_averaged_where_clients_are_alike() -> None:
    moment = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    same(combine_heads(torch.zeros(6), moment).double(), torch.eye(6, dtype=torch.float64))
    alike = combine_heads(torch.ones(6, dtype=torch.float64), torch.ones(6, 4, dtype=torch.float64))
    same(alike, torch.full((6, 6), 1 / 6, dtype=torch.float64))
