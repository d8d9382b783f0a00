"""GPFL and kNN-Per, whose models are networks with a valve or a memory, against loops written from their papers."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from by_torch import (
    CLASSES,
    COHORTS,
    LR,
    SIZES,
    batches,
    mean,
    network,
    put,
    run,
    same,
    samples,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedloom as fl
from fedloom.algorithms import GPFL, FedAvg, FedPer, KNNPer
from fedloom.errors import Refused
from fedloom.models import LSTM
from fedloom.seeds import generator

N, HEAD, K = len(SIZES), 18, 5

# --- GPFL


def valve(net: Any, z: Tensor, condition: Tensor) -> Tensor:
    """ReLU((gamma + 1) z + beta), gamma and beta a layer, a rectifier and a normalisation of the condition."""

    def part(of: nn.Sequential) -> Tensor:
        h = (of[0].weight @ condition + of[0].bias).clamp(min=0)
        scale = torch.sqrt(((h - h.mean()) ** 2).mean() + of[2].eps)
        return (h - h.mean()) / scale * of[2].weight + of[2].bias

    return ((part(net.valve.gamma) + 1) * z + part(net.valve.beta)).clamp(min=0)


def conditions(net: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    embedding = net.embedding.weight.detach()
    return embedding.mean(0), torch.stack([embedding[c] for c in y.tolist()]).mean(0)


@pytest.mark.parametrize(("lam", "mu", "angle"), [(0.3, 0.2, 1.0), (0.0, 0.0, 0.6)])
def test_gpfl_learns_by_a_generic_and_a_personal_route(lam: float, mu: float, angle: float) -> None:
    result = run(GPFL(lam=lam, mu=mu, angle=angle), guided=True)
    x: Any = network(guided=True)
    heads = [copy.deepcopy(x.head) for _ in range(N)]
    shared = [name for name, _ in x.named_parameters() if name != "condition" and not name.startswith("head")]
    for t, cohort in enumerate(COHORTS, start=1):
        ends = []
        for i in cohort:
            net = copy.deepcopy(x)
            net.head = heads[i]
            generic, personal = conditions(x, samples(i)[1])
            moving = [p for name, p in net.named_parameters() if name != "condition"]
            for bx, by in batches(t, i):
                z = net.body(bx)
                guide = valve(net, z, generic)
                cosines = torch.cosine_similarity(guide[:, None], net.embedding.weight[None], dim=2)
                loss = cross_entropy(net.head(valve(net, z, personal)), by) + angle * cross_entropy(cosines, by)
                loss = loss + lam * (guide - x.embedding.weight.detach()[by]).norm(dim=1).mean()
                loss = loss + mu / 2 * (
                    (net.embedding.weight**2).sum() + sum((p**2).sum() for p in net.valve.parameters())
                )
                for p, g in zip(moving, torch.autograd.grad(loss, moving), strict=True):
                    p.data -= LR * g
            ends.append(dict(net.named_parameters()))
        for name in shared:
            dict(x.named_parameters())[name].data = mean(
                [end[name].detach().flatten() for end in ends], cohort
            ).view_as(ends[0][name])
    for i, got in enumerate(result.models.rows("personal")):
        own: Any = put(network(guided=True), got)
        for name in shared:
            same(own.get_parameter(name), x.get_parameter(name))
        same(own.head.weight, heads[i].weight)
        same(own.condition, torch.stack(conditions(x, samples(i)[1])))
        inputs = samples(i)[0]
        same(own(inputs), heads[i](valve(x, x.body(inputs), own.condition[1])))


def test_gpfl_without_valve_and_embeddings_is_fedper() -> None:
    one = run(GPFL())
    assert torch.equal(one.models.rows("personal"), run(FedPer()).models.rows("personal"))
    assert any("without valve and embeddings is the same as FedPer" in note for note in one.job.notes)


def test_gpfl_without_guidance_and_a_valve_that_ignores_its_condition_is_fedper() -> None:
    start = {n: p.detach() * ("valve" not in n) for n, p in network(guided=True).named_parameters()}
    settings: Any = {"guided": True, "initial": start}
    one, two = (run(m, **settings).models.rows("personal") for m in (GPFL(lam=0, mu=0, angle=0), FedPer()))
    rest = torch.cat([torch.full_like(p, name != "condition").flatten() for name, p in start.items()]) > 0
    same(one[:, rest], two[:, rest])


# --- kNN-Per


def memory_of(net: nn.Module, x: Tensor, y: Tensor, query: Tensor, neighbours: int, scale: float) -> Tensor:
    """Probabilities of the classes by the nearest of the samples (x, y), by a loop over the queries."""
    keys, rows = net[1](net[0](x)), []
    for z in net[1](net[0](query)):
        distance = ((keys - z) ** 2).sum(1)
        nearest = sorted(range(len(y)), key=lambda j, d=distance: float(d[j]))[:neighbours]
        votes = torch.zeros(CLASSES, dtype=torch.float64)
        for j in nearest:
            votes[y[j]] += math.exp(-float(distance[j]) / (K * scale))
        rows.append(votes / votes.sum())
    return torch.stack(rows)


@torch.no_grad()
def test_knnper_mixes_the_model_with_the_nearest_samples() -> None:
    result = run(KNNPer(weight=0.3, neighbours=4, scale=0.5), memory=16)
    x = run(FedAvg()).models.rows("global")
    net = put(network(), x)
    inputs = torch.randn(9, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for i, row in enumerate(result.models.rows("personal")):
        own = put(network(memory=16), row).eval()
        same(own.train()(inputs), net(inputs))
        q = memory_of(net, *samples(i), inputs, 4, 0.5)
        same(own.eval()(inputs).softmax(1), 0.7 * net(inputs).softmax(1) + 0.3 * q)
    first = result.models.rows("global")
    same(put(network(memory=16), first).eval()(inputs), net(inputs))


@torch.no_grad()
def test_knnper_with_weight_0_is_fedavg_and_with_1_the_nearest_samples_alone() -> None:
    x, (inputs, y) = run(FedAvg()).models.rows("global"), samples(3)
    none, alone = (run(KNNPer(weight=w, neighbours=3), memory=16).models.rows("personal")[3] for w in (0.0, 1.0))
    same(put(network(memory=16), none).eval()(inputs), put(network(), x)(inputs))
    q = memory_of(put(network(), x), inputs, y, inputs, 3, 1.0)
    same(
        put(network(memory=16), alone).eval()(inputs).softmax(1),
        q.clamp(min=1e-12) / q.clamp(min=1e-12).sum(1)[:, None],
    )
    one = run(KNNPer())
    assert torch.equal(one.models.rows("personal"), x.expand(N, -1))
    assert any("without a memory is the same as FedAvg" in note for note in one.job.notes)


@torch.no_grad()
def test_knnper_chooses_its_weight_on_samples_that_it_does_not_train_on() -> None:
    result = run(KNNPer(neighbours=3), memory=16)
    net = put(network(memory=16), result.models.rows("global")).eval()
    plain = nn.Sequential(*net.body[:2], net.head)
    for i, row in enumerate(result.models.rows("personal")):
        x, y = samples(i)
        order = torch.randperm(len(y), generator=generator(0, client=i, purpose="split"))
        held, rest = order.split([round(0.2 * len(y)), len(y) - round(0.2 * len(y))])
        q, p = memory_of(plain, x[rest], y[rest], x[held], 3, 1.0), plain(x[held]).softmax(1)
        ranks = []
        for weight in np.linspace(0, 1, 11):
            log = (weight * q + (1 - weight) * p).clamp(min=1e-12).log()
            ranks.append((int((log.argmax(1) != y[held]).sum()), -float(log[torch.arange(len(held)), y[held]].sum())))
        own = put(network(memory=16), row)
        assert float(own.memory.rule[0]) == pytest.approx(ranks.index(min(ranks)) / 10)
        same(own.memory.keys[: len(y)], plain[1](plain[0](x)))
        assert torch.equal(own.memory.labels.sum(1) > 0, torch.arange(16) < len(y))


@pytest.mark.parametrize("label", range(3))
def test_knnper_chooses_weight_0_where_a_client_has_one_sample(label: int) -> None:
    draws = torch.Generator().manual_seed(2)
    x, y = torch.randn(30, 6, generator=draws), torch.arange(30) % 3
    result = fl.simulate(
        KNNPer(),
        [(x, y), (x[:1], torch.tensor([label]))],
        {"kind": "mlp", "hidden": [5], "memory": 8},
        local={"lr": 0.1},
        rounds=2,
    )
    own: Any = result.models.module("personal", client=1)
    assert own.memory.rule[0] == 0


def test_knnper_keeps_as_many_samples_as_its_memory_has_places() -> None:
    rows = run(KNNPer(weight=0.5), memory=6).models.rows("personal")
    counts = [int(put(network(memory=6), row).memory.labels.sum()) for row in rows]
    assert counts == [6, 5, 6, 6]


# --- sequences


@pytest.mark.parametrize(("method", "part"), [("gpfl", {"guided": True}), ("knn-per", {"memory": 8})])
def test_sequences_take_valves_and_memories_where_each_has_one_label(method: str, part: dict[str, Any]) -> None:
    x, y = torch.randint(1, 5, (40, 4), generator=generator(0)).numpy(), torch.arange(40).numpy() % 2
    model = LSTM(embedding=3, hidden=4, **part)
    for labels in (y, np.stack([y] * 4, 1)):
        fed = fl.partitions.iid(clients=2)(fl.Dataset.create((x, labels), vocabulary=5), seed=0)
        if labels.ndim == 2:
            with pytest.raises(Refused, match=f"model.{next(iter(part))} .* one label per position. Omit model"):
                fl.simulate(method, fed, model, rounds=1)
        else:
            assert bool(fl.simulate(method, fed, model, rounds=1).models.rows("personal").isfinite().all())
