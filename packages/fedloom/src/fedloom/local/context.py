"""Context of a round: everything that server functions know."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.local.settings import LocalSGD
from fedloom.rows.layout import Layout
from fedloom.seeds import generator


class Nothing(NamedTuple):
    """State without fields."""


class Ctx(NamedTuple):
    """Information about a round for server functions. It is the same in simulations and deployments.

    Attributes:
        round: number of the round, counted from 1, or 0 in `Algorithm.init`.
        n: number of all clients.
        m: number of clients in the cohort (after uploads have been rejected).
        ids: ids of these clients ``[m]``.
        layout: names and shapes of the model's parameters.
        weight: clients' weights alpha_i in the objective ``[n, 1]``, which sum to 1.
        sizes: each client's number of training samples ``[n, 1]``.
        groups: each client's group ``[n]``, or None if the run defines no groups.
        local: settings of local training.
        seed: seed of the run.
        rounds: number of rounds in the run.
        projection: matrix ``[k, d]`` of a method that works in a subspace, if a run replays it, or None.
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
        """Client weights divided by the largest weight, ``[n, 1]`` float64.

        All of them are exactly 1 if the weights are equal.
        """
        shares = self.weight.double()
        return shares / shares.max()

    @property
    def cohort_masses(self) -> Tensor:
        """Values of `masses` for the clients in the cohort, ``[m, 1]``."""
        return self.weight[self.ids].double() / _largest_share(self.weight)

    @property
    def part(self) -> float:
        """Sum of the weights alpha_i over the cohort, which is m/n if all weights are equal."""
        masses = self.masses
        return float(masses[self.ids].sum() / masses.sum())

    @property
    def reach(self) -> float:
        """Duration of a round of local SGD in gradient-flow time, i.e., step size times mean number of steps.

        With momentum, step i is counted as 1 + ... + momentum^(i-1) steps, which is exact for a constant gradient.
        Dampening and Nesterov momentum are also taken into account. An optimizer that normalizes the gradient moves
        each coordinate by about the step size, no matter how large the gradient is. The length of such a step is
        converted to time as if the gradient had norm 1. Adam's averages can be ignored, because they do not change a
        constant gradient.
        """
        local = self.local
        sizes, counts = (tensor.tolist() for tensor in self.sizes[:, 0].unique(return_counts=True))
        steps = [local.epochs * local.batches(size) if local.steps is None else local.steps for size in sizes]
        lengths = [_momentum_path_length(k, *local.momenta) for k in steps]
        mean: float = sum(length * count for length, count in zip(lengths, counts, strict=True)) / len(self.sizes)
        unit = 1.0 if local.follows_gradient else self.layout.d**0.5
        return local.lr * max(mean, 1.0) * unit

    def rng(self, purpose: str) -> torch.Generator:
        """Return the server's random generator for a purpose in this round."""
        return generator(self.seed, self.round, purpose=("server", purpose))


def _momentum_path_length(steps: int, momentum: float, dampening: float, nesterov: bool) -> float:
    """Return the distance that SGD with momentum covers in ``steps`` steps of size 1 with a constant gradient of 1."""
    rest = 1 - momentum
    length = (steps - momentum * (1 - momentum**steps) / rest) / rest
    if dampening:  # the first gradient is not dampened
        length = (1 - dampening) * length + dampening * (1 - momentum**steps) / rest
    return steps + momentum * length if nesterov else length


@lru_cache(maxsize=2)
def _largest_share(shares: Tensor) -> Tensor:
    """Return the clients' largest weight in double precision.

    The result is cached to avoid computing it in every round.
    """
    return shares.max().double()
