"""Methods on representations, and those that look for clients alike, against loops written from their papers."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from by_torch import (
    BATCH,
    CLASSES,
    COHORTS,
    LR,
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
from fedloom.algorithms import CFL, DBE, FedAS, FedAvg, FedEM, FedFomo, PFedFDA
from fedloom.algorithms.cfl import bipartition
from fedloom.data.order import plan_batches
from fedloom.errors import Refused
from fedloom.models import MLP, Softmax
from fedloom.rows.algebra import solved
from fedloom.seeds import generator

N, HEAD = len(SIZES), 18


def features(net: nn.Module, x: Tensor) -> Tensor:
    return net[1](net[0](x))


# --- DBE


@pytest.mark.parametrize(("kappa", "momentum", "memory"), [(6.0, 1.0, True), (4.0, 0.3, True), (5.0, 0.6, False)])
def test_dbe_keeps_the_mean_of_features_and_gives_every_client_a_memory(
    kappa: float, momentum: float, memory: bool
) -> None:
    result = run(DBE(kappa=kappa, momentum=momentum, memory=memory))
    net, own, consensus = network(), [torch.zeros(5, dtype=torch.float64)] * N, None
    for t, cohort in enumerate(COHORTS, start=1):
        ends = {}
        for i in cohort:
            if consensus is None:
                ends[i] = trained(net, t, i)
                continue
            local, bias, running = copy.deepcopy(net), own[i].clone().requires_grad_(), torch.zeros(5)
            optimizer = torch.optim.SGD([*local.parameters(), *([bias] if memory else [])], LR)
            for x, y in batches(t, i):
                z = features(local, x)
                running = (1 - momentum) * running.detach() + momentum * z.mean(0)
                loss = cross_entropy(local[2](z + bias), y) + kappa * ((running - consensus) ** 2).mean() / 2
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            ends[i], own[i] = local, bias.detach()
        if consensus is None:
            each = [features(ends[i], samples(i)[0]).mean(0).detach() for i in cohort]
            consensus = mean(each, cohort)
        net = put(net, mean([vector(ends[i]) for i in cohort], cohort))
    same(result.models.rows("global"), vector(net))
    for i, got in enumerate(result.models.rows("personal")):
        x, _ = samples(i)
        same(put(net, got)(x), net[2](features(net, x) + own[i]))


def test_dbe_without_memory_and_regularisation_is_fedavg() -> None:
    plain = run(FedAvg()).models.rows("global")
    result = run(DBE(kappa=0, memory=False)).models
    assert torch.equal(result.rows("global"), plain)
    assert torch.equal(result.rows("personal"), plain.expand(N, -1))


# --- FedAS


def test_fedas_aligns_bodies_and_weighs_them_by_fisher_information() -> None:
    result = run(FedAS(lr=0.7, align=2))
    body, own = vector(network())[:-HEAD], [vector(network())] * N
    for t, cohort in enumerate(COHORTS, start=1):
        ends, fishers = [], []
        for i in cohort:
            before, net = put(network(), own[i]), put(network(), torch.cat([body, own[i][-HEAD:]]))
            x, y = samples(i)
            means = {c: features(before, x[y == c]).mean(0).detach() for c in set(y.tolist())}
            optimizer = torch.optim.SGD(net[0].parameters(), 0.7)
            for bx, by in batches(t, i, 2, "alignment"):
                goal = torch.stack([means[c] for c in by.tolist()])
                optimizer.zero_grad()
                ((features(net, bx) - goal) ** 2).mean().backward()
                optimizer.step()
            net, fisher = trained(net, t, i), 0.0
            for bx, by in batches(t, i, 1, "fisher"):
                slopes = torch.autograd.grad(cross_entropy(net(bx), by), list(net.parameters()))
                fisher += sum(float((g**2).sum()) for g in slopes)
            own[i] = vector(net)
            ends.append(own[i][:-HEAD])
            fishers.append(fisher * SIZES[i])
        mass = torch.tensor(fishers, dtype=torch.float64)
        body = (mass / mass.sum()) @ torch.stack(ends)
    same(result.models.rows("personal"), torch.stack(own))
    same(result.state.server.x[:-HEAD], body)


def test_the_gradients_of_alignment_and_fisher_information_count_as_work() -> None:
    trains = sum(SIZES[i] for cohort in COHORTS for i in cohort)
    records = run(FedAS(align=2)).state.records
    spent = records.last("", "", "samples_backward")
    assert spent is not None
    assert spent[0] == 4 * trains


def test_fedas_of_one_client_without_alignment_is_local() -> None:
    alone = run("local", cohorts=[[0]] * 4).models.rows("personal")[0]
    same(run(FedAS(align=0), cohorts=[[0]] * 4).models.rows("personal")[0], alone)


# --- pFedFDA


@pytest.mark.parametrize("k", [5, 200])
def test_systems_are_solved_on_several_threads(k: int) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 4, k, k)), rng.normal(size=(3, 4, k, 7))
    a = a @ a.swapaxes(-1, -2) + np.eye(k)
    torch.set_num_threads(2)
    try:
        x = solved(torch.from_numpy(a), torch.from_numpy(b))
    finally:
        torch.set_num_threads(1)
    np.testing.assert_allclose(x, np.linalg.solve(a, b), rtol=1e-6, atol=1e-9)


def gaussian(z: Any, y: Any, shared: Any) -> tuple[Any, Any]:
    means, gaps = shared[0].copy(), []
    for c in range(CLASSES):
        if (y == c).sum() >= 3:
            means[c] = z[y == c].mean(0)
    gaps = z - means[y]
    return means, gaps.T @ gaps / max(len(z) - 1, 1) + np.eye(z.shape[1])


def discriminant(means: Any, cov: Any, prior: Any) -> tuple[Any, Any]:
    inverse = np.linalg.inv(cov)
    bias = [-0.5 * m @ inverse @ m + np.log(p) for m, p in zip(means, prior, strict=True)]
    return means @ inverse, np.array(bias)


def prior_of(y: Any) -> Any:
    prior = np.bincount(y, minlength=CLASSES) / len(y) + 1e-4
    return prior / prior.sum()


def mixture(z: Any, y: Any, shared: Any) -> tuple[Any, Any]:
    rank = np.array([(y[: k + 1] == c).sum() for k, c in enumerate(y)])
    losses = []
    for beta in np.linspace(0, 1, 11):
        total = 0.0
        for fold in (0, 1):
            test = np.array([r % 2 == fold and (y == c).sum() > 1 for r, c in zip(rank, y, strict=True)])
            own = gaussian(z[rank % 2 != fold], y[rank % 2 != fold], shared)
            w, b = discriminant(*(beta * o + (1 - beta) * s for o, s in zip(own, shared, strict=True)), prior_of(y))
            logits = z[test] @ w.T + b
            total += np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), y[test]])
        losses.append(total)
    beta = np.linspace(0, 1, 11)[int(np.argmin(losses))]
    return tuple(beta * o + (1 - beta) * s for o, s in zip(gaussian(z, y, shared), shared, strict=True))


def with_head(net: nn.Module, weight: Any, bias: Any) -> nn.Module:
    own = copy.deepcopy(net)
    own[2].weight.data, own[2].bias.data = torch.tensor(weight), torch.tensor(bias)
    return own


def seen(net: nn.Module, i: int) -> tuple[Any, Any]:
    x, y = samples(i)
    return features(net, x).detach().numpy(), y.numpy()


def test_pfedfda_trains_the_body_under_heads_that_follow_from_distributions() -> None:
    result, net = run(PFedFDA()), network()
    first = run(PFedFDA(), rounds=1).job
    start, *_ = first.algorithm.init(vector(network()), first.ctx(0))
    shared = (start.means.view(CLASSES, 5).numpy(), start.cov.view(5, 5).numpy())
    same(start.cov.view(5, 5), torch.eye(5, dtype=torch.float64))
    for t, cohort in enumerate(COHORTS, start=1):
        ends, mixtures = {}, {}
        for i in cohort:
            local = with_head(net, *discriminant(*shared, prior_of(samples(i)[1].numpy())))
            local[2].requires_grad_(False)
            ends[i] = trained(local, t, i)
            mixtures[i] = mixture(*seen(ends[i], i), shared)
        net = put(net, mean([vector(ends[i]) for i in cohort], cohort))
        parts = zip(*(mixtures[i] for i in cohort), strict=True)
        shared = tuple(mean([torch.tensor(p).flatten() for p in part], cohort).numpy() for part in parts)
        shared = (shared[0].reshape(CLASSES, 5), shared[1].reshape(5, 5))
    want = [with_head(net, *discriminant(*mixture(*seen(net, i), shared), prior_of(samples(i)[1]))) for i in range(N)]
    torch.testing.assert_close(
        result.models.rows("personal"), torch.stack([vector(w) for w in want]), rtol=1e-9, atol=1e-9
    )


# --- FedEM


def likelihoods(nets: list[nn.Module], x: Tensor, y: Tensor) -> Tensor:
    """Probability of its label by component ``[b, M]``."""
    return torch.stack([net(x).softmax(1)[torch.arange(len(y)), y] for net in nets], 1)


def test_fedem_takes_an_expectation_and_trains_every_component_on_its_share() -> None:
    result, nets = run(FedEM(), mixture=2), list(network(2).components)
    pi = torch.full((N, 2), 0.5, dtype=torch.float64)
    for t, cohort in enumerate(COHORTS, start=1):
        ends: dict[int, list[Tensor]] = {}
        old = pi.clone()
        for i in cohort:
            own = copy.deepcopy(nets)
            joint = old[i] * likelihoods(nets, *samples(i)).detach()
            pi[i] = (joint / joint.sum(1, keepdim=True)).mean(0)
            optimizer = torch.optim.SGD([p for net in own for p in net.parameters()], LR)
            for x, y in batches(t, i):
                joint = old[i] * likelihoods(nets, x, y).detach()
                share = joint / joint.sum(1, keepdim=True)
                optimizer.zero_grad()
                (-share * likelihoods(own, x, y).log()).sum(1).mean().backward()
                optimizer.step()
            ends[i] = [vector(net) for net in own]
        nets = [put(net, mean([ends[i][m] for i in cohort], cohort)) for m, net in enumerate(nets)]
    want = torch.cat([vector(net) for net in nets])
    models = result.models.rows("personal")
    same(models[:, 2:], want.expand(N, -1))
    same(models[:, :2].softmax(1), pi)
    x, y = samples(0)
    mixed = sum(p * net(x).softmax(1) for p, net in zip(pi[0], nets, strict=True))
    same(put(network(2), models[0])(x).softmax(1), mixed)


def test_fedem_without_a_mixture_is_fedavg() -> None:
    one, plain = run(FedEM()), run(FedAvg())
    assert torch.equal(one.models.rows("personal"), plain.models.rows("global").expand(N, -1))
    assert any("without a mixture equals FedAvg" in note for note in one.job.notes)


def test_fedem_finds_who_has_which_labels() -> None:
    """Two of four clients have the labels of the others exchanged: each pair has a component, and FedAvg guesses."""
    rng = np.random.default_rng(0)
    x, owner = rng.normal(size=(120, 3)), np.arange(120) // 30
    data = fl.Dataset.create(x.astype(np.float32), ((x[:, 0] > 0) ^ (owner < 2)).astype(int), clients=owner)
    fed, settings = (
        fl.partitions.natural(test=0.0)(data, seed=0),
        {"rounds": 15, "local": {"lr": 0.5, "batch_size": 10}},
    )
    accuracy = {}
    for method, kind in ((FedEM(), "personal"), (FedAvg(), "global")):
        evaluate = {"every": 15, "parts": ("train",)}
        result = fl.simulate(method, fed, Softmax(mixture=2), evaluate=evaluate, **settings)
        values = result.state.records.last(kind, "train", "accuracy")
        assert values is not None
        accuracy[kind] = float(values.mean())
    assert accuracy["personal"] > 0.9 > 0.7 > accuracy["global"]


def test_a_mixture_has_the_mean_probabilities_also_of_two_classes_with_one_output() -> None:
    for outputs in (1, 3):
        net, x = MLP(hidden=(4,), mixture=3).build((5,), outputs, 0), torch.randn(7, 5)
        net.mixing.data = torch.tensor([0.3, -1.0, 2.0])
        each = torch.stack([c(x).softmax(1) if outputs > 1 else c(x).sigmoid() for c in net.components])
        want = (net.mixing.softmax(0)[:, None, None] * each).sum(0)
        torch.testing.assert_close(net(x).softmax(1) if outputs > 1 else net(x).sigmoid(), want)
        assert not torch.equal(*(next(c.parameters()) for c in list(net.components)[:2]))


def test_a_mixture_is_refused_where_it_has_no_probabilities() -> None:
    rng = np.random.default_rng(0)
    data = fl.Dataset.create(rng.normal(size=(20, 3)).astype(np.float32), rng.normal(size=20).astype(np.float32))
    with pytest.raises(Refused, match=r"model.mixture mixes class probabilities"):
        fl.simulate("fedem", fl.partitions.iid(clients=2)(data, seed=0), MLP(hidden=(3,), mixture=2), rounds=1)
    with pytest.raises(Refused, match="loss. Omit task.class_weights"):
        run(FedEM(), mixture=2, task={"class_weights": "balanced"})


# --- CFL


@pytest.mark.parametrize("seed", range(4))
def test_parts_have_the_smallest_cosine_across_of_all_bipartitions(seed: int) -> None:
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    unit = rows / rows.norm(dim=1, keepdim=True)
    cosine = unit @ unit.T

    def across(part: tuple[int, ...]) -> float:
        rest = [j for j in range(6) if j not in part]
        return max(float(cosine[i, j]) for i in part for j in rest)

    everything = [part for k in range(1, 6) for part in itertools.combinations(range(6), k) if 0 in part]
    (side, other), gap = bipartition(rows)
    part = tuple(side.nonzero()[:, 0].tolist())
    assert across(part) == min(map(across, everything))
    within = [float(cosine[i, j]) for s in (side, other) for i in s.nonzero()[:, 0] for j in s.nonzero()[:, 0]]
    assert gap == pytest.approx(min(within) - across(part))


def test_cfl_parts_clients_that_pull_the_model_apart() -> None:
    result = run(CFL(first=1, gap=-2, least=2))
    models, cluster = {0: network()}, [0] * N
    last: dict[int, Tensor] = {}
    for t, cohort in enumerate(COHORTS, start=1):
        for i in cohort:
            last[i] = vector(trained(models[cluster[i]], t, i)) - vector(models[cluster[i]])
        for c in sorted(set(cluster)):
            members = [i for i in range(N) if cluster[i] == c]
            if here := [i for i in members if i in cohort]:
                models[c] = put(models[c], vector(models[c]) + mean([last[i] for i in here], here))
            if not here or t == 1 or len(members) < 2 or any(i not in last for i in members):
                continue
            sides, _ = bipartition(torch.stack([last[i] for i in members]))
            for side in sides:
                part = [i for i, inside in zip(members, side.tolist(), strict=True) if inside]
                models[part[0]] = copy.deepcopy(models[c])
                for i in part:
                    cluster[i] = part[0]
                    del last[i]
    assert len(set(cluster)) > 1
    same(result.models.rows("personal"), torch.stack([vector(models[c]) for c in cluster]))


def test_cfl_that_never_parts_is_fedavg() -> None:
    plain = run(FedAvg()).models.rows("global").expand(N, -1)
    for never in (CFL(ratio=0, gap=-2), CFL(first=99), CFL(least=N + 1)):
        same(run(never).models.rows("personal"), plain)


def test_cfl_finds_the_groups_without_their_number_and_leaves_clients_alike_together() -> None:
    rng = np.random.default_rng(0)
    x, owner = rng.normal(size=(640, 4)).astype(np.float32), np.arange(640) // 80
    settings: dict[str, Any] = {"rounds": 15, "local": {"lr": 0.5, "batch_size": 10}, "evaluate": {"every": 15}}
    for groups in (2, 1):
        y = (x[:, 0] > 0) ^ (owner % groups == 1)
        fed = fl.partitions.natural(validation=0.0, test=0.25)(
            fl.Dataset.create(x, y.astype(int), clients=owner), seed=0
        )
        server = fl.simulate(CFL(), fed, fl.models.MLP(hidden=(8,)), **settings).state.server
        assert server.cluster[:, 0].tolist() == [i % groups for i in range(8)]


# --- FedFomo


@pytest.mark.parametrize("returns", [False, True])
def test_fedfomo_moves_towards_models_that_fit_held_out_samples(returns: bool) -> None:
    cohorts = COHORTS[:3]
    result = run(FedFomo(peers=N - 1, share=0.3, returns=returns), rounds=3, cohorts=cohorts)
    own, starts, helped = [network()] * N, [network()] * N, 0
    for t, cohort in enumerate(cohorts, start=1):
        ends = list(own)
        for i in cohort:
            before = starts[i]
            order = torch.randperm(SIZES[i], generator=generator(0, client=i, purpose="split"))
            count = round(0.3 * SIZES[i])
            x, y = samples(i)
            rest, held = order[count:], order[:count]
            loss = [float(cross_entropy(net(x[held]), y[held]).detach()) for net in own]
            apart = [float((vector(net) - vector(before)).norm()) for net in own]
            first = float(cross_entropy(before(x[held]), y[held]).detach())
            weight = torch.tensor(
                [max(first - a, 0) / b if b else 0.0 for a, b in zip(loss, apart, strict=True)], dtype=torch.float64
            )
            weight = weight / weight.sum() if weight.sum() else weight
            helped += int((weight[torch.arange(N) != i] > 0).any())
            start = vector(before) + sum(
                (w * (vector(net) - vector(before)) for w, net in zip(weight, own, strict=True)), torch.zeros(1)
            )
            if not returns and not weight.any():
                start = vector(own[i])
            starts[i], local = put(network(), start), put(network(), start)
            optimizer = torch.optim.SGD(local.parameters(), LR)
            for position in plan_batches(len(rest), BATCH, -(-len(rest) // BATCH), generator(0, t, i, "local")):
                chosen = rest[position[position >= 0]]
                optimizer.zero_grad()
                cross_entropy(local(x[chosen]), y[chosen]).backward()
                optimizer.step()
            ends[i] = local
        own = ends
    assert helped > 2
    same(result.models.rows("personal"), torch.stack([vector(net) for net in own]))


def test_fedfomo_without_peers_is_local() -> None:
    assert torch.equal(run(FedFomo(peers=0)).models.rows("personal"), run("local").models.rows("personal"))


def test_clients_receive_the_models_that_they_gave_weight_to() -> None:
    result = run(FedFomo(peers=1, epsilon=0))
    job, kept = result.job, result.job.kept.read(torch.arange(N))
    others = kept.liking.fill_diagonal_(0)
    liked = others.sum(1) > 0
    down = job.algorithm.down(None, kept, job.ctx(9, torch.arange(N)))
    assert torch.equal(down.peers[liked, 0].long(), others[liked].argmax(1))
    assert federation().n == N
