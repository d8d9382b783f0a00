"""Stateless samplers: uniform, Bernoulli, size-weighted and round-robin."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedloom.choose.samplers._base import Sampler, SizedSampler, draw, draw_distinct, masses
from fedloom.local import Ctx, Nothing


class Uniform(SizedSampler):
    """Sampler that draws a fixed number of clients uniformly without replacement (McMahan et al. 2017, Alg. 1)."""

    kind: ClassVar[str] = "uniform"

    def apply(self, state: Nothing, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Nothing]:
        """Draw m of the n clients."""
        m = self.size(ctx.n)
        return draw_distinct(ctx.n, m, ctx.rng("cohort")).sort().values, state


class Bernoulli(Sampler):
    """Sampler that includes every client independently with the same probability.

    If no client is included, one client is drawn uniformly.
    """

    kind: ClassVar[str] = "bernoulli"
    probability: float = Field(0.5, gt=0, le=1, description="probability that a client takes part in a round")

    def apply(self, state: Nothing, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Nothing]:
        """Draw the clients. If no client is drawn, draw one."""
        g = ctx.rng("cohort")
        present = torch.rand(ctx.n, generator=g, dtype=torch.float64) < self.probability
        if not bool(present.any()):
            present[torch.randint(ctx.n, (1,), generator=g)] = True
        return present.nonzero()[:, 0], state


class SizeWeighted(SizedSampler):
    """Sampler that draws clients with probabilities p_i = n_i / n. The drawn clients have equal weights.

    References: T. Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx), MLSys 2020, Algorithm 2. X.
    Li et al., "On the Convergence of FedAvg on Non-IID Data", ICLR 2020, Scheme I (unbiased, with replacement).

    With replacement, a client may be drawn more than once. The client then trains once, and its share in the mean is
    multiplied by the number of draws. In sums that a method accumulates over rounds or stores for each client, as
    FedDyn and FLAME do, the client is counted once.
    """

    kind: ClassVar[str] = "size-weighted"
    replacement: bool = Field(
        True,
        description="draw clients with replacement (Scheme I). Without replacement, large clients are underweighted",
    )

    @property
    def repeats(self) -> bool:
        """True if clients are drawn with replacement."""
        return self.replacement

    @property
    def by_samples(self) -> bool:
        """Always True."""
        return True

    def smallest(self, n: int) -> int | None:
        """Return None if clients are drawn with replacement, because the number of distinct clients then varies."""
        return None if self.replacement else self.size(n)

    def apply(self, state: Nothing, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Nothing]:
        """Draw m clients."""
        p, g = masses(ctx, "samples"), ctx.rng("cohort")
        return draw(p, self.size(ctx.n), g, replacement=self.replacement).sort().values, state


class RoundRobin(SizedSampler):
    """Sampler that takes clients in turn by id, so all clients train equally often in n rounds."""

    kind: ClassVar[str] = "round-robin"

    def apply(self, state: Nothing, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Nothing]:
        """Return the m clients that follow those of the previous round."""
        m = self.size(ctx.n)
        return ((torch.arange(m) + (ctx.round - 1) * m) % ctx.n).sort().values, state
