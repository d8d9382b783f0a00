"""Terms on a representation, for every oracle, against autograd on the joint loss; and what is refused."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from by_torch import BATCH, CLASSES, LR, SIZES, Net, batches, federation, network, same, samples, vector
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedloom as fl
from fedloom.errors import Refused
from fedloom.local import LocalSGD, Term, Work, descend
from fedloom.local.oracles import make_oracle
from fedloom.models import MLP, Dropout, ModelSpec
from fedloom.tasks import make_task
from fedloom.testing import Problem

N, ORACLES = len(SIZES), ("compiled", "vmap", "loop")


class Given(NamedTuple):
    point: Tensor
    factor: Tensor


def near(z: Tensor, outputs: Tensor, y: Tensor, anchors: Tensor, given: Given) -> Tensor:
    """Something of everything that a term may look at."""
    gap = (z - given.point).square().sum(1) + (z * anchors[0]).sum(1) - 0.5 * (z - anchors[1]).abs().sum(1)
    return gap * given.factor[0] + outputs.gather(1, y[:, None])[:, 0].square()


def far(z: Tensor, _outputs: Tensor, _y: Tensor, _anchors: Tensor, _given: Any) -> Tensor:
    return z.cos().sum(1)


def work(name: str, module: nn.Module | None = None, **local: Any) -> Work:
    fed = federation()
    oracle = make_oracle(network() if module is None else module, make_task(fed.data), fed, name)
    share = torch.full((N, 1), 1 / N, dtype=torch.float64)
    return Work(oracle, torch.arange(N), share, LocalSGD(**{"lr": LR, "batch_size": BATCH, **local}))


def beside() -> tuple[nn.Module, nn.Module, Given, Tensor]:
    others = [Net().build((6,), CLASSES, seed).double() for seed in (7, 8)]
    rows = torch.linspace(-1, 1, N * 5, dtype=torch.float64).view(N, 5)
    return others[0], others[1], Given(rows, rows[:, :1] + 1.5), torch.tensor([[0.3], [0.0], [1.2], [0.7]])


def by_torch(decay: float, momentum: float, clip: float | None) -> Tensor:
    one, two, given, weight = beside()
    rows = []
    for i in range(N):
        net = copy.deepcopy(network())
        optimizer = torch.optim.SGD(net.parameters(), LR, momentum=momentum, weight_decay=decay)
        for x, y in batches(1, i, 2):
            z = net[1](net[0](x))
            with torch.no_grad():
                anchors = torch.stack([other[1](other[0](x)) for other in (one, two)])
            own = Given(given.point[i], given.factor[i])
            values = weight[i].double() * near(z, net[2](z), y, anchors, own) + 0.2 * far(z, z, y, anchors, None)
            optimizer.zero_grad()
            (cross_entropy(net[2](z), y) + values.mean()).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
        rows.append(vector(net))
    return torch.stack(rows)


SETTINGS = [(0.0, 0.0, None), (0.05, 0.0, None), (0.0, 0.6, None), (0.02, 0.5, 0.4)]


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize(("decay", "momentum", "clip"), SETTINGS)
def test_terms_are_part_of_the_loss(name: str, decay: float, momentum: float, clip: float | None) -> None:
    one, two, given, weight = beside()
    anchors = (vector(one), vector(two).expand(N, -1))
    terms = (Term(near, weight, anchors, given), Term(far, 0.2))
    w = work(name, epochs=2, weight_decay=decay, momentum=momentum, clip=clip)
    start = vector(network())
    got = descend(start, w, terms=terms)
    torch.testing.assert_close(got, by_torch(decay, momentum, clip), rtol=0, atol=1e-6 if clip else 1e-10)
    assert torch.equal(start, vector(network()))
    passed = 2 * torch.tensor(SIZES)
    assert w.counts.backward.tolist() == passed.tolist()
    assert w.counts.forward.tolist() == (2 * passed).tolist()


@pytest.mark.parametrize("name", ORACLES)
def test_a_client_has_its_own_terms_whoever_is_beside_it(name: str) -> None:
    one, two, given, weight = beside()
    w = work(name)
    terms = (Term(near, weight, (vector(one), vector(two)), given),)
    together = descend(vector(network()), w, terms=terms)
    for i in (3, 0):
        own = Given(given.point[i : i + 1], given.factor[i : i + 1])
        term = Term(near, weight[i : i + 1], (vector(one), vector(two)), own)
        same(descend(vector(network()), w.take(torch.tensor([i])), terms=(term,))[0], together[i])


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("none", [0, 0.0, torch.zeros(N, 1)])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_term_with_weight_0_is_no_term(name: str, none: float | Tensor, momentum: float) -> None:
    w, start = work(name, momentum=momentum), vector(network())
    plain, before = descend(start, w), w.counts.forward.clone()
    assert torch.equal(descend(start, w, terms=(Term(near, none, (start, start), beside()[2]),)), plain)
    assert torch.equal(w.counts.forward, before)


def test_a_term_sees_the_dropout_of_its_step_and_anchors_none() -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), Dropout(0.5), nn.Linear(5, CLASSES)).double()
    shares: list[Tensor] = []

    def noted(z: Tensor, _outputs: Tensor, _y: Tensor, anchors: Tensor, _given: Any) -> Tensor:
        shares.append((anchors[0] == 0).double().mean())
        return z.sum(1)

    w = [work(name, net) for name in ORACLES]
    start = w[0].layout.vector(net)
    ends = [descend(start, one, terms=(Term(noted, 0.5, (start,)),)) for one in w]
    same(ends[1], ends[0])
    same(ends[2], ends[0])
    assert float(torch.stack(shares).max()) == 0


PARTS = {
    "mixture": MLP(hidden=(5,), activation="tanh", dropout=0.3, mixture=2),
    "guided": MLP(hidden=(5,), guided=True),
    "memory": MLP(hidden=(5,), activation="tanh", memory=4),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_terms_on_a_network_with_parts_are_those_of_every_oracle(
    part: str, momentum: float, clip: float | None
) -> None:
    one, other = (PARTS[part].build((6,), CLASSES, seed).double() for seed in (1, 2))
    scale = torch.tensor([[0.3], [2.0], [1.2], [0.7]], dtype=torch.float64)

    def beside(z: Tensor, outputs: Tensor, y: Tensor, anchors: Tensor, factor: Tensor) -> Tensor:
        return factor * (z * anchors.sum(0)).tanh().sum(1) + outputs.gather(1, y[:, None])[:, 0].square()

    ends = []
    for name in ORACLES:
        w = work(name, one, epochs=2, momentum=momentum, clip=clip)
        start = w.layout.vector(one)
        terms = (
            Term(beside, scale / 2, (w.layout.vector(other), start.expand(N, -1)), scale[:, 0]),
            Term(far, 0.2),
            Term(lambda z, *_: z.new_ones(len(z))),  # without a gradient
        )
        ends.append(descend(start, w, terms=terms, pull=((0.1, start + 1),), scale=None if clip else scale))
        assert w.counts.forward.tolist() == (4 * torch.tensor(SIZES)).tolist()
    assert float((ends[0] - start).abs().max()) > 1e-3
    same(ends[1], ends[0])
    same(ends[2], ends[0])


@pytest.mark.parametrize("name", ORACLES)
def test_class_means_are_those_of_the_representations(name: str) -> None:
    w, rows = work(name), torch.stack([vector(Net().build((6,), CLASSES, seed).double()) for seed in range(N)])
    got = w.class_means(rows)
    assert got.shape == (N, CLASSES, 5)
    for i in range(N):
        net, (x, y) = Net().build((6,), CLASSES, i).double(), samples(i)
        z = net[1](net[0](x)).detach()
        for c in range(CLASSES):
            same(got[i, c], z[y == c].mean(0) if (y == c).any() else torch.zeros(5, dtype=torch.float64))
    assert w.counts.forward.tolist() == list(SIZES)
    counts = [torch.bincount(samples(i)[1], minlength=CLASSES).tolist() for i in range(N)]
    assert w.class_counts.tolist() == counts
    assert w.take(slice(1, 3)).class_counts.tolist() == counts[1:3]


class Normed(ModelSpec):
    """Samples of a batch that know of each other."""

    def module(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(int(np.prod(shape)), 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, outputs))


def test_what_has_no_representation_of_single_samples_is_refused_by_name() -> None:
    numbers = fl.Dataset.create(np.ones((40, 3)), np.linspace(0, 1, 40), clients=np.arange(40) // 10)
    with pytest.raises(Refused, match="normalization layers mix"):
        fl.simulate("moon", federation(), Normed(), rounds=1)
    with pytest.raises(Refused, match="no classes"):
        fl.simulate("moon", fl.partitions.natural()(numbers, seed=0), MLP(hidden=(4,)), rounds=1)
    p = Problem.random(0)
    exact = Work(p.oracle(solve=True), torch.arange(p.n), p.alpha, LocalSGD())
    with pytest.raises(Refused, match="that is solved exactly cannot have additional terms. Use"):
        descend(p.x0, exact, terms=(Term(far),))


def test_a_function_that_gives_no_number_per_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="one number per sample"):
        descend(vector(network()), work("compiled"), terms=(Term(lambda z, *_: z.sum()),))


class Written(nn.Module):
    """A network that has an activation, or a mean over positions, as a function in the place of a layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.body = kind, nn.Linear(6, 4)
        if kind == "attention":
            self.body, self.mixing = nn.Linear(2, 4), nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        if kind == "recurrent":
            self.body = nn.LSTM(2, 4, batch_first=True)
        self.layer = nn.ReLU() if kind == "layer" else None
        self.last = nn.Linear(4, CLASSES)

    def represented(self, x: Tensor) -> Tensor:
        if self.kind == "recurrent":
            return self.body(x.unflatten(1, (3, 2)))[0][:, -1]
        if self.kind == "attention":
            return self.mixing(self.body(x.unflatten(1, (3, 2)))).mean(1)
        return (self.layer or torch.relu)(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.represented(x))


@pytest.mark.parametrize("kind", ["layer", "function", "attention", "recurrent"])
def test_the_representation_is_the_input_of_the_head_whatever_comes_before(kind: str) -> None:
    net = Written(kind).double()
    if kind == "function":  # which changes nothing of the first sample
        first = federation().fetch(federation().parts["train"].index[:1])
        net.body.bias.data = 0.1 - (first.double() @ net.body.weight.T)[0].detach()
    w = work("loop", net)
    wanted = [net.represented(samples(i)[0]) for i in range(N)]
    rows = vector(net).expand(N, -1)
    torch.testing.assert_close(w.activations(rows), torch.stack([z.mean(0) for z in wanted]).detach())


@pytest.mark.parametrize("method", ["moon", "fedproto", "fedpac", "fedas", "dbe", "pfedfda"])
def test_an_activation_as_a_function_is_that_of_a_layer(method: str) -> None:
    rows, nets = [], [Written("function"), Written("layer")]
    nets[1].load_state_dict(nets[0].state_dict())
    for net in nets:
        local = {"lr": LR, "batch_size": BATCH}
        result = fl.simulate(method, federation(), net, rounds=2, local=local, engine={"dtype": "float64"})
        kinds = result.models.kinds()
        rows.append(result.models.rows("personal" if "personal" in kinds else "global"))
    torch.testing.assert_close(*rows, rtol=1e-12, atol=1e-12)
