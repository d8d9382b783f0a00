"""Context of a round on the server's side."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.local.settings import LocalSGD
from fedloom.rows.layout import Layout
from fedloom.seeds import generator


class Nothing(NamedTuple):
    """A state without fields."""


class Ctx(NamedTuple):
    """What the server's functions know about a round. It is the same in simulations and in deployments.

    Attributes:
        round: round number, from 1, or 0 in `Algorithm.init`.
        n: all clients.
        m: number of clients in the (accepted) cohort.
        ids: ids of these clients ``[m]``.
        layout: shapes of the model.
        weight: clients' shares alpha_i ``[n, 1]``, which sum to 1 over all clients.
        sizes: number of training samples of each client ``[n, 1]``.
        groups: group of each client ``[n]``, if the run defines groups.
        local: settings of local training.
        seed: seed of the run.
        rounds: number of rounds of the run.
        projection: matrix of a subspace method ``[k, d]``, if a run replays it.
    """

    round: int
    n: int
    m: int
    ids: Tensor
    layout: Layout
    weight: Tensor
    sizes: Tensor
    groups: Tensor | None
    local: LocalSGD
    seed: int
    rounds: int
    projection: Tensor | None = None

    @property
    def masses(self) -> Tensor:
        """Clients' shares divided by the largest share, ``[n, 1]`` float64.

        They are exactly 1 if all shares are equal.
        """
        shares = self.weight.double()
        return shares / shares.max()

    @property
    def cohort_masses(self) -> Tensor:
        """Values of `masses` for the cohort, ``[m, 1]``."""
        return self.weight[self.ids].double() / _largest(self.weight)

    @property
    def part(self) -> float:
        """Cohort's part of all shares, which is the sum of alpha_i over ``ids``: m/n if the shares are equal."""
        masses = self.masses
        return float(masses[self.ids].sum() / masses.sum())

    @property
    def reach(self) -> float:
        """Return the length of a round's local SGD in gradient-flow time: step size times mean number of steps.

        With momentum, the i-th step counts 1 + ... + momentum^(i-1), as on a constant gradient. Dampening and
        Nesterov's step are also taken into account. Other optimizers move each coordinate by the step size, whatever
        the gradient is. This counts like a gradient of norm one. Adam's averages do not change a constant gradient.
        """
        local = self.local
        sizes, counts = (tensor.tolist() for tensor in self.sizes[:, 0].unique(return_counts=True))
        steps = [local.epochs * local.batches(size) if local.steps is None else local.steps for size in sizes]
        lengths = [_length(k, *local.momenta) for k in steps]
        mean: float = sum(length * count for length, count in zip(lengths, counts, strict=True)) / len(self.sizes)
        unit = 1.0 if local.follows_gradient else self.layout.d**0.5
        return local.lr * max(mean, 1.0) * unit

    def rng(self, purpose: str) -> torch.Generator:
        """Return the server's generator for this round."""
        return generator(self.seed, self.round, purpose=("server", purpose))


def _length(steps: int, momentum: float, dampening: float, nesterov: bool) -> float:
    """Return the displacement that momentum steps cause on a constant gradient of one, at step size 1."""
    rest = 1 - momentum
    length = (steps - momentum * (1 - momentum**steps) / rest) / rest
    if dampening:  # the first gradient is not dampened
        length = (1 - dampening) * length + dampening * (1 - momentum**steps) / rest
    return steps + momentum * length if nesterov else length


@lru_cache(maxsize=2)
def _largest(shares: Tensor) -> Tensor:
    """Return the largest share of all clients in double precision. It is computed once, and not in every round."""
    return shares.max().double()
