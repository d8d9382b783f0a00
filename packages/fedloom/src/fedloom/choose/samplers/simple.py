"""Stateless samplers: uniform, Bernoulli, size-weighted, and in turn."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedloom.choose.samplers._base import Sampler, SizedSampler, draw, draw_distinct, masses
from fedloom.local import Ctx, Nothing


class Uniform(SizedSampler):
    """A fixed number of clients, drawn uniformly without replacement (McMahan et al. 2017, Algorithm 1)."""

    kind: ClassVar[str] = "uniform"

    def apply(self, state: Nothing, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Nothing]:
        """Draw m of n clients."""
        m = self.size(ctx.n)
        return draw_distinct(ctx.n, m, ctx.rng("cohort")).sort().values, state


class Bernoulli(Sampler):
    """Includes every client independently with the same probability.

    An empty cohort is replaced by one client drawn uniformly.
    """

    kind: ClassVar[str] = "bernoulli"
    probability: float = Field(0.5, gt=0, le=1, description="probability that a client takes part in a round")

    def apply(self, state: Nothing, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Nothing]:
        """Draw the clients, at least one."""
        g = ctx.rng("cohort")
        present = torch.rand(ctx.n, generator=g, dtype=torch.float64) < self.probability
        if not bool(present.any()):
            present[torch.randint(ctx.n, (1,), generator=g)] = True
        return present.nonzero()[:, 0], state


class SizeWeighted(SizedSampler):
    """Clients drawn with probabilities p_i = n_i / n and averaged uniformly.

    References: T. Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx), MLSys 2020, Algorithm 2. X.
    Li et al., "On the Convergence of FedAvg on Non-IID Data", ICLR 2020, Scheme I (with replacement: unbiased).

    With replacement a client may be drawn more than once. The client then trains once, and its share of the mean is
    multiplied by the number of draws. Sums that a method accumulates over rounds or stores per client, as FedDyn and
    FLAME do, count the client once.
    """

    kind: ClassVar[str] = "size-weighted"
    replacement: bool = Field(
        True, description="draw clients with replacement (Scheme I). Without replacement, large clients count less"
    )

    @property
    def repeats(self) -> bool:
        """True with replacement, because a client may then be drawn twice."""
        return self.replacement

    @property
    def by_samples(self) -> bool:
        """Always."""
        return True

    def smallest(self, n: int) -> int | None:
        """Return None with replacement, because a client may then be drawn twice."""
        return None if self.replacement else self.size(n)

    def apply(self, state: Nothing, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Nothing]:
        """m draws."""
        p, g = masses(ctx, "samples"), ctx.rng("cohort")
        return draw(p, self.size(ctx.n), g, replacement=self.replacement).sort().values, state


class RoundRobin(SizedSampler):
    """Draws clients in turn, by id, so that after n rounds all clients have trained equally often."""

    kind: ClassVar[str] = "round-robin"

    def apply(self, state: Nothing, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Nothing]:
        """Return the m clients that follow the previous round's clients."""
        m = self.size(ctx.n)
        return ((torch.arange(m) + (ctx.round - 1) * m) % ctx.n).sort().values, state
