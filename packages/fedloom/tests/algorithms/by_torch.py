"""A small federation of a network for loops that are written from a paper with torch alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedloom as fl
from fedloom.data.federation import Federation
from fedloom.data.order import plan_batches
from fedloom.engine.result import Result
from fedloom.models import ModelSpec
from fedloom.seeds import Purpose, generator

SIZES, CLASSES, ROUNDS, LR, BATCH = (13, 5, 8, 16), 3, 4, 0.3, 4
COHORTS = [[0, 1, 2, 3], [0, 2], [1, 2, 3], [0, 1, 3]]


class Net(ModelSpec):
    """Two linear layers; the input of the second is the representation."""

    def module(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(int(np.prod(shape)), 5), nn.Tanh(), nn.Linear(5, outputs))


@cache
def federation() -> Federation:
    """Clients with `SIZES` samples; the second lacks a class."""
    rng = np.random.default_rng(4)
    y = np.concatenate([rng.integers(0, 2 if i == 1 else CLASSES, size) for i, size in enumerate(SIZES)])
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    x = rng.normal(size=(len(y), 6)) + np.eye(CLASSES, 6)[y] + 0.5 * owner[:, None]
    data = fl.Dataset.create(x.astype(np.float32), y, clients=owner)
    return fl.partitions.natural(validation=0.0, test=0.0)(data, seed=0).to(dtype=torch.float64)


def run(
    method: Any,
    rounds: int = ROUNDS,
    cohorts: Any = COHORTS,
    mixture: int | None = None,
    guided: bool = False,
    memory: int | None = None,
    **options: Any,
) -> Result:
    """The method in fedloom, float64."""
    model = Net(mixture=mixture, guided=guided, memory=memory)
    settings = {"local": {"lr": LR, "batch_size": BATCH}, "engine": {"dtype": "float64"}, "cohorts": cohorts[:rounds]}
    evaluate = {"every": rounds, "parts": ("train",)}
    given = {
        **settings,
        "evaluate": evaluate,
        "initial": dict(network(mixture, guided, memory).named_parameters()),
        **options,
    }
    return fl.simulate(method, federation(), model, rounds=rounds, **given)


def network(mixture: int | None = None, guided: bool = False, memory: int | None = None) -> nn.Module:
    """The initial model."""
    return Net(mixture=mixture, guided=guided, memory=memory).build((6,), CLASSES, 3).double()


def samples(i: int) -> tuple[Tensor, Tensor]:
    """Training samples of a client."""
    index = federation().indices("train", i)
    return federation().fetch(index), federation().data.y[index]


def batches(round: int, i: int, passes: int = 1, stream: Purpose = "local") -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of ``passes`` epochs of a client in a round."""
    x, y = samples(i)
    steps = passes * -(-len(y) // BATCH)
    for position in plan_batches(len(y), BATCH, steps, generator(0, round, i, stream)):
        chosen = position[position >= 0]
        yield x[chosen], y[chosen]


def trained(
    net: nn.Module, round: int, i: int, passes: int = 1, stream: Purpose = "local", lr: float = LR
) -> nn.Module:
    """A copy of the network after plain SGD on the cross-entropy."""
    own = copy.deepcopy(net)
    optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr)
    for x, y in batches(round, i, passes, stream):
        optimizer.zero_grad()
        cross_entropy(own(x), y).backward()
        optimizer.step()
    return own


def vector(net: nn.Module) -> Tensor:
    """Parameters in one row."""
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def put(net: nn.Module, row: Tensor) -> nn.Module:
    """A copy of the network with other parameters."""
    own = copy.deepcopy(net)
    nn.utils.vector_to_parameters(row.clone(), own.parameters())
    return own


def mean(rows: Sequence[Tensor], cohort: Sequence[int]) -> Tensor:
    """The cohort's mean by samples."""
    share = torch.tensor([SIZES[i] for i in cohort], dtype=torch.float64)
    return (share / share.sum()) @ torch.stack(list(rows))


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
