"""Parts that a user wrote: one of every kind that an experiment file can name by import path."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fedloom.algorithms import Algorithm, FedAvg, Mean
from fedloom.choose import Sampler, UniformWeigher, Weigher
from fedloom.data.partitions._base import Sized
from fedloom.data.partitions.deal import Dealt
from fedloom.data.partitions.pools import Draw, Pool
from fedloom.local import Ctx, Nothing, Work, descend
from fedloom.rows.aggregators import Aggregator
from fedloom.rows.attacks import Forgery
from fedloom.rows.channels import Channel, Clip
from fedloom.values import Value


class State(NamedTuple):
    x: Tensor


class Up(NamedTuple):
    dw: Annotated[Tensor, Mean(base="down.x", primary=True)]


class Pulled(Algorithm):
    """Pulled: FedProx by a user.

    Use it to see that user code runs.
    """

    mu: float = Field(0.5, ge=0, description="weight of the pull")

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[State, Nothing, None]:
        return State(x0), Nothing(), None

    def down(self, server: State, kept: None, ctx: Ctx) -> State:
        return State(server.x)

    def client(self, down: State, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        return Up(descend(down.x, work, pull=((self.mu, down.x),)) - down.x), rows

    def server(self, server: State, up: Up, ctx: Ctx) -> State:
        return State(server.x + up.dw)

    def global_model(self, server: State) -> Tensor:
        return server.x


class Unfinished(FedAvg):
    """Fine: it is a whole method."""


class Lacking(Algorithm):
    """Lacks everything."""


class Stripes(Sized):
    """Sample k goes to client k mod n."""

    offset: int = Field(0, ge=0, description="client of the first sample")

    def draw(self, pool: Pool, seed: int) -> Draw:
        self.fits(pool)
        owner = (np.arange(len(pool)) + self.offset) % self.clients
        order = np.argsort(owner, kind="stable")
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=self.clients))])
        return Draw(Dealt(pool.index[order], offsets))


class First(Sampler):
    """The first clients, always."""

    clients: int = Field(3, ge=1, description="how many")

    def apply(self, state: Nothing, info: None, ctx: Ctx) -> tuple[Tensor, Nothing]:
        return ctx.ids[: self.clients], state


class Squares(Weigher):
    """A client counts by the square of its samples."""

    def apply(self, state: Nothing, info: None, ctx: Ctx) -> tuple[Tensor, Nothing]:
        return ctx.sizes[ctx.ids].double() ** 2, state


class Quiet(UniformWeigher):
    """Another name for what there is."""


class Middle(Aggregator):
    """The coordinate-wise median, again."""

    def combine(self, state, rows, weights, primary, ctx):  # type: ignore[no-untyped-def]
        return {name: r.median(0).values for name, r in rows.items()}, state


class Zeros(Forgery):
    """Attackers send nothing."""

    def forge(self, honest, base, own, m, gens):  # type: ignore[no-untyped-def]
        return torch.zeros_like(own)


class Halved(Clip):
    """Clips, by a user."""


class Scaled(Value):
    """c ||x||^2 / 2 by a user: a function with a prox."""

    c: float = Field(0.1, ge=0, description="its weight")
    convex: bool = True

    def f(self, x: Tensor, layout: object = None) -> Tensor:
        return self.c / 2 * x.square().sum(-1, keepdim=x.dim() > 1)

    def prox(self, v: Tensor, t: float, layout: object = None) -> Tensor:
        return v / (1 + self.c * t)


def small(shape: tuple[int, ...], outputs: int, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), width), nn.ReLU(), nn.Linear(width, outputs))


def squared(output: Tensor, target: Tensor) -> Tensor:
    """Squared distance of the outputs to the indicator of the class."""
    return (output - nn.functional.one_hot(target, output.shape[1])).square().mean()


def margin(output: Tensor, target: Tensor) -> float:
    """Mean lead of the target's output over the best other one."""
    own = output.gather(1, target[:, None])[:, 0]
    return float((own - output.scatter(1, target[:, None], -torch.inf).amax(1)).mean())


def wrong(output: Tensor, target: Tensor) -> float:
    return float((output.argmax(1) != target).double().mean())


wrong.higher_is_better = False  # type: ignore[attr-defined]


class Signs(torch.optim.Optimizer):
    """Steps along the sign of the gradient, of which it remembers the mean."""

    def __init__(self, params, lr, beta=0.9):  # type: ignore[no-untyped-def]
        super().__init__(params, {"lr": lr, "beta": beta})

    def step(self):  # type: ignore[no-untyped-def]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["beta"])
                p.add_(mean.sign(), alpha=-group["lr"])


__all__ = ["Channel", "Halved", "Lacking", "Pulled", "Scaled", "Stripes", "Unfinished", "Zeros", "small"]
